"""Machine translation by any seq2seq model of transformers, and what every translator of ours can do.

Both translators take a batch of texts and two ISO 639-3 codes, and give as many texts; "" stands for a text that could
not be translated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from modeling_supclap.datasets_scripts.public_names import public_name
from modeling_supclap.languages import LANGUAGE_TABLE, get_flores_code, get_iso_639_1, get_language_name

logger = logging.getLogger(__name__)


class Translator(Protocol):
    """What translates.

    Attributes:
        name: The model, as it is written down beside its translations.
        workers: How many batches it translates at a time.
    """

    name: str
    workers: int

    def check(self, source: str, target: str) -> None:
        """Raises a ValueError if it is known beforehand that it cannot translate between these languages."""

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translates texts between two languages given by ISO 639-3 codes; "" where it could not."""


class Seq2SeqTranslator:
    """A translation model of transformers.

    How a model is told the languages is found out from its tokenizer: a language token that the decoder starts from
    (NLLB, M2M100, mBART-50), a token before the text (MADLAD-400 `<2fr>`, multilingual OPUS-MT `>>fra<<`), or nothing
    at all where a model knows one pair (OPUS-MT). Others, such as T5, want a prompt.

    Args:
        name: Hub id or folder. `{source}` and `{target}` in it become ISO 639-1 codes, for models that know one pair:
            `Helsinki-NLP/opus-mt-{source}-{target}`.
        prompt: What the text is put into, such as `translate {source} to {target}: {text}`, with the languages'
            English names.
        num_beams: Hypotheses of the beam search; 1 is greedy.
        device: Where to run; a GPU where there is one.
        dtype: Of the weights, such as `bfloat16`; `auto` takes them as they are stored.
    """

    workers = 1

    def __init__(
        self, name: str, prompt: str | None = None, num_beams: int = 4, device: str | None = None, dtype: str = "auto"
    ) -> None:
        if prompt is not None and "{text}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must hold {{text}}, and may hold {{source}} and {{target}}")
        self.name, self._origin = public_name(name), name
        self.prompt = prompt
        self.num_beams = num_beams
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = dtype
        self._loaded: tuple[str, Any, Any] | None = None
        self._pair: tuple[tuple[str, str], str, dict[str, int]] | None = None

    def check(self, source: str, target: str) -> None:
        """Refuses languages that the model does not know, as far as that shows without loading one for each pair."""
        if "{" in self.name:
            self._model_name(source, target)
        else:
            self._languages(source, target)

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translates texts as `Translator.translate`, without randomness; "" for one that is too long for the model.

        Raises:
            ValueError: The model does not know a language, or nothing tells how to tell it the languages.
        """
        template, options = self._languages(source, target)
        _, tokenizer, model = self._load(source, target)
        limit = getattr(model.config, "max_position_embeddings", None) or float("inf")

        readable: dict[int, list[int]] = {}
        for place, text in enumerate(texts):
            # Not str.format: captions may hold braces.
            tokens = tokenizer(template.replace("{text}", text))["input_ids"]
            if len(tokens) > limit:
                logger.warning("%s reads %d tokens, not the %d of %r", self.name, limit, len(tokens), text)
            else:
                readable[place] = tokens

        translations = [""] * len(texts)
        if readable:
            # A model that repeats itself would go on to its own limit, for the whole batch.
            most = min(2 * max(map(len, readable.values())) + 16, limit - 1)
            search: dict[str, Any] = {"num_beams": self.num_beams, "do_sample": False, "max_new_tokens": most}
            generated = self._generate(list(readable.values()), {**options, **search}, tokenizer, model)
            for place, translation in zip(readable, generated, strict=True):
                translations[place] = translation.strip()
        return translations

    def _generate(self, tokens: list[list[int]], options: dict[str, Any], tokenizer: Any, model: Any) -> list[str]:
        inputs = tokenizer.pad({"input_ids": tokens}, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            output = model.generate(**inputs, **options)
        # The decoder's start and the language code, which not every tokenizer takes for special.
        output = output[:, 2 if "forced_bos_token_id" in options else 1 :]
        return tokenizer.batch_decode(output, skip_special_tokens=True)

    def _model_name(self, source: str, target: str) -> str:
        if "{" not in self._origin:
            return self._origin
        return self._origin.format(source=get_iso_639_1(source), target=get_iso_639_1(target))

    def _load(self, source: str, target: str) -> tuple[str, Any, Any]:
        name = self._model_name(source, target)
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # frees the memory of the pair before
            model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=self.dtype).to(self.device).eval()
            model.generation_config.max_length = None  # max_new_tokens is given with each batch
            self._loaded = name, AutoTokenizer.from_pretrained(name), model
        return self._loaded

    def _languages(self, source: str, target: str) -> tuple[str, dict[str, int]]:
        """What the texts are put into, and how generation starts; the tokenizer is set to the source language."""
        if self._pair is None or self._pair[0] != (source, target):
            _, tokenizer, model = self._load(source, target)
            self._pair = (source, target), *self._tell(tokenizer, model, source, target)
        return self._pair[1:]

    def _tell(self, tokenizer: Any, model: Any, source: str, target: str) -> tuple[str, dict[str, int]]:
        if self.prompt is not None:
            names = {"source": get_language_name(source), "target": get_language_name(target)}
            return re.sub(r"\{(source|target)\}", lambda field: names[field[1]], self.prompt), {}

        vocabulary = tokenizer.get_vocab()
        if hasattr(tokenizer, "src_lang"):
            # NLLB's codes are tokens; a piece such as "en" is none.
            tokens = {token: number for token, number in vocabulary.items() if "_" in token}
            codes = getattr(tokenizer, "lang_code_to_id", None) or tokens
            tokenizer.src_lang = self._code(codes, source)
            return "{text}", {"forced_bos_token_id": codes[self._code(codes, target)]}

        short = get_iso_639_1(target) if target in LANGUAGE_TABLE else target
        for token in (f"<2{short}>", f">>{target}<<", f">>{short}<<"):
            if token in vocabulary:
                return f"{token} {{text}}", {}
        if model.config.model_type == "marian" and not any(token.startswith(">>") for token in vocabulary):
            return "{text}", {}

        raise ValueError(
            f"nothing tells how {self.name} is told to translate into {target!r}; give a prompt such as "
            "'translate {source} to {target}: {text}'"
        )

    def _code(self, codes: Mapping[str, int], language: str) -> str:
        """What the tokenizer calls a language: `fra_Latn` in NLLB, `fr` in M2M100, `fr_XX` in mBART-50."""
        short = get_iso_639_1(language) if language in LANGUAGE_TABLE else language
        pattern = re.compile(rf"{language}_[A-Z][a-z]{{3}}|{short}(_[A-Z]{{2}})?")
        if get_flores_code(language) in codes:
            return get_flores_code(language)
        found = sorted(code for code in codes if pattern.fullmatch(code))
        if len(found) != 1:
            what = f"several: {', '.join(found)}" if found else "none"
            raise ValueError(f"{self.name} should have one language code for {language!r}; it has {what}")
        return found[0]
