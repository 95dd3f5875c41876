"""How a prepared set keeps the audio of a clip: as it came, as FLAC or int16 samples at one rate, or not at all."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import soundfile
from datasets import Value

from .audio import BadAudioError, MissingDecoderError, load_clip, read_audio, to_int16


class Storage(NamedTuple):
    """One way to keep audio.

    Attributes:
        codec: "none", the row's path only; "file", the bytes of the file; "flac" or "int16", decoded and resampled.
        sampling_rate_hz: Of "flac" and "int16".
        meaning: What `--help` says.
    """

    codec: str
    sampling_rate_hz: int | None
    meaning: str


STORAGES = {
    "original": Storage("file", None, "the files' own bytes"),
    "flac16k": Storage("flac", 16000, "FLAC at 16 kHz, mono, 16 bits: about the size of the Vorbis file"),
    "flac48k": Storage("flac", 48000, "the same at 48 kHz, for CLAP"),
    "int16": Storage("int16", 16000, "samples at 16 kHz, mono: nothing to decode, the fastest to train from"),
    "reference": Storage("none", None, "no audio, only where the files are"),
}
"""The values of `prepare.py --storage`."""


@dataclass(frozen=True)
class Packed:
    """What became of one recording.

    Attributes:
        columns: What to add to its row; see `audio_features`.
        seconds: Its length.
        source_bytes: The size of the file.
        source_sha256: Of the file, in hex.
        problem: Why it cannot be used, if so.
    """

    columns: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    source_bytes: int = 0
    source_sha256: str = ""
    problem: str | None = None


def audio_features(storage: str) -> dict[str, Any]:
    """The columns that a way of storage adds to a row.

    Args:
        storage: A key of `STORAGES`.

    Returns:
        `datasets` features by name. Files are a struct of bytes and path: it loads without torchcodec, which
        `datasets.Audio` does not, and `cast_column("audio", Audio())` makes it one.

    >>> audio_features("int16")
    {'samples': Value('binary'), 'sampling_rate_hz': Value('int32')}
    """
    codec = STORAGES[storage].codec
    if codec == "int16":
        return {"samples": Value("binary"), "sampling_rate_hz": Value("int32")}
    return {} if codec == "none" else {"audio": {"bytes": Value("binary"), "path": Value("string")}}


def source_of(row: Mapping[str, Any]) -> str | bytes:
    """The file of a row, or its bytes where the row holds them.

    Raises:
        ValueError: The row holds samples only.
    """
    if row.get("samples") is not None:
        raise ValueError(f"clip {row['clip_id']!r} is stored as int16 samples already; prepare from the recordings")
    audio = row.get("audio") or {}
    return audio.get("bytes") or row["audio_path"]


def pack(source: str | bytes, name: str, storage: str) -> Packed:
    """Reads a recording, all of it, so that what is wrong with it shows now, and makes what is to be stored.

    Args:
        source: The file, or its bytes.
        name: What errors call it, the path that its row is to have.
        storage: A key of `STORAGES`.

    Returns:
        The columns, or the problem.

    Raises:
        MissingDecoderError: FFmpeg is needed and missing, which is no fault of the recording.
    """
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        columns, seconds = _columns(content, name, STORAGES[storage])
    except MissingDecoderError:
        raise
    except (BadAudioError, OSError) as error:
        return Packed(problem=str(error) if isinstance(error, BadAudioError) else f"{name}: {error.strerror}")
    return Packed(columns, seconds, len(content), hashlib.sha256(content).hexdigest())


def _columns(content: bytes, name: str, storage: Storage) -> tuple[dict[str, Any], float]:
    file_name = PurePosixPath(name).name
    if storage.sampling_rate_hz is None:
        waveform, rate_hz = read_audio(content, name=name)
        if not waveform.any():
            raise BadAudioError(f"{name} is silent: every sample is zero")
        columns = {"audio": {"bytes": content, "path": file_name}} if storage.codec == "file" else {}
        return columns, len(waveform) / rate_hz
    rate_hz = storage.sampling_rate_hz
    samples = to_int16(load_clip(content, rate_hz, name=name))
    if not samples.any():
        raise BadAudioError(f"{name} is silent: it is too quiet for 16 bits")
    if storage.codec == "int16":
        return {"samples": samples.tobytes(), "sampling_rate_hz": rate_hz}, len(samples) / rate_hz
    encoded = io.BytesIO()
    soundfile.write(encoded, samples, rate_hz, format="FLAC", subtype="PCM_16")
    path = str(PurePosixPath(file_name).with_suffix(".flac"))
    return {"audio": {"bytes": encoded.getvalue(), "path": path}}, len(samples) / rate_hz
