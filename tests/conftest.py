"""Settings and fixtures of all tests: offline, on the CPU, with a Hugging Face cache of their own."""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Before anything imports torch or transformers, which read these once. Models this small run fastest on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_HF_HOME = tempfile.TemporaryDirectory(prefix="supclap-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _HF_HOME.name

import builders  # noqa: E402
import pytest  # noqa: E402
from transformers import BertTokenizer, NllbTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

from modeling_supclap import SupCLAPModel, SupCLAPProcessor  # noqa: E402

METRICS = Path(__file__).parents[1] / "metrics"
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def bert_tokenizer() -> BertTokenizer:
    """A trained WordPiece tokenizer."""
    return builders.bert_tokenizer()


@pytest.fixture(scope="session")
def nllb_tokenizer() -> NllbTokenizer:
    """A trained tokenizer of NLLB's kind; put src_lang back if you change it."""
    return builders.nllb_tokenizer()


@pytest.fixture
def model() -> SupCLAPModel:
    """A tiny CED + BERT model in evaluation mode."""
    return builders.supclap_model()


@pytest.fixture(scope="session")
def processor() -> SupCLAPProcessor:
    """The processor that goes with `model`."""
    return builders.bert_processor()


@pytest.fixture
def sonar_model() -> SupCLAPModel:
    """A tiny CED + SONAR model in evaluation mode."""
    return builders.pair("sonar")[0]


@pytest.fixture(scope="session")
def sonar_processor() -> SupCLAPProcessor:
    """The processor that goes with `sonar_model`."""
    return builders.nllb_processor()


@pytest.fixture
def load_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A metric by its name, through the real loader of `evaluate`, called from elsewhere."""
    monkeypatch.chdir(tmp_path)
    evaluate = importlib.import_module("evaluate")
    return lambda name: evaluate.load(str(METRICS / name), cache_dir=str(tmp_path))


@pytest.fixture(scope="session")
def torchcodec() -> ModuleType:
    """The package that decodes with FFmpeg's libraries; where those are not installed, the test is skipped."""
    try:
        return importlib.import_module("torchcodec")
    except (ImportError, RuntimeError):
        pytest.skip("torchcodec does not load here; install FFmpeg")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make test-fast` asks for."""
    parser.addoption("--fast", action="store_true", help="Leave out what starts processes or takes seconds.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out of a fast run the tests that carry a mark which says that they are not."""
    if config.getoption("--fast"):
        items[:] = [
            item for item in items if not {"process", "slow", "gpu"} & {mark.name for mark in item.iter_markers()}
        ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fails a test of a fast run that starts a process: it wants the mark `process`."""
    if item.config.getoption("--fast"):
        _refuse_processes.append(item.nodeid)
    try:
        return (yield)
    finally:
        _refuse_processes.clear()


_refuse_processes: list[str] = []  # the test that is running, in a fast run


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _refuse_processes and event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        raise RuntimeError(f"{_refuse_processes[0]} starts a process; mark it with pytest.mark.process")


sys.addaudithook(_watch)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks that transformers' own tests carry, which `test_transformers_common.py` runs."""
    flash = ("flash_attn_test", "flash_attn_3_test", "flash_attn_4_test")
    for mark in ("accelerate_tests", *flash, "is_pipeline_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: of transformers' common tests")
