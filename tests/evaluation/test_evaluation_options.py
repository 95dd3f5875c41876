"""Options of an evaluation: values that mean nothing are refused before a model is loaded."""

import warnings

import pytest

from modeling_supclap.evaluation.options import EvaluationOptions, ZSTEOptions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["retrieve"]}, r"tasks.*\['retrieve'\]"),
        ({"tasks": []}, r"tasks.*\[\]"),
        ({"positives": "all"}, "positives"),
        ({"caption_handling": "some"}, "caption_handling.*'some'"),
        ({"languages": "eng"}, "languages.*'eng'"),
        ({"zste_languages": ["eng", "eng"]}, "zste_languages"),
    ],
)
def test_options_that_mean_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EvaluationOptions(**change)


@pytest.mark.parametrize("tasks", [(), ("9Z",)])
def test_unknown_tasks_of_zste_are_refused(tasks):
    with pytest.raises(ValueError, match="1A"):
        ZSTEOptions(tasks=tasks)


def test_languages_that_no_task_uses_are_named():
    with pytest.warns(UserWarning, match=r"languages has fra, which only retrieval uses"):
        EvaluationOptions(languages=["eng", "fra"], tasks=["zero_shot"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EvaluationOptions(languages=["eng"], tasks=["zero_shot"])
        EvaluationOptions(languages=["eng", "fra"], tasks=["zero_shot", "retrieval"])
