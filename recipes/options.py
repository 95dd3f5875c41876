"""Options of the recipes. `--help` prints the docstrings; heavy imports are inside functions, so that it is fast."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts import load_builder, load_splits, splits_of
from modeling_supclap.languages import LANGUAGES, require_language_code
from modeling_supclap.recipes.running import say

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel

SCALES = ("mini", "full")
MISSING_SHARE = 0.2


@dataclass
class DatasetArguments:
    """Dataset to read. The options of its builder are accepted, too.

    Args:
        dataset: Name of a builder of datasets_scripts, or prepared.
        data_dir: Folder or Hub id of the data, for builders that need one.
        dataset_config: Options of the builder in a configuration file; on the command line, give them by name.
    """

    dataset: str = "synthetic"
    data_dir: str | None = None
    dataset_config: dict | str | None = None

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder, including `data_dir`."""
        options = dict(as_mapping(self.dataset_config))
        if self.data_dir is not None:
            options["data_dir"] = self.data_dir
        return options

    @property
    def origin(self) -> str:
        """Name of the original dataset; for a prepared set, the dataset that it was prepared from."""
        options = self.builder_options
        if self.dataset == "hf" and "data_dir" in options:
            from modeling_supclap.datasets_scripts.builders.hf import get_origin

            return get_origin(options["data_dir"])

        if self.dataset == "prepared":
            from modeling_supclap.datasets_scripts.prepared import PreparedSet

            return PreparedSet(options.get("data_dir"), revision=options.get("revision")).manifest["dataset"]
        return self.dataset

    def load_splits(self) -> dict[str, Any]:
        return load_splits(self.dataset, **self.builder_options)


@dataclass
class DataArguments(DatasetArguments):
    """Training data.

    Args:
        streaming: Stream the training split during training; for prepared, hf and webdataset.
        zero_shot_templates: Class prompts for zero-shot classification of the test split, such as 'This is a sound of
            {}'. By default, this test is left out.
        allow_missing: Train even if more than a fifth of the recordings in the metadata are missing.
    """

    streaming: bool = False
    zero_shot_templates: list[str] = field(default_factory=list)
    allow_missing: bool = False

    def load_splits(self) -> dict[str, Any]:
        """Return all splits of the dataset; with `streaming`, the training split as a stream.

        Raises:
            FileNotFoundError: More than `MISSING_SHARE` of the recordings are missing, without `allow_missing`.
        """
        options = self.builder_options
        if self.streaming:
            splits = load_splits(self.dataset, streaming=True, **options)
            return {name: rows if name == "train" else rows.to_dataset() for name, rows in splits.items()}

        translations = options.pop("translations", None)
        builder = load_builder(self.dataset, **options)
        splits = splits_of(builder, translations)
        missing, count = builder.report()["missing"], sum(map(len, splits.values()))
        is_partial = len(missing) > MISSING_SHARE * (count + len(missing))
        if is_partial and not self.allow_missing and "limit" not in options:
            raise FileNotFoundError(
                f"{len(missing):,} of {count + len(missing):,} recordings are missing, such as {missing[0]}; complete "
                f"the folder, or use --allow_missing true to train on the other {count:,}"
            )
        return splits


@dataclass
class ModelArguments:
    """Model to train: a saved model, or two encoders, each a Hub id, a folder, or `scratch`.

    Args:
        model: SupCLAP or CLAP model to continue from (id or folder).
        audio_encoder: Audio encoder, for example mispeech/ced-base or openai/whisper-tiny.
        text_encoder: Text encoder, for example sentence-transformers/LaBSE.
        audio_config: CEDConfig fields of an audio encoder from scratch, or fields of one in random_weights.
        text_config: BertConfig fields of a text encoder from scratch, or fields of one in random_weights.
        vocab_size: Vocabulary size of a text encoder from scratch.
        projection_dim: Width of the shared space.
        temperature: Initial temperature of the softmax.
        logit_bias: Initial bias of SigLIP's logits, usually -10.
        audio_pooling: Pooling of the audio encoder: mean or pooler. By default, its pooler if it has one.
        text_pooling: Pooling of the text encoder: mean, cls, last or pooler.
        random_weights: Encoders to initialise with random weights: audio, text, or both.
    """

    model: str | None = None
    audio_encoder: str = "scratch"
    text_encoder: str = "scratch"
    audio_config: dict | str | None = None
    text_config: dict | str | None = None
    vocab_size: int = 4000
    projection_dim: int = 1024
    temperature: float = 0.07
    logit_bias: float | None = None
    audio_pooling: str | None = None
    text_pooling: str = "mean"
    random_weights: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not set(self.random_weights) <= {"audio", "text"}:
            raise ValueError(f"random_weights is {self.random_weights}; expected audio, text, or both")


