"""Retrieval on an embedded split: a perfect model, a model with known errors, and the scores of the Trainer."""

from types import SimpleNamespace

import builders
import numpy as np
import pytest
from fake_models import ToneModel, caption_tones
from memory import traced_peak
from recordings import tone_rows

from modeling_supclap.evaluation import embed, retrieval
from modeling_supclap.evaluation.embed import (
    AudioPolicy,
    ClipEmbeddings,
    embed_split,
    in_row_order,
    split_from_predictions,
)
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.evaluation.options import EvaluationOptions
from modeling_supclap.evaluation.results import Intervals
from modeling_supclap.evaluation.retrieval import (
    caption_table,
    count_captions,
    evaluate_retrieval,
    find_top,
    retrieval_metric_names,
    retrieval_metrics,
)
from modeling_supclap.metrics.recall import LazySimilarity
from modeling_supclap.training.collator import EvaluationCollator, IndexedRows

LANGUAGES = ["eng", "fra"]


@pytest.fixture
def rows(tmp_path):
    """Rows of eight tones with two captions in each of two languages."""
    return tone_rows(tmp_path)


def retrieve(split, languages=("eng",), **options):
    return evaluate_retrieval(split, EvaluationOptions(languages=languages, **options))


def caption_model(rows, **french):
    """Model that matches all captions; with `clipa=b` it matches the French captions of clip a to clip b."""
    tones = caption_tones(rows) | caption_tones(rows, "fra")
    for clip, tone in french.items():
        tones |= dict.fromkeys(rows[int(clip.removeprefix("clip"))]["captions"]["fra"], tone)
    return load_embedding_model(ToneModel(tones))


def test_further_metrics_on_request(rows, two_units_suffice):
    split = embed_split(caption_model(rows, clip0=1, clip2=5), rows)
    names = ["mAP@16", "nDCG@10", "MRR"]
    scores, arrays, _ = retrieve(split, LANGUAGES, retrieval_metrics=names)
    fields = scores["retrieval"]["fra"]["t2a"]
    assert fields["MRR"]["value"] == pytest.approx((1 / (arrays["retrieval/fra/t2a/rank"] + 1)).mean()) != 1
    assert fields["R@1"]["value"] < fields["MRR"]["value"] < 1
    for name in names:
        assert (
            fields[name]["low"] <= fields[name]["value"] == pytest.approx(arrays[f"retrieval/fra/t2a/{name}"].mean())
        )
        assert 0 < fields[name]["chance"] < 1
        of_languages = [scores["retrieval"][language]["t2a"][name]["value"] for language in LANGUAGES]
        assert scores["retrieval"]["mean"]["t2a"][name]["value"] == pytest.approx(np.mean(of_languages))
    assert "MRR" not in retrieve(split)[0]["retrieval"]["eng"]["t2a"]
    with pytest.raises(ValueError, match=r"\['R@3'\].*nDCG@10"):
        EvaluationOptions(retrieval_metrics=["MRR", "R@3"])


