"""Searches: the correct file and time, by text and by example, with deterministic results."""

import re
from importlib.util import find_spec

import numpy as np
import pytest
import soundfile
from fake_models import PITCHES, RATE, build, tone

from modeling_supclap.audio_input import Recording
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import Searcher, SoundIndex, build_index
from modeling_supclap.search import query as query_module
from modeling_supclap.search import store as store_module
from modeling_supclap.search.query import BACKGROUND_TEXTS, Hit, without_overlaps

pytestmark = pytest.mark.skipif(find_spec("lancedb") is None, reason="the extra search is not installed")


def test_a_sound_is_found_at_its_second(fake_model, folder):
    report = build(fake_model, folder)
    assert (report.added, report.unreadable) == (3, {})
    assert report.windows == 23 + 4 + 1

    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    best, *others = searcher.search("high", k=3)
    assert best.file == "long.wav"
    assert best.start_seconds <= 31
    assert best.end_seconds >= 35 - 2.5
    for other in others:
        assert other.file != "long.wav" or other.end_seconds <= 31 or other.start_seconds >= best.end_seconds
    assert searcher.search("middle", k=1)[0].file == "deep/middle's.flac"


def test_a_text_that_no_recording_resembles_does_not_stand_out(fake_model, folder):
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    assert searcher.stands_out(searcher.search("high"))
    assert searcher.stands_out(searcher.search("low", within="short.ogg"), "short.ogg")
    unrelated = searcher.search("quarterly tax report")
    assert unrelated[0].score < 0.1
    assert not searcher.stands_out(unrelated)
    assert not searcher.stands_out([])
    assert not searcher.stands_out([unrelated[0]._replace(score=searcher.background())])  # equal
    searcher.index.remove(list(searcher.index.known_files()))
    assert (searcher.search("high"), searcher.search("high", k=None), searcher.background()) == ([], [], 1.0)


def test_the_background_is_that_of_the_newest_recordings(fake_model, folder, monkeypatch):
    for text in BACKGROUND_TEXTS:
        monkeypatch.setitem(PITCHES, text, PITCHES["high"])
    (folder / "long.wav").unlink()
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    assert searcher.stands_out(searcher.search("middle"))
    soundfile.write(folder / "high.wav", tone(PITCHES["high"], 12.0), RATE)
    build(fake_model, folder)
    assert not searcher.stands_out(searcher.search("middle"))


def test_the_background_is_a_high_quantile_of_the_best_scores(fake_model, folder, monkeypatch):
    for text in BACKGROUND_TEXTS[:4]:
        monkeypatch.setitem(PITCHES, text, PITCHES["high"])
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    best = [searcher.search(text, k=1)[0].score for text in BACKGROUND_TEXTS]
    assert searcher.background() == pytest.approx(np.quantile(best, 0.95), abs=1e-5)
    in_short = [searcher.search(text, k=1, within="short.ogg")[0].score for text in BACKGROUND_TEXTS]
    assert searcher.background("short.ogg") == pytest.approx(np.quantile(in_short, 0.95), abs=1e-5)
    assert searcher.background("short.ogg") < searcher.background() - 0.1
    between = (np.median(best) + searcher.background()) / 2
    assert np.median(best) + 0.1 < between
    assert not searcher.stands_out([Hit("long.wav", 0.0, 5.0, between)])
    assert searcher.stands_out([Hit("long.wav", 0.0, 5.0, searcher.background() + 1e-3)])


def test_exact_searches_are_exact_and_another_model_is_refused(fake_model, folder, monkeypatch):
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    asked, nearest = [], searcher.index.nearest

    def record(vector, limit, within=None, exact=False):
        asked.append(exact)
        return nearest(vector, limit, within, exact)

    monkeypatch.setattr(searcher.index, "nearest", record)
    searcher.search("high", exact=True, k=1)
    searcher.search("high", k=1)
    searcher.strip(searcher.embed("high"), "long.wav")
    assert (asked[0], asked[-2:]) == (True, [False, True])
    background = searcher.background()
    asked.clear()
    assert (searcher.background(), asked) == (background, [])  # computed once
    other = load_embedding_model(fake_model)
    other.fingerprint = "another"
    with pytest.raises(ValueError, match=r"index was built with .*fingerprint"):
        Searcher(folder.parent / "index", other)


