"""The report page: its content comes from the results, is escaped, and needs no external files."""

import base64
import io
import re

import numpy as np
import pytest
import soundfile
from fake_models import ToneModel
from recordings import tone_rows
from results_fixtures import NUM_CLIPS, make_results

from modeling_supclap.evaluation import options, report, run
from modeling_supclap.evaluation.cache import EmbeddingCache
from modeling_supclap.evaluation.comparison import compare
from modeling_supclap.evaluation.report import render_report, write_report
from modeling_supclap.evaluation.report_figures import similarity_figure
from modeling_supclap.evaluation.results import SECTIONS, Interval, Results, Section, paper_results, score
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.model_card.results import get_card_scores


@pytest.fixture
def results(tmp_path):
    return make_results(tmp_path)


@pytest.fixture
def without_figures(monkeypatch):
    """Leave out t-SNE and histograms, which take most of the time of a page."""
    monkeypatch.setattr(report, "figures", lambda results: {})


def lines_of(page, kind):
    """Return the rows of one kind in all tables, as lists of texts."""
    rows = re.findall(rf'<tr class="{kind}">(.*?)</tr>', page, re.DOTALL)
    return [[re.sub("<small>.*?</small>|<.*?>", "", cell) for cell in re.split("</t[hd]>", row)[:-1]] for row in rows]


@pytest.mark.usefixtures("without_figures")
def test_scores_are_shown_with_interval_and_chance(results):
    page = render_report(results)
    assert lines_of(page, "ours") == [
        ["eng", "43.2", "53.2", "63.2", "48.2", "50.0", "60.0", "70.0", "55.0"],
        ["fra", "30.0", "40.0", "50.0", "35.0", "35.0", "45.0", "55.0", "40.0"],
        ["mean", *["46.0"] * 8],
        ["this model", "7.25"],
        ["fra", "0.125", "0.375"],
        ["eng, supclap", "75.0", "100.0", "75.0"],
        ["eng", "61.0"],
        ["fra", "58.0"],
        ["MRV over the languages", "0.50"],
    ]
    assert lines_of(page, "chance") == [
        ["chance", *["5.0"] * 8],  # of the last row, the mean
        ["chance", "50.0", "", ""],
        ["chance", "33.3"],
        ["an order-blind model", "50.0"],
    ]
    assert "<dt>3A</dt><dd>two consecutive sounds" in page
    assert "33.2 to 53.2" in page
    assert "7.25<small>6.00 to 8.00</small>" in page
    assert re.search(r'style="--share:0.85">17<', page)
    groups = re.findall(r'<th colspan="4" scope="colgroup">(.*?)</th>', page)
    assert groups == ["text to audio", "audio to text"]
    headings = re.findall(r'<th scope="col">(.*?)</th>', page)
    assert headings[:8] == ["R@1", "R@5", "R@10", "mAP@10"] * 2
    assert headings[8:13] == ["MRV", "Gap", "Dis", "eng", "fra"]
    assert headings[13:] == ["top-1 accuracy", "top-5 accuracy", "accuracy, mean over the classes", "cat", "dog", "3A"]
    assert page.count("text to audio") == 2  # above its columns and above its bars, not in each column


def bars_of(page):
    """Return the name, the length in percent, the interval and the chance level of each bar."""
    bars = []
    for name, track in re.findall(r'<span class="name">(.*?)</span>(.*?)<span class="number">', page, re.DOTALL):
        bars.append((name, *re.findall(r"(?:width|left):([\d.]+)%", track)))
    return bars


@pytest.mark.usefixtures("without_figures")
def test_bars_have_the_lengths_of_the_scores(results):
    assert bars_of(render_report(results)) == [
        ("eng", "43.21", "33.21", "20.00", "5.00"),
        ("fra", "30.00", "20.00", "20.00", "5.00"),
        ("mean", "46.00", "5.00"),
        ("eng", "50.00", "40.00", "20.00", "5.00"),
        ("fra", "35.00", "25.00", "20.00", "5.00"),
        ("mean", "46.00", "5.00"),
        ("dog", "100.00"),  # the best class is first
        ("cat", "50.00"),
    ]


