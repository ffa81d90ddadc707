"""Check that tensor-parallel ranks compute the same gradients of the parameters that all of them hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator

_TOLERANCE = 0.05  # of the norm: rounding in half precision is less, a gradient of a part of the sequence is more
_FLOOR = 1e-3  # of the norm of all gradients together: smaller gradients may be rounding errors
_PROJECTIONS = 4


def check_replicas(
    shapes: Sequence[tuple[int, ...]],
    grads: Sequence[Tensor | None],
    tp_comm: Communicator,
    communicators: Sequence[Communicator],
) -> list[bool]:
    """Raise unless the unreduced gradients are the same on all tensor-parallel ranks, up to rounding.

    Every rank must call this, with the gradients of the same parameters; None counts as zeros.

    Args:
        shapes: of the parameters.
        grads: this rank's.
        tp_comm: the tensor-parallel ranks.
        communicators: all of their ranks raise if one does.

    Returns:
        Which gradients had values to compare on some rank.

    Raises:
        RuntimeError: they differ.
    """
    if tp_comm.is_planned:
        return [True] * len(shapes)
    device = tp_comm.device
    mine = torch.stack([_fingerprint(grad, device) for grad in grads])
    everyone = tp_comm.stacked(mine)
    norms = everyone[..., 0].amax(0)
    difference = (everyone[..., 1:] - everyone[0, :, 1:]).abs().amax((0, 2))
    least = _FLOOR * float(norms.norm())
    flags = torch.stack([difference > _TOLERANCE * norms.clamp(min=least), norms > least]).float()
    for comm in communicators:
        comm.all_reduce(flags, "max")
    different = flags[0].nonzero().flatten().tolist()
    if different:
        raise RuntimeError(
            f"the tensor-parallel ranks find different gradients of parameters of shapes "
            f"{[tuple(shapes[i]) for i in different[:5]]}, which all of them hold. If their module computes on a part "
            f"of the sequence, say so before the first step: bmt_tp.sequence_parallel(module). Otherwise the ranks "
            f"were given different batches: choose the data by the context's replica_rank"
        )
    return (flags[1] > 0).tolist()


def _fingerprint(grad: Tensor | None, device: torch.device) -> Tensor:
    """(1 + projections,) fp64: the norm, and products with fixed signs."""
    if grad is None or not grad.numel():
        return torch.zeros(1 + _PROJECTIONS, dtype=torch.float64, device=device)
    values = grad.detach().reshape(-1).double()
    numbers = torch.arange(values.numel(), device=values.device)
    signs = torch.stack([1 - 2 * ((numbers * factor >> 7) & 1) for factor in (73, 157, 283, 419)])
    return torch.cat([values.norm()[None], signs.double() @ values])
