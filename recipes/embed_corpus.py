"""Embeds a corpus: a folder of recordings, or a dataset, to Parquet files of one embedding a chunk.

    supclap embed --model outputs/synthetic --folder my_sounds --output embeddings/my_sounds
    supclap embed --model outputs/esc10 --dataset prepared --data_dir prepared/esc50 --output embeddings/esc50

Worker processes read, resample and compute features; the processes that accelerate launches each take files of the
output in turn. A run that was killed goes on with the files that are missing, with any number of processes, and ends
with the same bytes on the same kind of machine. What cannot be read is listed in `manifest.json` and skipped.
`datasets.load_dataset("parquet", data_files="embeddings/my_sounds/data/*")` gives the rows: `clip_id`, `split`,
`start_seconds`, `end_seconds` and `embedding`, float32 of unit norm.
"""

from __future__ import annotations

from modeling_supclap.recipes.command import begin

if __name__ == "__main__":
    begin("embed")

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from torch.utils.data import DataLoader, Dataset

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts.atomic_files import atomic_write, folder_lock, write_json
from modeling_supclap.datasets_scripts.audio import MissingDecoderError, read_row
from modeling_supclap.datasets_scripts.bad_audio import exit_with_parent
from modeling_supclap.datasets_scripts.builders.recordings import SUFFIXES, Recordings
from modeling_supclap.datasets_scripts.manifest import file_sha256, installed_versions
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.encoding import cut_chunks, max_chunk_seconds
from modeling_supclap.evaluation.models import check_device, weights_fingerprint
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.models import load_start
from modeling_supclap.recipes.options import CorpusArguments
from modeling_supclap.recipes.running import run_command, say


class Batch(NamedTuple):
    """What a worker has made of some recordings.

    Attributes:
        inputs: Model inputs of C chunks; None where no recording could be used.
        chunks: For each of the C chunks the place of its recording in the corpus, and where it begins and ends.
        bad: What could not be used: "clip_id", "audio_path" and the "reason".
    """

    inputs: dict[str, torch.Tensor] | None
    chunks: list[tuple[int, float, float]]
    bad: list[dict[str, str]]


class Corpus(Dataset):
    """Rows to embed, end to end: a dataset that a `DataLoader` reads, and all that must not change between two runs.

    Args:
        splits: Rows of the schema by split.
    """

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self.splits = splits
        self.clips: list[tuple[str, str]] = []  # clip id and split of each row
        self._places: list[tuple[str, int]] = []
        digest = hashlib.sha256()
        for split, rows in splits.items():
            for place, row in enumerate(without_audio(rows)):
                self.clips.append((row["clip_id"], split))
                self._places.append((split, place))
                digest.update(f"{split}\0{row['clip_id']}\n".encode())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> tuple[int, dict[str, Any]]:
        split, place = self._places[number]
        return number, self.splits[split][place]


