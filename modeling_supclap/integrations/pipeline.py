"""transformers' zero-shot pipeline with clips of unequal length in one batch."""

from __future__ import annotations

from typing import Any

from transformers import ZeroShotAudioClassificationPipeline

TASK = "zero-shot-audio-classification"


class ClipPipeline(ZeroShotAudioClassificationPipeline):
    """`pipeline("zero-shot-audio-classification", ...)` as it is, for CED as well.

    The original pads the clips of a batch along their second axis, which holds the mel bands of CED's spectrograms:
    with `batch_size=2` clips of unequal length do not fit together. Here that axis holds the frames until the model is
    called. What has no `audio_attention_mask`, as CLAP's spectrograms of one length, is left as it is.
    """

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """One recording and its candidate labels to model inputs, the spectrogram as (1, T, mels)."""
        return _exchange_axes(super().preprocess(*args, **kwargs))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward(_exchange_axes(args[0]), *args[1:], **kwargs)


def _exchange_axes(inputs: Any) -> Any:
    if "audio_attention_mask" in inputs:
        # (B, mels, T) -> (B, T, mels), or back
        inputs["input_features"] = inputs["input_features"].transpose(1, 2)
    return inputs
