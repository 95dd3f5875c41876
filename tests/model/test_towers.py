"""Pairs of audio and text towers: loading from folders, padding, saving, training and languages."""

from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from audio_encoders import ENCODERS, make_encoder, save_encoder
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertModel,
    ClapAudioModel,
    ClapFeatureExtractor,
    CLIPTextConfig,
    DistilBertConfig,
    DistilBertModel,
    FNetConfig,
    GPT2Config,
    GPT2Model,
    LayoutLMConfig,
    LongformerConfig,
    LukeConfig,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    T5Config,
    ViTConfig,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

from modeling_supclap import (
    CEDFeatureExtractor,
    CEDModel,
    CNN14Config,
    CNN14Model,
    ModernTextConfig,
    ModernTextModel,
    MSCLAPFeatureExtractor,
    NaFlexConfig,
    NaFlexModel,
    SonarTextModel,
    SupCLAPModel,
    SupCLAPProcessor,
)
from modeling_supclap.towers import check_audio_config, check_text_config
from modeling_supclap.training.checks import idle_parameters
from modeling_supclap.training.contrastive_module import ContrastiveModule

# Lengths below, equal to and above a chunk of CED (10.12 s); below and above the limit of the other extractors (1 s).
SHORT = [4000, 9000, 16000, 40000]
SAMPLES = {"ced": [4000, 16000, 161_760, 200_000]}
TEXTS, LANGUAGES = list(builders.CAPTIONS.values()), list(builders.CAPTIONS)
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT_LIKE: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ROBERTA_LIKE: dict[str, Any] = {**BERT_LIKE, "max_position_embeddings": 70, "type_vocab_size": 1, "pad_token_id": 1}
DISTIL: dict[str, Any] = {"vocab_size": 300, "dim": 24, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
AUDIO = ["ced", "htsat", "cnn14", "naflex"]
TEXT = ["bert", "labse", "xlmr", "distilbert", "modernbert", "mpnet", "sonar", "modern"]
# Each encoder once. The towers of a pair do not depend on each other.
PAIRS = [*(("ced", text) for text in TEXT), ("htsat", "sonar"), ("cnn14", "xlmr"), ("naflex", "bert")]
PAIRS += [(audio, "bert") for audio in ENCODERS]


def save_audio_encoder(name: str, folder: Path) -> None:
    """Save a tiny audio encoder with its feature extractor, in the layout of published encoders."""
    torch.manual_seed(3)
    if name == "ced":
        model: Any = CEDModel(builders.ced_config())
        model.init_bn.running_mean.fill_(-40.0)
        model.init_bn.running_var.fill_(400.0)
        extractor: Any = CEDFeatureExtractor()
    elif name == "cnn14":
        model = CNN14Model(CNN14Config(hidden_size=16, channels=[4, 8], dropout=0.0, embedding_dropout=0.0))
        model.bn0.running_mean.fill_(-40.0)
        model.bn0.running_var.fill_(400.0)
        rates: dict[str, Any] = {"filter_rate_hz": None, "sampling_rate": 16000, "frequency_max": 8000}
        extractor = MSCLAPFeatureExtractor(**rates, max_length_s=1, hop_length=160)
    elif name == "naflex":
        grid: dict[str, Any] = {"patch_freq": 16, "patch_time": 10, "reg_tokens": 1, "init_values": 0.5}
        model = NaFlexModel(NaFlexConfig(embed_dim=16, depth=2, num_heads=2, pre_norm=True, attn_gated=True, **grid))
        extractor = CEDFeatureExtractor(min_frames=1)
    else:
        model = ClapAudioModel(builders.clap_config().audio_config)
        model.audio_encoder.batch_norm.running_mean.fill_(-40.0)
        model.audio_encoder.batch_norm.running_var.fill_(400.0)
        extractor = builders.clap_processor().feature_extractor
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)


