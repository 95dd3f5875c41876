"""Translate many texts in batches. Each distinct text is translated once, and interrupted jobs can be resumed."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from unicodedata import normalize

from ..atomic_files import folder_lock
from ..builders.recordings import listing
from ..progress import progress
from ..public_names import redact
from .seq2seq import Translator
from .table import read_translations, source_hash, write_translations

Pair = tuple[str, str]  # source and target language
Answers = dict[tuple[Pair, str], str]
Key = tuple[str, int, str]  # clip id, caption index, language


class Item(NamedTuple):
    """Text to translate from language `source` to language `target` (ISO 639-3 codes).

    `language` is that of the row in the translations file: `target`, or for a back-translation `source`.
    """

    clip_id: str
    caption_index: int
    language: str
    text: str
    source: str
    target: str

    @property
    def key(self) -> Key:
        """Clip id, caption index and language, which identify a row of a translations file."""
        return self.clip_id, self.caption_index, self.language


def clean(text: str) -> str:
    """Normalise a text to one line in Unicode normal form C.

    Returns "" if the text is damaged (replacement or surrogate characters) or has no letters or digits.

    >>> clean("  Un chien aboie "), clean("..."), clean("\N{REPLACEMENT CHARACTER} barks")
    ('Un chien aboie', '', '')
    """
    line = re.sub(r"[\x00-\x1f\x7f-\x9f]", "", " ".join(normalize("NFC", text).split()))
    damaged = re.search("[\ud800-\udfff\N{REPLACEMENT CHARACTER}]", line)
    return line if any(map(str.isalnum, line)) and not damaged else ""


class FinishedBatches:
    """JSON Lines file of finished batches. After an interruption, only the batches in progress are lost.

    The constructor removes an incomplete last line. It raises ValueError for a damaged file, or for other `settings`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.answers: Answers = {}
        self._lock = Lock()

        with path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
        lines = content[: content.rfind(b"\n") + 1].splitlines()
        if not lines:
            self._write({"settings": settings})
            return

        try:
            before, *batches = map(json.loads, lines)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); remove it to start again") from error
        if before != {"settings": settings}:
            raise ValueError(f"{path} was made with {before}, not {settings}; remove it or choose another output")
        for batch in batches:
            self._remember(batch)

    def append(self, pair: Pair, texts: Sequence[str], translations: Sequence[str]) -> None:
        """Write a batch to the file and flush it to disk; several threads may do so."""
        batch = {"pair": pair, "translations": dict(zip(texts, map(clean, translations), strict=True))}
        with self._lock:
            self._write(batch)
            self._remember(batch)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _remember(self, batch: Mapping[str, Any]) -> None:
        source, target = batch["pair"]
        for text, answer in batch["translations"].items():
            self.answers[(source, target), text] = answer


def translate_texts(
    items: Sequence[Item], translator: Translator, finished: FinishedBatches, batch_size: int
) -> Answers:
    """Translate every distinct text once, in batches; `translator.workers` batches run in parallel.

    The longest texts come first, so that an out-of-memory error occurs at the start. A resumed job uses the same
    batches. If a batch fails, the batches in progress are finished and saved before the error is raised. The result is
    `{(language pair, text): translation}`, with "" for a text that could not be translated.
    """

    def translate(pair: Pair, batch: Sequence[str]) -> None:
        finished.append(pair, batch, translator.translate(batch, *pair))

    batches = make_batches(items, finished.answers, batch_size)
    pool = ThreadPoolExecutor(translator.workers)
    futures = [pool.submit(translate, *batch) for batch in batches]
    try:
        for future in progress(as_completed(futures), "translating", len(futures), "batches"):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the batches in progress
    return finished.answers


def make_batches(items: Sequence[Item], done: Answers, batch_size: int) -> list[tuple[Pair, list[str]]]:
    """Return batches (language pair, distinct texts without a translation), with the longest texts of a pair first."""
    texts_of: dict[Pair, set[str]] = {}
    for item in items:
        texts_of.setdefault((item.source, item.target), set()).add(item.text)

    batches = []
    for pair, texts in texts_of.items():
        ordered = sorted(texts, key=lambda text: (-len(text), text))
        for start in range(0, len(ordered), batch_size):
            batch = [text for text in ordered[start : start + batch_size] if (pair, text) not in done]
            if batch:
                batches.append((pair, batch))
    return batches


def complete_translations(
    path: Path,
    items: Sequence[Item],
    translator: Translator,
    batch_size: int = 32,
    settings: Mapping[str, Any] | None = None,
    fill_gaps: bool = False,
) -> dict[Key, str]:
    """Translate the items that are missing or stale in a translations file, and update the file.

    A translation is stale if its caption has changed since. All other rows of the file are kept. Blank translations
    are not saved, so that the next run translates these items again. Finished batches are saved in
    `<path>.part.jsonl` until the file is complete. The result is `{item key: translation}`.

    Args:
        path: Path of the Parquet file, which need not exist.
        settings: Settings that affect the translations. A run that resumes an interrupted run must have the same.
        fill_gaps: Whether to keep translations by other models. Otherwise, ValueError is raised for them.

    Raises:
        RuntimeError: Another run is writing the file.
        ValueError: The file is invalid or has translations by other models, or an interrupted run had other settings.
    """
    with folder_lock(path):
        lines: dict[Key, dict[str, Any]] = {}
        for line in read_translations(path).to_pylist() if path.exists() else []:
            lines[line["clip_id"], line["caption_index"], line["language"]] = line

        models = {line["model"] for line in lines.values()}
        others = sorted(models - {translator.name, None})
        if others and not fill_gaps:
            raise ValueError(
                f"{path} has translations by {listing(others)}, not {translator.name}: choose another output, or set "
                "fill_gaps to keep them"
            )

        # A row without a hash was made by hand and is assumed to match the current caption.
        todo = []
        for item in items:
            line = lines.get(item.key)
            if line is None or line["source_hash"] not in (None, source_hash(item.text)):
                todo.append(item)

        part = path.with_name(path.name + ".part.jsonl")
        if todo:
            finished = FinishedBatches(part, {"model": translator.name, **redact(settings or {})})
            answers = translate_texts(todo, translator, finished, batch_size)
            for item in todo:
                lines.pop(item.key, None)
                text = answers[(item.source, item.target), item.text]
                if text:
                    made = {"text": text, "model": translator.name, "source_hash": source_hash(item.text)}
                    lines[item.key] = item._asdict() | made
            write_translations(path, lines.values())

        part.unlink(missing_ok=True)
        return {item.key: lines[item.key]["text"] for item in items if item.key in lines}


def sample(items: Sequence[Item], count: int | None) -> list[Item]:
    """Sample up to `count` items per language, or all items if `count` is None. The sample is deterministic."""
    by_language: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: source_hash(str(item.key))):
        by_language.setdefault(item.language, []).append(item)
    sampled: list[Item] = []
    for members in by_language.values():
        sampled += members[:count]
    return sampled
