"""Zero-shot audio classification pipeline that supports batches with clips of different lengths."""

from typing import Any

import torch
from transformers import ZeroShotAudioClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .audio_input import as_recordings
from .processing_supclap import extract_clips

TASK = "zero-shot-audio-classification"


class ClipPipeline(ZeroShotAudioClassificationPipeline):
    """Zero-shot audio classification pipeline for `SupCLAPModel` with any audio tower.

    transformers pads the clips in a batch along the second axis, which is the mel axis of CED spectrograms. Therefore
    the mel and time axes are swapped before batching, and swapped back before the model is called. For other audio
    encoders, except CLAP, the inputs are computed as in `SupCLAPProcessor`.
    """

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model inputs for one recording and its candidate labels."""
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
        """Swap (B, mels, T) and (B, T, mels) for CED. Return other inputs unchanged."""
        extractor: Any = self.feature_extractor
        if "audio_attention_mask" in extractor.model_input_names:
            inputs["input_features"] = inputs["input_features"].transpose(1, 2)
        return inputs


# Code in a saved model folder uses `SupCLAPConfig.custom_pipelines` instead.
if not __name__.startswith("transformers_modules."):
    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline
