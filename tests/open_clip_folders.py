"""Small models in OpenCLIP's format, with weights and clips by formula.

Their golden embeddings in `tests/conversion/test_conversion_open_clip.py` were computed by OpenCLIP 4.2.0.dev0 with
timm 1.0.31.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from modeling_supclap import ModernTextConfig, NaFlexConfig, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import save_open_clip
from modeling_supclap.conversion.open_clip import extractor_from_audio_cfg, open_clip_tensors

RATE_HZ = 48_000
AUDIO: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4}
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 58,
    "bos_token_id": 59,
    "eos_token_id": 57,
    "attn_gated": True,
}
TEXT_A = {**TEXT, "qk_norm": True}
TEXT_B = {**TEXT, "pool_type": "eos", "attention_mode": "causal", "attention_bias": True, "mlp_bias": True}
TEXT_C = {
    **TEXT_A,
    "pool_type": "mean",
    "mlp_type": "relu2",
    "mlp_ratio": 4.0,
    "norm_placement": "sandwich",
    "reg_tokens": 2,
    "value_residual": True,
    "pre_norm": True,
    "ls_init_value": 0.1,
    "norm_type": "layernorm",
    "gate_bias": True,
    "rope_temperature": 1000,
}
AUDIO_A = {**AUDIO, "patch_freq": 16, "patch_time": 20, "init_values": 1e-5, "reg_tokens": 1, "pre_norm": True}
AUDIO_B = {
    **AUDIO_A,
    "patch_freq": 8,
    "patch_time": 16,
    "swiglu_mlp": True,
    "mlp_ratio": 2.6666667,
    "attn_pool_mlp_ratio": 4.0,
    "attn_gated": True,
}
AUDIO_C = {
    **AUDIO,
    "patch_freq": 8,
    "patch_time": 16,
    "patch_pad_mode": "repeat",
    "reg_tokens": 2,
    "qk_norm": True,
    "global_pool": "avg",
    "qkv_bias": False,
    "scale_mlp_norm": True,
    "scale_attn_inner_norm": True,
    "norm_layer": "rmsnorm",
    "rope_temperature": 100,
}
AUDIO_D = {
    **AUDIO,
    "patch_freq": 16,
    "patch_time": 20,
    "reg_tokens": 1,
    "class_token": True,
    "rope_rotate_half": True,
    "pool_include_prefix": True,
    "swiglu_mlp": True,
    "scale_mlp_norm": True,
    "attn_only_layer_scale": True,
    "init_values": 0.1,
    "attn_pool_num_heads": 8,
}
# Configurations of the towers, and the type of the text projection.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "A": (AUDIO_A, TEXT_A, "linear"),
    "B": (AUDIO_B, TEXT_B, "linear"),
    "C": (AUDIO_C, TEXT_C, "linear_bias"),
    "D": (AUDIO_D, TEXT_A, "linear"),
}


def wave(samples: int) -> np.ndarray:
    """Return a clip of two tones, one of them rising, and a weak third."""
    t = np.arange(samples) / RATE_HZ
    tones = 0.4 * np.sin(2 * np.pi * 440 * t) + 0.2 * np.sin(2 * np.pi * (1000 + 300 * t) * t)
    return (tones + 0.05 * np.cos(2 * np.pi * 6000 * t)).astype(np.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer where the word "w7" is token 7, with the special tokens of OpenCLIP at the end."""
    words = [*(f"w{index}" for index in range(57)), "<eos>", "<pad>", "<bos>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 59), ("<eos>", 57)]
    )
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "w0"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=16, **special)


def build(name: str) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """Build a model of `MODELS` with random weights, and its processor."""
    return build_from(*MODELS[name])


def build_from(audio: dict[str, Any], text: dict[str, Any], projection: Any) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """Build a model with random weights from the fields of its towers, and its processor."""
    config = SupCLAPConfig(
        audio_config=NaFlexConfig(**audio),
        text_config=ModernTextConfig(**text),
        projection_dim=16,
        projection_hidden_act="gelu",
        text_pooling="pooler",
        text_projection_type=projection,
    )
    torch.manual_seed(0)
    return SupCLAPModel(config).eval(), SupCLAPProcessor(extractor_from_audio_cfg({}), tokenizer())


