"""Recognises which public checkpoint a file is, by the names of its tensors, and converts it to a model of ours.

Nothing is guessed: a checkpoint fits one layout to the last tensor, or there is an error that says what does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    ClapConfig,
    ClapModel,
    PreTrainedModel,
    SequenceFeatureExtractor,
)
from transformers.initialization import no_init_weights

from ..feature_extraction_ced import CEDFeatureExtractor
from ..modeling_ced import CEDModel
from ..modeling_sonar import SonarTextModel
from ..modeling_supclap import SupCLAPModel
from .ced import HEAD, ced_from_hub, ced_from_original
from .clap import supclap_from_clap
from .files import Checkpoint
from .laion import clap_from_laion, laion_feature_extractor, reasons
from .ml_clap import AUDIO, TEXT, below, supclap_from_ml_clap
from .provenance import SONAR_LICENSE
from .sonar import sonar_from_fairseq2, sonar_from_hub, sonar_from_legacy
from .tensors import Tensors, fill_exactly

KINDS = ("ced", "sonar", "ml-clap", "laion", "msclap", "glap")
PARTS = ("whole", "audio", "text")

Converted = tuple[PreTrainedModel, SequenceFeatureExtractor | None, Mapping[str, int]]
"""A model, what makes its audio inputs, and how many tensors it has no place for, by what they were."""


@dataclass(frozen=True)
class Layout:
    """One way in which a public checkpoint is laid out.

    Args:
        name: what it is called.
        kind: one of `KINDS`, or "other" for what is known and never converted.
        marks: regular expressions; a checkpoint is of this layout if each matches the beginning of some name.
        convert: makes our model of it; None where we have none.
        licenses: which every such file is bound by, in the Hub's notation, by the parts of the model; "" stands for
            all others. What permits more is left to the source's own card.
        remark: what a user has to know of it.
        refusal: where we have no model, the reason and what to do.
        patch_rows: where the names do not tell two layouts apart, the mel bands of a patch.
    """

    name: str
    kind: str
    marks: tuple[str, ...]
    convert: Callable[[Checkpoint], Converted] | None = None
    licenses: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    refusal: str = ""
    patch_rows: int | None = None

    def fits(self, tensors: Tensors) -> bool:
        """Whether these tensors are laid out so."""
        if not all(any(re.match(mark, name) for name in tensors) for mark in self.marks):
            return False
        patches = [value for name, value in tensors.items() if name.endswith("patch_embed.proj.weight")]
        return self.patch_rows is None or any(each.ndim == 4 and each.shape[2] == self.patch_rows for each in patches)


@dataclass(frozen=True)
class Part:
    """Where a part of a converted model comes from; an entry of `provenance.json`.

    Args:
        part: its name in a `SupCLAPModel`, such as `audio_model`.
        source: Hub id, or the name of a file or folder.
        revision: the commit, of a Hub repository.
        files: the names of the weight files.
        sha256: of them.
        layout: the recognised layout.
        license: what the source states, or what binds every file of its layout; empty where neither is.
        tensors: how many the part has.
        parameters: how many weights the part has.
    """

    part: str
    source: str
    revision: str | None
    files: tuple[str, ...]
    sha256: str
    layout: str
    license: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint.

    Args:
        layout: the recognised layout.
        model: in float32, in evaluation mode.
        feature_extractor: what makes its audio inputs; None for a text tower.
        parts: where each part of the model comes from.
        set_aside: how many tensors of the checkpoint the model has no place for, by what they were.
        remark: what a user has to know of the checkpoint.
    """

    layout: str
    model: PreTrainedModel
    feature_extractor: SequenceFeatureExtractor | None
    parts: tuple[Part, ...]
    set_aside: Mapping[str, int]
    remark: str = ""


