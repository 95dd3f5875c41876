"""Studies: equal tuning, learning curves, costs and verdicts."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from commands import run_recipe
from recordings import esc50_folder
from results_fixtures import fake_training
from scipy import stats

from modeling_supclap.evaluation.results import SCHEMA, Results, score
from modeling_supclap.recipes import reproduce, sweep
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.studies import evidence, plan
from modeling_supclap.recipes.sweep import RECIPES

COLUMNS = ["retrieval eng t2a R@1", "retrieval eng a2t R@1"]
STUDIES = plan.find_studies(["evidence"])


def runs(scores, steps=(100, 200, 400), seconds_per_step=1.0, seed=0):
    """Return the runs of one seed."""
    points = []
    for value, count in zip(scores, steps, strict=True):
        cost = {"steps": count, "captions": 8 * count, "seconds": seconds_per_step * count}
        points.append({"seed": seed, "validation": value, "scores": {}, "score": value, **cost})
    return points


def by_length(*of_seeds):
    return [list(points) for points in zip(*of_seeds, strict=True)]


def test_the_curve_is_linear_in_the_logarithm_of_the_cost():
    costs, scores = np.array([100, 200, 400]), np.array([0.2, 0.4, 0.5])
    assert evidence.cost_to_reach(costs, scores, 0.3) == pytest.approx(100 * math.sqrt(2))
    assert evidence.cost_to_reach(costs, scores, 0.1) == pytest.approx(100)
    assert evidence.cost_to_reach(costs, scores, 0.6) == math.inf

    ends = 100, 100 * math.sqrt(2)
    short = [runs([0.1 * (1 + seed), 0.25], steps=ends, seed=seed) for seed in range(2)]
    long = [runs([0.2, 0.4, 0.5 + 0.1 * seed], seed=seed) for seed in range(2)]
    found = evidence.compare_curves(by_length(*short), by_length(*long))
    assert found["final"]["mean"] == pytest.approx(0.25 - 0.4)  # after as many epochs
    for cost in ("steps", "captions", "seconds"):
        assert found[cost]["mean"] == pytest.approx(0.25 - 0.3)


STUDY = {
    "arms": {"base": {"model": "Base"}, "new": {"model": "New"}, "simple": {"model": "Simple"}},
    "method": "new",
    "controls": ["simple"],
    "columns": COLUMNS,
}
TUNING = {arm: [{"settings": {}, "validation": 0.5}] for arm in STUDY["arms"]}
BASE = ([0.2, 0.40, 0.50], [0.2, 0.42, 0.51], [0.2, 0.41, 0.52])


def judged(new, simple=BASE, converged=True, seconds_per_step=1.0):
    points = {}
    for name, curves, seconds in (("base", BASE, 1.0), ("new", new, seconds_per_step), ("simple", simple, 1.0)):
        of_seeds = [runs(curve, seconds_per_step=seconds, seed=seed) for seed, curve in enumerate(curves)]
        points[name] = by_length(*of_seeds)
    arms = evidence.summarize_arms(points, STUDY, TUNING)
    return arms, evidence.judge(arms, STUDY, converged)


def shifted(*amounts):
    return [[value + amount for value, amount in zip(curve, amounts, strict=True)] for curve in BASE]


def test_verdicts():
    assert judged(shifted(0.1, 0.1, 0.05))[1] == "holds at convergence"
    assert judged(shifted(0.1, 0.1, 0.05), converged=False)[1] == "holds as a speed-up"
    assert judged(shifted(0.2, 0.1, 0.0))[1] == "holds as a speed-up"
    arms, verdict = judged(shifted(0.2, 0.1, 0.0), seconds_per_step=4.0)
    assert verdict == "holds as a speed-up in steps, not in seconds"
    arms["new"]["to_90"]["captions"]["high"] = 1.1
    assert evidence.judge(arms, STUDY, True) == "holds as a speed-up in steps, not in captions or seconds"
    arms["new"]["to_90"]["steps"] = {"mean": 0.9, "low": 0.7, "high": 1.1}  # its interval contains 1
    assert evidence.judge(arms, STUDY, True) == "not shown at convergence"
    assert evidence.judge(arms, STUDY, False) == "open, because the baseline has not converged"
    assert judged(shifted(0.0, 0.0, 0.0))[1] == "not shown at convergence"
    assert judged(shifted(-0.1, -0.1, -0.05))[1] == "does not hold"
    assert judged(shifted(-0.1, -0.1, -0.05), converged=False)[1] == "open, because the baseline has not converged"
    gain = shifted(0.1, 0.1, 0.05)
    assert judged(gain, simple=gain)[1] == "holds at convergence, explained by a control: Simple"
    assert judged(gain, simple=shifted(0.0, 0.0, 0.01))[1] == "holds at convergence"  # the method is better
    assert judged(shifted(0.2, 0.1, 0.0), simple=shifted(0.2, 0.1, 0.0))[1].endswith("control: Simple")
    assert evidence.judge(judged(gain)[0], {**STUDY, "method": "left out"}, True) == "not judged"


def test_differences_are_paired_and_have_t_intervals():
    new = ([0.3, 0.50, 0.57], [0.3, 0.52, 0.55], [0.3, 0.51, 0.60])
    arms, _ = judged(new)
    gains = np.array([0.07, 0.04, 0.08])
    low, high = stats.t.interval(0.95, 2, gains.mean(), stats.sem(gains))
    expected = {"mean": pytest.approx(gains.mean()), "low": pytest.approx(low), "high": pytest.approx(high)}
    assert arms["new"]["differences"]["final"] == expected
    assert arms["base"]["to_90"]["steps"] == pytest.approx({"mean": 1, "low": 1, "high": 1})
    assert arms["new"]["to_90"]["steps"]["mean"] < 1


def test_seeds_of_different_difficulty_have_their_own_level():
    """The level is a fraction of the baseline's score with the same seed, so it is reached with every seed."""
    curves = ([0.2, 0.40, 0.50], [0.1, 0.2, 0.3])
    points = {
        "base": by_length(*(runs(curve, seed=seed) for seed, curve in enumerate(curves))),
        "new": by_length(*(runs([2 * value for value in curve], seed=seed) for seed, curve in enumerate(curves))),
    }
    arms = evidence.summarize_arms(points, STUDY, TUNING)
    assert arms["base"]["to_90"]["steps"] == pytest.approx({"mean": 1, "low": 1, "high": 1})
    ratio = arms["new"]["to_90"]["steps"]
    assert 0 < ratio["low"] < ratio["mean"] < ratio["high"] < 1


