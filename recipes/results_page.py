"""Puts the committed result files into docs/results.md: `make results-page`.

Each file of `recipes/results/<scale>/` is a table as `reproduce.py` or benchmarks/compare_objectives.py writes it; its
figure, if any, has its name in docs/images. What stands in the page before the mark stays.
"""

from __future__ import annotations

import json
from pathlib import Path

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.recipes.result_tables import markdown_table

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"
MARK = "<!-- What follows is made by `make results-page` from the files of recipes/results. -->"


def render_page(page: str, results: Path = RESULTS) -> str:
    """The page with the tables of the result files.

    Args:
        page: Its text, with or without tables.
        results: The folder of the scales.
    """
    parts = [page.partition(MARK)[0].rstrip(), "", MARK]
    for path in sorted(results.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        parts += ["", markdown_table(content).rstrip()]
        if (PAGE.parent / "images" / f"{path.stem}.png").exists():
            parts += ["", f"![{content['title']}](images/{path.stem}.png)"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    write_text(PAGE, render_page(PAGE.read_text(encoding="utf-8")))
