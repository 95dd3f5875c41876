"""The record of where parts come from: what both writers write is read, and nothing else is taken for a record."""

import json
from dataclasses import asdict

import pytest

from modeling_supclap.conversion.provenance import Part, known_license, read_provenance, write_provenance
from modeling_supclap.model_card import Origin

PARTS = [
    Origin("audio tower", "ced", "mispeech/ced-tiny", "apache-2.0"),
    Part("text_model", "x.pt", None, ("x.pt",), "ab" * 32, "SONAR", "cc-by-nc-4.0", 19, 59_200),
]


def test_what_is_written_is_read(tmp_path):
    assert read_provenance(tmp_path) == read_provenance(tmp_path / "absent") == []
    write_provenance(tmp_path, PARTS)
    assert read_provenance(tmp_path) == json.loads(json.dumps([asdict(part) for part in PARTS]))
    assert [path.name for path in tmp_path.iterdir()] == ["provenance.json"]


@pytest.mark.parametrize("content", ["{}", '[{"part": "text"}]', "[1]", "1"])
def test_another_record_is_refused(tmp_path, content):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=r"provenance\.json must be a list of mappings with part, source"):
        read_provenance(tmp_path)


@pytest.mark.parametrize(
    ("repository", "license"),
    [
        ("mispeech/ced-base", "apache-2.0"),
        ("mispeech/dasheng-0.6B", "apache-2.0"),
        ("cointegrated/SONAR_200_text_encoder", "cc-by-nc-4.0"),
        ("laion/clap-htsat-unfused", "apache-2.0"),
        ("microsoft/msclap", "mit"),
        ("microsoft/msclap-2", ""),
        ("somebody/ced-base", ""),
    ],
)
def test_licenses_of_public_checkpoints(repository, license):
    assert known_license(repository) == license
