"""ZSTE end to end: a model that encodes the order of sounds is always correct; an order-blind model is at chance."""

from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from fake_models import ToneModel
from recordings import tone_rows

from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, set_hash, zste_set
from modeling_supclap.evaluation.cache import EmbeddingCache
from modeling_supclap.evaluation.embed import AudioPolicy, embed_split
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.evaluation.options import EvaluationOptions, ZSTEOptions
from modeling_supclap.evaluation.zste import evaluate_pairs, evaluate_zste, temporal_metrics

OPTIONS = ZSTEOptions(num_items=8, num_candidates=12)
PHRASES = {f"tone_{number}": {"eng": f"tone {number}", "fra": f"le ton {number}"} for number in range(4)}


@pytest.fixture
def rows(tmp_path):
    """Rows of eight tones in four classes."""
    return tone_rows(tmp_path)


def run_zste(split, zste, languages=("eng",), phrases=None):
    options = EvaluationOptions(zste=zste, zste_languages=languages, phrases=phrases)
    scores, arrays, protocol = evaluate_zste(split, options)
    return scores, arrays, protocol["zste"]


def split_of(rows, cache=None, policy=None, **options):
    return embed_split(load_embedding_model(ToneModel(**options)), rows, policy, cache)


def test_a_model_that_encodes_order_is_always_correct(rows):
    scores, arrays, protocol = run_zste(split_of(rows), OPTIONS)
    tasks = scores["zste"]["eng"]
    assert {task: tasks[task]["value"] for task in ZSTE_FAMILIES} == dict.fromkeys(ZSTE_FAMILIES, 1.0)
    assert tasks["3A"]["chance"] == pytest.approx(1 / 3)
    assert tasks["4B"]["chance"] == pytest.approx(1 / 12)
    assert tasks["2A"]["chance"] == pytest.approx(1 / 6)
    assert protocol == {
        "num_items": 8,
        "num_candidates": 12,
        "seed": 0,
        "tasks": list(ZSTE_FAMILIES),
        "join": {"match_loudness": False, "match_overlay_loudness": True},
        "prompts": "labels",
        "set_hash": set_hash(zste_set(rows, 0, 8)),
        "languages": ["eng"],
        "clip_seconds": {"single": None, "pair": None},
    }
    assert len(arrays["zste/eng/3A/score"]) == 8
    first = arrays["zste/eng/3A/query_id"][0]
    assert first.startswith("concatenated:")
    sources = {f"recording{clip.removeprefix('clip')}" for clip in first.removeprefix("concatenated:").split("+")}
    assert set(arrays["zste/eng/3A/cluster"][0]) == sources
    assert set(arrays["zste/eng/1A/cluster"].ravel()) == {row["source"] for row in rows}
    used = set(arrays["zste/eng/3A/cluster"].ravel())
    assert len(used) < 8  # of the eight pairs; the recordings are counted, not the pairs
    assert (tasks["3A"]["low"], tasks["3A"]["units"], tasks["3A"]["unit"]) == (None, len(used), "clips")


def test_an_order_blind_model_fails_the_order_tasks(rows):
    tasks = run_zste(split_of(rows, encodes_order=False), OPTIONS)[0]["zste"]["eng"]
    assert {task: tasks[task]["value"] for task in ("1A", "2A", "2B", "2C", "2D")} == dict.fromkeys(
        ("1A", "2A", "2B", "2C", "2D"), 1.0
    )
    # All candidates of these tasks have the same embedding, and a tie is wrong.
    assert {tasks[task]["value"] for task in ("3A", "3B", "4A", "4B", "5B")} == {0.0}


def test_each_clip_is_composed_once(tmp_path, rows):
    model = ToneModel()
    for run in range(2):
        split = embed_split(load_embedding_model(model), rows, cache=EmbeddingCache(tmp_path / "cache"))
        run_zste(split, OPTIONS)
        if run == 0:
            audio = [count for kind, count, _ in model.calls if kind == "audio"]
            assert audio == [8, 24]  # the split; three families of eight
            before = len(model.calls)
    assert len(model.calls) == before


@pytest.mark.parametrize(
    ("trained", "option", "languages", "used"),
    [
        ("phrases", None, ["eng"], "phrases"),
        ("phrases", "labels", ["eng"], "labels"),
        (None, None, ["eng"], "labels"),
        (None, None, ["fra"], "phrases"),
        (None, "phrases", ["eng"], "phrases"),
    ],
)
def test_zste_uses_the_prompts_of_the_post_training(rows, trained, option, languages, used):
    split = embed_split(load_embedding_model(Anglophone()), rows)
    split.model.prompts = trained
    options = ZSTEOptions(num_items=8, num_candidates=12, tasks=("1A",), prompts=option)
    assert run_zste(split, options, languages, phrases=PHRASES)[2]["prompts"] == used


