"""Common interface for SupCLAP, transformers CLAP and custom models.

A custom model must have two methods:

    encode_audio(waveforms, sampling_rate=...)  # list of float32 (samples,) at `sampling_rate` hertz -> (N, d)
    encode_text(texts, language=...)            # list of strings in one language (ISO 639-3) -> (N, d)

The named arguments are optional, and the methods may also accept `batch_size`. Optional attributes of the model:

- `sampling_rate`: Sampling rate of the waveforms in hertz. Defaults to 48000.
- `chunk_seconds`: Maximum chunk length in seconds; longer recordings are split. Defaults to five minutes.
- `min_seconds`: Minimum recording length in seconds; shorter recordings are rejected. Defaults to 0.
- `fingerprint`: String that identifies the weights and all settings that affect the embeddings. If there is none, the
  embeddings are not cached.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ClapModel, ClapProcessor

from modeling_supclap.metrics.recall.ranking import get_norms

from .. import encoding
from ..audio_input import Recording
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from ..strict_loading import weights_version
from .fingerprints import settings_text, tokenizer_text, weights_fingerprint

DEFAULT_RATE_HZ = 48000


@dataclass
class EmbeddingModel:
    """Model interface for evaluation and search. All embeddings have unit norm.

    Attributes:
        name: Model name for results and messages.
        kind: "supclap", "clap" or "custom".
        encode_audio: Function `(waveforms, batch_size)` -> float32 (n, d) that embeds one batch of waveforms
            (samples,) at `sampling_rate_hz`. Use `chunk_embeddings` for long recordings and several batches.
        encode_text: Function `(texts, language, batch_size)` -> float32 (N, d), for texts in one language.
        chunk_seconds: Maximum chunk length in seconds, or None for any length.
        window_seconds: Maximum audio length per forward pass of the encoder in seconds, or None for any length.
        prompts: Type of sound names used in temporal post-training, "labels" or "phrases". None if the model was not
            post-trained, or the type is unknown.
        min_seconds: Minimum recording length in seconds.
        fingerprint: Hash of the weights and all settings that affect the embeddings, or None if unknown.
        dtype: Data type of the weights, such as "float32".
        resampling_method: Filter for recordings at other sampling rates, as in `SupCLAPProcessor`.
        processor: `SupCLAPProcessor` of a SupCLAP or CLAP model, or None.
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
    resampling_method: str = "kaiser_best"
    processor: Any = None

    @cached_property
    def dim(self) -> int:
        """Number of values of an embedding."""
        return int(self.encode_text(["sound"], "eng", 1).shape[1])

    def chunk_samples(self, chunk_seconds: float | None = None) -> int:
        """Convert a chunk length to samples. None: use the model's maximum, limited to five minutes.

        Raises:
            ValueError: `chunk_seconds` is shorter or longer than the model supports.
        """
        return encoding.get_chunk_samples(chunk_seconds, self.sampling_rate_hz, self.min_seconds, self.chunk_seconds)

    def chunk_embeddings(
        self,
        recordings: Iterable[Recording],
        chunk_seconds: float | None = None,
        hop_seconds: float | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
        on_bad_audio: str = "error",
        refuse_silence: bool = False,
    ) -> Iterator[encoding.AudioChunks]:
        """Split recordings into chunks and embed the chunks, as in `encoding.chunk_embeddings`.

        `chunk_seconds` defaults to the model's maximum, limited to five minutes. `hop_seconds` is the distance between
        the starts of two chunks, by default the chunk length.
        """
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
            resampling_method=self.resampling_method,
            refuse_silence=refuse_silence,
        )


