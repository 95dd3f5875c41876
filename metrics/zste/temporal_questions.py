"""Compute the scores of ZSTE, TeminAL's zero-shot temporal evaluation (section 4.2, appendix B.4 and table 3).

A question is one clip with a score for each candidate text. One or two candidates are correct. Let r_1 < r_2 be the
0-based ranks of the correct candidates. Ties count against the model, so a model with constant scores gets 0. The score
of a question depends on its task:

    1A, 3A, 3B, 4A, 4B    [r_1 = 0]                      the only correct candidate is first
    2A, 2C                [r_2 = 1]                      the first two candidates are both correct
    2B, 2D                [r_1 < 2]                      at least one of the first two is correct
    5A, 5B                ([r_1 < 2] + [r_2 < 2]) / 2    share of correct candidates among the first two

The score of a task is the mean over its questions.
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
"""Number of correct candidates per question, for each task."""


def zste_outcomes(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Compute the score of each question, grouped by task (see the module docstring for the scoring rules).

    Args:
        scores: For each question, the scores of its candidates, higher is closer. Questions may have different numbers
            of candidates.
        relevant: For each question, the indices of its correct candidates, one or two depending on the task.
        tasks: Task of each question, "1A" to "5B".

    Returns:
        `{task: scores of its questions}`, with scores in 0..1.

    Raises:
        ValueError: There are no questions, the arguments differ in length, a task is unknown, or a score is not finite.
            The correct candidates of a question are duplicated, out of range, too few or too many.

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
    for task, rule in RULES.items():
        if task in tasks:
            outcomes[task] = rules[rule][names == task].astype(np.float64)
    return outcomes


def zste_order_outcomes(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], opposites: Sequence[int]
) -> NDArray[np.float64]:
    """Check for each question whether the correct order scores higher than the opposite order of the same sounds.

    Only the candidates "X before Y" and "Y before X" are compared, so recognising the sounds or their overlap does not
    help. The chance level is 1/2. A model with an audio encoder that ignores order also scores 1/2 on average, if both
    orders are equally frequent. If the text encoder ignores order, the two candidates tie and the score is 0.

    `scores` and `relevant` have the format of `zste_outcomes`, with questions of the tasks 3A and 4A. `opposites`
    contains the index of the candidate with the opposite order for each question. The result (Q,) is 1 if the correct
    order scores higher, and otherwise 0. A tie counts as 0.

    Raises:
        ValueError: A score is not finite, an index is out of range, or the opposite is the correct candidate.

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
    """Compute the 0-based rank of the best correct candidate of each question, as an array (Q,).

    The rank is the number of wrong candidates that score at least as high. The arguments and errors are the same as in
    `zste_outcomes`.

    >>> zste_ranks([[0.1, 0.9, 0.3], [0.6, 0.5, 0.8]], [[1], [0, 1]], ["3A", "5A"])
    array([0, 1])
    """
    return _right_ranks(scores, relevant, tasks)[0]


