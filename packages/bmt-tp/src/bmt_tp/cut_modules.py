"""What the modules that a plan names become: the same classes with another forward, and hooks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from bmt_comm import Communicator, not_compiled, slice_of, tp_shard_of

from .embedding import lookup
from .parallel_ops import ReduceType, column_linear, row_linear
from .parameters import PieceModule, TensorParallelParameter, unsharded
from .regions import copy_to_ranks, gather_along, reduce_from_ranks, reduce_scatter_along, split_along


class SharedInput:
    """The input of layers beside each other (query, key and value), whose gradient is reduced once for all."""

    def __init__(self) -> None:
        self._last: tuple[TensorWeakRef, int, TensorWeakRef] | None = None

    @not_compiled
    def enter(self, x: Tensor, comm: Communicator) -> Tensor:
        """``copy_to_ranks(x)``, the same one if ``x`` is the same and was not written to."""
        version = 0 if x.is_inference() else x._version
        if self._last is not None and self._last[0]() is x and self._last[1] == version:
            found = self._last[2]()
            if found is not None and found.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
                return found
        result = copy_to_ranks(x, comm)
        self._last = (TensorWeakRef(x), version, TensorWeakRef(result))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return memo.setdefault(id(self), SharedInput())


@dataclass(frozen=True)
class Settings:
    """How a module that was cut computes; its attribute ``tensor_parallel``."""

    comm: Communicator
    in_sequence: bool
    sequence_dim: int
    transposed: bool
    shared: SharedInput | None  # None: the gradient of the input is reduced elsewhere
    gather_output: bool
    split_input: bool
    vocab_size: int
    shared_heads: int = 0

    def weight(self, module: nn.Module) -> Tensor:
        weight: Any = module.weight
        return weight.t() if self.transposed else weight


class CutColumnLinear(PieceModule):
    tensor_parallel: Settings
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        how = self.tensor_parallel
        if not how.in_sequence and how.shared is not None:
            input = how.shared.enter(input, how.comm)
        (y,) = column_linear(
            input,
            [(how.weight(self), self.bias)],
            gather_input=how.in_sequence,
            sequence_dim=how.sequence_dim,
            comm=how.comm,
            reduce_input_grad=how.in_sequence,
        )
        return gather_along(y, -1, how.comm) if how.gather_output else y


class SharedHeadLinear(PieceModule):
    """A projection that every rank has, to fewer heads than there are ranks: each rank computes the head it needs."""

    tensor_parallel: Settings
    weight: Any
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        how = self.tensor_parallel
        if how.in_sequence:
            input = gather_along(input, how.sequence_dim, how.comm, partial_grad=True)
        elif how.shared is not None:
            input = how.shared.enter(input, how.comm)
        weight, bias = unsharded(self.weight), unsharded(self.bias)
        length = len(weight) // how.shared_heads
        start = how.comm.rank * how.shared_heads // how.comm.size * length
        bias = None if bias is None else bias[start : start + length]
        return F.linear(input, weight[start : start + length], bias)


class CutRowLinear(PieceModule):
    tensor_parallel: Settings
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        how = self.tensor_parallel
        if how.split_input:
            input = split_along(input, -1, how.comm)
        reduce = ReduceType.REDUCE_SCATTER if how.in_sequence else ReduceType.ALL_REDUCE
        return row_linear(
            input,
            how.weight(self),
            self.bias,
            reduce_output_type=reduce,
            sequence_dim=how.sequence_dim,
            comm=how.comm,
        )


class CutEmbedding(PieceModule):
    tensor_parallel: Settings
    weight: Any
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        how = self.tensor_parallel
        weight = unsharded(self.weight)
        start = how.comm.rank * len(weight)
        if self.padding_idx is not None and 0 <= self.padding_idx - start < len(weight):
            weight = _WithoutGradientOfRow.apply(weight, self.padding_idx - start)
        y = lookup(input, weight, start, how.vocab_size)
        if how.in_sequence:
            return reduce_scatter_along(y, how.sequence_dim, how.comm)
        return reduce_from_ranks(y, how.comm)


class CutEmbeddingColumns(PieceModule):
    tensor_parallel: Settings
    weight: Any
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        y = F.embedding(input, unsharded(self.weight), self.padding_idx)
        return gather_along(y, -1, self.tensor_parallel.comm)


class _WithoutGradientOfRow(torch.autograd.Function):
    """A table of which one row (the padding's) gets no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: int) -> Tensor:
        ctx.row = row
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        grad[ctx.row] = 0
        return grad, None


def _reset_whole(module: nn.Module, cls: Any) -> None:
    """``cls.reset_parameters``, which fills whole parameters, and this rank keeps its pieces.

    Bounds depend on whole sizes, and ranks with the same random state get pieces of the same tensor.
    """
    own = dict(module._parameters)
    wholes: dict[str, Any] = {}
    for name, param in own.items():
        if isinstance(param, TensorParallelParameter) and param.tp_mode:
            wholes[name] = nn.Parameter(param.new_empty(slice_of(param).shape), requires_grad=False)
    module._parameters.update(wholes)
    try:
        cls.reset_parameters(module)
        wholes = {name: module._parameters[name] for name in wholes}  # it may put others in their places
    finally:
        module._parameters.update(own)
    with torch.no_grad():
        for name, whole in wholes.items():
            own[name].copy_(tp_shard_of(whole, slice_of(own[name])))  # type: ignore[arg-type, union-attr]


_WITH_PIECES = (CutColumnLinear, CutRowLinear, CutEmbedding, CutEmbeddingColumns)
_classes: dict[tuple[type, type], type[nn.Module]] = {}


def class_with_forward_of(form: type[PieceModule], cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with the forward of ``form`` in the place of PyTorch's own.

    A class derived from ``nn.Embedding`` or ``nn.Linear`` whose forward calls ``super().forward`` (a scaled embedding)
    keeps that forward, and calls the one of ``form`` in it. What ``reset_parameters`` fills is whole.
    """
    if (form, cls) not in _classes:
        bases: tuple[type, ...] = (form, cls)
        torchs_own = next((base for base in cls.__mro__ if base in (nn.Embedding, nn.Linear)), cls)
        if cls is not torchs_own and cls.forward is not torchs_own.forward:
            inner = type(form.__name__, (form, torchs_own), {"__module__": form.__module__})
            bases = (cls, inner)
        own: dict[str, Any] = {"__module__": cls.__module__}
        if form in _WITH_PIECES and hasattr(cls, "reset_parameters"):
            own["reset_parameters"] = lambda self: _reset_whole(self, cls)
        _classes[form, cls] = type(cls.__name__, bases, own)
    return _classes[form, cls]


class ChangeInput:
    """Takes this rank's part of a module's first input along the sequence, or joins the ranks' parts of it."""

    def __init__(self, comm: Communicator, dim: int, gather: bool) -> None:
        self.comm, self.dim, self.gather = comm, dim, gather

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._changed(args[0]), *args[1:]), kwargs
        for name in (*inspect.signature(module.forward).parameters, *kwargs):  # the first one is the input
            if isinstance(kwargs.get(name), Tensor):
                return args, {**kwargs, name: self._changed(kwargs[name])}
        raise TypeError(f"{type(module).__name__} was called without a tensor, which the plan has split or joined")

    def _changed(self, x: Tensor) -> Tensor:
        if self.gather:
            return gather_along(x, self.dim, self.comm, partial_grad=True)
        return split_along(x, self.dim, self.comm)


class CopyInputs:
    """Before a module of which every rank computes a part: the gradients of its floating-point inputs are summed."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map_only(Tensor, self._copied, (args, kwargs))

    def _copied(self, x: Tensor) -> Tensor:
        return copy_to_ranks(x, self.comm) if x.is_floating_point() else x


class DivideInput:
    """Before a module that returns its input, of which what the ranks return is summed."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (args[0] / self.ranks, *args[1:])


class CopyLastOutputs:
    """After a module that every rank has: the gradients of its last outputs, partial on each rank, are summed."""

    def __init__(self, comm: Communicator, last: int) -> None:
        self.comm, self.last = comm, last

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        first, last = output.split([output.shape[-1] - self.last, self.last], -1)
        return torch.cat([first, copy_to_ranks(last, self.comm)], -1)


class ReduceOutput:
    """After such a module: the sum of what the ranks have computed."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return reduce_from_ranks(output, self.comm)
        if not isinstance(output, tuple) or any(isinstance(x, Tensor) and x.requires_grad for x in output[1:]):
            raise TypeError(
                f"{type(module).__name__}, which the plan has as 'experts', returned a {type(output).__name__}: its "
                f"forward returns what the ranks sum, or a tuple whose other tensors are without gradients"
            )
        reduced = reduce_from_ranks(output[0], self.comm)
        if hasattr(output, "_replace"):  # a named tuple
            return output._replace(**{output._fields[0]: reduced})  # type: ignore[attr-defined]
        return (reduced, *output[1:])


class GatherOutput:
    """Joins a module's output along the sequence."""

    def __init__(self, comm: Communicator, dim: int) -> None:
        self.comm, self.dim = comm, dim

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather_along(output[0], self.dim, self.comm), *output[1:])
        if not isinstance(output, Tensor):
            raise TypeError(f"{type(module).__name__}, a 'sequence_end', returned no tensor or tuple")
        return gather_along(output, self.dim, self.comm)
