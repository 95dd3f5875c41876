"""The report page: what stands on it comes from the receipt, is escaped, and needs nothing from outside."""

import base64
import io
import re

import numpy as np
import pytest
import soundfile
from made_receipt import NUM_CLIPS, made_receipt

from modeling_supclap.datasets_scripts.schema import LANGUAGES
from modeling_supclap.evaluation import report
from modeling_supclap.evaluation.receipts import Receipt, paper_results, score
from modeling_supclap.evaluation.report import render_report, write_report


@pytest.fixture
def receipt(tmp_path):
    return made_receipt(tmp_path)


def lines_of(page, kind):
    """The rows of one kind in all tables, as lists of texts."""
    rows = re.findall(rf'<tr class="{kind}">(.*?)</tr>', page, re.DOTALL)
    return [[re.sub("<small>.*?</small>|<.*?>", "", cell) for cell in re.split("</t[hd]>", row)[:-1]] for row in rows]


def test_scores_stand_with_interval_and_chance(receipt):
    page = render_report(receipt)
    assert ["eng", *["43.2"] * 4, *["50.0"] * 4] in lines_of(page, "ours")
    assert ["mean", *["46.0"] * 8] in lines_of(page, "ours")
    assert ["this model", "7.25"] in lines_of(page, "ours")
    assert ["fra", "0.125", "0.375"] in lines_of(page, "ours")
    assert ["eng, supclap", "75.0", "100.0", "75.0"] in lines_of(page, "ours")
    assert ["MRV of the languages", "0.50"] in lines_of(page, "ours")
    assert ["chance", "33.3"] in lines_of(page, "chance")
    assert "33.2–53.2" in page
    assert "7.25<small>6.00–8.00</small>" in page
    assert re.search(r'style="--share:0.85">17<', page)
    groups = re.findall(r'<th colspan="4" scope="colgroup">(.*?)</th>', page)
    assert groups[:2] == ["text to audio", "audio to text"]
    assert page.count("text to audio") == 2  # above its columns and above its bars, not in each column


def test_numbers_of_a_column_have_as_many_decimals(receipt):
    means = receipt.scores["multilingual"]
    means["Gap"]["fra"], means["MRV"] = score(0.16), score(347.3412, (99.5, 1234.5))
    page = render_report(receipt)
    assert ["fra", "0.160", "0.375"] in lines_of(page, "ours")
    assert "347.34<small>99.50–1234.50</small>" in page


def in_languages(receipt, languages):
    """The receipt as if it had been measured in these languages."""
    first = receipt.scores["retrieval"]["eng"]
    receipt.protocol["languages"] = languages
    receipt.scores["retrieval"] = dict.fromkeys(languages, first)
    receipt.scores["multilingual"] |= {name: dict.fromkeys(languages[1:], score(0.3)) for name in ("Gap", "Dis")}
    ranks = receipt.arrays["multilingual/ranks"]
    receipt.arrays["multilingual/ranks"] = np.repeat(ranks[:, :1], len(languages), axis=1)
    return receipt


def sections_of(page):
    return set(re.findall(r'<th [^>]*scope="rowgroup">(\w+, table \w+)</th>', page))


def test_papers_stand_beside_the_same_task_only(receipt):
    page = render_report(receipt)
    assert lines_of(page, "paper") == lines_of(page, "best") == []  # two classes are not ESC-50
    assert "papers" not in page
    receipt.protocol["classes"] = 50
    assert {"SupCLAP, table 2", "TeminAL, table 3"} <= sections_of(render_report(receipt))
    receipt.protocol["dataset"] = "audiocaps"
    # [S table 1] in English, and ATRI's MRV, which is of eight languages.
    assert {"SupCLAP, table 1", "ATRI, table 2"} <= sections_of(render_report(receipt))
    assert "ATRI, table 3" not in sections_of(render_report(receipt))
    page = render_report(in_languages(receipt, list(LANGUAGES)))
    assert {"ATRI, table 3", "SupCLAP, table 11"} <= sections_of(page)
    assert ["KCL (8 languages)", "7.52"] in lines_of(page, "paper")


