"""Text encoders of sentence-transformers, compared with the original library."""

import json
import shutil
from typing import Any

import builders
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from modeling_supclap import CEDModel, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.recipes.options import ModelArguments
from modeling_supclap.recipes.train_supclap import build_model

sentence_transformers = pytest.importorskip("sentence_transformers", reason="the extra is not installed")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

TEXTS = list(builders.CAPTIONS.values())
PROMPT = "the rain: "


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ced")
    CEDModel(builders.ced_config()).save_pretrained(folder)
    return folder


def save_encoder(folder, pooling, layers=(), prompts=None):
    """Save a tiny BERT in the layout of sentence-transformers."""
    torch.manual_seed(0)
    config = BertConfig(**{**builders.bert_config(), "initializer_range": 0.3})
    BertModel(config).eval().save_pretrained(folder / "bert")
    builders.bert_tokenizer().save_pretrained(folder / "bert")
    tower = modules.Transformer(str(folder / "bert"), max_seq_length=12)
    pool = modules.Pooling(24, pooling_mode=pooling)
    encoder = sentence_transformers.SentenceTransformer(modules=[tower, pool, *layers], prompts=prompts, device="cpu")
    encoder.save(str(folder / "encoder"))
    return encoder, folder / "encoder"


def sentence_vectors(model, processor):
    """Return the text embeddings before the projection."""
    kept = []
    handle = model.text_projection.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        model.get_text_features(**processor(text=TEXTS, return_tensors="pt"))
    handle.remove()
    return kept[0].numpy()


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
def test_the_pooling_is_the_folders_own(tmp_path, audio, pooling):
    encoder, folder = save_encoder(tmp_path, pooling)
    model, processor = (SupCLAPModel.from_encoders(audio, folder), SupCLAPProcessor.from_encoders(audio, folder))
    np.testing.assert_allclose(sentence_vectors(model, processor), encoder.encode(TEXTS), atol=1e-5)


def test_labse_is_its_dense_layer_and_norm_too(tmp_path, audio):
    torch.manual_seed(1)
    layers = [modules.Dense(24, 20), modules.Normalize()]  # with tanh
    encoder, folder = save_encoder(tmp_path, "cls", layers)
    model, processor = (SupCLAPModel.from_encoders(audio, folder), SupCLAPProcessor.from_encoders(audio, folder))
    expected = encoder.encode(TEXTS)
    np.testing.assert_allclose(sentence_vectors(model, processor), expected, atol=1e-5)

    model.save_pretrained(tmp_path / "model")
    loaded = SupCLAPModel.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(sentence_vectors(loaded, processor), expected, atol=1e-5)

    explicit = SupCLAPModel.from_encoders(audio, folder, text_pooling="mean")
    assert len(explicit.text_dense) == 0
    assert np.abs(sentence_vectors(explicit, processor)).max() > 1

    encoders = {"audio_encoder": str(audio), "text_encoder": str(folder)}
    trained = build_model(ModelArguments(**encoders), processor)
    np.testing.assert_allclose(sentence_vectors(trained, processor), expected, atol=1e-5)
    trained = build_model(ModelArguments(**encoders, text_pooling="mean"), processor)
    assert len(trained.text_dense) == 0


@pytest.mark.parametrize("activation", ["Identity", "ReLU", "GELU", "Sigmoid"])
def test_dense_layers_have_their_activation(tmp_path, audio, activation):
    torch.manual_seed(1)
    layers = [
        modules.Dense(24, 30, activation_function=getattr(torch.nn, activation)()),
        modules.Dense(30, 9, bias=False),
    ]
    encoder, folder = save_encoder(tmp_path, "mean", layers)
    model, processor = (SupCLAPModel.from_encoders(audio, folder), SupCLAPProcessor.from_encoders(audio, folder))
    np.testing.assert_allclose(sentence_vectors(model, processor), encoder.encode(TEXTS), atol=1e-5)
    assert not model.config.text_normalize


