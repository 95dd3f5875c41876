"""Reproduce tables and figures of the papers: train their rows with several seeds and compare with the printed numbers.

    supclap reproduce supclap/table1 --scale mini
    supclap reproduce supclap/table1 supclap/table2 --scale mini --data_dir ESC-10 --seeds 0 1
    supclap reproduce supclap --scale full --data_dir DATA --dry_run true

`mini` takes minutes on two cores: tiny encoders, generated sounds and, with `--data_dir`, the recordings of ESC-10. It
shows the direction of a claim, not its size. `full` uses the papers' data and encoders; `--data_dir` then contains one
folder per dataset. `--dry_run true` only checks all settings, estimates steps, time and memory, and lists missing data
and encoders. Otherwise, missing inputs raise an error before the first run; `--skip_missing true` skips their rows.

`configs/<paper>/tables.yaml` defines the tables, and `configs/<paper>/<table>_<row>.yaml` the training of each row.
The folder name of a run depends on its settings. Tables share runs, and finished runs are not repeated. Each table is
written as `.md`, `.html` and `.json`, and its figure as `.png`. If a run fails, the table contains the finished runs.
The file name of the table includes `--rows`, `--datasets`, `--settings` and the name of the `--controls` file. A
`--controls` file is a YAML file that adds rows to the table, for example:

    infonce_4x: {row: table1_infonce, model: "InfoNCE, 4 x the steps", settings: {num_train_epochs: 40}}

`row` is the row to copy, `model` the name in the table, and `settings` the changed settings. `supclap reproduce
evidence/NAME` runs a study of `recipes/evidence.py`.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from modeling_supclap.datasets_scripts.atomic_files import write_json, write_text
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.recipes import evaluate_supclap, options, posttrain_teminal, train_supclap
from modeling_supclap.recipes.arguments import CONFIGS, YAML_LOADER, parse_arguments, parse_names, read_settings
from modeling_supclap.recipes.running import is_first_process, join_processes, run_command, say
from modeling_supclap.training.options import captions_per_clip

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.recipes.estimates import Estimate
    from modeling_supclap.training.plots import Curve

    Run = tuple[Results, list[dict[str, Any]]]  # results and training log, from `load_run`

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
class Cell:
    """One row of a table on one dataset, with one run per seed.

    `row` is the name of its configuration file without ".yaml", or the name of an added row (`--controls`).
    """

    row: str
    model: str  # name of the row in the paper
    baseline: str | None  # name of the row to compare with
    dataset: str  # name in `tables.yaml`
    runs: list[list[Step]]  # steps of each seed; the last step writes the results


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


def plan(name: str, table: Mapping[str, Any], args: options.ReproductionArguments) -> list[Cell]:
    """Return a `Cell` with its runs for each row and dataset of a table, restricted to `args.rows` and `args.datasets`.

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

    cells = []
    for (dataset, scale), group in itertools.product(datasets.items(), table["groups"]):
        baseline = next(iter(group))
        for label, entry in list_rows(group, args).items():
            if args.rows and entry["row"] not in args.rows:
                continue
            runs = []
            for seed in args.seeds:
                runs.append(_steps(name.partition("/")[0], label, entry, scale, seed, args))
            model = entry["model"] + scale.get("model_suffix", "")
            cells.append(Cell(label, model, None if label == baseline else baseline, dataset, runs))
    names = Counter((cell.dataset, cell.model) for cell in cells)
    if repeated := [model for (_, model), count in names.items() if count > 1]:
        raise ValueError(f"{name} has two rows named {repeated[0]!r}; give each its own `model` in --controls")
    return cells


def list_rows(group: Mapping[str, Any], args: options.ReproductionArguments) -> dict[str, dict[str, Any]]:
    """List the rows of a group of a table definition, `{name: entry}`. Rows of the `--controls` file follow the row
    that they copy. The key "row" of an entry is the name of its configuration file without ".yaml".
    """
    controls = {} if args.controls is None else read_settings(args.controls)
    for name, control in controls.items():
        keys = set(control) if isinstance(control, dict) else set()
        if not {"row", "model"} <= keys <= {"row", "model", "settings"}:
            raise ValueError(f"{args.controls}: {name} has the keys {sorted(keys)}; give row, model and settings")

    rows: dict[str, dict[str, Any]] = {}
    for row, entry in group.items():
        entry = entry if isinstance(entry, dict) else {"model": entry}
        rows[row] = {**entry, **entry.get(args.scale, {}), "row": row}
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
    """List the steps for one row and seed: train the initial model, run the row, and evaluate it on further data."""
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


