"""The two-tower model: what its numbers mean, and that nothing but the clip and the caption decides them."""

import math
from typing import Any

import builders
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel, ClapAudioConfig, ClapModel, DistilBertConfig, M2M100Model, XLMRobertaConfig
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

from modeling_supclap import CEDModel, SonarTextModel, SupCLAPModel


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


@torch.no_grad()
def test_embeddings_have_unit_norm_and_come_one_side_at_a_time(model):
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
    """With one direction alone the gradients of a row or of a column of the logits would sum to something else."""
    outputs = model(audio_inputs(3), input_ids=text_inputs(3), return_loss=True)
    (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits_per_audio)
    logits = outputs.logits_per_audio.detach()
    expected = (logits.softmax(dim=1) + logits.softmax(dim=0) - 2 * torch.eye(3)) / 3
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_every_parameter_trains(model):
    model.train()
    model(audio_inputs(3), input_ids=text_inputs(3), return_loss=True).loss.backward()
    untrained = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert untrained == []


def test_loss_needs_pairs(model):
    with pytest.raises(ValueError, match="got 2 clips and 3 texts"):
        model(audio_inputs(2), input_ids=text_inputs(3), return_loss=True)
    with pytest.raises(ValueError, match="call get_audio_features"):
        model(audio_inputs(2))
    assert model.accepts_loss_kwargs is False


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
    projected = model.text_projection(pooled.float()).double()
    torch.testing.assert_close(projected, expected, atol=1e-4, rtol=1e-4)


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


