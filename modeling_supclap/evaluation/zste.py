"""Temporal evaluation: ZSTE, and the accuracy on pairs during TeminAL post-training.

ZSTE (zero-shot temporal evaluation, TeminAL sections 4.2 and B.4) composes clips with two consecutive or simultaneous
sounds, and tests whether the model recognises the sounds and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions, compose
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, Prompts, set_hash, zste_prompts, zste_set
from modeling_supclap.metrics.zste import zste_chance, zste_order_outcomes, zste_outcomes, zste_ranks

from ..audio_input import Recording
from .cache import Arrays
from .embed import ClipEmbeddings, EmbeddedSplit, embed_recordings, in_row_order
from .options import EvaluationOptions
from .results import Intervals, Scores, TaskResult, score_outcomes, under
from .zero_shot import label_matrix

# Tasks with temporal candidate prompts. MRV (mean rank variance over languages) is computed only for these.
TEMPORAL_TASKS = ("3A", "3B", "4A", "4B", "5A", "5B")
ORDER_BLIND = {"3A": 1 / 2, "4A": 1 / 2}
"""Accuracy of a model that recognises all sounds and detects overlap, but ignores their order."""


def evaluate_zste(split: EmbeddedSplit, options: EvaluationOptions) -> TaskResult:
    """Run ZSTE: compose clips from a split, embed them, and score all tasks in all languages.

    If the model has a maximum window (CED: 10.12 s), both recordings of a pair are truncated to half the window, so
    that the pair fits into one window. All languages use the same questions. The bootstrap resamples the source
    recordings of the composed clips.

    `options.phrases` is used only if the prompts contain phrases, not labels.

    Returns:
        Tuple of the scores `{"zste": ...}`, the arrays for `Results`, and the ZSTE settings for the protocol.
        For tasks 3A and 4A, the scores also contain "3A_order" and "4A_order": the share of clips for which the correct
        order scores higher than the reversed order. With several languages the key "all" contains the MRV (mean rank
        variance) of each temporal task: the variance over languages of the correct answer's rank, averaged over
        questions.

    Raises:
        ValueError: A clip does not have exactly one label, a label has no phrase, or there are too few classes.
    """
    zste, languages, intervals = options.zste, options.zste_languages, options.intervals
    truth, labels = label_matrix(split.rows, options.classes)
    if (truth.sum(axis=1) > 1).any():
        row = split.rows[int(truth.sum(axis=1).argmax())]
        raise ValueError(f"clip {row['clip_id']} has the labels {row['labels']}; ZSTE needs one label per clip")
    prompt_names = zste.prompts or (split.model.prompts if split.model else None)
    prompt_names = prompt_names or ("labels" if list(languages) == ["eng"] else "phrases")
    class_phrases = None if prompt_names == "labels" else options.phrases
    records = zste_set(split.rows, zste.seed, zste.num_items)
    families = set(map(ZSTE_FAMILIES.get, zste.tasks))
    task_records = [record for record in records if record["family"] in families]
    clips, clip_seconds = embed_records(split, task_records, zste.join)
    clusters = _find_clusters(split, task_records)
    ids = np.array([record["id"] for record in task_records])

    ask = partial(
        zste_prompts, labels=labels, phrases=class_phrases, num_candidates=zste.num_candidates, seed=zste.seed
    )
    scores: Scores = {}
    arrays: Arrays = {}
    for task in zste.tasks:
        indices, questions = [], []
        for index, record in enumerate(task_records):
            if record["family"] == ZSTE_FAMILIES[task]:
                indices.append(index)
                questions.append(record)
        task_clips = clips.select(indices)
        task_ids, task_clusters = ids[indices], clusters[indices]
        score_all = partial(score_outcomes, clusters=task_clusters, unit=split.unit, intervals=intervals)
        ranks = []
        for language in languages:
            outcomes, chance, language_ranks = _score_task(task, language, questions, task_clips, split, ask)
            ranks.append(language_ranks)
            scores.setdefault(language, {}).update(score_all(outcomes, chance=chance, order_blind=ORDER_BLIND))
            for name, outcome in outcomes.items():
                queries = {"query_id": task_ids, "cluster": task_clusters, "score": outcome}
                arrays |= under(f"zste/{language}/{name}", queries)

        if len(languages) > 1 and task in TEMPORAL_TASKS:
            # (questions, languages) -> (questions,)
            arrays[f"zste/ranks/{task}"] = np.stack(ranks, axis=1)
            variances = arrays[f"zste/ranks/{task}"].var(axis=1)
            scores.setdefault("all", {})[task] = score_all({"MRV": variances})

    protocol = {
        **asdict(zste),
        "tasks": list(zste.tasks),
        "set_hash": set_hash(records),
        "languages": list(languages),
        "prompts": "labels" if class_phrases is None else "phrases",
        "clip_seconds": clip_seconds,
    }
    return {"zste": scores}, arrays, {"zste": protocol}


def _find_clusters(split: EmbeddedSplit, records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the source recordings of each composed clip, (Q, 2). Those of a single sound are equal."""
    source = dict(zip(split.ids.tolist(), split.sources.tolist(), strict=True))
    clusters = []
    for record in records:
        sources = [source[clip_id] for clip_id in record["clip_ids"]]
        clusters.append([sources[0], sources[-1]])
    return np.array(clusters)


