"""Training and evaluation runs of several settings and seeds: named folders, checks of the inputs, and execution.

`supclap sweep` and `supclap reproduce` use this module. The folder of a run is named after its settings, so that
finished runs are not repeated.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.recipes import evaluate_supclap, options, posttrain_teminal, train_supclap
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.running import is_first_process, join_processes, say

if TYPE_CHECKING:
    from modeling_supclap.recipes.estimates import Estimate

RECIPES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "train": (train_supclap.main, train_supclap.OPTIONS),
    "posttrain": (posttrain_teminal.main, posttrain_teminal.OPTIONS),
    "evaluate": (evaluate_supclap.main, (options.EvaluationArguments,)),
}
"""Recipes that `Step` can run, `{name: (main function, option dataclasses)}`."""


@dataclass(frozen=True)
class Step:
    """One call of a recipe in `RECIPES`, with the settings of its YAML file and its output folder."""

    recipe: str
    settings: dict[str, Any]
    folder: Path

    @property
    def is_done(self) -> bool:
        """Whether the folder contains results that can be loaded."""
        from modeling_supclap.evaluation.results import Results

        with suppress(OSError, ValueError):
            return bool(Results.load(self.folder).content)
        return False


@dataclass(frozen=True)
class Row:
    """One row of a table on one dataset, with one run per seed.

    `name` is the name of its configuration file without ".yaml", or the name of an added row (`--controls`).
    """

    name: str
    model: str  # name of the row in the paper
    baseline: str | None  # name of the row to compare with
    dataset: str  # name in `tables.yaml`
    runs: list[list[Step]]  # steps of each seed; the last step writes the results


def build_step(row: str, recipe: str, settings: dict[str, Any], args: Any) -> Step:
    """Build a `Step`, with an output folder named after the row, the dataset, a hash of the settings and the seed."""
    dataset = settings.get("dataset", "synthetic")
    if args.data_dir is not None and reads_folder(dataset):
        folder = Path(args.data_dir, dataset)
        settings["data_dir"] = str(folder if folder.is_dir() else Path(args.data_dir))
    settings.pop("output_dir", None)

    # The hash excludes the data path and the parent folder of the starting model, so that both can be moved.
    hashed = {**settings, "model": Path(settings.get("model") or "").name}
    for key in ("data_dir", "seed"):
        hashed.pop(key, None)
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{row}-{recipe}-{dataset}-{digest}-seed{settings['seed']}"
    folder = Path(args.output_dir) / args.scale / "runs" / name
    return Step(recipe, {**settings, "output_dir": str(folder)}, folder)


def reads_folder(dataset: str) -> bool:
    """Return whether a dataset is read from `data_dir`. Generated datasets are not."""
    from modeling_supclap.datasets_scripts import config_keys, find_config

    return "data_dir" in config_keys(find_config(dataset))


def run_step(step: Step) -> None:
    """Run the recipe of an unfinished step. An interrupted training resumes from its last checkpoint.

    Several processes divide the batch, and wait until the first process has written the results.
    """
    import torch

    from modeling_supclap.training.checkpoints import last_checkpoint

    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if not step.is_done:
        step.folder.mkdir(parents=True, exist_ok=True)
        # The folder may be uploaded, so its copy has no tokens and no paths of this machine.
        public = yaml.safe_dump(redact(step.settings), allow_unicode=True)
        write_text(step.folder / "settings.yaml", public)
        private = tempfile.TemporaryDirectory(prefix="supclap-")  # only its owner can read it
        path = Path(private.name, "settings.yaml")
        write_text(path, yaml.safe_dump(step.settings, allow_unicode=True))
        words = [f"supclap {step.recipe}", str(path)]
        if step.recipe == "posttrain" or (step.recipe == "train" and last_checkpoint(step.folder, resumes=True)):
            words += ["--resume_from_checkpoint", "last"]
        if num_processes > 1 and step.recipe != "evaluate":
            batch = step.settings.get("per_device_train_batch_size", 8)
            if batch % num_processes:
                raise ValueError(
                    f"{step.folder.name} has batches of {batch} clips, which {num_processes} processes cannot divide; "
                    "start a number of processes that divides the batch"
                )
            words += ["--per_device_train_batch_size", str(batch // num_processes)]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

        before, sys.argv = sys.argv, words
        try:
            RECIPES[step.recipe][0]()
        finally:
            sys.argv = before
            private.cleanup()
        gc.collect()  # a trainer and its model refer to each other
    if num_processes > 1:
        join_processes(None).wait_for_everyone()


def check_step(step: Step, describe: bool = False) -> tuple[Estimate | None, str, list[str]]:
    """Check the settings of a step, and list its missing inputs: models, encoders, translations and data.

    Return the estimated cost, a description of the data (empty unless `describe` is set and a folder is read), and the
    missing inputs. The cost is None for recipes other than "train", and if the number of training clips is unknown.
    """
    from modeling_supclap.recipes.estimates import estimate
    from modeling_supclap.recipes.models import has_model

    parsed = parse_arguments(RECIPES[step.recipe][1], [], settings=step.settings)

    missing: list[str] = []
    settings = step.settings
    for key in ("model", "audio_encoder", "text_encoder"):
        value = str(settings.get(key) or "scratch")
        is_used = value != "scratch" and (key == "model" or settings.get("model") is None)
        if is_used and Path(value).parent != step.folder.parent and not has_model(value):
            missing.append(f"{key} {value}")
    config = options.as_mapping(settings.get("dataset_config")).copy()
    translations = config.pop("translations", None)
    if translations is not None and not Path(translations).exists():
        missing.append(f"translations {translations}")

    dataset = settings.get("dataset", "synthetic")
    count, description = 0, ""
    if reads_folder(dataset) and "data_dir" not in settings:
        missing.append(f"data of {dataset}: give --data_dir")
    elif reads_folder(dataset):
        config["data_dir"] = settings["data_dir"]
        split = "test" if step.recipe == "evaluate" else "train"
        count, description, lack = find_data(dataset, split, json.dumps(config, sort_keys=True), describe)
        missing += lack
    return (estimate(parsed, count) if step.recipe == "train" else None), description, missing


@cache
def find_data(dataset: str, split: str, config: str, describe: bool) -> tuple[int, str, list[str]]:
    """Count the recordings of a dataset in a folder, and check that a split has enough of them.

    A training split needs 90 % of the published recordings, and 90 % of the recordings in the metadata must exist.
    Other splits need one recording.

    Args:
        dataset: Name of the dataset.
        split: Split to check.
        config: Options of the dataset, as JSON.
        describe: Whether to describe the splits, which reads the headers of up to 1,000 recordings.

    Returns:
        Number of recordings of the split, a description of all splits or "", and a list with one message if the check
        fails.
    """
    from modeling_supclap.datasets_scripts import load_builder
    from modeling_supclap.recipes.estimates import TRAIN_CLIPS

    try:
        builder = load_builder(dataset, **json.loads(config))
        splits = builder.as_dataset()
    except Exception as error:  # builders raise different types; the message names the missing file
        return 0, "", [f"data of {dataset}: {error}"]

    count, absent = len(splits.get(split, ())), len(builder.report()["missing"])
    published = TRAIN_CLIPS.get(dataset, 1) if split == "train" else 1
    lack = []
    if count < 0.9 * published:
        lack.append(f"data of {dataset}: {split} has {count} recordings of {published:,}")
    elif split == "train" and absent > 0.1 * (listed := sum(map(len, splits.values())) + absent):
        lack.append(f"data of {dataset}: {absent} of the {listed:,} recordings in the metadata have no audio file")
    return count, describe_data(dataset, splits) if describe else "", lack


def describe_data(dataset: str, splits: Mapping[str, Any]) -> str:
    """Describe the number of recordings in each split, and their total duration, estimated from up to 1,000 headers."""
    from modeling_supclap.datasets_scripts.builders.recordings import duration_seconds

    counts = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    paths = [path for rows in splits.values() for path in rows["audio_path"]]
    seconds = [value for path in paths[:: len(paths) // 1000 + 1] if (value := duration_seconds(path))]
    duration = f", about {np.mean(seconds) * len(paths) / 3600:.2g} hours" if seconds else ""
    return f"{dataset}: {counts} recordings{duration}"


def check_inputs(name: str, rows: Sequence[Row], args: Any) -> list[Row]:
    """Check settings and inputs, and return the rows to run.

    A dry run prints costs, the data in folders, and missing inputs, and returns no row. Otherwise missing inputs raise
    FileNotFoundError; with `args.skip_missing`, only the rows that need them are left out.
    """
    lines, runnable, missing, hours = [f"{name}:"], [], set(), 0.0
    descriptions: dict[str, None] = {}
    folders = set()  # several arms of a study can start from the same initial model
    for row in rows:
        lacking: set[str] = set()
        done = sum(run[-1].is_done for run in row.runs)
        for step in row.runs[0]:  # the runs of a row differ in their seed only
            if step.is_done and not args.dry_run:
                continue
            cost, description, inputs = check_step(step, args.dry_run)
            descriptions[description] = None
            lacking.update(inputs)
            if step.folder in folders:
                continue
            folders.add(step.folder)
            label = step.folder.name.partition(f"-{step.recipe}-")[0]
            lines.append(f"  {row.dataset}, {label}: {cost or step.recipe}; {len(row.runs)} seeds, {done} done")
            hours += 0.0 if cost is None else cost.hours * (len(row.runs) - done)
        if not lacking:
            runnable.append(row)
        missing |= lacking

    if args.dry_run:
        lines.append(f"  total: {60 * hours:.0f} minutes of arithmetic, {hours:.1f} hours")
        lines += [f"  found: {description}" for description in descriptions if description]
        lines += [f"  missing: {reference}" for reference in sorted(missing)]
        say("\n".join(lines))
        return []
    if missing and not args.skip_missing:
        advice = "nothing was run; --skip_missing true runs the other rows"
        raise FileNotFoundError(f"{name} lacks {'; '.join(sorted(missing))}; {advice}")
    for reference in sorted(missing):
        say(f"{name}: rows that need {reference} are left out")
    return runnable


def run_rows(rows: Sequence[Row], write: Callable[[Sequence[Row]], None]) -> None:
    """Run all steps; then write the finished runs, even if another run fails or is interrupted."""
    try:
        for row in rows:
            for step in itertools.chain(*row.runs):
                run_step(step)
    finally:
        finished = []
        for row in rows:
            runs = [run for run in row.runs if run[-1].is_done]
            if runs:
                finished.append(replace(row, runs=runs))
        if finished and is_first_process():
            write(finished)
