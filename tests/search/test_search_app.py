"""The search page (in Chromium if it is installed): enter a query, show hits, and play from the correct second."""

import csv
import html
import http.client
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pytest
import soundfile
from fake_models import RATE, PitchModel, build, tone
from huggingface_hub.constants import HF_HOME

from modeling_supclap.audio_input import Recording
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.languages import LANGUAGE_TABLE

pytest.importorskip("lancedb", reason="the extra search is not installed")
pytest.importorskip("gradio", reason="the extra search is not installed")

from modeling_supclap.search import Searcher, SoundIndex, build_index
from modeling_supclap.search import app as app_module
from modeling_supclap.search import playback as playback_module
from modeling_supclap.search.app import find_recordings, launch_page, make_page, render_heading, render_hits, serve
from modeling_supclap.search.playback import draw_waveform, prune
from modeling_supclap.search.query import NOTHING
from modeling_supclap.search.store import _checksums
from modeling_supclap.search.tables import clock


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty seconds of a low tone with a high tone from 20 to 24 s, in a file name with HTML characters."""
    root = tmp_path_factory.mktemp("page") / "sounds"
    root.mkdir()
    wave = tone(250.0, 40.0)
    wave[20 * RATE : 24 * RATE] = tone(3000.0, 4.0)
    soundfile.write(root / "a <b> & 'c'.wav", wave, RATE)
    soundfile.write(root / "other.flac", tone(1000.0, 9.0), RATE)
    build(PitchModel(), root)
    return root


@pytest.fixture(scope="module")
def searcher(folder):
    return Searcher(folder.parent / "index", load_embedding_model(PitchModel()))


def test_hits_have_their_time_and_an_escaped_name(searcher, folder):
    hits = searcher.search("high", k=2)
    shown = render_hits(searcher, hits, searcher.embed("high"))
    assert "a &lt;b&gt; &amp; &#39;c&#39;.wav" in shown
    assert "<b>" not in shown
    assert f'src="recordings/a%20%3Cb%3E%20%26%20%27c%27.wav#t={hits[0].start_seconds:g}"' in shown
    assert shown.count("<audio") == 2
    assert 'viewBox="0 0 40.000 10"' in shown
    assert "No indexed recording" in render_hits(searcher, [], searcher.embed("high"))


def test_the_windows_of_a_strip_lie_side_by_side_up_to_the_end_of_the_recording(searcher):
    hits = searcher.search("middle", k=9, within="other.flac")
    shown = render_hits(searcher, hits, searcher.embed("middle"))
    rectangles = re.findall(r'<rect x="([^"]+)" y="0" width="([^"]+)" height="10" fill="#', shown)
    assert rectangles == [("0.000", "2.500"), ("2.500", "1.500"), ("4.000", "5.000")]
    assert 'viewBox="0 0 9.000 10"' in shown


def test_a_recording_of_one_window_is_drawn(searcher, monkeypatch):
    """Without a span of scores, because the background is not above them."""
    (hit,) = searcher.search("middle", k=1)
    monkeypatch.setattr(Searcher, "strip", lambda *_: (np.array([0.0]), np.array([0.5])))
    monkeypatch.setattr(Searcher, "background", lambda *_: 0.25)
    shown = render_hits(searcher, [hit], searcher.embed("middle"))
    assert re.findall('fill-opacity="([^"]+)"', shown) == ["1.000"]
    assert re.findall(r'<rect x="([^"]+)" y="0" width="([^"]+)" height="10" fill="#', shown) == [("0.000", "5.000")]


def test_the_strips_of_a_page_can_be_compared(searcher, folder):
    vector = searcher.embed("high")
    hits = searcher.search("high", k=5)
    shown = render_hits(searcher, hits, vector)
    windows = re.findall(r'fill-opacity="([^"]+)"><title>[^<]*score ([^<]+)<', shown)
    by_score = sorted((float(score), float(opacity)) for opacity, score in windows)
    opacities = [opacity for _, opacity in by_score]
    assert opacities == sorted(opacities)
    assert (opacities[0], opacities[-1]) == (0.06, 1.0)


def test_strips_of_hits_that_do_not_stand_out_are_pale(searcher, monkeypatch):
    vector, hits = searcher.embed("high"), searcher.search("high", k=5)
    monkeypatch.setattr(Searcher, "background", lambda *_: hits[0].score)
    assert not searcher.stands_out(hits)
    opacities = map(float, re.findall(r'fill-opacity="([^"]+)"', render_hits(searcher, hits, vector)))
    assert max(opacities) == pytest.approx(0.06 + 0.94 * 0.5**2, abs=1e-3)  # in the middle of the scale


@pytest.mark.parametrize(
    ("text", "is_noted"),
    [("high", False), ("quarterly tax report", True), ("", False)],
    ids=["sound", "none", "example"],
)
def test_a_text_that_does_not_stand_out_has_a_note(searcher, folder, tmp_path, text, is_noted):
    soundfile.write(tmp_path / "example.wav", tone(60.0, 5.0), RATE)
    shown = functions(searcher, folder)["find"](text, "eng", str(tmp_path / "example.wav"), 2.0, "", None, None)
    assert (f"<p>{NOTHING}</p>" in shown) == is_noted
    assert shown.count("<audio") == 2
    assert f"Hits by {'text' if text else 'example'}." in shown


def test_a_text_is_embedded_in_the_chosen_language(searcher, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(Searcher, "embed", lambda _, *query: asked.append(query) or np.eye(13)[0])
    functions(searcher, folder)["find_in_all"]("la pluie", "fra", None, 1)
    assert asked == [("la pluie", "fra")]


def test_the_fields_of_the_page(searcher, folder):
    page = make_page(searcher, folder)
    fields = {}
    for component in page.config["components"]:
        props = component["props"]
        fields[component["type"], props.get("label") or props.get("value")] = props

    def of(kind, label, *names):
        return tuple(fields[kind, label].get(name) for name in names)

    assert of("textbox", "Sound to search for", "submit_btn", "scale", "min_width") == ("Search", 4, 260)
    languages = [(language.name, code) for code, language in LANGUAGE_TABLE.items()]
    assert of("dropdown", "Language", "choices", "value", "min_width") == (languages, "eng", 120)
    assert of("accordion", "Example, filters, number of hits", "open") == (False,)
    assert of("dropdown", "Folder", "choices", "value", "allow_custom_value") == ([("", "")], "", True)
    for label in ("at least", "at most"):
        assert of("number", f"Recordings of {label} (seconds)", "value", "minimum") == (None, 0)
    slider = of("slider", "Number of hits", "minimum", "maximum", "value", "step")
    assert slider == (1, 50, 5, 1)
    assert of("button", "Search", "visible") == (True,)
    assert of("button", "Run", "visible") == (False,)  # of the programs that call the page

    names = {number: block.label for number, block in page.blocks.items() if getattr(block, "label", None)}
    functions = {}
    for each in page.config["dependencies"]:
        outputs = [names.get(number) for number in each["outputs"]]
        functions[each["api_name"]] = each["api_visibility"], [names[number] for number in each["inputs"]], outputs
    query = ["Sound to search for", "Language", "Recording of a similar sound (its first 10 minutes are used)"]
    numbers = ["Number of hits", "Folder", "Recordings of at least (seconds)", "Recordings of at most (seconds)"]
    assert functions["search"] == ("public", [*query, numbers[0]], [None])
    assert functions["find"] == ("private", [*query, *numbers], [None])
    assert functions["find_similar"] == ("private", numbers, [None])
    # a new text clears the example, and a new example the text
    assert functions["lambda"] == ("private", [], [query[2]])
    assert functions["lambda_1"] == ("private", [], [query[0]])
    cleared = [each.fn() for each in page.fns.values() if each.api_name in ("lambda", "lambda_1")]
    assert cleared == [None, ""]


def test_the_recordings_may_have_moved(searcher, folder, tmp_path):
    assert find_recordings(searcher) == folder.resolve()
    assert find_recordings(searcher, tmp_path) == tmp_path.resolve()
    with pytest.raises(FileNotFoundError, match="gone"):
        find_recordings(searcher, tmp_path / "gone")


def test_each_recording_has_one_strip_however_many_hits(searcher):
    hits = searcher.search("high", k=50, merge_overlaps=False)
    shown = render_hits(searcher, hits, searcher.embed("high"))
    assert shown.count("<audio") == len(hits) == 15 + 3
    assert shown.count("<title>") == 15 + 3  # the windows of both files, once


def test_hits_that_index_removes_before_they_are_drawn_are_left_out(folder, tmp_path):
    shutil.copytree(folder.parent / "index", tmp_path / "index")
    searcher = Searcher(tmp_path / "index", load_embedding_model(PitchModel()))
    hits, vector = searcher.search("middle", k=9), searcher.embed("middle")
    searcher.index.remove(["other.flac"])
    assert "other.flac" not in render_hits(searcher, hits, vector)
    searcher.index.remove(sorted({hit.file for hit in hits}))
    assert "<audio" not in render_hits(searcher, hits, vector)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Folders of uploads and of copies."""
    monkeypatch.setattr(app_module, "FOLDER", tmp_path / "page")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    return tmp_path


