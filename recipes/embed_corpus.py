"""Embeds a corpus: a folder of recordings, or a dataset, to Parquet files of one embedding a chunk.

    supclap embed --model outputs/synthetic --folder my_sounds --output embeddings/my_sounds
    supclap embed --model outputs/esc10 --dataset prepared --data_dir prepared/esc50 --output embeddings/esc50

Threads read ahead of the model; the processes that accelerate launches each take files of the output in turn. A run
that was killed goes on with the files that are missing, with any number of processes, and ends with the same bytes on
the same kind of machine. Recordings that cannot be used are skipped and listed in `manifest.json`.
`datasets.load_dataset("parquet", data_files="embeddings/my_sounds/data/*")` gives the rows: `clip_id`, `split`,
`start_seconds`, `end_seconds` and `embedding`, float32 of unit norm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, folder_lock, write_json
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import CorpusArguments
from modeling_supclap.recipes.running import run_command, say

if TYPE_CHECKING:
    import numpy as np
    from accelerate import PartialState

    from modeling_supclap.audio_input import Recording
    from modeling_supclap.encoding import AudioChunks
    from modeling_supclap.evaluation.models import EmbeddingModel


class Corpus:
    """Rows to embed, end to end.

    Args:
        splits: Rows of the schema by split.
        root: What paths in messages are relative to.

    Attributes:
        clips: Clip id and split of each row.
        digest: SHA-256 of these.
    """

    def __init__(self, splits: Mapping[str, Any], root: str | None = None) -> None:
        from modeling_supclap.datasets_scripts.schema import without_audio

        self.splits, self.root = splits, root
        self.clips: list[tuple[str, str]] = []
        self._places: list[int] = []
        digest = hashlib.sha256()
        for split, rows in splits.items():
            for place, row in enumerate(without_audio(rows)):
                self.clips.append((row["clip_id"], split))
                self._places.append(place)
                digest.update(f"{split}\0{row['clip_id']}\n".encode())
        self.digest = digest.hexdigest()

    def recording(self, number: int, min_seconds: float) -> Recording:
        """Return the recording of a row, which is read when it is needed."""
        from modeling_supclap.audio_input import Recording
        from modeling_supclap.datasets_scripts.audio import read_row

        clip_id, split = self.clips[number]

        def read(rate_hz: int) -> np.ndarray:
            return read_row(self.splits[split][self._places[number]], rate_hz, min_seconds=min_seconds)

        return Recording(read, None, f"clip {clip_id}")

    def describe_error(self, number: int, error: Exception) -> dict[str, str]:
        """Return the entry of a bad recording in the manifest."""
        clip_id, split = self.clips[number]
        entry = {
            "clip_id": clip_id,
            "audio_path": self.splits[split][self._places[number]]["audio_path"],
            "reason": str(error),
        }
        if self.root is not None:
            entry = {name: text.replace(f"{self.root}/", "") for name, text in entry.items()}
        return entry


def load_corpus(args: CorpusArguments) -> Corpus:
    """Return the rows of the dataset or the folder."""
    from modeling_supclap.datasets_scripts.builders.recordings import SUFFIXES, Recordings

    if (args.dataset is None) == (args.folder is None):
        raise ValueError(f"give either dataset or folder, got {args.dataset!r} and {args.folder!r}")
    if args.dataset is not None:
        return Corpus(args.load_splits())

    found = Recordings(str(args.folder))
    rows = [{"clip_id": name, "audio_path": str(found.folder / name)} for name in found.files]
    if not rows:
        raise FileNotFoundError(f"{args.folder} holds no recording ({', '.join(SUFFIXES)})")
    return Corpus({"all": rows}, str(found.folder))


def write_files(
    model: EmbeddingModel,
    corpus: Corpus,
    files: Mapping[Path, range],
    chunk_seconds: float | None,
    args: CorpusArguments,
    width: int,
) -> None:
    """Embed the recordings of files, given by their rows in the corpus, and write each file."""

    from accelerate import PartialState

    from modeling_supclap.datasets_scripts.progress import progress

    def embed_rows() -> Iterator[tuple[Path, int, AudioChunks]]:
        for path, numbers in files.items():
            # File by file, so that the batches, and with them the last digits, do not depend on what is there already.
            found = model.chunk_embeddings(
                [corpus.recording(number, model.min_seconds) for number in numbers],
                chunk_seconds,
                batch_size=args.batch_size,
                num_workers=args.num_workers,
                on_bad_audio="skip",
            )
            yield from zip(repeat(path), numbers, found)

    total = sum(map(len, files.values()))
    quiet = not PartialState().is_main_process
    for path, rows in groupby(progress(embed_rows(), "embedding", total, "recordings", quiet), itemgetter(0)):
        write_file(path, corpus, [(number, chunks) for _, number, chunks in rows], width)


def write_file(path: Path, corpus: Corpus, rows: Sequence[tuple[int, AudioChunks]], width: int) -> None:
    """Write a file at once; its metadata list the recordings that could not be used."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from modeling_supclap.datasets_scripts.audio import MissingDecoderError

    embeds, bad = [np.empty((0, width), np.float32)], []
    columns: dict[str, list[Any]] = {"clip_id": [], "split": [], "start_seconds": [], "end_seconds": []}
    for number, chunks in rows:
        if isinstance(chunks.error, MissingDecoderError):
            raise chunks.error  # the fault of the machine
        if chunks.error is not None:
            bad.append(corpus.describe_error(number, chunks.error))
            continue
        clip_id, split = corpus.clips[number]
        embeds.append(np.asarray(chunks.embeds))
        for onset, offset in zip(chunks.onset_seconds, chunks.offset_seconds, strict=True):
            for name, value in zip(columns, (clip_id, split, onset, offset), strict=True):
                columns[name].append(value)

    embedding = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(embeds).ravel()), width)
    table = pa.table({**columns, "embedding": embedding})
    table = table.replace_schema_metadata({"bad_audio": json.dumps(bad)})
    with atomic_write(path) as unfinished, pq.ParquetWriter(unfinished, table.schema) as parquet:
        if len(table):  # `datasets` stumbles over a row group without rows
            parquet.write_table(table)


