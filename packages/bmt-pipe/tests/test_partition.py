import time
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_pipe import split_layers

costs_of_layers = st.lists(
    st.one_of(st.integers(0, 20), st.floats(0, 1e6, allow_nan=False), st.sampled_from([0.1, 0.2, 0.3])),
    min_size=1,
    max_size=8,
)


def stage_costs(costs, stages):
    return [sum(Fraction(costs[layer]) for layer in stage) for stage in stages]


def every_partition(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield [range(start, stop) for start, stop in pairwise([0, *inner, num_layers])]


def sort_key(costs, stages):
    """The quantities to minimise, most important first."""
    totals = stage_costs(costs, stages)
    return max(totals), sum(total**2 for total in totals), [-len(stage) for stage in stages]


@settings(deadline=None, max_examples=300)
@given(costs_of_layers, st.data())
def test_no_other_partition_is_better(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    best = min(every_partition(len(costs), num_stages), key=lambda stages: sort_key(costs, stages))
    assert split_layers(costs, num_stages) == best


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=120), st.data())
def test_stages_are_contiguous_complete_and_not_empty(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = split_layers(costs, num_stages)
    assert len(stages) == num_stages
    assert all(len(stage) > 0 for stage in stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "lengths"),
    [(10, 4, [3, 3, 2, 2]), (8, 4, [2, 2, 2, 2]), (5, 5, [1, 1, 1, 1, 1]), (7, 1, [7])],
)
def test_equal_layers_are_spread_evenly_and_earlier_stages_get_the_surplus(num_layers, num_stages, lengths):
    assert [len(stage) for stage in split_layers([0.3] * num_layers, num_stages)] == lengths


def test_a_model_of_realistic_size_takes_little_time():
    start = time.perf_counter()
    stages = split_layers([1.0 + 0.01 * (layer % 7) for layer in range(256)], 64)
    assert time.perf_counter() - start < 5.0
    assert {len(stage) for stage in stages} == {4}


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0], 0, "num_stages=0 must be a positive integer"),
        ([1.0], 1.5, "num_stages=1.5 must be a positive integer"),
        ([1.0, 1.0], 3, "num_stages=3 is more than the 2 layers"),
        ([], 1, "num_stages=1 is more than the 0 layers"),
        ([1.0, -1.0], 1, r"costs\[1\]=-1.0 must be a finite number"),
        ([1.0, float("nan")], 1, r"costs\[1\]=nan must be"),
        ([float("inf"), 1.0], 2, r"costs\[0\]=inf must be"),
    ],
)
def test_wrong_arguments_are_named(costs, num_stages, message):
    with pytest.raises(ValueError, match=message):
        split_layers(costs, num_stages)
