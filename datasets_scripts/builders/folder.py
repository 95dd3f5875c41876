"""Base classes of the builders: collect clips, convert them to rows, cache the rows and report missing clips.

To add a dataset, write a config with the names of its metadata files and a builder with `collect`, and add a line to
the table in `datasets_scripts/__init__.py`. `clotho.py` is a short example.

`Dataset.from_generator` would need less code, but its cache depends only on the name of an imported generator. After a
change of the code or the tables it would load outdated rows without notice.
"""

import hashlib
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import datasets

from modeling_supclap.hub_ids import is_hub_id

from ..atomic_files import write_json
from ..schema import LANGUAGES, Event, Row, features, validate_row
from . import metadata
from .captions import check_languages
from .recordings import SUFFIXES, Recordings, some, walk

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
REPORT_NAME = "report.json"
"""Name of the file with the result of `RowBuilder.report`, beside the prepared rows."""

ENGLISH = LANGUAGES[0]


class Clip(NamedTuple):
    """Content of a row. The fields are those of a row; languages without captions may be omitted."""

    clip_id: str
    captions: Mapping[str, Sequence[str]]
    source: str
    license: str
    labels: Sequence[str] = ()
    events: Sequence[Event] = ()
    audio_path: str = ""


@dataclass
class Collection:
    """The clips of a dataset, and the clips without a row.

    Attributes:
        clips: Clips with audio and captions, by split.
        missing: Names in the metadata of recordings without a file.
        left_out: Ids of the clips that get no row, by reason.
    """

    clips: dict[str, list[Clip]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    missing: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    _ids: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def add(self, split: str, clip: Clip, name: str, path: Path | None) -> None:
        """Add a clip to a split, or record why it gets no row.

        Args:
            split: One of `SPLITS`.
            clip: Clip to add. Blank captions are dropped; clips without captions and repeated clips are left out.
            name: Name of the recording in the metadata.
            path: Path of the recording; None if it is missing.
        """
        captions = {language: strip_texts(texts) for language, texts in clip.captions.items()}
        if (split, clip.clip_id) in self._ids:
            self.leave_out("duplicate", clip.clip_id)
        elif not any(captions.values()):
            self.leave_out("empty caption", clip.clip_id)
        elif path is None:
            self.missing.append(name)
        else:
            self.clips[split].append(clip._replace(captions=captions, audio_path=str(path)))

        self._ids.add((split, clip.clip_id))

    def leave_out(self, reason: str, *clip_ids: str) -> None:
        """Record clips that get no row; does nothing without clips."""
        if clip_ids:
            self.left_out.setdefault(reason, []).extend(clip_ids)

    def keep_sources_apart(self) -> None:
        """Remove clips from train and validation if a later split contains their source."""
        later: set[str] = set()
        for split in reversed(SPLITS):
            self._drop(split, "source in another split", later)
            later.update(map(attrgetter("source"), self.clips[split]))

    def keep_files_apart(self) -> None:
        """Remove clips that share a file with another clip, because at most one of them can be right."""
        seen: set[str] = set()
        shared: set[str] = set()
        for clip in itertools.chain(*self.clips.values()):
            (shared if clip.audio_path in seen else seen).add(clip.audio_path)
        for split in SPLITS:
            self._drop(split, "one file for several clips", shared)

    def _drop(self, split: str, reason: str, unwanted: set[str]) -> None:
        """Remove clips of a split if their source or file is in `unwanted`."""
        if not unwanted:
            return

        remaining = []
        for clip in self.clips[split]:
            if clip.source in unwanted or clip.audio_path in unwanted:
                self.leave_out(reason, clip.clip_id)
            else:
                remaining.append(clip)
        self.clips[split] = remaining


def strip_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Strip the texts and drop blank ones."""
    return tuple(filter(None, map(str.strip, texts)))


def draw_sources(sources: Iterable[str], counts: Mapping[str, int], seed: int) -> dict[str, str]:
    """Draw held-out recordings by a hash of each one, so that their order does not matter.

    Args:
        sources: Recordings; repeats count once.
        counts: Number of recordings of each split except train; the sum is at most the number of recordings.
        seed: Seed of the draw.

    Returns:
        Split by source; "train" for recordings that were not drawn.

    Raises:
        ValueError: The counts exceed the number of recordings.
    """
    order = sorted(set(sources), key=lambda source: hashlib.sha256(f"{seed}:{source}".encode()).digest())
    if sum(counts.values()) > len(order):
        raise ValueError(f"the counts {dict(counts)} exceed the {len(order)} recordings; hold out fewer")

    splits: list[str] = []
    for split in reversed(SPLITS):
        splits += [split] * counts.get(split, 0)
    return dict.fromkeys(order, "train") | dict(zip(order, splits, strict=False))


@dataclass
class RowConfig(datasets.BuilderConfig):
    """Options of every dataset.

    Attributes:
        languages: Caption languages, the anchor first; languages that the dataset lacks get empty lists.
        limit: Maximum number of clips per split, taken from its start; None takes all.
    """

    DATASET: ClassVar[str] = "this dataset"

    languages: Sequence[str] = LANGUAGES
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_languages()
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; expected at least 1, or None for all clips")

    def check_languages(self) -> None:
        """Raise a ValueError if the dataset does not support `languages`."""
        self.languages = check_languages(self.languages)

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of all inputs of the rows except the config, as part of the cache key."""
        return {"code": metadata.code_fingerprint()}

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Return the cache key, which includes code and files; by default `datasets` would not notice their changes."""
        return super().create_config_id({**config_kwargs, **self.fingerprints()}, custom_features)


@dataclass
class FolderConfig(RowConfig):
    """Location of a dataset; see also `RowConfig`.

    Attributes:
        data_dir: Folder with the metadata and, unless `audio_dir` is set, the audio; or the id of a dataset repository
            on the Hub with the same files, such as "user/name", which is downloaded.
        audio_dir: Folder with the audio; sub-folders may have any names.
        revision: Branch, tag or commit of the Hub repository.
    """

    LAYOUT: ClassVar[str] = "the folder that contains it"
    TABLES: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Possible names of each metadata file, by key; keys are splits, for example."""

    ENGLISH_ONLY: ClassVar[bool] = True
    """Whether the dataset comes with English captions; else captions are written in any language of the phrases."""

    READS_HEADERS: ClassVar[bool] = False
    """Whether rows depend on the length of the recordings; if so, the sizes of the files are part of the cache key."""

    data_dir: str | None = None
    audio_dir: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:
            raise ValueError(f"{self.DATASET} requires data_dir: {self.LAYOUT}, or a Hub dataset with these files")

    def check_languages(self) -> None:
        """Raise a ValueError if the dataset does not support `languages`."""
        super().check_languages()
        if self.ENGLISH_ONLY and ENGLISH not in self.languages:
            raise ValueError(
                f"languages is {list(self.languages)}; {self.DATASET} has English captions: add {ENGLISH!r}"
            )

    @cached_property
    def folder(self) -> Path:
        """Folder with the metadata, downloaded from the Hub if necessary."""
        folder = Path(str(self.data_dir)).expanduser().resolve()
        if folder.is_dir():
            return folder
        if "/" not in str(self.data_dir) or not is_hub_id(self.data_dir):
            raise FileNotFoundError(f"data_dir {folder} is not a folder; set it to {self.LAYOUT}")

        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            path = huggingface_hub.snapshot_download(str(self.data_dir), repo_type="dataset", revision=self.revision)
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise FileNotFoundError(
                f"data_dir {folder} is not a folder, and the dataset {self.data_dir} could not be downloaded from the "
                f"Hub; set it to {self.LAYOUT}"
            ) from error
        return Path(path)

    @cached_property
    def files(self) -> list[str]:
        """All files in `folder`, as relative paths."""
        return walk(self.folder)

    @cached_property
    def recordings(self) -> Recordings:
        """Audio files in `audio_dir`, or in `folder` by default."""
        return Recordings(self.folder, self.files) if self.audio_dir is None else Recordings(self.audio_dir)

    def find(self, names: Mapping[str, Sequence[str]]) -> dict[str, Path]:
        """Return the existing metadata files with one of the given names, by key."""
        found = {}
        for key, of_key in names.items():
            path = metadata.find_metadata(self.folder, self.files, *of_key)
            if path is not None:
                found[key] = path
        return found

    def tables(self) -> dict[str, Path]:
        """Return the existing metadata files by the keys of `TABLES`.

        Raises:
            FileNotFoundError: None of them exists.
        """
        found = self.find(self.TABLES)
        if not found:
            names = list(map(itemgetter(0), self.TABLES.values()))
            raise FileNotFoundError(f"{self.folder} lacks {', '.join(names)}; set data_dir to {self.LAYOUT}")
        return found

    def metadata_files(self) -> list[Path]:
        """Return all files that the rows depend on, except the audio."""
        return list(self.tables().values())

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of all inputs of the rows except the config, as part of the cache key."""
        return {
            **super().fingerprints(),
            "metadata": metadata.fingerprint(self.metadata_files()),
            "audio": self.recordings.fingerprint(sizes=self.READS_HEADERS),
        }


class RowBuilder(datasets.GeneratorBasedBuilder):
    """Base class of the builders; a subclass implements `collect`, the rest is the interface of `datasets`.

    `Clotho(data_dir="clotho").download_and_prepare()`, then `.as_dataset(split="train")`; or `load_splits`.

    Clips without audio are normal: they get no row, one warning counts them, and `report` lists them.
    """

    VERSION = "1.0.0"
    BUILDER_CONFIG_CLASS = RowConfig
    HOMEPAGE: ClassVar[str] = ""
    NAMINGS: ClassVar[Sequence[str]] = ("the names in the metadata",)

    def collect(self) -> Collection:
        """Read the metadata, find the audio, and return all clips with the missing and left-out ones."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """Return the clips without a row; before `download_and_prepare`, reads the metadata to find them.

        Returns:
            "missing": names in the metadata of recordings without a file; "left_out": ids of the left-out clips by
            reason, such as "blacklist", "duplicate" or "empty caption".
        """
        path = self._report_path
        if path.is_file():
            return metadata.read_json(path)
        return {"missing": self._collection.missing, "left_out": self._collection.left_out}

    def download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the rows as `datasets` does, and write the report beside cached rows."""
        super().download_and_prepare(*args, **kwargs)

        report, path = self.report(), self._report_path
        if path.parent.is_dir() and not path.is_file():
            write_json(path, report)

        without = {"audio missing": report["missing"], **report["left_out"]}
        counts = [f"{len(clip_ids):,} {reason}" for reason, clip_ids in without.items() if clip_ids]
        if counts:
            lists = path if path.is_file() else "report()"
            logger.warning("%s: clips without a row: %s; listed in %s", self.config.DATASET, ", ".join(counts), lists)

    @property
    def _report_path(self) -> Path:
        return Path(str(self.cache_dir), REPORT_NAME)

    @cached_property
    def _collection(self) -> Collection:
        collection = self.collect()
        collection.keep_sources_apart()  # first, else a clip in two splits would share its file with itself
        collection.keep_files_apart()

        if not any(collection.clips.values()):
            self._raise_empty(collection)
        for clips in collection.clips.values():
            del clips[self.config.limit or len(clips) :]
        return collection

    def _raise_empty(self, collection: Collection) -> None:
        """Raise the error of a dataset without rows, with the reason."""
        config = self.config
        if not collection.missing:
            counts = dict(zip(collection.left_out, map(len, collection.left_out.values()), strict=True))
            source = getattr(config, "folder", "the configuration")  # generated sounds have no folder
            raise ValueError(f"{config.DATASET}: no clips left in {source}: {counts or 'it lists none'}")

        files = config.recordings.files
        raise FileNotFoundError(
            f"{config.DATASET}: none of the {len(collection.missing):,} recordings, such as {collection.missing[0]}, "
            f"is in {config.recordings.folder}, which contains {some(files, 3) if files else 'no audio'}. "
            f"Searched for {', '.join(self.NAMINGS)} with the suffixes {', '.join(SUFFIXES)}"
        )

    def _info(self) -> datasets.DatasetInfo:
        about = (sys.modules[type(self).__module__].__doc__ or "").partition("\n")[0]
        types = features(self.config.languages)
        return datasets.DatasetInfo(description=about, homepage=self.HOMEPAGE, features=types)

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        # Collect here and not in `_generate_examples`, because `datasets` wraps errors from there in a generic one.
        splits = [split for split, clips in self._collection.clips.items() if clips]
        return [datasets.SplitGenerator(name=split, gen_kwargs={"split": split}) for split in splits]

    def _generate_examples(self, split: str) -> Iterator[tuple[str, Row]]:
        languages = self.config.languages
        for clip in self._collection.clips[split]:
            row: Row = {
                "clip_id": clip.clip_id,
                "audio_path": clip.audio_path,
                "captions": {language: list(clip.captions.get(language, ())) for language in languages},
                "labels": list(clip.labels),
                "events": list(clip.events),
                "source": clip.source,
                "license": clip.license,
            }
            validate_row(row, languages)
            yield row["clip_id"], row
