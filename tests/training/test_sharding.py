"""FSDP: sharded over two real processes, a step has the gradients of one process; Accelerate shards on GPUs only."""

import json
import sys
from pathlib import Path

import builders
import pytest
import torch
import torch.distributed as dist
import yaml
from processes import ROOT, assert_same_training, run_processes
from recordings import tone_rows
from torch.distributed.fsdp import fully_shard

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
    """As the configuration for Accelerate wraps it: each transformer layer, then the rest."""
    wrapped = set(CONFIG["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"].split(","))
    layers = [part for part in module.modules() if type(part).__name__ in wrapped]
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report_gradients(sys.argv[1], sys.argv[2], rank=dist.get_rank(), count=dist.get_world_size())
    leave_process_group()
