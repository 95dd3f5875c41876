"""What a radius does to the drift cosine at the same embeddings, those that a run has left of its test split.

    python benchmarks/drift_at_radius.py outputs/reproduce/mini/runs/table1_infonce-train-synthetic-*-seed0

By the share R/d of the way from a text to its clip: the drift cosine of the text-to-audio half with the term of the
support vectors, `dot` and `cosine`, beside InfoNCE's alone; and the norm of the term's gradient with respect to the
texts in units of InfoNCE's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from modeling_supclap.evaluation import Results
from modeling_supclap.losses import support_vector_loss
from modeling_supclap.losses.support_vector import positive_distance
from modeling_supclap.training.drift import drift_statistics

SCALE = 1 / 0.07


def load_pairs(folder: Path, clips: int) -> tuple[Tensor, Tensor]:
    """Clips of different captions and their captions: (N, d) each."""
    arrays = Results.load(folder).arrays
    owners = arrays["embeddings/text_clip/eng"][:clips]  # each text once, with the first clip that it belongs to
    places = np.searchsorted(arrays["embeddings/audio_clip"], owners)
    audio, text = arrays["embeddings/audio"][places], arrays["embeddings/text/eng"][: len(owners)]
    return torch.from_numpy(audio), torch.from_numpy(text)


def gradient_norm(
    text: Tensor, audio: Tensor, radius: Tensor | None, similarity: Literal["cosine", "dot"] = "cosine"
) -> Tensor:
    """The mean norm of the gradient of each text's own loss: InfoNCE's half, or the term with a radius."""
    text = text.clone().requires_grad_()
    if radius is None:
        logits = SCALE * text @ audio.T
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(text)), reduction="sum")
    else:
        loss = len(text) * support_vector_loss(text, audio, radius, SCALE, similarity=similarity)
    return torch.autograd.grad(loss, text)[0].norm(dim=-1).mean()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="The folder of a training run, with outcomes.npz.")
    parser.add_argument("--clips", type=int, default=48)
    args = parser.parse_args()

    audio, text = load_pairs(args.run, args.clips)
    distance = positive_distance(text, audio)
    plain, base = drift_statistics(audio, text, SCALE)["drift_cosine"], gradient_norm(text, audio, None)
    print("| R/d | InfoNCE | with SVR, `dot` | with SVR, `cosine` | size of SVR's gradient, dot / cosine |")
    print("|---|---|---|---|---|")
    for share in (0.25, 0.5, 0.75, 1.0):
        cosines, sizes = [], []
        for similarity in ("dot", "cosine"):
            radius = share * distance
            found = drift_statistics(audio, text, SCALE, radius, similarity=similarity)
            cosines.append(found["drift_cosine_svr"].item())
            sizes.append((gradient_norm(text, audio, radius, similarity) / base).item())
        print(f"| {share:g} | {plain:.3f} | {cosines[0]:.3f} | {cosines[1]:.3f} | {sizes[0]:.2f} / {sizes[1]:.2f} |")


if __name__ == "__main__":
    main()
