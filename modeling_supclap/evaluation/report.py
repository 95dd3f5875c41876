"""Results as one self-contained page for people: `report.html`.

Everything on the page is computed from the results (`results.json` and `outcomes.npz`); nothing is embedded or scored
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
from modeling_supclap.metrics.names import RETRIEVAL_METRICS, get_metric

from .report_figures import figures
from .results import DIRECTIONS, NUM_CLASSES, Results, Score, flat_scores, get_dataset_name, paper_results

ZERO_SHOT = ("top1", "top5", "mean_per_class", "mean_over_folds")
ZSTE_TASKS = {
    "1A": "which one sound is heard",
    "2A": "two sounds in a row: both are recognised",
    "2B": "two sounds in a row: one at least is recognised",
    "2C": "two sounds at once: both are recognised",
    "2D": "two sounds at once: one at least is recognised",
    "3A": "two sounds in a row: which is before which, or are they at once",
    "3B": "two sounds at once: are they, or is one before the other",
    "4A": "as 3A, among many other sentences",
    "4B": "as 3B, among many other sentences",
    "5A": "which sound is first, and which is second",
    "5B": "which two sound together, among many other sentences",
}
# What the papers' results call a mean of the languages and all of them together.
OF_PAPERS = {"avg": "mean of 8", None: "8 languages"}
MAX_CLASSES_DRAWN = 100
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
        grouped = groupby(self.columns, lambda column: column[0])
        return [(DIRECTIONS.get(name, ""), len([*own])) for name, own in grouped]


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


def write_report(results: Results | str | Path, path: str | Path, rows: Any = None, num_samples: int = 4) -> Path:
    """Writes the page for results, whole or not at all.

    Args:
        results: What `evaluation` returned, or the folder or `results.json` it was saved to.
        path: The HTML file.
        rows: What was evaluated, where the recordings are in the rows and not in files of their own.
        num_samples: How many hits and how many misses to make listenable, at most.

    Returns:
        The path.

    Raises:
        FileNotFoundError: There are no results.
    """
    page = render_report(results if isinstance(results, Results) else Results.load(results), rows, num_samples)
    write_text(path, page)
    return Path(path)


def render_report(results: Results, rows: Any = None, num_samples: int = 4) -> str:
    """The page as a string; arguments as `write_report`. The same results give the same page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("modeling_supclap.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scores = results.scores
    zero_shot = _first_zero_shot(results)
    per_class = zero_shot[1]["per_class"] if zero_shot else {}
    return environment.get_template("report.html.j2").render(
        model=results.content["model"],
        dataset=get_dataset_name(results.protocol),
        protocol={"audio": None, "positives": "clip", "caption_handling": None, "captions": {}, **results.protocol},
        versions=results.content["versions"],
        run=results.content["run"],
        training=results.content.get("training"),
        verdicts=_verdicts(results),
        title_of=_title_of,
        zste_tasks=ZSTE_TASKS,
        tables=dict(_tables(results)),
        bars={
            title: [(name, own[direction]["R@1"]) for name, own in scores.get("retrieval", {}).items()]
            for direction, title in DIRECTIONS.items()
        },
        class_bars=sorted(per_class.items(), key=lambda item: -item[1]),
        confusion=_confusion(results),
        figures=dict(figures(results)),
        cases=_cases(results),
        samples=_samples(results, rows, num_samples),
    )


def _title_of(metric: str) -> str:
    """What stands above a column: a short name where readers know it, else the metric's own."""
    return metric if metric in RETRIEVAL_METRICS or metric in ZSTE_TASKS else get_metric(metric).display


# ---- what it comes to ----


def _verdicts(results: Results) -> list[str]:
    """One sentence for each task: the first score, what chance would give, and whether the interval is clear of it."""
    asked = {
        "retrieval": ("t2a", "R@1"),
        "zero_shot": (None, "top1"),
        "zste": (None, "3A"),
        "temporal": (None, "temporal_accuracy"),
    }
    told = {
        "retrieval": "captions in {language} find their clip first",
        "zero_shot": "clips are given the right class",
        "zste": "of two sounds in a row the right one is said to be first",
        "temporal": "an item's own caption wins within its pair",
    }
    sentences = []
    for task, (direction, metric) in asked.items():
        found = [each for each in flat_scores({task: results.scores.get(task, {})}) if each.place[-1] == metric]
        found = [each for each in found if direction is None or direction in each.place]
        if found:
            # The last stage of a post-training is what it leaves; of languages and templates the first counts.
            each = found[-1] if task == "temporal" else found[0]
            sentences.append(_verdict(told[task].format(language=each.place[1]), each))
    return sentences


def _verdict(told: str, found: Score) -> str:
    value, interval, chance, blind = found.cells()
    levels = f"chance {chance} %" + (f", an order-blind model {blind} %" if blind else "")
    sentence = f"{told[0].upper()}{told[1:]} in {value} % of the cases ({levels}"
    sentence += f"; interval {interval} %)" if interval else ")"
    level = max(found.chance or 0.0, found.order_blind or 0.0)
    if found.low is not None and found.low <= level:
        return f"{sentence}: that cannot be told from {'an order-blind model' if blind else 'chance'}."
    if found.value <= level:
        return f"{sentence}: no better than {'an order-blind model' if blind else 'chance'}."
    return f"{sentence}."


# ---- tables ----


def _tables(results: Results) -> Iterator[tuple[str, Table]]:
    """Each table of the page by its name."""
    scores, papers = results.scores, _papers(results.protocol)
    has_all = set(LANGUAGES) <= set(scores.get("retrieval", {}))

    if "retrieval" in scores:
        columns: list[Column] = [(direction, metric) for direction in DIRECTIONS for metric in RETRIEVAL_METRICS]
        rows = {n: [own[direction][metric] for direction, metric in columns] for n, own in scores["retrieval"].items()}
        spoken = [name for name in rows if name != "mean"]
        averages = ["avg"] if has_all else []
        yield "retrieval", _table(columns, rows, papers, [*spoken, *averages], [spoken[0], *averages])
    if "multilingual" in scores:
        own = scores["multilingual"]
        every = [None] if has_all else []
        yield "multilingual", _table([("", "MRV")], {"this model": [own["all"]["MRV"]]}, papers, every, every)
        columns = [("", "Gap"), ("", "Dis")]
        rows = {n: [own[n]["Gap"], own[n]["Dis"]] for n in own if n not in ("all", "num_parallel")}
        yield "distances", _table(columns, rows, papers, list(rows), [])
    if "zero_shot" in scores:
        named = {f"{name}, {kind}": own for name, sets in scores["zero_shot"].items() for kind, own in sets.items()}
        columns = [("", metric) for metric in ZERO_SHOT if any(metric in own for own in named.values())]
        spoken = list(scores["zero_shot"])
        yield "zero_shot", _table(columns, _cells_of(named, columns), papers, spoken, spoken[:1])
    if "zste" in scores:
        spoken = [name for name in scores["zste"] if name != "all"]
        columns = [("", task) for task in scores["zste"][spoken[0]]]
        named = {name: scores["zste"][name] for name in spoken}
        table = _table(columns, _cells_of(named, columns), papers, spoken, spoken[:1])
        if agreement := scores["zste"].get("all"):
            cells = [_cell(agreement.get(task, {}).get("MRV"), "MRV") for _, task in columns]
            table.lines.append(Line("ours", "MRV of the languages", cells))
        yield "zste", table
    if "temporal" in scores:
        named = {
            stage.replace("_", " "): own for stages in scores["temporal"].values() for stage, own in stages.items()
        }
        columns = [("", metric) for metric in dict.fromkeys(metric for own in named.values() for metric in own)]
        yield "temporal", _table(columns, _cells_of(named, columns), [], [], [])


def _cells_of(rows: Mapping[str, Mapping[str, Any]], columns: Sequence[Column]) -> dict[str, list[Any]]:
    """The scores of each row in the order of the columns, None where a row lacks one."""
    return {name: [own.get(metric) for _, metric in columns] for name, own in rows.items()}


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


def _table(
    columns: Sequence[Column],
    rows: Mapping[str, Sequence[Any]],
    papers: Sequence[Mapping[str, Any]],
    languages: Sequence[str | None],
    best_of: Sequence[str | None],
) -> Table:
    """Our rows, the levels beside them, the papers' best in some languages, and what the papers print in ours."""
    lines = _lines(columns, rows, "ours")
    for level, name in (("chance", "chance"), ("order_blind", "an order-blind model")):
        # Rows may ask among different numbers of candidates: each column shows the level of its last row.
        last = [[own[place] for own in rows.values() if own[place]] for place in range(len(columns))]
        cells = [_cell(own[-1].get(level) if own else None, columns[place][1]) for place, own in enumerate(last)]
        if any(cell.value for cell in cells):
            lines.append(Line("chance", name, cells))

    printed: dict[tuple[str | None, Column], list[float]] = defaultdict(list)
    sections: dict[str, dict[str, dict[Column, float]]] = defaultdict(lambda: defaultdict(dict))
    for entry in papers:
        column = (entry["direction"] if entry["metric"] in RETRIEVAL_METRICS else "", entry["metric"])
        language = entry["language"]
        if column in columns and language in languages:
            name = f"{entry['model']} ({OF_PAPERS.get(language, language)})"
            sections[f"{entry['paper']}, table {entry['table']}"][name][column] = entry["value"]
            printed[language, column].append(entry["value"])

    best: dict[str, list[Any]] = {}
    for language in best_of:
        if any(language == spoken for spoken, _ in printed):
            own = best[f"best in papers, {OF_PAPERS.get(language, language)}"] = []
            for column in columns:
                choose = max if get_metric(column[1]).higher_is_better else min
                own.append(choose(printed[language, column], default=None))

    told = {}
    for title, models in sections.items():
        of_models = {name: [own.get(column) for column in columns] for name, own in models.items()}
        told[title] = _lines(columns, of_models, "paper")
    return Table(columns, [*lines, *_lines(columns, best, "best")], told)


def _lines(columns: Sequence[Column], rows: Mapping[str, Sequence[Any]], kind: str) -> list[Line]:
    """A line for each row of scores, in the forms of their columns."""
    lines = []
    for name, scores in rows.items():
        cells = [_cell(score, metric) for score, (_, metric) in zip(scores, columns, strict=True)]
        lines.append(Line(kind, name, cells))
    return lines


def _cell(score: Any, metric: str) -> Cell:
    form = get_metric(metric).format
    if score is None:
        return Cell("")
    if not isinstance(score, Mapping):
        return Cell(form(score))
    ends = [form(score[end]) for end in ("low", "high") if score.get(end) is not None]
    return Cell(form(score["value"]), "–".join(ends))


# ---- classes, cases, sounds ----


def _first_zero_shot(results: Results) -> tuple[str, Mapping[str, Any]] | None:
    for language, sets in results.scores.get("zero_shot", {}).items():
        for template_set, own in sets.items():
            return f"{language}/{template_set}", own
    return None


def _confusion(results: Results) -> dict[str, Any] | None:
    """Class names and rows of (count, share of the row)."""
    found = _first_zero_shot(results)
    if found is None:
        return None
    counts = results.arrays[f"zero_shot/{found[0]}/confusion"]
    if len(counts) > MAX_CLASSES_DRAWN:
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [list(zip(*pair, strict=True)) for pair in zip(counts.tolist(), shares.tolist(), strict=True)]
    return {"classes": results.arrays["zero_shot/classes"].tolist(), "rows": rows}


def _cases(results: Results, number: int = 4) -> dict[str, list[Case]]:
    """Captions whose worst rank is the least, and those on which the languages disagree most."""
    if "multilingual/ranks" not in results.arrays:
        return {}
    ranks, texts = results.arrays["multilingual/ranks"], results.arrays["multilingual/text"].tolist()
    orders = {
        "highest in every language": np.lexsort((np.arange(len(ranks)), ranks.max(axis=1))),
        "the languages disagree": np.lexsort((np.arange(len(ranks)), -ranks.var(axis=1))),
    }
    cases = {}
    for title, order in orders.items():
        firsts: dict[str, int] = {}  # captions that clips share have the same ranks: each is shown once
        for query in order.tolist():
            firsts.setdefault(texts[query], query)
        cases[title] = [Case(text, (ranks[query] + 1).tolist()) for text, query in list(firsts.items())[:number]]
    return cases


def _samples(results: Results, rows: Any, number: int) -> dict[str, list[Sample]]:
    """Captions of the first language, evenly spread over those that found their clip and those that did not."""
    arrays, language = results.arrays, results.protocol["languages"][0]
    prefix = f"retrieval/{language}/t2a"
    if f"{prefix}/rank" not in arrays or not number:
        return {}

    ranks, listen = arrays[f"{prefix}/rank"], _listener(results, rows)
    samples: dict[str, list[Sample]] = {}
    for title, queries in {"hits": np.flatnonzero(ranks == 0), "misses": np.flatnonzero(ranks > 0)}.items():
        spread = np.linspace(0, len(queries) - 1, number).round().astype(int)
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

    ids, paths = (results.arrays[f"clips/{name}"].tolist() for name in ("id", "audio_path"))
    places = {row["clip_id"]: place for place, row in enumerate(without_audio(rows))} if rows is not None else {}

    def listen(clip: int) -> str:
        place = places.get(ids[clip])
        row = {"clip_id": ids[clip], "audio_path": paths[clip]} if place is None else rows[place]
        try:
            waveform = read_row(row, CLIP_RATE_HZ, CLIP_SECONDS)
        except (FileNotFoundError, BadAudioError):
            return ""
        encoded = io.BytesIO()
        # MP3 and not Ogg, whose every stream carries a random serial number: the same results give the same page.
        soundfile.write(encoded, waveform, CLIP_RATE_HZ, format="MP3")
        return "data:audio/mpeg;base64," + base64.b64encode(encoded.getvalue()).decode()

    return listen
