"""pytest plugin that changes the last digits of products and Fourier transforms, as another processor does.

    python -m pytest -p rounding_noise tests/model        # with tests/ on PYTHONPATH, as in `make test-processors`

A test that fails only with this plugin depends on rounding errors. The same inputs always have the same noise, so that
repeated runs stay equal. Noise depends on the shapes, so that a clip alone and in a batch differ, as they may with
another library, processor or number of threads. Its size is that of rounding in float32: of each summand in a product,
and of the root mean square of a spectrum in a Fourier transform.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUNDING = 2.0**-24  # of a float32

_library = torch.library.Library("aten", "IMPL")


def disturb(result: Tensor, size: Tensor) -> Tensor:
    """Add noise between -`size` and `size` to a float32 tensor. It is a hash of the bits and of the shape."""
    bits = result.contiguous().view(torch.int32).to(torch.int64)
    salt = hash(tuple(result.shape)) % 65521
    hashed = ((bits * 2654435761 + salt * 40503) >> 7) & 0xFFFF
    return (result.double() + size * (hashed / 32768 - 1)).float()


def _product(kernel: Any) -> Callable[..., Tensor]:
    """Return a matrix product with noise."""

    def disturbed(keyset: Any, *arguments: Any, **options: Any) -> Tensor:
        result: Tensor = kernel.call_boxed(keyset, *arguments, **options)
        if result.dtype != torch.float32 or not result.numel():
            return result
        absolute = [each.double().abs() if isinstance(each, Tensor) else each for each in arguments]
        scales = {name: abs(value) for name, value in options.items() if name in ("alpha", "beta")}
        if "out" in options:
            scales["out"] = torch.empty_like(result, dtype=torch.float64)
        size = kernel.call_boxed(keyset, *absolute, **scales) * ROUNDING
        noisy = disturb(result, size)
        return result.copy_(noisy) if "out" in options else noisy

    return disturbed


def _transform(kernel: Any) -> Callable[..., Tensor]:
    """Return a Fourier transform with noise, of which the size grows with log2(n)."""

    def disturbed(keyset: Any, *arguments: Any, **options: Any) -> Tensor:
        result: Tensor = kernel.call_boxed(keyset, *arguments, **options)
        if result.dtype not in (torch.float32, torch.complex64) or not result.numel():
            return result
        values = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
        bins = result.shape[-1]
        across = (-2, -1) if result.is_complex() else (-1,)
        size = (values.double().square().sum(across, keepdim=True) / bins).sqrt()
        noisy = disturb(values, size * ROUNDING * math.log2(bins + 1) / 4)
        return torch.view_as_complex(noisy) if result.is_complex() else noisy

    return disturbed


def pytest_configure() -> None:
    """Replace the kernels."""
    products = "mm addmm bmm baddbmm mv addmv mm.out addmm.out bmm.out baddbmm.out"
    for names, with_noise in ((products, _product), ("_fft_r2c _fft_c2c _fft_c2r", _transform)):
        for name in names.split():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            _library.impl(name, with_noise(kernel), "CPU", with_keyset=True, allow_override=True)
