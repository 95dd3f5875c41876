"""Find hard negatives: for each training clip, the wrong captions that a model confuses with its own.

    supclap mine --model outputs/esc10 --dataset esc50 --data_dir ESC-10 --output negatives.parquet
    supclap train esc10.yaml --data_dir ESC-10 --negatives negatives.parquet --negatives_per_clip 2

The candidates of a clip are the captions of all other clips, each text once. Captions of the clip are left out, and so
are all captions of clips that share a caption with it. `--margin` leaves out candidates that are nearly as similar as
the own caption, because they are probably right; `--first_rank` leaves out the most similar ones. `--near audio`
compares captions with the recording, and `--near text` with the own captions. The table has the columns `clip_id`,
`language`, `text` and `similarity`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.command import run_command, say
from modeling_supclap.recipes.evaluate_supclap import join
from modeling_supclap.recipes.options import MiningArguments

if TYPE_CHECKING:
    import numpy as np

BLOCK_ROWS = 512
"""Clips whose similarities to all candidates are in memory at a time."""


class Captions:
    """Distinct captions of a split in one language, and the captions that are not wrong for a clip."""

    def __init__(self, captions: Sequence[Sequence[str]]) -> None:
        index_of: dict[str, int] = {}
        self.texts: list[str] = []
        self.of_clip: list[list[int]] = []  # indices of the own texts of each clip
        self._clips: defaultdict[int, list[int]] = defaultdict(list)  # clips of each text
        for clip, own in enumerate(captions):
            indices = []
            for text in own:
                index = index_of.setdefault(" ".join(text.casefold().split()), len(index_of))
                if index == len(self.texts):
                    self.texts.append(text)
                self._clips[index].append(clip)
                indices.append(index)
            self.of_clip.append(indices)

    def right(self, clip: int) -> set[int]:
        """Return the texts of a clip, and of all clips that share a text with it."""
        sharing = chain.from_iterable(self._clips[index] for index in self.of_clip[clip])
        return set(chain.from_iterable(self.of_clip[other] for other in sharing))


def mine(
    captions: Captions,
    text_embeds: np.ndarray,
    audio_embeds: np.ndarray | None = None,
    count: int = 8,
    first_rank: int = 1,
    margin: float = 0.0,
) -> Iterator[list[tuple[int, float]]]:
    """Yield the hardest wrong texts of each clip, as (index of the text, similarity), most similar first.

    Args:
        text_embeds: Embeddings of `captions.texts`, (C, d), unit norm.
        audio_embeds: Embeddings of the clips, (N, d), unit norm. None: a candidate is compared with the own texts.
        count: Maximum number of texts of a clip.
        first_rank: Rank of the first text to return, 1 for the most similar one.
        margin: Minimum distance below the similarity of the own text; with own texts as anchors, below 1. A negative
            margin keeps texts that are more similar than the own one.
    """
    import numpy as np

    for start in range(0, len(captions.of_clip), BLOCK_ROWS):
        clips = range(start, min(start + BLOCK_ROWS, len(captions.of_clip)))
        if audio_embeds is not None:
            block = audio_embeds[clips.start : clips.stop] @ text_embeds.T  # (n, C)
        for row, clip in enumerate(clips):
            own = captions.of_clip[clip]
            if not own:
                yield []
                continue
            scores = (text_embeds[own] @ text_embeds.T).max(axis=0) if audio_embeds is None else block[row]
            limit = (1.0 if audio_embeds is None else scores[own].max()) - margin
            is_wrong = scores <= limit
            is_wrong[list(captions.right(clip))] = False
            wrong = np.flatnonzero(is_wrong)
            best = wrong[np.argsort(-scores[wrong], kind="stable")][first_rank - 1 :][:count]
            yield [(int(index), float(scores[index])) for index in best]


def mine_split(model: Any, rows: Any, args: MiningArguments) -> list[dict[str, Any]]:
    """Return the rows of the table of negatives of a split."""
    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.evaluation.embed import embed_split

    light, audio = list(without_audio(rows)), None
    if args.near == "audio":
        split = embed_split(model, rows, on_bad_audio="skip", batch_size=args.batch_size)
        light, audio = split.rows, split.clips.mean
    table = []
    for language in args.languages:
        captions = Captions([row["captions"].get(language) or () for row in light])
        if not captions.texts:
            raise ValueError(f"the {args.split} split has no captions in {language!r}; choose other --languages")
        texts = model.encode_text(captions.texts, language, args.batch_size)
        found = mine(captions, texts, audio, args.count, args.first_rank, args.margin)
        for row, of_clip in zip(light, found, strict=True):
            entry = {"clip_id": row["clip_id"], "language": language}
            for index, similarity in of_clip:
                table.append({**entry, "text": captions.texts[index], "similarity": similarity})
    return table


def main() -> None:
    """Run the command: embed the split, and write the table."""
    (args,) = parse_arguments((MiningArguments,), about=__doc__)

    from modeling_supclap.datasets_scripts.negatives import write_negatives
    from modeling_supclap.evaluation.models import load_embedding_model

    rows = join(args.load_splits(), args.split)
    model = load_embedding_model(args.model, device=args.device, trust_remote_code=args.trust_remote_code)
    table = mine_split(model, rows, args)
    if not table:
        raise ValueError(
            "no caption is wrong for a clip; lower --margin or --first_rank, or use data with more captions"
        )
    write_negatives(args.output, table)
    clips = len({row["clip_id"] for row in table})
    say(f"{args.output} contains {len(table)} negatives of {clips} of {len(rows)} clips")
    if clips < len(rows):
        say(f"{len(rows) - clips} clips have none; they train without negatives")


if __name__ == "__main__":
    run_command(main)