def recognise(tensors: Tensors, source: str, kind: str = "auto") -> Layout:
    """The layout of a checkpoint, told by the names of its tensors.

    Args:
        tensors: all of them.
        source: what they come from, for the message of an error.
        kind: look only among these layouts, one of `KINDS`; "auto" looks among all.

    Raises:
        ValueError: it is of no known layout, or of none of this kind.
    """
    if kind not in ("auto", *KINDS):
        raise ValueError(f"there is no kind {kind!r}; give auto or one of {', '.join(KINDS)}")
    found = next((layout for layout in LAYOUTS if layout.fits(tensors)), None)
    if found is not None and kind in ("auto", found.kind):
        return found
    if found is not None:
        raise ValueError(f"{source} is laid out as {found.name}, which is of kind {found.kind!r} and not {kind!r}")
    known = "\n  ".join(layout.name for layout in LAYOUTS if layout.kind in KINDS)
    names = ", ".join(sorted(tensors)[:8])
    raise ValueError(
        f"{source} is of no layout that is known here. The first of its {len(tensors)} tensors are {names}.\n"
        f"Known are:\n  {known}"
    )


def convert_checkpoint(checkpoint: Checkpoint, kind: str = "auto", part: str = "whole") -> Conversion:
    """Makes a model of ours out of a public checkpoint.

    Args:
        checkpoint: as `read_checkpoint` gives it.
        kind: as for `recognise`.
        part: "whole", or of a model of two towers only its "audio" or its "text" tower.

    Returns:
        A `CEDModel`, a `SonarTextModel`, a `SupCLAPModel` or one of its towers, and what belongs to it.

    Raises:
        ValueError: the checkpoint is of no known layout or does not fit it, no model of ours can hold it, or it has
            no such part.
    """
    layout = recognise(checkpoint.tensors, checkpoint.source, kind)
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}; give one of {', '.join(PARTS)}")
    if layout.convert is None and (layout.name, part) == (GLAP, "text"):
        text = below(checkpoint.tensors, TEXT)
        aside = {"of the rest of the model": len(checkpoint.tensors) - len(text)}
        converted: Converted = (sonar_from_fairseq2(text, f"{checkpoint.source}, its text encoder"), None, aside)
    elif layout.convert is None:
        raise ValueError(f"{checkpoint.source} is laid out as {layout.name}: {layout.refusal}")
    else:
        converted = _only_part(layout.convert(checkpoint), part, layout.name)
    model, feature_extractor, set_aside = converted
    parts = _parts(model, checkpoint, layout)
    return Conversion(layout.name, model, feature_extractor, parts, set_aside, layout.remark)


def _only_part(converted: Converted, part: str, name: str) -> Converted:
    model, feature_extractor, set_aside = converted
    if part == "whole":
        return converted
    if isinstance(model, SupCLAPModel):
        tower = model.audio_model if part == "audio" else model.text_model
        others = {"of the rest of the model": len(model.state_dict()) - len(tower.state_dict())}
        return tower, feature_extractor if part == "audio" else None, {**set_aside, **others}
    if (part == "text") != isinstance(model, SonarTextModel):
        raise ValueError(f"{name} has no {part} tower; it is a single {type(model).__name__}")
    return converted


def _parts(model: PreTrainedModel, checkpoint: Checkpoint, layout: Layout) -> tuple[Part, ...]:
    """The model's parts: a tower is one, a model of two has them, its projections and its scale."""
    tower = "" if isinstance(model, SupCLAPModel) else f"{'audio' if _is_audio(model) else 'text'}_model."
    tensors = Counter((tower + name).split(".")[0] for name in model.state_dict())
    parameters: Counter[str] = Counter()
    for name, value in model.named_parameters():
        parameters[(tower + name).split(".")[0]] += value.numel()
    return tuple(
        Part(
            part=part,
            source=checkpoint.source,
            revision=checkpoint.revision,
            files=tuple(path.name for path in checkpoint.files),
            sha256=checkpoint.sha256,
            layout=layout.name,
            license=checkpoint.license or layout.licenses.get(part, layout.licenses.get("", "")),
            tensors=count,
            parameters=parameters[part],
        )
        for part, count in tensors.items()
    )


def _is_audio(model: PreTrainedModel) -> bool:
    return model.main_input_name == "input_features"


# ---- the layouts ----


