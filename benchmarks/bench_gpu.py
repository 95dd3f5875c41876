"""Measure training of the papers' full-size models on a GPU, and compare it with a plain loop with the same towers.

    python benchmarks/bench_gpu.py [--steps 20]

The models are CED-base with the SONAR or LaBSE text encoder, random weights, bfloat16 autocast and fused Adam. The 10 s
clips are int16 samples in pinned memory. Spectrograms are computed on the GPU, as with `features_on_device`. The goals
are 45 % of the FLOP/s of the fastest bfloat16 square matrix product, one epoch of AudioCaps (49,274 clips) in 25 s (a
tenth of the 248 s in the SupCLAP paper), and the overheads of SVR and KCL that the papers report. `make bench-gpu`
writes `benchmarks/results-gpu.md`. Without a GPU, only the operator calls of a step are counted, with narrow towers.
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from rows import Row, run_script
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel
from modeling_supclap.configuration_supclap import SONAR_TEXT_CONFIG
from modeling_supclap.training import contrastive_module
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.grad_cache import real_lengths
from modeling_supclap.training.objectives import TemporalObjective, build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

EPOCH_CLIPS = 49_274
SECONDS, RATE_HZ = 10, 16000

OBJECTIVES: dict[str, tuple[int, int, int]] = {
    "InfoNCE": (24, 1, 1),
    "SVR": (24, 1, 1),
    "KCL of 8": (24, 1, 8),
    "TeminAL": (85, 3, 3),
}
"""Rows of a batch, clips per row and texts per row, as in the papers. TeminAL has triples, 255 pairs instead of 256."""


class PlainModule(ContrastiveModule):
    """A plain training loop: each tower runs once on the whole batch, padded to its longest row."""

    def embed(self, kind: str, batch: Any) -> torch.Tensor:
        names = set(contrastive_module._INPUTS[kind]) & batch.keys()
        given = {name: batch[name].flatten(0, 1) if kind == "text" else batch[name] for name in names}
        embeds: torch.Tensor = getattr(self.model, f"get_{kind}_features")(**given).pooler_output
        return embeds


def build_module(text: str, name: str, kind: type[ContrastiveModule], device: str) -> ContrastiveModule:
    """Build a training module with random weights: CED-base, and "SONAR" or "LaBSE". On a CPU its layers are narrow."""
    audio = CEDConfig(embed_dim=768, depth=12, num_heads=12)
    config: Any = SONAR_TEXT_CONFIG if text == "SONAR" else BertConfig(vocab_size=501_153)
    if device == "cpu":
        audio = CEDConfig(embed_dim=24, depth=12, num_heads=3)
        config = BertConfig(vocab_size=30_000, hidden_size=24, num_attention_heads=3, intermediate_size=48)
    objective: Any = TemporalObjective("b")
    if name != "TeminAL":
        options: Any = {"svr": "bi-static"} if name == "SVR" else {"loss": "kcl"} if name == "KCL of 8" else {}
        languages = ["eng", "fra", "deu", "spa", "nld", "cat", "jpn", "zho"][: OBJECTIVES[name][2]]
        args = SupCLAPTrainingArguments("outputs", report_to="none", languages=languages, **options)
        objective = build_objective(args)
    with torch.device(device):  # random weights of 850 M parameters take 14 s on a CPU
        model: Any = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=config, projection_dim=1024))
    return kind(model, objective).to(device).train()


def make_batch(rows: int, clips: int, texts: int, device: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Draw samples, int16 `(clips, samples)`, and the other inputs of a training step. Captions have 5 to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(-9000, 9000, (rows * clips, SECONDS * RATE_HZ), dtype=torch.int16, generator=generator)
    mask = torch.arange(40) < torch.randint(5, 41, (rows, texts, 1), generator=generator)
    ids = torch.randint(5, 30_000, mask.shape, generator=generator)
    inputs = {
        "input_ids": ids.to(device),
        "attention_mask": mask.long().to(device),
        "text_lengths": real_lengths(mask),
    }
    return samples, inputs


class Launches(TorchDispatchMode):
    """Count operator calls that start kernels (all except views), and calls that make the CPU wait for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not function.is_view
        self.waits += function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "_unique2")
        return function(*args, **(kwargs or {}))


