"""Model and objective in one module: the loss of a step, evaluation outputs, and checkpoints."""

from collections import Counter
from unittest.mock import patch

import builders
import pytest
import torch
from audio_encoders import make_encoder
from test_grad_cache import AllTexts, Straight
from test_grad_cache import batch as padded_batch
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.training import contrastive_module
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.distributed import _GatherWithGradient
from modeling_supclap.training.grad_cache import real_lengths
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


@pytest.fixture
def module(model, tmp_path):
    quiet = {"report_to": "none", "use_cpu": True}
    return ContrastiveModule(model, build_objective(SupCLAPTrainingArguments(str(tmp_path), svr="none", **quiet)))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (3, 1, 6), generator=generator)
    return {
        "input_features": 10 * torch.randn(3, 64, 101, generator=generator) - 40,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def test_the_loss_is_that_of_the_embeddings(module, batch):
    evaluated = module.eval()(**batch)
    assert evaluated.loss is None
    assert (evaluated.audio_embeds.shape, evaluated.text_embeds.shape) == ((3, 16), (3, 1, 16))
    out = module.train()(**batch)
    torch.testing.assert_close(out.audio_embeds, evaluated.audio_embeds)  # the towers here have no dropout
    audio, text = evaluated.audio_embeds.double(), evaluated.text_embeds[:, 0].double()
    logits = audio @ text.T / 0.07
    rows = -logits.log_softmax(dim=1).diagonal().mean() - logits.log_softmax(dim=0).diagonal().mean()
    assert out.loss.item() == pytest.approx(rows.item(), rel=1e-5)
    assert out.logs["temperature"].item() == pytest.approx(0.07)


def test_rows_of_several_clips_keep_their_rows(module, batch):
    doubled = {**batch, "input_features": batch["input_features"].repeat_interleave(2, dim=0)}
    audio_embeds = module.eval()(**doubled).audio_embeds
    assert audio_embeds.shape == (3, 2, 16)
    torch.testing.assert_close(audio_embeds[:, 0], audio_embeds[:, 1])


def test_second_derivatives_of_gathered_embeddings_are_refused():
    with pytest.raises(RuntimeError, match="create_graph=True"):
        _GatherWithGradient.backward(None, torch.ones(2))


class Calls(TorchDispatchMode):
    """Counter of operator calls by name, except views, which start no kernel on a GPU.

    A boolean index counts as `nonzero`, which a GPU calls to find its positions.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] += not function.is_view
        if name == "index" or "index_put" in name:
            indices = [index for index in args[1] if index is not None]
            self.counts["nonzero"] += sum(index.dtype in (torch.bool, torch.uint8) for index in indices)
        return function(*args, **(kwargs or {}))


def unequal_batch(languages=1, frames=300):
    """Return a batch of 24 clips and texts of several lengths, in the format of the collator."""
    generator = torch.Generator().manual_seed(0)
    audio_mask = torch.arange(frames) < torch.randint(100, frames + 1, (24, 1), generator=generator)
    text_mask = torch.arange(40) < torch.randint(5, 41, (24, languages, 1), generator=generator)
    return {
        "input_features": 10 * torch.randn(24, 64, frames, generator=generator) - 40,
        "audio_attention_mask": audio_mask.long(),
        "audio_lengths": real_lengths(audio_mask),
        "input_ids": torch.randint(5, 50, text_mask.shape, generator=generator) * text_mask,
        "attention_mask": text_mask.long(),
        "text_lengths": real_lengths(text_mask),
        "group_ids": torch.arange(24),
    }


def calls_of_a_step(model, tmp_path, languages=1, frames=300, kind=ContrastiveModule, **options):
    """Return the number of operator calls in a step of 24 clips, and of those that make the CPU wait for a GPU."""
    codes = ["eng", "fra", "deu", "spa", "nld", "cat", "jpn", "zho"][:languages]
    args = SupCLAPTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, languages=codes, **options)
    module = kind(model, build_objective(args)).train()
    batch = unequal_batch(languages, frames)
    module(**batch)  # the first step sets the radii
    model.zero_grad()
    tolist = torch.Tensor.tolist

    def waiting_tolist(tensor):  # on a CPU, it calls no operator
        calls.counts["item"] += 1
        return tolist(tensor)

    with Calls() as calls, patch.object(torch.Tensor, "tolist", waiting_tolist):
        module(**batch).loss.backward()
    counts = calls.counts
    waits = sum(counts[name] for name in ("_local_scalar_dense", "nonzero", "item", "_unique2", "is_nonzero"))
    return sum(counts.values()), waits


@pytest.fixture
def gpu_limits(monkeypatch):
    """Use the chunk limits of a GPU for tensors on the CPU."""
    monkeypatch.setitem(contrastive_module._KEPT_TOKENS, "cpu", contrastive_module._KEPT_TOKENS["cuda"])


def test_kcl_of_8_languages_takes_the_calls_of_a_plain_step_on_a_gpu(model, tmp_path, gpu_limits):
    plain, _ = calls_of_a_step(model, tmp_path, 8, kind=Straight, loss="kcl")
    calls, waits = calls_of_a_step(model, tmp_path, 8, loss="kcl")
    assert calls <= 1.05 * plain
    assert waits <= 2


def test_a_step_hardly_waits_for_a_gpu(model, tmp_path, gpu_limits):
    calls, waits = calls_of_a_step(model, tmp_path, svr="none")
    with_support_vectors, waits_with_support_vectors = calls_of_a_step(model, tmp_path, svr="bi-static")
    assert max(waits, waits_with_support_vectors) <= 2
    assert with_support_vectors - calls <= 140  # both directions, forward and backward


def test_clips_of_several_chunks_hardly_wait_for_a_gpu(model, tmp_path, gpu_limits):
    _, waits = calls_of_a_step(model, tmp_path, frames=2500, svr="none")
    assert waits <= 2


def widths_of_calls(model, name):
    """Return a list to which each call of a tower adds the shape of its first input, and whether it has a graph."""
    calls, run = [], getattr(model, name)

    def call(**inputs):
        calls.append((*next(iter(inputs.values())).shape, torch.is_grad_enabled()))
        return run(**inputs)

    setattr(model, name, call)
    return calls


def test_a_pass_without_gradients_has_small_chunks_and_no_graph(module):
    """Frozen towers, and evaluations."""
    batch = padded_batch(texts_per_clip=10)
    texts, clips = (widths_of_calls(module.model, f"run_{kind}_tower") for kind in ("text", "audio"))
    module.model.text_model.requires_grad_(False)
    module.train()
    module.objective = AllTexts(10)
    module(**batch).loss.backward()
    assert [(count, has_graph) for count, _, has_graph in texts] == [(64, False), (6, False)]
    assert module.model.text_projection.linear1.weight.grad.any()
    clips.clear()
    with torch.no_grad():
        module.eval()(**batch)
    assert [(count, has_graph) for count, *_, has_graph in clips] == [(4, False), (3, False)]


@pytest.mark.parametrize(("kind", "is_cut"), [("wav2vec2", True), ("ast", False)])
def test_clips_of_any_encoder_are_cut_along_their_last_axis_if_it_is_time(kind, is_cut):
    encoder, extractor = make_encoder(kind)
    model = SupCLAPModel(builders.supclap_config(audio=encoder.config)).eval()
    processor = SupCLAPProcessor(extractor, builders.bert_tokenizer())
    clips = [builders.noise(8000), builders.noise(16000, seed=1)]
    batch = dict(processor(audio=clips, sampling_rate=16000, return_tensors="pt"))
    if "audio_attention_mask" not in batch:
        pytest.skip(f"{kind} has no mask")
    with torch.no_grad():
        expected = model.get_audio_features(**batch).pooler_output
    calls = widths_of_calls(model, "run_audio_tower")
    module = ContrastiveModule(model, torch.nn.Identity(), chunk_size=1)
    with torch.no_grad():
        torch.testing.assert_close(module.embed("audio", batch), expected, atol=1e-5, rtol=0)
    long, short = (call[-2] for call in calls)
    assert (short < long) == is_cut


def test_compiled_blocks_have_the_options_of_the_compiler(module, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda block, **options: compiled.append((type(block).__name__, options))
    )
    module.compile_blocks(mode="default")
    options = {"dynamic": True, "mode": "default"}
    assert compiled == [*[("CEDBlock", options)] * 2, *[("BertLayer", options)] * 2]


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_checkpointing_is_enabled_in_the_model_by_any_version_of_transformers(module, monkeypatch, name):
    calls = []
    monkeypatch.setattr(type(module.model), name, lambda model, **options: calls.append(options), raising=False)
    getattr(module, name)(use_reentrant=False)
    assert calls == [{"use_reentrant": False}]


@pytest.mark.slow
def test_compiled_blocks_take_batches_of_any_length(module, gpu_limits):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    batches = [padded_batch(clips=4 + number % 3, frames=80 + 16 * number, tokens=9 + number) for number in range(8)]
    expected = [module.train()(**each).loss.item() for each in batches]
    module.compile_blocks(backend=backend)
    assert [module(**each).loss.item() for each in batches] == pytest.approx(expected, rel=1e-5)
    assert 2 <= len(graphs) <= 4  # two towers, with and without padding


def test_a_tower_with_empty_parameters_is_recomputed_by_torch(module):
    """DeepSpeed leaves empty parameters between the layers, which autograd functions cannot have as inputs."""
    assert module._get_parameters("text")
    module.model.text_projection.register_parameter("sharded", torch.nn.Parameter(torch.empty(0)))
    assert module._get_parameters("text") is None
    assert module._get_parameters("audio")
