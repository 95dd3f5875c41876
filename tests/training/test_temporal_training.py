"""TeminAL's stages end to end: batches, trained parameters, resumption, and several processes."""

import json
import sys
from pathlib import Path

import builders
import numpy as np
import pytest
import soundfile
import torch
from processes import assert_same_training, run_processes
from recordings import tone_rows
from test_trainer import losses, processor, with_dropout

from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.temporal.items import TemporalItems, render
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.temporal_training import TemporalCollator, TemporalTrainer
from modeling_supclap.training.training_args import TemporalTrainingArguments

# Words in the vocabulary of the test tokenizer.
PHRASES = {
    f"tone_{index}": {"eng": eng, "fra": fra}
    for index, (eng, fra) in enumerate(
        [("a dog", "un chien"), ("rain", "la pluie"), ("barks", "aboie"), ("the", "la")]
    )
}


def items_of(rows, **kwargs):
    return TemporalItems(rows, seed=0, phrases=PHRASES, languages=("eng", "fra"), **kwargs)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return items_of(tone_rows(tmp_path_factory.mktemp("tones"), count=12))


def build(folder, items, model=None, callbacks=None, **kwargs):
    quiet = {"disable_tqdm": True, "report_to": "none", "use_cpu": True, "seed": 7, "logging_steps": 1}
    short = {"per_device_train_batch_size": 6, "num_train_epochs": 2, "languages": ["eng", "fra"]}
    args = TemporalTrainingArguments(output_dir=str(folder), **{**quiet, **short, **kwargs})
    model = builders.supclap_model() if model is None else model
    return TemporalTrainer(model, args, items, items, processing_class=processor(), callbacks=callbacks)


QUICK = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


def test_a_recording_that_begins_with_silence_is_cut_from_its_first_sound_on(tmp_path):
    rows = tone_rows(tmp_path, count=4)
    tone, rate_hz = soundfile.read(rows[1]["audio_path"])
    silence = np.zeros(2 * rate_hz)
    soundfile.write(rows[1]["audio_path"], np.concatenate([silence, tone, silence]), rate_hz)
    collator = TemporalCollator(processor(), items_of(rows), "b", max_audio_seconds=0.25)
    clip = collator._read(rows[1])
    assert len(clip) == 0.25 * 16000
    np.testing.assert_allclose(clip.std(), tone.std(), rtol=0.1)
    collator([{"clip_index": number} for number in range(12)])


def test_a_batch_of_stage_b_holds_each_pair_in_three_roles(items):
    collator = TemporalCollator(processor(), items, "b", languages=["eng"])
    batch = collator([{"clip_index": 3}, {"clip_index": 5}])
    assert batch["input_ids"].shape[:2] == (2, 3)
    assert batch["group_ids"].shape == (2, 3)
    drawn = [item for number in (3, 5) for item in items.triple(0, number)]
    waveforms = [render(item, lambda row: read_row(row, 16000), 16000) for item in drawn]
    expected = processor()(audio=waveforms, sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(batch["input_features"], expected["input_features"], rtol=0, atol=0)
    for ids, item in zip(batch["input_ids"].flatten(0, 1), drawn, strict=True):
        encoded = [processor()(text=text)["input_ids"][0] for text in item.captions["eng"]]
        assert [token for token in ids.tolist() if token] in encoded


def test_all_captions_of_a_pair_are_in_one_language(items):
    collator = TemporalCollator(processor(), items, "b", languages=["eng", "fra"])
    drawn = []
    for number in range(len(items)):
        texts = collator([{"clip_index": number}])["input_ids"].flatten(0, 1).tolist()
        spoken = []
        for ids, item in zip(texts, items.triple(0, number), strict=True):
            for language in ("eng", "fra"):
                encoded = [processor()(text=text)["input_ids"][0] for text in item.captions[language]]
                if [token for token in ids if token] in encoded:
                    spoken.append(language)
        assert spoken in (["eng"] * 3, ["fra"] * 3)
        drawn.append(spoken[0])
    assert set(drawn) == {"eng", "fra"}


def test_both_clips_of_a_pair_are_in_one_chunk(tmp_path, items):
    trainer = build(tmp_path, items, **QUICK)
    seconds = trainer.model.model.config.audio_config.target_length * 160 / 16_000
    assert trainer.data_collator.max_audio_seconds == pytest.approx(seconds / 2)


def test_options_of_a_stage_reach_its_loss_and_its_clips(tmp_path, items):
    options = {"temporal_beta": 0.5, "temporal_beta_a": 0.25, "match_overlay_loudness": False, **QUICK}
    options |= {"match_loudness": True, "text_scheme": "kcl", "eval_languages": ["fra", "eng"]}
    for stage, beta in (("a", 0.25), ("b", 0.5)):
        trainer = build(tmp_path, items, stage=stage, two_term_overlay=True, **options)
        objective = trainer.module.objective
        assert (objective.beta, objective.two_term_overlay) == (beta, True)
        options_of_clips = trainer.data_collator.options
        assert (options_of_clips.match_loudness, options_of_clips.match_overlay_loudness) == (True, False)
        evaluated = trainer.evaluation_collator
        assert (evaluated.languages, evaluated.seed, evaluated.options) == (("fra",), 7, options_of_clips)
        assert (trainer.data_collator.languages, trainer.data_collator.scheme) == (("eng", "fra"), "kcl")
    assert build(tmp_path, items, stage="a", temporal_beta=0.5, **QUICK).module.objective.beta == 0.5
    assert TemporalTrainingArguments(use_cpu=True).per_device_train_batch_size * 3 == 255  # of 256 [T B.5]


def test_a_batch_of_stage_a_knows_its_classes(items):
    collator = TemporalCollator(processor(), items, "a", languages=["eng"])
    batch = collator([{"clip_index": number} for number in range(4)])
    assert batch["input_features"].shape[0] == 8
    for number, classes in enumerate(batch["class_ids"].tolist()):
        single, combined = items.stage_a(0, number)
        assert [items.labels[place] for place in classes] == [*single.labels, *combined.labels]


def test_items_that_mean_the_same_are_one_group(items):
    (first, second) = items.pairs[0]
    back = items.pairs.index((second, first))
    collator = TemporalCollator(processor(), items, "b", languages=["eng"])
    groups = collator([{"clip_index": 0}, {"clip_index": back}])["group_ids"]
    assert groups[0, 0] == groups[1, 1]
    assert groups[0, 1] == groups[1, 0]
    assert groups[0, 2] == groups[1, 2]
    assert len(set(groups.flatten().tolist())) == 3


def test_all_languages_at_once(items):
    collator = TemporalCollator(processor(), items, "b", languages=["eng", "fra"], scheme="kcl")
    assert collator([{"clip_index": 0}, {"clip_index": 1}])["input_ids"].shape[:2] == (2, 6)


def test_other_epochs_other_recordings(items):
    collator = TemporalCollator(processor(), items, "b", languages=["eng"])
    first = collator([{"clip_index": 0}])["input_features"]
    collator.set_epoch(1)
    assert not torch.equal(first, collator([{"clip_index": 0}])["input_features"])


@pytest.mark.parametrize("options", [{"stage": "a"}, {"stage": "b"}, {"stage": "b", "text_scheme": "kcl"}])
def test_every_parameter_changes(tmp_path, items, options):
    trainer = build(tmp_path, items, max_steps=3, **options, **QUICK)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert [name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])] == []


