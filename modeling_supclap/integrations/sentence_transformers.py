"""A SupCLAP model inside sentence-transformers: texts and recordings through `SentenceTransformer.encode`.

    module = SupCLAPModule.load("outputs/esc10")                 # any folder or Hub id of a SupCLAP model
    encoder = SentenceTransformer(modules=[module])
    texts = encoder.encode(["un chien aboie"], language="fra")
    clips = encoder.encode([{"array": waveform, "sampling_rate": 44100}, ...])
    encoder.save_pretrained("folder")                            # still a SupCLAP folder as well
    encoder = SentenceTransformer("folder", trust_remote_code=True)

sentence-transformers 6 asks for `trust_remote_code=True` before it imports any module class that is not its own.
Needs the extra: pip install "supclap[sentence-transformers]".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..audio_input import as_recordings
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

try:
    from sentence_transformers.base.modules.input_module import InputModule
except ImportError as error:
    raise ImportError(
        f"sentence-transformers 6 or later does not import: {error}\n"
        'It is an extra; install it with: pip install "supclap[sentence-transformers]"'
    ) from error


_MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "input_features", "audio_attention_mask", "is_longer")


class SupCLAPModule(InputModule):
    """Both towers as the one module of a `SentenceTransformer`; its vectors are those of the model, unit norm.

    A text is a string, or `{"text": "un chien aboie", "language": "fra"}` where languages mix. A recording is what
    `model.encode_audio` takes, a waveform without a rate being at the model's own. One call of `encode` takes texts or
    recordings, not both. CLAP's audio tower hears the first 10 s of a recording;
    `model.encode_audio` hears all.

    Args:
        model: The model.
        processor: The model's.
        language: ISO 639-3 code of texts that say nothing else; None is the tokenizer's own setting.

    Example:
        >>> from transformers import BertTokenizer
        >>> from modeling_supclap import CEDFeatureExtractor, SupCLAPConfig
        >>> text = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> audio = {"model_type": "ced", "embed_dim": 8, "depth": 1, "num_heads": 2}
        >>> model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=4))
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "rain", "dog"]
        >>> tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
        >>> processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
        >>> module = SupCLAPModule(model, processor)
        >>> module(module.preprocess(["dog", "rain"]))["sentence_embedding"].shape
        torch.Size([2, 4])
    """

    config_file_name = "sentence_supclap_config.json"  # config.json is the model's
    config_keys = ["language"]  # noqa: RUF012, as in sentence-transformers
    forward_kwargs = {"language", "sampling_rate"}  # noqa: RUF012, what `encode` may pass on to `preprocess`
    save_in_root = True

    def __init__(self, model: SupCLAPModel, processor: SupCLAPProcessor, language: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.processor = processor
        self.language = language

    @property
    def modalities(self) -> list[Any]:
        """What goes in: texts and recordings."""
        return ["text", "audio"]

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]  # an attribute there
        """The tokenizer, where sentence-transformers looks for it."""
        return self.processor.tokenizer

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a text; longer ones are cut."""
        return self.processor.max_tokens

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.tokenizer.model_max_length = value

    def get_embedding_dimension(self) -> int:
        """Width of the vectors."""
        return self.model.config.projection_dim

    def preprocess(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        language: str | None = None,
        sampling_rate: float | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Makes model inputs of a batch of texts or of a batch of recordings.

        Args:
            inputs: Texts or recordings, see the class.
            prompt: Stands before each text; recordings go without.
            language: ISO 639-3 code of texts that say nothing else; None is the module's.
            sampling_rate: The rate of waveforms that say nothing else, in hertz; None is the model's own.
            **kwargs: What `encode` has for other modules, which is not used.

        Returns:
            The processor's fields as tensors: `input_features` and their mask, or `input_ids` and theirs.

        Raises:
            ValueError: Texts and recordings mix, an input is neither, or one of them is unusable.
        """
        texts = list(map(_as_text, inputs))
        if None not in texts:
            return self._tokenize(inputs, prompt or "", language or self.language)
        if texts.count(None) < len(texts):
            raise ValueError("this batch mixes texts and recordings; encode them in two calls")

        rate_hz = int(self.processor.feature_extractor.sampling_rate)
        given = [one["audio"] if isinstance(one, Mapping) and set(one) == {"audio"} else one for one in inputs]
        recordings, _ = as_recordings(given, sampling_rate or rate_hz)
        clips = [recording.read(rate_hz) for recording in recordings]
        return dict(self.processor(audio=clips, sampling_rate=rate_hz, return_tensors="pt"))

    def _tokenize(self, inputs: Sequence[Any], prompt: str, language: str | None) -> dict[str, torch.Tensor]:
        texts: list[str] = []
        languages: list[Any] = []
        for one in inputs:
            texts.append(f"{prompt}{_as_text(one)}")
            languages.append(one.get("language", language) if isinstance(one, Mapping) else language)

        is_spoken = any(languages)
        if is_spoken and None in languages:
            raise ValueError("some texts of this batch have a language and some have none; pass language= for those")
        return dict(self.processor(text=texts, language=languages if is_spoken else None, return_tensors="pt"))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Embeds what `preprocess` made.

        Args:
            features: Its result, on the model's device.
            **kwargs: What `preprocess` has used already.

        Returns:
            The features with `sentence_embedding` (B, projection_dim), unit norm, at least float32.
        """
        embed = self.model.get_text_features if "input_ids" in features else self.model.get_audio_features
        inputs = {name: features[name] for name in _MODEL_INPUTS if name in features}
        return {**features, "sentence_embedding": embed(**inputs).pooler_output}

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Writes the model, its processor and the module's own settings: a SupCLAP folder with one more file."""
        self.model.save_pretrained(output_path)
        self.processor.save_pretrained(output_path)
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, *args: Any, **kwargs: Any) -> SupCLAPModule:
        """Loads any SupCLAP model, whether or not sentence-transformers has saved it.

        Args:
            model_name_or_path: Its folder or Hub id.
            *args: Not used.
            **kwargs: `revision`, `token`, `cache_folder`, `local_files_only`, `model_kwargs` and
                `processor_kwargs`, as in sentence-transformers; `language` for the texts.
        """
        hub = {name: kwargs[name] for name in ("revision", "token", "local_files_only") if kwargs.get(name)}
        cache = kwargs.get("cache_folder")
        settings = cls.load_config(model_name_or_path, cache_folder=cache, **hub)
        if cache is not None:
            hub["cache_dir"] = cache
        model = SupCLAPModel.from_pretrained(model_name_or_path, **hub, **(kwargs.get("model_kwargs") or {}))
        processor = SupCLAPProcessor.from_pretrained(
            model_name_or_path, **hub, **(kwargs.get("processor_kwargs") or {})
        )
        if kwargs.get("language"):
            settings["language"] = kwargs["language"]
        return cls(model.eval(), processor, **settings)


def _as_text(one: Any) -> str | None:
    """The words of an input, or None for a recording; a path to an audio file is a recording."""
    if isinstance(one, Mapping):
        return one.get("text")
    if not isinstance(one, str):
        return None
    from sentence_transformers.base.modality import is_audio_url_or_path

    return None if is_audio_url_or_path(one) else one
