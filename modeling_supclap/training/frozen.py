"""Cache for the outputs of a frozen tower, so that each text or recording passes through the tower only once.

The cache key is a hash of the input, so a different crop of a recording has a different key. The cache stores the
output before the projection, so that the projection can still be trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .grad_cache import Rows, random_states, set_random_states

LIMIT_BYTES = 2 << 30
"""Maximum CPU memory for the cached vectors of a tower, per process. When it is full, new vectors are not cached."""


class FrozenCache:
    """Cache in CPU memory for the output vectors of one frozen tower. `parts` are the modules of the tower."""

    def __init__(self, parts: Iterable[nn.Module], limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._parts = nn.ModuleList(parts)
        self._vectors: dict[bytes, Tensor] = {}
        self._bytes = 0
        self._version: int | None = None
        # in training mode, and in evaluation mode
        self._is_repeatable: dict[bool, bool] = {}

    def is_frozen(self) -> bool:
        """Return whether all parameters of the tower are frozen."""
        return not any(parameter.requires_grad for parameter in self._parts.parameters())

    def is_repeatable(self, pool: Callable[[Rows], Tensor], inputs: Rows) -> bool:
        """Return whether the tower is deterministic in its current mode (no dropout, for example).

        The first call in each mode computes the output of the first row with `pool`, and tests whether torch, numpy or
        Python has drawn random numbers. It then restores the random states.
        """
        mode = self._parts[0].training
        if mode not in self._is_repeatable:
            row = {name: tensor[:1] for name, tensor in inputs.items()}
            device = next(iter(row.values())).device
            before = random_states(device)
            with torch.no_grad():
                pool(row)
            self._is_repeatable[mode] = before == random_states(device)
            set_random_states(before, device)
        return self._is_repeatable[mode]

    def __call__(
        self, pool: Callable[[Rows], Tensor], inputs: Rows, mask: str | None, keys: Sequence[bytes] | None = None
    ) -> Tensor:
        """Return the output vectors of a batch. The tower runs only on rows that are not in the cache.

        Args:
            pool: Function that runs the tower on the inputs.
            inputs: Tensors with N rows, `{input name: tensor}`.
            mask: Name of the input that is 1 for real tokens or frames and 0 for padding. None: no padding.
            keys: `content_keys` of the inputs. None: computed here. If the inputs are on a GPU, the CPU waits for them.

        Returns:
            `(N, D)`, without gradient.
        """
        version = sum(parameter._version for parameter in self._parts.parameters())
        # the weights have changed, for example by loading a checkpoint
        if version != self._version:
            self._version, self._bytes = version, 0
            self._vectors.clear()

        keys = content_keys(inputs, mask) if keys is None else keys
        device = next(iter(inputs.values())).device
        missing = {key: row for row, key in enumerate(keys) if key not in self._vectors}
        batch_vectors = self._vectors
        if missing:
            rows = torch.tensor(list(missing.values())).to(device, non_blocking=True)
            with torch.no_grad():
                # (U, D)
                vectors = pool({name: tensor[rows] for name, tensor in inputs.items()})
            new = dict(zip(missing, vectors.cpu(), strict=True))
            batch_vectors = {**{key: self._vectors[key] for key in keys if key not in new}, **new}

            if self._bytes + vectors.nbytes <= self.limit_bytes:
                self._vectors |= new
                self._bytes += vectors.nbytes
        return torch.stack([batch_vectors[key] for key in keys]).to(device, non_blocking=True)


def content_keys(inputs: Rows, mask: str | None) -> list[bytes]:
    """Compute a hash of each input row, excluding padding."""
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
