"""Reading checkpoint files from all containers and locations, without running the code of a pickle."""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_hub import COMMIT, FakeHub, fake_hub
from processes import run_python
from safetensors.torch import save_file

from modeling_supclap.conversion import files
from modeling_supclap.conversion.files import read_checkpoint

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}
ROOT = Path(__file__).parents[2]


def refusal(path) -> str:
    """Return the reason in the error of a pickle that torch refuses."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_checkpoint(path)
    _, _, reason = str(caught.value).partition("torch refuses to load it: ")
    return reason.partition(". If you trust")[0]


def same(tensors):
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


CONTAINERS = {
    "flat": lambda t: t,
    "ordered": collections.OrderedDict,
    "state_dict": lambda t: {"epoch": 3, "state_dict": t, "optimizer": {"state": {}}},
    "model": lambda t: {"model": t, "config": {"depth": 12}},
    "module": lambda t: {f"module.{name}": value for name, value in t.items()},
    "parameters": lambda t: {name: torch.nn.Parameter(value, value.is_floating_point()) for name, value in t.items()},
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_in_every_container(tmp_path, container, zipped):
    path = tmp_path / "weights.pt"
    torch.save(CONTAINERS[container](TENSORS), path, _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(path)
    assert same(checkpoint.tensors)
    assert not any(value.requires_grad for value in checkpoint.tensors.values())
    assert (checkpoint.origin, checkpoint.config, checkpoint.revision) == ("weights.pt", {}, None)
    assert checkpoint.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_prefix_of_some_tensors_is_kept(tmp_path):
    torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.pt")
    assert set(read_checkpoint(tmp_path / "x.pt").tensors) == {"module.a", "b"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "other.pth"])
def test_folders(tmp_path, name):
    if name.endswith(".safetensors"):
        save_file(TENSORS, tmp_path / name)
    else:
        torch.save(TENSORS, tmp_path / name)
    (tmp_path / "config.json").write_text('{"model_type": "ced"}')
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# Card\n")
    checkpoint = read_checkpoint(tmp_path)
    assert same(checkpoint.tensors)
    assert (checkpoint.origin, checkpoint.license) == (tmp_path.name, "cc-by-nc-4.0")
    assert checkpoint.config == {"model_type": "ced"}
    assert read_checkpoint(tmp_path / name).license is None, "a file may lie beside a card of something else"


def test_safetensors_are_preferred_to_pickles(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    torch.save({"c": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert same(read_checkpoint(tmp_path).tensors)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_parts(tmp_path, suffix):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = {name: f"{stem}-{number}-of-2.{suffix}" for number, name in enumerate(TENSORS, start=1)}
    for name, file in names.items():
        part = {name: TENSORS[name]}
        save_file(part, tmp_path / file) if suffix == "safetensors" else torch.save(part, tmp_path / file)
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": names}))
    checkpoint = read_checkpoint(tmp_path)
    assert same(checkpoint.tensors)
    files = [tmp_path / file for file in sorted(names.values())]
    assert checkpoint.files == tuple(files)
    assert checkpoint.sha256 == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match="-2-of-2"):
        read_checkpoint(tmp_path)


# ---- legacy fairseq: an embedding as a module ----


def legacy(**kwargs):
    embedding = torch.nn.Embedding(5, 3, padding_idx=1)
    return {"state_dict": {"layers.0.fc1.bias": torch.ones(2)}, "embed_tokens": embedding, **kwargs}, embedding


def test_the_legacy_embedding_joins_the_tensors(tmp_path):
    loaded, embedding = legacy()
    torch.save(loaded, tmp_path / "x.pt")
    allowed = set(torch.serialization.get_safe_globals())
    checkpoint = read_checkpoint(tmp_path / "x.pt")
    assert torch.equal(checkpoint.tensors["embed_tokens.weight"], embedding.weight)
    assert set(torch.serialization.get_safe_globals()) == allowed, "the allowance ends with the reading"


def test_the_legacy_embedding_before_torch_1_6_must_be_saved_again(tmp_path):
    torch.save(legacy()[0], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert re.match(r"[\w ]*persistent_load", refusal(tmp_path / "x.pt"))


# ---- no code runs ----


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_not_run(tmp_path, zipped):
    path, mark = tmp_path / "x.pt", tmp_path / "ran"
    torch.save({"state_dict": TENSORS, "args": Bomb(mark)}, path, _use_new_zipfile_serialization=zipped)
    assert re.fullmatch(r"[\w ]* GLOBAL \w+\.mkdir [\w ]*", refusal(path)), "without torch's advice"
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the test's own pickle must be able to run code"


def test_numpy_numbers_and_paths_are_loaded(tmp_path):
    """LAION's checkpoints contain numpy numbers in the optimizer state; GLAP's configuration contains a path."""
    numbers = {"lr": np.float64(0.1), "loss": np.float32(2), "step": np.int64(3), "done": np.bool_(True)}
    others = {"optimizer": {"param_groups": [numbers]}, "config": {"data": pathlib.PosixPath("/a/b")}}
    torch.save({"state_dict": TENSORS, **others}, tmp_path / "x.pt")
    checkpoint = read_checkpoint(tmp_path / "x.pt")
    assert same(checkpoint.tensors)

    # No other numpy types are read, because an array may contain objects.
    torch.save({"state_dict": TENSORS, "rng": np.array([object()])}, tmp_path / "y.pt")
    assert re.fullmatch(r"[\w ]*: GLOBAL numpy[\w.]*\.multiarray\._reconstruct [\w ]*", refusal(tmp_path / "y.pt"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_the_error_of_a_later_protocol_names_a_solution(tmp_path, zipped):
    torch.save({"state_dict": TENSORS}, tmp_path / "x.pt", pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    assert refusal(tmp_path / "x.pt") == "its pickle protocol is above 2"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_is_not_run(tmp_path):
    path, mark = tmp_path / "x.bin", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match=r"x\.bin"):
        read_checkpoint(path)
    assert not mark.exists()


@pytest.mark.process
def test_the_solution_in_the_error_works(tmp_path):
    loaded, embedding = legacy(args=argparse.Namespace(arch="sonar"))
    torch.save(loaded, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"argparse\.Namespace") as caught:
        read_checkpoint(tmp_path / "x.pt")
    command = re.search(r'python (-c ".*" x\.pt tensors\.pt)', str(caught.value))[1]
    run_python(*shlex.split(command), cwd=tmp_path)
    checkpoint = read_checkpoint(tmp_path / "tensors.pt")
    assert torch.equal(checkpoint.tensors["embed_tokens.weight"], embedding.weight)
    assert len(checkpoint.tensors) == 2


# ---- what cannot be read ----


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.safetensors", b"nonsense", "x.safetensors"),
        ("x.pt", b"", "x.pt"),
        ("x.pt", b"hello, this is no pickle", "x.pt"),
        ("x.pt", b"<html>404</html>", "x.pt"),
        ("x.pt", b"version https://git-lfs.github.com/spec/v1\n", "x.pt"),
        ("x.pt", b"PK\x03\x04 nonsense", "x.pt"),
        ("x.pt", [torch.ones(1)], "x.pt.*list"),
        ("x.pt", {"epoch": 3, "weights": {"a": torch.ones(1)}}, "'epoch'"),
        ("x.pt", {"model": {}}, "x.pt"),
    ],
)
def test_files_that_are_not_checkpoints_are_rejected(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.9999])
@pytest.mark.parametrize("kind", ["safetensors", "zipped", "legacy"])
def test_a_part_of_a_file(tmp_path, kind, part):
    path = tmp_path / ("x.safetensors" if kind == "safetensors" else "x.pt")
    tensors = {**TENSORS, "c": torch.ones(9999)}
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zipped")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    message = re.escape(str(path))
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


def test_a_gguf_file_is_not_called_damaged(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match=r"model\.gguf is a GGUF file"):
        read_checkpoint(tmp_path / "model.gguf")


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "x.pt").touch()
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(PermissionError, match=r"x\.pt"):
        read_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("content", ['{"weight_map": {"a', "", "[]", "{}"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_json_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    if name == "config.json":
        save_file(TENSORS, tmp_path / "model.safetensors")
        if content == "{}":
            assert read_checkpoint(tmp_path).config == {}
            return
    with pytest.raises(ValueError, match=name):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(("names", "message"), [([], "none$"), (["a.pt", "b.pth", "c.txt"], "a.pt, b.pth$")])
def test_a_folder_must_hold_one(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_a_missing_source_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.pt"):
        read_checkpoint(tmp_path / "nowhere.pt")


# ---- the Hub ----

READER = """
from modeling_supclap.conversion.files import read_checkpoint