def load_embedding_model(
    model: Any,
    processor: Any = None,
    device: str | torch.device | None = None,
    name: str | None = None,
    trust_remote_code: bool = False,
) -> EmbeddingModel:
    """Load or wrap a model as an `EmbeddingModel`.

    Args:
        model: One of: folder or Hub id of a SupCLAP or CLAP checkpoint, of CLAP2 in OpenCLIP's format, or of a
            model in the format of sentence-transformers that takes audio and text; `"module:function"`, where the
            function has no arguments and returns a model; a `SupCLAPModel` or `ClapModel`; an object with
            `encode_audio` and `encode_text`; an `EmbeddingModel`, which is returned unchanged.
        processor: `SupCLAPProcessor` or `ClapProcessor`. Required if `model` is a `ClapModel` object.
        device: Device for a checkpoint. Defaults to a GPU if there is one. A model object stays on its device.
        name: Model name for results and messages. Defaults to the folder, the Hub id or the class name; for a model
            that was trained after loading, to the output folder of `SupCLAPTrainer`, or to "tuned from ...".
        trust_remote_code: Whether a model in the format of sentence-transformers may run code from its repository.

    Raises:
        ValueError: The model type is not supported, a `ClapModel` has no processor, or the device is not available.
        FileNotFoundError: The folder or Hub model does not exist.

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
        model, processor = _load(str(model), processor, device, trust_remote_code)

    name = name or _name_model(model)
    if isinstance(model, ClapModel):
        if processor is None:
            raise ValueError("a ClapModel given as an object needs its processor: pass processor=ClapProcessor(...)")
        if isinstance(processor, ClapProcessor):
            from ..conversion import processor_from_clap

            processor = processor_from_clap(processor)
        return _wrap_pretrained(model, processor, name, "clap")
    if isinstance(model, SupCLAPModel):
        return _wrap_pretrained(model, processor or model.processor, name, "supclap")
    has_methods = callable(getattr(model, "encode_audio", None)) and callable(getattr(model, "encode_text", None))
    if has_methods and not isinstance(model, type):
        return _wrap_custom(model, name)
    raise ValueError(
        f"{name} is a {type(model).__name__}; pass a SupCLAP or CLAP model, its folder or Hub id, or an object with "
        "encode_audio(waveforms, sampling_rate=...) and encode_text(texts, language=...)"
    )


def _name_model(model: Any) -> str:
    """Return a name for a model object. A model whose weights have changed does not have the name of its start."""
    name = getattr(model, "name_or_path", "") or type(model).__name__
    if trained_in := getattr(model, "trained_in", ""):
        return trained_in
    loaded = getattr(model, "loaded_version", None)
    return name if loaded is None or weights_version(model) <= loaded else f"tuned from {name}"


def unit_norm(embeds: Any, count: int, name: str = "embeddings") -> np.ndarray:
    """Check an array or tensor of embeddings (count, d), and normalise them to unit norm in float32.

    Raise ValueError if the shape differs, or an embedding is zero or not finite. Warn if a norm differs from 1 by more
    than 0.01.
    """
    array = embeds.detach().float().cpu().numpy() if isinstance(embeds, torch.Tensor) else np.asarray(embeds)
    if array.ndim != 2 or len(array) != count or not array.shape[1]:
        raise ValueError(f"{name} have shape {array.shape}; expected ({count}, dimensions) for {count} inputs")

    array = array.astype(np.float32, copy=False)
    if not count:
        return array
    norms = get_norms(array, name)  # (count, 1)
    return array if np.abs(norms - 1).max() <= 1e-6 else (array / norms).astype(np.float32)


def default_device() -> str:
    """Return the first available of CUDA, MPS (Apple) and XPU (Intel), or "cpu"."""
    for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps), ("xpu", torch.xpu)):
        if backend.is_available():
            return name
    return "cpu"


def check_device(device: str | torch.device) -> None:
    """Raise `ValueError` if torch cannot use a device on this machine."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device} is not available: {str(error).splitlines()[0]}") from error


