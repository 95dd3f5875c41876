"""Gathering across two gloo processes: the gradient of the global batch."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

from modeling_supclap.losses import info_nce
from modeling_supclap.training.distributed import gather, leave_process_group, world_size

EMBEDDINGS = torch.nn.functional.normalize(torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)), dim=-1)


def gradient_of_a_shared_projection(audio, text, total):
    """Return the gradient of a shared weight, averaged over `total` clips as in DistributedDataParallel."""
    weight = torch.eye(6, requires_grad=True)
    projected = gather(torch.nn.functional.normalize(audio @ weight, dim=-1))
    info_nce(projected, gather(text), logit_scale=10.0).backward()
    return weight.grad / total


def one_of_two(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    audio, text = EMBEDDINGS[:, 4 * rank : 4 * rank + 4]
    gradient = gradient_of_a_shared_projection(audio, text, total=world_size())
    dist.all_reduce(gradient)
    order = gather(torch.tensor([[rank]])).flatten().tolist()
    if rank == 0:
        with open(path, "w") as file:
            json.dump({"world_size": world_size(), "order": order, "gradient": gradient.tolist()}, file)


@pytest.mark.process
def test_two_processes_have_the_gradient_of_one(tmp_path):
    run_processes(__file__, str(tmp_path / "seen.json"))
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["world_size"] == 2
    assert seen["order"] == [0, 1]
    expected = gradient_of_a_shared_projection(*EMBEDDINGS, total=1)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(torch.tensor(seen["gradient"]), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_single_process_gathers_nothing(dtype):
    tensor = torch.ones(3, dtype=dtype)
    assert world_size() == 1
    assert gather(tensor) is tensor


if __name__ == "__main__":
    one_of_two(sys.argv[1])
    leave_process_group()
