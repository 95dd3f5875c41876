"""Export the audio and the text tower to ONNX, as `audio.onnx` and `text.onnx`, for use without Python or torch.

    export_onnx(model, processor, "outputs/esc10-onnx")

Each graph contains a tower (encoder), its pooling, its projection and the normalisation, and returns unit vectors. The
batch size and the number of frames or tokens are dynamic. Compute the inputs with `processor(...)`.
Requires the extra: pip install "supclap[onnx]".
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..modeling_ced import CEDModel
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

TOLERANCE = 1e-4
# Save larger weights in a separate file such as audio.onnx.data, because protobuf files are limited to 2 GB.
_LARGEST_FILE_BYTES = 1_500_000_000
# Input names and model method of each graph.
_GRAPHS = {
    "audio": (("input_features", "audio_attention_mask"), "get_audio_features"),
    "text": (("input_ids", "attention_mask"), "get_text_features"),
}


class Graph(nn.Module):
    """Module to export: the audio or text tower with its pooling, its projection and the normalisation."""

    def __init__(self, model: SupCLAPModel, name: str) -> None:
        super().__init__()
        self.model = model
        self.embed = getattr(model, _GRAPHS[name][1])

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """Compute embeddings (B, projection_dim) of audio features (B, mels, T) or token ids (B, N)."""
        return self.embed(values, mask, return_dict=True).pooler_output


@dataclass
class Parity:
    """Largest absolute difference between the embeddings of an ONNX graph and of the model, on one batch."""

    graph: str  # "audio" or "text"
    batch: int  # number of recordings or texts
    length: int  # number of frames or tokens
    difference: float


def export_onnx(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> list[Parity]:
    """Export both towers to ONNX and compare the graphs with the model. If a check fails, nothing is written.

    Args:
        model: Model with CED as audio tower, in any dtype. The graphs are in float32.
        folder: Output folder for `audio.onnx`, `text.onnx`, the processor's files and `onnx.json`. Weights above 1.5 GB
            are stored in a separate file, such as `audio.onnx.data`. `onnx.json` contains the input and output names,
            the logit scale and bias, and the result of `check_parity`.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        ValueError: The audio tower is not CED, or a graph differs from the model by more than 1e-4.
    """
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'{error}\nInstall the extra: pip install "supclap[onnx]"') from error
    if not isinstance(model.audio_model, CEDModel):
        kind = type(model.audio_model).__name__
        raise ValueError(f"the audio tower is a {kind}; only CED can be exported")
    exact = deepcopy(model).float().cpu().eval()
    exact.set_attn_implementation("eager")

    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Use a temporary folder in the same parent folder, so that finished files can be moved by renaming.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        # Trace with a batch of two inputs of different length; one recording is longer than a chunk.
        _export(Graph(exact, "audio"), _audio_inputs(processor, [1.0, 12.0]), Path(scratch) / "audio.onnx")
        texts = ["a dog barks while the rain falls", "rain"]
        _export(Graph(exact, "text"), _text_inputs(processor, texts), Path(scratch) / "text.onnx")

        parity = check_parity(exact, processor, scratch)
        processor.save_pretrained(scratch)
        _describe(exact, processor, parity, Path(scratch) / "onnx.json")

        target.mkdir(exist_ok=True)
        for path in sorted(Path(scratch).iterdir()):
            os.replace(path, target / path.name)
    return parity


def check_parity(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> list[Parity]:
    """Compare exported graphs with the model, on batches of several sizes and lengths.

    The recordings are noise, from the minimum length (0.15 s) to three chunks (30.4 s for CED). Some batches contain
    one recording, others several of different length. The shortest text is one word, and the longest exceeds the
    tokenizer's limit.

    Raises:
        ValueError: An embedding differs by more than `TOLERANCE`. The message contains the shape of the worst batch.
    """
    import onnxruntime

    parity = []
    for name, batches in (("audio", _recordings(model, processor)), ("text", _texts(processor))):
        session = onnxruntime.InferenceSession(Path(folder) / f"{name}.onnx", providers=["CPUExecutionProvider"])
        graph = Graph(model, name)
        for inputs in batches:
            with torch.no_grad():
                expected = graph(*inputs.values()).numpy()

            feed = {key: value.numpy() for key, value in inputs.items()}
            (embeds,) = session.run(None, feed)
            rows, length = inputs[_GRAPHS[name][0][1]].shape
            parity.append(Parity(name, rows, length, float(np.abs(embeds - expected).max())))

    worst = max(parity, key=lambda each: np.nan_to_num(each.difference, nan=np.inf))
    if not worst.difference <= TOLERANCE:
        shape, error = f"{worst.batch} x {worst.length}", f"{worst.difference:.2e}"
        raise ValueError(f"{worst.graph}.onnx is off by {error} on {shape} inputs; the tolerance is {TOLERANCE:.0e}")
    return parity


def _recordings(model: SupCLAPModel, processor: SupCLAPProcessor) -> Iterator[dict[str, Tensor]]:
    config: Any = model.config.audio_config
    rate_hz = processor.feature_extractor.sampling_rate
    chunk = config.target_length * config.hop_size / rate_hz
    least = processor.feature_extractor.min_samples / rate_hz
    for seconds in ([least], [5.0], [chunk - 0.01], [chunk + 0.01], [least, 1.0, 5.0], [3 * chunk, chunk, 1.0, 15.0]):
        yield _audio_inputs(processor, seconds)


def _texts(processor: SupCLAPProcessor) -> Iterator[dict[str, Tensor]]:
    for counts in ([1], [9], [1, 4, 30], [700, 2], [12] * 5):
        yield _text_inputs(processor, [" ".join(["rain"] * count) for count in counts])


def _audio_inputs(processor: SupCLAPProcessor, seconds: Sequence[float]) -> dict[str, Tensor]:
    rate_hz = processor.feature_extractor.sampling_rate
    rng = np.random.default_rng(0)
    clips = [0.1 * rng.standard_normal(round(length * rate_hz)).astype(np.float32) for length in seconds]
    return dict(processor(audio=clips, sampling_rate=rate_hz, return_tensors="pt"))


def _text_inputs(processor: SupCLAPProcessor, texts: list[str]) -> dict[str, Tensor]:
    batch = processor(text=texts, return_tensors="pt")
    return {name: batch[name] for name in _GRAPHS["text"][0]}


def _export(graph: Graph, inputs: Mapping[str, Tensor], path: Path) -> None:
    """Export one graph. The batch size and the number of frames or tokens are dynamic."""
    free = torch.export.Dim.DYNAMIC
    shapes = tuple({0: free, tensor.ndim - 1: free} for tensor in inputs.values())
    tower = graph.model.audio_model if path.stem == "audio" else graph.model.text_model

    # Hide the exporter's warnings about packages that are not needed, such as torchvision.
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                graph.eval(),
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=[f"{path.stem}_embeds"],
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(path, external_data=tower.get_memory_footprint() > _LARGEST_FILE_BYTES)
    finally:
        logging.disable(level)


def _describe(model: SupCLAPModel, processor: SupCLAPProcessor, parity: Sequence[Parity], path: Path) -> None:
    graphs = {f"{name}.onnx": {"inputs": inputs, "output": f"{name}_embeds"} for name, (inputs, _) in _GRAPHS.items()}
    facts = {
        **graphs,
        "projection_dim": model.config.projection_dim,
        "sampling_rate_hz": processor.feature_extractor.sampling_rate,
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": None if model.logit_bias is None else model.logit_bias.item(),
        "parity": list(map(asdict, parity)),
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