def test_a_clip_with_several_labels_is_named(rows):
    rows[5]["labels"] = ["tone_1", "tone_2"]
    with pytest.raises(ValueError, match=r"clip clip5 has the labels \['tone_1', 'tone_2'\]; ZSTE needs one label"):
        run_zste(split_of(rows), OPTIONS)


def test_a_pair_is_cropped_from_its_first_sound(rows):
    tone, rate_hz = soundfile.read(rows[0]["audio_path"])
    split = split_of(rows)
    soundfile.write(rows[0]["audio_path"], np.concatenate([np.zeros(rate_hz), tone]), rate_hz)
    seconds = len(tone) / rate_hz
    split.model.window_seconds = 2 * seconds
    scores, _, protocol = run_zste(split, ZSTEOptions(num_items=8, tasks=("3A",)))
    assert protocol["clip_seconds"] == {"single": None, "pair": seconds}
    assert scores["zste"]["eng"]["3A"]["value"] == 1.0


@pytest.mark.parametrize(
    ("window", "policy", "single", "pair"),
    [
        (0.5, AudioPolicy(0.2), 0.2, 0.2),
        (0.5, AudioPolicy(0.4), 0.4, 0.25),
        (None, AudioPolicy(0.4), 0.4, 0.4),
        (0.5, AudioPolicy(0.4, chunk_seconds=0.3), 0.3, 0.15),
        (0.5, AudioPolicy(chunk_seconds=0.3), 0.3, 0.15),
        (None, AudioPolicy(chunk_seconds=0.3), 0.3, 0.15),
    ],
)
def test_recordings_are_cropped_to_the_policy_and_the_window(rows, window, policy, single, pair):
    model = load_embedding_model(ToneModel())
    model.window_seconds = window
    split = embed_split(model, rows, policy)
    lengths, encode = [], model.encode_audio
    model.encode_audio = lambda waveforms, size: lengths.extend(map(len, waveforms)) or encode(waveforms, size)
    protocol = run_zste(split, ZSTEOptions(num_items=2, tasks=("1A", "3A")))[2]
    assert protocol["clip_seconds"] == {"single": single, "pair": pytest.approx(pair)}
    assert sorted(lengths) == sorted([round(single * 16_000)] * 2 + [round(2 * pair * 16_000)] * 2)


def test_short_sounds_are_padded_if_requested(rows):
    model = load_embedding_model(ToneModel())
    model.min_seconds = 0.6
    options = ZSTEOptions(num_items=2, tasks=("3A",))
    split = embed_split(model, rows, AudioPolicy(pad_short_clips=True))
    lengths, encode = [], model.encode_audio
    model.encode_audio = lambda waveforms, size: lengths.extend(map(len, waveforms)) or encode(waveforms, size)
    run_zste(split, options)
    assert lengths == [2 * 9600] * 2


def test_recordings_that_cannot_be_joined_are_named(rows, monkeypatch):
    def refuse(*args):
        raise ValueError("too quiet")

    monkeypatch.setattr("modeling_supclap.evaluation.zste.compose", refuse)
    with pytest.raises(BadAudioError, match=r"cannot join clip\d and clip\d: too quiet"):
        run_zste(split_of(rows), ZSTEOptions(num_items=2, tasks=("3A",)))


def test_only_families_of_the_chosen_tasks_are_composed(rows):
    model = ToneModel()
    options = ZSTEOptions(num_items=8, tasks=("3A", "5A"))
    scores, _, _ = run_zste(embed_split(load_embedding_model(model), rows), options)
    assert list(scores["zste"]["eng"]) == ["3A", "3A_order", "5A"]
    assert [count for kind, count, _ in model.calls if kind == "audio"] == [8, 8]


class Anglophone(ToneModel):
    """Model that does not understand French."""

    def encode_text(self, texts, language):
        same = np.full((len(texts), 41), 41**-0.5, dtype=np.float32)
        return super().encode_text(texts, language) if language == "eng" else same


def test_languages_have_the_same_questions_and_are_compared(rows):
    split = embed_split(load_embedding_model(Anglophone()), rows)
    scores, arrays, protocol = run_zste(split, OPTIONS, ["eng", "fra"], PHRASES)
    tasks = scores["zste"]
    assert protocol["prompts"] == "phrases"
    assert (tasks["eng"]["3A"]["value"], tasks["fra"]["3A"]["value"]) == (1, 0)
    assert tasks["eng"]["3A"]["chance"] == tasks["fra"]["3A"]["chance"]
    assert tasks["all"].keys() == {"3A", "3B", "4A", "4B", "5A", "5B"}
    assert tasks["all"]["3A"]["MRV"]["value"] == 1  # ranks 0 and 2
    assert tasks["all"]["4A"]["MRV"]["value"] == pytest.approx((11 / 2) ** 2)
    assert arrays["zste/ranks/3A"].tolist() == [[0, 2]] * 8
    assert arrays["zste/eng/3A/query_id"].tolist() == arrays["zste/fra/3A/query_id"].tolist()


