"""Hostile files: loading them must not run code, open an address or read another file.

    python tests/campaigns/hostile.py --folder DIR

Each attempt loads a file as a user would. The file contains a command that creates a marker file, or a recording that
refers to an address or another file. Positive controls show that the campaign detects faults: an unsafe reader of the
same bytes runs the command, and a request to the address is recorded.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pickle
import runpy
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import builders
import datasets
import numpy as np
import pyarrow.parquet
import soundfile
import torch
import yaml
from commands import run_recipe
from fake_models import PitchModel

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion.files import read_checkpoint
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_audio, read_row
from modeling_supclap.datasets_scripts.builders.hf import as_rows
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.recipes import embed_corpus
from modeling_supclap.search import Searcher, build_index


class Payload:
    """Object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


def pickles(mark: Path) -> Iterator[tuple[str, bytes]]:
    """Yield weight files in every pickle format, with their names."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield f"protocol{protocol}.pt", pickle.dumps({"model": Payload(mark)}, protocol=protocol)
        yield f"alone{protocol}.bin", pickle.dumps(Payload(mark), protocol=protocol)
        for new in (True, False):
            stream = io.BytesIO()
            content = {"state_dict": {"a": torch.zeros(1)}, "args": Payload(mark)}
            torch.save(content, stream, pickle_protocol=protocol, _use_new_zipfile_serialization=new)
            yield f"torch{protocol}{'new' if new else 'old'}.pt", stream.getvalue()

    stream = io.BytesIO()
    np.savez(stream, rank=np.array([Payload(mark)], dtype=object))
    yield "outcomes.npz", stream.getvalue()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(mark)))
        archive.writestr("archive/version", "3\n")
    yield "archive.ckpt", stream.getvalue()


class Attempt(NamedTuple):
    """A hostile file, and the call that loads it.

    Attributes:
        name: Name for the list of faults.
        call: Function that loads the file as a user would.
        control: Function that loads the same bytes with an unsafe reader, which must create the marker. None: no code
            in the file.
    """

    name: str
    call: Callable[[], Any]
    control: Callable[[], Any] | None = None


def load_unsafely(path: Path) -> None:
    """Unpickle a file, and all pickles in it, with the reader of its format."""
    if path.suffix == ".npz":
        np.load(path, allow_pickle=True)["rank"]
    elif path.name.startswith(("torch", "archive")):
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())


def attempts(folder: Path, mark: Path, address: str, secret: Path) -> Iterator[Attempt]:
    """Create the files, and yield an attempt for each."""
    for name, content in pickles(mark):
        path = folder / name
        path.write_bytes(content)
        control: Callable[[], Any] = partial(load_unsafely, path)
        yield Attempt(f"convert {name}", partial(read_checkpoint, path), control)

        model = folder / f"model-{path.stem}"
        builders.save_supclap(model)
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(content)
        yield Attempt(f"from_pretrained with {name}", partial(SupCLAPModel.from_pretrained, model), control)
        (model / "model.safetensors").write_bytes(content)
        yield Attempt(f"safetensors that is {name}", partial(SupCLAPModel.from_pretrained, model), control)

    model = folder / "remote-code"
    builders.save_supclap(model)
    for path in model.glob("*.py"):
        path.write_text(f"open({str(mark)!r}, 'w').close()\n")
    control = partial(runpy.run_path, str(path))
    yield Attempt("from_pretrained of a folder with code", partial(SupCLAPModel.from_pretrained, model), control)
    yield Attempt("a processor of a folder with code", partial(SupCLAPProcessor.from_pretrained, model), control)

    config = folder / "config.yaml"
    code = json.dumps(f"open({str(mark)!r}, 'w').close()")
    config.write_text(f"seed: !!python/object/apply:builtins.exec [{code}]\n")
    control = partial(yaml.unsafe_load, config.read_text())
    yield Attempt("a YAML tag", partial(_parse_arguments, config), control)

    yield from _recordings(folder, address, secret)

    yield from _corpus(folder, mark, address)

    table = folder / "table"
    table.mkdir()
    soundfile.write(table / "a.wav", 0.1 * np.ones(1600), 16000)
    # A table may contain absolute paths of recordings; an address names the recording beside the table.
    for name, is_loaded in (
        (str(secret), True),
        (f"file://{secret}", True),
        (f"{address}/a.wav", False),
        (f"{address}/{secret.name}", None),
        (f"../{secret.name}", None),
    ):
        (table / "metadata.jsonl").write_text(json.dumps({"file_name": name, "caption": "rain"}) + "\n")
        cache = str(folder / "cache" / str(abs(hash(name))))
        if is_loaded is None:
            yield Attempt(f"a table that names {name[:9]}", partial(_refused, _loads, secret, table, cache))
        else:
            assert _loads(secret, table, cache) == is_loaded


def _corpus(folder: Path, mark: Path, address: str) -> Iterator[Attempt]:
    """Index, embed, stream and convert the existing files as recordings, and open an index that names a function."""
    hostile = folder / "hostile"
    hostile.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        (hostile / f"{path.name}.wav").write_bytes(path.read_bytes())
    names = {path.name for path in hostile.iterdir()}
    sounds = folder / "sounds"
    sounds.mkdir()
    soundfile.write(sounds / "a.wav", builders.tone(440.0), 16000)
    model, index = load_embedding_model(PitchModel()), folder / "index"

    def index_them() -> None:
        assert build_index(model, hostile, folder / "other", show_progress_bar=False).unreadable.keys() == names

    def embed_them() -> None:
        words = ["--model", "fake_models:PitchModel", "--folder", hostile, "--output", folder / "embeds"]
        run_recipe(embed_corpus, *words, "--device", "cpu")
        manifest = json.loads((folder / "embeds" / "manifest.json").read_text(encoding="utf-8"))
        assert {entry["clip_id"] for entry in manifest["bad_audio"]} == names

    yield Attempt("index of all files", index_them, partial(load_unsafely, folder / "protocol2.pt"))
    yield Attempt("embed of all files", embed_them)
    build_index(model, sounds, index, show_progress_bar=False)
    for name in sorted(names):
        query = partial(Searcher(index, model).search, audio=hostile / name)
        yield Attempt(f"query by {name}", partial(_refused, query))

    files: list[dict[str, Any]] = [{"bytes": (hostile / name).read_bytes(), "path": name} for name in sorted(names)]
    files += [{"bytes": None, "path": f"{address}/{suffix}.wav"} for suffix in ("a", "b")]
    rows = {"audio": files, "caption": [f"sound {number}" for number in range(len(files))]}
    table = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    (folder / "stream").mkdir()
    pyarrow.parquet.write_table(table.data.table, folder / "stream" / "train.parquet")
    streamed = partial(load_splits, "hf", data_dir=f"file://{folder}/stream", streaming=True)
    tar = folder / "tars" / "train.tar"
    tar.parent.mkdir()
    with tarfile.open(tar, "w") as archive:
        for name in sorted(names):  # a WebDataset decoder would unpickle the second file of a sample
            for suffix in (".wav", ".pyd", ".json"):
                content = b'{"text": "rain"}' if suffix == ".json" else (hostile / name).read_bytes()
                member = tarfile.TarInfo(f"../{name.replace('.', '-')}{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    def read_all(load: Callable[[], Any]) -> None:
        for row in load():
            _refused(read_row, row, 16000)

    yield Attempt("as_rows of all files", partial(read_all, partial(as_rows, table)))
    held_out: dict[str, Any] = {"validation_fraction": 0, "test_fraction": 0}
    yield Attempt("a stream of Parquet", partial(read_all, lambda: streamed(**held_out)["train"]))
    tars = partial(load_splits, "webdataset", data_dir=str(tar.parent), streaming=True)
    yield Attempt("a stream of tar files", partial(read_all, lambda: tars()["train"]))

    # Stands for a harmful function of the standard library, such as os:abort.
    os.environ["HOSTILE_MARK"] = str(mark)
    named = dataclasses.replace(model, name="hostile:leave_mark", fingerprint="")
    build_index(named, sounds, folder / "named", show_progress_bar=False)
    mark.unlink(missing_ok=True)
    yield Attempt("an index that names a function", partial(_refused, Searcher, folder / "named"), leave_mark)


def leave_mark() -> Any:
    """Create the marker file, which shows that code ran."""
    Path(os.environ["HOSTILE_MARK"]).touch()
    return PitchModel()


def _recordings(folder: Path, address: str, secret: Path) -> Iterator[Attempt]:
    """Yield playlists and manifests with names of recordings; FFmpeg would open the files listed in them."""
    texts = {
        "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" '
        'profiles="urn:mpeg:dash:profile:isoff-on-demand:2011" '
        f'type="static" minBufferTime="PT1S" '
        f'mediaPresentationDuration="PT1S"><Period><AdaptationSet mimeType="audio/mp4"><Representation id="1" '
        f'bandwidth="1"><BaseURL>{address}/dash.mp4</BaseURL></Representation></AdaptationSet></Period></MPD>',
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{address}/hls.ts\n#EXT-X-ENDLIST\n",
        "hls-local": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n",
        "ffconcat": f"ffconcat version 1.0\nfile '{secret}'\n",
        "ffconcat-net": f"ffconcat version 1.0\nfile '{address}/concat.wav'\n",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    }
    for kind, text in texts.items():
        for suffix in ("wav", "m4a", "mp3"):
            path = folder / f"{kind}.{suffix}"
            path.write_text(text)
            yield Attempt(f"{kind} named .{suffix}", partial(_refused, read_audio, path))
            as_bytes = partial(_refused, read_audio, text.encode(), name="clip 7")
            yield Attempt(f"{kind} as bytes, .{suffix}", as_bytes)


def _loads(secret: Path, table: Path, cache: str) -> bool:
    """Load a folder; return whether one of its rows is the recording outside the folder."""
    whole: dict[str, Any] = {"validation_fraction": 0.0, "test_fraction": 0.0}
    splits = load_splits("audio_folder", cache, data_dir=str(table), **whole)
    return any(Path(row["audio_path"]).resolve() == secret.resolve() for rows in splits.values() for row in rows)


def _refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    try:
        call(*arguments, **options)
    except (ValueError, OSError):
        return
    raise AssertionError("it was read as a recording")


def _parse_arguments(config: Path) -> Any:
    from modeling_supclap.recipes.arguments import parse_arguments
    from modeling_supclap.recipes.options import DataArguments

    return parse_arguments((DataArguments,), [str(config)])


class RequestRecorder(BaseHTTPRequestHandler):
    """Handler that records every request and answers 404."""

    requests: list[str] = []  # noqa: RUF012  # shared by all requests on purpose

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def campaign(folder: Path) -> tuple[Counter[str], list[str]]:
    """Run all attempts.

    Args:
        folder: Empty working folder.

    Returns:
        Number of rejected files, of files loaded without harm, and of successful controls; and one line for each
        successful attempt and each failed control.
    """
    mark, secret = folder / "mark", folder / "secret.wav"
    soundfile.write(secret, 0.1 * np.ones(16000), 16000)
    work = folder / "work"
    work.mkdir()
    counts = Counter[str]()
    faults: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), RequestRecorder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        _control_requests(address, counts, faults)
        _control_secret(secret, counts)
        for attempt in attempts(work, mark, address, secret):
            counts[_outcome(attempt, faults)] += 1
            if mark.exists():
                faults.append(f"{attempt.name}: its code ran")
                mark.unlink()
            if RequestRecorder.requests:
                faults.append(f"{attempt.name}: fetched {RequestRecorder.requests}")
                RequestRecorder.requests.clear()

            if attempt.control is not None:
                with contextlib.suppress(
                    Exception
                ):  # the command runs before the reader finds that there are no weights
                    attempt.control()
                if mark.exists():
                    counts["control: an unsafe reader ran the code"] += 1
                    mark.unlink()
                else:
                    faults.append(f"{attempt.name}: a control, whose code did not run in an unsafe reader")
        server.shutdown()
    return counts, faults


def _outcome(attempt: Attempt, faults: list[str]) -> str:
    """Run one attempt, and return its outcome."""
    try:
        attempt.call()
    except AssertionError as error:
        faults.append(f"{attempt.name}: {error}")
        return "taken for a recording"
    except (ValueError, OSError, RuntimeError, ImportError, TypeError, yaml.YAMLError, pickle.UnpicklingError):
        return "held: refused"
    except Exception as error:
        # No code ran. The fuzzer checks the error messages.
        return f"held: {type(error).__name__}"
    return "held: loaded nothing of it"


def _control_requests(address: str, counts: Counter[str], faults: list[str]) -> None:
    """Check that a request to the address is recorded."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/control").close()
    if RequestRecorder.requests == ["/control"]:
        counts["control: a request was recorded"] += 1
    else:
        faults.append("a control: the request for /control was not recorded")
    RequestRecorder.requests.clear()


def _control_secret(secret: Path, counts: Counter[str]) -> None:
    """Check that the secret file, which must not be read through another file, can be read directly."""
    read_audio(secret)
    counts["control: the other file is a recording"] += 1


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder to work in")
    counts, faults = campaign(parser.parse_args().folder.resolve())
    for what, count in sorted(counts.items()):
        print(f"{count:6d}  {what}")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
