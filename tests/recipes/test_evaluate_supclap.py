"""The evaluation command: all kinds of models, the embedding cache, and suites."""

import json
import re
import shutil

import builders
import dataset_folders
import numpy as np
import pandas
import processes
import pytest
import soundfile
import yaml
from commands import run_recipe
from recordings import esc50_folder
from results_fixtures import query_results

from modeling_supclap import datasets_scripts, evaluation
from modeling_supclap.datasets_scripts.overlap.trained_sources import save_trained_sources
from modeling_supclap.evaluation.results import Results
from modeling_supclap.recipes import evaluate_supclap
from modeling_supclap.recipes.options import EvaluationArguments

CONFIG = """
dataset: synthetic
dataset_config: {num_train: 4, num_validation: 4, num_test: 24, duration_seconds: 1.0}
tasks: [retrieval, zero_shot, zste]
positives: captions
languages: [eng, fra]
zste_languages: [eng, jpn]
zste_items: 6
zste_candidates: 8
train_split: train
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with two SupCLAP models, a CLAP model and a configuration."""
    folder = tmp_path_factory.mktemp("evaluate")
    for seed in (0, 1):
        builders.save_supclap(folder / f"model{seed}", seed)
    builders.save_clap(folder / "clap")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def command(folder, model, *arguments):
    options = {"--model": folder / model, "--output_dir": folder / f"out_{model}", "--cache_dir": folder / "cache"}
    return [folder / "config.yaml", *(word for pair in options.items() for word in pair), *arguments]


@pytest.mark.parametrize("matches", [True, False])
def test_the_loudness_of_overlaid_sounds_is_an_option(matches):
    args = EvaluationArguments(zste_match_overlay_loudness=matches)
    assert evaluate_supclap.options_of(args).zste.join.match_overlay_loudness is matches


def test_classes_without_a_recording_stay_candidates(folder, tmp_path):
    """A partial download has the chance level of the whole dataset, also with a limit."""
    data = esc50_folder(tmp_path / "ESC-50", count=4, num_folds=2)
    for path in (data / "audio").glob("*-A-3.wav"):
        path.unlink()
    words = ["--model", folder / "model0", "--dataset", "esc50", "--data_dir", data, "--tasks", "zero_shot", "zste"]
    words += ["--zste_tasks", "1A", "--zste_items", "4", "--zste_candidates", "4", "--cache_dir", "none"]
    for more in ([], ["--folds", "1", "2"], ["--limit", "1"]):
        if more == ["--limit", "1"]:
            words[words.index("zste")] = "zero_shot"  # no pairs of one clip
        run_recipe(evaluate_supclap, *words, "--output_dir", tmp_path / "out", *more)
        results = Results.load(tmp_path / "out")
        assert results.scores["zero_shot"]["eng"]["supclap"]["top1"]["chance"] == pytest.approx(1 / 4)
        assert results.protocol["classes"] == len(results.protocol["zero_shot"]["classes"]) == 4
        if "zste" in results.scores:
            assert results.scores["zste"]["eng"]["1A"]["chance"] == pytest.approx(1 / 4)


def test_one_command_one_results_and_a_second_embeds_nothing(folder, capsys):
    words = [*command(folder, "model0"), "--retrieval_metrics", "nDCG@10", "MRR"]
    run_recipe(evaluate_supclap, *words)
    printed = capsys.readouterr().out
    assert "24 clips" in printed
    for metric in ("mAP@10", "nDCG@10", "MRR"):
        assert f"retrieval fra a2t {metric}" in printed
    assert "nDCG@10</th>" in (folder / "out_model0" / "report.html").read_text()
    first = Results.load(folder / "out_model0")
    assert first.content["run"]["cache"]["embedded"] > 0
    assert first.protocol["shared_sources"] == {"with": "train", "count": 0, "examples": []}
    assert first.protocol["dataset_config"]["num_test"] == 24
    assert first.scores["zste"].keys() == {"eng", "jpn", "all"}
    outcomes = (folder / "out_model0" / "outcomes.npz").read_bytes()

    run_recipe(evaluate_supclap, *words)
    heading, *_, last = capsys.readouterr().out.splitlines()
    assert heading == f"{folder / 'model0'} on synthetic, split test: 24 clips"
    assert re.fullmatch(
        r"0 clips missing; 0 arrays of embeddings \(recordings, or captions in one language\) computed, \d+ read from "
        rf"{folder / 'cache'}; {folder / 'out_model0' / 'results.json'} and report\.html \(\d+ s\)",
        last,
    )
    second = Results.load(folder / "out_model0")
    assert second.content["run"]["cache"]["embedded"] == 0
    assert second.scores == first.scores
    assert (folder / "out_model0" / "outcomes.npz").read_bytes() == outcomes


