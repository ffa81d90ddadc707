"""Counting ranks in a store, and comparing what they bring."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bmt_comm.tally import Tally, missing, read_many


@pytest.mark.parametrize("size", [2, 3, 64, 1023, 1024, 6000])
def test_ranks_that_bring_the_same_and_one_that_does_not(size):
    store = dist.HashStore()
    for odd in (False, True):
        tallies = [Tally(store, f"came {odd}", size, "b" if odd and rank == 1 else "a") for rank in range(size)]
        assert [rank for rank, tally in enumerate(tallies) if tally.last] == [size - 1]
        assert all(tally.look() and tally.agrees != odd for tally in tallies)


class Counting:
    """A store that counts requests."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("absent", [[], [0], [17, 255], [*range(200, 256)]])
def test_what_is_missing_is_found_with_few_requests(absent):
    store = Counting(dist.HashStore())
    keys = [f"word/{rank}" for rank in range(256)]
    for rank, key in enumerate(keys):
        if rank not in absent:
            store.set(key, str(rank))
    store.requests = 0
    assert missing(store, keys) == absent
    assert store.requests <= 1 + 16 * len(absent)
    there = [rank for rank in range(256) if rank not in absent]
    store.requests = 0
    assert read_many(store, [keys[rank] for rank in there]) == [str(rank) for rank in there]
    assert store.requests <= 4
