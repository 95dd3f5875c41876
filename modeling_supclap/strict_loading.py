"""Loading a model whose weights are not in the checkpoint is an error here, and not a warning and random weights."""

from typing import Any


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
            ValueError: The checkpoint lacks weights of the model.
        """
        parent: Any = super()
        if kwargs.pop("output_loading_info", False):
            return parent.from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, report = parent.from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        # Without a name the caller brings a state_dict and a configuration, and asks for the rest to be drawn.
        if pretrained_model_name_or_path is not None and (missing := sorted(report["missing_keys"])):
            seen = sorted(report["unexpected_keys"])
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, among them "
                f"{missing[:3]}; it has {len(seen)} that the model has not{f', such as {seen[:3]}' if seen else ''}. "
                "Give a checkpoint of this model alone; other layouts are converted by recipes/convert_checkpoint.py"
            )
        return model
