"""Scores of ZSTE, the zero-shot temporal evaluation of TeminAL (section 4.2, appendix B.4 and table 3).

A question is a clip, the scores of its candidate texts, and which of them are right. Let r_1 < r_2 be the ranks, from
0, of the right candidates; a wrong candidate that ties with a right one ranks before it, so that a model which answers
the same to everything scores 0. Then a question scores

    1A, 3A, 3B, 4A, 4B    [r_1 = 0]                      one right candidate
    2A, 2C                [r_2 = 1]                      both right ones are the first two
    2B, 2D                [r_1 < 2]                      one at least is among the first two
    5A, 5B                ([r_1 < 2] + [r_2 < 2]) / 2    the share of the right ones that are

and a task the mean over its questions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import comb
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

RULES = {
    "1A": "first", "2A": "both", "2B": "either", "2C": "both", "2D": "either", "3A": "first", "3B": "first",
    "4A": "first", "4B": "first", "5A": "share", "5B": "share",
}  # fmt: skip
"""How a question of each task scores, by the right candidates among the first."""
NUM_RIGHT = {task: 1 if rule == "first" else 2 for task, rule in RULES.items()}
"""How many candidates of a question of each task are right."""


def zste_outcomes(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """The score of every question, by task; see the module for the rules.

    Args:
        scores: The scores of each question's candidates, higher is closer; questions may differ in how many they have.
        relevant: The indices of each question's right candidates, one or two as its task has it.
        tasks: The task of each question, "1A" to "5B".

    Returns:
        For each task that is asked, in the order of `NUM_RIGHT`, the scores in 0..1 of its questions in their order.

    Raises:
        ValueError: There is no question, the three differ in length, a task is unknown, a score is NaN or infinite, or
            the right candidates are too few, too many, repeated or out of range.

    >>> zste_outcomes([[0.1, 0.9, 0.3], [0.6, 0.5, 0.8]], [[1], [0, 1]], ["3A", "5A"])
    {'3A': array([1.]), '5A': array([0.5])}
    """
    first, last = _right_ranks(scores, relevant, tasks)
    names = np.asarray(tasks)
    rules = {
        "first": first == 0,
        "both": last < 2,
        "either": first < 2,
        "share": ((first < 2).astype(np.float64) + (last < 2)) / 2,
    }

    outcomes = {}
    for task in NUM_RIGHT:
        asked = names == task
        if asked.any():
            outcomes[task] = rules[RULES[task]][asked].astype(np.float64)
    return outcomes


def zste_order_outcomes(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], opposites: Sequence[int]
) -> NDArray[np.float64]:
    """Whether each question prefers the order that was heard to the same sounds in the other order.

    "X before Y" against "Y before X" and against nothing else, so that neither which sounds are there nor whether they
    overlap can be of help. Chance is 1/2, which is also what a model that hears no order gets on average.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`, of questions with one right candidate (3A, 4A).
        opposites: The index of each question's candidate that names the other order.

    Returns:
        (Q,), 1 where the right order scores higher, else 0; a tie is wrong.

    Raises:
        ValueError: A score is NaN or infinite, or an index is out of range or that of the right candidate.

    >>> zste_order_outcomes([[0.5, 0.3, 0.9], [0.4, 0.4, 0.1]], [[0], [0]], [1, 1])
    array([1., 0.])
    """
    outcomes = np.empty(len(scores))
    for place, (row, right, opposite) in enumerate(zip(scores, relevant, opposites, strict=True)):
        values, columns = _checked(place, row, right, "3A")
        if not 0 <= opposite < len(values) or opposite == columns[0]:
            raise ValueError(
                f"question {place} has the opposite {opposite!r}; it must be another candidate than {columns[0]}, "
                f"in 0..{len(values) - 1}"
            )
        outcomes[place] = values[columns[0]] > values[opposite]
    return outcomes


def zste_ranks(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> NDArray[np.int64]:
    """The rank, from 0, of each question's best right candidate: the number of wrong ones scored at least as high.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`.
        tasks: As in `zste_outcomes`.

    Returns:
        (Q,), in the order of the questions.

    Raises:
        ValueError: As in `zste_outcomes`.

    >>> zste_ranks([[0.1, 0.9, 0.3], [0.6, 0.5, 0.8]], [[1], [0, 1]], ["3A", "5A"])
    array([0, 1])
    """
    return _right_ranks(scores, relevant, tasks)[0]


def zste_chance(num_candidates: int, task: str) -> float:
    """The expected score of a question when its candidates stand in random order, exactly.

    With n candidates:

        1A, 3, 4: 1/n        2A, 2C: 1 / C(n, 2)        2B, 2D: 1 - C(n - 2, 2) / C(n, 2)        5: 2/n

    Args:
        num_candidates: The number n of candidates, the right ones among them.
        task: The task, "1A" to "5B".

    Returns:
        A fraction: 1/3 for 3A and 3B, 1/2 for 5A.

    Raises:
        ValueError: The task is unknown, or has fewer candidates than right ones.

    >>> zste_chance(3, "3A"), zste_chance(4, "5A"), zste_chance(50, "2A") == 1 / 1225
    (0.3333333333333333, 0.5, True)
    """
    _check_task(task)
    if num_candidates < NUM_RIGHT[task]:
        raise ValueError(f"num_candidates is {num_candidates}; task {task} has {NUM_RIGHT[task]} right ones")
    rule, pairs = RULES[task], comb(num_candidates, 2)
    if rule == "both":
        return 1 / pairs
    if rule == "either":
        return (pairs - comb(num_candidates - 2, 2)) / pairs
    return NUM_RIGHT[task] / num_candidates


def zste_scores(
    scores: Sequence[Sequence[float]],
    relevant: Sequence[Sequence[int]],
    tasks: Sequence[str],
    opposites: Sequence[int | None] | None = None,
) -> dict[str, float]:
    """The score of each task, beside what random answers would get.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`.
        tasks: As in `zste_outcomes`.
        opposites: The candidate of each question that names the right one's sounds in the other order, or None where a
            question has none; see `zste_order_outcomes`.

    Returns:
        For each task that is asked `3A`, its score in 0..1 (a perfect model: 1, a constant one: 0), `3A_chance`, the
        mean of `zste_chance` over its questions, and `3A_questions`, their number. With opposites also `3A_order`, the
        share of its questions that prefer the right order to the other one, and `3A_order_chance`, 1/2.

    Raises:
        ValueError: As in `zste_outcomes`.

    >>> zste_scores([[0.1, 0.9, 0.3, 0.0], [0.6, 0.5, 0.8, 0.0]], [[1], [0, 1]], ["4A", "5A"])
    {'4A': 1.0, '4A_chance': 0.25, '4A_questions': 1, '5A': 0.5, '5A_chance': 0.5, '5A_questions': 1}
    """
    if opposites is not None and len(opposites) != len(scores):
        raise ValueError(f"got {len(opposites)} opposites for {len(scores)} questions; give one for each, or None")

    summary: dict[str, float] = {}
    for task, outcomes in zste_outcomes(scores, relevant, tasks).items():
        asked = np.flatnonzero(np.asarray(tasks) == task).tolist()
        summary[task] = float(outcomes.mean())
        summary[f"{task}_chance"] = mean(zste_chance(len(scores[place]), task) for place in asked)
        summary[f"{task}_questions"] = len(outcomes)

        ordered = [place for place in asked if opposites is not None and opposites[place] is not None]
        if opposites is not None and ordered:
            own = (_taken(scores, ordered), _taken(relevant, ordered), _taken(opposites, ordered))
            summary[f"{task}_order"] = float(zste_order_outcomes(*own).mean())
            summary[f"{task}_order_chance"] = 0.5
    return summary


def zste_scores_by_language(
    scores: Sequence[Sequence[float]],
    relevant: Sequence[Sequence[int]],
    tasks: Sequence[str],
    languages: Sequence[str],
    questions: Sequence[Hashable] | None = None,
    opposites: Sequence[int | None] | None = None,
) -> dict[str, float]:
    """The scores of each language, and how alike the languages answer the same questions.

    MRV of a task = mean over its questions that are asked in every language of the variance, over the languages, of
    the rank of the best right candidate (ATRI, eq. 16, on temporal questions). The variance is divided by K, the number
    of languages. Ranks at random give (1 - 1/K) m (n + 1) (n - m) / ((m + 1)^2 (m + 2)) on average, with m of n
    candidates right; for m = 1 that is (1 - 1/K) (n^2 - 1) / 12.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`.
        tasks: As in `zste_outcomes`.
        languages: The language of each question, such as "fra".
        questions: What each question asks, alike in all languages, such as the clip's id; a task asks it once in
            each language. Without it, the i-th question of a task in one language is the i-th in every other.
        opposites: As in `zste_scores`.

    Returns:
        What `zste_scores` gives for each language, as `fra_3A`, `fra_3A_chance`, `fra_3A_questions`. With two languages
        or more and questions asked in all of them also `3A_MRV` (0, the best: every question gets one rank in all
        languages), `3A_MRV_chance` and `3A_MRV_questions`, the number of such questions.

    Raises:
        ValueError: As in `zste_outcomes`; or `languages` or `questions` do not fit, a question repeats in a language,
            has not the same number of candidates in all of them, or is not named although the languages differ in their
            number of questions.

    >>> scores = zste_scores_by_language(
    ...     [[0.9, 0.1, 0.3], [0.1, 0.9, 0.3]], [[0], [0]], ["3A", "3A"], ["eng", "fra"]
    ... )
    >>> scores["eng_3A"], scores["fra_3A"], scores["3A_MRV"]  # ranks 0 and 2
    (1.0, 0.0, 1.0)
    """
    ranks = zste_ranks(scores, relevant, tasks)
    for name, column in (("languages", languages), ("questions", questions)):
        if column is not None and len(column) != len(ranks):
            raise ValueError(f"got {len(column)} {name} for {len(ranks)} questions; give one for each")

    summary: dict[str, float] = {}
    for language in dict.fromkeys(languages):
        own = np.flatnonzero(np.asarray(languages) == language).tolist()
        own_opposites = None if opposites is None else _taken(opposites, own)
        answers = zste_scores(_taken(scores, own), _taken(relevant, own), _taken(tasks, own), own_opposites)
        for name, value in answers.items():
            summary[f"{language}_{name}"] = value

    sizes = np.fromiter(map(len, scores), np.int64, len(scores))
    for task in NUM_RIGHT:
        table = _parallel(np.flatnonzero(np.asarray(tasks) == task).tolist(), task, languages, questions)
        if table.size:
            summary |= _consistency(task, ranks[table], sizes[table])
    return summary


def _taken(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]


def _check_task(task: str) -> None:
    if task not in NUM_RIGHT:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(NUM_RIGHT)}")


def _right_ranks(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each question the ranks of its best and of its last right candidate."""
    if not len(scores) == len(relevant) == len(tasks) or not len(scores):
        raise ValueError(
            f"got {len(scores)} rows of scores, {len(relevant)} lists of right candidates and {len(tasks)} tasks; "
            "give one of each for every question, and one question at least"
        )

    ranks = np.empty((2, len(scores)), np.int64)
    for place, (row, right, task) in enumerate(zip(scores, relevant, tasks, strict=True)):
        values, columns = _checked(place, row, right, task)
        chosen = np.sort(values[columns])[::-1]
        values[columns] = -np.inf
        ahead = (values >= chosen[:, None]).sum(axis=1) + np.arange(len(columns))
        ranks[:, place] = ahead[0], ahead[-1]
    return ranks[0], ranks[1]


def _checked(
    place: int, row: Sequence[float], right: Sequence[int], task: str
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """A question's scores, copied, and its right columns."""
    _check_task(task)
    values, columns = np.array(row, np.float64), np.array(right)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"question {place} has the scores {row!r}; give finite numbers, one for each candidate")
    if columns.shape != (NUM_RIGHT[task],) or columns.dtype.kind not in "iu":
        raise ValueError(
            f"question {place} has the right candidates {right!r}; task {task} has {NUM_RIGHT[task]} of them"
        )
    if len(set(columns.tolist())) < len(columns) or min(columns) < 0 or max(columns) >= len(values):
        raise ValueError(
            f"question {place} has the right candidates {right!r}; they must differ and lie in 0..{len(values) - 1}"
        )
    return values, columns


def _parallel(
    places: Sequence[int], task: str, languages: Sequence[str], questions: Sequence[Hashable] | None
) -> NDArray[np.int64]:
    """(N, K): where the questions of a task stand that all K languages ask; empty for one language."""
    asked: dict[str, dict[Hashable, int]] = {language: {} for language in dict.fromkeys(languages)}
    for place in places:
        held = asked[languages[place]]
        question = len(held) if questions is None else questions[place]
        if question in held:
            raise ValueError(f"task {task} asks question {question!r} twice in {languages[place]!r}")
        held[question] = place

    counts = {language: len(held) for language, held in asked.items()}
    if questions is None and len(set(counts.values())) > 1:
        raise ValueError(f"task {task} has {counts} questions; name them in `questions`, since their numbers differ")
    if len(counts) < 2:
        return np.empty((0, len(counts)), np.int64)

    rows = []
    for question in next(iter(asked.values())):
        found = [held.get(question) for held in asked.values()]
        if None not in found:
            rows.append(found)
    return np.array(rows, np.int64)


def _consistency(task: str, ranks: NDArray[np.int64], sizes: NDArray[np.int64]) -> dict[str, float]:
    """MRV of (N, K) ranks among (N, K) candidates, with its chance level."""
    differing = np.flatnonzero((sizes != sizes[:, :1]).any(axis=1))
    if len(differing):
        raise ValueError(
            f"parallel question {differing[0]} of task {task} has {sizes[differing[0]].tolist()} candidates in its "
            "languages; ask all of them among the same"
        )
    m, spread = NUM_RIGHT[task], 1 - 1 / ranks.shape[1]
    chance = mean(spread * m * (n + 1) * (n - m) / ((m + 1) ** 2 * (m + 2)) for n in sizes[:, 0].tolist())
    return {
        f"{task}_MRV": float(ranks.var(axis=1).mean()),
        f"{task}_MRV_chance": chance,
        f"{task}_MRV_questions": len(ranks),
    }
