"""Retrieval between recordings and captions: who answers whom, the scores of each language, and those across languages.

The same tables of captions serve `trainer_metrics` during training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.schema import group_id
from modeling_supclap.metrics.embedding_gap.distance import gap_and_distance
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.recall.ranking import best_ranks, chance_scores, retrieval_outcomes, retrieval_scores

from .clip_embeddings import matrix_of
from .embedded_split import EmbeddedSplit, Row
from .receipts import Intervals, score

K = (1, 5, 10)
DIRECTIONS = ("t2a", "a2t")
_TOP = 10
_ROWS = 256
_NEGATIVES = 10_000


@dataclass
class CaptionTable:
    """The clips that have captions in a language, and these captions.

    Captions that equal clips share are kept once, so that no answer is counted twice.

    Attributes:
        clips: Which rows, (n,).
        clip_groups: A caption and a clip belong together when their groups are equal, (n,).
        texts: The captions, M of them.
        text_rows: The row that each was first seen in, (M,).
        text_numbers: Which of that row's captions in this language it is, (M,).
        text_groups: (M,).
    """

    clips: np.ndarray
    clip_groups: np.ndarray
    texts: list[str]
    text_rows: np.ndarray
    text_numbers: np.ndarray
    text_groups: np.ndarray

    def relevant(self, direction: str) -> list[list[int]]:
        """For each query the candidates that answer it: clips for "t2a", captions for "a2t"."""
        asked, offered = self.text_groups, self.clip_groups
        if direction == "a2t":
            asked, offered = offered, asked
        members: dict[int, list[int]] = {}
        for place, group in enumerate(offered.tolist()):
            members.setdefault(group, []).append(place)
        return [members[group] for group in asked.tolist()]

    def clusters(self, sources: np.ndarray, positives: str) -> dict[str, np.ndarray]:
        """What a bootstrap draws for the queries of each direction: the recordings that they are about.

        Args:
            sources: The recording that each row was cut from, (rows,) strings.
            positives: See `schema.group_id`. Where clips share captions a text belongs to no single recording; its
                group is then what is drawn.
        """
        owners = sources[self.text_rows] if positives == "clip" else self.text_groups.astype(str)
        return {"t2a": owners, "a2t": sources[self.clips]}

    def scores(self, similarity: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Recall and mAP of both directions, each beside what a random order would reach.

        Args:
            similarity: Of each direction, queries by candidates.

        Returns:
            `{"t2a": {"R@1": ..., ...}, "a2t": {...}, "t2a_chance": {...}, "a2t_chance": {...}}`, as fractions.
        """
        scores = {}
        for direction in DIRECTIONS:
            relevant, candidates = self.relevant(direction), len(self.clips if direction == "t2a" else self.texts)
            scores[direction] = retrieval_scores(similarity[direction], relevant, k=K)
            scores[f"{direction}_chance"] = chance_scores(relevant, candidates, k=K)
        return scores


def caption_table(
    rows: Sequence[Row], language: str, positives: str = "clip", at_most: Sequence[int] | None = None
) -> CaptionTable:
    """Collects the captions of one language.

    Args:
        rows: The split.
        language: ISO 639-3 code.
        positives: See `schema.group_id`.
        at_most: How many captions of each row count; None, all.

    Raises:
        ValueError: No clip has a caption in this language.
    """
    clips: list[int] = []
    groups: list[int] = []
    seen: dict[tuple[int, str], tuple[int, int]] = {}
    for index, row in enumerate(rows):
        captions = list(row["captions"].get(language) or ())
        captions = captions if at_most is None else captions[: at_most[index]]
        if captions:
            clips.append(index)
            groups.append(group_id(row, positives))
        for number, text in enumerate(captions):
            seen.setdefault((groups[-1], text), (index, number))
    if not clips:
        raise ValueError(f"no clip of this split has a caption in {language!r}")
    return CaptionTable(
        clips=np.array(clips),
        clip_groups=np.array(groups),
        texts=[text for _, text in seen],
        text_rows=np.array([row for row, _ in seen.values()]),
        text_numbers=np.array([number for _, number in seen.values()]),
        text_groups=np.array([group for group, _ in seen]),
    )