@pytest.fixture
def page(searcher, folder, scratch):
    page = launch_page(searcher, folder, server_port=free_port())
    yield page
    page.close()


def get(page, path, method="GET", body=None, **headers):
    """Return status, headers and content of a request to the page."""
    connection = http.client.HTTPConnection(page.local_url.removeprefix("http://").strip("/"), timeout=60)
    connection.request(method, f"/{path}", body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_indexed_recordings_are_served_and_nothing_else(page, folder):
    (folder / ".env").write_text("TOKEN=1")
    (folder / "new.wav").write_bytes((folder / "other.flac").read_bytes())
    (folder.parent / "outside.flac").write_bytes(b"")
    content = (folder / "other.flac").read_bytes()
    status, headers, body = get(page, "recordings/other.flac")
    assert (status, body) == (200, content)
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    drawing = draw_waveform(folder / "other.flac", RATE, 2.5, 5.0)
    status, headers, body = get(page, "recordings/other.flac?waveform=2.5")
    assert (status, headers["Content-Type"], body.decode()) == (200, "image/svg+xml", drawing)
    status, _, body = get(page, "recordings/other.flac", Range="bytes=2-5")
    assert (status, body) == (206, content[2:6])
    assert get(page, "recordings/a%20%3Cb%3E%20%26%20%27c%27.wav")[0] == 200
    missing = ".env", "new.wav", "../outside.flac", "..%2Foutside.flac", "nothing.wav", "", "%00"
    for name in (*missing, "other.flac?waveform=x", "other.flac?waveform=inf", "other.flac?waveform=100"):
        assert get(page, f"recordings/{name}")[0] == 404
    for path in (folder / ".env", folder / "other.flac"):
        assert get(page, f"gradio_api/file={path}")[0] == 403
    content = get(page, "")[2].decode() + get(page, "config")[2].decode()
    assert str(folder) not in content
    assert "system-ui" in get(page, "theme.css")[2].decode()
    assert "fonts.googleapis" not in content + get(page, "theme.css")[2].decode()  # no fonts to download
    assert ".hit" in page.css
    (folder / "other.flac").rename(folder / "away.flac")
    assert get(page, "recordings/other.flac")[0] == 404
    (folder / "away.flac").rename(folder / "other.flac")
    assert not page.analytics_enabled
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_an_index_from_elsewhere_serves_no_file_outside_the_folder(folder, scratch):
    index, root = scratch / "index", scratch / "sounds"
    shutil.copytree(folder, root)
    build(PitchModel(), root)
    secret = scratch / "private.wav"
    soundfile.write(secret, tone(3000.0, 5.0), RATE)
    (root / "link.wav").symlink_to(secret)
    (root / "loop.wav").symlink_to(root / "loop.wav")
    (root / "inner.wav").symlink_to(root / "other.flac")
    store = SoundIndex(index)
    names = [str(secret), "../private.wav", "link.wav", "loop.wav", "inner.wav"]
    windows, files = store.windows.to_arrow().slice(0, 1).to_pylist()[0], store.files.to_arrow().to_pylist()[0]
    table = pa.Table.from_pylist([{**windows, "file": name} for name in names], schema=store.windows.schema)
    # as its maker would
    valid = pa.array(_checksums(table), pa.uint32())
    store.windows.add(table.set_column(table.column_names.index("checksum"), "checksum", valid))
    store.files.add([{**files, "file": name} for name in names])

    searcher = Searcher(index, load_embedding_model(PitchModel()))
    page = launch_page(searcher, root, server_port=free_port())
    try:
        for name in names[:4]:
            for query in ("", "?waveform=0"):
                assert get(page, f"recordings/{quote(name, safe='/' if name[0] == '.' else '')}{query}")[0] == 404
                assert get(page, f"recordings/{name}{query}")[0] == 404
        assert get(page, "recordings/inner.wav")[0] == 200
    finally:
        page.close()
    hits = [hit for hit in searcher.search("low", k=99) if hit.file in names]
    assert {hit.file for hit in hits} == set(names)
    shown = render_hits(searcher, hits, searcher.embed("low"), root)
    assert shown.count("<audio") == 1
    assert shown.count("link out of the folder") == 4
    similar = next(each.fn for each in make_page(searcher, root).fns.values() if each.fn.__name__ == "find_similar")
    for name in names[:4]:
        answer = similar(SimpleNamespace(file=name, start=0.0, end=5.0), 5, "", None, None)
        assert ("loop.wav" if name == "loop.wav" else "is not in the folder sounds") in answer
        assert "<audio" not in answer


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://192.168.1.5.evil.example"]
)
@pytest.mark.parametrize("path", ["config", "recordings/other.flac", "gradio_api/info"])
def test_other_web_sites_get_no_answer(page, path, origin):
    for host in ("192.168.1.5", page.local_url.removeprefix("http://").strip("/")):
        for method in ("GET", "OPTIONS"):
            status, headers, _ = get(page, path, method, Host=host, Origin=origin, Access_Control_Request_Method="GET")
            assert status == 403
            assert "Access-Control-Allow-Origin" not in headers


