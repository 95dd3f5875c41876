"""Puts the committed result files into docs/results.md and the headlines into the README: `make results-page`.

Each file of `recipes/results/<scale>/` is a table as `reproduce.py` writes it; its
figure, if any, has its name in docs/images. What stands in the page before the mark, and in the README outside of the
two marks, stays.
"""

from __future__ import annotations

import json
from pathlib import Path

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.recipes.result_tables import format_cell, format_heading, format_value, markdown_table

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
MARK = "<!-- What follows is made by `make results-page` from the files of recipes/results. -->"
END = "<!-- What `make results-page` makes ends here. -->"

HEADLINES = {
    "atri_table1": ("retrieval mean t2a R@1", "KCL"),
    "atri_table3": ("multilingual all MRV", "KCL"),
    "supclap_figure1": ("log drift_cosine_objective mean", "InfoNCE bi-DynamicSVR"),
    "supclap_figure4": ("similarity positive", "InfoNCE bi-DynamicSVR"),
    "supclap_table2": ("zero_shot eng run top1", "InfoNCE bi-DynamicSVR"),
    "supclap_table3": ("retrieval eng t2a R@1", "InfoNCE bi-DynamicSVR"),
    "teminal_table3": ("zste eng 3A", "T-CLAP, TeminAL A and B"),
    "teminal_table4": ("zero_shot eng teminal top1", "T-CLAP"),
}
"""What the README says of a result file: of which column, and which row beside its baseline."""


def render_page(page: str) -> str:
    """The text of the page, with or without tables, with those of the result files."""
    parts = [page.partition(MARK)[0].rstrip(), "", MARK]
    for path in sorted(RESULTS.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        parts += ["", markdown_table(content).rstrip()]
        if (PAGE.parent / "images" / f"{path.stem}.png").exists():
            parts += ["", f"![{content['title']}](images/{path.stem}.png)"]
    return "\n".join(parts) + "\n"


def render_readme(page: str) -> str:
    """The text of the README, which has both marks, with a line for each headline between them."""
    lines = ["| what | scale | measure | baseline | with the method | paper |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*/*.json")):
        if path.stem not in HEADLINES:
            continue
        column, model = HEADLINES[path.stem]
        content = json.loads(path.read_text(encoding="utf-8"))
        own = next(row for row in content["rows"] if row["model"] == model)
        pairs = [(row["row"], row["dataset"]) for row in content["rows"]]
        other = content["rows"][pairs.index((own["baseline"], own["dataset"]))]

        cells = [f"{content['title']} (`{content['table']}`)", content["scale"], format_heading(column)]
        cells += [f"{row['model']}: {format_cell(column, row['scores'][column])}" for row in (other, own)]
        printed = [row["scores"][column]["paper"] for row in (other, own)]
        cells.append(" to ".join(format_value(column, value) for value in printed if value is not None))
        lines.append(f"| {' | '.join(cells)} |")
    before, _, rest = page.partition(MARK)
    return "\n".join([f"{before}{MARK}", "", *lines, "", f"{END}{rest.partition(END)[2]}"])


def main() -> None:
    """Writes both pages."""
    for path, render in ((PAGE, render_page), (README, render_readme)):
        write_text(path, render(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
