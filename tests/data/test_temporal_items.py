"""Temporal items: captions describe the audio, and random choices depend only on the seed and respect the split."""

import itertools
import math
import re
from collections import Counter

import datasets
import numpy as np
import pytest
from temporal_assertions import GOOD, RATE_HZ, make_rows, read_order, strength_db, tone

from modeling_supclap.datasets_scripts.builders.captions import label_phrases, read_phrases
from modeling_supclap.datasets_scripts.temporal.items import (
    RELATIONS,
    TemporalItem,
    TemporalItems,
    describe,
    digest,
    label_phrase,
    one_per_class,
    render,
    split_by_source,
)
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions
from modeling_supclap.languages import LANGUAGES

PHRASES = label_phrases("esc50")
SENTENCES = read_phrases("temporal")


def all_items(items, epoch=0):
    return [item for index in range(len(items)) for item in items.triple(epoch, index)]


# -------------------------------------------------------------------------------------------------------- captions


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(("one", "other"), [("dog", "rain"), ("wind", "church_bells"), ("clapping", "crying_baby")])
def test_captions_name_the_first_sound(language, one, other):
    one, other = PHRASES[one], PHRASES[other]
    for relation, exchange in itertools.product(("before", "after", "while"), (False, True)):
        for text in describe(relation, one, other, [language], exchange)[language]:
            first = (other if exchange else one)[language]
            expected = "both" if relation == "while" else first
            assert read_order(language, text, one[language], other[language]) == expected, text


def test_example_captions():
    one, other = PHRASES["dog"], PHRASES["rain"]
    before, after = describe("before", one, other), describe("after", one, other)
    assert before["eng"][0] == "A dog barking before rain falling"
    assert after["eng"][0] == "Rain falling after a dog barking"
    assert after["fra"][0] == "La pluie qui tombe après un chien qui aboie"
    assert before["deu"][0] == "Ein bellender Hund ist zu hören, bevor prasselnder Regen zu hören ist"
    assert after["spa"][0] == "La lluvia que cae tras un perro que ladra"
    assert before["jpn"][0] == "雨の音の前に犬の鳴き声が聞こえる"
    assert after["zho"][0] == "雨声在狗叫声之后"
    assert describe("single", one, None)["eng"][0] == "Single sound of a dog barking"
    assert describe("combined", one, other)["eng"][0] == "Combined sound of a dog barking and rain falling"
    assert describe("while", one, other, ["eng"], exchange=True)["eng"][0] == "Rain falling while a dog barking"


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_caption_fits_two_clips(language):
    meanings = {}
    for one, other in itertools.permutations(["dog", "rain", "wind", "siren"], 2):
        for relation in RELATIONS:
            sounds = [PHRASES[one], None if relation == "single" else PHRASES[other]]
            sequence = (one, other) if relation != "single" else (one,)
            meaning = (relation.replace("after", "before"), *sequence)
            for text in describe(relation, *sounds, [language])[language]:
                assert meanings.setdefault(text, meaning) == meaning, text


def test_sentences_are_complete_and_name_each_sound_once():
    for sentence, by_language in SENTENCES.items():
        assert list(by_language) == list(LANGUAGES), sentence
        assert len({len(texts) for texts in by_language.values()}) == 1, sentence
        sounds = 1 if sentence in ("single", "zste_label", "zste_first", "zste_second") else 2
        for text in itertools.chain.from_iterable(by_language.values()):
            assert (text.count("{first}"), text.count("{second}")) == (1, sounds - 1), text
            assert text == " ".join(text.split())
    assert set(RELATIONS) < set(SENTENCES)


@pytest.mark.parametrize("name", ["esc50", "synthetic", "urbansound8k"])
def test_no_spanish_phrase_turns_the_y_before_it_into_e(name):
    assert not [texts["spa"] for texts in label_phrases(name).values() if re.match(r"h?i", texts["spa"])]


def test_labels_are_english_phrases_and_missing_phrases_are_named():
    assert label_phrase("crying_baby") == "crying baby"
    assert label_phrase("dog", "fra", PHRASES) == "un chien qui aboie"
    with pytest.raises(ValueError, match=r"'dog'.*'fra'"):
        label_phrase("dog", "fra")
    with pytest.raises(ValueError, match=r"'fox'.*'eng'"):
        label_phrase("fox", "eng", PHRASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("during", {"eng": "a"}, {"eng": "b"}), "'during'"),
        (("single", {"eng": "a"}, {"eng": "b"}), r"\b2\b.*'single'"),
        (("before", {"eng": "a"}, None), r"\b1\b.*'before'"),
        (("before", {"eng": "a"}, {"eng": "b"}, ["eng", "fra"]), "'fra'"),
        (("before", {"eng": "a", "fra": "c"}, {"eng": "b"}, ["eng", "fra"]), "'fra'"),
        (("before", {"swe": "a"}, {"swe": "b"}, ["swe"]), r"\['swe'\]"),
    ],
)
def test_invalid_descriptions_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        describe(*arguments)


