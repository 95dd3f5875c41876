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
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet
from datasets.builder import Key

MANIFEST = "manifest.json"
ROOT_NOTE = ".prepare/audio_root"
"""Says on this machine, and is never pushed, where the recordings of a set are that holds none."""

FORMAT = 2
"""The format of the folder; a set of another format than this is refused."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Args:
        folder: What `prepare.py --out` named.

    Returns:
        What `manifest.json` says: "splits" (clips, seconds, captions by language, shards), "storage", "options",
        "bad_audio", "missing", "left_out" and more.

    Raises:
        FileNotFoundError: The folder is no prepared set, or its preparation did not finish.
        ValueError: It is of another format.
    """
    path = Path(folder, MANIFEST)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no prepared set, as it holds no {MANIFEST}; make one with prepare.py")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} is of format {manifest['format']}, this version reads {FORMAT}; prepare the set again"
        )
    return manifest


def origin_of(data_dir: str | Path, revision: str | None = None) -> str:
    """The dataset that a set was prepared from, such as "esc50", by whose name `captions.label_phrases` goes.

    Args:
        data_dir: The folder, or the id of a repository on the Hub.
        revision: As `load_prepared`.
    """
    config = PreparedConfig(data_dir=str(data_dir), revision=revision)
    return read_manifest(_metadata_folder(config))["dataset"]


def dataset_origin(dataset: str, data_dir: str | Path | None, revision: str | None = None) -> str:
    """The dataset that rows come from: that of its name, or of a prepared set the one that it was prepared from.

    Args:
        dataset: A name that `load_splits` knows.
        data_dir: As `origin_of`.
        revision: As `load_prepared`.
    """
    return origin_of(str(data_dir), revision) if dataset == "prepared" else dataset


def load_prepared(
    data_dir: str | Path,
    streaming: bool = False,
    cache_dir: str | None = None,
    audio_dir: str | None = None,
    revision: str | None = None,
) -> datasets.DatasetDict | datasets.IterableDatasetDict:
    """All splits of a prepared set.

    Args:
        data_dir: The folder, or the id of a repository on the Hub.
        streaming: Reads shard by shard as rows are asked for, from the Hub too, and writes no cache. The rows are
            numbered within their split by `clip_index`, which the collators want and map-style rows get from
            `IndexedRows`. A run that is to be resumed exactly wants map-style rows.
        cache_dir: Where `datasets` keeps the memory-mapped rows; its own default when None.
        audio_dir: Where the recordings of a set of storage "reference" are; needed when they have moved.
        revision: A branch, tag or commit of the Hub's repository.

    Returns:
        Datasets by split, with the rows of `schema.py`; `audio.read_row` reads their sound.

    Raises:
        FileNotFoundError: There is no such set, or a shard or the recordings are missing.
        ValueError: A shard is not of the size that the manifest states.
    """
    config: dict[str, Any] = {"data_dir": str(data_dir), "audio_dir": audio_dir, "revision": revision}
    given = {name: value for name, value in config.items() if value is not None}
    builder = Prepared(cache_dir=cache_dir, numbered=streaming, **given)
    if streaming:
        return builder.as_streaming_dataset()
    builder.download_and_prepare()
    return builder.as_dataset()


