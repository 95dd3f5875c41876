"""ZSTE: the set is balanced and has a hash, and each question has correct answers that require the audio."""

import json
import re
from collections import Counter

import pytest
from temporal_assertions import make_rows, read_order

from modeling_supclap.datasets_scripts.builders.captions import label_phrases, read_phrases
from modeling_supclap.datasets_scripts.temporal import zste
from modeling_supclap.datasets_scripts.temporal.items import digest
from modeling_supclap.datasets_scripts.temporal.zste import ZSTE_FAMILIES, set_hash, zste_prompts, zste_set
from modeling_supclap.languages import LANGUAGES

PHRASES = label_phrases("esc50")
SENTENCES = read_phrases("temporal")

# Words in the prompts of task 5, which must not occur in the training captions.
TASK_5_WORDS = {
    "eng": r"\b(?:first|second|concatenated|simultaneous)\b",
    "fra": r"premier|second\b|enchaîn|simultan",
    "deu": r"erste|zweite|zusammengefügt|gleichzeitig",
    "spa": r"primer|segundo|concatenad|simult",
    "nld": r"eerste|tweede|samengevoegd|gelijktijdig",
    "cat": r"primer|segon\b|concatenat|simult",
    "jpn": r"最初|二番目|つなげ|同時",
    "zho": r"第一|第二|拼接|同时",
}


@pytest.fixture(scope="module")
def records():
    return zste_set(make_rows(PHRASES), seed=0, num_items=120)


def record_of(records, family):
    return next(record for record in records if record["family"] == family)


def test_an_evaluation_set_is_balanced_and_plain(records):
    assert json.loads(json.dumps(records)) == records
    families = {
        family: [r for r in records if r["family"] == family] for family in ("single", "concatenated", "overlaid")
    }
    assert [len(members) for members in families.values()] == [120, 120, 120]
    singles = families["single"]
    assert len({record["clip_ids"][0] for record in singles}) == 120
    assert set(Counter(record["labels"][0] for record in singles).values()) == {2, 3}
    pairs = [tuple(record["labels"]) for record in families["concatenated"]]
    assert len(set(pairs)) == 120
    for sequential, overlaid in zip(families["concatenated"], families["overlaid"], strict=True):
        assert sequential["clip_ids"] == overlaid["clip_ids"]
    for record in records:
        assert record["labels"] == [clip_id.split("-")[0] for clip_id in record["clip_ids"]]
    assert len({record["id"] for record in records}) == 360


def test_more_items_than_there_are_go_on_with_other_recordings():
    records = zste_set(make_rows(("dog", "rain")), seed=0, num_items=20)
    assert Counter(record["family"] for record in records) == {"single": 12, "concatenated": 20, "overlaid": 20}
    assert len({record["id"] for record in records}) == len(records)  # nothing is asked twice
    few = Counter(record["family"] for record in zste_set(make_rows(("dog", "rain"))[::6], seed=0, num_items=20))
    assert few == {"single": 2, "concatenated": 2, "overlaid": 2}
    one = [record["family"] for record in zste_set(make_rows(), seed=0, num_items=1)]
    assert one == ["single", "concatenated", "overlaid"]
    with pytest.raises(ValueError, match=r"num_items.*0"):
        zste_set(make_rows(), seed=0, num_items=0)


def test_the_hash_identifies_the_set(monkeypatch):
    rows = make_rows()
    records = zste_set(rows, seed=0, num_items=4)
    assert set_hash(records) == "e0a2379dc301a16752107cda25b83f8183e824a3a302a5b19d7e25cf68b54732"
    assert set_hash(zste_set(rows[::-1], seed=0, num_items=4)) == set_hash(records)
    assert set_hash(json.loads(json.dumps(records))) == set_hash(records)
    others = [zste_set(rows, 1, 4), zste_set(rows, 0, 5), zste_set(rows[:-1], 0, 4), records[::-1]]
    assert len({set_hash(other) for other in [records, *others]}) == 5
    before = set_hash(records)
    monkeypatch.setattr(zste, "ZSTE_VERSION", 2)
    assert set_hash(records) != before


def test_questions_are_those_of_published_evaluations(records):
    """A question that changes would change the results of a seed; it needs another `ZSTE_VERSION`."""
    found = []
    for task, family in ZSTE_FAMILIES.items():
        for number, record in enumerate(each for each in records if each["family"] == family):
            if number < 2:
                found.append(zste_prompts(task, record, list(PHRASES), PHRASES, "fra", seed=number))
    few = ["dog", "rain", "wind", "siren"]
    record = {"id": "r", "family": "overlaid", "clip_ids": ["a", "b"], "labels": ["dog", "rain"]}
    found += [zste_prompts(task, record, few, num_candidates=11) for task in ("4B", "5B")]
    assert digest(found).hex()[:16] == "b8a1ec827290b08a"


