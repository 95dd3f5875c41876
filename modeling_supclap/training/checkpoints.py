"""Find and check the checkpoints from which a run can resume."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from modeling_supclap.datasets_scripts.atomic_files import file_sha256, write_json
from modeling_supclap.datasets_scripts.stream import EpochBatches

from .options import get_default

RUN_FILE = "supclap_run.json"
"""File with the settings, the names of the trainable parameters, and hashes of all other files of the checkpoint."""

_MAY_CHANGE = {
    "attn_implementation",
    "eval_languages",
    "on_bad_audio",
    "track_drift",
    "cached_chunk_size",
    "loss_chunk_size",
    "features_on_device",
}
"""Arguments of this package that may change in a resumed run, because they do not affect the training."""

logger = logging.getLogger(__name__)


def last_checkpoint(folder: str | Path, resumes: bool) -> str | None:
    """Return the newest complete checkpoint in an output folder, or None. Warns about newer incomplete checkpoints.

    Args:
        folder: Output folder of the run, or of one stage; it may be missing.
        resumes: Whether the run resumes from the checkpoint.

    Raises:
        ValueError: The run does not resume, but a checkpoint exists and would be overwritten. Or the run resumes, but
            all checkpoints are incomplete or damaged.
    """
    incomplete: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        flaws = checkpoint_flaws(path)
        if flaws:
            incomplete.append(f"{path} is incomplete ({', '.join(flaws)})")
            continue

        if not resumes:
            raise ValueError(
                f"{path} already exists; continue that run with --resume_from_checkpoint last, "
                "or choose another --output_dir"
            )
        for message in incomplete:
            logger.warning("%s; resuming from %s", message, path)
        return path

    if incomplete and resumes:
        raise ValueError(
            f"{'; '.join(incomplete)}; no checkpoint to resume from, start a new run in another --output_dir"
        )
    return None


def checkpoint_flaws(checkpoint: str | Path) -> list[str]:
    """Compare the files of a checkpoint with their hashes; return the flaws, such as "optimizer.pt missing"."""
    try:
        hashes = json.loads(Path(checkpoint, RUN_FILE).read_text(encoding="utf-8"))["sha256"]
    except FileNotFoundError:
        return [f"{RUN_FILE} missing"]
    except (KeyError, ValueError):
        return [f"{RUN_FILE} damaged"]

    flaws = []
    for name, digest in hashes.items():
        path = Path(checkpoint, name)
        if not path.is_file():
            flaws.append(f"{name} missing")
        elif file_sha256(path) != digest:
            flaws.append(f"{name} damaged")
    return flaws


def write_run_file(
    folder: str | Path, args: TrainingArguments, module: nn.Module, batches: EpochBatches | None = None
) -> None:
    """Write the checkpoint's `RUN_FILE`, with settings and file hashes. Call this after all other files are written."""
    files = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = file_sha256(path)
    content = {"settings": _settings(args, batches), "trainable": _trainable(module), "sha256": files}
    write_json(Path(folder) / RUN_FILE, content)


def refuse_another_run(
    checkpoint: str | Path, args: TrainingArguments, module: nn.Module, batches: EpochBatches | None = None
) -> None:
    """Raise if a checkpoint is incomplete or belongs to a run with other settings.

    Raises:
        ValueError: The checkpoint is incomplete or damaged, or was saved with other settings (such as loss or seed) or
            other trainable parameters. The message lists the differences.
    """
    folder = Path(checkpoint)
    flaws = checkpoint_flaws(folder)
    if flaws:
        raise ValueError(
            f"{folder} is incomplete ({', '.join(flaws)}) and cannot be resumed; resume from another checkpoint, "
            f"or start a new run from its weights: --model {folder}"
        )

    run, settings = json.loads((folder / RUN_FILE).read_text(encoding="utf-8")), _settings(args, batches)
    # Arguments that did not exist when the run started had their defaults.
    defaults = {field.name: get_default(field) for field in fields(args) if field.name in settings}
    differences = _differences({**defaults, **run["settings"]}, settings)
    before, now = set(run["trainable"]), set(_trainable(module))
    if before - now:
        differences.append(
            f"{len(before - now)} parameters were trained but are frozen or missing now, such as {min(before - now)}"
        )
    if now - before:
        differences.append(
            f"{len(now - before)} parameters train but were frozen or missing before, such as {min(now - before)}"
        )
    if differences:
        raise ValueError(
            f"{folder} belongs to a run with other settings: {'; '.join(differences)}. Resume with its settings, "
            f"or start a new run from its weights: --model {folder}"
        )


def _settings(args: TrainingArguments, batches: EpochBatches | None) -> dict[str, Any]:
    """Return the settings that must not change on resume: package arguments, seed, and stream sharding."""
    names = set(type(args).__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__) - _MAY_CHANGE
    settings = {name: getattr(args, name) for name in sorted(names | {"seed"})}
    if batches is not None:
        settings["stream"] = {
            "rows of a process": batches.num_rows,
            "batch_size": batches.batch_size,
            "workers": batches.workers,
            "processes": args.world_size,
        }
    return settings


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """List each changed value with its old and new value, including values in nested dicts."""
    differences: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            differences.append(f"{prefix}{name} was {old!r} and is {new!r}")
    return differences
