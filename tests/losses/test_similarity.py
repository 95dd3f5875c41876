"""Unit norm of the embeddings of all losses, similarities in the wider dtype, and the mean over positives."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from builders import related_pair, unit_rows
from torch import Tensor

from modeling_supclap.losses import (
    cacl_loss,
    info_nce,
    kcl_loss,
    radius_constraint,
    reweighted_info_nce,
    sigmoid_loss,
    similarity_matrix,
    supclap_loss,
    support_vector_loss,
    temporal_nce,
)
from modeling_supclap.losses.similarity import positive_mean, unit_norm

LOSSES: dict[str, Callable[..., Tensor]] = {
    "info_nce": lambda a, t, **o: info_nce(a, t, 9.0, **o),
    "sigmoid": lambda a, t, **o: sigmoid_loss(a, t, 9.0, -9.0, **o),
    "reweighted": lambda a, t, **o: reweighted_info_nce(a, t, 9.0, 1.5, **o),
    "kcl": lambda a, t, **o: kcl_loss(a, torch.stack([t, t.flip(-1)], dim=1), 9.0, **o),
    "cacl": lambda a, t, **o: cacl_loss(a, a, t, 9.0, **o),
    "svr": lambda a, t, **o: support_vector_loss(t, a, 0.2, 9.0, **o),
    "svr sigmoid": lambda a, t, **o: support_vector_loss(t, a, 0.2, 9.0, logit_bias=-9.0, **o),
    "supclap": lambda a, t, **o: supclap_loss(a, t, 9.0, 0.2, **o)[0],
    "constraint": lambda a, t, **o: radius_constraint(a, t, 3.0, **o),
    "temporal": lambda a, t, **o: temporal_nce(a, t, 9.0, torch.ones(5, 5), **o),
    "negatives": lambda a, t, **o: info_nce(a, a, 9.0, negatives=t.unsqueeze(1), **o),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
def test_embeddings_of_another_norm_are_refused_or_normalized(name: str) -> None:
    audio, text = related_pair()
    expected = LOSSES[name](audio, text)
    longer = torch.tensor([1.0, 1.0, 1.0, 1.05, 1.0], dtype=torch.float64).unsqueeze(1) * text  # one of five
    with pytest.raises(ValueError, match=r"0\.05.*normalize=True"):
        LOSSES[name](audio, longer)
    torch.testing.assert_close(LOSSES[name](audio, longer, normalize=True), expected)
    torch.testing.assert_close(LOSSES[name](3 * audio, longer, normalize=True), expected)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rounding_of_low_precision_is_accepted(name: str, dtype: torch.dtype) -> None:
    for width in (5, 1024):
        LOSSES[name](*(F.normalize(x.to(dtype), dim=-1) for x in related_pair(5, width)))
        LOSSES[name](*(x.to(dtype) for x in related_pair(5, width)))


@every_loss
def test_known_unit_vectors_are_not_checked(name: str) -> None:
    audio, text = related_pair()
    assert LOSSES[name](audio, 2 * text, normalize=None).isfinite()


def test_a_vector_of_zeros_is_not_refused() -> None:
    """It has no direction, so normalizing does not change it; masked negatives may be padded with zeros."""
    audio, text = related_pair()
    padded = torch.stack([unit_rows(5, 7, seed=3), torch.zeros(5, 7)], dim=1)
    mask = torch.tensor([[True, False]] * 5)
    loss = info_nce(audio, text, 9.0, negatives=padded, negative_mask=mask)
    torch.testing.assert_close(loss, info_nce(audio, text, 9.0, negatives=padded[:, :1]))
    assert info_nce(audio, 0 * text, 9.0).isfinite()


@pytest.mark.gpu
def test_on_a_gpu_a_later_call_raises_and_no_call_waits() -> None:
    audio, text = (embeds.cuda() for embeds in related_pair())
    info_nce(audio, text, 9.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            info_nce(audio, text, 9.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    def run_two_steps() -> None:
        for _ in range(2):
            info_nce(audio, 2 * text, 9.0)
            torch.cuda.synchronize()

    with pytest.raises(ValueError, match="or an earlier call"):
        run_two_steps()
    torch.cuda.synchronize()
    assert info_nce(audio, text, 9.0).isfinite()  # the error is raised once


class OnGPU(Tensor):
    """Tensor that is said to be on a GPU."""

    is_cuda = True

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)


def test_a_check_that_is_not_ready_raises_in_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[bool] = []

    def record_event(is_ready: bool = False) -> SimpleNamespace:
        number = len(ready)
        ready.append(is_ready)
        return SimpleNamespace(query=lambda: ready[number])

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=record_event))
    unit, longer = (embeds.as_subclass(OnGPU) for embeds in (unit_rows(5, 7), 2 * unit_rows(5, 7)))
    for embeds in (unit, longer, unit, longer):
        assert unit_norm(embeds) is embeds
    ready[0] = ready[2] = True  # the one between them is not
    assert unit_norm(unit) is unit
    ready[1] = True
    with pytest.raises(ValueError, match=r"by up to 1 \(on a GPU, in this or an earlier call\)"):
        unit_norm(unit)
    ready[:] = [True] * len(ready)
    stream = SimpleNamespace(record_event=lambda: record_event(is_ready=True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert unit_norm(unit) is unit  # the error is raised once


def test_a_compiled_loss_is_one_graph_without_the_check() -> None:
    """The check reads a value, which would break the graph."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(graph)
        return graph.forward

    audio, text = related_pair()
    compiled = torch.compile(lambda a, t: supclap_loss(a, t, 9.0, 0.2, 0.3)[0], backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(audio, text), supclap_loss(audio, text, 9.0, 0.2, 0.3)[0])
    assert len(graphs) == 1


def test_similarity_keeps_the_wider_dtype() -> None:
    audio, text = related_pair()
    assert similarity_matrix(audio, text.float()).dtype == torch.float64
    assert similarity_matrix(audio.half(), text.bfloat16()).dtype == torch.float32


def test_positives_are_the_diagonal_or_a_group() -> None:
    values = torch.arange(9.0).reshape(3, 3)
    assert positive_mean(values).tolist() == [0, 4, 8]
    assert positive_mean(values, torch.tensor([5, 1, 5])).tolist() == [1, 4, 7]
