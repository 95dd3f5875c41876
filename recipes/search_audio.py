"""Index your own recordings, and search them by text or by an example recording. A hit is a part of a file.

    supclap search index field_recordings --model outputs/synthetic --index field_recordings.index
    supclap search query field_recordings.index "pluja sobre una teulada" --language cat -k 5
    supclap search query field_recordings.index --audio example.wav --json
    supclap search serve field_recordings.index

`index` reads only new and changed files, so it can be run again at any time, for example after an interruption. `serve`
starts a page with a search box and an audio player for each hit. The commands require the extra `search`. To index on
several GPUs, run `accelerate launch --multi_gpu recipes/search_audio.py index ...`. Each process embeds a part of the
files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modeling_supclap import require_torchaudio
from modeling_supclap.recipes.running import join_processes, run_command

if TYPE_CHECKING:
    from modeling_supclap.search import Hit


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    index = commands.add_parser("index", help="build or update the index of a folder of recordings")
    index.add_argument("folder", help="folder of the recordings (with sub-folders), or its fsspec address")
    index.add_argument("--model", required=True, help="folder or Hub id of a model, or module:function")
    index.add_argument("--index", required=True, help="folder of the index; created if missing")
    index.add_argument("--window_seconds", type=float, default=5.0, help="window length in seconds (default: 5)")
    index.add_argument("--hop_seconds", type=float, default=2.5, help="seconds between window starts (default: 2.5)")
    index.add_argument("--precision", default="float32", choices=("float32", "int8", "binary"), help="stored vectors")
    index.add_argument("--width", type=int, help="store only the first values of the embeddings (default: all)")
    index.add_argument("--channel", type=int, help="channel of each recording to embed, from 0 (default: the mean)")
    index.add_argument("--batch_size", type=int, default=32, help="windows per batch (default: 32)")
    index.add_argument("--num_workers", type=int, help="threads that read files (default: one per core, at most 8)")
    index.add_argument("--device", help="cpu, cuda, ... (default: a GPU if available)")
    index.add_argument("--trust_remote_code", action="store_true", help="run code from the model's repository")
    index.add_argument("--quiet", action="store_true", help="hide the progress bar")

    query = commands.add_parser("query", help="search an index by text or by example")
    query.add_argument("index", help="folder of the index")
    query.add_argument("text", nargs="?", help="text query")
    query.add_argument("--language", default="eng", help="ISO 639-3 code of the query's language (default: eng)")
    query.add_argument("--audio", help="recording to search by, instead of text")
    query.add_argument("-k", type=int, default=10, help="maximum number of hits (default: 10)")
    query.add_argument("--within", help="search only this file, a path relative to the indexed folder")
    query.add_argument("--exact", action="store_true", help="score every window even in a large index")
    query.add_argument("--all_windows", action="store_true", help="keep windows that overlap a better hit")
    query.add_argument("--json", action="store_true", help="print one JSON object")
    query.add_argument("--model", help="the model, if it is module:function (default: the one in the index)")
    query.add_argument("--device", help="cpu, cuda, ... (default: a GPU if available)")
    query.add_argument("--trust_remote_code", action="store_true", help="run code from the model's repository")

    serve = commands.add_parser("serve", help="serve a search page with audio players")
    serve.add_argument("index", help="folder of the index")
    serve.add_argument("--recordings", help="folder of the recordings (default: the folder that was indexed)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows other machines")
    serve.add_argument("--port", type=int, default=7860, help="port of the page (default: 7860)")
    serve.add_argument("--share", action="store_true", help="create a public Gradio link")
    serve.add_argument("--model", help="the model, if it is module:function (default: the one in the index)")
    serve.add_argument("--device", help="cpu, cuda, ... (default: a GPU if available)")
    serve.add_argument("--trust_remote_code", action="store_true", help="run code from the model's repository")
    return parser


def run_index(arguments: argparse.Namespace) -> None:
    """Build or update the index. If there are several processes, each one embeds a part of the files."""
    from modeling_supclap.evaluation import load_embedding_model
    from modeling_supclap.search import build_index

    state = join_processes(arguments.device)
    device = arguments.device or (str(state.device) if state.num_processes > 1 else None)
    names = ("window_seconds", "hop_seconds", "batch_size", "num_workers", "precision", "width", "channel")
    report = build_index(
        load_embedding_model(arguments.model, device=device, trust_remote_code=arguments.trust_remote_code),
        arguments.folder,
        arguments.index,
        **{name: getattr(arguments, name) for name in names},
        show_progress_bar=not arguments.quiet,
        process=(state.process_index, state.num_processes),
        barrier=state.wait_for_everyone,
    )
    if state.is_main_process:
        print(report)


def run_query(arguments: argparse.Namespace) -> None:
    from modeling_supclap.search import Searcher
    from modeling_supclap.search.query import NOTHING

    searcher = Searcher(arguments.index, arguments.model, arguments.device, arguments.trust_remote_code)
    hits = searcher.search(
        arguments.text,
        language=arguments.language,
        audio=arguments.audio,
        k=arguments.k,
        within=arguments.within,
        exact=arguments.exact,
        merge_overlaps=not arguments.all_windows,
    )
    stands_out = None if arguments.text is None else searcher.stands_out(hits, arguments.within)
    if arguments.json:
        answer = {"query": arguments.text, "language": arguments.language, "audio": arguments.audio}
        answer |= {"stands_out": stands_out, "hits": [hit._asdict() for hit in hits]}
        print(json.dumps(answer, ensure_ascii=False, indent=2))
    else:
        print(format_hits(hits))
        if hits and stands_out is False:
            print(NOTHING)


def format_hits(hits: Sequence[Hit]) -> str:
    """Format hits as text. Each line contains score, start and end (MM:SS), and file.

    >>> from modeling_supclap.search import Hit
    >>> print(format_hits([Hit("dawn/birds.flac", 62.5, 67.5, 0.41)]))
    0.410  01:02.5-01:07.5  dawn/birds.flac
    """
    from modeling_supclap.search.app import clock

    lines = []
    for hit in hits:
        times = f"{clock(hit.start_seconds)}-{clock(hit.end_seconds)}"
        lines.append(f"{hit.score:.3f}  {times}  {hit.file}")
    return "\n".join(lines) or "no indexed recording to search"


def main() -> None:
    """Run one of the commands `index`, `query` and `serve`."""
    arguments = make_parser().parse_args()
    require_torchaudio()
    if arguments.command == "index":
        run_index(arguments)
    elif arguments.command == "query":
        run_query(arguments)
    else:
        from modeling_supclap.search.app import serve

        options = dict(vars(arguments))
        del options["command"]
        serve(**options)


if __name__ == "__main__":
    run_command(main)
