"""Write the generated parts of docs/results.md and docs/paper_settings.md (`make results-page`).

Each file in `results/*/` is a table or a study, written by `supclap reproduce`. If docs/images has a figure
with the same file name, it is included. Verdicts on the claims of `claims.yaml` come first. A comment line in
docs/results.md marks the generated part.
docs/paper_settings.md compares the papers' settings with those of full-scale rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import BertConfig

from modeling_supclap import SupCLAPConfig, SupCLAPModel
from modeling_supclap.configuration_supclap import CNN14Config
from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.evaluation.results import NUM_CLASSES
from modeling_supclap.metrics.comparison import Cell, difference
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.estimates import ALL_CLIPS, TRAIN_CLIPS, estimate
from modeling_supclap.recipes.options import ReproductionArguments, as_mapping
from modeling_supclap.recipes.posttrain_teminal import count_trained
from modeling_supclap.recipes.result_tables import find_metric, markdown_lines
from modeling_supclap.recipes.runs import RECIPES, Row, Step
from modeling_supclap.recipes.studies.evidence import format_interval, render_study
from modeling_supclap.recipes.studies.plan import plan
from modeling_supclap.recipes.studies.render import markdown_table
from modeling_supclap.recipes.studies.select import list_tables
from modeling_supclap.recipes.studies.vectors import render_vectors
from modeling_supclap.training.hard_batches import POOL_SIZE

RESULTS = Path(__file__).parent / "results"
SETTINGS = Path(__file__).parent / "paper_settings.yaml"
CLAIMS = Path(__file__).parent / "claims.yaml"
ROOT = Path(__file__).resolve().parents[2]
RESULTS_PAGE = ROOT / "docs" / "results.md"
SETTINGS_PAGE = ROOT / "docs" / "paper_settings.md"
MARK = "<!-- Generated from here by `make results-page` from the files of recipes/studies/results. -->"


def render_results(page: str) -> str:
    """Replace the generated text in docs/results.md with the tables of all result files."""
    parts = [page.partition(MARK)[0].rstrip(), "", MARK, "", "### Verdicts of the studies", "", *render_verdicts()]
    parts += ["", "### Verdicts of single tables", "", *render_claims()]
    for path in sorted(RESULTS.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "study" in content:
            parts += ["", render_study(content, f"images/{path.stem}.png").rstrip()]
            continue
        if path.stem == "vectors":
            parts += ["", render_vectors(content).rstrip()]
            continue
        parts += ["", markdown_table(content).rstrip()]
        if (RESULTS_PAGE.parent / "images" / f"{path.stem}.png").exists():
            parts += ["", f"![{content['title']}](images/{path.stem}.png)"]
    return "\n".join(parts) + "\n"


def render_claims() -> list[str]:
    """Return a table with the verdict on each claim of `claims.yaml`, as lines of Markdown."""
    lines = [["claim", "difference, 95 % interval", "seeds", "verdict"]]
    for claim in yaml.safe_load(CLAIMS.read_text(encoding="utf-8")):
        content = json.loads((RESULTS / "mini" / f"{claim['table']}.json").read_text(encoding="utf-8"))
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
            study = json.loads((RESULTS / "evidence" / f"{claim['study']}.json").read_text(encoding="utf-8"))
            verdict += "".join(study["verdict"].partition(", explained by a control")[1:])
        lines.append([claim["claim"], "; ".join(texts), str(len(rows[claim["row"]]["seeds"])), verdict])
    return markdown_lines(lines)


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
    for effect in effects:
        if effect.is_below_zero if is_up else effect.is_above_zero:
            return "does not hold"
    for effect in effects:
        if not (effect.is_above_zero if is_up else effect.is_below_zero):
            return "not shown"
    return "holds as a speed-up" if claim.get("gain") else "holds"


def render_verdicts() -> list[str]:
    """Return a table with the verdict of each study, as lines of Markdown."""
    verdicts = [["study", "claim", "verdict", "baseline", "difference at the end", "steps", "seeds"]]
    for path in sorted(RESULTS.glob("evidence/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        baseline, method = next(iter(content["arms"].values())), content["arms"][content["method"]]
        line = [f"`{content['study']}`", content["claim"], f"**{content['verdict']}**"]
        line += [format_interval(baseline["scores"][-1]), format_interval(method["differences"]["final"], signed=True)]
        steps = dict.fromkeys(f"{arm['points'][-1][0]['steps']:,.0f}" for arm in (baseline, method))
        verdicts.append([*line, " and ".join(steps), str(len(content["seeds"]))])
    return markdown_lines(verdicts)


def render_settings() -> str:
    """Return docs/paper_settings.md: the settings of full-scale rows beside those of the papers."""
    page, tables = yaml.safe_load(SETTINGS.read_text(encoding="utf-8")), list_tables()
    parts = [page["introduction"]]
    for part in page["parts"]:
        name = part["table"]
        args = ReproductionArguments(scale="full", data_dir=".")
        rows = {(row.name, row.dataset): row for row in plan(name, tables[name], args)}
        values = resolve_settings(rows[part["row"], part["dataset"]], part.get("step", 0))
        lines = [["setting", "paper", "section", "value", "", "why"]]
        for entry in part["settings"]:
            value, paper = values[entry["key"]], entry.get("paper")
            rounded = round(value, entry["digits"]) if "digits" in entry else value
            relation = "not stated" if paper is None else "as printed" if rounded == paper else "ours"
            printed = "" if paper is None else _format_setting(paper)
            cells = [f"`{entry['key']}`", printed, entry.get("section", ""), _format_setting(value), relation]
            lines.append([*cells, entry.get("why", "")])
        where = f"`{name}`, row `{part['row']}`, {part['dataset']}"
        parts += [f"## {part['title']}", "", f"{where}:", "", *markdown_lines(lines), ""]
    return "\n".join([*parts, page["choices"], *render_costs()])


def render_costs() -> list[str]:
    """Return a table with the estimated cost of each full-scale table, as lines of Markdown."""
    args = ReproductionArguments(scale="full", data_dir=".", seeds=[0])
    num_seeds = len(ReproductionArguments().seeds)
    lines = [["table", "trainings", "steps of a run", "hours, one GPU", "GiB, one GPU", "GiB, eight GPUs"]]
    every: dict[Path, Any] = {}
    for name, table in list_tables().items():
        if "full" not in table:
            continue
        steps: dict[Path, Any] = {}
        for row in plan(name, table, args):
            steps |= {step.folder: step for step in row.runs[0] if step.recipe != "evaluate"}
        costs = [estimate_cost(step) for step in steps.values()]
        every |= dict(zip(steps, costs, strict=True))
        lines.append([f"`{name}`", str(num_seeds * len(costs)), *_sum_costs(costs, num_seeds)])
    lines.append(["all, shared runs once", str(num_seeds * len(every)), *_sum_costs([*every.values()], num_seeds)])
    return [*markdown_lines(lines), ""]


def estimate_cost(step: Step) -> tuple[int, float, float, float]:
    """Estimate steps and hours of a training, and its memory in GiB with one GPU and with eight, 0 if unknown."""
    parsed = parse_arguments(RECIPES[step.recipe][1], [], settings=step.settings)
    args = parsed[-1]
    if step.recipe == "posttrain":
        pairs = NUM_CLASSES["esc50"] * (NUM_CLASSES["esc50"] - 1)
        steps = pairs // args.per_device_train_batch_size * args.num_train_epochs * len(parsed[0].stages)
        return int(steps), 0.0, 0.0, 0.0
    cost = estimate(parsed)
    assert cost is not None
    args.per_device_train_batch_size //= 8
    shared = estimate(parsed)
    assert shared is not None
    return cost.steps, cost.hours, cost.memory_gib, shared.memory_gib


def _sum_costs(costs: Sequence[tuple[int, float, float, float]], num_seeds: int) -> list[str]:
    """Format the range of the steps, the sum of the hours of all seeds, and the largest memory."""
    steps, hours, memory, shared = zip(*costs, strict=True)
    low, high = min(steps), max(steps)
    cells = [f"{low:,}" if low == high else f"{low:,} to {high:,}"]
    for value, digits in ((num_seeds * sum(hours), 0), (max(memory), 1), (max(shared), 1)):
        cells.append(f"{value:,.{digits}f}" if value else "")
    return cells


def resolve_settings(row: Row, number: int) -> dict[str, Any]:
    """Return the settings of a step of a row as its recipe resolves them, and counts that follow from them."""
    step = row.runs[0][number]
    parsed = parse_arguments(RECIPES[step.recipe][1], [], settings=step.settings)
    values: dict[str, Any] = {"seeds": len(row.runs)}
    for group in parsed:
        values |= vars(group)
    for key, value in as_mapping(values["dataset_config"]).items():
        values[f"dataset_config.{key}"] = value
    if step.recipe == "posttrain" and values["temperature"] is None:
        values["temperature"] = "of the start model"
    if step.recipe == "train":
        cost = estimate(parsed)
        values |= {
            "train_clips": TRAIN_CLIPS[values["dataset"]],
            "steps": None if cost is None else cost.steps,
            "hard_negatives_pool": POOL_SIZE,
        }
    if step.recipe == "posttrain":
        pairs = NUM_CLASSES["esc50"] * (NUM_CLASSES["esc50"] - 1)
        share = values["train_fraction"] * (1 - values.get("dataset_config.test_fraction", 0.0))
        values |= {"pairs_of_stage_a": pairs, "items_of_stage_b": 3 * pairs}
        recordings = round(share * ALL_CLIPS["esc50"])
        values |= {"split_recordings": recordings}
        values |= {"train_recordings": NUM_CLASSES["esc50"] if values["fixed_recordings"] else recordings}
        values |= {"items_of_a_batch": 3 * values["per_device_train_batch_size"], **count_msclap(parsed[1])}
    return values


def count_msclap(part_args: Any) -> dict[str, float]:
    """Count the parameters of MS-CLAP 2022 that a post-training trains, without its weights."""
    with torch.device("meta"):
        config = SupCLAPConfig(
            audio_config=CNN14Config(), text_config=BertConfig(), projection_dim=1024, projection_type="residual"
        )
        model = SupCLAPModel(config)
    part_args.choose_parameters(model)
    return count_trained(model)


def _format_setting(value: Any) -> str:
    value = getattr(value, "value", value)  # of an enum
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main() -> None:
    write_text(RESULTS_PAGE, render_results(RESULTS_PAGE.read_text(encoding="utf-8")))
    write_text(SETTINGS_PAGE, render_settings())


if __name__ == "__main__":
    main()
