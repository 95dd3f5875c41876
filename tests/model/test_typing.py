"""mypy finds mistakes in code that uses the model."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

# Each line with a comment contains one mistake, and the comment is a part of mypy's message.
USER_CODE = """
import numpy as np
import torch
from modeling_supclap import SupCLAPConfig, SupCLAPModel, SupCLAPProcessor

model = SupCLAPModel.from_pretrained("folder")
texts: np.ndarray = model.encode_text(["rain"], language="eng")
clips: torch.Tensor = model.encode_audio("rain.wav", convert_to_tensor=True)
others: torch.Tensor = model.encode_text("rain", convert_to_numpy=False)
first = model.encode_audio("rain.wav", return_chunks=True).embeds
joined: SupCLAPModel = SupCLAPModel.from_encoders("mispeech/ced-base", "sentence-transformers/LaBSE")

model.encode_txt("rain")  # "Tensor" not callable
model.encode_text("rain").cpu()  # has no attribute "cpu"
model.encode_text("rain", convert_to_tensor=True).tobytes()  # "Tensor" has no attribute "tobytes"
model.encode_text(3)  # No overload variant
model.encode_text("rain", languages="eng")  # No overload variant
model.encode_audio("rain.wav", on_bad_audio="ignore")  # No overload variant
SupCLAPConfig(text_pooling="max")  # expected "Literal['mean', 'cls', 'last', 'pooler']"
SupCLAPConfig(projection_type="linear")  # expected "Literal['mlp', 'residual']"
SupCLAPProcessor.from_pretrained("folder").encode("rain")  # "SupCLAPProcessor" has no attribute "encode"
"""


@pytest.mark.slow
def test_mypy_finds_each_mistake_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "user_code.py"
    file.write_text(USER_CODE)
    report, crash, _ = api.run([str(file)])
    assert not crash
    messages = {int(line): text for line, text in re.findall(r"user_code\.py:(\d+): error: (.*)", report)}
    mistakes = {
        number: line.partition("  # ")[2] for number, line in enumerate(USER_CODE.splitlines(), 1) if "  # " in line
    }
    assert messages.keys() == mistakes.keys(), report
    for number, words in mistakes.items():
        assert words in messages[number]
