"""Parameter-efficient fine-tuning of a trained model: train its last blocks, or low-rank adapters (LoRA).

`train_last_layers` does not use PEFT, because PEFT always needs an adapter, and this function adds none. `add_lora`
passes full dotted names to PEFT, because PEFT matches names by suffix, and "layers.2" would match both towers.
"""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.pytorch_utils import Conv1D

from modeling_supclap.datasets_scripts.public_names import public_name

from ..modeling_cnn14 import CNN14Model
from ..modeling_supclap import SupCLAPModel
from ..strict_loading import apply_umask

ADAPTERS = "adapters"
"""Folder of a checkpoint with the configuration of each adapter."""

PROJECTIONS = ["audio_projection", "text_projection"]
TEMPERATURE = ["logit_scale", "logit_bias"]
PARTS = {
    "audio_model": "audio encoder",
    "text_model": "text encoder",
    "text_dense": "text encoder",
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

    The modules after the blocks are, for example, a final norm, the BERT pooler or the dense layer of LaBSE. Batch
    norms stay frozen, because the HTSAT batch norm normalizes the input.

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
    if text_layers and len(model.text_dense):
        names.append("text_dense")
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
    merged adapters, and `save_adapter` only the trained weights. Checkpoints have PEFT names, so that a run can resume;
    `supclap convert CHECKPOINT --out FOLDER` merges one into a plain model.

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
            raise ValueError(
                f"the last {layers} blocks of {tower} have no attention for adapters; set its layers to 0"
            )
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
    """Merge adapters into the weights. For those of `add_lora`: W + (alpha / rank) B A.

    Any adapter of PEFT that changes layers is merged (LoRA, IA3, LoHa and others). The model is changed in place and
    returned. Its outputs change only by rounding. Its modules have the same names as before, and all its parameters are
    trainable.
    """
    if not getattr(model, "peft_config", None):
        raise ValueError("the model has no adapters to merge; call add_lora first")

    # Modules of PEFT around one of the model's, with parts of their own: trained copies, trained tokens.
    wrapped: list[str] = []
    for name, module in list(model.named_modules()):
        if name.startswith(tuple(wrapped)):
            continue
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
            wrapped.append(f"{name}.")
        elif isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        else:
            continue
        model.set_submodule(name, plain)

    del model.peft_config
    # the flag of transformers for models with adapters
    model._hf_peft_config_loaded = False
    return model.requires_grad_(True)


def merged_copy(
    config: Any, adapters: Mapping[str, PeftConfig], weights: Mapping[str, Tensor], active: list[str]
) -> SupCLAPModel:
    """Build a plain model from the weights of a model with adapters, and merge the adapters.

    The copy shares all other weights with `weights`, and nothing is changed in place.

    Args:
        config: Configuration of the model.
        adapters: `model.peft_config`, the configuration of each adapter.
        weights: State of the model with adapters, whole and not quantised (see `whole_weights`).
        active: Names of the adapters to merge.

    Raises:
        ValueError: Weights are missing.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    weights = {name: weight.detach() for name, weight in weights.items()}
    of_base = {
        re.sub(r"\.(token_adapter\.)?(base_layer|original_module)\.", ".", name): weights[name] for name in weights
    }
    with init_empty_weights():
        plain = SupCLAPModel(config)
    # first, because adapters may read these weights
    plain.load_state_dict(of_base, strict=False, assign=True)

    for name, adapter in adapters.items():
        adapter = copy.deepcopy(adapter)
        if hasattr(adapter, "init_lora_weights"):
            # some ways to initialise read and change the weights
            adapter.init_lora_weights = False
        plain.add_adapter(adapter, name)
    plain.set_adapter(active)
    report = plain.load_state_dict(weights, strict=False, assign=True)
    if report.missing_keys:
        missing = report.missing_keys
        raise ValueError(f"{len(missing)} weights of the model with adapters are missing, such as {missing[0]}")
    return merge_lora(plain)


def whole_weights(model: SupCLAPModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state of a model. Layers quantised by bitsandbytes, torchao or HQQ are converted to float32.

    `state` contains the gathered weights of a sharded model. None: `model.state_dict()`.
    """
    weights = model.state_dict() if state is None else {**dict(model.named_buffers()), **state}
    if getattr(model, "is_quantized", False):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                weights[f"{name}.weight"] = dequantize_module_weight(module).detach().float()
    return weights


def active_adapters(model: SupCLAPModel) -> list[str]:
    """Return the names of the adapters in use."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return list(module.active_adapters)
    return []


def unwrap_adapters(model: Any) -> Any:
    """Return a model with adapters, without the wrapper of `peft.get_peft_model`.

    Raises:
        ValueError: The adapters are prompts, which are not part of the model, or they share weights between layers.
    """
    prompts = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    if prompts:
        raise ValueError(f"the adapters {prompts} learn prompts, which a model cannot be saved with; use add_lora")
    model = model.get_base_model() if hasattr(model, "get_base_model") else model

    names: dict[int, str] = {}
    for name, weight in model.state_dict().items():
        first = names.setdefault(weight.data_ptr(), name)
        if first != name and weight.data_ptr():  # 0 on the meta device
            kinds = ", ".join(config.peft_type for config in model.peft_config.values())
            raise ValueError(
                f"the adapters ({kinds}) share a weight between layers, {first} and {name}, which the files of a "
                "checkpoint cannot express; use adapters of separate weights, such as LoRA"
            )
    return model


def save_adapter(model: SupCLAPModel, folder: str | Path) -> None:
    """Save only the trained weights of a model with adapters, as an adapter folder of PEFT.

    `peft.PeftModel.from_pretrained(base, folder)` loads it, including the temperature and the bias. The name of the
    base model is saved without local folders.
    """
    (name,) = active_adapters(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model, adapter_name=name)
    for parameter in TEMPERATURE:
        if getattr(model, parameter) is not None:
            weights[parameter] = getattr(model, parameter).detach()
    prefixed = {f"base_model.model.{key}": weight.cpu().contiguous() for key, weight in weights.items()}
    save_file(prefixed, folder / "adapter_model.safetensors", {"format": "pt"})
    apply_umask(folder)

    _public_config(model, name, inference_mode=True).save_pretrained(str(folder))


def save_configs(model: SupCLAPModel, checkpoint: str | Path) -> None:
    """Write the configuration of each adapter into a checkpoint, for `merge_checkpoint`."""
    for name in model.peft_config:
        _public_config(model, name).save_pretrained(str(Path(checkpoint, ADAPTERS, name)))


def _public_config(model: SupCLAPModel, name: str, **changed: Any) -> Any:
    """Return a copy of an adapter's configuration, without local folders in the name of the base model."""
    config: Any = copy.deepcopy(model.peft_config[name])
    base = config.base_model_name_or_path or model.name_or_path or ""
    for key, value in {**changed, "base_model_name_or_path": public_name(base)}.items():
        setattr(config, key, value)
    return config


def merge_checkpoint(checkpoint: str | Path, config: Any, weights: Mapping[str, Tensor]) -> SupCLAPModel:
    """Build a plain model from the weights of a training checkpoint with adapters.

    Raises:
        ValueError: The checkpoint contains no configuration of its adapters.
    """
    folders = list(Path(checkpoint, ADAPTERS).glob("*"))
    if not folders:
        raise ValueError(
            f"{checkpoint} contains adapters without their configuration; resume the run, which saves a merged model"
        )
    adapters = {folder.name: PeftConfig.from_pretrained(str(folder)) for folder in folders}
    of_model = {name.removeprefix("model."): weight for name, weight in weights.items()}
    return merged_copy(config, adapters, of_model, list(adapters))


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
        # PEFT's copy of a module in modules_to_save, not in use
        if ".original_module." in name:
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
        siblings = list(model.get_submodule(parent).named_children())
        after = [name for name, _ in siblings].index(path[depth]) + 1
        for name, child in siblings[after:]:
            if not isinstance(child, _BatchNorm) and list(child.parameters()):
                modules.append(f"{parent}.{name}")
    return modules


def _release_temperature(model: SupCLAPModel) -> list[str]:
    """Make the temperature and the optional bias trainable. Return their names."""
    names = [name for name in TEMPERATURE if getattr(model, name) is not None]
    for name in names:
        getattr(model, name).requires_grad_(True)
    return names
