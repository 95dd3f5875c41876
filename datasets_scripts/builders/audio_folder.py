"""Load any folder of recordings with captions, in the `audiofolder` layout of `datasets` or with text files.

    my_sounds/metadata.csv              file_name,caption
    my_sounds/rain.wav                  rain.wav,Heavy rain on a tin roof
    my_sounds/birds/dawn.flac           birds/dawn.flac,Birds sing at dawn

    splits = load_splits("audio_folder", data_dir="my_sounds", languages=["eng"])

The table is named `metadata` or `captions`; tables named `train`, `val` and `test` are the splits. If a column is named
by an option and the folder contains a single table, the table may have any name. Formats: CSV (with commas, semicolons
or tabs), TSV, JSON Lines, a JSON list, or Parquet. The column `file_name` contains paths relative to the table or to
the folder, or absolute paths. A file with several captions may have several lines. A caption column is required; all
other columns are optional. `columns.USUAL_NAMES` lists other names that are found:

- `caption`, `caption_1`, `caption_2`, ...: captions in the language `caption_language`. `captions`: a list, or a
  mapping from languages to a caption or a list of captions. `caption_fra` or `captions_fra`: captions in French; any
  ISO 639-3 code is possible. In CSV, lists and mappings are written as JSON.
- `split`: train, validation or test. Without this column, the names of the tables or of the sub-folders determine the
  splits. If there are no such names, validation and test recordings are sampled at random.
- `start_seconds` and `end_seconds`: the clip is this part of a recording. Columns such as `start` and `end`, `Begin
  Time (s)` and `End Time (s)`, `start_ms` and `end_ms`, or `onset` and `duration` are also found. Without a value, the
  clip starts or ends with the recording. All parts of one recording are in the same split.
- `label` or `labels`, `source`, `license`, `clip_id` and `events`: fields of the row. By default the source of a clip
  is its file name, and its id is its path.

If there is no table, `rain.txt` contains the captions of `rain.wav`, one per line, or a label track of Audacity. Tables
of Raven and BirdNET beside a recording, such as `rain.Table.1.selections.txt`, contain captions of its parts. Without
these, a table may also have the suffix .txt.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from modeling_supclap.languages import LANGUAGES

from ..audio_files import is_audio_name
from ..schema import FILE_SOURCE, SPLIT_NAMES
from ..splits import SPLITS, draw_splits
from .columns import ColumnOptions, Columns, Record, merge_captions, warn_once
from .folder import Clip, Collection, FolderConfig, RowBuilder, group_clips
from .metadata import LABEL_COLUMNS, TABLE_SUFFIXES, Line, read_table
from .recordings import listing

_TABLE_WORDS = {"metadata", "captions", "manifest"}
_UNREAD = (
    *TABLE_SUFFIXES,
    ".txt",
    ".arrow",
    ".gz",
    ".xlsx",
    ".xls",
    ".ods",
    ".textgrid",
    ".eaf",
)  # named if there is no table


@dataclass
class AudioFolderConfig(FolderConfig, ColumnOptions):
    """Options for a folder of recordings with captions: its location, and its splits. `FolderConfig` and
    `ColumnOptions` contain more options.

    Attributes:
        languages: Caption languages as ISO 639-3 codes, the anchor language first.
        validation_fraction: Fraction of recordings to sample for the validation split, at least one recording. Only
            used if the folder does not define its splits. 0: no validation split.
        encoding: Encoding of the tables and text files, such as "gb18030". By default UTF-8, UTF-16, or the encoding of
            Windows for one of the languages if the text is plausible in only one of them.
        test_fraction: Fraction of recordings to sample for the test split. Only used if the folder does not define its
            splits. 1: test on all recordings, without a validation split.
        seed: Random seed for the sampling.
    """

    DATASET = "this folder"
    LAYOUT = "the folder that contains the audio and metadata.csv, .tsv, .jsonl, .json or .parquet"
    ENGLISH_ONLY = False

    encoding: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        ColumnOptions.__post_init__(self)
        if self.test_fraction == 1:
            self.validation_fraction = 0.0
        if min(self.validation_fraction, self.test_fraction) < 0 or self.validation_fraction + self.test_fraction > 1:
            raise ValueError(
                f"validation_fraction is {self.validation_fraction} and test_fraction {self.test_fraction}; expected "
                "two numbers of at least 0 with a sum of at most 1"
            )

    def check_languages(self) -> None:
        """Raise ValueError if `languages` or `caption_language` are not ISO 639-3 codes, or if a code is repeated."""
        self.languages = (self.languages,) if isinstance(self.languages, str) else tuple(self.languages)
        are_codes = re.fullmatch("([a-z]{3} )+[a-z]{3}", " ".join([*self.languages, self.caption_language]))
        if not are_codes or len(set(self.languages)) < len(self.languages):
            raise ValueError(
                f"languages is {list(self.languages)} and caption_language {self.caption_language!r}; expected ISO "
                "639-3 codes such as 'eng', at least one, without repeats"
            )

    def find_tables(self) -> dict[str, str]:
        """Return the tables as `{relative path: name of the recording beside it}`; "": the table names recordings.

        Raises ValueError if one folder contains two tables of a split, and FileNotFoundError without a table or text.
        """
        for suffixes in (TABLE_SUFFIXES, (".txt",)):
            files = [file for file in self.files if file.lower().endswith(suffixes)]
            if tables := self._named_tables(files):
                return dict.fromkeys(tables, "")
            # A single table in the top folder may have any name; a text is a table only if its columns are set.
            on_top = [file for file in files if "/" not in file]
            is_only_table = suffixes == TABLE_SUFFIXES and files == on_top and not self._texts
            if len(on_top) == 1 and (self.columns or self.caption_columns or is_only_table):
                return {on_top[0]: ""}
            if self._texts:
                return self._texts
        others = [file for file in self.files if file.lower().endswith(_UNREAD)]
        hint = (
            f", only {listing(others, 3)}: save it as metadata in one of these formats, with a column caption"
            if others
            else ""
        )
        raise FileNotFoundError(
            f"{self.folder} contains neither a table metadata or captions, or train, val and test "
            f"({', '.join(TABLE_SUFFIXES)}), nor one table in the top folder, nor text files with the names of "
            f"recordings{hint}"
        )

    def _named_tables(self, files: Sequence[str]) -> list[str]:
        """Return the tables without a split in their name, or else those with one."""
        tables = {file: split for file in files if (split := _split_of_table(file)) is not None}
        of_splits = [file for file, split in tables.items() if split]
        chosen = [file for file, split in tables.items() if not split] or of_splits
        if chosen != of_splits and of_splits:
            warn_once(f"{self.folder}: only {listing(chosen)} is read, not {listing(of_splits)}; keep one kind")
        seen: dict[tuple[str, str], str] = {}
        for file in chosen:
            other = seen.setdefault((os.path.dirname(file), tables[file]), file)
            if other != file:
                kind = f"of the split {tables[file]} " if tables[file] else ""
                raise ValueError(f"{self.folder} has several tables {kind}in one folder: {other}, {file}; keep one")
        return chosen

    @cached_property
    def _texts(self) -> dict[str, str]:
        """The text files and tables with the name of a recording, as `{file: recording}`."""
        texts = {}
        for file in self.files:
            stem, suffix = os.path.splitext(file)
            if suffix.lower() in (".txt", ".csv", ".tsv"):
                # "rain.Table.1.selections.txt"
                while (path := self.recordings.at(stem)) is None and "." in os.path.basename(stem):
                    stem = os.path.splitext(stem)[0]
                if path is not None and is_audio_name(path.name):
                    texts[file] = os.path.relpath(path, self.recordings.folder)
        return texts

    @cached_property
    def tables_read(self) -> list[tuple[str, str, Columns, list[Line]]]:
        """Relative path, recording (see `find_tables`), columns and lines of each table that is not empty."""
        languages = {*self.languages, self.caption_language, *self.language_of_column.values()}
        own = ColumnOptions(caption_language=self.caption_language)
        tables = []
        for table, recording in self.find_tables().items():
            lines = read_table(self.folder / table, languages, self.encoding, recording != "")
            names = dict.fromkeys(chain.from_iterable(line.values for line in lines))
            options = own if recording and set(names) <= set(LABEL_COLUMNS) else self
            try:
                columns = Columns(names, options, languages | {*LANGUAGES}, captioned=len(lines) > 0)
            except ValueError as error:
                raise ValueError(f"{self.folder / table}: {error}") from error
            tables.append((table, recording, columns, lines))
        return tables

    @cached_property
    def has_segments(self) -> bool:
        """Whether a table has columns of the start or the end of a clip in its recording."""
        return any(columns.has_parts for _, _, columns, _ in self.tables_read)

    def metadata_files(self) -> list[Path]:
        """Return the paths of the tables, or of the text files if there are no tables."""
        return [self.folder / file for file in self.find_tables()]


class AudioFolder(RowBuilder):
    """Builder for any folder of recordings with captions."""

    BUILDER_CONFIG_CLASS = AudioFolderConfig
    KEEPS_SPLITS = True

    def collect(self) -> Collection:
        """Return the recordings that have captions in a table or a text file."""
        config, collection = self.config, Collection()
        paths, of_folder, records = read_records(config)
        clips: dict[str, Clip] = {}
        names: list[str] = []  # recording of each clip
        given: list[str] = []  # split of each clip, "" if it is unknown
        for (name, start, end), lines in records.items():
            fields = {
                field: merge(field, name, lines) for field in ("source", "license", "clip_id", "events", "split")
            }
            part = "" if start is end is None else f":{_seconds(start)}-{_seconds(end)}"
            clip_id, path = fields["clip_id"] or f"{name}{part}", paths[name]
            if clip_id in clips:
                other = names[list(clips).index(clip_id)]
                raise ValueError(f"{lines[0]['where']}: {other!r} and {name!r} have the same clip_id {clip_id!r}")
            captions = merge_captions([line["captions"] for line in lines], config.languages)
            labels = list(dict.fromkeys(chain.from_iterable(line["labels"] for line in lines)))
            audio = ("" if path is None else str(path), start, end)
            about = fields["source"] or f"{FILE_SOURCE}{name}", fields["license"], labels, fields["events"]
            clips[clip_id] = Clip(clip_id, captions, *about, *audio)
            names.append(name)
            given.append(fields["split"] or of_folder[name])

        splits = choose_splits(config, list(clips.values()), given)
        for name, clip, split in zip(names, clips.values(), splits, strict=True):
            collection.add(split, clip, name, paths[name])
        used = {os.path.relpath(path, config.recordings.folder) for path in paths.values() if path is not None}
        collection.leave_out("no caption", *(file for file in config.recordings.files if file not in used))
        return collection


def _seconds(time: float | None) -> str:
    return "" if time is None else f"{time:g}"


Records = dict[tuple[str, float | None, float | None], list[Record]]
"""Lines of each clip, by the name of its recording and the part that is the clip."""


def read_records(config: AudioFolderConfig) -> tuple[dict[str, Path | None], dict[str, str], Records]:
    """Read all tables. Return the path of each recording by its name (None: it is missing), the split in the names of
    its folders, and the lines of each clip.

    The name of a recording in the folder is its relative path. Raises ValueError if no caption is in `languages`.
    """
    rows: list[tuple[str, str, Record]] = []
    present: set[str] = set()
    for table, recording, columns, lines in config.tables_read:
        for where, values in lines:
            record = columns.read(values, where)
            if record["split"] not in ("", *SPLITS):
                raise ValueError(f"{where}: the split is {record['split']!r}; expected one of {', '.join(SPLITS)}")
            if not recording:
                record["split"] = record["split"] or _split_of_table(table) or ""
            name = recording or str(values.get(columns.of_field.get("file_name", "file_name")) or "").strip()
            if not name:
                raise ValueError(
                    f"{where} has no file_name; remove the line if it is a note, or set audio_column to one of "
                    f"{columns.names}, which are in the first line of the table"
                )
            rows.append((os.path.dirname(table), name.replace("\\", "/"), record))
            present.update(language for language, texts in record["captions"].items() if texts)
        columns.warn_of_placeholders(table)
    if present and not present & set(config.languages):
        raise ValueError(
            f"{config.folder} has captions in {sorted(present)}, but languages is {list(config.languages)}: change it, "
            f"or set --caption_language (now {config.caption_language!r}) or --caption_columns"
        )

    found = config.recordings.locate({row[:2] for row in rows})
    paths = dict(found.values())
    of_folder = split_by_folder(paths)
    records: Records = {}
    for folder, name, record in rows:
        file = found[folder, name][0]
        splits = {record["split"], of_folder[file]} - {""}
        if not folder and "/" not in name and len(splits) > 1:
            raise ValueError(
                f"{record['where']}: {name} is of the split {record['split']}, but only {file} has this name; write "
                "the folders of the recordings in the table"
            )
        records.setdefault((file, record["start_seconds"], record["end_seconds"]), []).append(record)
    return paths, of_folder, records


def merge(field: str, name: str, lines: Iterable[Record]) -> Any:
    """Return a field of the lines of a clip; raise ValueError if two lines have different values."""
    first, *others = [line for line in lines if line[field]] or [{field: ""}]
    for line in others:
        if line[field] != first[field]:
            raise ValueError(
                f"{line['where']}: {field} of {name!r} is {line[field]!r}, but {first[field]!r} at {first['where']}"
            )
    return first[field]


def split_by_folder(names: Iterable[str]) -> dict[str, str]:
    """Return the split in the names of the folders of each recording, or "".

    The common parents of the recordings outside of the folder do not determine the split.
    """
    outside = [os.path.dirname(name) for name in names if os.path.isabs(name)]
    parents = os.path.commonpath(outside) if outside else ""
    splits = {}
    for name in names:
        folders = os.path.dirname(name.removeprefix(parents)).casefold().split("/")
        splits[name] = next((SPLIT_NAMES[folder] for folder in folders if folder in SPLIT_NAMES), "")
    return splits


def choose_splits(config: AudioFolderConfig, clips: Sequence[Clip], given: Sequence[str]) -> Sequence[str]:
    """Return the split of each clip: as given for all clips, or else sampled by source. `test_group` overrides both.

    Raises ValueError if only some clips have a split, or if there are too few recordings.
    """
    rows = [row for row, clip in enumerate(clips) if clip.audio_path]  # others have no file, and need no split
    without = [clips[row].clip_id for row in rows if not given[row]]
    if not rows or (not without and config.test_group is None):
        return given
    if 0 < len(without) < len(rows):
        row = next(row for row in rows if given[row])
        raise ValueError(
            f"{len(without)} of {len(rows)} clips have no split ({listing(without)}), but {clips[row].clip_id} has "
            f"{given[row]}; set the split of all or of no clips, such as in a column split"
        )

    sources = [clips[row].source for row in rows]
    groups = group_clips([clips[row] for row in rows])
    fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
    splits = ["train"] * len(clips)
    drawn = draw_splits(sources, groups, fractions, config.seed, config.test_group)
    for row, split in zip(rows, drawn, strict=True):
        splits[row] = split
    return splits


def _split_of_table(file: str) -> str | None:
    """Return the split in the name of a table, "" without one, or None if the file is not named as a table.

    >>> _split_of_table("a/metadata.csv"), _split_of_table("train_manifest.json"), _split_of_table("notes.csv")
    ('', 'train', None)
    """
    words = set(re.findall(r"[^\W_]+", os.path.splitext(os.path.basename(file).casefold())[0]))
    splits = {SPLIT_NAMES[word] for word in words & SPLIT_NAMES.keys()}
    is_table = words <= _TABLE_WORDS | SPLIT_NAMES.keys() and words != {"manifest"}
    return "".join(splits) if is_table and words and len(splits) < 2 else None
