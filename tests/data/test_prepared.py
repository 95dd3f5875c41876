"""Prepared sets as rows: collators, TeminAL and streaming accept them, and errors name the damage."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import datasets
import fsspec
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from prepared_sets import make_folder

from modeling_supclap.datasets_scripts import load_splits, shard_writer
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.datasets_scripts.prepared import Prepared, PreparedSet
from modeling_supclap.datasets_scripts.schema import AUDIO_COLUMNS, without_audio
from modeling_supclap.datasets_scripts.temporal.items import TemporalItems
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.training.collator import EvaluationCollator, IndexedRows, TrainingCollator
from modeling_supclap.training.temporal_training import TemporalCollator

STORAGES = ("original", "flac16k", "int16", "reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with recordings, and a prepared set for each storage format."""
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("sets")
    patch = pytest.MonkeyPatch()
    patch.setattr(shard_writer, "ROW_GROUP_ROWS", 3)  # several row groups per shard, as in large sets
    make_folder(folder / "ESC")
    for storage in STORAGES:
        request = Request("esc50", options(folder), storage, 200_000)
        prepare(request, folder / storage, cache_dir=str(folder / "cache"), quiet=True)
    patch.undo()
    yield folder
    datasets.enable_progress_bars()


def options(folder):
    return {"data_dir": str(folder / "ESC"), "languages": ["eng", "fra"], "test_fold": 4}


def load(folder, storage, **config):
    return load_splits("prepared", str(folder / "cache"), data_dir=str(folder / storage), **config)


@pytest.mark.parametrize("storage", STORAGES)
def test_splits_and_rows_are_those_of_the_builder(folder, storage):
    before, after = load_splits("esc50", str(folder / "cache"), **options(folder)), load(folder, storage)
    manifest = PreparedSet(folder / storage).manifest
    assert {name: len(rows) for name, rows in after.items()} == {name: len(rows) for name, rows in before.items()}
    assert {name: about["clips"] for name, about in manifest["splits"].items()} == dict(after.num_rows)
    for split, rows in before.items():
        assert after[split]["clip_id"] == rows["clip_id"]
        for row, expected in zip(after[split], rows, strict=True):
            assert {name: row[name] for name in expected if name != "audio_path"} == {
                name: value for name, value in expected.items() if name != "audio_path"
            }
            tolerance = 0 if storage in ("original", "reference") else 0.501 / 32768
            # `supclap prepare` resamples with the filter of CED.
            waveforms = [read_row(one, 16_000, resampling_method="sinc_interp_hann") for one in (row, expected)]
            np.testing.assert_allclose(*waveforms, rtol=0, atol=tolerance)


@pytest.mark.parametrize("storage", STORAGES)
def test_collators_make_the_same_batches(folder, storage, processor):
    rows = IndexedRows(load(folder, storage)["train"])
    originals = IndexedRows(load_splits("esc50", str(folder / "cache"), **options(folder))["train"])
    for collator in (TrainingCollator(processor, ["eng", "fra"]), EvaluationCollator(processor, ["fra"])):
        found, expected = (collator([each[place] for place in (5, 0, 3)]) for each in (rows, originals))
        assert found.keys() == expected.keys()
        difference = (found.pop("input_features") - expected.pop("input_features")).abs()
        # dB, from rounding
        assert difference.mean() < (1e-9 if storage in ("original", "reference") else 0.02)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("storage", ["original", "int16"])
def test_temporal_items_are_drawn_and_rendered(folder, storage, processor):
    items = TemporalItems(load(folder, storage)["train"], seed=0)
    batch = TemporalCollator(processor, items, "b", RenderOptions())([{"clip_index": 0}, {"clip_index": 1}])
    assert batch["input_features"].shape[0] == 6
    assert batch["group_ids"].shape == (2, 3)


@pytest.mark.parametrize("storage", ["original", "int16"])
def test_the_library_reads_the_folder_by_its_card(folder, storage):
    rows = datasets.load_dataset(str(folder / storage), cache_dir=str(folder / "cache"))
    ours = load(folder, storage)
    assert {name: split.to_list() for name, split in rows.items()} == {k: v.to_list() for k, v in ours.items()}
    assert rows["test"].features == ours["test"].features


def test_embedded_files_can_be_cast_to_audio(folder):
    rows = load(folder, "original")["test"].cast_column("audio", datasets.Audio(decode=False))
    assert rows[0]["audio"]["bytes"] == (folder / "ESC" / rows[0]["audio_path"]).read_bytes()


