"""Fuzzing with broken inputs: each input is accepted, or rejected with an error that names it.

    python tests/campaigns/fuzz.py --inputs 20000 --folder DIR

These outcomes are faults: an error other than `ValueError` or `OSError`, such as an IndexError; a `TypeError` that is
not raised by this project; an error about a file without the file name; a result that is not finite; a crash; no result
after 20 seconds.
"""

# mypy: disable-error-code="misc"
# mypy infers no type for a lambda with default values from a loop.

import argparse
import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import tarfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import builders
import datasets
import numpy as np
import soundfile
import torch
from valid_rows import validate_row

from modeling_supclap import losses
from modeling_supclap.datasets_scripts import config_keys, find_config, load_builder, load_splits
from modeling_supclap.datasets_scripts.audio import read_audio
from modeling_supclap.datasets_scripts.builders.hf import as_rows
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.metrics.embedding_gap import gap_and_distance
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.recall import retrieval_scores
from modeling_supclap.metrics.zste import zste_scores

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20
FORMATS = {
    "wav": "PCM_16",
    "flac": "PCM_16",
    "ogg": "VORBIS",
    "mp3": "MPEG_LAYER_III",
    "aiff": "PCM_16",
    "au": "PCM_16",
}


class Case(NamedTuple):
    """One broken input.

    Attributes:
        call: Call of the package; its result must be finite.
        name: Text that an error must contain; empty if there is no file or argument to name.
        told: Description for the list of faults.
    """

    call: Callable[[], Any]
    name: str
    told: str


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return the bytes after some are flipped, removed, repeated, replaced or appended."""
    broken = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(broken) or 1)
        length = draw.choice([1, 2, 4, 16, 200])
        kind = draw.randrange(6)
        if kind == 0 and broken:
            broken[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del broken[place : place + length]
        elif kind == 2:
            broken[place:place] = draw.randbytes(length)
        elif kind == 3:
            broken[place : place + length] = bytes([draw.choice([0, 255, 34, 44, 10])]) * length
        elif kind == 4:
            del broken[place:]
        else:
            broken += broken[place : place + length]
    return bytes(broken)


def audio_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield damaged recordings in five formats, read from a file and from memory."""
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)
    originals = {}
    for suffix, subtype in FORMATS.items():
        path = folder / f"original.{suffix}"
        soundfile.write(path, tone, 16000, subtype=subtype)
        originals[suffix] = path.read_bytes()

    while True:
        suffix = draw.choice(list(FORMATS))
        content = damaged(originals[suffix], draw)
        if draw.random() < 0.5:
            path = folder / f"broken.{suffix}"
            path.write_bytes(content)
            yield Case(lambda path=path: read_audio(path)[0], path.name, f"a damaged {suffix} file")
        else:
            yield Case(
                lambda content=content: read_audio(content, name="clip 7")[0], "clip 7", f"damaged {suffix} bytes"
            )


def text_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield invalid captions: empty or very long texts, control characters, lone surrogates, other types."""
    model, processor = builders.supclap_model(), builders.bert_processor()
    model.processor = processor
    pieces = [
        "",
        " ",
        "\x00",
        "\ud800",
        "a" * 5000,
        "👩‍👩‍👧",
        "\u202e",
        "rain",
        "[PAD]",
        "\n",
        "é" * 40,
        "שלום",
        "\ufffe",
    ]
    others: list[Any] = [None, 3, float("nan"), b"rain", ["rain"], {"eng": "rain"}]

    while True:
        texts = ["".join(draw.choices(pieces, k=draw.randint(0, 6))) for _ in range(draw.randint(0, 4))]
        if draw.random() < 0.3:
            texts.insert(draw.randint(0, len(texts)), draw.choice(others))
        language = draw.choice([None, "eng", "xxx", "", ["eng"] * len(texts), ["eng"]])
        told = f"encode_text({[str(text)[:20] for text in texts]}, language={language!r})"
        yield Case(lambda texts=texts, language=language: model.encode_text(texts, language=language), "", told)


def array_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield invalid recordings: arrays that are empty or not finite, or have a wrong rank, type or sampling rate."""
    model = builders.supclap_model()
    model.processor = builders.bert_processor()
    random_numbers = np.random.default_rng(draw.randrange(2**32))
    shapes = [(0,), (1,), (100,), (3000,), (16000,), (2, 8000), (8000, 2), (1, 8000), (2, 2, 800), ()]
    scales = [0.0, 1e-30, 0.1, 1.0, 32767.0, 1e18, np.nan, np.inf]
    dtypes = [np.float32, np.float64, np.int16, np.int32, np.uint8, np.bool_, np.complex64]
    rates = [16000, 44100, 8000, 11127, 0, -1, 1, 10**9, 16000.5, None, "16000"]

    while True:
        shape, scale = draw.choice(shapes), draw.choice(scales)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clip: Any = (scale * random_numbers.normal(size=shape)).astype(draw.choice(dtypes))
        clip = torch.from_numpy(clip) if draw.random() < 0.3 and clip.ndim else clip
        rate = draw.choice(rates)
        told = f"encode_audio of {type(clip).__name__} {clip.dtype} {tuple(clip.shape)} x {scale} at {rate!r}"
        yield Case(lambda clip=clip, rate=rate: model.encode_audio([clip], sampling_rate=rate), "", told)


