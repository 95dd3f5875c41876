"""Gradio search page with a search box, an audio player for each hit, and a plot of the scores along each recording.

The page can be deployed as a Hugging Face Space: `launch_page(Searcher("index"), "recordings")`.
"""

from __future__ import annotations

import html
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader

from modeling_supclap.languages import LANGUAGE_TABLE

from .playback import playable_file
from .query import NOTHING, Hit, Searcher

STYLE = """
.hit { border-bottom: 1px solid #8884; padding: 0.8em 0; }
.hit .file { font-weight: 600; overflow-wrap: anywhere; }
.time { opacity: 0.75; }
.hit audio { width: 100%; margin: 0.4em 0; }
.hit svg { width: 100%; height: 2em; display: block; cursor: pointer; }
.hit audio { color-scheme: light; }
.dark .hit audio { color-scheme: dark; }
"""


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


def launch_page(searcher: Searcher, recordings: str | Path, **options: Any) -> Any:
    """Launch the search page with options of Gradio's `launch`, and return it. It serves only indexed recordings."""
    page, root = make_page(searcher, recordings), Path(recordings).resolve()
    import gradio

    # no fonts to download
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    app, _, _ = page.launch(css=STYLE, theme=theme, quiet=True, prevent_thread_lock=True, **options)
    copies = tempfile.TemporaryDirectory(prefix="supclap-playback-")
    app.state.playback = copies  # removed with the page
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import FileResponse, PlainTextResponse  # installed with Gradio
    from starlette.routing import Route

    missing = PlainTextResponse("no such recording", status_code=404)

    def send(request: Any) -> Any:
        name = request.path_params["name"]
        if ".." in Path(name).parts or not searcher.index.holds(name):
            return missing

        async def respond(*connection: Any) -> None:
            try:
                path = await run_in_threadpool(playable_file, root / name, Path(copies.name))
                await FileResponse(path)(*connection)
            except (OSError, RuntimeError):  # the file was removed, perhaps during this request
                await missing(*connection)

        return respond

    # Insert before Gradio's routes, because one of them matches every path.
    app.router.routes.insert(0, Route("/recordings/{name:path}", send))
    return page


def find_recordings(searcher: Searcher, recordings: str | Path | None = None) -> Path:
    """Return the absolute path of the recordings folder, by default the indexed folder. Raise if it does not exist."""
    root = Path(recordings or searcher.index.about["folder"]).resolve()
    if not root.is_dir():
        raise FileNotFoundError(f"the folder of recordings {root} does not exist; pass their folder with --recordings")
    return root


