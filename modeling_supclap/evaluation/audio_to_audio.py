"""Audio-to-audio retrieval: each clip is a query for the clips of other recordings that share a label with it."""

from __future__ import annotations

import numpy as np

from modeling_supclap.metrics.names import RECALL_CUTOFFS, RETRIEVAL_METRICS
from modeling_supclap.metrics.recall.ranking import TILE_QUERIES, LazySimilarity, chance_scores, retrieval_outcomes

from .embed import EmbeddedSplit
from .options import EvaluationOptions
from .results import TaskResult, score_outcomes, under
from .zero_shot import label_matrix


def evaluate_audio_to_audio(split: EmbeddedSplit, options: EvaluationOptions) -> TaskResult:
    """Use each clip as a query, and rank the clips of all other source recordings by cosine similarity.

    Candidates that share a label with the query are correct. Clips without a correct candidate are not used as queries.
    The embedding of a clip is the mean over its chunks. The bootstrap intervals resample source recordings.

    Returns:
        Tuple of the scores `{"audio_to_audio": ...}`, the arrays for `Results`, and an empty dict of settings.

    Raises:
        ValueError: A clip has no label, or no two recordings share a label.
    """
    labels = label_matrix(split.rows)[0].astype(np.float32)
    sources = np.unique(split.sources, return_inverse=True)[1]
    similarity = LazySimilarity(split.clips.mean, split.clips.mean)
    queries, sizes, outcomes = [], [], []
    for start in range(0, len(labels), TILE_QUERIES):
        block = slice(start, start + TILE_QUERIES)
        is_candidate = sources[block, None] != sources  # (B, N)
        is_correct = (labels[block] @ labels.T > 0) & is_candidate
        rows = np.flatnonzero(is_correct.any(axis=1))
        if len(rows):
            # -2 is below any cosine
            cosines = np.where(is_candidate, similarity[block], -2)[rows]
            correct = [np.flatnonzero(row).tolist() for row in is_correct[rows]]
            outcomes.append(retrieval_outcomes(cosines, correct, k=RECALL_CUTOFFS))
            sizes.append(np.stack([is_correct[rows].sum(axis=1), is_candidate[rows].sum(axis=1)]))
            queries.append(start + rows)
    if not queries:
        raise ValueError(
            f"no two recordings among the {len(labels)} clips share a label; there is nothing to retrieve"
        )

    indices = np.concatenate(queries)
    clusters = split.sources[indices]
    arrays = {}
    for name in outcomes[0]:
        arrays[name] = np.concatenate([block[name] for block in outcomes])
    chance = dict.fromkeys(RETRIEVAL_METRICS, 0.0)
    pairs, counts = np.unique(np.concatenate(sizes, axis=1), axis=1, return_counts=True)
    for (size, candidates), count in zip(pairs.T.tolist(), counts, strict=True):
        for name, level in chance_scores([range(size)], candidates, k=RECALL_CUTOFFS).items():
            chance[name] += level * count / len(indices)

    scored = {name: arrays[name] for name in RETRIEVAL_METRICS}
    scores = {"num_queries": len(indices), **score_outcomes(scored, clusters, split.unit, options.intervals, chance)}
    arrays |= {"query_id": split.ids[indices], "cluster": clusters}
    return {"audio_to_audio": {"shared_label": scores}}, under("audio_to_audio/shared_label", arrays), {}
