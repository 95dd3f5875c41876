"""Write the committed result files into docs/results.md and the headlines into the README: `make results-page`.

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

_R1, _SVR = "retrieval eng t2a R@1", "InfoNCE bi-DynamicSVR"
HEADLINES = (
    (
        "supclap_table9",
        "retrieval eng t2a R@1",
        "InfoNCE bi-DynamicSVR",
        "420 steps: a speed-up, the baseline still rises",
    ),
    (
        "supclap_table3_num_train_epochs-40",
        "retrieval eng t2a R@1",
        "InfoNCE bi-DynamicSVR",
        "1,680 steps: the gain near convergence",
    ),
    ("atri_table1", "retrieval mean t2a R@1", "KCL", "at equal steps, with 8 x the captions"),
    ("teminal_table3", "zste eng 3A", "T-CLAP, TeminAL A and B", "an order-blind model has 50"),
)
"""Lines of the README: result file, column, row, and what the comparison is."""


def render_page(page: str) -> str:
    """Return the text of the page with the tables of the result files after its mark."""
    parts = [page.partition(MARK)[0].rstrip(), "", MARK]
    for path in sorted(RESULTS.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        parts += ["", markdown_table(content).rstrip()]
        if (PAGE.parent / "images" / f"{path.stem}.png").exists():
            parts += ["", f"![{content['title']}](images/{path.stem}.png)"]
    return "\n".join(parts) + "\n"


def render_readme(page: str) -> str:
    """Return the text of the README with a line for each headline between its two marks."""
    lines = ["| table | measure | what is compared | baseline | with the method | seeds | paper |", f"|{'---|' * 7}"]
    for stem, column, model, comparison in HEADLINES:
        content = json.loads((RESULTS / "mini" / f"{stem}.json").read_text(encoding="utf-8"))
        own = next(row for row in content["rows"] if row["model"] == model)
        rows = {(row["row"], row["dataset"]): row for row in content["rows"]}
        other = rows[own["baseline"], own["dataset"]]

        cells = [f"`{content['table']}`", format_heading(column), comparison]
        cells += [f"{row['model']}: {format_cell(column, row['scores'][column])}" for row in (other, own)]
        printed = [row["scores"][column]["paper"] for row in (other, own)]
        cells.append(str(len(own["seeds"])))
        cells.append(" to ".join(format_value(column, value) for value in printed if value is not None))
        lines.append(f"| {' | '.join(cells)} |")
    before, _, rest = page.partition(MARK)
    return "\n".join([f"{before}{MARK}", "", *lines, "", f"{END}{rest.partition(END)[2]}"])


def main() -> None:
    """Write the pages."""
    for path, render in ((PAGE, render_page), (README, render_readme)):
        write_text(path, render(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
