"""MS-CLAP 2022 and 2023: embeddings computed by hand, all names in the published sizes, front end and tokens."""

import re

import builders
import numpy as np
import published_layouts as published
import pytest
import torch
from published_layouts import put
from torch.nn import functional
from transformers import BertConfig, BertModel, ClapAudioConfig, ClapAudioModel, GPT2Config

from modeling_supclap import CNN14Config, SupCLAPModel
from modeling_supclap.conversion import msclap as conversion
from modeling_supclap.conversion.msclap import prepare_gpt2_tokenizer, supclap_from_msclap

IDS = torch.tensor([[46, 10, 20, 299, 0, 0], [56, 7, 8, 9, 11, 299]])


def project(tensors: dict[str, torch.Tensor], encoder: str, pooled: torch.Tensor) -> torch.Tensor:
    """Compute the residual projection with torch functions only."""
    weights = {name: tensors[f"{encoder}.projection.{name}"] for name in ("linear1.weight", "linear2.weight")}
    weight, bias = (tensors[f"{encoder}.projection.layer_norm.{kind}"] for kind in ("weight", "bias"))
    hidden = pooled @ weights["linear1.weight"].T
    total = hidden + functional.gelu(hidden) @ weights["linear2.weight"].T
    return functional.normalize(functional.layer_norm(total, total.shape[1:], weight, bias), dim=-1)


