"""The zero-shot pipeline of transformers: scores equal those of the model, even for clips of unequal length."""

from typing import Any

import builders
import numpy as np
import pytest
import soundfile
import torch
from transformers import pipeline

from modeling_supclap.pipeline_supclap import ClipPipeline

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
    clips = [CLIPS[0], CLIPS[0][:9000]] if kind == "converted" else CLIPS  # CLAP's extractor accepts at most 1 s here
    expected = [expected_scores(model, processor, clip, template) for clip in clips]
    classify = pipeline(TASK, model=str(tmp_path))
    options = {"candidate_labels": LABELS, "hypothesis_template": template}
    assert scores(classify(clips[0], **options)) == pytest.approx(expected[0], abs=1e-5)
    for batch_size in (1, 2):
        for result, wanted in zip(classify(clips, batch_size=batch_size, **options), expected, strict=True):
            assert scores(result) == pytest.approx(wanted, abs=1e-5)


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
