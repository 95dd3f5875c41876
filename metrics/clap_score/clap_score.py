"""CLAP score (see `pairs.py`) as an `evaluate.Metric`, for `evaluate.load("metrics/clap_score")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modeling_supclap.metrics import array_metric  # From: supclap
from modeling_supclap.metrics.clap_score import pair_similarity  # From: supclap


class CLAPScore(array_metric.ArrayMetric):
    """CLAP score: mean cosine similarity between the embeddings of sounds and of their texts.

    It measures how well generated sounds match their prompts. Any model that embeds audio and text in one space can be
    used; scores of different models cannot be compared.

    Args:
        predictions: embeddings of the sounds, or row indices of `audio_embeds`.
        references: embeddings of their texts by the same model, or row indices of `text_embeds`.
        audio_embeds, text_embeds: embedding matrices, which are not stored in Arrow; default None.

    Returns:
        dict with clap_score, in -1..1, and num_pairs.

    Examples:
        >>> import evaluate
        >>> clap_score = evaluate.load("metrics/clap_score")
        >>> clap_score.compute(predictions=[[1.0, 0.0], [0.0, 2.0]], references=[[1.0, 0.0], [3.0, 4.0]])
        {'clap_score': 0.9, 'num_pairs': 2}
    """

    citation_text = """\
@inproceedings{huang2023makeanaudio,
  title = {Make-An-Audio: Text-To-Audio Generation with Prompt-Enhanced Diffusion Models},
  author = {Huang, Rongjie and Huang, Jiawei and Yang, Dongchao and Ren, Yi and Liu, Luping and Li, Mingze and
            Ye, Zhenhui and Liu, Jinglin and Yin, Xiang and Zhao, Zhou},
  booktitle = {ICML},
  year = {2023}
}
"""
    row_columns = ("predictions", "references")

    def _compute(
        self, predictions: Sequence[Any], references: Sequence[Any], audio_embeds: Any = None, text_embeds: Any = None
    ) -> dict[str, float]:
        similarity = pair_similarity(
            array_metric.take_rows(audio_embeds, predictions, "audio_embeds"),
            array_metric.take_rows(text_embeds, references, "text_embeds"),
        )
        return {"clap_score": float(similarity.mean()), "num_pairs": len(similarity)}