def test_the_level_is_90_percent_of_the_best_score_not_of_the_last():
    curves = ([0.1, 0.5, 0.3], [0.1, 0.5, 0.3])
    points = {"base": by_length(*(runs(curve, seed=seed) for seed, curve in enumerate(curves)))}
    points["new"] = by_length(*(runs([0.1, 0.3, 0.45], seed=seed) for seed in range(2)))
    ratio = evidence.summarize_arms(points, STUDY, TUNING)["new"]["to_90"]["steps"]["mean"]
    of_baseline = 100 * 2 ** ((0.45 - 0.1) / (0.5 - 0.1))
    assert ratio == pytest.approx(400 / of_baseline)


def test_equal_seconds_count_the_cost_of_a_step():
    """A method with the curve of the baseline and twice the time per step is worse at equal seconds."""
    points = {
        "base": by_length(*(runs(curve, seed=seed) for seed, curve in enumerate(BASE))),
        "new": by_length(*(runs(curve, seconds_per_step=2.0, seed=seed) for seed, curve in enumerate(BASE))),
    }
    arms = evidence.summarize_arms(points, STUDY, TUNING)
    assert arms["new"]["differences"]["captions"]["mean"] == pytest.approx(0)
    # 400 s: its 200 steps against 400 of the baseline
    expected = np.mean([curve[1] - curve[2] for curve in BASE])
    assert arms["new"]["differences"]["seconds"]["mean"] == pytest.approx(expected)


