"""The embedding command: results equal to `encode_audio`, resuming, and several processes."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import builders
import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from commands import run_recipe
from prepared_sets import make_folder, sound
from processes import Moment, run_killed, run_processes

from modeling_supclap import SupCLAPModel, encoding
from modeling_supclap.audio_input import Recording
from modeling_supclap.datasets_scripts import load_splits, manifest
from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.datasets_scripts.shards import Shard
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.evaluation.vectors import PRECISIONS, compress
from modeling_supclap.evaluation.windows import list_recordings
from modeling_supclap.recipes import embed_corpus
from modeling_supclap.recipes.options import CorpusArguments
from modeling_supclap.search import build_index

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/embed_corpus.py"
BAD = {"deep/er/junk.wav", "empty.flac", "short.wav", "silent.wav"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a SupCLAP and a CLAP model, and 14 recordings of several lengths and rates; four are unusable."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, model, processor in (
        ("model", builders.supclap_model(), builders.bert_processor()),
        ("clap", builders.clap_model(), builders.clap_processor()),
    ):
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)

    sounds = folder / "sounds"
    (sounds / "deep" / "er").mkdir(parents=True)
    for number in range(10):
        path = sounds / ("deep" if number % 2 else "") / f"{number:02}.wav"
        soundfile.write(path, sound(number, seconds=0.5 + 0.4 * number), 22_050)
    (sounds / "deep" / "er" / "junk.wav").write_bytes(b"junk")
    (sounds / "empty.flac").write_bytes(b"")
    soundfile.write(sounds / "short.wav", sound(0)[:50], 22_050)
    soundfile.write(sounds / "silent.wav", np.zeros(22_050), 22_050)
    (sounds / "notes.txt").write_text("not a recording")
    return folder


def words(folder, output, *more):
    return [
        "--model", folder / "model", "--folder", folder / "sounds", "--output", output, "--chunk_seconds", 1.5,
        "--clips_per_file", 4, "--batch_size", 3, "--num_workers", 0, "--device", "cpu", *more,
    ]  # fmt: skip


def rows_of(output):
    return datasets.load_dataset(
        "parquet", data_files=str(output / "data" / "*"), split="train", cache_dir=str(output.parent / "cache")
    ).with_format("numpy")


def bytes_of(output):
    return {path.name: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def whole(folder):
    run_recipe(embed_corpus, *words(folder, folder / "whole"))
    return folder / "whole"


def test_chunks_are_those_of_encode_audio(folder, whole):
    rows = rows_of(whole)
    names = sorted(str(path.relative_to(folder / "sounds")) for path in folder.glob("sounds/**/[0-9]*.wav"))
    model = SupCLAPModel.from_pretrained(folder / "model")
    paths = [str(folder / "sounds" / name) for name in names]
    expected = model.encode_audio(paths, chunk_seconds=1.5, return_chunks=True)
    for name, chunks in zip(names, expected, strict=True):
        found = rows.select(np.flatnonzero(np.asarray(rows["clip_id"][:]) == name))
        np.testing.assert_allclose(found["start_seconds"][:], chunks.onset_seconds)
        np.testing.assert_allclose(found["end_seconds"][:], chunks.offset_seconds)
        np.testing.assert_allclose(found["embedding"][:], chunks.embeds, atol=1e-5)
    assert rows.features["embedding"].length == model.config.projection_dim


def test_a_channel_is_embedded(folder, tmp_path):
    sounds, left, right = tmp_path / "sounds", sound(0, seconds=4.0), sound(5, seconds=4.0)
    sounds.mkdir()
    soundfile.write(sounds / "a.wav", np.stack([left, right], axis=1), 22_050, "FLOAT")
    soundfile.write(tmp_path / "right.wav", right, 22_050, "FLOAT")
    (tmp_path / "t.csv").write_text("path\nsounds/a.wav\n")
    (sounds / "metadata.csv").write_text("file_name,caption\na.wav,a sound\n")
    model = SupCLAPModel.from_pretrained(folder / "model")
    expected = model.encode_audio(str(tmp_path / "right.wav"), chunk_seconds=1.5, return_chunks=True).embeds
    options = ["--model", folder / "model", "--chunk_seconds", 1.5, "--device", "cpu", "--channel", 1]
    dataset = ["--dataset", "audio_folder", "--data_dir", sounds, "--validation_fraction", 0, "--test_fraction", 0]
    sources = {"folder": ["--folder", sounds], "table": ["--table", tmp_path / "t.csv"], "dataset": dataset}
    for name, source in sources.items():
        for number, more in enumerate([[], ["--pad_short_clips"]]):
            output = tmp_path / f"{name}{number}"
            run_recipe(embed_corpus, *options, *source, *more, "--output", output)
            np.testing.assert_allclose(rows_of(output)["embedding"][:], expected, atol=1e-5)
            assert json.loads((output / "manifest.json").read_text())["channel"] == 1


def test_an_address_has_the_embeddings_of_its_folder(folder, whole, tmp_path):
    system = fsspec.filesystem("memory")
    system.put(str(folder / "sounds"), "/bucket/sounds", recursive=True)
    address = "memory://bucket/sounds"
    run_recipe(embed_corpus, *words(folder, tmp_path / "out", "--folder", address))
    for path in sorted((whole / "data").iterdir()):
        assert pq.read_table(tmp_path / "out" / "data" / path.name).equals(pq.read_table(path)), path.name
    bad = json.loads((tmp_path / "out" / "manifest.json").read_text())["bad_audio"]
    assert {entry["audio_path"] for entry in bad} == BAD

    model = SupCLAPModel.from_pretrained(folder / "model")
    remote, local = (model.encode_audio(f"{root}/00.wav") for root in (address, folder / "sounds"))
    np.testing.assert_array_equal(remote, local)
    with pytest.raises(FileNotFoundError, match=r"none\.wav"):
        model.encode_audio(f"{address}/none.wav")
    with pytest.raises(FileNotFoundError, match="no recordings"):
        run_recipe(embed_corpus, *words(folder, tmp_path / "none", "--folder", "memory://bucket/none"))


def test_short_recordings_are_padded_if_requested(folder, tmp_path):
    run_recipe(embed_corpus, *words(folder, tmp_path / "out", "--pad_short_clips", "true"))
    bad = json.loads((tmp_path / "out" / "manifest.json").read_text())["bad_audio"]
    assert {entry["clip_id"] for entry in bad} == BAD - {"short.wav"}
    with pytest.raises(FileExistsError, match="pad_short_clips"):
        run_recipe(embed_corpus, *words(folder, tmp_path / "out"))


def test_embed_index_and_prepare_agree_on_unusable_recordings(folder, tmp_path):
    """`BAD` is that of embed. Only prepare knows no model, so that it keeps short clips, and counts them."""
    sounds = folder / "sounds"
    report = build_index(load_embedding_model(folder / "model"), sounds, tmp_path / "index", 1.5, 1.5)
    assert report.unreadable.keys() == BAD

    texts = "".join(f"{name},a sound\n" for name in list_recordings(sounds)[1])
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "metadata.csv").write_text(f"file_name,caption\n{texts}", encoding="utf-8")
    options = {"data_dir": str(tmp_path / "table"), "audio_dir": str(sounds), "languages": ["eng"]}
    options |= {"test_fraction": 0, "validation_fraction": 0}
    manifest = prepare(Request("audio_folder", options), tmp_path / "out", quiet=True)
    bad = {note["audio_path"] for note in manifest["bad_audio"]["train"]}
    assert {name.removeprefix("sounds/") for name in bad} == BAD - {"short.wav"}
    assert manifest["splits"]["train"]["short_clips"] == 1


def test_a_long_file_is_embedded_in_parts(folder, whole, tmp_path, monkeypatch):
    stops = []
    read = Recording.read

    def record(self, rate_hz, start=0, stop=None, *options):
        stops.append(stop)
        return read(self, rate_hz, start, stop, *options)

    monkeypatch.setattr(Recording, "read", record)
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 2.0)
    run_recipe(embed_corpus, *words(folder, tmp_path / "out"))
    assert sum(stop is not None for stop in stops) >= 6  # parts of the recordings of 2.1 to 4.1 s
    parts, expected = rows_of(tmp_path / "out"), rows_of(whole)
    assert list(parts["clip_id"][:]) == list(expected["clip_id"][:])
    np.testing.assert_allclose(parts["embedding"][:], expected["embedding"][:], atol=1e-4)


def test_unusable_recordings_are_listed_without_private_paths(folder, whole):
    text = (whole / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    reasons = {bad["clip_id"]: bad["reason"] for bad in manifest["bad_audio"]}
    assert reasons.keys() == BAD
    assert all(name in reason for name, reason in reasons.items())
    assert str(folder) not in text
    assert (manifest["clips"], manifest["chunks"]) == (14, len(rows_of(whole)))


def test_a_second_run_writes_nothing_and_another_plan_is_refused(folder, whole, monkeypatch):
    before = bytes_of(whole)
    monkeypatch.setattr(embed_corpus, "write_file", None)
    run_recipe(embed_corpus, *words(folder, whole))
    assert bytes_of(whole) == before
    with pytest.raises(FileExistsError, match="chunk_samples"):
        run_recipe(embed_corpus, *words(folder, whole), "--chunk_seconds", 2)
    with pytest.raises(ValueError, match=r"chunk_seconds.*0\.01"):
        run_recipe(embed_corpus, *words(folder, whole), "--chunk_seconds", 0.01)
    with pytest.raises(FileExistsError, match="sounds"):
        run_recipe(embed_corpus, *words(folder, folder / "sounds"))


def test_a_file_of_other_recordings_or_with_another_hash_is_not_current(tmp_path, capsys):
    clips = [embed_corpus.Clip(name, "train", row, state=name) for row, name in enumerate("ab")]
    of_now = pa.table({"a": [1]}).replace_schema_metadata({"recordings": embed_corpus.hash_states(clips)})
    path, old = tmp_path / "new.parquet", tmp_path / "old.parquet"
    pq.write_table(of_now, path)
    pq.write_table(pa.table({"a": [1]}), old)  # of another program
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert not embed_corpus.is_current(old, clips, None)
    assert "old.parquet is embedded again: its recordings have changed" in capsys.readouterr().out
    assert embed_corpus.is_current(path, clips, None)
    assert embed_corpus.is_current(path, clips, right)
    assert capsys.readouterr().out == ""
    assert not embed_corpus.is_current(path, clips[::-1], right)
    assert not embed_corpus.is_current(path, clips, right[::-1])
    assert capsys.readouterr().out.splitlines() == [
        "new.parquet is embedded again: its recordings have changed",
        "new.parquet is embedded again: its SHA-256 is not that in manifest.json",
    ]


@pytest.mark.parametrize("position", [200, -40])  # in the embeddings, and in the footer without a checksum
def test_a_file_with_a_changed_bit_is_named_and_embedded_again(folder, whole, tmp_path, capsys, position):
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    path = next(output.glob("data/*.parquet"))
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    run_recipe(embed_corpus, *words(folder, output))
    assert f"{path.name} is embedded again" in capsys.readouterr().out
    assert bytes_of(output) == bytes_of(whole)


def test_repaired_recordings_are_embedded_again(folder, tmp_path, capsys):
    sounds, output = tmp_path / "sounds", tmp_path / "out"
    shutil.copytree(folder / "sounds", sounds)
    run_recipe(embed_corpus, *words(folder, output, "--folder", sounds))
    before = {path.name: path.stat().st_mtime_ns for path in (output / "data").iterdir()}
    repaired = sounds / "silent.wav"
    size = repaired.stat().st_size
    soundfile.write(repaired, sound(3, seconds=1.0), 22_050)  # of equal size
    assert repaired.stat().st_size == size
    capsys.readouterr()
    run_recipe(embed_corpus, *words(folder, output, "--folder", sounds))
    changed = {path.name for path in (output / "data").iterdir() if path.stat().st_mtime_ns != before[path.name]}
    assert changed == {"embeddings-00003-of-00004.parquet"}
    assert all(name in capsys.readouterr().out for name in changed)
    manifest = json.loads((output / "manifest.json").read_text())
    assert {bad["clip_id"] for bad in manifest["bad_audio"]} == BAD - {"silent.wav"}
    assert "silent.wav" in rows_of(output)["clip_id"][:]


def test_other_weights_of_the_same_name_are_refused(folder, tmp_path):
    model, sounds = tmp_path / "model", tmp_path / "sounds"
    shutil.copytree(folder / "model", model)
    sounds.mkdir()
    shutil.copy(folder / "sounds" / "00.wav", sounds)
    more = ("--model", model, "--folder", sounds)
    run_recipe(embed_corpus, *words(folder, tmp_path / "out", *more))
    builders.supclap_model(seed=1).save_pretrained(model)
    with pytest.raises(FileExistsError, match="model_fingerprint"):
        run_recipe(embed_corpus, *words(folder, tmp_path / "out", *more))


def test_a_second_run_on_the_same_output_is_refused(folder, whole):
    with folder_lock(whole), ThreadPoolExecutor() as another, pytest.raises(InUseError, match=whole.name):
        another.submit(run_recipe, embed_corpus, *words(folder, whole)).result()


@pytest.mark.process
def test_a_killed_run_continues_with_the_missing_files(folder, whole, tmp_path):
    output, arguments = tmp_path / "out", words(folder, tmp_path / "out", "--num_workers", 1)
    run_killed(RECIPE, *arguments, moment=Moment("os.rename", "*.parquet", 2))
    done = {path: path.stat().st_mtime_ns for path in output.glob("data/*.parquet")}
    assert len(done) == 1
    assert list(output.glob("data/*.tmp"))

    run_recipe(embed_corpus, *arguments)
    assert bytes_of(output) == bytes_of(whole)
    assert all(path.stat().st_mtime_ns == written for path, written in done.items())


@pytest.mark.process
def test_one_of_two_processes_is_killed_and_two_go_on(folder, tmp_path):
    outputs = tmp_path / "whole", tmp_path / "out"
    whole, cut = (words(folder, output, "--clips_per_file", 1) for output in outputs)
    run_recipe(embed_corpus, *whole)
    run_killed(RECIPE, *cut, moment=Moment("os.rename", "*.parquet", 2), count=2)
    done = {path: path.stat().st_mtime_ns for path in outputs[1].glob("data/*.parquet")}
    assert done

    run_processes(RECIPE, *cut)
    assert bytes_of(outputs[1]) == bytes_of(outputs[0])
    assert all(path.stat().st_mtime_ns == written for path, written in done.items())


@pytest.mark.process
def test_several_processes_write_the_same_files(folder, whole, tmp_path):
    printed = run_processes(RECIPE, *words(folder, tmp_path / "out", "--num_workers", 1))
    assert printed.count("10 of 14 recordings in") == 1
    assert bytes_of(tmp_path / "out") == bytes_of(whole)


def test_a_recording_with_several_bad_chunks_counts_once(folder, tmp_path, monkeypatch, capsys):
    encode = encoding.encode_batch

    def spoil(model, processor, waveforms):
        embeds = encode(model, processor, waveforms)
        embeds[[len(waveform) == 24_000 for waveform in waveforms]] = np.nan  # each whole chunk of 1.5 s
        return embeds

    monkeypatch.setattr(encoding, "encode_batch", spoil)
    run_recipe(embed_corpus, *words(folder, tmp_path / "out"))
    assert "3 of 14 recordings in 3 chunks" in capsys.readouterr().out
    bad = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["bad_audio"]
    assert sorted({entry["clip_id"] for entry in bad}) == sorted(entry["clip_id"] for entry in bad)


def test_an_unusable_recording_without_a_path_is_listed(tmp_path):
    corpus = embed_corpus.Corpus({"all": [{"clip_id": "a", "audio_path": None}]})
    nothing = encoding.AudioChunks(np.zeros((0, 4), np.float32), np.zeros(0), np.zeros(0), ValueError("no sound"))
    clips = [embed_corpus.Clip("a", "all", 0)]
    embed_corpus.write_file(tmp_path / "a.parquet", corpus, clips, [nothing], 4, CorpusArguments())
    found = embed_corpus.describe_files([tmp_path / "a.parquet"])
    (file,) = found.pop("files")
    assert found == {"chunks": 0, "bad_audio": [{"clip_id": "a", "audio_path": "", "reason": "no sound"}]}
    assert (file["file"], file["rows"]) == ("data/a.parquet", 0)


def test_a_recording_that_vanishes_is_listed(folder, tmp_path, monkeypatch):
    load = embed_corpus.load_corpus

    def load_and_delete(args):
        corpus = load(args)
        (tmp_path / "sounds" / "gone.wav").unlink()
        return corpus

    (tmp_path / "sounds").mkdir()
    for name in ("gone.wav", "here.wav"):
        soundfile.write(tmp_path / "sounds" / name, sound(0, seconds=1.0), 22_050)
    (tmp_path / "sounds" / "loop.wav").symlink_to(tmp_path / "sounds" / "loop.wav")
    monkeypatch.setattr(embed_corpus, "load_corpus", load_and_delete)
    run_recipe(embed_corpus, *words(folder, tmp_path / "out"), "--folder", tmp_path / "sounds")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert [entry["clip_id"] for entry in manifest["bad_audio"]] == ["gone.wav"]
    assert manifest["chunks"] == 1


@pytest.mark.parametrize("is_relative", [False, True])
def test_unusable_recordings_of_a_dataset_have_no_local_paths(folder, tmp_path, monkeypatch, is_relative):
    esc = make_folder(tmp_path / "ann" / "ESC", clips=4, bad=False)
    damaged = sorted((esc / "audio").iterdir())[1]
    damaged.write_bytes(b"RIFF, no more")
    monkeypatch.chdir(tmp_path)
    data_dir = esc.relative_to(tmp_path) if is_relative else esc
    data = ["--dataset", "esc50", "--data_dir", data_dir, "--device", "cpu"]
    run_recipe(embed_corpus, "--model", folder / "model", *data, "--output", tmp_path / "out")
    (bad,) = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["bad_audio"]
    assert bad["audio_path"] == f"audio/{damaged.name}"
    assert damaged.name in bad["reason"]
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert b"ann/" not in written


def test_a_dataset_and_a_clap_model_are_supported(folder, tmp_path):
    esc = make_folder(tmp_path / "ESC", clips=12, bad=False)
    what = ["--dataset", "esc50", "--data_dir", esc, "--test_fold", 4]
    what += ["--dataset_config", json.dumps({"cache_dir": str(tmp_path / "cache")})]
    how = ["--model", folder / "clap", "--output", tmp_path / "out", "--num_workers", 0, "--device", "cpu"]
    run_recipe(embed_corpus, *what, *how, "--splits", "test", "train")
    rows = rows_of(tmp_path / "out")
    splits = load_splits("esc50", str(tmp_path / "cache"), data_dir=str(esc), test_fold=4)
    assert list(zip(rows["split"], rows["clip_id"], strict=True)) == [
        (split, clip_id) for split in ("test", "train") for clip_id in splits[split]["clip_id"]
    ]
    np.testing.assert_allclose(np.linalg.norm(rows["embedding"][:], axis=1), 1, atol=1e-5)


def test_other_options_of_the_dataset_need_another_output(folder, tmp_path):
    few = ["--dataset", "synthetic", "--num_train", 2, "--num_validation", 0, "--num_test", 0]
    how = ["--model", folder / "model", "--output", tmp_path / "out", "--num_workers", 0, "--device", "cpu"]
    run_recipe(embed_corpus, *few, *how, "--duration_seconds", 1)
    run_recipe(embed_corpus, *few, *how, "--duration_seconds", 1)
    with pytest.raises(FileExistsError, match="dataset_config"):
        run_recipe(embed_corpus, *few, *how, "--duration_seconds", 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], ValueError, "dataset.*folder"),
        (["--folder", "nowhere"], FileNotFoundError, "nowhere"),
        (["--folder", ROOT / "docs"], FileNotFoundError, "docs"),
        (["--folder", "x", "--batch_size", 0], ValueError, "batch_size.*0"),
        (["--folder", "x", "--device", "gpu"], ValueError, "device gpu is not available"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        run_recipe(embed_corpus, *arguments)


# ---- tables and shards ----


def write_table(folder: Path, rows_per_group: int = 3) -> Path:
    """Write a Parquet table with the recordings of `folder` in reverse order, and a missing one at the end."""
    names = sorted((str(path.relative_to(folder)) for path in folder.glob("sounds/**/*.[wf]*")), reverse=True)
    table = pa.table({"key": [f"k{number}" for number in range(len(names) + 1)], "path": [*names, "sounds/gone.wav"]})
    pq.write_table(table, folder / "clips.parquet", row_group_size=rows_per_group)
    return folder / "clips.parquet"


def table_words(folder, output, *more):
    return [
        "--model", folder / "model", "--table", folder / "clips.parquet", "--output", output, "--chunk_seconds", 1.5,
        "--batch_size", 3, "--num_workers", 0, "--device", "cpu", *more,
    ]  # fmt: skip


def test_a_table_has_the_embeddings_of_its_folder(folder, whole, tmp_path):
    write_table(folder)
    run_recipe(embed_corpus, *table_words(folder, tmp_path / "out", "--clips_per_file", 4))
    by_id = {}
    for row in rows_of(whole):
        by_id[row["clip_id"], row["start_seconds"].item()] = row["embedding"]
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(by_id)
    for row in rows:
        key = row["clip_id"].removeprefix("sounds/"), row["start_seconds"].item()
        np.testing.assert_allclose(row["embedding"], by_id[key], atol=1e-5)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {bad["clip_id"].removeprefix("sounds/") for bad in manifest["bad_audio"]} == {*BAD, "gone.wav"}
    assert str(tmp_path) not in json.dumps(manifest)
    assert str(folder) not in json.dumps(manifest)


def test_shards_in_any_order_are_the_whole_table(folder, tmp_path):
    write_table(folder)
    output = tmp_path / "out"
    run_recipe(embed_corpus, *table_words(folder, output, "--shard", "2/3", "--id_column", "key"))
    with pytest.raises(ValueError, match=r"lacks 2 of 3 shards: 0/3, 1/3"):
        run_recipe(embed_corpus, "--output", output, "--finish", "true")
    for number in (0, 1):
        run_recipe(embed_corpus, *table_words(folder, output, "--shard", f"{number}/3", "--id_column", "key"))
    before = bytes_of(output / "data")
    # nothing to do
    run_recipe(embed_corpus, *table_words(folder, output, "--shard", "1/3", "--id_column", "key"))
    assert bytes_of(output / "data") == before
    run_recipe(embed_corpus, "--output", output, "--finish", "true")

    run_recipe(embed_corpus, *table_words(folder, tmp_path / "one", "--id_column", "key"))
    sharded, whole = (rows_of(each).sort(["clip_id", "start_seconds"]) for each in (output, tmp_path / "one"))
    assert list(sharded["clip_id"][:]) == list(whole["clip_id"][:])
    np.testing.assert_allclose(sharded["embedding"][:], whole["embedding"][:], atol=1e-5)
    manifests = [json.loads((each / "manifest.json").read_text()) for each in (output, tmp_path / "one")]
    assert manifests[0]["clips"] == manifests[1]["clips"] == 15
    assert manifests[0]["chunks"] == manifests[1]["chunks"] == len(whole)
    assert {bad["clip_id"] for bad in manifests[0]["bad_audio"]} == {
        bad["clip_id"] for bad in manifests[1]["bad_audio"]
    }
    with pytest.raises(FileExistsError, match="shards"):
        run_recipe(embed_corpus, *table_words(folder, output, "--shard", "0/4", "--id_column", "key"))


@pytest.mark.parametrize("shard", ["3/3", "1", "-1/3", "a/b", "0/0"])
def test_a_shard_that_does_not_exist_is_refused(folder, tmp_path, shard):
    write_table(folder)
    with pytest.raises(ValueError, match=shard):
        run_recipe(embed_corpus, *table_words(folder, tmp_path / "out", f"--shard={shard}"))


def test_shards_do_not_wait_for_each_other(folder, tmp_path):
    write_table(folder)
    output = tmp_path / "out"
    run_recipe(embed_corpus, *table_words(folder, output, "--shard", "0/2"))
    with Shard(0, 2).lock(output), ThreadPoolExecutor() as another:  # a machine writes the first shard
        with pytest.raises(InUseError, match="00000-of-00002"):
            another.submit(run_recipe, embed_corpus, *table_words(folder, output, "--shard", "0/2")).result()
        run_recipe(embed_corpus, *table_words(folder, output, "--shard", "1/2"))
    assert {path.name for path in (output / "shards").iterdir()} == {"00000-of-00002.json", "00001-of-00002.json"}


@pytest.mark.process
def test_a_killed_shard_loses_nothing_and_writes_nothing_twice(folder, tmp_path):
    write_table(folder)
    outputs = tmp_path / "whole", tmp_path / "out"
    for number in range(2):
        run_recipe(embed_corpus, *table_words(folder, outputs[0], "--shard", f"{number}/2"))
    first, second = (table_words(folder, outputs[1], "--shard", f"{number}/2") for number in range(2))
    run_killed(RECIPE, *first, moment=Moment("os.rename", "*/data/*.parquet", 2))
    done = {path: path.stat().st_mtime_ns for path in outputs[1].glob("data/*.parquet")}
    assert len(done) == 1
    run_recipe(embed_corpus, *second)
    with pytest.raises(ValueError, match="lacks 1 of 2 shards: 0/2"):
        run_recipe(embed_corpus, "--output", outputs[1], "--finish")

    run_recipe(embed_corpus, *first)
    run_recipe(embed_corpus, "--output", outputs[1], "--finish")
    run_recipe(embed_corpus, "--output", outputs[0], "--finish")
    assert bytes_of(outputs[1]) == bytes_of(outputs[0])
    assert all(path.stat().st_mtime_ns == written for path, written in done.items())


def test_unfinished_files_of_the_own_shard_are_removed(tmp_path):
    (tmp_path / "plan.json.tmp").write_text("of a killed run")
    embed_corpus.start_output(tmp_path, {"clips": 3})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"clips": 3}
    names = [f"embeddings-0000{number}-of-00002-00000.parquet{suffix}" for number in (0, 1) for suffix in ("", ".tmp")]
    for name in names:
        (tmp_path / "data" / name).touch()
    embed_corpus.remove_unfinished(tmp_path, Shard(1, 2))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == names[:3]
    embed_corpus.remove_unfinished(tmp_path, Shard(0, 1))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == names[::2]


def test_a_shard_does_not_write_to_a_folder_of_something_else(folder, tmp_path):
    write_table(folder)
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(FileExistsError, match=tmp_path.name):
        run_recipe(embed_corpus, *table_words(folder, tmp_path, "--shard", "0/2"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("count", [1, 2])
def test_finishing_again_changes_nothing_and_notices_lost_files(folder, tmp_path, count, capsys, monkeypatch):
    write_table(folder)
    output = tmp_path / "out"
    for number in range(count):
        run_recipe(embed_corpus, *table_words(folder, output, "--shard", f"{number}/{count}"))
    run_recipe(embed_corpus, "--output", output, "--finish")
    before, printed = bytes_of(output), capsys.readouterr().out
    monkeypatch.setattr(manifest, "installed_versions", lambda names: {"torch": "another"})
    run_recipe(embed_corpus, "--output", output, "--finish", "true")
    assert bytes_of(output) == before
    assert "contains 10 of 15 recordings" in printed
    assert printed.endswith(capsys.readouterr().out)

    lost = next((output / "data").iterdir())
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        run_recipe(embed_corpus, "--output", output, "--finish")


def test_half_precision_halves_the_file(folder, tmp_path):
    write_table(folder)
    run_recipe(embed_corpus, *table_words(folder, tmp_path / "single"))
    run_recipe(embed_corpus, *table_words(folder, tmp_path / "half", "--dtype", "float16"))
    single, half = rows_of(tmp_path / "single")["embedding"][:], rows_of(tmp_path / "half")["embedding"][:]
    (path,) = (tmp_path / "half" / "data").glob("*-00000-of-*")
    assert pq.read_schema(path).field("embedding").type == pa.list_(pa.float16(), single.shape[1])
    np.testing.assert_allclose(half, single, atol=1e-3)


def test_files_have_a_size_that_shares_the_work():
    args = CorpusArguments(output="nowhere")
    for clips, processes, expected in ((2000, 2, 250), (1_000_000, 8, 10_000), (3, 8, 1)):
        assert embed_corpus.choose_clips_per_file(args, clips, processes) == expected
    sharded = CorpusArguments(output="nowhere", shard="1/10")
    assert embed_corpus.choose_clips_per_file(sharded, 2000, 1) == 50
    for shard in ("0/2", "1/2"):  # 16 and 17 clips, in files of the same size
        args = CorpusArguments(output="nowhere", shard=shard)
        assert embed_corpus.choose_clips_per_file(args, 33, 1) == 5


def test_smaller_embeddings_are_those_of_the_whole_ones(folder, whole, tmp_path):
    plain = np.array(rows_of(whole)["embedding"][:], np.float32)
    for precision, width in (("int8", None), ("binary", 8), ("float32", 4)):
        output, options = tmp_path / f"{precision}{width}", ["--dtype", precision]
        options += [] if width is None else ["--width", width]
        run_recipe(embed_corpus, *words(folder, output, *options))
        stored = np.array(rows_of(output)["embedding"][:]).astype(PRECISIONS[precision])
        np.testing.assert_array_equal(stored, compress(plain, precision, width))
        assert json.loads((output / "manifest.json").read_text())["dtype"] == precision
    with pytest.raises(ValueError, match="width is 400"):
        run_recipe(embed_corpus, *words(folder, tmp_path / "wide", "--width", 400))
