"""Models that hear without learning: they read the tones of `recordings.tone_rows` off the spectrum."""

import re

import numpy as np

CLASSES = 4  # labels tone_0 to tone_3; clip i has label tone_{i % 4}
TONES = 8


class Listener:
    """Embeds recordings by the tones in them and texts by the tones that they name, in the order in which they do.

    A vector has a part for each tone, one for each pair of classes in sequence, and one for each pair at once.

    Args:
        captions: The tone that each caption is about.
        hears_order: Whether sequence and overlap are heard at all.
        scale: The norm of the embeddings.
    """

    sampling_rate = 16000
    fingerprint = "listener"

    def __init__(self, captions=None, hears_order=True, scale=1.0):
        self.captions = captions or {}
        self.hears_order = hears_order
        self.scale = scale
        self.calls = []

    def encode_audio(self, waveforms, sampling_rate):
        self.calls.append(("audio", len(waveforms), sampling_rate))
        return self._unit([self._hear(waveform) for waveform in waveforms])

    def encode_text(self, texts, language):
        self.calls.append(("text", len(texts), language))
        return self._unit([self._read(text) for text in texts])

    def _unit(self, vectors):
        vectors = np.array(vectors, dtype=np.float32)
        return self.scale * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _hear(self, waveform):
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

    def _read(self, text):
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
        order = self.hears_order * np.concatenate([sequence.ravel(), overlap.ravel()])
        return np.concatenate([tones, order, [1e-3]])  # the last keeps a vector of nothing from being zero


def parts():
    """The three empty parts of a vector."""
    return np.zeros(TONES), np.zeros((CLASSES, CLASSES)), np.zeros((CLASSES, CLASSES))


def loud_tones(waveform):
    """Which of the tones at 200, 400, ... Hz sound, each within 20 dB of the loudest."""
    time = np.arange(len(waveform)) / Listener.sampling_rate
    strengths = [abs(np.mean(waveform * np.exp(-2j * np.pi * 200 * (tone + 1) * time))) for tone in range(TONES)]
    return {tone for tone, strength in enumerate(strengths) if strength > 0.1 * max(strengths)}


def caption_tones(rows, language="eng"):
    """The tone that each caption of `tone_rows` is about."""
    return {text: tone for tone, row in enumerate(rows) for text in row["captions"][language]}
