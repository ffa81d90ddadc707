"""Parameters that other modules read in forward: a fused loss reads the weight of a head without calling it.

In a wrapped model each large module outside of the layers is unsharded while it computes. For other code in the model's
forward, ``head.weight`` is the unsharded parameter, and gradients flow through it. Reading the attribute does not
communicate: the parameter is unsharded when something computes with it, once in each forward of the model. (In a
process that uses ``torch.compile`` it is unsharded when it is read.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import not_compiled, uses_compiler

from .backward_context import current_backward, is_running
from .parameter_group import GroupHandle
from .sharded_parameter import ShardedParameter, is_row_sharded
from .unsharded_parameter import FACTS


class ReadableParameters(dict[str, Any]):
    """The ``_parameters`` of a module, where its attributes are looked up."""

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if not isinstance(param, ShardedParameter) or param.bmt_slice.tp_comm is not None:
            return param  # a tensor-parallel layer computes with this rank's shard
        return _read(param)


@not_compiled
def _read(param: ShardedParameter) -> Tensor:
    calls = param.handle.group.step.calls
    thread = threading.get_ident()
    if calls and calls[0].thread == thread and is_running(calls[-1].frame, thread):
        if calls[0].reads is None:
            calls[0].reads = Reads()
        return calls[0].reads.of(param)
    if current_backward() is not None and torch.is_grad_enabled():  # the recomputation of a checkpoint
        return Reads().of(param)
    return param


def let_others_read(module: nn.Module) -> None:
    """Let code outside of ``module`` that reads its parameters in a forward see them unsharded."""
    if not isinstance(module._parameters, ReadableParameters):
        module.__dict__["_parameters"] = ReadableParameters(module._parameters)


class Reads:
    """The parameters that code outside of their modules has read in a call."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, bool], Tensor] = {}  # by identity of the parameter, and whether autograd records

    def of(self, param: ShardedParameter) -> Tensor:
        """The unsharded parameter, as its module would see it; the same tensor until the call ends."""
        handle: GroupHandle = param.handle
        records = torch.is_grad_enabled() and param.requires_grad
        has_all_rows = not is_row_sharded(param)
        if handle.replacement is not None or (has_all_rows and records):
            return handle.unshard()
        if has_all_rows and handle.flat.dtype == param.dtype:
            return param
        key = id(param), records
        if key not in self._tensors:
            read = self._unsharded if uses_compiler() else self._deferred
            self._tensors[key] = read(handle, records)
        return self._tensors[key]

    def _unsharded(self, handle: GroupHandle, records: bool) -> Tensor:
        """A plain tensor with values: compiled code takes no others."""
        if records:
            return handle.unshard()
        handle.begin_unsharding_one()
        return handle.flat.unshard_one(handle.index)

    def _deferred(self, handle: GroupHandle, records: bool) -> Tensor:
        """A tensor that has no values until something computes with it."""
        read = ReadParameter.of(handle)
        if not records:
            return read
        [entered] = handle.group.enter(handle, [read])
        return entered

    def check(self, name: str) -> None:
        """Raise if code has written to a parameter that it has read, in a call of the module ``name``."""
        for read in self._tensors.values():
            if isinstance(read, ReadParameter) and read.was_written():
                raise RuntimeError(
                    f"in the forward of {name}, code outside of the module that owns a parameter of shape "
                    f"{tuple(read.shape)} has written to it, which has changed a copy only: write between forwards, "
                    f"into the rows of to_local()"
                )


class ReadParameter(Tensor):
    """A parameter that is unsharded when something computes with it. All ranks must compute with it.

    Attributes:
        handle: of the sharded parameter.
        version: of this tensor when it was unsharded; None: it is not unsharded, or has no version counter.
        is_unsharded: whether it has values.
    """

    handle: GroupHandle
    version: int | None
    is_unsharded: bool

    @staticmethod
    def of(handle: GroupHandle) -> ReadParameter:
        """A tensor of the unsharded parameter's shape, without values yet."""
        flat, shape = handle.flat, handle.param.bmt_slice.tp_shard_shape
        nothing = torch.zeros((), dtype=flat.dtype, device=flat.unsharded.device).expand(shape)
        read: ReadParameter = Tensor._make_subclass(ReadParameter, nothing)
        read.handle, read.version, read.is_unsharded = handle, None, False
        return read

    def unshard(self) -> None:
        if not self.is_unsharded:
            self.is_unsharded = True
            self.handle.begin_unsharding_one()
            with torch.no_grad():
                self.data = self.handle.flat.unshard_one(self.handle.index)
            self.version = None if self.is_inference() else self._version

    def was_written(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.version is not None and self.version != self._version

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _WITHOUT_VALUES:
                _unshard_all(args)
                _unshard_all((kwargs or {}).values())
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ReadParameter(shape={tuple(self.shape)}, dtype={self.dtype}, is_unsharded={self.is_unsharded})"


def _unshard_all(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, ReadParameter):
            value.unshard()
        elif isinstance(value, (list, tuple)):
            _unshard_all(value)


_WITHOUT_VALUES = FACTS | {Tensor.grad_fn.__get__}  # type: ignore[union-attr]
