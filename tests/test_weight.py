"""Weight of the sources in code tokens per folder, and limits on what makes a function hard to read."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Code tokens: names, numbers, strings and operators. Docstrings, comments, commas and line breaks do not count, so that
# neither dense nor airy code is rewarded. A commit that raises a number names the feature that needs it.
BUDGETS = {
    "modeling_supclap": 126_800,  # values kept between epochs, functions as objectives, serve.py, units, detections
    "datasets_scripts": 68_800,
    "metrics": 9_450,
    "recipes": 26_750,  # the command that scores detections
    "recipes/studies": 11_000,
    "benchmarks": 8_800,
}
LONGEST_FUNCTION = 70  # lines without the docstring
NESTED_COMPREHENSIONS = 0.02  # share of all comprehensions

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(folder: str) -> Iterator[Path]:
    """Yield the Python files of a folder, without links and without folders that have their own budget."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        inner = path.relative_to(ROOT).parts[:-1]
        owner = next("/".join(inner[:depth]) for depth in (2, 1) if "/".join(inner[:depth]) in BUDGETS)
        if owner == folder and not any(parent.is_symlink() for parent in path.parents):
            yield path


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            numbers.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return numbers


def code_tokens(text: str) -> int:
    """Count the code tokens of a module. An f-string is one token, as in Python 3.11; later versions split it."""
    documented = docstring_lines(ast.parse(text))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        is_docstring = token.type == tokenize.STRING and token.start[0] in documented
        count += depth == 0 and token.type not in LAYOUT and token.string != "," and not is_docstring
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return count


def is_nested(comprehension: ast.AST) -> bool:
    """Return whether a comprehension has two `for`, or contains another comprehension."""
    within = [node for node in ast.walk(comprehension) if isinstance(node, ast.comprehension)]
    return len(within) > 1


def test_layout_has_no_weight():
    dense = 'def f(a, b):\n    """Add."""\n    return a + b\n'
    airy = "def f(\n    a,\n    b,\n):\n\n    # the sum\n    return (\n        a + b\n    )\n"
    assert code_tokens(dense) == 11  # def f ( a b ) : return a + b
    assert code_tokens(airy) == code_tokens(dense) + 2  # the parentheses
    assert code_tokens("x = f'{a:{b}.{c[\"d\"]}f} {f(1)!r}', 'e'\n") == 4


def test_folders_keep_to_their_budgets():
    found = {folder: sum(code_tokens(path.read_text("utf-8")) for path in sources(folder)) for folder in BUDGETS}
    print(found, sum(found.values()))
    assert not {folder: weight for folder, weight in found.items() if weight > BUDGETS[folder]}


def test_functions_are_short_and_comprehensions_flat():
    comprehensions = nested = 0
    long_functions = []
    for path in (path for folder in BUDGETS for path in sources(folder)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        in_docstrings = docstring_lines(tree)
        for node in ast.walk(tree):
            if isinstance(node, COMPREHENSIONS):
                comprehensions += 1
                nested += is_nested(node)
            if isinstance(node, FUNCTIONS):
                numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                if len(numbers - in_docstrings) > LONGEST_FUNCTION:
                    long_functions.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not long_functions
    assert nested <= NESTED_COMPREHENSIONS * comprehensions
