"""Exports a model to ONNX: a graph for recordings and one for texts, checked against the model before they are written.

    supclap export outputs/esc10 --out outputs/esc10-onnx

The folder then holds `audio.onnx`, `text.onnx`, the processor's files, `onnx.json` (names, scale of the logits, the
differences found) and a README with code that runs. Needs the extra: pip install "supclap[onnx]".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modeling_supclap.recipes.running import run_command

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor
    from modeling_supclap.integrations.onnx import Parity


def write_usage(folder: Path, model: SupCLAPModel, processor: SupCLAPProcessor, found: Sequence[Parity]) -> None:
    """The README of the folder."""
    import jinja2

    template = jinja2.Template(Path(__file__).with_name("onnx_readme.j2").read_text(encoding="utf-8"))
    usage = template.render(
        max_tokens=processor.max_tokens,
        difference=max(each.difference for each in found),
        batches=len(found),
        rate_hz=processor.feature_extractor.sampling_rate,
        scale=model.logit_scale.exp().item(),
        bias=None if model.logit_bias is None else model.logit_bias.item(),
    )
    (folder / "README.md").write_text(f"{usage}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, export, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="A SupCLAP model with CED as its audio tower (id or folder).")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write, other than the model's.")
    args = parser.parse_args(arguments)

    from modeling_supclap import SupCLAPModel, SupCLAPProcessor  # after the help, which need not wait for torch
    from modeling_supclap.integrations.onnx import TOLERANCE, export_onnx

    if (args.out / "config.json").is_file():
        raise ValueError(f"{args.out} holds a model, whose README.md would be written over; give a folder of its own")

    model, processor = SupCLAPModel.from_pretrained(args.model), SupCLAPProcessor.from_pretrained(args.model)
    found = export_onnx(model, processor, args.out)
    write_usage(args.out, model, processor, found)

    for each in found:
        print(f"{each.graph:<6}{each.batch:>3} x {each.length:<6} largest difference {each.difference:.1e}")

    print(f"all within {TOLERANCE:.0e} of the model; audio.onnx and text.onnx are in {args.out}")


if __name__ == "__main__":
    run_command(main)
