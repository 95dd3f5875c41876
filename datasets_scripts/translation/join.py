"""Captions in further languages: a text-only Parquet file of translations, joined to a dataset without its audio.

`table.py` says what the file holds, `recipes/translate_captions.py` makes it.

>>> rows = join_translations(rows, "translations.parquet")  # doctest: +SKIP
>>> rows["test"][0]["captions"]["fra"]  # doctest: +SKIP
['Un chien aboie sous la pluie']
"""

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value

from .table import KEY, Paths, languages_of, listing, read_translations, source_hash

Rows = TypeVar("Rows", Dataset, DatasetDict, IterableDataset, IterableDatasetDict)
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
        rows: A dataset or its splits, rows as in `schema.py`. Each clip id is in a dataset once.
        path: One or several Parquet files, see `table.SCHEMA`.
        languages: ISO 639-3 codes to join; all that the file has when None.
        strict: Every clip must have all its captions in every language, made from the captions as they are now, and
            the file must hold no clip that the dataset lacks. Otherwise these are counted in a warning, what is
            missing or stale leaves its clip without that language, and what is unknown is left out.
        source_language: The language that the translations were made from.

    Returns:
        The same kind of dataset. An iterable dataset is joined as it is read, so what is wrong with a clip shows when
        its row comes, there are no warnings, and clips of the file that never come go unnoticed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: What `read_translations` refuses; a language that the file lacks; a caption index that the clip
            does not have; captions in a language that the clip already has; and if `strict`, translations that are
            missing, stale or of unknown clips. The message counts them and names the first few.
    """
    table = read_translations(path, languages)
    join = _Join(table, list(languages or languages_of(table)), strict, source_language)
    if isinstance(rows, IterableDataset):
        return join.iterable(rows)
    if isinstance(rows, IterableDatasetDict):
        return IterableDatasetDict({name: join.iterable(split) for name, split in rows.items()})
    if isinstance(rows, Dataset):
        return join.splits({"": rows})[""]
    return DatasetDict(join.splits(rows))


def read_captions(rows: Dataset | DatasetDict, language: str = "eng") -> list[Caption]:
    """The captions of a dataset in one language, without reading its audio.

    Args:
        rows: A dataset or its splits.
        language: ISO 639-3 code.

    Returns:
        The captions in the order of the rows.

    Raises:
        ValueError: The rows have no captions in that language, or a clip id is there twice.
    """
    splits = rows.values() if isinstance(rows, DatasetDict) else [rows]
    sources = [_read_source(split, language) for split in splits]
    return [source.caption(slot) for source in sources for slot in range(len(source.texts))]


class _Source(NamedTuple):
    """What translations are made from: the captions of a dataset end to end, those of clip i from `starts[i]` on."""

    clip_ids: pa.Array
    captions: pa.StructArray
    starts: np.ndarray
    texts: list[str]

    def caption(self, slot: int) -> Caption:
        """The caption at a place among all of the dataset's."""
        clip = int(np.searchsorted(self.starts, slot, side="right")) - 1
        return Caption(self.clip_ids[clip].as_py(), int(slot - self.starts[clip]), self.texts[slot])

    def names(self, slots: Sequence[int], wanted: np.ndarray) -> list[str]:
        """Those of the captions that are wanted, for a message."""
        captions = [self.caption(slot) for slot in slots if wanted[slot]]
        return [f"{caption.clip_id!r} caption {caption.caption_index}" for caption in captions]


