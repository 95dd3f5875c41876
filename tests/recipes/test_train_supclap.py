"""The training recipe, started with accelerate: output files, and resumption after a kill."""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import soundfile
import torch
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from commands import ROOT, launch_recipe, run_recipe
from datasets import Dataset
from fake_hub import FakeHub, fake_hub
from huggingface_hub import ModelCard
from matplotlib.image import imread
from processes import Moment, run_killed, run_processes, run_python
from recordings import esc50_folder, tone_rows
from transformers import TrainerState

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts import bad_audio, load_splits
from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.datasets_scripts.overlap.trained_sources import load_trained_sources, save_trained_sources
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.datasets_scripts.schema import list_classes
from modeling_supclap.datasets_scripts.stream import RowStream
from modeling_supclap.evaluation import EmbeddingCache, Results, compare, evaluate
from modeling_supclap.recipes import posttrain_teminal, train_supclap
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.command import StoppedError
from modeling_supclap.recipes.options import DataArguments, ModelArguments, TrainedPartArguments
from modeling_supclap.recipes.train_supclap import arguments_in_use, check_splits, require_usable_audio
from modeling_supclap.training.callbacks import Averages, ThroughputCallback
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

SMOKE = "recipes/configs/smoke.yaml"


def losses(folder: Path) -> list[float]:
    """Return all losses of a run, from its last checkpoint."""
    last = max(folder.rglob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize(("jit", "step", "stops"), [(True, 3, True), (True, 5, False), (False, 3, False)])
def test_a_run_is_stopped_if_a_signal_ended_it_before_its_last_step(jit, step, stops):
    closed, resumed = [], []
    trainer = SimpleNamespace(
        args=SimpleNamespace(enable_jit_checkpoint=jit),
        state=SimpleNamespace(global_step=step, max_steps=5),
        callback_handler=SimpleNamespace(
            callbacks=[
                SimpleNamespace(),
                SimpleNamespace(training_bar=SimpleNamespace(close=lambda: closed.append(1))),
            ]
        ),
        train=lambda resume_from_checkpoint: resumed.append(resume_from_checkpoint),
    )
    with pytest.raises(StoppedError, match="--resume_from_checkpoint last") if stops else nullcontext():
        train_supclap.train(trainer, "checkpoint-3")
    assert (resumed, closed) == (["checkpoint-3"], [1])


def test_last_without_a_checkpoint_starts_a_new_run(tmp_path, capsys):
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint="last")
    assert train_supclap.find_checkpoint(args) is None
    assert f"{tmp_path} contains no checkpoint; starting a new run" in capsys.readouterr().out
    args.resume_from_checkpoint = str(tmp_path / "kept" / "checkpoint-7")
    with pytest.raises(FileNotFoundError, match="checkpoint-7 does not exist"):
        train_supclap.find_checkpoint(args)
    Path(args.resume_from_checkpoint).mkdir(parents=True)
    assert train_supclap.find_checkpoint(args) == args.resume_from_checkpoint
    args.resume_from_checkpoint = None
    assert train_supclap.find_checkpoint(args) is None
    assert capsys.readouterr().out == ""


def test_ctrl_c_before_the_first_checkpoint_advises_to_start_again(tmp_path, monkeypatch):
    def interrupt(resume_from_checkpoint):
        raise KeyboardInterrupt

    ignored = []
    monkeypatch.setattr("signal.signal", lambda *signals: ignored.append(signals))
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)), callback_handler=SimpleNamespace(callbacks=[]), train=interrupt
    )
    with pytest.raises(KeyboardInterrupt, match="no checkpoint was saved yet"):
        train_supclap.train(trainer)
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]


@pytest.mark.parametrize("sharding", ["fsdp", "deepspeed"])
def test_adapters_of_a_sharded_model_cannot_be_saved_alone(tmp_path, monkeypatch, sharding):
    monkeypatch.setattr(SupCLAPTrainingArguments, "sharding", sharding)
    options = ["--output_dir", tmp_path, "--train_last_layers", 1, "--lora_rank", 2, "--save_adapter", "true"]
    with pytest.raises(ValueError, match=f"save_adapter.*{sharding}"):
        run_recipe(train_supclap, ROOT / SMOKE, *options, "--track_language_errors", "false")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe") / "run"
    run_recipe(train_supclap, ROOT / SMOKE, "--output_dir", folder)
    return folder


