"""The zero-shot pipeline of transformers: scores equal those of the model, even for clips of unequal length."""

from typing import Any

import builders
import numpy as np
import pytest
import soundfile
import torch
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

from modeling_supclap import SupCLAPProcessor, pipeline_supclap
from modeling_supclap.encoding import embed_recordings
from modeling_supclap.pipeline_supclap import ClipPipeline
from modeling_supclap.waveform import resample

TASK = "zero-shot-audio-classification"
LABELS = ["dog", "rain", "pluie"]
CLIPS = [builders.noise(16000, seed=1), builders.noise(200_000, seed=2)]


@torch.no_grad()
def expected_scores(model, processor, clip: np.ndarray, template: str) -> list[float]:
    texts = [template.format(label) for label in LABELS]
    inputs = processor(audio=clip, sampling_rate=16000, text=texts, return_tensors="pt")
    return model(**inputs).logits_per_audio[0].softmax(dim=0).tolist()


def scores(result: list[dict[str, Any]]) -> list[float]:
    """Return the scores in the order of the labels; the pipeline sorts them by score."""
    by_label = {each["label"]: each["score"] for each in result}
    assert [each["score"] for each in result] == sorted(by_label.values(), reverse=True)
    return [by_label[label] for label in LABELS]


@pytest.mark.parametrize("template", ["This is a sound of {}.", "on entend {} au loin"])
@pytest.mark.parametrize("kind", ["supclap", "sonar", "converted"])
def test_scores_are_those_of_the_model_for_a_clip_a_list_and_batches(tmp_path, kind, template):
    model, processor = builders.save_pair(kind, tmp_path)
    # CLAP's extractor accepts at most 1 s here
    clips = [CLIPS[0], CLIPS[0][:9000]] if kind == "converted" else CLIPS
    expected = [expected_scores(model, processor, clip, template) for clip in clips]
    classify = pipeline(TASK, model=str(tmp_path))
    options = {"candidate_labels": LABELS, "hypothesis_template": template}
    assert scores(classify(clips[0], **options)) == pytest.approx(expected[0], abs=1e-5)
    for batch_size in (1, 2):
        for result, wanted in zip(classify(clips, batch_size=batch_size, **options), expected, strict=True):
            assert scores(result) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("options", [{"caption_prefix": "rain: "}, {"plain_captions": True}])
@pytest.mark.parametrize("from_folder", [True, False])
def test_captions_follow_the_processor(tmp_path, options, from_folder):
    model, plain = builders.pair()
    processor = SupCLAPProcessor(plain.feature_extractor, plain.tokenizer, **options)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    classify = pipeline(TASK, model=str(tmp_path)) if from_folder else pipeline(TASK, model, processor=processor)
    result = classify(CLIPS[0], candidate_labels=LABELS, hypothesis_template="(The {}!)")
    assert scores(result) == pytest.approx(expected_scores(model, processor, CLIPS[0], "(The {}!)"), abs=1e-5)
    assert scores(result) != pytest.approx(expected_scores(model, plain, CLIPS[0], "(The {}!)"), abs=1e-4)


@pytest.mark.parametrize("kind", ["clap", "converted"])
def test_a_long_clip_for_clap_is_the_mean_of_its_chunks_each_time(tmp_path, kind):
    """transformers crops it to a second at random."""
    builders.save_pair(kind, tmp_path)
    model, processor = builders.pair("converted")
    clip = CLIPS[1] * np.linspace(0, 1, len(CLIPS[1]), dtype=np.float32)
    audio, texts = (model.encode_audio([clip], processor, sampling_rate=16000), model.encode_text(LABELS, processor))
    expected = torch.from_numpy(texts @ audio[0]).mul(model.logit_scale.exp()).softmax(dim=0).tolist()
    classify = pipeline(TASK, model=str(tmp_path))
    for _ in range(3):
        result = classify(clip, candidate_labels=LABELS, hypothesis_template="{}")
        assert scores(result) == pytest.approx(expected, abs=1e-5)


