"""Layout of ML-CLAP and GLAP: embeddings and logits computed by hand, all names, and errors for other tensors."""

import math

import published_layouts as published
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from published_layouts import put

from modeling_supclap import CEDConfig, CEDModel, SonarTextModel, SupCLAPConfig, SupCLAPModel
from modeling_supclap.conversion import ced, ml_clap, sonar
from modeling_supclap.conversion.ml_clap import supclap_from_ml_clap

IDS = torch.tensor([[46, 10, 20, 30, 40, 2, 1, 1], [56, 7, 8, 9, 11, 12, 13, 2]])
DASHENG = {"patch_size": [64, 4], "target_length": 1008}


def parts(dasheng: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "encoder": published.random(published.ced_encoder(depth=2, dasheng=dasheng), seed=1),
        "head": {} if dasheng else published.random(published.ced_head(), seed=2),
        "text": published.random(published.sonar_hub(layers=2), seed=3),
        "joint": published.random(published.ml_clap_joint(), seed=4),
    }


def checkpoint(temperature: float | None = 0.05, dasheng: bool = False) -> dict[str, torch.Tensor]:
    given = parts(dasheng)
    audio = published.ced_original(given["encoder"], given["head"])
    return published.ml_clap(audio, published.fairseq2(given["text"]), given["joint"], temperature)


@pytest.mark.parametrize("dasheng", [False, True], ids=["ml-clap", "glap"])
@torch.no_grad()
def test_it_scores_as_described(dasheng):
    given, temperature = parts(dasheng), 0.01 if dasheng else 0.05
    tensors = checkpoint(None if dasheng else temperature, dasheng)
    model, _ = published.convert(supclap_from_ml_clap, tensors, "file", temperature if dasheng else None)
    audio = CEDModel(CEDConfig(embed_dim=64, depth=2, num_heads=1, **(DASHENG if dasheng else {}))).eval()
    audio.load_state_dict(given["encoder"])
    text = SonarTextModel(model.text_model.config).eval()
    text.load_state_dict(given["text"])

    def project(pooled, name):
        weights = {key.removeprefix(f"{name}."): value for key, value in given["joint"].items()}
        hidden = (pooled @ weights["0.weight"].T + weights["0.bias"]).clamp(min=0)
        projected = hidden @ weights["2.weight"].T + weights["2.bias"]
        return projected / projected.norm(dim=1, keepdim=True)

    features = -40 + 20 * torch.randn(3, 64, 1100, generator=torch.Generator().manual_seed(0))
    audio_embeds = project(audio(features).pooler_output, "audio_proj")
    text_embeds = project(text(IDS).pooler_output, "text_proj")
    out = model(input_features=features, input_ids=IDS)
    torch.testing.assert_close(out.audio_embeds, audio_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.text_embeds, text_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.logits_per_audio, audio_embeds @ text_embeds.T / temperature, atol=1e-3, rtol=0)
    assert model.config.temperature == pytest.approx(temperature)
    assert (model.config.text_pooling, model.config.projection_hidden_act) == ("mean", "relu")


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("dasheng", [False, True], ids=["ml-clap", "glap"])
def test_the_published_size_fits_to_the_last_tensor(monkeypatch, dasheng):
    for module, built in ((ced, CEDModel), (sonar, SonarTextModel), (ml_clap, SupCLAPModel)):
        monkeypatch.setattr(module, built.__name__, published.build_on_meta(built))
    head = {} if dasheng else published.on_meta(published.ced_head(768))
    audio = published.ced_original(published.on_meta(published.ced_encoder(768, 12, dasheng)), head)
    text = published.on_meta(published.sonar_hub(256_206, 1024, 24, 8192))
    text = {published.fairseq2_name(name): value for name, value in text.items()}
    joint = published.on_meta(published.ml_clap_joint(768, 1024, 1024))
    tensors = published.ml_clap(audio, text, joint, None if dasheng else 0.07)
    assert len(tensors) == (552 if dasheng else 557)

    model, aside = published.convert(supclap_from_ml_clap, tensors, "pretrain.pt", 0.07 if dasheng else None)
    assert len(model.state_dict()) == 551
    assert aside == {"front end (same as ours)": 2} | ({} if dasheng else {"tagging head": 4})
    # This is the default model of SupCLAPConfig, except for the patches of Dasheng.
    expected = SupCLAPConfig(audio_config=CEDConfig(**(DASHENG if dasheng else {}))).to_dict()
    fields = model.config.to_dict()
    assert fields.pop("temperature") == pytest.approx(expected.pop("temperature"))
    assert {key: value for key, value in fields.items() if key != "architectures"} == {
        key: value for key, value in expected.items() if key != "architectures"
    }


@pytest.mark.parametrize("temperature", [0.07, 0.01, 3.0])
def test_temperature_becomes_a_logarithm(temperature):
    model, _ = published.convert(supclap_from_ml_clap, checkpoint(temperature), "file")
    assert model.logit_scale.shape == (1,)
    assert model.logit_scale.item() == pytest.approx(-math.log(temperature), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("temperature", None), "lacks temperature"),
        (put("temperature", torch.tensor(-0.1)), "temperature"),
        (put("temperature", torch.tensor(torch.nan)), "temperature"),
        (put("audio_proj.0.weight", None), "audio_proj.0.weight"),
        (put("text_proj.3.bias", torch.ones(16)), "text_proj.3.bias"),
        (put("text_proj.0.weight", torch.ones(16, 60)), r"text_projection.linear1.weight: \(16, 60\) for \(16, 64\)"),
        (put("audio_encoder.model.norm.bias", None), "CEDModel.*1"),
        (put("audio_encoder.model.front_end.0.spectrogram.window", None), "front_end.0.spectr"),
        (put("text_encoder.model.layer_norm.bias", None), "SonarTextModel.*1"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(change, message):
    tensors = checkpoint()
    change(tensors)
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        published.convert(supclap_from_ml_clap, tensors, "the file")
