"""Recordings and captions, in any of the tokenizer's languages, to the inputs of `SupCLAPModel`."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin, SequenceFeatureExtractor

# ISO 639-3 codes of the papers' eight languages in the notation of NLLB and SONAR (FLORES-200).
FLORES_CODES = {
    "eng": "eng_Latn",
    "fra": "fra_Latn",
    "deu": "deu_Latn",
    "spa": "spa_Latn",
    "nld": "nld_Latn",
    "cat": "cat_Latn",
    "jpn": "jpn_Jpan",
    "zho": "zho_Hans",
}
# Where the tokenizer states no limit: SONAR was trained on 514 tokens, BERT and its kin on 512.
SONAR_MAX_TOKENS = 514
BERT_MAX_TOKENS = 512


class SupCLAPProcessor(ProcessorMixin):
    """One object for a model's inputs: a feature extractor for recordings and a tokenizer for captions.

    Args:
        feature_extractor: Turns waveforms into the audio tower's input. CLAP's would cut a longer clip at a random
            place, so it gets the first 10 s (its `max_length_s`); it resamples nothing and refuses other rates.
        tokenizer: Turns captions into the text tower's input. One of NLLB's kind gets the language of each caption
            as its language token; any other ignores the language.
    """

    def __init__(
        self, feature_extractor: SequenceFeatureExtractor, tokenizer: PreTrainedTokenizerBase, **kwargs: Any
    ) -> None:
        super().__init__(feature_extractor, tokenizer, **kwargs)

    def __call__(
        self,
        audio: Any = None,
        text: str | Sequence[str] | None = None,
        sampling_rate: float | None = None,
        language: str | Sequence[str] | None = None,
        padding: bool | str = True,
        truncation: bool | str = True,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> BatchFeature:
        """Makes model inputs of recordings, of captions, or of both; their numbers may differ.

        Args:
            audio: One clip or a list of clips, as the feature extractor takes them.
            text: One caption or a list of captions.
            sampling_rate: Rate of all the clips in hertz.
            language: ISO 639-3 code of the captions ("fra"), or a list with one for each; full codes of the
                tokenizer ("por_Latn") pass through. None is the tokenizer's own setting.
            padding: As the tokenizer's: True pads to the longest caption.
            truncation: As the tokenizer's: True cuts captions at `max_length`.
            max_length: Most tokens of a caption; None is the tokenizer's limit, or the text tower's usual one.
            return_tensors: "pt" for torch tensors, "np" for numpy arrays, None for what each part makes.

        Returns:
            The feature extractor's fields (`input_features` and `audio_attention_mask`, or CLAP's `is_longer`) and the
            tokenizer's (`input_ids`, `attention_mask`, for some `token_type_ids`).

        Raises:
            ValueError: There is neither audio nor text, a caption is blank, the tokenizer lacks a language, or a clip
                is unusable.
        """
        if audio is None and text is None:
            raise ValueError("there is nothing to process; give audio, text or both")
        data: dict[str, Any] = {}
        if audio is not None:
            data.update(self._extract(audio, sampling_rate=sampling_rate, return_tensors=return_tensors))
        if text is not None:
            if max_length is None and (truncation or padding == "max_length"):
                max_length = self._max_tokens()
            data.update(self._tokenize(text, language, padding=padding, truncation=truncation, max_length=max_length))
        return BatchFeature(data, tensor_type=return_tensors)

    def _extract(self, audio: Any, **kwargs: Any) -> dict[str, Any]:
        """The feature extractor's fields, the same for the same clip whatever its batch mates."""
        if "is_longer" not in self.feature_extractor.model_input_names:
            return self.feature_extractor(audio, **kwargs)
        clips = [audio] if np.ndim(audio[0]) == 0 else audio
        features = self.feature_extractor([clip[: self.feature_extractor.nb_max_samples] for clip in clips], **kwargs)
        # CLAP's extractor calls one clip of a batch long, drawn at random, where none is.
        return {**features, "is_longer": [[False]] * len(clips)}

    def _tokenize(
        self, text: str | Sequence[str], language: str | Sequence[str] | None, **kwargs: Any
    ) -> dict[str, list[list[int]]]:
        """Token ids and masks as lists, each caption under its own language token."""
        captions = _check_captions([text] if isinstance(text, str) else list(text))
        encoding = dict(self.tokenizer(captions, **kwargs))
        if language is None:
            return encoding
        languages = [language] * len(captions) if isinstance(language, str) else list(language)
        if len(languages) != len(captions):
            raise ValueError(f"got {len(languages)} languages for {len(captions)} captions; give one, or one for each")
        if hasattr(self.tokenizer, "src_lang"):
            # One call for all languages: the tokenizer's src_lang is a setting for a whole batch, and stays as it is.
            codes = _language_ids(self.tokenizer)
            placed = self.tokenizer.convert_tokens_to_ids(self.tokenizer.src_lang)
            for ids, name in zip(encoding["input_ids"], languages, strict=True):
                ids[ids.index(placed)] = _language_id(name, codes)
        return encoding

    def _max_tokens(self) -> int:
        if self.tokenizer.model_max_length < 1_000_000:  # transformers writes 1e30 where the tokenizer has no limit
            return self.tokenizer.model_max_length
        return SONAR_MAX_TOKENS if _language_ids(self.tokenizer) else BERT_MAX_TOKENS


def _check_captions(captions: list[str]) -> list[str]:
    """Captions without blanks at their ends, where tokenizers of one model disagree; or an error that names one."""
    if not captions:
        raise ValueError("there is no caption; got an empty list")
    for index, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise ValueError(f"caption {index} must be a string, got {type(caption).__name__}: {caption!r}")
        if not caption.strip():
            raise ValueError(f"caption {index} is blank: {caption!r}; leave the clip out or give it words")
    return [caption.strip() for caption in captions]


def _language_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The language tokens of an NLLB-type tokenizer with their ids."""
    is_code = re.compile("[a-z]{3}_[A-Z][a-z]{3}").fullmatch
    return {token: index for token, index in tokenizer.get_added_vocab().items() if is_code(token)}


def _language_id(language: str, codes: dict[str, int]) -> int:
    code = FLORES_CODES.get(language, language)
    if code not in codes:
        ours = [iso for iso, flores in FLORES_CODES.items() if flores in codes]
        raise ValueError(
            f"the tokenizer has no language {language!r}; it has {', '.join(ours) or 'none of ours'} and "
            f"{len(codes) - len(ours)} more, which are given by their full codes such as por_Latn"
        )
    return codes[code]
