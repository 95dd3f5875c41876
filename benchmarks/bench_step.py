"""Measure the time and memory of a training step, relative to plain PyTorch and a step with one text per clip.

    OMP_NUM_THREADS=1 python benchmarks/bench_step.py [--only KCL] [--rounds 3] [--clips 24] [--width 96]

The plain step calls the text tower once per language, padded to the longest text of the language. The steps alternate
in one process with the same weights. Before timing, their gradients are compared (float64, to 1e-12). Memory is the
peak size of the tensors created in a step. On a GPU, it is the peak of the CUDA allocator.

The towers are like CED-mini and SONAR, but narrower. Captions have the lengths of AudioCaps in tokens (mean 17, at most
about 50), times a factor per language. Weights, features and tokens are random.
"""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from rows import Row, compare, get_device, run_script, take_turns
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import M2M100Config

from modeling_supclap import CEDConfig, SupCLAPConfig, SupCLAPModel
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.kept import KeptValues, content_keys
from modeling_supclap.training.objectives import ContrastiveObjective, TemporalObjective

LANGUAGE_LENGTHS = (1.0, 1.23, 1.18, 1.15, 1.14, 1.24, 1.08, 0.90)
"""Caption length in tokens for each of the eight languages, relative to English."""

Batch = dict[str, Tensor]


class PlainModule(ContrastiveModule):
    """Training step that calls the text tower once per language, padded to the longest text of the language."""

    def embed(self, kind: str, batch: Mapping[str, Any]) -> Tensor:
        if kind == "audio":
            return self.model.get_audio_features(batch["input_features"], batch["audio_attention_mask"]).pooler_output

        count = len(batch["input_ids"])
        inputs = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        lengths = inputs["attention_mask"].sum(dim=1)
        order = torch.arange(len(lengths)).view(count, -1).T.flatten()
        parts = []
        for rows in order.split(count):
            length = int(lengths[rows].max())
            chunk = {name: tensor[rows, :length] for name, tensor in inputs.items()}
            parts.append(self.model.get_text_features(**chunk).pooler_output)
        return torch.cat(parts)[order.argsort()]


class PeakBytes(TorchDispatchMode):
    """Context manager that measures the peak bytes of all tensors created inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = set(map(Tensor.untyped_storage, filter(_is_dense, tree_leaves((args, kwargs)))))

        for leaf in filter(_is_dense, tree_leaves(results)):
            storage = leaf.untyped_storage()
            if storage not in known and storage not in self._alive:
                self._alive.add(storage)
                weakref.finalize(storage, self._forget, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return results

    def _forget(self, size: int) -> None:
        self.now -= size


def _is_dense(leaf: Any) -> bool:
    # a sparse tensor stores its values in another tensor
    return torch.is_tensor(leaf) and not leaf.is_sparse


def build_model(width: int, vocabulary: int) -> SupCLAPModel:
    """Build a model with six audio and twelve text layers, in the proportions of CED-base and SONAR."""
    audio = CEDConfig(embed_dim=width, depth=6, num_heads=width // 64)
    text = M2M100Config(
        vocab_size=vocabulary, d_model=width // 3 * 4, encoder_layers=12, encoder_ffn_dim=width // 3 * 32,
        encoder_attention_heads=width // 48, encoder_layerdrop=0.0, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=256)).train()


def make_batch(model: SupCLAPModel, clips: int, texts: int = 1, roles: int = 1) -> Batch:
    """Create a batch of random features and captions in `texts` languages.

    Clips last 10 s. If `roles` is 3, as in TeminAL, the clips of the roles last 10, 10 and 5 s.
    """
    draw = torch.Generator().manual_seed(0)
    frames = torch.tensor([1001] if roles == 1 else [1001, 1001, 501]).repeat(clips)
    audio_mask = torch.arange(1001) < frames.unsqueeze(1)  # (N R, T)

    # The captions of the first role are those of a batch with one role, because the memory of both batches is compared.
    factors = torch.tensor(LANGUAGE_LENGTHS[:texts] if roles == 1 else LANGUAGE_LENGTHS[:1])
    by_role = []
    for _ in range(roles):
        english = torch.empty(clips, 1).log_normal_(2.72, 0.45, generator=draw)
        noise = 1 + 0.12 * torch.randn(clips, len(factors), generator=draw)
        by_role.append((english * factors * noise).round().clamp(4, 64))
    lengths = torch.cat(by_role, dim=1)  # (N, K)
    text_mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)  # (N, K, L)

    config: Any = model.config.text_config
    ids = torch.randint(5, config.vocab_size, text_mask.shape, generator=draw)
    return {
        "input_features": (20 * torch.randn(len(frames), 64, 1001, generator=draw) - 40) * audio_mask.unsqueeze(1),
        "audio_attention_mask": audio_mask.long(),
        "input_ids": ids.masked_fill(~text_mask, config.pad_token_id),
        "attention_mask": text_mask.long(),
    }


def run_step(module: nn.Module, batch: Batch) -> None:
    """Zero the gradients in place, then run one forward and one backward pass."""
    module.zero_grad(set_to_none=False)
    module(**batch).loss.backward()


def measure_bytes(module: nn.Module, batch: Batch) -> int:
    """Return the peak bytes of a step, excluding weights, gradients and inputs."""
    if batch["input_ids"].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_step(module, batch)
        return torch.cuda.max_memory_allocated() - before
    with PeakBytes() as memory:
        run_step(module, batch)
    return memory.peak


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a device."""
    moved = {}
    for name, tensor in batch.items():
        moved[name] = tensor.to(device)
    return moved


