"""Fixtures for the search tests."""

import pytest
import soundfile
from fake_models import PITCHES, RATE, PitchModel, tone


@pytest.fixture
def fake_model():
    return PitchModel()


@pytest.fixture
def folder(tmp_path):
    """A minute of a low tone with a high tone from 31 to 35 s, a file with a middle tone, and a short file."""
    root = tmp_path / "sounds"
    (root / "deep").mkdir(parents=True)
    long = tone(PITCHES["low"], 60.0)
    long[31 * RATE : 35 * RATE] = tone(PITCHES["high"], 4.0)
    soundfile.write(root / "long.wav", long, RATE)
    soundfile.write(root / "deep" / "middle's.flac", tone(PITCHES["middle"], 12.0), RATE)
    soundfile.write(root / "short.ogg", tone(PITCHES["low"], 1.0), RATE)
    (root / "notes.txt").write_text("no recording")
    return root