@dataclass
class PreparedConfig(datasets.BuilderConfig):
    """Which set to read.

    Attributes:
        data_dir: The folder that `prepare.py --out` named, or the id of a repository on the Hub.
        audio_dir: Where the recordings of a set of storage "reference" are; needed when they have moved.
        revision: A branch, tag or commit of the Hub's repository.
        numbered: Adds `clip_index`, the place of each row in its split.
    """

    data_dir: str | None = None
    audio_dir: str | None = None
    revision: str | None = None
    numbered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:
            raise ValueError("a prepared set needs data_dir: its folder, or its id on the Hub")
        if Path(self.data_dir).expanduser().is_dir():
            self.data_dir = str(Path(self.data_dir).expanduser().resolve())
        elif not _HUB_ID.fullmatch(self.data_dir):
            raise FileNotFoundError(f"data_dir {self.data_dir} is neither a folder nor an id of the Hub")

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Keys the cache on the manifest, which names every shard by its hash, and on where the recordings are."""
        folder = _metadata_folder(self)
        root = _audio_root(self, read_manifest(folder))
        contents = hashlib.sha256(Path(folder, MANIFEST).read_bytes()).hexdigest()
        made_of = {"manifest": contents, "audio_dir": root}
        return super().create_config_id({**config_kwargs, **made_of}, custom_features)


class Prepared(datasets.ArrowBasedBuilder):
    """A prepared set as rows, with the splits that it was prepared with.

    `Prepared(data_dir="prepared").download_and_prepare()`, then `.as_dataset(split="train")`.
    """

    VERSION = "1.0.0"
    BUILDER_CONFIG_CLASS = PreparedConfig

    def _info(self) -> datasets.DatasetInfo:
        manifest = read_manifest(_metadata_folder(self.config))
        types = datasets.Features.from_dict(manifest["features"])
        if self.config.numbered:
            types["clip_index"] = datasets.Value("int64")
        return datasets.DatasetInfo(
            description=f"{manifest['dataset']}, prepared as {manifest['storage']}.", features=types
        )

    @property
    def origin(self) -> str:
        """The dataset that the set was prepared from."""
        return read_manifest(_metadata_folder(self.config))["dataset"]

    def report(self) -> dict[str, Any]:
        """What the set lacks, as its manifest has it: "missing", and "left_out" by reason."""
        manifest = read_manifest(_metadata_folder(self.config))
        left_out = dict(manifest["left_out"])
        bad = [entry["clip_id"] for entries in manifest["bad_audio"].values() for entry in entries]
        return {"missing": manifest["missing"], "left_out": {**left_out, "bad audio": bad} if bad else left_out}

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        config = self.config
        manifest = read_manifest(_metadata_folder(config))
        generators = []
        for split, about in manifest["splits"].items():
            shards = about["shards"]
            starts = [sum(shard["rows"] for shard in shards[:number]) for number in range(len(shards))]
            arguments = {
                "files": _locate(config, [shard["file"] for shard in shards], dl_manager),
                "starts": starts,
                "sizes": [shard["bytes"] for shard in shards],
                "root": _audio_root(config, manifest),
            }
            generators.append(datasets.SplitGenerator(name=split, gen_kwargs=arguments))
        return generators

    def _generate_tables(
        self, files: list[str], starts: list[int], sizes: list[int], root: str | None
    ) -> Iterator[tuple[Key, pyarrow.Table]]:
        for number, (path, start, size) in enumerate(zip(files, starts, sizes, strict=True)):
            with open(path, "rb") as file:
                if file.seek(0, os.SEEK_END) != size:
                    raise ValueError(f"{path} has {file.tell()} bytes, the manifest says {size}; copy the set again")
                file.seek(0)
                shard = pyarrow.parquet.ParquetFile(file)
                for group in range(shard.num_row_groups):
                    table = _located(shard.read_row_group(group), root)
                    if self.config.numbered:
                        places = pyarrow.array(range(start, start + len(table)), pyarrow.int64())
                        table = table.append_column("clip_index", places)
                    start += len(table)
                    yield Key(number, group), table.cast(self.info.features.arrow_schema)


def _located(table: pyarrow.Table, root: str | None) -> pyarrow.Table:
    """Makes the paths of a set that only refers to its recordings absolute again."""
    if root is None:
        return table
    place = table.column_names.index("audio_path")
    paths = [os.path.join(root, path) for path in table.column(place).to_pylist()]
    return table.set_column(place, "audio_path", pyarrow.array(paths, pyarrow.string()))


def _is_folder(config: PreparedConfig) -> bool:
    return os.path.isdir(str(config.data_dir))


def _metadata_folder(config: PreparedConfig) -> str:
    """Where the manifest is on this machine."""
    if _is_folder(config):
        return str(config.data_dir)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    try:
        path = hf_hub_download(str(config.data_dir), MANIFEST, repo_type="dataset", revision=config.revision)
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"data_dir {config.data_dir} is neither a folder nor a dataset on the Hub") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{config.data_dir} on the Hub is no prepared set, as it has no {MANIFEST}") from error
    return os.path.dirname(path)


def _locate(config: PreparedConfig, names: list[str], dl_manager: Any) -> list[str]:
    """The shards: files here, downloaded from the Hub where that is asked for, or addresses to stream from."""
    if _is_folder(config):
        paths = [os.path.join(str(config.data_dir), name) for name in names]
        missing = [path for path in paths if not os.path.isfile(path)]
        if missing:
            raise FileNotFoundError(f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}")
        return paths
    # The manifest's folder is named by its commit: all shards come from the same one.
    commit = os.path.basename(_metadata_folder(config))
    return dl_manager.download([f"hf://datasets/{config.data_dir}@{commit}/{name}" for name in names])


def _audio_root(config: PreparedConfig, manifest: dict[str, Any]) -> str | None:
    """Where the recordings are of a set that only refers to them; `None` for one that holds them."""
    if manifest["storage"] != "reference":
        return None

    places = [config.audio_dir] if config.audio_dir else []
    note = Path(str(config.data_dir), ROOT_NOTE)
    if not places and note.is_file():
        root = json.loads(note.read_text(encoding="utf-8"))
        beside = os.path.join(str(config.data_dir), root["relative"] or ".")
        places = [os.path.normpath(beside), root["absolute"] or ""]

    example = manifest["audio_example"]
    for place in places:
        if os.path.isfile(os.path.join(place, example)):
            return os.path.abspath(place)
    raise FileNotFoundError(f"the recording {example} is in none of {places}; say where it is with audio_dir")
