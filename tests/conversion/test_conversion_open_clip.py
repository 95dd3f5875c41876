"""OpenCLIP's format: embeddings equal those of OpenCLIP, unknown fields are refused, and saving is the inverse."""

import json
import os
import shutil

import builders
import numpy as np
import open_clip_folders as folders
import pytest
import torch
from fake_hub import FakeHub, fake_hub
from processes import run_python
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel

from modeling_supclap import CEDModel, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import load_open_clip, read_checkpoint, save_conversion, save_open_clip
from modeling_supclap.conversion.files import is_open_clip_audio
from modeling_supclap.conversion.layouts import convert_checkpoint
from modeling_supclap.conversion.open_clip import extractor_from_audio_cfg
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
# A spectrogram in float32 differs from one in float64 by at most this fraction of the amplitude of the frame (-114
# dB): the mel filters are rounded to 6e-6, and a Fourier transform to 4e-7. So bands that far below the peak contain
# rounding errors, which differ between processors.
FLOAT32_NOISE = 2e-6
# Largest difference of embeddings, by the length of the clip. The first two have such bands: between an AMD and an
# Intel processor, their embeddings differ by up to 7e-4. The shortest has energy in all bands.
ATOL = {96_000: 2e-3, 17_760: 2e-3, 600: 1e-5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folders and settings of all models."""
    root = tmp_path_factory.mktemp("open_clip")
    return {name: (root / name, folders.write_folder(root / name, name)) for name in folders.MODELS}


@pytest.mark.parametrize("name", folders.MODELS)
def test_embeddings_equal_those_of_openclip(saved, name):
    model = load_embedding_model(saved[name][0], device="cpu")
    found = model.encode_audio([folders.wave(samples) for samples in CLIPS], 8)
    for row, expected, samples in zip(found, AUDIO[name], CLIPS, strict=True):
        if expected is not None:
            np.testing.assert_allclose(row[:8], expected, atol=ATOL[samples])
    if name in TEXT:
        np.testing.assert_allclose(model.encode_text(CAPTIONS, "eng", 8)[:, :8], TEXT[name], atol=1e-5)
    assert (model.chunk_seconds, model.sampling_rate_hz) == (30, 48_000)


def test_logits_equal_those_of_openclip(saved):
    model, processor = load_open_clip(saved["A"][0])
    inputs = processor(
        audio=[folders.wave(samples) for samples in CLIPS], sampling_rate=48_000, text=CAPTIONS, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**inputs).logits_per_audio
    for found, expected, samples in zip(logits, LOGITS_A, CLIPS, strict=True):
        atol = 20 * ATOL[samples]  # the temperature is 1 / 20
        torch.testing.assert_close(found, torch.tensor(expected), atol=atol, rtol=0)


def mel_filters(extractor) -> np.ndarray:
    """Return HTK triangles of height 1 by their formula in float64, (bins, bands)."""
    low, high = (2595 * np.log10(1 + hz / 700) for hz in (extractor.f_min, extractor.f_max))
    edges = 700 * (10 ** (np.linspace(low, high, extractor.feature_size + 2) / 2595) - 1)
    hz = np.fft.rfftfreq(extractor.n_fft, 1 / extractor.sampling_rate)[:, None]
    rising = (hz - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - hz) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling))


def hann(samples: int) -> np.ndarray:
    """Return the periodic Hann window by its formula in float64."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(samples) / samples)


def mirrored(extractor, samples: int) -> np.ndarray:
    """Return a clip of `folders.wave` in float64, at least one window long, mirrored by half a window at both ends."""
    clip = folders.wave(samples).astype(np.float64)
    clip = np.pad(clip, (0, max(0, extractor.n_fft - samples)))
    return np.pad(clip, extractor.n_fft // 2, mode="reflect")


def spectrogram(extractor, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute OpenCLIP's spectrogram in float64: mel levels in decibels (bands, T), and the amplitude of each frame."""
    frames = np.lib.stride_tricks.sliding_window_view(mirrored(extractor, samples), extractor.n_fft)
    power = np.abs(np.fft.rfft(frames[:: extractor.hop_size] * hann(extractor.n_fft))) ** 2  # (T, bins)
    mel = np.maximum(power @ mel_filters(extractor), 1e-10)
    return 10 * np.log10(mel).T, np.sqrt(power.sum(axis=1))


def amplitudes(decibels) -> np.ndarray:
    """Convert levels in decibels to amplitudes in float64."""
    return 10 ** (np.asarray(decibels, np.float64) / 20)


@pytest.mark.parametrize("samples", CLIPS)
def test_the_formula_of_spectrograms_is_that_of_openclip(monkeypatch, samples):
    """In float64, with filters in float64: 1e-9 dB in bands that are up to 100 dB below the peak."""
    extractor = extractor_from_audio_cfg({})
    filters = np.repeat(mel_filters(extractor), 2, axis=0).T  # real and imaginary parts
    exact = torch.from_numpy(hann(1024)), [(0, 0, torch.from_numpy(filters))]
    monkeypatch.setattr("modeling_supclap.feature_extraction_ced._front_end", lambda *settings: exact)
    found = extractor._log_mel(torch.from_numpy(mirrored(extractor, samples)))
    expected, frame_amplitude = spectrogram(extractor, samples)
    assert found.dtype == torch.float64
    differences = np.abs(amplitudes(found) - amplitudes(expected))
    assert (differences / frame_amplitude).max() < 1e-14


@pytest.mark.parametrize("samples", CLIPS)
def test_spectrograms_in_float32_equal_the_formula(samples):
    extractor = extractor_from_audio_cfg({})
    found = extractor(folders.wave(samples), sampling_rate=48_000)["input_features"][0]
    expected, frame_amplitude = spectrogram(extractor, samples)
    assert found.shape == expected.shape == (64, 1 + max(samples, 1024) // 480)
    differences = np.abs(amplitudes(found) - amplitudes(expected))
    assert (differences / frame_amplitude).max() < FLOAT32_NOISE


def test_spectrograms_equal_those_of_openclip():
    extractor = extractor_from_audio_cfg({})
    mel = extractor(folders.wave(96_000), sampling_rate=48_000)["input_features"][0]
    _, frame_amplitude = spectrogram(extractor, 96_000)
    for frame, expected in MEL.items():
        # both are in float32, and the golden values have four decimals
        atol = 2 * FLOAT32_NOISE * frame_amplitude[frame]
        np.testing.assert_allclose(amplitudes(mel[BANDS, frame]), amplitudes(expected), atol=atol, rtol=1e-5)
    # 44 % of the bands are so far below the peak that their level is that of rounding errors
    assert abs(mel.mean() - -43.43346) < 0.1
    assert (extractor(np.zeros(48_000, np.float32), sampling_rate=48_000)["input_features"] == -100).all()


def test_a_clip_below_one_window_is_padded_with_zeros_on_the_device_too():
    extractor = extractor_from_audio_cfg({})
    clips = [builders.noise(600), builders.noise(3000)]  # with energy in all bands
    expected = extractor(clips, sampling_rate=48_000, return_tensors="pt")
    waveforms = [extractor.extend(clip) for clip in clips]
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
        ("naflexvit_cfg", "fc_norm", True),
        ("naflexvit_cfg", "global_pool", "token"),
        ("naflexvit_cfg", "patch_size", [8, 8]),
        ("naflexvit_cfg", "new_switch", True),
        # its default may be true
        ("naflexvit_cfg", "new_switch", False),
        ("naflexvit_cfg", "new_number", 0.5),
        ("audio_cfg", "model_type", "HTSAT"),
        ("audio_cfg", "in_chans", 4),
        ("audio_cfg", "mel_norm", "slaney"),
        # OpenCLIP normalises before the projection, leaves the projection out, has GELU for all names but "relu"
        ("audio_cfg", "pre_norm", True),
        ("audio_cfg", "training_head", True),
        ("audio_cfg", "proj_act", "tanh"),
        ("text_cfg", "pos_embed", "learned"),
        ("text_cfg", "pool_type", "last"),
        ("text_cfg", "proj_type", "none"),
        ("text_cfg", "window_attention", 128),
        ("text_cfg", "tokenizer_mode", "clips"),
        ("text_cfg", "text_arch", "clip"),
        ("model_cfg", "vision_cfg", {"layers": 12}),
        ("model_cfg", "new_part", None),
        ("open_clip_config.json", "audio_preprocess_cfg", {"normalize": True}),
    ],
)
def test_unsupported_fields_are_refused_by_name(saved, tmp_path, part, field, value):
    place = "settings" if part.endswith(".json") else part
    with pytest.raises(ValueError, match=f"{part}.*{field}"):
        load_open_clip(folders.copy_with(saved["A"][0], tmp_path / "model", **{place: {field: value}}))


@pytest.mark.parametrize(
    ("part", "fields", "named"),
    [
        ("audio_cfg", {"model_type": ...}, "HTSAT"),  # OpenCLIP's default
        ("text_cfg", {"text_arch": ...}, "'clip'"),
        ("text_cfg", {"eos_id": None}, "eos_id"),  # the pooling of B requires it
        ("text_cfg", {"width": "32"}, "text_cfg.*'32'"),
        ("text_cfg", {"tokenizer_kwargs": {"clean": "lower"}}, "clean='lower'"),
        ("model_cfg", {"audio_cfg": None}, "audio_cfg"),
    ],
)
def test_invalid_settings_are_refused(saved, tmp_path, part, fields, named):
    with pytest.raises(ValueError, match=rf"(?s){named}"):
        load_open_clip(folders.copy_with(saved["B"][0], tmp_path / "model", **{part: fields}))


def test_missing_fields_have_the_defaults_of_openclip(tmp_path):
    """The defaults of CLIPAudioCfg, NaFlexVitCfg and CLIPTextCfg."""
    audio = {"patch_freq": 64, "patch_time": 4, "patch_pad_mode": "floor", "global_pool": "map"}
    text = {**folders.TEXT, "num_attention_heads": 8, "mlp_ratio": 4.0, "mlp_type": "swiglu", "pool_type": "eos"}
    text |= {"attention_mode": "causal", "norm_type": "rmsnorm", "norm_eps": 1e-6, "attn_gated": False}
    model, processor = folders.build_from(
        {**folders.AUDIO, **audio}, {**text, "max_position_embeddings": 77}, "linear"
    )
    save_open_clip(model, processor, tmp_path / "all")
    model_cfg = json.loads((tmp_path / "all" / "open_clip_config.json").read_text())["model_cfg"]
    kept = {
        "audio_cfg": {"model_type", "naflexvit_cfg"},
        "naflexvit_cfg": {"embed_dim", "depth", "num_heads"},
        "text_cfg": {"text_arch", "vocab_size", "width", "layers", "pad_id", "eos_id"},
    }
    removed = {}
    for part, names in kept.items():
        fields = model_cfg["audio_cfg"]["naflexvit_cfg"] if part == "naflexvit_cfg" else model_cfg[part]
        removed[part] = dict.fromkeys(fields.keys() - names, ...)
    folders.copy_with(tmp_path / "all", tmp_path / "few", **removed)
    found, few = load_open_clip(tmp_path / "few")
    np.testing.assert_array_equal(
        found.encode_audio([folders.wave(9000)], few, sampling_rate=48_000),
        model.encode_audio([folders.wave(9000)], processor, sampling_rate=48_000),
    )
    np.testing.assert_array_equal(found.encode_text(CAPTIONS, few), model.encode_text(CAPTIONS, processor))
    # The tokenizer in the folder has 16, which OpenCLIP ignores.
    assert few.tokenizer.model_max_length == 77


def test_fields_without_effect_and_null_are_accepted(saved, tmp_path):
    folder = folders.copy_with(
        saved["A"][0],
        tmp_path / "model",
        settings={"preprocess_cfg": {"mean": [0.5], "size": 224}},
        model_cfg={"init_logit_scale": 2.3, "quick_gelu": True},
        audio_cfg={"audio_seq_len": 500, "fusion_type": "aff_2d"},
        naflexvit_cfg={"drop_path_rate": 0.1, "act_layer": "gelu", "norm_layer": "layernorm"},
        text_cfg={"hf_proj_type": "mlp", "attention_bias": None, "norm_type": None},
    )
    towers = []
    for source in (folder, saved["A"][0]):
        config = load_open_clip(source)[0].config
        towers.append((config.audio_config.to_diff_dict(), config.text_config.to_diff_dict()))
        for tower in towers[-1]:
            tower.pop("_name_or_path", None)
    assert towers[0] == towers[1]


@pytest.mark.parametrize("fault", ["missing", "unexpected", "reshaped", "patches"])
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
        cut = "audio.encoder.vit.embeds.proj.weight" if fault == "patches" else name
        tensors[cut] = tensors[cut][:, :-1].contiguous()
    named = {"unexpected": r"audio_model\.blocks\.0\.attn\.q_norm", "patches": r"audio_model\..*embed"}
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=named.get(fault, r"text_model\.blocks\.1\.mlp\.w3")):
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


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("config", "projection_hidden_act", "tanh"),
        ("config", "projection_type", "residual"),
        ("config", "text_projection_type", None),
        ("config", "text_pooling", "mean"),
        ("config", "text_dense", [{"out_features": 32, "activation": "tanh", "bias": True}]),
        ("audio_config", "layer_norm_eps", 1e-5),
        ("extractor", "top_db", 80.0),
        ("extractor", "n_fft", 2048),
        ("processor", "caption_prefix", "query: "),
        ("processor", "resampling_method", "kaiser_best"),
    ],
)
def test_settings_that_openclip_lacks_are_not_saved(tmp_path, part, field, value):
    model, processor = folders.build("A")
    parts = {"config": model.config, "audio_config": model.config.audio_config, "processor": processor}
    setattr({**parts, "extractor": processor.feature_extractor}[part], field, value)
    with pytest.raises(ValueError, match=field):
        save_open_clip(model, processor, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_bias_of_siglip_is_saved(tmp_path):
    """OpenCLIP has the parameter only if `init_logit_bias` is set."""
    model, processor = folders.build("A")
    model.config.logit_bias, model.logit_bias = -10.0, torch.nn.Parameter(torch.tensor([-8.0]))
    save_open_clip(model, processor, tmp_path)
    settings = json.loads((tmp_path / "open_clip_config.json").read_text(encoding="utf-8"))
    assert settings["model_cfg"]["init_logit_bias"] == -10
    assert load_file(tmp_path / "open_clip_model.safetensors")["logit_bias"].shape == ()
    assert load_open_clip(tmp_path)[0].logit_bias.item() == -8


def test_the_shorter_context_is_saved(tmp_path):
    model, processor = folders.build("A")
    processor.tokenizer.model_max_length = 8
    save_open_clip(model, processor, tmp_path)
    settings = json.loads((tmp_path / "open_clip_config.json").read_text(encoding="utf-8"))
    assert settings["model_cfg"]["text_cfg"]["context_length"] == 8


def test_a_folder_with_both_formats_is_read_as_openclip(saved, tmp_path, monkeypatch):
    shutil.copytree(saved["A"][0], tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "clap2"}))
    save_file({"other": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    assert is_open_clip_audio(tmp_path / "model")
    assert "audio.proj.0.weight" in read_checkpoint(tmp_path / "model").tensors
    # transformers warns of a model_type that it does not know
    monkeypatch.setattr("transformers.configuration_utils.logger.warning", pytest.fail)
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
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"vision_cfg": {}, "text_cfg": {}}}))
    assert not is_open_clip_audio(tmp_path)