def count_launches() -> list[Row]:
    """Count the operator calls in a step of our training and of a plain loop, for each objective."""
    contrastive_module._KEPT_TOKENS["cpu"] = contrastive_module._KEPT_TOKENS["cuda"]
    rows, kernels = [], {}
    for name, (count, clips, texts) in OBJECTIVES.items():
        for kind in (PlainModule, ContrastiveModule):
            module = build_module("LaBSE", name, kind, "cpu")
            samples, inputs = make_batch(count, clips, texts, "cpu")
            inputs |= CEDFeatureExtractor().on_device(samples, torch.full((len(samples),), samples.shape[1]))
            if name != "TeminAL":
                inputs["group_ids"] = torch.arange(count)
            inputs["audio_lengths"] = real_lengths(inputs["audio_attention_mask"])
            module(**inputs)  # sets the radii
            with Launches() as launches:
                module(**inputs).loss.backward()
            way = "a plain loop" if kind is PlainModule else "ours"
            kernels[name, way] = launches.kernels
            rows.append(Row(name, f"operator calls of a step, {way}", launches.kernels, None, "", ""))
            bound = "" if kind is PlainModule else "at most 2"
            rows.append(Row(name, f"waits for the GPU, {way}", launches.waits, None, bound, ""))
    added = kernels["SVR", "ours"] - kernels["InfoNCE", "ours"]
    ratio = kernels["KCL of 8", "ours"] / kernels["KCL of 8", "a plain loop"]
    rows.append(Row("SVR", "operator calls added to InfoNCE", added, None, "at most 140", ""))
    return [*rows, Row("KCL of 8", "operator calls / a plain loop's", ratio, None, "at most 1.3", "")]


def measure_ceiling(side: int = 8192) -> float:
    """Measure the FLOP/s of a product of square bfloat16 matrices. Return the best of ten runs."""
    left, right = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16)
    least = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(left, right)
        end.record()
        torch.cuda.synchronize()
        least = min(least, start.elapsed_time(end) / 1000)
    return 2 * side**3 / least


def measure_step(text: str, name: str, kind: type[ContrastiveModule], steps: int) -> dict[str, float]:
    """Measure training steps: median seconds and FLOP of a step, and peak memory in bytes."""
    module = build_module(text, name, kind, "cuda")
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6, fused=True)
    samples, inputs = make_batch(*OBJECTIVES[name], "cuda")
    extractor, counts = CEDFeatureExtractor(), torch.full((len(samples),), samples.shape[1], device="cuda")
    samples = samples.pin_memory()

    def step() -> None:
        audio = extractor.on_device(samples.to("cuda", non_blocking=True), counts)
        lengths = [audio["input_features"].shape[-1]] * len(samples)
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(**inputs, **audio, audio_lengths=lengths).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with FlopCounterMode(display=False) as counter:
        step()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    seconds = statistics.median(start.elapsed_time(end) / 1000 for start, end in pairwise(events))
    memory = torch.cuda.max_memory_allocated()
    return {"seconds": seconds, "flop": counter.get_total_flops(), "memory": memory, "clips": len(samples)}


def measure_training(text: str, steps: int, ceiling: float) -> list[Row]:
    """Measure our training and a plain loop with one text encoder, for each objective. Return the table rows."""
    rows, measured = [], {}
    for name in OBJECTIVES:
        for kind, way in ((PlainModule, "a plain loop"), (ContrastiveModule, "ours")):
            try:
                result = measured[name, way] = measure_step(text, name, kind, steps)
            except torch.cuda.OutOfMemoryError:
                print(f"CED-base + {text}, {name}, {way}: out of memory")
                continue
            finally:
                torch.cuda.empty_cache()
            row = partial(Row, f"CED-base + {text}, {name}, {way}")
            achieved, clips = result["flop"] / result["seconds"], result["clips"]
            rows.append(row("clips per second", clips / result["seconds"], None, "", ""))
            rows.append(row("throughput", achieved / 1e12, None, "", "TFLOP/s"))
            rows.append(row("peak memory", result["memory"] / 2**30, None, "", "GiB"))
            if name == "InfoNCE":
                rows.append(row("share of the fastest product", 100 * achieved / ceiling, None, "at least 45", "%"))
                epoch_s = EPOCH_CLIPS * result["seconds"] / clips
                rows.append(row("an epoch of AudioCaps", epoch_s, None, "at most 24.8", "s"))

    for way in ("a plain loop", "ours"):
        plain, svr = measured.get(("InfoNCE", way)), measured.get(("SVR", way))
        kcl = measured.get(("KCL of 8", way))
        row = partial(Row, f"CED-base + {text}, {way}")
        if plain and svr:
            added = 100 * (svr["seconds"] / plain["seconds"] - 1)
            rows.append(row("time that SVR adds to InfoNCE (SupCLAP: 1.6 %)", added, None, "at most 1.6", "%"))
        if plain and kcl:
            ratio = kcl["memory"] / plain["memory"]
            rows.append(row("memory of KCL of 8 / InfoNCE (ATRI: 3.08)", ratio, None, "at most 3.08", ""))
    return rows


def measure(steps: int = 20) -> list[Row]:
    """Measure training on a GPU. On a CPU, count the operator calls. Return the rows of the results table."""
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        return count_launches()
    ceiling = measure_ceiling()
    return [*measure_training("SONAR", steps, ceiling), *measure_training("LaBSE", steps, ceiling)]


if __name__ == "__main__":
    run_script(measure, __doc__)
