"""`provenance.json`: where the parts of a model come from. A conversion or a run writes it, the next run reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts.atomic_files import write_json

PROVENANCE_FILE = "provenance.json"
# Of SONAR and of NLLB, the two public families of such text encoders, as their model cards state.
SONAR_LICENSE = "cc-by-nc-4.0"


def read_provenance(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of a folder's `provenance.json`; none where there is no such file.

    Args:
        folder: of a model; it need not exist.

    Raises:
        ValueError: the file is no list of mappings with a part and a source.
    """
    path = Path(folder) / PROVENANCE_FILE
    if not path.is_file():
        return []
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and {"part", "source"} <= e.keys() for e in entries
    ):
        raise ValueError(f"{path} must be a list of mappings with part, source, sha256, layout, license and tensors")
    return entries


def write_provenance(folder: str | Path, parts: Iterable[Any]) -> None:
    """Writes `provenance.json`, so that whoever continues from this folder knows what it was made of.

    Args:
        folder: of the model; must exist.
        parts: dataclasses with at least `part` and `source`: `conversion.layouts.Part` or `model_card.Origin`.
    """
    write_json(Path(folder) / PROVENANCE_FILE, [asdict(part) for part in parts], indent=2, ensure_ascii=True)