def test_e5_has_a_prompt_and_a_limit(tmp_path, audio):
    encoder, folder = save_encoder(tmp_path, "mean", [modules.Normalize()], prompts={"query": PROMPT, "passage": "a "})
    model, processor = (SupCLAPModel.from_encoders(audio, folder), SupCLAPProcessor.from_encoders(audio, folder))
    expected = encoder.encode(TEXTS, prompt=PROMPT)
    np.testing.assert_allclose(sentence_vectors(model, processor), expected, atol=1e-5)
    assert processor.caption_prefix == PROMPT
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "default_prompt_name": "passage"}))
    assert SupCLAPProcessor.from_encoders(audio, folder).caption_prefix == "a "
    settings.write_text("{}")
    assert SupCLAPProcessor.from_encoders(audio, folder).caption_prefix == ""
    assert len(processor(text="dog " * 50)["input_ids"][0]) == 12

    wide = SupCLAPProcessor.from_encoders(audio, folder, model_max_length=20)
    assert len(wide(text="dog " * 50)["input_ids"][0]) == 20
    plain = SupCLAPProcessor.from_encoders(audio, folder, caption_prefix="")
    np.testing.assert_allclose(sentence_vectors(model, plain), encoder.encode(TEXTS, prompt=""), atol=1e-5)


def test_the_file_of_older_versions_is_read(tmp_path, audio):
    encoder, folder = save_encoder(tmp_path, "cls")
    old = {"word_embedding_dimension": 24, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(old))
    model, processor = (SupCLAPModel.from_encoders(audio, folder), SupCLAPProcessor.from_encoders(audio, folder))
    np.testing.assert_allclose(sentence_vectors(model, processor), encoder.encode(TEXTS), atol=1e-5)


def test_another_pooling_is_refused_unless_one_is_chosen(tmp_path, audio):
    _, folder = save_encoder(tmp_path, "max")
    with pytest.raises(ValueError, match="text_pooling="):
        SupCLAPModel.from_encoders(audio, folder)
    assert SupCLAPModel.from_encoders(audio, folder, text_pooling="cls").config.text_pooling == "cls"


DENSE: dict[str, Any] = {"in_features": 24, "out_features": 9, "activation_function": "torch.nn.Tanh"}


@pytest.mark.parametrize(
    ("added", "settings"),
    [
        ([{"type": "x.LSTM", "path": ""}], {}),
        ([{"type": "x.Transformer", "path": "2_Transformer"}], {}),
        ([{"type": "x.Dense", "path": "2_Dense"}], {"2_Dense": {**DENSE, "activation_function": "torch.nn.Mish"}}),
        ([{"type": "x.Dense", "path": "2_Dense"}], {"2_Dense": {**DENSE, "use_residual": True}}),
        ([{"type": "x.Normalize", "path": "2"}, {"type": "x.Dense", "path": "3_Dense"}], {"3_Dense": DENSE}),
        ([], {"1_Pooling": {"pooling_mode_cls_token": True, "include_prompt": False}}),
        ([], {"1_Pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}),
    ],
    ids=str,
)
def test_another_module_is_refused_unless_a_pooling_is_chosen(tmp_path, audio, added, settings):
    _, folder = save_encoder(tmp_path, "cls")
    path = folder / "modules.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), *added]))
    for name, content in settings.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="text_pooling="):
        SupCLAPModel.from_encoders(audio, folder)
    assert SupCLAPModel.from_encoders(audio, folder, text_pooling="cls").config.text_pooling == "cls"


def test_weights_that_are_missing_are_named(tmp_path, audio):
    _, folder = save_encoder(tmp_path, "cls", [modules.Dense(24, 20)])
    (dense,) = folder.glob("*_Dense")
    (dense / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=dense.name):
        SupCLAPModel.from_encoders(audio, folder)
    shutil.rmtree(dense)
