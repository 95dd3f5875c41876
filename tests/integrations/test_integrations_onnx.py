"""ONNX graphs: equal outputs for lengths, sizes and masks that the check of the export does not cover."""

import importlib
import json
import logging
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import builders
import numpy as np
import open_clip_folders as folders
import pytest
import soundfile
import torch
from audio_encoders import make_encoder

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import load_model, processor_from_clap, supclap_from_clap
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.integrations import onnx as onnx_export
from modeling_supclap.integrations.onnx import check_parity, export_onnx
from modeling_supclap.processing_supclap import REMOVED_CHARACTERS
from modeling_supclap.recipes import export_onnx as recipe

pytestmark = pytest.mark.skipif(
    find_spec("onnxscript") is None or find_spec("onnxruntime") is None, reason="the extra onnx is not installed"
)

if find_spec("onnxruntime"):
    from modeling_supclap.integrations import serve as serving

CHUNK_SAMPLES = 1012 * 160
_INPUTS = {"audio": ("input_features", "audio_attention_mask"), "text": ("input_ids", "attention_mask")}


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
    recipe.main([str(place / "model"), "--out", str(place / "deep" / "out"), "--no-waveforms"])
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
    parity = facts.pop("parity")
    audio_inputs = {"input_features": ["batch", 64, "frames"], "audio_attention_mask": ["batch", "frames"]}
    text_inputs = {"input_ids": ["batch", "tokens"], "attention_mask": ["batch", "tokens"]}
    tokens, default = processor.language_tokens
    expected_facts = {
        "audio.onnx": {"inputs": audio_inputs, "output": "audio_embeds"},
        "text.onnx": {"inputs": text_inputs, "output": "text_embeds"},
        "projection_dim": 16,
        "fingerprint": facts["fingerprint"],
        "sampling_rate_hz": 16000,
        "min_samples": 2400,
        "chunk_samples": 16000 * 300,
        "caption_prefix": "",
        "plain_captions": False,
        "removed_characters": REMOVED_CHARACTERS,
        "language_tokens": tokens,
        "language_token": default,
        "max_tokens": processor.max_tokens,
        "logit_scale": pytest.approx(model.logit_scale.exp().item()),
        "logit_bias": None if model.logit_bias is None else -10.0,
    }
    assert facts == expected_facts
    graphs = {"audio": [], "text": []}
    for entry in parity:
        graphs[entry["graph"]].append((entry["batch"], entry["length"]))
    assert graphs["audio"] == [(2, 1215), (1, 16), (1, 507), (1, 1011), (1, 1014), (3, 507), (4, 3037)]
    most = processor.max_tokens
    assert [batch for batch, _ in graphs["text"]] == [2, 1, 1, 3, 2, 5]
    extra = graphs["text"][1][1] - 1  # tokens besides the words
    assert [length - extra for _, length in graphs["text"]] == [5, 1, 9, 30, most - extra, 12]
    assert 0 < max(entry["difference"] for entry in parity) <= 1e-4
    loaded = SupCLAPProcessor.from_pretrained(folder)
    assert loaded(text="dog")["input_ids"] == processor(text="dog")["input_ids"]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_other_weights_fail_the_check(exported, tmp_path):
    model, processor, folder, _ = exported
    other = builders.supclap_model(model.config, seed=1)
    with pytest.raises(ValueError, match=r"\.onnx.*\d+ x \d+"):
        check_parity(other, processor, folder)
    other.load_state_dict(model.state_dict())
    other.text_projection.linear1.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"^text\.onnx is off by nan on \d x \d+ inputs; the tolerance is 1e-04$"):
        check_parity(other, processor, folder)


def test_a_traced_model_drops_chunks_that_are_not_full():
    """The tests above cover the default, in which the last chunk is padded."""
    model, _ = tiny("dropped")
    model.set_attn_implementation("eager")
    example = (torch.zeros(2, 64, 1200), torch.ones(2, 1200, dtype=torch.long))
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free, 2: free}, {0: free, 1: free})
    graph = onnx_export.Graph(model, "audio", ["input_features", "audio_attention_mask"])
    traced = torch.export.export(graph, example, dynamic_shapes=(shapes,), strict=False).module()

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


SERVE = """
import sys
sys.modules |= {"torch": None, "torchaudio": None, "transformers": None, "modeling_supclap": None}
sys.path.insert(0, sys.argv[1])
import numpy as np
from serve import Exported
exported = Exported(sys.argv[1])
texts = [exported.encode_text(["A dog, barks!"], language) for language in sys.argv[2].split(",")]
np.savez(sys.argv[3], text=np.concatenate(texts), audio=exported.encode_files(sys.argv[4:]))
"""


def serve(folder, languages, files):
    """Return the embeddings of `serve.py` in a process that can import neither torch nor transformers."""
    command = [sys.executable, "-c", SERVE, str(folder), ",".join(languages), str(files[0].with_suffix(".npz"))]
    subprocess.run([*command, *map(str, files)], check=True, cwd=folder, timeout=120)
    return np.load(files[0].with_suffix(".npz"))


def test_served_texts_have_the_language_and_the_form_of_captions(by_recipe):
    model, processor, folder = by_recipe
    exported = serving.Exported(folder)
    text = " Le chien, ABOIE\u0301! "
    for language in ("eng", "fra"):
        expected = model.encode_text([text, "la pluie"], processor, language=language)
        np.testing.assert_allclose(exported.encode_text([text, "la pluie"], language), expected, atol=1e-4)
    assert np.abs(exported.encode_text([text]) - exported.encode_text([text], "fra")).max() > 1e-3
    np.testing.assert_array_equal(exported.encode_text([text]), exported.encode_text([text], "eng"))
    exported.facts |= {"caption_prefix": "the sound of "}
    expected = model.encode_text(["the sound of rain"], processor, language="eng")
    np.testing.assert_allclose(exported.encode_text(["rain"]), expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"no language 'ita'; pass one of \['.*'fra'"):
        exported.encode_text(["un cane"], "ita")
    with pytest.raises(ValueError, match="the text ' ' is blank"):
        exported.encode_text([" "])
    exported.facts |= {"caption_prefix": "", "plain_captions": True}
    plain = exported.encode_text(["RAIN,  falls!"])
    np.testing.assert_allclose(plain, model.encode_text(["rain falls"], processor, language="eng"), atol=1e-4)
    exported.facts |= {"language_tokens": {}}
    np.testing.assert_allclose(exported.encode_text(["rain falls"], "ita"), plain, atol=1e-4)


def write_noise(folder, **seconds):
    files = []
    for name, length in seconds.items():
        files.append(folder / f"{name}.wav")
        soundfile.write(files[-1], builders.noise(round(length * 16000), seed=len(files)), 16000, "FLOAT")
    return files


@pytest.mark.process
def test_serving_needs_no_torch(by_recipe, tmp_path):
    model, processor, folder = by_recipe
    processor.plain_captions = True
    try:
        fingerprint = load_embedding_model(model, processor).fingerprint
        export_onnx(model, processor, tmp_path / "out", waveforms=None, fingerprint=fingerprint)
        facts = json.loads((tmp_path / "out" / "onnx.json").read_text())
        assert facts["audio.onnx"]["inputs"] == {"waveform": ["batch", "samples"]}
        files = write_noise(tmp_path, short=0.4, long=23.0)
        found = serve(tmp_path / "out", ["eng", "fra", "zho_Hans"], files)
        expected = model.encode_text(["A dog, barks!"] * 3, processor, language=["eng", "fra", "zho"])
        assert not np.allclose(expected[0], expected[1], atol=1e-3)
        np.testing.assert_allclose(found["text"], expected, atol=1e-4)
        np.testing.assert_allclose(found["audio"], model.encode_audio(files, processor), atol=1e-4)
    finally:
        processor.plain_captions = False
    assert serving.Exported(tmp_path / "out").fingerprint == fingerprint
    with pytest.raises(ValueError, match="'ita'"):
        serving.Exported(tmp_path / "out").encode_text(["un cane"], "ita")
    with pytest.raises(ValueError, match="blank"):
        serving.Exported(tmp_path / "out").encode_text(["?!"])
    with pytest.raises(ValueError, match="--waveforms"):
        serving.Exported(folder).encode_files(files)


