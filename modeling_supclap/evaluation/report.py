"""Results as one self-contained page for people: `report.html`.

Everything on the page is computed from the results (`results.json` and `outcomes.npz`); nothing is embedded or scored
again. Pictures are SVG, recordings are inlined as MP3, so the page can be mailed.
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
    "1A": "which one sound is heard",
    "2A": "two sounds in a row: both are recognised",
    "2B": "two sounds in a row: one at least is recognised",
    "2C": "two sounds at once: both are recognised",
    "2D": "two sounds at once: one at least is recognised",
    "3A": "two sounds in a row: which is before which, or are they at once",
    "3A_order": "two sounds in a row: the right order against the other, without the third answer",
    "3B": "two sounds at once: are they, or is one before the other",
    "4A": "as 3A, among many other sentences",
    "4A_order": "as 3A_order, of the clips of 4A",
    "4B": "as 3B, among many other sentences",
    "5A": "which sound is first, and which is second",
    "5B": "which two sound together, among many other sentences",
}
# What the papers' results call a mean of the languages and all of them together.
OF_PAPERS = {"avg": "mean of 8", None: "8 languages"}
MAX_CLASSES_DRAWN = 100
MAX_SAMPLES = 4  # hits that can be heard, and misses
CLIP_SECONDS = 10.0
CLIP_RATE_HZ = 16000


class Line(NamedTuple):
    """One row of a table: what it is (`ours`, `chance`, `best` or `paper`), its name, and for each column a score, a
    number, a text or None."""

    kind: str
    name: str
    cells: list[Any]


Column = tuple[str, str]  # a direction, or nothing, and a metric


class Table(NamedTuple):
    """Our scores, the chance level and the papers' best, and what the papers print for the same dataset, by table."""

    columns: Sequence[Column]
    lines: list[Line]
    papers: dict[str, list[Line]]

    def groups(self) -> list[tuple[str, int]]:
        """Each direction with the number of its columns."""
        counts = Counter(map(itemgetter(0), self.columns))
        return [(DIRECTIONS.get(direction, ""), count) for direction, count in counts.items()]


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


def write_report(results: Results | str | Path, path: str | Path, rows: Any = None) -> Path:
    """Writes the page for results, whole or not at all.

    Args:
        results: What `evaluation` returned, or the folder or `results.json` it was saved to.
        path: The HTML file.
        rows: What was evaluated, by which a few hits and misses can be heard; None leaves them silent.

    Returns:
        The path.

    Raises:
        FileNotFoundError: There are no results.
    """
    page = render_report(results if isinstance(results, Results) else Results.load(results), rows)
    write_text(path, page)
    return Path(path)


def render_report(results: Results, rows: Any = None) -> str:
    """The page as a string; arguments as `write_report`. The same results give the same page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("modeling_supclap.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    bars: dict[str, list[Any]] = {}
    for language, own in results.scores.get("retrieval", {}).items():
        for direction, title in DIRECTIONS.items():
            bars.setdefault(title, []).append((language, own[direction]["R@1"]))

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
    """What stands above a column: a short name where readers know it or the page explains it, else the metric's own."""
    is_short = metric in RETRIEVAL_METRICS or metric in ZSTE_TASKS or not get_metric(metric).percent
    return metric if is_short else get_metric(metric).display


# ---- what it comes to ----


def _verdicts(results: Results) -> list[str]:
    """One sentence for each task: its first score, the levels beside it, and whether the interval is clear of them."""
    told = {
        ("retrieval", "R@1"): "captions in {language} find their clip first",
        ("zero_shot", "top1"): "clips are given the right class",
        ("zste", "3A"): "of two sounds in a row the right one is said to be first",
        ("temporal", "temporal_accuracy"): "an item's own caption wins within its pair",
    }
    firsts: dict[tuple[str, str], Score] = {}
    for each in flat_scores(results.scores):
        key = each.place[0], each.place[-1]
        # The last stage of a post-training is what it leaves; of languages, directions and templates the first counts.
        if key in told and (key not in firsts or key[0] == "temporal"):
            firsts[key] = each

    sentences = []
    for key, each in firsts.items():
        value, interval, chance, blind = each.cells()
        subject = told[key].format(language=each.place[1])
        sentence = f"{subject[0].upper()}{subject[1:]} in {value} % of the cases (chance {chance} %"
        sentence += f", an order-blind model {blind} %" if blind else ""
        sentence += f"; interval {interval} %)" if interval else ")"

        level = max(each.chance or 0.0, each.order_blind or 0.0)
        rival = "an order-blind model" if blind else "chance"
        if each.value <= level:
            sentence += f": no better than {rival}"
        elif each.low is not None and each.low <= level:
            sentence += f": that cannot be told from {rival}"
        sentences.append(f"{sentence}.")
    return sentences


