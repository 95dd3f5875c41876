"""Tables of judgements: every form gives the lists of columns that one can read off it, and bad ones are refused."""

import json

import pytest

from modeling_supclap.metrics.recall import relevant_from_qrels, retrieval_scores

ROWS = [("q1", "b", 1), ("q1", "c", 0), ("q1", "a", 2), ("q2", "c", 1), ("q2", "a", -1), ("q3", "a", 1)]
QUERIES, CANDIDATES = ["q2", "q1"], ["a", "b", "c"]
EXPECTED = [[2], [0, 1]]

TREC = "".join(f"{query} 0 {candidate}\t{relevance}\n" for query, candidate, relevance in ROWS)
CSV = "relevance,query_id,candidate_id\n" + "".join(f"{r},{q},{c}\n" for q, c, r in ROWS)
BEIR = "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{c}\t{r}\n" for q, c, r in ROWS)
UNGRADED = "query_id,candidate_id\n" + "".join(f"{q},{c}\n" for q, c, r in ROWS if r > 0)
DCASE = "\ufeffquery,audio_filenames\nq1,\"['a', 'b']\"\nq2,['c']\nq3,['a']\n"


@pytest.mark.parametrize("form", [list, iter, tuple], ids=["list", "iterator", "tuple"])
def test_rows(form):
    assert relevant_from_qrels(form(ROWS), QUERIES, CANDIDATES) == EXPECTED


def test_mapping_and_text():
    nested = {query: {c: r for q, c, r in ROWS if q == query} for query in ("q1", "q2", "q3")}
    assert relevant_from_qrels(nested, QUERIES, CANDIDATES) == EXPECTED
    assert relevant_from_qrels(json.loads(json.dumps(nested)), QUERIES, CANDIDATES) == EXPECTED
    assert relevant_from_qrels(TREC + "\n  \n", QUERIES, CANDIDATES) == EXPECTED


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", TREC), ("a.qrels", TREC), ("a.csv", CSV), ("a.tsv", BEIR), ("b.csv", UNGRADED), ("c.csv", DCASE)],
)
def test_files(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert relevant_from_qrels(path, QUERIES, CANDIDATES) == EXPECTED
    assert relevant_from_qrels(str(path), QUERIES, CANDIDATES) == EXPECTED


def test_ids_are_compared_as_text():
    assert relevant_from_qrels("7 0 3 1\n", [7], [1, 3]) == [[1]]
    assert relevant_from_qrels([(7, "3", True)], ["7"], [1, 3]) == [[1]]


def test_judged_but_irrelevant_candidates_may_be_missing():
    assert relevant_from_qrels([("q", "gone", 0), ("q", "a", 1)], ["q"], ["a"]) == [[0]]


def test_several_right_answers_by_hand():
    """a, right, is second; c, right, is third: (1/2 + 2/3) / 2."""
    relevant = relevant_from_qrels([("q", "a", 1), ("q", "c", 1)], ["q"], ["a", "b", "c", "d"])
    scores = retrieval_scores([[0.8, 0.9, 0.7, 0.1]], relevant, k=(1, 2), map_cutoff=16)
    assert scores["mAP@16"] == pytest.approx((1 / 2 + 2 / 3) / 2, abs=1e-15)
    assert (scores["R@1"], scores["R@2"]) == (0, 1)


@pytest.mark.parametrize(
    ("qrels", "queries", "candidates", "message"),
    [
        (ROWS, ["q1", "q4"], CANDIDATES, "query 'q4' has no relevant candidate in qrels"),
        ([("q1", "a", 0)], ["q1"], CANDIDATES, "query 'q1' has no relevant candidate"),
        (ROWS, ["q1"], ["a", "c"], "candidate 'b', relevant to query 'q1', is not among"),
        ([*ROWS, ("q1", "b", 0)], ["q1"], CANDIDATES, "judges candidate 'b' for query 'q1' twice"),
        (ROWS, ["q1", "q2", "q1"], CANDIDATES, "query_ids holds 'q1' twice"),
        (ROWS, ["q1"], ["a", "b", "c", "b"], "candidate_ids holds 'b' twice"),
        (ROWS, ["q1"], [1, "1"], "candidate_ids holds 1 twice"),
        (ROWS, [], CANDIDATES, "query_ids is empty"),
        (ROWS, ["q1"], [], "candidate_ids is empty"),
        ("q1 0 a 1\nq1 a 1\n", ["q1"], CANDIDATES, "line 2 of qrels is 'q1 a 1'"),
        ("q1 0 a yes\n", ["q1"], CANDIDATES, "expected query id, candidate id and a number"),
        ([("q1", "a")], ["q1"], CANDIDATES, r"qrels has \('q1', 'a'\)"),
        ([5], ["q1"], CANDIDATES, "qrels has 5"),
        ([("q1", "a", float("nan"))], ["q1"], CANDIDATES, "no relevant candidate"),
    ],
)
def test_bad_tables_say_what_is_wrong(qrels, queries, candidates, message):
    with pytest.raises(ValueError, match=message):
        relevant_from_qrels(qrels, queries, candidates)


def test_bad_files_say_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError):
        relevant_from_qrels(tmp_path / "none.txt", ["q1"], CANDIDATES)
    (tmp_path / "odd.csv").write_text("question,answer\nq1,a\n")
    with pytest.raises(ValueError, match=r"columns \['question', 'answer'\]; expected one of"):
        relevant_from_qrels(tmp_path / "odd.csv", ["q1"], CANDIDATES)
    (tmp_path / "bare.csv").write_text("query,audio_filenames\nq1,a.wav\n")
    with pytest.raises(ValueError, match=r"audio_filenames is 'a.wav'; expected a list"):
        relevant_from_qrels(tmp_path / "bare.csv", ["q1"], CANDIDATES)
