"""Reproduce tables and figures of the papers: train their rows with several seeds and compare with the printed numbers.

    supclap reproduce supclap/table1 --scale mini
    supclap reproduce supclap/table1 supclap/table2 --scale mini --data_dir ESC-10 --seeds 0 1
    supclap reproduce supclap --scale full --data_dir DATA --dry_run true

`mini` takes minutes on two cores: tiny encoders, generated sounds and, with `--data_dir`, the recordings of ESC-10. It
shows the direction of a claim, not its size. `full` uses the papers' data and encoders; `--data_dir` then contains one
folder per dataset. `--dry_run true` only checks all settings, estimates steps, time and memory, and lists missing data
and encoders, with the checks of the recipes: splits, folds, the published number of recordings, and clips on which an
evaluated model has trained. Otherwise, these raise an error before the first run; `--skip_missing true` skips their
rows. Up to a fifth of the published recordings may be missing, and more with `--allow_missing true`. An unusable
recording, such as a video without sound, ends a run; `--on_bad_audio skip` leaves such recordings out of trainings,
post-trainings and evaluations, and the table names them. A dry run decodes 100 recordings of each split, and all with
`--check_audio true`.

`configs/<paper>/tables.yaml` defines the tables, and `configs/<paper>/<table>_<row>.yaml` the training of each row.
The folder name of a run depends on its settings. Tables share runs, and finished runs are not repeated. Each table is
written as `.md`, `.html` and `.json`, and its figure as `.png`. If a run fails, the table contains the finished runs.
With `--rows`, `--datasets`, `--settings` or `--controls`, the files are named `TABLE_selected`, so that the complete
table stays. A `--controls` file is a YAML file that adds rows to the table, for example:

    infonce_4x: {row: table1_infonce, model: "InfoNCE, 4 x the steps", settings: {num_train_epochs: 40}}

`row` is the row to copy, `model` the name in the table, and `settings` the changed settings. `supclap reproduce
evidence/NAME` runs a study of `recipes/studies/evidence.py`.
"""

from __future__ import annotations

from modeling_supclap.recipes.arguments import parse_names
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.run_checks import find_data
from modeling_supclap.recipes.running import run_command
from modeling_supclap.recipes.studies.plan import plan
from modeling_supclap.recipes.studies.select import find_jobs, find_tables, list_tables

__all__ = ["find_data", "find_jobs", "find_tables", "list_tables", "main", "plan"]


def main() -> None:
    """Parse the command line; check, run and write the requested studies and tables."""
    names, args = parse_names(ReproductionArguments, about=__doc__)
    jobs = find_jobs(names, args)
    for job in jobs:
        job.check()  # all inputs, before the first run
    for job in () if args.dry_run else jobs:
        job.run()


if __name__ == "__main__":
    run_command(main)
