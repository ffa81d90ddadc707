"""Flat gradients: where the gradients of a flat parameter lie, one after the other, before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flat_parameter import FlatParameter


class Filled(NamedTuple):
    """A flat gradient that was filled in part.

    Attributes:
        total: the flat gradient.
        views: of all parameters.
        written: indices of the parameters whose gradients lie there.
    """

    total: Tensor
    views: list[Tensor]
    written: set[int]

    def with_given(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All gradients: those that lie here, to which what autograd has given of other uses is added, and the rest."""
        found = list(grads)
        for index in self.written:
            given = grads[index]
            if given is not None:
                self.views[index].add_(given)
            found[index] = self.views[index]
        return found


def new_flat_gradient(
    flat: FlatParameter, dtype: torch.dtype, is_kept: bool, give_back: Callable[[], object] | None
) -> Tensor:
    """An uninitialised flat gradient: where other ranks can read it, unless it is kept and not reduced at once.

    ``give_back``: it may lie in the storage of the unsharded parameters, and this returns the storage.
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
        and not flat.shard_comm.shares_memory  # of which all ranks read flat gradients where they lie, or none
        and grad is not None
        and grad.is_contiguous()
        and grad.numel() == flat.layout.numel
        and grad.dtype == dtype
    )


def write_gradients(
    grads: Sequence[Tensor | None], flat: FlatParameter, total: Tensor, add: bool, filled: Filled | None = None
) -> list[Tensor]:
    """Write gradients into a flat one, or add them to it, but for those that lie there already (``filled``).

    Returns the views of it.
    """
    if filled is not None and filled.total is total:
        views, there = filled.views, filled.written
    else:
        views, there = flat.unsharded_views(total), set()
    if not add:  # optimizers and norms may read the flat gradient as a whole
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
