"""The sum of a flat gradient over the ranks, in flight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_comm import TREE_SUM, Work, named_range

from .flat_parameter import FlatParameter
from .side_stream import follow_compute, on_stream, record_event


@dataclass
class ReductionSettings:
    """How gradients are reduced; ``fully_shard`` and the methods of ``FSDPModule`` change it.

    Attributes:
        divisor: what the sum over the ranks is divided by: 1 for a sum, the number of replicas for a mean.
        keeps_unsharded: whether gradients are accumulated unreduced under ``no_sync``.
        all_reduces: whether gradients are summed over the replicate group. Otherwise the sum over the shard group is
            kept, and added to a later one.
        hook: called with each flat, reduced gradient of this rank's shard, in the dtype of the reduction.
    """

    divisor: float = 1.0
    keeps_unsharded: bool = False
    all_reduces: bool = True
    hook: Callable[[Tensor], Any] | None = None

    def divisor_before(self, dtype: torch.dtype) -> float:
        """What gradients are divided by before they are summed: in half precision the sum could overflow."""
        halves = dtype == torch.float16 and self.divisor > 1
        return 2.0 ** math.ceil(math.log2(self.divisor) / 2) if halves else 1.0


class Reduction:
    """The sum of flat gradients over the ranks, in flight.

    ``total`` is kept until the collective has read it. If it is in borrowed storage of the unsharded parameters, the
    storage is returned then. On CUDA everything is queued immediately in the side stream.

    Args:
        flat: the flat parameter.
        total: the flat gradient; it is overwritten.
        settings: how it is reduced.
        grad_scale: factor of the sum.
        has_fixed_order: see [Note: sums in a fixed order] in gradient_reducer.
        partial: an earlier sum over the shard group, to add; or None.

    Attributes:
        is_partial: whether it is summed over the shard group only, and not over the replicate group.
        copied: an event after the copy of the result to the host.
    """

    def __init__(
        self,
        flat: FlatParameter,
        total: Tensor,
        settings: ReductionSettings,
        grad_scale: float,
        has_fixed_order: bool,
        partial: Tensor | None,
    ) -> None:
        self._flat, self._settings, self._partial = flat, settings, partial
        self._total: Tensor | None = total  # the side stream reads it until ``stream.reduced``
        self.copied: torch.cuda.Event | None = None
        self.is_partial = not (settings.all_reduces or has_fixed_order) and flat.replicate_comm.size > 1
        self._op = TREE_SUM if has_fixed_order else "sum"
        divisor_before = 1.0 if has_fixed_order else settings.divisor_before(total.dtype)
        self._scale = grad_scale * divisor_before / settings.divisor
        comm, stream = flat.shard_comm, flat.stream
        on_cpu = stream is None
        follow_compute(stream)
        with named_range("reduce", flat.label), on_stream(stream):
            if has_fixed_order and comm.size == 1:
                total = total.to(flat.shard.dtype)
            self._work: Work | None = None
            self._reduced = total
            if divisor_before != 1.0:
                total.div_(divisor_before)
            compression = flat.options.precision.packs_gradients
            if comm.size > 1 and compression is not None:
                self._reduced = torch.empty(flat.layout.shard_numel, dtype=torch.float32, device=total.device)
                self._work = compression.reduce_scatter(comm, self._reduced, total, on_cpu, flat.label)
            elif comm.size > 1:
                dtype = flat.shard.dtype if has_fixed_order else total.dtype
                self._reduced = torch.empty(flat.layout.shard_numel, dtype=dtype, device=total.device)
                self._work = comm.reduce_scatter(self._reduced, total, self._op, on_cpu, flat.label)
            elif flat.replicate_comm.size > 1 and not self.is_partial:
                self._add_partial()
                self._work = flat.replicate_comm.all_reduce(total, self._op, on_cpu, flat.label)
            if stream is not None:
                self._complete()
                if comm.size == 1:  # the event must come after the copy, which reads ``total``
                    self._offload()
                stream.record(stream.reduced)
                if comm.size > 1:
                    self._offload()
        if not on_cpu:
            flat.storage_returned()  # the side stream releases it after its last reader

    def finish(self) -> Tensor:
        """The reduced gradient of this rank's shard, usable by the compute stream."""
        flat = self._flat
        if self._work is not None:
            with named_range("wait for reduce", flat.label):
                self._work.wait()
        if flat.stream is None:
            self._complete()
            self._offload()
            flat.storage_returned()
        else:
            flat.stream.let_compute_wait(flat.stream.reduced)
        self._total = None
        return self._reduced

    def _complete(self) -> None:
        flat, hook = self._flat, self._settings.hook
        is_sharded = flat.shard_comm.size > 1
        if is_sharded or self.is_partial:
            self._add_partial()
        if self.is_partial:
            if not is_sharded:
                self._reduced = self._reduced.clone()  # its storage may be borrowed
            return
        if is_sharded and flat.replicate_comm.size > 1:
            flat.replicate_comm.all_reduce(self._reduced, self._op, label=flat.label)
        if self._scale != 1.0:
            self._reduced.mul_(self._scale)
        if hook is not None:
            hook(self._reduced)
        if self._reduced.dtype != flat.shard.dtype:
            self._reduced = self._reduced.to(flat.shard.dtype)

    def _offload(self) -> None:
        """Copy the reduced gradient to where the shard is."""
        flat = self._flat
        if flat.offloads and not self.is_partial:
            # In pinned memory that torch caches for the next gradients.
            stored = torch.empty_like(self._reduced, device="cpu", pin_memory=flat.options.pins(flat.device))
            stored.copy_(self._reduced, non_blocking=True)
            self._reduced = stored
            self.copied = record_event(flat.stream)

    def _add_partial(self) -> None:
        if self._partial is not None:
            self._reduced.add_(self._partial)
            self._partial = None

    @property
    def held(self) -> list[Tensor | None]:
        """The gradients that it keeps, or None."""
        return [self._total, self._reduced, self._partial]
