"""An evaluation receipt as one self-contained page for people: `report.html`.

Everything on the page is computed from the receipt (`results.json` and `outcomes.npz`); nothing is embedded or scored
again. Pictures are SVG, recordings are inlined as MP3, so the page can be mailed.
"""

from __future__ import annotations

import base64
import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets_scripts.audio import BadAudioError, read_row
from datasets_scripts.schema import without_audio

from .receipts import Receipt, paper_results
from .report_figures import figures

RECALLS = ("R@1", "R@5", "R@10", "mAP@10")
DISTANCES = ("Gap", "Dis")
DIRECTIONS = {"t2a": "text to audio", "a2t": "audio to text"}
MAX_CLASSES_DRAWN = 100
# Of the datasets whose classes the papers name: what was measured on fewer is not comparable.
NUM_CLASSES = {"esc50": 50, "urbansound8k": 10, "vggsound": 309}
CLIP_SECONDS = 10.0
CLIP_RATE_HZ = 16000


class Cell(NamedTuple):
    """A number of a table as text, and its interval as text; empty where there is none."""

    value: str
    interval: str = ""


class Line(NamedTuple):
    """One row of a table: what it is (`ours`, `chance` or `paper`), its name, and a cell for each column."""

    kind: str
    name: str
    cells: list[Cell]


class Table(NamedTuple):
    """Our scores, the chance level, and what the papers print for the same dataset."""

    columns: list[str]
    lines: list[Line]


class Bar(NamedTuple):
    """A score to draw, with the ends of its interval and the chance level, all as fractions or None."""

    name: str
    value: float
    low: float | None
    high: float | None
    chance: float | None


class Case(NamedTuple):
    """A caption and the rank of its clip in each language, 0 being the best [A tables 9 and 10]."""

    text: str
    ranks: list[int]


class Sample(NamedTuple):
    """A query and what it found: the clip that was right, its rank from 0, and the clip found first instead, if any."""

    text: str
    rank: int
    right: str
    found: str | None
    found_name: str


def write_report(receipt: Receipt | str | Path, path: str | Path, rows: Any = None, num_samples: int = 4) -> Path:
    """Writes the page for a receipt, whole or not at all.

    Args:
        receipt: what `evaluation` returned, or the folder or `results.json` it was saved to.
        path: the HTML file.
        rows: what was evaluated, where the recordings are in the rows and not in files of their own.
        num_samples: how many hits and how many misses to make listenable, at most.

    Returns:
        The path.

    Raises:
        FileNotFoundError: there is no receipt.
    """
    page = render_report(receipt if isinstance(receipt, Receipt) else Receipt.load(receipt), rows, num_samples)
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, target)
    return target


def render_report(receipt: Receipt, rows: Any = None, num_samples: int = 4) -> str:
    """The page as a string; arguments as `write_report`. The same receipt gives the same page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("modeling_supclap.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        model=receipt.content["model"],
        protocol=receipt.protocol,
        versions=receipt.content["versions"],
        run=receipt.content["run"],
        directions=DIRECTIONS,
        tables=dict(_tables(receipt)),
        bars=_recall_bars(receipt),
        class_bars=_class_bars(receipt),
        confusion=_confusion(receipt),
        figures=dict(figures(receipt)),
        cases=_cases(receipt),
        samples=_samples(receipt, rows, num_samples),
    )


def _tables(receipt: Receipt) -> Iterator[tuple[str, Table]]:
    makers = {
        "retrieval": _retrieval_table,
        "multilingual": _multilingual_table,
        "distances": _distance_table,
        "zero_shot": _zero_shot_table,
        "zste": _zste_table,
    }
    for name, maker in makers.items():
        task = "multilingual" if name == "distances" else name
        if task in receipt.scores:
            yield name, maker(receipt, _papers(receipt.protocol, task))


def _retrieval_table(receipt: Receipt, papers: Sequence[Mapping[str, Any]]) -> Table:
    scores = receipt.scores["retrieval"]
    columns = [(direction, metric) for direction in DIRECTIONS for metric in RECALLS]
    lines = [
        Line("ours", language, [_percent(own[direction][metric]) for direction, metric in columns])
        for language, own in scores.items()
    ]
    if means := receipt.scores.get("multilingual"):
        lines.append(Line("ours", "mean", [_percent(means[direction][metric]) for direction, metric in columns]))
    first = next(iter(scores.values()))
    lines.append(_chance([first[direction][metric] for direction, metric in columns]))
    lines += _paper_lines([entry for entry in papers if entry["language"] in scores], columns, _place)
    return Table(_titles(columns), lines)


def _multilingual_table(receipt: Receipt, papers: Sequence[Mapping[str, Any]]) -> Table:
    scores = receipt.scores["multilingual"]
    columns = [(direction, metric) for direction in DIRECTIONS for metric in RECALLS]
    own = [_percent(scores[direction][metric]) for direction, metric in columns]
    lines = [Line("ours", "this model", [_plain(scores["MRV"]), *own])]
    lines += _paper_lines(papers, [(None, "MRV"), *columns], _place, [_plain] + [_percent] * len(columns))
    return Table(["MRV", *_titles(columns)], lines)


def _distance_table(receipt: Receipt, papers: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each language, two columns for each model."""
    scores = receipt.scores["multilingual"]
    models = {"this model": {(kind, name): value for kind in DISTANCES for name, value in scores[kind].items()}}
    for entry in papers:
        if entry["metric"] in DISTANCES:
            name = f"{entry['model']}, {entry['paper']} table {entry['table']}"
            models.setdefault(name, {})[entry["metric"], entry["language"]] = entry["value"]
    lines = [
        Line("ours", language, [_plain(own.get((kind, language))) for own in models.values() for kind in DISTANCES])
        for language in scores["Gap"]
    ]
    return Table([f"{name}: {kind}" for name in models for kind in DISTANCES], lines)


