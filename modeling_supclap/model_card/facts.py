"""What a model card is written from: a model, the run that made it, the data it heard."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts.public_names import is_secret, redact

from ..evaluation.results import SCHEMA, package_versions
from ..modeling_supclap import SupCLAPModel

_ROOT = Path(__file__).resolve().parents[2]
_ALWAYS = {"loss", "svr", "stage", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "seed"}
# They say where a run lived and how it talked, not what it was.
_LOCAL_ARGUMENTS = {
    "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "data_dir", "report_to", "project", "model",
    "clap", "hub_token", "hub_model_id", "hub_private_repo", "push_to_hub", "disable_tqdm", "accelerator_config",
    "label_names", "do_eval", "dataloader_num_workers", "dataloader_pin_memory", "logging_steps", "save_total_limit",
    "greater_is_better",
}  # fmt: skip


@dataclass
class CardFacts:
    """What a card is written from; everything but the model may be missing.

    Args:
        model: The model.
        name: What the card calls it.
        repository: Its Hub id, if it has one.
        sampling_rate_hz: The rate of the recordings that it takes.
        languages: ISO 639-3 codes of the captions it was trained on.
        arguments: Those of the run's arguments that say what was done.
        dataset: The names of the training data, Hub ids or builders of `datasets_scripts`.
        clips: How many it was trained on.
        licenses: Of those clips, counted.
        results: Contents of `results.json`, of a training run or of an evaluation.
        base_model: Id or folder of the model that training continued; None takes it from the model.
        license: In place of the one that follows from the parts.
        tags: Beside our own.
        command: The command line that made it.
        processes: That trained together.
        device: They ran on.
    """

    model: SupCLAPModel
    name: str
    repository: str | None = None
    sampling_rate_hz: int = 16000
    languages: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    dataset: Sequence[str] = ()
    clips: int | None = None
    licenses: Mapping[str, int] = field(default_factory=dict)
    results: Sequence[Mapping[str, Any]] = ()
    base_model: str | None = None
    license: str | None = None
    tags: Sequence[str] = ()
    command: str = ""
    processes: int = 1
    device: str = ""


def facts_of_run(trainer: Any) -> CardFacts:
    """What a `SupCLAPTrainer` knows of its run: arguments that are not the default, data, results on disk."""
    args, folder = trainer.args, Path(trainer.args.output_dir or ".")
    results = read_results(folder)
    own = results[0] if results and "training" in results[0] else {"training": {}, "protocol": {}, "scores": {}}
    recorded = own["training"].get("arguments", {})

    arguments = _telling_arguments(args, recorded)
    for found in own["scores"].get("temporal", {}).values():
        arguments["stage"] = ", then ".join(stage[-1] for stage in found if stage.startswith("stage_"))

    rows = getattr(getattr(trainer, "train_items", None), "rows", None) or trainer.train_rows
    dataset = own["protocol"].get("origin") or recorded.get("dataset")
    return CardFacts(
        model=trainer.clap,
        name=(args.hub_model_id or folder.resolve().name).split("/")[-1],
        repository=getattr(trainer, "hub_model_id", None) or args.hub_model_id,
        sampling_rate_hz=trainer.processor.feature_extractor.sampling_rate,
        languages=list(args.languages),
        arguments=arguments,
        dataset=[dataset] if dataset else [],
        clips=None if rows is None else len(rows),
        licenses=count_licenses(rows),
        results=results,
        command=public_command(sys.argv),
        processes=args.world_size,
        device=args.device.type,
    )


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The contents of a folder's `results.json`, then of those of evaluations in folders directly below it."""
    own = [folder / "results.json"] if (folder / "results.json").is_file() else []
    found = []
    for path in (*own, *sorted(folder.glob("*/results.json"))):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("schema") == SCHEMA:
            found.append(content)

    return found


def count_licenses(rows: Any) -> dict[str, int]:
    """How many clips have which licence, the most frequent first; a clip without one counts as `not stated`.

    Of a stream, what its maker has counted of the whole set.
    """
    if rows is None or not len(rows):
        return {}
    if hasattr(rows, "licenses"):
        counts = Counter(rows.licenses)
    elif "license" in getattr(rows, "column_names", []):
        counts = Counter(rows["license"])
    else:
        counts = Counter(row.get("license") for row in rows)

    for nothing in ("", None):
        if nothing in counts:
            counts["not stated"] += counts.pop(nothing)
    return dict(counts.most_common())


def _telling_arguments(args: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that differ from their defaults, those of the recipe, and a few that one always asks for."""
    plain = args.to_dict()
    telling = {}
    for name, value in recorded.items():
        if name not in plain and value not in (None, [], {}):
            telling[name] = value

    for each in fields(args):
        value = plain.get(each.name)
        is_empty = value in (None, [], {}) or (value is False and each.default is not True)
        is_default = getattr(args, each.name) == each.default
        if each.name in _ALWAYS or (each.init and not is_default and not is_empty):
            telling[each.name] = value

    # TeminAL has an objective of its own.
    left_out = {*_LOCAL_ARGUMENTS, "loss", "svr"} if "stage" in telling else _LOCAL_ARGUMENTS
    for name in left_out & telling.keys():
        del telling[name]
    return redact(telling)


def public_command(arguments: Sequence[str]) -> str:
    """The command line of a recipe as others may read it: without secrets, and without the folders of this machine.

    Args:
        arguments: `sys.argv`.

    Returns:
        The command with what launched it; empty where no script was run, as in a notebook. A run that was resumed is
        reproduced from its beginning.

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
    """The versions that results were made with, else those that are installed."""
    for each in results:
        if "versions" in each:
            return dict(each["versions"])
    return package_versions()


def code_commit() -> str:
    """The commit of the checkout that this package runs from, if it runs from one."""
    if not (_ROOT / ".git").exists():
        return ""
    try:
        options: dict[str, Any] = {"cwd": _ROOT, "text": True, "timeout": 10, "stderr": subprocess.DEVNULL}
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], **options)
        changes = subprocess.check_output(["git", "status", "--porcelain"], **options)
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.strip() + (" with local changes" if changes.strip() else "")
