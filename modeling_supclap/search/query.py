"""Asks an index: which of my recordings sounds like these words, or like this sound, and at which second?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..audio_input import as_recordings
from ..encoding import mean_embedding
from ..evaluation import EmbeddingModel, load_embedding_model
from .index import SoundIndex


class Hit(NamedTuple):
    """A place that answers a query.

    Attributes:
        file: The recording, by its path below the indexed folder.
        start_seconds: Where the place begins.
        end_seconds: Where it ends.
        score: The cosine of its embedding and the query's.
    """

    file: str
    start_seconds: float
    end_seconds: float
    score: float


class Searcher:
    """An index together with the model that it was made with.

    Args:
        index: The folder of the index.
        model: The model; None loads the one that the index names.
        device: Where a model that is loaded goes.

    Raises:
        FileNotFoundError: There is no index.
        ValueError: The index was made with another model.
    """

    def __init__(self, index: str | Path, model: EmbeddingModel | None = None, device: str | None = None) -> None:
        self.index = SoundIndex(index)
        about = self.index.about
        self.model = load_embedding_model(about["model"], device=device) if model is None else model
        made_with = about["fingerprint"]
        if made_with and self.model.fingerprint and self.model.fingerprint != made_with:
            raise ValueError(
                f"the index {index} was made with another state of {about['model']} than {self.model.name} is now; "
                "index the folder again"
            )

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
        """The k best places.

        Args:
            query: What is wanted, in words.
            language: The ISO 639-3 code of the query's language.
            audio: In place of words, a sound: a path, an open file, or a pair of a waveform and its rate.
            vector: In place of both, the embedding of a query, (d,), from `embed` or `embed_audio`.
            k: How many places.
            within: Only places in this recording.
            exact: Whether every window is compared, also where there is an approximate index.
            merge_overlaps: Whether windows that overlap a better one of the same file are left out: they mostly hold
                the same sound.

        Returns:
            At most k hits, best first; of equal scores by file and time. The same call gives the same hits.

        Raises:
            ValueError: Not one of words, sound and embedding is given, or several; or no file of the index has the name
                `within`.
        """
        if (query is None) + (audio is None) + (vector is None) != 2:
            raise ValueError(f"give either words, a sound or an embedding, got query={query!r} and audio={audio!r}")
        if k < 1:
            raise ValueError(f"k is {k}; give 1 or more")
        if within is not None and within not in (known := self.index.known_files()):
            alike = [name for name in known if Path(name).name == Path(within).name]
            hint = f", such as {alike[0]!r}" if alike else ""
            raise ValueError(f"the index holds no file {within!r}; name it by its path below the indexed folder{hint}")

        if vector is None:
            vector = self.embed_audio(audio) if query is None else self.embed(query, language)
        rows = self.index.windows.count_rows()
        limit = k = min(k, max(rows, 1))
        while True:
            found = self.index.nearest(vector, limit, within, exact)
            hits = [Hit(row["file"], row["start_seconds"], row["end_seconds"], row["score"]) for row in found]
            if merge_overlaps:
                hits = without_overlaps(hits)
            if len(hits) >= k or len(found) < limit or limit >= rows:
                return hits[:k]
            limit *= 4

    def embed(self, query: str, language: str = "eng") -> np.ndarray:
        """The embedding of a query in words, (d,)."""
        return self.model.encode_text([query], language, 1)[0]

    def embed_audio(self, audio: Any) -> np.ndarray:
        """The embedding of a sound, (d,): the normalised mean over its parts where it is longer than a window."""
        (recording, *_), _ = as_recordings(audio)
        (chunks,) = self.model.chunk_embeddings([recording], float(self.index.about["window_seconds"]))
        return mean_embedding(chunks.embeds).numpy()

    def strip(self, vector: np.ndarray, file: str) -> tuple[np.ndarray, np.ndarray]:
        """How well each window of a recording answers a query.

        Args:
            vector: The query's embedding, (d,).
            file: The recording.

        Returns:
            Where the windows begin in seconds, in order of time, and their scores; both (windows,).
        """
        rows = self.index.nearest(vector, self.index.windows.count_rows(), within=file, exact=True)
        rows.sort(key=lambda row: row["start_seconds"])
        return np.array([row["start_seconds"] for row in rows]), np.array([row["score"] for row in rows])


def without_overlaps(hits: Sequence[Hit]) -> list[Hit]:
    """Leaves out hits that overlap a better one of the same file.

    >>> hits = [Hit("a.wav", 5.0, 10.0, 0.9), Hit("a.wav", 7.5, 12.5, 0.8), Hit("a.wav", 10.0, 15.0, 0.7)]
    >>> [hit.start_seconds for hit in without_overlaps(hits)]
    [5.0, 10.0]
    """
    kept: list[Hit] = []
    for hit in hits:
        others = (other for other in kept if other.file == hit.file)
        if all(hit.start_seconds >= other.end_seconds or hit.end_seconds <= other.start_seconds for other in others):
            kept.append(hit)
    return kept
