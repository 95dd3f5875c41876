"""Published layouts of CED and Dasheng: exact names, golden values, and errors for tensors that do not fit."""

import builders
import published_layouts as published
import pytest
import torch
import torchaudio
from published_layouts import put

from modeling_supclap import CEDConfig, CEDFeatureExtractor, CEDModel
from modeling_supclap.conversion import ced as conversion
from modeling_supclap.conversion.ced import ced_from_tensors

LAYOUTS = {"original": published.ced_original, "hub": published.ced_hub}
WINDOW, FILTERS = "front_end.0.spectrogram.window", "front_end.0.mel_scale.fb"


def checkpoint(layout: str, width: int = 64, depth: int = 2) -> dict[str, torch.Tensor]:
    encoder, head = (
        published.random(published.ced_encoder(width, depth)),
        published.random(published.ced_head(width)),
    )
    return LAYOUTS[layout](encoder, head)


@pytest.mark.parametrize(
    ("seconds", "start", "length"),
    [
        (1, [-1.22779, 0.20422, -1.29706, -0.15031, -1.19230], 10.78831),
        (25, [-1.04004, 0.43723, -0.89916, -0.36506, -0.89516], 9.87144),
    ],
)
@torch.no_grad()
def test_golden_embeddings_of_dasheng(seconds, start, length):
    """The expected values are from the package dasheng 0.0.9, with chunks averaged as in GLAP."""
    encoder = published.golden(published.on_meta(published.ced_encoder(128, 2, dasheng=True)), 0.2)
    encoder["init_bn.num_batches_tracked"] = torch.tensor(1)
    model, _ = published.convert(ced_from_tensors, published.ced_original(encoder, {}), "golden")
    clip = 0.5 * builders.tone(440, seconds * 16000) + 0.25 * builders.tone(1000, seconds * 16000)
    extractor = CEDFeatureExtractor.from_config(model.config)
    embedding = model(**extractor(clip, sampling_rate=16000, return_tensors="pt")).pooler_output[0]
    # Pure tones leave bands at the noise floor, where the rounding of the FFT differs between processors.
    assert embedding[:5].tolist() == pytest.approx(start, abs=5e-4)
    assert embedding.norm().item() == pytest.approx(length, abs=5e-4)


@pytest.fixture
def on_meta(monkeypatch):
    """Build models on the meta device."""
    monkeypatch.setattr(conversion, "CEDModel", published.build_on_meta(CEDModel))


@pytest.mark.parametrize(("layout", "count"), [("original", 161), ("hub", 159)])
@pytest.mark.parametrize("size", ["tiny", "mini", "small", "base"])
def test_every_published_size_fits_to_the_last_tensor(on_meta, layout, count, size):
    width = builders.CED_SIZES[size]["embed_dim"]
    encoder, head = (published.on_meta(published.ced_encoder(width, 12)), published.on_meta(published.ced_head(width)))
    tensors = LAYOUTS[layout](encoder, head)
    assert len(tensors) == count
    model, aside = published.convert(ced_from_tensors, tensors, size)
    assert model.config.to_dict() == CEDConfig(**builders.CED_SIZES[size]).to_dict()
    assert len(model.state_dict()) + sum(aside.values()) == count


@pytest.mark.parametrize(("width", "depth", "heads"), [(768, 12, 12), (1280, 32, 16), (1536, 40, 24)])
def test_every_size_of_dasheng_fits_to_the_last_tensor(on_meta, width, depth, heads):
    tensors = published.ced_original(published.on_meta(published.ced_encoder(width, depth, dasheng=True)), {})
    model, aside = published.convert(ced_from_tensors, tensors, "dasheng")
    config = model.config
    assert (config.embed_dim, config.depth, config.num_heads) == (width, depth, heads)
    assert (config.patch_mels, config.patch_frames, config.target_length) == (64, 4, 1008)
    assert aside == {"front end (same as ours)": 2}


