"""Select tables and studies by name, plan the runs of a table, and check and run them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from modeling_supclap.recipes.arguments import CONFIGS, YAML_LOADER, read_settings
from modeling_supclap.recipes.command import is_first_process, say
from modeling_supclap.recipes.options import MISSING_SHARE, ReproductionArguments, as_mapping
from modeling_supclap.recipes.studies.evidence import check_study, run_study
from modeling_supclap.recipes.studies.tables import write_table
from modeling_supclap.recipes.sweep import Row, Step, build_step, check_rows, run_rows

PUBLISHED_CLIPS = {
    "audiocaps": {"train": 49_274, "test": 957},  # as often distributed; the authors' list of test clips has 975
    "clotho": {"train": 3_839, "test": 1_045},
    "wavcaps": {"train": 398_050, "test": 5_000},  # with the 5,000 clips held out in SupCLAP section E.2
    "vggsound": {"test": 15_446},
    "esc50": {"all": 2_000},
    "urbansound8k": {"all": 8_732},
}
"""Number of clips in the published splits, or in all folds together ("all")."""


def reproduce(names: Sequence[str], args: ReproductionArguments) -> None:
    """Check the inputs of the named studies and tables, then run the unfinished steps and write them."""
    studies, tables = select(names, args)
    refuse = refuse_few_clips if args.scale == "full" and not args.allow_missing else None
    arms = {name: check_study(name, study, args) for name, study in studies.items()}
    rows = {name: check_rows(name, plan(name, table, args), args, refuse) for name, table in tables.items()}
    for name, study in studies.items():
        if arms[name]:
            path = run_study(name, study, arms[name], args)
            if is_first_process():
                say(f"\n{path.read_text(encoding='utf-8')}\n{path}, also as .json and .png")
    for name, table in tables.items():
        run_rows(rows[name], partial(write_table, name, table, args=args))


def refuse_few_clips(step: Step, splits: Mapping[str, Any]) -> None:
    """Raise ValueError if the data of a step have fewer than four fifths of the published clips.

    An evaluation of a part of a dataset with folds is not compared.
    """
    published = PUBLISHED_CLIPS.get(step.settings.get("dataset", ""), {})
    for name, count in published.items():
        here = len(splits.get(name, ()))
        if name == "all" and (step.recipe != "evaluate" or step.settings.get("folds")):
            here = sum(map(len, splits.values()))
        if 0 < here < (1 - MISSING_SHARE) * count:
            what = "the dataset" if name == "all" else name
            raise ValueError(f"{what} has {here:,} clips of {count:,}; --allow_missing true accepts them")


def select(names: Sequence[str], args: ReproductionArguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the named studies and tables, `{name: definition}`.

    Tables without the scale are left out with a message. Raises ValueError for an unknown name, if no table is left, or
    if none of them has one of `args.rows` or `args.datasets`.
    """
    studies = find_studies([name for name in names if name.startswith("evidence")])
    of_tables = [name for name in names if not name.startswith("evidence")]
    tables = find_tables(of_tables) if of_tables or not studies else {}
    for name in [name for name, table in tables.items() if args.scale not in table]:
        reason = tables[name].get(f"no_{args.scale}", "not yet")
        problem = f"{name} has no dataset at scale {args.scale}: {reason}"
        if len(tables) == 1:
            raise ValueError(problem)
        say(f"{problem}; it is left out")
        del tables[name]

    groups = [study["arms"] for study in studies.values()]
    datasets: set[str] = set()
    for table in tables.values():
        datasets |= table[args.scale].keys()
        groups += [list_rows(group, args.scale) for group in table["groups"]]
    places = ", ".join([*studies, *tables])
    _refuse_unknown(f"{places}: no rows", args.rows, itertools.chain(*groups))
    if tables:
        _refuse_unknown(f"{places}: no datasets", args.datasets, datasets)
    return studies, tables


def _refuse_unknown(problem: str, named: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    unknown = sorted(set(named) - known)
    if unknown:
        raise ValueError(f"{problem} {unknown}; expected some of {', '.join(sorted(known))}")


def list_tables() -> dict[str, dict[str, Any]]:
    """Load all table definitions, `{name: definition}` with names such as "supclap/table1"."""
    tables = {}
    for path in sorted(CONFIGS.glob("*/tables.yaml")):
        for name, table in yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER).items():
            tables[f"{path.parent.name}/{name}"] = table
    return tables


