"""Conversion of CLAP to our model and back: equal embeddings, training, and errors for missing weights."""

import builders
import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from transformers import ClapModel

from modeling_supclap import MSCLAPFeatureExtractor, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import clap_from_supclap, load_clap, processor_from_clap, save_clap, supclap_from_clap
from modeling_supclap.training.collator import EvaluationCollator, TrainingCollator
from modeling_supclap.training.lora import add_lora, merge_lora, train_last_layers
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.waveform import resample

CLIPS = [builders.tone(300.0), builders.noise(5000), builders.noise(16000, seed=1)]
TEXTS = ["a dog barks while the rain falls", "rain", "the dog"]
FUSION = {"enable_fusion": True, "aff_block_r": 2}


@pytest.fixture
def clap():
    return builders.clap_model()


@pytest.fixture(scope="module")
def processor():
    return processor_from_clap(builders.clap_processor())


@torch.no_grad()
def embeds(model, inputs):
    """Return the audio and text embeddings of either kind of model."""
    audio = {name: inputs[name] for name in ("input_features", "is_longer")}
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model.get_audio_features(**audio).pooler_output, model.get_text_features(**text).pooler_output


# ---- there and back ----


@pytest.mark.parametrize(("audio", "truncation"), [({}, "rand_trunc"), (FUSION, "fusion")])
def test_it_embeds_as_clap_does(audio, truncation):
    clap = builders.clap_model(builders.clap_config(audio))
    processor = processor_from_clap(builders.clap_processor(truncation))
    model = supclap_from_clap(clap)
    inputs = processor(audio=CLIPS, text=TEXTS, sampling_rate=16000, return_tensors="pt")
    for ours, theirs in zip(embeds(model, inputs), embeds(clap, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert len(inputs["input_features"].unique(dim=0)) == 3
    with torch.no_grad():
        ours, theirs = model(**inputs), clap(**inputs)
    torch.testing.assert_close(ours.logits_per_audio, theirs.logits_per_audio, atol=1e-5, rtol=0)


def test_is_longer_reaches_the_fusion():
    clap = builders.clap_model(builders.clap_config(FUSION))
    model = supclap_from_clap(clap)
    inputs = {"input_features": torch.randn(2, 4, 101, 32), "is_longer": torch.tensor([[False], [True]])}
    with torch.no_grad():
        fused = model.get_audio_features(**inputs).pooler_output
        torch.testing.assert_close(fused, clap.get_audio_features(**inputs).pooler_output, atol=1e-6, rtol=0)
        plain = model.get_audio_features(inputs["input_features"], is_longer=torch.zeros(2, 1)).pooler_output
    torch.testing.assert_close(fused[0], plain[0])
    assert (fused[1] - plain[1]).abs().max() > 1e-4


def test_keys_and_configuration_survive_conversion_and_back(clap):
    model = supclap_from_clap(clap)
    back = clap_from_supclap(model)
    assert set(model.state_dict()) == set(clap.state_dict()) - {"logit_scale_a", "logit_scale_t"} | {"logit_scale"}
    assert back.config.to_dict() == clap.config.to_dict()
    assert list(back.state_dict()) == list(clap.state_dict())
    for name, value in clap.state_dict().items():
        expected = clap.logit_scale_a if name == "logit_scale_t" else value
        assert torch.equal(back.state_dict()[name], expected), name


def test_the_copies_share_no_tensors(clap):
    model = supclap_from_clap(clap)
    before = clap.text_projection.linear1.weight.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.config.text_config.vocab_size = 7
    assert torch.equal(clap.text_projection.linear1.weight, before)
    assert clap.config.text_config.vocab_size == 300


def of_clap(**changes):
    """Return a model of the towers of CLAP with another configuration."""
    config = supclap_from_clap(builders.clap_model()).config
    for name, value in changes.items():
        setattr(config, name, value)
    return SupCLAPModel(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (builders.supclap_model, "'ced', 'bert'.*'clap_audio_model'"),
        (lambda: of_clap(text_pooling="mean"), "'mean', None.*'pooler', None"),
        (lambda: of_clap(logit_bias=-10.0), r"'pooler', -10\.0.*'pooler', None"),
        (lambda: add_lora(supclap_from_clap(builders.clap_model())), "ClapModel.*audio_model"),
    ],
)
def test_models_that_clap_cannot_represent_are_rejected(model, message):
    with pytest.raises(ValueError, match=message):
        clap_from_supclap(model())


def test_adapters_go_back_merged(clap, processor):
    model = add_lora(supclap_from_clap(clap), rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    inputs = processor(audio=CLIPS, text=TEXTS, sampling_rate=16000, return_tensors="pt")
    expected = embeds(model, inputs)
    assert (expected[0] - embeds(clap, inputs)[0]).abs().max() > 1e-4
    for left, right in zip(embeds(clap_from_supclap(merge_lora(model)), inputs), expected, strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=0)


# ---- nothing is lost in silence ----


def rewrite(folder, change):
    """Change the tensors of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_whole_clap_loads(tmp_path, clap):
    clap.half().save_pretrained(tmp_path)
    loaded = load_clap(tmp_path)
    assert loaded.dtype == torch.float32
    for name, value in clap.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(loaded.state_dict()[name].dtype)), name


def test_constants_may_be_missing(tmp_path, clap):
    clap.save_pretrained(tmp_path)
    constants = {name for name, _ in clap.text_model.named_buffers(prefix="text_model") if name.endswith("_ids")}
    assert len(constants) == 2
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in constants])
    loaded = load_clap(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], clap.state_dict()[name]) for name in constants)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("audio_projection.linear1.weight"), r"audio_projection\.linear1\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "extra"),
    ],
)
def test_a_clap_with_a_missing_tensor_is_rejected(tmp_path, clap, change, message):
    clap.save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_clap(tmp_path)


def test_another_model_is_rejected_as_clap(tmp_path, clap):
    clap.audio_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'clap_audio_model'"):
        load_clap(tmp_path)


def test_an_unused_pooler_is_not_built(clap):
    config = builders.supclap_config(text=clap.config.text_config)
    assert SupCLAPModel(config).text_model.pooler is None


# ---- the processor and the data ----


def test_features_of_short_clips_equal_those_of_clap(processor):
    clap = builders.clap_processor()
    # Call both parts separately, because ClapProcessor of transformers 5.17 passes the padding option to the audio,
    # too.
    theirs = clap.feature_extractor(CLIPS, sampling_rate=16000, return_tensors="pt")
    theirs.update(clap.tokenizer(TEXTS, return_tensors="pt", padding=True))
    ours = processor(audio=CLIPS, text=TEXTS, sampling_rate=16000, return_tensors="pt")
    assert set(ours) == set(theirs)
    loudest = theirs["input_features"].amax((1, 2, 3), keepdim=True)
    is_loud = theirs["input_features"] > loudest - 80  # below, float32 rounds
    for batch in (ours, theirs):
        batch["input_features"] = batch["input_features"].where(is_loud, -100.0)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=0.01 if name == "input_features" else 0, rtol=0)


@pytest.mark.parametrize("truncation", ["rand_trunc", "fusion"])
def test_the_features_of_a_clip_do_not_depend_on_time_or_batch(truncation):
    processor = processor_from_clap(builders.clap_processor(truncation))
    long = builders.noise(40_000, seed=5)
    alone = processor(audio=long, sampling_rate=16000, return_tensors="np")
    cut = processor(audio=[long[:16000]], sampling_rate=16000, return_tensors="np")
    beside = processor(audio=[builders.tone(300.0), long, CLIPS[1]], sampling_rate=16000, return_tensors="np")
    assert np.array_equal(alone["input_features"], cut["input_features"])
    assert np.array_equal(beside["input_features"][1:2], alone["input_features"])
    assert beside["is_longer"].tolist() == [[False]] * 3


def test_another_rate_is_resampled(processor):
    clip = builders.noise(22_050)
    resampled = resample(clip, 44_100, 16_000)
    found = processor(audio=clip, sampling_rate=44_100)["input_features"]
    np.testing.assert_array_equal(found, processor(audio=resampled, sampling_rate=16_000)["input_features"])
    assumed = processor(audio=resampled)["input_features"]  # as in transformers, with a warning
    np.testing.assert_array_equal(assumed, found)


def test_a_saved_clap_has_both_scales_also_in_other_weights(tmp_path, clap):
    """`SupCLAPModel` ignores them, and saves them anew from its own scale."""
    model = supclap_from_clap(clap)
    for scale, options in (
        (4.0, {}),
        (3.0, {"state_dict": dict(model.state_dict())}),
        (2.0, {"max_shard_size": "20KB"}),
    ):
        torch.nn.init.constant_(model.logit_scale, scale)
        model.save_pretrained(tmp_path / str(scale), **options)
        loaded = ClapModel.from_pretrained(tmp_path / str(scale))
        assert loaded.logit_scale_a.item() == loaded.logit_scale_t.item() == scale
        ours, report = SupCLAPModel.from_pretrained(tmp_path / str(scale), output_loading_info=True)
        assert ours.logit_scale.item() == scale
        assert not any(report.values()), report
    builders.supclap_model().save_pretrained(tmp_path / "ced")
    assert "logit_scale_a" not in load_file(tmp_path / "ced" / "model.safetensors")


def test_what_a_clap_cannot_do_is_not_saved_as_one(tmp_path, clap, processor):
    model, tokenizer = supclap_from_clap(clap), processor.tokenizer
    prefixed = SupCLAPProcessor(processor.feature_extractor, tokenizer, caption_prefix="query: ")
    plain = SupCLAPProcessor(processor.feature_extractor, tokenizer, plain_captions=True)
    other = SupCLAPProcessor(MSCLAPFeatureExtractor(), tokenizer)
    for wrong, message in ((prefixed, "'query: '"), (plain, "plain_captions=True"), (other, "MSCLAPFeatureExtractor")):
        with pytest.raises(ValueError, match=message):
            save_clap(model, wrong, tmp_path / "clap")
    with pytest.raises(ValueError, match="ced"):
        save_clap(*builders.pair(), tmp_path / "clap")
    assert not (tmp_path / "clap").exists()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Six tones of 2.5 s at 22,050 Hz with increasing loudness, so that all crops differ."""
    folder, words, rows = tmp_path_factory.mktemp("tones"), builders.CAPTIONS["eng"].split(), []
    time = np.arange(55_125) / 22_050
    for index in range(6):
        path = folder / f"{index}.wav"
        soundfile.write(path, 0.3 * time / 2.5 * np.sin(2 * np.pi * 200 * (index + 1) * time), 22_050)
        row = {"clip_id": f"clip{index}", "audio_path": str(path), "captions": {"eng": [f"a {words[index]}"]}}
        rows.append({**row, "labels": [words[index]]})
    return rows


def test_the_collator_crops_and_resamples_for_clap(processor, rows):
    indexed = [{**row, "clip_index": index} for index, row in enumerate(rows)]
    evaluation, training = EvaluationCollator(processor), TrainingCollator(processor, seed=1)
    first, again = evaluation(indexed), evaluation(indexed)
    assert torch.equal(first["input_features"], again["input_features"])
    assert first["input_features"].shape == (6, 1, 101, 32)
    beginning, rate_hz = soundfile.read(rows[0]["audio_path"], frames=22_050, dtype="float32")
    assert rate_hz == 22_050
    resampled = np.interp(np.arange(16000) / 16000, np.arange(22_050) / 22_050, beginning).astype(np.float32)
    expected = processor(audio=resampled, sampling_rate=16000, return_tensors="pt")["input_features"][0, 0]
    band = expected.mean(dim=0).argmax()  # band of the tone, where both resampling methods agree
    torch.testing.assert_close(first["input_features"][0, 0, 5:-5, band], expected[5:-5, band], atol=0.5, rtol=0)
    # Later crops are louder. The crop does not depend on numpy's global random generator.
    drawn = training(indexed)
    np.random.seed(5)
    assert torch.equal(training(indexed)["input_features"], drawn["input_features"])
    assert (drawn["input_features"] - first["input_features"])[:, 0, 5:-5].amax(dim=(1, 2)).gt(1).all()


def train(folder, rows, model, processor, **kwargs):
    short = {"per_device_train_batch_size": 3, "num_train_epochs": 2, "learning_rate": 1e-3}
    args = builders.training_args(folder, **{**short, **kwargs})
    trainer = SupCLAPTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=processor)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("audio", "truncation", "options"),
    [({}, "rand_trunc", {}), ({}, "rand_trunc", {"cached_chunk_size": 2}), (FUSION, "fusion", {})],
)
def test_clap_is_post_trained_and_converted_back(tmp_path, rows, audio, truncation, options):
    processor = processor_from_clap(builders.clap_processor(truncation))
    model = supclap_from_clap(builders.clap_model(builders.clap_config(audio)))
    train_last_layers(model, audio_layers=1, text_layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = train(tmp_path, rows, model, processor, **options)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    assert trainer.evaluate()["eval_mean_recall"] == trainer.evaluate()["eval_mean_recall"]
    clap_from_supclap(model).save_pretrained(tmp_path / "clap")
    clap = load_clap(tmp_path / "clap")
    inputs = processor(audio=CLIPS, text=TEXTS, sampling_rate=16000, return_tensors="pt")
    for left, right in zip(embeds(clap, inputs), embeds(model.eval(), inputs), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_the_training_embedding_of_a_clip_does_not_depend_on_the_batch(clap, processor):
    inputs = processor(audio=CLIPS, sampling_rate=16000, return_tensors="pt")
    model = supclap_from_clap(clap).train()
    together = model.get_audio_features(**inputs).pooler_output
    alone = model.get_audio_features(**{name: value[:1] for name, value in inputs.items()}).pooler_output
    torch.testing.assert_close(alone[0], together[0], atol=1e-6, rtol=0)