def _zero_shot_table(receipt: Receipt, papers: Sequence[Mapping[str, Any]]) -> Table:
    scores = receipt.scores["zero_shot"]
    titles = {"top1": "top 1", "top5": "top 5", "mean_per_class": "mean of classes", "mean_over_folds": "mean of folds"}
    metrics = [name for name in titles if any(name in own for sets in scores.values() for own in sets.values())]
    lines = [
        Line("ours", f"{language}, {template_set}", [_percent(own.get(metric)) for metric in metrics])
        for language, sets in scores.items()
        for template_set, own in sets.items()
    ]
    first = next(iter(next(iter(scores.values())).values()))
    lines.append(_chance([first.get(metric) for metric in metrics]))
    lines += _paper_lines(papers, metrics, lambda entry: entry["metric"])
    return Table([titles[name] for name in metrics], lines)


def _zste_table(receipt: Receipt, papers: Sequence[Mapping[str, Any]]) -> Table:
    scores = receipt.scores["zste"]
    languages = {language: own for language, own in scores.items() if language != "MRV"}
    first = next(iter(languages.values()))
    tasks = list(first)
    lines = [Line("ours", language, [_percent(own.get(task)) for task in tasks]) for language, own in languages.items()]
    lines.append(_chance([first[task] for task in tasks]))
    if "MRV" in scores:
        ours = [_plain(scores["MRV"].get(task)) for task in tasks]
        lines.append(Line("ours", "MRV of the languages", ours))
    lines += _paper_lines(papers, tasks, lambda entry: entry["metric"])
    return Table(tasks, lines)


