"""Train with every combination of settings and seed, and compare the runs in one table.

    supclap sweep esc10.yaml svr_alpha=0.1,0.5,1 --seeds 0 1 2 --data_dir ESC-10
    supclap sweep svr=none,bi-static learning_rate=1e-3,1e-4 --dry_run true

Each setting has one or more values, separated by commas. The first argument may be a YAML file of `supclap train`,
instead of its default file. The folder name of a run depends on its settings: finished runs are not repeated, and an
interrupted run continues from its last checkpoint. The table has the format of `supclap compare`, and its baseline is
the first combination. If a run fails, the table contains the finished runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from modeling_supclap.recipes.arguments import parse_names, read_settings
from modeling_supclap.recipes.options import SweepArguments
from modeling_supclap.recipes.run_checks import check_inputs
from modeling_supclap.recipes.running import run_command
from modeling_supclap.recipes.runs import Row, build_step, run_rows
from modeling_supclap.recipes.train_supclap import DEFAULT_CONFIG


def combine(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return all combinations of settings, as `{name: settings}`. The name contains only settings with several values.

    >>> combine(["svr_alpha=0.1,1", "loss=infonce"])["svr_alpha=1"]
    {'svr_alpha': 1, 'loss': 'infonce'}
    """
    values: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise ValueError(f"got {word!r}; expected a setting with its values, such as svr_alpha=0.1,0.5,1")
        values[key] = yaml.safe_load(f"[{text}]")

    combinations = {}
    for chosen in itertools.product(*values.values()):
        settings = dict(zip(values, chosen, strict=True))
        swept = [f"{key}={value}" for key, value in settings.items() if len(values[key]) > 1]
        combinations[", ".join(swept) or "run"] = settings
    return combinations


def choose_seeds(words: Sequence[str], seeds: Sequence[int], config: Mapping[str, Any]) -> list[int]:
    """Return the seeds of every combination: `--seeds`, or the setting `seed`, or the seed of the configuration, or 0.

    >>> choose_seeds(["seed=1,2", "svr_alpha=1"], [], {"seed": 7}), choose_seeds(["svr_alpha=1"], [], {"seed": 7})
    ([1, 2], [7])
    """
    swept: list[Any] = []
    for word in words:
        if word.startswith("seed="):
            swept += yaml.safe_load(f"[{word.removeprefix('seed=')}]")
    if swept and seeds:
        raise ValueError(f"got seed={swept} and --seeds {list(seeds)}; use one of them")
    chosen = swept or list(seeds) or [config.get("seed", 0)]
    if not all(type(seed) is int for seed in chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(f"got the seeds {chosen}; expected different whole numbers")
    return chosen


def main() -> None:
    """Run the command: check all settings, train, and write the table."""
    named, args = parse_names(SweepArguments, about=__doc__)
    has_config = bool(named) and named[0].endswith((".yaml", ".yml"))
    config = read_settings(named.pop(0) if has_config else DEFAULT_CONFIG)
    args.seeds = choose_seeds(named, args.seeds, config)
    named = [word for word in named if not word.startswith("seed=")]
    if not named and len(args.seeds) < 2:
        raise ValueError("got no settings and one seed; pass settings such as svr=none,bi-static, or several --seeds")

    rows = []
    for name, settings in combine(named).items():
        folder = re.sub("[^A-Za-z0-9.=_]+", "-", name)
        runs = [[build_step(folder, "train", {**config, **settings, "seed": seed}, args)] for seed in args.seeds]
        rows.append(Row(name, name, None, str({**config, **settings}.get("dataset")), runs))
    run_rows(check_inputs("sweep", rows, args), lambda finished: write_table(finished, args.output_dir))


def write_table(rows: Sequence[Row], folder: str) -> None:
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.recipes.compare_results import write_tables

    tables: dict[str, dict[str, dict[int, Results]]] = {}
    for row in rows:
        loaded = {run[-1].settings["seed"]: Results.load(run[-1].folder) for run in row.runs}
        tables.setdefault(row.dataset, {})[row.model] = loaded
    write_tables(tables, Path(folder), allow_different=True)


if __name__ == "__main__":
    run_command(main)
