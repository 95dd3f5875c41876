"""Processor: ISO language codes for all tokenizers, errors that name the caption, and lossless saving."""

import copy
import json
import unicodedata
from collections import Counter
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer, BertTokenizer, ByT5Tokenizer, NllbTokenizer

from modeling_supclap import CEDFeatureExtractor, MSCLAPFeatureExtractor, SupCLAPProcessor, processing_supclap
from modeling_supclap.encoding import encode_text
from modeling_supclap.waveform import resample

TEXTS = list(builders.CAPTIONS.values())
LANGUAGES = list(builders.CAPTIONS)
CODES = ["eng_Latn", "fra_Latn", "deu_Latn", "spa_Latn", "nld_Latn", "cat_Latn", "jpn_Jpan", "zho_Hans"]


def test_audio_and_text_in_one_call(processor):
    clips = [builders.noise(16000), builders.noise(8000)]
    inputs = processor(audio=clips, sampling_rate=16000, text=TEXTS[:3], language="eng", return_tensors="pt")
    assert (
        set(inputs)
        == {"input_features", "audio_attention_mask", "input_ids", "attention_mask", "token_type_ids"}
        == set(processor.model_input_names)
    )
    assert inputs["input_features"].shape == (2, 64, 101)
    assert len(inputs["input_ids"]) == 3
    expected = processor.tokenizer(TEXTS[:3], padding=True, return_tensors="pt")
    for name, value in expected.items():
        assert torch.equal(inputs[name], value), name


def test_only_audio_or_only_text(processor):
    audio = processor(audio=builders.noise(4000), sampling_rate=16000)
    assert isinstance(audio["input_features"], np.ndarray)
    assert "input_ids" not in audio
    assert set(processor(text="a dog")) == {"input_ids", "attention_mask", "token_type_ids"}
    with pytest.raises(ValueError, match=r"audio.*text"):
        processor()


def test_each_language_as_the_tokenizer_would(sonar_processor, nllb_tokenizer):
    for text, language, code in zip(TEXTS, LANGUAGES, CODES, strict=True):
        nllb_tokenizer.src_lang = code
        expected = nllb_tokenizer(text).input_ids
        for name in (language, code):
            assert sonar_processor(text=text, language=name)["input_ids"] == [expected]
    nllb_tokenizer.src_lang = "eng_Latn"


def test_mixed_languages_in_one_batch(sonar_processor):
    inputs = sonar_processor(text=TEXTS, language=LANGUAGES, return_tensors="pt")
    first = sonar_processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][:, 0].tolist())
    assert first == CODES
    for row, mask, text, language in zip(inputs["input_ids"], inputs["attention_mask"], TEXTS, LANGUAGES, strict=True):
        assert row[mask.bool()].tolist() == sonar_processor(text=text, language=language)["input_ids"][0]
        assert (row[~mask.bool()] == sonar_processor.tokenizer.pad_token_id).all()


def test_other_languages_of_the_tokenizer():
    tokenizer = builders.nllb_tokenizer()
    tokenizer.add_tokens(["ita_Latn", "ace_Arab", "ace_Latn"], special_tokens=True)
    processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
    ids = processor(text=["un cane", "a dog"], language=["ita", "eng"])["input_ids"]
    assert tokenizer.convert_ids_to_tokens([row[0] for row in ids]) == ["ita_Latn", "eng_Latn"]
    with pytest.raises(ValueError, match="no language 'tlh'"):
        processor(text="Qapla", language="tlh")  # Klingon: a code of ISO 639-3, not of NLLB
    with pytest.raises(ValueError, match=r"ace_Arab.*ace_Latn"):
        processor(text="asee", language="ace")  # two scripts


def test_tokenizer_setting_stays_and_is_the_default(sonar_processor):
    tokenizer = sonar_processor.tokenizer
    tokenizer.src_lang = "spa_Latn"
    try:
        sonar_processor(text=TEXTS, language=LANGUAGES)
        assert tokenizer.src_lang == "spa_Latn"
        spanish = tokenizer.convert_tokens_to_ids("spa_Latn")
        assert sonar_processor(text="un perro")["input_ids"][0][0] == spanish
        assert sonar_processor(text="un perro", language="fra")["input_ids"][0][0] != spanish
        assert tokenizer("un perro").input_ids[0] == spanish
    finally:
        tokenizer.src_lang = "eng_Latn"