def loss_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield losses of embeddings, scales and radii with one invalid value, shape or type."""

    def embeddings(*shape: int) -> torch.Tensor:
        if draw.random() < 0.1:
            shape = draw.choice([(3, 8), (4, 3, 8), (0, 8), (8,), (4, 0), (4, 7)])
        rows = torch.randn(shape)
        if draw.random() < 0.05:
            rows = torch.zeros(shape)
        if draw.random() < 0.8 and rows.numel():
            rows = torch.nn.functional.normalize(rows, dim=-1)
        return rows.to(draw.choice([*[torch.float32] * 8, torch.float64, torch.bfloat16, torch.float16, torch.int64]))

    while True:
        a, b, c, several = embeddings(4, 8), embeddings(4, 8), embeddings(4, 8), embeddings(4, 3, 8)
        scale: Any = draw.choice([14.3, 14.3, 14.3, 1.0, 100.0, torch.tensor(10.0), 0.0, -1.0, float("nan")])
        radius = draw.choice(
            [torch.tensor(0.1), torch.tensor(0.1), torch.rand(4), torch.rand(3), torch.tensor(-1.0), 0.1]
        )
        groups = draw.choice([None, None, torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.arange(3)])
        weights = draw.choice([torch.ones(4, 4), torch.ones(4, 4), torch.ones(3, 4), torch.eye(4)])
        calls: dict[str, Callable[[], Any]] = {
            "info_nce": lambda a=a, b=b, s=scale, g=groups: losses.info_nce(a, b, s, g),
            "sigmoid_loss": lambda a=a, b=b, s=scale, g=groups: losses.sigmoid_loss(a, b, s, -10.0, g),
            "support_vector_loss": lambda a=a, b=b, r=radius, s=scale: losses.support_vector_loss(a, b, r, s),
            "kcl_loss": lambda a=a, m=several, s=scale: losses.kcl_loss(a, m, s),
            "cacl_loss": lambda a=a, b=b, c=c, s=scale: losses.cacl_loss(a, b, c, s),
            "temporal_nce": lambda a=a, b=b, s=scale, w=weights: losses.temporal_nce(a, b, s, w),
        }
        name = draw.choice(list(calls))
        shapes = [(tuple(x.shape), str(x.dtype)) for x in (a, b, c, several)]
        told = f"{name} of {shapes}, scale {scale}, radius {radius}, groups {groups}"
        # If the scale is not a positive number, the loss may have any value, but the call must not crash.
        promised = bool(scale > 0)
        yield Case(calls[name] if promised else _without_result(calls[name]), "", told)


def _without_result(call: Callable[[], Any]) -> Callable[[], None]:
    def called() -> None:
        call()

    return called


def metric_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield metrics of similarities, ranks, answers and embeddings with one invalid value, shape or type."""
    numbers = np.random.default_rng(draw.randrange(2**32))

    def matrix(*shape: int) -> np.ndarray:
        values = numbers.normal(size=shape).astype(draw.choice([np.float32, np.float64]))
        for _ in range(draw.choice([0, 0, 0, 1])):
            with np.errstate(over="ignore"):
                values.flat[draw.randrange(values.size)] = draw.choice([np.nan, np.inf, -np.inf, 1e300, 0.0])
        return values

    def odd(value: Any, *others: Any) -> Any:
        return draw.choice(others) if draw.random() < 0.15 else value

    while True:
        rows, columns = draw.randint(1, 5), draw.randint(2, 6)
        similarity = odd(
            matrix(rows, columns), np.empty((0, 5)), np.empty((4, 0)), matrix(5), matrix(2, 3, 4), [[1], [1, 2]]
        )
        relevant = [[draw.randrange(columns)] for _ in range(rows)]
        relevant[0] = odd(relevant[0], [], [columns], [-1], [0, 0], ["a"], [1.5])
        relevant = odd(relevant, relevant[1:], [])
        k = odd([1, 5, 10], 1, [], [0], [-1], 2.5, "5")
        task = odd(draw.choice(["1A", "2A", "2B", "2C", "3A", "3B", "5A"]), "9Z", "")
        labels = [[draw.randrange(columns)] for _ in range(rows)]
        ranks = odd(
            numbers.integers(0, 9, size=(rows, columns)), matrix(rows, columns), [[-1, 0]], [], [[0, 1], [0]], "ranks"
        )
        one, other = (
            odd(matrix(rows, 8), matrix(rows, 7), np.zeros((rows, 8)), np.empty((0, 8)), matrix(8)),
            matrix(rows, 8),
        )
        calls: dict[str, Callable[[], Any]] = {
            "retrieval_scores": lambda v=similarity, r=relevant, k=k: retrieval_scores(v, r, k=k),
            "mean_rank_variance": lambda v=ranks: mean_rank_variance(v),
            "gap_and_distance": lambda v=one, o=other: gap_and_distance(v, o),
            "zste_scores": lambda v=similarity, a=labels, t=task: zste_scores(v, a, t),
        }
        name = draw.choice(list(calls))
        told = f"{name} of {similarity!r}, relevant {relevant}, k {k!r}, task {task!r}, labels {labels}, {ranks!r}"
        yield Case(calls[name], "", told)


