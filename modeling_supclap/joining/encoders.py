"""Load two pretrained encoders, for `SupCLAPModel.from_encoders` and `SupCLAPProcessor.from_encoders`."""

import logging
import os
import re
from typing import Any, Literal

import torch
from tokenizers import Regex, models, normalizers
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoTokenizer,
    NllbTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
    WhisperFeatureExtractor,
)
from transformers.convert_slow_tokenizer import SentencePieceExtractor
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES
from transformers.utils import FEATURE_EXTRACTOR_NAME, cached_file

from ..configuration_supclap import AUDIO_TOWERS, CEDConfig, SupCLAPConfig, config_from_dict
from ..feature_extraction_ced import CEDFeatureExtractor
from ..strict_loading import missing_protobuf, naming_damaged_files, naming_open_clip
from ..towers import POOLINGS_OF_ALL, get_class
from .sentence_modules import read_sentence_modules, read_text_pooling, read_text_settings

EXAMPLES = {"audio": "mispeech/ced-base", "text": "sentence-transformers/LaBSE"}
# Random steps to disable: they would differ between the passes of gradient caching or leave weights without gradient.
_RANDOM = {"apply_spec_augment": False, "layerdrop": 0.0, "encoder_layerdrop": 0.0}
# Whisper's encoder has one position for two frames of 10 ms.
_POSITIONS_PER_SECOND = 50
_TOKENIZER_FILE = re.compile(r"^(tokenizer|vocab|spm|sentencepiece)|\.model$")


def join_models(cls: Any, audio: str, text: str, audio_seconds: int | None = None, **kwargs: Any) -> Any:
    """Build a model of class `cls` from two pretrained encoders (see `SupCLAPModel.from_encoders`)."""
    known = {*SupCLAPConfig.__annotations__, "attn_implementation"} - {"audio_config", "text_config"}
    if unknown := sorted(kwargs.keys() - known):
        raise TypeError(f"from_encoders has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")

    with naming_open_clip(audio):
        audio_model = load_tower("audio", audio)
    if audio_seconds is not None:
        _shorten(audio_model, audio_seconds)
    modules = read_sentence_modules(text, kwargs.get("text_pooling"))
    if modules is not None:
        kwargs["text_pooling"] = modules.pooling
        kwargs["text_dense"] = modules.dense or None
        kwargs["text_normalize"] = modules.normalize
    elif "text_pooling" not in kwargs:
        kwargs["text_pooling"] = read_text_pooling(text) or SupCLAPConfig.text_pooling
    with naming_open_clip(text):
        text_model = load_tower("text", text, kwargs["text_pooling"])

    config = SupCLAPConfig(audio_config=audio_model.config, text_config=text_model.config, **kwargs)
    model = cls(config, audio_model, text_model)
    if modules is not None:
        for layer, weights in zip(model.text_dense, modules.weights, strict=True):
            layer.load_state_dict(weights)
    return model.eval()


def join_processors(
    cls: Any, audio: str, text: str, caption_prefix: str | None = None, audio_seconds: int | None = None, **kwargs: Any
) -> Any:
    """Build a processor of class `cls` from two encoders (see `SupCLAPProcessor.from_encoders`)."""
    prompt, max_tokens = read_text_settings(text)
    if max_tokens is not None:
        kwargs.setdefault("model_max_length", max_tokens)
    prefix = prompt if caption_prefix is None else caption_prefix
    with naming_open_clip(audio):
        options = {} if audio_seconds is None else {"chunk_length": audio_seconds}
        extractor = _load_feature_extractor(audio, **options)
    if options and not isinstance(extractor, WhisperFeatureExtractor):
        raise ValueError(f"audio_seconds applies to Whisper, and {audio} has a {type(extractor).__name__}")
    with naming_open_clip(text):
        tokenizer = load_tokenizer(text, **kwargs)
    return cls(extractor, tokenizer, caption_prefix=prefix)


