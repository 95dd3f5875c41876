"""metrics/zste, compared with loops, all orders and the paper's chance levels, and its use in `evaluate`."""

import itertools

import numpy as np
import pytest
from temporal_assertions import make_rows

from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, zste_prompts, zste_set
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.zste import zste_chance, zste_order_outcomes, zste_outcomes, zste_ranks, zste_scores

TASKS = list(ZSTE_FAMILIES)


def num_right(task):
    return 2 if task[0] in "25" else 1


def naive_outcome(row, right, task):
    """Take the first one or two candidates, sorted so that wrong ones precede correct ones of equal score."""
    order = sorted(range(len(row)), key=lambda column: (-row[column], column in right))
    if num_right(task) == 1:
        return float(order[0] == right[0])
    hits = len({*order[:2]} & {*right})
    if task[0] == "5":
        return hits / 2
    return float(hits == 2) if task[1] in "AC" else float(hits >= 1)


def random_questions(seed, count, levels=None):
    rng = np.random.default_rng(seed)
    tasks = [TASKS[i] for i in rng.integers(0, len(TASKS), count)]
    sizes = [int(rng.integers(num_right(task), 9)) for task in tasks]
    scores = [(rng.integers(0, levels, n) / levels if levels else rng.standard_normal(n)).tolist() for n in sizes]
    relevant = [rng.permutation(n)[: num_right(task)].tolist() for n, task in zip(sizes, tasks, strict=True)]
    return scores, relevant, tasks


@pytest.mark.parametrize("levels", [None, 1, 2, 5])
def test_outcomes_equal_naive_answers(levels):
    scores, relevant, tasks = random_questions(0, 600, levels)
    found = zste_outcomes(scores, relevant, tasks)
    assert list(found) == TASKS
    assert zste_ranks(scores, relevant, tasks).tolist() == [
        sum(score >= max(row[c] for c in right) for column, score in enumerate(row) if column not in right)
        for row, right in zip(scores, relevant, strict=True)
    ]
    for task in TASKS:
        expected = [
            naive_outcome(*question) for question in zip(scores, relevant, tasks, strict=True) if question[2] == task
        ]
        assert found[task].tolist() == expected
    summary = zste_scores(scores, relevant, tasks)
    for task in TASKS:
        assert summary[task] == found[task].mean()
        assert summary[f"{task}_questions"] == tasks.count(task)
        sizes = [len(row) for row, asked in zip(scores, tasks, strict=True) if asked == task]
        assert summary[f"{task}_chance"] == pytest.approx(np.mean([zste_chance(n, task) for n in sizes]), abs=1e-15)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_chance_is_the_mean_over_all_orders(task, n):
    orders = list(itertools.permutations(range(n)))
    outcomes = zste_outcomes(orders, [list(range(num_right(task)))] * len(orders), [task] * len(orders))[task]
    assert zste_chance(n, task) == pytest.approx(outcomes.mean(), abs=1e-12)


@pytest.mark.parametrize(
    ("tasks", "n", "level", "printed"),
    [("1A", 50, 1 / 50, ()), ("3A 3B", 3, 1 / 3, (33.27, 34.29)), ("4A 4B", 50, 1 / 50, (2.4, 1.98))],
)
def test_published_chance_levels(tasks, n, level, printed):
    """CLAP's scores on tasks 3 and 4 in [T table 3] are at chance level within the sampling error."""
    assert {zste_chance(n, task) for task in tasks.split()} == {level}
    assert [100 * level] * len(printed) == pytest.approx(printed, abs=1)


def asked(languages=("eng",), num_items=12):
    """Return correct answers, tasks, languages and names of real questions, language by language."""
    rows = make_rows()
    labels = sorted({label for row in rows for label in row["labels"]})
    questions = []
    for language in languages:
        for record in zste_set(rows, seed=0, num_items=num_items):
            for task in (task for task, family in ZSTE_FAMILIES.items() if family == record["family"]):
                prompts = zste_prompts(task, record, labels, num_candidates=8)
                questions.append((len(prompts.texts), prompts.right, task, language, record["id"]))
    return questions


def test_a_perfect_a_constant_and_a_random_model_on_real_questions():
    sizes, relevant, tasks, _, _ = zip(*asked(num_items=100), strict=True)
    perfect = [[float(column in right) for column in range(n)] for n, right in zip(sizes, relevant, strict=True)]
    constant = [[0.3] * n for n in sizes]
    rng = np.random.default_rng(0)
    chance = zste_scores(perfect, relevant, tasks)
    random = {task: [] for task in TASKS}
    for _ in range(20):
        drawn = zste_outcomes([rng.random(n) for n in sizes], relevant, tasks)
        for task, outcomes in drawn.items():
            random[task] += outcomes.tolist()
    for task in TASKS:
        assert chance[task] == 1
        assert zste_scores(constant, relevant, tasks)[task] == 0
        error = 5 * 0.5 / np.sqrt(len(random[task]))
        assert np.mean(random[task]) == pytest.approx(chance[f"{task}_chance"], abs=error)


