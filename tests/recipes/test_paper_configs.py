"""The configurations of the papers run as printed, with tiny encoders, clips and translations."""

import json

import builders
import dataset_folders
import pytest
import soundfile
import torch
import yaml
from commands import run_recipe

from modeling_supclap import CEDFeatureExtractor, CEDModel, SonarTextModel
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.translation.join import read_captions
from modeling_supclap.datasets_scripts.translation.table import SCHEMA, source_hash, write_translations
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes import train_supclap
from modeling_supclap.recipes.options import TrainedPartArguments

CONFIGS = train_supclap.DEFAULT_CONFIG.parent


@pytest.fixture
def data_dir(tmp_path):
    """AudioCaps folder with a tone for each clip."""
    made = dataset_folders.audiocaps(tmp_path / "audiocaps", train=30, held_out=4)
    for number, path in enumerate(made.audio):
        soundfile.write(path, 0.5 * builders.tone(200.0 + 50 * number, samples=8000), 16000)
    return made.config["data_dir"]


@pytest.fixture
def towers(tmp_path):
    torch.manual_seed(0)
    CEDModel(builders.ced_config()).save_pretrained(tmp_path / "ced")
    CEDFeatureExtractor().save_pretrained(tmp_path / "ced")
    SonarTextModel(builders.sonar_config()).save_pretrained(tmp_path / "sonar")
    builders.nllb_tokenizer().save_pretrained(tmp_path / "sonar")
    builders.supclap_model(builders.supclap_config(builders.sonar_config())).save_pretrained(tmp_path / "ml-clap")
    builders.nllb_processor().save_pretrained(tmp_path / "ml-clap")
    return tmp_path


def translations(data_dir, path):
    """Write translations of every caption into seven languages."""
    captions = [
        caption for rows in load_splits("audiocaps", data_dir=data_dir).values() for caption in read_captions(rows)
    ]
    lines = [
        {
            "clip_id": caption.clip_id,
            "caption_index": caption.caption_index,
            "language": language,
            "text": f"{language} {caption.text}",
            "source_hash": source_hash(caption.text),
        }
        for caption in captions
        for language in LANGUAGES[1:]
    ]
    write_translations(path, [{name: line.get(name) for name in SCHEMA.names} for line in lines])
    return path


def run(config, *overrides):
    small = ["--num_train_epochs", "1", "--dataloader_num_workers", "0", "--logging_steps", "1", "--use_cpu", "true"]
    run_recipe(train_supclap, CONFIGS / config, *small, *overrides)


def results_of(folder, config):
    """Return the results of a run; check its objective and optimiser against the file."""
    results = json.loads((folder / "results.json").read_text())
    printed = yaml.safe_load((CONFIGS / config).read_text())
    for name in ("learning_rate", "loss", "svr", "languages", "per_device_train_batch_size", "lr_scheduler_type"):
        if name in printed:
            assert results["training"]["arguments"][name] == printed[name], name
    return results


def test_supclap_on_audiocaps(towers, data_dir):
    out = towers / "out"
    encoders = ("--audio_encoder", towers / "ced", "--text_encoder", towers / "sonar")
    run("supclap_audiocaps.yaml", *encoders, "--data_dir", data_dir, "--output_dir", out)
    results = results_of(out, "supclap_audiocaps.yaml")
    assert results["training"]["arguments"]["svr"] == "bi-dynamic"
    assert results["training"]["arguments"]["svr_beta"] == 0.01
    assert results["protocol"]["clips"] == 4
    assert "t2a" in results["scores"]["retrieval"]["eng"]


def test_table_9_begins_towers_anew_in_their_shape(towers):
    names = {"audio_encoder": str(towers / "ced"), "text_encoder": str(towers / "sonar")}
    processor = train_supclap.build_processor(train_supclap.ModelArguments(**names), [], ["eng"])
    torch.manual_seed(1)
    anew = train_supclap.ModelArguments(**names, projection_dim=8, random_weights=["text"])
    model = train_supclap.build_model(anew, processor)
    loaded = SonarTextModel.from_pretrained(towers / "sonar").state_dict()
    begun = model.text_model.state_dict()
    assert loaded.keys() == begun.keys()
    name = next(name for name in loaded if name.endswith("fc1.weight"))
    assert not torch.equal(loaded[name], begun[name])
    heard = CEDModel.from_pretrained(towers / "ced").state_dict()
    torch.testing.assert_close(dict(model.audio_model.state_dict()), dict(heard), rtol=0, atol=0)
    shallow = train_supclap.ModelArguments(**names, random_weights=["text"], text_config={"encoder_layers": 1})
    model = train_supclap.build_model(shallow, processor)
    assert (len(model.text_model.layers), builders.sonar_config().encoder_layers) == (1, 2)
    with pytest.raises(ValueError, match="random_weights"):
        train_supclap.ModelArguments(random_weights=["both"])
    for kind in ("audio", "text"):
        with pytest.raises(ValueError, match=f"{kind}_encoder, and set --random_weights {kind}"):
            train_supclap.ModelArguments(**{name: path for name, path in names.items() if name != f"{kind}_encoder"})


def test_a_fixed_temperature_stays():
    model = builders.supclap_model()
    train_supclap.choose_parameters(TrainedPartArguments(train_temperature=False), model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"logit_scale"}


def test_atri_on_audiocaps(towers, data_dir):
    table = translations(data_dir, towers / "audiocaps.parquet")
    out = towers / "out"
    start = ("--model", towers / "ml-clap", "--translations", table)
    run("atri_kcl_audiocaps.yaml", *start, "--data_dir", data_dir, "--output_dir", out)
    results = results_of(out, "atri_kcl_audiocaps.yaml")
    assert results["training"]["arguments"]["loss"] == "kcl"
    assert set(LANGUAGES) <= results["scores"]["retrieval"].keys()


def test_every_configuration_starts_with_its_claim():
    names = {path.name for path in CONFIGS.glob("*.yaml")}
    for name in names:
        text = (CONFIGS / name).read_text()
        assert text.startswith("# "), f"{name} opens with the claim it stands for"
        assert yaml.safe_load(text)["output_dir"].startswith("outputs/")