class ChunkCollator:
    """Recordings to model inputs, in a worker: read, cut into chunks, put through the feature extractor.

    Args:
        processor: The model's processor.
        chunk_seconds: Longer recordings are cut into chunks of this length; None, of the most that the model takes.
        root: What paths in messages are relative to.
    """

    def __init__(self, processor: SupCLAPProcessor, chunk_seconds: float | None, root: str | None = None) -> None:
        self.processor, self.root = processor, root
        self.rate_hz = int(processor.feature_extractor.sampling_rate)
        limit = max_chunk_seconds(processor.feature_extractor)
        seconds = min(filter(None, (chunk_seconds, limit)), default=None)
        self.chunk_samples = None if seconds is None else round(seconds * self.rate_hz)
        self.min_samples = getattr(processor.feature_extractor, "min_samples", 1)
        if chunk_seconds is not None and round(chunk_seconds * self.rate_hz) < self.min_samples:
            least = self.min_samples / self.rate_hz
            raise ValueError(f"chunk_seconds is {chunk_seconds}; the model takes {least:g} s or more")

    def __call__(self, items: Sequence[tuple[int, dict[str, Any]]]) -> Batch:
        waveforms, chunks, bad = [], [], []
        for number, row in items:
            try:
                waveform = read_row(row, self.rate_hz, min_seconds=self.min_samples / self.rate_hz)
            except MissingDecoderError:
                raise
            except (OSError, ValueError, MemoryError, RuntimeError) as error:
                path, reason = row["audio_path"], str(error)
                if self.root is not None:
                    path, reason = (text.replace(f"{self.root}/", "") for text in (path, reason))
                bad.append({"clip_id": row["clip_id"], "audio_path": path, "reason": reason})
                continue

            for start, chunk in cut_chunks(waveform, self.chunk_samples):
                waveforms.append(chunk)
                chunks.append((number, start / self.rate_hz, (start + len(chunk)) / self.rate_hz))

        if not waveforms:
            return Batch(None, chunks, bad)
        inputs = self.processor(audio=waveforms, sampling_rate=self.rate_hz, return_tensors="pt")
        return Batch(dict(inputs), chunks, bad)


def load_corpus(args: CorpusArguments) -> tuple[Corpus, str | None]:
    """The rows to embed, and the folder that they come from, where that is one."""
    if (args.dataset is None) == (args.folder is None):
        raise ValueError(f"give either dataset or folder, got {args.dataset!r} and {args.folder!r}")
    if args.dataset is not None:
        return Corpus(args.load_splits()), None

    found = Recordings(str(args.folder))
    rows = [{"clip_id": name, "audio_path": str(found.folder / name)} for name in found.files]
    if not rows:
        raise FileNotFoundError(f"{args.folder} holds no recording ({', '.join(SUFFIXES)})")
    return Corpus({"all": rows}), str(found.folder)


@torch.inference_mode()
def embed(model: SupCLAPModel, inputs: Mapping[str, torch.Tensor], batch_size: int) -> np.ndarray:
    """The embeddings `(C, d)`, float32 of unit norm, of the model inputs of C chunks, made a few at a time."""
    parts = []
    for start in range(0, len(next(iter(inputs.values()))), batch_size):
        part = {}
        for name, tensor in inputs.items():
            part[name] = tensor[start : start + batch_size].to(model.device, non_blocking=True)
        embeds = model.get_audio_features(**part).pooler_output.float()
        parts.append(torch.nn.functional.normalize(embeds, dim=-1))
    return torch.cat(parts).cpu().numpy()


def write_files(
    model: SupCLAPModel, corpus: Corpus, files: Mapping[Path, range], collator: ChunkCollator, args: CorpusArguments
) -> None:
    """Embeds the clips of files, given by their places in the corpus; writes each file when its last clip is done."""
    batches, ends = [], []
    for places in files.values():
        for start in range(0, len(places), args.batch_size):
            batches.append(places[start : start + args.batch_size])
            ends.append(start + args.batch_size >= len(places))

    loader: Any = DataLoader(
        corpus,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=collator,
        num_workers=args.num_workers,
        worker_init_fn=exit_with_parent,
        pin_memory=model.device.type == "cuda",
    )

    waiting: Iterator[Path] = iter(files)
    embeds, chunks, bad = [], [], []
    quiet = not PartialState().is_main_process
    bar = progress(zip(loader, ends, strict=True), "embedding", len(batches), "batches", quiet)

    for batch, is_last in bar:
        if batch.inputs is not None:
            embeds.append(embed(model, batch.inputs, args.batch_size))
        chunks += batch.chunks
        bad += batch.bad
        if is_last:
            write_file(next(waiting), corpus, embeds, chunks, bad, model.config.projection_dim)
            embeds, chunks, bad = [], [], []


