"""What Python does for each row, before a run and in every batch, as a training split grows to 50,000 clips.

    OMP_NUM_THREADS=1 python benchmarks/bench_rows.py

CPU time of one process, in microseconds a row, and the exponent by which all of it grows with the rows: 1 is linear.
No recording is read: rows have five captions in each language, as a prepared set has them in memory-mapped Arrow.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
from rows import Row, print_rows, take_turns
from transformers import RobertaTokenizer

from modeling_supclap import CEDFeatureExtractor, SupCLAPProcessor
from modeling_supclap.datasets_scripts.schema import features, group_id, require_captions
from modeling_supclap.datasets_scripts.stream import EpochBatches, RowGroup, RowStream
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.model_card.facts import count_licenses
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

WORDS = ("a", "dog", "barks", "while", "rain", "falls", "on", "the", "roof", "of", "some", "old", "car", "far", "away")


def make_rows(folder: Path, clips: int, languages: list[str]) -> datasets.Dataset:
    """Rows of the schema in an Arrow file, from which they are read as they are needed."""

    def generate() -> Iterator[dict[str, Any]]:
        draw = np.random.default_rng(0)
        for number in range(clips):
            words = draw.choice(WORDS, (len(languages), 5, 10))
            captions = {}
            for language, several in zip(languages, words.tolist(), strict=True):
                captions[language] = list(map(" ".join, several))
            yield {
                "clip_id": f"clip{number}", "audio_path": f"{number}.wav", "captions": captions, "labels": ["dog"],
                "events": [], "source": f"freesound:{number}", "license": "CC0-1.0",
            }  # fmt: skip

    return datasets.Dataset.from_generator(
        generate, features=features(languages), cache_dir=str(folder), fingerprint=f"rows{clips}"
    )


def measure_rows(rows: datasets.Dataset, languages: list[str], collator: TrainingCollator) -> dict[str, float]:
    """CPU seconds of each thing that is done for every row of a split."""
    arguments = SupCLAPTrainingArguments(
        output_dir="outputs/bench", report_to="none", use_cpu=True, languages=languages, loss="kcl"
    )
    trainer = object.__new__(SupCLAPTrainer)
    trainer._min_seconds = 0.0
    indexed = IndexedRows(rows)
    in_memory = rows.to_list()

    def each(function: Callable[[Any], Any]) -> Callable[[], None]:
        def work() -> None:
            for row in in_memory:
                function(row)

        return work

    def tokenize() -> None:
        for start in range(0, len(in_memory), 24):
            texts: list[str] = []
            for row in in_memory[start : start + 24]:
                texts += (several[0] for several in row["captions"].values())
            collator.processor(text=texts, return_tensors="pt")

    def stream_epoch() -> None:
        # The order of an epoch asks row groups for how many rows they have, and for no more.
        count = len(rows)
        groups = [RowGroup("shard", start, min(100, count - start)) for start in range(0, count, 100)]
        empty = {"features": datasets.Features({}), "licenses": {}, "read": lambda group, columns: lambda number: {}}
        split: Any = SimpleNamespace(row_groups=groups, **empty)
        stream = RowStream(split).shuffle(0).shard(1, 2)
        reader = stream.read_epoch(0)
        for batch in EpochBatches(stream, 24, workers=2):
            for _, turn in batch:
                reader[turn]

    ways: Mapping[str, Callable[[], Any]] = {
        "before: captions are there": lambda: require_captions(rows, languages, "kcl"),
        "before: clips that share captions": lambda: trainer._usable(rows, arguments),
        "after: licences for the card": lambda: count_licenses(rows),
        "batch: a row out of Arrow": lambda: [indexed[place] for place in range(len(rows))],
        "batch: crop and captions drawn": each(collator._draw),
        "batch: group id of the clip": each(lambda row: group_id(row, "clip")),
        "batch: group id of the captions": each(lambda row: group_id(row, "captions")),
        "batch: captions to tokens, of 24 clips": tokenize,
        "stream: order of an epoch": stream_epoch,
    }
    return {name: min(seconds) for name, seconds in take_turns(ways, 1).items()}


def measure(clips: Sequence[int] = (3125, 12_500, 50_000), num_languages: int = 8) -> list[Row]:
    """Two rows for each thing: what a clip costs in the largest split, and how the whole grows."""
    datasets.disable_progress_bars()
    languages = list(LANGUAGES)[:num_languages]
    tokenizer = RobertaTokenizer().train_new_from_iterator([" ".join(WORDS)], 300, show_progress=False)
    collator = TrainingCollator(SupCLAPProcessor(CEDFeatureExtractor(), tokenizer), languages, scheme="kcl")

    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for count in clips:
            measured.append(measure_rows(make_rows(Path(folder), count, languages), languages, collator))

    rows = []
    for name, seconds in measured[-1].items():
        exponent = math.log(seconds / measured[0][name]) / math.log(clips[-1] / clips[0])
        rows.append(Row("rows", f"{name}, a row of {clips[-1]:,}", 1e6 * seconds / clips[-1], unit="us"))
        rows.append(Row("rows", f"{name}, grows with the rows to the power", exponent, wanted="<= 1.2", unit=""))
    return rows


if __name__ == "__main__":
    print_rows(measure())
