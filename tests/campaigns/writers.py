"""Two jobs that write to one folder at the same time: one succeeds, the other ends with an error that names the folder.

python tests/campaigns/writers.py --trials 20 --folder DIR
"""

import random
import time
from collections import Counter
from pathlib import Path

import forking
from jobs import make_jobs


def campaign(trials: int, folder: Path, seed: int = 0, names: list[str] | None = None) -> Counter[str]:
    """Start each job twice, the second at a random moment after the first.

    Args:
        trials: Number of pairs.
        folder: Empty working folder.
        seed: Random seed of the moments.
        names: Names of the jobs to run. None: the jobs with long writes (training, preparing and translation).

    Returns:
        Number of trials by outcome.

    Raises:
        AssertionError: Both jobs failed, the error does not name the folder, or the result differs from that of a
            single run.
    """
    draw, counts = random.Random(seed), Counter[str]()
    jobs = make_jobs(folder)
    names = names or ["training", "preparing", "translation"]
    references = {}
    for name in names:
        reference = folder / f"{name}-reference"
        ended = forking.run(jobs[name].script, jobs[name].start(reference), reference.with_suffix(".log"))
        assert ended.code == 0, ended.output
        references[name] = (jobs[name].outcome(reference), ended.seconds)

    for trial in range(trials):
        name = names[trial % len(names)]
        job, (expected, seconds) = jobs[name], references[name]
        out = folder / f"{name}-{trial}"
        first = forking.Run(job.script, job.start(out), folder / f"first{trial}.log")
        time.sleep(draw.uniform(0, 0.9 * seconds))
        second = forking.Run(job.script, job.start(out), folder / f"second{trial}.log")
        ends = [first.wait(), second.wait()]
        refused = [ended for ended in ends if ended.code != 0]
        assert len(refused) < 2, f"{name}: both failed\n{ends[0].output[-1500:]}\n{ends[1].output[-1500:]}"
        for ended in refused:
            assert out.name in ended.output, f"{name}: the refusal does not name the folder\n{ended.output[-1500:]}"
        assert job.outcome(out) == expected, f"{name}: two writers left another result than one"
        counts[
            f"{name}: {'one refused by name' if refused else 'one after the other'}, the result is that of one"
        ] += 1
    return counts


if __name__ == "__main__":
    forking.run_as_command(__doc__, campaign, "--trials", 20)