def table_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield damaged metadata tables of a folder of recordings."""
    data = folder / "sounds"
    data.mkdir(exist_ok=True)
    for number in range(3):
        soundfile.write(data / f"{number}.wav", 0.1 * np.ones(1600), 16000)
    lines = [
        "file_name,caption,caption_fra,split,label",
        '0.wav,"Rain, loud",Pluie,train,rain',
        "1.wav,Wind,Vent,train,wind",
    ]
    csv = ("\n".join([*lines, "2.wav,Dög,Chien,test,dog"]) + "\n").encode()
    rows = [
        {"file_name": f"{n}.wav", "captions": {"eng": ["Rain"], "fra": "Pluie"}, "split": "train"} for n in range(3)
    ]
    jsonl = "\n".join(json.dumps(row) for row in rows).encode()

    number = 0
    while True:
        suffix, content = draw.choice([("csv", csv), ("jsonl", jsonl)])
        for old in data.glob("metadata.*"):
            old.unlink()
        path = data / f"metadata.{suffix}"
        path.write_bytes(damaged(content, draw))
        number += 1
        yield Case(
            partial(_count_rows, data, folder / "cache" / str(number)), "", f"{path.name}: {path.read_bytes()!r}"
        )


def _count_rows(data: Path, cache: Path) -> int:
    """Return the number of rows that the builder makes from the folder."""
    builder = load_builder("audio_folder", str(cache), data_dir=str(data), languages=["eng", "fra"])
    return sum(len(rows) for rows in builder.as_dataset().values())


def yaml_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield damaged configuration files."""
    from modeling_supclap.recipes import train_supclap
    from modeling_supclap.recipes.arguments import parse_arguments

    content = (Path(train_supclap.__file__).parent / "configs" / "smoke.yaml").read_bytes()
    path = folder / "broken.yaml"
    values = [
        b"[1, 2]",
        b"{a: b}",
        b"null",
        b"yes",
        b"-1",
        b"1e999",
        b"rain",
        b"'",
        b"2026-11-21",
        b"!!python/object:os.system",
    ]

    def parse() -> None:
        parse_arguments(train_supclap.OPTIONS, [str(path), "--output_dir", str(folder)])

    while True:
        if draw.random() < 0.5:
            lines = content.splitlines()
            place = draw.randrange(len(lines))
            key = lines[place].split(b":")[0]
            lines[place] = key + b": " + draw.choice(values)
            broken = b"\n".join(lines)
        else:
            broken = damaged(content, draw)
        path.write_bytes(broken)
        yield Case(parse, "", f"a configuration that ends in {broken[-200:]!r}")


