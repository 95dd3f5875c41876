"""Manifest of a prepared set: statistics of its notes, and a dataset card that the Hub can read."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import datasets
import pytest
from huggingface_hub import DatasetCard

from modeling_supclap.datasets_scripts.manifest import (
    installed_versions,
    make_manifest,
    summary_table,
    versions,
    write_card,
)
from modeling_supclap.datasets_scripts.prepared import STORAGES
from modeling_supclap.datasets_scripts.schema import features

NOTE = {"license": "ask the author", "seconds": 1800.0, "source_bytes": 10, "source_sha256": "ff"}
NOTES = {
    "train": [
        {**NOTE, "audio_path": "a.wav", "captions": {"eng": 2, "fra": 1}},
        {"clip_id": "b", "audio_path": "b.wav", "reason": "b.wav is silent"},
        {**NOTE, "audio_path": "c.wav", "captions": {"eng": 1}, "license": "CC_BY 3.0", "seconds": 1800.0000004},
    ],
    "test": [{**NOTE, "audio_path": "d.wav", "captions": {"fra": 4}}],
}
SHARD = {"file": "data/x.parquet", "rows": 1, "bytes": 100, "payload_bytes": 80, "sha256": "00"}


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    (tmp_path / "source" / "out").mkdir(parents=True)
    source = tmp_path / "source"
    (tmp_path / "home").symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in (".hidden", "more.tsv"):
        (source / name).mkdir()
    for name in (".hidden/captions.csv", ".captions.csv", "captions.csv", "Notes.TXT", "more.tsv/a.json", "a.wav"):
        (source / name).write_bytes(name.encode())
    (source / "out" / "manifest.json").write_text("{}")
    request = {"dataset": "clotho", "options": {"data_dir": "source"}, "storage": "int16"}
    report = {"missing": ["z.wav", "y.wav"], "left_out": {"without captions": ["g", "f"], "duplicate": ["e"]}}
    shards = {"train": [SHARD, SHARD], "test": [SHARD]}
    types = features(["eng", "fra", "deu"])
    return make_manifest(request, types, NOTES, shards, report, "~/source", Path("source", "out"))


def test_sums(manifest):
    train = manifest["splits"]["train"]
    assert (train["clips"], train["seconds"], train["captions"]) == (2, 3600.0, {"eng": 3, "fra": 1})
    assert manifest["licenses"] == {"CC_BY 3.0": 1, "ask the author": 2}
    assert manifest["bad_audio"] == {"train": [NOTES["train"][1]], "test": []}
    assert list(manifest["licenses"]) == ["CC_BY 3.0", "ask the author"]
    assert manifest["missing"] == ["y.wav", "z.wav"]
    assert list(manifest["left_out"].items()) == [("duplicate", ["e"]), ("without captions", ["g", "f"])]
    assert manifest["splits"]["train"]["shards"] == [SHARD, SHARD]
    assert (manifest["format"], manifest["dataset"], manifest["languages"]) == (2, "clotho", ["eng", "fra", "deu"])
    assert manifest["versions"] == versions()
    digest = hashlib.sha256(b"a.wav\0ff\nc.wav\0ff\nd.wav\0ff\n").hexdigest()
    assert manifest["source_files"]["audio"] == {"files": 3, "bytes": 30, "sha256": digest}


def test_clips_that_are_too_short_for_ced_are_counted(tmp_path):
    notes = {"train": [{**NOTE, "audio_path": f"{at}.wav", "captions": {}, "seconds": at} for at in (0.1499, 0.15)]}
    request = {"dataset": "clotho", "options": {}, "storage": "int16"}
    manifest = make_manifest(request, features(["eng"]), notes, {"train": [SHARD]}, {}, None, tmp_path)
    assert manifest["splits"]["train"]["short_clips"] == 1
    assert "1 of the clips are shorter than 0.15 s" in summary_table(manifest)


def test_metadata_are_hashed_without_the_prepared_set_itself(manifest):
    expected = []
    for name in ("Notes.TXT", "captions.csv", "more.tsv/a.json"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        expected.append({"path": name, "bytes": len(name), "sha256": digest})
    assert manifest["source_files"]["metadata"] == expected


def test_the_table(manifest):
    assert summary_table(manifest).splitlines() == [
        "split          clips    hours  captions unusable  languages",
        "train              2     1.00         4        1  eng fra",
        "test               1     0.50         4        0  fra",
        "missing recordings: 2; duplicate: 1; without captions: 2",
    ]
    assert "short_clips" not in manifest["splits"]["train"]


def test_the_card(manifest, tmp_path):
    write_card(tmp_path / "README.md", manifest)
    card = DatasetCard.load(tmp_path / "README.md")
    assert card.data.pretty_name == f"{manifest['dataset']}, prepared"
    assert card.data.language == ["eng", "fra"]
    assert card.data.license == ["cc-by-3.0", "other"]
    assert card.data.task_categories == ["audio-classification", "feature-extraction"]
    files = [{"split": "train", "path": "data/train-*"}, {"split": "test", "path": "data/test-*"}]
    assert card.data.configs == [{"config_name": "default", "data_files": files}]
    assert list(card.data.dataset_info) == ["features", "splits", "download_size", "dataset_size"]  # of "default"
    info = datasets.DatasetInfo._from_yaml_dict(card.data.dataset_info)
    assert info.features == features(["eng", "fra", "deu"])
    sizes = {name: (split.num_examples, split.num_bytes) for name, split in info.splits.items()}
    assert sizes == {"train": (2, 160), "test": (1, 80)}
    assert (info.download_size, info.dataset_size) == (300, 240)
    assert "# clotho, prepared\n" in card.text
    assert f"Audio: {STORAGES['int16'].meaning}" in card.text
    assert summary_table(manifest) in card.text
    assert "ask the author: 2 clips" in card.text


def test_a_missing_license_is_not_shown_as_blank(manifest, tmp_path):
    write_card(tmp_path / "README.md", {**manifest, "licenses": {"": 3}})
    card = DatasetCard.load(tmp_path / "README.md")
    assert "not stated: 3 clips" in card.text
    assert card.data.license == "other"


def test_names_stay_on_their_lines(manifest, tmp_path):
    write_card(tmp_path / "README.md", {**manifest, "dataset": "my_*set*", "licenses": {"CC BY\n# <b>Free": 3}})
    text = DatasetCard.load(tmp_path / "README.md").text
    assert r"- CC BY \# &lt;b&gt;Free: 3 clips" in text
    assert "# my_\\*set\\*, prepared\n" in text


def test_versions_contain_installed_decoders_only():
    assert {"libsndfile", "torchaudio", "pyarrow"} <= versions().keys()
    found = installed_versions(["torch", "no-such-package", "numpy"])
    assert list(found.items()) == [("torch", version("torch")), ("numpy", version("numpy"))]
