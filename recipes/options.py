"""Options of the commands, with the texts of `--help`. They extend those of the package.

Heavy imports are inside functions, so that `--help` is fast.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from modeling_supclap.datasets_scripts import add_translations, load_builder, load_splits
from modeling_supclap.datasets_scripts.builders.options import option_texts
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.evaluation.options import AudioPolicy, TaskOptions, ZSTEOptions
from modeling_supclap.evaluation.results import Intervals
from modeling_supclap.languages import LANGUAGES, require_language_code
from modeling_supclap.training.options import Rules, refuse

SCALES = ("mini", "full")
SELECTION_SPLITS = ("validation", "test")
MISSING_SHARE = 0.2
Settings = dict[str, Any] | str | None  # a mapping in a YAML file, or JSON on the command line


def option(text: str, default: Any = None) -> Any:
    """Create a dataclass field with its help text. Each instance gets its own copy of a default list."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def same_as(group: Any, name: str) -> Any:
    """Create a dataclass field with the default and the help text of a field of another dataclass."""
    return option(option_texts(group)[name], getattr(group, name))


class CheckedArguments:
    """Options with a table of what they refuse."""

    def __post_init__(self) -> None:
        refuse(self._rules())

    def _rules(self) -> Rules:
        yield from ()


@dataclass
class DatasetArguments(CheckedArguments):
    """Dataset to read. Options of its builder are also accepted."""

    dataset: str = option("Name of a builder of datasets_scripts, or prepared.", "synthetic")
    data_dir: str | None = option("Folder, fsspec address or Hub id of the data, for builders that need one.")
    dataset_config: Settings = option("Builder options in a YAML file; on the command line, set them by name.")

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder, including `data_dir`."""
        options = dict(as_mapping(self.dataset_config))
        if self.data_dir is not None:
            options["data_dir"] = self.data_dir
        return options

    @property
    def origin(self) -> str:
        """Name of the original dataset. For a prepared set, this is the dataset that it was prepared from."""
        options = self.builder_options
        if self.dataset == "hf" and "data_dir" in options:
            from modeling_supclap.datasets_scripts.builders.hf import get_origin

            return get_origin(options["data_dir"])

        if self.dataset == "prepared":
            from modeling_supclap.datasets_scripts.prepared import PreparedSet

            return PreparedSet(options.get("data_dir"), revision=options.get("revision")).manifest["dataset"]
        return self.dataset

    @property
    def identity(self) -> dict[str, Any]:
        """Name and options of the data, without folder names. A resumed run must have the same values."""
        from modeling_supclap.datasets_scripts.public_names import redact

        options = dict(self.builder_options)
        options.pop("data_dir", None)
        return redact({"dataset": self.origin, **options}, from_anywhere=True)

    def load_splits(self) -> dict[str, Any]:
        return load_splits(self.dataset, **self.builder_options)


@dataclass
class DataArguments(DatasetArguments):
    """Training data."""

    datasets: list[str] = option(
        "Several datasets. Each is a mapping (JSON on the command line) with `dataset` and its options. Optional keys: "
        "`name` (default: the dataset), `repeats` or `weight`, and `streaming`. The default data_dir is the folder "
        "`name` in --data_dir.",
        [],
    )
    dataset_temperature: float | None = option("Temperature T of the dataset weights size^(1/T).")
    balance_labels: bool = option(
        "Draw each label equally often, if each clip has one label; a clip with several counts for each of them.",
        False,
    )
    negatives: str | None = option("Table of hard negatives of the training clips, from `supclap mine`.")
    streaming: bool = option("Stream the training split; only for prepared, hf and webdataset.", False)
    zero_shot_templates: list[str] = option(
        "Class prompts for zero-shot classification of the test split, such as 'a recording of {}', or names of sets: "
        "supclap, teminal, teminal_classes, label, ensemble. Default: none.",
        [],
    )
    selection_split: str = option(
        "Split that selects the best checkpoint: validation, or test, as in the papers. Scores on a split that has "
        "selected the checkpoint are too high.",
        "validation",
    )
    allow_missing: bool = option("Train even if more than a fifth of the recordings are missing.", False)
    share: dict[str, Any] = field(init=False, default_factory=dict)  # see `expected_counts`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.datasets:
            self.dataset = "+".join(self.parts)
            self.dataset_config = None  # from a base file

    def _rules(self) -> Rules:
        split = self.selection_split
        yield split not in SELECTION_SPLITS, f"selection_split is {split!r}; expected one of {SELECTION_SPLITS}"
        for name, value in (("balance_labels", self.balance_labels), ("negatives", self.negatives)):
            yield self.streaming and value, f"streaming does not support {name}; leave out one of them"
        is_single = self.dataset_temperature is not None and not self.datasets
        yield is_single, "dataset_temperature requires several datasets; list them in datasets"

    @property
    def parts(self) -> dict[str, DataArguments]:
        """Arguments of each entry in `datasets`, by name."""
        parts: dict[str, DataArguments] = {}
        for entry in map(as_mapping, self.datasets):
            options = dict(entry)
            dataset = options.pop("dataset", None)
            name = str(options.pop("name", dataset))
            if dataset is None or not re.fullmatch(r"[\w.-]+", name) or name in parts:
                raise ValueError(f"got {entry} in datasets; expected `dataset`, and a unique `name`")
            data_dir = options.pop("data_dir", self.data_dir and os.path.join(self.data_dir, name))
            share: dict[str, Any] = {"balance_labels": self.balance_labels}
            for key in ("repeats", "weight", "balance_labels"):
                if key in options:
                    share[key] = options.pop(key)
            streaming = options.pop("streaming", self.streaming)
            arguments = {"allow_missing": self.allow_missing, "streaming": streaming}
            parts[name] = DataArguments(dataset, data_dir, options, **arguments)
            parts[name].share = share
        return parts

    @property
    def identity_in_training(self) -> dict[str, Any]:
        """Name and options of the data, as in `identity`, and how often an epoch contains its rows."""
        shares = {"dataset_temperature": self.dataset_temperature, "balance_labels": self.balance_labels}
        negatives = {} if self.negatives is None else {"negatives": os.path.basename(self.negatives)}
        return {**self.identity, **shares, **negatives}

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder. If `datasets` is set: `{dataset name: options}`, without `data_dir`."""
        options = {}
        for name, part in self.parts.items():
            options[name] = {**as_mapping(part.dataset_config), **part.share}
        return options or super().builder_options

    @property
    def origin(self) -> str:
        """Names of the original datasets, joined by `+`."""
        return "+".join(part.origin for part in self.parts.values()) if self.parts else super().origin

    def load_splits(self) -> dict[str, Any]:
        """Load all splits of the dataset, or of a mixture of datasets. Add the negatives to the training split.

        If `streaming` is set, the training split is a stream. FileNotFoundError is raised
        if more than `MISSING_SHARE` of the recordings are missing.
        """
        splits = self._load_all_splits()
        if self.negatives is not None and "train" in splits:
            from modeling_supclap.datasets_scripts.negatives import add_negatives

            splits["train"] = add_negatives(splits["train"], self.negatives)
        return splits

    def _load_all_splits(self) -> dict[str, Any]:
        if self.parts:
            from modeling_supclap.datasets_scripts.mixture import mix

            sets, shares = {}, {}
            for name, part in self.parts.items():
                sets[name], shares[name] = part.load_splits(), part.share
            return mix(sets, shares, self.dataset_temperature)

        options = self.builder_options
        if self.streaming:
            splits = load_splits(self.dataset, streaming=True, **options)
            for name, rows in splits.items():
                if name != "train":
                    splits[name] = rows.to_dataset()
            return splits

        translations = options.pop("translations", None)
        builder = load_builder(self.dataset, **options)
        splits = add_translations(builder.as_dataset(), translations)
        missing, count = builder.report()["missing"], sum(map(len, splits.values()))
        is_partial = len(missing) > MISSING_SHARE * (count + len(missing))
        if is_partial and not self.allow_missing and "limit" not in options:
            problem = f"{len(missing):,} of {count + len(missing):,} recordings are missing, such as {missing[0]}"
            raise FileNotFoundError(f"{problem}; complete the folder, or set --allow_missing true to train without")
        if self.balance_labels and "train" in splits:
            from modeling_supclap.datasets_scripts.mixture import expected_counts, with_counts

            balanced = {"balance_labels": True}
            counts = expected_counts({"": splits["train"]}, {"": balanced})
            splits["train"] = with_counts(splits["train"], counts[""], balanced)
        return splits


