"""Text-to-audio and audio-to-text retrieval: scores per language, and consistency across languages.

`evaluate_retrieval` scores an embedded split. `retrieval_metrics` provides the Trainer's `compute_metrics`, which
computes a subset of these scores during training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.schema import group_id
from modeling_supclap.metrics.embedding_gap.distance import gap_and_distance
from modeling_supclap.metrics.names import RECALL_CUTOFFS, RETRIEVAL_METRICS
from modeling_supclap.metrics.recall.ranking import best_ranks, chance_scores, retrieval_outcomes

from .cache import Arrays
from .embed import ClipEmbeddings, EmbeddedSplit, Row, split_from_predictions
from .results import DIRECTIONS, Intervals, Scores, TaskResult, score, score_outcomes, under

if TYPE_CHECKING:
    from .options import EvaluationOptions

_TOP = 10
_TOP_ROWS = 256
_NEGATIVES = 10_000
_SAMPLED_CLIPS = 1000


@dataclass
class CaptionTable:
    """Captions in one language and the clips to retrieve.

    Attributes:
        clips: Row indices of the clips that have captions, (n,).
        texts: M captions.
        text_rows: For each caption, the index of the first row that has it, (M,).
        text_numbers: For each caption, its index in the caption list of this row, (M,).
    """

    clips: np.ndarray
    texts: list[str]
    text_rows: np.ndarray
    text_numbers: np.ndarray


def match_groups(query_groups: np.ndarray, candidate_groups: np.ndarray) -> list[list[int]]:
    """Return the indices of the matching candidates (same group id) for each query.

    >>> match_groups(np.array([7, 5]), np.array([5, 7, 7]))
    [[1, 2], [0]]
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(candidate_groups.tolist()):
        members.setdefault(group, []).append(index)
    return [members[group] for group in query_groups.tolist()]


def caption_table(
    rows: Sequence[Row], groups: np.ndarray, language: str, at_most: Sequence[int] | None = None
) -> CaptionTable:
    """Collect the captions in one language: the first `at_most[i]` captions of row i, or all if `at_most` is None.

    A caption and a clip match if their rows have the same group id. `groups` contains the group id of each row, (N,).
    If several clips in a group share a caption, the caption is included once, so that no query counts twice.

    Raises:
        ValueError: No clip has a caption in this language.
    """
    clips: list[int] = []
    seen: dict[tuple[int, str], tuple[int, int]] = {}
    for index, (row, group) in enumerate(zip(rows, groups.tolist(), strict=True)):
        captions = list(row["captions"].get(language) or ())
        captions = captions if at_most is None else captions[: at_most[index]]
        if captions:
            clips.append(index)
        for number, text in enumerate(captions):
            seen.setdefault((group, text), (index, number))
    if not clips:
        raise ValueError(f"no clip of this split has a caption in {language!r}")

    text_rows, numbers = zip(*seen.values(), strict=True)
    return CaptionTable(np.array(clips), [text for _, text in seen], np.array(text_rows), np.array(numbers))


def count_captions(rows: Sequence[Row], languages: Sequence[str], caption_handling: str) -> list[int] | None:
    """Return the number of captions of each row to use in every language. Return None (all captions) if
    `caption_handling` is "each".

    Raises:
        ValueError: `caption_handling` is "all", and the languages of a row have different numbers of captions.
    """
    shared = []
    for row in rows:
        counts = {language: len(row["captions"].get(language) or ()) for language in languages}
        if caption_handling == "all" and len(set(counts.values())) > 1:
            raise ValueError(
                f"clip {row['clip_id']} has {counts} captions, so the languages would have different queries; use "
                "caption_handling='parallel' for the captions that exist in all languages, or 'each' for all captions"
            )
        shared.append(min(counts.values()))
    return None if caption_handling == "each" else shared


