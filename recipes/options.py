"""The options of the recipes. Nothing here imports torch, transformers or datasets, so that `--help` is immediate."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes.running import say
from modeling_supclap.training.options import key

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel

SCALES = ("mini", "full")


@dataclass
class DatasetArguments:
    """Which dataset to work on. Every recipe that reads one takes these keys, and the options of its builder too."""

    dataset: str = key("synthetic", "A builder of datasets_scripts, or prepared.")
    data_dir: str | None = key(None, "Folder or Hub id of the data, where the builder takes one.")
    dataset_config: dict | str | None = key(
        None, "Options of the builder in a file; on the command line they go by their own names."
    )

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder, `data_dir` among them."""
        options = dict(as_mapping(self.dataset_config))
        if self.data_dir is not None:
            options["data_dir"] = self.data_dir
        return options

    @property
    def origin(self) -> str:
        """The dataset that the rows come from; of a prepared set, the one that it was prepared from."""
        options = self.builder_options
        if self.dataset == "hf" and "data_dir" in options:
            from modeling_supclap.datasets_scripts.builders.hf import get_origin

            return get_origin(options["data_dir"])

        if self.dataset == "prepared":
            from modeling_supclap.datasets_scripts.prepared import PreparedSet

            return PreparedSet(options.get("data_dir"), revision=options.get("revision")).manifest["dataset"]
        return self.dataset

    def load_splits(self) -> dict[str, Any]:
        """All splits of the dataset, as `datasets_scripts.load_splits` gives them."""
        return load_splits(self.dataset, **self.builder_options)


@dataclass
class DataArguments(DatasetArguments):
    """What to train on."""

    streaming: bool = key(False, "Read the training split as it is needed: of prepared, hf and webdataset.")
    zero_shot_templates: list[str] = key([], "Class prompts such as 'This is a sound of {}'; empty: no such test.")

    def load_splits(self) -> dict[str, Any]:
        """All splits of the dataset; with `streaming`, the training split as a stream."""
        if not self.streaming:
            return super().load_splits()
        splits = load_splits(self.dataset, streaming=True, **self.builder_options)
        return {name: rows if name == "train" else rows.to_dataset() for name, rows in splits.items()}


@dataclass
class ModelArguments:
    """What to train: a saved model, or two encoders, each a Hub id, a folder, or `scratch`."""

    model: str | None = key(None, "A SupCLAP or CLAP model to continue from (id or folder).")
    audio_encoder: str = key("scratch", "For example mispeech/ced-base.")
    text_encoder: str = key("scratch", "For example sentence-transformers/LaBSE.")
    audio_config: dict | str | None = key(None, "CEDConfig fields of a scratch encoder.")
    text_config: dict | str | None = key(None, "BertConfig fields of a scratch encoder.")
    vocab_size: int = key(4000, "Size of a scratch text encoder's vocabulary.")
    projection_dim: int = key(1024, "Width of the shared space.")
    temperature: float = key(0.07, "Initial temperature of the softmax.")
    logit_bias: float | None = key(None, "Initial bias of SigLIP's logits, usually -10.")
    text_pooling: str = key("mean", "mean, cls, last or pooler.")
    random_weights: list[str] = key([], "Encoders to begin anew in their own shape: audio, text, or both.")

    def __post_init__(self) -> None:
        if not set(self.random_weights) <= {"audio", "text"}:
            raise ValueError(f"random_weights is {self.random_weights}; it names audio, text, or both")


@dataclass
class TrainedPartArguments:
    """Which part of a model trains: all of it, or the last blocks, or adapters in them; always with the projections."""

    train_last_layers: int | None = key(None, "Train only so many last blocks of each encoder.")
    audio_layers: int | None = key(None, "Another number of the audio encoder's blocks.")
    text_layers: int | None = key(None, "Another number of the text encoder's blocks.")
    lora_rank: int | None = key(None, "Train adapters of this rank in the last blocks, in place of the blocks.")

    train_temperature: bool = key(True, "Whether the temperature, and SigLIP's bias, train or stay as they start.")

    def choose_parameters(self, model: SupCLAPModel) -> None:
        """Freezes what does not train, and adds the adapters."""
        from modeling_supclap.training.lora import add_lora, train_last_layers, trainable_table

        last = 1 if self.train_last_layers is None else self.train_last_layers
        audio_layers = last if self.audio_layers is None else self.audio_layers
        text_layers = last if self.text_layers is None else self.text_layers

        if self.lora_rank is not None:
            add_lora(model, rank=self.lora_rank, audio_layers=audio_layers, text_layers=text_layers)
        elif (self.train_last_layers, self.audio_layers, self.text_layers) != (None, None, None):
            train_last_layers(model, audio_layers, text_layers)

        if not self.train_temperature:
            for parameter in (model.logit_scale, model.logit_bias):
                if parameter is not None:
                    parameter.requires_grad_(False)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            say(trainable_table(model))

    def finished(self, model: SupCLAPModel) -> SupCLAPModel:
        """The stock model that is to be saved, with the adapters merged into its weights."""
        from modeling_supclap.training.lora import merge_lora

        return model if self.lora_rank is None else merge_lora(model)


