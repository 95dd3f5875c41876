"""Fingerprints: all kinds of copies are found, and no other recordings."""

import io
import itertools

import numpy as np
import pytest
import soundfile
from prepared_sets import sound

from modeling_supclap.datasets_scripts.audio import resample
from modeling_supclap.datasets_scripts.overlap.fingerprint import (
    RATE_HZ,
    THRESHOLD,
    Fingerprint,
    FingerprintIndex,
    alignment_score,
    fingerprint,
)

ORIGINAL_HZ = 22_050
CLIPS = [sound(number, seconds=5.0) for number in range(12)]


def at_our_rate(samples, rate_hz=ORIGINAL_HZ):
    return resample(np.ascontiguousarray(samples, dtype=np.float32), rate_hz, RATE_HZ)


def encoded(samples, container, subtype, level=None):
    file = io.BytesIO()
    soundfile.write(file, samples, ORIGINAL_HZ, format=container, subtype=subtype, compression_level=level)
    file.seek(0)
    return soundfile.read(file, dtype="float32")


COPIES = {
    "itself": lambda samples: (samples, ORIGINAL_HZ),
    "mp3": lambda samples: encoded(samples, "MP3", "MPEG_LAYER_III", 0.9),
    "vorbis": lambda samples: encoded(samples, "OGG", "VORBIS", 0.9),
    "at 16 kHz": lambda samples: (resample(samples, ORIGINAL_HZ, 16_000), 16_000),
    "3 of 5 seconds": lambda samples: (samples[20_011 : 20_011 + 3 * ORIGINAL_HZ], ORIGINAL_HZ),
    "quieter": lambda samples: (0.1 * samples, ORIGINAL_HZ),
    "with noise 20 dB below": lambda samples: (
        samples + 0.1 * samples.std() * np.random.default_rng(0).standard_normal(len(samples)),
        ORIGINAL_HZ,
    ),
    "cut, encoded and quieter": lambda samples: encoded(0.5 * samples[9_999:80_000], "OGG", "VORBIS", 0.9),
}


@pytest.fixture(scope="module")
def index():
    return FingerprintIndex([fingerprint(at_our_rate(samples)) for samples in CLIPS])


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_found_and_nothing_else(index, kind):
    for place, samples in enumerate(CLIPS):
        matches = index.search(fingerprint(at_our_rate(*COPIES[kind](samples))))
        assert [match.clip for match in matches] == [place]
        offset = {"3 of 5 seconds": 20_011, "cut, encoded and quieter": 9_999}.get(kind, 0) / ORIGINAL_HZ
        assert matches[0].offset_seconds == pytest.approx(offset, abs=0.06)


def test_fields_of_a_match(index):
    (match,) = index.search(fingerprint(at_our_rate(CLIPS[4])))
    assert match.bit_error_rate == 0
    assert match.overlap_seconds == pytest.approx(385 * 0.012 + 0.375)  # 385 frames of 12 ms, and a window
    cut = fingerprint(at_our_rate(CLIPS[4][2 * ORIGINAL_HZ : 4 * ORIGINAL_HZ]))
    (part,) = index.search(cut)
    assert part.overlap_seconds == pytest.approx(2.0, abs=0.03)
    (whole,) = FingerprintIndex([cut]).search(fingerprint(at_our_rate(CLIPS[4])))
    assert whole.offset_seconds == pytest.approx(-2.0, abs=0.03)
    assert whole.score == pytest.approx(part.score, abs=0.5)


def test_scores_of_unrelated_clips_scatter_as_stated():
    prints = [fingerprint(at_our_rate(samples)) for samples in CLIPS]
    scores = [
        alignment_score(first, second, offset)[0]
        for first in prints for second in prints if first is not second for offset in range(-200, 200, 40)
    ]  # fmt: skip
    assert abs(np.mean(scores)) < 0.1
    assert np.std(scores) < 1
    assert max(scores) < THRESHOLD - 1


def test_the_score_is_that_of_its_equation():
    clip = fingerprint(at_our_rate(CLIPS[0]))
    other = fingerprint(at_our_rate(CLIPS[1]))
    score, wrong = alignment_score(clip, other, 7)
    frames, differing = 0, 0
    for frame in range(7, len(clip.words)):
        if clip.levels_db[frame] > -30 or other.levels_db[frame - 7] > -30:
            frames += 1
            differing += bin(int(clip.words[frame]) ^ int(other.words[frame - 7])).count("1")
    assert wrong == pytest.approx(differing / (32 * frames))
    assert score == pytest.approx((1 - 2 * wrong) * (32 * frames) ** 0.5 / 3)


def test_words_are_the_signs_of_differences_of_bands_and_frames():
    """Loops of [Haitsma and Kalker, equation 1], without the faint noise that flips few bits of white noise."""
    noise = np.random.default_rng(3).standard_normal(3000 + 96 * 600)  # more frames than one block has
    words, levels_db = fingerprint(np.float32(noise))
    assert (words.dtype, words.shape, levels_db.shape) == (np.uint32, (600,), (600,))
    edges_hz = 200 * (3600 / 200) ** (np.arange(34) / 33)
    energies = []
    for start in range(0, len(noise) - 2999, 96):
        power = np.abs(np.fft.rfft(noise[start : start + 3000] * np.hanning(3000))) ** 2
        bins = np.round(edges_hz * 3000 / 8000).astype(int)
        energies.append([power[low:high].sum() for low, high in itertools.pairwise(bins)])
    expected_db = [10 * np.log10(sum(bands)) for bands in energies[1:]]
    np.testing.assert_allclose(levels_db, np.array(expected_db) - max(expected_db), atol=0.05)

    equal = 0
    for word, before, bands in zip(words, energies[:-1], energies[1:], strict=True):
        for bit in range(32):
            sign = (bands[bit] - bands[bit + 1]) - (before[bit] - before[bit + 1]) > 0
            equal += (int(word) >> (31 - bit)) & 1 == sign
    assert equal > 0.97 * 600 * 32


