"""SONAR's text encoder, compared with golden values; padding, training mode and saving do not change it."""

import builders
import pytest
import torch
from transformers import M2M100Config
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

from modeling_supclap import SonarTextModel

IDS = torch.tensor([[46, 10, 20, 30, 40, 2, 1, 1], [56, 7, 8, 9, 11, 12, 13, 2]])


def sonar(**kwargs) -> SonarTextModel:
    torch.manual_seed(0)
    return SonarTextModel(builders.sonar_config(**kwargs)).eval()


@torch.no_grad()
def test_golden_embeddings():
    config = M2M100Config(vocab_size=300, d_model=64, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=128)
    model = SonarTextModel(config).eval()
    assert len(model.state_dict()) == 51
    builders.fill(model, 0.4)
    pooled = model(IDS, attention_mask=(IDS != 1).long()).pooler_output
    assert pooled[0, :4].tolist() == pytest.approx([-1.26888, -1.42543, -0.75577, -0.63699], abs=1e-4)
    assert pooled[1, :4].tolist() == pytest.approx([-0.47703, -1.11628, -0.79090, 0.37667], abs=1e-4)
    assert pooled.norm(dim=1).tolist() == pytest.approx([7.09727, 6.54642], abs=1e-4)


@torch.no_grad()
def test_padding_changes_nothing():
    model = sonar()
    short = model(IDS[:1, :6]).pooler_output
    padded = torch.nn.functional.pad(IDS[:1, :6], (0, 8), value=1)
    torch.testing.assert_close(model(padded).pooler_output, short, atol=1e-6, rtol=0)
    torch.testing.assert_close(model(IDS).pooler_output[:1], short, atol=1e-6, rtol=0)


def test_layers_are_never_dropped():
    model = sonar(encoder_layerdrop=0.9, encoder_layers=6)
    assert model.config.encoder_layerdrop == 0
    quiet = model(IDS).pooler_output
    model.train()
    for _ in range(5):
        assert torch.equal(model(IDS).pooler_output, quiet)


@torch.no_grad()
def test_encoder_folder_loads_completely(tmp_path):
    torch.manual_seed(0)
    published = M2M100Encoder(builders.sonar_config()).eval()
    published.save_pretrained(tmp_path)
    model, report = SonarTextModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(model.embed_positions.weights, published.embed_positions.weights)
    mask = (IDS != 1).long()
    assert torch.equal(model(IDS).last_hidden_state, published(IDS, attention_mask=mask).last_hidden_state)
