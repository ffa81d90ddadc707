"""Parameters of which each rank stores some rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bmt_comm import SLICE_ATTRIBUTE, ParallelContext, Slice, current_context, join_pieces

if TYPE_CHECKING:
    from .bucket import Bucket
    from .unit import Unit


class ParameterInitializer:
    """A function that fills a tensor in place, with its further arguments.

    ``ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=0.02)``
    """

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not callable(func):
            raise TypeError(f"func must be a function that fills a tensor, not {type(func).__name__}")
        self.func = func
        self.args = args
        self.kwargs = kwargs

    def __call__(self, tensor: Tensor) -> None:
        self.func(tensor, *self.args, **self.kwargs)

    def __repr__(self) -> str:
        arguments = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"ParameterInitializer({', '.join([getattr(self.func, '__name__', repr(self.func)), *arguments])})"


class DistributedParameter(nn.Parameter):
    """A parameter whose rows are spread over ranks; a tensor of this rank's rows, shape (rows, *rest).

    ``bmt_slice`` (:class:`bmt_comm.Slice`) says which rows of what. The object never changes shape or
    identity: optimizers may keep it. A rank may hold no rows at all.

    Args:
        data: the whole parameter (under ``tp_mode``: this tensor-parallel rank's piece), of which this rank
            keeps its rows. Nothing is communicated: ranks are expected to pass equal values, or to
            initialise afterwards.
        requires_grad: whether it is trained.
        init_method: fills the whole parameter when ``init_parameters`` runs.
        group: a name by which ``grouped_parameters`` collects parameters.
        tp_mode: whether tensor-parallel ranks hold different pieces.
        tp_split_dim: the dimension that is cut over tensor-parallel ranks, or -1.
        tp_blocks: lengths, along that dimension of the whole, of the blocks of a fused weight; see
            :class:`bmt_comm.Slice`.

    Raises:
        RuntimeError: before ``init_distributed``.
        TypeError: ``data`` is no tensor, or a ``DistributedParameter``; ``init_method`` cannot be called.
        ValueError: ``tp_split_dim`` is no dimension of ``data``.
    """

    bmt_slice: Slice
    group: str | None
    init_method: Callable[[Tensor], Any] | None
    tp_mode: bool
    sequence_parallel: bool  # a tensor-parallel rank's gradient is that of its part of the sequence alone
    awaits_values: bool  # built on the meta device and not filled since
    bucket: Bucket  # what stores it, as the parameter of index bucket_index
    bucket_index: int
    unit: Unit  # what gathers and reduces it

    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
        *,
        tp_blocks: tuple[int, ...] = (),
    ) -> DistributedParameter:
        context = current_context()
        if not isinstance(data, Tensor):
            raise TypeError(f"data must be a tensor, not {type(data).__name__}")
        if isinstance(data, DistributedParameter):
            raise TypeError("data is a DistributedParameter, of which this rank has some rows; pass data.gather()")
        if init_method is not None and not callable(init_method):
            raise TypeError(f"init_method must be a function that fills a tensor, not {type(init_method).__name__}")
        if tp_mode and tp_split_dim != -1 and not 0 <= tp_split_dim < data.dim():
            raise ValueError(f"tp_split_dim={tp_split_dim} is not a dimension of data of shape {tuple(data.shape)}")
        empty = torch.empty(0, dtype=data.dtype, device=context.device)
        self = torch.Tensor._make_subclass(cls, empty, requires_grad)
        describe(self, context, tuple(data.shape), init_method, group, tp_mode, tp_split_dim, tp_blocks)
        self.awaits_values = data.is_meta
        from .unit import make_standalone  # a unit holds parameters, and a parameter outside blocks its unit

        make_standalone(self, context, None if data.is_meta else data.detach())
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Everything is done in __new__; nn.Parameter takes no arguments here.
        super().__init__()

    def gather(self) -> Tensor:  # type: ignore[override]
        """The whole parameter (under ``tp_mode``: this tensor-parallel rank's piece), differentiably.

        Every rank that shares it must take part. Where gradients are enabled, backward sums the gradient over
        the ranks into ``.grad``.
        """
        return self.unit.gather_parameter(self)

    def tp_gather(self) -> Tensor:
        """This rank's rows with the tensor-parallel dimension whole; not differentiable."""
        return join_pieces(self.data, self.bmt_slice)

    def gather_all(self) -> Tensor:
        """The whole parameter as it is stored, joined over tensor-parallel ranks too; not differentiable."""
        with torch.no_grad():
            piece = self.bucket.gather_stored(self.bucket_index)
            return join_pieces(piece, self.bmt_slice)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedParameter:
        if id(self) not in memo:
            copy.deepcopy(self.unit, memo)  # copies all parameters that share its storage
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedParameter cannot be pickled: it is one rank's part of a parameter, bound to the process "
            "groups of this run; save state_dict(), or the model with bmt_zero.save"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        found = self.bmt_slice
        return (
            f"DistributedParameter(shape={found.shape}, rows=[{found.row_start}, {found.row_stop}), "
            f"dtype={self.dtype}, device={self.device}, requires_grad={self.requires_grad})"
        )


def describe(
    param: DistributedParameter,
    context: ParallelContext,
    shape: tuple[int, ...],
    init_method: Callable[[Tensor], Any] | None = None,
    group: str | None = None,
    tp_mode: bool = False,
    tp_split_dim: int = -1,
    tp_blocks: tuple[int, ...] = (),
) -> None:
    """Set the attributes of a parameter that has its whole piece, of ``shape``."""
    rows = shape[0] if shape else 1
    if tp_mode and tp_split_dim >= 0 and context.tp_size > 1:
        extent = shape[tp_split_dim]
        whole = (*shape[:tp_split_dim], extent * context.tp_size, *shape[tp_split_dim + 1 :])
        found = Slice(whole, 0, rows, None, tp_split_dim, context.tp_rank * extent, extent, context.tp, tp_blocks)
    else:
        found = Slice(shape, 0, rows)
    setattr(param, SLICE_ATTRIBUTE, found)
    param.init_method = init_method
    param.group = group
    param.tp_mode = tp_mode
    param.sequence_parallel = False
    param.awaits_values = False
