"""Options of an evaluation. The command `supclap evaluate` extends these classes, and prints their texts.

This file imports neither torch nor the tasks, so that `--help` is fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.metrics.names import MORE_RETRIEVAL_METRICS

from .results import ZSTE_TASKS, Intervals

TASK_NAMES = ("retrieval", "zero_shot", "zste", "linear_probe", "few_shot", "audio_to_audio")
ZSTE_NAMES = tuple(name for name in ZSTE_TASKS if not name.endswith("_order"))

_CHOICES = {
    "positives": ("clip", "captions"),
    "caption_handling": ("all", "parallel", "each"),
    "on_bad_audio": ("error", "skip"),
    "pooling": ("mean", "best"),
}

TEMPLATE_SETS: dict[str, list[str]] = {
    "supclap": ["This is a sound of {}"],
    "teminal": ["The sound of {}"],
    "teminal_classes": ["The sound of a {}"],
    "label": ["{}"],
    "ensemble": ["This is a sound of {}", "The sound of {}", "A recording of {}", "I can hear {}", "{}"],
}
"""Class prompt templates by name: SupCLAP 4.2.2, TeminAL B.4 and table 4, the label, and an ensemble (averaged)."""


def find_templates(words: Sequence[str], own: str = "own") -> dict[str, list[str]]:
    """Return `{set name: templates}` for names of `TEMPLATE_SETS` and templates, which form the set `own`.

    >>> find_templates(["label", "a recording of {}"])
    {'label': ['{}'], 'own': ['a recording of {}']}
    """
    sets: dict[str, list[str]] = {}
    for word in words:
        if "{}" in word:
            sets.setdefault(own, []).append(word)
        elif word in TEMPLATE_SETS:
            sets[word] = TEMPLATE_SETS[word]
        else:
            names = ", ".join(TEMPLATE_SETS)
            raise ValueError(f"got the class prompt {word!r}; give a text with {{}}, or a set: {names}")
    return sets


Phrases = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class ZSTEOptions:
    """Options for ZSTE (zero-shot temporal evaluation).

    Attributes:
        num_items: Number of ZSTE clips of each kind: single, consecutive and overlaid sounds. Single sounds are limited
            to the number of clips in the split.
        num_candidates: Number of candidate prompts in ZSTE's tasks 4A, 4B and 5B.
        seed: Random seed for sampling clips and candidates.
        tasks: Tasks of ZSTE, 1A to 5B.
        prompts: Names of sounds in the prompts of ZSTE: labels or phrases. Default: as in the model's temporal
            post-training; without post-training, labels for English alone (as in the paper), else phrases.
    """

    num_items: int = 200
    num_candidates: int = 50
    seed: int = 0
    tasks: tuple[str, ...] = ZSTE_NAMES
    join: RenderOptions = field(default_factory=RenderOptions)
    prompts: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks or set(self.tasks) - set(ZSTE_NAMES):
            raise ValueError(f"tasks is {list(self.tasks)}; choose from {', '.join(ZSTE_NAMES)}")


@dataclass
class AudioPolicy:
    """Long and short recordings: truncation, chunks, and pooling of the chunks.

    Attributes:
        max_audio_seconds: Maximum length of a recording in seconds; longer ones are truncated. Default: unlimited.
        chunk_seconds: Chunk length in seconds. Longer recordings are split into chunks. The last chunk starts earlier,
            so that it ends with the recording. Default: the model's maximum (10 s for CLAP), at most five minutes.
        pooling: Pooling of chunks: `mean` averages their embeddings and normalises the mean. `best` keeps all chunks;
            the score of a text is its highest cosine over the chunks.
        pad_short_clips: Append silence to clips that are shorter than the model's minimum; by default, they are
            unusable.
    """

    max_audio_seconds: float | None = None
    chunk_seconds: float | None = None
    pooling: str = "mean"
    pad_short_clips: bool = False

    def __post_init__(self) -> None:
        _require_choice(self, "pooling")
        for name in ("max_audio_seconds", "chunk_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be more than 0 seconds")

    def sentence(self) -> str:
        """Describe the policy in one sentence."""
        padded = "; shorter clips than the model's minimum are padded with zeros" if self.pad_short_clips else ""
        part = "all of" if self.max_audio_seconds is None else f"the first {self.max_audio_seconds:g} s of"
        if self.chunk_seconds is None:
            return f"{part} each recording, embedded at once{padded}"
        pooled = (
            "the normalised mean of their embeddings" if self.pooling == "mean" else "the best chunk for each text"
        )
        return f"{part} each recording, in chunks of {self.chunk_seconds:g} s if it is longer; {pooled}{padded}"


@dataclass
class TaskOptions:
    """Tasks, languages and captions.

    Attributes:
        tasks: Tasks: retrieval, zero_shot, zste (zero-shot temporal evaluation), linear_probe, few_shot,
            audio_to_audio. All except retrieval require labels. zste requires exactly one label per clip.
        languages: Retrieval languages, ISO 639-3 codes. With several languages, the rank variance over languages (MRV)
            and the embedding distances Gap and Dis are also computed. The distances are measured from English, or from
            the first language if English is not included.
        positives: Captions that are correct for a clip in retrieval: `clip` (its own) or `captions` (also those of
            clips with identical captions).
        caption_handling: Captions to use: `all` (each language must have equally many), `parallel` (those that exist in
            all languages), or `each` (all captions of each language).
        retrieval_metrics: Further metrics of retrieval: mAP@16, nDCG@10 or MRR.
        group_by: Column such as site, speaker or year. Retrieval and zero-shot classification are also scored on the
            clips of each value alone.
        on_bad_audio: Action for missing or unreadable recordings: `error`, or `skip`, which leaves them out.
        zero_shot_languages: Languages of class prompts.
        zste_languages: Languages of ZSTE. With several languages, MRV is also computed.
        shots: Numbers of training clips per class for few-shot probes.
        batch_size: Number of clips or texts in a batch. Results do not depend on it.
    """

    tasks: list[str] = field(default_factory=lambda: ["retrieval"])
    languages: list[str] = field(default_factory=lambda: ["eng"])
    positives: str = "clip"
    caption_handling: str = "all"
    retrieval_metrics: list[str] = field(default_factory=list)
    group_by: str | None = None
    on_bad_audio: str = "error"
    zero_shot_languages: list[str] = field(default_factory=lambda: ["eng"])
    zste_languages: list[str] = field(default_factory=lambda: ["eng"])
    shots: list[int] = field(default_factory=lambda: [1, 5, 10])
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("tasks", "languages", "zero_shot_languages", "zste_languages", "classes", "retrieval_metrics"):
            value = getattr(self, name, None)
            if isinstance(value, str):
                raise ValueError(f"{name} is the string {value!r}; pass a list, such as {[value]}")
        if not self.tasks or set(self.tasks) - set(TASK_NAMES):
            raise ValueError(f"tasks is {list(self.tasks)}; choose from {', '.join(TASK_NAMES)}")
        if unknown := set(self.retrieval_metrics) - set(MORE_RETRIEVAL_METRICS):
            known = ", ".join(MORE_RETRIEVAL_METRICS)
            raise ValueError(f"retrieval_metrics has {sorted(unknown)}; choose from {known}")
        for name in ("positives", "caption_handling", "on_bad_audio"):
            _require_choice(self, name)
        for name in ("languages", "zero_shot_languages", "zste_languages"):
            codes = list(getattr(self, name))
            if not codes or len(set(codes)) < len(codes):
                raise ValueError(f"{name} is {codes}; pass a list of distinct codes, such as ['eng']")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")


def _require_choice(options: Any, name: str) -> None:
    value = getattr(options, name)
    if value not in _CHOICES[name]:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(_CHOICES[name])}")


@dataclass
class EvaluationOptions(TaskOptions):
    """Evaluation options.

    Attributes:
        template_sets: English class prompt templates, `{set name: templates}`. Other languages use a single set named
            "captions".
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.
        classes: Candidate classes for zero-shot classification. None: use the labels of the split.
        folds: Cross-validation folds, `{clip id: fold}`, if the split contains several folds. The scores then include
            the classification accuracy per fold. To classify a fold, a probe is trained on all other folds.
        train_rows: Rows to train probes on, if there are no folds.
        data: Description of the data to store in the results, such as "dataset" and "split".
    """

    audio: AudioPolicy = field(default_factory=AudioPolicy)
    template_sets: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"supclap": TEMPLATE_SETS["supclap"]})
    zste: ZSTEOptions = field(default_factory=ZSTEOptions)
    intervals: Intervals = field(default_factory=Intervals)
    phrases: Phrases | None = None
    classes: Sequence[str] | None = None
    folds: Mapping[str, int] | None = None
    train_rows: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.template_sets, Mapping):
            raise ValueError(
                f"template_sets is {self.template_sets!r}; pass a dict of lists, such as {{'supclap': ['a {{}}']}}"
            )
        unused = [code for code in self.languages if code != "eng"]
        if unused and "retrieval" not in self.tasks:
            warnings.warn(
                f"languages has {', '.join(unused)}, which only retrieval uses; other tasks have zero_shot_languages "
                "and zste_languages",
                stacklevel=3,
            )
