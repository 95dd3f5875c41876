"""Embed a folder of recordings or a dataset, and write the embeddings to Parquet files, one row per chunk.

    supclap embed --model outputs/synthetic --folder my_sounds --output embeddings/my_sounds
    supclap embed --model outputs/esc10 --dataset prepared --data_dir prepared/esc50 --output embeddings/esc50

Threads prefetch audio, and with `accelerate launch` each process writes a part of the output files. An interrupted run
continues with the missing files, with any number of processes. Repeated runs on the same kind of machine write
identical files. Unusable recordings are skipped and listed in `manifest.json`.

A corpus for many machines is a table of paths. Each machine embeds one range of its rows, without waiting for others:

    supclap embed --table clips.parquet --path_column path --shard 17/100 --output embeddings/corpus
    supclap embed --table clips.parquet --path_column path --finish --output embeddings/corpus

Load the result with `datasets.load_dataset("parquet", data_files="embeddings/my_sounds/data/*")`. The columns are
`clip_id`, `split`, `start_seconds`, `end_seconds` and `embedding` (`--dtype`, unit norm). `--dtype int8` or `binary`,
and `--width`, write smaller embeddings; `evaluation.vectors.restore` converts them back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modeling_supclap.datasets_scripts.atomic_files import folder_lock, read_json, write_json
from modeling_supclap.datasets_scripts.shards import (
    Shard,
    join_records,
    read_plan,
    recording_states,
    split_ranges,
    start_plan,
    write_record,
)
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.command import join_processes, run_command, say
from modeling_supclap.recipes.options import CorpusArguments

if TYPE_CHECKING:
    import numpy as np
    from accelerate import PartialState

    from modeling_supclap.audio_input import Recording
    from modeling_supclap.encoding import AudioChunks
    from modeling_supclap.evaluation.models import EmbeddingModel


class Clip(NamedTuple):
    """Recording in row number `row` of a dataset split. `state` changes if it is repaired or exchanged."""

    clip_id: str
    split: str
    row: int
    state: str = ""


class Clips:
    """Recordings of all splits in order. A slice of them is read from the rows."""

    def __init__(self, splits: Mapping[str, Any]) -> None:
        from modeling_supclap.datasets_scripts.schema import without_audio

        self.splits = splits
        self.rows = {split: without_audio(rows) for split, rows in splits.items()}
        self.lengths = {split: len(rows) for split, rows in self.rows.items()}

    def __len__(self) -> int:
        return sum(self.lengths.values())

    def __getitem__(self, numbers: slice) -> list[Clip]:
        clips = []
        for split, part in split_ranges(range(*numbers.indices(len(self))), self.lengths).items():
            rows = self.splits[split]
            states = recording_states(rows.select(part) if hasattr(rows, "select") else rows[part.start : part.stop])
            for number, state in zip(part, states, strict=True):
                clips.append(Clip(self.rows[split][number]["clip_id"], split, number, state))
        return clips


class Corpus:
    """Recordings to embed, from all splits, or one `channel` of them.

    Paths in the manifest are relative to the folder `root`.
    """

    def __init__(
        self,
        splits: Mapping[str, Any],
        root: str | None = None,
        pad_short_clips: bool = False,
        channel: int | None = None,
    ) -> None:
        self.splits, self.root, self.pad_short_clips, self.channel = splits, root, pad_short_clips, channel
        self.clips = Clips(splits)

    @property
    def digest(self) -> str:
        """SHA-256 of the splits and ids of all clips, or of the table."""
        digest = hashlib.sha256()
        for split, rows in self.clips.rows.items():
            if hasattr(rows, "digest"):
                digest.update(f"{split}\0{rows.digest}\n".encode())
                continue
            for row in rows:
                digest.update(f"{split}\0{row['clip_id']}\n".encode())
        return digest.hexdigest()

    def relative(self, text: str | None) -> str:
        """Remove the root folder from the paths in a text."""
        return (text or "").replace(f"{self.root}/", "") if self.root else text or ""

    def recording(self, clip: Clip, model: EmbeddingModel) -> Recording:
        """Return a recording that is read on demand: a file in parts, and other rows as a whole.

        If it is too short for the model, it is padded or refused.
        """
        from modeling_supclap.audio_input import Recording
        from modeling_supclap.datasets_scripts.audio import read_row, segment_of
        from modeling_supclap.datasets_scripts.schema import AUDIO_COLUMNS

        columns = getattr(self.splits[clip.split], "column_names", None) or ()
        row_without_audio = self.clips.rows[clip.split][clip.row]
        path = row_without_audio["audio_path"]
        *segment, channel = segment_of({"channel": self.channel, **row_without_audio})
        # An address would be downloaded for each part.
        is_file = path is not None and "://" not in path and segment == [None, None]
        if is_file and not self.pad_short_clips and set(columns).isdisjoint(AUDIO_COLUMNS):
            return Recording(path, None, path, channel)

        def read(rate_hz: int) -> np.ndarray:
            return read_row(
                {**self.splits[clip.split][clip.row], "channel": channel},
                rate_hz,
                min_seconds=model.min_seconds,
                pad_short_clips=self.pad_short_clips,
                resampling_method=model.resampling_method,
            )

        return Recording(read, None, f"clip {clip.clip_id}")


def load_corpus(args: CorpusArguments) -> Corpus:
    """Load the dataset or the table, or list the recordings in the folder."""
    from modeling_supclap.datasets_scripts.audio import Address
    from modeling_supclap.evaluation.windows import list_recordings

    sources = {"dataset": args.dataset, "folder": args.folder, "table": args.table}
    if sum(source is not None for source in sources.values()) != 1:
        raise ValueError(f"got {sources}; set exactly one of them")
    root: str | None
    if args.dataset is not None:
        splits, data_dir = args.load_splits(), args.builder_options.get("data_dir")
        root = None if data_dir is None or not Path(data_dir).is_dir() else str(Path(data_dir).absolute())
    elif args.table is not None:
        from modeling_supclap.datasets_scripts.recording_table import RecordingTable

        splits = {"all": RecordingTable(args.table, args.path_column, args.id_column)}
        root = str(Path(args.table).resolve().parent)
    else:
        root, paths = list_recordings(str(args.folder))
        rows = []
        for name, path in paths.items():
            rows.append({"clip_id": name, "audio_path": path if isinstance(path, Address) else str(path)})
        splits = {"all": rows}
    return Corpus(splits, root, args.pad_short_clips, args.channel)


def main() -> None:
    """Run the command: write the missing Parquet files and the manifest."""
    (args,) = parse_arguments((CorpusArguments,), about=__doc__)

    from modeling_supclap.evaluation.models import check_device, load_embedding_model

    if args.batch_size < 1 or (args.clips_per_file is not None and args.clips_per_file < 1):
        raise ValueError(
            f"batch_size is {args.batch_size} and clips_per_file {args.clips_per_file}; both must be at least 1"
        )
    shard, output = Shard.parse(args.shard), Path(args.output)
    if args.finish:
        finish(output)
        return
    if args.device is not None:
        check_device(args.device)

    state = join_processes(args.device)
    with state.main_process_first():
        corpus = load_corpus(args)
    model = load_embedding_model(
        args.model, device=args.device or state.device, trust_remote_code=args.trust_remote_code
    )
    # The requested length, limited by the model's maximum.
    args.chunk_seconds = min(filter(None, (args.chunk_seconds, model.chunk_seconds)), default=None)
    args.clips_per_file = choose_clips_per_file(args, len(corpus.clips), state.num_processes)

    plan = make_plan(args, corpus, model, shard)
    if state.is_main_process and shard.count > 1:
        with folder_lock(output, wait_seconds=60):  # shards may start at the same time
            start_output(output, plan)
    lock = shard.lock(output) if shard.count > 1 else folder_lock(output)
    with lock if state.is_main_process else nullcontext():
        if state.is_main_process:
            start_output(output, plan)
            remove_unfinished(output, shard)
        state.wait_for_everyone()
        paths = write_files(model, corpus, args, state)
        state.wait_for_everyone()
        if state.is_main_process:
            write_record(output, shard, describe_files(paths))
            if shard.count == 1:
                finish(output)
            else:
                say(f"shard {args.shard} of {output} is complete; after the last one, run the command with --finish")


def choose_clips_per_file(args: CorpusArguments, clips: int, processes: int) -> int:
    """Return the number of recordings per file: as given, as in an earlier run, or at least four files a process."""
    if args.clips_per_file is not None:
        return args.clips_per_file
    if stored := read_plan(Path(args.output)):
        return int(stored["clips_per_file"])
    in_shard = math.ceil(clips / Shard.parse(args.shard).count)  # the same for all shards
    return max(1, min(10_000, math.ceil(in_shard / (4 * processes))))


def make_plan(args: CorpusArguments, corpus: Corpus, model: EmbeddingModel, shard: Shard) -> dict[str, Any]:
    """Return all settings that determine the embeddings. An output folder with another plan is refused."""
    from modeling_supclap.datasets_scripts.public_names import redact
    from modeling_supclap.evaluation.vectors import require_storage

    require_storage(model.dim, args.dtype, args.width)
    names = (
        "model",
        "dataset",
        "folder",
        "table",
        "path_column",
        "id_column",
        "width",
        "channel",
        "pad_short_clips",
        "dtype",
    )
    folders = ("data_dir", "cache_dir")
    config = {name: value for name, value in args.builder_options.items() if name not in folders}
    options = {**{name: getattr(args, name) for name in names}, "dataset_config": config}
    return {
        **redact(options, from_anywhere=True),
        "chunk_samples": model.chunk_samples(args.chunk_seconds),
        "model_fingerprint": model.fingerprint,
        "corpus": corpus.digest,
        "clips": len(corpus.clips),
        "clips_per_file": args.clips_per_file,
        "shards": shard.count,
    }


def start_output(output: Path, plan: Mapping[str, Any]) -> None:
    """Create the output folder, or reuse a folder with the same `plan` (settings)."""
    others = [path for path in output.glob("*") if path.name != "plan.json.tmp"]
    if read_plan(output) is None and others:
        raise FileExistsError(f"{output} is not empty and contains no embeddings; choose another output")
    start_plan(output, plan)
    for folder in ("data", "shards"):
        (output / folder).mkdir(exist_ok=True)


def remove_unfinished(output: Path, shard: Shard) -> None:
    """Remove the unfinished files of killed runs on this shard, or on the whole output."""
    pattern = "*.tmp" if shard.count == 1 else f"embeddings-{shard.name}-*.tmp"
    for unfinished in (output / "data").glob(pattern):
        unfinished.unlink()


def write_files(model: EmbeddingModel, corpus: Corpus, args: CorpusArguments, state: PartialState) -> list[Path]:
    """Embed the recordings of a shard, and write this process's share of the missing files.

    Returns the paths of all files of the shard.
    """
    from modeling_supclap.datasets_scripts.progress import progress

    shard, total = Shard.parse(args.shard), len(corpus.clips)
    rows = shard.rows(total)
    starts = range(rows.start, rows.stop, choose_clips_per_file(args, total, state.num_processes))
    manifest = Path(args.output, "manifest.json")
    files = read_json(manifest)["files"] if manifest.is_file() else []
    hashes = {Path(file["file"]).name: file["sha256"] for file in files}
    paths, missing = [], {}
    for number, start in enumerate(starts):
        name = f"{number:05d}-of-{len(starts):05d}" if shard.count == 1 else f"{shard.name}-{number:05d}"
        path = Path(args.output, "data", f"embeddings-{name}.parquet")
        paths.append(path)
        part = slice(start, min(start + starts.step, rows.stop))
        is_own = number % state.num_processes == state.process_index
        if is_own and not (path.is_file() and is_current(path, corpus.clips[part], hashes.get(path.name))):
            missing[path] = part

    dim = model.encode_text(["sound"], "eng", 1).shape[1]
    count = sum(part.stop - part.start for part in missing.values())
    with progress((), "embedding", count, "recordings", quiet=not state.is_main_process) as bar:
        for path, part in missing.items():
            # Do not mix files in a batch, because rounding depends on the batch and some files may already exist.
            clips, embedded = corpus.clips[part], []
            for chunks in model.chunk_embeddings(
                [corpus.recording(clip, model) for clip in clips],
                args.chunk_seconds,
                batch_size=args.batch_size,
                num_workers=args.num_workers,
                on_bad_audio="skip",
                refuse_silence=True,
            ):
                embedded.append(chunks)
                bar.update()
            write_file(path, corpus, clips, embedded, dim, args)
    return paths


def hash_states(clips: Sequence[Clip]) -> bytes:
    return hashlib.sha256(str([clip.state for clip in clips]).encode()).hexdigest().encode()


def is_current(path: Path, clips: Sequence[Clip], sha256: str | None) -> bool:
    """Return whether a file is whole, and has the embeddings of these recordings, as they are now.

    `sha256` is the hash in the manifest, or None without a manifest.
    """
    from modeling_supclap.datasets_scripts.atomic_files import file_sha256
    from modeling_supclap.datasets_scripts.parquet_files import open_parquet

    reason = ""
    try:
        with open_parquet(path) as parquet:
            for group in range(parquet.num_row_groups):
                parquet.read_row_group(group)  # compares the checksums
            states = (parquet.metadata.metadata or {}).get(b"recordings")
        if states != hash_states(clips):
            reason = "its recordings have changed"
        elif sha256 not in (None, file_sha256(path)):
            reason = "its SHA-256 is not that in manifest.json"
    except ValueError as error:
        reason = str(error)
    if reason:
        say(f"{path.name} is embedded again: {reason}")
    return not reason


def write_file(
    path: Path, corpus: Corpus, clips: Sequence[Clip], embedded: Sequence[AudioChunks], dim: int, args: CorpusArguments
) -> None:
    """Write one Parquet file atomically. Its metadata lists the unusable recordings."""
    from modeling_supclap.datasets_scripts.audio import MissingDecoderError
    from modeling_supclap.datasets_scripts.parquet_files import parquet_writer
    from modeling_supclap.datasets_scripts.public_names import public_name
    from modeling_supclap.evaluation.windows import window_table

    bad = []
    for clip, chunks in zip(clips, embedded, strict=True):
        if isinstance(chunks.error, MissingDecoderError):
            raise chunks.error  # a missing package, not a bad recording
        if chunks.error is not None:
            audio_path = corpus.splits[clip.split][clip.row]["audio_path"]
            shown = public_name(corpus.relative(audio_path))
            reason = corpus.relative(str(chunks.error).replace(audio_path, shown) if audio_path else str(chunks.error))
            bad.append({"clip_id": clip.clip_id, "audio_path": shown, "reason": reason})

    names = {"clip_id": [clip.clip_id for clip in clips], "split": [clip.split for clip in clips]}
    table = window_table(embedded, dim, "embedding", args.dtype, args.width, **names)
    table = table.replace_schema_metadata({"bad_audio": json.dumps(bad), "recordings": hash_states(clips)})
    with parquet_writer(path, table.schema) as parquet:
        if len(table):  # `datasets` fails on a row group without rows
            parquet.write_table(table)


def describe_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the number of chunks, the files with their SHA-256, and the unusable recordings."""
    from modeling_supclap.datasets_scripts.atomic_files import file_sha256
    from modeling_supclap.datasets_scripts.parquet_files import open_parquet

    files, bad, chunks = [], [], 0
    for path in paths:
        with open_parquet(path) as parquet:
            metadata = parquet.metadata
        chunks += metadata.num_rows
        bad += json.loads(metadata.metadata[b"bad_audio"])
        files.append({"file": f"data/{path.name}", "rows": metadata.num_rows, "sha256": file_sha256(path)})
    return {"chunks": chunks, "files": files, "bad_audio": bad}


def finish(output: Path) -> None:
    """Write `manifest.json` with files, unusable recordings and versions. Its presence means the output is complete.

    The same manifest is not written again, so that it names the versions that wrote the files. Raise if a shard or one
    of its files is missing.
    """
    from modeling_supclap.datasets_scripts.manifest import installed_versions

    plan = read_plan(output)
    if plan is None:
        raise FileNotFoundError(f"{output} has no plan.json; run the command with --shard first")
    content = {**plan, **join_records(output, plan["shards"])}
    for file in content["files"]:
        if not (output / file["file"]).is_file():
            raise FileNotFoundError(f"{output} lacks {file['file']}; copy the files of all shards to one folder")

    path = output / "manifest.json"
    stored = read_json(path) if path.is_file() else {}
    content["versions"] = stored.get("versions")
    if content != stored:
        packages = ["supclap", "torch", "transformers", "torchaudio", "soundfile"]
        write_json(path, {**content, "versions": installed_versions(packages)})
    bad = content["bad_audio"]
    say(f"{output} contains {plan['clips'] - len(bad)} of {plan['clips']} recordings in {content['chunks']} chunks")
    if bad:
        say(f"{len(bad)} unusable recordings are listed in {path}")


if __name__ == "__main__":
    run_command(main)
