"""How the parameters of a module are sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bmt_comm import Communicator, ParallelContext, page_locked

from .precision import MixedPrecision


def ranks_of(context: ParallelContext, tp_mode: bool, stage_local: bool = False) -> Communicator:
    """The ranks that share a parameter, of all stages or of this one."""
    if stage_local:
        return context.tp_zero if tp_mode else context.zero
    return context.outer_tp_zero if tp_mode else context.outer_zero


@dataclass(frozen=True)
class Options:
    """How parameters are sharded; see :func:`bmt_zero.shard`.

    Attributes:
        level: ZeRO level.
        precision: dtypes of computation and reduction.
        communicators: the shard group and the replicate group; None: chosen by level.
        stage_local: whether only the ranks of this pipeline stage have the parameters.
        reshard_after_forward: whether parameters are resharded between forward and backward; None: at level 3.
        offload: whether shards, and so gradients and optimizer states, are in host memory.
        pin_memory: whether that memory is pinned, if the context's device is not the host.
        name: for messages.
    """

    level: int
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    communicators: tuple[Communicator, Communicator] | None = None
    stage_local: bool = False
    reshard_after_forward: bool | None = None
    offload: bool = False
    pin_memory: bool = True
    name: str = "a parameter"

    def ranks(self, context: ParallelContext) -> tuple[Communicator, ...]:
        """The communicators whose ranks together have the module."""
        return self.communicators or (ranks_of(context, False, self.stage_local),)

    def new_storage(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a shard of parameters that are computed with on ``device``; not filled."""
        if self.offload and self.pins(device):
            return page_locked(numel, dtype)
        return torch.empty(numel, dtype=dtype, device="cpu" if self.offload else device)

    def pins(self, device: torch.device) -> bool:
        """Whether tensors that are offloaded from ``device`` are in page-locked memory."""
        return self.pin_memory and device.type == "cuda"

    def groups(self, context: ParallelContext, tp_mode: bool) -> tuple[Communicator, Communicator]:
        """The shard group and the replicate group of a parameter."""
        if self.communicators is not None:
            return self.communicators
        comm = ranks_of(context, tp_mode, self.stage_local)
        return (context.alone, comm) if self.level == 0 else (comm, context.alone)
