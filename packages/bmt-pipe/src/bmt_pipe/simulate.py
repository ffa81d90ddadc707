"""Simulation of a schedule: when each action runs, how long ranks wait, and how many activations they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from .schedule import Action, Kind, Schedule

UNIT_COSTS: Mapping[Kind, int] = {
    Kind.FORWARD: 1,
    Kind.RECOMPUTE: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT: 1,
    Kind.WEIGHT: 1,
}
"""The time of a micro-batch in all chunks of a rank together, if backward takes twice as long as forward."""

Time: TypeAlias = Fraction | float
"""Planned times are fractions, in the unit of the costs; measured ones are floats, in seconds."""


@dataclass(frozen=True)
class Timeline:
    """When the actions of a schedule run, planned or measured.

    Attributes:
        starts: for each rank, the start of each of its actions; 0 is the earliest of all.
        ends: for each rank, the end of each of its actions.
        length: the end of the last action.
        waiting: for each rank, the idle time between 0 and ``length``.
        activations: for each rank, the largest number of micro-batches, times chunks, whose activations it holds at a
            time.
        inputs: for each rank, the largest number of chunk inputs that it holds for a later recomputation.
    """

    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]
    length: Time
    waiting: tuple[Time, ...]
    activations: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def in_seconds(self) -> bool:
        """Whether times are floats, and seconds."""
        return isinstance(self.length, float)


def timeline_of(schedule: Schedule, starts: Sequence[Sequence[Time]], ends: Sequence[Sequence[Time]]) -> Timeline:
    """The timeline in which the actions of each rank begin at ``starts`` and end at ``ends``.

    Raises:
        ValueError: there are not as many times as actions, a time is negative or not finite, or an action begins
            before the one before it has ended, or ends before it begins.
    """
    check_times(schedule, starts, ends)
    length: Time = max((rank_ends[-1] for rank_ends in ends if rank_ends), default=Fraction(0))
    waiting = [length - sum(end - start for start, end in zip(*times)) for times in zip(starts, ends)]
    activations, inputs = zip(*map(_held, schedule.actions))
    return Timeline(tuple(map(tuple, starts)), tuple(map(tuple, ends)), length, tuple(waiting), activations, inputs)


def check_times(schedule: Schedule, starts: Sequence[Sequence[Time]], ends: Sequence[Sequence[Time]]) -> None:
    """Raise a ``ValueError`` unless the actions of ``schedule`` can have begun and ended at these times."""
    wanted = [len(actions) for actions in schedule.actions]
    for name, times in (("starts", starts), ("ends", ends)):
        if (counts := [len(of_rank) for of_rank in times]) != wanted:
            raise ValueError(f"{name} has {counts} times on its ranks, and the schedule {wanted} actions")
    for rank, (actions, *times) in enumerate(zip(schedule.actions, starts, ends)):
        before: Time = 0
        for action, start, end in zip(actions, *times):
            if not before <= start <= end < math.inf:
                raise ValueError(
                    f"rank {rank} cannot do {action} from {start} to {end}, with what it did before until {before}"
                )
            before = end


def idle_share(timeline: Timeline) -> tuple[float, ...]:
    """For each rank, the share of the timeline's length that it is idle, from 0 to 1."""
    return tuple(float(waiting / timeline.length) if timeline.length else 0.0 for waiting in timeline.waiting)


def mean_costs(schedule: Schedule, timeline: Timeline) -> dict[Kind, Time]:
    """The mean time of each kind of action in the schedule, as ``costs`` for :func:`simulate`."""
    times: dict[Kind, list[Time]] = {}
    for actions, starts, ends in zip(schedule.actions, timeline.starts, timeline.ends):
        for action, start, end in zip(actions, starts, ends):
            times.setdefault(action.kind, []).append(end - start)
    return {kind: sum(taken) * schedule.chunks / len(taken) for kind, taken in times.items()}


