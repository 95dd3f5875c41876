"""Reproduce tables and figures of the papers: train their rows with several seeds and compare with the printed numbers.

    supclap reproduce supclap/table1 --scale mini
    supclap reproduce supclap/table1 supclap/table2 --scale mini --data_dir ESC-10 --seeds 0 1
    supclap reproduce supclap --scale full --data_dir DATA --dry_run true

The studies are part of the repository, and are not installed: the command runs in a checkout.

`mini` takes minutes on two cores: tiny encoders, generated sounds and, with `--data_dir`, the recordings of ESC-10. It
shows the direction of a claim, not its size. `full` uses the papers' data and encoders; `--data_dir` then contains one
folder per dataset. `--dry_run true` only checks all settings, and lists missing data
and encoders, with the checks of the recipes: splits, folds, the published number of recordings, and clips on which an
evaluated model has trained. Otherwise, these raise an error before the first run; `--skip_missing true` skips their
rows. Up to a fifth of the published recordings may be missing, and more with `--allow_missing true`. An unusable
recording, such as a video without sound, ends a run; `--on_bad_audio skip` leaves such recordings out of trainings,
post-trainings and evaluations, and the table names them. A dry run decodes 100 recordings of each split, and all with
`--check_audio true`.

`configs/<paper>/tables.yaml` defines the tables, and `configs/<paper>/<table>_<row>.yaml` the training of each row.
The folder name of a run depends on its settings. Tables share runs, and finished runs are not repeated. Each table is
written as `.md`, `.html` and `.json`, and its figure as `.png`. If a run fails, the table contains the finished runs.
With `--rows`, `--datasets` or `--settings`, the files are named `TABLE_selected`, so that the complete table stays.
`supclap reproduce evidence/NAME` runs a study of `configs/evidence/studies.yaml`. An entry of your own in one of these
files adds a row or an arm, with the same tuning and checks.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from modeling_supclap.recipes.arguments import parse_names
from modeling_supclap.recipes.command import run_command
from modeling_supclap.recipes.options import ReproductionArguments


def __getattr__(name: str) -> Any:
    """Return a function of `studies.plan`, such as `list_tables`. Raise ImportError outside of a checkout."""
    if name.startswith("__"):
        raise AttributeError(name)
    if importlib.util.find_spec("modeling_supclap.recipes.studies") is None:
        raise ImportError("the studies are not installed; run `supclap reproduce` in a checkout of the repository")
    return getattr(importlib.import_module("modeling_supclap.recipes.studies.plan"), name)


def main() -> None:
    """Parse the command line; check, run and write the requested studies and tables."""
    names, args = parse_names(ReproductionArguments, about=__doc__)
    __getattr__("reproduce")(names, args)


if __name__ == "__main__":
    run_command(main)