def test_the_windows_of_a_recording_are_scored_in_order_of_time(fake_model, folder):
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    starts, scores = searcher.strip(searcher.embed("high"), "long.wav")
    np.testing.assert_array_equal(starts, np.arange(23) * 2.5)
    hits = searcher.search("high", k=99, within="long.wav", merge_overlaps=False)
    assert dict(zip(starts, scores, strict=True)) == {hit.start_seconds: hit.score for hit in hits}
    assert starts[scores.argmax()] in (30.0, 32.5)


def test_the_model_is_loaded_on_the_device_and_with_the_trust_of_the_caller(fake_model, folder, monkeypatch):
    build(fake_model, folder)
    calls = []

    def load(model, **options):
        calls.append((model, options))
        return load_embedding_model(fake_model)

    monkeypatch.setattr("modeling_supclap.evaluation.load_embedding_model", load)
    Searcher(folder.parent / "index")
    Searcher(folder.parent / "index", "org/model", "cuda:1", True)
    assert calls == [
        ("PitchModel", {"device": None, "trust_remote_code": False}),
        ("org/model", {"device": "cuda:1", "trust_remote_code": True}),
    ]


def test_a_text_is_embedded_in_its_language(fake_model, folder, monkeypatch):
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    languages = []
    plain = fake_model.encode_text
    monkeypatch.setattr(
        fake_model, "encode_text", lambda texts, language: languages.append(language) or plain(texts, language)
    )
    searcher.search("high", "fra")
    searcher.search("high")
    searcher.index.remove(["long.wav"])
    searcher.search_texts(["high", "low"], "deu")
    assert languages == ["fra", "eng", "deu", "eng"]  # the background texts are English
    searcher.search_texts(["high", "low"])
    assert languages[4:] == ["eng"]


def test_all_windows_of_an_audio_query_count(fake_model, folder):
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    windows = [tone(PITCHES[name], 5.0) for name in ("high", "middle")]
    mean = fake_model.encode_audio(windows, RATE).mean(axis=0)
    query = np.concatenate(windows).astype(np.float32), RATE
    np.testing.assert_allclose(searcher.embed_audio(query), mean / np.linalg.norm(mean), atol=1e-4)
    scores = {hit.file: hit.score for hit in reversed(searcher.search(audio=query, k=28, merge_overlaps=False))}
    assert scores["long.wav"] == pytest.approx(scores["deep/middle's.flac"], abs=0.1)
    assert scores["long.wav"] > scores["short.ogg"] + 0.3


def test_scores_are_the_cosines_of_the_windows(fake_model, folder):
    build(fake_model, folder)
    store = SoundIndex(folder.parent / "index")
    query = fake_model.encode_text(["high"], "eng")[0]
    wave, _ = soundfile.read(folder / "long.wav", dtype="float32")
    for row in store.nearest(query, 30, within="long.wav"):
        start = round(row["start_seconds"] * RATE)
        window = wave[start : start + 5 * RATE]
        assert row["score"] == pytest.approx(float(fake_model.encode_audio([window], RATE)[0] @ query), abs=1e-3)


def test_a_search_by_sound_and_within_a_file(fake_model, folder, tmp_path):
    build(fake_model, folder)
    soundfile.write(tmp_path / "example.wav", tone(PITCHES["middle"], 7.0), RATE)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    assert searcher.search(audio=str(tmp_path / "example.wav"), k=1)[0].file == "deep/middle's.flac"
    assert {hit.file for hit in searcher.search("high", within="deep/middle's.flac")} == {"deep/middle's.flac"}
    with pytest.raises(ValueError, match=r"nowhere\.wav"):
        searcher.search("high", within="nowhere.wav")
    with pytest.raises(ValueError, match=r"nowhere/middle's.*such as \"deep/middle's\.flac\"$"):
        searcher.search("high", within="nowhere/middle's.flac")
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"k is {k};"):
            searcher.search("high", k=k)
    assert searcher.search(vector=searcher.embed("high"), k=3) == searcher.search("high", k=3)
    waveform = (np.zeros(9), RATE)
    for query, passed in (({"audio": waveform}, "query and audio"), ({"query": None}, "nothing")):
        with pytest.raises(ValueError, match=f"got {passed};"):  # the values of a waveform are not printed
            searcher.search(**{"query": "high", **query})
    with pytest.raises(ValueError, match="query and vector"):
        searcher.search("high", vector=searcher.embed("high"))
    high = searcher.embed("high")
    for vector in ([], np.ones(3), high[None], np.nan * high):
        with pytest.raises(ValueError, match=re.escape(str(np.shape(vector)))):
            searcher.search(vector=vector)


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_any_number_of_hits_can_be_requested(fake_model, folder, monkeypatch, threshold):
    build(fake_model, folder)
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    assert len(searcher.search("high", k=10**9, merge_overlaps=False)) == 28
    assert len(searcher.search("high", k=10**9, within="short.ogg")) == 1


