"""Pretrained encoders from folders: weights, tokenizers, and errors for missing files."""

import builders
import pytest
from transformers import BertConfig, BertModel

from modeling_supclap import CEDFeatureExtractor, SupCLAPProcessor
from modeling_supclap.joining import load_tokenizer, load_tower

TEXTS = list(builders.CAPTIONS.values())


def test_weights_that_are_missing_are_named(tmp_path):
    config = BertConfig(**builders.bert_config())
    BertModel(BertConfig(**builders.bert_config(num_hidden_layers=1))).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertModel.*'encoder\.layer\.1"):
        load_tower("text", str(tmp_path))


def test_the_error_of_a_tokenizer_without_class_names_the_folder(tmp_path):
    builders.nllb_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "m2m_100"}')
    with pytest.raises(OSError, match="tokenizer"):
        load_tokenizer(tmp_path)


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
