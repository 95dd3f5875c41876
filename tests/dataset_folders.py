"""Tiny folders of every dataset in the published layout; audio files are empty unless a test reads them."""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import builders
import yaml
from recordings import ESC50Clip, write_esc50


class Made(NamedTuple):
    """A dataset folder and its contents.

    Attributes:
        config: Options of the builder.
        counts: Number of clips by split.
        audio: Audio files.
        table: Metadata file.
        text: A caption or label of the table; blanking it leaves a clip without caption.
    """

    config: dict[str, Any]
    counts: dict[str, int]
    audio: list[Path]
    table: Path
    text: str


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return path


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def touch(folder: Path, names: Iterable[str]) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def youtube_id(number: int) -> str:
    """Return an id of eleven characters, including "-" and "_"."""
    return f"-_{number:09d}"


def audiocaps(folder: Path, train: int = 6, held_out: int = 2, naming: str = "Y{id}.wav") -> Made:
    """AudioCaps: one caption per clip in train, five in the other splits."""
    counts, audio, number = {"train": train, "val": held_out, "test": held_out}, [], 0
    for split, count in counts.items():
        lines: list[list[Any]] = [["audiocap_id", "youtube_id", "start_time", "caption"]]
        for _ in range(count):
            number += 1
            turns = range(1 if split == "train" else 5)
            lines += [
                [10 * number + turn, youtube_id(number), 30, f"A dog, {split} {number} barks “là” {turn}"]
                for turn in turns
            ]
            audio += touch(folder / "audio" / split, [naming.format(id=youtube_id(number))])
        write_csv(folder / f"{split}.csv", lines)
    return Made(
        {"data_dir": str(folder)},
        {"train": train, "validation": held_out, "test": held_out},
        audio,
        folder / "train.csv",
        f"A dog, train {train} barks “là” 0",
    )


CLOTHO_NAMES = (
    "Rain, #2 'roof'.wav",
    "Glass .wav",
    "121006_rain&amp;storm.wav",
    "FR.CTC.08.001.wav",
    "Très [loud].wav",
)


def clotho(folder: Path) -> Made:
    """Clotho: the same awkward names in each part."""
    audio = []
    for part in ("development", "validation", "evaluation"):
        lines = [["file_name", *(f"caption_{turn}" for turn in range(1, 6))]]
        lines += [[name, *(f"{part} {name}, {turn}" for turn in range(5))] for name in CLOTHO_NAMES]
        write_csv(folder / f"clotho_captions_{part}.csv", lines)
        audio += touch(folder / part, CLOTHO_NAMES)
    counts = dict.fromkeys(("train", "validation", "test"), len(CLOTHO_NAMES))
    return Made({"data_dir": str(folder)}, counts, audio, folder / "clotho_captions_development.csv", "")


MACS_SCENES = ("airport", "public_square")


def macs(folder: Path) -> Made:
    """MACS: two scenes of three places each, with two clips of each place. The first clip has one caption."""
    files: list[dict[str, Any]] = []
    for place in range(3):
        for scene in MACS_SCENES:
            for piece in range(2):
                name = f"{scene}-lisbon-{place}-{2 * place + piece}-a.wav"
                sentences = [
                    f"People talk at the {scene} {place} « {piece}.{turn} »" for turn in range(3 if files else 1)
                ]
                annotations = [{"annotator_id": 7, "sentence": text, "tags": ["footsteps"]} for text in sentences]
                files.append({"filename": name, "annotations": annotations})
    table = folder / "MACS.yaml"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(yaml.safe_dump({"files": files}, allow_unicode=True, width=1000), encoding="utf-8")
    audio = touch(
        folder / "TAU-urban-acoustic-scenes-2019-development" / "audio", [file["filename"] for file in files]
    )
    return Made(
        {"data_dir": str(folder), "num_test": 2, "num_validation": 1},
        {"train": 6, "validation": 2, "test": 4},
        audio,
        table,
        "People talk at the airport 0 « 0.0 »",
    )


