"""In which dtypes a sharded module stores, computes and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a module's floating-point parameters on their way through a step.

    The shards keep the dtype the parameters were built with (fp32 "master" shards, say), and gradients
    arrive in that dtype.

    Attributes:
        param_dtype: what parameters are unsharded and computed in; ``None``: as stored.
        reduce_dtype: what gradients are summed over ranks in; ``None``: as computed.
        output_dtype: what floating-point outputs of the module are cast to; ``None``: as computed.
        cast_forward_inputs: whether floating-point inputs of the module are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} is not a floating-point torch.dtype")
