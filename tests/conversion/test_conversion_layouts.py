"""Which checkpoint it is: every layout is recognised, converted or refused by name, and nothing else passes."""

import json
from pathlib import Path

import builders
import published_layouts as published
import pytest
import torch
import torchaudio
from safetensors.torch import save_file
from transformers import ClapModel, M2M100ForConditionalGeneration

from modeling_supclap import CEDFeatureExtractor, CEDModel, SonarTextModel, SupCLAPModel
from modeling_supclap.conversion.files import Checkpoint, read_checkpoint
from modeling_supclap.conversion.layouts import LAYOUTS, convert_checkpoint, recognise

ENCODER = published.random(published.ced_encoder())
HEAD = published.random(published.ced_head())
SONAR = published.random(published.sonar_hub())
FILTERS = torchaudio.functional.melscale_fbanks(513, 50.0, 14_000.0, 64, 48_000, norm="slaney", mel_scale="slaney")


def ml_clap() -> dict[str, torch.Tensor]:
    joint = published.random(published.ml_clap_joint())
    return published.ml_clap(published.ced_original(ENCODER, HEAD), published.fairseq2(SONAR), joint, 0.07)


def glap() -> dict[str, torch.Tensor]:
    """ML-CLAP's names without a temperature, and Dasheng's patches."""
    tensors = ml_clap()
    del tensors["temperature"]
    return {**tensors, "audio_encoder.model.patch_embed.proj.weight": torch.ones(64, 1, 64, 4)}


def translation(prefix: str) -> dict[str, torch.Tensor]:
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    tensors = M2M100ForConditionalGeneration(builders.sonar_config(**sizes)).state_dict()
    return {name.removeprefix("model." if not prefix else ""): value for name, value in tensors.items()}


def names(*given: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1) for name in given}


MSCLAP = ("caption_encoder.projection.linear1.weight", "audio_encoder.projection.linear1.weight", "logit_scale")
CHECKPOINTS = {
    "ML-CLAP": ml_clap,
    "GLAP": glap,
    "LAION-CLAP, authors' file": lambda: published.laion(ClapModel(published.laion_config()), FILTERS),
    "CLAP, Hub": lambda: builders.clap_model().state_dict(),
    "MS-CLAP 2023": lambda: names("audio_encoder.base.htsat.bn0.weight", *MSCLAP),
    "MS-CLAP 2022": lambda: names("audio_encoder.base.conv_block1.conv1.weight", *MSCLAP),
    "Dasheng": lambda: {**published.ced_original(ENCODER, {}), "patch_embed.proj.weight": torch.ones(64, 1, 64, 4)},
    "CED, authors' file": lambda: published.ced_original(ENCODER, HEAD),
    "CED, Hub": lambda: published.ced_hub(ENCODER, HEAD),
    "a model with a text decoder": lambda: translation("model."),
    "SONAR, fairseq2": lambda: published.fairseq2(SONAR),
    "SONAR, legacy fairseq": lambda: {
        **SONAR,
        "version": torch.ones(1),
        "embed_positions._float_tensor": torch.ones(1),
    },
    "SONAR, Hub": lambda: SONAR,
    "SupCLAPModel": lambda: builders.supclap_model().state_dict(),
}


def checkpoint(tensors, config=None, folder: Path = Path("nowhere")) -> Checkpoint:
    """One whose files do not exist, with the hash of nothing."""
    made = Checkpoint("the source", (folder / "x.pt",), tensors, config or {})
    made.__dict__["sha256"] = "0" * 64
    return made


