"""Scores of a model card: tables and the model index of the Hub, from `results.json`."""

import pytest
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from modeling_supclap.evaluation.results import SCHEMA, Interval, Score, score
from modeling_supclap.model_card.results import CardScore, format_card_scores, get_card_scores


def metrics(start):
    shares = {name: score(start + step, None, 0.05) for name, step in (("R@1", 0), ("R@5", 0.1), ("R@10", 0.2))}
    return {**shares, "mAP@10": score(start + 0.3, None, 0.05), "mean_rank": score(3.0), "num_queries": 9}


def results(scores, **protocol):
    protocol = {"dataset": "clotho", "split": "evaluation", "intervals": {"confidence": 0.9}, **protocol}
    return {"schema": SCHEMA, "protocol": protocol, "scores": scores}


LANGUAGES = {
    language: {"t2a": metrics(start), "a2t": metrics(start + 0.01)} for language, start in (("eng", 0.5), ("fra", 0.4))
}
RETRIEVAL = results({"retrieval": LANGUAGES | {"mean": LANGUAGES["eng"]}}, dataset="esc50", split="test", classes=50)
OTHERS = results(
    {
        "retrieval": {"eng": {"t2a": {"R@1": score(0.2, (0.15, 0.25), 0.001)}, "a2t": {}}},
        "zero_shot": {"eng": {"plain": {"top1": score(0.6, (0.5, 0.7), 0.1), "per_class": {"dog": 0.5}}}},
        "zste": {"eng": {"3A": score(0.55, None, 1 / 3, 0.5)}, "all": {"3A": {"MRV": score(1.0)}}},
        "multilingual": {"all": {"MRV": score(2.0)}},
    }
)
ACCURACIES = {stage: {"temporal_accuracy": score(value)} for stage, value in (("before", 0.3), ("stage_a", 0.5))}
PROBES = results({"linear_probe": {"logistic_regression": {"top1": score(0.8)}}}, dataset="clotho")
STAGES = results({"temporal": {"eng": ACCURACIES}}, dataset="esc50", split="held out", classes=10)


def test_each_direction_and_language_once():
    found = get_card_scores(RETRIEVAL)
    assert len(found) == 2 * 2 * 4
    first = Score(("retrieval", "eng", "t2a", "R@1"), 0.5, None, None, 0.05)
    assert found[0] == CardScore("text to audio", "R@1", first, "esc50", "test", "eng")
    assert (found[4].task, found[4].score.value) == ("audio to text", pytest.approx(0.51))


def test_every_task():
    found = {(each.task, each.metric): each for each in get_card_scores(OTHERS)}
    assert found.keys() == {("text to audio", "R@1"), ("zero-shot, plain", "top1"), ("ZSTE 3A", "accuracy")}
    recall = found["text to audio", "R@1"]
    assert (recall.score.low, recall.score.high, recall.score.chance, recall.confidence) == (0.15, 0.25, 0.001, 0.9)
    assert found["ZSTE 3A", "accuracy"].confidence is None


def test_the_stages_of_a_post_training_on_a_part_of_the_classes():
    found = get_card_scores(STAGES)
    assert [each.task for each in found] == ["order of sounds, before", "order of sounds, stage a"]
    assert {(each.dataset, each.split) for each in found} == {("esc50, 10 of 50 classes", "held out")}
    result = found[0].as_eval_result()
    assert (result.dataset_name, result.dataset_type) == ("esc50, 10 of 50 classes", "esc50-10-of-50-classes")


@pytest.mark.parametrize("content", [{}, {"schema": "other"}, results({}), results({"retrieval": {"eng": {}}})])
def test_empty_results_have_no_scores(content):
    assert get_card_scores(content) == []


