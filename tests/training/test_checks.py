"""What a trainer refuses before it reads a recording or changes the model."""

from pathlib import Path

import builders
import pytest
from datasets import Dataset
from test_trainer import arguments, build, processor

from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


def train_on(rows, evaluation=None, front_end=None, **options):
    """Return a function from a folder to a trainer."""
    return lambda folder: SupCLAPTrainer(
        builders.supclap_model(), arguments(folder, **options), rows, evaluation, front_end or processor()
    )


STREAM = Dataset.from_list([{"clip_id": "a"}]).to_iterable_dataset()
MISSING = [{"clip_id": str(number), "audio_path": "missing.wav", "captions": {"eng": ["a"]}} for number in range(9)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: SupCLAPTrainer(builders.supclap_model(), arguments(folder)), "processing_class"),
        (
            train_on(MISSING, front_end=builders.pair("whisper")[1], features_on_device=True, on_bad_audio="skip"),
            "features_on_device.*WhisperFeatureExtractor",
        ),
        (train_on(MISSING, loss="siglip", on_bad_audio="skip"), "siglip.*--logit_bias"),
        (
            train_on(MISSING, {"few": MISSING}, on_bad_audio="skip"),
            "metric_for_best_model is 'mean_recall'.*'few_mean_recall'",
        ),
        (train_on(STREAM), "IterableDataset"),
        (train_on(MISSING, {"few": STREAM}), "IterableDataset"),
    ],
)
def test_invalid_combinations_are_rejected_before_the_recordings_are_read(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "run")
    assert not Path(tmp_path, "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives_per_clip": 1}, "negatives_per_clip.*supclap mine"),
        ({"matryoshka_widths": [8, 4096]}, r"matryoshka_widths has \[4096\].*below"),
    ],
)
@pytest.mark.parametrize("rows", [MISSING, Dataset.from_list(MISSING)])
def test_negatives_and_widths_that_do_not_exist_are_refused(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=message):
        train_on(rows, **options)(tmp_path)


def test_batches_of_one_process_for_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dispatch_batches"):
        train_on(MISSING, accelerator_config={"dispatch_batches": True})(tmp_path)


def test_fsdp_refuses_language_errors(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(SupCLAPTrainingArguments, "sharding", "fsdp")
    with pytest.raises(ValueError, match="track_language_errors"):
        build(tmp_path, rows, languages=["eng", "fra"], track_language_errors=True)
