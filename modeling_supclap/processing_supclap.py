"""Processor of `SupCLAPModel`: combines an audio feature extractor with a text tokenizer."""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict

import numpy as np
from transformers import (
    AutoProcessor,
    BatchFeature,
    NllbTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SequenceFeatureExtractor,
)
from transformers.processing_utils import ProcessingKwargs

from .audio_input import as_waveform, one_for_each
from .auto_classes import register
from .configuration_supclap import SupCLAPConfig
from .languages import LANGUAGES, get_flores_code, require_language_code
from .strict_loading import missing_protobuf

# Limits for tokenizers without one: SONAR was trained on 514 tokens, BERT-like encoders on 512.
SONAR_MAX_TOKENS = 514
BERT_MAX_TOKENS = 512
_PUNCTUATION = re.compile('[(),.!?;:|*"，。！？；：、]')


class SupCLAPAudioKwargs(TypedDict, total=False):
    """Options of the feature extractor."""

    # `max_length` and `padding` apply to captions only.
    return_tensors: str | None


class SupCLAPProcessorKwargs(ProcessingKwargs, total=False):
    """Keyword arguments of `SupCLAPProcessor.__call__`, with their defaults per modality."""

    audio_kwargs: SupCLAPAudioKwargs  # type: ignore[misc]
    _defaults = {"text_kwargs": {"padding": True, "truncation": True}}  # type: ignore[misc]  # noqa: RUF012


