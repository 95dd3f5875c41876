"""Errors of loading, and a mixin: `from_pretrained` raises if weights are missing, while transformers only warns."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import transformers
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file, is_protobuf_available

from .hub_ids import is_hub_id


def find_file(name: Any, file: str) -> str | None:
    """Return the local path of a file in a folder or Hub repository, downloaded if needed; None if there is none."""
    try:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None


def weights_version(model: Any) -> int:
    """Return a number that grows with each change of the weights in place, such as an optimizer step."""
    return sum(parameter._version for parameter in model.parameters())


@contextmanager
def naming_damaged_files(folder: Any) -> Iterator[None]:
    """Context manager that raises OSError with the path of a damaged weight file, because other errors do not name it.

    Only local folders are checked, because the Hub client verifies its downloads.
    """
    try:
        yield
    except Exception as error:
        parent = Path(os.devnull if folder is None else folder)
        tensors = [*sorted(parent.glob("*model*.safetensors*")), *sorted(parent.parent.glob("_frozen-*.safetensors"))]
        for path in tensors or sorted(parent.glob("*model*.bin*")):
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
    """Return an error message for a weight file, with the first sentence of `error`.

    Later sentences of torch's error are omitted, because they advise an unsafe way of loading (`weights_only=False`).
    """
    cause = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
    return f"cannot read weights from {path} ({cause}); the file is damaged or incomplete, download it again"


@contextmanager
def naming_open_clip(name: Any) -> Iterator[None]:
    """Context manager that names the function to call if the folder or repository is in OpenCLIP's format only."""
    try:
        yield
    except (OSError, ValueError) as error:
        if name is None or find_file(name, "open_clip_config.json") is None:
            raise
        config = find_file(name, "config.json")
        if config is not None and '"supclap"' in Path(config).read_text(encoding="utf-8"):
            raise
        raise ValueError(
            f"{name} is in OpenCLIP's format; load an audio model with modeling_supclap.conversion.load_model, or "
            f"convert it with `supclap convert {name} --out FOLDER` and pass the folder"
        ) from error


def missing_protobuf() -> str:
    """Return an installation hint if protobuf is missing, else ""."""
    if is_protobuf_available():
        return ""
    return "\nprotobuf is not installed; sentencepiece files require it: pip install protobuf"


def _check_source(name: Any) -> None:
    """Raise an error for a source that transformers would load wrongly or with a misleading error."""
    path = str(name)
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
        raise ValueError(f"{path} is a LoRA adapter, and its base model {base!r} does not exist; {advice}")
    version = transformers.__version__
    if full_modules and tuple(int(part) for part in version.split(".")[:2]) < (5, 18):
        raise ValueError(f"transformers {version} does not load {full_modules} of the adapter {path}; {advice}")


def apply_umask(folder: str | os.PathLike[str]) -> None:
    """Apply the umask to all safetensors files in a folder, because safetensors lets only the owner read them."""
    umask = os.umask(0)
    os.umask(umask)
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(0o666 & ~umask)


class StrictLoadingMixin:
    """Mixin for models: `from_pretrained` raises ValueError if weights are missing. List it before `PreTrainedModel`.

    transformers initialises missing weights at random and only warns, for example when `SonarTextModel` loads a
    translation model. With `output_loading_info=True` there is no error, because the report lists the missing weights.

    Attributes:
        loaded_version: `weights_version` after loading, or None.
        trained_in: Name of the output folder of the trainer, or None.
    """

    loaded_version: int | None = None
    trained_in: str | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a model as in transformers, and raise if weights are missing.

        Raises:
            OSError: The folder or Hub id does not exist, or a weight file is damaged.
            ValueError: The checkpoint contains a different model or only an adapter, or weights are missing.
        """
        _check_source(pretrained_model_name_or_path)
        options = {**kwargs, "output_loading_info": True}
        name = pretrained_model_name_or_path
        with naming_open_clip(name), naming_damaged_files(name):
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **options)  # type: ignore[misc]
        if kwargs.get("output_loading_info"):
            return loaded
        model, report = loaded
        # Without a name, the caller passes a state_dict and a configuration; other weights are initialised on purpose.
        if pretrained_model_name_or_path is not None and (missing := sorted(report["missing_keys"])):
            unexpected = sorted(report["unexpected_keys"])
            if adapters := [name for name in unexpected if ".base_layer." in name or ".modules_to_save." in name]:
                raise ValueError(
                    f"{pretrained_model_name_or_path} is a checkpoint of a run with adapters, such as {adapters[0]}; "
                    f"merge them into a plain model with `supclap convert {pretrained_model_name_or_path} --out FOLDER`"
                )
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, such as "
                f"{missing[:3]}, and has {len(unexpected)} others {unexpected[:3]}; pass a checkpoint of "
                f"{cls.__name__}, or convert other layouts with recipes/convert_checkpoint.py"
            )
        model.loaded_version = weights_version(model)
        return model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save a model as in transformers, with the permissions that the umask sets for new files."""
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        apply_umask(save_directory)