def test_a_level_that_one_seed_does_not_reach_has_no_ratio():
    new = [[0.2, 0.4, 0.5], [0.2, 0.3, 0.4], [0.2, 0.4, 0.5]]  # of 0.45, 0.459 and 0.468
    arms, verdict = judged(new, converged=False)
    assert arms["new"]["to_90"] == {}
    assert verdict == "open, because the baseline has not converged"
    cells = evidence.describe_arm(arms["new"], arms["base"])
    assert cells["steps to 90 %, ratio"] == cells["seconds to 90 %, ratio"] == "not reached"
    assert list(cells)[:4] == ["arm", "100 steps", "200 steps", "400 steps"]
    assert (cells["arm"], cells["cost of the longest run"]) == ("New", "400 steps, 3,200 captions, 400 seconds")


def test_an_arm_of_other_lengths_states_its_steps():
    def summary(*counts):
        points = [[{"steps": count, "captions": 8 * count}] for count in counts]
        return {
            "model": "A",
            "points": points,
            "scores": [{"mean": 0.5, "low": 0.25, "high": 0.75}] * len(counts),
            "to_90": {},
        }

    cells = evidence.describe_arm(summary(100, 300), summary(100, 200, 400))
    assert [cells[f"{count} steps"] for count in (100, 200, 400)] == [
        "50.0 (25.0 to 75.0)", "50.0 (25.0 to 75.0) after 300 steps", "",
    ]  # fmt: skip
    assert cells["difference at the end"] == " after 300 steps"
    assert (cells["steps to 90 %, ratio"], cells["seconds to 90 %, ratio"]) == ("not reached after 300 steps", "")
    assert cells["cost of the longest run"] == "300 steps, 2,400 captions"


def test_arms_without_a_common_cost_are_not_compared():
    """The shortest run of the method takes longer than the longest run of the baseline."""
    points = {
        "base": by_length(*(runs(curve, seed=seed) for seed, curve in enumerate(BASE))),
        "new": by_length(*(runs(curve, seconds_per_step=5.0, seed=seed) for seed, curve in enumerate(BASE))),
    }
    differences = evidence.summarize_arms(points, STUDY, TUNING)["new"]["differences"]
    assert set(differences) == {"final", "steps", "captions"}


def test_an_arm_with_fewer_lengths_is_compared_at_its_longest():
    points = {
        "base": by_length(*(runs(curve, seed=seed) for seed, curve in enumerate(BASE))),
        "new": by_length(
            *(runs(curve[:2], steps=(100, 200), seed=seed) for seed, curve in enumerate(shifted(0, 0.1, 0)))
        ),
    }
    final = evidence.summarize_arms(points, STUDY, TUNING)["new"]["differences"]["final"]
    assert final["mean"] == pytest.approx(0.1)


def test_arms_without_seconds_have_no_curve_against_seconds(tmp_path, monkeypatch):
    arms = judged(shifted(0, 0.1, 0.2))[0]
    del arms["new"]["points"][-1][0]["seconds"]  # as of a run on another machine
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: figures.append(figure))
    evidence.plot_curves({"arms": arms}, tmp_path / "curves.png")
    steps, seconds = (
        {line.get_label(): (line.get_color(), line.get_xydata().tolist()) for line in panel.get_lines()}
        for panel in figures[0].axes
    )
    means = 100 * np.mean(BASE, axis=0)
    assert steps["Base"] == seconds["Base"] == ("C0", np.transpose([[100, 200, 400], means]).tolist())
    assert (list(steps), list(seconds)) == (["Base", "New", "Simple"], ["Base", "Simple"])
    assert steps["Simple"][0] == seconds["Simple"][0] == "C2"
    vertices = figures[0].axes[0].collections[0].get_paths()[0].vertices
    ends = [100 * arms["base"]["scores"][0][end] for end in ("low", "high")]
    assert sorted(set(vertices[vertices[:, 0] == 100, 1])) == pytest.approx(ends)


