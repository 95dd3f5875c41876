"""`evaluate.load("metrics/recall")`: the retrieval scores of `ranking.py` as an `evaluate.Metric`.

`evaluate` parses the imports of this file to find the files to copy. Therefore use one import per line, import helpers
relatively without a trailing comment, and do not import `evaluate.Metric` by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from .ranking import LazySimilarity, retrieval_scores
from .relevance import relevant_from_qrels

_DESCRIPTION = """\
Retrieval scores of a similarity matrix: R@k, mAP@10, median and mean rank of the best relevant candidate. A query may
have several relevant candidates. Ties count against the model; NaN is an error.
"""

_INPUTS = """
Args:
    predictions: one row of scores per query (floats, higher is closer); with `similarity`, row numbers.
    references: one list per query with the columns of its relevant candidates.
    k: cutoffs of R@k; default (1, 5, 10).
    map_cutoff: cutoff of mAP; default 10.
    similarity: matrix (queries, candidates), or a LazySimilarity of embeddings.
    query_embeds, candidate_embeds: unit-norm embeddings in place of `similarity`; their matrix is never stored.
Returns:
    R@k and mAP@10 as fractions, median_rank and mean_rank (1-based), num_queries.
Examples:
    >>> recall = evaluate.load("metrics/recall")
    >>> recall.compute(predictions=[[0.9, 0.2], [0.7, 0.1]], references=[[0], [1]], k=[1])["R@1"]
    0.5
"""

_CITATION = """\
@inproceedings{yan2024bridging,
  title = {Bridging Language Gaps in Audio-Text Retrieval},
  author = {Yan, Zhiyong and Dinkel, Heinrich and Wang, Yongqing and Liu, Jizhong and Zhang, Junbo and Wang, Yujun and
            Wang, Bin},
  booktitle = {Interspeech},
  year = {2024}
}
"""


class Recall(evaluate.Metric):
    """R@k, mAP@10, median and mean rank; see the card, README.md."""

    relevant_from_qrels = staticmethod(relevant_from_qrels)

    def _info(self) -> evaluate.MetricInfo:
        columns = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features(predictions=datasets.Sequence(datasets.Value("float64")), references=columns),
                datasets.Features(predictions=datasets.Value("int64"), references=columns),
            ],
            reference_urls=["https://arxiv.org/abs/2406.07012"],
        )

    def compute(
        self,
        *,
        predictions: Sequence[Any] | None = None,
        references: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> dict[str, float] | None:
        """Compute the scores; skips the Arrow storage of `evaluate` for data of a single call and process."""
        if predictions is not None and references is not None and self.writer is None and self.num_process == 1:
            # Leave the conversion of other types, such as tensors on a GPU, to `evaluate`.
            plain = isinstance(predictions, np.ndarray | list | range) and len(predictions) > 0
            if plain and isinstance(predictions[0], np.ndarray | np.generic | list | tuple | int):
                return self._compute(predictions, references, **kwargs)
        return super().compute(predictions=predictions, references=references, **kwargs)

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> datasets.Features:
        for column in batch.values():
            if column is None or len(column) == 0:
                raise ValueError("predictions or references are missing or empty; give one of each per query")
        return super()._infer_feature_from_batch(batch)

    def _compute(
        self,
        predictions: Sequence[Any],
        references: Sequence[Sequence[int]],
        k: int | Sequence[int] = (1, 5, 10),
        map_cutoff: int = 10,
        similarity: Any = None,
        query_embeds: Any = None,
        candidate_embeds: Any = None,
        **kwargs: Any,  # `evaluate.combine` passes the options of all its metrics
    ) -> dict[str, float]:
        if query_embeds is not None or candidate_embeds is not None:
            if similarity is not None or query_embeds is None or candidate_embeds is None:
                raise ValueError(
                    "give both query_embeds and candidate_embeds, or only similarity, or rows of scores as predictions"
                )
            similarity = LazySimilarity(query_embeds, candidate_embeds)

        if similarity is None:
            return retrieval_scores(predictions, references, k, map_cutoff)
        num_queries = np.shape(similarity)[0]
        if np.ndim(predictions[0]) or sorted(predictions) != list(range(num_queries)):
            raise ValueError(
                f"with `similarity`, predictions must be its row numbers, each of 0..{num_queries - 1} once; "
                f"got {len(predictions)}, the first {predictions[0]}"
            )
        relevant = [references[index] for index in np.argsort(np.asarray(predictions))]
        return retrieval_scores(similarity, relevant, k, map_cutoff)