@dataclass
class TrainedPartArguments:
    """Part of the model to train: all of it, the last blocks, or adapters in them. The projections always train.

    Args:
        train_last_layers: Number of last blocks of each encoder to train, instead of the whole model.
        audio_layers: Overrides train_last_layers for the audio encoder.
        text_layers: Overrides train_last_layers for the text encoder.
        lora_rank: Rank of LoRA adapters, trained in the last blocks instead of the blocks' weights.
        train_temperature: Train the temperature, and SigLIP's bias.
    """

    train_last_layers: int | None = None
    audio_layers: int | None = None
    text_layers: int | None = None
    lora_rank: int | None = None
    train_temperature: bool = True

    def choose_parameters(self, model: SupCLAPModel) -> None:
        """Freeze all other parameters, and add the adapters."""
        from modeling_supclap.training.lora import add_lora, train_last_layers, trainable_table

        numbers = self.train_last_layers, self.audio_layers, self.text_layers
        last, audio_layers, text_layers = numbers
        last = 1 if last is None else last
        audio_layers = last if audio_layers is None else audio_layers
        text_layers = last if text_layers is None else text_layers
        if self.lora_rank is not None:
            add_lora(model, rank=self.lora_rank, audio_layers=audio_layers, text_layers=text_layers)
        elif numbers != (None, None, None):
            train_last_layers(model, audio_layers, text_layers)

        if not self.train_temperature:
            for parameter in (model.logit_scale, model.logit_bias):
                if parameter is not None:
                    parameter.requires_grad_(False)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            say(trainable_table(model))

    def finished(self, model: SupCLAPModel) -> SupCLAPModel:
        """Return the model to save, with the adapters merged into its weights."""
        from modeling_supclap.training.lora import merge_lora

        return model if self.lora_rank is None else merge_lora(model)


@dataclass
class PostTrainingArguments(DatasetArguments):
    """Model and data of the post-training.

    Args:
        model: SupCLAP or CLAP model (id or folder).
        dataset: Builder of datasets_scripts with labels, or prepared.
        pool_splits: Use all splits of the dataset together, as in the paper.
        train_fraction: Fraction of each class's recordings to train on.
        prompts: Names of sounds: labels or phrases. Default: labels for English alone, else phrases.
        stages: Stages to train, in order; b alone is TeminAL B.
        use_after: Replace half of the captions 'x before y' by 'y after x'.
        num_phrasings: Number of phrasings of each sentence; 1 is the paper's phrasing. By default, all.
        pairs_per_epoch: Number of class pairs per epoch; by default, each pair once.
        eval_pairs: Number of held-out pairs to evaluate on.
    """

    model: str | None = None
    dataset: str = "esc50"
    pool_splits: bool = False
    train_fraction: float = 0.7
    prompts: str | None = None
    stages: list[str] = field(default_factory=lambda: ["a", "b"])
    use_after: bool = True
    num_phrasings: int | None = None
    pairs_per_epoch: int | None = None
    eval_pairs: int = 90

    def __post_init__(self) -> None:
        if not self.stages or len(set(self.stages)) < len(self.stages) or not set(self.stages) <= {"a", "b"}:
            raise ValueError(f"stages is {self.stages}; expected a, b, or both, each once")


@dataclass
class LastPartArguments(TrainedPartArguments):
    """Part of the model to train; by default, the last block of each encoder, as in the paper."""

    train_last_layers: int | None = 1


