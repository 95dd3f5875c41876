"""Tiny folders and checkpoints in the published layouts, under the names that the full-scale tables use."""

import json
from pathlib import Path

import builders
import dataset_folders
import published_layouts as published
import soundfile
import torch
from recordings import ESC50Clip, write_esc50
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, ClapFeatureExtractor, ClapProcessor

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.builders.captions import label_phrases
from modeling_supclap.datasets_scripts.translation.join import read_captions
from modeling_supclap.datasets_scripts.translation.table import SCHEMA, source_hash, write_translations
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes import convert_checkpoint

RATE_HZ = 16_000


def write_sounds(paths: list[Path], seconds: float = 0.5) -> None:
    """Write a tone of its own for each file."""
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, 0.5 * builders.tone(200.0 + 15 * number, round(seconds * RATE_HZ)), RATE_HZ)


def make_data(folder: Path, num_train: int = 74, num_classes: int = 10) -> Path:
    """Write the folder of `--data_dir`, which contains a folder for each dataset of the papers.

    AudioCaps has a batch of table 12, and ESC-50 enough classes for a batch of TeminAL's pairs.
    """
    made = dataset_folders.audiocaps(folder / "audiocaps", train=num_train, held_out=26)
    write_sounds(made.audio)
    make_clotho(folder / "clotho", 26)
    make_wavcaps(folder / "wavcaps", 32)
    labels = list(label_phrases("esc50"))[:num_classes]
    clips = []
    for number, label in enumerate(labels):
        for take in range(10):
            name, source = f"{take % 5 + 1}-{100 * number + take}-A-{number}", 100 * number + take
            sound = 0.5 * builders.tone(200.0 + 100 * number + 5 * take, RATE_HZ)
            clips.append(ESC50Clip(name, take % 5 + 1, label, source, sound))
    write_esc50(folder / "esc50", clips, RATE_HZ)
    make_urbansound8k(folder / "urbansound8k")
    # the test split has a video of AudioCaps' training split
    made = dataset_folders.vggsound(folder / "vggsound")
    write_sounds(made.audio)
    return folder


def make_clotho(folder: Path, count: int) -> None:
    for part in ("development", "validation", "evaluation"):
        names = [f"{part} {number}.wav" for number in range(count)]
        lines = [["file_name", *(f"caption_{turn}" for turn in range(1, 6))]]
        lines += [[name, *(f"{name}, caption {turn}" for turn in range(5))] for name in names]
        dataset_folders.write_csv(folder / f"clotho_captions_{part}.csv", lines)
        write_sounds([folder / part / name for name in names])
    # The source of an evaluation clip is a recording of ESC-50.
    heading = ["file_name", "sound_id", "start_end_samples", "license"]
    lines = [[name, str(number), "[0, 1]", "CC0"] for number, name in enumerate(names)]
    dataset_folders.write_csv(folder / "clotho_metadata_evaluation.csv", [heading, *lines])


def make_wavcaps(folder: Path, count: int) -> None:
    entries = [{"id": str(number), "caption": f"sound number {number}", "duration": 0.5} for number in range(count)]
    dataset_folders.write_json(folder / "json_files" / "SoundBible" / "sb_final.json", {"data": entries})
    write_sounds([folder / "SoundBible_flac" / f"{entry['id']}.flac" for entry in entries])


def make_urbansound8k(folder: Path) -> None:
    lines, paths = [dataset_folders.US8K_COLUMNS], []
    for fold in range(1, 11):
        for number, label in enumerate(["air_conditioner", "car_horn"]):
            name = f"{50_000 + fold}-{number}-0-0.wav"
            numbers = [50_000 + 10 * fold + number, 0, 0.5, 1, fold, number]
            lines.append([name, *map(str, numbers), label])
            paths.append(folder / "audio" / f"fold{fold}" / name)
    write_sounds(paths)
    write_sounds(paths[:1], seconds=0.05)  # the shortest clip of the published dataset
    dataset_folders.write_csv(folder / "metadata" / "UrbanSound8K.csv", lines)


def make_translations(data_dir: Path, folder: Path) -> None:
    """Write the translations of AudioCaps and Clotho into the seven other languages."""
    for dataset in ("audiocaps", "clotho"):
        lines = []
        for rows in load_splits(dataset, data_dir=str(data_dir / dataset)).values():
            for caption in read_captions(rows):
                for language in LANGUAGES[1:]:
                    line = {"clip_id": caption.clip_id, "caption_index": caption.caption_index, "language": language}
                    line |= {"text": f"{language} {caption.text}", "source_hash": source_hash(caption.text)}
                    lines.append({name: line.get(name) for name in SCHEMA.names})
        write_translations(folder / f"{dataset}.parquet", lines)


def make_models(folder: Path) -> None:
    """Write checkpoints under the names of the tables: Hub ids as relative folders, and converted files in models/."""
    ced = folder / "mispeech" / "ced-base"
    ced.mkdir(parents=True)
    sizes = {"embed_dim": 64, "depth": 1, "num_heads": 1}
    (ced / "config.json").write_text(json.dumps({**builders.PUBLISHED_CED_CONFIG, **sizes}))
    tensors = published.ced_hub(published.random(published.ced_encoder()), published.random(published.ced_head()))
    save_file(tensors, ced / "model.safetensors", metadata={"format": "pt"})

    sonar = folder / "cointegrated" / "SONAR_200_text_encoder"
    builders.nllb_tokenizer().save_pretrained(sonar)
    fields = {**published.SONAR_CONFIG, "architectures": ["M2M100Encoder"]}
    (sonar / "config.json").write_text(json.dumps(fields))
    save_file(published.random(published.sonar_hub()), sonar / "model.safetensors", metadata={"format": "pt"})

    labse = folder / "sentence-transformers" / "LaBSE"
    torch.manual_seed(0)
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(labse)
    builders.bert_tokenizer().save_pretrained(labse)

    laion = folder / "laion" / "clap-htsat-unfused"
    published.laion_model().save_pretrained(laion)
    ClapProcessor(ClapFeatureExtractor(truncation="rand_trunc"), builders.clap_processor().tokenizer).save_pretrained(
        laion
    )

    builders.bert_tokenizer().save_pretrained(folder / "bert")
    builders.gpt2_tokenizer().save_pretrained(folder / "gpt2")
    for name, checkpoint, tokenizer in (
        ("ml-clap", published.small_ml_clap(), sonar),
        ("msclap-2022", published.small_msclap(2022), folder / "bert"),
        ("msclap-2023", published.small_msclap(2023), folder / "gpt2"),
    ):
        torch.save(checkpoint, folder / f"{name}.pt")
        out = str(folder / "models" / name)
        convert_checkpoint.main([str(folder / f"{name}.pt"), "--out", out, "--tokenizer", str(tokenizer)])
