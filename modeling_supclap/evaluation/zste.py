"""ZSTE, the zero-shot temporal evaluation [T 4.2, B.4]: questions on clips that are put together as they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions, compose
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, set_hash, zste_prompts, zste_set
from modeling_supclap.metrics.zste import zste_chance, zste_outcomes, zste_ranks

from .clip_embeddings import AudioPolicy, ClipEmbeddings, matrix_of
from .embedded_split import EmbeddedSplit, embed_waveforms
from .receipts import Intervals, score
from .zero_shot import Phrases, single_labels

# Tasks whose candidates say when something sounds, so that languages can disagree on it.
TEMPORAL_TASKS = ("3A", "3B", "4A", "4B", "5A", "5B")


@dataclass(frozen=True)
class ZSTEOptions:
    """What is asked.

    Attributes:
        num_items: Clips of each family; of single sounds at most as many as the split has.
        num_candidates: Prompts of tasks 4 and 5B.
        seed: Of the draw of clips and candidates.
        tasks: Some of "1A" to "5B".
        join: How two clips that follow each other are put together.
    """

    num_items: int = 200
    num_candidates: int = 50
    seed: int = 0
    tasks: tuple[str, ...] = tuple(ZSTE_FAMILIES)
    join: RenderOptions = field(default_factory=RenderOptions)

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in ZSTE_FAMILIES]
        if unknown or not self.tasks:
            raise ValueError(f"tasks are {list(self.tasks)}; give some of {', '.join(ZSTE_FAMILIES)}")


def evaluate_zste(
    split: EmbeddedSplit,
    options: ZSTEOptions | None = None,
    languages: Sequence[str] = ("eng",),
    phrases: Phrases | None = None,
    intervals: Intervals | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Draws a set of clips from a split, composes and embeds each once, and asks every task in every language.

    Both recordings of a pair are cut to half of what the model takes at once, where it has a limit, so that both are
    heard in one go.

    Args:
        split: The embedded split; each clip has exactly one label.
        options: What is asked.
        languages: ISO 639-3 codes. The questions are the same in all of them.
        phrases: `phrases[label][language]`. English alone asks for the labels themselves, as the paper does; with
            other languages it asks for the phrases too.
        intervals: How intervals are drawn, over pairs of source recordings.

    Returns:
        The part "zste" of a receipt's scores, its arrays, and what the protocol says of the set. With several
        languages the scores hold "MRV": how much the rank of the right answer varies between them, task by task.

    Raises:
        ValueError: A clip has no label or several, there are too few classes for the number of candidates, or a
            label has no phrase in a language.
    """
    options, intervals = options or ZSTEOptions(), intervals or Intervals()
    labels = sorted(set(single_labels(split.rows)))
    spoken = None if list(languages) == ["eng"] else phrases
    records = zste_set(split.rows, options.seed, options.num_items)
    asked = [record for record in records if record["family"] in {ZSTE_FAMILIES[task] for task in options.tasks}]
    clips, clip_seconds = embed_records(split, asked, options.join)
    place = {record["id"]: index for index, record in enumerate(asked)}
    sources = _sources(split, asked)
    found: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, list[np.ndarray]] = {task: [] for task in options.tasks}
    for language in languages:
        found[language] = {}
        for task in options.tasks:
            questions = [record for record in asked if record["family"] == ZSTE_FAMILIES[task]]
            prompts = [
                zste_prompts(task, record, labels, spoken, language, options.num_candidates, options.seed)
                for record in questions
            ]
            places = [place[record["id"]] for record in questions]
            outcome, rank, chance = _ask(split, clips, places, prompts, task, language)
            ranks[task].append(rank)
            clusters = sources[places]
            found[language][task] = score(outcome.mean(), intervals.of({task: outcome}, clusters)[task], chance)
            prefix = f"zste/{language}/{task}"
            ids = np.array([record["id"] for record in questions])
            arrays |= {f"{prefix}/question_id": ids, f"{prefix}/cluster": clusters, f"{prefix}/score": outcome}
    if len(languages) > 1:
        found["MRV"], kept = _consistency(options.tasks, ranks, arrays, languages[0], intervals)
        arrays |= kept
    protocol = {
        **{key: value for key, value in asdict(options).items() if key != "tasks"},
        "tasks": list(options.tasks),
        "set_hash": set_hash(records),
        "languages": list(languages),
        "prompts": "labels" if spoken is None else "phrases",
        "clip_seconds": clip_seconds,
    }
    return {"zste": found}, arrays, protocol