def test_papers_stand_beside_their_own_test_split_and_languages(receipt):
    receipt.protocol.update({"dataset": "prepared", "origin": "audiocaps"})
    names = [line[0] for line in lines_of(render_report(receipt), "paper")]
    assert any("(fra)" in name for name in names)
    assert not any("(jpn)" in name or "8 languages" in name for name in names)
    assert "prepared (audiocaps), split" in render_report(receipt)
    receipt.protocol["split"] = "validation"
    assert lines_of(render_report(receipt), "paper") == []


def test_of_the_papers_only_the_best_numbers_are_unfolded(receipt):
    receipt.protocol["dataset"] = "audiocaps"
    page = render_report(in_languages(receipt, list(LANGUAGES)))
    unfolded = re.sub("<details>.*?</details>", "", page, flags=re.DOTALL)
    assert lines_of(unfolded, "paper") == []
    assert "<details open" not in page.split("<h2>Zero-shot")[0]
    best = {line[0]: line[1:] for line in lines_of(unfolded, "best")}
    assert list(best) == [f"best in papers, {name}" for name in ("eng", "mean of 8", "8 languages")]
    english = paper_results(dataset="audiocaps", language="eng", direction="t2a", metric="R@1")
    assert best["best in papers, eng"][0] == f"{100 * max(entry['value'] for entry in english):.1f}"
    assert best["best in papers, 8 languages"] == ["7.52"]  # of the ranks' variance, the least is best
    # Ours come first, and the pictures of them before the papers' rows.
    assert page.index('<tr class="best"') > page.index('<tr class="chance"') > page.index('<tr class="ours"')
    assert page.index("<summary>") > page.index('class="bars"')


def test_what_makes_scores_incomparable_is_told(receipt):
    plain = " ".join(render_report(receipt).split())
    assert "6 clips (1 more missing), 6 captions in each of eng, fra." in plain
    assert "<dt>missing clips</dt><dd>gone</dd>" in plain
    for told in ("not on disk", "split train too", "cannot reach 100", "of the folds", "mean of folds"):
        assert told not in plain
    receipt.protocol.update(
        {
            "without_rows": {"missing": 1234, "examples": ["lost.wav"], "left_out": {}},
            "shared_sources": {"with": "train", "count": 3, "examples": []},
            "positives": "captions",
            "folds": [1, 2],
            "captions": {"eng": 6, "fra": 5},
        }
    )
    receipt.scores["zero_shot"]["eng"]["supclap"]["mean_over_folds"] = receipt.scores["zste"]["eng"]["3A"]
    page = " ".join(render_report(receipt).split())
    for told in (
        "1,234 recordings of the dataset were not on disk</strong>, in all splits together, such as lost.wav",
        "3 of the recordings are in the split train too",
        "cannot reach 100",
        "test of the folds 1, 2: 6 clips",
        "5 captions in fra, 6 captions in eng",
        '<th scope="col">mean of folds</th>',
    ):
        assert told in page


def test_the_page_speaks_of_what_it_has(receipt):
    plain = " ".join(render_report(receipt).split())
    assert "Distance to the captions' embeddings in eng" in plain
    assert "95% intervals" in plain
    receipt.protocol["intervals"]["num_resamples"] = 0
    assert "intervals (" not in " ".join(render_report(receipt).split())
    # Without English the distances are to the first language.
    assert "embeddings in fra" in " ".join(render_report(in_languages(receipt, ["fra", "deu"])).split())


