"""Distinguish paths from Hub ids."""

import pytest

from modeling_supclap.hub_ids import is_hub_id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mispeech/ced-base", True),
        ("bert-base-uncased", True),
        ("/models/ced", False),
        ("./ced", False),
        ("~/ced", False),
        ("outputs/esc10/model", False),
        ("C:\\models", False),
        ("", False),
        ("here", False),  # a folder with this name exists
    ],
)
def test_valid_hub_ids(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert is_hub_id(name) is expected
