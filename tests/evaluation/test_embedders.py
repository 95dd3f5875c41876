"""Models of other packages: sentence-transformers and the example of PE-AV embed as their own code does."""

import importlib
import json
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import builders
import numpy as np
import pytest
import torch
from audio_encoders import make_encoder
from safetensors.torch import load_file, save_file
from sentence_models import CODE, save_code, save_gemma2
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, PeAudioFeatureExtractor, PeAudioProcessor

from modeling_supclap.audio_input import Recording
from modeling_supclap.conversion import find_kind
from modeling_supclap.evaluation.embedders import SentenceEmbedder
from modeling_supclap.evaluation.models import load_embedding_model

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIPS = [builders.noise(16_000), builders.noise(9_000, seed=1), builders.noise(16_000, seed=2)]
TEXTS = ["rain on a roof", "a dog barks while the rain falls", "https://example.org/rain.wav"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with a tiny CLAP, BERT, and audio encoder at 24 kHz whose output depends on padding."""
    folder = tmp_path_factory.mktemp("sources")
    builders.save_clap(folder / "clap")
    torch.manual_seed(0)
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(folder / "bert")
    builders.bert_tokenizer().save_pretrained(folder / "bert")
    encoder, extractor = make_encoder("data2vec")
    extractor.sampling_rate = 24_000
    encoder.save_pretrained(folder / "data2vec")
    extractor.save_pretrained(folder / "data2vec")
    return folder


def save_sentence_model(folder, modules, **options):
    """Save modules as a model of sentence-transformers, and return the folder."""
    SentenceTransformer(modules=modules, device="cpu", **options).save_pretrained(str(folder))
    return folder


def save_clap(folder, sources, *modules, **options):
    return save_sentence_model(folder, [Transformer(str(sources / "clap")), *modules], **options)


def save_kind(kind, folder, sources):
    """Save a tiny model of sentence-transformers for audio and text."""
    torch.manual_seed(1)
    if kind == "prompts":
        return save_clap(folder, sources, prompts={"query": "sound of ", "document": ""})
    if kind == "dense":
        return save_clap(folder, sources, Dense(16, 8))
    if kind == "truncated":
        return save_clap(folder, sources, truncate_dim=8)
    text, audio = Transformer(str(sources / "bert")), Transformer(str(sources / "data2vec"))
    routes = {
        "text": [text, Pooling(24), Dense(24, 8)],
        "audio": [audio, Pooling(audio.get_embedding_dimension()), Dense(audio.get_embedding_dimension(), 8)],
    }
    mappings = {(None, "text"): "text", (None, "audio"): "audio"}
    router = Router(routes, default_route="text", route_mappings=mappings)
    return save_sentence_model(folder, [router, Normalize()])


@pytest.mark.parametrize("kind", ["prompts", "dense", "truncated", "router"])
def test_a_model_of_sentence_transformers_embeds_as_it_does_itself(tmp_path, sources, kind):
    folder = save_kind(kind, tmp_path / "model", sources)
    assert find_kind(str(folder)) == "sentence_transformers"
    adapted = load_embedding_model(folder, device="cpu")
    limits = (adapted.sampling_rate_hz, adapted.chunk_seconds)
    assert limits == ((24_000, 30) if kind == "router" else (16_000, 1))
    assert (adapted.min_seconds, adapted.dtype) == (0.05, "float32")

    theirs = SentenceTransformer(str(folder), device="cpu")
    for clip, found in zip(CLIPS, adapted.encode_audio(CLIPS, 2), strict=True):
        recording = {"array": clip, "sampling_rate": adapted.sampling_rate_hz}
        expected = theirs.encode_document([recording], normalize_embeddings=True)[0]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    for text, found in zip(TEXTS, adapted.encode_text(TEXTS, "eng", 2), strict=True):
        expected = theirs.encode_query([{"text": text}], normalize_embeddings=True)[0]
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_end_of_a_long_recording_counts(tmp_path, sources):
    adapted = load_embedding_model(save_kind("prompts", tmp_path / "model", sources), device="cpu")
    sound = builders.noise(24_000)
    (chunks,) = adapted.chunk_embeddings([Recording(sound, 16_000, "clip")])
    expected = adapted.encode_audio([sound[:16_000], sound[8_000:]])
    np.testing.assert_allclose(chunks.embeds, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"0\.05 s"):
        list(adapted.chunk_embeddings([Recording(sound[:400], 16_000, "clip")]))


def test_a_limit_in_the_processing_settings_is_a_chunk_length(tmp_path, sources):
    module = Transformer(str(sources / "clap"), processing_kwargs={"audio": {"max_length": 8_000}})
    folder = save_sentence_model(tmp_path / "model", [module], prompts={"query": "sound of "})
    assert SentenceEmbedder(str(folder), "cpu").chunk_seconds == 0.5


def test_a_fused_clap_embeds_without_fusion(tmp_path):
    builders.save_pair("fused", tmp_path / "clap")
    module = Transformer(str(tmp_path / "clap"))
    folder = save_sentence_model(tmp_path / "model", [module], prompts={"query": "sound of "})
    expected = load_embedding_model(tmp_path / "clap", device="cpu").encode_audio(CLIPS)
    np.testing.assert_allclose(SentenceEmbedder(str(folder), "cpu").encode_audio(CLIPS, 16_000), expected, atol=1e-6)


def test_a_plain_clap_stays_a_clap(tmp_path, sources):
    assert find_kind(str(save_clap(tmp_path / "plain", sources, Normalize()))) == "clap"


def test_a_copy_has_the_same_fingerprint_and_other_settings_have_not(tmp_path, sources):
    folder = save_kind("prompts", tmp_path / "model", sources)
    fingerprint = SentenceEmbedder(str(folder), "cpu").fingerprint
    settings = {
        "config_sentence_transformers.json": lambda fields: fields["prompts"].update(document="a"),
        "processor_config.json": lambda fields: fields["feature_extractor"].update(padding="pad"),
        "tokenizer_config.json": lambda fields: fields.update(model_max_length=9),
        "sentence_bert_config.json": lambda fields: fields.update(processing_kwargs={"audio": {"padding": False}}),
        "config.json": lambda fields: fields["audio_config"].update(layer_norm_eps=0.1),
    }
    for name, change in {"README.md": None, **settings}.items():
        copy = tmp_path / f"copy of {name}"
        shutil.copytree(folder, copy)
        if change is not None:
            fields = json.loads((copy / name).read_text())
            change(fields)
            (copy / name).write_text(json.dumps(fields))
        assert (SentenceEmbedder(str(copy), "cpu").fingerprint == fingerprint) is (change is None), name
    for name in ("words.txt", "deep/words.model", "words.jinja", "words.py", "notes.md"):
        copy = tmp_path / f"copy with {Path(name).name}"
        shutil.copytree(folder, copy)
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"\xff")  # no UTF-8
        assert (SentenceEmbedder(str(copy), "cpu").fingerprint == fingerprint) is (name == "notes.md"), name

    tensors = load_file(folder / "model.safetensors")
    tensors["logit_scale_a"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert SentenceEmbedder(str(folder), "cpu").fingerprint != fingerprint
    other = SentenceEmbedder(str(folder), "cpu", text_prompt="noise of ")
    assert other.fingerprint != SentenceEmbedder(str(folder), "cpu").fingerprint


def test_prompts_can_be_replaced(tmp_path, sources):
    folder = str(save_kind("prompts", tmp_path / "model", sources))
    other, plain = (SentenceEmbedder(folder, "cpu", text_prompt=prompt) for prompt in ("hum of ", ""))
    np.testing.assert_allclose(other.encode_text(["rain"]), plain.encode_text(["hum of rain"]), atol=1e-6)
    assert np.abs(plain.encode_text(["rain"]) - SentenceEmbedder(folder, "cpu").encode_text(["rain"])).max() > 1e-3
    with pytest.raises(ValueError, match="chat template"):
        SentenceEmbedder(folder, "cpu", audio_prompt="Summarize")


def test_a_model_for_dot_products_warns(tmp_path, sources):
    folder = save_clap(tmp_path / "model", sources, prompts={"query": "a "}, similarity_fn_name="dot")
    with pytest.warns(UserWarning, match="made for dot similarity") as warned:
        SentenceEmbedder(str(folder), "cpu")
    assert warned[-1].filename == __file__
    folder = save_clap(tmp_path / "unit", sources, Normalize(), prompts={"query": "a "}, similarity_fn_name="dot")
    cosine = save_kind("prompts", tmp_path / "cosine", sources)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        SentenceEmbedder(str(folder), "cpu")
        SentenceEmbedder(str(cosine), "cpu")


def test_code_of_a_repository_runs_only_if_it_is_trusted(tmp_path, capsys):
    folder = save_code(tmp_path / "model", CODE + "\nprint('running')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_embedding_model(folder, device="cpu")
    assert capsys.readouterr().out == ""
    adapted = load_embedding_model(folder, device="cpu", trust_remote_code=True)
    assert adapted.sampling_rate_hz == 32_000
    np.testing.assert_allclose(adapted.encode_text(["rain"], "eng"), [[0.5**0.5, 0.5**0.5]], atol=1e-6)
    changed = save_code(tmp_path / "changed", CODE.replace("1000", "999"))
    other = load_embedding_model(changed, device="cpu", trust_remote_code=True)
    assert other.fingerprint != adapted.fingerprint


@pytest.mark.parametrize("takes_language", [False, True])
def test_only_a_model_with_a_language_option_gets_the_language(tmp_path, monkeypatch, takes_language):
    code = CODE.replace("values, width]", 'values, width * (3 if options.get("language") == "fra" else 1)]')
    if takes_language:
        code = code.replace("    sampling_rate =", '    forward_kwargs = {"language"}\n    sampling_rate =')
    folder = save_code(tmp_path / "model", code)
    adapted = load_embedding_model(folder, device="cpu", trust_remote_code=True)
    encode = Mock(wraps=adapted.model.model.encode_query)
    monkeypatch.setattr(adapted.model.model, "encode_query", encode)
    for language in ("eng", "fra"):
        expected = [0.1**0.5, 0.9**0.5] if takes_language and language == "fra" else [0.5**0.5, 0.5**0.5]
        np.testing.assert_allclose(adapted.encode_text(["rain"], language, 7), [expected], atol=1e-6)
        options = {"prompt": None, "batch_size": 7, "normalize_embeddings": True, "show_progress_bar": False}
        assert encode.call_args.kwargs == options | ({"language": language} if takes_language else {})


def test_embedding_gemma2_embeds_all_of_a_long_recording_with_its_prompts(tmp_path):
    pytest.importorskip("torchvision")
    folder = str(save_gemma2(tmp_path))
    embedder = SentenceEmbedder(folder, "cpu")
    assert (embedder.sampling_rate, embedder.chunk_seconds) == (16_000, 30)
    theirs = SentenceTransformer(folder, device="cpu")
    clips = [{"array": clip, "sampling_rate": 16_000} for clip in CLIPS]
    audio = embedder.encode_audio(CLIPS, 16_000)
    np.testing.assert_allclose(audio, theirs.encode_document(clips), atol=1e-6)
    np.testing.assert_allclose(embedder.encode_text(TEXTS[:2]), theirs.encode_query(TEXTS[:2]), atol=1e-6)

    other = SentenceEmbedder(folder, "cpu", audio_prompt="task: classification | query: ")
    expected = theirs.encode(clips, prompt="task: classification | query: ")
    np.testing.assert_allclose(other.encode_audio(CLIPS, 16_000), expected, atol=1e-6)
    assert np.abs(expected - audio).max() > 1e-2
    assert other.fingerprint != embedder.fingerprint

    sound = builders.noise(40 * 16_000)
    adapted = load_embedding_model(embedder)
    (chunks,) = adapted.chunk_embeddings([Recording(sound, 16_000, "clip")])
    np.testing.assert_allclose(chunks.embeds[1], embedder.encode_audio([sound[-480_000:]], 16_000)[0], atol=1e-6)


def test_inputs_of_different_lengths_are_not_padded(tmp_path, monkeypatch):
    embedder = SentenceEmbedder(str(save_code(tmp_path / "model")), "cpu", trust_remote_code=True)
    batches, encode_document = [], embedder.model.encode_document
    monkeypatch.setattr(
        embedder.model,
        "encode_document",
        lambda clips, **options: batches.append((len(clips), options)) or encode_document(clips, **options),
    )
    for encode, inputs in ((embedder.encode_text, TEXTS[:2]), (embedder.encode_audio, CLIPS)):
        options = [32_000] if inputs is CLIPS else []
        together, alone = encode(inputs, *options, batch_size=2), [encode([one], *options)[0] for one in inputs]
        np.testing.assert_allclose(together, alone, atol=1e-6)
    options = {"prompt": None, "batch_size": 2, "normalize_embeddings": True, "show_progress_bar": False}
    assert batches[:2] == [(2, options), (1, options)]  # the clips of one length are a batch


def test_a_model_without_a_sampling_rate_is_refused(tmp_path):
    folder = save_code(tmp_path / "model", CODE.replace("sampling_rate", "rate"))
    with pytest.raises(ValueError, match="sampling rate"):
        SentenceEmbedder(str(folder), "cpu", trust_remote_code=True)


def test_a_text_model_is_refused(tmp_path, sources):
    folder = save_sentence_model(tmp_path / "st", [Transformer(str(sources / "bert")), Pooling(24)])
    with pytest.raises(ValueError, match="st embeds text, not audio; pass a model for audio and text"):
        load_embedding_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (NameError("name 'tvF' is not defined"), "name 'tvF' is not defined"),
        (ImportError("\nX requires the Torchvision library. See\nhttps://"), "X requires the Torchvision library"),
    ],
)
def test_a_missing_library_is_named_in_one_sentence(tmp_path, sources, monkeypatch, error, cause):
    folder = save_kind("prompts", tmp_path / "model", sources)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("sentence_transformers.SentenceTransformer.__init__", fail)
    with pytest.raises(ImportError) as raised:
        load_embedding_model(folder, device="cpu")
    needed = f"requires a library that is not installed ({cause})"
    assert str(raised.value) == f'{folder} {needed}: pip install "supclap[sentence-transformers]" torchvision'


def pe_audio(folder):
    """Save a tiny PE-AV audio-text model."""
    text = {"model_type": "modernbert", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": 0}
    dac = {"encoder_hidden_size": 4, "downsampling_ratios": [4, 8, 60], "codebook_dim": 8, "hidden_size": 32}
    audio = {"dac_config": dac, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    audio |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("pe_audio", text_config=text, audio_config=audio)).eval()
    torch.nn.init.normal_(model.text_model.final_norm.weight)
    model.save_pretrained(folder)
    return model


def add_video(folder):
    """Turn a saved audio-text model into the layout of the published models with video."""
    config = json.loads((folder / "config.json").read_text())
    video = {"audio_config": config["audio_config"], "model_type": "pe_audio_video_encoder"}
    fields = {"model_type": "pe_audio_video", "text_config": config["text_config"], "audio_video_config": video}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {"video_plus_text_head.proj.weight": torch.ones(1), "audio_plus_text_logit_bias": torch.ones(1)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name if name.startswith("text_model.") else f"audio_model.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("has_video", [False, True])
@torch.no_grad()
def test_pe_av_embeds_the_state_before_the_final_norm(tmp_path, monkeypatch, has_video):
    model = pe_audio(tmp_path)
    PeAudioProcessor(PeAudioFeatureExtractor(), builders.bert_tokenizer()).save_pretrained(tmp_path)
    if has_video:
        add_video(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(importlib.import_module("pe_av"), "NAME", str(tmp_path))
    adapted = load_embedding_model("pe_av:load")
    assert (adapted.sampling_rate_hz, adapted.chunk_seconds, adapted.dtype) == (48_000, 30, "float32")

    extract, audio = PeAudioFeatureExtractor(), adapted.encode_audio(CLIPS, 8)
    for clip, found in zip(CLIPS, audio, strict=True):
        inputs = extract([clip], sampling_rate=48_000, padding=True, return_tensors="pt")
        expected = torch.nn.functional.normalize(model.get_audio_embeds(**inputs), dim=-1)[0]
        np.testing.assert_allclose(found, expected, atol=1e-5)

    texts, states = adapted.encode_text(TEXTS, "eng", 2), []
    model.text_model.layers[-1].register_forward_hook(lambda module, args, state: states.append(state))
    for text, found in zip(TEXTS, texts, strict=True):
        words = builders.bert_tokenizer()(text, return_tensors="pt")
        model.text_model(words["input_ids"], words["attention_mask"])
        expected = torch.nn.functional.normalize(model.text_audio_head(states[-1][:, 0]), dim=-1)[0]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_pe_av_without_its_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    pe_audio(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["audio_head.proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="audio_head"):
        importlib.import_module("pe_av").PeAudio(str(tmp_path))
