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

A table is called `metadata` and is CSV, JSON Lines or Parquet. It lies beside the audio or above it, and its column
`file_name` holds paths relative to it. All else is optional; several lines of one file are several captions of it:

- `caption`, `caption_1`, `caption_2`, ...: in the language `caption_language`; `captions`: a list, or a mapping of
  languages to a caption or a list of them; `caption_fra` or `captions_fra`: of that language. In CSV, lists and
  mappings are written as JSON;
- `split`: train, validation or test. Without it the sub-folders of those names are the splits; without those,
  recordings are drawn;
- `label` or `labels`, `source`, `license`, `clip_id` and `events`: fields of the row. A recording is its
  own source, and its path is its id, unless these say otherwise.

Without any table `rain.txt` holds the captions of `rain.wav`, one a line.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..schema import FILE_SOURCE, LANGUAGES, Event
from .folder import SPLITS, Clip, Collection, FolderBuilder, FolderConfig, draw_sources, written
from .metadata import Line, read_table
from .recordings import some

TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FIELDS = ("file_name", "caption", "captions", "split", "label", "labels", "source", "license", "clip_id", "events")
"""What `columns` can give another name."""

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The names that a split or its folder may have, in any case."""

_CAPTION_COLUMN = re.compile(r"captions?(?:_(?P<key>[a-z]{2,3}|\d+))?")


@dataclass
class AudioFolderConfig(FolderConfig):
    """Where the folder is, what its columns mean and how it is split; see also `FolderConfig`.

    Attributes:
        languages: The caption languages, the anchor first, as ISO 639-3 codes; any.
        caption_language: The language of captions whose column names none.
        columns: What the table calls one of `FIELDS`, where it is another name: `{"caption": "text"}`.
        validation_fraction: The part of the recordings that is drawn for validation where the folder has no splits, at
            least one; 0 draws none.
        test_fraction: Likewise for testing.
        seed: Of the draw.
    """

    DATASET = "this folder"
    LAYOUT = f"the folder that holds the audio and {', '.join(TABLES[:-1])} or {TABLES[-1]}"
    ENGLISH_ONLY = False

    caption_language: str = LANGUAGES[0]
    columns: Mapping[str, str] = field(default_factory=dict)
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.columns if name not in FIELDS]
        if unknown:
            raise ValueError(f"columns names {unknown}; it can name {', '.join(FIELDS)}")
        for name in ("validation_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 0 and less than 1")

    def check_languages(self) -> None:
        """Any codes will do, as long as they are codes."""
        if isinstance(self.languages, str):
            raise ValueError(f"languages is the string {self.languages!r}; give a list such as [{self.languages!r}]")
        self.languages = tuple(self.languages)
        wrong = [code for code in (*self.languages, self.caption_language) if not re.fullmatch("[a-z]{3}", code)]
        if wrong or not self.languages or len(set(self.languages)) < len(self.languages):
            raise ValueError(
                f"languages is {list(self.languages)} and caption_language {self.caption_language!r}; give codes of "
                "ISO 639-3 such as 'eng', at least one, each once"
            )

    def tables(self) -> list[str]:
        """The tables, as relative paths."""
        return [file for file in self.files if PurePosixPath(file).name in TABLES]

    def texts(self) -> list[str]:
        """The text files, as relative paths: they count where there is no table."""
        return [] if self.tables() else [file for file in self.files if file.endswith(".txt")]

    def metadata_files(self) -> list[Path]:
        """The tables, or else the text files."""
        files = self.tables() or self.texts()
        if not files:
            parquet = [file for file in self.files if file.endswith((".parquet", ".arrow"))]
            hint = f"; {some(parquet, 1)} is a dataset that datasets.load_dataset reads" if parquet else ""
            raise FileNotFoundError(
                f"{self.folder} holds neither {', '.join(TABLES)} nor text files beside the audio{hint}"
            )
        folders = [str(PurePosixPath(file).parent) for file in self.tables()]
        twice = [file for file in self.tables() if folders.count(str(PurePosixPath(file).parent)) > 1]
        if twice:
            raise ValueError(f"{self.folder} holds several tables in one place: {some(twice)}; keep one")
        return [self.folder / file for file in files]


class AudioFolder(FolderBuilder):
    """A folder of recordings with captions as rows.

    `AudioFolder(data_dir="my_sounds").download_and_prepare()`, then `.as_dataset(split="train")`.
    """

    BUILDER_CONFIG_CLASS = AudioFolderConfig
    DESCRIPTION = "A folder of recordings with captions."

    def collect(self) -> Collection:
        """The recordings that the tables or the text files caption."""
        config, collection = self.config, Collection()
        config.metadata_files()
        records = merge(read_tables(config) if config.tables() else read_texts(config))
        splits = choose_splits(config, records)
        _check_ids(records)
        for name, record in records.items():
            path = config.recordings.at(name)
            collection.add(splits[name], _clip(record, name, config.languages), name, path)
        used = {clip.audio_path for clips in collection.clips.values() for clip in clips}
        used |= {str(config.recordings.at(name)) for name in records}
        unused = [file for file in config.recordings.files if str(config.recordings.folder / file) not in used]
        collection.leave_out("no caption", *unused)
        return collection


Record = dict[str, Any]
"""What is said of a recording: "where", "captions" by language, and the optional fields."""


def read_tables(config: AudioFolderConfig) -> Iterable[tuple[str, Record]]:
    """Reads the tables of a folder.

    Args:
        config: Of the folder.

    Yields:
        A line's recording, relative to the folder, and what the line says of it.

    Raises:
        ValueError: The column of file names or that of captions is missing, a language is unknown, or a cell is of
            another form.
    """
    for table in config.tables():
        for line in read_table(config.folder / table):
            values = {name: line.values.get(config.columns.get(name, name)) for name in FIELDS}
            file_name = values["file_name"]
            if not isinstance(file_name, str) or not file_name.strip():
                column = config.columns.get("file_name", "file_name")
                raise ValueError(
                    f"{line.where}: {column} is {file_name!r}; give a path. The columns are {list(line.values)}; "
                    "columns={'file_name': ...} says which of them holds it"
                )
            yield str(PurePosixPath(table).parent / file_name.strip().replace("\\", "/")), _record(line, values, config)


def read_texts(config: AudioFolderConfig) -> Iterable[tuple[str, Record]]:
    """Reads the text files beside the recordings of a folder.

    Args:
        config: Of the folder.

    Yields:
        A recording, relative to the folder, and what its text says of it.
    """
    texts = {file.removesuffix(".txt") for file in config.texts()}
    for file in config.recordings.files:
        stem = str(PurePosixPath(file).with_suffix(""))
        if stem in texts:
            lines = (config.folder / f"{stem}.txt").read_text(encoding="utf-8-sig").splitlines()
            yield file, {"where": f"{stem}.txt", "captions": {config.caption_language: lines}}


def merge(records: Iterable[tuple[str, Record]]) -> dict[str, Record]:
    """Puts together what several lines say of one recording.

    Args:
        records: Recordings and what a line says of each.

    Returns:
        By recording: all its captions, each once, and the optional fields.

    Raises:
        ValueError: Two lines say different things of a field.
    """
    merged: dict[str, Record] = {}
    for name, record in records:
        known = merged.setdefault(name, {"where": record["where"], "captions": {}})
        for language, texts in record["captions"].items():
            both = (*known["captions"].get(language, ()), *written(texts))
            known["captions"][language] = list(dict.fromkeys(both))
        for key in record.keys() - {"where", "captions"}:
            if known.setdefault(key, record[key]) != record[key]:
                raise ValueError(
                    f"{record['where']}: {key} of {name!r} is {record[key]!r}, and {known[key]!r} at {known['where']}"
                )
    return merged


def choose_splits(config: AudioFolderConfig, records: Mapping[str, Record]) -> dict[str, str]:
    """Says which split each recording is in.

    Args:
        config: Of the folder.
        records: From `merge`.

    Returns:
        The split by recording: as its line says, else as its folder's name says, else drawn by source.

    Raises:
        ValueError: Some have a split and some have none, or there are too few to draw from.
    """
    given = {name: record.get("split") or _split_of_folder(name) for name, record in records.items()}
    without = [name for name, split in given.items() if split is None]
    if not without:
        return {name: str(split) for name, split in given.items()}
    if len(without) < len(given):
        other, split = next((name, split) for name, split in given.items() if split is not None)
        raise ValueError(
            f"{len(without)} of {len(given)} recordings have no split: {some(without)}; but {other} is of {split}, by "
            "its line or by the name of its folder. Give all or none: a column split settles it"
        )
    there = {name: record for name, record in records.items() if config.recordings.at(name) is not None} or records
    sources = {name: _source(record, name) for name, record in there.items()}
    count = len(set(sources.values()))
    fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
    counts = {split: max(1, round(part * count)) for split, part in fractions.items() if part}
    if sum(counts.values()) >= count:
        raise ValueError(
            f"{count} recordings are too few to draw {' and '.join(counts)} from; give more, or a column split, or "
            "validation_fraction=0 and test_fraction=0"
        )
    drawn = draw_sources(sources.values(), counts, config.seed)
    return {name: drawn.get(_source(record, name), "train") for name, record in records.items()}


def _split_of_folder(name: str) -> str | None:
    parts = [part.casefold() for part in PurePosixPath(name).parts[:-1]]
    return next((SPLIT_NAMES[part] for part in parts if part in SPLIT_NAMES), None)


def _record(line: Line, values: Mapping[str, Any], config: AudioFolderConfig) -> Record:
    record: Record = {"where": line.where, "captions": _captions(line, values, config)}
    labels = values["labels"] if values["labels"] is not None else values["label"]
    optional = {
        "split": _split(values["split"], line.where),
        "labels": _labels(_parsed(labels)),
        "source": _text(values["source"]),
        "license": _text(values["license"]) or _text(line.values.get("licence")),
        "clip_id": _text(values["clip_id"]),
        "events": _events(_parsed(values["events"]), line.where),
    }
    return record | {key: value for key, value in optional.items() if value}


def _captions(line: Line, values: Mapping[str, Any], config: AudioFolderConfig) -> dict[str, list[str]]:
    cells = {"caption": values["caption"], "captions": values["captions"]}
    cells |= {column: cell for column, cell in line.values.items() if _is_of_language(column)}
    if not any(column in line.values for column in (*cells, *map(config.columns.get, ("caption", "captions")))):
        raise ValueError(
            f"{line.where}: no column of captions among {list(line.values)}; call it caption, captions or "
            "caption_<language>, or give columns={'caption': ...}"
        )
    captions: dict[str, list[str]] = {}
    for column, cell in cells.items():
        key = _CAPTION_COLUMN.fullmatch(column)["key"]  # type: ignore[index]
        plain = config.caption_language if key is None or key.isdigit() else key
        for language, texts in _texts_by_language(_parsed(cell), plain, f"{line.where}, {column}"):
            _check_language(language, config, f"{line.where}, {column}")
            captions.setdefault(language, []).extend(texts)
    return captions


def _is_of_language(column: Any) -> bool:
    match = _CAPTION_COLUMN.fullmatch(column) if isinstance(column, str) else None
    return match is not None and match["key"] is not None


def _check_language(language: str, config: AudioFolderConfig, where: str) -> None:
    known = (*config.languages, *LANGUAGES, config.caption_language)
    if language not in known:
        close = difflib.get_close_matches(language, known, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"{where}: unknown language {language!r}{hint}; the codes are ISO 639-3, and languages=[...] takes any"
        )


def _texts_by_language(cell: Any, language: str, where: str) -> Iterable[tuple[str, list[str]]]:
    if isinstance(cell, Mapping):
        for code, texts in cell.items():
            yield from _texts_by_language(texts, str(code), where)
    elif cell is None or isinstance(cell, str):
        yield language, [cell or ""]
    elif isinstance(cell, Sequence) and all(text is None or isinstance(text, str) for text in cell):
        yield language, [text or "" for text in cell]
    else:
        raise ValueError(f"{where}: {cell!r} is no caption; give a text, a list of texts, or a mapping of languages")


def _parsed(cell: Any) -> Any:
    """A cell of CSV that holds JSON is what it says; a caption that only begins like JSON is itself."""
    if isinstance(cell, str) and cell.strip()[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell
    return cell


def _split(cell: Any, where: str) -> str | None:
    name = _text(cell)
    if name and name.casefold() not in SPLIT_NAMES:
        raise ValueError(f"{where}: the split is {name!r}; give one of {', '.join(SPLITS)}")
    return SPLIT_NAMES[name.casefold()] if name else None


def _labels(cell: Any) -> list[str]:
    labels = cell if isinstance(cell, list) else [cell]
    return [str(label) for label in labels if _text(label)]


def _events(cell: Any, where: str) -> list[Event]:
    if not cell:
        return []
    try:
        return [
            Event(
                label=str(e["label"]),
                onset_seconds=float(e["onset_seconds"]),
                offset_seconds=float(e["offset_seconds"]),
            )
            for e in cell
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: events is {cell!r}; give a list of objects with label, onset_seconds and offset_seconds"
        ) from error


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def _source(record: Record, name: str) -> str:
    return record.get("source") or f"{FILE_SOURCE}{name}"


def _clip(record: Record, name: str, languages: Sequence[str]) -> Clip:
    captions = {language: record["captions"].get(language, []) for language in languages}
    fields = {key: record[key] for key in ("labels", "events") if key in record}
    return Clip(record.get("clip_id", name), captions, _source(record, name), record.get("license", ""), **fields)


def _check_ids(records: Mapping[str, Record]) -> None:
    names: dict[str, str] = {}
    for name, record in records.items():
        other = names.setdefault(record.get("clip_id", name), name)
        if other != name:
            raise ValueError(
                f"{record['where']}: {other!r} and {name!r} have the same clip_id {record['clip_id']!r}; ids are unique"
            )
