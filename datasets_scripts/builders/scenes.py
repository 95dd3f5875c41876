"""Scenes of one to four sound events, composed from generated sounds or from your recordings, with captions.

Events follow each other or overlap. The captions describe the order and the repetitions of the events, their loudness
and distance, and the room. A training clip has one caption, a validation or test clip has up to five.

Validation and test clips differ from training clips in their sets of sounds (a single sound in its description), in
their recordings and in the wording of their captions. If the table of recordings has speakers or folds, these differ
as well.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import fft
from scipy import signal

from ..audio import read_audio, resample
from ..schema import Event
from ..splits import SPLITS, draw_sources
from .captions import capitalize, label_phrases, read_phrases
from .metadata import fingerprint, read_csv
from .recordings import Recordings, stem_of
from .synthetic import (
    SOUNDS,
    SyntheticEvents,
    SyntheticEventsConfig,
    background_noise,
    fade_ends,
    scale_to_peak,
    seeded_generator,
)

SCENES_VERSION = 2
"""Part of the name of the audio folder. Increase it if the same settings produce other audio."""

NUM_EVENTS = {1: 0.25, 2: 0.35, 3: 0.25, 4: 0.15}
"""Probability of each number of events."""

COUNTS = {1: "", 2: "twice", 3: "three times"}
PEAK_DB = {"": (-12.0, -9.0), "loud": (-3.0, -1.5), "quiet": (-26.0, -22.0), "far": (-20.0, -16.0)}
DECAY_SECONDS = {"": 0.0, "small room": 0.3, "hall": 1.5}
"""Reverberation time (60 dB) of each room."""

FAR_DECAY_SECONDS = 0.6
NOISE_PEAK_DB = (-60.0, -45.0)
HELD_OUT_CAPTIONS = 5
HELD_OUT_SHARES = {"test": 0.1, "validation": 0.1}
"""Fraction of the sets of sounds to hold out for each split."""

RECORDING_SHARES = {"test": 0.2, "validation": 0.1}
"""Fraction of the speakers, folds or files to hold out for each split, at least one."""


class SceneEvent(NamedTuple):
    """Sound event: its label, the number of repetitions (1 to 3), and its manner: "", "loud", "quiet" or "far"."""

    label: str
    repetitions: int
    manner: str


class Scene(NamedTuple):
    """One to four groups of events in temporal order, and a room. A group is one event, or two overlapping events."""

    groups: tuple[tuple[SceneEvent, ...], ...]
    room: str  # "", "small room" or "hall"

    @property
    def events(self) -> list[SceneEvent]:
        """All events, group by group."""
        return list(chain.from_iterable(self.groups))

    @property
    def composition(self) -> str:
        """Sorted labels of the events as text, or all fields of the scene if it has only one event.

        All scenes with the same composition are in the same split.
        """
        events = self.events
        return repr(self) if len(events) == 1 else repr(sorted(event.label for event in events))


def draw_scene(labels: Sequence[str], split: str, rng: np.random.Generator) -> Scene:
    """Draw a random scene of a split from at least four `labels`. `Scene.composition` determines the split."""
    while True:
        size = int(rng.choice(list(NUM_EVENTS), p=list(NUM_EVENTS.values())))
        names = sorted(rng.choice(labels, size, replace=False).tolist())
        rng.shuffle(names)
        groups: list[list[str]] = []
        for name in names:
            if groups and len(groups[-1]) == 1 and rng.random() < 0.35:
                groups[-1].append(name)
            else:
                groups.append([name])

        most = 3 if len(groups) <= 2 else 1  # three or four groups leave no time for repetitions
        events = []
        for group in groups:
            members = []
            for name in sorted(group):
                manner = str(rng.choice(list(PEAK_DB), p=(0.4, 0.2, 0.2, 0.2)))
                members.append(SceneEvent(name, int(rng.integers(1, most + 1)), manner))
            events.append(tuple(members))

        scene = Scene(tuple(events), str(rng.choice(list(DECAY_SECONDS), p=(0.5, 0.25, 0.25))))
        is_plain = size == 1 and scene.events[0][1:] == (1, "") and not scene.room
        if not is_plain and _draw_split(scene.composition) == split:
            return scene


def _draw_split(composition: str) -> str:
    share = int.from_bytes(hashlib.sha256(composition.encode()).digest()[:8], "big") / 2**64
    for split, of_split in HELD_OUT_SHARES.items():
        if share < of_split:
            return split
        share -= of_split
    return "train"


def caption_scene(
    scene: Scene, phrases: Mapping[str, Mapping[str, str]], language: str, held_out: bool, rng: np.random.Generator
) -> str:
    """Write a caption of a scene.

    Each caption combines a sentence template with random wordings for order, loudness, distance and room. A combination
    is used either in training or in the held-out splits. Every word occurs in training.

    Args:
        phrases: `{label: {language: noun phrase}}`.
        held_out: Whether to use the combinations of the held-out splits.
        rng: Random generator for template and wordings. Use equal states in all languages, so that the captions are
            translations of each other.
    """
    words = {key: by_language[language] for key, by_language in read_phrases("scenes").items()}
    templates = read_phrases("templates")["sound"][language]
    template = int(rng.integers(len(templates)))

    def choose(key: str) -> str:
        if not key:
            return ""
        wordings = words[key]
        in_training = round(0.6 * len(wordings))
        allowed = []
        for number, wording in enumerate(wordings):
            if ((template + number) % len(wordings) >= in_training) == held_out:
                allowed.append(wording)
        return allowed[rng.integers(len(allowed))]

    groups = []
    for group in scene.groups:
        texts = []
        for event in group:
            manner, count = choose(event.manner), choose(COUNTS[event.repetitions])
            texts.append(words["event"].format(phrase=phrases[event.label][language], manner=manner, count=count))
        groups.append(choose("while").join(texts))

    chain = groups[0]
    if len(groups) == 2 and rng.random() < 0.3:
        chain = choose("after").format(first=groups[0], second=groups[1])
    else:
        for text in groups[1:]:
            chain += choose("then") + text
    phrase = words["scene"].format(events=chain, room=choose(scene.room))
    return capitalize(templates[template].format(phrase=phrase))


Take = Callable[[str, int, np.random.Generator], np.ndarray]
"""Function (label, maximum number of samples, random generator) -> samples of one sound."""


class Placement(NamedTuple):
    """Position of an event in a clip: index of its first sample, and distance between its repetitions in samples."""

    event: SceneEvent
    start: int
    period: int


def place_events(scene: Scene, num_samples: int, rng: np.random.Generator) -> list[Placement]:
    """Draw the event positions in a clip, in the order of `scene.events`. Each group has an equal part of the clip."""
    placements = []
    part = num_samples // len(scene.groups)
    for number, group in enumerate(scene.groups):
        for event in group:
            period = int(part * rng.uniform(0.7, 0.95)) // event.repetitions
            start = number * part + int(rng.uniform(0, part - event.repetitions * period))
            placements.append(Placement(event, start, period))
    return placements


def render_scene(
    scene: Scene,
    placements: Sequence[Placement],
    take: Take,
    num_samples: int,
    sampling_rate_hz: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Render a scene with the output of `place_events`; return float32 `(num_samples,)` with a peak below 1.

    `take` returns the sound of a label. `rng` is used to draw sounds, levels, background noise and reverberation.
    """
    samples = np.zeros(num_samples)
    for event, start, period in placements:
        sound = fade_ends(take(event.label, int(0.85 * period), rng), sampling_rate_hz)
        if event.manner == "far":
            sound = _lowpass(_reverberate(sound, FAR_DECAY_SECONDS, 0.0, sampling_rate_hz, rng), sampling_rate_hz)
        sound = scale_to_peak(sound, rng.uniform(*PEAK_DB[event.manner]))
        for first in range(start, start + event.repetitions * period, period):
            samples[first : first + len(sound)] += sound[: num_samples - first]

    if scene.room:
        samples = _reverberate(samples, DECAY_SECONDS[scene.room], 1.0, sampling_rate_hz, rng)[:num_samples]
    seconds = np.arange(num_samples) / sampling_rate_hz
    samples += scale_to_peak(background_noise(seconds, rng), rng.uniform(*NOISE_PEAK_DB))
    return (samples / max(1.0, np.abs(samples).max() / 0.99)).astype(np.float32)


