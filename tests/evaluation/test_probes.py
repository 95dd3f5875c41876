"""Linear and few-shot probes, compared with plain logistic regression; their training clips and samples."""

import itertools
import sys

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp
from sklearn.metrics import average_precision_score

from modeling_supclap.evaluation import probes
from modeling_supclap.evaluation.embed import ClipEmbeddings, EmbeddedSplit, hash_dataset
from modeling_supclap.evaluation.options import EvaluationOptions
from modeling_supclap.evaluation.results import Intervals
from modeling_supclap.metrics.bootstrap import seed_interval

CLASSES = ["bell", "dog", "rain"]


def embedded(count, seed, several=False, sources=None, noise=0.7):
    """Return a split with unit embeddings around class centres; each clip has its own recording."""
    rng = np.random.default_rng(seed)
    means, embeds, rows = np.eye(4)[:3], [], []
    for number in range(count):
        chosen = rng.permutation(3)[: rng.integers(1, 3)] if several else [number % 3]
        embeds.append(means[chosen].sum(axis=0) + noise * rng.normal(size=4))
        clip_id = f"{seed}-{number}"
        source = clip_id if sources is None else sources[number]
        rows.append({"clip_id": clip_id, "labels": [CLASSES[label] for label in chosen], "source": source})
    embeds = np.array(embeds) / np.linalg.norm(embeds, axis=1, keepdims=True)
    clips = ClipEmbeddings(embeds.astype(np.float32), np.ones(count, np.int64))
    return EmbeddedSplit(rows, clips, files={row["clip_id"]: "hash" for row in rows})


def labels_of(split):
    return np.array([[label in row["labels"] for label in CLASSES] for row in split.rows])


def regress(embeds, truth, strength):
    """Minimise |W|^2 / 2 + C sum of -log p(class), with free biases, in float64; return the function to logits."""
    embeds, targets = embeds.astype(np.float64), truth.argmax(axis=1)

    def loss(flat):
        weights = flat.reshape(5, -1)
        logits = embeds @ weights[:4] + weights[4]
        errors = logsumexp(logits, axis=1) - logits[np.arange(len(targets)), targets]
        return 0.5 * (weights[:4] ** 2).sum() + strength * errors.sum()

    best = minimize(loss, np.zeros(5 * truth.shape[1]), tol=1e-10).x.reshape(5, -1)
    return lambda tested: tested @ best[:4] + best[4]


def test_the_linear_probe_is_logistic_regression_on_all_training_clips(monkeypatch):
    monkeypatch.setattr(probes, "STRENGTHS", (2.0,))
    split, train = embedded(30, 0), embedded(45, 1)
    split.train = train
    scores, arrays, settings = probes.evaluate_linear_probe(split, EvaluationOptions(intervals=Intervals(50)))
    metrics = scores["linear_probe"]["logistic_regression"]
    logits = regress(train.clips.embeds, labels_of(train), 2.0)(split.clips.embeds.astype(np.float64))
    assert arrays["linear_probe/logistic_regression/predicted"].tolist() == logits.argmax(axis=1).tolist()
    expected = (logits.argmax(axis=1) == labels_of(split).argmax(axis=1)).mean()
    assert 1 / 3 < expected < 1
    assert metrics["top1"]["value"] == pytest.approx(expected)
    assert metrics["top1"]["low"] <= expected <= metrics["top1"]["high"]
    assert metrics["top1"]["chance"] == pytest.approx(1 / 3)
    train_hash = hash_dataset(train.rows, train.files)
    assert settings == {"linear_probe": {"strengths": [2.0], "held_out": 0.2, "train_hash": train_hash}}


def test_several_labels_train_one_classifier_per_class(monkeypatch):
    monkeypatch.setattr(probes, "STRENGTHS", (3.0,))
    split, train = embedded(40, 0, several=True), embedded(40, 1, several=True)
    split.train = train
    metrics = probes.evaluate_linear_probe(split, EvaluationOptions())[0]["linear_probe"]["logistic_regression"]
    for column, name in enumerate(CLASSES):
        truth = labels_of(train)[:, column]
        margins = binary(train.clips.embeds, truth, 3.0)(split.clips.embeds.astype(np.float64))
        expected = average_precision_score(labels_of(split)[:, column], margins)
        assert metrics["per_class"][name] == pytest.approx(expected, abs=1e-6)


def binary(embeds, truth, strength):
    """Minimise the loss of one class against the rest; return zeros for a class of all clips."""
    if truth.all():
        return lambda tested: np.zeros(len(tested))
    embeds, signs = embeds.astype(np.float64), np.where(truth, 1.0, -1.0)

    def loss(weights):
        margins = signs * (embeds @ weights[:4] + weights[4])
        return 0.5 * (weights[:4] ** 2).sum() + strength * np.log1p(np.exp(-margins)).sum()

    best = minimize(loss, np.zeros(5), tol=1e-10).x
    return lambda tested: tested @ best[:4] + best[4]


