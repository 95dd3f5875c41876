"""A model with perfect pitch, and recordings that it can tell apart."""

import numpy as np

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import build_index

RATE = 16000
PITCHES = {"low": 250.0, "middle": 1000.0, "high": 3000.0}


class Ear:
    """A model with perfect pitch: a sound is its spectrum in octaves, and a text is the spectrum that it names."""

    sampling_rate = RATE
    fingerprint = "ear"

    def __init__(self):
        self.heard = 0

    def encode_audio(self, waveforms, sampling_rate):
        self.heard += len(waveforms)
        return np.stack([self._spectrum(waveform) for waveform in waveforms])

    def encode_text(self, texts, language):
        return np.stack([self._spectrum(tone(PITCHES.get(text, 8.0), 1.0)) for text in texts])

    @staticmethod
    def _spectrum(waveform):
        power = np.abs(np.fft.rfft(waveform)) ** 2
        octaves = np.log2(np.maximum(np.fft.rfftfreq(len(waveform), 1 / RATE), 1)).astype(int)
        bands = np.bincount(octaves, power, minlength=13)[:13] + 1e-6
        return bands / np.linalg.norm(bands)


def tone(hertz, seconds):
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)


def build(ear, folder, **options):
    model = load_embedding_model(ear)
    return build_index(model, folder, folder.parent / "index", show_progress_bar=False, **options)
