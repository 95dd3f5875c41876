"""Full and read-only disks: a job ends with an error that states the cause, and continues when there is space.

    sudo python tests/campaigns/disks.py --trials 30 --folder DIR     # root, to mount small disks

Each trial runs a job on its own disk. The disk is too small by a random amount, or read-only. The job must fail with
the error of the disk. After the disk is enlarged, the job must end like a run with enough space.
"""

import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import forking
from jobs import Job, checkpoints, make_jobs

TOLD: tuple[str, ...] = ("No space left on device", "Read-only file system", "File too large", "Disk quota exceeded")
# torch.save, when the disk fills in the middle of a file or at its end
TOLD += ("inline_container", "iostream error")


class SmallDisk:
    """A disk in memory.

    Args:
        folder: Mount point.
        kilobytes: Size in kB.
    """

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)

    def remount(self, options: str) -> None:
        """Change the mount options, such as the size or "ro"."""
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)

    def __enter__(self) -> "SmallDisk":
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)
        self.folder.rmdir()


def campaign(trials: int, folder: Path, seed: int = 0, names: list[str] | None = None) -> Counter[str]:
    """Run jobs on disks that are too small or read-only.

    Args:
        trials: Number of trials.
        folder: Empty working folder.
        seed: Random seed of the sizes.
        names: Names of the jobs to run. None: all.

    Returns:
        Number of trials by outcome.

    Raises:
        AssertionError: A job did not fail, did not name the error, or had another result after the disk was enlarged.
    """
    draw, counts = random.Random(seed), Counter[str]()
    jobs = make_jobs(folder)
    names = names or list(jobs)
    for trial in range(trials):
        name = names[trial % len(names)]
        job, reference = jobs[name], folder / f"{name}-reference"
        if not reference.exists():
            ended = forking.run(job.script, job.start(reference), reference.with_suffix(".log"))
            assert ended.code == 0, ended.output
        needed = sum(path.stat().st_size for path in reference.rglob("*") if path.is_file()) // 1024
        kind = "read-only" if draw.random() < 0.2 else "full"
        counts[f"{name}: {_try(job, name, folder / f'disk{trial}', reference, needed, kind, draw)}"] += 1
    return counts


def _try(job: Job, name: str, place: Path, reference: Path, needed: int, kind: str, draw: random.Random) -> str:
    """Run one trial, and return its outcome."""
    expected = job.outcome(reference)
    log = place.with_suffix(".log")
    kilobytes = max(8, int(needed * draw.uniform(0.05, 0.95)))
    with SmallDisk(place, 4 * needed + 4096) as disk:
        out = place / "out"
        start = job.start(out)
        disk.remount("ro" if kind == "read-only" else f"size={kilobytes}k")
        ended = forking.run(job.script, start, log)
        if ended.code == 0:
            assert job.outcome(out) == expected, f"{name} ended well on a full disk, with another result"
            return f"{kind}: had room enough"
        assert any(words in ended.output for words in TOLD), (
            f"{name} does not name the disk's error:\n{ended.output[-2000:]}"
        )

        disk.remount(f"rw,size={4 * needed + 4096}k" if kind == "read-only" else f"size={4 * needed + 4096}k")
        # A run with a checkpoint must resume from it. A run without a checkpoint starts again and is counted
        # separately.
        resumes = job.pattern != "*checkpoint*" or bool(checkpoints(out))
        if not resumes:
            shutil.rmtree(out, ignore_errors=True)
        ended = forking.run(job.script, job.proceed(out) if resumes else job.start(out), log)
        assert ended.code == 0, f"{name} does not go on when there is room:\n{ended.output[-3000:]}"
        assert job.outcome(out) == expected, f"{name} ends differently after a disk that was {kind}"
    again = "went on" if resumes else "started again, as nothing was saved,"
    return f"{kind}: refused by name, then {again} and ended like one run"


if __name__ == "__main__":
    forking.run_as_command(__doc__, campaign, "--trials", 30)
