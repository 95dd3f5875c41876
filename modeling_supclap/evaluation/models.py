"""Any model that embeds recordings and texts, behind one face: ours, transformers' CLAP, or a stranger's.

A stranger needs two methods:

    encode_audio(waveforms, sampling_rate=...)  # a list of float32 (samples,) at `sampling_rate` hertz to (N, d)
    encode_text(texts, language=...)            # a list of strings, all in one language (ISO 639-3), to (N, d)

It may leave out the named arguments, take `batch_size` too, and say more of itself by the attributes `sampling_rate`
(what it wants its waveforms at; 48000 where it takes any), `chunk_seconds` (longer recordings come in chunks; without,
those longer than five minutes do), `min_seconds` (shorter ones are refused) and `fingerprint` (a string that changes
with its weights and with whatever else its embeddings depend on; without, they are not cached: weights alone do not
tell what a stranger does before and after them).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ClapModel, ClapProcessor, PreTrainedConfig

from .. import encoding
from ..audio_input import Recording
from ..hub_ids import is_hub_id
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

DEFAULT_RATE_HZ = 48000
# Half precision leaves the norm of a unit vector within this of 1.
_NORM_TOLERANCE = 1e-2
_INCIDENTAL = ("transformers_version", "auto_map", "architectures", "processor_class", "dtype")


@dataclass
class EmbeddingModel:
    """A model as the evaluation sees it. What it gives is of unit norm.

    Attributes:
        name: What the user calls it.
        kind: "supclap", "clap" or "custom".
        model: The model itself.
        encode_audio: `(waveforms, batch_size)`, one batch of waveforms (samples,) at `sampling_rate_hz`, to float32
            (n, d). `chunk_embeddings` cuts recordings and forms batches.
        encode_text: `(texts, language, batch_size)`, texts of one language, to float32 (N, d).
        sampling_rate_hz: The rate of the waveforms.
        chunk_seconds: The longest recording that it takes at once; None, any length.
        window_seconds: The longest recording whose parts it hears in relation to each other; None, any length.
        prompts: What it was taught to call sounds in temporal post-training, "labels" or "phrases"; None, neither.
        min_seconds: The shortest recording that it takes.
        fingerprint: Changes with anything that its embeddings depend on; None where that is not known.
        device: Where it runs.
        dtype: Its precision.
    """

    name: str
    kind: str
    model: Any
    encode_audio: Callable[..., np.ndarray]
    encode_text: Callable[..., np.ndarray]
    sampling_rate_hz: int
    chunk_seconds: float | None = None
    window_seconds: float | None = None
    prompts: str | None = None
    min_seconds: float = 0.0
    fingerprint: str | None = None
    device: str = "unknown"
    dtype: str = "unknown"

    def chunk_samples(self, chunk_seconds: float | None = None) -> int:
        """Return the length of a chunk; by default the most that the model takes, but at most five minutes.

        Raises:
            ValueError: The model takes only shorter or only longer chunks.
        """
        longest = self.chunk_seconds or math.inf
        seconds = min(longest, encoding.LONGEST_SECONDS) if chunk_seconds is None else chunk_seconds
        if not self.min_seconds <= seconds <= longest:
            span = f"{self.min_seconds:g} s or more" if seconds < self.min_seconds else f"{longest} s at once"
            raise ValueError(f"chunk_seconds is {seconds}; {self.name} takes {span}")
        return round(seconds * self.sampling_rate_hz)

    def chunk_embeddings(
        self,
        recordings: Iterable[Recording],
        chunk_seconds: float | None = None,
        hop_seconds: float | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
        on_bad_audio: str = "error",
    ) -> Iterator[encoding.AudioChunks]:
        """Embed recordings as `encoding.chunk_embeddings` does, with this model's rate and limits."""
        return encoding.chunk_embeddings(
            recordings,
            lambda waveforms: self.encode_audio(waveforms, batch_size),
            self.sampling_rate_hz,
            self.chunk_samples(chunk_seconds),
            None if hop_seconds is None else round(hop_seconds * self.sampling_rate_hz),
            min_samples=max(round(self.min_seconds * self.sampling_rate_hz), 1),
            batch_size=batch_size,
            num_workers=num_workers,
            on_bad_audio=on_bad_audio,
        )


