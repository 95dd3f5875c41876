"""Model card: valid metadata, code that runs, correct facts of the run, and protection of edited cards."""

import json
import re
from pathlib import Path

import builders
import pytest
import soundfile
import torch
from fake_hub import FakeHub, fake_hub
from huggingface_hub import ModelCard
from processes import run_python
from recordings import tone_rows

from modeling_supclap import CEDModel, SonarTextModel, SupCLAPModel
from modeling_supclap.evaluation.results import SCHEMA, score
from modeling_supclap.model_card import Origin, citations, is_untouched, model_card, push_to_hub, write_card
from modeling_supclap.model_card import card as card_module
from modeling_supclap.model_card.facts import CardFacts
from modeling_supclap.training.trainer import SupCLAPTrainer

RESULTS = {
    "schema": SCHEMA,
    "protocol": {"dataset": "esc50", "split": "test"},
    "scores": {"retrieval": {"eng": {"t2a": {"R@1": score(0.5, None, 0.1)}, "a2t": {"R@1": score(0.4)}}}},
    "versions": {"torch": "9.9"},
}


def facts(model, **kwargs):
    run = {
        "languages": ["eng", "fra", "qaa"],
        "arguments": {"loss": "infonce", "svr": "bi-static", "seed": 3, "per_device_train_batch_size": 24},
        "dataset": ["esc50", "user/sounds"],
        "clips": 1600,
        "licenses": {"CC BY": 1500, "not stated": 100},
        "results": [RESULTS],
        "command": "accelerate launch recipes/train_supclap.py --svr bi-static",
        "processes": 2,
        "device": "cuda",
    }
    return CardFacts(model, "tiny", **{**run, **kwargs})


def towers(tmp_path, monkeypatch, text):
    """Return a model of two towers that have their Hub names, relative to the current folder."""
    monkeypatch.chdir(tmp_path)
    audio = CEDModel(builders.ced_config())
    audio.save_pretrained("mispeech/ced-tiny")
    if text == "sonar":
        SonarTextModel(builders.sonar_config()).save_pretrained(name := "cointegrated/SONAR_200_text_encoder")
    else:
        builders.supclap_model().text_model.save_pretrained(name := "sentence-transformers/LaBSE")
    model = SupCLAPModel.from_encoders("mispeech/ced-tiny", name, projection_dim=16)
    # a folder without these sub-folders: the names are repositories again
    monkeypatch.chdir(Path(__file__).parent)
    return model


@pytest.mark.parametrize(
    ("text", "license", "base"),
    [
        ("sonar", "cc-by-nc-4.0", "cointegrated/SONAR_200_text_encoder"),
        ("labse", "apache-2.0", "sentence-transformers/LaBSE"),
    ],
)
def test_metadata(tmp_path, monkeypatch, text, license, base):
    card = model_card(facts(towers(tmp_path, monkeypatch, text), tags=["esc"]))
    assert write_card(tmp_path, card)
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.license == license
    assert data.base_model == ["mispeech/ced-tiny", base]
    assert data.language == ["en", "fr", "qaa"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "zero-shot-audio-classification")
    assert data.datasets == ["user/sounds"]  # not a name that is no dataset of the Hub
    assert {(result.metric_name, result.metric_value) for result in data.eval_results} == {
        ("text to audio R@1", 0.5), ("audio to text R@1", 0.4),
    }  # fmt: skip
    assert data.model_name == "tiny"
    assert data.tags == ["audio", "audio-text-retrieval", "contrastive-learning", "esc", "supclap"]
    assert (data.get("license_name"), data.get("license_link")) == (None, None)


def test_the_card_forbids_commercial_use_of_sonar(tmp_path, monkeypatch):
    text = model_card(facts(towers(tmp_path, monkeypatch, "sonar"))).text
    assert "**cc-by-nc-4.0" in text
    assert "cointegrated/SONAR_200" in text
    assert "LaBSE" in text
    assert "[mispeech/ced-tiny](https://huggingface.co/mispeech/ced-tiny) | apache-2.0 |" in text
    assert {"dinkel2023ced", "duquenne2023sonar"} <= set(re.findall(r"@misc\{(\w+),", text))


def test_ced_and_labse_allow_commercial_use(tmp_path, monkeypatch):
    text = model_card(facts(towers(tmp_path, monkeypatch, "labse"))).text
    assert "**apache-2.0**" in text
    assert "commercial" not in text
    assert "feng2020labse" in text


