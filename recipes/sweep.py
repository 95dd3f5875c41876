"""Train with every combination of settings and seed, and compare the runs in one table.

    supclap sweep esc10.yaml svr_alpha=0.1,0.5,1 --seeds 0 1 2 --data_dir ESC-10
    supclap sweep esc10.yaml learning_rate=1e-3,3e-4 test_fold=1,2,3,4 --data_dir ESC-10
    supclap sweep svr=none,bi-static learning_rate=1e-3,1e-4 --dry_run true

Each setting has one or more values, separated by commas: an option of `supclap train`, or of the dataset. The first
argument may be a YAML file of `supclap train`, instead of its default file. The folder name of a run depends on its
settings: finished runs are not repeated, and an interrupted run continues from its last checkpoint.

The tables have the format of `supclap compare`, with one row for each combination. The baseline is the first one. The
seeds of a combination are one row, and so are the folds of `test_fold` and the sites of `test_group`. Choose
a setting by the column `validation`, not by the test scores. If a run fails, the tables contain the finished runs.
Before the first run, all settings and data are checked as each run checks them; `--dry_run true` only checks them.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.recipes import evaluate_supclap, posttrain_teminal, train_supclap
from modeling_supclap.recipes.arguments import parse_arguments, parse_names, read_settings
from modeling_supclap.recipes.command import is_first_process, join_processes, run_command, say
from modeling_supclap.recipes.options import EvaluationArguments, SweepArguments


class Recipe(NamedTuple):
    """Recipe that a step can run.

    Attributes:
        run: Function of the parsed options.
        options: Dataclasses of the options. The first one describes the data.
        check: Function of the splits and the parsed options, which raises as the recipe itself. It returns the rows to
            train on or to evaluate.
        load: Function of the first parsed options that returns the splits, `{name: rows}`.
    """

    run: Callable[..., Any]
    options: tuple[Any, ...]
    check: Callable[..., Any]
    load: Callable[[Any], dict[str, Any]] = lambda data: data.load_splits()

    def parse(self, settings: Mapping[str, Any], *words: str) -> tuple[Any, ...]:
        """Parse settings, and options of the command line that override them."""
        return parse_arguments(self.options, words, settings=settings)


RECIPES = {
    "train": Recipe(train_supclap.run, train_supclap.OPTIONS, train_supclap.check),
    "posttrain": Recipe(posttrain_teminal.run, posttrain_teminal.OPTIONS, posttrain_teminal.check),
    "evaluate": Recipe(
        evaluate_supclap.run,
        (EvaluationArguments,),
        evaluate_supclap.check,
        load=lambda args: {args.split: evaluate_supclap.load_rows(args)[0]},
    ),
}
"""Recipes by name."""

_POOLED = ("seed", "test_fold", "test_group")
_NOT_DATA = ("model", "negatives", "output_dir", "seed")
_LOADED: dict[str, dict[str, Any]] = {}  # splits by recipe and options
_DECODED: dict[int, tuple[int, list[Any]]] = {}  # number of decoded recordings and unusable ones, by id of the split

SAMPLE_RECORDINGS = 100
"""Number of random recordings of a split to decode in a dry run."""


@dataclass(frozen=True)
class Step:
    """One call of a recipe in `RECIPES`, with the settings of its YAML file and its output folder."""

    recipe: str
    settings: dict[str, Any]
    folder: Path

    @property
    def is_done(self) -> bool:
        """Whether the folder contains results that can be loaded. Each recipe writes `results.json` last."""
        from modeling_supclap.evaluation.results import Results

        with suppress(OSError, ValueError):
            return bool(Results.load(self.folder))
        return False

    @property
    def reads_folder(self) -> bool:
        """Whether the data are files. Generated data cannot be missing, and cannot change."""
        return bool(self.settings.get("datasets")) or reads_folder(self.settings.get("dataset", "synthetic"))


@dataclass(frozen=True)
class Row:
    """One row of a table on one dataset, with one run per seed, or per fold and seed."""

    name: str
    model: str  # name of the row in the paper
    baseline: str | None  # name of the row to compare with
    dataset: str  # name in `tables.yaml`
    runs: list[list[Step]]  # steps of each run; the last step writes the results


def build_step(row: str, recipe: str, settings: dict[str, Any], args: Any) -> Step:
    """Build a `Step`, with an output folder named after the row, the dataset, a hash of the settings and the seed."""
    dataset = settings.get("dataset", "synthetic")
    if args.data_dir is not None and reads_folder(dataset):
        folder = Path(args.data_dir, dataset)
        settings["data_dir"] = str(folder if folder.is_dir() else Path(args.data_dir))
    settings.pop("output_dir", None)
    if args.allow_missing and recipe == "train":
        settings["allow_missing"] = True
    if args.on_bad_audio == "skip":
        settings["on_bad_audio"] = "skip"

    # The hash excludes the data path and the parent folder of other runs, so that both can be moved, and options
    # without effect on a run that has finished without them.
    hashed = {**settings, "model": Path(settings.get("model") or "").name}
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


Refusal = Callable[[Step, Mapping[str, Any]], None]
"""Function that raises ValueError if the splits of a step are not those that it needs."""


def check_rows(name: str, rows: Sequence[Row], args: Any, refuse_data: Refusal | None = None) -> list[Row]:
    """Check settings and data of all runs as their recipes do, and return the rows to run.

    A dry run prints what is found and what is missing, and returns no row. Otherwise missing inputs raise
    FileNotFoundError; with `args.skip_missing`, only the rows that need them are left out.
    """
    lines, runnable = [f"{name}:"], []
    every: dict[str, None] = {}
    for row in rows:
        found, missing = check_row(row, refuse_data, args)
        done = sum(run[-1].is_done for run in row.runs)
        steps = ", ".join(step.recipe for step in row.runs[0])
        lines.append(f"  {row.dataset}, {row.name}: {steps}; {len(row.runs)} runs, {done} done")
        lines += [line for text in found if (line := f"  found: {text}") not in lines]
        every |= dict.fromkeys(missing)
        if not missing:
            runnable.append(row)

    if args.dry_run:
        say("\n".join([*lines, *(f"  missing: {reference}" for reference in every)]))
        return []
    if every and not args.skip_missing:
        advice = "nothing was run; --skip_missing true runs the other rows"
        raise FileNotFoundError(f"{name} lacks {'; '.join(every)}; {advice}")
    for reference in every:
        say(f"{name}: rows that need {reference} are left out")
    return runnable


def check_row(row: Row, refuse_data: Refusal | None, args: Any) -> tuple[list[str], list[str]]:
    """Check the steps of a row. Return descriptions of what is found, and of what is missing.

    Finished steps are compared with their data. Runs that differ only in their seed are checked once. A dry run also
    decodes recordings.
    """
    found: list[str] = []
    missing: list[str] = []
    checked = set()
    for run in row.runs:
        with tempfile.TemporaryDirectory() as scratch:
            for step in run:
                settings = {**step.settings, "seed": None, "output_dir": None} if step.reads_folder else {}
                key = json.dumps([step.recipe, settings], sort_keys=True)
                if step.is_done and not args.dry_run:
                    refuse_other_data(step)
                elif key not in checked:
                    checked.add(key)
                    parsed = RECIPES[step.recipe].parse(step.settings)
                    if step.recipe == "train":
                        train_supclap.refuse_options(*parsed)
                    missing += find_missing_models(step)
                    if not step.reads_folder:
                        continue
                    dataset = step.settings.get("dataset", row.dataset)
                    try:
                        found += check_data(step, parsed, Path(scratch), refuse_data)
                        if args.dry_run and (bad := describe_bad_audio(load_splits(step), args.check_audio)):
                            if step.settings.get("on_bad_audio", "error") == "error":
                                raise ValueError(f"{bad}; --on_bad_audio skip leaves such recordings out")
                            found.append(f"data of {dataset}: {bad}; they are left out")
                    except (ValueError, OSError) as error:
                        missing.append(f"data of {dataset} for {step.recipe}: {error}")
    return found, missing


def describe_bad_audio(splits: Mapping[str, Any], check_all: bool) -> str:
    """Decode `SAMPLE_RECORDINGS` random recordings of each split, or all, and describe the unusable ones.

    Return "" if there are none. The splits are decoded once.
    """
    from datasets import Dataset

    from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio

    problems = []
    for name, rows in splits.items():
        if not isinstance(rows, Dataset):  # a stream is decoded only once, by the run
            continue
        if id(rows) not in _DECODED:
            chosen = np.random.default_rng(0).permutation(len(rows))[: None if check_all else SAMPLE_RECORDINGS]
            threads = min(os.cpu_count() or 1, 1 + len(chosen) // 1000)
            _DECODED[id(rows)] = len(chosen), find_bad_audio(rows.select(np.sort(chosen)), threads)
        count, bad = _DECODED[id(rows)]
        if bad:
            counts = f"{len(bad)} of {count:,}" + ("" if count == len(rows) else " sampled")
            first = f"first that of clip {bad[0].clip_id!r}: {bad[0].reason}"
            problems.append(f"{counts} recordings of {name} cannot be used, {first}")
    return "; ".join(problems)


def check_data(step: Step, parsed: tuple[Any, ...], scratch: Path, refuse_data: Refusal | None) -> list[str]:
    """Load the data of a step with the checks of its recipe. Return descriptions of them.

    `scratch` is a folder for the sources of the training clips, with which the evaluation of the run is compared.
    """
    from modeling_supclap.datasets_scripts.overlap.trained_sources import refuse_trained_sources, save_trained_sources

    dataset, start = step.settings.get("dataset"), Path(step.settings.get("model") or "")
    if not step.settings.get("data_dir") and not step.settings.get("datasets"):
        raise ValueError("give --data_dir")
    splits = load_splits(step)
    if refuse_data is not None:
        refuse_data(step, splits)
    rows = RECIPES[step.recipe].check(splits, *parsed)
    found = [f"{dataset}: {', '.join(f'{len(each):,} {name}' for name, each in splits.items())} recordings"]
    earlier = scratch / start.name if (scratch / start.name).is_dir() and start.name else start
    if step.recipe != "evaluate":
        (scratch / step.folder.name).mkdir()
        save_trained_sources(rows, scratch / step.folder.name, earlier)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_allowed = parsed[0].exclude_trained or parsed[0].allow_trained
            count = refuse_trained_sources(rows, str(earlier), is_allowed)
        if count:
            overlap = f"{count:,} of {len(rows):,} clips of {dataset} are in the training data of {start.name}"
            found.append(f"{overlap}; they are {'left out' if parsed[0].exclude_trained else 'evaluated'}")
    return found


def load_splits(step: Step) -> dict[str, Any]:
    """Load the splits of a step, once for all steps with the same data. Recordings are not read.

    Negatives are left out, because an earlier step may write them.
    """
    recipe = RECIPES[step.recipe]
    data = recipe.parse({key: value for key, value in step.settings.items() if key not in _NOT_DATA})[0]
    key = json.dumps([step.recipe, vars(data)], sort_keys=True)
    if key not in _LOADED:
        _LOADED[key] = recipe.load(data)
    return _LOADED[key]


def refuse_other_data(step: Step) -> None:
    """Raise ValueError if the results of a finished step are from other data than its settings name now.

    The clip ids and captions are compared. Data that cannot be loaded are not compared, so that tables can be written
    without them.
    """
    from modeling_supclap.datasets_scripts.negatives import add_negatives
    from modeling_supclap.evaluation.results import Results

    if not step.reads_folder:
        return
    recorded = Results.load(step.folder).content.get("data") or {}
    try:
        splits = dict(load_splits(step))
        if step.settings.get("negatives"):
            splits["train"] = add_negatives(splits["train"], step.settings["negatives"])
    except Exception:  # builders raise different types if files are missing
        return
    now = train_supclap.record_splits({name: splits[name] for name in splits.keys() & recorded.keys()})
    for split in sorted(now):
        if recorded[split] != now[split]:
            before, count = recorded[split]["rows"], now[split]["rows"]
            same = f"other clip ids or captions of {count} clips"
            change = same if before == count else f"{before} clips, now {count}"
            raise ValueError(
                f"{step.folder} has results on other data: {split} had {change}; choose another --output_dir, or "
                "remove this folder"
            )


def find_missing_models(step: Step) -> list[str]:
    """List the models and encoders of a step that do not exist, except those that an earlier step trains."""
    names = ["model"] if step.settings.get("model") else ["audio_encoder", "text_encoder"]
    missing = []
    for name in names:
        value = step.settings.get(name) or "scratch"
        is_trained = Path(value).parent == step.folder.parent
        if value != "scratch" and not is_trained and not train_supclap.has_model(value):
            missing.append(f"{name} {value}")
    return missing


def run_step(step: Step) -> None:
    """Run the recipe of an unfinished step. An interrupted training resumes from its last checkpoint.

    Several processes divide the batch, and wait until the first process has written the results.
    """
    import torch

    from modeling_supclap.training.checkpoints import last_checkpoint

    num_processes, recipe = int(os.environ.get("WORLD_SIZE", 1)), RECIPES[step.recipe]
    if not step.is_done:
        words = []
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

        # The folder may be uploaded, so its copy has no tokens and no paths of this machine.
        step.folder.mkdir(parents=True, exist_ok=True)
        write_text(step.folder / "settings.yaml", yaml.safe_dump(redact(step.settings), allow_unicode=True))
        recipe.run(*recipe.parse(step.settings, *words))
        gc.collect()  # a trainer and its model refer to each other
    if num_processes > 1:
        join_processes(None).wait_for_everyone()


def run_rows(rows: Sequence[Row], write: Callable[[Sequence[Row]], Any]) -> None:
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


def combine(words: Sequence[str], config: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Return the settings of the runs of each combination, `{name: runs}`. Seeds and folds are runs of a combination.

    A name contains only the settings with several values. Without `seeds`, the seed is that of `config`, or 0.

    >>> runs = combine(["svr_alpha=0.1,1", "loss=infonce", "test_fold=1,2"], {}, [3])
    >>> list(runs), runs["svr_alpha=1"][0]
    (['svr_alpha=0.1', 'svr_alpha=1'], {'seed': 3, 'svr_alpha': 1, 'loss': 'infonce', 'test_fold': 1})
    """
    values = {"seed": list(seeds or [config.get("seed", 0)])}
    for word in words:
        key, _, text = word.partition("=")
        chosen = yaml.safe_load(f"[{text}]")
        if not chosen or len(set(map(str, chosen))) < len(chosen):
            raise ValueError(f"got {word!r}; expected a setting with different values, such as svr_alpha=0.1,0.5,1")
        if key == "seed" and seeds:
            raise ValueError(f"got {word} and --seeds {list(seeds)}; use one of them")
        values[key] = chosen
    if not words and len(values["seed"]) < 2:
        raise ValueError("got no settings and one seed; pass settings such as svr=none,bi-static, or several --seeds")

    combinations: dict[str, list[dict[str, Any]]] = {}
    for chosen in itertools.product(*values.values()):
        settings = dict(zip(values, chosen, strict=True))
        swept = [f"{key}={settings[key]}" for key in values if len(values[key]) > 1 and key not in _POOLED]
        combinations.setdefault(", ".join(swept) or "run", []).append({**config, **settings})
    return combinations