@dataclass
class ModelArguments(CheckedArguments):
    """Model to train: a saved model, or two encoders, each a Hub id, a folder, or `scratch`."""

    model: str | None = option("SupCLAP or CLAP model to continue from (id or folder).")
    audio_encoder: str = option("Audio encoder, for example mispeech/ced-base or openai/whisper-tiny.", "scratch")
    text_encoder: str = option("Text encoder, for example sentence-transformers/LaBSE.", "scratch")
    audio_config: Settings = option("Fields of CEDConfig, for an encoder from scratch or in random_weights.")
    text_config: Settings = option("Fields of BertConfig, for an encoder from scratch or in random_weights.")
    vocab_size: int = option("Vocabulary size of a text encoder from scratch.", 4000)
    projection_dim: int = option("Width of the shared space.", 1024)
    temperature: float | None = option(
        "Initial temperature of the softmax. Default: that of --model, or 0.07 for two encoders."
    )
    logit_bias: float | None = option(
        "Initial bias of SigLIP's logits, usually -10. Default: that of --model, or none."
    )
    audio_pooling: str | None = option("Pooling of the audio encoder: mean or pooler. Default: pooler, if it has one.")
    audio_seconds: int | None = option("Seconds of sound that Whisper's encoder takes, at most 30. Default: 30.")
    text_pooling: str | None = option(
        "Pooling of the text encoder: mean, cls, last or pooler. Default: that of its checkpoint, or mean."
    )
    random_weights: list[str] = option("Encoders to initialise with random weights: audio, text, or both.", [])

    def _rules(self) -> Rules:
        yield from temperature_rules(self.temperature)
        is_other = not set(self.random_weights) <= {"audio", "text"}
        yield is_other, f"random_weights is {self.random_weights}; expected audio, text, or both"
        # a byte-level vocabulary has 256 bytes and 5 tokens
        for name, low in (("vocab_size", 261), ("projection_dim", 1)):
            yield getattr(self, name) < low, f"{name} is {getattr(self, name)}; it must be at least {low}"
        scratch = [kind for kind in ("audio", "text") if getattr(self, f"{kind}_encoder") == "scratch"]
        kind = "".join(scratch)
        yield (
            self.model is None and len(scratch) == 1,
            f"got audio_encoder={self.audio_encoder}, text_encoder={self.text_encoder}; use scratch for both, or name "
            f"an encoder as {kind}_encoder, and set --random_weights {kind} to use only its shape",
        )

    @property
    def has_new_audio_encoder(self) -> bool:
        """Whether the audio encoder starts with random weights."""
        return self.model is None and (self.audio_encoder == "scratch" or "audio" in self.random_weights)


