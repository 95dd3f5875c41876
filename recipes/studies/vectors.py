"""Compare smaller vectors of the same clips: recall of a search against bytes of a stored vector.

    python -m modeling_supclap.recipes.studies.vectors --output_dir outputs/reproduce

For each seed, two models are trained on generated scenes with the same settings: one with the loss of the whole
embeddings ("whole"), and one with nested widths ("nested", Matryoshka). The test clips of each are stored with each
width and precision that `supclap search index` offers, and searched with all test captions. Binary vectors are also
searched by the number of different bits alone, without rescoring. Finished runs, also those of `supclap reproduce
evidence/negatives`, are not repeated. The output is a table as JSON and Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_json, write_text
from modeling_supclap.evaluation.vectors import compress, score, shorten
from modeling_supclap.metrics.comparison import Cell, difference, summarize
from modeling_supclap.metrics.names import MetricName
from modeling_supclap.recipes.arguments import CONFIGS, parse_arguments, read_settings
from modeling_supclap.recipes.options import option
from modeling_supclap.recipes.result_tables import markdown_lines
from modeling_supclap.recipes.running import run_command, say
from modeling_supclap.recipes.runs import build_step, run_step
from modeling_supclap.recipes.studies.render import note_few_seeds

if TYPE_CHECKING:
    from modeling_supclap.evaluation.models import EmbeddingModel

CONFIG = "evidence/negatives_start.yaml"
"""Settings of both models. The whole ones are those from which the arms of `evidence/negatives` continue."""

WIDTHS = (64, 32, 16, 8)
FORMS = ("float32", "float16", "int8", "binary", "binary, not rescored")
TOPS = (1, 10)
SHARE = MetricName("share")


@dataclass
class VectorArguments:
    """Seeds and folders of the comparison."""

    seeds: list[int] = option("Seeds of the data and of both models.", [0, 1, 2, 3, 4])  # noqa: RUF009
    output_dir: str = option("Folder of the runs and of the table.", "outputs/reproduce")
    scale = "mini"
    data_dir = None
    allow_missing = False

    def __post_init__(self) -> None:
        if len(self.seeds) < 2:
            raise ValueError(f"seeds is {self.seeds}; an interval over seeds requires at least two")


def train(nested: bool, seed: int, args: VectorArguments) -> Path:
    """Train a model, unless its run is finished. Return its folder."""
    settings = {**read_settings(CONFIGS / CONFIG), "seed": seed}
    settings["dataset_config"] = {**settings["dataset_config"], "seed": seed}
    if nested:
        settings["matryoshka_widths"] = list(WIDTHS[1:])
    step = build_step("nested" if nested else "start", "train", settings, args)
    run_step(step)
    return step.folder


def embed_test(model: EmbeddingModel, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embed the test clips (N, d) and their captions (Q, d). Return also the clip of each caption, (Q,)."""
    from modeling_supclap.datasets_scripts import load_splits
    from modeling_supclap.evaluation.embed import embed_split

    settings = read_settings(CONFIGS / CONFIG)
    rows = load_splits(settings["dataset"], **{**settings["dataset_config"], "seed": seed})["test"]
    split = embed_split(model, rows)
    texts, clips = [], []
    for clip, row in enumerate(split.rows):
        texts += row["captions"]["eng"]
        clips += [clip] * len(row["captions"]["eng"])
    return np.asarray(split.clips.mean), np.asarray(model.encode_text(texts, "eng")), np.array(clips)


def find_own(stored: np.ndarray, query: np.ndarray, own: int, form: str, limit: int) -> float:
    """Return the probability that a clip is among the `limit` first results of a search, over the order of ties.

    Args:
        stored: Stored vectors, (N, size).
        query: Embedding of the stored width, (width,), unit norm.
        own: Index of the clip.
        form: Precision of `evaluation.vectors`, which also sets the candidates of binary vectors; or "binary, not
            rescored".
    """
    indices = np.arange(len(stored))
    if form == "binary, not rescored":
        scores = -np.unpackbits(stored ^ compress(query[None], "binary"), axis=1).sum(axis=1, dtype=np.int64)
    else:
        indices, scores = score(stored, query, form, limit)
    is_own = indices == own
    if not is_own.any():
        return 0.0
    own_score = scores[is_own][0]
    better, ties = (scores > own_score).sum(), (scores == own_score).sum()
    return float(np.clip((limit - better) / ties, 0, 1))


