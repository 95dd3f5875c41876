"""Strict loading: missing weights are errors, where transformers uses random weights and only warns."""

import os

import builders
import published_layouts as published
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, M2M100ForConditionalGeneration, M2M100Model
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

from modeling_supclap import CEDModel, SonarTextModel, SupCLAPModel, strict_loading
from modeling_supclap.strict_loading import find_file

DECODER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}


@pytest.mark.parametrize("whole", [M2M100Model, M2M100ForConditionalGeneration])
def test_a_translation_model_is_rejected_as_sonar(tmp_path, whole):
    whole(builders.sonar_config(**DECODER)).save_pretrained(tmp_path)
    _, report = M2M100Encoder.from_pretrained(tmp_path, output_loading_info=True)
    assert len(report["missing_keys"]) == 35, "transformers itself finds not one weight and only warns"
    with pytest.raises(ValueError, match=r"SonarTextModel.*\d+"):
        SonarTextModel.from_pretrained(tmp_path)


def test_an_encoder_under_a_prefix_is_refused(tmp_path):
    model = SonarTextModel(builders.sonar_config())
    model.save_pretrained(
        tmp_path, state_dict={f"encoder.{name}": value for name, value in model.state_dict().items()}
    )
    with pytest.raises(ValueError, match="SonarTextModel"):
        SonarTextModel.from_pretrained(tmp_path)


def test_one_lacking_weight_is_enough(tmp_path):
    model = builders.supclap_model()
    tensors = model.state_dict()
    del tensors["audio_model.blocks.1.norm2.bias"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(ValueError, match=r"SupCLAPModel.*audio_model.blocks.1.norm2.bias"):
        SupCLAPModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 1 "):
        AutoModel.from_pretrained(tmp_path)


def test_the_authors_layout_of_ced_is_refused(tmp_path):
    encoder = published.random(published.ced_encoder(32, 2))
    CEDModel(builders.ced_config()).config.save_pretrained(tmp_path)
    save_file(published.ced_original(encoder, {}), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"CEDModel.*init_bn\.bias"):
        CEDModel.from_pretrained(tmp_path)


def test_missing_weights_are_allowed_with_a_loading_report(tmp_path):
    SonarTextModel(builders.sonar_config(encoder_layers=1)).save_pretrained(tmp_path)
    config = builders.sonar_config(encoder_layers=2)
    with pytest.raises(ValueError, match="lacks 16 "):
        SonarTextModel.from_pretrained(tmp_path, config=config)
    _, report = SonarTextModel.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert len(report["missing_keys"]) == 16


def test_a_model_may_be_drawn_on_purpose():
    model = SonarTextModel.from_pretrained(None, config=builders.sonar_config(), state_dict={})
    assert torch.isfinite(model.embed_tokens.weight).all()


def test_an_error_without_a_folder_is_looked_up_nowhere(monkeypatch):
    monkeypatch.setattr(strict_loading, "find_file", None)
    with pytest.raises(ValueError, match="as it was"), strict_loading.naming_open_clip(None):
        raise ValueError("as it was")


def test_a_clap_is_rejected_as_a_supclap_model(tmp_path):
    clap = builders.clap_model()
    clap.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="SupCLAPModel"):
        SupCLAPModel.from_pretrained(tmp_path, config=builders.supclap_config(clap.config.text_config))


def test_a_file_is_found_in_a_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_file(tmp_path, "config.json") == str(tmp_path / "config.json")
    for name in (tmp_path, tmp_path / "config.json", "./nowhere", "nobody/nothing", ""):
        assert find_file(name, "weights.bin") is None


def test_a_folder_with_both_formats_keeps_its_own_error(tmp_path):
    builders.save_supclap(tmp_path)
    (tmp_path / "open_clip_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(OSError, match="damaged"):
        SupCLAPModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_saved_weights_have_the_permissions_of_new_files(tmp_path, umask):
    before = os.umask(umask)
    try:
        builders.supclap_model().save_pretrained(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
