"""ESC-50 and its subset ESC-10: 5-second recordings of 50 (10) everyday sounds in five folds (Piczak, 2015).

Takes the folder as its author publishes it, `meta/esc50.csv` and `audio/`. A csv with only the lines of ESC-10 makes
it ESC-10.
"""

import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import soundfile

from datasets_scripts.captions import captions_fingerprint, check_languages, label_phrases, render_captions
from datasets_scripts.schema import LANGUAGES, Row, features, validate_row

_COLUMNS = ("filename", "fold", "category", "esc10", "src_file")
_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")


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
        csv_path = _metadata_path(self.data_dir)
        contents = hashlib.sha256(csv_path.read_bytes())
        for path in sorted(csv_path.parent.parent.glob("audio/*")):
            contents.update(f"{path}:{path.stat().st_size}".encode())
        made_of = {"files": contents.hexdigest(), "captions": captions_fingerprint("esc50")}
        return super().create_config_id({**config_kwargs, **made_of}, custom_features)


class ESC50(datasets.GeneratorBasedBuilder):
    """ESC-50 as rows: train, validation and test, none of which shares a source recording with another.

    `ESC50(data_dir="ESC-50", test_fold=1).download_and_prepare()`, then `.as_dataset(split="train")`.
    """

    VERSION = "1.0.0"
    BUILDER_CONFIG_CLASS = ESC50Config

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
            "durations_seconds": {filename: _duration_seconds(path) for filename, path in paths.items()},
            "phrases": _phrases_of(recordings),
            # ESC-50's README: the ESC-10 subset is CC BY, the whole CC BY-NC.
            "licence": "CC BY 3.0" if all(recording.esc10 for recording in recordings) else "CC BY-NC 3.0",
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
        licence: str,
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
                "licence": licence,
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
    path = _metadata_path(data_dir)
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(file, restval="")
        columns = lines.fieldnames or []
        missing = [column for column in _COLUMNS if column not in columns]
        if missing:
            raise ValueError(f"{path} lacks the columns {missing}; it has {list(columns)}")
        return [_recording(line, f"{path}, line {lines.line_num}") for line in lines]


def split_recordings(
    recordings: Sequence[Recording], test_fold: int, validation_fraction: float, seed: int
) -> dict[str, list[Recording]]:
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
    files = sorted(folder.glob("*"))
    by_stem = {path.stem: path for path in files if path.suffix.lower() in _SUFFIXES}
    by_name = {path.name: path for path in files}
    found = {name: by_name.get(name) or by_stem.get(Path(name).stem) for name in filenames}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(filenames)} audio files are missing in {folder}, in any of the formats "
            f"{', '.join(_SUFFIXES)}: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
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


def _duration_seconds(path: Path) -> float:
    duration_seconds = soundfile.info(path).duration
    if duration_seconds == 0:
        raise ValueError(f"{path} holds no samples; replace the file")
    return duration_seconds


def _recording(line: Mapping[str, str], where: str) -> Recording:
    if not line["fold"].strip().isdigit():
        raise ValueError(f"{where}: fold is {line['fold']!r}; give a number")
    is_esc10 = line["esc10"].strip().lower() == "true"
    return Recording(line["filename"], int(line["fold"]), line["category"], is_esc10, line["src_file"])


def _phrases_of(recordings: Sequence[Recording]) -> dict[str, dict[str, str]]:
    phrases = label_phrases("esc50")
    unknown = sorted({recording.category for recording in recordings} - phrases.keys())
    if unknown:
        raise ValueError(f"the categories {unknown} are none of ESC-50's: {', '.join(phrases)}")
    return phrases


def _validation_sources(recordings: Sequence[Recording], fraction: float, seed: int) -> set[str]:
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