def load_embedding_model(
    model: Any, processor: Any = None, device: str | torch.device | None = None, name: str | None = None
) -> EmbeddingModel:
    """Puts any model behind the one face.

    Args:
        model: A folder or Hub id of a SupCLAP or a CLAP; `"module:function"`, where the function takes nothing and
            gives a model; a `SupCLAPModel` or `ClapModel`; an object with `encode_audio` and `encode_text`.
        processor: Of a model that is given as an object and does not know its own: a `SupCLAPProcessor` or a
            `ClapProcessor`.
        device: Where a loaded model goes; by default a GPU if there is one. A model given as an object stays where
            it is.
        name: What to call it; by default the folder, the id, or the class.

    Raises:
        ValueError: It is none of these, or a CLAP without its processor.
        FileNotFoundError: There is no such folder.

    Example:
        >>> class Constant:
        ...     def encode_audio(self, waveforms): return np.ones((len(waveforms), 4)) / 2
        ...     def encode_text(self, texts): return np.ones((len(texts), 4)) / 2
        >>> load_embedding_model(Constant()).encode_text(["rain"], "eng").tolist()
        [[0.5, 0.5, 0.5, 0.5]]
    """
    if isinstance(model, EmbeddingModel):
        return model
    if isinstance(model, (str, Path)):
        name = name or str(model)
        model, processor = _load(str(model), processor, device)

    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    if isinstance(model, ClapModel):
        if processor is None:
            raise ValueError("a ClapModel given as an object needs its processor: pass processor=ClapProcessor(...)")
        adapted = processor
        if isinstance(processor, ClapProcessor):
            from ..conversion import processor_from_clap

            adapted = processor_from_clap(processor)
        return _of_features(model, adapted, name, "clap")
    if isinstance(model, SupCLAPModel):
        return _of_features(model, processor or model.processor, name, "supclap")
    if callable(getattr(model, "encode_audio", None)) and callable(getattr(model, "encode_text", None)):
        return _of_stranger(model, name)
    raise ValueError(
        f"{name} is a {type(model).__name__}; give a SupCLAP or CLAP model, its folder or Hub id, or an object with "
        "encode_audio(waveforms, sampling_rate=...) and encode_text(texts, language=...)"
    )


def unit_norm(embeds: Any, count: int, name: str = "embeddings") -> np.ndarray:
    """Checks embeddings, and normalises those that are not.

    Args:
        embeds: (count, d), an array or a tensor.
        count: How many there should be.
        name: What messages call them.

    Returns:
        float32 (count, d), unit norm.

    Raises:
        ValueError: They are of another shape or number, hold NaN or inf, or one is zero.

    Warns:
        UserWarning: They are not of unit norm.
    """
    array = embeds.detach().float().cpu().numpy() if isinstance(embeds, torch.Tensor) else np.asarray(embeds)
    if array.ndim != 2 or len(array) != count or not array.shape[1]:
        raise ValueError(f"{name} have shape {array.shape}; {count} inputs should give ({count}, dimensions)")

    array = array.astype(np.float32, copy=False)
    norms = np.linalg.norm(array.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(norms) | (norms == 0))
    if len(bad):
        raise ValueError(f"{name} must be finite and not zero; number {bad[0]} is not ({len(bad)} of {count})")

    furthest = float(norms[np.abs(norms - 1).argmax()]) if count else 1.0
    if abs(furthest - 1) > _NORM_TOLERANCE:
        warnings.warn(f"{name} have norms up to {furthest:.4g} where 1 is expected; normalising them", stacklevel=3)
    if abs(furthest - 1) > 1e-6:
        array = (array / norms[:, None]).astype(np.float32)
    return array


