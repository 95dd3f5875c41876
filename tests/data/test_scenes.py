"""Scenes: the captions describe the audio, and test clips do not occur in training."""

import csv
import itertools

import builders
import numpy as np
import pytest
import soundfile
from recordings import ESC50Clip, write_esc50

from modeling_supclap.datasets_scripts import find_builder, load_splits
from modeling_supclap.datasets_scripts.builders.captions import label_phrases, read_phrases
from modeling_supclap.datasets_scripts.builders.scenes import (
    SCENES_VERSION,
    Placement,
    Scene,
    SceneEvent,
    caption_scene,
    render_scene,
    split_recordings,
    take_generated,
    take_recorded,
)
from modeling_supclap.languages import LANGUAGES

RATE_HZ = 16000
SIZES = {"num_train": 200, "num_validation": 40, "num_test": 40}


@pytest.fixture(scope="module")
def scenes():
    """Scenes of each split, without audio."""
    return find_builder("scenes")(**SIZES)._scenes


def sets_of_sounds(members):
    return {frozenset(event.label for event in scene.events) for scene in members if len(scene.events) > 1}


def test_no_two_splits_share_a_composition(scenes):
    for first, second in itertools.combinations(scenes.values(), 2):
        assert not sets_of_sounds(first) & sets_of_sounds(second)
        assert not set(first) & set(second)
    for members in scenes.values():
        assert len(members) == len(set(members))
    assert {len(scene.events) for scene in scenes["test"]} == {1, 2, 3, 4}


def test_a_scene_is_more_than_one_plain_sound(scenes):
    """A sound without another property is a clip of the synthetic events."""
    single = [scene for members in scenes.values() for scene in members if len(scene.events) == 1]
    kinds = {(scene.events[0].repetitions > 1, scene.events[0].manner != "", scene.room != "") for scene in single}
    assert kinds == set(itertools.product((False, True), repeat=3)) - {(False, False, False)}


def test_one_sound_is_held_out_with_its_manner_and_several_without():
    dog, loud_dog, rain = SceneEvent("dog", 1, ""), SceneEvent("dog", 1, "loud"), SceneEvent("rain", 2, "far")
    alone = [Scene(((dog,),), ""), Scene(((loud_dog,),), ""), Scene(((dog,),), "hall")]
    assert len({scene.composition for scene in alone}) == 3
    together = [Scene(((dog, rain),), ""), Scene(((rain,), (loud_dog,)), ""), Scene(((dog,), (rain,)), "hall")]
    assert len({scene.composition for scene in together}) == 1


