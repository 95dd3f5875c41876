"""Retrieval of an embedded split: a model that hears all, one that confuses known clips, and the Trainer's scores."""

import builders
import numpy as np
import pytest
from listeners import Listener, caption_tones
from recordings import tone_rows

from modeling_supclap.evaluation.clip_embeddings import AudioPolicy
from modeling_supclap.evaluation.embedded_split import embed_split
from modeling_supclap.evaluation.embedding_models import load_embedding_model
from modeling_supclap.evaluation.receipts import Intervals
from modeling_supclap.evaluation.retrieval import caption_table, evaluate_retrieval, shared_counts
from modeling_supclap.evaluation.trainer_metrics import parallel_ranks, retrieval_report
from modeling_supclap.training.collator import EvaluationCollator, IndexedRows

LANGUAGES = ["eng", "fra"]


@pytest.fixture
def rows(tmp_path):
    """Eight tones with two captions in each of two languages."""
    return tone_rows(tmp_path)


def listener(rows, **french):
    """Hears all; thinks that the French captions of clip a are about clip b, for `clipa=b`."""
    tones = caption_tones(rows) | caption_tones(rows, "fra")
    for clip, tone in french.items():
        tones |= dict.fromkeys(rows[int(clip.removeprefix("clip"))]["captions"]["fra"], tone)
    return load_embedding_model(Listener(tones))


