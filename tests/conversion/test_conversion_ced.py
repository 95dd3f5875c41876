"""CED's two published layouts: golden numbers, the exact names, and what does not fit is refused."""

import json

import builders
import published_layouts as published
import pytest
import torch
import torchaudio
from safetensors.torch import save_file

from modeling_supclap import CEDConfig, CEDFeatureExtractor, CEDModel, SupCLAPModel
from modeling_supclap.conversion import ced as conversion
from modeling_supclap.conversion.ced import (
    ced_from_hub,
    ced_from_original,
    front_end_tensors,
    hub_from_ced,
    original_from_ced,
)

LAYOUTS = {
    "original": (published.ced_original, ced_from_original, original_from_ced),
    "hub": (published.ced_hub, ced_from_hub, hub_from_ced),
}


def checkpoint(layout: str, width: int = 64, depth: int = 2) -> dict[str, torch.Tensor]:
    encoder, head = published.random(published.ced_encoder(width, depth)), published.random(published.ced_head(width))
    return LAYOUTS[layout][0](encoder, head)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_golden_embedding_through_both_layouts(layout):
    lay_out, convert, _ = LAYOUTS[layout]
    golden = CEDModel(CEDConfig.from_size("tiny"))
    builders.fill(golden, 0.08)
    model, _ = convert(lay_out(golden.state_dict(), published.random(published.ced_head(192))), "golden")
    assert model.config.to_dict() == golden.config.to_dict()
    clip = 0.5 * builders.tone(440, 80_000) + 0.25 * builders.tone(1000, 80_000)
    embedding = model(**CEDFeatureExtractor()(clip, sampling_rate=16000, return_tensors="pt")).pooler_output[0]
    assert embedding[:5].tolist() == pytest.approx([0.56050, -0.20951, 0.79064, -0.28509, -0.60179], abs=2e-4)
    assert embedding.norm().item() == pytest.approx(8.05154, abs=2e-4)


@pytest.mark.parametrize(("layout", "count"), [("original", 161), ("hub", 159)])
@pytest.mark.parametrize("size", ["tiny", "mini", "small", "base"])
def test_every_published_size_fits_to_the_last_tensor(monkeypatch, layout, count, size):
    def on_meta(config):
        with torch.device("meta"):
            return CEDModel(config)

    monkeypatch.setattr(conversion, "CEDModel", on_meta)
    width = CEDConfig.from_size(size).embed_dim
    lay_out, convert, _ = LAYOUTS[layout]
    encoder, head = published.on_meta(published.ced_encoder(width, 12)), published.on_meta(published.ced_head(width))
    tensors = lay_out(encoder, head)
    assert len(tensors) == count
    model, aside = convert(tensors, size)
    assert model.config.to_dict() == CEDConfig.from_size(size).to_dict()
    assert len(model.state_dict()) + len(aside) == count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_bit_equal(layout):
    tensors = checkpoint(layout)
    _, convert, back = LAYOUTS[layout]
    model, aside = convert(tensors, "file")
    again = back(model, aside)
    assert again.keys() == tensors.keys()
    for name, value in again.items():
        assert torch.equal(value, tensors[name]), name
        assert value.dtype == tensors[name].dtype


def test_the_way_back_needs_the_head_only():
    tensors = checkpoint("original")
    model, _ = ced_from_original(tensors, "file")
    again = original_from_ced(model, {name: tensors[name] for name in published.ced_head()})
    assert again.keys() == tensors.keys()
    for name, value in again.items():
        torch.testing.assert_close(value, tensors[name], atol=1e-5 if name.startswith("front_end") else 0, rtol=0)


def test_the_copies_share_nothing():
    tensors = checkpoint("hub")
    model, aside = ced_from_hub(tensors, "file")
    back = hub_from_ced(model, aside)
    with torch.no_grad():
        model.norm.weight.zero_()
    assert tensors["encoder.norm.weight"].abs().sum() > 0
    assert back["encoder.norm.weight"].abs().sum() > 0


def test_the_front_end_agrees_with_another_library():
    for name, value in published.front_end().items():
        torch.testing.assert_close(front_end_tensors()[name], value, atol=1e-5, rtol=0)


def edit(name: str, value: torch.Tensor | None):
    """A change of one tensor of a checkpoint; None takes it out."""
    return lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value})


def other_filters(**kwargs) -> torch.Tensor:
    fields = {"n_freqs": 257, "f_min": 0.0, "f_max": 8000.0, "n_mels": 64, "sample_rate": 16000}
    return torchaudio.functional.melscale_fbanks(**{**fields, **kwargs})


