"""Communicators with NCCL's rules on CPU: what gloo forgives is an error, and what is right is as with gloo."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist

from bmt_comm import Communicator, ParallelContext, init_distributed, recv_activations, send_activations, shutdown
from bmt_comm.testing.in_order import WaitCycleError


def pair(ctx: ParallelContext) -> Communicator:
    """Another communicator of all ranks, of which nothing has been used."""
    return Communicator(dist.new_group(list(ctx.world.ranks)))


@pytest.mark.ranks(2, nccl_rules="lazy", timeout=30)
def test_the_first_messages_of_a_pair_block_even_without_a_wait(ctx: ParallelContext) -> None:
    """What the pipeline once did: each rank began with a send, on a communicator for its direction."""
    ways = [pair(ctx), pair(ctx)]
    with pytest.raises(WaitCycleError, match=r"(?s)ranks 0, 1 wait for ever.*rank 0 waits in .*rank 1 waits in "):
        ways[ctx.rank].send(torch.ones(3), 1 - ctx.rank, async_op=True)


@pytest.mark.ranks(2, nccl_rules="eager", timeout=30)
def test_first_messages_block_in_groups_that_were_made_by_all_ranks(ctx: ParallelContext) -> None:
    ways = [pair(ctx), pair(ctx)]
    with pytest.raises(WaitCycleError, match=r"(?s)ranks 0, 1 wait for ever.*first message from \d to \d"):
        ways[ctx.rank].send(torch.ones(3), 1 - ctx.rank, async_op=True)


@pytest.mark.ranks(2, nccl_rules="eager", timeout=30)
def test_a_receive_that_is_posted_ahead_blocks_sends(ctx: ParallelContext) -> None:
    comm, box = pair(ctx), torch.zeros(3)
    comm.send_recv([(torch.ones(3), 1 - ctx.rank)], [(box, 1 - ctx.rank)])
    comm.recv(box, 1 - ctx.rank, async_op=True)
    with pytest.raises(WaitCycleError, match=r"behind its recv of 12 bytes from \d"):
        comm.send(torch.ones(3), 1 - ctx.rank)


@pytest.mark.ranks(3, nccl_rules="lazy", timeout=30)
def test_a_first_batch_needs_all_ranks_of_a_communicator(ctx: ParallelContext) -> None:
    comm = pair(ctx)
    if ctx.rank < 2:
        with pytest.raises(WaitCycleError, match="connect"):
            comm.send_recv([(torch.ones(1), 1 - ctx.rank)], [(torch.ones(1), 1 - ctx.rank)])


@pytest.mark.ranks(3, nccl_rules="eager", timeout=30)
def test_an_eager_group_takes_all_ranks_of_the_job(ctx: ParallelContext) -> None:
    if ctx.rank < 2:
        with pytest.raises(WaitCycleError, match=r"split \[0, 1\]"):
            dist.new_group([0, 1], use_local_synchronization=True)


@pytest.mark.ranks(2, nccl_rules="lazy", timeout=30)
def test_results_are_not_there_before_wait(ctx: ParallelContext) -> None:
    comm, rank, generator = ctx.world, ctx.rank, random.getstate()
    mine = torch.full((2,), float(rank))
    out, part, total = torch.zeros(4), torch.zeros(2), mine.clone()
    works = [
        comm.all_gather(out, mine, async_op=True),
        comm.reduce_scatter(part, torch.arange(4.0), async_op=True),
        comm.all_reduce(total, async_op=True),
    ]
    assert all(bool(tensor.isnan().all()) for tensor in (out, part, total))
    for work in works:
        work.wait()
        work.wait()
        assert work.is_completed()
    assert out.tolist() == [0, 0, 1, 1]
    assert part.tolist() == [0 + 4 * rank, 2 + 4 * rank]
    assert total.tolist() == [1, 1]
    out = torch.full((4,), math.nan)
    out[2 * rank : 2 * rank + 2] = rank
    work = comm.all_gather(out, out[2 * rank : 2 * rank + 2], async_op=True)
    assert out.isnan().sum() == 2  # the part that this rank has sent is there
    work.wait()
    assert out.tolist() == [0, 0, 1, 1]
    assert random.getstate() == generator  # delays are not drawn from the caller's


@pytest.mark.ranks(2, nccl_rules="lazy", timeout=30)
def test_what_is_in_flight_may_not_be_written_into(ctx: ParallelContext) -> None:
    comm, mine, out = ctx.world, torch.ones(2), torch.zeros(4)
    work = comm.all_gather(out, mine, async_op=True)
    mine.add_(1)
    with pytest.raises(RuntimeError, match="while it was sent: all_gather"):
        work.wait()
    work = comm.all_gather(out, mine, async_op=True)
    out[-1 - ctx.rank * 2] = 0
    with pytest.raises(RuntimeError, match="while a result was to arrive: all_gather"):
        work.wait()


@pytest.mark.ranks(2, nccl_rules="lazy", timeout=30)
def test_a_rank_that_skips_a_collective_or_calls_another_one_is_reported(ctx: ParallelContext) -> None:
    if ctx.rank == 0:
        ctx.world.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(WaitCycleError, match="all_reduce"):
        ctx.world.broadcast(torch.ones(2), 0)


@pytest.mark.ranks(3, nccl_rules="eager", timeout=30)
def test_objects_barriers_and_activations(ctx: ParallelContext) -> None:
    comm, rank = ctx.world, ctx.rank
    assert comm.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(3)]
    assert comm.broadcast_object([rank], 2) == [2]
    comm.barrier()
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        send_activations(x, 1, comm).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3, 3]
    elif rank == 1:
        (recv_activations(0, comm) * 3).sum().backward()


@pytest.mark.ranks(4, init=False, nccl_rules="eager", timeout=60)
@pytest.mark.parametrize("sizes", [{"pipe_size": 2, "tp_size": 2}, {"pipe_size": 4}, {"tp_size": 2}])
def test_a_layout_on_a_process_group_that_was_made_elsewhere(sizes: dict[str, int]) -> None:
    """All ranks make all groups, in the same order."""
    dist.init_process_group("in_order")
    ctx = init_distributed(device="cpu", **sizes)
    for source, target in sorted(ctx.pipe_channels):
        channel, token = ctx.pipe_channels[source, target], torch.full((1,), float(ctx.rank))
        assert channel.ranks == tuple(sorted((ctx.pipe.ranks[source], ctx.pipe.ranks[target])))
        (channel.send if ctx.pipe.rank == source else channel.recv)(token, 1 - channel.rank)
        assert token.item() == ctx.pipe.ranks[source]
    assert len(ctx.pipe_channels) == 2 * (ctx.pipe_size - 1)
    ctx.world.barrier()  # a rank that leaves closes what another one may be connecting
    shutdown()
    assert dist.is_initialized()
