"""Where the weights of a model come from, and under which licence the whole may be passed on.

A folder may say so itself in `provenance.json`, a list with an entry for each part:
`{"part", "source", "sha256", "layout", "license", "tensors"}`. Otherwise a tower's configuration names the Hub id or
folder that it was loaded from, whose model card states a licence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..conversion.provenance import SONAR_LICENSE, known_license, read_provenance
from ..modeling_supclap import SupCLAPModel

# They ask for no more than to be named, so that Apache-2.0, the licence of this code, can hold for the whole.
PERMISSIVE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "unlicense"}


@dataclass(frozen=True)
class Origin:
    """Where the weights of one part started from.

    Args:
        part: `audio tower`, `text tower` or `whole model`.
        kind: model type of the part, such as `ced` or `m2m_100`.
        source: Hub id, folder or address; empty where the weights were drawn at random.
        license: in the Hub's notation; empty where it is not known.
        sha256: of the file that the weights were converted from, if a conversion wrote it down.
        layout: of that file.
        tensors: their number in that file.
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
        is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", self.source) and not os.path.isdir(self.source)
        return self.source if is_id else None


def origins(model: SupCLAPModel, base_model: str | None = None) -> list[Origin]:
    """The origin of both towers, and of the whole model where training continued one.

    Args:
        model: whose configurations name what the towers were loaded from.
        base_model: id or folder of the model that training continued; None takes it from the model.
    """
    config: Any = model.config
    whole = base_model or model.name_or_path
    recorded = read_provenance(whole) if whole else []
    found = [
        _tower(part, tower.model_type, str(getattr(tower, "_name_or_path", "") or ""), recorded)
        for part, tower in (("audio tower", config.audio_config), ("text tower", config.text_config))
    ]
    if whole:
        found.append(Origin("whole model", config.model_type, _public(whole), stated_license(whole)))
    return found


def license_of(parts: Iterable[Origin]) -> str:
    """The licence of a model with these parts, in the Hub's notation.

    A part for non-commercial use binds the whole; permissive parts and weights of one's own make Apache-2.0; anything
    else, or a source whose licence is not known, makes `other`.

    >>> license_of([Origin("audio tower", "ced", "mispeech/ced-base", "apache-2.0"), Origin("text tower", "bert")])
    'apache-2.0'
    """
    parts = list(parts)
    stated = {part.license for part in parts if part.license}
    if bound := sorted(license for license in stated if "-nc" in license):
        return bound[0] if len(bound) == 1 else "other"
    # Of a model that was continued, what it was made of says enough.
    made_of = [part for part in parts if part.part != "whole model"]
    is_known = all(part.license for part in made_of) or not any(part.source and not part.license for part in parts)
    return "apache-2.0" if stated <= PERMISSIVE and is_known else "other"


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
    entries: list[Mapping[str, Any]] = [entry for entry in (*recorded, *own) if word in str(entry["part"])]
    entries = entries or [*own[:1]]
    if entries:
        entry = entries[0]
        fields = {name: entry.get(name) for name in ("sha256", "layout", "tensors")}
        license = str(entry.get("license") or "").lower()
        return Origin(part, kind, _public(str(entry["source"] or "")), license or _assumed(kind), **fields)
    return Origin(part, kind, _public(source), (stated_license(source) if source else "") or _assumed(kind))


def _assumed(kind: str) -> str:
    # Both public families of such encoders, SONAR and NLLB, are CC-BY-NC-4.0: rather too strict than too free.
    return SONAR_LICENSE if kind == "m2m_100" else ""


def _public(source: str) -> str:
    """A source as others may read it: of a folder on this machine only its name."""
    return Path(source).name if os.path.isabs(source) else source
