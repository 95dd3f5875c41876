"""Kept features and outputs: a recording is read once, a frozen output is computed once, and results are equal."""

import gc
import json
import multiprocessing
import pickle
import random
import sqlite3
import sys
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import builders
import numpy as np
import pytest
import soundfile
import torch
from processes import run_processes
from recordings import tone_rows
from test_trainer import QUICK, build, processor
from transformers import TrainerCallback

from modeling_supclap import SupCLAPProcessor
from modeling_supclap.datasets_scripts.audio import content_of
from modeling_supclap.training import collator, kept
from modeling_supclap.training.collator import EvaluationCollator, IndexedRows, TrainingCollator
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.kept import KeptValues, hash_front_end, hash_of, hash_recording

EPOCHS = 3
FROZEN = [[], ["text"], ["audio"], ["audio", "text"]]


def count_rows(model):
    """Count the rows that each tower embeds."""
    seen = Counter()
    for name in ("audio", "text"):
        model.get_submodule(f"{name}_model").register_forward_hook(
            lambda module, args, kwargs, output, name=name: seen.update({name: len(next(iter(kwargs.values())))}),
            with_kwargs=True,
        )
    return seen


def train(folder, rows, frozen=(), model=None, callbacks=None, **kwargs):
    """Train in float64, and evaluate; return the trainer, its losses, and the numbers of embedded rows."""
    model = builders.supclap_model() if model is None else model
    for name in frozen:
        model.get_submodule(f"{name}_model").requires_grad_(False)
    seen = count_rows(model)
    options = {
        "num_train_epochs": EPOCHS,
        "languages": ["eng", "fra"],
        "eval_strategy": "epoch",
        "track_drift": False,
        **kwargs,
    }
    trainer = build(folder, rows, model=model, callbacks=callbacks, **{**QUICK, **options})
    trainer.model.double()
    trainer.train()
    scores = ("loss", "eval_mean_recall", "train_loss")
    losses = [[entry[name] for name in scores if name in entry] for entry in trainer.state.log_history]
    return trainer, losses, seen


@pytest.fixture
def reads(monkeypatch):
    """Clip ids of the recordings that the collators have read."""
    ids, read = [], collator.read_row
    monkeypatch.setattr(
        collator, "read_row", lambda row, *args, **kwargs: ids.append(row["clip_id"]) or read(row, *args, **kwargs)
    )
    return ids


# ---- a run with kept values is the run without them ----


@pytest.mark.parametrize("options", [{}, {"features_on_device": True}, {"apply_spec_augment": True}], ids=str)
def test_features_are_computed_once_and_losses_are_equal(tmp_path, rows, reads, options):
    trainer, losses, _ = train(tmp_path / "kept", rows, **options)
    assert sorted(reads) == sorted(row["clip_id"] for row in rows)  # validation clips are training clips, too
    reads.clear()
    plain, plain_losses, _ = train(tmp_path / "plain", rows, feature_cache_gib=0, **options)
    assert len(reads) == EPOCHS * (len(rows) + 8)
    assert losses == plain_losses
    states = trainer.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("frozen", FROZEN[1:], ids=str)
@pytest.mark.parametrize("loss", ["kcl", "infonce"])
def test_frozen_towers_embed_once_also_in_evaluations(tmp_path, rows, reads, frozen, loss):
    trainer, losses, seen = train(tmp_path / "kept", rows, frozen, loss=loss)
    assert sorted(reads) == sorted(row["clip_id"] for row in rows)
    plain, plain_losses, plain_seen = train(tmp_path / "plain", rows, frozen, loss=loss, feature_cache_gib=0)
    torch.testing.assert_close(losses, plain_losses, atol=1e-9, rtol=0)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=0, atol=1e-7)

    texts = {text for row in rows for several in row["captions"].values() for text in several}
    for name, count in (("audio", len(rows)), ("text", len(texts))):
        assert plain_seen[name] > 2 * count
        assert seen[name] <= count if name in frozen else seen[name] == plain_seen[name]
    before = dict(seen)
    trainer.predict(rows[:8])
    assert {name: seen[name] for name in frozen} == {name: before[name] for name in frozen}


