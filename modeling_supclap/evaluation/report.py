"""Evaluation report from saved results, as a single HTML page with inline SVG figures and inline MP3 recordings."""

from __future__ import annotations

import base64
import io
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.metrics.bootstrap import describe_units, list_units
from modeling_supclap.metrics.names import get_metric

from .report_figures import figures
from .results import (
    AUDIO_TASKS,
    DIRECTIONS,
    NUM_CLASSES,
    SECTIONS,
    ZSTE_TASKS,
    Results,
    Score,
    flat_scores,
    get_dataset_name,
    paper_results,
)

# Row names for published scores: mean over languages ("avg"), and scores over all languages together (None).
OF_PAPERS = {"avg": "mean of 8", None: "8 languages"}
MAX_CLASSES_DRAWN = 100
MAX_SAMPLES = 4  # number of hits with audio, and of misses with audio
CLIP_SECONDS = 10.0
CLIP_RATE_HZ = 16000


class Line(NamedTuple):
    """Table row.

    Attributes:
        kind: `ours`, `chance`, `best` (best published score) or `paper` (published score).
        cells: One value per column: a `Score`, a number, a string, or None if missing.
    """

    kind: str
    name: str
    cells: list[Any]


Column = tuple[str, str]  # (direction or "", metric)


class Table(NamedTuple):
    """Table of the report. `lines` contains the model's scores, the chance levels and the best published scores.

    `papers` contains rows with published scores, `{title of the table in a paper: rows}`. `units` is a sentence about
    the resampled units.
    """

    columns: Sequence[Column]
    lines: list[Line]
    papers: dict[str, list[Line]]
    units: str = ""

    def groups(self) -> list[tuple[str, int]]:
        """Return the column groups as a list of (direction title, number of columns)."""
        counts = Counter(map(itemgetter(0), self.columns))
        return [(DIRECTIONS.get(direction, ""), count) for direction, count in counts.items()]


def write_report(results: Results | str | Path, path: str | Path, rows: Any = None) -> Path:
    """Write an evaluation report to an HTML file. The write is atomic.

    `results` may also be the folder of saved results, or the path of `results.json`. If `rows` is the evaluated split,
    the report includes the audio of a few hits and misses.

    Raises:
        FileNotFoundError: The results do not exist.
    """
    write_text(path, render_report(results if isinstance(results, Results) else Results.load(results), rows))
    return Path(path)


def render_report(results: Results, rows: Any = None) -> str:
    """Render the report of `write_report` as an HTML string. Equal results produce equal pages."""
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
        sections=SECTIONS,
        zste_tasks=ZSTE_TASKS,
        tables=_tables(results),
        groups=_group_tables(results),
        group_column=content.get("groups", {}).get("column"),
        bars=bars,
        class_bars=sorted(per_class.items(), key=lambda item: -item[1]),
        confusion=confusion,
        figures=dict(figures(results)),
        cases=_cases(results),
        samples=_samples(results, rows),
    )


def _title_of(metric: str) -> str:
    """Return the display name of a metric. Retrieval, ZSTE and non-percentage metrics keep their short name."""
    is_short = metric in SECTIONS["retrieval"].metrics or metric in ZSTE_TASKS or not get_metric(metric).percent
    return metric if is_short else get_metric(metric).display


def _verdicts(results: Results) -> list[str]:
    """Summarise each task in one sentence: main score, chance level, and whether the score is significantly better."""
    firsts: dict[str, Score] = {}
    for each in flat_scores(results.scores):
        task, metric = each.place[0], each.place[-1]
        # For post-training use the last stage, otherwise the first language, direction and template set.
        if metric == SECTIONS[task].summary[0] and (task not in firsts or task == "temporal"):
            firsts[task] = each

    sentences = []
    for task, each in firsts.items():
        value, interval, chance, blind = each.cells()
        subject = SECTIONS[task].summary[1].format(language=each.place[1].replace("_", " "))
        sentence = f"{subject[0].upper()}{subject[1:]} in {value} % of the cases (chance {chance} %"
        sentence += f", an order-blind model {blind} %" if blind else ""
        units = describe_units(each.units, each.unit)
        sentence += "".join(f"; {part}" for part in (interval and f"interval {interval} %", units) if part) + ")"

        level = max(each.chance or 0.0, each.order_blind or 0.0)
        baseline = "an order-blind model" if blind else "chance"
        if each.value <= level:
            sentence += f": no better than {baseline}"
        elif each.low is not None and each.low <= level:
            sentence += f": not significantly better than {baseline}"
        sentences.append(f"{sentence}.")
    return sentences


