"""The dtypes in which a sharded module computes and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a module's floating-point parameters, gradients, inputs and outputs.

    The shards keep the dtype that the parameters were built with (fp32 for example), and ``.grad`` has that dtype.

    Attributes:
        param_dtype: of unsharded parameters; ``None``: as stored.
        reduce_dtype: in which gradients are summed over ranks; ``None``: as computed.
        output_dtype: to which floating-point outputs of the module are cast; ``None``: as computed.
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