@pytest.mark.process
def test_a_launched_run_prints_a_table_and_writes_a_card(tmp_path):
    folder = tmp_path / "run"
    output = launch_recipe(train_supclap, SMOKE, "--output_dir", folder)
    assert re.search("synthetic.*64 train.*64 validation.*64 test", output)
    assert "mean_recall" in output
    assert output.count("clips/s") == 8  # one line per logging step, because the output is not a terminal
    assert "%|" not in output
    table = output[output.rindex("clips/s") :]
    for line in ("retrieval eng t2a R@1", "retrieval jpn a2t R@10", "chance", "zero_shot eng run top1"):
        assert line in table
    assert re.search(r"chance 0\.\d", output)
    assert "training_curves.png" in table
    assert str(folder) in table
    assert re.search(r"training: 1 process, \d+ clips in a batch, 8 steps, (cpu|cuda), float32\n", output)
    assert re.search(rf"{folder}/_resume \(\d+\.\d MB\).*deleted$", output.strip())
    assert not list(folder.glob("checkpoint-*"))
    command = f"accelerate launch recipes/train_supclap.py {SMOKE} --output_dir run"
    assert command in ModelCard.load(folder / "README.md").text


@pytest.mark.process
def test_a_pushed_run_has_its_results_and_its_card_on_the_hub(tmp_path):
    words = [SMOKE, "--max_steps", "2", "--output_dir", tmp_path / "run"]
    words += ["--push_to_hub", "true", "--hub_model_id", "someone/run"]
    with fake_hub() as address:
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_none", "NO_PROXY": "127.0.0.1"}
        run_python(ROOT / "recipes/train_supclap.py", *words, OMP_NUM_THREADS="1", **hub)
        pushed = dict(FakeHub.files["someone/run"])
    assert {"model.safetensors", "report.html", "trained_sources.npy", "training_curves.png"} <= pushed.keys()
    assert not any("checkpoint-" in name for name in pushed)
    for name in ("results.json", "README.md"):  # the last upload, with the scores
        assert pushed[name] == (tmp_path / "run" / name).read_bytes()
    assert json.loads(pushed["results.json"])["scores"]


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "nobody/none"],
        ["--audio_encoder", "nobody/none", "--text_encoder", "."],
        ["--audio_encoder", ".", "--text_encoder", "nobody/none"],
    ],
)
def test_a_missing_model_is_named_before_the_data_is_read(tmp_path, words):
    words = [*words, "--dataset", "esc50", "--data_dir", tmp_path / "no data", "--output_dir", tmp_path / "out"]
    with pytest.raises(FileNotFoundError, match="nobody/none is neither"):
        run_recipe(train_supclap, *words)


def test_results_hold_scores_chance_and_how_they_came_about(run):
    results = Results.load(run)
    found = results.scores["retrieval"]["jpn"]["t2a"]
    assert 0 <= found["R@1"]["value"] <= found["R@5"]["value"] <= found["R@10"]["value"] <= 1
    assert found["R@1"]["chance"] == pytest.approx(1 / 64)
    assert found["R@1"]["low"] <= found["R@1"]["value"] <= found["R@1"]["high"]
    assert results.protocol["clips"] == 64
    training = results.content["training"]
    assert (training["steps"], training["arguments"]["svr"]) == (8, "bi-dynamic")
    assert 0 < training["language_errors"]["data_distribution_error"] < 2  # two languages, one at a time
    assert results.content["versions"]["transformers"]
    zero_shot = results.scores["zero_shot"]["eng"]["run"]
    assert 0 <= zero_shot["top1"]["value"] <= zero_shot["top5"]["value"] <= 1


def test_a_run_writes_the_files_of_an_evaluation(run):
    assert "<h2>Retrieval</h2>" in (run / "report.html").read_text()
    rows = load_splits("synthetic", **yaml.safe_load(Path(ROOT, SMOKE).read_text())["dataset_config"])["test"]
    trained = Results.load(run)
    options = {"positives": trained.protocol["positives"], "languages": trained.protocol["languages"]}
    evaluated = evaluate(run, rows, cache=EmbeddingCache(None), **options)
    assert evaluated.protocol["dataset_hash"] == trained.protocol["dataset_hash"]
    assert evaluated.content["model"]["fingerprint"] == trained.content["model"]["fingerprint"]
    with pytest.warns(UserWarning, match=r"\baudio\b"):
        table = compare(trained, evaluated)
    assert len(table) == 2 * 2 * 5
    assert max(abs(row["difference"]) for row in table if not row["score"].endswith("rank")) <= 1 / 64


@pytest.mark.parametrize("name", ["training_curves.png", "drift.png"])
def test_curves_are_a_picture(run, name):
    assert imread(run / name)[..., :3].std() > 0.05


def test_the_folder_is_a_model_with_its_processor(run):
    model, report = SupCLAPModel.from_pretrained(run, output_loading_info=True)
    assert not any(report.values()), report
    processor = SupCLAPProcessor.from_pretrained(run)
    assert len(processor.tokenizer) == model.config.text_config.vocab_size
    known, unheard = "a low siren at the beginning", "Ünïcode 低いサイレン"
    assert len(processor.tokenizer.tokenize(known)) == len(known.split())
    for text in (known, unheard):
        assert processor.tokenizer.decode(processor(text=text)["input_ids"][0], skip_special_tokens=True) == text