@torch.no_grad()
def test_2022_reads_cnn14_and_the_first_token_of_bert():
    torch.manual_seed(0)
    tensors = published.small_msclap(2022)
    (model, extractor), aside = published.convert(supclap_from_msclap, tensors, "file")
    assert (extractor.filter_rate_hz, extractor.max_length_s) == (None, 5)
    assert aside == {"tagging head": 2, "front end (same as ours)": 3, "pooler (unused)": 2, "position ids": 1}

    reference = BertModel(published.bert_config(), add_pooling_layer=False).eval()
    prefix = "caption_encoder.base."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    reference.load_state_dict(own, strict=False)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    pooled = reference(IDS, attention_mask=mask).last_hidden_state[:, 0]
    seen = model.get_text_features(IDS, mask).pooler_output
    torch.testing.assert_close(seen, project(tensors, "caption_encoder", pooled), atol=1e-5, rtol=0)

    features = -40 + 20 * torch.randn(2, 1, 100, 64)
    assert model.config.audio_config.channels == [4, 6, 8, 12, 16, 20]
    expected = project(tensors, "audio_encoder", model.audio_model(features).pooler_output)
    torch.testing.assert_close(model.get_audio_features(features).pooler_output, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_golden_embeddings_of_2023():
    """The expected values are from the package msclap 1.3.4, with the full HTSAT and two layers of GPT-2."""
    audio = published.htsat(ClapAudioModel(ClapAudioConfig()))
    aside = {name: value for name, value in audio.items() if re.search("extractor|tscam|head|attn_mask", name)}
    tower = {name: value for name, value in audio.items() if name not in aside}
    text = published.on_meta(published.gpt2(400, 768, 2, 1024))
    joint = published.on_meta(published.residual_projections(768, 768, 64))
    tensors = published.golden(published.msclap(tower, text, joint, 0.0), 0.2)
    tensors |= {f"audio_encoder.base.{name}": value for name, value in aside.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 1024, 1024), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    tensors |= {f"caption_encoder.base.{name}": value for name, value in masks.items()}
    (model, extractor), aside = published.convert(
        supclap_from_msclap, {**tensors, "logit_scale": torch.tensor(2.0)}, "golden"
    )
    assert aside == {"tagging head": 4, "attention masks (recomputed)": 3, "front end (same as ours)": 2}
    assert (extractor.filter_rate_hz, extractor.max_length_s) == (32_000, 7)
    assert model.logit_scale.item() == 2

    time = np.arange(44_100) / 44_100
    clip = 0.5 * np.sin(2 * np.pi * 440 * time) + 0.25 * np.sin(2 * np.pi * 1000 * time)
    inputs = extractor(clip.astype(np.float32), sampling_rate=44_100, return_tensors="pt")
    seen = model.get_audio_features(inputs["input_features"]).pooler_output[0, :5].tolist()
    assert seen == pytest.approx([-0.23523, 0.06707, 0.21140, 0.04605, -0.25595], abs=2e-4)

    ids = torch.tensor([[46, 10, 20, 399, 0, 0], [56, 7, 8, 9, 11, 399]])
    seen = model.get_text_features(ids).pooler_output[:, :5].flatten().tolist()
    expected = [0.24347, 0.03913, -0.03061, 0.12987, -0.08259, 0.11839, 0.12118, -0.19900, 0.02817, -0.05958]
    assert seen == pytest.approx(expected, abs=2e-4)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("year", [2022, 2023])
def test_the_published_size_fits_to_the_last_tensor(monkeypatch, year):
    monkeypatch.setattr(conversion, "SupCLAPModel", published.build_on_meta(SupCLAPModel))
    if year == 2023:
        tower = published.build_on_meta(ClapAudioModel)(ClapAudioConfig())
        audio, text = published.htsat(tower), published.on_meta(published.gpt2(50_257, 768, 12, 1024))
        joint = published.residual_projections(768, 768, 1024)
    else:
        channels = (64, 128, 256, 512, 1024, 2048)
        audio = {**published.on_meta(published.cnn14(channels, 2048)), **published.panns_front_end(44_100)}
        with torch.device("meta"):
            text = published.bert(BertConfig(), BertModel(BertConfig(), add_pooling_layer=False))
        joint = published.residual_projections(2048, 768, 1024)
    (model, _), _ = published.convert(
        supclap_from_msclap, published.msclap(audio, text, published.on_meta(joint), 4.6), "msclap"
    )

    config = model.config
    if year == 2023:
        assert config.text_config.to_diff_dict() == GPT2Config(n_inner=3072, pad_token_id=0).to_diff_dict()
        assert (config.audio_config.depths, config.audio_config.hidden_size) == ([2, 2, 6, 2], 768)
    else:
        assert config.text_config.to_diff_dict() == BertConfig().to_diff_dict()
        assert config.audio_config.to_dict() == CNN14Config(channels=list(channels)).to_dict()
    assert config.projection_dim == 1024


@pytest.mark.parametrize(
    ("year", "change", "message"),
    [
        (2023, put("audio_encoder.base.htsat.logmel_extractor.melW", published.slaney_filters(44_100)), "melW"),
        (2022, put("audio_encoder.base.logmel_extractor.melW", published.slaney_filters(32_000)), r"melW.*44\.1"),
        (2022, put("audio_encoder.base.logmel_extractor.melW", None), "melW.*None"),
        (2023, put("logit_scale", None), "lacks logit_scale"),
        (2023, put("caption_encoder.base.ln_f.bias", None), "text_model.ln_f.bias"),
        (2023, put("caption_encoder.projection.linear1.bias", torch.ones(16)), "text_projection.lin"),
        (2022, put("audio_encoder.base.conv_block3.bn1.running_var", None), "audio_model.conv_blocks.2"),
        (2022, put("audio_encoder.projection.layer_norm.bias", None), "audio_projection.layer_norm"),
        (2022, put("caption_encoder.base.embeddings.word_embeddings.weight", torch.ones(9, 60)), r"\b60\b"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(year, change, message):
    tensors = published.small_msclap(year)
    change(tensors)
    with pytest.raises(ValueError, match=message):
        published.convert(supclap_from_msclap, tensors, "the file")


def test_texts_end_and_are_padded_as_they_were_in_training():
    texts = ["a dog barks", "the rain!", "wow!! yes !"]
    reference, prepared = builders.gpt2_tokenizer(), builders.gpt2_tokenizer()
    # As in MS-CLAP's own code with GPT-2's tokenizer.
    reference.add_special_tokens({"pad_token": "!"})
    prepare_gpt2_tokenizer(prepared)
    for text in texts:
        assert prepared(text)["input_ids"] == reference(f"{text} <|endoftext|>")["input_ids"]
    assert prepared.pad_token_id == prepared.convert_tokens_to_ids("!") == 0

    cut = prepared(texts[0], truncation=True, max_length=4)["input_ids"]
    assert cut[-2:] == reference(" <|endoftext|>")["input_ids"], "a long text keeps its end"
    with pytest.raises(ValueError, match=r"BertTokenizer.*GPT-2"):
        prepare_gpt2_tokenizer(builders.bert_tokenizer())
