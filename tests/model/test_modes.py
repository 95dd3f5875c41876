"""Modes of running a model: compiled, with activation checkpointing, and on several devices or disk."""

import shutil
import warnings

import builders
import open_clip_folders as folders
import pytest
import torch
import transformers

from modeling_supclap import SupCLAPModel

# Lengths of the clips of a batch in frames: one chunk of CED, and several.
LENGTHS = {"alone": None, "padded": [120, 50], "several chunks": [1500, 50]}


def audio_inputs(lengths: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    own = LENGTHS[lengths]
    features = -40 + 20 * torch.randn(2, 64, own[0] if own else 120)
    if own is None:
        return {"input_features": features}
    mask = torch.arange(own[0]) < torch.tensor(own).unsqueeze(1)
    return {"input_features": features, "audio_attention_mask": mask.long()}


def text_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    ids = torch.randint(5, 50, (2, 7)) * mask + (1 - mask)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def clap2_model() -> SupCLAPModel:
    return folders.build("C")[0]


# ---- torch.compile ----

CLAP2 = ["A", *(pytest.param(name, marks=pytest.mark.slow) for name in folders.MODELS if name != "A")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def shallow(request) -> SupCLAPModel:
    """A model with one block in each tower, because all blocks have the same graph."""
    if request.param in folders.MODELS:
        return folders.build(request.param)[0]
    text = (
        builders.sonar_config(encoder_layers=1)
        if request.param == "sonar"
        else builders.bert_config(num_hidden_layers=1)
    )
    return builders.supclap_model(builders.supclap_config(text, builders.ced_config(depth=1)))


@pytest.mark.parametrize("shallow", ["bert", "sonar", *CLAP2], indirect=True)
def test_a_model_is_one_graph_and_trains(shallow):
    if transformers.__version__.startswith("5.17.") and shallow.config.text_config.model_type == "m2m_100":
        pytest.skip("transformers 5.17 asks a random number in M2M100's graph whether to drop a layer, in training")
    inputs = {**audio_inputs("padded"), **text_inputs(), "return_loss": True}
    shallow.train()(**inputs).loss.backward()
    expected = {name: weight.grad for name, weight in shallow.named_parameters()}
    shallow.zero_grad(set_to_none=True)
    # fullgraph: a graph break is an error.
    torch.compile(shallow, backend="eager", fullgraph=True)(**inputs).loss.backward()
    for name, weight in shallow.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shallow", ["bert"], indirect=True)
@pytest.mark.parametrize(
    ("lengths", "attention"), [("alone", "sdpa"), ("several chunks", "sdpa"), ("several chunks", "eager")]
)
@torch.no_grad()
def test_ced_is_one_graph_for_any_batch(shallow, lengths, attention):
    """A traced model also computes chunks beyond the end of a clip, and excludes them from the mean."""
    shallow.set_attn_implementation(attention)
    inputs = audio_inputs(lengths)
    compiled = torch.compile(shallow.audio_model, backend="eager", fullgraph=True)(**inputs)
    for name, expected in shallow.audio_model(**inputs).items():
        torch.testing.assert_close(compiled[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shallow", ["bert", *CLAP2], indirect=True)
@torch.no_grad()
def test_an_exported_model_accepts_any_number_of_clips(shallow):
    """`torch.export` with default settings, in which `len(tensor)` is a constant but `tensor.shape` is dynamic."""
    towers = [(shallow.audio_model, audio_inputs("padded"))]
    if shallow.config.text_config.model_type == "modern_text":
        towers.append((shallow.text_model, text_inputs()))
    for tower, inputs in towers:
        rows = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
        program = torch.export.export(tower, (), inputs, dynamic_shapes=rows, strict=False)
        three = {name: values[[0, 1, 1]] for name, values in inputs.items()}
        found, expected = program.module()(**three), tower(**three)
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "clap2_model"])
@torch.no_grad()
def test_one_graph_serves_clips_of_several_lengths(kind, request):
    model = request.getfixturevalue(kind)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.audio_model, backend="eager", fullgraph=True, dynamic=True)
    for frames in (70, 120, 333):
        features = audio_inputs("padded")["input_features"][..., :1].expand(2, 64, frames)
        mask = torch.arange(frames).expand(2, -1) < torch.tensor([[frames], [40]])
        inputs = {"input_features": features.contiguous(), "audio_attention_mask": mask.long()}
        expected = model.audio_model(**inputs).pooler_output
        torch.testing.assert_close(compiled(**inputs).pooler_output, expected, atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["model", "clap2_model"])
@torch.no_grad()
def test_inductor_agrees(kind, request):
    model = request.getfixturevalue(kind)
    inputs = {**audio_inputs("several chunks"), **text_inputs()}
    compiled = torch.compile(model)
    torch.testing.assert_close(
        compiled(**inputs).logits_per_audio, model(**inputs).logits_per_audio, atol=1e-4, rtol=0
    )


# ---- activation checkpointing, with its new and its old name ----


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
@pytest.mark.parametrize("kind", ["model", "sonar_model", "clap2_model"])
def test_checkpointing_under_both_names(kind, name, request):
    model = request.getfixturevalue(kind).train()
    if not hasattr(model, f"{name}_enable"):
        pytest.skip(f"this transformers has no {name}_enable yet")
    inputs = {**audio_inputs("padded"), **text_inputs(), "return_loss": True}
    model(**inputs).loss.backward()
    expected = {key: weight.grad for key, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(model, f"{name}_enable")()
        checkpointed = [type(part).__name__ for part in model.modules() if getattr(part, "gradient_checkpointing", 0)]
        assert {"CEDBlock", "NaFlexBlock"} & set(checkpointed)
        assert {"BertLayer", "M2M100EncoderLayer", "ModernTextBlock"} & set(checkpointed)
        model(**inputs).loss.backward()
        for key, weight in model.named_parameters():
            assert torch.equal(weight.grad, expected[key]), key
        getattr(model, f"{name}_disable")()
        assert not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


# ---- device_map ----

PARTS = ("audio_model", "text_model", "audio_projection", "text_projection", "logit_scale")
DEVICE_MAPS = {
    "cpu": "cpu",
    "auto": "auto",
    "audio on disk": {part: "disk" if part.startswith("audio") else "cpu" for part in PARTS},
    "text on disk": {part: "disk" if part.startswith("text") else "cpu" for part in PARTS},
}


@pytest.mark.parametrize("device_map", DEVICE_MAPS)
@pytest.mark.parametrize("kind", ["model", "sonar_model", "clap2_model"])
@torch.no_grad()
def test_device_map(kind, device_map, request, tmp_path):
    model = request.getfixturevalue(kind)
    model.save_pretrained(tmp_path / "model")
    placed = SupCLAPModel.from_pretrained(
        tmp_path / "model", device_map=DEVICE_MAPS[device_map], offload_folder=tmp_path / "disk"
    )
    if "disk" in device_map:
        assert set(placed.hf_device_map.values()) == {"cpu", "disk"}
        assert any(weight.is_meta for weight in placed.parameters())
    inputs = {**audio_inputs("several chunks"), **text_inputs()}
    assert torch.equal(placed(**inputs).logits_per_audio, model(**inputs).logits_per_audio)
    audio = {name: value for name, value in inputs.items() if "input_features" in name or "audio" in name}
    expected = model.get_audio_features(**audio).pooler_output
    assert torch.equal(placed.get_audio_features(**audio).pooler_output, expected)


def test_blocks_stay_whole_on_a_device(model, sonar_model, clap2_model):
    assert {"CEDBlock", "BertLayer"} <= set(model._no_split_modules)
    assert {"CEDBlock", "M2M100EncoderLayer"} <= set(sonar_model._no_split_modules)
    assert {"NaFlexBlock", "ModernTextBlock"} <= set(clap2_model._no_split_modules)
