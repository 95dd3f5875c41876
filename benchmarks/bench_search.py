"""Measure the time and memory of building and querying a search index of many audio windows.

    OMP_NUM_THREADS=1 python benchmarks/bench_search.py --rows 100000 1000000 --dim 512 --folder /tmp/indexes
    OMP_NUM_THREADS=1 python benchmarks/bench_search.py --rows --files 1000 10000 100000

Each recording of `rows` lasts an hour. The window embeddings are random points around 1,000 random centres, and the
queries are some of these embeddings. Each index size runs in separate processes, so that its peak memory does not
include another size. The index is compared with one matrix product, and with FAISS if it is installed, on the same
embeddings in memory.

Each recording of `files` is one window. The time to write their index without embedding is compared with that of
writing the same rows to LanceDB in one stream.
"""

from __future__ import annotations

import math
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, run_script

from modeling_supclap.encoding import AudioChunks
from modeling_supclap.search.index import write_batches
from modeling_supclap.search.store import IndexedFile, SoundIndex, Stamp

WINDOWS_PER_FILE = 1440  # an hour, every 2.5 s
NOISE = 0.5  # norm of the noise added to a centre of norm 1


def draw_files(number: int, centres: np.ndarray, longest: int = WINDOWS_PER_FILE) -> Iterator[IndexedFile]:
    """Yield recordings with `number` windows in total. Each embedding is a random centre plus noise."""
    generator = np.random.default_rng(1)
    for file in range(math.ceil(number / longest)):
        count = min(longest, number - file * longest)
        indices = generator.integers(len(centres), size=count)
        noise = generator.standard_normal((count, centres.shape[1]), np.float32)
        starts = 2.5 * np.arange(count)
        name = f"{file:05d}.wav"
        embeds = _unit(centres[indices] + noise * NOISE / math.sqrt(centres.shape[1]))
        yield IndexedFile(name, Stamp(1, 1, 1), name, AudioChunks(embeds, starts, starts + 5))


def build(folder: str, number: int, centres: np.ndarray) -> dict[str, float]:
    """Build an index, and return its times, memory, disk size and recall."""
    shutil.rmtree(folder, ignore_errors=True)
    store = SoundIndex(folder, centres.shape[1])

    before, started, worked = _peak_gigabytes(), time.perf_counter(), time.process_time()
    for batch in write_batches(draw_files(number, centres)):
        store.replace(batch)
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
        "recall@10 of the approximate search": math.nan if recall is None else recall,
        "peak memory of building, GB": _peak_gigabytes(),
    }


def build_short(folder: str, number: int, centres: np.ndarray) -> tuple[float, float]:
    """Write recordings of one window, and the same rows to LanceDB in one stream. Return both CPU times, ms of each."""
    import lancedb

    files, store = list(draw_files(number, centres, 1)), SoundIndex(f"{folder}/ours", centres.shape[1])
    started = time.process_time()
    for batch in write_batches(files):
        store.replace(batch)
    store.optimize()
    ours = time.process_time() - started

    batches = store.windows.to_arrow().to_batches(20_000)
    started = time.process_time()
    lancedb.connect(f"{folder}/plain").create_table("windows", iter(batches), schema=batches[0].schema).optimize()
    return 1000 * ours / number, 1000 * (time.process_time() - started) / number


def ask(folder: str, number: int) -> dict[str, float]:
    """Measure the time of searching all recordings, of searching one recording, and of the methods in `time_peers`."""
    import lancedb  # noqa: F401, imported before the timing starts

    started = time.perf_counter()
    store = SoundIndex(folder)
    rows = store.windows.count_rows()
    results = {"open, s": time.perf_counter() - started}

    vectors = store.draw_vectors(number, seed=2)
    kind = "approximate" if store.is_approximate else "exact"
    results |= _timed(f"{kind} search", vectors, lambda vector: store.nearest(vector, 10))
    file = f"{rows // WINDOWS_PER_FILE // 2:05d}.wav"
    results |= _timed("search in one recording", vectors, lambda vector: store.nearest(vector, 1440, within=file))
    results["peak memory of searching, GB"] = _peak_gigabytes()

    windows = store.windows.to_arrow()["vector"].combine_chunks().flatten().to_numpy()
    windows = windows.reshape(rows, store.dim)
    return results | time_peers(windows, np.asarray(vectors, np.float32), store.is_approximate)


