"""The model in sentence-transformers: equal embeddings for all input types and ways of loading."""

import re
import sys

import builders
import numpy as np
import pytest
import soundfile
import torch

pytest.importorskip("sentence_transformers", reason="the extra sentence-transformers is not installed")
from sentence_transformers import SentenceTransformer

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts.audio_files import SUFFIXES
from modeling_supclap.integrations.sentence_transformers import SupCLAPModule

TEXTS = [builders.CAPTIONS[language] for language in ("eng", "fra", "deu")]
CLIPS = [builders.noise(16000, seed=1), builders.noise(44100, seed=2), builders.noise(8000 * 25, seed=3)]
RATES = [16000, 44100, 8000]


@pytest.fixture(scope="module", params=["supclap", "sonar"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def module(kind):
    return SupCLAPModule(*builders.pair(kind))


@pytest.fixture(scope="module")
def encoder(module):
    return SentenceTransformer(modules=[module], device="cpu")


def texts_by_model(module, texts, language):
    inputs = module.processor(text=texts, language=language, return_tensors="pt")
    with torch.no_grad():
        return module.model.get_text_features(**inputs).pooler_output.numpy()


def clip_by_model(module, clip, rate_hz):
    inputs = module.processor(audio=[clip], sampling_rate=rate_hz, return_tensors="pt")
    with torch.no_grad():
        return module.model.get_audio_features(**inputs).pooler_output.numpy()[0]


@pytest.mark.parametrize("language", [None, "fra"])
def test_texts(encoder, module, language):
    embeds = encoder.encode(TEXTS, language=language)
    np.testing.assert_allclose(embeds, texts_by_model(module, TEXTS, language), atol=1e-6)
    assert embeds.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeds, axis=1), 1, atol=1e-5)


def test_languages_mix_in_one_call(encoder, module):
    languages = ["eng", "fra", "deu"]
    inputs = [{"text": text, "language": code} for text, code in zip(TEXTS, languages, strict=True)]
    np.testing.assert_allclose(encoder.encode(inputs), texts_by_model(module, TEXTS, languages), atol=1e-6)
    half = [inputs[0], {"text": TEXTS[1]}]
    expected = texts_by_model(module, TEXTS[:2], ["eng", "jpn"])
    np.testing.assert_allclose(encoder.encode(half, language="jpn"), expected, atol=1e-6)
    with pytest.raises(ValueError, match="language"):
        encoder.encode(half)


def test_the_language_matters_to_sonar(encoder, kind):
    differs = np.abs(encoder.encode(TEXTS, language="fra") - encoder.encode(TEXTS, language="eng")).max() > 1e-3
    assert differs == (kind == "sonar")


def test_recordings_of_several_rates_and_lengths(encoder, module):
    inputs = [{"array": clip, "sampling_rate": rate} for clip, rate in zip(CLIPS, RATES, strict=True)]
    expected = [clip_by_model(module, clip, rate) for clip, rate in zip(CLIPS, RATES, strict=True)]
    np.testing.assert_allclose(encoder.encode(inputs), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["converted", "clap2"])
def test_long_recordings_are_the_mean_of_their_chunks(kind):
    """CLAP takes one second here, and CLAP2 is given the same limit. A part of the batch has more than 32 chunks."""
    model, processor = builders.pair(kind)
    extractor = processor.feature_extractor
    if kind == "clap2":
        extractor.chunk_length = 1
    rate_hz = extractor.sampling_rate
    clips = [builders.noise(round(seconds * rate_hz), seed=7) for seconds in (2.5, 0.4, 33.0, 1.0)]
    found = SentenceTransformer(modules=[SupCLAPModule(model, processor)], device="cpu").encode(clips)
    expected = model.encode_audio(clips, processor, sampling_rate=rate_hz)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (start,) = model.encode_audio([clips[0][:rate_hz]], processor, sampling_rate=rate_hz)
    assert np.abs(found[0] - start).max() > 1e-3


@pytest.mark.parametrize(("seconds", "count"), [(1.0, 1), (1.005, 1), (1.02, 2)])
def test_a_few_samples_more_than_a_chunk_are_no_second_chunk(seconds, count):
    module = SupCLAPModule(*builders.pair("converted"))
    rate_hz = module.processor.feature_extractor.sampling_rate
    assert module.preprocess([builders.noise(round(seconds * rate_hz))])["chunk_counts"].tolist() == [count]


