"""Models behind the evaluation interface: SupCLAP, CLAP fused and unfused, and custom models with the two methods."""

import sys

import builders
import numpy as np
import pytest
import torch
from fake_models import ToneModel

from modeling_supclap import SupCLAPModel
from modeling_supclap.audio_input import Recording
from modeling_supclap.conversion import processor_from_clap, supclap_from_clap
from modeling_supclap.evaluation.fingerprints import weights_fingerprint
from modeling_supclap.evaluation.models import default_device, load_embedding_model, unit_norm

CLIPS = [builders.noise(length, seed) for seed, length in enumerate((16000, 12000, 9000))]


@pytest.mark.parametrize("kind", ["supclap", "clap", "fused"])
@torch.no_grad()
def test_a_folder_embeds_as_its_model_does(tmp_path, kind):
    model, processor = builders.save_pair(kind, tmp_path)
    adapted = load_embedding_model(str(tmp_path), device="cpu")
    audio, text = adapted.encode_audio(CLIPS, batch_size=2), adapted.encode_text(["rain", "a dog"], "eng")
    for clip, embed in zip(CLIPS, audio, strict=True):
        inputs = {**processor(audio=[clip], sampling_rate=16000, return_tensors="pt")}
        if "is_longer" in inputs:  # transformers samples it at random for short clips
            inputs["is_longer"] = torch.tensor([[False]])
        np.testing.assert_allclose(embed, model.get_audio_features(**inputs).pooler_output[0], atol=1e-6)
    inputs = processor(text=["rain", "a dog"], padding=True, return_tensors="pt")
    np.testing.assert_allclose(text, model.get_text_features(**inputs).pooler_output, atol=1e-6)
    assert (adapted.name, adapted.device, adapted.dtype) == (str(tmp_path), "cpu", "float32")
    assert adapted.kind == ("supclap" if kind == "supclap" else "clap")
    assert adapted.chunk_seconds == (None if kind == "supclap" else 1)


def test_a_tuned_model_does_not_have_the_name_of_its_start(tmp_path):
    builders.save_pair("supclap", tmp_path / "start")
    model = SupCLAPModel.from_pretrained(tmp_path / "start")
    start = load_embedding_model(model)
    assert start.name == str(tmp_path / "start")
    model.to(torch.float64).float()
    model.logit_scale.requires_grad_(False).requires_grad_(True)
    assert load_embedding_model(model).name == start.name

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.logit_scale.sum().backward()
    optimizer.step()
    tuned = load_embedding_model(model)
    assert tuned.name == f"tuned from {start.name}"
    assert tuned.fingerprint != start.fingerprint
    assert load_embedding_model(model, name="mine").name == "mine"


