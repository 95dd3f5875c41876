"""A small folder of recordings with captions: tones that a model can tell apart, as rows of the schema."""

from pathlib import Path
from typing import Any

import builders
import soundfile

WORDS = {language: builders.CAPTIONS[language].split() for language in ("eng", "fra")}


def tone_rows(folder: Path, count: int = 8, captions_per_clip: int = 2) -> list[dict[str, Any]]:
    """`count` half-second tones; clip i has its own frequency and its own captions, in words the tokenizer knows."""
    rows = []
    for index in range(count):
        path = folder / f"tone_{index}.wav"
        soundfile.write(path, 0.5 * builders.tone(200.0 * (index + 1), 8000), builders.RATE_HZ)
        captions = {
            language: [f"{words[index % 6]} {words[index // 6]} {words[turn]}" for turn in range(captions_per_clip)]
            for language, words in WORDS.items()
        }
        rows.append(
            {
                "clip_id": f"clip{index}",
                "audio_path": str(path),
                "captions": captions,
                "labels": [f"tone_{index % 4}"],
                "source": f"recording{index}",
            }
        )
    return rows
