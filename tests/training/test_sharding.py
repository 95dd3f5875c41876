"""FSDP with two processes: gradients equal those of one process, and the final save contains the whole model."""

import json
import sys
from pathlib import Path

import builders
import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType
from commands import run_recipe
from processes import ROOT, assert_same_training, run_processes
from recordings import tone_rows
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, fully_shard

from modeling_supclap import SupCLAPModel, SupCLAPTrainer
from modeling_supclap.recipes import train_supclap
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

CONFIG = yaml.safe_load((ROOT / "recipes" / "accelerate" / "fsdp.yaml").read_text())
OPTIONS = [("infonce", "bi-dynamic", None), ("siglip", "bi-static", None), ("infonce", "bi-static", 2)]


def module_of(folder, loss, svr, chunk_size):
    args = SupCLAPTrainingArguments(output_dir=str(folder), loss=loss, svr=svr, radius_init=0.1, use_cpu=True)
    torch.manual_seed(0)
    config = builders.supclap_config(logit_bias=-10.0 if loss == "siglip" else None)
    return ContrastiveModule(builders.supclap_model(config), build_objective(args), chunk_size).train()


def shard(module):
    """Shard each transformer layer, then the rest, as in the accelerate configuration."""
    layers = [part for part in module.modules() if type(part).__name__ in module._no_split_modules]
    assert len(layers) == 4
    for layer in layers:
        fully_shard(layer)
    return fully_shard(module)


def report_gradients(folder, report, rank=0, count=1):
    Path(folder, f"tones{rank}").mkdir(exist_ok=True)
    rows = IndexedRows(tone_rows(Path(folder, f"tones{rank}"), count=8))
    own = [rows[index] for index in range(rank * 8 // count, (rank + 1) * 8 // count)]
    batch = TrainingCollator(builders.bert_processor())(own)
    content = {"world_size": count}
    for loss, svr, chunk_size in OPTIONS:
        module = module_of(folder, loss, svr, chunk_size)
        module = module if count == 1 else shard(module)
        module(**batch).loss.backward()
        whole = {name: parameter.grad for name, parameter in module.named_parameters()}
        whole = {name: grad.full_tensor() if count > 1 else grad for name, grad in whole.items()}
        content[f"{loss} {svr} {chunk_size}"] = {
            name: (grad / whole_norm(whole)).tolist() for name, grad in whole.items()
        }
    if rank == 0:
        Path(report).write_text(json.dumps(content))


def whole_norm(gradients):
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


@pytest.mark.process
@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
def test_two_shards_have_the_gradients_of_one_process(tmp_path):
    report_gradients(str(tmp_path), str(tmp_path / "one.json"))
    run_processes(__file__, str(tmp_path), str(tmp_path / "two.json"))
    assert_same_training(tmp_path / "one.json", tmp_path / "two.json", 2)


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("supclap", ["BertLayer", "CEDBlock"]),
        ("sonar", ["CEDBlock", "M2M100EncoderLayer"]),
        ("converted", ["ClapAudioLayer", "ClapAudioStage", "ClapTextLayer"]),
        ("clap2", ["ModernTextBlock", "NaFlexBlock"]),
        ("cnn14", ["BertLayer", "CNN14Block"]),
        ("whisper", ["BertLayer", "WhisperEncoderLayer"]),
    ],
)
def test_the_blocks_of_every_tower_are_wrapped(kind, blocks):
    module = ContrastiveModule(builders.pair(kind)[0], torch.nn.Identity())
    assert module._no_split_modules == blocks
    assert "fsdp_transformer_layer_cls_to_wrap" not in CONFIG["fsdp_config"]


def shard_on_cpus():
    """Let accelerate treat CPU processes as GPUs, because it shards only on GPUs."""
    make = SupCLAPTrainer.create_accelerator_and_postprocess

    def make_sharded(trainer):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        make(trainer)

    SupCLAPTrainer.create_accelerator_and_postprocess = make_sharded


def fsdp_config(kind):
    return {"state_dict_type": kind, "auto_wrap_policy": CONFIG["fsdp_config"]["fsdp_auto_wrap_policy"]}


def train_sharded(folder, kind):
    """Train with checkpoints of this kind, resume, save, and report the gathered weights."""
    for resumes in (False, True):
        args = SupCLAPTrainingArguments(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=2,
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="no",
            load_best_model_at_end=False,
            report_to=[],
            svr="bi-dynamic",
            use_cpu=True,
            fsdp=True,
            fsdp_config=fsdp_config(kind),
        )
        rank = args.process_index
        Path(folder, f"tones{rank}").mkdir(exist_ok=True)
        rows = tone_rows(Path(folder, f"tones{rank}"), count=8)
        trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, processing_class=builders.bert_processor())
        trainer.train(f"{folder}/out/checkpoint-1" if resumes else None)
        sharded = [type(part).__name__ for part in trainer.module.modules() if isinstance(part, FSDPModule)]
        assert len(sharded) == 1 + 4, sharded  # the blocks of both towers, and the rest
        trainer.save_model()
        weights = {name: weight.full_tensor() for name, weight in trainer.module.model.named_parameters()}
        if rank == 0:
            torch.save(weights, f"{folder}/weights{int(resumes)}.pt")


@pytest.mark.process
@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("kind", [pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow), "SHARDED_STATE_DICT"])
def test_a_sharded_run_saves_the_whole_model_and_resumes(tmp_path, kind):
    run_processes(__file__, str(tmp_path), kind)
    first, resumed = (torch.load(tmp_path / f"weights{number}.pt") for number in (0, 1))
    torch.testing.assert_close(resumed, first, rtol=0, atol=1e-6)
    saved = dict(SupCLAPModel.from_pretrained(tmp_path / "out").named_parameters())
    torch.testing.assert_close({name: weight.data for name, weight in saved.items()}, resumed, rtol=0, atol=0)
    untrained = dict(builders.supclap_model().named_parameters())
    assert not any(torch.equal(weight, untrained[name]) for name, weight in saved.items() if "weight" in name)


@pytest.mark.process
@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("job", [pytest.param("recipe", marks=pytest.mark.slow), "recipe with adapters"])
def test_the_recipe_evaluates_a_sharded_model(tmp_path, job):
    run_processes(__file__, str(tmp_path), job)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["scores"]["retrieval"]
    assert {"README.md", "report.html", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert not any("lora" in name or "base_layer" in name for name in load_file(tmp_path / "model.safetensors"))


if __name__ == "__main__":
    folder, job = sys.argv[1:]
    if job.startswith("recipe"):
        shard_on_cpus()
        options = ["--track_language_errors", "false", "--use_cpu", "true", "--fsdp", "full_shard"]
        options += ["--fsdp_config", json.dumps(fsdp_config("SHARDED_STATE_DICT")), "--output_dir", folder]
        if "adapters" in job:
            options += ["--lora_rank", "2", "--train_last_layers", "1"]
        run_recipe(train_supclap, ROOT / "recipes" / "configs" / "smoke.yaml", *options)
    elif job.endswith("STATE_DICT"):
        shard_on_cpus()
        train_sharded(folder, job)
    else:
        dist.init_process_group("gloo")
        report_gradients(folder, job, rank=dist.get_rank(), count=dist.get_world_size())
    leave_process_group()
