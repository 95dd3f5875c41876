"""Find captions, times, labels and sources in a table by the names of its columns, and read its cells.

Folders, datasets of the Hub, tar files, streams and lists of recordings are all read by `Columns`.
"""

import ast
import html
import json
import logging
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from modeling_supclap.languages import LANGUAGES, find_language_code

from ..schema import SEGMENT_COLUMNS, SPLIT_NAMES, Event

logger = logging.getLogger(__name__)

_PATHS = ("path", "audio_filepath", "audio_file", "audio_path", "audio", "begin_path", "begin_file", "in_file")
USUAL_NAMES = {
    "file_name": ("file_name", "filename", "file", *_PATHS),
    "split": ("split",),
    "labels": ("labels", "label", "tags", "tag"),
    "source": ("source",),
    "license": ("license", "licence"),
    "clip_id": ("clip_id",),
    "events": ("events",),
    "language": ("language", "lang", "locale"),
    "rate": ("sampling_rate", "sample_rate", "sampling_rate_hz"),
    "start_seconds": ("start_seconds",),
    "end_seconds": ("end_seconds",),
}
"""Usual names of columns as `plain` returns them, by field, the preferred first. Captions and parts have more."""

CAPTIONS = ("text", "sentence", "raw_text", "transcription", "transcript", "annotation", "common_name", "species")
"""Names of the captions in tables without a column `caption`, the preferred first."""

_SEVERAL_LABELS = ("labels", "tags")  # columns in which separators divide labels
_TIMES = (*SEGMENT_COLUMNS, "duration_seconds")

# Names of the start and of the end or the length of a part, without units. Only pairs are read, because a single start
# is often the start of the clip in another recording, such as a YouTube video.
_PARTS: tuple[tuple[str, str], ...] = (
    ("start", "end"),
    ("begin", "end"),
    ("onset", "offset"),
    ("tmin", "tmax"),
    ("start", "stop"),
)
_LENGTHS = ("duration", "delta")
_PARTS += tuple((start, length) for length in _LENGTHS for start in ("start", "begin", "onset", "offset"))
_TIME_WORDS = {"start", "begin", "onset", "offset", "tmin", "tmax", "end", "stop", "from", "to"}
_UNITS: dict[str, float | None] = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("sample", "samples"), None),  # the sampling rate is in another column
}

# Missing values as pandas and spreadsheets write them.
_PLACEHOLDERS = frozenset(
    {"nan", "-nan", "none", "null", "nil", "na", "n/a", "#n/a", "#na", "<na>", "nat"}
    | {"#null!", "#value!", "#ref!", "#name?", "#div/0!"}
)
_EDGES = re.compile(r"^[\s\u200b-\u200f\u2060\ufeff]+|[\s\u200b-\u200f\u2060\ufeff]+$")

# A list of texts in numpy form, which separates them only by white space.
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NUMPY_TEXTS = re.compile(rf"\[\s*(?:{_QUOTED.pattern})(?:\s+(?:{_QUOTED.pattern}))+\s*\]", re.DOTALL)


