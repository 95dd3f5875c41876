"""Type checkers find mistakes in code that uses the model."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

from modeling_supclap import SupCLAPModel
from modeling_supclap.localization import localize

ROOT = Path(__file__).parents[2]

# Each line with a comment contains one mistake. The first part of the comment is a part of mypy's message, the second
# of pyright's.
USER_CODE = """
import numpy as np
import torch
from modeling_supclap import SupCLAPConfig, SupCLAPModel, SupCLAPProcessor

model = SupCLAPModel.from_pretrained("folder", temperature=0.1, logit_bias=-10)
texts: np.ndarray = model.encode_text(["rain"], language="eng")
clips: torch.Tensor = model.encode_audio("rain.wav", convert_to_tensor=True)
others: torch.Tensor = model.encode_text("rain", convert_to_tensor=True)
first = model.encode_audio("rain.wav", return_chunks=True).embeds
joined: SupCLAPModel = SupCLAPModel.from_encoders("mispeech/ced-base", "sentence-transformers/LaBSE")
scores: np.ndarray = model.similarity(texts, texts)
on_device: torch.Tensor = model.similarity(clips, others)
windows = model.localize("rain.wav", ["a dog", "rain"], language="eng", window_seconds=2.0, device="cuda")
best: float = windows.start_seconds[windows.scores[:, 0].argmax()]
processor: SupCLAPProcessor = model.processor

model.encode_txt("rain")  # "Tensor" not callable; "Tensor"
model.encode_text("rain").cpu()  # has no attribute "cpu"; attribute "cpu"
model.encode_text("rain", convert_to_tensor=True).tobytes()  # "Tensor" has no attribute "tobytes"; "tobytes"
model.encode_text(3)  # No overload variant; cannot be assigned
model.encode_text("rain", languages="eng")  # No overload variant; No overloads
model.encode_text("rain", convert_to_tensor=True, langauge="eng")  # No overload variant; No overloads
model.encode_audio("rain.wav", convert_to_tensor=True, samplingrate=16000)  # No overload variant; No overloads
model.encode_audio("rain.wav", on_bad_audio="ignore")  # No overload variant; cannot be assigned
model.similarity(texts, texts).cpu()  # has no attribute "cpu"; attribute "cpu"
model.similarity(clips)  # Missing positional argument; missing for parameter
model.localize("rain.wav", "rain", windowseconds=3)  # Unexpected keyword argument "windowseconds"; "windowseconds"
model.localize("rain.wav", "rain", window_seconds="3")  # incompatible type "str"; cannot be assigned
model.localize("rain.wav", "rain").onset_seconds  # no attribute "onset_seconds"; attribute "onset_seconds"
model.processor.encode("rain")  # has no attribute "encode"; attribute "encode"
SupCLAPConfig(text_pooling="max")  # expected "Literal['mean', 'cls', 'last', 'pooler']"; cannot be assigned
SupCLAPConfig(projection_type="linear")  # expected "Literal['mlp', 'residual']"; cannot be assigned
SupCLAPProcessor.from_pretrained("folder").encode("rain")  # "SupCLAPProcessor" has no attribute "encode"; "encode"
"""


def planted(checker: int) -> dict[int, str]:
    """Return the lines with mistakes, and a part of the message of mypy (0) or pyright (1)."""
    mistakes = {}
    for number, line in enumerate(USER_CODE.splitlines(), 1):
        if "  # " in line:
            mistakes[number] = line.partition("  # ")[2].split("; ")[checker]
    return mistakes


def compare(messages: dict[int, str], mistakes: dict[int, str]) -> None:
    assert messages.keys() == mistakes.keys(), messages
    assert not [messages[number] for number, words in mistakes.items() if words not in messages[number]]


@pytest.mark.slow
def test_mypy_finds_each_mistake_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "user_code.py"
    file.write_text(USER_CODE)
    report, crash, _ = api.run([str(file)])
    assert not crash
    messages: dict[int, str] = {}
    for line, text in re.findall(r"user_code\.py:(\d+): error: (.*)", report):
        messages[int(line)] = messages.get(int(line), "") + text
    compare(messages, planted(0))


@pytest.mark.slow
@pytest.mark.process
def test_pyright_finds_each_mistake_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="pyright is not installed")
    (tmp_path / "user_code.py").write_text(USER_CODE)
    settings = {"include": [str(tmp_path)], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    checker = Path(sys.executable).with_name("basedpyright")
    command = [str(checker), "--outputjson", "--project", str(tmp_path), "--pythonpath", sys.executable]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    messages = {}
    for each in json.loads(run.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            messages[each["range"]["start"]["line"] + 1] = each["message"]
    compare(messages, planted(1))


def test_help_shows_the_parameters_of_localize() -> None:
    method, function = (inspect.signature(each).parameters for each in (SupCLAPModel.localize, localize))
    defaults = {name: parameter.default for name, parameter in method.items() if name != "self"}
    assert defaults == {name: parameter.default for name, parameter in function.items() if name != "model"}
    assert {"window_seconds", "hop_seconds", "language"} < defaults.keys()
