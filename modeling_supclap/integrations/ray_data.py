"""Embed a table of recordings on a cluster, with Ray Data or with Spark.

    embed = {"fn": EmbedRecordings, "fn_constructor_args": ["outputs/tuned"]}
    ray.data.read_parquet("clips.parquet").map_batches(
        **embed, batch_size=64, compute=ray.data.ActorPoolStrategy(size=8), num_gpus=1
    ).write_parquet("embeddings")

    spark.read.parquet("clips.parquet").mapInPandas(embed_frames("outputs/tuned"), schema)

The batches keep their columns. Two columns are added: `embedding` (float32, unit norm; NaN for an unusable recording)
and `error` (empty, or the reason).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..encoding import mean_embedding
from ..evaluation.models import load_embedding_model


class EmbedRecordings:
    """Function from a batch with a column of paths to the same batch with embeddings, for `map_batches` of Ray Data.

    An instance loads the model once, so that each Ray actor has one model.

    Args:
        model: Folder or Hub id, as in `load_embedding_model`.
        path_column: Column with paths or fsspec addresses.
        chunk_seconds: Length of the chunks of long recordings in seconds; the embedding is their mean, with unit norm.
            None: the model's maximum.
        batch_size: Number of chunks to embed at once.
        num_workers: Number of threads that read recordings.
        device: Device such as cpu or cuda. None: a GPU if there is one.
    """

    def __init__(
        self,
        model: str,
        path_column: str = "path",
        chunk_seconds: float | None = 10.0,
        batch_size: int = 32,
        num_workers: int = 0,
        device: str | None = None,
    ) -> None:
        self.model = load_embedding_model(model, device=device)
        self.path_column, self.batch_size, self.num_workers = path_column, batch_size, num_workers
        self.chunk_seconds = min(filter(None, (chunk_seconds, self.model.chunk_seconds)), default=None)
        self.width = self.model.dim

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the batch with the columns `embedding` (N, d) and `error` (N,)."""
        from ..audio_input import as_recordings

        paths = [str(path) for path in batch[self.path_column]]
        embeds = np.full((len(paths), self.width), np.nan, np.float32)
        errors = [""] * len(paths)
        recordings, _ = as_recordings(paths)
        embedded = self.model.chunk_embeddings(
            recordings,
            self.chunk_seconds,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            on_bad_audio="skip",
            refuse_silence=True,
        )
        for number, chunks in enumerate(embedded):
            if chunks.error is not None:
                errors[number] = str(chunks.error)
                continue
            embeds[number] = mean_embedding(chunks.embeds)
        return {**batch, "embedding": embeds, "error": np.array(errors, dtype=object)}


def embed_frames(model: str, **options: Any) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function from pandas frames to frames with embeddings, for `mapInPandas` of Spark.

    The model is loaded once per partition. `options` are those of `EmbedRecordings`.
    """

    def embed(frames: Iterable[Any]) -> Iterator[Any]:
        recordings = EmbedRecordings(model, **options)
        for frame in frames:
            columns = recordings({name: frame[name].to_numpy() for name in frame.columns})
            yield frame.assign(embedding=list(columns["embedding"]), error=columns["error"])

    return embed
