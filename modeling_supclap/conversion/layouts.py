"""Recognise the layout (format) of a public checkpoint by its tensor names, and convert it to one of our models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoFeatureExtractor,
    ClapConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
)

from ..feature_extraction_ced import CEDFeatureExtractor
from ..modeling_supclap import SupCLAPModel
from .ced import ced_from_tensors
from .clap import load_clap, supclap_from_clap
from .files import Checkpoint
from .laion import clap_from_laion, laion_feature_extractor
from .ml_clap import AUDIO, GLAP_TEMPERATURE, TEXT, supclap_from_ml_clap
from .msclap import prepare_gpt2_tokenizer, supclap_from_msclap
from .open_clip import supclap_from_open_clip
from .open_clip_tokenizer import prepare_open_clip_tokenizer
from .provenance import SONAR_LICENSE, Origin
from .sonar import sonar_from_tensors
from .tensors import Tensors

FUSION_REMARK = (
    "LAION's fusion of long clips is not used: the model takes the first 10 s of a clip, and encode_audio splits "
    "longer recordings into chunks of 10 s"
)

# A model and its feature extractor.
Converted = tuple[PreTrainedModel, SequenceFeatureExtractor | None]


@dataclass(frozen=True)
class Layout:
    """Layout (format) of public checkpoints, with rules to recognise and convert them."""

    name: str
    marks: tuple[str, ...]  # regular expressions; each matches the start of at least one tensor name
    convert: Callable[[Tensors, Checkpoint], Converted]
    patch_mels: int | None = None  # mel bands per patch, to distinguish layouts with equal tensor names
    # {model part: license}; overrides the model card. The key "" is the license of all parts without a card.
    licenses: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""  # note for the user
    tokenizer: str = ""  # Hub id of the text tower's tokenizer; empty if there is no text tower
    max_tokens: int | None = None  # None: the tokenizer's own limit
    # Changes the tokenizer in place, for the configuration of the text tower.
    prepare_tokenizer: Callable[[PreTrainedTokenizerBase, Any], None] | None = None
    plain_captions: bool = False  # whether the processor lower-cases captions and removes punctuation

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        for name, value in tensors.items():
            is_patch = self.patch_mels is not None and name.endswith("patch_embed.proj.weight")
            if is_patch and value.shape[2:3] != (self.patch_mels,):
                return False
        patterns = map(re.compile, self.marks)
        return all(any(map(pattern.match, tensors)) for pattern in patterns)


@dataclass(frozen=True)
class Conversion:
    """Result of a checkpoint conversion.

    `parts` contains the origin (checkpoint and license) of each model part. `set_aside` contains the numbers of unused
    tensors in the checkpoint, as `{kind of tensor: number}`. `feature_extractor` is None for a text tower.
    """

    layout: Layout
    model: PreTrainedModel
    feature_extractor: SequenceFeatureExtractor | None
    parts: tuple[Origin, ...]
    set_aside: Mapping[str, int]
    remark: str = ""

    @property
    def reads_text(self) -> bool:
        """Whether the model has a text tower."""
        return isinstance(self.model, SupCLAPModel) or self.feature_extractor is None


def recognise(tensors: Mapping[str, torch.Tensor], origin: str) -> Layout:
    """Recognise the layout of a checkpoint by its tensor names. Raise ValueError if it is unknown."""
    for layout in LAYOUTS:
        if layout.fits(tensors):
            return layout
    raise ValueError(
        f"{origin} has an unknown layout; the first of its {len(tensors)} tensors are {sorted(tensors)[:8]}. "
        f"Known layouts: {'; '.join(layout.name for layout in LAYOUTS)}"
    )


def convert_checkpoint(checkpoint: Checkpoint) -> Conversion:
    """Convert a public checkpoint to one of our models.

    Returns:
        Conversion with a `CEDModel`, a `SonarTextModel` or a `SupCLAPModel`.

    Raises:
        ValueError: The layout is unknown, or the checkpoint does not match it.
    """
    layout = recognise(checkpoint.tensors, checkpoint.origin)
    tensors = Tensors(checkpoint.tensors, checkpoint.origin)
    model, feature_extractor = layout.convert(tensors, checkpoint)
    is_fused = getattr(getattr(model.config, "audio_config", None), "enable_fusion", False)
    parts = _get_parts(model, feature_extractor is not None, checkpoint, layout)
    remark = FUSION_REMARK if is_fused else layout.remark
    return Conversion(layout, model, feature_extractor, parts, tensors.aside, remark)


def _get_parts(model: PreTrainedModel, is_audio: bool, checkpoint: Checkpoint, layout: Layout) -> tuple[Origin, ...]:
    """Return the origin of each model part: the towers, the projections and the logit scale."""
    tower = "" if isinstance(model, SupCLAPModel) else "audio_model." if is_audio else "text_model."
    tensors = Counter((tower + name).split(".")[0] for name in model.state_dict())
    parameters: Counter[str] = Counter()
    for name, value in model.named_parameters():
        parameters[(tower + name).split(".")[0]] += value.numel()

    parts = []
    for part, count in tensors.items():
        # GLAP's card states Apache-2.0, but SONAR's license still applies to a text tower trained from SONAR.
        license = layout.licenses.get(part) or checkpoint.license or layout.licenses.get("", "")
        config = getattr(getattr(model, part, model), "config", None)
        parts.append(
            Origin(
                part=part,
                kind=getattr(config, "model_type", ""),
                source=checkpoint.origin,
                revision=checkpoint.revision,
                files=tuple(path.name for path in checkpoint.files),
                sha256=checkpoint.sha256,
                layout=layout.name,
                license=license,
                tensors=count,
                parameters=parameters[part],
            )
        )
    return tuple(parts)


TEXT_SCALE = "logit scale of the text direction"


def _convert_ced(tensors: Tensors, checkpoint: Checkpoint) -> Converted:
    """Convert a CED encoder. Its feature extractor is that of the folder, or else that of its configuration."""
    model = ced_from_tensors(tensors, checkpoint.config)
    if list(checkpoint.folder.glob("*processor_config.json")):
        patch = model.config.patch_frames
        return model, CEDFeatureExtractor.from_pretrained(checkpoint.folder, min_frames=patch)
    return model, CEDFeatureExtractor.from_config(model.config)


def _convert_ml_clap(tensors: Tensors, checkpoint: Checkpoint, temperature: float | None = None) -> Converted:
    model = supclap_from_ml_clap(tensors, temperature)
    return model, CEDFeatureExtractor.from_config(model.config.audio_config)


def _convert_laion(tensors: Tensors, checkpoint: Checkpoint) -> Converted:
    clap = clap_from_laion(tensors)
    tensors.aside[TEXT_SCALE] = 1
    audio_config: Any = clap.config.audio_config
    return supclap_from_clap(clap), laion_feature_extractor(audio_config.enable_fusion)


def _convert_clap_hub(tensors: Tensors, checkpoint: Checkpoint) -> Converted:
    if checkpoint.config.get("model_type") != ClapConfig.model_type:
        raise ValueError(
            f"{checkpoint.origin} has no config.json of a CLAP next to its weights; give the whole folder"
        )
    tensors.aside[TEXT_SCALE] = 1
    feature_extractor = AutoFeatureExtractor.from_pretrained(checkpoint.folder, trust_remote_code=False)
    return supclap_from_clap(load_clap(checkpoint.folder)), feature_extractor


# ---- the layouts: the first one that fits is used, so specific layouts come before general ones ----

JOINT_MARKS = (re.escape(AUDIO) + r"patch_embed\.", re.escape(TEXT) + r"encoder_frontend\.")
CED_MARKS = (r"(encoder\.)?init_bn\.", r"(encoder\.)?blocks\.0\.attn\.qkv\.")
SONAR_TOKENIZER = "cointegrated/SONAR_200_text_encoder"
LAYOUTS = (
    Layout(
        name="CLAP2, OpenCLIP",
        marks=(r"audio\.encoder\.vit\.", r"audio\.proj\.0\.", r"text\."),
        convert=lambda tensors, checkpoint: supclap_from_open_clip(tensors, checkpoint.config),
        remark="read from OpenCLIP's published format, checked against OpenCLIP 4.2.0.dev0 with random weights",
        tokenizer="openai-community/gpt2",
        prepare_tokenizer=prepare_open_clip_tokenizer,
    ),
    Layout(
        name="ML-CLAP",
        marks=JOINT_MARKS,
        patch_mels=16,
        convert=_convert_ml_clap,
        licenses={"text_model": SONAR_LICENSE},
        remark="ML-CLAP's weights have no license statement; its text tower was trained from SONAR. Its processor "
        "lower-cases captions and removes their punctuation",
        tokenizer=SONAR_TOKENIZER,
        plain_captions=True,
    ),
    Layout(
        name="GLAP",
        marks=JOINT_MARKS,
        patch_mels=64,
        convert=partial(_convert_ml_clap, temperature=GLAP_TEMPERATURE),
        licenses={"text_model": SONAR_LICENSE},
        remark="GLAP's files contain no temperature; it is set to 0.01, as in its authors' scores",
        tokenizer=SONAR_TOKENIZER,
    ),
    Layout(
        name="LAION-CLAP, authors' file",
        marks=(r"audio_branch\.", r"audio_projection\.0\."),
        convert=_convert_laion,
        remark="the file contains no license; the files of lukewys/laion_clap on the Hub are CC0-1.0",
        tokenizer="FacebookAI/roberta-base",
        max_tokens=77,
    ),
    Layout(
        name="CLAP, Hub",
        marks=(r"audio_model\.audio_encoder\.", r"text_model\.embeddings\.", r"logit_scale_a$"),
        convert=_convert_clap_hub,
        tokenizer="FacebookAI/roberta-base",
    ),
    Layout(
        name="MS-CLAP 2023",
        marks=(r"caption_encoder\.base\.wte\.", r"audio_encoder\.base\.htsat\."),
        convert=lambda tensors, checkpoint: supclap_from_msclap(tensors),
        remark="the file contains no license; the files of microsoft/msclap on the Hub are MIT",
        tokenizer="openai-community/gpt2",
        max_tokens=77,
        prepare_tokenizer=prepare_gpt2_tokenizer,
    ),
    Layout(
        name="MS-CLAP 2022",
        marks=(r"caption_encoder\.base\.embeddings\.", r"audio_encoder\.base\.conv_block1\."),
        convert=lambda tensors, checkpoint: supclap_from_msclap(tensors),
        remark="the file contains no license; the files of microsoft/msclap on the Hub are MIT",
        tokenizer="google-bert/bert-base-uncased",
        max_tokens=100,
    ),
    Layout(name="Dasheng", marks=CED_MARKS, patch_mels=64, convert=_convert_ced),
    Layout(
        name="CED",
        marks=CED_MARKS,
        convert=_convert_ced,
        remark="the authors' files contain no license; their copies on the Hub, mispeech/ced-*, are Apache-2.0",
    ),
    Layout(
        name="SONAR",
        marks=(
            r"(encoder\.)?(embed_tokens\.weight$|encoder_frontend\.embed\.)",
            r"(encoder\.)?layers\.0\.self_attn\.q_proj\.",
        ),
        convert=lambda tensors, checkpoint: (sonar_from_tensors(tensors, checkpoint.config), None),
        licenses={"": SONAR_LICENSE},
        tokenizer=SONAR_TOKENIZER,
    ),
)
