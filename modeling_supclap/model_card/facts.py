"""Collect the information for a model card: model, training run and training data."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from modeling_supclap.datasets_scripts.atomic_files import read_json
from modeling_supclap.datasets_scripts.public_names import is_secret, redact

from ..evaluation.results import SCHEMA, package_versions
from ..modeling_supclap import SupCLAPModel

_ROOT = Path(__file__).resolve().parents[2]
_ALWAYS = {"loss", "svr", "stage", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "seed"}
# Arguments to exclude: paths, logging, uploads, and arguments that appear elsewhere in the card.
_LOCAL_ARGUMENTS = {
    "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "data_dir", "report_to", "project", "model",
    "clap", "hub_token", "hub_model_id", "hub_private_repo", "push_to_hub", "disable_tqdm", "accelerator_config",
    "label_names", "do_eval", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "logging_steps", "save_total_limit", "greater_is_better", "feature_cache", "feature_cache_gib",
}  # fmt: skip


@dataclass
class CardFacts:
    """Information for a model card. Only `model` and `name` are required."""

    model: SupCLAPModel
    name: str
    repository: str | None = None  # Hub id of the model
    sampling_rate_hz: int = 16000
    languages: Sequence[str] = ()  # ISO 639-3 codes of the training captions
    arguments: Mapping[str, Any] = field(default_factory=dict)  # training arguments that affect the result
    dataset: Sequence[str] = ()  # Hub ids or names of builders in `datasets_scripts`
    clips: int | None = None  # number of training clips
    licenses: Mapping[str, int] = field(default_factory=dict)  # license -> number of training clips
    results: Sequence[Mapping[str, Any]] = ()  # contents of `results.json` files
    # initial model of the training; None: read it from the model
    base_model: str | Sequence[str] | None = None
    license: str | None = None  # None: derive it from the licenses of the encoders
    tags: Sequence[str] = ()  # additional Hub tags
    command: str = ""  # command line of the training run
    processes: int = 1  # number of training processes
    device: str = ""  # device type of the run, such as "cuda"
    threads: int = 0  # CPU threads of a training process; 0 if unknown


def facts_of_run(trainer: Any, results: Sequence[Mapping[str, Any]] | None = None) -> CardFacts:
    """Collect the model card information from a `SupCLAPTrainer`, and its results: by default those in its folder."""
    args, folder = trainer.args, Path(trainer.args.output_dir or ".")
    results = read_results(folder) if results is None else results
    of_run = results[0] if results and "training" in results[0] else {}
    recorded = of_run.get("training", {}).get("arguments", {})

    objective = trainer.module.objective_name if trainer.has_own_objective else ""
    arguments = {**_relevant_arguments(args, recorded, objective), **trainer.used_arguments}
    for stages in of_run.get("scores", {}).get("temporal", {}).values():
        arguments["stage"] = ", then ".join(stage[-1] for stage in stages if stage.startswith("stage_"))

    rows = getattr(getattr(trainer, "train_items", None), "rows", None) or trainer.train_rows
    dataset = of_run.get("protocol", {}).get("origin") or recorded.get("dataset")
    return CardFacts(
        model=trainer.clap,
        name=(args.hub_model_id or folder.resolve().name).split("/")[-1],
        repository=getattr(trainer, "hub_model_id", None) or args.hub_model_id,
        sampling_rate_hz=trainer.processor.feature_extractor.sampling_rate,
        languages=args.languages,
        arguments=arguments,
        dataset=dataset.split("+") if dataset else [],  # several datasets are joined by "+"
        clips=None if rows is None else len(rows),
        licenses=count_licenses(rows),
        results=results,
        command=public_command(sys.argv),
        processes=args.world_size,
        device=args.device.type,
        threads=torch.get_num_threads(),
    )


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Read `results.json` from a folder, then from its direct subfolders. Skip files with a different schema."""
    paths = [*folder.glob("results.json"), *sorted(folder.glob("*/results.json"))]
    results = []
    for path in paths:
        content = read_json(path)
        if isinstance(content, dict) and content.get("schema") == SCHEMA:
            results.append(content)
    return results


def count_licenses(rows: Any) -> dict[str, int]:
    """Count the clips per license (or "not stated"), most frequent first. A stream has the counts in `licenses`."""
    if rows is None or not len(rows):
        return {}
    if hasattr(rows, "licenses"):
        counts = Counter(rows.licenses)
    elif "license" in getattr(rows, "column_names", []):
        counts = Counter(rows["license"])
    else:
        counts = Counter(row.get("license") for row in rows)

    if unknown := counts.pop("", 0) + counts.pop(None, 0):
        counts["not stated"] += unknown
    return dict(counts.most_common())


def _relevant_arguments(args: Any, recorded: Mapping[str, Any], objective: str = "") -> dict[str, Any]:
    """Select recipe arguments, main hyperparameters, and training arguments that differ from their default."""
    plain = args.to_dict()
    relevant = {}
    for name, value in recorded.items():
        if name not in plain and value not in (None, [], {}):
            relevant[name] = value
    for each in fields(args):
        value = plain.get(each.name)
        is_empty = value in (None, [], {}) or (value is False and each.default is not True)
        is_default = getattr(args, each.name) == each.default
        if each.name in _ALWAYS or (each.init and not is_default and not is_empty):
            relevant[each.name] = value

    # TeminAL and custom objectives ignore `loss` and `svr`.
    left_out = {*_LOCAL_ARGUMENTS, "loss", "svr"} if objective or "stage" in relevant else _LOCAL_ARGUMENTS
    for name in left_out & relevant.keys():
        del relevant[name]
    if objective:
        relevant["objective"] = objective
    return redact(relevant)


def public_command(arguments: Sequence[str]) -> str:
    """Format `sys.argv` of a recipe without secrets, local folders and `resume_from_checkpoint`.

    The result is "" if no script was run, for example in a notebook.

    >>> public_command(["recipes/train_supclap.py", "--data_dir", "/home/me/ESC-10", "--hub_token", "hf_x"])
    'python recipes/train_supclap.py --data_dir ESC-10'
    """
    launcher = os.environ.get("SUPCLAP_COMMAND", "")
    words = []
    if not launcher:
        script = Path(arguments[0]) if arguments else Path()
        if script.suffix != ".py" or "site-packages" in script.parts:
            return ""
        resolved = script.resolve()
        words.append(str(resolved.relative_to(_ROOT)) if resolved.is_relative_to(_ROOT) else script.name)
        launcher = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "python"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            launcher = f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', 1)}"

    is_left_out = False
    for word in arguments[1:]:
        option, sign, value = word.partition("=")
        if option.startswith("-"):
            name = option.lstrip("-").replace("-", "_")
            is_left_out = is_secret(name) or name == "resume_from_checkpoint"
            if not is_left_out:
                words.append(f"{option}={redact(value)}" if sign else word)
        elif not is_left_out:
            words.append(redact(word))
    return f"{launcher} {shlex.join(words)}".rstrip()


def versions_of(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the package versions in the first results that contain versions, or else the installed versions."""
    for each in results:
        if "versions" in each:
            return dict(each["versions"]) or package_versions()
    return package_versions()


def code_commit() -> str:
    """Return the git commit of this package, with a note if there are local changes, or "" outside a git checkout."""
    if not (_ROOT / ".git").exists():
        return ""
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty= with local changes"]
    try:
        return subprocess.check_output(describe, cwd=_ROOT, text=True, timeout=10, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
