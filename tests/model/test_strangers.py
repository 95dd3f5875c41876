"""Promises of SECURITY.md about models of strangers: their code is not run, and their sizes are not trusted."""

import ast
import builtins
import json
import re
from contextlib import suppress
from pathlib import Path

import builders
import pytest
from audio_encoders import save_encoder
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel

import modeling_supclap
from modeling_supclap import (
    CEDConfig,
    CEDFeatureExtractor,
    CEDModel,
    ModernTextConfig,
    NaFlexConfig,
    SupCLAPConfig,
    SupCLAPModel,
    SupCLAPProcessor,
)
from modeling_supclap.conversion import convert_checkpoint, load_processor, read_checkpoint
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.joining import load_tokenizer, load_tower

PACKAGE = Path(modeling_supclap.__file__).parent
LOADERS = {
    "processor": SupCLAPProcessor.from_pretrained,
    "processor of a model": lambda folder: SupCLAPModel.from_pretrained(folder).processor,
    "tokenizer": load_tokenizer,
    "two encoders": lambda folder: SupCLAPProcessor.from_encoders(folder, folder),
    "any model": lambda folder: load_embedding_model(str(folder)),
    "any processor": lambda folder: load_processor(str(folder)),
}


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def folder_with_code(folder: Path, kind: str) -> Path:
    """Save a model with a tokenizer of its own code, and return the file that this code creates."""
    builders.save_pair(kind, folder)
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "EvilTokenizer"}
    edit(folder / "tokenizer_config.json", **code)
    mark = folder.parent / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    return mark


@pytest.mark.parametrize("kind", ["supclap", "clap"])
@pytest.mark.parametrize("loader", LOADERS)
def test_code_of_a_tokenizer_is_neither_run_nor_asked_for(tmp_path, monkeypatch, kind, loader):
    mark = folder_with_code(tmp_path / "model", kind)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    # the tokenizer of a `ClapModel` is loaded by its model type, without the code
    expected = pytest.raises((OSError, ValueError), match="custom code") if kind == "supclap" else suppress(ValueError)
    with expected:
        LOADERS[loader](tmp_path / "model")
    assert not mark.exists()


def test_code_of_a_feature_extractor_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    save_encoder("wav2vec2", tmp_path / "model")
    code = {"auto_map": {"AutoFeatureExtractor": "evil.Evil"}, "feature_extractor_type": "Evil"}
    edit(tmp_path / "model" / "preprocessor_config.json", **code)
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with pytest.raises(OSError, match="custom code"):
        SupCLAPProcessor.from_encoders(str(tmp_path / "model"), str(tmp_path / "model"))
    assert not (tmp_path / "ran").exists()


def test_every_loader_of_transformers_states_whether_code_is_trusted():
    """`None`, the default of transformers, asks on the terminal."""
    calls = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"(Auto\w+|ClapProcessor)\.from_pretrained", ast.unparse(node.func)
            ):
                calls += 1
                assert "trust_remote_code" in ast.unparse(node), f"{path}:{node.lineno}"
    assert calls > 8


DEPTHS = [("audio_config", "depth"), ("text_config", "num_hidden_layers")]


@pytest.mark.parametrize(("part", "name"), DEPTHS)
@pytest.mark.parametrize("load", [SupCLAPModel.from_pretrained, AutoModel.from_pretrained])
def test_a_model_of_millions_of_layers_is_refused_before_it_is_built(tmp_path, monkeypatch, part, name, load):
    builders.save_pair("supclap", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", **{part: {**fields[part], name: 10_000_000}})
    monkeypatch.setattr(SupCLAPModel, "__init__", lambda *_: pytest.fail("a model was built"))
    with pytest.raises((ValueError, StrictDataclassError), match=f"{name} is 10000000.*at most 1000"):
        load(tmp_path)


def test_a_tower_of_millions_of_layers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 10**7}))
    with pytest.raises(ValueError, match="num_hidden_layers is 10000000"):
        load_tower("text", str(tmp_path))
    for build in (
        lambda: CEDConfig(depth=1001),
        lambda: NaFlexConfig(depth=1001),
        lambda: ModernTextConfig(num_hidden_layers=1001),
        lambda: SupCLAPConfig(audio_config={"model_type": "clap_audio_model", "depths": [2, 2, 998, 2]}),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match="at most 1000 layers"):
            build()
    assert CEDConfig(depth=1000).depth == 1000


@pytest.mark.parametrize(("name", "value"), [("embed_dim", 10**7), ("target_length", 10**12), ("depth", 1000)])
def test_sizes_are_compared_with_the_weights_before_a_conversion_takes_memory(tmp_path, name, value):
    CEDModel(builders.ced_config()).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **{name: value})
    with pytest.raises(ValueError, match=f"{tmp_path.name} does not fit CEDModel"):
        convert_checkpoint(read_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hop_size", 0),
        ("hop_size", 513),
        ("sampling_rate", 10**12),
        ("sampling_rate", 16),
        ("n_fft", 10**12),
        ("win_size", 513),
        ("feature_size", 10**9),
        ("pad_to_samples", 10**12),
    ],
)
def test_impossible_sizes_of_spectrograms_are_named(tmp_path, name, value):
    builders.save_pair("supclap", tmp_path)
    fields = json.loads((tmp_path / "processor_config.json").read_text())["feature_extractor"]
    assert name in fields
    edit(tmp_path / "processor_config.json", feature_extractor={**fields, name: value})
    with pytest.raises(ValueError, match=f"{tmp_path}.*{name} is {value}; it must be from"):
        SupCLAPProcessor.from_pretrained(tmp_path)
    CEDFeatureExtractor(hop_size=512)