def made(words, level_db=0.0):
    return Fingerprint(np.array(words, np.uint32), np.full(len(words), level_db, np.float32))


def random_words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def test_ten_loud_frames_are_compared_and_nine_are_not():
    words = random_words(30)
    clip, quiet = made(words), made(words, -30.0)
    for offset in (20, -20):
        assert alignment_score(clip, made(np.roll(words, -offset)), offset) == (pytest.approx(320**0.5 / 3), 0.0)
    assert alignment_score(clip, clip, 21) == alignment_score(clip, clip, -21) == (0.0, 0.5)
    assert alignment_score(clip, quiet, 0) == alignment_score(quiet, clip, 0) == (pytest.approx(960**0.5 / 3), 0.0)
    assert alignment_score(quiet, quiet, 0) == (0.0, 0.5)
    for count, score in ((9, 0.0), (10, 320**0.5 / 3)):
        some = quiet._replace(levels_db=np.where(np.arange(30) < count, -29.0, -30.0))
        assert alignment_score(some, quiet, 0) == (pytest.approx(score), 0.0 if score else 0.5)


def test_the_best_alignment_of_a_clip_counts_and_not_that_with_most_equal_words():
    query = random_words(100)
    half = np.concatenate([query[:50], random_words(50, 1)])  # many equal words
    close = np.where(np.arange(100) % 10 == 0, query, query ^ np.uint32(7))  # few, but all others are close
    clip = np.concatenate([half, random_words(100, 2), close])
    matches = FingerprintIndex([made(query[:60]), None, made(clip), made(query), made(query)]).search(made(query))
    assert [match.clip for match in matches] == [3, 4, 2, 0]  # the highest score first, then the first clip
    assert matches[2].offset_seconds == pytest.approx(200 * 0.012)
    assert matches[2].bit_error_rate == pytest.approx(0.9 * 3 / 32)
    assert matches[2].overlap_seconds == pytest.approx(100 * 0.012 + 0.375)
    assert matches[3].overlap_seconds == pytest.approx(60 * 0.012 + 0.375)


def test_quiet_frames_of_a_query_are_not_looked_up():
    words = random_words(40)
    levels_db = np.where(np.arange(40) < 30, -30.0, 0.0)
    query = Fingerprint(words, levels_db)
    assert FingerprintIndex([made(words[:30])]).search(query) == []
    (match,) = FingerprintIndex([made(words[5:])]).search(query)
    assert match.offset_seconds == pytest.approx(-5 * 0.012)


def beep(frequency_hz):
    """Return a tone of 0.1 s in the middle of digital silence."""
    samples, time = np.zeros(3 * RATE_HZ, dtype=np.float32), np.arange(800) / RATE_HZ
    samples[4000:4800] = np.sin(2 * np.pi * frequency_hz * time) * np.hanning(800)
    return samples


def test_equal_silence_around_different_sounds_does_not_match():
    prints = [fingerprint(beep(frequency_hz)) for frequency_hz in np.random.default_rng(0).uniform(300, 3000, 8)]
    pairs = [(first, second) for first in prints for second in prints if first is not second]
    scores = [alignment_score(*pair, offset)[0] for pair in pairs for offset in range(-20, 20)]
    assert max(scores) < THRESHOLD - 2  # without the added noise more than 7


def test_words_with_a_wrong_bit_are_looked_up_too(index):
    query = fingerprint(at_our_rate(CLIPS[2]))
    flipped = query.words ^ (1 << np.random.default_rng(0).integers(0, 32, len(query.words))).astype(np.uint32)
    (match,) = index.search(query._replace(words=flipped))
    assert (match.clip, match.bit_error_rate, match.offset_seconds) == (2, pytest.approx(1 / 32), 0)


def test_a_tone_has_its_energy_in_its_band():
    time = np.arange(2 * RATE_HZ) / RATE_HZ
    rising, falling = (np.sin(2 * np.pi * (1000 * time + slope * time**2)).astype(np.float32) for slope in (300, -300))
    score, _ = alignment_score(fingerprint(rising), fingerprint(falling), 0)
    assert score < THRESHOLD


def test_short_clips_have_no_fingerprint():
    assert fingerprint(np.ones(3959, dtype=np.float32)) is None
    assert fingerprint(np.zeros(16000, dtype=np.float32)) is None
    assert len(fingerprint(np.ones(3960, dtype=np.float32)).words) == 10  # the least that can reach the threshold
    index = FingerprintIndex([None, fingerprint(at_our_rate(CLIPS[0]))])
    assert [match.clip for match in index.search(fingerprint(at_our_rate(CLIPS[0])))] == [1]
    assert FingerprintIndex([None]).search(fingerprint(at_our_rate(CLIPS[0]))) == []
