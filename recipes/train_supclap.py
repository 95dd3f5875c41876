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
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts.atomic_files import folder_lock
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.command import StoppedError, advise_skipping, is_first_process, run_command, say
from modeling_supclap.recipes.options import DataArguments, ModelArguments, TrainedPartArguments, as_mapping
from modeling_supclap.training.options import ContrastiveOptions, refuse

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, evaluation
    from modeling_supclap.training.rows import UsableRows
    from modeling_supclap.training.trainer import SupCLAPTrainer
    from modeling_supclap.training.training_args import SupCLAPTrainingArguments

TOKENIZER_ROWS = 20_000
"""Maximum number of evenly spaced rows on which a tokenizer is trained; more captions hardly change its vocabulary."""

SAMPLE_ROWS = 1000
"""Number of random rows of a streamed split to check before training. Their audio is not read."""

SELECTED_ON_TEST = "WARNING: the test split selects the checkpoint; its scores are higher than those on new data"

OPTIONS = (DataArguments, ModelArguments, TrainedPartArguments, ContrastiveOptions)
COMMON = {
    "Data": ("dataset", "data_dir", "caption_column", "languages", "on_bad_audio"),
    "Model": ("model", "audio_encoder", "text_encoder", "train_last_layers", "lora_rank", "temperature"),
    "Loss": ("loss", "svr", "positives"),
    "Run": (
        *("output_dir", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
        *("gradient_accumulation_steps", "bf16", "seed", "resume_from_checkpoint", "zero_shot_templates"),
    ),
}
"""Options of `--help`, in the order in which they are needed."""

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "synthetic.yaml"


def main() -> None:
    """Parse the command line, and train."""
    run(*parse_arguments(OPTIONS, default_config=DEFAULT_CONFIG, about=__doc__, common=COMMON))


@dataclass(frozen=True)
class TrainingData:
    """Usable rows of each split, and the processor of their recordings and captions.

    Attributes:
        splits: Usable rows of "train", and of "validation" and "test" if there are such splits.
        processor: Processor of the model that is trained.
        origins: Name of the original dataset, `{"": name}`, and of each dataset in a mixture.
        record: Number of rows and hash of each split as it was loaded (see `record_splits`).
        classes: Labels of all splits (see `schema.list_classes`). None: no labels, or no zero-shot classification.
    """

    splits: Mapping[str, UsableRows]
    processor: SupCLAPProcessor
    origins: Mapping[str, str]
    record: Mapping[str, Any]
    classes: Sequence[str] | None

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Ids of the clips with unusable recordings in each split that has some."""
        return {name: list(rows.left_out) for name, rows in self.splits.items() if rows.left_out}


def check(splits: Mapping[str, Any], data_args: DataArguments, *others: Any) -> Any:
    """Refuse splits that a run refuses before it reads a recording. Return the rows to train on."""
    args: SupCLAPTrainingArguments = others[-1]
    check_splits(splits, data_args, args)
    count, batch = len(splits["train"]), args.per_device_train_batch_size
    too_few = count < batch and not args.every_caption
    refuse([(too_few, f"{count} clips are fewer than a batch of {batch}; lower per_device_train_batch_size")])
    return splits["train"]


def refuse_options(
    data_args: DataArguments, _: ModelArguments, part_args: TrainedPartArguments, args: SupCLAPTrainingArguments
) -> None:
    """Raise ValueError for options that do not fit together."""
    from modeling_supclap.evaluation.options import find_templates
    from modeling_supclap.training.objectives import build_objective

    find_templates(data_args.zero_shot_templates)
    advice = "because each process has only a part of the weights; leave it out: the whole model is saved"
    is_sharded = part_args.save_adapter and args.sharding is not None
    refuse([(is_sharded, f"save_adapter does not support {args.sharding}, {advice}")])
    if ":" not in args.loss:
        build_objective(args)


def load_data(
    data_args: DataArguments, args: SupCLAPTrainingArguments, make_processor: Callable[[Any], SupCLAPProcessor]
) -> TrainingData:
    """Load the splits of a dataset or a mixture, check captions, labels and recordings, and apply `on_bad_audio`.

    Args:
        make_processor: Function that returns the processor. It gets the training rows, or a sample of a stream, because
            the tokenizer of a new text encoder is trained on their captions.

    Raises:
        BadAudioError: A validation or test recording is unusable, and `args.on_bad_audio` is "error".
        FileNotFoundError: Too many recordings are missing.
        ValueError: A required split, caption or label is missing.
    """
    from modeling_supclap.datasets_scripts.schema import list_classes
    from modeling_supclap.training.collator import min_seconds
    from modeling_supclap.training.rows import make_usable

    origins = {name: part.origin for name, part in {"": data_args, **data_args.parts}.items()}
    with args.main_process_first(desc="preparing the data"):
        splits = data_args.load_splits()
    processor = make_processor(check_splits(splits, data_args, args))
    require_usable_audio(splits, args, min_seconds(processor))
    names = filter(splits.__contains__, ("train", "validation", "test"))
    usable = {name: make_usable(splits[name], args, processor) for name in names}
    classes = list_classes(splits) if data_args.zero_shot_templates else None
    return TrainingData(usable, processor, origins, record_splits(splits), classes)


def record_splits(splits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of rows of each split, and a hash of their clip ids and captions.

    `results.json` contains them as "data", so that a finished run is not taken for one on other data. Only the first
    process computes them.
    """
    from modeling_supclap.training.rows import UsableRows

    return {name: UsableRows(rows).record for name, rows in splits.items()} if is_first_process() else {}


def check_splits(splits: Mapping[str, Any], data_args: DataArguments, args: SupCLAPTrainingArguments) -> Any:
    """Raise ValueError before training if required splits, captions or labels are missing.

    Return the training rows, or a random sample of a stream, without audio.
    """
    from modeling_supclap.datasets_scripts.mixture import warn_of_shared_recordings
    from modeling_supclap.datasets_scripts.schema import label_counts, require_captions, without_audio
    from modeling_supclap.datasets_scripts.stream import RowStream

    name, available, selection = data_args.dataset, ", ".join(splits), data_args.selection_split
    advice = (
        "hold clips out with --validation_fraction or --num_validation, or set --eval_strategy no "
        "--load_best_model_at_end false"
    )
    is_lacking = selection not in splits and args.eval_strategy != "no"
    refuse(
        [
            ("train" not in splits, f"{name} has no training split, only {available}; choose another dataset"),
            (is_lacking, f"{name} has no {selection} split, only {available}; {advice}"),
        ]
    )
    light = {split: without_audio(rows) for split, rows in splits.items()}
    if isinstance(splits["train"], RowStream):
        light["train"] = list(islice(light["train"].shuffle(args.seed), SAMPLE_ROWS))
        if data_args.parts:
            warn_of_shared_recordings(light)
    for split, rows in light.items():
        scheme = (args.languages, args.caption_scheme) if split == "train" else (args.eval_languages, "random")
        require_captions(rows, *scheme, split)

    if data_args.zero_shot_templates and "test" in splits:
        counts = label_counts(splits["test"])
        if not counts.all():
            clip_id = splits["test"]["clip_id"][int(counts.argmin())]
            problem = f"clip {clip_id!r} of {name}'s test split has no label"
            raise ValueError(f"{problem}, which zero_shot_templates requires; remove this option")
    return light["train"]


def require_usable_audio(splits: Mapping[str, Any], args: SupCLAPTrainingArguments, min_seconds: float = 0.0) -> None:
    """Read all validation and test recordings before training, and raise for the first unusable one.

    Recordings shorter than `min_seconds` are unusable unless `args.pad_short_clips` is set. If `args.on_bad_audio` is
    "skip" or "report", this function does nothing, because `filter_bad_audio` removes unusable recordings instead. In
    the folder `args.feature_cache`, a file lists the recordings that were read, so that further runs need not.
    """
    from modeling_supclap.datasets_scripts.audio import BadAudioError
    from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio

    if args.on_bad_audio != "error":
        return
    min_seconds = 0.0 if args.pad_short_clips else min_seconds
    memo = None if args.feature_cache is None else Path(args.feature_cache, "checked.json")
    for name in ("validation", "test"):
        bad = []
        with args.main_process_first(local=False, desc=f"reading the recordings of the {name} split"):
            if name in splits and is_first_process():
                bad = find_bad_audio(splits[name], max(1, args.dataloader_num_workers), min_seconds, memo)
        if bad:
            raise BadAudioError(
                f"{len(bad)} of the {len(splits[name])} {name} recordings cannot be used, first that of clip "
                f"{bad[0].clip_id!r}: {bad[0].reason}; use --on_bad_audio skip to leave such recordings out"
            )


def has_model(name: str) -> bool:
    """Return whether a model exists as a local folder, in the Hub cache, or on the Hub."""
    return Path(name).exists() or _is_published(name)


@cache
def _is_published(name: str) -> bool:
    """Return whether a model is in the Hub cache or on the Hub, which is asked once per name."""
    from modeling_supclap.conversion.kinds import config_folder

    try:
        return config_folder(name).is_dir()
    except (OSError, ValueError):
        return False


def require_models(args: ModelArguments) -> None:
    """Raise FileNotFoundError if a model or an encoder does not exist, and ValueError if it is of another kind."""
    from modeling_supclap.conversion.kinds import config_folder, find_kind

    if args.model is not None:
        find_kind(args.model)
        return
    for name in (args.audio_encoder, args.text_encoder):
        if name != "scratch":
            config_folder(name)


def load_start(
    name: str, temperature: float | None = None, logit_bias: float | None = None
) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """Load a SupCLAP model and its processor from a Hub id or folder. Other formats are converted.

    These are the `ClapModel` of transformers and CLAP2 in OpenCLIP's format. The `temperature`, and the `logit_bias` of
    SigLIP, replace those of the model. None: keep them.
    """
    from modeling_supclap.conversion import load_model, load_processor
    from modeling_supclap.conversion.layouts import FUSION_REMARK

    model = load_model(name)
    if getattr(model.config.audio_config, "enable_fusion", False):
        say(f"{name}: {FUSION_REMARK}")
    model.set_temperature(temperature, logit_bias)
    return model, load_processor(name)


def report_temperature(model: SupCLAPModel) -> dict[str, Any]:
    """Print the temperature with which a run starts, and whether it is trained. Return both, for `results.json`."""
    temperature = round(math.exp(-model.logit_scale.item()), 6)
    settings: dict[str, Any] = {"temperature": temperature, "train_temperature": model.logit_scale.requires_grad}
    line = f"temperature: {temperature:g}, {_is_trained(model.logit_scale)}"
    if model.logit_bias is not None:
        bias = round(model.logit_bias.item(), 6)
        settings |= {"logit_bias": bias, "train_bias": model.logit_bias.requires_grad}
        line += f"; bias of the logits: {bias:g}, {_is_trained(model.logit_bias)}"
    say(line)
    return settings


def _is_trained(parameter: nn.Parameter) -> str:
    return "trained" if parameter.requires_grad else "fixed"


def build_processor(args: ModelArguments, rows: Any, languages: list[str]) -> SupCLAPProcessor:
    """Load the processor for pretrained encoders. For encoders from scratch, train a tokenizer on the captions."""
    from transformers import RobertaTokenizer

    from modeling_supclap import CEDFeatureExtractor, SupCLAPProcessor
    from modeling_supclap.datasets_scripts.schema import all_captions, without_audio

    if args.audio_encoder != "scratch":
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

    names = ("projection_dim", "temperature", "logit_bias", "audio_pooling", "text_pooling")
    shared: Any = {name: value for name in names if (value := getattr(args, name)) is not None}
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
        setattr(model, f"{name}_model", SupCLAPModel(model.config).get_submodule(f"{name}_model"))
    return model


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
    if model_args.model is None:
        model = build_model(model_args, processor)
    else:
        model, _ = load_start(model_args.model, model_args.temperature, model_args.logit_bias)
    choose_parameters(part_args, model)
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


def choose_parameters(args: TrainedPartArguments, model: SupCLAPModel) -> None:
    """Freeze the parameters that are not selected, and add the adapters."""
    from modeling_supclap.training.lora import add_lora, block_names, train_last_layers, trainable_table

    layers = {}
    for kind in ("audio", "text"):
        given = getattr(args, f"{kind}_layers"), args.train_last_layers, 1
        number = next(value for value in given if value is not None)
        blocks = block_names(model.get_submodule(f"{kind}_model")) if number == "all" else range(int(number))
        layers[f"{kind}_layers"] = len(blocks)
    if args.lora_rank is not None:
        add_lora(model, rank=args.lora_rank, alpha=16 if args.lora_alpha is None else args.lora_alpha, **layers)
    elif (args.train_last_layers, args.audio_layers, args.text_layers) != (None, None, None):
        train_last_layers(model, **layers)

    train_bias = args.train_temperature if args.train_bias is None else args.train_bias
    for parameter, trains in ((model.logit_scale, args.train_temperature), (model.logit_bias, train_bias)):
        if parameter is not None and not trains:
            parameter.requires_grad_(False)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        say(trainable_table(model))


def merge_adapters(args: TrainedPartArguments, model: SupCLAPModel, folder: str | Path | None) -> SupCLAPModel:
    """Return the model to save in `folder`, with merged adapters. Also save the adapters alone if requested."""
    if args.lora_rank is None:
        return model
    from modeling_supclap.training.lora import merge_lora, save_adapter

    if args.save_adapter and is_first_process():
        save_adapter(model, Path(folder or ".") / "adapter")
    return merge_lora(model)


def run(*options: Any) -> None:
    """Lock the output folder, and train. The options are those of `train_and_save`."""
    with only_run(options[-1]):
        train_and_save(*options)


def train_and_save(
    data_args: DataArguments,
    model_args: ModelArguments,
    part_args: TrainedPartArguments,
    args: SupCLAPTrainingArguments,
) -> None:
    """Load the data, build and train the model, evaluate the test split, and save."""
    from transformers import set_seed

    from modeling_supclap.training.trainer import SupCLAPTrainer

    refuse_options(data_args, model_args, part_args, args)
    require_models(model_args)
    started = time.perf_counter()
    args.resume_from_checkpoint = find_checkpoint(args)
    args.training_data = data_args.identity_in_training
    args.selection_split = data_args.selection_split
    set_seed(args.seed)

    if selects_on_test(data_args, args):
        say(SELECTED_ON_TEST)
    data = load_data(data_args, args, partial(make_processor, model_args=model_args, args=args))
    model = make_model(model_args, part_args, data.processor)
    temperature = report_temperature(model)
    train_rows, selection = data.splits["train"], data.splits.get(data_args.selection_split)
    trainer = SupCLAPTrainer(model, args, train_rows, selection, data.processor)
    if model_args.has_new_audio_encoder and hasattr(model.audio_model, "fit_normalisation"):
        fit_normalisation(model.audio_model, data.processor, train_rows.rows, args)
    sizes = f"{model.audio_model.num_parameters():,} audio and {model.text_model.num_parameters():,} text"
    clips = ", ".join(f"{len(rows)} {name}" for name, rows in data.splits.items())
    say(f"{data_args.dataset}: {clips} clips\nmodel: {sizes} parameters")

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
        results[""].content["training"] = describe_training(trainer, arguments, started)
        write_run(trainer, results, data, model_args, started)


def only_run(args: SupCLAPTrainingArguments) -> AbstractContextManager[None]:
    """Return a context manager that locks the output folder, so that no other run writes to it."""
    return folder_lock(args.output_dir or ".") if is_first_process() else nullcontext()


def train(trainer: Trainer, checkpoint: str | None = None) -> None:
    """Train a model, optionally from a checkpoint. If training stops, the error message explains how to continue.

    With `enable_jit_checkpoint`, StoppedError is raised if SIGTERM stopped the run before its last step.
    """
    from modeling_supclap.training.checkpoints import last_checkpoint

    advice = "continue with the same command and --resume_from_checkpoint last"
    try:
        with advise_skipping():
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would suppress the advice
        if last_checkpoint(trainer.args.output_dir or ".", resumes=True) is None:
            advice = "no checkpoint was saved yet; run the same command to start again"
        raise KeyboardInterrupt(advice) from None
    finally:
        for callback in trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.close()  # so that the error message is the last line

    if trainer.args.enable_jit_checkpoint and trainer.state.global_step < trainer.state.max_steps:
        raise StoppedError(advice)


def finish_run(trainer: Trainer, all_results: Mapping[str, evaluation.Results], start: str | None) -> None:
    """Write the model card of a run that started from the model `start`, and its results, `{subfolder: results}`.

    `results.json` of the output folder is written last, because it marks the run as finished. With `push_to_hub`,
    upload the output folder again, because the Trainer uploads it before it contains the results.
    """
    from modeling_supclap.datasets_scripts.public_names import redact
    from modeling_supclap.model_card import write_card_of_run

    args, names = trainer.args, sorted(all_results)  # the whole split, "", is the first
    contents = [redact(all_results[name].content) for name in names]  # as in results.json
    write_card_of_run(trainer, results=contents, base_model=start)
    for name in reversed(names):
        all_results[name].save(Path(args.output_dir or ".", name))
    if args.push_to_hub:
        from huggingface_hub import upload_folder

        upload_folder(
            repo_id=str(trainer.hub_model_id),
            folder_path=str(args.output_dir),
            commit_message="Results and model card",
            token=args.hub_token,
            revision=args.hub_revision,
            ignore_patterns=["_*", "*checkpoint-*"],
        )


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
    from modeling_supclap.evaluation.options import find_templates

    args = trainer.args
    model = evaluation.load_embedding_model(trainer.clap, trainer.processor, name=Path(args.output_dir or ".").name)
    seconds = trainer.evaluation_collator.max_audio_seconds
    policy = evaluation.AudioPolicy(seconds, pad_short_clips=args.pad_short_clips)
    whole = evaluation.split_from_predictions(trainer.predict(rows), rows, args.eval_languages, model, policy)

    results = {}
    for name, split in {"": whole, **whole.by_dataset()}.items():
        languages = split.languages(args.eval_languages) if name else args.eval_languages
        # If every clip has the same number of captions in each language, compare languages on the same captions.
        counts = [{len(row["captions"].get(language) or ()) for language in languages} for row in split.rows]
        options = evaluation.EvaluationOptions(
            tasks=["retrieval", "zero_shot"] if templates else ["retrieval"],
            languages=languages,
            positives=args.positives,
            caption_handling="all" if max(map(len, counts)) == 1 else "each",
            template_sets=find_templates(templates, own="run"),
            classes=None if name else classes,
            intervals=evaluation.Intervals(seed=args.seed),
        )
        results[name] = evaluation.score_split(split, options)
    return results


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


def selects_on_test(data_args: DataArguments, args: SupCLAPTrainingArguments) -> bool:
    """Return whether the test split selects the checkpoint that is scored on it."""
    return data_args.selection_split == "test" and args.load_best_model_at_end


def save_trained(trainer: SupCLAPTrainer, part_args: TrainedPartArguments) -> None:
    """Save the trained model, with merged adapters, and the log. A sharded model is replaced by the saved one."""
    from modeling_supclap import SupCLAPModel

    args = trainer.args
    Path(args.output_dir or ".", "results.json").unlink(missing_ok=True)  # of earlier weights
    if not trainer.is_fsdp_enabled:
        merge_adapters(part_args, trainer.clap, args.output_dir)
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
    if "test" not in data.splits:
        model = evaluation.load_embedding_model(trainer.clap, trainer.processor)
        all_results = {"": evaluation.make_results(model, {}, {}, {"languages": args.eval_languages})}
    else:
        all_results = evaluate_test_split(
            trainer, data.splits["test"].rows, data_args.zero_shot_templates, data.classes
        )

    parts = {"": data_args, **data_args.parts}
    for name, results in all_results.items():
        options = {key: value for key, value in parts[name].builder_options.items() if key != "data_dir"}
        described = {"dataset": parts[name].dataset, "origin": data.origins[name], "dataset_config": options}
        results.protocol.update(described, split="test")
        if selects_on_test(data_args, args):
            results.protocol["selected_on"] = "test"
    all_results[""].protocol["missing_clips"] = data.left_out.get("test", [])
    return all_results


def describe_training(trainer: SupCLAPTrainer, arguments: Mapping[str, Any], started: float) -> dict[str, Any]:
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
        "seconds": time.perf_counter() - started,
        # less affected by other programs than "seconds", and includes the time before a resumed run was stopped
        "process_seconds": trainer.throughput.process_seconds,
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
    started: float,
) -> None:
    """Write results, reports, curves, trained sources and the model card to the output folder, and print the scores."""
    from modeling_supclap.datasets_scripts.overlap.trained_sources import save_trained_sources
    from modeling_supclap.datasets_scripts.stream import RowStream
    from modeling_supclap.evaluation.report import write_report
    from modeling_supclap.training.checkpoints import put_away
    from modeling_supclap.training.plots import plot_drift, plot_training_curves

    output, history = Path(trainer.args.output_dir or "."), trainer.state.log_history
    # The sources of a stream are not recorded, because it would be read a second time.
    rows, test = data.splits["train"].rows, data.splits.get("test")
    sources = [] if isinstance(rows, RowStream) else rows
    starts = [model_args.model] if model_args.model else [model_args.audio_encoder, model_args.text_encoder]
    save_trained_sources(sources, output, *starts)

    for name in sorted(all_results, key=lambda name: name == ""):  # the whole split is the last
        results, title = all_results[name], f"test split of {name}" if name else "test split"
        if test is not None:
            (output / name).mkdir(exist_ok=True)
            write_report(results, output / name / "report.html", test.rows)
            print(f"\n{title}, {results.protocol['clips']} clips, shares in percent:\n{results.table()}")
    if "selected_on" in all_results[""].protocol:
        print(SELECTED_ON_TEST)
    if test is None:
        print(f"{all_results[''].protocol['dataset']} has no test split: results.json contains no test scores")

    files, logs = "model and results.json", logged_values(trainer)
    if "drift_cosine" in logs and (trainer.args.svr != "none" or trainer.args.track_drift):
        plot_drift(history, output / "drift.png")
    if not logs.keys().isdisjoint(("loss", "eval_mean_recall")):  # a run may end before its first log
        plot_training_curves(history, output / "training_curves.png", trainer.args.eval_languages[0])
        files = "model, results.json and training_curves.png"
    finish_run(trainer, all_results, model_args.model)
    print(f"{files} are in {output} ({time.perf_counter() - started:.0f} s in total)")
    if kept := put_away(output, trainer.args.save_total_limit, trainer.state.best_model_checkpoint):
        print(kept)


if __name__ == "__main__":
    run_command(main)
