"""Contrastive audio-text models for the Hugging Face ecosystem: SupCLAP, its towers, losses and trainer."""

from typing import Any

try:
    import torchaudio  # noqa: F401
except Exception as error:  # a torchaudio that does not fit torch raises OSError or RuntimeError, not ImportError
    # transformers imports torchaudio wherever it is installed, so without this line the failure would surface there.
    raise ImportError(
        f"torchaudio does not import: {error}\n"
        "Most often the CPU build of torch stands beside the CUDA build of torchaudio, or their CUDA versions differ. "
        "Install a fitting pair from one source, for example: pip install torch==2.13.0 torchaudio==2.11.0"
    ) from error

from transformers import AutoConfig, AutoFeatureExtractor, AutoModel, AutoProcessor

from .configuration_supclap import CEDConfig, CNN14Config, SupCLAPConfig
from .feature_extraction_ced import CEDFeatureExtractor
from .feature_extraction_msclap import MSCLAPFeatureExtractor
from .integrations import pipeline
from .modeling_ced import CEDModel
from .modeling_cnn14 import CNN14Model
from .modeling_sonar import SonarTextModel
from .modeling_supclap import SupCLAPModel
from .processing_supclap import SupCLAPProcessor

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


class _NativeCED:
    """`CEDConfig` for `AutoConfig`, under a module's name of transformers.

    A registered class of any other module wins over the code that a folder brings, even with `trust_remote_code=True`:
    the official tagger (`AutoModelForAudioClassification` on "mispeech/ced-base") could not be loaded beside ours.
    """

    __module__ = "transformers.models.ced"
    model_type = CEDConfig.model_type
    from_dict = CEDConfig.from_dict

    def __new__(cls, **fields: Any) -> Any:
        return CEDConfig(**fields)


for _config, _model, _feature_extractor in (
    (CEDConfig, CEDModel, CEDFeatureExtractor),
    (CNN14Config, CNN14Model, MSCLAPFeatureExtractor),
    (SupCLAPConfig, SupCLAPModel, CEDFeatureExtractor),
):
    _registered: Any = _NativeCED if _config is CEDConfig else _config
    AutoConfig.register(_config.model_type, _registered)
    AutoModel.register(_config, _model)
    AutoFeatureExtractor.register(_config, _feature_extractor)
    # A saved folder then carries the code and loads where this package is not installed (trust_remote_code=True).
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModel")
AutoProcessor.register(SupCLAPConfig, SupCLAPProcessor)
CEDFeatureExtractor.register_for_auto_class()
MSCLAPFeatureExtractor.register_for_auto_class()
SupCLAPProcessor.register_for_auto_class()
pipeline.register()


def __getattr__(name: str) -> Any:
    """Imports a trainer when first asked for: transformers' Trainer takes seconds that inference need not spend."""
    if name in ("SupCLAPTrainer", "TemporalTrainer"):
        from .training import trainer

        return getattr(trainer, name)
    if name in ("SupCLAPTrainingArguments", "TemporalTrainingArguments"):
        from .training import training_args

        return getattr(training_args, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