@dataclass
class TrainedPartArguments(CheckedArguments):
    """Trained part of the model: all, the last blocks, or adapters in these blocks. Projections are always trained."""

    train_last_layers: str | None = option("Train only this number of last blocks of each encoder, or all blocks.")
    audio_layers: str | None = option("Overrides train_last_layers for the audio encoder.")
    text_layers: str | None = option("Overrides train_last_layers for the text encoder.")
    lora_rank: int | None = option("Rank of LoRA adapters, to train instead of the weights of the last blocks.")
    lora_alpha: int | None = option("Scale of the adapters; their output is multiplied by alpha / rank. Default: 16.")
    save_adapter: bool = option("Also save the adapters alone, in the folder `adapter`, for peft.", False)
    train_temperature: bool = option("Train the temperature.", True)
    train_bias: bool | None = option("Train SigLIP's bias. Default: as train_temperature.")

    def _rules(self) -> Rules:
        for name in ("train_last_layers", "audio_layers", "text_layers"):
            value = getattr(self, name)
            is_number = value is None or value == "all" or str(value).isdecimal()
            yield not is_number, f"{name} is {value!r}; expected a number of blocks, or all"
        lacks_rank = self.lora_rank is None and (self.lora_alpha is not None or self.save_adapter)
        yield lacks_rank, "lora_alpha and save_adapter require lora_rank; set it"
        for name in ("lora_rank", "lora_alpha"):
            value = getattr(self, name)
            yield value is not None and value <= 0, f"{name} is {value}; it must be positive"