def test_every_layout_has_its_checkpoint_here():
    assert {layout.name for layout in LAYOUTS} == set(CHECKPOINTS)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_is_recognised(name):
    assert recognise(CHECKPOINTS[name](), "x").name == name


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("CED, Hub", lambda: ENCODER),
        ("SONAR, Hub", lambda: {f"encoder.{name}": value for name, value in SONAR.items()}),
        ("a model with a text decoder", lambda: translation("")),
        ("a model with a text decoder", lambda: names("decoder_frontend.embed.weight", "decoder.layers.0.x")),
        ("SupCLAPModel", lambda: {f"model.{n}": v for n, v in builders.supclap_model().state_dict().items()}),
        # Without its temperature it is still ML-CLAP, and the converter says what is missing.
        ("ML-CLAP", lambda: {n: v for n, v in ml_clap().items() if n != "temperature"}),
    ],
)
def test_variants_are_recognised(name, tensors):
    assert recognise(tensors(), "x").name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GLAP", "its audio tower is Dasheng, whose patches are 64 x 4.*the part 'text'"),
        ("MS-CLAP 2023", "its text tower is GPT-2"),
        ("MS-CLAP 2022", "its audio tower is the convolutional Cnn14"),
        ("Dasheng", "its patches are 64 x 4, CED's are 16 x 16"),
        ("a model with a text decoder", "the encoder of a translation model is not SONAR's"),
        ("SupCLAPModel", r"load it with SupCLAPModel\.from_pretrained"),
    ],
)
def test_what_no_model_of_ours_can_hold_is_named(name, message):
    with pytest.raises(ValueError, match=f"the source is laid out as {name}: .*{message}"):
        convert_checkpoint(checkpoint(CHECKPOINTS[name]()))


def test_refused_and_converted_layouts_do_not_overlap():
    for layout in LAYOUTS:
        assert (layout.convert is None) == bool(layout.refusal), layout.name


def test_an_unknown_layout_is_told_what_is_known():
    tensors = names("roberta.encoder.layer.0.x", "zebra", "conv1.weight")
    with pytest.raises(ValueError, match=r"the source is of no layout") as caught:
        convert_checkpoint(checkpoint(tensors))
    told = str(caught.value)
    assert "its 3 tensors are conv1.weight, roberta.encoder.layer.0.x, zebra" in told
    assert all(layout.name in told for layout in LAYOUTS if layout.kind != "other")


def test_a_kind_is_kept_to():
    source = checkpoint(published.ced_original(ENCODER, HEAD))
    assert convert_checkpoint(source, "ced").layout == "CED, authors' file"
    with pytest.raises(ValueError, match="is laid out as CED, authors' file, which is of kind 'ced' and not 'sonar'"):
        convert_checkpoint(source, "sonar")
    with pytest.raises(ValueError, match="there is no kind 'clap'; give auto or one of ced, sonar, ml-clap"):
        convert_checkpoint(source, "clap")


# ---- parts ----


@pytest.mark.parametrize(
    ("name", "part", "kind", "counts"),
    [
        (
            "ML-CLAP",
            "whole",
            SupCLAPModel,
            {"logit_scale": 1, "audio_model": 23, "text_model": 19, "audio_projection": 4, "text_projection": 4},
        ),
        ("ML-CLAP", "audio", CEDModel, {"audio_model": 23}),
        ("ML-CLAP", "text", SonarTextModel, {"text_model": 19}),
        ("GLAP", "text", SonarTextModel, {"text_model": 19}),
        ("CED, authors' file", "whole", CEDModel, {"audio_model": 23}),
        ("CED, Hub", "audio", CEDModel, {"audio_model": 23}),
        ("SONAR, fairseq2", "whole", SonarTextModel, {"text_model": 19}),
        ("SONAR, legacy fairseq", "text", SonarTextModel, {"text_model": 19}),
    ],
)
def test_parts_are_counted(name, part, kind, counts):
    conversion = convert_checkpoint(checkpoint(CHECKPOINTS[name]()), part=part)
    assert type(conversion.model) is kind
    assert {each.part: each.tensors for each in conversion.parts} == counts
    total = sum(parameter.numel() for parameter in conversion.model.parameters())
    assert sum(each.parameters for each in conversion.parts) == total
    assert {(each.source, each.sha256, each.layout) for each in conversion.parts} == {("the source", "0" * 64, name)}
    assert (conversion.feature_extractor is None) == (kind is SonarTextModel)


def test_the_towers_are_those_of_the_whole():
    for part, expected in (("audio", ENCODER), ("text", SONAR)):
        state = convert_checkpoint(checkpoint(ml_clap()), part=part).model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    text = convert_checkpoint(checkpoint(glap()), part="text").model.state_dict()
    assert all(torch.equal(text[name], value) for name, value in SONAR.items())


