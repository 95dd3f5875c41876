"""Embed texts and recordings with an exported model. Needs numpy, onnxruntime, soundfile and tokenizers, but not torch.

    python serve.py "a dog barks" dog.wav rain.flac   # similarity of the text with each recording

`supclap export` writes this file to its folder. In Python: `Exported("folder").encode_text(["a dog barks"])`.
"""

import json
import sys
import unicodedata
from functools import cached_property
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


class Exported:
    """Model in a folder of `supclap export`. A graph is loaded when it is first used."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.name = Path(folder), str(folder)
        self.facts = json.loads((self.folder / "onnx.json").read_text(encoding="utf-8"))
        self.sampling_rate_hz, self.fingerprint = self.facts["sampling_rate_hz"], self.facts["fingerprint"]
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(self.facts["max_tokens"])

    @cached_property
    def audio(self) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(self.folder / "audio.onnx")

    @cached_property
    def text(self) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(self.folder / "text.onnx")

    def encode_text(self, texts: list[str], language: str = "eng", batch_size: int = 1) -> np.ndarray:
        """Embed texts, (N, d) with unit norm. They are computed one by one, without padding."""
        tokens = self.facts["language_tokens"]
        if tokens and language not in tokens:
            raise ValueError(f"the model has no language {language!r}; pass one of {list(tokens)}")
        embeds = []
        for text in texts:
            caption = unicodedata.normalize("NFC", text)
            if self.facts["plain_captions"]:
                for mark in self.facts["removed_characters"]:
                    caption = caption.replace(mark, " ")
                caption = " ".join(caption.lower().split())
            if not caption.strip():
                raise ValueError(f"the text {text!r} is blank")
            ids = np.array([self.tokenizer.encode(self.facts["caption_prefix"] + caption.strip()).ids])
            if tokens:
                ids[ids == self.facts["language_token"]] = tokens[language]
            embeds.append(self.text.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0])
        return np.stack(embeds)

    def encode_files(self, files: list[str]) -> np.ndarray:
        """Embed recordings, (N, d) with unit norm, as the mean over the chunks of long ones."""
        import soundfile  # texts do not need it

        if list(self.facts["audio.onnx"]["inputs"]) != ["waveform"]:
            raise ValueError("audio.onnx takes features, not waveforms; export with --waveforms")
        embeds, size = [], self.facts["chunk_samples"]
        for file in files:
            samples, rate_hz = soundfile.read(file, dtype="float32", always_2d=True)
            waveform = resample(samples.mean(axis=1), rate_hz, self.sampling_rate_hz)
            if len(waveform) < self.facts["min_samples"] or not waveform.any():
                raise ValueError(f"{file} is silent, or shorter than {self.facts['min_samples']} samples")
            starts = list(range(0, max(len(waveform) - size, 0) + 1, size))
            tail = len(waveform) - starts[-1] - size
            if tail >= min(size / 100, self.sampling_rate_hz // 10):
                starts.append(len(waveform) - size)
            chunks = [self.audio.run(None, {"waveform": waveform[None, start : start + size]})[0] for start in starts]
            mean = np.concatenate(chunks).mean(axis=0)
            embeds.append(mean / np.linalg.norm(mean))
        return np.stack(embeds)


def resample(waveform: np.ndarray, rate_hz: int, target_hz: int) -> np.ndarray:
    """Convert a waveform (samples,) to another sampling rate by its Fourier transform."""
    if rate_hz == target_hz:
        return waveform
    length = round(len(waveform) * target_hz / rate_hz)
    spectrum = np.fft.rfft(waveform)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * length / len(waveform)).astype(np.float32)


if __name__ == "__main__":
    exported = Exported(Path(__file__).parent)
    scores = exported.encode_files(sys.argv[2:]) @ exported.encode_text(sys.argv[1:2])[0]
    for path, score in zip(sys.argv[2:], scores, strict=True):
        print(f"{score:.3f}  {path}")
