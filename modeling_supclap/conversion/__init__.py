"""Public checkpoints to models of ours, and transformers' CLAP to ours and back.

Every conversion renames tensors into the names of a model of ours and then fills that model by `fill_exactly`, which
accepts neither a missing nor a left-over tensor, nor one of another shape. A model of several parts is loaded whole and
then taken apart: `ClapAudioModel.from_pretrained` on a whole CLAP finds none of its weights, and only warns.
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
