"""Evaluates any model on any dataset: retrieval, zero-shot classification and ZSTE, with one kind of results.

    supclap evaluate --model outputs/synthetic
    supclap evaluate --model outputs/esc10 --dataset esc50 --data_dir DIR \\
        --folds 1 2 3 4 5 --tasks zero_shot zste --output_dir outputs/evaluation/esc50
    supclap evaluate --model laion/clap-htsat-fused --dataset clotho --data_dir DIR
    supclap evaluate --model my_module:load_my_model --dataset prepared --data_dir DIR
    supclap evaluate --compare outputs/evaluation/one outputs/evaluation/other

The first argument may be a YAML file; `--key value` pairs override it. Without one and without `--dataset`,
`configs/evaluate.yaml` is read: the test split that `configs/synthetic.yaml` trains for.
The output folder then holds `results.json` (scores with intervals and chance levels, the protocol, versions),
`outcomes.npz` (what each query did, by which `--compare` tests two results, also those that a training run has left)
and `report.html`, one page for people. Embeddings are kept in Hugging Face's cache folder: a second run embeds nothing.
One process evaluates; the others of a launch end at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts import load_builder, splits_of
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import EvaluationArguments
from modeling_supclap.recipes.running import is_first_process, run_command

if TYPE_CHECKING:
    from modeling_supclap import evaluation

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "evaluate.yaml"


def load_rows(args: EvaluationArguments) -> tuple[Any, dict[str, int] | None, dict[str, Any]]:
    """The rows to evaluate, the fold of each clip where folds were asked for, and what the results say of them."""
    from datasets import concatenate_datasets

    from modeling_supclap.datasets_scripts.schema import without_audio

    if args.folds and args.train_split is not None:
        raise ValueError("folds have a training split each; give train_split without folds, or folds without it")

    options = args.builder_options
    data: dict[str, Any] = {"dataset": args.dataset, "split": args.split, "dataset_config": {**options}}
    data["dataset_config"].pop("data_dir", None)
    translations = options.pop("translations", None)

    parts = []
    folds: dict[str, int] = {}
    wanted: list[Any] = [*args.folds] or [None]
    for fold in wanted:
        held_out: dict[str, Any] = {} if fold is None else {"test_fold": fold}
        builder = load_builder(args.dataset, **options, **held_out)
        splits = splits_of(builder, translations)
        parts.append(join(splits, args.split))
        if fold is None:
            data["shared_sources"] = shared_sources(splits, args)
        else:
            folds |= dict.fromkeys(without_audio(parts[-1])["clip_id"], fold)
        if len(parts) == 1:
            data |= found_on_disk(builder, args)

    if args.folds and len(folds) < sum(map(len, parts)):
        raise ValueError(f"the folds {args.folds} share clips in split {args.split!r}; evaluate their test splits")
    return concatenate_datasets(parts), folds or None, data


def found_on_disk(builder: Any, args: EvaluationArguments) -> dict[str, Any]:
    """What the builder has no rows for, in all splits, and the dataset that a prepared set was made from."""
    report = builder.report()
    missing = sorted(map(str, report["missing"]))
    left_out = {}
    for reason, ids in report["left_out"].items():
        left_out[reason] = len(ids)

    without = {"missing": len(missing), "examples": missing[:5], "left_out": left_out}
    return {"origin": getattr(builder, "origin", args.dataset), "without_rows": without}


def join(splits: Mapping[str, Any], names: str) -> Any:
    """One split, or several with + between them."""
    from datasets import concatenate_datasets

    chosen = []
    for name in names.split("+"):
        if name not in splits:
            raise ValueError(f"there is no split {name!r}; the splits are {', '.join(splits)}")
        chosen.append(splits[name])
    return chosen[0] if len(chosen) == 1 else concatenate_datasets(chosen)


def shared_sources(splits: Mapping[str, Any], args: EvaluationArguments) -> dict[str, Any] | None:
    """How many recordings were cut into clips of both the evaluated and the training split; none should be."""
    from modeling_supclap.datasets_scripts.schema import without_audio

    if args.train_split is None:
        return None

    trained = set(without_audio(join(splits, args.train_split))["source"])
    evaluated = set(without_audio(join(splits, args.split))["source"])

    shared = sorted(trained & evaluated)
    if shared:
        warnings.warn(
            f"{len(shared)} of the {len(evaluated)} recordings of {args.split!r} are in {args.train_split!r} too, "
            f"such as {shared[0]}: a model that was trained on it knows them",
            stacklevel=2,
        )
    return {"with": args.train_split, "count": len(shared), "examples": shared[:5]}


def load_phrases(args: EvaluationArguments, origin: str) -> dict[str, dict[str, str]] | None:
    """Label phrases in eight languages, where there are any for the dataset."""
    from modeling_supclap.datasets_scripts.builders.captions import label_phrases

    try:
        return label_phrases(args.phrases or origin)
    except ValueError:
        if args.phrases is not None:
            raise
        return None


def options_of(args: EvaluationArguments) -> evaluation.EvaluationOptions:
    """The arguments as the package takes them."""
    from modeling_supclap import evaluation
    from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES

    zste_tasks = tuple(args.zste_tasks or ZSTE_FAMILIES)
    template_sets = {}
    for name in args.template_sets:
        if name not in evaluation.TEMPLATE_SETS:
            raise ValueError(f"unknown template sets {[name]}; there are {', '.join(evaluation.TEMPLATE_SETS)}")
        template_sets[name] = evaluation.TEMPLATE_SETS[name]
    if args.templates:
        template_sets["own"] = args.templates

    return evaluation.EvaluationOptions(
        tasks=args.tasks,
        languages=args.languages,
        positives=args.positives,
        caption_handling=args.caption_handling,
        on_bad_audio=args.on_bad_audio,
        audio=evaluation.AudioPolicy(args.max_audio_seconds, args.chunk_seconds, args.pooling),
        template_sets=template_sets,
        zero_shot_languages=args.zero_shot_languages,
        zste=evaluation.ZSTEOptions(
            args.zste_items, args.zste_candidates, args.seed, zste_tasks, prompts=args.zste_prompts
        ),
        zste_languages=args.zste_languages,
        intervals=evaluation.Intervals(args.num_resamples, args.confidence, args.seed),
        batch_size=args.batch_size,
    )


def compare(args: EvaluationArguments) -> None:
    """Prints how two results differ."""
    from modeling_supclap import evaluation

    if len(args.compare) != 2:
        raise ValueError(f"--compare takes two folders of results, got {args.compare}")

    first, second = map(evaluation.Results.load, args.compare)
    table = evaluation.compare(first, second, args.num_resamples, args.seed, args.allow_different)
    for place, path, results in zip(("first", "second"), args.compare, (first, second), strict=True):
        print(f"{place}: {path}, model {results.content['model']['name']}")
    print(evaluation.format_comparison(table))


def main() -> None:
    """Parse, load, embed, score, write; or compare."""
    (args,) = parse_arguments((EvaluationArguments,), default_config=DEFAULT_CONFIG, about=__doc__)

    from modeling_supclap import evaluation
    from modeling_supclap.datasets_scripts.schema import warn_of_shared_captions
    from modeling_supclap.evaluation.report import write_report

    if not is_first_process():
        return
    if args.compare:
        compare(args)
        return
    if args.model is None:
        raise ValueError("there is no model; give --model with a folder, a Hub id, or module:function")

    options = options_of(args)
    rows, folds, data = load_rows(args)
    folder = None if args.cache_dir in (None, "none") else args.cache_dir
    cache = evaluation.EmbeddingCache.default() if args.cache_dir is None else evaluation.EmbeddingCache(folder)

    model = evaluation.load_embedding_model(args.model, device=args.device)
    phrases = load_phrases(args, data["origin"])
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # what stands in its way shows before the work
    print(f"{args.model} on {args.dataset}, split {args.split}: {len(rows)} clips")
    if args.positives == "clip" and "retrieval" in args.tasks:
        warn_of_shared_captions(rows)
    results = evaluation.evaluate(model, rows, options, cache, phrases, folds=folds, data=data)

    path = results.save(args.output_dir)
    report = write_report(results, Path(args.output_dir, "report.html"), rows)
    run = results.content["run"]
    cached = "" if cache.folder is None else f", {run['cache']['read']} read from {cache.folder}"
    print(results.table())
    print(
        f"{len(results.protocol['missing_clips'])} clips missing; {run['cache']['embedded']} sets of embeddings made"
        f"{cached}; {path} and {report.name} ({run['seconds']['all']:.0f} s)"
    )


if __name__ == "__main__":
    run_command(main)