@pytest.mark.usefixtures("without_figures")
def test_a_confusion_matrix_has_the_shares_of_each_class(results):
    def cells(page):
        table = page.partition('<table class="confusion">')[2].partition("</table>")[0]
        return re.findall(r"<td(?: style=\"--share:(.*?)\")?>(\d*)</td>", table)[1:]  # without the corner

    results.arrays["zero_shot/eng/supclap/confusion"] = np.array([[17, 3], [0, 0]])  # no clip is a dog
    assert cells(render_report(results)) == [("0.85", "17"), ("0.15", "3"), ("", ""), ("", "")]
    results.arrays["zero_shot/eng/supclap/confusion"] = np.eye(100, dtype=int)
    results.arrays["zero_shot/classes"] = np.array([f"class{number}" for number in range(100)])
    assert len(cells(render_report(results))) == 100 * 100
    results.arrays["zero_shot/eng/supclap/confusion"] = np.eye(101, dtype=int)
    page = render_report(results)
    assert cells(page) == []
    assert ("dog", "100.00") in bars_of(page)


@pytest.mark.usefixtures("without_figures")
def test_language_errors_of_a_run_are_shown_next_to_the_agreement(results):
    results.content["training"] = {"steps": 3, "arguments": {}, "language_errors": {"data_distribution_error": 1.25}}
    page = render_report(results)
    assert page.count("<dt>data distribution error</dt><dd>1.25</dd>") == 1
    results.content["training"]["language_errors"] = {}
    assert "data distribution error" not in render_report(results).casefold()


def in_languages(results, languages):
    """Return the results with the given languages."""
    first = results.scores["retrieval"]["eng"]
    results.protocol["languages"] = languages
    results.scores["retrieval"] = dict.fromkeys(languages, first)
    results.scores["multilingual"] = {"all": results.scores["multilingual"]["all"]}
    results.scores["multilingual"] |= {name: {"Gap": score(0.3), "Dis": score(0.3)} for name in languages[1:]}
    ranks = results.arrays["multilingual/ranks"]
    results.arrays["multilingual/ranks"] = np.repeat(ranks[:, :1], len(languages), axis=1)
    return results


@pytest.mark.parametrize(("count", "panels"), [(1, 1), (2, 2), (3, 3)])
def test_each_language_has_one_panel_of_similarities(results, count, panels):
    languages = ["eng", "fra", "deu"][:count]
    for number, language in enumerate(languages):
        for kind in ("positive", "negative"):
            results.arrays[f"similarity/{language}/{kind}"] = np.linspace(-0.5, 0.5 + 0.1 * number, 20)
    drawing = similarity_figure(results, languages)
    assert drawing.count('id="axes_') == panels
    assert drawing.count('id="legend_') == 1
    assert all(f">{language}<" in drawing or language in drawing for language in languages)


def sections_of(page):
    return list(dict.fromkeys(re.findall(r'<th [^>]*scope="rowgroup">(\w+, table \w+)</th>', page)))


@pytest.mark.usefixtures("without_figures")
def test_papers_are_shown_only_for_the_same_task(results):
    page = render_report(results)
    assert lines_of(page, "paper") == lines_of(page, "best") == []  # a subset of two classes is not ESC-50
    assert "papers" not in page
    results.protocol["classes"] = 50
    page = render_report(results)
    classification, temporal = ["SupCLAP, table 2", "TeminAL, table 4"], ["TeminAL, table 2", "TeminAL, table 3"]
    assert sections_of(page) == [*classification, *temporal]
    best = [["best in papers, eng", "92.1", "", ""], ["best in papers, eng", "54.6"]]  # [S table 2] and [T table 3]
    assert lines_of(page, "best") == best
    results.protocol["dataset"] = "audiocaps"
    # [S table 1] is in English, and ATRI's MRV is over eight languages.
    pages = [("ATRI", (1, 6, 7)), ("SupCLAP", (1, 3, 4, 6, 7, 9)), ("TeminAL", (1, 7)), ("ATRI", (2,))]
    expected = [f"{paper}, table {number}" for paper, numbers in pages for number in numbers]
    assert sections_of(render_report(results)) == expected
    page = render_report(in_languages(results, list(LANGUAGES)))
    more = ["SupCLAP, table 8", "SupCLAP, table 11", "SupCLAP, table 12", "SupCLAP, table 13"]
    assert set(sections_of(page)) - set(expected) == {*more, "ATRI, table 3", "ATRI, table 8"}
    assert sections_of(page).index("SupCLAP, table 9") < sections_of(page).index("SupCLAP, table 11")
    assert ["KCL (8 languages)", "7.52"] in lines_of(page, "paper")
    assert ["KCL (fra)", "0.145", "0.274"] in lines_of(page, "paper")


