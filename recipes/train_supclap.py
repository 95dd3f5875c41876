"""Trains a SupCLAP model, from recordings and captions to a loadable, measured model.

    accelerate launch recipes/train_supclap.py                                            # the default: needs no data
    accelerate launch recipes/train_supclap.py recipes/configs/esc10.yaml --data_dir DIR  # real recordings
    accelerate launch --multi_gpu recipes/train_supclap.py recipes/configs/audiocaps.yaml --svr bi-dynamic

The first argument may be a YAML file; `--key value` pairs override it. Without one, `configs/synthetic.yaml` is read.
The output folder then holds the model for `from_pretrained`, `results.json`, `training_curves.png` and `drift.png`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BertConfig, RobertaTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from datasets_scripts import load_splits
from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.audio import load_clip
from modeling_supclap.collator import all_captions
from modeling_supclap.evaluation import format_report, in_row_order, retrieval_report, write_results, zero_shot_report
from modeling_supclap.plots import plot_drift, plot_training_curves
from modeling_supclap.trainer import SupCLAPTrainer
from modeling_supclap.training_args import SupCLAPTrainingArguments, parse_arguments

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "synthetic.yaml"


@dataclass
class DataArguments:
    """What to train on."""

    dataset: str = field(default="synthetic", metadata={"help": "A builder of datasets_scripts."})
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of the recordings, where the builder has one."}
    )
    dataset_config: dict | str | None = field(default=None, metadata={"help": "Further options of the builder, JSON."})
    zero_shot_templates: list[str] = field(
        default_factory=list, metadata={"help": "Class prompts such as 'This is a sound of {}'; empty: no such test."}
    )


@dataclass
class ModelArguments:
    """What to train: a saved model, or two encoders, each a Hub id, a folder, or `scratch`."""

    model: str | None = field(default=None, metadata={"help": "A SupCLAP model to continue from (id or folder)."})
    audio_encoder: str = field(default="scratch", metadata={"help": "For example mispeech/ced-base."})
    text_encoder: str = field(default="scratch", metadata={"help": "For example sentence-transformers/LaBSE."})
    audio_config: dict | str | None = field(default=None, metadata={"help": "CEDConfig fields of a scratch encoder."})
    text_config: dict | str | None = field(default=None, metadata={"help": "BertConfig fields of a scratch encoder."})
    vocab_size: int = field(default=4000, metadata={"help": "Of the tokenizer trained for a scratch text encoder."})
    projection_dim: int = field(default=1024, metadata={"help": "Width of the shared space."})
    temperature: float = field(default=0.07, metadata={"help": "Initial temperature of the softmax."})
    logit_bias: float | None = field(default=None, metadata={"help": "Initial bias of SigLIP's logits, usually -10."})
    text_pooling: str = field(default="mean", metadata={"help": "mean, cls or pooler."})


def as_mapping(value: dict | str | None) -> dict[str, Any]:
    """A mapping from the YAML file, or the same as JSON from the command line."""
    parsed = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a mapping such as '{{\"depth\": 4}}', got {value!r}")
    return parsed


def build_processor(args: ModelArguments, rows: Any, languages: list[str]) -> SupCLAPProcessor:
    """The processor of the model that is continued or of the text encoder; from scratch a tokenizer is trained."""
    if args.model is not None:
        return SupCLAPProcessor.from_pretrained(args.model)
    if args.text_encoder != "scratch":
        return SupCLAPProcessor(CEDFeatureExtractor(), AutoTokenizer.from_pretrained(args.text_encoder))
    captions = [text for row in rows for _, text in all_captions(row, languages)]
    return SupCLAPProcessor(CEDFeatureExtractor(), train_tokenizer(captions, args.vocab_size))


def train_tokenizer(captions: list[str], vocab_size: int) -> RobertaTokenizer:
    """A byte-level BPE for these captions: no text is unknown to it, and training it twice gives the same."""
    return RobertaTokenizer().train_new_from_iterator(sorted(set(captions)), vocab_size, show_progress=False)


def build_model(args: ModelArguments, processor: SupCLAPProcessor) -> SupCLAPModel:
    """The model that the arguments describe."""
    if args.model is not None:
        return SupCLAPModel.from_pretrained(args.model)
    scratch = [name for name in ("audio_encoder", "text_encoder") if getattr(args, name) == "scratch"]
    if len(scratch) == 1:
        raise ValueError(f"{scratch[0]} is scratch but the other encoder is not; train both from scratch or neither")
    shared = {name: getattr(args, name) for name in ("projection_dim", "temperature", "logit_bias", "text_pooling")}
    if not scratch:
        return SupCLAPModel.from_encoders(args.audio_encoder, args.text_encoder, **shared)
    audio_config = CEDConfig(**as_mapping(args.audio_config))
    vocabulary = {"vocab_size": len(processor.tokenizer), "pad_token_id": processor.tokenizer.pad_token_id}
    text_config = BertConfig(**vocabulary, **as_mapping(args.text_config))
    return SupCLAPModel(SupCLAPConfig(audio_config=audio_config, text_config=text_config, **shared))


def fit_normalisation(encoder: Any, processor: SupCLAPProcessor, rows: Any, max_audio_seconds: float) -> None:
    """Gives an audio encoder from scratch the spectral mean and variance of a sample of the training clips."""
    sample = range(0, len(rows), max(1, len(rows) // 256))
    rate_hz = processor.feature_extractor.sampling_rate
    clips = [load_clip(rows[index]["audio_path"], rate_hz, max_audio_seconds) for index in sample]
    encoder.fit_normalisation(**processor(audio=clips, sampling_rate=rate_hz, return_tensors="pt"))


def find_checkpoint(args: SupCLAPTrainingArguments) -> str | None:
    """The checkpoint to resume from, if any; an output folder that is in use is not written over by accident."""
    folder = args.output_dir or "."
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if args.resume_from_checkpoint is None and last is not None:
        raise ValueError(
            f"{last} is there already: continue that run with --resume_from_checkpoint last, "
            "or choose another --output_dir"
        )
    if args.resume_from_checkpoint != "last":
        return args.resume_from_checkpoint
    if last is None:
        raise ValueError(f"--resume_from_checkpoint last: {folder} holds no checkpoint")
    return last


def evaluate_test_split(trainer: SupCLAPTrainer, rows: Any, templates: list[str]) -> dict[str, Any]:
    """Retrieval in every language, zero-shot classification where there are templates; printed as tables."""
    args = trainer.args
    audio_embeds, text_embeds = in_row_order(trainer.predict(rows))
    report = retrieval_report(audio_embeds, text_embeds, rows, args.eval_languages, args.positives)
    results: dict[str, Any] = {"clips": len(rows), "retrieval": report}
    if templates:
        labels = [row["labels"][0] for row in rows]
        results["zero_shot"] = zero_shot_report(trainer.clap, trainer.processor, audio_embeds, labels, templates)
    if trainer.is_world_process_zero():
        print(f"\ntest split, {len(rows)} clips, percent:\n{format_report(report)}")
    if templates and trainer.is_world_process_zero():
        scores = results["zero_shot"]
        print(f"zero-shot accuracy {100 * scores['top1']:.1f} %, {len(scores['classes'])} classes")
    return results


def main() -> None:
    """Parse, load, build, train, evaluate, save."""
    started = time.perf_counter()
    data_args, model_args, args = parse_arguments(
        (DataArguments, ModelArguments, SupCLAPTrainingArguments), default_config=DEFAULT_CONFIG
    )
    args.resume_from_checkpoint = find_checkpoint(args)
    set_seed(args.seed)

    options = dict(as_mapping(data_args.dataset_config))
    if data_args.data_dir is not None:
        options["data_dir"] = data_args.data_dir
    with args.main_process_first(desc="preparing the data"):
        splits = load_splits(data_args.dataset, **options)
    processor = build_processor(model_args, splits["train"], args.languages)
    model = build_model(model_args, processor)
    if model_args.model is None and model_args.audio_encoder == "scratch":
        fit_normalisation(model.audio_model, processor, splits["train"], args.max_audio_seconds)
    print(f"{data_args.dataset}: " + ", ".join(f"{len(rows)} {name}" for name, rows in splits.items()) + " clips")
    print(
        f"model: {model.audio_model.num_parameters():,} audio and {model.text_model.num_parameters():,} text parameters"
    )

    trainer = SupCLAPTrainer(
        model, args, train_dataset=splits["train"], eval_dataset=splits["validation"], processing_class=processor
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    results = {
        "test": evaluate_test_split(trainer, splits["test"], data_args.zero_shot_templates),
        "best_validation": {args.metric_for_best_model: trainer.state.best_metric},
        "best_step": trainer.state.best_global_step,
        "steps": trainer.state.global_step,
        "seconds": time.perf_counter() - started,
        "arguments": {**vars(data_args), **vars(model_args), **args.to_dict()},
    }
    if trainer.is_world_process_zero():
        output = Path(args.output_dir or ".")
        write_results(output / "results.json", results)
        plot_training_curves(trainer.state.log_history, output / "training_curves.png", args.eval_languages[0])
        if any("drift_cosine" in entry for entry in trainer.state.log_history):
            plot_drift(trainer.state.log_history, output / "drift.png")
        print(f"model, results.json and training_curves.png are in {output} ({results['seconds']:.0f} s in all)")


if __name__ == "__main__":
    main()
