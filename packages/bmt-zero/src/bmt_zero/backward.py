"""What is under way while autograd runs backward: which units take part, whose gradients are being reduced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from bmt_comm import ParallelContext

if TYPE_CHECKING:
    from .unit import Unit


_shadowed = threading.local()  # .tasks: the backward passes that this thread looks away from


def in_backward() -> int | None:
    """The identity of the backward pass that is running in this thread, or None."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 or task in getattr(_shadowed, "tasks", ()) else task


@contextmanager
def outside_backward() -> Iterator[None]:
    """For an autograd node whose backward computes forward again, and backward from there: to Blocks that run
    within, the pass that the node belongs to is not there."""
    task = torch._C._current_graph_task_id()
    before = getattr(_shadowed, "tasks", ())
    _shadowed.tasks = (*before, task) if task != -1 else before
    try:
        yield
    finally:
        _shadowed.tasks = before


class BackwardTracker:
    """The backward passes under way.

    The first unit that a backward pass reaches asks autograd to be called when the pass is over; then all
    reductions are completed and everything is freed that nobody came for. A pass that an exception ends is
    noticed by the next forward (:meth:`recover`).
    """

    def __init__(self) -> None:
        self._passes: dict[int, dict[Unit, None]] = {}
        self._reducing: list[Unit] = []
        self._prefetched: Unit | None = None
        self.forbidden: str | None = None
        """Why nothing may be gathered now, where not all ranks compute what this one does."""

    def check_gathering(self, unit: Unit) -> None:
        """Raise where ranks that do not compute what this one does would be waited for."""
        if self.forbidden is not None:
            raise RuntimeError(f"{unit.name} cannot be gathered {self.forbidden}")

    def enter(self, unit: Unit) -> None:
        """``unit`` takes part in the backward pass that is running."""
        task = in_backward()
        assert task is not None
        units = self._passes.get(task)
        if units is None:
            units = self._passes[task] = {}
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish(task))
        units[unit] = None

    def _finish(self, task: int) -> None:
        self.finish_reductions()
        self.expect(None)
        for unit in self._passes.pop(task, {}):
            if not any(unit in others for others in self._passes.values()):
                unit.end_backward()

    def prefetch(self, unit: Unit) -> None:
        """Start to gather ``unit``, whose forward is likely to come next."""
        self._prefetched = unit
        unit.outdate()
        unit.start_gather()

    def expect(self, unit: Unit | None) -> None:
        """``unit`` runs now: if another one was gathered ahead (somebody left a list early), free that."""
        guess, self._prefetched = self._prefetched, None
        if guess is not None and guess is not unit:
            guess.free()

    def note_reducing(self, unit: Unit) -> None:
        self._reducing.append(unit)

    def finish_reductions(self) -> None:
        """Complete the reductions in flight: before the next ones start, so that one unit's buffers are
        all that reductions hold."""
        units, self._reducing = self._reducing, []
        for unit in units:
            unit.finish_reduce()

    def recover(self) -> None:
        """Forget backward passes that an exception has ended. Outside backward only."""
        alive = getattr(_shadowed, "tasks", ())
        ended = {task: units for task, units in self._passes.items() if task not in alive}
        if not ended:
            return
        self._passes = {task: units for task, units in self._passes.items() if task in alive}
        self._reducing = [u for u in self._reducing if not any(u in units for units in ended.values())]
        for units in ended.values():
            for unit in units:
                unit.abandon_backward()


_trackers: WeakKeyDictionary[ParallelContext, BackwardTracker] = WeakKeyDictionary()


def tracker_of(context: ParallelContext) -> BackwardTracker:
    """The one tracker of a context: backward passes go through all of its units."""
    tracker = _trackers.get(context)
    if tracker is None:
        tracker = _trackers[context] = BackwardTracker()
    return tracker
