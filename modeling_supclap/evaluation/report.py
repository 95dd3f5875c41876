"""Evaluation report as a self-contained HTML page, `report.html`.

The page is rendered from saved results (`results.json` and `outcomes.npz`) without running the model. Figures are
inline SVG and recordings are inline MP3, so the page is a single file.
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
        name: Row name.
        cells: One value per column: a score dict, a number, a string, or None if missing.
    """

    kind: str
    name: str
    cells: list[Any]


Column = tuple[str, str]  # (direction or "", metric)


class Table(NamedTuple):
    """Table with the model's scores, chance levels and published scores.

    Attributes:
        columns: (direction, metric) of each column.
        lines: Rows with the model's scores, the chance levels and the best published scores.
        papers: Dict from the title of a paper's table to rows with its published scores.
    """

    columns: Sequence[Column]
    lines: list[Line]
    papers: dict[str, list[Line]]

    def groups(self) -> list[tuple[str, int]]:
        """Return the column groups as a list of (direction title, number of columns)."""
        counts = Counter(map(itemgetter(0), self.columns))
        return [(DIRECTIONS.get(direction, ""), count) for direction, count in counts.items()]


class Case(NamedTuple):
    """A caption and the rank of its clip in each language, as in ATRI tables 9 and 10; ranks start at 1."""

    text: str
    ranks: list[int]


class Sample(NamedTuple):
    """A text query with audio, shown as an example in the report.

    Attributes:
        text: The caption.
        rank: Rank of the correct clip, starting at 1.
        right: Audio of the correct clip as a data URL; empty if unavailable.
        top: Audio of the top-ranked clip as a data URL; None if the top-ranked clip is correct.
        top_name: Label or id of the top-ranked clip.
    """

    text: str
    rank: int
    right: str
    top: str | None
    top_name: str


def write_report(results: Results | str | Path, path: str | Path, rows: Any = None) -> Path:
    """Write an evaluation report to an HTML file; the write is atomic.

    Args:
        results: `Results` object, results folder, or path of `results.json`.
        path: Path of the HTML file.
        rows: Evaluated split, used to include the audio of a few hits and misses; None omits the audio.

    Returns:
        Path of the HTML file.

    Raises:
        FileNotFoundError: The results do not exist.
    """
    page = render_report(results if isinstance(results, Results) else Results.load(results), rows)
    write_text(path, page)
    return Path(path)


def render_report(results: Results, rows: Any = None) -> str:
    """Render the report as an HTML string; equal results produce equal pages.

    Args:
        results: Results of the evaluation.
        rows: Evaluated split, used to include the audio of a few hits and misses; None omits the audio.
    """
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
    """Return the column title: the short metric name if common or explained on the page, else the display name."""
    is_short = metric in RETRIEVAL_METRICS or metric in ZSTE_TASKS or not get_metric(metric).percent
    return metric if is_short else get_metric(metric).display


# ---- summary ----


def _verdicts(results: Results) -> list[str]:
    """Summarise each task in one sentence: main score, chance level, and whether the score is significantly better."""
    subjects = {
        ("retrieval", "R@1"): "captions in {language} retrieve their clip at rank 1",
        ("zero_shot", "top1"): "clips are assigned the correct class",
        ("zste", "3A"): "the order of two consecutive sounds is recognised",
        ("temporal", "temporal_accuracy"): "an item is closest to its own caption within its pair",
    }
    firsts: dict[tuple[str, str], Score] = {}
    for each in flat_scores(results.scores):
        key = each.place[0], each.place[-1]
        # For post-training use the last stage, otherwise the first language, direction and template set.
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
    """Build the report tables as a dict from table name to table."""
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
    """Convert dicts of scores to table columns.

    Returns:
        Tuple of the columns, one per metric that occurs in any row, and a dict from row name to scores. A missing
        score is None.
    """
    present = set().union(*row_scores.values())
    columns = [("", metric) for metric in filter(present.__contains__, metrics)]
    rows: dict[str, list[Any]] = {}
    for name, scores in row_scores.items():
        rows[name] = [scores.get(metric) for _, metric in columns]
    return columns, rows


def _papers(protocol: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the published results on this dataset.

    For a prepared dataset, the published results of the original dataset are returned. Returns an empty list if the
    split is not "test". Classification results are omitted for a subset of the classes, such as ESC-10.
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
    """Build a table from the model's scores and published results.

    Args:
        columns: (direction, metric) of each column.
        rows: Dict from row name to the model's scores, one per column.
        papers: Entries from `paper_results`.
        languages: Languages to select from `papers`.
        best_of: Languages for which to add a row with the best published scores.
    """
    lines = [Line("ours", name, list(scores)) for name, scores in rows.items()]
    levels: dict[str, list[Any]] = {"chance": [], "an order-blind model": []}
    for column in zip(*rows.values(), strict=True):
        # The chance level depends on the number of candidates, which can differ by row; show the level of the last row.
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
    """Format a cell for a metric. Returns the value and its interval as strings, each empty if missing."""
    form = get_metric(metric).format
    if cell is None or isinstance(cell, str):
        return cell or "", ""
    if not isinstance(cell, Mapping):
        return form(cell), ""
    return form(cell["value"]), "" if cell["low"] is None else f"{form(cell['low'])}–{form(cell['high'])}"


# ---- classes, cases, recordings ----


def _zero_shot(results: Results) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return the accuracy per class and the confusion matrix for the first prompt set.

    Returns:
        Tuple of a dict from class to accuracy, and a dict with "classes" (class names) and "rows" (C, C, 2), where the
        last axis is (count, share of the row). The second item is None for more than 100 classes.
    """
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
    """Select captions that rank high in all languages, and captions with the largest rank variance over languages.

    Returns:
        Dict from section title to at most four cases.
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
        firsts: dict[str, Case] = {}  # show a caption that several clips share only once
        for query in order.tolist():
            firsts.setdefault(texts[query], Case(texts[query], (ranks[query] + 1).tolist()))
        cases[title] = list(firsts.values())[:4]
    return {title: examples for title, examples in cases.items() if examples}


def _samples(results: Results, rows: Any) -> dict[str, list[Sample]]:
    """Select up to four hits and four misses among the captions in the first language, evenly spaced.

    Returns:
        Dict from "hits" and "misses" to samples.
    """
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
    """Return a function that loads the first seconds of a clip as a data URL, given the clip index.

    The function returns "" if the audio is not available.
    """
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