def test_a_model_that_hears_all_is_perfect(rows):
    scores, arrays = evaluate_retrieval(embed_split(listener(rows), rows), LANGUAGES)
    for language in LANGUAGES:
        for direction, queries in (("t2a", 16), ("a2t", 8)):
            found = scores["retrieval"][language][direction]
            assert found["num_queries"] == queries
            for name in ("R@1", "R@5", "R@10", "mAP@10"):
                assert (found[name]["value"], found[name]["low"], found[name]["high"]) == (1.0, 1.0, 1.0)
            assert found["mean_rank"]["value"] == found["median_rank"]["value"] == 1
    assert scores["retrieval"]["eng"]["t2a"]["R@1"]["chance"] == pytest.approx(1 / 8)
    assert scores["retrieval"]["eng"]["a2t"]["R@1"]["chance"] == pytest.approx(2 / 16)
    assert scores["multilingual"]["MRV"]["value"] == scores["multilingual"]["Dis"]["fra"]["value"] == 0
    assert arrays["retrieval/eng/t2a/top"].shape == (16, 8)
    assert arrays["retrieval/eng/t2a/top"][:, 0].tolist() == [place // 2 for place in range(16)]
    assert arrays["similarity/eng/positive"] == pytest.approx(1)
    assert len(arrays["similarity/eng/negative"]) <= 10_000
    assert arrays["similarity/eng/negative"].max() < 0.1


def test_a_known_confusion_has_known_scores(rows):
    split = embed_split(listener(rows, clip2=5), rows)
    scores, arrays = evaluate_retrieval(split, LANGUAGES)
    found = scores["retrieval"]["fra"]
    assert scores["retrieval"]["eng"]["t2a"]["R@1"]["value"] == 1
    assert found["t2a"]["R@1"]["value"] == pytest.approx(14 / 16)
    assert 0 < found["t2a"]["R@1"]["low"] < 14 / 16 < found["t2a"]["R@1"]["high"] <= 1
    # Clip 5 hears four captions as its own, two of them wrong: a tie, which counts against it.
    assert found["a2t"]["R@1"]["value"] == pytest.approx(6 / 8)
    wrong = arrays["retrieval/fra/t2a/rank"] > 0
    assert arrays["retrieval/fra/t2a/query_id"][wrong].tolist() == ["clip2#0", "clip2#1"]
    assert set(arrays["retrieval/fra/t2a/cluster"][wrong]) == {"recording2"}
    assert set(arrays["retrieval/fra/t2a/top"][wrong, 0]) == {5}
    # Two of sixteen parallel captions are at rank 0 in English and behind all seven others in French.
    assert scores["multilingual"]["MRV"]["value"] == pytest.approx(2 / 16 * 3.5**2)
    assert scores["multilingual"]["t2a"]["R@1"] == pytest.approx(15 / 16)
    assert scores["multilingual"]["Dis"]["fra"]["value"] == pytest.approx(2 / 16 * 2**0.5, rel=1e-4)
    assert arrays["multilingual/distance/fra"].mean() == pytest.approx(2 / 16 * 2**0.5, rel=1e-4)
    assert scores["multilingual"]["Gap"]["fra"]["low"] is None


def test_it_agrees_with_what_the_trainer_computes(rows):
    model, processor = builders.supclap_model(), builders.bert_processor()
    split = embed_split(load_embedding_model(model, processor), rows)
    scores, arrays = evaluate_retrieval(split, LANGUAGES)
    batch = EvaluationCollator(processor, LANGUAGES)([IndexedRows(rows)[index] for index in range(8)])
    texts = {name: batch[name].flatten(0, 1) for name in processor.tokenizer.model_input_names}
    audio = model.get_audio_features(batch["input_features"], batch["audio_attention_mask"]).pooler_output
    text = model.get_text_features(**texts).pooler_output.unflatten(0, (8, -1)).detach().numpy()
    report = retrieval_report(audio.detach().numpy(), text, rows, LANGUAGES, "clip")
    for language in LANGUAGES:
        for direction in ("t2a", "a2t"):
            for name in ("R@1", "R@5", "R@10", "mAP@10", "mean_rank", "median_rank"):
                found = scores["retrieval"][language][direction][name]["value"]
                assert found == pytest.approx(report[language][direction][name])
    expected = parallel_ranks(audio.detach().numpy(), text, rows, LANGUAGES, "clip")
    assert np.array_equal(arrays["multilingual/ranks"], expected)


def test_shared_captions_are_one_query_with_several_answers(rows):
    twins = [rows[0], {**rows[4], "captions": rows[0]["captions"]}, rows[1]]
    hears = load_embedding_model(Listener(caption_tones(rows[:1]) | dict.fromkeys(rows[1]["captions"]["eng"], 1)))
    split = embed_split(hears, twins)
    own, _ = evaluate_retrieval(split)
    shared, arrays = evaluate_retrieval(split, positives="captions")
    assert (own["retrieval"]["eng"]["t2a"]["num_queries"], shared["retrieval"]["eng"]["t2a"]["num_queries"]) == (6, 4)
    assert own["retrieval"]["eng"]["t2a"]["R@1"]["value"] == pytest.approx(4 / 6)  # the twin's are about the other tone
    assert shared["retrieval"]["eng"]["t2a"]["R@1"]["value"] == 1
    assert len(set(arrays["retrieval/eng/t2a/cluster"])) == 2


def test_the_best_chunk_is_what_counts_when_it_is_asked_for(tmp_path, rows):
    import soundfile

    long = []
    for index, row in enumerate(rows):  # half a second of its own tone, then a second and a half of the next one's
        parts = [
            np.tile(builders.tone(200.0 * (tone % 8 + 1), 8000), times) for tone, times in ((index, 1), (index + 1, 3))
        ]
        soundfile.write(tmp_path / f"long_{index}.wav", 0.5 * np.concatenate(parts), builders.RATE_HZ)
        long.append({**row, "audio_path": str(tmp_path / f"long_{index}.wav")})
    found = {}
    for pooling in ("mean", "best"):
        split = embed_split(listener(rows), long, AudioPolicy(chunk_seconds=0.5, pooling=pooling))
        scores, arrays = evaluate_retrieval(split)
        found[pooling] = scores["retrieval"]["eng"]["t2a"]
    assert found["mean"]["R@1"]["value"] == 0  # three quarters of the clip before each sound like its own tone
    assert found["best"]["R@1"]["value"] == 0  # a tie between the two clips that hold the tone
    assert found["best"]["R@5"]["value"] == 1
    assert found["best"]["mean_rank"]["value"] == 2
    assert arrays["similarity/eng/positive"] == pytest.approx(1, abs=1e-4)


def test_languages_with_other_numbers_of_captions_are_refused_or_cut(rows):
    uneven = [{**rows[0], "captions": {"eng": rows[0]["captions"]["eng"], "fra": rows[0]["captions"]["fra"][:1]}}]
    uneven += [{**rows[1], "captions": {**rows[1]["captions"], "fra": []}}, *rows[2:]]
    split = embed_split(listener(rows), uneven)
    with pytest.raises(
        ValueError, match=r"clip clip0 has \{'eng': 2, 'fra': 1\} captions.*caption_handling='parallel'"
    ):
        evaluate_retrieval(split, LANGUAGES)
    scores, arrays = evaluate_retrieval(split, LANGUAGES, caption_handling="parallel")
    assert scores["multilingual"]["num_parallel"] == 13
    assert {scores["retrieval"][language]["t2a"]["num_queries"] for language in LANGUAGES} == {13}
    assert "clip1" not in [rows[clip]["clip_id"] for clip in arrays["retrieval/eng/clip"]]
    assert evaluate_retrieval(split, ["eng"])[0]["retrieval"]["eng"]["t2a"]["num_queries"] == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: caption_table(rows, "jpn"), "no clip of this split has a caption in 'jpn'"),
        (lambda rows: shared_counts(rows, ["eng"], "some"), "caption_handling is 'some'"),
    ],
)
def test_what_cannot_be_asked_is_an_error(rows, call, message):
    with pytest.raises(ValueError, match=message):
        call(rows)


def test_one_recording_has_no_interval(rows):
    same = [{**row, "source": "one"} for row in rows]
    scores, _ = evaluate_retrieval(embed_split(listener(rows), same), intervals=Intervals(10))
    assert scores["retrieval"]["eng"]["t2a"]["R@1"] == {"value": 1.0, "low": None, "high": None, "chance": 1 / 8}
