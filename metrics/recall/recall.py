"""Retrieval metrics (see `ranking.py`) as an `evaluate.Metric`, for `evaluate.load("metrics/recall")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import numpy as np

from modeling_supclap.metrics import array_metric  # From: supclap
from modeling_supclap.metrics.recall import LazySimilarity, relevant_from_qrels, retrieval_scores  # From: supclap


class Recall(array_metric.ArrayMetric):
    """Retrieval metrics from a similarity matrix: R@k, mAP@10, median and mean rank of the best relevant candidate.

    A query may have several relevant candidates. Ties count against the model. NaN scores raise ValueError.

    Args:
        predictions: one row of scores per query (floats, higher is closer), or row indices of `similarity`.
        references: one list per query with the columns of its relevant candidates.
        k: cutoffs of R@k; default (1, 5, 10).
        map_cutoff: cutoff of mAP; default 10.
        metrics: names of further metrics, such as ["mAP@16", "nDCG@10", "MRR"]; default none.
        similarity: matrix (queries, candidates) or a LazySimilarity; default None.
        query_embeds, candidate_embeds: unit-norm embeddings to use instead of `similarity`, scored in tiles.

    Returns:
        dict with R@k, mAP@10 and further metrics as fractions, median_rank and mean_rank (1-based), and num_queries.

    Examples:
        >>> import evaluate
        >>> recall = evaluate.load("metrics/recall")
        >>> recall.compute(predictions=[[0.9, 0.2], [0.7, 0.1]], references=[[0], [1]], k=[1])["R@1"]
        0.5
    """

    citation_text = """\
@inproceedings{yan2024bridging,
  title = {Bridging Language Gaps in Audio-Text Retrieval},
  author = {Yan, Zhiyong and Dinkel, Heinrich and Wang, Yongqing and Liu, Jizhong and Zhang, Junbo and Wang, Yujun and
            Wang, Bin},
  booktitle = {Interspeech},
  year = {2024}
}
"""
    other_columns: ClassVar = {"references": datasets.Sequence(datasets.Value("int64"))}
    relevant_from_qrels = staticmethod(relevant_from_qrels)

    def compute(
        self,
        *,
        predictions: Sequence[Any] | None = None,
        references: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> dict[str, float] | None:
        """Compute the metrics; raise TypeError for an unknown option.

        If all inputs are passed in this call and there is one process, they are not written to an Arrow file first.
        """
        options = self.select_options(kwargs)
        if predictions is not None and references is not None and self.writer is None and self.num_process == 1:
            # Leave the conversion of other types, such as tensors on a GPU, to `evaluate`.
            plain = isinstance(predictions, np.ndarray | list | range) and len(predictions) > 0
            if plain and isinstance(predictions[0], np.ndarray | np.generic | list | tuple | int):
                return self._compute(predictions, references, **options)
        return super().compute(predictions=predictions, references=references, **options)

    def _compute(
        self,
        predictions: Sequence[Any],
        references: Sequence[Sequence[int]],
        k: int | Sequence[int] = (1, 5, 10),
        map_cutoff: int = 10,
        similarity: Any = None,
        query_embeds: Any = None,
        candidate_embeds: Any = None,
        metrics: Sequence[str] = (),
    ) -> dict[str, float]:
        if query_embeds is not None or candidate_embeds is not None:
            if similarity is not None or query_embeds is None or candidate_embeds is None:
                raise ValueError(
                    "give both query_embeds and candidate_embeds, or only similarity, or only rows of scores as "
                    "predictions"
                )
            similarity = LazySimilarity(query_embeds, candidate_embeds)

        if similarity is None:
            return retrieval_scores(predictions, references, k, map_cutoff, metrics)
        num_queries = np.shape(similarity)[0]
        rows = array_metric.take_rows(range(num_queries), predictions, "similarity")
        counts = np.bincount(rows, minlength=num_queries)
        if (counts != 1).any():
            row = np.argmax(counts != 1)
            raise ValueError(f"predictions contain row {row} of similarity {counts[row]} times; give each row once")
        relevant = [references[index] for index in np.argsort(rows)]
        return retrieval_scores(similarity, relevant, k, map_cutoff, metrics)
