"""Jobs of the campaigns: the command, the command to continue after a kill, and the expected result."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builders
import forking
import numpy as np
import translation_models
from recordings import esc50_folder
from safetensors.torch import load_file

from modeling_supclap.datasets_scripts.prepare import Request, prepare

SMOKE = "recipes/configs/smoke.yaml"


@dataclass
class Job:
    """A long-running command.

    Attributes:
        script: Path of the script, relative to the project.
        start: Function from the output folder to the arguments.
        proceed: Function from the output folder to the arguments that continue the job after a kill.
        outcome: Function from the output folder to the final result, which must be equal after any number of kills.
        pattern: Name pattern of files that the job writes step by step, such as checkpoints. Some kills happen during
            such a write.
    """

    script: str
    start: Callable[[Path], list[str]]
    proceed: Callable[[Path], list[str]]
    outcome: Callable[[Path], Any]
    pattern: str = "*"


def make_jobs(data: Path) -> dict[str, Job]:
    """Create the jobs and their input files.

    Args:
        data: Folder for the recordings and the models.
    """
    folder = esc50_folder(data / "ESC-50", count=10, num_folds=5)
    model = builders.save_supclap(data / "model")
    translator = translation_models.save_nllb(data / "nllb")
    encoder = translation_models.save_encoder(data / "encoder")
    captions = write_captions(data / "captions.jsonl")
    prepared = data / "prepared"
    options = {"data_dir": str(folder), "languages": ["eng"], "test_fold": 5, "validation_fraction": 0.2}
    prepare(Request("esc50", options, "int16"), prepared, cache_dir=str(data / "cache"), quiet=True)
    post = ["--model", str(model), "--dataset", "esc50", "--data_dir", str(folder)]

    def training(out: Path) -> list[str]:
        return [SMOKE, "--output_dir", str(out), "--disable_tqdm", "true"]

    def post_training(out: Path) -> list[str]:
        steps = ["--num_train_epochs", "1", "--pairs_per_epoch", "12", "--save_steps", "1"]
        steps += ["--per_device_train_batch_size", "4", "--eval_strategy", "steps", "--eval_steps", "1"]
        return [*post, *steps, "--save_strategy", "steps", "--output_dir", str(out), "--disable_tqdm", "true"]

    def preparing(out: Path) -> list[str]:
        return ["esc50", "--data_dir", str(folder), "--out", str(out), "--storage", "int16", "--workers", "2",
                "--shard_size", "100KB", "--quiet", "--cache_dir", str(out.parent / f"{out.name}-cache")]  # fmt: skip

    def evaluating(out: Path) -> list[str]:
        named = ["--model", str(model), "--dataset", "esc50", "--data_dir", str(folder), "--languages", "eng", "fra"]
        cache = ["--cache_dir", str(out.parent / f"{out.name}-cache")]
        return [*named, *cache, "--tasks", "retrieval", "zero_shot", "--output_dir", str(out)]

    def embedding(out: Path) -> list[str]:
        chunks = ["--chunk_seconds", "0.5", "--clips_per_file", "4", "--batch_size", "2", "--num_workers", "0"]
        return ["--model", str(model), "--folder", str(folder), "--output", str(out), *chunks, "--device", "cpu"]

    def indexing(out: Path) -> list[str]:
        return ["index", str(folder), "--model", str(model), "--index", str(out), "--device", "cpu", "--quiet"]

    def streaming(out: Path) -> list[str]:
        named = ["--dataset", "prepared", "--data_dir", str(prepared), "--dataset_config", "{}", "--streaming", "true"]
        named += ["--languages", "eng", "--eval_languages", "eng", "--track_language_errors", "false"]
        return [
            SMOKE,
            *named,
            "--per_device_train_batch_size",
            "4",
            "--output_dir",
            str(out),
            "--disable_tqdm",
            "true",
        ]

    def translating(out: Path) -> list[str]:
        out.mkdir(exist_ok=True)
        named = ["--captions", str(captions), "--output", str(out / "translations.parquet"), "--model", translator]
        return [*named, "--languages", "fra", "deu", "--batch_size", "2", "--sentence_encoder", encoder]

    resume = ["--resume_from_checkpoint", "last"]
    return {
        "training": Job(
            "recipes/train_supclap.py", training, lambda out: training(out) + resume, trained, "*checkpoint*"
        ),
        "post-training": Job(
            "recipes/posttrain_teminal.py",
            post_training,
            lambda out: post_training(out) + resume,
            trained,
            "*checkpoint*",
        ),
        "preparing": Job("datasets_scripts/prepare.py", preparing, preparing, every_byte, "*.parquet*"),
        "streaming": Job(
            "recipes/train_supclap.py", streaming, lambda out: streaming(out) + resume, trained, "*checkpoint*"
        ),
        "embedding": Job("recipes/embed_corpus.py", embedding, embedding, every_byte, "*.parquet*"),
        "indexing": Job("recipes/search_audio.py", indexing, indexing, indexed),
        "evaluation": Job("recipes/evaluate_supclap.py", evaluating, evaluating, evaluated),
        "translation": Job("recipes/translate_captions.py", translating, translating, translated),
    }


def checkpoints(out: Path) -> list[Path]:
    """Return the complete checkpoints of a run, which have their final name."""
    return [path for path in out.rglob("checkpoint-*") if path.parent.name != "unfinished"]


def write_captions(path: Path) -> Path:
    """Write a table of twelve captions, and return its path."""
    sounds = ["a dog barks", "rain falls", "a bell rings", "wind blows", "a cat meows", "waves break"]
    lines = []
    for number in range(12):
        caption = {"clip_id": f"clip{number}", "caption_index": 0, "text": f"{sounds[number % 6]} {number} times"}
        lines.append(json.dumps(caption))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def trained(out: Path) -> dict[str, Any]:
    """Return the exact weights; check that the results and the model card are complete."""
    weights = {}
    for name, tensor in load_file(out / "model.safetensors").items():
        weights[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert (out / "README.md").read_text(encoding="utf-8").startswith("---")
    return weights


def every_byte(out: Path) -> dict[str, str]:
    """Return the hash of each file of a prepared set."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def evaluated(out: Path) -> dict[str, Any]:
    """Return the outcome of each query; check that the report is complete."""
    json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert (out / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    with np.load(out / "outcomes.npz") as outcomes:
        return {name: hashlib.sha256(outcomes[name].tobytes()).hexdigest() for name in outcomes.files}


def indexed(out: Path) -> list[tuple[str, float, float, float]]:
    """Return all windows with their scores for a query. Search in a fork: later forks lose LanceDB's threads."""
    words = ["query", str(out), "a dog barks", "--json", "--all_windows", "-k", "1000", "--device", "cpu"]
    ended = forking.run("recipes/search_audio.py", words, out.with_name(f"{out.name}-query.log"))
    assert ended.code == 0, ended.output
    hits = json.loads(ended.output[ended.output.index("{") :])["hits"]
    return sorted((hit["file"], hit["start_seconds"], hit["end_seconds"], round(hit["score"], 4)) for hit in hits)


def translated(out: Path) -> dict[str, Any]:
    """Return the tables, and the report without the values that differ between any two runs."""
    report = json.loads((out / "translations.report.json").read_text(encoding="utf-8"))
    names = ("translations.parquet", "translations.back.parquet")
    digests = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    return {**digests, "languages": sorted(report.get("languages", report))}
