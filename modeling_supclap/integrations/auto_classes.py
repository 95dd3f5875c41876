"""Enters our classes into transformers' auto classes once either is loaded.

`import modeling_supclap` loads neither torch nor a class of transformers, which takes seconds. Yet after it
`AutoModel.from_pretrained` knows our models: the import system tells us when the module of an auto class, or one of
ours, has been loaded, and what belongs together is registered then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = __package__.rpartition(".")[0]
# A model of ours in each row, its classes by the auto class of transformers that is to find them.
MODELS = (
    {"AutoConfig": "CEDConfig", "AutoModel": "CEDModel", "AutoFeatureExtractor": "CEDFeatureExtractor"},
    {"AutoConfig": "CNN14Config", "AutoModel": "CNN14Model", "AutoFeatureExtractor": "MSCLAPFeatureExtractor"},
    {
        "AutoConfig": "SupCLAPConfig",
        "AutoModel": "SupCLAPModel",
        "AutoFeatureExtractor": "CEDFeatureExtractor",
        "AutoProcessor": "SupCLAPProcessor",
    },
)
AUTO_MODULES = {
    "AutoConfig": "transformers.models.auto.configuration_auto",
    "AutoModel": "transformers.models.auto.modeling_auto",
    "AutoFeatureExtractor": "transformers.models.auto.feature_extraction_auto",
    "AutoProcessor": "transformers.models.auto.processing_auto",
}

_due: dict[Callable[[], None], set[str]] = {}
"""What is not registered yet, and the modules that call for it."""


def _register(auto_name: str) -> None:
    """Enters our classes into one auto class."""
    auto: Any = getattr(importlib.import_module(AUTO_MODULES[auto_name]), auto_name)
    ours = importlib.import_module(PACKAGE)
    for row in MODELS:
        if auto_name not in row:
            continue
        config, own = getattr(ours, row["AutoConfig"]), getattr(ours, row[auto_name])
        if auto_name == "AutoConfig":
            auto.register(config.model_type, _native(config) if config.model_type == "ced" else config)
        else:
            auto.register(config, own)
        # A saved folder then carries the code and loads where this package is not installed (trust_remote_code=True).
        own.register_for_auto_class(auto_name)


def _native(config: Any) -> Any:
    """`CEDConfig` for `AutoConfig`, under a module's name of transformers.

    A registered class of any other module wins over the code that a folder brings, even with `trust_remote_code=True`:
    the official tagger (`AutoModelForAudioClassification` on "mispeech/ced-base") could not be loaded beside ours.
    """

    class NativeCED:
        __module__ = "transformers.models.ced"
        model_type = config.model_type
        from_dict = config.from_dict

        def __new__(cls, **fields: Any) -> Any:
            return config(**fields)

    return NativeCED


def _register_pipeline() -> None:
    from transformers.pipelines import PIPELINE_REGISTRY

    from .pipeline import TASK, ClipPipeline

    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline


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

    def __init__(self, ours: set[str]) -> None:
        self.ours = ours
        self.loading = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module where Python would."""
        watched = fullname.startswith(("transformers.", f"{PACKAGE}."))
        spec = PathFinder.find_spec(fullname, path) if watched else None
        if spec is None or spec.loader is None:
            return None
        if fullname in self.ours:
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


def watch_imports(modules: Mapping[str, str]) -> None:
    """Begins to watch, and registers what is called for already.

    Args:
        modules: Our modules by the classes that are in them.
    """
    ours: set[str] = set()
    for auto_name, auto_module in AUTO_MODULES.items():
        own = {f"{PACKAGE}.{modules[row[auto_name]]}" for row in MODELS if auto_name in row}
        _due[partial(_register, auto_name)] = {auto_module, *own}
        ours |= own
    _due[_register_pipeline] = {"transformers.pipelines"}

    sys.meta_path.insert(0, _Watcher(ours))
    register_loaded()