# ----------------------------------------------------------------------------------------------------------- items


def test_esc50_has_2450_ordered_pairs_and_7350_items():
    items = TemporalItems(make_rows(PHRASES, sources=2, takes=1), seed=0, phrases=PHRASES)
    assert len(items) == len(set(items.pairs)) == 2450
    triples = [items.triple(0, index) for index in range(len(items))]
    assert {forward.labels for forward, _, _ in triples} == set(itertools.permutations(PHRASES, 2))
    assert len({item.clip_id for triple in triples for item in triple}) == 7350
    for forward, backward, overlaid in triples:
        assert (forward.role, backward.role, overlaid.role) == ("forward", "reversed", "overlaid")
        assert forward.rows == backward.rows[::-1] == overlaid.rows
        assert forward.labels == backward.labels[::-1] == overlaid.labels
        assert forward.labels == tuple(row["labels"][0] for row in forward.rows)


def test_items_do_not_depend_on_the_order_of_the_rows():
    rows = make_rows()
    plain, reordered = (TemporalItems(each, seed=3) for each in (rows, [*rows[1::2], *rows[-2::-2]]))
    assert reordered.labels == plain.labels == tuple(sorted({row["labels"][0] for row in rows}))
    assert reordered.pairs == plain.pairs
    assert [item.clip_id for item in all_items(reordered)] == [item.clip_id for item in all_items(plain)]


def test_half_of_the_captions_use_after():
    rows = make_rows(PHRASES, sources=1, takes=1)
    captions = [item.captions["eng"][0] for item in all_items(TemporalItems(rows, seed=0))]
    said = Counter(re.findall(r"before|after|while", " ".join(captions)))
    assert said["while"] == 2450
    assert said["before"] + said["after"] == 4900
    assert abs(said["after"] - 2450) < 5 * math.sqrt(4900) / 2
    plain = [item.captions["eng"][0] for item in all_items(TemporalItems(rows, seed=0, use_after=False))]
    assert Counter(re.findall(r"before|after|while", " ".join(plain))) == {"before": 4900, "while": 2450}


def test_random_order_exchanges_the_captions_of_half_of_the_pairs():
    rows = make_rows(PHRASES, sources=1, takes=1)
    plain, control = (TemporalItems(rows, seed=0, use_after=False, random_order=value) for value in (False, True))
    exchanged = 0
    for index in range(len(plain)):
        (forward, backward, overlaid), items = plain.triple(0, index), control.triple(0, index)
        assert items[2] == overlaid
        assert [item.clip_id for item in items] == [item.clip_id for item in (forward, backward, overlaid)]
        captions = [item.captions for item in items[:2]]
        assert captions in ([forward.captions, backward.captions], [backward.captions, forward.captions])
        exchanged += captions[0] != forward.captions
    assert abs(exchanged - 2450 / 2) < 5 * math.sqrt(2450) / 2


def test_captions_match_the_rendered_audio():
    """The order of tones in the waveform is the order in the caption."""
    tones_hz = {"dog": 500, "rain": 1000, "wind": 2000}
    items = TemporalItems(make_rows(tones_hz), seed=3, phrases=PHRASES, languages=LANGUAGES)
    for item in all_items(items):
        samples = render(item, lambda row: tone(tones_hz[row["labels"][0]], 0.25), RATE_HZ)
        heard = [max(tones_hz, key=lambda label: strength_db(half, tones_hz[label])) for half in np.split(samples, 2)]
        for language in LANGUAGES:
            one, other = (PHRASES[label][language] for label in item.labels)
            orders = {read_order(language, text, one, other) for text in item.captions[language]}
            if item.role == "overlaid":
                assert orders == {"both"}
                assert samples.size == RATE_HZ // 4
                assert all(strength_db(samples, tones_hz[label]) > -20 for label in item.labels)
            else:
                assert orders == {PHRASES[heard[0]][language]}
                assert samples.size == RATE_HZ // 2
                assert tuple(heard) == item.labels


