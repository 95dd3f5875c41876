"""What a text encoder of sentence-transformers does beside its tower: pooling, dense layers, a norm, prompts.

LaBSE, for example, is BERT's first token, a linear layer, tanh and the norm; the mean over its tokens is another model.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from .hub_ids import is_hub_id

# By the names that sentence-transformers has for them, before and since its version 6.
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
    """What stands in the `modules.json` of a text encoder.

    Attributes:
        pooling: "mean", "cls" or "last".
        dense: The settings of each `SentenceDense` after it.
        weights: The state of each one.
        normalize: Whether the result is brought to unit norm.
    """

    pooling: str
    dense: list[dict[str, Any]]
    weights: list[dict[str, torch.Tensor]]
    normalize: bool


def read_sentence_modules(name: str, pooling: str | None = None) -> SentenceModules | None:
    """Reads what a text encoder does after its tower.

    Args:
        name: Hub id or folder of the encoder.
        pooling: A pooling that was asked for; a folder that has another one is then read as a tower alone.

    Returns:
        None where the encoder is a tower alone.

    Raises:
        ValueError: A module is of another kind than pooling, dense layer and norm.
    """
    modules = _read_json(name, "modules.json") or []
    found, dense, weights, normalize = "", [], [], False
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        settings = _read_json(name, f"{module['path']}/config.json") or {}
        if kind == "Pooling":
            found = _read_pooling(settings)
            if pooling not in (None, found):
                return None

        elif kind == "Dense" and not normalize and not settings.get("use_residual"):
            activation = _ACTIVATIONS[settings["activation_function"].rpartition(".")[2].rstrip("()")]
            bias = settings.get("bias", True)
            dense.append({"out_features": settings["out_features"], "activation": activation, "bias": bias})
            weights.append(_read_weights(name, module["path"]))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer" or module["path"]:
            found = ""
            break

    if modules and not found and pooling is None:
        raise ValueError(
            f"{name} pools its tokens in a way that this model does not know (see its modules.json); to use its "
            "encoder without that, pass text_pooling="
        )
    return SentenceModules(found, dense, weights, normalize) if found else None


def read_text_settings(name: str) -> tuple[str, int | None]:
    """The prompt that stands before texts, and the most tokens, of a text encoder of sentence-transformers.

    Args:
        name: Hub id or folder of the encoder.

    Returns:
        The prompt that the encoder uses by default, or else that of queries, as for e5; "" and None where nothing is
        said.
    """
    settings = _read_json(name, "config_sentence_transformers.json") or {}
    prompts = settings.get("prompts") or {}
    prompt = prompts.get(settings.get("default_prompt_name")) or prompts.get("query") or ""
    return prompt, (_read_json(name, "sentence_bert_config.json") or {}).get("max_seq_length")


def _read_pooling(settings: dict[str, Any]) -> str:
    """The one pooling that we know of, or an empty string."""
    if not settings.get("include_prompt", True):
        return ""
    modes = [settings["pooling_mode"]] if "pooling_mode" in settings else []
    for field, value in settings.items():
        if field.startswith("pooling_mode_") and value is True:
            modes.append(field)
    return _POOLINGS.get(modes[0], "") if len(modes) == 1 else ""


def _read_weights(name: str, path: str) -> dict[str, torch.Tensor]:
    for file in ("model.safetensors", "pytorch_model.bin"):
        if found := _find(name, f"{path}/{file}"):
            return load_state_dict(found)
    raise ValueError(f"{name} lacks the weights of its module {path}")


def _read_json(name: str, path: str) -> Any:
    if found := _find(name, path):
        with open(found, encoding="utf-8") as file:
            return json.load(file)
    return None


def _find(name: str, path: str) -> str | None:
    if not Path(name).is_dir() and not is_hub_id(name):
        return None  # whoever loads the tower says what is wrong with its name
    missing_is_fine = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
    return cached_file(name, path, **missing_is_fine)
