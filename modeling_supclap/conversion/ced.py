"""CED's and Dasheng's published layouts to `CEDModel`: the authors' files and the Hub's `mispeech/ced-*`.

All have the same names, but for a prefix and the batch norm's. They may hold a tagging head (`outputlayer`), of which
an encoder has no use, and the authors' files also the constants of their front end, which must be the one that
`CEDFeatureExtractor` computes: otherwise the weights would be fed with other numbers than they were trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchaudio.functional import melscale_fbanks

from ..configuration_supclap import CEDConfig
from ..feature_extraction_ced import CEDFeatureExtractor
from ..modeling_ced import CEDModel
from .tensors import Tensors

FRONT_END = "16 kHz, 512 samples and 64 HTK mel bands from 0 to 8000 Hz are CED's"
ASIDE = {r"outputlayer\.": "tagging head", r"front_end\.": "front end, which agrees"}
NAMES = ((r"^(encoder\.)?init_bn\.1\.", "init_bn."), (r"^encoder\.", ""))
# The frames of a chunk, by the columns of patches that there are positions for and the frames of a patch.
TARGET_LENGTHS = {(63, 16): 1012, (252, 4): 1008}
# Heads are 64 wide, but for Dasheng 0.6B, of which 16 make 1,280.
HEAD_DIMS = {1280: 80}


def ced_from_tensors(
    tensors: Mapping[str, torch.Tensor], origin: str, config: Mapping[str, Any] | None = None
) -> tuple[CEDModel, dict[str, int]]:
    """The encoder in a file of the CED or Dasheng authors, in a checkpoint of the Hub's, or in one of `CEDModel`.

    Args:
        tensors: All of the checkpoint's: 161 at 12 blocks in CED's own files, 159 on the Hub.
        origin: What they come from, for the message of an error.
        config: The `config.json` beside them; None or empty reads the shape of the encoder off the tensors.

    Returns:
        The encoder in float32, in evaluation mode, and how many tensors it has no place for, by what they were.

    Raises:
        ValueError: The checkpoint is of another layout or was trained on another front end, or the configuration is
            not its own.
    """
    whole = Tensors(tensors, origin)
    _check_front_end(whole)
    kept, aside = whole.set_aside(ASIDE)
    encoder = kept.rename(NAMES)
    own_config = _config_from_file(config, origin) if config else _config_from_shapes(encoder)
    return encoder.build(CEDModel, own_config), aside


def _check_front_end(tensors: Tensors) -> None:
    """Refuses weights whose file holds another front end than ours; the Hub's hold none."""
    own = CEDFeatureExtractor()
    top_hz = own.f_max or own.sampling_rate / 2
    filters = melscale_fbanks(own.n_fft // 2 + 1, own.f_min, top_hz, own.feature_size, own.sampling_rate)
    window = torch.hann_window(own.win_size)
    expected = {"front_end.0.spectrogram.window": window, "front_end.0.mel_scale.fb": filters}

    seen = {name for name in tensors if name.startswith("front_end.")}
    if seen - expected.keys():
        raise ValueError(f"{tensors.origin} has the front end {sorted(seen)}; CED's is {sorted(expected)}")
    if seen:
        for name, value in expected.items():
            tensors.check_constant(name, value, FRONT_END)


def _config_from_file(config: Mapping[str, Any], origin: str) -> CEDConfig:
    if config.get("model_type") not in ("ced", "dasheng"):
        raise ValueError(f"{origin} has a config.json of {config.get('model_type')!r} beside weights of CED")

    fields = dict(config)
    fields.pop("model_type")
    fields.pop("auto_map", None)
    return CEDConfig(**fields)


def _config_from_shapes(encoder: Tensors) -> CEDConfig:
    width, _, *patch = encoder.get_shape("patch_embed.proj.weight", 4)
    columns = encoder.get_shape("time_pos_embed", 4)[3]
    if (columns, patch[1]) not in TARGET_LENGTHS:
        raise ValueError(
            f"{encoder.origin} has time positions for {columns} columns of patches of {patch[1]} frames; published are "
            f"{sorted(TARGET_LENGTHS)}. Give a folder whose config.json states the target_length"
        )

    inner = encoder.get_shape("blocks.0.mlp.fc1.weight", 2)[0]
    return CEDConfig(
        embed_dim=width,
        num_heads=encoder.count_heads(width, HEAD_DIMS.get(width, 64)),
        depth=encoder.count_layers("blocks."),
        mlp_ratio=inner / width,
        qkv_bias="blocks.0.attn.qkv.bias" in encoder,
        patch_size=patch[0] if patch[0] == patch[1] else patch,
        target_length=TARGET_LENGTHS[columns, patch[1]],
    )
