"""In which dtypes a Block stores, computes and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a Block's floating-point parameters on their way through a step.

    The shards keep the dtype the parameters were built with (fp32 "master" shards, say), and gradients
    arrive in that dtype.

    Attributes:
        param_dtype: what parameters are gathered and computed in, and what floating-point inputs of the Block
            are cast to; ``None``: as stored, and inputs are left alone.
        reduce_dtype: what gradients are summed over ranks in; ``None``: as computed.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} is not a floating-point torch.dtype")
