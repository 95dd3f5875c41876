"""Post-trains a model on the order of sounds: TeminAL's stages A and B, one after the other [T 3.2].

    supclap posttrain --model outputs/esc10 --data_dir DIR
    supclap posttrain teminal.yaml --model laion/clap-htsat-unfused --data_dir DIR

Without a file, `configs/teminal_esc10.yaml` is read. The output folder then holds the model for `from_pretrained` and
`results.json` and `report.html`: how often an item's own caption wins among those of its pair, before, between and
after the stages, beside chance and what a model that is blind to order scores.

What is held out are recordings of each class, of the dataset's training split, or with --pool_splits of the whole, as
in the paper; then clips of its test split are no longer unseen by the model. Half of them choose the best epoch of a
stage, the other half are scored; with --load_best_model_at_end false nothing is chosen and all are scored.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import LastPartArguments, PostTrainingArguments
from modeling_supclap.recipes.running import only_run, run_command, train
from modeling_supclap.training.options import AllStagesOptions

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, evaluation
    from modeling_supclap.datasets_scripts.temporal.items import TemporalItems
    from modeling_supclap.training.trainer import TemporalTrainer
    from modeling_supclap.training.training_args import TemporalTrainingArguments

OPTIONS = (PostTrainingArguments, LastPartArguments, AllStagesOptions)
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "teminal_esc10.yaml"


def load_phrases(origin: str, languages: Sequence[str]) -> dict[str, dict[str, str]] | None:
    """The phrases of the labels in eight languages; None where there are none and the labels serve, in English."""
    from modeling_supclap.datasets_scripts.builders.captions import label_phrases

    try:
        return label_phrases(origin)
    except ValueError as error:
        if list(languages) == ["eng"]:
            return None
        raise ValueError(f"{error}; in English the labels themselves serve: --languages eng") from error


def choose_prompts(args: PostTrainingArguments, languages: Sequence[str]) -> str:
    """What sounds are called: "labels" or "phrases"."""
    prompts = args.prompts or ("labels" if list(languages) == ["eng"] else "phrases")
    if prompts not in ("labels", "phrases") or (prompts == "labels" and list(languages) != ["eng"]):
        raise ValueError(f"prompts is {prompts!r}, languages {list(languages)}; labels are for English alone")
    return prompts


def load_items(
    args: PostTrainingArguments, training: TemporalTrainingArguments
) -> tuple[TemporalItems, TemporalItems, TemporalItems]:
    """Items to train on, to choose the best epoch by and to score, from the training split or from all.

    No source recording is in two of them; but where the last epoch is kept, nothing is chosen and the last two are one.
    """
    from datasets import concatenate_datasets

    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.datasets_scripts.temporal.items import TemporalItems, recordings_by_label, split_by_source
    from modeling_supclap.training.collator import filter_bad_audio

    with training.main_process_first(desc="preparing the data"):
        splits = args.load_splits()

    if args.pool_splits:
        rows = concatenate_datasets(list(splits.values()))
    elif "train" in splits:
        rows = splits["train"]
    else:
        raise ValueError(f"{args.dataset} has only the splits {list(splits)}; --pool_splits true trains on those")

    rows = filter_bad_audio(rows, training)
    parts = split_by_source(without_audio(rows), args.train_fraction, training.seed)
    train, held_out = (rows.select(part) for part in parts)

    choosing = scored = held_out
    if training.load_best_model_at_end:
        parts = split_by_source(without_audio(held_out), 0.5, training.seed)
        choosing, scored = (held_out.select(part) for part in parts)

    classes = set(recordings_by_label(held_out))
    lacking = sorted(classes - recordings_by_label(scored).keys())
    if lacking:
        raise ValueError(
            f"of {lacking} too few recordings are held out: some choose the best epoch and others are scored; lower "
            "train_fraction, or keep the last epoch: --load_best_model_at_end false"
        )

    by_phrases = choose_prompts(args, training.languages) == "phrases"
    phrases = load_phrases(args.origin, training.languages) if by_phrases else None
    shared: dict[str, Any] = {
        "phrases": phrases,
        "languages": training.languages,
        "use_after": args.use_after,
        "num_phrasings": args.num_phrasings,
    }

    eval_pairs = min(args.eval_pairs, len(classes) * (len(classes) - 1))
    return (
        TemporalItems(train, training.seed, pairs_per_epoch=args.pairs_per_epoch, **shared),
        TemporalItems(choosing, training.seed, pairs_per_epoch=eval_pairs, **shared),
        TemporalItems(scored, training.seed, pairs_per_epoch=eval_pairs, **shared),
    )


def run_stage(
    stage: str,
    model: SupCLAPModel,
    processor: SupCLAPProcessor,
    args: TemporalTrainingArguments,
    items: tuple[TemporalItems, TemporalItems, TemporalItems],
) -> Any:
    """Trains one stage in its own folder, from its last checkpoint when the run is resumed; predicts pairs to score."""
    from modeling_supclap.training.checkpoints import last_checkpoint
    from modeling_supclap.training.trainer import TemporalTrainer
    from modeling_supclap.training.training_args import TemporalTrainingArguments

    folder = Path(args.output_dir or ".") / f"stage_{stage}"
    last = last_checkpoint(folder, resumes=args.resume_from_checkpoint is not None)
    shared = {each.name: getattr(args, each.name) for each in fields(args) if each.init}
    trainer = TemporalTrainer(
        model,
        TemporalTrainingArguments(**{**shared, "stage": stage, "output_dir": str(folder)}),
        train_items=items[0],
        eval_items=items[1],
        processing_class=processor,
    )

    train(trainer, last)
    trainer.save_state()  # what the stage logged, for figures of several runs
    return trainer.predict(trainer.eval_rows)


def score_stages(
    predictions: Mapping[str, Any], trainer: TemporalTrainer, rows: Any, data: Mapping[str, Any]
) -> evaluation.Results:
    """How often an item's own caption wins among those of its pair, before, between and after the stages.

    The predictions are the Trainer's, by stage, of the pairs of these rows; `data` is what the protocol says of these.
    """
    from modeling_supclap import evaluation
    from modeling_supclap.datasets_scripts.schema import without_audio

    args, language = trainer.args, trainer.args.eval_languages[0]
    model = evaluation.load_embedding_model(trainer.clap, trainer.processor, name=Path(args.output_dir or ".").name)
    intervals = evaluation.Intervals(seed=args.seed)
    scores: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for stage, prediction in predictions.items():
        scores[stage], kept = evaluation.evaluate_pairs(prediction, intervals)
        arrays |= {f"temporal/{language}/{stage}/{name}": values for name, values in kept.items()}

    listed = list(without_audio(rows))
    files = evaluation.hash_recordings(rows, evaluation.EmbeddingCache(None))
    protocol = {
        **data,
        "split": "held out",
        "dataset_hash": evaluation.hash_dataset(listed, files),
        "clips": len(listed),
        "classes": len(trainer.eval_items.labels),
        "languages": [language],
        "intervals": {"method": "percentile bootstrap over pairs", **vars(intervals)},
        "seed": args.seed,
        "temporal": {"pairs": len(trainer.eval_items), "seed": args.seed, "max_audio_seconds": args.max_audio_seconds},
    }
    return evaluation.make_results(model, {"temporal": {language: scores}}, arrays, protocol)


def main() -> None:
    """Reads the command line, and runs as the only one in its folder."""
    post_args, part_args, args = parse_arguments(OPTIONS, default_config=DEFAULT_CONFIG, about=__doc__)
    with only_run(args):
        train_and_save(post_args, part_args, args)


def count_trained(model: SupCLAPModel) -> dict[str, float]:
    """How many parameters of each tower with its projection train, and their share [T table 5]."""
    counts: dict[str, float] = {}
    for tower in ("text", "audio"):
        trains, total = 0, 0
        for name, weight in model.named_parameters():
            if name.startswith(f"{tower}_") and ".original_module." not in name:  # PEFT's copy of one that trains
                trains += weight.numel() * weight.requires_grad
                total += weight.numel()
        counts |= {f"{tower}_trained": trains, f"{tower}_share": trains / total}

    return counts


def train_and_save(
    post_args: PostTrainingArguments, part_args: LastPartArguments, args: TemporalTrainingArguments
) -> None:
    """Load, freeze, train A, train B, save."""
    from transformers import ClapProcessor, set_seed

    from modeling_supclap.conversion import clap_from_supclap
    from modeling_supclap.evaluation.report import write_report
    from modeling_supclap.recipes.models import is_clap, load_start
    from modeling_supclap.training.trainer import TemporalTrainer

    if post_args.model is None:
        raise ValueError("there is no model to post-train; give --model with a folder or a Hub id")
    started = time.perf_counter()
    set_seed(args.seed)
    origin = post_args.origin

    model, processor = load_start(post_args.model)
    items = load_items(post_args, args)
    model.config.temporal_prompts = choose_prompts(post_args, args.languages)
    part_args.choose_parameters(model)
    trained = count_trained(model)  # before adapters are merged, when everything may train again

    untrained = TemporalTrainer(model, args, items[0], items[2], processing_class=processor)
    predictions = {"before": untrained.predict(untrained.eval_rows)}
    for stage in post_args.stages:
        predictions[f"stage_{stage}"] = run_stage(stage, model, processor, args, items)
    if not untrained.is_world_process_zero():
        return

    output = Path(args.output_dir or ".")
    part_args.finished(model).save_pretrained(output)
    processor.save_pretrained(output)
    if is_clap(post_args.model):
        clap_from_supclap(model).save_pretrained(output / "clap")
        ClapProcessor.from_pretrained(post_args.model).save_pretrained(output / "clap")

    data = {"dataset": post_args.dataset, "origin": origin}
    results = score_stages(predictions, untrained, items[2].rows, data)
    seconds = time.perf_counter() - started
    arguments = {**vars(post_args), **vars(part_args), **args.to_dict()}
    results.content["training"] = {"seconds": seconds, **trained, "arguments": arguments}
    results.save(output)
    write_report(results, output / "report.html")
    untrained.create_model_card(finetuned_from=post_args.model)
    print(results.table())
    print(f"model, results.json and report.html are in {output} ({seconds:.0f} s in all)")


if __name__ == "__main__":
    run_command(main)
