"""How far twelve clips travel to their results: functions and files of this project that one evaluation passes.

    python tests/call_graph.py

A model of one's own, which embeds by itself, stands for the encoders: what is counted is the road and not the model.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from recordings import tone_rows

from modeling_supclap import evaluation

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("modeling_supclap", "datasets_scripts", "metrics")


class Plain:
    """Embeds whatever it is given, each thing in a direction of its own."""

    sampling_rate = 16000

    def encode_audio(self, waveforms: list[np.ndarray]) -> np.ndarray:
        return np.eye(12, dtype=np.float32)[: len(waveforms)]

    def encode_text(self, texts: list[str]) -> np.ndarray:
        return np.eye(12, dtype=np.float32)[np.arange(len(texts)) % 12]


def count_hops(**options: Any) -> tuple[set[tuple[str, str]], set[str]]:
    """The functions and the files that an evaluation of twelve clips calls.

    Args:
        **options: Fields of `EvaluationOptions`.
    """
    functions: set[tuple[str, str]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and path.is_relative_to(ROOT) and ".venv" not in path.parts and not name.endswith(">"):
            path = path.resolve().relative_to(ROOT)
            if path.parts[0] in ROOMS:
                functions.add((str(path), name))

    with tempfile.TemporaryDirectory() as folder:
        rows = tone_rows(Path(folder), count=12)
        evaluation.evaluate(Plain(), rows, cache=evaluation.EmbeddingCache(None), **options)  # imports are no road
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            evaluation.evaluate(Plain(), rows, cache=evaluation.EmbeddingCache(None), **options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return functions, {path for path, _ in functions}


if __name__ == "__main__":
    functions, files = count_hops()
    for path, name in sorted(functions):
        print(path, name)
    print(f"{len(functions)} functions in {len(files)} files")
