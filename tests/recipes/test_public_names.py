"""Output files of the recipes contain no local folder names, and therefore no user names."""

from pathlib import Path

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
import translation_models
from commands import run_recipe
from recordings import esc50_folder
from transformers import BertConfig, BertModel

from modeling_supclap import CEDModel
from modeling_supclap.datasets_scripts import prepare
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.recipes import (
    embed_corpus,
    evaluate_supclap,
    posttrain_teminal,
    train_supclap,
    translate_captions,
)

STEPS = [
    "--max_steps",
    2,
    "--save_steps",
    1,
    "--eval_steps",
    1,
    "--eval_strategy",
    "steps",
    "--save_strategy",
    "steps",
]
STEPS += ["--per_device_train_batch_size", 4, "--use_cpu", "true", "--report_to", "none", "--on_bad_audio", "skip"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"hub_token": "hf_x", "lr": 1}, {"lr": 1}),
        ({"inner": {"api_key": "x", "pad_token": "<pad>"}}, {"inner": {"pad_token": "<pad>"}}),
        (("/home/me/set", Path("~/data")), ["set", "data"]),
        ("my_module:load", "my_module:load"),
        ("", ""),
        ("~", "~"),
        (str(Path.home()), "~"),
        ("a/../../home/ann/set", "set"),
        ("a/../b", "a/../b"),
        ("file:///home/ann/set", "set"),
        ('{"audio_dir": "/home/user/x", "k": ["~/y"]}', '{"audio_dir": "x", "k": ["y"]}'),
        ('[{"hf_token": "hf_x"}, 1]', "[{}, 1]"),
        ('{"audio_dir": "/home/user/Geräusche"}', '{"audio_dir": "Geräusche"}'),
        ('{"depth":4}', '{"depth":4}'),
        ("[a dog barks", "[a dog barks"),
        ({"request_options": '{"headers": {"api-key": "x", "n": 1}}'}, {"request_options": '{"headers": {"n": 1}}'}),
        ({"/home/ann/x.wav": 1}, {"x.wav": 1}),
        ('"/home/ann/set"', '"set"'),
        ("laion/clap-htsat-fused", "laion/clap-htsat-fused"),
        ("outputs/esc10", "outputs/esc10"),
        ("/home/ann/ESC-50/", "ESC-50"),
        ("~/sounds", "sounds"),
        ("~nobody-has-this-name/sounds", "sounds"),
        ("./sounds/mine", "mine"),
        (".", Path.cwd().name),
        (' ["/home/ann/set"]', '["set"]'),
        ("[" * 20_000, "[" * 20_000),
        ({1: "/home/ann/set"}, {1: "set"}),
        ("../elsewhere/set", "set"),
        ("https://ann:secret@host.org:8080/v1?key=x#part", "https://host.org:8080/v1"),
    ],
)
def test_a_path_keeps_its_last_name_only_and_secrets_are_left_out(given, kept):
    assert redact(given) == kept


SECRETS = [
    "api-key", "Ocp-Apim-Subscription-Key", "x-api-key", "Authorization", "Proxy-Authorization", "hf_token",
    "sas_token", "account_key", "apikey", "token", "key", "Cookie", "password", "db_passwd", "client_secret",
    "hfToken", "accessToken", "aws_secret_access_key", "Storage Key", "connection_string", "use_auth_token",
    "hub_token",
]  # fmt: skip
PUBLIC = [
    "pad_token",
    "eos_token",
    "additional_special_token",
    "max_new_tokens",
    "keyword",
    "monkey",
    "car_key",
    "tokenizer",
]


def test_secrets_are_known_by_their_names():
    assert redact(dict.fromkeys([*SECRETS, *PUBLIC], "x")) == dict.fromkeys(PUBLIC, "x")


def test_a_file_is_called_the_same_from_wherever_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sounds" / "mine").mkdir(parents=True)
    options = {"data_dir": "sounds/mine", "audio_dir": str(tmp_path / "x"), "model": "user/name", "limit": 3}
    public = {"data_dir": "mine", "audio_dir": "x", "model": "user/name", "limit": 3}
    assert redact(options, from_anywhere=True) == public
    assert redact(options) == {**public, "data_dir": "sounds/mine"}


def texts_of(path: Path) -> bytes:
    """Return the content of a file; tables and packed arrays are unpacked."""
    if path.suffix == ".parquet":
        return repr((pq.read_schema(path).metadata, pq.read_table(path).to_pylist())).encode()
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return repr([(name, arrays[name].tolist()) for name in arrays.files]).encode()
    return path.read_bytes()


def make_home(home: Path) -> Path:
    """Write recordings in the layout of ESC-50 (one damaged), encoders, a translation model, and captions."""
    data = esc50_folder(home / "ESC-50", count=10, num_folds=5)
    (data / "audio" / "1-100-A-1.wav").write_bytes(b"RIFF, no more")

    CEDModel(builders.ced_config()).save_pretrained(home / "ced")
    builders.bert_processor().feature_extractor.save_pretrained(home / "ced")
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(home / "bert")
    builders.bert_tokenizer().save_pretrained(home / "bert")
    translation_models.save_nllb(home / "nllb")
    translation_models.save_encoder(home / "encoder")
    (home / "captions.jsonl").write_text('{"clip_id": "1", "caption_index": 0, "text": "a dog barks"}\n')
    return home


@pytest.mark.process
def test_no_file_of_a_recipe_names_a_folder_of_this_machine(tmp_path):
    home, out = make_home(tmp_path / "ann"), tmp_path / "ann" / "out"

    data = ["--dataset", "esc50", "--data_dir", home / "ESC-50"]
    towers = ["--audio_encoder", home / "ced", "--text_encoder", home / "bert", "--projection_dim", 16]
    run_recipe(train_supclap, *data, *towers, *STEPS, "--output_dir", out / "trained")
    trained = ["--model", out / "trained"]
    run_recipe(posttrain_teminal, *data, *trained, *STEPS, "--output_dir", out / "ordered")
    places = ["--cache_dir", out / "cache", "--output_dir", out / "scores"]
    run_recipe(evaluate_supclap, *data, *trained, *places, "--on_bad_audio", "skip")
    run_recipe(embed_corpus, *trained, "--folder", home / "ESC-50", "--output", out / "corpus", "--device", "cpu")
    run_recipe(
        prepare, "esc50", "--data_dir", home / "ESC-50", "--out", out / "set", "--on_bad_audio", "skip", "--quiet"
    )
    words = ["--captions", home / "captions.jsonl", "--output", out / "texts" / "x.parquet", "--languages", "fra"]
    run_recipe(translate_captions, *words, "--model", home / "nllb", "--sentence_encoder", home / "encoder")

    telling = []
    # the cache stays on this machine
    for path in sorted(set(out.rglob("*")) - set((out / "cache").rglob("*"))):
        if path.is_file() and str(tmp_path).encode() in texts_of(path):
            telling.append(str(path.relative_to(out)))
    assert telling == []
