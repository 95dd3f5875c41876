"""Configurations: published files load unchanged, impossible shapes raise errors, and saving loses nothing."""

import json
import math

import builders
import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, BertConfig

from modeling_supclap import CEDConfig, CEDModel, SupCLAPConfig


@pytest.fixture
def hub_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(builders.PUBLISHED_CED_CONFIG))
    return tmp_path


def test_published_file_loads_unchanged(hub_folder):
    config = CEDConfig.from_pretrained(hub_folder)
    ours = {
        name: getattr(config, name)
        for name in builders.PUBLISHED_CED_CONFIG
        if name not in ("transformers_version", "torch_dtype")
    }
    expected = {name: builders.PUBLISHED_CED_CONFIG[name] for name in ours}
    expected["id2label"] = {int(index): label for index, label in builders.PUBLISHED_CED_CONFIG["id2label"].items()}
    assert ours == expected


def test_published_file_survives_saving(hub_folder, tmp_path):
    config = CEDConfig.from_pretrained(hub_folder)
    config.save_pretrained(tmp_path / "again")
    again = CEDConfig.from_pretrained(tmp_path / "again")
    assert (again.outputdim, again.loss, again.num_labels) == (527, "BCE", 527)


def test_standard_names_are_the_same_fields():
    config = CEDConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    assert (config.embed_dim, config.num_heads, config.depth) == (64, 4, 2)
    config.hidden_size = 128
    assert config.embed_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_stride": 10}, "patch_stride=10"),
        ({"patch_size": [64, 4], "patch_stride": 4}, "must be .64, 4."),
        ({"patch_size": [48, 4]}, "n_mels=64.*patch_size=48"),
        ({"n_mels": 60}, "n_mels=60.*patch_size=16"),
        ({"embed_dim": "wide"}, "'embed_dim'"),
    ],
)
def test_impossible_encoders_are_refused(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        CEDConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": math.inf}, "temperature.*inf"),
        ({"temperature": math.nan}, "temperature.*nan"),
        ({"projection_dim": 0}, "projection_dim"),
        ({"text_pooling": "max"}, "(?s)text_pooling.*max"),
        ({"projection_type": "linear"}, "(?s)projection_type.*linear"),
    ],
)
def test_impossible_models_are_refused(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        SupCLAPConfig(**fields)


def test_defaults_are_the_towers_of_ml_clap():
    config = SupCLAPConfig()
    assert config.audio_config.to_dict() == CEDConfig(**builders.CED_SIZES["base"]).to_dict()
    text = config.text_config
    assert (text.model_type, text.vocab_size, text.hidden_size, text.num_hidden_layers) == (
        "m2m_100",
        256206,
        1024,
        24,
    )
    assert text.encoder_layerdrop == 0
    assert (config.projection_dim, config.temperature, config.text_pooling) == (1024, 0.07, "mean")


def test_towers_as_dictionaries_or_as_objects():
    as_objects = SupCLAPConfig(audio_config=builders.ced_config(), text_config=builders.sonar_config())
    as_dicts = SupCLAPConfig(
        audio_config=builders.ced_config().to_dict(), text_config=builders.sonar_config().to_dict()
    )
    assert as_objects.to_dict() == as_dicts.to_dict()


def test_model_config_survives_saving(tmp_path):
    config = builders.supclap_config(temperature=0.05, logit_bias=-10.0, text_pooling="cls")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is SupCLAPConfig
    assert type(again.text_config) is BertConfig
    assert again.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize(
    ("text", "message"), [({"hidden_size": 8}, "'model_type'"), ({"model_type": "nothing"}, "nothing")]
)
def test_unusable_towers_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        SupCLAPConfig(text_config=text)


def test_a_saved_configuration_has_no_paths_of_this_machine(tmp_path):
    config = builders.supclap_config()
    config.audio_config._name_or_path = f"{tmp_path}/ced-small/"
    config.text_config._name_or_path = "google-bert/bert-base-uncased"
    content = config.to_dict()
    names = [content[part]["_name_or_path"] for part in ("audio_config", "text_config")]
    assert names == ["ced-small", "google-bert/bert-base-uncased"]
    assert config.audio_config._name_or_path == f"{tmp_path}/ced-small/"


def test_joining_leaves_a_built_tower_as_it_is():
    tower = CEDModel._from_config(builders.ced_config(), attn_implementation="eager")
    config = SupCLAPConfig(audio_config=tower.config)
    assert tower.config._attn_implementation == "eager"
    assert config.audio_config is tower.config


def test_construction_reads_no_file(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"opened {args}")

    monkeypatch.setattr("builtins.open", refuse)
    assert CEDConfig(outputdim=527).outputdim == 527
    assert builders.supclap_config().projection_dim == 16
