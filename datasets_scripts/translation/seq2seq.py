"""Translator interface, and machine translation with any transformers seq2seq model."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from modeling_supclap.datasets_scripts.public_names import public_name
from modeling_supclap.languages import get_flores_code, get_iso_639_1, get_language_name

logger = logging.getLogger(__name__)


class Translator(Protocol):
    """Interface of translators."""

    name: str  # of the model
    workers: int  # number of batches to translate in parallel

    def check(self, source: str, target: str) -> None:
        """Raise ValueError if the translator does not support a language."""

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translate texts from `source` to `target` (ISO 639-3 codes); return "" if a text cannot be translated."""


class Seq2SeqTranslator:
    """Translator that uses a transformers seq2seq model.

    The target language is set as the model requires. NLLB, M2M100 and mBART-50 need a language code as the first
    decoder token. MADLAD-400 (`<2fr>`) and multilingual OPUS-MT (`>>fra<<`) need a token before the text. Models for a
    single language pair (OPUS-MT) need no token. Other models, such as T5, need a prompt.

    Args:
        name: Hub id or folder. The fields `{source}` and `{target}`, as in `Helsinki-NLP/opus-mt-{source}-{target}`,
            are replaced with ISO 639-1 codes.
        prompt: Template such as `translate {source} to {target}: {text}`. `{source}` and `{target}` are replaced with
            English language names. ValueError is raised without `{text}`.
        num_beams: Number of beams in beam search; 1 is greedy search.
        dtype: Data type of the weights, such as `bfloat16`. `auto`: the dtype of the checkpoint.
    """

    workers = 1

    def __init__(
        self, name: str, prompt: str | None = None, num_beams: int = 4, device: str | None = None, dtype: str = "auto"
    ) -> None:
        if prompt is not None and "{text}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must contain {{text}}; {{source}} and {{target}} are optional")
        self.name, self._origin = public_name(name), name
        self.prompt = prompt
        self.num_beams = num_beams
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = dtype
        self._loaded: tuple[str, Any, Any, dict[str, int]] | None = None

    def check(self, source: str, target: str) -> None:
        """Raise ValueError if the model does not support a language, or needs a prompt that is missing.

        If there is one model per language pair, only the language codes are checked, because loading takes too long.
        """
        if "{" in self.name:
            self._model_name(source, target)
        else:
            self._languages(source, target)

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translate texts without sampling; return "" for a text that is too long. Raises the errors of `check`."""
        template, options = self._languages(source, target)
        _, tokenizer, model, _ = self._load(source, target)
        limit = getattr(model.config, "max_position_embeddings", None) or float("inf")

        readable: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            # str.format would fail on captions with braces.
            tokens = tokenizer(template.replace("{text}", text))["input_ids"]
            if len(tokens) > limit:
                logger.warning("%s accepts %d tokens; skipped %r with %d", self.name, limit, text, len(tokens))
            else:
                readable[index] = tokens

        translations = [""] * len(texts)
        if not readable:
            return translations

        # Without this limit, one text with endless repetition would slow down the whole batch.
        most = min(2 * max(map(len, readable.values())) + 16, limit - 1)
        inputs = tokenizer.pad({"input_ids": list(readable.values())}, return_tensors="pt").to(self.device)
        search: dict[str, Any] = {"num_beams": self.num_beams, "do_sample": False, "max_new_tokens": most}
        with torch.inference_mode():
            output = model.generate(**inputs, **options, **search)
        # Remove the start token and the language code, which some tokenizers do not treat as special.
        output = output[:, 2 if options else 1 :]
        generated = tokenizer.batch_decode(output, skip_special_tokens=True)
        for index, translation in zip(readable, generated, strict=True):
            translations[index] = translation.strip()
        return translations

    def _model_name(self, source: str, target: str) -> str:
        if "{" not in self._origin:
            return self._origin
        return self._origin.format(source=get_iso_639_1(source), target=get_iso_639_1(target))

    def _load(self, source: str, target: str) -> tuple[str, Any, Any, dict[str, int]]:
        """Load the model for a language pair; return (name, tokenizer, model, vocabulary). Cache the last model."""
        name = self._model_name(source, target)
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=self.dtype, trust_remote_code=False)
            model = model.to(self.device)
            model.generation_config.max_length = None  # each batch sets max_new_tokens
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self._loaded = name, tokenizer, model, tokenizer.get_vocab()
        return self._loaded

    def _languages(self, source: str, target: str) -> tuple[str, dict[str, int]]:
        """Set the source language of the tokenizer; return the text template and the options for `generate`."""
        _, tokenizer, model, vocabulary = self._load(source, target)
        if self.prompt is not None:
            names = {"source": get_language_name(source), "target": get_language_name(target)}
            return re.sub(r"\{(source|target)\}", lambda field: names[field[1]], self.prompt), {}

        if hasattr(tokenizer, "src_lang"):
            # NLLB's language codes are tokens with "_"; a word piece such as "en" is not a language code.
            tokens = {token: number for token, number in vocabulary.items() if "_" in token}
            codes = getattr(tokenizer, "lang_code_to_id", None) or tokens
            tokenizer.src_lang = self._code(codes, source)
            return "{text}", {"forced_bos_token_id": codes[self._code(codes, target)]}

        short = get_iso_639_1(target)
        for token in (f"<2{short}>", f">>{target}<<", f">>{short}<<"):
            if token in vocabulary:
                return f"{token} {{text}}", {}
        if model.config.model_type == "marian" and not any(token.startswith(">>") for token in vocabulary):
            return "{text}", {}

        advice = "give a prompt such as 'translate {source} to {target}: {text}'"
        raise ValueError(f"{self.name} has no known way to select the target language {target!r}; {advice}")

    def _code(self, codes: Mapping[str, int], language: str) -> str:
        """Return the language code of the tokenizer, such as `fra_Latn` (NLLB), `fr` (M2M100) or `fr_XX` (mBART-50)."""
        short = get_iso_639_1(language)
        pattern = re.compile(rf"{language}_[A-Z][a-z]{{3}}|{short}(_[A-Z]{{2}})?")
        if get_flores_code(language) in codes:
            return get_flores_code(language)
        matching = sorted(code for code in codes if pattern.fullmatch(code))
        if len(matching) != 1:
            number = f"several: {', '.join(matching)}" if matching else "none"
            raise ValueError(f"{self.name} must have one language code for {language!r}; it has {number}")
        return matching[0]