def wavcaps(folder: Path, blacklisted: bool = True) -> Made:
    """WavCaps: four parts, ids that two of them share, and blacklists of two clips."""
    parts = {
        "AudioSet_SL/as_final.json": [f"Y{youtube_id(number)}.wav" for number in range(8)],
        "BBC_Sound_Effects/bbc_final.json": [f"NHU{number:08d}" for number in range(4)],
        "FreeSound/fsd_final.json": [str(number) for number in range(8)],
        "SoundBible/sb_final.json": [str(number) for number in range(4)],
    }
    audio = []
    for table, ids in parts.items():
        entries = [{"id": name, "caption": f"A sound in {table} « {name} »", "duration": 1.0} for name in ids]
        write_json(folder / "json_files" / table, {"num_captions_per_audio": 1, "data": entries})
        names = [f"{name.removesuffix('.wav')}.flac" for name in ids]
        audio += touch(folder / "waveforms" / f"{Path(table).parent}_flac", names)
    lists = {
        "all_ac": {"AudioSet": [f"Y{youtube_id(7)}.wav"], "FreeSound": ["Not found"]},
        "test_ac": {"AudioSet": [], "FreeSound": []},
        "ub8k_esc50_vggsound": {"AudioSet": [], "FreeSound": ["3", "99"]},
    }
    for name, listed in lists.items() if blacklisted else ():
        write_json(folder / "json_files" / "blacklist" / f"blacklist_exclude_{name}.json", listed)
    return Made(
        {"data_dir": str(folder), "num_test": 5, "num_validation": 3},
        {"train": 14, "validation": 3, "test": 5},
        audio,
        folder / "json_files/SoundBible/sb_final.json",
        "A sound in SoundBible/sb_final.json « 3 »",
    )


def vggsound(folder: Path, naming: str = "{id}_{start:06d}.wav") -> Made:
    """VGGSound: four classes, one of them with a comma."""
    labels = ["dog barking", "cap gun, shooting", "people eating noodle", "playing zither"]
    clips = [
        [youtube_id(number), 10 * number, labels[number % 4], "train" if number < 8 else "test"]
        for number in range(11)
    ]
    clips[7][2] = "zebra braying"
    table = write_csv(folder / "vggsound.csv", clips)
    audio = touch(folder / "audio", [naming.format(id=name, start=start) for name, start, *_ in clips])
    return Made({"data_dir": str(folder)}, {"train": 8, "test": 3}, audio, table, "zebra braying")


def audioset(folder: Path) -> Made:
    """AudioSet: the balanced train and the eval table with their comments and spaces, and names with commas."""
    names = ["Dog", "Bark", "Speech", "Child speech, kid speaking"]
    classes = [[number, f"/m/0{number}", name] for number, name in enumerate(names)]
    write_csv(folder / "class_labels_indices.csv", [["index", "mid", "display_name"], *classes])
    audio, counts = [], {"eval": 3, "balanced_train": 6}
    for start, (part, count) in enumerate(counts.items()):
        lines = [f"# Segments csv created Sun Mar  5 10:54:31 2017\n# num_ytids={count}, num_segs={count}"]
        lines += ["# YTID, start_seconds, end_seconds, positive_labels"]
        for number in range(10 * start, 10 * start + count):
            labels = "/m/03" if number == 10 else ",".join(f"/m/0{label}" for label in range(number % 2 + 1))
            lines.append(f'{youtube_id(number)}, {10 * start}.000, {10 * start + 10}.000, "{labels}"')
            audio += touch(folder / "audio" / part, [f"Y{youtube_id(number)}.wav"])
        (folder / f"{part}_segments.csv").write_text("\n".join([*lines, ""]))
    return Made({"data_dir": str(folder)}, {"train": 6, "test": 3}, audio, folder / "eval_segments.csv", "")


