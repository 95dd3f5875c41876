"""Zero-shot classification: class texts, ensembles, folds, and a model that recognises the classes."""

from pathlib import Path

import numpy as np
import pytest
from fake_models import ToneModel
from recordings import tone_rows
from sklearn.metrics import average_precision_score

from modeling_supclap.evaluation import EmbeddingCache, compare, evaluate
from modeling_supclap.evaluation.embed import embed_split
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.evaluation.options import EvaluationOptions, ZSTEOptions
from modeling_supclap.evaluation.report import render_report
from modeling_supclap.evaluation.zero_shot import class_means, class_texts, evaluate_zero_shot
from modeling_supclap.model_card.results import get_card_scores


def classify(split, **options):
    return evaluate_zero_shot(split, EvaluationOptions(**options))


@pytest.fixture
def split(tmp_path):
    """Split of eight tones in four classes, each with the embedding of its class."""
    return embed_split(load_embedding_model(ToneModel()), tone_rows(tmp_path))


def test_a_model_that_matches_the_classes_is_correct(split):
    scores, arrays, _ = classify(split, template_sets={"teminal": ["The sound of {}"], "own": ["{}", "I hear {}"]})
    assert scores["zero_shot"]["eng"].keys() == {"teminal", "own"}
    for metrics in scores["zero_shot"]["eng"].values():
        units = {"units": 8, "unit": "clips"}
        assert metrics["top1"] == {"value": 1.0, "low": None, "high": None, "chance": pytest.approx(0.25), **units}
        assert metrics["top5"]["chance"] == metrics["top5"]["value"] == metrics["mean_per_class"]["value"] == 1
        assert metrics["per_class"] == dict.fromkeys(["tone_0", "tone_1", "tone_2", "tone_3"], 1.0)
        assert "per_fold" not in metrics
    assert arrays["zero_shot/classes"].tolist() == ["tone_0", "tone_1", "tone_2", "tone_3"]
    assert np.array_equal(arrays["zero_shot/eng/own/confusion"], 2 * np.eye(4))


