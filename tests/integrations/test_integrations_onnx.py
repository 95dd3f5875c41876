"""ONNX graphs: equal outputs for lengths, sizes and masks that the check of the export does not cover."""

import json
import re
import sys
from importlib.util import find_spec

import builders
import numpy as np
import pytest
import torch

from modeling_supclap import SupCLAPProcessor
from modeling_supclap.conversion import supclap_from_clap
from modeling_supclap.integrations import onnx as onnx_export
from modeling_supclap.integrations.onnx import check_parity, export_onnx
from modeling_supclap.recipes import export_onnx as recipe

pytestmark = pytest.mark.skipif(
    find_spec("onnxscript") is None or find_spec("onnxruntime") is None, reason="the extra onnx is not installed"
)

CHUNK_SAMPLES = 1012 * 160


def tiny(kind):
    if kind == "sonar":
        return builders.supclap_model(
            builders.supclap_config(builders.sonar_config(encoder_layers=1))
        ), builders.nllb_processor()
    audio = builders.ced_config(depth=1, pad_last=kind != "dropped", initializer_range=0.3)
    pooling = {"text_pooling": "pooler"} if kind == "dropped" else {}
    model = builders.supclap_model(builders.supclap_config(audio=audio, logit_bias=-10.0, **pooling))
    return model, builders.bert_processor()


@pytest.fixture(scope="module")
def by_call(tmp_path_factory):
    """Model in half precision, exported with the function to graphs in full precision."""
    model, processor = tiny("bert")
    folder = tmp_path_factory.mktemp("onnx") / "out"
    model.to(torch.bfloat16)
    export_onnx(model, processor, folder)
    assert model.dtype == torch.bfloat16
    return model.float(), processor, folder


@pytest.fixture(scope="module")
def by_recipe(tmp_path_factory):
    """Saved model, exported with the recipe."""
    model, processor = tiny("sonar")
    place = tmp_path_factory.mktemp("recipe")
    model.save_pretrained(place / "model")
    processor.save_pretrained(place / "model")
    recipe.main([str(place / "model"), "--out", str(place / "deep" / "out")])
    return model, processor, place / "deep" / "out"


@pytest.fixture(scope="module", params=[pytest.param("by_call", marks=pytest.mark.slow), "by_recipe"])
def exported(request):
    model, processor, folder = request.getfixturevalue(request.param)
    onnxruntime = pytest.importorskip("onnxruntime")
    sessions = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("audio", "text")}
    return model, processor, folder, sessions


@pytest.mark.parametrize(
    "samples",
    [
        [2400],
        [16000] * 3,
        [2400, 31234, 100_000],
        [CHUNK_SAMPLES - 161],
        [CHUNK_SAMPLES],
        [CHUNK_SAMPLES + 2000, 2400],
        [5 * CHUNK_SAMPLES + 77, CHUNK_SAMPLES, 40_000, 2 * CHUNK_SAMPLES - 160],
    ],
    ids=lambda samples: "-".join(map(str, samples)),
)
def test_recordings(exported, samples):
    model, processor, _, sessions = exported
    clips = [builders.noise(count, seed=index) for index, count in enumerate(samples)]
    inputs = processor(audio=clips, sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_audio_features(**inputs).pooler_output.numpy()
    (embeds,) = sessions["audio"].run(None, {name: value.numpy() for name, value in inputs.items()})
    np.testing.assert_allclose(embeds, expected, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(embeds, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("texts", [["dog"], list(builders.CAPTIONS.values()), ["rain " * 600, "dog"]], ids=len)
def test_texts(exported, texts):
    model, processor, _, sessions = exported
    inputs = processor(text=texts, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_text_features(**inputs).pooler_output.numpy()
    given = {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")}
    (embeds,) = sessions["text"].run(None, given)
    np.testing.assert_allclose(embeds, expected, atol=1e-4)


def test_the_folder(exported):
    model, processor, folder, _ = exported
    facts = json.loads((folder / "onnx.json").read_text())
    assert facts["logit_scale"] == pytest.approx(model.logit_scale.exp().item())
    assert facts["logit_bias"] == (None if model.logit_bias is None else -10.0)
    assert {entry["graph"] for entry in facts["parity"]} == {"audio", "text"}
    assert 0 < max(entry["difference"] for entry in facts["parity"]) <= 1e-4
    loaded = SupCLAPProcessor.from_pretrained(folder)
    assert loaded(text="dog")["input_ids"] == processor(text="dog")["input_ids"]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_other_weights_fail_the_check(exported, tmp_path):
    model, processor, folder, _ = exported
    other = builders.supclap_model(model.config, seed=1)
    with pytest.raises(ValueError, match=r"\.onnx.*\d+ x \d+"):
        check_parity(other, processor, folder)


def test_a_traced_model_drops_chunks_that_are_not_full():
    """The tests above cover the default, in which the last chunk is padded."""
    model, _ = tiny("dropped")
    model.set_attn_implementation("eager")
    example = (torch.zeros(2, 64, 1200), torch.ones(2, 1200, dtype=torch.long))
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free, 2: free}, {0: free, 1: free})
    traced = torch.export.export(
        onnx_export.Graph(model, "audio"), example, dynamic_shapes=shapes, strict=False
    ).module()

    for frames in (1013, 2023, 2024, 2500):
        features = torch.randn(3, 64, frames) * 20 - 40
        mask = (torch.arange(frames) < torch.tensor([[frames], [max(16, frames // 2)], [16]])).long()
        with torch.no_grad():
            expected = model.get_audio_features(features, mask).pooler_output
            torch.testing.assert_close(traced(features, mask), expected, atol=1e-5, rtol=0)


def test_the_code_of_the_readme_runs(by_recipe, monkeypatch, capsys):
    model, processor, folder = by_recipe
    (block,) = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), flags=re.M | re.S)
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    assert "(2, 2)" in capsys.readouterr().out
    inputs = processor(audio=names["clips"], text=["a dog barks", "the rain falls"], sampling_rate=16000)
    with torch.no_grad():
        expected = model(**inputs.convert_to_tensors("pt")).logits_per_audio.numpy()
    np.testing.assert_allclose(names["logits"], expected, atol=1e-3)


def test_nothing_is_written_when_the_check_fails(tmp_path, monkeypatch):
    model, processor = tiny("bert")
    monkeypatch.setattr(onnx_export, "_export", lambda graph, inputs, path: path.write_text("no graph"))

    def fail(*args, **kwargs):
        raise ValueError("audio.onnx differs")

    monkeypatch.setattr(onnx_export, "check_parity", fail)
    with pytest.raises(ValueError, match=r"audio\.onnx"):
        export_onnx(model, processor, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_a_model_is_not_written_over(tmp_path):
    model, processor = tiny("bert")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("the model card")
    with pytest.raises(ValueError, match=r"README\.md"):
        recipe.main([str(tmp_path), "--out", str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == "the model card"
    assert not (tmp_path / "audio.onnx").exists()


def test_another_audio_tower_is_refused(tmp_path):
    model = supclap_from_clap(builders.clap_model())
    with pytest.raises(ValueError, match="ClapAudioModel"):
        export_onnx(model, builders.bert_processor(), tmp_path / "out")


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r'pip install "supclap\[onnx\]"'):
        export_onnx(*tiny("bert"), tmp_path / "out")
