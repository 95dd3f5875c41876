"""Loading a model whose weights are not in the checkpoint is an error here, and not a warning and random weights.

And where a file of weights cannot be read, the error names it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.modeling_utils import load_state_dict


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

    Args:
        path: The file.
        error: What went wrong; its first sentence is quoted, since torch goes on to advise running code of the file.
    """
    cause = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
    return f"{path} is damaged or holds no weights (an incomplete download?); get it again: {cause}"


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
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with every weight found.

        Args:
            pretrained_model_name_or_path: Hub id or folder.
            *args: As in transformers.
            **kwargs: As in transformers.

        Raises:
            OSError: A file of weights is damaged.
            ValueError: The checkpoint lacks weights of the model.
        """
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
