"""The ``.grad`` of a sharded parameter: this rank's rows of the reduced gradient.

Operations act on these rows, with two exceptions. A norm over all dimensions is that of the logical gradient, so that
``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` are right. The search of ``torch.amp.GradScaler`` for
infinities has the same result on all ranks. Every rank must then take part.

Gradients note what is written to them while others wait; see [Note: gradients that wait] in parameter_gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .communicator import Communicator
from .context import current_context, is_initialized
from .slice import STAGE_LOCAL_ATTRIBUTE, Slice, is_stage_local

_OVERWRITING = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")
_ADDING = ("add_", "sub_", "_foreach_add_", "_foreach_sub_", "__iadd__", "__isub__")
_NORMS = ("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm")


class ShardedGradient(Tensor):
    """This rank's rows of a gradient that other ranks have other rows of.

    Attributes:
        bmt_slice: which rows.
        was_overwritten: whether it was set to zeros, or to other values, since :meth:`watch`.
    """

    bmt_slice: Slice
    was_overwritten = False
    _known_version = 0

    def watch(self) -> None:
        """Note what is written from now on."""
        with torch._C.DisableTorchFunctionSubclass():
            self.was_overwritten, self._known_version = False, self._version

    @property
    def was_changed(self) -> bool:
        """Whether it was changed since :meth:`watch` in another way than by overwriting or adding to it."""
        with torch._C.DisableTorchFunctionSubclass():
            return not self.was_overwritten and self._version != self._known_version

    def to_local(self) -> Tensor:
        """This rank's rows, as a plain tensor on the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), sharded_gradient(self.to_local().clone(), self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _NORMS and kwargs.get("dim") is None and len(args) < 3:
                with torch.no_grad():
                    return _norm(name, *args, **kwargs)
            if name == "__get__" and func.__self__ is Tensor.data:
                return args[0].detach()  # with the version of this one, which notes what is written
            added: list[ShardedGradient] = []
            if args and name in _ADDING:
                added = [grad for grad in _written(name, args) if not grad.was_changed]
            result = func(*args, **kwargs)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                _reduce(args[1], _communicators(args[0]), "max")
            for grad in added:
                grad._known_version = grad._version
            if name == "__set__" and func.__self__ is Tensor.data:
                args[0].was_overwritten = True
            if args and name in _OVERWRITING:
                for grad in _written(name, args):
                    grad.was_overwritten = True
            return result


def _written(name: str, args: Sequence[Any]) -> list[ShardedGradient]:
    """The gradients that an operation writes to."""
    chosen = args[0] if name.startswith("_foreach") else args[:1]
    return [grad for grad in chosen if isinstance(grad, ShardedGradient)]


def sharded_gradient(rows: Tensor, like: Any) -> Tensor:
    """This rank's rows, on the same memory, as a gradient of the sharded parameter ``like``, or of that of ``like``."""
    return noting_gradient(rows, like) if like.bmt_slice.communicators or is_stage_local(like) else rows


def noting_gradient(rows: Tensor, like: Any) -> ShardedGradient:
    """The same, also where no other rank has other rows."""
    # ``data``, because gradients of other parameters are views of the same tensor, and have its version otherwise.
    grad: ShardedGradient = Tensor._make_subclass(ShardedGradient, local_rows(rows).data)
    grad.bmt_slice = like.bmt_slice
    setattr(grad, STAGE_LOCAL_ATTRIBUTE, is_stage_local(like))
    return grad


def local_rows(grad: Tensor) -> Tensor:
    """The plain tensor of a gradient."""
    return grad.to_local() if isinstance(grad, ShardedGradient) else grad


def _norm(
    name: str, grads: Any, ord: Any = 2, *, p: Any = None, dtype: torch.dtype | None = None, **_options: Any
) -> Any:
    """Norms of logical gradients, 0-dim; for ``_foreach_norm`` a list of them, with a collective for each group."""
    given = ord if p is None else p
    order = 2.0 if given in (None, "fro") else float(given)
    several = name == "_foreach_norm"
    chosen = list(grads) if several else [grads]
    is_spread = any(isinstance(grad, ShardedGradient) and grad.bmt_slice.communicators for grad in chosen)
    is_sum = order not in (0, float("inf"), -float("inf"))
    if is_sum and is_spread and is_initialized() and current_context().deterministic:
        raise RuntimeError(
            "deterministic=True: this norm of gradients depends on the number of ranks in its last bits; use "
            "OptimManager.clip_grad_norm, or grad.to_local() for this rank's rows"
        )
    dtypes = [dtype or grad.dtype for grad in chosen]
    powers = [_power(local_rows(grad), order) for grad in chosen]
    by_communicators: dict[tuple[Communicator, ...], list[int]] = {}
    for index, grad in enumerate(chosen):
        if isinstance(grad, ShardedGradient):
            by_communicators.setdefault(tuple(_communicators([grad])), []).append(index)
    op = "sum" if abs(order) != float("inf") else "max" if order > 0 else "min"
    for communicators, members in sorted(by_communicators.items(), key=lambda item: [comm.ranks for comm in item[0]]):
        together = torch.stack([powers[index] for index in members])
        _reduce(together, communicators, op)
        for index, power in zip(members, together.unbind(), strict=True):
            powers[index] = power
    if op == "sum" and order != 0:
        powers = [power ** (1 / order) for power in powers]
    norms = [power.to(wanted) for power, wanted in zip(powers, dtypes, strict=True)]
    return norms if several else norms[0]


def _power(rows: Tensor, order: float) -> Tensor:
    """What is added up, or compared, over ranks for a norm: 0-dim, fp32 or wider."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if not rows.numel():
        return torch.full((), float("inf") if order == -float("inf") else 0.0, dtype=dtype, device=rows.device)
    norm = torch.linalg.vector_norm(rows, order, dtype=dtype)
    return norm if order == 0 or abs(order) == float("inf") else norm**order


def _communicators(grads: Sequence[Tensor]) -> list[Communicator]:
    """The communicators whose ranks have other elements of ``grads``, in an order that all ranks agree on: rows first.

    Raises:
        RuntimeError: a parameter belongs to a pipeline stage; other stages would not take part.
    """
    rows: dict[Communicator, None] = {}
    columns: dict[Communicator, None] = {}
    for grad in grads:
        if isinstance(grad, ShardedGradient):
            if is_stage_local(grad):
                raise RuntimeError(
                    "this function sees the gradients of one pipeline stage only; use OptimManager, whose "
                    "clip_grad_norm and loss scale take all stages into account"
                )
            for comm in grad.bmt_slice.communicators:
                (columns if comm is grad.bmt_slice.tp_comm else rows)[comm] = None
    return [comm for communicators in (rows, columns) for comm in sorted(communicators, key=lambda comm: comm.ranks)]


def _reduce(value: Tensor, communicators: Sequence[Communicator], op: str) -> None:
    for comm in communicators:
        there = value.to(comm.device)  # gradients of offloaded parameters are in host memory
        comm.all_reduce(there, op)
        if there is not value:
            value.copy_(there)
