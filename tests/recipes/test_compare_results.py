"""Table of several results: differences, seeds, and the written files."""

import re
import shutil
import subprocess

import numpy as np
import pandas
import pytest
from commands import run_recipe
from results_fixtures import query_results
from scipy import stats

from modeling_supclap.recipes import compare_results

R1 = "retrieval eng t2a R@1"


def save(folder, name, hits, arguments=None, data=None, **protocol):
    """Save results of one query per recording."""
    content = {
        "data": data,
        "model": {"name": name},
        "protocol": {"dataset": "esc50", "languages": ["eng"], **protocol},
    }
    if arguments is not None:
        content["training"] = {"arguments": {"output_dir": str(folder), **arguments}}
    query_results(hits, interval=(0.1, 0.9), chance=0.05, **content).save(folder)
    return folder


def compare(tmp_path, *folders):
    run_recipe(compare_results, *folders, "--output_dir", tmp_path / "out")
    return pandas.read_csv(tmp_path / "out" / "table.csv").set_index("model")


def test_evaluations_are_paired_with_the_first(tmp_path, capsys):
    first = save(tmp_path / "a", "models/first", [1, 0, 0, 0] * 10)
    second = save(tmp_path / "b", "models/second", [1, 1, 0, 0] * 10)
    with pytest.warns(UserWarning, match=f"{tmp_path} contains no results.json"):
        table = compare(tmp_path, first, second, tmp_path)
    assert table["score"].tolist() == [R1, R1]
    assert table["value"].tolist() == [0.25, 0.5]
    line = table.loc["second"]
    # 10 signs, two-sided
    assert (line["difference"], line["p_value"]) == (0.25, pytest.approx(1 / 512, abs=0.002))
    assert 0 < line["difference_low"] < 0.25 < line["difference_high"]
    assert table.loc["first"][["difference", "p_value"]].isna().all()
    printed = capsys.readouterr().out
    assert "### esc50: retrieval, eng" in printed
    assert printed.splitlines()[-1] == f"{tmp_path / 'out' / 'table.md'}, also as .html, .csv and .tex"
    assert "| model | text to audio R@1 (chance 5.0) |" in printed
    assert "| first | 25.0 (10.0 to 90.0) |" in printed
    assert "| second | 50.0 (10.0 to 90.0); +25.0 (" in printed


def test_results_of_different_protocols_are_refused(tmp_path):
    folders = [save(tmp_path / kind, kind, [1, 0], positives=kind) for kind in ("clip", "captions")]
    with pytest.raises(ValueError, match="positives"):
        compare(tmp_path, *folders)
    with pytest.warns(UserWarning, match="positives"):
        compare(tmp_path, *folders, "--allow_different", "true")
    with pytest.raises(ValueError, match=r"\[\]"):
        compare(tmp_path)
    with pytest.raises(FileNotFoundError, match="clpi"):
        compare(tmp_path, folders[0], tmp_path / "clpi")


@pytest.mark.parametrize(
    "change",
    [
        {"dataset_config": {"a": {"weight": 9}, "b": {"weight": 1}}},
        {"data": {"train": {"rows": 16, "sha256": "other"}}},
    ],
)
def test_runs_on_other_data_are_another_model(tmp_path, change):
    same = {"dataset_config": {"a": {"weight": 1}, "b": {"weight": 1}}, "data": {"train": {"rows": 16, "sha256": "x"}}}
    folders = [save(tmp_path / "first", "m", [1, 0] * 10, {"svr": "none", "seed": 0}, **same)]
    folders.append(save(tmp_path / "again", "m", [1, 0] * 10, {"svr": "none", "seed": 1}, **same))
    folders.append(save(tmp_path / "other", "m", [1, 1] * 10, {"svr": "none", "seed": 2}, **{**same, **change}))
    run_recipe(compare_results, *folders, "--output_dir", tmp_path / "out", "--allow_different", "true")
    table = pandas.read_csv(tmp_path / "out" / "table.csv").set_index("model")
    assert table["seeds"].to_dict() == {"first": 2, "other": 1}


def test_each_seed_has_the_protocol_of_its_baseline(tmp_path):
    """The baseline's protocol differs between its seeds, and only one seed of the other model follows."""
    folders = []
    for name, kinds in {"none": ["clip", "captions"], "bi-static": ["clip", "clip"]}.items():
        for seed, positives in enumerate(kinds):
            words = {"seed": seed, "svr": name}
            folders.append(save(tmp_path / f"{name}-seed{seed}", "m", [1, 0] * 10, words, positives=positives))
    with pytest.raises(ValueError, match="positives"):
        compare(tmp_path, *folders)


