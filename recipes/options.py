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
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.evaluation.options import AudioPolicy, TaskOptions, ZSTEOptions
from modeling_supclap.evaluation.results import Intervals
from modeling_supclap.languages import LANGUAGES, require_language_code
from modeling_supclap.training.options import Rules, refuse

SCALES = ("mini", "full")
SELECTION_SPLITS = ("validation", "test")
MISSING_SHARE = 0.2
Settings = dict[str, Any] | str | None  # a mapping in a YAML file, or JSON on the command line


def list_of(*values: Any) -> Any:
    """Create a dataclass field with a list as its default, of which each instance gets its own copy."""
    return field(default_factory=lambda: list(values))


class CheckedArguments:
    """Options with a table of what they refuse."""

    def __post_init__(self) -> None:
        refuse(self._rules())

    def _rules(self) -> Rules:
        yield from ()


@dataclass
class DatasetArguments(CheckedArguments):
    """Dataset to read. Options of its builder are also accepted.

    Attributes:
        dataset: Name of a builder of datasets_scripts, or prepared.
        data_dir: Folder, fsspec address or Hub id of the data, for builders that need one.
        dataset_config: Builder options in a YAML file; on the command line, set them by name.
    """

    dataset: str = "synthetic"
    data_dir: str | None = None
    dataset_config: Settings = None

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
    """Training data.

    Attributes:
        datasets: Several datasets. Each is a mapping (JSON on the command line) with `dataset` and its options.
            Optional keys: `name` (default: the dataset), `repeats` or `weight`, and `streaming`. The default data_dir
            is the folder `name` in --data_dir.
        dataset_temperature: Temperature T of the dataset weights size^(1/T).
        balance_labels: Draw each label equally often, if each clip has one label; a clip with several counts for each
            of them.
        negatives: Table of hard negatives of the training clips, from `supclap mine`.
        streaming: Stream the training split; only for prepared, hf and webdataset.
        zero_shot_templates: Class prompts for zero-shot classification of the test split, such as 'a recording of {}',
            or names of sets: supclap, teminal, teminal_classes, label, ensemble. Default: none.
        selection_split: Split that selects the best checkpoint: validation, or test, as in the papers. Scores on a
            split that has selected the checkpoint are too high.
        allow_missing: Train even if more than a fifth of the recordings are missing.
    """

    datasets: list[str] = list_of()
    dataset_temperature: float | None = None
    balance_labels: bool = False
    negatives: str | None = None
    streaming: bool = False
    zero_shot_templates: list[str] = list_of()
    selection_split: str = "validation"
    allow_missing: bool = False
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
    """Model to train: a saved model, or two encoders, each a Hub id, a folder, or `scratch`.

    Attributes:
        model: SupCLAP or CLAP model to continue from (id or folder).
        audio_encoder: Audio encoder, for example mispeech/ced-base or openai/whisper-tiny.
        text_encoder: Text encoder, for example sentence-transformers/LaBSE.
        audio_config: Fields of CEDConfig, for an encoder from scratch or in random_weights.
        text_config: Fields of BertConfig, for an encoder from scratch or in random_weights.
        vocab_size: Vocabulary size of a text encoder from scratch.
        projection_dim: Width of the shared space.
        temperature: Initial temperature of the softmax. Default: that of --model, or 0.07 for two encoders.
        logit_bias: Initial bias of SigLIP's logits, usually -10. Default: that of --model, or none.
        audio_pooling: Pooling of the audio encoder: mean or pooler. Default: pooler, if it has one.
        audio_seconds: Seconds of sound that Whisper's encoder takes, at most 30. Default: 30.
        text_pooling: Pooling of the text encoder: mean, cls, last or pooler. Default: that of its checkpoint, or mean.
        random_weights: Encoders to initialise with random weights: audio, text, or both.
    """

    model: str | None = None
    audio_encoder: str = "scratch"
    text_encoder: str = "scratch"
    audio_config: Settings = None
    text_config: Settings = None
    vocab_size: int = 4000
    projection_dim: int = 1024
    temperature: float | None = None
    logit_bias: float | None = None
    audio_pooling: str | None = None
    audio_seconds: int | None = None
    text_pooling: str | None = None
    random_weights: list[str] = list_of()

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
    """Trained part of the model: all, the last blocks, or adapters in these blocks. Projections are always trained.

    Attributes:
        train_last_layers: Train only this number of last blocks of each encoder, or all blocks.
        audio_layers: Overrides train_last_layers for the audio encoder.
        text_layers: Overrides train_last_layers for the text encoder.
        lora_rank: Rank of LoRA adapters, to train instead of the weights of the last blocks.
        lora_alpha: Scale of the adapters; their output is multiplied by alpha / rank. Default: 16.
        save_adapter: Also save the adapters alone, in the folder `adapter`, for peft.
        train_temperature: Train the temperature.
        train_bias: Train SigLIP's bias. Default: as train_temperature.
    """

    train_last_layers: str | None = None
    audio_layers: str | None = None
    text_layers: str | None = None
    lora_rank: int | None = None
    lora_alpha: int | None = None
    save_adapter: bool = False
    train_temperature: bool = True
    train_bias: bool | None = None

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
    """Model and data of the post-training.

    Attributes:
        model: SupCLAP or CLAP model (id or folder).
        temperature: Initial temperature of the softmax. Default: that of the model.
        dataset: Builder of datasets_scripts with labels, or prepared.
        pool_splits: Use all splits of the dataset together, as in the paper.
        train_fraction: Fraction of each class's recordings to train on, from the training split or, with pool_splits,
            from all. With 1, train on the whole training split, and hold out the validation and the test split.
        fixed_recordings: Train on one recording per class, the same in all epochs, as in the paper.
        prompts: Names of sounds in captions: labels or phrases. Default: labels for English alone, else phrases.
        stages: Stages to train, in order; b alone is TeminAL B.
        use_after: Replace half of the captions 'x before y' by 'y after x'.
        random_order: Exchange the sounds in the captions of half of the training pairs (a control).
        num_phrasings: Number of phrasings of each sentence; the paper uses 1. Default: all.
        pairs_per_epoch: Number of class pairs per epoch; by default, all pairs once.
    """

    model: str | None = None
    temperature: float | None = None
    dataset: str = "esc50"
    pool_splits: bool = False
    train_fraction: float = 0.7
    fixed_recordings: bool = False
    prompts: str | None = None
    stages: list[str] = list_of("a", "b")
    use_after: bool = True
    random_order: bool = False
    num_phrasings: int | None = None
    pairs_per_epoch: int | None = None

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
    """Part of the model to train; by default, the last block of each encoder, as in the paper.

    Attributes:
        train_last_layers: Train only this number of last blocks of each encoder, or all blocks.
    """

    train_last_layers: str | None = "1"


