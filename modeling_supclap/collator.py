"""Rows to a batch through the processor. The draw of a language happens here and nowhere else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .audio import load_clip
from .processing_supclap import SupCLAPProcessor

Row = Mapping[str, Any]


class IndexedRows(Dataset):
    """Rows that know their place: adds `clip_index`, by which embeddings and errors find their clip again.

    Args:
        rows: a map-style dataset of rows as in `datasets_scripts/schema.py`.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "clip_index": index}


def stable_id(text: str) -> int:
    """A 63-bit integer for a string, the same in every process and every run.

    >>> stable_id("dog") == stable_id("dog"), stable_id("dog") == stable_id("cat")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def group_id(row: Row, positives: str) -> int:
    """Which rows count as right answers to each other: those with the same group id.

    Args:
        row: a row of the schema.
        positives: `"clip"`, every clip only to itself (the papers' protocol); or `"captions"`, also to the clips that
            carry exactly the same captions, as where captions are made from class names.
    """
    return stable_id(row["clip_id"] if positives == "clip" else json.dumps(row["captions"], sort_keys=True))


def all_captions(row: Row, languages: Sequence[str]) -> list[tuple[str, str]]:
    """Every caption of a row as `(language, text)`, languages in the order given.

    >>> all_captions({"captions": {"eng": ["a dog", "a barking dog"], "fra": ["un chien"]}}, ["fra", "eng"])
    [('fra', 'un chien'), ('eng', 'a dog'), ('eng', 'a barking dog')]
    """
    return [(language, text) for language in languages for text in row["captions"].get(language) or ()]


class ContrastiveCollator:
    """What the two collators share: recordings and texts through the processor.

    Args:
        processor: the model's processor.
        languages: ISO 639-3 codes; rows may lack some of them, but not all.
        positives: see `group_id`.
        max_audio_seconds: longer recordings are cropped to this.
    """

    def __init__(
        self,
        processor: SupCLAPProcessor,
        languages: Sequence[str] = ("eng",),
        positives: str = "clip",
        max_audio_seconds: float | None = 30.0,
    ) -> None:
        self.processor = processor
        self.languages = tuple(languages)
        self.positives = positives
        self.max_audio_seconds = max_audio_seconds

    def _captions(self, row: Row) -> list[tuple[str, str]]:
        captions = all_captions(row, self.languages)
        if not captions:
            present = [language for language, texts in row["captions"].items() if texts]
            raise ValueError(f"clip {row['clip_id']} has no caption in {list(self.languages)}, only in {present}")
        return captions

    def _batch(
        self, rows: Sequence[Row], crop_positions: Sequence[float], captions: Sequence[Sequence[tuple[str, str]]]
    ) -> dict[str, torch.Tensor]:
        """Model inputs; `captions` holds the same number K of (language, text) for each of the B rows."""
        rate_hz = self.processor.feature_extractor.sampling_rate
        clips = [
            load_clip(row["audio_path"], rate_hz, self.max_audio_seconds, position)
            for row, position in zip(rows, crop_positions, strict=True)
        ]
        languages, texts = zip(*(pair for pairs in captions for pair in pairs), strict=True)
        batch = self.processor(
            audio=clips, sampling_rate=rate_hz, text=list(texts), language=list(languages), return_tensors="pt"
        )
        for name in self.processor.tokenizer.model_input_names:
            if name in batch:
                batch[name] = batch[name].unflatten(0, (len(rows), -1))
        return {
            **batch,
            "group_ids": torch.tensor([group_id(row, self.positives) for row in rows]),
            "clip_index": torch.tensor([row["clip_index"] for row in rows]),
        }


class TrainingCollator(ContrastiveCollator):
    """Draws one language, one of its captions and one crop for each clip.

    Rows `{"clip_id": "a", "audio_path": "a.wav", "captions": {"eng": [...], "fra": [...]}, "clip_index": 7, ...}`
    become `{"input_features": (B, 64, T), "audio_attention_mask": (B, T), "input_ids": (B, 1, L),
    "attention_mask": (B, 1, L), "group_ids": (B,), "clip_index": (B,)}`.

    The draw depends on `(seed, epoch, clip_id)` only, not on workers, processes or the order of the batch, so a run
    that is resumed or spread over more processes sees the same data [A 3.1, ML-CLAP's random language].

    Args:
        processor: the model's processor.
        languages: ISO 639-3 codes to draw from, uniformly among those that the clip has.
        positives: see `group_id`.
        max_audio_seconds: longer recordings are cropped to this, at a random place.
        seed: of the draws.
    """

    def __init__(
        self,
        processor: SupCLAPProcessor,
        languages: Sequence[str] = ("eng",),
        positives: str = "clip",
        max_audio_seconds: float | None = 30.0,
        seed: int = 0,
    ) -> None:
        super().__init__(processor, languages, positives, max_audio_seconds)
        self.seed = seed
        # Shared memory, so that workers that outlive an epoch see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Makes the draws those of this epoch, counted from 0."""
        self._epoch.fill_(epoch)

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        draws = [self._draw(row) for row in rows]
        return self._batch(rows, [position for position, _ in draws], [[caption] for _, caption in draws])

    def _draw(self, row: Row) -> tuple[float, tuple[str, str]]:
        random = np.random.default_rng([self.seed, int(self._epoch), stable_id(row["clip_id"])])
        captions = self._captions(row)
        present = sorted({language for language, _ in captions})
        language = present[random.integers(len(present))]
        texts = [text for spoken, text in captions if spoken == language]
        return random.random(), (language, texts[random.integers(len(texts))])


class EvaluationCollator(ContrastiveCollator):
    """Every caption of every clip, and always the beginning of a recording that is too long: nothing is drawn.

    The text tensors are `(B, K, L)` with K the most captions that a clip of the batch has, languages in order;
    clips with fewer repeat their first caption, and whoever reads the embeddings leaves the repetitions out.
    """

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        captions = [self._captions(row) for row in rows]
        most = max(map(len, captions))
        padded = [pairs + [pairs[0]] * (most - len(pairs)) for pairs in captions]
        return self._batch(rows, [0.0] * len(rows), padded)
