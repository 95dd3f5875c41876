"""Index your own recordings, and search them by text or by an example recording. A hit is a part of a file.

    supclap search index field_recordings --model outputs/synthetic --index field_recordings.index
    supclap search query field_recordings.index "pluja sobre una teulada" --language cat -k 5
    supclap search query field_recordings.index --audio tape.wav --start 12 --end 15
    supclap search query field_recordings.index --texts words.txt --threshold 0.3 --format raven --output hits.txt
    supclap search score field_recordings.index --table selections.txt
    supclap search serve field_recordings.index

`index` reads only new and changed files, so it can be run again at any time, for example after an interruption. `serve`
starts a page with a search box and an audio player for each hit. `score` prints precision, recall and average precision
for each label of a table of events. A query by text takes a third of the time with an exported model in the index:
supclap export MODEL --out INDEX/onnx. The commands require the extra `search`. To index on several GPUs, run
`accelerate launch --multi_gpu recipes/search_audio.py index ...`. Each process embeds a part of the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap import require_torchaudio
from modeling_supclap.recipes.command import join_processes, run_command

if TYPE_CHECKING:
    from modeling_supclap.search import Answer, Searcher


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compute = argparse.ArgumentParser(add_help=False)
    compute.add_argument("--device", help="cpu, cuda, ... (default: a GPU if available)")
    compute.add_argument("--trust_remote_code", action="store_true", help="run code from the model's repository")
    of_index = argparse.ArgumentParser(add_help=False, parents=[compute])
    of_index.add_argument("index", help="folder of the index")
    of_index.add_argument("--model", help="the model, if it is module:function (default: the one in the index)")

    index = commands.add_parser("index", parents=[compute], help="build or update the index of a folder of recordings")
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
    index.add_argument("--quiet", action="store_true", help="hide the progress bar")

    query = commands.add_parser("query", parents=[of_index], help="search an index by text or by example")
    by = query.add_mutually_exclusive_group(required=True)
    by.add_argument("text", nargs="?", help="text query")
    by.add_argument("--texts", help="file with one text query per line")
    by.add_argument("--audio", help="recording to search by, instead of text")
    query.add_argument("--start", type=float, default=0.0, help="start of the example in --audio in seconds")
    query.add_argument("--end", type=float, help="end of the example in --audio in seconds (default: the end)")
    query.add_argument("--language", default="eng", help="ISO 639-3 code of the query's language (default: eng)")
    query.add_argument("-k", type=int, help="maximum number of hits per query (default: 10, or all with --threshold)")
    query.add_argument("--threshold", type=float, help="minimum score of a hit")
    query.add_argument("--within", help="search only this file or folder, relative to the indexed folder")
    query.add_argument("--exact", action="store_true", help="score every window even in a large index")
    query.add_argument("--all_windows", action="store_true", help="keep windows that overlap a better hit")
    query.add_argument(
        "--format",
        default="text",
        choices=("text", "csv", "raven", "audacity", "json"),
        help="format of the hits (default: text)",
    )
    query.add_argument("--json", action="store_const", const="json", dest="format", help="same as --format json")
    query.add_argument("--output", help="file to write (audacity: or a folder, with one file per recording)")

    score = commands.add_parser("score", parents=[of_index], help="score detections against tables of labelled events")
    score.add_argument("--table", required=True, nargs="+", help="tables of all events (Raven, Audacity, CSV, ...)")
    score.add_argument("--language", default="eng", help="ISO 639-3 code of the labels' language (default: eng)")

    serve = commands.add_parser("serve", parents=[of_index], help="serve a search page with audio players")
    serve.add_argument("--recordings", help="folder of the recordings (default: the folder that was indexed)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows other machines")
    serve.add_argument("--port", type=int, default=7860, help="port of the page (default: 7860)")
    serve.add_argument("--share", action="store_true", help="create a public Gradio link")
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
    from modeling_supclap.datasets_scripts.atomic_files import write_text
    from modeling_supclap.search import Searcher

    if arguments.audio is None and (arguments.start or arguments.end is not None):
        raise ValueError("--start and --end are the part of a recording; pass it as --audio")
    model = arguments.model
    exported = Path(arguments.index, "onnx")
    if (model, arguments.device, arguments.audio) == (None, None, None) and (exported / "onnx.json").is_file():
        from modeling_supclap.integrations.serve import Exported

        model = Exported(exported)
    else:
        require_torchaudio()
    searcher = Searcher(arguments.index, model, arguments.device, arguments.trust_remote_code)
    answers = find_answers(searcher, arguments)
    text = format_answers(answers, searcher, arguments)
    if text and arguments.output:
        write_text(arguments.output, text)
    elif text:
        print(text, end="")
    if arguments.output:
        print(f"{sum(len(answer.hits) for answer in answers)} hits of {len(answers)} queries in {arguments.output}")


def run_score(arguments: argparse.Namespace) -> None:
    from modeling_supclap.evaluation.tables import Table
    from modeling_supclap.search import Searcher
    from modeling_supclap.search.detections import DetectionScore, read_selections, score_detections

    searcher = Searcher(arguments.index, arguments.model, arguments.device, arguments.trust_remote_code)
    selections = []
    for table in arguments.table:
        selections += read_selections(table, searcher.index)
    lines = [list(DetectionScore._fields)]
    for score in score_detections(searcher, selections, arguments.language):
        lines.append([*map(str, score[:4]), *map("{:.3f}".format, score[4:])])
    print(Table(lines).to_text())
    print("Thresholds are chosen on other recordings; nan: matched events in fewer than two recordings.")


def find_answers(searcher: Searcher, arguments: argparse.Namespace) -> list[Answer]:
    """Run the queries of the command line."""
    from modeling_supclap.search import Answer

    options: dict[str, Any] = {"k": arguments.k, "within": arguments.within, "exact": arguments.exact}
    options["merge_overlaps"] = not arguments.all_windows
    if arguments.threshold is not None:
        options["threshold"] = arguments.threshold
    elif arguments.k is None:
        options["k"] = 10

    if arguments.audio is not None:
        vector = searcher.embed_audio(arguments.audio, arguments.start, arguments.end)
        return [Answer(arguments.audio, searcher.search(vector=vector, **options))]
    texts = [arguments.text]
    if arguments.texts is not None:
        from modeling_supclap.datasets_scripts.builders.text_encodings import decode_text

        lines = decode_text(Path(arguments.texts).read_bytes(), arguments.texts, [arguments.language]).splitlines()
        texts = list(filter(None, dict.fromkeys(map(str.strip, lines))))
        if not texts:
            raise ValueError(f"{arguments.texts} contains no text; write one query per line")
    return searcher.search_texts(texts, arguments.language, **options)


def format_answers(answers: Sequence[Answer], searcher: Searcher, arguments: argparse.Namespace) -> str:
    """Format answers in the chosen format. Labels of several recordings are written to a folder instead."""
    from modeling_supclap.datasets_scripts.csv_text import to_csv
    from modeling_supclap.search.tables import COLUMNS, to_audacity, to_raven, to_rows, write_labels

    rows, output = to_rows(answers), arguments.output
    match arguments.format:
        case "csv":
            return to_csv(rows, COLUMNS)
        case "raven":
            return to_raven(rows, searcher.index.about["folder"], searcher.model.sampling_rate_hz / 2)
        case "json":
            found = []
            for answer in answers:
                query = {"query": None if arguments.audio else answer.query, "language": arguments.language}
                hits = [hit._asdict() for hit in answer.hits]
                found.append({**query, "audio": arguments.audio, "stands_out": answer.stands_out, "hits": hits})
            return json.dumps(found if arguments.texts else found[0], ensure_ascii=False, indent=2) + "\n"
        case "audacity":
            labels = to_audacity(rows)
            if output and (Path(output).is_dir() or not Path(output).suffix):
                write_labels(labels, output)
                return ""
            if len(labels) > 1:
                raise ValueError(
                    f"the hits are in {len(labels)} recordings, which Audacity's labels do not name; pass a folder as "
                    "--output, or one recording as --within"
                )
            return "".join(labels.values())
        case _:
            return "\n".join(format_text(answer, len(answers) > 1) for answer in answers)


def format_text(answer: Answer, has_title: bool) -> str:
    """Format hits as text. Each line contains score, start and end (MM:SS), and file.

    >>> from modeling_supclap.search import Answer, Hit
    >>> print(format_text(Answer("birds", [Hit("dawn/birds.flac", 62.5, 67.5, 0.41)], True), False), end="")
    0.410  01:02.5-01:07.5  dawn/birds.flac
    >>> print(format_text(Answer("birds", [], None), True), end="")
    birds:
    no hits
    """
    from modeling_supclap.search.query import NOTHING
    from modeling_supclap.search.tables import clock

    lines = [f"{answer.query}:"] if has_title else []
    for hit in answer.hits:
        times = f"{clock(hit.start_seconds)}-{clock(hit.end_seconds)}"
        lines.append(f"{hit.score:.3f}  {times}  {hit.file}")
    if not answer.hits:
        lines.append("no hits")
    elif answer.stands_out is False:
        lines.append(NOTHING)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run one of the commands `index`, `query`, `score` and `serve`."""
    arguments = make_parser().parse_args()
    if arguments.command == "query":
        run_query(arguments)
        return
    require_torchaudio()
    if arguments.command == "index":
        run_index(arguments)
    elif arguments.command == "score":
        run_score(arguments)
    else:
        from modeling_supclap.search.app import serve

        options = dict(vars(arguments))
        del options["command"]
        serve(**options)


if __name__ == "__main__":
    run_command(main)
