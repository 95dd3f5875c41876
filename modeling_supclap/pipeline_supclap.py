"""Zero-shot audio classification pipeline for clips of different lengths in one batch."""

from typing import Any

import torch
from transformers import ZeroShotAudioClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .audio_encoder import extract_clips
from .audio_input import as_recordings

TASK = "zero-shot-audio-classification"


class ClipPipeline(ZeroShotAudioClassificationPipeline):
    """`pipeline("zero-shot-audio-classification", ...)` with the same results, for every audio tower.

    transformers pads the clips of a batch along the second axis. In CED spectrograms that is the mel axis, so clips of
    different lengths could not share a batch. Here the second axis is time until the model is called. Inputs of other
    audio encoders get the names and the mask of `SupCLAPModel`. Inputs of CLAP are not changed.
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
        """Swap (B, mels, T) and (B, T, mels) for CED; return other inputs unchanged."""
        extractor: Any = self.feature_extractor
        if "audio_attention_mask" in extractor.model_input_names:
            inputs["input_features"] = inputs["input_features"].transpose(1, 2)
        return inputs


# The configuration of a saved folder contains the class instead: `SupCLAPConfig.custom_pipelines`.
if not __name__.startswith("transformers_modules."):
    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline
