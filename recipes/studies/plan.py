"""Select tables and studies by name, plan the runs of a table, and check and run them."""

from __future__ import annotations

import itertools
from collections import Counter
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


class TableJob:
    """A table of a paper, whose runs are checked first, and then run."""

    def __init__(self, name: str, table: Mapping[str, Any], args: ReproductionArguments) -> None:
        self.name, self.table, self.args = name, table, args
        self.rows = plan(name, table, args)

    def check(self) -> None:
        """Check settings and inputs; drop rows with missing inputs, or raise. A dry run prints them."""
        is_published = self.args.scale == "full" and not self.args.allow_missing
        refuse = refuse_few_clips if is_published else None
        self.rows = check_rows(self.name, self.rows, self.args, refuse) if self.rows else []

    def run(self) -> None:
        """Run the unfinished steps of all rows, and write the table."""
        run_rows(self.rows, partial(write_table, self.name, self.table, args=self.args))


class StudyJob:
    """A study of `configs/evidence/studies.yaml`, whose runs are checked first, and then tuned and run."""

    def __init__(self, name: str, study: Mapping[str, Any], args: ReproductionArguments) -> None:
        self.name, self.args = name, args
        self.study = {**study, "arms": list_rows(study["arms"], args)}
        self.arms = list(self.study["arms"])

    def check(self) -> None:
        """Check settings and inputs; drop arms with missing inputs, or raise. A dry run prints them."""
        self.arms = check_study(self.name, self.study, self.args)

    def run(self) -> None:
        """Tune and run the arms, write the study, and print it."""
        if self.arms:
            path = run_study(self.name, self.study, self.arms, self.args)
            if is_first_process():
                say(f"\n{path.read_text(encoding='utf-8')}\n{path}, also as .json and .png")


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


def find_jobs(names: Sequence[str], args: ReproductionArguments) -> list[TableJob | StudyJob]:
    """Return the named studies and tables, studies first.

    Raises ValueError for an unknown name, or if none of them has one of `args.rows`, `args.datasets` or the rows that a
    `--controls` file copies.
    """
    studies = find_studies([name for name in names if name.startswith("evidence")])
    of_tables = [name for name in names if not name.startswith("evidence")]
    tables = find_tables(of_tables) if of_tables or not studies else {}
    tables = {name: table for name, table in tables.items() if args.scale in table or len(tables) == 1}
    study_jobs = [StudyJob(name, study, args) for name, study in studies.items()]
    table_jobs = [TableJob(name, table, args) for name, table in tables.items()]

    rows, datasets = set[str](), set[str]()
    for study_job in study_jobs:
        rows |= study_job.study["arms"].keys()
    for table in tables.values():
        datasets |= table[args.scale].keys()
        for group in table["groups"]:
            rows |= list_rows(group, args).keys()
    copied = () if args.controls is None else [control["row"] for control in read_settings(args.controls).values()]
    places = ", ".join([*studies, *tables])
    _refuse_unknown(f"{places}: no rows", [*args.rows, *copied], rows)
    if tables:
        _refuse_unknown(f"{places}: no datasets", args.datasets, datasets)
    return [*study_jobs, *table_jobs]


def _refuse_unknown(problem: str, named: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(named) - set(known))
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
            paper = name.partition("/")[0]
            runs = [_steps(paper, label, entry, scale, seed, args) for seed in args.seeds]
            model = entry["model"] + ("" if "weights" in entry else scale.get("model_suffix", ""))
            rows.append(Row(label, model, None if label == baseline else baseline, dataset, runs))
    names = Counter((row.dataset, row.model) for row in rows)
    if repeated := [model for (_, model), count in names.items() if count > 1]:
        raise ValueError(f"{name} has two rows named {repeated[0]!r}; give each its own `model` in --controls")
    return rows


def list_rows(group: Mapping[str, Any], args: ReproductionArguments) -> dict[str, dict[str, Any]]:
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
    settings = read_settings(CONFIGS / paper / f"{entry['row']}.yaml", CONFIGS / paper / scale["base"])
    settings |= {**scale.get("settings", {}), **entry.get("settings", {}), **as_mapping(args.settings)}
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
