"""Translate the captions of a dataset and measure the quality of the translations.

    supclap translate --dataset audiocaps --data_dir DIR --output audiocaps.parquet
    supclap translate --captions captions.csv --output captions.parquet --languages fra jpn \\
        --model deepseek-chat --endpoint https://api.deepseek.com/v1 --api_key_env DEEPSEEK_API_KEY

To train on the translations, set `dataset_config: {translations: audiocaps.parquet}`, or use `join_translations` in
Python. If a run was stopped, the same command continues it. Changed captions are translated again.

The command writes two more files. `audiocaps.back.parquet` contains the back-translations into the source language.
`audiocaps.report.json` contains for each language the number of missing translations, their lengths, and a mean cosine.
The cosine compares the sentence embeddings of a caption and its back-translation (SupCLAP section E.9).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.command import run_command
from modeling_supclap.recipes.options import CaptionArguments, QualityArguments, TranslatorArguments, as_mapping
from modeling_supclap.training.options import refuse

if TYPE_CHECKING:
    from modeling_supclap.datasets_scripts.translation import Translator
    from modeling_supclap.datasets_scripts.translation.jobs import Item, Key
    from modeling_supclap.datasets_scripts.translation.join import Caption


def load_captions(args: CaptionArguments) -> list[Caption]:
    """Load the captions to translate from a dataset or a file. Raise if captions are blank, damaged or repeated."""
    from modeling_supclap.datasets_scripts.builders.recordings import listing
    from modeling_supclap.datasets_scripts.translation.jobs import clean

    if (args.dataset is None) == (args.captions is None):
        raise ValueError(f"got dataset={args.dataset!r} and captions={args.captions!r}; set exactly one of them")
    captions = from_builder(args) if args.captions is None else read_caption_file(Path(args.captions))

    names = [f"{caption.clip_id!r} caption {caption[1]}" for caption in captions]
    blank = [name for name, caption in zip(names, captions, strict=True) if not clean(caption.text)]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    for found, problem in ((blank, "blank or damaged"), (repeated, "repeated")):
        if found:
            raise ValueError(f"{len(found)} captions are {problem}: {listing(found)}")
    return captions


def from_builder(args: CaptionArguments) -> list[Caption]:
    """Load the captions of a dataset in the source language. Raise if it has captions in a target language."""
    from modeling_supclap.datasets_scripts.translation.join import read_captions

    captions = []
    for rows in args.load_splits().values():
        for language in args.languages:
            if language in rows.features["captions"] and read_captions(rows, language):
                advice = f'choose others, or set dataset_config {{"languages": ["{args.source_language}"]}}'
                raise ValueError(f"{args.dataset} already has captions in {language!r}; {advice}")
        captions += read_captions(rows, args.source_language)
    return captions


def read_caption_file(path: Path) -> list[Caption]:
    """Read captions from a table. Its columns are clip_id, caption_index (counted from 0 for each clip) and text."""
    from modeling_supclap.datasets_scripts.builders.metadata import read_table
    from modeling_supclap.datasets_scripts.translation.join import Caption

    captions = []
    for where, entry in read_table(path):
        if not {"clip_id", "caption_index", "text"} <= entry.keys():
            raise ValueError(f"{where} needs clip_id, caption_index and text; it has {list(entry)}")

        clip_id, index, text = entry["clip_id"], str(entry["caption_index"]), entry["text"]
        if clip_id in (None, "") or not isinstance(text, str):
            raise ValueError(f"{where} is {entry}; clip_id must not be empty, and text must be a string")
        if not re.fullmatch("[0-9]{1,9}", index):
            raise ValueError(f"{where} has the caption_index {index}; it must be a whole number, counted from 0")
        captions.append(Caption(str(clip_id), int(index), text))
    if not captions:
        raise ValueError(f"{path} has no rows; it needs the columns clip_id, caption_index and text")
    return captions


def build_translator(args: TranslatorArguments) -> Translator:
    """Build a translator that calls a chat API if `endpoint` is set, or else runs a local seq2seq model."""
    from modeling_supclap.datasets_scripts.translation import ChatTranslator, Seq2SeqTranslator

    if args.endpoint is None:
        return Seq2SeqTranslator(args.model, args.prompt, args.num_beams, args.device, args.dtype)
    api_key = None if args.api_key_env is None else os.environ.get(args.api_key_env)
    if args.api_key_env is not None and not api_key:
        raise ValueError(f"api_key_env is {args.api_key_env}; this environment variable is not set or empty")
    options = None if args.request_options is None else as_mapping(args.request_options)
    return ChatTranslator(args.model, args.endpoint, api_key, options, args.workers, args.retries)


def check_arguments(args: CaptionArguments) -> None:
    """Check the languages and the output before the translation, which may take hours. Raise ValueError."""
    from modeling_supclap.languages import LANGUAGES

    languages, source = args.languages, args.source_language
    is_distinct = languages and len(set(languages)) == len(languages) and source not in languages
    unknown = [language for language in languages if not re.fullmatch("[a-z]{3}", language)]
    codes = ", ".join(LANGUAGES)
    refuse(
        [
            (not is_distinct, f"languages is {languages}; give one or more, each once, not {source}"),
            (unknown, f"languages contains {unknown}; give ISO 639-3 codes such as {codes}"),
            (Path(args.output).suffix != ".parquet", f"output is {args.output}; it must end with .parquet"),
        ]
    )


def main() -> None:
    """Translate the captions, translate them back, and write the report."""
    groups = (CaptionArguments, TranslatorArguments, QualityArguments)
    caption_args, args, check = parse_arguments(groups, about=__doc__)

    from modeling_supclap.datasets_scripts.manifest import installed_versions
    from modeling_supclap.datasets_scripts.public_names import redact
    from modeling_supclap.datasets_scripts.translation.jobs import Item, complete_translations, sample
    from modeling_supclap.datasets_scripts.translation.quality import (
        format_translation_report,
        load_sentence_encoder,
        report_translations,
    )

    check_arguments(caption_args)
    output, english, languages = (Path(caption_args.output), caption_args.source_language, caption_args.languages)
    captions = load_captions(caption_args)
    print(f"{len(captions):,} captions to translate into {', '.join(languages)}")

    encoder = load_sentence_encoder(check.sentence_encoder, args.device) if check.back_sample != 0 else None
    translator = back_translator = build_translator(args)
    back_args = args
    if check.back_model is not None:
        back_args = replace(args, model=check.back_model, endpoint=None, prompt=None, request_options=None)
        back_translator = build_translator(back_args)
    for language in languages:  # before hours of translation
        translator.check(english, language)
        back_translator.check(language, english)

    def complete(path: Path, items: list[Item], model: Translator, options: TranslatorArguments) -> dict[Key, str]:
        settings = {name: getattr(options, name) for name in ("prompt", "num_beams", "dtype", "request_options")}
        return complete_translations(path, items, model, args.batch_size, settings, args.fill_gaps)

    items = []
    for language in languages:
        items += [Item(*caption[:2], language, caption.text, english, language) for caption in captions]
    texts = complete(output, items, translator, args)

    backs: dict[Key, str] = {}
    if encoder is not None:
        translated = [Item(*key, text, key[2], english) for key, text in texts.items()]
        chosen = sample(translated, check.back_sample)
        backs = complete(output.with_suffix(".back.parquet"), chosen, back_translator, back_args)

    report = {}
    sources = {caption[:2]: caption.text for caption in captions}
    for language in languages:
        forward, back = (
            {key[:2]: text for key, text in found.items() if key[2] == language} for found in (texts, backs)
        )
        report[language] = report_translations(sources, forward, back, encoder, check.threshold, check.num_worst)

    arguments = redact({**vars(caption_args), **vars(args), **vars(check)}, from_anywhere=True)
    made_by = installed_versions(["supclap", "torch", "transformers", "sentence-transformers", "openai"])
    path = output.with_suffix(".report.json")
    write_json(path, {"languages": report, "arguments": arguments, "versions": made_by}, allow_nan=False)
    print(format_translation_report(report, check.threshold))
    print(f"translations are in {output}, this report and the worst translations in {path}")


if __name__ == "__main__":
    run_command(main)
