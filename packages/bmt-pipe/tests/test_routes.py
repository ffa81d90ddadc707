"""Messages of a pass: each is sent once and expected once, in the same order, and no stage waits for ever.

The last holds by NCCL's rules, too: see bmt_comm.testing.rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_comm.testing.rules import MESSAGES, Operation, Rules
from bmt_comm.testing.rules import Message as Transfer
from bmt_pipe import SCHEDULES, Kind, Schedule, make_schedule, recompute
from bmt_pipe.messages import Message
from bmt_pipe.routes import Pass


class Sent(NamedTuple):
    """A message with its source and target."""

    source: int
    target: int
    message: Message


class Step(NamedTuple):
    """The next step of a stage: sending a message, or waiting for one."""

    sends: bool
    peer: int
    message: Message


def flags(draw: st.DrawFn, count: int) -> tuple[bool, ...]:
    return tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """A pass as calls make them: forward, backward, or both with the loss inside, with or without gradients."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    p, per_stage = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 3)) if name in ("recompute", "interleaved_1f1b") else None
    schedule = make_schedule(name, p, p * per_stage, chunks)
    if chunks == 2 and name == "recompute" and draw(st.booleans()):
        schedule = recompute(p, p * per_stage, 2, v_shaped=True)
    if name != "recompute":
        return Pass(schedule, True, draw(st.booleans()), tail=True, input_grads=flags(draw, p))
    if draw(st.booleans()):
        return Pass(schedule, True, False, intermediates=draw(st.booleans()))
    return Pass(schedule, False, True, intermediates=draw(st.booleans()), input_grads=flags(draw, p))


def wanted(what: Pass) -> list[Sent]:
    """All messages of a pass, derived from what a pipeline must move."""
    schedule = what.schedule
    at = {schedule.place(stage, chunk): stage for stage in range(schedule.stages) for chunk in range(schedule.chunks)}
    p, places = schedule.stages, schedule.stages * schedule.chunks
    last = places - 1
    messages = []
    for i in range(schedule.micro_batches):
        origin = i % p
        if what.forward:
            messages.append(Sent(origin, 0, Message("input", i, 0)))
            messages += [Sent(at[k - 1], at[k], Message("hidden", i, k)) for k in range(1, places)]
            if not what.tail:
                messages += [Sent(at[k], origin, Message("layers", i, k)) for k in range(places) if what.intermediates]
                messages.append(Sent(at[last], origin, Message("hidden", i, places)))
        if what.backward:
            if not what.tail:
                messages += [
                    Sent(origin, at[k], Message("layers_grad", i, k)) for k in range(places) if what.intermediates
                ]
                messages.append(Sent(origin, at[last], Message("hidden_grad", i, places)))
            messages += [Sent(at[k], at[k - 1], Message("hidden_grad", i, k)) for k in range(1, places)]
            if what.input_grads[origin]:
                messages.append(Sent(0, origin, Message("input_grad", i, 0)))
    if what.tail and what.forward:
        messages += [Sent(at[last], origin, Message("loss", origin, last)) for origin in range(p)]
    return messages


def steps(what: Pass, stage: int) -> Iterator[Step]:
    """What a stage sends and waits for, in order. The inputs of an action determine what it waits for."""
    p, at = what.schedule.stages, what.schedule.stage
    last = p * what.schedule.chunks - 1
    own = range(stage, what.schedule.micro_batches, p)
    yield from (Step(True, *route) for route in what.before(stage))
    for action in what.actions(stage):
        i, place = action.micro_batch, what.schedule.place(stage, action.chunk)
        origin = i % p
        if action.kind is Kind.FORWARD:
            yield (
                Step(False, at(place - 1), Message("hidden", i, place))
                if place
                else Step(False, origin, Message("input", i, 0))
            )
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            if what.intermediates:
                yield Step(False, origin, Message("layers_grad", i, place))
            if place < last or not what.tail:
                yield Step(False, at(place + 1) if place < last else origin, Message("hidden_grad", i, place + 1))
        yield from (Step(True, *route) for route in what.during(stage, action))
    yield from (Step(True, *route) for route in what.after(stage))
    if what.forward and what.tail:
        yield Step(False, at(last), Message("loss", stage, last))
    elif what.forward:
        for i in own:
            places = range(last + 1) if what.intermediates else []
            yield from (Step(False, at(k), Message("layers", i, k)) for k in places)
            yield Step(False, at(last), Message("hidden", i, last + 1))
    if what.backward and what.input_grads[stage]:
        yield from (Step(False, 0, Message("input_grad", i, 0)) for i in own)


