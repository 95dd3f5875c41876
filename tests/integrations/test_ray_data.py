"""Batches and frames of recordings on a cluster: the embeddings of `encode_audio`, and errors by row."""

import re
from pathlib import Path

import builders
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from processes import run_python

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.datasets_scripts.prepared import PreparedSet
from modeling_supclap.integrations.ray_data import EmbedRecordings, embed_frames

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with a model, twelve recordings of which one is damaged, and a table of their paths."""
    folder = tmp_path_factory.mktemp("corpus")
    builders.save_supclap(folder / "model")
    paths = []
    for number in range(12):
        paths.append(str(folder / f"{number}.wav"))
        soundfile.write(paths[-1], builders.noise(8000 + 3000 * number, seed=number), 16000)
    (folder / "5.wav").write_bytes(b"no sound")
    pq.write_table(pa.table({"path": paths, "key": list(range(12))}), folder / "clips.parquet")
    return folder, paths


def check(corpus, keys, embeds, errors):
    folder, paths = corpus
    model = SupCLAPModel.from_pretrained(folder / "model")
    assert sorted(keys) == list(range(12))
    for key, embed, error in zip(keys, embeds, errors, strict=True):
        if key == 5:
            assert np.isnan(embed).all()
            assert "5.wav" in error
        else:
            np.testing.assert_allclose(embed, model.encode_audio(paths[key]), atol=1e-5)
            assert error == ""


def test_a_batch_keeps_its_columns(corpus):
    folder, paths = corpus
    batch = EmbedRecordings(str(folder / "model"), device="cpu")({"path": np.array(paths), "key": np.arange(12)})
    assert set(batch) == {"path", "key", "embedding", "error"}
    check(corpus, batch["key"], batch["embedding"], batch["error"])


def test_frames_of_spark(corpus):
    folder, paths = corpus
    frames = [
        pd.DataFrame({"path": paths[:7], "key": range(7)}),
        pd.DataFrame({"path": paths[7:], "key": range(7, 12)}),
    ]
    joined = pd.concat(embed_frames(str(folder / "model"), device="cpu")(iter(frames)))
    check(corpus, joined["key"], joined["embedding"], joined["error"])


def test_the_options_of_frames_are_those_of_the_model(corpus, tmp_path):
    folder, _ = corpus
    soundfile.write(tmp_path / "long.wav", builders.noise(12 * 16000, seed=3), 16000)
    soundfile.write(tmp_path / "silent.wav", np.zeros(16000), 16000)
    frame = pd.DataFrame({"sound": [tmp_path / "silent.wav", tmp_path / "long.wav"]})
    model = SupCLAPModel.from_pretrained(folder / "model")
    for chunk_seconds, expected in ((2.0, 2.0), (10.0, 10.0), (None, None), (60.0, None)):
        options = {"path_column": "sound", "chunk_seconds": chunk_seconds, "device": "cpu"}
        if chunk_seconds == 10.0:
            del options["chunk_seconds"]  # the default
        (found,) = embed_frames(str(folder / "model"), **options)([frame])
        (embed,) = model.encode_audio([str(tmp_path / "long.wav")], chunk_seconds=expected)
        np.testing.assert_allclose(found["embedding"][1], embed, atol=1e-5)
        assert found["embedding"][0].dtype == np.float32
        assert np.isnan(found["embedding"][0]).all()
        assert "silent" in found["error"][0]
        assert found["error"][1] == ""


def blocks(language):
    """Return the code blocks of the guide."""
    guide = (ROOT / "docs" / "guides" / "machines.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)


START = """
import os, signal, sys
import ray

folder = sys.argv[1]
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # two actors, and slots to read and write


def die_once():
    if not os.path.exists(f"{folder}/killed"):
        open(f"{folder}/killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_ACTOR = """
from modeling_supclap.integrations import ray_data


class EmbedRecordings(ray_data.EmbedRecordings):
    def __call__(self, batch):
        if 0 in batch["key"]:
            die_once()
        return super().__call__(batch)
"""


@pytest.mark.process
@pytest.mark.slow
def test_two_actors_of_ray_lose_nothing_when_one_is_killed(corpus, tmp_path):
    pytest.importorskip("ray.data")
    folder, _ = corpus
    (code,) = [block for block in blocks("text") if "EmbedRecordings" in block]
    for words, here in (
        ("from modeling_supclap.integrations.ray_data import EmbedRecordings\n", KILLED_ACTOR),
        ("s3://bucket/embeddings", f"{tmp_path}/embeddings"),
        ("s3://bucket", str(folder)),
        ('["outputs/tuned"]', f'["{folder}/model"], fn_constructor_kwargs={{"device": "cpu"}}'),
        ("batch_size=256, num_gpus=1", "batch_size=4"),
        ("size=100", "size=2"),
    ):
        assert words in code
        code = code.replace(words, here)
    run_python("-c", START + code, tmp_path, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    assert (tmp_path / "killed").exists()
    rows = pq.read_table(tmp_path / "embeddings").to_pydict()
    check(corpus, rows["key"], np.array(rows["embedding"]), rows["error"])


@pytest.mark.process
@pytest.mark.slow
def test_tasks_of_ray_prepare_the_set_of_one_run_when_one_is_killed(tmp_path):
    pytest.importorskip("ray")
    sounds, options = tmp_path / "my_sounds", {"languages": ["eng"]}
    sounds.mkdir()
    lines = ["file_name,caption"]
    for number in range(20):
        soundfile.write(sounds / f"{number}.wav", builders.noise(8000, seed=number), 16000)
        lines.append(f"{number}.wav,sound number {number}")
    (sounds / "metadata.csv").write_text("\n".join(lines))

    (tasks,) = [block for block in blocks("python") if "write_shard" in block]
    (ray_block,) = [block for block in blocks("text") if "ray.remote(write)" in block]
    loop = "for number in range(4):  # in any order, on any machine, at the same time\n    write(number)\n"
    assert loop in tasks
    tasks = tasks.replace('"my_sounds"', repr(str(sounds))).replace('"prepared/', f'"{tmp_path}/')
    killed = """
    from modeling_supclap.datasets_scripts import shard_writer
    pack = shard_writer.pack
    shard_writer.pack = lambda *words: (number == 2 and words[0].endswith("wav") and die_once()) or pack(*words)
"""
    tasks = tasks.replace("def write(number):\n", f"def write(number):{killed}").replace(loop, ray_block)
    run_python("-c", START + tasks, tmp_path, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    assert (tmp_path / "killed").exists()

    request = Request("audio_folder", {"data_dir": str(sounds), **options}, storage="int16")
    whole = prepare(request, tmp_path / "whole", cache_dir=str(tmp_path / "rows"), quiet=True)
    joined = PreparedSet(tmp_path / "corpus").manifest
    assert joined["source_files"] == whole["source_files"]
    found, expected = (load_splits("prepared", data_dir=str(tmp_path / name)) for name in ("corpus", "whole"))
    assert {split: rows.to_list() for split, rows in found.items()} == {
        split: rows.to_list() for split, rows in expected.items()
    }
