"""Hard negatives: the nearest wrong captions, by plain loops, and a run that trains on them."""

from unittest import mock

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import run_recipe

from modeling_supclap.recipes import mine_negatives, train_supclap
from modeling_supclap.recipes.mine_negatives import Captions, mine

CAPTIONS = [["A dog", "a  DOG"], ["rain", "wind"], ["wind", "storm"], ["a cat"], [], ["birds"], ["rain falls"]]


def unit(seed, count, dim=5):
    vectors = np.random.default_rng(seed).standard_normal((count, dim))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_loops(captions, texts, audio, count, first_rank, margin):
    """The nearest wrong texts of each clip, one similarity at a time."""
    found = []
    for clip, own in enumerate(captions.of_clip):
        right = {index for of_other in captions.of_clip if set(of_other) & set(own) for index in of_other}
        scored = []
        for index in range(len(captions.texts)):
            if audio is None:
                similarity = max((texts[index] @ texts[one] for one in own), default=-np.inf)
                limit = 1 - margin
            else:
                similarity = texts[index] @ audio[clip]
                limit = max((texts[one] @ audio[clip] for one in own), default=-np.inf) - margin
            if own and index not in right and similarity <= limit:
                scored.append((-similarity, index))
        found.append([index for _, index in sorted(scored)[first_rank - 1 :][:count]])
    return found


@pytest.mark.parametrize("uses_audio", [False, True])
@pytest.mark.parametrize(
    ("count", "first_rank", "margin"), [(8, 1, 0.0), (2, 1, 0.0), (2, 2, 0.0), (8, 1, 0.3), (8, 1, -0.3), (8, 1, 2.0)]
)
@pytest.mark.parametrize("block", [2, 512])
def test_negatives_are_those_of_the_loops(monkeypatch, uses_audio, count, first_rank, margin, block):
    monkeypatch.setattr(mine_negatives, "BLOCK_ROWS", block)
    captions = Captions(CAPTIONS)
    assert captions.texts == ["A dog", "rain", "wind", "storm", "a cat", "birds", "rain falls"]
    texts, audio = unit(0, 7), unit(1, 7) if uses_audio else None
    found = list(mine(captions, texts, audio, count, first_rank, margin))
    expected = by_loops(captions, texts, audio, count, first_rank, margin)
    assert [[index for index, _ in of_clip] for of_clip in found] == expected
    # "storm" is a caption of a clip that shares "wind"
    assert not {1, 2, 3} & {index for index, _ in found[1]}
    assert found[4] == []


def test_a_wrong_caption_as_near_as_the_own_one_is_a_negative():
    captions = Captions([["A dog"], ["rain"]])
    equal = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert list(mine(captions, equal, equal)) == [[(1, 1.0)], [(0, 1.0)]]


@pytest.mark.process
@pytest.mark.parametrize("near", ["audio", "text"])
def test_a_run_trains_on_the_negatives_that_its_start_finds(tmp_path, near):
    model, table = builders.save_supclap(tmp_path / "model"), tmp_path / "negatives.parquet"
    sizes = {"num_train": 12, "num_validation": 4, "num_test": 4, "duration_seconds": 1.0}
    data = ["--dataset", "synthetic", "--languages", "eng"]
    data += [word for name, value in sizes.items() for word in (f"--{name}", value)]
    run_recipe(mine_negatives, "--model", model, *data, "--output", table, "--near", near, "--count", 3)
    rows = pq.read_table(table).to_pylist()
    assert {row["language"] for row in rows} == {"eng"}
    per_clip = {}
    for row in rows:
        per_clip.setdefault(row["clip_id"], []).append(row)
    assert len(per_clip) == 12
    for of_clip in per_clip.values():
        assert len({row["text"] for row in of_clip}) == len(of_clip) <= 3
        similarities = [row["similarity"] for row in of_clip]
        assert similarities == sorted(similarities, reverse=True)

    short = ["--max_steps", 2, "--per_device_train_batch_size", 4, "--use_cpu", "true", "--eval_languages", "eng"]
    words = ["--model", model, *data, *short, "--negatives", table, "--negatives_per_clip", 2]
    run_recipe(train_supclap, *words, "--output_dir", tmp_path / "run")
    with pytest.raises(ValueError, match="negatives_per_clip"):
        run_recipe(train_supclap, *words[:-4], "--negatives_per_clip", 2, "--output_dir", tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--near", "both"], "near is 'both'"),
        (["--count", "0"], "count is 0"),
        (["--margin", "-2.5"], "margin is -2.5"),
        (["--split", "dev"], "'dev'.*train"),
    ],
)
def test_invalid_options_are_named(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        run_recipe(mine_negatives, *words, "--output", tmp_path / "x.parquet")


def test_the_command_prints_how_many_clips_have_no_negatives(monkeypatch, tmp_path, capsys):
    data = ["--dataset", "synthetic", "--num_train", 5, "--num_validation", 2, "--num_test", 2]
    words = [
        *data,
        "--model",
        "m",
        "--device",
        "cpu",
        "--trust_remote_code",
        "true",
        "--output",
        tmp_path / "n.parquet",
    ]
    load = mock.Mock()
    monkeypatch.setattr("modeling_supclap.evaluation.models.load_embedding_model", load)
    table = [{"clip_id": name, "language": "eng", "text": "a", "similarity": 0.5} for name in ("1", "1", "0")]
    monkeypatch.setattr(mine_negatives, "mine_split", lambda *_: table)
    run_recipe(mine_negatives, *words)
    load.assert_called_once_with("m", device="cpu", trust_remote_code=True)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'n.parquet'} contains 3 negatives of 2 of 5 clips"
    assert second == "3 clips have none; they train without negatives"
    assert pq.read_table(tmp_path / "n.parquet").to_pylist() == table

    table[:] = [{**table[0], "clip_id": str(clip)} for clip in range(5)]
    run_recipe(mine_negatives, *words)
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / 'n.parquet'} contains 5 negatives of 5 of 5 clips"]
    table.clear()
    with pytest.raises(ValueError, match="no caption is wrong for a clip; lower --margin"):
        run_recipe(mine_negatives, *words)
