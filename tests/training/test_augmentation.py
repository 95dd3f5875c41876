"""Augmentation: masks compared with loops and transformers, levels of waveforms, and no augmentation in evaluation."""

from functools import partial
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import soundfile
import torch
from audio_encoders import make_encoder
from recordings import tone_rows
from test_temporal_training import build as build_temporal
from test_temporal_training import items_of
from test_trainer import build, lasting_logs, losses, with_dropout
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

from modeling_supclap import SupCLAPProcessor
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.training.augmentation import SpecAugment, WaveformAugmentation
from modeling_supclap.training.checkpoints import RUN_FILE
from modeling_supclap.training.collator import IndexedRows, TrainingCollator

FRAMES, BANDS = 120, 24


def options(**kwargs):
    masks = {"mask_time_prob": 0.2, "mask_time_length": 5}
    bands = {"mask_feature_prob": 0.3, "mask_feature_length": 3}
    waves = {"random_gain_db": 0.0, "background_dir": None, "background_snr_db": [3.0, 30.0], "background_prob": 0.5}
    run = {"max_audio_seconds": 30.0, "seed": 3, "process_index": 0, "device": torch.device("cpu")}
    return SimpleNamespace(**{**masks, **bands, **waves, **run, **kwargs})


def spectrograms(count=6):
    """Return CED inputs (B, bands, frames) with clips of unequal length, and padding that would change a mean."""
    torch.manual_seed(1)
    features = torch.randn(count, BANDS, FRAMES)
    mask = (torch.arange(FRAMES) < torch.randint(3, FRAMES + 1, (count, 1))).long()
    mask[0], mask[1] = 1, torch.arange(FRAMES) < 3  # the whole axis, and too short for a span
    return features.masked_fill(mask[:, None] == 0, -1e4), mask


