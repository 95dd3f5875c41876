"""The cards of the metrics, whose examples are to run as printed."""

import re
from pathlib import Path

METRICS = Path(__file__).parents[1] / "metrics"


def run_card(name: str, num_blocks: int) -> None:
    """Runs the Python blocks of a card one after the other, from the working directory."""
    card = (METRICS / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == num_blocks
    exec("\n".join(blocks), {})