def main() -> None:
    """Run the command: check all settings, train, and write the table."""
    named, args = parse_names(SweepArguments, about=__doc__)
    has_config = bool(named) and named[0].endswith((".yaml", ".yml"))
    config = read_settings(named.pop(0) if has_config else train_supclap.DEFAULT_CONFIG)
    rows = []
    for name, combined in combine(named, config, args.seeds).items():
        folder = re.sub("[^A-Za-z0-9.=_]+", "-", name)
        runs = [[build_step(folder, "train", settings, args)] for settings in combined]
        rows.append(Row(name, name, None, str(combined[0].get("dataset")), runs))
    run_rows(check_rows("sweep", rows, args), lambda finished: write_table(finished, args.output_dir))


def write_table(rows: Sequence[Row], folder: str) -> None:
    """Write the tables of finished runs, whose keys are their seeds, or their folds (or groups) and seeds."""
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.evaluation.seeds import tabulate_datasets
    from modeling_supclap.recipes.compare_results import save_table

    def fold_of(step: Step) -> Any:
        return step.settings.get("test_fold", step.settings.get("test_group"))

    folds = {fold_of(run[-1]) for run in itertools.chain.from_iterable(row.runs for row in rows)}
    tables: dict[str, dict[str, dict[Any, Results]]] = {}
    for row in rows:
        loaded: dict[Any, Results] = {}
        for (step,) in row.runs:
            seed = step.settings["seed"]
            loaded[(fold_of(step), seed) if len(folds) > 1 else seed] = Results.load(step.folder)
        tables.setdefault(row.dataset, {})[row.model] = loaded
    save_table(tabulate_datasets(tables, allow_different=True), folder)


if __name__ == "__main__":
    run_command(main)
