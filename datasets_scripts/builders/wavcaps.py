"""WavCaps: recordings from four collections with captions written by a language model (Mei et al., 2023).

The builder reads the authors' JSON files and blacklists (`json_files/` of cvssp/WavCaps on the Hub), and audio files
`<id>.flac` in folders with the names of the collections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..splits import draw_sources
from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder
from .metadata import read_json
from .recordings import stem_of


class Part(NamedTuple):
    """One of the four collections in WavCaps."""

    table: str  # name of the JSON file
    word: str  # lower-case word in the names of the audio folders
    source: str  # prefix of the `source` of a clip, the same as in other datasets with these recordings
    blacklisted: str  # key in the blacklists; empty if they do not contain this collection


PARTS = {
    "AudioSet_SL": Part("as_final.json", "audioset", "youtube", "AudioSet"),
    "BBC_Sound_Effects": Part("bbc_final.json", "bbc", "bbc", ""),
    "FreeSound": Part("fsd_final.json", "freesound", "freesound", "FreeSound"),
    "SoundBible": Part("sb_final.json", "soundbible", "soundbible", ""),
}

# Blacklists of the authors, and their numbers of AudioSet and Freesound clips: those that are also in any split of
# AudioCaps and Clotho, in the test splits of these two, and in UrbanSound8K, ESC-50 and VGGSound.
BLACKLISTS = (
    "blacklist_exclude_all_ac.json",  # 50,725 and 5,905
    "blacklist_exclude_test_ac.json",  # 1,451 and 2,078
    "blacklist_exclude_ub8k_esc50_vggsound.json",  # 15,510 and 2,219
)


@dataclass
class WavCapsConfig(FolderConfig):
    """Collections, blacklists and held-out splits of WavCaps, in addition to `FolderConfig`.

    Attributes:
        parts: Collections to use. None: all collections with a JSON file.
        blacklists: Blacklist files to use. They list the clips that are also in other datasets; these clips are
            excluded. Defaults to all files, which list 64,811 recordings of AudioSet and 7,965 of Freesound, 72,776 of
            WavCaps' 403,050 clips. With an empty list no clip is excluded, and evaluation on the other datasets is not
            zero-shot. The SupCLAP paper mentions no blacklists.
        num_test: Number of source recordings in the test split, sampled at random from those that are not blacklisted,
            even if their audio is missing. The SupCLAP paper (section E.2) holds out 5,000 clips.
        num_validation: Number of source recordings in the validation split, sampled in the same way. The paper uses 0.
        seed: Random seed for the sampling.
    """

    DATASET = "WavCaps"
    LAYOUT = "the folder that holds json_files/ and the audio"

    parts: Sequence[str] | None = None
    blacklists: Sequence[str] = BLACKLISTS
    num_test: int = 5000
    num_validation: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for given, valid in ((self.parts or (), PARTS), (self.blacklists, BLACKLISTS)):
            if isinstance(given, str) or not set(given) <= set(valid):
                raise ValueError(f"got {given!r}; expected a list of names from {list(valid)}")

    def tables(self) -> dict[str, Path]:
        """Return `{collection: path of its JSON file}`; raise FileNotFoundError if a selected file is missing."""
        return self.require({part: (PARTS[part].table,) for part in self.parts or PARTS}, self.parts or ())

    def blacklist_files(self) -> list[Path]:
        """Return the paths of the blacklists, or an empty list if they do not contain the selected collections."""
        if not any(PARTS[part].blacklisted for part in self.tables()):
            return []

        files = self.find({name: (name,) for name in self.blacklists})
        lacking = [name for name in self.blacklists if name not in files]
        if lacking:
            raise FileNotFoundError(
                f"{self.folder} lacks {', '.join(lacking)} of WavCaps' json_files/blacklist/, which list test clips of "
                "other datasets; add the files, or set blacklists=[] to train on all clips"
            )
        return list(files.values())

    def metadata_files(self) -> list[Path]:
        """Return the paths of the JSON files and the blacklists."""
        return [*self.tables().values(), *self.blacklist_files()]


class WavCaps(RowBuilder):
    """WavCaps builder. Collections have equal ids, so a clip id contains the collection: "FreeSound/180913"."""

    BUILDER_CONFIG_CLASS = WavCapsConfig
    NAMINGS = ("the ids of the JSON files, in folders named after the collections if they exist",)

    def collect(self) -> Collection:
        """Return the clips that are not blacklisted, in randomly sampled splits."""
        collection, config = Collection(), self.config
        blacklisted = read_blacklists(config.blacklist_files())
        words = [part.word for part in PARTS.values()]

        clips: dict[str, Clip] = {}
        paths: dict[str, Path | None] = {}
        for name, table in config.tables().items():
            recordings = config.recordings.within(PARTS[name].word, words)
            for entry in read_entries(table):
                stem, source = stem_of(str(entry["id"])), _source(PARTS[name], str(entry["id"]))
                clip = Clip(f"{name}/{stem}", {ENGLISH: [entry["caption"]]}, source, "academic use only")
                if clip.source in blacklisted:
                    collection.leave_out("blacklist", clip.clip_id)
                elif clip.clip_id in clips:
                    collection.leave_out("duplicate", clip.clip_id)
                else:
                    clips[clip.clip_id] = clip
                    paths[clip.clip_id] = recordings.named([stem])

        counts = {"test": config.num_test, "validation": config.num_validation}
        splits = draw_sources((clip.source for clip in clips.values()), counts, config.seed)
        for clip_id, clip in clips.items():
            collection.add(splits[clip.source], clip, clip_id, paths[clip_id])
        return collection


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Read a JSON file and return its list "data"; raise ValueError if an entry has no "id" or "caption"."""
    table = read_json(path)
    entries = table.get("data") if isinstance(table, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'{path} has no list "data"; expected a JSON file of WavCaps')
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"id", "caption"} <= entry.keys():
            raise ValueError(f'{path}: entry {index} lacks "id" or "caption"')
    return entries


def read_blacklists(paths: Sequence[Path]) -> set[str]:
    """Read blacklists and return the set of blacklisted sources, such as "freesound:1234"."""
    sources: set[str] = set()
    for blacklist in map(read_json, paths):
        for part in PARTS.values():
            sources.update(_source(part, name) for name in blacklist.get(part.blacklisted, ()))
    return sources


def _source(part: Part, name: str) -> str:
    """Convert the id of a recording in a collection to a `source`, such as "freesound:1234"."""
    stem = stem_of(name)  # in AudioSet: "Y" and the YouTube id
    return f"{part.source}:{stem.removeprefix('Y') if part.source == 'youtube' and len(stem) == 12 else stem}"
