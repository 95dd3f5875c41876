"""CED's published layouts to `CEDModel` and back: the authors' files and the Hub's `mispeech/ced-*`.

Both have a tagging head (`outputlayer`), of which an encoder has no use, and the authors' files also the constants of
their front end. The head is set aside; the front end must be the one that `CEDFeatureExtractor` computes, as otherwise
the weights would be fed with other numbers than they were trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torchaudio
from transformers.initialization import no_init_weights

from ..configuration_supclap import CEDConfig
from ..feature_extraction_ced import CEDFeatureExtractor
from ..modeling_ced import CEDModel
from .tensors import Tensors, count_layers, fill_exactly, rename_all, shape_of

HEAD = "outputlayer."
FRONT_END = "front_end."
WINDOW = "front_end.0.spectrogram.window"
FILTERS = "front_end.0.mel_scale.fb"
# Filter banks of different libraries differ by up to 5e-6, those of other frequency ranges by more than 0.1.
FRONT_END_TOLERANCE = 1e-4
# Every published size has heads of this width.
HEAD_DIM = 64
# Columns of patches that the published weights have positions for: floor(1012 / 16).
PUBLISHED_COLUMNS = 63


class Renamed(NamedTuple):
    """Tensors under our names, and those that our model has no place for under their own."""

    tensors: dict[str, torch.Tensor]
    set_aside: dict[str, torch.Tensor]


def ced_from_original(tensors: Tensors, source: str) -> tuple[CEDModel, dict[str, torch.Tensor]]:
    """The encoder in a file of the CED authors (161 tensors at 12 blocks).

    Args:
        tensors: all of the file's.
        source: what they come from, for the message of an error.

    Returns:
        The encoder in float32, in evaluation mode, and the tensors that it has no place for: front end, and the head
        if there is one.

    Raises:
        ValueError: the file is of another layout, or was trained on another front end.
    """
    renamed = separate(tensors, lambda name: name.replace("init_bn.1.", "init_bn."), source)
    check_front_end(renamed.set_aside, source)
    model = _fill(renamed.tensors, source)
    _check_head(renamed.set_aside, model.config.embed_dim, source)
    return model, renamed.set_aside


def ced_from_hub(
    tensors: Tensors, source: str, config: Mapping[str, Any] | None = None
) -> tuple[CEDModel, dict[str, torch.Tensor]]:
    """The encoder in a checkpoint of the Hub's layout (159 tensors at 12 blocks), or in one that `CEDModel` saved.

    Args:
        tensors: all of the checkpoint's.
        source: what they come from, for the message of an error.
        config: its `config.json`; None or empty reads the shape of the encoder off the tensors.

    Returns:
        The encoder in float32, in evaluation mode, and the tensors of the head, if there is one.

    Raises:
        ValueError: the checkpoint is of another layout, or the configuration is not its own.
    """
    renamed = separate(tensors, lambda name: name.removeprefix("encoder."), source)
    model = _fill(renamed.tensors, source, config)
    _check_head(renamed.set_aside, model.config.embed_dim, source)
    return model, renamed.set_aside


def original_from_ced(model: CEDModel, set_aside: Tensors) -> dict[str, torch.Tensor]:
    """The way back to the authors' layout.

    Args:
        model: the encoder, of the published front end.
        set_aside: what `ced_from_original` gave beside it, or the four tensors of `outputlayer` alone; the front end
            is then computed, which is 1e-5 exact.
    """
    names = {name: re.sub("^init_bn", "init_bn.1", name) for name in model.state_dict()}
    encoder = {names[name]: value.clone() for name, value in model.state_dict().items()}
    return {**front_end_tensors(), **encoder, **set_aside}


def hub_from_ced(model: CEDModel, head: Tensors) -> dict[str, torch.Tensor]:
    """The way back to the Hub's layout.

    Args:
        model: the encoder.
        head: the four tensors of `outputlayer`, under these names.
    """
    encoder = {f"encoder.{name}": value.clone() for name, value in model.state_dict().items()}
    return {**encoder, **_only_head(head)}


def separate(tensors: Tensors, rename: Callable[[str], str], source: str) -> Renamed:
    """Splits off head and front end and renames the rest.

    Args:
        tensors: all of a checkpoint's.
        rename: their names to ours.
        source: what they come from, for the message of an error.

    Raises:
        ValueError: two tensors would get one name.
    """
    aside = {name: value for name, value in tensors.items() if name.startswith((HEAD, FRONT_END))}
    return Renamed(rename_all({name: tensors[name] for name in tensors.keys() - aside.keys()}, rename, source), aside)


def front_end_tensors() -> dict[str, torch.Tensor]:
    """The constants of the published front end, as the authors' files hold them."""
    front_end = CEDFeatureExtractor()
    filters = torchaudio.functional.melscale_fbanks(
        n_freqs=front_end.n_fft // 2 + 1,
        f_min=front_end.f_min,
        f_max=front_end.f_max or front_end.sampling_rate / 2,
        n_mels=front_end.feature_size,
        sample_rate=front_end.sampling_rate,
    )
    return {WINDOW: torch.hann_window(front_end.win_size), FILTERS: filters}


