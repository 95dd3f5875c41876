"""NaFlex tower: padding, patches, rotary positions; both towers of CLAP2: independence of the batch, recomputation in
training. OpenCLIP's numbers are in `tests/conversion/test_conversion_open_clip.py`."""

import open_clip_folders as folders
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from modeling_supclap import ModernTextConfig, ModernTextModel, NaFlexConfig, NaFlexModel
from modeling_supclap.conversion import load_open_clip
from modeling_supclap.rotary import rotate
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import ContrastiveObjective


def features(frames: int, seed: int = 0) -> torch.Tensor:
    return -40 + 20 * torch.randn(1, 64, frames, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", folders.MODELS)
@torch.no_grad()
def test_padding_changes_nothing(name):
    model = folders.build(name)[0].audio_model
    lengths = (201, 38, 3)
    batch, mask = torch.full((3, 64, 201), 7.0), torch.zeros(3, 201, dtype=torch.long)
    for row, frames in enumerate(lengths):
        batch[row, :, :frames], mask[row, :frames] = features(frames, row), 1
    together = model(batch, mask)
    for row, frames in enumerate(lengths):
        alone = model(features(frames, row))
        torch.testing.assert_close(together.pooler_output[row], alone.pooler_output[0], atol=1e-6, rtol=1e-5)
        rows, columns = 64 // model.config.patch_freq, -(-frames // model.config.patch_time)
        grid = together.last_hidden_state[row].unflatten(0, (rows, -1))
        torch.testing.assert_close(grid[:, :columns].flatten(0, 1), alone.last_hidden_state[0], atol=1e-5, rtol=1e-5)
        assert not grid[:, columns:].any()


@pytest.mark.parametrize(("mode", "filled"), [("floor", -90.0), ("silence", -100.0), ("repeat", 8.0)])
def test_patches_are_cut_row_by_row_and_the_last_is_filled(mode, filled):
    config = NaFlexConfig(embed_dim=8, depth=1, num_heads=1, n_mels=4, patch_freq=2, patch_time=3, patch_pad_mode=mode)
    clip = torch.arange(20.0).reshape(1, 4, 5)  # level of band b and frame t: 5 b + t
    clip[0, 3, 0] = -90.0
    clip[0, 0, 4] = 8.0
    patches, rows, columns = NaFlexModel(config)._patchify(clip, torch.tensor([5]))
    assert (rows, columns) == (2, 2)
    expected = [[0, 1, 2, 5, 6, 7], [3, 8, filled, 8, 9, 9 if mode == "repeat" else filled]]
    assert patches[0, :2].tolist() == expected


def test_rotation_turns_pairs_by_their_angles():
    vectors = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    angles = torch.tensor([[0.3, 1.1]])
    rotation = angles.cos(), angles.sin()
    for in_halves, pairs in ((False, [(0, 1), (2, 3)]), (True, [(0, 2), (1, 3)])):
        turned = rotate(vectors, rotation, in_halves).flatten()
        for (first, second), angle in zip(pairs, angles[0], strict=True):
            z = torch.complex(vectors.flatten()[first], vectors.flatten()[second]) * torch.exp(1j * angle)
            torch.testing.assert_close(torch.stack([turned[first], turned[second]]), torch.view_as_real(z))


@pytest.fixture(params=folders.MODELS)
def by_formula(request, tmp_path):
    """Model of `folders.MODELS` with weights by formula, and its processor."""
    folders.write_folder(tmp_path / "model", request.param)
    return load_open_clip(tmp_path / "model")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_embeddings_do_not_depend_on_the_batch(by_formula, implementation):
    model, processor = by_formula
    model.set_attn_implementation(implementation)
    clips = list(map(folders.wave, (96_000, 17_760, 600, 48_001)))
    texts = ["w1 w2 w3 w4", "w10", "w1 " * 14, "w3 w5"]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for is_training in (False, True):
            model.to(dtype).train(is_training)
            together = embed(model, processor, clips, texts)
            for row, pair in enumerate(zip(clips, texts, strict=True)):
                alone = embed(model, processor, *([each] for each in pair))
                torch.testing.assert_close(together[:, row], alone[:, 0], atol=tolerance, rtol=0)


def embed(model, processor, clips, texts):
    """Return the embeddings of clips and texts, (2, B, 16)."""
    inputs = processor(audio=clips, text=texts, sampling_rate=48_000, return_tensors="pt")
    inputs["input_features"] = inputs["input_features"].to(model.dtype)
    outputs = model(**inputs)
    return torch.stack([outputs.audio_embeds, outputs.text_embeds])


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_gradient_caching_equals_the_whole_batch(by_formula, chunk_size):
    model, processor = by_formula
    model.double()
    clips = list(map(folders.wave, (30_000, 9000, 48_000, 600)))
    texts = ["w1 w2", "w3", "w4 w5 w6", "w7"]
    inputs = dict(processor(audio=clips, sampling_rate=48_000, text=texts, return_tensors="pt"))
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name].unsqueeze(1)
    inputs["input_features"] = inputs["input_features"].double()
    gradients = []
    for chunk in (None, chunk_size):
        module = ContrastiveModule(model, ContrastiveObjective("infonce"), chunk).train()
        module.zero_grad()
        module(**inputs).loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in module.named_parameters()})
    assert max(each.abs().max() for each in gradients[0].values()) > 0.1
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"patch_freq": 10}, "n_mels=64.*10"), ({"embed_dim": 18, "num_heads": 3}, "embed_dim=18.*3")],
)
def test_invalid_sizes_are_refused(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        NaFlexConfig(**fields)


@pytest.mark.parametrize("include_prefix", [False, True])
@torch.no_grad()
def test_the_mean_includes_class_and_register_tokens_only_if_asked(include_prefix):
    config = NaFlexConfig(**{**folders.AUDIO_C, "class_token": True, "pool_include_prefix": include_prefix})
    torch.manual_seed(0)
    model, tokens = NaFlexModel(config).eval(), []
    model.blocks[-1].register_forward_hook(lambda block, inputs, output: tokens.append(output))
    pooled = model(features(40)).pooler_output
    used = tokens[0] if include_prefix else tokens[0][:, 3:]
    torch.testing.assert_close(pooled, model.fc_norm(used.mean(dim=1)))


def test_initial_weights_have_the_expected_distribution():
    fields = {"initializer_range": 0.05, "reg_tokens": 9}
    audio = NaFlexModel(NaFlexConfig(**{**folders.AUDIO_D, **fields, "attn_only_layer_scale": False}))
    text = ModernTextModel(ModernTextConfig(**{**folders.TEXT_C, **fields, "pool_type": "map", "mlp_bias": True}))
    drawn = [audio.embeds.reg_token, audio.embeds.cls_token, audio.blocks[0].mlp.fc2.weight]
    drawn += [text.reg_tokens, text.pool.query, text.token_embedding.weight, text.blocks[0].mlp.c_fc.weight]
    assert [weight.std().item() for weight in drawn] == pytest.approx([0.05] * len(drawn), rel=0.5)
    assert audio.attn_pool.latent.std().item() == pytest.approx(48**-0.5, rel=0.5)
    for block in (audio.blocks[1].mlp.fc2, text.blocks[1].mlp.c_fc):
        assert not block.bias.any()
    for scale in (
        audio.blocks[1].gamma_1,
        audio.blocks[1].gamma_2,
        text.blocks[1].ls1.gamma,
        text.blocks[1].ls2.gamma,
    ):
        assert scale.tolist() == pytest.approx([0.1] * len(scale))
    assert text.blocks[1].attn.vr_lambda.item() == 1
