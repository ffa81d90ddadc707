"""The state of a step: calls in forward, backward passes, prefetches and reductions in flight.

Each parallel context has one :class:`StepContext`. The first parameter group that a backward pass reaches queues an
autograd callback for the end of the pass. The callback completes all reductions and reshards the groups that were
unsharded and not used. The next forward notices a forward or a backward pass that an exception has ended.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from bmt_comm import (
    CallSequences,
    Communicator,
    ParallelContext,
    Work,
    begin_backward,
    forget_scale,
    not_compiled,
    runs_compiled_autograd,
)

from .gradient_reducer import GradientReducer
from .gradient_target import GradientTarget
from .parameter_group import ParameterGroup, leaf_on
from .use_agreement import UseAgreement


class _Hidden(threading.local):
    passes: tuple[int, ...] = ()  # the backward passes that modules in this thread must not see


_hidden = _Hidden()


def current_backward() -> int | None:
    """The identity of the backward pass that is running in this thread, or None."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 or task in _hidden.passes else task


@contextmanager
def outside_backward() -> Iterator[None]:
    """Within, modules do not see the backward pass that is running.

    For an autograd node whose backward computes a forward again and starts another backward pass.
    """
    task = torch._C._current_graph_task_id()
    before = _hidden.passes
    _hidden.passes = (*before, task) if task != -1 else before
    try:
        yield
    finally:
        _hidden.passes = before


class BackwardPart(enum.Enum):
    """What a backward pass computes."""

    ALL = enum.auto()
    INPUTS = enum.auto()
    """The input-gradient pass of a chunk; the weight-gradient pass follows."""
    WEIGHTS = enum.auto()
    """The weight-gradient pass, which runs single nodes of modules' graphs again."""


