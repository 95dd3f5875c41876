"""Measure the cost of reading recordings in training and embedding, relative to batches that are in memory.

    python benchmarks/bench_input_pipeline.py [--data_dir folder] [--rounds 4] [--clips 192] [--batch 16] [--workers 2]

1. Training CED-tiny and a small BERT on 5 s recordings, in three storage formats: original files (Vorbis at 44.1 kHz,
   decoded and resampled for each batch), FLAC at 16 kHz, and int16 samples.
2. Reading the same recordings in one process, without and with the computation of spectrograms and batches.
3. Embedding with `recipes/embed_corpus.py`, relative to its encoder (CED-base) on features in memory.

`--data_dir` is a folder for the `audio_folder` builder. By default, recordings are generated. The compared variants run
in alternation.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import soundfile
import torch
from accelerate import PartialState
from accelerate.utils import send_to_device
from rows import Row, compare, read_wall_clock, run_script, take_turns
from torch.utils.data import DataLoader
from transformers import BertConfig, RobertaTokenizer

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.encoding import inference
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.recipes.embed_corpus import Corpus, CorpusArguments, write_files
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

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


def build_model(tokenizer: Any, audio_width: int) -> SupCLAPModel:
    """Build a model from a two-layer BERT and CED with width `audio_width` (192: CED-tiny, 768: CED-base)."""
    audio = CEDConfig(embed_dim=audio_width, depth=12, num_heads=audio_width // 64)
    text = BertConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=512,
    )  # fmt: skip
    return SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=256))


def compare_training(
    rows: Mapping[str, datasets.Dataset], model: SupCLAPModel, collator: TrainingCollator, options: argparse.Namespace
) -> list[Row]:
    """Time a training step (InfoNCE, Adam) with batches from workers and with batches in memory."""
    arguments = SupCLAPTrainingArguments(output_dir="outputs/bench", report_to="none")
    module = ContrastiveModule(model, build_objective(arguments)).to(arguments.device).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6)

    def train_on(batches: Iterable[Batch]) -> None:
        for batch in batches:
            inputs = send_to_device(batch, arguments.device)
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

    seconds = take_turns(ways, options.rounds, read_wall_clock)
    results = []
    for storage in STORAGES:
        ratio = compare(seconds, storage, "in memory")
        bound = "<= 1.1" if storage == "int16" else ""
        results.append(Row("input", f"a step fed from {storage} by workers / from memory", *ratio, bound))
    return results


def compare_reading(
    rows: Mapping[str, datasets.Dataset], collator: TrainingCollator, options: argparse.Namespace
) -> list[Row]:
    """Time reading and batching in a single process and thread."""

    def read(storage: str) -> None:
        for row in rows[storage]:
            read_row(row, SAMPLING_RATE_HZ)

    def batch(storage: str) -> None:
        for _ in DataLoader(IndexedRows(rows[storage]), options.batch, collate_fn=collator):
            pass

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reading = take_turns({storage: partial(read, storage) for storage in STORAGES}, options.rounds, read_wall_clock)
    batching = take_turns({storage: partial(batch, storage) for storage in STORAGES}, options.rounds, read_wall_clock)
    torch.set_num_threads(threads)
    return [
        Row("input", "reading recordings / reading int16", *compare(reading, "original", "int16")),
        Row("input", "the same with spectrograms and batches", *compare(batching, "original", "int16"), ">= 8"),
    ]


def compare_embedding(
    rows: datasets.Dataset, model: SupCLAPModel, processor: SupCLAPProcessor, folder: Path, options: argparse.Namespace
) -> list[Row]:
    """Time `embed_corpus` and the encoder alone, on a third of the clips."""
    model.eval()
    rows = rows.select(range(max(1, len(rows) // 3)))
    arguments = CorpusArguments(batch_size=options.batch, num_workers=options.workers)
    waveforms = [read_row(row, SAMPLING_RATE_HZ) for row in rows]
    inputs: list[Any] = []
    for start in range(0, len(waveforms), options.batch):
        batch = waveforms[start : start + options.batch]
        inputs.append(processor(audio=batch, sampling_rate=SAMPLING_RATE_HZ, return_tensors="pt"))

    def embed_in_memory() -> None:
        with inference(model):
            for batch in inputs:
                model.get_audio_features(**batch)

    def embed_to_files() -> None:
        arguments.output = tempfile.mkdtemp(dir=folder)
        Path(arguments.output, "data").mkdir()
        write_files(embedder, corpus, arguments, PartialState())

    embedder, corpus = load_embedding_model(model, processor), Corpus({"all": rows})
    ways: dict[str, Callable[[], Any]] = {"in memory": embed_in_memory, "corpus": embed_to_files}
    ratio = compare(take_turns(ways, 2, read_wall_clock), "in memory", "corpus")
    cpu_ratio = compare(take_turns(ways, 1), "in memory", "corpus")
    return [
        Row("embed", "rate of embed_corpus / the encoder on features in memory, CED-base", *ratio, ">= 0.9"),
        Row("embed", "the same in CPU time of the main process", *cpu_ratio, ">= 0.9"),
    ]


def measure(
    data_dir: Path | None = None, rounds: int = 3, clips: int = 96, batch: int = 16, workers: int = 2
) -> list[Row]:
    """Run the training, reading and embedding benchmarks. Return the rows of their results table."""
    options = argparse.Namespace(rounds=rounds, batch=batch, workers=workers)
    datasets.disable_progress_bars()
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_dir = data_dir or generate_recordings(folder, clips)
        rows = load_stored(data_dir, folder, clips)

        captions = []
        for row in rows["int16"].select_columns(["captions"]):
            captions += row["captions"]["eng"]
        tokenizer = RobertaTokenizer().train_new_from_iterator(sorted(set(captions)), 500, show_progress=False)
        processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
        collator = TrainingCollator(processor, ["eng"])
        return [
            *compare_training(rows, build_model(tokenizer, 192), collator, options),
            *compare_reading(rows, collator, options),
            *compare_embedding(rows["original"], build_model(tokenizer, 768), processor, folder, options),
        ]


if __name__ == "__main__":
    run_script(measure, __doc__)