@dataclass
class ColumnOptions:
    """Names of the columns of a table. Columns that are not set are found by their usual names.

    Attributes:
        audio_column: Column of the recordings: file names, and in datasets also `Audio`, bytes or decoded audio.
        caption_column: Column of captions: texts, lists of texts, either by language, or class labels. Default:
            `caption` or `captions`, together with `caption_1`, `caption_2` and so on; if there are none, `text`,
            `sentence`, `transcription` and others. Columns such as `caption_fra` are also read.
        caption_language: Language of the captions without one in the name of their column or in a column `language`
            of their row, as ISO 639-3 code.
        caption_columns: All caption columns with their languages, such as `deu=Beschreibung eng=English`. Overrides
            `caption_column` and `caption_language`; other caption columns are ignored.
        label_column: Column of a class label, or of several.
        source_column: Column of the speaker, the site or the tape. Rows with equal values are in the same split.
        test_group: Value of the source column. Its recordings are the test split, instead of a random sample.
        columns: Column names as `{field: column}`, such as `{"split": "part", "start_seconds": "from"}`. An empty name
            turns a field off.
    """

    audio_column: str | None = None
    caption_column: str | None = None
    caption_language: str = LANGUAGES[0]
    caption_columns: Sequence[str] | Mapping[str, str] = ()
    label_column: str | None = None
    source_column: str | None = None
    test_group: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Add the options of single columns to `columns`, and parse `caption_columns`; raise ValueError if invalid."""
        if not isinstance(self.columns, Mapping):
            raise ValueError(f"columns is {self.columns!r}; expected a dict from field to column name")
        given = {"file_name": self.audio_column, "caption": self.caption_column}
        given |= {"labels": self.label_column, "source": self.source_column}
        self.columns = {**self.columns, **{name: column for name, column in given.items() if column is not None}}
        valid = (*USUAL_NAMES, "caption", "captions", "label", "duration_seconds")
        if unknown := sorted(self.columns.keys() - set(valid)):
            raise ValueError(f"columns has the unknown keys {unknown}; expected some of {', '.join(valid)}")

        texts: Any = self.caption_columns
        texts = [texts] if isinstance(texts, str) else texts
        pairs = texts.items() if isinstance(texts, Mapping) else [text.partition("=")[::2] for text in texts]
        self.language_of_column: dict[str, str] = {}
        for language, column in pairs:
            if not re.fullmatch("[a-z]{3}", language) or not column:
                raise ValueError(f"caption_columns is {texts!r}; expected LANGUAGE=COLUMN, such as deu=Beschreibung")
            self.language_of_column[column] = language


Record = dict[str, Any]
"""Fields of `schema.Row` that a row of a table contains, with "split", "where" and `SEGMENT_COLUMNS`; others are ""."""


class Columns:
    """Columns of a table by their content.

    Args:
        names: Names of all columns.
        options: Names that the user has set.
        languages: Languages that captions may have. None: all.
        not_text: Columns that contain no text, so that captions are not searched in them.
        captioned: Whether the table contains captions.

    Raises ValueError if a named column is missing, or no column contains captions.
    """

    def __init__(
        self,
        names: Iterable[str],
        options: ColumnOptions,
        languages: Collection[str] | None = None,
        not_text: Collection[str] = (),
        captioned: bool = True,
    ) -> None:
        self.names, self.language, self.languages = list(names), options.caption_language, languages
        self.placeholders: list[str] = []  # cells that are not read, such as "nan"
        chosen = {"labels" if name == "label" else name: column for name, column in options.columns.items()}
        for column in [*chosen.values(), *options.language_of_column]:
            if column and column not in self.names:
                raise ValueError(
                    f"there is no column {column!r} among {self.names}; name another in caption_column, audio_column, "
                    "label_column, source_column, caption_columns or columns"
                )

        self.of_field: dict[str, str] = {}
        by_name = {plain(name): name for name in reversed(self.names)}
        for name, usual in USUAL_NAMES.items():
            found = next((by_name[each] for each in usual if each in by_name), "")
            if column := chosen.get(name, found):
                self.of_field[name] = column
        self._find_parts(chosen)
        self.captions: dict[str, str | None] = {**options.language_of_column}  # column -> language in its name
        if captioned and not self.captions:
            self._find_captions(chosen, not_text)

    def _find_captions(self, chosen: Mapping[str, str], not_text: Collection[str]) -> None:
        named = [chosen[name] for name in ("caption", "captions") if name in chosen]
        texts = [name for name in self.names if name not in not_text]
        self.captions, unknown = dict.fromkeys(named), []
        for name in texts:
            match = re.fullmatch("captions?_?(.*)", plain(name))
            key = match[1] if match and name not in named else None
            if key and not key.isdigit():
                if language := language_code(key):
                    self.captions[name] = language
                else:
                    unknown.append(name)
            elif key is not None and not named:
                self.captions[name] = None
        if None not in self.captions.values() and self.language not in self.captions.values():
            usual = [name for each in CAPTIONS for name in texts if plain(name) == each]
            self.captions |= dict.fromkeys(usual[:1])
        if not self.captions or set(named) - set(texts):
            raise ValueError(f"no captions in {named or self.names}; set caption_column to one of {texts}")
        _warn_of_unused("captions", unknown, "caption_<ISO 639-3 code of the language>")

    def _find_parts(self, chosen: Mapping[str, str]) -> None:
        """Find the columns of the start and the end, or the length, of a part of a recording."""
        self.of_field |= {name: column for name, column in chosen.items() if name in _TIMES and column}
        if set(_TIMES) & {*chosen, *self.of_field}:
            return
        kinds: dict[str, str] = {}
        for name in self.names:
            kind, unit = _split_time(name)
            if unit or "rate" in self.of_field:
                kinds.setdefault(kind, name)
        for start, end in _PARTS:
            if start in kinds and end in kinds:
                name = "duration_seconds" if end in _LENGTHS else "end_seconds"
                self.of_field |= {"start_seconds": kinds[start], name: kinds[end]}
                if "file offset" in kinds:  # in a Raven table of several files, other times start at the first file
                    self.of_field["file_offset"] = kinds["file offset"]
                return
        words = {name: set(plain(name).split("_")) for name in self.names}
        looks = [name for name in self.names if words[name] & _TIME_WORDS and not words[name] & {"file", "path"}]
        _warn_of_unused("times", looks, "start_seconds and end_seconds; whole recordings are read")

    @property
    def has_parts(self) -> bool:
        """Whether rows may be parts of recordings."""
        return not self.of_field.keys().isdisjoint(_TIMES)

    @property
    def read_names(self) -> list[str]:
        """Names of all columns that `read` reads."""
        return list(
            dict.fromkeys([*self.captions, *(self.of_field[name] for name in self.of_field if name != "file_name")])
        )

    def read(self, values: Mapping[str, Any], where: str) -> Record:
        """Read the cells of a row; raise ValueError with `where` if one is invalid."""
        cells = {name: values.get(column) for name, column in self.of_field.items()}
        record = {name: clean_text(cells.get(name)) for name in ("clip_id", "source", "license", "split")}
        record["split"] = SPLIT_NAMES.get(record["split"].casefold(), record["split"])
        try:
            segment = self._read_part(cells)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        language = self._read_language(cells.get("language"), where)
        captions, labels = self._read_captions(values, language, where), self._read_labels(cells.get("labels"))
        events = _read_events(parse(cells.get("events")), where)
        return {**record, "captions": captions, "labels": labels, "events": events, **segment, "where": where}

    def _read_language(self, cell: Any, where: str) -> str:
        """Return the language of the captions of a row that have none in the name of their column."""
        if None not in self.captions.values() or not (text := clean_text(cell)):
            return self.language
        column, advice = self.of_field["language"], "rename the column, or set columns={'language': ''}"
        language = _stated_language(text)
        if not language:
            raise ValueError(f"{where}: the language of the captions is {text!r}; use ISO 639-3 codes, {advice}")
        if language != self.language:
            warn_once(f"the column {column!r} has the language of the captions; if it is another one, {advice}")
        return language

    def _read_captions(self, values: Mapping[str, Any], row_language: str, where: str) -> dict[str, list[str]]:
        captions: dict[str, list[str]] = {}
        columns: dict[str, dict[bool, str]] = {}  # by language, and whether a name or key states the language
        for column, language_of_name in self.captions.items():
            cell, place = parse(values.get(column)), f"{where}, column {column!r}"
            for language, texts in read_texts(cell, language_of_name or row_language, place):
                if self.languages is not None and language not in (*self.languages, row_language):
                    raise ValueError(
                        f"{place} is in the unknown language {language!r}; rename the column, or add its ISO 639-3 "
                        "code to languages"
                    )
                cleaned = self._clean(texts)
                captions.setdefault(language, []).extend(cleaned)
                if cleaned:
                    is_stated = language_of_name is not None or isinstance(cell, Mapping)
                    columns.setdefault(language, {})[is_stated] = column
        for language, merged in columns.items():
            if len(merged) > 1:
                names = [name for name in self.names if name in merged.values()]
                raise ValueError(
                    f"columns {names} would all be captions in {language!r}; set --caption_language, or "
                    f"--caption_columns {language}={names[0]} {language}={names[1]}"
                )
        return captions

    def _clean(self, texts: Iterable[Any]) -> list[str]:
        cleaned = []
        for text in texts:
            if clean := clean_text(text):
                cleaned.append(clean)
            elif text is not None and str(text).strip():
                self.placeholders.append(str(text))
        return cleaned

    def _read_labels(self, cell: Any) -> list[str]:
        cell = parse(cell)
        if isinstance(cell, list):
            return self._clean(cell)
        labels, column = self._clean([cell]), self.of_field.get("labels")
        if labels and plain(column) in _SEVERAL_LABELS:
            labels = list(filter(None, re.split(r"\s*[;|]\s*|,(?=\S)", labels[0])))
        for label in labels:
            if re.search("[;|,]", label):
                warn_once(
                    f"column {column!r} contains {label!r}, which is one label; divide several labels by ; in a column "
                    "labels, or write a JSON list"
                )
        return labels

    def _read_part(self, cells: Mapping[str, Any]) -> dict[str, float | None]:
        times: dict[str, float | None] = {}
        for name in (*_TIMES, "file_offset"):
            column = self.of_field.get(name, name)
            unit = _split_time(column)[1] or 1 / (read_seconds(cells.get("rate"), "sampling_rate") or float("nan"))
            times[name] = read_seconds(cells.get(name), column, unit)
        start, end, duration, offset = times.values()
        if duration is not None:
            end = (start or 0.0) + duration
        if offset is not None and start is not None:
            start, end = offset, None if end is None else offset + end - start
        if end is not None and end <= (start or 0):
            raise ValueError(f"the clip is from {start} to {end} s; expected a start before its end")
        return {"start_seconds": start, "end_seconds": end}

    def warn_of_placeholders(self, table: str) -> None:
        """Log the number of cells that were not read, because they only mark a missing caption or label."""
        if self.placeholders:
            count, example = len(self.placeholders), self.placeholders[0]
            warn_once(f"{table}: left out {count} captions or labels that mark missing values, such as {example!r}")


@cache
def warn_once(message: str) -> None:
    """Log a warning once in this process, because a sweep loads the same dataset in every run."""
    logger.warning(message)


def _warn_of_unused(kind: str, names: Sequence[str], usual: str) -> None:
    if names:
        shown = ", ".join(map(repr, names))
        warn_once(f"these columns look like {kind} and are not used: {shown}; rename them to {usual}, or set columns")


def plain(name: Any) -> str:
    """Return the words of a column name in lower case, joined by `_`.

    >>> plain("Begin Time (s)"), plain("caption_zh-CN"), plain("startTime")
    ('begin_time_s', 'caption_zh_cn', 'start_time')
    """
    words = re.sub("(?<=[a-z0-9])(?=[A-Z])", " ", str(name))
    return re.sub(r"[\W_]+", "_", words.casefold()).strip("_")


@cache
def _split_time(name: str) -> tuple[str, float | None]:
    """Return the kind of time in a column name without its unit, and the unit in seconds.

    >>> _split_time("Begin Time (s)"), _split_time("clip_end_ms")
    (('begin', 1.0), ('end', 0.001))
    """
    words = plain(name).split("_")
    unit = _UNITS[words.pop()] if len(words) > 1 and words[-1] in _UNITS else 1.0
    return " ".join(word for word in words if word not in ("t", "time", "clip", "segment", "event")), unit


@cache
def language_code(key: str) -> str:
    """Return the ISO 639-3 code of a language code with two or three letters or of an English name, or "".

    Names and codes of two letters are those of `LANGUAGES`, because others may be other words of a column name.

    >>> language_code("DEU"), language_code("zh-CN"), language_code("German"), language_code("id")
    ('deu', 'zho', 'deu', '')
    """
    word = plain(key).partition("_")[0]
    code = find_language_code(word)
    word = code if code in LANGUAGES else word
    word = "zho" if word == "cmn" else word
    return word if re.fullmatch("[a-z]{3}", word) else ""


@cache
def _stated_language(text: str) -> str:
    """Return the ISO 639-3 code of a language in a cell of its own, or "".

    >>> _stated_language("pt-BR"), _stated_language("Chinese (Simplified)"), _stated_language("en, de")
    ('por', 'zho', '')
    """
    match = re.fullmatch(r"([a-z]{2,3})(?:[-_]\w+)*|(\w+) \(.+\)", text, re.IGNORECASE)
    part = (match[1] or match[2]).casefold() if match else ""
    return language_code(find_language_code(text) or find_language_code(part) or part)


def clean_text(cell: Any) -> str:
    """Return a cell as text in Unicode's composed form (NFC), without HTML entities and white space at its ends.

    Missing values are "": None, and texts such as "nan" and "#N/A", which pandas and spreadsheets write. Half of a
    surrogate pair, such as a cut emoji in JSON, becomes U+FFFD, because no UTF-8 file can contain it.

    >>> clean_text(" wind &amp; rain "), clean_text("NaN"), clean_text(7), clean_text("rain \\ud83c")
    ('wind & rain', '', '7', 'rain \ufffd')
    """
    text = "" if cell is None else str(cell).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = re.sub(r"&(#\d+|#x[\da-f]+|[a-z]+);", lambda match: html.unescape(match[0]), text, flags=re.IGNORECASE)
    text = _EDGES.sub("", re.sub("<br ?/?>", " ", unicodedata.normalize("NFC", text)))
    return "" if text.casefold() in _PLACEHOLDERS else text


def clean_texts(texts: Iterable[Any]) -> tuple[str, ...]:
    """Clean texts (see `clean_text`), and remove the empty ones."""
    return tuple(filter(None, map(clean_text, texts)))


def parse(cell: Any) -> Any:
    """Parse a cell if it is a list or an object, in JSON, Python or numpy form; return others unchanged."""
    text = cell.strip() if isinstance(cell, str) else ""
    if _NUMPY_TEXTS.fullmatch(text):
        return [ast.literal_eval(quoted) for quoted in _QUOTED.findall(text)]
    if text[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return read(text)
    return cell


def read_texts(cell: Any, language: str, where: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the captions in a parsed cell as (language, texts); plain texts are in `language`."""
    if isinstance(cell, Mapping):
        for key, texts in cell.items():
            if not (code := language_code(str(key))):
                raise ValueError(f"{where}: unknown language {key!r}; use ISO 639-3 codes such as 'eng'")
            if texts is not None:
                yield from read_texts(texts, code, where)
    elif cell is None or isinstance(cell, str):
        yield language, [cell]
    elif isinstance(cell, Sequence) and set(map(type, cell)) <= {str, type(None)}:
        yield language, cell
    elif cell == cell:  # not NaN
        raise ValueError(f"{where} contains {cell!r}; expected a text, a list, or a mapping from languages")


