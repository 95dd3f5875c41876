"""Errors while loading models: each message names the found and the expected value."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import builders
import pytest
import sentencepiece
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, ClapAudioModel

from modeling_supclap import (
    CEDConfig,
    CEDFeatureExtractor,
    CEDModel,
    SonarTextModel,
    SupCLAPConfig,
    SupCLAPModel,
    SupCLAPProcessor,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Complete folders of several kinds; copy a folder before changing it."""
    root = tmp_path_factory.mktemp("saved")
    (root / "empty").mkdir()
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(root / "bert")
    builders.bert_tokenizer().save_pretrained(root / "bert")
    CEDModel(builders.ced_config()).save_pretrained(root / "ced")
    CEDFeatureExtractor().save_pretrained(root / "ced")
    ClapAudioModel(builders.clap_config().audio_config).save_pretrained(root / "htsat")
    SonarTextModel(builders.sonar_config()).save_pretrained(root / "sonar")
    builders.nllb_tokenizer().save_pretrained(root / "sonar")
    builders.save_pair("supclap", root / "supclap")
    builders.save_pair("sonar", root / "supclap-sonar")
    adapted = get_peft_model(builders.supclap_model(), LoraConfig(r=2, target_modules=["query"]))
    adapted.save_pretrained(root / "adapter")
    return root


def broken(saved: Path, name: str, target: Path, *missing: str) -> Path:
    """Return a copy of a folder without some of its files."""
    shutil.copytree(saved / name, target)
    for file in missing:
        (target / file).unlink()
    return target


# ---- models ----


@pytest.mark.parametrize(
    ("kind", "folder", "message"),
    [
        (SupCLAPModel, "empty", r"empty.*config\.json.*'supclap'"),
        (SupCLAPConfig, "empty", r"empty.*config\.json"),
        (CEDModel, "empty", r"empty.*config\.json.*'ced'"),
        (SupCLAPModel, "bert", "bert.*'bert'.*'supclap'"),
        (SupCLAPModel, "ced", "ced.*'ced'.*'supclap'"),
        (SupCLAPConfig, "bert", r"SupCLAPModel\.from_encoders"),
        (CEDModel, "bert", "bert.*'bert'.*'ced'"),
        (CEDConfig, "htsat", "htsat.*'clap_audio_model'.*'ced'"),
        (CEDModel, "supclap", r"CEDModel.*blocks\.0"),
        (SonarTextModel, "supclap-sonar", "SonarTextModel.*embed_tokens"),
        (SonarTextModel, "bert", r"SonarTextModel.*embed_tokens\.weight"),
    ],
)
def test_a_folder_of_something_else(saved, kind, folder, message):
    with pytest.raises(ValueError, match=message):
        kind.from_pretrained(saved / folder)


def test_the_audio_configuration_within_a_whole_model_still_loads(saved):
    assert CEDConfig.from_pretrained(saved / "supclap").embed_dim == 32


def test_nothing_of_the_default_size_is_built_for_a_wrong_folder(saved, monkeypatch):
    """transformers only warns of a wrong model type, and would build SONAR of the default size (1.2 GB)."""
    monkeypatch.setattr(SupCLAPModel, "__init__", lambda *args, **kwargs: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match="'bert'"):
        SupCLAPModel.from_pretrained(saved / "bert")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "/no/such/folder"),
        ("./no-such-folder", r"\./no-such-folder"),
        ("mispeech/supclap-bse", "'mispeech/supclap-bse'"),
    ],
)
def test_a_name_that_is_nowhere(name, message):
    with pytest.raises(OSError, match=message):
        SupCLAPModel.from_pretrained(name)


