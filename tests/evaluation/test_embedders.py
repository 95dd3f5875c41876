"""Models of other packages: sentence-transformers and PE-AV embed as their own code does."""

import builders
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    PeAudioFeatureExtractor,
    PeAudioProcessor,
)

from modeling_supclap.evaluation.embedders import PeAudioEmbedder, SentenceEmbedder
from modeling_supclap.evaluation.fingerprints import weights_fingerprint
from modeling_supclap.evaluation.models import load_embedding_model

CLIPS = [builders.noise(16_000), builders.noise(9_000, seed=1)]
TEXTS = ["rain on a roof", "a dog barks"]


@pytest.fixture(scope="module")
def clap_folder(tmp_path_factory):
    """Return the folder of a tiny CLAP, saved by sentence-transformers."""
    source = builders.save_clap(tmp_path_factory.mktemp("clap"))
    folder = tmp_path_factory.mktemp("st")
    model = SentenceTransformer(modules=[Transformer(str(source))], device="cpu")
    model.prompts = {"query": "sound of ", "document": ""}
    model.save_pretrained(str(folder))
    return folder


def test_a_model_of_sentence_transformers_embeds_as_it_does_itself(clap_folder):
    embedder = SentenceEmbedder(str(clap_folder), "cpu")
    assert (embedder.sampling_rate, embedder.chunk_seconds) == (16_000, 1)
    theirs = SentenceTransformer(str(clap_folder), device="cpu")
    clips = [{"array": clip, "sampling_rate": 16_000} for clip in CLIPS]
    expected = theirs.encode_document(clips, normalize_embeddings=True)
    np.testing.assert_allclose(embedder.encode_audio(CLIPS, 16_000), expected, atol=1e-6)
    with_prompt = theirs.encode([f"sound of {text}" for text in TEXTS], normalize_embeddings=True)
    np.testing.assert_allclose(embedder.encode_text(TEXTS), with_prompt, atol=1e-6)


def test_another_prompt_or_weight_is_another_fingerprint(clap_folder):
    first, second = (SentenceEmbedder(str(clap_folder), "cpu") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    with torch.no_grad():
        next(second.model.parameters()).add_(1)
    assert weights_fingerprint(second.model) != weights_fingerprint(first.model)


def test_a_text_model_is_refused(tmp_path):
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(tmp_path)
    builders.bert_tokenizer().save_pretrained(tmp_path)
    model = SentenceTransformer(modules=[Transformer(str(tmp_path))], device="cpu")
    model.save_pretrained(str(tmp_path / "st"))
    with pytest.raises(ValueError, match="audio"):
        load_embedding_model(tmp_path / "st", device="cpu")


def pe_audio(folder):
    """Save a tiny PE-AV audio-text model."""
    text = {"model_type": "modernbert", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": 0}
    dac = {"encoder_hidden_size": 4, "downsampling_ratios": [4, 8, 60], "codebook_dim": 8, "hidden_size": 32}
    audio = {"dac_config": dac, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    audio |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = AutoModel.from_config(
        AutoConfig.for_model("pe_audio", text_config=text, audio_config=audio)
    ).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def test_pe_audio_embeds_as_its_forward_pass(tmp_path):
    model = pe_audio(tmp_path)
    processor = PeAudioProcessor(PeAudioFeatureExtractor(), builders.bert_tokenizer())
    processor.save_pretrained(tmp_path)
    embedder = load_embedding_model(tmp_path, device="cpu")
    assert isinstance(embedder.model, PeAudioEmbedder)
    assert (embedder.sampling_rate_hz, embedder.chunk_seconds) == (48_000, 30)

    inputs = processor.feature_extractor(CLIPS[:1], sampling_rate=48_000, padding=True, return_tensors="pt")
    words = processor.tokenizer(TEXTS, padding=True, return_tensors="pt")
    outputs = model(**words, **inputs)
    for found, expected in (
        (embedder.encode_audio(CLIPS[:1], 8), outputs.audio_embeds),
        (embedder.encode_text(TEXTS, "eng", 8), outputs.text_audio_embeds),
    ):
        np.testing.assert_allclose(found, torch.nn.functional.normalize(expected, dim=-1), atol=1e-5)
