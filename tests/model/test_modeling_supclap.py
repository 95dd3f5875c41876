"""Two-tower model: the meaning of its outputs, which depend only on the clip and the caption."""

import math

import builders
import pytest
import torch
from safetensors.torch import save_file

from modeling_supclap import SupCLAPModel


def audio_inputs(clips: int = 2, frames: int = 120, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return -40 + 20 * torch.randn(clips, 64, frames)


def text_inputs(texts: int = 3, tokens: int = 7, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(5, 170, (texts, tokens))


# ---- what the numbers mean ----


@torch.no_grad()
def test_logits_are_scaled_cosines(model):
    outputs = model(audio_inputs(2), input_ids=text_inputs(3))
    assert outputs.loss is None
    assert outputs.logits_per_audio.shape == (2, 3)
    for i in range(2):
        audio = model.audio_projection(model.audio_model(audio_inputs(2)).pooler_output)[i]
        for j in range(3):
            hidden = model.text_model(text_inputs(3)).last_hidden_state[j]
            text = model.text_projection(hidden.mean(dim=0))
            expected = torch.dot(audio, text) / audio.norm() / text.norm() / 0.07
            assert outputs.logits_per_audio[i, j].item() == pytest.approx(expected.item(), abs=1e-4)
            assert outputs.logits_per_text[j, i] == outputs.logits_per_audio[i, j]


def test_texts_alone_need_another_method(model):
    with pytest.raises(ValueError, match="get_text_features"):
        model(input_ids=torch.tensor([[5, 6]]))


@torch.no_grad()
def test_embeddings_have_unit_norm_and_are_computed_separately(model):
    outputs = model(audio_inputs(), input_ids=text_inputs())
    audio = model.get_audio_features(audio_inputs())
    text = model.get_text_features(text_inputs())
    torch.testing.assert_close(audio.pooler_output.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(text.pooler_output.norm(dim=1), torch.ones(3))
    assert torch.equal(audio.pooler_output, outputs.audio_embeds)
    assert torch.equal(text.pooler_output, outputs.text_embeds)
    assert audio.last_hidden_state.shape == (2, 28, 32)
    assert outputs.text_model_output.last_hidden_state.shape == (3, 7, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_zero_vector_stays_zero(model, dtype):
    model.audio_projection.linear2.weight.zero_()
    model.to(dtype)
    assert model.get_audio_features(audio_inputs()).pooler_output.abs().max() == 0


def test_temperature_and_bias_start_where_the_config_says():
    model = builders.supclap_model(builders.supclap_config(temperature=0.1, logit_bias=-10.0))
    assert model.logit_scale.shape == model.logit_bias.shape == (1,)
    assert model.logit_scale.item() == pytest.approx(math.log(10))
    with torch.no_grad():
        outputs = model(audio_inputs(), input_ids=text_inputs())
    expected = 10 * outputs.audio_embeds @ outputs.text_embeds.T - 10
    torch.testing.assert_close(outputs.logits_per_audio, expected, atol=1e-5, rtol=0)
    assert {"logit_scale", "logit_bias"} <= {name for name, _ in model.named_parameters()}
    assert builders.supclap_model().logit_bias is None


def test_a_loaded_model_takes_another_temperature_and_bias(tmp_path):
    builders.supclap_model(builders.supclap_config(temperature=0.07)).save_pretrained(tmp_path / "start")
    model, report = SupCLAPModel.from_pretrained(
        tmp_path / "start", temperature=0.5, logit_bias=-10, output_loading_info=True
    )
    assert not any(report.values())
    model.save_pretrained(tmp_path / "siglip")
    for found in (model, SupCLAPModel.from_pretrained(tmp_path / "siglip")):
        assert (found.config.temperature, found.config.logit_bias, found.logit_bias.item()) == (0.5, -10, -10)
        torch.testing.assert_close(found.logit_scale.exp(), torch.tensor([2.0]))
        assert found.logit_bias.requires_grad
    again = SupCLAPModel.from_pretrained(tmp_path / "siglip", logit_bias=-3.0)
    assert (again.logit_bias.item(), again.config.temperature) == (-3.0, 0.5)
    with pytest.raises(ValueError, match="temperature must be positive"):
        SupCLAPModel.from_pretrained(tmp_path / "start", temperature=0)


def test_loss_is_infonce_of_both_directions(model):
    outputs = model(audio_inputs(3), input_ids=text_inputs(3), return_loss=True)
    logits = outputs.logits_per_audio.tolist()
    total = 0.0
    for i in range(3):
        row = sum(math.exp(logits[i][j]) for j in range(3))
        column = sum(math.exp(logits[j][i]) for j in range(3))
        total -= math.log(math.exp(logits[i][i]) / row) + math.log(math.exp(logits[i][i]) / column)
    assert outputs.loss.item() == pytest.approx(total / 3, abs=1e-4)


def test_both_directions_of_the_loss_train(model):
    """With only one direction, the gradients of the rows or columns of the logits would have other sums."""
    outputs = model(audio_inputs(3), input_ids=text_inputs(3), return_loss=True)
    (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits_per_audio)
    logits = outputs.logits_per_audio.detach()
    expected = (logits.softmax(dim=1) + logits.softmax(dim=0) - 2 * torch.eye(3)) / 3
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_loss_needs_pairs(model):
    with pytest.raises(ValueError, match=r"\b2 clips\b.*\b3 texts\b"):
        model(audio_inputs(2), input_ids=text_inputs(3), return_loss=True)
    with pytest.raises(ValueError, match="get_audio_features"):
        model(audio_inputs(2))
    with pytest.raises(ValueError, match="get_text_features"):
        model(input_ids=text_inputs(2))
    assert model.accepts_loss_kwargs is False


@torch.no_grad()
def test_outputs_of_all_layers_and_tuples(model):
    ids = text_inputs()
    text = model.get_text_features(ids, output_hidden_states=True)
    assert [len(states) for states in (text.hidden_states, text.hidden_states[0])] == [3, 3]
    audio = model.get_audio_features(audio_inputs(), output_hidden_states=True)
    assert len(audio.hidden_states) == 3
    for tower in (model.config, model.text_model.config, model.audio_model.config):
        tower.return_dict = False
    as_tuple = model(audio_inputs(), input_ids=ids)
    assert torch.equal(as_tuple[2], audio.pooler_output)
    assert torch.equal(as_tuple[3], text.pooler_output)


# ---- text towers ----


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
@torch.no_grad()
def test_text_pooling(pooling):
    model = builders.supclap_model(builders.supclap_config(text_pooling=pooling))
    has_pooler = any(name.startswith("pooler") for name, _ in model.text_model.named_parameters())
    assert has_pooler == (pooling == "pooler")
    ids, mask = text_inputs(), torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6])
    hidden = model.text_model(ids, attention_mask=mask)
    pooled = {
        "mean": torch.stack(
            [hidden.last_hidden_state[row, :length].mean(dim=0) for row, length in enumerate([7, 4, 1])]
        ),
        "cls": hidden.last_hidden_state[:, 0],
        "pooler": hidden.pooler_output,
    }[pooling]
    expected = torch.nn.functional.normalize(model.text_projection(pooled), dim=-1)
    torch.testing.assert_close(model.get_text_features(ids, mask).pooler_output, expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_residual_projection():
    config = builders.supclap_config(projection_type="residual", projection_hidden_act="gelu")
    model = builders.supclap_model(config)
    p = {name: value.double() for name, value in model.text_projection.state_dict().items()}
    assert p.keys() == {"linear1.weight", "linear2.weight", "layer_norm.weight", "layer_norm.bias"}

    hidden = torch.randn(3, config.text_config.hidden_size, dtype=torch.float64) @ p["linear1.weight"].T
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    total = hidden + gelu @ p["linear2.weight"].T
    total = (total - total.mean(dim=1, keepdim=True)) / (total.var(dim=1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = total * p["layer_norm.weight"] + p["layer_norm.bias"]
    pooled = hidden @ torch.linalg.pinv(p["linear1.weight"]).T
    embeds = model.text_projection(pooled.float()).double()
    torch.testing.assert_close(embeds, torch.nn.functional.normalize(expected, dim=1), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_token_types_reach_only_towers_that_know_them(model, sonar_model):
    ids = text_inputs()
    types = torch.ones_like(ids)
    plain = model.get_text_features(ids).pooler_output
    assert torch.equal(model.get_text_features(ids, token_type_ids=torch.zeros_like(ids)).pooler_output, plain)
    assert not torch.equal(model.get_text_features(ids, token_type_ids=types).pooler_output, plain)
    plain = sonar_model.get_text_features(ids).pooler_output
    assert torch.equal(sonar_model.get_text_features(ids, token_type_ids=types).pooler_output, plain)


@torch.no_grad()
def test_mask_is_read_off_the_padding_token(model):
    ids = text_inputs()
    ids[1, 4:] = 0
    with_mask = model.get_text_features(ids, (ids != 0).long()).pooler_output
    assert torch.equal(model.get_text_features(ids).pooler_output, with_mask)
    torch.testing.assert_close(model.get_text_features(ids[1:2, :4]).pooler_output[0], with_mask[1], atol=1e-6, rtol=0)


# ---- loading, numerics, vocabulary ----


@torch.no_grad()
def test_checkpoint_of_a_training_run_loads(model, tmp_path):
    wrapped = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_file(wrapped | {"objective.radius": torch.ones(())}, tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    loaded, report = SupCLAPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@torch.no_grad()
def test_double_precision_stays(model):
    assert model.double()(audio_inputs().double(), input_ids=text_inputs()).logits_per_audio.dtype == torch.float64


def test_token_embeddings_can_be_resized(model):
    model.resize_token_embeddings(310)
    assert model.text_model.get_input_embeddings().num_embeddings == 310
    assert model.get_text_features(torch.tensor([[305, 5]])).pooler_output.isfinite().all()


def test_new_projections_are_drawn_as_transformers_draws_linear_layers():
    """Normal, with a standard deviation of 0.02, whatever the `initializer_range` of the encoders is."""
    model = SupCLAPModel(builders.supclap_config(projection_dim=64, temperature=0.05, logit_bias=-10.0))
    for projection in (model.audio_projection, model.text_projection):
        for linear in (projection.linear1, projection.linear2):
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert linear.weight.abs().max() > 0.05
    assert model.logit_scale.item() == pytest.approx(math.log(20))
    assert model.logit_bias.item() == -10.0
