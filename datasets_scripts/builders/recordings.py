"""Recordings on disk: found by one look at the folder, whatever their format, sub-folder and naming."""

import hashlib
import html
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import soundfile

logger = logging.getLogger(__name__)

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".m4a", ".aac")
"""The formats that are looked for, the preferred first; libsndfile reads all but the last two, which need FFmpeg."""

_OTHER_SUFFIXES = (".mp4", ".webm", ".mkv", ".wma")  # of names in metadata, before a conversion

_STARTS = ("{start}", "{start:.1f}", "{start:.3f}", "{start:06d}", "{start_ms}")
_ENDS = ("{end}", "{end:.1f}", "{end:.3f}", "{end:06d}", "{end_ms}")


def _list_namings() -> list[str]:
    endings = []
    for start, end in zip(_STARTS, _ENDS, strict=True):
        endings += [f"_{start}_{end}", f"_{start}-{end}"]
    endings += map("_{}".format, _STARTS)

    namings = []
    for ending in (*endings, ""):
        namings += [f"{{id}}{ending}", f"Y{{id}}{ending}"]
    return namings


YOUTUBE_NAMINGS = tuple(_list_namings())
"""The names, without suffix, under which clips of YouTube videos are kept: the most telling first.

The fields are the video, the clip's start and end in seconds, and both in milliseconds. The last two say nothing of
the start, so they are taken only for a video that has a single clip.
"""

Segment = tuple[str, int]
"""A clip of a video: the YouTube id and the start in seconds."""


def walk(folder: str | Path) -> list[str]:
    """All files below a folder, as sorted paths relative to it, with slashes; links to folders are followed, each once.

    Hidden files are passed over, and so are pipes and devices, which would be waited for, and, with a warning, names
    that are not UTF-8, which no row can hold, and what cannot be read, such as a link to itself.
    """
    found: list[str] = []
    undecodable: list[str] = []
    unreadable: list[str] = []
    seen: set[str] = set()

    # A stack whose top is always the first sub-folder by name, since of links to one folder the first one counts.
    waiting = [""]
    while waiting:
        start = waiting.pop()
        place = os.path.join(folder, start)
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)

        try:
            entries = list(os.scandir(place))
        except PermissionError:  # such as lost+found
            continue
        except OSError:
            unreadable.append(start)
            continue

        folders = []
        for entry in entries:
            if entry.name.startswith((".", "__MACOSX")):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:
                unreadable.append(start + entry.name)
                continue
            if is_folder:
                folders.append(f"{start}{entry.name}/")
            elif is_file:
                name = start + entry.name  # where the system's bytes are no UTF-8, Python puts surrogates
                (undecodable if re.search("[\ud800-\udfff]", name) else found).append(name)
        waiting += sorted(folders, reverse=True)

    if undecodable:
        logger.warning(
            "%s: %d file names are not UTF-8 and are passed over, such as %r; rename them",
            folder, len(undecodable), min(undecodable),
        )  # fmt: skip
    if unreadable:
        logger.warning(
            "%s: %d entries cannot be read and are passed over: %s", folder, len(unreadable), some(unreadable)
        )
    return sorted(found)


def stem_of(name: str) -> str:
    """A file name without folders and without the suffix of an audio or video format; other dots stay.

    >>> stem_of("development/FR.CTC.08.wav"), stem_of("FR.CTC.08")
    ('FR.CTC.08', 'FR.CTC.08')
    """
    return _without_suffix(name).rsplit("/", 1)[-1]


def _without_suffix(name: str) -> str:
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in SUFFIXES + _OTHER_SUFFIXES else name


