"""Recorded facts of a run, without private data."""

import json
import subprocess
import sys
from pathlib import Path

import builders
import pytest
import torch
from datasets import Dataset
from recordings import tone_rows

from modeling_supclap.evaluation.results import SCHEMA
from modeling_supclap.model_card import facts as card_facts
from modeling_supclap.model_card.facts import code_commit, count_licenses, facts_of_run, public_command, read_results
from modeling_supclap.training.trainer import SupCLAPTrainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trainer(tmp_path):
    rows = [{**row, "license": "CC0-1.0" if index else ""} for index, row in enumerate(tone_rows(tmp_path, count=8))]
    told = {"languages": ["eng", "fra"], "svr": "bi-static", "learning_rate": 1e-3, "seed": 7}
    args = builders.training_args(tmp_path / "my-run", hub_token="secret", **told)
    model, processor = builders.pair()
    return SupCLAPTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=processor)


def test_facts_of_a_trainer(trainer, tmp_path):
    facts = facts_of_run(trainer)
    assert (facts.name, facts.repository, facts.sampling_rate_hz) == ("my-run", None, 16000)
    assert facts.languages == ["eng", "fra"]
    assert (facts.clips, facts.licenses) == (8, {"CC0-1.0": 7, "not stated": 1})
    assert (facts.processes, facts.device, facts.threads) == (1, "cpu", torch.get_num_threads())
    told = facts.arguments
    assert {name: told[name] for name in ("loss", "svr", "learning_rate", "seed")} == {
        "loss": "infonce", "svr": "bi-static", "learning_rate": 1e-3, "seed": 7,
    }  # fmt: skip
    trainer.args.dataloader_drop_last = trainer.args.track_drift = False  # their defaults are True and None
    trainer.args.optim_target_modules = []
    assert facts_of_run(trainer).arguments == {**told, "dataloader_drop_last": False}
    trainer.args.hub_model_id = "someone/trained"
    named = facts_of_run(trainer)
    assert (named.name, named.repository) == ("trained", "someone/trained")
    text = json.dumps(dict(told))
    assert "secret" not in text
    assert str(tmp_path) not in text
    defaults = {
        "radius_init",
        "adam_beta1",
        "weight_decay",
        "accelerator_config",
        "output_dir",
        "report_to",
        "hub_token",
    }
    assert not defaults & told.keys()


