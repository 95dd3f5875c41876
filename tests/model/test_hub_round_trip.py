"""A saved folder on the Hub: Auto classes, pipeline, remote code and push; and the exports of the package."""

import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import pytest
import soundfile
import torch
import transformers
from fake_hub import FakeHub, fake_hub
from huggingface_hub import HfApi
from processes import run_python
from recordings import tone_rows
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForAudioClassification,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import modeling_supclap
from modeling_supclap import (
    CEDConfig,
    CEDFeatureExtractor,
    CEDModel,
    SupCLAPConfig,
    SupCLAPModel,
    SupCLAPProcessor,
    SupCLAPTrainer,
)

TEXTS = [builders.CAPTIONS["eng"], builders.CAPTIONS["fra"]]
CLIPS = [builders.noise(16000, seed=1), builders.noise(200_000, seed=2)]
CALL: dict[str, Any] = {
    "audio": CLIPS,
    "sampling_rate": 16000,
    "text": TEXTS,
    "language": ["eng", "fra"],
    "return_tensors": "pt",
}


@torch.no_grad()
def logits(model: SupCLAPModel, processor: SupCLAPProcessor) -> torch.Tensor:
    return model(**processor(**CALL)).logits_per_audio


@pytest.mark.parametrize("text", ["supclap", "sonar"])
def test_auto_classes_know_us(tmp_path, text):
    model, processor = builders.save_pair(text, tmp_path)
    kinds = {
        AutoConfig: SupCLAPConfig,
        AutoModel: SupCLAPModel,
        AutoFeatureExtractor: CEDFeatureExtractor,
        AutoProcessor: SupCLAPProcessor,
        AutoTokenizer: type(processor.tokenizer),
    }
    loaded = {kind: kind.from_pretrained(tmp_path) for kind in kinds}
    assert {kind: type(thing) for kind, thing in loaded.items()} == kinds
    assert torch.equal(logits(loaded[AutoModel], loaded[AutoProcessor]), logits(model, processor))
    trusted = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(trusted) is SupCLAPModel


def test_auto_classes_know_the_audio_tower(tmp_path):
    CEDModel(builders.ced_config()).save_pretrained(tmp_path)
    CEDFeatureExtractor().save_pretrained(tmp_path)
    assert type(AutoModel.from_config(CEDConfig.from_pretrained(tmp_path))) is CEDModel
    assert type(AutoModel.from_pretrained(tmp_path, config=CEDConfig.from_pretrained(tmp_path))) is CEDModel
    assert type(AutoFeatureExtractor.from_pretrained(tmp_path)) is CEDFeatureExtractor
    assert type(AutoModel.from_pretrained(tmp_path, trust_remote_code=True)).__name__ == "CEDModel"


TAGGER = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class CedConfig(PreTrainedConfig):
    model_type = "ced"

class CedForAudioClassification(PreTrainedModel):
    config_class = CedConfig

    def __init__(self, config):
        super().__init__(config)
        self.outputlayer = torch.nn.Linear(2, 527)
        self.post_init()
"""


def test_trusted_code_of_a_folder_replaces_our_ced(tmp_path):
    """As in the published CED folders, which contain the code of their tagger."""
    code = {"AutoConfig": "tagger.CedConfig", "AutoModelForAudioClassification": "tagger.CedForAudioClassification"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ced", "auto_map": code}))
    (tmp_path / "tagger.py").write_text(TAGGER)
    save_file(
        {"outputlayer.weight": torch.zeros(527, 2), "outputlayer.bias": torch.zeros(527)},
        tmp_path / "model.safetensors",
    )

    tagger = AutoModelForAudioClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(tagger).__name__ == "CedForAudioClassification"
    assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)).__name__ == "CedConfig"
    assert type(CEDConfig.from_pretrained(tmp_path)) is CEDConfig
    with pytest.raises(ValueError, match="CEDModel"):
        CEDModel.from_pretrained(tmp_path)


def run(code: str, *arguments: object, isolated: bool, cwd: Path, **environment: str) -> None:
    """Run Python in a separate process, folder and cache; `isolated`: without this checkout."""
    flags = ["-I"] if isolated else []
    environment["HF_HOME"] = str(cwd / "cache")
    run_python(*flags, "-c", code, *arguments, cwd=cwd, timeout_seconds=300, **environment)


READER = """
import sys
sys.modules["modeling_supclap"] = sys.modules["datasets_scripts"] = None  # as if the package were not installed
import torch
from transformers import AutoConfig, AutoModel, AutoProcessor, pipeline