def text_encoder(name: str):
    """Return a tiny text encoder with its tokenizer."""
    torch.manual_seed(4)
    if name == "sonar":
        return M2M100Encoder(builders.sonar_config()), builders.nllb_tokenizer()
    if name == "xlmr":
        return XLMRobertaModel(XLMRobertaConfig(**ROBERTA_LIKE)), builders.clap_processor().tokenizer
    if name == "modern":
        ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
        config = ModernTextConfig(**SIZES, **ids, qk_norm=True, attn_gated=True, value_residual=True)
        return ModernTextModel(config), builders.bert_tokenizer()
    model = {
        "bert": lambda: BertModel(BertConfig(**BERT_LIKE)),
        # LaBSE is a BERT with the output of its pooler as sentence embedding.
        "labse": lambda: BertModel(BertConfig(**BERT_LIKE)),
        "distilbert": lambda: DistilBertModel(DistilBertConfig(**DISTIL, dropout=0.0, attention_dropout=0.0)),
        "modernbert": lambda: ModernBertModel(
            ModernBertConfig(**SIZES, intermediate_size=48, pad_token_id=0, cls_token_id=2, sep_token_id=3)
        ),
        "mpnet": lambda: MPNetModel(MPNetConfig(**BERT_LIKE, pad_token_id=0)),
    }[name]()
    return model, builders.bert_tokenizer()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[str, str]:
    """Folders of the encoders, by name."""
    root = tmp_path_factory.mktemp("encoders")
    for name in AUDIO:
        save_audio_encoder(name, root / name)
    for name in ENCODERS:
        save_encoder(name, root / name)
    for name in TEXT:
        for part in text_encoder(name):
            part.save_pretrained(root / name)
    return {name: str(root / name) for name in (*AUDIO, *ENCODERS, *TEXT)}


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request, encoders):
    """Names of two encoders, and the model and processor that combine them."""
    audio, text = request.param
    model = SupCLAPModel.from_encoders(
        encoders[audio],
        encoders[text],
        projection_dim=16,
        text_pooling="pooler" if text in ("labse", "modern") else "mean",
    )
    return audio, text, model, SupCLAPProcessor.from_encoders(encoders[audio], encoders[text])


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory) -> Path:
    """Folder with the model and the processor of `pair`."""
    folder = tmp_path_factory.mktemp("saved")
    for part in pair[2:]:
        part.save_pretrained(folder)
    return folder


def clips(audio: str) -> list[np.ndarray]:
    return [builders.noise(samples, seed) for seed, samples in enumerate(SAMPLES.get(audio, SHORT))]


def call(audio: str, **kwargs) -> dict[str, Any]:
    return {
        "audio": clips(audio),
        "sampling_rate": 16000,
        "text": TEXTS,
        "language": LANGUAGES,
        "return_tensors": "pt",
        **kwargs,
    }


@torch.no_grad()
def test_mixed_languages_and_lengths_in_one_call(pair):
    audio, text, model, processor = pair
    outputs = model(**processor(**call(audio)))
    assert outputs.logits_per_audio.shape == (4, 8)
    assert isinstance(model.text_model, SonarTextModel) == (text == "sonar")
    for embeds in (outputs.audio_embeds, outputs.text_embeds):
        torch.testing.assert_close(embeds.norm(dim=1), torch.ones(len(embeds)))
        assert torch.pdist(embeds).min() > 1e-4


@torch.no_grad()
def test_nothing_depends_on_batch_mates(pair):
    audio, _, model, processor = pair
    together = model(**processor(**call(audio)))
    for index, clip in enumerate(clips(audio)):
        inputs = processor(audio=[clip], sampling_rate=16000, return_tensors="pt")
        alone = model.get_audio_features(**inputs).pooler_output[0]
        torch.testing.assert_close(alone, together.audio_embeds[index], atol=1e-5, rtol=0)
    for index, (caption, language) in enumerate(zip(TEXTS, LANGUAGES, strict=True)):
        inputs = processor(text=caption, language=language, return_tensors="pt")
        alone = model.get_text_features(**inputs).pooler_output[0]
        torch.testing.assert_close(alone, together.text_embeds[index], atol=1e-5, rtol=0)