@pytest.mark.usefixtures("without_figures")
def test_papers_are_shown_only_for_their_test_split_and_languages(results):
    results.protocol.update({"dataset": "prepared", "origin": "audiocaps"})
    names = [line[0] for line in lines_of(render_report(results), "paper")]
    assert any("(fra)" in name for name in names)
    assert not any("(jpn)" in name or "8 languages" in name for name in names)
    assert "audiocaps (as prepared), split" in render_report(results)
    results.protocol["split"] = "train+test"
    assert [line[0] for line in lines_of(render_report(results), "paper")] == names
    results.protocol["split"] = "validation"
    assert lines_of(render_report(results), "paper") == []


@pytest.mark.usefixtures("without_figures")
def test_the_best_numbers_of_the_papers_need_not_be_of_all_metrics(results, monkeypatch):
    results.protocol["dataset"] = "audiocaps"
    entries = [entry for entry in paper_results(dataset="audiocaps") if entry["metric"] != "R@5"]
    monkeypatch.setattr(report, "paper_results", lambda **selected: entries)
    page = render_report(results)
    assert "best in papers, eng" in [line[0] for line in lines_of(page, "best")]
    unfolded = re.sub("<details>.*?</details>", "", page, flags=re.DOTALL)
    assert lines_of(unfolded, "paper") == []


@pytest.mark.usefixtures("without_figures")
def test_only_the_best_numbers_of_the_papers_are_expanded(results):
    results.protocol["dataset"] = "audiocaps"
    page = render_report(in_languages(results, list(LANGUAGES)))
    unfolded = re.sub("<details>.*?</details>", "", page, flags=re.DOTALL)
    assert lines_of(unfolded, "paper") == []
    assert "<details open" not in page.split("<h2>Zero-shot")[0]
    best = {line[0]: line[1:] for line in lines_of(unfolded, "best")}
    assert list(best) == [f"best in papers, {name}" for name in ("eng", "mean of 8", "8 languages")]
    english = paper_results(dataset="audiocaps", language="eng", direction="t2a", metric="R@1")
    assert best["best in papers, eng"][0] == f"{100 * max(entry['value'] for entry in english):.1f}"
    assert best["best in papers, 8 languages"] == ["7.52"]  # of the ranks' variance, the least is best
    # Our scores and figures come before the rows of the papers.
    assert page.index('<tr class="best"') > page.index('<tr class="chance"') > page.index('<tr class="ours"')
    assert page.index("<summary>") > page.index('class="bars"')


@pytest.mark.usefixtures("without_figures")
def test_the_page_shows_why_scores_are_not_comparable(results):
    plain = " ".join(render_report(results).split())
    assert re.search(r"\b6 clips.*\b1 more.*\b6 captions.*eng, fra", plain)
    assert "<dt>missing clips</dt><dd>gone</dd>" in plain
    for phrase in ("1,234 recordings", "3 of the recordings", "reach 100", "folds 1, 2", "over the folds"):
        assert phrase not in plain
    results.protocol.update(
        {
            "without_rows": {"missing": 1234, "examples": ["lost.wav"], "left_out": {}},
            "shared_sources": {"with": "train", "count": 3, "examples": []},
            "positives": "captions",
            "folds": [1, 2],
            "captions": {"eng": 6, "fra": 5},
        }
    )
    results.scores["zero_shot"]["eng"]["supclap"]["mean_over_folds"] = results.scores["zste"]["eng"]["3A"]
    page = " ".join(render_report(results).split())
    for phrase in (
        "1,234 recordings",
        "3 of the recordings",
        "reach 100",
        "folds 1, 2: 6 clips",
        "5 captions in fra, 6 captions in eng",
        "over the folds",
    ):
        assert phrase in page