WINDOW, FILTERS = "front_end.0.spectrogram.window", "front_end.0.mel_scale.fb"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(FILTERS, other_filters(f_min=50.0)), "mel_scale.fb differs from CED's by"),
        (edit(FILTERS, other_filters(f_max=7999.0)), "trained on other spectrograms"),
        (edit(FILTERS, other_filters(f_max=7600.0)), "trained on other spectrograms"),
        (edit(FILTERS, other_filters(mel_scale="slaney")), "trained on other spectrograms"),
        (edit(FILTERS, torch.full((257, 64), torch.nan)), "mel_scale.fb differs from CED's by nan"),
        (edit(FILTERS, torch.zeros(201, 64)), r"has shape \(201, 64\); CED's has \(257, 64\)"),
        (edit(WINDOW, torch.hann_window(512, periodic=False)), "spectrogram.window differs"),
        (edit(WINDOW, None), r"has the front end \['front_end.0.mel_scale.fb'\]; CED's is"),
        (edit("front_end.1.gain", torch.ones(1)), "has the front end"),
        (edit("outputlayer.1.bias", None), "has the tagging head"),
        (edit("outputlayer.0.weight", torch.ones(3)), r"has the tagging head .*'0.weight': \(3,\)"),
        (edit("outputlayer.1.weight", None), "lacks outputlayer.1.weight"),
        (edit("blocks.1.norm1.bias", None), r"does not fit CEDModel: it lacks 1 \(blocks.1.norm1.bias\)"),
        (edit("init_bn.1.running_var", None), r"it lacks 1 \(init_bn.running_var\)"),
        (edit("cls_token", torch.ones(1, 1, 64)), r"it has no place for 1 \(cls_token\)"),
        (edit("blocks.7.norm1.bias", torch.ones(64)), r"it lacks \d+ \(blocks.2"),
        (edit("norm.weight", torch.ones(65)), r"norm.weight \(65,\) for \(64,\)"),
        (edit("init_bn.weight", torch.ones(64)), "mixes two layouts: it has init_bn.weight under two names"),
        (edit("patch_embed.proj.weight", torch.ones(64, 1, 64, 4)), "patches of 64 mel bands x 4 frames.*Dasheng"),
        (edit("patch_embed.proj.weight", torch.ones(60, 1, 16, 16)), "is 60 wide; CED's heads are 64 wide"),
        (edit("patch_embed.proj.weight", torch.ones(64)), r"patch_embed.proj.weight has shape \(64,\)"),
        (edit("time_pos_embed", torch.ones(1, 64, 1, 62)), "time positions for 62 columns"),
        (edit("time_pos_embed", None), "lacks time_pos_embed; among its"),
    ],
)
def test_what_is_no_original_file_is_refused(change, message):
    tensors = checkpoint("original")
    change(tensors)
    with pytest.raises(ValueError, match=rf"^the file.*{message}"):
        ced_from_original(tensors, "the file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("encoder.norm.bias", None), r"it lacks 1 \(norm.bias\)"),
        (edit("norm.bias", torch.ones(64)), "mixes two layouts: it has norm.bias under two names"),
        (edit("encoder.extra", torch.ones(1)), r"no place for 1 \(extra\)"),
        (edit("outputlayer.0.bias", None), "has the tagging head"),
    ],
)
def test_what_is_no_hub_checkpoint_is_refused(change, message):
    tensors = checkpoint("hub")
    change(tensors)
    with pytest.raises(ValueError, match=message):
        ced_from_hub(tensors, "the file")


def test_the_hub_configuration_counts_and_is_checked():
    tensors = checkpoint("hub")
    fields = {**builders.PUBLISHED_CED_CONFIG, "embed_dim": 64, "depth": 2, "num_heads": 2, "target_length": 1010}
    model, _ = ced_from_hub(tensors, "file", fields)
    assert (model.config.num_heads, model.config.target_length) == (2, 1010)
    with pytest.raises(ValueError, match="it has no place for 12"):
        ced_from_hub(tensors, "file", {**fields, "depth": 1})
    with pytest.raises(ValueError, match=r"has a config\.json of 'bert' beside weights of CED"):
        ced_from_hub(tensors, "file", {"model_type": "bert"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_in_half_precision_has_the_front_end_that_it_had(dtype):
    encoder, head = published.random(published.ced_encoder(64, 2)), published.random(published.ced_head(64))
    tensors = {name: value.to(dtype) for name, value in published.ced_original(encoder, head).items()}
    model, _ = ced_from_original(tensors, "half")
    assert model.dtype == torch.float32
    other = {**tensors, WINDOW: torch.hann_window(512, periodic=False).to(dtype)}
    with pytest.raises(ValueError, match="trained on other spectrograms"):
        ced_from_original(other, "half")


def test_an_authors_file_without_its_head_is_an_encoder():
    encoder = published.random(published.ced_encoder(64, 2))
    model, aside = ced_from_original(published.ced_original(encoder, {}), "headless")
    assert sorted(aside) == [FILTERS, WINDOW]
    torch.testing.assert_close(model.state_dict(), encoder, atol=0, rtol=0)


def test_a_headless_checkpoint_is_one_of_ours():
    encoder = published.random(published.ced_encoder())
    for tensors in (encoder, published.ced_hub(encoder, {})):
        model, aside = ced_from_hub(tensors, "file")
        assert aside == {}
        assert all(torch.equal(value, encoder[name]) for name, value in model.state_dict().items())


def test_a_hub_folder_is_a_tower_as_it_is(tmp_path):
    tensors = checkpoint("hub")
    fields = {**builders.PUBLISHED_CED_CONFIG, "embed_dim": 64, "depth": 2, "num_heads": 1}
    (tmp_path / "ced").mkdir()
    (tmp_path / "ced" / "config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "ced" / "model.safetensors", metadata={"format": "pt"})
    builders.supclap_model().text_model.save_pretrained(tmp_path / "text")
    converted, _ = ced_from_hub(tensors, "folder", fields)
    joined = SupCLAPModel.from_encoders(str(tmp_path / "ced"), str(tmp_path / "text"))
    for model in (CEDModel.from_pretrained(tmp_path / "ced"), joined.audio_model):
        for name, value in converted.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
