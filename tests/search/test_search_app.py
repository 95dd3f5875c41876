"""The page in a real Chromium, where there is one: type, see places, press play, hear from the right second."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import soundfile
from fake_models import RATE, PitchModel, build, tone

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher
from modeling_supclap.search.app import find_recordings, render_hits

gradio = pytest.importorskip("gradio")
pytest.importorskip("lancedb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty seconds of a low tone with a high one from 20 to 24 s, under a name that HTML must not read."""
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


def test_the_results_name_the_place_and_escape_the_name(searcher, folder):
    hits = searcher.search("high", k=2)
    shown = render_hits(searcher, hits, searcher.embed("high"), folder.resolve())
    assert "a &lt;b&gt; &amp; &#39;c&#39;.wav" in shown
    assert "<b>" not in shown
    assert f"#t={hits[0].start_seconds:g}" in shown
    assert shown.count("<audio") == 2
    assert 'viewBox="0 0 40.000 10"' in shown


def test_the_strips_of_a_page_can_be_compared(searcher, folder):
    vector = searcher.embed("high")
    hits = searcher.search("high", k=5)
    shown = render_hits(searcher, hits, vector, folder)
    windows = re.findall(r'fill-opacity="([^"]+)"><title>[^<]*score ([^<]+)<', shown)
    by_score = sorted((float(score), float(opacity)) for opacity, score in windows)
    opacities = [opacity for _, opacity in by_score]
    assert opacities == sorted(opacities)
    assert (opacities[0], opacities[-1]) == (0.06, 1.0)


def test_the_recordings_may_have_moved(searcher, folder, tmp_path):
    assert find_recordings(searcher) == folder.resolve()
    assert find_recordings(searcher, tmp_path) == tmp_path.resolve()
    with pytest.raises(FileNotFoundError, match="gone"):
        find_recordings(searcher, tmp_path / "gone")


PAGE = """
import sys, time
sys.path[:0] = sys.argv[3:]
from fake_models import PitchModel
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher
from modeling_supclap.search.app import STYLE, make_page

searcher = Searcher(sys.argv[1], load_embedding_model(PitchModel()))
page = make_page(searcher, sys.argv[2])
_, address, _ = page.launch(prevent_thread_lock=True, allowed_paths=[sys.argv[2]], css=STYLE, quiet=True)
print(address, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_in_chromium_the_player_stands_at_the_second_that_was_found(searcher, folder, tmp_path, width):
    webdriver = pytest.importorskip("selenium.webdriver")
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("no Chromium with its driver; install chromium and chromium-driver")
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PAGE, str(folder.parent / "index"), str(folder), tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        address = server.stdout.readline().strip()
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
            server.kill()


def button(browser, label):
    """The button with that label."""
    found = [element for element in browser.find_elements("tag name", "button") if element.text.strip() == label]
    return found[0] if found else None


def wait(look, seconds=120):
    """What `look` gives once it gives something."""
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
