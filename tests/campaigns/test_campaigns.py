"""The reliability campaigns in short; `make campaigns` runs them at full length, RESULTS.md keeps what they found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_processes

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
FEW = ["--jobs", "training", "preparing"]


def run_campaign(tmp_path: Path, name: str, *arguments: str) -> str:
    """Runs a campaign as its docstring says; gives what it printed."""
    folder = tmp_path / "work"
    folder.mkdir()
    return run_processes(HERE / f"{name}.py", *arguments, "--folder", folder, count=1)


def test_killed_jobs_end_like_jobs_that_nobody_disturbed(tmp_path):
    jobs = ["streaming", "preparing", "indexing", "embedding"]  # all of them in `make campaigns`
    printed = run_campaign(tmp_path, "kills", "--kills", "1", "--seed", "1", "--jobs", *jobs)
    for job in jobs:
        assert f"{job}: ended like one run" in printed


def test_broken_input_is_taken_or_refused_by_name(tmp_path):
    printed = run_campaign(tmp_path, "fuzz", "--inputs", "1000")
    assert "fault" not in printed
    for kind in ("audio", "texts", "losses", "metrics", "yaml", "rows", "search", "options", "streams", "splits"):
        assert f"{kind}: refused" in printed
        assert f"{kind}: taken" in printed


def test_hostile_files_run_no_code_and_fetch_nothing(tmp_path):
    printed = run_campaign(tmp_path, "hostile")
    assert "held: refused" in printed
    assert "control: an unsafe reader ran the code" in printed
    assert "control: a request was recorded" in printed


def test_jobs_on_full_and_read_only_disks_say_so_and_go_on(tmp_path):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("this root may not mount")
    subprocess.run(["umount", "-l", tmp_path], check=True)
    printed = run_campaign(tmp_path, "disks", "--trials", "2", *FEW)
    assert "and ended like one run" in printed


def test_live_folders_and_flaky_servers_have_the_results_of_calm_ones(tmp_path):
    printed = run_campaign(tmp_path, "live", "--trials", "2")
    assert "folder: the index is that of a calm folder" in printed
    assert "server: the rows are those of the folder" in printed
    assert printed.count("control: ") == 2


def test_two_writers_of_one_folder_leave_the_result_of_one(tmp_path):
    assert "the result is that of one" in run_campaign(tmp_path, "writers", "--trials", "2", *FEW)
