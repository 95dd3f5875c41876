"""Compare training and embedding with a CLAP by this package and by sentence-transformers.

    OMP_NUM_THREADS=1 python benchmarks/bench_clap.py [--data_dir ESC-10] [--clips 96] [--rounds 2] [--encoders MODELS]

Both start from the same CLAP with random weights (HTSAT of four stages with 24 to 192 channels, RoBERTa of two layers,
48 kHz, 10 s), read the same recordings, and run in a new process, in turns. Both train for three epochs. A cost per
clip is the slope between a short and a long run. `--data_dir` is a folder of recordings with the class at the end of
their names, such as ESC-10; by default, recordings of 5 s are generated. The recordings to embed have five sampling
rates. With `--encoders`, a folder with `whisper-tiny.en` and `all-MiniLM-L6-v2`, `supclap train` joins both, frozen,
and runs twice with the same `--feature_cache`. sentence-transformers needs soxr.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, run_script

RATE_HZ = 48_000
BATCH = 24
EPOCHS = 3
TEMPERATURE = 0.05
EMBED_RATES_HZ = (8000, 16_000, 22_050, 44_100, 48_000)


def describe(path: str) -> str:
    """Return the caption of a recording, from the class in its name."""
    return f"a recording of class {Path(path).stem.rpartition('-')[2]}"


def make_rows(paths: list[str]) -> list[dict[str, Any]]:
    """Return training rows."""
    rows = []
    for path in paths:
        rows.append({"clip_id": path, "audio_path": path, "captions": {"eng": [describe(path)]}, "clip_index": 0})
    return rows


# ---- programs, one per process; each returns a function to measure ----


def train_ours(folder: Path, paths: list[str]) -> Callable[[], Any]:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, SupCLAPTrainer, SupCLAPTrainingArguments

    args = SupCLAPTrainingArguments(
        str(folder / "ours"), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        languages=["eng"], report_to="none", eval_strategy="no", save_strategy="no", load_best_model_at_end=False,
        use_cpu=True, dataloader_num_workers=0, track_drift=False, disable_tqdm=True,
    )  # fmt: skip
    model = SupCLAPModel.from_pretrained(folder / "start")
    processor = SupCLAPProcessor.from_pretrained(folder / "start")
    return SupCLAPTrainer(model, args, make_rows(paths), processing_class=processor).train


def train_sentence(folder: Path, paths: list[str]) -> Callable[[], Any]:
    import datasets
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments

    encoder = SentenceTransformer(str(folder / "clap"), device="cpu")
    args = SentenceTransformerTrainingArguments(
        str(folder / "sentence"), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        report_to="none", save_strategy="no", use_cpu=True, dataloader_drop_last=True, disable_tqdm=True,
    )  # fmt: skip
    loss = losses.MultipleNegativesSymmetricRankingLoss(encoder, scale=1 / TEMPERATURE)
    rows = datasets.Dataset.from_dict({"audio": paths, "text": list(map(describe, paths))})
    return SentenceTransformerTrainer(encoder, args, train_dataset=rows, loss=loss).train


def read_ours(folder: Path, paths: list[str]) -> Callable[[], Any]:
    """Read batches as in the second epoch of a training."""
    from modeling_supclap import SupCLAPProcessor
    from modeling_supclap.training.collator import TrainingCollator
    from modeling_supclap.training.kept import KeptValues

    collate = TrainingCollator(
        SupCLAPProcessor.from_pretrained(folder / "start"), kept=KeptValues(str(folder / f"kept{len(paths)}"))
    )
    rows = make_rows(paths)

    def read() -> None:
        for start in range(0, len(rows), BATCH):
            collate(rows[start : start + BATCH])

    read()
    return read


def read_sentence(folder: Path, paths: list[str]) -> Callable[[], Any]:
    from transformers import ClapProcessor
    from transformers.audio_utils import load_audio

    processor: Any = ClapProcessor.from_pretrained(folder / "clap")

    def read() -> None:
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            clips = [load_audio(path, RATE_HZ) for path in batch]
            processor(audio=clips, sampling_rate=RATE_HZ, return_tensors="pt")
            processor(text=list(map(describe, batch)), padding=True, return_tensors="pt")

    return read


def embed_ours(folder: Path, paths: list[str]) -> Callable[[], Any]:
    from modeling_supclap import SupCLAPModel

    model = SupCLAPModel.from_pretrained(folder / "start")
    return lambda: model.encode_audio(paths, num_workers=0)


def embed_sentence(folder: Path, paths: list[str]) -> Callable[[], Any]:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folder / "clap"), device="cpu")
    return lambda: encoder.encode(paths, batch_size=32)


def cache_ours(folder: Path, paths: list[str]) -> Callable[[], Any]:
    """Compute the gradients of one step in chunks of 16. The features exist before."""
    import torch

    from modeling_supclap import SupCLAPModel
    from modeling_supclap.training.contrastive_module import ContrastiveModule
    from modeling_supclap.training.objectives import ContrastiveObjective

    model = SupCLAPModel.from_pretrained(folder / "start")
    module = ContrastiveModule(model, ContrastiveObjective("infonce"), 16).train()
    inputs = make_inputs(folder, len(paths))
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name].unsqueeze(1)
    return lambda: module(**inputs, group_ids=torch.arange(len(paths))).loss.backward()


def cache_sentence(folder: Path, paths: list[str]) -> Callable[[], Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    encoder = SentenceTransformer(str(folder / "clap"), device="cpu").train()
    loss: Any = losses.CachedMultipleNegativesSymmetricRankingLoss(encoder, scale=1 / TEMPERATURE, mini_batch_size=16)
    inputs = make_inputs(folder, len(paths))
    audio = {name: inputs[name] for name in ("input_features", "is_longer")} | {"modality": "audio"}
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"modality": "text"}
    return lambda: loss([dict(audio), dict(text)], None).backward()


def make_inputs(folder: Path, batch: int) -> dict[str, Any]:
    import torch
    from transformers import ClapProcessor

    processor: Any = ClapProcessor.from_pretrained(folder / "clap")
    texts = [f"a recording of class {number % 10}" for number in range(batch)]
    text = processor(text=texts, padding=True, return_tensors="pt")
    torch.manual_seed(0)
    features = torch.randn(batch, 1, 1001, 64) * 20 - 40
    return {**text, "input_features": features, "is_longer": torch.zeros(batch, 1, dtype=torch.bool)}


def run_program(task: str, program: str, folder: str, count: str) -> None:
    """Run one program. Print the CPU seconds and the growth of memory of its function, and the peak memory, in MB."""
    paths = json.loads(Path(folder, f"{'embed' if task == 'embed' else 'train'}.json").read_text())
    function = globals()[f"{task}_{program}"](Path(folder), (paths * 20)[: int(count)])
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    started = time.process_time()
    function()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    growth = peak - pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    print(json.dumps({"cpu": time.process_time() - started, "peak": peak, "growth": growth}))


# ---- comparison ----


def write_start(folder: Path, data_dir: str | None, clips: int, embedded: int) -> None:
    """Write the recordings, their lists, and the model with which both programs start."""
    import soundfile
    import torch
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, RobertaTokenizer

    from modeling_supclap.conversion import processor_from_clap, supclap_from_clap

    random = np.random.default_rng(0)
    paths = sorted(map(str, Path(data_dir or folder).rglob("*.ogg")))[:clips]
    for number in range(0 if paths else clips):
        paths.append(str(folder / f"{number}-{number % 10}.ogg"))
        tone = np.sin(2 * np.pi * (200 + 50 * (number % 10)) * np.arange(5 * 44_100) / 44_100)
        soundfile.write(paths[-1], 0.2 * tone + 0.05 * random.standard_normal(len(tone)), 44_100)
    (folder / "train.json").write_text(json.dumps(paths))

    mixed = []
    for number in range(embedded):
        rate_hz = EMBED_RATES_HZ[number % len(EMBED_RATES_HZ)]
        mixed.append(str(folder / f"mixed{number}.{('wav', 'flac', 'ogg')[number % 3]}"))
        soundfile.write(mixed[-1], 0.1 * random.standard_normal(round(random.uniform(1, 9.6) * rate_hz)), rate_hz)
    (folder / "embed.json").write_text(json.dumps(mixed))

    torch.manual_seed(0)
    tokenizer = RobertaTokenizer().train_new_from_iterator(map(describe, paths), 300, show_progress=False)
    tokenizer.model_max_length = 64
    text = {"vocab_size": 300, "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"intermediate_size": 768}
    audio: dict[str, Any] = {"patch_embeds_hidden_size": 24, "hidden_size": 192}
    audio |= {"depths": [2, 2, 2, 2], "num_attention_heads": [1, 2, 4, 8]}
    clap = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=128))
    processor = ClapProcessor(ClapFeatureExtractor(truncation="rand_trunc"), tokenizer)
    clap.save_pretrained(folder / "clap")
    processor.save_pretrained(folder / "clap")
    supclap_from_clap(clap).save_pretrained(folder / "start")
    processor_from_clap(processor).save_pretrained(folder / "start")


def run(*words: object) -> dict[str, float]:
    """Run a program in a new process. Return the numbers that it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "run", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{words} failed: {done.stderr[-2000:]}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def compare(folder: Path, task: str, short: int, long: int, epochs: int, rounds: int) -> dict[str, list[list[float]]]:
    """Run both programs with two sizes. Return lists of CPU milliseconds per clip, peak and growth in MB."""
    found: dict[str, list[list[float]]] = {"ours": [], "sentence": []}
    for _ in range(rounds):
        for program, numbers in found.items():
            first, second = (run(task, program, folder, count) for count in (short, long))
            cost = 1000 * (second["cpu"] - first["cpu"]) / (long - short) / epochs
            numbers.append([cost, second["peak"], second["growth"]])
            print(task, program, numbers[-1], file=sys.stderr, flush=True)
    return found


