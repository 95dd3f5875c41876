"""Training on several datasets: counts per epoch, resumption, several processes, and scores of each dataset."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import builders
import numpy as np
import pytest
import torch
from datasets import Dataset
from processes import run_processes
from recordings import tone_rows
from test_trainer import arguments, best_step, losses, processor

from modeling_supclap.datasets_scripts.mixture import mix
from modeling_supclap.datasets_scripts.schema import EXPECTED_COUNT
from modeling_supclap.training.augmentation import WaveformAugmentation
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.trainer import SupCLAPTrainer

RUN = {
    "num_train_epochs": 3, "save_strategy": "no", "eval_strategy": "no",
    "load_best_model_at_end": False, "languages": ["eng", "fra"], "svr": "bi-dynamic",
}  # fmt: skip


def load_mixture(folder):
    """Two sets of tones, the second in English only and two and a half times an epoch."""
    sets = {}
    for name, count in (("a", 12), ("b", 8)):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        rows = tone_rows(Path(folder, name), count=count)
        for number, row in enumerate(rows):
            row["captions"] = {"eng": row["captions"]["eng"]} | ({"fra": [f"son {number}"]} if name == "a" else {})
        sets[name] = {"train": Dataset.from_list(rows), "validation": Dataset.from_list(rows[: count // 2])}
    return mix(sets, {"b": {"repeats": 2.5}})


class Seen(SupCLAPTrainer):
    """Trainer that stores the clips and tokens of each batch."""

    def compute_loss(self, model, inputs, **kwargs):
        self.__dict__.setdefault("batches", []).append(inputs["clip_index"].tolist())
        self.__dict__.setdefault("texts", []).append(inputs["input_ids"].tolist())
        return super().compute_loss(model, inputs, **kwargs)


def build(output, data_dir, seed=0, callbacks=None, dropout=0.3, **kwargs):
    text = builders.bert_config(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = builders.supclap_model(builders.supclap_config(text), seed=seed)
    splits, args = load_mixture(data_dir), arguments(output, **{**RUN, **kwargs})
    return Seen(model, args, splits["train"], splits["validation"], processor(), callbacks=callbacks)


@pytest.mark.parametrize("every_caption_in", [None, "eng"])
def test_an_epoch_has_each_item_floor_or_ceil_of_its_count(every_caption_in):
    counts = np.random.default_rng(0).gamma(1.0, 1.3, size=50)
    rows = [{"clip_id": str(number), "captions": {"eng": ["a", "b", "c"][: 1 + number % 3]}} for number in range(50)]
    expected = {}
    for row, count in enumerate(counts):
        for caption in range(len(rows[row]["captions"]["eng"]) if every_caption_in else 1):
            expected[row, caption] = count
    length = round(sum(expected.values()))
    scale = length / sum(expected.values())

    indexed = IndexedRows(Dataset.from_list(rows).add_column(EXPECTED_COUNT, counts), every_caption_in, seed=3)
    total, subsets = Counter(), set()
    for epoch in range(200):
        indexed.set_epoch(epoch)
        items = [indexed[index] for index in range(len(indexed))]
        assert len(items) == length
        copies = {item: [] for item in expected}
        for item in items:
            copies[item["clip_index"], item.get("caption_number", 0)].append(item["repetition"])
        for item, numbers in copies.items():
            assert math.floor(scale * expected[item]) <= len(numbers) <= math.ceil(scale * expected[item])
            assert numbers == list(range(len(numbers)))
            total[item] += len(numbers)
        subsets.add(tuple(map(len, list(copies.values())[:10])))
    for item, count in expected.items():
        assert total[item] / 200 == pytest.approx(scale * count, abs=0.12)  # standard error: at most 0.035
    assert len(subsets) > 30  # many different subsets
    other = IndexedRows(indexed.rows, every_caption_in, seed=4)
    other.set_epoch(199)
    assert [other[index] for index in range(length)] != items


def test_weights_are_shares_of_the_captions_of_an_epoch():
    sets = {}
    for name, captions in (("one", 1), ("five", 5)):
        rows = []
        for number in range(20):
            texts = {"eng": [f"{number} {caption}" for caption in range(captions)]}
            rows.append(
                {"clip_id": str(number), "audio_path": "a.wav", "captions": texts, "source": f"{name} {number}"}
            )
        sets[name] = {"train": Dataset.from_list(rows)}
    indexed = IndexedRows(mix(sets, {name: {"weight": 1} for name in sets})["train"], "eng", seed=0)
    drawn = Counter(indexed[index]["dataset"] for index in range(len(indexed)))
    assert drawn == {"one": 60, "five": 60}


def test_copies_of_a_clip_have_their_own_crop_caption_and_gain(tmp_path):
    row = {"clip_id": "a", "captions": {"eng": [f"caption {number}" for number in range(50)]}, EXPECTED_COUNT: 5.0}
    indexed, collator = IndexedRows(Dataset.from_list([row]), seed=0), TrainingCollator(processor())
    augment = WaveformAugmentation(arguments(tmp_path, random_gain_db=6.0), 16_000)
    waveform = np.ones(4, np.float32)
    assert len({float(augment(waveform, indexed[index], 0)[0]) for index in range(5)}) == 5
    positions, captions = zip(*(collator._draw(indexed[index]) for index in range(5)), strict=True)
    assert len(set(positions)) == 5
    assert len({tuple(of_copy) for of_copy in captions}) > 3


@pytest.mark.parametrize(("step", "workers"), [(10, 0), pytest.param(10, 2, marks=pytest.mark.process)])
def test_a_run_resumed_mid_epoch_continues_bit_for_bit(tmp_path, step, workers):
    options = {"dataloader_num_workers": workers, "save_strategy": "steps", "save_steps": step, "save_total_limit": 9}
    whole = build(tmp_path / "whole", tmp_path / "data", **options)
    whole.train()
    resumed = build(tmp_path / "whole", tmp_path / "data", seed=99, **options)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/whole/checkpoint-{step}")

    assert len(whole.batches) == 24  # 32 clips an epoch
    assert (resumed.batches, resumed.texts) == (whole.batches[step:], whole.texts[step:])
    assert losses(resumed) == losses(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name

    epochs = []
    for first in (0, 8, 16):
        drawn = Counter(clip for batch in whole.batches[first : first + 8] for clip in batch)
        assert [drawn[clip] for clip in range(12)] == [1] * 12
        assert {drawn[clip] for clip in range(12, 20)} == {2, 3}
        epochs.append(drawn)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


def test_each_dataset_has_its_metrics_in_the_languages_that_it_has(tmp_path):
    trainer = build(tmp_path / "run", tmp_path / "data", metric_for_best_model="b_mean_recall")
    metrics = trainer.evaluate()
    rows = trainer.eval_rows
    for name, languages in (("a", ["eng", "fra"]), ("b", ["eng"])):
        part = rows.select([index for index, row in enumerate(rows) if row["dataset"] == name])
        alone = build(tmp_path / name, tmp_path / "data", eval_languages=languages).evaluate(part)
        for metric in ("mean_recall", "eng_t2a_R@1", "eng_a2t_mean_rank"):
            assert metrics[f"eval_{name}_{metric}"] == pytest.approx(alone[f"eval_{metric}"])
    assert "eval_b_fra_t2a_R@1" not in metrics
    assert metrics["eval_eng_t2a_num_queries"] == sum(metrics[f"eval_{name}_eng_t2a_num_queries"] for name in "ab")


def test_the_best_checkpoint_is_that_of_one_dataset(tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    # the first is the best
    options |= {"metric_for_best_model": "b_eng_t2a_mean_rank", "greater_is_better": True}
    trainer = build(tmp_path / "run", tmp_path / "data", **options)
    trainer.train()
    scores = [entry["eval_b_eng_t2a_mean_rank"] for entry in trainer.state.log_history if "eval_mean_recall" in entry]
    assert len(scores) == 3
    assert best_step(trainer) == trainer.state.global_step // 3
    assert trainer.evaluate()["eval_b_eng_t2a_mean_rank"] == trainer.state.best_metric == scores[0] == max(scores)
    assert scores[-1] < scores[0]


def test_language_errors_of_copies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="track_language_errors"):
        build(tmp_path / "run", tmp_path / "data", track_language_errors=True)


def test_an_epoch_smaller_than_a_batch_is_refused(tmp_path):
    rows = Dataset.from_list(tone_rows(tmp_path, count=8)).add_column(EXPECTED_COUNT, [0.25] * 8)
    with pytest.raises(ValueError, match=r"2 clips.*batch of 4"):
        SupCLAPTrainer(builders.supclap_model(), arguments(tmp_path), rows, rows, processor())


# ---- two processes ----


def train_and_report(data_dir, output, batch_size):
    trainer = build(f"{output}/run{batch_size}", data_dir, dropout=0.0, per_device_train_batch_size=int(batch_size))
    trainer.train()
    report = {"batches": trainer.batches, "texts": trainer.texts, "losses": losses(trainer)}
    Path(output, f"{batch_size}-{trainer.args.process_index}.json").write_text(json.dumps(report))


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_see_the_batches_of_one(tmp_path):
    load_mixture(tmp_path / "data")
    train_and_report(tmp_path / "data", str(tmp_path), "4")
    run_processes(__file__, tmp_path / "data", str(tmp_path), "2")
    one, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("4-0", "2-0", "2-1"))
    together = [sorted(a + b) for a, b in zip(first["batches"], second["batches"], strict=True)]
    assert together == list(map(sorted, one["batches"]))
    assert first["losses"] == pytest.approx(one["losses"], abs=2e-3)


if __name__ == "__main__":
    train_and_report(*sys.argv[1:])
    leave_process_group()
