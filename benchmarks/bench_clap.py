"""Compare training and embedding with a CLAP: this package, sentence-transformers, and a plain PyTorch loop.

    OMP_NUM_THREADS=1 python benchmarks/bench_clap.py [--data_dir ESC-10] [--clips 96] [--rounds 2]

Each program starts from the same tiny CLAP with random weights (HTSAT of four stages, RoBERTa of two layers, 48 kHz,
10 s), reads the same recordings, and runs in a new process, in turns. A cost per clip is the slope between a short and
a long run, so that imports do not count. `--data_dir` is a folder of recordings with the class at the end of their
names, such as ESC-10; by default, recordings are generated. The recordings to embed have five sampling rates. The
other programs need sentence-transformers and soxr.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, run_script

RATE_HZ = 48_000
BATCH = 24
TEMPERATURE = 0.05
EMBED_RATES_HZ = (8000, 16_000, 22_050, 44_100, 48_000)
Paths = list[Path]


def describe(path: Path) -> str:
    """Return the caption of a recording, from the class in its name."""
    return f"a recording of class {path.stem.rpartition('-')[2]}"


# ---- programs, one per process ----


def train_ours(folder: Path, paths: Paths, epochs: int) -> None:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, SupCLAPTrainer, SupCLAPTrainingArguments

    rows = []
    for path in paths:
        rows.append({"clip_id": path.name, "audio_path": str(path), "captions": {"eng": [describe(path)]}})
    args = SupCLAPTrainingArguments(
        str(folder / "ours"), num_train_epochs=epochs, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        languages=["eng"], report_to="none", eval_strategy="no", save_strategy="no", load_best_model_at_end=False,
        use_cpu=True, dataloader_num_workers=0, track_drift=False, disable_tqdm=True,
    )  # fmt: skip
    model, processor = (
        SupCLAPModel.from_pretrained(folder / "start"),
        SupCLAPProcessor.from_pretrained(folder / "start"),
    )
    SupCLAPTrainer(model, args, rows, processing_class=processor).train()


def train_sentence(folder: Path, paths: Paths, epochs: int) -> None:
    import datasets
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments

    encoder = SentenceTransformer(str(folder / "clap"), device="cpu")
    columns = {"audio": list(map(str, paths)), "text": list(map(describe, paths))}
    args = SentenceTransformerTrainingArguments(
        str(folder / "sentence"), num_train_epochs=epochs, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        report_to="none", save_strategy="no", use_cpu=True, dataloader_drop_last=True, disable_tqdm=True,
    )  # fmt: skip
    loss = losses.MultipleNegativesSymmetricRankingLoss(encoder, scale=1 / TEMPERATURE)
    rows = datasets.Dataset.from_dict(columns)
    SentenceTransformerTrainer(encoder, args, train_dataset=rows, loss=loss).train()


def train_plain(folder: Path, paths: Paths, epochs: int) -> None:
    import torch
    from transformers import ClapModel, ClapProcessor
    from transformers.audio_utils import load_audio

    model: Any = ClapModel.from_pretrained(folder / "clap").train()
    processor: Any = ClapProcessor.from_pretrained(folder / "clap")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = np.random.default_rng(0)
    for _ in range(epochs):
        indices = order.permutation(len(paths))
        for start in range(0, len(paths) - BATCH + 1, BATCH):
            batch = [paths[index] for index in indices[start : start + BATCH]]
            clips = [load_audio(str(path), RATE_HZ) for path in batch]
            audio = processor(audio=clips, sampling_rate=RATE_HZ, return_tensors="pt")
            text = processor(text=list(map(describe, batch)), padding=True, return_tensors="pt")
            outputs = model(**audio, **text)
            logits = outputs.audio_embeds @ outputs.text_embeds.T / TEMPERATURE
            pairs = torch.arange(len(batch))
            loss = torch.nn.functional.cross_entropy(logits, pairs)
            loss = loss + torch.nn.functional.cross_entropy(logits.T, pairs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def embed_ours(folder: Path, paths: Paths) -> None:
    from modeling_supclap import SupCLAPModel

    SupCLAPModel.from_pretrained(folder / "start").encode_audio(list(map(str, paths)), num_workers=0)


def embed_sentence(folder: Path, paths: Paths) -> None:
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(str(folder / "clap"), device="cpu").encode(list(map(str, paths)), batch_size=32)


def embed_plain(folder: Path, paths: Paths) -> None:
    import torch
    from transformers import ClapModel, ClapProcessor
    from transformers.audio_utils import load_audio

    model: Any = ClapModel.from_pretrained(folder / "clap").eval()
    processor: Any = ClapProcessor.from_pretrained(folder / "clap")
    with torch.no_grad():
        for start in range(0, len(paths), 32):
            clips = [load_audio(str(path), RATE_HZ) for path in paths[start : start + 32]]
            model.get_audio_features(**processor(audio=clips, sampling_rate=RATE_HZ, return_tensors="pt"))


def cache_ours(folder: Path, batch: int, chunk: int) -> Callable[[], Any]:
    """Return a function that computes the gradients of one step, in chunks. The features exist before."""
    import torch

    from modeling_supclap import SupCLAPModel
    from modeling_supclap.training.contrastive_module import ContrastiveModule
    from modeling_supclap.training.objectives import build_objective
    from modeling_supclap.training.training_args import SupCLAPTrainingArguments

    model = SupCLAPModel.from_pretrained(folder / "start").train()
    args = SupCLAPTrainingArguments(str(folder / "cache"), use_cpu=True, report_to="none", languages=["eng"])
    module = ContrastiveModule(model, build_objective(args), chunk).train()
    inputs = make_inputs(folder, batch)
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name].unsqueeze(1)
    inputs |= {"group_ids": torch.arange(batch), "clip_index": torch.arange(batch)}
    return lambda: module(**inputs).loss.backward()


def cache_sentence(folder: Path, batch: int, chunk: int) -> Callable[[], Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    encoder = SentenceTransformer(str(folder / "clap"), device="cpu").train()
    loss: Any = losses.CachedMultipleNegativesSymmetricRankingLoss(
        encoder, scale=1 / TEMPERATURE, mini_batch_size=chunk
    )
    inputs = make_inputs(folder, batch)
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


def current_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_program(words: list[str]) -> None:
    """Run one program, and print its CPU time in seconds, its peak memory, and the growth of a step in MB."""
    task, program, folder, *numbers = words
    paths = json.loads(Path(folder, f"{task}.json").read_text()) if task != "cache" else []
    function = globals()[f"{task}_{program}"]
    before = 0.0
    if task == "train":
        function(Path(folder), list(map(Path, paths)), int(numbers[0]))
    elif task == "embed":
        function(Path(folder), list(map(Path, paths))[: int(numbers[0])])
    else:
        step = function(Path(folder), *map(int, numbers))
        before = current_mb()
        step()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu": time.process_time(), "peak": peak_mb, "growth": peak_mb - before}))


# ---- comparison ----


def write_start(folder: Path, data_dir: Path | None, clips: int, embedded: int) -> None:
    """Write the recordings, their lists, and the model with which all programs start."""
    import soundfile
    import torch
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, RobertaTokenizer

    from modeling_supclap.conversion import processor_from_clap, supclap_from_clap

    random = np.random.default_rng(0)
    paths = sorted((data_dir or folder).rglob("*.ogg"))[:clips]
    for number in range(0 if paths else clips):
        paths.append(folder / f"{number}-{number % 10}.ogg")
        seconds = np.arange(5 * 44_100) / 44_100
        tone = np.sin(2 * np.pi * (200 + 50 * (number % 10)) * seconds)
        soundfile.write(paths[-1], 0.2 * tone + 0.05 * random.standard_normal(len(tone)), 44_100)
    (folder / "train.json").write_text(json.dumps(list(map(str, paths))))

    mixed = []
    for number in range(embedded):
        rate_hz = EMBED_RATES_HZ[number % len(EMBED_RATES_HZ)]
        mixed.append(str(folder / f"mixed{number}.{('wav', 'flac', 'ogg')[number % 3]}"))
        soundfile.write(mixed[-1], 0.1 * random.standard_normal(round(random.uniform(1, 9.6) * rate_hz)), rate_hz)
    (folder / "embed.json").write_text(json.dumps(mixed))

    torch.manual_seed(0)
    tokenizer = RobertaTokenizer().train_new_from_iterator(map(describe, paths), 300, show_progress=False)
    tokenizer.model_max_length = 64
    text = {"vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"intermediate_size": 512}
    audio = {
        "patch_embeds_hidden_size": 16,
        "hidden_size": 128,
        "depths": [2, 2, 2, 2],
        "num_attention_heads": [1, 2, 4, 8],
    }
    clap = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=128))
    processor = ClapProcessor(ClapFeatureExtractor(truncation="rand_trunc"), tokenizer)
    clap.save_pretrained(folder / "clap")
    processor.save_pretrained(folder / "clap")
    supclap_from_clap(clap).save_pretrained(folder / "start")
    processor_from_clap(processor).save_pretrained(folder / "start")


def run(*words: str) -> dict[str, float]:
    """Run a program in a new process. Return the numbers that it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, "run", *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr[-2000:]}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def measure_slopes(
    folder: Path, task: str, programs: list[str], short: int, long: int, items: int, rounds: int
) -> Any:
    """Run each program with two sizes. Return `{program: [(CPU milliseconds per item, peak MB), ...]}`."""
    found: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            first = run(task, program, str(folder), str(short))
            second = run(task, program, str(folder), str(long))
            found[program].append((1000 * (second["cpu"] - first["cpu"]) / items, second["peak"]))
    return found