def test_the_page_itself_gets_its_answers(page):
    for host, forwarded in (("192.168.1.5", ""), ("localhost:7860", ""), ("127.0.0.1:7860", "sounds.example")):
        origin = f"https://{forwarded or host}"
        assert get(page, "config", Host=host, Origin=origin, X_Forwarded_Host=forwarded)[0] == 200


def upload(page, content):
    """Upload a file; return the status and the answer."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.flac"\r\n\r\n' + content + b"\r\n--x--\r\n"
    )
    status, _, answer = get(page, "gradio_api/upload", "POST", body, Content_Type="multipart/form-data; boundary=x")
    return status, answer


def test_uploads_are_limited_and_deleted(searcher, folder, scratch, monkeypatch):
    monkeypatch.setattr(app_module, "MAX_UPLOAD", "1mb")
    page = launch_page(searcher, folder, server_port=free_port())

    def kept():
        return [path.stat().st_size for path in (scratch / "uploads").rglob("*") if path.is_file()]

    try:
        assert upload(page, bytes(3 * 2**20))[0] == 413
        assert kept() == []
        assert upload(page, bytes(2**19))[0] == 200
        assert kept() == [2**19]
    finally:
        page.close()
    deadline = time.monotonic() + 30
    while kept() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert kept() == []
    assert page.delete_cache == (60, 3600)
    assert app_module.MAX_UPLOAD


def ask(page, path):
    """Search by the example at a path of the server; return the answer, or the error."""
    data = {"data": ["", "eng", {"path": path, "meta": {"_type": "gradio.FileData"}}, 1]}
    _, _, body = get(page, "gradio_api/call/search", "POST", json.dumps(data), Content_Type="application/json")
    return get(page, f"gradio_api/call/search/{json.loads(body)['event_id']}")[2].decode()


def test_a_request_names_no_file_of_the_server_and_no_address(page, folder, monkeypatch):
    opened = []
    for name in ("async_ssrf_protected_download", "ssrf_protected_download"):
        monkeypatch.setattr(f"gradio.processing_utils.{name}", lambda *names, **options: opened.append(names))
    for path in (
        str(folder / "other.flac"),
        "/etc/passwd",
        "http://sounds.example/a.wav",
        "https://sounds.example/a.wav",
    ):
        assert ask(page, path).startswith("event: error")
    assert opened == []
    _, answer = upload(page, (folder / "other.flac").read_bytes())
    assert "Hits by example" in ask(page, json.loads(answer)[0])


def test_only_the_beginning_of_an_example_is_read(searcher, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(app_module, "LONGEST_EXAMPLE_SECONDS", 5.0)
    wave = tone(250.0, 40.0)
    wave[: 5 * RATE] = tone(3000.0, 5.0)
    soundfile.write(tmp_path / "long.wav", wave, RATE)
    read, stops = Recording.read, []

    def record(self, rate_hz, start=0, stop=None, *rest):
        if self.is_file:
            stops.append(stop)
        return read(self, rate_hz, start, stop, *rest)

    monkeypatch.setattr(Recording, "read", record)
    answer = make_page(searcher, folder).fns[0].fn
    shown = answer("", "eng", str(tmp_path / "long.wav"), 1)
    assert stops[0] == 5 * RATE
    assert 'class="file">a &lt;b&gt;' in shown  # the high tone, not the low one
    for end, stop in ((22.0, 22.0), (29.0, 25.0)):
        functions(searcher, folder)["find_similar"](
            SimpleNamespace(file="a <b> & 'c'.wav", start=20.0, end=end), 1, "", None, None
        )
        assert stops[-1] == stop * RATE


def test_files_of_killed_pages_are_deleted_by_the_next_one(searcher, folder, scratch, monkeypatch):
    old, new = scratch / "page" / "uploads" / "x" / "old.wav", scratch / "page" / "uploads" / "y" / "new.wav"
    for path in (old, new):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"a sound")
    for path in (old, old.parent, new.parent):
        os.utime(path, (time.time() - 3700,) * 2)
    monkeypatch.delenv("GRADIO_TEMP_DIR")
    launch_page(searcher, folder, server_port=free_port()).close()
    assert os.environ["GRADIO_TEMP_DIR"] == str(scratch / "page" / "uploads")
    assert not old.exists()
    assert new.exists()
    os.utime(old.parent, (time.time() - 3700,) * 2)
    prune(scratch / "page")
    assert [path.name for path in (scratch / "page" / "uploads").iterdir()] == ["y"]


def test_copies_for_the_browser_are_deleted_with_the_page(tmp_path, scratch):
    root = scratch / "sounds"
    root.mkdir()
    soundfile.write(root / "tape.aiff", tone(250.0, 3.0), RATE)
    build(PitchModel(), root)
    page = launch_page(Searcher(scratch / "index", load_embedding_model(PitchModel())), root, server_port=free_port())
    try:
        assert get(page, "recordings/tape.aiff")[2][:4] == b"RIFF"
        assert len(list((scratch / "page").rglob("*.wav"))) == 1
    finally:
        page.close()
    page.app.state.copies.cleanup()  # as at the end of the process
    assert not list((scratch / "page").rglob("*.wav"))


def test_the_folder_of_a_page_is_private_and_not_shared_with_other_users(tmp_path):
    prune(tmp_path / "a" / "page")
    assert (tmp_path / "a" / "page").stat().st_mode & 0o777 == 0o700
    assert playback_module.FOLDER.is_relative_to(HF_HOME)


def test_neither_hits_nor_errors_show_where_the_files_are(searcher, folder, tmp_path):
    answer = make_page(searcher, folder).fns[0].fn
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    answers = [answer("high", "eng", None, 5), answer("", "eng", str(tmp_path / "bad.wav"), 5)]
    assert "not audio" in answers[1]
    for shown in answers:
        assert str(folder.parent) not in shown
        assert str(tmp_path) not in shown


def test_a_blank_text_leaves_the_example(searcher, folder):
    answer = make_page(searcher, folder).fns[0].fn
    example = str(folder / "other.flac")
    assert answer(" ", "eng", example, 1) == answer("", "eng", example, 1)
    assert "Hits by example" in answer("  \n", "eng", example, 1)
    assert "Enter a query" in answer(" ", "eng", None, 1)


def functions(searcher, folder):
    """Return the functions of the page by name."""
    return {each.fn.__name__: each.fn for each in make_page(searcher, folder).fns.values()}


def test_hits_similar_to_a_hit_are_found(searcher, folder):
    similar = functions(searcher, folder)["find_similar"]
    shown = similar(SimpleNamespace(file="a <b> & 'c'.wav", start=20.0, end=24.0), 1, "", None, None)
    assert "Hits by similarity to a &lt;b&gt; &amp; &#x27;c&#x27;.wav 00:20.0" in shown
    (start,) = re.findall(r'data-start="([^"]+)"', shown)
    assert 17.5 <= float(start) <= 22.5
    (row,) = tables_of(shown)[0]
    assert row["query"] == "a <b> & 'c'.wav 00:20.0"
    assert "other.flac" in similar(SimpleNamespace(file="other.flac", start=0.0, end=5.0), 1, "", None, None)
    answer = similar(SimpleNamespace(file="new.flac", start=0.0, end=5.0), 1, "", None, None)
    assert answer == "<p>new.flac is not an indexed recording; search again</p>"


def test_hits_are_filtered_by_folder_and_length(tmp_path, monkeypatch):
    for name, seconds in (("a.wav", 3.0), ("site/b.wav", 6.0), ("site/day 2/c.wav", 9.0)):
        (tmp_path / "sounds" / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / "sounds" / name, tone(250.0, seconds), RATE)
    build(PitchModel(), tmp_path / "sounds")
    searcher = Searcher(tmp_path / "index", load_embedding_model(PitchModel()))
    page = make_page(searcher, tmp_path / "sounds")
    find = functions(searcher, tmp_path / "sounds")["find"]

    def names(*filters):
        return sorted(set(re.findall(r'data-file="([^"]+)"', find("low", "eng", None, 9, *filters))))

    assert names("", None, None) == ["a.wav", "site/b.wav", "site/day 2/c.wav"]
    assert names("site", None, None) == ["site/b.wav", "site/day 2/c.wav"]
    assert names("site/day 2", None, None) == ["site/day 2/c.wav"]
    assert names("", 4, None) == ["site/b.wav", "site/day 2/c.wav"]
    assert names("site", 0, 7) == ["site/b.wav"]
    assert names("", 20, None) == []
    assert "nowhere" in find("low", "eng", None, 9, "nowhere", None, None)
    monkeypatch.setattr(Searcher, "stands_out", lambda _, hits, within=None: within == "site")  # as there
    for within in ("", "site"):
        assert (NOTHING in find("low", "eng", None, 9, within, None, None)) == (not within)
    (menu,) = [block for block in page.blocks.values() if getattr(block, "label", "") == "Folder"]
    assert [value for _, value in menu.choices] == ["", "site", "site/day 2"]


def tables_of(shown):
    """Return the rows of the two tables to download: of the CSV table, and of the selection table."""
    tables = [unquote(html.unescape(text)) for text in re.findall(r'href="data:[^,]+,([^"]*)"', shown)]
    return list(csv.DictReader(io.StringIO(tables[0]))), list(csv.DictReader(io.StringIO(tables[1]), delimiter="\t"))


def test_the_hits_on_the_page_are_tables_to_download(searcher, folder):
    shown = make_page(searcher, folder).fns[0].fn("high", "eng", None, 4)
    hits = searcher.search("high", k=4)
    rows, selections = tables_of(shown)
    assert [(row["query"], row["file"], float(row["start_seconds"])) for row in rows] == [
        ("high", hit.file, hit.start_seconds) for hit in hits
    ]
    assert len(selections) == 4
    assert {selection["Begin Path"] for selection in selections} == {hit.file for hit in hits}
    assert {selection["High Freq (Hz)"] for selection in selections} == {"8000"}  # half of the sampling rate
    assert re.findall(r'<a download="([^"]+)"[^>]*>(\w+)<', shown) == [("hits.csv", "CSV"), ("hits.txt", "Raven")]


def test_a_text_beside_an_example_is_answered_and_named(searcher, folder):
    answer = make_page(searcher, folder).fns[0].fn
    example = str(folder / "a <b> & 'c'.wav")
    by_example, by_text = answer("", "eng", example, 1), answer("high", "eng", example, 1)
    assert "Hits by example" in by_example
    assert by_text == answer("high", "eng", None, 1)
    assert "Hits by text" in by_text


def test_only_searchable_files_are_counted_and_the_others_are_listed(tmp_path):
    root = tmp_path / "sounds"
    root.mkdir()
    for name in ("good.wav", "also good.wav", "good too.wav"):
        soundfile.write(root / name, tone(250.0, 6.0), RATE)
    for name in ("bad <1>.wav", "a.wav"):
        (root / name).write_bytes(b"no sound")
    model = load_embedding_model(PitchModel(), name=str(tmp_path / "runs" / "final"))
    build_index(model, root, tmp_path / "index", show_progress_bar=False)
    heading = render_heading(Searcher(tmp_path / "index", model), root)
    assert "<p>3 files in sounds, searched by final</p>" in heading
    assert "<summary>2 more cannot be searched</summary>" in heading
    first, second = re.findall("<li>(.*)</li>", heading)
    assert first.startswith("a.wav: a.wav (8 bytes)")
    assert second.startswith("bad &lt;1&gt;.wav: bad &lt;1&gt;.wav (8 bytes)")
    assert str(tmp_path) not in heading


def test_a_recording_that_was_moved_has_no_player(searcher, tmp_path):
    hits, vector = searcher.search("high", k=9), searcher.embed("high")
    here = [hit for hit in hits if hit.file != "other.flac"]
    assert 0 < len(here) < len(hits)
    (tmp_path / "sounds").mkdir()
    for hit in here:
        (tmp_path / "sounds" / hit.file).touch()
    shown = render_hits(searcher, hits, vector, tmp_path / "sounds")
    assert shown.count("<audio") == len(here)
    assert shown.count("was not found") == len(hits) - len(here)


def test_a_damaged_store_is_named_on_the_page(searcher, folder, monkeypatch):
    def fail(*_):
        raise ValueError(f"the index {searcher.index.folder} is damaged")

    monkeypatch.setattr(type(searcher.index), "nearest", fail)
    shown = make_page(searcher, folder).fns[0].fn("high", "eng", None, 5)
    assert "the index index is damaged" in shown


def test_a_used_port_is_found_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(app_module, "Searcher", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1.*{port}"):
            serve(folder.parent / "index", port=port)
    with pytest.raises(OSError, match=r"203\.0\.113\.1"):
        serve(folder.parent / "index", host="203.0.113.1")


def test_the_page_is_served_with_the_options_of_the_command(folder, monkeypatch, capsys):
    calls = []

    class Page:
        share_url, local_url = None, "http://127.0.0.1:7861/"

        def block_thread(self):
            calls.append("blocked")

    def launch(searcher, recordings, **options):
        calls.append((searcher.index.folder, recordings, options))
        return Page()

    def load(model, **options):
        calls.append((model, options))
        return load_embedding_model(PitchModel())

    monkeypatch.setattr("modeling_supclap.evaluation.load_embedding_model", load)
    monkeypatch.setattr(app_module, "launch_page", launch)
    index, port = folder.parent / "index", free_port()
    serve(index, None, port, True, "cpu", "0.0.0.0", "org/model", True)
    assert calls == [
        ("org/model", {"device": "cpu", "trust_remote_code": True}),
        (str(index), folder.resolve(), {"server_name": "0.0.0.0", "server_port": port, "share": True}),
        "blocked",
    ]
    assert "http://127.0.0.1:7861/;" in capsys.readouterr().out
    monkeypatch.setattr(Page, "share_url", "https://x.gradio.live")
    serve(index, folder.parent, port)
    assert calls[-3:-1] == [
        ("PitchModel", {"device": None, "trust_remote_code": False}),
        (str(index), folder.parent.resolve(), {"server_name": "127.0.0.1", "server_port": port, "share": False}),
    ]
    assert "https://x.gradio.live;" in capsys.readouterr().out


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


PAGE = """
import sys, time
sys.path[:0] = sys.argv[3:]
from fake_models import PitchModel
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher
from modeling_supclap.search.app import launch_page

