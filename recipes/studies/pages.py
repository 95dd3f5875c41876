"""Write the pages of docs/studies/ and docs/paper_settings.md (`make results-page`) from the files of this folder.

Each file in `results/*/` is a table or a study, written by `supclap reproduce`. If docs/images has a figure with the
same file name, it is included. `claims.yaml` lists the claims of the tables. docs/paper_settings.md compares the
papers' settings with those of full-scale rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.evaluation.tables import Table, find_metric
from modeling_supclap.metrics.comparison import Cell, difference
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import ReproductionArguments, as_mapping
from modeling_supclap.recipes.studies.evidence import format_interval, render_study
from modeling_supclap.recipes.studies.plan import list_tables, plan
from modeling_supclap.recipes.studies.tables import to_markdown
from modeling_supclap.recipes.sweep import RECIPES, Row

STUDIES = Path(__file__).parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
TITLES = {"evidence": "Learning curves", "supclap": "SupCLAP", "atri": "ATRI", "teminal": "TeminAL"}
"""Titles of the pages, by the beginning of the names of the result files."""

HEAD = "---\nsearch:\n  boost: 0.2\n---\n\n<!-- Written by `make results-page` from recipes/studies. -->\n\n"


def write_pages() -> dict[Path, str]:
    """Return the text of each page, `{path: text}`."""
    verdicts = ["# Verdicts", (STUDIES / "verdicts.md").read_text(encoding="utf-8").strip()]
    verdicts += ["## Studies", list_verdicts().to_markdown(), "## Single tables", list_claims().to_markdown()]
    pages = {DOCS / "paper_settings.md": render_settings(), DOCS / "studies" / "verdicts.md": _join(verdicts)}
    for name, title in TITLES.items():
        parts = [f"# {title}"]
        for path in sorted(STUDIES.glob(f"results/*/{name}_*.json")):
            content = _load(path)
            figure = f"../images/{path.stem}.png"
            if "study" in content:
                parts.append(render_study(content, figure))
                continue
            parts.append(to_markdown(content))
            if (DOCS / "images" / f"{path.stem}.png").exists():
                parts.append(f"![{content['title']}]({figure})")
        pages[DOCS / "studies" / f"{name}.md"] = _join(parts)
    return pages


def _join(parts: Sequence[str]) -> str:
    return HEAD + "\n\n".join(part.rstrip() for part in parts) + "\n"


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def list_verdicts() -> Table:
    """Return a table with the verdict of each study."""
    lines = [["study", "claim", "verdict", "baseline", "difference at the end", "steps", "seeds"]]
    for path in sorted(STUDIES.glob("results/evidence/*.json")):
        content = _load(path)
        baseline, method = next(iter(content["arms"].values())), content["arms"][content["method"]]
        line = [f"`{content['study']}`", content["claim"], f"**{content['verdict']}**"]
        line += [format_interval(baseline["scores"][-1]), format_interval(method["differences"]["final"], signed=True)]
        steps = dict.fromkeys(f"{arm['points'][-1][0]['steps']:,.0f}" for arm in (baseline, method))
        lines.append([*line, " and ".join(steps), str(len(content["seeds"]))])
    return Table(lines, is_markdown=True)


def list_claims() -> Table:
    """Return a table with the verdict on each claim of `claims.yaml`."""
    lines = [["claim", "difference, 95 % interval", "seeds", "verdict"]]
    for claim in yaml.safe_load((STUDIES / "claims.yaml").read_text(encoding="utf-8")):
        content = _load(STUDIES / "results" / "mini" / f"{claim['table']}.json")
        datasets = {row["dataset"] for row in content["rows"]}
        if len(datasets) > 1 and "dataset" not in claim:
            raise ValueError(
                f"{claim['table']} has the datasets {sorted(datasets)}; add one to the claim {claim['claim']!r}"
            )
        rows = {row["row"]: row for row in content["rows"] if row["dataset"] == claim.get("dataset", row["dataset"])}
        effects = [find_effect(claim, rows, column) for column in claim["columns"]]
        texts = []
        for column, effect in zip(claim["columns"], effects, strict=True):
            texts.append(effect.format(find_metric(column), signed=True))
        verdict = judge_claim(claim, effects)
        if "study" in claim and verdict.startswith("holds"):
            study = _load(STUDIES / "results" / "evidence" / f"{claim['study']}.json")
            verdict += "".join(study["verdict"].partition(", explained by a control")[1:])
        lines.append([claim["claim"], "; ".join(texts), str(len(rows[claim["row"]]["seeds"])), verdict])
    return Table(lines)


def find_effect(claim: Mapping[str, Any], rows: Mapping[str, Any], column: str) -> Cell:
    """Return the mean difference of a claim's row to its baseline, with its 95 % interval.

    The interval is over seeds, and also over recordings if the table contains this difference.

    >>> rows = {"a": {"baseline": None, "scores": {"R@1": {"values": [0.6, 0.7, 0.8]}}}}
    >>> effect = find_effect({"row": "a", "baseline": 0.5}, rows, "R@1")
    >>> round(effect.value, 3), round(effect.low, 3), round(effect.high, 3)  # 0.2 ± 4.30 x 0.1 / sqrt(3)
    (0.2, -0.048, 0.448)
    """
    row, baseline = rows[claim["row"]], claim["baseline"]
    score = row["scores"][column]
    if baseline == row["baseline"]:
        return Cell(float(np.mean(score["differences"])), score["low"], score["high"])
    others = [baseline] * len(score["values"])
    if baseline in rows:
        others = rows[baseline]["scores"][claim.get("from", column)]["values"]
    return difference(score["values"], others)


def judge_claim(claim: Mapping[str, Any], effects: Sequence[Cell]) -> str:
    """Return the verdict on a claim, from the interval of each of its differences.

    >>> judge_claim({"change": "up"}, [Cell(0.2, 0.1, 0.3), Cell(0.2, -0.1, 0.5)])
    'not shown'
    >>> judge_claim({"change": "down"}, [Cell(2, 1, 3)])
    'does not hold'
    """
    is_up = claim["change"] == "up"
    if any(effect.is_below_zero if is_up else effect.is_above_zero for effect in effects):
        return "does not hold"
    if not all(effect.is_above_zero if is_up else effect.is_below_zero for effect in effects):
        return "not shown"
    return "holds as a speed-up" if claim.get("gain") else "holds"


def render_settings() -> str:
    """Return docs/paper_settings.md: the settings of full-scale rows beside those of the papers."""
    page, tables = yaml.safe_load((STUDIES / "paper_settings.yaml").read_text(encoding="utf-8")), list_tables()
    parts = [page["introduction"].rstrip()]
    for part in page["parts"]:
        args = ReproductionArguments(scale="full", data_dir=".")
        rows = {(row.name, row.dataset): row for row in plan(part["table"], tables[part["table"]], args)}
        values = resolve_settings(rows[part["row"], part["dataset"]], part.get("step", 0))
        lines = [["setting", "paper", "section", "value", "", "why"]]
        for entry in part["settings"]:
            value, paper = entry.get("value", values.get(entry["key"])), entry.get("paper")
            rounded = round(value, entry["digits"]) if "digits" in entry else value
            relation = "not stated" if paper is None else "as printed" if rounded == paper else "ours"
            printed = "" if paper is None else _format_setting(paper)
            cells = [f"`{entry['key']}`", printed, entry.get("section", ""), _format_setting(value), relation]
            lines.append([*cells, entry.get("why", "")])
        where = f"`{part['table']}`, row `{part['row']}`, {part['dataset']}:"
        parts += [f"## {part['title']}", where, Table(lines, is_markdown=True).to_markdown()]
    return "\n\n".join([*parts, page["choices"].rstrip()]) + "\n"


def resolve_settings(row: Row, number: int) -> dict[str, Any]:
    """Return the settings of a step of a row as its recipe resolves them, and the number of seeds."""
    step = row.runs[0][number]
    values: dict[str, Any] = {"seeds": len(row.runs)}
    for group in parse_arguments(RECIPES[step.recipe].options, [], settings=step.settings):
        values |= vars(group)
    for key, value in as_mapping(values["dataset_config"]).items():
        values[f"dataset_config.{key}"] = value
    if step.recipe == "posttrain" and values["temperature"] is None:
        values["temperature"] = "of the start model"
    return values


def _format_setting(value: Any) -> str:
    value = getattr(value, "value", value)  # of an enum
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main() -> None:
    for path, text in write_pages().items():
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)


if __name__ == "__main__":
    main()
