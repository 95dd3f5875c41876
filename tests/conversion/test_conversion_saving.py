"""A converted folder is complete and contains its provenance; after an error it does not exist."""

import json
import stat
from dataclasses import replace

import builders
import published_layouts as published
import pytest
import torch
from test_conversion_layouts import CHECKPOINTS, checkpoint
from transformers import AutoProcessor, ClapModel

from modeling_supclap import CEDFeatureExtractor, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import saving, supclap_from_clap
from modeling_supclap.conversion.laion import laion_feature_extractor
from modeling_supclap.conversion.layouts import LAYOUTS, Conversion, convert_checkpoint
from modeling_supclap.conversion.saving import save_conversion, verify_saved

LAION = next(layout for layout in LAYOUTS if layout.name.startswith("LAION"))


@pytest.fixture
def conversion() -> Conversion:
    return convert_checkpoint(checkpoint(published.small_ml_clap()))


def test_a_whole_model_with_its_processor(tmp_path, conversion):
    save_conversion(conversion, tmp_path / "deep" / "out", builders.nllb_tokenizer(), verify=True)
    folder = tmp_path / "deep" / "out"
    model, processor = SupCLAPModel.from_pretrained(folder), SupCLAPProcessor.from_pretrained(folder)
    assert type(AutoProcessor.from_pretrained(folder)) is SupCLAPProcessor
    assert all(torch.equal(value, conversion.model.state_dict()[name]) for name, value in model.state_dict().items())
    inputs = processor(audio=builders.tone(300), text="rain", sampling_rate=16000, language="fra", return_tensors="pt")
    assert torch.isfinite(model(**inputs).logits_per_audio).all()
    entries = json.loads((folder / "provenance.json").read_text())
    assert [entry["part"] for entry in entries] == [part.part for part in conversion.parts]
    text = next(entry for entry in entries if entry["part"] == "text_model")
    assert text == {
        "part": "text_model",
        "kind": "m2m_100",
        "source": "the origin",
        "revision": None,
        "files": ["x.pt"],
        "sha256": "0" * 64,
        "layout": "ML-CLAP",
        "license": "cc-by-nc-4.0",
        "base_model": "",
        "tensors": 19,
        "parameters": sum(parameter.numel() for parameter in model.text_model.parameters()),
    }
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert not list(folder.glob("*.bin"))


