"""The three published layouts of SONAR: exact names, and errors for tensors that do not fit."""

import builders
import published_layouts as published
import pytest
import torch
from transformers import M2M100Config

from modeling_supclap import SonarTextModel
from modeling_supclap.configuration_supclap import SONAR_TEXT_CONFIG
from modeling_supclap.conversion import sonar as conversion
from modeling_supclap.conversion.sonar import sonar_from_tensors

LEGACY = {"version": torch.tensor([3.0]), "embed_positions._float_tensor": torch.zeros(1)}
LAYOUTS = {
    "fairseq2": published.fairseq2,
    "legacy": lambda tensors: {**tensors, **LEGACY},
    "hub": lambda tensors: tensors,
    "below a prefix": lambda tensors: {f"encoder.{name}": value for name, value in tensors.items()},
}


def hub(**kwargs) -> dict[str, torch.Tensor]:
    return published.random(published.sonar_hub(**kwargs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_encoder(layout):
    fields = builders.sonar_config(encoder_layers=3).to_dict()
    encoder = SonarTextModel(builders.sonar_config(encoder_layers=3)).state_dict()
    model, aside = published.convert(sonar_from_tensors, LAYOUTS[layout](encoder), "file", fields)
    assert aside == ({"fairseq constants": 2} if layout == "legacy" else {})
    assert (model.config.to_dict(), model.training) == (fields, False)
    torch.testing.assert_close(model.state_dict(), encoder, atol=0, rtol=0)


def test_control_tokens_change_their_rows():
    """The order of control tokens is pad, unk, bos, eos in fairseq2, and bos, pad, eos, unk on the Hub."""
    names = {"fairseq2": ["pad", "unk", "bos", "eos", "4"], "hub": ["bos", "pad", "eos", "unk", "4"]}
    tensors = published.fairseq2(hub(vocabulary=5))
    embedding = tensors["encoder_frontend.embed.weight"]
    embedding.copy_(torch.arange(5.0).unsqueeze(1).expand(5, 64))
    converted = published.convert(sonar_from_tensors, tensors, "file")[0].embed_tokens.weight[:, 0]
    for row, token in enumerate(names["hub"]):
        assert converted[row] == names["fairseq2"].index(token)
    assert embedding[:, 0].tolist() == [0, 1, 2, 3, 4], "the checkpoint itself must stay as it is"


@pytest.mark.parametrize("layout", ["fairseq2", "hub"])
@pytest.mark.parametrize(
    ("arch", "vocabulary", "layers", "ffn", "count"),
    [("basic", 256_206, 24, 8192, 387), ("small", 32_005, 6, 4096, 99), ("distilled", 256_206, 6, 4096, 99)],
)
def test_published_sizes_fit_to_the_last_tensor(monkeypatch, layout, arch, vocabulary, layers, ffn, count):
    monkeypatch.setattr(conversion, "SonarTextModel", published.build_on_meta(SonarTextModel))
    tensors = LAYOUTS[layout](published.on_meta(published.sonar_hub(vocabulary, 1024, layers, ffn)))
    assert len(tensors) == count
    model, _ = published.convert(sonar_from_tensors, tensors, arch)
    assert len(model.state_dict()) == count
    assert model.config.encoder_attention_heads == 16
    if arch == "basic":
        fields = model.config.to_dict()
        assert {name: fields[name] for name in SONAR_TEXT_CONFIG} == SONAR_TEXT_CONFIG
        assert sum(parameter.numel() for parameter in model.parameters()) == 766_091_264


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=torch.ones(1)), "version"),
        (lambda t: t.update({"layers.0.fc1.bias": torch.ones(128)}), "layers.0.fc1.bias"),
        (lambda t: t.pop("encoder_frontend.embed.weight"), "embed_tokens.weight"),
        (lambda t: t.update({"encoder.layers.3.ffn_layer_norm.bias": torch.ones(64)}), "layers.1"),
        (lambda t: t.update({"encoder_frontend.embed.weight": torch.ones(9, 60)}), r"\b60\b"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(change, message):
    tensors = published.fairseq2(hub())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        published.convert(sonar_from_tensors, tensors, "the file")


def test_a_configuration_of_something_else_is_refused():
    with pytest.raises(ValueError, match="'bert'"):
        published.convert(sonar_from_tensors, hub(), "file", {"model_type": "bert"})
    sizes = {"vocab_size": 400, "d_model": 64, "encoder_ffn_dim": 128, "encoder_attention_heads": 1}
    with pytest.raises(ValueError, match=r"layers.1"):
        published.convert(sonar_from_tensors, hub(), "file", M2M100Config(encoder_layers=2, **sizes).to_dict())