def test_stage_a_returns_a_single_and_a_combined_item():
    items = TemporalItems(make_rows(), seed=0)
    given = [items.stage_a(0, index) for index in range(len(items))]
    assert {combined.labels for _, combined in given} == set(items.pairs)
    places = Counter(combined.rows.index(single.rows[0]) for single, combined in given)
    assert set(places) == {0, 1}
    assert len({item.clip_id for pair in given for item in pair}) == 2 * len(items)
    for single, combined in given:
        assert single.labels == tuple(single.rows[0]["labels"])
        assert single.captions["eng"][0] == f"Single sound of {single.labels[0]}"
        assert combined.captions["eng"][0] == f"Combined sound of {combined.labels[0]} and {combined.labels[1]}"
        assert render(single, lambda row: GOOD, RATE_HZ).size == 80
        waveforms = iter([0.1 * GOOD, GOOD])
        joined = render(
            combined, lambda row, waveforms=waveforms: next(waveforms), RATE_HZ, RenderOptions(match_loudness=True)
        )
        np.testing.assert_allclose(joined[:80], joined[80:], rtol=1e-5)


def test_items_have_one_meaning_if_they_have_the_same_sounds_in_the_same_relation():
    items = TemporalItems(make_rows(), seed=0)
    found = all_items(items)
    for index in range(len(items)):
        found += items.stage_a(0, index)
    expected = {}
    for item in found:
        order = "in sequence" if item.role in ("forward", "reversed") else item.role
        sounds = item.labels if order == "in sequence" else frozenset(item.labels)
        assert expected.setdefault((order, sounds), item.meaning) == item.meaning
    assert len(set(expected.values())) == len(expected) < len(found)
    assert {order for order, _ in expected} == {"in sequence", "overlaid", "single", "combined"}


def test_sampling_depends_on_seed_epoch_and_index_only():
    rows = make_rows()
    items = TemporalItems(rows, seed=0)
    ids = [item.clip_id for item in all_items(items)]
    items.stage_a(0, 0)
    assert [items.triple(np.int64(0), np.int64(5))[0], items.triple(0, 5)[0]] == [
        TemporalItems(rows, 0).triple(0, 5)[0]
    ] * 2
    assert [item.clip_id for item in all_items(TemporalItems(rows[::-1], seed=0))] == ids
    assert [item.clip_id for item in all_items(TemporalItems(rows, seed=1))] != ids
    table = datasets.Dataset.from_list(rows)
    assert [item.clip_id for item in all_items(TemporalItems(table, seed=0))] == ids


def test_draws_are_those_of_published_runs():
    """A random choice that changes would change the results of a seed."""
    rows, found = make_rows(sources=4), []
    for seed, options in ((0, {}), (5, {"random_order": True, "pairs_per_epoch": 7})):
        items = TemporalItems(
            rows, seed, phrases=PHRASES | {"cow": PHRASES["dog"]}, languages=["eng", "fra"], **options
        )
        for epoch, index in itertools.product(range(2), range(len(items))):
            drawn = (*items.triple(epoch, index), *items.stage_a(epoch, index))
            found += [(item.clip_id, item.role, item.labels, item.captions) for item in drawn]
    assert len(found) == 5 * 2 * (12 + 7)
    assert digest(found).hex()[:16] == "9975cd853b8399c0"
    assert split_by_source(rows, seed=2)[1] == [6, 7, 8, 9, 22, 23, 24, 25]
    assert [one_per_class(rows), one_per_class(rows, 1)] == [[5, 11, 18, 24], [7, 8, 18, 30]]


