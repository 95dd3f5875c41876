"""CNN14, compared with its description in plain torch functions, and as a tower."""

from typing import Any

import builders
import pytest
import torch
from torch.nn import functional

from modeling_supclap import CNN14Config, CNN14Model, SupCLAPConfig, SupCLAPModel
from modeling_supclap.training.lora import train_last_layers

SMALL: dict[str, Any] = {"hidden_size": 16, "channels": [4, 6, 8, 12]}


def small() -> CNN14Model:
    torch.manual_seed(0)
    model = CNN14Model(CNN14Config(**SMALL)).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(("running_mean", "bias")):
                value.normal_(std=0.3)
            elif name.endswith(("running_var", "weight")) and value.ndim == 1:
                value.uniform_(0.5, 2)
        model.bn0.running_mean.sub_(40)
        model.bn0.running_var.mul_(400)
    return model


def described(state: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """Compute the CNN14 embedding of PANNs with torch functions: batch norm over bands, blocks, max + mean, linear."""

    def norm(x, name):
        stats = [state[f"{name}.{each}"] for each in ("running_mean", "running_var", "weight", "bias")]
        return functional.batch_norm(x, *stats)

    x = norm(features.transpose(1, 3), "bn0").transpose(1, 3)
    for index in range(4):
        block = f"conv_blocks.{index}"
        for number in (1, 2):
            x = functional.conv2d(x, state[f"{block}.conv{number}.weight"], padding=1)
            x = functional.relu(norm(x, f"{block}.bn{number}"))
        x = functional.avg_pool2d(x, 1 if index == 3 else 2)
    x = x.mean(dim=3)
    return functional.relu(functional.linear(x.max(dim=2)[0] + x.mean(dim=2), state["fc1.weight"], state["fc1.bias"]))


@torch.no_grad()
def test_it_embeds_as_described():
    model = small()
    features = -40 + 20 * torch.randn(3, 1, 77, 64, generator=torch.Generator().manual_seed(0))
    out = model(features)
    torch.testing.assert_close(out.pooler_output, described(model.state_dict(), features), atol=1e-4, rtol=1e-5)
    assert out.last_hidden_state.shape == (3, 9, 12)


def test_the_published_size():
    with torch.device("meta"):
        model = CNN14Model(CNN14Config())
    # PANNs has 80,753,615 parameters with the head of 527 labels.
    published = 80_753_615 - (2048 * 527 + 527)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_initial_weights_keep_the_scale_of_relu():
    model = CNN14Model(CNN14Config(hidden_size=64, channels=[32, 64]))
    for layer in (model.conv_blocks[1].conv1, model.conv_blocks[1].conv2, model.fc1):
        assert layer.weight.std().item() == pytest.approx((2 / layer.weight[0].numel()) ** 0.5, rel=0.05)
    assert not model.fc1.bias.any()


@pytest.mark.parametrize(
    ("shape", "message"), [((2, 64, 77), r"\(2, 64, 77\)"), ((2, 1, 77, 32), r"\b32\b"), ((2, 1, 7, 64), r"\b7\b")]
)
def test_invalid_spectrograms_are_rejected(shape, message):
    with pytest.raises(ValueError, match=message):
        small()(torch.zeros(shape))


def test_its_last_block_trains_and_its_batch_norms_keep_their_statistics():
    audio = CNN14Config(**SMALL)
    model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=builders.bert_config(), projection_dim=8))
    assert "audio_model.fc1" in train_last_layers(model)
    # The embedding of a clip does not depend on the batch.
    model.train()
    assert not any(module.training for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))


def test_gradients_reach_every_weight():
    model = small().train()
    model.gradient_checkpointing_enable()
    model(torch.randn(2, 1, 40, 64)).pooler_output.square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without


def test_the_input_layer_is_the_first_block():
    """Gradient checkpointing with adapters needs the gradient of its output."""
    model = small()
    assert model.get_input_embeddings() is model.conv_blocks[0]
