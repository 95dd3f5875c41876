"""Audio fingerprints: is this clip a copy of a part of that one, however it was encoded, resampled, cut or amplified?

The method is that of Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System" (ISMIR 2002). Every 12 ms
a frame gives 32 bits, the signs of the differences of band energies along frequency and time. Words that agree propose
where two clips may be one, and the share of equal bits over the whole overlap decides.

Our recordings are no songs, hence what is different: bands from 200 Hz to 3.6 kHz; only frames within 30 dB of a clip's
loudest count, since the rest of a bark in a quiet yard is the noise of its encoding; and a trace of noise, another one
for each clip, is added first, so that digital silence has random bits in place of equal ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

RATE_HZ = 8000
WINDOW_SAMPLES = 3000
HOP_SAMPLES = 96  # 31/32 of a window is the next one's too, so that a copy's frames need not begin where ours do
LOWEST_HZ, HIGHEST_HZ = 200.0, 3600.0
LOUD_DB = 30.0
NOISE_DB = -50.0  # relative to the clip's root mean square

THRESHOLD = 6.0
"""The least score of a copy.

The score of an alignment is that of a coin thrown 32 times a frame, (1 - 2 BER) sqrt(32 frames), over 3: as frames
overlap, the bits of unrelated clips scatter up to three times as far as independent ones (Haitsma and Kalker, section
4.2). In standard deviations, so that 6 is passed by chance once in 10^9 alignments.
"""

MIN_FRAMES = 10  # even without a wrong bit, fewer do not reach the threshold
_MOST_ALIGNMENTS = 256  # to look at for each query, those with the most words in common

_BITS = 32
_NOTHING = np.zeros(0, dtype=np.int64)


class Fingerprint(NamedTuple):
    """A clip's 32-bit words, `(frames,)` uint32, and the level of each frame in dB below the loudest, float32."""

    words: np.ndarray
    levels_db: np.ndarray


class Match(NamedTuple):
    """Where a query lies in a clip of the index.

    Attributes:
        clip: The place of the clip in the index.
        score: See `THRESHOLD`.
        bit_error_rate: The share of bits that differ, 0 for the same samples and 0.5 for unrelated ones.
        offset_seconds: The time in the clip at which the query begins; negative where the clip begins later.
        overlap_seconds: How long both sound together.
    """

    clip: int
    score: float
    bit_error_rate: float
    offset_seconds: float
    overlap_seconds: float


def fingerprint(waveform: np.ndarray) -> Fingerprint | None:
    """The fingerprint of a clip.

    Args:
        waveform: `(samples,)` float32 at `RATE_HZ`.

    Returns:
        Its words and levels; `None` for a clip too short to be told apart, below 0.5 s.
    """
    if len(waveform) < WINDOW_SAMPLES + MIN_FRAMES * HOP_SAMPLES:
        return None

    # (samples,) -> (frames, window)
    noisy = waveform + _noise(waveform)
    frames = np.lib.stride_tricks.sliding_window_view(noisy, WINDOW_SAMPLES)[::HOP_SAMPLES]
    # (frames, window), a view -> (frames, 33) in bands of equal width on a logarithmic scale, a block at a time
    edges = np.round(np.geomspace(LOWEST_HZ, HIGHEST_HZ, _BITS + 2) * WINDOW_SAMPLES / RATE_HZ).astype(int)
    blocks = []
    for block in np.split(frames, range(512, len(frames), 512)):
        power = np.abs(np.fft.rfft(block * np.hanning(WINDOW_SAMPLES).astype(np.float32), axis=1)) ** 2
        blocks.append(np.add.reduceat(power[:, : edges[-1]], edges[:-1], axis=1))
    energies = np.concatenate(blocks)

    # (frames, 33) -> (frames - 1, 32) bits -> (frames - 1,) words
    signs = np.diff(np.diff(energies, axis=1), axis=0) < 0
    levels_db = 10 * np.log10(energies[1:].sum(axis=1) + np.finfo(np.float32).tiny)
    words = np.packbits(signs, axis=1).view(">u4")[:, 0].astype(np.uint32)
    return Fingerprint(words, (levels_db - levels_db.max()).astype(np.float32))


