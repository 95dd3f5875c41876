"""Count the functions and files that run between twelve clips and their results, and between a batch and its loss.

    python tests/call_graph.py

The model has tiny CED and BERT towers. The evaluation runs all tasks; the loss is InfoNCE with support vectors.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import builders
from recordings import tone_rows

from modeling_supclap import SupCLAPTrainer, evaluation
from modeling_supclap.training.collator import TrainingCollator

TASKS = ["retrieval", "zero_shot", "zste"]
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("modeling_supclap", "datasets_scripts", "metrics")


class Calls(NamedTuple):
    """The functions that were called, as (file, name), their files, and how often two calls are in different files."""

    functions: set[tuple[str, str]]
    files: set[str]
    changes: int

    def __str__(self) -> str:
        return f"{len(self.functions)} functions in {len(self.files)} files, {self.changes} changes of file"


def trace_calls(function: Callable[[], Any]) -> Calls:
    """Record the functions of this project that run in a call, in all threads.

    Args:
        function: Function to call twice; only the second call is recorded, after imports and caches.
    """
    called: list[CodeType] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code)

    function()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

    functions = set()
    road = []
    for code in called:
        # modeling_supclap contains links to the other folders, and .venv may be a link.
        path = Path(code.co_filename).resolve()
        own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
        if own and not code.co_qualname.endswith(">"):
            functions.add((str(path.relative_to(ROOT)), code.co_qualname))
            road.append(path)
    changes = sum(one != other for one, other in itertools.pairwise(road))
    return Calls(functions, {path for path, _ in functions}, changes)


def evaluation_calls() -> Calls:
    """Trace an evaluation: twelve clips to the results of retrieval, zero-shot classification and ZSTE."""
    model, processor = builders.pair()
    model.processor = processor
    zste = evaluation.ZSTEOptions(num_items=4, num_candidates=12)
    with tempfile.TemporaryDirectory() as folder:
        rows = tone_rows(Path(folder), count=12)
        return trace_calls(
            lambda: evaluation.evaluate(model, rows, tasks=TASKS, zste=zste, cache=evaluation.EmbeddingCache(None))
        )


def batch_calls() -> Calls:
    """Trace two rows with recordings to a batch, as the collator makes it."""
    with tempfile.TemporaryDirectory() as folder:
        rows = tone_rows(Path(folder), count=2)
        collator = TrainingCollator(builders.pair()[1])
        indexed = [{**row, "clip_index": index} for index, row in enumerate(rows)]
        return trace_calls(lambda: collator(indexed))


def training_calls() -> Calls:
    """Trace a batch, as the collator makes it, to its loss."""
    with tempfile.TemporaryDirectory() as folder:
        rows = tone_rows(Path(folder), count=12)
        args = builders.training_args(folder, svr="bi-static", languages=["eng"])
        model, processor = builders.pair()
        trainer = SupCLAPTrainer(model, args, rows, processing_class=processor)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.module.train()
        return trace_calls(lambda: trainer.compute_loss(trainer.module, batch))


if __name__ == "__main__":
    roads = {"12 clips to results": evaluation_calls, "2 rows to batch": batch_calls, "batch to loss": training_calls}
    for title, trace in roads.items():
        calls = trace()
        for path, name in sorted(calls.functions):
            print(path, name)
        print(f"{title}: {calls}\n")