for source in ("someone/folder", "someone/pickled", "someone/files/deep/b.pt"):
    checkpoint = read_checkpoint(source)
    told = checkpoint.origin, checkpoint.revision, checkpoint.license
    print(*told, sorted(checkpoint.tensors), dict(checkpoint.config))
"""


@pytest.mark.process
def test_a_hub_id_and_a_file_of_it(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    torch.save(TENSORS, tmp_path / "b.pt")
    safe, pickled = (tmp_path / "a.safetensors").read_bytes(), (tmp_path / "b.pt").read_bytes()
    with fake_hub() as address:
        card = b"---\nlicense: apache-2.0\n---\n"
        big = b"not to be downloaded"
        FakeHub.files["someone/folder"] = {
            "model.safetensors": safe,
            "config.json": b"{}",
            "README.md": card,
            "x.pt": big,
        }
        FakeHub.files["someone/pickled"] = {"pytorch_model.bin": pickled, "config.json": b'{"model_type": "x"}'}
        FakeHub.files["someone/files"] = {"deep/a.pt": big, "deep/b.pt": pickled}
        hub = {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "cache"),
            "NO_PROXY": "127.0.0.1",
        }
        printed = run_python("-c", READER, cwd=tmp_path, **hub)
    names = "['a.weight', 'b']"
    assert printed.splitlines() == [
        f"someone/folder {COMMIT} apache-2.0 {names} {{}}",
        f"someone/pickled {COMMIT} None {names} {{'model_type': 'x'}}",
        f"someone/files {COMMIT} None {names} {{}}",
    ]
    assert big not in [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_error_of_the_hub_names_the_source():
    with pytest.raises(OSError, match=r"^nobody/nothing"):
        read_checkpoint("nobody/nothing")


def test_the_hub_is_asked_for_the_revision_and_for_one_kind_of_weights(tmp_path, monkeypatch):
    folder, asked = tmp_path / "snapshots" / "c0ffee", []
    (folder / "deep").mkdir(parents=True)
    save_file(TENSORS, folder / "model.safetensors")
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model.bin")
    torch.save(TENSORS, folder / "deep" / "b.pt")

    def snapshot_download(repository, revision, allow_patterns):
        asked.append((repository, revision, allow_patterns))
        return str(folder)

    def hf_hub_download(repository, file, revision):
        asked.append((repository, revision, file))
        return str(folder / file)

    monkeypatch.setattr(files, "snapshot_download", snapshot_download)
    monkeypatch.setattr(files, "hf_hub_download", hf_hub_download)
    for source, license in (("mispeech/ced-tiny", "apache-2.0"), ("microsoft/msclap/deep/b.pt", "mit")):
        checkpoint = read_checkpoint(source, "v1")
        assert same(checkpoint.tensors)
        assert (checkpoint.revision, checkpoint.license) == ("c0ffee", license)
    weights = ("mispeech/ced-tiny", "v1", ["model*.safetensors"])
    assert asked == [("mispeech/ced-tiny", "v1", files.SMALL_FILES), weights, ("microsoft/msclap", "v1", "deep/b.pt")]
