"""What is under way in a step: calls in forward, backward passes, prefetches and reductions in flight.

There is one :class:`StepContext` for each parallel context. The first parameter group that a backward pass reaches
asks autograd to be called when the pass is over; then all reductions are completed and whatever was unsharded and not
used is resharded. A forward or a pass that an exception has ended is noticed by the next forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from bmt_comm import CallSequences, Communicator, ParallelContext

from .gradient_reducer import GradientReducer, UseAgreement


class Group(Protocol):
    """What a parameter group does when the context asks."""

    name: str

    @property
    def reducers(self) -> Sequence[GradientReducer]: ...

    def invalidate(self) -> None: ...

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def end_backward(self) -> None:
        """The pass is over."""

    def abandon_backward(self) -> None:
        """An exception has ended the pass."""


class ForwardCall(Protocol):
    """A call of a module whose forward is running."""

    frame: FrameType
    outer_error: BaseException | None  # the exception that was being handled when the call began

    def abandon(self) -> None:
        """An exception has ended it."""


_hidden = threading.local()  # .passes: the backward passes that this thread looks away from


def current_backward() -> int | None:
    """The identity of the backward pass that is running in this thread, or None."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 or task in getattr(_hidden, "passes", ()) else task


@contextmanager
def outside_backward() -> Iterator[None]:
    """For an autograd node whose backward computes forward again, and backward from there: within, modules do not
    see the pass that the node belongs to."""
    task = torch._C._current_graph_task_id()
    before = getattr(_hidden, "passes", ())
    _hidden.passes = (*before, task) if task != -1 else before
    try:
        yield
    finally:
        _hidden.passes = before


class StepContext:
    """The forward calls and backward passes under way."""

    def __init__(self) -> None:
        self.calls: list[Any] = []  # ForwardCalls, the innermost last
        self._passes: dict[int, dict[Group, None]] = {}
        self._reducing: list[GradientReducer] = []
        self._prefetched: Group | None = None
        self._use = UseAgreement()
        self._nested = 0
        self.sequences = CallSequences()
        self.forbidden: str | None = None
        """Why nothing may be unsharded now, where not all ranks compute what this one does."""

    def check_unsharding(self, group: Group) -> None:
        """Raise where ranks that do not compute what this one does would be waited for."""
        if self.forbidden is not None:
            raise RuntimeError(f"{group.name} cannot be unsharded {self.forbidden}")

    # --- forward ----------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A call begins: forget calls that an exception has ended without their hooks' knowing."""
        while self.calls and not _is_running(self.calls[-1].frame):
            self.calls.pop().abandon()

    def end_forward(self, call: ForwardCall) -> None:
        """A call ends, and with it those within."""
        while self.calls:
            last = self.calls.pop()
            if last is call:
                return
            last.abandon()

    def prefetch(self, group: Group) -> None:
        """Start to unshard ``group``, whose forward is likely to come next."""
        self._prefetched = group
        group.invalidate()
        group.unshard()

    def cancel_prefetch(self, unless: Group | None = None) -> None:
        """A group runs now: if another one was prefetched (somebody left a list early), reshard that."""
        predicted, self._prefetched = self._prefetched, None
        if predicted is not None and predicted is not unless:
            predicted.reshard()

    # --- backward ---------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """``group`` takes part in the backward pass that is running."""
        task = current_backward()
        assert task is not None
        groups = self._passes.get(task)
        if groups is None:
            groups = self._passes[task] = {}
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish(task))
            if not self._nested:
                self.sequences.compare()
        groups[group] = None

    def _finish(self, task: int) -> None:
        self.finish_reductions()
        self.cancel_prefetch()
        for group in self._passes.pop(task, {}):
            if not any(group in others for others in self._passes.values()):
                group.end_backward()
        if not self._nested:
            self._use.settle()
            self.sequences.compare()

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Within, backward passes are those of one pipeline stage at a time of its own: nothing is compared with the
        ranks of other stages."""
        self._nested += 1
        try:
            yield
        finally:
            self._nested -= 1

    def note_operation(self, comms: Sequence[Communicator], label: int) -> None:
        """A collective of a group goes over ``comms``; ranks compare the order of these."""
        for comm in comms:
            self.sequences.add(comm, label)

    def note_reducing(self, reducers: Sequence[GradientReducer]) -> None:
        self._reducing += reducers

    def finish_reductions(self) -> None:
        """Complete the reductions in flight: before the next ones start, so that one group's buffers are all that
        reductions hold."""
        reducers, self._reducing = self._reducing, []
        for reducer in reducers:
            if reducer.finish():
                self._use.note(reducer)

    def note_added(self, reducer: GradientReducer) -> None:
        """A reduced gradient was added to the parameters' gradients."""
        self._use.note(reducer)

    def reduce_accumulated(self, reducers: Sequence[GradientReducer]) -> None:
        """Reduce what was accumulated under ``no_sync`` where no backward comes that would; all ranks, or none."""
        self.finish_reductions()
        for reducer in reducers:
            reducer.reduce_accumulated()
            if reducer.finish():
                self._use.note(reducer)

    def settle(self, reducers: Sequence[GradientReducer]) -> None:
        """Decide which parameters of ``reducers`` have gradients. Their ranks come here after the same reductions."""
        self.finish_reductions()
        self._use.settle(reducers)

    def recover(self) -> None:
        """Forget backward passes that an exception has ended. Outside backward only."""
        if not self._passes:
            return
        alive = getattr(_hidden, "passes", ())
        ended = {task: groups for task, groups in self._passes.items() if task not in alive}
        if not ended:
            return
        self._passes = {task: groups for task, groups in self._passes.items() if task in alive}
        reducers = {reducer for groups in ended.values() for group in groups for reducer in group.reducers}
        self._reducing = [r for r in self._reducing if r not in reducers]
        self._use.forget(reducers)
        for groups in ended.values():
            for group in groups:
                group.abandon_backward()


def _is_running(frame: FrameType) -> bool:
    """Whether a frame is one of those that have called this function."""
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False


_contexts: WeakKeyDictionary[ParallelContext, StepContext] = WeakKeyDictionary()


def step_context(context: ParallelContext) -> StepContext:
    """The one step context of a parallel context: backward passes go through all of its groups."""
    found = _contexts.get(context)
    if found is None:
        found = _contexts[context] = StepContext()
    return found
