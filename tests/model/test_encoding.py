"""`encode_audio` and `encode_text`: batches equal to single inputs, chunks, and use without the package."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import builders
import numpy as np
import open_clip_folders
import pytest
import soundfile
import torch
from memory import traced_peak
from transformers import BertConfig
from transformers.utils import logging

from modeling_supclap import SupCLAPModel, encoding, feature_extraction_ced
from modeling_supclap.audio_input import Recording
from modeling_supclap.conversion import processor_from_clap
from modeling_supclap.encoding import AudioChunks, best_chunks, chunk_starts

LENGTHS = [16000, 200_000, 3000, 50_000, 170_000, 16_001]
CLIPS = [builders.noise(length, seed) for seed, length in enumerate(LENGTHS)]
TEXTS = [*builders.CAPTIONS.values(), "rain", "a dog barks while the rain falls"]
LANGUAGES = [*builders.CAPTIONS, "eng", "fra"]


def clap(truncation: str):
    config = builders.clap_config({"enable_fusion": truncation == "fusion"})
    return builders.clap_model(config), processor_from_clap(builders.clap_processor(truncation))


KINDS = {
    "ced and bert": builders.pair,
    "ced and sonar": lambda: builders.pair("sonar"),
    "clap": lambda: clap("rand_trunc"),
    "fused clap": lambda: clap("fusion"),
}


@pytest.fixture(params=KINDS, scope="module")
def pair(request):
    """Model and its processor."""
    return KINDS[request.param]()


def cut(clip, processor, samples):
    """Split a clip independently of `chunk_starts`: whole chunks, and a last one that ends with the clip."""
    if samples is None or len(clip) <= samples:
        return [clip]
    whole = [clip[start : start + samples] for start in range(0, len(clip) - samples + 1, samples)]
    return whole if len(clip) % samples < 0.01 * samples else [*whole, clip[-samples:]]


@torch.no_grad()
def alone(model, processor, clip, samples=None):
    """Embed one clip chunk by chunk, with the mean in float64."""
    if encoding.max_chunk_seconds(processor.feature_extractor):
        samples = processor.feature_extractor.nb_max_samples
    embeds = []
    for piece in cut(clip, processor, samples):
        inputs = processor(audio=[piece], sampling_rate=builders.RATE_HZ, return_tensors="pt")
        embeds.append(model.get_audio_features(**inputs).pooler_output[0].double().numpy())
    mean = np.mean(embeds, axis=0)
    return mean / np.linalg.norm(mean)


def test_batched_audio_equals_single_clips(pair):
    model, processor = pair
    expected = np.stack([alone(model, processor, clip) for clip in CLIPS])
    found = encoding.encode_audio(model, CLIPS, processor, sampling_rate=builders.RATE_HZ)
    assert (found.dtype, found.shape) == (np.float32, (6, 16))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert np.abs(found[:, None] - found[None]).max(axis=2)[np.triu_indices(6, 1)].min() > 1e-4


def test_embeddings_do_not_depend_on_batch_or_order(pair):
    model, processor = pair
    call = {"sampling_rate": builders.RATE_HZ, "processor": processor}
    expected = encoding.encode_audio(model, CLIPS, **call)
    assert np.array_equal(encoding.encode_audio(model, CLIPS, **call), expected)
    for batch_size in (1, 2, 5):
        found = encoding.encode_audio(model, CLIPS[::-1], batch_size=batch_size, **call)[::-1]
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    texts = encoding.encode_text(model, TEXTS, processor, language=LANGUAGES)
    assert np.array_equal(encoding.encode_text(model, TEXTS, processor, language=LANGUAGES), texts)
    found = encoding.encode_text(model, TEXTS[::-1], processor, language=LANGUAGES[::-1], batch_size=3)[::-1]
    np.testing.assert_allclose(found, texts, atol=1e-6, rtol=0)


@torch.no_grad()
def test_batched_text_equals_single_texts(pair):
    model, processor = pair
    found = encoding.encode_text(model, TEXTS, processor, language=LANGUAGES)
    for text, language, embed in zip(TEXTS, LANGUAGES, found, strict=True):
        inputs = processor(text=[text], language=language, return_tensors="pt")
        np.testing.assert_allclose(embed, model.get_text_features(**inputs).pooler_output[0], atol=1e-6, rtol=0)


def test_equal_texts_tie_exactly_unless_their_languages_differ(sonar_model, sonar_processor):
    texts = ["rain", *TEXTS, "rain"]
    found = sonar_model.encode_text(texts, sonar_processor, language=["eng", *LANGUAGES, "fra"], batch_size=3)
    assert np.array_equal(found[0], found[texts.index("rain", 1)])
    assert np.abs(found[0] - found[-1]).max() > 1e-3
    assert np.array_equal(found[1], sonar_model.encode_text(texts, sonar_processor, language="eng", batch_size=3)[1])


@pytest.mark.parametrize("seconds", [1.0, 2.5])
def test_chunks_end_with_the_clip_and_average_to_its_embedding(model, processor, seconds):
    samples = round(seconds * builders.RATE_HZ)
    call = {"processor": processor, "sampling_rate": builders.RATE_HZ, "chunk_seconds": seconds}
    found = model.encode_audio(CLIPS, **call)
    expected = np.stack([alone(model, processor, clip, samples) for clip in CLIPS])
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    chunks = model.encode_audio(CLIPS, return_chunks=True, batch_size=4, **call)
    for clip, parts, mean in zip(CLIPS, chunks, found, strict=True):
        pieces = cut(clip, processor, samples)
        assert len(parts.embeds) == len(parts.onset_seconds) == len(pieces)
        covered = len(clip) if len(clip) % samples > 0.01 * samples else len(pieces) * samples
        assert parts.offset_seconds[-1] == covered / builders.RATE_HZ
        if len(clip) > samples:
            np.testing.assert_allclose(parts.offset_seconds - parts.onset_seconds, seconds, atol=1e-9)
        average = parts.embeds.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(average / np.linalg.norm(average), mean, atol=1e-6)
    one = model.encode_audio(CLIPS[1], return_chunks=True, **call)
    np.testing.assert_allclose(one.embeds, chunks[1].embeds, atol=1e-6)


def test_the_longest_window_is_that_of_the_extractor_or_a_chunk_of_ced():
    model, processor = builders.pair()
    ced, clap = processor.feature_extractor, builders.clap_processor().feature_extractor
    assert encoding.max_window_seconds(model.config, ced) == model.config.audio_config.target_length / 100
    assert encoding.max_window_seconds(builders.clap_config(), clap) == 1.0
    assert encoding.max_window_seconds(builders.clap_config(), ced) is None  # as wav2vec 2.0, neither has a limit


def test_a_long_batch_is_split_so_that_memory_does_not_follow_the_longest(model, processor, monkeypatch):
    sizes = []
    make_inputs = encoding.audio_inputs
    monkeypatch.setattr(
        encoding, "audio_inputs", lambda m, p, batch: sizes.append(list(map(len, batch))) or make_inputs(m, p, batch)
    )
    clips = [builders.noise(400_000), *[builders.noise(16000, seed) for seed in range(6)]]
    model.encode_audio(clips, processor, sampling_rate=builders.RATE_HZ, batch_size=4)
    assert sizes == [[400_000], [16000] * 4, [16000] * 2]


@pytest.mark.parametrize(
    ("seconds", "chunk", "hop", "onsets"),
    [
        (10.006, 10, 10, [0]),
        (20.05, 10, 10, [0, 10]),
        (10.15, 10, 10, [0, 0.15]),
        (5.001, 5, 2.5, [0]),
        (7.6, 5, 2.5, [0, 2.5, 2.6]),
        (302.5, 300, 300, [0, 2.5]),  # 1 % of a chunk, but too much sound to leave out
    ],
)
def test_a_few_samples_more_than_a_chunk_are_no_second_chunk(tmp_path, seconds, chunk, hop, onsets):
    """For arrays and for long files, which are read in parts."""
    clip = builders.noise(round(seconds * 1000))
    soundfile.write(tmp_path / "clip.wav", clip, 1000, subtype="FLOAT")
    for recording in (Recording(clip, 1000, "clip"), Recording(str(tmp_path / "clip.wav"), None, "clip.wav")):
        samples = round(chunk * 1000), round(hop * 1000)
        (parts,) = encoding.chunk_embeddings(
            [recording], lambda waves: [[len(wave)] for wave in waves], 1000, *samples
        )
        np.testing.assert_allclose(parts.onset_seconds, onsets)


@pytest.mark.parametrize(
    ("rate_hz", "seconds", "most_clips"), [(16000, 10, 32), (16000, 2, 150), (16000, 0.5, 256), (48000, 2, 50)]
)
def test_samples_limit_the_clips_that_are_read_ahead(rate_hz, seconds, most_clips):
    """Long clips are read one batch ahead, short ones several batches, to sort them by length."""
    num_read, ahead = 0, []

    def read(rate_hz):
        nonlocal num_read
        num_read += 1
        return np.ones(round(seconds * rate_hz), np.float32)

    def encode(waveforms):
        ahead.append(num_read)
        return [[1.0] for _ in waveforms]

    recordings = (Recording(read, None, f"clip {index}") for index in range(300))
    samples = round(10 * rate_hz)
    assert len(list(encoding.chunk_embeddings(recordings, encode, rate_hz, samples))) == 300
    assert ahead[0] == most_clips


@pytest.mark.parametrize(("num_workers", "num_read"), [(0, 1), (2, 3), (8, 4)])
def test_threads_read_a_few_files_ahead_but_no_more_than_a_limit_of_sound(
    tmp_path, monkeypatch, num_workers, num_read
):
    monkeypatch.setattr(encoding, "_SAMPLES_AT_ONCE", 3000)  # three seconds at this rate
    soundfile.write(tmp_path / "second.wav", builders.noise(1000), 1000, subtype="FLOAT")
    asked, ahead = 0, []

    def recordings():
        nonlocal asked
        for asked in range(1, 7):
            yield Recording(str(tmp_path / "second.wav"), None, f"{asked}.wav")

    def encode(waveforms):
        ahead.append(asked)
        return [[1.0]] * len(waveforms)

    options = {"batch_size": 1, "num_workers": num_workers}
    monkeypatch.setattr(encoding, "_BATCHES_AT_ONCE", 1)
    assert len(list(encoding.chunk_embeddings(recordings(), encode, 1000, 1000, **options))) == 6
    assert ahead[0] == num_read


def test_files_are_read_by_a_thread_per_core_and_arrays_by_none(model, processor, tmp_path, monkeypatch):
    soundfile.write(tmp_path / "clip.wav", CLIPS[0], 16000)
    used, embed = [], encoding.embed_recordings

    def note(*args, num_workers, **options):
        used.append(num_workers)
        return embed(*args, num_workers=num_workers, **options)

    monkeypatch.setattr(encoding, "embed_recordings", note)
    for cores in (3, None, 20):
        monkeypatch.setattr(encoding.os, "cpu_count", lambda cores=cores: cores)
        for audio in ([CLIPS[0], tmp_path / "clip.wav"], CLIPS[:1]):
            model.encode_audio(audio, processor, sampling_rate=16000)
    assert used == [3, 0, 1, 0, 8, 0]


def test_texts_of_similar_length_share_a_batch(model, processor, monkeypatch):
    lengths, run = [], model.get_text_features

    def note(**inputs):
        lengths.append(inputs["attention_mask"].sum(dim=1).tolist())
        return run(**inputs)

    monkeypatch.setattr(model, "get_text_features", note)
    model.encode_text(["dog", "dog " * 5, "rain", "rain " * 5, "dog"], processor, batch_size=2)
    assert lengths == [[7, 7], [3, 3]]


def lengths(waveforms):
    """Embed clips as their lengths."""
    return [[float(len(waveform))] for waveform in waveforms]


def test_chunks_of_a_long_file_end_at_its_last_sample(tmp_path, monkeypatch):
    """The duration is a number of seconds, so that the number of samples is rounded."""
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 3.0)
    assert 4001 / 1000 * 1000 > 4001
    soundfile.write(tmp_path / "long.wav", builders.noise(4001), 1000, subtype="FLOAT")
    recording = Recording(str(tmp_path / "long.wav"), None, "long.wav")
    (chunks,) = encoding.chunk_embeddings([recording], lengths, 1000, 990)
    assert chunks.onset_seconds.tolist() == [0.0, 0.99, 1.98, 2.97, 3.011]
    assert chunks.embeds.flatten().tolist() == [990] * 5


def test_a_long_file_that_ends_before_its_header_states_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 3.0)
    monkeypatch.setattr(Recording, "get_seconds", lambda recording: 9.0)
    soundfile.write(tmp_path / "cut.wav", builders.noise(5050), 1000, subtype="FLOAT")
    recording = Recording(str(tmp_path / "cut.wav"), None, "cut.wav")
    for least, message in ((50, "cut.wav ends after 6.0000 s"), (100, r"5\.0500 s; the minimum is 0\.1 s per chunk")):
        with pytest.raises(ValueError, match=message):
            list(encoding.chunk_embeddings([recording], lengths, 1000, 1000, min_samples=least))


def test_a_recording_is_refused_as_silent_only_if_all_of_it_is():
    silent, partly = np.zeros(2500, np.float32), np.concatenate([np.zeros(1500), np.ones(1000)]).astype(np.float32)
    recordings = [Recording(clip, 1000, name) for clip, name in ((silent, "silent"), (partly, "partly"))]
    options = {"on_bad_audio": "skip", "refuse_silence": True}
    first, second = encoding.chunk_embeddings(recordings, lengths, 1000, 1000, **options)
    assert (str(first.error), len(first.embeds)) == ("silent is silent: every sample is zero", 0)
    assert (second.error, len(second.embeds)) == (None, 3)
    assert all(chunks.error is None for chunks in encoding.chunk_embeddings(recordings, lengths, 1000, 1000))


@pytest.mark.parametrize("chunk_seconds", [None, 1.0, 2.5, 4.0])
def test_a_long_file_is_read_and_embedded_in_parts(model, processor, tmp_path, monkeypatch, chunk_seconds):
    soundfile.write(tmp_path / "long.wav", builders.noise(round(10.3 * 22050)), 22050, subtype="FLOAT")
    waveform, rate_hz = soundfile.read(tmp_path / "long.wav")
    call = {"processor": processor, "sampling_rate": rate_hz, "return_chunks": True}
    expected = model.encode_audio(waveform, chunk_seconds=chunk_seconds or 3.0, **call)

    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 3.0)
    sizes, read = [], soundfile.SoundFile.read

    def note_size(file, frames, **options):
        sizes.append(frames)
        return read(file, frames, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", note_size)
    found = model.encode_audio(tmp_path / "long.wav", chunk_seconds=chunk_seconds, **call)
    # three seconds, or a longer chunk, with a margin on both sides, rounded to whole seconds
    assert max(sizes) <= (3 + max(3, chunk_seconds or 0)) * rate_hz
    np.testing.assert_array_equal(found.onset_seconds, expected.onset_seconds)
    np.testing.assert_array_equal(found.offset_seconds, expected.offset_seconds)
    np.testing.assert_allclose(found.embeds, expected.embeds, atol=1e-5)


def test_only_a_few_parts_of_a_long_file_are_in_memory(model, processor, tmp_path, monkeypatch):
    assert encoding.LONGEST_SECONDS <= 300
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 10.0)
    with soundfile.SoundFile(tmp_path / "long.wav", "w", 44_100, 2) as file:
        minute = np.tile(builders.noise(60 * 44_100)[:, None], 2)
        for _ in range(10):
            file.write(minute)

    peak_bytes = traced_peak(model.encode_audio, tmp_path / "long.wav", processor, batch_size=3, num_workers=2)
    assert peak_bytes < 50e6  # one decoded channel has 106 MB


@pytest.mark.parametrize("num_workers", [0, 1, 5])
def test_a_bad_recording_in_a_list_can_be_skipped(model, processor, tmp_path, num_workers, caplog):
    paths = [tmp_path / f"{index}.wav" for index in range(6)]
    for path, clip in zip(paths, CLIPS, strict=True):
        soundfile.write(path, clip, 16000, subtype="FLOAT")
    expected = model.encode_audio(paths, processor, num_workers=0)
    paths[1].unlink()
    paths[4].write_bytes(b"no sound")
    soundfile.write(paths[2], CLIPS[2][:100], 16000)

    call = {"processor": processor, "num_workers": num_workers}
    with pytest.raises((OSError, ValueError), match=r"[124]\.wav"):
        model.encode_audio(paths, **call)
    logging.enable_propagation()
    try:
        found = model.encode_audio(paths, on_bad_audio="skip", **call)
    finally:
        logging.disable_propagation()
    np.testing.assert_allclose(found[[0, 3, 5]], expected[[0, 3, 5]], atol=1e-6)
    assert np.isnan(found[[1, 2, 4]]).all()
    nothing = {"bytes": None, "path": None}
    assert np.isnan(model.encode_audio([nothing], on_bad_audio="skip", **call)).all()
    assert all(f"{index}.wav" in caplog.text for index in (1, 2, 4))

    chunks = model.encode_audio(paths, on_bad_audio="skip", chunk_seconds=1.0, return_chunks=True, **call)
    assert [len(parts.embeds) for parts in chunks] == [1, 0, 0, 4, 0, 1]
    assert [len(parts.onset_seconds) for parts in chunks] == [1, 0, 0, 4, 0, 1]
    for values in best_chunks(chunks, expected[:2]):
        assert np.isnan(values).all(1).tolist() == [False, True, True, False, True, False]
    with pytest.raises(ValueError, match="'keep'"):
        model.encode_audio(paths, on_bad_audio="keep", **call)


def test_a_direction_is_never_missing_silently(model, processor):
    torch.nn.init.zeros_(model.audio_projection.linear2.weight)
    torch.nn.init.zeros_(model.audio_projection.linear2.bias)
    with pytest.raises(ValueError, match="clip 0"):
        model.encode_audio([CLIPS[0]], processor, sampling_rate=16000)
    torch.nn.init.constant_(model.text_projection.linear2.bias, torch.nan)
    with pytest.raises(ValueError, match="'rain'"):
        model.encode_text(["rain"], processor)


def test_similarity_is_the_cosine(model):
    rng = np.random.default_rng(0)
    audio, texts = rng.standard_normal((3, 5)), rng.standard_normal((4, 5)).astype(np.float32)
    expected = [[a @ t / np.linalg.norm(a) / np.linalg.norm(t) for t in texts] for a in audio]
    found = model.similarity(audio, texts)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert isinstance(model.similarity(torch.from_numpy(audio), texts), torch.Tensor)
    assert model.similarity(audio[0], texts).shape == (1, 4)
    whole = np.eye(5, dtype=np.int8)[:3] * 7
    np.testing.assert_allclose(model.similarity(whole, texts), model.similarity(whole.astype(float), texts), atol=1e-6)
    assert model.similarity(whole, whole).tolist() == np.eye(3).tolist()
    with pytest.raises(ValueError, match=r"5 and 4\b"):
        model.similarity(audio, texts[:, :4])


def test_an_option_in_the_place_of_the_processor_is_named(model):
    with pytest.raises(TypeError, match=r"processor is 'deu'.*language"):
        model.encode_text(["ein Hund"], "deu")
    with pytest.raises(TypeError, match=r"processor is 16000.*sampling_rate"):
        model.encode_audio(CLIPS[0], 16000)


def test_the_model_moves_to_the_requested_device(model, processor):
    model.encode_text("rain", processor, device="cpu")
    with pytest.raises((NotImplementedError, RuntimeError)):
        model.encode_text("rain", processor, device="meta")


def test_one_item_returns_one_vector_of_the_requested_type(model, processor):
    call = {"processor": processor, "sampling_rate": 16000}
    for found in (
        model.encode_audio(CLIPS[0], **call),
        model.encode_audio(CLIPS[0].tolist(), **call),
        model.encode_audio({"array": CLIPS[0], "sampling_rate": 16000}, processor),
        model.encode_text("rain", processor),
    ):
        assert isinstance(found, np.ndarray)
        assert found.shape == (16,)
    assert model.encode_audio(np.stack([CLIPS[0]] * 3), **call).shape == (3, 16)
    for found in (
        model.encode_audio(CLIPS[:2], **call, convert_to_tensor=True),
        model.encode_text(["rain"], processor, convert_to_tensor=True),
    ):
        assert isinstance(found, torch.Tensor)
        assert not found.requires_grad
    assert model.encode_audio([], **call).shape == model.encode_text([], processor).shape == (0, 16)
    assert model.encode_audio([], return_chunks=True, **call) == []


def test_every_module_is_left_in_its_own_mode(model, processor):
    model.train()
    model.text_model.eval()
    before = {name: module.training for name, module in model.named_modules()}
    assert len(set(before.values())) == 2
    quiet = model.encode_text("rain", processor)
    with pytest.raises(ValueError, match="clip 1"):
        model.encode_audio([CLIPS[0], builders.noise(100)], processor, sampling_rate=16000)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert np.array_equal(quiet, model.eval().encode_text("rain", processor))


def test_the_last_thread_restores_the_modes(model):
    model.train()
    model.text_model.eval()
    before = {name: module.training for name, module in model.named_modules()}
    both_are_in, first_is_out, found = Barrier(2), Event(), []

    def first():
        with encoding.inference(model):
            both_are_in.wait(10)
        first_is_out.set()

    def second():
        with encoding.inference(model):
            both_are_in.wait(10)
            assert first_is_out.wait(10)
            found.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))

    with ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(first), pool.submit(second)]:
            work.result()
    assert found == [(False, False)]
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not encoding._EVALUATING


def test_threads_get_no_dropout_from_a_model_in_training_mode():
    text = BertConfig(**{**builders.bert_config(), "hidden_dropout_prob": 0.5})
    model = builders.supclap_model(builders.supclap_config(text)).train()
    processor = builders.pair()[1]
    expected = model.encode_text("rain", processor)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: model.encode_text("rain", processor), range(200)))
    assert all(np.array_equal(embed, expected) for embed in found)
    assert model.training
    assert model.text_model.training


@pytest.mark.parametrize("kind", ["ced and bert", "clap"])
def test_half_precision_returns_unit_norm_in_float32(kind):
    model, processor = KINDS[kind]()
    exact = encoding.encode_audio(model, CLIPS[:2], processor, sampling_rate=16000)
    half = model.to(torch.bfloat16)
    if kind != "clap":
        half.audio_model.init_bn.float()  # as in from_pretrained
    found = encoding.encode_audio(half, CLIPS[:2], processor, sampling_rate=16000)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert (found * exact).sum(axis=1).min() > 0.98


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, "clap2"])
def test_the_default_dtype_of_a_program_changes_nothing(kind, dtype):
    model, processor = open_clip_folders.build("A") if kind == "clap2" else KINDS[kind]()
    rate_hz = processor.feature_extractor.sampling_rate
    counts = torch.tensor([48_000, 30_000])
    pcm = torch.from_numpy((20_000 * np.stack([builders.noise(48_000, seed) for seed in (0, 1)])).astype(np.int16))

    def embed():
        features = processor.on_device(pcm, counts)["input_features"]
        audio = encoding.encode_audio(model, CLIPS[:2], processor, rate_hz, convert_to_tensor=True)
        return features, audio, encoding.encode_text(model, ["w1 w2", "rain"], processor, convert_to_tensor=True)

    expected = embed()
    feature_extraction_ced._front_end.cache_clear()  # as in a new process
    torch.set_default_dtype(dtype)
    try:
        during = embed()
    finally:
        torch.set_default_dtype(torch.float32)
    for found in (during, embed()):
        for left, right in zip(found, expected, strict=True):
            assert left.dtype == torch.float32
            assert torch.equal(left, right)


def test_features_of_inference_mode_serve_in_training():
    model, processor = builders.pair()
    feature_extraction_ced._front_end.cache_clear()
    samples, counts = torch.from_numpy(np.stack([builders.noise(16_000)])), torch.tensor([16_000])
    with torch.inference_mode():
        processor.on_device(samples, counts)
    model.train().get_audio_features(**processor.on_device(samples, counts)).pooler_output.sum().backward()
    assert model.audio_projection.linear1.weight.grad is not None


def test_the_progress_bar_counts_recordings(model, processor, monkeypatch):
    seen = []

    def tqdm(items, disable, unit):
        if not disable:
            seen.append((len(items), unit))
        return items

    monkeypatch.setattr(encoding.logging, "tqdm", tqdm)
    model.encode_audio(CLIPS[:3], processor, sampling_rate=16000)
    assert seen == []
    model.encode_audio(CLIPS[:3], processor, sampling_rate=16000, show_progress_bar=True)
    model.encode_text(["rain", "a dog", "rain"], processor, batch_size=1, show_progress_bar=True)
    assert seen == [(3, "recordings"), (2, "texts")]


# ---- the processor ----


def test_the_processor_is_loaded_from_the_source_of_the_model(tmp_path, model, processor):
    model.save_pretrained(tmp_path)
    loaded = SupCLAPModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)model\.processor = "):
        loaded.encode_text("rain")
    processor.save_pretrained(tmp_path)
    np.testing.assert_allclose(loaded.encode_text("rain"), model.encode_text("rain", processor), atol=1e-6)
    assert loaded.processor is loaded.processor
    loaded.processor = processor
    assert loaded.processor is processor


@pytest.mark.parametrize(("commit", "revision"), [("0123abc", "0123abc"), (None, "main")])
def test_the_processor_has_the_revision_of_the_model(model, processor, monkeypatch, commit, revision):
    asked = {}

    def load(name, **options):
        asked.update(options, name=name)
        return processor

    monkeypatch.setattr(encoding.SupCLAPProcessor, "from_pretrained", load)
    monkeypatch.setattr(model, "name_or_path", "someone/model")
    monkeypatch.setattr(model.config, "_commit_hash", commit, raising=False)
    monkeypatch.setattr(model, "_processor", None)
    assert model.processor is processor
    assert asked == {"name": "someone/model", "revision": revision}


def test_a_model_without_a_source_names_its_missing_processor(model):
    with pytest.raises(ValueError, match="processor"):
        model.encode_text("rain")


# ---- bad input ----

SILENT = np.full(16000, np.nan, dtype=np.float32)


@pytest.mark.parametrize(
    ("audio", "options", "message"),
    [
        ([CLIPS[0]], {}, "clip 0.*sampling_rate"),
        ([CLIPS[0], SILENT], {"sampling_rate": 16000}, "clip 1.*NaN"),
        ([CLIPS[0], np.zeros(0)], {"sampling_rate": 16000}, "clip 1.*empty"),
        ([CLIPS[0], CLIPS[1], CLIPS[2][:2000]], {"sampling_rate": 16000}, r"clip 2.*0\.1250"),
        ([CLIPS[0]] * 2, {"sampling_rate": [16000]}, r"\b1\b.*sampling_rate.*\b2\b"),
        ([CLIPS[0]], {"sampling_rate": ["fast"]}, r"sampling_rate\[0\].*'fast'"),
        ([CLIPS[0]] * 5, {"sampling_rate": "16000"}, "sampling_rate is '16000'"),
        ([CLIPS[0]], {"sampling_rate": {"a.wav": 16000}}, r"sampling_rate is \{'a.wav': 16000\}"),
        ([CLIPS[0]], {"sampling_rate": 16000, "batch_size": 0}, "batch_size.*0"),
        ([CLIPS[0]], {"sampling_rate": 16000, "batch_size": None}, "batch_size.*None"),
        ([CLIPS[0]], {"sampling_rate": 16000, "chunk_seconds": float("inf")}, "chunk_seconds.*inf"),
        ([CLIPS[0]], {"sampling_rate": 16000, "chunk_seconds": 0.1}, r"chunk_seconds.*0\.1\b.*0\.15"),
        ([{"array": CLIPS[0]}], {}, '"array".*"sampling_rate"'),
        ([{"file": "dog.wav"}], {}, "'file'"),
        ([CLIPS[0], b"no sound"], {"sampling_rate": 16000}, r"clip 1 \(8 bytes\)"),
        (np.zeros((1, 2, 16000)), {"sampling_rate": 16000}, r"\(1, 2, 16000\)"),
    ],
)
def test_bad_audio_is_named(model, processor, audio, options, message):
    with pytest.raises(ValueError, match=message):
        model.encode_audio(audio, processor, **options)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["rain", " "], {}, "text 1.*' '"),
        (["rain", 3], {}, "text 1.*3"),
        # Captions by language: the keys of a dict are not texts.
        ({"eng": ["rain"], "fra": ["pluie"]}, {}, "'eng', 'fra'"),
        (b"rain", {}, "b'rain'"),
        (["rain"], {"language": ["eng", "fra"]}, r"\b2\b.*language.*\b1\b"),
        (["rain", "dog"], {"language": ["eng", None]}, r"language\[1\].*None"),
        (["rain"], {"batch_size": 0}, "batch_size.*0"),
        (["rain"], {"batch_size": 1.5}, r"batch_size.*1\.5"),
    ],
)
def test_bad_text_is_named(model, processor, texts, options, message):
    with pytest.raises(ValueError, match=message):
        model.encode_text(texts, processor, **options)


def test_clap_takes_no_chunk_longer_than_its_own():
    model, processor = clap("rand_trunc")
    with pytest.raises(ValueError, match=r"chunk_seconds.*2\.0"):
        encoding.encode_audio(model, CLIPS, processor, sampling_rate=16000, chunk_seconds=2.0)


# ---- chunks ----


@pytest.mark.parametrize("length", [1, 9, 10, 11, 20, 29, 30, 31])
@pytest.mark.parametrize(("chunk", "hop"), [(10, 10), (7, 7), (10, 4), (100, 100)])
def test_chunks_are_of_one_length_and_cover_everything(length, chunk, hop):
    starts = chunk_starts(length, chunk, hop)
    covered = {sample for start in starts for sample in range(start, min(start + chunk, length))}
    assert covered == set(range(length))
    assert starts == sorted(set(starts))
    assert starts[-1] == max(length - chunk, 0)
    assert set(np.diff(starts[:-1]).tolist()) <= {hop}


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
    assert [values.shape for values in best_chunks([], texts)] == [(0, 4), (0, 4)]