def make_page(searcher: Searcher, recordings: str | Path) -> Any:
    """Build the search page as `gradio.Blocks`, without launching it."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read at import
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the page needs Gradio: pip install 'supclap[search]'") from error
    root = Path(recordings).resolve()
    languages = [(language.name, code) for code, language in LANGUAGE_TABLE.items()]

    def answer(text: str, language: str, sound: str | None, number: float) -> str:
        """Run a search and return the hits, or the error message, as HTML."""
        try:
            if text.strip():  # on the page, a new text clears the example, and a new example the text
                vector, kind = searcher.embed(text, language), "text"
            elif sound:
                vector, kind = searcher.embed_audio(Path(sound).read_bytes()), "example"
            else:
                return "<p>Enter a query or upload a sound.</p>"
            hits = searcher.search(vector=vector, k=int(number))
            note = f'<p class="time">Hits by {kind}.</p>'
            if hits and kind == "text" and not searcher.stands_out(hits):
                note += f"<p>{NOTHING}</p>"
            return note + render_hits(searcher, hits, vector, root)
        except (ValueError, OSError) as error:
            message = str(error)
            for folder in (searcher.index.folder, str(root)):
                message = message.replace(folder, Path(folder).name)
            return f"<p>{html.escape(message)}</p>"

    with gradio.Blocks(title="Search recordings", analytics_enabled=False) as page:
        gradio.HTML(lambda: render_heading(searcher, root))
        with gradio.Row():
            text = gradio.Textbox(
                label="Sound to search for", placeholder="rain on a tin roof", scale=4, min_width=280
            )
            language = gradio.Dropdown(languages, value="eng", label="Language", scale=1)
        button = gradio.Button("Search", variant="primary")
        with gradio.Accordion("By example, number of hits", open=False):
            sound = gradio.Audio(type="filepath", label="Recording of a similar sound")
            number = gradio.Slider(1, 50, value=5, step=1, label="Number of hits")
        results = gradio.HTML()

        inputs = [text, language, sound, number]
        button.click(answer, inputs, results, api_name="search")
        text.submit(answer, inputs, results, api_name=False)  # type: ignore[arg-type]
        text.input(lambda: None, None, sound, api_name=False)  # type: ignore[arg-type]
        sound.input(lambda: "", None, text, api_name=False)  # type: ignore[arg-type]
    return page


def render_heading(searcher: Searcher, root: Path) -> str:
    """Render the title, the number of searchable files, and a list of the files that cannot be searched, as HTML."""
    files = searcher.index.known_files()
    problems = {name: str(row["problem"]) for name, row in files.items() if row["problem"]}
    lines = ["<h1>Search recordings</h1>", f"<p>{len(files) - len(problems)} files, by text or by example</p>"]
    if problems:
        lines.append(f"<details><summary>{len(problems)} more files cannot be searched</summary><ul>")
        for name, problem in sorted(problems.items()):
            reason = problem.replace(str(root / name), name).replace(str(root), root.name)
            lines.append(f"<li>{html.escape(name)}: {html.escape(reason)}</li>")
        lines.append("</ul></details>")
    return "\n".join(lines)


def render_hits(
    searcher: Searcher, hits: Sequence[Hit], vector: np.ndarray, recordings: str | Path | None = None
) -> str:
    """Render the hits of a query embedding (d,) as HTML, with a plot of the scores along each recording.

    `recordings` is the folder of the recordings, by default the indexed folder. A recording that is not there has no
    player. Scores below `Searcher.background` have a pale color, because texts that describe no sound reach such
    scores, too.
    """
    if not hits:
        return "<p>No indexed recording to search.</p>"

    # All plots share one color scale, because the scores within a short recording are almost equal.
    scored = {}
    for file in {hit.file for hit in hits}:
        starts, scores = searcher.strip(vector, file)
        if len(starts):  # otherwise the file was removed after the search
            scored[file] = starts, scores
    hits = [hit for hit in hits if hit.file in scored]
    if not hits:
        return "<p>The recordings were removed; search again.</p>"
    all_scores = np.concatenate([scores for _, scores in scored.values()])
    lowest = all_scores.min()
    span = max(all_scores.max() - lowest, 2 * (searcher.background() - lowest))

    strips: dict[str, dict[str, Any]] = {}
    for hit in hits:
        if hit.file in strips:
            continue
        onsets, scores = scored[hit.file]
        length = max(onsets[-1] + hit.end_seconds - hit.start_seconds, 1e-3)
        shades = 0.06 + 0.94 * ((scores - lowest) / span if span else np.ones_like(scores)) ** 2
        windows = np.stack([onsets, [*onsets[1:], length], scores, shades], axis=1).tolist()
        address = f"recordings/{quote(hit.file)}"
        strips[hit.file] = {"number": len(strips), "length": length, "windows": windows, "address": address}

    lost, folder = set(), str(recordings or searcher.index.about["folder"])
    for name in strips:
        if not _is_there(name, folder):
            lost.add(name)
    environment = Environment(loader=PackageLoader("modeling_supclap.search", "."), autoescape=True, trim_blocks=True)
    return environment.get_template("hits.html.j2").render(hits=hits, strips=strips, lost=lost, clock=clock)


def _is_there(name: str, folder: str) -> bool:
    """Return whether a recording exists. Recordings of a remote folder are not looked up."""
    return "://" in folder or Path(folder, name).is_file()


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds.

    >>> clock(62.5), clock(3600)
    ('01:02.5', '60:00.0')
    """
    minutes, rest = divmod(round(float(seconds), 1), 60)
    return f"{int(minutes):02d}:{rest:04.1f}"
