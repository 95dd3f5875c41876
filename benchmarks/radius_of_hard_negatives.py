"""How a predicted radius depends on hard negatives that its predictor has met in training, or has not [SupCLAP fig. 7].

    python benchmarks/radius_of_hard_negatives.py outputs/reproduce/mini/runs/RUN/checkpoint-420

RUN is one that `supclap reproduce supclap/figure7` leaves; its embeddings stay as they are. By the number of hard
negatives among 23: the mean radius from the run's own predictor, and from two that are trained here on the embeddings
of the training split, one on batches at random, one on batches with 0, 6, 12 and 18 hard negatives in turn. Then the
run's own predictor on batches of the validation split at random, by how many of a text's 18 hardest clips are in them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.losses import DynamicRadius
from modeling_supclap.losses.support_vector import displacement, positive_distance
from modeling_supclap.training.drift import radius_by_hard_negatives

COUNTS = (0, 1, 2, 3, 6, 12, 18)
BATCH = 24
OWN = "objective.regularizer.radii.t2a."
BETA = 0.01


def embed(model: SupCLAPModel, rows: list[dict]) -> tuple[Tensor, Tensor, Tensor]:
    """Clips and their first English captions, (N, d) each, and the number of each clip's caption, (N,)."""
    texts = [row["captions"]["eng"][0] for row in rows]
    audio, text = model.encode_audio([row["audio_path"] for row in rows]), model.encode_text(texts)
    _, groups = np.unique(texts, return_inverse=True)
    return torch.from_numpy(audio), torch.from_numpy(text), torch.from_numpy(groups)


def train_predictor(pairs: tuple[Tensor, Tensor, Tensor], scale: float, counts: tuple[int, ...]) -> DynamicRadius:
    """A new predictor, trained with the term and its constraint on batches with so many hard negatives in turn."""
    audio, text, groups = pairs
    hardest = (text @ audio.T).masked_fill(groups[:, None] == groups, -2).argsort(dim=1, descending=True)
    fewest = len(audio) - int(groups.bincount().max())

    radius = DynamicRadius(BATCH, init=positive_distance(text, audio).mean().item())
    optimizer = torch.optim.Adam(radius.parameters(), lr=1e-3)
    for step in range(3000):
        count = counts[step % len(counts)]
        own = torch.randint(len(text), (BATCH,))
        draws = [count + torch.randperm(fewest - count)[: BATCH - 1 - count].sort().values for _ in range(BATCH)]
        ranks = torch.cat([torch.arange(count).expand(BATCH, -1), torch.stack(draws)], dim=1)
        clips = audio[torch.cat([own[:, None], hardest[own].gather(1, ranks)], dim=1)]  # (B, B, d), a text's own first

        radii = radius.layers(scale * torch.einsum("bd,bnd->bn", text[own], clips)).squeeze(-1)
        distance = positive_distance(text[own], audio[own])
        near, far = displacement(distance, radii)
        support = near[:, None] * text[own] + far[:, None] * audio[own]
        logits = scale * torch.einsum("bd,bnd->bn", support, clips)
        beyond = torch.relu(radii - distance) + torch.relu(-radii)
        loss = torch.nn.functional.cross_entropy(logits, own.new_zeros(BATCH)) + BETA * beyond.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return radius


def by_met_negatives(
    radius: DynamicRadius, pairs: tuple[Tensor, Tensor, Tensor], scale: float
) -> dict[int, list[float]]:
    """The radii of texts in 300 batches at random, by how many of a text's 18 hardest clips are in its batch."""
    audio, text, groups = pairs
    cosines = text @ audio.T
    least = cosines.masked_fill(groups[:, None] == groups, -2).topk(18, dim=1).values[:, -1]

    found = defaultdict(list)
    for _ in range(300):
        batch = torch.randperm(len(audio))[:BATCH]
        own = groups[batch][:, None] == groups[batch]
        met = ((cosines[batch][:, batch] >= least[batch][:, None]) & ~own).sum(dim=1)
        radii = radius(scale * cosines[batch][:, batch], groups[batch])
        for number, value in zip(met.tolist(), radii.tolist(), strict=True):
            found[number].append(value)
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="A checkpoint of the run, which holds the predictor.")
    folder = parser.parse_args().checkpoint
    torch.manual_seed(0)

    model = SupCLAPModel.from_pretrained(folder)
    scale = model.logit_scale.exp().item()
    weights = load_file(folder / "model.safetensors")
    own = DynamicRadius(BATCH)
    own.load_state_dict({name.removeprefix(OWN): value for name, value in weights.items() if name.startswith(OWN)})

    splits = load_splits("synthetic", num_train=1024, num_validation=720, num_test=256, duration_seconds=1.0)
    train, validation = (embed(model, list(without_audio(splits[name]))) for name in ("train", "validation"))
    predictors = {
        "of the run": own,
        "trained at random": train_predictor(train, scale, (0,)),
        "trained on hard negatives": train_predictor(train, scale, (0, 6, 12, 18)),
    }

    print(f"| predictor | {' | '.join(map(str, COUNTS))} |\n|{'---|' * (len(COUNTS) + 1)}")
    with torch.no_grad():
        for name, radius in predictors.items():
            audio, text, groups = validation
            radii = radius_by_hard_negatives(radius, audio, text, scale, groups, counts=COUNTS).values()
            print(f"| {name} | {' | '.join(f'{value.item():.2f}' for value in radii)} |")
        for number, values in sorted(by_met_negatives(own, validation, scale).items()):
            print(f"at random, {number} of the 18 hardest met: radius {np.mean(values):.3f} of {len(values)} texts")


if __name__ == "__main__":
    main()
