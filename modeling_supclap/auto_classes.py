"""Registration of our classes with the auto classes of transformers."""

from typing import Any


def register(auto_class: Any, config: type, own: type) -> None:
    """Register a class with an auto class, so that `from_pretrained` finds it by the type of the model.

    A saved folder then carries the code of the class and loads where this package is missing
    (`trust_remote_code=True`). Code that was loaded from such a folder is not registered, because a class is registered
    for all folders of this type and another folder may hold another version.

    Args:
        auto_class: `AutoModel`, `AutoFeatureExtractor` or `AutoProcessor`.
        config: The configuration class of the model.
        own: The class to find.
    """
    own.register_for_auto_class(auto_class.__name__)  # type: ignore[attr-defined]
    if not own.__module__.startswith("transformers_modules."):
        auto_class.register(config, own)