def _score_task(
    task: str,
    language: str,
    records: Sequence[Mapping[str, Any]],
    clips: ClipEmbeddings,
    split: EmbeddedSplit,
    ask: Callable[..., Prompts],
) -> tuple[Arrays, dict[str, float], np.ndarray]:
    """Score a task in one language, with one question per record. `ask` is `zste_prompts` with its options.

    Return the outcomes (Q,) and the chance level of each metric, and the ranks (Q,) of `zste_ranks`.
    """
    prompts = [ask(task, record, language=language) for record in records]

    # One column per distinct text; select those of the candidates of each question.
    column: dict[str, int] = {}
    for prompt in prompts:
        for text in prompt.texts:
            column.setdefault(text, len(column))
    similarity = clips.similarity(split.texts(list(column), language))[:].T
    cosines = []
    for row, prompt in zip(similarity, prompts, strict=True):
        columns = [column[text] for text in prompt.texts]
        cosines.append(row[columns].tolist())

    relevant, tasks = [prompt.right for prompt in prompts], [task] * len(prompts)
    outcomes = zste_outcomes(cosines, relevant, tasks)
    chance = {task: float(np.mean([zste_chance(len(prompt.texts), task) for prompt in prompts]))}
    if task in ORDER_BLIND:
        opposites = []
        for record, prompt in zip(records, prompts, strict=True):
            other = ask(task, {**record, "labels": record["labels"][::-1]}, language=language)
            opposites.append(prompt.texts.index(other.texts[other.right[0]]))
        outcomes[f"{task}_order"] = zste_order_outcomes(cosines, relevant, opposites)
        chance[f"{task}_order"] = 1 / 2
    return outcomes, chance, zste_ranks(cosines, relevant, tasks)


