"""Embed a folder of recordings or a dataset, and write the embeddings to Parquet files, one row per chunk.

    supclap embed --model outputs/synthetic --folder my_sounds --output embeddings/my_sounds
    supclap embed --model outputs/esc10 --dataset prepared --data_dir prepared/esc50 --output embeddings/esc50

Threads prefetch audio, and with `accelerate launch` each process writes a part of the output files. An interrupted run
continues with the missing files, with any number of processes. Repeated runs on the same kind of machine write
identical files. Unusable recordings are skipped and listed in `manifest.json`.

Load the result with `datasets.load_dataset("parquet", data_files="embeddings/my_sounds/data/*")`. The columns are
`clip_id`, `split`, `start_seconds`, `end_seconds` and `embedding` (float32, unit norm).
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
    """Recordings to embed, from all splits.

    Args:
        splits: Dict from split name to dataset rows, see `datasets_scripts.schema`.
        root: Folder to remove from paths in the manifest; None does not change the paths.

    Attributes:
        clips: List of (clip id, split), one per row.
        digest: SHA-256 of `clips` as a hex string.
    """

    def __init__(self, splits: Mapping[str, Any], root: str | None = None) -> None:
        from modeling_supclap.datasets_scripts.schema import without_audio

        self.splits, self.root = splits, root
        self.clips: list[tuple[str, str]] = []
        self._indices: list[int] = []
        digest = hashlib.sha256()
        for split, rows in splits.items():
            for index, row in enumerate(without_audio(rows)):
                self.clips.append((row["clip_id"], split))
                self._indices.append(index)
                digest.update(f"{split}\0{row['clip_id']}\n".encode())
        self.digest = digest.hexdigest()

    def recording(self, number: int, min_seconds: float) -> Recording:
        """Return the recording of a row; its audio is read on demand.

        Args:
            number: Index in `clips`.
            min_seconds: Minimum length; a shorter recording raises when it is read.
        """
        from modeling_supclap.audio_input import Recording
        from modeling_supclap.datasets_scripts.audio import read_row

        clip_id, split = self.clips[number]

        def read(rate_hz: int) -> np.ndarray:
            return read_row(self.splits[split][self._indices[number]], rate_hz, min_seconds=min_seconds)

        return Recording(read, None, f"clip {clip_id}")

    def describe_error(self, number: int, error: Exception) -> dict[str, str]:
        """Create the manifest entry for an unusable recording."""
        clip_id, split = self.clips[number]
        entry = {
            "clip_id": clip_id,
            "audio_path": self.splits[split][self._indices[number]]["audio_path"],
            "reason": str(error),
        }
        if self.root is not None:
            entry = {name: text.replace(f"{self.root}/", "") for name, text in entry.items()}
        return entry


def load_corpus(args: CorpusArguments) -> Corpus:
    """Load the rows of the dataset, or list the recordings in the folder.

    Raises:
        ValueError: `dataset` and `folder` are both set, or neither is set.
        FileNotFoundError: The folder contains no recordings.
    """
    from modeling_supclap.datasets_scripts.builders.recordings import SUFFIXES, Recordings

    if (args.dataset is None) == (args.folder is None):
        raise ValueError(f"got dataset={args.dataset!r} and folder={args.folder!r}; set exactly one of them")
    if args.dataset is not None:
        return Corpus(args.load_splits())

    recordings = Recordings(str(args.folder))
    rows = [{"clip_id": name, "audio_path": str(recordings.folder / name)} for name in recordings.files]
    if not rows:
        raise FileNotFoundError(f"{args.folder} contains no recordings; supported suffixes are {', '.join(SUFFIXES)}")
    return Corpus({"all": rows}, str(recordings.folder))


def write_files(
    model: EmbeddingModel,
    corpus: Corpus,
    files: Mapping[Path, range],
    chunk_seconds: float | None,
    args: CorpusArguments,
    width: int,
) -> None:
    """Embed the recordings and write the Parquet files.

    Args:
        model: Model that computes the embeddings.
        corpus: Recordings to embed.
        files: Dict from the path of an output file to its range of row indices.
        chunk_seconds: Chunk length in seconds; None uses the model's maximum, limited to five minutes.
        args: Batch size and number of threads.
        width: Embedding dimension.
    """
    from accelerate import PartialState

    from modeling_supclap.datasets_scripts.progress import progress

    def embed_rows() -> Iterator[tuple[Path, int, AudioChunks]]:
        for path, numbers in files.items():
            # Do not mix files in a batch, because rounding depends on the batch and some files may already exist.
            embedded = model.chunk_embeddings(
                [corpus.recording(number, model.min_seconds) for number in numbers],
                chunk_seconds,
                batch_size=args.batch_size,
                num_workers=args.num_workers,
                on_bad_audio="skip",
            )
            yield from zip(repeat(path), numbers, embedded)

    total = sum(map(len, files.values()))
    quiet = not PartialState().is_main_process
    for path, rows in groupby(progress(embed_rows(), "embedding", total, "recordings", quiet), itemgetter(0)):
        write_file(path, corpus, [(number, chunks) for _, number, chunks in rows], width)


def write_file(path: Path, corpus: Corpus, rows: Sequence[tuple[int, AudioChunks]], width: int) -> None:
    """Write one Parquet file atomically; unusable recordings are listed in its metadata."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from modeling_supclap.datasets_scripts.audio import MissingDecoderError

    embeds, bad = [np.empty((0, width), np.float32)], []
    columns: dict[str, list[Any]] = {"clip_id": [], "split": [], "start_seconds": [], "end_seconds": []}
    for number, chunks in rows:
        if isinstance(chunks.error, MissingDecoderError):
            raise chunks.error  # a missing package, not a bad recording
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
        if len(table):  # `datasets` fails on a row group without rows
            parquet.write_table(table)