def test_a_model_that_matches_all_is_perfect(rows, two_units_suffice):
    scores, arrays, _ = retrieve(embed_split(caption_model(rows), rows), LANGUAGES)
    for language in LANGUAGES:
        for direction, queries in (("t2a", 16), ("a2t", 8)):
            metrics = scores["retrieval"][language][direction]
            assert metrics["num_queries"] == queries
            for name in ("R@1", "R@5", "R@10", "mAP@10"):
                assert (metrics[name]["value"], metrics[name]["low"], metrics[name]["high"]) == (1.0, 1.0, 1.0)
            assert metrics["mean_rank"]["value"] == metrics["median_rank"]["value"] == 1
    assert scores["retrieval"]["eng"]["t2a"]["R@1"]["chance"] == pytest.approx(1 / 8)
    assert scores["retrieval"]["eng"]["a2t"]["R@1"]["chance"] == pytest.approx(2 / 16)
    assert scores["multilingual"]["all"]["MRV"]["value"] == scores["multilingual"]["fra"]["Dis"]["value"] == 0
    assert arrays["retrieval/eng/t2a/top"].shape == (16, 8)
    assert arrays["retrieval/eng/t2a/top"][:, 0].tolist() == [place // 2 for place in range(16)]
    assert arrays["similarity/eng/positive"] == pytest.approx(1)
    assert len(arrays["similarity/eng/negative"]) == 10_000
    assert arrays["similarity/eng/negative"].max() < 0.1


def test_a_known_confusion_has_known_scores(rows, two_units_suffice):
    split = embed_split(caption_model(rows, clip2=5), rows)
    scores, arrays, _ = retrieve(split, LANGUAGES)
    metrics = scores["retrieval"]["fra"]
    assert scores["retrieval"]["eng"]["t2a"]["R@1"]["value"] == 1
    assert metrics["t2a"]["R@1"]["value"] == pytest.approx(14 / 16)
    assert 0 < metrics["t2a"]["R@1"]["low"] < 14 / 16 < metrics["t2a"]["R@1"]["high"] <= 1
    # Clip 5 has equal scores for four captions, two of them wrong: a tie counts as wrong.
    assert metrics["a2t"]["R@1"]["value"] == pytest.approx(6 / 8)
    wrong = arrays["retrieval/fra/t2a/rank"] > 0
    assert arrays["retrieval/fra/t2a/query_id"][wrong].tolist() == ["clip2#0", "clip2#1"]
    assert set(arrays["retrieval/fra/t2a/cluster"][wrong]) == {"recording2"}
    assert set(arrays["retrieval/fra/t2a/top"][wrong, 0]) == {5}
    # Two of sixteen parallel captions have rank 0 in English and rank 7 in French.
    assert scores["multilingual"]["all"]["MRV"]["value"] == pytest.approx(2 / 16 * 3.5**2)
    assert scores["retrieval"]["mean"]["t2a"]["R@1"]["value"] == pytest.approx(15 / 16)
    assert scores["multilingual"]["fra"]["Dis"]["value"] == pytest.approx(2 / 16 * 2**0.5, rel=1e-4)
    assert arrays["multilingual/distance/fra"].mean() == pytest.approx(2 / 16 * 2**0.5, rel=1e-4)
    assert scores["multilingual"]["fra"]["Gap"]["low"] is None
    # Two random ranks of 0 to 7: half of the variance of a uniform rank, (8^2 - 1) / 12.
    assert scores["multilingual"]["all"]["MRV"]["chance"] == pytest.approx(63 / 24)


def test_english_is_the_anchor_at_any_position(rows):
    scores, arrays, _ = retrieve(embed_split(caption_model(rows), rows), ["fra", "eng"])
    assert scores["multilingual"].keys() == {"num_parallel", "all", "fra"}
    assert arrays["multilingual/text"].tolist() == [text for row in rows for text in row["captions"]["eng"]]
    assert arrays["multilingual/query_id"][:3].tolist() == ["clip0#0", "clip0#1", "clip1#0"]


def test_a_large_split_has_the_same_results(rows, monkeypatch):
    split = embed_split(caption_model(rows, clip0=1, clip2=5), rows)
    scores, arrays, _ = retrieve(split, LANGUAGES)
    monkeypatch.setattr(embed, "_STORED_SIMILARITIES", 0)
    in_tiles, tiled_arrays, _ = retrieve(split, LANGUAGES)
    assert in_tiles == scores
    assert tiled_arrays.keys() == arrays.keys()
    for name, values in arrays.items():
        if name.startswith("similarity/"):
            np.testing.assert_allclose(tiled_arrays[name], values, atol=1e-6)
        else:
            np.testing.assert_array_equal(tiled_arrays[name], values)
    for name in ("positive", "negative"):
        assert tiled_arrays[f"similarity/fra/{name}"].std() > 0.1
    assert len(tiled_arrays["similarity/fra/positive"]) == 16


def test_languages_without_parallel_captions_are_not_compared(rows):
    apart = []
    for index, row in enumerate(rows):
        language, other = LANGUAGES[index % 2], LANGUAGES[1 - index % 2]
        captions = {language: row["captions"][language]}
        apart.append({**row, "captions": captions if index < 4 else {**captions, other: []}})
    scores, arrays, _ = retrieve(embed_split(caption_model(rows), apart), LANGUAGES, caption_handling="each")
    assert list(scores) == ["retrieval"]
    assert not [name for name in arrays if name.startswith("multilingual")]
    for language in LANGUAGES:
        metrics = scores["retrieval"][language]["t2a"]
        assert (metrics["num_queries"], metrics["R@1"]["chance"]) == (8, pytest.approx(1 / 4))


def test_figures_show_clips_from_the_whole_split(rows, monkeypatch):
    monkeypatch.setattr(retrieval, "_SAMPLED_CLIPS", 3)
    split = embed_split(caption_model(rows), rows)
    _, arrays, _ = retrieve(split)
    assert arrays["embeddings/audio_clip"].tolist() == arrays["embeddings/text_clip/eng"].tolist() == [0, 3, 6]
    first = split.texts([rows[3]["captions"]["eng"][0]], "eng")
    np.testing.assert_array_equal(arrays["embeddings/text/eng"][1:2], first)


def test_it_agrees_with_the_trainer(rows):
    model, processor = builders.supclap_model(), builders.bert_processor()
    split = embed_split(load_embedding_model(model, processor), rows)
    scores, arrays, _ = retrieve(split, LANGUAGES)
    batch = EvaluationCollator(processor, LANGUAGES)([IndexedRows(rows)[index] for index in range(8)])
    texts = {name: batch[name].flatten(0, 1) for name in processor.tokenizer.model_input_names}
    audio = model.get_audio_features(batch["input_features"], batch["audio_attention_mask"]).pooler_output
    text = model.get_text_features(**texts).pooler_output.unflatten(0, (8, -1)).detach().numpy()
    prediction = SimpleNamespace(predictions=(audio.detach().numpy(), text), label_ids=np.arange(8))
    report = retrieval_metrics(IndexedRows(rows), LANGUAGES, "clip")(prediction)
    for language in LANGUAGES:
        for direction in ("t2a", "a2t"):
            for name in ("R@1", "R@5", "R@10", "mAP@10", "mean_rank", "median_rank"):
                metrics = scores["retrieval"][language][direction][name]["value"]
                assert metrics == pytest.approx(report[f"{language}_{direction}_{name}"])
    assert report["MRV"] == pytest.approx(arrays["multilingual/ranks"].var(axis=1).mean())


def test_shared_captions_are_one_query_with_several_answers(rows):
    twins = [rows[0], {**rows[4], "captions": rows[0]["captions"]}, rows[1]]
    hears = load_embedding_model(ToneModel(caption_tones(rows[:1]) | dict.fromkeys(rows[1]["captions"]["eng"], 1)))
    split = embed_split(hears, twins)
    own, _, _ = retrieve(split)
    shared, arrays, _ = retrieve(split, positives="captions")
    assert (own["retrieval"]["eng"]["t2a"]["num_queries"], shared["retrieval"]["eng"]["t2a"]["num_queries"]) == (6, 4)
    assert own["retrieval"]["eng"]["t2a"]["R@1"]["value"] == pytest.approx(
        4 / 6
    )  # the captions of its twin describe the other tone
    assert shared["retrieval"]["eng"]["t2a"]["R@1"]["value"] == 1
    # Groups are resampled in both directions, since recordings that share captions succeed and fail together.
    first, other = twins[0]["source"], twins[2]["source"]
    assert arrays["retrieval/eng/t2a/cluster"].tolist() == [first, first, other, other]
    assert arrays["retrieval/eng/a2t/cluster"].tolist() == [first, first, other]
    # In random order the best of m among 3 clips stands at 4 / (m + 1): two captions have two answers, two have one.
    assert shared["retrieval"]["eng"]["t2a"]["mean_rank"]["chance"] == pytest.approx((2 * 4 / 3 + 2 * 4 / 2) / 4)
    # A shared caption is one query, with the row of the first clip.
    assert arrays["retrieval/eng/t2a/query_id"].tolist() == ["clip0#0", "clip0#1", "clip1#0", "clip1#1"]


def test_pooling_best_scores_the_best_chunk(tmp_path, rows):
    import soundfile

    long = []
    for index, row in enumerate(rows):  # 0.5 s of its own tone, then 1.5 s of the next tone
        parts = [
            np.tile(builders.tone(200.0 * (tone % 8 + 1), 8000), times) for tone, times in ((index, 1), (index + 1, 3))
        ]
        soundfile.write(tmp_path / f"long_{index}.wav", 0.5 * np.concatenate(parts), builders.RATE_HZ)
        long.append({**row, "audio_path": str(tmp_path / f"long_{index}.wav")})
    metrics = {}
    for pooling in ("mean", "best"):
        split = embed_split(caption_model(rows), long, AudioPolicy(chunk_seconds=0.5, pooling=pooling))
        scores, arrays, _ = retrieve(split)
        metrics[pooling] = scores["retrieval"]["eng"]["t2a"]
    # three quarters of the previous clip have the tone of this clip
    assert metrics["mean"]["R@1"]["value"] == 0
    assert metrics["best"]["R@1"]["value"] == 0  # a tie between the two clips with this tone
    assert metrics["best"]["R@5"]["value"] == 1
    assert metrics["best"]["mean_rank"]["value"] == 2
    assert arrays["similarity/eng/positive"] == pytest.approx(1, abs=1e-4)


def test_languages_with_other_numbers_of_captions_are_refused_or_cut(rows):
    uneven = [{**rows[0], "captions": {"eng": rows[0]["captions"]["eng"], "fra": rows[0]["captions"]["fra"][:1]}}]
    uneven += [{**rows[1], "captions": {**rows[1]["captions"], "fra": []}}, *rows[2:]]
    split = embed_split(caption_model(rows), uneven)
    with pytest.raises(ValueError, match=r"clip0.*'eng': 2, 'fra': 1.*caption_handling"):
        retrieve(split, LANGUAGES)
    scores, arrays, _ = retrieve(split, LANGUAGES, caption_handling="parallel")
    assert scores["multilingual"]["num_parallel"] == 13
    assert {scores["retrieval"][language]["t2a"]["num_queries"] for language in LANGUAGES} == {13}
    assert "clip1" not in [rows[clip]["clip_id"] for clip in arrays["retrieval/eng/clip"]]
    assert retrieve(split, ["eng"])[0]["retrieval"]["eng"]["t2a"]["num_queries"] == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: caption_table(rows, np.arange(8), "jpn"), "'jpn'"),
        (lambda rows: count_captions(rows, ["eng", "jpn"], "all"), "'jpn'"),
    ],
)
def test_bad_arguments_are_refused(rows, call, message):
    with pytest.raises(ValueError, match=message):
        call(rows)


