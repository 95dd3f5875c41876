"""What all builders share: from clips that were collected to rows, a cache that notices changes, a report.

A dataset adds a config that says what its metadata files are called, a builder whose `collect` says which clips there
are, and a line in the table of `datasets_scripts/__init__.py`; see `clotho.py` for a short one.

`Dataset.from_generator` would be less code, but it keys its cache on the name of an imported generator and not on what
the generator does, so that rows made by older code, or of tables that have changed since, would come back unnoticed.
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
"""The file beside the prepared rows that holds what `RowBuilder.report` gives."""

ENGLISH = LANGUAGES[0]


class Clip(NamedTuple):
    """What a row is made of; the fields are the row's, and a language without captions may be left out."""

    clip_id: str
    captions: Mapping[str, Sequence[str]]
    source: str
    license: str
    labels: Sequence[str] = ()
    events: Sequence[Event] = ()
    audio_path: str = ""


@dataclass
class Collection:
    """What there is of a dataset, and what is not there.

    Attributes:
        clips: The clips of each split that have audio and captions.
        missing: The recordings that the metadata name and the folder lacks, as the metadata name them.
        left_out: The ids of the clips that are left out, by reason.
    """

    clips: dict[str, list[Clip]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    missing: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    _ids: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def add(self, split: str, clip: Clip, name: str, path: Path | None) -> None:
        """Takes a clip into a split, or notes why not.

        Args:
            split: One of `SPLITS`.
            clip: The clip; blank captions are dropped, and without any other it is left out, as it is the second time.
            name: Its recording, as the metadata name it.
            path: Its recording; None where there is none.
        """
        captions = {language: written(texts) for language, texts in clip.captions.items()}
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
        """Notes clips that get no row, if there are any."""
        if clip_ids:
            self.left_out.setdefault(reason, []).extend(clip_ids)

    def keep_sources_apart(self) -> None:
        """Leaves clips out of training, and then of validation, whose source is in a split that comes later."""
        later: set[str] = set()
        for split in reversed(SPLITS):
            self._drop(split, "source in another split", later)
            later.update(map(attrgetter("source"), self.clips[split]))

    def keep_files_apart(self) -> None:
        """Leaves out clips that were found in the same file: it is the wrong one for all of them but one."""
        seen: set[str] = set()
        shared: set[str] = set()
        for clip in itertools.chain(*self.clips.values()):
            (shared if clip.audio_path in seen else seen).add(clip.audio_path)
        for split in SPLITS:
            self._drop(split, "one file for several clips", shared)

    def _drop(self, split: str, reason: str, unwanted: set[str]) -> None:
        """Leaves out the clips of a split whose source or file is unwanted."""
        if not unwanted:
            return

        kept = []
        for clip in self.clips[split]:
            if clip.source in unwanted or clip.audio_path in unwanted:
                self.leave_out(reason, clip.clip_id)
            else:
                kept.append(clip)
        self.clips[split] = kept


def written(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts that are not blank, without the space around them."""
    return tuple(filter(None, map(str.strip, texts)))


def draw_sources(sources: Iterable[str], counts: Mapping[str, int], seed: int) -> dict[str, str]:
    """Draws recordings for the splits that are held out, by a hash of each: the same whatever their order.

    Args:
        sources: The recordings; repeats count once.
        counts: How many of them each split but train gets; together they may be all of them, and no more.
        seed: The seed of the draw.

    Returns:
        The split by source; "train" for those that were not drawn.
    """
    order = sorted(set(sources), key=lambda source: hashlib.sha256(f"{seed}:{source}".encode()).digest())
    if sum(counts.values()) > len(order):
        raise ValueError(f"{dict(counts)} are to be held out of {len(order)} recordings; hold out fewer")

    splits: list[str] = []
    for split in reversed(SPLITS):
        splits += [split] * counts.get(split, 0)
    return dict.fromkeys(order, "train") | dict(zip(order, splits, strict=False))


@dataclass
class RowConfig(datasets.BuilderConfig):
    """What every dataset can be asked for.

    Attributes:
        languages: The caption languages, the anchor first; those that the dataset lacks get empty lists.
        limit: How many clips to take of each split, the first ones; None takes all.
    """

    DATASET: ClassVar[str] = "this dataset"

    languages: Sequence[str] = LANGUAGES
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_languages()
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; give at least 1, or None for all clips")

    def check_languages(self) -> None:
        """Raises ValueError where `languages` are none that the dataset can have."""
        self.languages = check_languages(self.languages)

    def made_of(self) -> dict[str, str]:
        """Hashes of what the rows are made of besides the config: they key the cache."""
        return {"code": metadata.code_fingerprint()}

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Keys the cache on code and files too: `datasets` alone would give old rows after they have changed."""
        return super().create_config_id({**config_kwargs, **self.made_of()}, custom_features)


@dataclass
class FolderConfig(RowConfig):
    """Where a dataset is and what to take of it; see also `RowConfig`.

    Attributes:
        data_dir: The folder that holds the metadata and, unless `audio_dir` says otherwise, the audio; or the id of a
            dataset repository of the Hub that holds the same files, such as "user/name", which is downloaded.
        audio_dir: The folder that holds the audio, in whatever sub-folders.
        revision: A branch, tag or commit of the Hub's repository.
    """

    LAYOUT: ClassVar[str] = "the folder that holds it"
    TABLES: ClassVar[Mapping[str, Sequence[str]]] = {}
    """What the metadata files are of, such as splits, and the names that each may have."""

    ENGLISH_ONLY: ClassVar[bool] = True
    """Whether the dataset comes with captions in English; else they are written in any language of the phrases."""

    READS_HEADERS: ClassVar[bool] = False
    """Whether rows say how long the recordings are, so that other recordings of the same names make other rows."""

    data_dir: str | None = None
    audio_dir: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:
            raise ValueError(f"{self.DATASET} needs data_dir: {self.LAYOUT}, or a dataset of the Hub like it")

    def check_languages(self) -> None:
        """Raises ValueError where `languages` are none that the dataset can have."""
        super().check_languages()
        if self.ENGLISH_ONLY and ENGLISH not in self.languages:
            raise ValueError(
                f"languages is {list(self.languages)}; {self.DATASET} has English captions, so name {ENGLISH!r}"
            )

    @cached_property
    def folder(self) -> Path:
        """The folder with the metadata, downloaded first where it is on the Hub."""
        folder = Path(str(self.data_dir)).expanduser().resolve()
        if folder.is_dir():
            return folder
        if "/" not in str(self.data_dir) or not is_hub_id(self.data_dir):
            raise FileNotFoundError(f"data_dir {folder} is not a folder; give {self.LAYOUT}")

        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            path = huggingface_hub.snapshot_download(str(self.data_dir), repo_type="dataset", revision=self.revision)
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise FileNotFoundError(
                f"data_dir {folder} is not a folder, and the Hub's dataset {self.data_dir} could not be downloaded: "
                f"give {self.LAYOUT}"
            ) from error
        return Path(path)

    @cached_property
    def files(self) -> list[str]:
        """The files in `folder`, as relative paths."""
        return walk(self.folder)

    @cached_property
    def recordings(self) -> Recordings:
        """The audio."""
        return Recordings(self.folder, self.files) if self.audio_dir is None else Recordings(self.audio_dir)

    def find(self, names: Mapping[str, Sequence[str]]) -> dict[str, Path]:
        """The metadata files of these names, by key, of those that are there."""
        found = {}
        for key, of_key in names.items():
            path = metadata.find_metadata(self.folder, self.files, *of_key)
            if path is not None:
                found[key] = path
        return found

    def tables(self) -> dict[str, Path]:
        """The metadata files by the keys of `TABLES`, of those that are there; one must be."""
        found = self.find(self.TABLES)
        if not found:
            names = list(map(itemgetter(0), self.TABLES.values()))
            raise FileNotFoundError(f"{self.folder} lacks {', '.join(names)}; give {self.LAYOUT}")
        return found

    def metadata_files(self) -> list[Path]:
        """The files that the rows are made of besides the audio, all those that the dataset cannot do without."""
        return list(self.tables().values())

    def made_of(self) -> dict[str, str]:
        """Hashes of what the rows are made of besides the config: they key the cache."""
        return {
            **super().made_of(),
            "metadata": metadata.fingerprint(self.metadata_files()),
            "audio": self.recordings.fingerprint(sizes=self.READS_HEADERS),
        }


class RowBuilder(datasets.GeneratorBasedBuilder):
    """Rows of a dataset, which says in `collect` what clips it has, as of any builder of `datasets`.

    `Clotho(data_dir="clotho").download_and_prepare()`, then `.as_dataset(split="train")`; or `load_splits`.

    Clips whose audio is missing are normal: they get no row, one warning counts them, `report` lists them.
    """

    VERSION = "1.0.0"
    BUILDER_CONFIG_CLASS = RowConfig
    HOMEPAGE: ClassVar[str] = ""
    NAMINGS: ClassVar[Sequence[str]] = ("the names in the metadata",)

    def collect(self) -> Collection:
        """Reads the metadata and finds the audio: all clips, the missing ones and those that are left out."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """Says what there is no row for; needs no prepared rows, and reads what was noted where there are some.

        Returns:
            "missing": the recordings that the metadata name and the folder lacks, as the metadata name them;
            "left_out": the ids of the clips that were left out by reason, such as "blacklist", "duplicate" or
            "empty caption".
        """
        path = self._report_path
        if path.is_file():
            return metadata.read_json(path)
        return {"missing": self._collection.missing, "left_out": self._collection.left_out}

    def download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Prepares the rows as `datasets` does, and writes the report beside rows that go to the cache."""
        super().download_and_prepare(*args, **kwargs)

        report, path = self.report(), self._report_path
        if path.parent.is_dir() and not path.is_file():
            write_json(path, report)

        without = {"audio missing": report["missing"], **report["left_out"]}
        counts = [f"{len(clip_ids):,} {reason}" for reason, clip_ids in without.items() if clip_ids]
        if counts:
            told, where = ", ".join(counts), path if path.is_file() else "what report() gives"
            logger.warning("%s: clips without a row: %s; the lists are in %s", self.config.DATASET, told, where)

    @property
    def _report_path(self) -> Path:
        return Path(str(self.cache_dir), REPORT_NAME)

    @cached_property
    def _collection(self) -> Collection:
        collection = self.collect()
        collection.keep_sources_apart()  # first: a clip that two splits list shares its file with itself
        collection.keep_files_apart()

        if not any(collection.clips.values()):
            self._refuse_empty(collection)
        for clips in collection.clips.values():
            del clips[self.config.limit or len(clips) :]
        return collection

    def _refuse_empty(self, collection: Collection) -> None:
        """Says why no clip has a row."""
        config = self.config
        if not collection.missing:
            counts = dict(zip(collection.left_out, map(len, collection.left_out.values()), strict=True))
            raise ValueError(f"{config.DATASET}: no clip of {config.folder} is left: {counts or 'it lists none'}")

        files = config.recordings.files
        raise FileNotFoundError(
            f"{config.DATASET}: none of the {len(collection.missing):,} recordings, such as {collection.missing[0]}, "
            f"is in {config.recordings.folder}, which holds {some(files, 3) if files else 'no audio'}. "
            f"Tried {', '.join(self.NAMINGS)} with {', '.join(SUFFIXES)}"
        )

    def _info(self) -> datasets.DatasetInfo:
        about = (sys.modules[type(self).__module__].__doc__ or "").partition("\n")[0]
        types = features(self.config.languages)
        return datasets.DatasetInfo(description=about, homepage=self.HOMEPAGE, features=types)

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        # Collected here and not per clip: errors raised while generating reach the user wrapped in one that says
        # nothing.
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
