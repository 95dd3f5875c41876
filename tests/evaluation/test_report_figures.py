"""Figures of the report: drawn from the results, or omitted with a message."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from results_fixtures import NUM_CLIPS, make_results

from modeling_supclap.evaluation import report_figures
from modeling_supclap.evaluation.report import render_report
from modeling_supclap.evaluation.results import Results


@pytest.fixture
def results(tmp_path):
    return make_results(tmp_path)


def test_figures_are_drawn_from_the_numbers(results):
    drawn = dict(report_figures.figures(results))
    assert all(drawn["similarity"].count(f">{name}<") == 1 for name in ("eng", "fra", "correct pairs", "wrong pairs"))
    assert all(svg.startswith("<svg") and "http" not in svg.split(">", 1)[1] for svg in drawn.values())
    moved = Results(results.content, {**results.arrays, "similarity/fra/positive": np.full(NUM_CLIPS, -0.9)})
    assert dict(report_figures.figures(moved))["similarity"] != drawn["similarity"]


def test_a_panel_has_the_shares_of_correct_and_wrong_pairs(results, monkeypatch):
    figures = []
    monkeypatch.setattr(report_figures, "_svg", lambda figure, label: figures.append(figure) or label)
    for number, language in enumerate(["eng", "fra", "deu"]):
        results.arrays[f"similarity/{language}/positive"] = np.array([0.0, 0.5, 0.5 + 0.1 * number])
        results.arrays[f"similarity/{language}/negative"] = np.array([-0.3, -0.3 + 0.1 * number])
    label = report_figures.similarity_figure(results, ["eng", "fra", "deu"])
    assert label == "Histograms of the cosine of correct pairs in eng, fra, deu and of wrong pairs"
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == ["eng", "fra", "deu"]
    (legend,) = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == ["correct pairs", "wrong pairs"]
    for number, axes in enumerate(figure.axes):
        correct, wrong = (stairs.get_data() for stairs in axes.patches)
        assert (correct.edges[0], correct.edges[-1], len(correct.edges)) == (-0.3, 0.7, 41)
        assert sorted(correct.values)[-3:] == pytest.approx([0, 1 / 3, 2 / 3] if number == 0 else [1 / 3] * 3)
        assert wrong.values[0] == 1, "the wrong pairs are those of the first language"
        assert [stairs.get_fill() for stairs in axes.patches] == [True, False]


def test_without_scikit_learn_the_page_names_the_extra(results, monkeypatch):
    monkeypatch.setattr(report_figures, "find_spec", lambda name: None)
    page = render_report(results)
    assert "The embedding space" not in page
    assert "scikit-learn (the extra <code>report</code>)" in page


def test_the_axis_is_that_of_the_cosines(results):
    narrow = {name: values / 10 + 0.2 for name, values in results.arrays.items() if name.startswith("similarity/")}
    drawn = dict(report_figures.figures(Results(results.content, {**results.arrays, **narrow})))["similarity"]
    ticks = [float(text) for text in re.findall(r'id="xtick_.*?>([^<>\s]+)</text>', drawn, re.DOTALL)]
    assert 0.1 < min(ticks) < max(ticks) < 0.3
    alike = {name: np.full_like(values, 0.5) for name, values in narrow.items()}
    assert "<svg" in dict(report_figures.figures(Results(results.content, {**results.arrays, **alike})))["similarity"]


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-5])
def test_a_collapsed_model_has_a_report(results, noise):
    """t-SNE of equal points would end the process with a signal."""
    generator = np.random.default_rng(0)
    for name, values in results.arrays.items():
        if name.startswith(("embeddings/audio", "embeddings/text/")) and values.ndim == 2:
            results.arrays[name] = (0.25 + noise * generator.standard_normal(values.shape)).astype(np.float32)
    assert "<svg" in dict(report_figures.figures(results))["projection"]


def test_a_line_connects_a_caption_and_its_clip(results, monkeypatch):
    positions = np.arange(6 * NUM_CLIPS, dtype=float).reshape(-1, 2)
    monkeypatch.setattr(report_figures, "_tsne", lambda embeds: positions)
    lines = []
    monkeypatch.setattr(report_figures, "_svg", lambda figure, label: lines.extend(figure.axes[0].lines) or "")
    results.arrays["embeddings/text_clip/fra"] = np.arange(NUM_CLIPS)[::-1]
    dict(report_figures.figures(results))
    joined = np.concatenate([np.stack(line.get_data(), axis=1) for line in lines])
    joined = joined[~np.isnan(joined).any(axis=1)].reshape(-1, 2, 2)
    clips, english, french = np.split(positions, 3)
    assert joined[:, 0].tolist() == [*clips.tolist(), *clips[::-1].tolist()]
    assert joined[:, 1].tolist() == [*english.tolist(), *french.tolist()]


def test_the_name_of_a_picture_is_escaped():
    figure = Figure()
    figure.add_subplot().plot([0, 1])
    assert report_figures._svg(figure, '<b> "x"').startswith('<svg role="img" aria-label="&lt;b&gt; &quot;x&quot;"')


def test_a_few_classes_have_colors_of_their_own(results, monkeypatch):
    drawn = []
    monkeypatch.setattr(report_figures, "_svg", lambda figure, label: drawn.append((figure, label)) or "")
    assert "class_colors" not in dict(report_figures.figures(results))  # all clips are dogs
    results.arrays["clips/label"] = np.array(["dog", "cat", "cat"] * 2)
    drawings = dict(report_figures.figures(results))
    assert drawings["class_colors"] == "cat, dog"
    (legend,) = [axes.get_legend() for axes in drawn[-1][0].axes]
    assert [text.get_text() for text in legend.get_texts()] == ["cat", "dog"]
    figure, label = drawn[-1]
    assert "coloured by class: cat, dog" in label
    by_color = {tuple(points.get_facecolor()[0]): len(points.get_offsets()) for points in figure.axes[0].collections}
    assert len(by_color) == 2
    assert list(by_color.values()) == [4, 2]  # cat, dog
    places = np.concatenate([points.get_offsets() for points in figure.axes[0].collections])
    assert all(len(set(column)) > 3 for column in places.T)  # not only one coordinate is drawn
    assert not np.allclose(places[:, 0], places[:, 1])


def test_the_spaces_of_several_models_show_the_same_clips(results, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(report_figures, "_tsne", lambda embeds: shown.append(embeds) or np.arange(18.0).reshape(9, 2))
    report_figures.save_projections({"one": results, "other": results}, tmp_path / "spaces.svg", num_clips=3)
    assert np.array_equal(*shown)
    clips = [
        np.flatnonzero((results.arrays["embeddings/audio"] == embed).all(axis=1)).item() for embed in shown[0][:3]
    ]
    assert clips == sorted(set(clips)) != [0, 1, 2]  # at random
    texts = [results.arrays[f"embeddings/text/{language}"][clips] for language in ("eng", "fra")]
    assert np.array_equal(shown[0][3:], np.concatenate(texts))
    picture = (tmp_path / "spaces.svg").read_text()
    assert [picture.count(f"<!-- {text} -->") for text in ("one", "other", "audio", "eng", "fra")] == [1] * 5


def test_the_spaces_of_several_models_are_one_picture(results, tmp_path):
    report_figures.save_projections({"one": results, "other": results}, tmp_path / "spaces.png")
    header = (tmp_path / "spaces.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20]) > 1.8 * int.from_bytes(header[20:24])  # two beside each other


@pytest.mark.parametrize(("suffix", "start"), [(".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_suffix_sets_the_format_of_the_spaces(results, tmp_path, suffix, start):
    report_figures.save_projections({"one": results}, tmp_path / f"spaces{suffix}")
    assert (tmp_path / f"spaces{suffix}").read_bytes().startswith(start)


def test_equal_similarities_have_a_histogram(results):
    for kind in ("positive", "negative"):
        results.arrays[f"similarity/eng/{kind}"] = np.array([0.5, np.nextafter(np.float32(0.5), 1)], np.float32)
    assert "<svg" in report_figures.similarity_figure(results, ["eng"])
