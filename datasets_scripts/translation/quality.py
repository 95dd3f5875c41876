"""Report translation quality: counts, and the similarity between captions and their back-translations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

CaptionKey = tuple[str, int]  # clip id and caption index
Encoder = Callable[[Sequence[str]], np.ndarray]


def load_sentence_encoder(name: str, device: str | None = None) -> Encoder:
    """Load a sentence-transformers model as a function from N texts to embeddings `(N, d)`, float32 with unit norm.

    Models that were not trained on sentences, such as `roberta-large`, have high cosines for all pairs.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        advice = 'pip install "supclap[translate]", or set --back_sample 0'
        raise ImportError(f"comparing translations needs sentence-transformers: {advice}") from error
    model = SentenceTransformer(name, device=device)

    def encode(texts: Sequence[str]) -> np.ndarray:
        distinct, rows = np.unique(np.asarray(texts, dtype=object), return_inverse=True)
        return model.encode(distinct.tolist(), batch_size=64, normalize_embeddings=True, show_progress_bar=False)[rows]

    return encode


def report_translations(
    sources: Mapping[CaptionKey, str],
    translations: Mapping[CaptionKey, str],
    back_translations: Mapping[CaptionKey, str],
    encoder: Encoder | None = None,
    threshold: float = 0.7,
    num_worst: int = 10,
) -> dict[str, Any]:
    """Compute quality statistics for the translations into one language.

    The back-translation check (SupCLAP E.9) uses the cosine similarity between the embeddings of a caption and its
    back-translation. It is 1 for identical texts and around 0.1 for unrelated captions.

    `sources` contains the captions as `{(clip id, caption index): text}`. `translations` and `back_translations` have
    the same keys, except those of missing texts. If `encoder` (see `load_sentence_encoder`) is None, no cosines are
    computed.

    The result is a dict with the following entries. A mean or share is None if there are no items.

    - `captions`: number of captions; `missing`: number of captions without a translation.
    - `identical`: number of translations that equal their caption.
    - `length_ratio`: number of characters in the translation divided by the number in its caption, averaged over the
      translations (well below 1 in Chinese and Japanese).
    - `back_translated`: number of back-translations; `cosine`: their mean cosine.
    - `below_threshold`: share of cosines below the threshold.
    - `worst`: the `num_worst` captions with the lowest cosines, and their translations.
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
        entry = {"clip_id": key[0], "caption_index": key[1], "cosine": round(float(cosines[row]), 6)}
        texts = {"source": sources[key], "translation": translations[key], "back_translation": back_translations[key]}
        worst.append(entry | texts)

    identical, length_ratios = 0, []
    for key, text in translations.items():
        identical += text == sources[key]
        length_ratios.append(len(text) / len(sources[key]))
    return {
        "captions": len(sources),
        "missing": len(sources) - len(translations),
        "identical": identical,
        "length_ratio": _mean(length_ratios),
        "back_translated": len(cosines),
        "cosine": _mean(cosines),
        "below_threshold": _mean(cosines < threshold),
        "worst": worst,
    }


def format_translation_report(languages: Mapping[str, Mapping[str, Any]], threshold: float) -> str:
    """Format the results of `report_translations` as a text table, with cosines times 100 as in SupCLAP table 10."""
    below = f"below {100 * threshold:g}"
    lines = [f"language  captions  missing  identical  length  translated back  cosine  {below}"]
    for language, scores in languages.items():
        counts = f"{scores['captions']:>8,}  {scores['missing']:>7,}  {scores['identical']:>9,}"
        length = _shown(scores["length_ratio"], 1, ".2f")
        cosine, share = (_shown(scores["cosine"], 100, ".1f"), _shown(scores["below_threshold"], 100, ".1f") + " %")
        checked = f"{scores['back_translated']:>15,}  {cosine:>6}  {share:>{len(below)}}"
        lines.append(f"{language:<8}  {counts}  {length:>6}  {checked}")
    return "\n".join(lines)


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return round(float(np.mean(values)), 6) if len(values) else None


def _shown(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(factor * value, form)