def test_wrong_answers_are_counted_by_class_and_fold(tmp_path, two_units_suffice):
    rows = tone_rows(tmp_path)
    rows[5]["labels"] = ["tone_2"]  # its audio is tone_1
    split = embed_split(load_embedding_model(ToneModel()), rows)
    folds = {row["clip_id"]: 1 + (index >= 5) for index, row in enumerate(rows)}
    scores, arrays, _ = classify(split, folds=folds)
    metrics = scores["zero_shot"]["eng"]["supclap"]
    assert metrics["top1"]["value"] == 7 / 8
    assert 0 < metrics["top1"]["low"] < 7 / 8 < metrics["top1"]["high"] <= 1
    assert metrics["per_class"] == {"tone_0": 1.0, "tone_1": 1.0, "tone_2": pytest.approx(2 / 3), "tone_3": 1.0}
    assert metrics["mean_per_class"]["value"] == pytest.approx((3 + 2 / 3) / 4)
    assert metrics["per_fold"] == {"1": 1.0, "2": pytest.approx(2 / 3)}
    assert metrics["mean_over_folds"]["value"] == pytest.approx(5 / 6)
    assert arrays["zero_shot/eng/supclap/predicted"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert arrays["zero_shot/eng/supclap/confusion"][2].tolist() == [0, 1, 2, 0]
    assert arrays["zero_shot/eng/supclap/top1"].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_more_classes_than_the_split_has(split):
    classes = ["tone_3", "tone_0", "tone_1", "tone_2", "tone_7", "tone_6"]
    scores, _, protocol = classify(split, classes=classes)
    metrics = scores["zero_shot"]["eng"]["supclap"]
    assert protocol["zero_shot"]["classes"] == classes
    # tone_7 is a tone of class tone_3, so that one of its two clips has a tie, which is wrong.
    assert (metrics["top1"]["chance"], metrics["top5"]["chance"]) == pytest.approx((1 / 6, 5 / 6))
    assert metrics["mean_per_class"]["chance"] == metrics["top1"]["chance"]
    assert set(metrics["per_class"]) == set(classes[:4])


def test_classes_of_unreadable_clips_are_candidates(tmp_path):
    """Without them, the others would be easier."""
    rows = tone_rows(tmp_path)
    for row in rows:
        if row["labels"] == ["tone_3"]:
            Path(row["audio_path"]).write_bytes(b"junk")
    results = evaluate(ToneModel(), rows, tasks=["zero_shot"], on_bad_audio="skip")
    assert (len(results.protocol["missing_clips"]), results.protocol["classes"]) == (2, 4)
    metrics = results.scores["zero_shot"]["eng"]["supclap"]
    assert metrics["top1"]["chance"] == pytest.approx(1 / 4)
    assert (metrics["num_clips"], set(metrics["per_class"])) == (6, {"tone_0", "tone_1", "tone_2"})
    zste = {"zste": ZSTEOptions(num_items=6, num_candidates=4, tasks=("1A",))}
    scores = evaluate(ToneModel(), rows, tasks=["zste"], on_bad_audio="skip", **zste).scores
    assert scores["zste"]["eng"]["1A"]["chance"] == pytest.approx(1 / 4)


def test_a_constant_model_is_always_wrong(tmp_path):
    class Constant(ToneModel):
        def encode_text(self, texts, language):
            return np.full((len(texts), 41), 41**-0.5)

    split = embed_split(load_embedding_model(Constant()), tone_rows(tmp_path))
    scores, arrays, _ = classify(split)
    assert scores["zero_shot"]["eng"]["supclap"]["top1"]["value"] == 0
    assert np.trace(arrays["zero_shot/eng/supclap/confusion"]) == 0


def test_class_texts():
    assert class_texts(["dog", "sea_waves"], ["a {}", "{}!"]) == [["a dog", "dog!"], ["a sea waves", "sea waves!"]]
    assert class_texts(["dog"], ["{} in the {place}", "{0} {}: 100 %s", "}{}{"]) == [
        ["dog in the {place}", "{0} dog: 100 %s", "}dog{"]
    ]
    assert class_texts(["dog", "{}"], "a {}") == [["a dog"], ["a {}"]]
    phrases = {"dog": {"fra": "un chien qui aboie"}}
    (texts,) = class_texts(["dog"], ["{}"], "fra", phrases)
    assert texts[0] == "Un chien qui aboie"
    assert all("chien" in text for text in texts)


@pytest.mark.parametrize(
    ("classes", "templates", "language", "message"),
    [
        (["x"], [], "eng", r"\{\}"),
        (["x"], ["a {}", "a sound"], "eng", r"every template needs a \{\}.*\['a \{\}', 'a sound'\]"),
        (["x", "x"], ["{}"], "eng", "'x'"),
        ("dog", ["{}"], "eng", "'dog'"),
        (["a b", "a_b"], ["{}"], "eng", "'a b'"),
        (["x", "y"], ["{}"], "fra", r"\['x', 'y'\].*'fra'"),
    ],
)
def test_class_texts_that_mean_nothing_are_refused(classes, templates, language, message):
    with pytest.raises(ValueError, match=message):
        class_texts(classes, templates, language)


def test_a_class_is_the_normalised_mean_of_its_prompts():
    embeds = np.array([[1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6]], dtype=np.float32)
    np.testing.assert_allclose(class_means(embeds, 2), [[0.5**0.5] * 2] * 2, atol=1e-7)


def test_each_clip_needs_a_label(tmp_path):
    rows = tone_rows(tmp_path)
    rows[3]["labels"] = []
    split = embed_split(load_embedding_model(ToneModel()), rows)
    with pytest.raises(ValueError, match="clip3"):
        classify(split)


class Random(ToneModel):
    """Model with random unit vectors; equal inputs have equal vectors."""

    def encode_audio(self, waveforms, sampling_rate):
        return self._unit([np.random.default_rng(int(1e6 * abs(w[:100]).sum())).normal(size=6) for w in waveforms])

    def encode_text(self, texts, language):
        return self._unit([np.random.default_rng(list(text.encode())).normal(size=6) for text in texts])


def multi_label_rows(folder, count=36):
    rng = np.random.default_rng(0)
    rows = tone_rows(folder, count)
    for row in rows:
        row["labels"] = [f"tone_{label}" for label in rng.permutation(4)[: rng.integers(1, 4)]]
    return rows


def test_several_labels_per_clip_are_scored_by_map(tmp_path, two_units_suffice):
    rows = multi_label_rows(tmp_path)
    split = embed_split(load_embedding_model(Random()), rows)
    classes = ["tone_3", "tone_0", "nowhere", "tone_1", "tone_2"]
    scores, arrays, _ = classify(split, classes=classes)
    metrics = scores["zero_shot"]["eng"]["supclap"]

    # scikit-learn, in float64, class by class; a class without clips has no average precision.
    expected = {}
    for name in classes[:2] + classes[3:]:
        text = split.texts([f"This is a sound of {name.replace('_', ' ')}"], "eng")[0]
        cosines = split.clips.mean.astype(np.float64) @ text.astype(np.float64)
        expected[name] = average_precision_score([name in row["labels"] for row in rows], cosines)
    assert metrics["per_class"] == pytest.approx(expected, abs=1e-9)
    assert metrics["mAP"]["value"] == pytest.approx(np.mean(list(expected.values())))
    assert metrics["mAP"]["low"] < metrics["mAP"]["value"] < metrics["mAP"]["high"]
    assert metrics["num_clips"] == 36
    assert arrays["zero_shot/eng/supclap/query_id"].tolist() == list(expected)
    assert "top1" not in metrics

    rng = np.random.default_rng(1)
    random = []
    for name in expected:
        truth = np.array([name in row["labels"] for row in rows])
        random.append(np.mean([average_precision_score(truth, rng.random(36)) for _ in range(300)]))
    assert metrics["mAP"]["chance"] == pytest.approx(np.mean(random), abs=0.01)


def test_classes_of_few_recordings_have_no_interval(tmp_path):
    """Many classes of three recordings do not make them more recordings."""
    rows = [{**row, "source": f"tape{index % 3}"} for index, row in enumerate(multi_label_rows(tmp_path))]
    first, second = (
        evaluate(model, rows, tasks=["zero_shot"], cache=EmbeddingCache(None)) for model in (ToneModel(), Random())
    )
    found = second.scores["zero_shot"]["eng"]["supclap"]["mAP"]
    assert (found["low"], found["units"], found["unit"]) == (None, 3, "recordings")
    (line,) = compare(first, second)
    assert (line["low"], line["units"], line["unit"]) == (None, 3, "recordings")


def test_two_results_with_several_labels_are_compared_by_class(tmp_path):
    rows = multi_label_rows(tmp_path)
    first, second = (
        evaluate(model, rows, tasks=["zero_shot"], cache=EmbeddingCache(None)) for model in (ToneModel(), Random())
    )
    (line,) = compare(first, second)
    assert (line["score"], line["queries"]) == ("zero_shot eng supclap mAP", 4)
    means = [results.scores["zero_shot"]["eng"]["supclap"]["mAP"]["value"] for results in (first, second)]
    assert (line["first"], line["second"]) == pytest.approx(means)


def test_several_labels_per_clip_in_the_report_and_on_the_card(tmp_path):
    results = evaluate(Random(), multi_label_rows(tmp_path), tasks=["zero_shot"], cache=EmbeddingCache(None))
    results.content["protocol"] |= {"dataset": "tones", "split": "test"}
    value = results.scores["zero_shot"]["eng"]["supclap"]["mAP"]["value"]
    page = render_report(results)
    assert "mean average precision" in page
    assert "Average precision per class" in page
    assert f"{100 * value:.1f}" in page
    (entry,) = get_card_scores(results.content)
    assert entry.metric == "mAP"
    assert entry.as_eval_result().metric_type != "accuracy"
    assert results.arrays["clips/label"][0] == ", ".join(multi_label_rows(tmp_path)[0]["labels"])


def test_a_label_outside_the_classes_is_an_error(split):
    with pytest.raises(ValueError, match="'tone_2', 'tone_3'"):
        classify(split, classes=["tone_0", "tone_1"])


def test_the_hash_of_the_prompts_follows_the_phrases_of_every_language(split):
    phrases = {f"tone_{number}": {"eng": f"a tone {number}", "fra": f"un ton, tone {number}"} for number in range(4)}
    other = {**phrases, "tone_3": {"eng": "a tone 3", "fra": "une note, tone 3"}}

    def name(phrases, templates):
        options = {"template_sets": {"label": templates}, "zero_shot_languages": ["eng", "fra"], "phrases": phrases}
        return classify(split, **options)[2]["zero_shot"]["prompts_hash"]

    assert name(phrases, ["{}"]) == name(dict(phrases), ["{}"])
    assert len({name(phrases, ["{}"]), name(other, ["{}"]), name(phrases, ["a {}"])}) == 3