def test_one_recording_of_each_class_is_drawn_from_sources_of_its_own():
    rows = make_rows(("dog", "rain", "wind"), sources=2, takes=1)
    rows[2]["source"] = rows[0]["source"]  # rain and dog
    rows[4]["source"] = rows[5]["source"] = rows[3]["source"]  # wind and rain
    for seed in range(20):
        dog, rain, wind = one_per_class(rows, seed)
        assert (dog // 2, rain // 2, wind // 2) == (0, 1, 2)
        assert rows[dog]["source"] != rows[rain]["source"]  # wind has no source of its own if rain has taken it


def test_stages_draw_different_recordings():
    items = TemporalItems(make_rows(), seed=0)
    pairs = [(items.triple(0, index)[0].rows, items.stage_a(0, index)[1].rows) for index in range(len(items))]
    assert sum(first == second for first, second in pairs) < 4


def test_recordings_are_drawn_anew_each_epoch_and_all_of_them():
    items = TemporalItems(make_rows(("dog", "rain")), seed=0)
    drawn = Counter(items.triple(epoch, 0)[0].clip_id for epoch in range(400))
    assert len(drawn) == 6 * 6
    assert max(drawn.values()) < 30


def test_short_epochs_go_through_all_pairs_in_turn():
    items = TemporalItems(make_rows(), seed=0, pairs_per_epoch=5)
    epochs = [[items.triple(epoch, index)[0].labels for index in range(len(items))] for epoch in range(12)]
    assert all(len(set(pairs)) == 5 for pairs in epochs)
    in_order = list(itertools.chain.from_iterable(epochs))
    assert set(in_order[:12]) == set(items.pairs)
    assert set(Counter(in_order).values()) == {5}
    assert len(TemporalItems(make_rows(), seed=0, pairs_per_epoch=1)) == 1


def test_a_long_epoch_repeats_all_pairs_with_other_recordings():
    items = TemporalItems(make_rows(), seed=0, pairs_per_epoch=36)
    drawn = [items.triple(0, index)[0] for index in range(len(items))]
    assert set(Counter(item.labels for item in drawn).values()) == {3}
    assert len({item.clip_id for item in drawn}) > 24


def test_only_the_first_phrasing_is_used_if_requested():
    items = TemporalItems(make_rows(), seed=0, num_phrasings=1, use_after=False)
    for index in range(len(items)):
        for item in (*items.triple(0, index), *items.stage_a(0, index)):
            first, second = item.labels[0].capitalize(), item.labels[-1]
            said = {
                "forward": f"{first} before {second}",
                "reversed": f"{first} before {second}",
                "overlaid": f"{first} while {second}",
                "combined": f"Combined sound of {first.lower()} and {second}",
                "single": f"Single sound of {first.lower()}",
            }
            assert item.captions == {"eng": [said[item.role]]}


def test_a_pair_is_never_of_one_source():
    rows = make_rows(("dog", "rain"))
    for row in rows:
        row["source"] = row["source"].replace("rain", "dog")
    items = TemporalItems(rows, seed=0)
    for epoch in range(50):
        first, second = items.triple(epoch, 0)[0].rows
        assert first["source"] != second["source"]
    for row in rows:
        row["source"] = "freesound:1"
    with pytest.raises(ValueError, match="'freesound:1'"):
        TemporalItems(rows, seed=0).triple(0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [*make_rows(), {"clip_id": "x", "labels": [], "source": "s"}]}, r"'x'.*\[\]"),
        ({"rows": [{"clip_id": "x", "labels": ["a", "b"], "source": "s"}]}, r"'x'.*\['a', 'b'\]"),
        ({"rows": make_rows() + make_rows(["dog"])}, "'dog-0A'"),
        ({"rows": make_rows(["dog"])}, r"labels.*\['dog'\]"),
        ({"rows": []}, r"\[\]"),
        ({"languages": ["eng", "fra"]}, "'cat'.*'fra'"),
        ({"languages": ["en"]}, r"\['en'\]"),
        ({"pairs_per_epoch": 0}, "pairs_per_epoch.*0"),
        ({"num_phrasings": 0}, "num_phrasings.*0"),
    ],
)
def test_invalid_rows_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        TemporalItems(**{"rows": make_rows(), "seed": 0, **change})


def test_a_class_with_itself_a_bad_index_and_bad_audio_are_named():
    rows = tuple(make_rows(["dog"])[:2])
    with pytest.raises(ValueError, match=r"forward.*'dog'"):
        TemporalItem("forward", rows, ("dog", "dog"), {}, "forward:a+b")
    items = TemporalItems(make_rows(), seed=0)
    for index in (12, -1):
        with pytest.raises(IndexError, match=f"{index}.*12"):
            items.triple(0, index)
    overlaid = items.triple(0, 0)[2]
    with pytest.raises(ValueError, match=re.escape(overlaid.clip_id)):
        render(overlaid, lambda row: np.zeros(10), RATE_HZ)


# ----------------------------------------------------------------------------------------------------------- split


def test_split_is_by_source_and_class():
    rows = make_rows(sources=10)
    train, test = split_by_source(rows)
    assert sorted(train + test) == list(range(len(rows)))
    assert not {rows[i]["source"] for i in train} & {rows[i]["source"] for i in test}
    assert Counter(rows[i]["labels"][0] for i in train) == {"cat": 14, "cow": 14, "dog": 14, "rain": 14}
    assert split_by_source(rows, seed=1) != (train, test) == split_by_source(rows)
    backwards = split_by_source(rows[::-1])
    assert {rows[::-1][i]["clip_id"] for i in backwards[0]} == {rows[i]["clip_id"] for i in train}


def test_split_leaves_every_class_something_and_never_halves_a_source():
    for sources, fraction, expected in ((1, 0.5, 1), (2, 0.99, 1), (2, 0.01, 1), (3, 0.7, 2)):
        train, _ = split_by_source(make_rows(["dog"], sources, takes=1), fraction)
        assert len(train) == expected
    shared = [row | {"source": f"freesound:{row['clip_id'][-2]}"} for row in make_rows(sources=8)]
    train, test = split_by_source(shared)
    assert len(test) > 0
    assert not {shared[i]["source"] for i in train} & {shared[i]["source"] for i in test}
    for fraction in (0, 1, math.nan):
        with pytest.raises(ValueError, match=f"train_fraction.*{fraction}"):
            split_by_source(shared, fraction)
