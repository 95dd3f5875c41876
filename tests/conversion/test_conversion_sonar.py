"""SONAR's three published layouts: golden numbers, the exact names, and what does not fit is refused."""

import published_layouts as published
import pytest
import torch
from builders import fill, sonar_config, supclap_model
from transformers import M2M100Config
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

from modeling_supclap import SonarTextModel, SupCLAPModel
from modeling_supclap.configuration_supclap import SONAR_TEXT_CONFIG
from modeling_supclap.conversion import sonar as conversion
from modeling_supclap.conversion.sonar import (
    fairseq2_from_sonar,
    sonar_from_fairseq2,
    sonar_from_hub,
    sonar_from_legacy,
)

IDS = torch.tensor([[46, 10, 20, 30, 40, 2, 1, 1], [56, 7, 8, 9, 11, 12, 13, 2]])
LEGACY = {"version": torch.tensor([3.0]), "embed_positions._float_tensor": torch.zeros(1)}


def hub(**kwargs) -> dict[str, torch.Tensor]:
    return published.random(published.sonar_hub(**kwargs))


def in_all_layouts(tensors: dict[str, torch.Tensor], **kwargs) -> dict[str, SonarTextModel]:
    return {
        "fairseq2": sonar_from_fairseq2(published.fairseq2(tensors), "file", **kwargs),
        "legacy": sonar_from_legacy({**tensors, **LEGACY}, "file", **kwargs)[0],
        "hub": sonar_from_hub(tensors, "file", **{name: value.to_dict() for name, value in kwargs.items()}),
    }


@torch.no_grad()
def test_golden_embeddings_through_every_layout():
    config = M2M100Config(vocab_size=300, d_model=64, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=128)
    golden = SonarTextModel(config)
    fill(golden, 0.4)
    for layout, model in in_all_layouts(golden.state_dict(), config=config).items():
        pooled = model(IDS, attention_mask=(IDS != 1).long()).pooler_output
        assert pooled[0, :4].tolist() == pytest.approx([-1.26888, -1.42543, -0.75577, -0.63699], abs=1e-4), layout
        assert pooled[1, :4].tolist() == pytest.approx([-0.47703, -1.11628, -0.79090, 0.37667], abs=1e-4), layout
        assert pooled.norm(dim=1).tolist() == pytest.approx([7.09727, 6.54642], abs=1e-4), layout


def test_control_tokens_change_their_rows():
    """Row for row by the names of the tokens: fairseq2 has pad, unk, bos, eos; the Hub bos, pad, eos, unk."""
    names = {"fairseq2": ["pad", "unk", "bos", "eos", "4"], "hub": ["bos", "pad", "eos", "unk", "4"]}
    tensors = published.fairseq2(hub(vocabulary=5))
    embedding = tensors["encoder_frontend.embed.weight"]
    embedding.copy_(torch.arange(5.0).unsqueeze(1).expand(5, 64))
    converted = sonar_from_fairseq2(tensors, "file").embed_tokens.weight[:, 0]
    for row, token in enumerate(names["hub"]):
        assert converted[row] == names["fairseq2"].index(token)
    assert embedding[:, 0].tolist() == [0, 1, 2, 3, 4], "the checkpoint itself must stay as it is"


@pytest.mark.parametrize(
    ("arch", "vocabulary", "layers", "ffn", "count"),
    [("basic", 256_206, 24, 8192, 387), ("small", 32_005, 6, 4096, 99), ("distilled", 256_206, 6, 4096, 99)],
)
def test_published_sizes_fit_to_the_last_tensor(monkeypatch, arch, vocabulary, layers, ffn, count):
    def on_meta(config):
        with torch.device("meta"):
            return SonarTextModel(config)

    monkeypatch.setattr(conversion, "SonarTextModel", on_meta)
    tensors = published.on_meta(published.sonar_hub(vocabulary, 1024, layers, ffn))
    assert len(tensors) == count
    for model in in_all_layouts(tensors).values():
        assert len(model.state_dict()) == count
        assert model.config.encoder_attention_heads == 16
        if arch == "basic":
            fields = model.config.to_dict()
            assert {name: fields[name] for name in SONAR_TEXT_CONFIG} == SONAR_TEXT_CONFIG
            assert sum(parameter.numel() for parameter in model.parameters()) == 766_091_264


def test_there_and_back_is_bit_equal():
    tensors = hub(layers=2)
    theirs = published.fairseq2(tensors)
    again = fairseq2_from_sonar(sonar_from_fairseq2(theirs, "file"))
    assert again.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in again.items())
    for layout, model in in_all_layouts(tensors).items():
        assert model.state_dict().keys() == tensors.keys()
        assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items()), layout


def test_legacy_constants_are_set_aside():
    _, aside = sonar_from_legacy({**hub(), **LEGACY}, "file")
    assert aside.keys() == LEGACY.keys()


def test_a_prefix_of_the_whole_is_taken_off():
    tensors = hub()
    model = sonar_from_hub({f"encoder.{name}": value for name, value in tensors.items()}, "file")
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("encoder.layers.0.ffn.inner_proj.bias"), r"it lacks 1 \(layers.0.fc1.bias\)"),
        (lambda t: t.update(version=torch.ones(1)), r"no place for 1 \(version\)"),
        (lambda t: t.update({"layers.0.fc1.bias": torch.ones(128)}), "mixes two layouts: it has layers.0.fc1.bias"),
        (lambda t: t.pop("encoder_frontend.embed.weight"), "lacks embed_tokens.weight"),
        (lambda t: t.update({"encoder.layers.3.ffn_layer_norm.bias": torch.ones(64)}), r"it lacks \d+ \(layers.1"),
        (lambda t: t.update({"layer_norm.bias": torch.ones(63)}), r"layer_norm.bias \(63,\) for \(64,\)"),
        (lambda t: t.update({"encoder_frontend.embed.weight": torch.ones(9, 60)}), "is 60 wide; SONAR's heads are 64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    tensors = published.fairseq2(hub())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        sonar_from_fairseq2(tensors, "the file")


def test_a_configuration_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"config\.json of 'bert' beside weights of an M2M100 encoder"):
        sonar_from_hub(hub(), "file", {"model_type": "bert"})
    sizes = {"vocab_size": 400, "d_model": 64, "encoder_ffn_dim": 128, "encoder_attention_heads": 1}
    with pytest.raises(ValueError, match=r"it lacks 16 \(layers.1"):
        sonar_from_hub(hub(), "file", M2M100Config(encoder_layers=2, **sizes).to_dict())


def test_a_hub_folder_is_a_tower_as_it_is(tmp_path):
    torch.manual_seed(0)
    encoder = M2M100Encoder(sonar_config())
    encoder.save_pretrained(tmp_path / "sonar")
    supclap_model().audio_model.save_pretrained(tmp_path / "audio")
    joined = SupCLAPModel.from_encoders(str(tmp_path / "audio"), str(tmp_path / "sonar"))
    for name, value in encoder.state_dict().items():
        assert torch.equal(joined.text_model.state_dict()[name], value), name