batch = torch.load("call.pt", weights_only=False)
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    ours = type(processor.feature_extractor).__name__ != "WhisperFeatureExtractor"
    assert type(processor.feature_extractor).__module__.startswith("transformers_modules.") == ours
    assert type(config).__name__ == "SupCLAPConfig"
    with torch.no_grad():
        outputs = model(**processor(**batch))
    file_embeds = model.encode_audio("clip.wav", convert_to_tensor=True)
    encoded = model.encode_text(batch["text"], language=batch["language"], convert_to_tensor=True)
    torch.save([outputs.audio_embeds, outputs.text_embeds, file_embeds, encoded], folder + ".pt")
    for name, kind in {"nothing.wav": FileNotFoundError, "call.pt": ValueError}.items():
        try:
            model.encode_audio(name)
        except kind as error:
            assert name in str(error), error
        else:
            raise AssertionError(name)
    for _ in range(2):  # as in a notebook cell that is run again
        classify = pipeline("zero-shot-audio-classification", model=folder, trust_remote_code=True)
    clips = [batch["audio"][0], batch["audio"][0][:9000]]
    for clip, result in zip(clips, classify(clips, candidate_labels=["dog", "rain"], batch_size=2), strict=True):
        (alone,) = classify([clip], candidate_labels=["dog", "rain"])
        assert [each["label"] for each in result] == [each["label"] for each in alone]
        assert max(abs(a["score"] - b["score"]) for a, b in zip(result, alone)) < 1e-5
    model.save_pretrained(folder + "-again")
    processor.save_pretrained(folder + "-again")
"""


CODE_OF_EVERY_FOLDER = {
    *("audio_input.py", "auto_classes.py", "configuration_supclap.py", "encoding.py", "hub_ids.py", "languages.py"),
    *("feature_extraction_clap.py", "modeling_supclap.py", "pipeline_supclap.py", "pooling.py"),
    *("processing_supclap.py", "strict_loading.py", "towers.py", "waveform.py"),
}
CODE_OF_TOWERS = {
    "supclap": {"modeling_ced.py", "frames.py", "feature_extraction_ced.py"},
    "sonar": {"modeling_ced.py", "frames.py", "feature_extraction_ced.py", "modeling_sonar.py"},
    "clap2": {"modeling_naflex.py", "frames.py", "rotary.py", "modeling_modern_text.py", "feature_extraction_ced.py"},
    "cnn14": {"modeling_cnn14.py", "feature_extraction_msclap.py"},
    "whisper": {"audio_encoder.py"},
}


@pytest.mark.process
def test_folder_loads_where_the_package_is_missing(tmp_path):
    torch.save(CALL, tmp_path / "call.pt")
    saved = {kind: builders.save_pair(kind, tmp_path / kind) for kind in CODE_OF_TOWERS}
    soundfile.write(tmp_path / "clip.wav", builders.noise(40_000).reshape(-1, 2), 22_050, subtype="FLOAT")
    run(READER, *(tmp_path / kind for kind in saved), isolated=True, cwd=tmp_path)
    for kind, (model, processor) in saved.items():
        with torch.no_grad():
            expected = model(**processor(**CALL))
            expected_file = model.encode_audio(tmp_path / "clip.wav", processor, convert_to_tensor=True)
        audio_embeds, text_embeds, file_embeds, encoded = torch.load(tmp_path / f"{kind}.pt")
        torch.testing.assert_close(file_embeds, expected_file)
        torch.testing.assert_close(encoded, expected.text_embeds)
        assert torch.equal(audio_embeds, expected.audio_embeds)
        assert torch.equal(text_embeds, expected.text_embeds)
        files = {path.name for path in (tmp_path / kind).iterdir()}
        code = {name for name in files if name.endswith(".py")}
        assert code == CODE_OF_EVERY_FOLDER | CODE_OF_TOWERS[kind]
        assert {path.name for path in (tmp_path / f"{kind}-again").iterdir()} == files
        again = SupCLAPModel.from_pretrained(tmp_path / f"{kind}-again")
        assert torch.equal(logits(again, processor), expected.logits_per_audio)


@pytest.mark.process
def test_what_a_training_uploads_loads_where_the_package_is_missing(tmp_path, monkeypatch):
    torch.save(CALL, tmp_path / "call.pt")
    soundfile.write(tmp_path / "clip.wav", builders.noise(40_000), 16_000)
    options = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "eval_strategy": "no",
        "load_best_model_at_end": False,
    }
    args = builders.training_args(tmp_path / "run", save_strategy="steps", save_steps=1, **options)
    processor = builders.bert_processor()
    trainer = SupCLAPTrainer(builders.supclap_model(), args, tone_rows(tmp_path, count=4), None, processor)
    args.push_to_hub, trainer.hub_model_id, trainer.push_in_progress = True, "someone/tiny", None
    # all files of the folder but those of checkpoints are uploaded
    copy = partial(shutil.copytree, dst=tmp_path / "uploaded", ignore=shutil.ignore_patterns("checkpoint-*"))
    job = SimpleNamespace(done=lambda: True)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, folder_path, **_: copy(folder_path) and job)
    trainer.train()
    run(READER, tmp_path / "uploaded", isolated=True, cwd=tmp_path)
    found = torch.load(tmp_path / "uploaded.pt")[0]
    with torch.no_grad():
        torch.testing.assert_close(found, trainer.clap.eval()(**processor(**CALL)).audio_embeds)


PUSHER = """
import os
import sys
import torch
from modeling_supclap import SupCLAPModel, SupCLAPProcessor