def write_manifest(output: Path, plan: Mapping[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Writes what the files hold and lack; it comes last, as the sign that all is there."""
    import pyarrow.parquet as pq

    from modeling_supclap.datasets_scripts.manifest import file_sha256, installed_versions

    files, bad, chunks = [], [], 0
    for path in paths:
        metadata = pq.read_metadata(path)
        chunks += metadata.num_rows
        bad += json.loads(metadata.metadata[b"bad_audio"])
        files.append({"file": f"data/{path.name}", "rows": metadata.num_rows, "sha256": file_sha256(path)})

    versions = installed_versions(["supclap", "torch", "transformers", "torchaudio", "soundfile"])
    manifest = {**plan, "chunks": chunks, "files": files, "bad_audio": bad, "versions": versions}
    write_json(output / "manifest.json", manifest, one_writer=True)
    return manifest


def main() -> None:
    """Parse, load, embed what is missing, list what cannot be used."""
    (args,) = parse_arguments((CorpusArguments,), about=__doc__)

    import torch
    from accelerate import PartialState

    from modeling_supclap.datasets_scripts.public_names import redact
    from modeling_supclap.evaluation.models import check_device, load_embedding_model

    for name in ("batch_size", "clips_per_file"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be 1 or more")

    if args.device is not None:
        check_device(args.device)

    # Whoever is done waits for the slowest, however long that takes; a launcher ends all when one of them fails.
    on_cpus = args.device == "cpu" or not torch.accelerator.is_available()  # where they join only when told to
    state = PartialState(cpu=on_cpus, timeout=timedelta(days=30))
    with state.main_process_first():
        corpus = load_corpus(args)
    model = load_embedding_model(args.model, device=args.device or state.device)
    # Of this length, or of the most that the model takes.
    chunk_seconds = min(filter(None, (args.chunk_seconds, model.chunk_seconds)), default=None)

    # What the embeddings depend on: a folder that was begun with anything else is refused.
    options = {"model": args.model, "dataset": args.dataset, "folder": args.folder}
    plan = {
        **redact(options, from_anywhere=True),
        "chunk_samples": model.chunk_samples(chunk_seconds),
        "model_fingerprint": model.fingerprint,
        "corpus": corpus.digest,
        "clips": len(corpus.clips),
        "clips_per_file": args.clips_per_file,
    }
    with folder_lock(args.output) if state.is_main_process else nullcontext():
        embed_missing(model, corpus, chunk_seconds, plan, args, state)


def embed_missing(
    model: EmbeddingModel,
    corpus: Corpus,
    chunk_seconds: float | None,
    plan: Mapping[str, Any],
    args: CorpusArguments,
    state: PartialState,
) -> None:
    """Shares the files that are not there yet among the processes and writes what they hold when all are."""
    output = Path(args.output)
    if state.is_main_process:
        start_output(output, plan)
    state.wait_for_everyone()

    count = -(-len(corpus.clips) // args.clips_per_file)
    paths, missing = [], {}
    for number in range(count):
        places = range(number * args.clips_per_file, min((number + 1) * args.clips_per_file, len(corpus.clips)))
        paths.append(output / "data" / f"embeddings-{number:05d}-of-{count:05d}.parquet")
        if number % state.num_processes == state.process_index and not paths[-1].is_file():
            missing[paths[-1]] = places
    width = model.encode_text(["sound"], "eng", 1).shape[1]
    write_files(model, corpus, missing, chunk_seconds, args, width)

    state.wait_for_everyone()
    if state.is_main_process:
        manifest = write_manifest(output, plan, paths)
        clips, bad = len(corpus.clips), len(manifest["bad_audio"])
        say(f"{clips - bad} of {clips} recordings in {manifest['chunks']} chunks are in {output}")
        if bad:
            say(f"{bad} could not be used and are listed in {output / 'manifest.json'}")


def start_output(output: Path, plan: Mapping[str, Any]) -> None:
    """Finds the folder empty or begun with the same plan, and takes away what a killed run left half-written."""
    note = output / "plan.json"
    if note.is_file():
        begun = json.loads(note.read_text(encoding="utf-8"))
        other = sorted(name for name in plan if begun.get(name) != plan[name])
        if other:
            raise FileExistsError(f"{output} was begun with another {', '.join(other)}; choose another output")
    elif output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty and holds no embeddings; choose another output")

    (output / "data").mkdir(parents=True, exist_ok=True)
    for unfinished in (output / "data").glob("*.tmp"):
        unfinished.unlink()
    write_json(note, plan)


if __name__ == "__main__":
    run_command(main)