def loop_spans(generator, lengths, size, prob, length, min_masks):
    """Compute the masked spans of an axis with loops, from the same random numbers."""
    masks = np.zeros((len(lengths), size), bool)
    for row, chances in enumerate(torch.rand(len(lengths), 1 + size, generator=generator).tolist()):
        count = min(max(int(prob * lengths[row] / length + chances[0]), min_masks), lengths[row] // length)
        starts = sorted(range(lengths[row] - length + 1), key=lambda start, keys=chances[1:]: keys[start])
        for start in starts[:count]:
            masks[row, start : start + length] = True
    return masks


@pytest.mark.parametrize(
    ("kind", "name", "given", "most"),
    [
        ("supclap", "mask_time_length", {}, 3003),
        ("supclap", "mask_time_length", {"max_audio_seconds": 5.0}, 1001),
        ("supclap", "mask_feature_length", {"mask_feature_prob": 0.1}, 64),
        ("cnn14", "mask_feature_length", {"mask_feature_prob": 0.1}, 64),
    ],
)
def test_spans_that_fit_into_no_clip_are_refused(kind, name, given, most):
    processor = builders.pair(kind)[1]
    SpecAugment(processor, options(**given, **{name: most}))
    with pytest.raises(ValueError, match=f"{name} is {most + 1}, .* at most {most}, "):
        SpecAugment(processor, options(**given, **{name: most + 1}))
    SpecAugment(processor, options(mask_feature_prob=0.0, mask_feature_length=65))


@pytest.mark.parametrize(("of_time", "of_bands"), [(0.2, 0.3), (0.0, 0.05)])
def test_masks_are_those_of_plain_loops_and_masked_values_the_mean_of_the_clip(of_time, of_bands):
    features, mask = spectrograms()
    augment = SpecAugment(builders.bert_processor(), options(mask_time_prob=of_time, mask_feature_prob=of_bands))
    masked = augment(features, mask, 9)

    generator = torch.Generator().manual_seed(augment._generator.initial_seed())
    lengths = mask.sum(dim=1).tolist()
    in_time = loop_spans(generator, lengths, FRAMES, of_time, 5, 2 if of_time else 0)
    in_bands = loop_spans(generator, [BANDS] * len(lengths), BANDS, of_bands, 3, 0)
    assert in_time.any() == (of_time > 0)
    assert in_bands.any()
    assert in_bands.any(axis=1).all() == (of_bands > 0.1)
    for row, length in enumerate(lengths):
        clip = features[row, :, :length]
        assert torch.equal(masked[row, :, length:], features[row, :, length:])  # padding
        hidden = torch.from_numpy(in_bands[row][:, None] | in_time[row][None, :length])
        torch.testing.assert_close(masked[row, :, :length], torch.where(hidden, clip.mean(), clip))


def test_as_many_frames_are_masked_as_by_transformers():
    mask = torch.arange(FRAMES) < torch.arange(20, FRAMES + 1, 5).repeat(50)[:, None]
    features = torch.randn(len(mask), BANDS, FRAMES)
    time = {"mask_time_prob": 0.3, "mask_time_length": 7, "mask_feature_prob": 0.0}
    changed = SpecAugment(builders.bert_processor(), options(**time))(features, mask.long(), 0) != features
    assert torch.equal(changed.any(dim=1), changed.all(dim=1))  # whole frames
    np.random.seed(0)
    theirs = _compute_mask_indices(mask.shape, 0.3, 7, attention_mask=mask.long(), min_masks=2)
    ours = changed.any(dim=1).float()
    # the middle of a clip is masked more often than its ends
    for start, end in ((0, 10), (10, 20), (20, FRAMES)):
        assert ours[:, start:end].mean() == pytest.approx(theirs[:, start:end].mean(), rel=0.1)
    assert not changed.mT[~mask].any()


def test_masks_differ_between_clips_batches_steps_seeds_and_processes_and_return_with_the_step():
    features, mask = spectrograms()
    draw = SpecAugment(builders.bert_processor(), options())
    first, second, later = draw(features, mask, 1), draw(features, mask, 1), draw(features, mask, 2)
    other_seed = SpecAugment(builders.bert_processor(), options(seed=4))(features, mask, 1)
    other_process = SpecAugment(builders.bert_processor(), options(process_index=1))(features, mask, 1)
    found = [first, second, later, other_seed, other_process]
    assert not [one for one in range(5) for other in range(one) if torch.equal(found[one], found[other])]
    resumed = SpecAugment(builders.bert_processor(), options())
    assert torch.equal(resumed(features, mask, 2), later)


def test_masking_does_not_wait_for_the_device():
    """A fake tensor has no values, so copying them to the CPU would fail."""
    features, mask = spectrograms()
    augment = SpecAugment(builders.bert_processor(), options())
    with FakeTensorMode() as mode:
        assert augment(mode.from_tensor(features), mode.from_tensor(mask), 0).shape == features.shape
        with pytest.raises(DataDependentOutputException):
            mode.from_tensor(features).sum().item()


KINDS = ["supclap", "converted", "cnn14", "fused", "ast", "whisper", "wav2vec2-bert"]


@pytest.mark.parametrize("kind", KINDS)
def test_time_and_bands_of_each_spectrogram_are_found(kind):
    if kind in ("ast", "whisper", "wav2vec2-bert"):
        processor = SupCLAPProcessor(make_encoder(kind)[1], builders.bert_tokenizer())
    else:
        processor = builders.pair("converted" if kind == "fused" else kind)[1]
    clips = [builders.noise(8000), builders.noise(12000)]
    batch = processor(audio=clips, sampling_rate=16000, return_tensors="pt")
    features, mask = batch["input_features"], batch.get("audio_attention_mask")
    if kind == "fused":
        features = features.expand(-1, 4, -1, -1).clone()
    features += torch.rand_like(features)  # digital silence and padding may equal the mean

    only_time = {"mask_time_length": 2, "mask_feature_prob": 0.0}
    changed = SpecAugment(processor, options(**only_time))(features, mask, 0) != features
    axis = -1 if kind in ("supclap", "whisper") else -2
    in_time = changed.transpose(axis, -1).flatten(1, -2)  # (B, cells of a frame, frames)
    assert in_time.any()
    assert torch.equal(in_time.any(dim=1), in_time.all(dim=1))
    if mask is not None:
        assert not in_time.any(dim=1)[mask == 0].any()


def test_an_encoder_of_waveforms_is_refused():
    processor = SupCLAPProcessor(make_encoder("wav2vec2")[1], builders.bert_tokenizer())
    with pytest.raises(ValueError, match=r"apply_spec_augment.*Wav2Vec2FeatureExtractor"):
        SpecAugment(processor, options())


# ---- waveforms ----


@pytest.fixture(scope="module")
def backgrounds(tmp_path_factory):
    """Folder with a long and a short recording; one has another sampling rate and is in a sub-folder."""
    folder = tmp_path_factory.mktemp("backgrounds")
    (folder / "below").mkdir()
    soundfile.write(folder / "long.wav", builders.noise(40_000), 16000)
    soundfile.write(folder / "below" / "SHORT.FLAC", builders.noise(1500, seed=1), 8000)
    (folder / "notes.txt").write_text("not a recording")
    return folder


def waveform_augmentation(epoch=0, **kwargs):
    return partial(WaveformAugmentation(options(**kwargs), 16000), epoch=epoch)


def level_db(waveform):
    return 10 * np.log10(np.mean(np.square(waveform, dtype=np.float64)))


ROWS = [{"clip_id": f"clip {number}"} for number in range(200)]


def test_gains_are_uniform_in_decibels():
    clip = builders.tone(440) / 4
    augment = waveform_augmentation(random_gain_db=6.0)
    gains = [level_db(augment(clip, row)) - level_db(clip) for row in ROWS]
    assert -6 <= min(gains) < -5.5
    assert 5.5 < max(gains) <= 6
    assert np.std(gains) == pytest.approx(6 / np.sqrt(3), rel=0.1)
    np.testing.assert_allclose(augment(clip, ROWS[0]), clip * 10 ** (gains[0] / 20), rtol=1e-5)


def test_a_background_has_the_level_below_the_clip(backgrounds):
    clip = builders.tone(440) / 4
    augment = waveform_augmentation(background_dir=str(backgrounds), background_snr_db=[20.0, 5.0])
    mixed = [augment(clip, row) for row in ROWS]
    added = [wave - clip for wave in mixed if not np.array_equal(wave, clip)]
    assert 80 <= len(added) <= 120  # of 200, with probability 0.5
    snrs = [level_db(clip) - level_db(noise) for noise in added]
    assert 5 <= min(snrs) < 6
    assert 19 < max(snrs) <= 20

    # Each is a part of the long recording, or the short one repeated.
    repeated = [np.allclose(noise[:3000], noise[3000:6000], atol=1e-3) for noise in added]
    assert 0 < sum(repeated) < len(added)
    long = builders.noise(40_000).astype(np.float64)
    starts = set()
    for noise, is_repeated in list(zip(added, repeated, strict=True))[:20]:
        if is_repeated:
            continue
        products = np.correlate(long, noise.astype(np.float64), "valid")
        start = int(np.argmax(products))
        part = long[start : start + len(noise)]
        assert products[start] / np.linalg.norm(part) / np.linalg.norm(noise) > 0.999
        starts.add(start)
    assert len(starts) > 3
    assert min(starts) < 0.3 * (len(long) - len(clip))
    assert max(starts) > 0.7 * (len(long) - len(clip))


@pytest.mark.parametrize(("probability", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_none_or_all_clips_have_a_background(backgrounds, probability, share):
    augment = waveform_augmentation(background_dir=str(backgrounds), background_prob=probability)
    clip = builders.tone(440)
    assert np.mean([not np.array_equal(augment(clip, row), clip) for row in ROWS[:20]]) == share


def test_draws_depend_on_seed_epoch_clip_and_caption(backgrounds):
    clip = builders.tone(440)

    def first(row, **kwargs):
        return waveform_augmentation(background_dir=str(backgrounds), random_gain_db=3.0, **kwargs)(clip, row)

    found = [first(ROWS[0]), first(ROWS[1]), first(ROWS[0], epoch=1), first(ROWS[0], seed=4)]
    found.append(first({**ROWS[0], "caption_number": 1}))
    assert not [one for one in range(5) for other in range(one) if np.array_equal(found[one], found[other])]
    assert np.array_equal(first(ROWS[0]), found[0])


def test_a_background_that_begins_with_silence_starts_with_its_first_sound(tmp_path):
    silence, clip = np.zeros(64_000), builders.tone(440) / 4
    soundfile.write(tmp_path / "late.wav", np.concatenate([silence, builders.noise(16_000), silence]), 16000)
    augment = waveform_augmentation(background_dir=str(tmp_path), background_prob=1.0, background_snr_db=[10, 10])
    for row in ROWS[:5]:
        assert level_db(clip) - level_db(augment(clip, row) - clip) == pytest.approx(10, abs=0.01)


def test_a_folder_without_recordings_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        waveform_augmentation(background_dir=str(tmp_path))


def test_a_broken_background_is_named(tmp_path):
    (tmp_path / "hum.wav").write_bytes(b"junk")
    augment = waveform_augmentation(background_dir=str(tmp_path), background_prob=1.0)
    with pytest.raises(ValueError, match=r"hum\.wav.*background_dir") as caught:
        augment(builders.tone(440), ROWS[0])
    # for which `train` suggests on_bad_audio, which skips clips
    assert not isinstance(caught.value, BadAudioError)


def test_a_batch_holds_the_augmented_clips(rows):
    indexed = IndexedRows(rows)
    collator = TrainingCollator(builders.bert_processor())
    plain = collator([indexed[0], indexed[1]])
    louder_clips = {"augmentation": WaveformAugmentation(options(random_gain_db=9.0), 16000)}
    collator = TrainingCollator(builders.bert_processor(), **louder_clips)
    batch = collator([indexed[0], indexed[1]])
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    louder = (batch["input_features"] - plain["input_features"])[:, 5:30].flatten(1)  # decibels
    assert (louder.std(dim=1) < 0.1).all()  # the whole clip is louder
    assert 0.1 < louder.abs().max() <= 9.1
    assert torch.equal(collator([indexed[1]])["input_features"][0], batch["input_features"][1])
    collator.set_epoch(1)
    assert not torch.equal(collator([indexed[0], indexed[1]])["input_features"], batch["input_features"])

    collator = TrainingCollator(builders.bert_processor(), gives_samples=True, **louder_clips)
    assert collator([indexed[0]])["samples"].dtype == torch.float32  # 16 bits would round it


# ---- runs ----

STEPS = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
MASKS = {"apply_spec_augment": True, "mask_time_length": 4, "mask_feature_prob": 0.2}


@pytest.mark.parametrize(
    "augmentation",
    [
        {**MASKS, "random_gain_db": 6.0},
        {**MASKS, "features_on_device": True, "gradient_accumulation_steps": 2, "num_train_epochs": 4},
        pytest.param({"background_dir": "", "dataloader_num_workers": 2}, marks=pytest.mark.process),
    ],
    ids=["masks_and_gain", "masks_accumulated", "background"],
)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, rows, backgrounds, augmentation):
    augmentation = dict(augmentation)
    if "background_dir" in augmentation:
        augmentation["background_dir"] = str(backgrounds)
    settings = {**STEPS, **augmentation}
    whole = build(tmp_path / "whole", rows, model=with_dropout(), **settings)
    whole.train()
    resumed = build(tmp_path / "whole", rows, model=builders.supclap_model(with_dropout().config, seed=99), **settings)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    assert str(backgrounds.parent) not in (checkpoint / RUN_FILE).read_text()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert lasting_logs(resumed) == lasting_logs(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_training_is_augmented_and_evaluation_is_not(tmp_path, rows, backgrounds):
    settings = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    plain = build(tmp_path / "plain", rows, **settings)
    for augmentation in (MASKS, {"random_gain_db": 6.0}, {"background_dir": str(backgrounds), "background_prob": 1.0}):
        trainer = build(tmp_path / "augmented", rows, **settings, **augmentation)
        one, other = (each.predict(rows).predictions for each in (trainer, plain))
        assert all(map(np.array_equal, one, other))
        trainer.train()
        if not losses(plain):
            plain.train()
        assert losses(trainer) != losses(plain)
        plain.clap.load_state_dict(builders.supclap_model().state_dict())


def test_joined_clips_are_augmented_in_training_only(tmp_path):
    items = items_of(tone_rows(tmp_path, count=12))
    trainer = build_temporal(tmp_path / "run", items, random_gain_db=6.0)
    assert getattr(trainer.evaluation_collator, "augmentation", None) is None
    rows = [{"clip_index": 0}]
    augmented = trainer.data_collator(rows)["input_features"]
    trainer.data_collator.augmentation = None
    assert (augmented != trainer.data_collator(rows)["input_features"]).flatten(1).any(dim=1).all()
