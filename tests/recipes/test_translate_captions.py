"""The translation recipe, started from the command line."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_recipe
from fake_endpoint import fake_endpoint
from processes import Moment, run_killed
from translation_models import save_encoder, save_nllb

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.translation import ChatTranslator, Seq2SeqTranslator
from modeling_supclap.datasets_scripts.translation.join import Caption
from modeling_supclap.datasets_scripts.translation.table import read_translations
from modeling_supclap.recipes import translate_captions

CAPTIONS = [
    Caption(f"clip {number:02}", index, text)
    for number in range(12)
    for index, text in enumerate([f"A dog barks {number} times", "Rain falls"])
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


UNCHECKED_FRENCH = ["--languages", "fra", "--back_sample", 0]


def write_captions(path, captions=CAPTIONS):
    """Write captions to a Parquet, CSV or JSON Lines file."""
    lines = [caption._asdict() for caption in captions]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(lines), path)
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines) + "\n", encoding="utf-8"
        )
    else:
        quoted = [[str(value).replace('"', '""') for value in caption] for caption in captions]
        rows = ["clip_id,caption_index,text", *('"{}",{},"{}"'.format(*fields) for fields in quoted)]
        path.write_text("\ufeff" + "\r\n".join(rows), encoding="utf-8")
    return path


def test_the_printed_command_gives_a_file_that_joins_and_a_report(tmp_path, encoder, capsys):
    output = tmp_path / "out" / "synthetic.parquet"
    config = {"num_train": 32, "num_validation": 32, "num_test": 32, "languages": ["eng"], "cache_dir": str(tmp_path)}
    models = ["--model", save_nllb(tmp_path / "nllb"), "--sentence_encoder", encoder, "--num_beams", 1]
    what = ["--dataset", "synthetic", "--dataset_config", json.dumps(config), "--languages", "fra", "jpn"]
    asked = ["--splits", "test", "--back_sample", 7, "--num_worst", 3]
    run_recipe(translate_captions, *what, *models, "--output", output, *asked)
    printed = capsys.readouterr().out

    rows = load_splits("synthetic", translations=None, **config)["test"]
    total = sum(len(row["captions"]["eng"]) for row in rows)
    assert re.search(rf"\b{total} captions.*fra, jpn", printed)
    report = json.loads(output.with_suffix(".report.json").read_text(encoding="utf-8"))
    table = read_translations(output)
    for language in ("fra", "jpn"):
        scores = report["languages"][language]
        made = sum(language == value for value in table["language"].to_pylist())
        assert (scores["captions"], scores["captions"] - scores["missing"]) == (total, made)
        assert made > 0
        assert scores["back_translated"] <= 7
        assert -1 <= scores["cosine"] <= 1
        assert len(scores["worst"]) == 3
        assert f"\n{language} " in printed
    assert report["arguments"]["num_beams"] == 1
    names = {"synthetic.back.parquet", "synthetic.parquet", "synthetic.report.json"}
    assert {path.name for path in output.parent.iterdir()} == names
    joined = load_splits("synthetic", translations={"path": str(output), "strict": False}, **config)
    by_key = {(x["clip_id"], x["language"], x["caption_index"]): x["text"] for x in table.to_pylist()}
    row = next(row for row in joined["test"] if row["captions"]["fra"])
    assert row["captions"]["fra"] == [by_key[row["clip_id"], "fra", i] for i in range(len(row["captions"]["eng"]))]


@pytest.mark.process
def test_a_killed_and_restarted_run_writes_the_same_bytes(tmp_path, encoder):
    captions = write_captions(tmp_path / "captions.csv")
    common = ["--captions", captions, "--model", "chat", "--languages", "fra", "deu", "--batch_size", 2]
    common += ["--sentence_encoder", encoder, "--device", "cpu"]
    with fake_endpoint() as server:
        run_recipe(translate_captions, *common, "--endpoint", server.url, "--output", tmp_path / "whole.parquet")
        whole = len(server.requests)
    output = tmp_path / "killed.parquet"
    part = tmp_path / "killed.parquet.part.jsonl"
    with fake_endpoint() as server:
        words = [*common, "--endpoint", server.url, "--output", output, "--workers", 2]
        run_killed("recipes/translate_captions.py", *words, moment=Moment("open", str(part), 6))
        done = part.read_bytes().count(b"\n") - 1
        assert done == 3
        assert not output.exists()
    with fake_endpoint() as server:
        run_recipe(translate_captions, *common, "--endpoint", server.url, "--output", output, "--workers", 1)
        assert len(server.requests) == whole - done
    for name in ("{}.parquet", "{}.back.parquet"):
        assert (tmp_path / name.format("killed")).read_bytes() == (tmp_path / name.format("whole")).read_bytes()
    reports = [json.loads((tmp_path / f"{name}.report.json").read_text())["languages"] for name in ("killed", "whole")]
    assert reports[0] == reports[1]
    assert reports[0]["fra"]["cosine"] == pytest.approx(
        1, abs=1e-6
    )  # the fake endpoint inverts its translations exactly
    assert (reports[0]["fra"]["captions"], reports[0]["fra"]["missing"]) == (24, 0)


def test_another_model_may_translate_back(tmp_path, encoder, capsys):
    output = tmp_path / "out.parquet"
    back = ["--back_model", save_nllb(tmp_path / "nllb"), "--sentence_encoder", encoder, "--back_sample", 2]
    with fake_endpoint() as server:
        what = ["--captions", write_captions(tmp_path / "captions.jsonl"), "--languages", "fra", "--output", output]
        run_recipe(translate_captions, *what, *back, "--model", "chat", "--endpoint", server.url)
        assert len(server.requests) == 1
    assert set(read_translations(output)["model"].to_pylist()) == {"chat"}
    assert set(read_translations(output.with_suffix(".back.parquet"))["model"].to_pylist()) == {"nllb"}
    report = json.loads(output.with_suffix(".report.json").read_text())
    assert report["arguments"]["model"] == "chat"
    assert report["arguments"]["back_model"] == "nllb"
    assert report["languages"]["fra"]["back_translated"] == 2


def test_the_check_may_be_left_out(tmp_path, capsys):
    with fake_endpoint() as server:
        what = ["--captions", write_captions(tmp_path / "captions.csv"), *UNCHECKED_FRENCH]
        run_recipe(
            translate_captions, *what, "--model", "m", "--endpoint", server.url, "--output", tmp_path / "o.parquet"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captions.csv", "o.parquet", "o.report.json"]
    assert "fra" in capsys.readouterr().out


ODD = [Caption('a, "b" #ç', 0, 'A dog says "woof",\u2028\nthen 犬'), Caption("001", 3, "Rain\x85 falls")]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_captions_are_read_from_files_of_three_kinds(tmp_path, suffix):
    path = write_captions(tmp_path / f"captions{suffix}", ODD)
    assert translate_captions.load_captions(translate_captions.CaptionArguments(captions=str(path))) == ODD


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ([Caption("a", 0, "Rain"), Caption("a", 0, "Wind")], "'a' caption 0"),
        ([Caption("a", 0, "Rain"), Caption("b", 1, " ")], "'b' caption 1"),
        ([Caption("a", 0, "\ufffd")], "blank|damaged"),
    ],
)
def test_invalid_captions_are_named(tmp_path, captions, message):
    path = write_captions(tmp_path / "captions.jsonl", captions)
    with pytest.raises(ValueError, match=message):
        translate_captions.load_captions(translate_captions.CaptionArguments(captions=str(path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl", '{"clip_id": "a", "text": "b"}', r"c\.jsonl.*line 1.*caption_index"),
        ("c.jsonl", '{"clip_id": "a", "caption_index": 0, "text": null}', "line 1.*None"),
        ("c.jsonl", '{"clip_id": null, "caption_index": 0, "text": "b"}', "line 1.*None"),
        ("c.jsonl", '{"clip_id": "a", "caption_index": -1, "text": "b"}', "line 1.*caption_index -1"),
        ("c.jsonl", '{"clip_id": "a", "caption_index": 1.5, "text": "b"}', r"caption_index 1\.5"),
        ("c.jsonl", '{"clip_id": "a", "caption_index": 9999999999, "text": "b"}', "caption_index 9999999999"),
        ("c.csv", "clip_id,caption_index,text\na,0,b\na,x,c", r"c\.csv.*line 3.*caption_index x"),
        ("c.csv", "clip_id,caption_index,text\na,0,A dog, then rain", r"\b4\b.*\b3\b"),
        ("c.csv", "clip_id,caption_index,text\na,0", "'a' caption 0"),
        ("c.txt", "", r"c\.txt"),
    ],
)
def test_files_that_are_something_else_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        translate_captions.load_captions(translate_captions.CaptionArguments(captions=str(tmp_path / name)))


SMALL = '{"num_train": 32, "num_validation": 32, "num_test": 32}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "dataset.*captions.*None"),
        ({"dataset": "synthetic", "captions": "c.csv"}, "dataset.*captions"),
        ({"dataset": "synthetic", "dataset_config": SMALL}, "'fra'"),
        ({"dataset": "synthetic", "dataset_config": SMALL, "splits": ["dev"]}, "'dev'"),
        ({"dataset": "synthetic", "dataset_config": "[1]"}, "mapping"),
    ],
)
def test_the_input_to_translate_must_be_unambiguous(arguments, message):
    with pytest.raises(ValueError, match=message):
        translate_captions.load_captions(translate_captions.CaptionArguments(**arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--languages", "eng", "fra"], "languages.*'eng'"),
        (["--languages", "fra", "fra"], "languages.*'fra', 'fra'"),
        (["--languages", "fr", "deu"], r"languages contains \['fr'\]; give ISO 639-3 codes such as eng, "),
        (["--output", "out.csv"], r"out\.csv"),
        (["--back_sampel", "1"], "'back_sampel'.*back_sample"),
    ],
)
def test_invalid_arguments_are_rejected_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_recipe(translate_captions, "--captions", "absent.csv", *arguments)


def test_a_model_that_lacks_a_language_fails_before_the_work(tmp_path, encoder):
    what = ["--captions", write_captions(tmp_path / "captions.csv"), "--languages", "fra", "swe", "--device", "cpu"]
    what += ["--sentence_encoder", encoder, "--model", save_nllb(tmp_path / "nllb")]
    with pytest.raises(ValueError, match="'swe'"):
        run_recipe(translate_captions, *what, "--output", tmp_path / "o.parquet")
    assert not list(tmp_path.glob("o.*"))


def test_the_key_is_read_from_the_environment_and_not_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sesame")
    with fake_endpoint() as server:
        what = ["--captions", write_captions(tmp_path / "captions.csv"), *UNCHECKED_FRENCH]
        where = ["--endpoint", f"{server.url}/v1?key=sesame", "--api_key_env", "SOME_KEY"]
        where += ["--output", tmp_path / "o.parquet"]
        run_recipe(translate_captions, *what, *where, "--model", "m")
    assert server.seen[0]["Authorization"] == "Bearer sesame"
    assert not any(b"sesame" in path.read_bytes() for path in tmp_path.iterdir())
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ValueError, match=r"api_key_env.*SOME_KEY"):
        run_recipe(translate_captions, *what, *where)


def test_arguments_reach_the_translators():
    arguments = translate_captions.TranslatorArguments(
        model="m", endpoint="http://h", workers=2, retries=1, request_options='{"top_p": 0.5}'
    )
    chat = translate_captions.build_translator(arguments)
    assert isinstance(chat, ChatTranslator)
    assert (chat.name, chat.options, chat.workers, chat._client.max_retries) == ("m", {"top_p": 0.5}, 2, 1)
    local = translate_captions.build_translator(
        translate_captions.TranslatorArguments(num_beams=3, device="cpu", dtype="float16")
    )
    assert isinstance(local, Seq2SeqTranslator)
    assert local.name == "facebook/nllb-200-distilled-600M"
    assert (local.num_beams, local.device, local.dtype) == (3, "cpu", "float16")
