"""Evaluation of audio-text models: retrieval, zero-shot classification and ZSTE.

    from modeling_supclap import evaluation

    results = evaluation.evaluate("outputs/esc10", load_splits("esc50", data_dir=...)["test"], tasks=["retrieval"])
    print(results.table())
    results.save("outputs/evaluation")

`embed` computes the embeddings, `results` defines the `Results` class, and each task has its own module. The formulas
are in `metrics/`. `retrieval_metrics` and `temporal_metrics` compute the scores of the evaluations during training.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audio_to_audio import evaluate_audio_to_audio
    from .cache import EmbeddingCache
    from .comparison import compare, format_comparison
    from .embed import AudioPolicy, EmbeddedSplit, embed_split, hash_dataset, hash_recordings, split_from_predictions
    from .models import EmbeddingModel, load_embedding_model
    from .options import TEMPLATE_SETS, EvaluationOptions, ZSTEOptions
    from .probes import evaluate_few_shot, evaluate_linear_probe
    from .results import Intervals, Results, package_versions, paper_results
    from .retrieval import evaluate_retrieval, retrieval_metrics
    from .run import evaluate, make_results, score_split
    from .seeds import ScoreTable, load_results, table
    from .zero_shot import evaluate_zero_shot
    from .zste import evaluate_pairs, evaluate_zste, temporal_metrics

__all__ = [
    "TEMPLATE_SETS",
    "AudioPolicy",
    "EmbeddedSplit",
    "EmbeddingCache",
    "EmbeddingModel",
    "EvaluationOptions",
    "Intervals",
    "Results",
    "ScoreTable",
    "ZSTEOptions",
    "compare",
    "embed_split",
    "evaluate",
    "evaluate_audio_to_audio",
    "evaluate_few_shot",
    "evaluate_linear_probe",
    "evaluate_pairs",
    "evaluate_retrieval",
    "evaluate_zero_shot",
    "evaluate_zste",
    "format_comparison",
    "hash_dataset",
    "hash_recordings",
    "load_embedding_model",
    "load_results",
    "make_results",
    "package_versions",
    "paper_results",
    "retrieval_metrics",
    "score_split",
    "split_from_predictions",
    "table",
    "temporal_metrics",
]
_MODULES = {
    "audio_to_audio": ("evaluate_audio_to_audio",),
    "cache": ("EmbeddingCache",),
    "comparison": ("compare", "format_comparison"),
    "embed": (
        "AudioPolicy",
        "EmbeddedSplit",
        "embed_split",
        "hash_dataset",
        "hash_recordings",
        "split_from_predictions",
    ),
    "models": ("EmbeddingModel", "load_embedding_model"),
    "options": ("TEMPLATE_SETS", "EvaluationOptions", "ZSTEOptions"),
    "probes": ("evaluate_few_shot", "evaluate_linear_probe"),
    "results": ("Intervals", "Results", "package_versions", "paper_results"),
    "retrieval": ("evaluate_retrieval", "retrieval_metrics"),
    "run": ("evaluate", "make_results", "score_split"),
    "seeds": ("ScoreTable", "load_results", "table"),
    "zero_shot": ("evaluate_zero_shot",),
    "zste": ("evaluate_pairs", "evaluate_zste", "temporal_metrics"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because training and search need only a few of these modules."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
