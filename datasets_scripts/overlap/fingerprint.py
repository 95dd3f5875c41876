"""Audio fingerprints to find copies of clips, even if they are re-encoded, resampled, cut or amplified.

The method is from Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System" (ISMIR 2002). For each frame (every
12 ms), a 32-bit word is computed: the signs of energy differences between neighbouring bands and frames. If two clips
have equal words, they are aligned at these words. The share of equal bits over the whole overlap then determines the
score.

Three changes adapt the method from songs to other recordings. Bands range from 200 Hz to 3.6 kHz. Two aligned frames
are compared only if at least one of them is within 30 dB of the loudest frame of its clip, because quieter frames
contain mostly coding noise. Before the analysis, faint noise is added, different for each clip. Otherwise pauses of
digital silence would have the same words in all clips.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

RATE_HZ = 8000
WINDOW_SAMPLES = 3000
HOP_SAMPLES = 96  # windows overlap by 31/32, so that a copy matches even if its frames are shifted
LOWEST_HZ, HIGHEST_HZ = 200.0, 3600.0
LOUD_DB = 30.0
NOISE_DB = -50.0  # level of the added noise, relative to the clip's root mean square

THRESHOLD = 6.0
"""Minimum score of a copy.

With bit error rate BER, the score of an alignment is (1 - 2 BER) sqrt(32 frames) / 3. Without the division by 3, it is
the distance of the BER from 1/2, in standard deviations for 32 independent bits per frame. The divisor is needed
because frames overlap: the BER of unrelated clips has up to three times the standard deviation of independent bits
(Haitsma and Kalker, section 4.2). By chance, one in 10^9 alignments exceeds 6.
"""

MIN_FRAMES = 10  # with fewer frames, even equal clips do not reach the threshold
_MOST_ALIGNMENTS = 256  # maximum number of alignments to score per query, those with the most equal words

_BITS = 32


class Fingerprint(NamedTuple):
    """Fingerprint of a clip: a 32-bit word (uint32) per frame, and its level in dB relative to the loudest frame."""

    words: np.ndarray
    levels_db: np.ndarray


class Match(NamedTuple):
    """Best alignment between a query and a clip of the index."""

    clip: int  # position in the index
    score: float  # see `THRESHOLD`
    bit_error_rate: float  # 0 for equal audio, about 0.5 for unrelated audio
    offset_seconds: float  # start of the query relative to the start of the clip; may be negative
    overlap_seconds: float


def fingerprint(waveform: np.ndarray) -> Fingerprint | None:
    """Compute the fingerprint of a waveform (samples,) at `RATE_HZ`. Return None if it is too short or silent."""
    if len(waveform) < WINDOW_SAMPLES + MIN_FRAMES * HOP_SAMPLES or not waveform.any():
        return None

    # Faint white noise; its seed is a hash of the samples, so it is reproducible and differs between clips.
    seed = int.from_bytes(hashlib.blake2b(waveform.tobytes(), digest_size=8).digest(), "big")
    rms = float(np.sqrt(np.mean(np.square(waveform, dtype=np.float64))))
    noise = np.random.default_rng(seed).standard_normal(len(waveform), dtype=np.float32)
    noisy = waveform + noise * np.float32(10 ** (NOISE_DB / 20) * rms)

    # (samples,) -> (frames, window)
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
    """Compare two fingerprints, with frame `offset_frames` of the clip aligned to frame 0 of the query.

    Returns the score (see `THRESHOLD`) and the bit error rate: (0, 0.5) if fewer than `MIN_FRAMES` frames are loud.
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
    """Index of audio fingerprints, to find the clips that share audio with a query.

    A fingerprint contains one 32-bit word per frame, and the index is a sorted array of the words of all clips. 50,000
    clips of 10 s have 40 million words and need 0.5 GB. A search looks up the words in loud frames of the query, and
    all words that differ from these in one bit.

    Args:
        fingerprints: Fingerprint of each clip, or None for a clip that is too short, silent or unreadable.
    """

    def __init__(self, fingerprints: Sequence[Fingerprint | None]) -> None:
        self._fingerprints = fingerprints
        words = [np.zeros(0, dtype=np.uint32) if each is None else each.words for each in fingerprints]
        lengths = list(map(len, words))
        all_words = np.concatenate([np.zeros(0, dtype=np.uint32), *words])

        order = np.argsort(all_words, kind="stable")
        self._words = all_words[order]
        self._positions = order.astype(np.int32 if len(order) < 2**31 else np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def search(self, query: Fingerprint) -> list[Match]:
        """Return one match per clip that shares audio with the query, sorted by score, highest first."""
        best: dict[int, Match] = {}
        for clip, offset in self._alignments(query):
            other = self._fingerprints[clip]
            assert other is not None
            score, wrong = alignment_score(other, query, offset)
            if score >= THRESHOLD and (clip not in best or score > best[clip].score):
                frames = min(len(other.words), len(query.words) + offset) - max(0, offset)
                overlap_seconds = frames * HOP_SAMPLES / RATE_HZ + WINDOW_SAMPLES / RATE_HZ
                best[clip] = Match(clip, score, wrong, offset * HOP_SAMPLES / RATE_HZ, overlap_seconds)
        return sorted(best.values(), key=lambda match: (-match.score, match.clip))

    def _alignments(self, query: Fingerprint) -> Iterator[tuple[int, int]]:
        """Yield (clip index, offset in frames) for the alignments with the most equal words."""
        # (loud frames,) -> (loud frames, 33): each word, and all words that differ from it in one bit
        frames = np.flatnonzero(query.levels_db > -LOUD_DB)
        flips = np.concatenate([[0], 1 << np.arange(_BITS)]).astype(np.uint32)
        words = (query.words[frames][:, None] ^ flips).ravel()

        # Look up each word in the sorted array, then compute the clip and the offset of every hit.
        first = np.searchsorted(self._words, words, "left")
        counts = np.searchsorted(self._words, words, "right") - first
        hits = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        positions = self._positions[hits].astype(np.int64)
        clips = np.searchsorted(self._starts, positions, "right") - 1
        offsets = positions - self._starts[clips] - np.repeat(np.repeat(frames, len(flips)), counts)

        alignments, votes = np.unique(np.stack([clips, offsets], axis=1), axis=0, return_counts=True)
        for index in np.argsort(-votes, kind="stable")[:_MOST_ALIGNMENTS]:
            yield int(alignments[index, 0]), int(alignments[index, 1])
