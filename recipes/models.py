"""What a training recipe starts from, and which part of it trains."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import ClapConfig, ClapProcessor, PreTrainedConfig

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import load_clap, processor_from_clap, supclap_from_clap
from modeling_supclap.training.lora import add_lora, merge_lora, train_last_layers, trainable_table

from .running import say


@dataclass
class TrainedPartArguments:
    """Which part of a model trains: all of it, or the last blocks, or adapters in them; always with the projections."""

    train_last_layers: int | None = field(
        default=None, metadata={"help": "Train only so many last blocks of each encoder."}
    )
    audio_layers: int | None = field(default=None, metadata={"help": "Another number of the audio encoder's blocks."})
    text_layers: int | None = field(default=None, metadata={"help": "Another number of the text encoder's blocks."})
    lora_rank: int | None = field(
        default=None, metadata={"help": "Train adapters of this rank in the last blocks, in place of the blocks."}
    )

    train_temperature: bool = field(
        default=True, metadata={"help": "Whether the temperature, and SigLIP's bias, train or stay as they start."}
    )

    def choose_parameters(self, model: SupCLAPModel) -> None:
        """Freezes what does not train, and adds the adapters."""
        last = 1 if self.train_last_layers is None else self.train_last_layers
        audio_layers = last if self.audio_layers is None else self.audio_layers
        text_layers = last if self.text_layers is None else self.text_layers

        if self.lora_rank is not None:
            add_lora(model, rank=self.lora_rank, audio_layers=audio_layers, text_layers=text_layers)
        elif (self.train_last_layers, self.audio_layers, self.text_layers) != (None, None, None):
            train_last_layers(model, audio_layers, text_layers)

        if not self.train_temperature:
            for parameter in (model.logit_scale, model.logit_bias):
                if parameter is not None:
                    parameter.requires_grad_(False)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            say(trainable_table(model))

    def finished(self, model: SupCLAPModel) -> SupCLAPModel:
        """The stock model that is to be saved, with the adapters merged into its weights."""
        return model if self.lora_rank is None else merge_lora(model)


def is_clap(name: str) -> bool:
    """Whether a Hub id or folder holds transformers' `ClapModel`."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except OSError:
        return False  # whoever loads it says what is wrong
    return fields.get("model_type") == ClapConfig.model_type


def load_start(name: str) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """A SupCLAP model, or a `ClapModel` as one, with its processor.

    Args:
        name: Hub id or folder.
    """
    if is_clap(name):
        return supclap_from_clap(load_clap(name)), processor_from_clap(ClapProcessor.from_pretrained(name))
    return SupCLAPModel.from_pretrained(name), SupCLAPProcessor.from_pretrained(name)
