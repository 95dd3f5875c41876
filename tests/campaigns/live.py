"""Folders that change, and servers that fail, while they are read: nothing aborts, and the result is correct.

    python tests/campaigns/live.py --trials 20 --folder DIR

In half of the trials, recordings are rewritten, cut, deleted, renamed and replaced by links to themselves, while
`index` and `embed` run and the search page answers. When the folder is calm, one more `index` must leave the windows of
a new index. In the other half, a server answers 503, breaks off and stalls while a set is streamed from it. The rows
must be those of the folder. Controls show that both comparisons can fail.
"""

import json
import logging
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import datasets
import forking
import soundfile
from commands import run_recipe
from fake_models import PITCHES, RATE, PitchModel, tone
from prepared_sets import make_folder
from web_server import flaky

from modeling_supclap.datasets_scripts import load_splits, remote_files
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.recipes import embed_corpus
from modeling_supclap.search import Searcher, SoundIndex, build_index
from modeling_supclap.search.app import launch_page

NAMES = [f"{number}.wav" for number in range(6)] + ["deep/a.flac", "deep/b.wav"]


def write(path: Path, draw: random.Random) -> None:
    """Write a tone of random pitch and length under another name, and move it to the path."""
    unfinished = path.parent / "unfinished"
    sound = tone(draw.choice(list(PITCHES.values())), draw.uniform(0.5, 9.0))
    soundfile.write(unfinished, sound, RATE, format=path.suffix[1:])
    unfinished.replace(path)


def change(root: Path, draw: random.Random) -> str:
    """Change one recording, except the first, so that the folder is never empty. Return the kind of change."""
    path, other = root / draw.choice(NAMES[1:]), root / draw.choice(NAMES[1:])
    kind = draw.choice(["written", "written", "cut", "deleted", "renamed", "linked to itself"])
    if kind == "written":
        write(path, draw)
    elif kind == "cut" and path.is_file():
        path.write_bytes(path.read_bytes()[: draw.randrange(3000)])
    elif kind == "renamed" and path.is_file():
        path.replace(other)
    elif kind in ("deleted", "linked to itself"):
        path.unlink(missing_ok=True)
        if kind == "linked to itself":
            path.symlink_to(path)
    return kind


