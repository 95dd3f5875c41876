"""Convert public checkpoints to our models, and transformers' `ClapModel` to `SupCLAPModel` and back.

Every conversion renames the tensors to our names and then calls `fill_exactly`, which raises if tensors are missing,
unexpected or differ in shape.
"""

from .clap import clap_from_supclap, load_clap, processor_from_clap, save_clap, supclap_from_clap
from .files import Checkpoint, read_checkpoint
from .kinds import find_kind, load_model, load_processor
from .layouts import Conversion, convert_checkpoint, recognise
from .open_clip import load_open_clip, load_open_clip_processor, save_open_clip
from .saving import save_conversion
from .tensors import fill_exactly

__all__ = [
    "Checkpoint",
    "Conversion",
    "clap_from_supclap",
    "convert_checkpoint",
    "fill_exactly",
    "find_kind",
    "load_clap",
    "load_model",
    "load_open_clip",
    "load_open_clip_processor",
    "load_processor",
    "processor_from_clap",
    "read_checkpoint",
    "recognise",
    "save_clap",
    "save_conversion",
    "save_open_clip",
    "supclap_from_clap",
]
