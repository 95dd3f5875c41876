"""Loading a model whose weights are not in the checkpoint is an error here, and not a warning and random weights.

And where there is no model, or a file of weights cannot be read, the error says so.
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
    """Within it, what goes wrong over a damaged file of weights is an error that names the file.

    transformers passes on what safetensors or torch says of it, which is not where it lies.

    Args:
        folder: Where a model is loaded from; of a Hub id nothing is said, since downloads are checked.

    Raises:
        OSError: A file of weights in the folder cannot be read.
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
            except Exception as damage:
                raise OSError(damaged(path, damage)) from error
        raise


def damaged(path: Path, error: Exception) -> str:
    """What to say of a file of weights that cannot be read.

    Only the first sentence of the error is quoted, since torch goes on to advise running code of the file.
    """
    cause = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
    return f"{path} is damaged or holds no weights (an incomplete download?); get it again: {cause}"


def _check_source(name: Any) -> None:
    """Explains sources of a model that transformers fails on without a word of what they are.

    A path that is no folder is taken for a Hub id of a wrong form; and a folder that holds a LoRA adapter and no model
    is replaced by the adapter's base model, which may be called None. Before 5.18 transformers also left the modules
    that an adapter holds whole, such as the projections, as they were.
    """
    path = str(name)
    if name is None or os.path.isfile(os.path.join(path, "config.json")):
        return
    if not os.path.isdir(path) and not is_hub_id(path):
        raise OSError(f"there is no folder {path}; give a model's folder or a Hub id such as name/model")

    adapter = Path(path, "adapter_config.json")
    if not adapter.is_file():
        return

    settings = json.loads(adapter.read_text(encoding="utf-8"))
    base, whole = settings.get("base_model_name_or_path"), settings.get("modules_to_save")
    advice = (
        f"Load the base model, then PeftModel.from_pretrained(base, {path!r}).merge_and_unload() is the whole model"
    )
    if not base or not (os.path.isdir(base) or is_hub_id(base)):
        raise ValueError(
            f"{path} holds a LoRA adapter and no model, and names {base!r} as its base model, which is not there. "
            f"{advice}"
        )
    if whole and tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 18):
        raise ValueError(
            f"transformers {transformers.__version__} does not load {whole} of the adapter {path}. {advice}"
        )


def _weight_files(folder: Any) -> list[Path]:
    """The files that transformers would read: safetensors if there are any, with the index of several."""
    if folder is None:
        return []
    return sorted(Path(folder).glob("*model*.safetensors*")) or sorted(Path(folder).glob("*model*.bin*"))


class StrictLoadingMixin:
    """Makes `from_pretrained` refuse a checkpoint that lacks weights of the model; stands before `PreTrainedModel`.

    transformers draws such weights at random and only warns, so that an encoder loaded from a checkpoint in which it
    stands under another prefix (`SonarTextModel` from a translation model, `CEDModel` from a whole `SupCLAPModel`)
    runs and means nothing. With `output_loading_info=True` nothing is refused: the caller reads the report.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """As in transformers, with every weight found, and clear errors where there is no such model.

        Raises:
            OSError: There is no such folder or id, or a file of weights is damaged.
            ValueError: The checkpoint is of another model, an adapter alone, or lacks weights of the model.
        """
        _check_source(pretrained_model_name_or_path)
        parent: Any = super()
        asked = kwargs.pop("output_loading_info", False)
        with naming_damaged_files(pretrained_model_name_or_path):
            loaded = parent.from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)

        if asked:
            return loaded

        model, report = loaded

        # Without a name the caller brings a state_dict and a configuration, and asks for the rest to be drawn.
        if pretrained_model_name_or_path is not None and (missing := sorted(report["missing_keys"])):
            seen = sorted(report["unexpected_keys"])
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, among them "
                f"{missing[:3]}; it has {len(seen)} that the model has not{f', such as {seen[:3]}' if seen else ''}. "
                "Give a checkpoint of this model alone; other layouts are converted by recipes/convert_checkpoint.py"
            )

        return model