def find_function(name: str) -> Callable[[], Any] | None:
    """Import the function of a `"module:function"` string, also from the current folder. None: another kind of name.

    Raises:
        ImportError: The module does not exist.
        ValueError: The module has no such function.
    """
    if os.path.exists(name) or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return None
    module_name, function_name = name.split(":")
    if os.getcwd() not in sys.path:
        # as `python -m` does, for modules in the current folder
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportError(f"cannot import the module of {name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"cannot load {name}: module {module_name} has no function {function_name!r}")
    return function


def _load(name: str, processor: Any, device: Any, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a model from a folder, the Hub or a `"module:function"` string. Return (model, processor or None)."""
    if function := find_function(name):
        return function(), processor

    device = device or default_device()
    check_device(device)
    from ..conversion import find_kind, load_clap, load_open_clip

    match find_kind(name):
        case "open_clip":
            model, default = load_open_clip(name)
            return model.to(device), processor or default
        case "clap":
            return load_clap(name).to(device), processor or ClapProcessor.from_pretrained(
                name, trust_remote_code=False
            )
        case "sentence_transformers":
            from .embedders import SentenceEmbedder

            return SentenceEmbedder(name, device, trust_remote_code), None
        case _:
            return SupCLAPModel.from_pretrained(name).to(device), processor


def _wrap_pretrained(model: Any, processor: SupCLAPProcessor, name: str, kind: str) -> EmbeddingModel:
    """Wrap a SupCLAP or CLAP model. `encoding` computes and normalises its embeddings."""
    extractor: Any = processor.feature_extractor
    rate_hz = int(extractor.sampling_rate)

    # The fingerprint includes the feature extractor and the vocabulary, because they affect the embeddings.
    tokenizer: Any = processor.tokenizer
    captions = [processor.plain_captions, processor.caption_prefix, tokenizer.model_max_length]
    # earlier versions had only this method
    if processor.resampling_method != "sinc_interp_hann":
        captions.append(processor.resampling_method)
    configs = map(settings_text, (model.config.to_dict(), extractor.to_dict()))
    settings = [*configs, tokenizer_text(tokenizer), json.dumps(captions)]
    return EmbeddingModel(
        name=name,
        kind=kind,
        model=model,
        encode_audio=lambda audio, batch_size=32: encoding.encode_batch(model, processor, list(audio)).cpu().numpy(),
        encode_text=lambda texts, language, batch_size=32: encoding.encode_text(
            model, texts, processor, language=language, batch_size=batch_size
        ),
        sampling_rate_hz=rate_hz,
        chunk_seconds=encoding.max_chunk_seconds(extractor),
        window_seconds=encoding.max_window_seconds(model.config, extractor),
        prompts=getattr(model.config, "temporal_prompts", None),
        min_seconds=encoding.min_clip_samples(extractor) / rate_hz,
        fingerprint=weights_fingerprint(model, *settings),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        resampling_method=processor.resampling_method,
        processor=processor,
    )


def _accepted(function: Callable[..., Any]) -> set[str]:
    """Return the optional arguments that a method of a custom model accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {"sampling_rate", "batch_size", "language"}
    return set(parameters)


def _wrap_custom(model: Any, name: str) -> EmbeddingModel:
    rate_hz = int(getattr(model, "sampling_rate", None) or DEFAULT_RATE_HZ)

    def encode(kind: str, inputs: Sequence[Any], **options: Any) -> np.ndarray:
        function = getattr(model, f"encode_{kind}")
        options = {key: options[key] for key in _accepted(function) & options.keys()}
        return unit_norm(function(list(inputs), **options), len(inputs), f"{name}: {kind} embeddings")

    if "sampling_rate" not in _accepted(model.encode_audio) and getattr(model, "sampling_rate", None) is None:
        warnings.warn(
            f"{name} has no sampling_rate argument or attribute; its waveforms have {DEFAULT_RATE_HZ} Hz", stacklevel=3
        )
    return EmbeddingModel(
        name=name,
        kind="custom",
        model=model,
        encode_audio=lambda audio, batch_size=32: encode("audio", audio, sampling_rate=rate_hz, batch_size=batch_size),
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
