"""Figures of a run contain the logged values, and files are written atomically."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from modeling_supclap.training.plots import plot_drift, plot_training_curves

HISTORY = [{"step": step, "loss": 5.0 - step / 10, "clips_per_second": 100.0} for step in range(0, 40, 10)]
EVALUATED = [{"step": 30, "eval_mean_recall": 0.5, "eval_eng_t2a_R@1": 0.3}]


@pytest.fixture
def drawn(monkeypatch):
    """List of the axes of the saved figures."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw))
    return figures


def test_panels_follow_the_log(tmp_path):
    plot_training_curves(HISTORY, tmp_path / "narrow.png")
    plot_training_curves(HISTORY + EVALUATED, tmp_path / "wide.png")
    narrow, wide = imread(tmp_path / "narrow.png"), imread(tmp_path / "wide.png")
    assert wide.shape[1] == pytest.approx(2 * narrow.shape[1], abs=2)
    assert wide[..., :3].std() > 0.05
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("suffix", "start"), [(".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_a_picture_has_the_format_of_its_suffix(tmp_path, suffix, start):
    path = tmp_path / f"figure{suffix}"
    plot_training_curves(HISTORY, path)
    assert path.read_bytes().startswith(start)


def test_an_empty_log_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"\b1\b"):
        plot_training_curves([{"step": 1, "total_flos": 3}], tmp_path / "none.png")


def test_the_chance_level_is_a_line_in_the_panel_of_the_recall(tmp_path, drawn):
    levels = {"eval_mean_recall": 0.125, "eval_eng_t2a_R@1": 0.0625}
    evaluated = [{"step": step, **dict.fromkeys(levels, step / 100)} for step in (10, 30)]
    for entry in evaluated:
        entry |= {f"{name}_chance": level for name, level in levels.items()}
    plot_training_curves(HISTORY + evaluated, tmp_path / "curves.png")
    _, recall = drawn[0].axes
    dotted = [line for line in recall.lines if line.get_linestyle() == ":"]
    assert [set(line.get_ydata()) for line in dotted] == [{0.125}, {0.0625}]
    names = ["mean_recall", "chance of mean_recall", "eng_t2a_R@1"]
    assert recall.get_legend_handles_labels()[1] == [*names, "chance of eng_t2a_R@1"]


def test_an_axis_does_not_magnify_noise(tmp_path, drawn):
    history = [{"step": step, "temperature": 0.0652 + step * 1e-5, "loss": 10.0 - step} for step in range(8)]
    plot_training_curves(history, tmp_path / "curves.png")
    loss, temperature = drawn[0].axes
    low, high = temperature.get_ylim()
    assert (high - low, (low + high) / 2) == pytest.approx((0.0065, 0.0652), rel=0.01)
    assert loss.get_ylim() == pytest.approx((3.0, 10.0), abs=0.5)  # a real change fills the panel


def test_throughput_is_no_curve_of_learning(tmp_path, drawn):
    plot_training_curves(HISTORY, tmp_path / "curves.png")
    assert [axes.get_title() for axes in drawn[0].axes] == ["training loss"]


# ---- drift ----


def drift_history(steps=range(10, 210, 10), radius=True):
    """Return a log in which the pairs move from the first to the last of four bins, and the radius falls."""
    history = []
    for place, step in enumerate(steps):
        counts = [0, 0, 0, 0]
        counts[4 * place // len(steps)] = 24
        histogram = {"low": -1.0, "high": 1.0, "counts": counts}
        entry = {"step": step, "drift_cosine": 0.5, "drift_cosine_objective": 0.9}
        spread = {"radius_mean_t2a": 1 / step, "radius_std_t2a": 0.01} if radius else {}
        spread |= {"radius_mean_a2t": 2 / step, "radius_std_a2t": 0.0} if radius else {}
        history += [{**entry, **spread, "positive_similarity_histogram": histogram}, {"step": step, "eval_loss": 1.0}]
    return history


def test_drift_is_drawn_as_the_paper_s_figures(tmp_path, drawn):
    plot_drift(drift_history(), tmp_path / "drift.png")
    drift, radius, similarity = drawn[0].axes
    lines = {line.get_label(): line.get_xydata() for line in drift.lines}
    assert list(lines) == ["InfoNCE, text to audio", "whole objective"]
    np.testing.assert_array_equal(lines["whole objective"], [[step, 0.9] for step in range(10, 210, 10)])
    assert [line.get_label() for line in radius.lines] == ["t2a", "a2t"]
    for line, factor in zip(radius.lines, (1, 2), strict=True):
        np.testing.assert_allclose(line.get_ydata(), [factor / step for step in range(10, 210, 10)])
    band = radius.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((1 / 200 - 0.01, 1 / 10 + 0.01))
    shares = {}
    for patch in similarity.patches:
        shares[patch.get_label()] = patch.get_data().values.tolist(), patch.get_data().edges.tolist()
    middle = [0.5, 0.5], [-0.5, 0, 0.5]
    assert shares == {"start": ([1], [-1, -0.5]), "middle": middle, "end": ([1], [0.5, 1])}
    assert imread(tmp_path / "drift.png")[..., :3].std() > 0.05
    assert not list(tmp_path.glob("*.tmp"))


def test_each_reading_of_the_paper_s_cosine_has_a_panel_of_its_own(tmp_path, drawn):
    readings = {"drift_cosine_difference": 0.3, "drift_cosine_target": 0.7}
    history = [{**entry, **readings} if "drift_cosine" in entry else entry for entry in drift_history()]
    plot_drift(history, tmp_path / "drift.png")
    assert len(drawn[0].axes) == 5
    assert drawn[0].axes[0].get_subplotspec().get_gridspec().get_geometry() == (2, 3)
    for axes, title, value in zip(drawn[0].axes[1:3], ("along a - t", r"along a\+"), (0.3, 0.7), strict=True):
        (line,) = axes.lines
        assert (line.get_label(), set(line.get_ydata())) == ("InfoNCE, text to audio", {value})
        assert re.search(title, axes.get_title())


def test_without_a_radius_its_panel_is_left_out(tmp_path, drawn):
    plot_drift(drift_history(radius=False), tmp_path / "drift.png")
    assert [axes.get_xlabel() for axes in drawn[0].axes] == ["step", "cosine"]


def test_one_log_is_enough(tmp_path, drawn):
    plot_drift(drift_history(steps=[10]), tmp_path / "drift.png")
    assert len(drawn[0].axes) == 3


def test_a_run_without_drift_logs_is_reported(tmp_path):
    with pytest.raises(ValueError, match="drift"):
        plot_drift(HISTORY, tmp_path / "none.png")
