"""Train a SupCLAP model on recordings and captions, evaluate it, and save it.

    supclap train                                       # the default: needs no data
    supclap train esc10.yaml --data_dir DIR             # real recordings
    supclap train supclap_audiocaps.yaml --data_dir DIR

In a checkout, `accelerate launch recipes/train_supclap.py` runs the same training; `--multi_gpu` uses all GPUs.

The first argument may be a YAML file. `--key value` pairs override it, and options of the dataset's builder are also
keys (`--test_fold 4`). The default file is `configs/synthetic.yaml`. If `--dataset` names another dataset, no file is
read, and the default settings are from the SupCLAP paper. `--datasets` trains on several datasets. `--model` continues
the training of a SupCLAP model or a `ClapModel`. `--streaming true` streams local or remote data: a prepared dataset,
other Parquet files (`--dataset hf`), or WebDataset tar files.

The output folder contains the model for `from_pretrained`, its model card, `training_curves.png`, `drift.png`, and
the files of an evaluation: `results.json`, `outcomes.npz` and `report.html`. With `--datasets`, each dataset also has a
subfolder with these three files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import DataArguments, ModelArguments, TrainedPartArguments, as_mapping
from modeling_supclap.recipes.running import Clock, only_run, run_command, say, train, write_final_card
from modeling_supclap.recipes.training_data import TrainingData, load_data
from modeling_supclap.recipes.training_data import check_splits as check_splits
from modeling_supclap.training.options import ContrastiveOptions

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, evaluation
    from modeling_supclap.training.trainer import SupCLAPTrainer
    from modeling_supclap.training.training_args import SupCLAPTrainingArguments

TOKENIZER_ROWS = 20_000
"""Maximum number of evenly spaced rows on which a tokenizer is trained; more captions hardly change its vocabulary."""

SELECTED_ON_TEST = "WARNING: the test split selects the checkpoint; its scores are higher than those on new data"

OPTIONS = (DataArguments, ModelArguments, TrainedPartArguments, ContrastiveOptions)
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "synthetic.yaml"


def arguments_in_use(args: ModelArguments) -> dict[str, Any]:
    """Return the model arguments that have an effect. A pretrained model ignores arguments that define its shape.

    The temperature and the bias are left out, because `models.report_temperature` returns their values.
    """
    if args.model is not None:
        return {"model": args.model}
    used = dict(vars(args))
    del used["temperature"], used["logit_bias"]
    if args.audio_encoder != "scratch":
        del used["vocab_size"]
        for name in {"audio", "text"} - set(args.random_weights):
            del used[f"{name}_config"]
    return used


def build_processor(args: ModelArguments, rows: Any, languages: list[str]) -> SupCLAPProcessor:
    """Load the processor for pretrained encoders. For encoders from scratch, train a tokenizer on the captions."""
    from transformers import RobertaTokenizer

    from modeling_supclap import CEDFeatureExtractor, SupCLAPProcessor
    from modeling_supclap.datasets_scripts.schema import all_captions, without_audio

    if "scratch" not in (args.audio_encoder, args.text_encoder):
        return SupCLAPProcessor.from_encoders(args.audio_encoder, args.text_encoder, audio_seconds=args.audio_seconds)

    captions: set[str] = set()
    light = without_audio(rows)
    for index in range(0, len(light), math.ceil(len(light) / TOKENIZER_ROWS) or 1):
        captions.update(text for _, text in all_captions(light[index], languages))

    # A byte-level BPE tokenizer can encode any text. Sorted captions make its training reproducible.
    tokenizer = RobertaTokenizer().train_new_from_iterator(sorted(captions), args.vocab_size, show_progress=False)
    return SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)


def build_model(args: ModelArguments, processor: SupCLAPProcessor) -> SupCLAPModel:
    """Build a model from two encoders, either both pretrained or both from scratch."""
    from transformers import BertConfig

    from modeling_supclap import CEDConfig, SupCLAPConfig, SupCLAPModel

    shared: dict[str, Any] = {}
    for name in ("projection_dim", "temperature", "logit_bias", "audio_pooling", "text_pooling"):
        if getattr(args, name) is not None:
            shared[name] = getattr(args, name)
    if args.audio_encoder == "scratch":
        audio_config = CEDConfig(**as_mapping(args.audio_config))
        vocabulary = {"vocab_size": len(processor.tokenizer), "pad_token_id": processor.tokenizer.pad_token_id}
        text_config = BertConfig(**vocabulary, **as_mapping(args.text_config))
        return SupCLAPModel(SupCLAPConfig(audio_config=audio_config, text_config=text_config, **shared))

    model = SupCLAPModel.from_encoders(
        args.audio_encoder, args.text_encoder, audio_seconds=args.audio_seconds, **shared
    )
    for name in args.random_weights:
        config = getattr(model.config, f"{name}_config")
        config.update(as_mapping(getattr(args, f"{name}_config")))
        config._name_or_path = ""  # its weights no longer come from that checkpoint
    if args.random_weights:
        fresh = SupCLAPModel(model.config)
        for name in args.random_weights:
            setattr(model, f"{name}_model", fresh.get_submodule(f"{name}_model"))
    return model


def fit_normalisation(encoder: Any, processor: SupCLAPProcessor, rows: Any, args: SupCLAPTrainingArguments) -> None:
    """Compute the mel normalisation of a new audio encoder from about 256 training clips."""
    from torch.utils.data import Subset

    from modeling_supclap.datasets_scripts.audio import read_row
    from modeling_supclap.datasets_scripts.bad_audio import map_in_order
    from modeling_supclap.datasets_scripts.stream import RowStream
    from modeling_supclap.training.collator import min_seconds

    rate_hz = processor.feature_extractor.sampling_rate
    if isinstance(rows, RowStream):
        rows = list(islice(rows.shuffle(0), 256))
    chosen: Any = Subset(rows, range(0, len(rows), max(1, len(rows) // 256)))
    # Without `pad_short_clips`, training refuses short clips later.
    read = partial(
        read_row,
        sampling_rate_hz=rate_hz,
        max_seconds=args.max_audio_seconds,
        min_seconds=min_seconds(processor),
        pad_short_clips=True,
    )
    clips = list(map_in_order(read, chosen, args.dataloader_num_workers))
    encoder.fit_normalisation(**processor(audio=clips, sampling_rate=rate_hz, return_tensors="pt"))


def find_checkpoint(args: SupCLAPTrainingArguments) -> str | None:
    """Return the path of the checkpoint to resume from. Return None for a new run, or if "last" finds no checkpoint."""
    from modeling_supclap.training.checkpoints import last_checkpoint

    folder, named = args.output_dir or ".", args.resume_from_checkpoint
    last = last_checkpoint(folder, resumes=named is not None)
    if named == "last" and last is None:
        say(f"{folder} contains no checkpoint; starting a new run")
    if named not in (None, "last") and not Path(named).is_dir():
        raise FileNotFoundError(f"checkpoint {named} does not exist; --resume_from_checkpoint last uses the newest")
    return last if named == "last" else named


def evaluate_test_split(
    trainer: SupCLAPTrainer, rows: Any, templates: list[str], classes: Sequence[str] | None = None
) -> dict[str, evaluation.Results]:
    """Evaluate retrieval in each language, and zero-shot classification if there are prompt templates.

    `classes` are the candidates for the whole split. None, and for each of several datasets: the labels of its rows.

    Returns `{name: results}`. The key "" contains the results of the whole split. If the split contains several
    datasets, each dataset has its own key.
    """
    from modeling_supclap import evaluation

    args = trainer.args
    model = evaluation.load_embedding_model(trainer.clap, trainer.processor, name=Path(args.output_dir or ".").name)
    seconds = trainer.evaluation_collator.max_audio_seconds
    policy = evaluation.AudioPolicy(seconds, pad_short_clips=args.pad_short_clips)
    whole = evaluation.split_from_predictions(trainer.predict(rows), rows, args.eval_languages, model, policy)

    results = {}
    for name, split in {"": whole, **whole.by_dataset()}.items():
        languages = split.languages(args.eval_languages) if name else args.eval_languages
        # If every clip has the same number of captions in each language, compare languages on the same captions.
        parallel = all(_has_equal_counts(row["captions"], languages) for row in split.rows)
        options = evaluation.EvaluationOptions(
            tasks=["retrieval", "zero_shot"] if templates else ["retrieval"],
            languages=languages,
            positives=args.positives,
            caption_handling="all" if parallel else "each",
            template_sets={"run": templates},
            classes=None if name else classes,
            intervals=evaluation.Intervals(seed=args.seed),
        )
        results[name] = evaluation.score_split(split, options)
    return results


def _has_equal_counts(captions: Mapping[str, Sequence[str]], languages: Iterable[str]) -> bool:
    """Return whether a clip has the same number of captions in each language."""
    return len({len(captions.get(language) or ()) for language in languages}) == 1


def make_processor(rows: Any, model_args: ModelArguments, args: SupCLAPTrainingArguments) -> SupCLAPProcessor:
    """Build or load the processor. For encoders from scratch, the tokenizer is trained on the captions of `rows`."""
    from modeling_supclap import SupCLAPProcessor
    from modeling_supclap.conversion import load_processor

    if model_args.model is not None:
        return load_processor(model_args.model)
    if args.resume_from_checkpoint is None:
        return build_processor(model_args, rows, args.languages)
    # Keep the tokenizer: training it on other recordings would change it.
    return SupCLAPProcessor.from_pretrained(args.resume_from_checkpoint)


def make_model(
    model_args: ModelArguments, part_args: TrainedPartArguments, processor: SupCLAPProcessor
) -> SupCLAPModel:
    """Build or load the model, and select the parameters to train."""
    from modeling_supclap.recipes.models import load_start

    if model_args.model is None:
        model = build_model(model_args, processor)
    else:
        model, _ = load_start(model_args.model, model_args.temperature, model_args.logit_bias)
    part_args.choose_parameters(model)
    return model


def main() -> None:
    """Parse the command line, lock the output folder, and train."""
    data_args, model_args, part_args, args = parse_arguments(OPTIONS, default_config=DEFAULT_CONFIG, about=__doc__)
    with only_run(args):
        train_and_save(data_args, model_args, part_args, args)


def train_and_save(
    data_args: DataArguments,
    model_args: ModelArguments,
    part_args: TrainedPartArguments,
    args: SupCLAPTrainingArguments,
) -> None:
    """Load the data, build and train the model, evaluate the test split, and save."""
    from transformers import set_seed

    from modeling_supclap.recipes.models import report_temperature, require_models
    from modeling_supclap.training.trainer import SupCLAPTrainer

    if part_args.save_adapter and args.sharding is not None:
        raise ValueError(
            f"save_adapter does not support {args.sharding}, because each process has only a part of the weights; "
            "leave it out: the whole model is saved"
        )
    require_models(model_args)
    clock = Clock()
    args.resume_from_checkpoint = find_checkpoint(args)
    args.training_data = data_args.identity_in_training
    args.selection_split = data_args.selection_split
    set_seed(args.seed)

    if selects_on_test(data_args, args):
        say(SELECTED_ON_TEST)
    data = load_data(data_args, args, partial(make_processor, model_args=model_args, args=args))
    model = make_model(model_args, part_args, data.processor)
    temperature = report_temperature(model)
    trainer = SupCLAPTrainer(model, args, data.train, data.selection, data.processor)
    if model_args.has_new_audio_encoder and hasattr(model.audio_model, "fit_normalisation"):
        fit_normalisation(model.audio_model, data.processor, data.train.rows, args)
    sizes = f"{model.audio_model.num_parameters():,} audio and {model.text_model.num_parameters():,} text"
    say(f"{data_args.dataset}: {data.count_clips()}\nmodel: {sizes} parameters")

    train(trainer, args.resume_from_checkpoint)
    save_trained(trainer, part_args)
    results = score_run(trainer, data, data_args)
    if trainer.is_world_process_zero():
        arguments = {
            **vars(data_args),
            "datasets": list(data_args.parts),  # their options are in the protocol
            **arguments_in_use(model_args),
            **vars(part_args),
            **temperature,
            **args.to_dict(),
            **trainer.used_arguments,
        }
        results[""].content["data"] = dict(data.record)
        results[""].content["left_out"] = data.left_out
        results[""].content["training"] = describe_training(trainer, arguments, clock)
        write_run(trainer, results, data, model_args, clock)


def selects_on_test(data_args: DataArguments, args: SupCLAPTrainingArguments) -> bool:
    """Return whether the test split selects the checkpoint that is scored on it."""
    return data_args.selection_split == "test" and args.load_best_model_at_end


def save_trained(trainer: SupCLAPTrainer, part_args: TrainedPartArguments) -> None:
    """Save the trained model, with merged adapters, and the log. A sharded model is replaced by the saved one."""
    from modeling_supclap import SupCLAPModel

    args = trainer.args
    if not trainer.is_fsdp_enabled:
        part_args.finished(trainer.clap, args.output_dir)
    trainer.save_model()  # of a sharded model, after merging the adapters into the gathered weights
    if trainer.is_fsdp_enabled:  # sharded weights compute only within the trainer's forward pass
        trainer.accelerator.wait_for_everyone()
        saved: Any = SupCLAPModel.from_pretrained(args.output_dir or ".")
        trainer.clap = saved.to(args.device)
    trainer.save_state()  # the log, for figures of several runs


def score_run(trainer: SupCLAPTrainer, data: TrainingData, data_args: DataArguments) -> dict[str, evaluation.Results]:
    """Evaluate the test split as in `evaluate_test_split`, and describe its data. Without it, there are no scores."""
    from modeling_supclap import evaluation

    args = trainer.args
    if data.test is None:
        model = evaluation.load_embedding_model(trainer.clap, trainer.processor)
        all_results = {"": evaluation.make_results(model, {}, {}, {"languages": args.eval_languages})}
    else:
        all_results = evaluate_test_split(trainer, data.test.rows, data_args.zero_shot_templates, data.classes)

    parts = {"": data_args, **data_args.parts}
    for name, results in all_results.items():
        options = {key: value for key, value in parts[name].builder_options.items() if key != "data_dir"}
        described = {"dataset": parts[name].dataset, "origin": data.origins[name], "dataset_config": options}
        results.protocol.update(described, split="test")
        if selects_on_test(data_args, args):
            results.protocol["selected_on"] = "test"
    all_results[""].protocol["missing_clips"] = data.left_out.get("test", [])
    return all_results


def describe_training(trainer: SupCLAPTrainer, arguments: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Describe a finished training for `results.json`: its best score, its costs, last logs and arguments."""
    import torch

    from modeling_supclap.training.callbacks import LANGUAGE_ERRORS

    logs, state = logged_values(trainer), trainer.state
    last = {name: values[-1] for name, values in logs.items() if isinstance(values[-1], (int, float))}
    return {
        "best_validation": {trainer.args.metric_for_best_model: state.best_metric},
        "best_step": state.best_global_step,
        "steps": state.global_step,
        "processes": trainer.args.world_size,
        "seconds": clock.seconds,
        # less affected by other programs than "seconds", and includes the time before a resumed run was stopped
        "process_seconds": trainer.throughput.earlier_seconds + clock.process_seconds,
        "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        "last_logs": last,
        "language_errors": {name: sum(logs[name]) / len(logs[name]) for name in LANGUAGE_ERRORS if name in logs},
        "arguments": dict(arguments),
    }


