"""The command `supclap`, from a wheel in its own environment, in a folder with modules of the same names."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from processes import run_forks
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import modeling_supclap
from modeling_supclap.recipes import command

ROOT = Path(__file__).parents[2]
FAST = [name for name in command.COMMANDS if name not in ("prepare", "overlap")]
"""Commands that print their help without slow imports."""


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch):
    """Restore the environment, in which the command stores its name for the recipe."""
    monkeypatch.setenv("SUPCLAP_COMMAND", "")


def test_help_names_the_commands(capsys):
    assert command.main([]) == command.main(["--help"]) == 0
    assert "train,posttrain,sweep,reproduce,embed,evaluate" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["supclap", modeling_supclap.__version__]


def test_an_unknown_command_is_named(capsys):
    assert command.main(["trian"]) == 2
    assert "'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_has_its_help(name, capsys):
    try:
        code = command.main([name, "--help"])
    except SystemExit as ended:  # raised by argparse
        code = ended.code
    assert code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    assert not re.search(r"^ +python ", shown, re.MULTILINE)  # an installed wheel has no scripts
    assert re.search(rf"^ +supclap {name} ", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("train", "train_supclap.py"),
        ("posttrain", "posttrain_teminal.py"),
        ("sweep", "sweep.py"),
        ("reproduce", "reproduce.py"),
        ("embed", "embed_corpus.py"),
    ],
)
def test_recipes_for_several_processes_are_launched_by_accelerate(name, script, monkeypatch):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    assert command.main([name, "--model", "somewhere"]) == 0
    (arguments,) = launched
    assert Path(arguments.training_script).samefile(ROOT / "recipes" / script)
    assert arguments.training_script_args == ["--model", "somewhere"]


def test_a_command_that_is_not_launched_ends_with_the_status_of_its_recipe(monkeypatch):
    monkeypatch.setattr("modeling_supclap.recipes.compare_results.main", lambda: None)
    assert command.main(["compare", "somewhere"]) == 0
    monkeypatch.setattr("modeling_supclap.recipes.compare_results.main", lambda: 3)
    with pytest.raises(SystemExit) as ended:
        command.main(["compare", "somewhere"])
    assert ended.value.code == 3


@pytest.mark.parametrize("exit_code", [0, 3])
def test_mpirun_starts_its_own_processes_and_its_exit_code_is_returned(exit_code, monkeypatch):
    calls = []

    def run(words, env):
        calls.append((words, env))
        return subprocess.CompletedProcess(words, exit_code)

    launched = ["mpirun", "-np", "2", "python", "train.py"], {"HOSTS": "2"}
    monkeypatch.setattr("accelerate.utils.launch.prepare_simple_launcher_cmd_env", lambda _: launched)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    assert command.main(["train", "smoke.yaml"]) == exit_code
    assert calls == [launched]


@pytest.mark.process
def test_help_runs_without_slow_imports():
    lines = [
        "import contextlib, sys",
        "from modeling_supclap.recipes import command",
        "for name in sys.argv[1:]:",
        "    with contextlib.suppress(SystemExit):",
        "        command.main([name, '--help'])",
        "print({'torch', 'transformers', 'datasets', 'accelerate'} & set(sys.modules))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *FAST], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.process
@pytest.mark.parametrize("name", FAST)
def test_help_of_a_script_runs_without_slow_imports(name):
    script = importlib.util.find_spec(f"modeling_supclap.{command.COMMANDS[name]}").origin
    words = [sys.executable, "-X", "importtime", script, "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: {Path(words[-2]).name}")
    imported = {line.split()[-1] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "transformers", "datasets", "accelerate", "huggingface_hub"}


@pytest.mark.process
@pytest.mark.parametrize("words", ["", "train --help"])
def test_help_may_be_read_in_part(words):
    command = f"{sys.executable} -m modeling_supclap.recipes.command {words} | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout[:14], done.stderr) == ("usage: supclap", "")


def build_wheel(source):
    build = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    return subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy of the checkout as git makes it on Windows, where a link is a text file with its target."""
    source = tmp_path_factory.mktemp("fresh") / "source"
    ignored = shutil.ignore_patterns(".*", "outputs", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    for link in filter(Path.is_symlink, source.rglob("*")):
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    return source


@pytest.fixture(scope="module")
def environment(checkout):
    """Folder with the commands of an environment: the tested packages, and this package from its wheel.

    pip installs the wheel without a network, and checks that the tested packages, with any build of PyTorch, are all
    that it requires.
    """
    folder = checkout.parent
    built = build_wheel(checkout)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("supclap-*.whl")

    venv.create(folder / "venv", with_pip=False)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # its .pth files are not read
    (site_packages / "tested.pth").write_text(str(Path(torch.__file__).parents[1]))
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", str(wheel)]
    offline = {**os.environ, "PIP_FIND_LINKS": "", "CUDA_VISIBLE_DEVICES": ""}
    # without the requirements, although the checkout is installed, and then with them
    for options in (["--no-deps", "--ignore-installed"], []):
        subprocess.run([*pip, *options], check=True, timeout=240, env=offline)
    return site_packages, python


@pytest.fixture
def project(tmp_path):
    """Folder with modules that raise when they are imported."""
    for name in ("metrics.py", "recipes/__init__.py", "datasets_scripts/__init__.py", "datasets.py", "evaluate.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise RuntimeError('{name} is not ours')")
    return tmp_path


def run(environment, project, *words, then=(), **options):
    """Start a command, and `then` another in the same process, which saves the imports."""
    _, python = environment
    main = "import sys; sys.path.remove(''); from modeling_supclap.recipes.command import main; "
    main += f"sys.exit(main() or {bool(then)} and main({list(then)}))"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [python, "-c", main, *words], cwd=project, env={**variables, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options
    )  # fmt: skip


def finish(process):
    printed, _ = process.communicate(timeout=280)
    return process.returncode, printed


@pytest.mark.process
def test_an_installed_wheel_works_next_to_modules_of_the_same_names(environment, project):
    words = ["evaluate", "--model", "out", "--num_train", "8", "--num_validation", "8", "--num_test", "16"]
    words += ["--output_dir", "scores", "--cache_dir", "none"]
    code, printed = finish(run(environment, project, "train", "smoke.yaml", "--output_dir", "out", then=words))
    assert code == 0, printed
    results = json.loads((project / "out" / "results.json").read_text())
    assert results["training"]["steps"] == 8
    assert "supclap train smoke.yaml --output_dir out" in ModelCard.load(project / "out" / "README.md").text

    assert (project / "scores" / "report.html").stat().st_size > 10_000

    installed = {path.name for path in environment[0].iterdir()}
    assert not installed & {"metrics", "recipes", "datasets_scripts", "tests", "benchmarks"}


@pytest.mark.process
def test_the_studies_are_not_installed(environment, project):
    recipes = environment[0] / "modeling_supclap" / "recipes"
    assert (recipes / "configs" / "supclap" / "table1_infonce.yaml").is_file()
    assert (recipes / "accelerate" / "fsdp.yaml").is_file()
    assert not [path for path in recipes.rglob("*") if {"studies", "evidence", "tables.yaml"} & set(path.parts)]
    code, printed = finish(run(environment, project, "reproduce", "supclap/table1"))
    (line,) = printed.strip().splitlines()
    assert code == 1
    assert line.startswith(
        "supclap reproduce: error: the studies are not installed; run `supclap reproduce` in a checkout"
    )


@pytest.mark.process
def test_all_commands_start_from_the_wheel(environment, project):
    lines = [
        "import contextlib, importlib.util, io, sys",
        "sys.path.remove('')",
        "from modeling_supclap.recipes import command",
        "for name, module in command.COMMANDS.items():",
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:",
        "        command.main([name, '--help'])",
        "    path = importlib.util.find_spec('modeling_supclap.' + module).origin",
        "    print(name, path, printed.getvalue().startswith('usage: '))",
    ]
    site_packages, python = environment
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    started = subprocess.run(
        [python, "-c", "\n".join(lines)], cwd=project, env=variables, capture_output=True, text=True, timeout=280
    )
    seen = [line.split() for line in started.stdout.splitlines()]
    assert [words[0] for words in seen] == list(command.COMMANDS), started.stderr
    assert all(Path(file).is_relative_to(site_packages) and helped == "True" for _, file, helped in seen)


@pytest.mark.process
def test_pip_shows_the_licence_and_the_supported_pythons(environment):
    (installed,) = distributions(path=[str(environment[0])], name="supclap")
    shown = installed.metadata
    assert (shown["Version"], shown["License-Expression"]) == (modeling_supclap.__version__, "Apache-2.0")
    assert shown["Requires-Python"] == ">=3.11"
    assert shown["Author"] == "The SupCLAP contributors"
    pythons = [line.rpartition(" :: ")[2] for line in shown.get_all("Classifier") if ":: Python :: 3." in line]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert {"LICENSE"} <= {path.name for path in installed.files}


@pytest.mark.process
@pytest.mark.parametrize("folder", ["datasets_scripts", "metrics", "recipes"])
def test_a_wheel_that_lacks_a_folder_is_not_built(folder, checkout):
    (checkout / folder).rename(checkout / "lost")
    failed = build_wheel(checkout)
    (checkout / "lost").rename(checkout / folder)
    assert failed.returncode != 0
    assert f"package directory '{folder}' does not exist" in failed.stderr


@pytest.mark.process
def test_an_error_ends_with_its_message():
    codes, printed = run_forks("recipes/command.py", "train", "smoke.yaml", "--svr_alhpa", "2")
    assert codes == [1]
    assert printed.splitlines()[-1].startswith("supclap train: error: unknown key 'svr_alhpa': did you mean svr_alpha")
    assert "Traceback" not in printed


INTERRUPTED = """
import os, runpy, signal, sys
from modeling_supclap.recipes.command import main

def interrupt(event, arguments):
    if event == "import" and arguments[0] == imported:
        os.kill(os.getpid(), signal.SIGINT)

imported, *words = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background may ignore it
sys.addaudithook(interrupt)
if words[0].endswith(".py"):
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
sys.exit(main(words))
"""


@pytest.mark.process
@pytest.mark.parametrize(("name", "imported"), [("train", "torch"), ("train", "transformers"), ("evaluate", "torch")])
def test_ctrl_c_while_modules_are_imported_is_one_line(name, imported):
    words = [sys.executable, "-c", INTERRUPTED, imported, name, "--model", "somewhere"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    (line,) = done.stderr.strip().splitlines()
    assert (done.returncode, line.split(":")[0]) == (130, f"supclap {name}"), done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_ctrl_c_while_a_script_imports_modules_is_one_line_of_all_processes(rank, lines, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    words = [sys.executable, "-c", INTERRUPTED, "torch", ROOT / "recipes" / "train_supclap.py"]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (130, lines), done.stderr


@pytest.mark.process
def test_ctrl_c_prints_how_to_continue(environment, project):
    many = ["--num_train_epochs", "500", "--dataloader_num_workers", "1"]
    process = run(environment, project, "train", "smoke.yaml", "--output_dir", "out", *many)
    deadline = time.monotonic() + 200
    while not (project / "out" / "checkpoint-2").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    code, printed = finish(process)
    assert code == 130
    assert "--resume_from_checkpoint last" in printed.splitlines()[-1]
    # Python reports and loses a Ctrl-C that arrives while it starts a worker; the next one stops the run.
    reported = re.compile("Exception ignored in.*?^KeyboardInterrupt:? *$", re.DOTALL | re.MULTILINE)
    assert "Traceback" not in reported.sub("", printed)


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (ChildFailedError("train", {1: ProcessFailure(1, 77, 1, "none")}), 1, ""),
        (ChildFailedError("train", {1: ProcessFailure(1, 77, 143, "none")}), 143, ""),
        (
            ChildFailedError("train", {1: ProcessFailure(1, 77, -9, "none")}),
            1,
            "supclap: error: process 1 (pid 77) was killed by SIGKILL\n",
        ),
        (SignalException("stopped", signal.SIGINT), 130, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_several_processes_end_without_the_traceback_of_their_launcher(monkeypatch, capsys, raised, code, told):
    def launch(_):
        raise raised

    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    monkeypatch.setenv("SUPCLAP_COMMAND", "")
    assert command.main(["train", "smoke.yaml"]) == code
    assert capsys.readouterr().err == told
