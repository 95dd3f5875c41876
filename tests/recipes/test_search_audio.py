"""The search command: index, query, update, resume after an interruption, and two processes."""

import csv
import inspect
import io
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import soundfile
from processes import Moment, run_killed, run_processes

from modeling_supclap.recipes import search_audio
from modeling_supclap.recipes.command import run_command

pytestmark = pytest.mark.skipif(find_spec("lancedb") is None, reason="the extra search is not installed")
ROOT = Path(__file__).parents[2]
SCRIPT = "recipes/search_audio.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with a tiny model."""
    import builders

    return builders.save_supclap(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sounds(tmp_path):
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number in range(6):
        seconds = np.arange(16000 * (3 + number)) / 16000
        soundfile.write(folder / f"tone{number}.wav", 0.3 * np.sin(2 * np.pi * (200 + 300 * number) * seconds), 16000)
    (folder / "broken.wav").write_bytes(b"no sound")
    return folder


def search(capsys, *words):
    """Run the command and return its output."""
    with mock.patch.object(sys, "argv", [SCRIPT, *map(str, words)]):
        run_command(search_audio.main)
    return capsys.readouterr().out


def test_index_then_query(saved, sounds, tmp_path, capsys):
    index = tmp_path / "index"
    printed = search(capsys, "index", sounds, "--model", saved, "--index", index, "--quiet")
    assert re.search(r"\b6 files added\b", printed)
    assert "broken.wav" in printed

    words = ["query", index, "a dog barks", "-k", 3]
    assert search(capsys, *words) == search(capsys, *words)
    found = json.loads(search(capsys, *words, "--json"))
    assert [set(hit) for hit in found["hits"]] == [{"file", "start_seconds", "end_seconds", "score"}] * 3
    assert found["stands_out"] is not ("nothing stands out" in search(capsys, *words))
    found = json.loads(search(capsys, "query", index, "--audio", sounds / "tone3.wav", "--json"))
    assert (found["hits"][0]["file"], found["stands_out"]) == ("tone3.wav", None)
    assert "1 unchanged" not in search(capsys, "index", sounds, "--model", saved, "--index", index, "--quiet")


@pytest.mark.process
def test_an_exported_model_in_the_index_answers_without_torch(saved, sounds, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    from modeling_supclap.recipes import export_onnx

    index = tmp_path / "index"
    search(capsys, "index", sounds, "--model", saved, "--index", index, "--quiet")
    words = ["query", str(index), "a dog barks", "--json"]
    expected = json.loads(search(capsys, *words))["hits"]
    export_onnx.main([str(saved), "--out", str(index / "onnx")])
    capsys.readouterr()
    code = """import sys
from modeling_supclap.recipes.command import main
main()
assert not {"torch", "transformers", "datasets"} & sys.modules.keys()
"""
    command = [sys.executable, "-c", code, "search"]
    printed = subprocess.run([*command, *words], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    found = json.loads(printed)["hits"]
    assert [hit["file"] for hit in found] == [hit["file"] for hit in expected]
    assert [hit["score"] for hit in found] == pytest.approx([hit["score"] for hit in expected], abs=1e-4)
    by_sound = json.loads(search(capsys, "query", index, "--audio", sounds / "tone3.wav", "--json"))  # by the model
    assert by_sound["hits"][0]["file"] == "tone3.wav"

    facts = json.loads((index / "onnx" / "onnx.json").read_text())
    (index / "onnx" / "onnx.json").write_text(json.dumps({**facts, "fingerprint": "another"}))
    with pytest.raises(SystemExit):
        search(capsys, *words)
    assert "another fingerprint" in capsys.readouterr().err


def test_code_of_a_model_must_be_trusted_by_index_and_by_query(sounds, tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    from sentence_models import save_code

    folder, index = save_code(tmp_path / "model"), tmp_path / "index"
    words = ["index", sounds, "--model", folder, "--index", index, "--quiet"]
    with pytest.raises(SystemExit):
        search(capsys, *words)
    assert "trust_remote_code=True" in capsys.readouterr().err
    assert "6 files added" in search(capsys, *words, "--trust_remote_code")
    with pytest.raises(SystemExit):
        search(capsys, "query", index, "rain")
    assert "trust_remote_code=True" in capsys.readouterr().err
    found = json.loads(search(capsys, "query", index, "rain", "--trust_remote_code", "--json"))
    assert len(found["hits"]) == 6


def test_every_option_has_its_help():
    (commands,) = search_audio.make_parser()._subparsers._group_actions
    assert list(commands.choices) == ["index", "query", "score", "serve"]
    for parser in commands.choices.values():
        assert all(action.help for action in parser._actions)


@pytest.fixture(scope="module")
def index(saved, tmp_path_factory):
    """Index of three tones in two folders."""
    root = tmp_path_factory.mktemp("indexed")
    (root / "sounds" / "=site").mkdir(parents=True)
    for number, name in enumerate(("a.wav", "=site/b.wav", "=site/c.wav")):
        seconds = np.arange(16000 * 6) / 16000
        soundfile.write(root / "sounds" / name, 0.3 * np.sin(2 * np.pi * (200 + 900 * number) * seconds), 16000)
    words = ["index", str(root / "sounds"), "--model", str(saved), "--index", str(root / "index"), "--quiet"]
    with mock.patch.object(sys, "argv", [SCRIPT, *words]):
        run_command(search_audio.main)
    (root / "words.txt").write_text("\ufeffa dog barks\n\n  rain falls \na dog barks\n", encoding="utf-8")
    return root / "index"


def test_many_texts_become_tables(index, tmp_path, capsys):
    words = ["query", index, "--texts", index.parent / "words.txt"]
    scores = [hit["score"] for answer in json.loads(search(capsys, *words, "--json")) for hit in answer["hits"]]
    threshold = sorted(scores)[2]  # four of the six hits
    words += ["--threshold", threshold]
    answers = json.loads(search(capsys, *words, "--format", "json"))
    assert [answer["query"] for answer in answers] == ["a dog barks", "rain falls"]
    hits = [(answer["query"], hit["file"], hit["score"]) for answer in answers for hit in answer["hits"]]
    assert sorted(score for _, _, score in hits) == sorted(scores)[2:]

    printed = search(capsys, *words, "--format", "csv", "--output", tmp_path / "hits.csv")
    assert printed == f"4 hits of 2 queries in {tmp_path / 'hits.csv'}\n"
    with (tmp_path / "hits.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["query"], row["file"].removeprefix("'"), float(row["score"])) for row in rows] == hits
    assert {row["file"] for row in rows} & {"'=site/b.wav", "'=site/c.wav"}  # no formulas

    table = search(capsys, *words, "--format", "raven")
    selections = list(csv.DictReader(io.StringIO(table), delimiter="\t"))
    assert len(selections) == 4
    assert {Path(selection["Begin Path"]).is_file() for selection in selections} == {True}
    assert {selection["High Freq (Hz)"] for selection in selections} == {"8000"}
    text = search(capsys, *words)
    assert text.index("a dog barks:") < text.index("rain falls:")
    assert text.count(".wav") == 4


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["rain"], {"k": 10, "within": None, "exact": False, "merge_overlaps": True}),
        (["rain", "-k", "3", "--exact", "--all_windows", "--within", "site", "--threshold", "0.5"],
         {"k": 3, "within": "site", "exact": True, "merge_overlaps": False, "threshold": 0.5}),
        (["rain", "--threshold", "0"],
         {"k": None, "within": None, "exact": False, "merge_overlaps": True, "threshold": 0.0}),
    ],
)  # fmt: skip
def test_the_options_of_a_query_reach_the_search(words, options):
    searcher = mock.Mock()
    arguments = search_audio.make_parser().parse_args(["query", "index", *words, "--language", "fra"])
    assert search_audio.find_answers(searcher, arguments) == searcher.search_texts.return_value
    searcher.search_texts.assert_called_once_with(["rain"], "fra", **options)

    arguments = search_audio.make_parser().parse_args(["query", "index", "--audio", "a.wav", "--end", "5", *words[1:]])
    ((query, hits, stands_out),) = search_audio.find_answers(searcher, arguments)
    assert (query, hits, stands_out) == ("a.wav", searcher.search.return_value, None)
    searcher.embed_audio.assert_called_once_with("a.wav", 0.0, 5.0)
    searcher.search.assert_called_once_with(vector=searcher.embed_audio.return_value, **options)


def test_the_options_of_an_index_reach_its_builder(monkeypatch, capsys):
    load, build = mock.Mock(), mock.Mock(return_value="a report")
    monkeypatch.setattr("modeling_supclap.evaluation.load_embedding_model", load)
    monkeypatch.setattr("modeling_supclap.search.build_index", build)
    several = {"window_seconds": 4.0, "hop_seconds": 1.5, "batch_size": 7, "num_workers": 3, "precision": "int8"}
    several |= {"width": 64, "channel": 1}
    plain = {"window_seconds": 5.0, "hop_seconds": 2.5, "batch_size": 32, "num_workers": None, "precision": "float32"}
    plain |= {"width": None, "channel": None}
    words = [word for name, value in several.items() for word in (f"--{name}", value)]
    for more, options, device, trust in (([], plain, None, False), ([*words, "--quiet"], several, "cpu", True)):
        more = [*more, *(["--device", "cpu", "--trust_remote_code"] if trust else [])]
        printed = search(capsys, "index", "sounds", "--model", "m", "--index", "i", *more)
        assert printed == "a report\n"
        load.assert_called_with("m", device=device, trust_remote_code=trust)
        (model, folder, index), passed = build.call_args
        assert (model, folder, index) == (load.return_value, "sounds", "i")
        shown, process, barrier = (passed.pop(name) for name in ("show_progress_bar", "process", "barrier"))
        assert (passed, shown, process, callable(barrier)) == (options, "--quiet" not in more, (0, 1), True)


def test_labels_of_audacity_are_written_for_each_recording(index, tmp_path, capsys):
    words = ["query", index, "a dog barks", "--format", "audacity"]
    search(capsys, *words, "--output", tmp_path / "labels")
    assert (tmp_path / "labels" / "=site" / "b.wav.txt").read_text(encoding="utf-8").endswith("\ta dog barks\n")
    assert len(list((tmp_path / "labels").rglob("*.txt"))) == 3
    assert search(capsys, *words, "--within", "a.wav").splitlines()[0].split("\t")[2] == "a dog barks"
    for output in ([], ["--output", tmp_path / "labels.txt"]):
        with pytest.raises(SystemExit):
            search(capsys, *words, *output)
        assert "--within" in capsys.readouterr().err
    assert not (tmp_path / "labels.txt").exists()


def test_a_part_of_a_recording_is_the_example(index, tmp_path, capsys):
    tones = [0.3 * np.sin(2 * np.pi * hertz * np.arange(16000 * 6) / 16000) for hertz in (200, 2000)]
    soundfile.write(tmp_path / "tape.wav", np.concatenate(tones), 16000)
    soundfile.write(tmp_path / "part.wav", tones[1][: 16000 * 3], 16000)
    part = ["query", index, "--audio", tmp_path / "tape.wav", "--start", 6, "--end", 9, "--json"]
    alone, found = (
        json.loads(search(capsys, *words))
        for words in (["query", index, "--audio", tmp_path / "part.wav", "--json"], part)
    )
    assert (found["query"], found["audio"]) == (None, str(tmp_path / "tape.wav"))
    assert [hit["file"] for hit in found["hits"]] == [hit["file"] for hit in alone["hits"]]
    for ours, theirs in zip(found["hits"], alone["hits"], strict=True):
        assert ours["score"] == pytest.approx(theirs["score"], abs=2e-3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "one of the arguments"),
        (["rain", "--audio", "a.wav"], "--audio"),
        (["rain", "--start", "1"], "--start"),
        (["--texts", "EMPTY"], "empty.txt"),
        (["--texts", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_unclear_queries_are_refused(index, tmp_path, capsys, words, name):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(SystemExit):
        search(capsys, "query", index, *[str(tmp_path / "empty.txt") if word == "EMPTY" else word for word in words])
    assert name in capsys.readouterr().err.strip().splitlines()[-1]


def test_serve_takes_all_options_of_its_command(monkeypatch, capsys):
    from modeling_supclap.search import app

    options = set(vars(search_audio.make_parser().parse_args(["serve", "index"]))) - {"command"}
    assert options == set(inspect.signature(app.serve).parameters)

    searcher = mock.Mock(side_effect=KeyError)
    monkeypatch.setattr(app, "Searcher", searcher)
    with pytest.raises(KeyError):
        app.serve("index", port=0, device="cpu", trust_remote_code=True)
    searcher.assert_called_once_with("index", None, "cpu", True)

    served = []
    monkeypatch.setattr(app, "serve", lambda **options: served.append(options))
    search(capsys, "serve", "index", "--port", 81, "--recordings", "sounds", "--device", "cpu")
    search(capsys, "serve", "index", "--share")
    shared = {"index": "index", "model": None, "host": "127.0.0.1", "trust_remote_code": False}
    assert served == [
        {**shared, "port": 81, "recordings": "sounds", "device": "cpu", "share": False},
        {**shared, "port": 7860, "recordings": None, "device": None, "share": True},
    ]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["query", "nowhere", "rain"], "nowhere"),
        (["index", "SOUNDS", "--model", "MODEL", "--index", "i", "--device", "gpu"], "gpu"),
        (["index", "nowhere", "--model", "MODEL", "--index", "i"], "nowhere"),
        (["index", "SOUNDS", "--model", "MODEL", "--index", "i", "--hop_seconds", "9"], "hop"),
    ],
)
def test_errors_are_one_line(saved, sounds, tmp_path, capsys, words, name):
    paths = {"MODEL": str(saved), "SOUNDS": str(sounds), "i": str(tmp_path / "i")}
    with pytest.raises(SystemExit):
        search(capsys, *[paths.get(word, word) for word in words])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("search_audio.py: error: ")
    assert name in message


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_and_a_kill(saved, sounds, tmp_path, capsys):
    words = ["--model", str(saved), "--quiet"]
    search(capsys, "index", sounds, *words, "--index", tmp_path / "one")
    printed = run_processes(SCRIPT, "index", str(sounds), *words, "--index", str(tmp_path / "two"))
    assert printed.count("6 files added") == printed.count(" files") == 1  # of both processes

    cut = ["index", str(sounds), *words, "--index", str(tmp_path / "killed")]
    run_killed(SCRIPT, *cut, moment=Moment("open", f"{sounds}/*", 2), count=2)
    run_processes(SCRIPT, *cut)

    outputs = []
    for name in ("one", "two", "killed"):
        outputs.append(search(capsys, "query", tmp_path / name, "a dog barks", "--json", "--all_windows", "-k", 50))
    scores = []
    for printed in outputs:  # hits with equal scores up to rounding may be in another order
        hits = json.loads(printed)["hits"]
        scores.append({(hit["file"], hit["start_seconds"]): hit["score"] for hit in hits})
    assert len(scores[0]) > 6
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], abs=1e-5)
