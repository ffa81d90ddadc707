"""The dtypes in which a sharded module computes and reduces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from .compression import Compression, Kind


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a module's floating-point parameters, gradients, inputs and outputs.

    The shards keep the dtype that the parameters were built with (fp32 for example), and ``.grad`` has that dtype.

    Attributes:
        param_dtype: of unsharded parameters; ``None``: as stored.
        reduce_dtype: in which gradients are summed over ranks; ``None``: as computed.
        output_dtype: to which floating-point outputs of the module are cast; ``None``: as computed.
        cast_forward_inputs: whether floating-point inputs of the module are cast to ``param_dtype``.
        compression: how parameters and gradients are compressed between the ranks of a shard group; "int8" and
            "float8" mean a ``Compression`` of both; ``None``: not at all. Compressed gradients are summed in fp32. It
            needs ZeRO level 1, 2 or 3.
        param_dtype_override_fn: chooses for each parameter, when it is sharded, between ``param_dtype`` (by returning
            it, or None) and the dtype as stored (by returning that). It must return the same on all ranks, whenever it
            is called. Inputs are cast to ``param_dtype`` in any case.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    compression: Compression | Kind | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.compression, str):
            object.__setattr__(self, "compression", Compression(self.compression, self.compression))
        elif not isinstance(self.compression, Compression | None):
            raise ValueError(f"compression={self.compression!r} is not a Compression, 'int8', 'float8' or None")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} is not a floating-point torch.dtype")

    def of(self, param: nn.Parameter) -> MixedPrecision:
        """The same without ``param_dtype_override_fn``, for one parameter.

        Raises:
            ValueError: the function has returned another dtype.
        """
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(param)
        if dtype not in (None, self.param_dtype, param.dtype):
            raise ValueError(
                f"param_dtype_override_fn has returned {dtype!r} for a parameter of shape {tuple(param.shape)}; it may "
                f"return None, param_dtype={self.param_dtype} or the parameter's dtype, {param.dtype}"
            )
        kept = dtype is not None and dtype != self.param_dtype
        return replace(self, param_dtype=None if kept else self.param_dtype, param_dtype_override_fn=None)

    @property
    def packs_parameters(self) -> Compression | None:
        """The compression, if it packs parameters for all-gathers."""
        compression = self.compression
        return compression if isinstance(compression, Compression) and compression.parameters else None

    @property
    def packs_gradients(self) -> Compression | None:
        """The compression, if it packs gradients for reduce-scatters."""
        compression = self.compression
        return compression if isinstance(compression, Compression) and compression.gradients else None