def parallel_captions(rows: Sequence[Row], languages: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The captions that exist in all languages: those with the same place are taken for translations of each other.

    Returns:
        The row of each, and which of the row's captions it is in every language, (Q,) both.
    """
    shared = [min(len(row["captions"].get(language) or ()) for language in languages) for row in rows]
    pairs = [(row, number) for row, count in enumerate(shared) for number in range(count)]
    clips, numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return clips, numbers


def clips_alike(rows: Sequence[Row], clips: np.ndarray, positives: str) -> list[list[int]]:
    """For each of some clips all that answer the same captions; see `schema.group_id`."""
    groups = np.array([group_id(row, positives) for row in rows])
    return [np.flatnonzero(groups == groups[clip]).tolist() for clip in clips]


def evaluate_retrieval(
    split: EmbeddedSplit,
    languages: Sequence[str] = ("eng",),
    positives: str = "clip",
    caption_handling: str = "all",
    intervals: Intervals | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Retrieval in each language, and how well the languages agree.

    Args:
        split: The embedded split.
        languages: ISO 639-3 codes, the anchor first.
        positives: See `schema.group_id`.
        caption_handling: "all" takes every caption, and a clip must have as many in each language; "parallel" takes
            those that exist in all languages.
        intervals: How intervals are drawn.

    Returns:
        The parts "retrieval" and, for several languages, "multilingual" of a receipt's scores, and its arrays.

    Raises:
        ValueError: No clip has a caption in one of the languages, or a clip has more captions in one than in another.
    """
    intervals = intervals or Intervals()
    at_most = shared_counts(split.rows, languages, caption_handling)
    scores: dict[str, Any] = {"retrieval": {}}
    arrays: dict[str, np.ndarray] = {}
    for language in languages:
        table = caption_table(split.rows, language, positives, at_most)
        found, kept = _language_scores(split, table, language, positives, intervals)
        scores["retrieval"][language] = found
        arrays |= kept
    if len(languages) > 1:
        scores["multilingual"], kept = _across_languages(split, languages, positives, scores["retrieval"], intervals)
        arrays |= kept
    return scores, arrays


def shared_counts(rows: Sequence[Row], languages: Sequence[str], caption_handling: str) -> list[int]:
    """How many captions of each row count, the same in every language.

    Args:
        rows: The split.
        languages: Those to compare.
        caption_handling: See `evaluate_retrieval`.

    Raises:
        ValueError: An unknown handling, or with "all" a row whose number of captions differs.
    """
    if caption_handling not in ("all", "parallel"):
        raise ValueError(f"caption_handling is {caption_handling!r}; it must be all or parallel")
    counts = [{language: len(row["captions"].get(language) or ()) for language in languages} for row in rows]
    for row, count in zip(rows, counts, strict=True):
        if caption_handling == "all" and len(set(count.values())) > 1:
            raise ValueError(
                f"clip {row['clip_id']} has {count} captions, so the languages would answer different questions; "
                "pass caption_handling='parallel' to take those that exist in all"
            )
    return [min(count.values()) for count in counts]


def _language_scores(
    split: EmbeddedSplit, table: CaptionTable, language: str, positives: str, intervals: Intervals
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    texts, clips = split.texts(table.texts, language), split.clips.select(table.clips)
    ids, sources = np.array([row["clip_id"] for row in split.rows]), split.sources
    queries = {
        "t2a": [f"{ids[row]}#{number}" for row, number in zip(table.text_rows, table.text_numbers, strict=True)],
        "a2t": ids[table.clips],
    }
    clusters = table.clusters(sources, positives)
    found: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {
        f"captions/{language}/text": np.array(table.texts),
        f"captions/{language}/clip": table.text_rows,
        f"retrieval/{language}/clip": table.clips,
    }
    for direction in DIRECTIONS:
        similarity = clips.similarity(texts, "text" if direction == "t2a" else "audio")
        relevant = table.relevant(direction)
        outcomes = retrieval_outcomes(similarity, relevant, k=K)
        chance = chance_scores(relevant, len(table.clips if direction == "t2a" else table.texts), k=K)
        found[direction] = _direction_scores(outcomes, chance, clusters[direction], intervals)
        prefix = f"retrieval/{language}/{direction}"
        arrays |= {f"{prefix}/{name}": values for name, values in outcomes.items()}
        arrays |= {f"{prefix}/query_id": np.array(queries[direction]), f"{prefix}/cluster": clusters[direction]}
        arrays[f"{prefix}/top"] = _top(similarity, table.clips if direction == "t2a" else None)
    arrays |= _similarities(table, clips.similarity(texts, "text"), language)
    return found, arrays


def _direction_scores(
    outcomes: Mapping[str, np.ndarray], chance: Mapping[str, float], clusters: np.ndarray, intervals: Intervals
) -> dict[str, Any]:
    ranks = outcomes["rank"] + 1
    drawn = intervals.of({**outcomes, "rank": ranks}, clusters)
    names = [name for name in outcomes if name != "rank"]
    return {
        **{name: score(outcomes[name].mean(), drawn[name], chance[name]) for name in names},
        "mean_rank": score(ranks.mean(), drawn["rank"]),
        "median_rank": score(int(np.median(outcomes["rank"])) + 1),
        "num_queries": len(ranks),
    }


def _top(similarity: Any, clips: np.ndarray | None) -> np.ndarray:
    """The best candidates of each query, best first; of equal ones the first."""
    best = [np.argsort(-row, kind="stable")[:_TOP] for row in _rows_of(similarity)]
    top = np.stack(best)
    return top if clips is None else clips[top]


def _rows_of(similarity: Any) -> Iterator[np.ndarray]:
    """The rows of a similarity, one after the other, of which a few are in memory."""
    for start in range(0, similarity.shape[0], _ROWS):
        yield from matrix_of(similarity, slice(start, min(start + _ROWS, similarity.shape[0])))


def _similarities(table: CaptionTable, similarity: Any, language: str) -> dict[str, np.ndarray]:
    """Cosines of all right pairs, and of a fixed sample of the wrong ones."""
    relevant = table.relevant("t2a")
    draw = np.random.default_rng(0)
    each = -(-_NEGATIVES // len(relevant))
    right, wrong = [], []
    for answers, row in zip(relevant, _rows_of(similarity), strict=True):
        right.append(row[answers])
        drawn = draw.integers(len(row), size=each)
        wrong.append(row[drawn[~np.isin(drawn, answers)]])
    return {
        f"similarity/{language}/positive": np.concatenate(right).astype(np.float32),
        f"similarity/{language}/negative": np.concatenate(wrong)[:_NEGATIVES].astype(np.float32),
    }


def _across_languages(
    split: EmbeddedSplit,
    languages: Sequence[str],
    positives: str,
    by_language: Mapping[str, Any],
    intervals: Intervals,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    rows, anchor = split.rows, "eng" if "eng" in languages else languages[0]
    clips, numbers = parallel_captions(rows, languages)
    if not len(clips):
        raise ValueError(f"no clip has captions in all of {list(languages)}")
    relevant = clips_alike(rows, clips, positives)
    ids, sources = np.array([row["clip_id"] for row in rows]), split.sources
    embeds = {
        language: split.texts(
            [rows[clip]["captions"][language][number] for clip, number in zip(clips, numbers, strict=True)], language
        )
        for language in languages
    }
    ranks = np.stack([best_ranks(split.clips.similarity(embeds[language]), relevant) for language in languages], 1)
    others = [language for language in languages if language != anchor]
    distances = {language: _distances(embeds[language], embeds[anchor]) for language in others}
    outcomes = {"MRV": ranks.var(axis=1), **distances}
    drawn = intervals.of(outcomes, sources[clips])
    gaps = {language: gap_and_distance(embeds[language], embeds[anchor]) for language in others}
    means = {
        direction: {
            name: float(np.mean([by_language[language][direction][name]["value"] for language in languages]))
            for name in (*(f"R@{k}" for k in K), "mAP@10")
        }
        for direction in DIRECTIONS
    }
    found = {
        **means,
        "MRV": score(mean_rank_variance(ranks), drawn["MRV"]),
        "num_parallel": len(clips),
        "Gap": {language: score(gaps[language]["Gap"]) for language in others},
        "Dis": {language: score(gaps[language]["Dis"], drawn[language]) for language in others},
    }
    arrays = {
        "multilingual/ranks": ranks,
        "multilingual/query_id": np.array(
            [f"{ids[clip]}#{number}" for clip, number in zip(clips, numbers, strict=True)]
        ),
        "multilingual/text": np.array(
            [rows[clip]["captions"][anchor][number] for clip, number in zip(clips, numbers, strict=True)]
        ),
        "multilingual/cluster": sources[clips],
        **{f"multilingual/distance/{language}": values for language, values in distances.items()},
    }
    return found, arrays


def _distances(embeds: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.linalg.norm(embeds.astype(np.float64) - others.astype(np.float64), axis=1)
