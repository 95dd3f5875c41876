"""Recognition of checkpoints: every layout is recognised and converted, and all other files are rejected."""

import json
from pathlib import Path
from typing import Any

import builders
import open_clip_folders as folders
import published_layouts as published
import pytest
import torch
from safetensors.torch import save_file
from transformers import BertModel, ClapAudioModel, ClapModel, GPT2Model, M2M100ForConditionalGeneration

from modeling_supclap import (
    CEDFeatureExtractor,
    CEDModel,
    CNN14Model,
    MSCLAPFeatureExtractor,
    SonarTextModel,
    SupCLAPModel,
)
from modeling_supclap.conversion.files import Checkpoint, read_checkpoint
from modeling_supclap.conversion.layouts import LAYOUTS, convert_checkpoint, recognise

ENCODER = published.random(published.ced_encoder())
DASHENG = published.random(published.ced_encoder(dasheng=True))
HEAD = published.random(published.ced_head())
SONAR = published.random(published.sonar_hub())
LEGACY = {"version": torch.ones(1), "embed_positions._float_tensor": torch.ones(1)}


CHECKPOINTS = {
    "CLAP2, OpenCLIP": lambda: folders.tensors("A"),
    "ML-CLAP": published.small_ml_clap,
    "GLAP": published.small_glap,
    "LAION-CLAP, authors' file": lambda: published.laion(
        ClapModel(published.laion_config()), published.slaney_filters(48_000)
    ),
    "CLAP, Hub": lambda: builders.clap_model().state_dict(),
    "MS-CLAP 2023": lambda: published.small_msclap(2023),
    "MS-CLAP 2022": lambda: published.small_msclap(2022),
    "Dasheng": lambda: published.ced_original(DASHENG, {}),
    "CED": lambda: published.ced_original(ENCODER, HEAD),
    "SONAR": lambda: published.fairseq2(SONAR),
}
VARIANTS = [
    ("CED", lambda: published.ced_hub(ENCODER, HEAD)),
    ("CED", lambda: ENCODER),
    ("Dasheng", lambda: published.ced_hub(DASHENG, {})),
    ("SONAR", lambda: {**SONAR, **LEGACY}),
    ("SONAR", lambda: {f"encoder.{name}": value for name, value in SONAR.items()}),
    # Without the temperature it is still recognised as ML-CLAP, and the converter names the missing tensor.
    ("ML-CLAP", lambda: {n: v for n, v in published.small_ml_clap().items() if n != "temperature"}),
]


def checkpoint(tensors, config=None, folder: Path = Path("nowhere"), **kwargs) -> Checkpoint:
    """Return a checkpoint without files, with the hash of empty data."""
    made = Checkpoint("the origin", (folder / "x.pt",), tensors, config or {}, **kwargs)
    made.__dict__["sha256"] = "0" * 64
    return made


def translation() -> M2M100ForConditionalGeneration:
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "d_model": 64}
    return M2M100ForConditionalGeneration(builders.sonar_config(**sizes))


def test_every_layout_has_its_checkpoint_here():
    assert {layout.name for layout in LAYOUTS} == set(CHECKPOINTS)


@pytest.mark.parametrize(("name", "tensors"), [*CHECKPOINTS.items(), *VARIANTS])
def test_it_is_recognised(name, tensors):
    assert recognise(tensors(), "x").name == name


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: builders.supclap_model().state_dict(), "layout"),
        (lambda: translation().state_dict(), "layout"),
        (lambda: translation().model.state_dict(), r"decoder\.embed_tokens"),
    ],
)
def test_a_model_of_another_kind_is_never_half_converted(tensors, message):
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(checkpoint(tensors()))


def test_the_error_of_an_unknown_layout_lists_the_known_ones():
    tensors = dict.fromkeys(["roberta.encoder.layer.0.x", "zebra", "conv1.weight"], torch.ones(1))
    with pytest.raises(ValueError, match="the origin") as caught:
        convert_checkpoint(checkpoint(tensors))
    told = str(caught.value)
    assert "'conv1.weight', 'roberta.encoder.layer.0.x', 'zebra'" in told
    assert all(layout.name in told for layout in LAYOUTS)


# ---- parts ----


@pytest.mark.parametrize(
    ("name", "kind", "counts"),
    [
        (
            "ML-CLAP",
            SupCLAPModel,
            {"logit_scale": 1, "audio_model": 23, "text_model": 19, "audio_projection": 4, "text_projection": 4},
        ),
        ("MS-CLAP 2022", SupCLAPModel, None),
        ("CED", CEDModel, {"audio_model": 23}),
        ("Dasheng", CEDModel, {"audio_model": 23}),
        ("SONAR", SonarTextModel, {"text_model": 19}),
    ],
)
def test_parts_are_counted(name, kind, counts):
    conversion = convert_checkpoint(checkpoint(CHECKPOINTS[name]()))
    assert type(conversion.model) is kind
    if counts is not None:
        assert {each.part: each.tensors for each in conversion.parts} == counts
    total = sum(parameter.numel() for parameter in conversion.model.parameters())
    assert sum(each.parameters for each in conversion.parts) == total
    assert {(each.source, each.sha256, each.layout) for each in conversion.parts} == {("the origin", "0" * 64, name)}
    assert (conversion.feature_extractor is None) == (kind is SonarTextModel)
    assert conversion.reads_text == (kind is not CEDModel)


