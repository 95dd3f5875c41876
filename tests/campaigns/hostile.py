"""Files that want more than to be read: they run no code, fetch no address and read no file beside them.

    python tests/campaigns/hostile.py --folder DIR

Each attempt hides a command that leaves a mark in every format that can hold one, or names an address or another file
inside a recording, and then does with the file what a user would do.
"""

# mypy: disable-error-code="misc"
# It infers no type for a lambda whose defaults hold the values of a loop.

import argparse
import io
import json
import pickle
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import builders
import numpy as np
import soundfile
import torch
import yaml

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion.files import read_checkpoint
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_audio


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


def pickles(mark: Path) -> Iterator[tuple[str, bytes]]:
    """Files of weights in every form of a pickle, by name."""
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


def attempts(folder: Path, mark: Path, address: str, secret: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is tried, by name."""
    for name, content in pickles(mark):
        path = folder / name
        path.write_bytes(content)
        yield f"convert {name}", lambda path=path: read_checkpoint(path)

        model = folder / f"model-{path.stem}"
        builders.save_supclap(model)
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(content)
        yield f"from_pretrained with {name}", lambda model=model: SupCLAPModel.from_pretrained(model)
        (model / "model.safetensors").write_bytes(content)
        yield f"safetensors that is {name}", lambda model=model: SupCLAPModel.from_pretrained(model)

    model = folder / "remote-code"
    builders.save_supclap(model)
    for code in model.glob("*.py"):
        code.write_text(f"open({str(mark)!r}, 'w').close()\n")
    yield "from_pretrained of a folder with code", lambda: SupCLAPModel.from_pretrained(model)
    yield "a processor of a folder with code", lambda: SupCLAPProcessor.from_pretrained(model)

    config = folder / "config.yaml"
    config.write_text(f"seed: !!python/object/apply:builtins.exec ['open({str(mark)!r}, \"w\")']\n")
    yield "a YAML tag", lambda: _parse_arguments(config)

    yield from _recordings(folder, address, secret)

    table = folder / "table"
    table.mkdir()
    soundfile.write(table / "a.wav", 0.1 * np.ones(1600), 16000)
    for name in (str(secret), f"../{secret.name}", f"file://{secret}", f"{address}/a.wav"):
        (table / "metadata.jsonl").write_text(json.dumps({"file_name": name, "caption": "rain"}) + "\n")
        cache = str(folder / "cache" / str(abs(hash(name))))
        yield (
            f"a table that names {name[:9]}",
            lambda cache=cache: load_splits("audio_folder", cache, data_dir=str(table)),
        )


def _recordings(folder: Path, address: str, secret: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Play lists and manifests under the names of recordings; FFmpeg would follow what they say."""
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
            yield f"{kind} named .{suffix}", lambda path=path: _refused(read_audio, path)
            yield f"{kind} as bytes, .{suffix}", lambda text=text: _refused(read_audio, text.encode(), name="clip 7")


def _refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    try:
        call(*arguments, **options)
    except (ValueError, OSError):
        return
    raise AssertionError("it was read as a recording")


def _parse_arguments(config: Path) -> Any:
    from modeling_supclap.recipes import train_supclap

    return train_supclap.parse_arguments((train_supclap.DataArguments,), [str(config)])


class ToneModel(BaseHTTPRequestHandler):
    """Notes every request."""

    requests: list[str] = []  # noqa: RUF012  # shared by all requests on purpose

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def campaign(folder: Path) -> tuple[Counter[str], list[str]]:
    """Makes all attempts.

    Args:
        folder: An empty folder to work in.

    Returns:
        How many were refused and how many ended as if the file were harmless, and a line for each that succeeded.
    """
    mark, secret = folder / "mark", folder / "secret.wav"
    soundfile.write(secret, 0.1 * np.ones(16000), 16000)
    work = folder / "work"
    work.mkdir()
    counts, faults = Counter[str](), []
    with ThreadingHTTPServer(("127.0.0.1", 0), ToneModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name, attempt in attempts(work, mark, address, secret):
            try:
                attempt()
                counts["held: loaded nothing of it"] += 1
            except AssertionError as error:
                faults.append(f"{name}: {error}")
            except (ValueError, OSError, RuntimeError, ImportError, TypeError, yaml.YAMLError, pickle.UnpicklingError):
                counts["held: refused"] += 1
            except Exception as error:
                # Whatever else it is, nothing ran; the fuzzer judges the words of errors.
                counts[f"held: {type(error).__name__}"] += 1
            if mark.exists():
                faults.append(f"{name}: its code ran")
                mark.unlink()
            if ToneModel.requests:
                faults.append(f"{name}: fetched {ToneModel.requests}")
                ToneModel.requests.clear()
        server.shutdown()
    return counts, faults


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder to work in")
    counts, faults = campaign(parser.parse_args().folder)
    for what, count in sorted(counts.items()):
        print(f"{count:6d}  {what}")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