@pytest.mark.usefixtures("without_figures")
def test_the_page_describes_only_existing_scores(results):
    plain = " ".join(render_report(results).split())
    assert "embeddings in eng" in plain
    assert "95% intervals" in plain
    results.protocol["intervals"]["num_resamples"] = 0
    assert "intervals (" not in " ".join(render_report(results).split())
    # Without English the distances are to the first language.
    assert "embeddings in fra" in " ".join(render_report(in_languages(results, ["fra", "deu"])).split())


def test_captions_have_a_language_attribute(results):
    english = render_report(results)
    assert '<strong lang="eng">' in english
    assert '<th scope="row" lang="eng">everywhere' in english
    # Browsers do not know "zho" and would show Chinese text with Japanese glyphs.
    results.arrays |= {name.replace("fra", "zho"): values for name, values in results.arrays.items() if "fra" in name}
    chinese = render_report(in_languages(results, ["zho", "fra"]))
    assert '<strong lang="zh">' in chinese
    assert '<th scope="row" lang="zh">everywhere' in chinese


def test_the_page_supports_screen_readers_and_the_keyboard(results):
    page = render_report(results)
    assert all('aria-label="' in player for player in re.findall("<audio.*?>", page))
    assert all('role="img" aria-label="' in picture for picture in re.findall("<svg.*?>", page))
    assert all("scope=" in head for head in re.findall("<th.*?>", page) if head != "<thead>")
    assert page.count('<div class="wide"') == page.count('<div class="wide" tabindex="0" role="region" aria-label="')


def test_the_page_needs_nothing_from_outside_and_is_escaped(results):
    page = render_report(results)
    assert "<title>folder &lt;b&gt; on esc50, 2 of 50 classes, test</title>" in page
    assert "folder <b>" not in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "@import" not in page.split("</style>")[0]
    assert render_report(results) == page


def test_hits_and_misses_have_audio(results):
    clips = zip(results.arrays["clips/id"].tolist(), results.arrays["clips/audio_path"].tolist(), strict=True)
    rows = [{"clip_id": clip, "audio_path": path} for clip, path in clips]
    page = render_report(results, rows)
    sounds = re.findall(r'src="data:audio/mpeg;base64,([^"]*)"', page)
    # Three hits; three misses, one without its recording, each with the top-ranked clip.
    assert len(sounds) == 3 + 2 + 3
    waveform, rate = soundfile.read(io.BytesIO(base64.b64decode(sounds[0])))
    assert rate == 16000
    assert abs(len(waveform) - 8000) < 2500  # MP3 pads
    assert page.count("recording not available") == 1
    assert "clip at rank 6" in page  # 1 is first, as for R@1 and the mean rank


@pytest.mark.usefixtures("without_figures")
def test_a_few_hits_and_misses_are_spread_over_the_captions(results, tmp_path):
    ranks = np.array([0] * 10 + [7] + [0] * 4)
    results.arrays |= {"retrieval/eng/t2a/rank": ranks, "retrieval/eng/t2a/top": np.full((15, 1), 5)}
    results.arrays["captions/eng/text"] = np.array([f"caption {number}" for number in range(15)])
    results.arrays["captions/eng/clip"] = np.arange(15) % NUM_CLIPS
    results.arrays["clips/label"] = np.array(["dog"] * 5 + [""])
    page = render_report(results).partition("<h2>Listen</h2>")[2].partition("<h2>")[0]
    hits, misses = page.split("<h3>Captions with another clip at rank 1</h3>")
    assert re.findall(r"caption (\d+)<", hits) == ["0", "4", "9", "14"]  # of the 14 hits, those at 0, 4, 9 and 13
    assert re.findall(r"caption (\d+)<", misses) == ["10"]
    assert re.findall("<small>(.*?)</small>", hits) == ["correct clip at rank 1"] * 4
    assert re.findall("<small>(.*?)</small>", misses) == ["correct clip at rank 8", "rank 1: 5"]  # it has no label

    results.arrays["retrieval/eng/t2a/rank"] = np.zeros(15, int)
    page = render_report(results)
    assert "Captions with their clip at rank 1" in page
    assert "Captions with another clip at rank 1" not in page


