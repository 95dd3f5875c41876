"""Every converted public CLAP can be evaluated, trained, saved and loaded like any other model."""

import builders
import published_layouts as published
import pytest
import torch
from processes import run_python
from recordings import tone_rows
from test_conversion_layouts import checkpoint

from modeling_supclap import SupCLAPModel, SupCLAPProcessor, SupCLAPTrainer, evaluation
from modeling_supclap.conversion import convert_checkpoint, save_conversion
from modeling_supclap.training.lora import add_lora, merge_lora, train_last_layers


def laion() -> dict[str, torch.Tensor]:
    return published.laion(published.laion_model(), published.slaney_filters(48_000))


PUBLIC = {
    "ML-CLAP": (published.small_ml_clap, builders.nllb_tokenizer),
    "GLAP": (published.small_glap, builders.nllb_tokenizer),
    "LAION-CLAP": (laion, lambda: builders.clap_processor().tokenizer),
    "MS-CLAP 2022": (lambda: published.small_msclap(2022), builders.bert_tokenizer),
    "MS-CLAP 2023": (lambda: published.small_msclap(2023), builders.gpt2_tokenizer),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_it_is_evaluated_and_trained(tmp_path, name):
    tensors, tokenizer = PUBLIC[name]
    folder = str(tmp_path / "converted")
    save_conversion(convert_checkpoint(checkpoint(tensors())), folder, tokenizer())
    rows = tone_rows(tmp_path, count=4)
    results = evaluation.evaluate(evaluation.load_embedding_model(folder), rows, languages=["eng"])
    assert results.table()

    model, processor = SupCLAPModel.from_pretrained(folder), SupCLAPProcessor.from_pretrained(folder)
    train_last_layers(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    args = builders.training_args(tmp_path / "run", max_steps=2, learning_rate=1e-3)
    SupCLAPTrainer(model, args, train_dataset=rows, processing_class=processor).train()
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == trained

    model.save_pretrained(tmp_path / "again")
    again = SupCLAPModel.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)


READER = """
import sys
sys.modules["modeling_supclap"] = None  # as where the package is not installed
import torch
from transformers import AutoModel, AutoProcessor

for folder in sys.argv[1:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    clip, text = torch.load("call.pt")
    with torch.no_grad():
        outputs = model(**processor(audio=clip.numpy(), sampling_rate=44100, text=text, return_tensors="pt"))
    torch.save(outputs.logits_per_audio, folder + ".pt")
"""


@pytest.mark.slow
@pytest.mark.process
@torch.no_grad()
def test_msclap_loads_where_the_package_is_missing(tmp_path):
    clip, text = torch.from_numpy(builders.noise(44_100)), ["a dog barks"]
    torch.save((clip, text), tmp_path / "call.pt")
    for year in ("2022", "2023"):
        tensors, tokenizer = PUBLIC[f"MS-CLAP {year}"]
        save_conversion(convert_checkpoint(checkpoint(tensors())), tmp_path / year, tokenizer())
    folders = [str(tmp_path / year) for year in ("2022", "2023")]
    run_python("-I", "-c", READER, *folders, cwd=tmp_path, HF_HOME=str(tmp_path / "cache"))

    for folder in folders:
        model, processor = SupCLAPModel.from_pretrained(folder), SupCLAPProcessor.from_pretrained(folder)
        inputs = processor(audio=clip.numpy(), sampling_rate=44_100, text=text, return_tensors="pt")
        torch.testing.assert_close(torch.load(f"{folder}.pt"), model(**inputs).logits_per_audio)


@torch.no_grad()
def test_adapters_of_gpt2_merge_into_it():
    model = convert_checkpoint(checkpoint(published.small_msclap(2023))).model
    stock = set(model.state_dict())
    add_lora(model, rank=2)
    adapted = []
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(std=0.2)
            adapted.append(name)
    assert any("text_model.h.0.attn.c_attn" in name for name in adapted)

    ids = torch.tensor([[5, 6, 7, 8]])
    before = model.get_text_features(ids).pooler_output
    merged = merge_lora(model)
    assert set(merged.state_dict()) == stock
    torch.testing.assert_close(merged.get_text_features(ids).pooler_output, before, atol=1e-5, rtol=0)


def test_a_tower_without_attention_cannot_be_adapted():
    model = convert_checkpoint(checkpoint(published.small_msclap(2022))).model
    with pytest.raises(ValueError, match="audio_model"):
        add_lora(model)
    assert add_lora(model, audio_layers=0) is model
