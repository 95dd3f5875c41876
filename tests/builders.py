"""Tiny models, tokenizers and sounds for all tests; nothing is downloaded."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import open_clip_folders
import torch
from audio_encoders import make_encoder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertTokenizer,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapProcessor,
    GPT2Tokenizer,
    M2M100Config,
    NllbTokenizer,
    PreTrainedConfig,
    RobertaTokenizer,
)

from modeling_supclap import (
    CEDConfig,
    CEDFeatureExtractor,
    CNN14Config,
    MSCLAPFeatureExtractor,
    SupCLAPConfig,
    SupCLAPModel,
    SupCLAPProcessor,
    SupCLAPTrainingArguments,
)
from modeling_supclap.conversion import processor_from_clap, supclap_from_clap

RATE_HZ = 16000
CED_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 192, "num_heads": 3},
    "mini": {"embed_dim": 256, "num_heads": 4},
    "small": {"embed_dim": 384, "num_heads": 6},
    "base": {"embed_dim": 768, "num_heads": 12},
}
"""Table 1 of CED (Dinkel et al., 2023, arXiv 2308.11957)."""
CAPTIONS = {
    "eng": "a dog barks while the rain falls",
    "fra": "un chien aboie pendant que la pluie tombe",
    "deu": "ein Hund bellt während der Regen fällt",
    "spa": "un perro ladra mientras cae la lluvia",
    "nld": "een hond blaft terwijl de regen valt",
    "cat": "un gos borda mentre cau la pluja",
    "jpn": "雨が降る中で犬が吠える",
    "zho": "下雨时一只狗在叫",
}
# Fields of the config.json of mispeech/ced-tiny, with labels replaced by numbers.
PUBLISHED_CED_CONFIG = {
    "architectures": ["CedForAudioClassification"],
    "attn_drop_rate": 0.0,
    "auto_map": {"AutoConfig": "configuration_ced.CedConfig", "AutoModel": "modeling_ced.CedModel"},
    "center": True,
    "depth": 12,
    "drop_path_rate": 0.0,
    "drop_rate": 0.0,
    "embed_dim": 192,
    "eval_avg": "mean",
    "f_max": 8000,
    "f_min": 0,
    "hop_size": 160,
    "id2label": {str(index): f"label {index}" for index in range(527)},
    "label2id": {f"label {index}": index for index in range(527)},
    "loss": "BCE",
    "mlp_ratio": 4.0,
    "model_type": "ced",
    "n_fft": 512,
    "n_mels": 64,
    "name": "ced-tiny",
    "num_heads": 3,
    "outputdim": 527,
    "pad_last": True,
    "patch_size": 16,
    "patch_stride": 16,
    "pooling": "mean",
    "qkv_bias": True,
    "target_length": 1012,
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "win_size": 512,
}
LANGUAGE_CODES = [
    "cat_Latn",
    "deu_Latn",
    "eng_Latn",
    "fra_Latn",
    "jpn_Jpan",
    "nld_Latn",
    "por_Latn",
    "spa_Latn",
    "zho_Hans",
]


def noise(samples: int, seed: int = 0) -> np.ndarray:
    """Return white noise, float32, without clipping."""
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def tone(frequency_hz: float, samples: int = RATE_HZ) -> np.ndarray:
    """Return a full-scale sine, float32."""
    return np.sin(2 * np.pi * frequency_hz * np.arange(samples) / RATE_HZ).astype(np.float32)


def filler(shape: tuple[int, ...], index: int) -> torch.Tensor:
    """Return the inputs of the golden values: frac(sin(12.9898 (n + 1) + 78.233 index) 43758.5453) - 0.5."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    values = torch.sin(12.9898 * (n + 1) + 78.233 * index) * 43758.5453
    return (values - values.floor() - 0.5).reshape(shape)


