"""Select tables and studies by name, as jobs that `supclap reproduce` checks and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from modeling_supclap.recipes.arguments import CONFIGS, YAML_LOADER, read_settings
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.run_checks import check_inputs
from modeling_supclap.recipes.running import is_first_process, say
from modeling_supclap.recipes.runs import run_rows
from modeling_supclap.recipes.studies.evidence import check_study, run_study
from modeling_supclap.recipes.studies.plan import list_rows, plan
from modeling_supclap.recipes.studies.table import write_table


class TableJob:
    """A table of a paper, whose runs are checked first, and then run."""

    def __init__(self, name: str, table: Mapping[str, Any], args: ReproductionArguments) -> None:
        self.name, self.table, self.args = name, table, args
        self.rows = plan(name, table, args)

    def check(self) -> None:
        """Check settings and inputs; drop rows with missing inputs, or raise. A dry run prints the costs."""
        self.rows = check_inputs(self.name, self.rows, self.args) if self.rows else []

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
        """Check settings and inputs; drop arms with missing inputs, or raise. A dry run prints the costs."""
        self.arms = check_study(self.name, self.study, self.args)

    def run(self) -> None:
        """Tune and run the arms, write the study, and print it."""
        if not self.arms:
            return
        path = run_study(self.name, self.study, self.arms, self.args)
        if is_first_process():
            say(f"\n{path.read_text(encoding='utf-8')}\n{path}, also as .json and .png")


def find_jobs(names: Sequence[str], args: ReproductionArguments) -> list[TableJob | StudyJob]:
    """Return the named studies and tables, studies first.

    Raises ValueError for an unknown name, or if none of them has one of `args.rows`, `args.datasets` or the rows that a
    `--controls` file copies.
    """
    studies = find_studies([name for name in names if name.startswith("evidence")])
    of_tables = [name for name in names if not name.startswith("evidence")]
    tables = find_tables(of_tables) if of_tables or not studies else {}
    of_scale = {name: table for name, table in tables.items() if args.scale in table or len(tables) == 1}

    study_jobs = [StudyJob(name, study, args) for name, study in studies.items()]
    table_jobs = [TableJob(name, table, args) for name, table in of_scale.items()]
    rows: set[str] = set()
    for study_job in study_jobs:
        rows.update(study_job.study["arms"])
    for table_job in table_jobs:
        for group in table_job.table["groups"]:
            rows.update(list_rows(group, args))
    copied = () if args.controls is None else [control["row"] for control in read_settings(args.controls).values()]
    _reject_unknown("rows", [*args.rows, *copied], rows, [*studies, *of_scale])
    if table_jobs:
        datasets = set[str]().union(*(job.table[args.scale] for job in table_jobs))
        _reject_unknown("datasets", args.datasets, datasets, list(of_scale))
    return [*study_jobs, *table_jobs]


def _reject_unknown(kind: str, named: Sequence[str], known: set[str], places: Sequence[str]) -> None:
    """Raise ValueError if a named row or dataset is in none of the tables and studies."""
    unknown = sorted(set(named) - known)
    if unknown:
        raise ValueError(f"{', '.join(places)} have no {kind} {unknown}; they have {', '.join(sorted(known))}")


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
    unknown = sorted(set(names) - {"evidence", *studies})
    if unknown:
        raise ValueError(f"unknown study {unknown[0]!r}; expected one of evidence, {', '.join(studies)}")
    return {name: study for name, study in studies.items() if name in names or "evidence" in names}
