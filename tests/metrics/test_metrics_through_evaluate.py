"""All metrics, loaded with `evaluate`: inputs at once, in parts, combined, and in two processes."""

import doctest
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
import torch

from modeling_supclap.metrics.array_metric import OPTIONS
from modeling_supclap.metrics.clap_score import pair_similarity
from modeling_supclap.metrics.embedding_gap import gap_and_distance
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.recall import relevant_from_qrels, retrieval_scores
from modeling_supclap.metrics.zste import zste_scores

METRICS = Path(__file__).parents[2] / "metrics"
SCORES: Any = np.random.default_rng(0).integers(0, 5, (10, 6)) / 5
EMBEDS = np.linalg.qr(np.random.default_rng(1).standard_normal((12, 12)))[0]
RIGHT = [[i % 6] for i in range(10)]

CASES = {
    "recall": ({"predictions": SCORES, "references": RIGHT}, retrieval_scores(SCORES, RIGHT, k=[1, 2])),
    "zste": (
        {"predictions": SCORES, "references": RIGHT, "tasks": ["4A", "1A"] * 5},
        zste_scores(SCORES, RIGHT, ["4A", "1A"] * 5),
    ),
    "mrv": ({"predictions": 5 * SCORES}, {"MRV": mean_rank_variance(5 * SCORES)}),
    "embedding_gap": (
        {"predictions": EMBEDS[:10], "references": EMBEDS[2:]},
        gap_and_distance(EMBEDS[:10], EMBEDS[2:]),
    ),
    "clap_score": (
        {"predictions": SCORES + 0.1, "references": SCORES[::-1] + 0.1},
        {"clap_score": pair_similarity(SCORES + 0.1, SCORES[::-1] + 0.1).mean(), "num_pairs": 10},
    ),
}
"""`{metric: (columns, result of its function)}`; only recall uses `k`."""


@pytest.mark.parametrize("name", CASES)
def test_at_once_in_parts_and_one_by_one_it_is_the_function(load_metric, name):
    columns, expected = CASES[name]
    metric = load_metric(name)
    assert metric.compute(**columns, k=[1, 2]) == expected
    assert (
        metric.compute(**{key: np.asarray(column).tolist() for key, column in columns.items()}, k=[1, 2]) == expected
    )
    for start in range(0, 10, 4):
        metric.add_batch(**{key: column[start : start + 4] for key, column in columns.items()})
    assert metric.compute(k=[1, 2]) == expected
    for row in range(10):
        metric.add(**{key.removesuffix("s") if key != "tasks" else key: columns[key][row] for key in columns})
    assert metric.compute(k=[1, 2]) == expected


@pytest.mark.parametrize("name", CASES)
def test_metrics_combine(load_metric, name):
    """A metric ignores the columns and options of the other metrics."""
    columns, expected = CASES[name]
    both = evaluate.combine({"first": load_metric(name), "second": load_metric(name)}, force_prefix=True)
    prefixed = {f"{place}_{key}": value for place in ("first", "second") for key, value in expected.items()}
    assert both.compute(**columns, k=[1, 2]) == prefixed
    both.add_batch(**columns)
    assert both.compute(k=[1, 2]) == prefixed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("call", ["at once", "in parts", "combined"])
def test_an_unknown_option_is_an_error(load_metric, name, call):
    columns, _ = CASES[name]
    metric = load_metric(name)
    if call == "in parts":
        metric.add_batch(**columns)
        columns = {}
    elif call == "combined":
        metric = evaluate.combine([metric])
    with pytest.raises(TypeError, match=rf"{name} has no option 'top_k'; it has .*predictions"):
        metric.compute(**columns, k=[1, 2], top_k=[1])


@pytest.mark.parametrize("name", CASES)
def test_the_common_test_of_evaluate(load_metric, monkeypatch, name):
    """As in `tests/test_metric_common.py` of evaluate: named parameters only, and the examples run."""
    metric = load_metric(name)
    parameters = inspect.signature(metric._compute).parameters
    assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    assert parameters.keys() - {"self", "predictions", "references"} <= OPTIONS
    monkeypatch.chdir(METRICS.parent)
    assert doctest.testmod(sys.modules[type(metric).__module__], raise_on_error=True).attempted >= 2


def test_the_options_are_those_of_the_metrics(load_metric):
    parameters = {option for name in CASES for option in inspect.signature(load_metric(name)._compute).parameters}
    assert parameters - {"predictions", "references"} == OPTIONS


ROWS = list(range(10))
KEYWORDS = {
    "recall": ({"references": RIGHT}, {"similarity": SCORES}),
    "zste": ({"predictions": ROWS, "references": RIGHT, "tasks": ["4A", "1A"] * 5}, {"similarity": SCORES}),
    "mrv": ({"predictions": ROWS}, {"ranks": np.round(5 * SCORES)}),
    "embedding_gap": (
        {"predictions": ROWS, "references": ROWS},
        {"other_embeds": EMBEDS[:10], "english_embeds": EMBEDS[2:]},
    ),
    "clap_score": ({"predictions": ROWS, "references": ROWS}, {"audio_embeds": EMBEDS, "text_embeds": EMBEDS[::-1]}),
}
"""`{metric: (input, arrays as keywords)}`; recall takes the rows from its keyword."""


