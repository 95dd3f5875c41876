"""Short runs of the reliability campaigns. `make campaigns` runs them in full; RESULTS.md contains the results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_processes

pytestmark = [pytest.mark.process, pytest.mark.slow]
HERE = Path(__file__).parent


def run_campaign(tmp_path: Path, name: str, *arguments: str) -> str:
    """Run a campaign from its command line, and return its output."""
    folder = tmp_path / "work"
    folder.mkdir()
    return run_processes(HERE / f"{name}.py", *arguments, "--folder", folder, count=1)


def test_killed_jobs_have_the_results_of_undisturbed_jobs(tmp_path):
    printed = run_campaign(tmp_path, "kills", "--kills", "1", "--seed", "1", "--jobs", "indexing")
    assert "indexing: ended like one run" in printed


def test_broken_input_is_accepted_or_rejected_by_name(tmp_path):
    printed = run_campaign(tmp_path, "fuzz", "--inputs", "700")
    assert "fault" not in printed
    for kind in ("audio", "texts", "losses", "metrics", "yaml", "rows", "search", "options", "streams", "splits"):
        assert f"{kind}: refused" in printed
        assert f"{kind}: taken" in printed


def test_hostile_files_run_no_code_and_open_no_address(tmp_path):
    printed = run_campaign(tmp_path, "hostile")
    assert "held: refused" in printed
    assert "control: an unsafe reader ran the code" in printed
    assert "control: a request was recorded" in printed


def test_jobs_on_full_and_read_only_disks_name_the_error_and_continue(tmp_path):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("this root may not mount")
    subprocess.run(["umount", "-l", tmp_path], check=True)
    printed = run_campaign(tmp_path, "disks", "--trials", "1", "--jobs", "training")
    assert "and ended like one run" in printed


def test_changing_folders_and_failing_servers_give_correct_results(tmp_path):
    printed = run_campaign(tmp_path, "live", "--trials", "2")
    assert "folder: the index is that of a calm folder" in printed
    assert "server: the rows are those of the folder" in printed
    assert printed.count("control: ") == 2


def test_of_two_writers_to_one_folder_one_is_rejected(tmp_path):
    assert "the result is that of one" in run_campaign(tmp_path, "writers", "--trials", "1", "--jobs", "preparing")
