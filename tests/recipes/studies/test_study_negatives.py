"""Negatives of the studies: captions of controls, and the table of a run."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.builders.captions import label_phrases
from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.recipes.studies import negatives
from modeling_supclap.recipes.studies.negatives import NEGATIVES_TABLE, count_same_sounds, draw_random, exchange_sounds
from modeling_supclap.recipes.sweep import Step, run_step

ROWS = [
    {"clip_id": "a", "captions": {"eng": ["A dog", "a bark"]}, "labels": ["dog"]},
    {"clip_id": "b", "captions": {"eng": ["a BARK", "a loud bark"]}, "labels": ["dog"]},
    {"clip_id": "c", "captions": {"eng": ["rain"]}, "labels": ["rain"]},
    {"clip_id": "d", "captions": {"eng": ["rain falls"]}, "labels": ["rain"]},
]


def test_random_negatives_are_no_captions_of_clips_that_share_one():
    seen = [set() for _ in ROWS]
    for seed in range(30):
        drawn = draw_random(ROWS, 2, np.random.default_rng(seed))
        for texts, of_clip in zip(drawn, seen, strict=True):
            assert len(set(texts)) == len(texts) == 2
            of_clip.update(texts)
    dogs, of_d = {"A dog", "a bark", "a loud bark"}, {"rain falls"}
    assert seen == [{"rain", *of_d}, {"rain", *of_d}, dogs | of_d, dogs | {"rain"}]
    assert list(map(len, draw_random(ROWS, 9, np.random.default_rng(0)))) == [2, 2, 4, 4]


def test_negatives_of_the_same_sounds_are_counted():
    pairs = [("a", "rain"), ("c", "rain falls"), ("d", "A dog"), ("d", "rain"), ("a", "A cat")]
    table = [{"clip_id": clip, "text": text} for clip, text in pairs]
    assert count_same_sounds(ROWS, table) == 2  # of c and d


def test_exchanged_captions_differ_in_one_sound_that_the_clip_does_not_have():
    splits = load_splits("scenes", num_train=40, num_validation=1, num_test=1, duration_seconds=1.0)
    rows = list(without_audio(splits["train"]))
    phrases = {label: of_label["eng"].casefold() for label, of_label in label_phrases("synthetic").items()}
    for row, texts in zip(rows, exchange_sounds(rows, 5, np.random.default_rng(0)), strict=True):
        own = row["captions"]["eng"][0]
        assert len(set(texts)) == 5
        for text in texts:
            edits = []
            for label in row["labels"]:
                for other in phrases.keys() - set(row["labels"]):
                    edits.append(own.casefold().replace(phrases[label], phrases[other]))
            assert edits.count(text.casefold()) == 1
            assert text[0].isupper()
    with pytest.raises(ValueError, match=r"'A dog'.*'a high bell ringing'"):
        exchange_sounds([{"captions": {"eng": ["A dog"]}, "labels": ["high_bell"]}], 1, np.random.default_rng(0))


def test_the_table_of_a_control_and_its_repetition(tmp_path, capsys):
    sizes = {"num_train": 12, "num_validation": 1, "num_test": 1, "duration_seconds": 1.0}
    settings = {"dataset": "scenes", "dataset_config": sizes, "kind": "random", "count": 3}
    tables = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(tables))
        run_step(Step("negatives", {**settings, "seed": seed, "output_dir": str(folder)}, folder))
        tables.append(pq.read_table(folder / NEGATIVES_TABLE).to_pylist())
    assert len(tables[0]) == 36
    assert tables[0] == tables[1] != tables[2]
    assert "36 random negatives of 12 of 12 clips" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"'hard'.*exchanged"):
        negatives.NegativesArguments(kind="hard")
