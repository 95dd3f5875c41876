"""Tables of the papers: values of runs, differences, printed numbers, and their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_json, write_text
from modeling_supclap.datasets_scripts.builders.recordings import listing
from modeling_supclap.evaluation.tables import Table, arrange, to_html
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes.command import say
from modeling_supclap.recipes.options import ReproductionArguments, as_mapping
from modeling_supclap.recipes.sweep import Row, Step
from modeling_supclap.training.options import captions_per_clip

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.training.plots import Curve

    Run = tuple[Results, list[dict[str, Any]]]  # results and training log, from `load_run`

COSTS = ("steps", "captions", "seconds")
CASES = (
    "For each language: the rank of the caption's own clip, counted from 1, and the label of the top-ranked clip, or "
    "its first caption."
)


def write_table(name: str, table: Mapping[str, Any], rows: Sequence[Row], args: ReproductionArguments) -> None:
    """Write a table as JSON, HTML and Markdown, and its figure (if any) as PNG. Print the table."""
    from modeling_supclap.evaluation.report_figures import save_projections
    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.training.plots import plot_runs

    stem = get_stem(name, args)
    content = gather(name, table, rows, args)
    write_json(stem.with_suffix(".json"), content)
    text = to_markdown(content)
    write_text(stem.with_suffix(".md"), text)

    curves, figure = table.get(f"{args.scale}_curves", table.get("curves")), stem.with_suffix(".png")
    if curves:
        plot_runs(arrange_curves(curves, rows), figure)
    elif "spaces" in table:  # of the first seed
        first = {row.model: Results.load(row.runs[0][-1].folder) for row in rows}
        save_projections(first, figure, table["spaces"])
    picture = figure.name if curves or "spaces" in table else None
    title = f"{content['table']}: {content['title']}"
    write_text(stem.with_suffix(".html"), to_html(title, make_tables(content), content["claim"], picture))
    say(f"\n{text}\n{stem.with_suffix('.md')}, also as .html, .json and, if there is a figure, .png")


def get_stem(name: str, args: ReproductionArguments) -> Path:
    """Return the path of a table's files, without suffix.

    With selected rows or datasets, or with other settings, "_selected" is added, so that the complete table stays.
    """
    is_selected = args.rows or args.datasets or args.settings
    return Path(args.output_dir, args.scale, name.replace("/", "_") + ("_selected" if is_selected else ""))


def make_tables(content: Mapping[str, Any]) -> list[Table]:
    """Arrange the content of `gather` as tables: scores with costs and printed numbers, and the cases, if any."""
    records: list[dict[str, Any]] = []
    for row in content["rows"]:
        about = {"row": row["model"], "data": row["dataset"]}
        about |= {cost: f"{value:,.0f}" for cost, value in row.get("cost", {}).items()}
        for column, score in row["scores"].items():
            record = {**about, **score, "score": column, "value": score["mean"], "low": None, "high": None}
            if differences := score.get("differences"):
                up = sum(difference > 0 for difference in differences)
                record |= {"difference": float(np.mean(differences)), "up": f"{up} of {len(differences)} up"}
                record |= {"difference_low": score.get("low"), "difference_high": score.get("high")}
            records.append(record)

    index = ["row"] if len({row["dataset"] for row in content["rows"]}) == 1 else ["row", "data"]
    index += [cost for cost in COSTS if any(cost in record for record in records)]
    tables = [arrange(records, index, caption=describe(content))] if records else []
    if "cases" in content:
        tables.append(Table(content["cases"], caption=CASES))
    return tables


def to_markdown(content: Mapping[str, Any]) -> str:
    """Format a table as Markdown, with its title and claim."""
    title = f"### {content['table']}: {content['title']}"
    tables = (table.to_markdown() for table in make_tables(content))
    return "\n\n".join([title, f"Claim: {content['claim']}", *tables]) + "\n"


def describe(content: Mapping[str, Any]) -> str:
    """Return the caption of a table, which explains its numbers."""
    rows = content["rows"]
    seeds = sorted(set[int]().union(*(row["seeds"] for row in rows)))
    fewest = min(len(row["seeds"]) for row in rows)
    parts = [
        f"Scale {content['scale']}, seeds {', '.join(map(str, seeds))}: mean ± standard deviation over the seeds."
    ]
    if content.get("settings"):
        settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items())
        parts.append(f"Changed settings: {settings}.")
    interval = (
        "and its 95 % interval over recordings. **One seed**: the interval does not cover the variation between "
    )
    interval += "seeds."
    if fewest > 1:
        interval = "its 95 % interval over seeds and recordings, and the number of seeds with a difference above 0."
    parts.append(f"Then the difference to the row's baseline{',' if fewest > 1 else ''} {interval}")
    if 1 < fewest < 5:
        parts.append(note_few_seeds(fewest))
    for row in rows:
        overlap = row.get("overlap", {})
        for kind, what in (("trained", "are scored"), ("excluded", "are left out")):
            if overlap.get(kind):
                trained = f"{overlap[kind]:,} of {overlap['clips']:,} clips of {row['dataset']}"
                parts.append(f"**Trained on**: {trained} are in the training data of {row['model']} and {what}.")
        for split, clips in row.get("left_out", {}).items():
            parts.append(f"**Left out**: {len(clips):,} unusable recordings of {split} ({listing(clips)}).")
    if any(row.get("cost") for row in rows):
        parts.append("Captions: number of captions that the text encoder embeds in training. Seconds: processor time.")
    return " ".join(dict.fromkeys(parts))


def note_few_seeds(count: int) -> str:
    """Return a sentence for the caption of a table with fewer than five seeds."""
    return f"**Fewer than five seeds** ({count}): an indication, not evidence."


def gather(name: str, table: Mapping[str, Any], rows: Sequence[Row], args: ReproductionArguments) -> dict[str, Any]:
    """Collect the measured numbers of a table and the numbers in the paper.

    Returns a dict with "table", "title", "claim", "scale", "settings", "versions", "rows" and, for a table with example
    captions, "cases" (see `tabulate_cases`). A row is a dict with "row", "model", "dataset", "baseline", "seeds",
    "cost" (see `get_cost`), "overlap" (numbers of evaluated clips, of those that the model has trained on, and of those
    that are left out for this reason), "left_out", `{split: ids of unusable clips}` of the first seed, and "scores",
    `{column: score}`. A score is a dict with:

    - "values", "mean" and "std": One value per seed, their mean, and for several seeds their sample standard deviation.
    - "chance" and "order_blind": The scores at chance and of a model that ignores order, if known.
    - "paper": The number in the paper, or None.
    - "differences": One difference to the baseline per seed. This key and those below are only in rows with a baseline.
    - "recordings": Interval of the mean difference over recordings.
    - "low" and "high": Interval of the mean difference over seeds and recordings, or only over recordings for one seed.
    """
    from modeling_supclap import evaluation

    loaded: dict[tuple[str | None, str], dict[int, Run]] = {}
    for row in rows:
        loaded[row.name, row.dataset] = {run[-1].settings["seed"]: load_run(run) for run in row.runs}

    lines = []
    first: dict[str, Results] = {}
    for row in rows:
        runs, baseline = loaded[row.name, row.dataset], loaded.get((row.baseline, row.dataset), {})
        results = first[row.model] = next(iter(runs.values()))[0]
        scores = {}
        for column in list_columns(table, args.scale):
            score = summarize_column(runs, baseline, column.split())
            if score is not None:
                printed = find_printed(name, table, row, column.split(), args.scale)
                scores[column] = {**score, "paper": printed and printed["value"]}
        about: dict[str, Any] = {"row": row.name, "model": row.model, "dataset": row.dataset, "seeds": list(runs)}
        about["baseline"] = row.baseline if baseline else None
        about["overlap"] = {
            "clips": results.protocol.get("clips", 0),
            "trained": results.content.get("run", {}).get("trained_clips", 0),  # and scored
            "excluded": results.protocol.get("excluded_trained", 0),
        }
        about["left_out"] = results.content["left_out"]
        lines.append({**about, "cost": get_cost(list(runs.values())), "scores": scores})

    content: dict[str, Any] = {"table": name, "scale": args.scale, "settings": as_mapping(args.settings)}
    content |= {key: table.get(key, "") for key in ("title", "claim")}
    if table.get("cases"):
        content["cases"] = tabulate_cases(first, table["cases"] if args.scale == "full" else ())
    return {**content, "versions": evaluation.package_versions(), "rows": lines}


def summarize_column(
    runs: Mapping[int, Run], baseline: Mapping[int, Run], place: Sequence[str]
) -> dict[str, Any] | None:
    """Summarize a score over the runs of a row, as `gather` describes. Return None if a run lacks the score."""
    from modeling_supclap.evaluation.comparison import compare_seeds
    from modeling_supclap.evaluation.results import flat_scores
    from modeling_supclap.metrics.comparison import summarize

    values, others = (
        {seed: value for seed, run in group.items() if (value := get_value(*run, place)) is not None}
        for group in (runs, baseline)
    )
    if len(values) < len(runs):
        return None
    cell = summarize(list(values.values()))
    summary: dict[str, Any] = {"values": list(values.values()), "mean": cell.value, "std": cell.std}
    if "eval_order_accuracy" in place:
        summary["chance"] = 0.5
    for score in flat_scores(next(iter(runs.values()))[0].scores):
        if score.place == tuple(place):
            summary |= {"chance": score.chance, "order_blind": score.order_blind}

    results, of_baseline = ({seed: run[0] for seed, run in group.items()} for group in (runs, baseline))
    change = compare_seeds(results, of_baseline, place, values, others)
    if change is not None:
        summary |= {"differences": list(change.values), "recordings": change.recordings}
        summary |= {"low": change.low, "high": change.high}
    return {name: value for name, value in summary.items() if value is not None}


def load_run(run: Sequence[Step]) -> Run:
    """Load the results of a run, and the log of its last training (in post-training, stage B).

    The section "training" of the results comes from the last training. "left_out" contains the ids of the clips with
    unusable recordings, for each split that a step has read. The mean radii of each epoch are appended to the log and,
    if the results contain the cosines of matching test pairs, their histogram.
    """
    import torch

    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.training.drift import similarity_histogram
    from modeling_supclap.training.plots import epoch_means

    log: list[dict[str, Any]] = []
    training: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for step in run:
        results = Results.load(step.folder)
        training = results.content.get("training") or training
        for split, clips in results.content.get("left_out", {}).items():
            left_out[f"{step.settings.get('dataset', 'synthetic')} {split}"] = clips
        for folder in (step.folder, step.folder / "stage_b"):
            path = folder / "trainer_state.json"
            if path.is_file():
                log = json.loads(path.read_text(encoding="utf-8"))["log_history"]

    results.content |= {"training": training, "left_out": {name: clips for name, clips in left_out.items() if clips}}
    log += epoch_means(log, ("radius_t2a", "radius_a2t"))
    cosines = results.arrays.get("similarity/eng/positive")
    if cosines is not None:
        histogram = similarity_histogram(torch.from_numpy(cosines).float())
        log.append({"step": log[-1]["step"] if log else 0, "test_similarity": histogram})
    return results, log


def get_value(results: Results, log: Sequence[Mapping[str, Any]], place: Sequence[str]) -> float | None:
    """Look up the value of one table column in the results and training log of a run. Return None if it is missing.

    `place` is the column name, split into words. The columns are:

    - `retrieval eng t2a R@1`, for example: A score in the results. The language "mean" averages over languages.
    - `training KEY`: An entry of the "training" section of the results. `training epoch_runtime` is the mean time of an
      epoch, with its evaluation.
    - `similarity positive` or `similarity negative`: Mean cosine of matching or non-matching test pairs.
    - `similarity separation`: Difference of these two means, divided by the standard deviation of non-matching pairs.
    - `captions relative_distance`: Mean distance between translations and their English captions, divided by the mean
      distance between two English captions. 0: the languages agree. 1: a translation is as far from its English caption
      as an unrelated one. Unlike ATRI eq. 15, it is not small for a collapsed model with almost equal embeddings.
    - `log NAME mean`, `log NAME first` or `log NAME last`: A value from the training log.
    """
    from modeling_supclap.evaluation.results import flat_scores

    if place[0] == "training":
        training = results.content["training"]
        logged = {**training.get("last_logs", {}), **training}
        if place[1] == "epoch_runtime" and "train_runtime" in logged:
            return logged["train_runtime"] / logged["epoch"]
        return logged.get(place[1])
    if place[0] == "similarity":
        positive, negative = results.arrays["similarity/eng/positive"], results.arrays["similarity/eng/negative"]
        separation = (positive.mean() - negative.mean()) / negative.std()
        return float({"positive": positive.mean(), "negative": negative.mean(), "separation": separation}[place[1]])
    if place[0] == "captions":
        from scipy.spatial.distance import pdist

        others = results.protocol["languages"][1:]
        to_english = np.mean([results.arrays[f"multilingual/distance/{language}"] for language in others])
        return float(to_english / pdist(results.arrays["embeddings/text/eng"]).mean())
    if place[0] == "log":
        values = [entry[place[1]] for entry in log if place[1] in entry]
        if not values:
            return None
        return {"mean": float(np.mean(values)), "first": values[0], "last": values[-1]}[place[2]]

    scores = {score.place: score.value for score in flat_scores(results.scores)}
    if tuple(place) in scores or place[1] != "mean":
        return scores.get(tuple(place))
    task, _, *rest = place
    of_languages = [value for path, value in scores.items() if path[0] == task and [*path[2:]] == rest]
    return float(np.mean(of_languages)) if of_languages else None


def get_cost(runs: Sequence[Run]) -> dict[str, float]:
    """Compute the mean training costs of several runs: "steps", "captions", and "seconds" of processor time.

    "captions" is the number of captions that the text encoder embeds: steps * clips per step * texts per clip. The
    training of the model that a run starts from is not included. A cost is missing if no run has recorded it.
    """
    costs: dict[str, list[float]] = {}
    for results, _ in runs:
        training = dict(results.content["training"])
        if "steps" in training and "captions" not in training:  # which post-training records
            arguments = training["arguments"]
            names = ("loss", "languages", "languages_per_clip", "negatives_per_clip")  # not all in older results
            texts = captions_per_clip(**{name: arguments[name] for name in names if name in arguments})
            clips = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
            training["captions"] = training["steps"] * clips * training.get("processes", 1) * texts
        if "process_seconds" in training:
            training["seconds"] = training["process_seconds"]
        for name in COSTS:
            if name in training:
                costs.setdefault(name, []).append(training[name])
    return {name: float(np.mean(values)) for name, values in costs.items()}


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
    first = next(iter(by_model.values())).arrays
    languages = next(iter(by_model.values())).protocol["languages"]
    ranks = np.mean([results.arrays["multilingual/ranks"] for results in by_model.values()], axis=(0, 2))
    texts, query_ids = first["multilingual/text"], first["multilingual/query_id"]
    _, distinct = np.unique(texts, return_index=True)  # captions that clips share have the same ranks
    ordered = distinct[np.argsort(ranks[distinct], kind="stable")].tolist()
    named = [query for query, name in enumerate(query_ids) if any(clip in name for clip in clips)]

    lines = [["caption", "model", *languages]]
    for query in dict.fromkeys([*named, *ordered[:2], *ordered[2:][-2:]]):
        rows = [[str(texts[query]), name] for name in ("caption", *by_model)]
        for place, language in enumerate(languages):
            number = (first[f"retrieval/{language}/t2a/query_id"] == query_ids[query]).argmax()
            rows[0].append(str(first[f"captions/{language}/text"][number]))
            for row, results in zip(rows[1:], by_model.values(), strict=True):
                arrays = results.arrays
                clip = arrays[f"retrieval/{language}/t2a/top"][number, 0]
                caption = (arrays[f"captions/{language}/clip"] == clip).argmax()
                text = arrays["clips/label"][clip] or arrays[f"captions/{language}/text"][caption]
                row.append(f"{arrays['multilingual/ranks'][query, place] + 1}: {text}")
        lines += rows
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
