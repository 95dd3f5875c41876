"""Register the classes of this package with the transformers auto classes."""

from typing import Any


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
