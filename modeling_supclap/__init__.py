"""Contrastive audio-text models for the Hugging Face ecosystem: SupCLAP, its towers, losses and trainer."""

import importlib
from typing import TYPE_CHECKING, Any

from .integrations.auto_classes import watch_imports

if TYPE_CHECKING:
    from .configuration_supclap import CEDConfig, CNN14Config, SupCLAPConfig
    from .feature_extraction_ced import CEDFeatureExtractor
    from .feature_extraction_msclap import MSCLAPFeatureExtractor
    from .modeling_ced import CEDModel
    from .modeling_cnn14 import CNN14Model
    from .modeling_sonar import SonarTextModel
    from .modeling_supclap import SupCLAPModel
    from .processing_supclap import SupCLAPProcessor
    from .training.trainer import SupCLAPTrainer, TemporalTrainer
    from .training.training_args import SupCLAPTrainingArguments, TemporalTrainingArguments

__version__ = "0.1.0"

__all__ = [
    "CEDConfig",
    "CEDFeatureExtractor",
    "CEDModel",
    "CNN14Config",
    "CNN14Model",
    "MSCLAPFeatureExtractor",
    "SonarTextModel",
    "SupCLAPConfig",
    "SupCLAPModel",
    "SupCLAPProcessor",
    "SupCLAPTrainer",
    "SupCLAPTrainingArguments",
    "TemporalTrainer",
    "TemporalTrainingArguments",
    "__version__",
]

_MODULES = {
    "CEDConfig": "configuration_supclap",
    "CEDFeatureExtractor": "feature_extraction_ced",
    "CEDModel": "modeling_ced",
    "CNN14Config": "configuration_supclap",
    "CNN14Model": "modeling_cnn14",
    "MSCLAPFeatureExtractor": "feature_extraction_msclap",
    "SonarTextModel": "modeling_sonar",
    "SupCLAPConfig": "configuration_supclap",
    "SupCLAPModel": "modeling_supclap",
    "SupCLAPProcessor": "processing_supclap",
    "SupCLAPTrainer": "training.trainer",
    "SupCLAPTrainingArguments": "training.training_args",
    "TemporalTrainer": "training.trainer",
    "TemporalTrainingArguments": "training.training_args",
}


def __getattr__(name: str) -> Any:
    """Imports a class when it is first asked for: torch and transformers take seconds that `--help` need not spend."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


watch_imports(_MODULES)
