"""Pretrained encoders from folders: weights, tokenizers, and errors for missing files."""

import logging

import builders
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

from modeling_supclap import CEDFeatureExtractor, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.joining import load_tokenizer, load_tower

TEXTS = list(builders.CAPTIONS.values())


def test_weights_that_are_missing_are_named(tmp_path):
    config = BertConfig(**builders.bert_config())
    BertModel(BertConfig(**builders.bert_config(num_hidden_layers=1))).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertModel.*'encoder\.layer\.1"):
        load_tower("text", str(tmp_path))


def test_a_pooler_that_is_left_out_is_not_reported_and_other_weights_are(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = BertModel(BertConfig(**builders.bert_config()))
    model.save_pretrained(tmp_path / "plain")
    tower = load_tower("text", str(tmp_path / "plain"), "mean")
    assert tower.pooler is None
    assert "REPORT" not in caplog.text
    weights = {**model.state_dict(), "encoder.layer.0.weight_scale": torch.ones(1)}
    model.save_pretrained(tmp_path / "scaled", state_dict=weights)
    load_tower("text", str(tmp_path / "scaled"), "mean")
    assert "weight_scale" in caplog.text
    assert "pooler" in caplog.text


def test_the_error_of_a_tokenizer_without_class_names_the_folder(tmp_path):
    builders.nllb_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "m2m_100"}')
    with pytest.raises(OSError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_and_another_file_are_refused_in_one_line(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("x")
    for name, found in (("model", "weights.gguf"), ("notes.txt", "SentencePiece")):
        with pytest.raises(OSError, match=found) as error:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_bare_sentencepiece_file_is_nllbs_tokenizer(tmp_path):
    """Compare with SentencePiece. fairseq adds 1 to its token ids, and adds the languages after them."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_prefix=str(tmp_path / "bare"),
        model_type="bpe",
        vocab_size=200,
        character_coverage=1.0,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bare.model"))
    tokenizer = load_tokenizer(tmp_path / "bare.model")
    processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
    processor.save_pretrained(tmp_path / "saved")

    languages = {"eng": 46, "fra": 56}  # their indices among the 202 languages of NLLB-200
    for each in (processor, SupCLAPProcessor.from_pretrained(tmp_path / "saved")):
        for text in (*TEXTS, "a  dog ﬁne", "Ａ rain"):
            for language, place in languages.items():
                expected = [pieces.vocab_size() + 1 + place, *[3 if i == 0 else i + 1 for i in pieces.encode(text)], 2]
                assert each(text=text, language=language)["input_ids"] == [expected], text
    assert len(tokenizer) == pieces.vocab_size() + 1 + 202 + 1


def test_the_encoders_of_a_supclap_model_start_a_new_one(tmp_path):
    """The encoders keep their weights; the projections are new. The processor is that of the model."""
    builders.save_supclap(tmp_path)
    trained = SupCLAPModel.from_pretrained(tmp_path)
    new = SupCLAPModel.from_encoders(str(tmp_path), str(tmp_path), projection_dim=6)
    for kind in ("audio", "text"):
        expected = getattr(trained, f"{kind}_model").state_dict()
        assert getattr(new, f"{kind}_model").state_dict().keys() == expected.keys()
        for name, weight in getattr(new, f"{kind}_model").state_dict().items():
            assert torch.equal(weight, expected[name]), name
    assert new.config.projection_dim == 6

    processor = SupCLAPProcessor.from_encoders(str(tmp_path), str(tmp_path))
    inputs = {"audio": builders.noise(16000), "text": TEXTS[0], "sampling_rate": 16000}
    expected = SupCLAPProcessor.from_pretrained(tmp_path)(**inputs, return_tensors="pt")
    for name, value in processor(**inputs, return_tensors="pt").items():
        assert torch.equal(value, expected[name]), name
    with pytest.raises(ValueError, match=r"text_pooling is 'cls', .* trained with 'mean'; pass 'mean'"):
        SupCLAPModel.from_encoders(str(tmp_path), str(tmp_path), text_pooling="cls")
    with pytest.raises(TypeError, match=r"no option 'poolin'; it has .*attn_implementation, .*text_pooling"):
        SupCLAPModel.from_encoders(str(tmp_path), str(tmp_path), text_pooling="mean", zooling="x", poolin="cls")
    assert not new.training
    assert {weight.dtype for weight in new.parameters()} == {torch.float32}


def test_an_encoder_in_half_precision_is_loaded_in_float32(tmp_path):
    BertModel(BertConfig(**builders.bert_config())).half().save_pretrained(tmp_path)
    tower = load_tower("text", str(tmp_path))
    assert {weight.dtype for weight in tower.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "example"), [("audio", "mispeech/ced-base"), ("text", "sentence-transformers/LaBSE")]
)
def test_what_is_no_encoder_is_named_with_advice(tmp_path, kind, example):
    with pytest.raises(OSError, match=f"cannot load the {kind} tower '{tmp_path}/none'; .* such as {example}"):
        load_tower(kind, f"{tmp_path}/none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} is not a checkpoint: .* model_type"):
        load_tower(kind, str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a LoRA adapter without an encoder; merge it"):
        load_tower(kind, str(tmp_path))


def test_the_report_of_transformers_is_shown_unless_it_lists_only_the_pooler_that_is_left_out(tmp_path, capsys):
    config = BertConfig(**builders.bert_config())
    BertModel(config).save_pretrained(tmp_path / "encoder")
    BertForMaskedLM(config).save_pretrained(tmp_path / "head")
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    try:
        load_tower("text", str(tmp_path / "encoder"), "mean")
        assert shown == []
        load_tower("text", str(tmp_path / "head"), "mean")
        assert "LOAD REPORT" in shown[0]
        assert "cls.predictions.bias" in shown[0]
        assert len(shown) == 1
    finally:
        logger.removeHandler(handler)
