"""Trains one small model with several objectives side by side: drift between runs, radius, retrieval, rank variance.

    python benchmarks/compare_objectives.py --objectives infonce bi_static bi_dynamic --seeds 0 1 2 --output a.json
    python benchmarks/compare_objectives.py --objectives random cacl kcl --languages 8 --steps 200 --output b.json

The spectrograms of generated sounds are made once and kept in memory, so that a run takes 20 seconds of one core where
`supclap reproduce` takes a minute: for questions that want many runs. Everything else is the package's: model,
objectives, drift. All objectives of a seed start from the same weights and see the same batches.

`--encoders linear` trains two linear maps on vectors instead, in a second a run: clip and caption are two noisy views
of one hidden vector, and each language has a view of its own. It tells objectives apart, and nothing about sound.

`--output` gets the table that `make results-page` puts into docs/results.md, and beside it its curves as PNG.

Of the texts, the drift cosine is measured against the pull in the tangent space (`drift.drift_cosine`), for the update
by the text-to-audio half of the objective, as in figure 1 of the SupCLAP paper, and for the update by all of it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import set_seed

from modeling_supclap import SupCLAPProcessor
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.schema import LANGUAGES, group_id
from modeling_supclap.evaluation import package_versions
from modeling_supclap.losses import reweighted_info_nce
from modeling_supclap.losses.contrastive import softmax_contrast
from modeling_supclap.losses.multilingual import data_distribution_error, language_distribution_error
from modeling_supclap.losses.support_vector import DynamicRadius, StaticRadius
from modeling_supclap.metrics.mrv.rank_variance import mean_rank_variance
from modeling_supclap.metrics.recall import best_ranks
from modeling_supclap.recipes.reproduce import get_logged, summarise
from modeling_supclap.recipes.train_supclap import ModelArguments, build_model, build_processor
from modeling_supclap.training.drift import drift_cosine, drift_statistics
from modeling_supclap.training.objectives import ContrastiveObjective, SupportVectorRegularizer
from modeling_supclap.training.plots import plot_runs

MODEL = ModelArguments(
    audio_config={"embed_dim": 64, "depth": 2, "num_heads": 2, "initializer_range": 0.1},
    text_config={
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "initializer_range": 0.08,
    },
    projection_dim=64,
)  # fmt: skip


class Split(NamedTuple):
    """The clips of a split: features (N, ...), token ids (N, C, K, L) of C captions in K languages, groups (N,)."""

    features: Tensor
    tokens: Tensor
    groups: Tensor


class LinearModel(torch.nn.Module):
    """Two linear maps into one space, with the methods of a model that are called here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.audio, self.text = torch.nn.Linear(width, 32), torch.nn.Linear(width, 32)
        self.logit_scale = torch.nn.Parameter(torch.tensor(1 / 0.07).log())

    def get_audio_features(self, input_features: Tensor) -> Any:
        """Embeds clips (N, D)."""
        return SimpleNamespace(pooler_output=F.normalize(self.audio(input_features), dim=-1))

    def get_text_features(self, input_ids: Tensor) -> Any:
        """Embeds captions (N, D)."""
        return SimpleNamespace(pooler_output=F.normalize(self.text(input_ids), dim=-1))


def draw_views(clips: int, tests: int, languages: int, apart: float, seed: int) -> dict[str, Split]:
    """Draws clips and captions as linear views, 64 numbers wide, of hidden vectors, with noise of half their size.

    Args:
        clips: How many to train on.
        tests: How many to test on.
        languages: How many views the captions have.
        apart: How large a language's own part of its view is, beside the part of size 1 that all share.
        seed: The seed of the draw.
    """
    draw = torch.Generator().manual_seed(seed)
    audio, shared = torch.randn(32, 64, generator=draw), torch.randn(32, 64, generator=draw)
    text = shared + apart * torch.randn(languages, 32, 64, generator=draw)
    splits = {}
    for name, count in (("train", clips), ("test", tests)):
        hidden = torch.randn(count, 32, generator=draw) / 32**0.5
        features = hidden @ audio + 0.5 * torch.randn(count, 64, generator=draw)
        captions = torch.einsum("nh,khw->nkw", hidden, text)  # (N, K, D)
        captions = captions + 0.5 * torch.randn(captions.shape, generator=draw)
        splits[name] = Split(features, captions.unsqueeze(1), torch.arange(count))
    return splits


def embed_texts(model: Any, ids: Tensor, pad: int | None) -> Tensor:
    """Embeds captions (N, L), tokens without the padding that all of them share or, where `pad` is None, vectors."""
    if pad is None:
        return model.get_text_features(input_ids=ids).pooler_output
    mask = ids != pad
    mask = mask[:, : int(mask.sum(dim=1).max())]
    return model.get_text_features(input_ids=ids[:, : mask.shape[1]], attention_mask=mask.long()).pooler_output


