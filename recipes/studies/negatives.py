"""Write the negatives of an arm of a study: mined captions, or the captions of a control.

The kinds have equally many captions for each clip:

- `mined`: The output of `supclap mine` with the model from which the arm continues.
- `random`: Random captions among those that `supclap mine` may choose, which are wrong by the same rule.
- `exchanged`: The caption of the clip with one sound replaced by a sound that the clip does not have. Only for
  generated scenes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.command import say
from modeling_supclap.recipes.mine_negatives import Captions, mine_split
from modeling_supclap.recipes.options import MiningArguments, option
from modeling_supclap.recipes.sweep import RECIPES, Recipe

if TYPE_CHECKING:
    import numpy as np

KINDS = ("mined", "random", "exchanged")
NEGATIVES_TABLE = "negatives.parquet"
"""Output of a step of this recipe, which has no results."""


@dataclass
class NegativesArguments(MiningArguments):
    """Options of `supclap mine`, and the kind of negatives."""

    kind: str = option(f"Kind of negatives: {', '.join(KINDS)}.", "mined")
    seed: int = option("Seed of the random kinds.", 0)
    output_dir: str = option("Folder of the table.", "outputs/negatives")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}")


def check(splits: Mapping[str, Any], args: NegativesArguments) -> Any:
    """Return the rows that get negatives."""
    return splits[args.split]


def draw_random(rows: Sequence[Mapping[str, Any]], count: int, rng: np.random.Generator) -> list[list[str]]:
    """Draw up to `count` random wrong English captions for each clip, from the candidates of `supclap mine`."""
    captions = Captions([row["captions"]["eng"] for row in rows])
    drawn = []
    for clip in range(len(rows)):
        wrong = sorted(set(range(len(captions.texts))) - captions.right(clip))
        chosen = rng.permutation(len(wrong))[:count]
        drawn.append([captions.texts[wrong[index]] for index in chosen])
    return drawn


def exchange_sounds(rows: Sequence[Mapping[str, Any]], count: int, rng: np.random.Generator) -> list[list[str]]:
    """Return the first English caption of each clip with one sound exchanged, in up to `count` random ways.

    The new sound is none of the clip's `labels`, so that the caption is wrong.
    """
    from modeling_supclap.datasets_scripts.builders.captions import capitalize, label_phrases

    phrases = {label: by_language["eng"] for label, by_language in label_phrases("synthetic").items()}
    drawn = []
    for row in rows:
        caption = row["captions"]["eng"][0]
        found = []
        for label in row["labels"]:
            before, phrase, after = caption.casefold().partition(phrases[label].casefold())
            if not phrase:
                raise ValueError(f"{caption!r} does not contain {phrases[label]!r}; use generated scenes")
            start, stop = caption[: len(before)], caption[len(caption) - len(after) :]
            for other in phrases.keys() - set(row["labels"]):
                found.append(capitalize(start + phrases[other] + stop))
        found.sort()
        drawn.append([found[index] for index in rng.permutation(len(found))[:count]])
    return drawn


def count_same_sounds(rows: Sequence[Mapping[str, Any]], table: Sequence[Mapping[str, Any]]) -> int:
    """Count the negatives that are captions of another clip with the same set of labels."""
    labels_of_text: dict[str, set[tuple[str, ...]]] = {}
    labels_of_clip = {}
    for row in rows:
        labels_of_clip[row["clip_id"]] = tuple(sorted(row["labels"]))
        for text in row["captions"]["eng"]:
            labels_of_text.setdefault(text, set()).add(labels_of_clip[row["clip_id"]])
    return sum(labels_of_clip[entry["clip_id"]] in labels_of_text.get(entry["text"], ()) for entry in table)


def make_table(args: NegativesArguments, rows: Any, light: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table of negatives. `light` is the rows without audio."""
    import numpy as np

    from modeling_supclap.evaluation.models import load_embedding_model

    if args.kind == "mined":
        return mine_split(load_embedding_model(args.model, device=args.device), rows, args)
    draw = draw_random if args.kind == "random" else exchange_sounds
    table = []
    drawn = draw(light, args.count, np.random.default_rng(args.seed))
    for row, texts in zip(light, drawn, strict=True):
        for text in texts:
            table.append({"clip_id": row["clip_id"], "language": "eng", "text": text, "similarity": None})
    return table


def run(args: NegativesArguments) -> None:
    """Write the table, and print the number of negatives from clips with the same sounds."""
    from modeling_supclap.datasets_scripts.negatives import write_negatives
    from modeling_supclap.datasets_scripts.schema import without_audio

    rows = args.load_splits()[args.split]
    light = list(without_audio(rows))
    table = make_table(args, rows, light)
    path = Path(args.output_dir, NEGATIVES_TABLE)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_negatives(path, table)
    clips = len({entry["clip_id"] for entry in table})
    say(
        f"{path}: {len(table)} {args.kind} negatives of {clips} of {len(rows)} clips; "
        f"{count_same_sounds(light, table)} describe another clip with the same sounds"
    )


RECIPES["negatives"] = Recipe(run, (NegativesArguments,), check, NEGATIVES_TABLE, has_results=False)
