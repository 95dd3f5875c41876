"""Receipts: whole files, comparisons against another statistics package, and the papers' numbers."""

import json

import numpy as np
import pytest
from scipy import stats

from modeling_supclap.evaluation.receipts import (
    SCHEMA,
    Intervals,
    Receipt,
    compare,
    flat_scores,
    format_comparison,
    format_scores,
    paper_results,
    score,
    write_results,
)

PROTOCOL = {
    "dataset_hash": "d",
    "positives": "clip",
    "caption_handling": "all",
    "missing_clips": [],
    "audio": {"chunk_seconds": None},
    "intervals": {},
    "zste": {"set_hash": "s", "clip_seconds": {"pair": None}},
}


def receipt(hits, name="model", ids=None, clusters=None, **protocol):
    """A receipt of one direction and one ZSTE task, both with these outcomes."""
    hits = np.asarray(hits, dtype=np.float64)
    ids = np.array([f"clip{index}" for index in range(len(hits))] if ids is None else ids)
    clusters = ids if clusters is None else np.array(clusters)
    prefix = "retrieval/eng/t2a"
    arrays = {f"{prefix}/{one}": hits for one in ("R@1", "R@5", "R@10", "mAP@10")}
    arrays |= {f"{prefix}/rank": 3 - 3 * hits.astype(int), f"{prefix}/query_id": ids, f"{prefix}/cluster": clusters}
    arrays |= {"zste/eng/3A/score": hits, "zste/eng/3A/question_id": ids, "zste/eng/3A/cluster": clusters}
    content = {
        "schema": SCHEMA,
        "model": {"name": name},
        "protocol": {**PROTOCOL, **protocol},
        "scores": {"retrieval": {"eng": {"t2a": {"R@1": score(hits.mean())}}}, "zste": {"eng": {}}},
    }
    return Receipt(content, arrays)


def by_name(table):
    return {row["score"]: row for row in table}


A = [1, 0, 0, 1, 0, 0, 1, 0, 0, 0] * 4
B = [1, 1, 0, 1, 1, 0, 1, 1, 0, 0] * 4


def test_a_comparison_is_paired():
    found = by_name(compare(receipt(A), receipt(B)))
    row = found["retrieval eng t2a R@1"]
    assert (row["first"], row["second"], row["difference"]) == (
        pytest.approx(0.3),
        pytest.approx(0.6),
        pytest.approx(0.3),
    )
    assert 0 < row["low"] < 0.3 < row["high"]
    # Scipy's exact test of the same null: 12 of 12 differing queries went one way.
    assert row["p_value"] == pytest.approx(stats.binomtest(12, 12).pvalue, abs=1e-9)
    assert found["retrieval eng t2a rank"]["first"] == pytest.approx(1 + 3 * 0.7)
    assert found["zste eng 3A"]["difference"] == pytest.approx(0.3)
    assert all(row["difference"] == 0 for row in compare(receipt(A), receipt(A)))


def test_queries_are_paired_by_id_and_not_by_place():
    order = np.random.default_rng(0).permutation(len(B))
    ids = np.array([f"clip{index}" for index in range(len(B))])[order]
    shuffled = receipt(np.array(B)[order], ids=ids)
    expected, found = (by_name(compare(receipt(A), other)) for other in (receipt(B), shuffled))
    assert found["retrieval eng t2a R@1"] == expected["retrieval eng t2a R@1"]


def test_queries_of_one_recording_are_drawn_together():
    apart = by_name(compare(receipt(A), receipt(B)))["zste eng 3A"]
    ten = [f"source{index % 10}" for index in range(40)]
    together = by_name(compare(receipt(A, clusters=ten), receipt(B, clusters=ten)))["zste eng 3A"]
    assert together["p_value"] > apart["p_value"]
    assert together["high"] - together["low"] > apart["high"] - apart["low"]