def _convert_ced_original(checkpoint: Checkpoint) -> Converted:
    model, aside = ced_from_original(checkpoint.tensors, checkpoint.source)
    return model, CEDFeatureExtractor(), _ced_reasons(aside)


def _convert_ced_hub(checkpoint: Checkpoint) -> Converted:
    model, aside = ced_from_hub(checkpoint.tensors, checkpoint.source, checkpoint.config)
    return model, _ced_feature_extractor(checkpoint, model), _ced_reasons(aside)


def _convert_sonar_fairseq2(checkpoint: Checkpoint) -> Converted:
    return sonar_from_fairseq2(checkpoint.tensors, checkpoint.source), None, {}


def _convert_sonar_legacy(checkpoint: Checkpoint) -> Converted:
    model, aside = sonar_from_legacy(checkpoint.tensors, checkpoint.source)
    return model, None, {"constants of fairseq": len(aside)}


def _convert_sonar_hub(checkpoint: Checkpoint) -> Converted:
    return sonar_from_hub(checkpoint.tensors, checkpoint.source, checkpoint.config), None, {}


def _convert_ml_clap(checkpoint: Checkpoint) -> Converted:
    model, aside = supclap_from_ml_clap(checkpoint.tensors, checkpoint.source)
    return model, CEDFeatureExtractor(), _ced_reasons(below(aside, AUDIO))


def _convert_laion(checkpoint: Checkpoint) -> Converted:
    clap, aside = clap_from_laion(checkpoint.tensors, checkpoint.source)
    audio_config: Any = clap.config.audio_config
    feature_extractor = laion_feature_extractor(audio_config.enable_fusion)
    return supclap_from_clap(clap), feature_extractor, {**reasons(aside), "scale from text to audio": 1}


def _convert_clap_hub(checkpoint: Checkpoint) -> Converted:
    if checkpoint.config.get("model_type") != ClapConfig.model_type:
        raise ValueError(f"{checkpoint.source} has no config.json of a CLAP beside its weights; give its whole folder")
    with no_init_weights():
        clap: Any = ClapModel(ClapConfig.from_dict(dict(checkpoint.config)))
    # Numbers of positions and types, which transformers did not always write.
    constants = {name: value.clone() for name, value in clap.state_dict().items() if name.endswith("_ids")}
    fill_exactly(clap, {**constants, **checkpoint.tensors}, checkpoint.source)
    feature_extractor = AutoFeatureExtractor.from_pretrained(checkpoint.folder)
    return supclap_from_clap(clap.eval()), feature_extractor, {"scale from text to audio": 1}


def _ced_reasons(set_aside: Tensors) -> dict[str, int]:
    head = sum(name.startswith(HEAD) for name in set_aside)
    counts = {"tagging head": head, "front end, which agrees": len(set_aside) - head}
    return {why: count for why, count in counts.items() if count}


def _ced_feature_extractor(checkpoint: Checkpoint, model: CEDModel) -> CEDFeatureExtractor:
    """The one beside the weights, or the published one; either way the one that the configuration describes."""
    files = [checkpoint.folder / name for name in ("preprocessor_config.json", "processor_config.json")]
    has_own = any(file.is_file() for file in files)
    extractor = CEDFeatureExtractor.from_pretrained(checkpoint.folder) if has_own else CEDFeatureExtractor()
    fields = ("n_fft", "win_size", "hop_size", "f_min", "center")
    half = extractor.sampling_rate / 2
    seen = {name: getattr(extractor, name) for name in fields}
    seen |= {"f_max": extractor.f_max or half, "n_mels": extractor.feature_size}
    wanted = {name: getattr(model.config, name) for name in fields}
    wanted |= {"f_max": model.config.f_max or half, "n_mels": model.config.n_mels}
    if seen != wanted:
        differing = {name: (seen[name], wanted[name]) for name in seen if seen[name] != wanted[name]}
        raise ValueError(f"{checkpoint.source}: feature extractor and config.json differ in {differing}")
    return extractor