def test_the_strength_is_the_best_on_held_out_recordings():
    # Each of 20 recordings has three clips.
    train = embedded(60, 1, sources=[f"recording{number // 3}" for number in range(60)])
    split = embedded(30, 0)
    split.train = train
    options = EvaluationOptions(intervals=Intervals(seed=3))
    truth, _, (part,), _ = probes.prepare_parts(split, options)
    for seed, is_same in ((3, True), (4, False)):
        _, _, (again,), _ = probes.prepare_parts(split, EvaluationOptions(intervals=Intervals(seed=seed)))
        assert np.array_equal(again.held, part.held) == is_same
    fitted, held = (set(train.sources[clips].tolist()) for clips in (part.fitted, part.held))
    assert len(held) == 4
    assert len(fitted) == 16
    assert not fitted & held

    labels, embeds, precisions = labels_of(train), train.clips.embeds.astype(np.float64), []
    for strength in probes.STRENGTHS:
        logits = regress(embeds[part.fitted], labels[part.fitted], strength)(embeds[part.held])
        shares = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
        precisions.append(np.mean(list(map(average_precision_score, labels[part.held].T, shares.T))))
    metrics = probes.evaluate_linear_probe(split, options)[0]["linear_probe"]["logistic_regression"]
    assert metrics["C"] == [probes.STRENGTHS[int(np.argmax(precisions))]]
    assert len(truth) == 30


def test_each_fold_is_classified_by_the_others(monkeypatch):
    monkeypatch.setattr(probes, "STRENGTHS", (2.0,))
    # Recording 15 has clips in both folds; they are excluded from training.
    split = embedded(60, 0, sources=[f"recording{number % 20}" for number in range(60)])
    folds = {row["clip_id"]: int(number % 20 < 8 or number == 15) for number, row in enumerate(split.rows)}
    options = EvaluationOptions(folds=folds)
    scores, arrays, settings = probes.evaluate_linear_probe(split, options)
    fold_of = np.array(list(folds.values()))
    expected = np.zeros(60, int)
    for fold in (0, 1):
        sources = set(split.sources[fold_of == fold].tolist())
        train = np.array([number for number in range(60) if split.sources[number] not in sources])
        assert 0 < len(train) < (fold_of != fold).sum()
        logits = regress(split.clips.embeds[train], labels_of(split)[train], 2.0)(
            split.clips.embeds.astype(np.float64)
        )
        expected[fold_of == fold] = logits.argmax(axis=1)[fold_of == fold]
    assert arrays["linear_probe/logistic_regression/predicted"].tolist() == expected.tolist()
    assert scores["linear_probe"]["logistic_regression"]["per_fold"].keys() == {"0", "1"}
    assert len(scores["linear_probe"]["logistic_regression"]["C"]) == 2
    assert settings["linear_probe"]["train_hash"] is None


@pytest.mark.parametrize("several", [False, True])
def test_few_shot_scores_are_means_over_draws(several, monkeypatch):
    monkeypatch.setattr(probes, "STRENGTHS", (10.0,))
    split = embedded(40, 0, several)
    split.train = embedded(60, 1, several)
    options = EvaluationOptions(shots=(1, 5), intervals=Intervals(100, 0.8, seed=1))
    scores, arrays, settings = probes.evaluate_few_shot(split, options)
    assert scores["few_shot"].keys() == {"1_per_class", "5_per_class"}
    metric = "mAP" if several else "top1"
    linear = probes.evaluate_linear_probe(split, options)[0]["linear_probe"]["logistic_regression"]

    truth, classes, (part,), _ = probes.prepare_parts(split, options)
    for shots in (1, 5):
        values = []
        for repeat in range(probes.REPEATS):
            rng, fitted = np.random.default_rng((1, shots, repeat)), labels_of(split.train)[part.fitted]
            drawn = probes.draw_shots(fitted, classes, shots, rng)
            embeds, labels = split.train.clips.embeds[part.fitted][drawn], fitted[drawn]
            tested = split.clips.embeds.astype(np.float64)
            if several:
                columns = [binary(embeds, labels[:, column], 10.0)(tested) for column in range(3)]
                values.append(np.mean(list(map(average_precision_score, truth.T, columns))))
            else:
                logits = regress(embeds, labels, 10.0)(tested)
                values.append((logits.argmax(axis=1) == truth.argmax(axis=1)).mean())
        found = scores["few_shot"][f"{shots}_per_class"][metric]
        assert found["chance"] == linear[metric]["chance"]
        assert scores["few_shot"][f"{shots}_per_class"]["num_clips"] == 40
        # scikit-learn stops at a gradient of 1e-4, so that the order of clips with nearly equal scores may change.
        assert found["value"] == pytest.approx(np.mean(values), abs=1e-3 if several else 1e-9)
        assert np.std(values) > 0
        key = f"few_shot/{shots}_per_class"
        assert arrays[f"{key}/query_id"].tolist() == (CLASSES if several else split.ids.tolist())
        unit = "classes" if several else "clips"
        of_clips = options.intervals.draw({"mean": arrays[f"{key}/{metric}"]}, arrays[f"{key}/cluster"], unit)["mean"]
        assert (found["units"], found["unit"]) == of_clips[2:] == ((3, "classes") if several else (40, "clips"))
        if several:  # three classes have no interval, not even over the draws
            assert (found["low"], found["high"]) == of_clips[:2] == (None, None)
            continue
        expected = np.clip(seed_interval(values, of_clips[:2], 0.8), 0, 1)
        assert (found["low"], found["high"]) == pytest.approx(tuple(expected), abs=1e-9)
        assert expected[1] - expected[0] > 1.05 * (of_clips[1] - of_clips[0])  # the draws differ, too
        assert arrays[f"few_shot/{shots}_per_class/{metric}"].mean() == pytest.approx(found["value"])
    used = {"strengths": [10.0], "held_out": probes.HELD_OUT, "shots": [1, 5], "repeats": probes.REPEATS}
    assert settings["few_shot"] == {**used, "train_hash": settings["few_shot"]["train_hash"]}
    assert settings["few_shot"]["train_hash"]


