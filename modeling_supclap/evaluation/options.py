"""Options of an evaluation. They import none of the tasks, which read them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES
from modeling_supclap.metrics.names import MORE_RETRIEVAL_METRICS

from .embed import AudioPolicy
from .results import Intervals

TASK_NAMES = ("retrieval", "zero_shot", "zste", "linear_probe", "few_shot", "audio_to_audio")
CAPTION_HANDLINGS = ("all", "parallel", "each")

TEMPLATE_SETS: dict[str, list[str]] = {
    "supclap": ["This is a sound of {}"],
    "teminal": ["The sound of {}"],
    "teminal_classes": ["The sound of a {}"],
    "label": ["{}"],
    "ensemble": ["This is a sound of {}", "The sound of {}", "A recording of {}", "I can hear {}", "{}"],
}
"""Class prompt templates by name: SupCLAP 4.2.2, TeminAL B.4 and table 4, the label, and an ensemble (averaged)."""

Phrases = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class ZSTEOptions:
    """Options for ZSTE (zero-shot temporal evaluation).

    Attributes:
        num_items: Number of clips with a single sound, with consecutive sounds, and with simultaneous sounds. Single
            sounds are limited to the number of clips in the split.
        num_candidates: Number of candidate prompts in tasks 4A, 4B and 5B.
        seed: Random seed for sampling clips and candidates.
        tasks: Tasks to run, "1A" to "5B".
        prompts: Type of sound names in the prompts, "labels" or "phrases". None: use the type from the model's temporal
            post-training. If the model was not post-trained, use labels if English is the only language (as in the
            paper), else phrases.
    """

    num_items: int = 200
    num_candidates: int = 50
    seed: int = 0
    tasks: tuple[str, ...] = tuple(ZSTE_FAMILIES)
    join: RenderOptions = field(default_factory=RenderOptions)
    prompts: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks or set(self.tasks) - ZSTE_FAMILIES.keys():
            raise ValueError(f"tasks is {list(self.tasks)}; choose from {', '.join(ZSTE_FAMILIES)}")


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation options.

    Attributes:
        tasks: Any of "retrieval", "zero_shot", "zste" (zero-shot temporal evaluation), "linear_probe", "few_shot" and
            "audio_to_audio". All tasks except "retrieval" require labels. "zste" requires exactly one label per clip.
        languages: Retrieval languages, ISO 639-3 codes. With several languages, the rank variance over languages (MRV)
            and the embedding distances Gap and Dis are also computed. The distances are measured from English, or from
            the first language if English is not included.
        positives: "clip" matches each clip only with its own captions; "captions" also matches clips with identical
            captions.
        caption_handling: "all" uses every caption and requires the same number in each language; "parallel" uses the
            captions that exist in all languages; "each" uses all captions of each language.
        retrieval_metrics: Further metrics of retrieval, any of "mAP@16", "nDCG@10" and "MRR".
        on_bad_audio: Action for missing or unreadable recordings. "error" raises, and "skip" leaves them out.
        template_sets: English class prompt templates, `{set name: templates}`. Other languages use a single set named
            "captions".
        zste_languages: Languages for ZSTE. With several languages, MRV is also computed.
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.
        classes: Candidate classes for zero-shot classification and ZSTE. None: use all labels of the split and of
            `train_rows`.
        folds: Cross-validation folds, `{clip id: fold}`, if the split contains several folds. The scores then include
            the classification accuracy per fold. To classify a fold, a probe is trained on all other folds.
        train_rows: Rows to train probes on, if there are no folds.
        shots: Numbers of training clips per class for few-shot probes.
        data: Description of the data to store in the results, such as "dataset" and "split".
    """

    tasks: Sequence[str] = ("retrieval",)
    languages: Sequence[str] = ("eng",)
    positives: str = "clip"
    caption_handling: str = "all"
    retrieval_metrics: Sequence[str] = ()
    on_bad_audio: str = "error"
    audio: AudioPolicy = field(default_factory=AudioPolicy)
    template_sets: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"supclap": TEMPLATE_SETS["supclap"]})
    zero_shot_languages: Sequence[str] = ("eng",)
    zste: ZSTEOptions = field(default_factory=ZSTEOptions)
    zste_languages: Sequence[str] = ("eng",)
    intervals: Intervals = field(default_factory=Intervals)
    batch_size: int = 32
    phrases: Phrases | None = None
    classes: Sequence[str] | None = None
    folds: Mapping[str, int] | None = None
    train_rows: Any = None
    shots: Sequence[int] = (1, 5, 10)
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tasks", "languages", "zero_shot_languages", "zste_languages", "classes", "retrieval_metrics"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{name} is the string {value!r}; pass a list, such as {[value]}")
        if not isinstance(self.template_sets, Mapping):
            raise ValueError(
                f"template_sets is {self.template_sets!r}; pass a dict of lists, such as {{'supclap': ['a {{}}']}}"
            )
        if not self.tasks or set(self.tasks) - set(TASK_NAMES):
            raise ValueError(f"tasks is {list(self.tasks)}; choose from {', '.join(TASK_NAMES)}")
        if unknown := set(self.retrieval_metrics) - set(MORE_RETRIEVAL_METRICS):
            known = ", ".join(MORE_RETRIEVAL_METRICS)
            raise ValueError(f"retrieval_metrics has {sorted(unknown)}; choose from {known}")
        for name, allowed in (("positives", ("clip", "captions")), ("caption_handling", CAPTION_HANDLINGS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")

        for name in ("languages", "zero_shot_languages", "zste_languages"):
            codes = list(getattr(self, name))
            if not codes or len(set(codes)) < len(codes):
                raise ValueError(f"{name} is {codes}; pass a list of distinct codes, such as ['eng']")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        unused = [code for code in self.languages if code != "eng"]
        if unused and "retrieval" not in self.tasks:
            warnings.warn(
                f"languages has {', '.join(unused)}, which only retrieval uses; other tasks have zero_shot_languages "
                "and zste_languages",
                stacklevel=3,
            )
