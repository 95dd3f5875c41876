"""Load prepared datasets, the output of `prepare.py`, from a folder, the Hub or a remote address.

    prepared/
      data/train-00000-of-00002.parquet ...   rows with their audio
      manifest.json                           content, source files and options
      README.md                               dataset card; with it, `datasets.load_dataset` also loads the folder

>>> from modeling_supclap.datasets_scripts import load_splits
>>> splits = load_splits("prepared", data_dir="prepared")  # doctest: +SKIP
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.compute
from datasets.builder import Key

from modeling_supclap.hub_ids import is_hub_id

from .atomic_files import ADVICE, parse_json, read_json
from .parquet_files import open_parquet
from .remote_files import read_file

MANIFEST = "manifest.json"
ROOT_NOTE = ".prepare/audio_root"
"""File with the path of the local audio folder, if the dataset contains only paths (storage "reference").

It is not uploaded, because other machines do not have this folder.
"""

FORMAT = 2
"""Format version of prepared datasets; other versions are not supported."""


class Storage(NamedTuple):
    """Storage format of the audio in a prepared dataset.

    `codec` is "none" (only the path is stored), "file" (the bytes of the original file are stored), or "flac" or
    "int16" (the decoded and resampled audio is stored).
    """

    codec: str
    sampling_rate_hz: int | None  # for "flac" and "int16"
    meaning: str  # description in `--help` and in the dataset card

    def features(self) -> dict[str, Any]:
        """Return the features of the audio columns. `cast_column("audio", Audio())` decodes "file" and "flac"."""
        if self.codec == "none":
            return {}
        if self.codec == "int16":
            return {"samples": datasets.Value("binary"), "sampling_rate_hz": datasets.Value("int32")}
        return {"audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}


STORAGES = {
    "original": Storage("file", None, "the bytes of the original files"),
    "flac16k": Storage("flac", 16000, "FLAC at 16 kHz, mono, 16 bits: about the size of the Vorbis file"),
    "flac48k": Storage("flac", 48000, "FLAC at 48 kHz, mono, 16 bits, for CLAP"),
    "int16": Storage("int16", 16000, "samples at 16 kHz, mono: needs no decoding, fastest in training"),
    "reference": Storage("none", None, "no audio, only the paths of the files"),
}
"""Storage formats, the values of `prepare.py --storage`."""


class PreparedSet:
    """Location and manifest of a prepared dataset (output of `prepare.py`). `PreparedConfig` describes the arguments.

    Attributes:
        base: Folder or address; file names in the manifest are relative to it. An address on the Hub contains the
            commit, so that all shards come from the same commit.
        manifest: Content of `manifest.json`: "splits" (clips, seconds, captions per language, shards), "storage",
            "options", "bad_audio", "missing", "left_out" and more.
        digest: SHA-256 of the manifest, which contains the hashes of all shards.

    Raises:
        FileNotFoundError: `data_dir` contains no manifest, for example because the preparation is unfinished.
        ValueError: The format version is not supported.
    """

    def __init__(
        self, data_dir: str | Path | None = None, audio_dir: str | None = None, revision: str | None = None
    ) -> None:
        if data_dir is None:
            raise ValueError("prepared sets require data_dir: a folder, an id on the Hub, or an address")

        # Check for an address first, because `datasets` patches `Path` in builder modules to access the network.
        remote = "://" in str(data_dir)
        folder = Path("." if remote else data_dir).expanduser()
        self.is_local = not remote and folder.is_dir()
        if self.is_local and not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{data_dir} has no {MANIFEST}; run prepare.py to create a prepared set")
        if remote or self.is_local:
            self.base = str(data_dir).rstrip("/") if remote else str(folder.resolve())
            content = read_file(f"{self.base}/{MANIFEST}", lambda file: file.read())
        elif "/" in str(data_dir) and is_hub_id(data_dir):
            if folder.parent.is_dir():  # a mistyped folder
                raise FileNotFoundError(
                    f"{data_dir} does not exist, but the folder {folder.parent} does; a dataset of this name on the "
                    f"Hub is hf://datasets/{data_dir}"
                )
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

            try:
                path = Path(hf_hub_download(str(data_dir), MANIFEST, repo_type="dataset", revision=revision))
            except (EntryNotFoundError, RepositoryNotFoundError) as error:  # or no network
                raise FileNotFoundError(
                    f"data_dir {data_dir} is neither a folder nor a dataset on the Hub with {MANIFEST}: {error}"
                ) from error
            self.base = f"hf://datasets/{data_dir}@{path.parent.name}"
            content = path.read_bytes()
        else:
            raise FileNotFoundError(f"data_dir {data_dir} is neither a folder nor an id on the Hub")

        self.audio_dir = audio_dir
        self.digest = hashlib.sha256(content).hexdigest()
        self.manifest = parse_json(content, f"{MANIFEST} of {data_dir}")
        version = self.manifest.get("format")
        if version != FORMAT:
            raise ValueError(f"{data_dir} has format {version}, this version reads {FORMAT}; prepare the set again")
        required = {"splits", "storage", "features", "dataset", "missing", "left_out", "bad_audio"}
        if missing := required - self.manifest.keys():
            raise ValueError(f"{MANIFEST} of {data_dir} lacks {sorted(missing)}; {ADVICE}")

    def shard_paths(self, split: str) -> list[str]:
        """Return the shard paths or addresses of a split; raise FileNotFoundError if a local shard is missing."""
        paths = [f"{self.base}/{shard['file']}" for shard in self.manifest["splits"][split]["shards"]]
        missing = [path for path in paths if self.is_local and not os.path.isfile(path)]
        if missing:
            raise FileNotFoundError(f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}")
        return paths

    def audio_root(self) -> str | None:
        """Return the audio folder of a dataset that contains only paths (storage "reference"), or else None.

        The folder is `audio_dir` if it is set, otherwise the folder that `prepare.py` has saved. Raises
        FileNotFoundError if it does not contain the recordings.
        """
        if self.manifest["storage"] != "reference":
            return None

        folders = [self.audio_dir] if self.audio_dir else []
        note = Path(self.base, ROOT_NOTE)
        if not folders and note.is_file():
            root = read_json(note)
            folders = [os.path.normpath(os.path.join(self.base, root["relative"])), root["absolute"]]

        example = self.manifest["audio_example"]
        for folder in folders:
            if os.path.isfile(os.path.join(folder, example)):
                return os.path.abspath(folder)
        raise FileNotFoundError(f"the recording {example} is in none of {folders}; set audio_dir to its base folder")


@dataclass
class PreparedConfig(datasets.BuilderConfig):
    """Location of a prepared dataset (see `PreparedSet`).

    Attributes:
        data_dir: Output folder of `prepare.py`, Hub dataset id, or any fsspec address, such as `s3://bucket/clotho` or
            `https://host/clotho`.
        audio_dir: Audio folder, if the dataset contains only paths (storage "reference"). Required if the recordings
            have moved.
        revision: Branch, tag or commit of the Hub repository.
    """

    data_dir: str | None = None
    audio_dir: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prepared = PreparedSet(self.data_dir, self.audio_dir, self.revision)

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Return the cache key, which includes the hash of the manifest and the audio folder."""
        inputs = {"manifest": self.prepared.digest, "audio_dir": self.prepared.audio_root()}
        return super().create_config_id({**config_kwargs, **inputs}, custom_features)


