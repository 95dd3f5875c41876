"""Encode clips with an audio encoder of transformers, and pool its output to one vector per clip.

Some encoders need a fixed clip length (Whisper 30 s, AST 10.24 s), others accept any length (wav2vec 2.0, HuBERT,
WavLM, Data2Vec, wav2vec2-BERT, ...).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .pooling import mean_pool, replace_pooled


def run_encoder(
    encoder: Any, features: Tensor, mask: Tensor | None, pooling: str | None = None, **kwargs: Any
) -> BaseModelOutputWithPooling:
    """Encode clips with a transformers audio encoder. The output of a clip does not depend on the others in the batch.

    Clips are grouped by length, and each group is encoded without padding. An attention mask is not enough, because
    padding changes the group norm over time (wav2vec 2.0, HuBERT) and the positional convolutions (Data2Vec).

    Args:
        features: (B, T), (B, T, features), or (B, features, T) if all clips have the same length.
        mask: (B, T), ones followed by zeros. None: no padding.
        pooling: "pooler" or "mean" over frames. None: use the `pooler_output` if there is one, else the mean.

    Returns:
        Output with `pooler_output` (B, D) and `last_hidden_state` (B, N, D). Frames after the end of a shorter clip
        are zero. `hidden_states` and `attentions` are returned only if all clips have the same length.

    Raises:
        ValueError: A clip is shorter than one frame.
    """
    if mask is None or mask.shape[1] != features.shape[1]:
        return _run(encoder, features, mask, pooling, **kwargs)

    lengths = mask.sum(dim=1)
    count_frames = getattr(encoder, "_get_feat_extract_output_lengths", None)
    shortest = lengths.min()
    if count_frames is not None and count_frames(shortest) < 1:
        clip, name = lengths.argmin(), type(encoder).__name__
        raise ValueError(f"clip {clip} has {shortest} values, fewer than one frame of {name}; pass longer clips")

    parts: list[Any] = []
    rows: list[Tensor] = []
    for length in lengths.unique().tolist():
        rows.append((lengths == length).nonzero().flatten())
        parts.append(_run(encoder, features[rows[-1], :length], None, pooling, **kwargs))
    if len(parts) == 1:
        return parts[0]

    # Pad all groups to the same number of frames and restore the order of the clips: (b, n, D) -> (B, N, D)
    order = torch.cat(rows).argsort()
    flat: list[Tensor] = []
    for part in parts:
        flat.extend(part.last_hidden_state)
    hidden = nn.utils.rnn.pad_sequence(flat, batch_first=True)
    return BaseModelOutputWithPooling(
        last_hidden_state=hidden[order], pooler_output=torch.cat([part.pooler_output for part in parts])[order]
    )


def _run(
    encoder: Any, features: Tensor, mask: Tensor | None, pooling: str | None, **kwargs: Any
) -> BaseModelOutputWithPooling:
    """Encode clips of the same input length. If there is a mask, mean pooling ignores padded frames."""
    outputs = encoder(**{encoder.main_input_name: features.to(encoder.dtype)}, return_dict=True, **kwargs)
    pooled = outputs.get("pooler_output")
    if pooling == "mean" or pooled is None:
        hidden = outputs.last_hidden_state
        if mask is not None:
            frames = encoder._get_feat_extract_output_lengths(mask.sum(dim=1)).clamp(min=1)
            mask = torch.arange(hidden.shape[1], device=hidden.device) < frames.unsqueeze(1)
        pooled = mean_pool(hidden, mask)
    return replace_pooled(outputs, pooled)