def test_a_stage_improves_the_evaluated_accuracy(tmp_path, items):
    options = {"num_train_epochs": 30, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "track_drift": False}
    trainer = build(tmp_path, items, stage="a", languages=["eng"], **options, **QUICK)
    before = trainer.evaluate()["eval_temporal_accuracy"]
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_temporal_accuracy"] > max(before, 0.5) + 0.2
    assert after["eval_temporal_accuracy"] == pytest.approx(
        (after["eval_single_accuracy"] + after["eval_combined_accuracy"]) / 2
    )


@pytest.mark.parametrize("stage", ["a", "b"])
def test_a_resumed_run_continues_bit_for_bit(tmp_path, items, stage):
    steps = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    options = {"stage": stage, **steps}
    whole = build(tmp_path / "whole", items, model=with_dropout(), **options)
    whole.train()
    model = builders.supclap_model(with_dropout().config, seed=99)
    resumed = build(tmp_path / "whole", items, model=model, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "c"}, "stage.*'c'"),
        ({"loss": "kcl"}, "loss.*'kcl'.*TeminAL"),
        ({"every_caption": True}, "every_caption.*TeminAL"),
        ({"loss_chunk_size": 8}, "loss_chunk_size.*8.*TeminAL"),
        ({"svr": "bi-static"}, "svr is 'bi-static', but TeminAL"),
        ({"track_language_errors": True}, "track_language_errors is True, but TeminAL"),
        ({"negatives_per_clip": 1}, "negatives_per_clip is 1, but TeminAL"),
        ({"hard_negatives_per_batch": 1}, "hard_negatives_per_batch is 1, but TeminAL"),
        ({"text_scheme": "cacl"}, "text_scheme.*'cacl'"),
        ({"alpha_same_time": 1.5}, r"alpha_same_time=1\.5"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, items, options, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, items, **options)


# ---- several processes ----


def train_and_report(folder, report, batch):
    Path(folder, "tones").mkdir(exist_ok=True)
    items = items_of(tone_rows(Path(folder, "tones"), count=12), pairs_per_epoch=8)
    content = {}
    for name, options in (
        ("a", {"stage": "a"}),
        ("b", {"stage": "b"}),
        ("b, kcl", {"stage": "b", "text_scheme": "kcl"}),
    ):
        size = {"per_device_train_batch_size": int(batch), "max_steps": 2}
        trainer = build(
            f"{folder}/{name}{batch}", items, alpha_same=0.5, alpha_same_time=0.5, **size, **options, **QUICK
        )
        trainer.model.double()  # Adam turns the rounding noise of a zero gradient into a step
        trainer.train()
        content["world_size"] = trainer.args.world_size
        content[name] = {key: value.tolist() for key, value in trainer.model.named_parameters()}
    if trainer.is_world_process_zero():
        Path(report).write_text(json.dumps(content))


@pytest.mark.process
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_like_one(tmp_path, count):
    train_and_report(str(tmp_path), str(tmp_path / "one.json"), "8")
    run_processes(__file__, str(tmp_path), str(tmp_path / "many.json"), str(8 // count), count=count)
    assert_same_training(tmp_path / "one.json", tmp_path / "many.json", count)


if __name__ == "__main__":
    train_and_report(*sys.argv[1:])
    leave_process_group()
