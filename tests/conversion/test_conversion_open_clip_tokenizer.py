"""The tokenizer of a model in OpenCLIP's format: its ids, each form of its files, and the fields that name it."""

import json

import open_clip_folders as folders
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer

from modeling_supclap.conversion import load_open_clip, load_open_clip_processor, open_clip_tokenizer, save_open_clip
from modeling_supclap.conversion.open_clip_tokenizer import load_open_clip_tokenizer, prepare_open_clip_tokenizer


def gpt2_tokenizer(words: int, folder=None):
    """Return a byte-level tokenizer like GPT-2's, with 11 letters, "<", ">" and |endoftext|, filled up to `words`."""
    letters = [*"abcdefghijk<>", *(f"word{index}" for index in range(words - 14)), "<|endoftext|>"]
    tokenizer = GPT2Tokenizer(vocab=dict(zip(letters, range(words), strict=True)), merges=[])
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(("words", "is_tiktoken"), [(50_257, True), (57, False)])
def test_only_the_vocabulary_of_gpt2_is_saved_as_tiktoken(tmp_path, words, is_tiktoken):
    model, processor = folders.build("A")
    config = model.config.text_config
    config.vocab_size, config.eos_token_id = words + 3, words
    config.pad_token_id, config.bos_token_id = words + 1, words + 2
    gpt2_tokenizer(words, tmp_path / "words")
    processor.tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    prepare_open_clip_tokenizer(processor.tokenizer, config)
    save_open_clip(model, processor, tmp_path / "model")
    text_cfg = json.loads((tmp_path / "model" / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    assert text_cfg.get("tiktoken_name") == ("r50k_base" if is_tiktoken else None)
    # OpenCLIP reads the tokenizer in the folder if there is a name, and no path of this machine is written
    assert text_cfg.get("hf_tokenizer_name") == (None if is_tiktoken else "tokenizer")


def test_gpt2_tokens_get_the_special_tokens_of_openclip(tmp_path):
    tokenizer = gpt2_tokenizer(14)
    config = folders.build("A")[0].config.text_config
    config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id = 17, 14, 15, 16
    prepare_open_clip_tokenizer(tokenizer, config)
    assert tokenizer("abc")["input_ids"] == [16, 0, 1, 2, 14]
    long = tokenizer("abcdefghijkabcdefghijk", truncation=True, max_length=6)
    assert long["input_ids"] == [16, 0, 1, 2, 3, 14]
    assert tokenizer.model_max_length == 16
    # tiktoken encodes the name of a special token as plain text
    tokenizer.save_pretrained(tmp_path)
    for words in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert words("<e>")["input_ids"] == words("<")["input_ids"][:-1] + words("e>")["input_ids"][1:]
        assert 14 not in words("a<eos>")["input_ids"][:-1]

    config.vocab_size = 16
    with pytest.raises(ValueError, match=r"17 tokens.*tower 16"):
        prepare_open_clip_tokenizer(tokenizer, config)
    config.vocab_size, config.pad_token_id = 17, 3
    with pytest.raises(ValueError, match=r"17 tokens.*15.*3"):
        prepare_open_clip_tokenizer(tokenizer, config)


@pytest.mark.parametrize("bos", [None, 2])
def test_a_tokenizer_of_transformers_with_other_special_tokens(bos):
    """OpenCLIP takes [CLS] and [SEP] for BOS and EOS. It does not use `bos_id`, which a file may lack."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    config = folders.build("A")[0].config.text_config
    config.bos_token_id, config.eos_token_id, config.pad_token_id = bos, 3, 0
    prepare_open_clip_tokenizer(tokenizer, config)
    assert tokenizer(["a", "a a"], padding=True)["input_ids"] == [[2, 5, 3, 0], [2, 5, 5, 3]]


def test_a_tokenizer_without_bos_and_eos_around_the_text_is_refused():
    tokenizer = folders.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ValueError, match="bos_token 59"):
        prepare_open_clip_tokenizer(tokenizer, folders.build("A")[0].config.text_config)


@pytest.mark.parametrize("form", ["plain folder", "plain json", "full json", "of another model", "none"])
def test_each_form_of_the_tokenizer_gives_the_same_ids(tmp_path, monkeypatch, form):
    """OpenCLIP uploads CLIP's tokenizer, which it does not use, with a model that uses tiktoken."""
    monkeypatch.setattr(open_clip_tokenizer, "GPT2", str(tmp_path / "gpt2"))
    plain = gpt2_tokenizer(57, tmp_path / "gpt2")
    model, processor = folders.build("A")
    save_open_clip(model, processor, tmp_path / "saved")
    text_cfg = {"tokenizer_type": "tiktoken", "tiktoken_name": "r50k_base", "hf_tokenizer_name": ...}
    folder = folders.copy_with(tmp_path / "saved", tmp_path / "model", text_cfg=text_cfg)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    if form == "plain folder":
        plain.save_pretrained(folder)
    elif form == "of another model":
        gpt2_tokenizer(40, folder)
    elif form.endswith("json"):
        if form == "full json":
            prepare_open_clip_tokenizer(plain, model.config.text_config)
        plain.save_pretrained(folder)
        (folder / "tokenizer_config.json").unlink()

    for words in (load_open_clip(folder)[1].tokenizer, load_open_clip_processor(folder).tokenizer):
        batch = words(["abc", "kab<eos>"], padding=True)
        assert batch["input_ids"] == [[59, 0, 1, 2, 57, 58, 58, 58], [59, 10, 0, 1, 11, 4, 12, 57]]
        assert words.model_max_length == 16


def test_a_tokenizer_that_cannot_be_downloaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(open_clip_tokenizer, "GPT2", "nobody/nothing")
    settings = {"model_cfg": {"text_cfg": {"tokenizer_type": "tiktoken", "tiktoken_name": "r50k_base"}}}
    with pytest.raises(OSError, match="nobody/nothing"):
        load_open_clip_tokenizer(str(tmp_path), settings)
    with pytest.raises(OSError, match="someone/words"):
        load_open_clip_tokenizer(str(tmp_path), settings, "someone/words")
    settings["model_cfg"]["text_cfg"]["tiktoken_name"] = "cl100k_base"
    with pytest.raises(ValueError, match="cl100k_base"):
        load_open_clip_tokenizer(str(tmp_path), settings)
