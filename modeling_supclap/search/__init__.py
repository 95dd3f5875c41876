"""Search your own recordings by text or by an example recording. Each hit has a start and an end time in seconds.

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher, build_index

model = load_embedding_model("outputs/synthetic")
build_index(model, "field_recordings", "field_recordings.index")
for hit in Searcher("field_recordings.index", model).search("rain on a tin roof", language="eng"):
    print(hit.score, hit.file, hit.start_seconds)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `X as X` is public for type checkers
    from .index import IndexReport as IndexReport
    from .index import build_index as build_index
    from .query import Answer as Answer
    from .query import Hit as Hit
    from .query import Searcher as Searcher
    from .store import SoundIndex as SoundIndex

_MODULES = {"index": ("IndexReport", "build_index"), "query": ("Answer", "Hit", "Searcher"), "store": ("SoundIndex",)}
__all__ = ["Answer", "Hit", "IndexReport", "Searcher", "SoundIndex", "build_index"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because `index` imports torch, which a query by an export does not need."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
