"""Find audio files in a folder by name, in any supported format and sub-folder."""

import hashlib
import html
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

import soundfile

from ..audio_files import SUFFIXES, is_audio_name, walk

_STARTS = ("{start}", "{start:.1f}", "{start:.3f}", "{start:06d}", "{start_ms}")
_ENDS = ("{end:.9g}", "{end:.1f}", "{end:.3f}", "{end:06g}", "{end_ms}")
_ENDINGS = [f"_{start}{sep}{end}" for start, end in zip(_STARTS, _ENDS, strict=True) for sep in "_-"]
_ENDINGS += [f"_{start}" for start in _STARTS] + [""]

YOUTUBE_NAMINGS = tuple(f"{prefix}{{id}}{ending}" for ending in _ENDINGS for prefix in ("", "Y"))
"""File name formats for clips from YouTube videos, without suffix, from most to least specific.

The last two formats do not contain the start of the clip, so they are used only for videos with a single clip.
"""

Segment = tuple[str, int]
"""Clip from a video: YouTube id and start in seconds."""


def stem_of(name: str) -> str:
    """Return a file name without folders and without its audio or video suffix.

    >>> stem_of("development/FR.CTC.08.wav"), stem_of("FR.CTC.08")
    ('FR.CTC.08', 'FR.CTC.08')
    """
    return _without_suffix(name).rsplit("/", 1)[-1]


def _without_suffix(name: str) -> str:
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in SUFFIXES else name


class Recordings:
    """Index of the audio files in a folder and its sub-folders by name, built without opening any file.

    `files` are the sorted relative paths of all files in the folder; the default is `walk(folder)`. If the folder does
    not exist, FileNotFoundError is raised.
    """

    def __init__(self, folder: str | Path, files: Iterable[str] | None = None) -> None:
        self.folder = Path(folder).expanduser().resolve()
        files = walk(self.folder) if files is None else files
        self.files = tuple(file for file in files if is_audio_name(file))
        self._names = frozenset(self.files)

    def at(self, name: str) -> Path | None:
        """Find a recording by its absolute path or its path relative to the folder; return None if it is missing.

        The file may have any suffix. A relative path also matches a file with another audio suffix or Unicode normal
        form (macOS changes names), or the only one that differs in letter case or is percent-encoded.
        """
        file = name if name in self._names else None
        if file is None:
            file = self._by_path.get(_format_free(name)) or self._by_loose_path.get(_loose(name))
        path = self.folder / (file or name)  # `name` itself if it is absolute
        return path if file is not None or path.is_file() else None

    def locate(self, names: Collection[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, Path | None]]:
        """Find the recordings that tables name, as (folder of the table, name in the table), or relative to the folder.

        Absolute paths of another machine, and addresses, are found by their longest end in the folder, if it is the end
        of only one of them. A name without folders in a table of the top folder is found in any sub-folder, if only one
        file has it.

        Return `{(folder, name): (key, path)}`. The key is the relative path in NFC, the absolute path of a recording
        elsewhere, or the name if it is missing; the path is then None.
        """
        found: dict[tuple[str, str], tuple[str, Path | None]] = {}
        ends: dict[tuple[str, str], Path] = {}
        for start, name in names:
            folders = [""] if "://" in name else dict.fromkeys([start, ""])
            keys = [self._key(os.path.join(folder, name)) for folder in folders]
            found[start, name] = next(((key, path) for key in keys if (path := self.at(key))), (keys[0], None))
            if found[start, name][1] is None and (path := self._elsewhere(start, name)):
                ends[start, name] = path
        counts: Counter[Path | None] = Counter(path for _, path in {(name, path) for (_, name), path in ends.items()})
        counts.update(path for _, path in found.values())
        found |= {pair: ("", path) for pair, path in ends.items() if counts[path] == 1}
        for pair, (key, path) in found.items():
            file = key if path is None else self._key(str(path))
            if file.casefold() == key.casefold() or _format_free(file) != _format_free(key):  # else in another format
                found[pair] = file, path
        return found

    def _elsewhere(self, start: str, name: str) -> Path | None:
        """Find a recording in another folder than the one that a table names."""
        if re.match(r"/|\w+:/", name):
            parts = name.partition("?")[0].split("/")
            paths = (self.at("/".join(parts[first:])) for first in range(1, len(parts)))
            return next(filter(None, paths), None)
        file = None if start or "/" in name else self._by_loose_name.get(_loose(name))
        return self.folder / file if file else None

    def _key(self, name: str) -> str:
        """Return a path in NFC, relative to the folder if it is inside, without ".."."""
        folder, file = os.path.split(name if "://" in name else os.path.normpath(name))
        if os.path.isabs(folder) and not Path(folder).is_relative_to(self.folder):
            real = os.path.realpath(folder)  # the folder may be a link
            folder = real if Path(real).is_relative_to(self.folder) else folder
        if os.path.isabs(folder) and Path(folder).is_relative_to(self.folder):
            folder = os.path.relpath(folder, self.folder)
        return unicodedata.normalize("NFC", os.path.join("" if folder == os.curdir else folder, file))

    def named(self, stems: Iterable[str]) -> Path | None:
        """Find a recording, in any sub-folder and format, by its possible names without suffix, the preferred first."""
        for stem in stems:
            if stem in self._by_stem:
                return self.folder / self._by_stem[stem]
        return None

    def matching(self, names: Sequence[str]) -> dict[str, Path]:
        """Find recordings by name, even if a file system or a download tool has changed special characters.

        Three comparisons are tried in this order: the name without suffix, this name with decoded HTML entities, and
        only its letters and digits. The second and third comparisons use only names and files that have no match yet.
        They skip ambiguous matches, where several names or several files become equal. The result is `{name: path}`.
        """
        matches = {name: self._by_stem[stem_of(name)] for name in names if stem_of(name) in self._by_stem}
        for key in (_resolve, _strip):
            files = _index_unique(set(self._by_stem.values()).difference(matches.values()), key)
            missing = _index_unique(set(names).difference(matches), key)
            for text in missing.keys() & files.keys():
                matches[missing[text]] = files[text]
        return {name: self.folder / file for name, file in matches.items()}

    def within(self, word: str, others: Collection[str] = ()) -> "Recordings":
        """Return the recordings of one part of a dataset, such as its split "development".

        These are the files with `word` (in lower case) in their folder path, or else with none of the words `others`.
        """
        matching, unassigned = [], []
        for file in self.files:
            folder = os.path.dirname(file).casefold()
            if word in folder:
                matching.append(file)
            if not any(other in folder for other in others):
                unassigned.append(file)
        return Recordings(self.folder, matching or unassigned)

    def fingerprint(self) -> str:
        """Return a hash of the folder path and of the names, sizes and times of the files, for cache keys."""
        contents = hashlib.sha256(str(self.folder).encode())
        for file in self.files:
            state = (self.folder / file).stat()
            contents.update(f"\n{file}:{state.st_size}:{state.st_mtime_ns}".encode())
        return contents.hexdigest()

    @cached_property
    def _by_path(self) -> dict[str, str]:
        return self._index(_format_free)

    @cached_property
    def _by_loose_path(self) -> dict[str, str]:
        return _index_unique(self._by_path.values(), _loose)

    @cached_property
    def _by_stem(self) -> dict[str, str]:
        return self._index(stem_of)

    @cached_property
    def _by_loose_name(self) -> dict[str, str]:
        return _index_unique(self._by_path.values(), lambda file: _loose(os.path.basename(file)))

    def _index(self, key: Callable[[str], str]) -> dict[str, str]:
        # In order of increasing preference, because the last file with a key replaces the others.
        order = sorted(self.files, key=lambda file: SUFFIXES.index(os.path.splitext(file)[1].lower()))
        return {key(file): file for file in reversed(order)}