def test_a_served_recording_has_chunks_and_a_rate(by_recipe, tmp_path, monkeypatch):
    """The last chunk ends with the recording, and a few samples more make no chunk."""
    exported = serving.Exported(by_recipe[2])
    chunks = []

    class Session:
        def run(self, _, inputs):
            chunks.append(inputs["waveform"][0])
            return [np.array([[np.sqrt(len(chunks[-1])), chunks[-1][0]]])]

    monkeypatch.setattr(exported, "audio", Session(), raising=False)
    exported.facts |= {"audio.onnx": {"inputs": {"waveform": []}}, "chunk_samples": 16000, "min_samples": 100}
    (file,) = write_noise(tmp_path, sound=2.5)
    waveform, _ = soundfile.read(file, dtype="float32")
    exported.encode_files([str(file)])
    assert [len(chunk) for chunk in chunks] == [16000] * 3
    np.testing.assert_array_equal(chunks[2], waveform[-16000:])

    chunks.clear()
    exported.encode_files(list(map(str, write_noise(tmp_path, sound=2.005))))
    assert len(chunks) == 2
    with pytest.raises(ValueError, match="shorter"):
        exported.encode_files(list(map(str, write_noise(tmp_path, sound=0.005))))

    # the least new sound of a last chunk is a hundredth of it
    for samples, count in ((32159, 2), (32160, 3)):
        chunks.clear()
        soundfile.write(tmp_path / "tail.wav", builders.noise(samples), 16000)
        exported.encode_files([str(tmp_path / "tail.wav")])
        assert len(chunks) == count
    soundfile.write(tmp_path / "silent.wav", np.zeros(16000), 16000)
    with pytest.raises(ValueError, match=r"silent\.wav is silent, or shorter than 100 samples"):
        exported.encode_files([str(tmp_path / "silent.wav")])

    chunks.clear()
    sides = np.stack([builders.tone(440.0, 32000), np.zeros(32000)], axis=1)
    soundfile.write(tmp_path / "stereo.wav", np.repeat(sides, 2, axis=0), 32000, "FLOAT")
    embeds = exported.encode_files([str(tmp_path / "stereo.wav")])
    assert [len(chunk) for chunk in chunks] == [16000] * 2
    assert np.abs(np.concatenate(chunks)).max() == pytest.approx(np.abs(sides).max() / 2, abs=0.02)
    mean = np.mean([[np.sqrt(16000), chunk[0]] for chunk in chunks], axis=0)
    assert embeds.shape == (1, 2)
    np.testing.assert_allclose(embeds, [mean / np.linalg.norm(mean)], atol=1e-6)

    for rate_hz, target_hz in ((48000, 16000), (16000, 48000), (44100, 16000)):
        tone, expected = (np.sin(2 * np.pi * 440 * np.arange(rate) / rate) for rate in (rate_hz, target_hz))
        resampled = serving.resample(tone.astype(np.float32), rate_hz, target_hz)
        assert resampled.dtype == np.float32
        np.testing.assert_allclose(resampled, expected, atol=1e-3)


