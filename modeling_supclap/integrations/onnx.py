"""Export the audio and the text tower to ONNX, as `audio.onnx` and `text.onnx`, for use without Python or torch.

    export_onnx(model, processor, "outputs/esc10-onnx")

Each graph contains a tower (encoder), its pooling, its projection and the normalisation, and returns unit vectors. The
batch size and the number of frames or tokens are dynamic. Compute the inputs with `processor(...)`, or export with
`waveforms=True`: the audio graph then contains the spectrogram, and `serve.py` embeds texts and files without torch.
Requires the extra: pip install "supclap[onnx]".
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..encoding import get_chunk_samples, max_chunk_seconds, max_window_seconds, min_clip_samples
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import REMOVED_CHARACTERS, SupCLAPProcessor
from .spectrogram import Spectrogram

TOLERANCE = 1e-4
# Longest recording of the check, because the memory of attention grows with the square of the length.
_LONGEST_SECONDS = 32.0
# Save larger weights in a separate file such as audio.onnx.data, because protobuf files are limited to 2 GB.
_LARGEST_FILE_BYTES = 1_500_000_000
# Model method of each graph.
_METHODS = {"audio": "get_audio_features", "text": "get_text_features"}


class Graph(nn.Module):
    """Module to export: the audio or text tower with its pooling, its projection and the normalisation.

    Args:
        name: "audio" or "text".
        inputs: Names of the inputs, in the order in which `forward` receives them.
        spectrogram: Module that computes the features, if the input is `waveform`.
    """

    def __init__(
        self, model: SupCLAPModel, name: str, inputs: Iterable[str], spectrogram: Spectrogram | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(inputs)
        self.embed = getattr(model, _METHODS[name])
        self.spectrogram = spectrogram

    def forward(self, *values: Tensor) -> Tensor:
        """Compute embeddings (B, projection_dim) of audio features, waveforms or token ids."""
        inputs = dict(zip(self.names, values, strict=True))
        if self.spectrogram is not None:
            features = inputs["input_features"] = self.spectrogram(inputs.pop("waveform"))
            if features.ndim == 3:  # CED: no frame is padding
                inputs["audio_attention_mask"] = torch.ones_like(features[:, 0], dtype=torch.int64)
        return self.embed(**inputs, return_dict=True).pooler_output


@dataclass
class Parity:
    """Largest absolute difference between the embeddings of an ONNX graph and of the model, on one batch."""

    graph: str  # "audio" or "text"
    batch: int  # number of recordings or texts
    length: int  # number of frames, samples or tokens
    difference: float


def export_onnx(
    model: SupCLAPModel,
    processor: SupCLAPProcessor,
    folder: str | Path,
    waveforms: bool | None = False,
    fingerprint: str | None = None,
) -> list[Parity]:
    """Export both towers to ONNX and compare the graphs with the model. If a check fails, nothing is written.

    The inputs are those of the processor. Audio encoders of transformers that accept any length, such as wav2vec 2.0,
    have no `audio_attention_mask`, so the clips of a batch must have the same length.

    Args:
        model: Model in any dtype, with towers that `torch.onnx` can export. The graphs are in float32.
        folder: Output folder for `audio.onnx`, `text.onnx`, the processor's files and `onnx.json`. Weights above 1.5 GB
            are stored in a separate file, such as `audio.onnx.data`. `onnx.json` contains the names of the inputs and
            outputs with their axes, the prefix of captions and whether they are plain, the logit scale and bias, and
            the result of `check_parity`.
        waveforms: Whether the spectrogram is part of `audio.onnx`, for CED, CLAP and CLAP2. Its input is then
            `waveform` (B, samples): mono clips of equal length, floats in [-1, 1], at the model's sampling rate. None:
            if the spectrogram can be exported.
        fingerprint: `EmbeddingModel.fingerprint` of the model, with which a search index recognises the export.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        ValueError: A tower or the spectrogram cannot be exported, or a graph differs from the model by more than 1e-4.
    """
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'{error}\nInstall the extra: pip install "supclap[onnx]"') from error
    exact = deepcopy(model).float().cpu().eval()
    exact.set_attn_implementation("eager")

    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Use a temporary folder in the same parent folder, so that finished files can be moved by renaming.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        spectrogram = None
        if waveforms is not False:
            with suppress(*() if waveforms else (ValueError,)):
                spectrogram = Spectrogram(processor.feature_extractor)
        waveforms = spectrogram is not None
        for name, batches in _batches(exact, processor, waveforms).items():
            graph = Graph(exact, name, batches[0], spectrogram if name == "audio" else None)
            _export(graph, batches, Path(scratch) / f"{name}.onnx")
        parity = check_parity(exact, processor, scratch)
        processor.save_pretrained(scratch)
        _describe(exact, processor, parity, fingerprint, Path(scratch) / "onnx.json")
        shutil.copyfile(Path(__file__).with_name("serve.py"), Path(scratch) / "serve.py")

        target.mkdir(exist_ok=True)
        for path in sorted(Path(scratch).iterdir()):
            os.replace(path, target / path.name)
    return parity


def check_parity(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> list[Parity]:
    """Compare exported graphs with the model, on batches of several sizes and lengths.

    The recordings are noise, from the minimum length (CED: 0.15 s) to three windows of the model (CED: 30.4 s), at most
    32 s. Some batches contain one recording, others several of different length. The shortest text is one word, and the
    longest exceeds the tokenizer's limit.

    Raises:
        ValueError: An embedding differs by more than `TOLERANCE`. The message contains the shape of the worst batch.
    """
    import onnxruntime

    parity = []
    cpu = {"providers": ["CPUExecutionProvider"]}
    sessions = {name: onnxruntime.InferenceSession(Path(folder) / f"{name}.onnx", **cpu) for name in _METHODS}
    waveforms = sessions["audio"].get_inputs()[0].name == "waveform"
    for name, batches in _batches(model, processor, waveforms).items():
        session = sessions[name]
        last_axis = max(next(iter(_name_dynamic_axes(batches).values())))
        for inputs in batches:
            values: Mapping[str, Any] = inputs
            # compare with the processor, which computes the spectrogram outside the graph
            if "waveform" in inputs:
                rate_hz = processor.feature_extractor.sampling_rate
                values = processor(audio=list(inputs["waveform"].numpy()), sampling_rate=rate_hz, return_tensors="pt")
            with torch.no_grad():
                expected = getattr(model, _METHODS[name])(**values).pooler_output.numpy()

            (embeds,) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
            sizes = next(iter(inputs.values())).shape
            length = sizes[last_axis] if last_axis else max(sizes[1:])
            parity.append(Parity(name, sizes[0], length, float(np.abs(embeds - expected).max())))

    worst = max(parity, key=lambda each: np.nan_to_num(each.difference, nan=np.inf))
    if not worst.difference <= TOLERANCE:
        shape, error = f"{worst.batch} x {worst.length}", f"{worst.difference:.2e}"
        raise ValueError(f"{worst.graph}.onnx is off by {error} on {shape} inputs; the tolerance is {TOLERANCE:.0e}")
    return parity


def _batches(model: SupCLAPModel, processor: SupCLAPProcessor, waveforms: bool) -> dict[str, list[dict[str, Tensor]]]:
    """Return the inputs to trace (the first batch) and to compare, as `{graph: batches}`."""
    extractor: Any = processor.feature_extractor
    least = min_clip_samples(extractor) / extractor.sampling_rate
    window = max_window_seconds(model.config, extractor) or 10.0
    longest = min(3 * window, _LONGEST_SECONDS)
    lengths = [[1.0, min(1.2 * window, longest)], [least], [window / 2], [0.999 * window], [1.001 * window]]
    lengths += [[least, 1.0, window / 2], [longest, window, 1.0, min(1.5 * window, longest)]]
    audio = []
    for seconds in lengths:
        inputs, equal_seconds = _audio_inputs(processor, seconds), seconds[:1] * len(seconds)
        mask = inputs.get("audio_attention_mask")
        if waveforms:
            inputs = {"waveform": torch.from_numpy(np.stack(_noise(extractor, equal_seconds)))}
        elif model._run_encoder is not None and mask is not None and len(mask[0]) == len(inputs["input_features"][0]):
            # `run_encoder` encodes clips of equal length together, without a mask.
            inputs = {"input_features": _audio_inputs(processor, equal_seconds)["input_features"]}
        audio.append(inputs)

    texts: list[dict[str, Tensor]] = []
    for counts in ([5, 1], [1], [9], [1, 4, 30], [700, 2], [12] * 5):
        batch = processor(text=[" ".join(["rain"] * count) for count in counts], return_tensors="pt")
        texts.append({name: batch[name] for name in ("input_ids", "attention_mask")})
    return {"audio": audio, "text": texts}


def _audio_inputs(processor: SupCLAPProcessor, seconds: Sequence[float]) -> dict[str, Tensor]:
    """Return the audio inputs of noise. A CLAP that is not fused does not read `is_longer`."""
    extractor: Any = processor.feature_extractor
    clips = _noise(extractor, seconds)
    inputs = dict(processor(audio=clips, sampling_rate=extractor.sampling_rate, return_tensors="pt"))
    if inputs["input_features"].shape[1] == 1:
        inputs.pop("is_longer", None)
    return inputs


def _noise(extractor: Any, seconds: Sequence[float]) -> list[np.ndarray]:
    """Return noise of the given durations, float32 (samples,) each."""
    rng = np.random.default_rng(0)
    clips = []
    for duration in seconds:
        length = round(duration * extractor.sampling_rate)
        clips.append(0.1 * rng.standard_normal(length).astype(np.float32))
    return clips


def _export(graph: Graph, batches: Sequence[Mapping[str, Tensor]], path: Path) -> None:
    """Export one graph. The axes in which the batches differ are dynamic."""
    import onnx

    name, inputs = path.stem, batches[0]
    tower = graph.model.audio_model if name == "audio" else graph.model.text_model

    # Hide the exporter's warnings about packages that are not needed, such as torchvision.
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                graph.eval(),
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=[f"{name}_embeds"],
                dynamic_shapes=(tuple(_name_dynamic_axes(batches).values()),),
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(path, external_data=tower.get_memory_footprint() > _LARGEST_FILE_BYTES)
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise ValueError(f"torch.onnx cannot export the {name} tower, a {type(tower).__name__}: {cause}") from error
    finally:
        logging.disable(level)

    # onnxruntime's `quantize_dynamic` compares the shapes of intermediate values with its own, and fails at differences
    exported = onnx.load(path, load_external_data=False)
    del exported.graph.value_info[:]
    onnx.save(exported, path)


def _name_dynamic_axes(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, dict[int, str]]:
    """Return the axes of each input in which the batches differ, with their names: the batch, then the length."""
    length = {"input_ids": "tokens", "waveform": "samples"}.get(next(iter(batches[0])), "frames")
    named = {}
    for name in batches[0]:
        sizes = np.array([batch[name].shape for batch in batches])  # (batches, axes)
        axes = np.flatnonzero((sizes != sizes[0]).any(axis=0)).tolist()
        named[name] = dict(zip(axes, ("batch", length), strict=False))
    return named


def _describe(
    model: SupCLAPModel, processor: SupCLAPProcessor, parity: Sequence[Parity], fingerprint: str | None, path: Path
) -> None:
    import onnx

    extractor: Any = processor.feature_extractor
    rate_hz = extractor.sampling_rate
    tokens, default = processor.language_tokens
    graphs = {}
    for name in _METHODS:
        graph = onnx.load(path.with_name(f"{name}.onnx"), load_external_data=False).graph
        inputs = {}
        for value in graph.input:
            inputs[value.name] = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        graphs[f"{name}.onnx"] = {"inputs": inputs, "output": f"{name}_embeds"}
    facts = {
        **graphs,
        "projection_dim": model.config.projection_dim,
        "fingerprint": fingerprint,
        "sampling_rate_hz": rate_hz,
        "min_samples": min_clip_samples(extractor),
        "chunk_samples": get_chunk_samples(None, rate_hz, 0.0, max_chunk_seconds(extractor)),
        "caption_prefix": processor.caption_prefix,
        "plain_captions": processor.plain_captions,
        "removed_characters": REMOVED_CHARACTERS,
        "language_tokens": tokens,
        "language_token": default,
        "max_tokens": processor.max_tokens,
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": None if model.logit_bias is None else model.logit_bias.item(),
        "parity": list(map(asdict, parity)),
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
