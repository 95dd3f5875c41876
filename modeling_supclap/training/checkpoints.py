"""Write the frozen weights and the settings of a run into checkpoints, and find checkpoints to resume from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import ENV_VARS_TRUE_VALUES, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, file_sha256, write_json
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.stream import EpochBatches

from ..strict_loading import apply_umask
from .options import get_default

RUN_FILE = "supclap_run.json"
"""File with the settings, the names of the trainable parameters, and hashes of all other files of the checkpoint."""

_MAY_CHANGE = {
    "attn_implementation",
    "eval_languages",
    "on_bad_audio",
    "track_drift",
    "cached_chunk_size",
    "kept_tokens",
    "loss_chunk_size",
    "features_on_device",
}
"""Arguments of this package that may change in a resumed run, because they do not affect the training."""

logger = logging.getLogger(__name__)


class CheckpointFolder(str):
    """Path of a checkpoint that is being written. The trainer saves there what a run needs to resume."""

    __slots__ = ()


def last_checkpoint(folder: str | Path, resumes: bool) -> str | None:
    """Return the newest complete checkpoint in an output folder, or None. Warn about newer incomplete checkpoints.

    The folder need not exist. Pass `resumes=False` for a new run.

    Raises:
        ValueError: A new run would overwrite a checkpoint, or all checkpoints of a resumed run are incomplete or
            damaged.
    """
    incomplete: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        flaws = checkpoint_flaws(path)
        if flaws:
            incomplete.append(f"{path} is incomplete ({', '.join(flaws)})")
            continue

        if not resumes:
            raise ValueError(f"{path} exists; pass --resume_from_checkpoint last to continue, or another --output_dir")
        for message in incomplete:
            logger.warning("%s; resuming from %s", message, path)
        return path

    if incomplete and resumes:
        raise ValueError(f"{'; '.join(incomplete)}; start a new run in another --output_dir")
    return None


def checkpoint_flaws(checkpoint: str | Path) -> list[str]:
    """Compare the files of a checkpoint with their hashes. Return the flaws, such as "optimizer.pt missing"."""
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


def uploads_checkpoints() -> bool:
    """Return whether the environment makes a tracker upload checkpoints, without the files beside them."""
    if os.environ.get("WANDB_LOG_MODEL", "").lower() == "checkpoint":
        return True
    names = ("HF_MLFLOW_LOG_ARTIFACTS", "CLEARML_LOG_MODEL")
    return any(os.environ.get(name, "").upper() in ENV_VARS_TRUE_VALUES for name in names)


def write_frozen(
    checkpoint: Path, folder: Path, weights: Mapping[str, torch.Tensor], frozen: set[str], written: Mapping[str, str]
) -> dict[str, str]:
    """Write the frozen weights to the output folder of a run, and an index of all weights to a checkpoint.

    The index has the format of a sharded checkpoint in transformers, so that `from_pretrained` and the Trainer load the
    checkpoint.

    Args:
        checkpoint: Folder with the trained weights in `model.safetensors`. This function renames the file.
        folder: Output folder of the run, for the frozen weights.
        written: Result of the last call in this process. Unchanged frozen weights are not written again.

    Returns:
        `{path: SHA-256}` of the frozen file, with the path relative to the checkpoint.
    """
    digest = hashlib.sha256()
    for name in sorted(frozen):
        digest.update(f"{name} {tuple(weights[name].shape)} {weights[name].dtype}".encode())
        digest.update(weights[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    file = f"_frozen-{digest.hexdigest()[:16]}.safetensors"
    path = f"../{file}"
    if path not in written or not (folder / file).is_file():
        with atomic_write(folder / file, one_writer=True) as unfinished:
            save_file({name: weights[name] for name in frozen}, unfinished, {"format": "pt"})
            written = {path: file_sha256(unfinished)}
        apply_umask(folder)

    trained = "model-trained.safetensors"
    os.replace(checkpoint / SAFE_WEIGHTS_NAME, checkpoint / trained)
    size = sum(weight.nbytes for weight in weights.values())
    shards = {name: path if name in frozen else trained for name in weights}
    write_json(checkpoint / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": shards})
    return dict(written)


def write_run_file(
    folder: str | Path,
    args: TrainingArguments,
    module: nn.Module,
    batches: EpochBatches | None = None,
    frozen: Mapping[str, str] | None = None,
) -> None:
    """Write `RUN_FILE`, last, because it contains the hashes of all other files. `frozen` is from `write_frozen`."""
    files = dict(frozen or {})
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = file_sha256(path)
    content = {"settings": _settings(args, module, batches), "trainable": _trainable(module), "sha256": files}
    write_json(Path(folder) / RUN_FILE, content)


def refuse_another_run(
    checkpoint: str | Path, args: TrainingArguments, module: nn.Module, batches: EpochBatches | None = None
) -> None:
    """Raise ValueError if a checkpoint is incomplete, or if its settings or trainable parameters differ from this run.

    The message lists the differences.
    """
    folder = Path(checkpoint)
    advice = f"or start a new run from its weights: --model {folder}"
    flaws = checkpoint_flaws(folder)
    if flaws:
        raise ValueError(f"{folder} is incomplete ({', '.join(flaws)}); resume from another checkpoint, {advice}")

    run, settings = json.loads((folder / RUN_FILE).read_text(encoding="utf-8")), _settings(args, module, batches)
    # Arguments that did not exist when the run started had their defaults.
    defaults = {field.name: get_default(field) for field in fields(args) if field.name in settings}
    of_model = {name: value for name, value in settings.items() if name.startswith("initial ")}
    saved = {**of_model, **defaults, **run["settings"]}
    if saved["training_data"] is None or settings["training_data"] is None:  # saved or started without this setting
        saved["training_data"] = settings["training_data"]
    differences = _differences(saved, settings)
    before, now = set(run["trainable"]), set(_trainable(module))
    for names, change in ((before - now, "no longer trained"), (now - before, "newly trained")):
        if names:
            differences.append(f"{len(names)} parameters are {change}, such as {min(names)}")
    if differences:
        changes = "; ".join(differences)
        raise ValueError(f"{folder} was saved with other settings: {changes}; resume with its settings, {advice}")


def _settings(args: TrainingArguments, module: nn.Module, batches: EpochBatches | None) -> dict[str, Any]:
    """Return the settings that a resumed run must not change."""
    names = set(type(args).__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__) - _MAY_CHANGE
    settings = {name: redact(getattr(args, name)) for name in sorted(names | {"seed"})}  # folders without their paths
    config: Any = getattr(module, "model", module).config
    settings |= {"initial temperature": config.temperature, "initial logit_bias": config.logit_bias}
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
    """Describe each setting that has changed, with its old and its new value. Compare nested dicts key by key."""
    differences: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            differences.append(f"{prefix}{name} was {old!r} and is {new!r}")
    return differences
