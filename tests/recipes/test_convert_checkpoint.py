"""The conversion command: from a published file to a folder for from_pretrained."""

import hashlib
import json
import re
from pathlib import Path

import builders
import open_clip_folders as folders
import published_layouts as published
import pytest
import torch
from processes import run_processes
from safetensors.torch import load_file, save_file
from transformers import ClapModel

from modeling_supclap import CEDConfig, CEDFeatureExtractor, CEDModel, SonarTextModel, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.recipes.convert_checkpoint import main

ROOT = Path(__file__).parents[2]
SONAR = published.random(published.sonar_hub())


def convert(source: Path, out: Path, *options: object) -> None:
    main([str(source), "--out", str(out), *map(str, options)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    builders.nllb_tokenizer().save_pretrained(folder)
    return folder


def golden_ced(folder: Path, layout: str) -> Path:
    """Write CED-tiny with the golden values, in the layout of the authors or of the Hub."""
    model = CEDModel(CEDConfig(**builders.CED_SIZES["tiny"]))
    with torch.no_grad():
        builders.fill(model, 0.08)
    head = published.random(published.ced_head(192))
    if layout == "original":
        torch.save(published.ced_original(model.state_dict(), head), folder / "tiny.pt")
        return folder / "tiny.pt"
    (folder / "config.json").write_text(json.dumps(builders.PUBLISHED_CED_CONFIG))
    save_file(published.ced_hub(model.state_dict(), head), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("layout", "name"), [("original", "CED, 161"), ("hub", "CED, 159")])
@torch.no_grad()
def test_golden_ced(tmp_path, capsys, layout, name):
    (tmp_path / "source").mkdir()
    source = golden_ced(tmp_path / "source", layout)
    convert(source, tmp_path / "out", "--verify")
    printed = capsys.readouterr().out
    assert name in printed
    assert "audio_model      155    5,401,088  " in printed
    assert re.search("\\b4 tensors.*head", printed)
    assert printed.splitlines()[-1] == f"CEDModel is in {tmp_path / 'out'}, verified"
    model, extractor = (
        CEDModel.from_pretrained(tmp_path / "out"),
        CEDFeatureExtractor.from_pretrained(tmp_path / "out"),
    )
    clip = 0.5 * builders.tone(440, 80_000) + 0.25 * builders.tone(1000, 80_000)
    embedding = model(**extractor(clip, sampling_rate=16000, return_tensors="pt")).pooler_output[0]
    assert embedding[:5].tolist() == pytest.approx([0.56050, -0.20951, 0.79064, -0.28509, -0.60179], abs=2e-4)
    (entry,) = json.loads((tmp_path / "out" / "provenance.json").read_text())
    weights = source if layout == "original" else source / "model.safetensors"
    assert entry["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (entry["source"], entry["files"], entry["tensors"]) == (source.name, [weights.name], 155)


def test_ml_clap(tmp_path, capsys, tokenizer):
    torch.save(
        {f"module.{name}": value for name, value in published.small_ml_clap().items()}, tmp_path / "pretrain.pt"
    )
    convert(tmp_path / "pretrain.pt", tmp_path / "out", "--tokenizer", tokenizer, "--verify")
    printed = capsys.readouterr().out
    assert re.search(r"pretrain\.pt.*ML-CLAP.*\b57 tensors", printed)
    assert "SONAR" in printed
    rows = {line.split()[0]: line.split()[-1] for line in printed.splitlines() if "_" in line.split()[0]}
    assert (rows["text_model"], rows["audio_model"]) == ("cc-by-nc-4.0", "stated")
    model, processor = (
        SupCLAPModel.from_pretrained(tmp_path / "out"),
        SupCLAPProcessor.from_pretrained(tmp_path / "out"),
    )
    inputs = processor(audio=builders.tone(300), text="rain", sampling_rate=16000, return_tensors="pt")
    assert model(**inputs).logits_per_audio.shape == (1, 1)


@torch.no_grad()
def test_laion(tmp_path):
    original = published.laion_model()
    tensors = {
        f"module.{name}": value for name, value in published.laion(original, published.slaney_filters(48_000)).items()
    }
    torch.save({"epoch": 3, "state_dict": tensors, "optimizer": {}, "scaler": {}}, tmp_path / "best.pt")
    builders.clap_processor().tokenizer.save_pretrained(tmp_path / "roberta")
    convert(tmp_path / "best.pt", tmp_path / "out", "--tokenizer", tmp_path / "roberta", "--verify")
    model, processor = (
        SupCLAPModel.from_pretrained(tmp_path / "out"),
        SupCLAPProcessor.from_pretrained(tmp_path / "out"),
    )
    inputs = processor(audio=builders.noise(48_000), text="rain", sampling_rate=48_000, return_tensors="pt")
    ours, theirs = model(**inputs), original(**inputs)
    torch.testing.assert_close(ours.logits_per_audio, theirs.logits_per_audio, atol=1e-4, rtol=0)


def test_sonar_with_a_tokenizer_in_the_same_folder(tmp_path, capsys, tokenizer):
    source = tmp_path / "sonar"
    builders.nllb_tokenizer().save_pretrained(source)
    (source / "config.json").write_text(json.dumps(published.SONAR_CONFIG))
    (source / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    save_file(SONAR, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", "--verify")
    model = SonarTextModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in SONAR.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    # The same encoder in the layout of fairseq2, without a tokenizer.
    torch.save({"model": published.fairseq2(SONAR)}, tmp_path / "sonar_text_encoder.pt")
    capsys.readouterr()
    convert(tmp_path / "sonar_text_encoder.pt", tmp_path / "again")
    assert "--tokenizer" in capsys.readouterr().out
    again = SonarTextModel.from_pretrained(tmp_path / "again")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in SONAR.items())


def test_every_tensor_is_accounted_for(tmp_path, capsys):
    torch.save(published.small_ml_clap(), tmp_path / "pretrain.pt")
    convert(tmp_path / "pretrain.pt", tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    named = [int(line.split()[2].replace(",", "")) for line in lines if line.startswith("set aside: ")]
    start = next(index for index, line in enumerate(lines) if line.startswith("part "))
    placed = [int(line.split()[1]) for line in lines[start + 1 : start + 6]]
    assert sum(named) + sum(placed) == len(published.small_ml_clap())


def test_refusals_write_nothing(tmp_path):
    torch.save(
        published.ced_original(published.random(published.ced_encoder()), published.random(published.ced_head())),
        tmp_path / "x.pt",
    )
    torch.save({"a": torch.ones(1)}, tmp_path / "y.pt")
    with pytest.raises(ValueError, match="layout"):
        convert(tmp_path / "y.pt", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"x.pt", "y.pt"}


@pytest.mark.process
def test_it_runs_from_the_command_line(tmp_path):
    torch.save(
        published.ced_original(published.random(published.ced_encoder()), published.random(published.ced_head())),
        tmp_path / "x.pt",
    )
    words = [str(tmp_path / "x.pt"), "--out", str(tmp_path / "out")]
    assert "x.pt: recognised as CED, 29 tensors" in run_processes("recipes/convert_checkpoint.py", *words, count=1)
    with pytest.raises(ValueError, match=r"\bout\b"):
        main(words)


def test_clap2_goes_to_our_format_and_back(tmp_path, capsys):
    folders.write_folder(tmp_path / "source", "B")
    convert(tmp_path / "source", tmp_path / "ours", "--verify")
    printed = capsys.readouterr().out
    assert "recognised as CLAP2, OpenCLIP, 83 tensors" in printed
    assert "no tokenizer" not in printed
    assert SupCLAPProcessor.from_pretrained(tmp_path / "ours").tokenizer("w7")["input_ids"] == [59, 7, 57]

    convert(tmp_path / "ours", tmp_path / "back", "--to", "open_clip")
    before, after = (load_file(tmp_path / name / "open_clip_model.safetensors") for name in ("source", "back"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name].reshape(-1), value.reshape(-1), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="not an empty folder"):
        convert(tmp_path / "ours", tmp_path / "back", "--to", "open_clip")


def test_a_tuned_clap_becomes_a_clap_model(tmp_path, capsys):
    """With the files on its origin and on its training recordings."""
    model, _ = builders.save_pair("converted", tmp_path / "tuned")
    for name in ("provenance.json", "trained_sources.npy"):
        (tmp_path / "tuned" / name).write_text("[]")
    convert(tmp_path / "tuned", tmp_path / "clap", "--to", "clap")
    assert "in the format clap" in capsys.readouterr().out
    clap, files = (ClapModel.from_pretrained(tmp_path / "clap"), {path.name for path in (tmp_path / "clap").iterdir()})
    assert clap.logit_scale_a.item() == pytest.approx(model.logit_scale.item())
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    parts = {"config.json", "model.safetensors", "processor_config.json"}
    assert files == {*parts, *tokenizer, "provenance.json", "trained_sources.npy"}
    with pytest.raises(ValueError, match="not an empty folder"):
        convert(tmp_path / "tuned", tmp_path / "clap", "--to", "clap")
