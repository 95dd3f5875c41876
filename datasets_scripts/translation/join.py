"""Add translated captions from a Parquet file of `recipes/translate_captions.py` to a dataset.

>>> rows = join_translations(rows, "translations.parquet")  # doctest: +SKIP
>>> rows["test"][0]["captions"]["fra"]  # doctest: +SKIP
['Un chien aboie sous la pluie']
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from unicodedata import normalize

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features

from ..builders.recordings import listing
from ..schema import replace_columns, text_lists
from ..stream import RowStream
from .table import Paths, languages_of, read_translations, source_hash

Rows = TypeVar("Rows", Dataset, DatasetDict, RowStream, dict[str, RowStream])
Captions = Mapping[str, list[str] | None]
Problems = defaultdict[str, list[str]]  # problem -> affected captions or clips
logger = logging.getLogger(__name__)


class Caption(NamedTuple):
    """Caption text with its clip id and its index among the captions of the clip in one language."""

    clip_id: str
    caption_index: int
    text: str


def join_translations(
    rows: Rows, path: Paths, languages: Sequence[str] | None = None, strict: bool = True, source_language: str = "eng"
) -> Rows:
    """Add the captions in a translations file to a dataset.

    Embedded audio is neither decoded nor copied. The KCL and CACL losses treat captions with the same index in two
    languages as translations of each other. Therefore a language is added to a clip only if all captions of the clip
    are translated.

    Args:
        rows: A `Dataset`, a `DatasetDict`, a `RowStream`, or a dict of `RowStream` splits, with rows as in `schema.py`
            and unique clip ids.
        path: One or several Parquet files with the columns of `table.SCHEMA`.
        languages: ISO 639-3 codes of the languages to add. None: all languages in the file.
        strict: Whether to raise an error if translations are missing, are stale (the caption has changed), or belong to
            unknown clips (not in the dataset). If False, the function logs a warning, skips the language for clips with
            missing or stale translations, and ignores unknown clips.
        source_language: Language of the original captions.

    Returns:
        The same type as `rows`. Streams are joined lazily: errors are raised when a row is read, there are no warnings,
        and unknown clips in the file are not detected.

    Raises:
        FileNotFoundError: A translations file does not exist.
        ValueError: The file is invalid (see `read_translations`), lacks a language, or has a caption index that does
            not exist in the clip. A clip already has captions in a language. `strict` is set, and translations are
            missing, are stale or belong to unknown clips. The message contains the number of faults and the first few
            of them.
    """
    table = read_translations(path, languages)
    join = _Join(table, list(languages or languages_of(table)), strict, source_language)
    if isinstance(rows, Dataset):
        return join.splits({"": rows})[""]
    if isinstance(rows, DatasetDict):
        return DatasetDict(join.splits(rows))
    if isinstance(rows, RowStream):
        return rows.map(join.row, join.features(rows.features))
    return {name: split.map(join.row, join.features(split.features)) for name, split in rows.items()}


def read_captions(rows: Dataset | DatasetDict, language: str = "eng") -> list[Caption]:
    """Return all captions in one language, in row order. Raise ValueError without captions, or for repeated ids."""
    all_captions = []
    for split in rows.values() if isinstance(rows, DatasetDict) else [rows]:
        _require_language(split.features["captions"], language)
        for clip_id, captions in _read_rows(split):
            for index, text in enumerate(captions[language] or []):
                all_captions.append(Caption(clip_id, index, text))
    return all_captions


def _read_rows(rows: Dataset) -> list[tuple[str, Captions]]:
    """Return the clip id and captions of every row; raise ValueError if a clip id is duplicated."""
    columns = rows.with_format("arrow").select_columns(["clip_id", "captions"])[:]
    clip_ids = columns["clip_id"].to_pylist()

    repeated = [repr(clip_id) for clip_id, count in Counter(clip_ids).items() if count > 1]
    if repeated:
        raise ValueError(f"{len(repeated)} clip ids are in the dataset more than once: {listing(repeated)}")
    return list(zip(clip_ids, columns["captions"].to_pylist(), strict=True))


def _require_language(captions: Mapping[str, Any], language: str) -> None:
    if language not in captions:
        raise ValueError(f"the rows have no captions in {language!r}; they have {list(captions)}")


def _report(errors: Problems, gaps: Problems, strict: bool) -> None:
    """Raise ValueError if there are errors. For gaps, raise ValueError if `strict` is set, and otherwise warn."""
    problems = errors or gaps
    message = "; ".join(f"{len(names)} {problem}: {listing(names)}" for problem, names in problems.items())
    if errors:
        raise ValueError(message)
    if gaps and strict:
        raise ValueError(f"{message}. Complete the file, join all its splits together, or pass strict=False")
    if gaps:
        logger.warning("%s. The language is skipped for such clips", message)


class _Join:
    """Translations by clip, with methods that add them to rows. `join_translations` describes the arguments."""

    def __init__(self, table: pa.Table, languages: list[str], strict: bool, source_language: str) -> None:
        if source_language in languages:
            raise ValueError(f"the file has translations into {source_language!r}, its source language")
        self.languages, self.strict, self.source_language = languages, strict, source_language

        # {clip id: {language: {caption index: (text, source hash)}}}
        self.lines: dict[str, dict[str, dict[int, tuple[str, str | None]]]] = {}
        names = ("clip_id", "language", "caption_index", "text", "source_hash")
        columns = [table[name].to_pylist() for name in names]
        for clip_id, language, index, text, digest in zip(*columns, strict=True):
            self.lines.setdefault(clip_id, {}).setdefault(language, {})[index] = text, digest

    def captions(self, clip_id: str, captions: Captions, errors: Problems, gaps: Problems) -> dict[str, list[str]]:
        """Return the captions and translations of a clip; a language with a missing or stale one has an empty list."""
        joined = {language: texts or [] for language, texts in captions.items()}
        sources = joined[self.source_language]
        for language in self.languages:
            lines = self.lines.get(clip_id, {}).get(language, {})
            existing = joined.get(language)

            texts = []
            for index, source in enumerate(sources):
                text, digest = lines.get(index, (None, None))
                if text is not None and digest in (None, source_hash(source)):
                    texts.append(text)
                elif not existing:
                    gap = "are missing" if text is None else "are stale, because their captions have changed"
                    gaps[f"translations into {language} {gap}"].append(f"{clip_id!r} caption {index}")

            for index in lines:
                if index >= len(sources):
                    error = f"translations into {language} have a caption index that the clip lacks (counted from 0)"
                    errors[error].append(f"{clip_id!r} caption {index} of {len(sources)}")
            if existing and texts:
                errors[
                    f"clips already have captions in {language}; load the dataset without that language, or set the "
                    "languages to join"
                ].append(repr(clip_id))

            if not existing:
                joined[language] = texts if len(texts) == len(sources) else []
        return joined

    def splits(self, splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
        """Add the translations to all splits of a map-style dataset."""
        errors, gaps = Problems(list), Problems(list)
        known: set[str] = set()
        captions_of: dict[str, list[dict[str, list[str]]]] = {}
        for name, split in splits.items():
            _require_language(split.features["captions"], self.source_language)
            captions_of[name] = []
            for clip_id, texts in _read_rows(split):
                known.add(clip_id)
                captions_of[name].append(self.captions(clip_id, texts, errors, gaps))

        unknown = sorted(self.lines.keys() - known)
        normal = {normalize("NFC", clip_id) for clip_id in known}
        for clip_id in unknown:
            alike = " (exists in another Unicode normal form)" if normalize("NFC", clip_id) in normal else ""
            gaps["clips of the file are not in the dataset"].append(f"{clip_id!r}{alike}")

        _report(errors, gaps, self.strict)
        joined = {}
        for name, split in splits.items():
            types = {"captions": self.features(split.features)["captions"]}
            joined[name] = replace_columns(split, {"captions": captions_of[name]}, types)
        return joined

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add the translations to a row of a stream."""
        _require_language(row["captions"], self.source_language)
        errors, gaps = Problems(list), Problems(list)
        captions = self.captions(row["clip_id"], row["captions"], errors, gaps)
        _report(errors, gaps if self.strict else Problems(list), strict=True)
        return {**row, "captions": captions}

    def features(self, features: Features) -> Features:
        """Return the dataset schema `features`, with the new languages added to its captions."""
        return Features({**features, "captions": {**features["captions"], **text_lists(self.languages)}})
