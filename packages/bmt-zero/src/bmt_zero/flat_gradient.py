"""Flat gradients: one buffer with the gradients of a flat parameter, from which they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flat_parameter import FlatParameter


class Filled(NamedTuple):
    """A flat gradient that has some of its gradients.

    Attributes:
        total: the flat gradient.
        views: of all parameters.
        written: indices of the parameters whose gradients it has.
    """

    total: Tensor
    views: list[Tensor]
    written: set[int]

    def with_given(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All gradients: the written views, and ``grads`` (autograd's) for the other parameters.

        If a written parameter has a gradient in ``grads`` too, from other uses, it is added to the view.
        """
        result = list(grads)
        for index in self.written:
            given = grads[index]
            if given is not None:
                self.views[index].add_(given)
            result[index] = self.views[index]
        return result


def new_flat_gradient(
    flat: FlatParameter, dtype: torch.dtype, is_kept: bool, give_back: Callable[[], object] | None
) -> Tensor:
    """An uninitialised flat gradient. If ranks share memory and it is not ``is_kept``, other ranks can read it.

    Args:
        flat: the flat parameter.
        dtype: of the gradient.
        is_kept: whether it is accumulated instead of reduced immediately.
        give_back: returns the storage of the unsharded parameters, which may be borrowed; None: it may not.
    """
    comm = flat.shard_comm
    if not is_kept and flat.options.precision.packs_gradients is None and comm.shares_memory:
        return comm.empty(flat.layout.numel, dtype)
    borrows = give_back is not None and not is_kept and dtype == flat.unsharded.dtype
    borrowed = flat.lend_storage(give_back) if borrows and give_back is not None else None
    if borrowed is not None:
        return borrowed
    return torch.empty(flat.layout.numel, dtype=dtype, device=flat.unsharded.device)


def is_flat_gradient(grad: Tensor | None, flat: FlatParameter, dtype: torch.dtype) -> bool:
    """Whether the gradient of the only parameter can be reduced as it is."""
    return (
        len(flat.params) == 1
        and flat.shard_comm.size > 1
        and not flat.shard_comm.shares_memory  # there, ranks read flat gradients in the memory they share
        and grad is not None
        and grad.is_contiguous()
        and grad.numel() == flat.layout.numel
        and grad.dtype == dtype
    )


def write_gradients(
    grads: Sequence[Tensor | None], flat: FlatParameter, total: Tensor, add: bool, filled: Filled | None = None
) -> list[Tensor]:
    """Write gradients into the flat gradient ``total``, or add them to it. Those that ``filled`` has are skipped.

    Returns the views of ``total``, one for each parameter.
    """
    if filled is not None and filled.total is total:
        views, there = filled.views, filled.written
    else:
        views, there = flat.unsharded_views(total), set()
    if not add:  # optimizers and norms may read all of the flat gradient
        for start, stop in flat.layout.gaps:
            total[start:stop].zero_()
        absent = [views[i] for i, grad in enumerate(grads) if grad is None]
        if absent:
            torch._foreach_zero_(absent)
    present = [i for i, grad in enumerate(grads) if grad is not None and i not in there]
    if present:
        write: Any = torch._foreach_add_ if add else torch._foreach_copy_
        write([views[i] for i in present], [grads[i] for i in present])
    return views
