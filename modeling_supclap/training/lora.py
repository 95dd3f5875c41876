"""Parameter-efficient fine-tuning of a trained model: train its last blocks, or low-rank adapters (LoRA).

`train_last_layers` does not use PEFT, because PEFT always needs an adapter, and this function adds none. `add_lora`
passes full dotted names to PEFT, because PEFT matches names by suffix, and "layers.2" would match both towers.
"""

from __future__ import annotations

from collections import Counter

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.pytorch_utils import Conv1D

from ..modeling_cnn14 import CNN14Model
from ..modeling_supclap import SupCLAPModel

PROJECTIONS = ["audio_projection", "text_projection"]
TEMPERATURE = ["logit_scale", "logit_bias"]
PARTS = {
    "audio_model": "audio encoder",
    "text_model": "text encoder",
    **dict.fromkeys(PROJECTIONS, "projections"),
    **dict.fromkeys(TEMPERATURE, "temperature, bias"),
    "objective": "objective",
}


def block_names(tower: nn.Module) -> list[str]:
    """Return the dotted names of the transformer blocks of a tower, first to last.

    The blocks are the items of the outermost `nn.ModuleList`. If there are several outermost lists, the last one is
    used. If the tower has stages (HTSAT), the blocks are the items of each stage's `blocks` list. The linear layer of
    CNN14 is its last block.

    Example:
        >>> from modeling_supclap import CEDConfig, CEDModel
        >>> block_names(CEDModel(CEDConfig(embed_dim=8, depth=2, num_heads=2)))
        ['blocks.0', 'blocks.1']
    """
    outermost: list[str] = []
    for name, module in tower.named_modules():  # parents come before their children
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(f"{other}." for other in outermost)):
            outermost.append(name)
    if not outermost:
        raise ValueError(f"{type(tower).__name__} has no nn.ModuleList, so its blocks cannot be found")

    names: list[str] = []
    for index, item in enumerate(tower.get_submodule(outermost[-1]).children()):
        name, blocks = f"{outermost[-1]}.{index}", getattr(item, "blocks", None)
        names += [name] if blocks is None else [f"{name}.blocks.{number}" for number in range(len(blocks))]
    return [*names, "fc1"] if isinstance(tower, CNN14Model) else names


def train_last_layers(model: SupCLAPModel, audio_layers: int = 1, text_layers: int = 1) -> list[str]:
    """Freeze a model except for the last blocks of each tower, the modules after them, projections and temperature.

    The modules after the blocks are, for example, a final norm or the BERT pooler. Batch norms stay frozen, because the
    HTSAT batch norm normalizes the input.

    TeminAL trains one block of each tower, with the projections (TeminAL table 5). For MS-CLAP 2022, with CNN14 and
    BERT-base, these are 7,344,128 audio and 8,924,928 text parameters. The table's 8,423,951 and 9,515,520 also count
    CNN14's tagging head for 527 classes and BERT's pooler. The embeddings depend on neither, so both stay as they are
    in the paper, too; this model does not contain them.

    Args:
        model: Model, changed in place. A second call replaces the selection of the first one.
        audio_layers: Number of audio blocks to train; 0 freezes the whole audio tower.
        text_layers: Number of text blocks to train; 0 freezes the whole text tower.

    Returns:
        List of full dotted names: the trainable modules, then `logit_scale` and `logit_bias` if present.

    Raises:
        ValueError: A tower has fewer blocks than `audio_layers` or `text_layers`.

    Example:
        >>> from modeling_supclap import SupCLAPConfig
        >>> text = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> audio = {"model_type": "ced", "embed_dim": 8, "depth": 2, "num_heads": 2}
        >>> model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=4))
        >>> train_last_layers(model, audio_layers=1, text_layers=0)
        ['audio_model.blocks.1', 'audio_model.norm', 'audio_projection', 'text_projection', 'logit_scale']
    """
    names = [*_last_modules(model, "audio_model", audio_layers), *_last_modules(model, "text_model", text_layers)]
    model.requires_grad_(False)
    for name in (*names, *PROJECTIONS):
        model.get_submodule(name).requires_grad_(True)
    return [*names, *PROJECTIONS, *_release_temperature(model)]


