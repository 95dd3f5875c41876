"""CLAP score: the mean of the cosines of pairs."""

import numpy as np
import pytest
from scipy.spatial.distance import cosine

from modeling_supclap.metrics.clap_score import pair_similarity

RNG = np.random.default_rng(0)
AUDIO, TEXT = RNG.standard_normal((2, 30, 8)) * np.linspace(0.1, 5, 30)[:, None]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_it_is_the_cosine_of_each_pair(dtype):
    audio, text = AUDIO.astype(dtype), TEXT.astype(dtype)
    expected = [1 - cosine(*map(np.float64, pair)) for pair in zip(audio, text, strict=True)]
    assert pair_similarity(audio, text) == pytest.approx(expected, abs=1e-6)
    assert pair_similarity(3 * AUDIO, TEXT) == pytest.approx(pair_similarity(AUDIO, TEXT))


def test_rows_of_a_matrix_are_chosen_by_index(load_metric):
    metric = load_metric("clap_score")
    chosen = [4, 0, 7]
    score = metric.compute(predictions=chosen, references=chosen, audio_embeds=AUDIO, text_embeds=TEXT)
    assert score == {"clap_score": pytest.approx(pair_similarity(AUDIO, TEXT)[chosen].mean()), "num_pairs": 3}
    with pytest.raises(ValueError, match="text_embeds has shape"):
        metric.compute(predictions=chosen, references=chosen, audio_embeds=AUDIO)
    for columns, name in (({"predictions": [30]}, "audio_embeds"), ({"references": [30]}, "text_embeds")):
        inputs = {"predictions": [0], "references": [0], **columns}
        with pytest.raises(ValueError, match=rf"row index of {name} must be an integer in 0\.\.29, not 30"):
            metric.compute(**inputs, audio_embeds=AUDIO, text_embeds=TEXT)


@pytest.mark.parametrize(
    ("audio", "text", "message"),
    [
        (AUDIO, TEXT[:-1], r"\(30, 8\).*\(29, 8\)"),
        (AUDIO, TEXT[:, :4], r"\(30, 8\).*\(30, 4\)"),
        (AUDIO[0], TEXT[0], r"\(8,\)"),
        (np.where(np.arange(30)[:, None] == 3, 0, AUDIO), TEXT, r"audio_embeds\[3\]"),
        (AUDIO, np.where(np.arange(30)[:, None] == 5, np.nan, TEXT), r"text_embeds\[5\].*nan"),
    ],
)
def test_embeddings_that_are_no_pairs_are_refused(audio, text, message):
    with pytest.raises(ValueError, match=message):
        pair_similarity(audio, text)
