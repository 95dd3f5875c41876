"""The row's contract."""

import datasets
import pytest

from modeling_supclap.datasets_scripts.schema import LANGUAGES, Row, features, require_captions, validate_row

ROW: Row = {
    "clip_id": "1-100032-A-0",
    "audio_path": "audio/1-100032-A-0.ogg",
    "captions": {"eng": ["A dog barking", "A barking dog"], "fra": []},
    "labels": ["dog"],
    "events": [{"label": "dog", "onset_seconds": 0.5, "offset_seconds": 0.5}],
    "source": "freesound:100032",
    "license": "CC BY 3.0",
}


def test_a_row_survives_arrow_unchanged():
    table = datasets.Dataset.from_list([ROW, {**ROW, "labels": [], "events": []}], features=features(["eng", "fra"]))
    assert table[0] == ROW
    assert table[1]["events"] == []


def test_features_name_the_fields_of_the_row_in_order():
    assert list(features()) == list(Row.__annotations__)
    assert list(features()["captions"]) == list(LANGUAGES)
    assert list(features(["swe", "eng"])["captions"]) == ["swe", "eng"]


def test_a_good_row_passes():
    validate_row(ROW)
    validate_row({**ROW, "captions": {"swe": ["En hund skäller"]}}, languages=["swe"])


def event(onset_seconds, offset_seconds):
    return {"events": [{"label": "dog", "onset_seconds": onset_seconds, "offset_seconds": offset_seconds}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_id": ""}, "clip_id.*''"),
        ({"clip_id": "  "}, "clip_id.*'  '"),
        ({"audio_path": None}, "audio_path.*None"),
        ({"source": ""}, "source.*''"),
        ({"captions": {"eng": ["A dog", " \n"]}}, r"caption.*\b1\b.*'eng'"),
        ({"captions": {"eng": [""]}}, r"caption.*\b0\b.*'eng'"),
        ({"captions": {"eng": [], "fra": []}}, "caption"),
        ({"captions": {}}, "caption"),
        ({"captions": {"eng": ["A dog"], "klingon": ["targh"]}}, "'klingon'"),
        ({"captions": {"eng": "A dog"}}, "'eng'.*'A dog'"),
        (event(2.0, 1.0), "'dog'.*1.0.*2.0"),
        (event(-0.1, 1.0), "'dog'.*-0.1"),
        (event(float("nan"), 1.0), "'dog'.*nan"),
        (event(0.0, float("nan")), "'dog'.*nan"),
    ],
)
def test_a_bad_row_is_refused_with_its_name_and_fault(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_row({**ROW, **change})
    assert str(caught.value).startswith(f"clip {change.get('clip_id', ROW['clip_id'])!r}: ")


def test_every_fault_is_named_at_once():
    with pytest.raises(ValueError, match=r"audio_path.*''.*'eng'"):
        validate_row({**ROW, "audio_path": "", "captions": {"eng": [" "]}})


def test_missing_fields_are_named():
    with pytest.raises(ValueError, match="'license', 'source'"):
        validate_row({key: value for key, value in ROW.items() if key not in ("source", "license")})


def test_a_language_that_no_clip_has_may_be_another_name_for_what_is_there():
    with pytest.raises(ValueError, match=r"no train clip has a caption in \['deu'\].*\['eng'\].*--caption_language"):
        require_captions([ROW], ["deu", "eng"], split="train")
