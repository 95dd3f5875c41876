"""Where the weights of a model come from, and under which licence the whole may be passed on.

A folder may say so itself in `provenance.json`, a list with an entry for each part:
`{"part", "source", "sha256", "layout", "license", "tensors"}`. Otherwise a tower's configuration names the Hub id or
folder that it was loaded from, whose model card states a licence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts.public_names import public_name

from ..conversion.provenance import SONAR_LICENSE, known_license, read_provenance
from ..hub_ids import is_hub_id
from ..modeling_supclap import SupCLAPModel

# They ask for no more than to be named, so that Apache-2.0, the licence of this code, can hold for the whole.
PERMISSIVE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "unlicense"}


@dataclass(frozen=True)
class Origin:
    """Where the weights of one part started from.

    Args:
        part: `audio tower`, `text tower` or `whole model`.
        kind: Model type of the part, such as `ced` or `m2m_100`.
        source: Hub id, folder or address; empty where the weights were drawn at random.
        license: In the Hub's notation; empty where it is not known.
        sha256: Of the file that the weights were converted from, if a conversion wrote it down.
        layout: Of that file.
        tensors: Their number in that file.
    """

    part: str
    kind: str
    source: str = ""
    license: str = ""
    sha256: str | None = None
    layout: str | None = None
    tensors: int | None = None

    @property
    def hub_id(self) -> str | None:
        """The source as `owner/name`, if it is a repository of the Hub."""
        return self.source if "/" in self.source and is_hub_id(self.source) else None


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
    """The licence of a model with these parts, in the Hub's notation.

    A part for non-commercial use binds the whole; permissive parts and weights of one's own make Apache-2.0; anything
    else, or a source whose licence is not known, makes `other`.

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
    """The licence of a Hub id or folder: a known one, or the one in its model card; empty where there is none."""
    from huggingface_hub import ModelCard

    if known := known_license(source):
        return known
    card = Path(source) / "README.md"
    if os.path.isdir(source) and not card.is_file():
        return ""
    try:
        data = ModelCard.load(card if card.is_file() else source).data
    except Exception:  # no such repository, no network, no card, broken YAML: none of them tells a licence
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

    entry = entries[0]
    return Origin(
        part,
        kind,
        source=public_name(str(entry["source"] or "")),
        license=str(entry.get("license") or "").lower() or assumed,
        sha256=entry.get("sha256"),
        layout=entry.get("layout"),
        tensors=entry.get("tensors"),
    )
