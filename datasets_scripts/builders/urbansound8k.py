"""UrbanSound8K: 8,732 excerpts of Freesound recordings of ten urban classes in ten folds (Salamon et al., 2014).

Takes the folder as its authors publish it: `metadata/UrbanSound8K.csv` and `audio/fold1/` to `audio/fold10/`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..schema import Event
from .captions import captions_fingerprint, label_phrases, render_captions
from .esc50 import split_recordings
from .folder import Clip, Collection, FolderBuilder, FolderConfig
from .metadata import Line, read_csv
from .recordings import stem_of

TABLE = "UrbanSound8K.csv"
COLUMNS = ("slice_file_name", "fsID", "start", "end", "salience", "fold", "classID", "class")


class Slice(NamedTuple):
    """A line of the table: a clip, its class, and the Freesound recording `src_file` and the part that it was cut from.

    `start_seconds` and `end_seconds` count from the beginning of that recording; `foreground` is the salience 1.
    """

    filename: str
    fold: int
    category: str
    src_file: str
    start_seconds: float
    end_seconds: float
    foreground: bool


@dataclass
class UrbanSound8KConfig(FolderConfig):
    """What to read and how to split it; see also `FolderConfig`.

    Attributes:
        test_fold: The fold that is the test split, 1 to 10. The published protocol is the mean over all ten, each
            tested on once; the default is the first.
        validation_fraction: The part of the remaining recordings of each class that is the validation split; 0 gives
            no validation split.
        foreground_only: Whether clips whose sound is in the background (salience 2) are left out.
        seed: Of the draw of validation recordings.
    """

    DATASET = "UrbanSound8K"
    LAYOUT = f"the folder that holds metadata/{TABLE} and audio/"
    ENGLISH_ONLY = False

    test_fold: int = 1
    validation_fraction: float = 0.15
    foreground_only: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; give at least 0 and less than 1")

    def metadata_files(self) -> list[Path]:
        """The table."""
        return [self.require(TABLE)]

    def made_of(self) -> dict[str, str]:
        """The phrases and templates too."""
        return {**super().made_of(), "captions": captions_fingerprint("urbansound8k")}


class UrbanSound8K(FolderBuilder):
    """UrbanSound8K as rows, with captions in eight languages and an event as long as the clip.

    `UrbanSound8K(data_dir="UrbanSound8K", test_fold=10).download_and_prepare()`, then `.as_dataset(split="train")`.
    """

    BUILDER_CONFIG_CLASS = UrbanSound8KConfig
    DESCRIPTION = "UrbanSound8K: excerpts of up to four seconds of ten urban classes in ten folds."
    HOMEPAGE = "https://urbansounddataset.weebly.com/urbansound8k.html"

    def collect(self) -> Collection:
        """The slices of the table by fold and recording."""
        collection, config = Collection(), self.config
        slices = read_slices(config.metadata_files()[0])
        phrases = label_phrases("urbansound8k")
        unknown = sorted({piece.category for piece in slices} - phrases.keys())
        if unknown:
            raise ValueError(f"the classes {unknown} are none of UrbanSound8K's: {', '.join(phrases)}")
        splits = split_recordings(slices, config.test_fold, config.validation_fraction, config.seed)
        placed = {piece for pieces in splits.values() for piece in pieces}
        collection.leave_out(
            "source in another split", *(stem_of(piece.filename) for piece in slices if piece not in placed)
        )
        for split, pieces in splits.items():
            for piece in pieces:
                clip = _clip(piece, render_captions(phrases[piece.category], config.languages))
                if config.foreground_only and not piece.foreground:
                    collection.leave_out("in the background", clip.clip_id)
                else:
                    collection.add(split, clip, piece.filename, config.recordings.named([clip.clip_id]))
        return collection


def read_slices(path: Path) -> list[Slice]:
    """Reads `UrbanSound8K.csv`.

    Args:
        path: The table.

    Returns:
        The slices in the order of the file.

    Raises:
        ValueError: A column is missing, or a cell that has to be a number is none.
    """
    return [_slice(line) for line in read_csv(path, COLUMNS)]


def _slice(line: Line) -> Slice:
    values = line.values
    try:
        start, end = float(values["start"]), float(values["end"])
        fold, salience = int(values["fold"]), int(values["salience"])
    except ValueError as error:
        raise ValueError(f"{line.where}: {error}; start, end, fold and salience are numbers") from error
    return Slice(
        values["slice_file_name"].strip(),
        fold,
        values["class"].strip(),
        values["fsID"].strip(),
        start,
        end,
        salience == 1,
    )


def _clip(piece: Slice, captions: dict[str, list[str]]) -> Clip:
    event: Event = {
        "label": piece.category,
        "onset_seconds": 0.0,
        "offset_seconds": round(piece.end_seconds - piece.start_seconds, 6),  # as precise as the table
    }
    source, clip_id = f"freesound:{piece.src_file}", stem_of(piece.filename)
    # The licence of the dataset, by its readme.
    return Clip(clip_id, captions, source, "CC BY-NC 3.0", labels=[piece.category], events=[event])
