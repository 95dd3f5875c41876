"""The kind of a saved model, by its files, and one sentence for all others."""

import json

import builders
import numpy as np
import open_clip_folders as folders
import pytest
import torch

from modeling_supclap import SupCLAPModel
from modeling_supclap.conversion.kinds import find_kind, load_model, load_processor
from modeling_supclap.conversion.provenance import origins
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.recipes.models import load_start


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
    assert find_kind(write(tmp_path / "pe", "config.json", {"model_type": "pe_audio"})) == "pe_audio"
    write(tmp_path / "st", "config.json", {"model_type": "embedding_gemma2"})
    assert find_kind(write(tmp_path / "st", "modules.json", [])) == "sentence_transformers"
    # A model of ours that is saved for sentence-transformers stays ours.
    write(tmp_path / "ours", "modules.json", [])
    assert find_kind(str(tmp_path / "ours")) == "supclap"


@pytest.mark.parametrize("load", [find_kind, load_embedding_model, load_start, SupCLAPModel.from_pretrained])
def test_an_unknown_kind_is_refused_by_name(tmp_path, load):
    folder = write(
        tmp_path / "other", "config.json", {"model_type": "clap2", "auto_map": {"AutoModel": "x.Y"}}
    )
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
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"config\.json.*notes\.txt"):
        find_kind(str(tmp_path))


def test_a_model_that_only_embeds_cannot_start_a_training(tmp_path):
    folder = write(tmp_path / "pe", "config.json", {"model_type": "pe_audio"})
    with pytest.raises(ValueError, match=r"pe_audio.*not trained"):
        load_start(folder)


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
        np.testing.assert_allclose(
            text, load_embedding_model(folder).encode_text(["w7"], "eng")[0], atol=1e-5
        )
        if name != "ours":  # made from scratch
            assert [part.source for part in origins(model, folder)] == [name] * 3
