"""Both towers as ONNX graphs: `audio.onnx` and `text.onnx`, for runtimes without Python or torch.

    export_onnx(model, processor, "outputs/esc10-onnx")

A graph holds a tower, its pooling, its projection and the normalisation: model inputs in, unit vectors out. Batch size,
number of frames and number of tokens are free. CED's chunks of 10.12 s are part of the graph, so recordings of any
length go in; in a batch where one is longer than a chunk, each short one is computed at the length of the longest.
Front end and tokenizer are not part of it: `processor(...)` makes the inputs, or whatever makes the same numbers.
Needs the extra: pip install "supclap[onnx]".
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..modeling_ced import CEDModel
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

TOLERANCE = 1e-4
# protobuf holds no file above 2 GB; larger weights lie beside the graph, in audio.onnx.data.
_LARGEST_FILE_BYTES = 1_500_000_000


class AudioGraph(nn.Module):
    """CED, its projection and the normalisation, with no step that depends on the data.

    Where `CEDModel.forward` checks its input and computes only those chunks that hold sound, this checks nothing,
    computes all chunks of the batch and gives those without sound no weight.

    Args:
        model: in float32 and evaluation mode, with eager attention.

    Raises:
        ValueError: the audio tower is not CED.
    """

    def __init__(self, model: SupCLAPModel) -> None:
        super().__init__()
        if not isinstance(model.audio_model, CEDModel):
            raise ValueError(
                f"the audio tower is a {type(model.audio_model).__name__}; only CED can be exported, whose graph takes "
                "any length"
            )
        self.tower = model.audio_model
        self.projection = model.audio_projection

    def forward(self, input_features: Tensor, audio_attention_mask: Tensor) -> Tensor:
        """(B, mels, T) and (B, T) to unit vectors (B, projection_dim)."""
        tower, length = self.tower, self.tower.config.target_length
        frames = tower._normalise(input_features, audio_attention_mask)
        batch, n_frames = frames.shape[:2]
        # Arithmetic on symbols, valid for every T: one chunk of T frames, or several of the greatest length.
        n_chunks = (n_frames + length - 1) // length
        chunk_frames = torch.sym_min(n_frames, length)
        rest = n_chunks * chunk_frames - n_frames
        chunks = nn.functional.pad(frames, (0, 0, 0, rest)).reshape(batch * n_chunks, chunk_frames, -1)
        token_mask = tower._token_mask(audio_attention_mask.sum(dim=1), n_chunks, chunk_frames)
        bias = torch.zeros((), dtype=frames.dtype, device=frames.device).masked_fill(
            ~token_mask.reshape(batch * n_chunks, 1, 1, -1), torch.finfo(frames.dtype).min
        )
        tokens = tower._embed(chunks)
        for block in tower.blocks:
            tokens = block(tokens, bias)
        hidden = tower.norm(tokens).reshape(batch, -1, tokens.shape[-1])
        weights = token_mask.reshape(batch, -1, 1).to(hidden.dtype)
        pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return nn.functional.normalize(self.projection(pooled), dim=-1)


class TextGraph(nn.Module):
    """The text tower, its pooling, its projection and the normalisation.

    Args:
        model: in float32 and evaluation mode.
    """

    def __init__(self, model: SupCLAPModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, N) twice to unit vectors (B, projection_dim)."""
        return self.model.get_text_features(input_ids, attention_mask, return_dict=True).pooler_output


@dataclass
class Parity:
    """The largest difference between a graph and the model over one batch.

    Args:
        graph: `audio` or `text`.
        batch: its number of rows.
        length: its frames or tokens.
        difference: largest absolute difference of an embedding's entry.
    """

    graph: str
    batch: int
    length: int
    difference: float


