"""Fine-tuning a published CLAP on a folder: other column names, a part of the weights, and the standard layout."""

import json
import math

import builders
import open_clip_folders as folders
import pytest
import torch
from commands import run_recipe
from huggingface_hub import ModelCard
from peft import PeftModel
from recordings import captioned_folder
from safetensors.torch import load_file

from modeling_supclap import SupCLAPModel
from modeling_supclap.conversion import load_model
from modeling_supclap.evaluation import Results
from modeling_supclap.recipes import convert_checkpoint, train_supclap
from modeling_supclap.recipes.options import ModelArguments, PostTrainingArguments, TrainedPartArguments


def make_clap_and_sounds(folder):
    """Return the folder of a CLAP, and the options of the recipe for captioned recordings."""
    sounds = captioned_folder(folder / "sounds", 12, ("path", "what"))
    columns = ["--audio_column", "path", "--caption_column", "what"]
    return builders.save_clap(folder / "clap"), ["--dataset", "audio_folder", "--data_dir", sounds, *columns]


@pytest.mark.parametrize("part", [("--train_last_layers", "1"), ("--lora_rank", "2")])
def test_a_clap_is_tuned_and_stays_loadable(tmp_path, part, capsys):
    clap, data = make_clap_and_sounds(tmp_path)
    run = ["--model", clap, "--output_dir", tmp_path / "run", "--use_cpu", "true"]
    short = ["--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--learning_rate", "1e-2"]
    temperature = ["--temperature", "0.03", "--train_temperature", "false"]
    run_recipe(train_supclap, *data, *run, *short, *part, *temperature)
    assert "temperature: 0.03, fixed" in capsys.readouterr().out
    recorded = Results.load(tmp_path / "run").content["training"]["arguments"]
    assert (recorded["temperature"], recorded["train_temperature"]) == (0.03, False)
    assert "0.03" in ModelCard.load(tmp_path / "run" / "README.md").text

    loaded, report = SupCLAPModel.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.logit_scale.item() == pytest.approx(-math.log(0.03))
    before = train_supclap.load_start(str(clap))[0].state_dict()
    moved = {name for name, value in loaded.state_dict().items() if not torch.equal(value, before[name])}
    assert "text_model.encoder.layer.1.attention.self.query.weight" in moved
    assert "audio_projection.linear1.weight" in moved
    assert not [name for name in moved if "text_model.encoder.layer.0." in name or "embeddings" in name]
    assert not (tmp_path / "run" / "adapter").exists()


def test_adapters_of_all_blocks_are_saved_alone_and_merged(tmp_path):
    clap, data = make_clap_and_sounds(tmp_path)
    run = ["--model", clap, "--output_dir", tmp_path / "run", "--use_cpu", "true", "--learning_rate", "1e-2"]
    short = ["--per_device_train_batch_size", "4", "--num_train_epochs", "1"]
    part = ["--lora_rank", "2", "--lora_alpha", "3", "--train_last_layers", "all", "--save_adapter", "true"]
    run_recipe(train_supclap, *data, *run, *short, *part)
    settings = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 3)
    names = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    blocks = {name.split(".attention")[0] for name in names if "text_model" in name}
    assert blocks == {f"base_model.model.text_model.encoder.layer.{number}" for number in range(2)}
    base = train_supclap.load_start(str(clap))[0]
    alone = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).merge_and_unload().state_dict()
    merged = SupCLAPModel.from_pretrained(tmp_path / "run").state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(alone[name], value, msg=name)
    start = train_supclap.load_start(str(clap))[0].state_dict()
    assert not torch.equal(start["logit_scale"], merged["logit_scale"])


def test_a_clap2_is_tuned_and_written_back(tmp_path):
    """With adapters of all blocks, gradient caching, checkpointing, and spectrograms on the device."""
    folders.write_folder(tmp_path / "clap2", "B")
    _, data = make_clap_and_sounds(tmp_path)
    run = ["--model", tmp_path / "clap2", "--output_dir", tmp_path / "run", "--use_cpu", "true"]
    run += ["--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--learning_rate", "1e-2"]
    run += ["--lora_rank", "2", "--train_last_layers", "all", "--save_adapter", "true"]
    run += ["--cached_chunk_size", "3", "--gradient_checkpointing", "true", "--features_on_device", "true"]
    run_recipe(train_supclap, *data, *run)

    model, adapter = SupCLAPModel.from_pretrained(tmp_path / "run"), tmp_path / "run" / "adapter"
    base = train_supclap.load_start(str(tmp_path / "clap2"))[0]
    assert not torch.equal(base.audio_model.blocks[0].attn.gate.weight, model.audio_model.blocks[0].attn.gate.weight)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "clap2"
    alone = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(alone[name], value, msg=name)
    extractor = model.processor.feature_extractor
    assert (extractor.pad_to_samples, extractor.chunk_length) == (1024, 30)
    assert "random initialisation" not in (tmp_path / "run" / "README.md").read_text()

    convert_checkpoint.main([str(tmp_path / "run"), "--to", "open_clip", "--out", str(tmp_path / "back")])
    back, clip = load_model(str(tmp_path / "back")), builders.noise(30_000)
    for found, expected in zip(embed(back, clip), embed(model, clip), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="naflex"):
        convert_checkpoint.main([str(tmp_path / "run"), "--to", "clap", "--out", str(tmp_path / "clap_back")])


def embed(model, clip):
    return model.encode_audio(clip, sampling_rate=48_000, convert_to_tensor=True), model.encode_text(
        ["w1 w2", "w3"], convert_to_tensor=True
    )


@pytest.mark.parametrize("save", [builders.save_clap, builders.save_supclap])
def test_a_start_model_takes_the_temperature_and_bias_that_are_given(tmp_path, save, capsys):
    folder = str(save(tmp_path / "model"))
    kept, _ = train_supclap.load_start(folder)
    assert train_supclap.report_temperature(kept)["temperature"] != 0.03
    model, _ = train_supclap.load_start(folder, temperature=0.03, logit_bias=-10.0)
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.03)
    for name, value in kept.named_parameters():
        assert name == "logit_scale" or torch.equal(value, model.get_parameter(name))

    train_supclap.choose_parameters(TrainedPartArguments(train_temperature=False, train_bias=True), model)
    expected = {"temperature": 0.03, "train_temperature": False, "logit_bias": -10.0, "train_bias": True}
    assert train_supclap.report_temperature(model) == expected
    assert "temperature: 0.03, fixed; bias of the logits: -10, trained" in capsys.readouterr().out
    model.save_pretrained(tmp_path / "saved")
    saved = SupCLAPModel.from_pretrained(tmp_path / "saved")
    assert (saved.config.temperature, saved.logit_bias.item()) == (0.03, -10.0)


@pytest.mark.parametrize("arguments", [ModelArguments, PostTrainingArguments])
def test_a_temperature_that_is_not_positive_is_refused(arguments):
    with pytest.raises(ValueError, match=r"temperature is 0\.0"):
        arguments(temperature=0.0)


def test_an_unused_fusion_is_reported(tmp_path, capsys):
    config = builders.clap_config()
    for fused in (False, True):
        config.audio_config.enable_fusion = fused
        builders.clap_model(config).save_pretrained(tmp_path / "clap")
        builders.clap_processor("fusion" if fused else "rand_trunc").save_pretrained(tmp_path / "clap")
        train_supclap.load_start(str(tmp_path / "clap"))
        assert ("fusion" in capsys.readouterr().out) == fused
