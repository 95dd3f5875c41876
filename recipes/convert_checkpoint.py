"""Convert a public checkpoint to a folder that `from_pretrained` loads.

    supclap convert audiotransformer_mini_mAP_4896.pt --out models/ced-mini --verify
    supclap convert pretrain.pt --out models/ml-clap --tokenizer cointegrated/SONAR_200_text_encoder
    supclap convert microsoft/msclap/CLAP_weights_2023.pth --out models/msclap --tokenizer openai-community/gpt2
    supclap convert outputs/lora/_resume/checkpoint-400 --out models/tuned    # merges the adapters of a checkpoint
    supclap convert laion/clap2-large-audioxl-s1B --out models/clap2 --verify
    supclap convert outputs/tuned-clap2 --to open_clip --out outputs/for-openclip
    supclap convert outputs/tuned-clap --to clap --out outputs/for-transformers    # a ClapModel, without remote code

The kind of checkpoint is recognised by its tensor names. Every tensor must be converted, or be in the list of tensors
to ignore. Otherwise nothing is written. The output folder contains `provenance.json`, with the source, SHA-256 and
license of each encoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modeling_supclap import require_torchaudio
from modeling_supclap.recipes.command import run_command

if TYPE_CHECKING:
    import torch

    from modeling_supclap.conversion import Conversion


def format_parts(conversion: Conversion) -> str:
    """Format a text with a table of the converted encoders, and the numbers of tensors that were not converted."""
    width = max(len(part.part) for part in conversion.parts)
    lines = [f"{'part':{width}}  tensors   parameters  license"]
    for part in conversion.parts:
        lines.append(f"{part.part:{width}}  {part.tensors:7,}  {part.parameters:11,}  {part.license or 'none stated'}")
    for description, count in conversion.set_aside.items():
        lines.append(f"set aside: {count:,} tensors, {description}")
    return "\n".join([*lines, conversion.remark]).rstrip()


def merge_adapters(checkpoint: Path, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Merge the adapters of a training checkpoint, a local folder, and save a plain model with its processor."""
    from modeling_supclap import SupCLAPConfig, SupCLAPProcessor
    from modeling_supclap.conversion.folders import writing_folder
    from modeling_supclap.training.lora import merge_checkpoint

    config = SupCLAPConfig.from_pretrained(checkpoint)
    with writing_folder(folder) as written:
        merge_checkpoint(checkpoint, config, weights).save_pretrained(written)
        SupCLAPProcessor.from_pretrained(checkpoint).save_pretrained(written)
    print(f"{checkpoint}: merged its adapters; the model is in {folder}")


def write_target(source: str, target: str, folder: Path) -> None:
    """Write a trained model with CLAP's towers as a `ClapModel`, or one with CLAP2's towers in OpenCLIP's format."""
    from modeling_supclap.conversion import save_clap, save_open_clip
    from modeling_supclap.recipes.train_supclap import load_start

    save = {"clap": save_clap, "open_clip": save_open_clip}[target]
    save(*load_start(source), folder)
    print(f"{source} is in {folder}, in the format {target}")


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, convert the checkpoint, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="File, folder, Hub id, or a file in a Hub repository (owner/name/file.pt).")
    parser.add_argument("--out", required=True, type=Path, help="New or empty output folder.")
    parser.add_argument("--tokenizer", help="Hub id, folder or Meta's SentencePiece file; default: from the source.")
    parser.add_argument("--revision", help="Commit, branch or tag of the Hub repository.")
    parser.add_argument("--verify", action="store_true", help="Reload the written model and compare it.")
    parser.add_argument(
        "--to", default="supclap", choices=("supclap", "clap", "open_clip"), help="Format of the output folder."
    )
    args = parser.parse_args(arguments)

    require_torchaudio()
    if args.to != "supclap":
        return write_target(args.source, args.to, args.out)

    from modeling_supclap.conversion import convert_checkpoint, read_checkpoint, save_conversion
    from modeling_supclap.conversion.open_clip_tokenizer import load_open_clip_tokenizer
    from modeling_supclap.joining import load_tokenizer

    checkpoint = read_checkpoint(args.source, args.revision)
    if any(".base_layer." in name for name in checkpoint.tensors):
        merge_adapters(Path(args.source), checkpoint.tensors, args.out)
        return
    conversion = convert_checkpoint(checkpoint)
    print(f"{checkpoint.origin}: recognised as {conversion.layout.name}, {len(checkpoint.tensors):,} tensors")
    print(format_parts(conversion))

    name = args.tokenizer
    if name is None and conversion.reads_text and checkpoint.config and any(checkpoint.folder.glob("tokenizer*.json")):
        name = checkpoint.folder
    tokenizer = None if name is None else load_tokenizer(name)
    if checkpoint.config.get("model_cfg"):
        tokenizer = load_open_clip_tokenizer(str(checkpoint.folder), checkpoint.config, args.tokenizer)
    save_conversion(conversion, args.out, tokenizer, args.verify)

    print(f"{type(conversion.model).__name__} is in {args.out}{', verified' if args.verify else ''}")
    if tokenizer is None and conversion.reads_text:
        print(
            f"no tokenizer was saved; pass --tokenizer (in training: the tokenizer of {conversion.layout.tokenizer})"
        )


if __name__ == "__main__":
    run_command(main)