def evaluate_retrieval(split: EmbeddedSplit, options: EvaluationOptions, is_light: bool = False) -> TaskResult:
    """Evaluate text-to-audio and audio-to-text retrieval in each language, and consistency across languages.

    With `is_light`, there are no intervals, and the arrays for `Results` lack those that only reports need.

    Returns:
        Tuple of the scores `{"retrieval": ...}`, the arrays for `Results`, and the number of captions per language for
        the protocol. With several languages, the scores have the additional key "multilingual".

    Raises:
        ValueError: No clip has a caption in one of the languages. Or `options.caption_handling` is "all", and a clip
            has different numbers of captions in different languages.
    """
    languages, metrics = options.languages, options.retrieval_metrics
    at_most = count_captions(split.rows, languages, options.caption_handling)
    groups = np.array([group_id(row, options.positives) for row in split.rows])
    units = resampling_units(split.sources, groups)
    is_linked = len(np.unique(units)) < len(np.unique(split.sources))  # also by equal captions
    unit = "caption groups" if is_linked else split.unit
    score_all = partial(score_outcomes, unit=unit, intervals=Intervals(0) if is_light else options.intervals)

    # Evenly spaced clips, for the figures of the embedding space.
    sampled = np.arange(0, len(split.rows), -(-len(split.rows) // _SAMPLED_CLIPS))
    arrays: Arrays = {"embeddings/audio": split.clips.mean[sampled], "embeddings/audio_clip": sampled}
    scores: Scores = {}
    counts: dict[str, int] = {}
    for language in languages:
        table = caption_table(split.rows, groups, language, at_most)
        texts, clips = split.texts(table.texts, language), split.clips.select(table.clips)
        similarity = clips.similarity(texts)
        ids = caption_ids(split.ids[table.text_rows], table.text_numbers)
        counts[language] = len(table.texts)
        scores[language] = {}
        for direction in DIRECTIONS:
            rows, candidates, queries, of_queries = table.text_rows, table.clips, ids, similarity
            if direction == "a2t":
                rows, candidates, queries, of_queries = candidates, rows, split.ids[candidates], similarity.T
            relevant = match_groups(groups[rows], groups[candidates])
            scores[language][direction], outcomes = _score_direction(
                of_queries, relevant, units[rows], score_all, metrics
            )
            if not is_light:
                top = find_top(of_queries)
                outcomes |= {"query_id": queries, "top": table.clips[top] if direction == "t2a" else top}
            arrays |= under(f"retrieval/{language}/{direction}", outcomes)
        if not is_light:
            arrays |= _describe_captions(language, table, groups, texts, clips, similarity, sampled)

    all_scores: Scores = {"retrieval": scores}
    if len(languages) > 1:
        agreement, query_arrays = _compare_languages(split, languages, groups, units, score_all)
        all_scores |= {"multilingual": agreement} if agreement else {}
        arrays |= query_arrays
        for direction, name in itertools.product(DIRECTIONS, (*RETRIEVAL_METRICS, *metrics)):
            fields = []
            for language in languages:
                field = scores[language][direction][name]
                fields.append((field["value"], field["chance"]))
            value, chance = np.mean(fields, axis=0)
            scores.setdefault("mean", {}).setdefault(direction, {})[name] = score(value, None, chance)
    return all_scores, arrays, {"captions": counts}


def caption_ids(clip_ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the ids of captions, such as "clip#1", from the ids of their clips and their indices."""
    return np.array([f"{clip}#{number}" for clip, number in zip(clip_ids, numbers, strict=True)])


def retrieval_metric_names(languages: Sequence[str]) -> list[str]:
    """Return the names of the metrics of `retrieval_metrics`, the most important first.

    >>> retrieval_metric_names(["eng"])[:3]
    ['mean_recall', 'eng_t2a_R@1', 'eng_t2a_R@5']
    """
    names = ["mean_recall"]
    for language, direction in itertools.product(languages, DIRECTIONS):
        metrics = (*RETRIEVAL_METRICS, "mean_rank", "median_rank", "num_queries")
        names += [f"{language}_{direction}_{metric}" for metric in metrics]
    return [*names, *(["MRV"] if len(languages) > 1 else []), "mean_recall_chance"]


def retrieval_metrics(dataset: Any, languages: Sequence[str], positives: str) -> Callable[[Any], dict[str, float]]:
    """Create a `compute_metrics` function for the Trainer.

    `dataset` is the evaluation dataset (`IndexedRows`), and `languages` are the languages of the evaluation collator.

    Returns:
        Function from the Trainer's `EvalPrediction` (predictions: audio and text embeddings; label ids: clip indices)
        to a flat dict `{"eng_t2a_R@1": ..., ..., "mean_recall": ..., "mean_recall_chance": ...}`. `mean_recall` is the
        mean of R@1, R@5 and R@10 over both directions and all languages. With several languages the dict also contains
        `MRV` (mean rank variance over languages), computed on captions that exist in all languages. If the rows are
        from several datasets, it also contains the metrics of each dataset, such as `<dataset>_mean_recall`.
    """
    # its defaults import the tasks of ZSTE, which training does not need
    from .options import EvaluationOptions

    def flat_scores(split: EmbeddedSplit, languages: Sequence[str]) -> dict[str, float]:
        options = EvaluationOptions(languages=list(languages), positives=positives, caption_handling="each")
        all_scores, _, _ = evaluate_retrieval(split, options, is_light=True)

        flat: dict[str, float] = {}
        recalls: list[tuple[float, float]] = []
        for language in languages:
            for direction, scores in all_scores["retrieval"][language].items():
                for name, value in scores.items():
                    flat[f"{language}_{direction}_{name}"] = value["value"] if isinstance(value, Mapping) else value
                    if name.startswith("R@"):
                        recalls.append((value["value"], value["chance"]))
        flat["mean_recall"], flat["mean_recall_chance"] = np.mean(recalls, axis=0).tolist()
        if "multilingual" in all_scores:
            flat["MRV"] = all_scores["multilingual"]["all"]["MRV"]["value"]
        return flat

    def compute_metrics(prediction: Any) -> dict[str, float]:
        split = split_from_predictions(prediction, dataset.rows, languages)
        flat = flat_scores(split, languages)
        for dataset_name, part in split.by_dataset().items():
            scores = flat_scores(part, part.languages(languages))
            for name, value in scores.items():
                flat[f"{dataset_name}_{name}"] = value
        return flat

    return compute_metrics


def _score_direction(
    similarity: Any,
    relevant: Sequence[Sequence[int]],
    clusters: np.ndarray,
    score_all: Callable[..., Scores],
    further: Sequence[str],
) -> tuple[Scores, Arrays]:
    """Score one retrieval direction in one language, also with the metrics `further`.

    Return the scores, and outcome arrays with one entry per query.
    """
    outcomes = retrieval_outcomes(similarity, relevant, RECALL_CUTOFFS, metrics=further)
    ranks = outcomes["rank"] + 1
    # With random ranking, the expected best rank of m correct candidates among n is (n + 1) / (m + 1).
    num_relevant = np.fromiter(map(len, relevant), float)
    random_rank = np.mean((similarity.shape[1] + 1) / (num_relevant + 1))
    chance = chance_scores(relevant, similarity.shape[1], RECALL_CUTOFFS, metrics=further)
    scored = {name: outcomes[name] for name in (*RETRIEVAL_METRICS, *further)}
    scores = score_all({**scored, "mean_rank": ranks}, clusters, chance={**chance, "mean_rank": random_rank})
    scores |= {"median_rank": score(int(np.median(outcomes["rank"])) + 1), "num_queries": len(ranks)}
    return scores, {**outcomes, "cluster": clusters}


def resampling_units(sources: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Group N rows into bootstrap resampling units. Return the first recording of each row's unit, (N,).

    Outcomes of rows with the same recording or the same group id are not independent. A unit is therefore a connected
    component of the graph that links these rows.

    >>> resampling_units(np.array(["a", "b", "c", "a"]), np.array([1, 1, 2, 3])).tolist()
    ['a', 'a', 'c', 'a']
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    recording = np.unique(sources, return_inverse=True)[1]
    group = np.unique(groups, return_inverse=True)[1]
    nodes = recording.max() + 1 + group.max() + 1
    links = coo_array((np.ones(len(group)), (recording, recording.max() + 1 + group)), shape=(nodes, nodes))
    _, firsts, units = np.unique(
        connected_components(links, directed=False)[1][recording], return_index=True, return_inverse=True
    )
    return sources[firsts][units]


def find_top(similarity: Any) -> np.ndarray:
    """Return the ten best candidates of each query (Q, min(10, C)), best first. Ties are sorted by candidate index.

    `similarity` is an array (Q, C) or a `LazySimilarity`. It is read in blocks of 256 queries.
    """
    queries, candidates = similarity.shape
    count = min(_TOP, candidates)
    top = np.empty((queries, count), np.int64)
    for start in range(0, queries, _TOP_ROWS):
        block = similarity[start : start + _TOP_ROWS]
        # (rows, C): all candidates at or above the tenth score, more than ten with ties.
        threshold = np.partition(block, candidates - count, axis=1)[:, candidates - count]
        rows, columns = np.nonzero(block >= threshold[:, None])
        order = np.lexsort((columns, -block[rows, columns], rows))
        firsts = np.searchsorted(rows, np.arange(len(block)))
        top[start : start + len(block)] = columns[order][firsts[:, None] + np.arange(count)]
    return top


def _describe_captions(
    language: str,
    table: CaptionTable,
    groups: np.ndarray,
    texts: np.ndarray,
    clips: ClipEmbeddings,
    similarity: Any,
    sampled: np.ndarray,
) -> Arrays:
    """Return the captions, and the arrays for the figures of the report.

    These are the cosines of all matching pairs, those of a random sample of non-matching pairs (fixed seed), and the
    embeddings of the first captions of the clips `sampled`.
    """
    text_groups, clip_groups = groups[table.text_rows], groups[table.clips]
    relevant = match_groups(text_groups, clip_groups)
    positive_texts = np.repeat(np.arange(len(relevant)), list(map(len, relevant)))
    generator = np.random.default_rng(0)
    text_indices = generator.integers(len(texts), size=2 * _NEGATIVES)
    clip_indices = generator.integers(len(table.clips), size=2 * _NEGATIVES)
    wrong = np.flatnonzero(text_groups[text_indices] != clip_groups[clip_indices])[:_NEGATIVES]

    rows = np.concatenate([positive_texts, text_indices[wrong]])
    columns = np.concatenate([*relevant, clip_indices[wrong]])
    if isinstance(similarity, np.ndarray):
        cosines = similarity[rows, columns]
    else:
        cosines = np.einsum("md,md->m", texts[rows], clips.mean[columns])

    owners, firsts = np.unique(table.text_rows, return_index=True)
    is_sampled = np.isin(owners, sampled)
    return {
        f"captions/{language}/text": np.array(table.texts),
        f"captions/{language}/clip": table.text_rows,
        f"retrieval/{language}/clip": table.clips,
        f"similarity/{language}/positive": cosines[: len(positive_texts)],
        f"similarity/{language}/negative": cosines[len(positive_texts) :],
        f"embeddings/text/{language}": texts[firsts[is_sampled]],
        f"embeddings/text_clip/{language}": owners[is_sampled],
    }


def _compare_languages(
    split: EmbeddedSplit,
    languages: Sequence[str],
    groups: np.ndarray,
    units: np.ndarray,
    score_all: Callable[..., Scores],
) -> tuple[Scores, Arrays]:
    """Compute MRV and MSR over parallel captions, and the embedding distances to the anchor language.

    MRV is the mean rank variance over languages. MSR is the mean squared rank of the correct clip, with ranks from 0:
    MSR = MRV + mean over captions of (mean rank over languages)^2. The anchor is English, or the first language.
    Captions with the same index in two languages are assumed to be translations.
    """
    rows, anchor = split.rows, "eng" if "eng" in languages else languages[0]
    pairs: list[tuple[int, int]] = []
    for clip, shared in enumerate(count_captions(rows, languages, "parallel") or ()):
        pairs += zip(itertools.repeat(clip, shared), range(shared), strict=True)
    if not pairs:  # no parallel captions to compare
        return {}, {}

    clips, numbers = np.array(pairs).T
    relevant = match_groups(groups[clips], groups)
    texts: dict[str, list[str]] = {}
    embeds: Arrays = {}
    ranks = np.empty((len(pairs), len(languages)), np.int64)
    for column, language in enumerate(languages):
        texts[language] = [rows[clip]["captions"][language][number] for clip, number in pairs]
        embeds[language] = split.texts(texts[language], language)
        ranks[:, column] = best_ranks(split.clips.similarity(embeds[language]), relevant)

    # (queries, languages) -> (queries,). If all embeddings collapse to one point, MRV is 0, but MSR is at chance level.
    outcomes = {"MRV": ranks.var(axis=1), "MSR": (ranks.astype(float) ** 2).mean(axis=1)}
    clusters = units[clips]
    # Mean and variance of the best rank under random ranking, if m of n clips are correct.
    n, m = len(rows), np.fromiter(map(len, relevant), float)
    mean, variance = (n - m) / (m + 1), m * (n + 1) * (n - m) / ((m + 1) ** 2 * (m + 2))
    chance = {"MRV": np.mean((1 - 1 / len(languages)) * variance), "MSR": np.mean(variance + mean**2)}
    scores: Scores = {"num_parallel": len(pairs), "all": score_all(outcomes, clusters, chance=chance)}
    arrays = {"ranks": ranks, "query_id": caption_ids(split.ids[clips], numbers), "cluster": clusters}
    arrays["text"] = np.array(texts[anchor])
    for language in languages:
        if language != anchor:
            distances = np.linalg.norm(np.subtract(embeds[language], embeds[anchor], dtype=np.float64), axis=1)
            gap = gap_and_distance(embeds[language], embeds[anchor])
            distance = score_all({"Dis": distances}, clusters)["Dis"] | {"value": gap["Dis"]}
            scores[language] = {"Gap": score(gap["Gap"]), "Dis": distance}
            arrays[f"distance/{language}"] = distances
    return scores, under("multilingual", arrays)