def test_facts_are_the_values_that_were_used(trainer):
    """The user's own optimizer and schedule replace those of the arguments."""
    optimizer = torch.optim.SGD(trainer.module.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = SupCLAPTrainer(
        trainer.clap,
        trainer.args,
        trainer.train_rows,
        processing_class=trainer.processor,
        optimizers=(optimizer, schedule),
    )
    own._train_batch_size = 4  # as `auto_find_batch_size` does
    told = facts_of_run(own).arguments
    assert (told["optim"], told["learning_rate"], told["lr_scheduler_type"]) == ("SGD", 0.5, "StepLR")
    assert told["weight_decay"] == 0.1
    assert told["per_device_train_batch_size"] == 4


def test_facts_recorded_by_a_recipe(trainer, tmp_path):
    folder = tmp_path / "my-run"
    (folder / "clotho").mkdir(parents=True)
    (folder / "stage_a").mkdir()
    recorded = {"dataset": "esc50", "data_dir": "/home/me/ESC-50", "text_encoder": "/home/me/LaBSE", "lora_rank": None}
    recorded |= {"suite": [], "dataset_config": {}}
    own = {"schema": SCHEMA, "protocol": {}, "scores": {}, "training": {"arguments": recorded}}
    (folder / "results.json").write_text(json.dumps(own))
    (folder / "clotho" / "results.json").write_text(json.dumps({"schema": SCHEMA}))
    (folder / "stage_a" / "results.json").write_text('{"test": {}}')
    for name in ("wavcaps", "audiocaps"):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(json.dumps({"schema": SCHEMA, "name": name}))
    (folder / "a").mkdir()
    (folder / "a" / "results.json").write_text("[1]")
    facts = facts_of_run(trainer)
    assert facts.dataset == ["esc50"]
    assert facts_of_run(trainer, []).results == facts_of_run(trainer, []).dataset == []
    of_two = {**own, "protocol": {"origin": "esc50+user/sounds"}}
    assert facts_of_run(trainer, [of_two]).dataset == ["esc50", "user/sounds"]
    assert facts.arguments["text_encoder"] == "LaBSE"
    assert not {"data_dir", "lora_rank", "suite", "dataset_config"} & facts.arguments.keys()
    of_others = [{"schema": SCHEMA, "name": name} for name in ("audiocaps", "wavcaps")]
    assert facts.results == [own, of_others[0], {"schema": SCHEMA}, of_others[1]]


def test_a_post_training_has_no_regulariser_and_no_loss_of_the_options(trainer, tmp_path):
    scores = {"temporal": {"eng": {"before": {}, "stage_a": {}, "stage_b": {}}}}
    own = {"schema": SCHEMA, "protocol": {}, "scores": scores, "training": {"arguments": {"stage": "a"}}}
    assert "svr" in facts_of_run(trainer).arguments
    (tmp_path / "my-run").mkdir(exist_ok=True)
    (tmp_path / "my-run" / "results.json").write_text(json.dumps(own))
    arguments = facts_of_run(trainer).arguments
    assert arguments["stage"] == "a, then b"
    assert not {"svr", "loss"} & arguments.keys()


def test_a_folder_without_results(tmp_path):
    assert read_results(tmp_path) == []


@pytest.mark.parametrize("make", [Dataset.from_list, list])
def test_licenses_are_counted(make):
    rows = [{"license": license} for license in ("CC-BY", "CC0", "", "CC-BY")]
    assert list(count_licenses(make(rows)).items()) == [("CC-BY", 2), ("CC0", 1), ("not stated", 1)]
    assert count_licenses([{"clip_id": "pair 0"}]) == {"not stated": 1}
    assert count_licenses(None) == count_licenses([]) == {}
    assert count_licenses([{"license": None}, {}, {"license": "CC0"}]) == {"CC0": 1, "not stated": 2}

    class Stream(list):
        licenses = {"CC0": 1, "": 3, "not stated": 2}  # noqa: RUF012

    assert count_licenses(Stream("abc")) == {"not stated": 5, "CC0": 1}


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["recipes/train_supclap.py"], {}, "python recipes/train_supclap.py"),
        ([str(ROOT / "recipes/x.py"), "a"], {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch recipes/x.py a"),
        (
            ["/home/me/train.py", "--data_dir=/data/ESC 50", "--output_dir", "/data/run"],
            {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --nproc_per_node 2 train.py '--data_dir=ESC 50' --output_dir run",
        ),
        (["recipes/x.py", "--hub_token", "hf_x", "--seed=1", "--hub-token=hf_y"], {}, "python recipes/x.py --seed=1"),
        (["recipes/x.py", "--resume_from_checkpoint", "last", "--svr", "none"], {}, "python recipes/x.py --svr none"),
        (
            ["recipes/x.py", "--dataset_config", '{"data_dir": "~/ESC", "num": 1}', "--out", "../run"],
            {},
            "python recipes/x.py --dataset_config '{\"data_dir\": \"ESC\", \"num\": 1}' --out run",
        ),
        (
            ["supclap train", "my.yaml", "--hub_token", "hf_x", "--resume_from_checkpoint", "last"],
            {"SUPCLAP_COMMAND": "supclap train"},
            "supclap train my.yaml",
        ),
        (["supclap train"], {"SUPCLAP_COMMAND": "supclap train"}, "supclap train"),
        (["train.py"], {"TORCHELASTIC_RUN_ID": "1"}, "torchrun --nproc_per_node 1 train.py"),
        (["/lib/site-packages/ipykernel_launcher.py"], {}, ""),
        (["pytest", "tests"], {}, ""),
        ([], {}, ""),
    ],
)  # fmt: skip
def test_the_command_without_the_folders_of_this_machine(monkeypatch, arguments, environment, expected):
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "SUPCLAP_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    assert public_command(arguments) == expected


@pytest.mark.process
def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(card_facts, "_ROOT", tmp_path)
    assert code_commit() == ""
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "code.py").write_text("")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit = code_commit()
    assert len(commit) == 40
    (tmp_path / "recordings").write_text("not code")
    assert code_commit() == commit
    (tmp_path / "code.py").write_text("changed")
    assert code_commit() == f"{commit} with local changes"
    (tmp_path / ".git" / "HEAD").write_text("damaged")
    assert code_commit() == ""
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert code_commit() == ""


def test_the_packages_of_a_run_are_those_that_it_wrote_down():
    assert card_facts.versions_of([{}, {"versions": {"torch": "1.0"}}]) == {"torch": "1.0"}
    assert card_facts.versions_of([{"versions": {}}]) == card_facts.versions_of([])
    assert card_facts.versions_of([])["torch"] == sys.modules["torch"].__version__.split("+")[0]