def test_the_text_describes_the_run(model):
    text = model_card(facts(model)).text
    for told in (
        "esc50, user/sounds, 1,600 clips",
        "| CC BY | 1,500 |",
        "| not stated | 100 |",
        "(bi-static)",
        "2 processes on cuda",
        "batch of 48 clips",
        "per_device_train_batch_size: 24\nseed: 3\nsvr: bi-static",
        "| esc50, test | text to audio | eng | 50.0; chance 10.0 |",
        "accelerate launch recipes/train_supclap.py --svr bi-static",
        "torch 9.9",
        "Seed 3",
        "luo2025supclap",
        "random initialisation",
    ):
        assert told in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"loss": "infonce", "svr": "none"}, "InfoNCE in both directions."),
        (
            {"loss": "kcl", "svr": "bi-static"},
            "1-to-K contrastive learning (KCL) with Support Vector Regularization (bi-static).",
        ),
        ({"loss": "siglip"}, "SigLIP's sigmoid loss."),
        (
            {"loss": "infonce", "svr": "within-modality"},
            "InfoNCE in both directions, with contrast within each modality.",
        ),
        ({"loss": "new"}, "A contrastive objective."),
        ({"objective": "my_losses:Loss"}, "The custom objective `my_losses:Loss`."),
        ({"stage": "b", "objective": "x"}, "TeminAL's temporal objective."),
    ],
)
def test_the_objective_is_named(model, arguments, sentence):
    assert sentence in model_card(facts(model, arguments=arguments)).text


def test_a_post_training_counts_pairs(model):
    arguments = {"stage": "b", "per_device_train_batch_size": 24}
    assert "batch of 48 pairs" in model_card(facts(model, arguments=arguments)).text


def test_a_card_of_a_model_without_a_run(model, tmp_path):
    card = model_card(CardFacts(model, "tiny"))
    assert "No results" in card.text
    write_card(tmp_path, card)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.license, data.eval_results, data.language) == ("apache-2.0", None, None)


def test_a_license_of_the_data_stays_within_its_cell(model):
    text = "CC BY |\n\n# Free\n<img src=x> [see](javascript:x)"
    card = model_card(facts(model, licenses={text: 7}, dataset=["a\n# b"])).text
    (line,) = [line for line in card.splitlines() if "CC BY" in line]
    assert line == r"| CC BY \| \# Free &lt;img src=x&gt; \[see\]\(javascript:x) | 7 |"
    assert "\n# Free" not in card
    assert "\n# b" not in card


def test_texts_of_a_strange_model_and_of_strange_results_are_escaped(tmp_path):
    builders.supclap_model().save_pretrained(tmp_path)
    bad = "x](javascript:alert(1)) <img src=x> `a |\n\n# Free of charge\n"
    parts = [
        {"part": f"audio tower{bad}", "kind": f"ced{bad}", "source": f"laion{bad}", "license": f"mit{bad}"},
        {"part": "text tower", "kind": "bert", "source": "y", "license": "", "sha256": [bad], "base_model": [bad]},
    ]
    (tmp_path / "provenance.json").write_text(json.dumps(parts))
    results = {**RESULTS, "protocol": {"dataset": f"esc50{bad}", "split": bad}}
    results["scores"] = {"retrieval": {f"eng{bad}": {"t2a": {"R@1": score(0.5)}, "a2t": {}}}}
    card = model_card(facts(SupCLAPModel.from_pretrained(tmp_path), results=[results])).text
    assert "<img" not in card
    assert "](javascript" not in card
    assert "\n# Free" not in card
    assert card.count(r"x\]\(javascript:alert(1)) &lt;img src=x&gt; \`a \|") == 6


def test_the_base_model_in_the_card_of_an_encoder_is_taken_over(tmp_path):
    for name, base in (("whisper", "base_model: openai/whisper-tiny.en"), ("e5", "base_model:\n- intfloat/e5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\nlicense: mit\n{base}\n---\n# A copy\n")
    config = builders.supclap_config()
    config.audio_config.name_or_path = str(tmp_path / "whisper")
    config.text_config.name_or_path = str(tmp_path / "e5")
    card = model_card(facts(builders.supclap_model(config)))
    assert card.data.base_model == ["openai/whisper-tiny.en", "intfloat/e5"]
    assert "| [whisper](https://huggingface.co/openai/whisper-tiny.en) | mit |" in card.text
    assert "sha256 of" not in card.text  # a column for converted files only


def test_reproducible_runs_have_the_number_of_threads(model):
    assert "on the same machine with 6 threads are reproducible" in model_card(facts(model, threads=6)).text
    assert "with 1 thread are" in model_card(facts(model, threads=1)).text
    assert "with the same number of threads are" in model_card(facts(model)).text


def test_an_unknown_license_is_left_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    builders.supclap_model().text_model.save_pretrained("someone/text")
    CEDModel(builders.ced_config()).save_pretrained("mispeech/ced-mini")
    card = model_card(facts(SupCLAPModel.from_encoders("mispeech/ced-mini", "someone/text", projection_dim=16)))
    license = card.data.license, card.data.license_name, card.data.license_link
    assert license == ("other", "licenses-of-its-parts", "README.md")
    assert re.search(r"not stated.*someone/text", card.text)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ({"loss": "infonce", "svr": "none"}, ["oord2018cpc"]),
        ({"loss": "siglip", "svr": "uni-dynamic"}, ["luo2025supclap", "zhai2023siglip"]),
        ({"loss": "reweighted", "svr": "none"}, ["luo2025supclap"]),
        ({"loss": "cacl", "svr": "none"}, ["yin2025atri"]),
        ({"loss": "infonce", "svr": "within-modality"}, ["zolfaghari2021crossclr", "oord2018cpc"]),
        ({"stage": "a, then b"}, ["sinha2024teminal"]),
        ({}, []),
    ],
)
def test_the_methods_that_were_used_are_cited(model, arguments, keys):
    assert citations(arguments, []) == [*keys, "yan2024bridging"]
    text = model_card(facts(model, arguments=arguments)).text
    assert re.findall(r"^@\w+\{(\w+),", text, flags=re.M) == [*keys, "yan2024bridging", "dinkel2023ced"]