@dataclass
class EvaluationArguments(DatasetArguments):
    """Model, data and tasks of an evaluation.

    Args:
        model: SupCLAP or CLAP model (id or folder), or module:function.
        device: Device such as cpu or cuda; by default, a GPU if available.
        split: Split to evaluate, or several splits joined by +.
        folds: Folds to evaluate, each on its own test split.
        train_split: Training split of the model, checked for recordings in common with the evaluated split.
        on_bad_audio: Action for missing or unusable recordings: error or skip.
        tasks: Tasks: retrieval, zero_shot, zste.
        languages: Languages of retrieval.
        positives: Correct answers of retrieval: clip or captions.
        caption_handling: Captions to evaluate: all or parallel.
        template_sets: Sets of class prompts, by name.
        templates: Further class prompts, such as 'I hear {}'.
        zero_shot_languages: Languages of class prompts.
        phrases: Dataset of the label phrases; by default, the evaluated dataset.
        zste_languages: Languages of ZSTE.
        zste_tasks: Tasks of ZSTE, 1A to 5B; by default, all.
        zste_items: Number of clips in each family of ZSTE.
        zste_candidates: Number of candidates in ZSTE's tasks 4 and 5B.
        zste_prompts: Names of sounds in ZSTE: labels or phrases. By default, those of the model's post-training.
        max_audio_seconds: Maximum length of a recording in seconds; by default, unlimited.
        chunk_seconds: Length of the chunks of long recordings, in seconds; by default, the model's maximum.
        pooling: Pooling of chunks: mean, or best for each text.
        batch_size: Number of clips or texts in a batch. Results do not depend on it.
        num_resamples: Number of bootstrap resamples; 0 disables intervals.
        confidence: Confidence level of the bootstrap intervals.
        seed: Seed of the bootstrap and of ZSTE's items.
        output_dir: Folder of the results.
        cache_dir: Folder of cached embeddings; none disables the cache. By default, in the Hugging Face cache folder.
        compare: Two folders of results to compare, instead of an evaluation.
        allow_different: Also compare results of different protocols.
    """

    model: str | None = None
    device: str | None = None
    split: str = "test"
    folds: list[int] = field(default_factory=list)
    train_split: str | None = None
    on_bad_audio: str = "error"
    tasks: list[str] = field(default_factory=lambda: ["retrieval"])
    languages: list[str] = field(default_factory=lambda: ["eng"])
    positives: str = "clip"
    caption_handling: str = "all"
    template_sets: list[str] = field(default_factory=lambda: ["supclap"])
    templates: list[str] = field(default_factory=list)
    zero_shot_languages: list[str] = field(default_factory=lambda: ["eng"])
    phrases: str | None = None
    zste_languages: list[str] = field(default_factory=lambda: ["eng"])
    zste_tasks: list[str] = field(default_factory=list)
    zste_items: int = 200
    zste_candidates: int = 50
    zste_prompts: str | None = None
    max_audio_seconds: float | None = None
    chunk_seconds: float | None = None
    pooling: str = "mean"
    batch_size: int = 32
    num_resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0
    output_dir: str = "outputs/evaluation"
    cache_dir: str | None = None
    compare: list[str] = field(default_factory=list)
    allow_different: bool = False

    def __post_init__(self) -> None:
        for language in (*self.languages, *self.zero_shot_languages, *self.zste_languages):
            require_language_code(language)


@dataclass
class SplitsArguments(DatasetArguments):
    """Dataset, if any, and its splits.

    Args:
        splits: Splits to read; by default, all.
    """

    dataset: str | None = None  # type: ignore[assignment]
    splits: list[str] = field(default_factory=list)

    def load_splits(self) -> dict[str, Any]:
        splits = super().load_splits()
        unknown = sorted(set(self.splits) - set(splits))
        if unknown:
            raise ValueError(f"unknown splits {unknown}; expected some of {list(splits)}")
        return {name: splits[name] for name in self.splits or splits}