def test_a_used_folder_is_not_written_over(run):
    with pytest.raises(ValueError, match=r"checkpoint-8.*--resume_from_checkpoint"):
        run_recipe(train_supclap, ROOT / SMOKE, "--output_dir", run)


def test_other_training_data_is_refused_on_resume(run):
    words = ["--output_dir", run, "--resume_from_checkpoint", "last", "--num_train", 32]
    with pytest.raises(ValueError, match=r"checkpoint-8.*training_data\.num_train was 64 and is 32"):
        run_recipe(train_supclap, ROOT / SMOKE, *words)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_bad_recording_of_an_evaluation_ends_a_run_before_its_training(tmp_path, split):
    rows = tone_rows(tmp_path, 3)
    (tmp_path / "tone_1.wav").write_bytes(b"junk")
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    require_usable_audio({"train": rows, split: rows[::2]}, args)  # the trainer checks its own recordings
    with pytest.raises(BadAudioError, match=rf"{split}.*'clip1'"):
        require_usable_audio({split: rows}, args)


@pytest.mark.parametrize(("is_padded", "min_seconds"), [(False, 0.01), (False, 9.0), (True, 9.0)])
def test_short_recordings_of_an_evaluation_are_usable_if_they_are_padded(tmp_path, is_padded, min_seconds):
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), pad_short_clips=is_padded, use_cpu=True)
    is_refused = min_seconds > 1 and not is_padded
    with pytest.raises(BadAudioError, match="at least 9") if is_refused else nullcontext():
        require_usable_audio({"test": tone_rows(tmp_path, 2)}, args, min_seconds)


def test_runs_that_share_features_read_the_recordings_of_evaluations_once(tmp_path, monkeypatch):
    rows, names, check = tone_rows(tmp_path, 3), [], bad_audio.check_recording
    monkeypatch.setattr(bad_audio, "check_recording", lambda *args: names.append(args[1]) or check(*args))
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), feature_cache=str(tmp_path / "features"), use_cpu=True)
    for _ in range(2):
        require_usable_audio({"validation": rows[:1], "test": rows[1:]}, args)
    assert len(names) == 3
    (tmp_path / "tone_2.wav").write_bytes(b"junk")
    with pytest.raises(BadAudioError, match="'clip2'"):
        require_usable_audio({"validation": rows[:1], "test": rows[1:]}, args)


@pytest.mark.parametrize("recipe", [train_supclap, posttrain_teminal])
def test_a_run_has_its_folder_for_itself_to_the_end(recipe, tmp_path, monkeypatch):
    def refuse_a_second(*_):
        def write():
            with folder_lock(tmp_path / "run"):
                pytest.fail("a second run writes to the folder")

        with ThreadPoolExecutor() as another, pytest.raises(InUseError, match=r"\brun\b"):
            another.submit(write).result()
        seen.append(recipe)

    seen: list = []
    monkeypatch.setattr(recipe, "train_and_save", refuse_a_second)
    run_recipe(recipe, "--model", "m", "--output_dir", tmp_path / "run")
    assert seen == [recipe]
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.process
def test_a_killed_and_resumed_run_has_the_same_losses(run, tmp_path):
    folder = tmp_path / "killed"
    in_a_checkpoint = Moment("os.rename", "*/checkpoint-4")
    run_killed("recipes/train_supclap.py", SMOKE, "--output_dir", folder, moment=in_a_checkpoint)
    assert {path.name for path in folder.glob("*check*")} == {"checkpoint-2"}
    run_recipe(train_supclap, ROOT / SMOKE, "--output_dir", folder, "--resume_from_checkpoint", "last")
    assert len(losses(folder)) == 8
    assert losses(folder) == losses(run)


def test_the_time_of_a_resumed_run_includes_the_time_before():
    state, throughput = TrainerState(log_history=[{"process_seconds": 1e6}]), ThroughputCallback(Averages())
    throughput.on_train_begin(None, state, None)
    args = SimpleNamespace(metric_for_best_model="mean_recall", world_size=1)
    trainer = SimpleNamespace(state=state, args=args, throughput=throughput)
    assert train_supclap.describe_training(trainer, {}, 0.0)["process_seconds"] >= 1e6