def run(what: Pass, order: list[int]) -> dict[tuple[int, int], list[Message]]:
    """Let stages take turns in ``order`` until all have finished. Returns what each sent to each.

    A stage sends without waiting, and receives from each other one in the order in which it expects messages.
    """
    stages = what.schedule.stages
    expected = [what.expected(stage) for stage in range(stages)]
    received: Counter[tuple[int, int]] = Counter()
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    doing = [steps(what, stage) for stage in range(stages)]
    waiting = [next(one, None) for one in doing]

    def can_go_on(stage: int, step: Step) -> bool:
        way = (step.peer, stage)
        if step.peer == stage:
            assert step.message in sent[way], f"stage {stage} needs {step.message} before it has made it"
            return True
        index = expected[stage][step.peer].index(step.message)  # ValueError: it is not expected
        while received[way] <= index and received[way] < len(sent[way]):
            arriving = sent[way][received[way]]
            assert arriving == expected[stage][step.peer][received[way]]
            received[way] += 1
        return received[way] > index

    while any(waiting):
        moved = False
        for stage in order:
            step = waiting[stage]
            while step is not None and (step.sends or can_go_on(stage, step)):
                if step.sends:
                    sent[stage, step.peer].append(step.message)
                step = waiting[stage] = next(doing[stage], None)
                moved = True
        assert moved, f"all stages wait: {dict(enumerate(waiting))}"
    return sent


