"""Contrastive audio-text models for the Hugging Face ecosystem: SupCLAP models, losses and trainers.

Importing this package does not import torch or transformers; importing one of its classes does. After
`from modeling_supclap import SupCLAPModel`, SupCLAP models also load with the transformers functions `AutoModel`,
`AutoProcessor` and `pipeline`. If this package is not installed, a saved model loads with `trust_remote_code=True`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration_supclap import CEDConfig, CNN14Config, ModernTextConfig, NaFlexConfig, SupCLAPConfig
    from .feature_extraction_ced import CEDFeatureExtractor
    from .feature_extraction_msclap import MSCLAPFeatureExtractor
    from .modeling_ced import CEDModel
    from .modeling_cnn14 import CNN14Model
    from .modeling_modern_text import ModernTextModel
    from .modeling_naflex import NaFlexModel
    from .modeling_sonar import SonarTextModel
    from .modeling_supclap import SupCLAPModel
    from .processing_supclap import SupCLAPProcessor
    from .training.temporal_training import TemporalTrainer
    from .training.trainer import SupCLAPTrainer
    from .training.training_args import SupCLAPTrainingArguments, TemporalTrainingArguments


__version__ = "0.2.0"

__all__ = [
    "CEDConfig",
    "CEDFeatureExtractor",
    "CEDModel",
    "CNN14Config",
    "CNN14Model",
    "MSCLAPFeatureExtractor",
    "ModernTextConfig",
    "ModernTextModel",
    "NaFlexConfig",
    "NaFlexModel",
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
    "configuration_supclap": ("CEDConfig", "CNN14Config", "ModernTextConfig", "NaFlexConfig", "SupCLAPConfig"),
    "feature_extraction_ced": ("CEDFeatureExtractor",),
    "feature_extraction_msclap": ("MSCLAPFeatureExtractor",),
    "modeling_ced": ("CEDModel",),
    "modeling_cnn14": ("CNN14Model",),
    "modeling_modern_text": ("ModernTextModel",),
    "modeling_naflex": ("NaFlexModel",),
    "modeling_sonar": ("SonarTextModel",),
    "modeling_supclap": ("SupCLAPModel",),
    "processing_supclap": ("SupCLAPProcessor",),
    "training.temporal_training": ("TemporalTrainer",),
    "training.trainer": ("SupCLAPTrainer",),
    "training.training_args": ("SupCLAPTrainingArguments", "TemporalTrainingArguments"),
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use, because importing torch and transformers takes seconds."""
    for module, names in _MODULES.items():
        if name in names:
            require_torchaudio()
            globals()[name] = value = getattr(importlib.import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require_torchaudio() -> None:
    """Import torchaudio. Raise ImportError with installation advice if this fails."""
    try:
        importlib.import_module("torchaudio")
    except Exception as error:  # OSError or RuntimeError from a torchaudio that does not fit torch
        raise ImportError(
            f"torchaudio cannot be imported: {error}\n"
            "Most often the CPU build of torch is installed with the CUDA build of torchaudio, or their CUDA versions "
            "differ. Install a matching pair from one source, for example: "
            "pip install torch==2.13.0 torchaudio==2.11.0"
        ) from error
