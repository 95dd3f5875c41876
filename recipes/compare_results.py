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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.evaluation.comparison import check_protocols, compare, compare_seeds
from modeling_supclap.metrics.comparison import Cell, Difference, summarize
from modeling_supclap.recipes.arguments import parse_names
from modeling_supclap.recipes.options import ComparisonArguments
from modeling_supclap.recipes.result_tables import find_metric, format_heading, html_page, markdown_lines
from modeling_supclap.recipes.running import run_command, say

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results, Score

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
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; pass the folders of results")
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
        data = [results.protocol.get("dataset_config"), results.content.get("data")] if settings else []
        key = json.dumps([get_dataset_name(results.protocol), settings or name, data], sort_keys=True)
        key = _SEED.sub("", key)
        label = names.setdefault(key, _SEED.sub("", name) if _SEED.sub("", name) not in models else folder)
        models.setdefault(folder if seed in models.get(label, {}) else label, {})[seed] = results
    return tables


def collect_scores(tables: Mapping[str, Models], allow_different: bool = False) -> list[dict[str, Any]]:
    """Collect the scores of several models on several datasets, with their differences to the first model.

    Returns one dict per dataset, score and model with "dataset", "score", "model", "seeds" (number of seeds), "value"
    (mean), "std", "low", "high", "chance", "difference", "difference_low", "difference_high" and "p_value". Unknown
    values are None. Different protocols raise ValueError, or only a warning if `allow_different` is set.
    """
    lines = []
    for dataset, models in tables.items():
        baseline = next(iter(models.values()))
        of_baseline = scores_by_place(baseline)
        for model, runs in models.items():
            paired = {} if runs is baseline else pair_queries(runs, baseline, allow_different)
            for place, of_seeds in scores_by_place(runs).items():
                first = next(iter(of_seeds.values()))
                values = {seed: score.value for seed, score in of_seeds.items()}
                recordings = first.cell.interval if len(values) == 1 else None
                cell = summarize(list(values.values()), recordings, is_share=first.metric.percent)
                name = " ".join(place)
                line = {"dataset": dataset, "score": name, "model": model, "seeds": len(values)}
                line |= {"value": cell.value, "std": cell.std, "low": cell.low, "high": cell.high}

                found = paired.get(name)
                if found is None and runs is not baseline:
                    others = {seed: score.value for seed, score in of_baseline.get(place, {}).items()}
                    found = compare_seeds(runs, baseline, place, values, others)
                line |= {"chance": first.chance, "difference": None if found is None else found.value}
                for end in ("low", "high"):
                    line[f"difference_{end}"] = getattr(found, end, None)
                lines.append({**line, "p_value": getattr(found, "p_value", None)})
    return lines


def scores_by_place(runs: Mapping[int, Results]) -> dict[tuple[str, ...], dict[int, Score]]:
    """Return the scores of the tables, `{path: {seed: score}}`."""
    from modeling_supclap.evaluation.results import SECTIONS, flat_scores

    scores: dict[tuple[str, ...], dict[int, Score]] = {}
    for seed, results in runs.items():
        for score in flat_scores(results.scores):
            task, metric = score.place[0], score.place[-1]
            if metric in SECTIONS[task].metrics or task == "multilingual":
                scores.setdefault(score.place, {})[seed] = score
    return scores


def pair_queries(
    runs: Mapping[int, Results], baseline: Mapping[int, Results], allow_different: bool
) -> dict[str, Difference]:
    """Compare two models with one run each by query, `{score: difference}`. For more runs, only check the protocols."""
    reference = next(iter(baseline.values()))
    first = next(iter(runs.values()))
    paired: dict[str, Difference] = {}
    if len(runs) > 1 or len(baseline) > 1 or "mteb" in first.scores:
        for seed, results in runs.items():
            check_protocols(baseline.get(seed, reference), results, allow_different)
        return paired
    with suppress(ValueError) if allow_different else nullcontext():  # no query in common
        for row in compare(reference, first, allow_different=allow_different):
            paired[row["score"]] = Difference(row["difference"], row["low"], row["high"], p_value=row["p_value"])
    return paired


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
        row = [dataset, format_heading(score), "" if chance is None else find_metric(score).format(chance)]
        for model in (first, *others):
            row.append(_cell(by_model.get(model)))
            if model != first:
                row.append(_cell(by_model.get(model), is_difference=True))
        table.append(row)
    return table


def _cell(line: Mapping[str, Any] | None, is_difference: bool = False) -> str:
    """Format the value of a line from `collect_scores`, or its difference, with the interval; "" if it is unknown."""
    if line is None or (is_difference and line["difference"] is None):
        return ""
    metric = find_metric(line["score"])
    if is_difference:
        cell = Cell(line["difference"], line["difference_low"], line["difference_high"])
    else:
        cell = Cell(line["value"], line["low"], line["high"], line["std"])
    return cell.format(metric, signed=is_difference)


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
    write_text(stem.with_suffix(".html"), html_page("Comparison", [(table, CAPTION)]))
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
