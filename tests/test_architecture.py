"""The rules of the house that a machine can check: which room may import which."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_supclap"
HUB = [
    PACKAGE / f"{name}.py"
    for name in (
        "configuration_supclap",
        "modeling_ced",
        "modeling_sonar",
        "modeling_supclap",
        "encoding",
        "audio_chunks",
        "audio_input",
        "strict_loading",
        "towers",
        "feature_extraction_ced",
        "processing_supclap",
    )
]
# Each room of training imports only rooms to its left.
ORDER = ["losses", "training_args", "objectives", "evaluation", "trainer"]


def imports(path: Path) -> list[tuple[int, str]]:
    """(level, module) of every import of a file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


def roots(path: Path) -> set[str]:
    """Top-level names of the absolute imports of a file."""
    return {module.split(".")[0] for level, module in imports(path) if level == 0}


def files(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"{folder} holds no Python file"
    return paths


@pytest.mark.parametrize("path", HUB, ids=lambda path: path.stem)
def test_hub_files_are_flat_and_need_little(path):
    allowed = {"torch", "torchaudio", "numpy", "transformers", "huggingface_hub"} | sys.stdlib_module_names
    assert roots(path) <= allowed
    flat = {other.stem for other in HUB}
    for level, module in imports(path):
        if level:
            assert level == 1, f"{path.name}: `from {'.' * level}{module}` does not survive an upload"
            assert module in flat, f"{path.name} imports .{module}, which is not uploaded with it"


@pytest.mark.parametrize("path", files("modeling_supclap/losses"), ids=lambda path: path.stem)
def test_losses_import_torch_only(path):
    assert roots(path) <= {"torch"} | sys.stdlib_module_names
    assert {level for level, _ in imports(path)} <= {0, 1}


@pytest.mark.parametrize("folder", ["metrics", "datasets_scripts"])
def test_metrics_and_data_know_nothing_of_the_package(folder):
    for path in files(folder):
        assert not roots(path) & {"modeling_supclap", "recipes"}, path
        assert path.name == "audio.py" or "torch" not in roots(path), path  # the resampler is torchaudio's


def test_nobody_imports_recipes():
    for folder in ("modeling_supclap", "metrics", "datasets_scripts"):
        for path in files(folder):
            assert "recipes" not in roots(path), path


def test_training_rooms_point_one_way():
    for place, room in enumerate(ORDER):
        paths = files(f"modeling_supclap/{room}") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
        later = set(ORDER[place + 1 :])
        for path in paths:
            used = {module.split(".")[0] for level, module in imports(path) if level}
            assert not used & later, f"{path.name} imports {used & later}"


def test_the_model_knows_no_training():
    for path in HUB:
        assert not {module for level, module in imports(path) if level} & {*ORDER, "collator", "distributed"}


def test_only_distributed_says_rank():
    for path in PACKAGE.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
        assert path.name == "distributed.py" or not names & {"get_rank", "all_gather", "all_reduce"}, path


def test_there_is_no_room_without_a_name():
    rooms = [path for folder in ROOT.glob("[!.]*/") for path in folder.rglob("*.py")]  # .venv and .cache are not ours
    assert len(rooms) > 100
    assert not [path for path in rooms if path.stem in ("utils", "common", "helpers", "misc")]


def test_every_module_has_its_test():
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    rooms = [path for folder in ("modeling_supclap", "datasets_scripts") for path in files(folder)]
    # A room of a sub-package may have the sub-package's name in front. Losses are tested by their paper's name.
    untested = {
        str(path)
        for path in rooms
        if path.stem != "__init__"
        and not {path.stem, f"{path.parent.name}_{path.stem}", f"{path.stem}_losses"} & tested
    }
    assert not untested