class Background(threading.Thread):
    """Repeat a call until `stop`, which raises the error of the call, if there was one.

    Args:
        call: Function to repeat.
        pause_seconds: Longest pause between two calls.
    """

    def __init__(self, call: Callable[[], Any], pause_seconds: float, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.call, self.pause_seconds, self.draw = call, pause_seconds, draw
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Repeat the call."""
        try:
            while not self.stopped.wait(self.draw.uniform(0, self.pause_seconds)):
                self.results.append(self.call())
        except BaseException as error:
            self.error = error

    def stop(self) -> list[Any]:
        """Wait for the last call, and return all results."""
        self.stopped.set()
        self.join()
        if self.error is not None:
            raise self.error
        return self.results


def windows(index: Path) -> list[tuple[Any, ...]]:
    """Return all windows of an index with their embeddings, sorted."""
    rows = SoundIndex(index).windows.to_arrow().to_pylist()
    return sorted((row["file"], row["start_seconds"], row["end_seconds"], tuple(row["vector"])) for row in rows)


def try_folder(folder: Path, draw: random.Random, counts: Counter[str]) -> None:
    """Index and embed a folder that changes while the search page runs; count the events."""
    root, index = folder / "sounds", folder / "index"
    (root / "deep").mkdir(parents=True)
    for name in NAMES:
        write(root / name, draw)
    model = load_embedding_model(PitchModel())

    def update(place: Path = index) -> int:
        return build_index(model, root, place, num_workers=2, show_progress_bar=False).windows

    update()
    searcher = Searcher(index, model)
    page = launch_page(searcher, root)

    def ask() -> int:
        page.fns[0].fn(draw.choice(list(PITCHES)), "eng", None, draw.choice([1, 5, 50]))
        try:
            with urlopen(f"{page.local_url}recordings/{draw.choice(NAMES)}") as found:
                return int(found.status)
        except HTTPError as error:
            return error.code
        except (HTTPException, ConnectionError):  # cut or replaced while it was sent
            return 0

    changer = Background(lambda: change(root, draw), 0.02, random.Random(draw.random()))
    reader = Background(ask, 0.004, random.Random(draw.random()))
    try:
        for _ in range(8):
            update()
        embed(root, folder / "embeds", counts)
    finally:
        changes, statuses = changer.stop(), reader.stop()
        page.close()
    counts.update(f"folder: a recording was {kind}" for kind in changes)
    counts.update(f"page: status {status}" for status in statuses)
    assert 500 not in statuses

    write(root / NAMES[0], draw)
    update()
    update(folder / "fresh")
    assert windows(index) == windows(folder / "fresh"), "the index differs from a new one"
    counts["folder: the index is that of a calm folder"] += 1

    write(root / NAMES[0], draw)
    update(folder / "control")
    assert windows(index) != windows(folder / "control"), "the comparison did not notice a change"
    counts["control: a change that was not indexed was noticed"] += 1


def embed(root: Path, out: Path, counts: Counter[str]) -> None:
    """Embed a folder with the recipe. Each listed recording must be embedded or reported as unusable."""
    words = ["--model", "fake_models:PitchModel", "--folder", root, "--output", out, "--device", "cpu"]
    run_recipe(embed_corpus, *words, "--chunk_seconds", "2", "--clips_per_file", "3")
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    rows = datasets.load_dataset("parquet", data_files=str(out / "data" / "*"), cache_dir=str(out / "cache"))["train"]
    embedded, bad = set(rows["clip_id"]), {entry["clip_id"] for entry in manifest["bad_audio"]}
    assert not embedded & bad
    assert len(embedded | bad) == manifest["clips"]
    counts["embed: embedded"] += len(embedded)
    counts["embed: listed as unusable"] += len(bad)


def try_server(root: Path, draw: random.Random, counts: Counter[str]) -> None:
    """Stream a set from a server with up to three faults in a row; count the events."""
    faults: list[str | None] = []
    asked = {"train": draw.randrange(100)}
    expected = list(load_splits("prepared", data_dir=str(root), streaming=True)["train"].shuffle(asked["train"]))
    with flaky(root.parent, faults, stall_seconds=0.6) as address:
        # at least eight good answers between faults, so that one of four attempts succeeds
        for _ in range(100):
            faults += [draw.choice(["busy", "drop", "stall"]) for _ in range(draw.randint(1, 3))] + [None] * 8
        planned = list(faults)
        rows = load_splits("prepared", data_dir=f"{address}/{root.name}", streaming=True)["train"]
        assert list(rows.shuffle(asked["train"])) == expected, "the rows differ from those of the folder"
        counts.update(f"server: {fault}" for fault in planned[: len(planned) - len(faults)] if fault)
        counts["server: the rows are those of the folder"] += 1

        faults[:] = ["busy"] * 1000
        try:
            list(rows)
        except OSError as error:
            counts["control: a server that always fails ends the run by name"] += "train-0" in str(error)
        else:
            raise AssertionError("no request reached the server that fails")


def campaign(trials: int, folder: Path, seed: int = 0, names: list[str] | None = None) -> Counter[str]:
    """Run trials with a changing folder and with a failing server in turn.

    Args:
        trials: Number of trials.
        folder: Empty folder to work in.
        seed: Seed of the changes and faults.
        names: "folder", "server" or both. None: both.

    Returns:
        Number of events by name.

    Raises:
        AssertionError: A result differs from that of an unchanged folder or a server without faults.
    """
    draw, counts = random.Random(seed), Counter[str]()
    names = names or ["folder", "server"]
    logging.getLogger(remote_files.__name__).setLevel(logging.ERROR)
    remote_files.WAIT_SECONDS, remote_files.STALL_SECONDS = 0.01, 0.3
    if "server" in names:
        options = {"data_dir": str(make_folder(folder / "ESC", clips=40, seconds=0.2)), "languages": ["eng"]}
        request = Request("esc50", {**options, "validation_fraction": 0.0, "test_fold": 4}, "int16", 20_000)
        prepare(request, folder / "prepared", cache_dir=str(folder / "cache"), quiet=True)
    for trial in range(trials):
        started = time.perf_counter()
        name = names[trial % len(names)]
        if name == "folder":
            try_folder(folder / str(trial), draw, counts)
            shutil.rmtree(folder / str(trial))
        else:
            try_server(folder / "prepared", draw, counts)
        print(f"trial {trial}, {name}: {time.perf_counter() - started:.1f} s", flush=True)
    return counts


if __name__ == "__main__":
    forking.run_as_command(__doc__, campaign, "--trials", 20)