def check_front_end(set_aside: Tensors, source: str) -> None:
    """Refuses weights that were trained on other spectrograms than `CEDFeatureExtractor` makes.

    Args:
        set_aside: the constants of the checkpoint's front end, and whatever else.
        source: what they come from, for the message of an error.

    Raises:
        ValueError: window or filter bank are missing or differ, or there are further constants.
    """
    expected = front_end_tensors()
    seen = {name: value for name, value in set_aside.items() if name.startswith(FRONT_END)}
    if seen.keys() != expected.keys():
        raise ValueError(f"{source} has the front end {sorted(seen)}; CED's is {sorted(expected)}")
    for name, value in expected.items():
        if seen[name].shape != value.shape:
            raise ValueError(f"{source}: {name} has shape {tuple(seen[name].shape)}; CED's has {tuple(value.shape)}")
        # Half precision rounds numbers up to 1 by a quarter of its epsilon.
        tolerance = FRONT_END_TOLERANCE + torch.finfo(seen[name].dtype).eps / 4
        if not (error := (seen[name].float() - value).abs().max()) <= tolerance:
            raise ValueError(
                f"{source}: {name} differs from CED's by {error:.2g}: it was trained on other spectrograms "
                "(16 kHz, 512 samples, 64 HTK mel bands from 0 to 8000 Hz are CED's)"
            )


def _fill(encoder: Tensors, source: str, config: Mapping[str, Any] | None = None) -> CEDModel:
    seen = _config_from_shapes(encoder, source) if not config else _config_from_file(config, source)
    with no_init_weights():
        model = CEDModel(seen)
    fill_exactly(model, encoder, source)
    return model.eval()


def _config_from_file(config: Mapping[str, Any], source: str) -> CEDConfig:
    if config.get("model_type") != CEDConfig.model_type:
        raise ValueError(f"{source} has a config.json of {config.get('model_type')!r} beside weights of CED")
    return CEDConfig(**{name: value for name, value in config.items() if name not in ("model_type", "auto_map")})


def _config_from_shapes(encoder: Tensors, source: str) -> CEDConfig:
    width, _, *patch = shape_of(encoder, "patch_embed.proj.weight", 4, source)
    if patch != [16, 16]:
        raise ValueError(
            f"{source} has patches of {patch[0]} mel bands x {patch[1]} frames; CED's are 16 x 16. Dasheng, the audio "
            "tower of GLAP, has 64 x 4: it is another encoder, which this package does not have"
        )
    columns = shape_of(encoder, "time_pos_embed", 4, source)[3]
    if columns != PUBLISHED_COLUMNS:
        raise ValueError(
            f"{source} has time positions for {columns} columns of patches; CED's chunks of 1012 frames have "
            f"{PUBLISHED_COLUMNS}. Give a folder whose config.json states the target_length"
        )
    if width % HEAD_DIM:
        raise ValueError(f"{source} is {width} wide; CED's heads are {HEAD_DIM} wide. Give a folder with a config.json")
    inner = shape_of(encoder, "blocks.0.mlp.fc1.weight", 2, source)[0]
    return CEDConfig(
        embed_dim=width,
        num_heads=width // HEAD_DIM,
        depth=count_layers(encoder, "blocks."),
        mlp_ratio=inner / width,
        qkv_bias="blocks.0.attn.qkv.bias" in encoder,
    )


def _check_head(set_aside: Tensors, width: int, source: str) -> None:
    """Refuses a head that is not LayerNorm and Linear: it would be the sign of another model."""
    if not (head := _only_head(set_aside)):
        return
    labels = shape_of(head, "outputlayer.1.weight", 2, source)[0]
    expected = {"0.weight": (width,), "0.bias": (width,), "1.weight": (labels, width), "1.bias": (labels,)}
    seen = {name.removeprefix(HEAD): tuple(value.shape) for name, value in head.items()}
    if seen != expected:
        raise ValueError(f"{source} has the tagging head {seen}; CED's is {expected}")


def _only_head(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name.startswith(HEAD)}
