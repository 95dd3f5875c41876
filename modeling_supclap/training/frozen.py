"""What a tower that does not train says of each text, or recording, is worked out once and remembered.

A vector is found by the content of the input itself: a caption by its tokens, whatever the clip, the language drawn or
the epoch; a recording by its spectrogram, so that one cropped elsewhere is another one. What comes after the tower, the
projection, is not remembered and may train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

Rows = Mapping[str, Tensor]

LIMIT_BYTES = 2 << 30
"""What the vectors of a tower may take of a process's memory; those that come later are worked out each time."""


class FrozenCache:
    """The vectors of one tower.

    Args:
        parts: The modules that make them; as long as one of their parameters trains, nothing is remembered.
        limit_bytes: The memory that they may take.
    """

    def __init__(self, parts: Iterable[nn.Module], limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._parts = nn.ModuleList(parts)
        self._vectors: dict[bytes, Tensor] = {}
        self._bytes = 0
        self._version: int | None = None
        self._is_repeatable: dict[bool, bool] = {}  # in training mode, and in evaluation mode

    def is_frozen(self) -> bool:
        """Whether no parameter of the tower trains."""
        return not any(parameter.requires_grad for parameter in self._parts.parameters())

    def is_usable(self, pool: Callable[[Rows], Tensor], inputs: Rows) -> bool:
        """Whether the tower would say the same once more: nothing in it trains, and it draws no random number.

        Args:
            pool: The tower, in the mode in which it is to be used.
            inputs: A batch, whose first row is tried.
        """
        if not self.is_frozen():
            return False
        mode = self._parts[0].training
        if mode not in self._is_repeatable:
            self._is_repeatable[mode] = not _draws(pool, {name: tensor[:1] for name, tensor in inputs.items()})
        return self._is_repeatable[mode]

    def __call__(self, pool: Callable[[Rows], Tensor], inputs: Rows, mask: str | None) -> Tensor:
        """The vectors of a batch.

        Args:
            pool: The tower; it gets the rows that are not known yet, each once.
            inputs: Tensors by name, each with the N rows along its first axis.
            mask: As `grad_cache.embed_in_chunks`.

        Returns:
            `(N, D)`, without gradient.
        """
        version = sum(parameter._version for parameter in self._parts.parameters())
        if version != self._version:  # weights were loaded since
            self._version, self._bytes = version, 0
            self._vectors.clear()

        keys = _content_keys(inputs, mask)
        unknown = {key: row for row, key in enumerate(keys) if key not in self._vectors}
        found = self._vectors
        if unknown:
            rows = torch.tensor(list(unknown.values()))
            with torch.no_grad():
                vectors = pool({name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()})  # (U, D)
            new = dict(zip(unknown, vectors.cpu(), strict=True))
            found = {**{key: self._vectors[key] for key in keys if key not in new}, **new}

            if self._bytes + vectors.nbytes <= self.limit_bytes:
                self._vectors |= new
                self._bytes += vectors.nbytes
        return torch.stack([found[key] for key in keys]).to(next(iter(inputs.values())).device)


def _content_keys(inputs: Rows, mask: str | None) -> list[bytes]:
    """A hash of what is not padding in each row."""
    arrays = {name: tensor.cpu().numpy() for name, tensor in inputs.items()}
    keys = []
    for row in range(len(next(iter(arrays.values())))):
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(arrays.items()):
            values = array[row]
            if mask is not None and values.shape[-1] == arrays[mask].shape[-1]:
                values = values[..., arrays[mask][row].astype(bool)]
            digest.update(f"{name} {values.shape}".encode() + values.tobytes())
        keys.append(digest.digest())
    return keys


def _draws(pool: Callable[[Rows], Tensor], inputs: Rows) -> bool:
    """Whether a tower draws random numbers, as dropout does; those of the run stay as they are."""
    device = next(iter(inputs.values())).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        before = _random_states(devices)
        pool(inputs)
        after = _random_states(devices)
    return any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
