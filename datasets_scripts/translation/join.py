"""Captions in further languages: a text-only Parquet file of translations, joined to a dataset without its audio.

`table.py` says what the file holds, `recipes/translate_captions.py` makes it.

>>> rows = join_translations(rows, "translations.parquet")  # doctest: +SKIP
>>> rows["test"][0]["captions"]["fra"]  # doctest: +SKIP
['Un chien aboie sous la pluie']
"""

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, List, Value

from ..stream import RowStream
from .table import Paths, languages_of, listing, read_translations, source_hash

Rows = TypeVar("Rows", Dataset, DatasetDict, RowStream, dict[str, RowStream])
Captions = Mapping[str, list[str] | None]
_nfc = partial(unicodedata.normalize, "NFC")
logger = logging.getLogger(__name__)


class Caption(NamedTuple):
    """A caption: its clip, its place among the clip's captions in one language, its text."""

    clip_id: str
    caption_index: int
    text: str


def join_translations(
    rows: Rows, path: Paths, languages: Sequence[str] | None = None, strict: bool = True, source_language: str = "eng"
) -> Rows:
    """Adds the captions of a translations file to the rows of a dataset.

    Only the columns `clip_id` and `captions` are read, and only `captions` is made anew, so embedded audio is neither
    decoded nor copied. KCL and CACL take the captions with the same place in two languages for translations of each
    other; so a clip gets a language when all of its captions are translated, in their order, and else none of it.

    Args:
        rows: A dataset, a `RowStream`, or splits of such, with rows as in `schema.py`; each clip id is there once.
        path: One or several Parquet files, see `table.SCHEMA`.
        languages: ISO 639-3 codes to join; all that the file has when None.
        strict: Every clip must have all its captions in every language, made from the captions as they are now, and
            the file must hold no clip that the dataset lacks. Otherwise these are counted in a warning, what is
            missing or stale leaves its clip without that language, and what is unknown is left out.
        source_language: The language that the translations were made from.

    Returns:
        The same kind of dataset. A stream is joined as it is read, so what is wrong with a clip shows when
        its row comes, there are no warnings, and clips of the file that never come go unnoticed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: What `read_translations` refuses; a language that the file lacks; a caption index that the clip
            does not have; captions in a language that the clip already has; and if `strict`, translations that are
            missing, stale or of unknown clips. The message counts them and names the first few.
    """
    table = read_translations(path, languages)
    join = _Join(table, list(languages or languages_of(table)), strict, source_language)
    if isinstance(rows, Dataset):
        return join.splits({"": rows})[""]
    if isinstance(rows, DatasetDict):
        return DatasetDict(join.splits(rows))
    if isinstance(rows, RowStream):
        return join.stream(rows)
    return {name: join.stream(split) for name, split in rows.items()}


def read_captions(rows: Dataset | DatasetDict, language: str = "eng") -> list[Caption]:
    """The captions of a dataset in one language, without reading its audio.

    Args:
        rows: A dataset or its splits.
        language: The ISO 639-3 code.

    Returns:
        The captions in the order of the rows.

    Raises:
        ValueError: The rows have no captions in that language, or a clip id is there twice.
    """
    found = []
    for split in rows.values() if isinstance(rows, DatasetDict) else [rows]:
        _require_language(split.features["captions"], language)
        for clip_id, captions in _read_rows(split):
            for index, text in enumerate(captions[language] or []):
                found.append(Caption(clip_id, index, text))
    return found


def _read_rows(rows: Dataset) -> list[tuple[str, Captions]]:
    """Clip id and captions of every row."""
    columns = rows.with_format("arrow").select_columns(["clip_id", "captions"])[:]
    clip_ids = columns["clip_id"].to_pylist()

    twice = [repr(clip_id) for clip_id, count in Counter(clip_ids).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} clip ids are in the dataset more than once: {listing(twice)}")
    return list(zip(clip_ids, columns["captions"].to_pylist(), strict=True))


def _require_language(captions: Mapping[str, Any], language: str) -> None:
    if language not in captions:
        raise ValueError(f"the rows have no captions in {language!r}; they have {list(captions)}")


class _Problems:
    """What a file and a dataset disagree about, gathered so that one message tells it all."""

    def __init__(self) -> None:
        self.errors: dict[str, list[str]] = {}
        self.gaps: dict[str, list[str]] = {}

    def report(self, strict: bool) -> None:
        """Raises or warns, if there is anything to tell."""
        if self.errors:
            raise ValueError(self._told(self.errors))
        if self.gaps and strict:
            raise ValueError(
                f"{self._told(self.gaps)}. Complete the file, join every split that it is for, or pass strict=False, "
                "which leaves such clips without the language"
            )
        if self.gaps:
            logger.warning("%s. Such clips stay without the language", self._told(self.gaps))

    def _told(self, found: Mapping[str, list[str]]) -> str:
        told = []
        for what, names in found.items():
            told.append(f"{len(names)} {what}: {listing(names)}")
        return "; ".join(told)


