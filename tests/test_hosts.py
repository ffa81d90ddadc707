"""Collectives over several hosts: memory that the ranks of a host share, and messages between hosts.

Here all ranks are on one machine, and some say that they are on another one.
"""

import contextlib
import datetime
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import bmt_comm.hosts
import bmt_comm.refusals
import bmt_comm.shared_memory
import bmt_kernels
from bmt_comm import REDUCE_OPS, Communicator
from bmt_comm.hosts import HostsCollectives
from bmt_comm.packing import Packing
from bmt_zero import Block, Compression, MixedPrecision, shard

pytestmark = pytest.mark.skipif(
    not bmt_kernels.SharedMemoryExchange.available() or torch.cuda.is_available(),
    reason="ranks are on the CPU of Linux",
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
SIZES = [1, 5, 1000, 200_000]  # elements; the last one is reduced in segments between hosts


@contextlib.contextmanager
def hosts(host_of):
    """A communicator over hosts, and one that sends messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.hosts, "host_identity", lambda: host_of(dist.get_rank()))
        over, messages = (Communicator(dist.new_group()) for _ in range(2))
        assert not over.share_memory()
        yield over, messages


def values(rank, numel, dtype, seed=0):
    found = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return found.to(dtype) if dtype.is_floating_point else (found * 3).abs().to(dtype)


def close(found, expected, op=""):
    exact = op in ("", "max", "min") or not found.is_floating_point()
    tolerance = 0 if exact else 3e-2 if found.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def begun(comm, kind, numel, dtype, seed):
    """An asynchronous collective: its work and its result."""
    mine, op = values(comm.rank, numel, dtype, seed), REDUCE_OPS[seed % len(REDUCE_OPS)]
    if kind == "all_gather":
        out = torch.empty(comm.size * numel, dtype=dtype)
        return comm.all_gather(out, mine, async_op=True), out, ""
    if kind == "reduce_scatter":
        whole, out = values(comm.rank, comm.size * numel, dtype, seed), torch.empty(numel, dtype=dtype)
        return comm.reduce_scatter(out, whole, op, async_op=True), out, op
    if kind == "broadcast":
        return comm.broadcast(mine, seed % comm.size, async_op=True), mine, ""
    return comm.all_reduce(mine, op, async_op=True), mine, op


@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("kind", ["blocks", "in turn"])
def test_results_are_those_of_messages(ctx, kind):
    """Also where ranks wait in different orders, and some wait late."""
    per_host = 2 if ctx.world_size == 4 else 3
    with hosts(lambda rank: rank // per_host if kind == "blocks" else rank % 2) as (over, messages):
        assert isinstance(over._on_host, HostsCollectives)
        calls = [
            (kind, numel, dtype, seed)
            for seed, numel in enumerate([*SIZES, *SIZES])
            for kind in ("all_gather", "reduce_scatter", "broadcast", "all_reduce")
            for dtype in DTYPES
        ]
        random.Random(0).shuffle(calls)
        pace = random.Random(ctx.rank)
        for start in range(0, len(calls), 8):
            pairs = []
            for call in calls[start : start + 8]:
                pairs.append((begun(over, *call), begun(messages, *call)))
                if pace.random() < 0.3:
                    pace.choice(pairs)[0][0].wait()
            for (work, *_), _ in pace.sample(pairs, len(pairs)):
                work.wait()
            for (_, found, op), (work, expected, _) in pairs:
                work.wait()
                close(found, expected, op)
            for (_, found, _), _ in [pair for pair, call in zip(pairs, calls[start:]) if call[0] == "all_reduce"]:
                alike = torch.empty(ctx.world_size, found.numel(), dtype=found.dtype)
                messages.all_gather(alike, found)
                assert torch.equal(alike, found.expand_as(alike))  # bit for bit


def rounded(flat, kind, block):
    """Each number to the nearest 8-bit number of its block."""
    parts = []
    for part in flat.split(block):
        scale = part.abs().max() / (127.0 if kind == "int8" else 448.0)
        scaled = part * scale.reciprocal().nan_to_num(posinf=0.0)
        parts.append((scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale)
    return torch.cat(parts)


def sum_of_hosts(by_rank, host_of, rank, kind, block):
    """What a rank gets of all parts for it: fp32 sums of the hosts, in order, rounded but for its own host's."""
    sums = {}
    for other, part in enumerate(by_rank):
        host = host_of(other)
        sums[host] = sums[host] + part.float() if host in sums else part.float()
    first, *rest = [each if host == host_of(rank) else rounded(each, kind, block) for host, each in sums.items()]
    return sum(rest, first)


@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("order", ["blocks", "in turn"])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_packed_sums_are_of_hosts(ctx, kind, order):
    """With others in flight, waited for in different orders."""
    per_host = 2 if ctx.world_size == 4 else 3
    host_of = (lambda rank: rank // per_host) if order == "blocks" else (lambda rank: rank % 2)
    with hosts(host_of) as (over, messages):
        calls, pace = [], random.Random(ctx.rank)
        for seed, (numel, dtype) in enumerate([(n, d) for n in (1, 37, 1000) for d in (torch.float32, torch.bfloat16)]):
            ranks = range(ctx.world_size)
            sources = [values(rank, len(ranks) * numel, dtype, seed) * 10.0**rank for rank in ranks]
            out = torch.full((numel,), 7.0)
            work = over.packed_reduce_scatter(out, sources[ctx.rank], Packing(kind, 16), async_op=True)
            parts = [each.view(len(ranks), numel)[ctx.rank] for each in sources]
            calls.append((work, out, sum_of_hosts(parts, host_of, ctx.rank, kind, 16)))
            work, out, op = begun(over, "all_reduce", 30_000, torch.float32, seed)
            expected = begun(messages, "all_reduce", 30_000, torch.float32, seed)
            expected[0].wait()
            calls.append((work, out, (expected[1], op)))
        for work, *_ in pace.sample(calls, len(calls)):
            work.wait()
        for _, out, expected in calls:
            if isinstance(expected, tuple):
                close(out, *expected)
            else:
                assert torch.equal(out, expected)


@contextlib.contextmanager
def counted_messages():
    """The bytes of each exchange of messages that this rank begins."""
    sent = []
    exchange = bmt_comm.hosts.DirectExchange.exchange

    def counting(self, sends, recvs, tag):
        sent.append(sum(each.nbytes for rank, each in enumerate(sends) if rank != self.rank))
        return exchange(self, sends, recvs, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.hosts.DirectExchange, "exchange", counting)
        yield sent


@pytest.mark.ranks(6)
def test_packed_bytes_cross_to_another_host_once(ctx):
    """By messages each rank sends to the three of the other host, and two of its own."""
    packing, src = Packing("int8", 64), torch.ones(6 * 1000)
    with hosts(lambda rank: rank // 3) as (over, messages), counted_messages() as sent:
        messages.packed_reduce_scatter(torch.empty(1000), src, packing)
        over.packed_reduce_scatter(torch.empty(1000), src, packing)
    assert sum(sent) == over.traffic["send"].bytes == packing.bytes(1000)
    assert messages.traffic["send"].bytes == (3 + 2) * sum(sent)
    assert over.traffic["reduce_scatter"].bytes == 4 * 4000  # within the host, in fp32


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_compressed_gradients_are_sums_of_hosts(ctx, kind):
    def host_of(rank):
        return rank // 2

    class Linear(torch.nn.Module):
        """Its gradient is what it is called with."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(values(9, 40, torch.float32).view(20, 2))

        def forward(self, x):
            return (self.weight * x).sum(), self.weight.detach().clone()

    grads = [values(rank, 40, torch.float32) * 10.0**rank for rank in range(4)]
    expected = sum_of_hosts([grad.chunk(4)[ctx.rank] for grad in grads], host_of, ctx.rank, kind, 4)
    weights = torch.cat([rounded(part, kind, 4) for part in values(9, 40, torch.float32).chunk(4)])
    precision = MixedPrecision(compression=Compression(kind, kind, 4))
    with hosts(host_of) as (over, _):
        for level in (1, 2, 3):
            block = Block(Linear(), False, level, precision=precision, shard_comm=over, replicate_comm=ctx.alone)
            loss, used = block(grads[ctx.rank].view(20, 2))
            loss.backward()
            [param] = block.parameters()
            assert torch.equal(used.flatten(), weights)
            assert torch.equal(param.grad.to_local().flatten(), expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("numel", [2 * 524288 + 1, 2**21 + 1])
def test_large_sums_of_lengths_that_the_ranks_of_a_host_do_not_divide(ctx, numel):
    with hosts(lambda rank: rank // 2) as (over, _):
        x = torch.full((numel,), float(ctx.rank + 1))
        over.all_reduce(x)
        assert torch.equal(x, torch.full((numel,), 10.0))


@pytest.mark.ranks(4)
def test_bytes_cross_to_another_host_once(ctx):
    with hosts(lambda rank: rank // 2) as (over, _), counted_messages() as sent:
        over.all_gather(torch.empty(4000), torch.ones(1000))
        assert sum(sent) == 4000
        sent.clear()
        over.reduce_scatter(torch.empty(1000), torch.ones(4000))
        assert sum(sent) == 4000
        sent.clear()
        over.all_reduce(torch.ones(20_000))
        assert sum(sent) == 40_000  # this rank's half, one-shot


@pytest.mark.ranks(4)
def test_the_backend_does_all_over_hosts(ctx):
    with hosts(lambda rank: rank // 2):
        ours, theirs = dist.new_group(backend="bmt"), dist.new_group(backend="gloo")
    assert isinstance(ours._shared, HostsCollectives)
    assert not ours.shares_memory
    found = []
    for group in (ours, theirs):
        x = [values(ctx.rank, 40, torch.float32, seed) for seed in range(6)]
        dist.all_reduce(x[0], group=group)
        dist.reduce(x[1], 3, group=group)
        dist.broadcast(x[2], 2, group=group)
        parts = list(torch.empty(4, 40).unbind())
        dist.gather(x[3], parts if ctx.rank == 1 else None, 1, group=group)
        dist.scatter(x[4], list(torch.arange(160.0).view(4, 40).unbind()) if ctx.rank == 2 else None, 2, group=group)
        moved = torch.empty(40)
        dist.all_to_all_single(moved, x[5], group=group)
        dist.barrier(group=group)
        found.append([x[0], x[1] if ctx.rank == 3 else x[0], x[2], *(parts if ctx.rank == 1 else []), x[4], moved])
    torch.testing.assert_close(*found)


def group_over_hosts():
    """A process group "bmt" of four ranks on two hosts."""
    with hosts(lambda rank: rank // 2):
        group = dist.new_group(backend="bmt", timeout=datetime.timedelta(seconds=30))
    assert isinstance(group._shared, HostsCollectives)
    return group


def reduced(x, group):
    return dist.reduce(x, 1, group=group, async_op=True), x, 1


def strided(x, group):
    with torch.inference_mode(False):
        x = torch.ones(2 * len(x))[::2]
    return dist.all_reduce(x, group=group, async_op=True), x, None


def exchanged(x, group):
    out = torch.empty_like(x)
    return dist.all_to_all_single(out, x, group=group, async_op=True), out, ()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("numel", "in_thread"), [(8, False), (400_000, True)])
@pytest.mark.parametrize("call", [reduced, strided, exchanged])
def test_what_begins_in_inference_mode_may_end_outside_of_it(ctx, call, numel, in_thread):
    group = group_over_hosts()
    with torch.inference_mode():
        x = torch.ones(numel)
        before = dist.all_reduce(torch.ones(500_000), group=group, async_op=True)
        if in_thread:  # which begins the next one, too
            before.is_completed()
        work, out, root = call(x, group)
    work.wait()
    before.wait()
    if root in (None, ctx.rank):
        assert out.tolist() == [4.0] * numel
    if root == ():
        assert out.tolist() == [1.0] * numel


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize(("source", "sent", "expected"), [(0, 1, 3), (3, 3, 1), (0, 0, 1), (3, 1, 0)])
def test_parts_of_other_sizes_are_refused_over_hosts(ctx, source, sent, expected):
    """By the two ranks; the others have theirs."""
    sends, receives = [1] * 4, [1] * 4
    if ctx.rank == source:
        sends[2] = sent
    if ctx.rank == 2:
        receives[source] = expected
    out, x = torch.full((sum(receives),), -1.0), torch.full((sum(sends),), float(ctx.rank))
    group = group_over_hosts()
    if ctx.rank in (source, 2):
        told = f"rank {source} sends {4 * sent} bytes to rank 2, whose output takes {4 * expected}"
        with pytest.raises(ValueError, match=told):
            dist.all_to_all_single(out, x, receives, sends, group=group)
    else:
        dist.all_to_all_single(out, x, receives, sends, group=group)
        assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    if ctx.rank in (source, 2):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="in its middle"):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - start < 10


def gathered(x, group, refused):
    dist.all_gather([torch.empty(x.numel() + int(refused)) for _ in range(4)], x, group=group)


def summed(x, group, refused):
    dist.all_reduce(torch.zeros(1).expand(x.numel()) if refused else x, group=group)


def scattered(x, group, refused):
    dist.reduce_scatter(torch.empty(x.numel() // 4 + int(refused)), list(x.chunk(4)), group=group)


def sent_to_all(x, group, refused):
    sizes = [x.numel() + 1, -1, 0, 0] if refused else None
    dist.all_to_all_single(torch.empty_like(x), x, sizes, sizes, group=group)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize(("call", "numel"), [(gathered, 4), (summed, 400_000), (scattered, 400_000), (sent_to_all, 4)])
def test_what_one_rank_is_refused_ends_the_wait_of_all_others(ctx, call, numel, monkeypatch):
    monkeypatch.setattr(bmt_comm.refusals, "_SECONDS", 0.5 + 0.4 * (ctx.rank % 2))  # ranks look at other times
    group, meeting = group_over_hosts(), dist.new_group(backend="gloo")
    x, start = torch.ones(numel), time.monotonic()
    for _ in range(2):  # what all are refused alike changes nothing
        with pytest.raises((RuntimeError, ValueError)):
            call(x, group, True)
        dist.all_reduce(torch.ones(numel), group=group)
    if ctx.rank == 2:
        with pytest.raises((RuntimeError, ValueError)):
            call(x, group, True)
    else:
        with pytest.raises(RuntimeError, match=r"rank 2 is at operation 5, .* which raises"):
            call(x, group, False)
    dist.barrier(meeting)
    with pytest.raises(RuntimeError):
        dist.all_reduce(x, group=group)
    assert time.monotonic() - start < 20


class Alarm(Exception):
    pass


def raise_alarm(*_):
    raise Alarm("on purpose")


@pytest.mark.ranks(4, timeout=60)
def test_a_failure_on_one_rank_that_goes_on_ends_the_waits_on_other_hosts(ctx):
    group, meeting = group_over_hosts(), dist.new_group(backend="gloo")
    x, start = torch.ones(700_000), time.monotonic()
    dist.all_reduce(x, group=group)
    if ctx.rank == 3:
        before = signal.signal(signal.SIGALRM, raise_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            dist.all_reduce(x, group=group)
        signal.signal(signal.SIGALRM, before)
        dist.barrier(meeting)
    else:
        dist.barrier(meeting)
        with pytest.raises(RuntimeError):
            dist.all_reduce(x, group=group)
    assert time.monotonic() - start < 20
    dist.barrier(meeting)


@pytest.mark.ranks(4, timeout=60)
def test_an_abort_ends_receives_over_hosts(ctx):
    group = group_over_hosts()
    meeting = dist.new_group(backend="gloo")
    if ctx.rank == 1:
        work, start = dist.irecv(torch.ones(3), 0, group), time.monotonic()
        threading.Timer(0.3, group.abort).start()
        with pytest.raises(RuntimeError):
            work.wait()
        assert time.monotonic() - start < 20
    dist.barrier(meeting)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("runs", ["who waits", "the thread of the group"])
@pytest.mark.parametrize("numel", [40, 200_000])
def test_a_wait_has_its_limit_over_hosts(ctx, runs, numel):
    with hosts(lambda rank: rank // 2):
        group = dist.new_group(backend="bmt")
    meeting = dist.new_group(backend="gloo")
    start = time.monotonic()
    if ctx.rank != 3:
        work = dist.all_reduce(values(ctx.rank, numel, torch.float32), group=group, async_op=True)
        if runs != "who waits":
            work.is_completed()
            while group.progress._running.acquire(blocking=False):  # until the thread runs it
                group.progress._running.release()
                time.sleep(1e-3)
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(seconds=0.3))
    assert time.monotonic() - start < 20
    dist.barrier(meeting)
    with pytest.raises(RuntimeError):
        dist.all_reduce(values(ctx.rank, numel, torch.float32), group=group)


@pytest.mark.ranks(4)
def test_hosts_of_different_sizes_send_messages(ctx):
    with hosts(lambda rank: int(rank == 3)) as (over, _):
        assert isinstance(over._on_host, bmt_comm.hosts.DirectExchange)
    with hosts(lambda rank: rank) as (over, _):
        assert isinstance(over._on_host, bmt_comm.hosts.DirectExchange)


@pytest.mark.ranks(4)
def test_sharded_training_is_that_on_one_host(ctx):
    results = []
    for host_of in (lambda rank: 0, lambda rank: rank // 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bmt_comm.hosts, "host_identity", lambda host_of=host_of: host_of(dist.get_rank()))
            comm, alone = Communicator(dist.new_group()), ctx.alone
            comm.share_memory()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 20))
        for layer in (model[0], model[2]):
            shard(layer, shard_comm=comm, replicate_comm=alone)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            model(values(ctx.rank, 60, torch.float32, step).view(2, 30)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.full_tensor() if hasattr(p, "full_tensor") else p.gather() for p in model.parameters()])
    for one, several in zip(*results):
        torch.testing.assert_close(one, several, rtol=1e-5, atol=1e-6)
