"""Synthetic events: the audio has the properties in the captions, and the builder is reproducible."""

from collections import Counter
from itertools import chain, combinations

import numpy as np
import pytest
import soundfile
from valid_rows import validate_row

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.builders.synthetic import (
    DESCRIPTIONS,
    GENERATOR_VERSION,
    SOUNDS,
    SyntheticEvents,
    background_noise,
    describe,
    render_clip,
)
from modeling_supclap.datasets_scripts.splits import SPLITS
from modeling_supclap.languages import LANGUAGES

RATE_HZ = 16000
PITCHED = [name for name, sound in SOUNDS.items() if "low" in sound.variants]
RATED = [name for name, sound in SOUNDS.items() if "slow" in sound.variants]
SECONDS = np.arange(RATE_HZ) / RATE_HZ


def clips_of(sound, variant, count=12):
    """Return the first training clips with this sound in this variant."""
    indices = [i for i in range(len(DESCRIPTIONS)) if describe(0, "train", i)[:2] == (sound, variant)]
    rounds = range(-(-count // len(indices)))
    return [render_clip(0, "train", i + r * len(DESCRIPTIONS)) for r in rounds for i in indices][:count]


def event_of(clip):
    return clip.samples[round(clip.onset_seconds * RATE_HZ) : round(clip.offset_seconds * RATE_HZ)]


def power_spectrum(samples, size=2**16):
    return np.fft.rfftfreq(size, 1 / RATE_HZ), np.abs(np.fft.rfft(samples * np.hanning(samples.size), size)) ** 2


def strongest_hz(samples):
    frequencies_hz, power = power_spectrum(samples)
    return frequencies_hz[power.argmax()]


def centroid_hz(samples):
    frequencies_hz, power = power_spectrum(samples)
    return (frequencies_hz * power).sum() / power.sum()


def smooth(values, window_seconds):
    window = np.hanning(round(window_seconds * RATE_HZ))
    return np.convolve(values, window / window.sum(), mode="same")


def modulation_hz(values):
    """Return the strongest modulation frequency between 2 and 30 Hz."""
    frequencies_hz, power = power_spectrum(values - values.mean())
    audible = (frequencies_hz > 2) & (frequencies_hz < 30)
    return frequencies_hz[audible][power[audible].argmax()]


def instantaneous_hz(samples):
    spectrum = np.fft.fft(samples)
    spectrum[samples.size // 2 :] = 0
    return np.diff(np.unwrap(np.angle(np.fft.ifft(spectrum)))) * RATE_HZ / (2 * np.pi)


def pulses_per_second(samples):
    envelope = smooth(np.abs(samples), 0.012)
    is_loud = envelope > 0.3 * envelope.max()
    return (np.diff(is_loud.astype(int)) == 1).sum() / (samples.size / RATE_HZ)


RATE_OF = {
    "clicks": pulses_per_second,
    "knocks": pulses_per_second,
    "tremolo": lambda samples: modulation_hz(smooth(np.abs(samples), 0.02)),
    "rumble": lambda samples: modulation_hz(smooth(samples**2, 0.03)),
    "warble": lambda samples: modulation_hz(smooth(instantaneous_hz(samples), 0.02)[400:-400]),
}


def test_there_are_sixteen_sounds_in_two_variants_at_two_positions():
    assert len(SOUNDS) == 16
    assert len(DESCRIPTIONS) == len(set(DESCRIPTIONS)) == 64
    assert {description.position for description in DESCRIPTIONS} == {"beginning", "end"}


@pytest.mark.parametrize("sound", PITCHED)
def test_low_is_lower_than_high(sound):
    low, high = ([centroid_hz(event_of(clip)) for clip in clips_of(sound, variant)] for variant in ("low", "high"))
    assert max(low) * 1.5 < min(high)


@pytest.mark.parametrize("sound", RATED)
def test_slow_is_slower_than_fast_and_a_modulation_has_its_rate(sound):
    rates_hz = {}
    for variant, (least_hz, most_hz) in SOUNDS[sound].variants.items():
        rates_hz[variant] = [RATE_OF[sound](event_of(clip)) for clip in clips_of(sound, variant)]
        if sound in ("tremolo", "warble"):
            assert least_hz - 0.7 < min(rates_hz[variant]) <= max(rates_hz[variant]) < most_hz + 0.7
    assert max(rates_hz["slow"]) * 1.3 < min(rates_hz["fast"])


@pytest.mark.parametrize("sound", ["pure_tone", "beeps", "hum", "buzz"])
@pytest.mark.parametrize("variant", ["low", "high"])
def test_pitch_is_in_its_range(sound, variant):
    least_hz, most_hz = SOUNDS[sound].variants[variant]
    for clip in clips_of(sound, variant):
        assert least_hz - 2 < strongest_hz(event_of(clip)) < most_hz + 2


@pytest.mark.parametrize("variant", ["low", "high"])
def test_sweeps_go_the_way_they_say(variant):
    for sound, ratio in [("rising_sweep", 3 ** (2 / 3)), ("falling_sweep", 3 ** (-2 / 3))]:
        for clip in clips_of(sound, variant):
            first, _, last = np.array_split(event_of(clip), 3)
            assert strongest_hz(last) / strongest_hz(first) == pytest.approx(ratio, rel=0.2)


def test_siren_alternates_between_two_tones():
    _, power = power_spectrum(SOUNDS["siren"].waveform(400, SECONDS, np.random.default_rng(0)), size=RATE_HZ)
    lower, upper = power[385:416].sum(), power[525:556].sum()
    assert lower + upper > 0.95 * power[300:650].sum()
    assert 0.5 < upper / lower < 2


def test_bell_rings_in_the_partials_of_a_bell():
    _, power = power_spectrum(SOUNDS["bell"].waveform(400, SECONDS, np.random.default_rng(0)), size=RATE_HZ)
    partials_hz = (200, 400, 480, 600, 800, 1068)
    assert sum(power[hz - 8 : hz + 9].sum() for hz in partials_hz) > 0.98 * power.sum()
    assert power[480] > 100 * power[440]  # the minor third, between the harmonics of 200 and 400 Hz


def test_buzz_is_brighter_than_hum_of_the_same_pitch():
    rng = np.random.default_rng(0)
    buzz, hum = (SOUNDS[sound].waveform(100, SECONDS, rng) for sound in ("buzz", "hum"))
    assert centroid_hz(buzz) > 1.5 * centroid_hz(hum)


@pytest.mark.parametrize("sound", ["noise_burst", "hiss"])
def test_noises_are_noisy_and_pitched_sounds_are_not(sound):
    for clip in clips_of(sound, "high", 4):
        _, power = power_spectrum(event_of(clip))
        assert power.max() / power.sum() < 0.02
    _, power = power_spectrum(event_of(clips_of("pure_tone", "high", 1)[0]))
    assert power.max() / power.sum() > 0.05


@pytest.mark.parametrize("split", SPLITS)
def test_events_are_loud_at_their_position_without_clipping(split):
    for index in range(len(DESCRIPTIONS)):
        position, clip = describe(0, split, index).position, render_clip(0, split, index)
        middle_seconds = len(clip.samples) / RATE_HZ / 2
        if position == "beginning":
            assert 0 < clip.onset_seconds < clip.offset_seconds <= middle_seconds
        else:
            assert middle_seconds <= clip.onset_seconds < clip.offset_seconds < 2 * middle_seconds
        outside, event = clip.samples.copy(), event_of(clip)
        outside[round(clip.onset_seconds * RATE_HZ) : round(clip.offset_seconds * RATE_HZ)] = 0
        assert np.abs(outside).max() <= 10 ** (-30 / 20) + 1e-6
        assert 10 ** (-18 / 20) - 10 ** (-30 / 20) < np.abs(event).max() <= 0.99
        assert clip.samples.dtype == np.float32


def test_properties_outside_the_captions_vary():
    clips = clips_of("pure_tone", "low", 16)
    assert len({round(strongest_hz(event_of(clip))) for clip in clips}) > 10
    assert len({clip.offset_seconds - clip.onset_seconds for clip in clips}) == 16
    peaks_db = [20 * np.log10(np.abs(clip.samples).max()) for clip in clips]
    assert max(peaks_db) - min(peaks_db) > 6
    background = [clip.samples[:300] if clip.onset_seconds > 1 else clip.samples[-16000:] for clip in clips]
    levels_db = [20 * np.log10(samples.std()) for samples in background]
    assert max(levels_db) - min(levels_db) > 10


def test_clips_are_reproducible_and_all_different():
    clips = {
        (seed, split, index): render_clip(seed, split, index).samples.tobytes()
        for seed in (0, 1)
        for split in SPLITS
        for index in range(len(DESCRIPTIONS))
    }
    assert len(set(clips.values())) == len(clips)
    assert render_clip(1, "test", 5).samples.tobytes() == clips[1, "test", 5]
    times = render_clip(1, "test", 5, only_times=True)
    assert (times.samples.size, times[1:]) == (0, render_clip(1, "test", 5)[1:])


PROJECTIONS = [
    0.215, 0.884, 0.226, 1.645, -1.423, 0.016, -0.493, -0.34, -0.557, 1.105, -0.272, -2.583, -0.371,
    1.243, 0.908, 0.19, -0.003, -1.151, -1.194, 0.557, 0.852, 1.617, -1.66, 0.342, 0.108, -1.022,
    2.474, -0.752, 0.579, -0.816, -0.675, -0.918, 1.334, 0.722, 0.807, -0.663, 0.017, -2.253, 0.501,
    1.401, 0.808, 0.238, -1.573, 0.876, -0.623, -1.414, 0.564, 0.709, 1.119, 0.149, 1.753, -0.154,
    0.429, 0.911, -0.838, 0.093, -1.098, -0.55, -0.846, 1.244, -1.654, -0.201, -0.003, -0.531,
]  # fmt: skip
"""Clips 0 to 63, normalized, on one random vector."""


def test_a_version_of_the_generator_has_the_same_audio_in_all_releases():
    """A change of the audio needs another GENERATOR_VERSION, because files with the old audio would be reused."""
    found = []
    for index in range(len(DESCRIPTIONS)):
        samples = render_clip(0, "train", index).samples
        vector = np.random.default_rng(0).standard_normal(len(samples))
        found.append(samples @ vector / np.linalg.norm(samples))
    assert GENERATOR_VERSION == 1
    np.testing.assert_allclose(found, PROJECTIONS, atol=0.002)


@pytest.mark.parametrize("count", [64, 100, 192])
def test_descriptions_are_spread_evenly_over_every_split(count):
    orders = []
    for split in SPLITS:
        counts = Counter(describe(0, split, index) for index in range(count))
        assert len(counts) == len(DESCRIPTIONS)
        assert max(counts.values()) - min(counts.values()) == (count % 64 > 0)
        orders.append([describe(0, split, index) for index in range(64)])
    assert all(first != second for first, second in combinations(orders, 2))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def splits(cache_dir):
    return load_splits("synthetic", cache_dir=cache_dir, num_train=128, num_validation=64, num_test=3)


def test_builder_returns_valid_rows_with_the_rendered_audio(splits):
    assert {name: len(split) for name, split in splits.items()} == {"train": 128, "validation": 64, "test": 3}
    for split, rows in splits.items():
        for index, row in enumerate(rows):
            validate_row(row)
            clip, info = render_clip(0, split, index), soundfile.info(row["audio_path"])
            assert (info.samplerate, info.channels, info.subtype) == (RATE_HZ, 1, "PCM_16")
            samples, _ = soundfile.read(row["audio_path"], dtype="float32")
            np.testing.assert_allclose(samples, clip.samples, atol=1 / 32768)
            label = describe(0, split, index).label
            assert row["labels"] == [label]
            assert row["events"] == [
                {"label": label, "onset_seconds": clip.onset_seconds, "offset_seconds": clip.offset_seconds}
            ]
            assert row["source"] == f"synthetic:0:{split}:{index}"
            assert row["license"] == "CC0-1.0"


def test_captions_contain_only_the_description(splits):
    captions_of = {}
    for index, row in enumerate(splits["train"]):
        description = describe(0, "train", index)
        assert captions_of.setdefault(description, row["captions"]) == row["captions"]
    for index, row in enumerate(splits["validation"]):
        assert captions_of[describe(0, "validation", index)] == row["captions"]
    for language in LANGUAGES:
        texts = list(chain.from_iterable(captions[language] for captions in captions_of.values()))
        assert all(len(captions[language]) >= 3 for captions in captions_of.values())
        assert len(texts) == len(set(texts))


def test_a_position_is_in_the_caption_that_the_audio_has(splits):
    for row in splits["train"]:
        is_late = row["events"][0]["onset_seconds"] >= 1
        assert row["captions"]["eng"][0].endswith(" at the end" if is_late else " at the beginning")


def test_cache_and_audio_are_reused_and_deleted_audio_comes_back(tmp_path):
    def load(**config):
        return load_splits("synthetic", cache_dir=str(tmp_path), num_train=2, num_validation=0, num_test=0, **config)

    load(limit=1)
    assert [path.name for path in builder(tmp_path).audio_folder.iterdir()] == ["train-00000.wav"]
    rows = load()["train"]
    files = sorted(builder(tmp_path).audio_folder.iterdir())
    assert [str(path) for path in files] == rows["audio_path"][:]
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    load()
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in files] == before
    files[1].unlink()
    load()
    assert files[1].read_bytes() == before[1][1]


def builder(cache_dir, **config):
    return SyntheticEvents(cache_dir=str(cache_dir), **{"num_train": 2, "num_validation": 0, "num_test": 0, **config})


def test_other_settings_have_other_caches_and_only_other_audio_has_other_files(tmp_path):
    settings = [{}, {"seed": 1}, {"duration_seconds": 3.0}, {"sampling_rate_hz": 22050}, {"num_train": 5}]
    settings += [{"languages": ["eng"]}, {"languages": ["fra", "eng"]}, {"audio_dir": str(tmp_path / "elsewhere")}]
    builders = [builder(tmp_path, **config) for config in settings]
    assert len({each.cache_dir for each in builders}) == len(settings)
    folders = [each.audio_folder for each in builders]
    assert len(set(folders[:4])) == 4
    assert set(folders[4:7]) == {folders[0]}
    assert folders[7] == tmp_path / "elsewhere" / folders[0].name
    assert builder(tmp_path, duration_seconds=2).audio_folder == folders[0]


def test_a_relative_folder_of_audio_is_another_in_another_place(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "audio").mkdir()
    found = {}
    for name in ("a", "b"):
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("HOME", str(tmp_path / name))
        made = [builder(tmp_path, audio_dir=path) for path in ("audio", "~/audio", str(tmp_path / name / "audio"))]
        assert {each.audio_folder.parent for each in made} == {tmp_path / name / "audio"}
        (found[name],) = {each.cache_dir for each in made}
    assert found["a"] != found["b"]


def test_a_changed_generator_has_another_cache_and_other_files(tmp_path, monkeypatch):
    before = builder(tmp_path)
    folder = before.audio_folder
    monkeypatch.setattr("modeling_supclap.datasets_scripts.builders.synthetic.GENERATOR_VERSION", -1)
    after = builder(tmp_path)
    assert before.cache_dir != after.cache_dir
    assert folder != after.audio_folder


def test_longer_clips_at_another_rate_and_in_two_languages(tmp_path):
    made = builder(tmp_path, duration_seconds=2.5, sampling_rate_hz=22050, languages=["fra", "eng"])
    made.download_and_prepare()
    rows = made.as_dataset(split="train")
    assert list(rows.features["captions"]) == ["fra", "eng"]
    info = soundfile.info(rows[0]["audio_path"])
    assert (info.samplerate, info.duration) == (22050, 2.5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_train": -1}, "num_train.*-1"),
        ({"seed": -1}, "seed.*-1"),
        ({"duration_seconds": 0.5}, r"duration_seconds.*0\.5"),
        ({"sampling_rate_hz": 8000}, "sampling_rate_hz.*8000"),
        ({"num_train": 0, "num_validation": 0, "num_test": 0}, "no clips"),
    ],
)
def test_bad_settings_are_refused(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load_splits("synthetic", cache_dir=str(tmp_path), **config)


def test_an_unknown_dataset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'synthetics'.*'synthetic'"):
        load_splits("synthetics")


def test_background_noise_is_between_white_and_pink():
    """The slope of the power spectrum in decades is between 0 (white) and -1 (pink), and varies over all of it."""
    slopes = []
    for seed in range(200):
        noise = background_noise(np.zeros(4096), np.random.default_rng(seed))
        power = np.abs(np.fft.rfft(noise))[1:] ** 2
        slopes.append(np.polyfit(np.log10(np.arange(1, len(power) + 1)), np.log10(power), 1)[0])
    assert -1.15 < min(slopes) < -0.85
    assert -0.15 < max(slopes) < 0.15
    assert np.mean(slopes) == pytest.approx(-0.5, abs=0.1)
