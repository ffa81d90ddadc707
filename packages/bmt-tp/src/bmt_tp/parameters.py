"""Parameters of the layers: sharded by bmt_zero where it is installed, otherwise plain."""

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
    use_multi_tensor_functions,
)

_SHARDED = importlib.util.find_spec("bmt_zero") is not None


class ShardModule(nn.Module):
    """A module whose plain parameters stay marked as shards.

    ``to_empty`` and ``load_state_dict(assign=True)`` replace parameters. The new ones are marked as the old ones were.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {name: _shape_and_slice(param) for name, param in self._parameters.items()}
        result = super()._apply(fn, recurse)
        for name, param in self._parameters.items():
            _mark_same_shard(param, before[name])
        return result

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        before = _shape_and_slice(self._parameters.get(name))
        super().register_parameter(name, param)
        _mark_same_shard(param, before)


def _shape_and_slice(param: nn.Parameter | None) -> tuple[torch.Size, Slice] | None:
    """The shape of a shard, and its slice; None if ``param`` is no shard, or not a plain parameter."""
    if not isinstance(param, TensorParallelParameter) or not param.tp_mode:
        return None
    return param.shape, getattr(param, SLICE_ATTRIBUTE)


def _mark_same_shard(param: nn.Parameter | None, before: tuple[torch.Size, Slice] | None) -> None:
    """Mark a parameter that has replaced a shard, or that torch has swapped with one, as the same shard."""
    if param is not None and before is not None and _shape_and_slice(param) is None and param.shape == before[0]:
        mark_shard(param, before[1])


if TYPE_CHECKING or not _SHARDED:
    Module = ShardModule
else:
    from bmt_zero import DistributedModule

    Module = DistributedModule


_grad: Any = Tensor.grad


class TensorParallelParameter(nn.Parameter):
    """A plain parameter with marks for tensor parallelism, which its copies keep.

    Attributes:
        bmt_slice: the :class:`bmt_comm.Slice` of the logical parameter that it holds; absent if it is no shard.
        tp_mode: whether it is a shard.
        sequence_parallel: whether it is used on parts of the sequence. Its gradient is then summed over the ranks of
            ``sequence_comm``. A hook does this (``has_sum_hook``), which is registered once the parameter is trained.
    """

    tp_mode: bool = False
    sequence_parallel: bool = False
    sequence_comm: Communicator
    has_sum_hook: bool = False

    @property
    def grad(self) -> Tensor | None:
        """The gradient; of a shard a :class:`bmt_comm.ShardedGradient`, whose norm is that of the logical gradient."""
        grad: Tensor | None = _grad.__get__(self)
        if grad is None or isinstance(grad, ShardedGradient) or torch.compiler.is_compiling():
            return grad
        if self.tp_mode and not grad.requires_grad:  # with create_graph=True it has a graph
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
            copy = super().__deepcopy__(memo)
            if self.tp_mode:
                mark_shard(copy, getattr(self, SLICE_ATTRIBUTE))
            if self.sequence_parallel:
                mark_sequence_parallel(copy, self.sequence_comm)
        result: TensorParallelParameter = memo[id(self)]
        return result


def mark_shard(param: nn.Parameter, where: Slice) -> None:
    """Mark a plain parameter as the shard ``where`` of a logical parameter."""
    refuse_whole_layer_optimizers()
    use_multi_tensor_functions()
    _mark(param, tp_mode=True, **{SLICE_ATTRIBUTE: where})


def mark_sequence_parallel(param: nn.Parameter, comm: Communicator) -> None:
    """Mark a parameter, plain or sharded by bmt_zero, as used on parts of the sequence.

    Call it again for a plain parameter that was frozen and is trained now: torch has hooks on trained parameters only.
    """
    if hasattr(param, "handle"):  # bmt_zero's reduction of its gradient includes the sum
        param.sequence_parallel = True  # type: ignore[attr-defined]
        return
    if not getattr(param, "sequence_parallel", False):
        _mark(param, sequence_parallel=True, sequence_comm=comm)
    if comm.size > 1 and param.requires_grad and not getattr(param, "has_sum_hook", False):
        param.register_hook(_SumOverRanks(comm))
        _mark(param, has_sum_hook=True)


def unsharded(weight: Any) -> Any:
    """The tensor that a layer computes with. A parameter of bmt_zero is unsharded if it is not yet."""
    return weight.gather() if hasattr(weight, "handle") else weight


def check_is_own(module: nn.Module, comm: Communicator, *names: str) -> None:
    """Raise TypeError if torch computes one of a tensor-parallel layer's parameters from others.

    The tools that do so take this rank's part for the logical parameter, or for its gradient. A parametrization that
    is right on a part is not told from the others.
    """
    own = module._parameters
    for name in names:
        if own.get(name) is None and comm.size > 1:
            parametrized: Any = module._modules.get("parametrizations") or ()
            # weight_norm computes the weight from weight_g and weight_v, spectral_norm and pruning from weight_orig.
            if f"{name}_v" in own or f"{name}_orig" in own or name in parametrized:
                raise TypeError(
                    f"the {name} of a tensor-parallel {type(module).__name__} is computed from something else "
                    f"(weight_norm, spectral_norm, pruning, a parametrization) on each rank, which has only a part of "
                    f"it: use these on layers that are not tensor-parallel"
                )


def _mark(param: nn.Parameter, **attributes: Any) -> None:
    if type(param) is nn.Parameter:
        param.__class__ = TensorParallelParameter
    for name, value in attributes.items():
        setattr(param, name, value)


class _SumOverRanks:
    """A parameter's hook, which sums each gradient. bmt_zero removes it, because its reduction includes the sum."""

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
    """A parameter filled by ``init(tensor, *args, **kwargs)``. ``init_parameters`` fills it again.

    Under ``torch.device("meta")`` it holds no values until then. ``init`` fills the logical parameter, also where this
    rank keeps a shard, so that ranks with the same random state get shards of the same tensor.

    Args:
        shape: of the logical parameter.
        comm, tp_dim: the ranks, and the dimension that they shard; without either, the parameter is no shard.
        tp_blocks: lengths of the parts of a fused weight, each of which is sharded by itself.

    Raises:
        RuntimeError: bmt_zero is installed and ``init_distributed`` has not run.
        TypeError: ``dtype`` is not a floating-point one.
        ValueError: bmt_zero is installed, and the ranks of ``comm`` are not the context's tensor-parallel ranks.
    """
    if _SHARDED and comm is not None and comm.ranks != current_context().tp.ranks:
        raise ValueError(
            f"comm has the ranks {comm.ranks}, and bmt_zero shards by the context's tensor-parallel ranks "
            f"{current_context().tp.ranks}; leave comm out, or start with another init_distributed(tp_size=)"
        )
    data: Tensor = torch.empty(shape, dtype=dtype)
    if not data.is_floating_point():
        raise TypeError(f"dtype={dtype} cannot be trained; choose a floating-point dtype")
    if not data.is_meta:  # where torch would import its compiler for ``normal_``
        with torch.no_grad():
            init(data, *args, **kwargs)
    where = None if tp_dim is None or comm is None else rank_slice(shape, tp_dim, comm, tp_blocks)
    if where is not None:
        data = tp_shard_of(data, where).clone(memory_format=torch.contiguous_format)
    if not _SHARDED:
        param = nn.Parameter(data)
        if where is not None:
            mark_shard(param, where)
        return param
    from bmt_zero import DistributedParameter, ParameterInitializer

    initializer = ParameterInitializer(init, *args, **kwargs)
    if where is None:
        return DistributedParameter(data, init_method=initializer)
    return DistributedParameter(
        data, init_method=initializer, tp_mode=True, tp_split_dim=where.tp_dim or 0, tp_blocks=where.tp_blocks
    )