@pytest.mark.parametrize(
    "change",
    [
        {"dataset_hash": "other"},
        {"positives": "captions"},
        {"caption_handling": "parallel"},
        {"zste": {"set_hash": "t"}},
    ],
)
def test_other_data_or_another_protocol_is_refused(change):
    with pytest.raises(ValueError, match=f"not measured alike; {next(iter(change))}"):
        compare(receipt(A), receipt(B, **change))
    with pytest.warns(UserWarning, match="not measured alike"):
        assert compare(receipt(A), receipt(B, **change), allow_different=True)


def test_what_models_differ_in_by_nature_is_only_warned_of():
    other = {"audio": {"chunk_seconds": 10.0}, "zste": {"set_hash": "s", "clip_seconds": {"pair": 5.0}}}
    with pytest.warns(UserWarning, match="the receipts differ in audio"):
        assert compare(receipt(A), receipt(B, **other))


def test_other_queries_are_refused_or_left_out():
    fewer = receipt(B[:30])
    with pytest.raises(ValueError, match="asked 40 and 30 queries, 30 alike"):
        compare(receipt(A), fewer)
    found = by_name(compare(receipt(A), fewer, allow_different=True))["retrieval eng t2a R@1"]
    assert found["queries"] == 30
    assert found["first"] == pytest.approx(np.mean(A[:30]))


def test_receipts_without_a_common_score():
    other = receipt(B)
    other.arrays = {name.replace("eng", "fra"): values for name, values in other.arrays.items()}
    with pytest.raises(ValueError, match="no score in common"):
        compare(receipt(A), other)


