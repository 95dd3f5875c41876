"""Fine-tuning a published CLAP on a folder: other column names, a part of the weights, and the standard layout."""

import builders
import pytest
import torch
from commands import run_recipe
from recordings import captioned_folder

from modeling_supclap import SupCLAPModel
from modeling_supclap.recipes import models, train_supclap


@pytest.mark.parametrize("part", [("--train_last_layers", "1"), ("--lora_rank", "2")])
def test_a_clap_is_tuned_and_stays_loadable(tmp_path, part):
    clap, sounds = builders.save_clap(tmp_path / "clap"), captioned_folder(tmp_path / "sounds", 12, ("path", "what"))
    data = ["--dataset", "audio_folder", "--data_dir", sounds, "--audio_column", "path", "--caption_column", "what"]
    run = ["--model", clap, "--output_dir", tmp_path / "run", "--use_cpu", "true"]
    short = ["--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--learning_rate", "1e-2"]
    run_recipe(train_supclap, *data, *run, *short, *part)

    loaded, report = SupCLAPModel.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(report.values()), report
    before = models.load_start(str(clap))[0].state_dict()
    moved = {name for name, value in loaded.state_dict().items() if not torch.equal(value, before[name])}
    assert "text_model.encoder.layer.1.attention.self.query.weight" in moved
    assert "audio_projection.linear1.weight" in moved
    assert not [name for name in moved if "text_model.encoder.layer.0." in name or "embeddings" in name]


def test_an_unused_fusion_is_reported(tmp_path, capsys):
    config = builders.clap_config()
    for fused in (False, True):
        config.audio_config.enable_fusion = fused
        builders.clap_model(config).save_pretrained(tmp_path / "clap")
        builders.clap_processor("fusion" if fused else "rand_trunc").save_pretrained(tmp_path / "clap")
        models.load_start(str(tmp_path / "clap"))
        assert ("fusion" in capsys.readouterr().out) == fused
