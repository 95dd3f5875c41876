"""Gradient caching: the gradients of a large batch with the memory of a small one, in all training modes."""

import copy
import random
import weakref

import builders
import numpy as np
import pytest
import torch
from recordings import tone_rows
from test_trainer import QUICK, arguments, build, losses
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_supclap.losses import info_nce
from modeling_supclap.training import contrastive_module
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.grad_cache import embed_in_chunks, real_lengths
from modeling_supclap.training.objectives import MatryoshkaObjective, build_objective

CLIPS = 7


class AllTexts(nn.Module):
    """Objective for several texts per clip: InfoNCE for each of the K texts, weighted by its own parameters."""

    def __init__(self, count):
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, count))

    def forward(self, audio_embeds, text_embeds, logit_scale, logit_bias=None, group_ids=None):
        terms = [info_nce(audio_embeds, texts, logit_scale, group_ids) for texts in text_embeds.unbind(1)]
        total = (self.weights * torch.stack(terms)).sum()
        return total, {"loss_all_texts": total.detach()}


class Straight(ContrastiveModule):
    """Plain step: each tower is called once, on the whole batch padded to its longest row."""

    def embed(self, kind, batch):
        names = set(contrastive_module._INPUTS[kind]) & batch.keys()
        inputs = {name: batch[name].flatten(0, 1) if kind == "text" else batch[name] for name in names}
        return getattr(self.model, f"get_{kind}_features")(**inputs).pooler_output


def batch(clips=CLIPS, texts_per_clip=1, frames=80, tokens=9):
    """Return a batch of clips and texts of several lengths, in the format of the collator."""
    draw = torch.Generator().manual_seed(3)
    audio_mask = torch.arange(frames) < torch.randint(20, frames + 1, (clips, 1), generator=draw)
    lengths = torch.randint(3, tokens + 1, (clips, texts_per_clip, 1), generator=draw)
    text_mask = torch.arange(tokens) < lengths
    return {
        "input_features": 20 * torch.randn(clips, 64, frames, generator=draw) - 40,
        "audio_attention_mask": audio_mask.long(),
        "input_ids": torch.randint(5, 200, text_mask.shape, generator=draw) * text_mask,
        "attention_mask": text_mask.long(),
    }


def double(inputs):
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def model_with_dropout(rate=0.2):
    audio = builders.ced_config(drop_rate=rate, attn_drop_rate=rate, drop_path_rate=rate)
    text = builders.bert_config(hidden_dropout_prob=rate, attention_probs_dropout_prob=rate)
    return builders.supclap_model(builders.supclap_config(text, audio))


def step(module, inputs, seed=0):
    """Return the loss, the logs and all gradients of one training step."""
    module.train().zero_grad()
    torch.manual_seed(seed)
    outputs = module(**inputs)
    outputs.loss.backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def difference(gradients, expected):
    """Return the largest relative difference of the gradients, except of key biases, which are only noise."""
    assert gradients.keys() == expected.keys()
    return max(
        ((gradients[name] - expected[name]).norm() / (expected[name].norm() + 1e-4)).item() for name in expected
    )


# ---- gradients of the whole batch ----


@pytest.mark.parametrize(("groups", "chunk_size"), [(None, 3), ([0, 1, 0, 2, 2, 3, 4], None)])
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "infonce"},
        {"loss": "reweighted"},
        {"loss": "siglip"},
        {"svr": "bi-static"},
        {"svr": "bi-dynamic", "svr_decoupled": True},
        {"loss": "siglip", "svr": "uni-dynamic"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_gradients_are_those_of_the_whole_batch(tmp_path, options, groups, chunk_size):
    bias = {"logit_bias": -2.0} if options.get("loss") == "siglip" else {}
    model = builders.supclap_model(builders.supclap_config(**bias))
    objective = build_objective(arguments(tmp_path, radius_num_similarities=4, **options))
    for parameter in objective.parameters():
        # some layers of a new radius predictor have no gradient
        parameter.data += 0.3 * torch.randn(parameter.shape)
    plain = Straight(model, objective).double()
    cached = ContrastiveModule(copy.deepcopy(model), copy.deepcopy(objective), chunk_size)
    inputs = double(batch()) | ({} if groups is None else {"group_ids": torch.tensor(groups)})

    (expected, wanted), (outputs, gradients) = step(plain, inputs), step(cached, inputs)
    assert [
        name for name, gradient in wanted.items() if gradient.norm() < 1e-4 and not name.endswith("key.bias")
    ] == []
    assert difference(gradients, wanted) < 1e-12
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-13)
    assert outputs.logs.keys() == expected.logs.keys()
    for name, value in expected.logs.items():
        assert outputs.logs[name].item() == pytest.approx(value.item(), rel=1e-12), name


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_negatives_and_nested_widths_have_exact_gradients(tmp_path, model, chunk_size):
    inputs = {**batch(texts_per_clip=3), "negative_mask": torch.ones(CLIPS, 2, dtype=torch.bool)}
    inputs["negative_mask"][1:3, 1] = False
    found = []
    for kind, size in ((Straight, None), (ContrastiveModule, chunk_size)):
        objective = MatryoshkaObjective(build_objective(arguments(tmp_path, svr="bi-static", radius_init=0.1)), [3])
        module = kind(copy.deepcopy(model), objective, size).train()
        module.double()(**double(inputs)).loss.backward()
        found.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("chunk_size", [4, CLIPS, None])
