"""Gradients of a flat parameter: accumulation, the reduction over ranks, and the parameters' ``.grad``.

[Note: parameters without a gradient]
    A backward pass gives a gradient to the parameters that some rank has used in it, and to no others, as in one
    process. A rank knows only what it used itself. So ranks exchange at the end of a backward pass which parameters
    they used, for all parameters at once (:class:`UseAgreement`). A rank that has used all of them needs no answer and
    does not wait for it.

[Note: frozen parameters]
    Parameters are sorted into flat parameters by ``requires_grad`` once, when they are sharded. The layout never
    changes after that, because optimizers keep the shapes. A parameter that is frozen later counts as zeros in the
    reduction and gets no gradient.

[Note: sums in a fixed order]
    With ``init_distributed(deterministic=True)`` every backward pass is reduced, also under ``no_sync``. The reduced
    gradients of this rank's shard are added up in a tree (``bmt_comm.fixed_order``). The first backward pass outside of
    ``no_sync`` ends the sum and gives it to the parameters. If a group is reduced several times in each backward pass,
    each time has a tree of its own: all leaves of a tree are micro-batches, on any number of ranks. Sums are made in
    the dtype in which parameters are stored, over ranks as over micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_comm import TREE_SUM, Communicator, TreeSum, Work, current_context, named_range

from .flat_parameter import FlatParameter, on_stream, record_event, wait_event
from .gradient_target import Filled, GradientTarget
from .parameter_gradients import ParameterGradients
from .replica_check import check_replicas
from .sharded_gradient import ShardedGradient


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


@dataclass
class ReducedGradient:
    """A flat, reduced gradient of this rank's shard, and which parameters this rank has used for it."""

    total: Tensor
    used: list[bool]


