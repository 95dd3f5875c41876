"""Convert ML-CLAP (Yan et al., 2024, arXiv 2406.07012) and GLAP (Dinkel et al., 2025, arXiv 2506.11350).

Both models consist of an audio encoder (CED in ML-CLAP, Dasheng in GLAP), the text encoder SONAR, and two projections.
Their checkpoints use the same tensor names.
"""

from __future__ import annotations

import torch

from ..configuration_supclap import SupCLAPConfig
from ..modeling_supclap import SupCLAPModel
from .ced import ced_from_tensors
from .sonar import sonar_from_tensors
from .tensors import Tensors, under

AUDIO = "audio_encoder.model."
TEXT = "text_encoder.model."
# Each projection is a sequence of Linear (0), ReLU (1) and Linear (2).
NAMES = (
    (r"^(audio|text)_proj\.0\.", r"\1_projection.linear1."),
    (r"^(audio|text)_proj\.2\.", r"\1_projection.linear2."),
)
# GLAP's files contain no temperature, because it belongs to the loss. The authors' scores are 100 * cosine.
GLAP_TEMPERATURE = 0.01


def supclap_from_ml_clap(tensors: Tensors, temperature: float | None = None) -> SupCLAPModel:
    """Build a `SupCLAPModel` from the tensors of an ML-CLAP file (557 tensors) or a GLAP file.

    Args:
        temperature: Temperature of the model (logits are cosine / temperature). None: read it from the file.

    Returns:
        The model (float32, evaluation mode).
    """
    audio = ced_from_tensors(tensors.below(AUDIO, f"the audio encoder of {tensors.origin}"))
    text = sonar_from_tensors(tensors.below(TEXT, f"the text encoder of {tensors.origin}"))
    rest = tensors.without(AUDIO, TEXT)
    if temperature is None:
        temperature = float(rest["temperature"])
        del rest["temperature"]

    config = SupCLAPConfig(
        audio_config=audio.config,
        text_config=text.config,
        projection_dim=rest["audio_proj.0.weight"].shape[0],
        temperature=temperature,
    )

    # The towers already have their weights; the remaining tensors must be exactly the projections and the scale.
    joint = rest.rename(NAMES)
    joint["logit_scale"] = -torch.tensor([temperature], dtype=torch.float64).log()
    joint |= under("audio_model.", audio.state_dict()) | under("text_model.", text.state_dict())
    return joint.build(SupCLAPModel, config, audio, text)
