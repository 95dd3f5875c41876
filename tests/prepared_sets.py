"""A small folder of recordings in ESC-50's layout, some of them bad, to be prepared."""

import csv
from pathlib import Path

import numpy as np
import soundfile

RATE_HZ = 22_050
CLASSES = ("dog", "rain", "rooster")


def sound(number: int, seconds: float = 0.6) -> np.ndarray:
    """A recording unlike any other: a noise of its own with tones of its own that come and go."""
    rng = np.random.default_rng(number)
    time = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    samples = 0.05 * rng.standard_normal(len(time))
    for _ in range(6):
        beat = 1 + np.sin(2 * np.pi * rng.uniform(0.5, 4) * time + rng.uniform(0, 6))
        samples += 0.05 * beat * np.sin(2 * np.pi * (rng.uniform(250, 3000) * time + rng.uniform(-300, 300) * time**2))
    return samples.astype(np.float32)


def make_folder(folder: Path, clips: int = 24, bad: bool = False, seconds: float = 0.6, first: int = 0) -> Path:
    """`clips` clips in four folds; with `bad`, clip 5 is junk, clip 9 silent and clip 14 cut in the middle."""
    (folder / "audio").mkdir(parents=True)
    (folder / "meta").mkdir()
    with (folder / "meta" / "esc50.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["filename", "fold", "target", "category", "esc10", "src_file", "take"])
        for number in range(first, first + clips):
            name = f"{1 + number % 4}-{number}.wav"
            lines.writerow([name, 1 + number % 4, 0, CLASSES[number % 3], True, 100 + number, "A"])
            soundfile.write(folder / "audio" / name, sound(number, seconds), RATE_HZ)
    if bad:
        (folder / "audio" / "2-5.wav").write_bytes((folder / "audio" / "2-5.wav").read_bytes()[:60] + b"junk")
        soundfile.write(folder / "audio" / "2-9.wav", np.zeros(1000), RATE_HZ)
        content = (folder / "audio" / "3-14.wav").read_bytes()
        (folder / "audio" / "3-14.wav").write_bytes(content[: len(content) // 2])
    return folder
