"""At which second is a sound? `model.localize` beside the windows of the search, on real events at known seconds.

    accelerate launch recipes/train_supclap.py recipes/configs/esc10.yaml --data_dir ESC-10 --output_dir outputs/esc10
    OMP_NUM_THREADS=1 python benchmarks/bench_localize.py outputs/esc10 --data_dir ESC-10

Each recording is two minutes of clips of other classes, one after the other, with one event of a class in it; all are
of the fold that the training held out. The event is a whole clip of 5 s, or its loudest second. The class is asked for
in words, and the middle of the best window is the answer: a hit if it lies within the event. Times are those of one
recording, in turns, the least of several rounds, as multiples of one pass over it in chunks of 5 s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rows import Row, compare, take_turns
from transformers import BertConfig, RobertaTokenizer

from modeling_supclap import CEDConfig, CEDFeatureExtractor, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.search.index import window_starts

SECONDS = 120
FADE_SECONDS = 0.05


class Recording(NamedTuple):
    """A recording, what is in it, and where."""

    waveform: np.ndarray
    text: str
    start_seconds: float
    end_seconds: float


def make_recordings(rows: Any, rate_hz: int, each: int, event_seconds: float) -> list[Recording]:
    """`each` recordings for each class."""
    generator = np.random.default_rng(0)
    clips: dict[str, list[np.ndarray]] = {}
    texts = {}
    for row in rows:
        (label,) = row["labels"]
        clips.setdefault(label, []).append(read_row(row, rate_hz))
        texts[label] = row["captions"]["eng"][0]

    made = []
    for label in sorted(clips):
        others = [clip for other in clips if other != label for clip in clips[other]]
        for place in generator.permutation(len(clips[label]))[:each]:
            order = generator.permutation(len(others))
            background = np.concatenate([others[index] for index in order])[: SECONDS * rate_hz].copy()

            event = loudest(clips[label][place], round(event_seconds * rate_hz))
            fade = np.minimum(
                1, np.minimum(np.arange(len(event)), np.arange(len(event))[::-1]) / FADE_SECONDS / rate_hz
            )
            start = int(generator.integers(len(background) - len(event)))
            span = slice(start, start + len(event))
            background[span] = fade * event + (1 - fade) * background[span]
            made.append(Recording(background, texts[label], start / rate_hz, start / rate_hz + len(event) / rate_hz))
    return made


def loudest(clip: np.ndarray, samples: int) -> np.ndarray:
    """The part of a clip with the most energy."""
    energy = np.concatenate([[0.0], np.cumsum(clip.astype(np.float64) ** 2)])
    samples = min(samples, len(clip))
    start = int((energy[samples:] - energy[:-samples]).argmax())
    return clip[start : start + samples]


def search_windows(
    model: SupCLAPModel, waveform: np.ndarray, text: str, window_seconds: float, hop_seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    """The middle of each window in seconds and its score, as the search has them: each window is heard for itself."""
    rate_hz = model.processor.feature_extractor.sampling_rate
    window = round(window_seconds * rate_hz)
    starts = window_starts(len(waveform), window, round(hop_seconds * rate_hz))
    embeds = model.encode_audio([waveform[start : start + window] for start in starts], sampling_rate=rate_hz)
    return (np.array(starts) + window / 2) / rate_hz, embeds @ model.encode_text(text, language="eng")


def localized(
    model: SupCLAPModel, waveform: np.ndarray, text: str, window_seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    """The same from `model.localize`."""
    rate_hz = model.processor.feature_extractor.sampling_rate
    found = model.localize(waveform, text, language="eng", sampling_rate=rate_hz, window_seconds=window_seconds)
    return (found.start_seconds + found.end_seconds) / 2, found.scores[:, 0]


def measure_hits(find: Callable[..., Any], recordings: list[Recording]) -> tuple[float, float]:
    """The share of hits, and the median distance from the middle of the event in seconds."""
    hits, distances = [], []
    for recording in recordings:
        middles, scores = find(recording.waveform, recording.text)
        found = middles[scores.argmax()]
        hits.append(recording.start_seconds <= found <= recording.end_seconds)
        distances.append(abs(found - (recording.start_seconds + recording.end_seconds) / 2))
    return float(np.mean(hits)), float(np.median(distances))


def measure(rounds: int = 3, seconds: float = 30.0) -> list[Row]:
    """The times alone: a CED-tiny of random weights hears noise as fast as anything else."""
    audio = CEDConfig(embed_dim=192, depth=12, num_heads=3)
    text = BertConfig(vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=64)).eval()
    tokenizer = RobertaTokenizer().train_new_from_iterator(["a dog barks"], 300, show_progress=False)
    model.processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
    waveform = 0.1 * np.random.default_rng(0).standard_normal(round(16000 * seconds)).astype(np.float32)

    ways: dict[str, Callable[..., Any]] = {
        "localize, windows of 1 s every 0.5 s": partial(localized, model, window_seconds=1.0),
        "each window for itself": partial(search_windows, model, window_seconds=1.0, hop_seconds=0.5),
    }
    works = {name: partial(way, waveform, "a dog barks") for name, way in ways.items()}
    works["one pass"] = partial(model.encode_audio, waveform, sampling_rate=16000, chunk_seconds=5.0)
    times = take_turns(works, rounds)
    return [Row("localize", f"{name} / one pass over it", *compare(times, name, "one pass")) for name in ways]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a model that was trained on the other folds")
    parser.add_argument("--data_dir", required=True, help="ESC-10 or ESC-50")
    parser.add_argument("--test_fold", type=int, default=4, help="the fold that was held out (default: 4)")
    parser.add_argument("--each", type=int, default=4, help="recordings of each class (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="of timing (default: 5)")
    args = parser.parse_args()

    model = SupCLAPModel.from_pretrained(args.model)
    untrained = SupCLAPModel(model.config).eval()
    untrained.processor = model.processor
    rate_hz = model.processor.feature_extractor.sampling_rate
    rows = load_splits("esc50", data_dir=args.data_dir, test_fold=args.test_fold)["test"]

    ways: dict[str, Callable[..., Any]] = {}
    for window in (1.0, 2.0, 5.0):
        ways[f"localize, windows of {window:g} s every 0.5 s"] = partial(localized, model, window_seconds=window)
    for window in (5.0, 1.0):
        name = f"each window for itself, {window:g} s every {window / 2:g} s"
        ways[name] = partial(search_windows, model, window_seconds=window, hop_seconds=window / 2)
    ways["localize, random weights, windows of 1 s"] = partial(localized, untrained, window_seconds=1.0)

    sets = {seconds: make_recordings(rows, rate_hz, args.each, seconds) for seconds in (5.0, 1.0)}
    first = sets[5.0][0]
    works = {name: partial(way, first.waveform, first.text) for name, way in ways.items()}
    works["one pass"] = partial(model.encode_audio, first.waveform, sampling_rate=rate_hz, chunk_seconds=5.0)
    best = {name: min(seconds) for name, seconds in take_turns(works, args.rounds).items()}
    print(
        f"{len(sets[5.0])} recordings of {SECONDS} s, an event each; hits in percent, median distance of the middles\n"
    )
    print("| | 5 s event: hit | distance | 1 s event: hit | distance | time / one pass |\n|---|" + "---:|" * 5)
    for name, way in ways.items():
        cells = []
        for recordings in sets.values():
            share, distance = measure_hits(way, recordings)
            cells += [f"{100 * share:.0f}", f"{distance:.2f} s"]
        print(f"| {name} | {' | '.join(cells)} | {best[name] / best['one pass']:.2f} |", flush=True)
    chance = [f"{100 * seconds / SECONDS:.1f} | {SECONDS / 4} s" for seconds in sets]
    print(f"| a place drawn at random | {' | '.join(chance)} | |")


if __name__ == "__main__":
    main()
