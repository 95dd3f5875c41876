"""Frames of padded spectrograms: counted from the mask, and wrong inputs are refused."""

import pytest
import torch

from modeling_supclap.frames import count_frames

FEATURES = torch.zeros(2, 64, 5)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


def test_frames_are_counted_from_the_mask():
    assert count_frames(FEATURES, MASK, 64, 1, False).tolist() == [5, 2]
    assert count_frames(FEATURES, None, 64, 1, False).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("features", "mask", "least", "message"),
    [
        (FEATURES[0], None, 1, r"64 mel bands.*\(64, 5\)"),
        (FEATURES[:, :32], None, 1, r"64 mel bands.*\(2, 32, 5\)"),
        (FEATURES, MASK[:, :4], 1, r"\(2, 5\).*\(2, 4\)"),
        (FEATURES, MASK.flip(1), 1, "ones followed by zeros"),
        (FEATURES, MASK, 3, "clip 1 has 2 frames.*3"),
        (FEATURES[..., :2], None, 3, "clip 0 has 2 frames.*3"),
    ],
)
def test_wrong_inputs_are_refused(features, mask, least, message):
    with pytest.raises(ValueError, match=message):
        count_frames(features, mask, 64, least, False)


def test_mask_values_are_not_read_in_training():
    assert count_frames(FEATURES, MASK.flip(1), 64, 3, True).tolist() == [5, 2]
