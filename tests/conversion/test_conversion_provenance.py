"""Provenance of weights: names, records, model cards, and the strictest licence applies."""

import json
from dataclasses import asdict

import builders
import pytest
from huggingface_hub import ModelCard, ModelCardData
from transformers import BertConfig, BertModel

from modeling_supclap import CEDModel, SonarTextModel, SupCLAPModel
from modeling_supclap.conversion.provenance import (
    Origin,
    known_license,
    license_of,
    origins,
    read_provenance,
    stated_license,
    write_provenance,
)

PARTS = [
    Origin("audio tower", "ced", "mispeech/ced-tiny", "apache-2.0"),
    Origin("text_model", "m2m_100", "x.pt", "cc-by-nc-4.0", "ab" * 32, "SONAR", 19, None, ("x.pt",), 59_200),
]


def test_a_written_record_is_read_back(tmp_path):
    assert read_provenance(tmp_path) == read_provenance(tmp_path / "absent") == []
    write_provenance(tmp_path, PARTS)
    assert read_provenance(tmp_path) == json.loads(json.dumps([asdict(part) for part in PARTS]))
    assert [path.name for path in tmp_path.iterdir()] == ["provenance.json"]


@pytest.mark.parametrize("content", ["{}", '[{"part": "text"}]', "[1]", "1"])
def test_another_record_is_refused(tmp_path, content):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=r"provenance\.json"):
        read_provenance(tmp_path)


@pytest.mark.parametrize(
    ("repository", "license"),
    [
        ("mispeech/ced-base", "apache-2.0"),
        ("mispeech/dasheng-0.6B", "apache-2.0"),
        ("cointegrated/SONAR_200_text_encoder", "cc-by-nc-4.0"),
        ("laion/clap-htsat-unfused", "apache-2.0"),
        ("laion/clap2-large-audioxl-s1B", "apache-2.0"),
        ("microsoft/msclap", "mit"),
        ("microsoft/msclap-2", ""),
        ("somebody/ced-base", ""),
    ],
)
def test_licenses_of_public_checkpoints(repository, license):
    assert known_license(repository) == license


# ---- of a model ----


def joined(tmp_path, text=None):
    """Return a model of two saved towers."""
    CEDModel(builders.ced_config()).save_pretrained(tmp_path / "ced-small-town")
    if text is None:
        text = BertModel(BertConfig(**builders.bert_config()), add_pooling_layer=False)
    text.save_pretrained(tmp_path / "text")
    return SupCLAPModel.from_encoders(str(tmp_path / "ced-small-town"), str(tmp_path / "text"), projection_dim=8)


def card(folder, license):
    folder.mkdir(exist_ok=True)
    ModelCard.from_template(ModelCardData(license=license), template_str="---\n{{ card_data }}\n---\n").save(
        folder / "README.md"
    )


def audio(license, source="a/b"):
    return Origin("audio tower", "ced", source, license)


def text(license, source="c/d"):
    return Origin("text tower", "bert", source, license)


def whole(license, source="e/f"):
    return Origin("whole model", "supclap", source, license)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([audio("apache-2.0"), text("apache-2.0")], "apache-2.0"),  # CED and LaBSE
        ([audio("apache-2.0"), text("cc-by-nc-4.0")], "cc-by-nc-4.0"),  # CED and SONAR
        ([audio("", ""), text("", "")], "apache-2.0"),  # from scratch
        ([audio("mit"), text("cc-by-4.0")], "apache-2.0"),
        ([audio("apache-2.0"), text("")], "other"),  # a source without a licence
        ([audio("apache-2.0"), text("gpl-3.0")], "other"),
        ([audio("cc-by-nc-sa-4.0"), text("cc-by-nc-4.0")], "other"),
        ([audio("apache-2.0"), text("mit"), whole("cc-by-nc-4.0")], "cc-by-nc-4.0"),
        # the licences of the towers are sufficient
        ([audio("apache-2.0"), text("mit"), whole("")], "apache-2.0"),
        ([audio("", ""), text("", ""), whole("")], "other"),
    ],
)
def test_the_strictest_license_wins(parts, expected):
    assert license_of(iter(parts)) == expected


