"""Where the weights of a model come from, and under which license the whole may be passed on.

A conversion or a run writes it into the folder of the model, as `provenance.json`: a list with an entry for each part,
which the next run and the model card read. Where there is none, a tower's configuration names the Hub id or folder that
it was loaded from, whose model card states a license.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.public_names import public_name

from ..hub_ids import is_hub_id
from ..modeling_supclap import SupCLAPModel

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


# They ask for no more than to be named, so that Apache-2.0, the license of this code, can hold for the whole.
PERMISSIVE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "unlicense"}


@dataclass(frozen=True)
class Origin:
    """Where the weights of a part of a model started from: an entry of `provenance.json`.

    Args:
        part: Its name in a converted `SupCLAPModel`, such as `audio_model`; of a run `audio tower`, `text tower` or
            `whole model`.
        kind: Its model type, such as `ced` or `m2m_100`; empty where it has none.
        source: The Hub id, or the name of the file or folder, of the checkpoint, or an address; empty where the weights
            were drawn at random.
        license: In the Hub's notation: what the checkpoint states, or what binds every file of its layout; empty where
            neither is known.
        sha256: The checksum of the weight files, where they were converted.
        layout: The layout that was recognised then.
        tensors: How many the part has.
        revision: The commit, of a Hub repository.
        files: The names of the weight files.
        parameters: How many weights the part has.
    """

    part: str
    kind: str = ""
    source: str = ""
    license: str = ""
    sha256: str | None = None
    layout: str | None = None
    tensors: int | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    parameters: int | None = None

    @property
    def hub_id(self) -> str | None:
        """The source as `owner/name`, if it is a repository of the Hub."""
        return self.source if "/" in self.source and is_hub_id(self.source) else None


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


def write_provenance(folder: str | Path, parts: Iterable[Origin]) -> None:
    """Writes `provenance.json` into a model's folder, so that whoever continues from it knows what it was made of."""
    write_json(Path(folder) / PROVENANCE_FILE, list(map(asdict, parts)), indent=2, ensure_ascii=True)


def origins(model: SupCLAPModel, base_model: str | None = None) -> list[Origin]:
    """The origin of both towers, and of the whole model where training continued one.

    Args:
        model: Whose configurations name what the towers were loaded from.
        base_model: Id or folder of the model that training continued; None takes it from the model.
    """
    config: Any = model.config
    whole = base_model or model.name_or_path
    recorded = read_provenance(whole) if whole else []

    found = []
    for part, tower in (("audio tower", config.audio_config), ("text tower", config.text_config)):
        found.append(_tower(part, tower.model_type, str(getattr(tower, "_name_or_path", "") or ""), recorded))
    if whole:
        found.append(Origin("whole model", config.model_type, public_name(whole), stated_license(whole)))
    return found


def license_of(parts: Iterable[Origin]) -> str:
    """The license of a model with these parts, in the Hub's notation.

    A part for non-commercial use binds the whole; permissive parts and weights of one's own make Apache-2.0; anything
    else, or a source whose license is not known, makes `other`.

    >>> license_of([Origin("audio tower", "ced", "mispeech/ced-base", "apache-2.0"), Origin("text tower", "bert")])
    'apache-2.0'
    """
    stated, bound = set(), set()
    lacks, towers_lack = False, False
    for part in parts:
        stated.add(part.license)
        if "-nc" in part.license:
            bound.add(part.license)
        lacks = lacks or bool(part.source and not part.license)
        towers_lack = towers_lack or (part.part != "whole model" and not part.license)
    if bound:
        return bound.pop() if len(bound) == 1 else "other"

    # Of a model that was continued, what it was made of says enough.
    is_known = not (lacks and towers_lack)
    return "apache-2.0" if stated - {""} <= PERMISSIVE and is_known else "other"


def stated_license(source: str) -> str:
    """The license of a Hub id or folder: a known one, or the one in its model card; empty where there is none."""
    if known := known_license(source):
        return known
    card = Path(source) / "README.md"
    if os.path.isdir(source) and not card.is_file():
        return ""
    try:
        data = ModelCard.load(card if card.is_file() else source).data
    except Exception:  # no such repository, no network, no card, broken YAML: none of them tells a license
        return ""
    return str(data.license or "").lower()


def _tower(part: str, kind: str, source: str, recorded: Iterable[Mapping[str, Any]]) -> Origin:
    """What the whole model's folder recorded of a tower, else what the tower's own folder did, else its name."""
    word = part.split()[0]
    own = read_provenance(source) if source else []
    entries = [entry for entry in (*recorded, *own) if word in str(entry["part"])] or own[:1]
    # Both public families of such encoders, SONAR and NLLB, are CC-BY-NC-4.0: rather too strict than too free.
    assumed = SONAR_LICENSE if kind == "m2m_100" else ""
    if not entries:
        return Origin(part, kind, public_name(source), (stated_license(source) if source else "") or assumed)

    entry = {each.name: entries[0][each.name] for each in fields(Origin) if each.name in entries[0]}
    entry |= {"part": part, "kind": kind, "source": public_name(str(entry["source"] or ""))}
    entry["license"] = str(entry.get("license") or "").lower() or assumed
    return Origin(**entry)