def test_top_hits_are_row_indices(rows):
    """A clip without a French caption is not a candidate in French, so row indices and candidate indices differ."""
    rows[0] = {**rows[0], "captions": {**rows[0]["captions"], "fra": []}}
    scores, arrays, _ = retrieve(embed_split(caption_model(rows), rows), LANGUAGES, caption_handling="each")
    mean = scores["retrieval"]["mean"]["t2a"]["R@1"]
    assert mean == {"value": 1.0, "low": None, "high": None, "chance": pytest.approx((1 / 8 + 1 / 7) / 2)}
    assert arrays["retrieval/fra/clip"].tolist() == list(range(1, 8))
    assert arrays["retrieval/fra/t2a/top"][:, 0].tolist() == np.repeat(range(1, 8), 2).tolist()
    assert set(arrays["retrieval/fra/a2t/top"][:, 0]) == set(range(0, 14, 2))


def test_one_recording_has_no_interval(rows):
    same = [{**row, "source": "one"} for row in rows]
    scores, _, _ = retrieve(embed_split(caption_model(rows), same), intervals=Intervals(10))
    levels = {"value": 1.0, "low": None, "high": None, "chance": 1 / 8}
    assert scores["retrieval"]["eng"]["t2a"]["R@1"] == {**levels, "units": 1, "unit": "recordings"}
    scores, _, _ = retrieve(embed_split(caption_model(rows), rows), intervals=Intervals(10))
    assert scores["retrieval"]["eng"]["t2a"]["R@1"] == {**levels, "units": 8, "unit": "clips"}


