"""Translation jobs: each text once, existing translations kept, resumption, and the written table."""

import json
import os
import subprocess
import sys
import threading

import pytest

from modeling_supclap.datasets_scripts.translation.jobs import (
    FinishedBatches,
    Item,
    clean,
    complete_translations,
    make_batches,
    sample,
    translate_texts,
)
from modeling_supclap.datasets_scripts.translation.table import read_translations, source_hash, write_translations


class FakeTranslator:
    """Fake translator that writes the language before the text; can fail or return wrong answers."""

    def __init__(self, name="fake", workers=1, fail_at=None, answer=lambda text, target: f"{target} {text}"):
        self.name = name
        self.workers = workers
        self.fail_at = fail_at
        self.answer = answer
        self.batches = []
        self.lock = threading.Lock()

    def check(self, source, target):
        """Accept all languages."""

    def translate(self, texts, source, target):
        with self.lock:
            self.batches.append((source, target, list(texts)))
            number = len(self.batches)
        if number == self.fail_at:
            raise ConnectionError("the line is dead")
        return [self.answer(text, target) for text in texts]


def items_of(captions, languages=("fra", "jpn")):
    return [Item(*place, language, text, "eng", language) for language in languages for *place, text in captions]


CAPTIONS = [
    ("a", 0, "A dog"),
    ("a", 1, "A barking dog"),
    ("b", 0, "Rain"),
    ("c", 0, "Rain"),
    ("d", 0, "Wind and rain"),
]
TEXTS = ["A barking dog", "Wind and rain", "A dog", "Rain"]  # longest first, then by the alphabet


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "translations.parquet"


def table_of(path):
    return {(x["clip_id"], x["caption_index"], x["language"]): x for x in read_translations(path).to_pylist()}


def test_each_text_is_translated_once_and_written_for_each_caption(path):
    translator = FakeTranslator()
    found = complete_translations(path, items_of(CAPTIONS), translator, batch_size=3)
    assert translator.batches == [("eng", lang, batch) for lang in ("fra", "jpn") for batch in (TEXTS[:3], TEXTS[3:])]
    assert found == {
        (clip, index, lang): f"{lang} {text}" for clip, index, text in CAPTIONS for lang in ("fra", "jpn")
    }
    table = table_of(path)
    assert {key: line["text"] for key, line in table.items()} == found
    assert table["b", 0, "jpn"]["model"] == "fake"
    assert table["b", 0, "jpn"]["source_hash"] == source_hash("Rain")
    assert list(path.parent.iterdir()) == [path]


def test_a_finished_batch_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_size))
    finished = FinishedBatches(tmp_path / "x.part.jsonl", {"model": "fake"})
    finished.append(("eng", "fra"), ["Rain", "Wind"], [" La pluie\n", "..."])
    assert synced == [32, tmp_path.joinpath("x.part.jsonl").stat().st_size]
    again = FinishedBatches(tmp_path / "x.part.jsonl", {"model": "fake"})
    assert again.answers == {(("eng", "fra"), "Rain"): "La pluie", (("eng", "fra"), "Wind"): ""} == finished.answers


def test_existing_translations_are_not_made_again(path):
    complete_translations(path, items_of(CAPTIONS), FakeTranslator())
    before, translator = path.read_bytes(), FakeTranslator()
    found = complete_translations(path, items_of(CAPTIONS), translator)
    assert translator.batches == []
    assert len(found) == 10
    assert path.read_bytes() == before


def test_only_new_or_changed_captions_are_translated(path):
    complete_translations(path, items_of(CAPTIONS), FakeTranslator())
    changed = [("a", 0, "A cat"), *CAPTIONS[1:], ("e", 0, "Hail")]
    translator = FakeTranslator(answer=lambda text, target: f"new {text}")
    found = complete_translations(path, items_of(changed, ["fra"]), translator)
    assert translator.batches == [("eng", "fra", ["A cat", "Hail"])]
    assert found["a", 0, "fra"] == "new A cat"
    assert found["b", 0, "fra"] == "fra Rain"
    table = table_of(path)
    assert table["a", 0, "fra"]["source_hash"] == source_hash("A cat")
    assert table["a", 0, "jpn"]["text"] == "jpn A dog"  # was not requested, so it is kept
    assert len(table) == 11