def write_file(
    path: Path,
    corpus: Corpus,
    embeds: Sequence[np.ndarray],
    chunks: Sequence[tuple[int, float, float]],
    bad: Sequence[Mapping[str, str]],
    width: int,
) -> None:
    """Writes a file whole or not at all; what could not be used is in its metadata, so that one file says it all."""
    values = np.concatenate([np.zeros((0, width), np.float32), *embeds])
    finite = np.isfinite(values).all(axis=1)
    listed = list(bad)
    columns: dict[str, list[Any]] = {"clip_id": [], "split": [], "start_seconds": [], "end_seconds": []}
    for (number, start, end), is_finite in zip(chunks, finite, strict=True):
        clip_id, split = corpus.clips[number]
        if is_finite:
            for name, value in zip(columns, (clip_id, split, start, end), strict=True):
                columns[name].append(value)
        else:
            listed.append({"clip_id": clip_id, "reason": f"the embedding at {start:.2f} s is not finite"})

    embedding = pa.FixedSizeListArray.from_arrays(pa.array(values[finite].ravel()), width)
    table = pa.table({**columns, "embedding": embedding})
    table = table.replace_schema_metadata({"bad_audio": json.dumps(listed)})
    with atomic_write(path) as unfinished, pq.ParquetWriter(unfinished, table.schema) as parquet:
        if len(table):  # `datasets` stumbles over a row group without rows
            parquet.write_table(table)


def write_manifest(output: Path, plan: Mapping[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Writes what the files hold and lack; it comes last, as the sign that all is there."""
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
    (args,) = parse_arguments((CorpusArguments,))
    for name in ("batch_size", "clips_per_file"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be 1 or more")

    if args.device is not None:
        check_device(args.device)

    # Whoever is done waits for the slowest, however long that takes; a launcher ends all when one of them fails.
    on_cpus = args.device == "cpu" or not torch.accelerator.is_available()  # where they join only when told to
    state = PartialState(cpu=on_cpus, timeout=timedelta(days=30))
    with state.main_process_first():
        corpus, root = load_corpus(args)
    model, processor = load_start(args.model)
    model = model.float().eval().to(args.device or state.device)
    collator = ChunkCollator(processor, args.chunk_seconds, root)

    # What the embeddings depend on: a folder that was begun with anything else is refused.
    asked = {
        "model": args.model,
        "dataset": args.dataset,
        "folder": args.folder,
        "chunk_samples": collator.chunk_samples,
    }
    features = json.dumps(processor.feature_extractor.to_dict(), sort_keys=True, default=str)
    plan = {
        **redact(asked, from_anywhere=True),
        "model_fingerprint": weights_fingerprint(model, features),
        "corpus": corpus.digest,
        "clips": len(corpus),
        "clips_per_file": args.clips_per_file,
    }
    with folder_lock(args.output) if state.is_main_process else nullcontext():
        embed_missing(model, corpus, collator, plan, args, state)


def embed_missing(
    model: SupCLAPModel,
    corpus: Corpus,
    collator: ChunkCollator,
    plan: Mapping[str, Any],
    args: CorpusArguments,
    state: PartialState,
) -> None:
    """Shares the files that are not there yet among the processes and writes what they hold when all are."""
    output = Path(args.output)
    if state.is_main_process:
        start_output(output, plan)
    state.wait_for_everyone()

    count = -(-len(corpus) // args.clips_per_file)
    paths, missing = [], {}
    for number in range(count):
        places = range(number * args.clips_per_file, min((number + 1) * args.clips_per_file, len(corpus)))
        paths.append(output / "data" / f"embeddings-{number:05d}-of-{count:05d}.parquet")
        if number % state.num_processes == state.process_index and not paths[-1].is_file():
            missing[paths[-1]] = places
    write_files(model, corpus, missing, collator, args)

    state.wait_for_everyone()
    if state.is_main_process:
        manifest = write_manifest(output, plan, paths)
        bad = len(manifest["bad_audio"])
        say(f"{len(corpus) - bad} of {len(corpus)} recordings in {manifest['chunks']} chunks are in {output}")
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
