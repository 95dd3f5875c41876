"""How good translations are: what can be counted, and how much of the meaning survives the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Place = tuple[str, int]  # clip and caption index
Encoder = Callable[[Sequence[str]], np.ndarray]


def load_sentence_encoder(name: str, device: str | None = None) -> Encoder:
    """A function from N texts to their embeddings `(N, d)`, float32, unit norm.

    Args:
        name: The Hub id or folder of a model for sentence-transformers, such as
            `sentence-transformers/all-roberta-large-v1`. An encoder that was not trained for this, such as
            `roberta-large`, loads too, but finds any two texts similar.
        device: Where to run; a GPU where there is one.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            'comparing translations needs sentence-transformers: pip install "supclap[translate]", or --back_sample 0'
        ) from error
    model = SentenceTransformer(name, device=device)

    def encode(texts: Sequence[str]) -> np.ndarray:
        distinct, rows = np.unique(np.asarray(texts, dtype=object), return_inverse=True)
        return model.encode(distinct.tolist(), batch_size=64, normalize_embeddings=True, show_progress_bar=False)[rows]

    return encode


def report_translations(
    sources: Mapping[Place, str],
    translations: Mapping[Place, str],
    back_translations: Mapping[Place, str],
    encoder: Encoder | None = None,
    threshold: float = 0.7,
    num_worst: int = 10,
) -> dict[str, Any]:
    """What can be said about the translations into one language.

    Args:
        sources: The captions, by clip and place.
        translations: Their translations, for as many as there are.
        back_translations: The translations translated back, for as many as are to be compared.
        encoder: Gives the embeddings of N texts, as `load_sentence_encoder` does; not needed where nothing was
            translated back.
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
        before = encoder(list(map(sources.__getitem__, keys)))
        after = encoder(list(map(back_translations.__getitem__, keys)))
        cosines = (before.astype(np.float64) * after).sum(1)

    worst = []
    for row in np.argsort(cosines, kind="stable")[:num_worst].tolist():
        key = keys[row]
        worst.append(
            {
                "clip_id": key[0],
                "caption_index": key[1],
                "cosine": round(float(cosines[row]), 6),
                "source": sources[key],
                "translation": translations[key],
                "back_translation": back_translations[key],
            }
        )

    ratios, identical = [], 0
    for key, text in translations.items():
        ratios.append(len(text) / len(sources[key]))
        identical += text == sources[key]

    return {
        "captions": len(sources),
        "missing": len(sources) - len(translations),
        "identical": identical,
        "length_ratio": _mean(ratios),
        "back_translated": len(cosines),
        "cosine": _mean(cosines),
        "below_threshold": _mean(cosines < threshold),
        "worst": worst,
    }


def format_translation_report(languages: Mapping[str, Mapping[str, Any]], threshold: float) -> str:
    """A table of what `report_translations` gives, one line a language; cosines in percent as in [S table 10]."""
    below = f"below {100 * threshold:g}"
    lines = [f"language  captions  missing  identical  length  translated back  cosine  {below}"]
    for language, scores in languages.items():
        counts = f"{scores['captions']:>8,}  {scores['missing']:>7,}  {scores['identical']:>9,}"
        length = _shown(scores["length_ratio"], 1, ".2f")
        cosine, share = _shown(scores["cosine"], 100, ".1f"), _shown(scores["below_threshold"], 100, ".1f") + " %"
        checked = f"{scores['back_translated']:>15,}  {cosine:>6}  {share:>{len(below)}}"
        lines.append(f"{language:<8}  {counts}  {length:>6}  {checked}")
    return "\n".join(lines)


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return round(float(np.mean(values)), 6) if len(values) else None


def _shown(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(factor * value, form)
