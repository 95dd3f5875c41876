"""Write the frozen weights and the settings of a run into checkpoints, and find checkpoints to resume from."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints
from transformers.utils import ENV_VARS_TRUE_VALUES, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, file_sha256, write_json
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.stream import EpochBatches

from ..strict_loading import apply_umask
from .contrastive_module import ContrastiveModule
from .kept import hash_weights

RESUME_FOLDER = "_resume"
"""Subfolder of the output folder of a finished run, with the files that only a resumed run needs. Uploads to the Hub
leave out names that start with "_"."""

RUN_FILE = "supclap_run.json"
"""File with the settings, the names of the trainable parameters, and hashes of all other files of the checkpoint."""

_MAY_CHANGE = {
    "attn_implementation",
    "eval_languages",
    "on_bad_audio",
    "selection_split",
    "track_drift",
    "cached_chunk_size",
    "kept_tokens",
    "loss_chunk_size",
    "features_on_device",
    "feature_cache",
    "feature_cache_gib",
    "early_stopping_patience",
}
"""Arguments of this package that may change in a resumed run, because they do not affect the training."""

_OF_TRANSFORMERS = {
    *("seed", "data_seed", "dataloader_drop_last", "gradient_accumulation_steps", "bf16", "fp16"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("optim", "optim_args", "optim_target_modules", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
}
"""Arguments of transformers that a resumed run must not change. Their values are restored from the checkpoint or change
the batches. `tf32` is not among them, because it depends on the GPU."""

_NOT_OF_ADAPTERS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
"""Entries of an adapter's configuration that do not affect the training."""

_BATCHING = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
_SELECTION = ("metric_for_best_model", "greater_is_better", "eval_languages")

logger = logging.getLogger(__name__)


class CheckpointFolder(str):
    """Path of a checkpoint that is being written. The trainer saves all files there that a resumed run reads."""

    __slots__ = ()


def find_checkpoint(folder: str | Path, step: int | None) -> Path | None:
    """Return the checkpoint of a step in an output folder, or in its `RESUME_FOLDER`. None: there is none."""
    for parent in (Path(folder), Path(folder, RESUME_FOLDER)):
        if (parent / f"{PREFIX_CHECKPOINT_DIR}-{step}").is_dir():
            return parent / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    return None


def put_away(folder: str | Path, limit: int | None = None, best: str | None = None) -> str:
    """Move the files that only a resumed run needs to `RESUME_FOLDER`: checkpoints and frozen weights.

    A resumed run finds them there. Checkpoints refer to the frozen weights in the folder above, so these are in both
    folders until all checkpoints have moved. `limit` is the number of checkpoints to keep, with the `best` one.

    Returns:
        A sentence with the size of the folder. It is empty if there are no such files.
    """
    away = Path(folder, RESUME_FOLDER)
    frozen, checkpoints = list(Path(folder).glob("_frozen-*.safetensors")), sort_checkpoints(str(folder))
    if frozen or checkpoints:
        away.mkdir(exist_ok=True)
    for path in frozen:
        with atomic_write(away / path.name) as copy:
            copy.unlink()  # a link is created exclusively, too
            try:
                os.link(path, copy)
            except OSError:  # a file system without links
                shutil.copyfile(path, copy)
    for path in map(Path, checkpoints):
        shutil.rmtree(away / path.name, ignore_errors=True)
        os.replace(path, away / path.name)
    for path in frozen:
        path.unlink()
    if not away.is_dir():
        return ""

    rotate_checkpoints(str(away), limit, best and str(away / Path(best).name), True)
    size = sum(path.stat().st_size for path in away.rglob("*") if path.is_file())
    return f"{away} ({size / 1e6:,.1f} MB) is only needed to resume this run, and may be deleted"


def last_checkpoint(folder: str | Path, resumes: bool) -> str | None:
    """Return the newest complete checkpoint in an output folder, or None. Warn about newer incomplete checkpoints.

    The folder need not exist. Pass `resumes=False` for a new run.

    Raises:
        ValueError: A new run would overwrite a checkpoint, or all checkpoints of a resumed run are incomplete or
            damaged.
    """
    incomplete: list[str] = []
    for path in reversed([*sort_checkpoints(str(Path(folder, RESUME_FOLDER))), *sort_checkpoints(str(folder))]):
        flaws = checkpoint_flaws(path)
        if not resumes and (not flaws or any(Path(path).glob("*.safetensors"))):
            raise ValueError(
                f"{path} exists; to continue it, pass resume_from_checkpoint=True (--resume_from_checkpoint last); "
                "to start a new run, choose another output_dir"
            )
        if flaws:
            incomplete.append(f"{path} is incomplete ({', '.join(flaws)})")
            continue

        for message in incomplete:
            logger.warning("%s; resuming from %s", message, path)
        return path

    if incomplete and resumes:
        raise ValueError(f"{'; '.join(incomplete)}; start a new run in another --output_dir")
    return None


def checkpoint_flaws(checkpoint: str | Path) -> list[str]:
    """Compare the files of a checkpoint with their hashes. Return the flaws, such as "optimizer.pt missing"."""
    try:
        hashes = _read_run(checkpoint)["sha256"]
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
    if os.environ.get("WANDB_LOG_MODEL") == "checkpoint":
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
    file = f"_frozen-{hash_weights({name: weights[name] for name in frozen}).hex()[:16]}.safetensors"
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