def zste_chance(num_candidates: int, task: str) -> float:
    """Compute the expected score of a question for a random ranking (exact, without sampling).

    With n = `num_candidates`:

        1A, 3, 4: 1/n        2A, 2C: 1 / C(n, 2)        2B, 2D: 1 - C(n - 2, 2) / C(n, 2)        5: 2/n

    Raises:
        ValueError: The task is unknown, or `num_candidates` is below the number of correct candidates.

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
    languages: Sequence[str] | None = None,
    questions: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """Compute the score and the chance level of each task. With `languages`, compute them for each language, and MRV.

    Mean rank variance (MRV, ATRI eq. 16) uses the questions that exist in all K languages. For each question, it takes
    the rank of the best correct candidate in each language, and the variance of these K ranks (with divisor K). The MRV
    of a task is the mean over its questions. If m of n candidates are correct, the expected MRV for random ranks is
    (1 - 1/K) m (n + 1) (n - m) / ((m + 1)^2 (m + 2)).

    The arguments and errors are the same as in `zste_outcomes` and `zste_order_outcomes`.

    Args:
        opposites: An entry is None if the question has no candidate with the opposite order.
        languages: Language code of each question, such as "fra".
        questions: Id of each question, such as the clip id. Translations of a question have the same id; ids are unique
            per task and language. None: every language has the same questions in the same order.

    Returns:
        Dict with three entries per task. For example, task 3A has `3A`, its score in 0..1 (1 for a perfect model, 0 for
        constant scores); `3A_chance`, the mean of `zste_chance` over its questions; and `3A_questions`, the number of
        questions. If a task has opposites, the dict also contains `3A_order`, the mean of `zste_order_outcomes`, and
        `3A_order_chance`, 1/2. With `languages`, these names start with the language, such as `fra_3A`. With two or
        more languages, there are also `3A_MRV` (0 is the best), `3A_MRV_chance`, and `3A_MRV_questions`, the number of
        questions that exist in all languages.

    Raises:
        ValueError: An argument has another length. A question is duplicated in a language, or its number of candidates
            differs between languages. `questions` is None and the languages have different numbers of questions.

    >>> zste_scores([[0.1, 0.9, 0.3, 0.0], [0.6, 0.5, 0.8, 0.0]], [[1], [0, 1]], ["4A", "5A"])
    {'4A': 1.0, '4A_chance': 0.25, '4A_questions': 1, '5A': 0.5, '5A_chance': 0.5, '5A_questions': 1}
    >>> both = zste_scores([[0.9, 0.1, 0.3], [0.1, 0.9, 0.3]], [[0], [0]], ["3A", "3A"], languages=["eng", "fra"])
    >>> both["eng_3A"], both["fra_3A"], both["3A_MRV"]  # ranks 0 and 2
    (1.0, 0.0, 1.0)
    """
    for name, column in (("opposites", opposites), ("languages", languages), ("questions", questions)):
        if column is not None and len(column) != len(scores):
            raise ValueError(f"got {len(column)} {name} for {len(scores)} questions; give one for each")

    if opposites is None:
        opposites = [None] * len(scores)
    if languages is None:
        return _score_tasks(scores, relevant, tasks, opposites)
    ranks = zste_ranks(scores, relevant, tasks)
    summary: dict[str, float] = {}
    for language in dict.fromkeys(languages):
        rows = np.flatnonzero(np.asarray(languages) == language).tolist()
        own: Any = ([column[row] for row in rows] for column in (scores, relevant, tasks, opposites))
        for name, value in _score_tasks(*own).items():
            summary[f"{language}_{name}"] = value
    sizes = np.fromiter(map(len, scores), np.int64, len(scores))
    return summary | _rank_variances(ranks, sizes, tasks, languages, questions)


def _score_tasks(
    scores: Sequence[Sequence[float]],
    relevant: Sequence[Sequence[int]],
    tasks: Sequence[str],
    opposites: Sequence[int | None],
) -> dict[str, float]:
    """Compute the results of `zste_scores` for one language."""
    summary: dict[str, float] = {}
    for task, outcomes in zste_outcomes(scores, relevant, tasks).items():
        chances, ordered = [], []
        for row, right, opposite, other in zip(scores, relevant, opposites, tasks, strict=True):
            if other == task:
                chances.append(zste_chance(len(row), task))
                if opposite is not None:
                    ordered.append((row, right, opposite))
        summary[task] = float(outcomes.mean())
        summary[f"{task}_chance"] = mean(chances)
        summary[f"{task}_questions"] = len(outcomes)
        if ordered:
            summary[f"{task}_order"] = float(zste_order_outcomes(*zip(*ordered, strict=True)).mean())
            summary[f"{task}_order_chance"] = 0.5
    return summary


def _rank_variances(
    ranks: NDArray[np.int64],
    sizes: NDArray[np.int64],
    tasks: Sequence[str],
    languages: Sequence[str],
    questions: Sequence[Hashable] | None,
) -> dict[str, float]:
    """Compute the MRV of each task that has questions in two or more languages (see `zste_scores`).

    `ranks` are those of `zste_ranks`, and `sizes` the numbers of candidates, (Q,).
    """
    summary: dict[str, float] = {}
    for task in NUM_RIGHT:
        table = _parallel_questions(np.flatnonzero(np.asarray(tasks) == task).tolist(), task, languages, questions)
        if table.size and table.shape[1] > 1:
            differing = np.flatnonzero((sizes[table] != sizes[table[:, :1]]).any(axis=1))
            if len(differing):
                raise ValueError(
                    f"parallel question {differing[0]} of task {task} has {sizes[table[differing[0]]].tolist()} "
                    "candidates in its languages; give all languages the same number"
                )
            m, n = NUM_RIGHT[task], sizes[table[:, 0]]
            chances = (1 - 1 / table.shape[1]) * m * (n + 1) * (n - m) / ((m + 1) ** 2 * (m + 2))
            summary[f"{task}_MRV"] = float(ranks[table].var(axis=1).mean())
            summary[f"{task}_MRV_chance"] = mean(chances.tolist())
            summary[f"{task}_MRV_questions"] = len(table)
    return summary


def _check_task(task: str) -> None:
    if task not in NUM_RIGHT:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(NUM_RIGHT)}")


def _right_ranks(
    scores: Sequence[Sequence[float]], relevant: Sequence[Sequence[int]], tasks: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ranks of the best and the worst correct candidate of each question, (Q,) each."""
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
    """Check a question; return a copy of its scores, and the indices of its correct candidates."""
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
    """Return the indices (N, K) of the questions of a task that exist in all K languages."""
    by_language: dict[str, dict[Hashable, int]] = {language: {} for language in dict.fromkeys(languages)}
    for index in indices:
        index_of = by_language[languages[index]]
        question = len(index_of) if questions is None else questions[index]
        if question in index_of:
            raise ValueError(f"task {task} has question {question!r} twice in {languages[index]!r}")
        index_of[question] = index

    counts = dict(zip(by_language, map(len, by_language.values()), strict=True))
    if questions is None and len(set(counts.values())) > 1:
        raise ValueError(f"task {task} has {counts} questions; give `questions`, because their numbers differ")

    rows = []
    for question in next(iter(by_language.values())):
        places = [index_of.get(question) for index_of in by_language.values()]
        if None not in places:
            rows.append(places)
    return np.array(rows, np.int64)