class _Problems:
    """What a file and a dataset disagree about, gathered so that one message tells it all."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, what: str, names: Sequence[str]) -> None:
        """Notes what is wrong with the named clips or captions, if any."""
        if names:
            self.found.append(f"{len(names)} {what}: {listing(names)}")

    def report(self, strict: bool) -> None:
        """Raises or warns, if there is anything to tell."""
        message = "; ".join(self.found)
        if message and strict:
            raise ValueError(
                f"{message}. Complete the file, join every split that "
                "it is for, or pass strict=False, which leaves such clips without the language"
            )
        if message:
            logger.warning("%s. Such clips stay without the language", message)


@dataclass
class _Join:
    """Translations, ready to be put beside captions; the fields are the arguments of `join_translations`."""

    table: pa.Table
    languages: list[str]
    strict: bool
    source_language: str

    def __post_init__(self) -> None:
        if self.source_language in self.languages:
            raise ValueError(f"the file translates into {self.source_language!r}, the language it is made from")

    def splits(self, splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
        """Joins map-style datasets, for which the file is made as a whole."""
        sources = {name: _read_source(split, self.source_language) for name, split in splits.items()}
        problems = _Problems()
        known = pa.concat_arrays([source.clip_ids for source in sources.values()])
        unknown = self.table.filter(pc.invert(pc.is_in(self.table["clip_id"], value_set=known)))["clip_id"]
        problems.add("clips of the file are not in the dataset", _unknown(pc.unique(unknown).to_pylist(), known))
        joined = {name: self._dataset(split, sources[name], problems) for name, split in splits.items()}
        problems.report(self.strict)
        return joined

    def iterable(self, rows: IterableDataset) -> IterableDataset:
        """Joins an iterable dataset, row by row as it is read."""
        table = self.table.sort_by([(column, "ascending") for column in KEY]).combine_chunks()
        ids = table["clip_id"].combine_chunks().dictionary_encode()
        first = np.flatnonzero(np.diff(ids.indices.to_numpy(), prepend=-1)).tolist()
        spans = dict(zip(ids.dictionary.to_pylist(), zip(first, [*first[1:], len(table)], strict=True), strict=True))
        options: dict[str, Any] = {
            "input_columns": ["clip_id", "captions"],
            "fn_kwargs": {"join": replace(self, table=table), "spans": spans},
        }
        if rows.features is None:
            return rows.map(_join_row, **options)
        # A feature that decodes, such as Audio, would decode on its way through `map`.
        features = self._features(rows.features)
        decoding = {name: feature for name, feature in features.items() if getattr(feature, "decode", False)}
        passing = {name: replace(feature, decode=False) for name, feature in decoding.items()}
        for name, feature in passing.items():
            rows = rows.cast_column(name, feature)
        joined = rows.map(_join_row, features=Features({**features, **passing}), **options)
        for name, feature in decoding.items():
            joined = joined.cast_column(name, feature)
        return joined

    def captions(self, source: _Source, problems: _Problems) -> pa.StructArray:
        """The captions of all clips: their own, and those of the table."""
        lists = {name: pc.struct_field(source.captions, name) for name in source.captions.type.names}
        for language in self.languages:
            lists[language] = _lists(language, source, self.table, lists.get(language), problems)
        return pa.StructArray.from_arrays(list(lists.values()), names=list(lists))

    def _dataset(self, rows: Dataset, source: _Source, problems: _Problems) -> Dataset:
        captions, chosen = self.captions(source, problems), None
        if rows._indices is not None:
            # To add a column to a selection, datasets would write the selection anew, audio and all. So the column is
            # added to what was selected from, empty where nothing was, and selected again.
            chosen = rows._indices.column(0).to_numpy()
            inverse = np.full(len(rows.data), -1)
            inverse[chosen] = np.arange(len(chosen))
            captions = captions.take(pa.array(inverse, mask=inverse < 0))
        whole = Dataset(rows.data, info=rows.info.copy(), split=rows.split, fingerprint=rows._fingerprint)
        feature = self._features(rows.features)["captions"]
        joined = whole.remove_columns("captions").add_column("captions", captions, feature=feature)
        joined = joined.select_columns(list(rows.features))
        joined = joined if chosen is None else joined.select(chosen)
        form = rows.format
        return joined.with_format(form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"])

    def _features(self, features: Features) -> Features:
        joined = {language: List(Value("string")) for language in self.languages}
        return Features({**features, "captions": {**features["captions"], **joined}})


def _join_row(
    clip_id: str, captions: Mapping[str, Any], join: _Join, spans: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    start, stop = spans.get(clip_id, (0, 0))
    source = _source_of(pa.array([clip_id]), pa.array([dict(captions)]), join.source_language)
    problems = _Problems()
    joined = replace(join, table=join.table.slice(start, stop - start)).captions(source, problems)
    if join.strict:
        problems.report(strict=True)
    return {"captions": joined[0].as_py()}


def _read_source(rows: Dataset, language: str) -> _Source:
    table = rows.with_format("arrow").select_columns(["clip_id", "captions"])[:].combine_chunks()
    clip_ids, captions = (_whole(table[name]) for name in ("clip_id", "captions"))
    counts = pc.value_counts(clip_ids)
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    if twice:
        raise ValueError(f"{len(twice)} clip ids are in the dataset more than once: {listing(map(repr, twice))}")
    return _source_of(clip_ids, captions, language)


def _source_of(clip_ids: pa.Array, captions: pa.StructArray, language: str) -> _Source:
    if language not in captions.type.names:
        raise ValueError(f"the rows have no captions in {language!r}; they have {captions.type.names}")
    texts = pc.struct_field(captions, language)
    starts = np.concatenate([[0], np.cumsum(_lengths(texts))])
    return _Source(clip_ids.cast(pa.string()), captions, starts, pc.list_flatten(texts).to_pylist())


def _find(language: str, source: _Source, table: pa.Table) -> tuple[np.ndarray, list[int], list[int]]:
    """Line of `table` that translates each caption, -1 where none does; the captions without, and with a stale one."""
    lines = np.flatnonzero(pc.equal(table["language"], language).to_numpy())
    clips = pc.index_in(table["clip_id"].take(pa.array(lines)), value_set=source.clip_ids)
    here = pc.is_valid(clips).to_numpy()
    lines, clips = lines[here], clips.drop_null().to_numpy()
    places = table["caption_index"].to_numpy()[lines]
    counts = np.diff(source.starts)[clips]
    _refuse_beyond(language, source, clips, places, counts)
    slots = source.starts[clips] + places
    line_of = np.full(len(source.texts), -1)
    line_of[slots] = lines
    absent = np.flatnonzero(line_of < 0).tolist()
    hashes = table["source_hash"].take(pa.array(lines)).to_pylist()
    pairs = zip(slots.tolist(), hashes, strict=True)
    stale = [slot for slot, digest in pairs if digest is not None and digest != source_hash(source.texts[slot])]
    line_of[stale] = -1
    return line_of, absent, stale


def _refuse_beyond(language: str, source: _Source, clips: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
    beyond = np.flatnonzero(places >= counts)
    names = [f"{source.clip_ids[clips[i]].as_py()!r} caption {places[i]} of {counts[i]}" for i in beyond[:5]]
    if len(names):
        raise ValueError(
            f"{len(beyond)} translations into {language} are of captions that the clip does not have (indices count "
            f"from 0): {listing(names, len(beyond))}"
        )


def _lists(
    language: str, source: _Source, table: pa.Table, own: pa.ListArray | None, problems: _Problems
) -> pa.ListArray:
    """The captions of each clip in a language: its own, or the file's where that translates all of them, or none."""
    line_of, absent, stale = _find(language, source, table)
    counts = np.diff(source.starts)
    clip_of = np.repeat(np.arange(len(counts)), counts)
    has_own = np.zeros(len(counts), bool) if own is None else _lengths(own) > 0
    _refuse_both(language, source, np.unique(clip_of[(line_of >= 0) & has_own[clip_of]]))
    for what, slots in (("are missing", absent), ("are of captions that have changed since", stale)):
        problems.add(f"translations into {language} {what}", source.names(slots, ~has_own[clip_of]))
    complete = np.ones(len(counts), bool)
    complete[clip_of[line_of < 0]] = False
    offsets = np.concatenate([[0], np.cumsum(np.where(complete, counts, 0))])
    texts = _whole(table["text"].take(pa.array(line_of[complete[clip_of]])))
    joined = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts)
    if own is None or not has_own.any():
        return joined
    chosen = np.arange(len(counts)) + np.where(has_own, 0, len(counts))
    return pa.concat_arrays([own.cast(joined.type), joined]).take(pa.array(chosen))


def _refuse_both(language: str, source: _Source, clips: np.ndarray) -> None:
    if len(clips):
        names = [repr(source.clip_ids[clip].as_py()) for clip in clips[:5]]
        raise ValueError(
            f"{len(clips)} clips have captions in {language} of their own beside those of the file: "
            f"{listing(names, len(clips))}. Load the dataset without that language, or name the languages to join"
        )


def _unknown(clip_ids: list[str], known: pa.Array) -> list[str]:
    """Names of clips that are not known, with a word on those that only look alike."""
    normal = set(pc.utf8_normalize(known, "NFC").to_pylist()) if clip_ids else set()
    alike = {one: " (there in another Unicode normal form)" for one in clip_ids if _nfc(one) in normal}
    return [f"{one!r}{alike.get(one, '')}" for one in sorted(clip_ids)]


def _lengths(lists: pa.ListArray) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
