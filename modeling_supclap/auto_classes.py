"""Register the classes of this package with the transformers auto classes."""

from typing import Any


def register(auto_class: Any, config: type, our_class: type) -> None:
    """Register a class with an auto class such as `AutoModel`, which then loads it by `model_type`.

    A saved model then contains the code of the class, and loads with `trust_remote_code=True` without this package.
    Code loaded from such a folder is not registered, because it would be used for all models of this type. The folder
    of another model may contain another version of the code.
    """
    our_class.register_for_auto_class(auto_class.__name__)  # type: ignore[attr-defined]
    if not our_class.__module__.startswith("transformers_modules."):
        auto_class.register(config, our_class)