@pytest.mark.usefixtures("without_figures")
def test_long_recordings_are_cropped_and_bad_ones_are_not_available(results, tmp_path):
    soundfile.write(tmp_path / "long.wav", 0.1 * np.sin(np.arange(12 * 8000) / 7), 8000)
    (tmp_path / "bad.wav").write_bytes(b"RIFF nothing of use")
    names = ["long.wav", "bad.wav", "gone.wav"]
    rows = [{"clip_id": str(clip), "audio_path": str(tmp_path / name)} for clip, name in enumerate(names)]
    page = render_report(results, rows)
    sounds = re.findall(r'src="data:audio/mpeg;base64,([^"]*)"', page)
    assert len(sounds) == 1 + 3  # a hit, and the top-ranked clip of three misses
    waveform, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(sounds[0])))
    assert len(waveform) / rate_hz == pytest.approx(10, abs=0.2)
    # The other hits are of clips 2 and 4, the misses of clips 1, 3 and 5.
    assert page.count("recording not available") == 5


def test_cases_are_the_extremes_without_repeats(results):
    assert report._cases(results) == {
        "highest in every language": [
            {"text": "everywhere", "ranks": [1, 1]},
            {"text": "e", "ranks": [1, 2]},
            {"text": "b", "ranks": [4, 5]},
            {"text": "d", "ranks": [6, 6]},
        ],
        "the languages disagree": [
            {"text": "torn", "ranks": [1, 10]},
            {"text": "b", "ranks": [4, 5]},
            {"text": "e", "ranks": [1, 2]},
        ],
    }

    results.arrays["multilingual/ranks"] = np.ones((6, 3), int)
    assert list(report._cases(results)) == ["highest in every language"]  # equal ranks are no disagreement


@pytest.mark.parametrize("task", ["retrieval", "zero_shot", "zste"])
def test_results_of_one_task_have_a_page(results, task):
    prefixes = {"retrieval": ("clips", "captions", "retrieval", "similarity")}.get(task, ("clips", task))
    alone = Results(
        {**results.content, "scores": {task: results.scores[task]}},
        {name: values for name, values in results.arrays.items() if name.startswith(prefixes)},
    )
    titles = re.findall("<h2>(.*?)</h2>", render_report(alone))
    own = {
        "retrieval": "Retrieval",
        "zero_shot": "Zero-shot classification",
        "zste": "Zero-shot temporal evaluation (ZSTE)",
    }
    assert own[task] in titles
    assert not {title for other, title in own.items() if other != task} & set(titles)


