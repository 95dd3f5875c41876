"""Synthetic dataset of generated sound events with captions; no download is required.

Each clip contains one event over faint background noise. The captions describe the sound, its variant (such as low or
high, slow or fast), and its position (beginning or end of the clip). All other properties are random, so that a model
can match audio and captions only by the described properties.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

# not np.fft: `datasets` replaces np in the modules of builders by a copy without lazy attributes
from numpy import fft

from ..atomic_files import atomic_write
from ..schema import Event
from ..splits import SPLITS
from .captions import read_phrases, render_captions
from .folder import Clip, Collection, RowBuilder, RowConfig

GENERATOR_VERSION = 1
"""Part of the cache key of the rendered files. Increase it after any change to the audio."""

POSITIONS = ("beginning", "end")
PEAK_DB = (-18.0, -4.0)
NOISE_PEAK_DB = (-50.0, -30.0)

Waveform = Callable[[float, np.ndarray, np.random.Generator], np.ndarray]
"""Function (pitch or rate in Hz, sample times `t` in seconds, evenly spaced from 0, random generator) -> samples."""


class Sound(NamedTuple):
    """Type of sound event: its waveform, and ranges (minimum, maximum) of its properties."""

    waveform: Waveform
    variants: dict[str, tuple[float, float]]  # variant -> range of its pitch or rate in Hz
    lengths: tuple[float, float] = (0.32, 0.42)  # as fractions of the clip length


class Description(NamedTuple):
    """Sound, variant and position of the event in a clip, as described in its captions."""

    sound: str
    variant: str
    position: str

    @property
    def label(self) -> str:
        """Label of the event, the key in `phrases/synthetic.json`, such as "low_siren"."""
        return f"{self.variant}_{self.sound}"


def _sine(frequency_hz: Any, t: np.ndarray) -> np.ndarray:
    cycles = np.cumsum(np.broadcast_to(frequency_hz, t.shape)) * (t[1] - t[0])
    return np.sin(2 * np.pi * cycles)


def _harmonics(pitch_hz: Any, amplitudes: Sequence[float], t: np.ndarray) -> np.ndarray:
    samples = np.zeros_like(t)
    for number, amplitude in enumerate(amplitudes, start=1):
        samples += amplitude * _sine(number * pitch_hz, t)
    return samples


def _noise(low_hz: float, high_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    spectrum = fft.rfft(rng.standard_normal(t.size))

    frequencies_hz = fft.rfftfreq(t.size, t[1] - t[0])
    return fft.irfft(spectrum * ((frequencies_hz >= low_hz) & (frequencies_hz <= high_hz)), t.size)


def _beat(rate_hz: float, t: np.ndarray) -> np.ndarray:
    return 0.55 + 0.45 * np.cos(2 * np.pi * rate_hz * t)


def _siren(pitch_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    alternations_hz = rng.uniform(2.5, 3.5)
    is_upper = np.mod(t, 1 / alternations_hz) * alternations_hz > 0.5
    return _harmonics(np.where(is_upper, 1.35 * pitch_hz, pitch_hz), (1, 0.5, 0.3), t)


def _clicks(rate_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    since = np.mod(t, 1 / rate_hz)
    return np.exp(-since / 0.002) * np.cos(2 * np.pi * rng.uniform(2000, 3500) * since)


def _bird_chirp(pitch_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    chirp = np.minimum(np.mod(t, 1 / rng.uniform(6, 9)) / 0.08, 1)
    return _sine(pitch_hz * (1 + 0.5 * chirp), t) * np.sin(np.pi * chirp)


def _beeps(pitch_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    rate_hz = rng.uniform(5, 7)
    return _sine(pitch_hz, t) * (np.mod(t, 1 / rate_hz) * rate_hz < 0.5)


def _bell(pitch_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # Partials of a minor-third church bell: hum, prime, tierce, quint, nominal, and one inharmonic partial above.
    ratios = (0.5, 1.0, 1.2, 1.5, 2.0, 2.67)
    return np.sum([np.exp(-3 * ratio * t) * _sine(ratio * pitch_hz, t) for ratio in ratios], axis=0)


def _knocks(rate_hz: float, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    since = np.mod(t, 1 / rate_hz)
    wood_hz = rng.uniform(150, 220)
    body = np.sin(2 * np.pi * wood_hz * since) + 0.6 * np.sin(2 * np.pi * 2.3 * wood_hz * since)
    contact = np.exp(-since / 0.003) * rng.standard_normal(t.size)
    return np.exp(-since / 0.02) * body + 0.3 * contact


PITCHES: dict[str, tuple[float, float]] = {"low": (180, 280), "high": (1300, 1900)}
SLOW, FAST = (3, 4.5), (11, 15)
SOUNDS = {
    "pure_tone": Sound(lambda pitch, t, rng: _sine(pitch, t), {"low": (180, 320), "high": (1500, 2500)}),
    "rising_sweep": Sound(lambda pitch, t, rng: _sine(pitch * 3 ** (t / t[-1]), t), PITCHES),
    "falling_sweep": Sound(lambda pitch, t, rng: _sine(pitch * 3 ** (1 - t / t[-1]), t), PITCHES),
    "siren": Sound(_siren, {"low": (300, 420), "high": (1000, 1400)}),
    "noise_burst": Sound(
        lambda centre, t, rng: _noise(0.6 * centre, 1.6 * centre, t, rng) * np.exp(-4 * (t / t[-1])),
        {"low": (300, 500), "high": (3000, 4500)},
        lengths=(0.08, 0.14),
    ),
    "clicks": Sound(_clicks, {"slow": (3.5, 5), "fast": (14, 20)}),
    "hum": Sound(
        lambda pitch, t, rng: _harmonics(pitch, [n**-1.5 for n in range(1, 6)], t),
        {"low": (50, 70), "high": (120, 160)},
    ),
    "tremolo": Sound(
        lambda rate, t, rng: _sine(rng.uniform(600, 1000), t) * _beat(rate, t), {"slow": SLOW, "fast": FAST}
    ),
    "warble": Sound(
        lambda rate, t, rng: _sine(rng.uniform(600, 1000) * (1 + 0.12 * np.sin(2 * np.pi * rate * t)), t),
        {"slow": SLOW, "fast": FAST},
    ),
    "bird_chirp": Sound(_bird_chirp, {"low": (1500, 2000), "high": (3500, 4500)}),
    "beeps": Sound(_beeps, {"low": (350, 550), "high": (2000, 2800)}),
    "bell": Sound(_bell, {"low": (250, 400), "high": (1200, 1800)}),
    "knocks": Sound(_knocks, {"slow": (3, 4), "fast": (9, 12)}),
    "rumble": Sound(lambda rate, t, rng: _noise(40, 200, t, rng) * _beat(rate, t), {"slow": (3, 4), "fast": (9, 12)}),
    "buzz": Sound(
        lambda pitch, t, rng: _harmonics(pitch, [1 / n for n in range(1, int(6000 / pitch) + 1)], t),
        {"low": (80, 120), "high": (350, 500)},
    ),
    "hiss": Sound(
        lambda centre, t, rng: _noise(0.6 * centre, 1.6 * centre, t, rng) * np.sin(np.pi * (t / t[-1])),
        {"low": (1200, 1700), "high": (4000, 4800)},
    ),
}

DESCRIPTIONS = tuple(
    Description(name, variant, position)
    for (name, sound), position in itertools.product(SOUNDS.items(), POSITIONS)
    for variant in sound.variants
)


class RenderedClip(NamedTuple):
    """Rendered clip: float32 samples with a peak below 0.99, and onset and offset of the event in seconds."""

    samples: np.ndarray
    onset_seconds: float
    offset_seconds: float


def describe(seed: int, split: str, index: int) -> Description:
    """Return the description of a clip, an element of `DESCRIPTIONS`.

    The arguments are those of `render_clip`. Each split repeats a random permutation of the descriptions, so that their
    counts differ by at most one.

    >>> len({describe(0, "train", index) for index in range(64)})
    64
    """
    order = seeded_generator(seed, split).permutation(len(DESCRIPTIONS))
    return DESCRIPTIONS[order[index % len(DESCRIPTIONS)]]


def render_clip(
    seed: int,
    split: str,
    index: int,
    duration_seconds: float = 2.0,
    sampling_rate_hz: int = 16000,
    only_times: bool = False,
) -> RenderedClip:
    """Render a clip with its event near the beginning or the end; the same arguments produce the same samples.

    The splits use independent random numbers. The sounds contain frequencies up to 7.7 kHz. With `only_times`, the
    samples are empty.

    >>> clip = render_clip(0, "train", 0)
    >>> clip.samples.shape, clip.samples.dtype
    ((32000,), dtype('float32'))
    """
    description, rng = describe(seed, split, index), seeded_generator(seed, split, index)
    sound = SOUNDS[description.sound]
    length_seconds = duration_seconds * rng.uniform(*sound.lengths)
    gap_seconds = duration_seconds * rng.uniform(0.01, 0.08)
    is_first = description.position == "beginning"
    start = round((gap_seconds if is_first else duration_seconds - gap_seconds - length_seconds) * sampling_rate_hz)
    stop = start + round(length_seconds * sampling_rate_hz)

    samples = np.zeros(0)
    if not only_times:
        seconds = np.arange(round(duration_seconds * sampling_rate_hz)) / sampling_rate_hz
        event = sound.waveform(rng.uniform(*sound.variants[description.variant]), seconds[: stop - start], rng)
        samples = scale_to_peak(background_noise(seconds, rng), rng.uniform(*NOISE_PEAK_DB))
        samples[start:stop] += scale_to_peak(fade_ends(event, sampling_rate_hz), rng.uniform(*PEAK_DB))
    return RenderedClip(samples.astype(np.float32), start / sampling_rate_hz, stop / sampling_rate_hz)


def seeded_generator(seed: int, split: str, *index: int) -> np.random.Generator:
    """Return the random generator of a split, or of one clip in it."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), *index)))