@pytest.fixture
def esc(tmp_path):
    """ESC-50 folder with three folds of four classes, and one recording per class and fold."""
    return esc50_folder(tmp_path, 3, 3)


def test_all_folds_at_once(folder, esc):
    output = esc / "out"
    options = ["--model", folder / "model0", "--dataset", "esc50", "--data_dir", esc, "--folds", "1", "2", "3"]
    run_recipe(evaluate_supclap, *options, "--tasks", "zero_shot", "--cache_dir", "none", "--output_dir", output)
    results = Results.load(output)
    found = results.scores["zero_shot"]["eng"]["supclap"]
    assert results.protocol["folds"] == [1, 2, 3]
    assert results.protocol["clips"] == 12
    assert results.protocol["without_rows"] == {"missing": 0, "examples": [], "left_out": {}}
    assert found["per_fold"].keys() == {"1", "2", "3"}
    assert found["mean_over_folds"]["value"] == pytest.approx(np.mean(list(found["per_fold"].values())))
    assert found["top1"]["value"] == pytest.approx(found["mean_over_folds"]["value"])


def test_clips_with_several_labels(folder, tmp_path, capsys):
    labels = (["dog", "rain"], ["rain"], ["dog", "bell"], ["bell"])
    lines = []
    for number, of_clip in enumerate(labels):
        soundfile.write(tmp_path / f"{number}.wav", builders.noise(16000, number), 16000)
        lines.append(json.dumps({"file_name": f"{number}.wav", "caption": "a", "split": "test", "labels": of_clip}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    options = [
        "--model",
        folder / "model0",
        "--dataset",
        "audio_folder",
        "--data_dir",
        tmp_path,
        "--cache_dir",
        "none",
    ]
    run_recipe(evaluate_supclap, *options, "--tasks", "zero_shot", "audio_to_audio", "--output_dir", tmp_path / "out")
    assert "Audio-to-audio retrieval</h2>" in (tmp_path / "out" / "report.html").read_text()
    assert Results.load(tmp_path / "out").scores["audio_to_audio"]["shared_label"]["num_queries"] == 4
    assert "zero_shot eng supclap mAP" in capsys.readouterr().out
    metrics = Results.load(tmp_path / "out").scores["zero_shot"]["eng"]["supclap"]
    assert metrics["per_class"].keys() == {"bell", "dog", "rain"}


@pytest.mark.parametrize("clips", [["--folds", "1", "2", "3"], ["--train_split", "train"]])
def test_probes(folder, esc, capsys, clips):
    output, cache = esc / "out", ["--cache_dir", "none", "--num_resamples", "20"]
    options = ["--model", folder / "model0", "--dataset", "esc50", "--data_dir", esc, *clips, *cache]
    options += [
        "--dataset_config",
        '{"validation_fraction": 0}',
        "--tasks",
        "linear_probe",
        "few_shot",
        "--shots",
        "1",
    ]
    run_recipe(evaluate_supclap, *options, "--output_dir", output)
    printed = capsys.readouterr().out
    results = Results.load(output)
    for name in ("linear_probe logistic_regression top1", "few_shot 1_per_class top1"):
        assert name in printed
    assert len(results.scores["linear_probe"]["logistic_regression"]["C"]) == (3 if "--folds" in clips else 1)
    assert (results.protocol["linear_probe"]["train_hash"] is None) == ("--folds" in clips)
    page = (output / "report.html").read_text()
    assert "<h2>Linear probe</h2>" in page
    assert "1 per class" in page


@pytest.mark.parametrize("folds", [[], [1, 2]])
def test_every_split_is_built_once(esc, monkeypatch, folds):
    built = []
    load = evaluate_supclap.load_builder
    monkeypatch.setattr(datasets_scripts, "load_builder", lambda *args, **kw: built.append(kw) or load(*args, **kw))
    monkeypatch.setattr(evaluate_supclap, "load_builder", datasets_scripts.load_builder)
    args = evaluate_supclap.EvaluationArguments(dataset="esc50", data_dir=str(esc), folds=folds)
    *_, data = evaluate_supclap.load_rows(args)
    assert [options.get("test_fold") for options in built] == (folds or [None])
    assert data["without_rows"]["missing"] == 0


def test_folds_that_share_clips_are_refused(esc):
    args = EvaluationArguments(dataset="esc50", data_dir=str(esc), folds=[1, 2], split="train")
    with pytest.raises(ValueError, match=r"the folds \[1, 2\] share clips in split 'train'; use --split test"):
        evaluate_supclap.load_rows(args)
    with pytest.raises(ValueError, match="there is no split 'dev'; the splits are train, "):
        evaluate_supclap.join({"train": None, "test": None}, "dev+train")


def test_recordings_shared_with_the_training_split_are_reported(folder, esc):
    esc50 = ["--dataset", "esc50", "--data_dir", esc, "--dataset_config", '{"validation_fraction": 0}']
    options = [*esc50, "--tasks", "zero_shot", "--split", "train+test", "--train_split", "train"]
    with pytest.warns(UserWarning, match=r"8 .*12.*'train'") as warned:
        run_recipe(evaluate_supclap, *command(folder, "model0"), *options, "--output_dir", esc / "out")
    shared = Results.load(esc / "out").protocol["shared_sources"]
    assert (shared["with"], shared["count"], len(shared["examples"])) == ("train", 8, 5)
    assert shared["examples"] == sorted(shared["examples"])
    assert any(f"for example {shared['examples'][0]};" in str(warning.message) for warning in warned)


def test_clips_that_the_model_has_trained_on_are_refused(folder, esc, tmp_path, capsys):
    shutil.copytree(folder / "model0", tmp_path / "model")
    rows = datasets_scripts.load_splits("esc50", data_dir=str(esc), validation_fraction=0)
    save_trained_sources(rows["train"], tmp_path / "model")
    words = ["--dataset", "esc50", "--data_dir", esc, "--dataset_config", '{"validation_fraction": 0}']
    words = ["--model", tmp_path / "model", *words, "--tasks", "zero_shot", "--split", "train"]
    words += ["--output_dir", tmp_path / "out"]
    with pytest.raises(ValueError, match=r"8 of 8 clips.*--allow_trained"):
        run_recipe(evaluate_supclap, *words)
    with pytest.warns(UserWarning, match="8 of 8 clips"):
        run_recipe(evaluate_supclap, *words, "--allow_trained", "true")
    content = Results.load(tmp_path / "out").content
    assert (content["run"]["trained_clips"], content["left_out"]) == (8, {"train": []})
    assert {split: record["rows"] for split, record in content["data"].items()} == {"train": 8}

    run_recipe(evaluate_supclap, *words, "--split", "train+test", "--exclude_trained", "true")
    assert "split train+test: 4 clips without 8 that the model has trained on\n" in capsys.readouterr().out
    results = Results.load(tmp_path / "out")
    assert (results.protocol["clips"], results.protocol["excluded_trained"]) == (4, 8)
    assert "8 clips that the model has trained on" in (tmp_path / "out" / "report.html").read_text()


def test_ten_folds_are_all_clips_of_urbansound8k(folder, tmp_path):
    """Each fold is a test split. A clip of 0.05 s is as long as the shortest of the 8,732, so it needs padding."""
    lines = [dataset_folders.US8K_COLUMNS]
    for fold in range(1, 11):
        for class_id, label in enumerate(["air_conditioner", "car_horn"]):
            name, seconds = f"{fold}00-{class_id}-0-0.wav", 0.05 if fold == 3 else 1.0
            lines.append([name, f"{fold}{class_id}", 0, seconds, 1, fold, class_id, label])
            path = tmp_path / "audio" / f"fold{fold}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, builders.noise(round(16000 * seconds), fold), 16000)
    dataset_folders.write_csv(tmp_path / "metadata" / "UrbanSound8K.csv", lines)
    words = ["--dataset", "urbansound8k", "--data_dir", tmp_path, "--tasks", "zero_shot", "--pad_short_clips", "true"]
    words += ["--folds", *map(str, range(1, 11)), "--output_dir", tmp_path / "out"]
    run_recipe(evaluate_supclap, "--model", folder / "model0", "--cache_dir", "none", *words)
    results = Results.load(tmp_path / "out")
    assert (results.protocol["clips"], results.protocol["missing_clips"]) == (20, [])
    assert len(results.protocol["folds"]) == 10


def test_shared_captions_that_count_as_wrong_are_reported(folder, esc, caplog):
    words = ["--dataset", "esc50", "--data_dir", esc, "--dataset_config", '{"validation_fraction": 0}']
    words = command(
        folder, "model0", *words, "--tasks", "retrieval", "--split", "train+test", "--output_dir", esc / "out"
    )
    run_recipe(evaluate_supclap, *words, "--positives", "captions")
    assert not re.search(r"\d of \d+ clips", caplog.text)
    run_recipe(evaluate_supclap, *words, "--positives", "clip")
    assert "12 of 12 clips" in caplog.text


def test_recordings_that_the_folder_lacks_are_in_the_results(folder, tmp_path):
    for number, name in enumerate(("a", "b")):
        soundfile.write(tmp_path / f"{name}.wav", builders.noise(16000, number), 16000)
    table = "file_name,caption,split\na.wav,a dog barks,test\nb.wav,rain falls,test\nlost.wav,a bell,test\n"
    (tmp_path / "metadata.csv").write_text(table)
    options = ["--dataset", "audio_folder", "--data_dir", tmp_path, "--dataset_config", '{"languages": ["eng"]}']
    options += ["--cache_dir", "none", "--output_dir", tmp_path / "out"]
    run_recipe(evaluate_supclap, "--model", folder / "model0", *options)
    protocol = Results.load(tmp_path / "out").protocol
    assert protocol["without_rows"]["missing"] == 1
    assert protocol["without_rows"]["examples"] == ["lost.wav"]
    assert protocol["origin"] == "audio_folder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--split", "tset"], "'tset'"),
        (["--model", "m", "--zero_shot_templates", "clip"], "'clip'"),
        (["--model", "m", "--zste_taks", "3A"], "'zste_taks'.*zste_tasks"),
        (["--model", "m", "--phrases", "esc10"], "'esc10'"),
        (["--model", "m", "--device", "gpu"], "gpu"),
        (["--model", "m", "--batch_size", "0"], "batch_size is 0"),
        (["--model", "m", "--folds", "1"], "folds.*train_split"),
        ([], "--model"),
    ],
)
def test_wrong_arguments_are_named(folder, arguments, message):
    arguments = [str(folder / "model0") if word == "m" else word for word in arguments]
    with pytest.raises(ValueError, match=message):
        run_recipe(evaluate_supclap, folder / "config.yaml", *arguments, "--output_dir", folder / "never")
    assert not (folder / "never").exists()


