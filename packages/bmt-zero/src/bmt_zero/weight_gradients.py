"""Reducing a call's gradients later, where the weight-gradient pass comes after the input-gradient pass.

See [Note: the two parts] in ``bmt_comm.weight_gradients``. A call with a weight gradient that comes later is reduced as
a whole when that has been computed; its other gradients wait. Until then no parameter needs to be unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bmt_comm import Communicator, GradientReceiver, deferring, total_gradients

from .flat_parameter import FlatParameter


class WaitingGroup(Protocol):
    """A parameter group whose gradients may come later."""

    accumulates: Any  # the node that runs where gradients of leaves are accumulated
    waits: bool | None  # whether it waits for gradients that come later; None: not known yet
    device: torch.device

    @property
    def flats(self) -> Sequence[FlatParameter]: ...

    @property
    def comms(self) -> Sequence[Communicator]: ...


def may_wait(group: WaitingGroup, tensors: Sequence[Tensor]) -> bool:
    """Whether the running backward pass accumulates gradients of the group's parameters, and ``tensors`` can be
    kept for them: they do not lie in the storage of unsharded parameters, which is about to be released."""
    if not torch._C._will_engine_execute_node(group.accumulates):
        return False
    return not any(flat.owns(tensor) for flat in group.flats for tensor in tensors)


def reduce_in_time(
    group: WaitingGroup, receiver: GradientReceiver, reduce: Callable[[Mapping[int, Tensor]], None]
) -> None:
    """Call ``reduce`` with the gradients for ``receiver`` that come later, by output: now, or when they are computed.

    Whether a group waits is settled the first time that it may: if a gradient comes later on any rank. Ranks that take
    different ways through a module would come to a reduction at different times otherwise.
    """
    deferred = deferring()
    if deferred is None:
        reduce({})
        return
    gradients = deferred.take(receiver)
    if group.waits is None:
        group.waits = _any_rank(bool(gradients), group.comms, group.device)
    if group.waits:
        deferred.finish_later(gradients, reduce)
    else:
        reduce(total_gradients(gradients))


def added(grads: Sequence[Tensor | None], late: Mapping[int, Tensor]) -> list[Tensor | None]:
    """Gradients that arrived in backward, with those that came later."""
    later = [late.get(i) for i in range(len(grads))]
    return [b if a is None else a if b is None else a + b for a, b in zip(grads, later, strict=True)]


def _any_rank(flag: bool, comms: Sequence[Communicator], device: torch.device) -> bool:
    if not comms:
        return flag
    answer = torch.tensor(flag, dtype=torch.uint8, device=device)
    for comm in comms:
        comm.all_reduce(answer, "max")
    return bool(answer)