def test_left_padding(nllb_tokenizer):
    tokenizer = builders.nllb_tokenizer()
    tokenizer.padding_side = "left"
    inputs = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)(text=["un", TEXTS[1]], language="fra")
    french = tokenizer.convert_tokens_to_ids("fra_Latn")
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        assert ids[mask.index(1)] == french


def test_spaces_at_the_ends_add_no_token(sonar_processor):
    assert sonar_processor(text="  a dog \n")["input_ids"] == sonar_processor(text="a dog")["input_ids"]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("A dog barks , loudly.", "a dog barks loudly"),
        ('"Rain" (heavy); wind: thunder!', "rain heavy wind thunder"),
        ("L'eau coule, l'arc-en-ciel*|?", "l'eau coule l'arc-en-ciel"),
        ("狗叫，下雨。！？；：、", "狗叫 下雨"),
    ],
)
def test_plain_captions_are_those_of_ml_clap(sonar_processor, given, plain, tmp_path):
    lowering = SupCLAPProcessor(CEDFeatureExtractor(), sonar_processor.tokenizer, plain_captions=True)
    lowering.save_pretrained(tmp_path)
    for each in (lowering, SupCLAPProcessor.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)):
        assert each(text=given)["input_ids"] == sonar_processor(text=plain)["input_ids"]
    assert sonar_processor(text=given)["input_ids"] != sonar_processor(text=plain)["input_ids"]
    with pytest.raises(ValueError, match="caption 0"):
        lowering(text="?!")


def test_a_prefix_is_added_to_every_caption(processor, tmp_path):
    SupCLAPProcessor(CEDFeatureExtractor(), processor.tokenizer, caption_prefix="rain: ").save_pretrained(tmp_path)
    found = SupCLAPProcessor.from_pretrained(tmp_path)(text=["a dog", "wind"])
    assert found["input_ids"] == processor(text=["rain: a dog", "rain: wind"])["input_ids"]


@pytest.mark.parametrize("language", ["xyz", "rus_Cyrl", "fr"])
def test_missing_language_names_those_that_exist(sonar_processor, language):
    with pytest.raises(ValueError, match=f"'{language}'.*zho"):
        sonar_processor(text=TEXTS[:2], language=["eng", language])


def test_language_tokens_of_another_kind_are_not_ignored():
    tokenizer = builders.nllb_tokenizer()
    bare = NllbTokenizer(vocab=tokenizer.get_vocab(), merges=[], extra_special_tokens=["__en__"], src_lang="__en__")
    with pytest.raises(ValueError, match="'eng'"):
        SupCLAPProcessor(CEDFeatureExtractor(), bare)(text="a dog", language="eng")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "caption"),
        ("", "caption 0.*''"),
        (["a dog", " \n"], r"caption 1.*' \\n'"),
        ({"eng": ["a dog"], "fra": ["un chien"]}, "'eng', 'fra'"),
        (["a dog", None], "caption 1 is None"),
        (["a dog", ["a", "cat"]], r"caption 1 is \['a', 'cat'\]"),
        (["a dog", "a \ud800 cat"], r"caption 1.*'a \\ud800 cat'"),
    ],
)
def test_unusable_captions_are_named(processor, text, message):
    with pytest.raises(ValueError, match=message):
        processor(text=text)


def test_one_language_or_one_for_each(processor):
    with pytest.raises(ValueError, match=r"\b2\b.*language.*\b3\b"):
        processor(text=TEXTS[:3], language=["eng", "fra"])


def test_unusable_clips_are_named(processor):
    with pytest.raises(ValueError, match="sampling_rate"):
        processor(audio=builders.noise(4000), text="a dog")
    with pytest.raises(ValueError, match="clip 1"):
        processor(audio=[builders.noise(4000), builders.noise(10)], sampling_rate=16000)


def test_long_captions_are_cut_and_keep_their_end(processor, sonar_processor):
    text = "dog " * 2000
    limits = {64: processor, 514: sonar_processor}
    for limit, each in limits.items():
        ids = each(text=text)["input_ids"][0]
        assert len(ids) == limit
        assert ids[-1] in (each.tokenizer.sep_token_id, each.tokenizer.eos_token_id)
    assert len(processor(text=text, max_length=9)["input_ids"][0]) == 9
    unlimited = BertTokenizer(vocab=processor.tokenizer.get_vocab())
    assert len(SupCLAPProcessor(CEDFeatureExtractor(), unlimited)(text=text)["input_ids"][0]) == 512
    assert len(sonar_processor(text=text, truncation=False)["input_ids"][0]) > 2000


