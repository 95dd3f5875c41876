"""Compare training methods by learning curves, with the same tuning for each method (see docs/protocol.md).

`supclap reproduce evidence/svr` runs a study of `configs/evidence/studies.yaml`. A study compares arms (methods). Each
arm is tuned on the validation split, with a seed that is not reported. Then all arms are trained for one, two, four,
... times the epochs, until the validation score of the first arm, the baseline, rises by less than one point. Each
number of epochs is trained from the start, with its own learning rate schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, write_json, write_text
from modeling_supclap.evaluation.tables import Table, find_metric, format_heading
from modeling_supclap.metrics.comparison import Cell, difference, summarize
from modeling_supclap.metrics.names import MetricName
from modeling_supclap.recipes.arguments import CONFIGS, read_settings
from modeling_supclap.recipes.command import is_first_process, say
from modeling_supclap.recipes.options import ReproductionArguments, as_mapping
from modeling_supclap.recipes.studies.tables import COSTS, get_cost, get_stem, get_value, load_run, note_few_seeds
from modeling_supclap.recipes.sweep import Row, Step, build_step, check_rows, reads_folder, run_step

CONVERGED_GAIN = 0.01
"""The baseline has converged if twice the steps raise its mean validation score by less than this."""

TUNING_SEED = 1000
SHARE, RATIO = MetricName("share"), MetricName("ratio", percent=False, digits=2)

Point = dict[str, Any]
"""One run: "seed", "validation" score, test "scores" by column, mean "score" of the study's columns, and the costs in
`COSTS`. In a study with folds: "fold", the means over the seeds, and "runs", the point of each seed."""

TuningScore = dict[str, Any]
"""One run of the tuning: "settings" of the grid, and "validation" score; None if the training diverged."""


def check_study(name: str, study: Mapping[str, Any], args: ReproductionArguments) -> list[str]:
    """Check the settings and inputs of a study, and return its arms. A dry run prints missing inputs.

    Raises:
        FileNotFoundError: Data, an encoder or a model is missing. With `args.skip_missing`, no arm is returned.
        ValueError: There are fewer than two seeds, so an interval over seeds cannot be computed; or the seeds include
            that of the tuning. Or `args.settings` contains a setting that the study tunes, or the number of epochs or
            steps.
    """
    seeds = args.seeds
    if len(seeds) < 2:
        raise ValueError(f"seeds is {seeds}; an interval over seeds requires at least two, and evidence at least five")
    if TUNING_SEED in seeds:
        raise ValueError(f"seeds is {seeds}, but {TUNING_SEED} is the seed of the tuning; choose other seeds")
    tuned = set[str]().union(*(get_grid(study, arm) for arm in study["arms"]))
    varied = sorted(as_mapping(args.settings).keys() & {*tuned, "num_train_epochs", "max_steps"})
    if varied:
        raise ValueError(f"settings has {', '.join(varied)}, which {name} sets in each run; leave it out")

    baseline = next(iter(study["arms"]))
    arms = [arm for arm in study["arms"] if not args.rows or arm in (baseline, *args.rows)]
    rows = []
    for arm, doubling in itertools.product(arms, range(study["doublings"] + 1)):
        settings = {key: values[0] for key, values in get_grid(study, arm).items()}
        settings["num_train_epochs"] = study["num_train_epochs"] * 2**doubling
        try:
            pairs = itertools.product(study.get("folds", [None]), seeds)
            runs = [build_steps(arm, study, settings, seed, args, fold) for fold, seed in pairs]
        except FileNotFoundError as error:
            if not args.dry_run:
                raise
            if not doubling:
                say(f"{name}, {arm}: missing: {error}")
            continue
        rows.append(Row(arm, study["arms"][arm]["model"], None, name, runs))
    runnable = check_rows(name, rows, args)
    return arms if runnable else []


def run_study(name: str, study: Mapping[str, Any], arms: Sequence[str], args: ReproductionArguments) -> Path:
    """Tune and train the arms of a study, and write its table, curves and verdicts. Finished runs are not repeated.

    Args:
        name: Name of the study, such as "evidence/svr".
        study: Definition from `studies.yaml`, which describes the keys.
        arms: Arms from `check_study`.
        args: Options of `supclap reproduce`: seeds, settings, data and output folder.

    Returns:
        Path of the Markdown file. A JSON file with each run and a PNG file with the learning curves are beside it.
    """
    baseline, stem = next(iter(study["arms"])), get_stem(name, args)
    kept = ("title", "claim", "method", "columns", "measures", "folds")
    content = {key: study[key] for key in kept if key in study}
    content |= {"study": name, "seeds": list(args.seeds), "settings": as_mapping(args.settings)}
    tuning = {arm: tune(arm, study, args) for arm in arms}
    points: dict[str, list[list[Point]]] = {arm: [] for arm in arms}  # one list of runs per number of epochs
    for doubling in range(study["doublings"] + 1):
        epochs = study["num_train_epochs"] * 2**doubling
        for arm in arms:
            settings = find_best(tuning[arm]) | {"num_train_epochs": epochs}
            points[arm].append(run_arm(arm, study, settings, args.seeds, args))

        means = [average(of_epochs, "validation") for of_epochs in points[baseline]]
        converged = len(means) > 1 and means[-1] - means[-2] < CONVERGED_GAIN
        say(f"{name}: {epochs} epochs, validation score of {baseline} {means[-1]:.3f}")
        summary = summarize_arms(points, study, tuning)
        content |= {"converged": converged, "arms": summary, "verdict": judge(summary, study, converged)}
        if is_first_process():
            write_study(content, stem)
        if converged:
            break
    return stem.with_suffix(".md")


def write_study(content: Mapping[str, Any], stem: Path) -> None:
    """Write a study as JSON, learning curves and Markdown."""
    figure = stem.with_suffix(".png")
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_json(stem.with_suffix(".json"), content)
    plot_curves(content, figure)
    write_text(stem.with_suffix(".md"), render_study(content, figure.name))


def build_steps(
    arm: str,
    study: Mapping[str, Any],
    settings: Mapping[str, Any],
    seed: int,
    args: ReproductionArguments,
    fold: int | None = None,
) -> list[Step]:
    """List the steps of one run: train the initial model, train the arm, and evaluate it.

    Post-training continues the initial model; training uses its encoders. The data of each step depend on the seed, or
    on the fold (see `add_seed`).
    """
    folder = Path(args.data_dir or ".")
    of_esc10 = replace(args, data_dir=str(folder / "esc10")) if (folder / "esc10").is_dir() else args
    steps: list[Step] = []

    def add(name: str, recipe: str, settings: Mapping[str, Any]) -> None:
        seeded = add_seed(settings, seed, Path(of_esc10.data_dir or "."), fold)
        steps.append(build_step(name, recipe, seeded, of_esc10))

    merged = read_settings(CONFIGS / study["base"]) | study["arms"][arm].get("settings", {})
    recipe = study.get("recipe", "train")
    if "start" in study:
        add("start", "train", read_settings(CONFIGS / study["start"]))
        names = ["model"] if recipe == "posttrain" else ["audio_encoder", "text_encoder"]
        merged |= dict.fromkeys(names, str(steps[0].folder))
    add(arm, recipe, {**merged, **settings, **as_mapping(args.settings)})
    if "evaluate" in study:
        add(arm, "evaluate", {**study["evaluate"], "model": str(steps[-1].folder)})
    return steps


def add_seed(settings: Mapping[str, Any], seed: int, esc10: Path, fold: int | None = None) -> dict[str, Any]:
    """Return settings with a seed, which also selects the data: the test fold of ESC-50 if `fold` is None, the seed of
    generated data, or that of the splits of a folder, if `dataset_config` contains one.

    The path of background recordings is relative to the folder `esc10`.
    """
    config = dict(as_mapping(settings.get("dataset_config")))
    if not reads_folder(settings.get("dataset", "synthetic")) or "seed" in config:
        config["seed"] = config.get("seed", 0) + seed
    elif "test_fold" in config:
        config["test_fold"] = fold or seed % 4 + 1
    seeded = {**settings, "dataset_config": config, "seed": seed}
    if "background_dir" in seeded:
        folder = esc10 / seeded["background_dir"]
        if not folder.is_dir():
            raise FileNotFoundError(
                f"folder {folder} of recordings does not exist; pass its parent folder with --data_dir"
            )
        seeded["background_dir"] = str(folder)
    return seeded


def get_grid(study: Mapping[str, Any], arm: str) -> dict[str, list[Any]]:
    """Return the settings to tune with their values: those of all arms, and those of this arm."""
    return {**study["grid"], **study["arms"][arm].get("grid", {})}


def run_arm(
    arm: str, study: Mapping[str, Any], settings: Mapping[str, Any], seeds: Sequence[int], args: ReproductionArguments
) -> list[Point]:
    """Run an arm, and return one point for each seed, or for each test fold of a study with folds."""
    points = []
    for fold in study.get("folds", [None]):
        runs = [run_and_read(build_steps(arm, study, settings, seed, args, fold), study) for seed in seeds]
        if fold is None:
            return runs
        means = {key: average(runs, key) for key in ("validation", "score", *COSTS)}
        scores = {}
        for column in runs[0]["scores"]:
            scores[column] = float(np.mean([run["scores"][column] for run in runs]))
        points.append({"fold": fold, **means, "scores": scores, "runs": runs})
    return points


def tune(arm: str, study: Mapping[str, Any], args: ReproductionArguments) -> list[TuningScore]:
    """Return the validation scores of all settings of the grid. All arms have the same epochs and seed.

    The score is the mean of the folds, if the study has some. The score of diverging settings is None: their loss or
    weights are not finite. Raises FloatingPointError if all settings diverge.
    """
    tuning: list[TuningScore] = []
    grid = get_grid(study, arm)
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        epochs = {"num_train_epochs": study["tuning_epochs"]}
        score = None
        try:
            score = average(run_arm(arm, study, settings | epochs, [TUNING_SEED], args), "validation")
            say(f"{arm}: validation score {score:.3f} with {settings}")
        except FloatingPointError as error:
            say(f"{arm}: {settings} is left out, because training diverged: {error}")
        tuning.append({"settings": settings, "validation": score})
    if all(run["validation"] is None for run in tuning):
        raise FloatingPointError(f"{arm} diverges with all settings {grid}; lower the learning rates")
    return tuning


def find_best(tuning: Sequence[TuningScore]) -> dict[str, Any]:
    """Return the settings with the best validation score; of equal scores, the first."""
    finished = [run for run in tuning if run["validation"] is not None]
    return max(finished, key=lambda run: run["validation"])["settings"]


def describe_edges(tuning: Sequence[TuningScore]) -> str:
    """State which of the best settings are the smallest or largest value in the grid.

    >>> describe_edges([{"settings": {"lr": lr}, "validation": -lr} for lr in (0.1, 0.2, 0.4)])
    'lr is at the edge of the grid'
    """
    edges = []
    for key, best in find_best(tuning).items():
        values = [run["settings"][key] for run in tuning]
        if best in (min(values), max(values)):
            edges.append(key)
    if not edges:
        return "inside the grid"
    return f"{' and '.join(edges)} {'is' if len(edges) == 1 else 'are'} at the edge of the grid"


def run_and_read(steps: Sequence[Step], study: Mapping[str, Any]) -> Point:
    """Run the unfinished steps of a run, and read its scores and costs."""
    for step in steps:
        run_step(step)
    results, log = load_run(steps)
    scores: dict[str, Any] = {}
    for column in (*study["columns"], *study.get("measures", ())):
        scores[column] = get_value(results, log, column.split())
    (validation,) = results.content["training"]["best_validation"].values()
    cost = get_cost([(results, log)])
    return {
        "seed": steps[-1].settings["seed"],
        "validation": validation,
        "scores": scores,
        "score": float(np.mean([scores[column] for column in study["columns"]])),
        **{key: cost[key] for key in COSTS},
    }


def summarize_arms(
    points: Mapping[str, Sequence[Sequence[Point]]],
    study: Mapping[str, Any],
    tuning: Mapping[str, Sequence[TuningScore]],
) -> dict[str, dict[str, Any]]:
    """Compare each arm with the first one, for the same numbers of epochs and the same seeds.

    Returns:
        `{arm: summary}`. A summary is a dict with these keys:

        - "model", "tuned" and "points": The name of the arm, its tuned settings, and all its runs after the tuning.
        - "tuning": The settings and validation scores of all runs of the tuning.
        - "scores": Mean test score with its interval, for each number of epochs.
        - "to_90": `{cost: ratio}` for the costs in `COSTS`. The numerator is the cost of the arm to reach 90 % of the
          baseline's best score with the same seed; the denominator is that of the baseline. The ratio is a geometric
          mean with its interval. A cost is missing if a run never reaches this score.
        - "differences" (not for the baseline): Test score minus that of the baseline, with its interval. "final" is
          after the longest training. "steps", "captions" and "seconds" are at equal cost, the largest cost that both
          arms have reached. A cost is missing if the shortest run of an arm costs more.
        - "measures": `{column: measure}` for the other scores of the study. A measure is a dict with "final", its mean
          with its interval after the longest training, and "differences", as above.
    """
    first = next(iter(points))
    is_share = all(find_metric(column).percent for column in study["columns"])
    summary: dict[str, dict[str, Any]] = {}
    for arm, of_arm in points.items():
        tuned = dict(find_best(tuning[arm]))
        about: dict[str, Any] = {"model": study["arms"][arm]["model"], "tuned": tuned, "tuning": list(tuning[arm])}
        scores = [_as_dict(summarize(values, is_share=is_share)) for values in get_curves(of_arm, "score").T]
        about |= {"points": list(of_arm), "scores": scores, "to_90": compare_costs(of_arm, points[first])}
        if arm != first:
            about["differences"] = compare_curves(of_arm, points[first])
        for column in study.get("measures", ()):
            final = summarize(get_curves(of_arm, column)[:, -1], is_share=find_metric(column).percent)
            changes = {} if arm == first else compare_curves(of_arm, points[first], column)
            about.setdefault("measures", {})[column] = {"final": _as_dict(final), "differences": changes}
        summary[arm] = about
    return summary


def get_curves(points: Sequence[Sequence[Point]], key: str) -> np.ndarray:
    """Return a cost, a score, or "score", that of the study, for each seed or fold and number of epochs, (n, L)."""
    curves = []
    for runs in points:
        curves.append([run["scores"].get(key, run.get(key)) for run in runs])
    return np.transpose(curves)


def compare_costs(
    points: Sequence[Sequence[Point]], baseline: Sequence[Sequence[Point]]
) -> dict[str, dict[str, float]]:
    """Return the ratios "to_90" of `summarize_arms`."""
    scores = [get_curves(each, "score") for each in (points, baseline)]  # (n, L) each
    levels = 0.9 * scores[1].max(axis=1)  # (n,)
    ratios = {}
    for cost in COSTS:
        costs = get_curves(points, cost), get_curves(baseline, cost)
        reached = [list(map(cost_to_reach, *curves, levels)) for curves in zip(costs, scores, strict=True)]
        logs = np.log(reached[0]) - np.log(reached[1])
        if np.isfinite(logs).all():
            ratios[cost] = {key: float(np.exp(value)) for key, value in _as_dict(summarize(logs)).items()}
    return ratios


def compare_curves(
    points: Sequence[Sequence[Point]], others: Sequence[Sequence[Point]], key: str = "score"
) -> dict[str, dict[str, float]]:
    """Compare a score of two arms after the longest training of both, and at equal costs (see `summarize_arms`).

    A score at a cost is interpolated linearly over the logarithm of the cost.

    Args:
        points: Runs of the arm by number of epochs, one for each seed or fold.
        others: The same of the arm to compare with.
        key: Score to compare; "score" is that of the study.
    """
    scores = [get_curves(each, key) for each in (points, others)]  # (n, L) each
    last = min(len(points), len(others)) - 1
    differences = {"final": _as_dict(difference(scores[0][:, last], scores[1][:, last]))}
    for cost in COSTS:
        costs = [np.log(get_curves(each, cost)) for each in (points, others)]
        common = np.minimum(costs[0][:, -1], costs[1][:, -1])  # (n,)
        interpolate = partial(np.interp, left=np.nan)  # the shortest run costs more
        equal = [list(map(interpolate, common, *curves)) for curves in zip(costs, scores, strict=True)]
        if np.isfinite(equal).all():
            differences[cost] = _as_dict(difference(equal[0], equal[1]))
    return differences


def _as_dict(cell: Cell) -> dict[str, float]:
    assert cell.interval is not None  # a study has at least two seeds
    return {"mean": cell.value, "low": cell.interval[0], "high": cell.interval[1]}


def cost_to_reach(costs: np.ndarray, scores: np.ndarray, score: float) -> float:
    """Return the cost at which a learning curve reaches a score, interpolated as in `compare_curves`.

    If the shortest run already reaches the score, return the cost of that run. If no run reaches it, return inf.
    """
    reached = np.flatnonzero(scores >= score)
    if not len(reached):
        return math.inf
    part = slice(max(reached[0] - 1, 0), reached[0] + 1)  # the step of the curve that crosses the score
    return float(np.exp(np.interp(score, scores[part], np.log(costs[part]))))


def judge(arms: Mapping[str, Mapping[str, Any]], study: Mapping[str, Any], converged: bool) -> str:
    """Return the verdict on the claim that the arm `study["method"]` is better than the baseline.

    - "holds at convergence": The interval of the final difference is above 0, and the baseline has converged.
    - "holds as a speed-up": The first verdict does not apply. The interval of the "to_90" ratio of steps (see
      `summarize`) is below 1. If that of captions or seconds is not, the verdict adds, for example, "in steps, not in
      captions or seconds".
    - "open": None of these applies, and the baseline has not converged.
    - "not shown at convergence": None of these applies, and the baseline has converged.
    - "does not hold": The same, and the interval of the final difference is below 0.
    - "not judged": The arms do not include the method.

    The first two verdicts are followed by "explained by a control" if a control (`study["controls"]`) passes the same
    test and the method is not better than the control. This means that the interval of their difference, after the
    longest training, is not above 0.
    """
    if study["method"] not in arms:
        return "not judged"

    def holds(arm: Mapping[str, Any], at_convergence: bool) -> bool:
        if at_convergence:
            return bool(arm["differences"]["final"]["low"] > 0)
        return "steps" in arm["to_90"] and bool(arm["to_90"]["steps"]["high"] < 1)

    method = arms[study["method"]]
    at_convergence = converged and holds(method, True)
    if not at_convergence and not holds(method, False):
        if not converged:
            return "open, because the baseline has not converged"
        return "does not hold" if method["differences"]["final"]["high"] < 0 else "not shown at convergence"
    verdict = "holds at convergence" if at_convergence else "holds as a speed-up"
    not_saved = [cost for cost, ratio in method["to_90"].items() if cost != "steps" and ratio["high"] >= 1]
    if not_saved and not at_convergence:
        verdict += f" in steps, not in {' or '.join(not_saved)}"

    for control in map(arms.get, study.get("controls", ())):
        if control is None or not holds(control, at_convergence):
            continue
        if compare_curves(method["points"], control["points"])["final"]["low"] <= 0:
            return f"{verdict}, explained by a control: {control['model']}"
    return verdict


def has_cost(arm: Mapping[str, Any], cost: str) -> bool:
    """Return whether all runs of an arm have a cost of `COSTS`. Runs in earlier files may lack their seconds."""
    return all(cost in run for run in itertools.chain.from_iterable(arm["points"]))


def average(runs: Sequence[Point], key: str) -> float:
    """Return the mean of a cost or a score over runs."""
    return float(np.mean([run[key] for run in runs]))


def plot_curves(content: Mapping[str, Any], path: Path) -> None:
    """Plot the mean test score of each arm (method) against steps and against seconds, with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, cost in zip(panels, ("steps", "seconds"), strict=True):
        for number, arm in enumerate(content["arms"].values()):
            if not has_cost(arm, cost):
                continue
            costs = [average(runs, cost) for runs in arm["points"]]
            scores = [(score["mean"], score["low"], score["high"]) for score in arm["scores"]]
            mean, low, high = 100 * np.transpose(scores)
            panel.plot(costs, mean, marker="o", label=arm["model"], color=f"C{number}")
            panel.fill_between(costs, low, high, alpha=0.15, color=f"C{number}")
        panel.set_xscale("log", base=2)  # the epochs are doubled
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.set_xlabel({"steps": "training steps", "seconds": "processor time (seconds)"}[cost])
    panels[0].set_ylabel("test score (%)")
    panels[0].legend()
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def format_interval(score: Mapping[str, float], metric: MetricName = SHARE, signed: bool = False) -> str:
    """Format a mean and its interval, for example a difference in percent.

    >>> format_interval({"mean": 0.05, "low": -0.01, "high": 0.11}, signed=True)
    '+5.0 (-1.0 to +11.0)'
    """
    return Cell(score["mean"], score["low"], score["high"]).format(metric, signed)


