"""Checks of all conversions: no tensor is missing, unused, of a wrong shape, or lost by renaming."""

import pytest
import torch

from modeling_supclap.conversion.tensors import Tensors, fill_exactly


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("bias"), r"Linear.*bias: none for \(2,\)$"),
        (lambda tensors: tensors.update(gain=torch.ones(1)), r"gain: \(1,\) for none$"),
        (lambda t: t.update(weight=torch.ones(3, 2)), r"weight: \(3, 2\) for \(2, 3\)"),
        (lambda t: t.update(b=t.pop("bias")), r"2 shapes.*b: \(2,\) for none; bias: none for \(2,\)$"),
    ],
)
def test_a_gap_is_an_error_and_fills_nothing(change, message):
    model = torch.nn.Linear(3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        fill_exactly(model, tensors, "the file")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_first_rule_that_fits_renames_and_hides_no_tensor():
    tensors = Tensors(dict(zip(("a.1.w", "a.w", "d.w"), torch.zeros(3, 1), strict=True)), "the file")
    renamed = tensors.rename(((r"^a\.(\d)\.", r"b.\1."), (r"^a\.", "c.")))
    assert {new: value.data_ptr() for new, value in renamed.items()} == {
        "b.1.w": tensors["a.1.w"].data_ptr(), "c.w": tensors["a.w"].data_ptr(), "d.w": tensors["d.w"].data_ptr(),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"x\.w.*d\.w"):
        tensors.rename(((r"^[ad]\.", "x."),))


@pytest.mark.parametrize(
    ("names", "count"),
    [([], 0), (["layers.0.w", "layers.1.w"], 2), (["layers.10.w", "layersX2.w", "my.layers.30.w"], 11)],
)
def test_layers_are_counted_by_their_highest_number(names, count):
    assert Tensors(dict.fromkeys(names), "the file").count_layers("layers.") == count


def test_a_tensor_that_is_missing_is_named():
    tensors = Tensors({"weight": torch.zeros(2, 3)}, "the file")
    assert tensors["weight"].shape == (2, 3)
    assert tensors.get("bias") is None
    with pytest.raises(ValueError, match=r"the file lacks bias.*weight"):
        tensors["bias"]


def test_tensors_set_aside_are_counted_by_kind():
    tensors = Tensors(dict.fromkeys(["head.w", "head.b", "my.head.w", "mask"]), "the file")
    kept = tensors.set_aside({r"head\.": "head", "mask$": "mask"})
    assert (list(kept), tensors.aside) == (["my.head.w"], {"head": 2, "mask": 1})


def test_tensors_set_aside_in_parts_are_counted_in_the_whole():
    names = ["audio.head.w", "audio.w", "text.head.w", "mask"]
    tensors = Tensors(dict.fromkeys(names), "the file")
    audio = tensors.below("audio.", "the tower").rename([("w", "weight")]).set_aside({"head": "head"})
    text = tensors.without("audio.").set_aside({r"text\.head": "head", "mask": "mask"})
    assert (list(audio), list(text), audio.origin) == (["weight"], [], "the tower")
    assert tensors.aside == {"head": 2, "mask": 1}
    assert list(tensors) == names
