"""What putting two clips together costs, beside the spectrogram of the result.

    OMP_NUM_THREADS=1 python benchmarks/bench_composition.py

Two clips of 5 s become one of 10 s, or the three roles of stage B: forward, reversed and overlaid. The unit is
the spectrogram of what comes out. Reading is left out: clips that were put together beforehand would be read, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rows import Row, compare, print_rows, take_turns

from modeling_supclap import CEDFeatureExtractor
from modeling_supclap.datasets_scripts.temporal.mixing import compose

RATE_HZ = 16000
CLIPS = 16


def measure(rounds: int = 15) -> list[Row]:
    """The rows of composition: its two roads, and of the first what numpy's own joining takes."""
    draw = np.random.default_rng(0)
    samples = 0.1 * draw.standard_normal((CLIPS, 2, 5 * RATE_HZ)).astype(np.float32)
    extractor = CEDFeatureExtractor()

    def put_together(roles: tuple[str, ...]) -> list[np.ndarray]:
        clips = []
        for pair in samples:
            for role in roles:
                clips.append(compose(role, pair, RATE_HZ))
        return clips

    def extract(clips: list[np.ndarray]) -> None:
        for clip in clips:
            extractor([clip], sampling_rate=RATE_HZ, return_tensors="pt")

    rows = []
    for name, roles, wanted in (
        ("concatenation", ("forward",), "<= 5"),
        ("forward, reversed and overlaid", ("forward", "reversed", "overlaid"), "<= 8"),
    ):
        clips = put_together(roles)
        assert np.array_equal(clips[0][: 5 * RATE_HZ], samples[0, 0]), "the first clip comes first, as it is"
        ways: dict[str, Callable[[], Any]] = {"compose": partial(put_together, roles), "mel": partial(extract, clips)}
        if roles == ("forward",):
            ways["np.concatenate"] = partial(join, samples)
        seconds = take_turns(ways, rounds)

        least, median = compare(seconds, "compose", "mel")
        rows.append(Row("G12", f"{name} of two 5 s clips / mel of it", 100 * least, 100 * median, wanted, "%"))
        if "np.concatenate" in seconds:
            least, median = compare(seconds, "np.concatenate", "mel")
            rows.append(Row("G12", "a bare np.concatenate of them / mel of it", 100 * least, 100 * median, "", "%"))
    return rows


def join(pairs: np.ndarray) -> list[np.ndarray]:
    """Pairs of clips, one after the other and no more: the least that a concatenation can take."""
    return list(map(np.concatenate, pairs))


if __name__ == "__main__":
    print_rows(measure())