# ---- tables ----


def _tables(results: Results) -> dict[str, Table]:
    """Each table of the page by its name."""
    scores, papers = results.scores, _papers(results.protocol)
    tables: dict[str, Table] = {}
    has_all = set(LANGUAGES) <= scores.get("retrieval", {}).keys()
    columns: list[Column]
    rows: dict[str, list[Any]]

    if "retrieval" in scores:
        columns, rows = list(itertools.product(DIRECTIONS, RETRIEVAL_METRICS)), {}
        for language, own in scores["retrieval"].items():
            rows[language] = [own[direction][metric] for direction, metric in columns]
        spoken = list(filter("mean".__ne__, rows))
        averages = ["avg"] if has_all else []
        tables["retrieval"] = _table(columns, rows, papers, [*spoken, *averages], [spoken[0], *averages])

    if "multilingual" in scores:
        every = [None] if has_all else []
        rows = {"this model": [scores["multilingual"]["all"]["MRV"]]}
        tables["multilingual"] = _table([("", "MRV")], rows, papers, every, every)
        rows = {}
        for language, own in scores["multilingual"].items():
            if language not in ("all", "num_parallel"):
                rows[language] = [own["Gap"], own["Dis"]]
        tables["distances"] = _table([("", "Gap"), ("", "Dis")], rows, papers, list(rows), [])

    if "zero_shot" in scores:
        found = {}
        for language, sets in scores["zero_shot"].items():
            for name, own in sets.items():
                found[f"{language}, {name}"] = own
        spoken = list(scores["zero_shot"])
        tables["zero_shot"] = _table(*_in_columns(found, ZERO_SHOT), papers, spoken, spoken[:1])

    if "zste" in scores:
        found = dict(scores["zste"])
        agreement = found.pop("all", None)
        columns, rows = _in_columns(found, ZSTE_TASKS)
        tables["zste"] = _table(columns, rows, papers, list(found), list(found)[:1])
        if agreement:
            form = get_metric("MRV").format
            cells = [form(agreement[task]["MRV"]["value"]) if task in agreement else None for _, task in columns]
            tables["zste"].lines.append(Line("ours", "MRV of the languages", cells))

    if "temporal" in scores:
        found = {}
        for stages in scores["temporal"].values():
            for stage, own in stages.items():
                found[stage.replace("_", " ")] = own
        tables["temporal"] = _table(*_in_columns(found, METRICS), [], [], [])
    return tables


def _in_columns(
    found: Mapping[str, Mapping[str, Any]], metrics: Iterable[str]
) -> tuple[list[Column], dict[str, list[Any]]]:
    """The metrics that any row has, in their order, and the scores of each row under them; None where it lacks one."""
    present = set().union(*found.values())
    columns = [("", metric) for metric in filter(present.__contains__, metrics)]
    rows: dict[str, list[Any]] = {}
    for name, own in found.items():
        rows[name] = [own.get(metric) for _, metric in columns]
    return columns, rows


