"""Checks before the first step of several runs: settings, models, data, overlaps of the data, and costs."""

from __future__ import annotations

import itertools
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.recipes import evaluate_supclap, options, posttrain_teminal
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.running import say
from modeling_supclap.recipes.runs import RECIPES, Row, Step, reads_folder
from modeling_supclap.recipes.training_data import check_splits, describe_bad_audio, record_splits

if TYPE_CHECKING:
    from modeling_supclap.recipes.estimates import Estimate


@dataclass
class Check:
    """Result of checking a step.

    Attributes:
        cost: Estimated cost, or None if it is unknown.
        found: Descriptions of the data, of the temperature, and of overlaps that are accepted.
        missing: Missing inputs, and data that the recipe would refuse.
    """

    cost: Estimate | None = None
    found: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def check_inputs(name: str, rows: Sequence[Row], args: Any) -> list[Row]:
    """Check settings and inputs, and return the rows to run.

    A dry run prints costs, the data in folders, and missing inputs, and returns no row. Otherwise missing inputs raise
    FileNotFoundError; with `args.skip_missing`, only the rows that need them are left out.
    """
    lines, runnable, hours = [f"{name}:"], [], 0.0
    found: dict[str, None] = {}
    missing: dict[str, None] = {}
    folders = set()  # several arms of a study can start from the same initial model
    for row in rows:
        lacking: list[str] = []
        done = sum(run[-1].is_done for run in row.runs)
        for step in () if args.dry_run else itertools.chain(*row.runs):
            if step.is_done:
                refuse_other_data(step)
        with tempfile.TemporaryDirectory() as scratch:
            for step in row.runs[0]:  # the runs of a row differ in their seed only
                if step.is_done and not args.dry_run:
                    continue
                check = check_step(step, args, Path(scratch))
                found |= dict.fromkeys(check.found)
                lacking += check.missing
                if step.folder in folders:
                    continue
                folders.add(step.folder)
                label = step.folder.name.partition(f"-{step.recipe}-")[0]
                lines.append(
                    f"  {row.dataset}, {label}: {check.cost or step.recipe}; {len(row.runs)} seeds, {done} done"
                )
                hours += 0.0 if check.cost is None else check.cost.hours * (len(row.runs) - done)
        if not lacking:
            runnable.append(row)
        missing |= dict.fromkeys(lacking)

    if args.dry_run:
        lines.append(f"  total: {60 * hours:.0f} minutes of arithmetic, {hours:.1f} hours")
        lines += [f"  found: {description}" for description in found]
        lines += [f"  missing: {reference}" for reference in sorted(missing)]
        say("\n".join(lines))
        return []
    if missing and not args.skip_missing:
        advice = "nothing was run; --skip_missing true runs the other rows"
        raise FileNotFoundError(f"{name} lacks {'; '.join(sorted(missing))}; {advice}")
    for reference in sorted(missing):
        say(f"{name}: rows that need {reference} are left out")
    return runnable


def refuse_other_data(step: Step) -> None:
    """Raise ValueError if the results of a finished step are from other data than its settings name now.

    The clip ids and captions are compared. A generated dataset cannot change, and data that cannot be loaded are not
    compared, so that tables can be written without them.
    """
    from modeling_supclap.evaluation.results import Results

    if step.recipe == "negatives":  # has no results
        return
    is_read = step.settings.get("data_dir") is not None or bool(step.settings.get("datasets"))
    recorded = Results.load(step.folder).content.get("data")
    if not is_read or not recorded:
        return
    found = find_record(step)
    for split in sorted(recorded.keys() & found.keys()):
        if recorded[split] != found[split]:
            before, now = recorded[split]["rows"], found[split]["rows"]
            change = f"{before} clips, now {now}" if before != now else f"other clip ids or captions of {now} clips"
            raise ValueError(
                f"{step.folder} has results on other data: {split} had {change}; choose another --output_dir, or "
                "remove this folder"
            )


_RECORDS: dict[str, dict[str, Any]] = {}


def find_record(step: Step) -> dict[str, Any]:
    """Load the data of a step, once for all steps with the same data, and return their record (see `record_splits`).

    Return an empty dict if the data cannot be loaded.
    """
    names = (
        "dataset",
        "data_dir",
        "dataset_config",
        "datasets",
        "split",
        "folds",
        "dataset_temperature",
        "streaming",
        "negatives",
    )
    data_args = parse_arguments(RECIPES[step.recipe][1], [], settings=step.settings)[0]
    key = json.dumps([step.recipe == "evaluate", [getattr(data_args, name, None) for name in names]], sort_keys=True)
    if key not in _RECORDS:
        try:
            if step.recipe == "evaluate":
                splits = {data_args.split: evaluate_supclap.load_rows(data_args)[0]}
            else:
                splits = data_args.load_splits()
            _RECORDS[key] = record_splits(splits)
        except Exception:  # builders raise different types if files are missing
            _RECORDS[key] = {}
    return _RECORDS[key]