class GradientReducer:
    """Sums the gradients of a flat parameter over the ranks.

    Args:
        flat: the flat parameter.
        grad_scale: factor of the summed gradients.
        has_fixed_order: see [Note: sums in a fixed order].
    """

    def __init__(self, flat: FlatParameter, grad_scale: float, has_fixed_order: bool = False) -> None:
        self.flat = flat
        self.grad_scale = grad_scale
        self.has_fixed_order = has_fixed_order
        self.settings = ReductionSettings(keeps_unsharded=flat.options.level <= 1)
        self.no_sync = False
        self._has_checked = False  # that tensor-parallel ranks find the same gradients
        self.pending: _Reduction | None = None
        self._copied: torch.cuda.Event | None = None  # after the copy of a gradient to the host, which has not waited
        self._accumulated: Tensor | None = None  # unreduced gradients under no_sync
        self.partial: Tensor | None = None  # summed over the shard group and not over the replicate group
        self.gradients = ParameterGradients(flat)
        self._used_here = [False] * len(flat.params)  # by this rank, since the ranks agreed last
        self.agrees = True  # the ranks know which parameters the reduced gradients are of
        self.undecided: list[Tensor | None] = []  # reduced gradients that wait for :meth:`decide`
        self._arrived: dict[GradientReducer, ReducedGradient] | None = None  # see :meth:`apart`
        self._trees: list[TreeSum] = []  # of the first, second, ... reductions of backward passes
        self._tree = 0  # which of them is next in this backward pass
        self._gaps = flat.layout.gaps
        self._written: tuple[Tensor | None, list[Tensor]] = (None, [])  # what one rank reduces
        self._targets: dict[GradientTarget, Tensor] = {}  # flat gradients that are being filled

    def new_target(self, accumulates: Any) -> GradientTarget:
        """For a call; ``accumulates`` is the node that runs only in backward passes whose gradients are reduced."""
        return GradientTarget(self.flat, self.open_target, self.close_target, accumulates)

    def open_target(self, target: GradientTarget) -> tuple[Tensor, bool]:
        """A flat gradient for a call's backward to fill, and whether to add to what it has."""
        with torch.no_grad():
            if self.pending is None:  # which is finished where all ranks do so
                self._drop_overwritten()
                if self._accumulated is not None:
                    return self._accumulated, True
            total = self._targets[target] = self._new_total(may_borrow=False)
            return total, False

    def close_target(self, target: GradientTarget) -> None:
        """The flat gradient of a target will not be reduced: the backward that has filled it has failed."""
        target.take()
        total = self._targets.pop(target, None)
        if total is not None:
            self.flat.shard_comm.discard(total)

    def writes(self, index: int) -> bool:
        """Whether a call's backward may compute the gradient of a parameter in a flat gradient."""
        scaled = self.grad_scale != 1.0 and self.flat.params[index].sequence_parallel
        return self._dtype == self.flat.dtype and self.flat.float8 is None and not scaled

    def reduce(self, grads: Sequence[Tensor | None], needed: bool, target: GradientTarget | None = None) -> None:
        """Start to sum gradients of the unsharded parameters over the ranks; gradient mode is off.

        Every rank must call this, even if its gradients are all None (they count as zeros).

        Args:
            grads: one for each parameter.
            needed: whether the unsharded parameters are still needed in this backward pass.
            target: where some of them lie already.
        """
        self.finish()
        self._drop_overwritten()
        filled = None
        if target is not None:
            self._targets.pop(target, None)
            filled = target.take()
        if filled is not None:
            grads = filled.with_given(grads)
        grads = self._prepared(grads)
        if not self._has_checked and self.grad_scale != 1.0:
            self._check_replicas(grads)
        if not all(self._used_here):
            self._used_here = [u or g is not None for u, g in zip(self._used_here, grads, strict=True)]
        accumulate = self._keeps_unreduced
        total, views = self._accumulated, []
        if total is not None:
            views = self._write(total, grads, True, filled)
            if filled is not None and filled.total is not total:
                self.flat.shard_comm.discard(filled.total)
        elif filled is not None:
            total = filled.total
            views = self._write(total, grads, False, filled)
        elif not accumulate and self._is_flat(grads[0]):
            assert grads[0] is not None
            total = grads[0].reshape(-1)
        else:
            total = self._new_total(may_borrow=not needed)
            views = self._write(total, grads, False)
        if not accumulate:
            self._accumulated = None
            self._written = (total, views) if self.flat.shard_comm.size == 1 else (None, [])
            self.pending = _Reduction(self, total)
        else:
            self._accumulated = total
            self._watch_gradients()

    def reduce_accumulated(self) -> None:
        """Reduce what was accumulated under ``no_sync`` if no backward will do so; all ranks must call it."""
        if self._accumulated is not None and not self.no_sync:
            self.reduce([None] * len(self.flat.params), needed=False)

    def follow_parameters(self) -> None:
        """Notice that the parameters were moved, by ``model.to(...)`` for example."""
        if self.flat.was_moved():
            self.finish()
            self.flat.rebind_storage()

    def finish(self) -> None:
        """Complete a started reduction, if there is one.

        After this the parameters' ``.grad`` include it, except those that wait for :meth:`decide`; see
        :meth:`_add_gradient`.
        """
        reduction, self.pending = self.pending, None
        if reduction is None:
            return
        reduced = reduction.finish()
        self._copied = reduction.copied or self._copied
        if self._copied is not None and self._reads_gradient:
            self.wait_for_copy()
        if reduction.is_partial:
            self._watch_gradients(of_others=True)
        elif self.has_fixed_order:
            self._add_to_tree(reduced)
        else:
            self._add_gradient(reduced)

    @property
    def _keeps_unreduced(self) -> bool:
        """Whether the gradients of the backward pass that is running are accumulated unreduced."""
        return self.no_sync and self.settings.keeps_unsharded and not self.has_fixed_order

    @property
    def _reads_gradient(self) -> bool:
        """Whether the host reads an offloaded gradient as soon as it arrives."""
        return (
            self.has_fixed_order or self._arrived is not None or bool(self.undecided) or self.gradients.are_read_at_once
        )

    def wait_for_copy(self) -> None:
        """The host waits for gradients that are being copied to it; see [Note: offloaded parameters] in
        flat_parameter."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    @property
    def accumulates(self) -> bool:
        """Whether parameters stay unsharded from one micro-batch to the next."""
        waits = self._accumulated is not None or bool(self._trees)
        return self.flat.options.level <= 1 and (self.no_sync or waits)

    def waiting(self) -> Iterator[Tensor]:
        """Gradients that are not in ``.grad``: not reduced yet, on the way, or waiting for the other ranks."""
        found = [self._accumulated, self.partial, *self.undecided]
        found += self._targets.values()
        if self.pending is not None:
            found += [self.pending.total, self.pending.reduced]
        for tree in self._trees:
            found += tree.partials
        return (tensor for tensor in found if tensor is not None)

    def drop(self) -> None:
        """Forget what an interrupted backward has left."""
        reduction, self.pending = self.pending, None
        if reduction is not None:
            reduction.finish()
        for target in list(self._targets):
            self.close_target(target)
        self._written = None, []
        self._accumulated = self.partial = None
        self._trees, self._tree = [], 0
        self.gradients.end_watch()
        self.gradients.remove_placeholders(range(len(self.flat.params)))
        self.drop_undecided()

    # --- sums in a fixed order --------------------------------------------------------------------

    def _add_to_tree(self, reduced: Tensor) -> None:
        """Add the reduced gradient of a backward pass to the others of the step."""
        if not self._trees:
            for param in self.flat.params:
                if isinstance(param.grad, ShardedGradient) and not param.grad.was_overwritten:
                    raise RuntimeError(
                        "deterministic=True adds up micro-batches in an order of its own, and there are gradients "
                        "already: run all backward passes of a step but the last one under no_sync(model), one for "
                        "each micro-batch, and zero the gradients between steps"
                    )
        self._watch_gradients(of_others=True)
        if self._tree == len(self._trees):
            self._trees.append(TreeSum())
        self._trees[self._tree].add(reduced)
        self._tree += 1

    def end_backward(self) -> None:
        """A backward pass has ended, and with it, outside of ``no_sync``, the sum over the micro-batches."""
        self._tree = 0
        if self._trees and not self.no_sync:
            total, *others = [tree.total() for tree in self._trees]
            for other in others:
                total += other
            self._trees = []
            self._add_gradient(total)

    # --- which parameters were used ---------------------------------------------------------------

    def take_used_here(self) -> list[bool]:
        """Which parameters this rank has used since the last call of this."""
        used, self._used_here, self.agrees = self._used_here, [False] * len(self.flat.params), True
        return used

    def drop_undecided(self) -> None:
        """Drop the gradients that wait for :meth:`decide`: what computed them has failed."""
        self.undecided = []
        self.take_used_here()

    def awaits_others(self, used_here: Sequence[bool]) -> bool:
        """Whether a gradient waits to know if other ranks have used the parameter."""
        return any(grad is not None and not used for grad, used in zip(self.undecided, used_here))

    def decide(self, used: Sequence[bool]) -> None:
        """Give parameters that some rank has used their gradients."""
        undecided, self.undecided = self.undecided, []
        self.gradients.remove_placeholders(index for index, used_now in enumerate(used) if not used_now)
        self.gradients.keep_placeholders()
        if undecided:
            self.gradients.add([grad if used_now else None for grad, used_now in zip(undecided, used, strict=True)])

    # --- the parameters' gradients ----------------------------------------------------------------

    def add_gradient(self, gradient: ReducedGradient) -> None:
        """Add what was reduced before."""
        self._used_here = [a or b for a, b in zip(self._used_here, gradient.used, strict=True)]
        self._add_gradient(gradient.total)

    def _add_gradient(self, reduced: Tensor) -> None:
        """Add a flat, reduced gradient of this rank's shard to the parameters' ``.grad``.

        Hooks of ``register_hook`` may communicate, and all ranks must call them in one order. So parameters with such
        hooks wait for the end of the backward pass, as do those that this rank has not used.
        """
        params = self.flat.params
        if self._arrived is not None:
            before = self._arrived.setdefault(self, ReducedGradient(reduced, self._used_here))
            before.used = [a or b for a, b in zip(before.used, self._used_here, strict=True)]
            if before.total is not reduced:
                before.total.add_(reduced)
            return
        self.gradients.end_watch()
        self.agrees = False
        written, there = self._written
        self._written = None, []
        views: Sequence[Tensor | None] = there if there and written is reduced else self.flat.local_views(reduced)
        now = [used and not p._backward_hooks for p, used in zip(params, self._used_here, strict=True)]
        if not all(now):
            waiting = self.undecided or [None] * len(views)
            for index, (param, view) in enumerate(zip(params, views, strict=True)):
                if param.requires_grad and not now[index]:
                    earlier = waiting[index]
                    waiting[index] = view if earlier is None or view is None else earlier + view
            self.undecided = waiting if any(each is not None for each in waiting) else []
            views = [view if at_once else None for view, at_once in zip(views, now, strict=True)]
        self.gradients.add(views)

    @contextmanager
    def apart(self, arrived: dict[GradientReducer, ReducedGradient]) -> Iterator[None]:
        """Within, flat, reduced gradients of this rank's shard are summed in ``arrived`` and not in ``.grad``.

        After an exception a reduction stays pending, for other ranks may not have come to it: ``StepContext.nested``.
        """
        self.finish()
        before, self._accumulated, self._arrived = self._accumulated, None, arrived
        used, self._used_here = self._used_here, [False] * len(self.flat.params)
        try:
            yield
            self.finish()
        finally:
            self._accumulated, self._arrived, self._used_here = before, None, used

    # --- accumulation -----------------------------------------------------------------------------

    def _watch_gradients(self, of_others: bool = False) -> None:
        """Gradients wait to be added to those of the parameters: notice if a script drops them."""
        if self._arrived is None:
            self.gradients.watch(self._used_here, of_others)

    def _drop_overwritten(self) -> None:
        """Drop what waits for parameters whose gradients were overwritten, removed or replaced.

        Zeros take its place: a rank that has used nothing, and has no gradients to notice it by, goes on to reduce.
        """
        dropped = [] if self._arrived is not None else self.gradients.take_dropped()
        if not dropped:
            return
        if not self.gradients.are_watched:
            self.partial, self._trees = None, []
        sharded = [] if self.partial is None else [self.partial]
        sharded += [partial for tree in self._trees for partial in tree.partials]
        views = [] if self._accumulated is None else [self.flat.unsharded_views(self._accumulated)]
        for rows in (*views, *map(self.flat.local_views, sharded)):
            torch._foreach_zero_([rows[index] for index in dropped])
        for index in dropped:
            self._used_here[index] = False

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed."""
        computed = self.flat.dtype
        reduce_dtype = self.flat.options.precision.reduce_dtype
        return (reduce_dtype if computed.is_floating_point else None) or computed

    def _check_replicas(self, grads: Sequence[Tensor | None]) -> None:
        self._has_checked = True
        pairs = [(p, g) for p, g in zip(self.flat.params, grads, strict=True) if not p.sequence_parallel]
        if pairs:
            shapes = [param.bmt_slice.shape for param, _ in pairs]
            check_replicas(shapes, [grad for _, grad in pairs], current_context().tp, self.flat.communicators)

    def _prepared(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Dense gradients, which the reduction multiplies by ``grad_scale``."""
        dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        if self.grad_scale != 1.0:
            # The sum over tensor-parallel ranks is the gradient; see [Note: tensor-parallel ranks] in shard.
            for index, (param, grad) in enumerate(zip(self.flat.params, dense, strict=True)):
                if grad is not None and param.sequence_parallel:
                    dense[index] = grad / self.grad_scale
        return dense

    def _is_flat(self, grad: Tensor | None) -> bool:
        """Whether the gradient of the only parameter can be reduced as it is."""
        flat = self.flat
        return (
            len(flat.params) == 1
            and flat.shard_comm.size > 1
            and not flat.shard_comm.shares_memory  # of which all ranks read flat gradients where they lie, or none
            and grad is not None
            and grad.is_contiguous()
            and grad.numel() == flat.layout.numel
            and grad.dtype == self._dtype
            and self.divisor_before == 1.0
        )

    @property
    def divisor_before(self) -> float:
        """What gradients are divided by before they are summed: in half precision the sum could overflow."""
        divisor = self.settings.divisor
        halves = self._dtype == torch.float16 and divisor > 1 and not self.has_fixed_order
        return 2.0 ** math.ceil(math.log2(divisor) / 2) if halves else 1.0

    def _new_total(self, may_borrow: bool) -> Tensor:
        """A flat gradient: where other ranks can read it, if it is to be reduced at once."""
        flat, dtype, is_kept = self.flat, self._dtype, self._keeps_unreduced
        is_sent = not is_kept and flat.options.precision.packs_gradients is None
        if is_sent and flat.shard_comm.shares_memory:
            return flat.shard_comm.empty(flat.layout.numel, dtype)
        borrows = may_borrow and not is_kept and dtype == flat.unsharded.dtype
        borrowed = flat.lend_storage(self.finish) if borrows else None
        if borrowed is not None:
            return borrowed
        return torch.empty(flat.layout.numel, dtype=dtype, device=flat.unsharded.device)

    def _write(
        self, total: Tensor, grads: Sequence[Tensor | None], add: bool, filled: Filled | None = None
    ) -> list[Tensor]:
        """Write gradients into a flat one, or add them to it, but for those that lie there already (``filled``).

        Returns the views of it.
        """
        if filled is not None and filled.total is total:
            views, there = filled.views, filled.written
        else:
            views, there = self.flat.unsharded_views(total), set()
        if not add:  # optimizers and norms may read the flat gradient as a whole
            for start, stop in self._gaps:
                total[start:stop].zero_()
            absent = [views[i] for i, grad in enumerate(grads) if grad is None]
            if absent:
                torch._foreach_zero_(absent)
        present = [i for i, grad in enumerate(grads) if grad is not None and i not in there]
        if present:
            write: Any = torch._foreach_add_ if add else torch._foreach_copy_
            write([views[i] for i in present], [grads[i] for i in present])
        return views


class _Reduction:
    """The sum of flat gradients over the ranks, in flight.

    ``total`` is held until the collective has read it. If it lies in borrowed storage of the unsharded parameters, the
    storage is returned then. On CUDA everything is queued at once in the side stream.
    """

    def __init__(self, reducer: GradientReducer, total: Tensor) -> None:
        self.reducer = reducer
        self.total: Tensor | None = total  # read by the side stream until ``done``
        self.done: torch.cuda.Event | None = None
        self.copied: torch.cuda.Event | None = None  # to the host
        all_reduces = reducer.settings.all_reduces or reducer.has_fixed_order
        self.is_partial = not all_reduces and reducer.flat.replicate_comm.size > 1
        self.divisor_before = reducer.divisor_before
        flat = reducer.flat
        comm, on_cpu = flat.shard_comm, flat.stream is None
        op = TREE_SUM if reducer.has_fixed_order else "sum"
        flat.let_side_stream_wait()
        with named_range("reduce", flat.label), on_stream(flat.stream):
            if reducer.has_fixed_order and comm.size == 1:
                total = total.to(flat.shard.dtype)
            self.work: Work | None = None
            self.reduced = total
            if self.divisor_before != 1.0:
                total.div_(self.divisor_before)
            compression = flat.options.precision.packs_gradients
            if comm.size > 1 and compression is not None:
                self.reduced = torch.empty(flat.layout.shard_numel, dtype=torch.float32, device=total.device)
                self.work = compression.reduce_scatter(comm, self.reduced, total, on_cpu, flat.label)
            elif comm.size > 1:
                dtype = flat.shard.dtype if reducer.has_fixed_order else total.dtype
                self.reduced = torch.empty(flat.layout.shard_numel, dtype=dtype, device=total.device)
                self.work = comm.reduce_scatter(self.reduced, total, op, on_cpu, flat.label)
            elif flat.replicate_comm.size > 1 and not self.is_partial:
                self._add_partial()
                self.work = flat.replicate_comm.all_reduce(total, op, on_cpu, flat.label)
            if not on_cpu:
                self._complete()
                if comm.size == 1:  # what is copied is ``total``
                    self._offload()
                self.done = record_event(flat.stream)
                if comm.size > 1:
                    self._offload()
        if not on_cpu:
            flat.storage_returned()  # the side stream releases it after its last reader

    def finish(self) -> Tensor:
        """The reduced gradient of this rank's shard, usable by the compute stream."""
        flat = self.reducer.flat
        if self.work is not None:
            with named_range("wait for reduce", flat.label):
                self.work.wait()
        if flat.stream is None:
            self._complete()
            self._offload()
            flat.storage_returned()
        wait_event(flat.stream, self.done)
        self.total = None
        return self.reduced

    def _complete(self) -> None:
        reducer, settings = self.reducer, self.reducer.settings
        is_sharded = reducer.flat.shard_comm.size > 1
        if is_sharded or self.is_partial:
            self._add_partial()
        if self.is_partial:
            reducer.partial = self.reduced if is_sharded else self.reduced.clone()  # its storage may be borrowed
            return
        if is_sharded and reducer.flat.replicate_comm.size > 1:
            op = TREE_SUM if reducer.has_fixed_order else "sum"
            reducer.flat.replicate_comm.all_reduce(self.reduced, op, label=reducer.flat.label)
        scale = reducer.grad_scale * self.divisor_before / settings.divisor
        if scale != 1.0:
            self.reduced.mul_(scale)
        if settings.hook is not None:
            settings.hook(self.reduced)
        self.reduced = self.reduced.to(reducer.flat.shard.dtype)

    def _offload(self) -> None:
        """Copy the reduced gradient to where the shard is."""
        flat = self.reducer.flat
        if flat.offloads and not self.is_partial:
            stored = flat.options.new_storage(flat.layout.shard_numel, self.reduced.dtype, flat.device)
            stored.copy_(self.reduced, non_blocking=True)
            self.reduced = stored
            self.copied = record_event(flat.stream)

    def _add_partial(self) -> None:
        partial, self.reducer.partial = self.reducer.partial, None
        if partial is not None:
            self.reduced.add_(partial)


class UseAgreement:
    """Lets the ranks agree on which parameters they have used; see [Note: parameters without a gradient]."""

    def __init__(self) -> None:
        self._waiting: dict[GradientReducer, None] = {}

    def note(self, reducer: GradientReducer) -> None:
        """``reducer`` may have added a reduced gradient."""
        if not reducer.agrees:
            self._waiting[reducer] = None

    def settle(self, reducers: Iterable[GradientReducer] | None = None) -> None:
        """Decide for all that wait, or those of ``reducers``: one all-reduce for each set of ranks."""
        chosen = self._waiting if reducers is None else dict.fromkeys(reducers)
        waiting = [reducer for reducer in self._waiting if reducer in chosen]
        self.forget(waiting)
        by_ranks: dict[tuple[Communicator, ...], list[GradientReducer]] = {}
        for reducer in waiting:
            by_ranks.setdefault(reducer.flat.communicators, []).append(reducer)
        answers: dict[GradientReducer, list[bool]] = {}
        for communicators, members in by_ranks.items():
            flags = {reducer: reducer.take_used_here() for reducer in members}
            if communicators:
                used = _on_device([flag for each in flags.values() for flag in each], members[0].flat.device)
                for comm in communicators:
                    comm.all_reduce(used, "max", label="the parameters that ranks have used")
                # Where nothing is unknown, the host does not wait for the device.
                if not used.is_meta and any(reducer.awaits_others(flags[reducer]) for reducer in members):
                    told = iter(used.tolist())
                    flags = {reducer: [bool(next(told)) for _ in each] for reducer, each in flags.items()}
            answers.update(flags)
        for reducer, decided in answers.items():  # after all communication: hooks of parameters may raise
            reducer.decide(decided)

    def drop(self) -> None:
        """Drop the gradients that wait: what computed them has failed."""
        for reducer in self._waiting:
            reducer.drop_undecided()
        self._waiting.clear()

    def forget(self, reducers: Iterable[GradientReducer]) -> None:
        for reducer in reducers:
            self._waiting.pop(reducer, None)


def _on_device(flags: Sequence[bool], device: torch.device) -> Tensor:
    """``flags`` as numbers (uint8) on a device, without waiting for it."""
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    on_host = torch.tensor(flags, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
