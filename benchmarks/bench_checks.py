"""Measure the checks of `supclap train` before the first step, on a Parquet file with captions in eight languages.

OMP_NUM_THREADS=1 python benchmarks/bench_checks.py [--rows 200000]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
from rows import Row, run_script
from transformers import BertConfig

from modeling_supclap import CEDConfig, SupCLAPConfig, SupCLAPModel, SupCLAPTrainer, SupCLAPTrainingArguments
from modeling_supclap.datasets_scripts.schema import features
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes.options import DataArguments, ModelArguments
from modeling_supclap.recipes.train_supclap import build_processor
from modeling_supclap.recipes.training_data import check_splits


def measure(rows: int = 20_000) -> list[Row]:
    """Measure the time and memory of the checks, of training the tokenizer, and of starting the trainer."""
    datasets.disable_progress_bars()
    languages = list(LANGUAGES)[:8]

    def generate() -> Any:
        for number in range(rows):
            captions = {language: [f"{language} a dog barks in distance {number}"] for language in languages}
            row = {"clip_id": f"{number}", "audio_path": f"{number}.wav", "captions": captions, "labels": ["dog"]}
            yield row | {"events": [], "source": f"file:{number}", "license": ""}

    with tempfile.TemporaryDirectory() as name:
        file = str(Path(name) / "train.parquet")
        columns: Any = features(languages)
        datasets.Dataset.from_generator(generate, columns, cache_dir=name).to_parquet(file)
        split: Any = datasets.Dataset.from_parquet(file, cache_dir=name)
        args = SupCLAPTrainingArguments(
            name, languages=languages, loss="kcl", load_best_model_at_end=False, eval_strategy="no", use_cpu=True
        )

        started = time.perf_counter()
        check_splits({"train": split, "test": split}, DataArguments(zero_shot_templates=["{}"]), args)
        checked = time.perf_counter()
        processor = build_processor(ModelArguments(), split, languages)
        tokenizer = time.perf_counter()
        text = BertConfig(
            vocab_size=len(processor.tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        audio = CEDConfig(embed_dim=8, depth=1, num_heads=1)
        model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text))
        built = time.perf_counter()
        SupCLAPTrainer(model, args, split, processing_class=processor).get_train_dataloader()
        checks = time.perf_counter() - built + checked - started

    what = f"{rows:,} Parquet rows in eight languages"
    return [
        Row("checks", f"{what}: all checks before the first step", checks, None, "<= 2", "s"),
        Row("checks", f"{what}: tokenizer of the captions", tokenizer - checked, unit="s"),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