SMALL: dict[str, Any] = {"vocab_size": 200, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT_CONFIGS = {
    "xlm-roberta": XLMRobertaConfig(**SMALL, intermediate_size=32),
    "distilbert": DistilBertConfig(vocab_size=200, dim=16, n_layers=1, n_heads=2, hidden_dim=32),
    "m2m_100": builders.sonar_config(),
}


@pytest.mark.parametrize("text", TEXT_CONFIGS)
@torch.no_grad()
def test_other_text_towers(text, tmp_path):
    model = builders.supclap_model(builders.supclap_config(TEXT_CONFIGS[text]))
    assert isinstance(model.text_model, SonarTextModel) == (text == "m2m_100")
    inputs = {"input_ids": text_inputs(), "token_type_ids": torch.zeros_like(text_inputs())}
    embeds = model.get_text_features(**inputs).pooler_output
    assert embeds.shape == (3, 16)
    model.save_pretrained(tmp_path)
    assert torch.equal(SupCLAPModel.from_pretrained(tmp_path).get_text_features(**inputs).pooler_output, embeds)


@torch.no_grad()
def test_htsat_as_audio_tower():
    sizes = {"hidden_size": 64, "patch_embeds_hidden_size": 8, "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 2]}
    config = builders.supclap_config(audio=ClapAudioConfig(**sizes))
    outputs = SupCLAPModel(config).eval()(torch.randn(2, 1, 1001, 64), input_ids=text_inputs())
    assert outputs.logits_per_audio.shape == (2, 3)


def test_model_of_several_parts_is_no_tower():
    config = builders.supclap_config(audio=builders.supclap_config())
    with pytest.raises(ValueError, match="'supclap' cannot be a tower"):
        SupCLAPModel(config)


# ---- the same clip, the same embedding ----

LENGTHS = [16000, 2400, 161_919, 200_000]


@torch.no_grad()
def test_same_clip_same_embedding(model, processor, tmp_path):
    clips = [builders.noise(length, seed) for seed, length in enumerate(LENGTHS)]

    def embed(some, by=model, with_=processor):
        return by.get_audio_features(**with_(audio=some, sampling_rate=16000, return_tensors="pt")).pooler_output

    together = embed(clips)
    assert torch.equal(embed(clips), together)
    torch.testing.assert_close(embed(clips[::-1]).flip(0), together, atol=1e-6, rtol=0)
    for index, clip in enumerate(clips):
        torch.testing.assert_close(embed([clip])[0], together[index], atol=1e-6, rtol=0)
    assert torch.pdist(together).min() > 1e-3
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again, its_processor = SupCLAPModel.from_pretrained(tmp_path), type(processor).from_pretrained(tmp_path)
    assert torch.equal(embed(clips, again, its_processor), together)


@pytest.mark.parametrize("kind", ["bert", "sonar"])
@torch.no_grad()
def test_same_caption_same_embedding(kind, request):
    model = request.getfixturevalue("model" if kind == "bert" else "sonar_model")
    processor = request.getfixturevalue("processor" if kind == "bert" else "sonar_processor")
    texts, languages = list(builders.CAPTIONS.values()), list(builders.CAPTIONS)

    def embed(some, of):
        return model.get_text_features(**processor(text=some, language=of, return_tensors="pt")).pooler_output

    together = embed(texts, languages)
    assert torch.equal(embed(texts, languages), together)
    for index, (text, language) in enumerate(zip(texts, languages, strict=True)):
        torch.testing.assert_close(embed([text], language)[0], together[index], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["model", "sonar_model"])
@torch.no_grad()
def test_saving_and_loading_changes_nothing(kind, request, tmp_path):
    model = request.getfixturevalue(kind)
    inputs = {"input_features": audio_inputs(), "input_ids": text_inputs()}
    model.save_pretrained(tmp_path)
    assert torch.equal(
        SupCLAPModel.from_pretrained(tmp_path)(**inputs).logits_per_audio, model(**inputs).logits_per_audio
    )
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(model.state_dict())
    assert {name.split(".")[0] for name in names} == {
        "audio_model",
        "text_model",
        "audio_projection",
        "text_projection",
        "logit_scale",
    }


@torch.no_grad()
def test_checkpoint_of_a_training_run_loads(model, tmp_path):
    wrapped = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_file(wrapped | {"objective.radius": torch.ones(())}, tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    loaded, report = SupCLAPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


# ---- numerics ----


@pytest.mark.parametrize("kind", ["model", "sonar_model"])
@torch.no_grad()
def test_eager_agrees_with_sdpa(kind, request, tmp_path):
    model = request.getfixturevalue(kind)
    model.save_pretrained(tmp_path)
    eager = SupCLAPModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert {eager.audio_model.config._attn_implementation, eager.text_model.config._attn_implementation} == {"eager"}
    assert model.audio_model.config._attn_implementation == model.text_model.config._attn_implementation == "sdpa"
    inputs = {"input_features": audio_inputs(), "input_ids": text_inputs()}
    torch.testing.assert_close(eager(**inputs).logits_per_audio, model(**inputs).logits_per_audio, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["model", "sonar_model"])
@torch.no_grad()
def test_half_precision_points_the_same_way(kind, dtype, request, tmp_path):
    model = request.getfixturevalue(kind)
    model.save_pretrained(tmp_path)
    half = SupCLAPModel.from_pretrained(tmp_path, dtype=dtype)
    inputs = {"input_features": audio_inputs(), "input_ids": text_inputs()}
    expected, got = model(**inputs), half(**inputs)
    assert (half.dtype, got.audio_embeds.dtype) == (dtype, torch.float32)
    for name in ("audio_embeds", "text_embeds"):
        assert torch.cosine_similarity(expected[name], got[name]).min() > 0.999


@torch.no_grad()
def test_double_precision_stays(model):
    assert model.double()(audio_inputs().double(), input_ids=text_inputs()).logits_per_audio.dtype == torch.float64


@pytest.mark.parametrize("kind", ["model", "sonar_model"])
def test_checkpointing_reaches_both_towers_and_keeps_gradients(kind, request):
    model = request.getfixturevalue(kind).train()
    inputs = {"input_features": audio_inputs(3), "input_ids": text_inputs(3), "return_loss": True}
    model(**inputs).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    for tower in (model.audio_model, model.text_model):
        assert any(getattr(module, "gradient_checkpointing", False) for module in tower.modules())
    model(**inputs).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


# ---- joining pretrained towers ----


@pytest.fixture
def folders(tmp_path):
    """Folders of pretrained towers, and of what could be mistaken for one."""
    torch.manual_seed(1)
    models = {
        "ced": CEDModel(builders.ced_config()),
        "bert": BertModel(builders.supclap_config().text_config),
        "sonar": M2M100Encoder(builders.sonar_config()),
        "nllb": M2M100Model(builders.sonar_config(decoder_layers=1, decoder_ffn_dim=8, decoder_attention_heads=2)),
    }
    for name, tower in models.items():
        tower.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in models}


@pytest.mark.parametrize(("text", "pooling"), [("bert", "mean"), ("bert", "pooler"), ("sonar", "mean")])
def test_towers_join_with_all_their_weights(folders, text, pooling, tmp_path):
    model = SupCLAPModel.from_encoders(folders["ced"], folders[text], projection_dim=8, text_pooling=pooling)
    assert not model.training
    assert (model.config.projection_dim, model.config.text_pooling) == (8, pooling)
    for tower, name in ((model.audio_model, "ced"), (model.text_model, text)):
        saved = load_file(f"{folders[name]}/model.safetensors")
        for key, value in tower.state_dict().items():
            assert torch.equal(value, saved[key]), key
    inputs = {"input_features": audio_inputs(), "input_ids": text_inputs()}
    with torch.no_grad():
        expected = model(**inputs).logits_per_audio
        model.save_pretrained(tmp_path / "joined")
        again = SupCLAPModel.from_pretrained(tmp_path / "joined")(**inputs).logits_per_audio
    assert expected.isfinite().all()
    assert torch.equal(again, expected)


@pytest.mark.parametrize(("audio", "text", "culprit"), [("ced", "nllb", "nllb"), ("ced", "bert", "bert")])
def test_towers_that_would_stay_random_are_refused(folders, audio, text, culprit):
    if culprit == "bert":  # a checkpoint that lost a layer
        tensors = load_file(f"{folders['bert']}/model.safetensors")
        kept = {name: value for name, value in tensors.items() if "layer.1" not in name}
        save_file(kept, f"{folders['bert']}/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{culprit} lacks \d+ weights of"):
        SupCLAPModel.from_encoders(folders[audio], folders[text])


def test_whole_clap_is_no_audio_tower(folders, tmp_path):
    text = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    audio = {"hidden_size": 64, "patch_embeds_hidden_size": 8, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    config = ClapModel.config_class(text_config=text, audio_config=audio, projection_dim=8)
    ClapModel(config).save_pretrained(tmp_path / "clap")
    with pytest.raises(ValueError, match="'clap' cannot be a tower"):
        SupCLAPModel.from_encoders(str(tmp_path / "clap"), folders["bert"])


def test_token_embeddings_can_be_resized(model):
    model.resize_token_embeddings(310)
    assert model.text_model.get_input_embeddings().num_embeddings == 310
    assert model.get_text_features(torch.tensor([[305, 5]])).pooler_output.isfinite().all()