def test_nothing_is_written_when_the_check_fails(tmp_path, monkeypatch):
    model, processor = tiny("bert")
    monkeypatch.setattr(onnx_export, "_export", lambda graph, batches, path: path.write_text("no graph"))

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


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    """Exported CLAP, with the spectrogram and with a prefix for captions."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, processor = builders.pair("converted")
    processor.caption_prefix = "the sound of "
    folder = tmp_path_factory.mktemp("clap")
    checks = export_onnx(model, processor, folder, waveforms=True)
    recipe.write_usage(folder, model, processor, checks)
    return model, processor, folder, onnxruntime.InferenceSession


@pytest.mark.slow
def test_a_clap_needs_no_processor_for_audio(clap):
    model, processor, folder, load = clap
    facts = json.loads((folder / "onnx.json").read_text())
    assert (facts["caption_prefix"], facts["plain_captions"]) == ("the sound of ", False)
    assert facts["text.onnx"]["inputs"] == {"input_ids": ["batch", "tokens"], "attention_mask": ["batch", "tokens"]}
    assert facts["audio.onnx"]["inputs"] == {"waveform": ["batch", "samples"]}

    session, rate_hz = load(folder / "audio.onnx"), facts["sampling_rate_hz"]
    for seconds in (0.01, 0.3, 1.0, 7.7):
        clips = np.stack([builders.noise(round(seconds * rate_hz), seed=index) for index in range(3)])
        (embeds,) = session.run(None, {"waveform": clips})
        first_second = list(clips[:, :rate_hz])  # a window of this model is one second
        expected = model.encode_audio(first_second, processor, sampling_rate=rate_hz)
        np.testing.assert_allclose(embeds, expected, atol=1e-5)


@pytest.mark.slow
def test_the_readme_of_a_graph_of_waveforms_runs(clap, monkeypatch, capsys):
    monkeypatch.chdir(clap[2])
    (block,) = re.findall(r"^```python\n(.*?)^```", Path("README.md").read_text(), flags=re.M | re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert "processor(audio" not in block
    assert "(2, 2)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_graphs_can_be_quantized(clap):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _, processor, folder, load = clap
    texts = processor(text=["a dog barks", "rain"], return_tensors="np")
    inputs = {
        "audio": {"waveform": np.stack([builders.noise(16000, seed=index) for index in range(3)])},
        "text": {name: texts[name] for name in ("input_ids", "attention_mask")},
    }
    for name, values in inputs.items():
        quantize_dynamic(folder / f"{name}.onnx", folder / f"{name}.int8.onnx", weight_type=QuantType.QInt8)
        exact, rounded = (load(folder / f"{name}{kind}.onnx").run(None, values)[0] for kind in ("", ".int8"))
        assert ((exact * rounded).sum(axis=1) > 0.99).all()
        assert not np.array_equal(exact, rounded)

    # The mel filters stay as they are.
    weights = importlib.import_module("onnx").load(folder / "audio.int8.onnx").graph.initializer
    doubles = [tuple(tensor.dims) for tensor in weights if tensor.data_type == tensor.DOUBLE]
    assert tuple(onnx_export.Spectrogram(processor.feature_extractor).bank.shape) in doubles


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ast", "whisper", "wav2vec2", "hubert", "data2vec", "wav2vec2-bert", "cnn14", "converted"]
)
def test_other_audio_towers_are_exported(kind, tmp_path):
    if kind in ("cnn14", "converted"):
        model, processor = builders.pair(kind)
    else:
        encoder, extractor = make_encoder(kind)
        model = SupCLAPModel(builders.supclap_config(audio=encoder.config)).eval()
        processor = SupCLAPProcessor(extractor, builders.bert_tokenizer())
    checks = export_onnx(model, processor, tmp_path)
    assert len({check.batch for check in checks if check.graph == "audio"}) >= 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.slow)
        for each in (("A", "floor"), ("B", "silence"), ("D", "silence"), ("C", "repeat"))
    ],
    ids="-".join,
)
def clap2(request, tmp_path_factory):
    """CLAP2 in OpenCLIP's format, exported with the recipe."""
    onnxruntime = pytest.importorskip("onnxruntime")
    name, fill = request.param
    place = tmp_path_factory.mktemp("clap2")
    settings = folders.write_folder(place / "model", name)
    settings["model_cfg"]["audio_cfg"]["patch_pad_mode"] = fill
    (place / "model" / "open_clip_config.json").write_text(json.dumps(settings))
    recipe.main([str(place / "model"), "--out", str(place / "onnx"), "--no-waveforms"])

    sessions = {}
    for kind in ("audio", "text"):
        sessions[kind] = onnxruntime.InferenceSession(place / "onnx" / f"{kind}.onnx")
    return load_model(str(place / "model")), sessions, place / "onnx"