def _reverberate(
    samples: np.ndarray, decay_seconds: float, direct: float, sampling_rate_hz: int, rng: np.random.Generator
) -> np.ndarray:
    """Convolve with exponentially decaying noise of unit energy, and add the direct sound."""
    seconds = np.arange(round(decay_seconds * sampling_rate_hz)) / sampling_rate_hz
    tail = rng.standard_normal(seconds.size) * 10 ** (-3 * seconds / decay_seconds)
    tail *= 0.5 / np.sqrt((tail**2).sum())
    wet = signal.fftconvolve(samples, tail)
    wet[: samples.size] += direct * samples
    return wet


def _lowpass(samples: np.ndarray, sampling_rate_hz: int) -> np.ndarray:
    """Attenuate by 6 dB per octave above 1.5 kHz, as for a distant sound."""
    frequencies_hz = fft.rfftfreq(samples.size, 1 / sampling_rate_hz)
    return fft.irfft(fft.rfft(samples) / np.sqrt(1 + (frequencies_hz / 1500) ** 2), samples.size)


def take_generated(sampling_rate_hz: int) -> Take:
    """Return a function that renders the sounds of `synthetic.SOUNDS` by their labels, such as "low_siren"."""

    def take(label: str, most_samples: int, rng: np.random.Generator) -> np.ndarray:
        variant, _, name = label.partition("_")
        sound = SOUNDS[name]
        return sound.waveform(rng.uniform(*sound.variants[variant]), np.arange(most_samples) / sampling_rate_hz, rng)

    return take