@dataclass
class PostTrainingArguments(DatasetArguments):
    """Model and data of the post-training."""

    model: str | None = option("SupCLAP or CLAP model (id or folder).")
    temperature: float | None = option("Initial temperature of the softmax. Default: that of the model.")
    dataset: str = option("Builder of datasets_scripts with labels, or prepared.", "esc50")
    pool_splits: bool = option("Use all splits of the dataset together, as in the paper.", False)
    train_fraction: float = option(
        "Fraction of each class's recordings to train on, from the training split or, with pool_splits, from all. With "
        "1, train on the whole training split, and hold out the validation and the test split.",
        0.7,
    )
    fixed_recordings: bool = option(
        "Train on one recording per class, the same in all epochs, as in the paper.", False
    )
    prompts: str | None = option(
        "Names of sounds in captions: labels or phrases. Default: labels for English alone, else phrases."
    )
    stages: list[str] = option("Stages to train, in order; b alone is TeminAL B.", ["a", "b"])
    use_after: bool = option("Replace half of the captions 'x before y' by 'y after x'.", True)
    random_order: bool = option(
        "Exchange the sounds in the captions of half of the training pairs (a control).", False
    )
    num_phrasings: int | None = option("Number of phrasings of each sentence; the paper uses 1. Default: all.")
    pairs_per_epoch: int | None = option("Number of class pairs per epoch; by default, all pairs once.")

    def _rules(self) -> Rules:
        yield from temperature_rules(self.temperature)
        is_valid = self.stages and len(set(self.stages)) == len(self.stages) and set(self.stages) <= {"a", "b"}
        yield not is_valid, f"stages is {self.stages}; expected a, b, or both, each once"
        fraction = self.train_fraction
        yield not 0 < fraction <= 1, f"train_fraction is {fraction}; it must be above 0, and at most 1"
        for name in ("num_phrasings", "pairs_per_epoch"):
            value = getattr(self, name)
            yield value is not None and value < 1, f"{name} is {value}; it must be at least 1"
        both = fraction == 1 and self.pool_splits
        yield both, "got train_fraction=1 with pool_splits, which holds out no recordings; set one of them"


@dataclass
class LastPartArguments(TrainedPartArguments):
    """Part of the model to train; by default, the last block of each encoder, as in the paper."""

    train_last_layers: str | None = option(
        "Train only this number of last blocks of each encoder, or all blocks.", "1"
    )


@dataclass
class EncoderArguments:
    """Embedding model and device."""

    device: str | None = option("Device such as cpu or cuda; by default, a GPU if available.")
    trust_remote_code: bool = option("Run code from the repository of a sentence-transformers model.", False)