@pytest.mark.parametrize(
    "samples", [[600], [480 * 19], [480 * 20], [96_000, 17_760, 1], [9607, 48_000, 30_007, 19_207]], ids=str
)
def test_recordings_of_clap2(clap2, samples):
    """A patch has 20 or 16 frames of 480 samples."""
    model, sessions, _ = clap2
    inputs = model.processor(audio=list(map(folders.wave, samples)), sampling_rate=48_000, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_audio_features(**inputs).pooler_output.numpy()
    (embeds,) = sessions["audio"].run(None, {name: value.numpy() for name, value in inputs.items()})
    np.testing.assert_allclose(embeds, expected, atol=1e-5)


@pytest.mark.parametrize("texts", [["w1"], ["w1 w2 w3", "w4", "w5 " * 30], ["w6 w7"] * 5], ids=len)
def test_texts_of_clap2(clap2, texts):
    model, sessions, _ = clap2
    inputs = model.processor(text=texts, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_text_features(**inputs).pooler_output.numpy()
    given = {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")}
    (embeds,) = sessions["text"].run(None, given)
    np.testing.assert_allclose(embeds, expected, atol=1e-5)


def test_the_check_of_clap2_has_no_recordings_of_more_than_32_seconds(clap2):
    parity = json.loads((clap2[2] / "onnx.json").read_text())["parity"]
    lengths = [entry["length"] for entry in parity if entry["graph"] == "audio"]
    assert (min(lengths), max(lengths)) == (3, 3201)  # frames of 10 ms
    assert max(entry["difference"] for entry in parity) < 1e-5


def test_clap2_can_be_quantized(clap2):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model, sessions, folder = clap2
    clips = list(map(folders.wave, (96_000, 17_760)))
    batch = model.processor(audio=clips, sampling_rate=48_000, text=["w1 w2", "w3"], return_tensors="np")
    for kind, names in _INPUTS.items():
        values = {name: batch[name] for name in names}
        small = folder / f"{kind}.int8.onnx"
        quantize_dynamic(folder / f"{kind}.onnx", small, weight_type=QuantType.QInt8)
        exact = sessions[kind].run(None, values)[0]
        rounded = importlib.import_module("onnxruntime").InferenceSession(small).run(None, values)[0]
        assert ((exact * rounded).sum(axis=1) > 0.99).all()
        assert not np.array_equal(exact, rounded)


@pytest.mark.slow
def test_clap2_needs_no_processor_for_audio(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    folders.write_folder(tmp_path / "model", "A")
    model = load_model(str(tmp_path / "model"))
    export_onnx(model, model.processor, tmp_path / "onnx", waveforms=True)
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "audio.onnx")
    for samples in (1, 600, 1025, 50_000):
        clips = np.stack([builders.noise(samples, seed=seed) for seed in (0, 1)])
        (embeds,) = session.run(None, {"waveform": clips})
        np.testing.assert_allclose(embeds, model.encode_audio(list(clips), sampling_rate=48_000), atol=1e-5)


def test_a_tower_that_cannot_be_exported_is_named(tmp_path, monkeypatch):
    model, processor = tiny("bert")

    def forward(self, *args, **kwargs):
        return model.text_projection(torch.ones(int(args[0].sum()), 32)).tolist()

    monkeypatch.setattr(onnx_export.Graph, "forward", forward)
    level = logging.root.manager.disable
    with pytest.raises(ValueError, match=r"audio tower, a CEDModel"):
        export_onnx(model, processor, tmp_path / "out")
    assert logging.root.manager.disable == level
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_large", [True, False])
def test_large_weights_have_a_file_of_their_own_and_no_graph_has_shapes_of_values(tmp_path, monkeypatch, is_large):
    onnx, stored = importlib.import_module("onnx"), []
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xyz"]

    class Program:
        def save(self, path, external_data):
            stored.append(external_data)
            nodes = [onnx.helper.make_node("Identity", [name], [after]) for name, after in ("xy", "yz")]
            graph = onnx.helper.make_graph(nodes, "graph", values[:1], values[2:], value_info=values[1:2])
            onnx.save(onnx.helper.make_model(graph), path)

    monkeypatch.setattr(torch.onnx, "export", lambda *words, **options: Program())
    monkeypatch.setattr(onnx_export, "check_parity", lambda *_: [])
    monkeypatch.setattr(onnx_export, "_LARGEST_FILE_BYTES", 0 if is_large else 10**9)
    export_onnx(*tiny("bert"), tmp_path)
    assert stored == [is_large] * 2
    for name in ("audio", "text"):
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        assert (len(graph.node), len(graph.value_info)) == (2, 0)


@pytest.mark.parametrize(("truncation", "names"), [("rand_trunc", set()), ("fusion", {"is_longer"})])
def test_only_a_fused_clap_has_an_input_for_longer_clips(truncation, names):
    model = builders.clap_model(builders.clap_config({"enable_fusion": truncation == "fusion"}))
    processor = processor_from_clap(builders.clap_processor(truncation))
    for batch in onnx_export._batches(supclap_from_clap(model), processor, waveforms=False)["audio"]:
        assert batch.keys() == {"input_features", *names}


@pytest.mark.parametrize(("kind", "shape"), [("wav2vec2", (2, 16000)), ("ast", (2, 100, 32))])
def test_an_encoder_that_takes_no_mask_has_clips_of_equal_length_in_a_batch(kind, shape, tmp_path, monkeypatch):
    encoder, extractor = make_encoder(kind)
    model = SupCLAPModel(builders.supclap_config(audio=encoder.config)).eval()
    processor = SupCLAPProcessor(extractor, builders.bert_tokenizer())
    batches = onnx_export._batches(model, processor, waveforms=False)["audio"]
    assert {name for batch in batches for name in batch} == {"input_features"}
    assert batches[0]["input_features"].shape == shape
    assert (batches[0]["input_features"] != 0).all()

    def export(graph, batches, path):
        assert (graph.names, graph.spectrogram) == (("input_features",), None)
        raise InterruptedError

    monkeypatch.setattr(onnx_export, "_export", export)
    with pytest.raises(InterruptedError):  # None: with the spectrogram if it can be part of a graph
        export_onnx(model, processor, tmp_path / "out", waveforms=None)
    with pytest.raises(ValueError, match=f"the spectrogram of {type(extractor).__name__} cannot be part"):
        export_onnx(model, processor, tmp_path / "out", waveforms=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_graph_of_a_model_in_half_precision_is_exported_in_float32(tmp_path, monkeypatch, dtype):
    found = []

    def export(graph, batches, path):
        found.extend(tensor.dtype for tensor in graph.state_dict().values() if tensor.is_floating_point())
        assert not graph.model.training
        raise KeyboardInterrupt

    model, processor = tiny("bert")
    monkeypatch.setattr(onnx_export, "_export", export)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(model.to(dtype).train(), processor, tmp_path / "out")
    assert set(found) == {torch.float32}
    assert model.dtype == dtype


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r'pip install "supclap\[onnx\]"'):
        export_onnx(*tiny("bert"), tmp_path / "out")
