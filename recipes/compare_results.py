"""Compare the results of evaluations or training runs in tables with one row for each model.

    supclap compare outputs/evaluation/clap outputs/evaluation/mine
    supclap compare outputs/sweep/runs/*
    supclap compare results/SVR-seed0 results/SVR-seed1 results/InfoNCE-seed0 results/InfoNCE-seed1

The first model is the baseline. Differences to it are paired by query, with intervals and p-values. Training runs that
differ only in their seed count as one model, and so do other results whose folders or models have names such as
mine-seed0 and mine-seed1. Results of different protocols raise an error.

The output folder contains `table.md`, `table.html`, `table.csv` (all digits, and p-values) and `table.tex`
(booktabs). Folders without results, such as those of unfinished runs, are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.arguments import parse_names
from modeling_supclap.recipes.command import run_command, say
from modeling_supclap.recipes.options import ComparisonArguments

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results

    Models = Mapping[str, Mapping[Any, Results]]  # results by model name, and by seed or (fold, seed)

_VARYING = {"seed", "data_seed", "output_dir", "run_name", "resume_from_checkpoint"}
_SEED = re.compile(r"[-_.]?seed[-_=]?(\d+)")


def group_runs(folders: Sequence[str]) -> dict[str, dict[str, dict[int, Results]]]:
    """Load results as `{dataset: {model name: {seed: results}}}`. Runs that differ only in their seed are one model.

    The name of a training run, and of any folder with a seed in its name, is that of the folder. Other results have the
    name of their model.
    """
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
        is_named = bool(arguments) or _SEED.search(Path(folder).name)
        name = Path(folder if is_named else results.content["model"]["name"]).name
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


def write_tables(tables: Mapping[str, Models], folder: str | Path, allow_different: bool = False) -> None:
    """Compare models on each dataset, `{dataset: models}`; write the tables, and print them.

    The differences are to the first model.
    """
    from modeling_supclap.evaluation import tables as writer
    from modeling_supclap.evaluation.comparison import COMPARISON_CAPTION, comparison_tables, tabulate

    records, written = [], []
    for dataset, models in tables.items():
        of_dataset = tabulate(models, allow_different)
        written += comparison_tables(dataset, of_dataset)
        records += [{"dataset": dataset, **record} for record in of_dataset]
    stem = Path(folder, "table")
    text = writer.write_tables(stem, "Comparison", written, records, COMPARISON_CAPTION)
    say(f"\n{text}\n{stem}.md, also as .html, .csv and .tex")


def main() -> None:
    """Run the command: load the results of the folders and write their table."""
    folders, args = parse_names(ComparisonArguments, about=__doc__)
    tables = group_runs(folders)
    if sum(map(len, tables.values())) == 0:
        raise ValueError(f"got {folders}; pass the folders of results")
    write_tables(tables, args.output_dir, args.allow_different)


if __name__ == "__main__":
    run_command(main)
