"""Evaluate models on datasets: retrieval, zero-shot classification, ZSTE (zero-shot temporal evaluation) and probes.

    supclap evaluate --model outputs/synthetic
    supclap evaluate --model outputs/synthetic --dataset esc50 --data_dir DIR \\
        --folds 1 2 3 4 5 --tasks zero_shot zste --output_dir outputs/evaluation/esc50
    supclap evaluate --model outputs/esc10 --dataset fsd50k --data_dir DIR --tasks zero_shot linear_probe \\
        --train_split train+validation
    supclap evaluate --model laion/clap-htsat-fused --dataset clotho --data_dir DIR
    supclap evaluate --model my_module:load_my_model --dataset prepared --data_dir DIR
    supclap evaluate --suite suite.yaml --model outputs/esc10 laion/clap-htsat-unfused
    supclap evaluate --suite esc50 clotho --data_dir DATA --model outputs/one outputs/other --tasks retrieval

The first argument may be a YAML file; `--key value` pairs override it. Without a file and without `--dataset`,
`configs/evaluate.yaml` is used, with the synthetic test split of `configs/synthetic.yaml`.

The command writes `results.json` (scores with intervals and chance levels, settings, versions), `outcomes.npz` (the
outcome of each query) and the report `report.html` to the output folder. Embeddings are cached in the Hugging Face
cache folder, so a second run does not compute them again. If started with several processes, only the first one
evaluates.

With several models, or with `--suite`, each evaluation has the folder `DATASET/MODEL` in the output folder, and all
scores are in one table, with intervals and paired differences to the first model: `table.md`, `table.html`, `table.csv`
and `table.tex`. The suite may be a YAML file. Options on the command line override its settings, except `data_dir`:

    - {dataset: esc50, data_dir: ESC-50, test_fold: 4, tasks: [zero_shot]}
    - {name: clotho_5, dataset: clotho, data_dir: CLOTHO, tasks: [retrieval]}
    - {mteb: ESC50_Zeroshot}

An entry `mteb` is the name of a task of MAEB, or of any other task of mteb. Its main score is in the table. It requires
the extra `mteb`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from modeling_supclap.datasets_scripts import add_translations, load_builder
from modeling_supclap.recipes.arguments import parse_arguments, read_settings
from modeling_supclap.recipes.command import advise_skipping, is_first_process, run_command
from modeling_supclap.recipes.options import EvaluationArguments

if TYPE_CHECKING:
    from modeling_supclap import evaluation

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "evaluate.yaml"
COMMON = {
    "Model and data": (
        *("model", "dataset", "data_dir", "caption_column", "split", "folds", "languages", "on_bad_audio", "suite"),
        *("allow_trained", "exclude_trained"),
    ),
    "Tasks": (
        *("tasks", "positives", "retrieval_metrics", "zero_shot_templates", "zero_shot_languages", "zste_languages"),
        *("train_split", "shots", "group_by"),
    ),
    "Run": ("output_dir", "max_audio_seconds", "chunk_seconds", "batch_size", "device"),
}
"""Options of `--help`, in the order in which they are needed."""


def load_rows(args: EvaluationArguments) -> tuple[Any, Any, dict[str, int] | None, dict[str, Any]]:
    """Load the data.

    Returns the rows to evaluate, the rows of `train_split` or None, `{clip id: fold}` or None, and a description of the
    data. Its "classes" are all labels of the dataset, or None.
    """
    from datasets import concatenate_datasets

    from modeling_supclap.datasets_scripts.schema import list_classes, without_audio

    options = args.builder_options
    data: dict[str, Any] = {"dataset": args.dataset, "split": args.split, "dataset_config": {**options}}
    data["dataset_config"].pop("data_dir", None)
    translations = options.pop("translations", None)

    parts, train_rows = [], None
    folds: dict[str, int] = {}
    for fold in args.folds or (None,):
        if fold is not None:
            options["test_fold"] = fold
        builder = load_builder(args.dataset, **options)
        splits = add_translations(builder.as_dataset(), translations)
        parts.append(join(splits, args.split))
        if fold is None:
            train_rows = None if args.train_split is None else join(splits, args.train_split)
            data["shared_sources"] = None if train_rows is None else shared_sources(parts[-1], train_rows, args)
        else:
            folds |= dict.fromkeys(without_audio(parts[-1])["clip_id"], fold)

        if len(parts) == 1:  # the original dataset of a prepared set, and the recordings that have no rows
            report = builder.report()
            missing = sorted(map(str, report["missing"]))
            left_out = {reason: len(ids) for reason, ids in report["left_out"].items()}
            is_partial = bool(missing or left_out or options.get("limit"))
            data["classes"] = list_classes(splits, getattr(builder, "labels", ()) if is_partial else ())
            data["origin"] = getattr(builder, "origin", args.dataset)
            data["without_rows"] = {"missing": len(missing), "examples": missing[:5], "left_out": left_out}

    if args.folds and len(folds) < sum(map(len, parts)):
        raise ValueError(f"the folds {args.folds} share clips in split {args.split!r}; use --split test")
    return add_groups(concatenate_datasets(parts), builder, args), train_rows, folds or None, data


def add_groups(rows: Any, builder: Any, args: EvaluationArguments) -> Any:
    """Add the column `group_by` of the table of a dataset to its rows, if they lack it and the builder can read it."""
    from modeling_supclap.datasets_scripts.schema import FILE_SOURCE, without_audio

    column = args.group_by
    if column is None or column in rows.column_names or not hasattr(builder.config, "columns"):
        return rows
    options = {
        key: value for key, value in args.builder_options.items() if key not in ("translations", "source_column")
    }
    options["columns"] = {**options.get("columns", {}), "source": column}
    values: dict[str, str] = {}
    for split in load_builder(args.dataset, **options).as_dataset().values():
        for row in without_audio(split):
            values[row["clip_id"]] = "" if row["source"].startswith(FILE_SOURCE) else row["source"]
    if not any(values.values()):
        raise ValueError(
            f"no clip of the dataset has a value in the column {column!r}; set --group_by to another column"
        )
    return rows.add_column(column, [values.get(clip_id, "") for clip_id in without_audio(rows)["clip_id"]])


def join(splits: Mapping[str, Any], names: str) -> Any:
    """Return the split with this name. If `names` joins several names by "+", concatenate the splits."""
    from datasets import concatenate_datasets

    chosen = []
    for name in names.split("+"):
        if name not in splits:
            raise ValueError(f"there is no split {name!r}; the splits are {', '.join(splits)}")
        chosen.append(splits[name])
    return concatenate_datasets(chosen)


def shared_sources(rows: Any, train_rows: Any, args: EvaluationArguments) -> dict[str, Any]:
    """Count the recordings in both the evaluated split and the training split. Warn if there are any."""
    from modeling_supclap.datasets_scripts.schema import without_audio

    trained, evaluated = set(without_audio(train_rows)["source"]), set(without_audio(rows)["source"])
    shared = sorted(trained & evaluated)
    if shared:
        warnings.warn(
            f"{len(shared)} of the {len(evaluated)} recordings of {args.split!r} are also in {args.train_split!r}, "
            f"for example {shared[0]}; a model trained on that split has seen them",
            stacklevel=2,
        )
    return {"with": args.train_split, "count": len(shared), "examples": shared[:5]}


def check(splits: Mapping[str, Any], args: EvaluationArguments) -> Any:
    """Refuse options that do not fit together. Return the rows to evaluate."""
    options_of(args)
    return splits[args.split]


def options_of(args: EvaluationArguments) -> evaluation.EvaluationOptions:
    """Convert the command-line arguments to `EvaluationOptions`."""
    from modeling_supclap import evaluation
    from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
    from modeling_supclap.evaluation.options import ZSTE_NAMES, TaskOptions, find_templates

    def pick(group: type[Any]) -> dict[str, Any]:
        return {name: getattr(args, name) for name in group.__dataclass_fields__}

    zste = evaluation.ZSTEOptions(
        args.zste_items,
        args.zste_candidates,
        args.seed,
        tuple(args.zste_tasks or ZSTE_NAMES),
        RenderOptions(match_overlay_loudness=args.zste_match_overlay_loudness),
        args.zste_prompts,
    )
    return evaluation.EvaluationOptions(
        **pick(TaskOptions),
        audio=evaluation.AudioPolicy(**pick(evaluation.AudioPolicy)),
        intervals=evaluation.Intervals(**pick(evaluation.Intervals)),
        template_sets=find_templates(args.zero_shot_templates),
        zste=zste,
    )


def read_suite(args: EvaluationArguments, words: Sequence[str]) -> dict[str, EvaluationArguments]:
    """Return the entries of `args.suite` as `{name: options}`. Options on the command line (`words`) override them."""
    shared: dict[str, Any] = {}
    entries: Any = [{"dataset": name} for name in args.suite]
    if words[0].endswith((".yaml", ".yml")):
        shared, words = read_settings(words[0]), words[1:]
        for key in ("dataset", "data_dir", "dataset_config"):
            shared.pop(key, None)
    if args.suite[0].endswith((".yaml", ".yml")):
        with open(args.suite[0], encoding="utf-8") as file:  # YAML errors name the file
            entries = yaml.safe_load(file)

    suite: dict[str, EvaluationArguments] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        settings = {**shared, **entry} if isinstance(entry, dict) else {}
        dataset = settings.setdefault("dataset", settings.get("mteb"))
        name = str(settings.pop("name", dataset))
        if dataset is None or name in suite or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{args.suite[0]} contains {entry}; expected `dataset` or `mteb`, and a unique `name`")
        if entry.get("mteb") is not None and (unused := sorted(entry.keys() - {"mteb", "name"})):
            raise ValueError(
                f"{args.suite[0]}: {entry} has {', '.join(unused)}; a task of mteb has only mteb and name"
            )

        data_dir = settings.pop("data_dir", None)
        if data_dir is None and args.data_dir is not None and Path(args.data_dir, dataset).is_dir():
            data_dir = str(Path(args.data_dir, dataset))
        (parsed,) = parse_arguments((EvaluationArguments,), words, settings=settings)
        suite[name] = replace(parsed, data_dir=data_dir)
    return suite


def prepare(args: EvaluationArguments) -> tuple[Any, evaluation.EvaluationOptions]:
    """Load the rows of a dataset, or a task of the package mteb. Return them with the evaluation options."""
    from modeling_supclap.datasets_scripts.builders.captions import label_phrases
    from modeling_supclap.datasets_scripts.schema import warn_of_shared_captions

    options = options_of(args)
    if args.mteb is not None:
        from modeling_supclap.integrations.mteb import load_task

        return load_task(args.mteb), options
    rows, train_rows, folds, data = load_rows(args)
    phrases = None  # a dataset may have none
    with nullcontext() if args.phrases else suppress(ValueError):
        phrases = label_phrases(args.phrases or data["origin"])
    if args.positives == "clip" and "retrieval" in args.tasks:
        warn_of_shared_captions(rows)
    options = replace(options, classes=data.pop("classes"), data=data)
    return rows, replace(options, phrases=phrases, folds=folds, train_rows=train_rows)


def evaluate(
    args: EvaluationArguments, model: evaluation.EmbeddingModel, rows: Any, options: Any, folder: Path
) -> evaluation.Results:
    """Evaluate a model on rows, or on a task of mteb; save the results and the report, and print the scores."""
    from modeling_supclap import evaluation
    from modeling_supclap.datasets_scripts.overlap.trained_sources import (
        exclude_trained_sources,
        refuse_trained_sources,
    )
    from modeling_supclap.evaluation.report import write_report
    from modeling_supclap.training.rows import UsableRows

    if args.mteb is not None:
        from modeling_supclap.integrations.mteb import evaluate_task

        results = evaluate_task(model, rows)
        print(f"{model.name} on {args.mteb}\n{results.table()}\n{results.save(folder)}")
        return results

    record, excluded = {args.split: UsableRows(rows).record}, 0
    if args.exclude_trained:
        rows, excluded = exclude_trained_sources(rows, model.name)
        options = replace(options, data={**options.data, "excluded_trained": excluded})
    trained_clips = refuse_trained_sources(rows, model.name, args.allow_trained)
    cache_dir = None if args.cache_dir in (None, "none") else args.cache_dir
    cache = evaluation.EmbeddingCache.default() if args.cache_dir is None else evaluation.EmbeddingCache(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)  # fail before the evaluation
    without = f" without {excluded} that the model has trained on" if excluded else ""
    print(f"{model.name} on {args.dataset}, split {args.split}: {len(rows)} clips{without}")
    with advise_skipping():
        results = evaluation.evaluate(model, rows, options, cache)
    results.content["run"]["trained_clips"] = trained_clips
    results.content["data"] = record
    results.content["left_out"] = {args.split: results.protocol["missing_clips"]}

    report = write_report(results, folder / "report.html", rows)
    path = results.save(folder)  # last, because it marks the evaluation as finished
    run = results.content["run"]
    cached = "" if cache.folder is None else f", {run['cache']['read']} read from {cache.folder}"
    print(results.table())
    print(
        f"{len(results.protocol['missing_clips'])} clips missing; {run['cache']['embedded']} arrays of embeddings "
        f"(recordings, or captions in one language) computed{cached}; {path} and {report.name} "
        f"({run['seconds']['all']:.0f} s)"
    )
    return results


def main() -> None:
    """Parse the command line, and evaluate one model on one dataset, or several models and datasets in one table."""
    (args,) = parse_arguments((EvaluationArguments,), default_config=DEFAULT_CONFIG, about=__doc__, common=COMMON)
    if is_first_process():
        run(args, read_suite(args, sys.argv[1:]) if args.suite else None)


def run(args: EvaluationArguments, suite: Mapping[str, EvaluationArguments] | None = None) -> None:
    """Evaluate the models on a dataset, or on each dataset of a suite, `{name: options}`."""
    from modeling_supclap import evaluation
    from modeling_supclap.conversion import find_kind
    from modeling_supclap.evaluation.models import find_function
    from modeling_supclap.evaluation.seeds import tabulate_datasets
    from modeling_supclap.recipes.compare_results import save_table

    if not args.model or len(set(args.model)) < len(args.model):
        raise ValueError(f"model is {args.model}; pass --model with distinct folders, Hub ids or module:function")
    for name in args.model:
        if find_function(name) is None:
            find_kind(name)

    # Read every dataset before the first evaluation.
    is_table = suite is not None or len(args.model) > 1
    suite = suite or {str(args.mteb or args.dataset): args}
    prepared = {dataset: prepare(each) for dataset, each in suite.items()}
    names = [Path(model).name for model in args.model]
    names = names if len(set(names)) == len(names) else args.model
    tables: dict[str, dict[str, dict[int, evaluation.Results]]] = {dataset: {} for dataset in suite}
    for name, path in zip(names, args.model, strict=True):
        model = evaluation.load_embedding_model(path, device=args.device, trust_remote_code=args.trust_remote_code)
        for dataset, each in suite.items():
            subfolder = f"{dataset}/{re.sub('[^A-Za-z0-9_.-]+', '-', name)}" if is_table else ""
            results = evaluate(each, model, *prepared[dataset], Path(args.output_dir, subfolder))
            tables[dataset][name] = {each.seed: results}
    if is_table:
        # models may skip different recordings
        save_table(tabulate_datasets(tables, allow_different=True), args.output_dir)


if __name__ == "__main__":
    run_command(main)
