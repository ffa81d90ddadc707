"""What ranks did is brought together as one timeline."""

import time
from dataclasses import replace

import pytest
import torch

from bmt_pipe import Action, Kind, Recorder, idle_share, make_schedule, mean_costs, simulate
from bmt_pipe.recording import _machine

F, B = Kind.FORWARD, Kind.BACKWARD


class Events:
    """What the recorders of other ranks would report: for each, its machine, its zero, its actions and times."""

    def __init__(self, others):
        self.others = others
        self.size = 1 + len(others)
        self.device = torch.device("cpu")

    def barrier(self):
        pass

    def all_gather_object(self, mine):
        return [mine, *self.others]


def test_waiting_is_what_lies_between_actions():
    recorder = Recorder(Events([]))
    schedule = make_schedule("1f1b", 1, 2)
    for action in schedule.actions[0]:
        time.sleep(0.02)
        with recorder.action(action):
            time.sleep(0.01)
    timeline = recorder.timeline(schedule)
    (starts,), (ends,) = timeline.starts, timeline.ends
    assert starts[0] == 0
    assert timeline.measured
    assert timeline.length == ends[-1]
    assert all(end - start >= 0.01 for start, end in zip(starts, ends))
    assert all(later - end >= 0.02 for end, later in zip(ends, starts[1:]))
    gaps = sum(later - end for end, later in zip(ends, starts[1:]))
    assert timeline.waiting == pytest.approx((gaps,))
    assert idle_share(timeline) == pytest.approx((gaps / ends[-1],))
    assert timeline.activations == simulate(schedule).activations


def test_ranks_of_one_machine_are_compared_by_its_clock_and_others_from_the_barrier_on():
    here, there = _machine(), "another machine"
    schedule = make_schedule("1f1b", 3, 1)
    recorder = Recorder(Events([]))
    zero = recorder._zero
    late = 0.5  # this long after the first rank, the second one came back from the barrier
    recorder.comm = Events(
        [
            (here, zero + late, [(Action(F, 0), 1.0, 2.0), (Action(B, 0), 3.0, 4.0)]),
            (there, zero + 1e6, [(Action(F, 0), 1.0, 2.0), (Action(B, 0), 3.0, 4.0)]),
        ]
    )
    recorder._actions = [(Action(F, 0), zero + 1.0, zero + 2.0), (Action(B, 0), zero + 3.0, zero + 4.0)]
    timeline = recorder.timeline(schedule)
    # The barrier ended here when the later of the two ranks came back from it.
    assert timeline.starts[0] == pytest.approx((0.0, 2.0))
    assert timeline.starts[1] == pytest.approx((late, 2.0 + late))
    assert timeline.starts[2] == pytest.approx((late, 2.0 + late))
    assert timeline.length == pytest.approx(3.0 + late)
    assert timeline.waiting == pytest.approx((1.0 + late,) * 3)


@pytest.mark.ranks(2, pipe_size=2, timeout=60)
def test_all_ranks_get_the_same_timeline_in_which_gradients_come_after_what_they_are_of(ctx):
    schedule = make_schedule("recompute", 2, 3)
    recorder = Recorder(ctx.pipe)
    box = torch.zeros(1, device=ctx.device)
    for run in range(2):
        if run:
            recorder.restart()
        for action in schedule.actions[ctx.pipe_rank]:
            if action.kind is (B if ctx.pipe_rank == 0 else F):
                ctx.pipe.recv(box, 1 - ctx.pipe_rank)
            with recorder.action(action):
                torch.ones(64, 64, device=ctx.device).exp()
            if action.kind is (F if ctx.pipe_rank == 0 else B):
                ctx.pipe.send(box, 1 - ctx.pipe_rank)
    timeline = recorder.timeline(schedule)
    assert ctx.pipe.all_gather_object(timeline) == [timeline] * 2
    assert min(starts[0] for starts in timeline.starts) == 0
    places = [{action: index for index, action in enumerate(actions)} for actions in schedule.actions]
    allowed = 0 if ctx.device.type == "cpu" else 1e-3  # each GPU has its own clock
    for micro_batch in range(3):
        forward, backward = Action(F, micro_batch), Action(B, micro_batch)
        assert timeline.ends[0][places[0][forward]] <= timeline.starts[1][places[1][forward]] + allowed
        assert timeline.ends[1][places[1][backward]] <= timeline.starts[0][places[0][backward]] + allowed
    for starts, ends, waiting in zip(timeline.starts, timeline.ends, timeline.waiting):
        assert list(starts) == sorted(starts)
        assert waiting == pytest.approx(timeline.length - sum(ends) + sum(starts))

    # Ranks that did something else are named, everywhere.
    with pytest.raises(ValueError, match="a schedule of 3 stages was not run by 2 ranks"):
        recorder.timeline(make_schedule("1f1b", 3, 3))
    if ctx.pipe_rank == 1:
        with recorder.action(Action(B, 0)):
            pass
    with pytest.raises(ValueError, match=r"rank 1 recorded B0 as its action 9, where the schedule has nothing; call"):
        recorder.timeline(schedule)


def test_an_action_that_fails_is_not_recorded():
    recorder = Recorder(Events([]))
    schedule = make_schedule("recompute", 1, 1)
    with pytest.raises(RuntimeError, match="broken"), recorder.action(schedule.actions[0][0]):
        raise RuntimeError("broken")
    with pytest.raises(ValueError, match="rank 0 recorded nothing as its action 0, where the schedule has F0"):
        recorder.timeline(schedule)


def test_planning_with_what_was_measured_gives_the_costs_back():
    schedule = make_schedule("recompute", 3, 6, chunks=2)
    costs = {Kind.FORWARD: 3, Kind.RECOMPUTE: 2, Kind.BACKWARD: 5}
    timeline = simulate(schedule, costs)
    assert mean_costs(schedule, timeline) == costs
    assert simulate(schedule, mean_costs(schedule, timeline)) == timeline
    assert idle_share(timeline) == pytest.approx([float(w / timeline.length) for w in timeline.waiting])
    assert idle_share(replace(timeline, length=0, waiting=(0, 0, 0))) == (0, 0, 0)
