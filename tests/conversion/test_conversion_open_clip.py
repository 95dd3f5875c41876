"""OpenCLIP's format: embeddings equal those of OpenCLIP, unknown fields are refused, and saving is the inverse."""

import json
import shutil

import builders
import numpy as np
import open_clip_folders as folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel, GPT2Tokenizer

from modeling_supclap import CEDModel, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import (
    is_open_clip,
    load_open_clip,
    read_checkpoint,
    save_conversion,
    save_open_clip,
)
from modeling_supclap.conversion.layouts import convert_checkpoint
from modeling_supclap.conversion.open_clip import extractor_from_audio_cfg, prepare_open_clip_tokenizer
from modeling_supclap.evaluation.models import load_embedding_model

CLIPS = (96_000, 17_760, 600)
CAPTIONS = ["w1 w2 w3 w4", "w10"]
# First eight values of embeddings with unit norm, computed by OpenCLIP 4.2.0.dev0 and timm 1.0.31.
AUDIO = {
    "A": [
        [-0.127958, 0.545156, -0.109313, 0.383265, 0.018926, 0.101307, 0.421063, 0.100936],
        [0.021809, 0.510601, 0.260161, 0.451029, 0.034522, 0.001583, 0.309150, 0.069848],
        [0.015941, 0.384405, -0.198598, 0.286840, 0.273407, 0.201513, 0.387828, 0.138607],
    ],
    "B": [
        [0.009887, 0.064067, -0.135566, -0.081096, 0.545996, 0.209242, 0.331527, -0.147962],
        [0.153628, 0.073957, -0.138986, -0.039134, 0.611281, 0.047006, 0.261868, -0.023344],
        [0.052035, 0.161749, -0.229147, -0.023540, 0.501254, 0.117109, 0.161625, -0.168815],
    ],
    "C": [
        [-0.011702, -0.082153, 0.027581, 0.266496, 0.086312, -0.340739, 0.088197, 0.368143],
        None,
        [0.138282, 0.089587, 0.284866, 0.089979, 0.462917, 0.222358, -0.235589, -0.006458],
    ],
    "D": [
        [-0.166295, -0.514389, 0.012606, -0.250757, 0.195919, -0.175672, 0.332215, 0.306208],
        None,
        [-0.142955, -0.390495, -0.010125, -0.514021, 0.263079, 0.141595, 0.406485, 0.058904],
    ],
}
TEXT = {
    "A": [
        [-0.246045, -0.219384, -0.045446, 0.137127, 0.179039, 0.370193, -0.006402, -0.162348],
        [-0.130517, -0.036830, -0.273424, 0.097614, 0.330957, 0.051029, -0.381570, -0.299972],
    ],
    "B": [
        [-0.015609, 0.281615, -0.064511, 0.114780, 0.341774, -0.298498, -0.001491, -0.016465],
        [-0.286375, -0.126424, 0.377735, 0.172288, 0.320327, 0.322492, 0.158841, 0.022827],
    ],
    "C": [
        [-0.087078, 0.216427, -0.337198, 0.083422, -0.534909, 0.514920, -0.134115, 0.088600],
        [-0.285406, 0.506033, 0.129133, 0.135997, -0.276790, -0.068319, -0.284977, -0.230834],
    ],
}
LOGITS_A = [[-1.036054, 0.681220], [-2.174312, -2.442686], [2.178881, 5.533784]]
BANDS = [0, 1, 8, 16, 24, 32, 40, 48, 56, 63]
MEL = {
    0: [23.7976, 24.0589, 33.0252, 29.4965, 12.5999, 4.0294, -2.4244, -7.9471, -12.7412, -16.1581],
    100: [-26.149, -22.0098, 39.4675, -27.9859, 32.7263, -69.4208, -79.2969, -86.6317, -95.4004, -100],
    200: [22.9261, 23.2074, 33.3383, 9.6004, 10.2383, 14.7523, 0.7718, 10.4373, -4.6859, -8.9795],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folders and settings of all models."""
    root = tmp_path_factory.mktemp("open_clip")
    return {name: (root / name, folders.write_folder(root / name, name)) for name in folders.MODELS}


@pytest.mark.parametrize("name", folders.MODELS)
def test_embeddings_equal_those_of_openclip(saved, name):
    model = load_embedding_model(saved[name][0], device="cpu")
    found = model.encode_audio([folders.wave(samples) for samples in CLIPS], 8)
    for row, expected in zip(found, AUDIO[name], strict=True):
        if expected is not None:
            np.testing.assert_allclose(row[:8], expected, atol=1e-5)
    if name in TEXT:
        np.testing.assert_allclose(model.encode_text(CAPTIONS, "eng", 8)[:, :8], TEXT[name], atol=1e-5)
    assert (model.chunk_seconds, model.sampling_rate_hz) == (30, 48_000)


def test_logits_equal_those_of_openclip(saved):
    model, processor = load_open_clip(saved["A"][0])
    inputs = processor(
        audio=[folders.wave(samples) for samples in CLIPS],
        sampling_rate=48_000,
        text=CAPTIONS,
        return_tensors="pt",
    )
    with torch.no_grad():
        logits = model(**inputs).logits_per_audio
    torch.testing.assert_close(logits, torch.tensor(LOGITS_A), atol=2e-4, rtol=0)


def test_spectrograms_equal_those_of_openclip():
    extractor = extractor_from_audio_cfg({})
    mel = extractor(folders.wave(96_000), sampling_rate=48_000)["input_features"][0]
    assert mel.shape == (64, 201)
    for frame, expected in MEL.items():
        np.testing.assert_allclose(mel[BANDS, frame], expected, atol=1e-3)
    assert abs(mel.mean() - -43.43346) < 1e-3
    assert (extractor(np.zeros(48_000, np.float32), sampling_rate=48_000)["input_features"] == -100).all()


def test_a_clip_below_one_window_is_padded_with_zeros_on_the_device_too():
    extractor = extractor_from_audio_cfg({})
    clips = [folders.wave(600), folders.wave(3000)]
    expected = extractor(clips, sampling_rate=48_000, return_tensors="pt")
    waveforms = extractor.as_waveforms(clips, 48_000)
    samples = torch.zeros(2, 3000)
    for row, waveform in zip(samples, waveforms, strict=True):
        row[: len(waveform)] = torch.from_numpy(waveform)
    found = extractor.on_device(samples, torch.tensor([len(waveform) for waveform in waveforms]))
    torch.testing.assert_close(found["input_features"], expected["input_features"], atol=1e-4, rtol=0)
    assert expected["audio_attention_mask"].sum(dim=1).tolist() == [3, 7]  # 1 + 1024 // 480, 1 + 3000 // 480


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("naflexvit_cfg", "rope_type", "mixed"),
        ("naflexvit_cfg", "num_kv_heads", 2),
        ("naflexvit_cfg", "final_norm", False),
        ("naflexvit_cfg", "new_switch", True),
        ("naflexvit_cfg", "new_number", 0.5),
        ("audio_cfg", "model_type", "HTSAT"),
        ("audio_cfg", "in_chans", 4),
        ("audio_cfg", "mel_norm", "slaney"),
        ("text_cfg", "pos_embed", "learned"),
        ("text_cfg", "window_attention", 128),
        ("model_cfg", "vision_cfg", {"layers": 12}),
    ],
)
def test_unsupported_fields_are_refused_by_name(saved, tmp_path, part, field, value):
    folder, settings = saved["A"]
    shutil.copytree(folder, tmp_path / "model")
    changed = json.loads(json.dumps(settings))
    model_cfg = changed["model_cfg"]
    parts = {"model_cfg": model_cfg, **model_cfg, "naflexvit_cfg": model_cfg["audio_cfg"]["naflexvit_cfg"]}
    parts[part][field] = value
    (tmp_path / "model" / "open_clip_config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=f"{part}.*{field}"):
        load_open_clip(tmp_path / "model")


@pytest.mark.parametrize("field", ["attention_mode", "pool_type", "heads", "norm_eps"])
def test_text_fields_that_no_shape_reveals_are_required(saved, tmp_path, field):
    folder, settings = saved["A"]
    shutil.copytree(folder, tmp_path / "model")
    changed = json.loads(json.dumps(settings))
    del changed["model_cfg"]["text_cfg"][field]
    (tmp_path / "model" / "open_clip_config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=field):
        load_open_clip(tmp_path / "model")


def test_fields_without_effect_and_switches_that_are_off_are_accepted(saved, tmp_path):
    folder, settings = saved["A"]
    shutil.copytree(folder, tmp_path / "model")
    model_cfg = json.loads(json.dumps(settings))["model_cfg"]
    model_cfg["audio_cfg"] |= {"audio_seq_len": 500, "fusion_type": "aff_2d", "later_switch": False}
    model_cfg["audio_cfg"]["naflexvit_cfg"] |= {"drop_path_rate": 0.1, "weight_init": "jax"}
    model_cfg |= {"init_logit_scale": 2.3, "custom_text": True}
    (tmp_path / "model" / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg}))
    model, _ = load_open_clip(tmp_path / "model")
    expected, _ = load_open_clip(folder)
    assert torch.equal(model.audio_projection.linear1.weight, expected.audio_projection.linear1.weight)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "reshaped"])
def test_tensors_must_fit_exactly(saved, tmp_path, fault):
    shutil.copytree(saved["B"][0], tmp_path / "model")
    weights = tmp_path / "model" / "open_clip_model.safetensors"
    tensors = load_file(weights)
    name = "text.blocks.1.mlp.w3.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unexpected":
        tensors["audio.encoder.vit.blocks.0.attn.q_norm.weight"] = torch.ones(12)
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, weights)
    with pytest.raises(
        ValueError, match=r"text_model\.blocks\.1\.mlp\.w3|audio_model\.blocks\.0\.attn\.q_norm"
    ):
        load_open_clip(tmp_path / "model")


def smooth_patches(rows: int, columns: int, width: int = 48) -> torch.Tensor:
    """Return patch weights that change slowly along both axes, as trained ones do, (width, rows, columns)."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(width, 1, 2, 3, generator=generator)
    return torch.nn.functional.interpolate(coarse, (rows, columns), mode="bilinear").squeeze(1)


def test_the_patch_layout_before_june_2026_is_refused(saved, tmp_path):
    shutil.copytree(saved["B"][0], tmp_path / "model")
    weights = tmp_path / "model" / "open_clip_model.safetensors"
    tensors, name = load_file(weights), "audio.encoder.vit.embeds.proj.weight"
    patches = smooth_patches(8, 16)
    tensors[name] = patches.flatten(1).contiguous()
    save_file(tensors, weights)
    load_open_clip(tmp_path / "model")
    tensors[name] = patches.mT.flatten(1).contiguous()
    save_file(tensors, weights)
    with pytest.raises(ValueError, match="24 June 2026"):
        load_open_clip(tmp_path / "model")


@pytest.mark.parametrize("name", folders.MODELS)
def test_saving_is_the_inverse_of_loading(saved, tmp_path, name):
    folder, settings = saved[name]
    save_open_clip(*load_open_clip(folder), tmp_path / "again")
    found, expected = (
        load_file(tmp_path / "again" / "open_clip_model.safetensors"),
        load_file(folder / "open_clip_model.safetensors"),
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key].reshape(-1), value.reshape(-1), rtol=1e-6, atol=0)
    assert found["logit_scale"].shape == ()
    written = json.loads((tmp_path / "again" / "open_clip_config.json").read_text(encoding="utf-8"))
    assert written == settings