def check_step(step: Step, args: Any, scratch: Path) -> Check:
    """Check the settings of a step, its models, encoders, translations and data.

    The checks of the data are those of the recipe: splits, captions, labels, folds, and clips on which the evaluated
    model has trained. `scratch` is a folder for the training sources of the earlier steps of the run.
    """
    from modeling_supclap.recipes.estimates import estimate
    from modeling_supclap.training.objectives import build_objective

    parsed = parse_arguments(RECIPES[step.recipe][1], [], settings=step.settings)
    if step.recipe == "train" and ":" not in parsed[-1].loss:
        build_objective(parsed[-1])  # raises for options that do not fit together
    check = Check(missing=find_missing_models(step))
    if step.recipe in ("train", "posttrain"):
        check.found.append(f"{step.settings.get('model') or 'new model'}: {describe_temperature(parsed)}")

    settings, count = step.settings, 0
    config = dict(options.as_mapping(settings.get("dataset_config")))
    translations = config.pop("translations", None)
    if translations is not None and not Path(translations).exists():
        check.missing.append(f"translations {translations}")
    dataset = settings.get("dataset", "synthetic")
    if reads_folder(dataset) and "data_dir" not in settings:
        check.missing.append(f"data of {dataset}: give --data_dir")
    elif reads_folder(dataset):
        text = json.dumps({**config, "data_dir": settings["data_dir"]}, sort_keys=True)
        split = "train" if step.recipe == "train" else settings.get("split", "test")
        count, description, lack = find_data(
            dataset, split, text, args.dry_run, args.allow_missing, is_published=args.scale == "full"
        )
        check.found += [description] if description else []
        check.missing += lack
        if not check.missing:
            try:
                check.found += check_data(step, parsed, scratch)
            except (ValueError, OSError) as error:  # as the recipe would raise
                check.missing.append(f"data of {dataset} for {step.recipe}: {error}")
        if args.dry_run and not lack:
            check_recordings(step, dataset, text, check, args.check_audio)
    return replace(check, cost=estimate(parsed, count) if step.recipe == "train" else None)


def check_recordings(step: Step, dataset: str, config: str, check: Check, check_all: bool) -> None:
    """Decode recordings of a step. Unusable ones are found if the step leaves them out, and missing if they stop it."""
    from modeling_supclap.datasets_scripts.audio import MissingDecoderError

    splits = step.settings.get("split", "test") if step.recipe == "evaluate" else None
    is_skipped = step.settings.get("on_bad_audio", "error") != "error"
    try:
        bad = describe_bad_audio(dataset, config, splits, check_all)
    except MissingDecoderError as error:
        check.missing.append(f"data of {dataset}: {error}")
        return
    if bad and is_skipped:
        check.found.append(f"data of {dataset}: {bad}; they are left out")
    elif bad:
        check.missing.append(f"data of {dataset}: {bad}; --on_bad_audio skip leaves such recordings out")


def find_missing_models(step: Step) -> list[str]:
    """List the models and encoders of a step that do not exist, except those that an earlier step trains."""
    from modeling_supclap.recipes.models import has_model

    missing = []
    for key in ("model", "audio_encoder", "text_encoder"):
        value = str(step.settings.get(key) or "scratch")
        is_used = value != "scratch" and (key == "model" or step.settings.get("model") is None)
        if is_used and Path(value).parent != step.folder.parent and not has_model(value):
            missing.append(f"{key} {value}")
    return missing


def describe_temperature(parsed: Sequence[Any]) -> str:
    """Describe the temperature with which a training starts, from the parsed arguments of a recipe."""
    arguments: dict[str, Any] = {}
    for group in parsed:
        arguments |= vars(group)
    value = arguments["temperature"]
    if value is None:
        value = 0.07 if arguments["model"] is None else "of the model"
    return f"temperature {value}, {'trained' if arguments['train_temperature'] else 'fixed'}"


