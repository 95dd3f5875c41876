"""How near the towers are to what the machine can do: the share of the same run's matrix product.

    OMP_NUM_THREADS=1 python benchmarks/bench_towers.py [--layers 2]

The widths are those of CED-base and SONAR, forward and backward, on 10 s of sound and captions of 17 tokens; of the
layers a few, since all are alike. The peak is the best square product of the run in the same precision. The optimizer
is measured beside its other forms, and checkpointing beside the plain backward pass, so that defaults rest on figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rows import Row, compare, get_device, run_script, take_turns
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import M2M100Config

from modeling_supclap import CEDConfig, CEDModel, SonarTextModel

CLIPS, SECONDS, TEXTS, TOKENS = 2, 10, 24, 17
SIDE = 2048


def build_towers(layers: int, attention: str, device: torch.device) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """The two towers with few layers, and a batch for each."""
    audio_config = CEDConfig(embed_dim=768, depth=layers, num_heads=12)
    text_config = M2M100Config(
        vocab_size=4000, d_model=1024, encoder_layers=layers, encoder_ffn_dim=8192, encoder_attention_heads=16,
        encoder_layerdrop=0.0, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    for config in (audio_config, text_config):
        config._attn_implementation = attention

    frames = 100 * SECONDS + 1
    features = {"input_features": torch.randn(CLIPS, 64, frames, device=device)}
    ids = torch.randint(5, 4000, (TEXTS, TOKENS), device=device)
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    towers: dict[str, tuple[Any, dict[str, Tensor]]] = {
        "CED-base": (CEDModel(audio_config), features),
        "SONAR": (SonarTextModel(text_config), texts),
    }
    for tower, _ in towers.values():
        tower.to(device).eval()  # the batch norm of CED is frozen in training, too
    return towers


def run_both_ways(tower: nn.Module, batch: dict[str, Tensor], autocast: bool) -> None:
    """One forward and one backward pass; no gradients are there before it, as in training."""
    tower.zero_grad()
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        output = tower(**batch).pooler_output
    output.float().square().sum().backward()


def measure(rounds: int = 3, layers: int = 2) -> list[Row]:
    """Shares of the peak, attention, checkpointing, and the optimizers."""
    torch.manual_seed(0)
    device = get_device()
    squares = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(2, SIDE, SIDE, device=device).to(dtype)
        squares[dtype] = partial(torch.mm, left, right)

    rows = []
    sdpa, eager = (build_towers(layers, attention, device) for attention in ("sdpa", "eager"))
    for name, (tower, batch) in sdpa.items():
        checkpointed, _ = build_towers(layers, "sdpa", device)[name]
        checkpointed.train().activation_checkpointing_enable()
        if name == "CED-base":
            checkpointed.init_bn.eval()

        with FlopCounterMode(display=False) as counter:
            run_both_ways(tower, batch, False)
        flops = counter.get_total_flops()
        ways: dict[str, Callable[[], Any]] = {
            "float32": partial(run_both_ways, tower, batch, False),
            "bfloat16": partial(run_both_ways, tower, batch, True),
            "eager": partial(run_both_ways, *eager[name], False),
            "checkpointed": partial(run_both_ways, checkpointed, batch, False),
            "float32 product": squares[torch.float32],
            "bfloat16 product": squares[torch.bfloat16],
        }

        seconds = take_turns(ways, rounds)
        for precision, wanted in (("float32", ">= 0.85"), ("bfloat16", "")):
            # The share of the peak: operations a second of the tower in units of those of the product.
            least, median = compare(seconds, precision, f"{precision} product")
            products = flops / (2 * SIDE**3)
            what = f"{name}, {precision}: share of the product's speed"
            rows.append(Row("G11", what, products / least, products / median, wanted))

        for other, what in (
            ("eager", "attention written out / sdpa"),
            ("checkpointed", "checkpointing / none"),
            ("bfloat16", "bfloat16 autocast / float32"),
        ):
            rows.append(Row("G11", f"{name}, time of {what}", *compare(seconds, other, "float32")))

    rows += measure_optimizers(rounds, device)
    return rows


def measure_optimizers(rounds: int, device: torch.device) -> list[Row]:
    """The forms of AdamW on twenty million parameters."""
    steps: dict[str, Callable[[], Any]] = {}
    for name in ("fused", "foreach", "for-loop"):
        parameters = []
        for _ in range(20):
            parameter = nn.Parameter(torch.randn(1000, 1000, device=device))
            parameter.grad = torch.randn_like(parameter)
            parameters.append(parameter)
        form: dict[str, Any] = {"fused": name == "fused", "foreach": name == "foreach"}
        steps[name] = torch.optim.AdamW(parameters, **form).step

    seconds = take_turns(steps, rounds)
    rows = []
    for name in ("foreach", "for-loop"):
        rows.append(Row("G11", f"AdamW fused, the default, / {name}", *compare(seconds, "fused", name), "<= 1"))
    return rows


if __name__ == "__main__":
    run_script(measure, __doc__)