def test_more_clips_keep_the_first_ones(scenes):
    longer = find_builder("scenes")(**{**SIZES, "num_train": 250})._scenes
    assert longer["train"][:200] == scenes["train"]
    assert find_builder("scenes")(**SIZES, seed=1)._scenes["train"] != scenes["train"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_phrasings_are_new_but_their_words_are_not(language):
    first, second = SceneEvent("low_siren", 2, "far"), SceneEvent("fast_clicks", 1, "loud")
    third = SceneEvent("high_bell", 3, "quiet")
    phrases, texts = label_phrases("synthetic"), {}
    for held_out in (False, True):
        rng = np.random.default_rng(0)
        scenes = [Scene(((first, second), (third,)), room) for room in ("hall", "small room")]
        texts[held_out] = {
            caption_scene(scene, phrases, language, held_out, rng) for scene in scenes for _ in range(2000)
        }
    assert texts[False]
    assert texts[True]
    assert not texts[False] & texts[True]
    in_training = "\n".join(texts[False])
    for key, wordings in read_phrases("scenes").items():
        if key in ("event", "scene", "after"):
            continue
        for wording in wordings[language]:
            assert wording in in_training, (key, wording)


def test_example_captions():
    scene = Scene(((SceneEvent("low_siren", 2, "far"),), (SceneEvent("high_bell", 1, ""),)), "hall")
    captions = {}
    for language in ("eng", "deu", "jpn"):
        rng = np.random.default_rng(4)
        captions[language] = caption_scene(scene, label_phrases("synthetic"), language, False, rng)
    assert captions == {
        "eng": "You can hear a low two-tone siren in the distance twice, and then a high bell ringing, "
        "in a large hall.",
        "deu": "In dieser Aufnahme ist eine tiefe Zweitonsirene in der Ferne zweimal, und dann ein hoher "
        "Glockenschlag, in einer großen Halle zu hören.",
        "jpn": "これは大きなホールで、遠くの低い二音のサイレン（二回）、それから高い鐘の音です。",
    }


def test_captions_of_a_row_are_parallel(tmp_path):
    rows = load_splits("scenes", str(tmp_path), num_train=2, num_validation=0, num_test=10, duration_seconds=1.0)
    assert all(len(row["captions"][language]) == 1 for row in rows["train"] for language in LANGUAGES)
    assert {license for of_split in rows.values() for license in of_split["license"]} == {"CC0-1.0"}
    for row in rows["test"]:
        assert row["labels"] == sorted(event["label"] for event in row["events"])
        counts = {len(row["captions"][language]) for language in LANGUAGES}
        assert counts <= {4, 5}
        assert len(counts) == 1
        for spanish, catalan in zip(row["captions"]["spa"], row["captions"]["cat"], strict=True):
            assert ("grabación" in spanish) == ("enregistrament" in catalan)


def render(event, room="", seconds=2.0, start=4000, period=8000, seed=0):
    scene = Scene(((event,),), room)
    placements = [Placement(event, start, period)]
    rng = np.random.default_rng(seed)
    return render_scene(scene, placements, take_generated(RATE_HZ), round(seconds * RATE_HZ), RATE_HZ, rng)


def level_db(samples):
    return 10 * np.log10(np.mean(np.square(samples, dtype=np.float64)))


def test_the_event_is_at_the_position_in_its_row():
    samples = render(SceneEvent("low_hum", 3, ""), seconds=3.0)
    for repetition in range(3):
        begin = 4000 + repetition * 8000
        pause = level_db(samples[begin + 7000 : begin + 8000])
        assert level_db(samples[begin : begin + 6800]) > pause + 20
    assert level_db(samples[:4000]) < -45
    assert level_db(samples[28000:]) < -45


def test_a_version_of_the_scenes_has_the_same_audio_in_all_releases():
    """A change of the audio needs another SCENES_VERSION, because files with the old audio would be reused."""
    builder = find_builder("scenes")(num_train=12, num_validation=0, num_test=0, duration_seconds=3.0)
    projections = []
    for index in range(12):
        samples = builder.render("train", index)
        vector = np.random.default_rng(0).standard_normal(len(samples))
        projections.append(samples @ vector / np.linalg.norm(samples))  # on one random vector
    assert SCENES_VERSION == 2
    expected = [-0.131, 0.702, 0.018, 1.061, -0.525, 0.303, -1.321, -0.056, 0.519, -1.262, -0.626, -1.205]
    np.testing.assert_allclose(projections, expected, atol=0.002)
    captions, events = builder.describe("train", 2)
    assert captions["eng"] == [
        "A low bell ringing twice, followed by a low hum at low volume three times while a series of slow knocks "
        "twice, in a large hall"
    ]
    times = {event["label"]: (event["onset_seconds"], event["offset_seconds"]) for event in events}
    assert list(times) == ["low_bell", "low_hum", "slow_knocks"]
    expected = [(0.1991, 1.3994), (1.7848, 2.9511), (1.6284, 2.7381)]
    np.testing.assert_allclose(list(times.values()), expected, atol=1e-4)


def test_loud_sounds_at_the_same_time_are_not_clipped():
    pair = (SceneEvent("low_hum", 1, "loud"), SceneEvent("low_buzz", 1, "loud"))
    placements = [Placement(event, 4000, 20_000) for event in pair]
    rng = np.random.default_rng(0)
    samples = render_scene(Scene((pair,), "hall"), placements, take_generated(RATE_HZ), 32_000, RATE_HZ, rng)
    assert samples.dtype == np.float32
    assert np.abs(samples).max() == pytest.approx(0.99)


def test_manners_differ_in_level_and_spectrum():
    levels, centroids = {}, {}
    for manner in ("", "loud", "quiet", "far"):
        samples = render(SceneEvent("high_hiss", 1, manner))[4000:10000].astype(np.float64)
        levels[manner] = level_db(samples)
        power = np.abs(np.fft.rfft(samples)) ** 2
        centroids[manner] = np.average(np.fft.rfftfreq(samples.size, 1 / RATE_HZ), weights=power)
    assert levels["loud"] > levels[""] + 4 > levels["far"] + 8
    assert levels["quiet"] < levels[""] - 8
    assert centroids["far"] < centroids["loud"] - 50


def test_a_hall_reverberates_longer_than_a_small_room():
    event = SceneEvent("low_noise_burst", 1, "loud")
    tails = {room: level_db(render(event, room)[12000:16000]) for room in ("", "small room", "hall")}
    assert tails["hall"] > tails["small room"] + 10
    assert tails["hall"] > tails[""] + 15


def write_digits(folder, speakers=("ada", "ben", "cid", "dot")):
    lines = [("file_name", "label", "speaker")]
    for speaker, label in itertools.product(speakers, ("one", "two", "three")):
        name = f"{label}_{speaker}.wav"
        soundfile.write(folder / name, builders.tone(300.0, 800), 8000)
        lines.append((name, label, speaker))
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)