def test_a_training_is_described_by_its_last_logs_and_mean_errors():
    log = [{"loss": 4.0, "data_distribution_error": 0.5}, {"loss": 2.0, "data_distribution_error": 1.0, "bins": {}}]
    state = TrainerState(log_history=log, best_metric=0.75, best_global_step=4, global_step=6)
    args = SimpleNamespace(metric_for_best_model="mean_recall", world_size=2)
    trainer = SimpleNamespace(state=state, args=args, throughput=SimpleNamespace(process_seconds=3.0))
    found = train_supclap.describe_training(trainer, {"svr": "none"}, time.perf_counter() - 100)
    assert 100 <= found.pop("seconds") < 200
    peak = None if not torch.cuda.is_available() else found["peak_memory_mib"]
    assert found == {
        "best_validation": {"mean_recall": 0.75}, "best_step": 4, "steps": 6, "processes": 2, "process_seconds": 3.0,
        "peak_memory_mib": peak, "last_logs": {"loss": 2.0, "data_distribution_error": 1.0},
        "language_errors": {"data_distribution_error": 0.75}, "arguments": {"svr": "none"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "audio", "text"),
    [
        ({}, {0, 1}, {0, 1}),
        ({"train_last_layers": "1"}, {1}, {1}),
        ({"train_last_layers": "all"}, {0, 1}, {0, 1}),
        ({"train_last_layers": "all", "audio_layers": "0"}, set(), {0, 1}),
        ({"train_last_layers": "0", "text_layers": "2"}, set(), {0, 1}),
        ({"audio_layers": "2"}, {0, 1}, {1}),  # one block of the other tower
    ],
)
def test_the_last_blocks_of_each_tower_are_trained(options, audio, text):
    model = builders.supclap_model()
    train_supclap.choose_parameters(TrainedPartArguments(**options), model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for tower, pattern, blocks in (("audio", r"blocks\.(\d)", audio), ("text", r"layer\.(\d)", text)):
        found = re.findall(rf"^{tower}_model\.(?:encoder\.)?{pattern}", "\n".join(trained), re.MULTILINE)
        assert set(map(int, found)) == blocks
    assert "logit_scale" in trained


def test_adapters_have_the_rank_scale_and_blocks_of_the_options(monkeypatch):
    calls = []
    monkeypatch.setattr("modeling_supclap.training.lora.add_lora", lambda model, **options: calls.append(options))
    model = builders.supclap_model(builders.supclap_config(logit_bias=-10.0))
    train_supclap.choose_parameters(TrainedPartArguments(lora_rank=2, train_temperature=False), model)
    train_supclap.choose_parameters(TrainedPartArguments(lora_rank=3, lora_alpha=1, audio_layers="all"), model)
    assert calls == [
        {"rank": 2, "alpha": 16, "audio_layers": 1, "text_layers": 1},
        {"rank": 3, "alpha": 1, "audio_layers": 2, "text_layers": 1},
    ]
    assert not model.logit_scale.requires_grad
    assert not model.logit_bias.requires_grad  # as the temperature


@pytest.mark.process
def test_several_processes_equal_one_run(tmp_path):
    config = yaml.safe_load(Path(ROOT, SMOKE).read_text())
    config["text_config"] |= dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    (tmp_path / "smoke.yaml").write_text(yaml.safe_dump(config))
    # without dropout, which differs between processes
    words = [str(tmp_path / "smoke.yaml"), "--use_cpu=true"]
    run_recipe(train_supclap, *words, "--output_dir", tmp_path / "1", "--per_device_train_batch_size", 16)
    halves = [f"--output_dir={tmp_path / '2'}", "--per_device_train_batch_size=8"]
    run_processes("recipes/train_supclap.py", *words, *halves)
    np.testing.assert_allclose(losses(tmp_path / "2"), losses(tmp_path / "1"), rtol=1e-4)
    one, two = (json.loads((tmp_path / count / "results.json").read_text()) for count in "12")
    assert two["protocol"]["clips"] == one["protocol"]["clips"] == 64
    best = [found["training"]["best_validation"] for found in (one, two)]
    assert best[1] == pytest.approx(best[0], abs=0.01)


def test_an_unknown_key_names_the_valid_one():
    with pytest.raises(ValueError, match=r"'svr_alhpa'.*svr_alpha"):
        run_recipe(train_supclap, ROOT / SMOKE, "--svr_alhpa", "2")


TINY = {
    "audio_config": {"embed_dim": 16, "depth": 1, "num_heads": 1},
    "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32},
    "projection_dim": 16,
    "per_device_train_batch_size": 4,
    "num_train_epochs": 1,
}
WORDS = [word for key, value in TINY.items() for word in (f"--{key}", json.dumps(value))]


@pytest.fixture
def sounds(tmp_path):
    """Folder of ten recordings with captions."""
    folder = tmp_path / "my sounds"
    folder.mkdir()
    lines = ["file_name,caption"]
    for number in range(10):
        tone = 0.1 * np.sin(2 * np.pi * (200 + 50 * number) * np.arange(16000) / 16000)
        soundfile.write(folder / f"Ton {number}, ö.wav", tone, 16000)
        lines.append(f'"Ton {number}, ö.wav",a tone of pitch {number}')
    (folder / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_a_folder_trains_with_default_options(sounds, tmp_path, capsys):
    words = ["--dataset", "audio_folder", "--data_dir", sounds, "--languages", "eng", *WORDS]
    run_recipe(train_supclap, *words, "--output_dir", tmp_path / "run")
    assert re.search("audio_folder.*8 train.*1 validation.*1 test", capsys.readouterr().out)
    assert set(json.loads((tmp_path / "run" / "results.json").read_text())["scores"]["retrieval"]) == {"eng"}


def test_torch_compile_compiles_the_blocks_of_the_towers(sounds, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(ContrastiveModule, "compile_blocks", lambda module, **options: calls.append(options))
    words = ["--dataset", "audio_folder", "--data_dir", sounds, "--languages", "eng", *WORDS, "--max_steps", 1]
    run_recipe(train_supclap, *words, "--torch_compile", "true", "--output_dir", tmp_path / "run")
    assert calls == [{"backend": "inductor", "mode": None}]
    assert AcceleratorState().dynamo_plugin.backend == DynamoBackend.NO  # the step is not compiled as a whole


def test_without_validation_and_test_splits_the_last_checkpoint_is_kept(sounds, tmp_path, capsys):
    whole = ["--validation_fraction", "0", "--test_fraction", "0"]
    words = ["--dataset", "audio_folder", "--data_dir", sounds, *whole, *WORDS, "--output_dir", tmp_path / "run"]
    with pytest.raises(ValueError, match="validation"):
        run_recipe(train_supclap, *words)
    run_recipe(train_supclap, *words, "--eval_strategy", "no", "--load_best_model_at_end", "false")
    assert re.search("audio_folder.*test", capsys.readouterr().out)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["scores"] == {}
    assert results["training"]["steps"] == 2
    SupCLAPModel.from_pretrained(tmp_path / "run")


def test_candidates_of_zero_shot_are_the_labels_of_all_splits():
    train = Dataset.from_dict({"labels": [["rain", "wind"], ["dog"], ["rain"]], "clip_id": ["a", "b", "c"]})
    assert list_classes({"train": train, "test": train.select([2])}) == ["dog", "rain", "wind"]
    assert list_classes({"test": train.select([2])}, {"saw"}) == ["rain", "saw"]  # of clips without a row
    assert list_classes({"test": Dataset.from_dict({"labels": [[], []]})}) is None


def test_a_class_without_a_test_clip_is_a_wrong_answer(sounds, tmp_path):
    """As in the evaluation recipe: the candidates do not depend on the clips that the split happens to have."""
    lines = ["file_name,caption,split,label"]
    for number, path in enumerate(sorted(sounds.glob("*.wav"))):
        split = "test" if number in (1, 4) else "train"
        lines.append(f'"{path.name}",sound {number},{split},{"abc"[number % 3]}')
    (sounds / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")
    words = ["--dataset", "audio_folder", "--data_dir", sounds, "--languages", "eng", *WORDS, "--eval_strategy", "no"]
    words += ["--load_best_model_at_end", "false", "--zero_shot_templates", "a {}", "--output_dir", tmp_path / "run"]
    run_recipe(train_supclap, *words)
    results = Results.load(tmp_path / "run")
    assert results.scores["zero_shot"]["eng"]["run"]["top1"]["chance"] == pytest.approx(1 / 3)
    assert results.protocol["classes"] == 3
    assert results.content["left_out"] == {}


def test_a_checkpoint_that_is_selected_on_the_test_split_is_named_so(tmp_path, capsys):
    """The validation split may be missing. The scores of the best epoch are those of the test split."""
    words = [ROOT / SMOKE, "--max_steps", "2", "--num_validation", "0", "--num_test", "24", "--use_cpu", "true"]
    words += ["--selection_split", "test", "--zero_shot_templates", "a {}", "--output_dir", tmp_path / "run"]
    run_recipe(train_supclap, *words)
    printed = capsys.readouterr().out
    assert printed.count("WARNING: the test split selects the checkpoint") == 2
    results = Results.load(tmp_path / "run")
    assert results.protocol["selected_on"] == "test"
    assert "test mean_recall" in printed
    assert "validation mean_recall" not in printed
    assert results.content["training"]["arguments"]["selection_split"] == "test"
    best = results.content["training"]["best_validation"]["mean_recall"]
    recalls = []
    for directions in results.scores["retrieval"].values():
        for direction in ("t2a", "a2t"):
            recalls += [directions[direction][f"R@{k}"]["value"] for k in (1, 5, 10)]
    assert best == pytest.approx(sum(recalls) / len(recalls))
    assert "selected on the test split" in ModelCard.load(tmp_path / "run" / "README.md").text
    assert "selected on the split test" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(ValueError, match="selection_split is 'train'"):
        DataArguments(selection_split="train")


@pytest.mark.parametrize(
    ("samples", "on_bad_audio", "message"),
    [
        (None, "error", r"\btest\b"),
        (1600, "error", r"\btest\b.*0\.1000 s"),  # shorter than the minimum of CED
        (1600, "skip", r"0\.1000 s"),  # the only test recording
    ],
)
def test_bad_test_recordings_are_an_error_before_training(
    sounds, tmp_path, monkeypatch, samples, on_bad_audio, message
):
    path = Path(load_splits("audio_folder", data_dir=str(sounds), languages=["eng"])["test"][0]["audio_path"])
    if samples is None:
        path.write_bytes(b"junk")
    else:
        soundfile.write(path, np.full(samples, 0.1), 16000)
    monkeypatch.setattr(train_supclap, "build_model", lambda *_: pytest.fail("the model was built before the check"))
    words = ["--dataset", "audio_folder", "--data_dir", sounds, "--languages", "eng", *WORDS]
    with pytest.raises(BadAudioError, match=message):
        run_recipe(train_supclap, *words, "--on_bad_audio", on_bad_audio, "--output_dir", tmp_path / "run")


def test_templates_without_labels_are_refused_before_the_run(sounds):
    splits = load_splits("audio_folder", data_dir=str(sounds), languages=["eng"])
    data_args = train_supclap.DataArguments("audio_folder", zero_shot_templates=["{}"])
    with pytest.raises(ValueError, match="zero_shot_templates"):
        check_splits(splits, data_args, SupCLAPTrainingArguments())
    check_splits(splits, train_supclap.DataArguments("audio_folder"), SupCLAPTrainingArguments())


def test_a_clip_without_a_label_is_found_without_a_loop_over_all_rows(monkeypatch):
    columns = {"clip_id": ["a", "b"], "captions": [{"eng": ["rain"]}] * 2, "labels": [["rain"], []]}
    splits = dict.fromkeys(("train", "validation", "test"), Dataset.from_dict(columns))
    data_args = train_supclap.DataArguments(zero_shot_templates=["{}"])
    monkeypatch.setattr(Dataset, "__iter__", lambda _: pytest.fail("the check reads row by row"))
    with pytest.raises(ValueError, match=r"'b'.*test.*zero_shot_templates"):
        check_splits(splits, data_args, SupCLAPTrainingArguments())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"languages": ["fra"]}, "train.*'fra'"),
        ({"languages": ["eng", "fra"], "eval_languages": ["eng"], "loss": "kcl"}, "train.*'fra'"),
        ({"languages": ["eng"], "eval_languages": ["eng", "fra"]}, "validation.*'fra'"),
    ],
)
def test_languages_without_captions_are_refused_before_the_run(sounds, options, message):
    splits = load_splits("audio_folder", data_dir=str(sounds))
    with pytest.raises(ValueError, match=message):
        check_splits(splits, train_supclap.DataArguments("audio_folder"), SupCLAPTrainingArguments(**options))


