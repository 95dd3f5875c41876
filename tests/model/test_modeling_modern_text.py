"""Text tower of CLAP2: padding, causal attention, pooling. OpenCLIP's numbers are in
`tests/conversion/test_conversion_open_clip.py`."""

import open_clip_folders as folders
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

IDS = torch.tensor([[59, 1, 2, 3, 4, 57], [59, 10, 57, 58, 58, 58]])


@pytest.mark.parametrize("name", folders.MODELS)
@torch.no_grad()
def test_padding_changes_nothing(name):
    model = folders.build(name)[0].text_model
    together = model(IDS, IDS.ne(58).long()).pooler_output
    alone = model(IDS[1:, :3]).pooler_output[0]
    torch.testing.assert_close(together[1], alone, atol=1e-6, rtol=1e-5)
    # without a mask, pad_token_id marks the padding
    torch.testing.assert_close(model(IDS).pooler_output, together)


@pytest.mark.parametrize(("name", "is_causal"), [("A", False), ("B", True)])
@torch.no_grad()
def test_a_token_sees_later_tokens_only_without_causal_attention(name, is_causal):
    model = folders.build(name)[0].text_model
    changed = IDS.clone()
    changed[0, 4] = 9
    before, after = model(IDS).last_hidden_state[0], model(changed).last_hidden_state[0]
    assert torch.allclose(before[:4], after[:4], atol=1e-6) == is_causal
    assert not torch.allclose(before[4], after[4], atol=1e-6)


@torch.no_grad()
def test_eos_pooling_takes_the_first_eos_or_else_the_last_token():
    model = folders.build("B")[0].text_model
    ids = torch.tensor([[59, 1, 57, 2, 57, 58], [59, 1, 2, 3, 58, 58]])
    outputs = model(ids)
    torch.testing.assert_close(outputs.pooler_output[0], outputs.last_hidden_state[0, 2])
    torch.testing.assert_close(outputs.pooler_output[1], outputs.last_hidden_state[1, 3])


def test_attention_heads_must_divide_the_width():
    with pytest.raises(StrictDataclassError, match=r"hidden_size=32.*3"):
        folders.ModernTextConfig(**{**folders.TEXT, "num_attention_heads": 3})