assert "modeling_supclap.training.trainer" not in sys.modules, "the trainer must be imported when first asked for"
SupCLAPModel.from_pretrained("model").push_to_hub("someone/tiny", token="hf_own")
SupCLAPProcessor.from_pretrained("model").push_to_hub("someone/tiny", token="hf_own")
model = SupCLAPModel.from_pretrained("someone/tiny", token="hf_own", cache_dir="elsewhere")
batch = torch.load("call.pt", weights_only=False)
encoded = model.encode_text(batch["text"], language=batch["language"], convert_to_tensor=True)
with torch.no_grad():
    torch.save([model(**model.processor(**batch)).logits_per_audio, encoded], "found.pt")
"""


class PrivateHub(FakeHub):
    """Hub that refuses requests without the token."""

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        if self.headers.get("Authorization") == "Bearer hf_own":
            super().answer(body, status, **headers)
        else:
            super().answer(b"", 401, X_Error_Code="RepoNotFound")


@pytest.mark.slow
@pytest.mark.process
def test_model_pushed_to_a_private_repository_comes_back(tmp_path):
    """One token and one cache folder are enough for the model and its processor."""
    torch.save(CALL, tmp_path / "call.pt")
    model, processor = builders.save_pair("sonar", tmp_path / "model")
    with fake_hub(PrivateHub) as address:
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        run(PUSHER, isolated=False, cwd=tmp_path, **hub)
        pushed = dict(FakeHub.files["someone/tiny"])
    found, encoded = torch.load(tmp_path / "found.pt")
    assert torch.equal(found, logits(model, processor))
    torch.testing.assert_close(encoded, model.encode_text(TEXTS, processor, CALL["language"], convert_to_tensor=True))
    assert (tmp_path / "elsewhere" / "models--someone--tiny").is_dir()
    cached = {path.name for path in (tmp_path / "cache").glob("hub/models--*/snapshots/*/*")}
    assert cached == {"README.md"}  # push_to_hub reads it
    code = {"configuration_supclap.py", "modeling_supclap.py", "processing_supclap.py", "feature_extraction_ced.py"}
    assert code | {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json"} <= set(pushed)
    for name in ("modeling_supclap.py", "modeling_ced.py"):
        assert pushed[name] == Path(modeling_supclap.__file__).with_name(name).read_bytes()


@pytest.mark.parametrize("kind", [SupCLAPModel, AutoModel])
def test_a_model_in_a_subfolder_finds_its_processor(tmp_path, kind):
    model, processor = builders.save_pair("supclap", tmp_path / "runs" / "best")
    expected = model.encode_text(TEXTS, processor)
    loaded = kind.from_pretrained(tmp_path / "runs", subfolder="best", token="hf_own")
    assert (loaded.encode_text(TEXTS) == expected).all()

    stored = pickle.dumps(kind.from_pretrained(tmp_path / "runs", subfolder="best", token="hf_own"))
    assert b"hf_own" not in stored
    assert (pickle.loads(stored).encode_text(TEXTS) == expected).all()


OLD_TRANSFORMERS = """
import sys
import types

old = sys.modules["transformers"] = types.ModuleType("transformers")  # has none of the names that the code imports
old.__version__ = "4.57.6"
for module in ("configuration_supclap", "auto_classes"):
    try:
        __import__(f"saved.{module}")
    except ImportError as error:
        print(error)
"""


@pytest.mark.process
def test_an_older_transformers_is_named(tmp_path):
    builders.save_pair("supclap", tmp_path / "saved")
    printed = run_python("-c", OLD_TRANSFORMERS, cwd=tmp_path).splitlines()
    assert len(printed) == 2
    assert all(re.search(r"needs transformers 5\.\d+.*4\.57\.6 is installed.*pip install", line) for line in printed)


def test_each_entry_point_checks_the_version(tmp_path, monkeypatch):
    builders.save_pair("supclap", tmp_path)
    monkeypatch.setattr(transformers, "__version__", "5.16.2")
    for entry in (
        "configuration_supclap.SupCLAPConfig",
        "processing_supclap.SupCLAPProcessor",
        "feature_extraction_ced.CEDFeatureExtractor",
        "modeling_supclap.SupCLAPModel",
    ):
        with pytest.raises(ImportError, match=r"5\.16\.2 is installed"):
            get_class_from_dynamic_module(entry, str(tmp_path))


# ---- exports of the package ----


def test_exports():
    for name in ("CEDConfig", "CEDModel", "SonarTextModel", "SupCLAPConfig", "SupCLAPModel", "SupCLAPProcessor"):
        assert getattr(modeling_supclap, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'SupKLAP'"):
        _ = modeling_supclap.SupKLAP
