"""Gradients of a flat parameter: accumulation, the reduction over ranks, and the parameters' ``.grad``.

[Note: parameters without a gradient]
    A parameter that no rank has used keeps ``grad=None``, as in PyTorch. A rank knows what it has used itself. While
    there are parameters that no rank is known to have used, the ranks tell each other at the end of a backward pass,
    for all parameters at once (:class:`UseAgreement`); in a model that uses all it has, nothing is exchanged.

[Note: frozen parameters]
    Parameters are sorted into flat parameters by ``requires_grad`` once, when they are sharded; their layout never
    changes after that, because optimizers keep their shapes. In a flat parameter of which some parameters were frozen
    since, these count as zeros in the reduction and get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator, Work

from .flat_parameter import FlatParameter, on_stream, record_event, wait_event
from .layout import FlatLayout
from .sharded_parameter import ShardedParameter


class GradientReducer:
    """Sums the gradients of a flat parameter over the ranks.

    Args:
        flat: the flat parameter.
        replicate_comm: the ranks that hold the same shard; gradients are summed over them, too.
        level: ZeRO level.
        reduce_dtype: what gradients are summed in; None: as computed.
        grad_scale: what summed gradients are multiplied by.
    """

    def __init__(
        self,
        flat: FlatParameter,
        replicate_comm: Communicator,
        level: int,
        reduce_dtype: torch.dtype | None,
        grad_scale: float,
    ) -> None:
        self.flat = flat
        self.replicate_comm = replicate_comm
        self.level = level
        self.reduce_dtype = reduce_dtype
        self.grad_scale = grad_scale
        self.no_sync = False
        self.pending: _Reduction | None = None
        self._accumulated: Tensor | None = None  # unreduced gradients of levels 0 and 1 under no_sync
        self._grads_then: list[tuple[Tensor, int]] = []  # .grad and its version when _accumulated began
        count = len(flat.params)
        self._reached = [False] * count  # by a gradient, on this rank, since the last reduction
        self.used: list[bool] = [False] * count  # by any rank
        self._undecided: list[Tensor | None] = []  # reduced rows of parameters that no rank is known to have used
        self._gaps = _gaps(flat.layout)

    @property
    def comms(self) -> tuple[Communicator, Communicator]:
        return self.flat.shard_comm, self.replicate_comm

    @property
    def _reduces_nothing(self) -> bool:
        flat = self.flat
        return (
            flat.shard_comm.size == 1
            and self.replicate_comm.size == 1
            and not flat.casts
            and self.reduce_dtype in (None, flat.shard.dtype)
        )

    @torch.no_grad()
    def reduce(self, grads: Sequence[Tensor | None], needed: bool) -> None:
        """Start to sum gradients of the unsharded parameters over the ranks.

        Every rank must call this, also one whose gradients are all None (they count as zeros).

        Args:
            grads: one for each parameter.
            needed: whether the unsharded parameters are needed after this in the backward pass.
        """
        flat = self.flat
        self.finish()
        self._forget_zeroed()
        self._reached = [r or g is not None for r, g in zip(self._reached, grads, strict=True)]
        accumulate = self.no_sync and self.level <= 1
        if self._accumulated is None and not accumulate and self._reduces_nothing:
            self._add_unreduced(grads)
            return
        total = self._accumulated
        if total is None and not accumulate and flat.shard_comm.size > 1 and self._is_flat(grads[0]):
            assert grads[0] is not None
            total = grads[0].reshape(-1)
        elif total is None:
            total = self._space(may_borrow=not needed and not accumulate)
            self._copy_into(total, grads)
        else:
            present = [(v, g) for v, g in zip(flat.unsharded_views(total), grads, strict=True) if g is not None]
            if present:
                torch._foreach_add_([v for v, _ in present], [g for _, g in present])
        if accumulate:
            if self._accumulated is None:
                self._accumulated = total
                self._watch_gradients()
            return
        self._accumulated = None
        self.pending = _Reduction(self, total)

    def reduce_accumulated(self) -> None:
        """Reduce what was accumulated under ``no_sync`` where no backward comes that would; all ranks, or none."""
        if self._accumulated is not None and not self.no_sync:
            self.reduce([None] * len(self.flat.params), needed=False)

    def finish(self) -> bool:
        """Complete a started reduction; whether there was one.

        After this the parameters' ``.grad`` include it, but for those of [Note: parameters without a gradient], which
        wait for :meth:`decide`.
        """
        work, self.pending = self.pending, None
        if work is not None:
            self.add_gradient(work.finish())
        return work is not None

    @property
    def accumulates(self) -> bool:
        """Whether parameters stay unsharded from one micro-batch to the next."""
        return self.level <= 1 and (self.no_sync or self._accumulated is not None)

    def drop(self) -> None:
        """Forget what an interrupted backward has left."""
        work, self.pending = self.pending, None
        if work is not None:
            work.finish()
        self._accumulated = None
        self._undecided = []
        self._reached = [False] * len(self._reached)

    # --- which parameters were used ---------------------------------------------------------------

    @property
    def is_undecided(self) -> bool:
        """Whether there are gradients of parameters that no rank is known to have used."""
        return bool(self._undecided)

    def take_reached(self) -> list[bool]:
        """Which parameters this rank has used since it was asked last."""
        reached, self._reached = self._reached, [False] * len(self._reached)
        return reached

    def decide(self, used: Sequence[bool]) -> None:
        """Give parameters that some rank has used their gradients."""
        self.used = [a or b for a, b in zip(self.used, used, strict=True)]
        waiting, self._undecided = self._undecided, []
        for param, grad, used_now in zip(self.flat.params, waiting, self.used, strict=True):
            if grad is not None and used_now:
                _add(param, grad)

    # --- the parameters' gradients ----------------------------------------------------------------

    def add_gradient(self, reduced: Tensor) -> None:
        """Add a flat, reduced gradient of this rank's shard to the parameters' ``.grad``."""
        params = self.flat.params
        views = self.flat.local_views(reduced)
        if not all(self.used):
            self._hold_undecided(views)
        chosen = [(p, v) for p, v, used in zip(params, views, self.used, strict=True) if p.requires_grad and used]
        if all(p.grad is None for p, _ in chosen):
            for param, view in chosen:
                param.grad = view
        elif (total := self._flat_gradient(chosen)) is not None:
            total.add_(reduced)
        else:  # somebody has set or removed single gradients, or frozen parameters
            for param, view in chosen:
                _add(param, view.clone() if param.grad is None else view)

    def _hold_undecided(self, views: Sequence[Tensor]) -> None:
        before = self._undecided or [None] * len(views)
        self._undecided = [
            None if used or not param.requires_grad else view if held is None else held + view
            for param, view, held, used in zip(self.flat.params, views, before, self.used, strict=True)
        ]

    def _flat_gradient(self, chosen: Sequence[tuple[ShardedParameter, Tensor]]) -> Tensor | None:
        """The flat tensor of which the parameters' gradients are views, if they are; it is not kept elsewhere, so
        that its memory is free as soon as they are None."""
        first, first_view = chosen[0]
        assert first.grad is not None
        storage = first.grad.untyped_storage()
        shard = self.flat.shard
        if storage.nbytes() != shard.numel() * first.grad.element_size():
            return None
        pointer = storage.data_ptr()
        for param, view in chosen:
            grad = param.grad
            if (
                grad is None
                or grad.dtype != first_view.dtype
                or grad.storage_offset() != view.storage_offset()
                or grad.untyped_storage().data_ptr() != pointer
            ):
                return None
        return torch.empty(0, dtype=shard.dtype, device=shard.device).set_(storage, 0, (shard.numel(),))  # type: ignore[call-overload]

    def set_gradients_aside(self) -> tuple[Any, ...]:
        """Begin with no gradients; :meth:`restore_gradients` takes what this returns."""
        self.finish()
        params = self.flat.params
        aside = ([p.grad for p in params], self._accumulated, self._grads_then)
        for param in params:
            param.grad = None
        self._accumulated, self._grads_then = None, []
        return aside

    def restore_gradients(self, aside: tuple[Any, ...]) -> Tensor | None:
        """Have the gradients again that were set aside; returns the flat one of what has come since."""
        self.finish()
        params, shard = self.flat.params, self.flat.shard
        total: Tensor | None = None
        if any(p.grad is not None for p in params):
            total = torch.zeros_like(shard)
            for view, param in zip(self.flat.local_views(total), params, strict=True):
                if param.grad is not None:
                    view.copy_(param.grad)
        grads, self._accumulated, self._grads_then = aside
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return total

    def _add_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        """One rank, one dtype: what backward computed is the gradient."""
        self.used = [u or r for u, r in zip(self.used, self.take_reached(), strict=True)]
        params = self.flat.params
        if all(p.grad is None for p in params):
            total = torch.empty_like(self.flat.shard)
            self._copy_into(total, grads)
            for param, view, grad in zip(params, self.flat.local_views(total), grads, strict=True):
                if grad is not None and param.requires_grad:
                    param.grad = view
            return
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and param.requires_grad:
                _add(param, grad.clone() if param.grad is None else grad)

    # --- accumulation -----------------------------------------------------------------------------

    def _watch_gradients(self) -> None:
        """See to it that zeroing gradients can be noticed while some wait to be reduced."""
        params = self.flat.params
        if all(p.grad is None for p in params):
            for param, view in zip(params, self.flat.local_views(torch.zeros_like(self.flat.shard)), strict=True):
                if param.requires_grad:
                    param.grad = view
        self._grads_then = [(p.grad, p.grad._version) for p in params if p.grad is not None]

    def _forget_zeroed(self) -> None:
        """Where gradients were zeroed since, those that wait to be reduced are meant, too."""
        if self._accumulated is None:
            return
        present = {id(p.grad) for p in self.flat.params if p.grad is not None}
        gone = not any(id(grad) in present for grad, _ in self._grads_then)
        written = any(grad._version != version for grad, version in self._grads_then)
        if gone or (written and not any(bool(grad.any()) for grad, _ in self._grads_then)):
            self._accumulated = None

    def _is_flat(self, grad: Tensor | None) -> bool:
        """Whether a gradient is, as it stands, the flat gradient: that of the only parameter."""
        flat = self.flat
        return (
            len(flat.params) == 1
            and grad is not None
            and grad.is_contiguous()
            and grad.numel() == flat.layout.numel
            and grad.dtype == (self.reduce_dtype or flat.unsharded.dtype)
        )

    def _space(self, may_borrow: bool) -> Tensor:
        flat = self.flat
        dtype = self.reduce_dtype if flat.unsharded.is_floating_point() else None
        dtype = dtype or flat.unsharded.dtype
        space = flat.lend_storage(self.finish) if may_borrow and dtype == flat.unsharded.dtype else None
        return torch.empty(flat.layout.numel, dtype=dtype, device=flat.unsharded.device) if space is None else space

    def _copy_into(self, total: Tensor, grads: Sequence[Tensor | None]) -> None:
        for start, stop in self._gaps:  # what is reduced may be used as a whole
            total[start:stop].zero_()
        views = self.flat.unsharded_views(total)
        if all(g is not None for g in grads):
            torch._foreach_copy_(views, list(grads))  # type: ignore[arg-type]
            return
        for view, grad in zip(views, grads, strict=True):
            view.zero_() if grad is None else view.copy_(grad)


class _Reduction:
    """The sum of flat gradients over the ranks, in flight.

    ``total`` is held until the collective has read it; where it lies in the space of the unsharded parameters, that
    space is returned then. On CUDA everything is queued at once in the side stream.
    """

    def __init__(self, reducer: GradientReducer, total: Tensor) -> None:
        self.reducer = reducer
        self.total: Tensor | None = total  # read by the side stream until ``done``
        self.done: torch.cuda.Event | None = None
        flat = reducer.flat
        comm, later = flat.shard_comm, flat.stream is None
        flat.let_side_stream_wait()
        with on_stream(flat.stream):
            self.work: Work
            if comm.size == 1:
                self.reduced = total
                self.work = reducer.replicate_comm.all_reduce(total, async_op=later)
            else:
                self.reduced = torch.empty(flat.layout.shard_numel, dtype=total.dtype, device=total.device)
                self.work = comm.reduce_scatter(self.reduced, total, async_op=later)
            if not later:
                self._complete()
                self.done = record_event(flat.stream)
        if not later:
            flat.storage_returned()  # it belongs to the side stream, in whose queue its last reader is

    def finish(self) -> Tensor:
        """The reduced gradient of this rank's shard, usable by the compute stream."""
        flat = self.reducer.flat
        self.work.wait()
        if flat.stream is None:
            self._complete()
            flat.storage_returned()
        wait_event(flat.stream, self.done)
        self.total = None
        return self.reduced

    def _complete(self) -> None:
        reducer = self.reducer
        if reducer.flat.shard_comm.size > 1:
            reducer.replicate_comm.all_reduce(self.reduced)
        if reducer.grad_scale != 1.0:
            self.reduced.mul_(reducer.grad_scale)
        self.reduced = self.reduced.to(reducer.flat.shard.dtype)


class UseAgreement:
    """Lets the ranks tell each other which parameters they have used; see [Note: parameters without a gradient]."""

    def __init__(self) -> None:
        self._waiting: dict[GradientReducer, None] = {}

    def note(self, reducer: GradientReducer) -> None:
        """A reduction of ``reducer``'s was finished."""
        if reducer.is_undecided:
            self._waiting[reducer] = None
        else:
            reducer.take_reached()

    def settle(self, reducers: Iterable[GradientReducer] | None = None) -> None:
        """Decide for all that have waited, or those of ``reducers``: one all-reduce for each set of ranks."""
        chosen = self._waiting if reducers is None else dict.fromkeys(reducers)
        waiting = [reducer for reducer in self._waiting if reducer in chosen]
        self.forget(waiting)
        by_ranks: dict[tuple[Communicator, ...], list[GradientReducer]] = {}
        for reducer in waiting:
            by_ranks.setdefault(tuple(c for c in reducer.comms if c.size > 1), []).append(reducer)
        for comms, members in by_ranks.items():
            flags = [flag for reducer in members for flag in reducer.take_reached()]
            used = torch.tensor(flags, dtype=torch.uint8, device=members[0].flat.shard.device)
            for comm in comms:
                comm.all_reduce(used, "max")
            answers = iter(used.tolist())
            for reducer in members:
                reducer.decide([bool(next(answers)) for _ in reducer.flat.params])

    def forget(self, reducers: Iterable[GradientReducer]) -> None:
        for reducer in reducers:
            self._waiting.pop(reducer, None)


def _add(param: ShardedParameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)


def _gaps(layout: FlatLayout) -> list[tuple[int, int]]:
    """The ranges of a flat buffer that belong to no parameter."""
    gaps, cursor = [], 0
    for placement in sorted(layout.placements, key=lambda p: (p.offset, p.numel)):
        if placement.offset > cursor:
            gaps.append((cursor, placement.offset))
        cursor = max(cursor, placement.offset + placement.numel)
    if cursor < layout.numel:
        gaps.append((cursor, layout.numel))
    return gaps
