"""Recordings that cannot be used, found before they are needed: a training run must not stop in the middle of a night.

They are looked for once, ahead of the run, and their rows leave the split. Another clip in the place of a bad one, as
batches are made, would count twice, and evaluation, which ranks every clip once, could not do it at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .atomic_files import write_json
from .audio import BadAudioError, MissingDecoderError, measure_audio, read_int16, use_threads

ON_BAD_AUDIO = ("error", "skip", "report")
"""What to do with recordings that cannot be used: stop at the first; leave them out; also name each."""

R = TypeVar("R")
logger = logging.getLogger(__name__)


class BadClip(NamedTuple):
    """A row whose recording cannot be used; `place` is that of the row."""

    place: int
    clip_id: str
    reason: str


def read_recording(source: str | bytes, name: str, rate_hz: int) -> np.ndarray:
    """The samples of a recording, a file or its bytes, as `read_int16` gives them: whatever is wrong with it shows now.

    Raises:
        BadAudioError: The recording is missing, corrupt, truncated, empty or silent, or it makes a decoder fail in any
            other way; the message calls it by the name.
        MissingDecoderError: FFmpeg is needed and missing, which is no fault of the recording.
    """
    with _naming(name):
        samples, is_sound = read_int16(source, name, rate_hz)
    if not samples.any():
        why = "it is too quiet for 16 bits" if is_sound else "every sample is zero"
        raise BadAudioError(f"{name} is silent: {why}")
    return samples


def measure_content(source: str | bytes, name: str) -> tuple[int, str]:
    """The bytes of a recording and their SHA-256, read a part at a time; errors as of `read_content`."""
    if isinstance(source, bytes):
        return len(source), hashlib.sha256(source).hexdigest()
    with _naming(name), open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def read_content(source: str | bytes, name: str) -> bytes:
    """The bytes of a recording; a file that cannot be read is a `BadAudioError` that calls it by the name."""
    with _naming(name):
        return source if isinstance(source, bytes) else Path(source).read_bytes()


def check_recording(source: str | bytes, name: str, min_seconds: float = 0.0) -> float:
    """The seconds of a recording, which is checked as by `read_recording`, but kept in memory a part at a time.

    Args:
        source: The file, or its bytes.
        name: What errors call it.
        min_seconds: The shortest recording that will do.
    """
    with _naming(name):
        seconds, is_sound = measure_audio(source, name)
    if not is_sound:
        raise BadAudioError(f"{name} is silent: every sample is zero")
    if seconds < min_seconds:
        raise BadAudioError(f"{name} lasts {seconds:.4f} s; the model needs {min_seconds} s")
    return seconds


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Within it, whatever goes wrong is an error of this recording."""
    try:
        yield
    except BadAudioError:
        raise
    except OSError as error:
        raise BadAudioError(f"{name}: {error.strerror}" if error.strerror else str(error)) from error
    except Exception as error:  # a header that declares 2^36 samples is a MemoryError: one file must not end the run
        raise BadAudioError(f"{name} cannot be decoded: {type(error).__name__}: {error}") from error


def find_bad_audio(
    rows: Any, workers: int = 1, min_seconds: float = 0.0, memo: str | Path | None = None
) -> list[BadClip]:
    """Reads every recording from end to end.

    Args:
        rows: Rows of the schema. Those stored as samples were checked when they were prepared, and are passed over.
        workers: Processes that read.
        min_seconds: The shortest recording that will do.
        memo: A JSON file of what was found: only the recordings are read that it does not know in their present state.

    Returns:
        The clips that cannot be used: missing, corrupt, truncated, empty or silent. The same for any number of workers.

    Raises:
        MissingDecoderError: FFmpeg is needed and missing, which is no fault of the recordings.
    """
    if _are_samples(rows):
        return []

    memo = None if memo is None else Path(memo)
    known: dict[Any, str | None] = {}
    states: list[Any] = list(range(len(rows)))
    if memo is not None:
        known = json.loads(memo.read_text(encoding="utf-8")) if memo.is_file() else {}
        states = list(map(partial(_state, min_seconds=min_seconds), rows))

    new = [place for place, state in enumerate(states) if state not in known]
    if new:
        problems = map_in_order(partial(_problem, min_seconds=min_seconds), _select(rows, new), workers)
        for place, problem in zip(new, problems, strict=True):
            # The memo lies beside the results of a run, for others to read: it names no folder of this machine.
            folder = os.path.dirname(str(rows[place]["audio_path"]))
            known[states[place]] = problem and problem.replace(f"{folder}{os.sep}", "")
    if new and memo is not None:
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, known)

    bad = []
    for place, state in enumerate(states):
        problem = known[state]
        if problem:
            bad.append(BadClip(place, rows[place]["clip_id"], problem))
    return bad


