"""The search page (in Chromium if it is installed): enter a query, show hits, and play from the correct second."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import soundfile
from fake_models import RATE, PitchModel, build, tone

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher
from modeling_supclap.search import app as app_module
from modeling_supclap.search.app import find_recordings, launch_page, make_page, render_heading, render_hits, serve

pytestmark = pytest.mark.skipif(
    find_spec("gradio") is None or find_spec("lancedb") is None, reason="the extra search is not installed"
)


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
    searcher.index.remove(["other.flac"])
    assert "other.flac" not in render_hits(searcher, hits, vector)
    searcher.index.remove(sorted({hit.file for hit in hits}))
    assert "<audio" not in render_hits(searcher, hits, vector)


def test_indexed_recordings_are_served_and_nothing_else(searcher, folder):
    (folder / ".env").write_text("TOKEN=1")
    (folder / "new.wav").write_bytes((folder / "other.flac").read_bytes())
    (folder.parent / "outside.flac").write_bytes(b"")
    page = launch_page(searcher, folder, server_port=free_port())

    def get(path, **headers):
        try:
            with urlopen(Request(page.local_url + path, headers=headers)) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()

    try:
        content = (folder / "other.flac").read_bytes()
        assert get("recordings/other.flac") == (200, content)
        assert get("recordings/other.flac", Range="bytes=2-5") == (206, content[2:6])
        assert get("recordings/a%20%3Cb%3E%20%26%20%27c%27.wav")[0] == 200
        for name in (".env", "new.wav", "../outside.flac", "..%2Foutside.flac", "nothing.wav", ""):
            assert get(f"recordings/{name}")[0] == 404
        for path in (folder / ".env", folder / "other.flac"):
            assert get(f"gradio_api/file={path}")[0] == 403
        assert str(folder) not in get("")[1].decode() + get("config")[1].decode()
        (folder / "other.flac").unlink()
        assert get("recordings/other.flac")[0] == 404
    finally:
        page.close()
    assert not page.analytics_enabled
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_neither_hits_nor_errors_show_where_the_files_are(searcher, folder, tmp_path):
    answer = make_page(searcher, folder).fns[0].fn
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    answers = [answer("high", "eng", None, 5), answer("", "eng", str(tmp_path / "bad.wav"), 5)]
    assert "not audio" in answers[1]
    for shown in answers:
        assert str(folder.parent) not in shown
        assert str(tmp_path) not in shown


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
    assert "<p>1 files, by text or by example</p>" in heading
    assert "1 more files cannot be searched" in heading
    assert "bad &lt;1&gt;.wav" in heading
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
def address(folder, tmp_path_factory):
    """Address of a page in another process."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("no Chromium with its driver; install chromium and chromium-driver")
    tests = os.path.dirname(os.path.dirname(__file__))
    uploads = str(tmp_path_factory.mktemp("uploads"))
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
    command = [sys.executable, "-c", PAGE, str(folder.parent / "index"), str(folder), tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield server.stdout.readline().strip()
        server.kill()


@pytest.mark.process
@pytest.mark.parametrize("width", [390, 1280])
def test_in_chromium_the_player_starts_at_the_hit(searcher, address, tmp_path, width):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--autoplay-policy=no-user-gesture-required"):
        options.add_argument(word)
    options.add_argument(f"--window-size={width},1400")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(address)
        hits = searcher.search("high", k=5)
        box = wait(lambda: browser.find_element("css selector", "textarea, input[type=text]"))
        box.send_keys("high")
        wait(lambda: button(browser, "Search")).click()
        player = wait(lambda: browser.find_element("id", "player0"))
        wait(lambda: browser.execute_script("return arguments[0].readyState", player) >= 1 or None)
        at = wait(lambda: browser.execute_script("return arguments[0].currentTime", player) or None)
        assert at == pytest.approx(hits[0].start_seconds, abs=0.3)

        browser.execute_script("arguments[0].play()", player)
        wait(lambda: browser.execute_script("return arguments[0].currentTime", player) > at + 0.2 or None)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= browser.execute_script("return window.innerWidth")
        browser.save_screenshot(os.environ.get("SUPCLAP_SCREENSHOT", str(tmp_path / "page.png")))
    finally:
        browser.quit()


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
