"""A unit: parameters that are gathered, freed and reduced together, and when that happens.

[Note: how a unit meets autograd]
    The full parameters enter a computation as the outputs of one autograd node (:class:`_Enter`) per call.
    Autograd calls that node's backward when, and only when, every gradient of the parameters has arrived,
    however often they were used: that is the moment when the call has no further use for them, and the
    moment to reduce. Frozen parameters get no gradient; where a unit has some, the inputs of the call pass
    through the same node, so that it waits for their gradients as well.

    A hook on the call's outputs gathers the parameters again when backward arrives. Calls of one unit that
    are in backward at the same time are counted, and the last one frees.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from bmt_comm import Communicator, ParallelContext, check_agreement

from .backward import BackwardTracker, in_backward, tracker_of
from .bucket import Bucket
from .layout import FlatLayout, Placement, plan_layouts
from .parameter import DistributedParameter
from .precision import MixedPrecision


class Call:
    """One use of a unit's full parameters in a computation that may be differentiated."""

    __slots__ = ("unit", "views")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.views: Sequence[Tensor] = ()

    def pre_backward(self, _grad: Tensor) -> None:
        """The first gradient of the call's outputs has arrived."""
        self.unit.pre_backward(self)


class _Enter(torch.autograd.Function):
    """(inputs) → (the same inputs, the trainable full parameters); see [Note: how a unit meets autograd]."""

    @staticmethod
    def forward(ctx: Any, call: Call, _anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_inputs = call, len(inputs)
        return (*inputs, *call.unit.trainable_views())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.unit.post_backward(ctx.call, grads[ctx.num_inputs :])
        return (None, None, *grads[: ctx.num_inputs])


class _GatherOne(torch.autograd.Function):
    """A parameter, whole, in storage of its own that lives as long as somebody uses it."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, param: DistributedParameter) -> Tensor:
        ctx.param = param
        return param.bucket.gather_fresh(param.bucket_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.param.unit.reduce_parameter(ctx.param, grad)
        return None, None


class Unit:
    """Parameters that are gathered, freed and reduced together.

    Args:
        name: for messages.
        buckets: of the parameters; frozen and trainable ones are in buckets of their own.
        context: where it runs.
        slots: where modules have the parameters.
    """

    def __init__(
        self, name: str, buckets: Sequence[Bucket], context: ParallelContext, slots: Sequence[Slot] = ()
    ) -> None:
        self.name = name
        self.buckets = list(buckets)
        self.context = context
        self.slots = list(slots)
        self.trainable = [b for b in self.buckets if b.requires_grad]
        self.has_frozen = len(self.trainable) < len(self.buckets)
        self.params = [p for b in self.buckets for p in b.params]
        self.tracker: BackwardTracker = tracker_of(context)
        self.chain: list[Unit] = [self]  # units in the order of forward, for prefetching
        self.position = 0
        self.installed = False
        self._anchor = torch.zeros((), requires_grad=True)
        self._in_backward: set[Call] = set()
        self._cached: tuple[int, TensorWeakRef] | None = None
        self._agreed = False
        self._recurrent = {s.module: None for s in self.slots if isinstance(s.module, nn.RNNBase)}
        for param in self.params:
            param.unit = self

    @property
    def level(self) -> int:
        return max((b.level for b in self.buckets), default=0)

    @property
    def begins_backward(self) -> bool:
        """Whether backward is likely to begin with this unit: the last one of several."""
        return 0 < self.position == len(self.chain) - 1

    @property
    def previous(self) -> Unit | None:
        return self.chain[self.position - 1] if self.position > 0 else None

    @property
    def next(self) -> Unit | None:
        return self.chain[self.position + 1] if self.position + 1 < len(self.chain) else None

    # --- gathering --------------------------------------------------------------------------------

    def start_gather(self, prefetch: bool = False) -> None:
        """Start to gather what is not at hand."""
        self.check_agreement()
        for bucket in self.buckets:
            bucket.follow_params()
            bucket.start_gather(prefetch)

    def gather(self) -> None:
        """Gather what is not at hand, for the computation that comes next."""
        self.start_gather()
        for bucket in self.buckets:
            bucket.finish_gather()

    def free(self) -> None:
        """Free the full parameters, unless a call in backward needs them or a reduction uses their space."""
        if not self._in_backward:
            for bucket in self.buckets:
                if not bucket.reducing_in_full:
                    bucket.free()

    def check_agreement(self) -> None:
        """Once, before the first collective: the ranks hold parts of the same thing."""
        if self._agreed:
            return
        self._agreed = True
        comms: list[Communicator] = []
        for bucket in self.buckets:
            comms += [c for c in (bucket.shard_comm, bucket.replicate_comm) if c.size > 1 and c not in comms]
        for comm in comms:
            facts = [f"{p.bmt_slice.shape} {p.dtype} requires_grad={p.requires_grad}" for p in self.params]
            check_agreement(comm, f"the parameters of {self.name}", facts)

    # --- forward ----------------------------------------------------------------------------------

    def trainable_views(self) -> list[Tensor]:
        return [view for bucket in self.trainable for view in bucket.full_views()]

    def enter(self, inputs: Sequence[Tensor]) -> tuple[Call | None, Sequence[Tensor], list[Tensor]]:
        """Bring the gathered parameters into the computation.

        Returns the call (None where nothing will be differentiated), the inputs to use in place of
        ``inputs``, and the full parameters in the order of ``params``.
        """
        if not torch.is_grad_enabled() or not (self.trainable or inputs):
            return None, inputs, [view for bucket in self.buckets for view in bucket.full_views()]
        call = Call(self)
        outputs = _Enter.apply(call, self._anchor, *inputs)
        inputs, entered = outputs[: len(inputs)], iter(outputs[len(inputs) :])
        views = []
        for bucket in self.buckets:
            for view in bucket.full_views() if not bucket.requires_grad else bucket.params:
                views.append(next(entered) if bucket.requires_grad else view)
        call.views = views
        return call, inputs, views

    def install(self, views: Sequence[Tensor]) -> None:
        """Let the modules see full parameters.

        An entry in a module's ``__dict__`` comes before its registered parameters, which stay the shards.
        """
        self.installed = True
        for slot in self.slots:
            slot.module.__dict__[slot.name] = views[slot.index]
        for module in self._recurrent:
            _refresh_flat_weights(module)

    def uninstall(self) -> None:
        """Let the modules see the shards again."""
        if not self.installed:
            return
        self.installed = False
        for slot in self.slots:
            slot.module.__dict__.pop(slot.name, None)
        for module in self._recurrent:
            _refresh_flat_weights(module)

    # --- backward ---------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """Make the full parameters ready for ``call``'s backward, and start on those of the unit before."""
        if call in self._in_backward:
            return
        self._in_backward.add(call)
        self.tracker.enter(self)
        self.gather()
        self.install(call.views)
        previous = self.previous
        if previous is not None and previous.level == 3:
            self.tracker.enter(previous)
            previous.start_gather(prefetch=True)

    def post_backward(self, call: Call, grads: Sequence[Tensor | None]) -> None:
        """``call`` is through with its backward: reduce its gradients and free the full parameters."""
        self._in_backward.discard(call)
        self.uninstall()
        self._reduce(self.trainable, grads)
        if not any(b.no_sync and b.level <= 1 for b in self.buckets):  # there, they stay until the step
            self.free()

    def _reduce(self, buckets: Sequence[Bucket], grads: Sequence[Tensor | None]) -> None:
        self.tracker.enter(self)
        self.tracker.finish_reductions()
        start = 0
        for bucket in buckets:
            stop = start + len(bucket.params)
            bucket.reduce(grads[start:stop], done=not self._in_backward)
            start = stop
        self.tracker.note_reducing(self)

    def finish_reduce(self) -> None:
        for bucket in self.trainable:
            bucket.finish_reduce()

    def end_backward(self) -> None:
        """Backward is over: whatever it has left behind is cleared."""
        self.finish_reduce()
        if self._in_backward:
            self._in_backward.clear()
            self.uninstall()
        self._cached = None
        if not any(b.no_sync and b.level <= 1 for b in self.buckets):
            self.free()

    def abandon_backward(self) -> None:
        """Backward was ended by an exception."""
        self._in_backward.clear()
        self.uninstall()
        self._cached = None
        for bucket in self.buckets:
            bucket.forget_backward()

    # --- one parameter ----------------------------------------------------------------------------

    def gather_parameter(self, param: DistributedParameter) -> Tensor:
        """``param``, whole, in storage of its own; see :meth:`DistributedParameter.gather`."""
        self.check_agreement()
        if in_backward() is None:
            self.tracker.recover()
        if not (torch.is_grad_enabled() and param.requires_grad):
            return param.bucket.gather_fresh(param.bucket_index)
        if self._cached is not None and len(self.params) == 1:
            version, reference = self._cached
            found = reference()
            if found is not None and version == param._version:
                return found  # a tied weight is used twice, and gathered once
        result = _GatherOne.apply(self._anchor, param)
        self._cached = (param._version, TensorWeakRef(result))
        return result

    def reduce_parameter(self, param: DistributedParameter, grad: Tensor) -> None:
        """Reduce the gradient of what :meth:`gather_parameter` returned."""
        self._cached = None
        grads: list[Tensor | None] = [None] * len(param.bucket.params)
        grads[param.bucket_index] = grad
        self._reduce([param.bucket], grads)

    # --- copying ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        twin = Unit.__new__(Unit)
        memo[id(self)] = twin
        buckets = [copy.deepcopy(bucket, memo) for bucket in self.buckets]
        # The modules are copied after, and find their parameters in memo.
        slots = copy.deepcopy(self.slots, memo)
        twin.__init__(self.name, buckets, self.context, slots)  # type: ignore[misc]
        twin.chain, twin.position = copy.deepcopy(self.chain, memo), self.position
        return twin


@dataclass
class Slot:
    """Where a module has a parameter: ``module.name`` is parameter ``index`` of the unit.

    ``path`` is the name of that parameter in the Block's state dict.
    """

    module: nn.Module
    name: str
    index: int
    path: str


def _refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their weights beside the attributes."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]


def link(units: Sequence[Unit]) -> None:
    """Let ``units`` prefetch each other in this order."""
    chain = list(units)
    for position, unit in enumerate(chain):
        unit.chain, unit.position = chain, position


def make_standalone(
    param: DistributedParameter,
    context: ParallelContext,
    whole: Tensor | None,
    level: int | None = None,
    precision: MixedPrecision | None = None,
) -> None:
    """Spread the rows of a parameter, whose values (None: not known yet) are ``whole``, as a unit of its own."""
    level = context.zero_level if level is None else level
    shard_comm, replicate_comm = shard_comms(context, param.tp_mode, level)
    [layout] = plan_layouts([param.bmt_slice.piece_shape], shard_comm.size)
    shard = torch.zeros(layout.shard_numel, dtype=param.dtype, device=context.device)
    if whole is not None:
        write_rows(shard, layout, layout.placements[0], shard_comm.rank, whole)
    bucket = Bucket(
        layout,
        [param],
        shard,
        shard_comm,
        replicate_comm,
        level,
        precision or MixedPrecision(),
        grad_scale_of(context, param.tp_mode),
        standalone=True,
    )
    narrow_slices(bucket)
    Unit(f"a parameter of shape {param.bmt_slice.shape}", [bucket], context)


def shard_comms(context: ParallelContext, tp_mode: bool, level: int) -> tuple[Communicator, Communicator]:
    """The communicators over which a parameter is sharded and replicated."""
    comm = context.outer_tp_zero if tp_mode else context.outer_zero
    alone = Communicator(None, context.device)
    return (alone, comm) if level == 0 else (comm, alone)


def grad_scale_of(context: ParallelContext, tp_mode: bool) -> float:
    """Tensor-parallel ranks each compute the whole gradient of what they hold in common: summed, it counts
    ``tp_size`` times."""
    return 1.0 if tp_mode else 1.0 / context.tp_size


def write_rows(shard: Tensor, layout: FlatLayout, placement: Placement, rank: int, whole: Tensor) -> None:
    """Write the rows of a whole parameter that belong to ``rank`` into its flat shard."""
    start, stop = layout.rows_of(placement, rank)
    if start == stop or placement.row_numel == 0:
        return
    offset = layout.offset_in_shard(placement, rank)
    rows = whole.reshape(placement.rows, placement.row_numel)[start:stop]
    shard[offset : offset + rows.numel()].view_as(rows).copy_(rows)


def narrow_slices(bucket: Bucket) -> None:
    """Let the slices of a bucket's parameters say which rows this rank holds."""
    comm = bucket.shard_comm
    for param, placement in zip(bucket.params, bucket.placements, strict=True):
        start, stop = bucket.layout.rows_of(placement, comm.rank)
        row_comm = comm if comm.size > 1 else None
        param.bmt_slice = replace(param.bmt_slice, row_start=start, row_stop=stop, row_comm=row_comm)
