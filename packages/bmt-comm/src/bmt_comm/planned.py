"""A parallel context of ranks that do not exist, to estimate what a job needs before it is started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import context as contexts
from .communicator import Communicator
from .context import ParallelContext
from .slice import forget_communicators
from .work import DONE, Work


class PlannedCommunicator(Communicator):
    """Does not communicate: collectives count their bytes and return as if all ranks had passed the same tensors.

    Args:
        ranks: the global ranks. The process simulates the first.
    """

    is_planned = True

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None, "cpu")
        self.rank, self.size, self.ranks = 0, len(ranks), tuple(ranks)

    def all_gather(self, out: Tensor, src: Tensor, async_op: bool = False, label: str = "") -> Work:
        self._count("all_gather", (self.size - 1) * src.nbytes)
        if not out.is_meta:
            out.view(self.size, -1).copy_(src.reshape(1, -1).clone())
        return DONE

    def reduce_scatter(
        self, out: Tensor, src: Tensor, op: str = "sum", async_op: bool = False, label: str = ""
    ) -> Work:
        self._count("reduce_scatter", (self.size - 1) * out.nbytes)
        return DONE

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False, label: str = "") -> Work:
        self._count("all_reduce", 2 * (self.size - 1) * tensor.nbytes // self.size)
        return DONE

    def broadcast(self, tensor: Tensor, root: int, async_op: bool = False, label: str = "") -> Work:
        return DONE

    def send_recv(
        self,
        sends: Sequence[tuple[Tensor, int]],
        recvs: Sequence[tuple[Tensor, int]],
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        for tensor, _ in sends:
            self._count("send", tensor.nbytes)
        return DONE

    def barrier(self, async_op: bool = False, label: str = "") -> Work:
        return DONE

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return obj


@contextlib.contextmanager
def planned_context(
    world_size: int, tp_size: int = 1, pipe_size: int = 1, zero_level: int = 3, device: str = "meta"
) -> Iterator[ParallelContext]:
    """Within, the process simulates rank 0 of ``world_size``; modules are on the meta device.

    With ``pipe_size`` > 1 the process simulates a rank of one stage: ``zero`` and ``tp_zero`` have the ranks of that
    stage. There are no channels to other stages.

    Raises:
        RuntimeError: the process has a parallel context already.
        ValueError: the sizes do not divide ``world_size``.
    """
    if contexts._current is not None:
        raise RuntimeError("planned_context: this process has joined a job; call shutdown() first")
    if world_size < 1 or tp_size < 1 or pipe_size < 1 or world_size % (tp_size * pipe_size):
        raise ValueError(f"tp_size={tp_size} × pipe_size={pipe_size} does not divide world_size={world_size}")
    data_size = world_size // (tp_size * pipe_size)
    alone = Communicator(None, "cpu")

    def of(count: int, step: int = 1) -> Communicator:
        return PlannedCommunicator(range(0, count * step, step)) if count > 1 else alone

    pipe, zero, tp_zero = of(pipe_size, data_size * tp_size), of(data_size * tp_size), of(data_size, tp_size)
    context = ParallelContext(
        mesh=cast(DeviceMesh, None),
        device=torch.device(device),
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_size=1,
        pipe_size=pipe_size,
        data_size=data_size,
        tp_size=tp_size,
        num_micro_batches=pipe_size,
        zero_level=zero_level,
        world=of(world_size),
        zero=zero,
        tp_zero=tp_zero,
        tp=of(tp_size),
        pipe=pipe,
        outer_zero=of(world_size),
        outer_tp_zero=of(world_size // tp_size, tp_size),
        alone=alone,
        pipe_channels={},
        pipe_host=pipe,
        zero_host=zero,
        owns_process_group=False,
    )
    contexts._current = context
    try:
        yield context
    finally:
        contexts._current = None
        forget_communicators()