def load_tower(kind: Literal["audio", "text"], name: str, pooling: str = "mean") -> PreTrainedModel:
    """Load a pretrained encoder in float32 from a Hub id or folder. `pooling` applies to text encoders only.

    Raises:
        OSError: The folder or Hub id does not exist, or a weight file is damaged.
        ValueError: The checkpoint cannot be a tower of this kind, or weights are missing.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        advice = f"pass an existing folder or a Hub id such as {EXAMPLES[kind]}"
        raise OSError(f"cannot load the {kind} tower {name!r}; {advice}. {error}") from error
    if "model_type" not in fields:
        if os.path.isfile(os.path.join(name, "adapter_config.json")):
            raise ValueError(
                f"{name} is a LoRA adapter without an encoder; merge it into its base model and save that"
            )
        raise ValueError(f"{name} is not a checkpoint: it has no config.json with a model_type")

    config = config_from_dict(fields)
    if isinstance(config, SupCLAPConfig):
        return _load_tower_of_model(kind, name, pooling)
    tower_class, options = get_class(kind, config, pooling)
    if kind == "audio" and config.model_type not in AUDIO_TOWERS:
        for field in _RANDOM.keys() & config.to_dict().keys():
            setattr(config, field, _RANDOM[field])
        # an encoder-decoder is loaded in full, by the weight names of its checkpoint
        tower_class = AutoModel

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_more_than_a_pooler)
    try:
        with naming_damaged_files(name):
            tower, report = tower_class.from_pretrained(
                name, config=config, dtype=torch.float32, output_loading_info=True, **options
            )
    finally:
        logger.removeFilter(_is_more_than_a_pooler)

    missing = sorted(key for key in report["missing_keys"] if not key.endswith("masked_spec_embed"))
    if kind == "audio" and config.is_encoder_decoder:
        tower = tower.get_encoder()
        missing = [key for key in missing if key.startswith("encoder.")]
    if missing:
        only_pooler = all(key.startswith("pooler.") for key in missing)
        advice = POOLINGS_OF_ALL[kind] if only_pooler else "pass a checkpoint of this encoder alone"
        lacking = f"{len(missing)} weights of {type(tower).__name__}, such as {missing[:3]}"
        raise ValueError(f"{name} lacks {lacking}; {advice}")
    return tower


def _is_more_than_a_pooler(record: logging.LogRecord) -> bool:
    """Return False for a report of loading in which only a pooler, left out on purpose, is unexpected."""
    _, *rows = [line for line in record.getMessage().splitlines() if " | " in line] or [""]
    return not rows or not all("pooler." in row and "UNEXPECTED" in row for row in rows)


def _load_tower_of_model(kind: Literal["audio", "text"], name: str, pooling: str) -> PreTrainedModel:
    """Load one encoder of a SupCLAP model, without its projection. Raise ValueError if the text pooling differs."""
    model = AutoModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
    expected = model.config.text_pooling
    if kind == "text" and pooling != expected:
        raise ValueError(f"text_pooling is {pooling!r}, but {name} was trained with {expected!r}; pass {expected!r}")
    tower: PreTrainedModel = getattr(model, f"{kind}_model")
    return tower


def _shorten(tower: Any, seconds: int) -> None:
    """Cut the positions of Whisper's encoder, in place, so that it takes `seconds` of sound instead of 30."""
    positions = getattr(tower, "embed_positions", None)
    if positions is None or not hasattr(tower.config, "max_source_positions"):
        raise ValueError(f"audio_seconds applies to Whisper, and the audio tower is a {type(tower).__name__}")
    longest = len(positions.weight) // _POSITIONS_PER_SECOND
    if not isinstance(seconds, int) or not 1 <= seconds <= longest:
        raise ValueError(f"audio_seconds is {seconds}; pass a whole number from 1 to {longest}")
    # In the same module, because transformers initialises new ones.
    count = seconds * _POSITIONS_PER_SECOND
    positions.weight = torch.nn.Parameter(positions.weight[:count].clone(), requires_grad=False)
    positions.num_embeddings = tower.config.max_source_positions = count


def _load_feature_extractor(name: str, **options: Any) -> SequenceFeatureExtractor:
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
        if fields.get("model_type") != CEDConfig.model_type:
            return AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False, **options)
        if cached_file(name, FEATURE_EXTRACTOR_NAME, _raise_exceptions_for_missing_entries=False) is None:
            return CEDFeatureExtractor.from_config(CEDConfig(**fields))
        # Load by class, because the published files name a class of their own code.
        return CEDFeatureExtractor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(f"no feature extractor can be loaded from the folder or Hub id {name!r}: {error}") from error


def load_tokenizer(name: Any, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a Hub id, a folder, or the SentencePiece file that Meta distributes for SONAR and NLLB.

    Raises:
        OSError: The folder or Hub id does not exist, or tokenizer files are missing.
    """
    try:
        if os.path.isfile(name):
            return _read_sentencepiece(str(name), **kwargs)
        return AutoTokenizer.from_pretrained(str(name), **{"trust_remote_code": False, **kwargs})
    except (OSError, ValueError, TypeError) as error:  # TypeError: the vocabulary file is missing
        reason = f"{error}{missing_protobuf()}"
        files = sorted(os.listdir(name)) if os.path.isdir(name) else ["tokenizer.json"]
        if not any(map(_TOKENIZER_FILE.search, files)):
            reason = f"it has no tokenizer.json, and contains {', '.join(files[:8]) or 'nothing'}"
        raise OSError(f"cannot load a tokenizer from folder or Hub id {name!r}: {reason}") from error


def _read_sentencepiece(path: str, **kwargs: Any) -> NllbTokenizer:
    """Build an NLLB tokenizer with token ids in fairseq's order: <s>, <pad>, </s>, <unk>, pieces, languages, <mask>."""
    try:
        extracted: Any = SentencePieceExtractor(path).extract(models.BPE)
    except Exception as error:  # protobuf's DecodeError, which may not be installed
        raise ValueError(f"{path} is not a SentencePiece file: {error}") from error
    pieces = list(extracted["vocab"])[3:]  # without <unk>, <s> and </s>
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces, *FAIRSEQ_LANGUAGE_CODES, "<mask>"]
    tokenizer = NllbTokenizer(
        vocab=dict(zip(tokens, range(len(tokens)), strict=True)),
        merges=extracted["merges"],
        extra_special_tokens=list(FAIRSEQ_LANGUAGE_CODES),
        src_lang="eng_Latn",
        **kwargs,
    )

    # Normalise as in SentencePiece: apply the character map of the file, merge repeated spaces, strip the ends.
    steps = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    if charsmap := extracted["_spm_precompiled_charsmap"]:
        steps.insert(0, normalizers.Precompiled(charsmap))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer
