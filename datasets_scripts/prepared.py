"""Prepared sets, as `prepare.py` writes them, back to rows: a folder or a repository of the Hub.

    prepared/
      data/train-00000-of-00002.parquet ...   rows of the schema, and their audio
      manifest.json                           what the set holds, from what and how it was made
      README.md                               the dataset card, by which `datasets.load_dataset` reads the set too

>>> from modeling_supclap.datasets_scripts import load_splits
>>> splits = load_splits("prepared", data_dir="prepared")  # doctest: +SKIP
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from datasets.builder import Key

from modeling_supclap.hub_ids import is_hub_id

from .remote_files import read_file

MANIFEST = "manifest.json"
ROOT_NOTE = ".prepare/audio_root"
"""Says on this machine, and is never pushed, where the recordings of a set are that holds none."""

FORMAT = 2
"""The format of the folder; a set of another format than this is refused."""


class Storage(NamedTuple):
    """One way to keep the audio of a clip.

    Attributes:
        codec: "none", the row's path only; "file", the bytes of the file; "flac" or "int16", decoded and resampled.
        sampling_rate_hz: The rate of "flac" and "int16".
        meaning: What `--help` and the dataset card say.
    """

    codec: str
    sampling_rate_hz: int | None
    meaning: str

    def features(self) -> dict[str, Any]:
        """The columns that this way adds to a row, as `datasets` features by name.

        Files are a struct of bytes and path: it loads without torchcodec, which `datasets.Audio` does not, and
        `cast_column("audio", Audio())` makes it one.
        """
        if self.codec == "none":
            return {}
        if self.codec == "int16":
            return {"samples": datasets.Value("binary"), "sampling_rate_hz": datasets.Value("int32")}
        return {"audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}


STORAGES = {
    "original": Storage("file", None, "the files' own bytes"),
    "flac16k": Storage("flac", 16000, "FLAC at 16 kHz, mono, 16 bits: about the size of the Vorbis file"),
    "flac48k": Storage("flac", 48000, "the same at 48 kHz, for CLAP"),
    "int16": Storage("int16", 16000, "samples at 16 kHz, mono: nothing to decode, the fastest to train from"),
    "reference": Storage("none", None, "no audio, only where the files are"),
}
"""The values of `prepare.py --storage`."""


class PreparedSet:
    """Where a prepared set is, and what its manifest says.

    Args:
        data_dir: The folder that `prepare.py --out` named, the id of a repository on the Hub, or an address that fsspec
            knows, such as `s3://bucket/clotho` or `https://host/clotho`.
        audio_dir: Where the recordings of a set of storage "reference" are; needed when they have moved.
        revision: A branch, tag or commit of the Hub's repository.

    Attributes:
        place: What the names of the manifest are relative to: a folder or an address. On the Hub it names a commit, so
            that all shards come from the same one.
        manifest: What `manifest.json` says: "splits" (clips, seconds, captions by language, shards), "storage",
            "options", "bad_audio", "missing", "left_out" and more.
        digest: The SHA-256 of the manifest, which names every shard by its hash.

    Raises:
        FileNotFoundError: There is no prepared set, or its preparation did not finish.
        ValueError: It is of another format.
    """

    def __init__(
        self, data_dir: str | Path | None = None, audio_dir: str | None = None, revision: str | None = None
    ) -> None:
        if data_dir is None:
            raise ValueError("a prepared set needs data_dir: its folder, its id on the Hub, or its address")

        # An address first: `datasets` makes `Path` ask the network, in modules of builders.
        remote = "://" in str(data_dir)
        folder = Path("." if remote else data_dir).expanduser()
        self.is_local = not remote and folder.is_dir()
        if remote:
            self.place = str(data_dir).rstrip("/")
            content = read_file(f"{self.place}/{MANIFEST}", lambda file: file.read())
        elif self.is_local:
            self.place = str(folder.resolve())
            if not (folder / MANIFEST).is_file():
                raise FileNotFoundError(
                    f"{data_dir} is no prepared set, as it holds no {MANIFEST}; make one with prepare.py"
                )
            content = (folder / MANIFEST).read_bytes()
        elif "/" in str(data_dir) and is_hub_id(data_dir):
            path = _download_manifest(str(data_dir), revision)
            self.place = f"hf://datasets/{data_dir}@{path.parent.name}"
            content = path.read_bytes()
        else:
            raise FileNotFoundError(f"data_dir {data_dir} is neither a folder nor an id of the Hub")

        self.audio_dir = audio_dir
        self.digest = hashlib.sha256(content).hexdigest()
        self.manifest = json.loads(content)
        found = self.manifest["format"]
        if found != FORMAT:
            raise ValueError(f"{data_dir} is of format {found}, this version reads {FORMAT}; prepare the set again")

    def shard_paths(self, split: str) -> list[str]:
        """The files of a split, or their addresses."""
        paths, missing = [], []
        for shard in self.manifest["splits"][split]["shards"]:
            paths.append(f"{self.place}/{shard['file']}")
            if self.is_local and not os.path.isfile(paths[-1]):
                missing.append(paths[-1])
        if missing:
            raise FileNotFoundError(f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}")
        return paths

    def audio_root(self) -> str | None:
        """Where the recordings are of a set that only refers to them; None for one that holds them."""
        if self.manifest["storage"] != "reference":
            return None

        places = [self.audio_dir] if self.audio_dir else []
        note = Path(self.place, ROOT_NOTE)
        if not places and note.is_file():
            root = json.loads(note.read_text(encoding="utf-8"))
            beside = os.path.join(self.place, root["relative"] or ".")
            places = [os.path.normpath(beside), root["absolute"] or ""]

        example = self.manifest["audio_example"]
        for place in places:
            if os.path.isfile(os.path.join(place, example)):
                return os.path.abspath(place)
        raise FileNotFoundError(f"the recording {example} is in none of {places}; say where it is with audio_dir")


def _download_manifest(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, MANIFEST, repo_type="dataset", revision=revision))
    except LocalEntryNotFoundError as error:  # without a network
        raise FileNotFoundError(
            f"there is no folder {repo_id}, and the Hub cannot be asked for a dataset of that name"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"data_dir {repo_id} is neither a folder nor a dataset on the Hub") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{repo_id} on the Hub is no prepared set, as it has no {MANIFEST}") from error


@dataclass
class PreparedConfig(datasets.BuilderConfig):
    """Which set to read.

    Attributes:
        data_dir: The folder that `prepare.py --out` named, the id of a repository on the Hub, or an address.
        audio_dir: Where the recordings of a set of storage "reference" are; needed when they have moved.
        revision: A branch, tag or commit of the Hub's repository.
    """

    data_dir: str | None = None
    audio_dir: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prepared = PreparedSet(self.data_dir, self.audio_dir, self.revision)

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Keys the cache on the manifest, which names every shard by its hash, and on where the recordings are."""
        made_of = {"manifest": self.prepared.digest, "audio_dir": self.prepared.audio_root()}
        return super().create_config_id({**config_kwargs, **made_of}, custom_features)


class Prepared(datasets.ArrowBasedBuilder):
    """A prepared set as rows, with the splits that it was prepared with.

    `load_dataset("parquet")` reads the shards too, by the card. It does not compare them with the manifest, and knows
    nothing of the recordings of a reference set.
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
        """The dataset that the set was prepared from."""
        return self.config.prepared.manifest["dataset"]

    def report(self) -> dict[str, Any]:
        """What the set lacks, as its manifest has it: "missing", and "left_out" by reason."""
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
            arguments = {
                "files": paths if prepared.is_local else dl_manager.download(paths),
                "sizes": [shard["bytes"] for shard in about["shards"]],
                "root": prepared.audio_root(),
            }
            generators.append(datasets.SplitGenerator(name=split, gen_kwargs=arguments))
        return generators

    def _generate_tables(
        self, files: list[str], sizes: list[int], root: str | None
    ) -> Iterator[tuple[Key, pyarrow.Table]]:
        for number, (path, size) in enumerate(zip(files, sizes, strict=True)):
            found = os.path.getsize(path)
            if found != size:
                raise ValueError(f"{path} has {found} bytes, the manifest says {size}; copy the set again")

            shard = pyarrow.parquet.ParquetFile(path)
            for group in range(shard.num_row_groups):
                table = with_absolute_paths(shard.read_row_group(group), root)
                yield Key(number, group), table.cast(self.info.features.arrow_schema)


def with_absolute_paths(table: pyarrow.Table, root: str | None) -> pyarrow.Table:
    """Makes the paths of rows that only refer to their recordings absolute again; of rows that hold them, none."""
    if root is None:
        return table
    place = table.column_names.index("audio_path")
    paths = pyarrow.compute.binary_join_element_wise(root, table.column(place), os.sep)
    return table.set_column(place, "audio_path", paths)