def take_recorded(files: Mapping[str, Sequence[Path]], sampling_rate_hz: int) -> Take:
    """Return a function that reads a random recording of a label in `files`, and crops it around a random loud sample.

    A sample is loud if it exceeds 5 % of the peak. ValueError is raised if a recording is silent.
    """

    @cache
    def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
        waveform, rate_hz = read_audio(path)
        waveform = resample(waveform, rate_hz, sampling_rate_hz, "sinc_interp_hann")
        loud = np.flatnonzero(np.abs(waveform) > 0.05 * np.abs(waveform).max())
        if not loud.size:
            raise ValueError(f"{path} is silent; remove it from the table of the recordings")
        return waveform[loud[0] : loud[-1] + 1], loud - loud[0]

    def take(label: str, most_samples: int, rng: np.random.Generator) -> np.ndarray:
        waveform, loud = read(files[label][int(rng.integers(len(files[label])))])
        start = int(rng.choice(loud)) - most_samples // 2
        start = max(0, min(start, len(waveform) - most_samples))
        return waveform[start : start + most_samples].astype(np.float64)

    return take


def split_recordings(folders: Sequence[str], seed: int) -> dict[str, dict[str, list[Path]]]:
    """List the recordings of folders by split and label, `{split: {label: [recording, ...]}}`.

    Each folder contains the table `metadata.csv` (columns file_name, label and optionally speaker) or `meta/esc50.csv`
    (columns filename, category and fold). If the table has a column of folds or speakers, whole folds or speakers are
    held out. Otherwise, single recordings of each label are held out. Raises FileNotFoundError if the folder, its table
    or a recording does not exist.
    """
    members: dict[tuple[tuple[int, str], str], list[tuple[str, Path]]] = defaultdict(list)
    for number, recordings in enumerate(map(Recordings, folders)):
        table = find_table(recordings)
        of_esc50, of_others = ("filename", "category", "fold"), ("file_name", "label", "speaker")
        columns = of_esc50 if table.name == "esc50.csv" else of_others
        for line in read_csv(table, columns[:2]):
            name, label, group = (line.values.get(column, "") for column in columns)
            path = recordings.at(name) or recordings.named([stem_of(name)])
            if path is None:
                raise FileNotFoundError(f"{line.where}: {name} is not in {recordings.folder}")
            # Sample from all folds or speakers of the folder, or from the recordings of one label.
            members[(number, "" if group else label), group or name].append((label, path))

    files: dict[str, dict[str, list[Path]]] = {split: defaultdict(list) for split in SPLITS}
    for pool in sorted({pool for pool, _ in members}):
        groups = [group for of_pool, group in members if of_pool == pool]
        counts = {split: max(1, round(share * len(groups))) for split, share in RECORDING_SHARES.items()}
        if len(groups) <= sum(counts.values()):
            continue
        for group, split in draw_sources(groups, counts, seed).items():
            for label, path in members[pool, group]:
                files[split][label].append(path)
    return files


def find_table(recordings: Recordings) -> Path:
    """Return the path of the table of the recordings. Raise FileNotFoundError if it does not exist."""
    for name in ("meta/esc50.csv", "metadata.csv"):
        if (recordings.folder / name).is_file():
            return recordings.folder / name
    raise FileNotFoundError(f"{recordings.folder} has neither metadata.csv nor meta/esc50.csv")


