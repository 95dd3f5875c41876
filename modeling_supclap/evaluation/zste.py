"""The order of sounds: ZSTE's questions on composed clips [T 4.2, B.4], and the pairs of TeminAL's post-training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions, compose
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, Prompts, set_hash, zste_prompts, zste_set
from modeling_supclap.metrics.zste import zste_chance, zste_order_outcomes, zste_outcomes, zste_ranks

from ..audio_input import Recording
from .embed import AudioPolicy, ClipEmbeddings, EmbeddedSplit, embed_recordings, in_row_order
from .results import Intervals, score
from .zero_shot import Phrases, single_labels

# Tasks whose candidates say when something sounds, so that languages can disagree on it.
TEMPORAL_TASKS = ("3A", "3B", "4A", "4B", "5A", "5B")
ORDER_BLIND = {"3A": 1 / 2, "4A": 1 / 2}
"""What a model scores that hears every sound, and whether two sound at once, but not which is first."""


@dataclass(frozen=True)
class ZSTEOptions:
    """What is asked.

    Attributes:
        num_items: Clips of each family; of single sounds at most as many as the split has.
        num_candidates: Prompts of tasks 4 and 5B.
        seed: The seed of the draw of clips and candidates.
        tasks: Some of "1A" to "5B".
        join: How two clips that follow each other are put together.
        prompts: What sounds are called, "labels" or "phrases"; None asks for what the model was post-trained with, and
            of other models for labels in English alone, as the paper does, and for phrases in several languages.
    """

    num_items: int = 200
    num_candidates: int = 50
    seed: int = 0
    tasks: tuple[str, ...] = tuple(ZSTE_FAMILIES)
    join: RenderOptions = field(default_factory=RenderOptions)
    prompts: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks or set(self.tasks) - ZSTE_FAMILIES.keys():
            raise ValueError(f"tasks are {list(self.tasks)}; give some of {', '.join(ZSTE_FAMILIES)}")


def evaluate_zste(
    split: EmbeddedSplit,
    options: ZSTEOptions | None = None,
    languages: Sequence[str] = ("eng",),
    phrases: Phrases | None = None,
    intervals: Intervals | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Draws a set of clips from a split, composes and embeds each once, and asks every task in every language.

    Both recordings of a pair are cut to half of what the model hears at once, where it has a limit (CED 10.12 s), so
    that both are heard in one go.

    Args:
        split: The embedded split; each clip has exactly one label.
        options: What is asked.
        languages: ISO 639-3 codes. The questions are the same in all of them.
        phrases: `phrases[label][language]`, for where phrases are asked for.
        intervals: How intervals are drawn, over pairs of source recordings.

    Returns:
        The scores "zste", of tasks 3A and 4A also whether the right order is preferred to the other ("3A_order"); the
        arrays of `Results`; and what the protocol says of the set. With several languages "all" holds MRV, how much the
        rank of the right answer varies between them, task by task.

    Raises:
        ValueError: A clip has no label or several, there are too few classes for the number of candidates, or a
            label has no phrase in a language.
    """
    options, intervals = options or ZSTEOptions(), intervals or Intervals()
    labels = sorted(set(single_labels(split.rows)))
    prompts_are = options.prompts or (split.model.prompts if split.model else None)
    prompts_are = prompts_are or ("labels" if list(languages) == ["eng"] else "phrases")
    spoken = None if prompts_are == "labels" else phrases
    records = zste_set(split.rows, options.seed, options.num_items)
    families = set(map(ZSTE_FAMILIES.get, options.tasks))
    asked = [record for record in records if record["family"] in families]
    clips, clip_seconds = embed_records(split, asked, options.join)

    # A composed clip is made of recordings: clips of the same ones are drawn together.
    source = dict(zip(split.ids.tolist(), split.sources.tolist(), strict=True))
    questions: dict[str, list[int]] = {}
    clusters, ids = [], []
    for place, record in enumerate(asked):
        questions.setdefault(record["family"], []).append(place)
        clusters.append("+".join(sorted(set(map(source.__getitem__, record["clip_ids"])))))
        ids.append(record["id"])

    def ask(task: str, record: Mapping[str, Any], language: str) -> Prompts:
        return zste_prompts(task, record, labels, spoken, language, options.num_candidates, options.seed)

    found: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for task in options.tasks:
        places = questions[ZSTE_FAMILIES[task]]
        own = np.array(clusters)[places]
        ranks = []
        for language in languages:
            prompts = [ask(task, asked[place], language) for place in places]
            chances = [zste_chance(len(prompt.texts), task) for prompt in prompts]
            cosines = _score_prompts(split, clips.select(places), prompts, language)
            relevant, asked_tasks = [prompt.right for prompt in prompts], [task] * len(prompts)
            outcomes = {task: zste_outcomes(cosines, relevant, asked_tasks)[task]}
            levels = {task: (float(np.mean(chances)), ORDER_BLIND.get(task))}
            ranks.append(zste_ranks(cosines, relevant, asked_tasks))
            if task in ORDER_BLIND:
                opposites = []
                for place, prompt in zip(places, prompts, strict=True):
                    other = ask(task, {**asked[place], "labels": asked[place]["labels"][::-1]}, language)
                    opposites.append(prompt.texts.index(other.texts[other.right[0]]))
                outcomes[f"{task}_order"] = zste_order_outcomes(cosines, relevant, opposites)
                levels[f"{task}_order"] = (1 / 2, None)

            drawn = intervals.draw(outcomes, own)
            for name, outcome in outcomes.items():
                found.setdefault(language, {})[name] = score(outcome.mean(), drawn[name], *levels[name])
                prefix = f"zste/{language}/{name}"
                arrays |= {f"{prefix}/query_id": np.array(ids)[places], f"{prefix}/cluster": own}
                arrays[f"{prefix}/score"] = outcome

        if len(languages) > 1 and task in TEMPORAL_TASKS:
            # (questions, languages) -> (questions,)
            arrays[f"zste/ranks/{task}"] = np.stack(ranks, axis=1)
            variances = arrays[f"zste/ranks/{task}"].var(axis=1)
            mrv = score(variances.mean(), intervals.draw({"MRV": variances}, own)["MRV"])
            found.setdefault("all", {})[task] = {"MRV": mrv}

    protocol = {
        **asdict(options),
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
    assert model is not None
    whole, half = policy.max_audio_seconds, policy.max_audio_seconds
    if policy.chunk_seconds is not None:
        whole = min(policy.chunk_seconds, math.inf if whole is None else whole)
    window = policy.chunk_seconds or model.window_seconds
    if window is not None:
        half = min(window / 2, math.inf if half is None else half)

    def read(record: Mapping[str, Any], rate_hz: int) -> np.ndarray:
        seconds = whole if record["family"] == "single" else half
        waveforms = [split.read(clip_id, seconds) for clip_id in record["clip_ids"]]
        try:
            return compose(record["family"], waveforms, rate_hz, join)
        except ValueError as error:
            raise BadAudioError(f"cannot put {' and '.join(record['clip_ids'])} together: {error}") from error

    composed = [[record["family"], *map(split.files.get, record["clip_ids"])] for record in records]
    key = {"zste": composed, "join": asdict(join), "seconds": [whole, half]}
    # A join with a gap may pass the model's limit by a little; then the pair is heard in chunks like any clip.
    heard = AudioPolicy(None, policy.chunk_seconds, policy.pooling)
    recordings = [Recording(partial(read, record), None, " and ".join(record["clip_ids"])) for record in records]
    embedded = embed_recordings(model, recordings, heard, split.cache, key, "error", split.batch_size)
    return embedded, {"single": whole, "pair": half}


def temporal_metrics(prediction: Any) -> dict[str, float]:
    """The Trainer's `compute_metrics` of a post-training: the values of `evaluate_pairs`, with the level of chance."""
    scores = evaluate_pairs(prediction, Intervals(0))[0]
    flat = {"temporal_accuracy_chance": scores["temporal_accuracy"]["chance"]}
    for name, found in scores.items():
        flat[name] = found["value"]
    return flat


def evaluate_pairs(prediction: Any, intervals: Intervals | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Which of a pair's captions is an item's own [T 3.2]?

    Args:
        prediction: The Trainer's: audio (N, R, d) and text (N, R, d) embeddings of N pairs in R roles.
        intervals: How intervals are drawn, over pairs.

    Returns:
        `temporal_accuracy`, the accuracy of each role, and of stage b `order_accuracy`: how often the forward and the
        reversed item prefer their own caption to the other's, whatever they make of the overlaid one's. Chance is one
        in as many as are compared; a tie with a wrong caption is wrong. And the outcome of each pair, by name.
    """
    intervals = intervals or Intervals()
    audio_embeds, text_embeds = in_row_order(prediction)
    # (N, R, d) x (N, R, d) -> (N, R, R)
    similarity = np.einsum("nrd,nsd->nrs", audio_embeds, text_embeds)
    roles = ("single", "combined") if similarity.shape[1] == 2 else ("forward", "reversed", "overlaid")
    right = _is_own_first(similarity)
    outcomes = {"temporal_accuracy": right.mean(axis=1)}
    for place, role in enumerate(roles):
        outcomes[f"{role}_accuracy"] = right[:, place].astype(float)
    blind: dict[str, float] = {}
    if len(roles) == 3:
        outcomes["order_accuracy"] = _is_own_first(similarity[:, :2, :2]).mean(axis=1)
        blind = {"temporal_accuracy": 2 / 3, "forward_accuracy": 1 / 2, "reversed_accuracy": 1 / 2}

    ids = np.char.add("pair ", np.arange(len(right)).astype(str))
    drawn = intervals.draw(outcomes, ids)
    scores = {}
    for name, outcome in outcomes.items():
        chance = 1 / 2 if name == "order_accuracy" else 1 / len(roles)
        scores[name] = score(outcome.mean(), drawn[name], chance, blind.get(name))
    return scores, {**outcomes, "query_id": ids, "cluster": ids}


def _is_own_first(similarity: np.ndarray) -> np.ndarray:
    """Whether each item's own caption scores above all others of its pair, (N, R, R) -> (N, R)."""
    own = np.einsum("nrr->nr", similarity)
    return (similarity >= own[:, :, None]).sum(axis=2) == 1


def _score_prompts(
    split: EmbeddedSplit, clips: ClipEmbeddings, prompts: Sequence[Any], language: str
) -> list[list[float]]:
    """The cosine of each question's clip with each of its candidates."""
    column: dict[str, int] = {}
    for prompt in prompts:
        for text in prompt.texts:
            column.setdefault(text, len(column))

    cosines = clips.similarity(split.texts(list(column), language), "a2t")[:]
    scores = []
    for row, prompt in zip(cosines, prompts, strict=True):
        scores.append(row[list(map(column.__getitem__, prompt.texts))].tolist())
    return scores