def test_several_texts_a_clip_are_cut_by_texts(model, chunk_size):
    plain = Straight(model, AllTexts(3)).double()
    cached = ContrastiveModule(copy.deepcopy(model), copy.deepcopy(plain.objective), chunk_size)
    inputs = double(batch(texts_per_clip=3))
    (expected, wanted), (outputs, gradients) = step(plain, inputs), step(cached, inputs)
    assert outputs.text_embeds.shape == (CLIPS, 3, 16)
    torch.testing.assert_close(outputs.text_embeds, expected.text_embeds, atol=1e-12, rtol=0)
    assert difference(gradients, wanted) < 1e-12
    assert gradients["objective.weights"].min() > 1


def test_gradients_within_the_limits_of_a_gpu(model, monkeypatch):
    """Chunks are limited by tokens and frames: three captions per clip need several chunks, recomputed."""
    inputs = double(batch(texts_per_clip=3))
    widths = []
    _, wanted = step(Straight(model, AllTexts(3)).double(), inputs)
    for limit, chunks in ((16384, 1), (1, 3)):
        monkeypatch.setitem(contrastive_module._KEPT_TOKENS, "cpu", limit)
        module = ContrastiveModule(model, AllTexts(3)).double()
        hook = model.text_model.register_forward_pre_hook(
            lambda tower, args, rows: widths.append(len(rows["input_ids"])), with_kwargs=True
        )
        _, gradients = step(module, inputs)
        hook.remove()
        assert difference(gradients, wanted) < 1e-12
        assert len(widths) >= chunks
        assert (widths == [3 * CLIPS]) == (chunks == 1)
        widths.clear()


def test_kept_tokens_trade_memory_for_time(model):
    """With enough tokens each chunk is embedded once, with too few twice."""
    inputs = double(batch(texts_per_clip=3, tokens=60))
    _, wanted = step(Straight(model, AllTexts(3)).double(), inputs)
    calls = {}
    for kept_tokens in (10**6, 1):
        widths = calls[kept_tokens] = []
        hook = model.text_model.register_forward_pre_hook(
            lambda tower, args, rows, widths=widths: widths.append(len(rows["input_ids"])), with_kwargs=True
        )
        module = ContrastiveModule(model, AllTexts(3), kept_tokens=kept_tokens).double()
        _, gradients = step(module, inputs)
        hook.remove()
        assert difference(gradients, wanted) < 1e-12
    assert sum(calls[10**6]) == 3 * CLIPS
    assert len(calls[1]) == 2 * len(calls[10**6]) > 2


@pytest.mark.parametrize("chunk_size", [2, None])
def test_with_a_sonar_text_tower(sonar_model, chunk_size):
    inputs = double(batch(texts_per_clip=3, tokens=30))
    inputs["input_ids"] = inputs["input_ids"] + (1 - inputs["attention_mask"])  # the padding id is 1
    _, wanted = step(Straight(sonar_model, AllTexts(3)).double(), inputs)
    _, gradients = step(ContrastiveModule(sonar_model, AllTexts(3), chunk_size).double(), inputs)
    assert wanted["model.text_model.embed_tokens.weight"].norm() > 0.1
    assert difference(gradients, wanted) < 1e-12