def test_other_processes_of_a_launch_do_nothing(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run_recipe(evaluate_supclap, *command(folder, "model0"), "--output_dir", folder / "never")
    assert not (folder / "never").exists()


@pytest.mark.process
def test_one_of_two_processes_without_a_gpu_evaluates(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ["--output_dir", folder / "two", "--cache_dir", "none", "--tasks", "retrieval"]
    arguments = [*command(folder, "model0"), *options, "--num_resamples", "0"]
    printed = processes.run_processes("recipes/evaluate_supclap.py", *arguments)
    assert printed.count("arrays of embeddings") == 1
    assert (folder / "two" / "results.json").exists()


SUITE = """
- {dataset: synthetic, num_train: 4, num_test: 16, tasks: [retrieval]}
- {name: classes, dataset: synthetic, dataset_config: {num_train: 4, num_test: 24}, tasks: [zero_shot]}
"""


def test_a_suite_of_three_models_has_one_table(folder, tmp_path, capsys):
    (tmp_path / "suite.yaml").write_text(SUITE)
    models = [folder / "model0", folder / "model1", folder / "clap"]
    arguments = [folder / "config.yaml", "--suite", tmp_path / "suite.yaml", "--output_dir", tmp_path / "out"]
    arguments += ["--model", *models, "--cache_dir", tmp_path / "cache", "--num_resamples", "200"]
    with pytest.warns(UserWarning, match=r"\baudio\b"):  # the models have different sampling rates
        run_recipe(evaluate_supclap, *arguments)
    capsys.readouterr()

    # Each evaluation has its own folder, and equals the evaluation of one model on one dataset.
    results = {path.parent.relative_to(tmp_path / "out"): path for path in tmp_path.glob("out/*/*/results.json")}
    names = [(dataset, model) for dataset in ("classes", "synthetic") for model in ("clap", "model0", "model1")]
    assert sorted(path.parts for path in results) == names
    one = Results.load(tmp_path / "out" / "synthetic" / "model1")
    assert (one.protocol["dataset_config"], one.protocol["intervals"]["num_resamples"]) == (
        {"num_train": 4, "num_test": 16},
        200,
    )
    assert Results.load(tmp_path / "out" / "classes" / "clap").scores.keys() == {"zero_shot"}

    # The table contains these scores, and the paired differences to the first model.
    table = pandas.read_csv(tmp_path / "out" / "table.csv").set_index(["dataset", "score", "model"])
    place = "retrieval eng t2a R@10"
    line, stored = table.loc["synthetic", place, "model1"], one.scores["retrieval"]["eng"]["t2a"]["R@10"]
    assert line[["value", "low", "high"]].tolist() == [stored["value"], stored["low"], stored["high"]]
    compared = evaluation.compare(Results.load(tmp_path / "out" / "synthetic" / "model0"), one)
    (paired,) = [row for row in compared if row["score"] == place]
    assert line["difference"] == pytest.approx(paired["difference"])
    assert line["p_value"] == paired["p_value"]
    assert pandas.isna(table.loc["synthetic", place, "model0"]["difference"])
    for suffix in ("md", "html", "tex"):
        text = (tmp_path / "out" / f"table.{suffix}").read_text()
        for words in ("model0", "classes", f"{100 * stored['value']:.1f}"):
            assert words in text.replace("scriptsize", "")

    run_recipe(evaluate_supclap, *arguments[:-2])  # other resamples: all embeddings are cached
    assert set(re.findall(r"(\d+) arrays of embeddings", capsys.readouterr().out)) == {"0"}


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("dataset: esc50", "esc50"),
        ("- {dataset: esc50", r"suite\.yaml"),
        ("- {data_dir: a}", "'data_dir': 'a'"),
        ("- {dataset: synthetic}\n- {dataset: synthetic, num_test: 3}", "'num_test': 3"),
        ("- {dataset: synthetic, num_tset: 3}", "num_tset"),
        ("- {mteb: ESC50_Zeroshot, naem: esc}", "naem.*mteb and name"),
        ("- {mteb: ESC50_Zreoshot}", "ESC50_Zreoshot.*ESC50_Zeroshot"),
    ],
)
def test_wrong_suites_are_named(folder, tmp_path, suite, message):
    (tmp_path / "suite.yaml").write_text(suite)
    words = ["--suite", tmp_path / "suite.yaml", "--model", folder / "model0", "--output_dir", folder / "never"]
    with pytest.raises((ValueError, TypeError, yaml.YAMLError), match=message):
        run_recipe(evaluate_supclap, *words)
    assert not (folder / "never").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("nobody/modle1", "nobody/modle1 is neither .* nor in the cache"), ("no_such:load", "no_such:load")],
)
def test_a_missing_model_is_named_before_the_first_evaluation(folder, tmp_path, name, message):
    words = ["--model", folder / "model0", name, "--output_dir", tmp_path / "out"]
    words += ["--data_dir", tmp_path / "not read"]
    with pytest.raises((FileNotFoundError, ImportError), match=message):
        run_recipe(evaluate_supclap, folder / "config.yaml", *words)
    assert not (tmp_path / "out").exists()