def test_a_copy_has_the_same_fingerprint_and_another_model_has_not(tmp_path):
    model, processor = builders.save_pair("supclap", tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    processor.save_pretrained(tmp_path / "two")
    one, two = (load_embedding_model(tmp_path / name, device="cpu") for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint == load_embedding_model(model, processor).fingerprint
    processor(text=["rain"] * 3, padding="max_length", max_length=9)
    assert load_embedding_model(model, processor).fingerprint == one.fingerprint
    with torch.no_grad():
        model.logit_scale += 1
    assert load_embedding_model(model, processor).fingerprint != one.fingerprint
    fresh = builders.supclap_model()
    for change in (
        lambda other: setattr(other.feature_extractor, "top_db", 80.0),
        lambda other: setattr(other, "caption_prefix", "This is a sound of "),
        lambda other: setattr(other, "plain_captions", True),
        lambda other: setattr(other.tokenizer, "model_max_length", 7),
        lambda other: setattr(other, "resampling_method", "kaiser_best"),
        lambda other: other.tokenizer.add_tokens(["thunder"]),
    ):
        other = builders.bert_processor()
        assert load_embedding_model(fresh, other).fingerprint == load_embedding_model(fresh, processor).fingerprint
        change(other)
        assert load_embedding_model(fresh, other).fingerprint != load_embedding_model(fresh, processor).fingerprint
    assert weights_fingerprint(fresh) != weights_fingerprint(fresh.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["supclap", "clap"])
def test_another_processor_replaces_that_of_a_folder(tmp_path, kind):
    model, processor = builders.save_pair(kind, tmp_path)
    own = load_embedding_model(tmp_path, device="cpu")
    processor.tokenizer.model_max_length = 3
    other = load_embedding_model(tmp_path, processor, device="cpu")
    assert other.fingerprint == load_embedding_model(model, processor).fingerprint != own.fingerprint
    assert (other.name, load_embedding_model(tmp_path, device="cpu", name="mine").name) == (str(tmp_path), "mine")


def test_a_clap_object_needs_its_processor():
    clap = builders.clap_model()
    with pytest.raises(ValueError, match=r"ClapModel.*processor"):
        load_embedding_model(clap)
    ours = load_embedding_model(supclap_from_clap(clap), processor_from_clap(builders.clap_processor()))
    theirs = load_embedding_model(clap, builders.clap_processor())
    np.testing.assert_allclose(ours.encode_audio(CLIPS), theirs.encode_audio(CLIPS), atol=1e-6)


def test_a_function_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from fake_models import ToneModel\n\ndef load():\n    return ToneModel()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    adapted = load_embedding_model("my_models:load")
    assert (adapted.kind, adapted.name, adapted.fingerprint) == ("custom", "my_models:load", "tone")
    assert adapted.sampling_rate_hz == 16000
    with pytest.raises(ValueError, match=r"my_models.*'lode'"):
        load_embedding_model("my_models:lode")
    with pytest.raises(ValueError, match="module my_models has no function '__name__'"):  # it is a text
        load_embedding_model("my_models:__name__")
    (tmp_path / "my_models:folder").mkdir()  # an existing folder is no function
    with pytest.raises(ValueError, match=r"config\.json"):
        load_embedding_model("my_models:folder")
    with pytest.raises(ImportError, match="no_models:load"):
        load_embedding_model("no_models:load")


class Plain:
    """Model with the two required methods and no optional attribute."""

    def encode_audio(self, waveforms):
        return torch.ones(len(waveforms), 2)

    def encode_text(self, texts, **options):
        assert options == {"language": "fra", "batch_size": 7}
        return np.full((len(texts), 2), 0.5**0.5)


class WithArgument(Plain):
    """Model that is told the sampling rate of the waveforms."""

    def encode_audio(self, waveforms, sampling_rate):
        return torch.ones(len(waveforms), 2)


def test_a_custom_model_that_states_or_receives_a_rate_gives_no_warning(recwarn):
    load_embedding_model(WithArgument())
    with_attribute = Plain()
    with_attribute.sampling_rate = 16000
    assert load_embedding_model(with_attribute).sampling_rate_hz == 16000
    assert not recwarn.list


def test_custom_models_get_only_the_arguments_they_accept():
    with pytest.warns(UserWarning, match="48000") as warned:
        adapted = load_embedding_model(Plain())
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=r"Plain.*1\.414"):
        assert adapted.encode_audio(CLIPS).tolist() == pytest.approx(np.full((3, 2), 0.5**0.5))
    assert adapted.encode_text(["pluie"], "fra", batch_size=7).shape == (1, 2)
    assert (adapted.fingerprint, adapted.min_seconds, adapted.device, adapted.dtype) == (None, 0, "unknown", "unknown")
    model = ToneModel()
    model.min_seconds, model.device, model.dtype = 0.2, torch.device("cpu"), torch.float16
    adapted = load_embedding_model(model)
    assert (adapted.min_seconds, adapted.device, adapted.dtype) == (0.2, "cpu", "float16")
    load_embedding_model(model).encode_audio([builders.tone(200, 8000)], batch_size=3)
    assert model.calls == [("audio", 1, 16000)]


def test_no_text_has_no_embedding():
    model = ToneModel()
    model.encode_text = lambda texts: np.empty((len(texts), 41))
    found = load_embedding_model(model).encode_text([], "eng")
    assert (found.shape, found.dtype) == ((0, 41), np.float32)


class Recorder(Plain):
    """Model that records its batch sizes."""

    sampling_rate, min_seconds = 16000, 0.5

    def __init__(self):
        self.batch_sizes = []

    def encode_audio(self, waveforms, batch_size):
        self.batch_sizes.append(batch_size)
        return np.full((len(waveforms), 2), 0.5**0.5)


def test_custom_models_skip_short_recordings_and_get_the_batch_size():
    model = Recorder()
    adapted = load_embedding_model(model)
    recordings = [Recording(np.ones(length, np.float32), 16000, "clip") for length in (4000, 16000)]
    short, usable = adapted.chunk_embeddings(recordings, batch_size=5, on_bad_audio="skip")
    assert "0.5 s" in str(short.error)
    assert usable.error is None
    assert model.batch_sizes == [5]
    with pytest.raises(ValueError, match=r"0\.5 s"):
        list(adapted.chunk_embeddings(recordings))


def test_the_prompts_of_post_training_are_those_of_the_configuration(processor):
    model = builders.supclap_model()
    assert load_embedding_model(model, processor).prompts is None
    model.config.temporal_prompts = "phrases"
    assert load_embedding_model(model, processor).prompts == "phrases"


class PlainModule(torch.nn.Linear):
    """Custom model with weights and no fingerprint."""

    sampling_rate = 16000
    encode_audio, encode_text = Plain.encode_audio, Plain.encode_text


def test_the_weights_of_a_custom_model_are_not_its_fingerprint():
    module = PlainModule(2, 2)
    assert load_embedding_model(module).fingerprint is None
    module.fingerprint = "v1"
    assert load_embedding_model(module).fingerprint == "v1"


def test_the_error_of_a_folder_without_a_model_lists_its_files(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_embedding_model(tmp_path)
    builders.supclap_model().save_pretrained(tmp_path / "checkpoint-3")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"checkpoint-3, notes\.txt"):
        load_embedding_model(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/typo"):
        load_embedding_model(tmp_path / "typo")
    with pytest.raises(FileNotFoundError, match="outputs/nothing"):  # it may be a Hub id
        load_embedding_model("outputs/nothing")


@pytest.mark.parametrize(
    ("thing", "message"), [(3, "SupCLAP"), (torch.nn.Linear(1, 1), "encode_audio"), (ToneModel, "is a type")]
)
def test_other_objects_are_refused_as_models(thing, message):
    with pytest.raises(ValueError, match=message):
        load_embedding_model(thing)


def test_another_kind_of_checkpoint_is_refused(tmp_path):
    builders.supclap_model().audio_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'ced'"):
        load_embedding_model(tmp_path)


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        ([[1.0, 0.0]], r"\(1, 2\)"),
        ([1.0, 0.0], r"\(2,\)"),
        ([[1.0, 0.0], [np.nan, 0.0]], r"\b1\b"),
        ([[1.0, 0.0], [0.0, 0.0]], r"\b1\b"),
        ([[1.0, 0.0], [np.inf, 0.0]], r"\b1\b"),
    ],
)
def test_bad_embeddings_are_named(embeds, message):
    with pytest.raises(ValueError, match=message):
        unit_norm(np.array(embeds), 2)