def _tables(results: Results) -> dict[str, Table]:
    """Build one table per section that has scores, `{section name: table}`."""
    row_scores: dict[str, dict[str, dict[Column, Score]]] = {}
    for each in flat_scores(results.scores):
        task, language, *between, metric = each.place
        direction = between.pop() if between and between[-1] in DIRECTIONS else ""
        row = ", ".join([language, *between])
        if task == "multilingual":
            task, row = ("multilingual", "this model") if language == "all" else ("distances", language)
        elif task in AUDIO_TASKS:
            row = language.replace("_", " ")
        elif task == "temporal":
            row = between[0].replace("_", " ")
        if metric in SECTIONS[task].metrics:
            row_scores.setdefault(task, {}).setdefault(row, {})[direction, metric] = each

    has_all = set(LANGUAGES) <= results.scores.get("retrieval", {}).keys()
    averages: dict[str, list[str | None]] = {"retrieval": ["avg"], "multilingual": [None]} if has_all else {}
    papers = _papers(results.protocol)
    tables: dict[str, Table] = {}
    for name, rows in row_scores.items():
        present: set[Column] = set()
        languages: list[str | None] = []
        for row, scores in rows.items():
            present |= scores.keys()
            if (language := row.split(",")[0]) not in languages:
                languages.append(language)
        directions = DIRECTIONS if name == "retrieval" else ("",)
        columns = list(filter(present.__contains__, itertools.product(directions, SECTIONS[name].metrics)))
        best_of = [] if name == "distances" else languages[:1]
        average = averages.get(name, [])
        tables[name] = _table(columns, rows, papers, languages + average, best_of + average)

    agreement = results.scores.get("zste", {}).get("all")
    if agreement:
        form = get_metric("MRV").format
        cells = []
        for _, task in tables["zste"].columns:
            cells.append(form(agreement[task]["MRV"]["value"]) if task in agreement else None)
        tables["zste"].lines.append(Line("ours", "MRV over the languages", cells))
    return tables


def _group_tables(results: Results) -> dict[str, Table]:
    """Build one table per task with a row for each group. The row names the resampled units, which differ by group."""
    rows: dict[str, dict[str, dict[Column, Score]]] = {}
    for value, each in results.group_scores():
        task, language, *between, metric = each.place
        direction = between.pop() if between and between[-1] in DIRECTIONS else ""
        name = "; ".join(filter(None, [", ".join([value, language, *between]), describe_units(each.units, each.unit)]))
        rows.setdefault(task, {}).setdefault(name, {})[direction, metric] = each
    tables = {}
    for task, of_task in rows.items():
        columns = list(dict.fromkeys(itertools.chain(*of_task.values())))
        lines = [Line("ours", name, list(map(scores.get, columns))) for name, scores in of_task.items()]
        tables[task] = Table(columns, lines, {})
    return tables