class Prepared(datasets.ArrowBasedBuilder):
    """Builder that loads the splits of a prepared dataset.

    `datasets.load_dataset` also loads the shards, without comparing their sizes or finding recordings by their paths.
    """

    VERSION = "2.0.0"
    BUILDER_CONFIG_CLASS = PreparedConfig

    def _info(self) -> datasets.DatasetInfo:
        manifest = self.config.prepared.manifest
        return datasets.DatasetInfo(
            description=f"{manifest['dataset']}, prepared as {manifest['storage']}.",
            features=datasets.Features.from_dict(manifest["features"]),
        )

    @property
    def origin(self) -> str:
        """Name of the original dataset."""
        return self.config.prepared.manifest["dataset"]

    def report(self) -> dict[str, Any]:
        """Return the clips that `prepare.py` has excluded, in the format of `RowBuilder.report`."""
        manifest = self.config.prepared.manifest
        left_out = {reason: list(clip_ids) for reason, clip_ids in manifest["left_out"].items()}
        for of_split in manifest["bad_audio"].values():
            for note in of_split:
                left_out.setdefault("bad audio", []).append(note["clip_id"])
        return {"missing": manifest["missing"], "left_out": left_out}

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        prepared = self.config.prepared
        generators = []
        for split, about in prepared.manifest["splits"].items():
            paths = prepared.shard_paths(split)
            files = paths if prepared.is_local else dl_manager.download(paths)
            sizes = [shard["bytes"] for shard in about["shards"]]
            generators.append(datasets.SplitGenerator(name=split, gen_kwargs={"files": files, "sizes": sizes}))
        return generators

    def _generate_tables(self, files: list[str], sizes: list[int]) -> Iterator[tuple[Key, pyarrow.Table]]:
        root = self.config.prepared.audio_root()
        for number, (path, size) in enumerate(zip(files, sizes, strict=True)):
            actual = os.path.getsize(path)
            if actual != size:
                raise ValueError(f"{path} has {actual} bytes, but {size} in the manifest; copy the set again")

            with open_parquet(path) as shard:
                for group in range(shard.num_row_groups):
                    table = with_absolute_paths(shard.read_row_group(group), root)
                    yield Key(number, group), table.cast(self.info.features.arrow_schema)


def with_absolute_paths(table: pyarrow.Table, root: str | None) -> pyarrow.Table:
    """Join `root` and the relative paths in the column `audio_path`. If `root` is None, return the table unchanged."""
    if root is None:
        return table
    column = table.column_names.index("audio_path")
    paths = pyarrow.compute.binary_join_element_wise(root, table.column(column), os.sep)
    return table.set_column(column, "audio_path", paths)
