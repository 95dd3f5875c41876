"""CONTRIBUTING.md and SECURITY.md name existing files, and each entry of a table is in all places that it needs."""

import importlib
import re
import tomllib
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from torch.nn import functional

import modeling_supclap
from modeling_supclap.auto_classes import MIN_TRANSFORMERS
from modeling_supclap.configuration_supclap import AUDIO_TOWERS, OWN_TOWERS, SupCLAPConfig
from modeling_supclap.datasets_scripts import builder_names, find_builder
from modeling_supclap.evaluation.options import TASK_NAMES, TaskOptions
from modeling_supclap.evaluation.results import SECTIONS
from modeling_supclap.evaluation.run import TASKS
from modeling_supclap.languages import LANGUAGE_TABLE
from modeling_supclap.losses import info_nce
from modeling_supclap.metrics.names import get_metric
from modeling_supclap.model_card.card import LOSS_NAMES
from modeling_supclap.recipes.options import ModelArguments
from modeling_supclap.towers import get_tower_class
from modeling_supclap.training.objectives import build_objective
from modeling_supclap.training.options import LOSSES, MULTILINGUAL_LOSSES
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+/[\w/.]*)`", CONTRIBUTING + SECURITY))))
def test_the_files_to_change_exist(path):
    assert (ROOT / path).exists()


def test_its_make_targets_exist():
    verbs = set(re.findall(r"make ([a-z][a-z-]*)", CONTRIBUTING))
    assert len(verbs) >= 5
    assert not [verb for verb in verbs if f"\n{verb}:" not in MAKEFILE]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_built_and_documented(loss, tmp_path):
    languages = ["eng", "fra"] if loss in MULTILINGUAL_LOSSES else ["eng"]
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), loss=loss, languages=languages)
    objective = build_objective(args)
    assert objective.loss == loss
    audio = functional.normalize(torch.randn(4, 6), dim=-1)
    texts = functional.normalize(torch.randn(4, len(languages), 6), dim=-1)
    found, _ = objective(audio, texts, torch.tensor(3.0), torch.tensor(-1.0))
    plain = info_nce(audio, texts[:, 0], torch.tensor(3.0))  # the value if the loss has no line of its own
    assert torch.isclose(found, plain) == (loss in ("infonce", "reweighted"))  # the initial weight is 1
    assert loss in LOSS_NAMES
    assert f"`{loss}`" in (GUIDES / "train.md").read_text(encoding="utf-8")
    assert f"`--loss` {loss}" in (ROOT / "docs" / "paper_index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("dataset", builder_names())
def test_a_dataset_is_registered_tested_and_documented(dataset):
    assert find_builder(dataset).BUILDER_CONFIG_CLASS
    assert (ROOT / "tests" / "data" / f"test_{dataset}.py").exists()
    assert f"`{dataset}`" in (GUIDES / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("metric", [path.parent.name for path in (ROOT / "metrics").glob("*/README.md")])
def test_a_metric_has_its_parts(metric):
    names = {path.name for path in (ROOT / "metrics" / metric).iterdir()}
    assert names >= {"__init__.py", f"{metric}.py", "README.md"}
    assert f"metrics/{metric}.md" in (ROOT / "docs" / "api" / "metrics.md").read_text(encoding="utf-8")
    assert list((ROOT / "tests" / "metrics").glob(f"test_{metric}*.py"))


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_task_of_evaluation_has_its_parts(task):
    assert task in TASKS
    section = SECTIONS[task]
    assert {section.summary[0], *section.card_metrics} <= set(section.metrics)
    assert all(get_metric(metric).display for metric in section.metrics)
    assert task in (TaskOptions.__doc__ or "")
    assert task in (GUIDES / "evaluate.md").read_text(encoding="utf-8")


def test_a_language_has_its_sentences():
    for path in (ROOT / "datasets_scripts" / "phrases").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not [code for code in LANGUAGE_TABLE if f'"{code}"' not in text], path.name


def test_towers_have_their_configuration():
    for model_type in OWN_TOWERS:
        tower = get_tower_class(model_type)
        assert tower.config_class.model_type in (model_type, f"{model_type}_encoder"), model_type
        assert tower.__name__ in modeling_supclap.__all__
        assert f"{tower.__module__}.{tower.__name__}" in (ROOT / "docs" / "api" / "model.md").read_text("utf-8")


@pytest.mark.parametrize("model_type", AUDIO_TOWERS)
def test_an_audio_tower_has_a_case_in_localization(model_type):
    assert f'case "{model_type}"' in (ROOT / "modeling_supclap" / "localization" / "time_steps.py").read_text(
        encoding="utf-8"
    )


def test_shared_keys_are_in_one_dataclass():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "recipes").glob("*.py")]
    for key in ("dataset_config", "lora_rank"):
        assert sum(f"\n    {key}: " in source for source in sources) == 1, key
    assert ModelArguments().model is None


def test_the_options_of_a_new_model_have_its_defaults():
    options, config = ModelArguments(), SupCLAPConfig()
    shared = vars(options).keys() & config.to_dict().keys() - {"audio_config", "text_config"}
    assert shared >= {"projection_dim", "temperature", "logit_bias", "audio_pooling", "text_pooling"}
    # None is the value of the start model or of the text encoder, or else that of the configuration.
    assert (options.temperature, options.text_pooling) == (None, None)
    shared -= {"temperature", "text_pooling"}
    assert {name: getattr(options, name) for name in shared} == {name: getattr(config, name) for name in shared}


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "modeling_supclap.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", modeling_supclap.__version__)


@pytest.mark.parametrize(
    ("name", "vulnerable"),
    [
        ("setuptools", "78.1.0"),
        ("jinja2", "3.1.5"),
        ("protobuf", "5.29.4"),
        ("sentencepiece", "0.2.0"),
        ("tqdm", "4.66.2"),
    ],
)
def test_no_release_with_a_published_vulnerability_is_allowed(name, vulnerable):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    required = map(Requirement, project["build-system"]["requires"] + project["project"]["dependencies"])
    (found,) = [requirement for requirement in required if requirement.name == name]
    assert not found.specifier.contains(vulnerable)


def test_the_code_of_a_saved_model_needs_the_transformers_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(line.startswith(f"transformers>={MIN_TRANSFORMERS},") for line in project["dependencies"])
    assert f"transformers=={MIN_TRANSFORMERS}.0" in MAKEFILE
    for page in ("docs/index.md", "docs/guides/tune.md"):
        assert f"transformers {MIN_TRANSFORMERS} or later" in (ROOT / page).read_text(encoding="utf-8")


def test_the_oldest_python_that_is_promised_is_one_that_the_tested_packages_allow():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    for page in ("README.md", "docs/index.md"):
        assert f"Python {oldest} or later" in (ROOT / page).read_text(encoding="utf-8")

    assert f"--python-version {oldest} " in MAKEFILE  # of the tested set, where other lines are for newer Pythons only
    for requirement in pinned_set():
        if requirement.marker is None and applies(requirement):
            allowed = metadata(requirement.name)["Requires-Python"]
            assert allowed is None or SpecifierSet(allowed).contains(oldest), f"{requirement} needs Python {allowed}"


def pinned_set() -> list[Requirement]:
    """Return the pinned packages of requirements.txt."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return [Requirement(line.rstrip(" \\")) for line in text.splitlines() if re.match("[a-z]", line)]


def applies(requirement: Requirement) -> bool:
    """Return whether a requirement is for this system and Python. CUDA's packages are not, for PyTorch's CPU build."""
    of_cuda = re.match(r"(nvidia|cuda)-|triton$", requirement.name) and torch.version.cuda is None
    return not of_cuda and (requirement.marker is None or requirement.marker.evaluate())


def test_the_tested_set_is_pinned_and_hashed():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    blocks = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert len(blocks) == len(pinned_set()) > 200
    for block in blocks:
        assert re.match(r"[a-z0-9.-]+==[^ *]+ ", block), block
        assert "--hash=sha256:" in block


def test_the_tested_set_has_what_the_package_and_its_extras_require():
    """`make setup` checks that it also has what these packages require."""
    pinned = {requirement.name: requirement for requirement in pinned_set() if applies(requirement)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in (*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())):
        requirement = Requirement(line)
        (version,) = pinned[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(version.version), f"{requirement}, not {version}"


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch's CPU build does not list the packages of CUDA")
def test_the_installation_for_cpus_leaves_out_the_packages_of_cuda():
    (pattern,) = re.findall("cuda='([^']+)'", (ROOT / ".ci" / "install").read_text(encoding="utf-8"))
    required = [Requirement(line) for line in metadata("torch").get_all("Requires-Dist")]
    of_cuda = {canonicalize_name(each.name) for each in required if "linux" in str(each.marker).lower()}
    left_out = {each.name for each in pinned_set() if re.fullmatch(pattern, each.name)}
    assert {"torch", "torchaudio"} < of_cuda | {"torch", "torchaudio"} <= left_out
    assert not left_out & {"av", "numpy", "sympy", "networkx"}


def test_the_citation_is_whole():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "references"} <= citation.keys()
    bibliography = (ROOT / "modeling_supclap" / "model_card" / "citations.bib").read_text(encoding="utf-8")
    for reference in citation["references"]:
        number = reference["url"].rpartition("/")[2]
        (entry,) = [entry for entry in bibliography.split("\n\n") if number in entry]
        fields = dict(re.findall(r"^  (\w+) = \{(.*)\},?$", entry, flags=re.MULTILINE))
        names = [f"{author['given-names']} {author['family-names']}" for author in reference["authors"]]
        assert fields["title"].replace("{", "").replace("}", "") == reference["title"]
        assert (fields["author"].split(" and "), int(fields["year"])) == (names, reference["year"])
        assert fields.get("booktitle") == reference.get("collection-title")


def test_public_names_are_in_all():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## What is public") :].split("\n\n")[1]
    all_, *packages = re.findall(r"`([a-z_.]+)`", section[: section.index(";")])
    assert (all_, packages[0]) == ("__all__", "modeling_supclap")
    for name in packages:
        module = importlib.import_module(name if name == "modeling_supclap" else f"modeling_supclap.{name}")
        assert all(hasattr(module, public) for public in module.__all__), name
