"""Which stage sends which message to which stage, and in which order.

All of it is computed from the schedule, so every rank knows it of every rank.

[Note: messages]
    Stage i mod p, with p stages, is the origin of micro-batch i: the micro-batch is a part of its input and output.

    ===========  ==========================================  ===============================================
    kind         what                                        from, to
    ===========  ==========================================  ===============================================
    input        hidden states at place 0                    the origin, stage 0
    hidden       hidden states at a later place              the stage of the place before, that of the place
                 hidden states after the last place,         the stage of the last place, the origin
                 unless there is a tail
    layers       intermediate hidden states: the input of    the stage of the place, the origin
                 each layer at a place, if they are wanted
    loss         the tail's losses of an origin's            the last stage, the origin
                 micro-batches (``micro_batch``: origin)
    *_grad       the gradient of each of these               the other way round
    ===========  ==========================================  ===============================================
"""

from __future__ import annotations

from typing import NamedTuple

from .messages import Message
from .schedule import Action, Kind, Schedule

Route = tuple[int, Message]
"""The stage at the other end of a message, and the message."""

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT)


class Pass(NamedTuple):
    """A pass through the pipeline.

    Attributes:
        schedule: the actions of all stages.
        forward, backward: whether the pass has these actions.
        tail: whether the loss is computed inside the pipeline.
        intermediates: whether intermediate hidden states, or their gradients, are sent.
        input_grads: for each origin, whether it wants the gradient of its input.
    """

    schedule: Schedule
    forward: bool
    backward: bool
    tail: bool = False
    intermediates: bool = False
    input_grads: tuple[bool, ...] = ()

    def own(self, stage: int) -> range:
        """The micro-batches whose origin is ``stage``."""
        return range(stage, self.schedule.micro_batches, self.schedule.stages)

    def outputs(self, micro_batch: int, place: int) -> list[Message]:
        """What a place sends to the origin of a micro-batch in forward."""
        messages = [Message("layers", micro_batch, place)] if self.intermediates else []
        if place == self.schedule.last and not self.tail:
            messages.append(Message("hidden", micro_batch, place + 1))
        return messages

    def actions(self, stage: int) -> list[Action]:
        """The actions of a stage, in order."""
        actions = self.schedule.actions[stage]
        return [a for a in actions if (self.forward if a.kind is Kind.FORWARD else self.backward)]

    def before(self, stage: int) -> list[Route]:
        """What a stage sends before its actions."""
        if self.forward:
            return [(0, Message("input", i, 0)) for i in self.own(stage)]
        places = reversed(range(self.schedule.last + 1))
        return [(self.schedule.stage(k), _grad(m)) for k in places for i in self.own(stage) for m in self.outputs(i, k)]

    def takes(self, stage: int, action: Action) -> list[Route]:
        """What a stage receives for an action."""
        i, place, at = action.micro_batch, self.schedule.place(stage, action.chunk), self.schedule.stage
        origin = i % self.schedule.stages
        routes: list[Route] = []
        if action.kind is Kind.FORWARD:
            routes = [(at(place - 1), Message("hidden", i, place)) if place else (origin, Message("input", i, 0))]
        elif action.kind in _BACKWARDS:
            routes = [(origin, _grad(message)) for message in self.outputs(i, place)]
            if place < self.schedule.last:
                routes.append((at(place + 1), Message("hidden_grad", i, place + 1)))
        return routes

    def during(self, stage: int, action: Action) -> list[Route]:
        """What a stage sends after an action."""
        i, place, at = action.micro_batch, self.schedule.place(stage, action.chunk), self.schedule.stage
        origin = i % self.schedule.stages
        routes: list[Route] = []
        if action.kind is Kind.FORWARD:
            if place < self.schedule.last:
                routes.append((at(place + 1), Message("hidden", i, place + 1)))
            routes += [(origin, message) for message in self.outputs(i, place)]
        elif action.kind in _BACKWARDS:
            if place:
                routes.append((at(place - 1), Message("hidden_grad", i, place)))
            elif self.input_grads[origin]:
                routes.append((origin, Message("input_grad", i, 0)))
        return routes

    def after(self, stage: int) -> list[Route]:
        """What a stage sends after its actions."""
        last = self.schedule.last
        if not (self.tail and self.forward and stage == self.schedule.stage(last)):
            return []
        return [(origin, Message("loss", origin, last)) for origin in range(self.schedule.stages)]

    def results(self, stage: int) -> list[Route]:
        """What a stage receives after its actions, for its own micro-batches."""
        routes: list[Route] = []
        if self.forward:
            places = range(self.schedule.last + 1)
            routes += [(self.schedule.stage(k), m) for i in self.own(stage) for k in places for m in self.outputs(i, k)]
        if self.forward and self.tail:
            routes.append((self.schedule.stage(self.schedule.last), Message("loss", stage, self.schedule.last)))
        if self.backward and self.input_grads[stage]:
            routes += [(0, Message("input_grad", i, 0)) for i in self.own(stage)]
        return routes

    def routes(self, stage: int) -> list[Route]:
        """Everything that a stage sends, in order."""
        during = [route for action in self.actions(stage) for route in self.during(stage, action)]
        return [*self.before(stage), *during, *self.after(stage)]

    def expected(self, stage: int) -> dict[int, list[Message]]:
        """What each other stage sends to ``stage``, in order."""
        others = [peer for peer in range(self.schedule.stages) if peer != stage]
        return {peer: [message for target, message in self.routes(peer) if target == stage] for peer in others}


def _grad(message: Message) -> Message:
    return message._replace(kind=f"{message.kind}_grad")
