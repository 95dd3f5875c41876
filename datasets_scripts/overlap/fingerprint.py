"""Audio fingerprints that find copies of clips, also re-encoded, resampled, cut or amplified ones.

The method is that of Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System" (ISMIR 2002). Every 12 ms, a
frame yields a word of 32 bits: the signs of the differences of band energies along frequency and time. Equal words
propose alignments of two clips, and the share of equal bits over the whole overlap decides.

Three changes adapt the method from songs to other recordings. Bands range from 200 Hz to 3.6 kHz. Only frames within 30
dB of a clip's loudest frame count, because quieter ones contain mostly coding noise. Faint noise, different for each
clip, is added first, so that digital silence has random bits instead of equal ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

RATE_HZ = 8000
WINDOW_SAMPLES = 3000
HOP_SAMPLES = 96  # windows overlap by 31/32, so that the frames of a copy need not be aligned with the original's
LOWEST_HZ, HIGHEST_HZ = 200.0, 3600.0
LOUD_DB = 30.0
NOISE_DB = -50.0  # relative to the clip's root mean square

THRESHOLD = 6.0
"""Minimum score of a copy.

The score of an alignment is (1 - 2 BER) sqrt(32 frames) / 3, in standard deviations: the deviation of 32 independent
bits per frame from a bit error rate (BER) of 1/2, divided by 3. The divisor is needed because frames overlap: the bits
of unrelated clips have up to three times the standard deviation of independent bits (Haitsma and Kalker, section 4.2).
By chance, one in 10^9 alignments exceeds 6.
"""

MIN_FRAMES = 10  # with fewer frames, even equal clips do not reach the threshold
_MOST_ALIGNMENTS = 256  # maximum number of alignments per query, those with the most equal words

_BITS = 32
_NOTHING = np.zeros(0, dtype=np.int64)


class Fingerprint(NamedTuple):
    """32-bit words of a clip, `(frames,)` uint32, and levels relative to its loudest frame in dB (<= 0), float32."""

    words: np.ndarray
    levels_db: np.ndarray


class Match(NamedTuple):
    """Best alignment of a query with a clip of the index.

    Attributes:
        clip: Position of the clip in the index.
        score: Score, see `THRESHOLD`.
        bit_error_rate: Share of differing bits: 0 for equal samples, about 0.5 for unrelated ones.
        offset_seconds: Start of the query in the clip; negative if the query starts before the clip.
        overlap_seconds: Duration of the overlap.
    """

    clip: int
    score: float
    bit_error_rate: float
    offset_seconds: float
    overlap_seconds: float


def fingerprint(waveform: np.ndarray) -> Fingerprint | None:
    """Compute the fingerprint of a clip.

    Args:
        waveform: `(samples,)` float32 at `RATE_HZ`.

    Returns:
        The fingerprint; None for a clip below 0.5 s, which is too short.
    """
    if len(waveform) < WINDOW_SAMPLES + MIN_FRAMES * HOP_SAMPLES:
        return None

    # (samples,) -> (frames, window)
    noisy = waveform + _noise(waveform)
    frames = np.lib.stride_tricks.sliding_window_view(noisy, WINDOW_SAMPLES)[::HOP_SAMPLES]
    # (frames, window), a view -> (frames, 33) in bands of equal width on a logarithmic scale, block by block
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
    """Compare the bits of two clips, with frame `offset_frames` of the clip aligned with frame 0 of the query.

    Returns:
        The score, see `THRESHOLD`, and the share of differing bits; 0 and 0.5 for fewer than `MIN_FRAMES` loud frames.
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
    """Index of fingerprints that finds the clips which share sound with a query.

    The index is a sorted array of words: 50,000 clips of 10 s have 40 million words and need 0.5 GB. A search looks up
    the words of the query's loud frames, and all words that differ from them in one bit.

    Args:
        fingerprints: Fingerprints of the clips; None for a clip without one.
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
        """Return the best alignment with each clip that shares sound with the query, highest score first."""
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
        """Yield (clip, offset in frames) of the alignments with the most equal words."""
        # (loud frames,) -> (loud frames, 33): each word, and all words that differ from it in one bit
        frames = np.flatnonzero(query.levels_db > -LOUD_DB)
        flips = np.concatenate([[0], 1 << np.arange(_BITS)]).astype(np.uint32)
        words = (query.words[frames][:, None] ^ flips).ravel()

        # Look up each word in the sorted array, then compute the clip and the offset of every hit.
        first = np.searchsorted(self._words, words, "left")
        counts = np.searchsorted(self._words, words, "right") - first
        hits = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        positions = self._positions[hits].astype(np.int64) if len(hits) else _NOTHING
        clips = np.searchsorted(self._starts, positions, "right") - 1
        offsets = positions - self._starts[clips] - np.repeat(np.repeat(frames, len(flips)), counts)

        alignments, votes = np.unique(np.stack([clips, offsets], axis=1), axis=0, return_counts=True)
        for index in np.argsort(-votes, kind="stable")[:_MOST_ALIGNMENTS]:
            yield int(alignments[index, 0]), int(alignments[index, 1])


def _noise(waveform: np.ndarray) -> np.ndarray:
    """Return faint white noise, seeded with a hash of the samples: reproducible, and different for each clip."""
    seed = int.from_bytes(hashlib.blake2b(waveform.tobytes(), digest_size=8).digest(), "big")
    rms = float(np.sqrt(np.mean(np.square(waveform, dtype=np.float64))))
    noise = np.random.default_rng(seed).standard_normal(len(waveform), dtype=np.float32)
    return noise * np.float32(10 ** (NOISE_DB / 20) * rms)


def _seconds(frames: int) -> float:
    return frames * HOP_SAMPLES / RATE_HZ