def test_a_clip_that_is_twice_in_a_batch_is_read_once(tmp_path, rows, reads):
    row = IndexedRows(rows)[0]
    features = TrainingCollator(processor(), kept=KeptValues(str(tmp_path)))([row, row])["input_features"]
    assert reads == ["clip0"]
    assert torch.equal(features[0], features[1])


def test_a_later_run_reads_and_embeds_nothing(tmp_path, rows, reads, caplog):
    options = {"frozen": ["audio", "text"], "feature_cache": str(tmp_path / "shared")}
    _, losses, seen = train(tmp_path / "first", rows, **options)
    assert "computed once: audio and text; " in caplog.text
    assert (seen["audio"], len(reads)) == (12, 12)
    reads.clear()
    _, again, seen = train(tmp_path / "second", rows, **options)
    torch.testing.assert_close(again, losses, atol=1e-9, rtol=0)
    assert (sum(seen.values()), reads) == (0, [])

    # other weights have other outputs; a trained tower needs features, which the frozen ones did not keep
    other = builders.supclap_model(seed=1)
    _, _, seen = train(tmp_path / "third", rows, model=other, **options)
    assert (seen["audio"], len(reads)) == (12, 12)
    train(tmp_path / "fourth", rows, feature_cache=str(tmp_path / "shared"))
    assert len(reads) == 24


@pytest.mark.parametrize("frozen", [[], ["audio"]], ids=str)
def test_augmented_clips_are_read_in_each_epoch(tmp_path, rows, reads, frozen):
    _, losses, _ = train(tmp_path / "kept", rows, frozen, random_gain_db=6.0)
    assert len(reads) == EPOCHS * len(rows) + 8  # validation is not augmented
    _, plain, _ = train(tmp_path / "plain", rows, frozen, random_gain_db=6.0, feature_cache_gib=0)
    torch.testing.assert_close(losses, plain, atol=1e-9, rtol=0)


def test_masked_features_pass_through_a_frozen_tower_in_each_epoch(tmp_path, rows, reads):
    _, losses, seen = train(tmp_path / "kept", rows, ["audio"], apply_spec_augment=True)
    assert seen["audio"] == EPOCHS * len(rows) + 8
    _, plain, _ = train(tmp_path / "plain", rows, ["audio"], apply_spec_augment=True, feature_cache_gib=0)
    torch.testing.assert_close(losses, plain, atol=1e-9, rtol=0)


def test_a_full_store_keeps_what_it_has(tmp_path, rows, reads):
    # a clip of 13,000 bytes has a page of the store, and the table and its index two each
    trainer, losses, _ = train(tmp_path / "kept", rows, feature_cache_gib=10 * kept.PAGE_BYTES / 2**30)
    assert len(rows) < len(reads) < EPOCHS * (len(rows) + 8)
    assert losses == train(tmp_path / "plain", rows, feature_cache_gib=0)[1]
    assert Path(trainer.kept.folder, kept.FILE).stat().st_size <= 10 * kept.PAGE_BYTES


# ---- dropout, and weights that change ----


def model_with_dropout():
    return builders.supclap_model(builders.supclap_config(builders.bert_config(hidden_dropout_prob=0.3)))


def test_a_frozen_tower_has_no_dropout_unless_it_is_asked_for(tmp_path, rows, caplog):
    trainer, losses, seen = train(tmp_path / "always", rows, ["text"], model_with_dropout())
    assert "computed once: text" in caplog.text
    _, without_dropout, _ = train(tmp_path / "none", rows, ["text"])
    torch.testing.assert_close(losses, without_dropout, atol=1e-9, rtol=0)
    assert seen["text"] <= 48
    trainer.model.train()
    assert (trainer.clap.text_model.training, trainer.clap.audio_model.training) == (False, True)

    caplog.clear()
    _, dropped, seen = train(tmp_path / "never", rows, ["text"], model_with_dropout(), cache_frozen="never")
    assert "frozen" not in caplog.text
    assert dropped[0] != losses[0]
    assert seen["text"] >= EPOCHS * (len(rows) + 8)