@dataclass
class PostTrainingArguments(DatasetArguments):
    """What to post-train, and on what."""

    model: str | None = key(None, "A SupCLAP or CLAP model (id or folder).")
    dataset: str = key("esc50", "A labelled builder of datasets_scripts, or prepared.")
    pool_splits: bool = key(False, "Draw from all splits of the dataset together, as the paper does.")
    train_fraction: float = key(0.7, "Share of each class's recordings to train on.")
    prompts: str | None = key(
        None, "Call sounds by labels or phrases; default, labels in English alone. Kept in the model."
    )
    stages: list[str] = key(["a", "b"], "The stages to train, in order; b alone is TeminAL B.")
    use_after: bool = key(True, "Say every other time 'y after x' for 'x before y'.")
    num_phrasings: int | None = key(None, "Use the first so many phrasings of each sentence; 1: the paper's alone.")
    pairs_per_epoch: int | None = key(None, "Class pairs an epoch; default, all once.")
    eval_pairs: int = key(90, "Held-out pairs to evaluate on.")

    def __post_init__(self) -> None:
        if not self.stages or len(set(self.stages)) < len(self.stages) or not set(self.stages) <= {"a", "b"}:
            raise ValueError(f"stages is {self.stages}; give a, b, or both, each once")


@dataclass
class LastPartArguments(TrainedPartArguments):
    """As in the paper, the last block of each encoder trains where nothing else is asked for."""

    train_last_layers: int | None = key(1, "Train only so many last blocks of each encoder.")


@dataclass
class EvaluationArguments(DatasetArguments):
    """What to evaluate, on what, and how."""

    model: str | None = key(None, "A SupCLAP or CLAP model (id or folder), or module:function.")
    device: str | None = key(None, "cpu, cuda, ...; by default a GPU if there is one.")

    split: str = key("test", "Which split; several joined by +.")
    folds: list[int] = key([], "Evaluate the test splits of these folds.")
    train_split: str | None = key(None, "Warn when this split, which the model was trained on, shares recordings.")
    on_bad_audio: str = key("error", "Missing or unusable recordings: error or skip.")

    tasks: list[str] = key(["retrieval"], "retrieval, zero_shot, zste.")
    languages: list[str] = key(["eng"], "Languages of retrieval.")
    positives: str = key("clip", "Who answers whom: clip or captions.")
    caption_handling: str = key("all", "Captions that count: all or parallel.")

    template_sets: list[str] = key(["supclap"], "Sets of class prompts, by name.")
    templates: list[str] = key([], "A set of your own, such as 'I hear {}'.")
    zero_shot_languages: list[str] = key(["eng"], "Of class prompts.")
    phrases: str | None = key(None, "Dataset whose label phrases to use; by default the evaluated one.")

    zste_languages: list[str] = key(["eng"], "Languages of ZSTE.")
    zste_tasks: list[str] = key([], "Some of 1A to 5B; empty, all.")
    zste_items: int = key(200, "Clips of each family of ZSTE.")
    zste_candidates: int = key(50, "Candidates of ZSTE's tasks 4 and 5B.")
    zste_prompts: str | None = key(None, "labels or phrases; by default what the model was post-trained with.")

    max_audio_seconds: float | None = key(None, "Hear only this much of a recording.")
    chunk_seconds: float | None = key(None, "Embed longer recordings in chunks; by default as long as the model takes.")
    pooling: str = key("mean", "Of chunks: mean, or best for each text.")

    batch_size: int = key(32, "Clips or texts at once; changes no result.")
    num_resamples: int = key(1000, "Of the bootstrap; 0, no intervals.")
    confidence: float = key(0.95, "Of the intervals.")
    seed: int = key(0, "Of the bootstrap and of ZSTE's draws.")

    output_dir: str = key("outputs/evaluation", "Where the results go.")
    cache_dir: str | None = key(None, "Where embeddings are kept; none: nowhere.")
    compare: list[str] = key([], "Folders of two results to compare; nothing else is done.")
    allow_different: bool = key(False, "Compare results of different protocols too.")


