"""Draw the picture of the README: text queries located in a recording.

    make train && .venv/bin/python docs/make_picture.py

The recording is composed of generated sounds that the model was not trained on, over faint noise. Below the spectrogram
each query has one plot: the curve is the similarity of each window, the bar the best window, and the grey area the
sound itself.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts.builders.synthetic import render_clip

MODEL = sys.argv[1] if len(sys.argv) > 1 else "outputs/synthetic"
PICTURE = Path(__file__).parent / "images" / "search.png"
RATE_HZ = 16000
WINDOW_SECONDS, HOP_SECONDS = 2.0, 0.25

# Sounds of the recording in order, as indices of the test split: clips with background noise as faint as the gaps.
SOUNDS = {
    "low_hum": 480,
    "high_bird_chirp": 589,
    "slow_knocks": 521,
    "low_rising_sweep": 542,
    "fast_clicks": 310,
    "low_bell": 456,
    "high_siren": 751,
    "high_hiss": 278,
}
QUERIES = [
    ("low_rising_sweep", "eng", "a low tone sliding upwards"),
    ("high_bird_chirp", "fra", "un gazouillis d'oiseau aigu"),
    ("low_bell", "cat", "una campanada greu"),
    ("high_siren", "deu", "eine hohe Zweitonsirene"),
]


def compose() -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
    """Return the recording (samples,), and the onset and offset of each sound in seconds."""
    rng = np.random.default_rng(0)
    parts, spans, start = [], {}, 0.0
    for label, index in SOUNDS.items():
        gap = 0.0008 * rng.standard_normal(round(rng.uniform(1.0, 3.0) * RATE_HZ))
        clip = render_clip(0, "test", index)
        start += len(gap) / RATE_HZ
        spans[label] = (start + clip.onset_seconds, start + clip.offset_seconds)
        parts += [gap, clip.samples]
        start += len(clip.samples) / RATE_HZ
    return np.concatenate(parts).astype(np.float32), spans


def main() -> None:
    """Embed the windows and the queries, and draw the picture."""
    model = SupCLAPModel.from_pretrained(MODEL)
    recording, spans = compose()
    seconds = len(recording) / RATE_HZ

    onsets = np.arange(0, seconds - WINDOW_SECONDS, HOP_SECONDS)
    windows = []
    for onset in onsets:
        first = round(onset * RATE_HZ)
        windows.append(recording[first : first + round(WINDOW_SECONDS * RATE_HZ)])
    audio_embeds = model.encode_audio(windows, sampling_rate=RATE_HZ)
    text_embeds = model.encode_text([text for _, _, text in QUERIES], language=[code for _, code, _ in QUERIES])
    similarity = model.similarity(audio_embeds, text_embeds)  # (windows, questions)

    heights = [3.2, *[1] * len(QUERIES)]
    figure, axes = plt.subplots(len(heights), sharex=True, figsize=(9.6, 5.2), gridspec_kw={"height_ratios": heights})
    axes[0].specgram(recording + 1e-6, NFFT=512, Fs=RATE_HZ, noverlap=256, cmap="magma", vmin=-105, vmax=-40)
    axes[0].set(ylabel="kHz", yticks=[0, 4000, 8000], yticklabels=["0", "4", "8"])
    axes[0].tick_params(bottom=False)
    for spine in axes[0].spines.values():
        spine.set_visible(False)

    for number, (axis, (label, code, text)) in enumerate(zip(axes[1:], QUERIES, strict=True)):
        color, scores = f"C{number}", similarity[:, number]
        best = onsets[scores.argmax()]
        start, end = spans[label]

        axis.axvspan(start, end, color="0.8", linewidth=0)
        axis.fill_between(onsets + WINDOW_SECONDS / 2, scores.min(), scores, color=color, alpha=0.35, linewidth=0)
        axis.plot(onsets + WINDOW_SECONDS / 2, scores, color=color, linewidth=1)
        top = scores.max() + 0.2 * np.ptp(scores)
        axis.plot([best, best + WINDOW_SECONDS], [top, top], color=color, linewidth=4, solid_capstyle="butt")
        axis.set_title(f"{text}  ({code})", loc="left", fontsize=10, pad=2, color=color)
        axis.set(yticks=[], ylim=(scores.min(), scores.max() + 0.35 * np.ptp(scores)))
        axis.tick_params(bottom=number == len(QUERIES) - 1)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        print(f"{text}: best window {best:.2f} to {best + WINDOW_SECONDS:.2f} s, sound {start:.2f} to {end:.2f} s")

    axes[-1].set(xlabel="seconds in the recording", xlim=(0, seconds))
    figure.tight_layout(h_pad=0.2)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    Image.open(PICTURE).convert("RGB").quantize(128).save(PICTURE, optimize=True)  # a third of the bytes
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
