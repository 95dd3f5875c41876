"""Measure the time and memory of building and querying a search index of many audio windows.

    OMP_NUM_THREADS=1 python benchmarks/bench_search.py --rows 100000 1000000 --dim 512 --folder /tmp/indexes

    # With embeddings of real recordings:
    python benchmarks/bench_search.py --model outputs/esc10 --recordings path/to/ESC-10/audio --folder /tmp/indexes

Each recording lasts an hour. Without `--model`, the window embeddings are random points around 1,000 random centres.
With `--model`, the centres are embeddings of real 1 s windows, rotated into `--dim` dimensions (cosines do not change).
The window embeddings are these centres plus noise, and some queries are text embeddings. Each index size runs in
separate processes, so that its peak memory does not include another size.
"""

from __future__ import annotations

import itertools
import math
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, run_script, take_turns

from modeling_supclap import SupCLAPModel
from modeling_supclap.search.index import IndexedFile, SoundIndex, Stamp, list_recordings

WINDOWS_PER_FILE = 1440  # an hour, every 2.5 s
FILES_AT_ONCE = 64
NOISE = 0.5  # norm of the noise added to a centre of norm 1
TEXTS = ("a dog barks", "the sound of rain", "sea waves", "a crying baby", "a ticking clock", "a person sneezing")


def draw_centres(dim: int, model: str | None, recordings: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the centres of the window embeddings (n, dim) and the text queries (texts, dim), all with unit norm."""
    generator = np.random.default_rng(0)
    if model is None or recordings is None:
        return _unit(generator.normal(size=(1000, dim))), np.empty((0, dim), np.float32)

    clap = SupCLAPModel.from_pretrained(model)
    files = list(list_recordings(recordings).values())
    chunks = clap.encode_audio(files, chunk_seconds=1.0, return_chunks=True, show_progress_bar=True)
    audio = np.concatenate([recording.embeds for recording in chunks])
    text = clap.encode_text(list(TEXTS))

    # (d, dim) with orthonormal rows: cosines do not change.
    rotation = np.linalg.qr(generator.normal(size=(dim, audio.shape[1])))[0].T
    return _unit(audio @ rotation), _unit(text @ rotation)


def draw_files(number: int, centres: np.ndarray) -> Iterator[IndexedFile]:
    """Yield hour-long recordings with `number` windows in total. The window embeddings are around the centres."""
    generator = np.random.default_rng(1)
    for file in range(math.ceil(number / WINDOWS_PER_FILE)):
        count = min(WINDOWS_PER_FILE, number - file * WINDOWS_PER_FILE)
        indices = generator.integers(len(centres), size=count)
        noise = generator.standard_normal((count, centres.shape[1]), np.float32)
        starts = 2.5 * np.arange(count)
        name = f"{file:05d}.wav"
        embeds = _unit(centres[indices] + noise * NOISE / math.sqrt(centres.shape[1]))
        yield IndexedFile(name, Stamp(1, 1, 1), name, 2.5 * count + 2.5, starts, starts + 5, embeds)


def build(folder: str, number: int, centres: np.ndarray) -> dict[str, float]:
    """Build an index, and return its times, memory, disk size and recall."""
    shutil.rmtree(folder, ignore_errors=True)
    store = SoundIndex(folder, centres.shape[1])

    before, started, worked = _peak_gigabytes(), time.perf_counter(), time.process_time()
    files = draw_files(number, centres)
    while some := list(itertools.islice(files, FILES_AT_ONCE)):
        store.replace(some)
    written = time.perf_counter()
    recall = store.optimize()
    optimized, worked = time.perf_counter(), time.process_time() - worked
    store.optimize()

    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "memory before, GB": before,
        "write, s": written - started,
        "index, s": optimized - written,
        "both, s of one core": worked,
        "index again, nothing new, s": time.perf_counter() - optimized,
        "disk, GB": size / 1e9,
        "recall@10 of windows": math.nan if recall is None else recall,
        "peak memory of building, GB": _peak_gigabytes(),
    }


def ask(folder: str, texts: np.ndarray, number: int) -> dict[str, float]:
    """Measure exact search, approximate search, and search in one recording. Return times, recall and memory."""
    import lancedb  # noqa: F401, imported before the timing starts

    started = time.perf_counter()
    store = SoundIndex(folder)
    rows = store.windows.count_rows()
    results = {"open, s": time.perf_counter() - started}

    vectors = [*texts, *store.draw_vectors(number - len(texts), seed=2)]
    results |= _timed("exact", vectors, lambda vector: store.nearest(vector, 10, exact=True))
    if store.is_approximate:
        results |= _timed("approximate", vectors, lambda vector: store.nearest(vector, 10))
        if len(texts):
            results["recall@10 of texts"] = store.measure_recall(list(texts))
    file = f"{rows // WINDOWS_PER_FILE // 2:05d}.wav"
    results |= _timed("one recording", vectors, lambda vector: store.nearest(vector, WINDOWS_PER_FILE, within=file))
    results["peak memory of searching, GB"] = _peak_gigabytes()
    return results


def _timed(name: str, vectors: list[Any], work: Callable[[Any], Any]) -> dict[str, float]:
    """Time one search per vector. Return the first, minimum and median time, and the CPU time of the last search."""
    seconds, worked = [], 0.0
    for vector in vectors:
        started, before = time.perf_counter(), time.process_time()
        assert work(vector)
        seconds.append(time.perf_counter() - started)
        worked = time.process_time() - before
    return {
        f"{name}, first, ms": 1000 * seconds[0],
        f"{name}, least, ms": 1000 * min(seconds),
        f"{name}, median, ms": 1000 * statistics.median(seconds[1:]),
        f"{name}, last, ms of one core": 1000 * worked,
    }


def _unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(
    rows: Sequence[int] = (100_000,),
    dim: int = 64,
    queries: int = 20,
    folder: str | None = None,
    model: str | None = None,
    recordings: str | None = None,
) -> list[Row]:
    """Run the search benchmark for each index size. Query times are relative to a product with all window embeddings.

    Args:
        rows: Number of windows in each index.
        dim: Embedding dimension.
        queries: Number of queries per kind of search.
        folder: Folder to keep the indexes in. None: use a temporary folder.
        model: SupCLAP model to embed `recordings`. None: use random embeddings.
        recordings: Folder of recordings to embed with `model`.
    """
    centres, texts = draw_centres(dim, model, recordings)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in rows:
            index = str(Path(folder or temporary) / f"{number}.index")
            figures: dict[str, float] = {}
            for work, options in ((build, (number, centres)), (ask, (texts, queries))):
                with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
                    figures |= pool.submit(work, index, *options).result()
            print(f"{number} windows of {dim} dimensions around {len(centres)} centres: {figures}", flush=True)

            windows, query = np.resize(centres, (number, dim)), centres[:1]
            product = min(take_turns({"product": partial(np.matmul, windows, query.T)}, queries)["product"])
            size = f"{number:,} windows of {dim} numbers"
            results.append(Row("search", f"write and index {size}", figures["both, s of one core"], unit="CPU s"))
            for kind in ("exact", "approximate", "one recording"):
                if f"{kind}, least, ms" in figures:
                    least, median = figures[f"{kind}, least, ms"] / 1000, figures[f"{kind}, median, ms"] / 1000
                    what = f"{kind} search of {size} / their bare product"
                    results.append(Row("search", what, least / product, median / product))
            recall = figures["recall@10 of windows"]
            results.append(Row("search", "recall@10 of the approximate search", recall, unit=""))
    return results


if __name__ == "__main__":
    run_script(measure, __doc__)