def test_an_interval_over_draws_is_a_share(monkeypatch):
    """Without the limit, it would end above 1."""
    split, free = embedded(40, 0, noise=0.3), []
    split.train = embedded(60, 1, noise=0.3)
    summarize = probes.summarize

    def summarize_and_keep(values, ends, confidence, is_share):
        free.append(summarize(values, ends, confidence).high)
        return summarize(values, ends, confidence, is_share)

    monkeypatch.setattr(probes, "summarize", summarize_and_keep)
    scores, _, _ = probes.evaluate_few_shot(split, EvaluationOptions(shots=(1,), intervals=Intervals(100)))
    assert max(free) > 1
    assert (
        max(fields["high"] for fields in scores["few_shot"]["1_per_class"].values() if isinstance(fields, dict)) == 1
    )


def test_a_draw_has_as_many_clips_of_each_class_and_others_each_time():
    truth = labels_of(embedded(30, 0))
    draws = [probes.draw_shots(truth, CLASSES, 4, np.random.default_rng(seed)).tolist() for seed in range(5)]
    for drawn in draws:
        assert truth[drawn].sum(axis=0).tolist() == [4, 4, 4]
    assert len(set(map(tuple, draws))) == 5
    with pytest.warns(UserWarning, match=r"'bell'.*10.*11") as warned:
        assert len(probes.draw_shots(truth, CLASSES, 11, np.random.default_rng(0))) == 30
    assert warned[0].filename == __file__


def test_a_clip_is_drawn_once_and_a_class_without_clips_not_at_all(recwarn):
    truth = np.pad(labels_of(embedded(30, 0, several=True)), [(0, 0), (1, 0)])  # no clip has the first class
    least = int(truth.sum(axis=0)[1:].min())
    drawn = probes.draw_shots(truth, ["cat", *CLASSES], least, np.random.default_rng(0)).tolist()
    assert drawn == sorted(set(drawn))
    assert (truth[drawn].sum(axis=0)[1:] >= least).all()
    assert not recwarn.list


def test_probes_without_training_clips_are_an_error():
    split = embedded(12, 0)
    with pytest.raises(ValueError, match=r"train_rows.*--train_split"):
        probes.evaluate_linear_probe(split, EvaluationOptions())
    split.train = embedded(12, 0)  # the same recordings
    with pytest.raises(ValueError, match=r"\b0 training clips"):
        probes.evaluate_linear_probe(split, EvaluationOptions())
    split.train = embedded(9, 1, sources=["one"] * 9)
    with pytest.raises(ValueError, match="9 training clips come from other recordings than the 12 clips to classify"):
        probes.evaluate_linear_probe(split, EvaluationOptions())
    split.train = embedded(9, 1)
    for row in split.train.rows:
        row["labels"] = ["dog"]
    with pytest.raises(ValueError, match="two or more recordings and classes"):
        probes.evaluate_linear_probe(split, EvaluationOptions())


def test_scikit_learn_is_an_extra(monkeypatch):
    for name in itertools.chain([name for name in sys.modules if name.startswith("sklearn.")], ["sklearn"]):
        monkeypatch.setitem(sys.modules, name, None)
    split = embedded(12, 0)
    split.train = embedded(12, 1)
    with pytest.raises(ImportError, match=r"supclap\[report\]"):
        probes.evaluate_linear_probe(split, EvaluationOptions())