@pytest.mark.parametrize("form", ["array", "stereo", "path", "bytes", "nested", "decoder"])
def test_forms_of_a_recording(encoder, module, tmp_path, request, form):
    clip = np.round(CLIPS[0] * 8192) / 32768  # exact in 16 bits
    pcm = (clip * 32768).astype(np.int16)
    soundfile.write(tmp_path / "clip.wav", pcm, 16000)
    given = {
        "array": lambda: clip.astype(np.float32),
        "stereo": lambda: {"array": np.stack([clip, clip]), "sampling_rate": 16000},
        "path": lambda: str(tmp_path / "clip.wav"),
        "bytes": lambda: {"bytes": (tmp_path / "clip.wav").read_bytes(), "path": None},
        "nested": lambda: {"audio": {"array": clip, "sampling_rate": 16000}},
        "decoder": lambda: request.getfixturevalue("torchcodec").decoders.AudioDecoder(tmp_path / "clip.wav"),
    }[form]()
    np.testing.assert_allclose(encoder.encode([given])[0], clip_by_model(module, clip, 16000), atol=1e-5)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".WAV", ""])
def test_a_string_with_an_audio_suffix_is_a_recording(encoder, module, tmp_path, suffix):
    path = tmp_path / f"clip{suffix}"
    soundfile.write(path, CLIPS[0], 16000, format="WAV", subtype="FLOAT")
    expected = clip_by_model(module, CLIPS[0], 16000)
    for given in (str(path), f"file://{path}"):
        np.testing.assert_allclose(encoder.encode([given])[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["missing.wav", "sounds/missing.m4a", "{folder}/missing", "file://{folder}/no.opus"])
def test_a_missing_file_is_an_error(encoder, tmp_path, name):
    name = name.format(folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(name.removeprefix("file://"))):
        encoder.encode([name])


def test_a_text_is_not_a_path(encoder, module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rain").write_text("not a recording")
    texts = [
        "rain",
        "sounds/rain",
        "cats and/or dogs",
        "the order: dog, then rain",
        "http is a protocol",
        "a file.wav is played",
    ]
    np.testing.assert_allclose(encoder.encode(texts), texts_by_model(module, texts, None), atol=1e-6)
    one = encoder.encode([{"text": "rain.wav"}])
    np.testing.assert_allclose(one, texts_by_model(module, ["rain.wav"], None), atol=1e-6)
    with pytest.raises(ValueError, match="texts and recordings"):
        encoder.encode(["rain", "dog.wav"])
    (tmp_path / "sounds").mkdir()
    soundfile.write(tmp_path / "sounds" / "rain", CLIPS[0], 16000, "FLOAT", format="WAV")  # now it is a path
    np.testing.assert_allclose(encoder.encode(["sounds/rain"])[0], clip_by_model(module, CLIPS[0], 16000), atol=1e-5)


def test_the_rate_of_bare_waveforms(encoder, module):
    embeds = encoder.encode([CLIPS[2]], sampling_rate=8000)
    np.testing.assert_allclose(embeds[0], clip_by_model(module, CLIPS[2], 8000), atol=1e-5)


def test_prompts_come_before_texts(encoder, module):
    embeds = encoder.encode(["dog", "rain"], prompt="the sound of ")
    expected = texts_by_model(module, ["the sound of dog", "the sound of rain"], None)
    np.testing.assert_allclose(embeds, expected, atol=1e-6)


def test_similarity_and_facts(encoder, module):
    assert encoder.modalities == ["text", "audio"]
    assert encoder.get_embedding_dimension() == 16
    assert encoder.max_seq_length == module.processor.max_tokens
    assert encoder.tokenizer is module.processor.tokenizer
    audio, text = encoder.encode([CLIPS[0]]), encoder.encode(TEXTS)
    np.testing.assert_allclose(encoder.similarity(audio, text).numpy(), audio @ text.T, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([CLIPS[0], "a dog"], "mixes multiple modalities"),
        ([{"text": "a dog", "language": "eng"}, CLIPS[0]], "texts"),
        ([{"array": CLIPS[0]}], "clip 0.*'array'"),
        (["a dog", " "], "caption 1"),
        ([CLIPS[0][:100]], "clip 0.*0.0063"),
    ],
)
def test_unusable_inputs_are_named(encoder, inputs, message):
    with pytest.raises(ValueError, match=message):
        encoder.encode(inputs)


def test_saved_and_loaded(encoder, module, tmp_path):
    SentenceTransformer(modules=[SupCLAPModule(module.model, module.processor, "fra")]).save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    assert isinstance(loaded[0], SupCLAPModule)
    assert loaded[0].language == "fra"
    np.testing.assert_allclose(loaded.encode(TEXTS), encoder.encode(TEXTS, language="fra"), atol=1e-6)
    np.testing.assert_allclose(loaded.encode([CLIPS[0]]), encoder.encode([CLIPS[0]]), atol=1e-6)
    # The folder can still be loaded as a model.
    plain = SupCLAPModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, module.model.state_dict()[name]) for name, value in plain.state_dict().items())