def multilingual(seed=0, languages=("eng", "fra", "deu")):
    sizes, relevant, tasks, spoken, names = (list(column) for column in zip(*asked(languages), strict=True))
    rng = np.random.default_rng(seed)
    return [rng.random(n).tolist() for n in sizes], relevant, tasks, spoken, names


def by_language(scores, relevant, tasks, languages, questions=None, **options):
    return zste_scores(scores, relevant, tasks, languages=languages, questions=questions, **options)


def test_languages_have_their_own_scores_and_a_common_variance():
    scores, relevant, tasks, languages, names = multilingual()
    found = by_language(scores, relevant, tasks, languages, names)
    ranks = zste_ranks(scores, relevant, tasks)
    for language in ("eng", "fra", "deu"):
        own = [i for i, spoken in enumerate(languages) if spoken == language]
        expected = zste_scores([scores[i] for i in own], [relevant[i] for i in own], [tasks[i] for i in own])
        assert {name: found[f"{language}_{name}"] for name in expected} == expected
    for task in TASKS:
        ids = [names[i] for i in range(len(names)) if (tasks[i], languages[i]) == (task, "eng")]
        place = {(tasks[i], languages[i], names[i]): i for i in range(len(names))}
        table = [[ranks[place[task, language, name]] for language in ("eng", "fra", "deu")] for name in ids]
        assert found[f"{task}_MRV"] == pytest.approx(mean_rank_variance(table), abs=1e-12)
        assert found[f"{task}_MRV_questions"] == len(ids) == 12


def test_the_order_of_questions_does_not_matter_when_they_are_named():
    columns = multilingual()
    shuffled = np.random.default_rng(1).permutation(len(columns[0]))
    again = by_language(*([column[i] for i in shuffled] for column in columns))
    assert again == pytest.approx(by_language(*columns), abs=1e-12)
    assert by_language(*columns[:4]) == by_language(*columns)  # the order is the same in all languages


def test_questions_of_some_languages_only_are_left_out():
    scores, relevant = [[0.9, 0.1, 0.5], [0.1, 0.9, 0.5], [0.2, 0.9, 0.5]], [[0]] * 3
    found = by_language(scores, relevant, ["3A"] * 3, ["eng", "fra", "fra"], ["x", "x", "y"])
    assert (found["3A_MRV"], found["3A_MRV_questions"], found["fra_3A_questions"]) == (1.0, 1, 2)
    apart = by_language(scores[:2], relevant[:2], ["3A"] * 2, ["eng", "fra"], ["x", "y"])
    assert not [name for name in apart if "MRV" in name]
    alone = by_language(scores, relevant, ["3A"] * 3, ["eng"] * 3)
    assert alone == {f"eng_{name}": value for name, value in zste_scores(scores, relevant, ["3A"] * 3).items()}


@pytest.mark.parametrize(("task", "n"), [("3A", 3), ("4A", 4), ("2A", 4), ("5A", 3)])
@pytest.mark.parametrize("num_languages", [2, 3])
def test_the_chance_level_of_the_variance_is_the_mean_over_all_ranks(task, n, num_languages):
    right = list(range(num_right(task)))
    ranks = zste_ranks(*zip(*((order, right, task) for order in itertools.permutations(range(n))), strict=True))
    languages = [f"l{i}" for i in range(num_languages)]
    found = by_language([range(n)] * num_languages, [right] * num_languages, [task] * num_languages, languages)
    every = list(itertools.product(ranks.tolist(), repeat=num_languages))
    assert found[f"{task}_MRV_chance"] == pytest.approx(mean_rank_variance(every), abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "relevant", "tasks", "message"),
    [
        ([], [], [], "question"),
        ([[0.1, 0.2]], [[0], [1]], ["1A"], r"\b1\b.*\b2\b.*\b1\b"),
        ([[0.1, 0.2]], [[0]], ["6A"], "'6A'"),
        ([[0.1, float("nan")]], [[0]], ["1A"], "question 0"),
        ([[0.1, 0.2], [0.1, float("inf")]], [[0], [0]], ["1A", "1A"], "question 1"),
        ([[0.1, 0.2]], [[]], ["1A"], r"\[\].*1A"),
        ([[0.1, 0.2]], [[0, 1]], ["3A"], "3A"),
        ([[0.1, 0.2]], [[0]], ["5A"], "5A"),
        ([[0.1, 0.2]], [[1, 1]], ["5A"], "1, 1"),
        ([[0.1, 0.2]], [[2]], ["1A"], r"0\.\.1"),
        ([[0.1, 0.2, 0.3]], [[0, 3]], ["2A"], r"0\.\.2"),
        ([[0.1, 0.2]], [[-1]], ["1A"], r"0\.\.1"),
    ],
)
def test_errors_for_bad_questions_name_the_problem_and_the_row(scores, relevant, tasks, message):
    for function in (zste_outcomes, zste_scores, zste_ranks):
        with pytest.raises(ValueError, match=message):
            function(scores, relevant, tasks)


