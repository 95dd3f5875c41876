"""Evaluation of audio-text models: retrieval, zero-shot classification and ZSTE.

    from modeling_supclap import evaluation

    results = evaluation.evaluate("outputs/esc10", load_splits("esc50", data_dir=...)["test"], tasks=["retrieval"])
    print(results.table())
    results.save("outputs/evaluation")

`embed` computes the embeddings, `results` defines the `Results` class, and each task has its own module. The formulas
are in `metrics/`. `retrieval_metrics` and `temporal_metrics` compute the scores of the evaluations during training.
"""

import importlib
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `X as X` is public for type checkers
    from .audio_to_audio import evaluate_audio_to_audio as evaluate_audio_to_audio
    from .cache import EmbeddingCache as EmbeddingCache
    from .comparison import compare as compare
    from .comparison import format_comparison as format_comparison
    from .embed import AudioPolicy as AudioPolicy
    from .embed import EmbeddedSplit as EmbeddedSplit
    from .embed import embed_split as embed_split
    from .embed import hash_dataset as hash_dataset
    from .embed import hash_recordings as hash_recordings
    from .embed import split_from_predictions as split_from_predictions
    from .models import EmbeddingModel as EmbeddingModel
    from .models import load_embedding_model as load_embedding_model
    from .options import TEMPLATE_SETS as TEMPLATE_SETS
    from .options import EvaluationOptions as EvaluationOptions
    from .options import ZSTEOptions as ZSTEOptions
    from .probes import evaluate_few_shot as evaluate_few_shot
    from .probes import evaluate_linear_probe as evaluate_linear_probe
    from .results import Intervals as Intervals
    from .results import Results as Results
    from .results import package_versions as package_versions
    from .results import paper_results as paper_results
    from .retrieval import evaluate_retrieval as evaluate_retrieval
    from .retrieval import retrieval_metrics as retrieval_metrics
    from .run import evaluate as evaluate
    from .run import make_results as make_results
    from .run import score_split as score_split
    from .seeds import ScoreTable as ScoreTable
    from .seeds import load_results as load_results
    from .seeds import table as table
    from .zero_shot import evaluate_zero_shot as evaluate_zero_shot
    from .zste import evaluate_pairs as evaluate_pairs
    from .zste import evaluate_zste as evaluate_zste
    from .zste import temporal_metrics as temporal_metrics

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
__all__ = list(chain.from_iterable(_MODULES.values()))


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because training and search need only a few of these modules."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
