"""Find unusable recordings before training, so that a long run does not fail at a corrupt file.

Bad clips are not replaced by other clips, because retrieval evaluation requires each clip exactly once.
"""

import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .atomic_files import file_sha256, read_json, write_json
from .audio import WHOLE, BadAudioError, MissingDecoderError, Segment, naming, open_recording, segment_of

ON_BAD_AUDIO = ("error", "skip", "report")
"""Actions for bad recordings: "error" raises, "skip" excludes their rows, "report" also logs each of them."""

R = TypeVar("R")
logger = logging.getLogger(__name__)


class BadClip(NamedTuple):
    """Row with a bad recording: its index in the dataset, its clip id, and the problem."""

    row: int
    clip_id: str
    reason: str


def measure_content(source: str | bytes, name: str) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a recording (a path or its bytes)."""
    if isinstance(source, bytes):
        return len(source), hashlib.sha256(source).hexdigest()
    with naming(name):
        return os.path.getsize(source), file_sha256(source)


def check_recording(source: str | bytes, name: str, min_seconds: float = 0.0, segment: Segment = WHOLE) -> float:
    """Check a recording or its segment, reading it in blocks, and return its duration in seconds.

    BadAudioError is raised as in `audio.read_recording`, and if the recording is shorter than `min_seconds`.
    """
    num_samples, is_sound = 0, False
    with naming(name):
        recording = open_recording(source, name, segment)
        for part in recording.parts():
            num_samples += len(part)
            is_sound = is_sound or bool(part.any())
    if not is_sound:
        raise BadAudioError(f"{name} is silent: every sample is zero")
    seconds = num_samples / recording.rate_hz
    if seconds < min_seconds:
        raise BadAudioError(_too_short(name, seconds, min_seconds))
    return seconds


def find_bad_audio(
    rows: Any, workers: int = 1, min_seconds: float = 0.0, memo: str | Path | None = None
) -> list[BadClip]:
    """Decode all recordings completely, and return the clips with unusable recordings.

    Args:
        rows: Rows in the format of `schema.Row`. Of int16 samples, only the length is checked, because `prepare.py` has
            already checked them.
        workers: Number of processes that read recordings.
        memo: JSON file that caches the results; only new and changed recordings are read.

    Raises MissingDecoderError if FFmpeg is required but PyAV is not installed, because the recordings may be fine.
    """
    known: dict[str, str | None] = {}
    if memo is not None and Path(memo).is_file():
        known = read_json(memo)
    seconds = _stored_seconds(rows)
    states = {row: _state(rows[row], min_seconds) for row in np.flatnonzero(np.isnan(seconds)).tolist()}

    new = [row for row, state in states.items() if state not in known]
    if new:
        from .progress import progress  # only for checks, not for all who import the errors of this module

        problems = map_in_order(partial(_problem, min_seconds=min_seconds), _select(rows, new), workers)
        try:
            for row, problem in zip(new, progress(problems, "checking", len(new), "recordings"), strict=True):
                known[states[row]] = problem
        finally:  # a check that is stopped continues here
            if memo is not None:
                Path(memo).parent.mkdir(parents=True, exist_ok=True)
                write_json(memo, known)

    reasons = {row: known[state] for row, state in states.items()}
    for row in np.flatnonzero(seconds < min_seconds).tolist():
        reasons[row] = _too_short(rows[row]["audio_path"], seconds[row], min_seconds)
    return [BadClip(row, rows[row]["clip_id"], reason) for row, reason in sorted(reasons.items()) if reason]


def filter_bad_audio(
    rows: Any, on_bad_audio: str, workers: int = 1, memo: str | Path | None = None, min_seconds: float = 0.0
) -> Any:
    """Remove the rows with bad recordings (see `find_bad_audio`) from a dataset or list.

    Args:
        on_bad_audio: "error" returns all rows unchecked, because reading a bad recording raises an error later. "skip"
            removes bad rows and logs their number. "report" also logs the problem of each bad row.

    Raises BadAudioError if all recordings are bad, and ValueError if `on_bad_audio` is unknown.
    """
    if on_bad_audio not in ON_BAD_AUDIO:
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; expected one of {', '.join(ON_BAD_AUDIO)}")
    if on_bad_audio == "error":
        return rows

    bad = find_bad_audio(rows, workers, min_seconds, memo)
    if not bad:
        return rows
    if len(bad) == len(rows):
        raise BadAudioError(f"all {len(rows)} recordings are bad; the first: {bad[0].reason}")

    logger.warning("left out %d of %d clips with bad recordings", len(bad), len(rows))
    if on_bad_audio == "report":
        for clip in bad:
            logger.warning("clip %r: %s", clip.clip_id, clip.reason)

    usable = np.delete(np.arange(len(rows)), [clip.row for clip in bad]).tolist()
    return _select(rows, usable)


def map_in_order(function: Callable[[Any], R], rows: Sequence[Any], workers: int = 1) -> Iterator[R]:
    """Apply a function to each row, optionally in several processes, and yield the results in row order.

    Torch uses one thread in every process, so that the results do not depend on the number of processes. With several
    processes, the function must be picklable. If a process dies, for example because it runs out of memory, a
    RuntimeError is raised.

    >>> list(map_in_order(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    import torch  # takes seconds; not needed for --help
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {"batch_size": None, "collate_fn": partial(_apply, function)}
    if workers > 1:
        options |= {"num_workers": workers, "prefetch_factor": 8, "worker_init_fn": exit_with_parent}
    source: Any = rows
    results = DataLoader(source, **options)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for result in results:
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        torch.set_num_threads(threads)


def exit_with_parent(worker: int) -> None:
    """Make a `DataLoader` worker exit when its parent dies, and ignore Ctrl-C. This is a `worker_init_fn`.

    Otherwise a worker waits forever to deliver its results if the parent is killed. A worker ignores SIGTERM unless its
    parent sends it, because schedulers send it to all processes of a run, and the run must still save a checkpoint.
    """
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait_for_sigterm() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=wait_for_sigterm, daemon=True).start()

    def exit_if_orphaned() -> None:
        if os.getppid() != parent:
            os._exit(1)

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (EOFError, ConnectionError)):
            sys.__excepthook__(kind, error, trace)

    Finalize(None, exit_if_orphaned, exitpriority=100)  # before the finalizer of the queue, which waits
    sys.excepthook = print_error  # called by the thread that delivers tensors


