"""From embeddings to scores: small cases that one can check by eye, and files that are whole or not there."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from modeling_supclap.collator import IndexedRows
from modeling_supclap.evaluation import (
    format_report,
    in_row_order,
    retrieval_metrics_of,
    retrieval_report,
    retrieval_set,
    write_results,
    zero_shot_report,
)

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


def test_a_language_that_nobody_speaks_is_an_error():
    with pytest.raises(ValueError, match="no clip of this split has a caption in 'jpn'"):
        retrieval_set(*embeddings(OWN), ROWS, "jpn", languages=["eng", "fra", "jpn"], positives="clip")


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


class _LetterModel:
    """Embeds a text on the axis of its class letter, with some of the next axis in every second template."""

    device = "cpu"

    def eval(self):
        return self

    def get_text_features(self, axes, shifted):
        import torch

        vectors = torch.eye(4)[axes] + 0.5 * shifted[:, None] * torch.eye(4)[(axes + 1) % 4]
        return SimpleNamespace(pooler_output=torch.nn.functional.normalize(vectors, dim=-1))


def _letter_processor(text, language, return_tensors):
    import torch
    from transformers import BatchFeature

    axes = ["xyzw".index(prompt.removeprefix("no ")[0]) for prompt in text]
    return BatchFeature({"axes": torch.tensor(axes), "shifted": torch.tensor([p.startswith("no ") for p in text])})


def test_zero_shot():
    audio = AXES[[0, 1, 2, 2]]
    scores = zero_shot_report(_LetterModel(), _letter_processor, audio, ["x", "y", "z_b", "y"], ["{}", "no {}"])
    assert scores["classes"] == ["x", "y", "z_b"]
    assert scores["top1"] == 0.75
    assert scores["chance"] == pytest.approx(1 / 3)
    assert scores["per_class"] == {"x": 1.0, "y": 0.5, "z_b": 1.0}
    assert scores["confusion"] == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("templates", [[], ["a sound"]])
def test_templates_need_a_place_for_the_label(templates):
    with pytest.raises(ValueError, match=r"every template needs a \{\} for the label"):
        zero_shot_report(_LetterModel(), _letter_processor, AXES, ["x"] * 4, templates)


def test_the_table_shows_every_direction_with_its_chance():
    table = format_report({"eng": report([1, 0, 0, 1, 1, 2, 2])}).splitlines()
    assert table[0].split() == ["language", "direction", "R@1", "R@5", "R@10", "mAP@10"]
    assert table[1].split()[:5] == ["eng", "text", "to", "audio", "80.0"]
    assert table[2].split()[:3] == ["eng", "chance", "33.3"]
    assert len(table) == 5


def test_results_replace_what_was_there_whole(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_results(path, {"bad": object()})
    assert path.read_text() == "old"
    write_results(path, {"R@1": 0.5, "name": "é"})
    content = json.loads(path.read_text())
    assert content["R@1"] == 0.5
    assert content["versions"]["torch"].startswith("2.")
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
