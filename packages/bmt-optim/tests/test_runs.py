"""Runs of neighbouring tensors: the plan by itself, and the views made from it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_optim.runs import Extent, extent_of, flat_over, merge_adjacent, plan_runs


@st.composite
def _extents(draw):
    """Allocations filled with extents, gaps and Nones, shuffled; with the runs that are right."""
    extents, runs, address = [], [], 64
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.sampled_from("ab")), max_size=6))
        limit = address + sum(size + gap for size, gap, _ in sizes)
        previous_key = None
        for size, gap, key in sizes:
            extents.append(Extent(key, address, size, limit))
            if key != previous_key:
                runs.append([])
            runs[-1].append(extents[-1])
            previous_key = None if gap else key
            address += size + gap
        address = limit  # the next allocation begins where this one ends
    nones = draw(st.integers(0, 2))
    order = draw(st.permutations([*extents, *[None] * nones]))
    return order, runs, nones


@given(_extents())
@settings(deadline=None)
def test_a_plan_has_exactly_the_maximal_runs(case):
    order, expected, nones = case
    planned = plan_runs(order)
    assert sorted(i for run in planned for i in run) == list(range(len(order)))
    assert sum(order[run[0]] is None for run in planned) == nones
    got = [[order[i] for i in run] for run in planned if order[run[0]] is not None]
    assert sorted(got, key=lambda r: r[0].start) == sorted(expected, key=lambda r: r[0].start)
    assert planned == sorted(planned, key=min)


def test_neighbours_in_two_allocations_are_not_a_run():
    assert plan_runs([Extent(0, 100, 20, 120), Extent(0, 120, 20, 140)]) == [[0], [1]]


def test_overlapping_extents_are_not_a_run():
    assert plan_runs([Extent(0, 100, 20, 200), Extent(0, 100, 20, 200), Extent(0, 110, 20, 200)]) == [[0], [1], [2]]


def test_extents_leave_out_what_is_empty_or_not_contiguous():
    assert extent_of(torch.empty(0, 3)) is None
    assert extent_of(torch.zeros(3, 2).t()) is None
    x = torch.zeros(10)
    assert extent_of(x[2:5]) == Extent((torch.float32, x.device, None), x.data_ptr() + 8, 12, x.data_ptr() + 40)


def test_merging_keeps_every_element_once_and_needs_no_copy():
    buffer, other = torch.arange(12.0), torch.arange(100.0, 104)
    parts = [buffer[0:2], buffer[2:8].view(2, 3), torch.empty(0), other, buffer[8:9].view(()), buffer[10:12]]
    merged = merge_adjacent([*parts, torch.ones(2, 2).t()])
    assert [m.numel() for m in merged] == [8, 4, 1, 2, 4]
    assert torch.equal(merged[0], buffer[:8])
    merged[0].zero_()
    assert buffer[:8].count_nonzero() == 0


def test_a_flat_view_needs_every_part_in_its_place():
    buffer = torch.arange(12.0)
    parts = [buffer[2:4], buffer[4:8].view(2, 2), buffer[8:11]]
    assert torch.equal(flat_over(parts, [0, 2, 6], 9), buffer[2:11])
    assert flat_over([parts[0], None, parts[2]], [0, 2, 6], 9) is None
    assert flat_over([None, *parts[1:]], [0, 2, 6], 9) is None
    assert flat_over([parts[0], parts[1].clone(), parts[2]], [0, 2, 6], 9) is None
    assert flat_over([parts[0], parts[1].t(), parts[2]], [0, 2, 6], 9) is None
    assert flat_over([parts[0], parts[2], parts[1]], [0, 2, 6], 9) is None


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.int32), (torch.bfloat16, torch.float16)])
def test_tensors_of_two_dtypes_are_not_merged(dtypes):
    storage = torch.zeros(64, dtype=torch.uint8)
    a, b = storage[:32].view(dtypes[0]), storage[32:].view(dtypes[1])
    assert len(merge_adjacent([a, b])) == 2
    assert plan_runs([extent_of(a), extent_of(b)]) == [[0], [1]]
