"""Any folder of recordings with captions: what `audiofolder` of `datasets` takes, or text files beside the audio.

From a folder of pairs to a model that is tuned on them:

    my_sounds/metadata.csv              file_name,caption
    my_sounds/rain.wav                  rain.wav,Heavy rain on a tin roof
    my_sounds/birds/dawn.flac           birds/dawn.flac,Birds sing at dawn

    from modeling_supclap.datasets_scripts import load_splits
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor, SupCLAPTrainer, SupCLAPTrainingArguments

    splits = load_splits("audio_folder", data_dir="my_sounds", languages=["eng"])
    trainer = SupCLAPTrainer(
        SupCLAPModel.from_pretrained(checkpoint),
        SupCLAPTrainingArguments(output_dir="tuned", languages=["eng"]),
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        processing_class=SupCLAPProcessor.from_pretrained(checkpoint),
    )
    trainer.train()

A table is called `metadata` or `captions` (where `audio_column` or `caption_column` is given, the only table of the
folder may have any name) and is CSV (with commas, semicolons or tabs), TSV, JSON Lines, a JSON list or Parquet. It lies
beside the audio or above it, and its column `file_name` holds paths, relative to it or absolute. All
else is optional; several lines of one file are several captions of it:

- `caption`, `caption_1`, `caption_2`, ...: in the language `caption_language`; `captions`: a list, or a mapping of
  languages to a caption or a list of them; `caption_fra` or `captions_fra`: of that language. In CSV, lists and
  mappings are written as JSON;
- `split`: train, validation or test. Without it the sub-folders of those names are the splits; without those,
  recordings are drawn;
- `label` or `labels`, `source`, `license`, `clip_id` and `events`: fields of the row. A recording is its own source,
  and its path is its id, unless these say otherwise.

Without any table `rain.txt` holds the captions of `rain.wav`, one a line.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..schema import FILE_SOURCE, LANGUAGES, SPLIT_NAMES, Event
from .captions import check_merged_languages, read_caption_columns
from .folder import SPLITS, Clip, Collection, FolderConfig, RowBuilder, draw_sources, strip_texts
from .metadata import TABLE_SUFFIXES, Line, read_table
from .recordings import some

TABLE_NAMES = ("metadata", "captions")
FIELDS = ("file_name", "caption", "captions", "split", "label", "labels", "source", "license", "clip_id", "events")
"""What `columns` can give another name."""

_CAPTION_COLUMN = re.compile(r"captions?(?:_(?P<key>[a-z]{2,3}|\d+))?")


@dataclass
class AudioFolderConfig(FolderConfig):
    """Where the folder is, what its columns mean and how it is split; see also `FolderConfig`.

    Attributes:
        languages: The caption languages, the anchor first, as ISO 639-3 codes; any.
        caption_language: The language of captions whose column names none.
        audio_column: What the table calls the column of file names; by default `file_name`.
        caption_column: What it calls the column of captions; by default `caption`.
        caption_columns: All columns of captions with their languages, such as `deu=Beschreibung eng=English`, in place
            of `caption_column` and `caption_language`; no other columns of captions are read then.
        columns: What it calls any other of `FIELDS`, where it is another name: `{"split": "part"}`.
        validation_fraction: The part of the recordings that is drawn for validation where the folder has no splits, at
            least one; 0 draws none.
        test_fraction: The part that is drawn for testing, likewise; 1 tests on all of them.
        seed: The seed of the draw.
    """

    DATASET = "this folder"
    LAYOUT = "the folder that holds the audio and metadata.csv, .tsv, .jsonl, .json or .parquet"
    ENGLISH_ONLY = False

    caption_language: str = LANGUAGES[0]
    audio_column: str | None = None
    caption_column: str | None = None
    caption_columns: Sequence[str] | Mapping[str, str] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {"file_name": self.audio_column, "caption": self.caption_column}
        for name, column in named.items():
            if column is not None:
                self.columns = {**self.columns, name: column}

        self.languages_of_columns = read_caption_columns(self.caption_columns)
        unknown = self.columns.keys() - set(FIELDS)
        if unknown:
            raise ValueError(f"columns names {sorted(unknown)}; it can name {', '.join(FIELDS)}")
        if min(self.validation_fraction, self.test_fraction) < 0 or self.validation_fraction + self.test_fraction > 1:
            raise ValueError(
                f"validation_fraction is {self.validation_fraction} and test_fraction {self.test_fraction}; give two "
                "numbers of 0 or more that sum to 1 at most"
            )

    def check_languages(self) -> None:
        """Any codes will do, as long as they are codes."""
        self.languages = (self.languages,) if isinstance(self.languages, str) else tuple(self.languages)
        are_codes = re.fullmatch("([a-z]{3} )+[a-z]{3}", " ".join([*self.languages, self.caption_language]))
        if not are_codes or len(set(self.languages)) < len(self.languages):
            raise ValueError(
                f"languages is {list(self.languages)} and caption_language {self.caption_language!r}; give codes of "
                "ISO 639-3 such as 'eng', at least one, each once"
            )

    def tables(self) -> dict[str, Path]:
        """The tables by their relative path.

        Raises:
            ValueError: A folder holds several.
        """
        tables: dict[str, Path] = {}
        table_of_folder: dict[str, str] = {}
        for file in self.files:
            folder, name = os.path.split(file)
            stem, suffix = os.path.splitext(name)
            if stem not in TABLE_NAMES or suffix not in TABLE_SUFFIXES:
                continue

            other = table_of_folder.setdefault(folder, file)
            if other != file:
                raise ValueError(f"{self.folder} holds several tables in one place: {other}, {file}; keep one")
            tables[file] = self.folder / file

        # Whoever names its columns has a table, whatever it is called.
        on_top = [file for file in self.files if "/" not in file and file.endswith(TABLE_SUFFIXES)]
        if not tables and len(on_top) == 1 and (self.audio_column or self.caption_column or self.caption_columns):
            tables[on_top[0]] = self.folder / on_top[0]
        return tables

    def metadata_files(self) -> list[Path]:
        """The tables, or else the text files."""
        files = list(self.tables().values()) or [self.folder / file for file in self.files if file.endswith(".txt")]
        if not files:
            others = [file for file in self.files if file.endswith((*TABLE_SUFFIXES, ".arrow"))]
            advice = "rename the table that says what sounds, or name its audio_column and caption_column"
            hint = f"; there is {some(others, 3)}: {advice}" if others else ""
            raise FileNotFoundError(
                f"{self.folder} holds neither metadata nor captions as {', '.join(TABLE_SUFFIXES)}, nor text files "
                f"beside the audio{hint}"
            )
        return files


class AudioFolder(RowBuilder):
    """A folder of recordings with captions as rows."""

    BUILDER_CONFIG_CLASS = AudioFolderConfig

    def collect(self) -> Collection:
        """The recordings that the tables or the text files caption."""
        config, collection = self.config, Collection()
        records = merge(read_tables(config) if config.tables() else read_texts(config))
        _check_records(config, records)

        splits = choose_splits(config, records)
        unused = dict.fromkeys(config.recordings.files)
        for name, record in records.items():
            path = config.recordings.at(name)
            if path is not None and path.is_relative_to(config.recordings.folder):
                unused.pop(path.relative_to(config.recordings.folder).as_posix(), None)

            clip = Clip(
                record.clip_id or name,
                {language: list(record.captions.get(language, ())) for language in config.languages},
                record.source or f"{FILE_SOURCE}{name}",
                record.license,
                record.labels,
                record.events,
            )
            collection.add(splits[name], clip, name, path)

        collection.leave_out("no caption", *unused)
        return collection


@dataclass
class Record:
    """What is said of a recording.

    Attributes:
        where: The line that says it, for messages.
        captions: The captions by language, as the keys of a dictionary, so that each is there once and in order.
        split: The split, labels, source, licence, id and events; empty where nothing is said of them.
    """

    where: str
    captions: dict[str, dict[str, None]]
    split: str = ""
    labels: Sequence[str] = ()
    source: str = ""
    license: str = ""
    clip_id: str = ""
    events: Sequence[Event] = ()

    OPTIONAL = ("split", "labels", "source", "license", "clip_id", "events")


def read_tables(config: AudioFolderConfig) -> Iterator[tuple[str, Record]]:
    """The lines of a folder's tables: a recording, relative to the folder, and what the line says of it.

    Raises:
        ValueError: The column of file names or that of captions is missing, a language is unknown, or a cell is of
            another form.
    """
    for table, path in config.tables().items():
        for line in read_table(path):
            values = {name: line.values.get(config.columns.get(name, name)) for name in FIELDS}
            file_name = values["file_name"]
            if not isinstance(file_name, str) or not file_name.strip():
                column = config.columns.get("file_name", "file_name")
                raise ValueError(
                    f"{line.where}: {column} is {file_name!r}; give a path. The columns are {list(line.values)}; "
                    "audio_column says which of them holds it"
                )

            name = PurePosixPath(table).parent / file_name.strip().replace("\\", "/")
            if name.is_relative_to(config.recordings.folder):
                name = name.relative_to(config.recordings.folder)
            yield str(name), _read_line(line, values, config)


def read_texts(config: AudioFolderConfig) -> Iterator[tuple[str, Record]]:
    """The recordings of a folder, relative to it, that have a text file beside them, and what that says."""
    texts = set(config.metadata_files())
    for file in config.recordings.files:
        path = (config.folder / file).with_suffix(".txt")
        if path in texts:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            yield file, Record(path.name, {config.caption_language: dict.fromkeys(strip_texts(lines))})


def merge(records: Iterable[tuple[str, Record]]) -> dict[str, Record]:
    """Puts together what several lines say of one recording: all its captions, each once, and the optional fields.

    Raises:
        ValueError: Two lines say different things of a field.
    """
    merged: dict[str, Record] = {}
    for name, record in records:
        known = merged.setdefault(name, record)
        for language, texts in record.captions.items():
            known.captions.setdefault(language, {}).update(texts)

        for key in Record.OPTIONAL:
            there, said = getattr(known, key), getattr(record, key)
            if there and said and there != said:
                raise ValueError(f"{record.where}: {key} of {name!r} is {said!r}, and {there!r} at {known.where}")
            setattr(known, key, there or said)
    return merged


def choose_splits(config: AudioFolderConfig, records: Mapping[str, Record]) -> dict[str, str]:
    """The split of each recording: as its line says, else as its folder's name says, else drawn by source.

    Raises:
        ValueError: Some have a split and some have none, or there are too few to draw from.
    """
    given: dict[str, str] = {}
    without: list[str] = []
    for name, record in records.items():
        split = record.split
        for part in PurePosixPath(name).parts[:-1]:  # else one of the folders is named after it
            split = split or SPLIT_NAMES.get(part.casefold(), "")
        if split:
            given[name] = split
        else:
            without.append(name)

    if not without:
        return given
    if given:
        other, split = next(iter(given.items()))
        raise ValueError(
            f"{len(without)} of {len(records)} recordings have no split: {some(without)}; but {other} is of {split}, "
            "by its line or by the name of its folder. Give all or none: a column split settles it"
        )

    # Drawn among the recordings that are there, so that each split gets its part of them.
    sources: dict[str, str] = {}
    there: set[str] = set()

    for name, record in records.items():
        sources[name] = record.source or f"{FILE_SOURCE}{name}"
        if config.recordings.at(name) is not None:
            there.add(sources[name])
    there = there or set(sources.values())

    counts: dict[str, int] = {}
    for name_of_split, fraction in (("validation", config.validation_fraction), ("test", config.test_fraction)):
        if fraction:
            counts[name_of_split] = max(1, round(fraction * len(there)))

    left_to_train = len(there) - sum(counts.values())
    if left_to_train < 0 or (left_to_train == 0 and config.validation_fraction + config.test_fraction < 1):
        raise ValueError(
            f"{len(there)} recordings are too few to draw {' and '.join(counts)} from; give more, or a column split, "
            "or validation_fraction=0 with test_fraction=0 to train on all of them or test_fraction=1 to test on them"
        )
    drawn = draw_sources(there, counts, config.seed)
    return {name: drawn.get(source, "train") for name, source in sources.items()}


def _read_line(line: Line, values: Mapping[str, Any], config: AudioFolderConfig) -> Record:
    split = _text(values["split"])
    if split and split.casefold() not in SPLIT_NAMES:
        raise ValueError(f"{line.where}: the split is {split!r}; give one of {', '.join(SPLITS)}")

    labels = _parse(values["labels"] if values["labels"] is not None else values["label"])
    labels = labels if isinstance(labels, list) else [labels]
    return Record(
        where=line.where,
        captions=_read_captions(line, config),
        split=SPLIT_NAMES[split.casefold()] if split else "",
        labels=list(filter(None, map(_text, labels))),
        source=_text(values["source"]),
        license=_text(values["license"]) or _text(line.values.get("licence")),
        clip_id=_text(values["clip_id"]),
        events=_read_events(_parse(values["events"]), line.where),
    )


def _read_captions(line: Line, config: AudioFolderConfig) -> dict[str, dict[str, None]]:
    """The captions of a line by language, from all columns that hold some."""
    languages = dict(config.languages_of_columns)  # by column, the one that a plain text in it has
    missing = [column for column in languages if column not in line.values]
    if not languages:
        unmarked, marked = [], {}
        named = [config.columns.get(name, name) for name in ("caption", "captions")]
        for column, cell in line.values.items():
            match = _CAPTION_COLUMN.fullmatch(str(column))
            key = match["key"] if match and column not in named else None
            if key and not key.isdigit():
                marked[column] = key
            elif key or column in named:
                languages[column] = config.caption_language
                parsed = _parse(cell)
                if not isinstance(parsed, Mapping):
                    unmarked.append(column)
                elif config.caption_language in parsed:
                    marked[column] = config.caption_language
        check_merged_languages(unmarked, config.caption_language, marked)
        languages = {**marked, **languages}
    if not languages or missing:
        raise ValueError(
            f"{line.where}: no column {missing or 'of captions'} among {list(line.values)}; call it caption, captions "
            "or caption_<language>, or give caption_column"
        )

    captions: dict[str, dict[str, None]] = {}
    for column, plain in languages.items():
        where = f"{line.where}, {column}"
        for language, texts in _read_texts_by_language(_parse(line.values[column]), plain, where):
            _check_language(language, config, where)
            captions.setdefault(language, {}).update(dict.fromkeys(strip_texts(texts)))
    return captions


def _check_language(language: str, config: AudioFolderConfig, where: str) -> None:
    known = (*config.languages, *LANGUAGES, config.caption_language, *config.languages_of_columns.values())
    if language not in known:
        close = difflib.get_close_matches(language, known, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"{where}: unknown language {language!r}{hint}; the codes are ISO 639-3, and languages=[...] takes any"
        )


def _read_texts_by_language(cell: Any, language: str, where: str) -> Iterator[tuple[str, list[str]]]:
    if isinstance(cell, Mapping):
        for code, texts in cell.items():
            yield from _read_texts_by_language(texts, str(code), where)
    elif cell is None or isinstance(cell, str):
        yield language, [cell or ""]
    elif isinstance(cell, Sequence) and set(map(type, cell)) <= {str, type(None)}:
        yield language, [text or "" for text in cell]
    else:
        raise ValueError(f"{where}: {cell!r} is no caption; give a text, a list of texts, or a mapping of languages")


def _read_events(cell: Any, where: str) -> list[Event]:
    events: list[Event] = []
    try:
        for event in cell or ():
            onset, offset = float(event["onset_seconds"]), float(event["offset_seconds"])
            events.append({"label": str(event["label"]), "onset_seconds": onset, "offset_seconds": offset})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: events is {cell!r}; give a list of objects with label, onset_seconds and offset_seconds"
        ) from error
    return events


def _parse(cell: Any) -> Any:
    """A cell of CSV that holds JSON is what it says; a caption that only begins like JSON is itself."""
    if isinstance(cell, str) and cell.strip()[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def _check_records(config: AudioFolderConfig, records: Mapping[str, Record]) -> None:
    """Refuses ids that come twice, and captions that are all in other languages than those asked for."""
    present: set[str] = set()
    names: dict[str, str] = {}
    for name, record in records.items():
        present.update(language for language, texts in record.captions.items() if texts)
        other = names.setdefault(record.clip_id or name, name)
        if other != name:
            raise ValueError(
                f"{record.where}: {other!r} and {name!r} have the same clip_id {record.clip_id!r}; ids are unique"
            )

    if present and not present & set(config.languages):
        raise ValueError(
            f"{config.folder} has captions in {sorted(present)}, and languages is {list(config.languages)}: name one "
            f"that is there, or set the language of the captions with --caption_language (now "
            f"{config.caption_language!r}) or --caption_columns"
        )
