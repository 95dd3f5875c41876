"""A GPU has the results of the CPU: spectrograms, embeddings, losses, and bf16 training with cached gradients."""

import copy
import warnings

import builders
import pytest
import torch
from recordings import tone_rows
from test_contrastive_module import unequal_batch

from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,  # CUDA's libraries start `ldconfig` when they are loaded
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Runs of other tests enable TF32, and values are compared with those of the CPU."""
    monkeypatch.setattr(torch.backends, "fp32_precision", "ieee")


def test_embeddings_agree_with_the_cpu(model, processor):
    clips = [builders.noise(8000), builders.noise(200_000, seed=1)]
    inputs = processor(audio=clips, sampling_rate=16000, text=["a dog", "the rain falls"], return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs)
        found = copy.deepcopy(model).cuda()(**inputs.to("cuda"))
    torch.testing.assert_close(found.audio_embeds.cpu(), expected.audio_embeds, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.text_embeds.cpu(), expected.text_embeds, atol=1e-4, rtol=0)


def test_spectrograms_agree_with_the_cpu(processor):
    clips = [builders.noise(8000), builders.noise(200_000, seed=1)]
    samples, counts = torch.zeros(2, 200_000), torch.tensor([8000, 200_000])
    for row, clip in zip(samples, clips, strict=True):
        row[: len(clip)] = torch.from_numpy(clip)
    found = processor.feature_extractor.on_device(samples.cuda(), counts.cuda())
    for name, expected in processor(audio=clips, sampling_rate=16000, return_tensors="pt").items():
        torch.testing.assert_close(found[name].cpu(), expected, atol=1e-2, rtol=0)


LOSSES = [{"loss": "infonce"}, {"loss": "siglip"}, {"loss": "kcl"}, {"loss": "cacl"}, {"svr": "bi-dynamic"}]
TILES = [{}, {"loss_chunk_size": 3}]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_objectives_agree_with_the_cpu(tmp_path, loss, tiles):
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), languages=["eng", "fra"], tf32=False, **loss, **tiles)
    texts = 2 if args.loss in ("kcl", "cacl") else 1
    for count in (12, 300):
        torch.manual_seed(count)
        audio = torch.nn.functional.normalize(torch.randn(count, 32), dim=-1)
        text = torch.nn.functional.normalize(torch.randn(count, texts, 32), dim=-1)
        objective = build_objective(args)
        results = []
        for device in ("cpu", "cuda"):
            moved = copy.deepcopy(objective).to(device)
            inputs = [tensor.detach().to(device).requires_grad_() for tensor in (audio, text)]
            groups = (torch.arange(count) // 2).to(device)
            scale, bias = torch.tensor(14.0, device=device), torch.tensor(-10.0, device=device)
            loss_value, logs = moved(*inputs, logit_scale=scale, logit_bias=bias, group_ids=groups)
            loss_value.backward()
            results.append([loss_value, *logs.values(), *(tensor.grad for tensor in inputs)])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("frames", [300, 2500])
def test_a_step_waits_for_the_gpu_at_most_twice(model, processor, tmp_path, frames):
    args, rows = SupCLAPTrainingArguments(str(tmp_path), report_to="none"), tone_rows(tmp_path, count=24)
    trainer = SupCLAPTrainer(model, args, rows, rows, processor)
    trainer.model.train()
    batch = {**unequal_batch(frames=frames), "clip_index": torch.arange(24)}
    batch = {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in batch.items()}

    def run_step():
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)).backward()

    run_step()  # the first step sets the radii
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing CUDA" in str(warning.message)]
    assert 1 <= len(waits) <= 2  # whether texts and clips are padded


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"bf16": True, "features_on_device": True}])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_it_learns(tmp_path, precision, chunk_size):
    quiet = {"disable_tqdm": True, "report_to": "none", "eval_strategy": "no", "save_strategy": "no"}
    options = {"svr": "bi-dynamic", "per_device_train_batch_size": 4, "learning_rate": 3e-3, "num_train_epochs": 60}
    args = SupCLAPTrainingArguments(
        output_dir=str(tmp_path),
        load_best_model_at_end=False,
        cached_chunk_size=chunk_size,
        **quiet,
        **options,
        **precision,
    )
    rows = tone_rows(tmp_path, count=12)
    trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, rows, builders.bert_processor())
    before = trainer.evaluate()["eval_mean_recall"]
    trainer.train()
    assert trainer.evaluate()["eval_mean_recall"] > before + 0.1
