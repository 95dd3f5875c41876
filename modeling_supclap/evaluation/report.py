"""An evaluation receipt as one self-contained page for people: `report.html`.

Everything on the page is computed from the receipt (`results.json` and `outcomes.npz`); nothing is embedded or scored
again. Pictures are SVG, recordings are inlined as MP3, so the page can be mailed.
"""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.schema import LANGUAGES, without_audio

from .receipts import Receipt, paper_results
from .report_figures import figures

RECALLS = ("R@1", "R@5", "R@10", "mAP@10")
DIRECTIONS = {"t2a": "text to audio", "a2t": "audio to text"}
ZERO_SHOT = {"top1": "top 1", "top5": "top 5", "mean_per_class": "mean of classes", "mean_over_folds": "mean of folds"}
# Factor and digits of what is no share: shares are given in percent.
FORMS = {"MRV": (1, ".2f"), "Gap": (1, ".3f"), "Dis": (1, ".3f")}
# What the papers' results call a mean of the languages and all of them together.
OF_PAPERS = {"avg": "mean of 8", None: "8 languages"}
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
    """One row of a table: what it is (`ours`, `chance`, `best` or `paper`), its name, and a cell for each column."""

    kind: str
    name: str
    cells: list[Cell]


Column = tuple[str, str]  # a direction, or nothing, and a metric


class Table(NamedTuple):
    """Our scores, the chance level and the papers' best, and what the papers print for the same dataset, by table."""

    columns: Sequence[Column]
    lines: list[Line]
    papers: dict[str, list[Line]]

    def groups(self) -> list[tuple[str, int]]:
        """Each direction with the number of its columns."""
        return [
            (DIRECTIONS.get(name, ""), len([*own])) for name, own in groupby(self.columns, lambda column: column[0])
        ]


class Bar(NamedTuple):
    """A score to draw, with the ends of its interval and the chance level, all as fractions or None."""

    name: str
    value: float
    low: float | None
    high: float | None
    chance: float | None


class Case(NamedTuple):
    """A caption and the rank of its clip in each language, from 1 [A tables 9 and 10]."""

    text: str
    ranks: list[int]


class Sample(NamedTuple):
    """A query and what it found: the clip that was right, its rank from 1, and the clip found first instead, if any."""

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
    write_text(path, page)
    return Path(path)


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
        titles=ZERO_SHOT,
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
    papers = _papers(receipt.protocol)
    for name, maker in makers.items():
        if ("multilingual" if name == "distances" else name) in receipt.scores:
            yield name, maker(receipt.scores, papers)


