"""Embed recordings and texts with models that this package does not convert: evaluation, search and embed use them.

- `SentenceEmbedder`: any model in the format of sentence-transformers that takes audio and text, such as
  EmbeddingGemma 2, e5-omni, omni-embed-nemotron or VoiceCLAP-large. It requires the extra `sentence-transformers`.
- `PeAudioEmbedder`: the audio and text towers of PE-AV.

Both have the interface of a custom model in `evaluation.models`. They are not trained by this package.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, PeAudioModel, PreTrainedModel

from ..encoding import max_chunk_seconds
from ..strict_loading import StrictLoadingMixin
from .fingerprints import settings_text, tokenizer_text, weights_fingerprint

CHUNK_SECONDS = 30.0
"""Maximum chunk length in seconds. EmbeddingGemma 2 cuts longer recordings without a message."""
MIN_SECONDS = 0.05
"""Minimum recording length in seconds, because the encoders fail for less than one or two frames."""


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
        self.fingerprint = weights_fingerprint(self.model, *self._settings())

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

    def _settings(self) -> list[str]:
        """Return all settings besides the weights that affect the embeddings, equal for a copy of the model."""
        prompts = [self.model.prompts, self.model.default_prompt_name, self.text_prompt, self.audio_prompt]
        settings = [str([*prompts, self.model.truncate_dim])]
        for module in self.model.modules():
            if hasattr(module, "get_config_dict"):
                settings.append(f"{type(module).__name__} {module.get_config_dict()}")
            if isinstance(module, PreTrainedModel):
                settings.append(settings_text(module.config.to_dict()))
            if type(module).__module__.startswith("transformers_modules."):
                settings.append(inspect.getsource(sys.modules[type(module).__module__]))
            for part in _processors(module):
                settings.append(settings_text(getattr(part, "chat_template", None)))
                if hasattr(part, "get_vocab"):
                    settings += [tokenizer_text(part), str(part.model_max_length)]
                else:
                    settings.append(settings_text(part.to_dict()))
        return settings


def _load_sentence_model(name: str, device: str | None, trust_remote_code: bool) -> Any:
    """Load a `SentenceTransformer` in evaluation mode, with errors of one sentence."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f'{name} requires sentence-transformers: pip install "supclap[sentence-transformers]"'
        ) from error
    try:
        return SentenceTransformer(name, device=device, trust_remote_code=trust_remote_code).eval()
    except (ImportError, NameError) as error:  # transformers raises NameError without torchvision
        cause = str(error).strip().splitlines()[0].split(". ")[0]
        missing = "torchvision" if "tvf" in cause.lower() or "torchvision" in cause.lower() else "it"
        raise ImportError(
            f"{name} requires a library that is not installed ({cause}); install {missing} with pip"
        ) from error
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} contains code of its own; read it, and pass --trust_remote_code to run it (in Python "
            "trust_remote_code=True)"
        ) from error


def _without_fusion(model: torch.nn.Module, args: tuple[dict[str, Any], ...]) -> None:
    """Mark no clip as longer than 10 s, because transformers marks a random one for a fused CLAP."""
    if "is_longer" in args[0]:
        args[0]["is_longer"] = torch.zeros_like(args[0]["is_longer"])


def _processors(module: torch.nn.Module) -> list[Any]:
    """Return the processor of a module of sentence-transformers and the parts of the processor."""
    processor = getattr(module, "processor", None)
    names = ("feature_extractor", "audio_processor", "tokenizer")
    parts = [processor, *(getattr(processor, name, None) for name in names)]
    return [part for part in parts if hasattr(part, "to_dict") or hasattr(part, "get_vocab")]


def _audio_limits(model: Any, name: str) -> tuple[int, float]:
    """Return the sampling rate in hertz of a model of sentence-transformers, and the chunk length in seconds.

    The rate is an attribute of a processor, or of a module with code of its own. A model can have several encoders.
    """
    _, *modules = model.modules()
    for module in modules:
        for part in (*_processors(module), module):
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


class _PeAudioTowers(StrictLoadingMixin, PeAudioModel):
    _keys_to_ignore_on_load_unexpected = [r"(^|_)video_", "^audio_plus_text_"]  # noqa: RUF012, as in transformers


class PeAudioEmbedder:
    """Audio and text towers of PE-AV, for recordings at 48 kHz.

    The model is an audio-text model (`pe_audio`) or one of the published models with video (`pe_audio_video`). As in
    Meta's own code, the text embedding is computed from the first token before the final norm of the text encoder.
    transformers 5 computes it after this norm in `PeAudioModel.forward`, and fails in `get_text_audio_embeds`.
    """

    chunk_seconds = CHUNK_SECONDS
    min_seconds = MIN_SECONDS

    def __init__(self, name: str, device: Any = None) -> None:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type == "pe_audio_video":
            config = config.audio_config
        self.model: Any = _PeAudioTowers.from_pretrained(name, config=config, dtype=torch.float32)
        self.model = self.model.eval().to(device)
        self.model.text_model.final_norm = torch.nn.Identity()
        self.extractor: Any = AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        self.sampling_rate = int(self.extractor.sampling_rate)
        self.device, self.dtype = self.model.device, self.model.dtype
        settings = [settings_text([self.model.config.to_dict(), self.extractor.to_dict()])]
        self.fingerprint = weights_fingerprint(self.model, *settings, tokenizer_text(self.tokenizer))

    @torch.no_grad()
    def encode_audio(self, waveforms: Sequence[np.ndarray], sampling_rate: int) -> np.ndarray:
        """Embed waveforms (samples,), (N, d) with unit norm."""
        inputs = self.extractor(list(waveforms), sampling_rate=sampling_rate, padding=True, return_tensors="pt")
        embeds = self.model.get_audio_embeds(**inputs.to(self.device))
        return torch.nn.functional.normalize(embeds.float(), dim=-1).cpu().numpy()

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Embed texts, (N, d) with unit norm."""
        embeds = []
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            inputs = self.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            inputs.pop("token_type_ids", None)
            outputs = self.model.text_model(**inputs.to(self.device))
            embeds.append(self.model.text_audio_head(outputs.last_hidden_state[:, 0]))
        return torch.nn.functional.normalize(torch.cat(embeds).float(), dim=-1).cpu().numpy()