def test_unfinished_work_contains_no_secret(path):
    class Stopping(FakeTranslator):
        def translate(self, texts, source, target):
            raise ConnectionError("no more")

    settings = {"request_options": '{"headers": {"api-key": "verysecret", "n": 1}}'}
    with pytest.raises(ConnectionError):
        complete_translations(path, items_of(CAPTIONS), Stopping(), settings=settings)
    content = path.with_name(path.name + ".part.jsonl").read_text()
    assert "headers" in content
    assert "secret" not in content


def test_translations_by_hand_are_kept(path):
    line = {"clip_id": "b", "caption_index": 0, "language": "fra", "text": "Il pleut"}
    write_translations(path, [line])
    assert complete_translations(path, items_of(CAPTIONS), FakeTranslator())["b", 0, "fra"] == "Il pleut"
    assert complete_translations(path, items_of(CAPTIONS), FakeTranslator())["c", 0, "fra"] == "fra Rain"


def test_translations_of_another_model_are_mixed_only_on_request(path):
    complete_translations(path, items_of(CAPTIONS[:2]), FakeTranslator())
    with pytest.raises(ValueError, match=r"fake.*other.*fill_gaps"):
        complete_translations(path, items_of(CAPTIONS), FakeTranslator("other"))
    complete_translations(path, items_of(CAPTIONS), FakeTranslator("other"), fill_gaps=True)
    assert {line["model"] for key, line in table_of(path).items() if key[0] == "a"} == {"fake"}
    assert {line["model"] for key, line in table_of(path).items() if key[0] != "a"} == {"other"}


@pytest.mark.parametrize("answer", ["", " \n", "...", "\ufffd\ufffd", "\ud83d dog"])
def test_invalid_translations_are_skipped_and_requested_again(path, answer):
    translator = FakeTranslator(answer=lambda text, target: answer if text == "Rain" else f"{target}\n  {text} ")
    found = complete_translations(path, items_of(CAPTIONS, ["fra"]), translator)
    assert sorted(found) == sorted(table_of(path)) == [("a", 0, "fra"), ("a", 1, "fra"), ("d", 0, "fra")]
    assert found["a", 0, "fra"] == "fra A dog"
    again = FakeTranslator()
    assert complete_translations(path, items_of(CAPTIONS, ["fra"]), again)["c", 0, "fra"] == "fra Rain"
    assert again.batches == [("eng", "fra", ["Rain"])]


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_after_an_error_the_same_batches_go_on(path, tmp_path, fail_at, workers):
    whole = tmp_path / "whole.parquet"
    complete_translations(whole, items_of(CAPTIONS), FakeTranslator(), batch_size=2)
    broken = FakeTranslator(fail_at=fail_at, workers=workers)
    with pytest.raises(ConnectionError, match="the line is dead"):
        complete_translations(path, items_of(CAPTIONS), broken, batch_size=2)
    assert not path.exists()
    failed = broken.batches[fail_at - 1]
    rest = FakeTranslator()
    complete_translations(path, items_of(CAPTIONS), rest, batch_size=2)
    done = [batch for batch in broken.batches if batch != failed]
    assert sorted(rest.batches + done) == [("eng", x, part) for x in ("fra", "jpn") for part in (TEXTS[:2], TEXTS[2:])]
    assert path.read_bytes() == whole.read_bytes()


def test_the_order_in_which_batches_end_does_not_change_a_byte(path, tmp_path):
    class Backwards(FakeTranslator):
        """Translator that finishes the first batch last."""

        last_is_done = threading.Event()

        def translate(self, texts, source, target):
            if (target, texts[0]) == ("fra", TEXTS[0]):
                assert self.last_is_done.wait(60)
            translations = super().translate(texts, source, target)
            if (target, texts[-1]) == ("jpn", TEXTS[-1]):
                self.last_is_done.set()
            return translations

    complete_translations(path, items_of(CAPTIONS), Backwards(workers=2), batch_size=2)
    complete_translations(tmp_path / "one.parquet", items_of(CAPTIONS), FakeTranslator(), batch_size=2)
    assert path.read_bytes() == (tmp_path / "one.parquet").read_bytes()


def test_two_runs_at_a_time_do_not_write_one_file(path):
    class Meanwhile(FakeTranslator):
        """Translator that starts the same job again during the job."""

        def translate(self, texts, source, target):
            with pytest.raises(RuntimeError, match=r"translations\.parquet"):
                complete_translations(path, items_of(CAPTIONS), FakeTranslator(), batch_size=2)
            complete_translations(path.with_name("other.parquet"), items_of(CAPTIONS), FakeTranslator())
            return super().translate(texts, source, target)

    translator = Meanwhile()
    complete_translations(path, items_of(CAPTIONS), translator, batch_size=2)
    assert len(translator.batches) == 4
    assert sorted(path.parent.iterdir()) == [path.with_name("other.parquet"), path]