class OtherReading(ContrastiveObjective):
    """The readings of SupCLAP E.4 that `--loss reweighted` does not take, by what a learnable w does.

    InfoNCE moves text i by s ((1 - P+) a+ - sum P_j a_j), and `--loss reweighted` multiplies the first term by w. In
    "probability" that term becomes (1 - w P+) a+, the most literal reading. In "softmax" exp(s+) counts w times, in
    "denominator" it does so below the fraction alone: both change the size of the two terms alike.
    """

    def __init__(self, reading: str) -> None:
        super().__init__()
        self.reading = reading
        self.log_positive_weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, audio_embeds: Tensor, text_embeds: Tensor, logit_scale: Tensor, *rest: Any) -> Any:
        """Computes InfoNCE with a weight, of the gradient that the docstring names."""
        weight = self.log_positive_weight.exp().squeeze()
        weighed = reweighted_info_nce(audio_embeds, text_embeds[:, 0], logit_scale, weight, None, "softmax")
        if self.reading == "softmax":
            return weighed, {}
        if self.reading == "denominator":
            return weighed + 2 * weight.log(), {}

        logits = logit_scale * text_embeds[:, 0] @ audio_embeds.T
        total = logits.new_zeros(())
        for scores in (logits, logits.T):
            share = scores.softmax(dim=-1).diagonal().detach()  # P+
            total = total + softmax_contrast(scores) + (weight - 1) * (share * scores.diagonal()).mean()
        return total, {}


def svr(reach: str, kind: str, start: float | None = None, **options: Any) -> Callable[[], ContrastiveObjective]:
    """An InfoNCE with support vectors, whose radius starts at a number or, by default, at the measured distance."""

    def make() -> ContrastiveObjective:
        radii: dict[str, torch.nn.Module] = {}
        for direction in ("t2a", "a2t") if reach == "bi" else ("t2a",):
            init = math.nan if start is None else start
            radii[direction] = StaticRadius(init) if kind == "static" else DynamicRadius(48, init=init)
        return ContrastiveObjective("infonce", SupportVectorRegularizer(radii, **options))

    return make


OBJECTIVES: dict[str, Callable[[], ContrastiveObjective]] = {
    "infonce": ContrastiveObjective,
    "bi_static_from_0.1": svr("bi", "static", 0.1),
    "bi_static": svr("bi", "static"),
    "bi_dynamic_from_0.1": svr("bi", "dynamic", 0.1),
    "bi_dynamic": svr("bi", "dynamic"),
    "bi_dynamic_dot_from_0.1": svr("bi", "dynamic", 0.1, similarity="dot"),
    "bi_dynamic_dot": svr("bi", "dynamic", similarity="dot"),
    "bi_dynamic_dot_beta1": svr("bi", "dynamic", similarity="dot", beta=1.0),
    "uni_static": svr("uni", "static"),
    "uni_dynamic": svr("uni", "dynamic"),
    "uni_dynamic_dot": svr("uni", "dynamic", similarity="dot"),
    "bi_dynamic_alpha0.3": svr("bi", "dynamic", alpha=0.3),
    "reweighted": lambda: ContrastiveObjective("reweighted"),
    "reweighted_softmax": lambda: OtherReading("softmax"),
    "reweighted_denominator": lambda: OtherReading("denominator"),
    "reweighted_probability": lambda: OtherReading("probability"),
    "random": ContrastiveObjective,
    "cacl": lambda: ContrastiveObjective("cacl"),
    "kcl": lambda: ContrastiveObjective("kcl"),
}
SCORES = ("t2a R@1", "a2t R@1", "MRV", "language error", "data distribution error")
LOGGED = (
    "drift mean", "drift_all mean", "distance last", "radius first", "radius last", "gradient mean",
    "d_log_positive_weight mean", "log_positive_weight last",
)  # fmt: skip
"""What is kept of the log: a name and which of its values."""
CURVES = {"drift": "drift cosine, text-to-audio half", "distance": "distance of the pairs", "radius": "radius"}


def prepare(rows: Any, processor: SupCLAPProcessor, languages: list[str], length: int) -> Split:
    """Reads a split into memory."""
    rate_hz = processor.feature_extractor.sampling_rate
    features, groups = [], []
    texts: list[str] = []
    for row in rows:
        inputs = processor(audio=[read_row(row, rate_hz)], sampling_rate=rate_hz, return_tensors="pt")
        features.append(inputs["input_features"][0])
        groups.append(group_id(row, "captions"))
        for captions in zip(*(row["captions"][language] for language in languages), strict=True):
            texts.extend(captions)

    tokens = processor.tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids = tokens["input_ids"].reshape(len(rows), -1, len(languages), length)  # (N C K, L) -> (N, C, K, L)
    return Split(torch.stack(features), ids, torch.tensor(groups))


