"""What reading costs a run: training steps fed by worker processes, against the same steps on batches in memory.

    python benchmarks/bench_input_pipeline.py [--data_dir ESC-10] [--rounds 4] [--steps 12] [--batch 16] [--workers 2]

A CED-tiny and a small BERT train on 5-second recordings, which are read as they came (Vorbis at 44.1 kHz: decoded and
resampled for each batch), from a set prepared as FLAC at 16 kHz, and from one prepared as int16 samples. Without
`--data_dir` the recordings are generated. All ways take turns in each round; a way's time is the least of its rounds,
and what counts are the ratios. The second table is one process that only reads, or reads and makes batches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import soundfile
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, RobertaTokenizer

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

STORAGES = ("original", "flac16k", "int16")
SAMPLING_RATE_HZ = 16000
CLIPS = 192

Batch = Mapping[str, torch.Tensor]


def generated_recordings(folder: Path) -> Path:
    """Generated sounds as a folder of ESC-50's layout: 5 s of Vorbis at 44.1 kHz."""
    counts: dict[str, Any] = {"num_train": CLIPS, "num_validation": 0, "num_test": 0, "duration_seconds": 5.0}
    cache = str(folder / "cache")
    rows = load_splits("synthetic", cache, sampling_rate_hz=44100, languages=["eng"], **counts)["train"]
    (folder / "esc" / "audio").mkdir(parents=True)
    (folder / "esc" / "meta").mkdir()
    lines = ["filename,fold,target,category,esc10,src_file,take"]
    for number, row in enumerate(rows):
        fold, category = 1 + number % 2, ("dog", "rain")[number % 2]
        samples, rate_hz = soundfile.read(row["audio_path"])
        soundfile.write(folder / "esc" / "audio" / f"{number}.ogg", samples, rate_hz)
        lines.append(f"{number}.ogg,{fold},0,{category},True,{number},A")
    (folder / "esc" / "meta" / "esc50.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "esc"


def stored_ways(data_dir: Path, folder: Path) -> dict[str, datasets.Dataset]:
    """The same rows, with their audio kept in each of `STORAGES`."""
    options = {"data_dir": str(data_dir), "languages": ["eng"], "validation_fraction": 0.0}
    cache = str(folder / "cache")
    rows = {}
    for storage in STORAGES:
        prepare(Request("esc50", options, storage), folder / storage, workers=2, cache_dir=cache, quiet=True)
        splits = load_splits("prepared", cache, data_dir=str(folder / storage))
        every = datasets.concatenate_datasets(list(splits.values()))
        rows[storage] = every.select(range(min(CLIPS, len(every))))
    return rows


def training_step(vocabulary: int, pad_token: int) -> Callable[[Batch], None]:
    """One step of a CED-tiny and a BERT of two layers, with InfoNCE and Adam."""
    audio = CEDConfig(embed_dim=192, depth=12, num_heads=3)
    text = BertConfig(
        vocab_size=vocabulary, pad_token_id=pad_token, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512,
    )  # fmt: skip
    model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=256))
    arguments = SupCLAPTrainingArguments(output_dir="outputs/bench", report_to="none")
    module = ContrastiveModule(model, build_objective(arguments)).to(arguments.device).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6)

    def step(batch: Batch) -> None:
        module(**{name: tensor.to(arguments.device) for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        module.zero_grad()

    return step


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall time, as workers do their part beside this process."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def least_seconds(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least time of each way over the rounds, in which they take turns; a round before warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, work in ways.items():
            times[name].append(seconds_of(work))
    return {name: min(values[1:]) for name, values in times.items()}


def train_on(step: Callable[[Batch], None], batches: Iterable[Batch]) -> None:
    """A step on each batch."""
    for batch in batches:
        step(batch)


def read_all(rows: datasets.Dataset) -> None:
    """The sound of each row."""
    for row in rows:
        read_row(row, SAMPLING_RATE_HZ)


def batch_all(rows: IndexedRows, chunks: Iterable[Iterable[int]], collator: TrainingCollator) -> None:
    """A batch of each chunk."""
    for chunk in chunks:
        collator([rows[number] for number in chunk])


def main() -> None:
    """Prints the ratio of steps that read to steps that do not, and how many clips one process reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="a folder of ESC-50's layout; default, generated sounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = stored_ways(options.data_dir or generated_recordings(folder), folder)
        compare(rows, options)


def compare(rows: Mapping[str, datasets.Dataset], options: argparse.Namespace) -> None:
    """Both tables."""
    captions = [text for row in rows["int16"].select_columns(["captions"]) for text in row["captions"]["eng"]]
    tokenizer = RobertaTokenizer().train_new_from_iterator(sorted(set(captions)), 500, show_progress=False)
    collator = TrainingCollator(SupCLAPProcessor(CEDFeatureExtractor(), tokenizer), ["eng"])
    step = training_step(len(tokenizer), tokenizer.pad_token_id)
    count = options.steps * options.batch

    def loader(storage: str, workers: int) -> DataLoader:
        indexed = IndexedRows(rows[storage])
        order = [number % len(indexed) for number in range(count)]
        return DataLoader(
            indexed, options.batch, sampler=order, collate_fn=collator, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip

    in_memory = list(loader("int16", 0))
    ways: dict[str, Callable[[], Any]] = {"in memory": lambda: train_on(step, in_memory)}
    for storage in STORAGES:
        ways[storage] = partial(train_on, step, loader(storage, options.workers))
    steps = least_seconds(ways, options.rounds)
    print(
        f"{torch.get_num_threads()} threads, {options.workers} workers, {options.steps} steps of batch {options.batch}"
    )
    print(f"{'batches':<12}{'ms a step':>11}{'x in memory':>13}")
    for name, seconds in steps.items():
        print(f"{name:<12}{1e3 * seconds / options.steps:>11.1f}{seconds / steps['in memory']:>13.3f}")

    torch.set_num_threads(1)
    reading: dict[str, Callable[[], Any]] = {}
    batching: dict[str, Callable[[], Any]] = {}
    for storage in STORAGES:
        selected = rows[storage].select(range(min(96, len(rows[storage]))))
        indexed = IndexedRows(selected)
        chunks = [range(start, min(start + 16, len(indexed))) for start in range(0, len(indexed), 16)]
        reading[storage] = partial(read_all, selected)
        batching[storage] = partial(batch_all, indexed, chunks, collator)
    clips = min(96, min(map(len, rows.values())))
    print(f"\none process, one thread\n{'storage':<12}{'read, clips/s':>15}{'x':>7}{'batched, clips/s':>19}{'x':>7}")
    read, batched = (least_seconds(ways, options.rounds) for ways in (reading, batching))
    for storage in STORAGES:
        gains = read["original"] / read[storage], batched["original"] / batched[storage]
        rates = clips / read[storage], clips / batched[storage]
        print(f"{storage:<12}{rates[0]:>15.0f}{gains[0]:>7.1f}{rates[1]:>19.0f}{gains[1]:>7.1f}")


if __name__ == "__main__":
    main()
