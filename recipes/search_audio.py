"""Searches one's own recordings by words or by a sound, and says at which second of which file it is.

    supclap search index field_recordings --model outputs/synthetic --index field_recordings.index
    supclap search query field_recordings.index "pluja sobre una teulada" --language cat -k 5
    supclap search query field_recordings.index --audio example.wav --json
    supclap search serve field_recordings.index

`index` may be called again at any time, also after a kill: only files that are new or have changed are read. `serve`
opens a page with a search box and players that start at the second that was found. Needs the extra `search`. Under
`accelerate launch --multi_gpu recipes/search_audio.py index ...` the processes share the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from modeling_supclap import require_torchaudio
from modeling_supclap.recipes.running import run_command

if TYPE_CHECKING:
    from modeling_supclap.search import Hit


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    index = commands.add_parser("index", help="embed the recordings of a folder, or bring an index up to date")
    index.add_argument("folder", help="recordings, in any sub-folders")
    index.add_argument("--model", required=True, help="a SupCLAP or CLAP model: folder or Hub id, or module:function")
    index.add_argument("--index", required=True, help="the folder of the index; made where there is none")
    index.add_argument("--window_seconds", type=float, default=5.0, help="length of a window (default: 5)")
    index.add_argument("--hop_seconds", type=float, default=2.5, help="from one window to the next (default: 2.5)")
    index.add_argument("--batch_size", type=int, default=32, help="windows that go through the model at once")
    index.add_argument("--num_workers", type=int, help="threads that read files (default: one for each core)")
    index.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    index.add_argument("--quiet", action="store_true", help="no progress bar")

    query = commands.add_parser("query", help="find the places that answer words or sound like a recording")
    query.add_argument("index", help="the folder of the index")
    query.add_argument("text", nargs="?", help="what is wanted, in words")
    query.add_argument("--language", default="eng", help="ISO 639-3 code of the words (default: eng)")
    query.add_argument("--audio", help="a recording to compare with, in place of words")
    query.add_argument("-k", type=int, default=10, help="how many places (default: 10)")
    query.add_argument("--within", help="only places in this file, by its path below the folder")
    query.add_argument("--exact", action="store_true", help="compare every window, also in a large index")
    query.add_argument("--all_windows", action="store_true", help="also windows that overlap a better one")
    query.add_argument("--json", action="store_true", help="print one JSON object")
    query.add_argument("--device", help="cpu, cuda, ...")

    serve = commands.add_parser("serve", help="a page to search and listen on")
    serve.add_argument("index", help="the folder of the index")
    serve.add_argument("--recordings", help="where the recordings are now (default: where they were indexed)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in")
    serve.add_argument("--port", type=int, default=7860, help="port of the page (default: 7860)")
    serve.add_argument("--share", action="store_true", help="also through a public address of Gradio's")
    serve.add_argument("--device", help="cpu, cuda, ...")
    return parser


def run_index(arguments: argparse.Namespace) -> None:
    """Indexes the share of this process."""
    import torch
    from accelerate import PartialState

    from modeling_supclap.evaluation import load_embedding_model
    from modeling_supclap.search import build_index

    on_cpus = arguments.device == "cpu" or not torch.accelerator.is_available()  # where they join only when told to
    state = PartialState(cpu=on_cpus, timeout=timedelta(days=30))  # whoever is done waits for the slowest
    device = arguments.device or (str(state.device) if state.num_processes > 1 else None)
    report = build_index(
        load_embedding_model(arguments.model, device=device),
        arguments.folder,
        arguments.index,
        window_seconds=arguments.window_seconds,
        hop_seconds=arguments.hop_seconds,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        show_progress_bar=not arguments.quiet,
        process=(state.process_index, state.num_processes),
        barrier=state.wait_for_everyone,
    )
    if state.is_main_process:
        print(report)


def run_query(arguments: argparse.Namespace) -> None:
    """Prints the hits."""
    from modeling_supclap.search import Searcher

    searcher = Searcher(arguments.index, device=arguments.device)
    hits = searcher.search(
        arguments.text,
        language=arguments.language,
        audio=arguments.audio,
        k=arguments.k,
        within=arguments.within,
        exact=arguments.exact,
        merge_overlaps=not arguments.all_windows,
    )
    if arguments.json:
        asked = {"query": arguments.text, "language": arguments.language, "audio": arguments.audio}
        print(json.dumps({**asked, "hits": [hit._asdict() for hit in hits]}, ensure_ascii=False, indent=2))
    else:
        print(format_hits(hits))


def format_hits(hits: Sequence[Hit]) -> str:
    """A line for each hit: its score, where it is in minutes and seconds, and the file.

    >>> from modeling_supclap.search import Hit
    >>> print(format_hits([Hit("dawn/birds.flac", 62.5, 67.5, 0.41)]))
    0.410  01:02.5-01:07.5  dawn/birds.flac
    """
    from modeling_supclap.search.app import clock

    lines = []
    for hit in hits:
        lines.append(f"{hit.score:.3f}  {clock(hit.start_seconds)}-{clock(hit.end_seconds)}  {hit.file}")
    return "\n".join(lines) or "nothing is indexed"


def main() -> None:
    """Runs the command that the first word names."""
    arguments = make_parser().parse_args()
    require_torchaudio()
    if arguments.command == "index":
        run_index(arguments)
    elif arguments.command == "query":
        run_query(arguments)
    else:
        from modeling_supclap.search.app import serve

        serve(arguments.index, arguments.recordings, arguments.port, arguments.share, arguments.device, arguments.host)


if __name__ == "__main__":
    run_command(main)
