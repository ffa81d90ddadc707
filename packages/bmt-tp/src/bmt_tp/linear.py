"""The linear layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bmt_comm import Communicator

from .ops import OpLinear
from .parameters import Module, check_positive, make_parameter


class Linear(Module):
    """``torch.nn.Linear`` whose parameters are sharded.

    Where bmt_zero is installed, the parameters are sharded over all ranks, inside a Block and outside of one, and
    ``init_distributed`` must have run. Without it they are plain. Names, shapes and the distribution of the initial
    values are those of ``torch.nn.Linear``, so each loads the state dicts of the other.

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
        self.weight, bias_parameter = linear_parameters(in_features, out_features, bias, dtype)
        self.register_parameter("bias", bias_parameter)
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, input: Tensor) -> Tensor:
        """(\\*, in_features) → (\\*, out_features)."""
        return OpLinear.apply(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias(self)}"


def linear_parameters(
    in_features: int,
    out_features: int,
    bias: bool,
    dtype: torch.dtype | None,
    comm: Communicator | None = None,
    weight_dim: int | None = None,
    bias_dim: int | None = None,
    parts: int = 1,
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and bias with the initial distribution of ``torch.nn.Linear``: uniform in ±1/√in.

    The weight is sharded along ``weight_dim`` over ``comm``, and the bias along ``bias_dim``; None: not sharded.
    """
    check_positive("in_features", in_features)
    check_positive("out_features", out_features)
    blocks = (out_features // parts,) * parts if parts > 1 else ()
    # Kaiming-uniform with a = √5 is uniform in ±1/√in.
    weight = make_parameter(
        (out_features, in_features),
        dtype,
        nn.init.kaiming_uniform_,
        a=math.sqrt(5),
        comm=comm,
        tp_dim=weight_dim,
        tp_blocks=blocks,
    )
    if not bias:
        return weight, None
    bound = 1 / math.sqrt(in_features)
    return weight, make_parameter(
        (out_features,), dtype, nn.init.uniform_, -bound, bound, comm=comm, tp_dim=bias_dim, tp_blocks=blocks
    )


def has_bias(layer: nn.Module) -> bool:
    return layer._parameters["bias"] is not None  # layer.bias would unshard it
