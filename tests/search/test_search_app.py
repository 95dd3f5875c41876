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

pytest.importorskip("lancedb", reason="the extra search is not installed")
pytest.importorskip("gradio", reason="the extra search is not installed")

from modeling_supclap.search import Searcher, SoundIndex
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
    assert f"#t={hits[0].start_seconds:g}" in shown
    assert shown.count("<audio") == 2
    assert 'viewBox="0 0 40.000 10"' in shown


def test_the_strips_of_a_page_can_be_compared(searcher, folder):
    vector = searcher.embed("high")
    hits = searcher.search("high", k=5)
    shown = render_hits(searcher, hits, vector)
    windows = re.findall(r'fill-opacity="([^"]+)"><title>[^<]*score ([^<]+)<', shown)
    by_score = sorted((float(score), float(opacity)) for opacity, score in windows)
    opacities = [opacity for _, opacity in by_score]
    assert opacities == sorted(opacities)
    assert (opacities[0], opacities[-1]) == (0.06, 1.0)


def test_each_strip_shows_the_windows_of_its_recording(searcher, folder):
    vector, hits = searcher.embed("high"), searcher.search("high", k=9)
    shown = render_hits(searcher, hits, vector)
    strips = {file: searcher.strip(vector, file) for file in dict.fromkeys(hit.file for hit in hits)}
    every = np.concatenate([scores for _, scores in strips.values()])
    span = max(every.max() - every.min(), 2 * (searcher.background() - every.min()))
    groups = dict(re.findall(r'<g id="(strip\d)">(.*?)</g>', shown, re.DOTALL))
    assert list(groups) == ["strip0", "strip1"]
    for group, (onsets, scores) in zip(groups.values(), strips.values(), strict=True):
        length = onsets[-1] + 5
        pattern = r'x="(\S+)" y="0" width="(\S+)".*?fill-opacity="(\S+)"><title>(\S+), score (\S+)</title>'
        expected = []
        for onset, end, score in zip(onsets, [*onsets[1:], length], scores, strict=True):
            shade = 0.06 + 0.94 * ((score - every.min()) / span) ** 2
            expected.append((f"{onset:.3f}", f"{end - onset:.3f}", f"{shade:.3f}", clock(onset), f"{score:.3f}"))
        assert re.findall(pattern, group, re.DOTALL) == expected

    plots = re.findall(
        r'viewBox="0 0 (\S+) 10".*?href="#(strip\d)"/>\s*<rect x="(\S+)" y="0" width="5.000"', shown, re.DOTALL
    )
    numbers, lengths = {file: number for number, file in enumerate(strips)}, {"other.flac": "9.000"}
    assert plots == [
        (lengths.get(hit.file, "40.000"), f"strip{numbers[hit.file]}", f"{hit.start_seconds:.3f}") for hit in hits
    ]


def test_strips_of_hits_that_do_not_stand_out_are_pale(searcher, monkeypatch):
    vector, hits = searcher.embed("high"), searcher.search("high", k=5)
    monkeypatch.setattr(Searcher, "background", lambda *_: hits[0].score)
    assert not searcher.stands_out(hits)
    assert max(map(float, re.findall(r'fill-opacity="([^"]+)"', render_hits(searcher, hits, vector)))) < 0.3


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
    assert hits[0].file == "other.flac"
    searcher.index.remove(["other.flac"])
    shown = render_hits(searcher, hits, vector)
    assert "other.flac" not in shown
    assert shown.count("<audio") == sum(hit.file != "other.flac" for hit in hits) > 1
    searcher.index.remove(sorted({hit.file for hit in hits}))
    assert render_hits(searcher, hits, vector) == "<p>The recordings were removed; search again.</p>"
    assert render_hits(searcher, [], vector) == "<p>No indexed recording to search.</p>"


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
    status, _, body = get(page, "recordings/other.flac", Range="bytes=2-5")
    assert (status, body) == (206, content[2:6])
    assert get(page, "recordings/a%20%3Cb%3E%20%26%20%27c%27.wav")[0] == 200
    status, headers, body = get(page, "recordings/other.flac?waveform=2.5")
    assert (status, headers["Content-Type"]) == (200, "image/svg+xml")
    assert body.decode() == draw_waveform(folder / "other.flac", RATE, 2.5, 5.0)
    for start in ("100", "none", "nan", "inf"):
        assert get(page, f"recordings/other.flac?waveform={start}")[::2] == (404, b"no such recording")
    for name in (".env", "new.wav", "../outside.flac", "..%2Foutside.flac", "nothing.wav", "", "%00"):
        assert get(page, f"recordings/{name}")[0] == 404
    for path in (folder / ".env", folder / "other.flac"):
        assert get(page, f"gradio_api/file={path}")[0] == 403
    assert str(folder) not in get(page, "")[2].decode() + get(page, "config")[2].decode()
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
            status, headers, body = get(
                page, path, method, Host=host, Origin=origin, Access_Control_Request_Method="GET"
            )
            assert (status, body) == (403, b"requests of other web sites are refused")
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


