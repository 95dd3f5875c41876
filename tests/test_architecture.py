"""Rules of the architecture: allowed imports between folders, and how tests read the best step."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_supclap"
SISTERS = (
    "datasets_scripts",
    "metrics",
    "recipes",
)  # next to the package in the checkout, inside it in an installation
HUB = sorted(path for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def files(folder: str) -> list[Path]:
    """Return the Python files of a folder; links are not followed."""
    paths = sorted(path for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts)
    assert paths, f"{folder} holds no Python file"
    return paths


def module_name(path: Path) -> str:
    """Return the module name of a file."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in SISTERS:
        parts.insert(0, "modeling_supclap")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(statement: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """Return the full names of the modules that a statement in a file imports, or imports from."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    package = module_name(path).split(".")
    if path.stem != "__init__":
        package.pop()
    base = package[: len(package) - statement.level + 1] if statement.level else []
    return [".".join([*base, *filter(None, [statement.module])])]


def modules_and_members(statement: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """Return the names of `modules`, and of what the statement takes from them, which may be modules too."""
    names = modules(statement, path)
    if isinstance(statement, ast.ImportFrom):
        names += [f"{names[0]}.{alias.name}" for alias in statement.names]
    return names


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the full names of all modules that a file imports, at any level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(modules(node, path))
    return frozenset(found)


def ours(path: Path) -> set[str]:
    """Return the modules of this project that a file imports: `training.trainer`, `metrics.recall` ..."""
    return {name.removeprefix("modeling_supclap").lstrip(".") for name in imports(path) if _is_ours(name)}


def foreign(path: Path) -> set[str]:
    """Return the external packages that a file imports."""
    return {name.split(".")[0] for name in imports(path) if not _is_ours(name)}


def loads(path: Path) -> set[Path]:
    """Return the files of this project that a file imports at module level, with their packages."""
    names: set[str] = set()
    for node in _at_module_level(ast.parse(path.read_text(encoding="utf-8"))):
        names.update(modules_and_members(node, path))
    found = {file for name in names if (file := file_of(name))}
    return found | {file.parent / "__init__.py" for file in found}


def _at_module_level(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run at module import, without those of functions and type checkers."""
    for statement in tree.body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        within = ast.walk(statement) if isinstance(statement, (ast.If, ast.Try)) else [statement]
        yield from (node for node in within if isinstance(node, (ast.Import, ast.ImportFrom)))


def file_of(name: str) -> Path | None:
    """Return the file of a module of this project, by its full name."""
    first, *parts = name.split(".")
    if first != "modeling_supclap":
        return None
    base = (ROOT if parts and parts[0] in SISTERS else PACKAGE).joinpath(*parts)
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def closure(*paths: Path) -> set[Path]:
    """Return all files of this project that are loaded with these files."""
    seen: set[Path] = set()
    waiting = set(paths)
    while waiting:
        seen |= waiting
        waiting = {file for path in waiting for file in loads(path)} - seen
    return seen


def mentions(path: Path) -> set[Path]:
    """Return the files of this project that a file imports anywhere: also in functions, for types, and by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(modules_and_members(node, path))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    found = {file for name in names if (file := file_of(name))}
    return {file for file in found if file.stem != "__init__"} - {path}


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "modeling_supclap"


def within(names: set[str], *rooms: str) -> set[str]:
    """Return the names in one of the folders."""
    return {name for name in names if any(name == room or name.startswith(f"{room}.") for room in rooms)}


@pytest.mark.parametrize("path", HUB, ids=lambda path: path.stem)
def test_hub_files_are_flat_and_need_little(path):
    allowed = {
        "torch",
        "torchaudio",
        "numpy",
        "transformers",
        "tokenizers",
        "huggingface_hub",
    } | sys.stdlib_module_names
    optional = (
        {"pycountry"} if path.stem == "languages" else set()
    )  # names in messages, which a loaded model can do without
    assert foreign(path) <= allowed | optional
    assert ours(path) <= {other.stem for other in HUB}, f"{path.name} imports what is not uploaded with it"

    levels = {node.level for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)}
    assert levels <= {0, 1}, f"{path.name}: an import from further up does not survive an upload"


@pytest.mark.parametrize("path", files("modeling_supclap/losses"), ids=lambda path: path.stem)
def test_losses_import_torch_only(path):
    assert foreign(path) <= {"torch"} | sys.stdlib_module_names
    assert ours(path) <= within(ours(path), "losses")


@pytest.mark.parametrize("folder", ["metrics", "datasets_scripts"])
def test_metrics_and_data_know_nothing_of_the_package(folder):
    leaves = ["waveform", "hub_ids", "languages"]  # files at the root that load no other file
    known = [folder] if folder == "metrics" else [folder, *leaves]
    for path in files(folder):
        assert ours(path) <= within(ours(path), *known), path
        if folder == "metrics":
            assert "torch" not in foreign(path), path


def test_nobody_imports_recipes():
    for folder in ("modeling_supclap", "metrics", "datasets_scripts"):
        for path in files(folder):
            assert not within(ours(path), "recipes"), path


def test_only_reproduce_imports_the_studies():
    for path in files("recipes"):
        if "studies" not in path.parts and path.name != "reproduce.py":
            assert not within(ours(path), "recipes.studies"), path


EXTRAS = [f"modeling_supclap/{name}" for name in ("search", "conversion", "integrations", "model_card")] + ["recipes"]
ROOMS = ("joining", "localization", "losses", "training", "evaluation")
CORE = [f"modeling_supclap/{name}" for name in ROOMS] + ["metrics", "datasets_scripts"]


def test_the_core_loads_no_extra():
    core = {*PACKAGE.glob("*.py"), *(path for folder in CORE for path in files(folder))}
    extras = {path for folder in EXTRAS for path in files(folder)}
    assert closure(*core) == core, sorted(map(str, closure(*core) & extras))


def test_the_trainer_loads_little():
    loaded = closure(PACKAGE / "training" / "trainer.py")
    assert len(loaded) <= 65, sorted(map(str, loaded))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in loaded) <= 13_500


def test_folders_import_in_one_direction():
    later = {
        "evaluation": ("training", "model_card", "integrations"),
        "conversion": ("training", "evaluation"),
        "model_card": ("training",),
        "training": ("integrations",),
    }
    for room, forbidden in later.items():
        for path in files(f"modeling_supclap/{room}"):
            assert not within(ours(path), *forbidden), path

    order = ["training_args", "objectives", "trainer"]  # each imports only modules to its left
    for place, name in enumerate(order):
        names = ours(PACKAGE / "training" / f"{name}.py")
        assert not within(names, *(f"training.{other}" for other in order[place + 1 :])), name


def test_no_file_is_imported_in_a_circle():
    graph: dict[Path, set[Path]] = {}
    for folder in ("modeling_supclap", *SISTERS):
        for path in files(folder):
            graph[path] = mentions(path)
    TopologicalSorter(graph).prepare()  # raises CycleError with the names of the circle


def test_only_distributed_uses_ranks():
    for path in files("modeling_supclap"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
        assert path.name == "distributed.py" or not names & {"get_rank", "all_gather", "all_reduce"}, path


def test_every_folder_is_named_in_the_rules():
    # without .venv and .cache
    rooms = [path for folder in ROOT.glob("[!.]*/") for path in folder.rglob("*.py")]
    assert len(rooms) > 100
    assert not [path for path in rooms if path.stem in ("utils", "common", "helpers", "misc")]


def test_the_best_step_of_a_test_is_not_its_last():
    """A test of the best checkpoint reads its step through `best_step`, which fails if it is the last step."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        loads_best = '"load_best_model_at_end": True' in text or "load_best_model_at_end=True" in text
        if path.stem not in ("test_architecture", "test_trainer"):  # the latter defines it
            assert "best_global_step" not in names, f"{path}: call best_step of test_trainer.py"
            assert not loads_best or "best_step(" in text, f"{path}: check the step with best_step of test_trainer.py"
