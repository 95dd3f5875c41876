"""Post-train a model on the order of sounds with TeminAL's stages A and B, one after the other (TeminAL section 3.2).

    supclap posttrain --model outputs/esc10 --data_dir DIR
    supclap posttrain teminal.yaml --model laion/clap-htsat-unfused --data_dir DIR

The default file is `configs/teminal_esc10.yaml`. The output folder contains the model for `from_pretrained`,
`results.json` and `report.html`. The results and the report contain the share of sound pairs for which the correct
caption scores highest, before and after each stage. For comparison, they contain the chance level and the score of a
model that ignores the order of sounds.

Recordings of each class are held out from the training split. With --pool_splits they are held out from all splits, as
in the paper, and the training data includes clips of the test split. Half of the held-out recordings select the best
epoch of a stage, and the other half are scored. With --load_best_model_at_end false, all of them are scored. With
--train_fraction 1, the whole training split is used, and the validation and test splits are held out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.command import run_command
from modeling_supclap.recipes.options import LastPartArguments, PostTrainingArguments
from modeling_supclap.recipes.train_supclap import (
    choose_parameters,
    finish_run,
    load_start,
    merge_adapters,
    only_run,
    record_splits,
    report_temperature,
    train,
)
from modeling_supclap.training.options import AllStagesOptions, clips_per_batch, refuse

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, evaluation
    from modeling_supclap.datasets_scripts.temporal.items import TemporalItems
    from modeling_supclap.training.temporal_training import TemporalTrainer
    from modeling_supclap.training.training_args import TemporalTrainingArguments

OPTIONS = (PostTrainingArguments, LastPartArguments, AllStagesOptions)
COMMON = {
    "Data": ("dataset", "data_dir", "languages", "pool_splits", "train_fraction", "on_bad_audio"),
    "Model": ("model", "train_last_layers", "lora_rank", "temperature"),
    "Stages": ("stages", "prompts", "use_after", "pairs_per_epoch"),
    "Run": (
        *("output_dir", "learning_rate", "num_train_epochs", "per_device_train_batch_size", "bf16", "seed"),
        *("resume_from_checkpoint", "load_best_model_at_end"),
    ),
}
"""Options of `--help`, in the order in which they are needed."""

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "teminal_esc10.yaml"
EVAL_PAIRS = 90
"""Maximum number of held-out pairs to evaluate on."""


def check(
    splits: Mapping[str, Any],
    args: PostTrainingArguments,
    part_args: LastPartArguments,
    training: TemporalTrainingArguments,
) -> Any:
    """Refuse splits that a run refuses before it reads a recording. Return the rows to train on."""
    items = load_items(args, training, splits)[0]
    batch = training.per_device_train_batch_size
    refuse([(len(items) < batch, f"{len(items)} pairs are fewer than a batch of {batch}")])
    return items.rows


def choose_prompts(args: PostTrainingArguments, languages: Sequence[str]) -> str:
    """Return the kind of sound names in prompts: "labels" by default for English alone, otherwise "phrases"."""
    prompts = args.prompts or ("labels" if list(languages) == ["eng"] else "phrases")
    if prompts not in ("labels", "phrases") or (prompts == "labels" and list(languages) != ["eng"]):
        given = f"{prompts!r} with languages {list(languages)}"
        raise ValueError(f"prompts is {given}; expected phrases, or labels for eng")
    return prompts


def load_items(
    args: PostTrainingArguments, training: TemporalTrainingArguments, splits: Mapping[str, Any]
) -> tuple[TemporalItems, TemporalItems, TemporalItems]:
    """Build three sets of items: one for training, one to select the best epoch, and one for the final scores.

    An item is a clip of one or two sounds, with its captions. The recordings are those of `hold_out`. The sets share no
    source recordings, except that the last two sets are equal if `load_best_model_at_end` is False.
    """
    from modeling_supclap.datasets_scripts.builders.captions import label_phrases
    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.datasets_scripts.temporal.items import TemporalItems, one_per_class, recordings_by_label

    train_rows, selection_rows, scored_rows = hold_out(splits, args, training)
    if args.fixed_recordings:
        train_rows = train_rows.select(one_per_class(without_audio(train_rows), training.seed))

    scored_classes = set(recordings_by_label(scored_rows))
    classes = scored_classes | set(recordings_by_label(selection_rows))
    lacking = sorted(classes - scored_classes)
    advice = "lower train_fraction, or set --load_best_model_at_end false"
    refuse([(lacking, f"too few recordings of {lacking} are held out to select the best epoch; {advice}")])

    phrases = None
    if choose_prompts(args, training.languages) == "phrases":
        try:
            phrases = label_phrases(args.origin)
        except ValueError as error:
            raise ValueError(f"{error}; use --languages eng --prompts labels to train on the labels") from error
    make_items = partial(
        TemporalItems,
        seed=training.seed,
        phrases=phrases,
        languages=training.languages,
        use_after=args.use_after,
        num_phrasings=args.num_phrasings,
    )
    pairs = min(EVAL_PAIRS, len(classes) * (len(classes) - 1))
    return (
        make_items(train_rows, pairs_per_epoch=args.pairs_per_epoch, random_order=args.random_order),
        make_items(selection_rows, pairs_per_epoch=pairs),
        make_items(scored_rows, pairs_per_epoch=pairs),
    )


def hold_out(
    splits: Mapping[str, Any], args: PostTrainingArguments, training: TemporalTrainingArguments
) -> tuple[Any, Any, Any]:
    """Return the rows to train on, those that select the best epoch, and those that are scored.

    The first are a part of the training split or, if `pool_splits` is set, of all splits. With a `train_fraction` of 1,
    they are the whole training split, and the others are the validation and the test split.
    """
    from datasets import concatenate_datasets

    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.datasets_scripts.temporal.items import split_by_source

    if args.pool_splits:
        splits = {"train": concatenate_datasets(list(splits.values()))}
    held_out = []
    if args.train_fraction == 1:
        held_out = ["validation" if training.load_best_model_at_end else "test", "test"]
    lacking = [name for name in dict.fromkeys(held_out) if name not in splits]
    problem = f"train_fraction is 1, but {args.dataset} has no {' and '.join(lacking)} split to hold out"
    advice = "set --validation_fraction, or --load_best_model_at_end false"
    only = f"{args.dataset} has only the splits {list(splits)}; use --pool_splits true to train on them"
    refuse([("train" not in splits, only), (lacking, f"{problem}; {advice}")])
    if held_out:
        selection, scored = held_out
        return splits["train"], splits[selection], splits[scored]

    def halve(rows: Any, fraction: float) -> tuple[Any, Any]:
        first, second = split_by_source(without_audio(rows), fraction, training.seed)
        return rows.select(first), rows.select(second)

    train_rows, others = halve(splits["train"], args.train_fraction)
    return train_rows, *(halve(others, 0.5) if training.load_best_model_at_end else (others, others))


def run_stage(
    stage: str,
    model: SupCLAPModel,
    processor: SupCLAPProcessor,
    args: TemporalTrainingArguments,
    items: Sequence[TemporalItems],
) -> TemporalTrainer:
    """Train one TeminAL stage in its own folder, and return its trainer. If requested, resume from its last checkpoint.

    `items` are those to train on, and those that select the best epoch.
    """
    from modeling_supclap.training.checkpoints import last_checkpoint
    from modeling_supclap.training.temporal_training import TemporalTrainer
    from modeling_supclap.training.training_args import TemporalTrainingArguments

    folder = Path(args.output_dir or ".") / f"stage_{stage}"
    last = last_checkpoint(folder, resumes=args.resume_from_checkpoint is not None)
    shared = {option.name: getattr(args, option.name) for option in fields(args) if option.init}
    changed = {"stage": stage, "output_dir": str(folder), "resume_from_checkpoint": last}
    stage_args = TemporalTrainingArguments(**{**shared, **changed})
    stage_args.training_data = args.training_data
    trainer = TemporalTrainer(model, stage_args, *items, processing_class=processor)
    train(trainer, last)
    trainer.save_state()  # the log, for figures of several runs
    return trainer


def score_stages(
    predictions: Mapping[str, Any], trainer: TemporalTrainer, rows: Any, data: Mapping[str, Any]
) -> evaluation.Results:
    """Compute the temporal accuracy before and after each stage: how often an item's own caption ranks first.

    `predictions` is `{stage: prediction}` for the held-out pairs of `rows`. `data` is a description of the dataset.
    """
    from modeling_supclap import evaluation
    from modeling_supclap.datasets_scripts.schema import without_audio

    args, language = trainer.args, trainer.args.eval_languages[0]
    model = evaluation.load_embedding_model(trainer.clap, trainer.processor, name=Path(args.output_dir or ".").name)
    intervals = evaluation.Intervals(seed=args.seed)
    scores: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for stage, prediction in predictions.items():
        scores[stage], outcomes = evaluation.evaluate_pairs(prediction, intervals)
        arrays |= {f"temporal/{language}/{stage}/{name}": values for name, values in outcomes.items()}

    clips = list(without_audio(rows))
    protocol = {
        **data,
        "split": "held out",
        "dataset_hash": evaluation.hash_dataset(clips, evaluation.hash_recordings(rows)),
        "clips": len(clips),
        "classes": len(trainer.eval_items.labels),
        "languages": [language],
        "intervals": {"method": "percentile bootstrap over pairs", **vars(intervals)},
        "seed": args.seed,
        "temporal": {"pairs": len(trainer.eval_items), "seed": args.seed, "max_audio_seconds": args.max_audio_seconds},
    }
    return evaluation.make_results(model, {"temporal": {language: scores}}, arrays, protocol)


def main() -> None:
    """Parse the command line, and train."""
    run(*parse_arguments(OPTIONS, default_config=DEFAULT_CONFIG, about=__doc__, common=COMMON))


def run(*options: Any) -> None:
    """Lock the output folder, and train. The options are those of `train_and_save`."""
    with only_run(options[-1]):
        train_and_save(*options)


def count_trained(model: SupCLAPModel) -> dict[str, float]:
    """Count the trainable parameters of each tower with its projection, and their fraction (TeminAL table 5)."""
    counts: dict[str, float] = {}
    for tower in ("text", "audio"):
        trains, total = 0, 0
        for name, weight in model.named_parameters():
            # PEFT's copy of a trained module
            if name.startswith(f"{tower}_") and ".original_module." not in name:
                trains += weight.numel() * weight.requires_grad
                total += weight.numel()
        counts |= {f"{tower}_trained": trains, f"{tower}_share": trains / total}
    return counts


def train_and_save(
    post_args: PostTrainingArguments, part_args: LastPartArguments, args: TemporalTrainingArguments
) -> None:
    """Load a model, train the selected part in stages, score the held-out pairs, and save the model and results."""
    from transformers import set_seed

    from modeling_supclap.training.collator import min_seconds
    from modeling_supclap.training.rows import filter_bad_audio, list_left_out
    from modeling_supclap.training.temporal_training import TemporalTrainer

    advice = "launch it without --fsdp and FSDP configuration"
    refuse(
        [
            (post_args.model is None, "no model was given; pass --model with a folder or a Hub id"),
            (args.sharding == "fsdp", f"post-training does not support FSDP; {advice}"),
        ]
    )
    assert post_args.model is not None
    started = time.perf_counter()
    set_seed(args.seed)
    args.training_data = post_args.identity
    data = {"dataset": post_args.dataset, "origin": post_args.origin}

    model, processor = load_start(post_args.model, post_args.temperature)
    with args.main_process_first(desc="preparing the data"):
        splits = post_args.load_splits()
    usable = {name: filter_bad_audio(rows, args, min_seconds(processor)) for name, rows in splits.items()}
    items = load_items(post_args, args, usable)
    model.config.temporal_prompts = choose_prompts(post_args, args.languages)
    choose_parameters(part_args, model)
    temperature = report_temperature(model)
    trained = count_trained(model)  # before adapters are merged, which makes all parameters trainable

    trainer = TemporalTrainer(model, args, items[0], items[2], processing_class=processor)
    predictions = {"before": trainer.predict(trainer.data["validation"])}
    states, captions, process_seconds = [], 0, 0.0
    texts = len(args.languages) if args.text_scheme == "kcl" else 1
    for stage in post_args.stages:
        of_stage = run_stage(stage, model, processor, args, items[:2])
        scored = TemporalTrainer(model, of_stage.args, items[0], items[2], processing_class=processor)
        predictions[f"stage_{stage}"] = scored.predict(scored.data["validation"])
        states.append(of_stage.state)
        clips_per_step = clips_per_batch(of_stage.args) * args.gradient_accumulation_steps
        captions += of_stage.state.global_step * clips_per_step * texts
        process_seconds += of_stage.throughput.process_seconds
    if not trainer.is_world_process_zero():
        return

    save_model(model, processor, post_args.model, part_args, args)
    results = score_stages(predictions, trainer, items[2].rows, data)
    results.content["data"] = record_splits(splits)
    results.content["left_out"] = {name: list_left_out(rows, usable[name]) for name, rows in splits.items()}
    results.content["training"] = {
        "best_validation": {args.metric_for_best_model: states[-1].best_metric},
        "steps": sum(state.global_step for state in states),
        "captions": captions,
        "seconds": time.perf_counter() - started,
        "process_seconds": process_seconds,
        **trained,
        "arguments": {**vars(post_args), **vars(part_args), **temperature, **args.to_dict()},
    }
    write_run(trainer, results, items[0].rows, post_args.model, started)


def save_model(
    model: SupCLAPModel,
    processor: SupCLAPProcessor,
    start: str,
    part_args: LastPartArguments,
    args: TemporalTrainingArguments,
) -> None:
    """Save the trained model with merged adapters. If `start` is a `ClapModel`, also save one, in the folder `clap`."""
    from transformers import ClapProcessor

    from modeling_supclap.conversion import clap_from_supclap, find_kind

    output = Path(args.output_dir or ".")
    (output / "results.json").unlink(missing_ok=True)  # of earlier weights
    merge_adapters(part_args, model, output).save_pretrained(output)
    processor.save_pretrained(output)
    if find_kind(start) == "clap":
        clap_from_supclap(model).save_pretrained(output / "clap")
        ClapProcessor.from_pretrained(start, trust_remote_code=False).save_pretrained(output / "clap")


def write_run(
    trainer: TemporalTrainer, results: evaluation.Results, train_rows: Any, start: str, started: float
) -> None:
    """Write results, report, trained sources and the model card to the output folder, and print the scores."""
    from modeling_supclap.datasets_scripts.overlap.trained_sources import save_trained_sources
    from modeling_supclap.evaluation.report import write_report
    from modeling_supclap.training.checkpoints import put_away

    output = Path(trainer.args.output_dir or ".")
    save_trained_sources(train_rows, output, start)
    write_report(results, output / "report.html")
    finish_run(trainer, {"": results}, start)
    print(results.table())
    print(f"model, results.json and report.html are in {output} ({time.perf_counter() - started:.0f} s in total)")
    for folder in sorted(output.glob("stage_*")):
        print(put_away(folder, trainer.args.save_total_limit))


if __name__ == "__main__":
    run_command(main)
