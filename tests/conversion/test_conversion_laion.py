"""LAION's layout: the embeddings equal those of the original ClapModel, and missing tensors raise errors."""

import published_layouts as published
import pytest
import torch
from published_layouts import put
from transformers import ClapConfig, ClapModel

from modeling_supclap.conversion import laion as conversion_laion
from modeling_supclap.conversion.laion import clap_from_laion, laion_feature_extractor


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_it_embeds_as_the_model_that_was_laid_out(fused):
    original = published.laion_model(fused)
    model, aside = published.convert(
        clap_from_laion, published.laion(original, published.slaney_filters(48_000)), "file"
    )
    assert model.state_dict().keys() == original.state_dict().keys()
    for name, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    features = -40 + 20 * torch.randn(2, 4 if fused else 1, 1001, 64, generator=torch.Generator().manual_seed(0))
    audio = {"input_features": features, "is_longer": torch.tensor([[True], [False]])}
    text = {"input_ids": torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]])}
    for one, other in (
        (model.get_audio_features(**audio), original.get_audio_features(**audio)),
        (model.get_text_features(**text), original.get_text_features(**text)),
    ):
        assert torch.equal(one.pooler_output, other.pooler_output)
    told = {
        "tagging head": 4,
        "transforms (unused)": 4,
        "attention masks (recomputed)": 1,
        "front end (same as ours)": 2,
        "position ids": 1,
    }
    assert aside == told


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_the_published_size_fits_to_the_last_tensor(monkeypatch):
    on_meta = published.build_on_meta(ClapModel)
    large = {"patch_embeds_hidden_size": 128, "hidden_size": 1024, "depths": [2, 2, 12, 2]}
    monkeypatch.setattr(conversion_laion, "ClapModel", on_meta)
    for audio in ({}, {"enable_fusion": True, "fusion_type": "aff_2d"}, large):
        original = on_meta(ClapConfig(audio_config=audio))
        tensors = published.laion(original, published.slaney_filters(48_000))
        model, _ = published.convert(clap_from_laion, tensors, "630k-audioset-best.pt")
        assert model.state_dict().keys() == original.state_dict().keys()
        seen, wanted = model.config.to_dict(), original.config.to_dict()
        assert seen["audio_config"] == wanted["audio_config"]
        # Value of roberta-base, which LAION used; the default of transformers differs.
        assert seen["text_config"].pop("layer_norm_eps") == 1e-5
        assert wanted["text_config"].pop("layer_norm_eps") == 1e-12
        assert seen["text_config"] == wanted["text_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("audio_branch.logmel_extractor.melW", published.slaney_filters(48_000, 0.0)), "melW.*LAION"),
        (put("audio_branch.logmel_extractor.melW", published.slaney_filters(48_000, 49.0)), "melW"),
        (put("audio_branch.logmel_extractor.melW", torch.zeros(513, 128)), r"melW.*\(513, 128\)"),
        (put("audio_branch.logmel_extractor.melW", None), "melW.*None"),
        (put("audio_branch.extra", torch.ones(1)), "audio_model.audio_encoder.extra"),
        (put("logit_scale_t", None), "logit_scale_t"),
        (put("audio_branch.conv_block1.conv1.weight", torch.ones(1)), "conv_block1"),
        (put("text_branch.embeddings.word_embeddings.weight", torch.ones(9, 60)), r"\b60\b"),
        (put("audio_branch.layers.1.blocks.0.attn.relative_position_bias_table", None), "layers.1.blocks.0.attent"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(change, message):
    tensors = published.laion(published.laion_model(), published.slaney_filters(48_000))
    change(tensors)
    with pytest.raises(ValueError, match=message):
        published.convert(clap_from_laion, tensors, "the file")


def test_the_feature_extractor_is_the_published_one():
    plain, fused = laion_feature_extractor(), laion_feature_extractor(fused=True)
    assert (plain.sampling_rate, plain.frequency_min, plain.frequency_max) == (48_000, 50, 14_000)
    assert (plain.truncation, fused.truncation) == ("rand_trunc", "fusion")
