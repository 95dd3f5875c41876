"""transformers' zero-shot pipeline with clips of different lengths in one batch."""

from typing import Any

import torch
from transformers import ZeroShotAudioClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .audio_encoder import extract_clips
from .audio_input import as_recordings

TASK = "zero-shot-audio-classification"


class ClipPipeline(ZeroShotAudioClassificationPipeline):
    """`pipeline("zero-shot-audio-classification", ...)` with the same results, for every audio tower.

    transformers pads the clips of a batch along their second axis, which is the mel axis of CED's spectrograms, so
    clips of different lengths cannot share a batch. Here the second axis holds the frames until the model is called.
    The inputs of other audio encoders get the names and the mask that `SupCLAPModel` takes. Inputs of CLAP are not
    changed.
    """

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model inputs of one recording and its candidate labels."""
        extractor: Any = self.feature_extractor
        names = extractor.model_input_names
        (recording,), _ = as_recordings(args[0], extractor.sampling_rate)
        clip = recording.read(extractor.sampling_rate)
        inputs = super().preprocess(clip, *args[1:], **kwargs)

        if not {"audio_attention_mask", "is_longer"} & set(names):
            for name in names:
                inputs.pop(name, None)
            for name, value in extract_clips(extractor, [clip]).items():
                inputs[name] = torch.from_numpy(value)
        return self._swap_axes(inputs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward(self._swap_axes(args[0]), *args[1:], **kwargs)

    def _swap_axes(self, inputs: Any) -> Any:
        """CED's (B, mels, T) to (B, T, mels), or back."""
        extractor: Any = self.feature_extractor
        if "audio_attention_mask" in extractor.model_input_names:
            inputs["input_features"] = inputs["input_features"].transpose(1, 2)
        return inputs


# A saved folder names the class in its configuration instead: `SupCLAPConfig.custom_pipelines`.
if not __name__.startswith("transformers_modules."):
    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline
