"""ML-CLAP (Yan et al., 2024, arXiv 2406.07012) and GLAP (Dinkel et al., 2025, arXiv 2506.11350) to `SupCLAPModel`.

Their files have the same names: an audio encoder, which is CED or Dasheng, SONAR, and two projections.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..configuration_supclap import SupCLAPConfig
from ..modeling_supclap import SupCLAPModel
from .ced import ced_from_tensors
from .sonar import sonar_from_tensors
from .tensors import Tensors, under

AUDIO = "audio_encoder.model."
TEXT = "text_encoder.model."
# Their projections are Linear, ReLU, Linear in a row.
NAMES = (
    (r"^(audio|text)_proj\.0\.", r"\1_projection.linear1."),
    (r"^(audio|text)_proj\.2\.", r"\1_projection.linear2."),
)
# GLAP's temperature belongs to its loss and is not in its files; its authors score by 100 cosine.
GLAP_TEMPERATURE = 0.01


def supclap_from_ml_clap(
    tensors: Mapping[str, torch.Tensor], origin: str, temperature: float | None = None
) -> tuple[SupCLAPModel, dict[str, int]]:
    """The model in a file of ML-CLAP (557 tensors) or of GLAP: logits are cosine / temperature.

    Args:
        tensors: All of the file's.
        origin: What they come from, for the message of an error.
        temperature: What is not in the file, for GLAP; None reads it there.

    Returns:
        The model in float32, in evaluation mode, and how many tensors it has no place for, by what they were.

    Raises:
        ValueError: The file is of another layout, or its temperature is not positive.
    """
    whole = Tensors(tensors, origin)
    audio, aside = ced_from_tensors(whole.below(AUDIO), f"{origin}, its audio encoder")
    text, _ = sonar_from_tensors(whole.below(TEXT), f"{origin}, its text encoder")
    rest = whole.without(AUDIO, TEXT)
    if temperature is None:
        stated = rest.pop("temperature", None)
        if stated is None or stated.numel() != 1 or not 0 < float(stated) < float("inf"):
            raise ValueError(f"{origin} must have a 'temperature' of one positive number, has {stated}")
        temperature = float(stated)

    config = SupCLAPConfig(
        audio_config=audio.config,
        text_config=text.config,
        projection_dim=rest.get_shape("audio_proj.0.weight", 2)[0],
        temperature=temperature,
    )

    # The towers are filled already; what is left must be exactly what joins them.
    joint = rest.rename(NAMES)
    joint["logit_scale"] = -torch.tensor([temperature], dtype=torch.float64).log()
    joint |= under("audio_model.", audio.state_dict()) | under("text_model.", text.state_dict())
    return joint.build(SupCLAPModel, config, audio, text), aside
