"""What makes a folder a checkpoint that a run can go on from, and which checkpoint that is."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.stream import EpochBatches

from .options import get_default

RUN_FILE = "supclap_run.json"
"""Settings of a checkpoint's run that make its loss, the parameters that train, and the hashes of its files."""

_PARTS: dict[str, tuple[str, ...]] = {
    "weights": ("*.safetensors", "pytorch_model*", "global_step*"),
    "optimizer": ("optimizer*", "rank*-optimizer.pt", "global_step*"),
    "scheduler": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
    "trainer_state.json": ("trainer_state.json",),
    RUN_FILE: (RUN_FILE,),
}
"""What a run resumes from, and its files: of one process or many, of FSDP (folders), of DeepSpeed (`global_step`)."""

_MAY_CHANGE = {
    "eval_languages",
    "on_bad_audio",
    "track_drift",
    "cached_chunk_size",
    "loss_chunk_size",
    "features_on_device",
}
"""Our own arguments that a resumed run may give anew: they do not change what trains."""

logger = logging.getLogger(__name__)


def last_checkpoint(folder: str | Path, resumes: bool) -> str | None:
    """Finds the newest whole checkpoint of a run's folder; newer ones that are not whole are named in the log.

    Args:
        folder: The folder of the run, or of a stage of it; it need not exist.
        resumes: Whether the run is to go on from it.

    Returns:
        The checkpoint's folder, None where there is none.

    Raises:
        ValueError: There is one, and the run is not resumed: what it holds is not written over by accident. Or the
            run is to be resumed, and there are only checkpoints that are not whole.
    """
    broken: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        flaws = checkpoint_flaws(path)
        if flaws:
            broken.append(f"{path} is not whole ({', '.join(flaws)})")
            continue

        if not resumes:
            raise ValueError(
                f"{path} is there already: continue that run with --resume_from_checkpoint last, "
                "or choose another --output_dir"
            )
        for flaw in broken:
            logger.warning("%s; the run goes on from %s", flaw, path)
        return path

    if broken and resumes:
        raise ValueError(f"{'; '.join(broken)}: there is nothing to resume from, start anew in another --output_dir")
    return None


def checkpoint_flaws(checkpoint: str | Path) -> list[str]:
    """Lists what keeps a run from resuming at a checkpoint just as it was: parts that are missing or cut off.

    Args:
        checkpoint: The folder.

    Returns:
        A phrase for each flaw; none for a whole checkpoint.
    """
    flaws: list[str] = []
    for part, patterns in _PARTS.items():
        files: set[Path] = set()
        for pattern in patterns:
            files.update(Path(checkpoint).glob(pattern))

        if not files:
            flaws.append(f"{part} missing")
        for file in sorted(files):
            if _is_damaged(file):
                flaws.append(f"{file.name} damaged")
    if not flaws:
        run = json.loads(Path(checkpoint, RUN_FILE).read_text(encoding="utf-8"))
        for name, digest in run.get("sha256", {}).items():
            path = Path(checkpoint, name)
            if path.is_file() and _sha256(path) != digest:
                flaws.append(f"{path.name} damaged")
    return list(dict.fromkeys(flaws))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_damaged(file: Path) -> bool:
    """Return whether a file ends too early, without reading all of it."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                return False
        except SafetensorError:
            return True

    if file.suffix == ".json":
        try:
            return not json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return True

    return file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file)


def write_run_file(
    folder: str | Path, args: TrainingArguments, module: nn.Module, batches: EpochBatches | None = None
) -> None:
    """Write the file that `refuse_another_run` and `checkpoint_flaws` read, as the last one of a checkpoint."""
    files = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = _sha256(path)
    content = {"settings": _settings(args, batches), "trainable": _trainable(module), "sha256": files}
    write_json(Path(folder) / RUN_FILE, content)


def refuse_another_run(
    checkpoint: str | Path,
    args: TrainingArguments,
    module: nn.Module,
    batches: EpochBatches | None = None,
) -> None:
    """Refuses to go on from a checkpoint of another run, or from one that is not whole.

    Args:
        checkpoint: The folder to go on from.
        args: The arguments of this run.
        module: What this run trains, the model and its objective.
        batches: Those of a stream, whose rows depend on who reads them.

    Raises:
        ValueError: The checkpoint is not whole; or its run had another objective or seed, or trained other parameters.
            The message names the differences.
    """
    folder = Path(checkpoint)
    flaws = checkpoint_flaws(folder)
    if flaws:
        raise ValueError(
            f"{folder} is not whole ({', '.join(flaws)}), so the run could not go on as it was; resume from another "
            f"checkpoint, or start a new run from its weights: --model {folder}"
        )

    run, settings = json.loads((folder / RUN_FILE).read_text(encoding="utf-8")), _settings(args, batches)
    # A run that was begun before some of the arguments were there had their defaults.
    defaults = {field.name: get_default(field) for field in fields(args) if field.name in settings}
    differences = _differences({**defaults, **run["settings"]}, settings)
    differences += _trainable_differences(run["trainable"], _trainable(module))

    if differences:
        raise ValueError(
            f"{folder} is of another run: {'; '.join(differences)}. Resume with that run's settings, or start a new "
            f"run from its weights: --model {folder}"
        )


def _settings(args: TrainingArguments, batches: EpochBatches | None) -> dict[str, Any]:
    """Collects what makes the loss of a run: the fields that are not the Trainer's, the seed, the parts of a stream."""
    own = set(type(args).__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__) - _MAY_CHANGE
    settings = {name: getattr(args, name) for name in sorted(own | {"seed"})}
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
    """Says for each value, also those in mappings, what it was and what it is."""
    found: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} was {old!r} and is {new!r}")
    return found


def _trainable_differences(before: Iterable[str], now: Iterable[str]) -> list[str]:
    lost, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    found = []
    if lost:
        found.append(f"{len(lost)} parameters trained that are frozen or missing now, such as {lost[0]}")
    if new:
        found.append(f"{len(new)} parameters train that were frozen or missing, such as {new[0]}")
    return found