class _Join:
    """Translations, ready to be put beside captions; the arguments are those of `join_translations`."""

    def __init__(self, table: pa.Table, languages: list[str], strict: bool, source_language: str) -> None:
        if source_language in languages:
            raise ValueError(f"the file translates into {source_language!r}, the language it is made from")
        self.languages, self.strict, self.source_language = languages, strict, source_language

        # Text and hash of its caption, by clip, language and place.
        self.lines: dict[str, dict[str, dict[int, tuple[str, str | None]]]] = {}
        names = ("clip_id", "language", "caption_index", "text", "source_hash")
        for clip_id, language, place, text, digest in zip(*(table[name].to_pylist() for name in names), strict=True):
            self.lines.setdefault(clip_id, {}).setdefault(language, {})[place] = text, digest

    def captions(self, clip_id: str, captions: Captions, problems: _Problems) -> dict[str, list[str]]:
        """The captions of a clip: its own, and where the file translates all of them, those of the file."""
        joined = {language: texts or [] for language, texts in captions.items()}
        sources = joined[self.source_language]
        for language in self.languages:
            lines = self.lines.get(clip_id, {}).get(language, {})
            own = joined.get(language)

            texts = []
            for place, source in enumerate(sources):
                text, digest = lines.get(place, (None, None))
                if text is not None and digest in (None, source_hash(source)):
                    texts.append(text)
                elif not own:
                    what = "are missing" if text is None else "are of captions that have changed since"
                    gaps = problems.gaps.setdefault(f"translations into {language} {what}", [])
                    gaps.append(f"{clip_id!r} caption {place}")

            for place in lines:
                if place >= len(sources):
                    what = f"translations into {language} are of captions that the clip does not have (from 0)"
                    problems.errors.setdefault(what, []).append(f"{clip_id!r} caption {place} of {len(sources)}")
            if own and texts:
                what = (
                    f"clips have captions in {language} of their own beside those of the file; load the dataset "
                    "without that language, or name the languages to join"
                )
                problems.errors.setdefault(what, []).append(repr(clip_id))

            if not own:
                joined[language] = texts if len(texts) == len(sources) else []
        return joined

    def splits(self, splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
        """Joins map-style datasets, for which the file is made as a whole."""
        problems = _Problems()
        rows_of = {}
        for name, split in splits.items():
            _require_language(split.features["captions"], self.source_language)
            rows_of[name] = _read_rows(split)

        known: set[str] = set()
        for rows in rows_of.values():
            known.update(clip_id for clip_id, _ in rows)
        unknown = _unknown(sorted(self.lines.keys() - known), known)
        if unknown:
            problems.gaps["clips of the file are not in the dataset"] = unknown

        joined = {}
        for name, split in splits.items():
            captions = [self.captions(clip_id, own, problems) for clip_id, own in rows_of[name]]
            joined[name] = self._with_captions(split, captions)
        problems.report(self.strict)
        return joined

    def _with_captions(self, rows: Dataset, captions: list[Any]) -> Dataset:
        """The same rows with other captions, without touching any other column."""
        feature = self._features(rows.features)["captions"]
        chosen = None
        if rows._indices is not None:
            # To add a column to a selection, datasets would write the selection anew, audio and all. So the column is
            # added to what was selected from, empty where nothing was, and selected again.
            chosen = rows._indices.column(0).to_pylist()
            selected, captions = captions, [None] * len(rows.data)
            for place, of_clip in zip(chosen, selected, strict=True):
                captions[place] = of_clip

        column = pa.array(captions, Features({"captions": feature}).arrow_schema.field("captions").type)
        whole = Dataset(rows.data, info=rows.info.copy(), split=rows.split, fingerprint=rows._fingerprint)
        joined = whole.remove_columns("captions").add_column("captions", column, feature=feature)
        joined = joined.select_columns(list(rows.features))
        joined = joined if chosen is None else joined.select(chosen)

        form = rows.format
        return joined.with_format(form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"])

    def stream(self, rows: RowStream) -> RowStream:
        """Joins a stream, row by row as it is read."""
        return rows.map(partial(_join_row, join=self), self._features(rows.features))

    def _features(self, features: Features) -> Features:
        joined = dict.fromkeys(self.languages, List(Value("string")))
        return Features({**features, "captions": {**features["captions"], **joined}})


def _join_row(row: dict[str, Any], join: _Join) -> dict[str, Any]:
    _require_language(row["captions"], join.source_language)
    problems = _Problems()
    captions = join.captions(row["clip_id"], row["captions"], problems)
    if join.strict or problems.errors:
        problems.report(strict=True)
    return {**row, "captions": captions}


def _unknown(clip_ids: list[str], known: Iterable[str]) -> list[str]:
    """Names of clips that are not known, with a word on those that only look alike."""
    names = []
    normal = set(map(_nfc, known)) if clip_ids else set()
    for clip_id in clip_ids:
        alike = " (there in another Unicode normal form)" if _nfc(clip_id) in normal else ""
        names.append(f"{clip_id!r}{alike}")
    return names