def test_embeddings_are_rounded_to_float32_and_may_be_none():
    none = unit_norm(np.zeros((0, 3)), 0)
    assert (none.shape, none.dtype) == ((0, 3), np.float32)
    exact = np.array([[0.6, 0.8], [1.0, 0.0]], np.float32)
    assert unit_norm(exact, 2) is exact
    with pytest.warns(UserWarning, match="own has rows of norm 5"):
        scaled = unit_norm([[3, 4], [0, 2]], 2, "own")
    np.testing.assert_array_equal(scaled, np.array([[0.6, 0.8], [0.0, 1.0]], np.float32))
    assert scaled.dtype == np.float32


def test_half_precision_is_normalised_without_a_warning(recwarn):
    rough = torch.nn.functional.normalize(torch.randn(50, 64), dim=-1).to(torch.bfloat16)
    normalised = unit_norm(rough.requires_grad_(), 50)
    np.testing.assert_allclose(np.linalg.norm(normalised, axis=1), 1, atol=1e-6)
    assert not recwarn.list


@pytest.mark.parametrize("available", [(), ("cuda", "mps"), ("mps",), ("xpu",)])
def test_the_default_device_is_an_accelerator(monkeypatch, available):
    for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps), ("xpu", torch.xpu)):
        monkeypatch.setattr(backend, "is_available", lambda name=name: name in available)
    assert default_device() == (available[0] if available else "cpu")
