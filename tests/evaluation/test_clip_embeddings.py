"""What is heard of a recording, and how several parts of it are scored."""

import numpy as np
import pytest
from listeners import Listener

from modeling_supclap.evaluation.clip_embeddings import AudioPolicy, ClipEmbeddings, check_pairs, matrix_of
from modeling_supclap.evaluation.embedding_models import load_embedding_model

COUNTS = [2, 1, 3]


def units(count, seed, width=6):
    vectors = np.random.default_rng(seed).standard_normal((count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def clips(pooling):
    onsets = np.concatenate([10.0 * np.arange(count) for count in COUNTS])
    return ClipEmbeddings(units(6, 0), np.array(COUNTS), onsets, pooling)


PARTS = [[0, 1], [2], [3, 4, 5]]


def test_the_mean_is_normalised_and_a_lone_chunk_untouched():
    found = clips("mean").mean
    for clip, rows in enumerate(PARTS):
        mean = units(6, 0)[rows].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(found[clip], mean / np.linalg.norm(mean), atol=1e-7)
    assert np.array_equal(found[1], units(6, 0)[2])


@pytest.mark.parametrize("pooling", ["mean", "best"])
def test_similarity_in_both_directions(pooling):
    texts = units(70, 1)
    embedded = clips(pooling)
    chunks = units(6, 0).astype(np.float64)
    if pooling == "best":
        expected = np.stack([[max(text @ chunks[row] for row in rows) for rows in PARTS] for text in texts])
    else:
        expected = texts @ embedded.mean.T
    np.testing.assert_allclose(matrix_of(embedded.similarity(texts)), expected, atol=1e-6)
    np.testing.assert_allclose(matrix_of(embedded.similarity(texts, "audio")), expected.T, atol=1e-6)
    np.testing.assert_allclose(matrix_of(embedded.similarity(texts), slice(3, 5)), expected[3:5], atol=1e-6)


def test_more_candidates_than_a_tile_holds():
    texts = units(2500, 2)
    np.testing.assert_allclose(
        matrix_of(clips("mean").similarity(texts, "audio")), clips("mean").mean @ texts.T, atol=1e-6
    )


def test_some_clips_in_another_order():
    chosen = clips("best").select([2, 0])
    assert chosen.counts.tolist() == [3, 2]
    assert np.array_equal(chosen.embeds, units(6, 0)[[3, 4, 5, 0, 1]])
    assert chosen.onset_seconds.tolist() == [0, 10, 20, 0, 10]
    assert chosen.pooling == "best"


def test_a_policy_takes_the_limit_of_its_model_and_says_what_it_does():
    listener = load_embedding_model(Listener())
    assert AudioPolicy(30.0).for_model(listener) == AudioPolicy(30.0)
    assert AudioPolicy(30.0).sentence() == "the first 30 s of each recording, embedded at once"
    listener.chunk_seconds = 10.0
    limited = AudioPolicy().for_model(listener)
    assert limited == AudioPolicy(None, 10.0, "mean")
    assert "in chunks of 10 s where it is longer; the normalised mean" in limited.sentence()
    assert AudioPolicy(chunk_seconds=5.0, pooling="best").for_model(listener).chunk_seconds == 5.0
    with pytest.raises(ValueError, match=r"chunk_seconds is 11\.0; Listener takes 10\.0 s at once"):
        AudioPolicy(chunk_seconds=11.0).for_model(listener)


@pytest.mark.parametrize("change", [{"pooling": "max"}, {"chunk_seconds": 0.0}, {"max_audio_seconds": float("nan")}])
def test_a_policy_that_means_nothing_is_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
        AudioPolicy(**change)


@pytest.mark.parametrize(
    ("audio", "text", "relevant", "message"),
    [
        (units(2, 0), units(2, 1, width=5), [[0], [1]], "their widths must be equal"),
        (units(2, 0), units(2, 1), [[0]], "got 1 lists of relevant clips for 2 texts"),
        (units(2, 0), units(2, 1), [[0], []], "text 1 has no relevant clip"),
        (np.full((2, 6), np.nan), units(2, 1), [[0], [1]], "audio_embeds must be finite"),
    ],
)
def test_embeddings_from_elsewhere_are_checked(audio, text, relevant, message):
    with pytest.raises(ValueError, match=message):
        check_pairs(audio, text, relevant)


def test_embeddings_from_elsewhere_are_normalised_with_a_warning():
    with pytest.warns(UserWarning, match="text_embeds have norms up to 3"):
        audio, text = check_pairs(units(2, 0), 3 * units(2, 1), [[0], [1]])
    np.testing.assert_allclose(text, units(2, 1), atol=1e-6)
    assert np.array_equal(audio, units(2, 0)) or np.allclose(audio, units(2, 0), atol=1e-7)