def test_files_of_killed_pages_are_deleted_by_the_next_one(searcher, folder, scratch):
    old, new = scratch / "page" / "uploads" / "x" / "old.wav", scratch / "page" / "uploads" / "y" / "new.wav"
    for path in (old, new):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"a sound")
    for path in (old, old.parent, new.parent):
        os.utime(path, (time.time() - 3700,) * 2)
    launch_page(searcher, folder, server_port=free_port()).close()
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


def test_neither_hits_nor_errors_show_where_the_files_are(searcher, folder, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(f"{folder.resolve()}/a <b>.wav and {searcher.index.folder}")

    answer = make_page(searcher, folder).fns[0].fn
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    answers = [answer("high", "eng", None, 5), answer("", "eng", str(tmp_path / "bad.wav"), 5)]
    assert "not audio" in answers[1]
    monkeypatch.setattr(Searcher, "embed", fail)
    answers.append(answer("high", "eng", None, 5))
    assert answers[2] == "<p>sounds/a &lt;b&gt;.wav and index</p>"
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
    assert "other.flac" in similar(SimpleNamespace(file="other.flac", start=0.0, end=5.0), 1, "", None, None)


def test_hits_are_filtered_by_folder_and_length(tmp_path):
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
    (menu,) = [block for block in page.blocks.values() if getattr(block, "label", "") == "Folder"]
    assert [value for _, value in menu.choices] == ["", "site", "site/day 2"]


def test_the_page_has_its_controls_and_one_public_function(searcher, folder):
    config = make_page(searcher, folder).config
    by_id = {each["id"]: each["props"] for each in config["components"]}
    labels = {number: props["label"] for number, props in by_id.items() if "label" in props}
    assert list(labels.values()) == [
        *("Sound to search for", "Language"),
        "Example, filters, number of hits",
        "Recording of a similar sound (its first 10 minutes are used)",
        *("Folder", "Recordings of at least (seconds)", "Recordings of at most (seconds)", "Number of hits"),
    ]
    text, language, menu, sound, within, shortest, longest, number = (by_id[number] for number in labels)
    assert (text["submit_btn"], language["value"], menu["open"], sound["type"]) == ("Search", "eng", False, "filepath")
    assert language["choices"][:3] == [("English", "eng"), ("French", "fra"), ("German", "deu")]
    assert (within["value"], within["choices"], within["allow_custom_value"]) == ("", [("", "")], True)
    assert [(each.get("value"), each["minimum"]) for each in (shortest, longest)] == [(None, 0)] * 2
    assert [number[name] for name in ("value", "minimum", "maximum", "step")] == [5, 1, 50, 1]

    buttons = {each["id"]: each["props"]["value"] for each in config["components"] if each["type"] == "button"}
    names = {**{number: label.split()[0] for number, label in labels.items()}, **buttons}
    events = {}
    for event in config["dependencies"][:-1]:  # the last one loads the heading
        targets = [(names.get(number), kind) for number, kind in event["targets"]]
        events[event["api_name"]] = event["api_visibility"], targets, [names[number] for number in event["inputs"]]
    query, options = ["Sound", "Language", "Recording"], ["Number", "Folder", "Recordings", "Recordings"]
    assert events == {
        "search": ("public", [("Run", "click")], [*query, "Number"]),
        "find": ("private", [("Search", "click"), ("Sound", "submit")], [*query, *options]),
        "find_similar": ("private", [(None, "similar")], options),
        "lambda": ("private", [("Sound", "input")], []),
        "lambda_1": ("private", [("Recording", "input")], []),
    }


def test_the_page_needs_no_other_host(page):
    shown = get(page, "")[2].decode() + get(page, "theme.css")[2].decode()
    assert "system-ui" in shown
    assert "fonts.googleapis" not in shown
    assert ".waveform" in json.loads(get(page, "config")[2])["css"]


def test_the_hits_on_the_page_are_tables_to_download(searcher, folder):
    shown = make_page(searcher, folder).fns[0].fn("high", "eng", None, 4)
    hits = searcher.search("high", k=4)
    tables = [unquote(html.unescape(text)) for text in re.findall(r'href="data:[^,]+,([^"]*)"', shown)]
    rows = list(csv.DictReader(io.StringIO(tables[0])))
    assert [(row["query"], row["file"], float(row["start_seconds"])) for row in rows] == [
        ("high", hit.file, hit.start_seconds) for hit in hits
    ]
    selections = list(csv.DictReader(io.StringIO(tables[1]), delimiter="\t"))
    assert len(selections) == 4
    assert {selection["Begin Path"] for selection in selections} == {hit.file for hit in hits}
    assert {(selection["Annotation"], selection["High Freq (Hz)"]) for selection in selections} == {("high", "8000")}


def test_a_text_that_does_not_stand_out_in_the_folder_is_marked(searcher, folder, monkeypatch):
    find = functions(searcher, folder)["find"]
    monkeypatch.setattr(Searcher, "background", lambda _, within=None: 2.0 if within is None else 0.9)
    assert find("high", "eng", None, 1, "", None, None).startswith('<p class="time">Hits by text.</p><svg')
    note = f'<p class="time">Hits by text.</p><p>{NOTHING}</p>'
    assert find("quarterly tax report", "eng", None, 1, "", None, None).startswith(note)
    assert NOTHING not in find("high", "eng", None, 1, "", 50, None)  # no hits
    assert NOTHING not in find("", "eng", str(folder / "other.flac"), 1, "", None, None)


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
    soundfile.write(root / "good.wav", tone(250.0, 6.0), RATE)
    (root / "bad <1>.wav").write_bytes(b"no sound")
    build(PitchModel(), root)
    heading = render_heading(Searcher(tmp_path / "index", load_embedding_model(PitchModel())), root)
    assert "<p>1 files in sounds, searched by PitchModel</p>" in heading
    assert "1 more cannot be searched" in heading
    assert "bad &lt;1&gt;.wav" in heading
    assert str(tmp_path) not in heading


def test_the_heading_is_sorted_and_names_no_folder_of_this_machine(searcher, folder, monkeypatch):
    problems = {"z.wav": f"{folder.resolve()}/z.wav is damaged", "a.wav": "silent"}
    monkeypatch.setattr(SoundIndex, "unreadable_files", lambda _: problems)
    monkeypatch.setattr(SoundIndex, "about", {**searcher.index.about, "model": "/models/tuned & fast"})
    assert render_heading(searcher, folder.resolve()).splitlines() == [
        "<h1>Search recordings</h1>",
        "<p>0 files in sounds, searched by tuned &amp; fast</p>",
        "<details><summary>2 more cannot be searched</summary><ul>",
        "<li>a.wav: silent</li>",
        "<li>z.wav: sounds/z.wav is damaged</li>",
        "</ul></details>",
    ]
    monkeypatch.setattr(SoundIndex, "unreadable_files", lambda _: {})
    monkeypatch.setattr(SoundIndex, "about", {**searcher.index.about, "model": "owner/name"})
    assert render_heading(searcher, folder.resolve()).splitlines()[1:] == [
        "<p>2 files in sounds, searched by owner/name</p>"
    ]


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


def test_a_page_is_served_with_its_options(searcher, folder, monkeypatch, capsys):
    calls = []

    class Page:
        share_url, local_url = None, "http://127.0.0.1:1/"

        def block_thread(self):
            calls.append("served")

    monkeypatch.setattr(app_module, "Searcher", lambda *words: calls.append(words) or searcher)
    monkeypatch.setattr(app_module, "launch_page", lambda *words, **options: calls.append((words, options)) or Page())
    port = free_port()
    serve("index", port=port, share=True, device="cpu", model="owner/name", trust_remote_code=True)
    options = {"server_name": "127.0.0.1", "server_port": port, "share": True}
    assert calls == [("index", "owner/name", "cpu", True), ((searcher, folder.resolve()), options), "served"]
    assert capsys.readouterr().out == "serving the page at http://127.0.0.1:1/; press Ctrl-C to stop\n"
    Page.share_url, calls[:] = "https://a.example/", []
    serve("index", folder.parent, port=port, host="localhost")
    options = {"server_name": "localhost", "server_port": port, "share": False}
    assert calls == [("index", None, None, False), ((searcher, folder.parent.resolve()), options), "served"]
    assert "serving the page at https://a.example/;" in capsys.readouterr().out


def test_a_used_port_is_found_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(app_module, "Searcher", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1.*{port}"):
            serve(folder.parent / "index", port=port)
    with pytest.raises(OSError, match=r"203\.0\.113\.1"):
        serve(folder.parent / "index", host="203.0.113.1")


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