def row_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield datasets with invalid recordings or captions, and options that name other columns."""
    stream = io.BytesIO()
    soundfile.write(stream, 0.1 * np.ones(1600), 16000, format="WAV")
    sounds: list[Any] = [{"bytes": stream.getvalue(), "path": "a.wav"}, {"bytes": b"no sound", "path": "b.wav"}]
    sounds += [{"bytes": None, "path": "nowhere.wav"}, {"bytes": b"", "path": None}, None]
    others: list[list[Any]] = [["a.wav"], [3], [[0.1, 0.2]], [None], [{"array": [0.1], "sampling_rate": 16000}]]
    captions: list[list[Any]] = [["rain"], [" "], [""], [None], [3], [1.5], [["rain", "wind"]], [[]], [["", None]]]
    captions += [[{"eng": "rain"}], [b"rain"], [[["rain"]]], ["\x00"]]
    names = ["audio", "sound", "text", "caption", "caption_fra", "label", "clip_id", ""]

    twins: list[Any] = [{"bytes": bytes([number]), "path": f"{number}.wav"} for number in range(3)]
    while True:
        if draw.random() < 0.3:
            heard = draw.choices(twins, k=draw.randint(1, 6))
            texts = draw.choices(["rain", "wind", " ", "", "dog "], k=len(heard))
            columns = {"audio": heard, "caption": texts}
            yield Case(partial(_grouped_rows, heard, texts), "", f"as_rows of {columns}")
            continue
        count = draw.randint(0, 3)
        columns = {draw.choice(names): draw.choice(captions) * count for _ in range(draw.randint(0, 3))}
        heard = draw.choice([*[[draw.choice(sounds)]] * 4, *others]) * count
        columns[draw.choice(["audio", "audio", "audio", "sound"])] = heard
        options = {
            name: draw.choice([*names, "eng", "xxx"])
            for name in ("audio_column", "caption_column", "caption_language", "label_column")
            if draw.random() < 0.2
        }
        told = f"as_rows of {str(columns)[:200]}, {options}"
        yield Case(partial(_valid_rows, columns, options), "", told)


def _valid_rows(columns: dict[str, list[Any]], options: dict[str, Any]) -> int:
    """Make rows from the columns, check each, and return their number."""
    try:
        table = datasets.Dataset.from_dict(columns)
        if columns.get("audio"):
            table = table.cast_column("audio", datasets.Audio(decode=False))
    except Exception as error:  # `datasets` rejects the columns
        raise ValueError("no dataset") from error
    rows = as_rows(table, **options)
    for row in rows:
        validate_row(row)
        assert not {"3", "1.5"} & {text for texts in row["captions"].values() for text in texts}, "numbers"
    return len(rows)


def _grouped_rows(heard: list[Any], texts: list[str]) -> None:
    """Compare the rows of recordings that repeat with captions grouped by a loop."""
    expected: dict[bytes, list[str]] = {}
    for sound, text in zip(heard, texts, strict=True):
        grouped = expected.setdefault(sound["bytes"], [])
        if text.strip() and text.strip() not in grouped:
            grouped.append(text.strip())
    table = datasets.Dataset.from_dict({"audio": heard, "caption": texts})
    rows = as_rows(table.cast_column("audio", datasets.Audio(decode=False)))
    found = {row["audio"]["bytes"]: row["captions"]["eng"] for row in rows}
    assert found == {content: captions for content, captions in expected.items() if captions}, found


def search_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield invalid queries of an index of three tones: empty texts, bad recordings, wrong vector sizes."""
    from modeling_supclap.evaluation import load_embedding_model
    from modeling_supclap.search.index import build_index
    from modeling_supclap.search.query import Searcher

    sounds = folder / "sounds"
    sounds.mkdir()
    for number in range(3):
        soundfile.write(sounds / f"{number}.wav", builders.tone(300.0 * (number + 1)), 16000)
    (folder / "junk.wav").write_bytes(b"junk")
    own = builders.supclap_model()
    own.processor = builders.bert_processor()
    model = load_embedding_model(own)
    build_index(model, sounds, folder / "index", show_progress_bar=False)
    searcher = Searcher(folder / "index", model)
    dim = own.config.projection_dim

    queries = ["rain", "", " ", "\x00", "\ud800", "a" * 5000, None, 3, ["rain"], float("nan")]
    recordings = [sounds / "0.wav", str(sounds / "1.wav"), folder / "nowhere.wav", folder / "junk.wav", folder, ""]
    vectors = [np.ones(dim), np.zeros(dim), np.full(dim, np.nan), np.ones(dim + 1), np.ones((1, dim)), [], "vector"]
    given: dict[str, list[Any]] = {"query": queries, "audio": recordings, "vector": vectors}
    options: dict[str, list[Any]] = {
        "k": [1, 3, 0, -1, 10**9],
        "within": ["0.wav", "nowhere.wav", "", "'", "' OR 1=1 --"],
        "language": ["eng", "xxx", "", None],
    }
    while True:
        kind = draw.choice(["query", "query", "audio", "vector"])
        asked: dict[str, Any] = {kind: draw.choice(given[kind])}
        asked |= {name: draw.choice(values) for name, values in options.items() if draw.random() < 0.3}
        told = f"search({ {name: str(value)[:60] for name, value in asked.items()} })"
        asked["merge_overlaps"] = draw.random() < 0.5
        yield Case(partial(_check_hits, searcher, asked), "", told)