def _papers(protocol: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """What the papers print for this task and dataset; other splits, or a part of the classes (ESC-10), have none.

    A set that was prepared goes by the name of the dataset that it was made from.
    """
    name = str(protocol.get("origin") or protocol["dataset"])
    if "test" not in str(protocol["split"]).split("+"):
        return []
    if task in ("zero_shot", "zste") and protocol["classes"] != NUM_CLASSES.get(name):
        return []
    return paper_results(dataset=name, task=task)


def _place(entry: Mapping[str, Any]) -> tuple[str | None, str]:
    return None if entry["metric"] == "MRV" else entry["direction"], entry["metric"]


def _titles(columns: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{DIRECTIONS[direction]} {metric}" for direction, metric in columns]


def _paper_lines(
    papers: Sequence[Mapping[str, Any]],
    columns: Sequence[Any],
    column_of: Callable[[Mapping[str, Any]], Any],
    forms: Sequence[Callable[[Any], Cell]] | None = None,
) -> list[Line]:
    """One line for each model of a paper's table, with what it prints in our columns; in percent unless told."""
    rows: dict[tuple[str, str, str, Any], dict[Any, float]] = defaultdict(dict)
    for entry in papers:
        rows[entry["paper"], entry["table"], entry["model"], entry["language"]][column_of(entry)] = entry["value"]
    forms = forms or [_percent] * len(columns)
    return [
        Line(
            "paper",
            f"{model} ({language or 'all'}), {paper} table {table}",
            [form(cells.get(column)) for form, column in zip(forms, columns, strict=True)],
        )
        for (paper, table, model, language), cells in rows.items()
        if any(column in cells for column in columns)
    ]


def _percent(score: Any) -> Cell:
    return _cell(score, 100, ".1f")


def _plain(score: Any) -> Cell:
    return _cell(score, 1, ".3g")


def _cell(score: Any, factor: float, form: str) -> Cell:
    if score is None:
        return Cell("")
    if not isinstance(score, Mapping):
        return Cell(format(factor * score, form))
    ends = [format(factor * score[end], form) for end in ("low", "high") if score.get(end) is not None]
    interval = "–".join(ends)
    return Cell(format(factor * score["value"], form), interval)


def _chance(scores: Sequence[Mapping[str, Any] | None]) -> Line:
    return Line("chance", "chance", [_percent(score and score.get("chance")) for score in scores])


def _recall_bars(receipt: Receipt) -> dict[str, list[Bar]]:
    """R@1 of every language, by direction."""
    scores = receipt.scores.get("retrieval", {})
    return {
        title: [_bar(language, own[direction]["R@1"]) for language, own in scores.items()]
        for direction, title in DIRECTIONS.items()
        if scores
    }


def _bar(name: str, score: Mapping[str, Any]) -> Bar:
    return Bar(name, score["value"], score.get("low"), score.get("high"), score.get("chance"))


def _first_zero_shot(receipt: Receipt) -> tuple[str, Mapping[str, Any]] | None:
    for language, sets in receipt.scores.get("zero_shot", {}).items():
        for template_set, own in sets.items():
            return f"{language}/{template_set}", own
    return None


def _class_bars(receipt: Receipt) -> list[Bar]:
    """The accuracy of each class, best first."""
    found = _first_zero_shot(receipt)
    per_class = found[1]["per_class"] if found else {}
    return [Bar(name, value, None, None, None) for name, value in sorted(per_class.items(), key=lambda item: -item[1])]


def _confusion(receipt: Receipt) -> dict[str, Any] | None:
    """Class names and rows of (count, share of the row)."""
    found = _first_zero_shot(receipt)
    if found is None:
        return None
    counts = receipt.arrays[f"zero_shot/{found[0]}/confusion"]
    if len(counts) > MAX_CLASSES_DRAWN:
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [list(zip(*pair, strict=True)) for pair in zip(counts.tolist(), shares.tolist(), strict=True)]
    return {"classes": receipt.arrays["zero_shot/classes"].tolist(), "rows": rows}


def _cases(receipt: Receipt, number: int = 4) -> dict[str, list[Case]]:
    """Captions that every language finds, and those on which the languages disagree most."""
    if "multilingual/ranks" not in receipt.arrays:
        return {}
    ranks, texts = receipt.arrays["multilingual/ranks"], receipt.arrays["multilingual/text"].tolist()
    orders = {
        "found in every language": np.lexsort((np.arange(len(ranks)), ranks.max(axis=1))),
        "the languages disagree": np.lexsort((np.arange(len(ranks)), -ranks.var(axis=1))),
    }
    return {
        # Captions that clips share have the same ranks: each is shown once.
        title: [Case(texts[query], ranks[query].tolist()) for query in _firsts(order, texts)[:number]]
        for title, order in orders.items()
    }


def _firsts(order: np.ndarray, texts: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for query in order.tolist():
        first.setdefault(texts[query], query)
    return list(first.values())


def _samples(receipt: Receipt, rows: Any, number: int) -> dict[str, list[Sample]]:
    """Captions of the first language, evenly spread over those that found their clip and those that did not."""
    language = receipt.protocol["languages"][0]
    name = f"retrieval/{language}/t2a/rank"
    if name not in receipt.arrays or not number:
        return {}
    ranks = receipt.arrays[name]
    listen = _listener(receipt, rows)
    drawn = {"hits": np.flatnonzero(ranks == 0), "misses": np.flatnonzero(ranks > 0)}
    return {
        title: [
            _sample(receipt, language, int(queries[place]), listen)
            for place in np.unique(np.linspace(0, len(queries) - 1, number).round().astype(int))
        ]
        for title, queries in drawn.items()
        if len(queries)
    }


def _sample(receipt: Receipt, language: str, query: int, listen: Callable[[int], str]) -> Sample:
    arrays = receipt.arrays
    rank = int(arrays[f"retrieval/{language}/t2a/rank"][query])
    found = int(arrays[f"retrieval/{language}/t2a/top"][query, 0])
    return Sample(
        text=str(arrays[f"captions/{language}/text"][query]),
        rank=rank,
        right=listen(int(arrays[f"captions/{language}/clip"][query])),
        found=listen(found) if rank else None,
        found_name=str(arrays["clips/label"][found]) or str(arrays["clips/id"][found]),
    )


def _listener(receipt: Receipt, rows: Any) -> Callable[[int], str]:
    """Gives the beginning of a clip as a data URL; an empty string where its recording is not to be had any more."""
    ids, paths = (receipt.arrays[f"clips/{name}"].tolist() for name in ("id", "audio_path"))
    places = {row["clip_id"]: place for place, row in enumerate(without_audio(rows))} if rows is not None else {}

    def listen(clip: int) -> str:
        place = places.get(ids[clip])
        row = {"clip_id": ids[clip], "audio_path": paths[clip]} if place is None else rows[place]
        try:
            return _data_url(read_row(row, CLIP_RATE_HZ, CLIP_SECONDS))
        except (FileNotFoundError, BadAudioError):
            return ""

    return listen


def _data_url(waveform: np.ndarray) -> str:
    import soundfile

    encoded = io.BytesIO()
    # MP3 and not Ogg, whose every stream carries a random serial number: the same receipt gives the same page.
    soundfile.write(encoded, waveform, CLIP_RATE_HZ, format="MP3")
    return "data:audio/mpeg;base64," + base64.b64encode(encoded.getvalue()).decode()