searcher = Searcher(sys.argv[1], load_embedding_model(PitchModel()))
print(launch_page(searcher, sys.argv[2]).local_url, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def address(searcher, folder, tmp_path_factory):
    """Address of the page in another process."""
    scratch = tmp_path_factory.mktemp("page")
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "GRADIO_TEMP_DIR": str(scratch / "uploads"), "HF_HOME": str(scratch)}
    command = [sys.executable, "-c", PAGE, str(folder.parent / "index"), str(folder), tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield server.stdout.readline().strip()
        server.kill()


@pytest.fixture(params=[(390, 844), (1280, 900)])
def browser(request, address):
    """Chromium with the page, in the size of a phone and of a desktop."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("no Chromium with its driver; install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--autoplay-policy=no-user-gesture-required"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    width, height = request.param
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.get(address)
    yield browser
    browser.quit()


def search_in(browser, text):
    """Enter a text, click the button, and return the first player."""
    box = wait(lambda: browser.find_element("css selector", "textarea, input[type=text]"))
    box.clear()
    box.send_keys(text)
    wait(lambda: button(browser, "Search")).click()
    return wait(lambda: browser.find_element("id", "player0"))


def seconds_of(browser, player):
    return browser.execute_script("return arguments[0].currentTime", player)


@pytest.mark.process
def test_in_chromium_the_player_starts_at_the_hit(searcher, browser, tmp_path):
    hits = searcher.search("high", k=5)
    player = search_in(browser, "high")
    wait(lambda: browser.execute_script("return arguments[0].readyState", player) >= 1 or None)
    at = wait(lambda: seconds_of(browser, player) or None)
    assert at == pytest.approx(hits[0].start_seconds, abs=0.3)
    browser.execute_script("arguments[0].play()", player)
    wait(lambda: seconds_of(browser, player) > at + 0.2 or None)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= browser.execute_script("return window.innerWidth")

    first, second = browser.find_elements("css selector", ".hit")[:2]  # both on the first screen
    assert browser.execute_script("return window.scrollY") == 0
    bottom = browser.execute_script("return arguments[0].getBoundingClientRect().bottom", second)
    assert bottom <= browser.execute_script("return window.innerHeight")
    waveform = first.find_element("css selector", "img.waveform")
    assert wait(lambda: browser.execute_script("return arguments[0].naturalWidth", waveform) or None)
    heading = browser.find_element("tag name", "body").text
    assert "files in sounds, searched by PitchModel" in heading
    browser.save_screenshot(os.environ.get("SUPCLAP_SCREENSHOT", str(tmp_path / "page.png")))


@pytest.mark.process
def test_in_chromium_hits_have_keys_and_buttons(searcher, browser):
    hits = searcher.search("high", k=5)
    search_in(browser, "high")
    body, elements = browser.find_element("tag name", "body"), browser.find_elements("css selector", ".hit")

    def is_current(number):
        return "current" in elements[number].get_attribute("class") or None

    browser.execute_script("document.activeElement.blur()")
    for key, number in (("n", 0), ("n", 1), ("n", 2), ("p", 1)):
        body.send_keys(key)
        wait(lambda number=number: is_current(number))
        player = elements[number].find_element("tag name", "audio")
        wait(lambda player=player: browser.execute_script("return !arguments[0].paused", player) or None)
        assert seconds_of(browser, player) >= hits[number].start_seconds - 0.1
    assert (
        browser.execute_script("return [...document.querySelectorAll('audio')].filter(each => !each.paused).length")
        == 1
    )

    box = browser.find_element("css selector", "textarea, input[type=text]")
    box.send_keys("np")  # no keys of the hits
    assert box.get_attribute("value") == "highnp"
    assert is_current(1)

    waveform = elements[0].find_element("css selector", "img.waveform")
    waveform.click()  # in its middle
    player = elements[0].find_element("tag name", "audio")
    middle = (hits[0].start_seconds + hits[0].end_seconds) / 2
    assert seconds_of(browser, player) == pytest.approx(middle, abs=1.0)

    elements[0].find_element("css selector", ".copy").click()
    wait(lambda: elements[0].find_element("css selector", ".copy").text == "Copied" or None)
    assert browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == hits[0].file

    elements[-1].find_element("css selector", ".similar").click()
    wait(lambda: f"Hits by similarity to {hits[-1].file} {clock(hits[-1].start_seconds)}" in body.text or None)
    first = browser.find_element("css selector", ".hit")
    assert float(first.get_attribute("data-start")) != hits[0].start_seconds  # the low tone, not the high one


def button(browser, label):
    """Return the button with this label."""
    found = [element for element in browser.find_elements("tag name", "button") if element.text.strip() == label]
    return found[0] if found else None


def wait(look, seconds=120):
    """Call `look` until it returns something."""
    end = time.monotonic() + seconds
    while True:
        try:
            if (found := look()) is not None:
                return found
        except Exception:
            if time.monotonic() > end:
                raise
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.1)
