"""ZSTE end to end: a model that hears the order of sounds answers everything, one that does not guesses."""

import numpy as np
import pytest
from listeners import Listener
from recordings import tone_rows

from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, set_hash, zste_set
from modeling_supclap.evaluation.clip_embeddings import AudioPolicy
from modeling_supclap.evaluation.embedded_split import embed_split
from modeling_supclap.evaluation.embedding_cache import EmbeddingCache
from modeling_supclap.evaluation.embedding_models import load_embedding_model
from modeling_supclap.evaluation.zste import ZSTEOptions, evaluate_zste

OPTIONS = ZSTEOptions(num_items=8, num_candidates=12)
PHRASES = {f"tone_{number}": {"eng": f"tone {number}", "fra": f"le ton {number}"} for number in range(4)}


@pytest.fixture
def rows(tmp_path):
    """Eight tones of four classes."""
    return tone_rows(tmp_path)


def split_of(rows, cache=None, policy=None, **listener):
    return embed_split(load_embedding_model(Listener(**listener)), rows, policy, cache)


def test_who_hears_order_answers_every_question(rows):
    scores, arrays, protocol = evaluate_zste(split_of(rows), OPTIONS)
    found = scores["zste"]["eng"]
    assert {task: found[task]["value"] for task in ZSTE_FAMILIES} == dict.fromkeys(ZSTE_FAMILIES, 1.0)
    assert found["3A"]["chance"] == pytest.approx(1 / 3)
    assert found["4B"]["chance"] == pytest.approx(1 / 12)
    assert found["2A"]["chance"] == pytest.approx(1 / 6)
    assert protocol["set_hash"] == set_hash(zste_set(rows, 0, 8))
    assert protocol["prompts"] == "labels"
    assert len(arrays["zste/eng/3A/score"]) == 8
    first = arrays["zste/eng/3A/question_id"][0]
    assert first.startswith("concatenated:")
    sources = {f"recording{clip.removeprefix('clip')}" for clip in first.removeprefix("concatenated:").split("+")}
    assert set(arrays["zste/eng/3A/cluster"][0].split("+")) == sources


def test_who_hears_only_what_sounds_cannot_tell_the_order(rows):
    found = evaluate_zste(split_of(rows, hears_order=False), OPTIONS)[0]["zste"]["eng"]
    assert {task: found[task]["value"] for task in ("1A", "2A", "2B", "2C", "2D")} == dict.fromkeys(
        ("1A", "2A", "2B", "2C", "2D"), 1.0
    )
    # Every candidate of these says the same to it, and a tie is wrong.
    assert {found[task]["value"] for task in ("3A", "3B", "4A", "4B", "5B")} == {0.0}


def test_each_clip_is_composed_once_and_not_again(tmp_path, rows):
    listener = Listener()
    for run in range(2):
        split = embed_split(load_embedding_model(listener), rows, cache=EmbeddingCache(tmp_path / "cache"))
        evaluate_zste(split, OPTIONS)
        if run == 0:
            audio = [count for kind, count, _ in listener.calls if kind == "audio"]
            assert audio == [8, 24]  # the split; three families of eight
            before = len(listener.calls)
    assert len(listener.calls) == before


def test_only_what_is_asked_is_composed(rows):
    listener = Listener()
    options = ZSTEOptions(num_items=8, tasks=("3A", "5A"))
    scores, _, _ = evaluate_zste(embed_split(load_embedding_model(listener), rows), options)
    assert list(scores["zste"]["eng"]) == ["3A", "5A"]
    assert [count for kind, count, _ in listener.calls if kind == "audio"] == [8, 8]


class Anglophone(Listener):
    """Makes nothing of French."""

    def encode_text(self, texts, language):
        same = np.full((len(texts), 41), 41**-0.5, dtype=np.float32)
        return super().encode_text(texts, language) if language == "eng" else same


def test_languages_are_asked_the_same_and_compared(rows):
    split = embed_split(load_embedding_model(Anglophone()), rows)
    scores, arrays, protocol = evaluate_zste(split, OPTIONS, ["eng", "fra"], PHRASES)
    found = scores["zste"]
    assert protocol["prompts"] == "phrases"
    assert (found["eng"]["3A"]["value"], found["fra"]["3A"]["value"]) == (1, 0)
    assert found["eng"]["3A"]["chance"] == found["fra"]["3A"]["chance"]
    assert found["MRV"].keys() == {"3A", "3B", "4A", "4B", "5A", "5B"}
    assert found["MRV"]["3A"]["value"] == 1  # ranks 0 and 2
    assert found["MRV"]["4A"]["value"] == pytest.approx((11 / 2) ** 2)
    assert arrays["zste/ranks/3A"].tolist() == [[0, 2]] * 8
    assert arrays["zste/eng/3A/question_id"].tolist() == arrays["zste/fra/3A/question_id"].tolist()


def test_both_clips_of_a_pair_are_heard_within_the_models_limit(rows):
    model = load_embedding_model(Listener())
    model.chunk_seconds = 0.5
    lengths = []
    hear = model.audio_encoder
    model.audio_encoder = lambda waveforms, size: lengths.extend(map(len, waveforms)) or hear(waveforms, size)
    scores, _, protocol = evaluate_zste(embed_split(model, rows), OPTIONS)
    assert protocol["clip_seconds"] == {"single": 0.5, "pair": 0.25}
    assert max(lengths) == 8000
    assert scores["zste"]["eng"]["3A"]["value"] == 1


def test_other_joins_and_other_seeds_are_other_sets(tmp_path, rows):
    cache = EmbeddingCache(tmp_path)
    made = []
    for options in (OPTIONS, ZSTEOptions(8, 12, seed=1), ZSTEOptions(8, 12, join=RenderOptions(gap_seconds=0.1))):
        before = cache.embedded
        evaluate_zste(split_of(rows, cache), options)
        made.append(cache.embedded - before)
    assert all(made)


@pytest.mark.parametrize("tasks", [(), ("9Z",)])
def test_unknown_tasks_are_refused(tasks):
    with pytest.raises(ValueError, match="give some of 1A"):
        ZSTEOptions(tasks=tasks)


def test_too_few_classes_for_the_candidates_are_an_error(rows):
    with pytest.raises(ValueError, match="num_candidates is 500"):
        evaluate_zste(split_of(rows), ZSTEOptions(8, 500))
    with pytest.raises(ValueError, match="has no phrase in 'fra'"):
        evaluate_zste(split_of(rows), OPTIONS, ["eng", "fra"])


def test_best_chunks_serve_too(rows):
    policy = AudioPolicy(chunk_seconds=0.25, pooling="best")
    found = evaluate_zste(split_of(rows, policy=policy), OPTIONS)[0]["zste"]["eng"]
    assert found["1A"]["value"] == 1