@pytest.mark.usefixtures("torchcodec")
def test_embedded_files_decode(folder):
    rows = load(folder, "original")["test"]
    decoded = rows.cast_column("audio", datasets.Audio())[0]
    np.testing.assert_allclose(read_row(decoded, 16_000), read_row(rows[0], 16_000), atol=1e-5)


def test_the_report_includes_clips_excluded_by_the_builder(folder):
    builder = Prepared(cache_dir=str(folder / "cache"), data_dir=str(folder / "int16"))
    lacking = {"left_out": {"bad audio": ["a"], "duplicate": ["b"]}, "bad_audio": {"test": [{"clip_id": "c"}]}}
    builder.config.prepared.manifest.update({**lacking, "missing": ["z.wav"]})
    for _ in range(2):
        assert builder.report() == {"left_out": {"bad audio": ["a", "c"], "duplicate": ["b"]}, "missing": ["z.wav"]}


def test_a_walk_through_the_rows_need_not_touch_the_audio(folder):
    for storage in STORAGES:
        rows = load(folder, storage)["test"]
        light = without_audio(rows)
        assert not set(light.column_names) & set(AUDIO_COLUMNS)
        assert light["clip_id"] == rows["clip_id"]
    plain = [{"clip_id": "a"}]
    assert without_audio(plain) is plain


class TestMoving:
    def test_a_set_that_holds_its_audio_moves_freely(self, folder, tmp_path):
        shutil.copytree(folder / "int16", tmp_path / "elsewhere")
        moved = load_splits("prepared", str(tmp_path / "cache"), data_dir=str(tmp_path / "elsewhere"))
        assert moved["test"].to_list() == load(folder, "int16")["test"].to_list()

    def test_a_set_is_found_at_an_address_and_in_the_home_folder(self, folder, tmp_path, monkeypatch):
        fsspec.filesystem("memory").put(str(folder / "int16"), "/sets/int16", recursive=True)
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)  # memory is an address, too
        for data_dir in ("memory://sets/int16/", "~/int16"):
            rows = load_splits("prepared", str(tmp_path / data_dir[0]), data_dir=data_dir)
            assert rows["test"].to_list() == load(folder, "int16")["test"].to_list()
        assert PreparedSet("memory://sets/int16/").base == "memory://sets/int16"
        assert PreparedSet("~/int16").base == str(folder / "int16")

    def test_a_reference_moves_with_its_recordings(self, folder, tmp_path):
        for name in ("ESC", "reference"):
            shutil.copytree(folder / name, tmp_path / "there" / name)
        (row, *_) = load_splits("prepared", str(folder / "cache"), data_dir=str(tmp_path / "there" / "reference"))[
            "test"
        ]
        assert row["audio_path"].startswith(str(tmp_path / "there" / "ESC"))
        assert len(read_row(row, 16_000))

    def test_a_moved_reference_finds_recordings_in_their_old_folder(self, folder, tmp_path):
        shutil.copytree(folder / "reference", tmp_path / "alone")
        (row, *_) = load_splits("prepared", str(tmp_path / "cache"), data_dir=str(tmp_path / "alone"))["test"]
        assert row["audio_path"].startswith(str(folder / "ESC"))

    def test_a_moved_reference_finds_recordings_in_audio_dir(self, folder, tmp_path):
        shutil.copytree(folder / "ESC", tmp_path / "recordings")
        (row, *_) = load(folder, "reference", audio_dir=str(tmp_path / "recordings"))["test"]
        assert row["audio_path"].startswith(str(tmp_path / "recordings"))
        with pytest.raises(FileNotFoundError, match=r"audio/1-0\.wav .*nowhere'\]; set audio_dir"):
            load(folder, "reference", audio_dir=str(tmp_path / "nowhere"))
        shutil.copytree(folder / "reference", tmp_path / "from the Hub", ignore=shutil.ignore_patterns(".prepare"))
        with pytest.raises(FileNotFoundError, match=r"none of \[\]; set audio_dir"):
            load_splits("prepared", str(tmp_path / "cache"), data_dir=str(tmp_path / "from the Hub"))