@pytest.mark.parametrize(("task", "count"), [("1A", 1), ("2A", 2), ("2B", 2), ("2C", 2), ("2D", 2)])
def test_label_tasks_ask_for_every_class(records, task, count):
    record = record_of(records, ZSTE_FAMILIES[task])
    prompts = zste_prompts(task, record, list(PHRASES))
    assert prompts.texts == [f"The sound of {label.replace('_', ' ')}" for label in PHRASES]
    assert [list(PHRASES)[index] for index in prompts.right] == record["labels"]
    assert len(prompts.right) == count


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", ["3A", "3B", "4A", "4B"])
def test_order_tasks_have_one_correct_answer(records, task, language):
    record = record_of(records, ZSTE_FAMILIES[task])
    first, second = (PHRASES[label][language] for label in record["labels"])
    prompts = zste_prompts(task, record, list(PHRASES), PHRASES, language)
    assert len(prompts.texts) == len(set(prompts.texts)) == (3 if task[0] == "3" else 50)
    (right,) = prompts.right
    assert read_order(language, prompts.texts[right], first, second) == (first if task[1] == "A" else "both")
    about_both = [text for text in prompts.texts if first.lower() in text.lower() and second.lower() in text.lower()]
    assert sorted(read_order(language, text, first, second) for text in about_both) == sorted([first, second, "both"])


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", ["5A", "5B"])
def test_task_5_has_two_right_answers(records, task, language):
    record = record_of(records, ZSTE_FAMILIES[task])
    first, second = (PHRASES[label][language] for label in record["labels"])
    prompts = zste_prompts(task, record, list(PHRASES), PHRASES, language)
    assert len(prompts.texts) == len(set(prompts.texts)) == (4 if task == "5A" else 50)
    one, two = (prompts.texts[index] for index in prompts.right)
    if task == "5A":
        assert one == SENTENCES["zste_first"][language][0].format(first=first)
        assert two == SENTENCES["zste_second"][language][0].format(first=second)
    else:
        assert one.lower().index(first.lower()) < one.lower().index(second.lower())
        assert two.lower().index(second.lower()) < two.lower().index(first.lower())


def named_labels(text, labels):
    return {label for label in labels if re.search(rf"\b{label}\b", text.lower())}


@pytest.mark.parametrize(("task", "fixed"), [("4A", 3), ("4B", 3), ("5B", 2)])
@pytest.mark.parametrize("num_labels", [5, 30])
def test_the_others_name_an_absent_class_and_a_present_one_while_there_are_such(records, task, fixed, num_labels):
    labels = [f"class{number}" for number in range(num_labels)]
    record = record_of(records, ZSTE_FAMILIES[task]) | {"labels": ["class3", "class1"]}
    most = fixed + (2 if fixed == 3 else 1) * (num_labels * (num_labels - 1) - 2)
    for num_candidates in (fixed, fixed + 6, min(most, 200)):
        texts = zste_prompts(task, record, labels, num_candidates=num_candidates).texts
        assert len(set(texts)) == num_candidates
        present = Counter(len(named_labels(text, labels) & {"class3", "class1"}) for text in texts)
        one_sounds = (8 if fixed == 3 else 4) * (num_labels - 2)
        assert present[2] == fixed
        assert present[1] == min(num_candidates - fixed, one_sounds)
    for num_candidates in (fixed - 1, most + 1):
        with pytest.raises(ValueError, match=rf"num_candidates.*{num_candidates}.*\b{fixed}\b.*\b{most}\b"):
            zste_prompts(task, record, labels, num_candidates=num_candidates)


@pytest.mark.parametrize("task", ZSTE_FAMILIES)
def test_a_question_is_the_same_in_all_languages_and_changes_with_the_seed(records, task):
    record, labels = record_of(records, ZSTE_FAMILIES[task]), list(PHRASES)
    asked = [zste_prompts(task, record, labels, PHRASES, language) for language in LANGUAGES]
    assert len({tuple(prompts.right) for prompts in asked}) == 1
    assert len({len(prompts.texts) for prompts in asked}) == 1
    if task in ("4A", "4B", "5B"):
        named = [
            [[label for label in labels if PHRASES[label][language].lower() in text.lower()] for text in prompts.texts]
            for language, prompts in zip(LANGUAGES, asked, strict=True)
            if language in ("eng", "fra")
        ]
        assert [set(names) for names in named[0]] == [set(names) for names in named[1]]
        assert zste_prompts(task, record, labels, PHRASES, seed=1).texts != asked[0].texts
    assert zste_prompts(task, record, labels, PHRASES) == asked[0]


def test_the_correct_answer_has_a_random_position(records):
    places = Counter(
        zste_prompts("3A", record, list(PHRASES)).right[0] for record in records if record["family"] == "concatenated"
    )
    assert set(places) == {0, 1, 2}
    assert max(places.values()) < 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "6A"}, "'6A'"),
        ({"task": "3B"}, "3B.*'overlaid'.*'r'"),
        ({"labels": ["dog", "rain", "dog"]}, "'dog', 'rain', 'dog'"),
        ({"labels": ["dog", "wind"]}, r"'r'.*\['rain'\]"),
        ({"language": "fra"}, "'(dog|rain)'.*'fra'"),
        ({"language": "en"}, r"\['en'\]"),
        ({"task": "2A", "phrases": {label: {"eng": "a noise"} for label in PHRASES}}, "'eng'"),
    ],
)
def test_invalid_questions_are_rejected(change, message):
    record = {"id": "r", "family": "concatenated", "clip_ids": ["a", "b"], "labels": ["dog", "rain"]}
    with pytest.raises(ValueError, match=message):
        zste_prompts(**{"task": "3A", "record": record, "labels": ["dog", "rain", "wind"], **change})


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_prompts_of_task_5_are_new_to_a_model_trained_on_the_captions(language):
    for sentence, by_language in SENTENCES.items():
        is_task_5 = sentence in ("zste_first", "zste_second", "zste_simultaneous")
        for text in by_language[language]:
            text = re.sub(r"\{\w+\}", "", text)
            assert bool(re.search(TASK_5_WORDS[language], text, re.IGNORECASE)) == is_task_5, text