def make_rows(what: str, unit: str, values: dict[str, list[float]], bound: str) -> list[Row]:
    """Return a row with the value of each program, and a row with ours divided by that of sentence-transformers."""
    rows = []
    for program, numbers in values.items():
        rows.append(Row("clap", f"{what}: {program}", min(numbers), statistics.median(numbers), unit=unit))
    if "sentence" in values:
        ratios = [ours / theirs for ours, theirs in zip(values["ours"], values["sentence"], strict=True)]
        least = min(values["ours"]) / min(values["sentence"])
        rows.append(Row("clap", f"{what}: ours / sentence-transformers", least, statistics.median(ratios), bound))
    return rows


def measure(
    data_dir: Path | None = None, clips: int = 96, embedded: int = 160, rounds: int = 2, cached: int = 256
) -> list[Row]:
    """Compare the programs. Return the rows of their results table."""
    import torch

    torch.set_num_threads(1)
    programs = ["ours"]
    if find_spec("sentence_transformers") and find_spec("soxr"):
        programs += ["sentence", "plain"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_start(folder, data_dir and Path(data_dir), clips, embedded)
        paths = list(map(Path, json.loads((folder / "train.json").read_text())))
        batches = len(paths) // BATCH * BATCH
        trained = measure_slopes(folder, "train", programs, 1, 3, 2 * batches, rounds)
        embeds = measure_slopes(folder, "embed", programs, 32, embedded, embedded - 32, rounds)
        growth: dict[str, list[float]] = {program: [] for program in programs if program != "plain"}
        for _ in range(rounds):
            for program, numbers in growth.items():
                numbers.append(run("cache", program, str(folder), str(cached), "16")["growth"])

    def pick(found: dict[str, list[tuple[float, float]]], column: int) -> dict[str, list[float]]:
        picked = {}
        for program in programs:
            picked[program] = [numbers[column] for numbers in found[program]]
        return picked

    return [
        *make_rows("training, CPU time per clip and epoch", "ms", pick(trained, 0), "<= 0.75"),
        *make_rows("training, peak memory", "MB", pick(trained, 1), ""),
        *make_rows("embedding files, CPU time per file", "ms", pick(embeds, 0), "<= 0.9"),
        *make_rows("embedding files, peak memory", "MB", pick(embeds, 1), "<= 1"),
        *make_rows(f"gradient caching, {cached} clips in chunks of 16, growth of memory", "MB", growth, "<= 1.1"),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_program(sys.argv[2:])
    else:
        run_script(measure, __doc__)
