"""Recordings in a format that browsers play."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import soundfile

# Formats of libsndfile that Chromium, Firefox and Safari play. They do not play AIFF, AU, CAF or W64.
_PLAYED = ("FLAC", "OGG", "MP3", "MPEG")
_PLAYED_WAV = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ULAW", "ALAW")
_BLOCK_FRAMES = 1 << 20


def playable_file(path: Path, folder: Path) -> Path:
    """Return a file that a browser plays: the recording itself, or a 16-bit WAV copy in `folder`.

    The copy is written once for each version of the recording. Formats that only FFmpeg reads (m4a, webm) are returned
    unchanged: most browsers play them.
    """
    try:
        info = soundfile.info(path)
    except soundfile.LibsndfileError:
        return path
    if info.format in _PLAYED or (info.format in ("WAV", "WAVEX") and info.subtype in _PLAYED_WAV):
        return path

    state = path.stat()
    name = hashlib.sha256(f"{path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:32]
    copy = folder / f"{name}.wav"
    if not copy.is_file():
        written = copy.with_suffix(f".{os.getpid()}.part")
        with soundfile.SoundFile(written, "w", info.samplerate, info.channels, "PCM_16", format="WAV") as target:
            for block in soundfile.blocks(path, _BLOCK_FRAMES):
                target.write(block)
        os.replace(written, copy)
    return copy
