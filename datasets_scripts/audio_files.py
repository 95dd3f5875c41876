"""Find the audio files in a folder by their suffixes."""

import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

# libsndfile decodes these formats, and FFmpeg the others.
_OF_LIBSNDFILE = """.wav .wave .flac .ogg .oga .opus .mp3 .mp2 .aif .aiff .aifc .au .snd .caf .w64 .rf64 .voc
.sph .gsm"""
_OF_FFMPEG = """.m4a .m4b .aac .mp4 .m4v .f4v .mov .webm .weba .mkv .mka .3gp .3g2 .wma .wmv .asf .amr .awb
.spx .ogv .wv .ape .mpc .tta .tak .dsf .dff .ac3 .eac3 .dts .ts .mts .m2ts .mpg .mpeg .avi .flv .ra .rm"""

SUFFIXES = (*_OF_LIBSNDFILE.split(), *_OF_FFMPEG.split())
"""Suffixes of audio files and of videos, in order of preference. The content decides how a file is decoded."""

_HIDDEN = (".", "__MACOSX")
# Folders with deleted files, snapshots and previews, of Windows, Linux, Synology and QNAP.
_SYSTEM = {"$recycle.bin", "recycler", "system volume information", "lost+found"}
_SYSTEM |= {"#recycle", "#snapshot", "@eadir", "@recycle", "@recently-snapshot"}


def walk(folder: str | Path) -> list[str]:
    """List all files in a folder and its sub-folders, as sorted relative paths with slashes.

    Symbolic links to folders are followed, but each folder is listed only once. Hidden files, recycle bins and other
    system folders, pipes, devices and unreadable entries are skipped. File names that are not UTF-8 are skipped with a
    warning. Raises FileNotFoundError without the folder.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is not a folder; expected the folder with the audio")
    files: list[str] = []
    undecodable: list[str] = []
    seen: set[str] = set()
    for path, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(_HIDDEN) and name.lower() not in _SYSTEM)

        start = os.path.relpath(path, folder).replace(os.sep, "/")
        for name in names:
            if not name.startswith(_HIDDEN) and os.path.isfile(os.path.join(path, name)):
                relative = name if start == os.curdir else f"{start}/{name}"
                # A name that is not UTF-8 contains surrogates.
                (undecodable if re.search("[\ud800-\udfff]", relative) else files).append(relative)

    if undecodable:
        count = len(undecodable)
        logger.warning("%s: skipped %d names that are not UTF-8, such as %r", folder, count, min(undecodable))
    return sorted(files)


def is_audio_name(name: str) -> bool:
    """Return whether a file name has one of `SUFFIXES`, in upper or lower case.

    >>> is_audio_name("sounds/RAIN.WAV"), is_audio_name("rain.txt")
    (True, False)
    """
    return name.lower().endswith(SUFFIXES)


def list_recordings(folder: str | Path) -> list[str]:
    """List the paths of all audio files in a folder and its sub-folders; raise FileNotFoundError without the folder."""
    root = Path(folder).expanduser().resolve()
    return [str(root / file) for file in walk(root) if is_audio_name(file)]
