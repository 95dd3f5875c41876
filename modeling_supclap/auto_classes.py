"""Register the classes of this package with the transformers auto classes, and check the version of transformers.

The entry points of a saved folder import this module before any name that older versions lack.
"""

from typing import Any

import transformers

MIN_TRANSFORMERS = "5.17"
"""Oldest version of transformers that the code of a saved model supports."""

if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, MIN_TRANSFORMERS.split("."))):
    raise ImportError(
        f"this model needs transformers {MIN_TRANSFORMERS} or later, and {transformers.__version__} is installed: "
        f'pip install "transformers>={MIN_TRANSFORMERS}"'
    )


def register(auto_class: Any, key: type | str, our_class: type) -> None:
    """Register a class with an auto class such as `AutoModel`, so that the auto class loads it by `model_type`.

    The key is a configuration class, or for `AutoConfig` the `model_type`.

    Saved model folders then contain a copy of the code. If this package is not installed, they load with
    `trust_remote_code=True`. A class imported from such a copy is not registered, because another model folder may
    contain a different version of the code.
    """
    our_class.register_for_auto_class(auto_class.__name__)  # type: ignore[attr-defined]
    if not our_class.__module__.startswith("transformers_modules."):
        auto_class.register(key, our_class)