def test_no_source_is_needed_to_cite_a_tower():
    assert "duquenne2023sonar" in citations({}, [Origin("text tower", "m2m_100")])
    by_layout = {
        "GLAP": ["dinkel2024dasheng", "dinkel2025glap"],
        "Dasheng": ["dinkel2024dasheng"],
        "MS-CLAP 2022": ["elizalde2022clap"],
        "MS-CLAP 2023": ["elizalde2023natural"],
        "LAION-CLAP, authors' file": ["wu2022laion"],
        "CLAP, Hub": ["wu2022laion"],
    }
    for layout, keys in by_layout.items():
        assert citations({}, [Origin("audio tower", "other", layout=layout)]) == ["yan2024bridging", *keys]
    for kind, key in (("ced", "dinkel2023ced"), ("cnn14", "kong2020panns"), ("naflex", "ilharco2021openclip")):
        assert citations({}, [Origin("audio tower", kind)]) == ["yan2024bridging", key]
    assert citations({}, [Origin("text tower", "bert", source="x/LaBSE")]) == ["yan2024bridging", "feng2020labse"]


@pytest.mark.parametrize("kind", ["bert", "sonar"])
def test_the_code_of_the_card_runs(tmp_path, monkeypatch, capsys, request, kind):
    names = ("model", "processor") if kind == "bert" else ("sonar_model", "sonar_processor")
    model, processor = (request.getfixturevalue(name) for name in names)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    write_card(tmp_path, model_card(facts(model)))
    soundfile.write(tmp_path / "dog.wav", torch.rand(44100, 2).numpy() - 0.5, 44100)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", Path("README.md").read_text(), flags=re.M | re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert "tensor([[0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("languages", "language", "caption"),
    [
        (["deu", "eng"], "deu", "ein bellender Hund"),
        (["zh"], "zho", ""),
        (["qaa"], "eng", "a dog barking"),
        ([], "eng", "a dog barking"),
    ],
)
def test_the_captions_of_the_code_are_in_its_language(model, languages, language, caption):
    code = model_card(facts(model, languages=languages)).text.split("```")[1]
    assert f'language="{language}"' in code
    assert caption in code
    assert ("dog" in code.replace("dog.wav", "")) == (language == "eng")


# ---- overwriting ----


def test_a_card_is_updated_until_it_is_edited(model, tmp_path, caplog):
    path = tmp_path / "README.md"
    assert write_card(tmp_path, model_card(facts(model, clips=1)))
    assert is_untouched(path.read_text())
    assert write_card(tmp_path, model_card(facts(model, clips=2)))
    assert "2 clips" in path.read_text()
    path.write_text(path.read_text().replace("2 clips", "two clips"))
    assert not write_card(tmp_path, model_card(facts(model, clips=3)))
    assert "two clips" in path.read_text()
    assert write_card(tmp_path, model_card(facts(model, clips=4)), overwrite=True)
    assert "4 clips" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "edit", [lambda text: text + "More.\n", lambda text: "More.\n" + text, lambda text: "Mine.\n"]
)
def test_any_edit_counts(model, edit):
    content = model_card(facts(model)).content
    assert is_untouched(content)
    assert is_untouched(content.rstrip())
    assert not is_untouched(edit(content))


# ---- the trainer and the Hub ----


@pytest.fixture
def trainer(tmp_path):
    args, rows = builders.training_args(tmp_path / "run"), tone_rows(tmp_path)
    model, processor = builders.pair()
    return SupCLAPTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=processor)


