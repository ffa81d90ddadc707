"""BMTrain's names for sharded parameters outside of Blocks: DistributedParameter and DistributedModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import current_context

from .precision import MixedPrecision
from .shard import Options, build_standalone, describe, is_standalone
from .sharded_parameter import ShardedParameter
from .state import cut_entry, load_state_dict, unsharded_parameters


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


class _AnySharded(type(nn.Parameter)):  # type: ignore[misc]
    """``isinstance(x, DistributedParameter)`` is true of every sharded parameter."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedParameter)


class DistributedParameter(ShardedParameter, metaclass=_AnySharded):
    """Build a parameter whose rows are spread over ranks. The result is a :class:`ShardedParameter`.

    A ``DistributedModule`` that owns it gathers it for its forward; anywhere else it is gathered by the operation that
    uses it. In a module that becomes a Block, it becomes a part of the Block.

    Args:
        data: the whole parameter (under ``tp_mode``: this tensor-parallel rank's shard), of which this rank
            keeps its rows. Nothing is communicated: ranks are expected to pass equal values, or to
            initialise afterwards.
        requires_grad: whether it is trained.
        init_method: fills the whole parameter when ``init_parameters`` runs.
        group: a name by which ``grouped_parameters`` collects parameters.
        tp_mode: whether tensor-parallel ranks hold different shards.
        tp_split_dim: the dimension that is sharded over tensor-parallel ranks, or -1.
        tp_blocks: lengths, along that dimension of the whole, of the blocks of a fused weight; see
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
            raise TypeError("data is a DistributedParameter, of which this rank has some rows; pass data.gather()")
        if init_method is not None and not callable(init_method):
            raise TypeError(f"init_method must be a function that fills a tensor, not {type(init_method).__name__}")
        if tp_mode and tp_split_dim != -1 and not 0 <= tp_split_dim < data.dim():
            raise ValueError(f"tp_split_dim={tp_split_dim} is not a dimension of data of shape {tuple(data.shape)}")
        empty = torch.empty(0, dtype=data.dtype, device=context.device)
        self = torch.Tensor._make_subclass(ShardedParameter, empty, requires_grad)
        assert isinstance(self, ShardedParameter)
        describe(self, context, tuple(data.shape), init_method, group, tp_mode, tp_split_dim, tp_blocks)
        self.awaits_values = data.is_meta
        options = Options(context.zero_level, MixedPrecision())
        build_standalone(self, context, None if data.is_meta else data.detach(), options)
        return self


class DistributedModule(nn.Module):
    """A module that may own :class:`DistributedParameter`s.

    While it is called, such a parameter that belongs to no Block is gathered: every rank that shares it must call the
    module. The gathered tensor lives until backward has used it; a parameter that several modules share is gathered
    once. Reading a parameter at other times gives the sharded parameter, and an operation that uses it gathers it.
    """

    handles_shards = True  # its saving and loading serve sharded parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._gathered():
            return super().__call__(*args, **kwargs)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        own = self._standalone()
        try:
            for name, param in own:
                self._parameters[name] = param.gather()  # type: ignore[assignment]
            yield
        finally:
            for name, param in own:
                self._parameters[name] = param

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with unsharded_parameters((self, name) for name, _ in self._standalone()):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name, param in self._standalone():
            cut_entry(param, state_dict, prefix + name, lists[-1])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors under plain names; see :func:`bmt_zero.load_state_dict`."""
        return load_state_dict(self, state_dict, strict, assign)

    def _standalone(self) -> list[tuple[str, ShardedParameter]]:
        return [(name, param) for name, param in self._parameters.items() if is_standalone(param)]  # type: ignore[misc]
