"""Processor of `SupCLAPModel`: combines an audio feature extractor with a text tokenizer."""

import importlib
import importlib.util
import inspect
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import (
    AutoProcessor,
    BatchFeature,
    ClapFeatureExtractor,
    NllbTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SequenceFeatureExtractor,
)
from transformers.processing_utils import ProcessingKwargs
from transformers.utils import logging

from .audio_input import as_waveforms, one_for_each, stack_clips
from .auto_classes import register
from .configuration_supclap import SupCLAPConfig
from .feature_extraction_clap import extract_clap, extract_clap_on_device
from .languages import LANGUAGES, get_flores_code, require_language_code
from .strict_loading import missing_protobuf, naming_open_clip
from .waveform import RESAMPLING_METHODS

logger = logging.get_logger(__name__)

# Limits for tokenizers without one: SONAR was trained on 514 tokens, BERT-like encoders on 512.
SONAR_MAX_TOKENS = 514
BERT_MAX_TOKENS = 512
# Of `audio_kwargs`. Clips are always padded to the longest, so `padding` changes nothing.
_AUDIO_OPTIONS = {"sampling_rate", "return_tensors", "padding"}
_SURROGATES = re.compile("[\ud800-\udfff]")  # half of a character, as in a text that was read in a wrong encoding
# By limit of tokens: the number of captions so far, and the limits that have been exceeded.
_captions_before: Counter[int] = Counter()
_cut_limits: set[int] = set()
REMOVED_CHARACTERS = '(),.!?;:|*"，。！？；：、'  # by `plain_captions`
_PUNCTUATION = re.compile(f"[{REMOVED_CHARACTERS}]")


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
        feature_extractor: Feature extractor of the audio tower. For CLAP, the processor computes the features itself,
            faster and from the first 10 s of a clip, because the extractor crops longer clips at random positions.
        tokenizer: Tokenizer of the text tower. NLLB tokenizers mark the language of each caption with a language
            token; other tokenizers ignore the language.
        plain_captions: Whether to lower-case captions and remove punctuation except apostrophes and hyphens, as in
            ML-CLAP.
        caption_prefix: Text to insert before every caption, such as "query: " for e5 encoders.
        resampling_method: "kaiser_best" (the quality of soxr) or "sinc_interp_hann" (the default of torchaudio), for
            audio at other sampling rates than the model's. None: the method that the authors of the audio tower used,
            which is torchaudio's for CED, Dasheng and MS-CLAP, and soxr's for CLAP and the encoders of transformers.

    Raises:
        ValueError: Tokenizer files are missing, or the resampling method is unknown.
    """

    valid_processor_kwargs: Any = SupCLAPProcessorKwargs

    def __init__(
        self,
        feature_extractor: SequenceFeatureExtractor,
        tokenizer: PreTrainedTokenizerBase,
        plain_captions: bool = False,
        caption_prefix: str = "",
        resampling_method: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check_tokenizer(tokenizer)
        forget_last_call(tokenizer)
        self.plain_captions = plain_captions
        self.caption_prefix = caption_prefix
        if resampling_method is None:
            resampling_method = getattr(feature_extractor, "resampling_method", "kaiser_best")
        self.resampling_method = resampling_method
        if resampling_method not in RESAMPLING_METHODS:
            known = ", ".join(RESAMPLING_METHODS)
            raise ValueError(f"resampling_method is {resampling_method!r}; pass one of {known}, or None")
        super().__init__(feature_extractor, tokenizer, **kwargs)

    @classmethod
    def from_encoders(
        cls, audio: str, text: str, caption_prefix: str | None = None, audio_seconds: int | None = None, **kwargs: Any
    ) -> Self:
        """Build a processor from the feature extractor of an audio encoder and the tokenizer of a text encoder.

        Args:
            audio, text: Hub ids or folders of the two encoders.
            caption_prefix: Text to insert before every caption. None: use the prompt of a sentence-transformers
                model, and no prefix for other encoders.
            audio_seconds: Length of the clips that Whisper's encoder takes, as in `SupCLAPModel.from_encoders`.
            **kwargs: Options of the tokenizer. For a sentence-transformers model, `model_max_length` defaults to its
                maximum sequence length.

        Raises:
            OSError: The folder or Hub id does not exist, or has no feature extractor or tokenizer.
            ValueError: Tokenizer files are missing.
        """
        joining = importlib.import_module("modeling_supclap.joining")
        return joining.join_processors(cls, audio, text, caption_prefix, audio_seconds, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a processor as in transformers. If this fails, the error message lists the required files.

        Code in the folder or repository, such as that of a tokenizer, runs only with `trust_remote_code=True`.
        """
        name = pretrained_model_name_or_path
        kwargs.setdefault("trust_remote_code", False)  # None asks on the terminal
        with naming_open_clip(name):
            try:
                return super().from_pretrained(name, *args, **kwargs)
            except (OSError, ValueError) as error:
                kind = ValueError if isinstance(error, ValueError) else OSError
                raise kind(
                    f"no processor can be loaded from {name}: {error}{missing_protobuf()}\n"
                    "A processor folder contains processor_config.json and the tokenizer files. To build a processor "
                    "from two encoders, call SupCLAPProcessor.from_encoders(audio, text)"
                ) from error

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as in transformers, without the truncation and padding of the tokenizer's last call."""
        forget_last_call(self.tokenizer)
        return super().save_pretrained(save_directory, *args, **kwargs)

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
        parts = SupCLAPProcessorKwargs.__annotations__
        known = {"common_kwargs", *parts, *parts["text_kwargs"].__annotations__}
        unknown = sorted(kwargs.keys() - known) + sorted(kwargs.get("audio_kwargs", {}).keys() - _AUDIO_OPTIONS)
        if unknown:
            raise TypeError(
                f"the processor has no option {unknown[0]!r}; pass audio=, text= or options of a tokenizer"
            )
        if audio is None and text is None:
            raise ValueError("audio and text are both None; pass audio, text or both")

        init_kwargs = self.tokenizer.init_kwargs
        options = self._merge_kwargs(self.valid_processor_kwargs, tokenizer_init_kwargs=init_kwargs, **kwargs)
        sampling_rate = options["audio_kwargs"].get("sampling_rate", sampling_rate)

        return_tensors = options["text_kwargs"].pop("return_tensors", None)
        data: dict[str, Any] = {}
        if audio is not None:
            data.update(self.extract(self.as_waveforms(audio, sampling_rate)))
        if text is not None:
            data.update(self._tokenize(text, language, **options["text_kwargs"]))

        return BatchFeature(data, tensor_type=return_tensors)

    def as_waveforms(self, audio: Any, sampling_rate: float | None) -> list[np.ndarray]:
        """Check clips, mix them to mono and resample them. This is the first step of `__call__` for audio.

        Returns:
            List of float32 waveforms (samples,) at the model's sampling rate, one per clip.
        """
        extractor: Any = self.feature_extractor
        if sampling_rate is None and isinstance(extractor, ClapFeatureExtractor):
            # As in transformers; sentence-transformers passes no rate.
            logger.warning("audio without sampling_rate is read as %d Hz; pass sampling_rate", extractor.sampling_rate)
            sampling_rate = extractor.sampling_rate
        least = getattr(extractor, "min_samples", 1)
        return as_waveforms(audio, sampling_rate, extractor.sampling_rate, least, self.resampling_method)

    def extract(self, waveforms: Sequence[np.ndarray]) -> dict[str, Any]:
        """Compute the audio inputs of the model from checked waveforms, independently for each clip.

        Args:
            waveforms: Float32 waveforms (samples,) at the model's sampling rate, as `as_waveforms`, `Recording.read`
                and `datasets_scripts.audio.read_row` return them. They are not checked again.
        """
        return self.stack(list(map(self.extract_clip, waveforms)))

    def extract_clip(self, waveform: np.ndarray) -> dict[str, np.ndarray]:
        """Compute the audio inputs of one clip as `extract` does, without an axis for the batch."""
        extractor: Any = self.feature_extractor
        if isinstance(extractor, ClapFeatureExtractor):
            return extract_clap(extractor, waveform)
        if hasattr(extractor, "extract_clip"):
            inputs: dict[str, np.ndarray] = extractor.extract_clip(waveform)
            return inputs
        return extract_clip(extractor, waveform)

    def stack(self, clips: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Stack results of `extract_clip` to a batch, padded to the longest clip."""
        return stack_clips(clips, getattr(self.feature_extractor, "silence_db", 0.0))

    @property
    def runs_on_device(self) -> bool:
        """Whether `on_device` supports the feature extractor: those of CED and CLAP."""
        return isinstance(self.feature_extractor, ClapFeatureExtractor) or hasattr(self.feature_extractor, "on_device")

    def on_device(self, samples: Tensor, sample_counts: Tensor) -> dict[str, Tensor]:
        """Compute the same audio inputs as `__call__` from a batch of waveforms, on the device of the waveforms.

        Args:
            samples: Waveforms (B, S) at the model's sampling rate, where S is the length of the longest clip: floats in
                [-1, 1], or int16. Values after the end of a shorter clip are ignored.
            sample_counts: Length of each clip in samples, (B,) integers.

        Raises:
            ValueError: The feature extractor runs only on the CPU.
        """
        extractor: Any = self.feature_extractor
        if isinstance(extractor, ClapFeatureExtractor):
            return extract_clap_on_device(extractor, samples, sample_counts)
        if not self.runs_on_device:
            raise ValueError(f"{type(extractor).__name__} runs only on the CPU; call the processor with the clips")
        inputs: dict[str, Tensor] = extractor.on_device(samples, sample_counts)
        return inputs

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
            if isinstance(caption, str):
                caption = unicodedata.normalize("NFC", caption)  # macOS writes accents as characters of their own
                if self.plain_captions:  # as in ML-CLAP
                    caption = " ".join(_PUNCTUATION.sub(" ", caption.lower()).split())
            if not isinstance(caption, str) or not caption.strip() or _SURROGATES.search(caption):
                raise ValueError(f"caption {index} is {captions[index]!r}; pass valid Unicode that is not blank")
            # tokenizers treat spaces at the ends differently
            captions[index] = self.caption_prefix + caption.strip()

        encoding = dict(self.tokenizer(captions, **kwargs))
        if kwargs["truncation"]:
            self._warn_of_cut(captions, encoding, kwargs["max_length"])
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
            if (code := get_flores_code(name, codes)) not in codes:
                matching = [code for code in codes if code.startswith(f"{name}_")]
                supported = matching or [iso for iso in LANGUAGES if get_flores_code(iso) in codes]
                raise ValueError(
                    f"the tokenizer has {'several languages' if matching else 'no language'} {name!r}; pass one of "
                    f"{supported}, or one of its {len(codes)} codes, such as por_Latn"
                )
            ids[ids.index(default_id)] = codes[code]
        return encoding

    def _warn_of_cut(self, captions: Sequence[str], encoding: Mapping[str, Any], limit: int) -> None:
        """Log once how many of the captions so far are longer than the limit. Of several workers, the first logs."""
        worker = get_worker_info()
        if limit in _cut_limits or (worker is not None and worker.id > 0):
            return
        _captions_before[limit] += len(captions)
        masks = encoding.get("attention_mask", encoding["input_ids"])
        full = [caption for caption, mask in zip(captions, masks, strict=True) if sum(mask) >= limit]
        cut = sum(len(ids) > limit for ids in self.tokenizer(full, verbose=False)["input_ids"]) if full else 0
        if cut:
            _cut_limits.add(limit)
            logger.warning(
                f"{cut} of the first {_captions_before[limit]} captions are longer than {limit} tokens, the limit of "
                "the tokenizer, and are cut there"
            )

    @property
    def language_tokens(self) -> tuple[dict[str, int], int | None]:
        """Token ids of the languages, by ISO 639-3 code and by code of the tokenizer, and the id of its own language.

        They are `({}, None)` if captions have no language token.
        """
        if not hasattr(self.tokenizer, "src_lang"):
            return {}, None
        codes = _language_ids(self.tokenizer)
        tokens = dict(codes)
        for name in {code[:3] for code in codes}:
            if (code := get_flores_code(name, codes)) in codes:
                tokens[name] = codes[code]
        return tokens, codes[self.tokenizer.src_lang]

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per caption. If the tokenizer has no limit, it is 514 for SONAR, otherwise 512."""
        # 1e30 in transformers means no limit
        if self.tokenizer.model_max_length < 1_000_000:
            return self.tokenizer.model_max_length
        return SONAR_MAX_TOKENS if _language_ids(self.tokenizer) else BERT_MAX_TOKENS


def extract_clip(feature_extractor: Any, waveform: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the input features of a transformers audio encoder from one clip (samples,).

    Returns:
        Dict with `input_features`, float32 of shape (T,), (T, features) or (features, T), and `audio_attention_mask`,
        (T,) int64, 1 for the clip and 0 for padding.
    """
    options: dict[str, Any] = {"sampling_rate": feature_extractor.sampling_rate, "return_tensors": "np"}
    if "return_attention_mask" in inspect.signature(feature_extractor.__call__).parameters:
        options["return_attention_mask"] = True

    fields = feature_extractor(waveform, **options)
    features = np.asarray(fields[feature_extractor.model_input_names[0]][0], dtype=np.float32)
    mask = fields["attention_mask"][0] if "attention_mask" in fields else np.ones(len(features))
    return {"input_features": features, "audio_attention_mask": np.asarray(mask, dtype=np.int64)}


def forget_last_call(tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove the truncation and padding of a tokenizer's last call, which `tokenizer.json` would contain.

    transformers reads them as `max_length` of a loaded tokenizer, and its processors then cut audio to that many
    samples.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    if backend.truncation is not None or backend.padding is not None:
        backend.no_truncation()
        backend.no_padding()
    if "truncation_strategy" in tokenizer.init_kwargs or "pad_to_multiple_of" in tokenizer.init_kwargs:
        for name in ("max_length", "stride", "truncation_strategy", "pad_to_multiple_of"):
            tokenizer.init_kwargs.pop(name, None)


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
    """Convert one text or a sequence of texts to a list. Raise ValueError for None, bytes or a dict."""
    if texts is None or isinstance(texts, bytes):
        raise ValueError(f"got {texts!r}; pass a text or a list of texts")
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