def test_tables_have_a_cell_for_every_number():
    table = format_card_scores([*get_card_scores(RETRIEVAL), *get_card_scores(OTHERS)])
    assert table.startswith("In percent, with intervals of 90 %.\n\n| data | task | language | R@1 | R@5 |")
    headings = [line for line in table.splitlines() if line.startswith("| data")]
    assert headings[1:] == ["| data | task | language | top1 |", "| data | task | language | accuracy |"]
    cells = " | ".join(f"{value}.0; chance 5.0" for value in (41, 51, 61, 71))
    assert f"| esc50, test | audio to text | fra | {cells} |" in table
    assert "| clotho, evaluation | text to audio | eng | 20.0 (15.0 to 25.0); chance 0.1 |  |  |  |" in table
    assert "| clotho, evaluation | zero-shot, plain | eng | 60.0 (50.0 to 70.0); chance 10.0 |" in table
    assert "| clotho, evaluation | ZSTE 3A | eng | 55.0; chance 33.3; order-blind 50.0 |" in table


def test_the_resampled_units_are_named():
    few = score(0.2, Interval(0.1, 0.3, 12, "recordings"), 0.001)
    none = score(0.6, Interval(None, None, 2, "recordings"), 0.1)
    content = {"retrieval": {"eng": {"t2a": {"R@1": few}}}, "zero_shot": {"eng": {"plain": {"top1": none}}}}
    recall, accuracy = get_card_scores(results(content))
    text = format_card_scores([recall, accuracy])
    assert "Resampled units: 12 recordings (few units); 2 recordings (fewer than 10: no interval)." in text
    assert recall.as_eval_result().metric_args == {"interval": [0.1, 0.3], "confidence": 0.9, "recordings": 12}
    assert accuracy.as_eval_result().metric_args is None


def test_the_model_index_keeps_directions_languages_and_intervals_apart():
    scores = [each for content in (RETRIEVAL, OTHERS, STAGES) for each in get_card_scores(content)]
    data = ModelCardData(model_name="tiny", eval_results=[each.as_eval_result() for each in scores])
    _, found = model_index_to_eval_results(data.to_dict()["model-index"])
    keys = {(r.dataset_name, r.dataset_config, r.dataset_split, r.metric_type, r.metric_name) for r in found}
    assert len(keys) == len(found) == len(scores)
    (recall,) = [r for r in found if r.dataset_name == "clotho" and r.metric_type == "text_to_audio_r_at_1"]
    assert (recall.metric_value, recall.metric_args) == (0.2, {"interval": [0.15, 0.25], "confidence": 0.9})
    assert (recall.task_type, recall.task_name) == ("audio-text-retrieval", "retrieval eng")
    assert (recall.dataset_type, recall.dataset_config, recall.dataset_split) == ("clotho", "eng", "evaluation")
    assert {r.task_name for r in found if r.task_type != recall.task_type} == {"zero-shot eng"}
    accuracies = {r.metric_type: r.metric_value for r in found if r.task_type == "zero-shot-audio-classification"}
    assert accuracies == {
        "accuracy": 0.6,
        "zste_3a_accuracy": 0.55,
        "order_of_sounds_before_temporal_accuracy": 0.3,
        "order_of_sounds_stage_a_temporal_accuracy": 0.5,
    }


def test_a_score_without_a_dataset_is_of_an_unknown_one():
    each = CardScore("text to audio", "R@1", Score(("retrieval", "eng", "t2a", "R@1"), 1 / 3, 0.12344, 0.98765))
    result = each.as_eval_result()
    assert (result.dataset_name, result.dataset_type, result.metric_value) == ("unknown", "unknown", 0.3333)
    assert (result.metric_args, result.dataset_split) == ({"interval": [0.1234, 0.9877], "confidence": None}, "test")
    assert "| test | text to audio |  | 33.3 (12.3 to 98.8) |" in format_card_scores([each])


def test_the_accuracy_of_a_probe_is_not_that_of_zero_shot_classification():
    """The Hub would show both as the accuracy of one task."""
    probe, zero_shot = (
        next(each.as_eval_result() for each in get_card_scores(content) if each.metric == "top1")
        for content in (PROBES, OTHERS)
    )
    assert (probe.task_type, zero_shot.task_type) == ("audio-classification", "zero-shot-audio-classification")
    assert (probe.task_name, probe.dataset_config) == ("linear probe, logistic regression", None)
    assert (probe.metric_type, zero_shot.metric_type) == ("linear_probe_logistic_regression_top1", "accuracy")
