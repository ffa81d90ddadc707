"""Who sends what to whom, in which order: pure functions of the schedule, so that every rank knows it of all.

[Note: messages]
    Micro-batch i comes from stage i mod p, its origin, whose input and output it is a part of.

    ===========  ======================================  ===============================================
    kind         what                                    from, to
    ===========  ======================================  ===============================================
    input        hidden states at place 0                the origin, stage 0
    hidden       hidden states at a later place          the stage of the place before, that of the place
    output       hidden states behind the last place     the last stage, the origin
    taps         what went into each layer of a chunk    the stage of the place, the origin
    loss         the tail's losses of an origin's        the last stage, the origin
                 micro-batches (``micro_batch``: origin)
    *_grad       the gradient of each of these           the other way round
    ===========  ======================================  ===============================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .messages import Message
from .schedule import Action, Kind, Schedule

Route = tuple[int, Message]
"""The stage that a message goes to, and the message."""

_FIRST_HALF = (Kind.FORWARD,)
_SECOND_HALF = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


class Pass(NamedTuple):
    """What a pass through the pipeline consists of.

    Attributes:
        schedule: the actions of all stages.
        forward, backward: whether actions of this kind are part of it.
        tail: whether the loss is computed inside of the pipeline.
        taps: whether layers' inputs are sent to the origin.
        tap_grads: for each origin and place, whether gradients of these come back.
        input_grads: for each origin, whether it wants the gradient of its input.
    """

    schedule: Schedule
    forward: bool
    backward: bool
    tail: bool = False
    taps: bool = False
    tap_grads: tuple[tuple[bool, ...], ...] = ()
    input_grads: tuple[bool, ...] = ()

    @property
    def stages(self) -> int:
        return self.schedule.stages

    @property
    def last(self) -> int:
        """The last place in the chain of chunks."""
        return self.schedule.last

    def place(self, stage: int, chunk: int) -> int:
        return self.schedule.place(stage, chunk)

    def stage(self, place: int) -> int:
        return self.schedule.stage(place)

    def origin(self, micro_batch: int) -> int:
        return micro_batch % self.stages

    def own(self, stage: int) -> range:
        """The micro-batches of an origin."""
        return range(stage, self.schedule.micro_batches, self.stages)

    def actions(self, stage: int) -> list[Action]:
        kinds = (_FIRST_HALF if self.forward else ()) + (_SECOND_HALF if self.backward else ())
        return [a for a in self.schedule.actions[stage] if a.kind in kinds]

    def before(self, stage: int) -> list[Route]:
        """What a stage sends before its actions."""
        routes = []
        if self.forward:
            routes += [(0, Message("input", i, 0)) for i in self.own(stage)]
        elif self.backward:
            for i in self.own(stage):
                routes.append((self.stage(self.last), Message("output_grad", i, self.last)))
            for place in range(self.last, -1, -1):
                if self.tap_grads and self.tap_grads[stage][place]:
                    routes += [(self.stage(place), Message("taps_grad", i, place)) for i in self.own(stage)]
        return routes

    def during(self, stage: int, action: Action) -> list[Route]:
        """What a stage sends after an action."""
        i, place = action.micro_batch, self.place(stage, action.chunk)
        if action.kind is Kind.FORWARD:
            routes = [(self.origin(i), Message("taps", i, place))] if self.taps else []
            if place < self.last:
                return [(self.stage(place + 1), Message("hidden", i, place + 1)), *routes]
            return routes if self.tail else [(self.origin(i), Message("output", i, place)), *routes]
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            if place > 0:
                return [(self.stage(place - 1), Message("hidden_grad", i, place))]
            if self.input_grads[self.origin(i)]:
                return [(self.origin(i), Message("input_grad", i, 0))]
        return []

    def after(self, stage: int) -> list[Route]:
        """What a stage sends after its actions."""
        if self.tail and self.forward and stage == self.stage(self.last):
            return [(origin, Message("loss", origin, self.last)) for origin in range(self.stages)]
        return []

    def routes(self, stage: int) -> list[Route]:
        """All that a stage sends, in order."""
        return [
            *self.before(stage),
            *(route for action in self.actions(stage) for route in self.during(stage, action)),
            *self.after(stage),
        ]

    def expected(self, stage: int) -> dict[int, list[Message]]:
        """From each other stage, what it sends to ``stage``, in order."""
        return {peer: _addressed(stage, self.routes(peer)) for peer in range(self.stages) if peer != stage}


def _addressed(stage: int, routes: Iterable[Route]) -> list[Message]:
    return [message for target, message in routes if target == stage]