def test_an_empty_output_folder_gets_normal_permissions(tmp_path, conversion):
    for name in ("ordinary", "out"):
        (tmp_path / name).mkdir()
    save_conversion(conversion, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


def test_without_a_tokenizer_there_is_the_feature_extractor(tmp_path, conversion):
    save_conversion(conversion, tmp_path / "out")
    assert CEDFeatureExtractor.from_pretrained(tmp_path / "out").hop_size == 160
    assert not list((tmp_path / "out").glob("tokenizer*"))


TOWERS = [("ML-CLAP", "mean"), ("MS-CLAP 2022", "cls"), ("MS-CLAP 2023", "last")]


@pytest.mark.parametrize(("name", "pooling"), TOWERS)
@pytest.mark.parametrize("part", ["audio", "text"])
def test_a_tower_can_be_used_in_another_model(tmp_path, name, pooling, part):
    conversion = convert_checkpoint(checkpoint(CHECKPOINTS[name]()))
    save_conversion(conversion, tmp_path / part, verify=True)
    other = "text" if part == "audio" else "audio"
    builders.supclap_model().get_submodule(f"{other}_model").save_pretrained(tmp_path / other)
    joined = SupCLAPModel.from_encoders(str(tmp_path / "audio"), str(tmp_path / "text"), text_pooling=pooling)
    tower, expected = (model.get_submodule(f"{part}_model") for model in (joined, conversion.model))
    assert type(tower) is type(expected)
    torch.testing.assert_close(tower.state_dict(), expected.state_dict(), atol=0, rtol=0)


def test_a_clap_is_verified(tmp_path):
    for fused in (False, True):
        model = supclap_from_clap(ClapModel(published.laion_config(fused)))
        conversion = Conversion(LAION, model, laion_feature_extractor(fused), (), {})
        save_conversion(conversion, tmp_path / str(fused), verify=True)


# ---- nothing half-written ----


@pytest.mark.parametrize("used", ["file in it", "a file itself"])
def test_a_used_folder_is_unchanged(tmp_path, conversion, used):
    out = tmp_path / "out"
    if used == "file in it":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    else:
        out.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"\bout\b"):
        save_conversion(conversion, out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("step", ["write_provenance", "verify_saved"])
def test_a_failure_leaves_nothing(tmp_path, monkeypatch, conversion, step):
    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(saving, step, fail)
    with pytest.raises(OSError, match="the disk is full"):
        save_conversion(conversion, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


# ---- verification ----


def test_a_changed_weight_is_found(tmp_path, conversion):
    save_conversion(conversion, tmp_path / "out")
    with torch.no_grad():
        conversion.model.text_projection.linear2.bias[3] += 1e-6
    with pytest.raises(ValueError, match=r"SupCLAPModel.*text_projection\.linear2\.bias"):
        verify_saved(conversion, tmp_path / "out")


def test_a_lost_weight_is_found(tmp_path, conversion):
    save_conversion(conversion, tmp_path / "out")
    tensors = conversion.model.state_dict()
    del tensors["logit_scale"]
    conversion.model.save_pretrained(tmp_path / "out", state_dict=tensors)
    with pytest.raises(ValueError, match="logit_scale"):
        verify_saved(conversion, tmp_path / "out")


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_damaged_weights_are_found(tmp_path, conversion, value):
    with torch.no_grad():
        conversion.model.audio_model.norm.bias[0] = value
    with pytest.raises(ValueError, match=r"audio embedding|audio_model\.norm\.bias"):
        save_conversion(conversion, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_another_configuration_is_found(tmp_path, conversion):
    save_conversion(conversion, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["projection_hidden_act"] = "gelu"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="audio embedding"):
        verify_saved(conversion, tmp_path / "out")


# ---- the tokenizer ----


@pytest.mark.parametrize(
    ("config", "message"), [({"pad_token_id": 3}, r"\b1\b.*\b3\b"), ({"vocab_size": 256_206}, "256047")]
)
def test_another_tokenizer_is_refused(tmp_path, conversion, config, message):
    model = published.build_on_meta(SupCLAPModel)(builders.supclap_config(builders.sonar_config(**config)))
    with pytest.raises(ValueError, match=message):
        save_conversion(replace(conversion, model=model), tmp_path / "out", builders.nllb_tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_an_audio_tower_with_a_tokenizer_is_an_error(tmp_path):
    audio = convert_checkpoint(checkpoint(CHECKPOINTS["CED"]()))
    with pytest.raises(ValueError, match="CEDModel"):
        save_conversion(audio, tmp_path / "out", builders.nllb_tokenizer())


def test_captions_are_prepared_as_they_were_in_training(tmp_path, conversion):
    save_conversion(conversion, tmp_path / "ml-clap", builders.nllb_tokenizer())
    processor = SupCLAPProcessor.from_pretrained(tmp_path / "ml-clap")
    shouted, plain = (processor(text=text)["input_ids"] for text in ("A DOG, barks!", "a dog barks"))
    assert shouted == plain
    # LAION's texts end at 77 tokens.
    clap = Conversion(LAION, supclap_from_clap(builders.clap_model()), laion_feature_extractor(), (), {})
    tokenizer = builders.clap_processor().tokenizer
    tokenizer.model_max_length = 512
    save_conversion(clap, tmp_path / "laion", tokenizer)
    processor = SupCLAPProcessor.from_pretrained(tmp_path / "laion")
    assert len(processor(text="rain " * 200)["input_ids"][0]) == 77


@torch.no_grad()
def test_msclap_reads_texts_as_its_own_code_does(tmp_path):
    conversion, reference = (convert_checkpoint(checkpoint(published.small_msclap(2023))), builders.gpt2_tokenizer())
    save_conversion(conversion, tmp_path / "out", builders.gpt2_tokenizer(), verify=True)
    model = SupCLAPModel.from_pretrained(tmp_path / "out")
    processor = SupCLAPProcessor.from_pretrained(tmp_path / "out")
    texts = ["a dog barks", "the rain falls while a dog barks"]
    inputs = processor(text=texts, audio=builders.noise(44_100), sampling_rate=44_100, return_tensors="pt")

    embeds = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
    for text, embedding in zip(texts, embeds, strict=True):
        ids = torch.tensor(reference([f"{text} <|endoftext|>"])["input_ids"])
        last = conversion.model.text_model(ids).last_hidden_state[:, -1]
        expected = torch.nn.functional.normalize(conversion.model.text_projection(last), dim=-1)[0]
        torch.testing.assert_close(embedding, expected, atol=1e-5, rtol=0)
    assert model.get_audio_features(inputs["input_features"]).pooler_output.isfinite().all()
