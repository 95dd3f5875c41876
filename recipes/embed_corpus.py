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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, folder_lock, write_json
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import CorpusArguments
from modeling_supclap.recipes.running import join_processes, run_command, say

if TYPE_CHECKING:
    import numpy as np
    from accelerate import PartialState

    from modeling_supclap.audio_input import Recording
    from modeling_supclap.encoding import AudioChunks
    from modeling_supclap.evaluation.models import EmbeddingModel


class Clip(NamedTuple):
    """Recording in row number `row` of a dataset split."""

    clip_id: str
    split: str
    row: int


class Corpus:
    """Recordings to embed, from all splits. Paths in the manifest are relative to the folder `root`."""

    def __init__(self, splits: Mapping[str, Any], root: str | None = None) -> None:
        from modeling_supclap.datasets_scripts.schema import without_audio

        self.splits, self.root = splits, root
        self.clips: list[Clip] = []
        for split, rows in splits.items():
            for number, row in enumerate(without_audio(rows)):
                self.clips.append(Clip(row["clip_id"], split, number))

    def relative(self, text: str | None) -> str:
        """Remove the root folder from the paths in a text."""
        return (text or "").replace(f"{self.root}/", "") if self.root else text or ""

    def recording(self, clip: Clip, model: EmbeddingModel, pad_short_clips: bool) -> Recording:
        """Return a recording that is read on demand. If it is too short for the model, it is padded or refused."""
        from modeling_supclap.audio_input import Recording
        from modeling_supclap.datasets_scripts.audio import read_row

        def read(rate_hz: int) -> np.ndarray:
            row = self.splits[clip.split][clip.row]
            return read_row(
                row,
                rate_hz,
                min_seconds=model.min_seconds,
                pad_short_clips=pad_short_clips,
                resampling_method=model.resampling_method,
            )

        return Recording(read, None, f"clip {clip.clip_id}")


def load_corpus(args: CorpusArguments) -> Corpus:
    """Load the dataset, or list the recordings in the folder."""
    from modeling_supclap.datasets_scripts.audio import Address
    from modeling_supclap.evaluation.windows import list_recordings

    if (args.dataset is None) == (args.folder is None):
        raise ValueError(f"got dataset={args.dataset!r} and folder={args.folder!r}; set exactly one of them")
    if args.dataset is not None:
        data_dir = args.builder_options.get("data_dir")
        root = None if data_dir is None or not Path(data_dir).is_dir() else str(Path(data_dir).absolute())
        return Corpus(args.load_splits(), root)

    root, paths = list_recordings(str(args.folder))
    rows = []
    for name, path in paths.items():
        rows.append({"clip_id": name, "audio_path": path if isinstance(path, Address) else str(path)})
    return Corpus({"all": rows}, root)


