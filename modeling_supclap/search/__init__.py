"""Search your own recordings by text or by an example recording. Each hit has a start and an end time in seconds.

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher, build_index

model = load_embedding_model("outputs/synthetic")
build_index(model, "field_recordings", "field_recordings.index")
for hit in Searcher("field_recordings.index", model).search("rain on a tin roof", language="eng"):
    print(hit.score, hit.file, hit.start_seconds)
"""

from .index import IndexReport, build_index
from .query import Answer, Hit, Searcher
from .store import SoundIndex

__all__ = ["Answer", "Hit", "IndexReport", "Searcher", "SoundIndex", "build_index"]