def test_a_dasheng_folder_of_the_hub(tmp_path):
    encoder = published.random(published.ced_encoder(64, 2, dasheng=True))
    tensors = {f"encoder.{published.original_name(name)}": value for name, value in encoder.items()}
    fields = {"model_type": "dasheng", "embed_dim": 64, "depth": 2, "num_heads": 1, "target_length": 1008}
    fields |= {"patch_size": [64, 4], "patch_stride": [64, 4], "auto_map": {"AutoModel": "modeling_dasheng.X"}}
    nested = {"model_type": "dasheng", "name": "dasheng-base", "loss": "BCELoss"}
    nested["encoder_kwargs"] = {key: value for key, value in fields.items() if key not in ("model_type", "auto_map")}
    for config in (fields, nested, None):
        model, _ = published.convert(ced_from_tensors, tensors, "folder", config)
        torch.testing.assert_close(model.state_dict(), encoder, atol=0, rtol=0)
        assert model.config.patch_frames == 4


def other_filters(**kwargs) -> torch.Tensor:
    fields = {"n_freqs": 257, "f_min": 0.0, "f_max": 8000.0, "n_mels": 64, "sample_rate": 16000}
    return torchaudio.functional.melscale_fbanks(**{**fields, **kwargs})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(FILTERS, other_filters(f_min=50.0)), "mel_scale.fb"),
        (put(FILTERS, other_filters(f_max=7999.0)), "mel_scale.fb"),
        (put(FILTERS, other_filters(mel_scale="slaney")), "mel_scale.fb"),
        (put(FILTERS, torch.full((257, 64), torch.nan)), "mel_scale.fb.*nan"),
        (put(FILTERS, torch.zeros(201, 64)), r"mel_scale.fb.*\(201, 64\)"),
        (put(WINDOW, torch.hann_window(512, periodic=False)), "spectrogram.window"),
        (put(WINDOW, None), "spectrogram.window.*None"),
        (put("front_end.1.gain", torch.ones(1)), "1.gain"),
        (put("blocks.1.norm1.bias", None), "CEDModel.*blocks.1.norm1.bias"),
        (put("blocks.7.norm1.bias", torch.ones(64)), "blocks.2"),
        (put("init_bn.weight", torch.ones(64)), "init_bn.weight"),
        (put("patch_embed.proj.weight", torch.ones(64, 1, 64, 4)), "63.*4"),
        (put("patch_embed.proj.weight", torch.ones(60, 1, 16, 16)), r"\b60\b.*\b64\b"),
        (put("time_pos_embed", torch.ones(1, 64, 1, 62)), r"\b62\b"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(change, message):
    tensors = checkpoint("original")
    change(tensors)
    with pytest.raises(ValueError, match=rf"^the file.*{message}"):
        published.convert(ced_from_tensors, tensors, "the file")


def test_the_hub_configuration_counts_and_is_checked():
    tensors = checkpoint("hub")
    fields = {**builders.PUBLISHED_CED_CONFIG, "embed_dim": 64, "depth": 2, "num_heads": 2, "target_length": 1010}
    model, _ = published.convert(ced_from_tensors, tensors, "file", fields)
    assert (model.config.num_heads, model.config.target_length) == (2, 1010)
    with pytest.raises(ValueError, match=r"\b12\b"):
        published.convert(ced_from_tensors, tensors, "file", {**fields, "depth": 1})
    with pytest.raises(ValueError, match="'bert'"):
        published.convert(ced_from_tensors, tensors, "file", {"model_type": "bert"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_in_half_precision_has_the_front_end_that_it_had(dtype):
    tensors = {name: value.to(dtype) for name, value in checkpoint("original").items()}
    model, _ = published.convert(ced_from_tensors, tensors, "half")
    assert model.dtype == torch.float32
    other = {**tensors, WINDOW: torch.hann_window(512, periodic=False).to(dtype)}
    with pytest.raises(ValueError, match=r"spectrogram.window"):
        published.convert(ced_from_tensors, other, "half")


def test_the_converted_encoder_equals_the_original_with_or_without_head():
    encoder = published.random(published.ced_encoder())
    for layout in (lambda tensors, head: {**tensors, **head}, *LAYOUTS.values()):
        for head in ({}, published.random(published.ced_head())):
            model, aside = published.convert(ced_from_tensors, layout(encoder, head), "file")
            assert aside.get("tagging head", 0) == len(head)
            torch.testing.assert_close(model.state_dict(), encoder, atol=0, rtol=0)
    # The encoder is a copy: training it does not change the checkpoint.
    with torch.no_grad():
        model.norm.weight.zero_()
    assert encoder["norm.weight"].abs().sum() > 0
