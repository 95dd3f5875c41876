"""Convert public checkpoints to our models, and transformers' `ClapModel` to `SupCLAPModel` and back.

Every conversion renames tensors to our names and then calls `fill_exactly`, which raises on missing, unexpected and
reshaped tensors. A model of several parts is loaded whole and then split, because `ClapAudioModel.from_pretrained` on a
whole CLAP checkpoint finds none of its weights and only warns.
"""

from .clap import clap_from_supclap, load_clap, processor_from_clap, supclap_from_clap
from .files import Checkpoint, read_checkpoint
from .layouts import Conversion, convert_checkpoint, recognise
from .saving import save_conversion
from .tensors import fill_exactly

__all__ = [
    "Checkpoint",
    "Conversion",
    "clap_from_supclap",
    "convert_checkpoint",
    "fill_exactly",
    "load_clap",
    "processor_from_clap",
    "read_checkpoint",
    "recognise",
    "save_conversion",
    "supclap_from_clap",
]