def check_data(step: Step, parsed: Sequence[Any], scratch: Path) -> list[str]:
    """Load the data of a step and check them as its recipe does. Return descriptions of accepted overlaps.

    The sources of the training clips are written to a folder in `scratch`, and compared with those of later steps.
    """
    from modeling_supclap.datasets_scripts.overlap.trained_sources import refuse_trained_sources, save_trained_sources

    def trained_folder(model: str | None) -> str | None:
        earlier = scratch / Path(model or "").name
        return str(earlier) if model is not None and earlier.is_dir() else model

    if step.recipe == "negatives":
        return []
    if step.recipe != "evaluate":
        rows = load_training_rows(step, parsed)
        folder = scratch / step.folder.name
        folder.mkdir()
        save_trained_sources(rows, folder, trained_folder(step.settings.get("model")))
        return []

    (args,) = parsed
    key = {name: value for name, value in step.settings.items() if name not in ("model", "output_dir", "seed")}
    rows = load_evaluation_rows(json.dumps(key, sort_keys=True))
    (model,) = args.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = refuse_trained_sources(rows, str(trained_folder(model)), allow=True)
    if not count:
        return []
    row = step.folder.name.partition("-evaluate-")[0]
    overlap = f"{count:,} of {len(rows):,} clips of {args.dataset} are in the training data of {row}"
    if args.exclude_trained:
        return [f"{overlap}; they are left out of the evaluation"]
    if args.allow_trained:
        return [f"{overlap}; they are evaluated"]
    raise ValueError(f"{overlap}; set exclude_trained or allow_trained of the evaluation")


def load_training_rows(step: Step, parsed: Sequence[Any]) -> Any:
    """Load the training rows of a step, with the checks of its recipe."""
    training = parsed[-1]
    if step.recipe == "posttrain":
        items = posttrain_teminal.load_items(parsed[0], training)[0]
        rows, count, unit = items.rows, len(items), "pairs"
    else:
        splits = replace(parsed[0], negatives=None).load_splits()  # an earlier step may write the negatives
        check_splits(splits, parsed[0], training)
        rows, count, unit = splits["train"], len(splits["train"]), "clips"
    batch = training.per_device_train_batch_size
    if count < batch and not training.every_caption:
        raise ValueError(f"{count} {unit} are fewer than a batch of {batch}")
    return rows


@cache
def load_evaluation_rows(settings: str) -> Any:
    """Load the rows of an evaluation from its settings, as JSON."""
    (args,) = parse_arguments((options.EvaluationArguments,), [], settings=json.loads(settings))
    return evaluate_supclap.load_rows(args)[0]


@cache
def find_data(
    dataset: str, split: str, config: str, describe: bool, allow_missing: bool = False, is_published: bool = True
) -> tuple[int, str, list[str]]:
    """Count the recordings of a dataset in a folder, and check that a split has enough of them.

    Args:
        dataset: Name of the dataset.
        split: Split to check.
        config: Options of the dataset, as JSON.
        describe: Whether to describe the splits, which reads the headers of up to 1,000 recordings.
        allow_missing: Whether to accept any number of recordings above 0. By default, at most a fifth may be missing.
        is_published: Whether to compare with the published number of recordings, not only with the metadata.

    Returns:
        Number of recordings of the split, a description of all splits or "", and a list with one message if the check
        fails.
    """
    from modeling_supclap.datasets_scripts import load_builder
    from modeling_supclap.recipes.estimates import count_published

    try:
        builder = load_builder(dataset, **json.loads(config))
        splits = builder.as_dataset()
    except Exception as error:  # builders raise different types; the message names the missing file
        return 0, "", [f"data of {dataset}: {error}"]

    report = builder.report()
    count = sum(len(splits.get(name, ())) for name in split.split("+"))
    total, absent = sum(map(len, splits.values())), len(report["missing"])
    share = 0.0 if allow_missing else 1 - options.MISSING_SHARE
    lack = []
    if not count:
        lack.append(f"data of {dataset}: {split} has no recordings")
    elif total < share * (total + absent):
        lack.append(
            f"data of {dataset}: {absent} of the {total + absent:,} recordings in the metadata have no audio file; "
            "--allow_missing true accepts them"
        )
    elif is_published:
        what, published = count_published(dataset, split)
        here = total if what == "the dataset" else count
        if here < share * published:
            lack.append(
                f"data of {dataset}: {what} has {here:,} recordings of {published:,}; --allow_missing true accepts them"
            )
    return count, describe_data(dataset, splits, report) if describe else "", lack


def describe_data(dataset: str, splits: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Describe the number of recordings in each split, those left out, and the duration, from up to 1,000 headers."""
    from modeling_supclap.datasets_scripts.builders.recordings import duration_seconds

    counts = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    paths: list[str] = []
    for rows in splits.values():
        paths += rows["audio_path"]
    seconds = [value for path in paths[:: len(paths) // 1000 + 1] if (value := duration_seconds(path))]
    text = f"{dataset}: {counts} recordings"
    if seconds:
        text += f", about {np.mean(seconds) * len(paths) / 3600:.2g} hours"
    if report["missing"]:
        text += f"; {len(report['missing']):,} without an audio file"
    for reason, ids in report["left_out"].items():
        text += f"; {len(ids):,} left out ({reason})"
    return text
