"""Small folders of recordings of distinct tones, as rows of the schema or in the layout of a dataset."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import av
import builders
import numpy as np
import soundfile

ESC50_CLASSES = ("dog", "rain", "rooster", "sneezing")
WORDS = {language: builders.CAPTIONS[language].split() for language in ("eng", "fra")}


def tone_rows(folder: Path, count: int = 8, captions_per_clip: int = 2) -> list[dict[str, Any]]:
    """Write `count` half-second tones; each has its own frequency and its own captions, in words of the tokenizer."""
    rows = []
    for index in range(count):
        path = folder / f"tone_{index}.wav"
        soundfile.write(path, 0.5 * builders.tone(200.0 * (index + 1), 8000), builders.RATE_HZ)
        captions = {
            language: [f"{words[index % 6]} {words[index // 6]} {words[turn]}" for turn in range(captions_per_clip)]
            for language, words in WORDS.items()
        }
        rows.append(
            {
                "clip_id": f"clip{index}",
                "audio_path": str(path),
                "captions": captions,
                "labels": [f"tone_{index % 4}"],
                "source": f"recording{index}",
            }
        )
    return rows


def captioned_folder(folder: Path, count: int, columns: tuple[str, str] = ("file_name", "caption")) -> Path:
    """Write `count` one-second tones with captions in `metadata.csv`, and return the folder."""
    folder.mkdir()
    lines = [",".join(columns)]
    for number in range(count):
        soundfile.write(folder / f"{number}.wav", 0.5 * builders.tone(200.0 * (number + 1)), builders.RATE_HZ)
        lines.append(f"{number}.wav,a tone {number}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


class ESC50Clip(NamedTuple):
    """Clip for the layout of ESC-50: file stem, fold, class, source and samples."""

    stem: str
    fold: int
    label: str
    source: int | str
    samples: np.ndarray
    is_esc10: bool = True


def write_esc50(folder: Path, clips: Iterable[ESC50Clip], rate_hz: int = builders.RATE_HZ) -> Path:
    """Write clips in the layout of ESC-50, and return the folder."""
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / "audio").mkdir(exist_ok=True)
    lines = ["filename,fold,target,category,esc10,src_file,take"]
    for stem, fold, label, source, samples, is_esc10 in clips:
        lines.append(f"{stem}.wav,{fold},0,{label},{is_esc10},{source},A")
        soundfile.write(folder / "audio" / f"{stem}.wav", samples, rate_hz)
    (folder / "meta" / "esc50.csv").write_text("\n".join(lines) + "\n")
    return folder


def esc50_folder(folder: Path, count: int, num_folds: int) -> Path:
    """Write `count` half-second tones for each of four classes in the layout of ESC-50, each from its own source."""
    clips = []
    for target, label in enumerate(ESC50_CLASSES):
        for number in range(count):
            fold, source = number % num_folds + 1, 100 * target + number
            tone = 0.5 * builders.tone(300.0 * (target + 1) + 10 * number, 8000)
            clips.append(ESC50Clip(f"{fold}-{source}-A-{target}", fold, label, source, tone))
    return write_esc50(folder, clips)


def encode_with_ffmpeg(
    samples: np.ndarray, rate_hz: int, form: str, codec: str, layout: str | None = None, **options: str
) -> bytes:
    """Encode samples (channels, samples) with PyAV, in a container such as "mp4" with a codec such as "aac"."""
    encoded = io.BytesIO()
    layout = layout or {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[len(samples)]
    with av.open(encoded, "w", format=form, options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate_hz, layout=layout)
        if codec.startswith("wma"):
            stream.bit_rate = 128_000
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples.T, dtype=np.float32).reshape(1, -1), "flt", layout
        )
        frame.sample_rate, frame.pts = rate_hz, 0  # without a time, MP4 lacks the priming of AAC
        resampler = av.AudioResampler(stream.format, layout, rate_hz, stream.codec_context.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return encoded.getvalue()
