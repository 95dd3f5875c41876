"""What a prepared set says of itself: the manifest, the dataset card and the table at the end of a preparation."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import soundfile

from .atomic_files import write_text
from .prepared import FORMAT
from .shards import file_sha256
from .storage import STORAGES
from .versions import installed_versions

_METADATA_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".txt")
_PACKAGES = ("datasets", "numpy", "pyarrow", "soundfile", "supclap", "torch", "torchaudio", "torchcodec")

# Identifiers of the Hub's own list of licences; whatever else is "other" there.
_HUB_LICENSES = {
    "cc0-1.0", "mit", "apache-2.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
}  # fmt: skip


def make_manifest(
    request: Mapping[str, Any],
    types: datasets.Features,
    notes: Mapping[str, Sequence[Mapping[str, Any]]],
    shards: Mapping[str, Sequence[Mapping[str, Any]]],
    report: Mapping[str, Any],
    ignored_folder: Path,
) -> dict[str, Any]:
    """The manifest of a set whose shards are written; no times and no places but those of the request.

    Args:
        request: "dataset", "options", "storage" and the like, as they were asked for.
        types: Of the rows.
        notes: On each recording, by split: what it gave, or the "reason" why it is left out.
        shards: "file", "rows", "bytes", "payload_bytes" and "sha256" of each, by split.
        report: Of the builder: "missing", and "left_out" by reason.
        ignored_folder: Where the set lies, to tell its own files from the sources.

    Returns:
        Plain JSON.
    """
    good = {split: [note for note in of_split if "reason" not in note] for split, of_split in notes.items()}
    every = [note for of_split in good.values() for note in of_split]
    return {
        "format": FORMAT,
        **request,
        "languages": list(types["captions"]),
        "features": types.to_dict(),
        "splits": {split: {**_totals(of_split), "shards": list(shards[split])} for split, of_split in good.items()},
        "licenses": dict(sorted(Counter(note["license"] for note in every).items())),
        "source_files": {
            "audio": _audio_digest(every),
            "metadata": _metadata_files(request["options"], ignored_folder),
        },
        "missing": sorted(report.get("missing", [])),
        "left_out": {reason: list(clips) for reason, clips in sorted(report.get("left_out", {}).items())},
        "bad_audio": {split: [note for note in of_split if "reason" in note] for split, of_split in notes.items()},
        "versions": versions(),
    }


def root_entry(root: str | None, folder: Path, example: str) -> dict[str, str | None]:
    """Where the recordings of a set of storage "reference" are, for `prepared.py` to find them again.

    Args:
        root: The folder that their paths are relative to; `None`, the paths are absolute.
        folder: Where the set lies.
        example: The path of one of them.
    """
    try:
        relative = None if root is None else Path(os.path.relpath(root, folder.resolve())).as_posix()
    except ValueError:  # another drive
        relative = None
    return {"absolute": root or "", "relative": relative, "example": example}


def versions() -> dict[str, str]:
    """Of all that takes part in reading, resampling and writing."""
    return {"libsndfile": soundfile.__libsndfile_version__, **installed_versions(_PACKAGES)}


def summary_table(manifest: Mapping[str, Any]) -> str:
    """What a prepared set holds and lacks, split by split, for a terminal."""
    lines = [f"{'split':<12}{'clips':>8}{'hours':>9}{'captions':>10}{'corrupt':>9}  languages"]
    for split, about in manifest["splits"].items():
        captions, bad = about["captions"], len(manifest["bad_audio"][split])
        numbers = f"{about['clips']:>8}{about['seconds'] / 3600:>9.2f}{sum(captions.values()):>10}{bad:>9}"
        lines.append(f"{split:<12}{numbers}  {' '.join(captions)}")
    absent = {"missing recordings": manifest["missing"], **manifest["left_out"]}
    return "\n".join([*lines, "; ".join(f"{reason}: {len(clips)}" for reason, clips in absent.items())])


def write_card(path: str | Path, manifest: Mapping[str, Any]) -> None:
    """Writes README.md, whose header tells the Hub and `datasets.load_dataset` where the splits are."""
    from datasets.info import DatasetInfosDict
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData

    licenses = sorted({_hub_license(name) for name in manifest["licenses"]})
    data = DatasetCardData(
        pretty_name=f"{manifest['dataset']}, prepared",
        license=licenses[0] if len(licenses) == 1 else licenses,
        language=[language for language in manifest["languages"] if _count(manifest, language)],
        task_categories=["audio-classification", "feature-extraction"],
    )
    files = [{"split": split, "path": f"data/{split}-*"} for split in manifest["splits"]]
    MetadataConfigs({"default": {"data_files": files}}).to_dataset_card_data(data)
    DatasetInfosDict({"default": _dataset_info(manifest)}).to_dataset_card_data(data)
    text = f"---\n{data.to_yaml()}\n---\n\n{_card_body(manifest)}"
    write_text(path, str(DatasetCard(text)), one_writer=True)


def _dataset_info(manifest: Mapping[str, Any]) -> datasets.DatasetInfo:
    splits, shards = {}, []
    for split, about in manifest["splits"].items():
        payload = sum(shard["payload_bytes"] for shard in about["shards"])
        splits[split] = datasets.SplitInfo(split, num_bytes=payload, num_examples=about["clips"])
        shards += about["shards"]
    info = datasets.DatasetInfo(features=datasets.Features.from_dict(manifest["features"]))
    info.splits = datasets.splits.SplitDict(splits)
    info.download_size = sum(shard["bytes"] for shard in shards)
    info.dataset_size = sum(shard["payload_bytes"] for shard in shards)
    return info


def _card_body(manifest: Mapping[str, Any]) -> str:
    licenses = "\n".join(f"- {name or 'not stated'}: {count} clips" for name, count in manifest["licenses"].items())
    return (
        f"# {manifest['dataset']}, prepared\n\n"
        f"Audio: {STORAGES[manifest['storage']].meaning}. `manifest.json` says what the set was made from, what is "
        "missing and what could not be read.\n\n"
        f"```\n{summary_table(manifest)}\n```\n\n"
        "```python\nfrom modeling_supclap.datasets_scripts import load_splits\n\n"
        'splits = load_splits("prepared", data_dir="this folder, or its id on the Hub")\n```\n\n'
        f"Licences of the recordings:\n\n{licenses}\n"
    )


def _count(manifest: Mapping[str, Any], language: str) -> int:
    return sum(about["captions"].get(language, 0) for about in manifest["splits"].values())


def _hub_license(name: str) -> str:
    """The Hub's identifier of a licence.

    >>> _hub_license("CC BY-NC 3.0"), _hub_license("ask the author")
    ('cc-by-nc-3.0', 'other')
    """
    identifier = "-".join(name.lower().replace("_", " ").split())
    return identifier if identifier in _HUB_LICENSES else "other"


def _totals(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    captions: Counter[str] = Counter()
    for note in notes:
        captions.update(note["captions"])
    return {
        "clips": len(notes),
        "seconds": round(sum(note["seconds"] for note in notes), 6),
        "captions": dict(captions),
    }


def _audio_digest(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count, size and one hash for all recordings: of their paths and their own hashes."""
    digest = hashlib.sha256()
    for note in notes:
        digest.update(f"{note['audio_path']}\0{note['source_sha256']}\n".encode())
    size = sum(note["source_bytes"] for note in notes)
    return {"files": len(notes), "bytes": size, "sha256": digest.hexdigest()}


def _metadata_files(options: Mapping[str, Any], ignored_folder: Path) -> list[dict[str, Any]]:
    """The tables and texts in the builder's `data_dir`, captions among them."""
    data_dir = Path(str(options.get("data_dir"))).expanduser()
    if options.get("data_dir") is None or not data_dir.is_dir():
        return []
    ignored, root = ignored_folder.resolve(), data_dir.resolve()
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in _METADATA_SUFFIXES and path.is_file())
    return [
        {"path": path.relative_to(root).as_posix(), "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in found
        if ignored not in path.parents and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