@torch.no_grad()
def test_chunks_of_training_change_no_embedding(pair):
    audio, _, model, processor = pair
    inputs = dict(processor(**call(audio, text=TEXTS[:4], language=LANGUAGES[:4])))
    expected = model(**inputs).audio_embeds
    for name in inputs.keys() & {"input_ids", "attention_mask", "token_type_ids"}:
        inputs[name] = inputs[name].unsqueeze(1)  # (B, L) -> (B, 1, L)
    for chunk_size in (None, 2):
        module = ContrastiveModule(model, torch.nn.Module(), chunk_size).eval()
        torch.testing.assert_close(module(**inputs).audio_embeds, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_saving_and_loading_changes_nothing(pair, saved):
    audio, _, model, processor = pair
    inputs = processor(**call(audio))
    again = SupCLAPProcessor.from_pretrained(saved)(**call(audio))
    assert set(again) == set(inputs)
    for name, value in inputs.items():
        assert torch.equal(again[name], value), name
    loaded = SupCLAPModel.from_pretrained(saved)
    assert torch.equal(loaded(**again).logits_per_audio, model(**inputs).logits_per_audio)


def test_gradient_reaches_every_weight_of_both_towers(pair):
    audio, _, model, processor = pair
    inputs = processor(**call(audio, text=TEXTS[:4], language=LANGUAGES[:4]))
    model.zero_grad(set_to_none=True)
    model.train()(**inputs, return_loss=True).loss.backward()
    model.eval()
    still = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    # The mask embedding of SpecAugment, which is off, and Whisper's sinusoidal positions.
    assert not [name for name in still if not name.endswith(("masked_spec_embed", "embed_positions.weight"))]


MODES = [{"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"attn_implementation": "eager"}]


@pytest.mark.parametrize("kwargs", MODES, ids=["bf16", "fp16", "eager"])
@torch.no_grad()
def test_half_precision_and_eager_attention_point_the_same_way(pair, saved, kwargs):
    audio, _, model, processor = pair
    inputs = processor(**call(audio))
    other = SupCLAPModel.from_pretrained(saved, **kwargs)
    if "attn_implementation" in kwargs:
        assert {tower.config._attn_implementation for tower in (other.audio_model, other.text_model)} == {"eager"}
        # Half precision would round decibels from -100 to 40.
    firsts = {"ced": "audio_model.init_bn", "cnn14": "audio_model.bn0", "naflex": "audio_model.embeds.proj"}
    if "dtype" in kwargs and audio in firsts:
        first = other.get_submodule(firsts[audio])
        assert (other.dtype, first.weight.dtype) == (kwargs["dtype"], torch.float32)
    expected, got = model(**inputs), other(**inputs)
    least = 0.999 if "dtype" in kwargs else 0.99999
    for name in ("audio_embeds", "text_embeds"):
        assert got[name].dtype == torch.float32
        assert torch.cosine_similarity(expected[name], got[name]).min() > least


def test_each_encoder_keeps_its_weights_and_its_front_end(pair, encoders):
    audio, text, model, processor = pair
    extractors = {"ced": CEDFeatureExtractor, "htsat": ClapFeatureExtractor, "cnn14": MSCLAPFeatureExtractor}
    extractors["naflex"] = CEDFeatureExtractor
    extractor = extractors[audio] if audio in extractors else type(make_encoder(audio)[1])
    assert type(processor.feature_extractor) is extractor
    assert processor.tokenizer.get_vocab() == text_encoder(text)[1].get_vocab()
    assert not model.training
    for tower, encoder in ((model.audio_model, audio), (model.text_model, text)):
        # AST's file has the tensor names of an older transformers.
        saved = load_file(f"{encoders[encoder]}/model.safetensors")
        if encoder in ENCODERS:
            saved = make_encoder(encoder)[0].state_dict()
        for name, value in tower.state_dict().items():
            assert torch.equal(value, saved[f"encoder.{name}" if encoder == "whisper" else name]), name


@pytest.mark.parametrize("text", TEXT)
@torch.no_grad()
def test_the_language_matters_for_multilingual_towers(encoders, text):
    model = SupCLAPModel.from_encoders(encoders["ced"], encoders[text], projection_dim=16)
    processor = SupCLAPProcessor.from_encoders(encoders["ced"], encoders[text])
    english, french = model.get_text_features(
        **processor(text=["piano"] * 2, language=["eng", "fra"], return_tensors="pt")
    ).pooler_output
    assert torch.allclose(english, french, atol=1e-6) == (text != "sonar")


@pytest.mark.parametrize(
    "config",
    [
        LongformerConfig(**BERT_LIKE, attention_window=8),
        LukeConfig(**BERT_LIKE, entity_vocab_size=10, entity_emb_size=8),
        LayoutLMConfig(**BERT_LIKE),
    ],
    ids=lambda config: config.model_type,
)
def test_weights_that_no_text_uses_do_not_train(config):
    """Those of Longformer's global attention, of entities, and of a pooler that is not used."""
    model = SupCLAPModel(builders.supclap_config(config)).train()
    model.logit_scale.data.zero_()
    inputs = {"input_ids": torch.arange(5, 26).reshape(3, 7), "input_features": torch.rand(3, 64, 101)}
    model(**inputs, attention_mask=torch.ones(3, 7), return_loss=True).loss.backward()
    assert idle_parameters(model) == []
    assert 0 < sum(not weight.requires_grad for weight in model.text_model.parameters()) < 30


# ---- pooling ----


@pytest.mark.parametrize("text", ["distilbert", "modernbert"])
def test_a_tower_without_a_pooler_cannot_pool_with_it(encoders, text):
    message = "(Distil|Modern)BertModel.*text_pooling"
    with pytest.raises(ValueError, match=message):
        SupCLAPModel.from_encoders(encoders["ced"], encoders[text], text_pooling="pooler")
    config = builders.supclap_config(text_encoder(text)[0].config, text_pooling="pooler")
    with pytest.raises(ValueError, match=message):
        SupCLAPModel(config)


def test_a_tower_saved_without_its_pooler_cannot_use_it(encoders, tmp_path):
    bert = BertModel(BertConfig(**BERT_LIKE), add_pooling_layer=False)
    config = builders.supclap_config(bert.config, text_pooling="pooler")
    with pytest.raises(ValueError, match=r"BertModel.*text_pooling"):
        SupCLAPModel(config, text_model=bert)
    bert.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"pooler\.dense.*text_pooling"):
        SupCLAPModel.from_encoders(encoders["ced"], str(tmp_path), text_pooling="pooler")


@pytest.mark.parametrize("config", [CLIPTextConfig(**SIZES, intermediate_size=48), FNetConfig(**SIZES), "sonar"])
@torch.no_grad()
def test_a_pooler_by_another_name_is_one(config):
    """CLIP's text encoder pools without a layer, and the output class of FNet has no field for the pooler output."""
    config = builders.sonar_config() if config == "sonar" else config
    model = SupCLAPModel(builders.supclap_config(config, projection_dim=8, text_pooling="pooler"))
    assert model.get_text_features(torch.tensor([[5, 6]])).pooler_output.shape == (1, 8)


# ---- what a folder may lack ----


def test_ced_folder_without_a_feature_extractor_gets_the_front_end_of_its_configuration(encoders, tmp_path):
    CEDModel(builders.ced_config(n_fft=1024, f_min=50, center=False)).save_pretrained(tmp_path)
    extractor = SupCLAPProcessor.from_encoders(str(tmp_path), encoders["bert"]).feature_extractor
    assert (extractor.n_fft, extractor.f_min, extractor.f_max, extractor.center) == (1024, 50, 8000, False)
    assert (extractor.feature_size, extractor.win_size, extractor.hop_size) == (64, 512, 160)


def test_options_of_the_tokenizer(encoders):
    processor = SupCLAPProcessor.from_encoders(encoders["ced"], encoders["bert"], model_max_length=5)
    assert len(processor(text="rain " * 20)["input_ids"][0]) == 5


# ---- what is no tower ----

TINY: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "d_model": 8, "d_kv": 4, "d_ff": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (builders.supclap_config(), "'supclap'"),
        (builders.clap_config(), "'clap'"),
        (T5Config(**TINY), "'t5'"),
        (GPT2Config(), "'gpt2'"),
        (BertConfig(is_decoder=True), "'bert'"),
        (builders.ced_config(), "'ced'.*input_ids"),
        (builders.clap_config().audio_config, "'clap_audio_model'"),
    ],
)
def test_no_text_tower(config, message):
    with pytest.raises(ValueError, match=message):
        check_text_config(config)


