"""Reducing a call's gradients later, where backward puts weight gradients off.

See [Note: the two parts] in ``bmt_comm.weight_gradients``. A call that has put a gradient off is reduced as a whole
when that has been computed; its other gradients wait. Until then no parameter needs to be gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmt_comm import Communicator, GradientReceiver, deferring, total_gradients

if TYPE_CHECKING:
    from .unit import Unit


def may_wait(unit: Unit, tensors: Sequence[Tensor]) -> bool:
    """Whether the backward pass that is running accumulates gradients of ``unit``'s parameters, and ``tensors`` can be
    kept for them: they do not lie in the space of parameters, which is about to be freed."""
    if not torch._C._will_engine_execute_node(unit.accumulates):
        return False
    spaces = {bucket.full.untyped_storage().data_ptr() for bucket in unit.buckets if bucket.frees}
    return not any(tensor.untyped_storage().data_ptr() in spaces for tensor in tensors)


def reduce_in_time(unit: Unit, receiver: GradientReceiver, reduce: Callable[[Mapping[int, Tensor]], None]) -> None:
    """Call ``reduce`` with those gradients for ``receiver`` that were put off, by output: now, or when they are run.

    Whether a unit waits is settled the first time that its gradients may: if one was put off on any rank. Ranks that
    take different ways through a module would come to a reduction at different times otherwise.
    """
    deferred = deferring()
    if deferred is None:
        reduce({})
        return
    gradients = deferred.take(receiver)
    if unit.waits is None:
        unit.waits = _any_rank(bool(gradients), unit.comms, unit.context.device)
    if unit.waits:
        deferred.finish_later(gradients, reduce)
    else:
        reduce(total_gradients(gradients))


def added(grads: Sequence[Tensor | None], late: Mapping[int, Tensor], start: int) -> list[Tensor | None]:
    """Gradients that arrived in backward, of a node's outputs from ``start`` on, with those that came later."""
    found = [late.get(start + i) for i in range(len(grads))]
    return [b if a is None else a if b is None else a + b for a, b in zip(grads, found, strict=True)]


def _any_rank(flag: bool, comms: Sequence[Communicator], device: torch.device) -> bool:
    if not comms:
        return flag
    found = torch.tensor(flag, dtype=torch.uint8, device=device)
    for comm in comms:
        comm.all_reduce(found, "max")
    return bool(found)
