"""Linear layers whose weights are sharded over the tensor-parallel ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bmt_comm import Communicator

from .batch import check_same_input, have_equal_values
from .linear import has_bias, linear_parameters
from .parallel_ops import OpParallelLinear, ReduceType, column_linear
from .parameters import Module, check_is_own, divided
from .regions import tensor_comm

_log = logging.getLogger(__name__)


class ColumnParallelLinear(Module):
    """``torch.nn.Linear``, sharded column-wise: every tensor-parallel rank computes a part of the output features.

    If bmt_zero is installed, the state dict is that of ``torch.nn.Linear``. Otherwise see
    :func:`bmt_tp.full_state_dict`.

    Args:
        in_features, out_features: sizes of the logical layer. The number of ranks must divide ``out_features``.
        bias: whether to add a learnt bias. It is sharded, too.
        dtype: of the parameters; by default torch's default dtype.
        gather_output: every rank gets all features, instead of its own.
        gather_input: the input is this rank's part of the sequence, and is gathered; otherwise it is replicated.
        async_gather_chunks: the number of chunks of that gather, which overlap with the products.
        sequence_dim: the dimension of the input along which the sequence is split.
        parts: the number of fused outputs of equal length. Each is sharded by itself (3: query, key and value).
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        TypeError: ``dtype`` is not a floating-point one. Forward: the weight is computed from something else.
        ValueError: a size is not a positive integer, or the ranks do not divide it, or ``gather_output`` is given with
            several parts.
        RuntimeError: ``init_distributed`` has not run.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
        *,
        sequence_dim: int = -2,
        parts: int = 1,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.comm = tensor_comm(comm)
        divided("out_features", out_features, self.comm)
        if not isinstance(parts, int) or parts < 1 or out_features % (parts * self.comm.size):
            raise ValueError(
                f"parts={parts!r}: out_features={out_features} cannot be divided into so many parts, each over "
                f"{self.comm.size} tensor-parallel ranks"
            )
        if gather_output and parts > 1:
            raise ValueError(f"gather_output=True would mix up the parts={parts} outputs; use parts=1")
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.gather_input = gather_input
        self.async_gather_chunks = async_gather_chunks
        self.sequence_dim = sequence_dim
        self.weight, weight_bias = linear_parameters(in_features, out_features, bias, dtype, self.comm, 0, 0, parts)
        self.register_parameter("bias", weight_bias)
        self._has_checked = False

    def forward(self, input: Tensor) -> Tensor:
        """(\\*, in_features) → (\\*, out_features / ranks), or (\\*, out_features) with ``gather_output``."""
        check_is_own(self, self.comm, "weight", "bias")
        if self.gather_input and not self._has_checked and not torch.compiler.is_compiling():
            self._has_checked = True
            if have_equal_values([input], self.comm):
                _log.warning(
                    "the tensor-parallel ranks have passed the same values to a ColumnParallelLinear, which takes the "
                    "parts of the sequence that they have: if each of them has the whole input, use gather_input=False"
                )
        return OpParallelLinear.apply(
            input,
            self.weight,
            self.bias,
            self.gather_input,
            self.gather_output,
            async_gather_chunks=self.async_gather_chunks,
            sequence_dim=self.sequence_dim,
            comm=self.comm,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias(self)}, "
            f"gather_output={self.gather_output}, gather_input={self.gather_input}, ranks={self.comm.size}"
        )


class RowParallelLinear(Module):
    """``torch.nn.Linear``, sharded row-wise: every tensor-parallel rank takes a part of the input features.

    The bias is replicated and added once. Every rank gets its complete gradient.

    Args:
        in_features, out_features: sizes of the logical layer. The number of ranks must divide ``in_features``.
        bias: whether to add a learnt bias.
        dtype: of the parameters; by default torch's default dtype.
        split_input: the input has all features, and each rank takes its own. It must be the same on every rank (checked
            on the first call). Otherwise the input has this rank's features.
        all_reduce_output: every rank gets the output of the whole sequence, instead of its part of the sequence.
        async_chunks: the number of chunks of the reduction, which overlap with the products.
        sequence_dim: the dimension of the output along which the sequence is split.
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        TypeError: ``dtype`` is not a floating-point one. Forward: the weight is computed from something else.
        ValueError: a size is not a positive integer, or the ranks do not divide it.
        RuntimeError: ``init_distributed`` has not run. Forward: under ``split_input``, ranks have different inputs.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
        *,
        sequence_dim: int = -2,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.comm = tensor_comm(comm)
        divided("in_features", in_features, self.comm)
        self.in_features = in_features
        self.out_features = out_features
        self.split_input = split_input
        self.all_reduce_output = all_reduce_output
        self.async_chunks = async_chunks
        self.sequence_dim = sequence_dim
        self.weight, weight_bias = linear_parameters(in_features, out_features, bias, dtype, self.comm, 1, None)
        self.register_parameter("bias", weight_bias)
        self._has_checked = False

    def forward(self, input: Tensor) -> Tensor:
        """(\\*, in_features / ranks), or (\\*, in_features) with ``split_input``, → (\\*, out_features)."""
        check_is_own(self, self.comm, "weight")
        if self.split_input and not self._has_checked and not torch.compiler.is_compiling():
            check_same_input(
                input,
                self.comm,
                "split_input=True takes the features of one input, which is the same on every rank: gather the ranks' "
                "parts of the sequence first, with bmt_tp.gather_along(x, dim)",
            )
            self._has_checked = True
        return OpParallelLinear.apply(
            input,
            self.weight,
            self.bias,
            split_input=self.split_input,
            reduce_output_type=ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER,
            async_gather_chunks=self.async_chunks,
            sequence_dim=self.sequence_dim,
            comm=self.comm,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias(self)}, "
            f"split_input={self.split_input}, all_reduce_output={self.all_reduce_output}, ranks={self.comm.size}"
        )


def column_parallel(input: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The outputs of several layers (query, key and value; gate and up) on one input, which is gathered once.

    The ``gather_input``, ``async_gather_chunks``, ``sequence_dim`` and ranks of the first layer apply to all.
    ``gather_output`` is ignored: each output has this rank's features.

    Raises:
        TypeError: the weight of a layer is computed from something else.
        ValueError: ``layers`` is empty, or a shape does not fit.
    """
    if not layers:
        raise ValueError("layers is empty; give at least one ColumnParallelLinear")
    for layer in layers:
        check_is_own(layer, layer.comm, "weight", "bias")
    first = layers[0]
    return column_linear(
        input,
        [(layer.weight, layer.bias) for layer in layers],
        gather_input=first.gather_input,
        sequence_dim=first.sequence_dim,
        chunks=first.async_gather_chunks,
        comm=first.comm,
    )