def describe_run(
    args: TrainingArguments,
    module: ContrastiveModule,
    data: Mapping[str, Any] | None = None,
    batches: EpochBatches | None = None,
    optimizer: Any = None,
) -> dict[str, Any]:
    """Describe a run for `RUN_FILE`.

    Args:
        data: Records of the "train" and "validation" rows (see `rows.UsableRows.record`).
        batches: Batch sampler of a stream.
        optimizer: Optimizer that the user has passed to the trainer. None: the one of `args`.

    Returns:
        "settings": values that a resumed run must not change. "length": planned epochs and steps, which may grow.
        "data": the records. "selection": options that define the score of the best checkpoint. "trainable": names of
        the parameters that are trained.
    """
    return {
        "settings": _settings(args, module, batches, optimizer),
        "length": {"num_train_epochs": args.num_train_epochs, "max_steps": args.max_steps},
        "data": dict(data or {}),
        "selection": {name: getattr(args, name) for name in _SELECTION},
        "trainable": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
    }


def write_run_file(folder: str | Path, run: Mapping[str, Any], frozen: Mapping[str, str]) -> None:
    """Write `RUN_FILE`, last, because it contains the hashes of all other files.

    `run` is from `describe_run`, and `frozen` from `write_frozen`.
    """
    files = dict(frozen)
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = file_sha256(path)
    write_json(Path(folder) / RUN_FILE, {**run, "sha256": files})


def _read_run(checkpoint: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(checkpoint, RUN_FILE).read_text(encoding="utf-8"))
    return content


def refuse_another_run(checkpoint: str | Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """Raise ValueError if a checkpoint is incomplete, or if another run has saved it than `run` (`describe_run`).

    The message lists all differences: settings, training rows and trained parameters.

    Returns:
        Content of the checkpoint's `RUN_FILE`.
    """
    folder = Path(checkpoint)
    advice = f"or start a new run from its weights, in another output_dir: --model {folder}"
    flaws = checkpoint_flaws(folder)
    if flaws:
        raise ValueError(f"{folder} is incomplete ({', '.join(flaws)}); resume from another checkpoint, {advice}")

    saved = _read_run(folder)
    before, now = saved["settings"], run["settings"]
    # a run in Python has no such setting
    if None in (before["training_data"], now["training_data"]):
        before["training_data"] = now["training_data"]
    differences = _differences(before, now)
    for name, value in run["length"].items():
        if 0 < value < saved["length"][name]:
            differences.append(f"{name} was {saved['length'][name]} and is {value}, which is less")
    differences += _differences_of_rows(saved["data"].get("train"), run["data"].get("train"))

    old, new = set(saved["trainable"]), set(run["trainable"])
    for names, change in ((old - new, "no longer trained"), (new - old, "newly trained")):
        if names:
            differences.append(f"{len(names)} parameters are {change}, such as {min(names)}")
    if differences:
        changes = "; ".join(differences)
        raise ValueError(f"{folder} was saved with other settings: {changes}; resume with its settings, {advice}")
    return saved


def selects_otherwise(saved: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether the best score of a saved run is not comparable with scores of `run`.

    This is so if the validation rows, the metric or the evaluated languages have changed.
    """
    rows = [each["data"].get("validation") for each in (saved, run)]
    return saved["selection"] != run["selection"] or rows[0] != rows[1]


def _settings(
    args: TrainingArguments, module: ContrastiveModule, batches: EpochBatches | None, optimizer: Any
) -> dict[str, Any]:
    """Return the settings that a resumed run must not change, because they change the training."""
    names = set(type(args).__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__) - _MAY_CHANGE
    settings: dict[str, Any] = {}
    for name in sorted(names | _OF_TRANSFORMERS):
        value = getattr(args, name, None)
        # plain values of enums, folders without their paths
        settings[name] = redact(getattr(value, "value", value))
    config: Any = module.model.config
    settings |= {"initial temperature": config.temperature, "initial logit_bias": config.logit_bias}
    settings["clips_per_step"] = args.train_batch_size * args.world_size
    settings["objective"] = module.objective_name
    settings["batching"] = {name: getattr(args.accelerator_config, name, None) for name in _BATCHING}
    adapters = getattr(module.model, "peft_config", None) or {}
    if adapters:
        settings["adapters"] = {name: _adapter_settings(adapter) for name, adapter in adapters.items()}
    if optimizer is not None:
        values = {name: value for name, value in optimizer.defaults.items() if isinstance(value, (int, float))}
        settings["optimizer"] = {"class": type(optimizer).__name__, **values}
    if batches is not None:
        settings["stream"] = {
            "rows of a process": batches.num_rows,
            "batch_size": batches.batch_size,
            "workers": batches.workers,
            "processes": args.world_size,
        }
    return settings


def _adapter_settings(adapter: Any) -> dict[str, Any]:
    """Return the configuration of an adapter of PEFT without the name of its base model and versions."""
    settings = {}
    for name, value in adapter.to_dict().items():
        if name not in _NOT_OF_ADAPTERS:
            settings[name] = json.loads(json.dumps(sorted(value) if isinstance(value, set) else value, default=str))
    return settings


def _differences_of_rows(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str]:
    """Describe a change of the training rows, from their records."""
    if before is None or now is None or before == now:
        return []
    if before["rows"] != now["rows"]:
        return [f"there were {before['rows']} training rows and are {now['rows']}"]
    return [f"clip ids, captions or the order of the {now['rows']} training rows have changed"]


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
