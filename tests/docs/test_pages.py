"""The Python blocks in the README and the pages run, and their commands are valid."""

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from modeling_supclap.integrations import onnx
from modeling_supclap.recipes import arguments
from modeling_supclap.recipes.command import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """Return `(page, block)` for all code blocks of a language."""
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        text = page.read_text(encoding="utf-8")
        found += [(name, block) for block in re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)]
    return found


def commands() -> list[tuple[str, str]]:
    """Return `(page, command)` for all recipe commands, without the launcher and comments."""
    found = []
    for page, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.search(r"(supclap |(?:recipes|datasets_scripts)/\S+\.py)[^#]*", line)
            if words and "git clone" not in line and "--help" not in line:
                found.append((page, " ".join(words[0].split())))
    return found


def read_sounds() -> dict[Path, bytes]:
    """Read the files in the folder of the reader."""
    return {path: path.read_bytes() for path in Path("my_sounds").rglob("*") if path.is_file()}


@pytest.fixture
def export_text_only(monkeypatch):
    """Leave out the audio graph of ONNX exports: tracing takes seconds, and test_integrations_onnx.py checks it."""
    export = onnx._export
    monkeypatch.setattr(onnx, "_export", lambda *args: args[-1].stem == "audio" or export(*args))
    for name in ("check_parity", "_describe"):
        monkeypatch.setattr(onnx, name, lambda *args: [])


@pytest.mark.usefixtures("at_a_readers", "export_text_only")
@pytest.mark.parametrize("page", list(dict.fromkeys(page for page, _ in blocks("python"))))
def test_python_blocks_run_without_changing_the_folder_of_the_reader(page, capsys):
    sounds = read_sounds()
    names: dict = {"__name__": "__main__"}
    for where, block in blocks("python"):
        if where == page:
            exec(compile(block, page, "exec"), names)
    assert read_sounds() == sounds
    if page == "docs/index.md":
        assert "torch.Size([4, 4])" in capsys.readouterr().out


def test_the_page_on_tuning_opens_no_file_that_it_does_not_list():
    page = "docs/guides/tune.md"
    listed = {line.split()[0] for where, block in blocks("text") if where == page for line in block.splitlines()}
    named = set()
    for where, block in blocks("python"):
        if where == page:
            named.update(re.findall(r"my_sounds/[^\s\"']+", block))
    assert listed
    assert named <= listed


class Understood(Exception):
    """Raised when the arguments of a command have been parsed."""


@pytest.mark.usefixtures("at_a_readers")
@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_are_understood(page, command, monkeypatch):
    words = shlex.split(command)
    name = words.pop(0)
    if name == "supclap":
        name = COMMANDS[words.pop(0)]
    recipe = importlib.import_module("modeling_supclap." + name.removesuffix(".py").replace("/", "."))

    def reading(function):
        def read(*args, **kwargs):
            function(*args, **kwargs)
            raise Understood

        return read

    monkeypatch.setattr(sys, "argv", [name, *words])
    names = ("parse_arguments", "parse_names")
    parsers = [parser for parser in names if getattr(recipe, parser, None) is getattr(arguments, parser)]
    for parser in parsers:
        monkeypatch.setattr(recipe, parser, reading(getattr(arguments, parser)))
    if not parsers:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", reading(argparse.ArgumentParser.parse_args))
    with pytest.raises(Understood):
        recipe.main()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs: dict[str, str] = {}
    for page, block in blocks("bash"):
        verbs |= dict.fromkeys(re.findall(r"^make ([a-z0-9-]+)", block, flags=re.M), page)
    assert {"train", "test"} <= verbs.keys()
    assert not [verb for verb in verbs if f"\n{verb}:" not in makefile]