class TestDamage:
    @pytest.fixture
    def broken(self, folder, tmp_path):
        shutil.copytree(folder / "int16", tmp_path / "set")
        return tmp_path / "set"

    def load(self, broken):
        return load_splits("prepared", str(broken.parent / "cache"), data_dir=str(broken))

    def test_a_missing_shard(self, broken):
        count = len(list((broken / "data").glob("train-*")))
        assert count > 1
        (lost,) = (broken / "data").glob("train-00001-*")
        lost.unlink()
        with pytest.raises(FileNotFoundError, match=rf"^1 of {count} shards are missing, the first is .*{lost.name}$"):
            self.load(broken)

    def test_a_shard_cut_short(self, broken):
        path = next((broken / "data").glob("test-*"))
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(ValueError, match=f"{path.name}.*manifest"):
            self.load(broken)

    @pytest.mark.parametrize("streaming", [False, True])
    def test_one_changed_bit_of_the_audio(self, broken, streaming):
        path = next((broken / "data").glob("train-*"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

        def read():
            splits = load_splits("prepared", str(broken.parent / "cache"), data_dir=str(broken), streaming=streaming)
            return list(splits["train"])

        with pytest.raises((ValueError, OSError), match=f"{path.name}.*CRC"):
            read()

    def test_a_manifest_without_keys_names_them(self, broken):
        path = broken / "manifest.json"
        whole, names = json.loads(path.read_bytes()), "bad_audio dataset features left_out missing splits storage"
        for name in names.split():
            path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
            with pytest.raises(ValueError, match=rf"manifest\.json of .*set lacks \['{name}'\];"):
                self.load(broken)
        path.write_text('{"format": 2}')
        with pytest.raises(ValueError, match=re.escape(str(names.split()))):
            self.load(broken)

    def test_a_set_that_was_prepared_again_is_not_read_from_the_cache(self, folder, broken):
        before = self.load(broken)["train"]
        shutil.rmtree(broken)
        shutil.copytree(folder / "flac16k", broken)
        after = self.load(broken)["train"]
        assert (set(after.column_names), "samples" in before.column_names) == (
            {*before.column_names, "audio"} - {"samples", "sampling_rate_hz"},
            True,
        )

    def test_no_manifest(self, broken):
        (broken / "manifest.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
            self.load(broken)

    def test_a_missing_folder_is_named_if_the_hub_is_unreachable(self, monkeypatch):
        for error in (LocalEntryNotFoundError("no network"), RepositoryNotFoundError("none", response=mock.Mock())):
            monkeypatch.setattr("huggingface_hub.hf_hub_download", mock.Mock(side_effect=error))
            with pytest.raises(FileNotFoundError, match="prepared/mine is neither a folder nor a dataset on the Hub"):
                PreparedSet("prepared/mine")

    def test_a_set_on_the_hub_is_read_at_one_commit(self, folder, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(folder / "int16", tmp_path / "snapshots" / "0c1d")
        download = mock.Mock(return_value=str(tmp_path / "snapshots" / "0c1d" / "manifest.json"))
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        prepared, local = PreparedSet("somebody/sounds", revision="v1"), PreparedSet(folder / "int16")
        download.assert_called_once_with("somebody/sounds", "manifest.json", repo_type="dataset", revision="v1")
        assert (prepared.manifest, prepared.digest) == (local.manifest, local.digest)
        assert prepared.shard_paths("train") == [
            f"hf://datasets/somebody/sounds@0c1d/data/{Path(path).name}" for path in local.shard_paths("train")
        ]
        assert not prepared.is_local

    def test_the_hub_is_not_asked_for_a_mistyped_folder(self, monkeypatch, tmp_path):
        (tmp_path / "run").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
        with pytest.raises(FileNotFoundError, match=r"run/g_prt .*hf://datasets/run/g_prt"):
            PreparedSet("run/g_prt")
        with pytest.raises(FileNotFoundError, match="data_dir set is neither a folder nor an id on the Hub"):
            PreparedSet("set")

    @pytest.mark.parametrize("other", [1, 3])
    def test_another_format(self, broken, other):
        manifest = (broken / "manifest.json").read_text(encoding="utf-8")
        (broken / "manifest.json").write_text(manifest.replace('"format": 2', f'"format": {other}'), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"\b{other}\b.*\b2\b"):
            self.load(broken)

    @pytest.mark.parametrize("content", [b'{"format": 2,', b'{"format": "\xa2"}'])
    def test_a_damaged_manifest(self, broken, content):
        (broken / "manifest.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"manifest\.json of .*is damaged"):
            self.load(broken)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="data_dir"):
            PreparedSet(tmp_path / "a" / "b" / "c")
        with pytest.raises(ValueError, match="data_dir"):
            load_splits("prepared", str(tmp_path))