def test_long_labels_are_cut_like_any_caption(tmp_path):
    model, processor = builders.save_pair("supclap", tmp_path)
    labels = ["dog " * 500, "rain"]
    result = pipeline(TASK, model=str(tmp_path))(CLIPS[0], candidate_labels=labels, hypothesis_template="{}")
    texts = model.encode_text(labels, processor) @ model.encode_audio(CLIPS[0], processor, sampling_rate=16000)
    assert (result[0]["label"] == "rain") == (texts[1] > texts[0])


def test_rate_language_and_number_of_labels(tmp_path):
    model, processor = builders.save_pair("sonar", tmp_path)
    classify = pipeline(TASK, model=str(tmp_path), hypothesis_template="{}", candidate_labels=LABELS)
    resampled = resample(CLIPS[0], 44_100, 16_000, "sinc_interp_hann")
    languages = ["eng", "eng", "fra"]
    inputs = processor(audio=resampled, sampling_rate=16000, text=LABELS, language=languages, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits_per_audio[0].softmax(dim=0).tolist()
    for audio, options in (
        (CLIPS[0], {"sampling_rate": 44_100}),
        ({"raw": CLIPS[0], "sampling_rate": 44_100}, {}),
        ({"array": CLIPS[0], "sampling_rate": 44_100}, {"sampling_rate": 8000}),
    ):
        given = dict(audio) if isinstance(audio, dict) else audio
        result = classify(given, language=languages, **options)
        assert scores(result) == pytest.approx(expected, abs=1e-5)
        assert classify(audio, language=languages, top_k=2, **options) == result[:2]
    assert scores(classify(CLIPS[0], sampling_rate=44_100)) != pytest.approx(expected, abs=1e-4)
    assert len(classify(CLIPS[0], top_k=5)) == 3
    assert len(classify(CLIPS[0], top_k=np.int64(1))) == 1
    with pytest.raises(ValueError, match="'klingon'"):
        classify(CLIPS[0], language="klingon")


def test_labels_with_commas_between_them(tmp_path):
    builders.save_pair("supclap", tmp_path)
    classify = pipeline(TASK, model=str(tmp_path))
    expected = classify(CLIPS[0], candidate_labels=LABELS)
    for labels in ("dog, rain,pluie,", tuple(LABELS), np.array(LABELS), iter(LABELS)):
        assert classify(CLIPS[0], candidate_labels=labels) == expected
    assert [each["label"] for each in classify(CLIPS[0], candidate_labels="dog")] == ["dog"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "candidate_labels is None"),
        ({"candidate_labels": []}, ValueError, "candidate_labels"),
        ({"candidate_labels": " , "}, ValueError, "candidate_labels"),
        ({"candidate_labels": ["rain", " "]}, ValueError, "label 1.*' '"),
        ({"candidate_labels": ["rain", None]}, ValueError, "label 1.*None"),
        ({"candidate_labels": {"rain": 1}}, ValueError, "'rain'"),
        ({"candidate_labels": 7}, ValueError, "7"),
        ({"candidate_labels": ["rain"], "hypothesis_template": "a sound"}, ValueError, "'a sound'"),
        ({"candidate_labels": ["rain"], "top_k": 0}, ValueError, "top_k is 0"),
        ({"candidate_labels": ["rain"], "topk": 1}, TypeError, "'topk'"),
        ({"candidate_labels": ["rain"], "batch_size": 0}, ValueError, "batch_size is 0"),
        ({"candidate_labels": ["rain"], "sampling_rate": 44.1}, ValueError, "44.1"),
        ({"candidate_labels": ["rain"], "language": ["eng", "fra"]}, ValueError, "language"),
    ],
)
def test_bad_labels_and_options_are_refused(tmp_path_factory, options, error, message, classify):
    with pytest.raises(error, match=message):
        classify(CLIPS[0], **options)


