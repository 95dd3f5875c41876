"""What the front end costs, beside torchaudio's own transform and transformers' ClapFeatureExtractor.

    python benchmarks/bench_mel.py [--clips 8] [--rounds 20] [--threads 1 2]

Each takes 10 s of mono noise at its own rate (CED 16 kHz, CLAP 48 kHz), a clip at a time. All take turns in each
round; what counts are the ratios of CPU time, of the least and of the median round. Our numbers are checked against
torchaudio's first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchaudio
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


def main() -> None:
    """Prints a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=8, help="Clips of a round.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="Threads of torch.")
    options = parser.parse_args()

    random = np.random.default_rng(0)
    ways = make_ways()
    clips = {}
    for rate_hz, _ in ways.values():
        clips[rate_hz] = 0.1 * random.standard_normal((options.clips, SECONDS * rate_hz)).astype(np.float32)
    ours, theirs = [ways[name][1](clips[16000][0]) for name in ("CEDFeatureExtractor", "torchaudio, 16 kHz")]
    difference = (ours["input_features"][0] - theirs).abs().max().item()
    assert difference < 1e-4, difference
    print(f"largest difference from torchaudio: {difference:.1e} dB")

    for threads in options.threads:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, (rate_hz, extract) in ways.items():
                start = time.perf_counter() if threads > 1 else time.process_time()
                for clip in clips[rate_hz]:
                    extract(clip)
                stop = time.perf_counter() if threads > 1 else time.process_time()
                times[name].append((stop - start) / options.clips)

        print(f"\n{threads} thread{'s' * (threads > 1)}: clips of {SECONDS} s, ms and times as fast as CLAP's")
        reference = times["ClapFeatureExtractor"]
        for name, spent in times.items():
            least, median = min(reference) / min(spent), float(np.median(reference) / np.median(spent))
            print(f"{name:<22}{1e3 * min(spent):>8.2f} ms   least {least:>6.1f} x   median {median:>6.1f} x")


if __name__ == "__main__":
    main()
