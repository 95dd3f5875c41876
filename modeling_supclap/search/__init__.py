"""Search your own recordings by text or by an example recording. Each hit has a start and an end time in seconds.

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher, build_index

model = load_embedding_model("outputs/synthetic")
build_index(model, "field_recordings", "field_recordings.index")
for hit in Searcher("field_recordings.index", model).search("rain on a tin roof", language="eng"):
    print(hit.score, hit.file, hit.start_seconds)
"""

from typing import TYPE_CHECKING, Any

from .detections import read_selections, score_detections
from .query import Answer, Hit, Searcher
from .store import SoundIndex

if TYPE_CHECKING:
    from .index import IndexReport, build_index

__all__ = [
    "Answer",
    "Hit",
    "IndexReport",
    "Searcher",
    "SoundIndex",
    "build_index",
    "read_selections",
    "score_detections",
]


def __getattr__(name: str) -> Any:
    """Import `index` on first use, because it imports torch, which a query by an exported model does not need."""
    if name not in ("IndexReport", "build_index"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import index

    return getattr(index, name)
