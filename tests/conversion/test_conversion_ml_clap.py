"""ML-CLAP's layout: embeddings and logits by hand, the 557 names, and what does not fit is refused."""

import math

import builders
import published_layouts as published
import pytest
import torch

from modeling_supclap import CEDConfig, CEDModel, SonarTextModel, SupCLAPConfig, SupCLAPModel
from modeling_supclap.conversion import ced, ml_clap, sonar
from modeling_supclap.conversion.ml_clap import ml_clap_from_supclap, supclap_from_ml_clap

IDS = torch.tensor([[46, 10, 20, 30, 40, 2, 1, 1], [56, 7, 8, 9, 11, 12, 13, 2]])


def parts() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "encoder": published.random(published.ced_encoder(depth=2), seed=1),
        "head": published.random(published.ced_head(), seed=2),
        "text": published.random(published.sonar_hub(layers=2), seed=3),
        "joint": published.random(published.ml_clap_joint(), seed=4),
    }


def checkpoint(temperature: float = 0.05) -> dict[str, torch.Tensor]:
    given = parts()
    audio = published.ced_original(given["encoder"], given["head"])
    return published.ml_clap(audio, published.fairseq2(given["text"]), given["joint"], temperature)


@torch.no_grad()
def test_it_scores_as_described():
    given = parts()
    model, _ = supclap_from_ml_clap(checkpoint(0.05), "file")
    audio = CEDModel(CEDConfig(embed_dim=64, depth=2, num_heads=1)).eval()
    audio.load_state_dict(given["encoder"])
    text = SonarTextModel(model.text_model.config).eval()
    text.load_state_dict(given["text"])

    def project(pooled, name):
        weights = {key.removeprefix(f"{name}."): value for key, value in given["joint"].items()}
        hidden = (pooled @ weights["0.weight"].T + weights["0.bias"]).clamp(min=0)
        projected = hidden @ weights["2.weight"].T + weights["2.bias"]
        return projected / projected.norm(dim=1, keepdim=True)

    features = -40 + 20 * torch.randn(3, 64, 101, generator=torch.Generator().manual_seed(0))
    audio_embeds = project(audio(features).pooler_output, "audio_proj")
    text_embeds = project(text(IDS).pooler_output, "text_proj")
    out = model(input_features=features, input_ids=IDS)
    torch.testing.assert_close(out.audio_embeds, audio_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.text_embeds, text_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.logits_per_audio, audio_embeds @ text_embeds.T / 0.05, atol=1e-4, rtol=0)
    assert model.config.temperature == pytest.approx(0.05)
    assert (model.config.text_pooling, model.config.projection_hidden_act) == ("mean", "relu")


def test_there_and_back_is_bit_equal():
    tensors = checkpoint()
    again = ml_clap_from_supclap(*supclap_from_ml_clap(tensors, "file"))
    assert again.keys() == tensors.keys()
    for name, value in again.items():
        if name == "temperature":
            torch.testing.assert_close(value, tensors[name], atol=0, rtol=1.2e-7)
        else:
            assert torch.equal(value, tensors[name]), name


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_the_published_size_fits_to_the_last_tensor(monkeypatch):
    def on_meta(cls):
        def build(*args):
            with torch.device("meta"):
                return cls(*args)

        return build

    monkeypatch.setattr(ced, "CEDModel", on_meta(CEDModel))
    monkeypatch.setattr(sonar, "SonarTextModel", on_meta(SonarTextModel))
    monkeypatch.setattr(ml_clap, "SupCLAPModel", on_meta(SupCLAPModel))
    audio = published.ced_original(
        published.on_meta(published.ced_encoder(768, 12)), published.on_meta(published.ced_head(768))
    )
    text = published.on_meta(published.sonar_hub(256_206, 1024, 24, 8192))
    text = {published.fairseq2_name(name): value for name, value in text.items()}
    joint = published.on_meta(published.ml_clap_joint(768, 1024, 1024))
    tensors = published.ml_clap(audio, text, joint, 0.07)
    assert len(tensors) == 557
    model, aside = supclap_from_ml_clap(tensors, "pretrain.pt")
    assert (len(model.state_dict()), len(aside)) == (551, 6)
    # Which is the model that SupCLAPConfig describes when nothing is said.
    fields, expected = model.config.to_dict(), SupCLAPConfig().to_dict()
    assert fields.pop("temperature") == pytest.approx(expected.pop("temperature"))
    assert {key: value for key, value in fields.items() if key != "architectures"} == {
        key: value for key, value in expected.items() if key != "architectures"
    }


@pytest.mark.parametrize("temperature", [0.07, 0.01, 1.0, 3.0])
def test_temperature_becomes_a_logarithm(temperature):
    model, _ = supclap_from_ml_clap(checkpoint(temperature), "file")
    assert model.logit_scale.shape == (1,)
    assert model.logit_scale.item() == pytest.approx(-math.log(temperature), abs=1e-6)


def put(name: str, value: torch.Tensor | None):
    return lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("temperature", None), "must have a 'temperature' of one positive number, has None"),
        (put("temperature", torch.tensor(-0.1)), "'temperature' of one positive number"),
        (put("temperature", torch.tensor(torch.nan)), "'temperature' of one positive number"),
        (put("temperature", torch.ones(2)), "'temperature' of one positive number"),
        (put("audio_proj.2.bias", None), r"it lacks 1 \(audio_projection.linear2.bias\)"),
        (put("audio_proj.0.weight", None), "lacks audio_proj.0.weight"),
        (put("text_proj.3.bias", torch.ones(16)), r"no place for 1 \(text_proj.3.bias\)"),
        (put("text_proj.0.weight", torch.ones(16, 60)), r"text_projection.linear1.weight \(16, 60\) for \(16, 64\)"),
        (put("logit_bias", torch.ones(1)), r"no place for 1 \(logit_bias\)"),
        (
            put("audio_encoder.model.norm.bias", None),
            r"its audio encoder does not fit CEDModel: it lacks 1 \(norm.bias\)",
        ),
        (put("audio_encoder.model.front_end.0.spectrogram.window", None), "its audio encoder has the front end"),
        (put("text_encoder.model.layer_norm.bias", None), "its text encoder does not fit SonarTextModel: it lacks 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    tensors = checkpoint()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        supclap_from_ml_clap(tensors, "the file")


def test_what_ml_clap_cannot_express():
    with pytest.raises(ValueError, match=r"'text tower': 'bert'.*ML-CLAP has .*'text tower': 'm2m_100'"):
        ml_clap_from_supclap(builders.supclap_model(), {})
