"""Read the pooling, dense layers, normalisation and prompts of sentence-transformers models.

LaBSE, for example, takes the first token of BERT, then applies a linear layer, tanh and normalisation.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.modeling_utils import load_state_dict

from ..strict_loading import find_file

# From the names of pooling modes in sentence-transformers (before and since version 6) to `text_pooling`.
_POOLINGS = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = {"Tanh": "tanh", "Identity": "linear", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


class SentenceModules(NamedTuple):
    """Modules after the transformer in a sentence-transformers model, from its `modules.json`."""

    pooling: str  # "mean", "cls" or "last"
    dense: list[dict[str, Any]]  # arguments of `SentenceDense` for each dense layer after the pooling
    weights: list[dict[str, torch.Tensor]]  # state dictionary of each dense layer
    normalize: bool  # whether the output is scaled to unit norm


def read_sentence_modules(name: str, pooling: str | None = None) -> SentenceModules | None:
    """Read the modules of a sentence-transformers model from its folder or Hub id.

    Return None if the model has no `modules.json`, or if `pooling` is not None and differs from the model's pooling.

    Raises:
        ValueError: The weights of a dense layer are missing, or `pooling` is None and the model has an unsupported
            pooling or module.
    """
    modules = _read_json(name, "modules.json")
    mode, dense, weights, normalize = "", [], [], False
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        settings = _read_json(name, f"{module['path']}/config.json")
        activation = _ACTIVATIONS.get(settings.get("activation_function", "").rpartition(".")[2].rstrip("()"))
        if kind == "Pooling":
            mode = _read_pooling(settings)
            if pooling not in (None, mode):
                return None

        elif kind == "Dense" and activation and not normalize and not settings.get("use_residual"):
            bias = settings.get("bias", True)
            dense.append({"out_features": settings["out_features"], "activation": activation, "bias": bias})
            folder = module["path"]
            local = find_file(name, f"{folder}/model.safetensors") or find_file(name, f"{folder}/pytorch_model.bin")
            if local is None:
                raise ValueError(f"{name} has no weights for its module {module['path']}; download it again")
            weights.append(load_state_dict(local))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer" or module["path"]:
            mode = ""
            break

    if modules and not mode and pooling is None:
        advice = "to load only its encoder, pass text_pooling='mean', 'cls' or 'last'"
        raise ValueError(f"the modules.json of {name} has an unsupported pooling or module; {advice}")
    return SentenceModules(mode, dense, weights, normalize) if mode else None


def read_text_settings(name: str) -> tuple[str, int | None]:
    """Read the prompt and the maximum number of tokens of a sentence-transformers model from its folder or Hub id.

    The prompt is the default prompt if there is one, else the query prompt, else "". The maximum is None if the model
    does not set it.
    """
    settings = _read_json(name, "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    prompt = prompts.get(settings.get("default_prompt_name")) or prompts.get("query") or ""
    return prompt, _read_json(name, "sentence_bert_config.json").get("max_seq_length")


def read_text_pooling(name: str) -> str | None:
    """Read the text pooling of a SupCLAP model from its folder or Hub id. Return None for other models."""
    return _read_json(name, "config.json").get("text_pooling")


def _read_pooling(settings: dict[str, Any]) -> str:
    """Return "mean", "cls" or "last" for a pooling configuration, or "" if the pooling is unsupported."""
    if not settings.get("include_prompt", True):
        return ""
    modes = [settings["pooling_mode"]] if "pooling_mode" in settings else []
    for field, value in settings.items():
        if field.startswith("pooling_mode_") and value is True:
            modes.append(field)
    return _POOLINGS.get(modes[0], "") if len(modes) == 1 else ""


def _read_json(name: str, path: str) -> Any:
    """Read a file of a folder or Hub id. Return {} if there is none."""
    local = find_file(name, path)
    return {} if local is None else json.loads(Path(local).read_text(encoding="utf-8"))
