"""WavCaps: recordings of four collections with captions that a language model wrote (Mei et al., 2023).

Takes the JSON files of the authors' repository (`json_files/` of cvssp/WavCaps on the Hub), their blacklists, and the
audio as `<id>.flac` in folders named after the collections.

[S] is "SupCLAP: Controlling Optimization Trajectory Drift in Audio-Text Contrastive Learning with Support Vector
Regularization".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder, draw_sources
from .metadata import read_json
from .recordings import stem_of


class Part(NamedTuple):
    """One of the collections.

    Attributes:
        table: Its JSON file.
        word: What the names of its audio folders have in common, in lower case.
        source: The prefix of its sources: with the same one, other datasets' clips are the same recordings.
        blacklisted: Its key in the blacklists; empty where they have none.
    """

    table: str
    word: str
    source: str
    blacklisted: str


PARTS = {
    "AudioSet_SL": Part("as_final.json", "audioset", "youtube", "AudioSet"),
    "BBC_Sound_Effects": Part("bbc_final.json", "bbc", "bbc", ""),
    "FreeSound": Part("fsd_final.json", "freesound", "freesound", "FreeSound"),
    "SoundBible": Part("sb_final.json", "soundbible", "soundbible", ""),
}

BLACKLISTS = (
    "blacklist_exclude_all_ac.json",
    "blacklist_exclude_test_ac.json",
    "blacklist_exclude_ub8k_esc50_vggsound.json",
)
"""The authors' lists of what is in all of AudioCaps and Clotho, in their test parts, and in UrbanSound8K, ESC-50 and
VGGSound."""


@dataclass
class WavCapsConfig(FolderConfig):
    """What to read, what to leave out and what to hold out; see also `FolderConfig`.

    Attributes:
        parts: Which of the collections; None takes those whose JSON file is there.
        blacklists: Files that say which clips to leave out because other datasets test on them; all by default. With
            an empty list nothing is left out, and a zero-shot evaluation on those datasets is none.
        num_test: Clips of the test split, drawn by a hash of their ids after the blacklists and whatever audio is
            there. 5,000 are held out in [S E.2].
        num_validation: Clips of the validation split, drawn likewise; [S] has none.
        seed: The seed of the draw.
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
                raise ValueError(f"{given!r} is not a list of some of {list(valid)}")
        for name in ("num_test", "num_validation"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")

    def tables(self) -> dict[str, Path]:
        """The JSON file of each part that is wanted; one that was asked for must be there, and else any."""
        wanted = {part: (PARTS[part].table,) for part in self.parts or PARTS}
        tables = self.find(wanted)

        if not tables or (self.parts and len(tables) < len(wanted)):
            lacking = [PARTS[part].table for part in wanted if part not in tables]
            raise FileNotFoundError(f"{self.folder} lacks {', '.join(lacking)}; give {self.LAYOUT}")
        return tables

    def blacklist_files(self) -> list[Path]:
        """The blacklists that are wanted, all of which must be there; none where they say nothing of the parts."""
        if not any(PARTS[part].blacklisted for part in self.tables()):
            return []

        found = self.find({name: (name,) for name in self.blacklists})
        lacking = sorted(set(self.blacklists) - found.keys())
        if lacking:
            raise FileNotFoundError(
                f"{self.folder} lacks {', '.join(lacking)} of WavCaps' json_files/blacklist/: without them training "
                "would see what AudioCaps, Clotho, ESC-50, UrbanSound8K and VGGSound test on; put them there, or give "
                "blacklists=[] if that is no concern"
            )
        return list(found.values())

    def metadata_files(self) -> list[Path]:
        """The JSON files and the blacklists."""
        return [*self.tables().values(), *self.blacklist_files()]


class WavCaps(RowBuilder):
    """WavCaps as rows: train, test and, where asked for, validation.

    A clip's id is its part and its id there, as ids of different parts may agree: "FreeSound/180913".
    """

    BUILDER_CONFIG_CLASS = WavCapsConfig
    HOMEPAGE = "https://huggingface.co/datasets/cvssp/WavCaps"
    NAMINGS = ("the ids of the JSON files, in folders that are named after their part where there are such,",)

    def collect(self) -> Collection:
        """The clips of the JSON files that no blacklist names, then drawn into splits."""
        collection, config = Collection(), self.config
        blacklisted = read_blacklists(config.blacklist_files())
        words = list(map(attrgetter("word"), PARTS.values()))

        clips: dict[str, Clip] = {}
        paths: dict[str, Path | None] = {}
        for name, table in config.tables().items():
            recordings = config.recordings.within(PARTS[name].word, words)
            for entry in read_entries(table):
                stem, source = stem_of(str(entry["id"])), _source(PARTS[name], str(entry["id"]))
                clip = Clip(f"{name}/{stem}", {ENGLISH: [entry["caption"] or ""]}, source, "academic use only")
                if clip.source in blacklisted:
                    collection.leave_out("blacklist", clip.clip_id)
                elif clip.clip_id in clips:
                    collection.leave_out("duplicate", clip.clip_id)
                else:
                    clips[clip.clip_id] = clip
                    paths[clip.clip_id] = recordings.named([stem])

        sources = set(map(attrgetter("source"), clips.values()))
        if config.num_test + config.num_validation > len(sources):
            raise ValueError(
                f"num_test={config.num_test} and num_validation={config.num_validation} are more than the "
                f"{len(sources)} recordings of {', '.join(config.tables())}; give smaller ones, such as "
                f"num_test={len(sources) // 10}, or the JSON files of more parts"
            )
        counts = {"test": config.num_test, "validation": config.num_validation}
        splits = draw_sources(sources, counts, config.seed)
        for clip_id, clip in clips.items():
            collection.add(splits[clip.source], clip, clip_id, paths[clip_id])
        return collection


def read_entries(path: Path) -> list[dict[str, Any]]:
    """What the JSON file of a part lists under "data", each with "id" and "caption"."""
    table = read_json(path)
    entries = table.get("data") if isinstance(table, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'{path} has no list "data"; give a JSON file of WavCaps')
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"id", "caption"} <= entry.keys():
            raise ValueError(f'{path}: entry {index} lacks "id" or "caption"')
    return entries


def read_blacklists(paths: Sequence[Path]) -> set[str]:
    """The sources, such as "freesound:1234", that blacklists name: JSON files that list ids by part."""
    sources: set[str] = set()
    for blacklist in map(read_json, paths):
        for part in PARTS.values():
            for name in blacklist.get(part.blacklisted, ()):
                sources.add(_source(part, name))
    return sources


def _source(part: Part, name: str) -> str:
    """AudioSet's names are those of files: a Y, the YouTube id, a suffix."""
    stem = stem_of(name)
    return f"{part.source}:{stem.removeprefix('Y') if part.source == 'youtube' and len(stem) == 12 else stem}"
