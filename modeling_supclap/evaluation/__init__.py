"""Evaluates any model that embeds recordings and texts: retrieval, zero-shot classification and ZSTE, with a receipt.

    from modeling_supclap import evaluation

    receipt = evaluation.evaluate("outputs/esc10", load_splits("esc50", data_dir=...)["test"], tasks=["retrieval"])
    print(receipt.table())
    receipt.save("outputs/evaluation")

Embedding is in `embedded_split`, each task in a room of its own, what a receipt holds in `receipts`; formulas live in
`metrics/`. During training `retrieval_metrics_of` and `temporal_metrics` are the Trainer's `compute_metrics`.
"""

from .clip_embeddings import AudioPolicy, check_pairs
from .embedded_split import EmbeddedSplit, embed_split
from .embedding_cache import EmbeddingCache
from .embedding_models import EmbeddingModel, load_embedding_model
from .protocol import EvaluationOptions, evaluate
from .receipts import Intervals, Receipt, compare, format_comparison, paper_results, write_results
from .retrieval import evaluate_retrieval
from .trainer_metrics import (
    format_report,
    in_row_order,
    parallel_ranks,
    retrieval_metrics_of,
    retrieval_report,
    temporal_metrics,
)
from .zero_shot import TEMPLATE_SETS, evaluate_zero_shot, zero_shot_report
from .zste import ZSTEOptions, evaluate_zste

__all__ = [
    "TEMPLATE_SETS",
    "AudioPolicy",
    "EmbeddedSplit",
    "EmbeddingCache",
    "EmbeddingModel",
    "EvaluationOptions",
    "Intervals",
    "Receipt",
    "ZSTEOptions",
    "check_pairs",
    "compare",
    "embed_split",
    "evaluate",
    "evaluate_retrieval",
    "evaluate_zero_shot",
    "evaluate_zste",
    "format_comparison",
    "format_report",
    "in_row_order",
    "load_embedding_model",
    "paper_results",
    "parallel_ranks",
    "retrieval_metrics_of",
    "retrieval_report",
    "temporal_metrics",
    "write_results",
    "zero_shot_report",
]