class Recordings:
    """The audio files below a folder: only their names are looked at, none is opened.

    Args:
        folder: Where the audio is.
        files: What is in it and its sub-folders, as sorted relative paths; by default `walk` looks.

    Raises:
        FileNotFoundError: There is no such folder.
    """

    def __init__(self, folder: str | Path, files: Iterable[str] | None = None) -> None:
        self.folder = Path(folder).expanduser().resolve()
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is not a folder; give the one that holds the audio")

        audio = []
        for file in walk(self.folder) if files is None else files:
            if file.lower().endswith(SUFFIXES):
                audio.append(file)
        self.files = tuple(audio)

    def at(self, name: str) -> Path | None:
        """The recording of a path, relative to the folder or absolute.

        It may be in another format, which loses to the format named, or in another of Unicode's normal forms, as names
        from a Mac are.
        """
        if os.path.isabs(name):
            return Path(name) if os.path.isfile(name) else None
        file = name if name in self._names else self._by_path.get(_format_free(name))
        return None if file is None else self.folder / file

    def named(self, stems: Iterable[str]) -> Path | None:
        """The recording with the first of these stems that is there, in whatever sub-folder and format."""
        for stem in stems:
            if stem in self._by_stem:
                return self.folder / self._by_stem[stem]
        return None

    def matching(self, names: Sequence[str]) -> dict[str, Path]:
        """Finds files whose names are awkward, and were changed where a system or a tool could not hold them.

        Args:
            names: Names from the metadata.

        Returns:
            The path by name, of those that are there: by the same stem, else by the same letters once HTML entities
            are resolved, or once everything but letters and digits is dropped. A match of the second kind counts only
            where it fits a single file and a single name that have no better one.
        """
        found: dict[str, str] = {}
        for name in names:
            if stem_of(name) in self._by_stem:
                found[name] = self._by_stem[stem_of(name)]

        for key in (_resolve, _strip):
            files = _index_unique(set(self._by_stem.values()).difference(found.values()), key)
            wanted = _index_unique(set(names).difference(found), key)
            for text in wanted.keys() & files.keys():
                found[wanted[text]] = files[text]
        return {name: self.folder / file for name, file in found.items()}

    def within(self, word: str, others: Sequence[str] = ()) -> "Recordings":
        """The recordings in sub-folders whose names hold a word in lower case, such as "development" or "freesound".

        Where no sub-folder has it, those that are in no sub-folder of the others, the words of the dataset's parts.
        """
        own, shared = [], []

        for file in self.files:
            folder = os.path.dirname(file).casefold()
            if word in folder:
                own.append(file)
            if not any(map(folder.__contains__, others)):
                shared.append(file)
        return Recordings(self.folder, own or shared)

    def fingerprint(self, sizes: bool = False) -> str:
        """A hash of the folder and the names in it, and of their sizes for rows that say something about the sound."""
        contents = hashlib.sha256(str(self.folder).encode())
        for file in self.files:
            size = f":{(self.folder / file).stat().st_size}" if sizes else ""
            contents.update(f"\n{file}{size}".encode())
        return contents.hexdigest()

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.files)

    @cached_property
    def _by_path(self) -> dict[str, str]:
        return dict(zip(map(_format_free, self._worst_first), self._worst_first, strict=True))

    @cached_property
    def _by_stem(self) -> dict[str, str]:
        return dict(zip(map(stem_of, self._worst_first), self._worst_first, strict=True))

    @cached_property
    def _worst_first(self) -> list[str]:
        """So that in a dictionary the preferred format, and then the first path, wins."""
        order = sorted(self.files, key=lambda file: SUFFIXES.index(os.path.splitext(file)[1].lower()))
        return order[::-1]


def find_segments(recordings: Recordings, segments: Sequence[Segment]) -> dict[Segment, Path]:
    """The path by clip, of those that are there under any of `YOUTUBE_NAMINGS`: ten seconds of YouTube videos each.

    Args:
        recordings: Where they may be.
        segments: All clips of the dataset; each once.
    """
    counts = Counter(youtube_id for youtube_id, _ in segments)
    found = {}
    for youtube_id, start in segments:
        end = start + 10
        fields = {"id": youtube_id, "start": start, "end": end, "start_ms": 1000 * start, "end_ms": 1000 * end}
        stems = [naming.format(**fields) for naming in YOUTUBE_NAMINGS]
        path = recordings.named(stems if counts[youtube_id] == 1 else stems[:-2])
        if path is not None:
            found[youtube_id, start] = path
    return found


def duration_seconds(path: Path) -> float | None:
    """The length of a recording by its header; None where libsndfile cannot read it.

    A file that nothing can read is no reason to refuse a whole dataset: `on_bad_audio` decides about it.
    """
    try:
        return soundfile.info(path).duration
    except soundfile.SoundFileError:
        return None


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, for a message.

    >>> some(["a.wav", "b.wav", "c.wav"], 2)
    'a.wav, b.wav, ...'
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _format_free(name: str) -> str:
    return unicodedata.normalize("NFC", _without_suffix(name))


def _resolve(name: str) -> str:
    """The stem with HTML entities resolved."""
    return unicodedata.normalize("NFC", html.unescape(stem_of(name))).strip()


def _strip(name: str) -> str:
    """The letters and digits of the stem."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", html.unescape(stem_of(name))).casefold())


def _index_unique(names: Iterable[str], key: Callable[[str], str]) -> dict[str, str]:
    """The names by their key, of those that have one of their own."""
    by_key: dict[str, list[str]] = {}
    for name in names:
        by_key.setdefault(key(name), []).append(name)
    return {text: members[0] for text, members in by_key.items() if text and len(members) == 1}
