"""Each score of a metric has a row in the table of names, with the correct direction."""

import numpy as np
import pytest

from modeling_supclap.metrics.clap_score import pair_similarity
from modeling_supclap.metrics.embedding_gap import gap_and_distance
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.names import MORE_RETRIEVAL_METRICS, NUMBER, RETRIEVAL_METRICS, get_metric
from modeling_supclap.metrics.recall import retrieval_scores
from modeling_supclap.metrics.zste.temporal_questions import NUM_RIGHT


def test_every_score_is_in_the_table_with_its_direction():
    relevant = [[i] for i in range(4)]
    further = {"metrics": MORE_RETRIEVAL_METRICS}
    perfect = retrieval_scores(np.eye(4), relevant, **further)
    worst = retrieval_scores(-np.eye(4), relevant, **further)
    embeds = np.eye(4)[:2]
    perfect |= {"MRV": mean_rank_variance([[1, 1]]), **gap_and_distance(embeds, embeds)}
    worst |= {"MRV": mean_rank_variance([[0, 9]]), **gap_and_distance(-embeds, embeds)}
    perfect["clap_score"], worst["clap_score"] = (
        pair_similarity(embeds, embeds)[0],
        pair_similarity(-embeds, embeds)[0],
    )
    assert {*RETRIEVAL_METRICS, *MORE_RETRIEVAL_METRICS} < perfect.keys()
    # of four candidates, all are among the first five
    for name in perfect.keys() - {"num_queries", "R@5", "R@10"}:
        assert get_metric(name).higher_is_better == (perfect[name] > worst[name]), name


def test_tasks_and_cutoffs_need_no_row_of_their_own():
    assert all(get_metric(task).percent and get_metric(task).display == f"ZSTE {task}" for task in NUM_RIGHT)
    assert get_metric("3A_order").display == "ZSTE 3A, order only"
    assert get_metric("R@100").format(0.5) == "50.0"
    names = {name: get_metric(name).display for name in ("R@100", "mAP@16", "nDCG@3", "top1")}
    assert names == {
        "R@100": "recall at 100", "mAP@16": "mean average precision at 16", "nDCG@3": "nDCG at 3",
        "top1": "top-1 accuracy",
    }  # fmt: skip
    for name in ("num_queries", "R@", "R@k", "mAR@5", "6A", "1E", "1A_other"):
        with pytest.raises(KeyError, match=rf"unknown metric '{name}'"):
            get_metric(name)


@pytest.mark.parametrize(
    ("value", "text", "signed"),
    [(1000, "1,000", "+1,000"), (999.5, "1e+03", "+1e+03"), (-0.012345, "-0.0123", "-0.0123")],
)
def test_numbers_have_three_digits_or_none_after_the_point(value, text, signed):
    assert (NUMBER.format(value), NUMBER.format(value, signed=True)) == (text, signed)