@dataclass
class EncoderArguments:
    """Embedding model and device.

    Attributes:
        device: Device such as cpu or cuda; by default, a GPU if available.
        trust_remote_code: Run code from the repository of a sentence-transformers model.
    """

    device: str | None = None
    trust_remote_code: bool = False


@dataclass
class EvaluationArguments(EncoderArguments, Intervals, AudioPolicy, TaskOptions, DatasetArguments):
    """Models, data and results of an evaluation.

    Attributes:
        model: Models: folders, Hub ids, or functions that load one (module:name).
        suite: Names of several datasets, each in a folder of the same name in --data_dir; or a YAML file with a list of
            mappings with `dataset`, `data_dir`, options of this command and of the dataset, and a `name`. The mapping
            `mteb: TASK` is a task of mteb.
        mteb: Task of mteb to evaluate instead of a dataset, such as ESC50_Zeroshot.
        split: Split to evaluate, or several splits joined by +.
        folds: Folds to evaluate, each on its own test split.
        train_split: Training split of probes; recordings that both splits share are counted.
        allow_trained: Evaluate even if the model has trained on some of the clips.
        exclude_trained: Leave out the clips that the model has trained on.
        zero_shot_templates: Class prompts, such as 'I hear {}', or names of sets of prompts: supclap, teminal,
            teminal_classes, label, ensemble.
        phrases: Dataset with the label phrases for prompts; by default, the evaluated dataset.
        zste_tasks: Tasks of ZSTE, 1A to 5B; by default, all.
        zste_items: Number of ZSTE clips of each kind: single, consecutive and overlaid sounds. Single sounds are
            limited to the number of clips in the split.
        zste_candidates: Number of candidate prompts in ZSTE's tasks 4A, 4B and 5B.
        zste_prompts: Names of sounds in the prompts of ZSTE: labels or phrases. Default: as in the model's temporal
            post-training; without post-training, labels for English alone (as in the paper), else phrases.
        zste_match_overlay_loudness: Whether the overlaid sounds of ZSTE have equal loudness, as match_overlay_loudness
            in post-training.
        output_dir: Folder of the results.
        cache_dir: Folder of cached embeddings, or none; by default, in the Hugging Face cache.
    """

    model: list[str] = list_of()
    suite: list[str] = list_of()
    mteb: str | None = None
    split: str = "test"
    folds: list[int] = list_of()
    train_split: str | None = None
    allow_trained: bool = False
    exclude_trained: bool = False
    zero_shot_templates: list[str] = list_of("supclap")
    phrases: str | None = None
    zste_tasks: list[str] = list_of()
    zste_items: int = ZSTEOptions.num_items
    zste_candidates: int = ZSTEOptions.num_candidates
    zste_prompts: str | None = ZSTEOptions.prompts
    zste_match_overlay_loudness: bool = RenderOptions.match_overlay_loudness
    output_dir: str = "outputs/evaluation"
    cache_dir: str | None = None

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
    """Comparison of results.

    Attributes:
        output_dir: Folder of the tables.
        allow_different: Allow results of different protocols in one table.
    """

    positional: ClassVar[str] = "FOLDER FOLDER [FOLDER ...]"
    output_dir: str = "outputs/comparison"
    allow_different: bool = False