def _apply(function: Callable[[Any], R], row: Any) -> R | Exception:
    try:
        return function(row)
    except Exception as error:
        return error  # raised by the parent; `DataLoader` would hide the message in the worker's traceback


def source_of(row: Mapping[str, Any]) -> str | bytes:
    """Return the audio bytes of a row, or the path of its audio file if the row contains no bytes.

    Raises ValueError if the row contains int16 samples, because the original recording is then not available.
    """
    if row.get("samples") is not None:
        raise ValueError(
            f"clip {row['clip_id']!r} is already stored as int16 samples; prepare the original recordings"
        )
    audio = row.get("audio") or {}
    return audio.get("bytes") or row["audio_path"]


def _problem(row: Mapping[str, Any], min_seconds: float) -> str | None:
    """Return the error message for a bad recording, without the path of its folder; return None if it is usable."""
    try:
        check_recording(source_of(row), row["audio_path"], min_seconds, segment_of(row))
    except MissingDecoderError:
        raise
    except BadAudioError as error:
        return str(error).replace(os.path.join(os.path.dirname(row["audio_path"]), ""), "")
    return None


def _too_short(name: str, seconds: float, min_seconds: float) -> str:
    return f"{name} lasts {seconds:.4f} s; the model requires at least {min_seconds} s"


def _stored_seconds(rows: Any) -> np.ndarray:
    """Compute the length of each row in seconds from its number of int16 samples; NaN if a row has no samples."""
    names = ["samples", "sampling_rate_hz"]
    if isinstance(rows, list):
        columns = {}
        for name in names:
            columns[name] = [row.get(name) for row in rows]
        table = pa.table(columns)
    elif set(names) <= set(getattr(rows, "column_names", ())):
        table = rows.data.select(names)
    else:
        return np.full(len(rows), np.nan)
    num_bytes, rates = pc.binary_length(table[0].cast(pa.binary())), table[1].cast(pa.float64())
    seconds = pc.divide(num_bytes, pc.multiply(2.0, rates)).to_numpy()
    indices = getattr(rows, "_indices", None)
    return seconds if indices is None else seconds[indices.column(0).to_numpy()]


def _select(rows: Any, indices: Sequence[int]) -> Any:
    return rows.select(indices) if hasattr(rows, "select") else [rows[index] for index in indices]


def _state(row: Mapping[str, Any], min_seconds: float) -> str:
    """Return the memo key of a row: a hash of its id, segment, path, size and mtime of the file, and `min_seconds`."""
    about = f"{row['clip_id']}\0{row['audio_path']}\0{min_seconds}\0{segment_of(row)}"
    digest = hashlib.blake2b(about.encode(), digest_size=12)
    source = source_of(row)
    if isinstance(source, bytes):
        digest.update(source)
    elif os.path.exists(source):
        state = os.stat(source)
        digest.update(f"{state.st_size}:{state.st_mtime_ns}".encode())
    return digest.hexdigest()