class StepContext:
    """The forward calls and backward passes of parameter groups that are running.

    Attributes:
        calls: the hooked modules' calls whose forward is running (``hooks.ForwardCall``), the innermost last.
        sequences: the operations of this rank, to compare their order with other ranks.
        forbidden: why unsharding is forbidden now, as part of a message; None: it is allowed.
        use: lets ranks agree on which parameters they have used.
        splits_backward: whether backward of the forward that is running will be split into two passes.
        split_calls: the calls of that forward that have trainable parameters.
        part: what the running backward pass computes.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.sequences = CallSequences()
        self.forbidden: str | None = None
        self._passes: dict[int, _Pass] = {}
        self._reducing: list[GradientReducer] = []
        self._abandoned: dict[GradientReducer, None] = {}  # an exception in a pipeline has ended their reductions
        self._copying: dict[GradientReducer, None] = {}  # their gradients may still be on the way to the host
        self._adding: dict[GradientReducer, None] = {}  # their sums over micro-batches have not ended
        # Their gradients may wait for a later backward pass, or for none, if the model is deleted.
        self._deferring: WeakKeyDictionary[GradientReducer, None] = WeakKeyDictionary()
        self._prefetched: dict[ParameterGroup, bool] = {}  # and whether to keep them until they are used
        self.use = UseAgreement()
        self._read: dict[Communicator, None] = {}  # this rank computes with memory that their ranks share
        self._meetings: list[Work] = []  # barriers of passes that an exception has ended on this rank
        self._nested = self._deferred = 0
        self._finishing = False
        self._built: dict[tuple[Communicator, ...], int] = {}
        self.splits_backward = False
        self.split_calls: list[Any] = []
        self.part = BackwardPart.ALL
        self.anchor_on = functools.cache(leaf_on)  # of the groups on a device together
        self._unused: list[Any] = []  # calls that have used no parameter and wait for their turn

    def next_number(self, communicators: Sequence[Communicator]) -> int:
        """How many groups these ranks have built together before. It distinguishes groups with the same name."""
        key = tuple(communicators)
        self._built[key] = number = self._built.get(key, -1) + 1
        return number

    def begin_unsharding(self, group: ParameterGroup) -> None:
        """Note that a collective of ``group`` starts, so that ranks can compare the order of labels.

        Raises:
            RuntimeError: unsharding is forbidden, or other ranks unshard another group.
        """
        if self.forbidden is not None:
            raise RuntimeError(f"{group.name} cannot be unsharded {self.forbidden}")
        # In forward, replicas need not compute the same. Their backward passes reduce together.
        for comm in group.unsharding_communicators if current_backward() is None else group.communicators:
            self.sequences.add(comm, group.label)

    def begin_use(self, group: ParameterGroup) -> None:
        """Note that this rank computes with parameters of ``group`` from now on."""
        for flat in group.flats:
            if flat.is_shared:
                self._read[flat.shard_comm] = None

    def end_use(self, waits: bool = True) -> None:
        """If no computation is running, meet the ranks that share memory: then all may write to parameters.

        ``waits``: whether to wait for them now; otherwise this rank waits when its next forward begins.
        """
        if not self._read or self.calls or self._passes or self._nested or self._deferred:
            return
        read, self._read = self._read, {}
        for comm in sorted(read, key=lambda comm: comm.ranks):
            meeting = comm.barrier(async_op=not waits, label="the end of a forward or backward pass")
            if not waits:
                self._meetings.append(meeting)

    # --- forward ----------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Before a call: forget calls that an exception has ended without running their hooks."""
        self.abandon_dead_calls()
        if (self._read or self._meetings) and not self.calls and current_backward() is None:
            self.recover()
            self.end_use()  # of a forward that an exception has ended
            meetings, self._meetings = self._meetings, []
            for meeting in meetings:
                meeting.wait()

    def abandon_dead_calls(self) -> None:
        """Reshard what calls have left that an exception ended without a hook, such as KeyboardInterrupt."""
        while self.calls and not is_running(self.calls[-1].frame, self.calls[-1].thread):
            self.calls.pop().abandon()

    def end_forward(self, call: Any) -> None:
        """End a call, and all calls within it."""
        while self.calls:
            last = self.calls.pop()
            if last is call:
                return
            last.abandon()

    def prefetch(self, group: ParameterGroup, keep: bool = False) -> None:
        """Start to unshard ``group``, whose forward probably comes next.

        ``keep``: keep it until it is used, because its forward may come later.
        """
        self._prefetched[group] = keep
        group.invalidate()
        group.unshard()

    def cancel_prefetch(self, unless: ParameterGroup | None = None, kept: bool = True) -> None:
        """Reshard prefetched groups that are not used: mispredicted prefetches.

        Args:
            unless: the group that computes now.
            kept: whether to reshard also those that are kept until they are used.
        """
        if unless is not None:
            self._prefetched.pop(unless, None)
        for group in [group for group, keep in self._prefetched.items() if kept or not keep]:
            del self._prefetched[group]
            group.reshard()

    # --- backward ---------------------------------------------------------------------------------

    def enter(self, group: ParameterGroup) -> None:
        """Note that ``group`` takes part in the running backward pass."""
        self.begin_pass()[group] = None
        self.begin_use(group)

    def begin_pass(self) -> dict[ParameterGroup, None]:
        """The groups that take part in the running backward pass. The first call in a pass begins it."""
        task = current_backward()
        assert task is not None
        if task not in self._passes:
            if runs_compiled_autograd():
                raise RuntimeError(
                    "backward runs with compiled autograd, which would lose gradients of sharded parameters; compile "
                    "modules, and call backward outside of torch._dynamo.compiled_autograd"
                )
            finish = functools.partial(self._finish, task)
            self._passes[task] = _Pass(finish)
            begin_backward()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(finish)
            if not self._nested:
                self.sequences.compare()
        return self._passes[task].groups

    @not_compiled
    def _finish(self, task: int) -> None:
        if task not in self._passes:
            raise RuntimeError("a module of this model was called in another thread while backward ran")
        self._finishing = True  # this thread decides about gradients that wait
        try:
            self._finish_pass(task)
        finally:
            self._finishing = False

    def _finish_pass(self, task: int) -> None:
        stream = self._passes[task].stream
        caller = None if stream is None else torch.cuda.current_stream(stream.device)
        with torch._C.DisableTorchFunctionSubclass(), nullcontext() if stream is None else torch.cuda.stream(stream):
            self.reduce_unused(-1, self._passes[task].groups)
            if len(self._passes) == 1 and not self._nested:
                self._reduce_deferred(self._passes[task].groups)
            # In a pipeline, reductions of one micro-batch go on while the next one is computed.
            if not self._nested or any(reducer.has_fixed_order for reducer in self._reducing):
                self.finish_reductions()
            self.cancel_prefetch()
            for group in self._passes.pop(task).groups:
                if not any(group in other.groups for other in self._passes.values()):
                    group.end_backward()
            self._wait_for_copies()
            if not self._passes:
                self._end_sums()
            if not self._nested:
                self.use.settle()
                self.sequences.compare()
            self.end_use()
        if stream is not None and caller is not None and caller != stream:
            caller.wait_stream(stream)

    def _reduce_deferred(self, groups: Iterable[ParameterGroup]) -> None:
        """Reduce gradients of earlier backward passes whose modules take no part in this one, which has ``groups``.

        Others than the ranks of this pass may not have come here: gradients that need them go on waiting.
        """
        if self._deferring:
            here = {comm for group in groups for comm in group.communicators}
            waiting = [r for r in self._deferring if r.has_deferred and here.issuperset(r.flat.communicators)]
            with torch.no_grad():  # for create_graph=True
                self.reduce_accumulated(waiting)
            for reducer in [r for r in self._deferring if not (r.defers or r.has_deferred)]:
                del self._deferring[reducer]

    def _end_sums(self) -> None:
        """At the end of a backward pass, end the sums in a fixed order that are outside of ``no_sync``."""
        for reducer in self._adding:
            reducer.end_backward()
            self.use.note(reducer)
        self._adding = {reducer: None for reducer in self._adding if reducer.no_sync}

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Within, backward passes belong to one pipeline stage: operations are not compared with ranks of other stages.

        The caller must call :meth:`settle` inside. An exception drops the gradients that wait for it.
        """
        self._nested += 1
        try:
            yield
        except BaseException:
            self.use.drop()
            # Other ranks may not take part in these reductions, so this rank does not wait for them here.
            self._abandoned.update(dict.fromkeys(self._reducing))
            self._reducing = []
            raise
        finally:
            self._nested -= 1
        self.end_use()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within, forward and backward passes of several micro-batches run. Ranks meet once, at the end."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        self.end_use()

    def await_turn(self, call: Any) -> None:
        """Reduce for a call that has used no parameter of its own when the calls within are done."""
        self._unused.append(call)

    def reduce_unused(self, order: int, groups: Container[ParameterGroup] | None = None) -> None:
        """Reduce for such calls whose order is greater, of all groups or of ``groups``."""
        if not self._unused:
            return
        due = [call for call in self._unused if call.order > order and (groups is None or call.group in groups)]
        self._unused = [call for call in self._unused if call not in due]
        for call in sorted(due, key=lambda each: each.order, reverse=True):
            call.reduce_nothing()

    def is_accumulating(self, device: torch.device) -> bool:
        """Whether the running backward pass, whose part is ALL, accumulates gradients of all leaves.

        Outside of pipelines it must contain parameters of some group on ``device``.
        """
        return bool(self._nested) or bool(torch._C._will_engine_execute_node(self.anchor_on(device)[1]))

    @contextmanager
    def computing(self, part: BackwardPart) -> Iterator[None]:
        """Within, backward passes compute ``part``."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def splitting(self) -> Iterator[list[Any]]:
        """Within, forwards run whose backward will be split into two passes. Yields their calls (``hooks.Call``)."""
        before, self.splits_backward, self.split_calls = self.splits_backward, True, []
        try:
            yield self.split_calls
        finally:
            self.splits_backward, self.split_calls = before, []

    def reduce(
        self,
        work: Sequence[tuple[GradientReducer, Sequence[Tensor | None], GradientTarget | None]],
        needed: bool,
    ) -> None:
        """Start to reduce gradients, one for each parameter of a reducer; see :meth:`GradientReducer.reduce`."""
        self.finish_reductions()
        for reducer, grads, target in work:
            reducer.reduce(grads, needed, target)
            self._reducing.append(reducer)
            if reducer.defers:
                self._deferring[reducer] = None

    def finish_reductions(self) -> None:
        """Complete the reductions in flight.

        This is done before others start, so that reductions keep the buffers of at most one group.
        """
        reducers, self._reducing = self._reducing, []
        for reducer in reducers:
            reducer.finish()
            self._copying[reducer] = None
            if reducer.has_fixed_order:
                self._adding[reducer] = None
            self.use.note(reducer)

    def _wait_for_copies(self) -> None:
        """Let the host read the gradients of offloaded parameters."""
        while self._copying:
            self._copying.popitem()[0].wait_for_copy()

    def reduce_accumulated(self, reducers: Sequence[GradientReducer]) -> None:
        """Reduce gradients of earlier backward passes, if no backward will; all ranks must call it."""
        for reducer in reducers:
            self.finish_reductions()
            reducer.reduce_accumulated()
            self._reducing.append(reducer)
        self.finish_reductions()
        self._wait_for_copies()

    def settle(self, reducers: Sequence[GradientReducer]) -> None:
        """Decide which parameters of ``reducers`` get gradients. Their ranks must call it after the same reductions."""
        self.finish_reductions()
        self._wait_for_copies()
        self.use.settle(reducers)

    def recover(self) -> None:
        """Outside backward: forget backward passes that an exception has ended, and the loss scale of the last one."""
        if any(each.runs_in_another_thread() for each in self._passes.values()):
            return  # that pass is not over: it waits for this thread
        if torch._C._current_graph_task_id() == -1:
            forget_scale()
        if current_backward() is not None:
            return
        while self._abandoned:
            self._abandoned.popitem()[0].drop_pass()
        if ended := [task for task in self._passes if task not in _hidden.passes]:
            groups = [group for task in ended for group in self._passes.pop(task).groups]
            reducers = {reducer for group in groups for reducer in group.reducers}
            self._reducing = [r for r in self._reducing if r not in reducers]
            self._adding = {r: None for r in self._adding if r not in reducers}
            self.use.forget(reducers)
            self._unused = [call for call in self._unused if call.group not in groups]
            for group in groups:
                group.abandon_backward()
        if not (self._passes or self._nested or self._finishing):
            self.use.drop()  # of a pipeline whose pass is over, while the pass that it was part of has failed


