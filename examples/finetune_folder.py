"""Fine-tune a model on a folder of recordings with a table of captions: python examples/finetune_folder.py FOLDER."""

import sys

from modeling_supclap import SupCLAPModel, SupCLAPProcessor, SupCLAPTrainer, SupCLAPTrainingArguments
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.training.lora import train_last_layers

if __name__ == "__main__":
    folder, start, output = (*sys.argv[1:], "my_sounds", "outputs/synthetic", "outputs/tuned")[:3]
    splits = load_splits("audio_folder", data_dir=folder, languages=["eng"])
    model, processor = SupCLAPModel.from_pretrained(start), SupCLAPProcessor.from_pretrained(start)
    train_last_layers(model, audio_layers=1, text_layers=1)
    args = SupCLAPTrainingArguments(output, svr="bi-static", num_train_epochs=3, per_device_train_batch_size=4)
    trainer = SupCLAPTrainer(model, args, splits["train"], splits["validation"], processor)
    trainer.train()
    trainer.save_model()
    print(SupCLAPModel.from_pretrained(output).encode_text("a dog barks").shape)