def render_study(content: Mapping[str, Any], figure: str) -> str:
    """Return the Markdown of a study: verdict, table with one line per arm, learning curves and tuned settings."""
    arms = list(content["arms"].values())
    count = len(content["seeds"])
    lines = [describe_arm(arm, arms[0]) for arm in arms]
    heading = ["arm" if count >= 5 else f"arm (only {count} seeds)", *list(lines[0])[1:]]

    tuned = []
    for arm in arms:
        # older files have no tuning scores
        edges = f"; {describe_edges(arm['tuning'])}" if arm.get("tuning") else ""
        tuned.append(f"- {arm['model']}: `{arm['tuned']}`{edges}")
    verdict = f"Verdict: **{content['verdict']}**."
    if "converge" not in verdict:
        verdict += " The baseline has converged." if content["converged"] else " The baseline has not converged."
    columns = ", ".join(map(format_heading, content["columns"]))
    units = f"over the seeds {', '.join(map(str, content['seeds']))}"
    if "folds" in content:
        units = f"over the test folds {', '.join(map(str, content['folds']))}, after averaging {count} seeds in each"
    pairing = "fold" if "folds" in content else "seed"
    elsewhere = " Arms without seconds were trained on another machine, or one of their runs has no valid time."
    if all(has_cost(arm, "seconds") for arm in arms):
        elsewhere = ""
    caption = (
        f"Test score in percent, the mean of {columns}: mean and 95 % t-interval {units}. "
        f"Differences to the first arm are paired by {pairing}. "
        f"Seconds are processor time.{elsewhere}{' ' + note_few_seeds(count) if count < 5 else ''}"
    )
    parts = [
        f"### {content['study']}: {content['title']}",
        f"Claim: {content['claim']}",
        verdict,
        Table([heading, *(list(line.values()) for line in lines)], caption=caption).to_markdown(),
        *([tabulate_measures(content).to_markdown()] if "measures" in content else []),
        f"![Learning curves]({figure})",
        "Settings chosen on validation:\n" + "\n".join(tuned),
    ]
    return "\n\n".join(parts) + "\n"