def _check_hits(searcher: Any, asked: dict[str, Any]) -> list[float]:
    """Compare the hits of a query by vector with the cosines of all windows; return the scores."""
    hits = searcher.search(**asked)
    if "vector" in asked:
        best: list[tuple[float, str, float, float]] = []
        for row in searcher.index.windows.to_arrow().to_pylist():
            if asked.get("within") in (None, row["file"]):
                score = float(np.dot(row["vector"], asked["vector"]))
                best.append((-score, row["file"], row["start_seconds"], row["end_seconds"]))
        best.sort()
        expected: list[tuple[float, str, float, float]] = []
        for window in best:
            overlaps = [other for other in expected if other[1] == window[1] and other[2] < window[3] > window[2]]
            overlaps = [other for other in overlaps if other[3] > window[2]]
            if not (asked["merge_overlaps"] and overlaps):
                expected.append(window)
        scores = [-window[0] for window in expected[: asked.get("k", 10)]]
        np.testing.assert_allclose([hit.score for hit in hits], scores, atol=1e-5)
    return [hit.score for hit in hits]


def secret_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield options with secrets and local folders, nested and as JSON in strings."""
    secret_names = ["hf_token", "hfToken", "token", "X-Api-Key", "apiKey", "api-key", "Authorization", "accessToken"]
    secret_names += ["sas_token", "AccountKey", "aws_secret_access_key", "client secret", "Password", "refresh_token"]
    secret_names += [
        "connection_string",
        "Set-Cookie",
        "sessionToken",
        "privateKey",
        "id_token",
        "Proxy-Authorization",
    ]
    home = str(Path.home() / "hidden")
    places = [f"{home}/x", "~/hidden/x", f"a/../..{home}/x", f"file://{home}/x", "https://me:hidden@host/x?sig=hidden"]
    public = {"model": "laion/clap", "pad_token": "[PAD]", "k": 3, "languages": ["eng", "fra"]}

    def value(depth: int) -> Any:
        kind = draw.randrange(5 if depth else 2)
        if kind == 0:
            return {draw.choice(secret_names): draw.choice(["hidden", ["hidden"], {"a": "hidden"}])}
        if kind == 1:
            return draw.choice(places)
        if kind == 2:
            return {f"{draw.choice(['options', 'headers', places[0]])}": value(depth - 1), **public}
        if kind == 3:
            return [value(depth - 1), "rain"]
        return draw.choice(["", " ", "\n"]) + json.dumps(value(depth - 1), indent=draw.choice([None, 1]))

    while True:
        options = {"storage_options": value(4), **public}
        assert "hidden" in json.dumps(options)  # otherwise the case could not fail
        yield Case(partial(_redacted, options, public), "", f"redact({options})")


def _redacted(options: dict[str, Any], public: dict[str, Any]) -> None:
    """Check that all secrets and folders are removed, and that public options remain."""
    written = json.dumps(redact(options))
    assert "hidden" not in written, written
    assert redact(options).items() >= public.items()


def option_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield options of encoding and localisation, one of them unusual; compare with one clip at a time."""
    model = builders.supclap_model()
    model.processor = builders.bert_processor()
    tones = [builders.tone(300.0 * (number + 1), 4000 * (number + 1)) for number in range(3)]
    alone = [model.encode_audio(tone, sampling_rate=16000) for tone in tones]
    odd: list[Any] = [0, -1, 1.5, float("nan"), float("inf"), 10**9, True]
    options: dict[str, list[Any]] = {
        "batch_size": [1, 2, 3],
        "num_workers": [0, 1, None],
        "chunk_seconds": [None, 1.0, 0.1],
        "on_bad_audio": ["error", "skip"],
        "sampling_rate": [16000, [16000] * 3],
    }
    windows: dict[str, list[Any]] = {"window_seconds": [0.3, 1], "hop_seconds": [0.1, 0.5], "batch_size": [1, 4]}

    def drawn(valid: dict[str, list[Any]]) -> dict[str, Any]:
        chosen = {name: draw.choice(values) for name, values in valid.items() if draw.random() < 0.5}
        if draw.random() < 0.5:
            name = draw.choice(list(valid))
            others: dict[str, list[Any]] = {
                "on_bad_audio": ["no", None],
                "num_workers": [-1, 100],
                "sampling_rate": [*odd, [16000], [None] * 3, "16000"],
            }
            chosen[name] = draw.choice(others.get(name, odd))
        return chosen

    def localized(asked: dict[str, Any]) -> Any:
        scores, starts, ends = model.localize(tones[2], ["rain", "dog"], **asked)
        assert scores.shape == (len(starts), 2)
        assert (ends > starts).all()
        assert ends[-1] == 0.75
        return scores

    while True:
        if draw.random() < 0.3:
            asked = {"sampling_rate": 16000, **drawn(windows)}
            yield Case(partial(localized, asked), "", f"localize with {asked}")
        else:
            asked = {"sampling_rate": 16000, **drawn(options)}
            yield Case(partial(_encoded_as_alone, model, tones, alone, asked), "", f"encode_audio with {asked}")


