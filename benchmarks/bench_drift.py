"""What live drift tracking adds to a training step: the same step with and without it, in turns, in one process.

    OMP_NUM_THREADS=1 python benchmarks/bench_drift.py [--rounds 10] [--batch 24] [--seconds 10]

Random weights and inputs; a CED-mini, a BERT of four layers, 1,024 shared dimensions, InfoNCE with dynamic radii in
both directions, Adam. The tracked step ends with a log each time; a run logs every `logging_steps`, 10 by default. A
difference this small drowns in the noise of the steps, so that its parts are also timed by themselves: what every step
keeps, as the difference of two objectives on given embeddings, and the log.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from transformers import BertConfig

from modeling_supclap import CEDConfig, SupCLAPConfig, SupCLAPModel
from modeling_supclap.training.callbacks import Averages, DriftCallback
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

LOGGING_STEPS = 10  # the default of SupCLAPTrainingArguments
FRAMES_PER_SECOND = 100
TOKENS = 24


def build_model() -> SupCLAPModel:
    """A model of the size of CED-mini and BERT-small, which trains."""
    audio = CEDConfig(embed_dim=256, depth=12, num_heads=4)
    text = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
    return SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=1024)).train()


def random_batch(batch: int, seconds: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Features and one text for each of `batch` clips."""
    frames = round(seconds * FRAMES_PER_SECOND)
    tokens = torch.randint(5, 30000, (batch, 1, TOKENS), device=device)
    return {
        "input_features": torch.randn(batch, 64, frames, device=device),
        "audio_attention_mask": torch.ones(batch, frames, dtype=torch.long, device=device),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
    }


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Measures wall time on a GPU; on a CPU that of the process, which other programs disturb less."""
    if device.type == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(
    first: Callable[[], object], second: Callable[[], object], rounds: int, device: torch.device
) -> tuple[float, float, float]:
    """Gives medians of both and of the rounds' ratios, each round in the other order, after one to warm up."""
    firsts: list[float] = []
    seconds: list[float] = []
    ratios: list[float] = []
    for number in range(rounds + 1):
        if number % 2:
            before, after = measure_seconds(first, device), measure_seconds(second, device)
        else:
            after, before = measure_seconds(second, device), measure_seconds(first, device)

        if number > 0:
            firsts.append(before)
            seconds.append(after)
            ratios.append(after / before)
    return statistics.median(firsts), statistics.median(seconds), statistics.median(ratios)


def main() -> None:
    """Prints both medians, the median ratio, and the cost of the tracking by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model()
    arguments = SupCLAPTrainingArguments(output_dir="outputs/bench", svr="bi-dynamic", report_to="none")
    plain = ContrastiveModule(model, build_objective(arguments)).to(device).train()
    tracked = ContrastiveModule(model, build_objective(arguments)).to(device).train()
    averages = Averages()
    callback = DriftCallback(tracked.objective, averages)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    inputs = random_batch(options.batch, options.seconds, device)

    def step(module: ContrastiveModule) -> None:
        module(**inputs).loss.backward()
        optimizer.step()
        module.zero_grad()

    def log() -> Mapping[str, float]:
        callback.on_step_end(None, None, SimpleNamespace(should_log=True))
        numbers = averages.drain()
        callback.on_log(None, SimpleNamespace(log_history=[{}]), None, logs=numbers)
        return numbers

    def tracked_step() -> None:
        step(tracked)
        log()

    audio = torch.nn.functional.normalize(torch.randn(options.batch, 1024, device=device), dim=-1).requires_grad_()
    text = torch.nn.functional.normalize(torch.randn(options.batch, 1, 1024, device=device), dim=-1).requires_grad_()

    def objective_alone(module: ContrastiveModule) -> None:
        torch.autograd.grad(module.objective(audio, text, logit_scale=1 / torch.tensor(0.07))[0], (audio, text))

    plain_step_s, tracked_step_s, ratio = in_turns(lambda: step(plain), tracked_step, options.rounds, device)
    losses = in_turns(lambda: objective_alone(plain), lambda: objective_alone(tracked), 200, device)
    kept_s, log_s = losses[1] - losses[0], in_turns(log, log, 50, device)[0]
    print(f"{device}, {torch.get_num_threads()} threads, batch {options.batch}, {options.rounds} rounds")
    print(f"step without tracking   {1e3 * plain_step_s:9.3f} ms (median)")
    print(f"step with a log each    {1e3 * tracked_step_s:9.3f} ms (median), median ratio {ratio:.4f}")
    print(f"kept by every step      {1e3 * kept_s:9.3f} ms, {kept_s / plain_step_s:.3%} of a step")
    print(f"one log                 {1e3 * log_s:9.3f} ms, {log_s / plain_step_s:.3%} of a step")
    print(f"in all, a log every {LOGGING_STEPS} steps: {(kept_s + log_s / LOGGING_STEPS) / plain_step_s:.3%} of a step")


if __name__ == "__main__":
    main()