def formula(names_and_shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the weights by formula: a hash of the indices of name and element, scaled by the kind of tensor."""
    tensors = {}
    for k, (name, shape) in enumerate(sorted(names_and_shapes.items())):
        i = np.arange(math.prod(shape), dtype=np.float64)
        hashed = np.sin(12.9898 * (i + 1) + 78.233 * (k + 1)) * 43758.5453
        u = 2 * (hashed - np.floor(hashed)) - 1
        if name == "logit_scale":
            values = np.full(1, math.log(20))
        elif name.endswith(("gamma_1", "gamma_2")):
            values = 0.5 + 0.2 * u
        elif len(shape) == 1 and name.endswith("weight"):
            values = 1 + 0.2 * u
        elif len(shape) == 1:
            values = 0.1 * u
        elif len(shape) == 3:
            values = u
        else:
            values = u * math.sqrt(3 / shape[1]) * (0.03 if name.endswith("vit.embeds.proj.weight") else 1)
        tensors[name] = torch.from_numpy(values.reshape(shape)).float().contiguous()
    return tensors


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Return the random tensors of a model of `MODELS`, with OpenCLIP's names."""
    return open_clip_tensors(build(name)[0])


def write_folder(folder: Path, name: str) -> dict[str, Any]:
    """Write a model of `MODELS` in OpenCLIP's format, with weights by formula. Return its settings."""
    save_open_clip(*build(name), folder)
    shapes = {key: value.shape for key, value in tensors(name).items()}
    save_file(formula(shapes), folder / "open_clip_model.safetensors")
    return json.loads((folder / "open_clip_config.json").read_text(encoding="utf-8"))


def copy_with(source: Path, folder: Path, **changes: dict[str, Any]) -> Path:
    """Copy a folder, and change its settings: {part: {field: value}}, where the value ... removes a field."""
    shutil.copytree(source, folder)
    path = folder / "open_clip_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    parts = {"settings": settings, "model_cfg": settings["model_cfg"], **settings["model_cfg"]}
    parts["naflexvit_cfg"] = parts["audio_cfg"]["naflexvit_cfg"]
    for part, fields in changes.items():
        parts[part] |= fields
        for field in [name for name, value in fields.items() if value is ...]:
            del parts[part][field]
    path.write_text(json.dumps(settings))
    return folder


def compare_with_open_clip(folder: str | Path, model: SupCLAPModel, processor: SupCLAPProcessor) -> dict[str, Any]:
    """Embed two clips (a tone, and noise at another rate) and three texts with OpenCLIP and with our model.

    Return whether all token ids are equal (`tokens`), and the lowest cosines (`audio`, `text`).
    """
    import open_clip

    theirs, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    theirs.eval()
    texts = ["a high tone", "2 dogs bark at 9:30, cafés open;  it's LOUD!", "rain and wind " * 200]
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    words = processor(text=texts, return_tensors="pt")

    rate_hz = processor.feature_extractor.sampling_rate
    tone = torch.sin(2 * torch.pi * 440 * torch.arange(2 * rate_hz) / rate_hz)
    noise = 0.1 * torch.randn(31_337, generator=torch.Generator().manual_seed(0))
    audio = []
    with torch.no_grad():
        for wave, hz in ((tone, rate_hz), (noise, 22_050)):
            clip = preprocess(max_seq_len=None)((wave.unsqueeze(0), hz))
            batch = {name: value.unsqueeze(0) for name, value in clip.items()}
            inputs = processor(audio=wave.numpy(), sampling_rate=hz, return_tensors="pt")
            ours = model.get_audio_features(**inputs).pooler_output
            audio.append(torch.cosine_similarity(theirs.encode_audio(batch), ours))
        text = torch.cosine_similarity(theirs.encode_text(ids), model.get_text_features(**words).pooler_output)
    return {
        "tokens": torch.equal(ids, words["input_ids"]),
        "audio": float(torch.cat(audio).min()),
        "text": float(text.min()),
    }