@pytest.mark.parametrize("seed", range(3))
def test_speakers_folds_and_files_stay_apart(tmp_path, seed):
    digits, samples, esc = (tmp_path / name for name in ("digits", "samples", "esc"))
    digits.mkdir()
    write_digits(digits)
    speakers = {
        split: {path.stem.split("_")[1] for paths in of_split.values() for path in paths}
        for split, of_split in split_recordings([str(digits)], seed).items()
    }
    assert {split: len(names) for split, names in speakers.items()} == {"train": 2, "validation": 1, "test": 1}
    assert len(set.union(*speakers.values())) == 4
    (tmp_path / "more").mkdir()
    write_digits(tmp_path / "more", ("eve", "fay", "gus", "hal", "ida"))
    both = split_recordings([str(digits), str(tmp_path / "more")], seed)
    for split, count in (("train", 3), ("validation", 1), ("test", 1)):  # of each folder
        names = {path.stem.split("_")[1] for paths in both[split].values() for path in paths}
        assert names & {"ada", "ben", "cid", "dot"} == speakers[split]
        assert len(names - speakers[split]) == count

    clips = [
        ESC50Clip(f"{fold}-{label}-{take}", fold, label, f"{fold}{label}{take}", builders.tone(300.0, 800))
        for fold, label, take in itertools.product(range(1, 5), ("dog", "rain"), range(2))
    ]
    write_esc50(esc, clips, 8000)
    folds = {
        split: {path.stem[0] for paths in of_split.values() for path in paths}
        for split, of_split in split_recordings([str(esc)], seed).items()
    }
    assert sorted(map(len, folds.values())) == [1, 1, 2]
    assert len(set.union(*folds.values())) == 4

    samples.mkdir()
    lines = [("file_name", "label")]
    for number in range(14):
        soundfile.write(samples / f"{number}.wav", builders.tone(300.0, 800), 8000)
        lines.append((f"{number}.wav", ("drum", "drum", "bell", "bell", "bell")[number] if number < 5 else "guitar"))
    with (samples / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    files = split_recordings([str(samples)], seed)
    assert {split: len(of_split["guitar"]) for split, of_split in files.items()} == {
        "train": 6, "validation": 1, "test": 2
    }  # fmt: skip
    # two recordings cannot be in three splits
    assert [list(of_split) for of_split in files.values()] == [["bell", "guitar"]] * 3


def test_a_crop_of_a_recording_contains_its_sound(tmp_path):
    # much quieter than full scale, so that "loud" is relative to the peak of the recording
    bark = 0.1 * np.r_[builders.tone(300.0, 800), np.zeros(40_000), builders.tone(300.0, 800)]
    soundfile.write(tmp_path / "bark.wav", bark, 8000)
    soundfile.write(tmp_path / "silent.wav", np.zeros(800), 8000)
    take = take_recorded({"dog": [tmp_path / "bark.wav"], "cat": [tmp_path / "silent.wav"]}, 8000)
    rng = np.random.default_rng(0)
    for _ in range(100):
        sound = take("dog", 1000, rng)
        assert len(sound) == 1000
        assert np.abs(sound).max() > 0.05 * np.abs(bark).max()
    with pytest.raises(ValueError, match=r"silent\.wav"):
        take("cat", 1000, rng)


def test_a_short_recording_is_cropped_to_its_sound(tmp_path):
    tone = np.r_[np.zeros(50), 0.04, -0.06, 0.5, 1.0, 0.1, 0.06, 0.04, np.zeros(50)]
    soundfile.write(tmp_path / "click.wav", 0.5 * tone, 8000, subtype="FLOAT")
    take = take_recorded({"click": [tmp_path / "click.wav"]}, 8000)
    np.testing.assert_allclose(take("click", 1000, np.random.default_rng(0)), 0.5 * tone[51:56], atol=1e-6)
    crops = [tuple(take("click", 2, np.random.default_rng(seed))) for seed in range(40)]
    # around each sample, and whole at the edges
    assert {round(2 * crop[0], 2) for crop in crops} == {-0.06, 0.5, 1.0, 0.1}
    assert {len(crop) for crop in crops} == {2}


def test_a_changed_table_of_recordings_changes_the_scenes(tmp_path):
    (tmp_path / "sounds").mkdir()
    lines = ["file_name,label"]
    for label, number in itertools.product(("dog", "cat", "rain", "drilling"), range(4)):
        lines.append(f"{label}{number}.wav,{label}")
        soundfile.write(tmp_path / "sounds" / f"{label}{number}.wav", builders.tone(300.0, 800), 8000)
    table = tmp_path / "sounds" / "metadata.csv"
    rows = {}
    for label in ("cat", "cow"):
        table.write_text("\n".join(lines).replace(",cat", f",{label}"))
        sizes = {"num_train": 20, "num_validation": 2, "num_test": 2}
        rows[label] = load_splits("scenes", str(tmp_path / "cache"), **sizes, recordings=str(tmp_path / "sounds"))
    labels = {name: set(itertools.chain(*splits["train"]["labels"])) for name, splits in rows.items()}
    assert labels == {"cat": {"dog", "cat", "rain", "drilling"}, "cow": {"dog", "cow", "rain", "drilling"}}
    assert set(rows["cat"]["train"]["license"]) == {"unknown"}


def test_other_settings_and_recordings_have_other_files(tmp_path, monkeypatch):
    write_digits(tmp_path)

    def folder(**config):
        return find_builder("scenes")(cache_dir=str(tmp_path / "cache"), **config).audio_folder

    recorded = {"recordings": str(tmp_path)}
    found = [folder(), folder(seed=1), folder(**recorded), folder(**recorded, seed=1), folder(duration_seconds=3)]
    (tmp_path / "one_ada.wav").write_bytes(b"other")
    found.append(folder(**recorded))
    (tmp_path / "metadata.csv").write_text("file_name,label\none_ada.wav,one\n")
    found.append(folder(**recorded))
    monkeypatch.setattr("modeling_supclap.datasets_scripts.builders.scenes.SCENES_VERSION", -1)
    found.append(folder())
    assert len(set(found)) == len(found)


def test_scenes_of_recordings(tmp_path):
    write_digits(tmp_path)
    with pytest.raises(ValueError, match="3 usable labels"):
        load_splits("scenes", str(tmp_path / "cache"), **SIZES, recordings=[str(tmp_path)])

    clips = []
    for fold, label in itertools.product(range(1, 5), ("dog", "rain")):
        clips.append(ESC50Clip(f"{fold}-{label}", fold, label, f"{fold}{label}", builders.tone(300.0, 800)))
    write_esc50(tmp_path / "esc", clips, 8000)
    folders = [str(tmp_path), str(tmp_path / "esc")]
    sizes = {"num_train": 6, "num_validation": 2, "num_test": 2}
    rows = load_splits("scenes", str(tmp_path / "cache"), **sizes, recordings=folders)
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 6, "validation": 2, "test": 2}
    four = ["dog", "one", "rain", "three"]  # the same in all processes
    assert rows["train"]["labels"][:] == [four, ["one", "three", "two"], ["rain", "three"], ["dog"], four, four]
    samples, rate_hz = soundfile.read(rows["test"][0]["audio_path"])
    assert (len(samples), rate_hz) == (4 * RATE_HZ, RATE_HZ)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "esc" / "audio")):
        load_splits("scenes", str(tmp_path / "cache"), **sizes, recordings=str(tmp_path / "esc" / "audio"))
