"""Export a model to ONNX: one graph for audio and one for text. Both are compared with the model before writing.

    supclap export outputs/esc10 --out outputs/esc10-onnx

The output folder contains `audio.onnx`, `text.onnx`, the processor's files, `onnx.json` (names, scale of the logits,
measured differences), a README with example code, and `serve.py`, which embeds texts and recordings without torch. If
the folder is `onnx` in the folder of a search index, `supclap search query` uses it. Requires the extra: pip install
"supclap[onnx]".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modeling_supclap.recipes.command import run_command

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPModel, SupCLAPProcessor
    from modeling_supclap.integrations.onnx import Parity


def write_usage(folder: Path, model: SupCLAPModel, processor: SupCLAPProcessor, checks: Sequence[Parity]) -> None:
    """Write a README with example code to the export folder."""
    import jinja2

    source = Path(__file__).with_name("onnx_readme.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source)
    usage = template.render(
        max_tokens=processor.max_tokens,
        inputs=json.loads((folder / "onnx.json").read_text(encoding="utf-8"))["audio.onnx"]["inputs"],
        difference=max(check.difference for check in checks),
        batches=len(checks),
        rate_hz=processor.feature_extractor.sampling_rate,
        scale=model.logit_scale.exp().item(),
        bias=None if model.logit_bias is None else model.logit_bias.item(),
    )
    (folder / "README.md").write_text(f"{usage}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, and export the model to ONNX."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or folder of a SupCLAP or CLAP model.")
    parser.add_argument("--out", type=Path, required=True, help="Output folder, which must not contain a model.")
    parser.add_argument(
        "--waveforms",
        action=argparse.BooleanOptionalAction,
        help="Make the spectrogram part of audio.onnx (default: for CED, CLAP and CLAP2).",
    )
    args = parser.parse_args(arguments)

    from modeling_supclap.evaluation import load_embedding_model  # imports torch, so after --help
    from modeling_supclap.integrations.onnx import TOLERANCE, export_onnx
    from modeling_supclap.recipes.train_supclap import load_start

    if (args.out / "config.json").is_file():
        raise ValueError(f"{args.out} contains a model; the export would overwrite its README.md, give another folder")
    model, processor = load_start(args.model)
    fingerprint = load_embedding_model(args.model, device="cpu").fingerprint
    checks = export_onnx(model, processor, args.out, args.waveforms, fingerprint)
    write_usage(args.out, model, processor, checks)

    for check in checks:
        print(f"{check.graph:<6}{check.batch:>3} x {check.length:<6} largest difference {check.difference:.1e}")
    print(f"all within {TOLERANCE:.0e} of the model; audio.onnx and text.onnx are in {args.out}")


if __name__ == "__main__":
    run_command(main)