def test_rows_of_several_clips_of_unequal_length(model):
    """As in TeminAL: the padding of a clip has no effect, and the chunks drop it."""

    class FirstClip(AllTexts):
        def forward(self, audio_embeds, text_embeds, *others, **named):
            audio = nn.functional.normalize(audio_embeds.mean(dim=1), dim=-1)
            loss, logs = super().forward(audio, text_embeds, *others, **named)
            return loss, logs

    inputs = double(batch(clips=3 * CLIPS, frames=400))
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name].reshape(CLIPS, 3, -1)
    _, wanted = step(Straight(model, FirstClip(3)).double(), inputs)
    _, gradients = step(ContrastiveModule(model, FirstClip(3)).double(), inputs)
    assert difference(gradients, wanted) < 1e-12


@pytest.mark.parametrize("padding", [None, 0, 1, 5])
@pytest.mark.parametrize("has_parameters", [False, True])
def test_the_table_of_token_embeddings_gets_one_gradient(padding, has_parameters):
    tokens = nn.Embedding(50, 4, padding_idx=padding).double()
    ids = torch.tensor([[3, 9, 5], [1, 0, 0], [9, 7, 1], [0, 5, 30]])
    weights = torch.linspace(-1, 1, ids.numel() * 4, dtype=torch.float64).view(4, 3, 4)
    (tokens(ids) * weights).sum().backward()
    wanted, tokens.weight.grad = tokens.weight.grad, None

    gradients = []
    tokens.weight.register_hook(lambda gradient: gradients.append(gradient.clone()))

    def embed(rows):
        return (tokens(rows["input_ids"]) * rows["weights"]).sum(dim=(1, 2)).unsqueeze(1)

    for passes in (1, 2):  # the gradient of the whole table is allocated once, and used rows are added to it
        embeds = embed_in_chunks(
            embed,
            {"input_ids": ids, "weights": weights},
            chunk_size=1,
            tokens=tokens,
            parameters=tokens.parameters() if has_parameters else None,
        )
        embeds.sum().backward()
        assert [gradient.is_sparse for gradient in gradients] == [False, True][:passes]
        torch.testing.assert_close(tokens.weight.grad, passes * wanted, atol=1e-15, rtol=0)
    torch.testing.assert_close(tokens(ids), nn.functional.embedding(ids, tokens.weight))


@pytest.mark.parametrize("has_parameters", [False, True])
def test_inputs_get_their_gradients(has_parameters):
    tower = nn.Linear(2, 3).double()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    tower(x).tanh().square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in tower.parameters())]

    x.grad = None
    tower.zero_grad()
    unused = nn.Parameter(torch.ones(3))
    parameters = [*tower.parameters(), unused] if has_parameters else None
    embeds = embed_in_chunks(lambda rows: tower(rows["x"]).tanh(), {"x": x}, 2, parameters=parameters)
    embeds.square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in tower.parameters())]
    torch.testing.assert_close(found, wanted, atol=1e-14, rtol=0)
    assert unused.grad is None


def test_recomputed_chunks_have_a_graph_only_in_the_backward_pass(model, monkeypatch):
    """A graph of small nodes between large activations would keep the memory of these activations from being reused."""
    calls = []
    run = model.run_text_tower
    monkeypatch.setattr(model, "run_text_tower", lambda **rows: calls.append(torch.is_grad_enabled()) or run(**rows))
    outputs = ContrastiveModule(model, AllTexts(1), chunk_size=3).train()(**batch())
    assert calls == [False, False, False]
    outputs.loss.backward()
    assert calls[3:] == [True, True, True]


# ---- training modes ----


def graphs_kept(module, inputs, chunk_size):
    """Return gradients with the same chunks and random numbers, all activations stored, and equal row lengths."""
    module.train().zero_grad()
    torch.manual_seed(0)

    def embed(tower, **rows):
        parts = zip(*(tensor.split(chunk_size) for tensor in rows.values()), strict=True)
        return torch.cat([tower(*part).pooler_output for part in parts])

    text = embed(
        module.model.get_text_features,
        input_ids=inputs["input_ids"][:, 0],
        attention_mask=inputs["attention_mask"][:, 0],
    )
    audio = embed(
        module.model.get_audio_features,
        input_features=inputs["input_features"],
        audio_attention_mask=inputs["audio_attention_mask"],
    )
    loss, _ = module.objective(audio, text.unsqueeze(1), module.model.logit_scale.exp())
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_replayed(checkpointing):
    module = ContrastiveModule(model_with_dropout(), build_objective(arguments("unused")), chunk_size=3).double()
    inputs = double(batch())
    for name in ("attention_mask", "audio_attention_mask"):
        inputs[name] = torch.ones_like(inputs[name])
    wanted = graphs_kept(module, inputs, chunk_size=3)
    state = torch.get_rng_state()
    if checkpointing:
        newer = hasattr(module.model, "activation_checkpointing_enable")  # the name since transformers 5.23
        getattr(module.model, "activation_checkpointing_enable" if newer else "gradient_checkpointing_enable")()
    _, gradients = step(module, inputs)
    assert difference(gradients, wanted) < 1e-12
    assert torch.equal(torch.get_rng_state(), state)
    _, others = step(module, inputs, seed=1)
    assert difference(others, wanted) > 1e-3


