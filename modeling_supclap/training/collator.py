"""Turns rows into a batch through the processor. The draw of a language happens here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from modeling_supclap.datasets_scripts import bad_audio
from modeling_supclap.datasets_scripts.audio import read_row, to_int16
from modeling_supclap.datasets_scripts.schema import (
    all_captions,
    caption_counts,
    group_id,
    lacking_languages,
    stable_id,
)
from modeling_supclap.datasets_scripts.temporal.items import RenderOptions, TemporalItems, drawn, render

from ..encoding import max_chunk_seconds
from ..processing_supclap import SupCLAPProcessor
from .grad_cache import real_lengths
from .training_args import SupCLAPTrainingArguments

Row = Mapping[str, Any]


class IndexedRows(Dataset):
    """Rows that know their place: adds `clip_index`, by which embeddings and errors find their clip again.

    Args:
        rows: A map-style dataset of rows as in `datasets_scripts/schema.py`.
        every_caption_in: A language, to have each clip once for each of its captions in it, with `caption_number`.
    """

    def __init__(self, rows: Any, every_caption_in: str | None = None) -> None:
        self.rows = rows
        self._places: list[tuple[int, int]] | None = None
        if every_caption_in is not None:
            self._places = []
            counts = caption_counts(rows).get(every_caption_in, np.zeros(len(rows), np.int64))
            for index, count in enumerate(counts.tolist()):
                self._places += [(index, number) for number in range(max(1, count))]

    def __len__(self) -> int:
        return len(self.rows if self._places is None else self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._places is None:
            return {**self.rows[index], "clip_index": index}
        index, number = self._places[index]
        return {**self.rows[index], "clip_index": index, "caption_number": number}


def filter_bad_audio(rows: Any, args: SupCLAPTrainingArguments, min_seconds: float = 0.0) -> Any:
    """Selects the rows of a split that a run can use, the same in every process and when the run is resumed.

    Args:
        rows: A split.
        args: `on_bad_audio` says what to do, see `datasets_scripts/bad_audio.py`. Recordings are read once, by
            `dataloader_num_workers` processes; `bad_audio.json` in the output folder remembers what was found.
        min_seconds: The shortest recording that the model takes.

    Returns:
        The same rows, or those whose recordings can be used.
    """
    with args.main_process_first(desc="reading the recordings"):
        memo = Path(args.output_dir or ".") / "bad_audio.json"
        workers = max(1, args.dataloader_num_workers)
        return bad_audio.filter_bad_audio(rows, args.on_bad_audio, workers, memo, min_seconds)


class ContrastiveCollator:
    """What all collators share: recordings and texts through the processor.

    Args:
        processor: The model's processor.
        languages: ISO 639-3 codes; rows may lack some of them, but not all.
        positives: See `group_id`.
        max_audio_seconds: Longer recordings are cropped to this, or to the most that the feature extractor takes
            (10 s for CLAP's).

    Attributes:
        gives_samples: Whether batches hold `samples` `(B, S)` and `sample_counts` `(B,)`, of which
            `CEDFeatureExtractor.on_device` makes the spectrograms, in place of these.
    """

    recordings_per_clip = 1
    gives_samples = False

    def __init__(
        self,
        processor: SupCLAPProcessor,
        languages: Sequence[str] = ("eng",),
        positives: str = "clip",
        max_audio_seconds: float | None = 30.0,
    ) -> None:
        self.processor = processor
        self.rate_hz = processor.feature_extractor.sampling_rate
        self.min_seconds = getattr(processor.feature_extractor, "min_samples", 0) / self.rate_hz
        self.languages = tuple(languages)
        self.positives = positives
        self.max_audio_seconds = max_audio_seconds

        limit = max_chunk_seconds(processor.feature_extractor)
        if limit is not None:
            share = limit / self.recordings_per_clip
            self.max_audio_seconds = share if max_audio_seconds is None else min(max_audio_seconds, share)

    def _captions(self, row: Row) -> list[tuple[str, str]]:
        captions = all_captions(row, self.languages)
        if not captions:
            present = [language for language, texts in row["captions"].items() if texts]
            raise ValueError(f"clip {row['clip_id']} has no caption in {list(self.languages)}, only in {present}")
        return captions

    def _read(self, row: Row, crop_position: float = 0.0) -> np.ndarray:
        return read_row(row, self.rate_hz, self.max_audio_seconds, crop_position, min_seconds=self.min_seconds)

    def _inputs(self, clips: Sequence[np.ndarray], captions: Sequence[Sequence[tuple[str, str]]]) -> dict[str, Any]:
        """Make model inputs and their lengths; `captions` has the same number K of (language, text) for each row."""
        languages: list[str] = []
        texts: list[str] = []
        for pairs in captions:
            for language, text in pairs:
                languages.append(language)
                texts.append(text)

        options: dict[str, Any] = {"language": languages, "return_tensors": "pt"}
        batch: dict[str, torch.Tensor] = {}
        if self.gives_samples:
            batch |= _samples(self.processor.feature_extractor.as_waveforms(clips, self.rate_hz))
        else:
            options |= {"audio": clips, "sampling_rate": self.rate_hz}
        batch |= self.processor(text=texts, **options)

        # Lists stay on the CPU, where a step reads them without waiting for a GPU.
        lengths: dict[str, Any] = {"text_lengths": real_lengths(batch["attention_mask"])}
        if self.gives_samples:
            counts = batch["sample_counts"].tolist()
            lengths["audio_lengths"] = [self.processor.feature_extractor.frames_of(count) for count in counts]
        elif "audio_attention_mask" in batch:
            lengths["audio_lengths"] = real_lengths(batch["audio_attention_mask"])

        for name in self.processor.tokenizer.model_input_names:
            if name in batch:
                batch[name] = batch[name].unflatten(0, (len(captions), -1))  # (B K, L) -> (B, K, L)
        return {**batch, **lengths}

    def _batch(
        self, rows: Sequence[Row], crop_positions: Sequence[float], captions: Sequence[Sequence[tuple[str, str]]]
    ) -> dict[str, Any]:
        """Makes model inputs of B rows, with their groups and places."""
        clips: list[np.ndarray] = []
        groups: list[int] = []
        for row, position in zip(rows, crop_positions, strict=True):
            clips.append(self._read(row, position))
            groups.append(group_id(row, self.positives))
        return {**self._inputs(clips, captions), "group_ids": torch.tensor(groups), "clip_index": _places(rows)}


class TrainingCollator(ContrastiveCollator):
    """Draws a crop and a caption for each clip: in one language, in all, or in the anchor language and another.

    Rows `{"clip_id": "a", "audio_path": "a.wav", "captions": {"eng": [...], "fra": [...]}, "clip_index": 7, ...}`
    become `{"input_features": (B, 64, T), "audio_attention_mask": (B, T), "input_ids": (B, K, L),
    "attention_mask": (B, K, L), "group_ids": (B,), "clip_index": (B,)}`, K texts a clip. The lists
    `audio_lengths` and `text_lengths` count the B clips' frames and the B K texts' tokens without padding.

    The draw depends on `(seed, epoch, clip_id)` only, not on workers, processes or the order of the batch, so a run
    that is resumed or spread over more processes sees the same data.

    Args:
        processor: The model's processor.
        languages: ISO 639-3 codes; the first is the anchor.
        positives: See `group_id`.
        max_audio_seconds: Longer recordings are cropped to this, at a random place.
        seed: The seed of the draws.
        scheme: `random`, one language, uniformly among those that the clip has, K = 1 [A 3.1, ML-CLAP]; `kcl`, the same
            caption in all languages, K = their number [A eq. 9]; `cacl`, the same caption in the anchor language and in
            one other, K = 2 [A eq. 12]. Captions with the same place in two languages are taken for translations.
    """

    def __init__(
        self,
        processor: SupCLAPProcessor,
        languages: Sequence[str] = ("eng",),
        positives: str = "clip",
        max_audio_seconds: float | None = 30.0,
        seed: int = 0,
        scheme: str = "random",
    ) -> None:
        super().__init__(processor, languages, positives, max_audio_seconds)
        if scheme not in ("random", "kcl", "cacl"):
            raise ValueError(f"scheme is {scheme!r}; it must be random, kcl or cacl")
        self.seed = seed
        self.scheme = scheme

        # Shared memory, so that workers that outlive an epoch see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Makes the draws those of this epoch, counted from 0."""
        self._epoch.fill_(epoch)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        positions: list[float] = []
        captions: list[list[tuple[str, str]]] = []
        for row in rows:
            position, drawn = self._draw(row)
            positions.append(position)
            captions.append(drawn)
        return self._batch(rows, positions, captions)

    def drawn_among_all(self, row: Row) -> tuple[list[bool], list[tuple[str, str]]]:
        """The drawn caption of a clip in all languages, as (language, text), and in which of them it is trained."""
        drawn = dict(self._draw(row)[1])
        language, text = next(iter(drawn.items()))
        number = row["captions"][language].index(text)

        captions: list[tuple[str, str]] = []
        for each in self.languages:
            several = row["captions"][each]
            captions.append((each, several[min(number, len(several) - 1)]))
        return [each in drawn for each in self.languages], captions

    def _draw(self, row: Row) -> tuple[float, list[tuple[str, str]]]:
        """Draws where to crop a clip, and its K captions as (language, text)."""
        chosen = row.get("caption_number")
        key = [self.seed, int(self._epoch), stable_id(row["clip_id"])]
        random = np.random.default_rng(key if chosen is None else [*key, chosen])
        present = [language for language in sorted(self.languages) if row["captions"].get(language)]
        position = random.random()

        if self.scheme == "random":
            self._captions(row)  # refuses a clip without any
            languages = [present[random.integers(len(present))]]
        elif self.scheme == "kcl":
            languages = list(self.languages)
        else:
            anchor = self.languages[0]
            others = list(filter(anchor.__ne__, present))
            languages = [anchor, others[random.integers(len(others))] if others else self.languages[1]]

        missing = lacking_languages(row, languages, "kcl")
        if missing:
            raise ValueError(f"{self.scheme} needs captions of clip {row['clip_id']} in {languages}; no {missing}")
        texts = list(map(row["captions"].get, languages))
        count = min(map(len, texts))
        number = random.integers(count) if chosen is None else min(chosen, count - 1)
        return position, [(language, several[number]) for language, several in zip(languages, texts, strict=True)]


class EvaluationCollator(ContrastiveCollator):
    """Every caption of every clip, and always the beginning of a recording that is too long: nothing is drawn.

    The text tensors are `(B, K, L)` with K the most captions that a clip of the batch has, languages in order;
    clips with fewer repeat their first caption, and whoever reads the embeddings leaves the repetitions out.
    """

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        captions = list(map(self._captions, rows))
        most = max(map(len, captions))
        for pairs in captions:
            pairs += [pairs[0]] * (most - len(pairs))
        return self._batch(rows, [0.0] * len(rows), captions)


class TemporalCollator(TrainingCollator):
    """Pairs of recordings to the items of TeminAL, put together as they are needed.

    Rows `{"clip_index": 7}` name pairs of an epoch. Each gives R items: a single sound and a pair in stage a; the pair
    forward, reversed and overlaid in stage b. The batch holds B R clips, `input_ids` `(B, R K, L)`, K texts an item,
    `group_ids` `(B, R)`, equal where the meaning is, and in stage a `class_ids` `(B, 3)`.

    Args:
        processor: The model's processor.
        items: Draws recordings, relations and captions; its epoch is the collator's.
        stage: `a` or `b`.
        options: How clips are joined.
        languages: As `TrainingCollator`.
        max_audio_seconds: Longer recordings are cut to their beginning before they are put together, or from their
            first sound on where that is silent; to half of what the feature extractor takes, where it has a limit
            (CLAP's 10 s), or of `window_seconds`, so that both clips of a pair are heard at once.
        seed: The seed of the draw of a language and a phrasing.
        scheme: As `TrainingCollator`; `kcl` takes every item's caption in all languages, `random` all captions of a
            pair in one language.
        window_seconds: The longest clip whose parts the model hears in relation to each other (CED's 10.12 s).
    """

    recordings_per_clip = 2

    def __init__(
        self,
        processor: SupCLAPProcessor,
        items: TemporalItems,
        stage: str,
        options: RenderOptions | None = None,
        languages: Sequence[str] = ("eng",),
        max_audio_seconds: float | None = 30.0,
        seed: int = 0,
        scheme: str = "random",
        window_seconds: float | None = None,
    ) -> None:
        if window_seconds is not None:
            share = window_seconds / self.recordings_per_clip
            max_audio_seconds = share if max_audio_seconds is None else min(max_audio_seconds, share)
        super().__init__(processor, languages, max_audio_seconds=max_audio_seconds, seed=seed, scheme=scheme)
        self.items = items
        self.stage = stage
        self.options = options

    def _read(self, row: Row, crop_position: float = 0.0) -> np.ndarray:
        return read_row(row, self.rate_hz, self.max_audio_seconds, crop_position, from_first_sound=True)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        draw = self.items.stage_a if self.stage == "a" else self.items.triple

        clips: list[np.ndarray] = []
        captions: list[list[tuple[str, str]]] = []
        meanings: list[list[int]] = []
        classes: list[list[int]] = []
        for row in rows:
            for collected in (captions, meanings, classes):
                collected.append([])
            # One language for all items of a pair: else the caption to tell one's own from is mostly in another.
            number = row["clip_index"]
            language = drawn(self.languages, self.seed, "language", int(self._epoch), number)
            for item in draw(int(self._epoch), number):  # in R roles
                clips.append(render(item, self._read, self.rate_hz, self.options))
                said = {language: item.captions[language]} if self.scheme == "random" else item.captions
                captions[-1] += self._draw({"clip_id": item.clip_id, "captions": said})[1]
                meanings[-1].append(stable_id(item.meaning))
                classes[-1] += map(self.items.labels.index, item.labels)

        batch = self._inputs(clips, captions)
        batch |= {"group_ids": torch.tensor(meanings), "clip_index": _places(rows)}
        if self.stage == "a":
            batch["class_ids"] = torch.tensor(classes)
        return batch


def _samples(waveforms: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """The clips of a batch side by side, in 16 bits where that is what they were recorded or stored in."""
    clips: list[np.ndarray] = []
    for waveform in waveforms:
        clip = to_int16(waveform)
        if (clip / np.float32(32768) != waveform).any():
            clips = list(waveforms)
            break
        clips.append(clip)

    counts = torch.tensor(list(map(len, clips)))
    return {"samples": pad_sequence(list(map(torch.from_numpy, clips)), batch_first=True), "sample_counts": counts}


def _places(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([row["clip_index"] for row in rows])