def find_segments(
    recordings: Recordings, segments: Collection[Segment], ends: Mapping[Segment, float] | None = None
) -> dict[Segment, Path]:
    """Find the files of clips from YouTube videos by the file name formats in `YOUTUBE_NAMINGS`.

    Clips last ten seconds, except those that end at another time in `ends`, `{segment: seconds}`. Their files may be
    named after either end.

    Returns `{segment: path}` for the clips that have a file. `segments` must contain all clips of the dataset, because
    file names without a start time are accepted only for videos with a single clip.
    """
    counts = Counter(youtube_id for youtube_id, _ in segments)
    paths = {}
    for youtube_id, start in segments:
        stems = []
        for end in dict.fromkeys([(ends or {}).get((youtube_id, start), start + 10), start + 10]):
            milliseconds = {"start_ms": 1000 * start, "end_ms": round(1000 * end)}
            for naming in YOUTUBE_NAMINGS[:-2]:
                stems.append(naming.format(id=youtube_id, start=start, end=end, **milliseconds))
        if counts[youtube_id] == 1:
            stems += [naming.format(id=youtube_id) for naming in YOUTUBE_NAMINGS[-2:]]
        path = recordings.named(stems)
        if path is not None:
            paths[youtube_id, start] = path
    return paths


def duration_seconds(path: str | Path) -> float | None:
    """Return the length of a recording from its header, or None if libsndfile cannot read it."""
    try:
        return soundfile.info(path).duration
    except soundfile.SoundFileError:
        return None


def listing(names: Sequence[str], most: int = 5, count: int | None = None) -> str:
    """Format the first `most` names for a message, followed by the number of remaining names.

    `count` is the total number of names, if `names` contains only some of them.

    >>> listing(["a.wav", "b.wav", "c.wav"], 2)
    'a.wav, b.wav and 1 more'
    """
    more = (len(names) if count is None else count) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {more} more" if more else "")


def _format_free(name: str) -> str:
    return unicodedata.normalize("NFC", _without_suffix(name))


def _loose(name: str) -> str:
    return unquote(_format_free(name)).casefold()


def _resolve(name: str) -> str:
    """Return the name without suffix, with decoded HTML entities."""
    return unicodedata.normalize("NFC", html.unescape(stem_of(name))).strip()


def _strip(name: str) -> str:
    """Return only the letters and digits of the name without suffix, in lower case."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", html.unescape(stem_of(name))).casefold())


def _index_unique(names: Iterable[str], key: Callable[[str], str]) -> dict[str, str]:
    """Return `{key(name): name}`, without the keys that several names have in common."""
    by_key: dict[str, list[str]] = {}
    for name in names:
        by_key.setdefault(key(name), []).append(name)
    return {text: members[0] for text, members in by_key.items() if text and len(members) == 1}
