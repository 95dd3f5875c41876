"""The memory of a run that trains from a stream, as more and more rows go by; it must stay as it is.

    OMP_NUM_THREADS=1 python benchmarks/bench_stream.py

A prepared set of short generated clips is written to a temporary folder, and `SupCLAPTrainer` reads an epoch of it with
towers that are as small as can be. What counts is the resident set after a tenth of the rows and after each further
tenth, which are printed as they come.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from bench_tiles import read_memory
from rows import Row, print_rows
from transformers import RobertaTokenizer, TrainerCallback

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.prepare import Entry, ShardWriter
from modeling_supclap.datasets_scripts.prepared import FORMAT, MANIFEST, STORAGES
from modeling_supclap.datasets_scripts.schema import features
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

SAMPLES = 3200


def write_set(folder: Path, count: int) -> None:
    """Writes clips of a fifth of a second with a caption each, as `prepare.py` does."""
    types = datasets.Features({**features(["eng"]), **STORAGES["int16"].features()})

    def draw_rows() -> Iterator[Entry]:
        draw = np.random.default_rng(0)
        for number in range(count):
            row = {
                "clip_id": f"clip{number}", "audio_path": f"{number}.wav", "captions": {"eng": [f"sound {number}"]},
                "labels": [], "events": [], "source": f"file:{number}", "license": "CC0-1.0", "sampling_rate_hz": 16000,
                "samples": draw.integers(-9000, 9000, SAMPLES, dtype=np.int16).tobytes(),
            }  # fmt: skip
            yield Entry(row, {})

    shards = ShardWriter(folder, "train", types, shard_bytes=32 * 2**20).write(draw_rows())
    manifest = {
        "format": FORMAT, "dataset": "generated", "storage": "int16", "features": types.to_dict(),
        "licenses": {"CC0-1.0": count}, "splits": {"train": {"clips": count, "shards": shards}},
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


class WatchMemory(TrainerCallback):
    """Prints the resident set after each tenth of the run, and keeps it."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.sizes: list[int] = []
        self.started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks after each tenth of the steps."""
        if state.global_step % (state.max_steps // 10) == 0:
            self.sizes.append(read_memory("VmRSS"))
            rows = state.global_step * self.batch
            rate = rows / (time.process_time() - self.started)
            print(f"{rows:>10,} rows {self.sizes[-1] / 2**20:10.0f} MiB {rate:10.0f} rows a CPU second", flush=True)


def measure(count: int = 100_000, batch: int = 64) -> list[Row]:
    """Trains for an epoch."""
    tokenizer = RobertaTokenizer().train_new_from_iterator(["sound 0123456789"], 280, show_progress=False)
    processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
    text = {
        "model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    audio = CEDConfig(embed_dim=8, depth=1, num_heads=2)
    model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=8))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_set(folder, count)
        arguments = SupCLAPTrainingArguments(
            output_dir=str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, num_train_epochs=1,
            per_device_train_batch_size=batch, eval_strategy="no", save_strategy="no",
            load_best_model_at_end=False, logging_strategy="no",
        )  # fmt: skip
        rows = load_splits("prepared", data_dir=name, streaming=True)["train"]
        watch = WatchMemory(batch)
        SupCLAPTrainer(model, arguments, train_dataset=rows, processing_class=processor, callbacks=[watch]).train()

    growth = max(watch.sizes) / watch.sizes[0]
    return [Row("stream", f"memory over {count:,} rows / after a tenth of them", growth, wanted="<= 1.03")]


if __name__ == "__main__":
    print_rows(measure())
