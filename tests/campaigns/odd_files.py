"""Odd recordings made with SoX, espeak-ng, flac, lame and FFmpeg, compared with FFmpeg's own decoding.

    python tests/campaigns/odd_files.py --folder .cache/campaigns/odd_files

Each file is read by path and by bytes. The samples must be those of FFmpeg (its decoders of MP3 and Opus differ by a
delay or by rounding), with the same rate and length, or the file must be refused with its name. Without FFmpeg the
campaign is skipped; files of other missing tools are left out.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from modeling_supclap.datasets_scripts.audio import BadAudioError, read_audio

DELAYS = (0, 529, 1105, 1152, -529, -1105, -1152)  # of decoders of MP3, in samples
LOSSY = (".mp3", ".mp2", ".ogg", ".opus", ".spx", ".webm", ".mka")
SECONDS_TOLERANCE = 0.11


def run(*command: object) -> bytes:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True).stdout


def make_sources(folder: Path) -> Iterator[Path]:
    """Write WAV files of several rates and channels, with a chirp and noise."""
    random = np.random.default_rng(0)
    seconds = 1.3
    for rate_hz, channels in itertools.product((8000, 16_000, 22_050, 44_100, 48_000), (1, 2)):
        times = np.arange(round(seconds * rate_hz)) / rate_hz
        chirp = 0.4 * np.sin(2 * np.pi * (200 + 300 * times) * times)[:, None]
        samples = chirp + 0.02 * random.standard_normal((len(times), channels))
        path = folder / f"{rate_hz}_{channels}.wav"
        header = ["-f", "s16le", "-ar", rate_hz, "-ac", channels, "-i", "-"]
        pcm = (samples * 32767).astype("<i2").tobytes()
        command = ["ffmpeg", "-v", "error", "-y", *header, path]
        subprocess.run(list(map(str, command)), input=pcm, check=True)
        yield path


def make_files(folder: Path) -> Iterator[Path]:
    """Write the odd files."""
    has = {tool for tool in ("sox", "espeak-ng", "flac", "lame") if shutil.which(tool)}
    encoders = {
        "flac": "flac", "mp3": "libmp3lame", "ogg": "libvorbis", "opus": "libopus", "m4a": "aac", "webm": "libopus",
        "mka": "flac", "wma": "wmav2", "ac3": "ac3", "ts": "aac", "wv": "wavpack", "tta": "tta", "mov": "pcm_s24le",
        "aiff": "pcm_s16be", "au": "pcm_mulaw", "w64": "pcm_s32le", "caf": "pcm_f32le", "avi": "mp3", "mp2": "mp2",
    }  # fmt: skip
    for source in make_sources(folder):
        name, content = source.stem, source.read_bytes()
        outputs: dict[str, bytes] = {}
        for suffix, codec in encoders.items():
            target = folder / f"{name}.{suffix}"
            command = ["ffmpeg", "-v", "error", "-y", "-i", source, "-c:a", codec, target]
            if subprocess.run(list(map(str, command)), capture_output=True).returncode == 0:
                yield target
            else:  # the codec lacks this rate
                target.unlink(missing_ok=True)
        if "sox" in has:
            for kind in ("wav", "aiff", "au"):
                outputs[f"sox_pipe.{kind}"] = run("sox", source, "-t", kind, "-")
        if "flac" in has:
            outputs["ogg_flac.oga"] = run("flac", "--ogg", "-s", "-c", source)
        if "lame" in has:
            for options in (["-V", "9", "-t"], ["-b", "64", "-t"], ["-V", "2"]):
                mp3 = run("lame", "--quiet", *options, source, "-")
                label = "".join(options).replace("-", "")
                outputs |= {
                    f"{label}.mp3": mp3,
                    f"{label}_zeros.mp3": bytes(500) + mp3,
                    f"{label}_joined.mp3": mp3 + mp3,
                }
        start = content.index(b"data") + 4
        for size in (0x7FFFF000, 0x80000000, 0xFFFFFFFF, 0xFFFFF000):
            outputs[f"size_{size:x}.wav"] = content[:start] + size.to_bytes(4, "little") + content[start + 4 :]
        for suffix, changed in outputs.items():
            path = folder / f"{name}_{suffix}"
            path.write_bytes(changed)
            yield path
    if "espeak-ng" in has:
        path = folder / "espeak.wav"
        path.write_bytes(run("espeak-ng", "--stdout", "a dog barks"))
        yield path


def compare(path: Path) -> str:
    """Return "equal", "refused", or how the samples differ from those of FFmpeg."""
    try:
        waveform, rate_hz = read_audio(path)
        from_bytes, _ = read_audio(path.read_bytes(), name=path.name)
    except BadAudioError as error:
        return "refused" if path.name in str(error) else f"refused without a name: {error}"
    if not np.array_equal(waveform, from_bytes):
        return "other samples by bytes"

    decoded = run("ffmpeg", "-v", "error", "-i", path, "-map", "0:a:0", "-ar", rate_hz, "-f", "f32le", "-")
    about = run("ffprobe", "-v", "error", "-select_streams", "a:0", "-show_entries", "stream=channels", "-of",
                "csv=p=0", path).decode()  # fmt: skip
    channels = int(about.split()[0].strip(","))
    expected = np.frombuffer(decoded, np.float32).reshape(-1, channels).mean(axis=1)
    if abs(len(waveform) - len(expected)) > SECONDS_TOLERANCE * rate_hz:
        return f"{len(waveform)} samples instead of {len(expected)}"
    differences = []
    for delay in DELAYS if path.suffix in LOSSY else (0,):
        first, second = waveform[max(0, delay) :], expected[max(0, -delay) :]
        length = min(len(first), len(second)) - 1200  # the last frame can be padded
        differences.append(float(np.abs(first[:length] - second[:length]).mean()) if length > 0 else 0.0)
    worst = 0.02 if path.suffix in LOSSY else 1e-3
    return "equal" if min(differences) < worst else f"differs by {min(differences):.4f}"


def main() -> None:
    """Make the files, compare them, and exit with 1 if one is read incorrectly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    if not shutil.which("ffmpeg") or not shutil.which("ffprobe"):
        print("odd files: skipped, because ffmpeg is not installed")
        return
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()
    wrong = []
    for path in make_files(folder):
        outcome = compare(path)
        outcomes[outcome if outcome in ("equal", "refused") else "wrong"] += 1
        if outcome != "equal":
            wrong.append(f"{path.name}: {outcome}")
    print(f"odd files: {sum(outcomes.values())} made, {dict(outcomes)}", *wrong, sep="\n  ")
    sys.exit(1 if outcomes["wrong"] else 0)


if __name__ == "__main__":
    main()
