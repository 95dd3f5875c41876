"""The page: a search box, the places that answer, players that start there, and a strip of where else it matches.

It is a Gradio app, so the same folder deploys as a Space: `make_page(Searcher("index"), "recordings").launch()`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader

from modeling_supclap.languages import LANGUAGE_TABLE

from .query import Hit, Searcher

STYLE = """
.hit { border-bottom: 1px solid #8884; padding: 0.8em 0; }
.hit .file { font-weight: 600; overflow-wrap: anywhere; }
.place { opacity: 0.75; }
.hit audio { width: 100%; margin: 0.4em 0; }
.hit svg { width: 100%; height: 2em; display: block; cursor: pointer; }
"""


def serve(
    index: str | Path,
    recordings: str | Path | None = None,
    port: int = 7860,
    share: bool = False,
    device: str | None = None,
) -> None:
    """Opens the page and stays.

    Args:
        index: The folder of the index.
        recordings: Where the recordings are; None, where they were when they were indexed.
        port: The port of this machine that the page is on.
        share: Whether Gradio also makes it public.
        device: Where the model runs.

    Raises:
        FileNotFoundError: There is no index, or no folder of recordings.
        ImportError: Gradio is not installed.
    """
    searcher = Searcher(index, device=device)
    root = find_recordings(searcher, recordings)
    page = make_page(searcher, root)
    options = {"server_port": port, "share": share, "allowed_paths": [str(root)], "css": STYLE}
    _, address, public = page.launch(**options, quiet=True, prevent_thread_lock=True)
    print(f"the page is at {public or address}; Ctrl-C ends it", flush=True)
    page.block_thread()


def find_recordings(searcher: Searcher, recordings: str | Path | None = None) -> Path:
    """The folder of the recordings, as a full path.

    Raises:
        FileNotFoundError: It is not there.
    """
    root = Path(recordings or searcher.index.about["folder"]).resolve()
    if not root.is_dir():
        raise FileNotFoundError(f"the recordings were indexed in {root}, which is not there; name their folder now")
    return root


def make_page(searcher: Searcher, recordings: str | Path) -> Any:
    """The page as a Gradio app.

    Args:
        searcher: What answers.
        recordings: The folder that was indexed. Pass it to `launch(allowed_paths=[...])`, or nothing can be played.

    Returns:
        A `gradio.Blocks`; `launch` it with `css=STYLE`.
    """
    gradio = _import_gradio()
    root = Path(recordings).resolve()
    languages = [(language.name, code) for code, language in LANGUAGE_TABLE.items()]

    def answer(text: str, language: str, sound: str | None, number: float) -> str:
        """The results as HTML; what is wrong with a query is said on the page."""
        try:
            if sound:
                vector = searcher.embed_audio(sound)
            elif text.strip():
                vector = searcher.embed(text, language)
            else:
                return "<p>Type what you want to hear, or upload a sound.</p>"
        except (ValueError, OSError) as error:
            return f"<p>{html.escape(str(error))}</p>"
        return render_hits(searcher, searcher.search(vector=vector, k=int(number)), vector, root)

    with gradio.Blocks(title="Search recordings") as page:
        gradio.Markdown(f"# Search recordings\n{len(searcher.index.known_files())} files, by words or by a sound")
        with gradio.Row():
            text = gradio.Textbox(
                label="What do you want to hear?", placeholder="rain on a tin roof", scale=4, min_width=280
            )
            language = gradio.Dropdown(languages, value="eng", label="Language", scale=1)
        with gradio.Accordion("Search by a sound", open=False):
            sound = gradio.Audio(type="filepath", label="A recording that sounds alike")
        number = gradio.Slider(1, 50, value=5, step=1, label="Places")
        button = gradio.Button("Search", variant="primary")
        results = gradio.HTML()

        asked = [text, language, sound, number]
        button.click(answer, asked, results, api_name="search")
        text.submit(answer, asked, results, api_name=False)
    return page


def render_hits(searcher: Searcher, hits: Sequence[Hit], vector: np.ndarray, root: Path) -> str:
    """The hits as HTML.

    Args:
        searcher: Gives the scores along each recording.
        hits: The places, best first.
        vector: The query's embedding, (d,).
        root: The folder of the recordings, a full path.
    """
    if not hits:
        return "<p>Nothing is indexed.</p>"

    # One scale for all strips: that of a short recording, whose windows are nearly the same, would tell nothing.
    strips = [searcher.strip(vector, hit.file) for hit in hits]
    every = np.concatenate([scores for _, scores in strips])
    lowest, span = every.min(), np.ptp(every)

    places = []
    for hit, (onsets, scores) in zip(hits, strips, strict=True):
        length = max(onsets[-1] + hit.end_seconds - hit.start_seconds, 1e-3)
        shades = 0.06 + 0.94 * ((scores - lowest) / span if span else np.ones_like(scores)) ** 2
        windows = np.stack([onsets, [*onsets[1:], length], scores, shades], axis=1).tolist()
        address = f"/gradio_api/file={quote(str(root / hit.file))}#t={hit.start_seconds:g}"
        places.append({"hit": hit, "length": length, "windows": windows, "address": address})

    environment = Environment(loader=PackageLoader("modeling_supclap.search", "."), autoescape=True, trim_blocks=True)
    return environment.get_template("hits.html.j2").render(places=places, clock=clock)


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds.

    >>> clock(62.5), clock(3600)
    ('01:02.5', '60:00.0')
    """
    minutes, rest = divmod(round(float(seconds), 1), 60)
    return f"{int(minutes):02d}:{rest:04.1f}"


def _import_gradio() -> Any:
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the page needs Gradio: pip install 'supclap[search]'") from error
    return gradio
