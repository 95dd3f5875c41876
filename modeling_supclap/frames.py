"""Count the frames of spectrograms in a padded batch, for audio encoders with a padding mask."""

import torch
from torch import Tensor


def count_frames(features: Tensor, mask: Tensor | None, n_mels: int, min_frames: int, is_training: bool) -> Tensor:
    """Count the frames of each clip, (B,).

    Args:
        features: Spectrograms (B, n_mels, T).
        mask: (B, T), ones for the frames of a clip, followed by zeros for padding. None: no padding.
        min_frames: Minimum number of frames of a clip.
        is_training: Whether the model trains. If so, the values of the mask are not checked.

    Raises:
        ValueError: A shape is wrong, the mask is not ones followed by zeros, or a clip is shorter than `min_frames`.
    """
    if features.ndim != 3 or features.shape[1] != n_mels:
        raise ValueError(f"input_features must be (batch, {n_mels} mel bands, frames), got {tuple(features.shape)}")
    # Compare `shape`, not `len()`, because `torch.export` treats `len()` as a constant.
    expected = (features.shape[0], features.shape[2])
    if mask is not None and mask.shape != expected:
        raise ValueError(f"audio_attention_mask must have the shape {expected}, got {tuple(mask.shape)}")

    # A traced graph (torch.compile, torch.export) has no values to check. In training, reading them would wait for
    # the GPU at each step, and the masks of the feature extractor are always valid.
    is_unchecked = torch.compiler.is_compiling() or is_training
    if mask is None:
        shortest = features.shape[2]
        n_frames = torch.full((features.shape[0],), shortest, device=features.device)
    else:
        if not is_unchecked and (mask[:, 1:] > mask[:, :-1]).any():
            raise ValueError("audio_attention_mask must be ones followed by zeros; pad clips on the right")
        n_frames = mask.sum(dim=1)
        shortest = min_frames if is_unchecked else int(n_frames.min())
    if shortest < min_frames:
        clip = int(n_frames.argmin())
        raise ValueError(f"clip {clip} has {shortest} frames; pass clips of at least {min_frames} frames")
    return n_frames