def test_runs_that_differ_in_their_seed_are_one_model(tmp_path):
    hits = {0: 10, 1: 14, 2: 12}
    for seed, count in hits.items():
        for svr, more in (("none", 0), ("bi-static", 4)):
            words = {"seed": seed, "data_seed": seed, "svr": svr, "model": f"start-seed{seed}"}
            save(tmp_path / f"{svr}-seed{seed}", "x", [1] * (count + more) + [0] * (40 - count - more), words)
    folders = [tmp_path / f"{svr}-seed{seed}" for svr in ("none", "bi-static") for seed in hits]
    table = compare(tmp_path, *folders)
    assert table.index.tolist() == ["none", "bi-static"]
    values = np.array(list(hits.values())) / 40
    line = table.loc["none"]
    assert (line["seeds"], line["value"], line["std"]) == (3, pytest.approx(0.3), pytest.approx(0.05))
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert line[["low", "high"]].tolist() == pytest.approx(list(interval))
    line = table.loc["bi-static"]
    assert line["difference"] == pytest.approx(0.1)
    # the seeds are equal, the recordings vary
    assert 0 < line["difference_low"] < 0.1 < line["difference_high"]
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| none | 3 | 30.0 ± 5.0 (17.6 to 42.4) |" in text
    assert "| bi-static | 3 | 40.0 ± 5.0 (27.6 to 52.4); +10.0 (" in text


def test_several_seeds_with_different_protocols_are_refused(tmp_path):
    folders = []
    for kind in ("clip", "captions"):
        for seed in (1, 2):
            words = {"seed": seed, "data_seed": seed, "model": kind}
            folders.append(save(tmp_path / f"{kind}{seed}", "x", [1, 0], words, positives=kind))
    with pytest.raises(ValueError, match="positives"):
        compare(tmp_path, *folders)


def test_evaluations_of_one_model_with_several_seeds_are_one_model(tmp_path):
    folders = [save(tmp_path / str(seed), f"runs/mine-seed{seed}", [1] * seed + [0] * 4) for seed in (1, 2)]
    folders += [save(tmp_path / "again", "others/mine-seed2", [1, 1, 0, 0])]
    table = compare(tmp_path, *folders[:2], "--allow_different", "true")
    assert table.loc["mine", "seeds"] == 2
    again = compare(tmp_path, *folders[1:], "--allow_different", "true")
    # a second run with the same seed counts as another model
    assert again.index.tolist() == ["mine", str(folders[2])]


def test_results_in_folders_with_seeds_are_named_by_the_folder(tmp_path):
    """Results from Python have the name of the start model, and no dataset."""
    folders = [
        save(tmp_path / f"{loss}-seed{seed}", "start", [1] * (seed + more) + [0] * 4, dataset=None)
        for loss, more in (("InfoNCE", 1), ("SVR", 2))
        for seed in (0, 1)
    ]
    table = compare(tmp_path, *folders, "--allow_different", "true")
    assert table["seeds"].to_dict() == {"InfoNCE": 2, "SVR": 2}
    assert table["dataset"].tolist() == ["unnamed data"] * 2


@pytest.mark.process
def test_latex_is_escaped_and_compiles(tmp_path):
    names = ["a_1 & 50%", r"#b^{2}\c~$x"]
    folders = [save(tmp_path / str(number), name, [1, number]) for number, name in enumerate(names)]
    compare(tmp_path, *folders)
    text = (tmp_path / "out" / "table.tex").read_text()
    rows = [line.removesuffix(r"\\") for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", row)) for row in rows] == [1, 1, 1]
    assert r"a\_1 \& 50\%" in rows[1]
    assert r"\#b\textasciicircum \{2\}\textbackslash c\textasciitilde \$x" in rows[2]
    body = re.sub(r"\\[{}]", "", text)
    assert body.count("{") == body.count("}")
    assert re.findall(r"\\(\w+rule)", text) == ["toprule", "midrule", "bottomrule"]
    assert re.findall(r"\\(begin|end){tabular}", text) == ["begin", "end"]

    compiler = shutil.which("tectonic") or shutil.which("pdflatex")
    if compiler:
        head = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}\noindent"
        document = rf"{head}{text}\end{{document}}"
        (tmp_path / "page.tex").write_text(document.replace("% needs", "\n% needs"))
        subprocess.run([compiler, "page.tex"], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL, timeout=120)
        assert (tmp_path / "page.pdf").stat().st_size
        if "pdflatex" in compiler:
            # the table is not wider than the page
            assert "Overfull" not in (tmp_path / "page.log").read_text()