def background_noise(seconds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return noise with a random spectral slope between white and pink."""
    spectrum = fft.rfft(rng.standard_normal(seconds.size))
    bins = np.maximum(np.arange(spectrum.size), 1)
    return fft.irfft(spectrum * bins ** (-0.5 * rng.uniform(0, 1)), seconds.size)


def fade_ends(event: np.ndarray, sampling_rate_hz: int) -> np.ndarray:
    """Fade a sound in and out over 2 ms."""
    ramp = np.linspace(0, 1, round(0.002 * sampling_rate_hz))
    envelope = np.ones_like(event)
    envelope[: ramp.size], envelope[-ramp.size :] = ramp, ramp[::-1]
    return event * envelope


def scale_to_peak(samples: np.ndarray, peak_db: float) -> np.ndarray:
    """Scale samples to a peak in dB, where full scale is 0 dB."""
    return samples * (10 ** (peak_db / 20) / np.abs(samples).max())


@dataclass
class SyntheticEventsConfig(RowConfig):
    """Size and audio format of the synthetic dataset, in addition to `RowConfig`.

    Attributes:
        num_train: Number of training clips. 0: no training split. If the number is increased, the first clips stay the
            same.
        num_validation: Number of validation clips. 0: no validation split.
        num_test: Number of test clips. 0: no test split.
        seed: Random seed of the dataset.
        duration_seconds: Length of each clip in seconds, at least 1.
        sampling_rate_hz: Sampling rate of the audio files in Hz, at least 16000.
        audio_dir: Folder in which a new folder with the audio files is created. None: the cache of `datasets`.
    """

    DATASET = "the synthetic dataset"
    license = "CC0-1.0"

    num_train: int = 2560
    num_validation: int = 256
    num_test: int = 256
    seed: int = 0
    duration_seconds: float = 2.0
    sampling_rate_hz: int = 16000
    audio_dir: str | None = None

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of the code and of the audio settings for the cache key, `{name: hash}`."""
        fingerprints = {**super().fingerprints(), "audio": self.audio_name}
        if self.audio_dir is not None:
            fingerprints["audio_dir"] = str(Path(self.audio_dir).expanduser().resolve())
        return fingerprints

    @property
    def audio_name(self) -> str:
        """Name of the audio folder: a hash of all settings that affect the audio."""
        settings = (GENERATOR_VERSION, self.seed, float(self.duration_seconds), self.sampling_rate_hz)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


class SyntheticEvents(RowBuilder):
    """Builder of the synthetic dataset with train, validation and test split."""

    BUILDER_CONFIG_CLASS = SyntheticEventsConfig
    PREFIX = "synthetic"  # of ids and sources

    @property
    def audio_folder(self) -> Path:
        """Folder with the audio files. Its name contains a hash, so that different settings use different folders."""
        root = self.config.audio_dir or Path(self._cache_dir_root, "synthetic_audio")
        return Path(root).expanduser().resolve() / self.config.audio_name

    def collect(self) -> Collection:
        """Return all clips with captions and events; the audio is rendered in `download_and_prepare`."""
        config, collection = self.config, Collection()
        for split, index, path in self._clips():
            captions, events = self.describe(split, index)
            labels = sorted({event["label"] for event in events})
            clip_id = f"{self.PREFIX}-{config.seed}-{split}-{index:05d}"
            source = f"{self.PREFIX}:{config.seed}:{split}:{index}"
            collection.add(split, Clip(clip_id, captions, source, config.license, labels, events), clip_id, path)
        return collection

    def describe(self, split: str, index: int) -> tuple[dict[str, list[str]], list[Event]]:
        """Return the captions and the events of a clip."""
        description = describe(self.config.seed, split, index)
        onset, offset = self._render(split, index, only_times=True)[1:]
        phrases = read_phrases("synthetic")[description.label]
        captions = render_captions(phrases, self.config.languages, f"sound_at_{description.position}")
        return captions, [Event(label=description.label, onset_seconds=onset, offset_seconds=offset)]

    def download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the rows (see `RowBuilder.download_and_prepare`), and render missing audio files."""
        super().download_and_prepare(*args, **kwargs)
        self.audio_folder.mkdir(parents=True, exist_ok=True)
        for split, index, path in self._clips():
            if (self.config.limit is None or index < self.config.limit) and not path.exists():
                with atomic_write(path) as unfinished:  # other processes never read a partial file
                    samples = self.render(split, index)
                    soundfile.write(unfinished, samples, self.config.sampling_rate_hz, format="WAV")

    def render(self, split: str, index: int) -> np.ndarray:
        """Render a clip; the same arguments produce the same samples."""
        return self._render(split, index).samples

    def _render(self, split: str, index: int, **options: bool) -> RenderedClip:
        config = self.config
        return render_clip(config.seed, split, index, config.duration_seconds, config.sampling_rate_hz, **options)

    def _clips(self) -> Iterator[tuple[str, int, Path]]:
        """Yield the split, the index and the audio file of each clip."""
        folder = self.audio_folder
        for split in SPLITS:
            for index in range(getattr(self.config, f"num_{split}")):
                yield split, index, folder / f"{split}-{index:05d}.wav"
