"""Gradio search page with a search box, an audio player for each hit, and a plot of the scores along each recording.

The page can be deployed as a Hugging Face Space: `launch_page(Searcher("index"), "recordings")`.
"""

from __future__ import annotations

import html
import math
import os
import socket
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from jinja2 import Environment

from modeling_supclap.datasets_scripts.csv_text import to_csv
from modeling_supclap.languages import LANGUAGE_TABLE

from .playback import FOLDER, KEPT_SECONDS, draw_waveform, playable_file, prune
from .query import NOTHING, Answer, Hit, Searcher
from .store import find_inside
from .tables import COLUMNS, clock, to_raven, to_rows

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read at import
try:
    import gradio
    from starlette.datastructures import Headers  # installed with Gradio
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError("the page needs Gradio: pip install 'supclap[search]'") from error

MAX_UPLOAD = "100mb"
LONGEST_EXAMPLE_SECONDS = 600.0
_HERE = Path(__file__).parent


def serve(
    index: str | Path,
    recordings: str | Path | None = None,
    port: int = 7860,
    share: bool = False,
    device: str | None = None,
    host: str = "127.0.0.1",
    model: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Load an index and its model, and serve the search page until interrupted.

    Args:
        recordings: Folder of the recordings. None: use the indexed folder.
        share: Whether to create a public Gradio link.
        host: Address to listen on; "0.0.0.0" accepts connections from other machines.
        model: Folder or Hub id of the model, or `module:function` (a function that returns the model). None: use the
            folder or id in the index.
        trust_remote_code: Whether a model in the format of sentence-transformers may run code from its repository.

    Raises:
        FileNotFoundError: The index or the folder of recordings does not exist.
        OSError: The address is not available or the port is in use.
    """
    try:
        socket.create_server((host, port)).close()  # fail before loading the model
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port") from error

    searcher = Searcher(index, model, device, trust_remote_code)
    page = launch_page(
        searcher, find_recordings(searcher, recordings), server_name=host, server_port=port, share=share
    )
    print(f"serving the page at {page.share_url or page.local_url}; press Ctrl-C to stop", flush=True)
    page.block_thread()


def refuse_other_sites(app: Any) -> Any:
    """Wrap an ASGI application so that it answers its own page, and programs, but no other web site.

    Gradio compares origins only on localhost. Behind a proxy, the proxy has to keep the header "Host", or to set
    "X-Forwarded-Host".
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(raw=list(scope.get("headers", ())))
        origin = headers.get("origin")
        if origin is None or urlsplit(origin).netloc in (headers.get("host"), headers.get("x-forwarded-host")):
            await app(scope, receive, send)
        else:
            await PlainTextResponse("requests of other web sites are refused", 403)(scope, receive, send)

    return answer


def launch_page(searcher: Searcher, recordings: str | Path, **options: Any) -> Any:
    """Launch the search page with options of Gradio's `launch`, and return it. It serves only indexed recordings."""
    prune(FOLDER)
    os.environ.setdefault("GRADIO_TEMP_DIR", str(FOLDER / "uploads"))
    page, root = make_page(searcher, recordings), Path(recordings).resolve()
    window_seconds = float(searcher.index.about["window_seconds"])

    # no fonts to download
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    options = {
        "max_file_size": MAX_UPLOAD,
        "css": (_HERE / "page.css").read_text(encoding="utf-8"),
        "theme": theme,
        **options,
    }
    app, _, _ = page.launch(quiet=True, prevent_thread_lock=True, **options)
    copies = TemporaryDirectory(dir=FOLDER)
    app.state.copies = copies  # removed with the page

    def send(request: Request) -> Response:
        try:
            path = find_recording(searcher, root, request.path_params["name"])
            start = request.query_params.get("waveform")
            if start is not None:
                drawing = draw_waveform(path, searcher.model.sampling_rate_hz, float(start), window_seconds)
                return Response(drawing, media_type="image/svg+xml")
            path = playable_file(path, Path(copies.name))
            # other web sites cannot embed it, either
            return FileResponse(path, 200, {"Cross-Origin-Resource-Policy": "same-origin"}, stat_result=path.stat())
        except (OSError, ValueError, OverflowError, RuntimeError):  # the file was removed, perhaps during this request
            return PlainTextResponse("no such recording", 404)

    # Insert before Gradio's routes, because one of them matches every path.
    app.router.routes.insert(0, Route("/recordings/{name:path}", send))
    app.middleware_stack = refuse_other_sites(app.build_middleware_stack())
    return page


def find_recordings(searcher: Searcher, recordings: str | Path | None = None) -> Path:
    """Return the absolute path of the recordings folder, by default the indexed folder. Raise if it does not exist."""
    root = Path(recordings or searcher.index.about["folder"]).resolve()
    if not root.is_dir():
        raise FileNotFoundError(f"the folder of recordings {root} does not exist; pass their folder with --recordings")
    return root


def find_recording(searcher: Searcher, root: Path, name: str) -> Path:
    """Return the path of an indexed recording. Raise FileNotFoundError for any other file."""
    if not searcher.index.holds(name):
        raise FileNotFoundError(f"{name} is not an indexed recording; search again")
    return find_inside(root, name)


async def keep_upload(path: str | None) -> str | None:
    """Use an uploaded file where it is. Gradio would download an address, and any request can name one."""
    if path is not None and "://" in path:
        raise gradio.Error("upload the recording; addresses are not opened")
    return path


def _show_errors(method: Callable[..., str]) -> Callable[..., str]:
    """Return error messages of a method as HTML, without the folders of this machine."""

    @wraps(method)
    def run(self: Answers, *inputs: Any) -> str:
        try:
            return method(self, *inputs)
        except (ValueError, OSError) as error:
            message = str(error)
            for folder in (self.searcher.index.folder, str(self.root)):
                message = message.replace(folder, Path(folder).name)
            return f"<p>{html.escape(message)}</p>"

    return run


class Answers:
    """Answers of the page to requests, as HTML."""

    def __init__(self, searcher: Searcher, root: Path) -> None:
        self.searcher, self.root = searcher, root

    @_show_errors
    def find(self, text: str, language: str, sound: str | None, *options: Any) -> str:
        """Search by text, or else by an uploaded sound."""
        if text.strip():  # on the page, a new text clears the example, and a new example the text
            return self._show(self.searcher.embed(text, language), "text", text, *options)
        if sound is None:
            return "<p>Enter a query or upload a sound.</p>"
        vector = self.searcher.embed_audio(Path(sound).read_bytes(), end_seconds=LONGEST_EXAMPLE_SECONDS)
        return self._show(vector, "example", "example", *options)

    @_show_errors
    def find_similar(self, event: gradio.EventData, *options: Any) -> str:
        """Search by the sound of a hit."""
        path = find_recording(self.searcher, self.root, event.file)
        end = min(event.end, event.start + LONGEST_EXAMPLE_SECONDS)
        query = f"{event.file} {clock(event.start)}"
        vector = self.searcher.embed_audio(path, event.start, end)
        return self._show(vector, f"similarity to {query}", query, *options)

    def find_in_all(self, text: str, language: str, sound: str | None, number: float) -> str:
        """Search all recordings, by text or by an uploaded sound."""
        return self.find(text, language, sound, number, "", None, None)

    def _show(
        self,
        vector: np.ndarray,
        kind: str,
        query: str,
        number: float,
        folder: str,
        least: float | None,
        most: float | None,
    ) -> str:
        lengths = (least or 0.0, most or math.inf)
        hits = self.searcher.search(vector=vector, k=int(number), within=folder, lengths=lengths)
        note = f'<p class="time">Hits by {html.escape(kind)}.</p>'
        if hits and kind == "text" and not self.searcher.stands_out(hits, folder):
            note += f"<p>{NOTHING}</p>"
        return note + render_hits(self.searcher, hits, vector, self.root, query)


def make_page(searcher: Searcher, recordings: str | Path) -> Any:
    """Build the search page as `gradio.Blocks`, without launching it."""
    root = Path(recordings).resolve()
    answers = Answers(searcher, root)
    folders = sorted({os.path.dirname(name) for name in searcher.index.names} - {""})
    with gradio.Blocks(title="Search recordings", analytics_enabled=False, delete_cache=(60, KEPT_SECONDS)) as page:
        gradio.HTML(lambda: render_heading(searcher, root))
        with gradio.Row():
            text = gradio.Textbox(
                label="Sound to search for",
                placeholder="rain on a tin roof",
                submit_btn="Search",
                scale=4,
                min_width=260,
            )
            languages = [(language.name, code) for code, language in LANGUAGE_TABLE.items()]
            language = gradio.Dropdown(languages, value="eng", label="Language", min_width=120)
        with gradio.Accordion("Example, filters, number of hits", open=False):
            sound = gradio.Audio(type="filepath", label="Recording of a similar sound (its first 10 minutes are used)")
            sound.async_move_resource_to_block_cache = keep_upload  # type: ignore[method-assign,assignment]
            with gradio.Row():
                folder = gradio.Dropdown(["", *folders], value="", label="Folder", allow_custom_value=True)
                shortest = gradio.Number(label="Recordings of at least (seconds)", minimum=0)
                longest = gradio.Number(label="Recordings of at most (seconds)", minimum=0)
            number = gradio.Slider(1, 50, value=5, step=1, label="Number of hits")
            button = gradio.Button("Search")
        results = gradio.HTML(js_on_load=(_HERE / "page.js").read_text(encoding="utf-8"))

        options = [number, folder, shortest, longest]
        gradio.Button(visible=False).click(
            answers.find_in_all, [text, language, sound, number], results, api_name="search"
        )
        events: dict[str, Any] = {"outputs": results, "api_visibility": "private"}
        gradio.on([button.click, text.submit], answers.find, [text, language, sound, *options], **events)
        results.similar(answers.find_similar, options, **events)
        text.input(lambda: None, None, sound, api_visibility="private")
        sound.input(lambda: "", None, text, api_visibility="private")
    return page


def render_heading(searcher: Searcher, root: Path) -> str:
    """Render the folder, the model, the number of searchable files, and a list of the other files, as HTML."""
    problems = searcher.index.unreadable_files()
    count, model = searcher.index.files.count_rows() - len(problems), searcher.index.about["model"]
    model = Path(model).name if Path(model).is_absolute() else model
    about = f"{count} files in {root.name}, searched by {model}"
    lines = ["<h1>Search recordings</h1>", f"<p>{html.escape(about)}</p>"]
    if problems:
        lines.append(f"<details><summary>{len(problems)} more cannot be searched</summary><ul>")
        for name, problem in sorted(problems.items()):
            lines.append(f"<li>{html.escape(f'{name}: {problem}')}</li>")
        lines.append("</ul></details>")
    return "\n".join(lines)


def render_hits(
    searcher: Searcher, hits: Sequence[Hit], vector: np.ndarray, recordings: str | Path | None = None, query: str = ""
) -> str:
    """Render the hits of a query embedding (d,) as HTML, with a plot of the scores along each recording.

    `recordings` is the folder of the recordings, by default the indexed folder. A recording that is not there has no
    player. Scores below `Searcher.background` have a pale color, because texts that describe no sound reach such
    scores, too. `query` is the name of the query in the tables to download.
    """
    if not hits:
        return "<p>No indexed recording to search.</p>"
    strips: dict[str, dict[str, Any]] = {}
    all_scores: list[float] = []
    root = Path(recordings or searcher.index.about["folder"]).resolve()
    for hit in hits:
        if hit.file in strips:
            continue
        onsets, scores = searcher.strip(vector, hit.file)
        if not len(onsets):  # removed after the search
            continue
        length = onsets[-1] + hit.end_seconds - hit.start_seconds
        strip = {"number": len(strips), "length": length, "address": f"recordings/{quote(hit.file)}"}
        strip["windows"] = list(zip(onsets, [*onsets[1:], length], scores, strict=True))
        try:
            strip["is_there"] = find_inside(root, hit.file).is_file()
        except FileNotFoundError:
            strip["is_there"] = False
        strips[hit.file] = strip
        all_scores.extend(scores)
    if not strips:
        return "<p>The recordings were removed; search again.</p>"

    # All plots share one color scale, because the scores within a short recording are almost equal.
    hits = [hit for hit in hits if hit.file in strips]
    lowest = min(all_scores)
    span = max(max(all_scores) - lowest, 2 * (searcher.background() - lowest))
    rows = to_rows([Answer(query, list(hits))])
    tables = {"hits.csv": to_csv(rows, COLUMNS), "hits.txt": to_raven(rows, "", searcher.model.sampling_rate_hz / 2)}
    source = (_HERE / "hits.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(source)
    return template.render(hits=hits, strips=strips, lowest=lowest, span=span, clock=clock, tables=tables)