@pytest.mark.parametrize("padding", [True, "max_length"])
def test_captions_that_are_cut_are_counted_once(processor, caplog, monkeypatch, padding):
    monkeypatch.setattr(processing_supclap, "_cut_limits", set())
    monkeypatch.setattr(processing_supclap, "_captions_before", Counter())
    full = "dog " * 10  # with the tokens of the start and the end
    for texts in ([full] * 3, ["a dog", full, "rain"], [full + "dog", "a dog", full + "a dog"], [full + "dog"]):
        processor(text=texts, max_length=12, padding=padding)
    processor(text=full + "dog", truncation=False)
    assert ["2 of the first 9 captions are longer than 12 tokens" in text for text in caplog.messages] == [True]


@pytest.mark.parametrize(("worker", "warns"), [(None, True), (0, True), (1, False)])
def test_only_the_first_worker_of_a_data_loader_counts_them(processor, caplog, monkeypatch, worker, warns):
    monkeypatch.setattr(processing_supclap, "_cut_limits", set())
    info = None if worker is None else SimpleNamespace(id=worker)
    monkeypatch.setattr(processing_supclap, "get_worker_info", lambda: info)
    processor(text=["dog " * 20], max_length=12)
    assert any("are longer than 12 tokens" in text for text in caplog.messages) == warns


def test_composed_and_decomposed_letters_have_the_same_tokens():
    processor = SupCLAPProcessor(CEDFeatureExtractor(), builders.gpt2_tokenizer())
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    texts = ["un pájaro", unicodedata.normalize("NFD", "un pájaro")]
    first, second = processor.tokenizer(texts)["input_ids"]
    assert first != second
    assert processor(text=texts)["input_ids"] == [first, first]


@pytest.mark.parametrize("kind", ["processor", "sonar_processor"])
def test_truncation_of_one_call_is_not_saved(kind, request, tmp_path):
    """A tokenizer stores the options of its last call, and they would be saved in `tokenizer.json`."""
    processor = copy.deepcopy(request.getfixturevalue(kind))
    long = " ".join([TEXTS[0]] * 5)
    expected = processor(text=long)["input_ids"]
    assert len(processor(text=long, max_length=5, padding="max_length")["input_ids"][0]) == 5
    processor.save_pretrained(tmp_path)
    assert SupCLAPProcessor.from_pretrained(tmp_path)(text=long)["input_ids"] == expected
    limited = SupCLAPProcessor.from_pretrained(tmp_path, model_max_length=8)
    assert len(limited(text=long)["input_ids"][0]) == 8


def test_padding_to_a_fixed_length(processor):
    inputs = processor(text=TEXTS[:2], padding="max_length", max_length=20, return_tensors="np")
    assert inputs["input_ids"].shape == (2, 20)
    unlimited = SupCLAPProcessor(CEDFeatureExtractor(), BertTokenizer(vocab=processor.tokenizer.get_vocab()))
    assert np.shape(unlimited(text=TEXTS[:2], padding="max_length", truncation=False)["input_ids"]) == (2, 512)


@pytest.mark.parametrize("kind", ["bert", "nllb"])
def test_saving_and_loading_loses_nothing(tmp_path, kind):
    tokenizer = builders.bert_tokenizer() if kind == "bert" else builders.nllb_tokenizer()
    if kind == "nllb":
        tokenizer.src_lang = "deu_Latn"
    before = SupCLAPProcessor(CEDFeatureExtractor(f_min=20.0), tokenizer)
    before.save_pretrained(tmp_path)
    call = {"audio": builders.noise(9000), "sampling_rate": 44100, "text": TEXTS, "return_tensors": "np"}
    for after in (SupCLAPProcessor.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)):
        assert type(after) is SupCLAPProcessor
        assert after.feature_extractor.to_dict() == before.feature_extractor.to_dict()
        assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()
        for language in (None, LANGUAGES):
            for name, value in before(**call, language=language).items():
                np.testing.assert_array_equal(after(**call, language=language)[name], value, err_msg=name)


def test_stereo_for_clap_is_its_mean():
    processor = SupCLAPProcessor(builders.clap_processor().feature_extractor, builders.bert_tokenizer())
    stereo = np.stack([builders.noise(12_000, seed) for seed in (1, 2)])
    both = processor(audio=[stereo], sampling_rate=16000)["input_features"]
    mono = processor(audio=[stereo.mean(axis=0)], sampling_rate=16000)["input_features"]
    np.testing.assert_array_equal(both, mono)