@pytest.fixture
def train(monkeypatch):
    """Fake training: the score rises with epochs and learning rate, and is constant after 20 epochs.

    It is the mean of two columns, which differ.
    """

    def train(settings):
        value = 0.2 + 0.01 * min(settings["num_train_epochs"], 20) + (settings["learning_rate"] == 2e-3) * 0.05
        value += 0.001 * (settings["seed"] % 3)
        arguments = {"loss": "infonce", "languages": ["eng"]}
        arguments |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        steps = 10 * settings["num_train_epochs"]
        training = {"steps": steps, "seconds": 1.0, "process_seconds": steps / 10, "arguments": arguments}
        training["best_validation"] = {"eval_mean_recall": value}
        columns = {"t2a": value - 0.1, "a2t": value + 0.1}
        scores = {"retrieval": {"eng": {d: {"R@1": score(each, None, 0.01)} for d, each in columns.items()}}}
        content = {"schema": SCHEMA, "protocol": {"languages": ["eng"]}, "scores": scores, "training": training}
        return Results(content)

    return fake_training(monkeypatch, train)


def test_a_study_from_the_command_line(train, tmp_path, monkeypatch, capsys):
    words = ["evidence/svr", "--rows", "bi_dynamic", "--seeds", "0", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["supclap reproduce", *words])
    grid = {"learning_rate": [1e-3, 2e-3, 4e-3]}
    monkeypatch.setattr(plan, "find_studies", lambda names: {name: {**STUDIES[name], "grid": grid} for name in names})
    reproduce.main()

    tuning = [settings for settings in train if settings["seed"] == evidence.TUNING_SEED]
    assert len(tuning) == 2 * len(grid["learning_rate"])
    reported = [settings for settings in train if settings["seed"] != evidence.TUNING_SEED]
    assert {settings["learning_rate"] for settings in reported} == {2e-3}
    assert all(settings["dataset_config"]["seed"] == settings["seed"] for settings in train)
    epochs = [settings["num_train_epochs"] for settings in reported]
    assert epochs == [10] * 4 + [20] * 4 + [40] * 4  # the baseline has converged after 40

    content = json.loads((tmp_path / "mini" / "evidence_svr_selected.json").read_text())
    assert content["converged"]
    assert content["verdict"] == "not shown at convergence"
    assert content["seeds"] == [0, 1]
    assert [point["score"] for point in content["arms"]["infonce"]["points"][-1]] == pytest.approx([0.45, 0.451])
    text = (tmp_path / "mini" / "evidence_svr_selected.md").read_text()
    assert "not shown at convergence" in text
    assert "45.1 (44.4 to 45.7)" in text
    assert "| arm (only 2 seeds) |" in text
    assert "Fewer than five seeds** (2)" in text
    assert "| steps to 90 %, ratio | captions to 90 %, ratio | seconds to 90 %, ratio |" in text
    assert "; inside the grid\n" in text
    tuning = content["arms"]["infonce"]["tuning"]
    assert [run["settings"]["learning_rate"] for run in tuning] == grid["learning_rate"]
    assert tuning[1]["validation"] == pytest.approx(0.451)
    for arm in content["arms"].values():
        del arm["tuning"]  # as in files of earlier versions
    assert "grid" not in evidence.render_study(content, "")
    assert (tmp_path / "mini" / "evidence_svr_selected.png").read_bytes().startswith(b"\x89PNG")
    assert "not shown at convergence" in capsys.readouterr().out

    train.clear()
    monkeypatch.setattr(evidence, "plot_curves", lambda *args: None)
    reproduce.main()
    assert not train  # finished runs are not repeated


