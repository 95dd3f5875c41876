"""Search an index by text, audio or embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..audio_input import as_recordings
from ..encoding import mean_embedding
from ..evaluation import EmbeddingModel, load_embedding_model
from .index import SoundIndex

# Texts that describe no sound. Their best scores are the background of an index.
BACKGROUND_TEXTS = [
    "a grey stone wall",
    "a page of a novel",
    "an oil painting of a saint",
    "the colour of the carpet",
    "a table of numbers",
    "a photograph of the moon",
    "the price of copper",
    "a recipe for bread",
    "the rules of chess",
    "a map of the region",
    "a signed contract",
    "the theory of evolution",
    "a marble statue",
    "the date of birth",
    "a red brick house",
    "an empty bottle",
    "a pair of glasses",
    "the history of printing",
    "a mathematical proof",
    "a bowl of fruit",
    "the shape of a leaf",
    "a paper envelope",
    "a bus timetable",
    "the width of the river",
    "a list of names",
    "a silver coin",
    "a wool sweater",
    "the chemistry of salt",
    "an architect's drawing",
    "the spelling of a word",
    "a passport photo",
    "the meaning of a dream",
]
NOTHING = "nothing stands out: texts without any sound reach such scores in this index"


class Hit(NamedTuple):
    """Search result: a window of a recording, and its cosine similarity with the query.

    The path of the recording is relative to the indexed folder.
    """

    file: str
    start_seconds: float
    end_seconds: float
    score: float


class Searcher:
    """Searcher for an index, with the model that was used to build the index.

    Args:
        model: The model, or its folder, Hub id or `module:function`. None: load the model named in the index.
        device: Device to load the model on. None: use a GPU if there is one.
        trust_remote_code: Whether a model in the format of sentence-transformers may run code from its repository.

    Raises:
        FileNotFoundError: The index does not exist.
        ValueError: The index was built with another model. Or `model` is None, and the index names a Python function as
            model. The function is not called, because it could run any code.
    """

    def __init__(
        self,
        index: str | Path,
        model: EmbeddingModel | str | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.index = SoundIndex(index)
        # version of the index and file, and its background score
        self._background: tuple[Any, float] | None = None
        about = self.index.about
        name = about["model"]
        if model is None and ":" in name and not Path(name).exists():
            raise ValueError(f"the model of {index} is the function {name}; if you trust it, pass it as --model")
        self.model = load_embedding_model(model or name, device=device, trust_remote_code=trust_remote_code)
        if about["fingerprint"] and self.model.fingerprint not in (None, "", about["fingerprint"]):
            raise ValueError(f"{index} was built with {name}; {self.model.name} has another fingerprint; rebuild it")

    def search(
        self,
        query: str | None = None,
        language: str = "eng",
        audio: Any = None,
        vector: np.ndarray | None = None,
        k: int = 10,
        within: str | None = None,
        exact: bool = False,
        merge_overlaps: bool = True,
    ) -> list[Hit]:
        """Search the index and return at most k hits, best first. Pass exactly one of `query`, `audio` and `vector`.

        Args:
            language: ISO 639-3 code of the text query.
            audio: Audio query: a path, an open file, or a pair of waveform and sampling rate.
            vector: Query embedding (d,) from `embed` or `embed_audio`.
            within: File to search, relative to the indexed folder. None: search all files.
            exact: Whether to score all windows even if there is an approximate index.
            merge_overlaps: Whether to drop hits that overlap a better hit in the same file.

        Raises:
            ValueError: Not exactly one of `query`, `audio` and `vector` is set, `k` is less than 1, or `within` is not
                in the index.
        """
        queries = {"query": query, "audio": audio, "vector": vector}
        passed = [name for name, value in queries.items() if value is not None]
        if len(passed) != 1:
            raise ValueError(f"got {' and '.join(passed) or 'nothing'}; pass one of query, audio and vector")
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if within is not None and within not in (known := self.index.known_files()):
            similar = [name for name in known if Path(name).name == Path(within).name]
            hint = f", such as {similar[0]!r}" if similar else ""
            raise ValueError(f"{within!r} is not in the index; pass a path relative to the indexed folder{hint}")

        if vector is None:
            vector = self.embed_audio(audio) if query is None else self.embed(query, language)
        if np.shape(vector) != (self.index.dim,) or not np.isfinite(vector).all():
            raise ValueError(f"vector has shape {np.shape(vector)}; pass ({self.index.dim},) finite numbers")
        num_windows = self.index.windows.count_rows()
        limit = k = min(k, max(num_windows, 1))
        while True:
            rows = self.index.nearest(vector, limit, within, exact)
            hits = []
            for row in rows:
                hits.append(Hit(row["file"], row["start_seconds"], row["end_seconds"], row["score"]))
            if merge_overlaps:
                hits = without_overlaps(hits)
            if len(hits) >= k or len(rows) < limit or limit >= num_windows:
                return hits[:k]
            limit *= 4

    @cached_property
    def _background_vectors(self) -> Any:
        return self.model.encode_text(BACKGROUND_TEXTS, "eng", len(BACKGROUND_TEXTS))

    def stands_out(self, hits: Sequence[Hit], within: str | None = None) -> bool:
        """Return whether the best hit of a query scores higher than the best hits of texts that describe no sound."""
        return bool(hits) and hits[0].score > self.background(within)

    def background(self, within: str | None = None) -> float:
        """Return the 95 % quantile of the best scores of texts that describe no sound (`BACKGROUND_TEXTS`).

        If `within` is set, only this file is searched. The result is cached until the index changes.
        """
        version = self.index.windows.version, within
        if self._background is None or self._background[0] != version:
            best: list[float] = []
            for vector in self._background_vectors:
                best.extend(map(itemgetter("score"), self.index.nearest(vector, 1, within)))
            self._background = version, float(np.quantile(best, 0.95)) if best else 1.0
        return self._background[1]

    def embed(self, query: str, language: str = "eng") -> np.ndarray:
        """Embed a text query as an array (d,) with unit norm."""
        return self.model.encode_text([query], language, 1)[0]

    def embed_audio(self, audio: Any) -> np.ndarray:
        """Embed an audio query as an array (d,) with unit norm, the mean over chunks of the window length."""
        (recording, *_), _ = as_recordings(audio)
        (chunks,) = self.model.chunk_embeddings([recording], float(self.index.about["window_seconds"]))
        return mean_embedding(chunks.embeds).numpy()

    def strip(self, vector: np.ndarray, file: str) -> tuple[np.ndarray, np.ndarray]:
        """Compute the cosine similarity between a query embedding and all windows of one recording.

        Returns:
            Tuple of the start times in seconds (windows,), ascending, and the scores (windows,).
        """
        rows = self.index.nearest(vector, self.index.windows.count_rows(), within=file, exact=True)
        rows.sort(key=itemgetter("start_seconds"))
        return np.array(list(map(itemgetter("start_seconds"), rows))), np.array(list(map(itemgetter("score"), rows)))


def without_overlaps(hits: Sequence[Hit]) -> list[Hit]:
    """Drop hits that overlap an earlier hit in the same file. `hits` must be sorted by score, best first.

    >>> hits = [Hit("a.wav", 5.0, 10.0, 0.9), Hit("a.wav", 7.5, 12.5, 0.8), Hit("a.wav", 10.0, 15.0, 0.7)]
    >>> [hit.start_seconds for hit in without_overlaps(hits)]
    [5.0, 10.0]
    """
    selected: list[Hit] = []
    for hit in hits:
        if not any(_overlap(hit, other) for other in selected):
            selected.append(hit)
    return selected


def _overlap(hit: Hit, other: Hit) -> bool:
    is_apart = hit.start_seconds >= other.end_seconds or hit.end_seconds <= other.start_seconds
    return hit.file == other.file and not is_apart
