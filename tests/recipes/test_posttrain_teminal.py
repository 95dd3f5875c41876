"""The TeminAL recipe, with a small folder in the layout of ESC-50."""

import io
import json
import re
import time
from contextlib import redirect_stdout
from unittest import mock

import builders
import pytest
import soundfile
import torch
from commands import run_recipe
from huggingface_hub import ModelCard
from processes import run_processes
from recordings import esc50_folder
from transformers import ClapModel, pipeline

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.datasets_scripts.overlap.trained_sources import refuse_trained_sources
from modeling_supclap.evaluation import Results, compare
from modeling_supclap.recipes import posttrain_teminal
from modeling_supclap.training.rows import filter_bad_audio
from modeling_supclap.training.temporal_training import TemporalTrainer
from modeling_supclap.training.training_args import TemporalTrainingArguments

IMPORTED = time.perf_counter()
# Each class has three training recordings: for training, for selecting the best epoch, and for the scores.
BOTH_HELD_OUT = {"train_fraction": 0.34, "dataset_config": {"validation_fraction": 0}}
HELD_OUT_OPTIONS = ["--train_fraction", "0.34", "--validation_fraction", "0", "--test_fold", "1"]
HELD_OUT_OPTIONS += ["--pairs_per_epoch", "12"]
ONE_EPOCH = ["--num_train_epochs", "1", "--per_device_train_batch_size", "6"]
ONE_EPOCH += ["--use_cpu", "true"]
BEST_EPOCH = ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end", "true"]


