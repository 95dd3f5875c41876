"""The kind of a saved model, by its files, and one sentence for all others."""

import json

import builders
import numpy as np
import open_clip_folders as folders
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from modeling_supclap import SupCLAPModel
from modeling_supclap.conversion import kinds
from modeling_supclap.conversion.kinds import find_kind, load_model, load_processor
from modeling_supclap.conversion.provenance import origins
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.recipes.train_supclap import load_start


def write(folder, name, content):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return str(folder)


def test_each_kind_is_recognised(tmp_path):
    folders.write_folder(tmp_path / "clap2", "A")
    write(tmp_path / "clap2", "config.json", {"model_type": "clap2"})
    assert find_kind(str(tmp_path / "clap2")) == "open_clip"
    assert find_kind(str(builders.save_supclap(tmp_path / "ours"))) == "supclap"
    assert find_kind(str(builders.save_clap(tmp_path / "clap"))) == "clap"
    for model_type in ("pe_audio", "pe_audio_video"):
        with pytest.raises(ValueError, match=r"examples/pe_av\.py"):
            find_kind(write(tmp_path / "pe", "config.json", {"model_type": model_type}))
    write(tmp_path / "st", "config.json", {"model_type": "embedding_gemma2"})
    assert find_kind(write(tmp_path / "st", "modules.json", [])) == "sentence_transformers"
    # A model of ours that is saved for sentence-transformers stays ours.
    write(tmp_path / "ours", "modules.json", [])
    assert find_kind(str(tmp_path / "ours")) == "supclap"


@pytest.mark.parametrize("load", [find_kind, load_embedding_model, load_start, SupCLAPModel.from_pretrained])
def test_an_unknown_kind_is_refused_by_name(tmp_path, load):
    folder = write(tmp_path / "other", "config.json", {"model_type": "clap2", "auto_map": {"AutoModel": "x.Y"}})
    with pytest.raises(ValueError, match="clap2") as error:
        load(folder)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("kind", ["audio", "text"])
def test_an_unknown_tower_is_refused_without_a_list_of_all_types(tmp_path, kind):
    folder = write(tmp_path / "other", "config.json", {"model_type": "clap2"})
    pair = (folder, str(tmp_path)) if kind == "audio" else (str(tmp_path), folder)
    with pytest.raises((ValueError, OSError), match=r"clap2|config\.json") as error:
        SupCLAPModel.from_encoders(*pair)
    assert len(str(error.value)) < 700


def test_a_missing_folder_and_an_empty_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_kind(str(tmp_path / "nowhere"))
    (tmp_path / "notes.gguf").write_text("x")
    with pytest.raises(ValueError, match=r"config\.json.*notes\.gguf"):
        find_kind(str(tmp_path))
    with pytest.raises(ValueError, match=r"notes\.gguf is a file"):
        find_kind(str(tmp_path / "notes.gguf"))


def test_a_hub_model_is_recognised_by_one_request(tmp_path, monkeypatch):
    folder, requests = builders.save_supclap(tmp_path / "ours"), []

    def download(name, allow_patterns):
        requests.append((name, allow_patterns))
        if name == "nobody/nothing":
            raise LocalEntryNotFoundError("cannot connect\nhint")
        return str(folder)

    monkeypatch.setattr(kinds, "snapshot_download", download)
    assert find_kind("somebody/ours") == "supclap"
    with pytest.raises(FileNotFoundError, match=r"nobody/nothing.*cannot connect$"):
        find_kind("nobody/nothing")
    assert [name for name, _ in requests] == ["somebody/ours", "nobody/nothing"]
    assert {"config.json", "open_clip_config.json", "modules.json"} <= set(requests[0][1])


@pytest.mark.parametrize(
    ("modules", "settings", "kind"),
    [
        (["Transformer", "Normalize"], {"prompts": {"query": ""}}, "clap"),
        (["Transformer", "Dense"], {}, "sentence_transformers"),
        (["Transformer"], {"prompts": {"query": "sound of "}}, "sentence_transformers"),
        (["Transformer"], {"truncate_dim": 8}, "sentence_transformers"),
    ],
)
def test_modules_and_prompts_make_a_clap_a_model_of_sentence_transformers(tmp_path, modules, settings, kind):
    entries = [{"type": f"sentence_transformers.{module}"} for module in modules]
    write(tmp_path / "model", "modules.json", entries)
    write(tmp_path / "model", "config_sentence_transformers.json", settings)
    assert find_kind(write(tmp_path / "model", "config.json", {"model_type": "clap"})) == kind


def test_other_families_of_sentence_transformers_are_refused(tmp_path):
    write(tmp_path / "model", "modules.json", [])
    name = write(tmp_path / "model", "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"})
    with pytest.raises(ValueError, match="MultiVectorEncoder"):
        find_kind(name)


@pytest.mark.parametrize("load", [load_start, load_processor])
def test_a_model_that_only_embeds_cannot_start_a_training(tmp_path, load):
    write(tmp_path / "st", "config.json", {"model_type": "embedding_gemma2"})
    folder = write(tmp_path / "st", "modules.json", [])
    with pytest.raises(ValueError, match=r"sentence_transformers.*not trained"):
        load(folder)


def test_one_function_loads_each_kind_with_its_processor(tmp_path):
    folders.write_folder(tmp_path / "clap2", "A")
    builders.save_clap(tmp_path / "clap")
    builders.save_supclap(tmp_path / "ours")
    for name in ("clap2", "clap", "ours"):
        model, folder = load_model(str(tmp_path / name)), str(tmp_path / name)
        (text,) = model.encode_text(["w7"])
        words = load_processor(folder)(text="w7", return_tensors="pt")
        with torch.no_grad():
            expected = model.get_text_features(**words).pooler_output[0]
        np.testing.assert_allclose(text, expected, atol=1e-5)
        np.testing.assert_allclose(text, load_embedding_model(folder).encode_text(["w7"], "eng")[0], atol=1e-5)
        if name != "ours":  # made from scratch
            assert [part.source for part in origins(model, folder)] == [name] * 3
