"""The ``.grad`` of a sharded parameter: this rank's rows of the reduced gradient.

Operations mean the logical gradient; see [Note: operations on sharded rows] in sharded_rows. The check of
``torch.amp.GradScaler`` for infinities has the same result on all ranks, and every rank must take part in it.

Gradients record how they are written while others wait; see [Note: gradients that wait] in parameter_gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from .sharded_rows import ShardedRows, is_called_by_optimizer, make_rows
from .slice import is_stage_local, shard_of

_OVERWRITING = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")
_ADDING = ("add_", "sub_", "_foreach_add_", "_foreach_sub_", "__iadd__", "__isub__")


class ShardedGradient(ShardedRows):
    """This rank's rows of a gradient; other ranks have the other rows.

    Attributes:
        was_overwritten: whether it was set to zeros, or to other values, since :meth:`watch`.
    """

    was_overwritten = False
    _known_version = 0
    _is_gradient = True

    def watch(self) -> None:
        """Record writes from now on."""
        with torch._C.DisableTorchFunctionSubclass():
            self.was_overwritten, self._known_version = False, self._version

    @property
    def was_changed(self) -> bool:
        """Whether it was changed since :meth:`watch` in another way than by overwriting or adding to it."""
        with torch._C.DisableTorchFunctionSubclass():
            return not self.was_overwritten and self._version != self._known_version

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is Tensor.data:
            return args[0].to_local()  # it shares the version counter of this one, which records writes
        added: list[ShardedGradient] = []
        if args and name in _ADDING:
            # Adding a multiple of the gradient itself would have to add one of the waiting gradients, too.
            of_itself = any(isinstance(x, ShardedRows) for x in (*args[1:2], *(kwargs or {}).values()))
            added = [grad for grad in _written(name, args) if not grad.was_changed and not of_itself]
        result = cls._operate(func, args, kwargs or {}, is_called_by_optimizer())
        with torch._C.DisableTorchFunctionSubclass():
            for grad in added:
                grad._known_version = grad._version
            if name == "__set__" and func.__self__ is Tensor.data:
                args[0].was_overwritten = True
            if args and name in _OVERWRITING:
                for grad in _written(name, args):
                    grad.was_overwritten = True
        return result


def use_multi_tensor_functions(*types: type[Tensor]) -> None:
    """Let torch pass ``types``, and gradients of this class, to its functions of lists of tensors, as DTensor does.

    Otherwise ``clip_grad_norm_`` reduces the norm of each gradient by itself. Ranks must agree on it.
    """
    lists: list[list[Any]] = [torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
    for known in lists:
        known.extend(each for each in (*types, ShardedGradient) if each not in known)


def _written(name: str, args: Sequence[Any]) -> list[ShardedGradient]:
    """The gradients that an operation writes to."""
    chosen = args[0] if name.startswith("_foreach") else args[:1]
    return [grad for grad in chosen if isinstance(grad, ShardedGradient)]


def sharded_gradient(rows: Tensor, like: Any) -> Tensor:
    """This rank's rows, on the same memory, as a gradient of the parameter ``like`` (or whose gradient ``like`` is)."""
    return noting_gradient(rows, like) if like.bmt_slice.communicators or is_stage_local(like) else rows


def gradient_of(value: Tensor, param: Any) -> Tensor:
    """The gradient from a value that a script assigns to ``param.grad``: this rank's rows, or the logical gradient.

    Raises:
        ValueError: it is neither.
    """
    where = param.bmt_slice
    value = value.to_dense() if value.layout is not torch.strided else value
    if not isinstance(value, ShardedRows) and tuple(value.shape) == where.shape != where.local_shape:
        value = shard_of(value, where).clone()
    has_same_rows = not isinstance(value, ShardedRows) or value.bmt_slice.row_shard == where.row_shard
    if tuple(value.shape) != where.local_shape or not has_same_rows:
        raise ValueError(
            f"a gradient of shape {tuple(value.shape)} for a parameter of shape {where.shape}, of which this rank has "
            f"rows of shape {where.local_shape}"
        )
    return value if isinstance(value, ShardedGradient) else sharded_gradient(local_rows(value), param)


def noting_gradient(rows: Tensor, like: Any) -> ShardedGradient:
    """As :func:`sharded_gradient`, but also a :class:`ShardedGradient` if no other rank has other rows."""
    # ``data`` has a version counter of its own; views of one tensor, as gradients of several parameters are, share one.
    grad: ShardedGradient = make_rows(ShardedGradient, local_rows(rows).data, like.bmt_slice, is_stage_local(like))
    return grad


def local_rows(grad: Tensor) -> Tensor:
    """The plain tensor of a gradient."""
    return grad.to_local() if isinstance(grad, ShardedRows) else grad