def test_clips_with_equal_captions_are_one_unit(rows):
    same = [{**row, "captions": rows[index % 4]["captions"]} for index, row in enumerate(rows)]
    scores, _, _ = retrieve(embed_split(caption_model(rows), same), positives="captions")
    found = scores["retrieval"]["eng"]["a2t"]["R@1"]
    assert (found["units"], found["unit"]) == (4, "caption groups")


@pytest.mark.parametrize("candidates", [3, 10, 700, 2500])
def test_the_best_are_those_of_a_stable_sort(candidates):
    draw = np.random.default_rng(0)
    signs = np.float32([-0.5, 0.5])  # of unit norm, with many ties
    queries, texts = draw.choice(signs, (600, 4)), draw.choice(signs, (candidates, 4))
    scores = queries @ texts.T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    assert np.array_equal(find_top(scores), expected)
    assert np.array_equal(find_top(LazySimilarity(queries, texts)), expected)


def test_the_best_are_found_without_the_matrix():
    draw = np.random.default_rng(0)
    queries, texts = (draw.choice(np.float32([-0.25, 0.25]), (rows, 16)) for rows in (8000, 4000))
    similarity = LazySimilarity(queries, texts)
    assert traced_peak(find_top, similarity) < 32e6  # the matrix: 128e6 bytes


