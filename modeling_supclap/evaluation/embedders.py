"""Embed recordings and texts with models that this package does not convert: evaluation, search and embed use them.

- `SentenceEmbedder`: any model in the format of sentence-transformers that takes audio and text, such as
  EmbeddingGemma 2, e5-omni, omni-embed-nemotron or VoiceCLAP-large. It requires the extra `sentence-transformers`.
- `PeAudioEmbedder`: PE-AV's audio-text model of transformers.

Both have the interface of a custom model in `evaluation.models`. They are not trained by this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoProcessor

from ..encoding import max_chunk_seconds
from .fingerprints import weights_fingerprint

CHUNK_SECONDS = 30.0
"""Maximum chunk length in seconds. EmbeddingGemma 2 cuts longer recordings without a message."""


class SentenceEmbedder:
    """Model in the format of sentence-transformers, with audio and text.

    Texts are embedded by `encode_query` and recordings by `encode_document`, with the model's own prompts for queries
    and documents if it has them.

    Args:
        name: Folder or Hub id.
        trust_remote_code: Whether to run code from the folder or repository.

    Raises:
        ImportError: sentence-transformers is not installed.
        ValueError: The model does not take audio and text, or needs code from its repository.
    """

    def __init__(self, name: str, device: Any = None, trust_remote_code: bool = False) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(
                f'{name} requires sentence-transformers: pip install "supclap[sentence-transformers]"'
            ) from error

        self.model = SentenceTransformer(name, device=str(device), trust_remote_code=trust_remote_code)
        self.model.eval()
        lacking = {"audio", "text"} - set(self.model.modalities)
        if lacking:
            raise ValueError(
                f"{name} embeds {', '.join(map(str, self.model.modalities))}, not {lacking.pop()}"
            )

        extractor = getattr(self.model[0].processor, "feature_extractor", None)
        self.sampling_rate = int(getattr(extractor, "sampling_rate", 16000))
        self.chunk_seconds = min(max_chunk_seconds(extractor) or CHUNK_SECONDS, CHUNK_SECONDS)
        self.device = self.model.device
        settings = [
            str(self.model.prompts),
            str(self.model.default_prompt_name),
            str(self.model[0].processor),
        ]
        self.fingerprint = weights_fingerprint(self.model, *settings)

    def encode_audio(
        self, waveforms: Sequence[np.ndarray], sampling_rate: int, batch_size: int = 32
    ) -> np.ndarray:
        """Embed waveforms (samples,), (N, d) with unit norm."""
        clips = [{"array": waveform, "sampling_rate": sampling_rate} for waveform in waveforms]
        return self._encode(self.model.encode_document, clips, batch_size)

    def encode_text(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Embed texts, (N, d) with unit norm."""
        return self._encode(self.model.encode_query, list(texts), batch_size)

    def _encode(self, encode: Any, inputs: list[Any], batch_size: int) -> np.ndarray:
        options = {"batch_size": batch_size, "normalize_embeddings": True, "show_progress_bar": False}
        embeds: np.ndarray = encode(inputs, convert_to_numpy=True, **options)
        return embeds


class PeAudioEmbedder:
    """PE-AV's audio-text model `PeAudioModel` of transformers, for recordings at 48 kHz.

    transformers' own `get_text_audio_embeds` fails in 5.23, because its text encoder returns no hidden states. This
    class takes the first token of the last hidden state, as `PeAudioModel.forward` does.
    """

    chunk_seconds = CHUNK_SECONDS

    def __init__(self, name: str, device: Any = None) -> None:
        self.model: Any = AutoModel.from_pretrained(name, dtype=torch.float32).eval().to(device)
        self.processor: Any = AutoProcessor.from_pretrained(name)
        self.sampling_rate = int(self.processor.feature_extractor.sampling_rate)
        self.device = self.model.device
        words, extractor = self.processor.tokenizer.get_vocab(), self.processor.feature_extractor
        self.fingerprint = weights_fingerprint(self.model, str(sorted(words.items())), str(extractor))

    @torch.no_grad()
    def encode_audio(self, waveforms: Sequence[np.ndarray], sampling_rate: int) -> np.ndarray:
        """Embed waveforms (samples,), (N, d) with unit norm."""
        extractor = self.processor.feature_extractor
        inputs = extractor(list(waveforms), sampling_rate=sampling_rate, padding=True, return_tensors="pt")
        embeds = self.model.get_audio_embeds(**inputs.to(self.device))
        return torch.nn.functional.normalize(embeds.float(), dim=-1).cpu().numpy()

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts, (N, d) with unit norm."""
        inputs = self.processor.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        outputs = self.model.text_model(**inputs.to(self.device), output_hidden_states=True)
        embeds = self.model.text_audio_head(outputs.hidden_states[-1][:, 0])
        return torch.nn.functional.normalize(embeds.float(), dim=-1).cpu().numpy()