def test_captions_say_their_language_to_the_browser(receipt):
    english = render_report(receipt)
    assert '<strong lang="eng">' in english
    assert '<th scope="row" lang="eng">everywhere' in english
    # Browsers take "zho" for nothing and draw Chinese in Japanese glyphs.
    receipt.arrays |= {name.replace("fra", "zho"): values for name, values in receipt.arrays.items() if "fra" in name}
    chinese = render_report(in_languages(receipt, ["zho", "fra"]))
    assert '<strong lang="zh">' in chinese
    assert '<th scope="row" lang="zh">everywhere' in chinese


def test_the_page_can_be_read_by_ear_and_by_keyboard(receipt):
    page = render_report(receipt)
    assert all('aria-label="' in player for player in re.findall("<audio.*?>", page))
    assert all('role="img" aria-label="' in picture for picture in re.findall("<svg.*?>", page))
    assert all("scope=" in head for head in re.findall("<th.*?>", page) if head != "<thead>")
    assert page.count('<div class="wide"') == page.count('<div class="wide" tabindex="0" role="region" aria-label="')


def test_the_page_needs_nothing_from_outside_and_is_escaped(receipt):
    page = render_report(receipt)
    assert "folder &lt;b&gt;" in page
    assert "folder <b>" not in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "@import" not in page.split("</style>")[0]
    assert render_report(receipt) == page


def test_hits_and_misses_can_be_heard(receipt):
    page = render_report(receipt, num_samples=3)
    sounds = re.findall(r'src="data:audio/mpeg;base64,([^"]*)"', page)
    # Three hits; three misses of which one recording is gone, each with the clip that was found first.
    assert len(sounds) == 3 + 2 + 3
    waveform, rate = soundfile.read(io.BytesIO(base64.b64decode(sounds[0])))
    assert rate == 16000
    assert abs(len(waveform) - 8000) < 2500  # MP3 pads
    assert page.count("recording not found where it was") == 1
    assert "right clip at rank 6" in page  # 1 is first, as for R@1 and the mean rank
    assert render_report(receipt, num_samples=0).count("<audio") == 0


def test_cases_are_the_extremes_and_come_once(receipt):
    cases = report._cases(receipt)
    assert cases["highest in every language"][0] == ("everywhere", [1, 1])
    assert [case.text for case in cases["the languages disagree"]][:2] == ["torn", "b"]
    assert len({case.text for case in cases["the languages disagree"]}) == len(cases["the languages disagree"])


@pytest.mark.parametrize("task", ["retrieval", "zero_shot", "zste"])
def test_a_receipt_of_one_task_has_a_page(receipt, task):
    prefixes = {"retrieval": ("clips", "captions", "retrieval", "similarity")}.get(task, ("clips", task))
    alone = Receipt(
        {**receipt.content, "scores": {task: receipt.scores[task]}},
        {name: values for name, values in receipt.arrays.items() if name.startswith(prefixes)},
    )
    titles = re.findall("<h2>(.*?)</h2>", render_report(alone))
    own = {
        "retrieval": "Retrieval",
        "zero_shot": "Zero-shot classification",
        "zste": "Zero-shot temporal evaluation (ZSTE)",
    }
    assert own[task] in titles
    assert not {title for other, title in own.items() if other != task} & set(titles)


def test_written_from_a_saved_receipt_whole_or_not_at_all(receipt, tmp_path, monkeypatch):
    receipt.save(tmp_path / "receipt")
    path = write_report(tmp_path / "receipt", tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == render_report(receipt)
    monkeypatch.setattr(report, "_samples", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(receipt, path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(FileNotFoundError, match="no receipt"):
        write_report(tmp_path / "elsewhere", path)


def test_recordings_in_the_rows_are_heard(receipt):
    sound = (3000 * np.sin(np.arange(8000) / 7)).astype("<i2").tobytes()
    rows = [{"clip_id": str(clip), "samples": sound, "sampling_rate_hz": 16000} for clip in reversed(range(NUM_CLIPS))]
    page = render_report(receipt, rows, num_samples=2)
    assert "recording not found" not in page
    assert len(set(re.findall(r'src="data:audio/mpeg;base64,([^"]*)"', page))) == 1
