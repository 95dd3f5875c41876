"""The order of the training clips in batches with hard negatives."""

import builders
import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from recordings import tone_rows
from test_trainer import QUICK, arguments, build
from torch.utils.data import BatchSampler

from modeling_supclap.datasets_scripts.schema import group_id
from modeling_supclap.training.collator import IndexedRows
from modeling_supclap.training.hard_batches import HardBatches, order_by_captions

BATCH, COUNT = 6, 3


def draw_embeds(num=60, width=5):
    embeds = np.random.default_rng(0).standard_normal((num, width)).astype(np.float32)
    return embeds / np.linalg.norm(embeds, axis=1, keepdims=True)


def read_batches(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, sampler.batch_size, drop_last=False))


def test_each_batch_has_the_negatives_most_similar_to_its_first_item():
    """Compare with a loop over the items that are left; the pool contains all of them, and a similar positive."""
    embeds, groups = draw_embeds(), np.arange(60) // 2
    embeds[1::2] = embeds[::2] + 0.01 * embeds[1::2]
    left = set(range(60))
    batches = read_batches(HardBatches(embeds, groups, BATCH, COUNT))
    for anchor, *others in batches:
        left.remove(anchor)
        similar = sorted(left, key=lambda item: -float(embeds[item] @ embeds[anchor]))
        hardest = [item for item in similar if groups[item] != groups[anchor]][:COUNT]
        assert set(hardest) <= set(others)
        left -= set(others)
    assert not left
    assert list(map(len, batches)) == [BATCH] * 10


def test_hard_negatives_come_from_a_random_pool():
    embeds = draw_embeds(600)
    means = []
    for pool_size in (COUNT, 50, 599):
        sampler = HardBatches(embeds, np.arange(600), BATCH, COUNT, pool_size)
        scores = []
        for anchor, *others in read_batches(sampler)[:20]:
            scores += sorted(embeds[others] @ embeds[anchor])[-COUNT:]
        means.append(np.mean(scores))
    assert means[0] + 0.2 < means[1] < means[2] - 0.02


def test_the_order_depends_on_the_seed_and_the_epoch():
    inputs = draw_embeds(), np.arange(60), BATCH, COUNT
    first = read_batches(HardBatches(*inputs, seed=1), epoch=2)
    assert first == read_batches(HardBatches(*inputs, seed=1), epoch=2)
    assert first != read_batches(HardBatches(*inputs, seed=1), epoch=3)
    assert first != read_batches(HardBatches(*inputs, seed=2), epoch=2)


def test_items_of_one_group_fill_batches_without_negatives():
    batches = read_batches(HardBatches(draw_embeds(8), np.zeros(8, int), BATCH, COUNT))
    assert list(map(len, batches)) == [6, 2]
    assert sorted([*batches[0], *batches[1]]) == list(range(8))


def test_processes_share_each_batch():
    """The parts that accelerate gives to the processes of a step are a batch of one process."""
    sampler = HardBatches(draw_embeds(), np.arange(60), BATCH, COUNT)
    of_processes = []
    for process in range(2):
        batches = BatchSampler(sampler, BATCH // 2, drop_last=True)
        of_processes.append(list(BatchSamplerShard(batches, num_processes=2, process_index=process)))
    joined = [[*first, *second] for first, second in zip(*of_processes, strict=True)]
    assert joined == read_batches(sampler)


def train_and_record(trainer, **kwargs):
    """Train, and return the clip indices of each batch that the data loader reads."""
    clips, collate = [], trainer.data_collator

    def record(rows):
        clips.append([row["clip_index"] for row in rows])
        return collate(rows)

    trainer.data_collator = record
    trainer.train(**kwargs)
    return clips


OPTIONS = {**QUICK, "per_device_train_batch_size": 4, "hard_negatives_per_batch": 2, "max_steps": 5}


def test_a_trainer_uses_this_order_also_when_it_resumes(tmp_path):
    """The resumed run uses the embeddings of the initial model, not those of the checkpoint."""
    rows = tone_rows(tmp_path, count=12)
    saves = {"save_steps": 2, "save_strategy": "steps", "save_total_limit": 3}
    trainer = build(tmp_path / "run", rows, **{**OPTIONS, **saves})
    sampler = order_by_captions(trainer.clap, trainer.processor, IndexedRows(rows), trainer.args)
    expected = read_batches(sampler) + read_batches(sampler, epoch=1)
    assert train_and_record(trainer)[:5] == expected[:5]

    resumed = build(tmp_path / "run", rows, **OPTIONS)
    clips = train_and_record(resumed, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert clips[:3] == expected[2:5]


@pytest.mark.parametrize("positives", ["clip", "captions"])
def test_every_caption_is_an_item_in_the_first_language_of_its_clip(tmp_path, positives):
    model, processor = builders.pair("sonar")  # the language changes its embeddings
    rows = tone_rows(tmp_path, count=6)
    rows[3]["captions"]["fra"] = []
    rows[5]["captions"] = rows[4]["captions"]
    args = arguments(tmp_path / "run", languages=["fra", "eng"], positives=positives, **OPTIONS)
    sampler = order_by_captions(model, processor, IndexedRows(rows, "fra"), args)
    texts, languages, groups = [], [], []
    for row in rows:
        language = "fra" if row["captions"]["fra"] else "eng"
        several = row["captions"][language][: 2 if language == "fra" else 1]
        texts += several
        languages += [language] * len(several)
        groups += [group_id(row, positives)] * len(several)
    embeds = model.encode_text(texts, processor=processor, language=languages)
    assert np.allclose(sampler.embeds, embeds, atol=1e-6)
    assert sampler.group_ids.tolist() == groups
    assert len(set(groups)) == (6 if positives == "clip" else 5)
    assert sampler.seed == args.seed


def test_a_batch_is_that_of_all_processes(tmp_path, monkeypatch):
    trainer = build(tmp_path / "run", tone_rows(tmp_path, count=12), **OPTIONS)
    rows = IndexedRows(trainer.train_dataset.rows)
    alone = order_by_captions(trainer.clap, trainer.processor, rows, trainer.args)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    together = order_by_captions(trainer.clap, trainer.processor, rows, trainer.args)
    assert (alone.batch_size, together.batch_size) == (4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hard_negatives_per_batch": 4}, "hard_negatives_per_batch is 4; .*less than.*, 4"),
        ({"auto_find_batch_size": True}, "hard_negatives_per_batch with auto_find_batch_size"),
    ],
)
def test_impossible_batches_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, [], **{**OPTIONS, **options})
