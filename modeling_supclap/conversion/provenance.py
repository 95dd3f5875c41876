"""Record the origin of a model's weights, and derive the license of the whole model.

Conversions and training runs write `provenance.json` into the model folder, with one entry per model part. If there is
no such file, the origin of a tower is the Hub id or folder in its configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from modeling_supclap.datasets_scripts.atomic_files import read_json, write_json
from modeling_supclap.datasets_scripts.public_names import public_name

from ..hub_ids import is_hub_id
from ..modeling_supclap import SupCLAPModel

PROVENANCE_FILE = "provenance.json"
# The license of SONAR and NLLB, as in their model cards.
SONAR_LICENSE = "cc-by-nc-4.0"
# Regular expression of a Hub id -> license in its model card. For other repositories, the card is read from the Hub.
KNOWN_LICENSES = {
    r"mispeech/(ced|dasheng)-[\w.]+": "apache-2.0",
    r"cointegrated/SONAR.*": SONAR_LICENSE,
    r"facebook/nllb-200.*": SONAR_LICENSE,
    r"sentence-transformers/LaBSE": "apache-2.0",
    r"laion/(clap-htsat-|larger_clap_|clap2-).*": "apache-2.0",
    r"lukewys/laion_clap": "cc0-1.0",
    r"microsoft/msclap": "mit",
}

# Permissive licenses. A model that only has such parts can be Apache-2.0, the license of this code.
PERMISSIVE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "unlicense"}


@dataclass(frozen=True)
class Origin:
    """Origin of the weights of one model part: an entry in `provenance.json`.

    For a converted checkpoint, the part is a submodule such as `audio_model`. For a training run, it is `audio tower`,
    `text tower` or `whole model`. The fields after `license` are recorded only for converted checkpoints.
    """

    part: str
    kind: str = ""  # model type, such as `ced` or `m2m_100`; empty if the part has no model type
    source: str = ""  # Hub id, file name, folder name or URL of the checkpoint; empty for random weights
    license: str = ""  # Hub license identifier; empty if unknown
    sha256: str | None = None  # checksum of the weight files
    layout: str | None = None  # name of the recognised layout
    tensors: int | None = None
    revision: str | None = None  # commit of the Hub repository
    files: tuple[str, ...] = ()  # names of the weight files
    parameters: int | None = None
    base_model: str = ""  # Hub id in the card of the source

    @property
    def hub_id(self) -> str | None:
        """Hub repository (`owner/name`) of the source, or else the base model in its card. None: neither is one."""
        names = (name for name in (self.source, self.base_model) if "/" in name and is_hub_id(name))
        return next(names, None)


def known_license(repository: str) -> str:
    """Look up the license of a Hub repository in `KNOWN_LICENSES`. Return "" if it is not listed."""
    for pattern, license in KNOWN_LICENSES.items():
        if re.fullmatch(pattern, repository):
            return license
    return ""


def read_provenance(folder: str | Path) -> list[dict[str, Any]]:
    """Read the entries in a folder's `provenance.json`. If there is no such file, return an empty list.

    Raises:
        ValueError: The file is not a list of mappings with the keys `part` and `source`.
    """
    path = Path(folder) / PROVENANCE_FILE
    if not path.is_file():
        return []

    entries = read_json(path)
    is_list = isinstance(entries, list)
    if not is_list or not all(isinstance(entry, dict) and {"part", "source"} <= entry.keys() for entry in entries):
        raise ValueError(f"{path} must be a list of mappings with the keys part and source")
    return entries


def write_provenance(folder: str | Path, parts: Iterable[Origin]) -> None:
    """Write `provenance.json` into a model folder."""
    write_json(Path(folder) / PROVENANCE_FILE, list(map(asdict, parts)), indent=2, ensure_ascii=True)


def origins(model: SupCLAPModel, base_model: str | Sequence[str] | None = None) -> list[Origin]:
    """Return the origins of both towers, and of the base models if training continued from whole models.

    Args:
        model: The model. The source of each tower is read from its configuration.
        base_model: Hub ids or folders of the base models; None: `model.name_or_path`.
    """
    config: Any = model.config
    base_model = base_model or model.name_or_path or []
    wholes = [base_model] if isinstance(base_model, str) else base_model
    recorded = read_provenance(wholes[0]) if wholes else []

    parts = []
    for part, tower in (("audio tower", config.audio_config), ("text tower", config.text_config)):
        parts.append(_tower(part, tower.model_type, str(getattr(tower, "_name_or_path", "") or ""), recorded))
    for whole in wholes:
        parts.append(Origin("whole model", config.model_type, public_name(whole), stated_license(whole)))
    return parts


def license_of(parts: Iterable[Origin]) -> str:
    """Derive the license of a model, as a Hub identifier, from the licenses of its parts.

    If the parts have one non-commercial license, the whole model has this license. If all parts are permissive or
    trained from scratch, the license is `apache-2.0`. In all other cases, for example if a license is unknown, it is
    `other`.

    >>> license_of([Origin("audio tower", "ced", "mispeech/ced-base", "apache-2.0"), Origin("text tower", "bert")])
    'apache-2.0'
    """
    parts = list(parts)
    licenses = {part.license for part in parts} - {""}
    if non_commercial := [license for license in licenses if "-nc" in license]:
        return non_commercial[0] if len(non_commercial) == 1 else "other"

    # If training continued from a model without a license, the licenses of its towers suffice.
    lacks = any(part.source and not part.license for part in parts)
    towers_lack = any(part.part != "whole model" and not part.license for part in parts)
    return "apache-2.0" if licenses <= PERMISSIVE and not (lacks and towers_lack) else "other"


def stated_license(source: str) -> str:
    """Return the license of a Hub id or folder from `KNOWN_LICENSES` or its model card, or "" if it is unknown."""
    return known_license(source) or str(_read_card(source).get("license") or "").lower()


def _read_card(source: str) -> dict[str, Any]:
    """Return the metadata in the model card of a Hub id or folder. {}: there is none, or it is unreadable."""
    card = Path(source) / "README.md"
    if os.path.isdir(source) and not card.is_file():
        return {}
    try:
        return ModelCard.load(card if card.is_file() else source).data.to_dict()
    except Exception:  # no such repository, no network, no card, or broken YAML
        return {}


def _tower(part: str, kind: str, source: str, recorded: Iterable[Mapping[str, Any]]) -> Origin:
    """Return the origin of a tower.

    The origin is read from `recorded`, the entries of the whole model. If it has no entry for the tower, the entries in
    the folder `source` are used, and otherwise the name of `source`.
    """
    word = part.split()[0]
    own = read_provenance(source) if source else []
    entries = [entry for entry in (*recorded, *own) if word in str(entry["part"])] or own[:1]
    # Both public families of M2M100 encoders, SONAR and NLLB, are CC-BY-NC-4.0; assume the strict license for others.
    assumed = SONAR_LICENSE if kind == "m2m_100" else ""
    if not entries:
        stated = (stated_license(source) if source else "") or assumed
        named = _read_card(source).get("base_model") if os.path.isdir(source) else None
        base_model = named if isinstance(named, str) else (named or [""])[0]
        return Origin(part, kind, public_name(source), stated, base_model=base_model)

    entry = {}
    for field in fields(Origin):
        if field.name in entries[0]:
            entry[field.name] = entries[0][field.name]
    entry |= {"part": part, "kind": kind, "source": public_name(str(entry["source"] or ""))}
    entry["license"] = str(entry.get("license") or "").lower() or assumed
    entry["base_model"] = str(entry.get("base_model") or "")
    return Origin(**entry)