def _papers(protocol: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the papers print for this dataset; other splits, or a part of the classes (ESC-10), have none.

    A set that was prepared goes by the name of the dataset that it was made from.
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
    """Our rows, the levels beside them, the papers' best in some languages, and what the papers print in ours."""
    lines = [Line("ours", name, list(scores)) for name, scores in rows.items()]
    levels: dict[str, list[Any]] = {"chance": [], "an order-blind model": []}
    for column in zip(*rows.values(), strict=True):
        # Rows may ask among different numbers of candidates: each column shows the level of its last row.
        last: Mapping[str, Any] = next(filter(None, reversed(column)), {})
        levels["chance"].append(last.get("chance"))
        levels["an order-blind model"].append(last.get("order_blind"))
    for name, values in levels.items():
        if any(value is not None for value in values):
            lines.append(Line("chance", name, values))

    printed: dict[tuple[str | None, Column], list[float]] = defaultdict(list)
    sections: dict[str, dict[str, Line]] = defaultdict(dict)
    for entry in papers:
        column = (entry["direction"] if entry["metric"] in RETRIEVAL_METRICS else "", entry["metric"])
        language = entry["language"]
        if column in columns and language in languages:
            own = sections[f"{entry['paper']}, table {entry['table']}"]
            name = f"{entry['model']} ({OF_PAPERS.get(language, language)})"
            own.setdefault(name, Line("paper", name, [None] * len(columns))).cells[columns.index(column)] = entry[
                "value"
            ]
            printed[language, column].append(entry["value"])

    for language in best_of:
        values = []
        for column in columns:
            choose = max if get_metric(column[1]).higher_is_better else min
            values.append(choose(printed[language, column], default=None))
        if any(values):
            lines.append(Line("best", f"best in papers, {OF_PAPERS.get(language, language)}", values))
    return Table(columns, lines, {title: list(own.values()) for title, own in sections.items()})


def _write_cell(cell: Any, metric: str) -> tuple[str, str]:
    """A score or a number in the form of its metric, and its interval; empty where there is none."""
    form = get_metric(metric).format
    if cell is None or isinstance(cell, str):
        return cell or "", ""
    if not isinstance(cell, Mapping):
        return form(cell), ""
    return form(cell["value"]), "" if cell["low"] is None else f"{form(cell['low'])}–{form(cell['high'])}"


# ---- classes, cases, sounds ----


def _zero_shot(results: Results) -> tuple[dict[str, float], dict[str, Any] | None]:
    """The accuracy of each class with the first prompts, and the confusion: names, and rows of (count, share)."""
    for language, sets in results.scores.get("zero_shot", {}).items():
        for name, own in sets.items():
            counts = results.arrays[f"zero_shot/{language}/{name}/confusion"]
            if len(counts) > MAX_CLASSES_DRAWN:
                return own["per_class"], None
            shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
            rows = np.stack([counts, shares], axis=2).tolist()  # (C, C) twice -> (C, C, 2)
            return own["per_class"], {"classes": results.arrays["zero_shot/classes"].tolist(), "rows": rows}
    return {}, None


def _cases(results: Results) -> dict[str, list[Case]]:
    """Captions whose worst rank is the least, and those on which the languages disagree most."""
    if "multilingual/ranks" not in results.arrays:
        return {}
    ranks, texts = results.arrays["multilingual/ranks"], results.arrays["multilingual/text"].tolist()
    orders = {
        "highest in every language": np.argsort(ranks.max(axis=1), kind="stable"),
        "the languages disagree": np.argsort(-ranks.var(axis=1), kind="stable"),
    }
    cases = {}
    for title, order in orders.items():
        firsts: dict[str, Case] = {}  # captions that clips share have the same ranks: each is shown once
        for query in order.tolist():
            firsts.setdefault(texts[query], Case(texts[query], (ranks[query] + 1).tolist()))
        cases[title] = list(firsts.values())[:4]
    return cases


def _samples(results: Results, rows: Any) -> dict[str, list[Sample]]:
    """Captions of the first language, evenly spread over those that found their clip and those that did not."""
    arrays, language = results.arrays, results.protocol["languages"][0]
    prefix = f"retrieval/{language}/t2a"
    if f"{prefix}/rank" not in arrays:
        return {}

    ranks, listen = arrays[f"{prefix}/rank"], _listener(results, rows)
    samples: dict[str, list[Sample]] = {}
    for title, queries in {"hits": np.flatnonzero(ranks == 0), "misses": np.flatnonzero(ranks > 0)}.items():
        spread = np.linspace(0, len(queries) - 1, MAX_SAMPLES).round().astype(int)
        for query in queries[np.unique(spread)].tolist() if len(queries) else ():
            found = int(arrays[f"{prefix}/top"][query, 0])
            sample = Sample(
                text=str(arrays[f"captions/{language}/text"][query]),
                rank=int(ranks[query]) + 1,
                right=listen(int(arrays[f"captions/{language}/clip"][query])),
                found=listen(found) if ranks[query] else None,
                found_name=str(arrays["clips/label"][found]) or str(arrays["clips/id"][found]),
            )
            samples.setdefault(title, []).append(sample)
    return samples


def _listener(results: Results, rows: Any) -> Callable[[int], str]:
    """Gives the beginning of a clip as a data URL; an empty string where its recording is not to be had any more."""
    import soundfile

    ids = results.arrays["clips/id"].tolist()
    places = {row["clip_id"]: place for place, row in enumerate(without_audio(rows or ()))}

    def listen(clip: int) -> str:
        if ids[clip] not in places:
            return ""
        try:
            waveform = read_row(rows[places[ids[clip]]], CLIP_RATE_HZ, CLIP_SECONDS)
        except (FileNotFoundError, BadAudioError):
            return ""
        encoded = io.BytesIO()
        # MP3 and not Ogg, whose every stream carries a random serial number: the same results give the same page.
        soundfile.write(encoded, waveform, CLIP_RATE_HZ, format="MP3")
        return "data:audio/mpeg;base64," + base64.b64encode(encoded.getvalue()).decode()

    return listen