GLAP = "GLAP"
# The first that fits is taken, so what is more particular stands first.
LAYOUTS = (
    Layout(
        "ML-CLAP",
        "ml-clap",
        (re.escape(AUDIO) + r"patch_embed\.", re.escape(TEXT) + r"encoder_frontend\."),
        _convert_ml_clap,
        {"text_model": SONAR_LICENSE},
        remark="ML-CLAP states no licence for its weights; its text tower was trained from SONAR",
        patch_rows=16,
    ),
    Layout(
        GLAP,
        "glap",
        (re.escape(AUDIO) + r"patch_embed\.", re.escape(TEXT) + r"encoder_frontend\."),
        licenses={"text_model": SONAR_LICENSE},
        refusal="its audio tower is Dasheng, whose patches are 64 x 4, and this package has no Dasheng. Its text tower "
        "is SONAR and can be had alone, as the part 'text'",
    ),
    Layout(
        "LAION-CLAP, authors' file",
        "laion",
        (r"audio_branch\.", r"audio_projection\.0\."),
        _convert_laion,
        remark="the file states no licence; those in lukewys/laion_clap on the Hub are CC0-1.0",
    ),
    Layout(
        "CLAP, Hub",
        "laion",
        (r"audio_model\.audio_encoder\.", r"text_model\.embeddings\.", r"logit_scale_a$"),
        _convert_clap_hub,
    ),
    Layout(
        "MS-CLAP 2023",
        "msclap",
        (r"caption_encoder\.", r"audio_encoder\.base\.htsat\."),
        refusal="its text tower is GPT-2, of which the last token is read, and its projections are residual with a "
        "layer norm and without bias; a SupCLAPModel has neither",
    ),
    Layout(
        "MS-CLAP 2022",
        "msclap",
        (r"caption_encoder\.", r"audio_encoder\."),
        refusal="its audio tower is the convolutional Cnn14 and its projections are residual with a layer norm and "
        "without bias; a SupCLAPModel has neither",
    ),
    Layout(
        "Dasheng",
        "other",
        (r"patch_embed\.proj\.", r"blocks\.0\.attn\.qkv\."),
        refusal="its patches are 64 x 4, CED's are 16 x 16, and this package has no Dasheng",
        patch_rows=64,
    ),
    Layout(
        "CED, authors' file",
        "ced",
        (r"init_bn\.1\.", r"blocks\.0\.attn\.qkv\."),
        _convert_ced_original,
        remark="the file states no licence; its authors' copies on the Hub, mispeech/ced-*, are Apache-2.0",
    ),
    Layout(
        "CED, Hub",
        "ced",
        (r"(encoder\.)?init_bn\.weight", r"(encoder\.)?blocks\.0\.attn\.qkv\."),
        _convert_ced_hub,
    ),
    Layout(
        "a model with a text decoder",
        "other",
        (r"(model\.)?decoder(_frontend)?\.",),
        refusal="SONAR's text encoder has none, and the encoder of a translation model is not SONAR's; give "
        "cointegrated/SONAR_200_text_encoder or sonar_text_encoder.pt",
    ),
    Layout(
        "SONAR, fairseq2",
        "sonar",
        (r"encoder_frontend\.embed\.", r"encoder\.layers\."),
        _convert_sonar_fairseq2,
        {"": SONAR_LICENSE},
    ),
    Layout(
        "SONAR, legacy fairseq",
        "sonar",
        (r"layers\.0\.self_attn\.q_proj\.", r"embed_tokens\.weight$", r"version$|embed_positions\._float_tensor$"),
        _convert_sonar_legacy,
        {"": SONAR_LICENSE},
    ),
    Layout(
        "SONAR, Hub",
        "sonar",
        (r"(encoder\.)?layers\.0\.self_attn\.q_proj\.", r"(encoder\.)?embed_tokens\.weight$"),
        _convert_sonar_hub,
        {"": SONAR_LICENSE},
    ),
    Layout(
        "SupCLAPModel",
        "other",
        (r"(model\.)?audio_model\.", r"(model\.)?text_model\.", r"(model\.)?logit_scale$"),
        refusal="that is what a conversion makes; load it with SupCLAPModel.from_pretrained",
    ),
)
