"""What the front end costs, beside torchaudio's own transform and transformers' ClapFeatureExtractor.

    python benchmarks/bench_mel.py [--clips 8] [--rounds 10] [--threads 1 2]

Each takes 10 s of mono noise at its own rate (CED 16 kHz, CLAP 48 kHz), a clip at a time. All take turns in each round;
what counts is how many times as long theirs takes. Our numbers are checked against
torchaudio's first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torchaudio
from rows import Row, compare, run_script, take_turns
from transformers import ClapFeatureExtractor

from modeling_supclap import CEDFeatureExtractor

SECONDS = 10


def make_ways() -> dict[str, tuple[int, Callable[[np.ndarray], Any]]]:
    """Each front end with the rate of its clips."""
    ours, clap = CEDFeatureExtractor(), ClapFeatureExtractor(truncation="rand_trunc")
    mel = torchaudio.transforms.MelSpectrogram(n_fft=512, hop_length=160, n_mels=64)

    def use_torchaudio(clip: np.ndarray) -> torch.Tensor:
        return torchaudio.functional.amplitude_to_DB(mel(torch.from_numpy(clip)), 10.0, 1e-10, 0.0, top_db=120.0)

    return {
        "CEDFeatureExtractor": (16000, lambda clip: ours([clip], sampling_rate=16000, return_tensors="pt")),
        "torchaudio, 16 kHz": (16000, use_torchaudio),
        "ClapFeatureExtractor": (48000, lambda clip: clap([clip], sampling_rate=48000, return_tensors="pt")),
    }


def measure(clips: int = 8, rounds: int = 10, threads: Sequence[int] = (1, 2)) -> list[Row]:
    """The rows of the front end for each number of threads."""
    random = np.random.default_rng(0)
    ways = make_ways()
    noise = {}
    for rate_hz, _ in ways.values():
        noise[rate_hz] = 0.1 * random.standard_normal((clips, SECONDS * rate_hz)).astype(np.float32)
    ours, theirs = (ways[name][1](noise[16000][0]) for name in ("CEDFeatureExtractor", "torchaudio, 16 kHz"))
    difference = (ours["input_features"][0] - theirs).abs().max().item()
    assert difference < 1e-4, f"{difference} dB from torchaudio"

    def extract_all(name: str) -> None:
        rate_hz, extract = ways[name]
        for clip in noise[rate_hz]:
            extract(clip)

    rows = []
    before = torch.get_num_threads()
    for count in threads:
        torch.set_num_threads(count)
        seconds = take_turns({name: partial(extract_all, name) for name in ways}, rounds)
        for peer, wanted in (
            ("ClapFeatureExtractor", ">= 8" if count == 1 else ">= 12"),
            ("torchaudio, 16 kHz", ">= 1"),
        ):
            speed_ups = compare(seconds, peer, "CEDFeatureExtractor")
            rows.append(Row("G7", f"{peer} / CEDFeatureExtractor, 10 s, threads: {count}", *speed_ups, wanted))
    torch.set_num_threads(before)
    return rows


if __name__ == "__main__":
    run_script(measure, __doc__)
