"""What trains when a finished model is trained on: its last blocks, or low-rank adapters.

TeminAL trains about a tenth of its model, the last layers and the projections [T table 5]. PEFT alone cannot say that:
its `modules_to_save` trains whole modules only beside at least one adapted module (`target_modules=[]` is an error), it
keeps a second copy of each, it matches names by their endings ("layers.2" is found in both towers), and a bare
parameter such as `logit_scale` it leaves out without a word. So whole blocks are chosen by plain freezing, which is
exact; LoRA goes through PEFT, by full dotted names, and the temperature is released beside it.
"""

from __future__ import annotations

from collections import Counter

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.pytorch_utils import Conv1D

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
    """Finds the transformer blocks of a tower, first to last, by dotted names within the tower.

    They are the items of its outermost `nn.ModuleList`, the last one where there are several; a tower in stages (HTSAT)
    keeps each stage's blocks in a list named `blocks`, and these are the ones that count.

    Args:
        tower: An encoder: CED, HTSAT, SONAR (M2M100), or one of BERT's kind.

    Raises:
        ValueError: The tower has no list of modules.

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
        raise ValueError(f"{type(tower).__name__} keeps no nn.ModuleList, so it has no blocks to choose from")

    names: list[str] = []
    for index, item in enumerate(tower.get_submodule(outermost[-1]).children()):
        name, blocks = f"{outermost[-1]}.{index}", getattr(item, "blocks", None)
        if blocks is None:
            names.append(name)
        else:
            names += map(f"{name}.blocks.{{}}".format, range(len(blocks)))
    return names


def train_last_layers(model: SupCLAPModel, audio_layers: int = 1, text_layers: int = 1) -> list[str]:
    """Freezes a model but for the last blocks of each tower, what follows them, both projections and the temperature.

    What follows is whatever the tower defines after its blocks, a final norm or BERT's pooler; batch norms are left
    out, since HTSAT's normalises its input. Frozen parameters get no gradient and stay bit for bit what they are. With
    one block each this is TeminAL's choice: for BERT-base with its pooler and 1,024 shared dimensions the text side
    trains 9,515,520 parameters, the number printed in [T table 5]. Its audio side, 8,423,951, is that of a CNN14 (both
    linear layers and the projection), though the paper names HTSAT; with HTSAT and RoBERTa 10.5 % of CLAP trains.

    Args:
        model: The model, changed in place; a second call begins anew.
        audio_layers: The number of blocks of the audio tower that train; 0 freezes the tower whole.
        text_layers: The number of blocks of the text tower that train; 0 freezes the tower whole.

    Returns:
        Full dotted names of the modules and bare parameters that train.

    Raises:
        ValueError: A tower has fewer blocks than asked for.

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
    """Freezes a model and lets low-rank adapters train in its last blocks (LoRA: Hu et al., 2021, arXiv 2106.09685).

    W x becomes W x + (alpha / rank) B A x for each linear layer of their attention; B starts at 0, so that nothing
    changes until it trains. Both projections and the temperature train in full.

    The model stays a `SupCLAPModel` with adapters inside, and `SupCLAPTrainer` trains, checkpoints and resumes it as
    any other (resume with a model that went through the same call). The trainer's `save_model` saves a stock
    model, merged as by `merge_lora`; `model.save_pretrained` writes a PEFT adapter folder, which has no place for the
    temperature. A checkpoint of such a run is for resuming only: its weights go by PEFT's names, so `from_pretrained`
    would find few of them.

    Args:
        model: The model, changed in place.
        rank: The width of A and B.
        alpha: The strength of the adapters, relative to `rank`.
        audio_layers: The number of blocks of the audio tower that get adapters.
        text_layers: The number of blocks of the text tower that get adapters.

    Returns:
        The same model.

    Raises:
        ValueError: The model has adapters already, a tower has fewer blocks than asked for or no attention in them,
            or none is to be adapted; or the audio tower is WavLM.
    """
    if getattr(model, "peft_config", None):
        raise ValueError("the model has adapters already; call merge_lora first")

    targets = []
    for tower, layers in (("audio_model", audio_layers), ("text_model", text_layers)):
        found = _attention_layers(model, _last_blocks(model, tower, layers))
        if layers and not found:
            raise ValueError(f"the blocks of {tower} have no attention to adapt, so it must stay as it is: 0 layers")
        if found and getattr(model, tower).config.model_type == "wavlm":
            raise ValueError(
                "WavLM's attention uses its weights without calling its layers, so adapters would not train; train its "
                "last layers instead (train_last_layers), or give 0 audio layers"
            )
        targets += found
    if not targets:
        raise ValueError("audio_layers and text_layers are 0, so nothing gets an adapter; see train_last_layers")

    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, modules_to_save=PROJECTIONS))
    _release_temperature(model)
    return model