def test_all_tokenizers_reject_invalid_language_codes(processor):
    with pytest.raises(ValueError, match="'klingon'"):
        processor(text="a dog", language="klingon")


def test_no_text_is_refused(processor):
    with pytest.raises(ValueError, match="None"):
        encode_text(builders.supclap_model(), None, processor)


@pytest.mark.parametrize("kind", ["bert", "nllb"])
@pytest.mark.parametrize("call", [{"max_length": 5}, {"max_length": 9, "padding": "max_length", "truncation": False}])
def test_a_tokenizer_is_saved_without_the_options_of_its_last_call(tmp_path, kind, call):
    """Processors of transformers would cut the audio to that many samples."""
    tokenizer = builders.bert_tokenizer() if kind == "bert" else builders.nllb_tokenizer()
    processor = SupCLAPProcessor(CEDFeatureExtractor(), tokenizer)
    processor(text=TEXTS, **call)
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["truncation"] is saved["padding"] is None
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert not {"max_length", "stride", "truncation_strategy"} & loaded.init_kwargs.keys()


def test_a_folder_of_an_earlier_version_with_such_options_is_repaired(tmp_path):
    processor = SupCLAPProcessor(CEDFeatureExtractor(), builders.bert_tokenizer())
    expected = processor(text=" ".join(TEXTS))["input_ids"]
    processor.save_pretrained(tmp_path)
    processor.tokenizer(TEXTS, truncation=True, max_length=5, padding="max_length")
    processor.tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).init_kwargs["max_length"] == 5
    loaded = SupCLAPProcessor.from_pretrained(tmp_path)
    assert loaded(text=" ".join(TEXTS))["input_ids"] == expected
    loaded.save_pretrained(tmp_path)
    assert "max_length" not in AutoTokenizer.from_pretrained(tmp_path).init_kwargs


def test_audio_is_resampled_as_the_authors_of_the_tower_did(tmp_path):
    """The method is saved; a folder without it, of an earlier version, has the default of its tower."""
    clip = builders.noise(8000)
    for extractor, method in (
        (CEDFeatureExtractor(), "sinc_interp_hann"),
        (MSCLAPFeatureExtractor(), "sinc_interp_hann"),
        (builders.clap_processor().feature_extractor, "kaiser_best"),
        (builders.make_encoder("wav2vec2")[1], "kaiser_best"),
    ):
        default = SupCLAPProcessor(extractor, builders.bert_tokenizer())
        assert default.resampling_method == method
        other = "kaiser_best" if method == "sinc_interp_hann" else "sinc_interp_hann"
        changed = SupCLAPProcessor(extractor, builders.bert_tokenizer(), resampling_method=other)
        changed.save_pretrained(tmp_path)
        loaded = AutoProcessor.from_pretrained(tmp_path)
        assert loaded.resampling_method == other
        for name, each in {method: default, other: loaded}.items():
            found = each.as_waveforms(clip, 8000)[0]
            np.testing.assert_array_equal(found, resample(clip, 8000, extractor.sampling_rate, name))

        content = json.loads((tmp_path / "processor_config.json").read_text(encoding="utf-8"))
        del content["resampling_method"]
        (tmp_path / "processor_config.json").write_text(json.dumps(content), encoding="utf-8")
        assert SupCLAPProcessor.from_pretrained(tmp_path).resampling_method == method
    with pytest.raises(ValueError, match=r"'soxr'.*kaiser_best"):
        SupCLAPProcessor(CEDFeatureExtractor(), builders.bert_tokenizer(), resampling_method="soxr")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"audio": ["a.wav", "b.wav"], "sampling_rate": 16000}, ValueError, "clip 0.*path"),
        ({"audio": "a.wav", "sampling_rate": 16000}, ValueError, "str"),
        ({"audios": builders.noise(16000), "sampling_rate": 16000}, TypeError, "'audios'"),
        ({"audio": builders.noise(9000), "audio_kwargs": {"truncation": "fusion"}}, TypeError, "'truncation'"),
    ],
)
def test_wrong_inputs_and_options_are_named(processor, call, error, message):
    with pytest.raises(error, match=message):
        processor(**call)


def test_a_tokenizer_in_python_is_saved_and_loaded(tmp_path):
    processor = SupCLAPProcessor(CEDFeatureExtractor(), ByT5Tokenizer())
    expected = processor(text=["a dog barks", "rain"])["input_ids"]
    processor.save_pretrained(tmp_path)
    assert SupCLAPProcessor.from_pretrained(tmp_path)(text=["a dog barks", "rain"])["input_ids"] == expected
