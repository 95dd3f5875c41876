"""Parts of recordings: every sample is heard, and the best part is found."""

import numpy as np
import pytest

from modeling_supclap.audio_chunks import AudioChunks, best_chunks, cut_chunks


@pytest.mark.parametrize("length", [1, 9, 10, 11, 20, 29, 30, 31])
@pytest.mark.parametrize("chunk", [None, 10, 7])
def test_chunks_are_of_one_length_and_cover_everything(length, chunk):
    waveform = np.arange(length)
    chunks = cut_chunks(waveform, chunk)
    assert {len(part) for _, part in chunks} == {length if chunk is None else min(length, chunk)}
    assert len(chunks) == (1 if chunk is None else -(-length // chunk))
    assert set(np.concatenate([part for _, part in chunks]).tolist()) == set(range(length))
    assert all(part[0] == start for start, part in chunks)


def test_the_best_chunk_is_the_nearest_and_of_equal_ones_the_first():
    rng = np.random.default_rng(0)
    recordings, texts = [], rng.standard_normal((4, 5))
    for count in (1, 3, 2):
        embeds = rng.standard_normal((count, 5))
        recordings.append(AudioChunks(embeds, 10.0 * np.arange(count), 10.0 * np.arange(1, count + 1)))
    twins = AudioChunks(np.ones((2, 5)), np.array([0.0, 10.0]), np.array([10.0, 20.0]))
    similarity, onsets = best_chunks([*recordings, twins], texts)
    for clip, recording in enumerate(recordings):
        for number, text in enumerate(texts):
            scores = [float(embed @ text) for embed in recording.embeds]
            assert similarity[clip, number] == pytest.approx(max(scores))
            assert onsets[clip, number] == 10.0 * scores.index(max(scores))
    assert onsets[3].tolist() == [0.0] * 4