def test_both_clips_of_a_pair_fit_into_the_models_limit(rows):
    model = load_embedding_model(ToneModel())
    model.chunk_seconds = 0.5
    lengths = []
    hear = model.encode_audio
    model.encode_audio = lambda waveforms, size: lengths.extend(map(len, waveforms)) or hear(waveforms, size)
    scores, _, protocol = run_zste(embed_split(model, rows), OPTIONS)
    assert protocol["clip_seconds"] == {"single": 0.5, "pair": 0.25}
    assert max(lengths) == 8000
    assert scores["zste"]["eng"]["3A"]["value"] == 1


def test_other_joins_and_other_seeds_are_other_sets(tmp_path, rows):
    cache = EmbeddingCache(tmp_path)
    num_embedded = []
    for options in (OPTIONS, ZSTEOptions(8, 12, seed=1), ZSTEOptions(8, 12, join=RenderOptions(match_loudness=True))):
        before = cache.embedded
        run_zste(split_of(rows, cache), options)
        num_embedded.append(cache.embedded - before)
    assert all(num_embedded)


def test_too_few_classes_for_the_candidates_are_an_error(rows):
    with pytest.raises(ValueError, match=r"num_candidates.*500"):
        run_zste(split_of(rows), ZSTEOptions(8, 500))
    with pytest.raises(ValueError, match="'fra'"):
        run_zste(split_of(rows), OPTIONS, ["eng", "fra"])


def test_zste_with_best_chunks(rows):
    policy = AudioPolicy(chunk_seconds=0.25, pooling="best")
    tasks = run_zste(split_of(rows, policy=policy), OPTIONS)[0]["zste"]["eng"]
    assert tasks["1A"]["value"] == 1


def test_the_order_blind_level_is_reported_with_chance(rows):
    tasks = run_zste(split_of(rows), OPTIONS)[0]["zste"]["eng"]
    assert {task for task, own in tasks.items() if "order_blind" in own} == {"3A", "4A"}
    assert (tasks["3A_order"]["value"], tasks["3A_order"]["chance"]) == (1, 1 / 2)
    deaf = run_zste(split_of(rows, encodes_order=False), OPTIONS)[0]["zste"]["eng"]
    assert deaf["3A_order"]["value"] == 0  # a tie is wrong
    assert (tasks["3A"]["chance"], tasks["3A"]["order_blind"]) == (pytest.approx(1 / 3), 1 / 2)


# ---- the pairs of a post-training ----


@pytest.mark.parametrize(("roles", "names"), [(2, ("single", "combined")), (3, ("forward", "reversed", "overlaid"))])
def test_temporal_accuracy_counts_ties_as_wrong(roles, names):
    audio = np.tile(np.eye(roles, dtype=np.float32), (2, 1, 1))
    text = audio.copy()
    text[1, 0] = text[1, 1]  # the captions of the first two items of the second pair are equal
    scores = temporal_metrics(SimpleNamespace(predictions=(audio, text), label_ids=np.arange(2)))
    expected = {name: 0.5 if place < 2 else 1.0 for place, name in enumerate(names)}
    assert {name: scores[f"{name}_accuracy"] for name in names} == expected
    assert scores["temporal_accuracy"] == pytest.approx(np.mean(list(expected.values())))
    assert scores["temporal_accuracy_chance"] == 1 / roles


def test_an_order_blind_model_scores_at_its_level():
    draw = np.random.default_rng(0)
    sequence, overlap, noise = np.eye(2, 3)[0], np.eye(2, 3)[1], 1e-3 * draw.standard_normal((2000, 3, 3))
    audio_embeds = (
        np.stack([sequence, sequence, overlap]) + noise[:1000]
    )  # forward and reversed items have equal embeddings
    read = np.stack([sequence, sequence, overlap]) + noise[1000:]
    prediction = SimpleNamespace(predictions=(audio_embeds, read), label_ids=np.arange(1000))
    scores, arrays = evaluate_pairs(prediction)
    for name in ("temporal_accuracy", "forward_accuracy", "reversed_accuracy"):
        assert scores[name]["value"] == pytest.approx(scores[name]["order_blind"], abs=0.04)
    assert scores["order_accuracy"]["value"] == pytest.approx(scores["order_accuracy"]["chance"], abs=0.04)
    assert scores["overlaid_accuracy"]["value"] == 1
    assert arrays["order_accuracy"].mean() == scores["order_accuracy"]["value"]
    assert {(fields["units"], fields["unit"]) for fields in scores.values()} == {(1000, "pairs")}
