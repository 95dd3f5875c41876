"""The report page: what stands on it comes from the receipt, is escaped, and needs nothing from outside."""

import base64
import io
import re

import numpy as np
import pytest
import soundfile
from made_receipt import NUM_CLIPS, made_receipt

from modeling_supclap.evaluation import report
from modeling_supclap.evaluation.receipts import Receipt
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
    assert ["this model", "7.25", *["46.0"] * 8] in lines_of(page, "ours")
    assert ["fra", "0.125", "0.375"] in lines_of(page, "ours")
    assert ["eng, supclap", "75.0", "100.0", "75.0"] in lines_of(page, "ours")
    assert ["MRV of the languages", "0.5"] in lines_of(page, "ours")
    assert ["chance", "33.3"] in lines_of(page, "chance")
    assert "33.2–53.2" in page
    assert "7.25<small>6–8</small>" in page
    assert re.search(r'rgba\(59,125,216,0.85\)">17<', page)


def test_papers_stand_beside_the_same_task_only(receipt):
    assert lines_of(render_report(receipt), "paper") == []  # two classes are not ESC-50
    receipt.protocol["classes"] = 50
    names = [line[0] for line in lines_of(render_report(receipt), "paper")]
    assert any("SupCLAP table 2" in name for name in names)
    assert any("TeminAL table 3" in name for name in names)
    receipt.protocol["dataset"] = "audiocaps"
    audiocaps = lines_of(render_report(receipt), "paper")
    # [S table 1], InfoNCE with a dynamic radius in both directions, and ATRI's MRV.
    assert any("SupCLAP table 1" in line[0] for line in audiocaps)
    assert any("ATRI table 3" in line[0] and line[1] for line in audiocaps)


def test_papers_stand_beside_their_own_test_split_and_languages(receipt):
    receipt.protocol.update({"dataset": "prepared", "origin": "audiocaps"})
    names = [line[0] for line in lines_of(render_report(receipt), "paper")]
    assert any("(fra)" in name for name in names)
    assert not any("(jpn)" in name for name in names)
    assert "prepared (audiocaps), split" in render_report(receipt)
    receipt.protocol["split"] = "validation"
    assert lines_of(render_report(receipt), "paper") == []


def test_what_makes_scores_incomparable_is_told(receipt):
    plain = " ".join(render_report(receipt).split())
    assert "6 captions in each of eng, fra." in plain
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
        "6 captions in eng, 5 captions in fra",
        "<th>mean of folds</th>",
    ):
        assert told in page


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
    assert "right clip at rank 5 (0 is first)" in page
    assert render_report(receipt, num_samples=0).count("<audio") == 0


def test_cases_are_the_extremes_and_come_once(receipt):
    cases = report._cases(receipt)
    assert cases["found in every language"][0] == ("everywhere", [0, 0])
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
