"""Tensor names and shapes of public checkpoints, from their descriptions and independent of the converters."""

import math
from collections.abc import Callable
from typing import Any

import builders
import torch
import torchaudio
from transformers import BertConfig, BertModel, ClapAudioModel, ClapConfig, ClapModel, audio_utils

from modeling_supclap.conversion.tensors import Tensors

Shapes = dict[str, tuple[int, ...]]

# Row i of fairseq2's embedding is this row of the Hub's: pad, unk, bos, eos of bos, pad, eos, unk.
HUB_ROWS = [1, 3, 0, 2]


def convert(function: Callable[..., Any], tensors: Any, origin: str, *options: Any) -> tuple[Any, dict[str, int]]:
    """Convert tensors. Return the result, and the numbers of unused tensors by kind."""
    whole = Tensors(tensors, origin)
    return function(whole, *options), whole.aside


def ced_encoder(width: int = 64, depth: int = 1, dasheng: bool = False) -> Shapes:
    """Encoder of CED or Dasheng: 155 tensors with 12 blocks."""
    shapes: Shapes = {
        "time_pos_embed": (1, width, 1, 252 if dasheng else 63),
        "freq_pos_embed": (1, width, 1 if dasheng else 4, 1),
        "patch_embed.proj.weight": (width, 1, *((64, 4) if dasheng else (16, 16))),
        "patch_embed.proj.bias": (width,),
        "init_bn.num_batches_tracked": (),
    }
    shapes |= {f"init_bn.{name}": (64,) for name in ("weight", "bias", "running_mean", "running_var")}
    shapes |= {f"norm.{name}": (width,) for name in ("weight", "bias")}
    linears = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}
    for block in (f"blocks.{number}" for number in range(depth)):
        for name, (outer, inner) in linears.items():
            shapes[f"{block}.{name}.weight"] = (outer * width, inner * width)
            shapes[f"{block}.{name}.bias"] = (outer * width,)
        shapes |= {f"{block}.{norm}.{name}": (width,) for norm in ("norm1", "norm2") for name in ("weight", "bias")}
    return shapes


def ced_head(width: int = 64) -> Shapes:
    return {
        "outputlayer.0.weight": (width,),
        "outputlayer.0.bias": (width,),
        "outputlayer.1.weight": (527, width),
        "outputlayer.1.bias": (527,),
    }


def original_name(name: str) -> str:
    """Return the name of a CED tensor in the authors' files."""
    return name.replace("init_bn.", "init_bn.1.")


def front_end() -> dict[str, torch.Tensor]:
    """Return the constants in the authors' files, computed by another library than in the converter."""
    filters = audio_utils.mel_filter_bank(257, 64, 0.0, 8000.0, 16000, norm=None, mel_scale="htk")
    window = 0.5 - 0.5 * torch.cos(2 * torch.pi * torch.arange(512, dtype=torch.float64) / 512)
    return {
        "front_end.0.spectrogram.window": window.float(),
        "front_end.0.mel_scale.fb": torch.from_numpy(filters).float(),
    }


SONAR_CONFIG = {"model_type": "m2m_100", "vocab_size": 400, "d_model": 64, "encoder_layers": 1}
SONAR_CONFIG |= {"encoder_ffn_dim": 128, "encoder_attention_heads": 1, "encoder_layerdrop": 0}
"""Configuration of the encoder with the default shapes of `sonar_hub`."""