class _Pass:
    """A backward pass that is running, or that an exception has ended.

    Attributes:
        groups: the groups that take part.
        stream: the stream that its nodes run on; its callback may run on another one.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self.groups: dict[ParameterGroup, None] = {}
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.get_ident()
        self._callback = ref(callback)  # autograd drops it when the pass ends

    def runs_in_another_thread(self) -> bool:
        """Whether the pass runs in another thread than this one, which one of its modules has started."""
        if self._thread == threading.get_ident():
            return False
        return self._callback() is not None and self._thread in sys._current_frames()  # autograd's threads stay alive


def is_running(frame: FrameType, thread: int) -> bool:
    """Whether a thread is running a frame. Backward may run in a thread of autograd."""
    current = sys._getframe(1) if thread == threading.get_ident() else sys._current_frames().get(thread)
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False


_contexts: WeakKeyDictionary[ParallelContext, StepContext] = WeakKeyDictionary()


def step_context(context: ParallelContext) -> StepContext:
    """The one step context of a parallel context."""
    return _contexts.get(context) or _contexts.setdefault(context, StepContext())


def abandon_dead_calls() -> None:
    """Let modules have their sharded parameters again where KeyboardInterrupt has ended a forward."""
    for step in list(_contexts.values()):
        step.abandon_dead_calls()
