"""Use SupCLAP models in sentence-transformers: embed texts and recordings with `SentenceTransformer.encode`.

    module = SupCLAPModule.load("outputs/esc10")                 # any folder or Hub id of a SupCLAP model
    encoder = SentenceTransformer(modules=[module])
    texts = encoder.encode(["un chien aboie"], language="fra")
    clips = encoder.encode([{"array": waveform, "sampling_rate": 44100}, ...])
    encoder.save_pretrained("folder")                            # SupCLAPModel loads it, too
    encoder = SentenceTransformer("folder", trust_remote_code=True)

sentence-transformers 6 requires `trust_remote_code=True` to import module classes from other packages.
Requires the extra: pip install "supclap[sentence-transformers]".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchFeature

from modeling_supclap.datasets_scripts.audio_files import is_audio_name

from ..audio_input import as_recordings
from ..encoding import ChunkReader, get_chunk_samples, max_chunk_seconds, mean_embedding, min_clip_samples
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

try:
    from sentence_transformers.base.modules.input_module import InputModule
except ImportError as error:
    raise ImportError(
        f"sentence-transformers 6 or later cannot be imported: {error}\n"
        'Install the extra: pip install "supclap[sentence-transformers]"'
    ) from error


# Chunks in memory at a time, if a batch of recordings has more.
_CHUNKS_AT_ONCE = 32
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "input_features",
    "audio_attention_mask",
    "is_longer",
)


class SupCLAPModule(InputModule):
    """`SentenceTransformer` module that contains a complete SupCLAP model, with both towers.

    A text is a string, or a dict `{"text": "un chien aboie", "language": "fra"}` to mix languages. A recording is any
    input that `model.encode_audio` accepts. A string is the path of a recording if it ends with the suffix of an audio
    file, or is an absolute path or an address, such as `https://...`; a missing file is an error. A waveform without a
    sampling rate must have the model's sampling rate. A call to `encode` accepts either texts or recordings, not both.
    Long recordings are split, and their chunks averaged, as in `model.encode_audio`.

    Args:
        language: Default language of the texts, ISO 639-3 code. None: use the tokenizer's setting.
    """

    config_file_name = "sentence_supclap_config.json"  # config.json is the model's
    config_keys = ["language"]  # noqa: RUF012, as in sentence-transformers
    forward_kwargs = {"language", "sampling_rate"}  # noqa: RUF012, options of `encode` for `preprocess`
    save_in_root = True

    def __init__(self, model: SupCLAPModel, processor: SupCLAPProcessor, language: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.processor = processor
        self.language = language

    @property
    def modalities(self) -> list[Any]:
        """Supported input types."""
        return ["text", "audio"]

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]  # an attribute in the base class
        """Tokenizer of the processor, for sentence-transformers."""
        return self.processor.tokenizer

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens. Longer texts are truncated."""
        return self.processor.max_tokens

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.tokenizer.model_max_length = value

    def get_embedding_dimension(self) -> int:
        """Return the dimension of the embeddings."""
        return self.model.config.projection_dim

    def preprocess(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        language: str | None = None,
        sampling_rate: float | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Convert a batch of texts or a batch of recordings to model inputs with the processor.

        Args:
            language: ISO 639-3 code for texts without a language. None: use the default language of this module.
            sampling_rate: Sampling rate in hertz, for waveforms that are passed without it. None: use the model's
                sampling rate.

        Raises:
            ValueError: The batch contains both texts and recordings, or an input is invalid.
        """
        texts = list(map(_as_text, inputs))
        if None not in texts:
            language = language or self.language
            languages: Any = []
            for one in inputs:
                own = one.get("language", language) if isinstance(one, Mapping) else language
                languages.append(own)
            if not any(languages):
                languages = None
            elif None in languages:
                raise ValueError("only some texts of the batch have a language; pass language= for the others")
            prompted = [f"{prompt or ''}{text}" for text in texts]
            return dict(self.processor(text=prompted, language=languages, return_tensors="pt"))
        if texts.count(None) < len(texts):
            raise ValueError("the batch has both texts and recordings; encode them in two calls")

        extractor: Any = self.processor.feature_extractor
        rate_hz = extractor.sampling_rate
        audio = []
        for one in inputs:
            is_wrapped = isinstance(one, Mapping) and set(one) == {"audio"}
            audio.append(one["audio"] if is_wrapped else one)
        recordings, _ = as_recordings(audio, sampling_rate or rate_hz)
        chunk_samples = get_chunk_samples(None, rate_hz, 0, max_chunk_seconds(extractor))
        shortest, method = min_clip_samples(extractor), self.processor.resampling_method
        reader = ChunkReader(rate_hz, chunk_samples, chunk_samples, shortest, False, method)
        waveforms, counts = [], []
        for index, recording in enumerate(recordings):
            chunks = reader.read(index, recording)
            waveforms += [chunk.content for chunk in chunks]
            counts.append(len(chunks))
        features = dict(BatchFeature(self.processor.extract(waveforms), tensor_type="pt"))
        return {**features, "chunk_counts": torch.tensor(counts)}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` to the result of `preprocess`: unit-norm embeddings (B, projection_dim)."""
        inputs = {name: features[name] for name in _MODEL_INPUTS if name in features}
        if "input_ids" in features:
            return {**features, "sentence_embedding": self.model.get_text_features(**inputs).pooler_output}
        embeds = []
        for first in range(0, len(inputs["input_features"]), _CHUNKS_AT_ONCE):
            part = {name: value[first : first + _CHUNKS_AT_ONCE] for name, value in inputs.items()}
            embeds.append(self.model.get_audio_features(**part).pooler_output)
        counts = features["chunk_counts"].tolist()
        means = torch.stack(list(map(mean_embedding, torch.cat(embeds).split(counts))))
        return {**features, "sentence_embedding": means}

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, its processor and the settings of this module."""
        self.model.save_pretrained(output_path)
        self.processor.save_pretrained(output_path)
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, *args: Any, **kwargs: Any) -> SupCLAPModule:
        """Load a SupCLAP model, saved by transformers or by sentence-transformers.

        Args:
            model_name_or_path: Folder or Hub id.
            **kwargs: `revision`, `token`, `cache_folder`, `local_files_only`, `model_kwargs` and
                `processor_kwargs`, as in sentence-transformers. `language` is the default language of the texts.
        """
        hub = {name: kwargs[name] for name in ("revision", "token", "local_files_only") if kwargs.get(name)}
        cache = kwargs.get("cache_folder")
        settings = cls.load_config(model_name_or_path, cache_folder=cache, **hub)
        hub["cache_dir"] = cache
        model = SupCLAPModel.from_pretrained(model_name_or_path, **hub, **(kwargs.get("model_kwargs") or {}))
        options = {**hub, **(kwargs.get("processor_kwargs") or {})}
        processor = SupCLAPProcessor.from_pretrained(model_name_or_path, **options)
        settings["language"] = kwargs.get("language") or settings.get("language")
        return cls(model.eval(), processor, **settings)


def _as_text(one: Any) -> str | None:
    """Return the text of an input, or None if the input is a recording, a path or an address.

    A string is a path if it ends with the suffix of an audio file, is absolute, or contains a separator and exists.
    """
    if isinstance(one, Mapping):
        return one.get("text")
    if not isinstance(one, str) or _ADDRESS.fullmatch(one) or is_audio_name(one):
        return None
    is_path = os.path.isabs(one) or (os.path.basename(one) != one and os.path.isfile(one))
    return None if is_path else one