@pytest.mark.parametrize("within", [None, "long.wav"])
def test_search_in_memory_agrees_with_the_store(fake_model, folder, monkeypatch, within):
    build(fake_model, folder)
    store = SoundIndex(folder.parent / "index")
    query = fake_model.encode_text(["high"], "eng")[0]
    found = store.nearest(query, 9, within)
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", 0)
    expected = store.nearest(query, 9, within)
    assert len(found) == 9
    for one, other in zip(found, expected, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


def test_the_same_search_twice_gives_the_same(fake_model, folder):
    build(fake_model, folder)
    model = load_embedding_model(fake_model)
    searches = [Searcher(folder.parent / "index", model).search("low", k=20) for _ in range(2)]
    assert searches[0] == searches[1]
    scores = [(-hit.score, hit.file, hit.start_seconds) for hit in searches[0]]
    assert scores == sorted(scores)


def test_clips_that_a_real_model_embeds(folder, model, processor):
    model.processor = processor
    report = build_index(load_embedding_model(model), folder, folder.parent / "index", show_progress_bar=False)
    assert report.windows == 28
    hits = Searcher(folder.parent / "index", load_embedding_model(model)).search("a dog barks", k=3)
    assert len(hits) == 3
    assert all(-1 <= hit.score <= 1 for hit in hits)


def test_an_index_runs_no_function_that_it_names(folder):
    name = "fake_models:PitchModel"
    build_index(load_embedding_model(name), folder, folder.parent / "named", show_progress_bar=False)
    with pytest.raises(ValueError, match=name):
        Searcher(folder.parent / "named")
    assert Searcher(folder.parent / "named", name).search("high", k=1)[0].file == "long.wav"


@pytest.fixture
def searcher(fake_model, folder):
    build(fake_model, folder)
    return Searcher(folder.parent / "index", load_embedding_model(fake_model))


@pytest.mark.parametrize("first_limit", [2, 256])
def test_a_threshold_returns_all_hits_above_it(searcher, monkeypatch, first_limit):
    monkeypatch.setattr(query_module, "_FIRST_LIMIT", first_limit)
    every = searcher.search("low", k=99, merge_overlaps=False)
    threshold = 0.9
    above = [hit for hit in every if hit.score >= threshold]
    assert 15 < len(above) < len(every) == 28
    assert searcher.search("low", k=None, threshold=threshold, merge_overlaps=False) == above
    assert searcher.search("low", k=3, threshold=threshold, merge_overlaps=False) == above[:3]
    merged = searcher.search("low", k=None, threshold=threshold)
    assert 3 < len(merged) < len(above)
    assert merged == searcher.search("low", k=len(merged))
    assert searcher.search("low", threshold=1.1) == []
    equal = searcher.search("low", k=None, threshold=every[15].score, merge_overlaps=False)
    assert equal == [hit for hit in every if hit.score >= every[15].score]


def test_a_search_ends_at_the_first_window_below_the_threshold(searcher, monkeypatch):
    monkeypatch.setattr(query_module, "_FIRST_LIMIT", 4)
    limits, nearest = [], searcher.index.nearest
    monkeypatch.setattr(
        searcher.index, "nearest", lambda vector, limit, *rest: limits.append(limit) or nearest(vector, limit, *rest)
    )
    scores = [hit.score for hit in searcher.search("high", k=28, merge_overlaps=False)]
    limits.clear()
    assert searcher.search("high", k=None, threshold=(scores[1] + scores[4]) / 2)
    assert limits == [4]
    assert len(searcher.search("high", k=9, threshold=-1.0, merge_overlaps=False)) == 9
    assert limits[1:] == [4, 16]
    limits.clear()
    assert len(searcher.search("high", k=None, threshold=-1.0, merge_overlaps=False)) == 28
    assert limits == [4, 16, 64]
    limits.clear()
    assert len(searcher.search("low", k=2, within="long.wav")) == 2
    assert limits == [2, 8]  # the best windows overlap


def test_a_folder_is_searched_by_its_name(searcher):
    for within in ("deep", "deep/"):
        assert {hit.file for hit in searcher.search("low", within=within)} == {"deep/middle's.flac"}
    assert searcher.background("deep") < searcher.background()
    for within in ("dee", "deep/middle", "x' OR 'x' = 'x"):
        with pytest.raises(ValueError, match=re.escape(repr(within))):
            searcher.search("low", within=within)


def test_a_query_within_a_file_does_not_read_the_file_table(searcher, monkeypatch):
    monkeypatch.setattr(SoundIndex, "known_files", None)
    assert searcher.search("low", k=1, within="short.ogg")[0].file == "short.ogg"


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_recordings_of_a_length_are_searched(searcher, monkeypatch, threshold):
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold)
    for lengths, files in (
        ((0.0, 12.0), {"deep/middle's.flac", "short.ogg"}),
        ((12.0, 12.0), {"deep/middle's.flac"}),
        ((1.5, float("inf")), {"deep/middle's.flac", "long.wav"}),
        ((100.0, 200.0), set()),
    ):
        assert {hit.file for hit in searcher.search("low", k=99, lengths=lengths)} == files
    assert searcher.search("low", within="deep", lengths=(0.0, 2.0)) == []