HOLDER = """
import sys, time
from pathlib import Path
from modeling_supclap.datasets_scripts.atomic_files import folder_lock

with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.process
def test_a_killed_run_holds_nothing(path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(RuntimeError, match=r"translations\.parquet"):
                complete_translations(path, items_of(CAPTIONS), FakeTranslator())
        finally:
            process.kill()
    assert list(path.parent.iterdir()) == [path.with_name("translations.parquet.lock")]
    complete_translations(path, items_of(CAPTIONS), FakeTranslator())
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_truncated_line_is_translated_again(tmp_path, cut):
    part = tmp_path / "part.jsonl"
    finished = FinishedBatches(part, {"model": "m"})
    finished.append(("eng", "fra"), ["Rain", "Wind"], ["Pluie", "Vent"])
    whole = part.read_bytes()
    finished.append(("eng", "fra"), ["Dög"], ["Chien çà"])
    part.write_bytes(part.read_bytes()[:-cut])
    resumed = FinishedBatches(part, {"model": "m"})
    assert resumed.answers == {(("eng", "fra"), "Rain"): "Pluie", (("eng", "fra"), "Wind"): "Vent"}
    assert part.read_bytes() == whole
    resumed.append(("eng", "fra"), ["Dög"], ["Chien çà"])
    assert FinishedBatches(part, {"model": "m"}).answers[("eng", "fra"), "Dög"] == "Chien çà"


@pytest.mark.parametrize("content", [b"", b'{"settings": {"mo'])
def test_a_file_without_a_complete_first_line_is_started_again(tmp_path, content):
    part = tmp_path / "part.jsonl"
    part.write_bytes(content)
    assert FinishedBatches(part, {"model": "m"}).answers == {}
    assert json.loads(part.read_text()) == {"settings": {"model": "m"}}


def test_a_file_of_other_settings_or_a_damaged_one_is_refused(tmp_path):
    part = tmp_path / "part.jsonl"
    FinishedBatches(part, {"model": "m"})
    with pytest.raises(ValueError, match=r"'m'.*'n'"):
        FinishedBatches(part, {"model": "n"})
    part.write_text('{"settings": {"model": "m"}}\nnonsense\n')
    with pytest.raises(ValueError, match=r"part.jsonl"):
        FinishedBatches(part, {"model": "m"})


def test_batches_stay_the_same_when_some_are_done():
    items = items_of(CAPTIONS, ["fra"])
    assert make_batches(items, {}, 2) == [(("eng", "fra"), TEXTS[:2]), (("eng", "fra"), TEXTS[2:])]
    done = {(("eng", "fra"), text): "x" for text in TEXTS[:2]}
    assert make_batches(items, done, 2) == [(("eng", "fra"), TEXTS[2:])]
    one = {(("eng", "fra"), TEXTS[0]): "x"}
    assert make_batches(items, one, 2) == [(("eng", "fra"), TEXTS[1:2]), (("eng", "fra"), TEXTS[2:])]
    assert make_batches(items, {(("eng", "jpn"), text): "x" for text in TEXTS}, 9) == [(("eng", "fra"), TEXTS)]


def test_a_wrong_number_of_translations_is_an_error(tmp_path):
    class Short(FakeTranslator):
        def translate(self, texts, source, target):
            return ["x"]

    with pytest.raises(ValueError, match="zip"):
        translate_texts(items_of(CAPTIONS), Short(), FinishedBatches(tmp_path / "p", {}), 4)


def test_a_sample_is_the_same_each_time_and_of_each_language():
    items = items_of([(f"c{number}", 0, f"Sound {number}") for number in range(50)])
    chosen = sample(items, 5)
    assert sample(items[::-1], 5) == chosen
    assert [item.language for item in sorted(chosen, key=lambda item: item.language)] == ["fra"] * 5 + ["jpn"] * 5
    assert len({item.clip_id for item in chosen}) > 5
    assert sorted(sample(items, None)) == sorted(items)
    assert sample(items, 0) == []


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  Un   chien\n\taboie\u00a0! ", "Un chien aboie !"),
        ("e\u0301te\u0301", "été"),
        ("犬が\x00吠える", "犬が吠える"),
        ("\u200b", ""),
        ("-", ""),
        ("7", "7"),
    ],
)
def test_texts_are_cleaned(text, cleaned):
    assert clean(text) == cleaned
