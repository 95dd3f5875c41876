"""Load the tokenizer of a model in OpenCLIP's format: GPT-2's for tiktoken's vocabulary, or one of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..configuration_supclap import ModernTextConfig
from ..hub_ids import is_hub_id
from ..strict_loading import find_file

# GPT-2's byte-level BPE: these vocabularies of tiktoken have the same ids. OpenCLIP adds EOS, PAD and BOS after them.
GPT2 = "openai-community/gpt2"
R50K = ("r50k_base", "gpt2")
R50K_SIZES = (50260, 50257)  # number of tokens with the special tokens, and id of EOS
CONTEXT_LENGTH = 77  # OpenCLIP's default


def load_open_clip_tokenizer(
    folder: str, settings: Mapping[str, Any], name: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer `name`, or that of an OpenCLIP checkpoint.

    Without `name`, it is the tokenizer in the folder or Hub repository, else `hf_tokenizer_name` or `hf_model_name`.
    For tiktoken's r50k_base, it is the tokenizer in the folder if that has the right size, else GPT-2's: OpenCLIP
    uploads CLIP's tokenizer with models that use tiktoken.

    For a tokenizer of transformers, OpenCLIP also cleans captions (ftfy, HTML entities, white space); this package does
    not.

    Raises:
        OSError: The tokenizer cannot be downloaded.
        ValueError: The tokenizer is unknown, or OpenCLIP changes captions before tokenization.
    """
    text_cfg = settings["model_cfg"]["text_cfg"]
    is_tiktoken = text_cfg.get("tokenizer_type") == "tiktoken"
    neutral = {"add_bos": True, "add_eos": True, "clean": None if is_tiktoken else "whitespace"}
    for option, value in (text_cfg.get("tokenizer_kwargs") or {}).items():
        if value not in (neutral.get(option), None, ""):
            raise ValueError(f"{folder}: tokenizer_kwargs has {option}={value!r}, which is not supported")

    own = None if name else _load_own_tokenizer(folder)
    other = text_cfg.get("hf_tokenizer_name") or text_cfg.get("hf_model_name")
    if is_tiktoken:
        other = GPT2 if text_cfg.get("tiktoken_name") in R50K else None
        eos = text_cfg.get("eos_id")
        if own is not None and eos is not None and len(own) not in (eos, eos + 3):
            own = None
    if own is None and (other := name or other) is None:
        kind = text_cfg.get("tiktoken_name") or text_cfg.get("tokenizer_type")
        raise ValueError(f"{folder} has no tokenizer, and OpenCLIP's {kind!r} is unknown; pass --tokenizer")

    try:
        tokenizer = AutoTokenizer.from_pretrained(other, trust_remote_code=False) if own is None else own
    except OSError as error:
        raise OSError(
            f"{folder} has the tokenizer {other}, which cannot be loaded; save its files in the folder, or pass "
            f"--tokenizer to supclap convert: {error}"
        ) from error
    tokenizer.model_max_length = text_cfg.get("context_length") or CONTEXT_LENGTH
    tokenizer.padding_side = "right"
    return tokenizer


def _load_own_tokenizer(folder: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or Hub repository. None: there is none."""
    if find_file(folder, "tokenizer_config.json"):
        # without config.json, which may be of a class that transformers lacks
        return AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig(), trust_remote_code=False)
    path = find_file(folder, "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=path) if path else None


def prepare_open_clip_tokenizer(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Add BOS, EOS and PAD to GPT-2's tokenizer, and check the ids of a tokenizer that has them, in place.

    Raises:
        ValueError: The special tokens or the vocabulary differ from `config`, the configuration of the text tower.
    """
    if config.model_type != ModernTextConfig.model_type:
        return
    plain_tokens = config.eos_token_id or config.vocab_size - 3
    if len(tokenizer) == plain_tokens:
        _add_special_tokens(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.padding_side = "right"
    # As in tiktoken, "<eos>" in a caption is plain text. The saved tokenizer has `init_kwargs`.
    tokenizer.split_special_tokens = tokenizer.init_kwargs["split_special_tokens"] = True

    expected, ids = {}, {}
    for name in ("bos_token", "eos_token", "pad_token"):
        ids[name] = getattr(tokenizer, f"{name}_id")
        expected[name] = getattr(config, f"{name}_id")
        if expected[name] is None:  # OpenCLIP does not use it
            expected[name] = ids[name]
        elif ids[name] is None:  # a tokenizer.json alone does not name its special tokens
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(expected[name]))
            ids[name] = getattr(tokenizer, f"{name}_id")
    if ids != expected or len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the ids {ids}, the text tower {config.vocab_size} and "
            f"{expected}; pass the tokenizer of the checkpoint, or {GPT2}"
        )
    probe = tokenizer("a")["input_ids"]
    for name, found in (("bos_token", probe[0]), ("eos_token", probe[-1])):
        if ids[name] not in (None, found):
            raise ValueError(f"the tokenizer encodes 'a' as {probe}, without the {name} {ids[name]}")


def _add_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the three special tokens in the order of OpenCLIP, and put BOS and EOS around each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"})
    names = ("<bos>", "<eos>")
    marks = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=marks)


def get_tokenizer_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the fields of `text_cfg` with which OpenCLIP finds the tokenizer."""
    if (len(tokenizer), tokenizer.eos_token_id) == R50K_SIZES:
        return {"tokenizer_type": "tiktoken", "tiktoken_name": R50K[0]}
    # OpenCLIP loads it from a local folder whatever its name, and from the Hub by this id.
    name = str(tokenizer.name_or_path)
    return {"hf_tokenizer_name": name if is_hub_id(name) else "tokenizer"}