@dataclass
class SplitsArguments(DatasetArguments):
    """Optional dataset, and its splits.

    Attributes:
        dataset: Name of a builder of datasets_scripts, or prepared.
        splits: Splits to read; by default, all.
    """

    dataset: str | None = None  # type: ignore[assignment]
    splits: list[str] = list_of()

    def load_splits(self) -> dict[str, Any]:
        splits = super().load_splits()
        unknown = sorted(set(self.splits) - set(splits))
        if unknown:
            raise ValueError(f"unknown splits {unknown}; expected some of {list(splits)}")
        return {name: splits[name] for name in self.splits or splits}


@dataclass
class CorpusArguments(EncoderArguments, SplitsArguments):
    """Options for the model, the recordings and the output folder.

    Attributes:
        model: Folder or Hub id of a model, or module:function.
        folder: Folder of recordings to embed, or its fsspec address (s3://...), instead of a dataset.
        table: Table (Parquet, CSV, JSON Lines, ...) of recordings or parts of them, instead of a dataset or folder.
        path_column: Column of the table with paths or fsspec addresses; if there is no path, another usual name.
        id_column: Column of the table with unique ids; by default, the paths.
        channel: Channel of each recording to embed, from 0; by default, the mean of all channels.
        shard: Part of the corpus to embed, such as 17/100 (the first is 0/100), in a shared output.
        finish: Write the manifest after all shards are complete.
        output: Folder to write or to continue.
        chunk_seconds: Length of the chunks of long recordings, in seconds.
        width: Store only this number of first values of each embedding. Default: all.
        pad_short_clips: Append silence to clips that are shorter than the model's minimum; by default, they are
            unusable.
        batch_size: Number of recordings to read, and of chunks to embed, at once.
        clips_per_file: Number of recordings in each Parquet file; by default four files a process, at most 10,000
            recordings each.
        dtype: Type of the stored embeddings.
        num_workers: Number of reading threads for each embedding process.
    """

    model: str = "outputs/synthetic"
    folder: str | None = None
    table: str | None = None
    path_column: str = "path"
    id_column: str | None = None
    channel: int | None = None
    shard: str | None = None
    finish: bool = False
    output: str = "outputs/embeddings"
    chunk_seconds: float | None = 10.0
    width: int | None = None
    pad_short_clips: bool = AudioPolicy.pad_short_clips
    batch_size: int = 32
    clips_per_file: int | None = None
    dtype: Literal["float32", "float16", "int8", "binary"] = "float32"
    num_workers: int = min(4, os.cpu_count() or 1)

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder, including `data_dir` and `channel`."""
        return super().builder_options | ({} if self.channel is None else {"channel": self.channel})


@dataclass
class MiningArguments(EncoderArguments, DatasetArguments):
    """Model and data of hard negatives, and which wrong captions to keep.

    Attributes:
        model: Folder or Hub id of a model, or module:function.
        split: Split to find negatives for.
        output: Parquet file to write.
        languages: ISO 639-3 codes of the captions.
        near: Anchor of the similarity: audio (the recording) or text (the own captions).
        count: Maximum number of negatives of a clip.
        first_rank: Rank of the first negative; 1 is the most similar wrong caption.
        margin: Leave out captions with a similarity above that of the own caption minus this; -2 keeps all.
        batch_size: Number of recordings or captions to embed at once.
    """

    model: str = "outputs/synthetic"
    split: str = "train"
    output: str = "negatives.parquet"
    languages: list[str] = list_of("eng")
    near: str = "audio"
    count: int = 8
    first_rank: int = 1
    margin: float = 0.0
    batch_size: int = 32

    def _rules(self) -> Rules:
        yield self.near not in ("audio", "text"), f"near is {self.near!r}; expected audio or text"
        for name in ("count", "first_rank", "batch_size"):
            yield getattr(self, name) < 1, f"{name} is {getattr(self, name)}; it must be at least 1"
        margin = self.margin
        yield not -2 <= margin <= 2, f"margin is {margin}; it must be at least -2 and at most 2"


@dataclass
class SweepArguments:
    """Options of training runs with several settings and seeds.

    Attributes:
        seeds: Seeds of every combination. Default: the seed of the configuration, or 0.
        dry_run: Check all settings and data, without training.
        data_dir: Folder of the data, or a folder with one folder per dataset.
        output_dir: Folder of the runs and the table.
    """

    positional: ClassVar[str] = "[CONFIG.yaml] KEY=VALUE[,VALUE ...] [KEY=VALUE ...]"
    seeds: list[int] = list_of()
    dry_run: bool = False
    data_dir: str | None = None
    output_dir: str = "outputs/sweep"
    scale: ClassVar[str] = ""
    skip_missing: ClassVar[bool] = False
    allow_missing: ClassVar[bool] = False
    on_bad_audio: ClassVar[str] = "error"
    check_audio: ClassVar[bool] = False


@dataclass
class ReproductionArguments(CheckedArguments):
    """Rows to reproduce, and their scale.

    Attributes:
        scale: Size of the runs: mini or full.
        seeds: Seeds of every row.
        rows: Rows to reproduce, such as table1_infonce; by default, all.
        datasets: Datasets of the tables, such as audiocaps; by default, all.
        dry_run: Check all settings and data, without training.
        data_dir: Folder of the data, or a folder with one folder per dataset.
        output_dir: Folder of the runs and tables.
        settings: Settings for every training, as JSON.
        skip_missing: Skip rows with missing data or encoders, instead of raising an error.
        allow_missing: Run even if more than a fifth of the published recordings are missing.
        on_bad_audio: Action of all runs for unusable recordings: error, or skip, as the table notes.
        check_audio: Decode all recordings in a dry run, not only 100 of each split.
    """

    positional: ClassVar[str] = "TABLE [TABLE ...]"
    scale: str = "mini"
    seeds: list[int] = list_of(0, 1, 2, 3, 4)
    rows: list[str] = list_of()
    datasets: list[str] = list_of()
    dry_run: bool = False
    data_dir: str | None = None
    output_dir: str = "outputs/reproduce"
    settings: Settings = None
    skip_missing: bool = False
    allow_missing: bool = False
    on_bad_audio: str = "error"
    check_audio: bool = False

    def _rules(self) -> Rules:
        for name, values in (("scale", SCALES), ("on_bad_audio", ("error", "skip"))):
            value = getattr(self, name)
            yield value not in values, f"{name} is {value!r}; expected one of {', '.join(values)}"


@dataclass
class CaptionArguments(SplitsArguments):
    """Captions to translate.

    Attributes:
        output: Parquet file; existing translations in it are kept.
        captions: Table (.csv, .parquet, ...) of clip_id, caption_index and text, instead of a dataset.
        source_language: ISO 639-3 code of the captions.
        languages: ISO 639-3 codes to translate into.
    """

    output: str = "translations.parquet"
    captions: str | None = None
    source_language: str = "eng"
    languages: list[str] = list_of(*LANGUAGES[1:])


@dataclass
class TranslatorArguments:
    """Translator: a seq2seq model of transformers, or a language model at an endpoint.

    Attributes:
        model: Hub id or folder, with {source} and {target} replaced by ISO 639-1 codes; or the endpoint's model.
        batch_size: Number of captions in a batch or request.
        prompt: Prompt for models that need one, such as 'translate {source} to {target}: {text}'.
        num_beams: Number of beams; 1 is greedy search.
        device: Device such as cpu or cuda; by default, a GPU if available.
        dtype: Data type of the weights, such as bfloat16; auto keeps the stored type.
        endpoint: Address of an OpenAI-compatible endpoint, such as https://api.deepseek.com/v1.
        api_key_env: Name of the environment variable with the endpoint's key.
        workers: Number of concurrent requests.
        retries: Number of retries of a request if the endpoint is busy.
        request_options: Further fields of a request, as JSON. By default, {"temperature": 0}.
        fill_gaps: Keep translations by other models in the output, and add the missing ones.
    """

    model: str = "facebook/nllb-200-distilled-600M"
    batch_size: int = 32
    prompt: str | None = None
    num_beams: int = 4
    device: str | None = None
    dtype: str = "auto"
    endpoint: str | None = None
    api_key_env: str | None = None
    workers: int = 4
    retries: int = 6
    request_options: Settings = None
    fill_gaps: bool = False


@dataclass
class QualityArguments:
    """Check of the translations by back-translation.

    Attributes:
        back_model: Transformers model for the back-translation; by default, --model.
        back_sample: Number of captions per language to translate back; 0: none. Default: all.
        sentence_encoder: Model of sentence-transformers to compare captions.
        threshold: Cosine below which a translation counts as bad.
        num_worst: Number of worst translations to list for each language.
    """

    back_model: str | None = None
    back_sample: int | None = None
    sentence_encoder: str = "sentence-transformers/all-roberta-large-v1"
    threshold: float = 0.7
    num_worst: int = 10


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