def test_a_folder_states_its_license_in_its_card(tmp_path):
    card(tmp_path / "stated", "MIT")
    (tmp_path / "silent").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "README.md").write_text("---\nlicense: [mit\n---\n")
    assert [stated_license(str(tmp_path / name)) for name in ("stated", "silent", "broken")] == ["mit", "", ""]


def test_towers_are_known_by_name_and_card(tmp_path):
    model = joined(tmp_path)
    card(tmp_path / "ced-small-town", "apache-2.0")
    found = origins(model)
    assert [(part.part, part.kind, part.source) for part in found] == [
        ("audio tower", "ced", "ced-small-town"),
        ("text tower", "bert", "text"),
    ]
    assert [part.license for part in found] == ["apache-2.0", ""]


def test_a_sonar_tower_is_not_for_commercial_use_wherever_it_is_from(tmp_path):
    drawn = SupCLAPModel(builders.supclap_config(builders.sonar_config()))
    for sonar in (joined(tmp_path, SonarTextModel(builders.sonar_config())), drawn):
        assert license_of(origins(sonar)) == "cc-by-nc-4.0"


def test_a_model_from_scratch(model):
    found = origins(model)
    assert [(part.source, part.license) for part in found] == [("", ""), ("", "")]
    assert license_of(found) == "apache-2.0"


def test_the_record_of_a_conversion(tmp_path):
    model = joined(tmp_path)
    entry = {"part": "text", "source": "https://example.org/text.pt", "sha256": "ab" * 32, "layout": "fairseq2"}
    record = [{**entry, "license": "CC-BY-NC-4.0", "tensors": 387, "revision": "c0ffee", "of another version": 1}]
    (tmp_path / "text" / "provenance.json").write_text(json.dumps(record))
    tower = origins(model)[1]
    assert tower.source == "https://example.org/text.pt"
    assert (tower.license, tower.sha256, tower.layout) == ("cc-by-nc-4.0", "ab" * 32, "fairseq2")
    assert (tower.tensors, tower.revision, tower.base_model) == (387, "c0ffee", "")
    assert tower.hub_id is None
    (tmp_path / "text" / "provenance.json").write_text(json.dumps([{**record[0], "base_model": "someone/base"}]))
    assert (origins(model)[1].base_model, origins(model)[1].hub_id) == ("someone/base", "someone/base")


@pytest.mark.parametrize(
    ("records", "source"),
    [
        ([{"part": "whole", "source": "a/whole"}, {"part": "text_model", "source": "a/text"}], "a/text"),
        ([{"part": "encoder", "source": "a/encoder"}, {"part": "head", "source": "a/head"}], "a/encoder"),
        ([], "text"),
    ],
)
def test_the_entry_of_the_tower_comes_before_the_first_one(tmp_path, records, source):
    model = joined(tmp_path)
    (tmp_path / "text" / "provenance.json").write_text(json.dumps(records))
    assert [part.source for part in origins(model)] == ["ced-small-town", source]


def test_the_record_is_read_in_later_training(tmp_path):
    model = joined(tmp_path)
    first = [audio("apache-2.0", "mispeech/ced-tiny"), text("mit", "someone/text")]
    model.save_pretrained(tmp_path / "out")
    write_provenance(tmp_path / "out", first)
    card(tmp_path / "out", "apache-2.0")
    found = origins(SupCLAPModel.from_pretrained(tmp_path / "out"))
    assert [part.source for part in found] == ["mispeech/ced-tiny", "someone/text", "out"]
    assert [part.license for part in found] == ["apache-2.0", "mit", "apache-2.0"]
    assert license_of(found) == "apache-2.0"


def test_only_repositories_are_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    ids = [
        Origin("text tower", "bert", source).hub_id for source in ("a/b-1.0", "outputs/run", "", "run", "https://x/y")
    ]
    assert ids == ["a/b-1.0", None, None, None, None]
