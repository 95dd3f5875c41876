"""Compare the results of evaluations or training runs in one table.

    supclap compare outputs/evaluation/clap outputs/evaluation/mine
    supclap compare outputs/sweep/runs/*

The first model is the baseline. Differences to it are paired by query, with intervals and p-values. Training runs that
differ only in their seed count as one model. Evaluated models with names such as mine-seed0 and mine-seed1 also count
as one model.
Results of different protocols raise an error.

The output folder contains `table.md`, `table.html`, `table.csv` (all digits, and p-values) and `table.tex`
(booktabs). Folders without results, such as those of unfinished runs, are skipped.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.recipes.arguments import parse_names
from modeling_supclap.recipes.options import ComparisonArguments
from modeling_supclap.recipes.result_tables import format_heading, format_value, html_page, markdown_lines
from modeling_supclap.recipes.running import run_command, say

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results

    Models = Mapping[str, Mapping[int, Results]]  # results by model name and seed

CAPTION = (
    "Fractions in percent. In brackets: 95 % interval over recordings. With several seeds: mean ± standard deviation, "
    "t-interval over the seeds. Differences to the first model are paired by query, or by seed and query."
)
_VARYING = {"seed", "data_seed", "output_dir", "run_name", "resume_from_checkpoint"}
_SEED = re.compile(r"[-_.]?seed[-_=]?(\d+)")


def group_runs(folders: Sequence[str]) -> dict[str, dict[str, dict[int, Results]]]:
    """Load results as `{dataset: {model name: {seed: results}}}`. Runs that differ only in their seed are one model."""
    from modeling_supclap.evaluation.results import Results, get_dataset_name

    tables: dict[str, dict[str, dict[int, Results]]] = {}
    names: dict[str, str] = {}
    for folder in folders:
        if not Path(folder, "results.json").is_file():
            say(f"{folder} contains no results.json and is skipped")
            continue
        results = Results.load(folder)
        arguments = (results.content.get("training") or {}).get("arguments", {})
        name = Path(folder if arguments else results.content["model"]["name"]).name
        seed = arguments.get("seed", int((_SEED.findall(name) or [0])[-1]))
        models = tables.setdefault(get_dataset_name(results.protocol), {})

        # Names of starting models that differ only in their seed count as equal settings.
        settings = {key: value for key, value in arguments.items() if key not in _VARYING}
        key = _SEED.sub("", json.dumps([get_dataset_name(results.protocol), settings or name], sort_keys=True))
        label = names.setdefault(key, _SEED.sub("", name) if _SEED.sub("", name) not in models else folder)
        models.setdefault(folder if seed in models.get(label, {}) else label, {})[seed] = results
    return tables


def collect_scores(tables: Mapping[str, Models], allow_different: bool = False) -> list[dict[str, Any]]:
    """Collect the scores of several models on several datasets, with their differences to the first model.

    Returns one dict per dataset, score and model with "dataset", "score", "model", "seeds" (number of seeds), "value"
    (mean), "std", "low", "high", "chance", "difference", "difference_low", "difference_high" and "p_value". Unknown
    values are None. Different protocols raise ValueError, or only a warning if `allow_different` is set.
    """
    import numpy as np

    from modeling_supclap import evaluation
    from modeling_supclap.evaluation.results import SECTIONS, check_protocols, flat_scores
    from modeling_supclap.metrics.bootstrap import seed_interval
    from modeling_supclap.recipes.reproduce import summarize

    lines = []
    for dataset, models in tables.items():
        baseline = next(iter(models.values()))
        reference = next(iter(baseline.values()))
        for model, runs in models.items():
            tested: dict[str, Any] = {}
            first = next(iter(runs.values()))
            if runs is baseline or len(runs) > 1 or len(baseline) > 1 or "mteb" in first.scores:
                for seed, results in runs.items():
                    check_protocols(baseline.get(seed, reference), results, allow_different)
            else:
                with suppress(ValueError) if allow_different else nullcontext():  # no query in common
                    rows = evaluation.compare(reference, first, allow_different=allow_different)
                    tested = {row["score"]: row for row in rows}

            for each in flat_scores(first.scores):
                task, metric = each.place[0], each.place[-1]
                if metric not in SECTIONS[task].metrics and task != "multilingual":
                    continue
                line: dict[str, Any] = {"dataset": dataset, "score": " ".join(each.place), "model": model}
                compared = tested.get(line["score"], {})
                others = {} if compared or runs is baseline else baseline
                own: Any = {seed: (results, []) for seed, results in runs.items()}
                other: Any = {seed: (results, []) for seed, results in others.items()}
                score = summarize(own, other, each.place)
                ends = (each.low, each.high) if len(score["values"]) == 1 else seed_interval(score["values"])
                line |= {"seeds": len(score["values"]), "value": score["mean"], "std": score["std"]}
                line |= {"low": ends[0], "high": ends[1], "chance": each.chance}
                if "differences" in score:
                    compared = {**score, "difference": float(np.mean(score["differences"]))}
                line |= {"difference": compared.get("difference"), "difference_low": compared.get("low")}
                line |= {"difference_high": compared.get("high"), "p_value": compared.get("p_value")}
                lines.append(line)
    return lines


def format_table(scores: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Format the scores from `collect_scores` as rows of text, heading first: one row per dataset and score."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in scores:
        rows.setdefault((line["dataset"], line["score"]), {})[line["model"]] = line
    first, *others = dict.fromkeys(line["model"] for line in scores)

    table = [["dataset", "score", "chance", first]]
    for model in others:
        table[0] += [model, f"{model} - {first}"]
    for (dataset, score), by_model in rows.items():
        chance = next(iter(by_model.values()))["chance"]
        row = [dataset, format_heading(score), "" if chance is None else format_value(score, chance)]
        for model in (first, *others):
            line = by_model.get(model, defaultdict(lambda: None))
            row += [_cell(line)] if model == first else [_cell(line), _cell(line, "difference")]
        table.append(row)
    return table


def _cell(line: Mapping[str, Any], key: str = "value") -> str:
    """Format the value of a line from `collect_scores`, or its difference, with the interval."""
    if line[key] is None:
        return ""
    score, is_difference = line["score"], key == "difference"
    low, high = (line[f"difference_{end}" if is_difference else end] for end in ("low", "high"))
    text = format_value(score, line[key], is_difference)
    if not is_difference and line["std"] is not None:
        text += f" ± {format_value(score, line['std'])}"
    if low is None or high is None:
        return text
    return f"{text} ({format_value(score, low, is_difference)} to {format_value(score, high, is_difference)})"


def _stack(cell: str) -> str:
    """Format a LaTeX cell in two lines if it contains an interval or is the heading of a difference."""
    two_lines = r"\\shortstack[r]{\\rule{0pt}{3ex}\1\\\\\\scriptsize \2\3}"
    return re.sub(r"^(.+) (?:\((.+ to .+)\)|(- .+))$", two_lines, cell)


def write_tables(tables: Mapping[str, Models], folder: str | Path, allow_different: bool = False) -> None:
    """Write the scores as `table.csv`, and formatted as `table.md`, `table.html` and `table.tex`; print them."""
    import pandas

    scores = collect_scores(tables, allow_different)
    table = format_table(scores)
    markdown = "\n".join([*markdown_lines(table), "", CAPTION, ""])
    style = pandas.DataFrame(table[1:], columns=table[0]).style.hide(axis="index")
    style = style.format(_stack, escape="latex").format_index(_stack, escape="latex", axis=1)
    latex = style.to_latex(hrules=True, column_format="ll" + "r" * (len(table[0]) - 2))
    width = "\\ifdim\\width>\\textwidth\\textwidth\\else\\width\\fi"  # wide tables become smaller

    stem = Path(folder, "table")
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_text(stem.with_suffix(".csv"), pandas.DataFrame(scores).to_csv(index=False))
    write_text(stem.with_suffix(".md"), markdown)
    write_text(stem.with_suffix(".html"), html_page("Comparison", table, CAPTION))
    packages = "% needs \\usepackage{booktabs, graphicx}"
    write_text(stem.with_suffix(".tex"), f"{packages}\n\\resizebox{{{width}}}{{!}}{{%\n{latex}}}\n")
    say(f"\n{markdown}\n{stem}.md, also as .html, .csv and .tex")


def main() -> None:
    """Run the command: load the results of the folders and write their table."""
    folders, args = parse_names(ComparisonArguments, about=__doc__)
    tables = group_runs(folders)
    if sum(map(len, tables.values())) == 0:
        raise ValueError(f"got {folders}; pass the folders of results")
    write_tables(tables, args.output_dir, args.allow_different)


if __name__ == "__main__":
    run_command(main)
