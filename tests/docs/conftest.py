"""Files that the pages and notebooks expect in the folder of a reader."""

import shutil
from pathlib import Path

import builders
import pytest
import soundfile
from transformers import BertModel

from modeling_supclap import CEDModel

METRICS = Path(__file__).parents[2] / "metrics"
SOUNDS = ("bell", "birds", "dog", "door", "engine", "owl", "rain", "siren", "train", "wind")


@pytest.fixture(scope="session")
def things_of_a_reader(tmp_path_factory) -> Path:
    """Files used in the pages: a trained model, recordings with captions, and tiny models with real names."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("outputs/synthetic", "outputs/esc10"):
        builders.save_supclap(folder / name)
    builders.save_clap(folder / "laion/clap-htsat-unfused")
    CEDModel(builders.ced_config()).save_pretrained(folder / "mispeech/ced-base")
    builders.bert_processor().feature_extractor.save_pretrained(folder / "mispeech/ced-base")
    tower = builders.supclap_model().text_model
    assert isinstance(tower, BertModel)
    tower.save_pretrained(folder / "sentence-transformers/LaBSE")
    builders.bert_tokenizer().save_pretrained(folder / "sentence-transformers/LaBSE")

    sounds = folder / "my_sounds"
    sounds.mkdir()
    lines = ["file_name,caption"]
    for number, name in enumerate(SOUNDS):
        soundfile.write(sounds / f"{name}.wav", 0.5 * builders.tone(300.0 * (number + 1)), 16000)
        lines.append(f"{name}.wav,the sound of a {name}")
    soundfile.write(sounds / "dawn.flac", builders.noise(12 * 16000), 16000)
    lines.append("dawn.flac,birds sing at dawn")
    (sounds / "metadata.csv").write_text("\n".join(lines))

    (folder / "my.yaml").write_text("dataset: synthetic\n")
    return folder


@pytest.fixture
def at_a_readers(things_of_a_reader, tmp_path, monkeypatch):
    """Temporary working folder with these files."""
    shutil.copytree(things_of_a_reader, tmp_path, dirs_exist_ok=True)
    (tmp_path / "metrics").symlink_to(METRICS)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "sounds").symlink_to(METRICS.parent / "examples" / "sounds")
    monkeypatch.chdir(tmp_path)