def time_peers(windows: np.ndarray, queries: np.ndarray, approximate: bool) -> dict[str, float]:
    """Measure a search by one matrix product and, if FAISS is installed, with its flat index. If `approximate` is set,
    also measure the inverted-file index of FAISS.
    """
    results = _timed("the matrix product", list(queries), lambda query: len(windows @ query))
    try:
        import faiss
    except ImportError:
        return results

    flat = faiss.IndexFlatIP(windows.shape[1])
    flat.add(windows)
    results |= _timed("FAISS, flat", list(queries), lambda query: len(flat.search(query[None], 10)))
    if approximate:
        centres = faiss.IndexFlatIP(windows.shape[1])
        inverted = faiss.IndexIVFFlat(centres, windows.shape[1], 1024, faiss.METRIC_INNER_PRODUCT)
        inverted.train(windows[:: len(windows) // 65536])
        inverted.add(windows)
        inverted.nprobe = 32
        results |= _timed("FAISS, inverted file", list(queries), lambda query: len(inverted.search(query[None], 10)))
        same = zip(inverted.search(queries, 10)[1], flat.search(queries, 10)[1], strict=True)
        recalls = []
        for found, nearest in same:
            recalls.append(len(set(found) & set(nearest)) / 10)
        results["recall@10 of FAISS"] = float(np.mean(recalls))
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
    rows: Sequence[int] = (10_000, 100_000),
    dim: int = 512,
    queries: int = 20,
    folder: str | None = None,
    files: Sequence[int] = (1_000, 10_000, 100_000),
) -> list[Row]:
    """Build and search an index for each number of windows in `rows`, and write one for each number of `files`.

    Return table rows with the CPU time of building, the time of a search, the recall of approximate search, and the
    size on disk. If `folder` is set, the indexes are kept there.
    """
    centres = _unit(np.random.default_rng(0).normal(size=(1000, dim)))
    bounds = {10_000: "at most 5", 100_000: "at most 40", 1_000_000: "at most 50"}
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in rows:
            index = str(Path(folder or temporary) / f"{number}.index")
            figures: dict[str, float] = {}
            for work, option in ((build, (number, centres)), (ask, (queries,))):
                with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
                    figures |= pool.submit(work, index, *option).result()
            print(f"{number} windows of {dim} dimensions: {figures}", flush=True)

            size = f"{number:,} windows of {dim} numbers"
            results.append(Row("search", f"{size}: write and index", figures["both, s of one core"], unit="CPU s"))
            for name in figures:
                if name.endswith(", median, ms"):
                    kind = name.removesuffix(", median, ms")
                    bound = bounds.get(number, "") if kind in ("exact search", "approximate search") else ""
                    least = figures[f"{kind}, least, ms"]
                    results.append(Row("search", f"{size}: {kind}", least, figures[name], bound, "ms"))
                elif name.startswith("recall") and not math.isnan(figures[name]):
                    results.append(Row("search", f"{size}: {name}", figures[name], unit=""))
            disk = figures["disk, GB"] * 1e9 / (4 * number * dim)
            results.append(Row("search", f"{size}: size on disk / the embeddings", disk, None, "at most 2.1"))
        # last, because LanceDB's threads do not survive the forks above
        for number in files:
            ours, plain = build_short(f"{temporary}/{number}", number, centres)
            what = f"{number:,} short recordings: write and index"
            results.append(Row("search", f"{what}, each", ours, None, "at most 0.1", "CPU ms"))
            results.append(Row("search", f"{what} / LanceDB in one stream", ours / plain))
    return results


if __name__ == "__main__":
    run_script(measure, __doc__)
