"""Embed with any model in the format of sentence-transformers that takes audio and text.

They are, for example, EmbeddingGemma 2, e5-omni, omni-embed-nemotron and VoiceCLAP-large. The class has the interface
of a custom model in `evaluation.models`; evaluation, search and embed use it. This package does not train these models.
They require the extra `sentence-transformers`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download

from ..encoding import max_chunk_seconds
from .fingerprints import weights_fingerprint

CHUNK_SECONDS = 30.0
"""Maximum chunk length in seconds. EmbeddingGemma 2 cuts longer recordings without a message."""
MIN_SECONDS = 0.05
"""Minimum recording length in seconds, because the encoders fail for less than one or two frames."""
# Files of a model that can change its embeddings, beside the weights.
_SETTINGS = {".json", ".txt", ".model", ".jinja", ".py"}


class SentenceEmbedder:
    """Model in the format of sentence-transformers, with audio and text.

    Texts are embedded by `encode_query` and recordings by `encode_document`, which use the model's own prompts "query"
    and "document" if it has them. Models with a chat template also use the prompt with recordings.

    Args:
        name: Folder or Hub id.
        device: Torch device. None: use a GPU if there is one.
        trust_remote_code: Whether to run code from the folder or repository.
        text_prompt: Prompt for texts, instead of the model's own.
        audio_prompt: Prompt for recordings, instead of the model's own.

    Raises:
        ImportError: sentence-transformers or a library that the model requires is not installed.
        ValueError: The model does not take audio and text, has no sampling rate, takes no prompt with recordings, or
            requires code from its repository.
    """

    min_seconds = MIN_SECONDS

    def __init__(
        self,
        name: str,
        device: Any = None,
        trust_remote_code: bool = False,
        text_prompt: str | None = None,
        audio_prompt: str | None = None,
    ) -> None:
        self.model = _load_sentence_model(name, None if device is None else str(device), trust_remote_code)
        modalities = self.model.modalities
        if missing := {"audio", "text"}.difference(modalities):
            kinds = ", ".join(str(modality) for modality in modalities)
            raise ValueError(f"{name} embeds {kinds}, not {missing.pop()}; pass a model for audio and text")
        if audio_prompt and "message" not in modalities:
            raise ValueError(f"{name} has no chat template, so it takes no prompt with recordings")
        if self.model.similarity_fn_name != "cosine" and type(self.model[-1]).__name__ != "Normalize":
            warnings.warn(
                f"{name} was made for {self.model.similarity_fn_name} similarity of embeddings of any length; here "
                "they have unit norm and are compared by cosine",
                stacklevel=2,
            )

        self.model.register_forward_pre_hook(_without_fusion)
        self.text_prompt, self.audio_prompt = text_prompt, audio_prompt
        self.sampling_rate, self.chunk_seconds = _audio_limits(self.model, name)
        self.device, self.dtype = self.model.device, self.model.dtype
        self.fingerprint = weights_fingerprint(self.model, str([text_prompt, audio_prompt]), *_read_settings(name))

    def encode_audio(self, waveforms: Sequence[np.ndarray], sampling_rate: int, batch_size: int = 32) -> np.ndarray:
        """Embed waveforms (samples,), (N, d) with unit norm."""
        clips = []
        for waveform in waveforms:
            clips.append({"array": waveform, "sampling_rate": sampling_rate})
        lengths = [len(waveform) for waveform in waveforms]
        options = {"prompt": self.audio_prompt, "batch_size": batch_size}
        return self._encode(self.model.encode_document, clips, lengths, options)

    def encode_text(self, texts: Sequence[str], language: str | None = None, batch_size: int = 32) -> np.ndarray:
        """Embed texts, (N, d) with unit norm. Only models with a language option use `language` (ISO 639-3)."""
        from sentence_transformers.base.modality import infer_modality

        inputs: list[Any] = []
        for text in texts:
            # sentence-transformers would load a text that is the address of a recording or an image
            is_plain = infer_modality(text, self.model.modalities) == "text"
            inputs.append(text if is_plain else {"text": text})
        lengths = [self._num_tokens(text) for text in inputs]
        options: dict[str, Any] = {"prompt": self.text_prompt, "batch_size": batch_size}
        if "language" in self.model.get_model_kwargs():
            options["language"] = language
        return self._encode(self.model.encode_query, inputs, lengths, options)

    def _encode(
        self, encode: Callable[..., Any], inputs: list[Any], lengths: list[int], options: dict[str, Any]
    ) -> np.ndarray:
        """Embed inputs in batches of one length, because padding changes the embeddings of some models."""
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            groups.setdefault(length, []).append(index)

        embeds: list[Any] = [None] * len(inputs)
        for indices in groups.values():
            batch = [inputs[index] for index in indices]
            encoded = encode(batch, normalize_embeddings=True, show_progress_bar=False, **options)
            for index, embed in zip(indices, encoded, strict=True):
                embeds[index] = embed
        return np.stack(embeds)

    def _num_tokens(self, text: str | dict[str, str]) -> int:
        """Return the number of tokens of a text, or 0 if the model has no tokens."""
        tokens = self.model.preprocess([text], task="query").get("input_ids")
        return 0 if tokens is None else int(tokens.shape[-1])


def _read_settings(name: str) -> list[str]:
    """Return the texts of all files of a model that can change its embeddings, equal for a copy of the model."""
    folder = Path(name if os.path.isdir(name) else snapshot_download(name, local_files_only=True))
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _SETTINGS and path.is_file())
    return [f"{path.relative_to(folder)} {path.read_text(encoding='utf-8', errors='replace')}" for path in paths]


def _load_sentence_model(name: str, device: str | None, trust_remote_code: bool) -> Any:
    """Load a `SentenceTransformer`. Raise ImportError, in one sentence, if a library is missing."""
    try:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(name, device=device, trust_remote_code=trust_remote_code)
    except (ImportError, NameError) as error:  # transformers raises NameError, about "tvF", without torchvision
        cause = str(error).strip().splitlines()[0].split(". ")[0]
        raise ImportError(
            f'{name} requires a library that is not installed ({cause}): pip install "supclap[sentence-transformers]" '
            "torchvision"
        ) from error


def _without_fusion(model: torch.nn.Module, args: tuple[dict[str, Any], ...]) -> None:
    """Mark no clip as longer than 10 s, because transformers marks a random one for a fused CLAP."""
    if "is_longer" in args[0]:
        args[0]["is_longer"] = torch.zeros_like(args[0]["is_longer"])


def _audio_limits(model: Any, name: str) -> tuple[int, float]:
    """Return the sampling rate in hertz of a model of sentence-transformers, and the chunk length in seconds.

    The rate is an attribute of a processor, or of a module with code of its own. A model can have several encoders.
    """
    _, *modules = model.modules()
    for module in modules:
        processor = getattr(module, "processor", None)
        readers = [getattr(processor, name, None) for name in ("feature_extractor", "audio_processor")]
        for part in (processor, *readers, module):
            rate = getattr(part, "sampling_rate", None)
            if rate is None:
                continue
            limits = [CHUNK_SECONDS, max_chunk_seconds(part)]
            options = getattr(module, "processing_kwargs", None) or {}
            if samples := options.get("audio", {}).get("max_length"):
                limits.append(samples / rate)
            return int(rate), min(filter(None, limits))
    raise ValueError(
        f"{name} does not state its sampling rate; pass --model module:function with a function that returns an "
        "object with sampling_rate, encode_audio and encode_text"
    )
