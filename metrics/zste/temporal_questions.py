"""Scores of ZSTE, the zero-shot temporal evaluation of TeminAL (section 4.2, appendix B.4 and table 3).

A question is a clip with scores of candidate texts, one or two of them correct. Let r_1 < r_2 be the 0-based ranks of
the correct candidates. A tied wrong candidate ranks before a correct one, so a model with constant scores gets 0. The
score of a question is

    1A, 3A, 3B, 4A, 4B    [r_1 = 0]                      one correct candidate
    2A, 2C                [r_2 = 1]                      both correct ones are the first two
    2B, 2D                [r_1 < 2]                      at least one is among the first two
    5A, 5B                ([r_1 < 2] + [r_2 < 2]) / 2    share of the correct ones among the first two

and the score of a task is the mean over its questions.
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
"""Scoring rule of each task."""
NUM_RIGHT = {task: 1 if rule == "first" else 2 for task, rule in RULES.items()}
"""Number of correct candidates per question of each task."""


def zste_outcomes(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Compute the score of every question, by task; the docstring of the module defines the scores.

    Args:
        scores: Scores of each question's candidates, higher is closer; their number may differ between questions.
        relevant: Indices of each question's correct candidates, one or two depending on the task.
        tasks: Task of each question, "1A" to "5B".

    Returns:
        Scores in 0..1 of the questions of each task present, tasks in the order of `NUM_RIGHT`.

    Raises:
        ValueError: There are no questions, the arguments differ in length, a task is unknown, a score is NaN or
            infinite, or correct candidates are too few, too many, duplicated or out of range.

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
        is_task = names == task
        if is_task.any():
            outcomes[task] = rules[RULES[task]][is_task].astype(np.float64)
    return outcomes


def zste_order_outcomes(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], opposites: Sequence[int]
) -> NDArray[np.float64]:
    """Compare, for each question, the correct order with the opposite order of the same sounds.

    Only "X before Y" and "Y before X" are compared. Therefore recognising the sounds, or their overlap, does not help.
    Chance is 1/2, which is also the expected score of a model that ignores order.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`, for tasks with one correct candidate (3A, 4A).
        opposites: Index of each question's candidate with the opposite order.

    Returns:
        (Q,), 1 if the correct order scores higher, else 0; a tie is 0.

    Raises:
        ValueError: A score is NaN or infinite, or an index is out of range, or the opposite is the correct candidate.

    >>> zste_order_outcomes([[0.5, 0.3, 0.9], [0.4, 0.4, 0.1]], [[0], [0]], [1, 1])
    array([1., 0.])
    """
    outcomes = np.empty(len(scores))
    for index, (row, right, opposite) in enumerate(zip(scores, relevant, opposites, strict=True)):
        values, columns = _check_question(index, row, right, "3A")
        if not 0 <= opposite < len(values) or opposite == columns[0]:
            raise ValueError(
                f"question {index} has the opposite {opposite!r}; it must be another candidate than {columns[0]}, "
                f"in 0..{len(values) - 1}"
            )
        outcomes[index] = values[columns[0]] > values[opposite]
    return outcomes


def zste_ranks(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> NDArray[np.int64]:
    """Compute the 0-based rank of each question's best correct candidate: the number of wrong ones that score as high.

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
    """Compute the exact expected score of a question for candidates in random order.

    With n candidates:

        1A, 3, 4: 1/n        2A, 2C: 1 / C(n, 2)        2B, 2D: 1 - C(n - 2, 2) / C(n, 2)        5: 2/n

    Args:
        num_candidates: Number n of candidates, including the correct ones.
        task: Task, "1A" to "5B".

    Returns:
        A fraction, for example 1/3 for 3A with three candidates and 1/2 for 5A with four.

    Raises:
        ValueError: The task is unknown, or there are fewer candidates than correct ones.

    >>> zste_chance(3, "3A"), zste_chance(4, "5A"), zste_chance(50, "2A") == 1 / 1225
    (0.3333333333333333, 0.5, True)
    """
    _check_task(task)
    if num_candidates < NUM_RIGHT[task]:
        raise ValueError(f"num_candidates is {num_candidates}; task {task} has {NUM_RIGHT[task]} correct ones")
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
    """Compute the score and the chance level of each task.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`.
        tasks: As in `zste_outcomes`.
        opposites: Index of each question's candidate with the opposite order, or None if a question has none; see
            `zste_order_outcomes`.

    Returns:
        For each task present, for example 3A: `3A`, the score in 0..1 (1 for a perfect model, 0 for a constant one);
        `3A_chance`, the mean of `zste_chance` over its questions; and `3A_questions`, their number. With opposites also
        `3A_order`, the share of questions that prefer the correct order, and `3A_order_chance`, 1/2.

    Raises:
        ValueError: As in `zste_outcomes` and `zste_order_outcomes`, or `opposites` has another length.

    >>> zste_scores([[0.1, 0.9, 0.3, 0.0], [0.6, 0.5, 0.8, 0.0]], [[1], [0, 1]], ["4A", "5A"])
    {'4A': 1.0, '4A_chance': 0.25, '4A_questions': 1, '5A': 0.5, '5A_chance': 0.5, '5A_questions': 1}
    """
    if opposites is not None and len(opposites) != len(scores):
        raise ValueError(f"got {len(opposites)} opposites for {len(scores)} questions; give one for each, or None")

    summary: dict[str, float] = {}
    for task, outcomes in zste_outcomes(scores, relevant, tasks).items():
        indices = np.flatnonzero(np.asarray(tasks) == task).tolist()
        summary[task] = float(outcomes.mean())
        summary[f"{task}_chance"] = mean(zste_chance(len(scores[index]), task) for index in indices)
        summary[f"{task}_questions"] = len(outcomes)

        ordered = [index for index in indices if opposites is not None and opposites[index] is not None]
        if opposites is not None and ordered:
            arguments = (_select(scores, ordered), _select(relevant, ordered), _select(opposites, ordered))
            summary[f"{task}_order"] = float(zste_order_outcomes(*arguments).mean())
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
    """Compute the scores of each language, and the mean rank variance (MRV) over languages.

    MRV of a task = mean, over its questions that exist in all languages, of the variance, over languages, of the rank
    of the best correct candidate (ATRI, eq. 16, for temporal questions). The variance is divided by K, the number of
    languages. If m of n candidates are correct, the expectation for random ranks is
    (1 - 1/K) m (n + 1) (n - m) / ((m + 1)^2 (m + 2)); for m = 1 this is (1 - 1/K) (n^2 - 1) / 12.

    Args:
        scores: As in `zste_outcomes`.
        relevant: As in `zste_outcomes`.
        tasks: As in `zste_outcomes`.
        languages: Language of each question, such as "fra".
        questions: Id of each question, equal in all languages, such as the clip id; unique per task and language. None
            matches the i-th questions of a task in all languages.
        opposites: As in `zste_scores`.

    Returns:
        The results of `zste_scores` for each language, as `fra_3A`, `fra_3A_chance`, `fra_3A_questions`. For questions
        in two or more languages also `3A_MRV` (0, the best, if every question has the same rank in all languages),
        `3A_MRV_chance`, and `3A_MRV_questions`, the number of questions that exist in all languages.

    Raises:
        ValueError: As in `zste_scores`; or `languages` or `questions` have another length, a question is duplicated in
            a language, its number of candidates differs between languages, or `questions` is None although the numbers
            of questions differ between languages.

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
        rows = np.flatnonzero(np.asarray(languages) == language).tolist()
        row_opposites = None if opposites is None else _select(opposites, rows)
        results = zste_scores(_select(scores, rows), _select(relevant, rows), _select(tasks, rows), row_opposites)
        for name, value in results.items():
            summary[f"{language}_{name}"] = value

    sizes = np.fromiter(map(len, scores), np.int64, len(scores))
    for task in NUM_RIGHT:
        table = _parallel_questions(np.flatnonzero(np.asarray(tasks) == task).tolist(), task, languages, questions)
        if table.size:
            summary |= _mrv_scores(task, ranks[table], sizes[table])
    return summary


def _select(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [values[index] for index in indices]


def _check_task(task: str) -> None:
    if task not in NUM_RIGHT:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(NUM_RIGHT)}")


def _right_ranks(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ranks of each question's best and worst correct candidate, (Q,) each."""
    if not len(scores) == len(relevant) == len(tasks) or not len(scores):
        raise ValueError(
            f"got {len(scores)} rows of scores, {len(relevant)} lists of correct candidates and {len(tasks)} tasks; "
            "give one of each per question, for one or more questions"
        )

    ranks = np.empty((2, len(scores)), np.int64)
    for index, (row, right, task) in enumerate(zip(scores, relevant, tasks, strict=True)):
        values, columns = _check_question(index, row, right, task)
        right_scores = np.sort(values[columns])[::-1]
        values[columns] = -np.inf
        ahead = (values >= right_scores[:, None]).sum(axis=1) + np.arange(len(columns))
        ranks[:, index] = ahead[0], ahead[-1]
    return ranks[0], ranks[1]


def _check_question(
    index: int, row: Sequence[float], right: Sequence[int], task: str
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Check a question; return a copy of its scores, and its correct columns."""
    _check_task(task)
    values, columns = np.array(row, np.float64), np.array(right)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"question {index} has the scores {row!r}; give one finite number per candidate")
    if columns.shape != (NUM_RIGHT[task],) or columns.dtype.kind not in "iu":
        raise ValueError(
            f"question {index} has the correct candidates {right!r}; task {task} has {NUM_RIGHT[task]} of them"
        )
    if len(set(columns.tolist())) < len(columns) or min(columns) < 0 or max(columns) >= len(values):
        raise ValueError(
            f"question {index} has the correct candidates {right!r}; they must differ and be in 0..{len(values) - 1}"
        )
    return values, columns


def _parallel_questions(
    indices: Sequence[int], task: str, languages: Sequence[str], questions: Sequence[Hashable] | None
) -> NDArray[np.int64]:
    """Return the indices, (N, K), of a task's questions that exist in all K languages; empty for one language."""
    by_language: dict[str, dict[Hashable, int]] = {language: {} for language in dict.fromkeys(languages)}
    for index in indices:
        index_of = by_language[languages[index]]
        question = len(index_of) if questions is None else questions[index]
        if question in index_of:
            raise ValueError(f"task {task} has question {question!r} twice in {languages[index]!r}")
        index_of[question] = index

    counts = {language: len(index_of) for language, index_of in by_language.items()}
    if questions is None and len(set(counts.values())) > 1:
        raise ValueError(f"task {task} has {counts} questions; give `questions`, because their numbers differ")
    if len(counts) < 2:
        return np.empty((0, len(counts)), np.int64)

    rows = []
    for question in next(iter(by_language.values())):
        row = [index_of.get(question) for index_of in by_language.values()]
        if None not in row:
            rows.append(row)
    return np.array(rows, np.int64)


def _mrv_scores(task: str, ranks: NDArray[np.int64], sizes: NDArray[np.int64]) -> dict[str, float]:
    """Compute the MRV of ranks, (N, K), among `sizes` candidates, (N, K), with its chance level."""
    differing = np.flatnonzero((sizes != sizes[:, :1]).any(axis=1))
    if len(differing):
        raise ValueError(
            f"parallel question {differing[0]} of task {task} has {sizes[differing[0]].tolist()} candidates in its "
            "languages; give all languages the same number"
        )
    m, spread = NUM_RIGHT[task], 1 - 1 / ranks.shape[1]
    chance = mean(spread * m * (n + 1) * (n - m) / ((m + 1) ** 2 * (m + 2)) for n in sizes[:, 0].tolist())
    return {
        f"{task}_MRV": float(ranks.var(axis=1).mean()),
        f"{task}_MRV_chance": chance,
        f"{task}_MRV_questions": len(ranks),
    }
