"""Measure training of the papers' full-size models on a GPU: clips per second, FLOP/s and memory.

    python benchmarks/gpu.py [--batch 24 128 512] [--steps 20]

The models are CED-base with the SONAR or LaBSE text encoder, random weights, bfloat16 autocast and fused Adam. The 10 s
clips are int16 samples in pinned memory. Spectrograms are computed on the GPU, as with `features_on_device`. The goals
are 45 % of the FLOP/s of the fastest bfloat16 square matrix product, and one epoch of AudioCaps (49,274 clips) in 25 s,
a tenth of the 248 s in the SupCLAP paper. Writes `benchmarks/results-gpu.md`.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import Row, print_rows
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel
from modeling_supclap.configuration_supclap import SONAR_TEXT_CONFIG
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import ContrastiveObjective

EPOCH_CLIPS = 49_274
SECONDS, RATE_HZ, TOKENS = 10, 16000, 20
OUTPUT = Path(__file__).parent / "results-gpu.md"


def build_module(text: str) -> ContrastiveModule:
    """Build a training module from CED-base and a text encoder ("SONAR" or "LaBSE"), with random weights."""
    audio = CEDConfig(embed_dim=768, depth=12, num_heads=12)
    config: Any = SONAR_TEXT_CONFIG if text == "SONAR" else BertConfig(vocab_size=501_153)
    model: Any = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=config, projection_dim=1024))
    return ContrastiveModule(model, ContrastiveObjective()).cuda().train()


def measure_ceiling(side: int = 8192) -> float:
    """Return the FLOP/s of a bfloat16 square matrix product, the fastest of ten runs."""
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


def measure_training(text: str, batch: int, steps: int, ceiling: float) -> list[Row]:
    """Measure one model at one batch size. Return the rows of its results table."""
    module = build_module(text)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6, fused=True)
    extractor, counts = CEDFeatureExtractor(), torch.full((batch,), SECONDS * RATE_HZ, device="cuda")
    samples = torch.randint(-9000, 9000, (batch, SECONDS * RATE_HZ), dtype=torch.int16).pin_memory()
    ids = torch.randint(5, 30000, (batch, 1, TOKENS)).pin_memory()

    def step() -> None:
        audio = extractor.on_device(samples.to("cuda", non_blocking=True), counts)
        tokens = ids.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(input_ids=tokens, attention_mask=torch.ones_like(tokens), **audio).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with FlopCounterMode(display=False) as counter:
        step()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    step_s = start.elapsed_time(end) / 1000 / steps
    achieved = counter.get_total_flops() / step_s
    row = partial(Row, f"CED-base + {text}, batch {batch}")
    return [
        row("clips per second", batch / step_s, None, "", ""),
        row("an epoch of AudioCaps", EPOCH_CLIPS * step_s / batch, None, "<= 24.8", "s"),
        row("throughput", achieved / 1e12, None, "", "TFLOP/s"),
        row("share of the fastest product", 100 * achieved / ceiling, None, ">= 45", "%"),
        row("peak memory", torch.cuda.max_memory_allocated() / 2**30, None, "", "GiB"),
    ]


def main() -> None:
    """Measure all models, and print and write the results table. Exit with an error if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[24, 128, 512])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch found no GPU, which benchmarks/gpu.py requires; run `make bench` for the benchmarks on a CPU")

    torch.manual_seed(0)
    started, rows = time.perf_counter(), []
    ceiling = measure_ceiling()
    for text in ("SONAR", "LaBSE"):
        for batch in options.batch:
            try:
                rows += measure_training(text, batch, options.steps, ceiling)
            except torch.cuda.OutOfMemoryError:
                print(f"CED-base + {text}: out of memory with a batch of {batch}")
            torch.cuda.empty_cache()

    print_rows(rows)
    lines = ["# Training on a GPU", ""]
    lines += [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s."]
    lines += ["", "| model | quantity | bound | value | met |", "|---|---|---|---:|---|"]
    for row in rows:
        lines.append(f"| {row.benchmark} | {row.what} | {row.bound} | {row.cells[3]} | {row.cells[5]} |")
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