def find_tables(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Select table definitions by name. The name of a paper selects all of its tables; "all" selects every table."""
    tables = list_tables()
    if not names:
        raise ValueError(f"no table was named; name one or more of: all, {', '.join(tables)}")
    selected: dict[str, dict[str, Any]] = {}
    for name in names:
        if "lacks" in tables.get(name, {}):
            raise ValueError(f"{name} cannot be reproduced: {tables[name]['lacks']}")
        matches = {}
        for key, table in tables.items():
            if "lacks" not in table and (name in ("all", key) or key.startswith(f"{name}/")):
                matches[key] = table
        if not matches:
            raise ValueError(f"unknown table {name!r}; expected one of {', '.join(tables)}")
        selected |= matches
    return selected


def find_studies(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Select studies by name. The name "evidence" selects all of them."""
    path = CONFIGS / "evidence" / "studies.yaml"
    studies = {f"evidence/{name}": study for name, study in yaml.load(path.read_text("utf-8"), YAML_LOADER).items()}
    _refuse_unknown("unknown studies", names, ["evidence", *studies])
    return {name: study for name, study in studies.items() if name in names or "evidence" in names}


def plan(name: str, table: Mapping[str, Any], args: ReproductionArguments) -> list[Row]:
    """Return a `Row` with its runs for each row and dataset of a table, restricted to `args.rows` and `args.datasets`.

    Datasets that need `--data_dir` are skipped if it is not set, except in a dry run.
    """
    datasets = {}
    chosen = {name: scale for name, scale in table[args.scale].items() if not args.datasets or name in args.datasets}
    for dataset, scale in chosen.items():
        scale = scale if isinstance(scale, dict) else {"base": scale}
        if scale.get("needs_data") and args.data_dir is None and not args.dry_run:
            say(f"{name}: {dataset} is left out because it needs --data_dir")
        else:
            datasets[dataset] = scale
    if chosen and not datasets:
        raise ValueError(f"all datasets of {name} need --data_dir; give the folder of the recordings")

    rows = []
    for (dataset, scale), group in itertools.product(datasets.items(), table["groups"]):
        of_group = list_rows(group, args.scale)
        baseline = next(iter(of_group), None)
        for label, entry in of_group.items():
            if args.rows and label not in args.rows:
                continue
            paper = name.partition("/")[0]
            runs = [_steps(paper, label, entry, scale, seed, args) for seed in args.seeds]
            model = entry["model"] + ("" if "weights" in entry else scale.get("model_suffix", ""))
            rows.append(Row(label, model, None if label == baseline else baseline, dataset, runs))
    return rows


def list_rows(group: Mapping[str, Any], scale: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a group of a table definition at a scale, `{name: entry}`."""
    rows = {}
    for row, entry in group.items():
        entry = entry if isinstance(entry, dict) else {"model": entry}
        if scale == entry.get("only", scale):
            rows[row] = {**entry, **entry.get(scale, {})}
    return rows


def _steps(
    paper: str, label: str, entry: Mapping[str, Any], scale: Mapping[str, Any], seed: int, args: ReproductionArguments
) -> list[Step]:
    """List the steps for one row and seed: train the initial model, run the row, and evaluate it on further data.

    A row with `weights` is only evaluated, by default in the retrieval of the dataset of the base file.
    """
    if "weights" in entry:
        dataset = read_settings(CONFIGS / paper / scale["base"])["dataset"]
        evaluation = dict(scale.get("evaluate") or {"dataset": dataset, "tasks": ["retrieval"]})
        evaluation["model"] = entry["weights"]
        return [build_step(label, "evaluate", {**evaluation, "seed": seed}, args)]
    settings = read_settings(CONFIGS / paper / f"{entry.get('row', label)}.yaml", CONFIGS / paper / scale["base"])
    settings |= {**scale.get("settings", {}), **entry.get("settings", {}), **as_mapping(args.settings)}
    recipe = entry.get("recipe", "train")

    steps = []
    start = scale.get("start", entry.get("start"))
    if start is not None:
        start_scale = {**scale, "base": scale.get("start_base", scale["base"]), "start": None, "evaluate": None}
        steps = _steps(paper, start, {}, start_scale, seed, args)
        settings["model"] = str(steps[-1].folder)
    if recipe != "none":
        steps.append(build_step(label, recipe, {**settings, "seed": seed}, args))

    if scale.get("evaluate"):
        model = str(steps[-1].folder) if steps else settings["model"]
        steps.append(build_step(label, "evaluate", {**scale["evaluate"], "model": model, "seed": seed}, args))
    return steps
