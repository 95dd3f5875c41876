"""Tables of several models with several seeds, from results in memory or in folders.

`load_results` groups saved results by model and seed. `table` computes means, deviations and paired differences, and
writes them in each format.
"""

from __future__ import annotations

import glob
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tables as writer
from .comparison import COMPARISON_CAPTION, comparison_tables, tabulate
from .results import Results, get_dataset_name

if TYPE_CHECKING:
    import pandas

    Models = Mapping[str, Mapping[Any, Results]]  # results by model name, and by seed or (fold, seed)

_VARYING = {"seed", "data_seed", "output_dir", "run_name", "resume_from_checkpoint"}
_SEED = re.compile(r"[-_./]?seed[-_=]?(\d+)")


@dataclass(frozen=True)
class ScoreTable:
    """Scores of several models, with their differences to the first model.

    Attributes:
        records: One dict per dataset, model and score, with "dataset" and the keys of `comparison.tabulate`.
        tables: One table per dataset, task and language, with one row for each model.
    """

    records: list[dict[str, Any]]
    tables: list[writer.Table]

    def to_frame(self) -> pandas.DataFrame:
        """Return `records` as a data frame, with all digits."""
        import pandas

        return pandas.DataFrame(self.records)

    def to_latex(self) -> str:
        """Format the tables for LaTeX, with the rules of booktabs."""
        return writer.to_latex(self.tables)

    def to_markdown(self) -> str:
        """Format the tables as Markdown."""
        return writer.to_markdown(self.tables)

    def save(self, folder: str | Path) -> str:
        """Write `table.md`, `table.html`, `table.csv` and `table.tex`, and return the Markdown."""
        stem = Path(folder, "table")
        return writer.write_tables(stem, "Comparison", self.tables, self.records, COMPARISON_CAPTION)

    def __str__(self) -> str:
        return "\n\n".join(f"{table.title}\n{table.to_text()}\n{table.caption}" for table in self.tables)

    def _repr_html_(self) -> str:
        """Show the tables in notebooks."""
        return f"<pre>{escape(str(self))}</pre>"


def table(models: Mapping[str, Results | Sequence[Results]], allow_different: bool = False) -> ScoreTable:
    """Compare models by mean, standard deviation and paired difference to the first model, with intervals.

    Args:
        models: `{model name: results}`, with a list of results for several seeds. Results with equal `Results.seed` are
            paired, or without seeds those at the same place of two lists. Each dataset has its own tables.
        allow_different: Whether to only warn if results of one dataset have different protocols.

    Raises:
        ValueError: There are no results, or the protocols differ.
    """
    datasets: dict[str, dict[str, dict[Any, Results]]] = {}
    for name, of_model in models.items():
        for results in [of_model] if isinstance(of_model, Results) else of_model:
            runs = datasets.setdefault(get_dataset_name(results.protocol), {}).setdefault(name, {})
            runs[len(runs) if results.seed is None else results.seed] = results
    return tabulate_datasets(datasets, allow_different)


def tabulate_datasets(datasets: Mapping[str, Models], allow_different: bool = False) -> ScoreTable:
    """Compare the models on each dataset, `{dataset: {model name: {seed: results}}}`, as `table` does."""
    records, written = [], []
    for dataset, models in datasets.items():
        of_dataset = tabulate(models, allow_different)
        written += comparison_tables(dataset, of_dataset)
        records += [{"dataset": dataset, **record} for record in of_dataset]
    if not records:
        raise ValueError("there are no scores to compare; pass {model name: [results, ...]}")
    return ScoreTable(records, written)


def load_results(*patterns: str | Path) -> dict[str, list[Results]]:
    """Load saved results as `{model name: [results, ...]}`. Runs that differ only in their seed are one model.

    The name of a training run, and of any folder with a seed in its name (SVR-seed0, SVR/seed0), is that of the folder
    without the seed. Other results have the name of their model. Folders without results are skipped with a warning.

    Args:
        *patterns: Folders of results, or patterns such as "results/*-seed*".

    Raises:
        FileNotFoundError: There is no folder for a pattern.
    """
    runs: dict[tuple[str, str], dict[int, Results]] = {}  # by dataset and model
    names: dict[str, str] = {}
    for folder in _find_folders(patterns):
        results = Results.load(folder)
        dataset = get_dataset_name(results.protocol)
        arguments = (results.content.get("training") or {}).get("arguments", {})
        path = Path(folder)
        name = f"{path.parent.name}/{path.name}" if _SEED.fullmatch(path.name) else path.name
        if not arguments and not _SEED.search(name):
            name = Path(results.content["model"]["name"]).name
        seed = arguments.get("seed", int((_SEED.findall(name) or [0])[-1]))
        name = _SEED.sub("", name)

        # Names of starting models that differ only in their seed count as equal settings.
        settings = {key: value for key, value in arguments.items() if key not in _VARYING}
        data = [results.protocol.get("dataset_config"), results.content.get("data")] if settings else []
        key = _SEED.sub("", json.dumps([dataset, settings or name, data], sort_keys=True))
        label = names.setdefault(key, folder if (dataset, name) in runs else name)
        label = folder if seed in runs.get((dataset, label), {}) else label
        runs.setdefault((dataset, label), {})[seed] = replace(results, seed=seed)

    models: dict[str, list[Results]] = {}
    for (_, label), of_model in runs.items():
        models.setdefault(label, []).extend(of_model.values())
    return models


def _find_folders(patterns: Iterable[str | Path]) -> Iterator[str]:
    """Yield the folders with results that match the patterns, sorted for each pattern."""
    for pattern in map(str, patterns):
        folders = [pattern] if os.path.isdir(pattern) else sorted(filter(os.path.isdir, glob.glob(pattern)))
        if not folders:
            raise FileNotFoundError(f"there is no folder {pattern}; pass the folders of results, or a pattern")
        for folder in folders:
            if Path(folder, "results.json").is_file():
                yield folder
            else:
                warnings.warn(f"{folder} contains no results.json and is skipped", stacklevel=3)
