"""Rows and runs of a table: the configuration files of each row, with the settings of each dataset and seed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from modeling_supclap.recipes import options
from modeling_supclap.recipes.arguments import CONFIGS, read_settings
from modeling_supclap.recipes.running import say
from modeling_supclap.recipes.runs import Row, Step, build_step


def plan(name: str, table: Mapping[str, Any], args: options.ReproductionArguments) -> list[Row]:
    """Return a `Row` with its runs for each row and dataset of a table, restricted to `args.rows` and `args.datasets`.

    Datasets that need `--data_dir` are skipped if it is not set, except in a dry run.
    """
    if not table.get(args.scale):
        raise ValueError(f"{name} has no dataset at scale {args.scale}: {table.get(f'no_{args.scale}', 'not yet')}")

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
        of_group = list_rows(group, args)
        baseline = next(iter(of_group), None)
        for label, entry in of_group.items():
            if args.rows and not {label, entry["row"]} & set(args.rows):
                continue
            runs = []
            for seed in args.seeds:
                runs.append(_steps(name.partition("/")[0], label, entry, scale, seed, args))
            model = entry["model"] + ("" if "weights" in entry else scale.get("model_suffix", ""))
            rows.append(Row(label, model, None if label == baseline else baseline, dataset, runs))
    names = Counter((row.dataset, row.model) for row in rows)
    if repeated := [model for (_, model), count in names.items() if count > 1]:
        raise ValueError(f"{name} has two rows named {repeated[0]!r}; give each its own `model` in --controls")
    return rows


def list_rows(group: Mapping[str, Any], args: options.ReproductionArguments) -> dict[str, dict[str, Any]]:
    """List the rows of a group of a table definition at a scale, `{name: entry}`. Rows of the `--controls` file follow
    the row that they copy. The key "row" of an entry is the name of its configuration file without ".yaml".
    """
    controls = {} if args.controls is None else read_settings(args.controls)
    for name, control in controls.items():
        keys = set(control) if isinstance(control, dict) else set()
        if not {"row", "model"} <= keys <= {"row", "model", "settings"}:
            raise ValueError(f"{args.controls}: {name} has the keys {sorted(keys)}; give row, model and settings")

    rows: dict[str, dict[str, Any]] = {}
    for row, entry in group.items():
        entry = entry if isinstance(entry, dict) else {"model": entry}
        if args.scale != entry.get("only", args.scale):
            continue
        rows[row] = {"row": row, **entry, **entry.get(args.scale, {})}
        for name, control in controls.items():
            if control["row"] == row:
                settings = {**rows[row].get("settings", {}), **control.get("settings", {})}
                rows[name] = {**rows[row], **control, "settings": settings}
    return rows


def _steps(
    paper: str,
    label: str,
    entry: Mapping[str, Any],
    scale: Mapping[str, Any],
    seed: int,
    args: options.ReproductionArguments,
) -> list[Step]:
    """List the steps for one row and seed: train the initial model, run the row, and evaluate it on further data.

    A row with `weights` is only evaluated, by default in the retrieval of the dataset of the base file.
    """
    if "weights" in entry:
        dataset = read_settings(CONFIGS / paper / scale["base"])["dataset"]
        evaluation = dict(scale.get("evaluate") or {"dataset": dataset, "tasks": ["retrieval"]})
        evaluation["model"] = entry["weights"]
        return [build_step(label, "evaluate", {**evaluation, "seed": seed}, args)]
    settings = read_settings(CONFIGS / paper / f"{entry['row']}.yaml", CONFIGS / paper / scale["base"])
    settings |= {**scale.get("settings", {}), **entry.get("settings", {}), **options.as_mapping(args.settings)}
    recipe = entry.get("recipe", "train")

    steps = []
    start = scale.get("start", entry.get("start"))
    if start is not None:
        start_scale = {**scale, "base": scale.get("start_base", scale["base"]), "start": None, "evaluate": None}
        steps = _steps(paper, start, {"row": start}, start_scale, seed, args)
        settings["model"] = str(steps[-1].folder)
    if recipe != "none":
        steps.append(build_step(label, recipe, {**settings, "seed": seed}, args))

    if scale.get("evaluate"):
        model = str(steps[-1].folder) if steps else settings["model"]
        steps.append(build_step(label, "evaluate", {**scale["evaluate"], "model": model, "seed": seed}, args))
    return steps
