"""Small folder of recordings in the layout of ESC-50, optionally with damaged files."""

from pathlib import Path

import numpy as np
import soundfile
from recordings import ESC50Clip, write_esc50

RATE_HZ = 22_050
CLASSES = ("dog", "rain", "rooster")


def sound(number: int, seconds: float = 0.6) -> np.ndarray:
    """Return a unique recording: noise with amplitude-modulated tones."""
    rng = np.random.default_rng(number)
    time = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    samples = 0.05 * rng.standard_normal(len(time))
    for _ in range(6):
        beat = 1 + np.sin(2 * np.pi * rng.uniform(0.5, 4) * time + rng.uniform(0, 6))
        samples += 0.05 * beat * np.sin(2 * np.pi * (rng.uniform(250, 3000) * time + rng.uniform(-300, 300) * time**2))
    return samples.astype(np.float32)


def make_folder(folder: Path, clips: int = 24, bad: bool = False, seconds: float = 0.6, first: int = 0) -> Path:
    """Write `clips` clips in four folds; with `bad`, clip 5 is junk, clip 9 is silent and clip 14 is truncated."""
    made = []
    for number in range(first, first + clips):
        fold = 1 + number % 4
        made.append(ESC50Clip(f"{fold}-{number}", fold, CLASSES[number % 3], 100 + number, sound(number, seconds)))
    write_esc50(folder, made, RATE_HZ)
    if bad:
        (folder / "audio" / "2-5.wav").write_bytes((folder / "audio" / "2-5.wav").read_bytes()[:60] + b"junk")
        soundfile.write(folder / "audio" / "2-9.wav", np.zeros(1000), RATE_HZ)
        content = (folder / "audio" / "3-14.wav").read_bytes()
        (folder / "audio" / "3-14.wav").write_bytes(content[: len(content) // 2])
    return folder
