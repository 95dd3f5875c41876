"""`kill -9` at random moments and during checkpoints: the continued job must have the result of an undisturbed run.

    python tests/campaigns/kills.py --kills 200

Each trial starts a job and kills it up to three times, with or without its children. After each kill, it continues the
job as the README describes. The final result is compared with an undisturbed run: exact weights, all bytes of prepared
files, and the outcome of every query. No process may remain.
"""

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import forking
from jobs import Job, checkpoints, make_jobs


def campaign(kills: int, folder: Path, seed: int = 0, names: list[str] | None = None) -> Counter[str]:
    """Kill jobs at random moments, and continue them. The kills are divided equally among the jobs.

    Args:
        kills: Total number of kills.
        folder: Empty working folder.
        seed: Random seed of the moments.
        names: Names of the jobs to kill. None: all.

    Returns:
        Number of events by `"job: event"`.

    Raises:
        AssertionError: A killed job did not continue, or had another result.
    """
    draw, counts = random.Random(seed), Counter[str]()
    jobs = make_jobs(folder)
    names = names or list(jobs)
    references = {name: _undisturbed(jobs[name], folder / f"{name}-reference") for name in names}
    for name, (_, seconds) in references.items():
        print(f"{name}: {seconds:.1f} s undisturbed", flush=True)

    done = trial = 0
    while done < kills or trial < len(names):
        name = names[trial] if trial < len(names) else draw.choice(names)
        trial += 1
        expected, seconds = references[name]
        out = folder / f"{name}-{trial}"
        hits = _disturb(jobs[name], name, out, seconds, draw, counts, at_most=min(3, max(1, kills - done)))
        found = jobs[name].outcome(out)
        assert found == expected, f"{name}, trial {out.name}: the result differs from that of an undisturbed run"
        counts[f"{name}: ended like one run"] += 1
        done += hits
        print(f"{done} kills, trial {trial}: {name} ended like one run after {hits}", flush=True)

        for left in folder.glob(f"{out.name}*"):
            shutil.rmtree(left, ignore_errors=True)
    return counts


def _undisturbed(job: Job, out: Path) -> tuple[object, float]:
    """Return the result and the duration in seconds of an undisturbed run."""
    ended = forking.run(job.script, job.start(out), out.with_suffix(".log"))
    assert ended.code == 0, ended.output
    return job.outcome(out), ended.seconds


def _disturb(
    job: Job, name: str, out: Path, seconds: float, draw: random.Random, counts: Counter[str], at_most: int
) -> int:
    """Kill a job up to `at_most` times, and continue it after each kill. Return the number of successful kills."""
    killed, arguments = [], job.start(out)
    for _ in range(at_most):
        run = forking.Run(job.script, arguments, out.with_suffix(".log"))
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0, seconds))
            moment = "at random"
        else:
            _await_writing(run, out, job.pattern, draw, seconds)
            moment = "while writing"
        if run.kill(alone=draw.random() < 0.5):
            killed.append(run)
            counts[f"{name}: killed {moment}"] += 1
        arguments = _next_arguments(job, out)

    ended = forking.run(job.script, arguments, out.with_suffix(".log"))
    assert ended.code == 0, f"{name} does not go on after {len(killed)} kills:\n{ended.output[-3000:]}"
    assert not any(run.is_survived() for run in killed), f"{name}: a killed run left a process behind"
    return len(killed)


def _next_arguments(job: Job, out: Path) -> list[str]:
    """Return the arguments after a kill. Before the first checkpoint, the job starts again."""
    if job.pattern == "*checkpoint*" and not checkpoints(out):
        shutil.rmtree(out, ignore_errors=True)
        return job.start(out)
    return job.proceed(out)


def _await_writing(run: forking.Run, out: Path, pattern: str, draw: random.Random, seconds: float) -> None:
    """Wait until up to three new files match the pattern, and then for up to 30 milliseconds."""
    before = _find(out, pattern)
    skip = draw.randrange(3)
    while run.poll() is None and time.perf_counter() - run.started < 3 * seconds:
        now = _find(out, pattern)
        if new := now - before:
            before = now
            skip -= len(new)
        if skip < 0:
            time.sleep(draw.uniform(0, 0.03))
            return
        time.sleep(0.002)


def _find(out: Path, pattern: str) -> set[Path]:
    """Return the files in a folder that match a pattern. Other processes may rename its folders meanwhile."""
    try:
        return set(out.rglob(pattern))
    except FileNotFoundError:
        return set()


if __name__ == "__main__":
    forking.run_as_command(__doc__, campaign, "--kills", 200)
