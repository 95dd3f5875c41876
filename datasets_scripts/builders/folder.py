"""Base classes of the dataset builders: collect clips, convert them to rows, cache the rows, and report missing clips.

To add a dataset, write a config class with the names of its metadata files, a builder class with a `collect` method,
and add an entry to `_BUILDERS` in `datasets_scripts/__init__.py`. `clotho.py` is a short example.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import datasets

from modeling_supclap.hub_ids import is_hub_id
from modeling_supclap.languages import LANGUAGES

from ..atomic_files import write_json
from ..audio_files import SUFFIXES, walk
from ..remote_files import local_folder
from ..schema import CHANNEL, Event, features
from ..splits import SPLITS, connect, hash_copies, warn_of_shared
from . import metadata
from .captions import check_languages
from .columns import clean_texts, warn_once
from .recordings import Recordings, Segment, listing

REPORT_NAME = "report.json"  # the saved `RowBuilder.report`, in the cache folder of the rows
ENGLISH = LANGUAGES[0]
_SHOWN_NAMES = 5  # missing or excluded clips to name in the log; more of them are counted
_LEAST = {"limit": 1, "duration_seconds": 1, "sampling_rate_hz": 16000}
_LEAST |= dict.fromkeys(("num_train", "num_validation", "num_test", "seed"), 0)
"""Least values of the fields of all configs."""


class Clip(NamedTuple):
    """Clip with the fields of `schema.Row`. `captions` may omit languages without captions."""

    clip_id: str
    captions: Mapping[str, Sequence[str]]
    source: str
    license: str
    labels: Sequence[str] = ()
    events: Sequence[Event] = ()
    audio_path: str = ""
    start_seconds: float | None = None
    end_seconds: float | None = None

    @property
    def audio(self) -> tuple[str, float | None, float | None]:
        """File of the clip, and the part of it that is the clip."""
        return self.audio_path, self.start_seconds, self.end_seconds


def youtube_clip(segment: Segment, captions: Mapping[str, Sequence[str]], labels: Sequence[str] = ()) -> Clip:
    """Return the clip of a YouTube video. Its licence is unknown, because each uploader chooses one per video."""
    return Clip("{}_{}".format(*segment), captions, f"youtube:{segment[0]}", "unknown (YouTube)", labels)


@dataclass
class Collection:
    """Clips of a dataset by split, all labels, names of missing recordings, and ids of excluded clips by reason."""

    clips: dict[str, list[Clip]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    missing: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    _ids: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def add(self, split: str, clip: Clip, name: str, path: Path | None) -> None:
        """Add a clip to a split, without its blank captions.

        If the clip is a duplicate or has no captions, only its id is added to `left_out`. If `path` is None (no audio
        file), only `name`, the name of the recording in the metadata, is added to `missing`.
        """
        captions = {language: clean_texts(texts) for language, texts in clip.captions.items()}
        if (split, clip.clip_id) in self._ids:
            self.leave_out("duplicate", clip.clip_id)
        elif not any(captions.values()):
            self.leave_out("empty caption", clip.clip_id)
        elif path is None:
            self.missing.append(name)
        else:
            self.clips[split].append(clip._replace(captions=captions, audio_path=str(path)))

        self.labels.update(clip.labels)
        self._ids.add((split, clip.clip_id))

    def leave_out(self, reason: str, *clip_ids: str) -> None:
        """Record clips as excluded for the given reason."""
        if clip_ids:
            self.left_out.setdefault(reason, []).extend(clip_ids)

    def keep_apart(self, name: str, keeps_splits: bool = False) -> None:
        """Remove clips with several ids and one audio file, or the same part of it, which contains one of them at most.

        Then remove clips from a split if a later split (in the order train, validation, test) has the same source,
        recording or content. With `keeps_splits`, the counts of these clips are only logged, for the dataset `name`.
        """
        counts = Counter(audio for audio, _ in {(clip.audio, clip.clip_id) for clip in chain(*self.clips.values())})
        self._drop("one file for several clips", [counts[clip.audio] > 1 for clip in chain(*self.clips.values())])

        clips = list(chain(*self.clips.values()))
        splits = list(chain(*([split] * len(of_split) for split, of_split in self.clips.items())))
        groups = group_clips(clips)
        if keeps_splits:
            warn_of_shared(name, splits, groups, (chain(*clip.captions.values()) for clip in clips))
            return
        last = dict(zip(groups, splits, strict=True))  # clips are in the order of the splits
        self._drop(
            "source in another split", [split != last[group] for split, group in zip(splits, groups, strict=True)]
        )

    def _drop(self, reason: str, unwanted: Iterable[bool]) -> None:
        flags = iter(unwanted)
        for split, clips in self.clips.items():
            dropped = [next(flags) for _ in clips]
            self.leave_out(reason, *(clip.clip_id for clip in compress(clips, dropped)))
            self.clips[split] = [clip for clip, is_dropped in zip(clips, dropped, strict=True) if not is_dropped]


def group_clips(clips: Sequence[Clip]) -> list[int]:
    """Return the group of each clip: clips of one source, of one recording or of equal recordings (see `connect`)."""
    paths = [clip.audio_path for clip in clips]
    return connect([clip.source for clip in clips], [path or None for path in paths], hash_copies(paths))


@dataclass
class RowConfig(datasets.BuilderConfig):
    """Options common to all datasets.

    Attributes:
        languages: Caption languages, the anchor language first. For a language that is not in the dataset, the caption
            lists are empty.
        limit: Maximum number of clips per split; the first ones are used. None: all clips.
        channel: Channel of each recording to use, from 0. None: the mean of all channels.
    """

    DATASET: ClassVar[str] = "this dataset"

    languages: Sequence[str] = LANGUAGES
    limit: int | None = None
    channel: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_languages()
        for name, least in _LEAST.items():
            value = getattr(self, name, None)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")

    def check_languages(self) -> None:
        """Check `languages` and convert it to a tuple; raise ValueError if the dataset does not support a language."""
        self.languages = check_languages(self.languages)

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of the code and the input files for the cache key, as `{name: hash}`."""
        return {"code": metadata.code_fingerprint()}

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Return the cache key. It includes all fingerprints, because `datasets` does not detect changed files."""
        return super().create_config_id({**config_kwargs, **self.fingerprints()}, custom_features)


@dataclass
class FolderConfig(RowConfig):
    """Location of a dataset with metadata files and audio files, in addition to `RowConfig`.

    Attributes:
        data_dir: Folder with the metadata and, unless `audio_dir` is set, the audio. A Hub dataset id with the same
            files, such as "user/name", or an fsspec address of the folder, such as "s3://bucket/name", is downloaded.
        audio_dir: Folder with the audio files, or its fsspec address. Its sub-folders may have any names.
        revision: Branch, tag or commit of the Hub repository.
    """

    LAYOUT: ClassVar[str] = "the folder that contains it"
    TABLES: ClassVar[Mapping[str, Sequence[str]]] = {}  # key, such as a split -> possible file names
    REQUIRED: ClassVar[Sequence[str]] = ()  # keys of tables without which the others cannot be read
    ENGLISH_ONLY: ClassVar[bool] = True
    has_segments: ClassVar[Any] = False  # whether rows may be parts of recordings

    data_dir: str | None = None
    audio_dir: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:
            raise ValueError(f"{self.DATASET} requires data_dir: {self.LAYOUT}, or a Hub dataset with these files")

    def check_languages(self) -> None:
        """Check `languages`. If the dataset has only English captions, `languages` must include English."""
        super().check_languages()
        if self.ENGLISH_ONLY and ENGLISH not in self.languages:
            raise ValueError(f"languages is {list(self.languages)}; {self.DATASET} has English captions: add 'eng'")

    @cached_property
    def folder(self) -> Path:
        """Folder with the metadata; downloads the dataset from the Hub or an address if necessary."""
        name = str(self.data_dir)
        folder = local_folder(name).resolve()
        if folder.is_dir():
            return folder
        if "/" not in name or not is_hub_id(name):
            raise FileNotFoundError(f"data_dir {folder} is not a folder; set it to {self.LAYOUT}")

        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", revision=self.revision))
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise FileNotFoundError(
                f"data_dir {folder} is not a folder, and {name} could not be downloaded from the Hub; set it to "
                f"{self.LAYOUT}"
            ) from error

    @cached_property
    def files(self) -> list[str]:
        """Relative paths of all files in `folder`."""
        return walk(self.folder)

    @cached_property
    def recordings(self) -> Recordings:
        """Audio files in `audio_dir`, or in `folder` by default."""
        if self.audio_dir is not None:
            return Recordings(local_folder(self.audio_dir))
        return Recordings(self.folder, self.files)

    def find(self, names: Mapping[str, Sequence[str]]) -> dict[str, Path]:
        """Return the existing metadata files as `{key: path}`; `names` is `{key: possible file names}`."""
        paths = {key: metadata.find_metadata(self.folder, self.files, *of_key) for key, of_key in names.items()}
        return {key: path for key, path in paths.items() if path is not None}

    def tables(self) -> dict[str, Path]:
        """Return the existing tables as `{key in TABLES: path}`."""
        return self.require(self.TABLES, self.REQUIRED)

    def require(self, names: Mapping[str, Sequence[str]], required: Iterable[str] = ()) -> dict[str, Path]:
        """Find metadata files (see `find`). Raise FileNotFoundError without a `required` one, or without others."""
        paths = self.find(names)
        if not paths.keys() >= set(required) or paths.keys() == set(required) != names.keys():
            missing = ", ".join(of_key[0] for key, of_key in names.items() if key not in paths)
            raise FileNotFoundError(f"{self.folder} lacks {missing}; set data_dir to {self.LAYOUT}")
        return paths

    def metadata_files(self) -> list[Path]:
        """Return the paths of all metadata files that the builder reads."""
        return list(self.tables().values())

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of the code, the metadata files and the names, sizes and times of the audio files."""
        return {
            **super().fingerprints(),
            "metadata": metadata.fingerprint(self.metadata_files()),
            "audio": self.recordings.fingerprint(),
        }


