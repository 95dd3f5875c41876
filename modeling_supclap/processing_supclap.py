"""Recordings and captions, in any of the tokenizer's languages, to the inputs of `SupCLAPModel`."""

import importlib
import importlib.util
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
from transformers.utils import is_protobuf_available

from .audio_encoder import extract_clips
from .audio_input import one_for_each
from .auto_classes import register
from .configuration_supclap import SupCLAPConfig
from .feature_extraction_ced import as_waveform
from .languages import LANGUAGES, get_flores_code, require_language_code

# Where the tokenizer states no limit: SONAR was trained on 514 tokens, BERT and its kin on 512.
SONAR_MAX_TOKENS = 514
BERT_MAX_TOKENS = 512
_PUNCTUATION = re.compile('[(),.!?;:|*"，。！？；：、]')


class SupCLAPAudioKwargs(TypedDict, total=False):
    """The options of a call that reach the feature extractor too; a `max_length` or a `padding` is the captions'."""

    return_tensors: str | None


class SupCLAPProcessorKwargs(ProcessingKwargs, total=False):
    """Options of `SupCLAPProcessor`, by the part that they are for."""

    audio_kwargs: SupCLAPAudioKwargs  # type: ignore[misc]
    _defaults = {"text_kwargs": {"padding": True, "truncation": True}}  # type: ignore[misc]  # noqa: RUF012