def _encoded_as_alone(model: Any, tones: list[Any], alone: list[Any], asked: dict[str, Any]) -> np.ndarray:
    """Encode all clips at once; without chunks, compare with each clip encoded alone."""
    embeds: np.ndarray = model.encode_audio(tones, **asked)
    if asked.get("chunk_seconds") in (None, 1.0) and asked["sampling_rate"] in (16000, [16000] * 3):
        np.testing.assert_allclose(embeds, alone, atol=1e-5)
    return embeds[~np.isnan(embeds).all(axis=1)] if asked.get("on_bad_audio") == "skip" else embeds


def stream_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield tar and Parquet files that are damaged or contain values of other types, and shards of a valid stream."""
    stream = io.BytesIO()
    soundfile.write(stream, 0.1 * np.ones(1600), 16000, format="WAV")
    texts: list[Any] = ["rain", ["rain", "wind"], "", [], None, 3, [3], [None], {"eng": "rain"}, [["rain"]], "\ud800"]
    rows = {
        "audio": [{"bytes": bytes([n]), "path": f"{n}.wav"} for n in range(40)],
        "caption": [f"{n}" for n in range(40)],
    }
    table = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    whole = folder / "whole"
    whole.mkdir()
    table.to_parquet(whole / "train.parquet", batch_size=3)
    parquet = (whole / "train.parquet").read_bytes()
    splits = load_splits("hf", data_dir=f"file://{whole}", streaming=True, validation_fraction=0, test_fraction=0)

    while True:
        kind = draw.choice(["tar", "damaged tar", "damaged parquet", "shards"])
        if kind == "shards":
            count = draw.choice([1, 2, 3, 7, 16])
            asked = (draw.choice([0, 1, 5]), draw.randint(0, 3), count, draw.randint(0, 40 // count))
            yield Case(partial(_check_shards, splits["train"], *asked), "", f"seed, epoch, shards, rows read: {asked}")
            continue
        place = folder / "broken"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        about = {
            "text": draw.choice(texts),
            "tag": draw.choice(texts),
            "license": draw.choice(["CC0", 3, None, ["a"]]),
        }
        if kind == "damaged parquet":
            name, content = "hf", damaged(parquet, draw)
            (place / "train.parquet").write_bytes(content)
        else:
            name = "webdataset"
            path = place / "train.tar"
            with tarfile.open(path, "w") as archive:
                note = draw.choice([json.dumps(about), json.dumps(about["text"]), "[" * 20_000, "{", "\x00"]).encode()
                for suffix, part in ((".json", note), (".wav", stream.getvalue())):
                    member = tarfile.TarInfo(f"a{suffix}")
                    member.size = len(part)
                    archive.addfile(member, io.BytesIO(part))
            if kind == "damaged tar":
                path.write_bytes(damaged(path.read_bytes(), draw))
        yield Case(
            partial(_streamed, name, place), "train." if "tar" in kind else "", f"{kind}: {about}, {note[:60]!r}"
        )


def _check_shards(stream: Any, seed: int, epoch: int, count: int, after: int) -> None:
    """Check that the shards read each row of an epoch once, and that a resumed shard reads the remaining rows."""
    read = []
    for process in range(count):
        shard = stream.shuffle(seed).shard(process, count)
        shard.set_epoch(epoch)
        ids = [row["clip_id"] for row in shard]
        shard.load_state_dict({"epoch": epoch, "rows": after})
        assert [row["clip_id"] for row in shard] == ids[after:]
        read += ids
    assert len(read) == len(set(read)) == stream.num_rows // count * count


def _streamed(name: str, place: Path) -> int:
    """Stream a folder and check each row; return their number."""
    count = 0
    extra: dict[str, Any] = {"validation_fraction": 0, "test_fraction": 0} if name == "hf" else {}
    for rows in load_splits(name, data_dir=f"file://{place}", streaming=True, **extra).values():
        for row in rows:
            captions = row["captions"]["eng"]
            if name == "webdataset":  # the captions are these, or parts of them
                assert all(
                    isinstance(text, str) for text in [*captions, *row["labels"], row["license"], row["source"]]
                )
                assert "eng" not in captions, "a key of a mapping is no caption"
            row = {key: row[key] for key in row if key not in ("audio", "clip_index")}
            validate_row({**row, "captions": {"eng": captions or ["none"]}})
            count += 1
    return count


def split_cases(folder: Path, draw: random.Random) -> Iterator[Case]:
    """Yield options of load_splits, one of them unusual, for a folder with a table and for Parquet files."""
    (folder / "sounds").mkdir()
    lines = ["file_name,caption,caption_fra,split,label"]
    for number in range(8):
        soundfile.write(folder / "sounds" / f"{number}.wav", 0.1 * np.ones(1600), 16000)
        lines.append(f"{number}.wav,rain {number},pluie,train,wet")
    (folder / "sounds" / "metadata.csv").write_text("\n".join(lines))
    rows = [
        {"audio": {"bytes": bytes([n]), "path": f"{n}.wav"}, "caption": f"rain {n}", "label": "wet"} for n in range(8)
    ]
    (folder / "hub").mkdir()
    table = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio(decode=False))
    table.to_parquet(folder / "hub" / "train.parquet", batch_size=2)
    texts: list[Any] = ["x", "", "label", "caption", "eng", "fra"]
    lists: list[Any] = [
        [],
        ["x"],
        ["x=eng"],
        ["caption=deu"],
        {"x": "y"},
        {"caption": "deu"},
        "caption",
        ["eng", "xxx"],
    ]

    while True:
        name, place = draw.choice([("audio_folder", "sounds"), ("hf", "hub")])
        config_class = find_config(name)
        keys = sorted(config_keys(config_class) - {"data_dir"})
        config: dict[str, Any] = {"data_dir": str(folder / place)}
        for key in draw.sample(keys, k=draw.choice([1, 1, 2])):
            kind = str(config_class.__dataclass_fields__[key].type)
            odd: list[Any] = lists if "Sequence" in kind or "list" in kind else texts
            config[key] = draw.choice([0, -1, 2, 1.5, 0.3] if "float" in kind else [0, 7] if "int" in kind else odd)
        if name == "hf" and draw.random() < 0.5:
            config["streaming"] = True
        cache = None if "streaming" in config else str(folder / "cache" / str(draw.randrange(10**9)))
        yield Case(partial(_count_splits, name, cache, config), "", f"load_splits({name!r}, {config})")


def _count_splits(name: str, cache: str | None, config: dict[str, Any]) -> int:
    """Load the splits and check that no clip is in two; return the number of rows."""
    ids = []
    for rows in load_splits(name, cache, **config).values():
        for row in rows:
            validate_row({key: row[key] for key in row if key not in ("audio", "clip_index")})
            ids.append(row["clip_id"])
    assert len(ids) == len(set(ids)), "a clip is in two splits"
    return len(ids)


KINDS: dict[str, Callable[[Path, random.Random], Iterator[Case]]] = {
    "audio": audio_cases,
    "arrays": array_cases,
    "texts": text_cases,
    "losses": loss_cases,
    "metrics": metric_cases,
    "tables": table_cases,
    "yaml": yaml_cases,
    "rows": row_cases,
    "search": search_cases,
    "secrets": secret_cases,
    "options": option_cases,
    "streams": stream_cases,
    "splits": split_cases,
}
SLOW = {"tables", "splits"}
"""Kinds with a tenth of the number of inputs."""


def judge(case: Case) -> str:
    """Return "taken" (accepted), "refused" (rejected), or a description of the fault."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        signal.alarm(SECONDS)
        try:
            result = case.call()
        except (ValueError, OSError, SystemExit, ImportError) as error:
            named = case.name in str(error)
            return "refused" if named else f"{type(error).__name__} does not name {case.name!r}: {error}"
        except _TooLongError:
            return f"no answer within {SECONDS} s"
        except BaseException as error:
            if isinstance(error, TypeError) and _is_raised_here(error) and case.name in str(error):
                return "refused"
            if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, (ValueError, OSError)):
                return "refused"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {error}"
        finally:
            signal.alarm(0)
    return "taken" if _is_finite(result) else "the result is not finite"