def simulate(schedule: Schedule, costs: Mapping[Kind, Time] = UNIT_COSTS) -> Timeline:
    """Simulate a schedule. Sending takes no time.

    Args:
        schedule: the schedule.
        costs: the time of each kind of action, over all chunks of a rank together.

    Raises:
        ValueError: the schedule would never end, because ranks wait for each other or for an action that it does not
            have; or it has kinds of actions that ``costs`` does not have.
    """
    if unknown := {action.kind for actions in schedule.actions for action in actions} - costs.keys():
        names = ", ".join(sorted(kind.value for kind in unknown))
        raise ValueError(f"costs must say what each kind of action takes, and says nothing of {names}")
    exact = {kind: Fraction(cost) / schedule.chunks for kind, cost in costs.items()}
    done: dict[tuple[Kind, int, int], Fraction] = {}  # kind, place in the chain, micro-batch: when it ended
    starts: list[list[Fraction]] = [[] for _ in schedule.actions]
    ends: list[list[Fraction]] = [[] for _ in schedule.actions]
    recomputed = [_recomputed(actions) for actions in schedule.actions]
    left = [list(reversed(actions)) for actions in schedule.actions]
    while any(left):
        moved = False
        for rank, actions in enumerate(left):
            while actions and (ready := _ready(schedule, rank, actions[-1], recomputed[rank], done)) is not None:
                action = actions.pop()
                starts[rank].append(max(ready, ends[rank][-1] if ends[rank] else Fraction(0)))
                ends[rank].append(starts[rank][-1] + exact[action.kind])
                done[action.kind, schedule.place(rank, action.chunk), action.micro_batch] = ends[rank][-1]
                moved = True
        if not moved:
            waiting = [f"rank {rank} waits to do {actions[-1]}" for rank, actions in enumerate(left) if actions]
            raise ValueError(f"the schedule never ends: {', '.join(waiting)}")
    return timeline_of(schedule, starts, ends)


def _ready(
    schedule: Schedule,
    rank: int,
    action: Action,
    recomputed: set[tuple[int, int]],
    done: Mapping[tuple[Kind, int, int], Fraction],
) -> Fraction | None:
    """The earliest start of an action; None: an action that it waits for has not run yet."""
    place, i = schedule.place(rank, action.chunk), action.micro_batch
    if action.kind is Kind.FORWARD:
        return Fraction(0) if place == 0 else done.get((Kind.FORWARD, place - 1, i))
    if action.kind is Kind.WEIGHT:
        return done.get((Kind.INPUT, place, i))
    again = action.kind is not Kind.RECOMPUTE and (i, action.chunk) in recomputed
    own = done.get((Kind.RECOMPUTE if again else Kind.FORWARD, place, i))
    if action.kind is Kind.RECOMPUTE or own is None:
        return own
    if place < schedule.last:
        return done.get((Kind.BACKWARD, place + 1, i), done.get((Kind.INPUT, place + 1, i)))
    if not schedule.loss_outside:
        return own
    forwards = [done.get((Kind.FORWARD, place, other)) for other in range(schedule.micro_batches)]
    return None if None in forwards else max(end for end in forwards if end is not None)


def _recomputed(actions: tuple[Action, ...]) -> set[tuple[int, int]]:
    """The (micro-batch, chunk) pairs that a rank recomputes."""
    return {(action.micro_batch, action.chunk) for action in actions if action.kind is Kind.RECOMPUTE}


def _held(actions: tuple[Action, ...]) -> tuple[int, int]:
    """The largest numbers of activations, and of inputs for recomputation, that a rank holds at a time."""
    again = _recomputed(actions)
    activations = inputs = most_activations = most_inputs = 0
    for action in actions:
        recomputed = (action.micro_batch, action.chunk) in again
        if action.kind is Kind.FORWARD and recomputed:
            inputs += 1
        elif action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            activations += 1
        most_activations, most_inputs = max(most_activations, activations), max(most_inputs, inputs)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            activations -= 1
            inputs -= recomputed
    return most_activations, most_inputs