@pytest.fixture(scope="module")
def esc_folder(tmp_path_factory):
    return esc50_folder(tmp_path_factory.mktemp("esc") / "ESC-50", count=6, num_folds=2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return builders.save_supclap(tmp_path_factory.mktemp("model"))


def in_folders(model, data, output):
    return ["--model", str(model), "--data_dir", str(data), "--output_dir", str(output), *HELD_OUT_OPTIONS]


def test_fsdp_is_refused_before_training(tmp_path, esc_folder, model_folder, monkeypatch):
    monkeypatch.setattr(TemporalTrainingArguments, "sharding", "fsdp")
    few = ["--per_device_train_batch_size", "4", "--use_cpu", "true"]
    with pytest.raises(ValueError, match="FSDP"):
        run_recipe(posttrain_teminal, *in_folders(model_folder, esc_folder, tmp_path), *few)


def load_items(args, training, min_seconds=0.0):
    splits = args.load_splits()
    usable = {name: filter_bad_audio(rows, training, min_seconds) for name, rows in splits.items()}
    return posttrain_teminal.load_items(args, training, usable)


def test_labels_of_an_audio_folder_are_english_names(tmp_path):
    lines = ["file_name,caption,label"]
    for number in range(12):
        soundfile.write(tmp_path / f"{number}.wav", 0.5 * builders.tone(200.0 + number, 8000), builders.RATE_HZ)
        lines.append(f"{number}.wav,a sound,{('door_bell', 'saw', 'hen')[number % 3]}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    args = posttrain_teminal.PostTrainingArguments(
        model="m", dataset="audio_folder", data_dir=str(tmp_path), train_fraction=0.3
    )
    train, held_out, _ = load_items(args, TemporalTrainingArguments(use_cpu=True))
    overlaid = [train.triple(0, number)[2] for number in range(len(train))]
    assert "Door bell while saw" in {item.captions["eng"][0] for item in overlaid}
    assert held_out.labels == ("door_bell", "hen", "saw")
    options = {"use_cpu": True, "on_bad_audio": "skip", "output_dir": str(tmp_path / "out")}
    with pytest.raises(BadAudioError, match=r"0\.5000 s.*0\.6 s"):
        load_items(args, TemporalTrainingArguments(**options), min_seconds=0.6)
    with pytest.raises(ValueError, match="'audio_folder'"):
        load_items(args, TemporalTrainingArguments(use_cpu=True, languages=["eng", "fra"]))
    args.prompts = "phrases"
    with pytest.raises(ValueError, match="'audio_folder'"):  # labels would replace the phrases
        load_items(args, TemporalTrainingArguments(use_cpu=True))


def test_only_the_training_split_is_drawn_from_unless_splits_are_pooled(esc_folder):
    training = TemporalTrainingArguments(use_cpu=True)
    sizes = {}
    for pool in (False, True):
        args = posttrain_teminal.PostTrainingArguments(
            model="m", data_dir=str(esc_folder), pool_splits=pool, **BOTH_HELD_OUT
        )
        parts = load_items(args, training)
        sizes[pool] = [len(part.rows) for part in parts]
        folds = {row["clip_id"][0] for part in parts for row in part.rows}
        assert folds == ({"1", "2"} if pool else {"2"})
    assert sizes == {False: [4, 4, 4], True: [8, 8, 8]}


def test_the_whole_training_split_trains_if_the_test_split_is_held_out(esc_folder):
    """With `test_fraction`, post-training and all evaluations share one split of the dataset, as in [T B.5]."""
    args = posttrain_teminal.PostTrainingArguments(
        model="m",
        data_dir=str(esc_folder),
        train_fraction=1.0,
        dataset_config={"test_fraction": 0.34, "validation_fraction": 0},
    )
    keep = TemporalTrainingArguments(use_cpu=True, load_best_model_at_end=False)
    train, selection, scored = load_items(args, keep)
    splits = args.load_splits()
    assert train.rows["clip_id"] == splits["train"]["clip_id"]
    assert selection.rows["clip_id"] == scored.rows["clip_id"] == splits["test"]["clip_id"]
    assert (len(train.rows), len(scored.rows)) == (16, 8)  # of 6 recordings of each of 4 classes
    with pytest.raises(ValueError, match=r"train_fraction is 1.*no validation split"):
        load_items(args, TemporalTrainingArguments(use_cpu=True, eval_strategy="epoch"))
    args.dataset_config["validation_fraction"] = 0.25
    train, selection, scored = load_items(args, TemporalTrainingArguments(use_cpu=True))
    assert [len(items.rows) for items in (train, selection, scored)] == [12, 4, 8]
    with pytest.raises(ValueError, match=r"train_fraction=1.*pool_splits"):
        posttrain_teminal.PostTrainingArguments(train_fraction=1, pool_splits=True)


def test_a_dataset_without_a_training_split_is_refused(esc_folder):
    args = posttrain_teminal.PostTrainingArguments(model="m", data_dir=str(esc_folder))
    training = TemporalTrainingArguments(use_cpu=True)
    with pytest.raises(ValueError, match=r"^esc50 has only the splits \['dev', 'test'\]; use --pool_splits true"):
        posttrain_teminal.hold_out({"dev": None, "test": None}, args, training)


def test_splits_are_checked_before_a_recording_is_read(esc_folder):
    args = posttrain_teminal.PostTrainingArguments(model="m", data_dir=str(esc_folder), **BOTH_HELD_OUT)
    splits, part = args.load_splits(), posttrain_teminal.LastPartArguments()
    training = TemporalTrainingArguments(use_cpu=True, per_device_train_batch_size=12)
    rows = posttrain_teminal.check(splits, args, part, training)
    assert len(rows) == 4
    assert set(rows["clip_id"]) < set(splits["train"]["clip_id"])
    training.per_device_train_batch_size = 13
    with pytest.raises(ValueError, match="12 pairs are fewer than a batch of 13"):
        posttrain_teminal.check(splits, args, part, training)


def test_one_recording_of_each_class_is_used_in_all_pairs(esc_folder):
    args = posttrain_teminal.PostTrainingArguments(
        model="m", data_dir=str(esc_folder), pool_splits=True, train_fraction=0.5, fixed_recordings=True
    )
    train, _, scored = load_items(args, TemporalTrainingArguments(use_cpu=True))
    pairs = set()
    for epoch in range(2):
        for index in range(len(train)):
            pairs.add(tuple(row["clip_id"] for row in train.triple(epoch, index)[0].rows))
    assert len(train) == len(pairs) == 4 * 3  # 50 * 49 = 2,450 with 50 classes [T B.2]
    assert len({clip_id for pair in pairs for clip_id in pair}) == len(train.rows) == 4
    assert not {row["source"] for row in train.rows} & {row["source"] for row in scored.rows}


def test_other_recordings_are_scored_than_those_that_choose_the_best_epoch(esc_folder):
    chosen, kept = (
        TemporalTrainingArguments(use_cpu=True, load_best_model_at_end=best, eval_strategy="epoch")
        for best in (True, False)
    )
    args = posttrain_teminal.PostTrainingArguments(model="m", data_dir=str(esc_folder), **BOTH_HELD_OUT)
    sources = [{row["source"] for row in items.rows} for items in load_items(args, chosen)]
    assert all(len({row["labels"][0] for row in items.rows}) == 4 for items in load_items(args, chosen))
    assert not sources[0] & sources[1] | sources[1] & sources[2] | sources[0] & sources[2]
    _, choosing, scored = load_items(args, kept)
    assert (
        {row["source"] for row in scored.rows} == {row["source"] for row in choosing.rows} == sources[1] | sources[2]
    )

    args.train_fraction = 0.7
    with pytest.raises(ValueError, match=r"'dog'.*--load_best_model_at_end"):
        load_items(args, chosen)


def test_each_set_has_its_number_of_pairs(esc_folder, monkeypatch):
    monkeypatch.setattr(posttrain_teminal, "EVAL_PAIRS", 5)
    args = posttrain_teminal.PostTrainingArguments(
        model="m", data_dir=str(esc_folder), pairs_per_epoch=7, **BOTH_HELD_OUT
    )
    assert list(map(len, load_items(args, TemporalTrainingArguments(use_cpu=True)))) == [7, 5, 5]


@pytest.mark.parametrize(
    ("prompts", "languages", "said"),
    [(None, ["eng"], "Dog before rain"), ("phrases", ["eng"], "A dog barking before rain falling")],
)
def test_prompts_use_the_requested_names_of_sounds(esc_folder, prompts, languages, said):
    args = posttrain_teminal.PostTrainingArguments(
        model="m", data_dir=str(esc_folder), prompts=prompts, pool_splits=True, train_fraction=0.5
    )
    training = TemporalTrainingArguments(use_cpu=True, languages=languages)
    items = load_items(args, training)[0]
    captions = [items.triple(0, number)[0].captions["eng"] for number in range(len(items))]
    assert any(said in texts for texts in captions)
    with pytest.raises(ValueError, match=r"prompts.*'labels'"):
        posttrain_teminal.choose_prompts(posttrain_teminal.PostTrainingArguments(prompts="labels"), ["eng", "fra"])


@pytest.fixture(scope="module")
def run(esc_folder, model_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("post") / "run"
    small = ["--num_train_epochs", "2", "--per_device_train_batch_size", "6"]
    layers = ["--audio_layers", "1", "--text_layers", "1", "--languages", "eng", "fra", *BEST_EPOCH]
    places = in_folders(model_folder, esc_folder, output)
    with redirect_stdout(io.StringIO()) as printed:
        run_recipe(posttrain_teminal, *places, *small, *layers)
    return output, printed.getvalue(), [*places, *small, *layers]


def test_both_stages_run_and_are_scored(run):
    scores = Results.load(run[0]).scores["temporal"]["eng"]
    assert list(scores) == ["before", "stage_a", "stage_b"]
    assert set(scores["stage_a"]) == {"temporal_accuracy", "single_accuracy", "combined_accuracy"}
    found = scores["stage_b"]["temporal_accuracy"]
    assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert (found["chance"], found["order_blind"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert scores["stage_b"]["order_accuracy"]["chance"] == 0.5
    assert "The order of sounds" in (run[0] / "report.html").read_text()
    assert all(row["difference"] == 0 for row in compare(Results.load(run[0]), Results.load(run[0])))
    trained = Results.load(run[0]).content["training"]
    printed = re.findall(r"^(?:audio encoder|text encoder|projections) .* ([\d,]+) +[\d.]+$", run[1], flags=re.M)
    assert trained["text_trained"] + trained["audio_trained"] == sum(int(n.replace(",", "")) for n in printed)
    assert 0 < trained["text_share"] < 1
    steps = [json.loads((run[0] / f"stage_{stage}/trainer_state.json").read_text())["max_steps"] for stage in "ab"]
    assert trained["steps"] == sum(steps)
    assert trained["captions"] == 6 * (2 * steps[0] + 3 * steps[1])
    assert 0 < trained["seconds"] < time.perf_counter() - IMPORTED
    assert trained["process_seconds"] > 0
    assert 0 <= trained["best_validation"]["temporal_accuracy"] <= 1
    assert SupCLAPModel.from_pretrained(run[0]).config.temporal_prompts == "phrases"

    protocol = dict(Results.load(run[0]).protocol)
    assert len(protocol.pop("dataset_hash")) > 8
    intervals = protocol.pop("intervals")
    assert (intervals["method"], intervals["seed"]) == ("percentile bootstrap over pairs", 42)
    described = {"dataset": "esc50", "origin": "esc50", "split": "held out", "languages": ["eng"], "seed": 42}
    temporal = {"pairs": 12, "seed": 42, "max_audio_seconds": 1.0}
    assert described | {"clips": 4, "classes": 4, "temporal": temporal} == {
        name: protocol[name] for name in (*described, "clips", "classes", "temporal")
    }
    assert [f"{run[0]}/stage_{stage}/_resume" in run[1] for stage in "ab"] == [True, True]


def test_the_recordings_of_the_training_are_recorded(run, esc_folder):
    config = {"validation_fraction": 0, "test_fold": 1}  # as in HELD_OUT_OPTIONS
    args = posttrain_teminal.PostTrainingArguments(
        model="m", data_dir=str(esc_folder), train_fraction=0.34, dataset_config=config
    )
    trained, held_out, _ = load_items(args, TemporalTrainingArguments(use_cpu=True))
    found = refuse_trained_sources(trained.rows, str(run[0]), allow=True)
    assert found == len(trained.rows) > 0
    assert refuse_trained_sources(held_out.rows, str(run[0]), allow=True) == 0


@pytest.mark.slow
@pytest.mark.process
def test_several_processes_equal_one_run(run, tmp_path):
    halves = ["--output_dir", str(tmp_path), "--per_device_train_batch_size", "3", "--use_cpu", "true"]
    run_processes("recipes/posttrain_teminal.py", *run[2], *halves)
    one, two = (Results.load(folder).scores["temporal"]["eng"] for folder in (run[0], tmp_path))
    assert two["before"] == one["before"]
    steps = [
        sorted(path.relative_to(folder) for path in folder.glob("stage_*/_resume/checkpoint-*"))
        for folder in (run[0], tmp_path)
    ]
    assert steps[0] == steps[1] != []


def test_the_card_describes_the_run(run):
    card = ModelCard.load(run[0] / "README.md")
    assert card.data.datasets is None  # a builder, not a dataset of the Hub
    found = Results.load(run[0]).scores["temporal"]["eng"]["stage_b"]
    after = {each.metric_name: each.metric_value for each in card.data.eval_results if "stage b" in each.metric_name}
    assert after == {
        f"order of sounds, stage b {name}": pytest.approx(found[name]["value"], abs=1e-4)
        for name in ("temporal_accuracy", "order_accuracy")
    }
    for told in ("stage: a, then b", "sinha2024teminal", "posttrain_teminal.py --model"):
        assert told in card.text


def test_only_the_last_blocks_have_changed(run, model_folder):
    before, after = (SupCLAPModel.from_pretrained(path).state_dict() for path in (model_folder, run[0]))
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert "audio_model.blocks.1.attn.qkv.weight" in moved
    assert "text_model.encoder.layer.1.attention.self.query.weight" in moved
    assert "audio_projection.linear1.weight" in moved
    assert not [name for name in moved if ".blocks.0." in name or ".layer.0." in name or "embeddings" in name]


def test_the_folder_loads_with_its_processor(run):
    processor = SupCLAPProcessor.from_pretrained(run[0])
    assert processor(text="a dog", return_tensors="pt")["input_ids"].shape[0] == 1


def test_lora_saves_a_model_in_the_standard_layout(esc_folder, model_folder, tmp_path):
    small = ["--num_train_epochs", "2", "--per_device_train_batch_size", "6", "--lora_rank", "2"]
    places = in_folders(model_folder, esc_folder, tmp_path / "lora")
    run_recipe(posttrain_teminal, *places, *small, "--audio_layers", "1", "--text_layers", "1")
    trained = Results.load(tmp_path / "lora").content["training"]
    plain = SupCLAPModel.from_pretrained(model_folder)
    for tower in ("audio", "text"):
        sizes = {name: weight.numel() for name, weight in plain.named_parameters() if name.startswith(f"{tower}_")}
        projection = sum(size for name, size in sizes.items() if name.startswith(f"{tower}_projection"))
        adapters = trained[f"{tower}_trained"] - projection
        assert adapters > 0
        # PEFT trains a copy of the projection, which is counted once
        share = trained[f"{tower}_trained"] / (sum(sizes.values()) + adapters)
        assert trained[f"{tower}_share"] == pytest.approx(share)
    before = SupCLAPModel.from_pretrained(model_folder).state_dict()
    loaded, report = SupCLAPModel.from_pretrained(tmp_path / "lora", output_loading_info=True)
    assert not any(report.values()), report
    moved = {name for name, value in before.items() if not torch.equal(value, loaded.state_dict()[name])}
    assert "audio_model.blocks.1.attn.qkv.weight" in moved
    assert not [name for name in moved if ".blocks.0." in name or ".mlp." in name]


def test_a_clap_model_stays_one(esc_folder, tmp_path):
    builders.save_clap(tmp_path / "clap")
    small = ["--num_train_epochs", "1", "--per_device_train_batch_size", "6", "--languages", "eng"]
    places = in_folders(tmp_path / "clap", esc_folder, tmp_path / "out")
    run_recipe(posttrain_teminal, *places, *small)
    before, after = (
        ClapModel.from_pretrained(path).state_dict() for path in (tmp_path / "clap", tmp_path / "out" / "clap")
    )
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert "audio_projection.linear1.weight" in moved
    assert "text_model.encoder.layer.1.attention.self.query.weight" in moved
    assert not [name for name in moved if "embeddings" in name]

    classify = pipeline("zero-shot-audio-classification", model=str(tmp_path / "out" / "clap"))
    assert len(classify(builders.noise(48_000), candidate_labels=["a dog", "rain"])) == 2
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "random initialisation" not in card
    assert not [path for path in (tmp_path / "out" / "clap").iterdir() if str(tmp_path).encode() in path.read_bytes()]


def test_a_used_folder_is_not_written_over(run):
    with pytest.raises(ValueError, match="--resume_from_checkpoint"):
        run_recipe(posttrain_teminal, *run[2])


def test_a_model_is_needed(esc_folder, tmp_path):
    with pytest.raises(ValueError, match="--model"):
        run_recipe(posttrain_teminal, "--data_dir", esc_folder, "--output_dir", tmp_path)


def test_only_stage_b_is_trained_if_requested(esc_folder, model_folder, tmp_path):
    words = [*in_folders(model_folder, esc_folder, tmp_path / "run"), *ONE_EPOCH, "--languages", "eng"]
    run_recipe(posttrain_teminal, *words, "--use_after", "false", "--stages", "b")
    assert list(Results.load(tmp_path / "run").scores["temporal"]["eng"]) == ["before", "stage_b"]
    assert not (tmp_path / "run" / "stage_a").exists()

    config = tmp_path / "stage.yaml"
    config.write_text(posttrain_teminal.DEFAULT_CONFIG.read_text() + "\nstage: b\n")
    for wrong in (["--stages", "c"], ["--stages", "b", "b"], ["--stage", "b"]):
        with pytest.raises(ValueError, match="stages"):
            run_recipe(posttrain_teminal, *words, *wrong)
    with pytest.raises(ValueError, match="stages"):
        run_recipe(posttrain_teminal, config)


def test_unusable_recordings_are_left_out_and_named(model_folder, tmp_path):
    folder = esc50_folder(tmp_path / "ESC-50", count=7, num_folds=2)
    for name in ("1-6-A-0", "2-105-A-1"):
        (folder / "audio" / f"{name}.wav").write_bytes(name.encode())  # equal files would be copies
    words = [*in_folders(model_folder, folder, tmp_path / "run"), *ONE_EPOCH, "--languages", "eng", "--stages", "b"]
    run_recipe(posttrain_teminal, *words, "--on_bad_audio", "skip")
    content = Results.load(tmp_path / "run").content
    assert {split: clips for split, clips in content["left_out"].items() if clips} == {
        "train": ["2-105-A-1"],
        "test": ["1-6-A-0"],
    }
    assert content["data"]["train"]["rows"] == 12  # as loaded


def test_captions_of_accumulated_batches_are_counted(esc_folder, model_folder, tmp_path):
    small = ["--max_steps", 2, "--per_device_train_batch_size", 3, "--gradient_accumulation_steps", 2]
    words = [*in_folders(model_folder, esc_folder, tmp_path / "run"), *small, "--use_cpu", "true"]
    with pytest.warns(UserWarning, match="gradient_accumulation_steps"):
        run_recipe(posttrain_teminal, *words, "--languages", "eng", "--stages", "b")
    assert Results.load(tmp_path / "run").content["training"]["captions"] == 2 * 6 * 3  # steps, pairs, items


def test_before_and_after_are_scored_on_the_same_held_out_recordings(esc_folder, model_folder, tmp_path, monkeypatch):
    """If one half of the held-out recordings selects the best epoch, all scores are for the other half."""
    scored = []
    predict = TemporalTrainer.predict

    def record(self, rows, *args, **kwargs):
        scored.append({row["source"] for row in self.eval_items.rows})
        return predict(self, rows, *args, **kwargs)

    monkeypatch.setattr(TemporalTrainer, "predict", record)
    words = [*in_folders(model_folder, esc_folder, tmp_path / "run"), *ONE_EPOCH, *BEST_EPOCH, "--languages", "eng"]
    run_recipe(posttrain_teminal, *words, "--stages", "b")
    before, after = scored
    assert before == after


def test_the_copies_of_peft_are_no_parameters_of_the_model():
    """PEFT keeps the start of a trained module as `original_module`."""
    weights = {
        "audio_model.block.weight": torch.nn.Parameter(torch.zeros(6), requires_grad=False),
        "audio_projection.modules_to_save.default.weight": torch.nn.Parameter(torch.zeros(2)),
        "audio_projection.original_module.weight": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
        "text_model.block.weight": torch.nn.Parameter(torch.zeros(4)),
    }
    counts = posttrain_teminal.count_trained(mock.Mock(named_parameters=weights.items))
    assert counts == {"text_trained": 4, "text_share": 1.0, "audio_trained": 2, "audio_share": 0.25}
