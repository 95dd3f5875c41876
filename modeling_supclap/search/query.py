"""Search an index by text, audio or embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .store import SoundIndex

if TYPE_CHECKING:
    from ..evaluation import EmbeddingModel

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
_FIRST_LIMIT = 256  # windows to look at first if the number of hits is limited by their score alone


class Hit(NamedTuple):
    """Search result: a window of a recording, and its cosine similarity with the query.

    The path of the recording is relative to the indexed folder.
    """

    file: str
    start_seconds: float
    end_seconds: float
    score: float


class Answer(NamedTuple):
    """Hits of one query, best first. `stands_out` is as in `Searcher.stands_out`, or None for a query by sound."""

    query: str
    hits: list[Hit]
    stands_out: bool | None = None


class Searcher:
    """Searcher for an index, with the model that was used to build the index.

    Args:
        model: The model, or its folder, Hub id or `module:function`. None: load the model named in the index. An object
            that encodes only texts is used unchanged: it needs `name`, `fingerprint` and `encode_text(texts, language,
            batch_size)`, as in `EmbeddingModel`.
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
        model: EmbeddingModel | Any = None,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.index = SoundIndex(index)
        # background score by version of the index and searched part
        self._backgrounds: dict[Any, float] = {}
        about = self.index.about
        name = about["model"]
        if model is None and ":" in name and not Path(name).exists():
            raise ValueError(f"the model of {index} is the function {name}; if you trust it, pass it as --model")
        if not hasattr(model, "encode_text") or hasattr(model, "encode_audio"):
            from ..evaluation import load_embedding_model

            model = load_embedding_model(model or name, device=device, trust_remote_code=trust_remote_code)
        self.model: Any = model
        fingerprint = model.fingerprint or ""
        if fingerprint != about["fingerprint"] or (not fingerprint and model.name != name):
            raise ValueError(f"{index} was built with {name}; {model.name} has another fingerprint; rebuild it")

    def search(
        self,
        query: str | None = None,
        language: str = "eng",
        audio: Any = None,
        vector: np.ndarray | None = None,
        k: int | None = 10,
        within: str | None = None,
        exact: bool = False,
        merge_overlaps: bool = True,
        threshold: float = -math.inf,
        lengths: tuple[float, float] = (0.0, math.inf),
    ) -> list[Hit]:
        """Search the index and return at most k hits, best first. Pass exactly one of `query`, `audio` and `vector`.

        Args:
            language: ISO 639-3 code of the text query.
            audio: Audio query: a path, an open file, or a pair of waveform and sampling rate.
            vector: Query embedding (d,) from `embed` or `embed_audio`.
            k: Maximum number of hits. None: all hits.
            within: File or folder to search, relative to the indexed folder. None: search all files.
            exact: Whether to score all windows even if there is an approximate index.
            merge_overlaps: Whether to drop hits that overlap a better hit in the same file.
            threshold: Minimum score of a hit.
            lengths: Minimum and maximum length of the recordings to search, in seconds.

        Raises:
            ValueError: Not exactly one of `query`, `audio` and `vector` is set, `k` is less than 1, or `within` is not
                in the index.
        """
        queries = {"query": query, "audio": audio, "vector": vector}
        passed = [name for name, value in queries.items() if value is not None]
        if len(passed) != 1:
            raise ValueError(f"got {' and '.join(passed) or 'nothing'}; pass one of query, audio and vector")
        if k is not None and k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        files = self.index.select_files(within, lengths)
        if within and not self.index.select_files(within):
            similar = [name for name in self.index.known_files() if Path(name).name == Path(within).name]
            hint = f", such as {similar[0]!r}" if similar else ""
            raise ValueError(f"{within!r} is not in the index; pass a path relative to the indexed folder{hint}")

        if vector is None:
            vector = self.embed_audio(audio) if query is None else self.embed(query, language)
        if np.shape(vector) != (self.index.dim,) or not np.isfinite(vector).all():
            raise ValueError(f"vector has shape {np.shape(vector)}; pass ({self.index.dim},) finite numbers")
        num_windows = self.index.windows.count_rows()
        most = num_windows if k is None else min(k, num_windows)
        limit = most if threshold == -math.inf else min(most, _FIRST_LIMIT)
        while True:
            rows = self.index.nearest(vector, limit, files, exact)
            hits = [Hit(**row) for row in rows if row["score"] >= threshold]
            is_last = len(hits) < limit or limit >= num_windows
            if merge_overlaps:
                hits = without_overlaps(hits)
            if is_last or len(hits) >= most:
                return hits[:most]
            limit *= 4

    def search_texts(self, texts: Sequence[str], language: str = "eng", **options: Any) -> list[Answer]:
        """Search by several texts. `options` are as in `search`. `search.tables` converts the answers to tables."""
        answers = []
        for text, vector in zip(texts, self.model.encode_text(list(texts), language, 32), strict=True):
            hits = self.search(vector=vector, **options)
            answers.append(Answer(text, hits, self.stands_out(hits, options.get("within"))))
        return answers

    @cached_property
    def _background_vectors(self) -> Any:
        return self.model.encode_text(BACKGROUND_TEXTS, "eng", len(BACKGROUND_TEXTS))

    def stands_out(self, hits: Sequence[Hit], within: str | None = None) -> bool:
        """Return whether the best hit of a query scores higher than the best hits of texts that describe no sound."""
        return bool(hits) and hits[0].score > self.background(within)

    def background(self, within: str | None = None) -> float:
        """Return the 95 % quantile of the best scores of texts that describe no sound (`BACKGROUND_TEXTS`).

        If `within` is set, only this file or folder is searched. The result is cached until the index changes.
        """
        key = self.index.windows.version, within
        if key not in self._backgrounds:
            best: list[float] = []
            files = self.index.select_files(within)
            for vector in self._background_vectors:
                best.extend(map(itemgetter("score"), self.index.nearest(vector, 1, files)))
            self._backgrounds[key] = float(np.quantile(best, 0.95)) if best else 1.0
        return self._backgrounds[key]

    def embed(self, query: str, language: str = "eng") -> np.ndarray:
        """Embed a text query as an array (d,) with unit norm."""
        return self.model.encode_text([query], language, 1)[0]

    def embed_audio(self, audio: Any, start_seconds: float = 0.0, end_seconds: float | None = None) -> np.ndarray:
        """Embed an audio query as an array (d,) with unit norm, the mean over chunks of the window length.

        Only the part from `start_seconds` to `end_seconds` is read. None, or a later time: to the end of the recording.

        Raises ValueError if there is no such part.
        """
        from ..audio_input import Recording, as_recordings
        from ..encoding import mean_embedding

        (recording, *_), _ = as_recordings(audio)
        if start_seconds or end_seconds is not None:
            rate_hz, seconds = self.model.sampling_rate_hz, recording.get_seconds() or math.inf
            end = min(seconds, math.inf if end_seconds is None else end_seconds)
            if not 0 <= start_seconds < end:
                part = f"from {start_seconds:g} s to {end:g} s"
                raise ValueError(f"{recording.name} has no sound {part}; it lasts {seconds:g} s")
            stop = None if end_seconds is None else round(end_seconds * rate_hz)
            waveform = recording.read(rate_hz, round(start_seconds * rate_hz), stop)
            recording = Recording(waveform, rate_hz, recording.name)
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
    by_file: dict[str, list[Hit]] = {}
    for hit in hits:
        others = by_file.setdefault(hit.file, [])
        if all(hit.start_seconds >= other.end_seconds or hit.end_seconds <= other.start_seconds for other in others):
            others.append(hit)
            selected.append(hit)
    return selected
