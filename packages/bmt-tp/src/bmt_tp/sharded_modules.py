"""Forwards and hooks of the modules that a plan shards. A module keeps its class and gets another forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from bmt_comm import Communicator, not_compiled, slice_of, tp_shard_of

from .embedding import dim_of_ids, lookup
from .parallel_ops import ReduceType, column_linear, row_linear
from .parameters import ShardModule, TensorParallelParameter, check_is_own, unsharded
from .regions import copy_to_ranks, gather_along, reduce_from_ranks, reduce_scatter_along, split_along


class SharedInput:
    """The input that sibling layers share (query, key and value). Its gradient is reduced once for all of them."""

    def __init__(self) -> None:
        self._last: tuple[TensorWeakRef, int, TensorWeakRef] | None = None

    @not_compiled
    def enter(self, x: Tensor, comm: Communicator) -> Tensor:
        """``copy_to_ranks(x)``. It returns the last result again if ``x`` is the same tensor and was not modified."""
        version = 0 if x.is_inference() else x._version
        if self._last is not None and self._last[0]() is x and self._last[1] == version:
            last_result = self._last[2]()
            requires_grad = x.requires_grad and torch.is_grad_enabled()
            if last_result is not None and last_result.requires_grad == requires_grad:
                return last_result
        result = copy_to_ranks(x, comm)
        self._last = (TensorWeakRef(x), version, TensorWeakRef(result))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return memo.setdefault(id(self), SharedInput())


@dataclass(frozen=True)
class Settings:
    """How a sharded module computes. The module has it as the attribute ``tensor_parallel``."""

    comm: Communicator
    in_sequence: bool
    sequence_dim: int
    transposed: bool
    shared: SharedInput | None  # None: another module reduces the gradient of the input
    gather_output: bool
    split_input: bool
    vocab_size: int
    shared_heads: int = 0

    def weight(self, module: nn.Module) -> Tensor:
        weight: Any = module.weight
        return weight.t() if self.transposed else weight


class ShardedColumnLinear(ShardModule):
    tensor_parallel: Settings
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        settings = self.tensor_parallel
        check_is_own(self, settings.comm, "weight", "bias")
        if not settings.in_sequence and settings.shared is not None:
            input = settings.shared.enter(input, settings.comm)
        (y,) = column_linear(
            input,
            [(settings.weight(self), self.bias)],
            gather_input=settings.in_sequence,
            sequence_dim=settings.sequence_dim,
            comm=settings.comm,
            reduce_input_grad=settings.in_sequence,
        )
        return gather_along(y, -1, settings.comm) if settings.gather_output else y


class SharedHeadLinear(ShardModule):
    """A replicated projection to fewer heads than there are ranks. Each rank computes the head that it needs."""

    tensor_parallel: Settings
    weight: Any
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        settings = self.tensor_parallel
        check_is_own(self, settings.comm, "weight", "bias")
        if settings.in_sequence:
            input = gather_along(input, settings.sequence_dim, settings.comm, partial_grad=True)
        elif settings.shared is not None:
            input = settings.shared.enter(input, settings.comm)
        weight, bias = unsharded(self.weight), unsharded(self.bias)
        length = len(weight) // settings.shared_heads
        start = settings.comm.rank * settings.shared_heads // settings.comm.size * length
        bias = None if bias is None else bias[start : start + length]
        return F.linear(input, weight[start : start + length], bias)


class ShardedRowLinear(ShardModule):
    tensor_parallel: Settings
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        settings = self.tensor_parallel
        check_is_own(self, settings.comm, "weight")
        if settings.split_input:
            input = split_along(input, -1, settings.comm)
        reduce = ReduceType.REDUCE_SCATTER if settings.in_sequence else ReduceType.ALL_REDUCE
        return row_linear(
            input,
            settings.weight(self),
            self.bias,
            reduce_output_type=reduce,
            sequence_dim=settings.sequence_dim,
            comm=settings.comm,
        )


class ShardedEmbedding(ShardModule):
    tensor_parallel: Settings
    weight: Any
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        settings = self.tensor_parallel
        check_is_own(self, settings.comm, "weight")
        weight = unsharded(self.weight)
        start = settings.comm.rank * len(weight)
        if self.padding_idx is not None and 0 <= self.padding_idx - start < len(weight):
            weight = _WithoutGradientOfRow.apply(weight, self.padding_idx - start)
        y = lookup(input, weight, start, settings.vocab_size)
        if settings.in_sequence:
            return reduce_scatter_along(y, dim_of_ids(input, settings.sequence_dim), settings.comm)
        return reduce_from_ranks(y, settings.comm)


class ShardedEmbeddingColumns(ShardModule):
    tensor_parallel: Settings
    weight: Any
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        comm = self.tensor_parallel.comm
        check_is_own(self, comm, "weight")
        return gather_along(F.embedding(input, unsharded(self.weight), self.padding_idx), -1, comm)


class _WithoutGradientOfRow(torch.autograd.Function):
    """The embedding table. The gradient of one row (the padding's) is zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: int) -> Tensor:
        ctx.row = row
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        grad[ctx.row] = 0
        return grad, None


def _reset_logical(module: nn.Module, cls: Any) -> None:
    """Run ``cls.reset_parameters`` on logical parameters, and copy this rank's shards of them.

    Bounds depend on the logical sizes. Ranks with the same random state get shards of the same tensor.
    """
    own = dict(module._parameters)
    logical: dict[str, Any] = {}
    for name, param in own.items():
        if isinstance(param, TensorParallelParameter) and param.tp_mode:
            logical[name] = nn.Parameter(param.new_empty(slice_of(param).shape), requires_grad=False)
    module._parameters.update(logical)
    try:
        cls.reset_parameters(module)
        logical = {name: module._parameters[name] for name in logical}  # it may have replaced them
    finally:
        module._parameters.update(own)
    with torch.no_grad():
        for name, param in logical.items():
            own[name].copy_(tp_shard_of(param, slice_of(own[name])))  # type: ignore[arg-type, union-attr]


_WITH_SHARDS = (ShardedColumnLinear, ShardedRowLinear, ShardedEmbedding, ShardedEmbeddingColumns)
_classes: dict[tuple[type, type], type[nn.Module]] = {}


def class_with_forward_of(sharded: type[ShardModule], cls: type[nn.Module]) -> type[nn.Module]:
    """A class like ``cls`` in which the forward of ``sharded`` replaces PyTorch's.

    If ``cls`` derives from ``nn.Embedding`` or ``nn.Linear`` and its forward calls ``super().forward`` (a scaled
    embedding), it keeps its forward, and ``super().forward`` is the one of ``sharded``. ``reset_parameters`` fills
    logical parameters.
    """
    if (sharded, cls) not in _classes:
        bases: tuple[type, ...] = (sharded, cls)
        torchs_own = next((base for base in cls.__mro__ if base in (nn.Embedding, nn.Linear)), cls)
        if cls is not torchs_own and cls.forward is not torchs_own.forward:
            inner = type(sharded.__name__, (sharded, torchs_own), {"__module__": sharded.__module__})
            bases = (cls, inner)
        own: dict[str, Any] = {"__module__": cls.__module__}
        if sharded in _WITH_SHARDS and hasattr(cls, "reset_parameters"):
            own["reset_parameters"] = lambda self: _reset_logical(self, cls)
        _classes[sharded, cls] = type(cls.__name__, bases, own)
    return _classes[sharded, cls]


# Hooks of modules; functools.partial gives them their first arguments.


def reshard_input(
    reshard: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Before a module: splits its first input along the sequence, or gathers it, which is what ``reshard`` does."""
    if args:
        return (reshard(args[0]), *args[1:]), kwargs
    for name in (*inspect.signature(module.forward).parameters, *kwargs):  # the first one is the input
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: reshard(kwargs[name])}
    raise TypeError(f"{type(module).__name__} was called without a tensor, which the plan has split or gathered")


def copy_inputs(comm: Communicator, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a module that each rank computes a part of: sums the gradients of its floating-point inputs."""
    return tree_map_only(Tensor, lambda x: copy_to_ranks(x, comm) if x.is_floating_point() else x, (args, kwargs))


def divide_input(ranks: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Before a module that returns its input: divides the input, because the ranks' outputs are summed."""
    return (args[0] / ranks, *args[1:])


def copy_last_outputs(
    comm: Communicator, count: int, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    """After a replicated module: sums the gradients of its last ``count`` outputs, which are partial on each rank."""
    first, last = output.split([output.shape[-1] - count, count], -1)
    return torch.cat([first, copy_to_ranks(last, comm)], -1)


def reduce_output(comm: Communicator, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """After a module that each rank computes a part of: sums the ranks' outputs."""
    if isinstance(output, Tensor):
        return reduce_from_ranks(output, comm)
    if not isinstance(output, tuple) or any(isinstance(x, Tensor) and x.requires_grad for x in output[1:]):
        raise TypeError(
            f"{type(module).__name__}, which the plan has as 'experts', returned a {type(output).__name__}: its "
            f"forward returns what the ranks sum, or a tuple whose other tensors are without gradients"
        )
    reduced = reduce_from_ranks(output[0], comm)
    if hasattr(output, "_replace"):  # a named tuple
        return output._replace(**{output._fields[0]: reduced})  # type: ignore[attr-defined]
    return (reduced, *output[1:])


def gather_output(comm: Communicator, dim: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """After a module: gathers its output along the sequence."""
    if isinstance(output, tuple):
        return (gather_along(output[0], dim, comm), *output[1:])
    if not isinstance(output, Tensor):
        raise TypeError(f"{type(module).__name__}, a 'sequence_end', returned no tensor or tuple")
    return gather_along(output, dim, comm)