@pytest.mark.filterwarnings("ignore:.*norm")
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_may_be_tensors_of_any_dtype_with_gradient(load_metric, name, dtype, as_list):
    columns, arrays = KEYWORDS[name]
    columns = {"predictions": ROWS, **columns}
    tensors = {key: torch.from_numpy(array.copy()).to(dtype).requires_grad_() for key, array in arrays.items()}
    expected = load_metric(name).compute(
        **columns, **{key: value.detach().double().numpy() for key, value in tensors.items()}
    )
    given = {key: list(value) if as_list and name != "recall" else value for key, value in tensors.items()}
    assert load_metric(name).compute(**columns, **given) == pytest.approx(expected, rel=1e-2)


def test_without_the_package_the_error_names_its_distribution(load_metric, monkeypatch):
    load_module = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, *package: load_module("no_such_module" if name == "modeling_supclap" else name, *package),
    )
    with pytest.raises(ImportError, match="pip install supclap'"):
        load_metric("recall")


def test_a_label_question_is_a_retrieval_query_too(load_metric):
    """zste and recall have common columns and a common keyword."""
    both = evaluate.combine([load_metric("zste"), load_metric("recall")])
    tasks = ["1A"] * 10
    expected = zste_scores(SCORES, RIGHT, tasks) | retrieval_scores(SCORES, RIGHT, k=[1])
    assert both.compute(predictions=SCORES, references=RIGHT, tasks=tasks, k=[1]) == expected
    assert both.compute(predictions=range(10), references=RIGHT, tasks=tasks, k=[1], similarity=SCORES) == expected


def test_recall_has_the_reader_of_qrels(load_metric):
    rows = [("q", "a", 0), ("q", "b", 1)], ["q"], ["a", "b"]
    assert load_metric("recall").relevant_from_qrels(*rows) == relevant_from_qrels(*rows) == [[1]]


# Two processes that import the libraries once.
FORK = """
import os, sys
import evaluate
child = os.fork()
sys.argv.append(str(int(child == 0)))
"""
JOIN = """
sys.stdout.flush()
if child:
    os.waitpid(child, 0)
"""
WORKER = """
import json, sys
import numpy as np
import evaluate
folder, rank = sys.argv[1], int(sys.argv[2])
mine = slice(0, 7) if rank == 0 else slice(7, 10)
rng = np.random.default_rng(0)
scores, other = rng.standard_normal((10, 6)), rng.standard_normal((10, 6))
unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
columns = {
    "recall": {"predictions": scores, "references": [[i % 6] for i in range(10)]},
    "zste": {"predictions": scores, "references": [[i % 6] for i in range(10)], "tasks": ["4A"] * 10},
    "mrv": {"predictions": rng.integers(0, 9, (10, 3))},
    "embedding_gap": {"predictions": unit(scores), "references": unit(other)},
    "clap_score": {"predictions": scores, "references": other},
}
result = {}
for name, inputs in columns.items():
    metric = evaluate.load(f"{folder}/{name}", num_process=2, process_id=rank, experiment_id="pair")
    metric.add_batch(**{column: rows[mine] for column, rows in inputs.items()})
    together = metric.compute(k=[1, 2])
    alone = evaluate.load(f"{folder}/{name}", experiment_id=f"alone{rank}").compute(**inputs, k=[1, 2])
    assert alone, name
    result[name] = together if rank else together == alone and sorted(alone)
print(json.dumps(result) + "\\n", end="")
"""


@pytest.mark.process
def test_two_processes_elsewhere_and_offline(tmp_path):
    """In new processes in another folder, rank 0 computes the scores of all rows."""
    paths = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(METRICS.parent)}
    environment = {**os.environ, **paths, "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", FORK + WORKER + JOIN, str(METRICS)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    main, other = sorted(map(json.loads, done.stdout.splitlines()), key=lambda scores: scores["mrv"] is None)
    assert main == {
        "recall": ["R@1", "R@2", "mAP@10", "mean_rank", "median_rank", "num_queries"],
        "zste": ["4A", "4A_chance", "4A_questions"],
        "mrv": ["MRV"],
        "embedding_gap": ["Dis", "Gap"],
        "clap_score": ["clap_score", "num_pairs"],
    }
    assert other == dict.fromkeys(main)
    assert (tmp_path / "home" / "modules" / "evaluate_modules").is_dir()


@pytest.mark.parametrize("name", CASES)
def test_a_metric_describes_itself(load_metric, name):
    metric = load_metric(name)
    assert metric.description.strip()
    assert "Args:" not in metric.description
    assert metric.inputs_description.startswith("Args:\n    predictions: ")
    assert metric.citation.startswith("@")
