"""Average of saved models: mean tensors, a complete folder, and errors that name the model."""

import json
from functools import partial

import builders
import pytest
import torch
from huggingface_hub import ModelCard
from open_clip_folders import write_folder

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts.overlap import trained_sources
from modeling_supclap.recipes.average_models import main
from modeling_supclap.recipes.train_supclap import load_start


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed in range(3):
        builders.save_supclap(folder / f"seed_{seed}", seed=seed)
    for name, sources in SOURCES.items():
        trained_sources.save_trained_sources([{"source": source} for source in sources], folder / name)
    return [folder / f"seed_{seed}" for seed in range(3)]


SOURCES = {"seed_0": ["a", "b"], "seed_1": ["b", "c"]}
"""Recordings that the models have trained on; the third model has no record."""


def average(folders, output, *options):
    main([*map(str, folders), "--output_dir", str(output), *map(str, options)])
    return SupCLAPModel.from_pretrained(output)


@pytest.mark.filterwarnings("ignore:.*has trained on 3")
@pytest.mark.parametrize("weights", [None, (0.25, 0.75), (0.2, 0.3, 0.5), (1.5, -0.5)])
def test_the_tensors_are_the_means_and_the_folder_is_complete(folders, tmp_path, weights, capsys):
    count = len(weights or (0, 0))
    shares = weights or (0.5, 0.5)
    found = average(folders[:count], tmp_path / "soup", *(["--weights", *weights] if weights else []))
    assert capsys.readouterr().out.splitlines()[-1] == f"the average of {count} models is in {tmp_path / 'soup'}"
    states = [SupCLAPModel.from_pretrained(folder).state_dict() for folder in folders[:count]]
    for name, value in found.state_dict().items():
        expected = sum(share * state[name].double() for share, state in zip(shares, states, strict=True))
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(found.text_projection.linear1.weight, states[0]["text_projection.linear1.weight"])

    processor = SupCLAPProcessor.from_pretrained(tmp_path / "soup")
    inputs = processor(audio=[builders.noise(8000)], text=["a dog"], sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        similarity = found.eval()(**inputs).logits_per_audio
    assert similarity.isfinite().all()
    trained = [{"source": source} for source in "abcd"]
    assert trained_sources.refuse_trained_sources(trained, str(tmp_path / "soup"), allow=True) == 3

    card = (tmp_path / "soup" / "README.md").read_text()
    parts = json.loads((tmp_path / "soup" / "provenance.json").read_text())
    assert [part["source"] for part in parts if part["part"] == "whole model"] == [f.name for f in folders[:count]]
    assert all(folder.name in card for folder in folders[:count])
    assert str(folders[0].parent) not in card
    assert ModelCard.load(tmp_path / "soup" / "README.md").data.library_name == "transformers"


def test_models_of_clap_are_averaged(tmp_path):
    for seed in range(2):
        builders.clap_model(seed=seed).save_pretrained(tmp_path / str(seed))
        builders.clap_processor().save_pretrained(tmp_path / str(seed))
    found = average([tmp_path / "0", tmp_path / "1"], tmp_path / "soup")
    scales = [builders.clap_model(seed=seed).audio_projection.linear1.weight for seed in range(2)]
    torch.testing.assert_close(found.audio_projection.linear1.weight, (scales[0] + scales[1]) / 2)


@pytest.mark.parametrize("save", [builders.save_clap, partial(write_folder, name="A")])
def test_a_public_model_is_averaged_with_one_that_was_tuned_from_it(tmp_path, save):
    save(tmp_path / "public")
    model, processor = load_start(str(tmp_path / "public"))
    scale = model.logit_scale.item()
    model.logit_scale.data += 1
    model.save_pretrained(tmp_path / "tuned")
    processor.save_pretrained(tmp_path / "tuned")
    found = average([tmp_path / "public", tmp_path / "tuned"], tmp_path / "between")
    assert found.logit_scale.item() == pytest.approx(scale + 0.5)


def save_other(folder, config=None, processor=None):
    model = builders.supclap_model(config)
    model.save_pretrained(folder)
    (processor or builders.bert_processor()).save_pretrained(folder)
    return folder


def test_other_architectures_and_tokenizers_are_refused_by_name(folders, tmp_path):
    deeper = save_other(tmp_path / "deeper", builders.supclap_config(builders.bert_config(num_hidden_layers=3)))
    with pytest.raises(ValueError, match=r"deeper.*text_config\.num_hidden_layers"):
        average([folders[0], deeper], tmp_path / "soup")

    processor = builders.bert_processor()
    processor.tokenizer.add_tokens(["another"])
    other = save_other(tmp_path / "other", processor=processor)
    with pytest.raises(ValueError, match=r"other.* tokenizer"):
        average([folders[0], other], tmp_path / "soup")

    processor = builders.bert_processor()
    processor.feature_extractor.top_db = 80.0
    other = save_other(tmp_path / "third", processor=processor)
    with pytest.raises(ValueError, match=r"third.*top_db"):
        average([*folders, other], tmp_path / "soup")
    assert not (tmp_path / "soup").exists()


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (1, [], "seed_0"),
        (2, ["--weights", 0.5], r"\[0.5\]"),
        (2, ["--weights", 0.5, 0.6], r"\[0.5, 0.6\]"),
        (2, ["--weights", "nan", 1], r"\[nan, 1.0\]"),
    ],
)
def test_weights_that_do_not_fit_are_shown(folders, tmp_path, count, options, message):
    with pytest.raises(ValueError, match=message):
        average(folders[:count], tmp_path / "soup", *options)


def test_a_folder_with_files_is_not_written_over(folders):
    with pytest.raises(ValueError, match="seed_2"):
        average(folders[:2], folders[2])
