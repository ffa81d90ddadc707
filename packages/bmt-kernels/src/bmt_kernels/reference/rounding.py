"""Stochastic rounding in plain PyTorch."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


@torch.no_grad()
def round_stochastically(values: Tensor, dtype: torch.dtype, seed: int, indices: Tensor) -> Tensor:
    """`values` in `dtype`; `indices` (int64, of the same shape) are those of the elements in the logical tensor."""
    noise = _hash(indices ^ mixed_seed(seed))
    dropped = 16 if dtype is torch.bfloat16 else 13
    bits = values.contiguous().view(torch.int32)
    low = (1 << dropped) - 1
    rounded = ((bits + (noise & low).to(torch.int32)) & ~low).view(torch.float32)
    if dtype is torch.float16:  # below its smallest normal number it has steps of 2^-24
        steps = (values * 2.0**24 + (noise & low) / 2.0**dropped).floor() * 2.0**-24
        rounded = torch.where(values.abs() < 2.0**-14, steps, rounded)
    return torch.where(values.isfinite(), rounded, values).to(dtype)


def mixed_seed(seed: int) -> int:
    """Seeds that follow each other differ in all bits; of any integer, 64 bits count."""
    seed &= (1 << 64) - 1
    mixed = _hash(seed & (_LOW >> 1))
    while seed := seed >> 31:
        mixed = _hash(mixed ^ (seed & (_LOW >> 1)))
    return mixed


Numbers = TypeVar("Numbers", int, Tensor)


def _hash(numbers: Numbers) -> Numbers:
    """``rounding_noise`` of csrc/common/rounding.h, for each number (int64, not negative)."""
    x = (numbers ^ (numbers >> 32)) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