def test_a_report_of_saved_results_is_written_atomically(results, tmp_path, monkeypatch):
    results.save(tmp_path / "results")
    path = write_report(tmp_path / "results", str(tmp_path / "report.html"))
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == render_report(results)
    monkeypatch.setattr(report, "_samples", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(results, path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        write_report(tmp_path / "elsewhere", path)


@pytest.mark.usefixtures("without_figures")
def test_recordings_in_the_rows_are_played(results):
    sound = (3000 * np.sin(np.arange(8000) / 7)).astype("<i2").tobytes()
    rows = [{"clip_id": str(clip), "samples": sound, "sampling_rate_hz": 16000} for clip in reversed(range(NUM_CLIPS))]
    page = render_report(results, rows)
    assert "recording not available" not in page
    assert len(set(re.findall(r'src="data:audio/mpeg;base64,([^"]*)"', page))) == 1


def verdicts_of(results):
    return re.findall(r"<p>(.*?)</p>", render_report(results).split('class="verdict">')[1].split("</div>")[0])


@pytest.mark.usefixtures("without_figures")
def test_the_page_starts_with_a_summary(results):
    recall = "Captions in eng retrieve their clip at rank 1 in {} % of the cases (chance 5.0 %; interval {} %){}."
    temporal = "The order of two consecutive sounds is recognised in {} % of the cases (chance 33.3 %, an order-blind "
    temporal += "model 50.0 %{}){}."
    assert verdicts_of(results) == [
        recall.format("43.2", "33.2 to 53.2", ""),
        "Clips are assigned the correct class in 75.0 % of the cases (chance 50.0 %; interval 60.0 to 90.0 %).",
        temporal.format("61.0", "", ""),
    ]
    no_better, not_significant = ": no better than {}", ": not significantly better than {}"
    for value, interval, words in (
        (0.06, (0.05, 0.09), not_significant),
        (0.05, (0.04, 0.09), no_better),
        (0.06, (0.051, 0.09), ""),
    ):
        results.scores["retrieval"]["eng"]["t2a"]["R@1"] = score(value, interval, 0.05)
        ends = " to ".join(f"{100 * end:.1f}" for end in interval)
        assert verdicts_of(results)[0] == recall.format(f"{100 * value:.1f}", ends, words.format("chance"))
    blind = "an order-blind model"
    results.scores["zste"]["eng"]["3A"] = score(0.45, None, 1 / 3, 1 / 2)
    assert verdicts_of(results)[2] == temporal.format("45.0", "", no_better.format(blind))
    results.scores["zste"]["eng"]["3A"] = score(0.55, (0.45, 0.65), 1 / 3, 1 / 2)
    expected = temporal.format("55.0", "; interval 45.0 to 65.0 %", not_significant.format(blind))
    assert verdicts_of(results)[2] == expected


@pytest.mark.usefixtures("without_figures")
def test_each_task_has_a_table_and_a_sentence(results):
    results.content["scores"] = {
        "zero_shot": {"eng": {"label": {"mAP": score(0.1), "per_class": {}}}},
        "zste": {"eng": {"1A": score(0.9), "3A": score(0.5)}, "all": {"3A": {"MRV": score(0.5)}}},
        "linear_probe": {"logistic_regression": {"top1": score(0.8, None, 0.25), "mean_over_folds": score(0.7)}},
        "few_shot": {
            "1_per_class": {"top1": score(0.3, None, 0.25), "mean_per_class": score(0.35)},
            "5_per_class": {"top1": score(0.6, (0.5, 0.65), 0.25)},
        },
        "audio_to_audio": {"shared_label": {"R@1": score(0.2, None, 0.1), "mAP@10": score(0.15), "num_queries": 9}},
        "mteb": {"accuracy": {"main_score": score(0.45)}},
        "temporal": {"eng": {"stage_a": {"single_accuracy": score(0.75)}}},
    }
    page = render_report(results)
    titles = ["Zero-shot classification", "Zero-shot temporal evaluation (ZSTE)", "Linear probe", "Few-shot probe"]
    titles += ["Audio-to-audio retrieval", "The order of sounds", "Tasks of mteb"]
    assert [title for title in re.findall("<h2>(.*?)</h2>", page) if title in titles] == titles
    assert lines_of(page, "ours") == [
        ["eng, label", "10.0"],
        ["eng", "90.0", "50.0"],
        ["MRV over the languages", "", "0.50"],
        ["logistic regression", "80.0", "70.0"],
        ["1 per class", "30.0", "35.0"],
        ["5 per class", "60.0", ""],
        ["shared label", "20.0", "15.0"],
        ["stage a", "75.0"],
        ["accuracy", "45.0"],
    ]
    assert lines_of(page, "chance") == [["chance", "25.0", ""], ["chance", "25.0", ""], ["chance", "10.0", ""]]
    headings = re.findall(r'<th scope="col">(.*?)</th>', page)
    of_classes = ["top-1 accuracy", "accuracy, mean over the classes"]
    assert [name for name in headings if name not in ("eng", "fra")] == [
        *("mean average precision", "1A", "3A", "top-1 accuracy", "accuracy, mean over the folds", *of_classes),
        *("R@1", "mAP@10", "accuracy, single sounds", "main score"),
    ]
    assert verdicts_of(results)[1:] == [
        "A linear probe assigns clips the correct class in 80.0 % of the cases (chance 25.0 %).",
        "Few-shot, 1 per class: clips are assigned the correct class in 30.0 % of the cases (chance 25.0 %).",
        "Clips retrieve a clip with one of their labels at rank 1 in 20.0 % of the cases (chance 10.0 %).",
    ]


@pytest.mark.usefixtures("without_figures")
def test_the_page_names_the_resampled_units(results):
    results.scores["retrieval"]["eng"]["t2a"]["R@1"] = score(0.4, Interval(0.3, 0.5, 12, "recordings"), 0.05)
    results.scores["zero_shot"]["eng"]["supclap"]["top1"] = score(0.6, Interval(None, None, 2, "recordings"), 0.5)
    verdicts = verdicts_of(results)
    assert verdicts[0].endswith("(chance 5.0 %; interval 30.0 to 50.0 %; 12 recordings (few units)).")
    assert verdicts[1].endswith("(chance 50.0 %; 2 recordings (fewer than 10: no interval)).")
    page = render_report(results)
    assert "Resampled units: 12 recordings (few units)." in page
    assert "Resampled units: 2 recordings (fewer than 10: no interval)." in page


@pytest.mark.usefixtures("without_figures")
def test_the_page_supports_dark_mode_and_small_screens(results):
    style = render_report(results).split("</style>")[0]
    dark = style[style.index("prefers-color-scheme: dark") :]
    assert "svg { filter: invert(1)" in dark
    assert "background: #fff" not in dark
    assert "linear-gradient" in style[style.index(".wide {") :]
    assert "Swipe tables" in render_report(results)


@pytest.mark.usefixtures("without_figures")
def test_a_training_run_and_a_post_training_have_a_page(results):
    results.content["training"] = {"steps": 8, "best_validation": {"eval_mean_recall": 0.5}, "arguments": {"svr": "x"}}
    page = render_report(results)
    assert "<dt>best validation eval_mean_recall</dt><dd>0.5</dd>" in page
    assert "<dt>steps</dt><dd>8</dd>" in page
    assert "<dt>svr</dt><dd>x</dd>" in page
    stages = {
        "before": {"temporal_accuracy": score(0.4, None, 1 / 3, 2 / 3)},
        "stage_b": {
            "temporal_accuracy": score(0.8, (0.7, 0.9), 1 / 3, 2 / 3),
            "order_accuracy": score(0.6, None, 0.5),
        },
    }
    content = {**results.content, "scores": {"temporal": {"eng": stages}}}
    content["protocol"] = {"dataset": "esc50", "split": "held out", "clips": 6, "languages": ["eng"]}
    alone = Results(content, {})
    assert ["stage b", "80.0", "60.0"] in lines_of(render_report(alone), "ours")
    assert re.search(r"own caption .* 80\.0 %", verdicts_of(alone)[0])
    content["training"] = {"arguments": {"hub_token": "hf_secret", "output_dir": "/home/me/runs/one"}}
    page = render_report(alone)
    assert "<dt>output_dir</dt><dd>one</dd>" in page
    assert "hf_secret" not in page


def test_a_new_task_needs_a_function_and_a_section(tmp_path, monkeypatch):
    def count_long_clips(split, options):
        outcomes = {"top1": np.arange(8) % 2.0, "query_id": split.ids, "cluster": split.sources}
        arrays = {f"length/eng/{name}": values for name, values in outcomes.items()}
        return {"length": {"eng": {"top1": score(0.5, None, 0.25)}}}, arrays, {"length": {"seconds": 1}}

    monkeypatch.setattr(options, "TASK_NAMES", (*options.TASK_NAMES, "length"))
    monkeypatch.setitem(run.TASKS, "length", count_long_clips)
    section = Section("Long clips", ("top1",), ("top1", "clips are long"), ("top1",), "zero-shot, long clips")
    monkeypatch.setitem(SECTIONS, "length", section)
    data = {"dataset": "tones", "split": "test"}
    results = run.evaluate(ToneModel(), tone_rows(tmp_path), tasks=["length"], cache=EmbeddingCache(None), data=data)

    page = render_report(results)
    assert "<h2>Long clips</h2>" in page
    assert ["eng", "50.0"] in lines_of(page, "ours")
    assert "Clips are long in 50.0 %" in verdicts_of(results)[0]
    assert "length eng top1" in results.table()
    assert [(each.task, each.metric) for each in get_card_scores(results.content)] == [
        ("zero-shot, long clips", "top1")
    ]
    assert [row["score"] for row in compare(results, results)] == ["length eng top1"]
    other = Results({**results.content, "protocol": {**results.protocol, "length": {"seconds": 2}}}, results.arrays)
    with pytest.raises(ValueError, match="length"):
        compare(results, other)