@dataclass
class SplitsArguments(DatasetArguments):
    """A dataset, if any, and which of its splits."""

    dataset: str | None = key(None, "A builder of datasets_scripts, or prepared.")  # type: ignore[assignment]
    splits: list[str] = key([], "Some splits of it; default, all.")

    def load_splits(self) -> dict[str, Any]:
        """The splits that are wanted."""
        splits = super().load_splits()
        unknown = sorted(set(self.splits) - set(splits))
        if unknown:
            raise ValueError(f"there are no splits {unknown}; there are {list(splits)}")
        return {name: splits[name] for name in self.splits or splits}


@dataclass
class CorpusArguments(SplitsArguments):
    """What to embed, by which model, and where to put it."""

    model: str = key("outputs/synthetic", "Folder or Hub id of a SupCLAP or CLAP model.")
    folder: str | None = key(None, "Instead of a dataset: all recordings below a folder.")
    output: str = key("outputs/embeddings", "The folder to write, or to go on writing.")

    chunk_seconds: float | None = key(10.0, "Longer recordings are cut into chunks of this length, or of the model's.")
    batch_size: int = key(32, "Chunks that go through the model at once.")
    clips_per_file: int = key(10_000, "Recordings of a Parquet file of the output.")
    num_workers: int = key(min(4, os.cpu_count() or 1), "Threads that read ahead of the model, in each process.")
    device: str | None = key(None, "cpu, cuda, ...; by default a GPU if there is one.")


@dataclass
class ReproductionArguments:
    """What to reproduce, and at which scale."""

    scale: str = key("mini", f"One of {', '.join(SCALES)}.")
    seeds: list[int] = key([], "Seeds; default, those of the table, or 0 1 2.")
    rows: list[str] = key([], "Some rows only, such as table1_infonce.")
    dry_run: bool = key(False, "Resolve and estimate everything, train nothing.")
    data_dir: str | None = key(None, "The folder of the data, or of one folder for each dataset.")
    output_dir: str = key("outputs/reproduce", "Where runs and tables go.")
    settings: dict | str | None = key(
        None, "Settings of every training run besides, as JSON; such a run is another run."
    )

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"scale is {self.scale!r}; it must be one of {', '.join(SCALES)}")


@dataclass
class CaptionArguments(SplitsArguments):
    """What to translate, and where to put it."""

    output: str = key("translations.parquet", "The file of translations; what it holds already is kept.")
    captions: str | None = key(None, "Instead: a table of clip_id, caption_index, text (.csv, .jsonl, .parquet ...).")
    source_language: str = key("eng", "ISO 639-3 code of the captions.")
    languages: list[str] = key(list(LANGUAGES[1:]), "ISO 639-3 codes to translate into.")


@dataclass
class TranslatorArguments:
    """What translates: a seq2seq model of transformers, or with an endpoint the language model behind that."""

    model: str = key(
        "facebook/nllb-200-distilled-600M",
        "Hub id or folder, {source} and {target} in it become ISO 639-1; or the endpoint's model.",
    )
    batch_size: int = key(32, "Captions a batch, or a request.")
    prompt: str | None = key(None, "For models that want one: 'translate {source} to {target}: {text}'.")
    num_beams: int = key(4, "Beams of the search; 1 is greedy.")
    device: str | None = key(None, "cpu, cuda, ...; default, a GPU where there is one.")
    dtype: str = key("auto", "Of the weights, such as bfloat16; auto, as stored.")
    endpoint: str | None = key(None, "Such as https://api.deepseek.com/v1.")
    api_key_env: str | None = key(None, "Environment variable that holds its key.")
    requests_per_minute: float | None = key(None, "At most so many; default, no limit.")
    workers: int = key(4, "Requests at a time.")
    retries: int = key(6, "Of a request that the endpoint was too busy for.")
    request_options: dict | str | None = key(None, 'Further fields of a request, JSON; default {"temperature": 0}.')
    fill_gaps: bool = key(False, "Keep what other models have put into the output, and add to it.")


@dataclass
class QualityArguments:
    """How translations are checked: translated back, and compared with what they were made from."""

    back_model: str | None = key(None, "Transformers model that translates back; default, model.")
    back_sample: int | None = key(None, "Captions a language to translate back; default, all; 0, none.")
    sentence_encoder: str = key("sentence-transformers/all-roberta-large-v1", "A model for sentence-transformers.")
    threshold: float = key(0.7, "A cosine below it is counted.")
    num_worst: int = key(10, "Worst translations to list for each language.")


def as_mapping(value: dict | str | None) -> dict[str, Any]:
    """A mapping from the YAML file, or the same as JSON from the command line."""
    parsed = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a mapping such as '{{\"depth\": 4}}', got {value!r}")
    return parsed
