"""What a GPU must do like the CPU: embed, and train in bf16 with cached gradients."""

import copy

import builders
import pytest
import torch
from recordings import tone_rows

from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def test_embeddings_agree_with_the_cpu(model, processor):
    clips = [builders.noise(8000), builders.noise(200_000, seed=1)]
    inputs = processor(audio=clips, sampling_rate=16000, text=["a dog", "the rain falls"], return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs)
        found = copy.deepcopy(model).cuda()(**inputs.to("cuda"))
    torch.testing.assert_close(found.audio_embeds.cpu(), expected.audio_embeds, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.text_embeds.cpu(), expected.text_embeds, atol=1e-4, rtol=0)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
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
