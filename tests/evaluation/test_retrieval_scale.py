"""A million texts by a hundred thousand audios fit in memory: what ranks take beside the embeddings has a limit."""

from pathlib import Path

import numpy as np
import pytest
from processes import run_python

from modeling_supclap.metrics.recall import LazySimilarity, best_ranks, retrieval_scores

# The address space is closed at what is held before, and 64 MB more: whatever takes more ends in a MemoryError.
CODE = """
import resource, sys
import numpy as np
from modeling_supclap.metrics.recall import LazySimilarity, best_ranks, retrieval_scores

def directions(seed, rows, dim):
    embeds = np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)
    for start in range(0, rows, 1000):
        embeds[start : start + 1000] /= np.linalg.norm(embeds[start : start + 1000], axis=1, keepdims=True)
    return embeds

num_texts, num_audios, dim = map(int, sys.argv[1:4])
texts, audios = directions(0, num_texts, dim), directions(1, num_audios, dim)
relevant = np.random.default_rng(2).integers(0, num_audios, (num_texts, 1))
texts[::2] = audios[relevant[::2, 0]]  # every other text finds its audio
best_ranks(LazySimilarity(texts[:1024], audios[:1024]), np.arange(1024)[:, None])  # what BLAS sets aside once
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 64 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    np.ones(80 * 2**20, np.uint8)
    sys.exit("the limit does not hold")
except MemoryError:
    pass
ranks = best_ranks(LazySimilarity(texts, audios), relevant)
assert (ranks[::2] == 0).all(), "a text that is its audio is not found"
middle = ranks[1::2].mean() / num_audios
assert abs(middle - 0.5) < 5 / np.sqrt(12 * len(ranks) / 2), middle
if num_texts < 5000:
    scores = retrieval_scores(LazySimilarity(texts, audios), relevant)
    assert scores["mean_rank"] == ranks.mean() + 1
print("fits")
"""


def runs_within_the_limit(num_texts, num_audios, dim):
    assert run_python("-c", CODE, num_texts, num_audios, dim, timeout_seconds=1500) == "fits\n"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("num_texts", [2000, 8000])
def test_memory_has_a_limit_whatever_the_number_of_texts(num_texts):
    """8000 x 20000 scores are 640 MB."""
    runs_within_the_limit(num_texts, 20_000, 32)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_many_texts_against_a_large_gallery():
    """20 000 x 100 000 scores are 8 GB; a million texts are fifty times as many blocks of the same size."""
    runs_within_the_limit(20_000, 100_000, 64)


def test_embeddings_may_lie_on_disk(tmp_path):
    rng = np.random.default_rng(0)
    texts, audios = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (300, 200))
    texts, audios = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (texts, audios))
    np.save(tmp_path / "texts.npy", texts)
    mapped, relevant = np.load(tmp_path / "texts.npy", mmap_mode="r"), rng.integers(0, 200, (300, 1))
    expected = best_ranks(LazySimilarity(texts, audios), relevant)
    np.testing.assert_array_equal(best_ranks(LazySimilarity(mapped, audios), relevant), expected)
    assert retrieval_scores(LazySimilarity(mapped, audios), relevant)["mean_rank"] == expected.mean() + 1
