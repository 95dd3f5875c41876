"""Audio-to-audio retrieval, compared with sorting in a loop: several labels, shared recordings, chance and blocks."""

from math import comb

import numpy as np
import pytest

from modeling_supclap.evaluation import audio_to_audio
from modeling_supclap.evaluation.audio_to_audio import evaluate_audio_to_audio
from modeling_supclap.evaluation.embed import ClipEmbeddings, EmbeddedSplit
from modeling_supclap.evaluation.options import EvaluationOptions
from modeling_supclap.evaluation.results import Intervals
from modeling_supclap.model_card.results import get_card_scores


def embedded(count=50, seed=0):
    """Return a split with one or two labels per clip, some clips of two chunks, and some recordings of two clips."""
    rng = np.random.default_rng(seed)
    counts = 1 + (np.arange(count) % 3 == 0)
    embeds = rng.normal(size=(counts.sum(), 8))
    embeds = (embeds / np.linalg.norm(embeds, axis=1, keepdims=True)).astype(np.float32)
    rows = []
    for number in range(count):
        labels = [f"label{label}" for label in rng.permutation(6)[: rng.integers(1, 3)]]
        rows.append({"clip_id": f"clip{number}", "labels": labels, "source": f"recording{number * 2 // 3}"})
    if count > 7:
        rows[7]["labels"] = ["alone"]
    return EmbeddedSplit(rows, ClipEmbeddings(embeds, counts))


def naive(split):
    """Compute the outcomes of all queries that have a correct candidate, in float64."""
    found = {}
    for number, query in enumerate(split.rows):
        ranked = []
        for other, row in enumerate(split.rows):
            if row["source"] != query["source"]:
                cosine = split.clips.mean[number].astype(np.float64) @ split.clips.mean[other].astype(np.float64)
                ranked.append((-cosine, bool(set(row["labels"]) & set(query["labels"]))))
        hits = [is_correct for _, is_correct in sorted(ranked)]
        if any(hits):
            precision = sum(sum(hits[: rank + 1]) / (rank + 1) for rank in range(10) if hits[rank]) / sum(hits)
            found[query["clip_id"]] = [*(float(any(hits[:k])) for k in (1, 5, 10)), precision, hits]
    return found


@pytest.mark.parametrize("block", [7, 1024])
def test_scores_are_those_of_a_sort(monkeypatch, block):
    monkeypatch.setattr(audio_to_audio, "TILE_QUERIES", block)
    split = embedded()
    scores, arrays, _ = evaluate_audio_to_audio(split, EvaluationOptions(intervals=Intervals(100)))
    expected = naive(split)
    found = scores["audio_to_audio"]["shared_label"]
    assert arrays["audio_to_audio/shared_label/query_id"].tolist() == list(expected)
    assert found["num_queries"] == len(expected) == 49
    queried = [number for number, row in enumerate(split.rows) if row["clip_id"] in expected]
    for column, name in enumerate(["R@1", "R@5", "R@10", "mAP@10"]):
        values = [outcome[column] for outcome in expected.values()]
        np.testing.assert_allclose(arrays[f"audio_to_audio/shared_label/{name}"], values, atol=1e-12)
        assert found[name]["value"] == pytest.approx(np.mean(values))
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]

    # Chance: the first k of a shuffled list.
    for k in (1, 5, 10):
        levels = [1 - comb(len(hits) - sum(hits), k) / comb(len(hits), k) for *_, hits in expected.values()]
        assert found[f"R@{k}"]["chance"] == pytest.approx(np.mean(levels))
    levels = []
    for *_, hits in expected.values():
        n, m = len(hits), sum(hits)
        levels.append(sum((1 + (rank - 1) * (m - 1) / (n - 1)) / rank for rank in range(1, 11)) / n)
    assert found["mAP@10"]["chance"] == pytest.approx(np.mean(levels))
    assert (found["R@1"]["units"], found["R@1"]["unit"]) == (len(set(split.sources[queried])), "recordings")
    assert arrays["audio_to_audio/shared_label/cluster"].tolist() == split.sources[queried].tolist()


def test_recordings_without_a_common_label_are_an_error():
    split = embedded(3)
    for number, row in enumerate(split.rows):
        row["labels"] = [f"label{number}"]
    with pytest.raises(ValueError, match=r"\b3 clips"):
        evaluate_audio_to_audio(split, EvaluationOptions())


def test_the_card_lists_it_as_retrieval():
    scores, _, _ = evaluate_audio_to_audio(embedded(), EvaluationOptions(intervals=Intervals(0)))
    content = {"schema": "supclap-results/2", "protocol": {"dataset": "tones", "split": "test"}, "scores": scores}
    found = get_card_scores(content)
    assert [each.metric for each in found] == ["R@1", "R@5", "R@10", "mAP@10"]
    assert (found[0].task, found[0].language) == ("audio to audio, shared label", "")
    assert found[0].as_eval_result().task_type == "audio-retrieval"