@dataclass
class EvaluationArguments(EncoderArguments, Intervals, AudioPolicy, TaskOptions, DatasetArguments):
    """Models, data and results of an evaluation."""

    model: list[str] = option("Models: folders, Hub ids, or functions that load one (module:name).", [])
    suite: list[str] = option(
        "Names of several datasets, each in a folder of the same name in --data_dir; or a YAML file with a list of "
        "mappings with `dataset`, `data_dir`, options of this command and of the dataset, and a `name`. The mapping "
        "`mteb: TASK` is a task of mteb.",
        [],
    )
    mteb: str | None = option("Task of mteb to evaluate instead of a dataset, such as ESC50_Zeroshot.")
    split: str = option("Split to evaluate, or several splits joined by +.", "test")
    folds: list[int] = option("Folds to evaluate, each on its own test split.", [])
    train_split: str | None = option("Training split of probes; recordings that both splits share are counted.")
    allow_trained: bool = option("Evaluate even if the model has trained on some of the clips.", False)
    exclude_trained: bool = option("Leave out the clips that the model has trained on.", False)
    zero_shot_templates: list[str] = option(
        "Class prompts, such as 'I hear {}', or names of sets of prompts: supclap, teminal, teminal_classes, label, "
        "ensemble.",
        ["supclap"],
    )
    phrases: str | None = option("Dataset with the label phrases for prompts; by default, the evaluated dataset.")
    zste_tasks: list[str] = option("Tasks of ZSTE, 1A to 5B; by default, all.", [])
    zste_items: int = same_as(ZSTEOptions, "num_items")
    zste_candidates: int = same_as(ZSTEOptions, "num_candidates")
    zste_prompts: str | None = same_as(ZSTEOptions, "prompts")
    zste_match_overlay_loudness: bool = option(
        "Whether the overlaid sounds of ZSTE have equal loudness, as match_overlay_loudness in post-training.",
        RenderOptions.match_overlay_loudness,
    )
    output_dir: str = option("Folder of the results.", "outputs/evaluation")
    cache_dir: str | None = option("Folder of cached embeddings, or none; by default, in the Hugging Face cache.")

    def __post_init__(self) -> None:
        TaskOptions.__post_init__(self)
        AudioPolicy.__post_init__(self)
        for language in (*self.languages, *self.zero_shot_languages, *self.zste_languages):
            require_language_code(language)
        if self.folds and self.train_split is not None:
            given = f"folds={self.folds} and train_split={self.train_split!r}"
            raise ValueError(f"got {given}; each fold has its own training split, so set only one of them")


@dataclass
class ComparisonArguments:
    """Comparison of results."""

    positional: ClassVar[str] = "FOLDER FOLDER [FOLDER ...]"
    output_dir: str = option("Folder of the tables.", "outputs/comparison")
    allow_different: bool = option("Allow results of different protocols in one table.", False)


@dataclass
class SplitsArguments(DatasetArguments):
    """Optional dataset, and its splits."""

    dataset: str | None = option("Name of a builder of datasets_scripts, or prepared.")  # type: ignore[assignment]
    splits: list[str] = option("Splits to read; by default, all.", [])

    def load_splits(self) -> dict[str, Any]:
        splits = super().load_splits()
        unknown = sorted(set(self.splits) - set(splits))
        if unknown:
            raise ValueError(f"unknown splits {unknown}; expected some of {list(splits)}")
        return {name: splits[name] for name in self.splits or splits}