def test_a_prepared_set_is_streamed_with_the_name_of_its_origin(sounds, tmp_path):
    prepare(Request("audio_folder", {"data_dir": str(sounds), "languages": ["eng"]}), tmp_path / "set", quiet=True)
    words = ["--dataset", "prepared", "--data_dir", tmp_path / "set", "--streaming", "true", *WORDS]
    run_recipe(train_supclap, *words, "--output_dir", tmp_path / "run")
    save_trained_sources([{"source": "freesound:1"}], tmp_path / "run")
    for names in (["model"], ["audio_encoder", "text_encoder"]):
        start = [word for name in names for word in (f"--{name}", tmp_path / "run")]
        run_recipe(train_supclap, *words, *start, "--max_steps", 1, "--output_dir", tmp_path / names[0])
        assert load_trained_sources(tmp_path / names[0]).tolist() == load_trained_sources(tmp_path / "run").tolist()
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert card.data.datasets is None  # a builder, not a dataset of the Hub
    assert {result.dataset_name for result in card.data.eval_results} == {"audio_folder"}
    assert "id001" not in card.text  # YAML anchor for a list that two arguments share
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["protocol"]["origin"], results["protocol"]["dataset"]) == ("audio_folder", "prepared")

    generated = {"dataset": "synthetic", "streaming": False, "num_train": 4, "num_validation": 2, "num_test": 2}
    sets = [{"dataset": "prepared", "data_dir": str(tmp_path / "set")}, generated]
    words = ["--datasets", *map(json.dumps, sets), "--streaming", "true"]
    mixed = parse_arguments(train_supclap.OPTIONS, words)[0].load_splits()
    assert isinstance(mixed["train"], RowStream)
    for rows in mixed.values():
        assert {row["dataset"] for row in rows} == {"prepared", "synthetic"}


