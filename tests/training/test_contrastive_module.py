"""A model and its objective in one: the loss of a step, what evaluation gives, and what a checkpoint holds."""

import pytest
import torch

from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.distributed import _GatherWithGradient
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