class SupCLAPProcessor(ProcessorMixin):
    """One object for a model's inputs: a feature extractor for recordings and a tokenizer for captions.

    Args:
        feature_extractor: Turns waveforms into the audio tower's input. CLAP's would cut a longer clip at a random
            place, so it gets the first 10 s (its `max_length_s`); it resamples nothing and refuses other rates.
        tokenizer: Turns captions into the text tower's input. One of NLLB's kind gets the language of each caption
            as its language token; any other ignores the language.
        plain_captions: Whether captions are put in lower case and lose their punctuation, as ML-CLAP was trained and
            is evaluated; apostrophes and hyphens stay.
        caption_prefix: Stands before every caption, such as the "query: " of the e5 encoders.
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
        """Joins the feature extractor of one encoder and the tokenizer of another, as `SupCLAPModel` joins the two.

        Args:
            audio: Hub id or folder of the audio tower. A CED folder without `preprocessor_config.json` gets the front
                end that its `config.json` describes.
            text: Hub id or folder of the text tower.
            caption_prefix: As for the class; None is the prompt of a folder of sentence-transformers, such as e5's.
            **kwargs: For the tokenizer, for example `model_max_length`; without it, that of such a folder.

        Raises:
            OSError: There is no such folder or id, or it holds no feature extractor.
            ValueError: The tokenizer is none, or files of it are missing.
        """
        try:
            from modeling_supclap.joining import join_processors
        except ImportError as error:
            raise ImportError("from_encoders needs the package modeling_supclap; install supclap") from error
        return join_processors(cls, audio, text, caption_prefix, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """As in transformers, with an error that says what a processor consists of.

        Raises:
            OSError: There is no such folder or id, or it holds no processor.
            ValueError: Files of the tokenizer are missing.
        """
        register_feature_extractors()
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except (OSError, ValueError) as error:
            kind = ValueError if isinstance(error, ValueError) else OSError
            raise kind(
                f"no processor can be loaded from {pretrained_model_name_or_path}: {error}{missing_protobuf()}\n"
                "A processor's folder holds processor_config.json and the tokenizer's files; "
                "SupCLAPProcessor.from_encoders(audio, text) joins those of two encoders"
            ) from error

    def __call__(
        self,
        audio: Any = None,
        text: str | Sequence[str] | None = None,
        sampling_rate: float | None = None,
        language: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Makes model inputs of recordings, of captions, or of both; their numbers may differ.

        Args:
            audio: One clip or a list of clips, as the feature extractor takes them.
            text: One caption or a list of captions.
            sampling_rate: Rate of all the clips in hertz.
            language: ISO 639-3 code of the captions ("fra"), or a list with one for each; full codes of the
                tokenizer ("por_Latn") pass through. None is the tokenizer's own setting.
            **kwargs: `return_tensors` ("pt" for torch tensors, "np" for numpy arrays, None for what each part makes)
                and the tokenizer's options. Of these `padding` (to the longest caption) and `truncation` (at
                `max_length`) are on, and `max_length` is the tokenizer's limit, or the text tower's usual one. As in
                any processor, `text_kwargs` and `audio_kwargs` are options of one part alone.

        Returns:
            The feature extractor's fields (`input_features` and `audio_attention_mask`, or CLAP's `is_longer`) and the
            tokenizer's (`input_ids`, `attention_mask`, for some `token_type_ids`).

        Raises:
            TypeError: An option is none of the tokenizer's.
            ValueError: There is neither audio nor text, a caption is blank, the tokenizer lacks a language, or a clip
                is unusable.
        """
        if audio is None and text is None:
            raise ValueError("there is nothing to process; give audio, text or both")

        options = self._options(kwargs)
        return_tensors = options["text_kwargs"].pop("return_tensors", None)
        data: dict[str, Any] = {}
        if audio is not None:
            data.update(self._extract(audio, **{"sampling_rate": sampling_rate, **options["audio_kwargs"]}))
        if text is not None:
            data.update(self._tokenize(text, language, **options["text_kwargs"]))

        return BatchFeature(data, tensor_type=return_tensors)

    def _options(self, kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The options of a call by part, under the rules of all processors."""
        parts = SupCLAPProcessorKwargs.__annotations__
        known = {"common_kwargs", *parts, *parts["text_kwargs"].__annotations__}
        if unknown := sorted(kwargs.keys() - known):
            raise TypeError(f"the processor has no option {unknown[0]!r}; it has those of a tokenizer")

        own = self.tokenizer.init_kwargs
        if "truncation_strategy" in own:  # read off tokenizer.json, which holds what the last call before it was cut to
            own = dict(own)
            for name in ("max_length", "stride"):
                own.pop(name, None)

        return self._merge_kwargs(self.valid_processor_kwargs, tokenizer_init_kwargs=own, **kwargs)

    def _extract(self, audio: Any, **kwargs: Any) -> dict[str, Any]:
        """The feature extractor's fields, the same for the same clip whatever its batch mates."""
        if kwargs.get("padding") in (True, "longest"):  # as any caller may ask; clips are padded so anyway
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

        # Mono by ours: CLAP's extractor takes the channels of a clip for its spectrum, and fills the memory.
        most = self.feature_extractor.nb_max_samples
        mono = [as_waveform(clip, rate_hz, rate_hz, f"clip {index}")[:most] for index, clip in enumerate(clips)]
        features = self.feature_extractor(mono, **kwargs)

        # CLAP's extractor calls one clip of a batch long, drawn at random, where none is.
        return {**features, "is_longer": [[False]] * len(clips)}

    def _tokenize(
        self, text: str | Sequence[str], language: str | Sequence[str] | None, **kwargs: Any
    ) -> dict[str, list[list[int]]]:
        """Token ids and masks as lists, each caption under its own language token."""
        if kwargs.get("max_length") is None and (kwargs["truncation"] or kwargs["padding"] == "max_length"):
            kwargs["max_length"] = self.max_tokens

        given = as_list(text)
        if self.plain_captions:
            given = [_plain(caption) if isinstance(caption, str) else caption for caption in given]

        captions = [self.caption_prefix + caption for caption in _check_captions(given)]
        encoding = dict(self.tokenizer(captions, **kwargs))
        if language is None:
            return encoding

        languages = one_for_each("language", language, len(captions), str)
        if not hasattr(self.tokenizer, "src_lang"):
            for name in set(languages):
                require_language_code(name)
        else:
            # One call for all languages: the tokenizer's src_lang is a setting for a whole batch, and stays as it is.
            codes = _language_ids(self.tokenizer)
            placed = self.tokenizer.convert_tokens_to_ids(self.tokenizer.src_lang)
            for ids, name in zip(encoding["input_ids"], languages, strict=True):
                ids[ids.index(placed)] = _language_id(name, codes)

        return encoding

    @property
    def max_tokens(self) -> int:
        """The most tokens of a caption, which is cut there: the tokenizer's limit, or the usual one of text towers."""
        if self.tokenizer.model_max_length < 1_000_000:  # transformers writes 1e30 where the tokenizer has no limit
            return self.tokenizer.model_max_length
        return SONAR_MAX_TOKENS if _language_ids(self.tokenizer) else BERT_MAX_TOKENS


def register_feature_extractors() -> None:
    """Import the extractors that `AutoFeatureExtractor` must find by name; a saved folder names its own as its code."""
    if importlib.util.find_spec(".feature_extraction_msclap", __package__):
        importlib.import_module(".feature_extraction_msclap", __package__)


def missing_protobuf() -> str:
    """A hint for errors: without protobuf transformers asks for tiktoken, which would not help."""
    if is_protobuf_available():
        return ""
    return "\nprotobuf is not installed, without which no sentencepiece file is read: pip install protobuf"


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses what transformers makes of a folder that lost files: it builds a tokenizer and says nothing."""
    name = tokenizer.name_or_path or "the folder"
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ValueError(
            f"the tokenizer of {name} knows no words, only {len(tokenizer)} special tokens: its vocabulary "
            "(tokenizer.json, vocab.txt or sentencepiece.bpe.model) is missing"
        )
    if not hasattr(tokenizer, "src_lang") and _language_ids(tokenizer):
        raise ValueError(
            f"the tokenizer of {name} has language tokens but is a {type(tokenizer).__name__}, which cannot place "
            "them: its tokenizer_config.json is missing or names another class than NllbTokenizer"
        )

    is_nllb = isinstance(tokenizer, NllbTokenizer)
    if is_nllb and tokenizer.convert_tokens_to_ids(tokenizer.src_lang) == tokenizer.unk_token_id:
        raise ValueError(
            f"the tokenizer of {name} does not know its own language {tokenizer.src_lang}: its language tokens, in "
            "tokenizer.json or under added_tokens_decoder of tokenizer_config.json, are missing"
        )


def as_list(texts: Any) -> list[Any]:
    """One text or several as a list; of a mapping, such as a row's captions by language, a ValueError.

    Its keys would be taken for texts.
    """
    if texts is None:
        raise ValueError("got None; give a text or a list of texts")
    if isinstance(texts, Mapping):
        raise ValueError(
            f"got a {type(texts).__name__} with the keys {list(texts)}; give a text or a list of texts, for example "
            "one of its values"
        )
    return [texts] if isinstance(texts, str) else list(texts)


def _check_captions(captions: list[str]) -> list[str]:
    """Captions without blanks at their ends, where tokenizers of one model disagree; or an error that names one."""
    if not captions:
        raise ValueError("there is no caption; got an empty list")

    for index, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise ValueError(f"caption {index} must be a string, got {type(caption).__name__}: {caption!r}")
        if not caption.strip():
            raise ValueError(f"caption {index} is blank: {caption!r}; leave the clip out or give it words")
        if any("\ud800" <= character <= "\udfff" for character in caption):
            raise ValueError(f"caption {index} is {caption!r}, which is no valid Unicode: it contains a lone surrogate")

    return list(map(str.strip, captions))


def _plain(caption: str) -> str:
    """Lower case without punctuation, as ML-CLAP prepares its captions (blanks in a row are one to its tokenizer)."""
    return " ".join(_PUNCTUATION.sub(" ", caption.lower()).split())


def _language_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The language tokens of an NLLB-type tokenizer with their ids."""
    is_code = re.compile("[a-z]{3}_[A-Z][a-z]{3}").fullmatch
    return {token: index for token, index in tokenizer.get_added_vocab().items() if is_code(token)}


def _language_id(language: str, codes: dict[str, int]) -> int:
    code = get_flores_code(language)
    if code not in codes:
        ours = [iso for iso in LANGUAGES if get_flores_code(iso) in codes]
        raise ValueError(
            f"the tokenizer has no language {language!r}; it has {', '.join(ours) or 'none of ours'} and "
            f"{len(codes) - len(ours)} more, which are given by their full codes such as por_Latn"
        )

    return codes[code]


register(AutoProcessor, SupCLAPConfig, SupCLAPProcessor)
