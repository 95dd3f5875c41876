"""Batches and frames of recordings on a cluster: the embeddings of `encode_audio`, and errors by row."""

import builders
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from processes import run_python

from modeling_supclap import SupCLAPModel
from modeling_supclap.integrations.ray_data import EmbedRecordings, embed_frames


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
    batch = EmbedRecordings(str(folder / "model"), device="cpu")(
        {"path": np.array(paths), "key": np.arange(12)}
    )
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


CLUSTER = """
import os, signal, sys, threading, time
import ray
from modeling_supclap.integrations.ray_data import EmbedRecordings

folder = sys.argv[1]


class Killed(EmbedRecordings):
    def __call__(self, batch):
        mark = f"{folder}/killed"
        if 0 in batch["key"] and not os.path.exists(mark):  # the first attempt dies with its worker
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # two actors, and slots to read and write
rows = ray.data.read_parquet(f"{folder}/clips.parquet")
rows.map_batches(
    Killed, fn_constructor_args=[f"{folder}/model"], fn_constructor_kwargs={"device": "cpu"}, batch_size=4,
    compute=ray.data.ActorPoolStrategy(size=2),
).write_parquet(f"{folder}/embeddings")
"""


@pytest.mark.process
@pytest.mark.slow
def test_two_actors_of_ray_lose_nothing_when_one_is_killed(corpus):
    pytest.importorskip("ray.data")
    folder, _ = corpus
    run_python("-c", CLUSTER, folder, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    assert (folder / "killed").exists()
    rows = pq.read_table(folder / "embeddings").to_pydict()
    check(corpus, rows["key"], np.array(rows["embedding"]), rows["error"])
