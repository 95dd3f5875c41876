"""How dense the sources are: comprehensions, nested ones, long lines of code and long functions."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("modeling_supclap", "datasets_scripts", "metrics", "recipes", "benchmarks")
LONG_LINE, LONG_FUNCTION = 90, 70

# Do not raise a limit: write a loop in place of a nested comprehension, name a part of a line, or split a function.
LIMITS = {
    "comprehensions per 1,000 lines of code": 30,
    "nested comprehensions, percent of all": 2,
    f"lines of code over {LONG_LINE} characters, percent": 12,
    f"functions over {LONG_FUNCTION} lines": 0,
}

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> Iterator[Path]:
    """Yield the Python files of the package and the benchmarks, without the folders that are links to others."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            numbers.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return numbers


def is_nested(comprehension: ast.AST) -> bool:
    """Return whether a comprehension has two `for`, or contains another comprehension."""
    within = [node for node in ast.walk(comprehension) if isinstance(node, ast.comprehension)]
    return len(within) > 1


def test_the_sources_are_easy_to_read():
    code = comprehensions = nested = long_lines = 0
    long_functions = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        in_docstrings = docstring_lines(tree)
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.strip().startswith("#") and number not in in_docstrings:
                code += 1
                long_lines += len(line) > LONG_LINE
        for node in ast.walk(tree):
            if isinstance(node, COMPREHENSIONS):
                comprehensions += 1
                nested += is_nested(node)
            if isinstance(node, FUNCTIONS):
                numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                if len(numbers - in_docstrings) > LONG_FUNCTION:
                    long_functions.append(f"{path.relative_to(ROOT)}: {node.name}")

    values = (
        1000 * comprehensions / code,
        100 * nested / comprehensions,
        100 * long_lines / code,
        len(long_functions),
    )
    found = dict(zip(LIMITS, values, strict=True))
    print({name: round(value, 1) for name, value in found.items()}, *long_functions, sep="\n")
    assert not {name: value for name, value in found.items() if value > LIMITS[name]}, long_functions