def _papers(protocol: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the published results on the evaluated dataset, if its test split was evaluated.

    If only some of the classes were evaluated, such as ESC-10, omit classification results.
    """
    name = str(protocol.get("origin") or protocol["dataset"])
    if "test" not in str(protocol["split"]).split("+"):
        return []
    is_whole = protocol.get("classes") == NUM_CLASSES.get(name)
    entries = sorted(paper_results(dataset=name), key=lambda entry: (entry["paper"], int(entry["table"])))
    return [entry for entry in entries if is_whole or entry["task"] not in ("zero_shot", "zste")]


def _table(
    columns: Sequence[Column],
    rows: Mapping[str, Mapping[Column, Score]],
    papers: Sequence[Mapping[str, Any]],
    languages: Sequence[str | None],
    best_of: Sequence[str | None],
) -> Table:
    """Build a table from the model's scores `{row: {column: score}}` and the published results in `languages`.

    For each language in `best_of`, a row with the best published scores is added.
    """
    # The chance level depends on the number of candidates, which can differ by row; show the level of the last row.
    lines = []
    last: dict[Column, Score] = {}
    for name, scores in rows.items():
        lines.append(Line("ours", name, list(map(scores.get, columns))))
        last |= scores
    for name, level in (("chance", "chance"), ("an order-blind model", "order_blind")):
        values = [getattr(last[column], level) for column in columns]
        if any(value is not None for value in values):
            lines.append(Line("chance", name, values))

    published: dict[tuple[str | None, Column], list[float]] = defaultdict(list)
    sections: dict[str, dict[str, Line]] = defaultdict(dict)
    for entry in papers:
        column = (entry["direction"] if entry["metric"] in SECTIONS["retrieval"].metrics else "", entry["metric"])
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
    all_scores = itertools.chain.from_iterable(scores.values() for scores in rows.values())
    units = list_units((score.units, score.unit) for score in all_scores)
    return Table(columns, lines, {title: list(section.values()) for title, section in sections.items()}, units)


def _write_cell(cell: Any, metric: str) -> tuple[str, str]:
    """Format a cell for a metric. Return the value and its interval as strings, each "" if missing."""
    form = get_metric(metric).format
    if cell is None or isinstance(cell, str):
        return cell or "", ""
    if not isinstance(cell, Score):
        return form(cell), ""
    value, interval, *_ = cell.cells()
    return value, interval


def _zero_shot(results: Results) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return the scores per class and the confusion matrix of the first prompt set.

    The matrix is None for more than 100 classes or several labels per clip. Its entry "rows" (C, C, 2) contains the
    count of each cell, and the count divided by the sum of the row.
    """
    for language, sets in results.scores.get("zero_shot", {}).items():
        for name, set_scores in sets.items():
            counts = results.arrays.get(f"zero_shot/{language}/{name}/confusion")
            if counts is None or len(counts) > MAX_CLASSES_DRAWN:
                return set_scores["per_class"], None
            shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
            # (C, C) twice -> (C, C, 2)
            rows = np.stack([counts, shares], axis=2).tolist()
            return set_scores["per_class"], {"classes": results.arrays["zero_shot/classes"].tolist(), "rows": rows}
    return {}, None


def _cases(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Select four captions that rank high in all languages, and four with the largest rank variance over languages.

    A case is a caption and the rank of its clip in each language (from 1), as in ATRI tables 9 and 10.
    """
    if "multilingual/ranks" not in results.arrays:
        return {}
    ranks, texts = results.arrays["multilingual/ranks"], results.arrays["multilingual/text"].tolist()
    variances = ranks.var(axis=1)
    orders = {
        "highest in every language": np.argsort(ranks.max(axis=1), kind="stable"),
        "the languages disagree": np.argsort(-variances, kind="stable")[: np.count_nonzero(variances)],
    }
    cases = {}
    for title, order in orders.items():
        # show a caption that several clips share only once
        firsts: dict[str, dict[str, Any]] = {}
        for query in order.tolist():
            firsts.setdefault(texts[query], {"text": texts[query], "ranks": (ranks[query] + 1).tolist()})
        if firsts:
            cases[title] = list(firsts.values())[:4]
    return cases


def _samples(results: Results, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Select up to four "hits" and four "misses", evenly spaced among the captions in the first language.

    A sample contains a caption, the rank of its clip (from 1) and the audio of this clip. A miss also contains the
    audio of the top-ranked clip.
    """
    arrays, language = results.arrays, results.protocol["languages"][0]
    prefix = f"retrieval/{language}/t2a"
    if f"{prefix}/rank" not in arrays:
        return {}

    ranks, load_audio = arrays[f"{prefix}/rank"], _audio_loader(results, rows)
    samples: dict[str, list[dict[str, Any]]] = {}
    for title, queries in {"hits": np.flatnonzero(ranks == 0), "misses": np.flatnonzero(ranks > 0)}.items():
        spread = np.linspace(0, len(queries) - 1, MAX_SAMPLES).round().astype(int)
        for query in queries[np.unique(spread)].tolist() if len(queries) else ():
            top = int(arrays[f"{prefix}/top"][query, 0])
            sample = {
                "text": str(arrays[f"captions/{language}/text"][query]),
                "rank": int(ranks[query]) + 1,
                "right": load_audio(int(arrays[f"captions/{language}/clip"][query])),
                "top": load_audio(top) if ranks[query] else None,
                "top_name": str(arrays["clips/label"][top]) or str(arrays["clips/id"][top]),
            }
            samples.setdefault(title, []).append(sample)
    return samples


def _audio_loader(results: Results, rows: Any) -> Callable[[int], str]:
    """Return a function that maps a clip index to a data URL of the first seconds, or to "" if there is no audio."""
    import soundfile

    ids = results.arrays["clips/id"]
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
