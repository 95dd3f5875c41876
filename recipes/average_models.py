"""Average the weights of saved models with the same architecture (model soup, https://arxiv.org/abs/2203.05482).

    supclap average outputs/seed_0 outputs/seed_1 --output_dir outputs/soup
    supclap average outputs/base outputs/tuned --weights 0.3 0.7 --output_dir outputs/between

The average is useful if the models were trained from the same weights. The output folder contains the model, the
processor of the first model, a model card, and the hashes of all recordings that the models have trained on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modeling_supclap.recipes.command import run_command


def describe(model: Any, processor: Any) -> dict[str, Any]:
    """Return the properties that must be equal for all models, as `{name: value}`."""
    import pandas

    parts = {"config": model.config.to_dict(), "feature_extractor": processor.feature_extractor.to_dict()}
    properties = {"tokenizer": processor.tokenizer.get_vocab(), **pandas.json_normalize(parts).iloc[0]}
    return {name: value for name, value in properties.items() if not is_incidental(name)}


def is_incidental(name: str) -> bool:
    """Return whether a field can differ between a saved model and one that is converted in memory."""
    from modeling_supclap.evaluation.fingerprints import INCIDENTAL

    return any(key in INCIDENTAL or key.startswith("_") for key in name.split("."))


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, and average and save the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="Folders or Hub ids of two or more SupCLAP or CLAP models.")
    parser.add_argument("--weights", nargs="+", type=float, help="Weights of the models, with sum 1; default: equal.")
    parser.add_argument("--output_dir", required=True, type=Path, help="New or empty output folder.")
    args = parser.parse_args(arguments)
    names, weights = args.models, args.weights or [1 / len(args.models)] * len(args.models)
    has_sum_1 = abs(sum(weights) - 1) <= 1e-6  # False for NaN
    if len(names) < 2 or len(weights) != len(names) or not has_sum_1:
        raise ValueError(f"got models {names} with weights {weights}; expected two or more, and weights with sum 1")

    from modeling_supclap.conversion.folders import writing_folder

    with writing_folder(args.output_dir) as folder:
        save_average(names, weights, folder, args.output_dir.resolve().name)
    print(f"the average of {len(names)} models is in {args.output_dir}")


def save_average(names: Sequence[str], weights: Sequence[float], folder: Path, title: str) -> None:
    """Average the weights of models, and save the first one with them, its processor and a card with this title."""
    from modeling_supclap.conversion.provenance import origins, write_provenance
    from modeling_supclap.datasets_scripts.overlap.trained_sources import save_trained_sources
    from modeling_supclap.model_card import CardFacts, model_card, write_card
    from modeling_supclap.model_card.facts import public_command
    from modeling_supclap.recipes.train_supclap import load_start

    models, processors = zip(*map(load_start, names), strict=True)
    first, *others = map(describe, models, processors)
    for name, other in zip(names[1:], others, strict=True):
        differences = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if differences:
            problem = f"{name} and {names[0]} differ in {', '.join(differences)}"
            raise ValueError(f"{problem}; only models of the same architecture and tokenizer have an average")

    states, model = [each.state_dict() for each in models], models[0]
    means = states[0].copy()
    for name, value in means.items():
        if value.is_floating_point():
            means[name] = sum(weight * state[name].double() for weight, state in zip(weights, states, strict=True))
    model.load_state_dict(means)
    for part in (model, processors[0]):
        part.save_pretrained(folder)
    write_provenance(folder, origins(model, names))
    save_trained_sources([], folder, *names)
    rate_hz, command = processors[0].feature_extractor.sampling_rate, public_command(sys.argv)
    write_card(
        folder, model_card(CardFacts(model, title, sampling_rate_hz=rate_hz, base_model=names, command=command))
    )


if __name__ == "__main__":
    run_command(main)
