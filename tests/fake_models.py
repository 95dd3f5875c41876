"""Fake embedding models with known results: they detect tones in the spectrum, and their names in texts."""

import re

import numpy as np

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.search import build_index

RATE = 16000
PITCHES = {"low": 250.0, "middle": 1000.0, "high": 3000.0}
CLASSES = 4  # labels tone_0 to tone_3; clip i has label tone_{i % 4}
TONES = 8


class ToneModel:
    """Model that embeds recordings by their tones, and texts by the tones in them, in order.

    A vector has one value per tone, one per pair of classes in sequence, and one per pair of overlapping classes.

    Args:
        captions: Tone of each caption.
        encodes_order: Whether the embeddings contain sequence and overlap.
        scale: Norm of the embeddings.
    """

    sampling_rate = 16000
    fingerprint = "tone"

    def __init__(self, captions=None, encodes_order=True, scale=1.0):
        self.captions = captions or {}
        self.encodes_order = encodes_order
        self.scale = scale
        self.calls = []

    def encode_audio(self, waveforms, sampling_rate):
        self.calls.append(("audio", len(waveforms), sampling_rate))
        return self._unit([self._encode_waveform(waveform) for waveform in waveforms])

    def encode_text(self, texts, language):
        self.calls.append(("text", len(texts), language))
        return self._unit([self._encode_one_text(text) for text in texts])

    def _unit(self, vectors):
        vectors = np.array(vectors, dtype=np.float32)
        return self.scale * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _encode_waveform(self, waveform):
        half = len(waveform) // 2
        first, second = (loud_tones(part) for part in (waveform[:half], waveform[half:]))
        tones, sequence, overlap = parts()
        for tone in first | second:
            tones[tone] = 1
        if first == second and len(first) == 2:
            one, other = (tone % CLASSES for tone in first)
            overlap[one, other] = overlap[other, one] = 1
        elif first and second and first != second:
            sequence[min(first) % CLASSES, min(second) % CLASSES] = 1
        return self._joined(tones, sequence, overlap)

    def _encode_one_text(self, text):
        tones, sequence, overlap = parts()
        named = [int(digit) for digit in re.findall(r"[Tt]one (\d)", text)]
        if text in self.captions:
            tones[self.captions[text]] = 1
        elif " before " in text:
            sequence[named[0], named[1]] = 1
        elif " while " in text or "Simultaneous" in text:
            overlap[named[0], named[1]] = overlap[named[1], named[0]] = 1
        elif "first sound" in text:
            sequence[named[0]] = 1
        elif "second sound" in text:
            sequence[:, named[0]] = 1
        else:
            tones[named[0] :: CLASSES] = 1
        return self._joined(tones, sequence, overlap)

    def _joined(self, tones, sequence, overlap):
        order = self.encodes_order * np.concatenate([sequence.ravel(), overlap.ravel()])
        return np.concatenate([tones, order, [1e-3]])  # the last value avoids zero vectors


def parts():
    """Return the three parts of a vector, all zero."""
    return np.zeros(TONES), np.zeros((CLASSES, CLASSES)), np.zeros((CLASSES, CLASSES))


def loud_tones(waveform):
    """Return the indices of the tones (200, 400, ... Hz) within 20 dB of the loudest."""
    time = np.arange(len(waveform)) / ToneModel.sampling_rate
    strengths = [abs(np.mean(waveform * np.exp(-2j * np.pi * 200 * (tone + 1) * time))) for tone in range(TONES)]
    return {tone for tone, strength in enumerate(strengths) if strength > 0.1 * max(strengths)}


def caption_tones(rows, language="eng"):
    """Map each caption of `tone_rows` to its tone."""
    return {text: tone for tone, row in enumerate(rows) for text in row["captions"][language]}


class PitchModel:
    """Model that embeds a sound as its octave spectrum, and a text as the spectrum of the pitch in it."""

    sampling_rate = RATE
    fingerprint = "pitch"

    def __init__(self):
        self.num_encoded = 0

    def encode_audio(self, waveforms, sampling_rate):
        self.num_encoded += len(waveforms)
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


def build(fake_model, folder, **options):
    model = load_embedding_model(fake_model)
    return build_index(model, folder, folder.parent / "index", show_progress_bar=False, **options)