def alignment_score(clip: Fingerprint, query: Fingerprint, offset_frames: int) -> tuple[float, float]:
    """How far the bits of two clips agree, frame `offset_frames` of the first lying at the beginning of the second.

    Returns:
        The score, see `THRESHOLD`, and the share of differing bits; 0 and 0.5 where there is too little to compare.
    """
    start, stop = max(0, offset_frames), min(len(clip.words), len(query.words) + offset_frames)
    if stop - start < MIN_FRAMES:
        return 0.0, 0.5

    here, there = slice(start, stop), slice(start - offset_frames, stop - offset_frames)
    loud = (clip.levels_db[here] > -LOUD_DB) | (query.levels_db[there] > -LOUD_DB)
    count = int(loud.sum())
    if count < MIN_FRAMES:
        return 0.0, 0.5

    wrong = np.bitwise_count(clip.words[here][loud] ^ query.words[there][loud]).sum() / (_BITS * count)
    return float((1 - 2 * wrong) * np.sqrt(_BITS * count) / 3), float(wrong)


class FingerprintIndex:
    """Finds in many clips those that a query is a copy of, or that are a copy of it.

    Sorted words take the place of a table, so that 50,000 clips of 10 s, 40 million words, need half a gigabyte. A
    query's loud words are looked up, and all that differ from them in one bit.

    Args:
        fingerprints: Of the clips; `None` where there is none.
    """

    def __init__(self, fingerprints: Sequence[Fingerprint | None]) -> None:
        self._fingerprints = fingerprints
        words = [np.zeros(0, dtype=np.uint32) if each is None else each.words for each in fingerprints]
        lengths = list(map(len, words))
        all_words = np.concatenate([np.zeros(0, dtype=np.uint32), *words])

        order = np.argsort(all_words, kind="stable")
        self._words = all_words[order]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._positions = order.astype(np.int32 if len(order) < 2**31 else np.int64)

    def search(self, query: Fingerprint) -> list[Match]:
        """The clips that share sound with a query: the best alignment with each, the highest score first."""
        best: dict[int, Match] = {}
        for clip, offset in self._alignments(query):
            other = self._fingerprints[clip]
            assert other is not None
            score, wrong = alignment_score(other, query, offset)
            if score >= THRESHOLD and (clip not in best or score > best[clip].score):
                overlap = min(len(other.words), len(query.words) + offset) - max(0, offset)
                best[clip] = Match(clip, score, wrong, _seconds(offset), _seconds(overlap) + WINDOW_SAMPLES / RATE_HZ)
        return sorted(best.values(), key=lambda match: (-match.score, match.clip))

    def _alignments(self, query: Fingerprint) -> Iterator[tuple[int, int]]:
        """(clip, offset in frames) of the alignments with the most equal words."""
        # (loud frames,) -> (loud frames, 33): each word, and all that differ from it in one bit
        frames = np.flatnonzero(query.levels_db > -LOUD_DB)
        flips = np.concatenate([[0], 1 << np.arange(_BITS)]).astype(np.uint32)
        wanted = (query.words[frames][:, None] ^ flips).ravel()

        # Where each lies among the sorted words, and from there the clip and the offset of every hit.
        first = np.searchsorted(self._words, wanted, "left")
        counts = np.searchsorted(self._words, wanted, "right") - first
        hits = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        places = self._positions[hits].astype(np.int64) if len(hits) else _NOTHING
        clips = np.searchsorted(self._starts, places, "right") - 1
        offsets = places - self._starts[clips] - np.repeat(np.repeat(frames, len(flips)), counts)

        found, votes = np.unique(np.stack([clips, offsets], axis=1), axis=0, return_counts=True)
        for place in np.argsort(-votes, kind="stable")[:_MOST_ALIGNMENTS]:
            yield int(found[place, 0]), int(found[place, 1])


def _noise(waveform: np.ndarray) -> np.ndarray:
    """Faint white noise, drawn from the samples' own hash: the same for a clip each time, another for each clip."""
    seed = int.from_bytes(hashlib.blake2b(waveform.tobytes(), digest_size=8).digest(), "big")
    rms = float(np.sqrt(np.mean(np.square(waveform, dtype=np.float64))))
    noise = np.random.default_rng(seed).standard_normal(len(waveform), dtype=np.float32)
    return noise * np.float32(10 ** (NOISE_DB / 20) * rms)


def _seconds(frames: int) -> float:
    return frames * HOP_SAMPLES / RATE_HZ