def _is_raised_here(error: BaseException) -> bool:
    """Return whether a `raise` statement of this project raised the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(ROOT) and (frame.line or "").startswith("raise ")


def _is_finite(result: Any) -> bool:
    if isinstance(result, (dict, list)):
        return all(map(_is_finite, result.values() if isinstance(result, dict) else result))
    if isinstance(result, torch.Tensor):
        return bool(torch.isfinite(result).all())
    if isinstance(result, (np.ndarray, float)):
        return bool(np.isfinite(result).all())
    return True


class _TooLongError(BaseException):
    pass


def _too_long(*_: Any) -> None:
    raise _TooLongError


def campaign(
    inputs: int, folder: Path, seed: int = 0, kinds: list[str] | None = None
) -> tuple[Counter[str], list[str]]:
    """Call the package with broken inputs.

    Args:
        inputs: Approximate total number of inputs. All kinds have the same number, except that slow kinds have a tenth
            of it.
        folder: Empty working folder.
        seed: Random seed of the damage.
        kinds: Kinds to test, keys of `KINDS`. None: all.

    Returns:
        Number of accepted and rejected inputs by kind, and one line for each fault.
    """
    signal.signal(signal.SIGALRM, _too_long)
    silence = os.open(os.devnull, os.O_WRONLY)
    errors = os.dup(2)
    os.dup2(silence, 2)  # the C decoders print a message for each damaged file
    counts, faults = Counter[str](), []
    kinds = kinds or list(KINDS)
    for kind in kinds:
        place = folder / kind
        place.mkdir(parents=True)
        cases = KINDS[kind](place, random.Random(f"{seed} {kind}"))
        share = 0.1 if kind in SLOW else 1.0
        number = math.ceil(share * inputs / (len(kinds) - 0.9 * len(SLOW & set(kinds))))
        for _, case in zip(range(number), cases, strict=False):
            verdict = judge(case)
            counts[f"{kind}: {verdict if verdict in ('taken', 'refused') else 'fault'}"] += 1
            if verdict not in ("taken", "refused"):
                faults.append(f"{kind}: {verdict[:300]}   <- {case.told[:300]}")
    os.dup2(errors, 2)
    return counts, faults


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder to work in")
    arguments = parser.parse_args()

    counts, faults = campaign(arguments.inputs, arguments.folder, arguments.seed, arguments.kinds)
    for what, count in sorted(counts.items()):
        print(f"{count:6d}  {what}")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
