"""The README's python blocks run, one after the other, and its commands are verbs that exist."""

import re
from pathlib import Path

import pytest
import soundfile
from builders import tone

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)


@pytest.fixture
def folder_of_a_reader(tmp_path, monkeypatch, model, processor):
    """What the README speaks of: a trained model in outputs/synthetic, and a folder of recordings."""
    model.save_pretrained(tmp_path / "outputs" / "synthetic")
    processor.save_pretrained(tmp_path / "outputs" / "synthetic")
    sounds = tmp_path / "my_sounds"
    sounds.mkdir()
    lines = ["file_name,caption"]
    for number in range(10):
        soundfile.write(sounds / f"{number}.wav", 0.5 * tone(300.0 * (number + 1)), 16000)
        lines.append(f"{number}.wav,a tone {number}")
    (sounds / "metadata.csv").write_text("\n".join(lines))
    (tmp_path / "metrics").symlink_to(ROOT / "metrics")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder_of_a_reader")
def test_python_blocks_run(capsys):
    assert len(BLOCKS) >= 3
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([4, 4])" in printed


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"make ([a-z][a-z0-9-]*)", README))
    assert {"train", "test"} <= verbs
    assert not {verb for verb in verbs if f"\n{verb}:" not in makefile}
    for path in re.findall(r"(?:recipes|datasets_scripts|metrics)/[\w/]+\.(?:py|yaml)", README):
        assert (ROOT / path).exists(), path
