"""ESC-50 and its subset ESC-10: 5-second recordings of 50 (10) everyday sounds in five folds (Piczak, 2015).

Takes the folder as its author publishes it, `meta/esc50.csv` and `audio/`. A csv with only the lines of ESC-10 makes
it ESC-10.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import datasets
import numpy as np

from ..schema import LANGUAGES, Row, features, validate_row
from . import metadata
from .captions import captions_fingerprint, check_languages, label_phrases, render_captions
from .recordings import SUFFIXES, Recordings, duration_seconds, some

_COLUMNS = ("filename", "fold", "category", "esc10", "src_file")


class InFold(Protocol):
    """A clip of a dataset in folds: its fold, its class, and the recording that it was cut from."""

    @property
    def fold(self) -> int: ...

    @property
    def category(self) -> str: ...

    @property
    def src_file(self) -> str: ...


InFoldT = TypeVar("InFoldT", bound=InFold)


class Recording(NamedTuple):
    """A line of `meta/esc50.csv`: one clip, its class and the Freesound recording `src_file` that it was cut from."""

    filename: str
    fold: int
    category: str
    esc10: bool
    src_file: str


@dataclass
class ESC50Config(datasets.BuilderConfig):
    """What to read and how to split it.

    Attributes:
        data_dir: The folder that holds `meta/esc50.csv` and `audio/`.
        test_fold: The fold that is the test split, 1 to 5. The published protocol is the mean over all five, each
            tested on once; the default is the first.
        validation_fraction: The part of the remaining source recordings of each class that is the validation split;
            0 gives no validation split.
        languages: The caption languages, the anchor first.
        seed: Of the draw of validation recordings.
    """

    data_dir: str | None = None
    test_fold: int = 1
    validation_fraction: float = 0.15
    languages: Sequence[str] = LANGUAGES
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.languages = check_languages(self.languages)
        if self.data_dir is None:
            raise ValueError("ESC-50 needs data_dir: the folder that holds meta/esc50.csv and audio/")
        self.data_dir = str(Path(self.data_dir).expanduser().resolve())
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; give at least 0 and less than 1")

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Keys the cache on the files too: `datasets` alone would give old rows after the folder has changed."""
        made_of = {
            "code": metadata.code_fingerprint(),
            "metadata": metadata.fingerprint([_metadata_path(self.data_dir)]),
            "audio": Recordings(Path(str(self.data_dir), "audio")).fingerprint(sizes=True),
            "captions": captions_fingerprint("esc50"),
        }
        return super().create_config_id({**config_kwargs, **made_of}, custom_features)


class ESC50(datasets.GeneratorBasedBuilder):
    """ESC-50 as rows: train, validation and test, none of which shares a source recording with another.

    `ESC50(data_dir="ESC-50", test_fold=1).download_and_prepare()`, then `.as_dataset(split="train")`.
    """

    VERSION = "1.0.0"
    BUILDER_CONFIG_CLASS = ESC50Config

    def report(self) -> dict[str, Any]:
        """Says what there is no row for: without all the audio there are no rows at all.

        Returns:
            "missing": the names of `meta/esc50.csv` that have no audio; "left_out": by reason, the ids of clips whose
            source is in the test fold too.
        """
        config = self.config
        recordings = read_recordings(config.data_dir)
        splits = split_recordings(recordings, config.test_fold, config.validation_fraction, config.seed)
        placed = {recording for members in splits.values() for recording in members}
        shared = [Path(recording.filename).stem for recording in recordings if recording not in placed]
        found = Recordings(Path(config.data_dir, "audio"))
        missing = [recording.filename for recording in recordings if found.at(recording.filename) is None]
        return {"missing": missing, "left_out": {"source in another split": shared} if shared else {}}

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description="ESC-50: 2,000 five-second environmental recordings of 50 classes in five folds.",
            homepage="https://github.com/karolpiczak/ESC-50",
            features=features(self.config.languages),
        )

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        config = self.config
        recordings = read_recordings(config.data_dir)
        splits = split_recordings(recordings, config.test_fold, config.validation_fraction, config.seed)
        paths = find_audio(Path(config.data_dir, "audio"), [recording.filename for recording in recordings])
        # Here and not per clip: errors raised while generating reach the user wrapped in one that says nothing.
        context = {
            "paths": paths,
            "durations_seconds": {filename: duration_seconds(path) for filename, path in paths.items()},
            "phrases": _phrases_of(recordings),
            # ESC-50's README: the ESC-10 subset is CC BY, the whole CC BY-NC.
            "license": "CC BY 3.0" if all(recording.esc10 for recording in recordings) else "CC BY-NC 3.0",
        }
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"recordings": tuple(members), **context})
            for split, members in splits.items()
            if members
        ]

    def _generate_examples(
        self,
        recordings: Sequence[Recording],
        paths: Mapping[str, Path],
        durations_seconds: Mapping[str, float],
        phrases: Mapping[str, Mapping[str, str]],
        license: str,
    ) -> Iterator[tuple[str, Row]]:
        for recording in recordings:
            label, duration_seconds = recording.category, durations_seconds[recording.filename]
            row: Row = {
                "clip_id": Path(recording.filename).stem,
                "audio_path": str(paths[recording.filename]),
                "captions": render_captions(phrases[label], self.config.languages),
                "labels": [label],
                "events": [{"label": label, "onset_seconds": 0.0, "offset_seconds": duration_seconds}],
                "source": f"freesound:{recording.src_file}",
                "license": license,
            }
            validate_row(row, self.config.languages)
            yield row["clip_id"], row


