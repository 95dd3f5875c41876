"""Load any folder of recordings with captions, in the `audiofolder` layout of `datasets` or with text files.

    my_sounds/metadata.csv              file_name,caption
    my_sounds/rain.wav                  rain.wav,Heavy rain on a tin roof
    my_sounds/birds/dawn.flac           birds/dawn.flac,Birds sing at dawn

    splits = load_splits("audio_folder", data_dir="my_sounds", languages=["eng"])

The table is named `metadata` or `captions` and is in the audio folder or a parent folder of the audio. If
`audio_column`, `caption_column` or `caption_columns` is set and the folder contains a single table, the table may have
any name. Formats: CSV (with commas, semicolons or tabs), TSV, JSON Lines, a JSON list, or Parquet. The column
`file_name` contains absolute paths, or paths relative to the table. A file with several captions may have several
lines. A caption column is required; all other columns are optional:

- `caption`, `caption_1`, `caption_2`, ...: captions in the language `caption_language`. `captions`: a list, or a
  mapping from languages to a caption or a list of captions. `caption_fra` or `captions_fra`: captions in French; any
  ISO 639-3 code is possible. In CSV, lists and mappings are written as JSON.
- `split`: train, validation or test. Without this column, the names of the sub-folders determine the splits. If there
  are no such sub-folders, validation and test recordings are sampled at random.
- `start_seconds` and `end_seconds`: the clip is this part of a recording; `start` and `end`, `start_time` and
  `end_time`, `begin` and `end`, or `onset` and `offset` are also accepted. Without a value, it starts or ends with the
  recording. All parts of one recording are in the same split.
- `label` or `labels`, `source`, `license`, `clip_id` and `events`: fields of the row. By default the source of a clip
  is its file name, and its id is its path.

If there is no table, `rain.txt` contains the captions of `rain.wav`, one per line.
"""

import ast
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from modeling_supclap.languages import LANGUAGES

from ..schema import FILE_SOURCE, SEGMENT_COLUMNS, SPLIT_NAMES, Event
from .captions import check_merged_languages, merge_captions, read_caption_columns
from .folder import SPLITS, Clip, Collection, FolderConfig, RowBuilder, draw_sources, strip_texts
from .metadata import TABLE_SUFFIXES, Line, find_segment_columns, read_segment, read_table
from .recordings import listing
from .text_encodings import decode_text

TABLE_NAMES = ("metadata", "captions")
FIELDS = (
    *("file_name", "caption", "captions", "split", "label", "labels", "source", "license", "clip_id", "events"),
    *SEGMENT_COLUMNS,
)
"""Fields that can be mapped to other column names with `columns`."""

# A list of texts in numpy form, which separates them only by white space.
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NUMPY_TEXTS = re.compile(rf"\[\s*(?:{_QUOTED.pattern})(?:\s+(?:{_QUOTED.pattern}))+\s*\]", re.DOTALL)

_CAPTION_COLUMN = re.compile(r"captions?(?:_(?P<key>[a-z]{2,3}|\d+))?")


