"""How good translations are: what can be counted, and how much of the meaning survives the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

Place = tuple[str, int]  # clip and caption index

MAX_TOKENS = 512  # of RoBERTa and BERT; a longer text is cut


class SentenceEncoder:
    """Sentence embeddings: the mean of an encoder's last hidden states over the tokens of a text, unit norm.

    Args:
        name: Hub id or folder of an encoder of transformers that was trained for this, such as
            `sentence-transformers/all-roberta-large-v1`. Of one that was not, such as `roberta-large`, any two texts
            are similar.
        batch_size: Texts at a time.
        device: Where to run; a GPU where there is one.
    """

    def __init__(self, name: str, batch_size: int = 64, device: str | None = None) -> None:
        self.name = name
        self.batch_size = batch_size
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModel.from_pretrained(name, dtype=torch.float32).to(self.device).eval()
        self.max_tokens = min(self.tokenizer.model_max_length, MAX_TOKENS)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embeds N texts, each distinct one once: `(N, d)`, float32, unit norm."""
        distinct = sorted(set(texts), key=lambda text: (-len(text), text))
        starts = range(0, len(distinct), self.batch_size)
        batches = [self._embed(distinct[start : start + self.batch_size]) for start in starts]
        row_of = {text: row for row, text in enumerate(distinct)}
        width = self.model.config.hidden_size
        return np.concatenate([np.zeros((0, width), np.float32), *batches])[[row_of[text] for text in texts]]

    def _embed(self, texts: list[str]) -> np.ndarray:
        options = {"padding": True, "truncation": True, "max_length": self.max_tokens, "return_tensors": "pt"}
        inputs = self.tokenizer(texts, **options).to(self.device)
        with torch.inference_mode():
            states = self.model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        means = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=-1).cpu().numpy()


def report_translations(
    sources: Mapping[Place, str],
    translations: Mapping[Place, str],
    back_translations: Mapping[Place, str],
    encoder: Callable[[Sequence[str]], np.ndarray] | None = None,
    threshold: float = 0.7,
    num_worst: int = 10,
) -> dict[str, Any]:
    """What can be said about the translations into one language.

    Args:
        sources: The captions, by clip and place.
        translations: Their translations, for as many as there are.
        back_translations: The translations translated back, for as many as are to be compared.
        encoder: Gives N texts' embeddings `(N, d)`, unit norm, such as `SentenceEncoder`; not needed where nothing
            was translated back.
        threshold: Cosines below it are counted.
        num_worst: How many of the worst to list.

    Returns:
        `captions`, how many; `missing`, without a translation; `identical`, the same as their caption;
        `length_ratio`, the mean of characters over the caption's characters (well below 1 in Chinese and Japanese).
        Of the back-translation check [S E.9], with the cosine of the embeddings of a caption and of what came back
        (1 when all of the meaning did, around 0.1 for captions that have nothing in common): `back_translated`, how
        many; `cosine`, the mean; `below_threshold`, the share. And `worst`, those of the lowest cosine with all their
        texts. A mean or share of nothing is None.
    """
    keys = sorted(back_translations)
    cosines = np.zeros(0)
    if keys and encoder is not None:
        before, after = (encoder([texts[key] for key in keys]) for texts in (sources, back_translations))
        cosines = (before.astype(np.float64) * after).sum(1)
    ratios = [len(text) / len(sources[key]) for key, text in translations.items()]
    worst = [
        {
            "clip_id": keys[row][0],
            "caption_index": keys[row][1],
            "cosine": round(float(cosines[row]), 6),
            "source": sources[keys[row]],
            "translation": translations[keys[row]],
            "back_translation": back_translations[keys[row]],
        }
        for row in np.argsort(cosines, kind="stable")[:num_worst].tolist()
    ]
    return {
        "captions": len(sources),
        "missing": len(sources) - len(translations),
        "identical": sum(text == sources[key] for key, text in translations.items()),
        "length_ratio": _mean(ratios),
        "back_translated": len(cosines),
        "cosine": _mean(cosines),
        "below_threshold": _mean(cosines < threshold),
        "worst": worst,
    }


def format_translation_report(languages: Mapping[str, Mapping[str, Any]], threshold: float) -> str:
    """A table of what `report_translations` gives, one line a language; cosines in percent as in [S table 10]."""
    titles = ("language", "captions", "missing", "identical", "length", "translated back", "cosine")
    lines = ["  ".join([*titles, f"below {100 * threshold:g}"])]
    for language, scores in languages.items():
        fields = [language, f"{scores['captions']:,}", f"{scores['missing']:,}", f"{scores['identical']:,}"]
        fields += [_shown(scores["length_ratio"], 1, ".2f"), f"{scores['back_translated']:,}"]
        fields += [_shown(scores["cosine"], 100, ".1f"), _shown(scores["below_threshold"], 100, ".1f") + " %"]
        widths = [len(title) for title in (*titles, "below 70")]
        shown = [f"{field:>{width}}" for field, width in zip(fields[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{language:{widths[0]}}", *shown]))
    return "\n".join(lines)


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return round(float(np.mean(values)), 6) if len(values) else None


def _shown(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(factor * value, form)