def filter_bad_audio(
    rows: Any, on_bad_audio: str, workers: int = 1, memo: str | Path | None = None, min_seconds: float = 0.0
) -> Any:
    """The rows whose recordings can be used, in their order.

    Args:
        rows: Rows of the schema, a `datasets.Dataset` or a list.
        on_bad_audio: "error" gives all rows back unread, since reading one raises; "skip" leaves bad ones out and says
            how many; "report" also names each of them in the log.
        workers: Processes that read.
        memo: A JSON file of what was found, so that the next process or run need not look again, but for files that
            have changed.
        min_seconds: The shortest recording that will do.

    Returns:
        The same rows, or fewer.

    Raises:
        BadAudioError: No row is left.
        ValueError: `on_bad_audio` is none of the three.
    """
    if on_bad_audio not in ON_BAD_AUDIO:
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; it must be one of {', '.join(ON_BAD_AUDIO)}")
    if on_bad_audio == "error" or _are_samples(rows):
        return rows

    bad = find_bad_audio(rows, workers, min_seconds, memo)
    if not bad:
        return rows
    if len(bad) == len(rows):
        raise BadAudioError(f"none of {len(rows)} recordings can be used; the first: {bad[0].reason}")

    logger.warning("left out %d of %d clips whose recordings cannot be used", len(bad), len(rows))
    if on_bad_audio == "report":
        for clip in bad:
            logger.warning("clip %r: %s", clip.clip_id, clip.reason)

    kept = np.delete(np.arange(len(rows)), [clip.place for clip in bad]).tolist()
    return _select(rows, kept)


def map_in_order(function: Callable[[Any], R], rows: Sequence[Any], workers: int = 1) -> Iterator[R]:
    """Applies a function to each row, in this process or in several, and gives the results in the order of the rows.

    Torch runs on one thread everywhere, so that the number of processes changes the speed and no bit.

    Args:
        function: Takes a row; a function of a module, or a `functools.partial` of one.
        rows: Any sequence; a row is read by the process that needs it, a few rows ahead of the results.
        workers: The number of processes; 1 is this one.

    Yields:
        The results.

    Raises:
        RuntimeError: A process died, perhaps for want of memory.

    >>> list(map_in_order(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    from torch.utils.data import DataLoader  # takes seconds, which a help need not wait for

    processes: dict[str, Any] = {}
    if workers > 1:
        processes = {"num_workers": workers, "prefetch_factor": 8, "worker_init_fn": exit_with_parent}
    applied: Any = _Applied(function, rows)
    results = DataLoader(applied, batch_size=None, collate_fn=_as_it_is, **processes)

    threads = use_threads(1)
    try:
        for result in results:
            if isinstance(result, _Failure):
                raise result.error
            yield result
    finally:
        use_threads(threads)


def exit_with_parent(worker: int, then: Callable[[int], None] | None = None) -> None:
    """Lets a worker of a `DataLoader` end with its parent and by nothing else.

    Where the parent was killed, it would wait for ever to hand over many results. Ctrl-C is for the parent to answer,
    and a tensor that the parent then no longer takes is no error to tell of.

    Args:
        worker: Its number, which `worker_init_fn` is given.
        then: Another `worker_init_fn` to call.
    """
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave() -> None:
        if os.getppid() != parent:
            os._exit(1)

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (EOFError, ConnectionError)):
            sys.__excepthook__(kind, error, trace)

    Finalize(None, leave, exitpriority=100)  # ahead of the queue's own, which waits
    sys.excepthook = tell  # what the thread that hands tensors over calls
    if then is not None:
        then(worker)


class _Failure(NamedTuple):
    """What a function raised: `DataLoader` itself would bury the message in the traceback of its worker."""

    error: Exception


class _Applied:
    def __init__(self, function: Callable[[Any], Any], rows: Sequence[Any]) -> None:
        self.function, self.rows = function, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        try:
            return self.function(self.rows[place])
        except Exception as error:
            return _Failure(error)


def _as_it_is(result: Any) -> Any:
    return result  # the default of `DataLoader` makes tensors of arrays


def source_of(row: Mapping[str, Any]) -> str | bytes:
    """The file of a row, or its bytes where the row holds them.

    Raises:
        ValueError: The row holds samples only.
    """
    if row.get("samples") is not None:
        raise ValueError(f"clip {row['clip_id']!r} is stored as int16 samples already; prepare from the recordings")
    audio = row.get("audio") or {}
    return audio.get("bytes") or row["audio_path"]


def _are_samples(rows: Any) -> bool:
    return len(rows) > 0 and rows[0].get("samples") is not None


def _problem(row: Mapping[str, Any], min_seconds: float) -> str | None:
    """What is wrong with the recording of a row, if anything."""
    try:
        check_recording(source_of(row), row["audio_path"], min_seconds)
    except MissingDecoderError:
        raise
    except BadAudioError as error:
        return str(error)
    return None


def _select(rows: Any, places: Sequence[int]) -> Any:
    return rows.select(places) if hasattr(rows, "select") else [rows[place] for place in places]


def _state(row: Mapping[str, Any], min_seconds: float) -> str:
    """A hash of which recording a row has, of the state of its file, and of what is asked of it."""
    digest = hashlib.blake2b(f"{row['clip_id']}\0{row['audio_path']}\0{min_seconds}".encode(), digest_size=12)
    source = source_of(row)
    if isinstance(source, bytes):
        digest.update(source)
    elif os.path.exists(source):
        state = os.stat(source)
        digest.update(f"{state.st_size}:{state.st_mtime_ns}".encode())
    return digest.hexdigest()
