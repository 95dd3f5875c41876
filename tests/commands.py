"""Run a recipe with command-line arguments, in this process or through `accelerate launch`."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]


def run_recipe(recipe: ModuleType, *words: Any) -> None:
    """Run `main` of a recipe in this process, which saves the imports; its errors are raised."""
    with mock.patch.object(sys, "argv", [f"{recipe.__name__.split('.')[-1]}.py", *map(str, words)]):
        recipe.main()


def launch_recipe(recipe: ModuleType, *words: Any, timeout_seconds: float = 300) -> str:
    """Run `accelerate launch recipes/RECIPE.py words`, assert that it succeeds, and return its output."""
    script = f"recipes/{recipe.__name__.split('.')[-1]}.py"
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", script, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