@dataclass
class CorpusArguments(SplitsArguments):
    """Model, recordings and output.

    Args:
        model: Folder or Hub id of a SupCLAP or CLAP model.
        folder: Folder of recordings to embed, instead of a dataset.
        output: Folder to write or to continue.
        chunk_seconds: Length of the chunks of long recordings, in seconds.
        batch_size: Number of recordings that a worker reads at once, and of chunks that the model embeds at once.
        clips_per_file: Number of recordings in each Parquet file of the output.
        num_workers: Number of reading processes for each embedding process.
        device: Device such as cpu or cuda; by default, a GPU if available.
    """

    model: str = "outputs/synthetic"
    folder: str | None = None
    output: str = "outputs/embeddings"
    chunk_seconds: float | None = 10.0
    batch_size: int = 32
    clips_per_file: int = 10_000
    num_workers: int = min(4, os.cpu_count() or 1)
    device: str | None = None


@dataclass
class ReproductionArguments:
    """Rows to reproduce, and their scale.

    Args:
        scale: Size of the runs: mini or full.
        seeds: Seeds; by default, those of the table, or 0 1 2.
        rows: Rows to reproduce, such as table1_infonce; by default, all.
        dry_run: Check all settings and estimate the cost, without training.
        data_dir: Folder of the data, or a folder with one folder per dataset.
        output_dir: Folder of the runs and tables.
        settings: Further settings of every training, as JSON. They create separate runs and a separate table.
        controls: YAML file with further rows, each a row of the table with other settings.
        skip_missing: Leave out rows with missing data or encoders, instead of raising an error.
    """

    scale: str = "mini"
    seeds: list[int] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    dry_run: bool = False
    data_dir: str | None = None
    output_dir: str = "outputs/reproduce"
    settings: dict | str | None = None
    controls: str | None = None
    skip_missing: bool = False

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"scale is {self.scale!r}; expected one of {', '.join(SCALES)}")


@dataclass
class CaptionArguments(SplitsArguments):
    """Captions to translate.

    Args:
        output: Parquet file of the translations; existing translations in it are kept.
        captions: Table of clip_id, caption_index and text (.csv, .jsonl, .parquet ...), instead of a dataset.
        source_language: ISO 639-3 code of the captions.
        languages: ISO 639-3 codes to translate into.
    """

    output: str = "translations.parquet"
    captions: str | None = None
    source_language: str = "eng"
    languages: list[str] = field(default_factory=lambda: list(LANGUAGES[1:]))


@dataclass
class TranslatorArguments:
    """Translator: a seq2seq model of transformers, or a language model at an endpoint.

    Args:
        model: Hub id or folder, with {source} and {target} replaced by ISO 639-1 codes; or the endpoint's model.
        batch_size: Number of captions in a batch or request.
        prompt: Prompt for models that need one, such as 'translate {source} to {target}: {text}'.
        num_beams: Number of beams; 1 is greedy search.
        device: Device such as cpu or cuda; by default, a GPU if available.
        dtype: Data type of the weights, such as bfloat16; auto keeps the stored type.
        endpoint: Address of an OpenAI-compatible endpoint, such as https://api.deepseek.com/v1.
        api_key_env: Name of the environment variable with the endpoint's key.
        requests_per_minute: Limit of requests; by default, unlimited.
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
    requests_per_minute: float | None = None
    workers: int = 4
    retries: int = 6
    request_options: dict | str | None = None
    fill_gaps: bool = False


@dataclass
class QualityArguments:
    """Check of the translations by back-translation.

    Args:
        back_model: Transformers model for the back-translation; by default, model.
        back_sample: Number of captions per language to translate back; by default, all; 0 disables the check.
        sentence_encoder: Model of sentence-transformers to compare captions.
        threshold: Cosine below which a translation counts as bad.
        num_worst: Number of worst translations to list for each language.
    """

    back_model: str | None = None
    back_sample: int | None = None
    sentence_encoder: str = "sentence-transformers/all-roberta-large-v1"
    threshold: float = 0.7
    num_worst: int = 10


def as_mapping(value: dict | str | None) -> dict[str, Any]:
    """Return a mapping from a YAML file as it is, or parse it from JSON on the command line."""
    parsed = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a mapping such as '{{\"depth\": 4}}', got {value!r}")
    return parsed
