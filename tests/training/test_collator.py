"""Collators: random choices of captions and crops per epoch, independent of the batch."""

import itertools
from collections import Counter

import builders
import numpy as np
import pytest
import soundfile
import torch
from recordings import tone_rows
from torch.utils.data import DataLoader

from modeling_supclap import SupCLAPTrainingArguments
from modeling_supclap.conversion import processor_from_clap
from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.schema import group_id, lacking_languages, require_captions
from modeling_supclap.training.collator import EvaluationCollator, IndexedRows, TrainingCollator, min_seconds
from modeling_supclap.training.rows import filter_bad_audio


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return IndexedRows(tone_rows(tmp_path_factory.mktemp("tones"), count=6))


def texts(processor, batch):
    return processor.tokenizer.batch_decode(batch["input_ids"].flatten(0, 1), skip_special_tokens=True)


def drawn(collator, rows, epoch):
    collator.set_epoch(epoch)
    return texts(collator.processor, collator([rows[index] for index in range(len(rows))]))


def test_a_training_batch(processor, rows):
    batch = TrainingCollator(processor, ["eng"])([rows[1], rows[4], rows[2]])
    assert batch["input_features"].shape == (3, 64, 51)
    assert batch["audio_attention_mask"].shape == (3, 51)
    assert batch["input_ids"].shape[:2] == batch["attention_mask"].shape[:2] == (3, 1)
    assert batch["clip_index"].tolist() == [1, 4, 2]
    assert len(set(batch["group_ids"].tolist())) == 3