@pytest.mark.parametrize("config", [BertConfig(), builders.clap_config(), builders.supclap_config(), ViTConfig()])
def test_no_audio_tower(config):
    message = f"'{config.model_type}'.*audio"
    with pytest.raises(ValueError, match=message):
        check_audio_config(config)


@torch.no_grad()
def test_a_decoder_is_read_by_its_last_token(tmp_path):
    gpt = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, pad_token_id=0)).eval()
    gpt.save_pretrained(tmp_path / "gpt2")
    CEDModel(builders.ced_config()).save_pretrained(tmp_path / "ced")
    towers = str(tmp_path / "ced"), str(tmp_path / "gpt2")
    model = SupCLAPModel.from_encoders(*towers, projection_dim=4, text_pooling="last")

    ids = torch.tensor([[5, 6, 7, 0, 0], [9, 8, 7, 6, 5], [0, 0, 5, 6, 7]])
    mask = ids.ne(0).long()
    hidden = gpt(ids, attention_mask=mask).last_hidden_state
    pooled = torch.stack([hidden[0, 2], hidden[1, 4], hidden[2, 4]])
    expected = torch.nn.functional.normalize(model.text_projection(pooled), dim=-1)
    for given in (mask, None):  # None: derive the mask from the padding
        torch.testing.assert_close(model.get_text_features(ids, given).pooler_output, expected)


def test_a_decoder_configured_as_encoder_is_accepted():
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2)
    config.is_causal = False
    check_text_config(config)


@pytest.mark.parametrize("name", ["audio_config", "text_config"])
def test_a_loaded_tower_of_another_width(name):
    tower = (
        CEDModel(builders.ced_config(embed_dim=64)) if name == "audio_config" else BertModel(BertConfig(**BERT_LIKE))
    )
    config = builders.supclap_config(builders.bert_config(hidden_size=32))
    towers = {"audio_model": tower} if name == "audio_config" else {"text_model": tower}
    width = tower.config.hidden_size
    with pytest.raises(ValueError, match=rf"\b{width}\b.*{name}.*32"):
        SupCLAPModel(config, **towers)