def test_the_figure_has_a_curve_of_each_arm_with_the_cost(monkeypatch, tmp_path):
    """An older file has no seconds of an arm: its colour stays the same in both panels."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    scores = [{"mean": 0.5, "low": 0.25, "high": 0.625}, {"mean": 0.75, "low": 0.5, "high": 1.0}]
    points = [[{"steps": 100, "seconds": 7.0}, {"steps": 300, "seconds": 9.0}], [{"steps": 800, "seconds": 64.0}] * 2]
    old = [[{"steps": 100}], [{"steps": 800, "seconds": 1.0}]]
    arms = {"a": {"model": "Old", "points": old, "scores": scores}}
    arms["b"] = {"model": "New", "points": points, "scores": scores}
    evidence.plot_curves({"arms": arms}, tmp_path / "curves.png")
    (figure,) = drawn
    steps, seconds = figure.axes
    for panel, lines in ((steps, {"Old": [100, 800], "New": [200, 800]}), (seconds, {"New": [8, 64]})):
        assert {line.get_label(): list(line.get_xdata()) for line in panel.lines} == lines
        assert {tuple(line.get_ydata()) for line in panel.lines} == {(50, 75)}
        for line, area in zip(panel.lines, panel.collections, strict=True):
            assert line.get_color() == {"Old": "C0", "New": "C1"}[line.get_label()]
            points_of_area = area.get_paths()[0].vertices
            assert {25, 62.5, 50, 100} == set(points_of_area[:, 1])
        assert panel.get_xscale() == "log"
        assert panel.xaxis.get_major_formatter()(12345.0) == "12,345"
    assert [panel.get_xlabel() for panel in figure.axes] == ["training steps", "processor time (seconds)"]
    assert steps.get_shared_y_axes().joined(steps, seconds)
    assert steps.get_ylabel() == "test score (%)"
    assert [text.get_text() for text in steps.get_legend().get_texts()] == ["Old", "New"]


def test_folds_are_units_of_a_study_and_measures_have_no_verdict(monkeypatch, tmp_path):
    """Fold f has f times the gain of fold 1, the seeds of a fold are averaged, and only one arm tunes svr_alpha."""

    def train_fold(settings):
        fold, seed = settings["dataset_config"]["test_fold"], settings["seed"]
        gain = 0.0 if settings["svr"] == "none" else 0.01 * fold + 0.01 * settings["svr_alpha"]
        value = 0.5 + gain + 0.02 * (seed % 3)
        steps = 10 * settings["num_train_epochs"]
        training = {"steps": steps, "captions": steps, "seconds": 1.0, "process_seconds": 1.0 * steps}
        training["best_validation"] = {"eval_mean_recall": value}
        scores = {"zero_shot": {"eng": {"run": {"top1": score(value, None, 0.1)}}}}
        scores["retrieval"] = {"eng": {"a2t": {"R@1": score(value - 0.2, None, 0.1)}}}
        return Results({"schema": SCHEMA, "protocol": {"languages": ["eng"]}, "scores": scores, "training": training})

    calls = fake_training(monkeypatch, train_fold)
    study = {**STUDIES["evidence/svr_whisper"], "measures": ["retrieval eng a2t R@1"]}
    args = ReproductionArguments(output_dir=str(tmp_path), seeds=[0, 1], data_dir=str(tmp_path))
    path = evidence.run_study("evidence/svr_whisper", study, ["infonce", "bi_dynamic"], args)

    tuned = [settings for settings in calls if settings["seed"] == evidence.TUNING_SEED]
    assert [settings["dataset_config"]["test_fold"] for settings in tuned] == [1, 2, 3, 4] * 6  # 2 rates; 2 rates x 2
    assert {settings["svr_alpha"] for settings in tuned if settings["svr"] != "none"} == {0.25, 1.0}
    reported = [settings for settings in calls if settings["seed"] != evidence.TUNING_SEED]
    assert {settings["svr_alpha"] for settings in reported} == {1.0}
    assert len(reported) == 2 * 2 * 4 * 2  # lengths, arms, folds, seeds

    content = json.loads(path.with_suffix(".json").read_text())
    baseline, method = content["arms"]["infonce"], content["arms"]["bi_dynamic"]
    assert [point["fold"] for point in baseline["points"][-1]] == [1, 2, 3, 4]
    assert [point["score"] for point in baseline["points"][-1]] == pytest.approx([0.51] * 4)
    assert [run["seed"] for run in baseline["points"][-1][0]["runs"]] == [0, 1]
    gains = np.array([0.01, 0.02, 0.03, 0.04]) + 0.01
    low, high = stats.t.interval(0.95, 3, gains.mean(), stats.sem(gains))
    expected = pytest.approx({"mean": gains.mean(), "low": low, "high": high})
    assert method["differences"]["final"] == expected
    assert method["measures"]["retrieval eng a2t R@1"]["differences"]["captions"] == expected
    assert baseline["measures"]["retrieval eng a2t R@1"]["final"]["mean"] == pytest.approx(0.31)

    text = path.read_text()
    assert "t-interval over the test folds 1, 2, 3, 4, after averaging 2 seeds in each" in text
    assert "| audio to text R@1 | InfoNCE | 31.0 (31.0 to 31.0) |  |  |  |" in text
    assert "| audio to text R@1 | bi-DynamicSVR | 34.5 (32.4 to 36.6) | +3.5 (+1.4 to +5.6) |" in text


def test_a_seed_draws_the_splits_of_a_folder(tmp_path):
    args = ReproductionArguments(output_dir=str(tmp_path), data_dir=str(tmp_path))
    (step,) = evidence.build_steps("kcl", STUDIES["evidence/languages_whisper"], {}, 3, args)
    assert step.settings["dataset_config"]["seed"] == step.settings["seed"] == 3


def test_each_arm_has_its_own_folder_wherever_the_runs_are(tmp_path):
    study, args = STUDIES["evidence/temporal"], ReproductionArguments(output_dir=str(tmp_path))
    folders = set()
    for arm in study["arms"]:
        entry = {**study["arms"][arm], "model": arm}
        steps = evidence.build_steps("a", {**study, "arms": {"a": entry}}, {"num_train_epochs": 1}, 3, args)
        folders.add(steps[-1].folder.name)
        elsewhere = replace(args, output_dir=str(tmp_path / "moved"))
        moved = evidence.build_steps("a", {**study, "arms": {"a": entry}}, {"num_train_epochs": 1}, 3, elsewhere)
        assert [step.folder.name for step in moved] == [step.folder.name for step in steps]
    assert len(folders) == len(study["arms"])


def test_settings_that_diverge_are_left_out_of_the_tuning(monkeypatch, tmp_path):
    def run_and_read(steps, columns):
        rate = steps[-1].settings["learning_rate"]
        if rate > limit:
            raise FloatingPointError("loss_infonce is nan")
        return {"validation": rate}

    monkeypatch.setattr(evidence, "run_and_read", run_and_read)
    args = ReproductionArguments(output_dir=str(tmp_path))
    limit = 2e-3
    tuning = evidence.tune("infonce", STUDIES["evidence/svr"], args)
    assert evidence.find_best(tuning)["learning_rate"] == 2e-3
    assert tuning[-1]["validation"] is None
    limit = 0.0
    with pytest.raises(FloatingPointError, match="infonce"):
        evidence.tune("infonce", STUDIES["evidence/svr"], args)


def test_a_dry_run_trains_nothing(train, tmp_path, monkeypatch, capsys):
    words = ["evidence/svr", "--output_dir", str(tmp_path), "--data_dir", str(tmp_path), "--dry_run", "true"]
    words += ["--settings", '{"weight_decay": 0.5}']  # which the study does not tune
    monkeypatch.setattr(sys, "argv", ["supclap reproduce", *words])  # generated scenes ignore data_dir
    reproduce.main()
    assert not train
    printed = capsys.readouterr().out
    assert printed.count("within: ") == STUDIES["evidence/svr"]["doublings"] + 1
    assert "missing" not in printed


def test_missing_inputs_of_any_study_are_named_before_the_first_run(train, tmp_path, monkeypatch, capsys):
    words = ["evidence/svr", "evidence/augmentation", "--output_dir", str(tmp_path), "--data_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["supclap reproduce", *words])
    with pytest.raises(FileNotFoundError, match="samples"):
        reproduce.main()
    assert not train

    sys.argv += ["--dry_run", "true"]
    reproduce.main()
    printed = capsys.readouterr().out
    assert "missing: folder" in printed
    assert printed.count("evidence/augmentation, gain: ") == STUDIES["evidence/augmentation"]["doublings"] + 1


def test_a_folder_of_esc10_is_complete_if_the_recordings_in_its_table_exist(tmp_path, capsys):
    folder = esc50_folder(tmp_path / "esc10", count=12, num_folds=4)
    args = ReproductionArguments(data_dir=str(folder), output_dir=str(tmp_path), rows=["bi_dynamic"])
    name = "evidence/svr_whisper"
    study = {**STUDIES[name], "base": "evidence/esc10.yaml", "folds": [1]}  # encoders that need no download
    assert evidence.check_study(name, study, args) == ["infonce", "bi_dynamic"]

    evidence.check_study(name, study, replace(args, dry_run=True))
    printed = capsys.readouterr().out
    assert "found: esc50: 32 train, 4 validation, 12 test recordings" in printed
    assert "missing" not in printed

    for path in sorted(folder.glob("audio/*.wav"))[:12]:
        path.unlink()
    sweep._LOADED.clear()
    with pytest.raises(FileNotFoundError, match="12 of 48 recordings"):
        evidence.check_study(name, study, args)


@pytest.mark.parametrize("setting", [{"num_train_epochs": 2}, {"max_steps": 2}, {"temperature": 0.07}])
def test_settings_that_a_study_varies_are_refused(train, tmp_path, setting):
    args = ReproductionArguments(settings=setting, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=next(iter(setting))):
        evidence.check_study("evidence/svr", STUDIES["evidence/svr"], args)
    assert not train


def test_unknown_rows_are_named(train, tmp_path, monkeypatch):
    words = ["evidence/svr", "evidence/kcl", "--rows", "bi_dynamic", "kcll", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["supclap reproduce", *words])
    with pytest.raises(ValueError, match=r"\['kcll'\].*kcl_2"):
        reproduce.main()
    assert not train


@pytest.mark.parametrize("name", STUDIES)
def test_the_recipes_take_the_settings_of_each_arm(name, tmp_path):
    study = STUDIES[name]
    assert study["method"] in study["arms"]
    assert set(study.get("controls", ())) <= set(study["arms"])
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    args = ReproductionArguments(output_dir=str(tmp_path), data_dir=str(data_dir))
    assert len(args.seeds) >= 5
    if name == "evidence/augmentation":
        with pytest.raises(FileNotFoundError, match=r"samples.*--data_dir"):
            evidence.build_steps("background", study, {}, 3, args)
        (tmp_path / "samples").mkdir()
    for arm in study["arms"]:
        steps = evidence.build_steps(arm, study, {"num_train_epochs": 1}, 3, args)
        for step in steps:
            parse_arguments(RECIPES[step.recipe].options, [], settings=step.settings)
            config = step.settings["dataset_config"]
            value = config["seed"] if "seed" in config else config["test_fold"] - 1
            assert value == (10_003 if name == "evidence/svr_trained" and step is steps[0] else 3)
        expected = [str(step.folder) for step in steps[:-1]]
        if name == "evidence/svr_trained":
            assert [step.settings["audio_encoder"] for step in steps[1:]] == expected
            assert [step.settings["text_encoder"] for step in steps[1:]] == expected
        else:
            assert [step.settings["model"] for step in steps[1:]] == expected
        counts = {"svr_trained": 2, "temporal": 3, "temporal_order": 3, "temporal_whisper": 3}
        assert len(steps) == counts.get(name.split("/")[1], 1)


def test_one_data_folder_serves_all_studies(tmp_path):
    for folder in ("esc10", "samples"):
        (tmp_path / folder).mkdir()
    of_parent, of_esc10 = (
        ReproductionArguments(output_dir=str(tmp_path), data_dir=str(folder))
        for folder in (tmp_path, tmp_path / "esc10")
    )
    for name in ("evidence/svr_whisper", "evidence/augmentation", "evidence/temporal"):
        arms = STUDIES[name]["arms"]
        steps = [
            [evidence.build_steps(arm, STUDIES[name], {}, 0, args) for arm in arms] for args in (of_parent, of_esc10)
        ]
        assert steps[0] == steps[1]  # the same settings and run folders


def test_unsuitable_seeds_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"\[0\]"):
        evidence.check_study("evidence/svr", STUDIES["evidence/svr"], ReproductionArguments(seeds=[0]))
    with pytest.raises(ValueError, match="1000 is the seed of the tuning"):
        evidence.check_study("evidence/svr", STUDIES["evidence/svr"], ReproductionArguments(seeds=[0, 1000]))


def test_unknown_rows_are_refused(train, tmp_path):
    for names in (["evidence/svr"], ["supclap/table3"], ["evidence/svr", "supclap/table3"]):
        with pytest.raises(ValueError, match="infonse"):
            run_recipe(reproduce, *names, "--rows", "infonse", "--output_dir", tmp_path)
    assert not train