def embed_records(
    split: EmbeddedSplit, records: Sequence[Mapping[str, Any]], join: RenderOptions
) -> tuple[ClipEmbeddings, dict[str, float | None]]:
    """Composes the clips of ZSTE's records and embeds each once.

    Args:
        split: Where the recordings are from.
        records: From `modeling_supclap.datasets_scripts.temporal.zste.zste_set`.
        join: How two clips that follow each other are put together.

    Returns:
        The embeddings, in the order of the records; and how much of each recording is heard alone and in a pair.
    """
    model, policy = split.model, split.policy
    whole = _least(policy.max_audio_seconds, policy.chunk_seconds)
    half = _least(policy.max_audio_seconds, None if policy.chunk_seconds is None else policy.chunk_seconds / 2)

    def read(record: Mapping[str, Any]) -> np.ndarray:
        seconds = whole if record["family"] == "single" else half
        waveforms = [split.read(clip_id, seconds) for clip_id in record["clip_ids"]]
        return compose(record["family"], waveforms, model.sampling_rate_hz, join)

    key = {
        "zste": [[record["family"], *(split.files[clip_id] for clip_id in record["clip_ids"])] for record in records],
        "join": asdict(join),
        "seconds": [whole, half],
    }
    # A join with a gap may pass the model's limit by a little; then the pair is heard in chunks like any clip.
    heard = AudioPolicy(None, policy.chunk_seconds, policy.pooling)
    embedded = embed_waveforms(model, records, read, heard, split.cache, key, "error", split.batch_size)
    return embedded, {"single": whole, "pair": half}


def _least(*seconds: float | None) -> float | None:
    return min((value for value in seconds if value is not None), default=None)


def _sources(split: EmbeddedSplit, records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The recordings that each composed clip is made of: clips of the same ones are drawn together."""
    source = dict(zip((row["clip_id"] for row in split.rows), split.sources.tolist(), strict=True))
    return np.array(["+".join(sorted({source[clip_id] for clip_id in record["clip_ids"]})) for record in records])


def _ask(
    split: EmbeddedSplit, clips: ClipEmbeddings, places: Sequence[int], prompts: Sequence[Any], task: str, language: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """The score and the rank of each question of a task, and what random answers would score."""
    different = sorted({text for prompt in prompts for text in prompt.texts})
    embeds = split.texts(different, language)
    column = {text: index for index, text in enumerate(different)}
    cosines = matrix_of(clips.select(places).similarity(embeds, "audio"))
    scores = [row[[column[text] for text in prompt.texts]] for row, prompt in zip(cosines, prompts, strict=True)]
    relevant, tasks = [prompt.right for prompt in prompts], [task] * len(prompts)
    chance = float(np.mean([zste_chance(len(prompt.texts), task) for prompt in prompts]))
    outcome = zste_outcomes(scores, relevant, tasks)[task]
    return outcome, zste_ranks(scores, relevant, tasks), chance


def _consistency(
    tasks: Sequence[str],
    ranks: Mapping[str, Sequence[np.ndarray]],
    arrays: Mapping[str, np.ndarray],
    anchor: str,
    intervals: Intervals,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    found, kept = {}, {}
    for task in tasks:
        if task in TEMPORAL_TASKS:
            table = np.stack(ranks[task], axis=1)
            variances = table.var(axis=1)
            drawn = intervals.of({task: variances}, arrays[f"zste/{anchor}/{task}/cluster"])
            found[task] = score(variances.mean(), drawn[task])
            kept[f"zste/ranks/{task}"] = table
    return found, kept
