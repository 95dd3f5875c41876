"""Translation quality reports, compared with values computed by hand and by loops."""

import sys

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer
from translation_models import save_encoder

from modeling_supclap.datasets_scripts.translation.quality import (
    format_translation_report,
    load_sentence_encoder,
    report_translations,
)

TEXTS = ["a dog barks while the rain falls", "rain", "un chien aboie", "rain", "ein Hund"]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def test_embeddings_are_the_mean_over_the_tokens(encoder_folder):
    found = load_sentence_encoder(encoder_folder)(TEXTS)
    assert found.dtype == np.float32
    tokenizer, model = (
        AutoTokenizer.from_pretrained(encoder_folder),
        AutoModel.from_pretrained(encoder_folder).eval(),
    )
    for text, row in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().numpy()
        mean = sum(states) / len(states)
        np.testing.assert_allclose(row, mean / np.sqrt((mean**2).sum()), atol=2e-6)


def test_the_error_without_sentence_transformers_names_two_solutions(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"supclap\[translate\].*--back_sample 0"):
        load_sentence_encoder("any")


def test_long_texts_are_cut(encoder_folder):
    assert load_sentence_encoder(encoder_folder)(["dog " * 300]).shape == (1, 24)


def angles(texts):
    """Return plane unit vectors; the angle in degrees is at the end of the text, 0 if missing."""
    degrees = np.array([float(text.rpartition(" ")[2]) if text[-1].isdigit() else 0.0 for text in texts])
    return np.stack([np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))], 1).astype(np.float32)


SOURCES = {("a", 0): "Rain", ("a", 1): "A dog", ("b", 0): "Wind", ("c", 0): "Hail"}
FRENCH = {("a", 0): "Pluie", ("a", 1): "Un chien", ("b", 0): "Wind"}
BACK = {("a", 0): "Rain 0", ("a", 1): "Dog 90", ("b", 0): "Breeze 60"}


def test_a_report_by_hand():
    report = report_translations(SOURCES, FRENCH, BACK, angles, threshold=0.7, num_worst=2)
    worst = report.pop("worst")
    assert report == {
        "captions": 4,
        "missing": 1,
        "identical": 1,
        "length_ratio": pytest.approx((5 / 4 + 8 / 5 + 4 / 4) / 3, abs=1e-6),
        "back_translated": 3,
        "cosine": pytest.approx((1 + 0 + 0.5) / 3, abs=1e-6),
        "below_threshold": pytest.approx(2 / 3, abs=1e-6),
    }
    assert [(x["clip_id"], x["caption_index"], x["back_translation"]) for x in worst] == [
        ("a", 1, "Dog 90"),
        ("b", 0, "Breeze 60"),
    ]
    assert worst[1] == {
        "clip_id": "b",
        "caption_index": 0,
        "cosine": pytest.approx(0.5, abs=1e-6),
        "source": "Wind",
        "translation": "Wind",
        "back_translation": "Breeze 60",
    }


def test_of_equal_cosines_the_first_captions_are_the_worst():
    texts = {(f"{number:02d}", 0): "Rain" for number in reversed(range(99))}
    back = {key: f"Rain {60 * (int(key[0]) % 2)}" for key in texts}
    worst = report_translations(texts, texts, back, angles)["worst"]
    assert [entry["clip_id"] for entry in worst] == [f"{number:02d}" for number in range(1, 20, 2)]


def test_without_back_translations_there_is_no_cosine():
    report = report_translations(SOURCES, FRENCH, {})
    assert (report["back_translated"], report["worst"]) == (0, [])
    assert report["cosine"] is report["below_threshold"] is None
    nothing = report_translations(SOURCES, {}, {})
    assert (nothing["missing"], nothing["length_ratio"]) == (4, None)


def test_perfect_translations_have_cosine_one(encoder_folder):
    report = report_translations(SOURCES, SOURCES, SOURCES, load_sentence_encoder(encoder_folder))
    assert report["cosine"] == pytest.approx(1, abs=1e-6)
    assert (report["below_threshold"], report["identical"], report["length_ratio"]) == (0, 4, 1)


def test_the_table_has_a_line_for_each_language():
    reports = {"fra": report_translations(SOURCES, FRENCH, BACK, angles), "jpn": report_translations(SOURCES, {}, {})}
    title, french, japanese = format_translation_report(reports, 0.7).split("\n")
    assert title == "language  captions  missing  identical  length  translated back  cosine  below 70"
    assert french.split() == ["fra", "4", "1", "1", "1.28", "3", "50.0", "66.7", "%"]
    assert japanese.split() == ["jpn", "4", "4", "0", "-", "0", "-", "-", "%"]
    assert len(french) == len(japanese) == len(title)
