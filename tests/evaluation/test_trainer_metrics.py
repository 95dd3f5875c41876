"""Scores of what the Trainer collects: small cases that one can check by eye."""

from types import SimpleNamespace

import numpy as np
import pytest

from modeling_supclap.evaluation import Intervals
from modeling_supclap.evaluation.trainer_metrics import (
    format_report,
    in_row_order,
    parallel_ranks,
    retrieval_metrics_of,
    retrieval_report,
    temporal_metrics,
)
from modeling_supclap.training.collator import IndexedRows

AXES = np.eye(4, dtype=np.float32)


def row(name, eng, fra=()):
    return {"clip_id": name, "captions": {"eng": list(eng), "fra": list(fra)}, "labels": [name]}


ROWS = [row("a", ["A", "a"], ["â"]), row("b", ["B"], ["b̂"]), row("c", ["C", "c"])]
OWN = [0, 0, 0, 1, 1, 2, 2]  # the clip of each caption, in the order eng eng fra | eng fra | eng eng


def embeddings(nearest):
    """Audio on three axes; caption k of a clip on the axis of clip `nearest[k]`. Padding points at clip 0."""
    text = np.zeros((3, 3, 4), dtype=np.float32)
    text[:, :, 0] = 1
    places = [(clip, place) for clip, count in ((0, 3), (1, 2), (2, 2)) for place in range(count)]
    for (clip, place), axis in zip(places, nearest, strict=True):
        text[clip, place] = AXES[axis]
    return AXES[:3], text


def report(nearest, language="eng", rows=ROWS, positives="clip"):
    return retrieval_report(*embeddings(nearest), rows, ["eng", "fra"], positives)[language]


def test_a_perfect_model():
    scores = report(OWN)
    assert {scores[way][name] for way in ("t2a", "a2t") for name in ("R@1", "R@5", "R@10", "mAP@10")} == {1.0}
    assert (scores["t2a"]["num_queries"], scores["a2t"]["num_queries"]) == (5, 3)


def test_one_wrong_caption_is_one_fifth_of_the_text_queries():
    scores = report([1, 0, 0, 1, 1, 2, 2])
    assert scores["t2a"]["R@1"] == pytest.approx(4 / 5)
    # Clip a still has its second caption first; clip b now ties its own caption with a's, and a tie counts against it.
    assert scores["a2t"]["R@1"] == pytest.approx(2 / 3)


def test_chance_is_that_of_the_candidates():
    scores = report(OWN)
    assert scores["t2a_chance"]["R@1"] == pytest.approx(1 / 3)
    assert scores["a2t_chance"]["R@1"] == pytest.approx((2 + 1 + 2) / 15)


def test_languages_are_apart_and_clips_without_one_are_left_out():
    french = report([0, 0, 1, 1, 0, 2, 2], "fra")
    assert french["t2a"] == {**french["t2a"], "R@1": 0.0, "num_queries": 2}
    assert french["t2a_chance"]["R@1"] == pytest.approx(1 / 2)


def test_equal_captions_are_one_query_with_several_answers():
    rows = [row("a", ["A"]), row("twin", ["A"]), row("b", ["B"])]
    audio, text = AXES[[0, 0, 1]], AXES[[0, 0, 1]][:, None]
    own = retrieval_report(audio, text, rows, ["eng"], "clip")["eng"]
    shared = retrieval_report(audio, text, rows, ["eng"], "captions")["eng"]
    assert (own["t2a"]["num_queries"], shared["t2a"]["num_queries"]) == (3, 2)
    assert own["t2a"]["R@1"] == pytest.approx(1 / 3)
    assert shared["t2a"]["R@1"] == shared["t2a"]["mAP@10"] == 1.0


def test_intervals_draw_whole_recordings():
    nearest = [1, 0, 0, 1, 1, 2, 2]
    rows = [{**ROWS[0], "source": "one"}, {**ROWS[1], "source": "two"}, {**ROWS[2], "source": "one"}]
    intervals = Intervals(num_resamples=400)
    drawn = retrieval_report(*embeddings(nearest), rows, ["eng", "fra"], "clip", intervals)["eng"]
    outcomes = np.array([0.0, 1, 1, 1, 1])  # of the five captions; four are of source one
    expected = intervals.of({"R@1": outcomes}, ["one", "one", "two", "one", "one"])["R@1"]
    assert drawn["t2a_interval"]["R@1"] == expected
    assert expected[0] == pytest.approx(3 / 4)  # source one drawn twice
    assert drawn["a2t_interval"].keys() == {"R@1", "R@5", "R@10", "mAP@10"}
    assert "t2a_interval" not in report(nearest)


def test_a_language_that_nobody_speaks_is_an_error():
    with pytest.raises(ValueError, match="no clip of this split has a caption in 'jpn'"):
        retrieval_report(*embeddings(OWN), ROWS, ["eng", "fra", "jpn"], "clip")


def test_processes_may_see_the_split_in_any_order():
    audio, text = embeddings(OWN)
    order = np.array([2, 0, 1])
    prediction = SimpleNamespace(predictions=(audio[order], text[order]), label_ids=order)
    metrics = retrieval_metrics_of(IndexedRows(ROWS), ["eng", "fra"], "clip")(prediction)
    assert metrics["mean_recall"] == 1.0
    assert metrics["fra_a2t_R@1"] == 1.0


@pytest.mark.parametrize("indices", [[0, 1, 1], [0, 1, 3]])
def test_a_missing_or_repeated_clip_is_an_error(indices):
    with pytest.raises(ValueError, match="expected each of 3 clips once"):
        in_row_order(SimpleNamespace(predictions=embeddings(OWN), label_ids=np.array(indices)))


def test_the_table_shows_every_direction_with_its_chance():
    table = format_report({"eng": report([1, 0, 0, 1, 1, 2, 2])}).splitlines()
    assert table[0].split() == ["language", "direction", "R@1", "R@5", "R@10", "mAP@10"]
    assert table[1].split()[:5] == ["eng", "text", "to", "audio", "80.0"]
    assert table[2].split()[:3] == ["eng", "chance", "33.3"]
    assert len(table) == 5


def test_mrv_compares_the_ranks_of_translations():
    ranks = parallel_ranks(*embeddings([0, 0, 1, 1, 1, 2, 2]), ROWS, ["eng", "fra"], "clip")
    assert ranks.tolist() == [[0, 2], [0, 0]]  # clip a's French caption points at clip b, and a tie with clip c counts
    prediction = SimpleNamespace(predictions=embeddings([0, 0, 1, 1, 1, 2, 2]), label_ids=np.arange(3))
    assert retrieval_metrics_of(IndexedRows(ROWS), ["eng", "fra"], "clip")(prediction)["MRV"] == pytest.approx(0.5)


@pytest.mark.parametrize(("roles", "names"), [(2, ("single", "combined")), (3, ("forward", "reversed", "overlaid"))])
def test_temporal_accuracy_counts_ties_as_wrong(roles, names):
    audio = np.tile(np.eye(roles, dtype=np.float32), (2, 1, 1))
    text = audio.copy()
    text[1, 0] = text[1, 1]  # the second pair says the same of its first two items
    scores = temporal_metrics(SimpleNamespace(predictions=(audio, text), label_ids=np.arange(2)))
    expected = {name: 0.5 if place < 2 else 1.0 for place, name in enumerate(names)}
    assert {name: scores[f"{name}_accuracy"] for name in names} == expected
    assert scores["temporal_accuracy"] == pytest.approx(np.mean(list(expected.values())))
