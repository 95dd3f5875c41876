"""What reading costs: training steps and embedding fed by worker processes, against the same on batches in memory.

    python benchmarks/bench_input_pipeline.py [--data_dir folder] [--rounds 4] [--clips 192] [--batch 16] [--workers 2]

A CED-tiny and a small BERT train on 5-second recordings, which are read as they came (Vorbis at 44.1 kHz: decoded and
resampled for each batch), from a set prepared as FLAC at 16 kHz, and from one prepared as int16 samples. Without
`--data_dir`, a folder for the builder `audio_folder`, the recordings are generated. All ways take turns in each round;
a way's time is the least of its rounds, and what counts are the ratios. The second table is one process that only
reads, or reads and makes batches; the third is `recipes/embed_corpus.py` beside the encoder on features in memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from modeling_supclap.recipes.embed_corpus import ChunkCollator, Corpus, CorpusArguments, embed, write_files
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

STORAGES = ("original", "flac16k", "int16")
SAMPLING_RATE_HZ = 16000

Batch = Mapping[str, torch.Tensor]


def generate_recordings(folder: Path, clips: int) -> Path:
    """Generated sounds with captions: 5 s of Vorbis at 44.1 kHz."""
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
    """The same rows, with their audio kept in each of `STORAGES`."""
    cache = str(folder / "cache")
    rows = {}
    for storage in STORAGES:
        request = Request("audio_folder", {"data_dir": str(data_dir), "languages": ["eng"]}, storage)
        prepare(request, folder / storage, workers=2, cache_dir=cache, quiet=True)
        splits = load_splits("prepared", cache, data_dir=str(folder / storage))
        every = datasets.concatenate_datasets(list(splits.values()))
        rows[storage] = every.select(range(min(clips, len(every))))
    return rows


def build_model(tokenizer: Any) -> SupCLAPModel:
    """A CED-tiny and a BERT of two layers."""
    audio = CEDConfig(embed_dim=192, depth=12, num_heads=3)
    text = BertConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=512,
    )  # fmt: skip
    return SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=256))


def measure_least(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least wall time of each way over the rounds, in which they take turns; a round before warms up."""
    least = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                least[name] = min(least[name], time.perf_counter() - started)
    return least


def compare_training(
    rows: Mapping[str, datasets.Dataset], model: SupCLAPModel, collator: TrainingCollator, options: argparse.Namespace
) -> None:
    """The first table: a step of InfoNCE and Adam on batches that workers make, and on batches in memory."""
    arguments = SupCLAPTrainingArguments(output_dir="outputs/bench", report_to="none")
    module = ContrastiveModule(model, build_objective(arguments)).to(arguments.device).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6)

    def train_on(batches: Iterable[Batch]) -> None:
        for batch in batches:
            inputs = {name: tensor.to(arguments.device) for name, tensor in batch.items()}
            module(**inputs).loss.backward()
            optimizer.step()
            module.zero_grad()

    def load(storage: str, workers: int) -> DataLoader:
        indexed = IndexedRows(rows[storage])
        return DataLoader(
            indexed, options.batch, collate_fn=collator, num_workers=workers, persistent_workers=workers > 0
        )

    in_memory = list(load("int16", 0))
    ways: dict[str, Callable[[], Any]] = {"in memory": partial(train_on, in_memory)}
    for storage in STORAGES:
        ways[storage] = partial(train_on, load(storage, options.workers))

    print(f"{torch.get_num_threads()} threads, {options.workers} workers, batches of {options.batch}")
    print(f"{'batches':<12}{'ms a step':>11}{'x in memory':>13}")
    least = measure_least(ways, options.rounds)
    for name, seconds in least.items():
        print(f"{name:<12}{1e3 * seconds / len(in_memory):>11.1f}{seconds / least['in memory']:>13.3f}")


def compare_reading(
    rows: Mapping[str, datasets.Dataset], collator: TrainingCollator, options: argparse.Namespace
) -> None:
    """The second table: one process on one thread."""

    def read(storage: str) -> None:
        for row in rows[storage]:
            read_row(row, SAMPLING_RATE_HZ)

    def batch(storage: str) -> None:
        for _ in DataLoader(IndexedRows(rows[storage]), options.batch, collate_fn=collator):
            pass

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reading = measure_least({storage: partial(read, storage) for storage in STORAGES}, options.rounds)
    batching = measure_least({storage: partial(batch, storage) for storage in STORAGES}, options.rounds)
    torch.set_num_threads(threads)

    print(f"\none process, one thread\n{'storage':<12}{'read, clips/s':>15}{'x':>7}{'batched, clips/s':>19}{'x':>7}")
    for storage in STORAGES:
        read_rate, batch_rate = len(rows[storage]) / reading[storage], len(rows[storage]) / batching[storage]
        gains = reading["original"] / reading[storage], batching["original"] / batching[storage]
        print(f"{storage:<12}{read_rate:>15.0f}{gains[0]:>7.1f}{batch_rate:>19.0f}{gains[1]:>7.1f}")


def compare_embedding(
    rows: datasets.Dataset, model: SupCLAPModel, processor: SupCLAPProcessor, folder: Path, options: argparse.Namespace
) -> None:
    """The third table: a corpus to a file, and the encoder alone."""
    model.eval()
    corpus, collator = Corpus({"all": rows}), ChunkCollator(processor, 10.0)
    arguments = CorpusArguments(batch_size=options.batch, num_workers=options.workers)
    files = {folder / "embeddings.parquet": range(len(corpus))}
    inputs: Sequence[Any] = [batch.inputs for batch in DataLoader(corpus, options.batch, collate_fn=collator)]

    def embed_in_memory() -> None:
        for batch in inputs:
            embed(model, batch, options.batch)

    ways: dict[str, Callable[[], Any]] = {
        "in memory": embed_in_memory,
        "corpus": partial(write_files, model, corpus, files, collator, arguments),
    }
    print(f"\nembedding\n{'clips':<12}{'clips/s':>11}{'of in memory':>15}")
    least = measure_least(ways, options.rounds)
    for name, seconds in least.items():
        print(f"{name:<12}{len(corpus) / seconds:>11.0f}{least['in memory'] / seconds:>15.2f}")


def main() -> None:
    """Prints the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="a folder for audio_folder; default, generated sounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clips", type=int, default=192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_dir = options.data_dir or generate_recordings(folder, options.clips)
        rows = load_stored(data_dir, folder, options.clips)

        captions = []
        for row in rows["int16"].select_columns(["captions"]):
            captions += row["captions"]["eng"]
        tokenizer = RobertaTokenizer().train_new_from_iterator(sorted(set(captions)), 500, show_progress=False)
        processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
        model, collator = build_model(tokenizer), TrainingCollator(processor, ["eng"])

        compare_training(rows, model, collator, options)
        compare_reading(rows, collator, options)
        compare_embedding(rows["original"], model, processor, folder, options)


if __name__ == "__main__":
    main()
