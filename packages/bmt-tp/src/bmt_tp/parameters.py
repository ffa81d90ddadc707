"""Where the layers' parameters live: sharded where bmt_zero is installed, else in plain modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bmt_comm import (
    SLICE_ATTRIBUTE,
    Communicator,
    ShardedGradient,
    Slice,
    current_context,
    refuse_whole_layer_optimizers,
    sharded_gradient,
    tp_shard_of,
)

_SHARDED = importlib.util.find_spec("bmt_zero") is not None


class PieceModule(nn.Module):
    """A module whose plain parameters go on saying what they hold a piece of.

    ``to_empty`` and ``load_state_dict(assign=True)`` put new parameters in the places of the old.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {name: _piece_in(param) for name, param in self._parameters.items()}
        result = super()._apply(fn, recurse)
        for name, param in self._parameters.items():
            _take_over(param, before[name])
        return result

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        before = _piece_in(self._parameters.get(name))
        super().register_parameter(name, param)
        _take_over(param, before)


def _piece_in(param: nn.Parameter | None) -> tuple[torch.Size, Slice] | None:
    """The shape of a piece, and what of; None: it is whole, or not a plain parameter."""
    if not isinstance(param, TensorParallelParameter) or not param.tp_mode:
        return None
    return param.shape, getattr(param, SLICE_ATTRIBUTE)


def _take_over(param: nn.Parameter | None, before: tuple[torch.Size, Slice] | None) -> None:
    """Mark a parameter that has come in the place of a piece, or that torch has swapped with one, as the same piece."""
    if param is not None and before is not None and _piece_in(param) is None and param.shape == before[0]:
        mark_piece(param, before[1])


if TYPE_CHECKING or not _SHARDED:
    Module = PieceModule
else:
    from bmt_zero import DistributedModule

    Module = DistributedModule


_grad: Any = Tensor.grad


class TensorParallelParameter(nn.Parameter):
    """A plain parameter that says what it holds, or how it is used, also when it is copied.

    Attributes:
        bmt_slice: of what it holds a piece; absent: it is whole.
        tp_mode: whether it holds a piece.
        sequence_parallel: whether it is used on parts of the sequence, so that its gradient is summed over the
            ranks of ``sequence_comm``; by a hook (``has_sum_hook``), once it is trained.
    """

    tp_mode: bool = False
    sequence_parallel: bool = False
    sequence_comm: Communicator
    has_sum_hook: bool = False

    @property
    def grad(self) -> Tensor | None:
        """That of a piece is a :class:`bmt_comm.ShardedGradient`, whose norm is that of the whole gradient."""
        grad: Tensor | None = _grad.__get__(self)
        if grad is None or isinstance(grad, ShardedGradient) or torch.compiler.is_compiling():
            return grad
        if self.tp_mode and not grad.requires_grad:  # that of create_graph=True has a graph
            grad = sharded_gradient(grad, self)
            _grad.__set__(self, grad)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelParameter:
        if id(self) not in memo:
            twin = super().__deepcopy__(memo)
            if self.tp_mode:
                mark_piece(twin, getattr(self, SLICE_ATTRIBUTE))
            if self.sequence_parallel:
                mark_sequence_parallel(twin, self.sequence_comm)
        found: TensorParallelParameter = memo[id(self)]
        return found


def mark_piece(param: nn.Parameter, found: Slice) -> None:
    """Let a plain parameter, which holds the piece, say what of."""
    refuse_whole_layer_optimizers()
    _mark(param, tp_mode=True, **{SLICE_ATTRIBUTE: found})


def mark_sequence_parallel(param: nn.Parameter, comm: Communicator) -> None:
    """Let a parameter, plain or sharded, say that it is used on parts of the sequence.

    To be repeated for a plain one that was frozen, since torch takes hooks on trained ones only.
    """
    if hasattr(param, "handle"):  # sharded: reduced by its group
        param.sequence_parallel = True  # type: ignore[attr-defined]
        return
    if not getattr(param, "sequence_parallel", False):
        _mark(param, sequence_parallel=True, sequence_comm=comm)
    if comm.size > 1 and param.requires_grad and not getattr(param, "has_sum_hook", False):
        param.register_hook(_SumOverRanks(comm))
        _mark(param, has_sum_hook=True)


