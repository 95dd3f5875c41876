"""The method on one page: two encoders, InfoNCE, Support Vector Regularization (SVR), and a loop without the Trainer.

    python examples/train_without_trainer.py            # generated sounds, about two minutes on two cores
    python examples/train_without_trainer.py --steps 5

Contrastive learning pulls a clip and its caption together and pushes all other clips of the batch away. The push also
has a perpendicular component, which moves the caption off the straight line to its clip. SVR adds a second loss: each
caption is displaced by a radius R toward its clip, and this support vector is contrasted with all clips. In the second
loss the perpendicular component is smaller.
"""

import argparse

import torch

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.losses import StaticRadius, info_nce, support_vector_loss
from modeling_supclap.recipes.train_supclap import ModelArguments, build_processor

RATE_HZ = CEDFeatureExtractor().sampling_rate


def make_batch(rows, processor):
    """Convert rows to the inputs of the model: log-mel spectrograms and token ids."""
    clips = [read_row(row, RATE_HZ) for row in rows]
    captions = [row["captions"]["eng"][0] for row in rows]
    return processor(audio=clips, text=captions, sampling_rate=RATE_HZ, return_tensors="pt")


def main() -> None:
    """Train, and print the recall at 1 from audio to text on the test split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)

    # Data: rows with a clip and its captions by language. A byte-level BPE is trained on the captions.
    splits = load_splits("synthetic", num_train=512, num_validation=64, num_test=64)
    processor = build_processor(ModelArguments(), splits["train"], ["eng"])

    # Model: a small CED and a small BERT, both from random weights, in one space of 64 dimensions.
    text = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"intermediate_size": 128, "vocab_size": len(processor.tokenizer)}
    audio = CEDConfig(embed_dim=64, depth=2, num_heads=2)
    model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=64))

    # The radius is trained with the model; inference does not need it.
    radius = StaticRadius(0.1)
    optimizer = torch.optim.AdamW([*model.parameters(), *radius.parameters()], lr=1e-3)

    model.train()
    order = torch.utils.data.DataLoader(range(len(splits["train"])), args.batch_size, shuffle=True, drop_last=True)
    step = 0
    while step < args.steps:
        for indices in order:
            inputs = make_batch(splits["train"].select(indices.tolist()), processor)
            outputs = model(**inputs)
            audio_embeds, text_embeds = outputs.audio_embeds, outputs.text_embeds  # (N, d) each, of unit norm
            scale = model.logit_scale.exp()

            # Text to audio: each caption, displaced by R toward its clip, against all clips of the batch.
            similarity = scale * text_embeds @ audio_embeds.T  # (N, N)
            loss = info_nce(audio_embeds, text_embeds, scale)
            loss = loss + support_vector_loss(text_embeds, audio_embeds, radius(similarity), scale)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == args.steps:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break

    model.eval()
    with torch.no_grad():
        outputs = model(**make_batch(splits["test"], processor))
    hits = outputs.logits_per_audio.argmax(dim=1) == torch.arange(len(splits["test"]))
    print(f"R@1 {hits.float().mean():.3f} of {len(hits)} clips, chance {1 / len(hits):.3f}")


if __name__ == "__main__":
    main()