@pytest.fixture(scope="module")
def classify(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    builders.save_supclap(folder)
    return pipeline(TASK, model=str(folder))


def test_unknown_options_of_the_pipeline_are_refused(tmp_path):
    builders.save_supclap(tmp_path)
    with pytest.raises(TypeError, match="'threshold'"):
        pipeline(TASK, model=str(tmp_path), threshold=0.5)
    assert pipeline(TASK, model=str(tmp_path), local_files_only=True) is not None


def test_a_call_can_turn_off_the_threads_and_batches_of_the_pipeline(tmp_path, monkeypatch):
    builders.save_supclap(tmp_path)
    classify = pipeline(TASK, model=str(tmp_path), num_workers=2, batch_size=3)
    used = []

    def embed(*args: Any, **options: Any):
        used.append(options)
        return embed_recordings(*args, **options)

    monkeypatch.setattr(pipeline_supclap, "embed_recordings", embed)
    classify(CLIPS[0], candidate_labels=LABELS)
    classify(CLIPS[0], candidate_labels=LABELS, num_workers=0, batch_size=1)
    pipeline(TASK, model=str(tmp_path))(CLIPS[0], candidate_labels=LABELS)
    assert used == [{"batch_size": size, "num_workers": workers} for size, workers in ((3, 2), (1, 0), (1, 0))]


def test_generators_and_datasets_are_read_as_they_are_needed(classify):
    expected = classify(CLIPS, candidate_labels=LABELS)
    rows = [{"audio": {"array": clip, "sampling_rate": 16000}} for clip in CLIPS]
    for audios in ((clip for clip in CLIPS), KeyDataset(rows, "audio"), iter(CLIPS)):
        results = classify(audios, candidate_labels=LABELS)
        assert not isinstance(results, list)
        for result, each in zip(results, expected, strict=True):
            assert scores(result) == pytest.approx(scores(each), abs=1e-5)


def test_a_model_object_needs_a_processor():
    model, processor = builders.pair("clap")
    with pytest.raises(ValueError, match=r"ClapModel.*processor"):
        pipeline(TASK, model=model)
    parts = pipeline(TASK, model=model, feature_extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
    whole = pipeline(TASK, model=model, processor=processor)
    assert parts(CLIPS[0], candidate_labels=LABELS) == whole(CLIPS[0], candidate_labels=LABELS)


@pytest.mark.parametrize("given", ["path", "bytes"])
def test_a_file(tmp_path, given):
    model, processor = builders.save_pair("supclap", tmp_path)
    path = tmp_path / "noise.wav"
    soundfile.write(path, CLIPS[0], 16000, subtype="FLOAT")
    audio = str(path) if given == "path" else path.read_bytes()
    result = pipeline(TASK, model=str(tmp_path))(audio, candidate_labels=LABELS, hypothesis_template="{}")
    assert scores(result) == pytest.approx(expected_scores(model, processor, CLIPS[0], "{}"), abs=1e-4)


def test_half_precision(tmp_path):
    model, processor = builders.save_pair("supclap", tmp_path)
    classify = pipeline(TASK, model=str(tmp_path), dtype=torch.bfloat16)
    result = classify(CLIPS[0], candidate_labels=LABELS, hypothesis_template="{}")
    assert scores(result) == pytest.approx(expected_scores(model, processor, CLIPS[0], "{}"), abs=0.05)


def test_clap_keeps_its_own_batches(tmp_path):
    """CLAP's spectrograms have equal lengths and no mask; other models may have no spectrograms."""
    builders.save_clap(tmp_path)
    classify = pipeline(TASK, model=str(tmp_path))
    assert type(classify) is ClipPipeline
    alone, together = (classify(CLIPS[:1] * 2, candidate_labels=LABELS, batch_size=size) for size in (1, 2))
    for first, second in zip(alone, together, strict=True):
        assert scores(first) == pytest.approx(scores(second), abs=1e-6)
