"""Percentile clipping: a gradient is scaled down to a percentile of its own recent norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HISTORY = 100
"""How many steps are remembered."""


def clip_factors(histories: Sequence[Tensor], squares: Sequence[Tensor], step: int, percentile: int) -> list[Tensor]:
    """The factor of each gradient. Its norm goes into its history.

    This is bitsandbytes' algorithm, which later versions of it no longer have. The squared norms of the last 100 steps
    (with fewer steps, the first norm in place of the missing ones) are sorted in ascending order. The one with the
    index ``percentile`` is the square of the largest norm allowed. A larger gradient is scaled down to that norm.

    Args:
        histories: per gradient, fp32 of shape (100,): squared norms. Written.
        squares: per gradient, fp32 of one element: the squared norm in this step.
        step: the number of this step, counted from 1.
        percentile: from 0 to 99.

    Returns:
        per gradient a 0-dim fp32 tensor, at most 1.
    """
    new = torch.stack([square.reshape(()) for square in squares])
    past = torch.stack(list(histories))  # (gradients, 100)
    past[:, slice(None) if step == 1 else step % HISTORY] = new[:, None] if step == 1 else new
    torch._foreach_copy_(list(histories), list(past.unbind()))
    largest, norms = past.sort(dim=1).values[:, percentile].sqrt(), new.sqrt()
    return list(torch.where(norms > largest, largest / norms, 1).unbind())