def add_lora(
    model: SupCLAPModel, rank: int = 8, alpha: int = 16, audio_layers: int = 1, text_layers: int = 1
) -> SupCLAPModel:
    """Freeze a model and add trainable LoRA adapters to its last blocks (Hu et al., 2021, arXiv 2106.09685).

    In each linear attention layer, W x becomes W x + (alpha / rank) B A x. B is initialized to 0, so that the outputs
    do not change before training. Both projections and the temperature are fully trainable.

    Before resuming a run, call `add_lora` with the same arguments. The trainer's `save_model` saves a plain model with
    merged adapters. `model.save_pretrained` writes a PEFT adapter folder without the temperature. Use checkpoints only
    to resume, because their weights have PEFT names.

    Args:
        model: Model, changed in place and returned.
        rank: LoRA rank, the inner dimension of B A.
        alpha: LoRA scale; the adapter output is multiplied by alpha / rank.
        audio_layers: Number of audio blocks with adapters, counted from the last.
        text_layers: Number of text blocks with adapters, counted from the last.

    Raises:
        ValueError: The model already has adapters, a tower has too few blocks, the blocks have no attention,
            `audio_layers` and `text_layers` are both 0, or adapters are requested for a WavLM audio tower.
    """
    if getattr(model, "peft_config", None):
        raise ValueError("the model already has adapters; call merge_lora first")

    targets = []
    for tower, layers in (("audio_model", audio_layers), ("text_model", text_layers)):
        names = []
        for block in _last_blocks(model, tower, layers):
            for name, module in model.get_submodule(block).named_modules():
                # Modules such as `attn` or `self_attn`. GPT-2 uses Conv1D, a linear layer with a transposed matrix.
                if isinstance(module, (nn.Linear, Conv1D)) and "att" in name.split(".")[0]:
                    names.append(f"{block}.{name}")
        if layers and not names:
            raise ValueError(f"the last {layers} blocks of {tower} have no attention for adapters; set its layers to 0")
        if names and getattr(model, tower).config.model_type == "wavlm":
            # WavLM's attention uses the weights without calling the layers.
            raise ValueError("adapters of WavLM would not train; use train_last_layers, or set audio_layers to 0")
        targets += names
    if not targets:
        raise ValueError("audio_layers and text_layers are both 0; set one of them, or use train_last_layers")

    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, modules_to_save=PROJECTIONS))
    _release_temperature(model)
    return model


def merge_lora(model: SupCLAPModel) -> SupCLAPModel:
    """Merge the adapters from `add_lora` into the weights: W + (alpha / rank) B A.

    The model is changed in place and returned. Its outputs change only by rounding. Its modules have the same names as
    before `add_lora`, and all its parameters are trainable.
    """
    if not getattr(model, "peft_config", None):
        raise ValueError("the model has no adapters to merge; call add_lora first")

    for name, module in list(model.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            model.set_submodule(name, module.modules_to_save[str(module.active_adapter)])
        elif isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())

    del model.peft_config
    model._hf_peft_config_loaded = False  # the flag of transformers for models with adapters
    return model.requires_grad_(True)


def trainable_table(model: nn.Module) -> str:
    """Format a table with the total and trainable number of parameters of each part of a model or `ContrastiveModule`.

    Example:
        >>> towers = {"audio_model": nn.Linear(2, 3), "text_model": nn.Linear(2, 2).requires_grad_(False)}
        >>> print(trainable_table(nn.ModuleDict(towers)))
                              parameters     trainable  percent
        audio encoder                  9             9   100.00
        text encoder                   6             0     0.00
        total                         15             9    60.00
    """
    counts, trainable = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        if ".original_module." in name:  # PEFT's copy of a module in modules_to_save, not in use
            continue
        part = PARTS[name.removeprefix("model.").split(".")[0]]
        counts[part] += parameter.numel()
        trainable[part] += parameter.numel() * parameter.requires_grad
    counts["total"], trainable["total"] = counts.total(), trainable.total()

    lines = [f"{'':18}{'parameters':>14}{'trainable':>14}{'percent':>9}"]
    for part in filter(counts.get, [*dict.fromkeys(PARTS.values()), "total"]):
        share = 100 * trainable[part] / counts[part]
        lines.append(f"{part:18}{counts[part]:14,}{trainable[part]:14,}{share:9.2f}")
    return "\n".join(lines)


def _last_blocks(model: SupCLAPModel, tower: str, count: int) -> list[str]:
    blocks = block_names(model.get_submodule(tower))
    if not 0 <= count <= len(blocks):
        raise ValueError(f"{tower}: got {count} blocks to train, expected 0 to {len(blocks)}")
    return [f"{tower}.{name}" for name in blocks[len(blocks) - count :]]


def _last_modules(model: SupCLAPModel, tower: str, count: int) -> list[str]:
    """Return the dotted names of the last blocks, and of all later modules with parameters, except batch norms."""
    blocks = _last_blocks(model, tower, count)
    if not blocks:
        return []

    # From the first of these blocks outward, collect the later siblings of the block and of each of its parents.
    modules = [blocks[0]]
    path = blocks[0].split(".")
    for depth in range(len(path) - 1, 0, -1):
        parent = ".".join(path[:depth])
        names, children = zip(*model.get_submodule(parent).named_children(), strict=True)
        after = names.index(path[depth]) + 1
        for name, child in zip(names[after:], children[after:], strict=True):
            if not isinstance(child, _BatchNorm) and list(child.parameters()):
                modules.append(f"{parent}.{name}")
    return modules


def _release_temperature(model: SupCLAPModel) -> list[str]:
    """Make the temperature and the optional bias trainable. Return their names."""
    names = [name for name in TEMPERATURE if getattr(model, name) is not None]
    for name in names:
        getattr(model, name).requires_grad_(True)
    return names