def tabulate_measures(content: Mapping[str, Any]) -> Table:
    """Return a table of the other scores of a study, with one line for each score and arm."""
    places = {"final": "difference at the end", "captions": "at equal captions", "seconds": "at equal seconds"}
    lines = [["measure", "arm", "at the end", *places.values()]]
    arms = list(content["arms"].values())
    for column in content["measures"]:
        metric = find_metric(column)
        for arm in arms:
            measure, name = arm["measures"][column], arm["model"] + note_length(arm, arms[0])
            cells = [format_heading(column), name, format_interval(measure["final"], metric)]
            for place in places:
                found = measure["differences"].get(place)
                cells.append("" if found is None else format_interval(found, metric, signed=True))
            lines.append(cells)
    return Table(lines, caption="Other scores of the same runs, with the same intervals. They have no verdict.")


def describe_arm(arm: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of an arm by heading. Scores of other numbers of steps than the baseline's state them."""
    cells, after = {"arm": arm["model"]}, note_length(arm, baseline)
    places = map(count_steps, baseline["points"]), map(count_steps, arm["points"]), arm["scores"]
    for heading, steps, score in itertools.zip_longest(*places):
        cells[heading] = ""
        if score is not None:
            cells[heading] = format_interval(score) + ("" if steps == heading else f" after {steps}")

    differences = arm.get("differences", {})
    for key, heading in {"final": "difference at the end", **{cost: f"at equal {cost}" for cost in COSTS}}.items():
        cells[heading] = format_interval(differences[key], signed=True) if key in differences else ""
    cells["difference at the end"] += after
    costs = [cost for cost in COSTS if has_cost(arm, cost)]
    for cost in COSTS:
        ratio = arm["to_90"].get(cost)
        text = f"not reached{after}" if cost in costs else ""
        cells[f"{cost} to 90 %, ratio"] = text if ratio is None else format_interval(ratio, RATIO)
    last = arm["points"][-1]
    cells["cost of the longest run"] = ", ".join(f"{average(last, cost):,.0f} {cost}" for cost in costs)
    return cells


def count_steps(points: Sequence[Point]) -> str:
    """Return the number of steps of the runs with one number of epochs, such as "1,200 steps"."""
    return f"{points[0]['steps']:,.0f} steps"


def note_length(arm: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """Return " after N steps" if the longest training of an arm is shorter than that of the baseline, else ""."""
    return f" after {count_steps(arm['points'][-1])}" if len(arm["points"]) < len(baseline["points"]) else ""