def read_seconds(cell: Any, name: str, unit: float = 1.0) -> float | None:
    """Return a time in seconds from a number in a unit or a clock time such as "1:30"; None without a value.

    >>> read_seconds("1,5", "start"), read_seconds("0:01:30.5", "start"), read_seconds(1500, "start_ms", 0.001)
    (1.5, 90.5, 1.5)
    """
    text = clean_text(cell)
    if not text:
        return None
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", text):
        raise ValueError(f"{name} is {text!r}, with a decimal comma or thousands; write it with a point or without it")
    *larger, last = text.replace(",", ".").split(":")
    seconds = -1.0
    with suppress(ValueError):
        parts = [*map(int, larger), float(last)]
        if len(parts) == 1:
            seconds = parts[0] * unit
        elif len(parts) <= 3 and min(parts) >= 0 and max(parts[1:]) < 60:
            seconds = sum(part * 60**power for power, part in enumerate(reversed(parts)))
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {cell!r}; expected a number of seconds, at least 0")
    return seconds


def _read_events(cell: Any, where: str) -> list[Event]:
    events: list[Event] = []
    try:
        for event in cell or ():
            onset, offset = float(event["onset_seconds"]), float(event["offset_seconds"])
            if not 0 <= onset <= offset:
                raise ValueError
            events.append({"label": str(event["label"]), "onset_seconds": onset, "offset_seconds": offset})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: events is {cell!r}; expected a list of objects with label, onset_seconds of at least 0, and "
            "offset_seconds"
        ) from error
    return events


