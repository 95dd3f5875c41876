"""The examples in the metric cards run as printed, without warnings."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("embedding_gap", 2), ("mrv", 2), ("recall", 3), ("zste", 3), ("clap_score", 2)]
)
def test_the_card_runs(monkeypatch, name, num_blocks):
    monkeypatch.chdir(ROOT)
    card = (ROOT / "metrics" / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == num_blocks
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec("\n".join(blocks), {})
