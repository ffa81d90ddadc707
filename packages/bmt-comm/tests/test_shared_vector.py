"""Vectors that ranks share, and those that others read where they lie."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import bmt_comm.shared_vector
from bmt_comm import Communicator
from bmt_comm.shared_memory import SharedMemoryCollectives

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def shares(comm: Communicator) -> bool:
    return isinstance(comm._on_host, SharedMemoryCollectives)


@pytest.mark.ranks(1, 2, 3)
def test_each_rank_sees_what_the_others_write(ctx):
    comm = ctx.world
    vector = comm.shared_vector(3 * comm.size, torch.float32)
    if comm.size == 1 or not shares(comm):
        assert vector is None
        return
    assert not vector.any()
    comm.barrier()
    for value in range(3):
        vector.view(comm.size, 3)[comm.rank] = 10 * value + comm.rank
        comm.barrier()
        expected = 10 * value + torch.arange(comm.size, dtype=torch.float32).repeat_interleave(3)
        assert torch.equal(vector, expected)
        comm.barrier(async_op=True).wait()


@pytest.mark.ranks(2)
def test_the_memory_is_given_back_with_the_tensors(ctx):
    comm = ctx.world
    if not shares(comm):
        return

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:bmt_comm")

    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    vectors = [comm.shared_vector(1 << 12, torch.float32) for _ in range(5)]
    assert mapped() == before + 5
    assert len(os.listdir("/proc/self/fd")) == files
    view = vectors[0][:3]
    vectors.clear()
    gc.collect()
    assert mapped() == before + 1
    view.fill_(1)
    del view
    gc.collect()
    assert mapped() == before


@pytest.mark.ranks(2)
def test_a_rank_without_memory_lets_all_know(ctx):
    comm = ctx.world
    if not shares(comm):
        return
    for victim, name, nothing in ((1, "_map", None), (0, "_create", -1)):
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == victim:
                patch.setattr(bmt_comm.shared_vector, name, lambda *_, result=nothing: result)
            assert comm.shared_vector(8, torch.float32) is None
    assert comm.shared_vector(8, torch.float32) is not None


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_a_vector_that_lies_where_others_read_it_is_reduced_as_another(ctx, dtype, op):
    comm, numel = ctx.world, 7
    works = []
    for step in range(5):
        values = torch.randn(comm.size * numel, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        source = comm.empty(comm.size * numel, dtype)
        source.copy_(values)
        out, expected = source.new_empty(numel), torch.empty(numel, dtype=dtype)
        works.append((comm.reduce_scatter(out, source, op, async_op=True), out, expected))
        comm.reduce_scatter(expected, values.to(dtype), op)
        unused = comm.empty(100, dtype)
        comm.discard(unused)
        if step % 2:  # two are under way
            for work, result, expected in works:
                work.wait()
                assert torch.equal(result, expected)
            works.clear()


@pytest.mark.ranks(2)
def test_vectors_lie_in_the_same_memory_again(ctx):
    comm = ctx.world
    if not shares(comm):
        return
    addresses = set()
    for _ in range(20):
        source = comm.empty(1 << 12, torch.float32).fill_(comm.rank)
        addresses.add(source.data_ptr())
        out = torch.empty(1 << 11)
        comm.reduce_scatter(out, source)
        assert torch.equal(out, torch.ones(1 << 11))
        comm.barrier()
    assert len(addresses) <= 2


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("numel", [7, 3 << 19])  # also more than four steps
def test_one_rank_that_has_no_room_left_copies_and_the_others_do_not_notice(ctx, numel):
    comm = ctx.world
    if not shares(comm):
        return
    exchange = comm._shared._exchange
    for victim in range(comm.size):
        with mock.patch.object(exchange, "reserve", wraps=exchange.reserve) as reserve:
            if comm.rank == victim:
                reserve.side_effect = lambda size: None
            source = comm.empty(comm.size * numel, torch.float32).fill_(comm.rank + 1)
            unused = comm.empty(100, torch.float32)
        comm.discard(unused)
        out = torch.empty(numel)
        with mock.patch.object(exchange, "try_send", wraps=exchange.try_send) as try_send:
            if comm.rank == victim:  # nor is there room at the call
                try_send.side_effect = [False, mock.DEFAULT]
            comm.reduce_scatter(out, source)
        assert try_send.call_count == (2 if comm.rank == victim else 0)
        assert torch.equal(out, torch.full((numel,), comm.size * (comm.size + 1) / 2))
    assert not comm._shared._places