def embed_records(
    split: EmbeddedSplit, records: Sequence[Mapping[str, Any]], join: RenderOptions
) -> tuple[ClipEmbeddings, dict[str, float | None]]:
    """Compose and embed clips. Each record of `zste_set` describes one clip.

    Return the embeddings, and the maximum length of a recording in seconds as `{"single": ..., "pair": ...}`. None
    means no limit.
    """
    model, policy = split.model, split.policy
    assert model is not None
    window = policy.chunk_seconds or model.window_seconds
    whole = min(filter(None, (policy.max_audio_seconds, policy.chunk_seconds)), default=None)
    half = min(filter(None, (policy.max_audio_seconds, window and window / 2)), default=None)
    indices = {row["clip_id"]: index for index, row in enumerate(without_audio(split.dataset))}

    read_sound = partial(
        read_row,
        from_first_sound=True,
        min_seconds=model.min_seconds,
        pad_short_clips=policy.pad_short_clips,
        resampling_method=model.resampling_method,
    )

    def read(record: Mapping[str, Any], rate_hz: int) -> np.ndarray:
        seconds = whole if record["family"] == "single" else half
        waveforms = []
        for clip_id in record["clip_ids"]:
            waveforms.append(read_sound(split.dataset[indices[clip_id]], rate_hz, seconds))
        try:
            return compose(record["family"], waveforms, rate_hz, join)
        except ValueError as error:
            raise BadAudioError(f"cannot join {' and '.join(record['clip_ids'])}: {error}") from error

    composed, recordings = [], []
    for record in records:
        composed.append([record["family"], *map(split.files.get, record["clip_ids"])])
        recordings.append(Recording(partial(read, record), None, " and ".join(record["clip_ids"])))
    key = {"zste": composed, "join": asdict(join), "seconds": [whole, half]}
    # A gap between the sounds can make a pair slightly longer than the model's limit; it is then split into chunks.
    embedded = embed_recordings(model, recordings, policy, split.cache, key, "error", split.batch_size)
    return embedded, {"single": whole, "pair": half}


def temporal_metrics(prediction: Any) -> dict[str, float]:
    """Compute the scores of `evaluate_pairs` and the chance level of `temporal_accuracy`, for the Trainer."""
    scores = evaluate_pairs(prediction, Intervals(0))[0]
    values = {name: fields["value"] for name, fields in scores.items()}
    return {"temporal_accuracy_chance": scores["temporal_accuracy"]["chance"], **values}


def evaluate_pairs(prediction: Any, intervals: Intervals | None = None) -> tuple[Scores, Arrays]:
    """Compute how often a clip is closest to its own caption among the captions of its pair (TeminAL section 3.2).

    A pair consists of R clips that are built from the same two sounds, each with a caption. In stage A (R = 2), these
    are the single sound and the combined sound. In stage B (R = 3), the two sounds are in forward order, reversed and
    overlaid. A tie with another caption counts as wrong. The chance level is 1 / number of compared captions.

    `prediction` contains audio (N, R, d) and text (N, R, d) embeddings of N pairs. The bootstrap resamples pairs.

    Returns:
        Tuple of two dicts by metric name: the scores, and the outcome of each pair. The metrics are
        `temporal_accuracy` and the accuracy of each clip type, such as `single_accuracy`. Stage B adds
        `order_accuracy`, which compares only the forward and the reversed clip.
    """
    intervals = intervals or Intervals()
    audio_embeds, text_embeds = in_row_order(prediction)
    # (N, R, d) x (N, R, d) -> (N, R, R)
    similarity = np.einsum("nrd,nsd->nrs", audio_embeds, text_embeds)
    roles = ("single", "combined") if similarity.shape[1] == 2 else ("forward", "reversed", "overlaid")
    correct = _is_own_first(similarity)
    outcomes = {"temporal_accuracy": correct.mean(axis=1)}
    for column, role in enumerate(roles):
        outcomes[f"{role}_accuracy"] = correct[:, column].astype(float)
    blind: dict[str, float] = {}
    if len(roles) == 3:
        outcomes["order_accuracy"] = _is_own_first(similarity[:, :2, :2]).mean(axis=1)
        blind = {"temporal_accuracy": 2 / 3, "forward_accuracy": 1 / 2, "reversed_accuracy": 1 / 2}

    ids = np.char.add("pair ", np.arange(len(correct)).astype(str))
    chance = {**dict.fromkeys(outcomes, 1 / len(roles)), "order_accuracy": 1 / 2}
    scores = score_outcomes(outcomes, ids, "pairs", intervals, chance, blind)
    return scores, {**outcomes, "query_id": ids, "cluster": ids}


def _is_own_first(similarity: np.ndarray) -> np.ndarray:
    """Return whether each clip is closest to its own caption among the captions of its pair, (N, R, R) -> (N, R)."""
    own = np.einsum("nrr->nr", similarity)
    return (similarity >= own[:, :, None]).sum(axis=2) == 1
