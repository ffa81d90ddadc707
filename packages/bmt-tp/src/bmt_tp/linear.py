"""The linear layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .ops import OpLinear
from .parameters import Module, make_parameter


class Linear(Module):
    """``torch.nn.Linear`` with parameters that ranks share.

    Where bmt_zero is installed, the parameters are sharded over all ranks (``init_distributed`` comes first),
    inside a Block and outside of one; without it they are plain. Names, shapes and the distribution of the
    initial values are those of ``torch.nn.Linear``, so state dicts go from one to the other.

    Args:
        in_features, out_features: sizes of the last dimension of the input and of the output, at least 1.
        bias: whether to add a learnt bias.
        dtype: of the parameters; by default torch's default dtype.

    Raises:
        TypeError: ``dtype`` is not a floating-point one.
        ValueError: a size is not a positive integer.
        RuntimeError: bmt_zero is installed, and ``init_distributed`` has not run.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive integer")
        self.in_features = in_features
        self.out_features = out_features
        # Kaiming-uniform with a = √5, which is uniform in ±1/√in, as the bias is.
        self.weight = make_parameter((out_features, in_features), dtype, nn.init.kaiming_uniform_, a=math.sqrt(5))
        if bias:
            bound = 1 / math.sqrt(in_features)
            self.bias = make_parameter((out_features,), dtype, nn.init.uniform_, -bound, bound)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """(\\*, in_features) → (\\*, out_features)."""
        return OpLinear.apply(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        has_bias = self._parameters["bias"] is not None  # self.bias would gather it
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"
