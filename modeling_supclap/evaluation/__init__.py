"""Evaluates any model that embeds recordings and texts: retrieval, zero-shot classification and ZSTE.

    from modeling_supclap import evaluation

    results = evaluation.evaluate("outputs/esc10", load_splits("esc50", data_dir=...)["test"], tasks=["retrieval"])
    print(results.table())
    results.save("outputs/evaluation")

Embedding is in `embed`, each task in a file of its own, what results hold in `results`; formulas live in `metrics/`.
During training `retrieval_metrics` and `temporal_metrics` are the Trainer's `compute_metrics`.
"""

from .cache import EmbeddingCache
from .embed import AudioPolicy, EmbeddedSplit, embed_split, hash_dataset, hash_recordings, split_from_predictions
from .evaluate import EvaluationOptions, evaluate, make_results, score_split
from .models import EmbeddingModel, load_embedding_model
from .results import Intervals, Results, compare, format_comparison, package_versions, paper_results
from .retrieval import evaluate_retrieval, retrieval_metrics
from .zero_shot import TEMPLATE_SETS, evaluate_zero_shot
from .zste import ZSTEOptions, evaluate_pairs, evaluate_zste, temporal_metrics

__all__ = [
    "TEMPLATE_SETS",
    "AudioPolicy",
    "EmbeddedSplit",
    "EmbeddingCache",
    "EmbeddingModel",
    "EvaluationOptions",
    "Intervals",
    "Results",
    "ZSTEOptions",
    "compare",
    "embed_split",
    "evaluate",
    "evaluate_pairs",
    "evaluate_retrieval",
    "evaluate_zero_shot",
    "evaluate_zste",
    "format_comparison",
    "hash_dataset",
    "hash_recordings",
    "load_embedding_model",
    "make_results",
    "package_versions",
    "paper_results",
    "retrieval_metrics",
    "score_split",
    "split_from_predictions",
    "temporal_metrics",
]