@pytest.mark.parametrize("count", [1, 331, 1337])
def test_equal_embeddings_tie_in_both_directions(count):
    texts, audios = builders.unit_rows(count, 96).float().numpy(), builders.unit_rows(203, 96).float().numpy()
    texts[-1], audios[-1] = texts[0], audios[0]
    clips = ClipEmbeddings(audios, np.ones(len(audios), int))
    similarity = clips.similarity(texts)
    t2a, a2t = similarity[:], similarity.T[:]
    np.testing.assert_allclose(t2a, texts @ audios.T, atol=1e-6)
    np.testing.assert_allclose(a2t, t2a.T, atol=1e-6)
    assert np.array_equal(t2a[:, 0], t2a[:, -1])
    assert np.array_equal(a2t[:, 0], a2t[:, -1])


# ---- embeddings of the Trainer: small cases that are easy to check ----

AXES = np.eye(4, dtype=np.float32)


def row(name, eng, fra=()):
    return {"clip_id": name, "captions": {"eng": list(eng), "fra": list(fra)}, "labels": [name]}


ROWS = [row("a", ["A", "a"], ["\u00e2"]), row("b", ["B"], ["b\u0302"]), row("c", ["C", "c"])]
OWN = [0, 0, 0, 1, 1, 2, 2]  # the clip of each caption, in the order eng eng fra | eng fra | eng eng


def predicted(nearest, order=(0, 1, 2)):
    """Return audio on three axes, and caption k on the axis of clip `nearest[k]`. Padding is on the axis of clip 0."""
    text = np.zeros((3, 3, 4), dtype=np.float32)
    text[:, :, 0] = 1
    captions = [(clip, number) for clip, count in ((0, 3), (1, 2), (2, 2)) for number in range(count)]
    for (clip, number), axis in zip(captions, nearest, strict=True):
        text[clip, number] = AXES[axis]
    order = np.array(order)
    return SimpleNamespace(predictions=(AXES[:3][order], text[order]), label_ids=order)