@pytest.mark.parametrize("has_parameters", [False, True])
@pytest.mark.parametrize("source", [np.random.random, random.random, lambda: torch.rand(()).item()])
def test_random_numbers_of_any_library_are_replayed(source, has_parameters):
    tower = nn.Linear(3, 2, bias=False).double()
    inputs = {"x": torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    drawn, gradients, states = [], [], []
    for kept in (10**6, 0):  # one run keeps all activations, the other recomputes them
        np.random.seed(3)
        random.seed(3)
        torch.manual_seed(3)
        tower.zero_grad()
        calls = []

        def embed(rows, calls=calls):
            calls.append(source())
            return calls[-1] * tower(rows["x"])

        parameters = tower.parameters() if has_parameters else None
        embeds = embed_in_chunks(embed, inputs, 2, kept_cells=kept, parameters=parameters)
        embeds.square().sum().backward()
        drawn.append(calls)
        gradients.append(tower.weight.grad.clone())
        states.append(source())
    assert drawn[0] == drawn[1][:4]
    assert drawn[1][4:] == drawn[0][::-1]  # the recomputed chunks, last first
    assert torch.equal(*gradients)
    assert states[0] == states[1]  # the backward pass does not change the state


def test_under_autocast_chunks_add_up_in_single_precision():
    tower = nn.Linear(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        embed_in_chunks(lambda rows: tower(rows["x"]), {"x": torch.ones(400, 2)}, chunk_size=1).sum().backward()
    # In bfloat16, a sum of ones stops at 256.
    assert (tower.weight.grad == 400).all()


# ---- memory and time ----


class PeakMemory(TorchDispatchMode):
    """Measures the peak bytes of all tensors created inside it."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        known = {
            tensor.untyped_storage() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in known:
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage):
        if storage in self._alive:
            return
        self._alive.add(storage)
        weakref.finalize(storage, self._forget, storage.nbytes())
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, size):
        self.now -= size


def peak_bytes(model, clips, texts_per_clip=1, chunk_size=None, kind=ContrastiveModule):
    module = kind(model, AllTexts(texts_per_clip), chunk_size).train()
    module.zero_grad()
    inputs = batch(clips, texts_per_clip, frames=320, tokens=24)
    with PeakMemory() as memory:
        module(**inputs).loss.backward()
    return memory.peak


def test_memory_follows_the_chunk_and_not_the_batch(model):
    small, big = peak_bytes(model, 8, kind=Straight), peak_bytes(model, 64, kind=Straight)
    assert big > 5 * small
    assert peak_bytes(model, 64, chunk_size=8) < 1.1 * small
    assert peak_bytes(model, 64, chunk_size=16) > 1.5 * small


def test_eight_captions_take_the_memory_of_one(model):
    assert peak_bytes(model, 16, texts_per_clip=8, kind=Straight) > 1.5 * peak_bytes(model, 16, kind=Straight)
    assert peak_bytes(model, 16, texts_per_clip=8) < peak_bytes(model, 16, kind=Straight)


def test_chunks_are_embedded_again_from_the_last_to_the_first():
    tower, embedded = nn.Linear(3, 2), []

    def embed(rows):
        embedded.append(rows["x"][:, 0].tolist())
        return tower(rows["x"]).tanh()

    embeds = embed_in_chunks(embed, {"x": torch.arange(7.0).unsqueeze(1).expand(7, 3)}, chunk_size=3)
    assert embedded == [[0, 1, 2], [3, 4, 5], [6]]
    embeds.sum().backward()
    assert embedded[3:] == [[6], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_similar_length_share_a_chunk_without_needless_padding(side):
    lengths, widths = [5, 1, 4, 2, 3, 0], []
    mask = torch.arange(8) < torch.tensor(lengths).unsqueeze(1)
    rows = {"ids": torch.arange(6).unsqueeze(1) * mask, "mask": mask.long()}
    rows = {name: tensor.flip(1) if side == "left" else tensor for name, tensor in rows.items()}

    def embed(part):
        widths.append(part["ids"].shape[1])
        return torch.stack([part["ids"].amax(1), part["mask"].sum(1)], dim=1)

    embeds = embed_in_chunks(embed, rows, chunk_size=2, lengths=real_lengths(rows["mask"]))
    assert embeds.tolist() == [[0, 5], [1, 1], [2, 4], [3, 2], [4, 3], [0, 0]]
    assert widths == ([5, 3, 1] if side == "right" else [8, 8, 8])


def test_chunks_within_the_limit_keep_their_activations():
    tower, embedded = nn.Linear(1, 2), []
    mask = torch.arange(8) < torch.tensor([8, 2, 1, 4, 4, 1]).unsqueeze(1)

    def embed(rows):
        embedded.append(tuple(rows["mask"].shape))
        return tower(rows["mask"].sum(dim=1, keepdim=True).float())

    rows, lengths = {"mask": mask.long()}, real_lengths(mask)
    embed_in_chunks(embed, rows, chunk_size=2, lengths=lengths, kept_cells=12).sum().backward()
    assert embedded == [(2, 8), (2, 4), (2, 1), (2, 8)]  # only the longest chunk is computed again

    embedded.clear()
    embed_in_chunks(embed, rows, chunk_size=6, lengths=lengths, kept_cells=48, fewest_cells=4).sum().backward()
    assert embedded == [(1, 8), (2, 4), (2, 2), (1, 1)]  # much shorter rows are separate; all are kept


# ---- errors ----


@pytest.mark.parametrize(
    ("inputs", "chunk_size", "message"),
    [
        ({"x": torch.ones(4, 2)}, 0, r"chunk_size.*\b0\b"),
        ({"x": torch.ones(4, 2), "mask": torch.ones(3, 2)}, 2, "'x': 4, 'mask': 3"),
        ({"x": torch.ones(0, 2)}, 2, "one"),
        ({}, 2, "one"),
    ],
)
def test_inputs_that_cannot_be_chunked_are_rejected(inputs, chunk_size, message):
    with pytest.raises(ValueError, match=message):
        embed_in_chunks(lambda rows: rows["x"], inputs, chunk_size)


@pytest.mark.parametrize("has_parameters", [False, True])
def test_second_derivatives_through_recomputed_chunks_are_refused(has_parameters):
    tower, x = nn.Linear(2, 3).double(), torch.randn(5, 2, dtype=torch.float64)
    parameters = list(tower.parameters()) if has_parameters else None
    wanted = torch.autograd.functional.hvp(lambda rows: tower(rows).tanh().square().sum(), x, torch.ones_like(x))[1]

    def loss(rows, chunk_size):
        inputs = {"x": rows}
        embeds = embed_in_chunks(lambda chunk: tower(chunk["x"]).tanh(), inputs, chunk_size, parameters=parameters)
        return embeds.square().sum()

    found = torch.autograd.functional.hvp(lambda rows: loss(rows, 5), x, torch.ones_like(x))[1]
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.functional.hvp(lambda rows: loss(rows, 2), x, torch.ones_like(x))


def test_a_norm_over_the_batch_is_refused(model):
    module = ContrastiveModule(model, AllTexts(1)).train()
    assert module(**batch()).loss.isfinite()
    name, norm = next((name, part) for name, part in model.named_modules() if "BatchNorm" in type(part).__name__)
    norm.train()
    with pytest.raises(ValueError, match=name):
        module(**batch())


# ---- in the trainer ----


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_run_is_the_plain_run(tmp_path, precision):
    rows = tone_rows(tmp_path, count=12)
    options = {"svr": "bi-dynamic", "max_steps": 2, "gradient_accumulation_steps": 2, **QUICK, **precision}
    # Adam would turn the rounding error of a near-zero gradient into a fraction of the learning rate.
    options |= {"per_device_train_batch_size": 6, "languages": ["eng", "fra"]}
    options |= {"optim": "sgd", "learning_rate": 0.3}
    cached = build(tmp_path / "cached", rows, cached_chunk_size=4, **options)
    plain = build(tmp_path / "plain", rows, **options)
    plain.module.__class__ = Straight
    plain.train()
    cached.train()

    tolerance = 1e-2 if precision else 1e-6
    np.testing.assert_allclose(losses(cached), losses(plain), rtol=tolerance)
    names = [set(entry) for entry in plain.state.log_history]
    assert [set(entry) for entry in cached.state.log_history] == names
    for (name, value), other in zip(plain.model.named_parameters(), cached.model.parameters(), strict=True):
        torch.testing.assert_close(other, value, atol=max(tolerance, 3e-6), rtol=0, msg=name)