def test_audio_and_text_are_those_of_the_row(processor, rows):
    batch = TrainingCollator(processor, ["fra"])([rows[3]])
    expected = processor(audio=read_row(rows[3], 16000), sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(batch["input_features"], expected["input_features"], rtol=0, atol=0)
    encoded = [processor(text=caption)["input_ids"][0] for caption in rows[3]["captions"]["fra"]]
    assert batch["input_ids"][0, 0].tolist() in encoded


@pytest.mark.parametrize(("subtype", "dtype"), [("PCM_16", torch.int16), ("FLOAT", torch.float32)])
def test_samples_for_a_device_are_as_small_as_they_can_be_exactly(processor, tmp_path, subtype, dtype):
    rows = []
    for index, clip in enumerate((builders.noise(8000, seed=1), builders.noise(16000))):
        soundfile.write(tmp_path / f"{index}.wav", clip, 16000, subtype=subtype)
        rows.append({"clip_id": str(index), "audio_path": str(tmp_path / f"{index}.wav"), "clip_index": index})
        rows[-1]["captions"] = {"eng": ["a tone"]}
    collator = TrainingCollator(processor)
    expected = collator(rows)

    batch = TrainingCollator(processor, gives_samples=True)(rows)
    assert batch["samples"].dtype == dtype
    features = processor.feature_extractor.on_device(batch.pop("samples"), batch.pop("sample_counts"))
    torch.testing.assert_close({**batch, **features}, expected, atol=1e-4, rtol=0)


def test_samples_of_both_types_are_floats_of_one_scale(processor, tmp_path):
    rows, clips = [], [np.round(builders.noise(4000) * 32768) / 32768, builders.noise(3000, seed=1)]
    for index, (clip, subtype) in enumerate(zip(clips, ("PCM_16", "FLOAT"), strict=True)):
        soundfile.write(tmp_path / f"{index}.wav", clip, 16000, subtype=subtype)
        rows.append({"clip_id": str(index), "audio_path": str(tmp_path / f"{index}.wav"), "clip_index": index})
        rows[-1]["captions"] = {"eng": ["a tone"]}
    batch = TrainingCollator(processor, gives_samples=True)(rows)
    assert batch["sample_counts"].tolist() == [4000, 3000]
    for samples, clip in zip(batch["samples"], clips, strict=True):
        np.testing.assert_array_equal(samples[: len(clip)], clip.astype(np.float32))


def test_recordings_are_resampled_by_the_method_of_the_processor(rows, tmp_path):
    soundfile.write(tmp_path / "noise.wav", builders.noise(22_050), 44_100)
    row = {**rows[0], "audio_path": str(tmp_path / "noise.wav")}
    found = []
    for method in ("sinc_interp_hann", "kaiser_best"):
        processor = builders.bert_processor()
        processor.resampling_method = method
        clip = read_row(row, 16000, resampling_method=method)
        expected = processor(audio=clip, sampling_rate=16000, return_tensors="pt")["input_features"]
        found.append(TrainingCollator(processor)([row])["input_features"])
        assert torch.equal(found[-1], expected)
    assert not torch.equal(*found)


@pytest.mark.parametrize("peak", [1.5, -1.5])
def test_samples_beyond_full_scale_stay_floats(processor, tmp_path, peak):
    """Times 32,768 they are integers, but too large for 16 bits."""
    soundfile.write(tmp_path / "loud.wav", np.array([0.0, peak] * 4000), 16000, subtype="FLOAT")
    collator = TrainingCollator(processor, gives_samples=True)
    row = {"clip_id": "a", "audio_path": str(tmp_path / "loud.wav"), "clip_index": 0, "captions": {"eng": ["a tone"]}}
    samples = collator([row])["samples"]
    assert samples.dtype == torch.float32
    assert samples[0, :2].tolist() == [0.0, peak]


def test_every_language_and_caption_is_drawn_in_time(processor, rows):
    collator = TrainingCollator(processor, ["eng", "fra"])
    seen = {drawn(collator, rows, epoch)[0] for epoch in range(40)}
    assert len(seen) == 4


def test_languages_are_drawn_equally_often_however_many_captions_they_have(processor, rows):
    row = {**rows[0], "captions": {"eng": ["a dog"] * 9, "fra": ["un chien"]}}
    collator = TrainingCollator(processor, ["eng", "fra"])
    french = 0
    for epoch in range(200):
        collator.set_epoch(epoch)
        french += collator._draw(row)[1][0][0] == "fra"
    assert 70 < french < 130


def test_sampling_depends_on_seed_epoch_and_clip_only(processor, rows):
    whole = drawn(TrainingCollator(processor, ["eng", "fra"], seed=3), rows, epoch=5)
    collator = TrainingCollator(processor, ["fra", "eng"], seed=3)
    collator.set_epoch(5)
    one_by_one = [texts(processor, collator([rows[index]]))[0] for index in reversed(range(len(rows)))]
    assert one_by_one[::-1] == whole
    assert drawn(TrainingCollator(processor, ["eng", "fra"], seed=4), rows, epoch=5) != whole
    assert drawn(TrainingCollator(processor, ["eng", "fra"], seed=3), rows, epoch=6) != whole


def test_kcl_takes_the_same_caption_in_every_language(processor, rows):
    collator = TrainingCollator(processor, ["eng", "fra"], scheme="kcl")
    numbers = set()
    for epoch in range(10):
        collator.set_epoch(epoch)
        batch = collator([rows[1], rows[2]])
        assert batch["input_ids"].shape[:2] == (2, 2)
        for index, row in enumerate((rows[1], rows[2])):
            (_, english), (_, french) = collator._draw(row)[1]
            numbers.add(row["captions"]["eng"].index(english))
            assert row["captions"]["fra"].index(french) == row["captions"]["eng"].index(english)
            decoded = texts(processor, {"input_ids": batch["input_ids"][index : index + 1]})
            assert decoded == [english, french]
    assert numbers == {0, 1}


def test_kcl_draws_some_languages_for_each_clip_and_epoch(processor, rows):
    row = {**rows[0], "captions": {language: [f"{language} a", f"{language} b"] for language in ("eng", "fra", "deu")}}
    collator = TrainingCollator(processor, list(row["captions"]), scheme="kcl", languages_per_clip=2)
    drawn_languages, numbers = Counter(), set()
    for epoch in range(300):
        collator.set_epoch(epoch)
        (first, caption), (second, other) = collator._draw(row)[1]
        assert first != second
        assert row["captions"][first].index(caption) == row["captions"][second].index(other)
        drawn_languages[first, second] += 1
        numbers.add(row["captions"][first].index(caption))
    assert numbers == {0, 1}
    assert len(drawn_languages) == 6  # ordered pairs, 50 times each in expectation
    assert all(30 < count < 75 for count in drawn_languages.values())
    trained, _ = collator.drawn_among_all(row)
    assert sum(trained) == 2


@pytest.mark.parametrize("scheme", ["random", "cacl", "kcl"])
def test_drawn_captions_are_marked_among_their_translations(processor, rows, scheme):
    row = {**rows[0], "captions": {"eng": ["a", "b"], "fra": ["un a", "un b"], "deu": ["ein a", "ein b"]}}
    collator = TrainingCollator(processor, list(row["captions"]), scheme=scheme)
    seen = set()
    for epoch in range(10):
        collator.set_epoch(epoch)
        trained, captions = collator.drawn_among_all(row)
        assert list(itertools.compress(captions, trained)) == collator._draw(row)[1]
        seen.add(tuple(captions))
    assert seen == {
        tuple((language, several[turn]) for language, several in row["captions"].items()) for turn in (0, 1)
    }
    # of a language with fewer captions, the last stands for the missing one
    row["captions"]["deu"] = ["ein a"]
    collator, seen = TrainingCollator(processor, list(row["captions"])), set()
    for epoch in range(20):
        collator.set_epoch(epoch)
        seen.add(tuple(text for _, text in collator.drawn_among_all(row)[1]))
    assert seen == {("a", "un a", "ein a"), ("b", "un b", "ein a")}


def test_cacl_takes_the_anchor_and_each_other_language_in_turn(processor, rows):
    row = {**rows[0], "captions": {"eng": ["a dog"], "fra": ["un chien"], "deu": ["ein hund"], "spa": []}}
    collator = TrainingCollator(processor, ["eng", "fra", "deu", "spa"], scheme="cacl")
    others = []
    for epoch in range(100):
        collator.set_epoch(epoch)
        (anchor, _), (other, _) = collator._draw(row)[1]
        assert anchor == "eng"
        others.append(other)
    assert set(others) == {"fra", "deu"}
    assert 30 < others.count("fra") < 70


@pytest.mark.parametrize(
    ("present", "scheme", "lacking"),
    [
        ({"fra"}, "random", []),
        ({"jpn"}, "random", ["eng", "fra", "deu"]),
        ({"eng", "fra", "deu"}, "kcl", []),
        ({"eng", "deu"}, "kcl", ["fra"]),
        ({"eng", "deu"}, "cacl", []),
        ({"eng"}, "cacl", ["fra", "deu"]),
        ({"fra", "deu"}, "cacl", ["eng"]),
    ],
)
def test_lacking_languages_are_those_that_cannot_be_drawn(processor, rows, present, scheme, lacking):
    languages = ["eng", "fra", "deu"]
    row = {**rows[0], "captions": {language: ["a"] if language in present else [] for language in [*languages, "jpn"]}}
    assert lacking_languages(row, languages, scheme) == lacking
    collator = TrainingCollator(processor, languages, scheme=scheme)
    if not lacking:
        collator([row])
        return
    with pytest.raises(ValueError, match=rf"clip0.*'{lacking[0]}'"):
        collator([row])


def test_clips_without_required_captions_are_found_before_a_run():
    rows = [
        {"clip_id": name, "captions": {"eng": ["a"], "fra": french}} for name, french in (("a", ["un"]), ("b", []))
    ]
    require_captions(rows, ["eng", "fra"])
    with pytest.raises(ValueError, match=r"'b'.*'fra'"):
        require_captions(rows, ["eng", "fra"], "kcl", "train")
    with pytest.raises(ValueError, match="'fra'"):
        require_captions(rows, ["fra"], split="train")
    with pytest.raises(ValueError, match=r"test.*'isl'"):
        require_captions(rows, ["eng", "isl"], split="test")


def test_an_unknown_scheme_names_the_known(processor):
    with pytest.raises(ValueError, match=r"scheme.*'all'"):
        TrainingCollator(processor, ["eng"], scheme="all")


@pytest.mark.process
def test_workers_that_stay_alive_see_the_next_epoch(processor, rows):
    collator = TrainingCollator(processor, ["eng", "fra"])
    loader = DataLoader(rows, batch_size=6, num_workers=1, collate_fn=collator, persistent_workers=True)
    for epoch in (0, 1, 2):
        collator.set_epoch(epoch)
        (batch,) = list(loader)
        assert texts(processor, batch) == drawn(collator, rows, epoch)


def test_crops_move_in_training_and_stay_in_evaluation(processor, rows, tmp_path):
    ramp = np.linspace(0.01, 0.9, 16000) * builders.tone(1000.0)
    soundfile.write(tmp_path / "ramp.wav", ramp, 16000)
    row = {**rows[0], "audio_path": str(tmp_path / "ramp.wav")}
    training = TrainingCollator(processor, max_audio_seconds=0.3)
    levels = set()
    for epoch in range(5):
        training.set_epoch(epoch)
        levels.add(training([row])["input_features"].max().item())
    assert len(levels) == 5
    evaluation = EvaluationCollator(processor, max_audio_seconds=0.3)
    expected = processor(audio=read_row(row, 16000, 0.3), sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(evaluation([row])["input_features"], expected["input_features"])


@pytest.mark.parametrize(
    ("recordings_per_clip", "given", "expected"),
    [(1, None, 1.0), (1, 0.3, 0.3), (1, 30.0, 1.0), (2, None, 0.5), (2, 0.6, 0.5)],
)
def test_clips_are_no_longer_than_the_model_takes(monkeypatch, recordings_per_clip, given, expected):
    monkeypatch.setattr(TrainingCollator, "recordings_per_clip", recordings_per_clip)
    clap = processor_from_clap(builders.clap_processor())  # of one second
    assert TrainingCollator(clap, max_audio_seconds=given).max_audio_seconds == pytest.approx(expected)


def test_each_caption_and_each_copy_of_a_clip_has_its_own_crop(processor, rows, tmp_path):
    soundfile.write(tmp_path / "ramp.wav", np.linspace(0.01, 0.9, 16000) * builders.tone(1000.0), 16000)
    row = {**rows[0], "audio_path": str(tmp_path / "ramp.wav")}
    collator, levels = TrainingCollator(processor, max_audio_seconds=0.3), set()
    for caption_number, repetition in itertools.product((0, 1), (0, 1)):
        batch = collator([{**row, "caption_number": caption_number, "repetition": repetition}])
        levels.add(batch["input_features"].max().item())
    assert len(levels) == 4


def test_short_clips_are_padded_if_requested(processor, rows, tmp_path):
    soundfile.write(tmp_path / "short.wav", builders.tone(1000.0)[:160], 16000)
    short = {**rows[0], "audio_path": str(tmp_path / "short.wav")}
    with pytest.raises(BadAudioError, match=r"short\.wav"):
        EvaluationCollator(processor)([short])
    batch = EvaluationCollator(processor, pad_short_clips=True)([short])
    padded = np.pad(read_row(short, 16000), (0, processor.feature_extractor.min_samples - 160))
    expected = processor(audio=padded, sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(batch["input_features"], expected["input_features"])

    args = SupCLAPTrainingArguments(str(tmp_path), on_bad_audio="skip", report_to="none")
    assert len(filter_bad_audio([short, rows[1]], args, min_seconds(processor))) == 1
    args.pad_short_clips = True
    assert len(filter_bad_audio([short, rows[1]], args, min_seconds(processor))) == 2


def test_negatives_follow_the_caption_and_absent_ones_are_masked(processor, rows):
    wrong = [{"eng": ["fog", "hail", "snow"], "fra": ["grele"]}, {"eng": ["sleet"]}, None, {"eng": None}, {}]
    given = []
    for index, negatives in enumerate(wrong):
        given.append({**rows[index], "clip_index": index, "captions": {"eng": ["rain"]}, "negatives": negatives})
    del given[-1]["negatives"]
    given[0]["negatives"]["eng"].append("rain")  # its own caption is never wrong
    drawn = set()
    for epoch in range(20):
        collator = TrainingCollator(processor, ["eng"], negatives_per_clip=2)
        collator.set_epoch(epoch)
        texts = [[text for _, text in collator._draw_negatives(row, "eng")] for row in given]
        assert set(texts[0]) < {"fog", "hail", "snow"}
        assert len(set(texts[0])) == 2
        assert texts[1:] == [["sleet"], [], [], []]
        drawn.add(tuple(sorted(texts[0])))
        batch = collator(given)
        assert batch["negative_mask"].tolist() == [[True, True], [True, False], *[[False, False]] * 3]
        expected = processor(text=["rain", *texts[0], "rain", "sleet", "rain"] + ["rain"] * 9, return_tensors="pt")
        assert torch.equal(batch["input_ids"].flatten(0, 1), expected["input_ids"])
        plain = TrainingCollator(processor, ["eng"])
        plain.set_epoch(epoch)
        assert [plain._draw(row) for row in given] == [collator._draw(row) for row in given]
    assert len(drawn) == 3


@pytest.mark.parametrize("text", [" ", "", float("nan")])
@pytest.mark.parametrize("kind", [TrainingCollator, EvaluationCollator])
def test_a_blank_caption_is_named_by_its_clip(processor, rows, text, kind):
    bad = {**rows[1], "captions": {"eng": [text]}, "clip_index": 1}
    with pytest.raises(ValueError, match=rf"{rows[1]['clip_id']}.*eng.*{text!r}"):
        kind(processor, ["eng"])([{**rows[0], "clip_index": 0}, bad])


def test_evaluation_keeps_all_captions_in_order(processor, rows):
    short = {**rows[1], "captions": {"eng": ["a dog"], "fra": []}}
    batch = EvaluationCollator(processor, ["fra", "eng"])([rows[0], short])
    assert batch["input_ids"].shape[:2] == (2, 4)
    decoded = texts(processor, batch)
    expected = processor.tokenizer.batch_decode(
        processor(text=[*rows[0]["captions"]["fra"], *rows[0]["captions"]["eng"]])["input_ids"],
        skip_special_tokens=True,
    )
    assert decoded[:4] == expected
    assert decoded[4:] == ["a dog"] * 4


def test_groups(rows):
    twin = {**rows[0], "clip_id": "another"}
    assert group_id(twin, "captions") == group_id(rows[0], "captions") != group_id(rows[1], "captions")
    assert group_id(twin, "clip") != group_id(rows[0], "clip")


@pytest.mark.process
def test_a_bad_recording_in_a_worker_names_the_file(processor, rows, tmp_path):
    (tmp_path / "broken.wav").write_text("no audio")
    bad = IndexedRows([{**rows[0], "audio_path": str(tmp_path / "broken.wav")}])
    loader = DataLoader(bad, num_workers=1, collate_fn=TrainingCollator(processor))
    with pytest.raises(ValueError, match=r"broken\.wav"):
        next(iter(loader))


def test_an_epoch_may_hold_every_caption_of_a_clip(tmp_path):
    rows = tone_rows(tmp_path, count=3)
    for row in rows:
        row["captions"] = {"eng": ["a dog", "rain", "barks"], "fra": ["un chien", "la pluie", "aboie"]}
    rows[0]["captions"] = {"eng": ["a dog"], "fra": ["un chien"]}
    indexed = IndexedRows(rows, every_caption_in="eng")
    assert len(indexed) == 7

    collator = TrainingCollator(builders.bert_processor(), ["eng", "fra"], scheme="kcl")
    batch = collator([indexed[place] for place in range(7)])
    assert batch["clip_index"].tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert batch["group_ids"][1] == batch["group_ids"][3] != batch["group_ids"][4]

    drawn = [[text for _, text in collator._draw(indexed[place])[1]] for place in range(7)]
    every = [["a dog", "un chien"], ["rain", "la pluie"], ["barks", "aboie"]]
    assert drawn == [every[0], *every, *every]
    rows[2]["captions"]["fra"] = ["un chien"]  # fewer translations than captions
    assert [text for _, text in collator._draw(indexed[6])[1]] == every[0]
    for row in rows:
        row["captions"]["deu"] = [] if row is rows[0] else ["ein Hund", "bellt"]
    items = IndexedRows(rows, "deu")
    found = [(items[place]["clip_index"], items[place]["caption_number"]) for place in range(len(items))]
    assert found == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert len(IndexedRows(rows, "spa")) == 3
