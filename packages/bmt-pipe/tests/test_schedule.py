"""Schedules do everything once, end, and wait and hold what the formulas say."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmt_pipe import (
    Action,
    Kind,
    Schedule,
    interleaved_one_forward_one_backward,
    make_schedule,
    one_forward_one_backward,
    recompute,
    simulate,
    zero_bubble_h1,
    zero_bubble_v,
)

F, R, B, I, W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
stages, micro_batches, chunks = st.integers(1, 8), st.integers(1, 24), st.integers(1, 4)


def check_everything_happens_once(schedule, kinds):
    assert len(schedule.actions) == schedule.stages
    wanted = {Action(k, i, c) for k in kinds for i in range(schedule.micro_batches) for c in range(schedule.chunks)}
    for actions in schedule.actions:
        assert Counter(actions) == dict.fromkeys(wanted, 1)


@given(stages, micro_batches, chunks)
def test_recompute(p, m, v):
    schedule = recompute(p, m, v)
    check_everything_happens_once(schedule, (F, R, B))
    timeline = simulate(schedule)
    assert all(held == 1 for held in timeline.activations)
    assert all(held == m * v for held in timeline.inputs)
    if m % p == 0:  # the formula of a pipeline that is always full
        assert set(timeline.waiting) == {Fraction((p - 1) * 3, v)}


@given(stages, micro_batches)
def test_one_forward_one_backward(p, m):
    schedule = one_forward_one_backward(p, m)
    check_everything_happens_once(schedule, (F, B))
    timeline = simulate(schedule)
    assert timeline.activations == tuple(min(p - rank, m) for rank in range(p))
    assert set(timeline.inputs) == {0}
    assert set(timeline.waiting) == {Fraction((p - 1) * 3)}


@given(stages, st.integers(1, 5), chunks)
def test_interleaved(p, groups, v):
    schedule = interleaved_one_forward_one_backward(p, p * groups, v)
    check_everything_happens_once(schedule, (F, B))
    timeline = simulate(schedule)
    assert set(timeline.waiting) == {Fraction((p - 1) * 3, v)}
    if v > 1:
        assert timeline.activations == tuple(
            min(2 * (p - 1 - rank) + (v - 1) * p + 1, p * groups * v) for rank in range(p)
        )


@given(stages, micro_batches)
def test_zero_bubble(p, m):
    schedule = zero_bubble_h1(p, m)
    check_everything_happens_once(schedule, (F, I, W))
    timeline = simulate(schedule)
    assert all(held <= min(p, m) for held in timeline.activations)
    if m >= 2 * p:
        # F + I - W for each other stage, where 1F1B waits for F + I + W.
        assert max(timeline.waiting) == p - 1


@given(stages, micro_batches)
def test_zero_bubble_v(p, m):
    schedule = zero_bubble_v(p, m)
    check_everything_happens_once(schedule, (F, I, W))
    timeline = simulate(schedule)
    assert all(held <= 2 * min(p, m) for held in timeline.activations)  # as 1F1B; each chunk has half of the layers
    if m >= 2 * p:
        assert 2 * max(timeline.waiting) <= max(simulate(zero_bubble_h1(p, m)).waiting)


@given(stages, micro_batches)
def test_recomputation_in_a_v_shaped_pipeline(p, m):
    schedule = recompute(p, m, 2, v_shaped=True)
    check_everything_happens_once(schedule, (F, R, B))
    timeline = simulate(schedule)
    assert all(held == 1 for held in timeline.activations)
    assert all(held == 2 * m for held in timeline.inputs)
    assert max(timeline.waiting) <= (p - 1) * 3


@given(stages, chunks, st.booleans())
def test_every_chunk_has_one_place(p, v, v_shaped):
    schedule = recompute(p, 1, 2, True) if v_shaped else recompute(p, 1, v)
    places = {schedule.place(stage, chunk): stage for stage in range(p) for chunk in range(schedule.chunks)}
    assert sorted(places) == list(range(schedule.last + 1))
    assert all(schedule.stage(place) == stage for place, stage in places.items())
    if v_shaped:
        assert (places[0], places[p - 1], places[p], places[schedule.last]) == (0, p - 1, p - 1, 0)


@given(stages, micro_batches, st.lists(st.integers(1, 9), min_size=5, max_size=5))
def test_none_stops_whatever_the_costs(p, m, costs):
    given_costs = dict(zip((F, R, B, I, W), costs))
    plain = (recompute(p, m, 2), one_forward_one_backward(p, m), zero_bubble_h1(p, m))
    for schedule in (*plain, recompute(p, m, 2, True), zero_bubble_v(p, m)):
        timeline = simulate(schedule, given_costs)
        for rank, actions in enumerate(schedule.actions):
            work = sum(Fraction(given_costs[a.kind]) / schedule.chunks for a in actions)
            assert timeline.length == work + timeline.waiting[rank]
            for (start, end), later in zip(zip(timeline.starts[rank], timeline.ends[rank]), timeline.starts[rank][1:]):
                assert start < end <= later


def test_the_figures_of_eight_stages_and_32_micro_batches():
    waiting = {v: simulate(recompute(8, 32, v)).waiting[0] / (32 * 4) for v in (1, 2, 4)}
    assert {v: round(float(share) * 100, 1) for v, share in waiting.items()} == {1: 16.4, 2: 8.2, 4: 4.1}


def test_ranks_that_wait_for_each_other_are_named():
    stuck = Schedule(2, 1, 1, False, ((Action(F, 0), Action(B, 0)), (Action(B, 0), Action(F, 0))))
    with pytest.raises(ValueError, match="never ends: rank 0 waits to do B0, rank 1 waits to do B0"):
        simulate(stuck)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (recompute, (0, 1), "stages=0 must be a positive integer"),
        (one_forward_one_backward, (2, -1), "micro_batches=-1"),
        (interleaved_one_forward_one_backward, (2, 2, 1.5), "chunks=1.5"),
        (interleaved_one_forward_one_backward, (2, 3, 2), "micro_batches=3 must be a multiple of the 2 stages"),
        (zero_bubble_h1, (None, 1), "stages=None"),
        (zero_bubble_v, (1, 0), "micro_batches=0"),
        (recompute, (2, 2, 3, True), "chunks=3 must be 2 in a V-shaped pipeline"),
    ],
)
def test_numbers_that_cannot_be_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_schedules_have_names():
    assert make_schedule("recompute", 4, 8, 2) == recompute(4, 8, 2)
    assert make_schedule("1f1b", 4, 8) == one_forward_one_backward(4, 8)
    assert make_schedule("interleaved_1f1b", 4, 8, 2) == interleaved_one_forward_one_backward(4, 8, 2)
    assert make_schedule("zero_bubble_h1", 4, 8) == zero_bubble_h1(4, 8)
    assert make_schedule("zero_bubble_v", 4, 8) == make_schedule("zero_bubble_v", 4, 8, 2) == zero_bubble_v(4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("gpipe", 2, 2),
            "no schedule 'gpipe'; choose one of recompute, 1f1b, interleaved_1f1b, zero_bubble_h1, zero",
        ),
        (("1f1b", 2, 2, 2), "chunks=2 must be 1 for '1f1b'; only recompute and interleaved_1f1b take any number"),
        (("zero_bubble_h1", 2, 2, 0), "chunks=0 must be 1 for 'zero_bubble_h1'"),
        (("zero_bubble_v", 2, 2, 1), "chunks=1 must be 2 for 'zero_bubble_v'"),
        (("recompute", 2, 0), "micro_batches=0 must be"),
    ],
)
def test_schedules_that_cannot_be_made_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)