@given(passes(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_every_message_is_sent_and_expected_once_and_nobody_waits_for_ever(what, random) -> None:
    stages = range(what.schedule.stages)
    every = wanted(what)
    sent = [Sent(stage, target, message) for stage in stages for target, message in what.routes(stage)]
    assert Counter(sent) == Counter(every)
    assert max(Counter(sent).values()) == 1

    order = list(stages)
    random.shuffle(order)
    done = run(what, order)
    assert Counter(Sent(*way, message) for way, messages in done.items() for message in messages) == Counter(every)
    for stage in stages:
        orders = what.expected(stage)
        assert set(orders) == set(stages) - {stage}
        for peer, messages in orders.items():
            assert messages == done[peer, stage], f"from {peer} to {stage}"


def run_by_nccls_rules(what: Pass, ahead: bool, key: Callable[[int, int], Hashable], random: Random) -> str:
    """Let stages send and receive as :class:`bmt_pipe.channels.Channels` does, in a random order, on the communicators
    that ``key`` names by source and target. Returns why they hang, or nothing.

    Args:
        ahead: whether the receive after the one that is waited for starts, too, as it does when forms are known.
    """
    rules = Rules(what.schedule.stages)
    ended: set[Operation] = set()

    def waits(stage: int) -> Iterator[Operation]:
        """Run a stage. Yields each operation that it waits for."""
        numbers = iter(range(10**9))

        def start(source: int, target: int, message: Message) -> Operation:
            sends = source == stage
            transfer = Transfer(sends, target if sends else source, hash(message))  # a size: what meets must match
            way = key(source, target)
            operation = Operation(stage, next(numbers), way, (source, target), MESSAGES, messages=[transfer])
            ended.update(rules.post(operation))
            return operation

        expected = {peer: iter(messages) for peer, messages in what.expected(stage).items()}
        receiving: dict[Message, Operation] = {}

        def receive_next(peer: int) -> bool:
            message = next(expected[peer], None)
            if message is not None:
                receiving[message] = start(peer, stage, message)
            return message is not None

        for step in steps(what, stage):
            if step.peer == stage:
                continue
            if step.sends:
                start(stage, step.peer, step.message)
                continue
            while step.message not in receiving:
                assert receive_next(step.peer)
            if ahead:
                receive_next(step.peer)
            yield receiving[step.message]
        for peer in expected:
            assert not receive_next(peer), "a message is never taken"

    going = {stage: waits(stage) for stage in range(what.schedule.stages)}
    waiting: dict[int, Operation] = {}
    while going and not rules.failure:
        stage = random.choice([s for s in going if s not in waiting or waiting[s] in ended])
        operation = next(going[stage], None)
        if operation is None:
            del going[stage]
            waiting.pop(stage, None)
            rules.leave(stage)
        else:
            waiting[stage] = operation
            rules.wait(stage, operation.number, "a take")
    if not rules.failure:
        assert not rules.unended()
    return rules.failure


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("per_stage", [1, 2, 3])
def test_no_schedule_hangs(name: str, stages: int, per_stage: int) -> None:
    for chunks in (1, 2, 4) if name in ("recompute", "interleaved_1f1b") else (None,):
        schedule = make_schedule(name, stages, stages * per_stage, chunks)
        both = Pass(schedule, True, True, tail=True, input_grads=(True,) * stages)
        passes = [Pass(schedule, True, False), Pass(schedule, False, True, input_grads=(True,) * stages)]
        for what in passes if schedule.loss_outside else [both]:
            assert run_by_nccls_rules(what, True, lambda source, target: (source, target), Random(1)) == ""


@given(passes(), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_channels_never_hang(what: Pass, ahead: bool, random: Random) -> None:
    assert run_by_nccls_rules(what, ahead, lambda source, target: (source, target), random) == ""


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
@pytest.mark.parametrize(
    "key",
    [lambda source, target: "one for all", lambda source, target: (min(source, target), max(source, target))],
    ids=["one communicator", "one of each pair"],
)
def test_fewer_communicators_would_hang(name: str, key: Callable[[int, int], Hashable]) -> None:
    """If both directions share a communicator, a receive that starts early blocks the sends after it."""
    what = Pass(make_schedule(name, 3, 6, 2 if name.startswith("inter") else None), True, True, tail=True)
    what = what._replace(input_grads=(True,) * 3)
    assert "wait for ever" in run_by_nccls_rules(what, True, key, Random(0))


@given(passes())
@settings(max_examples=50, deadline=None)
def test_every_take_is_of_a_message_that_comes(what) -> None:
    """Every message that is sent is used, and every message that is used is sent."""
    for stage in range(what.schedule.stages):
        taken = Counter((step.peer, step.message) for step in steps(what, stage) if not step.sends)
        assert taken == Counter((way.source, way.message) for way in wanted(what) if way.target == stage)
        takes = [route for action in what.actions(stage) for route in what.takes(stage, action)]
        assert [*takes, *what.results(stage)] == [step[1:] for step in steps(what, stage) if not step.sends]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_a_pass_has_the_actions_of_its_half(name: str, stages: int) -> None:
    schedule: Schedule = make_schedule(name, stages, 2 * stages)
    for stage in range(stages):
        forward = Pass(schedule, True, False).actions(stage)
        backward = Pass(schedule, False, True).actions(stage)
        assert {a.kind for a in forward} == {Kind.FORWARD}
        assert Kind.FORWARD not in {a.kind for a in backward}
        assert Counter(forward + backward) == Counter(schedule.actions[stage])
        assert tuple(Pass(schedule, True, True).actions(stage)) == schedule.actions[stage]
