"""Measure the CPU time of training programs from start to saved model, and the share of `supclap train` in steps.

    OMP_NUM_THREADS=1 python benchmarks/bench_training.py [--clips 128] [--epochs 4] [--batch 16] [--rounds 5]

Three programs train the same CED-tiny and BERT on the same recordings (5 s, Vorbis at 44.1 kHz), with the InfoNCE loss,
AdamW and one loader process: `supclap train`, a plain PyTorch loop, and the trainer of sentence-transformers. They run
in alternation, each in a new process with an empty cache of `datasets`. The CPU time includes imports, the loader
processes, and saving the model. `supclap train` also checks the recordings, and writes a model card, figures and
results. The default training runs once.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rows import Row, compare, run_script, take_turns

RECIPE = Path(__file__).parents[1] / "recipes" / "train_supclap.py"


def train_in_loop(folder: Path, epochs: int, batch: int) -> None:
    import soundfile
    import torch
    from torch.utils.data import DataLoader
    from torchaudio.functional import resample

    from modeling_supclap import SupCLAPModel, SupCLAPProcessor

    model: Any = SupCLAPModel.from_pretrained(folder / "start").train()
    processor = SupCLAPProcessor.from_pretrained(folder / "start")

    def collate(paths: list[Path]) -> Any:
        clips = []
        for path in paths:
            samples, rate_hz = soundfile.read(path, dtype="float32")
            clips.append(resample(torch.from_numpy(samples), rate_hz, 16000).numpy())
        captions = [path.with_suffix(".txt").read_text() for path in paths]
        return processor(audio=clips, sampling_rate=16000, text=captions, return_tensors="pt")

    files: Any = sorted((folder / "data" / "train").glob("*.ogg"))
    loader = DataLoader(files, batch, shuffle=True, collate_fn=collate, num_workers=1, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(epochs):
        for inputs in loader:
            model(**inputs, return_loss=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder / "plain")


def train_sentence_transformer(folder: Path, epochs: int, batch: int) -> None:
    import datasets
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments

    from modeling_supclap.integrations.sentence_transformers import SupCLAPModule

    encoder = SentenceTransformer(modules=[SupCLAPModule.load(str(folder / "start"))], device="cpu")
    files = sorted((folder / "data" / "train").glob("*.ogg"))
    captions = [path.with_suffix(".txt").read_text() for path in files]
    rows = datasets.Dataset.from_dict({"audio": list(map(str, files)), "text": captions})
    arguments = SentenceTransformerTrainingArguments(
        str(folder / "sentence"), num_train_epochs=epochs, per_device_train_batch_size=batch, learning_rate=1e-4,
        dataloader_num_workers=1, report_to="none", save_strategy="no", dataloader_drop_last=True,
    )  # fmt: skip
    loss = losses.MultipleNegativesSymmetricRankingLoss(encoder)
    SentenceTransformerTrainer(encoder, arguments, train_dataset=rows, loss=loss).train()
    encoder.save_pretrained(str(folder / "sentence"))


def train_default(folder: Path) -> None:
    """Run the default training. Write the CPU seconds of its steps to `folder / "learning"`."""
    import transformers.trainer

    from modeling_supclap.recipes import train_supclap

    class Stopwatch(transformers.TrainerCallback):
        seconds = started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            Stopwatch.started = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            Stopwatch.seconds += time.process_time() - Stopwatch.started

    callbacks: Any = transformers.trainer.DEFAULT_CALLBACKS
    callbacks.append(Stopwatch)
    sys.argv = ["train", "--output_dir", str(folder / "default")]
    train_supclap.main()
    (folder / "learning").write_text(json.dumps(Stopwatch.seconds))


def write_start(folder: Path, clips: int) -> None:
    """Write recordings with captions, and the model and processor with which all programs start."""
    import datasets
    import torch
    from bench_input_pipeline import generate_recordings
    from transformers import BertConfig, RobertaTokenizer

    from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor

    datasets.disable_progress_bars()
    torch.manual_seed(0)
    (folder / "data").mkdir()
    sounds = generate_recordings(folder, clips).rename(folder / "data" / "train")
    captions = sorted({path.read_text() for path in sounds.glob("*.txt")})
    tokenizer = RobertaTokenizer().train_new_from_iterator(captions, 500, show_progress=False)
    audio = CEDConfig(embed_dim=192, depth=12, num_heads=3)
    text = BertConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=512,
    )  # fmt: skip
    SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text)).save_pretrained(folder / "start")
    SupCLAPProcessor(CEDFeatureExtractor(), tokenizer).save_pretrained(folder / "start")


def child_cpu_seconds() -> float:
    """Return the CPU time of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_program(*command: str) -> None:
    """Run a Python program with an empty cache of `datasets`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"HF_DATASETS_CACHE": cache}
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")


def measure(clips: int = 128, epochs: int = 4, batch: int = 16, rounds: int = 5) -> list[Row]:
    """Train with each program, and run the default training. Return the rows of their results table."""
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), []
        write_start(folder, clips)
        options = {
            "dataset": "audio_folder", "data_dir": folder / "data", "validation_fraction": 0, "test_fraction": 0,
            "languages": "eng", "model": folder / "start", "num_train_epochs": epochs,
            "per_device_train_batch_size": batch, "learning_rate": 1e-4, "dataloader_num_workers": 1, "svr": "none",
            "report_to": "none", "eval_strategy": "no", "load_best_model_at_end": "false", "save_strategy": "no",
        }  # fmt: skip
        words: list[str] = []
        for key, value in options.items():
            words += [f"--{key}", str(value)]

        def train_ours() -> None:
            run_program(str(RECIPE), *words, "--output_dir", tempfile.mkdtemp(dir=folder))

        programs = {"supclap train": train_ours}
        programs["a plain PyTorch loop"] = partial(run_program, __file__, "loop", name, str(epochs), str(batch))
        if find_spec("sentence_transformers"):
            programs["sentence-transformers"] = partial(
                run_program, __file__, "sentence", name, str(epochs), str(batch)
            )
        seconds = take_turns(programs, rounds, child_cpu_seconds)

        for program, spent in seconds.items():
            what = f"{program}: CPU time per clip, {epochs} epochs of {clips} clips from start to saved model"
            per_clip = 1000 / clips / epochs
            rows.append(Row("training", what, per_clip * min(spent), per_clip * statistics.median(spent), unit="ms"))
        for program in list(seconds)[1:]:
            ratios = [ours / theirs for ours, theirs in zip(seconds["supclap train"], seconds[program], strict=True)]
            what = f"supclap train / {program} ({min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds)"
            rows.append(Row("training", what, *compare(seconds, "supclap train", program), "<= 1"))

        before = child_cpu_seconds()
        run_program(__file__, "default", name)
        total = child_cpu_seconds() - before
        learning = 100 * json.loads((folder / "learning").read_text()) / total
        rows.append(Row("training", "default run: CPU time from start to end", total, unit="s"))
        rows.append(
            Row("training", "default run: share of its CPU time in training steps", learning, None, ">= 50", "%")
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        train_in_loop(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    elif sys.argv[1:2] == ["sentence"]:
        train_sentence_transformer(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    elif sys.argv[1:2] == ["default"]:
        train_default(Path(sys.argv[2]))
    else:
        run_script(measure, __doc__)