def write_manifest(output: Path, plan: Mapping[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Write `manifest.json` with files, unusable recordings and versions. Its presence means the output is complete."""
    import pyarrow.parquet as pq

    from modeling_supclap.datasets_scripts.atomic_files import file_sha256
    from modeling_supclap.datasets_scripts.manifest import installed_versions

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
    """Run the command: write the missing Parquet files and the manifest."""
    (args,) = parse_arguments((CorpusArguments,), about=__doc__)

    import torch
    from accelerate import PartialState

    from modeling_supclap.datasets_scripts.public_names import redact
    from modeling_supclap.evaluation.models import check_device, load_embedding_model

    for name in ("batch_size", "clips_per_file"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least 1")

    if args.device is not None:
        check_device(args.device)

    # Use a long timeout, because processes wait for the slowest one. If one fails, the launcher stops all processes.
    on_cpus = args.device == "cpu" or not torch.accelerator.is_available()  # required to join CPU processes
    state = PartialState(cpu=on_cpus, timeout=timedelta(days=30))
    with state.main_process_first():
        corpus = load_corpus(args)
    model = load_embedding_model(args.model, device=args.device or state.device)
    # The requested length, limited by the model's maximum.
    chunk_seconds = min(filter(None, (args.chunk_seconds, model.chunk_seconds)), default=None)

    # The plan contains all settings that determine the embeddings; an output folder with another plan is rejected.
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
    """Write the missing Parquet files, distributed over the processes, and then the manifest."""
    output = Path(args.output)
    if state.is_main_process:
        start_output(output, plan)
    state.wait_for_everyone()

    count = -(-len(corpus.clips) // args.clips_per_file)
    paths, missing = [], {}
    for number in range(count):
        rows = range(number * args.clips_per_file, min((number + 1) * args.clips_per_file, len(corpus.clips)))
        paths.append(output / "data" / f"embeddings-{number:05d}-of-{count:05d}.parquet")
        if number % state.num_processes == state.process_index and not paths[-1].is_file():
            missing[paths[-1]] = rows
    width = model.encode_text(["sound"], "eng", 1).shape[1]
    write_files(model, corpus, missing, chunk_seconds, args, width)

    state.wait_for_everyone()
    if state.is_main_process:
        manifest = write_manifest(output, plan, paths)
        clips, bad = len(corpus.clips), len(manifest["bad_audio"])
        say(f"{output} contains {clips - bad} of {clips} recordings in {manifest['chunks']} chunks")
        if bad:
            say(f"{bad} unusable recordings are listed in {output / 'manifest.json'}")


def start_output(output: Path, plan: Mapping[str, Any]) -> None:
    """Create the output folder or continue in it, and remove unfinished files from an interrupted run.

    Args:
        output: Output folder.
        plan: Settings that determine the embeddings, stored in `plan.json`.

    Raises:
        FileExistsError: The folder was started with another plan, or contains other files.
    """
    plan_path = output / "plan.json"
    if plan_path.is_file():
        stored = json.loads(plan_path.read_text(encoding="utf-8"))
        changed = sorted(name for name in plan if stored.get(name) != plan[name])
        if changed:
            raise FileExistsError(f"{output} was started with another {', '.join(changed)}; choose another output")
    elif output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty and contains no embeddings; choose another output")

    (output / "data").mkdir(parents=True, exist_ok=True)
    for unfinished in (output / "data").glob("*.tmp"):
        unfinished.unlink()
    write_json(plan_path, plan)


if __name__ == "__main__":
    run_command(main)