def measure(objective: ContrastiveObjective, audio: Tensor, text: Tensor, scale: Tensor) -> dict[str, float]:
    """The drift of one step, from its embeddings and the gradient with respect to the texts (N, d)."""
    gradient = text.grad
    assert gradient is not None
    audio, text = audio.detach(), text.detach()
    regularizer, options = objective.regularizer, {}
    if regularizer is not None:
        radius = regularizer.radii["t2a"](scale * text @ audio.T).detach()
        options = {"radius": radius, "alpha": regularizer.alpha, "similarity": regularizer.similarity}
    found = drift_statistics(audio, text, scale, **options)

    told = {"drift": found.get("drift_cosine_svr", found["drift_cosine"]), "distance": found["distance"]}
    told["drift_all"] = drift_cosine(-gradient, text, audio)
    if "radius_mean" in found:
        told["radius"] = found["radius_mean"]
    return {name: value.item() for name, value in told.items()}


def train(name: str, seed: int, splits: Mapping[str, Split], processor: Any, args: argparse.Namespace) -> dict:
    """Trains a model from the seed's weights and measures it."""
    set_seed(seed)
    rows = splits["train"]
    model: Any = LinearModel(rows.features.shape[-1])
    if processor is not None:
        model = build_model(MODEL, processor)
        model.audio_model.fit_normalisation(input_features=rows.features[:256])
    objective = OBJECTIVES[name]()
    optimizer = torch.optim.Adam([*model.parameters(), *objective.parameters()], lr=args.lr)
    generator = np.random.default_rng(seed)
    pad = None if processor is None else processor.tokenizer.pad_token_id
    languages = rows.tokens.shape[2]

    log: list[dict[str, float]] = []
    started = time.process_time()
    for step in range(args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * min(1, 10 * step / args.steps) * (1 - step / args.steps)

        # Clips of different descriptions: as in the papers, no clip of a batch fits the caption of another.
        shuffled = generator.permutation(len(rows.groups))
        _, first = np.unique(rows.groups.numpy()[shuffled], return_index=True)
        places = generator.permutation(shuffled[first])[: args.batch_size].tolist()
        captions = generator.integers(rows.tokens.shape[1], size=len(places))
        drawn = generator.integers(languages, size=len(places))

        # (B, L) in one language, (B, 2, L) for cacl, (B, K, L) for kcl
        tokens = rows.tokens[places, captions]  # (B, K, L)
        if name == "cacl":
            others = 1 + drawn % (languages - 1)
            tokens = torch.stack([tokens[:, 0], tokens[range(len(places)), others]], dim=1)
            trained = F.one_hot(torch.tensor(others), languages).bool()
            trained[:, 0] = True
        elif name == "kcl":
            trained = torch.ones(len(places), languages, dtype=torch.bool)
        else:
            trained = F.one_hot(torch.tensor(drawn), languages).bool()
            tokens = tokens[range(len(places)), drawn].unsqueeze(1)

        # (B, K, L) -> (B K, d) -> (B, K, d)
        audio = model.get_audio_features(input_features=rows.features[places]).pooler_output
        text = embed_texts(model, tokens.flatten(0, 1), pad)
        text.retain_grad()

        scale = model.logit_scale.exp()
        loss, _ = objective(audio, text.unflatten(0, tokens.shape[:2]), scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            entry = {"step": step, "loss": loss.item()}
            if tokens.shape[1] == 1 and "random" not in name:
                entry |= measure(objective, audio, text, scale.detach())
                assert text.grad is not None
                entry["gradient"] = float(text.grad.norm(dim=-1).mean() * len(places))
            weight = getattr(objective, "log_positive_weight", None)
            if weight is not None:
                entry |= {"log_positive_weight": weight.item(), "d_log_positive_weight": weight.grad.item()}
            log.append(entry)

    seconds = time.process_time() - started
    scores = evaluate(model, splits["test"], pad, trained)
    return {"objective": name, "seed": seed, "cpu_seconds": round(seconds, 1), **scores, "log": log}


@torch.no_grad()
def evaluate(model: Any, rows: Split, pad: int | None, trained: Tensor) -> dict[str, float]:
    """Retrieval in the first language, and over all of them the rank variance and the data distribution error."""
    model.eval()
    audio = torch.cat([model.get_audio_features(input_features=part).pooler_output for part in rows.features.split(64)])
    same = rows.groups.unsqueeze(0) == rows.groups.unsqueeze(1)
    relevant = [np.flatnonzero(row).tolist() for row in same.numpy()]
    ranks, texts = [], []
    scores: dict[str, float] = {}
    for language in range(rows.tokens.shape[2]):
        parts = [embed_texts(model, ids, pad) for ids in rows.tokens[:, 0, language].split(64)]
        texts.append(torch.cat(parts))

        similarity = (texts[-1] @ audio.T).numpy()  # (N, N)
        ranks.append(best_ranks(similarity, relevant))
        if language == 0:
            scores["t2a R@1"] = float((ranks[0] == 0).mean())
            scores["a2t R@1"] = float((best_ranks(similarity.T, relevant) == 0).mean())

    if len(ranks) > 1:
        scores["MRV"] = mean_rank_variance(np.stack(ranks, axis=1))
        count = len(trained)
        clips = torch.stack(texts, dim=1)[:count]  # (N, K, d)
        scale = model.logit_scale.exp()
        scores["data distribution error"] = data_distribution_error(audio[:count], clips, scale, trained).item()
        scores["language error"] = language_distribution_error(trained).item()
    return scores


def tabulate(runs: list[dict]) -> list[dict[str, Any]]:
    """The rows of a table of `recipes/result_tables.py`, the first objective the baseline of the others."""
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(run["objective"] for run in runs):
        own = [run for run in runs if run["objective"] == name]
        scores = {}
        for column in (*SCORES, *LOGGED):
            values: list[Any] = [run.get(column) for run in own]
            if column in LOGGED:
                values = [get_logged(run["log"], *column.split()) for run in own]
            if None in values:
                continue

            scores[column] = {**summarise(values), "paper": None}
            if rows and column in rows[0]["scores"]:  # the seeds that both have
                pairs = zip(values, rows[0]["scores"][column]["values"], strict=False)
                scores[column]["differences"] = [value - other for value, other in pairs]

        about = {"row": name, "model": name.replace("_", " "), "dataset": "synthetic"}
        baseline = rows[0]["row"] if rows else None
        rows.append({**about, "baseline": baseline, "seeds": [run["seed"] for run in own], "scores": scores})
    return rows


def write(runs: list[dict], args: argparse.Namespace) -> None:
    """Writes the table of the runs, and draws drift and radius where they were logged."""
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "title", "claim")}
    about = {"table": "benchmarks/compare_objectives.py", "title": args.title, "claim": args.claim, "scale": "mini"}
    told = {**about, "settings": settings, "versions": package_versions(), "rows": tabulate(runs)}
    write_json(args.output, told)

    histories: dict[str, list[list[dict]]] = {}
    for run in runs:
        histories.setdefault(run["objective"], []).append(run["log"])
    panels = {}
    for key, heading in CURVES.items():
        if any(get_logged(run["log"], key, "last") is not None for run in runs):
            panels[heading] = {objective: (key, logs) for objective, logs in histories.items()}
    if panels:
        plot_runs(panels, args.output.with_suffix(".png"))


