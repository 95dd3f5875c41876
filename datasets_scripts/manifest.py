"""Manifest, dataset card and summary table of a prepared set."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
import soundfile

from .atomic_files import file_sha256, write_text
from .prepared import FORMAT, STORAGES
from .public_names import inline_markdown

_METADATA_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".txt")
_PACKAGES = ("av", "datasets", "numpy", "pyarrow", "soundfile", "supclap", "torch", "torchaudio")
SHORT_SECONDS = 0.15  # minimum of CED, the longest one of the supported models

# Licence identifiers of the Hub; any other licence is "other".
_HUB_LICENSES = {
    "cc0-1.0", "mit", "apache-2.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
}  # fmt: skip


def make_manifest(
    request: Mapping[str, Any],
    types: datasets.Features,
    notes: Mapping[str, Iterable[Mapping[str, Any]]],
    shards: Mapping[str, Sequence[Mapping[str, Any]]],
    report: Mapping[str, Any],
    data_dir: str | None,
    ignored_folder: Path,
) -> dict[str, Any]:
    """Build the manifest of a prepared dataset as a JSON dict, without timestamps and local paths.

    Args:
        request: "dataset", "options", "storage" and "shard_bytes" of the preparation.
        notes: `{split: [note, ...]}`, for each recording its statistics, or the "reason" why it is bad.
        shards: `{split: [record, ...]}` with the shard records of `ShardWriter`.
        report: Recordings and clips without a row (see `RowBuilder.report`).
        data_dir: Original dataset. The manifest has the hashes of its tables and texts outside `ignored_folder`.
    """
    splits: dict[str, Any] = {}
    bad: dict[str, list[Mapping[str, Any]]] = {}
    # one hash of the paths and hashes of all recordings
    audio: Counter[str] = Counter()
    digest = hashlib.sha256()
    licenses: Counter[str] = Counter()
    for split, of_split in notes.items():
        bad[split] = []
        captions: Counter[str] = Counter()
        about = {"clips": 0, "seconds": 0.0, "short_clips": 0}
        for note in of_split:
            if "reason" in note:
                bad[split].append(note)
                continue
            about["clips"] += 1
            about["seconds"] += note["seconds"]
            about["short_clips"] += note["seconds"] < SHORT_SECONDS
            captions.update(note["captions"])
            licenses[note["license"]] += 1
            audio.update(files=1, bytes=note["source_bytes"])
            digest.update(f"{note['audio_path']}\0{note['source_sha256']}\n".encode())

        about["seconds"] = round(about["seconds"], 6)
        if not about["short_clips"]:
            del about["short_clips"]
        splits[split] = {**about, "captions": dict(captions), "shards": list(shards[split])}
    return {
        "format": FORMAT,
        **request,
        "languages": list(types["captions"]),
        "features": types.to_dict(),
        "splits": splits,
        "licenses": dict(sorted(licenses.items())),
        "source_files": {
            "audio": {**audio, "sha256": digest.hexdigest()},
            "metadata": _metadata_files(data_dir, ignored_folder),
        },
        "missing": sorted(report.get("missing", [])),
        "left_out": dict(sorted(report.get("left_out", {}).items())),
        "bad_audio": bad,
        "versions": versions(),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return `{package: version}` of the installed packages among the given ones, in the same order.

    >>> list(installed_versions(["numpy", "no-such-package"]))
    ['numpy']
    """
    installed = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect the bytes of a prepared dataset."""
    return {"libsndfile": soundfile.__libsndfile_version__, **installed_versions(_PACKAGES)}


def summary_table(manifest: Mapping[str, Any]) -> str:
    """Format the statistics of each split and the number of missing and excluded clips as a text table."""
    lines = [f"{'split':<12}{'clips':>8}{'hours':>9}{'captions':>10}{'unusable':>9}  languages"]
    for split, about in manifest["splits"].items():
        captions, bad = about["captions"], len(manifest["bad_audio"][split])
        numbers = f"{about['clips']:>8}{about['seconds'] / 3600:>9.2f}{sum(captions.values()):>10}{bad:>9}"
        lines.append(f"{split:<12}{numbers}  {' '.join(captions)}")

    absent = {"missing recordings": manifest["missing"], **manifest["left_out"]}
    lines.append("; ".join(f"{reason}: {len(clips)}" for reason, clips in absent.items()))
    short = sum(about.get("short_clips", 0) for about in manifest["splits"].values())
    if short:
        lines.append(
            f"{short} of the clips are shorter than {SHORT_SECONDS} s, the minimum of CED, which refuses them without "
            "--pad_short_clips true"
        )
    return "\n".join(lines)


def write_card(path: str | Path, manifest: Mapping[str, Any]) -> None:
    """Write the dataset card (README.md). Its YAML header lists the files of each split for `load_dataset`."""
    from datasets.info import DatasetInfosDict
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData

    info = datasets.DatasetInfo(
        features=datasets.Features.from_dict(manifest["features"]),
        splits=datasets.splits.SplitDict(), download_size=0, dataset_size=0,
    )  # fmt: skip
    files, languages = [], set()
    for split, about in manifest["splits"].items():
        files.append({"split": split, "path": f"data/{split}-*"})
        languages.update(about["captions"])
        payload = sum(shard["payload_bytes"] for shard in about["shards"])
        info.download_size += sum(shard["bytes"] for shard in about["shards"])
        info.dataset_size += payload
        info.splits[split] = datasets.SplitInfo(split, num_bytes=payload, num_examples=about["clips"])

    licenses = sorted(set(map(_hub_license, manifest["licenses"])))
    data = DatasetCardData(
        pretty_name=f"{manifest['dataset']}, prepared",
        license=licenses[0] if len(licenses) == 1 else licenses,
        language=[language for language in manifest["languages"] if language in languages],
        task_categories=["audio-classification", "feature-extraction"],
    )
    MetadataConfigs({"default": {"data_files": files}}).to_dataset_card_data(data)
    DatasetInfosDict({"default": info}).to_dataset_card_data(data)
    card = DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("prepared_card.md.j2")),
        name=inline_markdown(manifest["dataset"]),
        meaning=STORAGES[manifest["storage"]].meaning,
        table=summary_table(manifest),
        licenses={inline_markdown(name): count for name, count in manifest["licenses"].items()},
    )
    write_text(path, str(card), one_writer=True)


def _hub_license(name: str) -> str:
    """Convert a licence name to a Hub licence identifier, or "other".

    >>> _hub_license("CC_BY-NC 3.0"), _hub_license("ask the author")
    ('cc-by-nc-3.0', 'other')
    """
    identifier = "-".join(name.lower().replace("_", " ").split())
    return identifier if identifier in _HUB_LICENSES else "other"


def _metadata_files(data_dir: str | None, ignored_folder: Path) -> list[dict[str, Any]]:
    """Return the path, size and SHA-256 of each table and text file in `data_dir`, such as caption files."""
    if data_dir is None:
        return []
    files, root = [], Path(data_dir).expanduser().resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        is_ignored = "/." in f"/{name}" or ignored_folder.resolve() in path.parents
        if path.suffix.lower() in _METADATA_SUFFIXES and path.is_file() and not is_ignored:
            files.append({"path": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
    return files