def _retrieval_table(scores: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Table:
    columns: list[Column] = [(direction, metric) for direction in DIRECTIONS for metric in RECALLS]
    languages = list(scores["retrieval"])
    rows = {
        name: [own[direction][metric] for direction, metric in columns] for name, own in scores["retrieval"].items()
    }
    chances = next(iter(rows.values()))
    if means := scores.get("multilingual"):
        rows["mean"] = [means[direction][metric] for direction, metric in columns]
    lines = [*_lines(columns, rows), _chance(chances)]
    averages = ["avg"] if set(LANGUAGES) <= set(languages) else []
    return _beside(papers, columns, lines, [*languages, *averages], [languages[0], *averages])


def _multilingual_table(scores: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Table:
    columns: list[Column] = [("", "MRV")]
    lines = _lines(columns, {"this model": [scores["multilingual"]["MRV"]]})
    every = [None] if set(LANGUAGES) <= set(scores["retrieval"]) else []
    return _beside(papers, columns, lines, every, every)


def _distance_table(scores: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Table:
    columns: list[Column] = [("", "Gap"), ("", "Dis")]
    own = scores["multilingual"]
    rows = {language: [own[metric][language] for _, metric in columns] for language in own["Gap"]}
    return _beside(papers, columns, _lines(columns, rows), list(rows), [])


def _zero_shot_table(scores: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Table:
    found = {(name, kind): own for name, sets in scores["zero_shot"].items() for kind, own in sets.items()}
    columns: list[Column] = [("", metric) for metric in ZERO_SHOT if any(metric in own for own in found.values())]
    rows = {f"{name}, {kind}": [own.get(metric) for _, metric in columns] for (name, kind), own in found.items()}
    lines = [*_lines(columns, rows), _chance(next(iter(rows.values())))]
    return _beside(papers, columns, lines, list(scores["zero_shot"]), list(scores["zero_shot"])[:1])


def _zste_table(scores: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Table:
    languages = [name for name in scores["zste"] if name != "MRV"]
    columns: list[Column] = [("", task) for task in scores["zste"][languages[0]]]
    rows = {name: [scores["zste"][name].get(task) for _, task in columns] for name in languages}
    lines = [*_lines(columns, rows), _chance(rows[languages[0]])]
    if variances := scores["zste"].get("MRV"):
        own = [_cell(variances.get(task), "MRV") for _, task in columns]
        lines.append(Line("ours", "MRV of the languages", own))
    return _beside(papers, columns, lines, languages, languages[:1])


def _papers(protocol: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the papers print for this dataset; other splits, or a part of the classes (ESC-10), have none.

    A set that was prepared goes by the name of the dataset that it was made from.
    """
    name = str(protocol.get("origin") or protocol["dataset"])
    if "test" not in str(protocol["split"]).split("+"):
        return []
    whole = protocol.get("classes") == NUM_CLASSES.get(name)
    entries = sorted(paper_results(dataset=name), key=lambda entry: (entry["paper"], int(entry["table"])))
    return [entry for entry in entries if whole or entry["task"] not in ("zero_shot", "zste")]


def _beside(
    papers: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    lines: Sequence[Line],
    languages: Sequence[str | None],
    best_of: Sequence[str | None],
) -> Table:
    """Our lines, the papers' best in some languages below them, and what they print in our columns and languages."""
    rows: dict[str, dict[str, dict[Column, float]]] = defaultdict(lambda: defaultdict(dict))
    printed: dict[tuple[str | None, Column], list[float]] = defaultdict(list)
    for entry in papers:
        column = (entry["direction"] if entry["metric"] in RECALLS else "", entry["metric"])
        language = entry["language"]
        if column in columns and language in languages:
            name = f"{entry['model']} ({OF_PAPERS.get(language, language)})"
            rows[f"{entry['paper']}, table {entry['table']}"][name][column] = entry["value"]
            printed[language, column].append(entry["value"])
    best = {
        f"best in papers, {OF_PAPERS.get(language, language)}": [
            # Less is better of what is no share: MRV, Gap and Dis.
            (min if column[1] in FORMS else max)(printed[language, column], default=None)
            for column in columns
        ]
        for language in best_of
        if any(language == of for of, _ in printed)
    }
    sections = {
        title: _lines(columns, {name: [own.get(column) for column in columns] for name, own in models.items()}, "paper")
        for title, models in rows.items()
    }
    return Table(columns, [*lines, *_lines(columns, best, "best")], sections)


def _lines(columns: Sequence[Column], rows: Mapping[str, Sequence[Any]], kind: str = "ours") -> list[Line]:
    """A line for each row of scores, in the forms of their columns."""
    return [
        Line(kind, name, [_cell(score, metric) for score, (_, metric) in zip(scores, columns, strict=True)])
        for name, scores in rows.items()
    ]


def _cell(score: Any, metric: str) -> Cell:
    if score is None:
        return Cell("")
    factor, form = FORMS.get(metric, (100, ".1f"))
    if not isinstance(score, Mapping):
        return Cell(format(factor * score, form))
    ends = [format(factor * score[end], form) for end in ("low", "high") if score.get(end) is not None]
    return Cell(format(factor * score["value"], form), "–".join(ends))


def _chance(scores: Sequence[Mapping[str, Any] | None]) -> Line:
    return Line("chance", "chance", [_cell(score and score.get("chance"), "") for score in scores])


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
    """Captions whose worst rank is the least, and those on which the languages disagree most."""
    if "multilingual/ranks" not in receipt.arrays:
        return {}
    ranks, texts = receipt.arrays["multilingual/ranks"], receipt.arrays["multilingual/text"].tolist()
    orders = {
        "highest in every language": np.lexsort((np.arange(len(ranks)), ranks.max(axis=1))),
        "the languages disagree": np.lexsort((np.arange(len(ranks)), -ranks.var(axis=1))),
    }
    return {
        # Captions that clips share have the same ranks: each is shown once.
        title: [Case(texts[query], (ranks[query] + 1).tolist()) for query in _firsts(order, texts)[:number]]
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
    rank = int(arrays[f"retrieval/{language}/t2a/rank"][query]) + 1
    found = int(arrays[f"retrieval/{language}/t2a/top"][query, 0])
    return Sample(
        text=str(arrays[f"captions/{language}/text"][query]),
        rank=rank,
        right=listen(int(arrays[f"captions/{language}/clip"][query])),
        found=listen(found) if rank > 1 else None,
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