def test_the_towers_are_those_of_their_own_checkpoints():
    for tensors, part, kind, counts, expected in (
        (published.small_ml_clap(), "audio_model", CEDModel, 23, ENCODER),
        (published.small_ml_clap(), "text_model", SonarTextModel, 19, SONAR),
        (published.small_glap(), "audio_model", CEDModel, 23, DASHENG),
        (published.small_msclap(2023), "audio_model", ClapAudioModel, None, {}),
        (published.small_msclap(2023), "text_model", GPT2Model, 16, {}),
        (published.small_msclap(2022), "audio_model", CNN14Model, 79, {}),
        (published.small_msclap(2022), "text_model", BertModel, None, {}),
    ):
        tower = convert_checkpoint(checkpoint(tensors)).model.get_submodule(part)
        assert type(tower) is kind
        assert counts in (None, len(tower.state_dict()))
        assert all(torch.equal(tower.state_dict()[name], value) for name, value in expected.items())


def test_licenses_are_those_of_the_checkpoint_and_nothing_is_permitted_in_their_place():
    licenses = {part.part: part.license for part in convert_checkpoint(checkpoint(published.small_ml_clap())).parts}
    assert licenses["text_model"] == "cc-by-nc-4.0"
    assert licenses["audio_model"] == licenses["logit_scale"] == ""
    # The licence in the card of the whole model does not apply to the part that was trained from SONAR.
    glap = convert_checkpoint(checkpoint(published.small_glap(), license="apache-2.0")).parts
    assert {part.license for part in glap if part.part == "text_model"} == {"cc-by-nc-4.0"}
    assert {part.license for part in glap if part.part != "text_model"} == {"apache-2.0"}
    tensors = published.ced_hub(ENCODER, HEAD)
    assert convert_checkpoint(checkpoint(tensors)).parts[0].license == "", "it may be anybody's"
    assert convert_checkpoint(checkpoint(tensors, license="mit")).parts[0].license == "mit"


def test_feature_extractors_are_those_of_the_towers():
    assert convert_checkpoint(checkpoint(published.small_glap())).feature_extractor.min_frames == 4
    extractor = convert_checkpoint(checkpoint(published.small_msclap(2022))).feature_extractor
    assert type(extractor) is MSCLAPFeatureExtractor


def test_an_unused_fusion_is_reported():
    plain, fused = (
        published.laion(ClapModel(published.laion_config(each)), published.slaney_filters(48_000))
        for each in (False, True)
    )
    assert "fusion" not in convert_checkpoint(checkpoint(plain)).remark
    assert "fusion of long clips is not used" in convert_checkpoint(checkpoint(fused)).remark


# ---- what lies beside the weights ----


def ced_folder(folder: Path, extractor: dict[str, Any], **fields) -> Checkpoint:
    config = {**builders.PUBLISHED_CED_CONFIG, "embed_dim": 64, "depth": 1, "num_heads": 1, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    if extractor:
        (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    save_file(published.ced_hub(ENCODER, HEAD), folder / "model.safetensors", metadata={"format": "pt"})
    return read_checkpoint(folder)


PREPROCESSOR = {"f_max": None, "f_min": 0, "feature_extractor_type": "CedFeatureExtractor", "feature_size": 64}
PREPROCESSOR |= {
    "hop_size": 160,
    "n_fft": 512,
    "win_size": 512,
    "sampling_rate": 16000,
    "return_attention_mask": False,
}


@pytest.mark.parametrize("extractor", [{}, PREPROCESSOR, {**PREPROCESSOR, "f_max": 8000}])
def test_a_ced_folder(tmp_path, extractor):
    conversion = convert_checkpoint(ced_folder(tmp_path, extractor))
    assert type(conversion.feature_extractor) is CEDFeatureExtractor
    assert conversion.feature_extractor.hop_size == 160


@pytest.mark.parametrize(("extractor", "hop"), [({}, 320), (PREPROCESSOR, 160)])
def test_the_extractor_of_a_ced_folder_comes_before_its_configuration(tmp_path, extractor, hop):
    assert convert_checkpoint(ced_folder(tmp_path, extractor, hop_size=320)).feature_extractor.hop_size == hop


@torch.no_grad()
def test_a_clap_folder(tmp_path):
    clap = builders.clap_model()
    clap.save_pretrained(tmp_path)
    builders.clap_processor().save_pretrained(tmp_path)
    conversion = convert_checkpoint(read_checkpoint(tmp_path))
    assert type(conversion.feature_extractor) is type(builders.clap_processor().feature_extractor)
    features = torch.randn(1, 1, 101, 32, generator=torch.Generator().manual_seed(0))
    ours = conversion.model.get_audio_features(features, is_longer=torch.zeros(1, 1)).pooler_output
    theirs = clap.get_audio_features(features, is_longer=torch.zeros(1, 1)).pooler_output
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert conversion.set_aside == {"logit scale of the text direction": 1}
    with pytest.raises(ValueError, match=r"config\.json"):
        convert_checkpoint(checkpoint(clap.state_dict()))