def unit_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random rows of unit norm, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def related_pair(n: int = 5, d: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Return audio (n, d) and texts near it, both of unit norm, float64."""
    audio = unit_rows(n, d)
    return audio, torch.nn.functional.normalize(audio + 0.6 * unit_rows(n, d, seed=1), dim=-1)


def fill(model: torch.nn.Module, scale: float) -> None:
    """Set all floating-point tensors of a model, in the order of their names, to the golden values."""
    state = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    for index, name in enumerate(sorted(state)):
        value = scale * filler(tuple(state[name].shape), index)
        if name.endswith("running_var"):
            value = 100 + 1000 * value
        elif name.endswith("running_mean"):
            value = -30 + 100 * value
        elif value.ndim == 1 and name.endswith(".weight"):
            value = 1 + value
        state[name].copy_(value)


def bert_tokenizer() -> BertTokenizer:
    """Build a WordPiece tokenizer with the words of `CAPTIONS`; a trained tokenizer would differ between processes."""
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    texts = [normalizer.normalize_str(caption) for caption in CAPTIONS.values()]
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return BertTokenizer(vocab={token: index for index, token in enumerate(special + words)}, model_max_length=64)


def train_pairs(tokenizer: Tokenizer, **kwargs) -> tuple[dict[str, int], Any]:
    """Train byte pairs on `CAPTIONS`; return the vocabulary and the merges."""
    tokenizer.train_from_iterator(CAPTIONS.values(), trainers.BpeTrainer(**kwargs, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def gpt2_tokenizer() -> GPT2Tokenizer:
    """Build a byte-level tokenizer like that of GPT-2; "!" has id 0, <|endoftext|> the last id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = train_pairs(tokenizer, vocab_size=299, initial_alphabet=alphabet)
    return GPT2Tokenizer(vocab={**vocab, "<|endoftext|>": len(vocab)}, merges=merges)


def nllb_tokenizer() -> NllbTokenizer:
    """Build an NLLB tokenizer with nine languages and no length limit, as on the Hub."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab, merges = train_pairs(tokenizer, vocab_size=300, special_tokens=special)
    return NllbTokenizer(vocab=vocab, merges=merges, extra_special_tokens=LANGUAGE_CODES, src_lang="eng_Latn")


def ced_config(**kwargs) -> CEDConfig:
    """Return a CED configuration with two blocks of width 32."""
    return CEDConfig(**{"embed_dim": 32, "depth": 2, "num_heads": 2, **kwargs})


def bert_config(**kwargs) -> dict[str, Any]:
    """Return a BERT configuration as a dictionary: two layers of width 24, no dropout."""
    sizes = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {"model_type": "bert", **sizes, **quiet, **kwargs}


def sonar_config(**kwargs) -> M2M100Config:
    """Return a SONAR configuration with two layers of width 24, no dropout."""
    sizes = {
        "vocab_size": 400,
        "d_model": 24,
        "encoder_layers": 2,
        "encoder_ffn_dim": 48,
        "encoder_attention_heads": 2,
    }
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "encoder_layerdrop": 0.0}
    return M2M100Config(**{**sizes, **quiet, **kwargs})


def supclap_config(
    text: dict[str, Any] | PreTrainedConfig | None = None, audio: PreTrainedConfig | None = None, **kwargs
) -> SupCLAPConfig:
    """Return a configuration with tiny towers, CED and BERT by default, and 16 shared dimensions."""
    return SupCLAPConfig(
        audio_config=audio or ced_config(), text_config=text or bert_config(), **{"projection_dim": 16, **kwargs}
    )


def supclap_model(config: SupCLAPConfig | None = None, seed: int = 0) -> SupCLAPModel:
    """Build a model in evaluation mode with batch norm statistics of decibels."""
    torch.manual_seed(seed)
    model = SupCLAPModel(config or supclap_config()).eval()
    model.audio_model.init_bn.running_mean.fill_(-40.0)
    model.audio_model.init_bn.running_var.fill_(400.0)
    return model


def pair(kind: str = "supclap") -> tuple[Any, Any]:
    """Return a model and its processor.

    Kinds: CED with BERT ("supclap") or SONAR ("sonar"), CNN14 or Whisper with BERT ("cnn14", "whisper"), CLAP2
        ("clap2"), a `ClapModel` ("clap", "fused"), or a CLAP that is converted to our model ("converted").
    """
    if kind == "converted":
        return supclap_from_clap(clap_model()), processor_from_clap(clap_processor())
    if kind in ("clap", "fused"):
        model = clap_model(clap_config({"enable_fusion": kind == "fused"}))
        return model, clap_processor("fusion" if kind == "fused" else "rand_trunc")
    if kind == "sonar":
        return supclap_model(supclap_config(sonar_config())), nllb_processor()
    if kind == "clap2":
        return open_clip_folders.build("A")
    if kind == "whisper":
        encoder, extractor = make_encoder("whisper")
        model = SupCLAPModel(supclap_config(audio=encoder.config)).eval()
        return model, SupCLAPProcessor(extractor, bert_tokenizer())
    if kind == "cnn14":
        towers: dict[str, Any] = {"hidden_size": 16, "channels": [4, 8], "dropout": 0.0, "embedding_dropout": 0.0}
        model = SupCLAPModel(supclap_config(audio=CNN14Config(**towers))).eval()
        front_end: dict[str, Any] = {
            "filter_rate_hz": None,
            "sampling_rate": RATE_HZ,
            "frequency_max": 8000,
            "hop_length": 160,
        }
        return model, SupCLAPProcessor(MSCLAPFeatureExtractor(**front_end, max_length_s=1), bert_tokenizer())
    return supclap_model(), bert_processor()


def save_pair(kind: str, folder: Path) -> tuple[Any, Any]:
    """Save a `pair` in one folder, and return it."""
    model, processor = pair(kind)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def save_supclap(folder: Path, seed: int = 0) -> Path:
    """Save `supclap_model` with its processor, and return the folder."""
    supclap_model(seed=seed).save_pretrained(folder)
    bert_processor().save_pretrained(folder)
    return folder


def save_clap(folder: Path) -> Path:
    """Save `clap_model` with its processor, and return the folder."""
    save_pair("clap", folder)
    return folder


def training_args(folder: Path | str, **kwargs) -> SupCLAPTrainingArguments:
    """Return arguments for a CPU run on English captions in batches of four, without logs or checkpoints."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "no"}
    small = {"load_best_model_at_end": False, "per_device_train_batch_size": 4, "languages": ["eng"]}
    return SupCLAPTrainingArguments(output_dir=str(folder), **{**quiet, **small, **kwargs})


def bert_processor() -> SupCLAPProcessor:
    """Return CED's feature extractor with the WordPiece tokenizer."""
    return SupCLAPProcessor(CEDFeatureExtractor(), bert_tokenizer())


def nllb_processor() -> SupCLAPProcessor:
    """Return CED's feature extractor with the NLLB tokenizer."""
    return SupCLAPProcessor(CEDFeatureExtractor(), nllb_tokenizer())


def clap_config(audio: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> Any:
    """Return a tiny CLAP: stages of 1, 1, 2 and 2 blocks, two text layers, no dropout, 16 shared dimensions."""
    stages = {"depths": [1, 1, 2, 2], "num_attention_heads": [1, 2, 2, 2], "patch_embeds_hidden_size": 4}
    front_end = {"num_mel_bins": 32, "spec_size": 64, "window_size": 2}
    audio = {**stages, **front_end, "hidden_size": 32, "hidden_dropout_prob": 0.0, **(audio or {})}
    sizes = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {**sizes, **quiet, "max_position_embeddings": 66, **(text or {})}
    return ClapConfig(audio_config=audio, text_config=text, projection_dim=16)


def clap_model(config: ClapConfig | None = None, seed: int = 0) -> ClapModel:
    """Build a `ClapModel` in evaluation mode with batch norm statistics of decibels and two different scales."""
    torch.manual_seed(seed)
    model = ClapModel(config or clap_config()).eval()
    model.audio_model.audio_encoder.batch_norm.running_mean.fill_(-40.0)
    model.audio_model.audio_encoder.batch_norm.running_var.fill_(400.0)
    torch.nn.init.constant_(model.logit_scale_t, 2.0)
    return model


def clap_processor(truncation: str = "rand_trunc") -> ClapProcessor:
    """Return CLAP's feature extractor for one second at 16 kHz, and a byte-level tokenizer trained on `CAPTIONS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocab, merges = train_pairs(tokenizer, vocab_size=290, special_tokens=special)
    extractor = ClapFeatureExtractor(
        feature_size=32,
        sampling_rate=RATE_HZ,
        hop_length=160,
        fft_window_size=512,
        max_length_s=1,
        frequency_max=8000,
        truncation=truncation,
    )
    return ClapProcessor(extractor, RobertaTokenizer(vocab=vocab, merges=merges, model_max_length=64))