def require_equal_gradients(plain: nn.Module, ours: nn.Module, batch: Batch) -> None:
    """Assert that the gradients of both modules agree in float64, to a relative difference of 1e-12."""
    plain, ours = copy.deepcopy(plain).double(), copy.deepcopy(ours).double()
    exact = dict(batch)
    for name, tensor in batch.items():
        if tensor.is_floating_point():
            exact[name] = tensor.double()
    run_step(plain, exact)
    run_step(ours, exact)

    for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        if expected.grad is not None and parameter.grad is not None and expected.grad.norm() > 1e-9:
            difference = ((parameter.grad - expected.grad).norm() / expected.grad.norm()).item()
            assert difference < 1e-12, f"gradients differ by {difference:.1e}"


def measure(rounds: int = 3, clips: int = 24, width: int = 96, vocabulary: int = 8000, only: str = "") -> list[Row]:
    """Run the benchmarks of all objectives. Return the rows of their results table."""
    torch.manual_seed(0)
    device = get_device()
    model: Any = build_model(width, vocabulary)
    model.to(device)
    cases: list[tuple[str, Any, dict[str, int], str, str]] = [
        ("InfoNCE", ContrastiveObjective("infonce"), {}, "", ""),
        ("CACL", ContrastiveObjective("cacl"), {"texts": 2}, "", "at most 1"),
        ("KCL of 8", ContrastiveObjective("kcl"), {"texts": 8}, "at most 0.75", "at most 1"),
        ("TeminAL triples", TemporalObjective("b"), {"roles": 3}, "at most 1.1", "at most 1"),
    ]
    rows = []
    one_text = 0
    for name, objective, shape, time_bound, memory_bound in cases:
        if name != "InfoNCE" and not name.startswith(only):
            continue
        batch = on_device(make_batch(model, clips, **shape), device)
        steps = {"ours": ContrastiveModule(model, objective), "plain": PlainModule(model, objective)}
        few = {key: tensor[: 4 * len(tensor) // clips] for key, tensor in batch.items()}
        require_equal_gradients(steps["plain"], steps["ours"], few)

        run_step(steps["plain"], batch)  # creates the gradients
        size, runs = {}, {}
        for key, step in steps.items():
            size[key] = measure_bytes(step, batch)
            runs[key] = partial(run_step, step, batch)
        one_text = one_text or size["plain"]
        ratio = compare(take_turns(runs, rounds), "ours", "plain")
        rows.append(Row("step", f"{name}: time of a step / a plain step", *ratio, time_bound))
        for key, step_bytes in size.items():
            bound = memory_bound if key == "ours" else ""
            memory = step_bytes / one_text
            rows.append(Row("step", f"{name}, {key}: memory of a step / a step with one text", memory, None, bound))
    if "frozen".startswith(only):
        rows += compare_frozen(model, rounds, clips, device)
    return rows


def compare_frozen(model: Any, rounds: int, clips: int, device: torch.device) -> list[Row]:
    """Time KCL with eight languages and a frozen text tower, relative to the audio tower alone.

    The times include the backward pass. One variant reads the text embeddings from a cache; the other computes them in
    each step.
    """
    model.text_model.requires_grad_(False)
    batch = on_device(make_batch(model, clips, texts=8), device)
    objective = ContrastiveObjective("kcl")
    folder = tempfile.mkdtemp()
    cached = ContrastiveModule(model, objective, kept=KeptValues(folder, is_temporary=True))
    plain = ContrastiveModule(model, objective)
    tower = cached.get_tower("text").state_dict()
    cached.kept.set_tower("text", cached.get_version("text"), tower)
    texts = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
    keyed: dict[str, Any] = {**batch, "text_keys": content_keys(texts, "attention_mask")}

    def pass_audio() -> None:
        model.zero_grad(set_to_none=False)
        model.get_audio_features(batch["input_features"], batch["audio_attention_mask"]).pooler_output.sum().backward()

    ways: dict[str, Callable[[], Any]] = {"audio": pass_audio}
    ways |= {"cached": partial(run_step, cached, keyed), "plain": partial(run_step, plain, batch)}
    seconds = take_turns(ways, rounds)
    remembered, again = compare(seconds, "cached", "audio"), compare(seconds, "plain", "audio")
    return [
        Row("frozen", "KCL of 8, texts cached / the audio pass", *remembered, "at most 1.1"),
        Row("frozen", "the same, texts embedded each time", *again),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