def _attention_layers(model: SupCLAPModel, blocks: list[str]) -> list[str]:
    """The linear layers of the attention, which every tower keeps under `attn`, `self_attn` or `attention`."""
    found = []
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules():
            # GPT-2's are of a class of their own, which keeps the matrix transposed.
            if isinstance(module, (nn.Linear, Conv1D)) and "att" in name.split(".")[0]:
                found.append(f"{block}.{name}")
    return found


def merge_lora(model: SupCLAPModel) -> SupCLAPModel:
    """Folds the adapters of `add_lora` into the weights: W + (alpha / rank) B A.

    Args:
        model: The model, changed in place; what it computes stays the same but for rounding.

    Returns:
        The same model with the modules and names it had before `add_lora`, every parameter trainable.

    Raises:
        ValueError: The model has no adapters.
    """
    if not getattr(model, "peft_config", None):
        raise ValueError("the model has no adapters to merge; add_lora makes them")

    for name, module in list(model.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            model.set_submodule(name, module.modules_to_save[str(module.active_adapter)])
        elif isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())

    del model.peft_config
    model._hf_peft_config_loaded = False  # transformers' own mark of a model with adapters
    return model.requires_grad_(True)


def trainable_table(model: nn.Module) -> str:
    """Counts the parameters by part, and how many of them train, as a table to print.

    Args:
        model: A `SupCLAPModel`, or a `ContrastiveModule`, which adds the parameters of its objective.

    Returns:
        One line a part, with the number of parameters, of those that train, and their share; and a line for all.

    Example:
        >>> from modeling_supclap import SupCLAPConfig
        >>> text = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> audio = {"model_type": "ced", "embed_dim": 8, "depth": 1, "num_heads": 2}
        >>> model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=4))
        >>> _ = train_last_layers(model, audio_layers=1, text_layers=0)
        >>> print(trainable_table(model))
                              parameters     trainable  percent
        audio encoder              3,608           888    24.61
        text encoder             300,856             0     0.00
        projections                  112           112   100.00
        temperature, bias              1             1   100.00
        total                    304,577         1,001     0.33
    """
    counts, trainable = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        if ".original_module." in name:  # PEFT's untouched copy of a module that trains
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
    """Finds the last blocks of a tower by their full dotted names."""
    module = model.get_submodule(tower)
    blocks = block_names(module)
    if not 0 <= count <= len(blocks):
        raise ValueError(f"{tower} ({type(module).__name__}) has {len(blocks)} blocks, so {count} of them cannot train")
    return list(map(f"{tower}.{{}}".format, blocks[len(blocks) - count :]))


def _last_modules(model: SupCLAPModel, tower: str, count: int) -> list[str]:
    """Finds the last blocks of a tower and what it defines after them, in this order, by their full dotted names."""
    blocks = _last_blocks(model, tower, count)
    if not blocks:
        return []

    # From the first block outward: whatever its parents define after the child that it is in.
    later: list[str] = []
    path = blocks[0].split(".")
    for depth in range(len(path) - 1, 0, -1):
        parent = ".".join(path[:depth])
        names, children = zip(*model.get_submodule(parent).named_children(), strict=True)
        after = names.index(path[depth]) + 1
        for name, child in zip(names[after:], children[after:], strict=True):
            if not isinstance(child, _BatchNorm) and list(child.parameters()):
                later.append(f"{parent}.{name}")
    return [blocks[0], *later]


def _release_temperature(model: SupCLAPModel) -> list[str]:
    """Lets the temperature train, and the bias where there is one; gives their names."""
    released = []
    for name in TEMPERATURE:
        if getattr(model, name) is not None:
            getattr(model, name).requires_grad_(True)
            released.append(name)
    return released