def test_any_folder_of_a_model_loads_with_settings_of_its_own(encoder, module, tmp_path):
    module.model.save_pretrained(tmp_path)
    module.processor.save_pretrained(tmp_path)
    long = [" ".join(TEXTS)]
    cut = SentenceTransformer(modules=[SupCLAPModule.load(str(tmp_path), language="deu")], device="cpu")
    whole = cut.encode(long)
    np.testing.assert_allclose(whole, encoder.encode(long, language="deu"), atol=1e-6)
    cut.max_seq_length = 6
    assert cut.max_seq_length == cut.tokenizer.model_max_length == 6
    assert np.abs(cut.encode(long) - whole).max() > 1e-3
    settings = {"language": "deu", "processor_kwargs": {"model_max_length": 6}}
    by_settings = SentenceTransformer(modules=[SupCLAPModule.load(str(tmp_path), **settings)], device="cpu")
    np.testing.assert_array_equal(by_settings.encode(long), cut.encode(long))


def test_options_of_the_hub_reach_the_model_and_the_processor(monkeypatch):
    model, processor = builders.pair("supclap")
    calls = []
    for part, loaded in ((SupCLAPModel, model.train()), (SupCLAPProcessor, processor)):
        monkeypatch.setattr(part, "from_pretrained", lambda *a, loaded=loaded, **b: calls.append((*a, b)) or loaded)
    read = lambda *a, **b: calls.append((*a, b)) or {"language": "deu"}  # noqa: E731
    monkeypatch.setattr(SupCLAPModule, "load_config", read)
    hub = {"revision": "v1", "token": "x", "local_files_only": True}
    options = {"model_kwargs": {"dtype": "float16"}, "processor_kwargs": {"caption_prefix": "a"}}
    loaded = SupCLAPModule.load("org/name", cache_folder="cache", **hub, **options, backend="torch")
    assert calls == [
        ("org/name", {"cache_folder": "cache", **hub}),
        ("org/name", {"cache_dir": "cache", **hub, "dtype": "float16"}),
        ("org/name", {"cache_dir": "cache", **hub, "caption_prefix": "a"}),
    ]
    assert (loaded.language, loaded.model.training) == ("deu", False)
    calls.clear()
    assert SupCLAPModule.load("org/name", language="fra").language == "fra"
    assert calls == [("org/name", {"cache_folder": None}), *[("org/name", {"cache_dir": None})] * 2]


@pytest.mark.parametrize("kind", ["supclap", "converted"])
def test_sentence_transformers_loads_a_model_folder_without_our_module(kind, tmp_path):
    """Load without our module: sentence-transformers then passes padding options to the processor."""
    model, processor = builders.save_pair(kind, tmp_path)
    encoder = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    clips = [{"array": clip, "sampling_rate": 16000} for clip in (CLIPS[0], CLIPS[0][:9000])]
    np.testing.assert_allclose(encoder.encode(TEXTS), model.encode_text(TEXTS, processor), atol=1e-6)
    np.testing.assert_allclose(encoder.encode(clips), model.encode_audio(clips, processor), atol=1e-5)


def test_gradients_reach_the_model(module):
    features = module.preprocess(TEXTS[:2])
    module(features)["sentence_embedding"][0, 0].backward()
    gradient = module.model.text_projection.linear2.weight.grad
    module.model.zero_grad()
    assert gradient.abs().sum() > 0


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "modeling_supclap.integrations.sentence_transformers")
    monkeypatch.setitem(sys.modules, "sentence_transformers.base.modules.input_module", None)
    with pytest.raises(ImportError, match=r'pip install "supclap\[sentence-transformers\]"'):
        import modeling_supclap.integrations.sentence_transformers  # noqa: F401
