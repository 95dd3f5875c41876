"""Change single expressions of the sources (mutmut), and count the changes that no test notices.

    python tests/campaigns/mutants.py --sample 30     # of each group of modules
    mutmut show NAME                                  # the change with this name, as a diff

mutmut runs the tests of `[tool.mutmut]` in pyproject.toml that call the changed function, on a copy of the project in
the folder `mutants/`. A mutant survives if they all pass. Tests that start processes are left out.
"""

import argparse
import json
import random
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from fnmatch import fnmatch
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name

CONFIG = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]


def find_mutants() -> dict[str, list[str]]:
    """Return `{pattern of modules: names of their mutants}`."""
    groups: dict[str, list[str]] = defaultdict(list)
    for folder in CONFIG["source_paths"]:
        for path in sorted(Path(folder).rglob("*.py")):
            if any(fnmatch(str(path), pattern) for pattern in CONFIG["do_not_mutate"]):
                continue
            for group in CONFIG["only_mutate"]:
                if fnmatch(str(path), group):
                    mutated = mutate_file_contents(str(path), path.read_text(encoding="utf-8"))
                    groups[group] += [get_mutant_name(path, name) for name in mutated.mutant_names]
    return groups


def read_statuses() -> dict[str, str]:
    """Return `{name of a mutant: "killed", "survived", "timeout", "no tests" ...}`."""
    statuses = {}
    for path in Path("mutants").rglob("*.meta"):
        for name, exit_code in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items():
            statuses[name] = status_by_exit_code[exit_code]
    return statuses


def main() -> None:
    """Run a sample of the mutants, and print a table and the names of those that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=30, help="mutants of each group of modules; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--only", default="", help="groups whose pattern contains this text")
    args = parser.parse_args()

    groups = {group: names for group, names in find_mutants().items() if args.only in group}
    draw, samples = random.Random(args.seed), {}
    for group, names in groups.items():
        samples[group] = names if not args.sample else draw.sample(names, min(args.sample, len(names)))
    chosen = [name for names in samples.values() for name in names]
    subprocess.run([Path(sys.executable).parent / "mutmut", "run", "--max-children", "1", *chosen], check=True)

    statuses = read_statuses()
    print("| modules | mutants | sample | killed | timeout | not called | survived |\n|---|---|---|---|---|---|---|")
    for group, sample in samples.items():
        counts = Counter(statuses[name] for name in sample)
        numbers = [len(groups[group]), len(sample), counts["killed"], counts["timeout"]]
        numbers += [counts["no tests"], counts["survived"] + counts["suspicious"]]
        print(f"| {group} | " + " | ".join(map(str, numbers)) + " |")
    for name in chosen:
        if statuses[name] not in ("killed", "timeout"):
            print(f"{statuses[name]}: {name}")


if __name__ == "__main__":
    main()
