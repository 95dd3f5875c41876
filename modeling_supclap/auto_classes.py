"""Registration of our classes with the auto classes of transformers."""

from typing import Any


def register(auto_class: Any, config: type, our_class: type) -> None:
    """Register a class with an auto class, so that `from_pretrained` finds it by the type of the model.

    A saved folder then contains the code of the class and loads without this package, with `trust_remote_code=True`.
    Code loaded from such a folder is not registered: the class would serve all folders of this type, and another folder
    may contain another version.

    Args:
        auto_class: `AutoModel`, `AutoFeatureExtractor` or `AutoProcessor`.
        config: Configuration class of the model.
        our_class: Class to register.
    """
    our_class.register_for_auto_class(auto_class.__name__)  # type: ignore[attr-defined]
    if not our_class.__module__.startswith("transformers_modules."):
        auto_class.register(config, our_class)