@pytest.mark.parametrize(
    ("languages", "questions", "sizes", "message"),
    [
        (["eng", "fra"], None, (3, 3, 3), r"\b2 languages\b.*\b3\b"),
        (["eng", "fra", "deu"], ["x"], (3, 3, 3), r"\b1 questions\b.*\b3\b"),
        (["eng", "fra", "fra"], None, (3, 3, 3), "`questions`"),
        (["eng", "fra", "fra"], ["x", "x", "x"], (3, 3, 3), "4A.*'x'.*'fra'"),
        (["eng", "fra", "deu"], None, (3, 4, 3), r"question 0.*4A.*\[3, 4, 3\]"),
    ],
)
def test_languages_must_fit(languages, questions, sizes, message):
    scores = [[0.5] * n for n in sizes]
    with pytest.raises(ValueError, match=message):
        by_language(scores, [[0]] * 3, ["4A"] * 3, languages, questions)


@pytest.mark.parametrize(("n", "task"), [(0, "1A"), (1, "2A")])
def test_chance_needs_candidates(n, task):
    with pytest.raises(ValueError, match=rf"num_candidates.*\b{n}\b.*{task}"):
        zste_chance(n, task)


@pytest.fixture
def metric(load_metric):
    return load_metric("zste")


def test_evaluate_returns_the_scores_of_languages(metric):
    scores, relevant, tasks, languages, names = multilingual()
    expected = by_language(scores, relevant, tasks, languages, names)
    inputs = {"predictions": scores, "references": relevant, "tasks": tasks}
    assert metric.compute(**inputs, languages=languages, questions=names) == expected
    metric.add_batch(**inputs)
    assert metric.compute(languages=languages) == expected


def test_evaluate_accepts_the_rows_as_a_keyword(metric):
    scores, relevant, tasks = random_questions(0, 40)
    picked = [7, 3, 21]
    inputs = {"references": [relevant[i] for i in picked], "tasks": [tasks[i] for i in picked]}
    found = metric.compute(predictions=picked, **inputs, similarity=scores)
    assert found == zste_scores(
        [scores[i] for i in picked], **{"relevant": inputs["references"], "tasks": inputs["tasks"]}
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": [[0.1, 0.2]], "references": [[0]], "tasks": ["6A"]}, "'6A'"),
        ({"predictions": [], "references": [], "tasks": []}, "predictions"),
        ({"predictions": [[0.1]], "references": [[0]]}, "tasks"),
        ({"predictions": [[0.1]], "references": [[0]], "tasks": ["1A", "1A"]}, "Mismatch in the number"),
        (
            {"predictions": [3], "references": [[0]], "tasks": ["1A"], "similarity": [[0.1]]},
            r"similarity.*0\.\.0.*\b3\b",
        ),
        ({"predictions": [3], "references": [[0]], "tasks": ["1A"]}, "question 0"),
    ],
)
def test_evaluate_errors_are_clear(metric, inputs, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(**inputs)


def test_order_compares_forward_and_reversed_only():
    """The score of the third candidate does not matter, ties are wrong, and only questions with an opposite count."""
    scores = [[0.5, 0.3, 0.9], [0.3, 0.5, 0.1], [0.4, 0.4, 0.2], [0.9, 0.1, 0.0]]
    relevant, opposites, tasks = [[0], [0], [0], [2]], [1, 1, 1, None], ["3A", "3A", "3A", "3B"]
    assert zste_order_outcomes(scores[:3], relevant[:3], opposites[:3]).tolist() == [1, 0, 0]
    summary = zste_scores(scores, relevant, tasks, opposites)
    assert (summary["3A_order"], summary["3A_order_chance"]) == (1 / 3, 0.5)
    assert summary["3A"] == 0
    assert "3B_order" not in summary
    assert {name: summary[name] for name in ("3A", "3B")} == {"3A": 0, "3B": 0}


def test_an_order_blind_model_is_at_chance_in_order_only():
    """An order-blind model knows that the sounds are in sequence, so it has 1/2 on 3A, above the chance of 1/3."""
    rng = np.random.default_rng(0)
    scores = np.column_stack([rng.random((4000, 2)), np.full(4000, -1.0)])
    summary = zste_scores(scores, [[0]] * 4000, ["3A"] * 4000, [1] * 4000)
    assert summary["3A_order"] == summary["3A"] == pytest.approx(summary["3A_order_chance"], abs=0.03)
    assert summary["3A"] > summary["3A_chance"] + 0.1


def test_evaluate_and_languages_take_opposites(load_metric):
    scores, relevant = [[0.5, 0.3, 0.9], [0.3, 0.5, 0.1]], [[0], [0]]
    shared = {"tasks": ["3A", "3A"], "languages": ["eng", "fra"], "opposites": [1, 1]}
    found = load_metric("zste").compute(predictions=scores, references=relevant, **shared)
    assert found == by_language(scores, relevant, **shared)
    assert (found["eng_3A_order"], found["fra_3A_order"]) == (1, 0)


@pytest.mark.parametrize(("opposites", "message"), [([0], "opposite 0"), ([3], "opposite 3"), ([1, 1], "2 opposites")])
def test_an_opposite_is_another_candidate(opposites, message):
    with pytest.raises(ValueError, match=message):
        zste_scores([[0.5, 0.3, 0.9]], [[0]], ["3A"], opposites)
