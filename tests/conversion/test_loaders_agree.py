"""A tuned CLAP has the same embeddings and probabilities in every library that loads its folder."""

from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from processes import run_python
from torch.utils.data import DataLoader
from transformers import ClapModel, ClapProcessor, pipeline

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import save_clap

CLIPS = [builders.noise(9000, seed=1), 0.3 * builders.tone(300.0) + 0.1 * builders.noise(16_000)]
LABELS = ["a dog", "the rain", "un chien"]
RATE_HZ = builders.RATE_HZ
LOGIT_SCALE = 1.5  # not the initial value
# (audio embeddings, text embeddings, probabilities of each label), of arrays or None
Result = tuple[Any, Any, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return the folder of a tuned CLAP in our format, and as a `ClapModel`."""
    model, processor = builders.pair("converted")
    torch.nn.init.constant_(model.logit_scale, LOGIT_SCALE)
    # As in training: the tokenizer pads and truncates.
    processor(text=LABELS, max_length=7, padding="max_length")
    names = ("supclap", "clap")
    paths = {name: tmp_path_factory.mktemp("models") / name for name in names}
    model.save_pretrained(paths["supclap"])
    processor.save_pretrained(paths["supclap"])
    save_clap(model, processor, paths["clap"])
    return paths


@torch.no_grad()
def expect() -> Result:
    """Compute the results with the tuned model in memory, from features of transformers."""
    model, _ = builders.pair("converted")
    processor = builders.clap_processor()
    audio = processor.feature_extractor(CLIPS, sampling_rate=RATE_HZ, return_tensors="pt")
    text = processor.tokenizer(LABELS, padding=True, return_tensors="pt")
    audio_embeds = model.get_audio_features(**audio).pooler_output
    text_embeds = model.get_text_features(**text).pooler_output
    scores = (np.exp(LOGIT_SCALE) * audio_embeds @ text_embeds.T).softmax(dim=1)
    return audio_embeds.numpy(), text_embeds.numpy(), scores.numpy()


@torch.no_grad()
def with_model(model: Any, processor: Any) -> Result:
    inputs = processor(audio=CLIPS, text=LABELS, sampling_rate=RATE_HZ, return_tensors="pt", padding=True)
    outputs = model.eval()(**inputs)
    return outputs.audio_embeds, outputs.text_embeds, outputs.logits_per_audio.softmax(dim=1)


def with_pipeline(folder: Path) -> Result:
    classify: Any = pipeline("zero-shot-audio-classification", model=str(folder), trust_remote_code=True)
    scores = []
    for result in classify(CLIPS, candidate_labels=LABELS, hypothesis_template="{}"):
        by_label = {each["label"]: each["score"] for each in result}
        scores.append([by_label[label] for label in LABELS])
    return None, None, scores


def with_sentence_transformers(folder: Path) -> Result:
    library = pytest.importorskip("sentence_transformers")
    encoder = library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    audio = [{"array": clip, "sampling_rate": RATE_HZ} for clip in CLIPS]
    return (*(encoder.encode(inputs, normalize_embeddings=True) for inputs in (audio, LABELS)), None)


def with_our_sentence_module(folder: Path) -> Result:
    library = pytest.importorskip("sentence_transformers")
    from modeling_supclap.integrations.sentence_transformers import SupCLAPModule

    encoder = library.SentenceTransformer(modules=[SupCLAPModule.load(str(folder))], device="cpu")
    audio = [{"array": clip, "sampling_rate": RATE_HZ} for clip in CLIPS]
    return encoder.encode(audio), encoder.encode(LABELS), None


def with_mteb(folder: Path) -> Result:
    models = pytest.importorskip("mteb.models.model_implementations.clap_models")
    encoder = models.ClapZeroShotWrapper(str(folder), revision="main", device="cpu")
    rows: Any = [{"audio": {"array": clip, "sampling_rate": RATE_HZ}} for clip in CLIPS]
    audio = encoder.get_audio_embeddings(DataLoader(rows, batch_size=2), show_progress_bar=False)
    with torch.no_grad():
        text = encoder.get_text_embeddings([{"text": LABELS}], show_progress_bar=False)
    return audio, text, None


REMOTE = """
import sys
sys.modules["modeling_supclap"] = sys.modules["datasets_scripts"] = None  # as if the package were not installed
import torch
from transformers import AutoModel, AutoProcessor, pipeline

clips, labels, rate_hz = torch.load("call.pt", weights_only=False)
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
processor = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.")
with torch.no_grad():
    inputs = processor(audio=clips, text=labels, sampling_rate=rate_hz, return_tensors="pt")
    outputs = model(**inputs)
classify = pipeline("zero-shot-audio-classification", model=sys.argv[1], trust_remote_code=True)
scores = []
for result in classify(clips, candidate_labels=labels, hypothesis_template="{}"):
    by_label = {each["label"]: each["score"] for each in result}
    scores.append([by_label[label] for label in labels])
torch.save([outputs.audio_embeds, outputs.text_embeds, outputs.logits_per_audio.softmax(dim=1), scores], "result.pt")
"""

LOADERS = {
    "SupCLAPModel": lambda folder: with_model(
        SupCLAPModel.from_pretrained(folder), SupCLAPProcessor.from_pretrained(folder)
    ),
    "ClapModel": lambda folder: with_model(ClapModel.from_pretrained(folder), ClapProcessor.from_pretrained(folder)),
    "pipeline": with_pipeline,
    "sentence-transformers": with_sentence_transformers,
    "our sentence-transformers module": with_our_sentence_module,
    "mteb": with_mteb,
}
CASES = [(loader, saved) for loader in LOADERS for saved in ("supclap", "clap")]
CASES.remove(("SupCLAPModel", "clap"))
CASES.remove(("our sentence-transformers module", "clap"))


def assert_equal(result: Result, tolerance: float) -> None:
    for found, expected in zip(result, expect(), strict=True):
        if found is not None:
            np.testing.assert_allclose(np.asarray(found), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("loader", "saved"), CASES)
def test_six_loaders_have_one_result(folders, loader, saved):
    # mteb rounds audio to 16 bits.
    assert_equal(LOADERS[loader](folders[saved]), 2e-3 if loader == "mteb" else 1e-5)


@pytest.mark.slow
@pytest.mark.process
def test_the_code_of_the_folder_has_the_same_result(folders, tmp_path):
    torch.save((CLIPS, LABELS, RATE_HZ), tmp_path / "call.pt")
    environment = {"HF_HOME": str(tmp_path / "cache")}
    run_python("-I", "-c", REMOTE, folders["supclap"], cwd=tmp_path, timeout_seconds=300, **environment)
    audio, text, probabilities, scores = torch.load(tmp_path / "result.pt")
    assert_equal((audio, text, probabilities), 1e-5)
    assert_equal((None, None, scores), 1e-5)


def test_a_clap_folder_contains_no_code(folders):
    assert not list(folders["clap"].glob("*.py"))
    assert ClapModel.from_pretrained(folders["clap"], output_loading_info=True)[1]["missing_keys"] == set()