class SupCLAPProcessor(ProcessorMixin):
    """Processor that combines a feature extractor for audio with a tokenizer for captions.

    Args:
        feature_extractor: Feature extractor of the audio tower. CLAP's feature extractor does not resample audio and
            requires 48 kHz. The processor first cuts clips to 10 s, because this extractor would crop longer clips at
            random positions.
        tokenizer: Tokenizer of the text tower. NLLB tokenizers mark the language of each caption with a language
            token; other tokenizers ignore the language.
        plain_captions: Whether to lower-case captions and remove punctuation except apostrophes and hyphens, as in
            ML-CLAP.
        caption_prefix: Text to insert before every caption, such as "query: " for e5 encoders.
    """

    valid_processor_kwargs: Any = SupCLAPProcessorKwargs

    def __init__(
        self,
        feature_extractor: SequenceFeatureExtractor,
        tokenizer: PreTrainedTokenizerBase,
        plain_captions: bool = False,
        caption_prefix: str = "",
        **kwargs: Any,
    ) -> None:
        _check_tokenizer(tokenizer)
        self.plain_captions = plain_captions
        self.caption_prefix = caption_prefix
        super().__init__(feature_extractor, tokenizer, **kwargs)

    @classmethod
    def from_encoders(cls, audio: str, text: str, caption_prefix: str | None = None, **kwargs: Any) -> Self:
        """Build a processor from the feature extractor of an audio encoder and the tokenizer of a text encoder.

        Args:
            audio, text: Hub ids or folders of the two encoders.
            caption_prefix: Text to insert before every caption. None: use the prompt of a sentence-transformers
                model, and no prefix for other encoders.
            **kwargs: Options of the tokenizer. For a sentence-transformers model, `model_max_length` defaults to its
                maximum sequence length.

        Raises:
            OSError: The folder or Hub id does not exist, or has no feature extractor or tokenizer.
            ValueError: Tokenizer files are missing.
        """
        joining = importlib.import_module("modeling_supclap.joining")
        return joining.join_processors(cls, audio, text, caption_prefix, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a processor as in transformers. If this fails, the error message lists the required files."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except (OSError, ValueError) as error:
            kind = ValueError if isinstance(error, ValueError) else OSError
            raise kind(
                f"no processor can be loaded from {pretrained_model_name_or_path}: {error}{missing_protobuf()}\n"
                "A processor folder contains processor_config.json and the tokenizer files. To build a processor from "
                "two encoders, call SupCLAPProcessor.from_encoders(audio, text)"
            ) from error

    def __call__(
        self,
        audio: Any = None,
        text: str | Sequence[str] | None = None,
        sampling_rate: float | None = None,
        language: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Compute model inputs from audio, captions or both. The number of clips and captions may differ.

        Args:
            audio: One clip or a list of clips, in any format that the feature extractor accepts.
            text: One caption or a list of captions.
            sampling_rate: Sampling rate of all clips in hertz.
            language: ISO 639-3 code of all captions ("fra"), or a list with one code per caption. Language tokens of
                the tokenizer ("por_Latn") are also accepted. None: use the default language of the tokenizer.
            **kwargs: `return_tensors` ("pt" for torch tensors, "np" for numpy arrays, None for no conversion), and
                tokenizer options. `padding` (to the longest caption) and `truncation` (at `max_length`) are on by
                default; `max_length` defaults to `max_tokens`. `text_kwargs` and `audio_kwargs` contain options for one
                modality.

        Returns:
            `BatchFeature` with the audio inputs (`input_features`, and `audio_attention_mask` or CLAP's `is_longer`)
            and the text inputs (`input_ids`, `attention_mask`, and `token_type_ids` for some tokenizers).

        Raises:
            TypeError: A keyword is not a tokenizer option.
            ValueError: Both `audio` and `text` are None, a caption is blank, a language code is invalid or unknown to
                the tokenizer, or a clip is invalid.
        """
        if audio is None and text is None:
            raise ValueError("audio and text are both None; pass audio, text or both")

        parts = SupCLAPProcessorKwargs.__annotations__
        known = {"common_kwargs", *parts, *parts["text_kwargs"].__annotations__}
        if unknown := sorted(kwargs.keys() - known):
            raise TypeError(f"the processor has no option {unknown[0]!r}; pass options of a tokenizer")

        init_kwargs = dict(self.tokenizer.init_kwargs)
        if "truncation_strategy" in init_kwargs:  # from tokenizer.json, with the limits of the last call before saving
            init_kwargs.pop("max_length", None)
            init_kwargs.pop("stride", None)
        options = self._merge_kwargs(self.valid_processor_kwargs, tokenizer_init_kwargs=init_kwargs, **kwargs)

        return_tensors = options["text_kwargs"].pop("return_tensors", None)
        data: dict[str, Any] = {}
        if audio is not None:
            data.update(self._extract(audio, **{"sampling_rate": sampling_rate, **options["audio_kwargs"]}))
        if text is not None:
            data.update(self._tokenize(text, language, **options["text_kwargs"]))

        return BatchFeature(data, tensor_type=return_tensors)

    def _extract(self, audio: Any, **kwargs: Any) -> dict[str, Any]:
        """Compute the audio inputs of the model, independently for each clip."""
        if kwargs.get("padding") in (True, "longest"):  # clips are always padded to the longest
            del kwargs["padding"]
        names = self.feature_extractor.model_input_names
        if "audio_attention_mask" in names:
            return self.feature_extractor(audio, **kwargs)

        clips = [audio] if np.ndim(audio[0]) == 0 else audio
        rate_hz = self.feature_extractor.sampling_rate
        if "is_longer" not in names:
            from_hz = kwargs["sampling_rate"]
            waveforms = [as_waveform(clip, from_hz, rate_hz, f"clip {index}") for index, clip in enumerate(clips)]
            return extract_clips(self.feature_extractor, waveforms)

        # Mix to mono first: CLAP's extractor would treat channels as a spectrum and run out of memory.
        most = self.feature_extractor.nb_max_samples
        mono = [as_waveform(clip, rate_hz, rate_hz, f"clip {index}")[:most] for index, clip in enumerate(clips)]
        features = self.feature_extractor(mono, **kwargs)

        # CLAP's extractor marks a random clip of the batch as longer if none is.
        return {**features, "is_longer": [[False]] * len(clips)}

    def _tokenize(
        self, text: str | Sequence[str], language: str | Sequence[str] | None, **kwargs: Any
    ) -> dict[str, list[list[int]]]:
        """Tokenize captions, with the language token of each caption. Return token ids and masks as lists."""
        if kwargs.get("max_length") is None and (kwargs["truncation"] or kwargs["padding"] == "max_length"):
            kwargs["max_length"] = self.max_tokens

        captions = as_list(text)
        if not captions:
            raise ValueError("text is an empty list; pass at least one caption")
        for index, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise ValueError(f"caption {index} must be a string, got {type(caption).__name__}: {caption!r}")
            if self.plain_captions:  # lower case, without punctuation and repeated spaces, as in ML-CLAP
                caption = " ".join(_PUNCTUATION.sub(" ", caption.lower()).split())
            if not caption.strip():
                raise ValueError(f"caption {index} is blank: {captions[index]!r}; remove the clip or add a caption")
            if any("\ud800" <= character <= "\udfff" for character in caption):
                raise ValueError(f"caption {index} contains a lone surrogate, which is not valid Unicode: {caption!r}")
            captions[index] = self.caption_prefix + caption.strip()  # tokenizers treat spaces at the ends differently

        encoding = dict(self.tokenizer(captions, **kwargs))
        if language is None:
            return encoding

        languages = one_for_each("language", language, len(captions), str)
        if not hasattr(self.tokenizer, "src_lang"):
            for name in set(languages):
                require_language_code(name)
            return encoding

        # Replace the language tokens after one call, because src_lang applies to a whole batch.
        codes = _language_ids(self.tokenizer)
        default_id = self.tokenizer.convert_tokens_to_ids(self.tokenizer.src_lang)
        for ids, name in zip(encoding["input_ids"], languages, strict=True):
            if (code := get_flores_code(name)) not in codes:
                supported = [iso for iso in LANGUAGES if get_flores_code(iso) in codes]
                raise ValueError(
                    f"the tokenizer has no language {name!r}; pass one of {supported}, or the full code of one of its "
                    f"{len(codes) - len(supported)} other languages, such as por_Latn"
                )
            ids[ids.index(default_id)] = codes[code]
        return encoding

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per caption. If the tokenizer has no limit, it is 514 for SONAR, otherwise 512."""
        if self.tokenizer.model_max_length < 1_000_000:  # 1e30 in transformers means no limit
            return self.tokenizer.model_max_length
        return SONAR_MAX_TOKENS if _language_ids(self.tokenizer) else BERT_MAX_TOKENS


def extract_clips(feature_extractor: Any, clips: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Compute the input features of a transformers audio encoder, independently for each clip (samples,).

    Returns:
        Dict with `input_features` and `audio_attention_mask`. The features are float32, padded with zeros, of shape
        (B, T), (B, T, features), or (B, features, T) if all clips have the same length. The mask is (B, T) int64, 1 for
        the clip and 0 for padding.
    """
    options: dict[str, Any] = {"sampling_rate": feature_extractor.sampling_rate, "return_tensors": "np"}
    if "return_attention_mask" in inspect.signature(feature_extractor.__call__).parameters:
        options["return_attention_mask"] = True

    features, masks = [], []
    for clip in clips:
        fields = feature_extractor(clip, **options)
        features.append(fields[feature_extractor.model_input_names[0]][0])
        mask = fields["attention_mask"][0] if "attention_mask" in fields else np.ones(len(features[-1]))
        masks.append(np.asarray(mask, dtype=np.int64))

    longest = max(map(len, masks))
    for index, mask in enumerate(masks):
        missing = longest - len(mask)
        if missing:
            features[index] = np.pad(features[index], [(0, missing)] + [(0, 0)] * (features[index].ndim - 1))
            masks[index] = np.pad(mask, (0, missing))
    return {"input_features": np.stack(features).astype(np.float32), "audio_attention_mask": np.stack(masks)}


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if tokenizer files are missing, because transformers then builds an unusable tokenizer."""
    name = tokenizer.name_or_path or "the folder"
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ValueError(
            f"the tokenizer of {name} has only {len(tokenizer)} special tokens and no words; restore its vocabulary "
            "(tokenizer.json, vocab.txt or sentencepiece.bpe.model)"
        )
    if not hasattr(tokenizer, "src_lang") and _language_ids(tokenizer):
        raise ValueError(
            f"the tokenizer of {name} has language tokens, but its class {type(tokenizer).__name__} cannot insert "
            "them; its tokenizer_config.json must exist and name NllbTokenizer"
        )

    is_nllb = isinstance(tokenizer, NllbTokenizer)
    if is_nllb and tokenizer.convert_tokens_to_ids(tokenizer.src_lang) == tokenizer.unk_token_id:
        raise ValueError(
            f"the tokenizer of {name} has no token for its src_lang {tokenizer.src_lang}; restore the language tokens "
            "in tokenizer.json, or under added_tokens_decoder of tokenizer_config.json"
        )


def as_list(texts: Any) -> list[Any]:
    """Convert one text or a sequence of texts to a list. Raise ValueError for None or a dict."""
    if texts is None:
        raise ValueError("got None; pass a text or a list of texts")
    if isinstance(texts, Mapping):
        kind = type(texts).__name__
        raise ValueError(f"got a {kind} with the keys {list(texts)}; pass a list of texts, such as one of its values")
    return [texts] if isinstance(texts, str) else list(texts)


def _language_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return `{language token: token id}`, with tokens such as "fra_Latn". It is empty if there are no such tokens."""
    is_code = re.compile("[a-z]{3}_[A-Z][a-z]{3}").fullmatch
    return {token: index for token, index in tokenizer.get_added_vocab().items() if is_code(token)}


register(AutoProcessor, SupCLAPConfig, SupCLAPProcessor)
# Register the feature extractors with `AutoFeatureExtractor`. A saved model contains only the file that it needs.
for _module in (".feature_extraction_ced", ".feature_extraction_msclap"):
    if importlib.util.find_spec(_module, __package__):
        importlib.import_module(_module, __package__)
