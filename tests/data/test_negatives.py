"""Tables of wrong captions, and their join with a dataset."""

import pytest
from datasets import Dataset

from modeling_supclap.datasets_scripts.negatives import add_negatives, write_negatives

ROWS = [
    {"clip_id": "a", "language": "eng", "text": "rain", "similarity": 0.9},
    {"clip_id": "c", "language": "fra", "text": "la pluie", "similarity": 0.8},
    {"clip_id": "a", "language": "eng", "text": "wind", "similarity": 0.5},
    {"clip_id": "c", "language": "deu", "text": "Regen", "similarity": 0.4},
]


def test_each_clip_gets_its_texts_in_order(tmp_path):
    write_negatives(tmp_path / "x.parquet", ROWS)
    joined = add_negatives(Dataset.from_dict({"clip_id": ["c", "b", "a"]}), tmp_path / "x.parquet")
    assert joined["negatives"][:] == [
        {"deu": ["Regen"], "eng": [], "fra": ["la pluie"]},
        {"deu": [], "eng": [], "fra": []},
        {"deu": [], "eng": ["rain", "wind"], "fra": []},
    ]
    assert list(joined.features["negatives"]) == ["deu", "eng", "fra"]


def test_missing_tables_columns_and_clips_are_named(tmp_path):
    rows = Dataset.from_dict({"clip_id": ["b"]})
    with pytest.raises(FileNotFoundError, match=r"x\.parquet.*supclap mine"):
        add_negatives(rows, tmp_path / "x.parquet")
    write_negatives(tmp_path / "x.parquet", ROWS)
    with pytest.raises(ValueError, match=r"x\.parquet has no clip .*such as 'b'; it has 'a'$"):
        add_negatives(rows, tmp_path / "x.parquet")
    write_negatives(tmp_path / "x.parquet", [])
    with pytest.raises(ValueError, match=r"such as 'b'; it has ''$"):
        add_negatives(rows, tmp_path / "x.parquet")
    Dataset.from_dict({"clip_id": ["b"]}).to_parquet(tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"y\.parquet lacks the columns \['language', 'similarity', 'text'\]"):
        add_negatives(rows, tmp_path / "y.parquet")
