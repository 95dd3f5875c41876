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

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import LastPartArguments, PostTrainingArguments
from modeling_supclap.recipes.running import Clock, only_run, run_command, train, write_final_card
from modeling_supclap.recipes.training_data import record_splits
from modeling_supclap.training.options import AllStagesOptions

if TYPE_CHECKING:
    from transformers import TrainerState

    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, evaluation
    from modeling_supclap.datasets_scripts.temporal.items import TemporalItems
    from modeling_supclap.training.temporal_training import TemporalTrainer
    from modeling_supclap.training.training_args import TemporalTrainingArguments

OPTIONS = (PostTrainingArguments, LastPartArguments, AllStagesOptions)
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "teminal_esc10.yaml"


def choose_prompts(args: PostTrainingArguments, languages: Sequence[str]) -> str:
    """Return the kind of sound names in prompts: "labels" by default for English alone, otherwise "phrases"."""
    prompts = args.prompts or ("labels" if list(languages) == ["eng"] else "phrases")
    if prompts not in ("labels", "phrases") or (prompts == "labels" and list(languages) != ["eng"]):
        given = f"{prompts!r} with languages {list(languages)}"
        raise ValueError(f"prompts is {given}; expected phrases, or labels for eng")
    return prompts


def load_items(
    args: PostTrainingArguments,
    training: TemporalTrainingArguments,
    min_seconds: float = 0.0,
    splits: Mapping[str, Any] | None = None,
) -> tuple[TemporalItems, TemporalItems, TemporalItems]:
    """Build three sets of items: one for training, one to select the best epoch, and one for the final scores.

    An item is a clip of one or two sounds, with its captions. The recordings come from the training split, or from all
    splits if `pool_splits` is set. With a `train_fraction` of 1, those that are held out come from the validation and
    the test split. The sets share no source recordings, except that the last two sets are equal if
    `load_best_model_at_end` is False. Recordings shorter than `min_seconds` are unusable. `splits` is the dataset if it
    is already loaded.
    """
    from datasets import concatenate_datasets

    from modeling_supclap.datasets_scripts.builders.captions import label_phrases
    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.datasets_scripts.temporal.items import TemporalItems, one_per_class, recordings_by_label
    from modeling_supclap.training.rows import filter_bad_audio

    if splits is None:
        splits = load_splits(args, training)
    if "train" not in splits and not args.pool_splits:
        raise ValueError(f"{args.dataset} has only the splits {list(splits)}; use --pool_splits true to train on them")
    if args.pool_splits:
        splits = {"train": concatenate_datasets(list(splits.values()))}
    elif args.train_fraction < 1:
        splits = {"train": splits["train"]}
    splits = {name: filter_bad_audio(rows, training, min_seconds) for name, rows in splits.items()}
    train, held_out, selection, scored = hold_out(splits, args, training)
    if args.fixed_recordings:
        train = train.select(one_per_class(without_audio(train), training.seed))

    classes = set(recordings_by_label(held_out))
    lacking = sorted(classes - recordings_by_label(scored).keys())
    if lacking:
        advice = "lower train_fraction, or set --load_best_model_at_end false"
        raise ValueError(f"too few recordings of {lacking} are held out to select the best epoch; {advice}")

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
    eval_pairs = min(args.eval_pairs, len(classes) * (len(classes) - 1))
    return (
        make_items(train, pairs_per_epoch=args.pairs_per_epoch, random_order=args.random_order),
        make_items(selection, pairs_per_epoch=eval_pairs),
        make_items(scored, pairs_per_epoch=eval_pairs),
    )


def load_splits(args: PostTrainingArguments, training: TemporalTrainingArguments) -> dict[str, Any]:
    """Load the splits of the dataset, first in the first process."""
    with training.main_process_first(desc="preparing the data"):
        return args.load_splits()


def hold_out(
    splits: Mapping[str, Any], args: PostTrainingArguments, training: TemporalTrainingArguments
) -> tuple[Any, Any, Any, Any]:
    """Split the rows into those to train on, all held-out ones, and those that select the best epoch and are scored."""
    from datasets import concatenate_datasets

    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.datasets_scripts.temporal.items import split_by_source

    selects = training.load_best_model_at_end
    if args.train_fraction == 1:
        needed = ("validation", "test") if selects else ("test",)
        lacking = [name for name in needed if name not in splits]
        if lacking:
            raise ValueError(
                f"train_fraction is 1, but {args.dataset} has no {lacking[0]} split to hold out; "
                "set --validation_fraction, or --load_best_model_at_end false"
            )
        held_out = concatenate_datasets([splits[name] for name in needed])
        return splits["train"], held_out, splits[needed[0]], splits["test"]

    rows = splits["train"]
    train, held_out = (
        rows.select(part) for part in split_by_source(without_audio(rows), args.train_fraction, training.seed)
    )
    if not selects:
        return train, held_out, held_out, held_out
    parts = split_by_source(without_audio(held_out), 0.5, training.seed)
    selection, scored = (held_out.select(part) for part in parts)
    return train, held_out, selection, scored


