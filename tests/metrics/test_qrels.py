"""Tables of relevance judgements: all forms give the correct lists of columns, and bad tables raise errors."""

import csv
import io

import pytest

from modeling_supclap.metrics.recall import relevant_from_qrels, retrieval_scores

ROWS = [("q1", "b", 1), ("q1", "c", 0), ("q1", "a", 2), ("q2", "c", 1), ("q2", "a", -1), ("q3", "a", 1)]
QUERIES, CANDIDATES = ["q2", "q1"], ["a", "b", "c"]
EXPECTED = [[2], [0, 1]]


@pytest.mark.parametrize("form", [list, iter, tuple], ids=["list", "iterator", "tuple"])
def test_rows(form):
    assert relevant_from_qrels(form(ROWS), QUERIES, CANDIDATES) == EXPECTED


def test_the_rows_of_a_file_are_text():
    table = io.StringIO("\n".join(f"{query}\t{candidate}\t{relevance}" for query, candidate, relevance in ROWS))
    assert relevant_from_qrels(csv.reader(table, delimiter="\t"), QUERIES, CANDIDATES) == EXPECTED
    assert relevant_from_qrels([(7, "3", True)], ["7"], [1, 3]) == [[1]]


def test_mapping():
    nested = {query: {c: r for q, c, r in ROWS if q == query} for query in ("q1", "q2", "q3")}
    assert relevant_from_qrels(nested, QUERIES, CANDIDATES) == EXPECTED


def test_judged_but_irrelevant_candidates_may_be_missing():
    assert relevant_from_qrels([("q", "gone", 0), ("q", "a", 1)], ["q"], ["a"]) == [[0]]


def test_several_right_answers_by_hand():
    """The correct candidates a and c have ranks 2 and 3: (1/2 + 2/3) / 2."""
    relevant = relevant_from_qrels([("q", "a", 1), ("q", "c", 1)], ["q"], ["a", "b", "c", "d"])
    scores = retrieval_scores([[0.8, 0.9, 0.7, 0.1]], relevant, k=(1, 2), map_cutoff=16)
    assert scores["mAP@16"] == pytest.approx((1 / 2 + 2 / 3) / 2, abs=1e-15)
    assert (scores["R@1"], scores["R@2"]) == (0, 1)


@pytest.mark.parametrize(
    ("qrels", "queries", "candidates", "message"),
    [
        (ROWS, ["q1", "q4"], CANDIDATES, "'q4'"),
        ([("q1", "a", 0)], ["q1"], CANDIDATES, "'q1'"),
        (ROWS, ["q1"], ["a", "c"], "'b'.*'q1'"),
        ([*ROWS, ("q1", "b", 0)], ["q1"], CANDIDATES, "'b'.*'q1'"),
        (ROWS, ["q1", "q2", "q1"], CANDIDATES, "query_ids.*'q1'"),
        (ROWS, ["q1"], ["a", "b", "c", "b"], "candidate_ids.*'b'"),
        (ROWS, ["q1"], [1, "1"], "candidate_ids.*'1'"),
        (ROWS, [], CANDIDATES, "query_ids"),
        (ROWS, ["q1"], [], "candidate_ids"),
        ([("q1", "a", "yes")], ["q1"], CANDIDATES, "'yes'"),
        ([("q1", "a")], ["q1"], CANDIDATES, "'q1', 'a'"),
        ([5], ["q1"], CANDIDATES, r"qrels.*\b5\b"),
        ([("q1", "a", float("nan"))], ["q1"], CANDIDATES, "'q1'"),
    ],
)
def test_errors_for_bad_tables_name_the_problem(qrels, queries, candidates, message):
    with pytest.raises(ValueError, match=message):
        relevant_from_qrels(qrels, queries, candidates)