def fsd50k(folder: Path) -> Made:
    """FSD50K: a table with train and val, one of the test clips, and labels from specific to general."""
    labels = ["Bark,Dog,Animal", "Acoustic_guitar,Guitar", "Speech"]
    dev = [[number, labels[number % 3], "/m/0", "val" if number > 5 else "train"] for number in range(8)]
    dev[0][1] = "Zither"
    test = [[number, labels[number % 3], "/m/0"] for number in range(100, 103)]
    table = write_csv(folder / "FSD50K.ground_truth" / "dev.csv", [["fname", "labels", "mids", "split"], *dev])
    write_csv(folder / "FSD50K.ground_truth" / "eval.csv", [["fname", "labels", "mids"], *test])
    write_json(folder / "FSD50K.metadata" / "dev_clips_info_FSD50K.json", {"1": {"license": "CC0"}, "2": {}})
    write_json(folder / "FSD50K.metadata" / "eval_clips_info_FSD50K.json", {"101": {"license": "CC BY"}})
    audio = touch(folder / "FSD50K.dev_audio", [f"{row[0]}.wav" for row in dev])
    audio += touch(folder / "FSD50K.eval_audio", [f"{row[0]}.wav" for row in test])
    return Made({"data_dir": str(folder)}, {"train": 6, "validation": 2, "test": 3}, audio, table, "Zither")


US8K_COLUMNS = ["slice_file_name", "fsID", "start", "end", "salience", "fold", "classID", "class"]


def urbansound8k(folder: Path) -> Made:
    """UrbanSound8K: three folds of two classes with two recordings of two slices each."""
    lines, audio = [], []
    for fold in (1, 2, 3):
        for class_id, label in enumerate(["air_conditioner", "car_horn"]):
            for recording in range(2):
                source = 1000 * fold + 10 * class_id + recording
                for piece in range(2):
                    name, start = f"{source}-{class_id}-0-{piece}.wav", 0.5 * piece
                    lines.append([name, source, start, start + 1.25, 1 + piece, fold, class_id, label])
                    audio += touch(folder / "audio" / f"fold{fold}", [name])
    table = write_csv(folder / "metadata" / "UrbanSound8K.csv", [US8K_COLUMNS, *lines])
    return Made({"data_dir": str(folder)}, {"train": 12, "validation": 4, "test": 8}, audio, table, "")


def audio_folder(folder: Path, count: int = 10) -> Made:
    """A folder of recordings with captions in English, and in French for every other."""
    names = [f"sub é/clip {number}, #1.wav" if number % 2 else f"clip_{number}.flac" for number in range(count)]
    lines = [
        [name, f"A sound {number}", f"Un son « {number} »" if number % 2 else ""] for number, name in enumerate(names)
    ]
    table = write_csv(folder / "metadata.csv", [["file_name", "caption", "caption_fra"], *lines])
    return Made(
        {"data_dir": str(folder)},
        {"train": count - 2, "validation": 1, "test": 1},
        touch(folder, names),
        table,
        f"A sound {count - 2}",
    )


def esc50(folder: Path) -> Made:
    """ESC-50: three folds of two classes with two recordings each."""
    clips: list[ESC50Clip] = []
    for fold, label, recording in itertools.product((1, 2, 3), ("dog", "rain"), (0, 1)):
        stem = f"{fold}-{label}-{recording}"
        clips.append(ESC50Clip(stem, fold, label, stem, builders.tone(300.0 + len(clips), 800)))
    write_esc50(folder, clips, 8000)
    audio, table = sorted((folder / "audio").iterdir()), folder / "meta" / "esc50.csv"
    return Made({"data_dir": str(folder)}, {"train": 6, "validation": 2, "test": 4}, audio, table, "")


def synthetic(folder: Path) -> Made:
    """Generated events without files."""
    counts = {"train": 3, "validation": 2, "test": 2}
    config = {f"num_{split}": count for split, count in counts.items()}
    return Made({**config, "duration_seconds": 1.0, "audio_dir": str(folder)}, counts, [], folder, "")


def scenes(folder: Path) -> Made:
    """Generated scenes without files."""
    return synthetic(folder)


FOLDERS: dict[str, Callable[[Path], Made]] = {
    make.__name__: make
    for make in (audio_folder, audiocaps, audioset, clotho, esc50, fsd50k, macs, urbansound8k, vggsound, wavcaps)
}
"""Datasets with files on disk."""

MAKERS: dict[str, Callable[[Path], Made]] = {**FOLDERS, "scenes": scenes, "synthetic": synthetic}
