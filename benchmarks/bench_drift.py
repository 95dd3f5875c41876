"""What live drift tracking adds to a training step: the same step with and without it, in turns, in one process.

    OMP_NUM_THREADS=1 python benchmarks/bench_drift.py [--rounds 10] [--batch 24]

Random weights and inputs; a CED-mini, a BERT of four layers, 1,024 shared dimensions, InfoNCE with dynamic radii in
both directions, Adam. A run logs every `logging_steps`, 10 by default. What the tracking adds drowns in the noise of
the steps, so that its parts are timed by themselves: what every step keeps, as the difference of two objectives on
given embeddings, and the log.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from bench_step import make_batch
from rows import Row, get_device, run_script, take_turns
from torch.nn.functional import normalize
from transformers import BertConfig

from modeling_supclap import CEDConfig, SupCLAPConfig, SupCLAPModel
from modeling_supclap.training.callbacks import Averages, DriftCallback
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

LOGGING_STEPS = 10  # the default of SupCLAPTrainingArguments


def measure(rounds: int = 10, batch: int = 24) -> list[Row]:
    """What tracking adds to each step, to a step that logs, and on average, in shares of a step."""
    torch.manual_seed(0)
    device = get_device()
    audio_config = CEDConfig(embed_dim=256, depth=12, num_heads=4)
    text_config = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
    model = SupCLAPModel(SupCLAPConfig(audio_config=audio_config, text_config=text_config, projection_dim=1024)).train()
    arguments = SupCLAPTrainingArguments(output_dir="outputs/bench", svr="bi-dynamic", report_to="none")
    plain = ContrastiveModule(model, build_objective(arguments)).to(device).train()
    tracked = ContrastiveModule(model, build_objective(arguments)).to(device).train()
    averages = Averages()
    callback = DriftCallback(tracked.objective, averages)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    inputs = {name: tensor.to(device) for name, tensor in make_batch(model, batch).items()}
    audio = normalize(torch.randn(batch, 1024, device=device), dim=-1).requires_grad_()
    text = normalize(torch.randn(batch, 1, 1024, device=device), dim=-1).requires_grad_()

    def step() -> None:
        plain(**inputs).loss.backward()
        optimizer.step()
        plain.zero_grad()

    def pass_objective(module: ContrastiveModule) -> None:
        torch.autograd.grad(module.objective(audio, text, logit_scale=1 / torch.tensor(0.07))[0], (audio, text))

    def log() -> None:
        callback.on_step_end(None, None, SimpleNamespace(should_log=True))
        callback.on_log(None, SimpleNamespace(log_history=[{}]), None, logs=averages.drain())

    one_step = min(take_turns({"step": step}, rounds)["step"])
    ways = {"plain": partial(pass_objective, plain), "tracked": partial(pass_objective, tracked)}
    passes = take_turns(ways, 20 * rounds)
    kept = (min(passes["tracked"]) - min(passes["plain"])) / one_step
    logged = min(take_turns({"log": log}, 5 * rounds)["log"]) / one_step
    return [
        Row("drift", "kept by every step, in shares of a step", kept),
        Row("drift", "a log, in shares of a step", logged),
        Row("drift", f"in all, with a log every {LOGGING_STEPS} steps", kept + logged / LOGGING_STEPS),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
