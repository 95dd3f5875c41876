"""A published CLAP tuned on recordings of one's own: other names of columns, a part of the weights, a stock model."""

import builders
import pytest
import soundfile
import torch
from commands import run_recipe

from modeling_supclap import SupCLAPModel
from modeling_supclap.recipes import models, train_supclap


@pytest.fixture
def folder(tmp_path):
    """A ClapModel, and recordings with a table whose columns have names of their own."""
    builders.clap_model().save_pretrained(tmp_path / "clap")
    builders.clap_processor().save_pretrained(tmp_path / "clap")
    (tmp_path / "sounds").mkdir()
    lines = ["path;what"]
    for number in range(12):
        soundfile.write(tmp_path / "sounds" / f"{number}.wav", 0.5 * builders.tone(200.0 * (number + 1)), 16000)
        lines.append(f"{number}.wav;a tone {number}")
    (tmp_path / "sounds" / "metadata.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("part", [("--train_last_layers", "1"), ("--lora_rank", "2")])
def test_a_clap_is_tuned_and_stays_loadable(folder, part):
    data = ["--dataset", "audio_folder", "--data_dir", folder / "sounds", "--audio_column", "path"]
    run = ["--caption_column", "what", "--model", folder / "clap", "--output_dir", folder / "run", "--use_cpu", "true"]
    short = ["--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--learning_rate", "1e-2"]
    run_recipe(train_supclap, *data, *run, *short, *part)

    loaded, report = SupCLAPModel.from_pretrained(folder / "run", output_loading_info=True)
    assert not any(report.values()), report
    before = models.load_start(str(folder / "clap"))[0].state_dict()
    moved = {name for name, value in loaded.state_dict().items() if not torch.equal(value, before[name])}
    assert "text_model.encoder.layer.1.attention.self.query.weight" in moved
    assert "audio_projection.linear1.weight" in moved
    assert not [name for name in moved if "text_model.encoder.layer.0." in name or "embeddings" in name]