def main() -> None:
    """Run the command: write the missing Parquet files and the manifest."""
    (args,) = parse_arguments((CorpusArguments,), about=__doc__)

    from modeling_supclap.datasets_scripts.public_names import redact
    from modeling_supclap.evaluation.models import check_device, load_embedding_model

    for name in ("batch_size", "clips_per_file"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least 1")
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

    # The plan contains all settings that determine the embeddings; an output folder with another plan is rejected.
    clips = "".join(f"{clip.split}\0{clip.clip_id}\n" for clip in corpus.clips)
    options: dict[str, Any] = {"model": args.model, "dataset": args.dataset, "folder": args.folder}
    config = {name: value for name, value in args.builder_options.items() if name not in ("data_dir", "cache_dir")}
    if config:
        options["dataset_config"] = config
    if args.pad_short_clips:
        options["pad_short_clips"] = True
    plan = {
        **redact(options, from_anywhere=True),
        "chunk_samples": model.chunk_samples(args.chunk_seconds),
        "model_fingerprint": model.fingerprint,
        "corpus": hashlib.sha256(clips.encode()).hexdigest(),
        "clips": len(corpus.clips),
        "clips_per_file": args.clips_per_file,
    }
    with folder_lock(args.output) if state.is_main_process else nullcontext():
        if state.is_main_process:
            start_output(Path(args.output), plan)
        state.wait_for_everyone()
        paths = write_files(model, corpus, args, state)
        state.wait_for_everyone()
        if state.is_main_process:
            write_manifest(Path(args.output), plan, paths)


def start_output(output: Path, plan: Mapping[str, Any]) -> None:
    """Create the output folder, or reuse a folder with the same `plan` (settings). Remove unfinished files."""
    plan_path = output / "plan.json"
    if plan_path.is_file():
        stored = json.loads(plan_path.read_text(encoding="utf-8"))
        changed = sorted(name for name in plan.keys() | stored.keys() if stored.get(name) != plan.get(name))
        if changed:
            raise FileExistsError(f"{output} was started with another {', '.join(changed)}; choose another output")
    elif output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty and contains no embeddings; choose another output")

    (output / "data").mkdir(parents=True, exist_ok=True)
    for unfinished in (output / "data").glob("*.tmp"):
        unfinished.unlink()
    write_json(plan_path, plan)


def write_files(model: EmbeddingModel, corpus: Corpus, args: CorpusArguments, state: PartialState) -> list[Path]:
    """Embed recordings and write this process's share of the missing files. Return the paths of all files."""
    from modeling_supclap.datasets_scripts.progress import progress

    starts = range(0, len(corpus.clips), args.clips_per_file)
    paths, missing = [], {}
    for number, start in enumerate(starts):
        paths.append(Path(args.output, "data", f"embeddings-{number:05d}-of-{len(starts):05d}.parquet"))
        if number % state.num_processes == state.process_index and not paths[-1].is_file():
            missing[paths[-1]] = corpus.clips[start : start + args.clips_per_file]

    width = model.encode_text(["sound"], "eng", 1).shape[1]
    total = sum(map(len, missing.values()))
    with progress((), "embedding", total, "recordings", quiet=not state.is_main_process) as bar:
        for path, clips in missing.items():
            # Do not mix files in a batch, because rounding depends on the batch and some files may already exist.
            embedded = []
            for chunks in model.chunk_embeddings(
                [corpus.recording(clip, model, args.pad_short_clips) for clip in clips],
                args.chunk_seconds,
                batch_size=args.batch_size,
                num_workers=args.num_workers,
                on_bad_audio="skip",
            ):
                embedded.append(chunks)
                bar.update()
            write_file(path, corpus, clips, embedded, width)
    return paths


def write_file(path: Path, corpus: Corpus, clips: Sequence[Clip], embedded: Sequence[AudioChunks], width: int) -> None:
    """Write one Parquet file atomically. Its metadata lists the unusable recordings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from modeling_supclap.datasets_scripts.audio import MissingDecoderError
    from modeling_supclap.datasets_scripts.public_names import public_name
    from modeling_supclap.evaluation.windows import window_table

    tables, bad = [], []
    for clip, chunks in zip(clips, embedded, strict=True):
        tables.append(window_table(chunks, width, "embedding", clip_id=clip.clip_id, split=clip.split))
        if isinstance(chunks.error, MissingDecoderError):
            raise chunks.error  # a missing package, not a bad recording
        if chunks.error is not None:
            audio_path = corpus.splits[clip.split][clip.row]["audio_path"]
            shown = public_name(corpus.relative(audio_path))
            reason = corpus.relative(str(chunks.error).replace(audio_path, shown) if audio_path else str(chunks.error))
            bad.append({"clip_id": clip.clip_id, "audio_path": shown, "reason": reason})

    table = pa.concat_tables(tables).combine_chunks().replace_schema_metadata({"bad_audio": json.dumps(bad)})
    with atomic_write(path) as unfinished, pq.ParquetWriter(unfinished, table.schema) as parquet:
        if len(table):  # `datasets` fails on a row group without rows
            parquet.write_table(table)


def write_manifest(output: Path, plan: Mapping[str, Any], paths: Sequence[Path]) -> None:
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
    say(f"{output} contains {plan['clips'] - len(bad)} of {plan['clips']} recordings in {chunks} chunks")
    if bad:
        say(f"{len(bad)} unusable recordings are listed in {output / 'manifest.json'}")


if __name__ == "__main__":
    run_command(main)