def test_other_towers_cannot_be_saved_for_openclip(tmp_path):
    with pytest.raises(ValueError, match="ced"):
        save_open_clip(builders.supclap_model(), None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_both_formats_is_read_as_openclip(saved, tmp_path):
    shutil.copytree(saved["A"][0], tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "clap2"}))
    save_file({"other": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    assert is_open_clip(str(tmp_path / "model"))
    assert "audio.proj.0.weight" in read_checkpoint(tmp_path / "model").tensors
    load_embedding_model(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("has_config", [False, True])
def test_from_pretrained_names_the_function_for_this_format(saved, tmp_path, has_config):
    name = str(tmp_path / "clap2")
    shutil.copytree(saved["A"][0], name)
    if has_config:
        (tmp_path / "clap2" / "config.json").write_text(json.dumps({"model_type": "clap2"}))
    BertModel(BertConfig(**builders.bert_config())).save_pretrained(tmp_path / "bert")
    CEDModel(builders.ced_config()).save_pretrained(tmp_path / "ced")
    bert, ced = str(tmp_path / "bert"), str(tmp_path / "ced")
    for load in (
        lambda: SupCLAPModel.from_pretrained(name),
        lambda: SupCLAPProcessor.from_pretrained(name),
        lambda: SupCLAPModel.from_encoders(name, bert),
        lambda: SupCLAPModel.from_encoders(ced, name),
        lambda: SupCLAPProcessor.from_encoders(name, bert),
    ):
        with pytest.raises(ValueError, match=r"load_model.*supclap convert") as error:
            load()
        assert len(str(error.value)) < 500


def test_the_towers_of_a_converted_folder_are_joined_with_others(saved, tmp_path):
    model, processor = load_open_clip(saved["A"][0])
    for part in (model, processor):
        part.save_pretrained(tmp_path / "clap2")
    CEDModel(builders.ced_config()).save_pretrained(tmp_path / "ced")
    joined = SupCLAPModel.from_encoders(str(tmp_path / "ced"), str(tmp_path / "clap2"), projection_dim=8)
    assert joined.config.text_pooling == "pooler"
    words = SupCLAPProcessor.from_encoders(str(tmp_path / "ced"), str(tmp_path / "clap2"))(
        text=CAPTIONS, return_tensors="pt"
    )
    with torch.no_grad():
        found, expected = (each.text_model(**words).pooler_output for each in (joined, model))
    torch.testing.assert_close(found, expected)


def test_a_vision_model_of_openclip_is_not_an_audio_model(tmp_path):
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": {"vision_cfg": {}, "text_cfg": {}}})
    )
    assert not is_open_clip(str(tmp_path))


def test_a_converted_folder_loads_with_from_pretrained(saved, tmp_path):
    conversion = convert_checkpoint(read_checkpoint(saved["C"][0]))
    save_conversion(conversion, tmp_path / "out", folders.tokenizer(), verify=True)
    model = AutoModel.from_pretrained(tmp_path / "out")
    processor = SupCLAPProcessor.from_pretrained(tmp_path / "out")
    clips = [folders.wave(samples) for samples in (96_000, 600)]
    found = model.encode_audio(clips, processor, sampling_rate=48_000)
    np.testing.assert_allclose(found[:, :8], [AUDIO["C"][0], AUDIO["C"][2]], atol=1e-5)


def test_gpt2_tokens_get_the_special_tokens_of_openclip():
    # A byte-level tokenizer with 12 words in place of GPT-2's 50,257.
    vocabulary = dict(zip([*"abcdefghijk", "<|endoftext|>"], range(12), strict=True))
    tokenizer = GPT2Tokenizer(vocab=vocabulary, merges=[])
    config = folders.build("A")[0].config.text_config
    config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id = 15, 12, 13, 14
    prepare_open_clip_tokenizer(tokenizer, config)
    assert tokenizer("abc")["input_ids"] == [14, 0, 1, 2, 12]
    assert tokenizer("abcdefghijkabcdefghijk", truncation=True, max_length=6)["input_ids"] == [
        14,
        0,
        1,
        2,
        3,
        12,
    ]
    assert tokenizer.model_max_length == 16

    config.vocab_size = 60
    with pytest.raises(ValueError, match=r"15 tokens.*60"):
        prepare_open_clip_tokenizer(tokenizer, config)


@pytest.mark.parametrize("projection", ["mlp", "linear"])
def test_a_text_tower_of_transformers(saved, tmp_path, projection):
    folder, settings = saved["A"]
    torch.manual_seed(1)
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(BertConfig(**sizes, intermediate_size=24), add_pooling_layer=False).eval()
    bert.config.save_pretrained(tmp_path / "bert")
    tensors = load_file(folder / "open_clip_model.safetensors")
    tensors = {key: value for key, value in tensors.items() if "text" not in key}
    tensors |= {f"text.transformer.{key}": value for key, value in bert.state_dict().items()}
    first, second = torch.randn(20, 24), torch.randn(16, 20)
    if projection == "mlp":
        tensors |= {"text.proj.0.weight": first, "text.proj.2.weight": second}
    else:
        tensors["text.proj.weight"] = second @ first
    text_cfg = {
        "hf_model_name": str(tmp_path / "bert"),
        "hf_proj_type": projection,
        "hf_pooler_type": "mean_pooler",
    }
    model_cfg = {**settings["model_cfg"], "text_cfg": text_cfg}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "open_clip_model.safetensors")
    (tmp_path / "model" / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg}))
    folders.tokenizer().save_pretrained(tmp_path / "model")

    model, _ = load_open_clip(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        pooled = bert(ids).last_hidden_state.mean(dim=1)
        hidden = pooled @ first.T
        expected = (torch.nn.functional.gelu(hidden) if projection == "mlp" else hidden) @ second.T
        found = model.get_text_features(ids, torch.ones_like(ids)).pooler_output
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected), atol=1e-5, rtol=1e-5)