def merge_captions(parts: Sequence[Mapping[str, Sequence[str]]], languages: Sequence[str]) -> dict[str, list[str]]:
    """Merge captions of one recording from several lines, `{language: [caption, ...]}` each, without repeats.

    Captions with the same index in two languages count as translations. Therefore, lines with equally many captions in
    all languages of the recording come first.

    >>> merge_captions([{"eng": ["Rain"]}, {"eng": ["A dog"], "fra": ["Un chien"]}], ["eng", "fra"])
    {'eng': ['A dog', 'Rain'], 'fra': ['Un chien']}
    """
    present = []
    for language in languages:
        if any(part.get(language) for part in parts):
            present.append(language)
    parallel: dict[tuple[str, ...], None] = {}
    others: list[tuple[str, str]] = []
    for part in parts:
        texts = [part.get(language, ()) for language in present]
        if len(set(map(len, texts))) == 1:
            parallel |= dict.fromkeys(zip(*texts, strict=True))
        else:
            for language, of_language in zip(present, texts, strict=True):
                others += [(language, text) for text in of_language]

    merged: dict[str, list[str]] = {language: [] for language in languages}
    merged |= {language: list(texts) for language, texts in zip(present, zip(*parallel, strict=True), strict=False)}
    distinct = {language: set(texts) for language, texts in merged.items()}
    for language, text in others:
        if text not in distinct[language]:
            merged[language].append(text)
            distinct[language].add(text)
    return merged