def read_recordings(data_dir: str | Path) -> list[Recording]:
    """Reads `meta/esc50.csv`.

    Args:
        data_dir: The folder that holds `meta/` and `audio/`.

    Returns:
        The recordings in the order of the file.

    Raises:
        FileNotFoundError: The folder or the csv is missing.
        ValueError: A column is missing, or a fold is not a number.
    """
    return [_recording(line) for line in metadata.read_csv(_metadata_path(data_dir), _COLUMNS)]


def split_recordings(
    recordings: Sequence[InFoldT], test_fold: int, validation_fraction: float, seed: int
) -> dict[str, list[InFoldT]]:
    """Splits by fold, then by source recording.

    Args:
        recordings: Clips of at least two folds.
        test_fold: The fold to test on.
        validation_fraction: The part of the other folds' sources of each class that becomes validation: rounded, but at
            least one source, and never a class's last one.
        seed: Of the draw.

    Returns:
        Clips by split, in their given order. No source is in two splits: ESC-50 promises that folds share none, and
        where a changed copy breaks that, clips of other folds that share a source with the test fold are left out.

    Raises:
        ValueError: The test fold has no clips, or no other fold has any.
    """
    folds = sorted({recording.fold for recording in recordings})
    if test_fold not in folds:
        raise ValueError(f"fold {test_fold!r} has no clips; the folds with clips are {folds}")
    if len(folds) == 1:
        raise ValueError(f"fold {test_fold!r} is the only one with clips; nothing is left to train on")
    test = [recording for recording in recordings if recording.fold == test_fold]
    test_sources = {recording.src_file for recording in test}
    rest = [recording for recording in recordings if recording.src_file not in test_sources]
    held_out = _validation_sources(rest, validation_fraction, seed)
    return {
        "train": [recording for recording in rest if recording.src_file not in held_out],
        "validation": [recording for recording in rest if recording.src_file in held_out],
        "test": test,
    }


def find_audio(folder: Path, filenames: Sequence[str]) -> dict[str, Path]:
    """Finds the audio of every filename by its stem, for copies of the dataset that were converted to another format.

    Args:
        folder: Where the audio is.
        filenames: Names from the csv, whatever their suffix.

    Returns:
        The path by filename; the file of exactly that name where it exists.

    Raises:
        FileNotFoundError: Some have no file: says how many, and names the first few.
    """
    recordings = Recordings(folder)
    found = {name: recordings.at(name) for name in filenames}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(filenames)} audio files are missing in {folder}, in any of the formats "
            f"{', '.join(SUFFIXES)}: {some(missing)}"
        )
    return {name: path for name, path in found.items() if path is not None}


def _metadata_path(data_dir: str | Path | None) -> Path:
    folder = Path(data_dir or "")
    if not folder.is_dir():
        raise FileNotFoundError(f"data_dir {folder} is not a folder; give the one that holds meta/esc50.csv and audio/")
    path = folder / "meta" / "esc50.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; data_dir must be the folder that holds meta/esc50.csv and audio/")
    return path


def _recording(line: metadata.Line) -> Recording:
    values = line.values
    if not values["fold"].strip().isdigit():
        raise ValueError(f"{line.where}: fold is {values['fold']!r}; give a number")
    is_esc10 = values["esc10"].strip().lower() == "true"
    return Recording(values["filename"], int(values["fold"]), values["category"], is_esc10, values["src_file"])


def _phrases_of(recordings: Sequence[Recording]) -> dict[str, dict[str, str]]:
    phrases = label_phrases("esc50")
    unknown = sorted({recording.category for recording in recordings} - phrases.keys())
    if unknown:
        raise ValueError(f"the categories {unknown} are none of ESC-50's: {', '.join(phrases)}")
    return phrases


def _validation_sources(recordings: Sequence[InFold], fraction: float, seed: int) -> set[str]:
    if fraction == 0:
        return set()
    class_of_source: dict[str, str] = {}
    for recording in recordings:
        class_of_source.setdefault(recording.src_file, recording.category)
    sources_of_class = defaultdict(list)
    for source, category in sorted(class_of_source.items()):
        sources_of_class[category].append(source)
    rng = np.random.default_rng(seed)
    held_out: set[str] = set()
    for _, sources in sorted(sources_of_class.items()):
        count = min(max(1, round(fraction * len(sources))), len(sources) - 1)
        held_out.update(rng.permutation(sources)[:count].tolist())
    return held_out