def test_a_converted_folder_loads_with_from_pretrained(saved, tmp_path):
    conversion = convert_checkpoint(read_checkpoint(saved["C"][0]))
    save_conversion(conversion, tmp_path / "out", folders.tokenizer(), verify=True)
    model = AutoModel.from_pretrained(tmp_path / "out")
    processor = SupCLAPProcessor.from_pretrained(tmp_path / "out")
    clips = [folders.wave(samples) for samples in (96_000, 600)]
    found = model.encode_audio(clips, processor, sampling_rate=48_000)
    np.testing.assert_allclose(found[0, :8], AUDIO["C"][0], atol=ATOL[96_000])
    np.testing.assert_allclose(found[1, :8], AUDIO["C"][2], atol=ATOL[600])


WEIGHTS = {
    "open_clip_pytorch_model.bin": lambda tensors, path: torch.save(tensors, path),
    "open_clip_pytorch_model.safetensors": save_file,
    "open_clip_model.safetensors": save_file,
    # a checkpoint of OpenCLIP's training
    "epoch_3.pt": lambda tensors, path: torch.save(
        {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in tensors.items()}}, path
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_other_names_and_precisions(saved, tmp_path, name, dtype):
    tensors = load_file(saved["A"][0] / "open_clip_model.safetensors")
    folder = folders.copy_with(saved["A"][0], tmp_path / "model")
    (folder / "open_clip_model.safetensors").unlink()
    WEIGHTS[name]({key: value.to(dtype) for key, value in tensors.items()}, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "clap2"}))
    if name.startswith("open_clip"):
        torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    model, _ = load_open_clip(folder)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    expected = tensors["audio.proj.0.weight"].to(dtype).float()
    assert torch.equal(model.audio_projection.linear1.weight, expected)