def metrics(nearest, languages=("eng", "fra"), positives="clip", **kwargs):
    return retrieval_metrics(IndexedRows(ROWS), languages, positives)(predicted(nearest, **kwargs))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_perfect_model_whichever_process_saw_which_clip(order):
    report = metrics(OWN, order=order)
    assert {report[f"{language}_{way}_R@1"] for language in ("eng", "fra") for way in ("t2a", "a2t")} == {1.0}
    assert (report["eng_t2a_num_queries"], report["eng_a2t_num_queries"], report["fra_t2a_num_queries"]) == (5, 3, 2)
    assert report["mean_recall"] == 1.0
    assert "MRV" not in metrics(OWN, languages=["eng"])
    # With three clips, chance is 1/3 for R@1 and 1 for R@5 and R@10.
    assert 1 / 3 < report["mean_recall_chance"] < 1


@pytest.mark.parametrize(
    ("nearest", "expected"),
    [
        # The second caption of clip a is still first for it. The caption of clip b ties with one of clip a and counts
        # as wrong.
        ([1, 0, 0, 1, 1, 2, 2], {"eng_t2a_R@1": 4 / 5, "eng_a2t_R@1": 2 / 3}),
        # Clips without a French caption are excluded in French.
        ([0, 0, 1, 1, 0, 2, 2], {"eng_t2a_R@1": 1, "fra_t2a_R@1": 0, "fra_t2a_num_queries": 2}),
        # The French caption of clip a is on the axis of clip b and ties with clip c: ranks 0 and 2, and 0 and 0.
        ([0, 0, 1, 1, 1, 2, 2], {"MRV": 0.5}),
    ],
)
def test_scores_of_wrong_captions(nearest, expected):
    report = metrics(nearest)
    assert {name: report[name] for name in expected} == pytest.approx(expected)


def test_the_median_of_an_even_number_of_ranks_is_rounded_down():
    texts = np.stack([AXES[0], 0.8 * AXES[0] + 0.6 * AXES[1]])  # the second is nearer to clip a than to its own
    prediction = SimpleNamespace(predictions=(AXES[:2], texts[:, None]), label_ids=np.arange(2))
    split = split_from_predictions(prediction, [row("a", ["A"]), row("b", ["B"])], ["eng"])
    scores = retrieve(split)[0]["retrieval"]["eng"]["t2a"]
    assert (scores["mean_rank"]["value"], scores["median_rank"]["value"]) == (1.5, 1)


def test_the_trainer_gets_the_metrics_of_each_dataset_and_language():
    rows = [{**ROWS[0], "dataset": "x"}, {**ROWS[1], "dataset": "x"}, {**ROWS[2], "dataset": "y"}]
    found = retrieval_metrics(IndexedRows(rows), LANGUAGES, "clip")(predicted(OWN))
    of_x = [f"x_{name}" for name in retrieval_metric_names(LANGUAGES)]
    of_y = [f"y_{name}" for name in retrieval_metric_names(["eng"])]
    assert set(found) == {*retrieval_metric_names(LANGUAGES), *of_x, *of_y}
    assert retrieval_metric_names(["fra"]) == [
        "mean_recall",
        *(f"fra_t2a_{name}" for name in ("R@1", "R@5", "R@10", "mAP@10", "mean_rank", "median_rank", "num_queries")),
        *(f"fra_a2t_{name}" for name in ("R@1", "R@5", "R@10", "mAP@10", "mean_rank", "median_rank", "num_queries")),
        "mean_recall_chance",
    ]


@pytest.mark.parametrize("indices", [[0, 1, 1], [0, 1, 3]])
def test_a_missing_or_repeated_clip_is_an_error(indices):
    prediction = predicted(OWN)
    prediction.label_ids = np.array(indices)
    with pytest.raises(ValueError, match=r"\b3\b"):
        in_row_order(prediction)


