"""Measure the cost of reading recordings in three storage formats.

    python benchmarks/bench_input_pipeline.py [--data_dir folder] [--rounds 4] [--clips 192] [--batch 16]

The formats are the original files (Vorbis at 44.1 kHz, decoded and resampled for each batch), FLAC at 16 kHz, and int16
samples. One process reads the same recordings in each format, either alone or followed by the computation of
spectrograms and batches.

`--data_dir` is a folder for the `audio_folder` builder. By default, recordings are generated. The formats take turns in
each round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import soundfile
import torch
from rows import Row, compare, read_wall_clock, run_script, take_turns
from torch.utils.data import DataLoader

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.recipes.options import ModelArguments
from modeling_supclap.recipes.train_supclap import build_processor
from modeling_supclap.training.collator import IndexedRows, TrainingCollator

STORAGES = ("original", "flac16k", "int16")
SAMPLING_RATE_HZ = 16000

Batch = Mapping[str, torch.Tensor]


def generate_recordings(folder: Path, clips: int) -> Path:
    """Generate recordings with captions (5 s, Vorbis, 44.1 kHz), and return their folder."""
    counts: dict[str, Any] = {"num_train": clips, "num_validation": 0, "num_test": 0, "duration_seconds": 5.0}
    cache = str(folder / "cache")
    rows = load_splits("synthetic", cache, sampling_rate_hz=44100, languages=["eng"], **counts)["train"]
    sounds = folder / "sounds"
    sounds.mkdir()
    for number, row in enumerate(rows):
        samples, rate_hz = soundfile.read(row["audio_path"])
        soundfile.write(sounds / f"{number}.ogg", samples, rate_hz)
        (sounds / f"{number}.txt").write_text(row["captions"]["eng"][0], encoding="utf-8")
    return sounds


def load_stored(data_dir: Path, folder: Path, clips: int) -> dict[str, datasets.Dataset]:
    """Prepare the same dataset in each storage format. Return `{format: dataset}`."""
    cache = str(folder / "cache")
    rows = {}
    for storage in STORAGES:
        request = Request("audio_folder", {"data_dir": str(data_dir), "languages": ["eng"]}, storage)
        prepare(request, folder / storage, workers=2, cache_dir=cache, quiet=True)
        splits = load_splits("prepared", cache, data_dir=str(folder / storage))
        every = datasets.concatenate_datasets(list(splits.values()))
        rows[storage] = every.select(range(min(clips, len(every))))
    return rows


def compare_reading(
    rows: Mapping[str, datasets.Dataset], collator: TrainingCollator, rounds: int, batch_size: int
) -> list[Row]:
    """Compare the original files with int16 samples, in one process and one thread.

    The first table row compares the time to read all recordings. The second row compares the time to read them, compute
    their spectrograms and build batches.
    """

    def read(storage: str) -> None:
        for row in rows[storage]:
            read_row(row, SAMPLING_RATE_HZ)

    def batch(storage: str) -> None:
        for _ in DataLoader(IndexedRows(rows[storage]), batch_size, collate_fn=collator):
            pass

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reading = take_turns({storage: partial(read, storage) for storage in STORAGES}, rounds, read_wall_clock)
    batching = take_turns({storage: partial(batch, storage) for storage in STORAGES}, rounds, read_wall_clock)
    torch.set_num_threads(threads)
    return [
        Row("input", "reading recordings / reading int16", *compare(reading, "original", "int16")),
        Row("input", "the same with spectrograms and batches", *compare(batching, "original", "int16"), ">= 8"),
    ]


def measure(data_dir: Path | None = None, rounds: int = 3, clips: int = 96, batch: int = 16) -> list[Row]:
    """Run the reading benchmarks. Return the rows of their results table."""
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = load_stored(data_dir or generate_recordings(folder, clips), folder, clips)
        processor = build_processor(ModelArguments(vocab_size=500), rows["int16"], ["eng"])
        return compare_reading(rows, TrainingCollator(processor, ["eng"]), rounds, batch)


if __name__ == "__main__":
    run_script(measure, __doc__)
