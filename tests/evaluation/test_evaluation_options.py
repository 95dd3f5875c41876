"""Options of an evaluation: values that mean nothing are refused before a model is loaded."""

import warnings

import pytest

from modeling_supclap.evaluation.options import EvaluationOptions, ZSTEOptions, find_templates


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["retrieve"]}, r"tasks.*\['retrieve'\]"),
        ({"tasks": []}, r"tasks.*\[\]"),
        ({"positives": "all"}, "positives"),
        ({"caption_handling": "some"}, "caption_handling.*'some'"),
        ({"languages": "eng"}, "languages.*'eng'"),
        ({"zste_languages": ["eng", "eng"]}, r"zste_languages is \['eng', 'eng'\]"),
        ({"zero_shot_languages": []}, r"zero_shot_languages is \[\]"),
        ({"on_bad_audio": "ignore"}, "on_bad_audio is 'ignore'; it must be one of error, skip"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"retrieval_metrics": "MRR"}, r"retrieval_metrics.*'MRR'.*such as \['MRR'\]"),
        ({"zste_languages": "eng"}, "zste_languages.*'eng'"),
        ({"zero_shot_languages": "eng"}, "zero_shot_languages.*'eng'"),
    ],
)
def test_options_that_mean_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EvaluationOptions(**change)


@pytest.mark.parametrize("tasks", [(), ("9Z",), ("1A", "3A_order")])
def test_unknown_tasks_of_zste_are_refused(tasks):
    with pytest.raises(ValueError, match=r"choose from 1A, 2A, 2B, 2C, 2D, 3A, 3B, 4A, 4B, 5A, 5B$"):
        ZSTEOptions(tasks=tasks)


def test_templates_are_sets_or_texts():
    found = find_templates(["a {}", "teminal", "{}, loud"], own="mine")
    assert found == {"mine": ["a {}", "{}, loud"], "teminal": ["The sound of {}"]}
    with pytest.raises(ValueError, match=r"'temina'; give a text with \{\}, or a set: supclap, teminal, "):
        find_templates(["temina"])


def test_languages_that_no_task_uses_are_named():
    with pytest.warns(
        UserWarning, match=r"languages has fra, deu, which only retrieval uses.*zero_shot_languages"
    ) as warned:
        EvaluationOptions(languages=["eng", "fra", "deu"], tasks=["zero_shot"])
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EvaluationOptions(languages=["eng"], tasks=["zero_shot"])
        EvaluationOptions(languages=["eng", "fra"], tasks=["zero_shot", "retrieval"])
