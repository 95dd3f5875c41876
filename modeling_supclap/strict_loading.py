"""Strict loading: an error if the checkpoint lacks weights of the model, where transformers only warns.

Missing folders, adapters without a model and damaged weight files also raise errors that name the folder or file.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import transformers
from transformers.modeling_utils import load_state_dict

from .hub_ids import is_hub_id


@contextmanager
def naming_damaged_files(folder: Any) -> Iterator[None]:
    """Context that raises an OSError with the path if loading fails because of a damaged weight file.

    transformers only passes on the errors of safetensors and torch, which do not contain the path.

    Args:
        folder: Folder that the model is loaded from. A Hub id is not checked, because downloads are verified.

    Raises:
        OSError: A weight file in the folder cannot be read.
    """
    try:
        yield
    except Exception as error:
        for path in _weight_files(folder):
            if str(path) in str(error):
                raise
            try:
                if path.suffix == ".json":
                    json.loads(path.read_text(encoding="utf-8"))
                else:
                    load_state_dict(path, map_location="meta")
            except Exception as read_error:
                raise OSError(damaged(path, read_error)) from error
        raise


def damaged(path: Path, error: Exception) -> str:
    """Return the error message for a weight file that cannot be read.

    It quotes only the first sentence of `error`, because torch continues with advice to run code from the file.
    """
    cause = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
    return f"cannot read weights from {path} ({cause}); the file is damaged or incomplete, download it again"


def _check_source(name: Any) -> None:
    """Raise if a model cannot be loaded from `name`, where the errors of transformers do not name the cause.

    transformers reports a missing folder as an invalid Hub id. For a folder with a LoRA adapter and no model it loads
    the base model of the adapter, and fails if that is None. Before 5.18 it did not load the modules that the adapter
    saves in full (`modules_to_save`), such as the projections.

    Raises:
        OSError: There is no such folder, or a file in it is a pipe, from which reading would never end.
        ValueError: The folder contains a LoRA adapter without a model, and its base model is missing or this version
            of transformers would not load all of the adapter.
    """
    path = str(name)
    if name is not None and os.path.isdir(path):
        for file in Path(path).iterdir():
            if file.is_fifo():
                raise OSError(f"{file} is a named pipe; a model folder may contain regular files only")
    if name is None or os.path.isfile(os.path.join(path, "config.json")):
        return
    if not os.path.isdir(path) and not is_hub_id(path):
        raise OSError(f"folder {path} does not exist; pass a model folder or a Hub id such as name/model")

    adapter = Path(path, "adapter_config.json")
    if not adapter.is_file():
        return

    settings = json.loads(adapter.read_text(encoding="utf-8"))
    base, full_modules = settings.get("base_model_name_or_path"), settings.get("modules_to_save")
    advice = f"load the base model, then merge: PeftModel.from_pretrained(base, {path!r}).merge_and_unload()"
    if not base or not (os.path.isdir(base) or is_hub_id(base)):
        raise ValueError(
            f"{path} contains a LoRA adapter without a model, and its base model {base!r} does not exist; {advice}"
        )
    if full_modules and tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 18):
        raise ValueError(
            f"transformers {transformers.__version__} does not load {full_modules} of the adapter {path}; {advice}"
        )


def _weight_files(folder: Any) -> list[Path]:
    """Return the weight files and shard indices in a folder; safetensors are preferred, as in transformers."""
    if folder is None:
        return []
    return sorted(Path(folder).glob("*model*.safetensors*")) or sorted(Path(folder).glob("*model*.bin*"))


class StrictLoadingMixin:
    """Mixin with a `from_pretrained` that raises if the checkpoint lacks weights; a base before `PreTrainedModel`.

    transformers initialises missing weights at random and only warns. Its outputs would be meaningless for a checkpoint
    that stores the encoder under another prefix, such as `SonarTextModel` from a translation model or `CEDModel` from a
    `SupCLAPModel`. With `output_loading_info=True` missing weights raise no error, because the caller gets the report.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a model as in transformers, and raise if weights are missing.

        Raises:
            OSError: The folder or Hub id does not exist, or a weight file is damaged.
            ValueError: The checkpoint is of another model, is an adapter without a model, or lacks weights.
        """
        _check_source(pretrained_model_name_or_path)
        parent: Any = super()
        return_report = kwargs.pop("output_loading_info", False)
        with naming_damaged_files(pretrained_model_name_or_path):
            loaded = parent.from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)

        if return_report:
            return loaded

        model, report = loaded

        # Without a name, the caller passes a state_dict and a configuration; other weights are initialised on purpose.
        if pretrained_model_name_or_path is not None and (missing := sorted(report["missing_keys"])):
            unexpected = sorted(report["unexpected_keys"])
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, such as "
                f"{missing[:3]}, and has {len(unexpected)} unexpected weights"
                f"{f', such as {unexpected[:3]}' if unexpected else ''}; pass a checkpoint of {cls.__name__}, or "
                "convert other layouts with recipes/convert_checkpoint.py"
            )

        return model