def run_stage(
    stage: str,
    model: SupCLAPModel,
    processor: SupCLAPProcessor,
    args: TemporalTrainingArguments,
    items: tuple[TemporalItems, TemporalItems, TemporalItems],
) -> tuple[Any, TrainerState, float]:
    """Train one TeminAL stage in its own folder. If requested, it resumes from its last checkpoint.

    Returns:
        Predictions for the held-out pairs, the trainer's state, and the processor seconds that the stage had used
        before it was resumed.
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
    selection, scored = (
        TemporalTrainer(model, stage_args, items[0], eval_items, processing_class=processor)
        for eval_items in items[1:]
    )

    train(selection, last)
    selection.save_state()  # the log, for figures of several runs
    return scored.predict(scored.data["validation"]), selection.state, selection.throughput.earlier_seconds


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
    """Parse the command line, lock the output folder, and train."""
    post_args, part_args, args = parse_arguments(OPTIONS, default_config=DEFAULT_CONFIG, about=__doc__)
    with only_run(args):
        train_and_save(post_args, part_args, args)


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

    from modeling_supclap.recipes.models import load_start, report_temperature
    from modeling_supclap.training.collator import min_seconds
    from modeling_supclap.training.rows import filter_bad_audio, list_left_out
    from modeling_supclap.training.temporal_training import TemporalTrainer

    if post_args.model is None:
        raise ValueError("no model was given; pass --model with a folder or a Hub id")
    if args.sharding == "fsdp":
        raise ValueError("post-training does not support FSDP; launch it without --fsdp and FSDP configuration")
    clock = Clock()
    set_seed(args.seed)
    args.training_data = post_args.identity
    data = {"dataset": post_args.dataset, "origin": post_args.origin}

    model, processor = load_start(post_args.model, post_args.temperature)
    splits = load_splits(post_args, args)
    usable = {name: filter_bad_audio(rows, args, min_seconds(processor)) for name, rows in splits.items()}
    items = load_items(post_args, args, min_seconds(processor), usable)
    model.config.temporal_prompts = choose_prompts(post_args, args.languages)
    part_args.choose_parameters(model)
    temperature = report_temperature(model)
    trained = count_trained(model)  # before adapters are merged, which makes all parameters trainable

    trainer = TemporalTrainer(model, args, items[0], items[2], processing_class=processor)
    predictions = {"before": trainer.predict(trainer.data["validation"])}
    states, earlier_seconds = [], 0.0
    for stage in post_args.stages:
        predictions[f"stage_{stage}"], state, seconds = run_stage(stage, model, processor, args, items)
        states.append(state)
        earlier_seconds += seconds
    if not trainer.is_world_process_zero():
        return

    save_model(model, processor, post_args.model, part_args, args)
    results = score_stages(predictions, trainer, items[2].rows, data)
    results.content["data"] = record_splits(splits)
    results.content["left_out"] = {name: list_left_out(rows, usable[name]) for name, rows in splits.items()}
    results.content["training"] = {
        "best_validation": {args.metric_for_best_model: states[-1].best_metric},
        "steps": sum(state.global_step for state in states),
        "captions": count_captions(post_args.stages, states, args),
        "seconds": clock.seconds,
        "process_seconds": earlier_seconds + clock.process_seconds,
        **trained,
        "arguments": {**vars(post_args), **vars(part_args), **temperature, **args.to_dict()},
    }
    write_run(trainer, results, items[0].rows, post_args.model, clock)


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
    part_args.finished(model, output).save_pretrained(output)
    processor.save_pretrained(output)
    if find_kind(start) == "clap":
        clap_from_supclap(model).save_pretrained(output / "clap")
        ClapProcessor.from_pretrained(start, trust_remote_code=False).save_pretrained(output / "clap")


def count_captions(stages: Sequence[str], states: Sequence[TrainerState], args: TemporalTrainingArguments) -> int:
    """Count the captions that all stages have trained on."""
    texts = len(args.languages) if args.text_scheme == "kcl" else 1
    pairs_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    captions = 0
    for stage, state in zip(stages, states, strict=True):
        items_per_pair = {"a": 2, "b": 3}[stage]
        captions += state.global_step * pairs_per_step * items_per_pair * texts
    return captions


def write_run(
    trainer: TemporalTrainer, results: evaluation.Results, train_rows: Any, start: str, clock: Clock
) -> None:
    """Write results, report, trained sources and the model card to the output folder, and print the scores."""
    from modeling_supclap.datasets_scripts.overlap.trained_sources import save_trained_sources
    from modeling_supclap.evaluation.report import write_report
    from modeling_supclap.training.checkpoints import put_away

    output = Path(trainer.args.output_dir or ".")
    save_trained_sources(train_rows, output, start)
    results.save(output)
    write_report(results, output / "report.html")
    write_final_card(trainer, start)
    print(results.table())
    print(f"model, results.json and report.html are in {output} ({clock.seconds:.0f} s in total)")
    for folder in sorted(output.glob("stage_*")):
        print(put_away(folder, trainer.args.save_total_limit))


if __name__ == "__main__":
    run_command(main)