def sonar_hub(vocabulary: int = 400, width: int = 64, layers: int = 1, ffn: int = 128) -> Shapes:
    """M2M100Encoder of the Hub: 387 tensors with 24 layers."""
    shapes: Shapes = {"embed_tokens.weight": (vocabulary, width)}
    shapes |= {f"layer_norm.{name}": (width,) for name in ("weight", "bias")}
    linears = {f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    linears |= {"fc1": (ffn, width), "fc2": (width, ffn)}
    for layer in (f"layers.{number}" for number in range(layers)):
        for name, (outer, inner) in linears.items():
            shapes[f"{layer}.{name}.weight"], shapes[f"{layer}.{name}.bias"] = (outer, inner), (outer,)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{layer}.{norm}.{name}": (width,) for name in ("weight", "bias")}
    return shapes


def fairseq2_name(name: str) -> str:
    """Return the fairseq2 name of a tensor of M2M100Encoder."""
    if name == "embed_tokens.weight":
        return "encoder_frontend.embed.weight"
    if name.startswith("layer_norm."):
        return name
    for hub, theirs in (
        ("self_attn.out_proj", "self_attn.output_proj"),
        ("fc1", "ffn.inner_proj"),
        ("fc2", "ffn.output_proj"),
        ("final_layer_norm", "ffn_layer_norm"),
    ):
        name = name.replace(hub, theirs)
    return f"encoder.{name}"


def fairseq2(hub: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a state dict of SONAR from the Hub to the layout of fairseq2."""
    tensors = {fairseq2_name(name): value for name, value in hub.items()}
    embedding = hub["embed_tokens.weight"]
    first = embedding[HUB_ROWS]
    tensors["encoder_frontend.embed.weight"] = torch.cat([first, embedding[4:]])
    return tensors


def ml_clap_joint(audio: int = 64, text: int = 64, shared: int = 16) -> Shapes:
    shapes: Shapes = {}
    for name, width in (("audio_proj", audio), ("text_proj", text)):
        shapes |= {f"{name}.0.weight": (shared, width), f"{name}.0.bias": (shared,)}
        shapes |= {f"{name}.2.weight": (shared, shared), f"{name}.2.bias": (shared,)}
    return shapes


def random(shapes: Shapes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Fill shapes with random values; batch norm statistics are those of decibels, counts are integers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, value in tensors.items():
        if name.endswith("running_var"):
            value.abs_().mul_(100).add_(300)
        elif name.endswith("running_mean"):
            value.add_(-40)
        elif name.endswith("num_batches_tracked"):
            tensors[name] = torch.tensor(1234)
    return tensors


def golden(tensors: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Fill tensors in the order of their names with the values used for the authors' code; integers are unchanged."""
    filled = dict(tensors)
    for index, name in enumerate(sorted(name for name, value in tensors.items() if value.is_floating_point())):
        value = scale * builders.filler(tuple(tensors[name].shape), index)
        if name.endswith("running_var"):
            value = 300 + 100 * value
        elif name.endswith("running_mean"):
            value = -40 + 10 * value
        elif value.ndim == 1 and name.endswith("weight"):
            value = 1 + value
        filled[name] = value.float()
    return filled


def on_meta(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Return tensors on the meta device, without storage."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def build_on_meta(model_class: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds models of a class without storage."""

    def build(*args: Any) -> Any:
        with torch.device("meta"):
            return model_class(*args)

    return build


def put(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Return a function that replaces one tensor of a checkpoint; None removes it."""
    return lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value})


def ced_original(encoder: dict[str, torch.Tensor], head: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the authors' layout of CED: 161 tensors with 12 blocks."""
    return {**front_end(), **{original_name(name): value for name, value in encoder.items()}, **head}


def ced_hub(encoder: dict[str, torch.Tensor], head: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the layout of mispeech/ced-*: 159 tensors with 12 blocks."""
    return {**{f"encoder.{name}": value for name, value in encoder.items()}, **head}


def ml_clap(
    audio: dict[str, torch.Tensor],
    text: dict[str, torch.Tensor],
    joint: dict[str, torch.Tensor],
    temperature: float | None,
) -> dict[str, torch.Tensor]:
    """Return the layout of ML-CLAP: original CED, fairseq2 SONAR and projections; 557 tensors in the published size.

    GLAP has the same layout with the original Dasheng and no temperature: 552 tensors, because it has no tagging head.
    """
    towers = {f"audio_encoder.model.{name}": value for name, value in audio.items()}
    towers |= {f"text_encoder.model.{name}": value for name, value in text.items()}
    scale = {} if temperature is None else {"temperature": torch.tensor(temperature)}
    return {**towers, **joint, **scale}


def laion_config(fused: bool = False) -> Any:
    """Return the configuration of a narrow HTSAT, as published, and a narrow RoBERTa."""
    audio = {"patch_embeds_hidden_size": 16, "hidden_size": 128, "depths": [2, 1, 1, 1], "hidden_dropout_prob": 0.0}
    if fused:
        audio |= {"enable_fusion": True, "fusion_type": "aff_2d", "aff_block_r": 4}
    text: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    text |= {"intermediate_size": 96, "max_position_embeddings": 66, "layer_norm_eps": 1e-5}
    return ClapConfig(audio_config=audio, text_config=text, projection_dim=24)


def laion(clap: ClapModel, filters: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert a ClapModel to the layout of lukewys/laion_clap, with the additional tensors of its files."""
    tensors: dict[str, torch.Tensor] = {}
    state = clap.state_dict()
    for name, value in state.items():
        if name.endswith((".position_ids", ".token_type_ids")) or (".self.key." in name and "audio" in name):
            continue
        if "audio_model" in name and ".self.value." in name:
            continue
        if "audio_model" in name and ".self.query." in name:
            value = torch.cat([state[name.replace("query", part)] for part in ("query", "key", "value")])
            name = name.replace("attention.self.query", "attn.qkv")
        for ours, theirs in (
            ("audio_model.audio_encoder.", "audio_branch."),
            ("text_model.", "text_branch."),
            ("audio_branch.batch_norm", "audio_branch.bn0"),
            ("projection.linear1", "projection.0"),
            ("projection.linear2", "projection.2"),
            ("layernorm_before", "norm1"),
            ("layernorm_after", "norm2"),
        ):
            name = name.replace(ours, theirs)
        if name.startswith("audio_branch"):
            for ours, theirs in (
                ("attention.output.dense", "attn.proj"),
                ("attention.self", "attn"),
                ("intermediate.dense", "mlp.fc1"),
                ("output.dense", "mlp.fc2"),
            ):
                name = name.replace(ours, theirs)
        tensors[name] = value
    tensors["text_branch.embeddings.position_ids"] = state["text_model.embeddings.position_ids"]
    tensors["audio_branch.spectrogram_extractor.stft.conv_real.weight"] = torch.zeros(513, 1, 8)
    tensors["audio_branch.logmel_extractor.melW"] = filters
    tensors["audio_branch.layers.0.blocks.1.attn_mask"] = torch.zeros(4, 64, 64)
    for name in (
        "audio_branch.tscam_conv",
        "audio_branch.head",
        "audio_transform.sequential.0",
        "text_transform.sequential.3",
    ):
        tensors |= {f"{name}.weight": torch.ones(2, 2), f"{name}.bias": torch.ones(2)}
    return tensors


def residual_projections(audio: int, text: int, shared: int) -> Shapes:
    """Projections of MS-CLAP; only the layer norm has a bias."""
    shapes: Shapes = {}
    for name, width in (("audio_encoder", audio), ("caption_encoder", text)):
        shapes |= {f"{name}.projection.linear1.weight": (shared, width)}
        shapes |= {f"{name}.projection.linear2.weight": (shared, shared)}
        shapes |= {f"{name}.projection.layer_norm.{kind}": (shared,) for kind in ("weight", "bias")}
    return shapes


def gpt2(vocabulary: int = 300, width: int = 64, layers: int = 1, positions: int = 100) -> Shapes:
    """GPT-2 without a head: 148 tensors with 12 layers."""
    shapes: Shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    shapes |= {f"ln_f.{kind}": (width,) for kind in ("weight", "bias")}
    linears = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in (f"h.{number}" for number in range(layers)):
        shapes |= {f"{layer}.{norm}.{kind}": (width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, (inner, outer) in linears.items():  # GPT-2 keeps its matrices transposed
            shapes[f"{layer}.{name}.weight"] = (inner * width, outer * width)
            shapes[f"{layer}.{name}.bias"] = (outer * width,)
    return shapes


def cnn14(channels: tuple[int, ...] = (4, 6, 8, 12, 16, 20), width: int = 24) -> Shapes:
    """CNN14 without head and front end: 69 tensors, including the counts of 13 batch norms."""
    norms, shapes = {"bn0": 64}, {"fc1.weight": (width, channels[-1]), "fc1.bias": (width,)}
    for number, outer in enumerate(channels, start=1):
        inner = 1 if number == 1 else channels[number - 2]
        shapes[f"conv_block{number}.conv1.weight"] = (outer, inner, 3, 3)
        shapes[f"conv_block{number}.conv2.weight"] = (outer, outer, 3, 3)
        norms |= {f"conv_block{number}.bn1": outer, f"conv_block{number}.bn2": outer}
    for name, count in norms.items():
        shapes |= {f"{name}.{kind}": (count,) for kind in ("weight", "bias", "running_mean", "running_var")}
        shapes[f"{name}.num_batches_tracked"] = ()
    return shapes


def msclap(
    audio: dict[str, torch.Tensor], text: dict[str, torch.Tensor], joint: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """Return the layout of MS-CLAP: audio tower with front end and head, and text tower."""
    towers = {f"audio_encoder.base.{name}": value for name, value in audio.items()}
    towers |= {f"caption_encoder.base.{name}": value for name, value in text.items()}
    return {**towers, **joint, "logit_scale": torch.tensor(scale)}


def slaney_filters(rate_hz: int, f_min: float = 50.0) -> torch.Tensor:
    """Return the mel filters of LAION and MS-CLAP, computed by another library than in the converter."""
    return torchaudio.functional.melscale_fbanks(513, f_min, 14_000.0, 64, rate_hz, norm="slaney", mel_scale="slaney")


def laion_model(fused: bool = False) -> ClapModel:
    """Build a narrow CLAP in the style of LAION, with batch norm statistics of decibels."""
    torch.manual_seed(0)
    model = ClapModel(laion_config(fused)).eval()
    model.audio_model.audio_encoder.batch_norm.running_mean.fill_(-40.0)
    model.audio_model.audio_encoder.batch_norm.running_var.fill_(400.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def small_ml_clap() -> dict[str, torch.Tensor]:
    """Return a narrow ML-CLAP: 57 tensors."""
    audio = ced_original(random(ced_encoder()), random(ced_head()))
    return ml_clap(audio, fairseq2(random(sonar_hub())), random(ml_clap_joint()), 0.07)


def small_glap() -> dict[str, torch.Tensor]:
    """Return a narrow GLAP."""
    audio = ced_original(random(ced_encoder(dasheng=True)), {})
    return ml_clap(audio, fairseq2(random(sonar_hub())), random(ml_clap_joint()), None)


def panns_front_end(rate_hz: int) -> dict[str, torch.Tensor]:
    stft = {f"spectrogram_extractor.stft.conv_{part}.weight": torch.zeros(513, 1, 8) for part in ("real", "imag")}
    return {**stft, "logmel_extractor.melW": slaney_filters(rate_hz)}


def htsat(model: ClapAudioModel) -> dict[str, torch.Tensor]:
    """Convert a ClapAudioModel to the names of HTSAT in MS-CLAP, which are those of LAION."""
    whole = ClapModel(laion_config())
    whole.audio_model = model
    tensors = laion(whole, slaney_filters(32_000))
    names = {name: value for name, value in tensors.items() if name.startswith("audio_branch.")}
    return {name.replace("audio_branch.", "htsat."): value for name, value in names.items()}


def bert(config: BertConfig, model: BertModel) -> dict[str, torch.Tensor]:
    """Return BERT as older transformers saved it, with its pooler and position ids."""
    pooler = {"pooler.dense.weight": torch.ones(64, 64), "pooler.dense.bias": torch.ones(64)}
    positions = torch.arange(config.max_position_embeddings).unsqueeze(0)
    return {**model.state_dict(), **pooler, "embeddings.position_ids": positions}


def bert_config(**kwargs) -> BertConfig:
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertConfig(**{**sizes, "intermediate_size": 96, "max_position_embeddings": 40, **kwargs})


def small_msclap(year: int) -> dict[str, torch.Tensor]:
    """Return a narrow MS-CLAP of 2022 or 2023."""
    if year == 2023:
        audio = htsat(ClapAudioModel(laion_config().audio_config))
        masks = {"h.0.attn.bias": torch.ones(1, 1, 100, 100), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        text = {**random(gpt2()), **masks}
        joint = residual_projections(128, 64, 16)
    else:
        tower = random(cnn14(), seed=1)
        head = {"fc_audioset.weight": torch.ones(5, 24), "fc_audioset.bias": torch.ones(5)}
        audio = {**tower, **head, **panns_front_end(44_100)}
        text = bert(bert_config(), BertModel(bert_config(), add_pooling_layer=False))
        joint = residual_projections(24, 64, 16)
    return msclap(audio, text, random(joint, seed=2), math.log(1 / 0.07))
