"""A unit: parameters that are gathered, freed and reduced together, and when that happens.

[Note: how a unit meets autograd]
    The full parameters enter a computation as the outputs of one autograd node (:class:`_Enter`) per call.
    Autograd calls that node's backward when, and only when, every gradient of the parameters has arrived,
    however often they were used: that is the moment when the call has no further use for them, and the
    moment to reduce. Frozen parameters get no gradient; where a unit has some, the inputs of the call pass
    through the same node, so that it waits for their gradients as well.

    A hook on the call's outputs gathers the parameters again when backward arrives. Calls of one unit that
    are in backward at the same time are counted, and the last one frees.

    The hooks, not the call, hold the views of the parameters: the node holds the call and the views hold the
    node, and what goes round through autograd's nodes is never collected.
"""

from __future__ import annotations

import copy
import itertools
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

    __slots__ = ("trainable", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.trainable = [p.requires_grad for p in unit.params]


class _Enter(torch.autograd.Function):
    """(inputs) → (the same inputs, the trainable full parameters); see [Note: how a unit meets autograd]."""

    @staticmethod
    def forward(ctx: Any, call: Call, _anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_inputs = call, len(inputs)
        views = (view for bucket in call.unit.buckets for view in bucket.full_views())
        return (*inputs, *itertools.compress(views, call.trainable))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        call.unit.post_backward(call, grads[ctx.num_inputs :])
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
        self.params = [p for b in self.buckets for p in b.params]
        self._ranges: dict[Bucket, range] = {}
        for bucket in self.buckets:
            start = sum(map(len, self._ranges.values()))
            self._ranges[bucket] = range(start, start + len(bucket.params))
        self.tracker: BackwardTracker = tracker_of(context)
        self.chain: dict[int, Unit] = {0: self}  # position to unit, in the order of forward, for prefetching
        self.position = 0
        self.installed = False
        self.held = False  # the full parameters stay where they are; see hold()
        self.stand_in: Tensor | None = None  # what is read in place of a parameter that is gathered when it is read
        self._anchor = torch.zeros((), requires_grad=True)
        # Runs in those backward passes, and only those, that accumulate gradients of all leaves.
        self._accumulates: Any = self._anchor.view_as(self._anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._in_backward: set[Call] = set()
        self._cached: tuple[int, TensorWeakRef] | None = None
        self._agreed: list[bool] | None = None
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
        return self.chain.get(self.position - 1)

    @property
    def next(self) -> Unit | None:
        return self.chain.get(self.position + 1)

    # --- gathering --------------------------------------------------------------------------------

    def outdate(self) -> None:
        """A computation begins: see :meth:`Bucket.outdate`."""
        if self.held:
            return
        for bucket in self.buckets:
            bucket.outdate()

    def start_gather(self) -> None:
        """Start to gather what is not at hand."""
        self.tracker.check_gathering(self)
        self.check_agreement()
        for bucket in self.buckets:
            bucket.follow_params()
            bucket.start_gather()

    def gather(self) -> None:
        """Gather what is not at hand, for the computation that comes next."""
        self.start_gather()
        for bucket in self.buckets:
            bucket.finish_gather()

    def free(self) -> None:
        """Free the full parameters, unless a call in backward needs them or a reduction uses their space."""
        if not self._in_backward and not self.held:
            for bucket in self.buckets:
                if not bucket.reducing_in_full:
                    bucket.free()

    def hold(self) -> None:
        """Keep the full parameters once they are gathered, from one micro-batch to the next, until
        :meth:`release`; at level 3 they are freed all the same."""
        self.release()
        self.held = self.level < 3

    def release(self) -> None:
        """End :meth:`hold`."""
        self.held = False
        self.free()

    def check_agreement(self) -> None:
        """Before the first collective, and when parameters were frozen or unfrozen: the ranks hold parts of
        the same thing."""
        trains = [p.requires_grad for p in self.params]
        if self._agreed == trains:
            return
        self._agreed = trains
        comms: list[Communicator] = []
        for bucket in self.buckets:
            comms += [c for c in (bucket.shard_comm, bucket.replicate_comm) if c.size > 1 and c not in comms]
        for comm in comms:
            facts = [f"{p.bmt_slice.shape} {p.dtype} requires_grad={p.requires_grad}" for p in self.params]
            check_agreement(comm, f"the parameters of {self.name}", facts)

    # --- forward ----------------------------------------------------------------------------------

    def enter(self, inputs: Sequence[Tensor]) -> tuple[Call | None, Sequence[Tensor], list[Tensor]]:
        """Bring the gathered parameters into the computation.

        Returns the call (None where nothing will be differentiated), the inputs to use in place of
        ``inputs``, and the full parameters in the order of ``params``.
        """
        if torch.is_grad_enabled():
            call = Call(self)
            if inputs or any(call.trainable):
                outputs = _Enter.apply(call, self._anchor, *inputs)
                inputs, entered = outputs[: len(inputs)], iter(outputs[len(inputs) :])
                whole = (view for bucket in self.buckets for view in bucket.full_views())
                views = [next(entered) if t else view for t, view in zip(call.trainable, whole, strict=True)]
                return call, inputs, views
        return None, inputs, [view for bucket in self.buckets for view in bucket.full_views()]

    def install(self, views: Sequence[Tensor]) -> None:
        """Let the modules see full parameters.

        An entry in a module's ``__dict__`` comes before its registered parameters, which stay the shards.
        """
        self.installed = True
        for slot in self.slots:
            slot.module.__dict__[slot.name] = views[slot.index]
        for module in self._recurrent:
            refresh_flat_weights(module)

    def uninstall(self) -> None:
        """Let the modules see the shards again."""
        if not self.installed:
            return
        self.installed = False
        for slot in self.slots:
            slot.module.__dict__.pop(slot.name, None)
        for module in self._recurrent:
            refresh_flat_weights(module)

    # --- backward ---------------------------------------------------------------------------------

    def pre_backward(self, call: Call, views: Sequence[Tensor], _grad: Tensor) -> None:
        """The first gradient of ``call``'s outputs has arrived: make the full parameters ready, and start on
        those of the unit before.

        Raises:
            RuntimeError: this backward is to be differentiated (``create_graph=True``), which would use
                parameters after they were freed.
        """
        if call in self._in_backward:
            return
        if torch.is_grad_enabled() and any(b.frees for b in self.buckets):
            raise RuntimeError(
                f"create_graph=True: {self.name} frees its parameters after backward (ZeRO level {self.level}), and "
                f"the backward of backward would need them; use zero_level=1 for it"
            )
        self._in_backward.add(call)
        self.tracker.enter(self)
        self.gather()
        self.install(views)
        previous = self.previous
        if previous is not None and previous.level == 3:
            self.tracker.enter(previous)
            previous.start_gather()

    def post_backward(self, call: Call, grads: Sequence[Tensor | None]) -> None:
        """``call`` is through with its backward: reduce its gradients and free the full parameters."""
        self._in_backward.discard(call)
        if not self._in_backward:
            self.uninstall()
        if torch._C._will_engine_execute_node(self._accumulates):  # not in torch.autograd.grad(loss, inputs)
            arrived = iter(grads)
            by_param = [next(arrived) if trains else None for trains in call.trainable]
            reached = [b for b in self.buckets if any(call.trainable[i] for i in self._ranges[b])]
            self._reduce([(b, [by_param[i] for i in self._ranges[b]]) for b in reached])
        if not self._kept:
            self.free()

    @property
    def _kept(self) -> bool:
        """Whether parameters stay gathered until the step: from one micro-step to the next."""
        return any(b.no_sync and b.level <= 1 for b in self.buckets)

    def _reduce(self, work: Sequence[tuple[Bucket, Sequence[Tensor | None]]]) -> None:
        self.tracker.enter(self)
        self.tracker.finish_reductions()
        for bucket, grads in work:
            bucket.reduce(list(map(_prepared, bucket.params, grads)), done=not (self._in_backward or self.held))
        self.tracker.note_reducing(self)

    def finish_reduce(self) -> None:
        for bucket in self.buckets:
            bucket.finish_reduce()

    def end_backward(self) -> None:
        """Backward is over: whatever it has left behind is cleared."""
        self.finish_reduce()
        if self._in_backward:
            self._in_backward.clear()
            self.uninstall()
        self._cached = None
        if not self._kept:
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
        if self.stand_in is not None:
            return self.stand_in
        self.tracker.check_gathering(self)
        self.check_agreement()
        if in_backward() is None:
            self.tracker.recover()
        if not (torch.is_grad_enabled() and param.requires_grad):
            bucket = param.bucket
            gather = bucket.gather_fresh if bucket.standalone else bucket.gather_stored
            return gather(param.bucket_index)
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
        self._reduce([(param.bucket, grads)])

    # --- copying ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        twin = Unit.__new__(Unit)
        memo[id(self)] = twin
        buckets = [copy.deepcopy(bucket, memo) for bucket in self.buckets]
        # The modules are copied after, and find their parameters in memo.
        slots = copy.deepcopy(self.slots, memo)
        twin.__init__(self.name, buckets, self.context, slots)  # type: ignore[misc]
        # Of a chain, those prefetch each other again that are copied together.
        twin.chain, twin.position = memo.setdefault(id(self.chain), {}), self.position
        twin.chain[twin.position] = twin
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


def refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their weights beside the attributes."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]


def link(units: Sequence[Unit]) -> None:
    """Let ``units`` prefetch each other in this order."""
    chain = dict(enumerate(units))
    for position, unit in chain.items():
        unit.chain, unit.position = chain, position


def make_standalone(
    param: DistributedParameter,
    context: ParallelContext,
    whole: Tensor | None,
    level: int | None = None,
    precision: MixedPrecision | None = None,
    stage_local: bool = False,
) -> None:
    """Spread the rows of a parameter, whose values (None: not known yet) are ``whole``, as a unit of its own."""
    level = context.zero_level if level is None else level
    shard_comm, replicate_comm = shard_comms(context, param.tp_mode, level, stage_local)
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


def _prepared(param: DistributedParameter, grad: Tensor | None) -> Tensor | None:
    """A gradient as it goes into the reduction."""
    if grad is not None and grad.is_sparse:
        grad = grad.to_dense()
    if grad is not None and param.sequence_parallel and param.bucket.grad_scale != 1.0:
        # The sum over tensor-parallel ranks is the gradient already; see grad_scale_of.
        grad = grad / param.bucket.grad_scale
    return grad


def holders(context: ParallelContext, tp_mode: bool, stage_local: bool = False) -> Communicator:
    """The ranks among which a parameter is spread: of all stages, or of this one."""
    if stage_local:
        return context.tp_zero if tp_mode else context.zero
    return context.outer_tp_zero if tp_mode else context.outer_zero


def shard_comms(
    context: ParallelContext, tp_mode: bool, level: int, stage_local: bool = False
) -> tuple[Communicator, Communicator]:
    """The communicators over which a parameter is sharded and replicated."""
    comm = holders(context, tp_mode, stage_local)
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