def check_device(device: str | torch.device) -> None:
    """Refuses a device that torch does not know, or does not find on this machine.

    Raises:
        ValueError: It is one of these.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device} cannot be used here: {str(error).splitlines()[0]}") from error


def weights_fingerprint(model: torch.nn.Module, *parts: str) -> str:
    """A SHA-256 in hex of all weights and buffers of a model, their names, shapes and types, and of further strings."""
    digest = hashlib.sha256("\n".join([type(model).__name__, *parts]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _load(name: str, processor: Any, device: Any) -> tuple[Any, Any]:
    """A model and its processor, where it has one, from a folder, the Hub or a function."""
    if not os.path.exists(name) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        module_name, function_name = name.split(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does: the function may be in a file beside the user
        module = importlib.import_module(module_name)
        if not callable(getattr(module, function_name, None)):
            raise ValueError(f"module {module_name} has no function {function_name!r}")
        return getattr(module, function_name)(), processor

    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        held = sorted(os.listdir(name))
        inside = sorted(Path(name).glob("*/config.json"))
        hint = f"; did you mean {inside[-1].parent}?" if inside else ""
        raise ValueError(
            f"the folder {name} has no config.json, it holds {', '.join(held[:8]) or 'nothing'}; give one that "
            f"save_pretrained has written{hint}"
        )
    if not os.path.exists(name) and not is_hub_id(name):
        raise FileNotFoundError(f"there is no model folder {name}")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise FileNotFoundError(f"there is no folder {name} here, and no such model on the Hub: {error}") from error

    kind = fields.get("model_type")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if kind == "clap":
        from ..conversion import load_clap

        return load_clap(name).to(device), processor or ClapProcessor.from_pretrained(name)
    if kind == "supclap":
        return SupCLAPModel.from_pretrained(name).eval().to(device), processor
    raise ValueError(
        f"{name} is a {kind!r} model; give a SupCLAP or CLAP checkpoint, or module:function for any other model"
    )


def _of_features(model: Any, processor: SupCLAPProcessor, name: str, kind: str) -> EmbeddingModel:
    """SupCLAP and CLAP: what `encoding` can drive, which normalises."""
    extractor: Any = processor.feature_extractor
    rate_hz = int(extractor.sampling_rate)

    def encode_audio(waveforms: Sequence[np.ndarray], batch_size: int = 32) -> np.ndarray:
        return encoding.encode_batch(model, processor, list(waveforms)).cpu().numpy()

    def encode_text(texts: Sequence[str], language: str, batch_size: int = 32) -> np.ndarray:
        return encoding.encode_text(model, texts, processor, language=language, batch_size=batch_size)

    # Embeddings depend on the feature extractor and on the vocabulary as on the weights. What the tokenizer's last call
    # padded and cut to stays in its backend and says nothing of the model.
    tokenizer: Any = processor.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = {"vocabulary": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    words = {**words, "padding": None, "truncation": None}
    captions = [processor.plain_captions, processor.caption_prefix, tokenizer.model_max_length]
    settings = [_settings(model.config.to_dict()), _settings(extractor.to_dict()), words, captions]
    return EmbeddingModel(
        name=name,
        kind=kind,
        model=model,
        encode_audio=encode_audio,
        encode_text=encode_text,
        sampling_rate_hz=rate_hz,
        chunk_seconds=encoding.max_chunk_seconds(extractor),
        window_seconds=encoding.max_window_seconds(model.config, extractor),
        prompts=getattr(model.config, "temporal_prompts", None),
        min_seconds=getattr(extractor, "min_samples", 0) / rate_hz,
        fingerprint=weights_fingerprint(model, *map(json.dumps, settings)),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings without what may differ between two copies of one model: paths, versions, where the code is."""

    def drop_incidental(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: fields[key] for key in sorted(fields) if not key.startswith("_") and key not in _INCIDENTAL}

    return json.loads(json.dumps(config, default=str), object_hook=drop_incidental)


def _of_stranger(model: Any, name: str) -> EmbeddingModel:
    takes = {}
    for function in ("encode_audio", "encode_text"):
        parameters = inspect.signature(getattr(model, function)).parameters
        takes[function] = set(parameters)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            takes[function] = {"sampling_rate", "batch_size", "language"}

    if "sampling_rate" not in takes["encode_audio"] and getattr(model, "sampling_rate", None) is None:
        warnings.warn(
            f"{name} neither takes sampling_rate= nor has the attribute; it gets {DEFAULT_RATE_HZ} Hz", stacklevel=3
        )
    rate_hz = int(getattr(model, "sampling_rate", None) or DEFAULT_RATE_HZ)

    def encode(kind: str, inputs: Sequence[Any], **offered: Any) -> np.ndarray:
        taken = {key: offered[key] for key in takes[f"encode_{kind}"] & offered.keys()}
        embeds = getattr(model, f"encode_{kind}")(list(inputs), **taken)
        return unit_norm(embeds, len(inputs), f"{name}: {kind} embeddings")

    return EmbeddingModel(
        name=name,
        kind="custom",
        model=model,
        encode_audio=lambda waveforms, batch_size=32: encode(
            "audio", waveforms, sampling_rate=rate_hz, batch_size=batch_size
        ),
        encode_text=lambda texts, language, batch_size=32: encode(
            "text", texts, language=language, batch_size=batch_size
        ),
        sampling_rate_hz=rate_hz,
        chunk_seconds=getattr(model, "chunk_seconds", None),
        min_seconds=getattr(model, "min_seconds", 0.0),
        fingerprint=getattr(model, "fingerprint", None),
        device=str(getattr(model, "device", "unknown")),
        dtype=str(getattr(model, "dtype", "unknown")).removeprefix("torch."),
    )