def check_inputs(name: str, cells: Sequence[Cell], args: Any) -> list[Cell]:
    """Check settings and inputs, and return the table cells to run.

    A dry run prints costs, the data in folders, and missing inputs.
    """
    lines, runnable, missing, hours = [f"{name}:"], [], set(), 0.0
    descriptions: dict[str, None] = {}
    folders = set()  # several arms of a study can start from the same initial model
    for cell in cells:
        lacking: set[str] = set()
        done = sum(run[-1].is_done for run in cell.runs)
        for step in cell.runs[0]:  # the runs of a cell differ in their seed only
            if step.is_done and not args.dry_run:
                continue
            cost, description, inputs = check_step(step, args.dry_run)
            descriptions[description] = None
            lacking.update(inputs)
            if step.folder in folders:
                continue
            folders.add(step.folder)
            row = step.folder.name.partition(f"-{step.recipe}-")[0]
            lines.append(f"  {cell.dataset}, {row}: {cost or step.recipe}; {len(cell.runs)} seeds, {done} done")
            hours += 0.0 if cost is None else cost.hours * (len(cell.runs) - done)
        if not lacking:
            runnable.append(cell)
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


def load_run(run: Sequence[Step]) -> Run:
    """Load the results of a run, and the log of its last training (in post-training, stage B).

    The section "training" of the results comes from the last training. If the results contain the cosines of matching
    test pairs, their histogram is appended to the log.
    """
    import torch

    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.training.drift import similarity_histogram

    log: list[dict[str, Any]] = []
    training: dict[str, Any] = {}
    for step in run:
        results = Results.load(step.folder)
        training = results.content.get("training") or training
        for folder in (step.folder, step.folder / "stage_b"):
            path = folder / "trainer_state.json"
            if path.is_file():
                log = json.loads(path.read_text(encoding="utf-8"))["log_history"]

    results.content["training"] = training
    cosines = results.arrays.get("similarity/eng/positive")
    if cosines is not None:
        histogram = similarity_histogram(torch.from_numpy(cosines).float())
        log.append({"step": log[-1]["step"] if log else 0, "test_similarity": histogram})
    return results, log


def get_value(results: Results, log: Sequence[Mapping[str, Any]], place: Sequence[str]) -> float | None:
    """Look up the value of one table column in the results and training log of a run. Return None if it is missing.

    `place` is the column name, split into words. The columns are:

    - `retrieval eng t2a R@1`, for example: A score in the results. The language "mean" averages over languages.
    - `training KEY`: An entry of the "training" section of the results.
    - `similarity positive` or `similarity negative`: Mean cosine of matching or non-matching test pairs.
    - `similarity separation`: Difference of these two means, divided by the standard deviation of non-matching pairs.
    - `captions relative_distance`: Result of `get_relative_distance`.
    - `log NAME mean`, `log NAME first` or `log NAME last`: A value from the training log.
    """
    from modeling_supclap.evaluation.results import flat_scores

    if place[0] == "training":
        training = results.content["training"]
        return {**training.get("last_logs", {}), **training}.get(place[1])
    if place[0] == "similarity":
        positive, negative = results.arrays["similarity/eng/positive"], results.arrays["similarity/eng/negative"]
        separation = (positive.mean() - negative.mean()) / negative.std()
        return float({"positive": positive.mean(), "negative": negative.mean(), "separation": separation}[place[1]])
    if place[0] == "captions":
        return get_relative_distance(results)
    if place[0] == "log":
        values = [entry[place[1]] for entry in log if place[1] in entry]
        if not values:
            return None
        return {"mean": float(np.mean(values)), "first": values[0], "last": values[-1]}[place[2]]

    scores = {score.place: score.value for score in flat_scores(results.scores)}
    if tuple(place) in scores or place[1] != "mean":
        return scores.get(tuple(place))
    task, _, *rest = place
    of_languages = [value for path, value in scores.items() if path[0] == task and [*path[2:]] == rest]
    return float(np.mean(of_languages)) if of_languages else None


def get_relative_distance(results: Results) -> float:
    """Compute the mean distance between translations and their English captions, relative to unrelated captions.

    The reference is the mean distance between two English captions. 0 means that the languages agree. 1 means that a
    translation is as far from its English caption as an unrelated one. Unlike the distance in ATRI eq. 15, the value is
    not small for a collapsed model with almost equal embeddings.
    """
    from scipy.spatial.distance import pdist

    others = results.protocol["languages"][1:]
    to_english = np.mean([results.arrays[f"multilingual/distance/{language}"] for language in others])
    return float(to_english / pdist(results.arrays["embeddings/text/eng"]).mean())


def get_outcomes(results: Results, place: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Load the value of a score for each query (Q,), and the recording that each query belongs to (Q,).

    For the language "mean", the values of a query are averaged over languages. Return None if the results contain no
    values per query, or if the number of queries differs between languages.
    """
    arrays = results.arrays
    if place[-1] in ("MRV", "MSR"):
        if "multilingual/ranks" not in arrays:
            return None
        ranks = arrays["multilingual/ranks"].astype(float)
        outcomes = ranks.var(axis=1) if place[-1] == "MRV" else (ranks**2).mean(axis=1)
        return outcomes, arrays["multilingual/cluster"]

    task, language, *rest = place
    languages = results.protocol.get("languages", []) if language == "mean" else [language]
    prefixes = ["/".join((task, code, *rest)) for code in languages]
    columns = [arrays.get(prefix, arrays.get(f"{prefix}/score", ())) for prefix in prefixes]
    if not all(map(len, columns)) or len(set(map(len, columns))) != 1:
        return None
    clusters = arrays.get(f"{prefixes[0]}/cluster", arrays.get(f"{prefixes[0].rpartition('/')[0]}/cluster"))
    return None if clusters is None else (np.mean(columns, axis=0), clusters)


def compare_rows(runs: Mapping[int, Run], baseline: Mapping[int, Run], place: Sequence[str]) -> dict[str, Any]:
    """Compare the runs of a row with those of its baseline, both `{seed: run}`, on their common seeds.

    The interval over recordings is a 95 % bootstrap of the differences per query, averaged over seeds. It requires
    values per query, and the same two or more recordings in all runs. `gather` describes the returned dict.
    """
    from modeling_supclap.metrics.bootstrap import bootstrap_intervals, seed_interval

    differences, row_outcomes, baseline_outcomes = [], [], []
    for seed in filter(baseline.__contains__, runs):
        value, other = get_value(*runs[seed], place), get_value(*baseline[seed], place)
        if value is not None and other is not None:
            differences.append(value - other)
            row_outcomes.append(get_outcomes(runs[seed][0], place))
            baseline_outcomes.append(get_outcomes(baseline[seed][0], place))
    if not differences:
        return {}

    compared: dict[str, Any] = {"differences": differences}
    interval = None
    outcomes = [each for each in row_outcomes + baseline_outcomes if each is not None]
    clusters = {tuple(each.tolist()) for _, each in outcomes}
    if len(outcomes) == 2 * len(differences) and len(clusters) == 1 and len(set(*clusters)) > 1:
        first, second = np.split(np.stack([values for values, _ in outcomes]), 2)  # (seeds, Q) each
        scores = {"score": first.mean(axis=0) - second.mean(axis=0)}
        interval = compared["recordings"] = bootstrap_intervals(scores, list(*clusters))["score"]
    if len(differences) > 1:
        interval = seed_interval(differences, interval)
    if interval is not None:
        compared["low"], compared["high"] = interval
    return compared


def summarize(runs: Mapping[int, Run], baseline: Mapping[int, Run], place: Sequence[str]) -> dict[str, Any]:
    """Return "values", "mean" and "std" of a score over the runs that have this score. Add the differences to the
    baseline from `compare_rows`.
    """
    found = [get_value(*run, place) for run in runs.values()]
    values = [value for value in found if value is not None]
    if not values:
        return {"values": values}
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    summary = {"values": values, "mean": float(np.mean(values)), "std": deviation}
    return summary | compare_rows(runs, baseline, place)


def gather(
    name: str, table: Mapping[str, Any], cells: Sequence[Cell], args: options.ReproductionArguments
) -> dict[str, Any]:
    """Collect the measured numbers of a table and the numbers in the paper.

    Returns a dict with "table", "title", "claim", "scale", "settings", "versions", "rows" and, for a table with example
    captions, "cases" (see `tabulate_cases`). A row is a dict with "row", "model", "dataset", "baseline", "seeds",
    "cost" (see `get_cost`) and "scores". "scores" is `{column: score}`, where a score is a dict with:

    - "values", "mean" and "std": One value per seed, their mean and sample standard deviation (None for one seed).
    - "chance" and "order_blind": The scores at chance and of a model that ignores order, if known.
    - "paper": The number in the paper, or None.
    - "differences": One difference to the baseline per seed. This key and those below are only in rows with a baseline.
    - "recordings": Interval of the mean difference over recordings.
    - "low" and "high": Interval of the mean difference over seeds and recordings, or only over recordings for one seed.
    """
    from modeling_supclap import evaluation
    from modeling_supclap.evaluation.results import flat_scores

    loaded: dict[tuple[str | None, str], dict[int, Run]] = {}
    for cell in cells:
        loaded[cell.row, cell.dataset] = {run[-1].settings["seed"]: load_run(run) for run in cell.runs}

    rows = []
    first: dict[str, Results] = {}
    for cell in cells:
        runs, baseline = loaded[cell.row, cell.dataset], loaded.get((cell.baseline, cell.dataset), {})
        first[cell.model] = next(iter(runs.values()))[0]
        levels = {score.place: score for score in flat_scores(first[cell.model].scores)}
        scores = {}
        for column in table.get(f"{args.scale}_columns", table["columns"]):
            place = column.split()
            score = summarize(runs, baseline, place)
            if len(score["values"]) < len(runs):
                continue
            if "eval_order_accuracy" in place:
                score["chance"] = 0.5
            for level in ("chance", "order_blind"):
                value = getattr(levels.get(tuple(place)), level, None)
                if value is not None:
                    score[level] = value
            scores[column] = {**score, "paper": get_printed(name, table, cell, place, args.scale)}

        about: dict[str, Any] = {"row": cell.row, "model": cell.model, "dataset": cell.dataset, "seeds": list(runs)}
        about["baseline"] = cell.baseline if baseline else None
        rows.append({**about, "cost": get_cost(list(runs.values())), "scores": scores})

    content: dict[str, Any] = {"table": name, "scale": args.scale, "settings": options.as_mapping(args.settings)}
    content |= {key: table.get(key, "") for key in ("title", "claim")}
    if table.get("cases"):
        content["cases"] = tabulate_cases(first)
    return {**content, "versions": evaluation.package_versions(), "rows": rows}


def get_cost(runs: Sequence[Run]) -> dict[str, float]:
    """Compute the mean training costs of several runs: "steps", "captions", and "seconds" of processor time.

    "captions" is the number of captions that the text encoder embeds: steps * clips per step * texts per clip. The
    training of the model that a run starts from is not included. A cost is missing if no run has recorded it.
    """
    costs: dict[str, list[float]] = {"steps": [], "captions": [], "seconds": []}
    for results, _ in runs:
        training = results.content["training"]
        if "steps" in training:
            costs["steps"].append(training["steps"])
        if "captions" in training:  # of post-training
            costs["captions"].append(training["captions"])
        elif "steps" in training:
            arguments = training["arguments"]
            languages_per_clip = arguments.get("languages_per_clip")  # not in older results
            texts = captions_per_clip(arguments["loss"], arguments["languages"], languages_per_clip)
            clips = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
            clips *= training.get("processes", 1)
            costs["captions"].append(training["steps"] * clips * texts)
        if training:
            costs["seconds"].append(training.get("process_seconds", training["seconds"]))
    return {name: float(np.mean(values)) for name, values in costs.items() if values}


def tabulate_cases(by_model: Mapping[str, Results]) -> list[list[str]]:
    """Tabulate the retrieval results of four captions in each language, as in ATRI tables 9 and 10.

    The four captions are the two with the best and the two with the worst mean rank over models and languages. A cell
    contains the rank of the caption's clip, and the label of the top-ranked clip (its id if it has no label). The first
    line is the heading.
    """
    first = next(iter(by_model.values()))
    ranks = np.mean([results.arrays["multilingual/ranks"] for results in by_model.values()], axis=(0, 2))
    texts = first.arrays["multilingual/text"]
    _, distinct = np.unique(texts, return_index=True)  # captions that clips share have the same ranks
    ordered = distinct[np.argsort(ranks[distinct], kind="stable")]

    languages = first.protocol["languages"]
    lines = [["caption", "model", *languages]]
    for query in [*ordered[:2], *ordered[2:][-2:]]:
        for model, results in by_model.items():
            arrays = results.arrays
            line = [str(texts[query]), model]
            for language, rank in zip(languages, arrays["multilingual/ranks"][query], strict=True):
                is_query = arrays[f"retrieval/{language}/t2a/query_id"] == arrays["multilingual/query_id"][query]
                clip = arrays[f"retrieval/{language}/t2a/top"][is_query.argmax(), 0]
                line.append(f"{rank + 1}: {arrays['clips/label'][clip] or arrays['clips/id'][clip]}")
            lines.append(line)
    return lines


def get_printed(name: str, table: Mapping[str, Any], cell: Cell, place: Sequence[str], scale: str) -> float | None:
    """Return the value of a score in the paper, or None if the paper does not report it. At scale mini, use the value
    for the first dataset of the paper's table.
    """
    from modeling_supclap import evaluation

    dataset, model = cell.dataset, cell.model
    if scale == "mini" and table.get("full"):
        dataset, full = next(iter(table["full"].items()))
        model += full.get("model_suffix", "") if isinstance(full, dict) else ""
    languages = (place[1], {"mean": "avg", "all": "avg"}.get(place[1]), None)
    wanted = {"dataset": dataset.split(" to ")[-1], "model": model, "metric": place[-1]}

    paper, _, number = name.partition("/table")
    for entry in evaluation.paper_results(table=table.get("printed", number)):
        is_place = entry["language"] in languages and (len(place) < 4 or entry["direction"] in (*place, None))
        if entry["paper"].lower() == paper and is_place and wanted.items() <= entry.items():
            return entry["value"]
    return None


def table_stem(name: str, args: options.ReproductionArguments) -> str:
    """Return the file name of a table without suffix. It contains the selection, the settings and the controls.

    >>> table_stem("supclap/table3", options.ReproductionArguments(settings={"num_train_epochs": 40}))
    'supclap_table3_num_train_epochs-40'
    """
    parts = [name.replace("/", "_")]
    selected = {key: value for key in ("rows", "datasets") if (value := getattr(args, key))}
    for key, value in {**selected, **options.as_mapping(args.settings)}.items():
        text = re.sub("[^A-Za-z0-9]+", "-", json.dumps(value)).strip("-")
        parts.append(f"{key}-{text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()[:8]}")
    if args.controls is not None:
        parts.append(Path(args.controls).stem)
    return "_".join(parts)


def write_table(
    name: str, table: Mapping[str, Any], cells: Sequence[Cell], args: options.ReproductionArguments
) -> None:
    """Write a table as JSON, HTML and Markdown, and its figure (if any) as PNG. Print the table."""
    from modeling_supclap.evaluation.report_figures import save_projections
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.recipes.result_tables import html_table, markdown_table
    from modeling_supclap.training.plots import plot_runs

    stem = Path(args.output_dir) / args.scale / table_stem(name, args)
    content = gather(name, table, cells, args)
    write_json(stem.with_suffix(".json"), content)
    text = markdown_table(content)
    write_text(stem.with_suffix(".md"), text)

    figure = stem.with_suffix(".png") if {"curves", "spaces"} & table.keys() else None
    if figure is not None and "curves" in table:
        plot_runs(arrange_curves(table["curves"], cells), figure)
    elif figure is not None:  # of the first seed
        save_projections({cell.model: Results.load(cell.runs[0][-1].folder) for cell in cells}, figure)
    write_text(stem.with_suffix(".html"), html_table(content, None if figure is None else figure.name))
    say(f"\n{text}\n{stem.with_suffix('.md')}, also as .html, .json and, if there is a figure, .png")


def arrange_curves(curves: Mapping[str, str], cells: Sequence[Cell]) -> dict[str, dict[str, Curve]]:
    """Arrange logged values as panels of a figure, `{panel title: {curve label: curve}}`.

    `curves` is `{logged name: panel title}`. Names with the same title share a panel.
    """
    one_dataset = all(cell.dataset == cells[0].dataset for cell in cells)
    titles = Counter(curves.values())
    panels: dict[str, dict[str, Curve]] = {}
    for cell in cells:
        logs = [load_run(run)[1] for run in cell.runs]
        for key, title in curves.items():
            label = cell.model if titles[title] == 1 else f"{cell.model}, {key.removeprefix('eval_')}"
            panel = title if one_dataset else f"{title}, {cell.dataset}"
            panels.setdefault(panel, {})[label] = key, logs
    return panels


def run_cells(cells: Sequence[Cell], write: Callable[[Sequence[Cell]], None]) -> None:
    """Run all steps; then write the finished runs, even if another run fails or is interrupted."""
    try:
        for run in itertools.chain(*(cell.runs for cell in cells)):
            for step in run:
                run_step(step)
    finally:
        finished = []
        for cell in cells:
            runs = [run for run in cell.runs if run[-1].is_done]
            if runs:
                finished.append(replace(cell, runs=runs))
        if finished and is_first_process():
            write(finished)


def main() -> None:
    """Parse the command line, run the requested studies and tables, and write their results."""
    from modeling_supclap.recipes.evidence import check_study, find_studies, run_study

    names, args = parse_names(options.ReproductionArguments, about=__doc__)
    studies = find_studies([name for name in names if name.startswith("evidence")])
    studies = {name: {**study, "arms": list_rows(study["arms"], args)} for name, study in studies.items()}
    of_tables = [name for name in names if not name.startswith("evidence")]
    tables = find_tables(of_tables) if of_tables or not studies else {}
    if args.previous is not None and (of_tables or len(studies) != 1):
        raise ValueError(f"previous is {args.previous}, but {names} were named; name the one study of this file")

    plans = {}
    for name, table in tables.items():
        if args.scale in table or len(tables) == 1:
            plans[name] = plan(name, table, args)
    groups = [study["arms"] for study in studies.values()]
    groups += [group for name in plans for group in tables[name]["groups"]]
    rows = {row for group in groups for row in group}
    datasets = {dataset for name in plans for dataset in tables[name][args.scale]}
    copied = () if args.controls is None else [control["row"] for control in read_settings(args.controls).values()]
    for kind, named, known in (("rows", [*args.rows, *copied], rows), ("datasets", args.datasets, datasets)):
        unknown = sorted(set(named) - known)
        if unknown and (plans or kind == "rows"):
            places = ", ".join([*studies, *plans])
            raise ValueError(f"{places} have no {kind} {unknown}; they have {', '.join(sorted(known))}")

    if not args.dry_run:
        for name, study in studies.items():
            check_study(name, study, args)  # before the first run
    for name, study in studies.items():
        path = run_study(name, study, args)
        if path is not None and is_first_process():
            say(f"\n{path.read_text(encoding='utf-8')}\n{path}, also as .json and .png")

    for name, cells in plans.items():
        plans[name] = check_inputs(name, cells, args) if cells else []  # a table may have none of the rows
    for name, cells in plans.items():
        run_cells(cells, partial(write_table, name, tables[name], args=args))


if __name__ == "__main__":
    run_command(main)
