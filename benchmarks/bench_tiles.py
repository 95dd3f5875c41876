"""Measure how the memory of the tiled losses grows with the batch, in one process and in several.

    OMP_NUM_THREADS=1 python benchmarks/bench_tiles.py [--only kcl] [--clips 4096 32768] [--processes 1 2 4]

A tiled loss computes the similarity matrix in parts (tiles), and several processes compute different tiles. Each
measurement starts new processes for one forward and backward pass, and each process has a part of the embeddings.
Memory is the peak resident set minus the resident set before the step. The tiled loss and its gradients are compared
with the loss without tiles (float64), and the results of several processes with those of a single process (float32).
Without tiles, the loss stores several matrices of 4 N^2 bytes: 4 GiB each for 32,768 clips.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import Row, run_script
from torch import Tensor
from torch.multiprocessing import start_processes

from modeling_supclap.training.distributed import distributed_tiles, gather, leave_process_group
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

LOSSES: dict[str, dict[str, Any]] = {
    "infonce": {},
    "siglip": {"loss": "siglip"},
    "svr static": {"svr": "bi-static", "radius_init": 0.1},
    "svr dynamic": {"svr": "bi-dynamic", "radius_init": 0.1},
    "kcl": {"loss": "kcl", "languages": ["eng", "fra"]},
    "kcl, svr dynamic": {"loss": "kcl", "languages": ["eng", "fra"], "svr": "uni-dynamic", "radius_init": 0.1},
}
"""Training arguments, `{objective name: arguments}`. KCL has two languages."""


def run_step(
    process: int, name: str, clips: int, dim: int, chunk_size: int | None, world: int, folder: str, dtype: torch.dtype
) -> None:
    """Run a step in one process. Write its loss, the gradients of its embeddings and its peak bytes to a file."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=process, world_size=world)
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": "none", "output_dir": folder}
    torch.manual_seed(0)
    arguments = SupCLAPTrainingArguments(**quiet, loss_chunk_size=chunk_size, **LOSSES[name])
    objective = build_objective(arguments).to(dtype)

    texts_per_clip = len(arguments.languages)
    draw = torch.Generator().manual_seed(0)
    audio = F.normalize(torch.randn(clips, dim, generator=draw), dim=-1)
    noise = torch.randn(clips, texts_per_clip, dim, generator=draw)
    text = F.normalize(audio.unsqueeze(1) + 0.2 * noise, dim=-1)  # (N, K, d)
    rows = slice(process * clips // world, (process + 1) * clips // world)
    audio = audio[rows].to(dtype).clone().requires_grad_()
    text = text[rows].to(dtype).clone().requires_grad_()

    def step(audio: Tensor, text: Tensor) -> Tensor:
        with distributed_tiles():
            scale, bias = torch.tensor(20.0), torch.tensor(-10.0)
            loss, _ = objective(gather(audio), gather(text), scale, bias if name == "siglip" else None)
        loss.backward()
        return loss.detach()

    # Set glibc's M_MMAP_THRESHOLD, so that freed tiles return to the system, as allocations above 32 MB always do.
    ctypes.CDLL(None).mallopt(-3, 2**20)
    step(audio[:16], text[:16])  # warm-up
    audio.grad = text.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = read_memory("VmRSS")
    loss = step(audio, text)
    peak = read_memory("VmHWM") - before

    assert audio.grad is not None
    assert text.grad is not None
    gradients = audio.grad / world, text.grad / world  # the mean over the processes
    torch.save({"loss": loss, "gradients": gradients, "bytes": peak}, f"{folder}/{process}.pt")
    leave_process_group()


def read_memory(field: str) -> int:
    """Read a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def run_processes(
    name: str, clips: int, dim: int, chunk_size: int | None, world: int = 1, dtype: torch.dtype = torch.float32
) -> list[dict[str, Any]]:
    """Run one training step in several new processes, `world` in number. Return the results of each process."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_step, (name, clips, dim, chunk_size, world, folder, dtype), world, start_method="fork")
        return [torch.load(f"{folder}/{process}.pt") for process in range(world)]


def require_equal(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Assert that losses and gradients are equal up to rounding, relative to the largest entry."""
    loss_error = (parts[0]["loss"] / expected["loss"] - 1).abs().item()
    limit = 1e-9 if expected["loss"].dtype == torch.float64 else 1e-6
    assert loss_error < limit, f"losses differ by {loss_error:.1e}"

    largest = max(gradient.abs().max() for gradient in expected["gradients"])
    gradients = zip(*(part["gradients"] for part in parts), strict=True)
    for rows, gradient in zip(gradients, expected["gradients"], strict=True):
        error = ((torch.cat(rows) - gradient).abs().max() / largest).item()
        assert error < 10 * limit, f"gradients differ by {error:.1e}"


def measure(
    only: Sequence[str] = ("infonce", "svr dynamic", "kcl"),
    clips: Sequence[int] = (2048, 8192),
    processes: Sequence[int] = (1, 4),
    dim: int = 32,
    chunk: int = 512,
) -> list[Row]:
    """Measure peak memory, and its growth with the batch size, for each loss and each number of processes."""
    rows = []
    for name in only:
        plain = run_processes(name, 1024, dim, None, dtype=torch.float64)
        tiled = run_processes(name, 1024, dim, 128, dtype=torch.float64)
        require_equal(tiled, plain[0])

        alone = {}
        for count in clips:
            alone[count] = run_processes(name, count, dim, chunk)
        for world in processes:
            peaks = []
            for count in clips:
                parts = alone[count]
                if world > 1:
                    parts = run_processes(name, count, dim, chunk, world)
                    require_equal(parts, alone[count][0])
                peaks.append(max(part["bytes"] for part in parts))

            what = f"{name}, {world} process{'es' if world > 1 else ''}: memory"
            exponent = math.log(peaks[-1] / peaks[0]) / math.log(clips[-1] / clips[0])
            share = peaks[-1] / (4 * clips[-1] ** 2)
            rows.append(Row("tiles", f"{what} of a process for {clips[-1]:,} clips / one N x N matrix", share))
            rows.append(Row("tiles", f"{what} grows with N to the power", exponent, bound="<= 1.2", unit=""))
    return rows


if __name__ == "__main__":
    run_script(measure, __doc__)
