"""Gradients of a flat parameter: accumulation, the reduction over ranks, and the parameters' ``.grad``.

[Note: parameters without a gradient]
    A backward pass gives gradients only to the parameters that some rank has used in it, as in one process. A rank
    knows only which parameters it used itself. So at the end of a backward pass ranks exchange which parameters they
    used, for all parameters at once (``use_agreement``). A rank that has used all of them does not wait for the answer.

[Note: frozen parameters]
    Parameters are sorted into flat parameters by ``requires_grad`` once, when they are sharded. The layout never
    changes after that, because optimizers keep the shapes. A parameter that is frozen later counts as zeros in the
    reduction and gets no gradient.

[Note: sums in a fixed order]
    With ``init_distributed(deterministic=True)`` every backward pass is reduced, also under ``no_sync``. The reduced
    gradients of this rank's shard are added up in a tree (``bmt_comm.fixed_order``). The first backward pass outside of
    ``no_sync`` ends the sum and adds it to ``.grad``. If a group is reduced several times in each backward pass, each
    of these reductions has its own tree, so that all leaves of a tree are micro-batches, on any number of ranks. Sums
    over ranks and over micro-batches are computed in the dtype in which parameters are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bmt_comm import ShardedGradient, TreeSum, current_context

from .flat_gradient import is_flat_gradient, new_flat_gradient, write_gradients
from .flat_parameter import FlatParameter
from .gradient_target import GradientTarget, GradientTargets
from .parameter_gradients import ParameterGradients
from .reduction import Reduction, ReductionSettings
from .replica_check import check_replicas


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
        self._unchecked: list[int] | None = None  # for :meth:`_check_replicas`; None: before the first reduction
        self._passes = 0  # reductions since the first one
        self.pending: Reduction | None = None
        self._has_earlier = False  # ``pending`` includes gradients of earlier backward passes
        self._copied: torch.cuda.Event | None = None  # after a copy to the host that the host has not waited for
        self._accumulated: Tensor | None = None  # unreduced gradients under no_sync
        self._partial: Tensor | None = None  # summed over the shard group and not over the replicate group
        self.gradients = ParameterGradients(flat)
        self._used_here = [False] * len(flat.params)  # by this rank, since the ranks agreed last
        self.agrees = True  # no reduced gradients since the ranks agreed last
        self.has_calls_left = False  # other calls may have gradients for the same parameters in this backward pass
        self.undecided: list[Tensor | None] = []  # reduced gradients that wait for :meth:`decide`
        self._arrived: dict[GradientReducer, ReducedGradient] | None = None  # see :meth:`apart`
        self._waited: set[int] = set()  # parameters that were trainable when gradients began to wait
        self._trees: list[TreeSum] = []  # of the first, second, ... reductions of backward passes
        self._tree = 0  # which of them is next in this backward pass
        self._written: tuple[Tensor | None, list[Tensor]] = (None, [])  # total and views, for a shard group of one rank
        self.targets = GradientTargets(flat, self._accumulated_before, self._new_total)

    def writes(self, index: int) -> bool:
        """Whether a call's backward may compute the gradient of parameter ``index`` in a flat gradient."""
        scaled = self.grad_scale != 1.0 and self.flat.params[index].sequence_parallel
        return self._dtype == self.flat.dtype and self.flat.float8 is None and not scaled

    def reduce(self, grads: Sequence[Tensor | None], needed: bool, target: GradientTarget | None = None) -> None:
        """Start to sum gradients of the unsharded parameters over the ranks. Gradient mode must be off.

        Every rank must call this, even if its gradients are all None (they count as zeros).

        Args:
            grads: one for each parameter.
            needed: whether the unsharded parameters are still needed in this backward pass.
            target: the flat gradient that has some of them already; or None.
        """
        self.finish()
        self._drop_overwritten()
        filled = None if target is None else self.targets.take(target)
        if filled is not None:
            grads = filled.with_given(grads)
        grads = self._prepared(grads)
        if self.grad_scale != 1.0 and self._unchecked != []:
            self._check_replicas(grads)
        if not all(self._used_here):
            self._used_here = [u or g is not None for u, g in zip(self._used_here, grads, strict=True)]
        accumulate = self._keeps_unreduced
        total, views = self._accumulated, []
        if total is not None:
            views = write_gradients(grads, self.flat, total, True, filled)
            if filled is not None and filled.total is not total:
                self.flat.shard_comm.discard(filled.total)
        elif filled is not None:
            total = filled.total
            views = write_gradients(grads, self.flat, total, False, filled)
        elif not accumulate and self._is_flat(grads[0]):
            assert grads[0] is not None
            total = grads[0].reshape(-1)
        else:
            total = self._new_total(None if needed else self.finish)
            views = write_gradients(grads, self.flat, total, False)
        if not accumulate:
            self._has_earlier = self._accumulated is not None or self._partial is not None
            self._accumulated = None
            for index in self.targets.take_accumulated():
                self._used_here[index] = True
            self._written = (total, views) if self.flat.shard_comm.size == 1 else (None, [])
            partial, self._partial = self._partial, None
            self.pending = Reduction(self.flat, total, self.settings, self.grad_scale, self.has_fixed_order, partial)
        else:
            self._accumulated = total
            self._watch_gradients()

    @property
    def defers(self) -> bool:
        """Whether gradients may wait for a later backward pass to be reduced."""
        return self.no_sync or not self.settings.all_reduces

    @property
    def has_deferred(self) -> bool:
        """Whether gradients of earlier backward passes wait, and the next one is to reduce them."""
        is_partial = self._partial is not None and self.settings.all_reduces
        return not self.no_sync and (self._accumulated is not None or is_partial)

    def reduce_accumulated(self) -> None:
        """Reduce gradients of earlier backward passes, if no backward will; all ranks must call it."""
        if self.has_deferred:
            self.reduce([None] * len(self.flat.params), needed=True)  # a script may have unsharded the parameters

    def rebind_storage(self) -> None:
        """Move the shard if the parameters were moved, by ``model.to(...)`` for example."""
        if self.flat.was_moved():
            self.finish()
            self.flat.rebind_storage()

    def finish(self) -> None:
        """Complete the pending reduction, if there is one, and add it to the parameters' ``.grad``.

        Some parameters wait for :meth:`decide`; see :meth:`_add_gradient`.
        """
        reduction, self.pending = self.pending, None
        if reduction is None:
            return
        reduced = reduction.finish()
        self._copied = reduction.copied or self._copied
        if self._copied is not None and self._reads_gradient:
            self.wait_for_copy()
        if reduction.is_partial:
            self._partial = reduced
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
        """Whether the host reads an offloaded gradient immediately."""
        return (
            self.has_fixed_order or self._arrived is not None or bool(self.undecided) or self.gradients.are_read_at_once
        )

    def wait_for_copy(self) -> None:
        """Let the host wait for gradients that are being copied to it.

        See [Note: offloaded parameters] in flat_parameter.
        """
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    @property
    def accumulates(self) -> bool:
        """Whether parameters stay unsharded from one micro-batch to the next."""
        return self.flat.options.level <= 1 and (self._accumulated is not None or bool(self._trees))

    def waiting(self) -> Iterator[Tensor]:
        """Gradients that are not in ``.grad``: not reduced yet, in flight, or waiting for the other ranks."""
        tensors = [self._accumulated, self._partial, *self.undecided, *self.targets.totals]
        if self.pending is not None:
            tensors += self.pending.held
        for tree in self._trees:
            tensors += tree.partials
        return (tensor for tensor in tensors if tensor is not None)

    def drop_pass(self) -> None:
        """Forget what an interrupted backward has left.

        Gradients of earlier backward passes keep waiting. As in plain PyTorch, they include what the interrupted one
        has added to them.
        """
        if self.pending is not None and self._has_earlier:
            self.finish()
            self.decide(self._used_here)  # other ranks may not have failed, so there is no agreement with them
        elif self.pending is not None:
            self.pending.finish()
        self.pending = None
        self.targets.drop()
        self._written, self._tree = (None, []), 0
        self.drop_undecided()

    def drop(self) -> None:
        """Forget what an interrupted backward has left, and all waiting gradients."""
        self._accumulated = self._partial = None
        self._trees, self._has_earlier = [], False
        self.drop_pass()

    @property
    def _has_waiting(self) -> bool:
        """Whether gradients of earlier backward passes wait to be added."""
        return self._accumulated is not None or self._partial is not None or bool(self._trees)

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
        """End a backward pass, and outside of ``no_sync`` the sum over the micro-batches."""
        self._tree = 0
        if self._trees and not self.no_sync:
            total, *others = [tree.total() for tree in self._trees]
            for other in others:
                total += other
            self._trees = []
            self._add_gradient(total)

    # --- which parameters were used ---------------------------------------------------------------

    def take_used_here(self) -> list[bool]:
        """Which parameters this rank has used since the last call of this method."""
        used, self._used_here, self.agrees = self._used_here, [False] * len(self.flat.params), True
        self.has_calls_left = False
        return used

    def drop_undecided(self) -> None:
        """Drop the gradients that wait for :meth:`decide`: the backward that computed them has failed."""
        self.undecided = []
        if not self._has_waiting:
            self.take_used_here()
            self._waited = set()
            self.gradients.end_watch()
            self.gradients.remove_placeholders(range(len(self.flat.params)))

    def awaits_others(self, used_here: Sequence[bool]) -> bool:
        """Whether a gradient waits to learn if other ranks have used its parameter."""
        return any(grad is not None and not used for grad, used in zip(self.undecided, used_here))

    def decide(self, used: Sequence[bool]) -> None:
        """Add the waiting gradients of parameters that some rank has ``used``, and drop the others."""
        undecided, self.undecided = self.undecided, []
        self.gradients.remove_placeholders(index for index, used_now in enumerate(used) if not used_now)
        self.gradients.keep_placeholders()
        if undecided:
            self.gradients.add([grad if used_now else None for grad, used_now in zip(undecided, used, strict=True)])

    # --- the parameters' gradients ----------------------------------------------------------------

    def add_gradient(self, gradient: ReducedGradient) -> None:
        """Add a gradient that was reduced before."""
        self._used_here = [a or b for a, b in zip(self._used_here, gradient.used, strict=True)]
        self._add_gradient(gradient.total)

    def _add_gradient(self, reduced: Tensor) -> None:
        """Add a flat, reduced gradient of this rank's shard to the parameters' ``.grad``.

        These parameters wait for the end of the backward pass:

        - those with hooks of ``register_hook``: hooks may communicate, so all ranks must call them in one order;
        - those that this rank has not used;
        - those with hooks for accumulated gradients, if other calls may have gradients for them.
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
        waited, self._waited = self._waited, set()
        total, total_views = self._written
        self._written = None, []
        views: Sequence[Tensor | None]
        views = total_views if total_views and total is reduced else self.flat.local_views(reduced)
        now = [
            used and not p._backward_hooks and not (self.has_calls_left and p._post_accumulate_grad_hooks)
            for p, used in zip(params, self._used_here, strict=True)
        ]
        if not all(now):
            waiting = self.undecided or [None] * len(views)
            for index, (param, view) in enumerate(zip(params, views, strict=True)):
                if (param.requires_grad or index in waited) and not now[index]:
                    earlier = waiting[index]
                    waiting[index] = view if earlier is None or view is None else earlier + view
            self.undecided = waiting if any(each is not None for each in waiting) else []
            views = [view if at_once else None for view, at_once in zip(views, now, strict=True)]
        if not all(param.requires_grad for param in params):  # frozen since the forward
            trains = [param.requires_grad or index in waited for index, param in enumerate(params)]
            views = [view if trained else None for view, trained in zip(views, trains, strict=True)]
        self.gradients.add(views)

    @contextmanager
    def apart(self, arrived: dict[GradientReducer, ReducedGradient]) -> Iterator[None]:
        """Within, flat, reduced gradients of this rank's shard are summed in ``arrived`` and not in ``.grad``.

        After an exception a reduction stays pending, because other ranks may not take part in it; see
        ``StepContext.nested``.
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
        """Notice if a script drops gradients that wait to be added to ``.grad``."""
        if not self._waited:
            self._waited = {index for index, param in enumerate(self.flat.params) if param.requires_grad}
        if self._arrived is None:
            self.gradients.watch(self._used_here, of_others)

    def _drop_overwritten(self) -> None:
        """Drop the gradients that wait for parameters whose ``.grad`` was overwritten, removed or replaced.

        They become zeros and are still reduced: a rank that has used nothing has no ``.grad`` to notice the drop by,
        and reduces, too.
        """
        dropped = [] if self._arrived is not None else self.gradients.take_dropped()
        if not dropped:
            return
        if not self.gradients.are_watched:
            self._partial, self._trees = None, []
        sharded = [] if self._partial is None else [self._partial]
        sharded += [partial for tree in self._trees for partial in tree.partials]
        views = [] if self._accumulated is None else [self.flat.unsharded_views(self._accumulated)]
        for rows in (*views, *map(self.flat.local_views, sharded)):
            torch._foreach_zero_([rows[index] for index in dropped])
        for index in dropped:  # zeros that the script has written are a gradient, which all ranks must have
            self._used_here[index] = self.flat.params[index].grad is not None

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed."""
        computed = self.flat.dtype
        reduce_dtype = self.flat.options.precision.reduce_dtype
        return (reduce_dtype if computed.is_floating_point else None) or computed

    def _check_replicas(self, grads: Sequence[Tensor | None]) -> None:
        """Compare gradients of tensor-parallel ranks in reductions number 1, 2, 4, 8, ... until each has had values.

        The first gradients may be zeros: those before a layer whose weights are zeros at first, as in some adapters.
        """
        params = self.flat.params
        indices = [index for index, param in enumerate(params) if not param.sequence_parallel]
        if self._unchecked is None:
            self._unchecked = indices
        self._passes += 1
        if self._passes & (self._passes - 1) == 0 and self._unchecked:
            shapes = [params[index].bmt_slice.shape for index in indices]
            compared = [grads[index] for index in indices]
            had_values = check_replicas(shapes, compared, current_context().tp, self.flat.communicators)
            checked = {index for index, had in zip(indices, had_values, strict=True) if had}
            self._unchecked = [index for index in self._unchecked if index not in checked]

    def _prepared(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Dense gradients, scaled for a reduction that multiplies by ``grad_scale``."""
        dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        if self.grad_scale != 1.0:
            # Of these, the gradient is the sum over tensor-parallel ranks; see [Note: tensor-parallel ranks] in shard.
            for index, (param, grad) in enumerate(zip(self.flat.params, dense, strict=True)):
                if grad is not None and param.sequence_parallel:
                    dense[index] = grad / self.grad_scale
        return dense

    def _is_flat(self, grad: Tensor | None) -> bool:
        divides = self.settings.divisor_before(self._dtype) != 1.0 and not self.has_fixed_order
        return not divides and is_flat_gradient(grad, self.flat, self._dtype)

    def _accumulated_before(self) -> Tensor | None:
        """The flat gradient to which a backward pass adds, or None."""
        if self.pending is not None:  # ranks must finish it together, and this may run on one of them
            return None
        self._drop_overwritten()
        return self._accumulated

    def _new_total(self, give_back: Callable[[], object] | None = None) -> Tensor:
        return new_flat_gradient(self.flat, self._dtype, self._keeps_unreduced, give_back)
