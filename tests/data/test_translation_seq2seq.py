"""Translation with all kinds of seq2seq models and their ways to select languages."""

import json
import re
from pathlib import Path

import builders
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from translation_models import save, save_nllb, seq2seq_config

from modeling_supclap.datasets_scripts.translation import Seq2SeqTranslator

TEXTS = ["a dog barks", "a dog barks while the rain falls", "rain"]


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    return save_nllb(tmp_path_factory.mktemp("nllb"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """SentencePiece model and vocabulary, as in M2M100 and Marian."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "captions.txt").write_text("\n".join(builders.CAPTIONS.values()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "captions.txt"),
        model_prefix=str(folder / "pieces"),
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(str(folder / "pieces.model"))
    names = ["<s>", "<pad>", "</s>", "<unk>", *map(processor.id_to_piece, range(processor.get_piece_size()))]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return str(folder / "vocab.json"), str(folder / "pieces.model")


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """T5 with a token for French, as in MADLAD-400."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<2fr>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(builders.CAPTIONS.values(), trainer)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(fast), decoder_start_token_id=0, **sizes))
    return save(tmp_path_factory.mktemp("t5"), model, fast)


def naive_greedy(folder, text, source, target):
    """Decode greedily, one text at a time and without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(folder, src_lang=source)
    model = M2M100ForConditionalGeneration.from_pretrained(folder).eval()
    inputs = tokenizer(text, return_tensors="pt")
    tokens = [model.config.decoder_start_token_id, tokenizer.convert_tokens_to_ids(target)]
    for _ in range(min(2 * inputs["input_ids"].shape[1] + 15, 126)):
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokenizer.decode(tokens[2:], skip_special_tokens=True).strip()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("source", "target", "codes"),
    [
        ("eng", "fra", ("eng_Latn", "fra_Latn")),
        ("jpn", "zho", ("jpn_Jpan", "zho_Hans")),
        ("fra", "por", ("fra_Latn", "por_Latn")),
    ],
)
def test_greedy_translation_is_the_likeliest_token_each_time(nllb, text, source, target, codes):
    translator = Seq2SeqTranslator(nllb, num_beams=1)
    assert translator.translate([text], source, target) == [naive_greedy(nllb, text, *codes)]


def test_batch_size_beams_and_languages_are_used(nllb):
    translator = Seq2SeqTranslator(nllb, num_beams=4)
    french = translator.translate(TEXTS, "eng", "fra")
    translator._load("eng", "fra")[2].generation_config.do_sample = True  # as in some checkpoints
    assert translator.translate(TEXTS, "eng", "fra") == french
    assert len(set(french)) == len(TEXTS)
    assert translator.translate(TEXTS[::-1], "eng", "fra") == french[::-1]
    others = [
        translator.translate(TEXTS, "eng", "deu"),
        translator.translate(TEXTS, "cat", "fra"),
        Seq2SeqTranslator(nllb, num_beams=1).translate(TEXTS, "eng", "fra"),
    ]
    assert all(other != french for other in others)
    assert not any("_Latn" in text or "</s>" in text for text in french)


@pytest.mark.parametrize(
    ("has_gpu", "device", "chosen"), [(True, None, "cuda"), (False, None, "cpu"), (True, "cpu", "cpu")]
)
def test_a_gpu_is_used_if_there_is_one(monkeypatch, has_gpu, device, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert Seq2SeqTranslator("some/model", device=device).device == chosen


def test_weights_may_be_of_another_type(nllb):
    translator = Seq2SeqTranslator(nllb, dtype="bfloat16")
    assert len(translator.translate(TEXTS, "eng", "fra")) == 3
    assert next(translator._load("eng", "fra")[2].parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(("language", "message"), [("swe", "'swe'"), ("zzz", "'zzz'")])
def test_a_language_that_the_model_lacks_is_refused_before_it_is_needed(nllb, language, message):
    for pair in (("eng", language), (language, "eng")):
        with pytest.raises(ValueError, match=message):
            Seq2SeqTranslator(nllb).check(*pair)
    Seq2SeqTranslator(nllb).check("eng", "zho")


def test_a_caption_that_is_too_long_is_skipped(nllb, caplog):
    translator = Seq2SeqTranslator(nllb)
    assert [bool(text) for text in translator.translate(["dog " * 125, "dog " * 126], "eng", "fra")] == [True, False]
    long = "dog " * 300
    short = translator.translate(["rain", "a dog"], "eng", "fra")
    assert translator.translate([long, "rain", long, "a dog"], "eng", "fra") == ["", short[0], "", short[1]]
    assert translator.translate([long], "eng", "fra") == [""]
    assert re.search(r"nllb.*\b128\b.*'dog dog", caplog.text)


def test_m2m100_uses_short_codes(pieces, tmp_path):
    tokenizer = M2M100Tokenizer(*pieces)
    torch.manual_seed(0)
    config = seq2seq_config(M2M100Config, tokenizer.encoder_size + 110)
    translator = Seq2SeqTranslator(save(tmp_path, M2M100ForConditionalGeneration(config), tokenizer))
    assert translator._languages("eng", "cat") == ("{text}", {"forced_bos_token_id": tokenizer.get_lang_id("ca")})
    assert translator._load("eng", "cat")[1].src_lang == "en"
    assert not any(text.startswith("__ca__") for text in translator.translate(TEXTS, "eng", "cat"))
    translator.check("jpn", "eng")
    assert translator._load("jpn", "eng")[1].src_lang == "ja"


def test_mbart_tokenizers_use_codes_with_a_country():
    codes = {"en_XX": 5, "fr_XX": 6, "de_DE": 7, "zh_CN": 8}
    for language, code in (("eng", "en_XX"), ("deu", "de_DE"), ("zho", "zh_CN")):
        assert Seq2SeqTranslator("m")._code(codes, language) == code
    assert Seq2SeqTranslator("m")._code({"zho_Hant": 1, "zho_Hans": 2}, "zho") == "zho_Hans"  # of NLLB
    with pytest.raises(ValueError, match="fr_CA, fr_XX"):
        Seq2SeqTranslator("m")._code({"fr_XX": 1, "fr_CA": 2}, "fra")


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_models_that_know_one_pair_are_named_by_pattern(pieces, tmp_path):
    for pair in ("en-fr", "en-de"):
        tokenizer = MarianTokenizer(pieces[1], pieces[1], vocab=pieces[0], source_lang="en", target_lang=pair[3:])
        torch.manual_seed(len(pair) + ord(pair[3]))
        save(tmp_path / f"opus-{pair}", MarianMTModel(seq2seq_config(MarianConfig, len(tokenizer))), tokenizer)
    translator = Seq2SeqTranslator(str(tmp_path / "opus-{source}-{target}"))
    french, german = translator.translate(TEXTS, "eng", "fra"), translator.translate(TEXTS, "eng", "deu")
    assert french != german
    assert Seq2SeqTranslator(str(tmp_path / "opus-en-fr")).translate(TEXTS, "eng", "fra") == french
    translator.check("eng", "jpn")  # a missing model is detected when it is loaded
    assert translator._model_name("eng", "swe").endswith("opus-en-sv")  # not one of the eight


@pytest.mark.parametrize(
    ("tokens", "template"),
    [([">>deu<<", ">>fra<<"], ">>fra<< {text}"), ([">>fr<<"], ">>fr<< {text}"), ([">>deu<<"], "")],
)
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_token_of_multilingual_opus_models_selects_the_language(pieces, tmp_path, tokens, template):
    vocabulary = json.loads(Path(pieces[0]).read_text())
    vocabulary |= {token: len(vocabulary) + number for number, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = MarianTokenizer(pieces[1], pieces[1], vocab=str(tmp_path / "vocab.json"))
    model = MarianMTModel(seq2seq_config(MarianConfig, len(tokenizer)))
    translator = Seq2SeqTranslator(save(tmp_path / "opus", model, tokenizer))
    if template:
        assert translator._languages("eng", "fra") == (template, {})
    else:
        with pytest.raises(ValueError, match="'fra'"):
            translator.check("eng", "fra")


def test_a_token_or_a_prompt_selects_the_language(t5):
    assert Seq2SeqTranslator(t5)._languages("eng", "fra") == ("<2fr> {text}", {})
    with pytest.raises(ValueError, match=r"'deu'.*\{source\}"):
        Seq2SeqTranslator(t5).check("eng", "deu")
    prompted = Seq2SeqTranslator(t5, prompt="translate {source} to {target}: {text}")
    assert prompted._languages("eng", "deu") == ("translate English to German: {text}", {})
    assert prompted.translate(["a {dog} {source}"], "eng", "deu") != prompted.translate(["a {dog}"], "eng", "deu")
    with pytest.raises(ValueError, match=r"prompt.*'translate'.*\{text\}"):
        Seq2SeqTranslator(t5, prompt="translate")
