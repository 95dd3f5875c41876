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

from pathlib import Path
from typing import TYPE_CHECKING

from modeling_supclap.recipes.arguments import parse_names
from modeling_supclap.recipes.command import run_command, say
from modeling_supclap.recipes.options import ComparisonArguments

if TYPE_CHECKING:
    from modeling_supclap.evaluation import ScoreTable


def save_table(scores: ScoreTable, folder: str | Path) -> None:
    """Write a table of models to a folder, and print it."""
    say(f"\n{scores.save(folder)}\n{Path(folder, 'table.md')}, also as .html, .csv and .tex")


def main() -> None:
    """Run the command: load the results of the folders and write their table."""
    folders, args = parse_names(ComparisonArguments, about=__doc__)
    from modeling_supclap.evaluation import load_results, table

    if not (models := load_results(*folders)):
        raise ValueError(f"got {folders}; pass the folders of results")
    save_table(table(models, args.allow_different), args.output_dir)


if __name__ == "__main__":
    run_command(main)
