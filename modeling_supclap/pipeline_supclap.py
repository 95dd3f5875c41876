"""transformers' zero-shot pipeline with clips of different lengths in one batch."""

from typing import Any

from transformers import ZeroShotAudioClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

TASK = "zero-shot-audio-classification"


class ClipPipeline(ZeroShotAudioClassificationPipeline):
    """`pipeline("zero-shot-audio-classification", ...)` with the same results, for CED as well.

    transformers pads the clips of a batch along their second axis, which is the mel axis of CED's spectrograms, so
    clips of different lengths cannot share a batch. Here the second axis holds the frames until the model is called.
    Inputs without an `audio_attention_mask`, such as CLAP's spectrograms of one length, are not changed.
    """

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model inputs of one recording and its candidate labels, the spectrogram as (1, T, mels)."""
        return _swap_axes(super().preprocess(*args, **kwargs))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward(_swap_axes(args[0]), *args[1:], **kwargs)


def _swap_axes(inputs: Any) -> Any:
    if "audio_attention_mask" in inputs:
        # (B, mels, T) -> (B, T, mels), or back
        inputs["input_features"] = inputs["input_features"].transpose(1, 2)
    return inputs


# A saved folder names the class in its configuration instead: `SupCLAPConfig.custom_pipelines`.
if not __name__.startswith("transformers_modules."):
    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline
