"""Embedding a split: missing recordings, the name of the data, and no repeated embedding."""

from pathlib import Path

import builders
import numpy as np
import pytest
import soundfile
import torch
from builders import RATE_HZ, noise
from datasets import Dataset
from fake_models import ToneModel, caption_tones
from recordings import tone_rows

from modeling_supclap.datasets_scripts import progress
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.evaluation import embed
from modeling_supclap.evaluation.cache import EmbeddingCache
from modeling_supclap.evaluation.embed import (
    AudioPolicy,
    ClipEmbeddings,
    EmbeddedSplit,
    embed_split,
    hash_dataset,
    hash_recordings,
)
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.evaluation.options import EvaluationOptions
from modeling_supclap.evaluation.retrieval import evaluate_retrieval
from modeling_supclap.metrics.recall import LazySimilarity
from modeling_supclap.training.collator import TrainingCollator
from modeling_supclap.waveform import resample


@pytest.fixture
def rows(tmp_path):
    """Rows of eight tones."""
    return tone_rows(tmp_path)


def test_a_second_run_embeds_nothing(tmp_path, rows):
    model = ToneModel()
    splits = [
        embed_split(load_embedding_model(model), rows, cache=EmbeddingCache(tmp_path / "cache")) for _ in range(2)
    ]
    assert model.calls == [("audio", 8, RATE_HZ)]
    for split in splits:
        split.texts(["tone 1", "tone 2", "tone 1"], "eng")
    assert model.calls[1:] == [("text", 2, "eng")]
    assert np.array_equal(splits[0].clips.embeds, splits[1].clips.embeds)
    assert splits[1].cache.embedded == 0
    embedded = []
    splits[1].model.encode_text = lambda texts, *_: embedded.extend(texts) or np.ones((len(texts), 41))
    splits[1].texts([f"tone {number}" for number in (3, 7, 4, 1, 6, 5)], "eng")
    assert embedded == [f"tone {number}" for number in (3, 4, 5, 6, 7)]  # sorted, because they name the cached file
    first, second, again = splits[1].texts(["tone 1", "tone 2", "tone 1"], "eng")
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_other_audio_policy_or_model_is_embedded_again(tmp_path, rows):
    cache, model = EmbeddingCache(tmp_path / "cache"), ToneModel()
    embed_split(load_embedding_model(model), rows, cache=cache)
    for policy in (AudioPolicy(max_audio_seconds=0.25), AudioPolicy(chunk_seconds=0.25)):
        embed_split(load_embedding_model(model), rows, policy, cache)
    soundfile.write(rows[0]["audio_path"], 0.1 * noise(9000), RATE_HZ)
    embed_split(load_embedding_model(model), rows, cache=cache)
    other = ToneModel()
    other.fingerprint = "other"
    embed_split(load_embedding_model(other), rows, cache=cache)
    model.sampling_rate = RATE_HZ // 2
    embed_split(load_embedding_model(model), rows, cache=cache)
    finer = load_embedding_model(model)
    finer.resampling_method = "sinc_interp_hann"
    embed_split(finer, rows, cache=cache)
    other.fingerprint = None
    for _ in range(2):
        embed_split(load_embedding_model(other), rows, cache=cache)
    assert [count for _, count, _ in model.calls] == [8, 8, 16, 8, 8, 8]
    assert len(other.calls) == 3


def test_texts_of_a_model_that_is_not_cached_are_embedded_once_a_split(rows):
    model = ToneModel()
    model.fingerprint = None
    split = embed_split(load_embedding_model(model), rows)
    first, again = (split.texts(["tone 1", "tone 2"], "eng") for _ in range(2))
    assert model.calls[1:] == [("text", 2, "eng")]
    assert np.array_equal(first, again)


