"""Datasets: one builder per dataset converts the published files to rows in the format of `schema.Row`.

>>> from modeling_supclap.datasets_scripts import load_splits
>>> splits = load_splits("synthetic", num_train=640, num_test=64)  # doctest: +SKIP
"""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["add_translations", "builder_names", "find_builder", "load_builder", "load_splits"]

# Module and class by name, so that only the requested builder is imported.
_BUILDERS = {
    "audio_folder": (".builders.audio_folder", "AudioFolder"),
    "audiocaps": (".builders.audiocaps", "AudioCaps"),
    "audioset": (".builders.audioset", "AudioSet"),
    "clotho": (".builders.clotho", "Clotho"),
    "esc50": (".builders.esc50", "ESC50"),
    "fsd50k": (".builders.fsd50k", "FSD50K"),
    "hf": (".builders.hf", "HubDataset"),
    "macs": (".builders.macs", "MACS"),
    "prepared": (".prepared", "Prepared"),
    "scenes": (".builders.scenes", "Scenes"),
    "synthetic": (".builders.synthetic", "SyntheticEvents"),
    "urbansound8k": (".builders.urbansound8k", "UrbanSound8K"),
    "vggsound": (".builders.vggsound", "VGGSound"),
    "wavcaps": (".builders.wavcaps", "WavCaps"),
}


def load_splits(
    name: str,
    cache_dir: str | None = None,
    translations: str | Sequence[str] | Mapping[str, Any] | None = None,
    streaming: bool = False,
    **config: Any,
) -> Any:
    """Prepare a dataset, or load it from the cache, and return all splits.

    Args:
        name: "audio_folder" (any folder of recordings with captions), "audiocaps", "audioset", "clotho", "esc50",
            "fsd50k", "hf", "macs", "prepared" (output of `prepare.py`), "scenes", "synthetic", "urbansound8k",
            "vggsound", "wavcaps" or "webdataset" (only with `streaming`).
        cache_dir: Cache folder for the rows. None: the default of `datasets`.
        translations: One or several Parquet files with translated captions to join, or a dict with the arguments of
            `join_translations`, such as `{"path": "fra.parquet", "strict": False}`.
        streaming: Whether to read rows on demand from a folder, the Hub or object storage. Supported for "prepared",
            "webdataset", and "hf" if the dataset consists of Parquet files.
        **config: Fields of the builder config, such as `data_dir`, or `num_train` for "scenes" and "synthetic". The
            module of each builder describes the expected files.

    Returns:
        `DatasetDict` with all splits. If `streaming` is set, `{split: RowStream}`. The rows have the fields of
        `schema.Row`.

    Raises:
        FileNotFoundError: The metadata or all audio files are missing.
        ValueError: The name or a config key is unknown (the message lists the valid ones), or the translations do not
            match the rows (see `join_translations`).
    """
    _check_config(name, config, "translations", "streaming")
    if not streaming:
        return add_translations(load_builder(name, cache_dir, **config).as_dataset(), translations)
    from .stream_sources import load_parquet, load_prepared, load_tars

    loaders = {"prepared": load_prepared, "hf": load_parquet, "webdataset": load_tars}
    if name not in loaders:
        raise ValueError(f"streaming supports {', '.join(loaders)}, not {name}; run prepare.py on {name} first")
    return add_translations(loaders[name](**config), translations)


def add_translations(splits: Any, translations: str | Sequence[str] | Mapping[str, Any] | None) -> Any:
    """Add the translated captions in `translations` (see `load_splits`) to all splits."""
    if translations is None:
        return splits

    from .translation.join import join_translations

    options = dict(translations) if isinstance(translations, Mapping) else {"path": translations}
    _check_known("option of translations", options, list(inspect.signature(join_translations).parameters)[1:])
    return join_translations(splits, **options)


def load_builder(name: str, cache_dir: str | None = None, **config: Any) -> Any:
    """Create the builder of a dataset and prepare its rows. The arguments and errors are the same as in `load_splits`.

    Its method `report` returns the excluded clips: `{"missing": [recording, ...], "left_out": {reason: [clip id]}}`.
    """
    from datasets.exceptions import DatasetGenerationError

    _check_config(name, config)
    builder = find_builder(name)(cache_dir=cache_dir, **config)
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:  # which does not name the file
        raise (error.__cause__ or error) from None
    return builder


def builder_names() -> list[str]:
    """Return the dataset names that `load_splits` accepts if `streaming` is not set."""
    return sorted(_BUILDERS)


def find_config(name: str) -> Any:
    """Return the config class of a dataset; its fields are the dataset's options."""
    if name != "webdataset":
        return find_builder(name).BUILDER_CONFIG_CLASS
    from .stream_sources import TarConfig

    return TarConfig


def find_builder(name: str) -> Any:
    """Return the builder class of a dataset."""
    if name == "webdataset":
        raise ValueError("webdataset supports only streaming=True (in training: --streaming true)")
    _check_known("dataset", [name], _BUILDERS)
    module, class_name = _BUILDERS[name]
    return getattr(importlib.import_module(module, __name__), class_name)


def _check_config(name: str, config: Mapping[str, Any], *more: str) -> None:
    _check_known(f"config key of {name!r}", config, {*config_keys(find_config(name)), *more})


def config_keys(config_class: type) -> set[str]:
    """Return the field names of a builder config, except the fields inherited from `datasets.BuilderConfig`."""
    from datasets import BuilderConfig

    declared: set[str] = set()
    for base in config_class.__mro__:
        if not issubclass(BuilderConfig, base):
            declared |= inspect.get_annotations(base).keys()
    return {field.name for field in dataclasses.fields(config_class)} & declared


def _check_known(what: str, given: Iterable[str], valid: Iterable[str]) -> None:
    valid = sorted(valid)
    for key in given:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown {what}: {key!r}{hint}; valid: {', '.join(valid)}")