def compute_recalls(clips: np.ndarray, texts: np.ndarray, own: np.ndarray) -> dict[str, dict[str, float]]:
    """Compute the recall of each width and form, `{"WIDTH FORM": {"bytes": ..., "R@1": ..., "R@10": ...}}`."""
    found = {}
    for width in WIDTHS:
        queries = shorten(texts, width)
        for form in FORMS:
            stored = compress(clips, form.partition(",")[0], width)
            line: dict[str, float] = {"bytes": stored.nbytes / len(stored)}
            for limit in TOPS:
                hits = []
                for query, clip in zip(queries, own.tolist(), strict=True):
                    hits.append(find_own(stored, query, clip, form, limit))
                line[f"R@{limit}"] = float(np.mean(hits))
            found[f"{width} {form}"] = line
    return found


def render_vectors(content: Mapping[str, Any]) -> str:
    """Return the Markdown of the comparison: one line per width and form, with differences paired by seed."""
    heading = ["width", "vector", "bytes"]
    for top in TOPS:
        for model in ("whole", "nested"):
            heading.append(f"R@{top}, {model}")
    heading.append("R@1, nested - whole")
    table = [heading]
    first = f"{WIDTHS[0]} {FORMS[0]}"
    for name, line in content["models"]["whole"].items():
        width, _, form = name.partition(" ")
        cells = [width, form, f"{line['bytes'][0]:g}"]
        for top in TOPS:
            for of_model in content["models"].values():
                values = of_model[name][f"R@{top}"]
                change = difference(values, of_model[first][f"R@{top}"])
                cells.append(_format(replace(summarize(values, is_share=True), std=None)))
                if name != first:
                    cells[-1] += f"; {_format(change, signed=True)}"
        pair = [of_model[name]["R@1"] for of_model in content["models"].values()]
        cells.append(_format(difference(pair[1], pair[0]), signed=True))
        table.append(cells)
    seeds, widths = (", ".join(map(str, values)) for values in (content["seeds"], WIDTHS[::-1]))
    captions = f"{min(content['captions']):,} to {max(content['captions']):,}"
    lines = [
        f"### vectors: {content['title']}",
        "\n".join(markdown_lines(table)),
        f"Text to audio, in percent: mean and 95 % t-interval over the seeds {seeds}, and the difference to the first "
        "line of the same model, paired by seed. Each seed has its own "
        f"{content['clips']} test clips and {captions} captions. Whole: trained with the loss of the whole embeddings; "
        f"nested: with the widths {widths}.{note_few_seeds(len(content['seeds']))}",
    ]
    return "\n\n".join(lines) + "\n"


def _format(cell: Cell, signed: bool = False) -> str:
    return cell.format(SHARE, signed)


def main() -> None:
    """Train the models, search, and write the table."""
    (args,) = parse_arguments((VectorArguments,), about=__doc__)

    from modeling_supclap.evaluation.models import load_embedding_model

    by_model: dict[str, list[Mapping[str, Mapping[str, float]]]] = {"whole": [], "nested": []}
    sizes: list[tuple[int, int]] = []
    for seed in args.seeds:
        for name, lines in by_model.items():
            folder = train(name == "nested", seed, args)
            clips, texts, own = embed_test(load_embedding_model(str(folder), device="cpu"), seed)
            lines.append(compute_recalls(clips, texts, own))
            sizes.append((len(clips), len(texts)))
            say(f"seed {seed}, {name}: R@1 {lines[-1][f'{WIDTHS[0]} {FORMS[0]}']['R@1']:.3f} of whole float32 vectors")
    content: dict[str, Any] = {"title": "Recall and bytes of smaller vectors", "seeds": args.seeds}
    content |= {"clips": sizes[0][0], "captions": [size[1] for size in sizes[::2]]}
    content["models"] = {name: collect(lines) for name, lines in by_model.items()}
    stem = Path(args.output_dir, args.scale, "vectors")
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_json(stem.with_suffix(".json"), content)
    write_text(stem.with_suffix(".md"), render_vectors(content))
    say(f"\n{render_vectors(content)}\n{stem.with_suffix('.md')}, also as .json")


def collect(of_seeds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Collect the values of all seeds in lists."""
    collected: dict[str, dict[str, list[float]]] = {}
    for name, line in of_seeds[0].items():
        collected[name] = {key: [of_seed[name][key] for of_seed in of_seeds] for key in line}
    return collected


if __name__ == "__main__":
    run_command(main)