def to_rows(what: str, unit: str, found: dict[str, list[list[float]]], column: int, bound: str) -> list[Row]:
    """Return a row of our value, and a row of ours divided by that of sentence-transformers."""
    ours = [numbers[column] for numbers in found["ours"]]
    theirs = [numbers[column] for numbers in found["sentence"]]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [
        Row("clap", f"{what}: ours", min(ours), statistics.median(ours), unit=unit),
        Row("clap", f"{what}: / sentence-transformers", min(ours) / min(theirs), statistics.median(ratios), bound),
    ]


def measure_frozen(folder: Path, encoders: Path) -> list[Row]:
    """Train two frozen encoders twice with one cache. Return the CPU seconds of both runs."""
    seconds = []
    for number in (1, 2):
        command = [sys.executable, "-m", "modeling_supclap.recipes.train_supclap", "synthetic.yaml"]
        command += ["--audio_encoder", str(encoders / "whisper-tiny.en")]
        command += ["--text_encoder", str(encoders / "all-MiniLM-L6-v2"), "--audio_layers", "0", "--text_layers", "0"]
        command += ["--num_train", "202", "--num_validation", "40", "--num_test", "40", "--num_train_epochs", "3"]
        command += ["--feature_cache", str(folder / "features"), "--output_dir", str(folder / f"frozen{number}")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--languages", "eng"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    what = "Whisper tiny + MiniLM, frozen, 282 clips, 3 epochs"
    return [
        Row("clap", f"{what}: CPU time of a first run", seconds[0], unit="s"),
        Row("clap", f"{what}: of a second run with its outputs", seconds[1], unit="s"),
    ]


def measure(
    data_dir: str | None = None, clips: int = 96, embedded: int = 160, rounds: int = 2, encoders: str | None = None
) -> list[Row]:
    """Compare the programs. Return the rows of their results table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_start(folder, data_dir, clips, embedded)
        trained = compare(folder, "train", BATCH, clips, EPOCHS, rounds)
        read = compare(folder, "read", BATCH, clips, 1, rounds)
        embeds = compare(folder, "embed", 32, embedded, 1, rounds)
        cached = compare(folder, "cache", 64, 256, 1, rounds)
        frozen = measure_frozen(folder, Path(encoders)) if encoders else []
    caching = "gradient caching of 256 clips in chunks of 16"
    return [
        *to_rows("training for 3 epochs, CPU time per clip and epoch", "ms", trained, 0, "at most 0.75"),
        *to_rows("training, peak memory", "MB", trained, 1, ""),
        *to_rows("reading from the second epoch on, CPU time per clip", "ms", read, 0, "at most 0.5"),
        *to_rows("embedding files, CPU time per file", "ms", embeds, 0, "at most 0.85"),
        *to_rows("embedding files, peak memory", "MB", embeds, 1, "at most 0.95"),
        *to_rows(f"{caching}, CPU time per clip", "ms", cached, 0, "at most 1"),
        *to_rows(f"{caching}, growth of memory", "MB", cached, 2, "at most 1"),
        *frozen,
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_program(*sys.argv[2:])
    else:
        run_script(measure, __doc__)
