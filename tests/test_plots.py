"""The picture of a run holds what the run logged, and nothing is left half-written."""

import pytest
from matplotlib.image import imread

from modeling_supclap.plots import plot_training_curves

HISTORY = [{"step": step, "loss": 5.0 - step / 10, "clips_per_second": 100.0} for step in range(0, 40, 10)]
EVALUATED = [{"step": 30, "eval_mean_recall": 0.5, "eval_eng_t2a_R@1": 0.3}]


def test_panels_follow_the_log(tmp_path):
    plot_training_curves(HISTORY, tmp_path / "narrow.png")
    plot_training_curves(HISTORY + EVALUATED, tmp_path / "wide.png")
    narrow, wide = imread(tmp_path / "narrow.png"), imread(tmp_path / "wide.png")
    assert wide.shape[1] == pytest.approx(1.5 * narrow.shape[1], abs=2)
    assert wide[..., :3].std() > 0.05
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="log history of 1 entries"):
        plot_training_curves([{"step": 1, "total_flos": 3}], tmp_path / "none.png")
