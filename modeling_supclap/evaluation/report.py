"""Evaluation report as one self-contained HTML page, `report.html`.

The page is computed from the results (`results.json` and `outcomes.npz`) alone; nothing is embedded or scored again.
Figures are inline SVG and recordings inline MP3, so the page can be sent as one file.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.schema import LANGUAGES, without_audio
from modeling_supclap.metrics.names import METRICS, RETRIEVAL_METRICS, get_metric

from .report_figures import figures
from .results import (
    DIRECTIONS,
    NUM_CLASSES,
    Results,
    Score,
    flat_scores,
    get_dataset_name,
    paper_results,
)

ZERO_SHOT = ("top1", "top5", "mean_per_class", "mean_over_folds")
ZSTE_TASKS = {
    "1A": "one sound: it is recognised",
    "2A": "two consecutive sounds: both are recognised",
    "2B": "two consecutive sounds: at least one is recognised",
    "2C": "two simultaneous sounds: both are recognised",
    "2D": "two simultaneous sounds: at least one is recognised",
    "3A": "two consecutive sounds: first before second, second before first, or simultaneous",
    "3A_order": "two consecutive sounds: correct order against reversed order, without the third answer",
    "3B": "two simultaneous sounds: simultaneous, or one before the other",
    "4A": "as 3A, with many candidate sentences",
    "4A_order": "as 3A_order, on the clips of 4A",
    "4B": "as 3B, with many candidate sentences",
    "5A": "two consecutive sounds: which is first, and which is second",
    "5B": "two simultaneous sounds: which two, with many candidate sentences",
}
# Names of the mean over languages, and of all languages together, in the papers' results.
OF_PAPERS = {"avg": "mean of 8", None: "8 languages"}
MAX_CLASSES_DRAWN = 100
MAX_SAMPLES = 4  # recordings of hits, and of misses
CLIP_SECONDS = 10.0
CLIP_RATE_HZ = 16000


class Line(NamedTuple):
    """Row of a table: kind (`ours`, `chance`, `best` or `paper`), name, and one cell per column: a score, a number, a
    text or None."""

    kind: str
    name: str
    cells: list[Any]


Column = tuple[str, str]  # direction (or "") and metric


class Table(NamedTuple):
    """Scores of the model, chance levels and best published scores; `papers` has all published scores by table."""

    columns: Sequence[Column]
    lines: list[Line]
    papers: dict[str, list[Line]]

    def groups(self) -> list[tuple[str, int]]:
        """Return each direction and its number of columns."""
        counts = Counter(map(itemgetter(0), self.columns))
        return [(DIRECTIONS.get(direction, ""), count) for direction, count in counts.items()]


class Case(NamedTuple):
    """A caption and the rank of its clip in each language; the best rank is 1 [A tables 9 and 10]."""

    text: str
    ranks: list[int]


class Sample(NamedTuple):
    """A query with the rank of the correct clip (the best is 1), its audio, and the top-ranked clip if another."""

    text: str
    rank: int
    right: str
    top: str | None
    top_name: str


def write_report(results: Results | str | Path, path: str | Path, rows: Any = None) -> Path:
    """Write the report of an evaluation to an HTML file, atomically.

    Args:
        results: Results, or the folder or `results.json` they were saved to.
        path: The HTML file.
        rows: The evaluated split, to include the audio of a few hits and misses; None omits the audio.

    Returns:
        The path.

    Raises:
        FileNotFoundError: The results do not exist.
    """
    page = render_report(results if isinstance(results, Results) else Results.load(results), rows)
    write_text(path, page)
    return Path(path)


def render_report(results: Results, rows: Any = None) -> str:
    """Return the report as a string; equal results produce equal pages. For the arguments see `write_report`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("modeling_supclap.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    bars: dict[str, list[Any]] = {}
    for language, scores in results.scores.get("retrieval", {}).items():
        for direction, title in DIRECTIONS.items():
            bars.setdefault(title, []).append((language, scores[direction]["R@1"]))

    environment.filters["written"] = _write_cell
    per_class, confusion = _zero_shot(results)
    content = redact(results.content)  # as in results.json
    return environment.get_template("report.html.j2").render(
        model=content["model"],
        dataset=get_dataset_name(results.protocol),
        protocol={"audio": None, "positives": "clip", "caption_handling": None, "captions": {}, **content["protocol"]},
        versions=content["versions"],
        run=content["run"],
        training=content.get("training"),
        verdicts=_verdicts(results),
        title_of=_title_of,
        zste_tasks=ZSTE_TASKS,
        tables=_tables(results),
        bars=bars,
        class_bars=sorted(per_class.items(), key=lambda item: -item[1]),
        confusion=confusion,
        figures=dict(figures(results)),
        cases=_cases(results),
        samples=_samples(results, rows),
    )


def _title_of(metric: str) -> str:
    """Return the title of a metric's column: its short name if well known or explained on the page, else its display
    name."""
    is_short = metric in RETRIEVAL_METRICS or metric in ZSTE_TASKS or not get_metric(metric).percent
    return metric if is_short else get_metric(metric).display


# ---- summary ----


def _verdicts(results: Results) -> list[str]:
    """Summarise each task in a sentence: its first score, the chance level, and whether the interval is above it."""
    subjects = {
        ("retrieval", "R@1"): "captions in {language} retrieve their clip at rank 1",
        ("zero_shot", "top1"): "clips are assigned the correct class",
        ("zste", "3A"): "the order of two consecutive sounds is recognised",
        ("temporal", "temporal_accuracy"): "an item is closest to its own caption within its pair",
    }
    firsts: dict[tuple[str, str], Score] = {}
    for each in flat_scores(results.scores):
        key = each.place[0], each.place[-1]
        # Use the last stage of a post-training, and otherwise the first language, direction and set of templates.
        if key in subjects and (key not in firsts or key[0] == "temporal"):
            firsts[key] = each

    sentences = []
    for key, each in firsts.items():
        value, interval, chance, blind = each.cells()
        subject = subjects[key].format(language=each.place[1])
        sentence = f"{subject[0].upper()}{subject[1:]} in {value} % of the cases (chance {chance} %"
        sentence += f", an order-blind model {blind} %" if blind else ""
        sentence += f"; interval {interval} %)" if interval else ")"

        level = max(each.chance or 0.0, each.order_blind or 0.0)
        baseline = "an order-blind model" if blind else "chance"
        if each.value <= level:
            sentence += f": no better than {baseline}"
        elif each.low is not None and each.low <= level:
            sentence += f": not significantly better than {baseline}"
        sentences.append(f"{sentence}.")
    return sentences


# ---- tables ----


def _tables(results: Results) -> dict[str, Table]:
    """Build the tables of the page, by name."""
    scores, papers = results.scores, _papers(results.protocol)
    tables: dict[str, Table] = {}
    has_all = set(LANGUAGES) <= scores.get("retrieval", {}).keys()
    columns: list[Column]
    rows: dict[str, list[Any]]

    if "retrieval" in scores:
        columns, rows = list(itertools.product(DIRECTIONS, RETRIEVAL_METRICS)), {}
        for language, directions in scores["retrieval"].items():
            rows[language] = [directions[direction][metric] for direction, metric in columns]
        languages = list(filter("mean".__ne__, rows))
        averages = ["avg"] if has_all else []
        tables["retrieval"] = _table(columns, rows, papers, [*languages, *averages], [languages[0], *averages])

    if "multilingual" in scores:
        together = [None] if has_all else []
        rows = {"this model": [scores["multilingual"]["all"]["MRV"]]}
        tables["multilingual"] = _table([("", "MRV")], rows, papers, together, together)
        rows = {}
        for language, distances in scores["multilingual"].items():
            if language not in ("all", "num_parallel"):
                rows[language] = [distances["Gap"], distances["Dis"]]
        tables["distances"] = _table([("", "Gap"), ("", "Dis")], rows, papers, list(rows), [])

    if "zero_shot" in scores:
        row_scores = {}
        for language, sets in scores["zero_shot"].items():
            for name, set_scores in sets.items():
                row_scores[f"{language}, {name}"] = set_scores
        languages = list(scores["zero_shot"])
        tables["zero_shot"] = _table(*_in_columns(row_scores, ZERO_SHOT), papers, languages, languages[:1])

    if "zste" in scores:
        row_scores = dict(scores["zste"])
        agreement = row_scores.pop("all", None)
        columns, rows = _in_columns(row_scores, ZSTE_TASKS)
        tables["zste"] = _table(columns, rows, papers, list(row_scores), list(row_scores)[:1])
        if agreement:
            form = get_metric("MRV").format
            cells = [form(agreement[task]["MRV"]["value"]) if task in agreement else None for _, task in columns]
            tables["zste"].lines.append(Line("ours", "MRV over the languages", cells))

    if "temporal" in scores:
        row_scores = {}
        for stages in scores["temporal"].values():
            for stage, stage_scores in stages.items():
                row_scores[stage.replace("_", " ")] = stage_scores
        tables["temporal"] = _table(*_in_columns(row_scores, METRICS), [], [], [])
    return tables


def _in_columns(
    row_scores: Mapping[str, Mapping[str, Any]], metrics: Iterable[str]
) -> tuple[list[Column], dict[str, list[Any]]]:
    """Return a column for each metric that occurs in any row, and the scores of each row, None if missing."""
    present = set().union(*row_scores.values())
    columns = [("", metric) for metric in filter(present.__contains__, metrics)]
    rows: dict[str, list[Any]] = {}
    for name, scores in row_scores.items():
        rows[name] = [scores.get(metric) for _, metric in columns]
    return columns, rows


def _papers(protocol: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the published results on this dataset; none for splits other than test or class subsets (ESC-10).

    For a prepared dataset they are those of its original dataset.
    """
    name = str(protocol.get("origin") or protocol["dataset"])
    if "test" not in str(protocol["split"]).split("+"):
        return []
    is_whole = protocol.get("classes") == NUM_CLASSES.get(name)
    entries = []
    for entry in sorted(paper_results(dataset=name), key=lambda entry: (entry["paper"], int(entry["table"]))):
        if is_whole or entry["task"] not in ("zero_shot", "zste"):
            entries.append(entry)
    return entries


def _table(
    columns: Sequence[Column],
    rows: Mapping[str, Sequence[Any]],
    papers: Sequence[Mapping[str, Any]],
    languages: Sequence[str | None],
    best_of: Sequence[str | None],
) -> Table:
    """Build a table: our rows, chance levels, best published scores per language, and all published scores."""
    lines = [Line("ours", name, list(scores)) for name, scores in rows.items()]
    levels: dict[str, list[Any]] = {"chance": [], "an order-blind model": []}
    for column in zip(*rows.values(), strict=True):
        # Rows can have different numbers of candidates: each column shows the level of its last row.
        last: Mapping[str, Any] = next(filter(None, reversed(column)), {})
        levels["chance"].append(last.get("chance"))
        levels["an order-blind model"].append(last.get("order_blind"))
    for name, values in levels.items():
        if any(value is not None for value in values):
            lines.append(Line("chance", name, values))

    published: dict[tuple[str | None, Column], list[float]] = defaultdict(list)
    sections: dict[str, dict[str, Line]] = defaultdict(dict)
    for entry in papers:
        column = (entry["direction"] if entry["metric"] in RETRIEVAL_METRICS else "", entry["metric"])
        language = entry["language"]
        if column in columns and language in languages:
            section = sections[f"{entry['paper']}, table {entry['table']}"]
            name = f"{entry['model']} ({OF_PAPERS.get(language, language)})"
            line = section.setdefault(name, Line("paper", name, [None] * len(columns)))
            line.cells[columns.index(column)] = entry["value"]
            published[language, column].append(entry["value"])

    for language in best_of:
        values = []
        for column in columns:
            choose = max if get_metric(column[1]).higher_is_better else min
            values.append(choose(published[language, column], default=None))
        if any(values):
            lines.append(Line("best", f"best in papers, {OF_PAPERS.get(language, language)}", values))
    return Table(columns, lines, {title: list(section.values()) for title, section in sections.items()})


def _write_cell(cell: Any, metric: str) -> tuple[str, str]:
    """Format a cell and its interval in the format of the metric; empty strings if there is none."""
    form = get_metric(metric).format
    if cell is None or isinstance(cell, str):
        return cell or "", ""
    if not isinstance(cell, Mapping):
        return form(cell), ""
    return form(cell["value"]), "" if cell["low"] is None else f"{form(cell['low'])}–{form(cell['high'])}"


# ---- classes, cases, recordings ----


def _zero_shot(results: Results) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return the accuracy per class with the first set of prompts, and the confusion matrix: class names, and rows of
    (count, share). More than 100 classes have no matrix."""
    for language, sets in results.scores.get("zero_shot", {}).items():
        for name, set_scores in sets.items():
            counts = results.arrays[f"zero_shot/{language}/{name}/confusion"]
            if len(counts) > MAX_CLASSES_DRAWN:
                return set_scores["per_class"], None
            shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
            rows = np.stack([counts, shares], axis=2).tolist()  # (C, C) twice -> (C, C, 2)
            return set_scores["per_class"], {"classes": results.arrays["zero_shot/classes"].tolist(), "rows": rows}
    return {}, None


def _cases(results: Results) -> dict[str, list[Case]]:
    """Select the captions with the best worst rank over languages, and those with the largest rank variance."""
    if "multilingual/ranks" not in results.arrays:
        return {}
    ranks, texts = results.arrays["multilingual/ranks"], results.arrays["multilingual/text"].tolist()
    orders = {
        "highest in every language": np.argsort(ranks.max(axis=1), kind="stable"),
        "the languages disagree": np.argsort(-ranks.var(axis=1), kind="stable"),
    }
    cases = {}
    for title, order in orders.items():
        firsts: dict[str, Case] = {}  # show a caption that several clips share only once
        for query in order.tolist():
            firsts.setdefault(texts[query], Case(texts[query], (ranks[query] + 1).tolist()))
        cases[title] = list(firsts.values())[:4]
    return cases


def _samples(results: Results, rows: Any) -> dict[str, list[Sample]]:
    """Select captions of the first language, evenly spaced among the hits and among the misses."""
    arrays, language = results.arrays, results.protocol["languages"][0]
    prefix = f"retrieval/{language}/t2a"
    if f"{prefix}/rank" not in arrays:
        return {}

    ranks, load_audio = arrays[f"{prefix}/rank"], _audio_loader(results, rows)
    samples: dict[str, list[Sample]] = {}
    for title, queries in {"hits": np.flatnonzero(ranks == 0), "misses": np.flatnonzero(ranks > 0)}.items():
        spread = np.linspace(0, len(queries) - 1, MAX_SAMPLES).round().astype(int)
        for query in queries[np.unique(spread)].tolist() if len(queries) else ():
            top = int(arrays[f"{prefix}/top"][query, 0])
            sample = Sample(
                text=str(arrays[f"captions/{language}/text"][query]),
                rank=int(ranks[query]) + 1,
                right=load_audio(int(arrays[f"captions/{language}/clip"][query])),
                top=load_audio(top) if ranks[query] else None,
                top_name=str(arrays["clips/label"][top]) or str(arrays["clips/id"][top]),
            )
            samples.setdefault(title, []).append(sample)
    return samples


def _audio_loader(results: Results, rows: Any) -> Callable[[int], str]:
    """Return a function from clip index to the start of its audio as a data URL, or "" if the audio is unavailable."""
    import soundfile

    ids = results.arrays["clips/id"].tolist()
    indices = {row["clip_id"]: index for index, row in enumerate(without_audio(rows or ()))}

    def load_audio(clip: int) -> str:
        if ids[clip] not in indices:
            return ""
        try:
            waveform = read_row(rows[indices[ids[clip]]], CLIP_RATE_HZ, CLIP_SECONDS)
        except (FileNotFoundError, BadAudioError):
            return ""
        encoded = io.BytesIO()
        # MP3, because Ogg streams contain a random serial number and equal results must produce equal pages.
        soundfile.write(encoded, waveform, CLIP_RATE_HZ, format="MP3")
        return "data:audio/mpeg;base64," + base64.b64encode(encoded.getvalue()).decode()

    return load_audio
