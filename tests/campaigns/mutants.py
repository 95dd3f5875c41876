"""Change single expressions of the library at random, and count the changes that no test notices.

    python tests/campaigns/mutants.py --faults 150 --seed 1

A run of the suite on a copy of the project, in the folder `mutants/`, records which tests run which line, also in the
processes that they start. Each line inside a function is drawn with the same probability. A fault changes an expression
that starts on this line, by one of mutmut's operators or one of two below. The tests that run its statement follow, the
fastest files first, until one fails. Left out are slow and GPU tests, texts with blanks and the arguments of errors.
"""

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import coverage
import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators
from scipy.stats import binomtest

COPY = Path(os.environ.get("MUTANTS", "mutants")).absolute()
RECORDED, SECONDS, CHOSEN = COPY / "recorded", COPY / "seconds.json", COPY / "chosen.json"
FOLDERS = [COPY / name for name in ("modeling_supclap", "datasets_scripts", "metrics", "recipes")]
READ_SOURCES = ("tests/docs/", "tests/test_")  # they may notice any change of a text
COVERAGE = f"""
[run]
source = {",".join(map(str, FOLDERS))}
data_file = {RECORDED}
concurrency = thread,multiprocessing
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
"""  # the context of a process that a test starts is its name with the phase, such as "tests/test_a.py::test_b (call)"
OPTIONS = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
PACKAGES = ["accelerate", "datasets", "evaluate", "pandas", "peft", "scipy.stats", "sklearn", "transformers"]
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
CRASH = ("operator_assignment", "operator_arg_removal", "operator_lambda")  # None in place of a value is seldom silent


# Hooks of pytest: record seconds and lines by test; or run the chosen tests in their order.
_seconds: defaultdict[str, float] = defaultdict(float)


def _switch_context(name: str) -> None:
    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Record the lines of a test under its name."""
    _switch_context(item.nodeid)
    result = yield
    _switch_context("")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    """Record the lines of a fixture that tests share under the name of their file."""
    if fixturedef.scope in ("class", "module"):
        _switch_context(request.node.nodeid.partition("::")[0])
    result = yield
    _switch_context(request._pyfuncitem.nodeid)
    return result


def be_the_script(words: Any, log: str, environment: dict[str, str], killed_at: Any) -> None:
    """Run a script in a fork (see tests/processes.py), and record its lines under the name of the test."""
    import processes

    _switch_context(environment["PYTEST_CURRENT_TEST"])
    processes._be_the_script(words, log, environment, killed_at)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Select and sort the chosen tests."""
    import processes

    if CHOSEN.exists():
        chosen = json.loads(CHOSEN.read_text())
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in chosen if name in by_name]
    else:
        processes._be_the_script = be_the_script


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the seconds of a phase of a test."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of all tests, after the processes of pytest-xdist."""
    if not CHOSEN.exists() and not hasattr(session.config, "workerinput"):
        SECONDS.write_text(json.dumps(_seconds))


def record() -> None:
    """Copy the project, and record which tests run which lines."""
    others = shutil.ignore_patterns(".git", ".venv", ".cache", "mutants", "outputs")
    shutil.copytree(".", COPY, symlinks=True, ignore=others)
    (COPY / ".cache").symlink_to(Path(".cache").resolve())
    settings = COPY / "coverage.ini"
    settings.write_text(COVERAGE)
    environment = {"COVERAGE_PROCESS_START": str(settings), "MUTANTS": str(COPY)}
    environment["PYTHONPATH"] = os.pathsep.join([str(COPY), str(COPY / "tests" / "campaigns")])
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-p", "mutants", "-n", "2", "--dist", "loadfile"]
    subprocess.run(command, cwd=COPY, env=os.environ | environment)
    recorded = coverage.Coverage(config_file=settings)
    recorded.combine()
    recorded.save()


def run_chosen(files: list[str], limit_seconds: int) -> int:
    """Run the chosen tests of these files in a fork, which need not import other packages; return its status."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
        return status
    signal.alarm(limit_seconds)
    os.chdir(COPY)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(COPY))
    plugin, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")  # processes import it
    log = os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(pytest.main([*OPTIONS, "-x", *files], plugins=[plugin]))


def without_a_part(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield an expression without an operand, the call around it, a keyword argument or an element."""
    if isinstance(node, (cst.BooleanOperation, cst.BinaryOperation)):
        yield from (node.left, node.right)
    elif isinstance(node, cst.Call):
        if len(node.args) == 1:
            yield node.args[0].value
        elif not node.args and isinstance(node.func, cst.Attribute):
            yield node.func.value
        for arg in node.args:
            if arg.keyword is not None:
                yield node.with_changes(args=[other for other in node.args if other is not arg])
    elif isinstance(node, (cst.List, cst.Set, cst.Dict)) or (isinstance(node, cst.Tuple) and node.lpar):
        is_only = isinstance(node, cst.Set) and len(node.elements) == 1  # there is no empty set display
        for element in [] if is_only else node.elements:
            yield node.with_changes(elements=[other for other in node.elements if other is not element])


def another_function(node: cst.Name) -> Iterator[cst.Name]:
    """Yield the name of a function that looks right."""
    if node.value in SWAPPED:
        yield node.with_changes(value=SWAPPED[node.value])


OPERATORS = [*mutation_operators, (cst.CSTNode, without_a_part), (cst.Name, another_function)]