def test_the_trainer_writes_it(trainer, tmp_path):
    trainer.create_model_card(
        dataset="tones", tags="mine", model_name="my model", license="mit", language=["en", "fr"]
    )
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "provenance.json"]
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.language, card.data.datasets) == ("mit", ["en", "fr"], None)
    assert "# my model" in card.text
    assert 'language="eng"' in card.text
    assert "tones, 8 clips" in card.text
    parts = json.loads((folder / "provenance.json").read_text())
    assert [part["part"] for part in parts] == ["audio tower", "text tower"]
    trainer.create_model_card(dataset_tags="user/sounds", dataset="tones", finetuned_from="someone/base")
    card = ModelCard.load(folder / "README.md")
    assert (card.data.datasets, card.data.base_model, card.data.language) == (
        ["user/sounds"],
        ["someone/base"],
        ["en"],
    )


def test_another_process_writes_nothing(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card()
    assert not (tmp_path / "run" / "README.md").exists()


@pytest.mark.parametrize("has_card", [False, True])
def test_a_card_is_pushed_before_the_model_unless_there_is_one(monkeypatch, has_card):
    calls = []

    class Api:
        def __init__(self, token):
            calls.append(token)

        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options))

        def file_exists(self, *place):  # on the main branch, whose card transformers copies to the others
            assert place == ("someone/plain", "README.md")
            return has_card

        def upload_file(self, path_or_fileobj, **place):
            calls.append((path_or_fileobj.decode(), place))

    model, processor = builders.pair()
    processor.feature_extractor.sampling_rate = rate_hz = 32000
    monkeypatch.setattr(card_module, "HfApi", Api)
    for part in (model, processor):
        name = type(part).__name__
        push = lambda *words, name=name, **options: calls.append((name, *words, options)) or f"commit of {name}"  # noqa: E731
        monkeypatch.setattr(part, "push_to_hub", push)
    options = {"token": "hf_x", "private": True, "revision": "v2"}
    assert push_to_hub(model, processor, "someone/plain", **options) == "commit of SupCLAPModel"
    token, created, *cards, first, second = calls
    assert (token, created) == ("hf_x", ("someone/plain", {"private": True, "exist_ok": True}))
    assert (first, second) == tuple((name, "someone/plain", options) for name in ("SupCLAPProcessor", "SupCLAPModel"))
    expected = model_card(CardFacts(model, "plain", "someone/plain", sampling_rate_hz=rate_hz)).content
    place = {"path_in_repo": "README.md", "repo_id": "someone/plain"}
    assert cards == ([] if has_card else [(expected, place)])
    calls.clear()
    own = facts(model)
    push_to_hub(model, processor, "someone/plain", own)
    assert calls[:2] == [None, ("someone/plain", {"private": None, "exist_ok": True})]
    assert has_card or calls[2] == (model_card(own).content, place)


PUSHER = """
import sys
import builders
from recordings import tone_rows
from pathlib import Path
from huggingface_hub import ModelCard
from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.model_card import push_to_hub
from modeling_supclap.training.trainer import SupCLAPTrainer

sonar, processor = builders.pair("sonar")
rows = tone_rows(Path("."))
args = builders.training_args("run", hub_model_id="someone/trained")
trainer = SupCLAPTrainer(sonar, args, rows, rows, processing_class=processor)
trainer.push_to_hub(dataset="tones")

push_to_hub(*builders.pair(), "someone/plain")
push_to_hub(*builders.pair(), "someone/trained")  # its card stays
for name in ("someone/trained", "someone/plain"):
    SupCLAPModel.from_pretrained(name), SupCLAPProcessor.from_pretrained(name)
"""


@pytest.mark.slow
@pytest.mark.process
def test_pushed_with_the_model(tmp_path):
    with fake_hub() as address:
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_none", "NO_PROXY": "127.0.0.1"}
        run_python("-c", PUSHER, cwd=tmp_path, HF_HOME=str(tmp_path / "cache"), **hub)
        trained, plain = (dict(FakeHub.files[f"someone/{name}"]) for name in ("trained", "plain"))
    card = ModelCard(trained["README.md"].decode())
    assert (card.data.license, card.data.language, card.data.datasets) == ("cc-by-nc-4.0", ["en"], None)
    assert 'name = "someone/trained"  # this repository' in card.text
    assert "tones, 8 clips" in card.text
    assert {"model.safetensors", "modeling_supclap.py", "tokenizer.json", "provenance.json"} <= trained.keys()
    card = ModelCard(plain["README.md"].decode())
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "zero-shot-audio-classification")
    assert 'name = "someone/plain"' in card.text
    assert {"model.safetensors", "processor_config.json"} <= plain.keys()