def test_datasets_of_a_suite_lie_in_folders_of_their_names(folder, tmp_path):
    esc50_folder(tmp_path / "esc50", 3, 3)
    words = ["--suite", "esc50", "--data_dir", tmp_path, "--model", folder / "model0", "--tasks", "zero_shot"]
    words += ["--cache_dir", "none", "--num_resamples", "0"]
    run_recipe(evaluate_supclap, *words, "--output_dir", tmp_path / "out")
    assert Results.load(tmp_path / "out" / "esc50" / "model0").protocol["clips"] == 4
    assert "esc50" in (tmp_path / "out" / "table.md").read_text()


def test_models_of_equal_names_have_their_own_folders(folder, tmp_path, monkeypatch):
    folders = []

    def evaluate(args, model, rows, options, output):
        folders.append(str(output.relative_to(tmp_path)))
        return query_results([1, 0], protocol={"dataset": "synthetic", "languages": ["eng"]}, model={"name": "m"})

    monkeypatch.setattr(evaluate_supclap, "evaluate", evaluate)
    for number, name in enumerate(("one", "the other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m").symlink_to(folder / f"model{number}")
    monkeypatch.chdir(tmp_path)
    run_recipe(evaluate_supclap, folder / "config.yaml", "--model", "one/m", "the other/m", "--output_dir", tmp_path)
    assert folders == ["synthetic/one-m", "synthetic/the-other-m"]
    assert sorted(pandas.read_csv(tmp_path / "table.csv")["model"].unique()) == ["one/m", "the other/m"]
    with pytest.raises(ValueError, match=r"model is \['one/m', 'one/m'\]; pass --model with distinct folders"):
        run_recipe(evaluate_supclap, folder / "config.yaml", "--model", "one/m", "one/m")


def test_models_that_skip_different_recordings_have_a_table(folder, tmp_path, monkeypatch):
    def evaluate(args, model, *rest):
        protocol = {"dataset": "synthetic", "languages": ["eng"], "dataset_hash": model.name}
        return query_results([1, 0], protocol=protocol, model={"name": model.name})

    monkeypatch.setattr(evaluate_supclap, "evaluate", evaluate)
    arguments = [folder / "config.yaml", "--model", folder / "model0", folder / "model1", "--output_dir", tmp_path]
    with pytest.warns(UserWarning, match="dataset_hash"):
        run_recipe(evaluate_supclap, *arguments)
    assert pandas.read_csv(tmp_path / "table.csv")["value"].tolist() == [0.5, 0.5]


def test_scores_are_grouped_by_a_column_of_the_table(folder, tmp_path, capsys):
    """The column is none of the fields of a row; a clip without a value is a group of its own."""
    lines = ["file_name,caption,label,site,split"]
    for number, site in enumerate(("north", "north", "south", "south", "south", "")):
        soundfile.write(tmp_path / f"{number}.wav", 0.5 * builders.tone(200.0 * (number + 1)), builders.RATE_HZ)
        lines.append(f"{number}.wav,a tone {number},tone_{number % 2},{site},test")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    words = ["--model", folder / "model0", "--dataset", "audio_folder", "--data_dir", tmp_path, "--languages", "eng"]
    words += ["--tasks", "zero_shot", "--output_dir", tmp_path / "out", "--cache_dir", "none"]
    run_recipe(evaluate_supclap, *words, "--group_by", "site")
    results = Results.load(tmp_path / "out")
    scores = results.content["groups"]["scores"]
    counts = {site: of_site["zero_shot"]["eng"]["supclap"]["num_clips"] for site, of_site in scores.items()}
    assert counts == {"no value": 1, "north": 2, "south": 3}
    assert "site south: zero_shot eng supclap top1" in capsys.readouterr().out
    assert "by site</h2>" in (tmp_path / "out" / "report.html").read_text()
    assert len(set(results.arrays["clips/source"])) == 6  # the sites are not the sources
    with pytest.raises(ValueError, match="yaer"):
        run_recipe(evaluate_supclap, *words, "--group_by", "yaer")
