"""Raw files to rows: one builder a dataset, each giving the row of `schema.py`.

>>> from datasets_scripts import load_splits
>>> splits = load_splits("synthetic", num_train=640, num_test=64)  # doctest: +SKIP
"""

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import DatasetDict

# Module and class by name, so that only the builder that is asked for gets imported.
_BUILDERS = {
    "esc50": ("datasets_scripts.esc50", "ESC50"),
    "synthetic": ("datasets_scripts.synthetic", "SyntheticEvents"),
}


def load_splits(name: str, cache_dir: str | None = None, **config: Any) -> "DatasetDict":
    """Prepares a dataset, or takes it from the cache, and gives all its splits.

    Args:
        name: "esc50" or "synthetic".
        cache_dir: Where `datasets` keeps prepared rows; its own default when None.
        **config: Fields of the builder's config, such as `data_dir` (esc50) or `num_train` (synthetic).

    Returns:
        Splits by name, each a dataset of rows as `schema.py` has them.

    Raises:
        ValueError: The name or a config key is unknown; the message names the valid ones.
    """
    _check_known("dataset", [name], _BUILDERS)
    module, class_name = _BUILDERS[name]
    builder_class = getattr(importlib.import_module(module), class_name)
    _check_known(f"config key of {name!r}", config, builder_class.BUILDER_CONFIG_CLASS.__annotations__)
    builder = builder_class(cache_dir=cache_dir, **config)
    builder.download_and_prepare()
    return builder.as_dataset()


def _check_known(what: str, given: Iterable[str], valid: Iterable[str]) -> None:
    valid = sorted(valid)
    for key in given:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown {what}: {key!r}{hint}; valid: {', '.join(valid)}")