def test_a_part_of_a_recording_is_an_example(searcher, folder):
    tape = folder / "long.wav"
    whole, part = searcher.embed_audio(tape), searcher.embed_audio(tape, 31.0, 35.0)
    assert part @ searcher.embed("high") > whole @ searcher.embed("high") + 0.3
    samples, _ = soundfile.read(tape)
    np.testing.assert_allclose(part, searcher.embed_audio((samples[31 * RATE : 35 * RATE], RATE)), atol=1e-6)
    np.testing.assert_array_equal(searcher.embed_audio(tape, 58.0), searcher.embed_audio(tape, 58.0, 100.0))
    for start, end in ((60.0, None), (61.0, 65.0), (35.0, 31.0), (-1.0, 5.0)):
        with pytest.raises(ValueError, match=rf"long\.wav has no sound from {start:g} s.*60 s"):
            searcher.embed_audio(tape, start, end)


def test_a_part_of_a_recording_of_unknown_length_is_an_example(searcher, folder, monkeypatch):
    tape = folder / "long.wav"
    part = searcher.embed_audio(tape, 31.0, 35.0)
    monkeypatch.setattr(Recording, "get_seconds", lambda _: None)
    np.testing.assert_array_equal(searcher.embed_audio(tape, 31.0, 35.0), part)
    with pytest.raises(ValueError, match="from 35 s to 31 s"):
        searcher.embed_audio(tape, 35.0, 31.0)


def test_several_texts_are_answered_as_each_alone(searcher):
    texts = ["high", "quarterly tax report", "middle"]
    answers = searcher.search_texts(texts, k=2)
    assert [answer.query for answer in answers] == texts
    for text, answer in zip(texts, answers, strict=True):
        assert answer.hits == searcher.search(text, k=2)
        assert answer.stands_out == searcher.stands_out(answer.hits)
    assert {answer.stands_out for answer in answers} == {True, False}
    assert [answer.stands_out for answer in searcher.search_texts(["low"], within="short.ogg")] == [True]


def test_hits_that_touch_do_not_overlap():
    first = Hit("a.wav", 10.0, 15.0, 0.9)
    others = [Hit("a.wav", 5.0, 10.0, 0.8), Hit("a.wav", 15.0, 20.0, 0.7), Hit("b.wav", 11.0, 16.0, 0.6)]
    between = [Hit("a.wav", 7.5, 12.5, 0.85), Hit("a.wav", 12.5, 17.5, 0.75), Hit("a.wav", 19.0, 24.0, 0.5)]
    assert without_overlaps([first, between[0], others[0], between[1], *others[1:], between[2]]) == [first, *others]


def test_an_encoder_of_texts_suffices_for_queries_by_text(searcher, fake_model):
    class Texts:
        name, fingerprint = "texts of PitchModel", "pitch"

        def encode_text(self, texts, language, batch_size):
            return fake_model.encode_text(texts, language).astype(np.float32)

    other = Searcher(searcher.index.folder, Texts())
    assert other.search("high", k=3) == searcher.search("high", k=3)
