"""Enters our classes into transformers' auto classes once either is loaded.

`import modeling_supclap` loads neither torch nor a class of transformers, which takes seconds. Yet after it
`AutoModel.from_pretrained` knows our models: the import system tells us when the module of an auto class, or one of
ours, has been loaded, and what belongs together is registered then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = __package__.rpartition(".")[0]
AUTO = "transformers.models.auto"


def _register_configurations() -> None:
    from transformers import AutoConfig

    from ..configuration_supclap import CEDConfig, CNN14Config, SupCLAPConfig

    class NativeCED:
        """`CEDConfig` for `AutoConfig`, under a module's name of transformers.

        A registered class of any other module wins over the code that a folder brings, even with
        `trust_remote_code=True`: the official tagger (`AutoModelForAudioClassification` on "mispeech/ced-base") could
        not be loaded beside ours.
        """

        __module__ = "transformers.models.ced"
        model_type = CEDConfig.model_type
        from_dict = CEDConfig.from_dict

        def __new__(cls, **fields: Any) -> Any:
            return CEDConfig(**fields)

    for config in (CEDConfig, CNN14Config, SupCLAPConfig):
        registered: Any = NativeCED if config is CEDConfig else config
        AutoConfig.register(config.model_type, registered)
        # A saved folder then carries the code and loads where this package is not installed (trust_remote_code=True).
        config.register_for_auto_class()


def _register_models() -> None:
    from transformers import AutoModel

    from ..modeling_ced import CEDModel
    from ..modeling_cnn14 import CNN14Model
    from ..modeling_supclap import SupCLAPModel

    for model in (CEDModel, CNN14Model, SupCLAPModel):
        AutoModel.register(model.config_class, model)
        model.register_for_auto_class("AutoModel")


def _register_feature_extractors() -> None:
    from transformers import AutoFeatureExtractor

    from ..configuration_supclap import CEDConfig, CNN14Config, SupCLAPConfig
    from ..feature_extraction_ced import CEDFeatureExtractor
    from ..feature_extraction_msclap import MSCLAPFeatureExtractor

    AutoFeatureExtractor.register(CEDConfig, CEDFeatureExtractor)
    AutoFeatureExtractor.register(CNN14Config, MSCLAPFeatureExtractor)
    AutoFeatureExtractor.register(SupCLAPConfig, CEDFeatureExtractor)
    CEDFeatureExtractor.register_for_auto_class()
    MSCLAPFeatureExtractor.register_for_auto_class()


def _register_processor() -> None:
    from transformers import AutoProcessor

    from ..configuration_supclap import SupCLAPConfig
    from ..processing_supclap import SupCLAPProcessor

    AutoProcessor.register(SupCLAPConfig, SupCLAPProcessor)
    SupCLAPProcessor.register_for_auto_class()


def _register_pipeline() -> None:
    from transformers.pipelines import PIPELINE_REGISTRY

    from .pipeline import TASK, ClipPipeline

    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline


_due = {
    _register_configurations: {f"{AUTO}.configuration_auto", f"{PACKAGE}.configuration_supclap"},
    _register_models: {
        f"{AUTO}.modeling_auto",
        f"{PACKAGE}.modeling_ced",
        f"{PACKAGE}.modeling_cnn14",
        f"{PACKAGE}.modeling_supclap",
    },
    _register_feature_extractors: {
        f"{AUTO}.feature_extraction_auto",
        f"{PACKAGE}.feature_extraction_ced",
        f"{PACKAGE}.feature_extraction_msclap",
    },
    _register_processor: {f"{AUTO}.processing_auto", f"{PACKAGE}.processing_supclap"},
    _register_pipeline: {"transformers.pipelines"},
}
"""What is not registered yet, and the modules that call for it."""

_OURS = {name for modules in _due.values() for name in modules if name.startswith(PACKAGE)}


def register_loaded() -> None:
    """Registers what a loaded module calls for."""
    for register, modules in list(_due.items()):
        if register in _due and not modules.isdisjoint(sys.modules):
            del _due[register]
            register()


def require_torchaudio() -> None:
    """Imports torchaudio, which transformers does wherever it is installed, to explain a failure.

    Raises:
        ImportError: It does not import; the message says what to install.
    """
    try:
        importlib.import_module("torchaudio")
    except Exception as error:  # a torchaudio that does not fit torch raises OSError or RuntimeError, not ImportError
        raise ImportError(
            f"torchaudio does not import: {error}\n"
            "Most often the CPU build of torch stands beside the CUDA build of torchaudio, or their CUDA versions "
            "differ. Install a fitting pair from one source, for example: "
            "pip install torch==2.13.0 torchaudio==2.11.0"
        ) from error


class _Watcher(MetaPathFinder):
    """Lets the modules of transformers and of this package load as they do, and registers when none is half loaded."""

    def __init__(self) -> None:
        self.loading = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module where Python would."""
        watched = fullname.startswith(("transformers.", f"{PACKAGE}."))
        spec = PathFinder.find_spec(fullname, path) if watched else None
        if spec is None or spec.loader is None:
            return None
        if fullname in _OURS:
            require_torchaudio()
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.loading += 1
            try:
                execute(module)
            finally:
                self.loading -= 1
            if not self.loading:
                register_loaded()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def watch_imports() -> None:
    """Begins to watch, and registers what is called for already."""
    sys.meta_path.insert(0, _Watcher())
    register_loaded()