def logged_values(trainer: SupCLAPTrainer) -> dict[str, list[Any]]:
    """Return all values that a trainer has logged, `{name: values}`."""
    logs: dict[str, list[Any]] = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            logs.setdefault(name, []).append(value)
    return logs


def write_run(
    trainer: SupCLAPTrainer,
    all_results: Mapping[str, evaluation.Results],
    data: TrainingData,
    model_args: ModelArguments,
    clock: Clock,
) -> None:
    """Write results, reports, curves, trained sources and the model card to the output folder, and print the scores."""
    from modeling_supclap.datasets_scripts.overlap.trained_sources import save_trained_sources
    from modeling_supclap.datasets_scripts.stream import RowStream
    from modeling_supclap.evaluation.report import write_report
    from modeling_supclap.training.checkpoints import put_away
    from modeling_supclap.training.plots import plot_drift, plot_training_curves

    output, history = Path(trainer.args.output_dir or "."), trainer.state.log_history
    # The sources of a stream are not recorded, because it would be read a second time.
    sources = [] if isinstance(data.train.rows, RowStream) else data.train.rows
    starts = [model_args.model] if model_args.model else [model_args.audio_encoder, model_args.text_encoder]
    save_trained_sources(sources, output, *starts)

    for name in sorted(all_results, key=lambda name: name == ""):  # the whole split is the last
        results, title = all_results[name], f"test split of {name}" if name else "test split"
        results.save(output / name)
        if data.test is not None:
            write_report(results, output / name / "report.html", data.test.rows)
            print(f"\n{title}, {results.protocol['clips']} clips, shares in percent:\n{results.table()}")
    if "selected_on" in all_results[""].protocol:
        print(SELECTED_ON_TEST)
    if data.test is None:
        print(f"{all_results[''].protocol['dataset']} has no test split: results.json contains no test scores")

    files, logs = "model and results.json", logged_values(trainer)
    if "drift_cosine" in logs:
        plot_drift(history, output / "drift.png")
    if not logs.keys().isdisjoint(("loss", "eval_mean_recall")):  # a run may end before its first log
        plot_training_curves(history, output / "training_curves.png", trainer.args.eval_languages[0])
        files = "model, results.json and training_curves.png"
    write_final_card(trainer, model_args.model)
    print(f"{files} are in {output} ({clock.seconds:.0f} s in total)")
    if kept := put_away(output, trainer.args.save_total_limit, trainer.state.best_model_checkpoint):
        print(kept)


if __name__ == "__main__":
    run_command(main)