def export_onnx(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> list[Parity]:
    """Writes both graphs and what goes with them, after checking them against the model.

    Args:
        model: with CED as its audio tower; any dtype, it is exported in float32.
        processor: of the model.
        folder: gets `audio.onnx`, `text.onnx` (with a `.onnx.data` beside a graph above 1.5 GB), the processor's files
            and `onnx.json`: names of inputs and outputs, scale and bias of the logits, the parity found. Nothing is
            written when a check fails.

    Returns:
        What `check_parity` found.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        ValueError: the audio tower is not CED, or a graph differs from the model by more than 1e-4.
    """
    _require_extra()
    exact = deepcopy(model).float().cpu().eval()
    exact.set_attn_implementation("eager")
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the finished files only need renaming.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        for name, graph, inputs in _graphs(exact, processor):
            _export(graph, inputs, Path(scratch) / f"{name}.onnx", f"{name}_embeds")
        found = check_parity(exact, processor, scratch)
        processor.save_pretrained(scratch)
        _describe(exact, processor, found, Path(scratch) / "onnx.json")
        target.mkdir(exist_ok=True)
        for path in sorted(Path(scratch).iterdir()):
            os.replace(path, target / path.name)
    return found


def check_parity(
    model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path, tolerance: float = TOLERANCE
) -> list[Parity]:
    """Compares the graphs of a folder with a model on batches of several sizes and lengths.

    The recordings are noise of 0.15 s up to three chunks (CED: 30.4 s), alone and together; the texts have one word up
    to more than the tokenizer's limit.

    Args:
        model: what the graphs were made of, in float32.
        processor: of the model.
        folder: holds `audio.onnx` and `text.onnx`.
        tolerance: largest absolute difference of an entry of a unit vector.

    Raises:
        ValueError: a graph differs by more than the tolerance; the message names the worst batch.
    """
    sessions = {name: _session(Path(folder) / f"{name}.onnx") for name in ("audio", "text")}
    found = []
    for name, inputs in _parity_batches(model, processor):
        features = model.get_audio_features if name == "audio" else model.get_text_features
        with torch.no_grad():
            expected = features(**inputs).pooler_output.numpy()
        given = {key: value.numpy() for key, value in inputs.items()}
        (embeds,) = sessions[name].run(None, given)
        rows, length = next(iter(inputs.values())).shape[0], next(iter(inputs.values())).shape[-1]
        found.append(Parity(name, rows, length, float(np.abs(embeds - expected).max())))
    worst = max(found, key=lambda each: np.nan_to_num(each.difference, nan=np.inf))
    if not worst.difference <= tolerance:
        raise ValueError(
            f"{worst.graph}.onnx differs from the model by {worst.difference:.2e} on {worst.batch} x {worst.length} "
            f"inputs; at most {tolerance:.0e} is rounding"
        )
    return found


def _graphs(model: SupCLAPModel, processor: SupCLAPProcessor) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Each graph with example inputs of two rows whose lengths differ."""
    yield "audio", AudioGraph(model), _audio_inputs(processor, [1.0, 12.0])
    yield "text", TextGraph(model), _text_inputs(processor, ["a dog barks while the rain falls", "rain"])


def _parity_batches(model: SupCLAPModel, processor: SupCLAPProcessor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    config: Any = model.config.audio_config
    chunk = config.target_length * config.hop_size / processor.feature_extractor.sampling_rate
    least = processor.feature_extractor.min_samples / processor.feature_extractor.sampling_rate
    for seconds in ([least], [5.0], [chunk - 0.01], [chunk + 0.01], [least, 1.0, 5.0], [3 * chunk, chunk, 1.0, 15.0]):
        yield "audio", _audio_inputs(processor, seconds)
    words = "rain"
    for counts in ([1], [9], [1, 4, 30], [700, 2], [12] * 5):
        yield "text", _text_inputs(processor, [" ".join([words] * count) for count in counts])


def _audio_inputs(processor: SupCLAPProcessor, seconds: Sequence[float]) -> dict[str, Tensor]:
    rate_hz = processor.feature_extractor.sampling_rate
    draw = np.random.default_rng(0)
    clips = [0.1 * draw.standard_normal(round(each * rate_hz)).astype(np.float32) for each in seconds]
    batch = processor(audio=clips, sampling_rate=rate_hz, return_tensors="pt")
    return {name: batch[name] for name in ("input_features", "audio_attention_mask")}


def _text_inputs(processor: SupCLAPProcessor, texts: list[str]) -> dict[str, Tensor]:
    batch = processor(text=texts, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _export(graph: nn.Module, inputs: Mapping[str, Tensor], path: Path, output: str) -> None:
    free = torch.export.Dim.DYNAMIC
    shapes = {name: {0: free, tensor.ndim - 1: free} for name, tensor in inputs.items()}
    weights = sum(weight.numel() * weight.element_size() for weight in graph.parameters())
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            graph.eval(),
            kwargs=dict(inputs),
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=weights > _LARGEST_FILE_BYTES)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what the exporter says of packages that this needs not, such as torchvision."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def _describe(model: SupCLAPModel, processor: SupCLAPProcessor, found: Sequence[Parity], path: Path) -> None:
    facts = {
        "audio.onnx": {"inputs": ["input_features", "audio_attention_mask"], "output": "audio_embeds"},
        "text.onnx": {"inputs": ["input_ids", "attention_mask"], "output": "text_embeds"},
        "projection_dim": model.config.projection_dim,
        "sampling_rate_hz": processor.feature_extractor.sampling_rate,
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": None if model.logit_bias is None else model.logit_bias.item(),
        "parity": [vars(each) for each in found],
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _require_extra() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f'{name} does not import: {error}\nIt is an extra; install it with: pip install "supclap[onnx]"'
            ) from error
