"""Audio encoders of transformers as towers: original embeddings in any batch, long audio, adapters, localization."""

import builders
import numpy as np
import pytest
import torch
from audio_encoders import ENCODERS, WHISPER, make_encoder, save_encoder
from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig, BertModel, WhisperConfig, WhisperFeatureExtractor, WhisperModel, pipeline

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.audio_encoder import run_encoder
from modeling_supclap.audio_input import stack_clips
from modeling_supclap.encoding import max_chunk_seconds, min_clip_samples
from modeling_supclap.joining import load_tower
from modeling_supclap.processing_supclap import extract_clip
from modeling_supclap.training.checks import idle_parameters
from modeling_supclap.training.collator import TrainingCollator
from modeling_supclap.training.lora import add_lora, merge_lora, train_last_layers

RATE_HZ = 16000
CLIPS = [builders.noise(samples, seed) for seed, samples in enumerate([4321, 9000, 9000, 15999])]
FIXED = ["ast", "whisper"]


def own_pooling(name: str, clip: np.ndarray) -> torch.Tensor:
    """Compute the embedding of a clip with transformers only."""
    model, extractor = make_encoder(name)
    inputs = extractor(clip, sampling_rate=RATE_HZ, return_tensors="pt")
    if name == "whisper":
        hidden = model.get_encoder()(**inputs).last_hidden_state[0]
        return hidden[: -(-len(clip) // 320)].mean(dim=0)
    outputs = model(**inputs)
    if name == "wav2vec2-bert":  # its extractor pads an odd number of frames
        return outputs.last_hidden_state[0, inputs["attention_mask"][0].bool()].mean(dim=0)
    return outputs.pooler_output[0] if name == "ast" else outputs.last_hidden_state[0].mean(dim=0)


def batch_of(extractor, clips):
    """Return the features of several clips, padded to the longest."""
    return stack_clips([extract_clip(extractor, clip) for clip in clips])


@pytest.fixture
def joined(request, tmp_path) -> tuple[str, SupCLAPModel, SupCLAPProcessor]:
    """Name of an encoder, and the model and processor that combine it with BERT; saved in `tmp_path / "model"`."""
    save_encoder(request.param, tmp_path / "audio")
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(tmp_path / "text")
    builders.bert_tokenizer().save_pretrained(tmp_path / "text")
    folders = str(tmp_path / "audio"), str(tmp_path / "text")
    model = SupCLAPModel.from_encoders(*folders, projection_dim=8)
    processor = SupCLAPProcessor.from_encoders(*folders)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return request.param, model, processor


@pytest.mark.parametrize("joined", ENCODERS, indirect=True)
def test_the_shortest_clip_has_an_embedding_and_a_shorter_one_is_an_error(joined):
    _, model, processor = joined
    clip = builders.noise(min_clip_samples(processor.feature_extractor))
    assert len(clip) == 0.05 * RATE_HZ
    assert np.isfinite(model.encode_audio(clip, processor, RATE_HZ)).all()
    with pytest.raises(ValueError, match=r"0\.0499 s.*0\.05 s"):
        model.encode_audio(clip[:-1], processor, RATE_HZ)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_embeddings_equal_those_of_transformers_in_any_batch(name, tmp_path):
    _, extractor = save_encoder(name, tmp_path)
    encoder = load_tower("audio", str(tmp_path)).eval()
    inputs = {key: torch.from_numpy(value) for key, value in batch_of(extractor, CLIPS).items()}
    together = run_encoder(encoder, inputs["input_features"], inputs["audio_attention_mask"])
    for index, clip in enumerate(CLIPS):
        torch.testing.assert_close(together.pooler_output[index], own_pooling(name, clip), atol=1e-5, rtol=1e-4)

    # Padding after a shorter clip and the order of clips do not matter.
    features, mask = inputs["input_features"].clone(), inputs["audio_attention_mask"]
    if name not in FIXED:
        features[mask == 0] = 7.0
    again = run_encoder(encoder, features.flip(0), mask.flip(0))
    torch.testing.assert_close(again.pooler_output.flip(0), together.pooler_output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again.last_hidden_state.flip(0), together.last_hidden_state, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_pooling_by_the_mean_of_all_tokens():
    encoder, extractor = make_encoder("ast")
    features = torch.from_numpy(batch_of(extractor, CLIPS[:2])["input_features"])
    hidden = encoder(features).last_hidden_state
    torch.testing.assert_close(run_encoder(encoder, features, None, "mean").pooler_output, hidden.mean(dim=1))


def test_a_pooler_that_is_not_there_and_one_that_always_is():
    text = builders.bert_config()
    with pytest.raises(ValueError, match=r"Wav2Vec2Model.*audio_pooling.*'pooler'"):
        SupCLAPModel(builders.supclap_config(text, make_encoder("wav2vec2")[0].config, audio_pooling="pooler"))
    with pytest.raises(ValueError, match=r"CEDModel.*audio_pooling.*'mean'"):
        SupCLAPModel(builders.supclap_config(text, audio_pooling="mean"))
    with pytest.raises(StrictDataclassError, match=r"audio_pooling.*'max'"):
        builders.supclap_config(text, audio_pooling="max")


def test_a_clip_below_one_frame_is_named():
    encoder, extractor = make_encoder("wav2vec2")
    for samples, frames in ((50, 0), (369, 0), (370, 1), (689, 1), (690, 2)):
        inputs = batch_of(extractor, [CLIPS[0], CLIPS[0][:samples]]).values()
        if not frames:
            with pytest.raises(
                ValueError, match=f"clip 1 has {samples} values, fewer than one frame of Wav2Vec2Model"
            ):
                run_encoder(encoder, *map(torch.from_numpy, inputs))
            continue
        hidden = run_encoder(encoder, *map(torch.from_numpy, inputs)).last_hidden_state[1]
        assert hidden.any(dim=1).sum() == frames


@pytest.mark.parametrize("name", ENCODERS)
def test_random_masking_in_training_is_off(name, tmp_path):
    """SpecAugment and layer drop are off, because gradient caching could not repeat them."""
    save_encoder(name, tmp_path)
    config = load_tower("audio", str(tmp_path)).config
    assert not getattr(config, "apply_spec_augment", False)
    assert getattr(config, "encoder_layerdrop", 0) == getattr(config, "layerdrop", 0) == 0


@pytest.mark.parametrize("joined", ENCODERS, indirect=True)
def test_all_weights_that_train_have_a_gradient(joined, tmp_path):
    """Several processes would wait for the gradient of an idle weight, such as that of masked frames."""
    _, model, processor = joined
    inputs = processor(audio=CLIPS, sampling_rate=RATE_HZ, text=["dog"] * 4, return_tensors="pt")
    for each in (model, SupCLAPModel.from_pretrained(tmp_path / "model")):
        each.train()(**inputs, return_loss=True).loss.backward()
        assert idle_parameters(each) == []


def test_the_weight_of_masked_frames_trains_if_frames_are_masked():
    config = make_encoder("wav2vec2")[0].config
    for masks in (True, False):
        config.apply_spec_augment = masks
        model = SupCLAPModel(builders.supclap_config(builders.bert_config(), config))
        assert model.audio_model.masked_spec_embed.requires_grad == masks


@pytest.mark.parametrize("joined", ENCODERS, indirect=True)
def test_last_layers_and_lora_train(joined, tmp_path):
    name, model, processor = joined
    trained = train_last_layers(model, audio_layers=1, text_layers=0)
    assert any(part.startswith("audio_model.") and part.rpartition(".")[2] == "1" for part in trained)

    model = SupCLAPModel.from_pretrained(tmp_path / "model")
    if name == "wavlm":
        with pytest.raises(ValueError, match="WavLM"):
            add_lora(model, rank=2, audio_layers=1, text_layers=0)
        return

    model = add_lora(model, rank=2, audio_layers=1, text_layers=0)
    inputs = processor(audio=CLIPS, sampling_rate=RATE_HZ, text=["dog"] * 4, return_tensors="pt")
    model.train()(**inputs, return_loss=True).loss.backward()
    adapters = {key: weight.grad for key, weight in model.named_parameters() if "lora_B" in key}
    assert len(adapters) >= 3
    assert all(key.startswith("audio_model.") and grad is not None and grad.any() for key, grad in adapters.items())
    assert isinstance(merge_lora(model), SupCLAPModel)


@pytest.mark.parametrize("joined", [*FIXED, "wav2vec2"], indirect=True)
@torch.no_grad()
def test_long_audio_is_cut_where_the_encoder_takes_one_length(joined):
    name, model, processor = joined
    seconds = max_chunk_seconds(processor.feature_extractor)
    assert seconds == (None if name == "wav2vec2" else 1.0)
    long = builders.noise(56_000)
    chunks = model.encode_audio(long, processor, RATE_HZ, return_chunks=True)
    assert chunks.onset_seconds.tolist() == ([0.0] if seconds is None else [0.0, 1.0, 2.0, 2.5])
    start = int(chunks.onset_seconds[-1] * RATE_HZ)
    alone = model.encode_audio(long[start:], processor, RATE_HZ)
    np.testing.assert_allclose(alone, chunks.embeds[-1], atol=1e-5)


@pytest.mark.parametrize("joined", ["whisper", "wav2vec2", "wav2vec2-bert"], indirect=True)
def test_a_window_as_long_as_a_chunk_has_its_embedding(joined):
    _, model, processor = joined
    clip = builders.noise(RATE_HZ)
    found = model.localize(clip, ["dog", "rain"], processor, sampling_rate=RATE_HZ, chunk_seconds=1.0)
    expected = model.similarity(
        model.encode_audio(clip, processor, RATE_HZ), model.encode_text(["dog", "rain"], processor)
    )
    np.testing.assert_allclose(found.scores, expected, atol=1e-5)
    short = model.localize(clip, "dog", processor, sampling_rate=RATE_HZ, chunk_seconds=1.0, window_seconds=0.25)
    assert short.scores.shape == (3, 1)


@pytest.fixture
def folders(tmp_path) -> tuple[str, str]:
    """A Whisper of three seconds, and BERT."""
    torch.manual_seed(5)
    WhisperModel(WhisperConfig(**{**WHISPER, "max_source_positions": 150})).save_pretrained(tmp_path / "whisper")
    WhisperFeatureExtractor(feature_size=32, chunk_length=3).save_pretrained(tmp_path / "whisper")
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(tmp_path / "text")
    builders.bert_tokenizer().save_pretrained(tmp_path / "text")
    return str(tmp_path / "whisper"), str(tmp_path / "text")


@torch.no_grad()
def test_a_shorter_window_of_whisper_is_that_of_its_first_positions(folders, tmp_path):
    joined = SupCLAPModel.from_encoders(*folders, audio_seconds=1, projection_dim=8)
    joined.save_pretrained(tmp_path / "model")
    assert joined.audio_model.embed_positions.num_embeddings == 50
    assert not joined.audio_model.embed_positions.weight.requires_grad  # as in Whisper
    SupCLAPProcessor.from_encoders(*folders, audio_seconds=1).save_pretrained(tmp_path / "model")
    model, processor = (each.from_pretrained(tmp_path / "model") for each in (SupCLAPModel, SupCLAPProcessor))
    assert model.config.audio_config.max_source_positions == 50
    assert max_chunk_seconds(processor.feature_extractor) == 1.0

    # with transformers only: 100 frames of 10 ms, and positions that a Whisper of one second would have
    whole = WhisperModel.from_pretrained(folders[0]).eval().get_encoder()
    encoder = type(whole)(WhisperConfig(**WHISPER)).eval()
    weights = {**whole.state_dict(), "embed_positions.weight": whole.embed_positions.weight[:50]}
    encoder.load_state_dict(weights)
    clip = builders.noise(9000)
    inputs = WhisperFeatureExtractor(feature_size=32, chunk_length=1)(clip, sampling_rate=RATE_HZ, return_tensors="pt")
    pooled = encoder(**inputs).last_hidden_state[:, : -(-len(clip) // 320)].mean(dim=1)
    expected = model.audio_projection(pooled).numpy()
    for each in (model, joined):
        np.testing.assert_allclose(each.encode_audio([clip], processor, RATE_HZ), expected, atol=1e-5)
    long = SupCLAPModel.from_encoders(*folders, projection_dim=8)
    long.audio_projection.load_state_dict(model.audio_projection.state_dict())
    others = long.encode_audio([clip], SupCLAPProcessor.from_encoders(*folders), sampling_rate=RATE_HZ)
    assert np.abs(others - expected).max() > 1e-3

    # all users of the model agree: chunks, windows, the pipeline, batches of the training
    clip = builders.noise(40_000)
    chunks = model.encode_audio(clip, processor, RATE_HZ, return_chunks=True)
    assert chunks.onset_seconds.tolist() == [0.0, 1.0, 1.5]
    found = model.localize(clip[:RATE_HZ], "dog", processor, sampling_rate=RATE_HZ, chunk_seconds=1.0)
    one = model.similarity(chunks.embeds[:1], model.encode_text("dog", processor))
    np.testing.assert_allclose(found.scores, one, atol=1e-5)
    classify = pipeline("zero-shot-audio-classification", model=str(tmp_path / "model"))
    scores = {each["label"]: each["score"] for each in classify(clip, candidate_labels=["dog", "rain"])}
    texts = model.encode_text([f"This is a sound of {label}." for label in ("dog", "rain")], processor)
    mean = torch.from_numpy(model.similarity(model.encode_audio(clip, processor, RATE_HZ), texts))
    logits = model.logit_scale.exp() * mean[0]
    assert [scores["dog"], scores["rain"]] == pytest.approx(logits.softmax(dim=0).tolist(), abs=1e-5)
    assert TrainingCollator(processor).max_audio_seconds == 1.0


@pytest.mark.parametrize("seconds", [0, 4, 1.5])
def test_a_window_that_whisper_cannot_have_is_named(folders, seconds):
    with pytest.raises(ValueError, match=f"audio_seconds is {seconds}.*from 1 to 3"):
        SupCLAPModel.from_encoders(*folders, audio_seconds=seconds)


@pytest.mark.parametrize("joined", ["ast", "wav2vec2"], indirect=True)
def test_only_whisper_has_a_shorter_window(joined, tmp_path):
    for kind in (SupCLAPModel, SupCLAPProcessor):
        with pytest.raises(ValueError, match="audio_seconds applies to Whisper"):
            kind.from_encoders(str(tmp_path / "audio"), str(tmp_path / "text"), audio_seconds=1)


@pytest.mark.parametrize("joined", ["ast"], indirect=True)
def test_tokens_without_times_are_not_localized(joined):
    _, model, processor = joined
    with pytest.raises(ValueError, match="audio-spectrogram-transformer"):
        model.localize(CLIPS[0], "dog", processor, sampling_rate=RATE_HZ)


@pytest.mark.parametrize("joined", ["whisper", "wav2vec2", "wav2vec2-bert"], indirect=True)
@torch.no_grad()
def test_the_pipeline_gives_the_scores_of_the_model(joined, tmp_path):
    _, model, processor = joined
    labels = ["dog", "rain"]
    classify = pipeline("zero-shot-audio-classification", model=str(tmp_path / "model"))
    results = classify(CLIPS[:2], candidate_labels=labels, hypothesis_template="{}", batch_size=2)
    for clip, result in zip(CLIPS, results, strict=False):
        inputs = processor(audio=clip, sampling_rate=RATE_HZ, text=labels, return_tensors="pt")
        expected = model(**inputs).logits_per_audio[0].softmax(dim=0).tolist()
        scores = {each["label"]: each["score"] for each in result}
        assert [scores[label] for label in labels] == pytest.approx(expected, abs=1e-5)
