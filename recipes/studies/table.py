"""Write a reproduced table: measured scores, costs and differences, and the numbers in the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_json, write_text
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes import options
from modeling_supclap.recipes.running import say
from modeling_supclap.recipes.runs import Row
from modeling_supclap.recipes.studies.render import html_table, markdown_table
from modeling_supclap.recipes.studies.values import get_cost, load_run, summarize_runs

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.recipes.studies.values import Run
    from modeling_supclap.training.plots import Curve


def write_table(name: str, table: Mapping[str, Any], rows: Sequence[Row], args: options.ReproductionArguments) -> None:
    """Write a table as JSON, HTML and Markdown, and its figure (if any) as PNG. Print the table."""
    from modeling_supclap.evaluation.report_figures import save_projections
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.training.plots import plot_runs

    stem = get_stem(name, args)
    content = gather(name, table, rows, args)
    write_json(stem.with_suffix(".json"), content)
    text = markdown_table(content)
    write_text(stem.with_suffix(".md"), text)

    curves = table.get(f"{args.scale}_curves", table.get("curves"))
    figure = None
    if curves or "spaces" in table:
        figure = stem.with_suffix(".png")
    if figure is not None and curves:
        plot_runs(arrange_curves(curves, rows), figure)
    elif figure is not None:  # of the first seed
        first = {row.model: Results.load(row.runs[0][-1].folder) for row in rows}
        save_projections(first, figure, table["spaces"])
    write_text(stem.with_suffix(".html"), html_table(content, None if figure is None else figure.name))
    say(f"\n{text}\n{stem.with_suffix('.md')}, also as .html, .json and, if there is a figure, .png")


def get_stem(name: str, args: options.ReproductionArguments) -> Path:
    """Return the path of a table's files, without suffix.

    With selected rows or datasets, or with other settings, "_selected" is added, so that the complete table stays.
    """
    is_selected = args.rows or args.datasets or args.settings or args.controls
    return Path(args.output_dir, args.scale, name.replace("/", "_") + ("_selected" if is_selected else ""))


def gather(
    name: str, table: Mapping[str, Any], rows: Sequence[Row], args: options.ReproductionArguments
) -> dict[str, Any]:
    """Collect the measured numbers of a table and the numbers in the paper.

    Returns a dict with "table", "title", "claim", "scale", "settings", "versions", "rows" and, for a table with example
    captions, "cases" (see `tabulate_cases`). A row is a dict with "row", "model", "dataset", "baseline", "seeds",
    "cost" (see `get_cost`), "overlap" (see `count_overlap`), "left_out", `{split: ids of unusable clips}` of the first
    seed, and "scores", `{column: score}`. A score is a dict with:

    - "values", "mean" and "std": One value per seed, their mean and sample standard deviation (None for one seed).
    - "chance" and "order_blind": The scores at chance and of a model that ignores order, if known.
    - "paper": The number in the paper, or None.
    - "differences": One difference to the baseline per seed. This key and those below are only in rows with a baseline.
    - "recordings": Interval of the mean difference over recordings.
    - "low" and "high": Interval of the mean difference over seeds and recordings, or only over recordings for one seed.
    """
    from modeling_supclap import evaluation
    from modeling_supclap.evaluation.results import flat_scores

    loaded: dict[tuple[str | None, str], dict[int, Run]] = {}
    for row in rows:
        loaded[row.name, row.dataset] = {run[-1].settings["seed"]: load_run(run) for run in row.runs}

    lines = []
    first: dict[str, Results] = {}
    for row in rows:
        runs, baseline = loaded[row.name, row.dataset], loaded.get((row.baseline, row.dataset), {})
        first[row.model] = next(iter(runs.values()))[0]
        levels = {score.place: score for score in flat_scores(first[row.model].scores)}
        scores = {}
        for column in list_columns(table, args.scale):
            place = column.split()
            score = summarize_runs(runs, baseline, place)
            if len(score["values"]) < len(runs):
                continue
            if "eval_order_accuracy" in place:
                score["chance"] = 0.5
            for level in ("chance", "order_blind"):
                value = getattr(levels.get(tuple(place)), level, None)
                if value is not None:
                    score[level] = value
            printed = find_printed(name, table, row, place, args.scale)
            scores[column] = {**score, "paper": None if printed is None else printed["value"]}

        about: dict[str, Any] = {"row": row.name, "model": row.model, "dataset": row.dataset, "seeds": list(runs)}
        about["baseline"] = row.baseline if baseline else None
        about["overlap"] = count_overlap(first[row.model])
        about["left_out"] = first[row.model].content["left_out"]
        lines.append({**about, "cost": get_cost(list(runs.values())), "scores": scores})

    content: dict[str, Any] = {"table": name, "scale": args.scale, "settings": options.as_mapping(args.settings)}
    content |= {key: table.get(key, "") for key in ("title", "claim")}
    if table.get("cases"):
        content["cases"] = tabulate_cases(first, table["cases"] if args.scale == "full" else ())
    return {**content, "versions": evaluation.package_versions(), "rows": lines}


def count_overlap(results: Results) -> dict[str, int]:
    """Count the evaluated clips, and those on which the model has trained: "trained" are scored, "excluded" are not."""
    content, protocol = results.content, results.protocol
    counts = {"clips": protocol.get("clips", 0), "trained": content.get("run", {}).get("trained_clips", 0)}
    return {**counts, "excluded": protocol.get("excluded_trained", 0)}


def list_columns(table: Mapping[str, Any], scale: str) -> list[str]:
    """Return the columns of a table at a scale. LANG in a column stands for each language, and their mean.

    >>> list_columns({"columns": ["multilingual LANG Gap"]}, "full")[-2:]
    ['multilingual zho Gap', 'multilingual mean Gap']
    """
    columns = []
    for column in table.get(f"{scale}_columns", table["columns"]):
        languages = (*LANGUAGES, "mean") if " LANG " in column else ("",)
        columns += [column.replace("LANG", language) for language in languages]
    return columns


def tabulate_cases(by_model: Mapping[str, Results], clips: Sequence[str] = ()) -> list[list[str]]:
    """Tabulate the retrieval results of single captions in each language, as in ATRI tables 9 and 10, figures 5 and 6.

    The captions are those of the clips whose ids contain a name of `clips`, and then the two with the best and the two
    with the worst mean rank over models and languages. The line "caption" of a case contains its translations. A cell
    of a model contains the rank of the caption's clip, and the label of the top-ranked clip, or its first caption in
    the language, which shows whether captions of similar meaning are confused (ACL appendix D). The first line is the
    heading.
    """
    first = next(iter(by_model.values()))
    ranks = np.mean([results.arrays["multilingual/ranks"] for results in by_model.values()], axis=(0, 2))
    texts = first.arrays["multilingual/text"]
    _, distinct = np.unique(texts, return_index=True)  # captions that clips share have the same ranks
    ordered = distinct[np.argsort(ranks[distinct], kind="stable")]

    languages = first.protocol["languages"]
    query_ids = first.arrays["multilingual/query_id"]
    named = []
    for query, name in enumerate(query_ids.tolist()):
        if any(clip in name for clip in clips):
            named.append(query)
    lines = [["caption", "model", *languages]]
    for query in dict.fromkeys([*named, *ordered[:2].tolist(), *ordered[2:][-2:].tolist()]):
        number = {}  # of the query in each language
        for language in languages:
            number[language] = int((first.arrays[f"retrieval/{language}/t2a/query_id"] == query_ids[query]).argmax())
        of_languages = [str(first.arrays[f"captions/{code}/text"][number[code]]) for code in languages]
        lines.append([str(texts[query]), "caption", *of_languages])
        for model, results in by_model.items():
            arrays = results.arrays
            line = [str(texts[query]), model]
            for language, rank in zip(languages, arrays["multilingual/ranks"][query], strict=True):
                clip = arrays[f"retrieval/{language}/t2a/top"][number[language], 0]
                caption = (arrays[f"captions/{language}/clip"] == clip).argmax()
                text = arrays["clips/label"][clip] or arrays[f"captions/{language}/text"][caption]
                line.append(f"{rank + 1}: {text}")
            lines.append(line)
    return lines


def find_printed(
    name: str, table: Mapping[str, Any], row: Row, place: Sequence[str], scale: str
) -> dict[str, Any] | None:
    """Return the entry of `paper_results` for a score, or None if the paper does not report it. At scale mini, use the
    value for the first dataset of the paper's table.
    """
    from modeling_supclap import evaluation

    dataset, model = row.dataset, row.model
    if scale == "mini" and table.get("full"):
        dataset, full = next(iter(table["full"].items()))
        model += full.get("model_suffix", "") if isinstance(full, dict) else ""
    languages = (place[1], {"mean": "avg", "all": "avg"}.get(place[1]), None)
    # the papers' time may be of either
    metric = "train_runtime" if place[-1] == "epoch_runtime" else place[-1]
    wanted = {"dataset": dataset.split(" to ")[-1], "model": model, "metric": metric}

    paper, _, number = name.partition("/table")
    for entry in evaluation.paper_results(table=table.get("printed", number)):
        is_place = entry["language"] in languages and (len(place) < 4 or entry["direction"] in (*place, None))
        if entry["paper"].lower() == paper and is_place and wanted.items() <= entry.items():
            return entry
    return None


def arrange_curves(curves: Mapping[str, str], rows: Sequence[Row]) -> dict[str, dict[str, Curve]]:
    """Arrange logged values as panels of a figure, `{panel title: {curve label: curve}}`.

    `curves` is `{logged name: panel title}`. Names with the same title share a panel.
    """
    one_dataset = all(row.dataset == rows[0].dataset for row in rows)
    titles = Counter(curves.values())
    panels: dict[str, dict[str, Curve]] = {}
    for row in rows:
        logs = [load_run(run)[1] for run in row.runs]
        for key, title in curves.items():
            label = row.model if titles[title] == 1 else f"{row.model}, {key.removeprefix('eval_')}"
            panel = title if one_dataset else f"{title}, {row.dataset}"
            panels.setdefault(panel, {})[label] = key, logs
    return panels
