"""Training and evaluation runs of several settings and seeds, in folders that are named after the settings.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.recipes import evaluate_supclap, options, posttrain_teminal, train_supclap
from modeling_supclap.recipes.running import is_first_process, join_processes, say

RECIPES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "train": (train_supclap.main, train_supclap.OPTIONS),
    "posttrain": (posttrain_teminal.main, posttrain_teminal.OPTIONS),
    "evaluate": (evaluate_supclap.main, (options.EvaluationArguments,)),
}
"""Recipes that `Step` can run, `{name: (main function, option dataclasses)}`. `studies.negatives` adds itself."""

NEGATIVES_TABLE = "negatives.parquet"
"""Output of a step of the recipe "negatives", which has no results."""


@dataclass(frozen=True)
class Step:
    """One call of a recipe in `RECIPES`, with the settings of its YAML file and its output folder."""

    recipe: str
    settings: dict[str, Any]
    folder: Path

    @property
    def is_done(self) -> bool:
        """Whether the folder contains results that can be loaded, or the table of negatives."""
        from modeling_supclap.evaluation.results import Results

        if self.recipe == "negatives":
            return Path(self.folder, NEGATIVES_TABLE).is_file()
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
    if args.allow_missing and recipe == "train":
        settings["allow_missing"] = True
    if getattr(args, "on_bad_audio", "error") == "skip" and recipe in ("train", "posttrain", "evaluate"):
        settings["on_bad_audio"] = "skip"

    # The hash excludes the data path and the parent folder of other runs, so that both can be moved, and options
    # without effect on a run that has finished without them.
    hashed = {**settings, "model": Path(settings.get("model") or "").name}
    if settings.get("negatives"):
        hashed["negatives"] = Path(settings["negatives"]).parent.name
    for key in ("data_dir", "seed", "allow_missing", "on_bad_audio"):
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


def run_rows(rows: Sequence[Row], write: Callable[[Sequence[Row]], None]) -> None:
    """Run all steps; then write the finished runs, even if another run fails or is interrupted."""
    steps = []
    for row in rows:
        steps += [step for step in itertools.chain(*row.runs) if not step.is_done]
    try:
        for number, step in enumerate(steps, start=1):
            say(f"run {number} of {len(steps)}: {step.folder}")
            run_step(step)
    finally:
        finished = []
        for row in rows:
            runs = [run for run in row.runs if run[-1].is_done]
            if runs:
                finished.append(replace(row, runs=runs))
        if finished and is_first_process():
            write(finished)
