"""transformers' zero-shot pipeline on our models: the model's own numbers, also for unequal clips in one batch."""

import builders
import pytest
import torch
from transformers import pipeline

from modeling_supclap.integrations.pipeline import ClipPipeline

CLIPS = [builders.noise(16000, seed=1), builders.noise(200_000, seed=2)]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("text", ["bert", "sonar"])
def test_zero_shot_pipeline_from_a_folder(tmp_path, text, batch_size):
    model = builders.supclap_model(builders.supclap_config(builders.sonar_config() if text == "sonar" else None))
    processor = builders.nllb_processor() if text == "sonar" else builders.bert_processor()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    classify = pipeline("zero-shot-audio-classification", model=str(tmp_path))
    labels = {"candidate_labels": ["dog", "rain", "pluie"], "hypothesis_template": "the {} falls"}
    results = classify(CLIPS, batch_size=batch_size, **labels)
    for clip, result in zip(CLIPS, results, strict=True):
        texts = [f"the {label} falls" for label in ("dog", "rain", "pluie")]
        inputs = processor(audio=clip, sampling_rate=16000, text=texts, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits_per_audio[0].softmax(dim=0)
        scores = {each["label"]: each["score"] for each in result}
        assert [scores[label] for label in ("dog", "rain", "pluie")] == pytest.approx(expected.tolist(), abs=1e-5)
        assert [each["score"] for each in result] == sorted(scores.values(), reverse=True)


def test_clap_keeps_its_own_batches(tmp_path):
    """Whose spectrograms are of one length and have no mask."""
    builders.save_clap(tmp_path)
    classify = pipeline("zero-shot-audio-classification", model=str(tmp_path))
    assert type(classify) is ClipPipeline
    alone, together = (classify(CLIPS[:1] * 2, candidate_labels=["dog", "rain"], batch_size=size) for size in (1, 2))
    for first, second in zip(alone, together, strict=True):
        assert [each["label"] for each in first] == [each["label"] for each in second]
        assert [each["score"] for each in first] == pytest.approx([each["score"] for each in second], abs=1e-6)
