"""Results of three kinds of file as one list, and as the Hub's model index."""

import pytest
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from modeling_supclap.model_card.results import Score, scores_of, table_of


def metrics(start):
    return {"R@1": start, "R@5": start + 0.1, "R@10": start + 0.2, "mAP@10": start + 0.3, "median_rank": 3.0}


TRAINING = {
    "test": {
        "clips": 8,
        "retrieval": {
            language: {
                "t2a": metrics(start),
                "a2t": metrics(start + 0.01),
                "t2a_chance": metrics(0.0),
                "a2t_chance": metrics(0.05),
            }
            for language, start in (("eng", 0.5), ("fra", 0.4))
        },
        "zero_shot": {"top1": 0.625, "top5": 1.0, "chance": 0.1},
    },
    "arguments": {"dataset": "esc50"},
}
POST_TRAINING = {
    "scores": {"before": {"temporal_accuracy": 0.3}, "stage_a": {"temporal_accuracy": 0.5}, "stage_b": {"other": 1}}
}


def interval(value, low=None, high=None, chance=None):
    return {"value": value, "low": low, "high": high, "chance": chance}


RECEIPT = {
    "schema": "supclap-evaluation/1",
    "protocol": {"dataset": "clotho", "split": "evaluation", "intervals": {"confidence": 0.9}},
    "scores": {
        "retrieval": {"eng": {"t2a": {"R@1": interval(0.2, 0.15, 0.25, 0.001), "num_queries": 9}, "a2t": {}}},
        "zero_shot": {"eng": {"plain": {"top1": interval(0.6, 0.5, 0.7, 0.1), "per_class": {"dog": 0.5}}}},
        "zste": {"eng": {"3A": interval(0.55, None, None, 0.5)}, "MRV": {"3A": interval(1.0)}},
        "multilingual": {"MRV": interval(2.0)},
    },
}


def test_of_the_training_recipe():
    scores = scores_of(TRAINING)
    assert len(scores) == 2 * 2 * 4 + 1
    assert scores[0] == Score("text to audio", "R@1", 0.5, "esc50", "test", "eng", chance=0.0)
    assert scores[4] == Score("audio to text", "R@1", 0.51, "esc50", "test", "eng", chance=0.05)
    assert scores[-1] == Score("zero-shot", "top1", 0.625, "esc50", "test", "eng", chance=0.1)


def test_of_the_post_training_recipe():
    assert scores_of(POST_TRAINING, ["esc50"]) == [
        Score("order of sounds, before", "accuracy", 0.3, "esc50", "held out"),
        Score("order of sounds, stage a", "accuracy", 0.5, "esc50", "held out"),
    ]


def test_of_an_evaluation_receipt():
    shared = {"dataset": "clotho", "split": "evaluation", "language": "eng"}
    assert scores_of(RECEIPT) == [
        Score("text to audio", "R@1", 0.2, **shared, interval=(0.15, 0.25), confidence=0.9, chance=0.001),
        Score("zero-shot, plain", "top1", 0.6, **shared, interval=(0.5, 0.7), confidence=0.9, chance=0.1),
        Score("ZSTE 3A", "accuracy", 0.55, **shared, chance=0.5),
    ]


@pytest.mark.parametrize("results", [{}, {"test": {}}, {"test": {"retrieval": {"eng": {}}}}, {"scores": {}}])
def test_nothing_of_nothing(results):
    assert scores_of(results) == []


def test_tables_have_a_cell_for_every_number():
    table = table_of([*scores_of(TRAINING), *scores_of(RECEIPT)])
    assert table.startswith("In percent; [intervals of 90 %], (chance).\n\n| data | task | language | R@1 | R@5 |")
    assert "| esc50, test | audio to text | fra | 41.0 (5.0) | 51.0 (15.0) | 61.0 (25.0) | 71.0 (35.0) |" in table
    assert "| clotho, evaluation | text to audio | eng | 20.0 [15.0, 25.0] (0.1) |  |  |  |" in table
    assert "| clotho, evaluation | zero-shot, plain | eng | 60.0 [50.0, 70.0] (10.0) |" in table
    assert "| clotho, evaluation | ZSTE 3A | eng | 55.0 (50.0) |" in table


def test_the_model_index_keeps_directions_languages_and_intervals_apart():
    scores = [*scores_of(TRAINING), *scores_of(RECEIPT), *scores_of(POST_TRAINING)]
    data = ModelCardData(model_name="tiny", eval_results=[score.as_eval_result() for score in scores])
    _, found = model_index_to_eval_results(data.to_dict()["model-index"])
    keys = {(r.dataset_name, r.dataset_config, r.dataset_split, r.metric_type, r.metric_name) for r in found}
    assert len(keys) == len(found) == len(scores)
    (recall,) = [r for r in found if r.dataset_name == "clotho" and r.metric_type == "text_to_audio_r_at_1"]
    assert (recall.metric_value, recall.metric_args) == (0.2, {"interval": [0.15, 0.25], "confidence": 0.9})
    accuracies = [r for r in found if r.task_type == "zero-shot-audio-classification"]
    assert [(r.metric_type, r.metric_value) for r in accuracies] == [("accuracy", 0.625), ("accuracy", 0.6)]


def test_a_training_run_has_intervals_too():
    test = {
        "intervals": {"confidence": 0.95},
        "retrieval": {"eng": {"t2a": {"R@1": 0.5}, "t2a_chance": {"R@1": 0.1}, "t2a_interval": {"R@1": [0.4, 0.6]}}},
    }
    assert "50.0 [40.0, 60.0] (10.0)" in table_of(scores_of({"test": test}))