def main() -> None:
    """Prepare, train, write after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=["infonce", "bi_static", "bi_dynamic"], choices=OBJECTIVES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--languages", type=int, default=1)
    parser.add_argument("--encoders", choices=("transformers", "linear"), default="transformers")
    parser.add_argument("--clips", type=int, default=2048)
    parser.add_argument("--tests", type=int, default=256, help="clips to test on, with linear encoders")
    parser.add_argument("--apart", type=float, default=1.0, help="own part of a language's view, with linear encoders")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch_size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--title", default="Objectives side by side")
    parser.add_argument("--claim", default="none")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    languages = list(LANGUAGES)[: args.languages]
    processor: Any = None
    splits: dict[str, Split] = {}
    if args.encoders == "transformers":
        sizes = {"num_train": args.clips, "num_validation": 64, "num_test": args.clips // 4}
        loaded = load_splits("synthetic", duration_seconds=1.0, **sizes)
        processor = build_processor(MODEL, loaded["train"], languages)
        splits = {name: prepare(loaded[name], processor, languages, 32) for name in ("train", "test")}

    runs: list[dict] = []
    for seed in args.seeds:
        if processor is None:
            splits = draw_views(args.clips, args.tests, args.languages, args.apart, seed)
        for name in args.objectives:
            runs.append(train(name, seed, splits, processor, args))
            told = {key: round(value, 3) for key, value in runs[-1].items() if isinstance(value, float)}
            print(name, seed, told, flush=True)
            write(runs, args)


if __name__ == "__main__":
    main()
