"""Recordings in a format that browsers play, and their waveforms."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import soundfile
from huggingface_hub.constants import HF_HOME

from modeling_supclap.datasets_scripts.atomic_files import atomic_write

from ..audio_input import Recording

FOLDER = Path(HF_HOME, "supclap-page")
"""Folder of the files of pages. It is in the user's cache, where a killed page leaves nothing to other users."""

KEPT_SECONDS = 3600
"""Time after which the next page, or the next copy, deletes a file in `FOLDER`."""

# Formats of libsndfile that Chromium, Firefox and Safari play. They do not play AIFF, AU, CAF or W64.
_PLAYED = ("FLAC", "OGG", "MP3", "MPEG")
_PLAYED_WAV = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ULAW", "ALAW")
_BLOCK_FRAMES = 1 << 20
_PEAKS = 200  # lines in a waveform


def prune(folder: Path) -> None:
    """Create a folder that only this user can read, or delete its old files, such as those of a killed page."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):  # files before their folders
        with suppress(OSError):  # folders that are not empty stay
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                remove = path.rmdir if path.is_dir() else path.unlink
                remove()


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
        prune(folder)
        with (
            atomic_write(copy) as written,
            soundfile.SoundFile(written, "w", info.samplerate, info.channels, "PCM_16", format="WAV") as target,
        ):
            for block in soundfile.blocks(path, _BLOCK_FRAMES):
                target.write(block)
    return copy


def draw_waveform(path: Path, rate_hz: int, start_seconds: float, seconds: float) -> str:
    """Draw the peaks of a part of a recording as SVG. The highest peak has the full height."""
    start, stop = round(start_seconds * rate_hz), round((start_seconds + seconds) * rate_hz)
    waveform = Recording(path, None, path.name).read(rate_hz, start, stop)
    peaks = np.array([np.abs(part).max(initial=0) for part in np.array_split(waveform, _PEAKS)])
    heights = 48 * peaks / max(peaks.max(), 1e-9)
    lines = "".join(f"M{x} {50 - height:.1f}V{51 + height:.1f}" for x, height in enumerate(heights))
    box = f'viewBox="0 0 {_PEAKS} 101" preserveAspectRatio="none"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}><path d="{lines}" stroke="#868e96"/></svg>'