def rank_slice(shape: tuple[int, ...], dim: int, comm: Communicator, blocks: tuple[int, ...] = ()) -> Slice:
    """This rank's slice of a tensor that is sharded along ``dim`` over ``comm``. The ranks must divide ``dim``.

    ``blocks`` are the lengths of the parts of a fused weight, each of which is sharded by itself.
    """
    extent = shape[dim] // comm.size
    rows = extent if dim == 0 else shape[0]
    if comm.size == 1:
        return Slice(shape, 0, rows)
    return Slice(shape, 0, rows, None, dim, comm.rank * extent, extent, comm, blocks)


def check_integers(name: str, x: Tensor) -> None:
    """Raise TypeError unless ``x``, called ``name`` (a plural) in the message, has an integer dtype."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} have dtype {x.dtype}; give integers")


def check_positive(name: str, size: int) -> None:
    """Raise ValueError unless ``size`` is a positive integer."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}={size!r} must be a positive integer")


def divided(name: str, size: int, comm: Communicator) -> int:
    """``size`` per rank.

    Raises:
        ValueError: it is no positive integer, or the ranks do not divide it.
    """
    check_positive(name, size)
    if size % comm.size:
        raise ValueError(f"{name}={size} cannot be divided over {comm.size} tensor-parallel ranks")
    return size // comm.size