class Changes(cst.CSTVisitor):
    """Changes of the expressions that start on a line, by operator."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.changes: dict[str, list[tuple[cst.CSTNode, cst.CSTNode]]] = defaultdict(list)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Collect the changes of a node."""
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Raise)):
            return False
        is_prose = isinstance(node, cst.SimpleString) and " " in node.value
        if self.get_metadata(PositionProvider, node).start.line == self.line and not is_prose:
            for kind, operator in OPERATORS:
                if isinstance(node, kind) and operator.__name__ not in CRASH:
                    change: Any = operator  # takes the kind of node that it stands beside
                    for changed in change(node):
                        self.changes[operator.__name__].append((node, changed))
        return True


def lines_in_functions(text: str) -> dict[int, range]:
    """Return `{line: lines of its innermost statement up to this line}` for the bodies of all functions."""
    lines = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in (node for outer in function.body for node in ast.walk(outer)):  # outer nodes come first
                if isinstance(node, ast.stmt):
                    for part in ast.walk(node):
                        line = getattr(part, "lineno", node.lineno)
                        lines[line] = range(node.lineno, line + 1)
    return lines


def draw_faults(seed: int) -> Iterator[tuple[Path, range, str]]:
    """Yield faults of random lines: the file, the lines of the statement up to the change, and the changed text."""
    lines = []
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.py")):
        lines += [(path, *item) for item in sorted(lines_in_functions(path.read_text(encoding="utf-8")).items())]
    draw = random.Random(seed)
    draw.shuffle(lines)
    for path, line, statement in lines:
        tree = MetadataWrapper(cst.parse_module(path.read_text(encoding="utf-8")))
        found = Changes(line)
        tree.visit(found)
        if found.changes:
            changed: Any = tree.module.deep_replace(*draw.choice(draw.choice(list(found.changes.values()))))
            text = changed.code
            try:
                ast.parse(text)
            except SyntaxError:  # for example a generator without the call around it
                continue
            yield path, statement, text


def choose_tests(contexts: set[str], seconds: dict[str, float], limit_seconds: float) -> list[str]:
    """Return the tests that run a statement, then the others of their files, up to a limit of seconds."""
    names = set()
    for context in contexts - {""}:
        name = context.split("|tests/")[-1]  # a fork has the context of the first one before its own
        name = name if name == context else f"tests/{name}"
        names.add(name.partition("::")[0] if name.endswith(" (setup)") else name.removesuffix(" (call)"))
    file_of = {name: name.partition("::")[0] for name in seconds if not name.startswith(READ_SOURCES)}
    files = dict.fromkeys((name.partition("::")[0] for name in names), 0.0)
    for name in file_of:
        if file_of[name] in files:
            files[file_of[name]] += seconds[name]

    chosen = []
    others = {name: names.isdisjoint((name, file)) for name, file in file_of.items() if file in files}
    for name in sorted(others, key=lambda name: (others[name], files[file_of[name]], file_of[name])):
        limit_seconds -= seconds[name]
        if limit_seconds > 0:
            chosen.append(name)
    return chosen


def main() -> None:
    """Try random faults; print those that survive, and a table of the folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=150, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--seconds", type=float, default=240, help="recorded seconds of the tests of a fault")
    args = parser.parse_args()
    if not SECONDS.exists():
        record()
    os.environ |= {"PYTHONPATH": str(COPY), "HF_HOME": str(COPY / "cache")}
    for package in PACKAGES:
        importlib.import_module(package)
    seconds, recorded = json.loads(SECONDS.read_text()), coverage.CoverageData(RECORDED)
    recorded.read()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for number, (path, statement, text) in enumerate(islice(draw_faults(args.seed), args.faults)):
        contexts = recorded.contexts_by_lineno(str(path))
        chosen = choose_tests({name for line in statement for name in contexts.get(line, [])}, seconds, args.seconds)
        CHOSEN.write_text(json.dumps(chosen))
        files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            code = run_chosen(files, int(60 + 2 * args.seconds)) if chosen else 0
        finally:
            path.write_text(before, encoding="utf-8")
        outcome = "caught" if code else "survived" if chosen else "not covered"
        name = path.relative_to(COPY)
        folder = "/".join(name.parts[:-1][:2]) if name.parts[0] == "modeling_supclap" else name.parts[0]
        outcomes[folder][outcome] += 1
        outcomes["all"][outcome] += 1
        print(number, outcome, f"{name}:{statement[-1]}", f"(of {len(chosen)} tests)", flush=True)
        if outcome != "caught":
            diff = difflib.unified_diff(before.splitlines(), text.splitlines(), n=1, lineterm="")
            print(*list(diff)[2:], sep="\n", flush=True)

    print(
        f"\nseed {args.seed}\n\n| folder | drawn | caught | 95 % | survived | not covered |\n|---|---|---|---|---|---|"
    )
    for folder, counts in sorted(outcomes.items(), key=lambda item: (item[0] == "all", item[0])):
        low, high = binomtest(counts["caught"], counts.total()).proportion_ci(method="wilson")
        cells = [folder, counts.total(), counts["caught"], f"{low:.0%} to {high:.0%}"]
        print("|", " | ".join(map(str, [*cells, counts["survived"], counts["not covered"]])), "|")


if __name__ == "__main__":
    main()