@dataclass
class ScenesConfig(SyntheticEventsConfig):
    """Sounds and length of the scenes, in addition to `SyntheticEventsConfig`.

    Attributes:
        duration_seconds: Length of each clip in seconds, at least 1.
        recordings: Folders of labelled recordings (see `split_recordings`). None: use generated sounds.
    """

    DATASET = "the scenes"

    duration_seconds: float = 4.0
    recordings: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recordings = [self.recordings] if isinstance(self.recordings, str) else self.recordings
        self.license = "unknown" if self.recordings else self.license

    @cached_property
    def audio_name(self) -> str:
        """Name of the audio folder: a hash of all settings, recordings and tables that affect the audio."""
        sources = []
        for recordings in map(Recordings, self.recordings or ()):
            sources.append((recordings.fingerprint(), fingerprint([find_table(recordings)])))
        settings = (SCENES_VERSION, super().audio_name, sources)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


class Scenes(SyntheticEvents):
    """Builder of the scenes with train, validation and test split."""

    BUILDER_CONFIG_CLASS = ScenesConfig
    PREFIX = "scenes"

    def describe(self, split: str, index: int) -> tuple[dict[str, list[str]], list[Event]]:
        rate_hz, events = self.config.sampling_rate_hz, []
        for event, start, period in self._placements(split, index):
            stop = start + event.repetitions * period
            events.append(Event(label=event.label, onset_seconds=start / rate_hz, offset_seconds=stop / rate_hz))
        return self._captions(split, index), events

    def render(self, split: str, index: int) -> np.ndarray:
        config = self.config
        rng = seeded_generator(config.seed, split, index, 2)
        scene, placements = self._scenes[split][index], self._placements(split, index)
        return render_scene(scene, placements, self._takes[split], self._num_samples, config.sampling_rate_hz, rng)

    def _captions(self, split: str, index: int) -> dict[str, list[str]]:
        """Write one caption per language, or up to five for a held-out clip; equal indices are translations."""
        captions: dict[str, list[str]] = {language: [] for language in self.config.languages}
        held_out = split != "train"
        distinct: set[str] = set()
        for number in range(20 if held_out else 1):
            texts = {}
            for language in captions:
                rng = seeded_generator(self.config.seed, split, index, 1, number)
                texts[language] = caption_scene(self._scenes[split][index], self._phrases, language, held_out, rng)
            if distinct.isdisjoint(texts.values()):
                distinct.update(texts.values())
                for language, text in texts.items():
                    captions[language].append(text)
            if len(distinct) >= HELD_OUT_CAPTIONS * len(captions):
                break
        return captions

    def _placements(self, split: str, index: int) -> list[Placement]:
        rng = seeded_generator(self.config.seed, split, index, 0)
        return place_events(self._scenes[split][index], self._num_samples, rng)

    @property
    def _num_samples(self) -> int:
        return round(self.config.duration_seconds * self.config.sampling_rate_hz)

    @cached_property
    def _phrases(self) -> dict[str, dict[str, str]]:
        """Noun phrases as `{label: {language: phrase}}`. Labels without recordings in every split are omitted."""
        if not self.config.recordings:
            return label_phrases("synthetic")
        phrases = label_phrases("esc50") | label_phrases("urbansound8k") | label_phrases("recordings")
        usable = set.intersection(*(set(of_split) for of_split in self._files.values())) & phrases.keys()
        if len(usable) < max(NUM_EVENTS):
            raise ValueError(
                f"recordings contains {len(usable)} usable labels {sorted(usable)}; expected at least "
                f"{max(NUM_EVENTS)} labels with phrases in phrases/ and recordings for all splits"
            )
        return {label: phrases[label] for label in sorted(usable)}

    @cached_property
    def _files(self) -> dict[str, dict[str, list[Path]]]:
        return split_recordings(self.config.recordings or (), self.config.seed)

    @cached_property
    def _takes(self) -> dict[str, Take]:
        rate_hz = self.config.sampling_rate_hz
        if not self.config.recordings:
            return dict.fromkeys(SPLITS, take_generated(rate_hz))
        return {split: take_recorded(self._files[split], rate_hz) for split in SPLITS}

    @cached_property
    def _scenes(self) -> dict[str, list[Scene]]:
        """Draw the scenes of each split, without duplicates. A larger split begins with the scenes of a smaller one."""
        scenes: dict[str, list[Scene]] = {}
        for split in SPLITS:
            rng = seeded_generator(self.config.seed, split)
            distinct: dict[Scene, None] = {}
            while len(distinct) < getattr(self.config, f"num_{split}"):
                distinct[draw_scene(list(self._phrases), split, rng)] = None
            scenes[split] = list(distinct)
        return scenes