@pytest.mark.parametrize(("index", "name"), [(0, "audio"), (1, "text")])
def test_embeddings_that_are_not_finite_are_refused(index, name):
    prediction = predicted(OWN)
    prediction.predictions[index][1] = np.nan
    with pytest.raises(ValueError, match=rf"{name}.*\bclip 1\b"):
        in_row_order(prediction)


def test_intervals_contain_the_truth_if_recordings_share_captions():
    """The French captions of a group are all correct or all useless, with probability 1/2."""
    groups, clips = 40, 4
    rows = []
    for clip in range(groups * clips):
        text = str(clip // clips)
        row = {"clip_id": f"c{clip}", "source": f"s{clip}", "captions": {"eng": [text], "fra": [f"fra {text}"]}}
        rows.append({**row, "audio_path": "", "labels": []})
    audio = np.eye(groups + 1, dtype=np.float32)[np.arange(groups * clips) // clips]
    worst_rank = groups * clips - clips  # a tie counts against the caption
    truth = {"R@1": 0.5, "MRV": 0.5 * (worst_rank / 2) ** 2, "MSR": 0.5 * worst_rank**2 / 2}

    rng, trials = np.random.default_rng(0), 80
    covered = dict.fromkeys(truth, 0)
    for trial in range(trials):
        useless = (rng.random(groups) < 0.5).repeat(clips)
        french = np.where(useless[:, None], np.eye(groups + 1, dtype=np.float32)[-1], audio)
        prediction = SimpleNamespace(predictions=(audio, np.stack([audio, french], 1)), label_ids=np.arange(len(rows)))
        split = split_from_predictions(prediction, rows, LANGUAGES)
        drawn = Intervals(150, seed=trial)
        scores, _, _ = retrieve(split, LANGUAGES, positives="captions", intervals=drawn)
        metrics = {**scores["multilingual"]["all"], "R@1": scores["retrieval"]["fra"]["a2t"]["R@1"]}
        for name, value in truth.items():
            covered[name] += metrics[name]["low"] <= value <= metrics[name]["high"]
    assert all(0.88 * trials <= count < trials for count in covered.values()), covered


def test_a_collapsed_text_encoder_wins_the_rank_variance_and_not_the_mean_squared_rank():
    rows = [
        {**ROWS[0], "clip_id": str(clip), "captions": {"eng": [f"e{clip}"], "fra": [f"f{clip}"]}} for clip in range(9)
    ]
    audio = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    collapsed = np.broadcast_to(np.full(4, 0.5, np.float32), (9, 4))
    prediction = SimpleNamespace(
        predictions=(audio, np.stack([collapsed, collapsed], 1)), label_ids=np.arange(len(rows))
    )
    scores, _, _ = retrieve(split_from_predictions(prediction, rows, LANGUAGES), LANGUAGES)
    metrics = scores["multilingual"]["all"]
    assert metrics["MRV"]["value"] == 0 < metrics["MRV"]["chance"]
    assert metrics["MSR"]["value"] == pytest.approx(metrics["MSR"]["chance"]) == np.mean(np.arange(9) ** 2)


def test_intervals_draw_whole_recordings(two_units_suffice):
    rows = [{**ROWS[0], "source": "one"}, {**ROWS[1], "source": "two"}, {**ROWS[2], "source": "one"}]
    split = split_from_predictions(predicted([1, 0, 0, 1, 1, 2, 2]), rows, ["eng", "fra"])
    intervals = Intervals(num_resamples=400)
    metrics = retrieve(split, intervals=intervals)[0]["retrieval"]["eng"]["t2a"]["R@1"]
    outcomes = np.array([0.0, 1, 1, 1, 1])  # outcomes of five captions; four belong to source one
    expected = intervals.draw({"R@1": outcomes}, ["one", "one", "two", "one", "one"], "recordings")["R@1"]
    assert (metrics["low"], metrics["high"], metrics["units"], metrics["unit"]) == expected
    assert expected[0] == pytest.approx(3 / 4)  # source one drawn twice