@pytest.mark.parametrize(("name", "part"), [("CED, Hub", "text"), ("SONAR, Hub", "audio")])
def test_a_tower_has_no_other_tower(name, part):
    with pytest.raises(ValueError, match=f"{name} has no {part} tower; it is a single"):
        convert_checkpoint(checkpoint(CHECKPOINTS[name]()), part=part)
    with pytest.raises(ValueError, match="there is no part 'half'"):
        convert_checkpoint(checkpoint(CHECKPOINTS[name]()), part="half")


def test_licenses_are_those_of_the_source_and_nothing_is_permitted_in_its_place():
    licenses = {part.part: part.license for part in convert_checkpoint(checkpoint(ml_clap())).parts}
    assert licenses["text_model"] == "cc-by-nc-4.0"
    assert licenses["audio_model"] == licenses["logit_scale"] == ""
    hub = Checkpoint("x", (Path("x"),), published.ced_hub(ENCODER, HEAD), {})
    hub.__dict__["sha256"] = ""
    assert convert_checkpoint(hub).parts[0].license == "", "it may be anybody's"
    stated = Checkpoint("x", (Path("x"),), hub.tensors, {}, license="mit")
    stated.__dict__["sha256"] = ""
    assert convert_checkpoint(stated).parts[0].license == "mit"


def test_what_is_set_aside_is_counted():
    assert convert_checkpoint(checkpoint(ml_clap())).set_aside == {"tagging head": 4, "front end, which agrees": 2}
    assert convert_checkpoint(checkpoint(CHECKPOINTS["CED, Hub"]())).set_aside == {"tagging head": 4}
    legacy = convert_checkpoint(checkpoint(CHECKPOINTS["SONAR, legacy fairseq"]()))
    assert legacy.set_aside == {"constants of fairseq": 2}


# ---- what lies beside the weights ----


def ced_folder(folder: Path, extractor: dict, **fields) -> Checkpoint:
    config = {**builders.PUBLISHED_CED_CONFIG, "embed_dim": 64, "depth": 1, "num_heads": 1, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    if extractor:
        (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    save_file(published.ced_hub(ENCODER, HEAD), folder / "model.safetensors", metadata={"format": "pt"})
    return read_checkpoint(folder)


PREPROCESSOR = {"f_max": None, "f_min": 0, "feature_extractor_type": "CedFeatureExtractor", "feature_size": 64}
PREPROCESSOR |= {"hop_size": 160, "n_fft": 512, "win_size": 512, "sampling_rate": 16000, "return_attention_mask": False}


@pytest.mark.parametrize("extractor", [{}, PREPROCESSOR, {**PREPROCESSOR, "f_max": 8000}])
def test_a_ced_folder(tmp_path, extractor):
    conversion = convert_checkpoint(ced_folder(tmp_path, extractor))
    assert type(conversion.feature_extractor) is CEDFeatureExtractor
    assert conversion.feature_extractor.hop_size == 160


@pytest.mark.parametrize(
    ("extractor", "fields", "message"),
    [
        ({}, {"hop_size": 320}, r"feature extractor and config.json differ in \{'hop_size': \(160, 320\)\}"),
        ({**PREPROCESSOR, "f_min": 50}, {}, r"differ in \{'f_min': \(50, 0\)\}"),
        (PREPROCESSOR, {"f_max": 7000}, r"differ in \{'f_max': \(8000.0, 7000\)\}"),
    ],
)
def test_a_ced_folder_that_contradicts_itself(tmp_path, extractor, fields, message):
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(ced_folder(tmp_path, extractor, **fields))


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
    assert conversion.set_aside == {"scale from text to audio": 1}
    tensors = {name: value for name, value in clap.state_dict().items() if not name.endswith("position_ids")}
    without = Checkpoint("x", (tmp_path / "model.safetensors",), tensors, clap.config.to_dict())
    state = convert_checkpoint(without).model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in conversion.model.state_dict().items())
    del tensors["text_projection.linear1.bias"]
    with pytest.raises(ValueError, match=r"x does not fit ClapModel: it lacks 1 \(text_projection.linear1.bias\)"):
        convert_checkpoint(without)
    with pytest.raises(ValueError, match=r"has no config.json of a CLAP beside its weights; give its whole folder"):
        convert_checkpoint(checkpoint(clap.state_dict()))
