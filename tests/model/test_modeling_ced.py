"""CED, compared with golden values, a slow implementation, and itself in other batches."""

import json
import math

import builders
import published_layouts as published
import pytest
import torch
from safetensors.torch import save_file

from modeling_supclap import CEDConfig, CEDFeatureExtractor, CEDModel
from modeling_supclap.modeling_ced import CEDPatchConv2d


def ced(seed: int = 0, **kwargs) -> CEDModel:
    """Return a tiny encoder in evaluation mode, with random parameters and batch norm statistics of decibels."""
    torch.manual_seed(seed)
    model = CEDModel(builders.ced_config(**kwargs)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.init_bn.running_mean.normal_(-40, 10)
        model.init_bn.running_var.uniform_(100, 400)
    return model


DASHENG = {"patch_size": [64, 4], "patch_stride": [64, 4], "target_length": 1008}


def batch(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return spectrograms of the given lengths in frames, with nonzero padding, and their mask."""
    torch.manual_seed(seed)
    features = -40 + 20 * torch.randn(len(lengths), 64, max(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    return features, mask


@torch.no_grad()
def slow_embedding(model: CEDModel, spectrogram: torch.Tensor) -> torch.Tensor:
    """Embed one clip (64, frames) chunk by chunk in float64, from the description of the architecture."""
    p = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config
    length, mels, frames = config.target_length, config.patch_mels, config.patch_frames
    width, heads = config.embed_dim, config.num_heads

    def column(vector):
        return vector.unsqueeze(1)

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        )

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = (spectrogram.double() - column(p["init_bn.running_mean"])) / column((p["init_bn.running_var"] + 1e-5).sqrt())
    x = x * column(p["init_bn.weight"]) + column(p["init_bn.bias"])
    chunks = [x[:, start : start + length] for start in range(0, x.shape[1], length)]
    if len(chunks) > 1:
        chunks[-1] = torch.cat([chunks[-1], x.new_zeros(64, length - chunks[-1].shape[1])], dim=1)
    tokens_of_all = []
    for chunk in chunks:
        tokens = []
        for row in range(64 // mels):
            for time in range(chunk.shape[1] // frames):
                patch = chunk[mels * row : mels * row + mels, frames * time : frames * time + frames].flatten()
                token = p["patch_embed.proj.weight"].flatten(1) @ patch + p["patch_embed.proj.bias"]
                tokens.append(token + p["time_pos_embed"][0, :, 0, time] + p["freq_pos_embed"][0, :, row, 0])
        h = torch.stack(tokens)
        for block in (f"blocks.{index}" for index in range(config.depth)):
            q, k, v = linear(norm(h, f"{block}.norm1"), f"{block}.attn.qkv").split(width, dim=1)
            mixed = []
            for head in (slice(start, start + width // heads) for start in range(0, width, width // heads)):
                weights = torch.softmax(q[:, head] @ k[:, head].T / math.sqrt(width // heads), dim=1)
                mixed.append(weights @ v[:, head])
            h = h + linear(torch.cat(mixed, dim=1), f"{block}.attn.proj")
            inner = linear(norm(h, f"{block}.norm2"), f"{block}.mlp.fc1")
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            h = h + linear(inner, f"{block}.mlp.fc2")
        tokens_of_all.append(norm(h, "norm"))
    return torch.cat(tokens_of_all).mean(dim=0)


@pytest.fixture(scope="module")
def golden_model():
    model = CEDModel(CEDConfig(**builders.CED_SIZES["tiny"])).eval()
    builders.fill(model, 0.08)
    return model


@pytest.mark.parametrize(
    ("samples", "frames", "mean_db", "start", "length"),
    [
        (80_000, 501, -57.7848, [0.56050, -0.20951, 0.79064, -0.28509, -0.60179], 8.05154),
        (160_000, 1001, -58.0226, [0.55864, -0.20315, 0.79067, -0.29449, -0.60286], 8.08051),
        (480_000, 3001, -58.1814, [0.55993, -0.20071, 0.78888, -0.29455, -0.60927], 8.00585),
    ],
)
@torch.no_grad()
def test_golden_embeddings(golden_model, samples, frames, mean_db, start, length):
    clip = 0.5 * builders.tone(440, samples) + 0.25 * builders.tone(1000, samples)
    inputs = CEDFeatureExtractor()(clip, sampling_rate=16000, return_tensors="pt")
    embedding = golden_model(**inputs).pooler_output[0]
    assert inputs["input_features"].shape == (1, 64, frames)
    assert inputs["input_features"].mean().item() == pytest.approx(mean_db, abs=2e-3)
    assert embedding[:5].tolist() == pytest.approx(start, abs=2e-4)
    assert embedding.norm().item() == pytest.approx(length, abs=2e-4)


@pytest.mark.parametrize("frames", [16, 31, 501, 1012, 1013, 2024])
@torch.no_grad()
def test_agrees_with_slow_implementation(frames):
    model = ced()
    features, mask = batch([frames])
    embedding = model(features, mask).pooler_output[0]
    torch.testing.assert_close(embedding, slow_embedding(model, features[0]).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frames", [4, 1008, 1009, 1500])
@torch.no_grad()
def test_dasheng_is_the_same_encoder_with_other_patches(frames):
    model = ced(**DASHENG)
    features, mask = batch([frames, frames + 50])
    together = model(features, mask).pooler_output
    alone = model(features[:1, :, :frames]).pooler_output[0]
    torch.testing.assert_close(together[0], alone, atol=2e-6, rtol=0)
    expected = slow_embedding(model, features[0, :, :frames]).float()
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)
    if frames == 4:
        with pytest.raises(ValueError, match=r"\b4\b"):
            model(features[:1, :, :3])
        extractor = CEDFeatureExtractor.from_config(model.config)
        clip = builders.noise(extractor.min_samples)
        assert model(**extractor(clip, sampling_rate=16000, return_tensors="pt")).pooler_output.isfinite().all()


@pytest.mark.parametrize(
    "lengths",
    [
        [16, 1012, 500],  # one chunk each
        [1012, 2024, 3036],  # exact multiples
        [17, 3001, 1011, 1013, 2023, 2025],  # all kinds together
    ],
)
@torch.no_grad()
def test_batch_mates_change_nothing(lengths):
    model = ced()
    features, mask = batch(lengths)
    together = model(features, mask).pooler_output
    for index, length in enumerate(lengths):
        alone = model(features[index : index + 1, :, :length]).pooler_output[0]
        torch.testing.assert_close(together[index], alone, atol=2e-6, rtol=0)


@torch.no_grad()
def test_padding_is_never_read():
    model = ced()
    features, mask = batch([100, 1500])
    expected = model(features, mask)
    features[0, :, 100:] = torch.nan
    read = model(features, mask)
    assert torch.equal(read.pooler_output, expected.pooler_output)
    assert torch.equal(read.last_hidden_state, expected.last_hidden_state)


def test_no_gradient_flows_to_padding_or_cut_off_frames():
    model = ced()
    features, mask = batch([100, 40])
    features.requires_grad_()
    model(features, mask).pooler_output.sum().backward()
    touched = features.grad.abs().sum(dim=1) > 0
    assert touched.sum(dim=1).tolist() == [96, 32]
    assert touched[0, :96].all()
    assert touched[1, :32].all()


@torch.no_grad()
def test_without_incomplete_chunks():
    model = ced(pad_last=False)
    features, _ = batch([2500])
    torch.testing.assert_close(
        model(features).pooler_output, model(features[..., :2024]).pooler_output, atol=1e-6, rtol=0
    )
    mixed, mask = batch([2500, 1500, 700])
    together = model(mixed, mask).pooler_output
    for index, used in enumerate([2024, 1012, 700]):
        alone = model(mixed[index : index + 1, :, :used]).pooler_output[0]
        torch.testing.assert_close(together[index], alone, atol=2e-6, rtol=0)


@torch.no_grad()
def test_hidden_state_counts_tokens():
    model = ced()
    features, mask = batch([3001, 100])
    hidden = model(features, mask).last_hidden_state
    assert hidden.shape == (2, 3 * 252, 32)
    own = hidden.abs().sum(dim=-1) > 0
    assert own.sum(dim=1).tolist() == [756, 4 * 6]


@torch.no_grad()
def test_only_chunks_with_sound_are_computed():
    model = ced()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    features, mask = batch([3001, 100, 1012])
    model(features, mask)
    assert seen == [(3 + 1 + 1, 252, 32)]


def test_only_padding_is_masked_in_training():
    model = ced().train()
    masks = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: masks.append(args[1]))
    for lengths in ([500, 500], [3001, 1500], [1500, 500]):
        model(*batch(lengths))
    assert [mask is None for mask in masks] == [True, True, False]


def test_the_normalisation_does_not_move_in_training():
    model = ced().train()
    before = {name: value.clone() for name, value in model.init_bn.named_buffers()}
    alone = model(torch.randn(1, 64, 101) * 20 - 40).pooler_output
    assert all(torch.equal(value, before[name]) for name, value in model.init_bn.named_buffers())
    assert alone.isfinite().all()


def test_fitted_normalisation_is_that_of_the_clips_own_frames():
    model = ced()
    features = torch.randn(3, 64, 50) * 20 - 40
    mask = (torch.arange(50) < torch.tensor([[50], [20], [35]])).long()
    own = torch.cat([features[0], features[1, :, :20], features[2, :, :35]], dim=1)
    model.fit_normalisation(features.masked_fill(mask[:, None] == 0, 1e6), mask)
    torch.testing.assert_close(model.init_bn.running_mean, own.mean(dim=1))
    torch.testing.assert_close(model.init_bn.running_var, own.var(dim=1, correction=0))
    model.fit_normalisation(features)
    torch.testing.assert_close(model.init_bn.running_mean, features.mean(dim=(0, 2)))


@torch.no_grad()
def test_eager_agrees_with_sdpa_and_returns_weights():
    model = ced()
    features, mask = batch([1500, 100])
    sdpa = model(features, mask).pooler_output
    model.set_attn_implementation("eager")
    eager = model(features, mask, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(eager.pooler_output, sdpa, atol=1e-5, rtol=0)
    assert len(eager.attentions) == 2
    assert len(eager.hidden_states) == 3
    weights = eager.attentions[0]
    assert weights.shape == (3, 2, 252, 252)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 2, 252))
    columns = torch.arange(252) % 63
    assert weights[2][..., columns >= 6].max() == 0


@pytest.mark.parametrize(
    ("size", "weights"), [("tiny", 5_401_088), ("mini", 9_560_704), ("small", 21_418_880), ("base", 85_304_960)]
)
def test_published_sizes(size, weights):
    with torch.device("meta"):
        model = CEDModel(CEDConfig(**builders.CED_SIZES[size]))
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


def test_published_folder_loads_completely(tmp_path):
    config = {**builders.PUBLISHED_CED_CONFIG, "embed_dim": 32, "depth": 2, "num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = published.ced_hub(
        published.random(published.ced_encoder(32, 2)), published.random(published.ced_head(32))
    )
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, report = CEDModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    state = model.state_dict()
    assert len(state) == len(tensors) - 4
    for name, value in state.items():
        assert torch.equal(value, tensors[f"encoder.{name}"]), name


def test_initial_weights_have_the_expected_distribution(tmp_path):
    model = CEDModel(builders.ced_config(embed_dim=128, initializer_range=0.05))
    state = model.state_dict()
    state.pop("time_pos_embed")
    model.save_pretrained(tmp_path, state_dict=state)
    reloaded, report = CEDModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"time_pos_embed"}
    for fresh in (model, reloaded):
        assert fresh.time_pos_embed.std().item() == pytest.approx(0.05, rel=0.05)
        assert fresh.freq_pos_embed.std().item() == pytest.approx(0.05, rel=0.2)  # of 512 numbers
        assert fresh.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.05, rel=0.05)
        assert fresh.blocks[0].attn.qkv.bias.abs().max() == 0
        assert (fresh.init_bn.running_var == 1).all()
    assert torch.equal(model.blocks[1].mlp.fc2.weight, reloaded.blocks[1].mlp.fc2.weight)


def test_drop_path_drops_whole_samples():
    torch.manual_seed(0)
    drop = ced(depth=2, drop_path_rate=0.25).blocks[1].drop_path.train()
    kept = drop(torch.ones(2000, 3, 5))
    values = kept.flatten(1)
    assert (values == values[:, :1]).all()
    assert sorted(set(values[:, 0].tolist())) == pytest.approx([0, 4 / 3])
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(drop.eval()(torch.ones(4, 3)), torch.ones(4, 3))


def test_drop_path_grows_linearly():
    model = ced(depth=3, drop_path_rate=0.2)
    assert [block.drop_path.drop_prob for block in model.blocks] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("features", "mask", "message"),
    [
        (torch.zeros(1, 64, 15), None, r"clip 0.*\b15\b"),
        (torch.zeros(2, 64, 40), torch.tensor([[1] * 40, [1] * 9 + [0] * 31]), r"clip 1.*\b9\b"),
        (torch.zeros(1, 60, 40), None, r"\(1, 60, 40\)"),
        (torch.zeros(64, 40), None, r"\(64, 40\)"),
        (torch.zeros(1, 64, 40), torch.ones(1, 39), r"\(1, 39\)"),
        (torch.zeros(1, 64, 40), torch.tensor([[0] * 10 + [1] * 30]), "audio_attention_mask"),
    ],
)
def test_bad_input_is_refused(features, mask, message):
    with pytest.raises(ValueError, match=message):
        ced()(features, mask)


@pytest.mark.parametrize(("channels", "size", "kernel"), [(1, (64, 101), 16), (3, (9, 8), (4, 2)), (4, (4, 6), 1)])
def test_the_convolution_of_patches_equals_a_convolution(channels, size, kernel):
    """Adapters of peft build their own layers from this class, with other channels and a kernel of 1."""
    torch.manual_seed(0)
    conv = CEDPatchConv2d(channels, 5, kernel_size=kernel, stride=kernel)
    plain = torch.nn.Conv2d(channels, 5, kernel_size=kernel, stride=kernel)
    plain.load_state_dict(conv.state_dict())
    images = torch.randn(2, channels, *size)
    torch.testing.assert_close(conv(images), plain(images), atol=1e-5, rtol=1e-5)
