"""Where the parts of a model come from and under which license: `provenance.json`, and what public checkpoints state.

A conversion or a run writes the file into the folder of the model, the next run and the model card read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts.atomic_files import write_json

PROVENANCE_FILE = "provenance.json"
# Of SONAR and of NLLB, the two public families of such text encoders, as their model cards state.
SONAR_LICENSE = "cc-by-nc-4.0"
# Repositories of the Hub (regular expressions) whose cards state these; whatever is not here is looked up there.
KNOWN_LICENSES = {
    r"mispeech/(ced|dasheng)-[\w.]+": "apache-2.0",
    r"cointegrated/SONAR.*": SONAR_LICENSE,
    r"facebook/nllb-200.*": SONAR_LICENSE,
    r"sentence-transformers/LaBSE": "apache-2.0",
    r"laion/(clap-htsat-|larger_clap_).*": "apache-2.0",
    r"lukewys/laion_clap": "cc0-1.0",
    r"microsoft/msclap": "mit",
}


@dataclass(frozen=True)
class Part:
    """Where a part of a converted model comes from: an entry of `provenance.json`.

    Args:
        part: Its name in a `SupCLAPModel`, such as `audio_model`.
        source: The Hub id, or the name of the file or folder, of the checkpoint.
        revision: The commit, of a Hub repository.
        files: The names of the weight files.
        sha256: Their checksum.
        layout: The layout that was recognised.
        license: What the checkpoint states, or what binds every file of its layout; empty where neither is known.
        tensors: How many the part has.
        parameters: How many weights the part has.
    """

    part: str
    source: str
    revision: str | None
    files: tuple[str, ...]
    sha256: str
    layout: str
    license: str
    tensors: int
    parameters: int


def known_license(repository: str) -> str:
    """The license that the card of a public repository is known to state; empty where it is not known."""
    for pattern, license in KNOWN_LICENSES.items():
        if re.fullmatch(pattern, repository):
            return license
    return ""


def read_provenance(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of a folder's `provenance.json`; none where there is no such file.

    Args:
        folder: That of a model; it need not exist.

    Raises:
        ValueError: The file is no list of mappings with a part and a source.
    """
    path = Path(folder) / PROVENANCE_FILE
    if not path.is_file():
        return []

    entries = json.loads(path.read_text(encoding="utf-8"))
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or not {"part", "source"} <= entry.keys():
            raise ValueError(
                f"{path} must be a list of mappings with part, source, sha256, layout, license and tensors"
            )
    return entries


def write_provenance(folder: str | Path, parts: Iterable[Any]) -> None:
    """Writes `provenance.json`, so that whoever continues from this folder knows what it was made of.

    Args:
        folder: That of the model; it must exist.
        parts: Dataclasses with at least `part` and `source`: `Part` or `model_card.Origin`.
    """
    write_json(Path(folder) / PROVENANCE_FILE, list(map(asdict, parts)), indent=2, ensure_ascii=True)