def test_auto_is_always_with_a_warning(tmp_path, rows):
    with pytest.warns(FutureWarning, match="cache_frozen"):
        assert build(tmp_path, rows, cache_frozen="auto").args.cache_frozen == "always"


class Change(TrainerCallback):
    """Change a frozen tower in the middle of an epoch, when the next batch is read."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 4:
            self.change(next(model.get_submodule(self.name).parameters()))


CHANGES = [lambda weight: weight.requires_grad_(), lambda weight: weight.detach().mul_(2)]


@pytest.mark.parametrize("change", CHANGES)
def test_an_audio_tower_that_changes_in_an_epoch_is_an_error(tmp_path, rows, change):
    with pytest.raises(ValueError, match=r"audio tower has changed.*cache_frozen"):
        train(tmp_path, rows, ["audio"], callbacks=[Change("audio_model", change)])


@pytest.mark.parametrize("change", CHANGES)
def test_a_text_tower_that_changes_in_an_epoch_is_embedded_again(tmp_path, rows, change):
    options = {"frozen": ["text"], "callbacks": [Change("text_model", change)]}
    _, losses, _ = train(tmp_path / "kept", rows, **options)
    _, plain, _ = train(tmp_path / "plain", rows, **options, feature_cache_gib=0)
    torch.testing.assert_close(losses, plain, atol=1e-9, rtol=0)
    unchanged = train(tmp_path / "unchanged", rows, ["text"])[1]
    assert losses[:4] == unchanged[:4]


def test_a_tower_that_changes_between_two_calls_is_embedded_again(tmp_path, rows):
    trainer, _, seen = train(tmp_path, rows, ["audio"])
    before, count = trainer.predict(rows).predictions[0], seen["audio"]
    with torch.no_grad():
        trainer.clap.audio_model.init_bn.running_mean.add_(10)  # a buffer counts, too
    after = trainer.predict(rows).predictions[0]
    assert seen["audio"] == count + len(rows)
    assert np.abs(after - before).max() > 1e-3
    trainer.clap.audio_model.float()
    trainer.predict(rows)
    assert seen["audio"] == count + 2 * len(rows)


def test_settings_that_change_the_outputs_of_a_tower_change_its_key(tmp_path, rows):
    """The key of the other tower stays."""

    def towers(changes=None, **options):
        model = builders.supclap_model()
        model.requires_grad_(False)
        trainer = build(tmp_path, rows, model, **QUICK, **options)
        for change, value in (changes or {}).items():
            setattr(model.config if change == "text_pooling" else trainer.args, change, value)
        trainer.get_train_dataloader()
        return trainer.kept.towers

    plain = towers()
    assert towers() == plain
    changed = [towers(attn_implementation="eager"), towers({"tf32": True}), towers(bf16=True)]
    for kind in ("audio", "text"):
        assert len({each[kind] for each in (plain, *changed)}) == 4
    pooled = towers({"text_pooling": "cls"})
    assert (pooled["audio"] == plain["audio"], pooled["text"] == plain["text"]) == (True, False)
    for off in (
        {"cache_frozen": "never"},
        {"bf16_full_eval": True},
        {"fp16_full_eval": True},
        {"feature_cache_gib": 0},
    ):
        assert towers(**off) == {}


def test_the_outputs_of_sharded_towers_are_not_kept(tmp_path, rows, monkeypatch):
    model = builders.supclap_model()
    model.text_model.requires_grad_(False)
    trainer = build(tmp_path, rows, model, **QUICK)
    trainer.get_train_dataloader()
    assert trainer.kept.towers.keys() == {"text"}
    monkeypatch.setattr(type(trainer.args), "sharding", "fsdp")
    trainer.get_train_dataloader()
    assert trainer.kept.towers == {}


def test_precisions_do_not_share_outputs(tmp_path, rows):
    counts = []
    for number, options in enumerate([{}, {"bf16": True}, {"bf16": True}]):
        model = builders.supclap_model()
        model.text_model.requires_grad_(False)
        seen = count_rows(model)
        trainer = build(tmp_path / str(number), rows, model=model, feature_cache=str(tmp_path), **QUICK, **options)
        outputs = trainer.predict(rows).predictions[1]
        counts.append((seen["text"], outputs))
    assert [count for count, _ in counts] == [24, 24, 0]
    assert 0 < np.abs(counts[0][1] - counts[1][1]).max() < 0.1
    np.testing.assert_array_equal(counts[1][1], counts[2][1])


# ---- keys ----


def test_a_recording_is_its_content_its_rate_and_its_part(tmp_path, monkeypatch):
    samples = np.arange(8, dtype="<i2").tobytes()
    array = np.arange(8, dtype=np.float32)
    path = tmp_path / "a.wav"
    soundfile.write(path, builders.noise(800), 16000)
    other = tmp_path / "b.wav"
    other.write_bytes(path.read_bytes())
    rows = [
        {"samples": samples, "sampling_rate_hz": 16000},
        {"samples": samples, "sampling_rate_hz": 8000},
        {"samples": samples[2:], "sampling_rate_hz": 16000},
        {"audio": {"bytes": path.read_bytes()}, "audio_path": "x"},
        {"audio": {"array": array, "sampling_rate": 16000}},
        {"audio": {"array": array, "sampling_rate": 8000}},
        {"audio": {"array": array.astype(np.int16), "sampling_rate": 16000}},  # full scale depends on the type
        {"audio": {"array": array.view(np.int32), "sampling_rate": 16000}},
        {"audio": {"array": array.reshape(2, 4), "sampling_rate": 16000}},
        {"audio_path": str(path)},
        {"audio_path": str(other)},
        {"audio": {"bytes": None, "path": str(path)}, "audio_path": "x", "start_seconds": 0.0, "end_seconds": 0.02},
        {"audio_path": str(path), "start_seconds": 0.01, "end_seconds": 0.02},
        {"audio_path": str(path), "channel": 0},
        {"audio_path": str(path), "channel": 1},
    ]
    keys = [hash_recording(row) for row in rows]
    assert len(set(keys)) == len(rows)
    monkeypatch.chdir(tmp_path)
    assert hash_recording({"audio_path": "b.wav"}) == keys[10]
    assert [hash_recording({**row, "clip_id": "a", "captions": ["Rain."]}) for row in rows] == keys
    assert content_of(rows[11]) == str(path)

    soundfile.write(path, builders.noise(800, seed=1), 16000)  # as large as before
    assert hash_recording(rows[9]) != keys[9]
    assert hash_recording({"audio_path": "s3://bucket/a.wav"}) is None
    assert hash_recording({"audio_path": str(tmp_path / "missing.wav")}) is None


def test_a_front_end_is_its_settings(tmp_path):
    processors = [processor(), builders.pair("clap2")[1], builders.pair("converted")[1]]
    assert len({hash_front_end(each) for each in processors}) == 3
    changed = builders.bert_processor()
    assert hash_front_end(changed) == hash_front_end(processor())
    changed.feature_extractor.top_db = 80.0
    assert hash_front_end(changed) != hash_front_end(processor())
    changed = builders.bert_processor()
    changed.feature_extractor.sampling_rate = 8000
    assert hash_front_end(changed) != hash_front_end(processor())
    changed = builders.bert_processor()
    changed.resampling_method = "kaiser_best"
    assert hash_front_end(changed) != hash_front_end(processor())
    assert hash_front_end(processor(), True) != hash_front_end(processor(), False)
    changed = builders.bert_processor()
    changed.save_pretrained(tmp_path)
    assert hash_front_end(changed) == hash_front_end(processor())
    assert hash_front_end(SupCLAPProcessor.from_pretrained(tmp_path)) == hash_front_end(processor())
    assert hash_of("ab", "c") != hash_of("a", "bc")


def test_a_tower_is_its_weights_its_settings_and_the_versions(monkeypatch):
    weight = torch.arange(4, dtype=torch.float16)
    others = [
        {"a": weight.view(torch.bfloat16)},
        {"a": weight.reshape(2, 2)},
        {"b": weight},
        {"a": weight + 1},
        {"a": weight, "b": weight},
    ]

    def key_of(weights, *settings):
        store = KeptValues()
        store.set_tower("text", 0, weights, *settings)
        return store.towers["text"]

    keys = [key_of({"a": weight}), key_of({"a": weight}, "bf16"), *map(key_of, others)]
    assert len(set(keys)) == len(keys)
    assert key_of({"a": weight.clone()}) == keys[0]
    assert key_of({"a": weight.repeat_interleave(2)[::2]}) == keys[0]  # other strides
    assert key_of({"b": weight, "a": weight}) == keys[-1]  # in any order
    front_end = hash_front_end(processor())
    monkeypatch.setattr(kept, "VERSIONS", ("another",))
    assert key_of({"a": weight}) != keys[0]
    assert hash_front_end(processor()) != front_end


def features(kind, row, folder, **options):
    batch = kind(processor(), kept=KeptValues(str(folder)), **options)([row])
    return batch["input_features"]


def test_crops_are_kept_only_at_the_beginning(tmp_path, reads):
    """A whole recording is the same in each epoch; a random crop is another one; evaluation crops to the beginning."""
    row = {**IndexedRows(tone_rows(tmp_path, 1))[0], "clip_id": "a"}
    soundfile.write(row["audio_path"], builders.noise(32_000), 16_000)
    longest = {"max_audio_seconds": 2.0}
    whole = features(TrainingCollator, row, tmp_path, **longest)
    assert torch.equal(features(EvaluationCollator, row, tmp_path, **longest), whole)
    assert torch.equal(features(TrainingCollator, row, tmp_path, **longest, seed=5), whole)
    assert len(reads) == 1

    crop = {"max_audio_seconds": 1.0}
    beginning = features(EvaluationCollator, row, tmp_path, **crop)
    assert torch.equal(features(EvaluationCollator, row, tmp_path, **crop), beginning)
    assert len(reads) == 2
    crops = [features(TrainingCollator, row, tmp_path, **crop, seed=seed) for seed in (0, 1, 1)]
    assert len(reads) == 5
    assert not torch.equal(crops[0], crops[1])
    assert torch.equal(crops[1], crops[2])
    assert beginning.shape[2] < whole.shape[2]


def test_a_clip_that_is_a_few_samples_too_long_is_the_same_in_each_epoch(tmp_path, reads):
    """Vorbis files of 5 s have 44 samples more; a random crop of them was another recording in each epoch."""
    row = {**IndexedRows(tone_rows(tmp_path, 1))[0], "clip_id": "a"}
    soundfile.write(row["audio_path"], builders.noise(16_160), 16_000)
    crop = {"max_audio_seconds": 1.0}
    first = features(TrainingCollator, row, tmp_path, **crop, seed=1)
    assert torch.equal(features(TrainingCollator, row, tmp_path, **crop, seed=2), first)
    assert torch.equal(features(EvaluationCollator, row, tmp_path, **crop), first)
    assert len(reads) == 1

    soundfile.write(row["audio_path"], builders.noise(16_161), 16_000)
    crops = [features(TrainingCollator, row, tmp_path, **crop, seed=seed) for seed in (1, 2)]
    assert not torch.equal(crops[0], crops[1])


def test_padded_clips_are_kept_apart(tmp_path):
    row = {**IndexedRows(tone_rows(tmp_path, 1))[0]}
    soundfile.write(row["audio_path"], builders.noise(800), 16_000)
    assert features(TrainingCollator, row, tmp_path, pad_short_clips=True).shape[2] == 16
    with pytest.raises(ValueError, match=r"0\.05"):
        features(TrainingCollator, row, tmp_path)


def test_equal_texts_of_a_batch_are_embedded_once(tmp_path, rows):
    equal = [{**row, "captions": {"eng": ["a dog barks"]}} for row in rows]
    _, _, seen = train(tmp_path, equal, ["text"], languages=["eng"], per_device_train_batch_size=12)
    assert seen["text"] == 1


# ---- the store ----


def test_a_store_without_a_folder_keeps_nothing():
    store = KeptValues()
    store.add({b"a": {"x": np.ones(1)}})
    assert store.find([b"a"]) == {}


def test_damaged_values_are_not_found_and_are_replaced(tmp_path):
    store = KeptValues(str(tmp_path / "new"))
    values = {b"a": {"x": np.arange(3.0)}, b"b": {"y": np.ones((2, 1), np.int16), "z": np.ones(1) > 0}}
    values[b"b"]["transposed"] = np.arange(6).reshape(2, 3).T
    store.add({**values, 7: {"x": np.ones(1)}})
    found = store.find([b"a", b"b", b"c"])
    assert found.keys() == values.keys()
    for name, array in values[b"b"].items():
        np.testing.assert_array_equal(found[b"b"][name], array, strict=True)

    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700  # others may not read the recordings
    with sqlite3.connect(tmp_path / "new" / kept.FILE) as connection:
        key = hash_of(None, b"a")
        ((content,),) = connection.execute("SELECT value FROM kept WHERE key = ?", (key,))
        damaged = content[:-1] + bytes([content[-1] ^ 1])
        connection.execute("UPDATE kept SET value = ? WHERE key = ?", (damaged, key))
    assert store.find([b"a", b"b"]).keys() == {b"b"}
    store.add({b"a": values[b"a"]})
    np.testing.assert_array_equal(store.find([b"a"])[b"a"]["x"], np.arange(3.0))


def test_a_damaged_file_is_named_and_nothing_else_happens(tmp_path, rows):
    (tmp_path / kept.FILE).write_bytes(random.Random(0).randbytes(50_000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, losses, _ = train(tmp_path / "run", rows, ["text"], feature_cache=str(tmp_path))
    assert any(kept.FILE in str(each.message) and "delete" in str(each.message) for each in caught)
    torch.testing.assert_close(losses, train(tmp_path / "plain", rows, ["text"])[1], atol=1e-9, rtol=0)


def test_a_store_of_another_layout_is_named(tmp_path):
    with sqlite3.connect(tmp_path / kept.FILE) as connection:
        connection.execute("CREATE TABLE kept (name TEXT)")
    store = KeptValues(str(tmp_path))
    with pytest.warns(UserWarning, match=rf"{kept.FILE}.*delete it"):
        store.add({b"a": {"x": np.ones(1)}})
    with pytest.warns(UserWarning, match=rf"{kept.FILE}.*delete it"):
        assert store.find([b"a"]) == {}


def test_a_disk_that_refuses_is_named_and_the_store_stays_usable(tmp_path):
    resource = pytest.importorskip("resource")
    store = KeptValues(str(tmp_path))
    store.add({b"before": {"x": np.ones(1)}})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes of any file
    try:
        with pytest.warns(UserWarning, match=kept.FILE):
            store.add({b"large": {"x": np.ones(100_000)}})
        assert store.find([b"before", b"large"]).keys() == {b"before"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.add({b"large": {"x": np.ones(100_000)}})
    assert KeptValues(str(tmp_path)).find([b"before", b"large"]).keys() == {b"before", b"large"}


@pytest.mark.parametrize("limit_bytes", [1000, 10 * kept.PAGE_BYTES])
def test_a_full_store_adds_nothing(tmp_path, limit_bytes):
    store = KeptValues(str(tmp_path), limit_bytes)
    for number in range(100):
        store.add({number.to_bytes(1, "big"): {"x": np.full(2000, number)}})
    found = store.find([number.to_bytes(1, "big") for number in range(100)])
    assert len(found) < 10
    assert bool(found) == (limit_bytes > kept.PAGE_BYTES)
    assert (tmp_path / kept.FILE).stat().st_size <= max(limit_bytes, kept.PAGE_BYTES)


def test_memory_does_not_grow_with_the_number_of_values(tmp_path):
    store = KeptValues(str(tmp_path))
    store.add({b"first": {"x": np.ones(1)}})
    tracemalloc.start()
    try:
        for number in range(500):
            key = number.to_bytes(2, "big")
            store.add({key: {"x": np.full(1000, number)}})  # 8,000 bytes
            assert store.find([key]).keys() == {key}
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def fill(folder, start, numbers):
    """Store values until the process is killed, and send their numbers."""
    store = KeptValues(folder)
    while True:
        store.add({start.to_bytes(4, "big"): {"x": np.full(1000, start)}})
        numbers.send(start)
        start += 1


@pytest.mark.process
def test_killed_writers_leave_a_usable_store(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = []
    for start in (0, 1000):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=fill, args=(str(tmp_path), start, sender), daemon=True)
        process.start()
        writers.append((start, process, receiver))
    written = []
    for start, _, receiver in writers:  # both write at the same time
        while not written or written[-1] != start + 20:
            written.append(receiver.recv())
    for _, process, _ in writers:
        process.kill()
        process.join()

    store = KeptValues(str(tmp_path))
    for number in written:
        key = number.to_bytes(4, "big")
        np.testing.assert_array_equal(store.find([key])[key]["x"], np.full(1000, number))
    store.add({b"new": {"x": np.ones(1)}})
    assert store.find([b"new"]).keys() == {b"new"}


def test_a_temporary_folder_lives_as_long_as_its_trainer(tmp_path, rows):
    trainer = build(tmp_path, rows)
    folder = Path(trainer.kept.folder)
    trainer.kept.add({b"a": {"x": np.ones(1)}})
    copied = pickle.loads(pickle.dumps(trainer.kept))
    assert copied.find([b"a"]).keys() == {b"a"}
    del copied
    gc.collect()
    assert folder.is_dir()  # only the first owner deletes it
    del trainer
    gc.collect()
    assert not folder.exists()

    named = build(tmp_path, rows, feature_cache=str(tmp_path / "shared")).kept
    named.add({b"a": {"x": np.ones(1)}})
    del named
    gc.collect()
    assert KeptValues(str(tmp_path / "shared")).find([b"a"]).keys() == {b"a"}


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_share_the_store(tmp_path, rows, context):
    many = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": context}
    options = {}
    if context == "spawn":  # each start of a worker imports torch
        options = {"num_train_epochs": 2, "eval_strategy": "no"}
    trainer, losses, seen = train(tmp_path / "two", rows, ["text"], **many, **options)
    assert losses == train(tmp_path / "none", rows, ["text"], **options)[1]
    assert seen["text"] <= 48
    clips = EvaluationCollator(processor(), max_audio_seconds=30.0, kept=trainer.kept)  # no worker has deleted it
    assert len(clips.kept.find(clips._keys(row, 0.0)[True] for row in rows)) == len(rows)


def train_and_report(folder, report, batch):
    """Train with frozen towers, and report the losses and the number of clips that each process embeds."""
    Path(folder, "tones").mkdir(exist_ok=True)
    rows = tone_rows(Path(folder, "tones"), count=12)
    options = {"per_device_train_batch_size": int(batch), "eval_strategy": "no"}
    trainer, losses, seen = train(Path(folder, f"run{batch}"), rows, ["audio", "text"], **options)
    path = Path(report).with_suffix(f".{trainer.args.process_index}.json")
    path.write_text(json.dumps({"losses": losses, "clips": seen["audio"], "folder": trainer.kept.folder}))


@pytest.mark.process
def test_processes_share_the_store(tmp_path):
    train_and_report(str(tmp_path), str(tmp_path / "one"), 4)
    run_processes(__file__, str(tmp_path), str(tmp_path / "two"), 2)
    one, first, second = (
        json.loads((tmp_path / name).read_text()) for name in ("one.0.json", "two.0.json", "two.1.json")
    )
    for entry, expected in zip(first["losses"], one["losses"], strict=True):
        assert entry == pytest.approx(expected, abs=1e-6)
    assert one["clips"] == first["clips"] + second["clips"] == 12
    assert first["folder"] == second["folder"] != one["folder"]
    assert not Path(first["folder"]).exists()


if __name__ == "__main__":
    train_and_report(*sys.argv[1:])
    leave_process_group()