@dataclass
class AudioFolderConfig(FolderConfig):
    """Options for a folder of recordings with captions: its location, the columns of its table, and its splits.
    `FolderConfig` contains more options.

    Attributes:
        languages: Caption languages as ISO 639-3 codes, the anchor language first.
        caption_language: Language of the caption columns that have no language in their name.
        audio_column: Column with file names; defaults to `file_name`.
        caption_column: Column with captions; defaults to `caption`.
        caption_columns: All caption columns with their languages, such as `deu=Beschreibung eng=English`. Overrides
            `caption_column` and `caption_language`; other caption columns are ignored.
        columns: Column names in the table, as `{field: column}` with fields in `FIELDS`, such as `{"split": "part"}`.
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

    caption_language: str = LANGUAGES[0]
    audio_column: str | None = None
    caption_column: str | None = None
    caption_columns: Sequence[str] | Mapping[str, str] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    encoding: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_fraction == 1:
            self.validation_fraction = 0.0
        if not isinstance(self.columns, Mapping):
            raise ValueError(f"columns is {self.columns!r}; expected a dict from field to column name")
        named = {"file_name": self.audio_column, "caption": self.caption_column}
        self.columns = {**self.columns, **{name: column for name, column in named.items() if column is not None}}
        self.languages_of_columns = read_caption_columns(self.caption_columns)
        unknown = self.columns.keys() - set(FIELDS)
        if unknown:
            raise ValueError(f"columns has the unknown keys {sorted(unknown)}; expected some of {', '.join(FIELDS)}")
        if min(self.validation_fraction, self.test_fraction) < 0 or self.validation_fraction + self.test_fraction > 1:
            given = f"validation_fraction is {self.validation_fraction} and test_fraction {self.test_fraction}"
            raise ValueError(f"{given}; expected two numbers of at least 0 with a sum of at most 1")

    def check_languages(self) -> None:
        """Raise ValueError if `languages` or `caption_language` are not ISO 639-3 codes, or if a code is repeated."""
        self.languages = (self.languages,) if isinstance(self.languages, str) else tuple(self.languages)
        are_codes = re.fullmatch("([a-z]{3} )+[a-z]{3}", " ".join([*self.languages, self.caption_language]))
        if not are_codes or len(set(self.languages)) < len(self.languages):
            given = f"languages is {list(self.languages)} and caption_language {self.caption_language!r}"
            raise ValueError(f"{given}; expected ISO 639-3 codes such as 'eng', at least one, without repeats")

    @property
    def table_languages(self) -> list[str]:
        """Languages that the tables may contain."""
        return [*self.languages, self.caption_language, *self.languages_of_columns.values()]

    def tables(self) -> dict[str, Path]:
        """Return the caption tables as `{relative path: full path}`; raise ValueError if one folder contains two."""
        tables = {}
        for file in self.files:
            name, suffix = os.path.splitext(os.path.basename(file))
            if name in TABLE_NAMES and suffix in TABLE_SUFFIXES:
                tables[file] = self.folder / file
        table_of_folder: dict[str, str] = {}
        for file in tables:
            other = table_of_folder.setdefault(os.path.dirname(file), file)
            if other != file:
                raise ValueError(f"{self.folder} has several tables in one folder: {other}, {file}; keep one")

        # If the columns are set, a single table in the top folder may have any name.
        on_top = [file for file in self.files if "/" not in file and file.endswith(TABLE_SUFFIXES)]
        if not tables and len(on_top) == 1 and (self.audio_column or self.caption_column or self.caption_columns):
            tables[on_top[0]] = self.folder / on_top[0]
        return tables

    @cached_property
    def lines(self) -> dict[str, list[Line]]:
        """Lines of all tables, as `{relative path of the table: lines}`."""
        lines = {}
        for table, path in self.tables().items():
            lines[table] = read_table(path, self.table_languages, self.encoding)
        return lines

    @cached_property
    def has_segments(self) -> bool:
        """Whether a table has columns of the start or the end of a clip in its recording."""
        return any(find_segment_columns(names_of(lines), self.columns) for lines in self.lines.values())

    def metadata_files(self) -> list[Path]:
        """Return the paths of the tables, or of the text files if there are no tables."""
        files = list(self.tables().values()) or [self.folder / file for file in self.files if file.endswith(".txt")]
        if not files:
            others = [file for file in self.files if file.endswith((*TABLE_SUFFIXES, ".arrow"))]
            hint = f", only {listing(others, 3)}: rename it, or set audio_column and caption_column" if others else ""
            names = f"metadata or captions ({', '.join(TABLE_SUFFIXES)})"
            raise FileNotFoundError(f"{self.folder} contains neither a table {names} nor text files{hint}")
        return files


class AudioFolder(RowBuilder):
    """Builder for any folder of recordings with captions."""

    BUILDER_CONFIG_CLASS = AudioFolderConfig

    def collect(self) -> Collection:
        """Return the recordings that have captions in a table or a text file."""
        config, collection = self.config, Collection()
        records = merge(read_tables(config) if config.tables() else read_texts(config))
        _check_records(config, records)

        splits = choose_splits(config, records)
        unused = dict.fromkeys(config.recordings.files)
        for key, record in records.items():
            name = record.name
            path = config.recordings.at(name)
            if path is not None and path.is_relative_to(config.recordings.folder):
                unused.pop(path.relative_to(config.recordings.folder).as_posix(), None)

            captions = merge_captions(record.captions, config.languages)
            clip_id, source = record.clip_id or key, record.source or f"{FILE_SOURCE}{name}"
            clip = Clip(clip_id, captions, source, record.license, record.labels, record.events, "", *record.segment)
            collection.add(splits[key], clip, name, path)

        collection.leave_out("no caption", *unused)
        return collection


@dataclass
class Record:
    """Metadata of one clip. A field is empty if the table or text file does not contain it."""

    name: str  # path of the recording
    where: str  # file and line, for error messages
    captions: list[dict[str, list[str]]]  # of each line, `{language: [caption, ...]}`
    split: str = ""
    labels: Sequence[str] = ()
    source: str = ""
    license: str = ""
    clip_id: str = ""
    events: Sequence[Event] = ()
    segment: tuple[float | None, float | None] = (None, None)  # start and end in the recording, in seconds

    @property
    def key(self) -> str:
        """Path of the recording, and the part of it that is the clip."""
        start, end = ("" if time is None else f"{time:g}" for time in self.segment)
        return self.name if self.segment == (None, None) else f"{self.name}:{start}-{end}"

    OPTIONAL = ("split", "labels", "source", "license", "clip_id", "events")


def names_of(lines: Iterable[Line]) -> set[str]:
    """Return the names of all columns; lines of JSON may have different ones."""
    return set(chain.from_iterable(line.values for line in lines))


def read_tables(config: AudioFolderConfig) -> Iterator[Record]:
    """Yield the metadata in each line of all tables, with the path of the recording relative to the folder."""
    for table, lines in config.lines.items():
        columns = {**config.columns, **find_segment_columns(names_of(lines), config.columns)}
        for line in lines:
            values = {name: line.values.get(columns.get(name, name)) for name in FIELDS}
            file_name = values["file_name"]
            if not isinstance(file_name, str) or not file_name.strip():
                column = config.columns.get("file_name", "file_name")
                advice = f"set audio_column to one of {list(line.values)}, which are in the first line of the table"
                raise ValueError(f"{line.where}: {column} is {file_name!r}; expected a path; {advice}")

            name = PurePosixPath(table).parent / file_name.strip().replace("\\", "/")
            if name.is_absolute() and not name.is_relative_to(config.recordings.folder):
                real = PurePosixPath(os.path.realpath(name.parent), name.name)  # its folder may be a link
                name = real if real.is_relative_to(config.recordings.folder) else name
            if name.is_relative_to(config.recordings.folder):
                name = name.relative_to(config.recordings.folder)
            yield _read_line(str(name), line, values, config)


def read_texts(config: AudioFolderConfig) -> Iterator[Record]:
    """Read each text file with the same name as a recording; yield the captions of the recording."""
    texts = set(config.metadata_files())
    for file in config.recordings.files:
        path = (config.folder / file).with_suffix(".txt")
        if path in texts:
            text = decode_text(path.read_bytes(), str(path), config.table_languages, config.encoding)
            yield Record(file, path.name, [{config.caption_language: list(strip_texts(text.splitlines()))}])


def merge(records: Iterable[Record]) -> dict[str, Record]:
    """Merge the captions of records of the same clip; raise ValueError if their other fields differ.

    Return `{path of the recording, with the part that is the clip: record}`.
    """
    merged: dict[str, Record] = {}
    for record in records:
        name = record.key
        first = merged.setdefault(name, record)
        if first is record:
            continue
        first.captions += record.captions
        for key in Record.OPTIONAL:
            value, other = getattr(first, key), getattr(record, key)
            if value and other and value != other:
                raise ValueError(f"{record.where}: {key} of {name!r} is {other!r}, but {value!r} at {first.where}")
            setattr(first, key, value or other)
    return merged


def choose_splits(config: AudioFolderConfig, records: Mapping[str, Record]) -> dict[str, str]:
    """Choose the split of each clip; return `{key of the record: split}`.

    The metadata of the recording or the name of its folder determines the split. If no recording has a split,
    validation and test recordings are sampled at random. Clips with the same source are in the same split.
    """
    names = [record.name for record in records.values()]
    absolute = [PurePosixPath(name).parts[:-1] for name in names if os.path.isabs(name)]
    # Number of common parent folders of the recordings outside of the folder; their names do not determine the split.
    num_parents = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*absolute, strict=False))))
    known: dict[str, str] = {}
    for key, record in records.items():
        name, split = record.name, record.split
        folders = PurePosixPath(name).parts[num_parents if os.path.isabs(name) else 0 : -1]
        for part in folders:  # if the metadata contain no split
            split = split or SPLIT_NAMES.get(part.casefold(), "")
        if split:
            known[key] = split

    without = [key for key in records if key not in known]
    if not without:
        return known
    if known:
        other, split = next(iter(known.items()))
        problem = f"{len(without)} of {len(records)} recordings have no split ({listing(without)}), but {other} has"
        raise ValueError(f"{problem} {split}; set the split of all or of no recordings, such as in a column split")

    # Sample only from recordings with a file, so that the fractions refer to these.
    sources = {key: record.source or f"{FILE_SOURCE}{record.name}" for key, record in records.items()}
    found = [key for key, record in records.items() if config.recordings.at(record.name) is not None]
    existing = {sources[key] for key in found or records}
    fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
    counts = {split: max(1, round(part * len(existing))) for split, part in fractions.items() if part}

    num_train = len(existing) - sum(counts.values())
    if num_train < 0 or (num_train == 0 and sum(fractions.values()) < 1):
        problem = f"{len(existing)} recordings are too few to draw {' and '.join(counts)}"
        raise ValueError(f"{problem}; add a column split, or set validation_fraction=0 and test_fraction=0 or 1")
    drawn = draw_sources(existing, counts, config.seed)
    return {key: drawn.get(source, "train") for key, source in sources.items()}


def _read_line(name: str, line: Line, values: Mapping[str, Any], config: AudioFolderConfig) -> Record:
    split = _text(values["split"])
    if split and split.casefold() not in SPLIT_NAMES:
        raise ValueError(f"{line.where}: the split is {split!r}; expected one of {', '.join(SPLITS)}")

    labels = _parse(values["labels"] if values["labels"] is not None else values["label"])
    labels = labels if isinstance(labels, list) else [labels]
    return Record(
        name=name,
        where=line.where,
        captions=[_read_captions(line, config)],
        split=SPLIT_NAMES[split.casefold()] if split else "",
        labels=list(filter(None, map(_text, labels))),
        source=_text(values["source"]),
        license=_text(values["license"]) or _text(line.values.get("licence")),
        clip_id=_text(values["clip_id"]),
        events=_read_events(_parse(values["events"]), line.where),
        segment=read_segment(values, line.where),
    )


def _read_captions(line: Line, config: AudioFolderConfig) -> dict[str, list[str]]:
    """Read all caption columns of a line, as `{language: [caption, ...]}`."""
    languages = dict(config.languages_of_columns)  # column -> language of its plain texts
    missing = [column for column in languages if column not in line.values]
    if not languages:
        unmarked, marked = [], {}
        named = [config.columns.get(name, name) for name in ("caption", "captions")]
        is_chosen = "caption" in config.columns or "captions" in config.columns
        for column, cell in line.values.items():
            match = _CAPTION_COLUMN.fullmatch(str(column))
            key = match["key"] if match and column not in named else None
            if key and not key.isdigit():
                marked[column] = key
            elif (key and not is_chosen) or column in named:
                languages[column] = config.caption_language
                parsed = _parse(cell)
                if not isinstance(parsed, Mapping):
                    unmarked.append(column)
                elif config.caption_language in parsed:
                    marked[column] = config.caption_language
        check_merged_languages(unmarked, config.caption_language, marked)
        languages = {**marked, **languages}
    if not languages or missing:
        problem = f"{line.where}: no column {missing or 'of captions'} among {list(line.values)}"
        raise ValueError(f"{problem}; rename it to caption or caption_<language>, or set caption_column")

    known = (*config.languages, *LANGUAGES, config.caption_language, *config.languages_of_columns.values())
    captions: dict[str, list[str]] = {}
    for column, plain in languages.items():
        where = f"{line.where}, {column}"
        for language, texts in _read_texts_by_language(_parse(line.values[column]), plain, where):
            if language not in known:
                close = difflib.get_close_matches(language, known, n=1, cutoff=0.5)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"{where}: unknown language {language!r}{hint}; add an ISO 639-3 code to languages")
            captions.setdefault(language, []).extend(strip_texts(texts))
    return captions


def _read_texts_by_language(cell: Any, language: str, where: str) -> Iterator[tuple[str, list[str]]]:
    if isinstance(cell, Mapping):
        for code, texts in cell.items():
            yield from _read_texts_by_language(texts, str(code), where)
    elif cell is None or isinstance(cell, str):
        yield language, [cell or ""]
    elif isinstance(cell, Sequence) and set(map(type, cell)) <= {str, type(None)}:
        yield language, [text or "" for text in cell]
    else:
        raise ValueError(f"{where}: {cell!r} is not a caption; expected a text, a list, or a mapping from languages")


def _read_events(cell: Any, where: str) -> list[Event]:
    events: list[Event] = []
    try:
        for event in cell or ():
            onset, offset = float(event["onset_seconds"]), float(event["offset_seconds"])
            events.append({"label": str(event["label"]), "onset_seconds": onset, "offset_seconds": offset})
    except (TypeError, KeyError, ValueError) as error:
        keys = "label, onset_seconds and offset_seconds"
        raise ValueError(f"{where}: events is {cell!r}; expected a list of objects with {keys}") from error
    return events


def _parse(cell: Any) -> Any:
    """Parse a table value if it is a list or an object, in JSON, Python or numpy form; return others unchanged."""
    if isinstance(cell, str) and _NUMPY_TEXTS.fullmatch(cell.strip()):
        return [ast.literal_eval(text) for text in _QUOTED.findall(cell)]
    if isinstance(cell, str) and cell.strip()[:1] in ("[", "{"):
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return parse(cell.strip())
    return cell


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def _check_records(config: AudioFolderConfig, records: Mapping[str, Record]) -> None:
    """Raise a ValueError if two recordings have the same id, or if no caption is in one of `languages`."""
    present: set[str] = set()
    names: dict[str, str] = {}
    for name, record in records.items():
        for captions in record.captions:
            present.update(language for language, texts in captions.items() if texts)
        other = names.setdefault(record.clip_id or name, name)
        if other != name:
            raise ValueError(f"{record.where}: {other!r} and {name!r} have the same clip_id {record.clip_id!r}")

    if present and not present & set(config.languages):
        advice = f"change it, or set --caption_language (now {config.caption_language!r}) or --caption_columns"
        given = f"captions in {sorted(present)}, but languages is {list(config.languages)}"
        raise ValueError(f"{config.folder} has {given}: {advice}")