@dataclass
class CorpusArguments(EncoderArguments, SplitsArguments):
    """Options for the model, the recordings and the output folder."""

    model: str = option("Folder or Hub id of a model, or module:function.", "outputs/synthetic")
    folder: str | None = option(
        "Folder of recordings to embed, or its fsspec address (s3://...), instead of a dataset."
    )
    table: str | None = option(
        "Table (Parquet, CSV, JSON Lines, ...) of recordings or parts of them, instead of a dataset or folder."
    )
    path_column: str = option(
        "Column of the table with paths or fsspec addresses; if there is no path, another usual name.", "path"
    )
    id_column: str | None = option("Column of the table with unique ids; by default, the paths.")
    channel: int | None = option("Channel of each recording to embed, from 0; by default, the mean of all channels.")
    shard: str | None = option("Part of the corpus to embed, such as 17/100 (the first is 0/100), in a shared output.")
    finish: bool = option("Write the manifest after all shards are complete.", False)
    output: str = option("Folder to write or to continue.", "outputs/embeddings")
    chunk_seconds: float | None = option("Length of the chunks of long recordings, in seconds.", 10.0)
    width: int | None = option("Store only this number of first values of each embedding. Default: all.")
    pad_short_clips: bool = same_as(AudioPolicy, "pad_short_clips")
    batch_size: int = option("Number of recordings to read, and of chunks to embed, at once.", 32)
    clips_per_file: int | None = option(
        "Number of recordings in each Parquet file; by default four files a process, at most 10,000 recordings each."
    )
    dtype: Literal["float32", "float16", "int8", "binary"] = option("Type of the stored embeddings.", "float32")
    num_workers: int = option("Number of reading threads for each embedding process.", min(4, os.cpu_count() or 1))

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder, including `data_dir` and `channel`."""
        return super().builder_options | ({} if self.channel is None else {"channel": self.channel})


@dataclass
class MiningArguments(EncoderArguments, DatasetArguments):
    """Model and data of hard negatives, and which wrong captions to keep."""

    model: str = option("Folder or Hub id of a model, or module:function.", "outputs/synthetic")
    split: str = option("Split to find negatives for.", "train")
    output: str = option("Parquet file to write.", "negatives.parquet")
    languages: list[str] = option("ISO 639-3 codes of the captions.", ["eng"])
    near: str = option("Anchor of the similarity: audio (the recording) or text (the own captions).", "audio")
    count: int = option("Maximum number of negatives of a clip.", 8)
    first_rank: int = option("Rank of the first negative; 1 is the most similar wrong caption.", 1)
    margin: float = option(
        "Leave out captions with a similarity above that of the own caption minus this; -2 keeps all.", 0.0
    )
    batch_size: int = option("Number of recordings or captions to embed at once.", 32)

    def _rules(self) -> Rules:
        yield self.near not in ("audio", "text"), f"near is {self.near!r}; expected audio or text"
        for name in ("count", "first_rank", "batch_size"):
            yield getattr(self, name) < 1, f"{name} is {getattr(self, name)}; it must be at least 1"
        margin = self.margin
        yield not -2 <= margin <= 2, f"margin is {margin}; it must be at least -2 and at most 2"


@dataclass
class SweepArguments:
    """Options of training runs with several settings and seeds."""

    positional: ClassVar[str] = "[CONFIG.yaml] KEY=VALUE[,VALUE ...] [KEY=VALUE ...]"
    seeds: list[int] = option("Seeds of every combination. Default: the seed of the configuration, or 0.", [])
    dry_run: bool = option("Check all settings and data, without training.", False)
    data_dir: str | None = option("Folder of the data, or a folder with one folder per dataset.")
    output_dir: str = option("Folder of the runs and the table.", "outputs/sweep")
    scale: ClassVar[str] = ""
    skip_missing: ClassVar[bool] = False
    allow_missing: ClassVar[bool] = False
    on_bad_audio: ClassVar[str] = "error"
    check_audio: ClassVar[bool] = False


@dataclass
class ReproductionArguments(CheckedArguments):
    """Rows to reproduce, and their scale."""

    positional: ClassVar[str] = "TABLE [TABLE ...]"
    scale: str = option("Size of the runs: mini or full.", "mini")
    seeds: list[int] = option("Seeds of every row.", [0, 1, 2, 3, 4])
    rows: list[str] = option("Rows to reproduce, such as table1_infonce; by default, all.", [])
    datasets: list[str] = option("Datasets of the tables, such as audiocaps; by default, all.", [])
    dry_run: bool = option("Check all settings and data, without training.", False)
    data_dir: str | None = option("Folder of the data, or a folder with one folder per dataset.")
    output_dir: str = option("Folder of the runs and tables.", "outputs/reproduce")
    settings: Settings = option("Settings for every training, as JSON.")
    skip_missing: bool = option("Skip rows with missing data or encoders, instead of raising an error.", False)
    allow_missing: bool = option("Run even if more than a fifth of the published recordings are missing.", False)
    on_bad_audio: str = option(
        "Action of all runs for unusable recordings: error, or skip, as the table notes.", "error"
    )
    check_audio: bool = option("Decode all recordings in a dry run, not only 100 of each split.", False)

    def _rules(self) -> Rules:
        for name, values in (("scale", SCALES), ("on_bad_audio", ("error", "skip"))):
            value = getattr(self, name)
            yield value not in values, f"{name} is {value!r}; expected one of {', '.join(values)}"


@dataclass
class CaptionArguments(SplitsArguments):
    """Captions to translate."""

    output: str = option("Parquet file; existing translations in it are kept.", "translations.parquet")
    captions: str | None = option(
        "Table (.csv, .parquet, ...) of clip_id, caption_index and text, instead of a dataset."
    )
    source_language: str = option("ISO 639-3 code of the captions.", "eng")
    languages: list[str] = option("ISO 639-3 codes to translate into.", list(LANGUAGES[1:]))


@dataclass
class TranslatorArguments:
    """Translator: a seq2seq model of transformers, or a language model at an endpoint."""

    model: str = option(
        "Hub id or folder, with {source} and {target} replaced by ISO 639-1 codes; or the endpoint's model.",
        "facebook/nllb-200-distilled-600M",
    )
    batch_size: int = option("Number of captions in a batch or request.", 32)
    prompt: str | None = option("Prompt for models that need one, such as 'translate {source} to {target}: {text}'.")
    num_beams: int = option("Number of beams; 1 is greedy search.", 4)
    device: str | None = option("Device such as cpu or cuda; by default, a GPU if available.")
    dtype: str = option("Data type of the weights, such as bfloat16; auto keeps the stored type.", "auto")
    endpoint: str | None = option("Address of an OpenAI-compatible endpoint, such as https://api.deepseek.com/v1.")
    api_key_env: str | None = option("Name of the environment variable with the endpoint's key.")
    workers: int = option("Number of concurrent requests.", 4)
    retries: int = option("Number of retries of a request if the endpoint is busy.", 6)
    request_options: Settings = option('Further fields of a request, as JSON. By default, {"temperature": 0}.')
    fill_gaps: bool = option("Keep translations by other models in the output, and add the missing ones.", False)


@dataclass
class QualityArguments:
    """Check of the translations by back-translation."""

    back_model: str | None = option("Transformers model for the back-translation; by default, --model.")
    back_sample: int | None = option("Number of captions per language to translate back; 0: none. Default: all.")
    sentence_encoder: str = option(
        "Model of sentence-transformers to compare captions.", "sentence-transformers/all-roberta-large-v1"
    )
    threshold: float = option("Cosine below which a translation counts as bad.", 0.7)
    num_worst: int = option("Number of worst translations to list for each language.", 10)


def temperature_rules(value: float | None) -> Rules:
    """Yield the refusal of a temperature that is not positive, or too small or large to train."""
    is_valid = value is None or 1e-4 <= value <= 100
    yield not is_valid, f"temperature is {value}; it must be at least 0.0001 and at most 100 (in the papers, 0.07)"


def as_mapping(value: Settings) -> dict[str, Any]:
    """Parse a mapping from JSON on the command line. A mapping from a YAML file is returned unchanged."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value or {}
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a mapping such as '{{\"depth\": 4}}', got {value!r}")
    return parsed