def test_the_batch_size_changes_nothing(rows):
    whole = embed_split(load_embedding_model(ToneModel()), rows, AudioPolicy(chunk_seconds=0.3)).clips
    model, sizes = ToneModel(), []
    adapted = load_embedding_model(model)
    encode = adapted.encode_text
    adapted.encode_text = lambda texts, language, size: sizes.append(size) or encode(texts, language, size)
    split = embed_split(adapted, rows, AudioPolicy(chunk_seconds=0.3), batch_size=6)
    parts = split.clips
    assert [count for _, count, _ in model.calls] == [6, 6, 4]
    split.texts(["tone 1"], "eng")
    assert sizes == [6]
    for name in ("embeds", "counts"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    assert parts.counts.tolist() == [2] * 8


def test_the_parts_of_a_mixture_have_their_own_clips(rows):
    """The model matches all captions of dataset a; in b, it matches each caption to the next clip."""
    mixed, tones = [], caption_tones(rows)
    for number, row in enumerate(rows):
        mixed.append({**row, "dataset": "ab"[number % 2]})
        if number % 2:
            tones |= dict.fromkeys(row["captions"]["eng"], (number + 2) % 8)
    split = embed_split(load_embedding_model(ToneModel(tones)), Dataset.from_list(mixed))
    parts = split.by_dataset()
    assert list(parts) == ["a", "b"]
    recalls = {}
    for name, part in parts.items():
        assert [row["clip_id"] for row in part.rows] == part.ids.tolist() == part.dataset["clip_id"][:]
        scores, _, _ = evaluate_retrieval(part, EvaluationOptions(languages=["eng"]))
        recalls[name] = scores["retrieval"]["eng"]["t2a"]["R@1"]["value"]
    assert recalls == {"a": 1.0, "b": 0.0}


def test_the_hash_of_the_data_depends_only_on_their_content(tmp_path, rows):
    def name(rows):
        split = embed_split(load_embedding_model(ToneModel()), rows)
        return hash_dataset(split.rows, split.files)

    (tmp_path / "elsewhere").mkdir()
    original = name(rows)
    assert name(tone_rows(tmp_path / "elsewhere")[::-1]) == original
    for change in ({"clip_id": "other"}, {"captions": {"eng": ["other"], "fra": []}}, {"labels": ["other"]}):
        assert name([{**rows[0], **change}, *rows[1:]]) != original
    soundfile.write(rows[0]["audio_path"], 0.1 * noise(9000), RATE_HZ)
    assert name(rows) != original
    assert hash_dataset(rows, {row["clip_id"]: "same" for row in rows}) == hash_dataset(
        rows[::-1], {row["clip_id"]: "same" for row in rows}
    )


def test_equal_samples_at_two_rates_are_two_recordings():
    rows = [
        {"clip_id": str(rate_hz), "samples": np.arange(800, dtype=np.int16).tobytes(), "sampling_rate_hz": rate_hz}
        for rate_hz in (16_000, 8_000)
    ]
    assert len(set(hash_recordings(rows).values())) == 2
    assert len(set(hash_recordings([rows[0], {**rows[0], "clip_id": "b"}]).values())) == 1


def spoiled(rows, tmp_path):
    """Return the rows with three bad recordings: a missing file, a file that is not audio, and silence."""
    (tmp_path / "bad.wav").write_bytes(b"RIFF nothing of use")
    soundfile.write(tmp_path / "silent.wav", np.zeros(8000), RATE_HZ)
    paths = {1: "nothing.wav", 4: "bad.wav", 6: "silent.wav"}
    return [{**row, "audio_path": str(tmp_path / paths[i])} if i in paths else row for i, row in enumerate(rows)]


def test_missing_recordings_are_an_error_or_left_out_and_named(tmp_path, rows):
    bad, cache = spoiled(rows, tmp_path), EmbeddingCache(tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match=r"clip1.*nothing\.wav"):
        embed_split(load_embedding_model(ToneModel()), bad, cache=cache)
    with pytest.raises(BadAudioError, match=r"bad\.wav"):
        embed_split(load_embedding_model(ToneModel()), bad[2:], cache=cache)
    for model in (ToneModel(), ToneModel()):
        split = embed_split(load_embedding_model(model), bad, cache=cache, on_bad_audio="skip")
        assert split.missing == ["clip1", "clip4", "clip6"]
        assert [row["clip_id"] for row in split.rows] == ["clip0", "clip2", "clip3", "clip5", "clip7"]
        good = [row for i, row in enumerate(rows) if i not in (1, 4, 6)]
        alone = embed_split(load_embedding_model(ToneModel()), good)
        assert np.array_equal(split.clips.mean, alone.clips.mean)
        assert hash_dataset(split.rows, split.files) == hash_dataset(alone.rows, alone.files)
    assert model.calls == []  # the cache contains the names of unreadable recordings
    with pytest.raises(BadAudioError, match=r"bad\.wav"):
        embed_split(load_embedding_model(ToneModel()), [bad[i] for i in (0, 2, 3, 4, 5, 6, 7)], cache=cache)


def test_a_split_without_readable_audio_is_an_error(tmp_path, rows):
    bad = spoiled(rows, tmp_path)
    with pytest.raises(ValueError, match=r"\b1\b"):
        embed_split(load_embedding_model(ToneModel()), [bad[1]], on_bad_audio="skip")
    with pytest.raises(ValueError, match=r"\b2\b"):
        embed_split(load_embedding_model(ToneModel()), [bad[4], bad[6]], on_bad_audio="skip")


def test_a_recording_shorter_than_the_model_needs_is_bad(rows):
    model = load_embedding_model(ToneModel())
    model.min_seconds = 0.6
    with pytest.raises(BadAudioError, match=r"clip0.*0\.5000"):
        embed_split(model, rows)


def test_a_short_recording_is_padded_if_requested(rows, tmp_path):
    lengths = []

    class Model(ToneModel):
        def encode_audio(self, audio, sampling_rate):
            lengths.extend(map(len, audio))
            return super().encode_audio(audio, sampling_rate)

    model, cache = load_embedding_model(Model()), EmbeddingCache(tmp_path / "cache")
    model.min_seconds, model.fingerprint = 0.6, "fingerprint"
    with pytest.raises(ValueError, match=r"\b2\b"):
        embed_split(model, rows[:2], cache=cache, on_bad_audio="skip")
    padded = embed_split(model, rows[:2], AudioPolicy(pad_short_clips=True), cache, on_bad_audio="skip")
    assert len(padded.ids) == 2
    assert set(lengths) == {round(0.6 * model.sampling_rate_hz)}
    assert "padded" in padded.policy.sentence()


def test_parts_of_a_recording_are_embedded_apart(tmp_path, rows):
    low, high = (soundfile.read(rows[index]["audio_path"])[0] for index in (0, 5))
    soundfile.write(tmp_path / "long.wav", np.concatenate([low, high]), RATE_HZ)
    times = ((None, None), (0.0, len(low) / RATE_HZ), (len(low) / RATE_HZ, None))
    parts = []
    for number, (start, end) in enumerate(times):
        part = {"clip_id": str(number), "audio_path": str(tmp_path / "long.wav")}
        parts.append({**rows[0], **part, "start_seconds": start, "end_seconds": end})
    cache = EmbeddingCache(tmp_path / "cache")
    whole = embed_split(load_embedding_model(ToneModel()), [rows[0], rows[5]], cache=cache)
    split = embed_split(load_embedding_model(ToneModel()), parts, cache=cache)
    np.testing.assert_array_equal(split.clips.embeds[1:], whole.clips.embeds)
    assert len(set(split.files.values())) == 3


@pytest.mark.parametrize(
    ("choose", "message"), [(lambda rows: [], "split.*empty"), (lambda rows: [rows[0], rows[0]], "'clip0'")]
)
def test_an_invalid_split_is_an_error(rows, choose, message):
    with pytest.raises(ValueError, match=message):
        embed_split(load_embedding_model(ToneModel()), choose(rows))


def test_rows_may_hold_their_audio(tmp_path, rows):
    plain = Dataset.from_list(rows)
    with_bytes = plain.map(lambda row: {"audio": {"bytes": Path(row["audio_path"]).read_bytes(), "path": None}})
    with_bytes = with_bytes.map(lambda row: {"audio_path": "gone.wav"})
    found = embed_split(load_embedding_model(ToneModel()), with_bytes)
    expected = embed_split(load_embedding_model(ToneModel()), plain)
    assert np.array_equal(found.clips.embeds, expected.clips.embeds)
    assert hash_dataset(found.rows, found.files) == hash_dataset(expected.rows, expected.files)
    assert "audio" not in found.rows[0]


def test_texts_are_kept_apart_by_model_and_language(tmp_path, rows):
    cache = EmbeddingCache(tmp_path / "cache")
    models = [ToneModel({"rain": 1}), ToneModel({"rain": 2})]
    models[1].fingerprint = "another"
    found = [embed_split(load_embedding_model(one), rows, cache=cache).texts(["rain"], "eng") for one in models]
    assert not np.array_equal(*found)
    embed_split(load_embedding_model(models[0]), rows, cache=cache).texts(["rain"], "fra")
    assert [language for kind, _, language in models[0].calls if kind == "text"] == ["eng", "fra"]


# ---- parts of recordings ----

COUNTS = [2, 1, 3]


def units(count, seed, width=6):
    vectors = np.random.default_rng(seed).standard_normal((count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def clips(pooling):
    return ClipEmbeddings(units(6, 0), np.array(COUNTS), pooling)


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
    np.testing.assert_allclose(embedded.similarity(texts)[:], expected, atol=1e-6)
    np.testing.assert_allclose(embedded.similarity(texts).T[:], expected.T, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "best"])
def test_a_large_similarity_is_computed_in_tiles(monkeypatch, pooling):
    monkeypatch.setattr(embed, "_STORED_SIMILARITIES", 12)
    embedded = ClipEmbeddings(units(4, 0), np.ones(4, int), pooling)
    small, large = (embedded.similarity(units(count, 1)) for count in (3, 4))
    assert isinstance(small, np.ndarray)
    assert isinstance(large, LazySimilarity)
    np.testing.assert_allclose(large[:], units(4, 1) @ units(4, 0).T, atol=1e-6)


def test_some_clips_in_another_order():
    chosen = clips("best").select([2, 0])
    assert chosen.counts.tolist() == [3, 2]
    assert np.array_equal(chosen.embeds, units(6, 0)[[3, 4, 5, 0, 1]])
    assert chosen.pooling == "best"


def test_a_policy_uses_the_limit_of_its_model(rows):
    model = load_embedding_model(ToneModel())
    assert embed_split(model, rows, AudioPolicy(30.0)).policy == AudioPolicy(30.0)
    assert AudioPolicy(30.0).sentence() == "the first 30 s of each recording, embedded at once"
    model.chunk_seconds, model.min_seconds = 10.0, 0.2
    limited = embed_split(model, rows).policy
    assert limited == AudioPolicy(None, 10.0, "mean")
    in_chunks = "all of each recording, in chunks of 10 s if it is longer; the normalised mean of their embeddings"
    assert limited.sentence() == in_chunks
    assert embed_split(model, rows, AudioPolicy(chunk_seconds=5.0)).policy.chunk_seconds == 5.0
    with pytest.raises(ValueError, match=r"chunk_seconds.*11\.0"):
        embed_split(model, rows, AudioPolicy(chunk_seconds=11.0))
    for name in ("chunk_seconds", "max_audio_seconds"):
        with pytest.raises(ValueError, match=rf"{name}.*0\.1\b"):
            embed_split(model, rows, AudioPolicy(**{name: 0.1}))
        assert len(embed_split(model, rows, AudioPolicy(**{name: 0.2})).ids) == 8
    with pytest.raises(ValueError, match="on_bad_audio is 'ignore'; it must be error or skip"):
        embed_split(model, rows, on_bad_audio="ignore")


def test_ids_of_recordings_are_texts():
    rows = [{"clip_id": "a", "source": 7}, {"clip_id": "b", "source": 8}, {"clip_id": "9", "source": None}]
    assert EmbeddedSplit(rows, clips("mean")).sources.tolist() == ["7", "8", "9"]
    assert EmbeddedSplit(rows[:2], clips("mean")).sources.tolist() == ["7", "8"]


def test_embedding_shows_its_progress(rows, monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "progress", lambda items, *words: shown.append(words) or items)
    embed_split(load_embedding_model(ToneModel()), rows)
    assert shown == [("embedding", 8, "recordings")]


@pytest.mark.parametrize("change", [{"pooling": "max"}, {"chunk_seconds": 0.0}, {"max_audio_seconds": float("nan")}])
def test_an_invalid_policy_is_rejected(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        AudioPolicy(**change)


@pytest.mark.parametrize("kind", ["supclap", "converted"])
def test_training_evaluation_and_encode_audio_resample_alike(tmp_path, kind):
    """By torchaudio's filter for CED, and by a better one for CLAP."""
    model, processor = builders.pair(kind)
    path = tmp_path / "clip.wav"
    soundfile.write(path, builders.noise(8000), 8000, subtype="FLOAT")
    row = {"clip_id": "a", "clip_index": 0, "audio_path": str(path), "captions": {"eng": ["rain"]}}
    resampled = resample(builders.noise(8000), 8000, 16_000, processor.resampling_method)
    inputs = processor(audio=resampled, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_audio_features(**inputs).pooler_output

    batch = TrainingCollator(processor)([row])
    torch.testing.assert_close(batch["input_features"], inputs["input_features"])
    clips = embed_split(load_embedding_model(model, processor), [row]).clips
    np.testing.assert_allclose(clips.embeds, expected, atol=1e-6)
    np.testing.assert_allclose(model.encode_audio([str(path)], processor), expected, atol=1e-6)
