"""Search index for a folder of recordings: embeddings of overlapping windows, with start and end times.

The index is a LanceDB database in a local folder or in object storage. The window table contains the embeddings.
From 200,000 windows, it has an approximate nearest-neighbour index. The file table contains the size, times, SHA-256
and read error of each file, so that a new run skips unchanged files and continues after a crash.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from modeling_supclap.datasets_scripts.atomic_files import file_sha256, folder_lock
from modeling_supclap.datasets_scripts.audio import MissingDecoderError
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.remote_files import local_folder

from ..audio_input import Recording
from ..encoding import AudioChunks
from ..evaluation import EmbeddingModel
from ..evaluation.vectors import require_storage
from ..evaluation.windows import list_recordings
from .store import FILES_SCHEMA, IndexedFile, SoundIndex, Stamp

# Limits of a write. A write costs as much as thousands of windows, and a killed run loses what is not written.
_WINDOWS_AT_ONCE = 20_000
_SECONDS_AT_ONCE = 60.0
_FEWEST_WRITES = 16  # before the first compaction
_MOST_COMPARED = 20  # recordings to compare after a move of the folder
# Stamp for a file that was deleted or changed during reading, or was unreadable. The next run reads the file again.
_UNKNOWN = Stamp(0, 0, 0)


@dataclass
class IndexReport:
    """Summary of a `build_index` call: numbers of files and windows, and the duration of the call.

    Attributes:
        added: Number of new files. Unreadable files are not counted as added, changed or unchanged.
        changed: Number of files with changed content, or that were unreadable before.
        removed: Number of files that no longer exist.
        unreadable: Unreadable files, `{path: error message}`.
        recall: Recall@10 of the approximate index compared with exact search. None if search is exact or no windows
            were added.
    """

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    windows: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    recall: float | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.added} files added, {self.changed} changed, {self.removed} removed, {self.unchanged} unchanged",
            f"{self.windows} windows in the index ({self.seconds:.1f} s)",
        ]
        if self.recall is not None:
            lines.append(f"the approximate index finds {100 * self.recall:.1f} % of the ten best windows")
        for file, problem in self.unreadable.items():
            lines.append(f"cannot read {file}: {problem}")
        return "\n".join(lines)


def build_index(
    model: EmbeddingModel,
    folder: str | Path,
    index: str | Path,
    window_seconds: float = 5.0,
    hop_seconds: float = 2.5,
    batch_size: int = 32,
    num_workers: int | None = None,
    show_progress_bar: bool = True,
    process: tuple[int, int] = (0, 1),
    barrier: Callable[[], None] = lambda: None,
    precision: str = "float32",
    width: int | None = None,
    channel: int | None = None,
) -> IndexReport:
    """Build or update a search index: embed new and changed files, and remove deleted files.

    Args:
        folder: Folder with recordings, including its subfolders. A folder at an fsspec address, such as
            "s3://bucket/sounds", is downloaded into the cache of `datasets`.
        index: Folder or URL of the index. It is created if it does not exist.
        window_seconds: Window length in seconds, at most the model's maximum.
        hop_seconds: Time between the starts of consecutive windows in seconds, at most `window_seconds`.
        num_workers: Number of threads that prefetch files. None: use one per core, at most 8.
        process: Tuple of the rank and the number of processes. Each process embeds a part of the files.
        barrier: Function that waits for all processes.
        precision: Form of the stored vectors: "float32", "int8" or "binary" (see `evaluation.vectors`). int8 and binary
            vectors are searched in memory, in indexes of any size.
        width: Number of first values of the embeddings to store, for models with `matryoshka_widths`. None: all.
        channel: Channel of each recording to embed, from 0. None: the mean of all channels.

    Returns:
        Summary of the changes by all processes, in rank 0. In other processes, only `seconds` is set.

    Raises:
        InUseError: Another process is writing to the index.
        FileNotFoundError: The folder does not exist or contains no recordings.
        ValueError: The window or hop is invalid, or the index was built with another model, window or hop, or from
            another folder. A folder that was moved is the same folder: its recordings have the same names and content.
    """
    model.chunk_samples(window_seconds)  # raises if the model does not support this length
    if not 0 < hop_seconds <= window_seconds:
        raise ValueError(f"hop_seconds is {hop_seconds}; it must be positive and at most {window_seconds=}")

    report, started = IndexReport(), time.perf_counter()
    rank, processes = process
    if rank:
        barrier()
    root = local_folder(folder)
    if not rank:
        barrier()
    is_locked = rank == 0 and "://" not in str(index)
    with folder_lock(index) if is_locked else nullcontext():
        _, files = list_recordings(root)
        place = str(root.resolve())
        if rank == 0:
            settings = {"window_seconds": str(float(window_seconds)), "hop_seconds": str(float(hop_seconds))}
            settings["channel"] = str(channel)
            _create_or_check(model, index, place, settings, precision, width)
        barrier()

        store = SoundIndex(index)
        known = store.known_files()
        _require_same_folder(store, known, place, files)
        barrier()
        if rank == 0:
            store.move(place)
            deleted = sorted(store.names - files.keys())
            store.remove(deleted)
            report.removed = len(deleted)
        barrier()

        own = sorted(files)[rank::processes]
        todo = _find_changed(store, known, {name: files[name] for name in own})
        embed = partial(
            model.chunk_embeddings,
            chunk_seconds=window_seconds,
            hop_seconds=hop_seconds,
            batch_size=batch_size,
            num_workers=min(8, os.cpu_count() or 1) if num_workers is None else max(1, num_workers),
            on_bad_audio="skip",
            refuse_silence=True,
        )
        entries = _embed_files(embed, files, todo, channel)
        bar = progress(entries, "indexing", len(todo), "files", not show_progress_bar or rank > 0)
        _write(store, bar, compacts=processes == 1)
        barrier()

        if rank == 0:
            report.recall = store.optimize()
            _count_changes(report, store, known)
        report.seconds = time.perf_counter() - started
        return report


def _write(store: SoundIndex, entries: Iterable[IndexedFile], compacts: bool) -> None:
    """Write entries in batches. Each write is a fragment; they are merged when their number has doubled."""
    for number, batch in enumerate(write_batches(entries), 1):
        store.replace(batch)
        if compacts and number >= _FEWEST_WRITES and number.bit_count() == 1:
            store.compact()


def _create_or_check(
    model: EmbeddingModel, index: str | Path, root: str, settings: dict[str, str], precision: str, width: int | None
) -> None:
    """Create the index, or raise ValueError if it was built with another model or other settings."""
    dim = model.dim
    require_storage(dim, precision, width)
    about = {"model": model.name, "fingerprint": model.fingerprint or "", **settings}
    about |= {"precision": precision, "width": str(width or dim), "dim": str(dim)}
    whole = {"precision": "float32", "width": str(dim), "dim": str(dim)}  # of earlier versions
    stored = {**whole, **SoundIndex(index, dim, {**about, "folder": root}).about}
    if stored["fingerprint"] == about["fingerprint"] != "":
        about["model"] = stored["model"]  # the same model under another name
    for key, value in about.items():
        if stored.get(key, "None") != value:
            raise ValueError(f"{index} has {key} {stored.get(key)!r}, not {value!r}; use another, or delete it")


def _require_same_folder(
    store: SoundIndex, known: Mapping[str, dict[str, Any]], root: str, files: Mapping[str, Path]
) -> None:
    """Raise ValueError if `root` is neither the indexed folder nor the place to which it has moved.

    Recorders write equal names at each site, so equal names are not enough: the recordings must be the same.
    """
    stored = store.about["folder"]
    if stored == root or not known:
        return
    names = sorted(known.keys() & files.keys())[:_MOST_COMPARED]
    same = sum(_is_same(known[name], files[name]) for name in names)
    is_left = any(Path(stored, name).is_file() for name in known) and not os.path.samefile(stored, root)
    if is_left or not same or 2 * same < len(names):
        reason = f"{stored} still has its recordings" if is_left else "the recordings are others"
        raise ValueError(
            f"{store.folder} is an index of {stored}, not of {root}: {reason}; use another --index, or index a folder "
            "that contains both"
        )


def _is_same(row: Mapping[str, Any], path: Path) -> bool:
    """Return whether a file has the size and times, or the content, of its row in the file table."""
    return _stamp_of(row) == _stamp(path) != _UNKNOWN or "" != row["digest"] == _digest(path)


def _stamp_of(row: Mapping[str, Any]) -> Stamp:
    return Stamp(row["size"], row["modified_ns"], row["changed_ns"])


def _find_changed(store: SoundIndex, known: Mapping[str, dict[str, Any]], files: Mapping[str, Path]) -> list[str]:
    """Return the names of new and changed files. Store the times of files that have only new times."""
    changed, moved = [], []
    for name, path in files.items():
        row, stamp = known.get(name), _stamp(path)
        if row is None or not _is_same(row, path):
            changed.append(name)
        elif stamp != _stamp_of(row):
            moved.append({**row, **stamp._asdict()})
    if moved:
        table = pa.Table.from_pylist(moved, schema=FILES_SCHEMA)
        store.files.merge_insert("file").when_matched_update_all().execute(table)
    return changed


def _count_changes(report: IndexReport, store: SoundIndex, known: Mapping[str, dict[str, Any]]) -> None:
    """Set the numbers of windows, and of files that are added, changed, unchanged and unreadable."""
    report.windows = store.windows.count_rows()
    for name, row in store.known_files().items():
        if row["problem"]:
            report.unreadable[name] = row["problem"]
        elif name not in known:
            report.added += 1
        elif known[name]["digest"] == row["digest"]:
            report.unchanged += 1
        else:
            report.changed += 1


def write_batches(entries: Iterable[IndexedFile]) -> Iterator[list[IndexedFile]]:
    """Yield the entries of one write: of about `_WINDOWS_AT_ONCE` windows, or of `_SECONDS_AT_ONCE`."""
    batch: list[IndexedFile] = []
    count, started = 0, time.monotonic()
    for entry in entries:
        batch.append(entry)
        count += max(1, len(entry.windows.onset_seconds))
        if count >= _WINDOWS_AT_ONCE or time.monotonic() - started > _SECONDS_AT_ONCE:
            yield batch
            batch, count, started = [], 0, time.monotonic()
    if batch:
        yield batch


def _embed_files(
    embed: Callable[[Iterable[Recording]], Iterable[AudioChunks]],
    files: Mapping[str, Path],
    names: Sequence[str],
    channel: int | None,
) -> Iterator[IndexedFile]:
    """Embed files and yield one `IndexedFile` per name, in order."""
    before: deque[tuple[Stamp, str]] = deque()

    def recordings() -> Iterator[Recording]:
        for name in names:
            before.append((_stamp(files[name]), _digest(files[name])))
            yield Recording(str(files[name]), None, name, channel)

    for name, windows in zip(names, embed(recordings()), strict=True):
        stamp, digest = before.popleft()
        error = windows.error
        # If the file changed during reading, or FFmpeg is missing, do not store its stamp and digest, so that the next
        # run reads it again.
        if _stamp(files[name]) != stamp or isinstance(error, (OSError, MissingDecoderError)):
            stamp, digest = _UNKNOWN, ""
        # without the folder, which may move, and which the page does not show
        problem = "" if error is None else (str(error) or repr(error)).replace(str(files[name]), name)
        yield IndexedFile(name, stamp, digest, windows, problem)


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return _UNKNOWN
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError:
        return ""