def test_weights_in_parts_or_of_another_format_are_refused(saved, tmp_path):
    folder = folders.copy_with(saved["A"][0], tmp_path / "model")
    (folder / "open_clip_model.safetensors").rename(folder / "open_clip_model-00001-of-00002.safetensors")
    save_file({"x": torch.ones(1)}, folder / "open_clip_model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"open_clip_model\.safetensors.*00001"):
        load_open_clip(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file({"audio_model.x": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"embeds\.proj\.weight"):
        load_open_clip(folder)


HUB_READER = """
from modeling_supclap.evaluation.models import load_embedding_model
from modeling_supclap.recipes.train_supclap import load_start

print(load_embedding_model("laion/clap2-tiny", device="cpu").encode_text(["w10"], "eng")[0, :3].tolist())
model, processor = load_start("laion/clap2-tiny")
print(processor.tokenizer("w7")["input_ids"], model.config.name_or_path)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_model_of_the_hub_is_loaded_and_then_used_offline(saved, tmp_path):
    big = b"not to be downloaded"
    with fake_hub() as address:
        files = {path.name: path.read_bytes() for path in saved["A"][0].iterdir()}
        others = ("model.safetensors", "open_clip_pytorch_model.bin", "events.out")
        files |= {"config.json": b'{"model_type": "clap2"}', **dict.fromkeys(others, big)}
        FakeHub.files["laion/clap2-tiny"] = files
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        online = run_python("-c", HUB_READER, cwd=tmp_path, HF_HUB_OFFLINE="0", **hub)
    first, second = online.splitlines()
    np.testing.assert_allclose(json.loads(first), TEXT["A"][1][:3], atol=1e-5)
    assert second == "[59, 7, 57] laion/clap2-tiny"
    assert run_python("-c", HUB_READER, cwd=tmp_path, HF_HUB_OFFLINE="1", **hub) == online
    assert big not in [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_comparison_with_openclip(saved):
    """OPEN_CLIP_FOLDER may name a published model, such as a download of laion/clap2-large-audioxl-s1B."""
    pytest.importorskip("open_clip", minversion="4.2.0.dev0")
    published = os.environ.get("OPEN_CLIP_FOLDER", "").split()
    for folder in [*(folder for folder, _ in saved.values()), *published]:
        found = folders.compare_with_open_clip(folder, *load_open_clip(folder))
        assert found["tokens"], folder
        assert min(found["audio"], found["text"]) > 1 - 1e-6, folder


@pytest.mark.parametrize(
    ("projection", "pooling"),
    [("mlp", "mean_pooler"), ("linear", "mean_pooler"), ("linear", "cls_last_hidden_state_pooler")],
)
def test_a_text_tower_of_transformers(saved, tmp_path, projection, pooling):
    torch.manual_seed(1)
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(BertConfig(**sizes, intermediate_size=24), add_pooling_layer=False).eval()
    bert.config.dtype = torch.float16  # as in some repositories; OpenCLIP ignores it
    bert.config.save_pretrained(tmp_path / "bert")
    text_cfg = {"hf_model_name": str(tmp_path / "bert"), "hf_proj_type": projection, "hf_pooler_type": pooling}
    text_cfg["context_length"] = 8
    folder = folders.copy_with(saved["A"][0], tmp_path / "model", model_cfg={"text_cfg": text_cfg})
    tensors = load_file(folder / "open_clip_model.safetensors")
    tensors = {key: value for key, value in tensors.items() if "text" not in key}
    tensors |= {f"text.transformer.{key}": value for key, value in bert.state_dict().items()}
    first, second = torch.randn(20, 24), torch.randn(16, 20)
    if projection == "mlp":
        tensors |= {"text.proj.0.weight": first, "text.proj.2.weight": second}
    else:
        tensors["text.proj.weight"] = second @ first
    tensors["text.transformer.embeddings.position_ids"] = torch.arange(512)[None]  # saved by older versions
    save_file(tensors, folder / "open_clip_model.safetensors")

    model, processor = load_open_clip(folder)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        states = bert(ids).last_hidden_state
        pooled = states.mean(dim=1) if pooling == "mean_pooler" else states[:, 0]
        hidden = pooled @ first.T
        expected = (torch.nn.functional.gelu(hidden) if projection == "mlp" else hidden) @ second.T
        found = model.get_text_features(ids, torch.ones_like(ids)).pooler_output
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected), atol=1e-5, rtol=1e-5)
    assert processor(text="w1 " * 9, return_tensors="pt")["input_ids"].shape == (1, 8)


@pytest.mark.parametrize(("field", "value"), [("hf_proj_type", "clap_mlp"), ("hf_pooler_type", "max_pooler")])
def test_other_heads_of_a_transformers_tower_are_refused(saved, tmp_path, field, value):
    text_cfg = {"hf_model_name": "someone/bert", field: value}
    with pytest.raises(ValueError, match=f"text_cfg.*{field}"):
        load_open_clip(folders.copy_with(saved["A"][0], tmp_path / "model", model_cfg={"text_cfg": text_cfg}))
