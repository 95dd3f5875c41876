"""Collators: load audio, sample random crops and captions, and run the processor on a batch of rows."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from modeling_supclap.datasets_scripts.audio import find_crop, open_row, read_row, to_int16
from modeling_supclap.datasets_scripts.schema import (
    EXPECTED_COUNT,
    SAMPLING,
    all_captions,
    caption_counts,
    group_id,
    lacking_languages,
    stable_id,
)
from modeling_supclap.datasets_scripts.stream import draw_copies

from ..encoding import max_chunk_seconds, min_clip_samples
from ..processing_supclap import SupCLAPProcessor
from .augmentation import WaveformAugmentation
from .grad_cache import real_lengths
from .kept import KeptValues, Key, Values, content_keys, hash_front_end, hash_of, hash_recording

Row = Mapping[str, Any]
Features = dict[str, np.ndarray]


class _Copies:
    """Items that repeat row i `counts[i]` times, in the order of the rows."""

    def __init__(self, counts: np.ndarray) -> None:
        self.rows = np.repeat(np.arange(len(counts)), counts)  # the row of each item
        self._firsts = np.cumsum(counts) - counts  # the first item of each row

    def locate(self, item: int) -> tuple[int, int]:
        """Return the index of the row of an item, and the number of earlier items of this row."""
        row = int(self.rows[item])
        return row, item - int(self._firsts[row])


class IndexedRows(Dataset[Row]):
    """Dataset wrapper that adds the row index as `clip_index`, to identify clips in predictions and error messages.

    The optional column `schema.EXPECTED_COUNT` contains the expected number of copies c of each row in an epoch. Each
    epoch then contains floor(c) or ceil(c) copies of a row (systematic resampling), and all epochs have the same
    length. The column `schema.SAMPLING` of a mixture contains its options instead, and the counts are computed from the
    rows that are left. The added key `repetition` is the number of the copy, from 0. The selection depends only on seed
    and epoch.

    Args:
        rows: Map-style dataset of rows as described in `datasets_scripts/schema.py`.
        every_caption_in: Language code. If set, each clip is repeated for each of its captions in this language, and
            the caption index is added as `caption_number`. None: each clip appears once.
        seed: Random seed. None: ignore the expected counts, as in evaluation.
    """

    def __init__(self, rows: Any, every_caption_in: str | None = None, seed: int | None = None) -> None:
        self.rows, self.seed = rows, seed
        # shared with persistent workers
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        # an item for each caption of a clip
        self.captions: _Copies | None = None
        if every_caption_in is not None:
            counts = caption_counts(rows).get(every_caption_in, np.zeros(len(rows), np.int64))
            self.captions = _Copies(counts.clip(1))

        self.expected: np.ndarray | None = None  # expected count of each item
        columns = getattr(rows, "column_names", None) or ()
        if seed is not None and (SAMPLING in columns or EXPECTED_COUNT in columns):
            clips = np.arange(len(rows)) if self.captions is None else self.captions.rows
            if SAMPLING in columns:
                # here: few runs need it
                from modeling_supclap.datasets_scripts.mixture import counts_in_epoch

                counts = counts_in_epoch(rows, np.bincount(clips))
            else:
                counts = np.asarray(rows[EXPECTED_COUNT][:])
            self.expected = counts[clips]
        self._drawn: tuple[int, _Copies] | None = None  # epoch, copies of the items

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        if self.expected is not None:
            return round(self.expected.sum())
        return len(self.rows if self.captions is None else self.captions.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        added: dict[str, int] = {}
        if self.expected is not None:
            index, added["repetition"] = self._draw(self.expected).locate(index)
        if self.captions is not None:
            index, added["caption_number"] = self.captions.locate(index)
        return {**self.rows[index], "clip_index": index, **added}

    def _draw(self, expected: np.ndarray) -> _Copies:
        """Draw the copies of the items in this epoch."""
        epoch = int(self._epoch)
        if self._drawn is None or self._drawn[0] != epoch:
            random = np.random.default_rng([self.seed or 0, epoch])
            self._drawn = epoch, _Copies(draw_copies(expected, len(self), random))
        return self._drawn[1]


def min_seconds(processor: SupCLAPProcessor) -> float:
    """Return the minimum duration of a recording that the model can embed, in seconds."""
    return min_clip_samples(processor.feature_extractor) / processor.feature_extractor.sampling_rate


class ContrastiveCollator:
    """Base class of the collators, which run the processor on recordings and texts.

    The features of a clip are looked up in `kept` before its recording is read. If the outputs of a frozen tower are
    kept, the lists `audio_keys` and `text_keys` contain the keys of all clips and texts. A batch then has the features
    only of clips whose output is not known; `given_keys` contains their keys.

    Args:
        positives: `clip`: each clip has its own group id. `captions`: clips with identical captions have the same group
            id, and are positives of each other.
        max_audio_seconds: Maximum duration. Longer recordings are cropped at a random position in training. If the
            feature extractor has a lower maximum (10 s for CLAP), the lower one is used.
        pad_short_clips: Whether to append zeros to clips that are shorter than the model's minimum.
        gives_samples: Whether batches contain `samples` `(B, S)` and `sample_counts` `(B,)` instead of spectrograms.
            `SupCLAPProcessor.on_device` then computes the spectrograms.
        kept: Store of features and outputs. None: nothing is kept.
        changes_features: Whether SpecAugment changes the features before they reach the audio tower. Its outputs are
            then not kept.
        window_seconds: Maximum duration of a clip that the model can process in one window. None: no limit.
    """

    recordings_per_clip = 1
    augmentation: WaveformAugmentation | None = None  # only training augments
    _from_first_sound = False

    def __init__(
        self,
        processor: SupCLAPProcessor,
        languages: Sequence[str] = ("eng",),
        positives: str = "clip",
        max_audio_seconds: float | None = 30.0,
        pad_short_clips: bool = False,
        gives_samples: bool = False,
        kept: KeptValues | None = None,
        changes_features: bool = False,
        window_seconds: float | None = None,
    ) -> None:
        self.processor = processor
        self.rate_hz = processor.feature_extractor.sampling_rate
        self._min_seconds = min_seconds(processor)
        self.languages = tuple(languages)
        self.positives = positives
        limits = [max_audio_seconds]
        for clip_seconds in (window_seconds, max_chunk_seconds(processor.feature_extractor)):
            limits.append(clip_seconds and clip_seconds / self.recordings_per_clip)
        self.max_audio_seconds = min(filter(None, limits), default=None)
        self.pad_short_clips = pad_short_clips
        self.gives_samples = gives_samples
        self.kept, self.changes_features = kept or KeptValues(), changes_features
        # In shared memory, so that persistent workers see a new epoch.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._front_end = hash_front_end(processor, pad_short_clips, gives_samples, self.max_audio_seconds)

    def _augment(self, clip: np.ndarray, row: Row) -> np.ndarray:
        return clip if self.augmentation is None else self.augmentation(clip, row, int(self.epoch))

    def _read(self, row: Row, crop_position: float = 0.0) -> np.ndarray:
        return read_row(
            row,
            self.rate_hz,
            self.max_audio_seconds,
            crop_position,
            self._from_first_sound,
            min_seconds=self._min_seconds,
            pad_short_clips=self.pad_short_clips,
            resampling_method=self.processor.resampling_method,
        )

    # ---- clips ----

    def _clips(self, rows: Sequence[Row], crop_positions: Sequence[float]) -> dict[str, Any]:
        """Build the audio inputs of the model from the recordings of the rows, or from what is kept of them."""
        tower = None if self.changes_features else self.kept.towers.get("audio")
        order: list[Key] = []
        known: Values = {}
        new: Values = {}
        for index, (row, position) in enumerate(zip(rows, crop_positions, strict=True)):
            keys = self._keys(row, position)
            if keys:
                known |= self.kept.find(keys.values() - known.keys(), tower)
            key: Key | None = next((key for key in keys.values() if key in known or key in new), None)
            if key is None:
                key = keys.get(self._is_whole(row), index) if keys else index
                new[key] = self._extract(self._augment(self._read(row, position), row))
            order.append(key)

        if tower is not None:
            return {**self._stack(list(new.values())), "audio_keys": order, "given_keys": list(new)}
        self.kept.add(new)
        known |= new
        return self._stack([known[key] for key in order])

    def _keys(self, row: Row, crop_position: float) -> dict[bool, Key]:
        """Return the keys of a clip: as a whole recording (True), and as one that is cropped to its beginning (False).

        A random crop and an augmented clip have no key, because they do not recur.
        """
        is_kept = self.kept.folder is not None and self.augmentation is None
        recording = hash_recording(row) if is_kept else None
        if recording is None:
            return {}
        parts = {True: "whole"} if crop_position else {True: "whole", False: "beginning"}
        return {is_whole: hash_of(self._front_end, recording, part) for is_whole, part in parts.items()}

    def _is_whole(self, row: Row) -> bool:
        """Return whether each epoch contains the same part of a recording, because it is not cropped at random."""
        recording = open_row(row)
        return find_crop(recording.frames, recording.rate_hz, self.max_audio_seconds)[1] == 0

    def _extract(self, clip: np.ndarray) -> Features:
        """Compute the features of a clip, or its samples for `gives_samples`: as int16 if the conversion is exact."""
        if not self.gives_samples:
            return self.processor.extract_clip(clip)
        extractor = self.processor.feature_extractor
        clip = extractor.extend(clip) if hasattr(extractor, "extend") else clip
        integers = to_int16(clip)
        return {"samples": integers if (integers / np.float32(32768) == clip).all() else clip}

    def _stack(self, clips: Sequence[Features]) -> dict[str, Any]:
        """Stack the features or samples of clips to a batch, with their lengths."""
        if not clips:
            return {}
        batch: dict[str, Any] = {}
        # Lists stay on the CPU, so that a step reads them without waiting for a GPU.
        if not self.gives_samples:
            batch |= {name: torch.from_numpy(array) for name, array in self.processor.stack(clips).items()}
            if "audio_attention_mask" in batch:
                batch["audio_lengths"] = real_lengths(batch["audio_attention_mask"])
            return batch
        samples = [torch.from_numpy(clip["samples"]) for clip in clips]
        if any(each.is_floating_point() for each in samples):
            samples = [each if each.is_floating_point() else each / 32768 for each in samples]
        counts = list(map(len, samples))
        batch |= {"samples": pad_sequence(samples, batch_first=True), "sample_counts": torch.tensor(counts)}
        if hasattr(self.processor.feature_extractor, "frames_of"):
            batch["audio_lengths"] = list(map(self.processor.feature_extractor.frames_of, counts))
        return batch

    # ---- texts ----

    def _texts(self, captions: Sequence[Sequence[tuple[str, str]]]) -> dict[str, Any]:
        """Build the text inputs of the model from K pairs (language, text) for each row."""
        languages, texts = map(list, zip(*chain.from_iterable(captions), strict=True))
        tokens = dict(self.processor(text=texts, language=languages, return_tensors="pt"))
        batch: dict[str, Any] = {"text_lengths": real_lengths(tokens["attention_mask"])}
        if "text" in self.kept.towers:
            batch["text_keys"] = content_keys(tokens, "attention_mask")
        # (B K, L) -> (B, K, L)
        return batch | {name: tensor.unflatten(0, (len(captions), -1)) for name, tensor in tokens.items()}

    def _batch(
        self, rows: Sequence[Row], crop_positions: Sequence[float], captions: Sequence[Sequence[tuple[str, str]]]
    ) -> dict[str, Any]:
        """Build the model inputs for B rows, with group ids and clip indices."""
        for row, of_row in zip(rows, captions, strict=True):
            for language, text in of_row:
                if not isinstance(text, str) or not text.strip():
                    raise ValueError(
                        f"clip {row['clip_id']!r} has the {language} caption {text!r}; write or remove it"
                    )
        return {  # the Trainer takes the number of rows from the first tensor
            "clip_index": torch.tensor([row["clip_index"] for row in rows]),
            "group_ids": torch.tensor([group_id(row, self.positives) for row in rows]),
            **self._clips(rows, crop_positions),
            **self._texts(captions),
        }


class TrainingCollator(ContrastiveCollator):
    """Training collator that samples a random crop and a random caption of each clip, in one or several languages.

    Rows `{"clip_id": "a", "audio_path": "a.wav", "captions": {"eng": [...], "fra": [...]}, "clip_index": 7, ...}`
    become `{"input_features": (B, 64, T), "audio_attention_mask": (B, T), "input_ids": (B, K, L),
    "attention_mask": (B, K, L), "group_ids": (B,), "clip_index": (B,)}`, with K texts per clip. The list
    `audio_lengths` contains the number of frames of each of the B clips, and `text_lengths` the number of tokens of
    each of the B K texts, without padding.

    Crops and captions depend only on the seed, the epoch, the clip id, and the row's `caption_number` and `repetition`
    (see `IndexedRows`). They are the same for any number of processes and in a resumed run.

    Args:
        languages: ISO 639-3 codes; the first is the anchor language.
        scheme: How to select the captions of a clip. `random`: one caption in a random language of the clip, K = 1
            (ATRI 3.1, ML-CLAP). `kcl`: the same caption in all K languages (ATRI eq. 9). `cacl`: the same caption in
            the anchor language and one random other language, K = 2 (ATRI eq. 12). Captions with the same index in two
            languages count as translations of each other.
        languages_per_clip: For `kcl`, the number K of languages, drawn at random for each clip, so that text k of two
            clips may be in different languages. None: all languages.
        augmentation: Augmentation of each waveform. None: clips are not changed.
        negatives_per_clip: Number M of wrong captions of each clip, drawn from its `negatives` in the language of its
            caption. They follow the caption, so that `input_ids` is `(B, 1 + M, L)`. `negative_mask` `(B, M)` is False
            where a clip has fewer negatives, and the caption is repeated.
        **shared: Other arguments of `ContrastiveCollator`.
    """

    def __init__(
        self,
        processor: SupCLAPProcessor,
        languages: Sequence[str] = ("eng",),
        seed: int = 0,
        scheme: str = "random",
        languages_per_clip: int | None = None,
        augmentation: WaveformAugmentation | None = None,
        negatives_per_clip: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(processor, languages, **shared)
        if scheme not in ("random", "kcl", "cacl"):
            raise ValueError(f"got scheme={scheme!r}; it must be random, kcl or cacl")
        self.seed = seed
        self.scheme = scheme
        self.languages_per_clip = languages_per_clip
        self.augmentation = augmentation
        self.negatives_per_clip = negatives_per_clip

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        positions, captions = zip(*map(self._draw, rows), strict=True)
        if not self.negatives_per_clip:
            return self._batch(rows, positions, captions)

        texts, masks = [], []
        for row, pairs in zip(rows, captions, strict=True):
            wrong = self._draw_negatives(row, pairs[0][0])
            filling = pairs[:1] * (self.negatives_per_clip - len(wrong))
            texts.append([*pairs, *wrong, *filling])
            masks.append([True] * len(wrong) + [False] * len(filling))
        return {**self._batch(rows, positions, texts), "negative_mask": torch.tensor(masks)}

    def _draw_negatives(self, row: Row, language: str) -> list[tuple[str, str]]:
        """Sample up to M wrong captions of a clip, without its own captions, as (language, text)."""
        own = set(row["captions"][language])
        texts = [text for text in (row.get("negatives") or {}).get(language) or () if text not in own]
        chosen = self._random(row, "negatives of ").permutation(len(texts))[: self.negatives_per_clip]
        return [(language, texts[index]) for index in chosen.tolist()]

    def _random(self, row: Row, purpose: str = "") -> np.random.Generator:
        """Return the random generator of a clip in this epoch."""
        key = [self.seed, int(self.epoch), stable_id(f"{purpose}{row['clip_id']}")]
        key += [row[name] for name in ("caption_number", "repetition") if name in row]
        return np.random.default_rng(key)

    def drawn_among_all(self, row: Row) -> tuple[list[bool], list[tuple[str, str]]]:
        """Return the caption sampled for a clip in this epoch, in all languages.

        Returns:
            Two lists with one entry per language: whether training uses this language for the clip in this epoch, and
            the caption as (language, text).
        """
        _, drawn = self._draw(row)
        first_language, text = drawn[0]
        number = row["captions"][first_language].index(text)

        captions: list[tuple[str, str]] = []
        for language in self.languages:
            texts = row["captions"][language]
            captions.append((language, texts[min(number, len(texts) - 1)]))
        return [language in dict(drawn) for language in self.languages], captions

    def _draw(self, row: Row) -> tuple[float, list[tuple[str, str]]]:
        """Sample the crop position of a clip, 0 to 1, and its K captions as (language, text)."""
        missing = lacking_languages(row, self.languages, self.scheme)
        if missing:
            raise ValueError(f"clip {row['clip_id']} has no captions in {missing}, for scheme {self.scheme}")
        fixed_number, random = row.get("caption_number"), self._random(row)
        present = [language for language in sorted(self.languages) if row["captions"].get(language)]
        position = random.random()

        languages = list(self.languages)
        if self.scheme == "random":
            languages = [present[random.integers(len(present))]]
        elif self.scheme == "cacl":
            others = [language for language in present if language != self.languages[0]]
            languages = [self.languages[0], others[random.integers(len(others))]]
        elif self.languages_per_clip is not None:
            languages = random.permutation(languages)[: self.languages_per_clip].tolist()

        count = min(len(row["captions"][language]) for language in languages)
        number = random.integers(count) if fixed_number is None else min(fixed_number, count - 1)
        return position, [(language, row["captions"][language][number]) for language in languages]


class EvaluationCollator(ContrastiveCollator):
    """Deterministic evaluation collator with all captions of each clip. Long recordings are cropped to their beginning.

    The text tensors are `(B, K, L)`, with captions in the order of `languages`. K is the largest number of captions per
    clip in the batch. If a clip has fewer captions, its first caption is repeated. Metrics must ignore the copies.
    """

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        captions: list[list[tuple[str, str]]] = []
        for row in rows:
            captions.append(all_captions(row, self.languages))
            if not captions[-1]:
                raise ValueError(f"clip {row['clip_id']} has no caption in {list(self.languages)}")
        max_count = max(map(len, captions))
        for pairs in captions:
            pairs += [pairs[0]] * (max_count - len(pairs))
        return self._batch(rows, [0.0] * len(rows), captions)
