"""Write docs/paper_settings.md, which compares the papers' settings with those of the full-scale configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.recipes.arguments import CONFIGS, parse_arguments
from modeling_supclap.recipes.reproduce import RECIPES

SETTINGS = Path(__file__).parent / "paper_settings.yaml"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "paper_settings.md"
INTRODUCTION = """# Settings of the papers

The printed settings and those of `recipes/configs` at full scale. S is SupCLAP, A is ATRI, T is TeminAL. This page is
written by `make results-page`.
"""


def read_values(config: str) -> dict[str, Any]:
    """Return all settings of a configuration as its recipe reads them, with the defaults of the recipe."""
    recipe = "posttrain" if config.startswith("teminal") else "train"
    values: dict[str, Any] = {}
    for group in parse_arguments(RECIPES[recipe][1], [str(CONFIGS / config)]):
        values |= vars(group)
    return values


def render_page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for config, entries in yaml.safe_load(SETTINGS.read_text(encoding="utf-8")).items():
        values = read_values(config)
        parts += [f"## {config}", "", "| setting | paper | section | ours | same? |", "|---|---|---|---|---|"]
        for entry in entries:
            ours = entry["ours"] if "ours" in entry else values[entry["key"]]
            same = "yes" if ours == entry["paper"] else "no"
            parts.append(f"| {entry['key']} | {entry['paper']} | {entry['section']} | {ours} | {same} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    write_text(PAGE, render_page())


if __name__ == "__main__":
    main()
