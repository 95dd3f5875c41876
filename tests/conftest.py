"""Settings and fixtures of all tests: offline, on the CPU, with a temporary Hugging Face cache."""

import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

gc.disable()  # until all tests are collected, because imports create little garbage
# Set before torch and transformers read them at import. Tiny models run fastest on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_HF_HOME = tempfile.TemporaryDirectory(prefix="supclap-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _HF_HOME.name

import builders  # noqa: E402
import matplotlib.font_manager  # noqa: E402, F401  (on a new machine, it starts a process that lists the fonts)
import pytest  # noqa: E402
from transformers import BertTokenizer, NllbTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

from modeling_supclap import SupCLAPModel, SupCLAPProcessor  # noqa: E402
from modeling_supclap.metrics import bootstrap  # noqa: E402

# they have no doctests, and pytest imports them by itself
collect_ignore_glob = ["conftest.py", "*/conftest.py"]

METRICS = Path(__file__).parents[1] / "metrics"
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _ctrl_c_as_before() -> Iterator[None]:
    """Restore the handler of Ctrl-C, because a stopped run ignores it and later tests would inherit this."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def bert_tokenizer() -> BertTokenizer:
    """WordPiece tokenizer."""
    return builders.bert_tokenizer()


@pytest.fixture(scope="session")
def nllb_tokenizer() -> NllbTokenizer:
    """NLLB tokenizer; restore src_lang if you change it."""
    return builders.nllb_tokenizer()


@pytest.fixture
def model() -> SupCLAPModel:
    """Tiny CED + BERT model in evaluation mode."""
    return builders.supclap_model()


@pytest.fixture(scope="session")
def processor() -> SupCLAPProcessor:
    """Processor of `model`."""
    return builders.bert_processor()


@pytest.fixture
def sonar_model() -> SupCLAPModel:
    """Tiny CED + SONAR model in evaluation mode."""
    return builders.pair("sonar")[0]


@pytest.fixture(scope="session")
def sonar_processor() -> SupCLAPProcessor:
    """Processor of `sonar_model`."""
    return builders.nllb_processor()


@pytest.fixture
def load_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Function that loads a metric by name with `evaluate.load`, from another working directory."""
    monkeypatch.chdir(tmp_path)
    evaluate = importlib.import_module("evaluate")
    return lambda name: evaluate.load(str(METRICS / name), cache_dir=str(tmp_path))


@pytest.fixture(scope="session")
def torchcodec() -> ModuleType:
    """torchcodec, with which `datasets` decodes; the test is skipped where it is missing."""
    try:
        codec = importlib.import_module("torchcodec")
        codec.decoders.AudioDecoder(METRICS.parent / "examples" / "sounds" / "slide.ogg")  # loads FFmpeg
        return codec
    except (ImportError, OSError, RuntimeError):
        pytest.skip("torchcodec is not installed, or does not load")


@pytest.fixture(scope="session", autouse=True)
def commit_of_cards() -> Iterator[None]:
    """Replace the commit in model cards by a constant, because the real one starts git."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modeling_supclap.model_card.card.code_commit", lambda: "0" * 40)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    """Fail a test if its fixtures start a process, unless it is marked with `process`."""
    return (yield from _fail_if_a_process_starts(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test that starts a process, unless it is marked with `process`."""
    return (yield from _fail_if_a_process_starts(item))


def _fail_if_a_process_starts(item: pytest.Item) -> Any:
    _refused.clear()
    _tests_without_processes.extend([item.nodeid] if item.get_closest_marker("process") is None else [])
    try:
        result = yield
    finally:
        _tests_without_processes.clear()
    if _refused:  # the test caught the error
        pytest.fail(_refused[0], pytrace=False)
    return result


_tests_without_processes: list[str] = []  # the running test, unless it is marked with `process`
_refused: list[str] = []


def _refuse_process(event: str) -> None:
    if _tests_without_processes:
        _refused.append(f"{_tests_without_processes[0]} starts a process ({event}); mark it with pytest.mark.process")
        raise RuntimeError(_refused[-1])


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        _refuse_process(event)


def _watch_and_start(process: BaseProcess) -> None:
    _refuse_process("multiprocessing")
    _start_process(process)


# The `spawn` and `forkserver` methods of multiprocessing raise no audit event.
_start_process = BaseProcess.start
BaseProcess.start = _watch_and_start  # type: ignore[method-assign, assignment]
sys.addaudithook(_watch)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, and collect seldom."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def freeze_objects() -> Iterator[None]:
    """Exclude later imports and caches, too. The Trainer collects garbage at each run, which would take 0.3 s."""
    yield
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of transformers' tests, which `test_transformers_common.py` runs."""
    flash = ("flash_attn_test", "flash_attn_3_test", "flash_attn_4_test")
    for mark in ("accelerate_tests", *flash, "is_pipeline_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: of transformers' common tests")


@pytest.fixture
def two_units_suffice(monkeypatch):
    """Compute intervals for small sets, whose numbers are easy to check."""
    monkeypatch.setattr(bootstrap, "MIN_UNITS", 2)
