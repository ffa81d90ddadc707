"""BMTrain's names for sharded parameters outside of Blocks: DistributedParameter and DistributedModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Slice, current_context

from .options import Options
from .shard import build_standalone, is_standalone
from .sharded_parameter import ShardedParameter
from .state import copy_instead, load_state_dict, shard_entry, unsharded_parameters


class ParameterInitializer:
    """A function that fills a tensor in place, and its other arguments.

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


class _AnySharded(type(nn.Parameter)):  # type: ignore[misc]
    """``isinstance(x, DistributedParameter)`` is true of every sharded parameter."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedParameter)


class DistributedParameter(ShardedParameter, metaclass=_AnySharded):
    """Build a parameter whose rows are sharded over ranks. The result is a :class:`ShardedParameter`.

    A ``DistributedModule`` unshards its parameters for its forward. Anywhere else, the operation that uses a parameter
    unshards it. In a module that becomes a Block, it becomes a part of the Block.

    Args:
        data: the logical parameter (under ``tp_mode``: this tensor-parallel rank's shard). This rank keeps its rows.
            Nothing is communicated: all ranks must pass equal values, or initialise afterwards.
        requires_grad: whether it is trained.
        init_method: fills the logical parameter when ``init_parameters`` runs.
        group: a name by which ``grouped_parameters`` collects parameters.
        tp_mode: whether tensor-parallel ranks hold different shards.
        tp_split_dim: the dimension that is sharded over tensor-parallel ranks, or -1.
        tp_blocks: lengths of the blocks of a fused weight along that dimension of the logical parameter; see
            :class:`bmt_comm.Slice`.

    Raises:
        RuntimeError: before ``init_distributed``.
        TypeError: ``data`` is no tensor, or a sharded parameter; ``init_method`` cannot be called.
        ValueError: ``tp_split_dim`` is no dimension of ``data``.
    """

    def __new__(  # type: ignore[misc]
        cls,
        data: Tensor,
        requires_grad: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
        *,
        tp_blocks: tuple[int, ...] = (),
    ) -> ShardedParameter:
        context = current_context()
        if not isinstance(data, Tensor):
            raise TypeError(f"data must be a tensor, not {type(data).__name__}")
        if isinstance(data, ShardedParameter):
            raise TypeError("data is a DistributedParameter, and this rank has some rows of it; pass data.gather()")
        if init_method is not None and not callable(init_method):
            raise TypeError(f"init_method must be a function that fills a tensor, not {type(init_method).__name__}")
        if tp_mode and tp_split_dim != -1 and not 0 <= tp_split_dim < data.dim():
            raise ValueError(f"tp_split_dim={tp_split_dim} is not a dimension of data of shape {tuple(data.shape)}")
        empty = torch.empty(0, dtype=data.dtype, device=context.device)
        self = torch.Tensor._make_subclass(ShardedParameter, empty, requires_grad)
        assert isinstance(self, ShardedParameter)
        self.init_method, self.group, self.tp_mode, self.awaits_values = init_method, group, tp_mode, data.is_meta
        shape = tuple(data.shape)
        self.bmt_slice = Slice(shape, 0, shape[0] if shape else 1)
        if tp_mode and tp_split_dim >= 0 and context.tp_size > 1:
            extent = shape[tp_split_dim]
            logical = (*shape[:tp_split_dim], extent * context.tp_size, *shape[tp_split_dim + 1 :])
            tp = (tp_split_dim, context.tp_rank * extent, extent, context.tp, tp_blocks)
            self.bmt_slice = Slice(logical, 0, shape[0], None, *tp)
        build_standalone(self, context, None if data.is_meta else data.detach(), Options(context.zero_level))
        return self


class DistributedModule(nn.Module):
    """A module that may own parameters of class :class:`DistributedParameter`.

    Its call unshards those that belong to no Block: every rank that shares them must call the module. The unsharded
    tensor is kept until backward has used it. A parameter that several modules share is unsharded once. At other times
    the attribute is the sharded parameter, and an operation that uses it unshards it.
    """

    handles_shards = True  # its saving and loading support sharded parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        standalone = self._standalone()
        try:
            for name, param in standalone.items():
                self._parameters[name] = param.gather()  # type: ignore[assignment]
            return super().__call__(*args, **kwargs)
        finally:
            self._parameters.update(standalone)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with unsharded_parameters(self, self._standalone()):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        standalone = self._standalone()
        if standalone and metadata.get("assign_to_params_buffers", False):
            copy_instead(self, state_dict, prefix, metadata)
        for name, param in standalone.items():
            shard_entry(param, state_dict, prefix + name, lists[-1])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a plain state dict; see :func:`bmt_zero.load_state_dict`."""
        return load_state_dict(self, state_dict, strict, assign)

    def _standalone(self) -> dict[str, ShardedParameter]:
        return {name: param for name, param in self._parameters.items() if is_standalone(param)}  # type: ignore[misc]