class RowBuilder(datasets.GeneratorBasedBuilder):
    """Base class of the dataset builders; subclasses implement `collect`."""

    # `Dataset.from_generator` would be shorter, but its cache does not detect changes of the code or the tables.

    VERSION = "1.0.0"
    BUILDER_CONFIG_CLASS = RowConfig
    NAMINGS: ClassVar[Sequence[str]] = ("the names in the metadata",)
    KEEPS_SPLITS: ClassVar[bool] = False  # whether splits of the user are kept, even if they share recordings

    def collect(self) -> Collection:
        """Read the metadata, find the audio files, and return the usable, missing and excluded clips."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """Return the names of missing recordings and the ids of excluded clips.

        The result is `{"missing": [name, ...], "left_out": {reason: [clip id, ...]}}`, with names from the metadata and
        reasons such as "blacklist", "duplicate" or "empty caption".
        """
        if self._report_path.is_file():
            return metadata.read_json(self._report_path)
        return {"missing": self._collection.missing, "left_out": self._collection.left_out}

    @property
    def labels(self) -> set[str]:
        """Labels of all clips in the metadata, also of those without a row. The metadata are read again."""
        return self._collection.labels

    def download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the rows (see `datasets.DatasetBuilder`), and save the report in the cache folder of the rows."""
        super().download_and_prepare(*args, **kwargs)

        report, path = self.report(), self._report_path
        if path.parent.is_dir() and not path.is_file():
            write_json(path, report)

        without = {"audio missing": report["missing"], **report["left_out"]}
        counts = []
        for reason, names in without.items():
            shown = f" ({', '.join(names)})" if len(names) <= _SHOWN_NAMES else ""
            if names:
                counts.append(f"{len(names):,} {reason}{shown}")
        if counts:
            lists = path if path.is_file() else "report()"
            warn_once(f"{self.config.DATASET}: clips without a row: {', '.join(counts)}; listed in {lists}")

    @property
    def _report_path(self) -> Path:
        return Path(str(self.cache_dir), REPORT_NAME)

    @cached_property
    def _collection(self) -> Collection:
        collection = self.collect()
        if hasattr(self.config, "folder"):  # generated sounds have none
            collection.keep_apart(self.config.DATASET, self.KEEPS_SPLITS)
        if not any(collection.clips.values()):
            self._raise_empty(collection)
        for clips in collection.clips.values():
            del clips[self.config.limit or len(clips) :]
        return collection

    def _raise_empty(self, collection: Collection) -> None:
        config = self.config
        if not collection.missing:
            counts = {reason: len(clip_ids) for reason, clip_ids in collection.left_out.items()}
            source = getattr(config, "folder", "the configuration")  # generated sounds have no folder
            raise ValueError(f"{config.DATASET}: no clips left in {source}: {counts or 'it lists none'}")

        folder, files = config.recordings.folder, config.recordings.files
        advice = ""
        if "://" in collection.missing[0]:
            advice = "The addresses in a table are not opened; download them, or use `supclap embed --table`. "
        raise FileNotFoundError(
            f"{config.DATASET}: {folder} contains {listing(files, 3) if files else 'no audio'}, and none of the "
            f"{len(collection.missing):,} recordings, such as {collection.missing[0]}. {advice}"
            f"Searched for {', '.join(self.NAMINGS)} with the suffixes {', '.join(SUFFIXES)}"
        )

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=self._features())

    def _features(self) -> datasets.Features:
        has_segments, channel = getattr(self.config, "has_segments", False), self.config.channel
        return features(self.config.languages, has_segments, channel is not None)

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        # Collect here because `datasets` replaces errors in `_generate_examples` by a generic error.
        splits = [split for split, clips in self._collection.clips.items() if clips]
        return [datasets.SplitGenerator(name=split, gen_kwargs={"split": split}) for split in splits]

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        languages = self.config.languages
        for clip in self._collection.clips[split]:
            captions = {language: clip.captions.get(language, ()) for language in languages}
            row = clip._replace(captions=captions)._asdict()
            row[CHANNEL] = self.config.channel
            yield clip.clip_id, {name: row[name] for name in self.info.features}