@pytest.mark.process
@pytest.mark.slow
def test_the_default_job_reaches_ten_times_chance_and_the_scores_in_the_readme(tmp_path, monkeypatch, capsys):
    output_dir = tmp_path / "outputs" / "synthetic"
    launch_recipe(train_supclap, "--output_dir", output_dir, timeout_seconds=1200)
    scores = json.loads((output_dir / "results.json").read_text())["scores"]["retrieval"]["eng"]
    for direction in ("t2a", "a2t"):
        assert scores[direction]["R@1"]["value"] >= 10 * scores[direction]["R@1"]["chance"]

    # The example in the README: each sound is closer to its own text, as in the printed result.
    (tmp_path / "examples").symlink_to(Path(ROOT, "examples"))
    monkeypatch.chdir(tmp_path)
    readme = Path(ROOT, "README.md").read_text(encoding="utf-8")
    example, result = re.search(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", readme, flags=re.M | re.S).groups()
    exec(example, {})
    printed, shown = (
        np.array(re.findall(r"-?\d\.\d+", text), float).reshape(2, 2) for text in (capsys.readouterr().out, result)
    )
    assert printed.argmax(axis=1).tolist() == [0, 1]
    np.testing.assert_allclose(printed, shown, atol=0.1)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif("SUPCLAP_ESC10" not in os.environ, reason="set SUPCLAP_ESC10 to a folder of ESC-10 to train on it")
def test_real_recordings_are_learned(tmp_path):
    folder = ["--data_dir", os.environ["SUPCLAP_ESC10"], "--output_dir", tmp_path / "run"]
    launch_recipe(train_supclap, "recipes/configs/esc10.yaml", *folder, timeout_seconds=1800)
    found = Results.load(tmp_path / "run").scores["zero_shot"]["eng"]["run"]["top1"]
    assert found["value"] >= 4 * found["chance"]


def test_the_card_describes_the_run(run):
    card = ModelCard.load(run / "README.md")
    assert (card.data.license, card.data.language, card.data.datasets) == ("apache-2.0", ["en", "ja"], None)
    scores = json.loads((run / "results.json").read_text())["scores"]["retrieval"]["jpn"]["a2t"]
    index = {(each.dataset_config, each.metric_name): each.metric_value for each in card.data.eval_results}
    assert index["jpn", "audio to text R@5"] == pytest.approx(scores["R@5"]["value"], abs=1e-4)
    for told in ("| CC0-1.0 | 64 |", "svr: bi-dynamic", "num_train: 64"):
        assert told in card.text


@pytest.mark.parametrize(
    ("given", "absent", "present"),
    [
        ({}, set(), {"audio_config", "vocab_size", "projection_dim"}),
        (
            {"audio_encoder": "a/b", "text_encoder": "c/d"},
            {"audio_config", "text_config", "vocab_size", "temperature"},
            {"text_pooling"},
        ),
        (
            {"audio_encoder": "a/b", "text_encoder": "c/d", "random_weights": ["text"]},
            {"audio_config", "vocab_size", "logit_bias"},
            {"text_config", "random_weights"},
        ),
        ({"model": "a/b"}, {"audio_encoder", "projection_dim", "temperature", "text_pooling"}, {"model"}),
    ],
)
def test_only_arguments_that_had_an_effect_are_recorded(given, absent, present):
    used = arguments_in_use(ModelArguments(**given)).keys()
    assert not used & absent
    assert used >= present


def mixture_config(folder):
    """Write the configuration of a short run on two generated sets; the second has no French captions."""
    sets = [
        {"dataset": "synthetic", "num_train": 24, "languages": ["eng", "fra"]},
        {"dataset": "scenes", "name": "busy", "num_train": 16, "languages": ["eng"], "repeats": 2},
    ]
    for entry in sets:
        entry |= {"num_validation": 8, "num_test": 8, "duration_seconds": 2.0}
    settings = {"base": "smoke.yaml", "datasets": sets, "zero_shot_templates": [], "track_language_errors": False}
    settings |= {"output_dir": str(folder / "run"), "languages": ["eng", "fra"], "eval_languages": ["eng", "fra"]}
    (folder / "mix.yaml").write_text(yaml.safe_dump(settings))
    return folder / "mix.yaml"


@pytest.mark.process
def test_it_trains_on_two_datasets_and_reports_each(tmp_path):
    words = ["--metric_for_best_model", "busy_mean_recall", "--num_train_epochs", "1"]
    output = run_processes("recipes/train_supclap.py", mixture_config(tmp_path), *words, count=1)
    folder = tmp_path / "run"
    assert re.search(r"synthetic\+busy: 40 train, 16 validation, 16 test clips", output)
    assert "validation busy_mean_recall" in output

    whole = Results.load(folder)
    assert whole.content["training"]["steps"] == (24 + 2 * 16) // 16
    assert whole.content["training"]["best_validation"].keys() == {"busy_mean_recall"}
    assert whole.protocol["clips"] == 16
    parts = {name: Results.load(folder / name) for name in ("synthetic", "busy")}
    assert {name: part.protocol["clips"] for name, part in parts.items()} == {"synthetic": 8, "busy": 8}
    assert {name: part.protocol["dataset"] for name, part in parts.items()} == {
        "synthetic": "synthetic",
        "busy": "scenes",
    }
    assert {name: list(part.protocol["languages"]) for name, part in parts.items()} == {
        "synthetic": ["eng", "fra"],
        "busy": ["eng"],
    }
    assert whole.protocol["dataset_config"]["busy"]["repeats"] == 2
    assert "<h2>Retrieval</h2>" in (folder / "busy" / "report.html").read_text()
    card = ModelCard.load(folder / "README.md").text
    assert "synthetic" in card
    assert "scenes" in card


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--balance_labels", "true", "--streaming", "true"], "streaming.*balance_labels"),
        (["--datasets", '{"data_dir": "A"}'], "data_dir.*'A'"),
        (["--datasets", '{"dataset": "esc50"}', '{"dataset": "esc50"}'], "esc50.*name"),
        (["--datasets", '{"dataset": "esc50", "name": "a/b"}'], "a/b"),
        (["--dataset", "esc50", "--dataset_temperature", "2"], "dataset_temperature"),
        (["--datasets", '{"dataset": "esc50"}', "--test_fold", "2"], "unknown key 'test_fold'"),
    ],
)
def test_refused_mixtures(words, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(train_supclap.OPTIONS, words, default_config=train_supclap.DEFAULT_CONFIG)


def test_datasets_of_the_command_line_are_those_of_a_file(tmp_path):
    in_file, *_ = parse_arguments(train_supclap.OPTIONS, [str(mixture_config(tmp_path))])
    sets = yaml.safe_load((tmp_path / "mix.yaml").read_text())["datasets"]
    words = ["--datasets", *map(json.dumps, sets), "--data_dir", "DATA"]
    named, model_args, *_ = parse_arguments(train_supclap.OPTIONS, words, default_config=train_supclap.DEFAULT_CONFIG)
    assert named.dataset == in_file.dataset == "synthetic+busy"
    assert named.builder_options == in_file.builder_options
    assert [part.data_dir for part in named.parts.values()] == [str(Path("DATA", name)) for name in named.parts]
    assert model_args.projection_dim == 1024  # not the value of the default configuration


def test_kcl_names_the_dataset_without_a_language(tmp_path):
    with pytest.raises(ValueError, match=r"16 train.*'busy/.*\['fra'\]"):
        run_recipe(train_supclap, mixture_config(tmp_path), "--loss", "kcl")


def test_balance_labels_draws_each_label_equally_often(tmp_path):
    esc50_folder(tmp_path / "ESC", 24, 3)
    words = ["--dataset", "esc50", "--data_dir", tmp_path / "ESC", "--test_fold", 2, "--balance_labels", "true"]
    data_args, *_ = parse_arguments(train_supclap.OPTIONS, [str(word) for word in words])
    train = data_args.load_splits()["train"]
    totals = {}
    for label, count in zip(train["labels"], train["expected_count"], strict=True):
        totals[label[0]] = totals.get(label[0], 0.0) + count
    assert totals == pytest.approx(dict.fromkeys(totals, len(train) / len(totals)))


def test_a_tokenizer_is_trained_on_evenly_spaced_rows(monkeypatch):
    monkeypatch.setattr(train_supclap, "TOKENIZER_ROWS", 2)
    rows = [{"captions": {"eng": [f"{letter * 7} {letter * 7}"]}} for letter in "abcde"]
    tokenizer = train_supclap.build_processor(ModelArguments(), rows, ["eng"]).tokenizer
    assert [len(tokenizer.tokenize(f" {letter * 7}")) == 1 for letter in "abcde"] == [True, False, False, True, False]


def test_normalisation_reads_256_evenly_spaced_clips(tmp_path, monkeypatch):
    read = []

    def read_row(row, **options):
        read.append(row["number"])
        assert (options["sampling_rate_hz"], options["max_seconds"], options["pad_short_clips"]) == (16000, 30.0, True)
        return builders.noise(4800, seed=len(read))

    monkeypatch.setattr("modeling_supclap.datasets_scripts.audio.read_row", read_row)
    rows = [{"number": number} for number in range(600)]
    args = SupCLAPTrainingArguments(str(tmp_path))
    train_supclap.fit_normalisation(builders.supclap_model().audio_model, builders.bert_processor(), rows, args)
    assert read == list(range(0, 600, 2))


@pytest.mark.process
def test_normalisation_is_the_same_with_workers(tmp_path):
    rows, processor, statistics = tone_rows(tmp_path, count=6), builders.bert_processor(), []
    for workers in (0, 2):
        encoder = builders.supclap_model().audio_model
        before = encoder.init_bn.running_mean.clone()
        args = SupCLAPTrainingArguments(str(tmp_path), dataloader_num_workers=workers)
        train_supclap.fit_normalisation(encoder, processor, rows, args)
        assert not torch.equal(encoder.init_bn.running_mean, before)
        statistics.append(torch.stack([encoder.init_bn.running_mean, encoder.init_bn.running_var]))
    assert torch.equal(*statistics)