def unsharded(weight: Any) -> Any:
    """What a layer computes with: bmt_zero's parameters that are used outside of their module are gathered."""
    return weight.gather() if hasattr(weight, "handle") else weight


def _mark(param: nn.Parameter, **attributes: Any) -> None:
    if type(param) is nn.Parameter:
        param.__class__ = TensorParallelParameter
    for name, value in attributes.items():
        setattr(param, name, value)


class _SumOverRanks:
    """A parameter's hook. Sharding the parameter removes it, because the reduction then includes the sum."""

    is_part_of_reduction = True

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        total = grad.clone(memory_format=torch.contiguous_format)
        self.comm.all_reduce(total)
        return total


def make_parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    init: Callable[..., Any],
    *args: Any,
    comm: Communicator | None = None,
    tp_dim: int | None = None,
    tp_blocks: tuple[int, ...] = (),
    **kwargs: Any,
) -> nn.Parameter:
    """A parameter filled by ``init(tensor, *args, **kwargs)``; ``init_parameters`` will fill it again.

    Under ``torch.device("meta")`` it holds no values until then. The whole of it is filled, also where this rank
    keeps a piece, so that ranks with the same random state get pieces of the same tensor.

    Args:
        shape: of the whole.
        comm, tp_dim: this rank's piece, along dimension ``tp_dim``, is wanted.
        tp_blocks: lengths of the parts of a fused weight, each of which is cut by itself.

    Raises:
        RuntimeError: bmt_zero is installed and ``init_distributed`` has not run.
        TypeError: ``dtype`` is not a floating-point one.
        ValueError: bmt_zero is installed, and ``comm`` has not the tensor-parallel ranks of the context.
    """
    if _SHARDED and comm is not None and comm.ranks != current_context().tp.ranks:
        raise ValueError(
            f"comm has the ranks {comm.ranks}, and bmt_zero shards by the context's tensor-parallel ranks "
            f"{current_context().tp.ranks}; leave comm out, or start with another init_distributed(tp_size=)"
        )
    data: Tensor = torch.empty(shape, dtype=dtype)
    if not data.is_floating_point():
        raise TypeError(f"dtype={dtype} cannot be trained; choose a floating-point dtype")
    with torch.no_grad():
        init(data, *args, **kwargs)
    found = None if tp_dim is None or comm is None else piece_of(shape, tp_dim, comm, tp_blocks)
    if found is not None:
        data = tp_shard_of(data, found).clone(memory_format=torch.contiguous_format)
    if not _SHARDED:
        param = nn.Parameter(data)
        if found is not None:
            mark_piece(param, found)
        return param
    from bmt_zero import DistributedParameter, ParameterInitializer

    initializer = ParameterInitializer(init, *args, **kwargs)
    if found is None:
        return DistributedParameter(data, init_method=initializer)
    return DistributedParameter(
        data, init_method=initializer, tp_mode=True, tp_split_dim=found.tp_dim or 0, tp_blocks=found.tp_blocks
    )


def piece_of(shape: tuple[int, ...], dim: int, comm: Communicator, blocks: tuple[int, ...] = ()) -> Slice:
    """This rank's piece of a tensor whose ``dim`` the ranks of ``comm``, which divide it, share.

    ``blocks`` are the lengths of the parts of a fused weight, each of which is cut by itself.
    """
    extent = shape[dim] // comm.size
    rows = extent if dim == 0 else shape[0]
    if comm.size == 1:
        return Slice(shape, 0, rows)
    return Slice(shape, 0, rows, None, dim, comm.rank * extent, extent, comm, blocks)


def divided(name: str, size: int, comm: Communicator) -> int:
    """``size`` per rank.

    Raises:
        ValueError: it is no positive integer, or the ranks do not divide it.
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}={size!r} must be a positive integer")
    if size % comm.size:
        raise ValueError(f"{name}={size} cannot be divided over {comm.size} tensor-parallel ranks")
    return size // comm.size