def test_a_configuration_that_is_not_json_is_rejected(saved, tmp_path):
    folder = broken(saved, "supclap", tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "supcl')
    with pytest.raises(OSError, match=r"model.*JSON"):
        SupCLAPModel.from_pretrained(folder)


# Damaged weight files: half of the file, less than a header, an HTML error page, a git-lfs pointer.
DAMAGES = {
    "half": lambda content: content[: len(content) // 2],
    "all but a byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "page": lambda content: b"<html>404</html>" * 30,
    "note": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9000\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights(saved, tmp_path, file, damage):
    folder = broken(saved, "supclap", tmp_path / "model")
    if file.endswith(".bin"):
        torch.save(load_file(folder / "model.safetensors"), folder / file)
        (folder / "model.safetensors").unlink()
        assert isinstance(SupCLAPModel.from_pretrained(folder), SupCLAPModel)
        (folder / "training_args.bin").write_bytes(b"not looked at")
    (folder / file).write_bytes(DAMAGES[damage]((folder / file).read_bytes()))
    with pytest.raises(OSError, match=re.escape(str(folder / file))) as caught:
        SupCLAPModel.from_pretrained(folder)
    assert "weights_only" not in str(caught.value), "torch's advice to run what is in the file"


@pytest.mark.parametrize("pattern", ["model-00002-of-*.safetensors", "model.safetensors.index.json"])
def test_one_of_several_files_is_damaged(saved, tmp_path, pattern):
    SupCLAPModel.from_pretrained(saved / "supclap").save_pretrained(tmp_path, max_shard_size="50KB")
    (path,) = tmp_path.glob(pattern)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(OSError, match=re.escape(str(path))):
        SupCLAPModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["ced", "htsat", "bert", "sonar"])
def test_an_encoder_with_damaged_weights(saved, tmp_path, name):
    folder = broken(saved, name, tmp_path / name)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    audio, text = (folder, saved / "bert") if name in ("ced", "htsat") else (saved / "ced", folder)
    with pytest.raises(OSError, match=re.escape(str(folder / "model.safetensors"))) as caught:
        SupCLAPModel.from_encoders(str(audio), str(text))
    assert not isinstance(caught.value.__cause__, OSError), "told once"


# ---- LoRA ----


@pytest.mark.parametrize("base", [None, "", "/no/such/base", "./gone"])
def test_an_adapter_without_its_base_model(saved, tmp_path, base):
    folder = broken(saved, "adapter", tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
    message = f"adapter.*{base!r}"
    with pytest.raises(ValueError, match=message):
        SupCLAPModel.from_pretrained(folder)
    # Follow the advice in the message.
    merged = PeftModel.from_pretrained(builders.supclap_model(), str(folder)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert isinstance(SupCLAPModel.from_pretrained(tmp_path / "merged"), SupCLAPModel)


@torch.no_grad()
def test_an_adapter_next_to_its_base_model_loads(saved, tmp_path):
    lora = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    model = get_peft_model(SupCLAPModel.from_pretrained(saved / "supclap"), lora)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    expected = model.get_base_model().eval().get_text_features(ids).pooler_output
    loaded = SupCLAPModel.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(loaded.get_text_features(ids).pooler_output, expected, atol=1e-6, rtol=0)


def test_an_adapter_that_an_old_transformers_would_load_in_part(saved, tmp_path, monkeypatch):
    lora = LoraConfig(r=2, target_modules=["query"], modules_to_save=["audio_projection"])
    get_peft_model(SupCLAPModel.from_pretrained(saved / "supclap"), lora).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr("transformers.__version__", "5.17.4")
    message = r"5\.17\.4.*'audio_projection'"
    with pytest.raises(ValueError, match=message):
        SupCLAPModel.from_pretrained(tmp_path / "adapter")


# ---- joining encoders ----


@pytest.mark.parametrize(
    ("audio", "text", "error", "message"),
    [
        ("empty", "bert", ValueError, r"empty.*config\.json"),
        ("ced", "empty", ValueError, "empty"),
        ("ced", "ced", ValueError, "'ced'.*text"),
        ("bert", "bert", ValueError, "'bert'.*audio"),
        ("ced", "adapter", ValueError, "adapter.*LoRA"),
        ("nowhere", "bert", OSError, "audio.*nowhere"),
        ("ced", "nowhere", OSError, "text.*nowhere"),
    ],
)
def test_joining_invalid_encoders(saved, audio, text, error, message):
    with pytest.raises(error, match=message):
        SupCLAPModel.from_encoders(str(saved / audio), str(saved / text))


def test_joining_a_misspelt_hub_id(saved):
    with pytest.raises(OSError, match="'mispeech/ced-bse'"):
        SupCLAPModel.from_encoders("mispeech/ced-bse", str(saved / "bert"))
    with pytest.raises(OSError, match="'bert-bse'"):
        SupCLAPProcessor.from_encoders(str(saved / "ced"), "bert-bse")
    with pytest.raises(OSError, match="'mispeech/ced-bse'"):
        SupCLAPProcessor.from_encoders("mispeech/ced-bse", str(saved / "bert"))


def test_joining_an_encoder_without_a_feature_extractor(saved):
    with pytest.raises(OSError, match="htsat"):
        SupCLAPProcessor.from_encoders(str(saved / "htsat"), str(saved / "bert"))


# ---- processors ----


@pytest.mark.parametrize("folder", ["empty", "bert", "ced", "nowhere"])
def test_a_folder_without_a_processor(saved, folder):
    with pytest.raises((OSError, ValueError), match=rf"(?s){folder}.*SupCLAPProcessor.from_encoders"):
        SupCLAPProcessor.from_pretrained(saved / folder)


@pytest.mark.parametrize("name", ["supclap", "supclap-sonar"])
def test_a_missing_vocabulary(saved, tmp_path, name):
    """transformers would build a tokenizer that knows only special tokens."""
    folder = broken(saved, name, tmp_path / "model", "tokenizer.json")
    message = r"model.*tokenizer\.json"
    with pytest.raises(ValueError, match=message):
        SupCLAPProcessor.from_pretrained(folder)


def test_a_tokenizer_that_forgot_its_class(saved, tmp_path):
    """All captions would be tokenized in the default language."""
    folder = broken(saved, "supclap-sonar", tmp_path / "model", "tokenizer_config.json")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        SupCLAPProcessor.from_pretrained(folder)


def sentencepiece_folder(folder: Path, tokenizer_class: str, model_type: str) -> Path:
    """Write a text encoder folder with a SentencePiece file as tokenizer, as for SONAR and XLM-R."""
    folder.mkdir()
    captions = iter(list(builders.CAPTIONS.values()) * 5)
    with open(folder / "sentencepiece.bpe.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=captions, model_writer=file, vocab_size=120, model_type="bpe", minloglevel=2
        )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_language_tokens_that_are_missing(saved, tmp_path):
    folder = sentencepiece_folder(tmp_path / "sonar", "NllbTokenizer", "m2m_100")
    with pytest.raises(ValueError, match=r"sonar.*eng_Latn"):
        SupCLAPProcessor.from_encoders(str(saved / "ced"), str(folder))


WITHOUT_PROTOBUF = """
import importlib.metadata, importlib.util, sys
found, version = importlib.util.find_spec, importlib.metadata.version
hidden = lambda name: name.startswith("google.protobuf")
importlib.util.find_spec = lambda name, package=None: None if hidden(name) else found(name, package)
sys.modules["google.protobuf"] = None
from modeling_supclap import SupCLAPProcessor
try:
    SupCLAPProcessor.from_encoders(*sys.argv[1:])
except OSError as error:
    print(error)
"""


@pytest.mark.process
def test_protobuf_is_missing(saved, tmp_path):
    """In a process without protobuf, transformers asks for tiktoken."""
    folder = sentencepiece_folder(tmp_path / "xlmr", "XLMRobertaTokenizer", "xlm-roberta")
    encoders = [str(saved / "ced"), str(folder)]
    assert SupCLAPProcessor.from_encoders(*encoders)(text="a dog")["input_ids"]
    command = [sys.executable, "-c", WITHOUT_PROTOBUF, *encoders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert re.search(r"(?s)xlmr.*pip install protobuf", done.stdout), done.stderr


def test_a_misspelt_option_of_from_encoders(saved):
    with pytest.raises(TypeError, match=r"'projecton_dim'.*projection_dim"):
        SupCLAPModel.from_encoders(str(saved / "ced"), str(saved / "bert"), projecton_dim=3)