def test_a_receipt_comes_back_and_is_the_same_bytes_each_time(tmp_path):
    for name in ("one", "two"):
        assert receipt(A).save(tmp_path / name) == tmp_path / name / "results.json"
    for file in ("results.json", "outcomes.npz"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    for path in (tmp_path / "one", tmp_path / "one" / "results.json"):
        loaded = Receipt.load(path)
        assert loaded.content == receipt(A).content
        assert loaded.arrays.keys() == receipt(A).arrays.keys()
        assert all(np.array_equal(loaded.arrays[name], values) for name, values in receipt(A).arrays.items())
    assert {file.name for file in (tmp_path / "one").iterdir()} == {"results.json", "outcomes.npz"}


def test_what_is_no_receipt_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no receipt"):
        Receipt.load(tmp_path)
    (tmp_path / "results.json").write_text('{"test": {}}')
    with pytest.raises(ValueError, match="its schema is None"):
        Receipt.load(tmp_path)
    receipt(A).save(tmp_path)
    (tmp_path / "outcomes.npz").unlink()
    with pytest.raises(FileNotFoundError, match="belongs beside"):
        Receipt.load(tmp_path)


def test_a_score_that_is_not_a_number_is_not_written(tmp_path):
    receipt(A).save(tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    broken = receipt(B)
    broken.content["scores"]["retrieval"]["eng"]["t2a"]["R@1"]["value"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        broken.save(tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before


def test_results_replace_what_was_there_whole(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_results(path, {"bad": object()})
    assert path.read_text() == "old"
    write_results(path, {"R@1": 0.5, "name": "é"})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["R@1"] == 0.5
    assert content["versions"]["torch"].startswith("2.")
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_tables_are_in_percent_where_scores_are_shares():
    scores = {
        "retrieval": {"eng": {"t2a": {"R@1": score(0.5, (0.4, 0.6), 0.1), "mean_rank": score(7.25), "num_queries": 3}}},
        "multilingual": {"MRV": score(12.5), "Dis": {"fra": score(0.25)}},
    }
    lines = [line.split() for line in format_scores(scores).splitlines()]
    assert lines[1:] == [
        ["retrieval", "eng", "t2a", "R@1", "50.00", "40.00", "to", "60.00", "10.00"],
        ["retrieval", "eng", "t2a", "mean_rank", "7.25"],
        ["multilingual", "MRV", "12.50"],
        ["multilingual", "Dis", "fra", "0.25"],
    ]
    assert [place for place, _ in flat_scores(scores)][-1] == ("multilingual", "Dis", "fra")
    compared = format_comparison(compare(receipt(A), receipt(B))).splitlines()
    assert compared[1].split()[:7] == ["retrieval", "eng", "t2a", "R@1", "30.00", "60.00", "+30.00"]
    assert "+30.00" not in next(line for line in compared if "rank" in line)


def test_intervals_are_those_of_the_bootstrap():
    outcomes = {"R@1": np.array(A, dtype=float)}
    low, high = Intervals(2000).of(outcomes, np.arange(40))["R@1"]
    expected = stats.bootstrap((A,), np.mean, method="percentile", n_resamples=2000, rng=0).confidence_interval
    assert (low, high) == (pytest.approx(expected.low, abs=0.03), pytest.approx(expected.high, abs=0.03))
    assert Intervals(0).of(outcomes, np.arange(40)) == {"R@1": None}
    assert Intervals().of(outcomes, ["one"] * 40) == {"R@1": None}


# ---- the papers ----


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (("SupCLAP", "1", "clotho", "InfoNCE bi-DynamicSVR", "eng", "a2t", "R@10"), 0.6329),
        (("SupCLAP", "2", "vggsound", "InfoNCE bi-StaticSVR", "eng", None, "top1"), 0.2465),
        (("SupCLAP", "8", "audiocaps", "ATRI-CACL bi-DynamicSVR", "avg", "t2a", "R@1"), 0.4361),
        (("ATRI", "1", "clotho", "KCL", "zho", "a2t", "R@5"), 0.5634),
        (("ATRI", "1", "audiocaps", "CACL", "nld", "t2a", "mAP@10"), 0.6122),
        (("ATRI", "2", "clotho", "ML-CLAP", "jpn", None, "Dis"), 0.353),
        (("ATRI", "7", "audiocaps", "KCL, LaBSE", "avg", "t2a", "R@5"), 0.758),
        (("TeminAL", "1", "clotho", "CompA-CLAP", "eng", "a2t", "R@5"), 0.507),
        (("TeminAL", "3", "esc50", "T-CLAP, TeminAL A and B", "eng", None, "2C"), 0.6234),
        (("TeminAL", "4", "urbansound8k", "T-CLAP", "eng", None, "top1"), 0.722),
    ],
)
def test_the_papers_say_so(wanted, value):
    keys = ("paper", "table", "dataset", "model", "language", "direction", "metric")
    (entry,) = [one for one in paper_results(paper=wanted[0]) if tuple(one[key] for key in keys) == wanted]
    assert entry["value"] == pytest.approx(value)


def test_the_papers_averages_are_those_of_their_languages():
    """ATRI's table 1, where a slip of the transcription would show; two averages are wrong as printed."""
    printed = {("ML-CLAP", "clotho", "t2a", "R@1"), ("CACL", "clotho", "t2a", "mAP@10")}
    groups = {}
    for entry in paper_results(paper="ATRI", table="1"):
        key = tuple(entry[name] for name in ("model", "dataset", "direction", "metric"))
        groups.setdefault(key, {})[entry["language"]] = entry["value"]
    assert len(groups) == 36
    for key, values in groups.items():
        average = values.pop("avg")
        assert len(values) == 8
        assert (abs(np.mean(list(values.values())) - average) < 1.5e-4) == (key not in printed), key


def test_every_entry_of_the_papers_is_one_score():
    entries = paper_results()
    keys = [tuple(value for name, value in entry.items() if name != "value") for entry in entries]
    assert len(set(keys)) == len(keys) == 1034
    for entry in entries:
        share = entry["metric"] not in ("MRV", "Gap", "Dis")
        assert 0 <= entry["value"] <= (1 if share else 400), entry
    with pytest.raises(ValueError, match=r"unknown keys \['modle'\]"):
        paper_results(modle="KCL")
