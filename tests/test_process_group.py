"""The backend "bmt" of torch.distributed against gloo: every collective, and what stands on them."""

import contextlib
import copy
import datetime
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import bmt_comm
import bmt_comm.hosts
import bmt_comm.process_group
import bmt_comm.progress
import bmt_comm.shared_memory
import bmt_kernels.messages
import bmt_kernels.shared_memory
from bmt_comm._compat import all_gather_single, reduce_scatter_single
from bmt_comm.work import DONE

OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
SIZES = [1, 6, 300_000]  # the last one, in four bytes, in several steps


@contextlib.contextmanager
def job(seconds=30.0, apart=False):
    """The default process group on shared memory, and one of gloo. ``apart``: as if each rank had a host of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(bmt_comm.hosts, "host_identity", lambda: int(os.environ["RANK"]))
        dist.init_process_group("bmt", timeout=datetime.timedelta(seconds=seconds))
    try:
        assert dist.group.WORLD.shares_memory != apart
        yield dist.group.WORLD, dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()


def tensors(count, numel, dtype, rank):
    """This rank's: small integers, of which every dtype holds sums and products."""
    generator = torch.Generator().manual_seed(97 * rank + numel)
    high = 2 if dtype == torch.bool else 5
    return list(torch.randint(0, high, (count, numel), generator=generator).to(dtype))


def reductions():
    for op, dtype in itertools.product(OPS, [*FLOATS, *INTEGERS]):
        if dtype not in FLOATS or op not in ("BAND", "BOR", "BXOR"):
            yield getattr(dist.ReduceOp, op), dtype


def collectives(size, rank):
    """Each collective: its name, and a function of group and async_op that returns a work and what it has written."""

    for numel in SIZES:
        for op, dtype in reductions():
            if numel == SIZES[-1] and dtype not in (torch.float32, torch.uint8):
                continue
            (x,) = tensors(1, numel, dtype, rank)
            many = tensors(size, numel, dtype, rank)

            def all_reduce(group, async_op, x=x, op=op):
                y = x.clone()
                return dist.all_reduce(y, op, group, async_op), [y]

            def reduce(group, async_op, x=x, op=op):
                y = x.clone()
                return dist.reduce(y, 1, op, group, async_op), [y] if rank == 1 else []

            def reduce_scatter(group, async_op, many=many, op=op):
                y = torch.empty_like(many[0])
                return dist.reduce_scatter(y, many, op, group, async_op), [y]

            def reduce_scatter_of_one(group, async_op, many=many, op=op):
                y = torch.empty_like(many[0])
                return reduce_scatter_single(y, torch.cat(many), op, group, async_op), [y]

            for function in (all_reduce, reduce, reduce_scatter, reduce_scatter_of_one):
                yield (f"{function.__name__} {op} {dtype} {numel}", function)

        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            many = tensors(size, numel, dtype, rank)
            x = many[0]

            def broadcast(group, async_op, x=x):
                y = x.clone()
                return dist.broadcast(y, size - 1, group, async_op), [y]

            def all_gather(group, async_op, x=x):
                ys = [torch.empty_like(x) for _ in range(size)]
                return dist.all_gather(ys, x, group, async_op), ys

            def all_gather_of_one(group, async_op, x=x):
                y = x.new_empty(size * len(x))
                return all_gather_single(y, x, group, async_op), [y]

            def gather(group, async_op, x=x):
                ys = [torch.empty_like(x) for _ in range(size)] if rank == 1 else None
                return dist.gather(x, ys, 1, group, async_op), ys or []

            def scatter(group, async_op, many=many):
                y = torch.empty_like(many[0])
                return dist.scatter(y, many if rank == 1 else None, 1, group, async_op), [y]

            def all_to_all_single(group, async_op, many=many):
                y = torch.empty_like(torch.cat(many))
                return dist.all_to_all_single(y, torch.cat(many), None, None, group, async_op), [y]

            def uneven_all_to_all_single(group, async_op, many=many):  # rank r sends r + q + 1 rows to rank q
                splits = [rank + other + 1 for other in range(size)]
                x = torch.cat(many)[:1].expand(sum(splits), 3).contiguous() if many[0].numel() else None
                y = torch.empty_like(x)
                return dist.all_to_all_single(y, x, splits, splits, group, async_op), [y]

            functions = (broadcast, all_gather, all_gather_of_one, gather, scatter)
            for function in (*functions, all_to_all_single, uneven_all_to_all_single):
                yield (f"{function.__name__} {dtype} {numel}", function)


@pytest.mark.ranks(2, 3, init=False)
def test_collectives_do_what_those_of_gloo_do():
    with job() as (ours, gloo):
        size, rank = dist.get_world_size(), dist.get_rank()
        pending = []
        for number, (name, call) in enumerate(collectives(size, rank)):
            _, wanted = call(gloo, False)
            work, found = call(ours, number % 2 == 1)
            pending.append((name, work, found, wanted))
            if number % 7:
                continue
            # Several in flight; waited for in an order of this rank's own, as works or as futures.
            for name, work, found, wanted in pending[:: 1 if rank else -1]:
                if work is not None and number % 3:
                    work.wait()
                    assert work.is_completed()
                elif work is not None:
                    work.get_future().wait()
                for mine, theirs in zip(found, wanted, strict=True):
                    assert torch.equal(mine, theirs), name
            pending = []


@pytest.mark.ranks(2, init=False)
def test_tensors_of_any_strides_and_kind():
    with job() as (ours, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.arange(12.0).view(3, 4).t()[::2] + rank  # not contiguous
        y = x.clone()
        strided = torch.zeros(4, 3).t()[:2].t()[::2]
        strided.copy_(x[:, :2])
        dist.all_reduce(strided)
        assert torch.equal(strided, 2 * x[:, :2] + (1 - 2 * rank))
        out = torch.empty(3, 4).t()
        assert not out.is_contiguous()
        all_gather_single(out, x)
        assert torch.equal(out, torch.cat([x + r - rank for r in range(size)]))
        weight = nn.Parameter(torch.full((3,), 1.0 + rank))
        saved = (weight * weight).sum()
        dist.broadcast(weight, 1)  # not a change that autograd minds
        saved.backward()
        assert weight.tolist() == [2.0] * 3
        with torch.inference_mode():
            y = torch.ones(4)
            work = dist.all_reduce(y, async_op=True)
        work.wait()
        assert y.tolist() == [2.0] * 4
        z = torch.full((2,), complex(rank, 1))
        dist.all_reduce(z)
        assert z.tolist() == [1 + 2j] * 2
        sparse = torch.eye(3).to_sparse() * (1 + rank)
        dist.all_reduce(sparse)
        assert torch.equal(sparse.to_dense(), 3 * torch.eye(3))
        empty = torch.empty(0)
        dist.all_reduce(empty)
        # Objects, single messages, barriers, other groups.
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(size)]
        box = [rank]
        dist.broadcast_object_list(box, 1)
        assert box == [1]
        message = torch.full((2,), float(rank))
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, message, 1 - rank), dist.P2POp(dist.irecv, y[:2], 1 - rank)]
        )
        for work in works:
            work.wait()
        assert y.tolist()[:2] == [1.0 - rank] * 2
        if rank == 0:
            dist.send(message, 1, tag=5)
        else:
            assert dist.recv(message, tag=5) == 0  # from any
        dist.barrier()
        ours.monitored_barrier(datetime.timedelta(seconds=20))
        alone = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(message, group=alone)
        with dist._coalescing_manager(group=ours, async_ops=True) as manager:
            a, b = torch.ones(3), torch.ones(2)
            dist.all_reduce(a)
            dist.all_reduce(b)
        manager.wait()
        assert a.tolist() + b.tolist() == [2.0] * 5
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_gather([torch.empty(3)] * size, torch.empty(4))


@pytest.mark.ranks(3, init=False)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about all_reduce_coalesced
@pytest.mark.parametrize("numel", [4, 300_000])
def test_all_reduces_of_one_call_read_what_was_there_before_it(numel):
    with job() as groups:
        rank = dist.get_rank()

        def twice(group, x):
            dist.all_reduce_coalesced([x, x], group=group)

        def overlapping(group, x):
            dist.all_reduce_coalesced([x[: -numel // 2], x[numel // 4 :]], group=group)

        def strided(group, x):
            dist.all_reduce_coalesced([x[::2], x[numel // 2 :]], group=group)

        def managed(group, x):
            with dist._coalescing_manager(group=group):
                dist.all_reduce(x, group=group)
                dist.all_reduce(x, group=group)

        for call in (twice, overlapping, managed):
            found = [(rank + 1.0) * torch.arange(numel) for _ in groups]
            for group, x in zip(groups, found, strict=True):
                call(group, x)
            assert torch.equal(*found), call.__name__
        x = (rank + 1.0) * torch.arange(numel)  # gloo does not write the elements that a strided one has
        strided(groups[0], x)
        assert torch.equal(x[::2], 6.0 * torch.arange(numel)[::2])


@pytest.mark.ranks(3, init=False)
@pytest.mark.parametrize("numel", [3, 1_000_000])
def test_outputs_may_overlap_inputs(numel):
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()

        def made(sender):
            return torch.arange(float(numel * size)) + 10 * sender

        everyone = [made(r) for r in range(size)]
        total = sum(everyone).split(numel)
        for begin in (0, 1, numel - 1, numel, 2 * numel):
            x = made(rank)
            out = x[begin : begin + numel]
            reduce_scatter_single(out, x)
            assert torch.equal(out, total[rank]), begin
            x = made(rank)
            out = x[begin : begin + numel]
            dist.reduce_scatter(out, list(x.split(numel)))
            assert torch.equal(out, total[rank]), begin
            out = torch.empty(numel * size)
            out[begin : begin + numel] = everyone[rank][:numel]
            all_gather_single(out, out[begin : begin + numel])
            assert torch.equal(out, torch.cat([x[:numel] for x in everyone])), begin
        # Of two collectives in one call, one writes what the other reads.
        x, y = made(rank), made(rank)
        with dist._coalescing_manager():
            reduce_scatter_single(y[:numel], x)
            reduce_scatter_single(x[:numel], y)
        assert torch.equal(x[:numel], total[rank])
        assert torch.equal(y[:numel], total[rank])
        x = made(rank)
        dist.all_to_all_single(x, x)
        assert torch.equal(x, torch.cat([other.split(numel)[rank] for other in everyone]))
        x = made(rank)  # rank 0 sends all but two elements to rank 1, and receives as many from it
        sent = [[1, numel * size - 2, 1], [numel * size - 2, 1, 1], [1, 1, numel * size - 2]][rank]
        dist.all_to_all_single(x, x, sent, sent)
        splits = [other.split(s) for other, s in zip(everyone, splits_of_all(numel * size), strict=True)]
        assert torch.equal(x, torch.cat([parts[rank] for parts in splits]))


def splits_of_all(numel):
    return [[1, numel - 2, 1], [numel - 2, 1, 1], [1, 1, numel - 2]]


@pytest.mark.ranks(2, init=False)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about quantized tensors
def test_tensors_without_plain_memory_are_refused_as_by_gloo():
    with job():
        size = dist.get_world_size()
        x = torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8)
        for call in (
            dist.all_reduce,
            lambda x: dist.broadcast(x, 0),
            lambda x: dist.all_gather([torch.empty_like(x) for _ in range(size)], x),
        ):
            with pytest.raises(NotImplementedError, match="Quantized"):
                call(x)
        plain = torch.ones(3)
        dist.all_reduce(plain)
        assert plain.tolist() == [2.0] * 3


@pytest.mark.ranks(4, init=False)
def test_groups_that_are_split_off_share_memory():
    with job() as (ours, _):
        rank, limit = dist.get_rank(), datetime.timedelta(seconds=20)
        for members in ([3, 1], [1, 3], [0, 2]):  # the first two have one name
            group = ours.split_group(members, timeout=limit)
            if rank not in members:
                assert group is None
                continue
            assert group.shares_memory
            assert group.rank() == sorted(members).index(rank)
            assert group.group_name
            x = torch.tensor([float(rank)])
            group.allreduce([x]).wait()
            assert x.item() == sum(members)
            inner = group.split_group([1], timeout=limit)
            assert (inner is not None) == (rank == max(members))


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("lengths", [[1, 2, 3], [0, 700_000, 5]])
def test_reduce_scatters_in_parts_of_any_lengths(lengths):
    with job() as groups:
        rank, size = dist.get_rank(), dist.get_world_size()
        found = []
        for group in groups:
            out = torch.empty(lengths[rank])
            dist.reduce_scatter(out, [torch.full((n,), 1.0 + rank) for n in lengths[:size]], group=group)
            found.append(out)
        assert torch.equal(*found)
        assert found[0].tolist()[:1] == [sum(range(1, size + 1))] * min(1, lengths[rank])


@pytest.mark.ranks(2, init=False)
def test_asking_again_and_again_whether_a_collective_is_done_keeps_nothing():
    with job() as (ours, gloo):
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            for _ in range(10_000):
                assert not work.is_completed()
            assert ours.progress._news.qsize() <= 2
        dist.barrier(gloo)
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(3))
        dist.barrier(gloo)


@pytest.mark.ranks(4, init=False)
def test_groups_spin_only_where_all_ranks_of_the_job_have_a_processor(monkeypatch):
    spin = bmt_kernels.shared_memory.SPIN
    for count in (2, 4):
        for module in (bmt_kernels.shared_memory, bmt_kernels.messages):
            monkeypatch.setattr(module, "processors", lambda count=count: count)
        for told in ("4", "", "four"):
            wanted = 0.0 if told == "4" and count == 2 else spin
            monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
            with job():
                pair, _ = dist.new_subgroups(2)
                shared = pair._shared
                assert [shared._exchange._spin, shared.messages._spin] == [wanted] * 2
                comm = bmt_comm.Communicator(dist.new_subgroups(2, backend="gloo")[0], torch.device("cpu"))
                assert comm.share_memory()
                assert comm._shared._exchange._spin == wanted


@pytest.mark.ranks(2, init=False)
def test_a_group_of_one_rank_takes_what_a_group_of_several_takes():
    with job() as (ours, _):
        rank = dist.get_rank()
        alone = [dist.new_group([r]) for r in range(2)][rank]

        def taken(call):
            results = []
            for group in (ours, alone):
                try:
                    results.append(call(group, group.size()))
                except (RuntimeError, ValueError, TypeError) as error:
                    results.append(type(error))
            return results

        def all_reduce(group, _, dtype=torch.int16, op=dist.ReduceOp.SUM):
            x = torch.full((2,), 3, dtype=dtype)
            dist.all_reduce(x, op, group)
            return x.tolist()

        def broadcast(group, _):
            x = torch.ones(2).to(torch.float8_e4m3fn)
            dist.broadcast(x, group_src=0, group=group)
            return x.float().tolist()

        def stacked(group, size):
            out = torch.zeros(size, 2, 2)
            all_gather_single(out, torch.ones(2, 2), group=group)
            return out[0].tolist()

        def strided(group, size):
            out = torch.zeros(2, 2 * size).t()
            dist.all_to_all_single(out, torch.arange(4.0 * size).view(2, 2 * size).t(), group=group)
            return out[0].tolist()

        def gathered(group, size):
            outs = [torch.zeros(2) for _ in range(size)] if group.rank() == 0 else None
            dist.gather(torch.ones(2), outs, group=group, group_dst=0)
            return outs and outs[0].tolist()

        def scattered(group, size):
            out = torch.zeros(2)
            parts = [torch.ones(2)] * size if group.rank() == 0 else None
            dist.scatter(out, parts, group=group, group_src=0)
            return out.tolist()

        def reduce_scatter(group, size):
            out = torch.zeros(2, dtype=torch.int16)
            reduce_scatter_single(out, torch.zeros(2 * size, dtype=torch.int16), group=group)
            return out.tolist()

        def of_no_rank(group, size):
            group.broadcast([torch.ones(2)], _root(size)).wait()

        def of_other_size(group, size):
            dist.all_to_all_single(torch.ones(3), torch.ones(2), [3] + [0] * (size - 1), [2] + [0] * (size - 1), group)

        def of_own_size(group, size):  # from a rank to itself
            outs = [torch.zeros(3 if rank == dist.get_rank(group) else 1) for rank in range(size)]
            dist.all_to_all(outs, [torch.ones(1)] * size, group=group)

        def _root(rank):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            return options

        def average(group, size):
            return all_reduce(group, size, torch.int32, dist.ReduceOp.AVG)

        assert taken(all_reduce) == [[6, 6], [3, 3]]
        for call in (average, broadcast, stacked, reduce_scatter, scattered):
            many, one = taken(call)
            assert many == one, call.__name__
            assert isinstance(one, list), call.__name__
        assert taken(gathered)[1] == [1.0, 1.0]
        assert taken(strided)[1] == [0.0, 2.0]
        with torch.inference_mode():
            out, x = torch.empty(2), torch.ones(2)
            work = reduce_scatter_single(out, x, group=alone, async_op=True)
        work.wait()
        assert out.tolist() == [1.0, 1.0]
        for refused in (of_other_size, of_own_size):
            with pytest.raises((RuntimeError, ValueError)):
                refused(alone, 1)
        with pytest.raises((RuntimeError, ValueError)):
            of_no_rank(alone, 1)
        all_reduce(alone, 1)


def wrong_size(x, rank, size):
    all_gather_single(torch.empty(size * len(x) + rank), x)


def wrong_own_size(x, rank, size):
    """What a rank sends to itself does not fit."""
    dist.all_to_all([torch.empty(len(x) + (rank and i == dist.get_rank())) for i in range(size)], [x] * size)


def expanded(x, rank, size):
    dist.all_reduce(x[:1].expand(3) if rank else x)


def sparse(x, rank, size):
    dist.all_reduce(torch.eye(3).to_sparse() if rank else x)


def negative_size(x, rank, size):
    sizes = [len(x) + 1, -1] if rank else [len(x) - 1, 1]
    dist.all_to_all_single(torch.empty_like(x), x, sizes, sizes)


def wrong_sizes(x, rank, size):
    sizes = [len(x), 1] if rank else [len(x) - 1, 1]
    dist.all_to_all_single(torch.empty_like(x), x, sizes, sizes)


def without_sum(x, rank, size):
    dist.all_reduce(x.view(torch.uint8).view(torch.bits8) if rank else x)


def premul_sum(x, rank, size):
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0) if rank else dist.ReduceOp.SUM)


@pytest.mark.ranks(2, init=False, timeout=40)
@pytest.mark.parametrize("numel", [3, 1_000_000])
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (wrong_size, "all_gather which raises RuntimeError"),
        (expanded, "which raises ValueError"),
        (wrong_own_size, "which raises ValueError"),
        (negative_size, "which raises ValueError"),
        (wrong_sizes, "which raises ValueError"),
        (without_sum, "all_reduce over gloo"),
        (sparse, "all_reduce over gloo"),
        (premul_sum, "all_reduce over gloo"),
    ],
)
def test_what_one_rank_alone_is_refused_keeps_no_other_rank_waiting(numel, call, told):
    with job(4.0) as (_, gloo):
        rank, start = dist.get_rank(), time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match=f"rank 1 is at operation 1, .*{told}"):
                call(torch.ones(numel), 0, 2)
            assert time.monotonic() - start < 3
        else:
            with pytest.raises((RuntimeError, ValueError)):
                call(torch.ones(numel), 1, 2)
        dist.barrier(gloo)


@pytest.mark.ranks(2, init=False, timeout=40)
def test_what_all_ranks_are_refused_alike_changes_nothing():
    with job():
        for numel in (3, 1_000_000):
            for _ in range(3):
                for call in (wrong_size, expanded, wrong_own_size, premul_sum):
                    with pytest.raises((RuntimeError, ValueError)):
                        call(torch.ones(numel), 1, 2)
                x = torch.ones(numel)
                dist.all_reduce(x)
                assert x[-1].item() == 2.0


@pytest.mark.ranks(2, init=False, timeout=40)
@pytest.mark.parametrize("joined", [True, False])
def test_a_future_ends_though_the_group_is_destroyed_before(joined):
    with job() as (_, gloo):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if joined or dist.get_rank() == 0 else None
        dist.barrier(gloo)
        futures = [] if work is None else [work.get_future()]
        dist.destroy_process_group(group)
        futures += [] if work is None else [work.get_future()]
        for future in futures:
            if joined:
                assert future.wait()[0].tolist() == [2.0] * 4
            else:
                with pytest.raises(RuntimeError):
                    future.wait()


@pytest.mark.ranks(2, init=False)
def test_the_profiler_shows_collectives():
    with job():
        x, rank = torch.ones(4), dist.get_rank()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            all_gather_single(torch.empty(8), x, None, True).wait()
            dist.barrier()
        names = {event.key for event in profile.key_averages()}
        assert {"bmt:all_reduce", "bmt:broadcast", "bmt:all_gather", "bmt:barrier"} <= names, rank


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens):
        self.steps += 1
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(wrap, rank, steps=3):
    torch.manual_seed(3 + rank)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(11, (4, 5)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return model, losses, whole


@pytest.mark.ranks(2, init=False)
def test_ddp_fsdp2_dtensor_and_dcp_give_the_same_bits_as_over_gloo(tmp_path):
    with job() as groups:
        rank = dist.get_rank()

        def fsdp(group, model):
            dist.broadcast_object_list([None], 0, group=group)
            for parameter in model.parameters():
                dist.broadcast(parameter, 0, group=group)
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        found = {}
        for name, group in zip(("bmt", "gloo"), groups, strict=True):
            found["DDP", name] = trained(lambda model: DistributedDataParallel(model, process_group=group), rank)  # noqa: B023
            found["FSDP2", name] = trained(lambda model: fsdp(group, model), rank)  # noqa: B023
            mesh = DeviceMesh.from_group(group, "cpu")
            torch.manual_seed(1)
            x = distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)])
            y = distribute_tensor(torch.randn(6, 3), mesh, [Shard(1)])
            z = (x.redistribute(placements=[Shard(1)]) @ y.redistribute(placements=[Shard(0)])).relu()
            found["DTensor", name] = None, [z.full_tensor().sum().item()], [z.full_tensor(), (x @ y).full_tensor()]
            partial = DTensor.from_local(torch.ones(3) * rank, mesh, [Partial()])
            found["DTensor", name][2].append(partial.redistribute(placements=[Shard(0)]).full_tensor())
        for what in ("DDP", "FSDP2", "DTensor"):
            ours, theirs = found[what, "bmt"], found[what, "gloo"]
            assert ours[1] == theirs[1], what
            for mine, other in zip(ours[2], theirs[2], strict=True):
                assert torch.equal(mine, other), what
        model = found["FSDP2", "bmt"][0]
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path)
        changed = copy.deepcopy(model.state_dict())
        for value in changed.values():
            value.zero_()
        loaded = {"model": changed}
        dcp.load(loaded, checkpoint_id=tmp_path)
        for name, value in model.state_dict().items():
            assert torch.equal(_local(loaded["model"][name]), _local(value)), name


def _local(value):
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.ranks(4, init=False)
def test_groups_of_a_device_mesh_share_memory():
    with job():
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for name, wanted in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
            group = mesh.get_group(name)
            assert group.shares_memory
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(wanted)


@pytest.mark.ranks(2, init=False)
def test_no_rank_waits_longer_than_the_timeout():
    with job():
        rank = dist.get_rank()
        short = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
        start = time.monotonic()
        if rank == 0:  # the other one has had an exception, and does not come
            with pytest.raises(RuntimeError, match=r"rank 1 has not sent or received a message for 0\.5 seconds"):
                dist.all_reduce(torch.ones(3), group=short)
        else:
            time.sleep(1.0)
        assert time.monotonic() - start < 20
        dist.barrier()
        # Of different collectives, all ranks hear at once.
        other = dist.new_group()
        x = torch.ones(3)
        with pytest.raises(RuntimeError, match="ranks call different operations"):
            dist.all_reduce(x, group=other) if rank == 0 else dist.broadcast(x, 0, group=other)
        assert time.monotonic() - start < 20
        dist.barrier()
        # A wait may be shorter than the group's.
        late = dist.new_group()
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"for 0\.[0-3]\d* seconds"):
                dist.all_reduce(x, group=late, async_op=True).wait(datetime.timedelta(seconds=0.3))
        dist.barrier()


class Alarm(Exception):
    pass


def raise_alarm(*_):
    raise Alarm


@pytest.mark.ranks(2, init=False, timeout=40)
@pytest.mark.parametrize("numel", [4, 300_000])
@pytest.mark.parametrize("kind", ["time-out", "signal"])
def test_after_a_failed_collective_all_later_ones_fail_on_every_rank(numel, kind):
    with job() as (_, gloo):
        rank = dist.get_rank()
        group = dist.new_group(timeout=datetime.timedelta(seconds=0.5 if kind == "time-out" else 30))
        start = time.monotonic()
        x = torch.full((numel,), 1.0 + rank)
        if rank == 0:
            signal.signal(signal.SIGALRM, raise_alarm)
            if kind == "signal":
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Alarm if kind == "signal" else RuntimeError):
                dist.all_reduce(x, group=group)
            dist.barrier(gloo)
            x.fill_(10.0)
        else:
            dist.barrier(gloo)
            with contextlib.suppress(RuntimeError):  # the other's message may be there
                dist.all_reduce(x, group=group)
                assert x[-1].item() == 3.0
            x.fill_(20.0)
            late = dist.all_reduce(x, group=group, async_op=True)
        dist.barrier(gloo)
        match = "rank 0 has ended or closed its memory" if rank else "interrupted in its middle|for 0.5 seconds"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=match):
                late.wait() if rank else dist.all_reduce(x, group=group)
        with pytest.raises(RuntimeError, match=match):
            dist.barrier(group)
        assert time.monotonic() - start < 20
        dist.barrier(gloo)


def is_running(progress):
    """Whether another thread runs a collective."""
    if progress._running.acquire(blocking=False):
        progress._running.release()
        return False
    return True


class Owner:
    """A process group, to its progress."""

    def __init__(self):
        self.errors = []

    def fail(self, error):
        self.errors.append(error)

    def stop_waits(self, why):
        pass


def test_exceptions_out_of_signal_handlers_leave_nothing_locked():
    owner = Owner()
    progress, numbers = bmt_comm.progress.Progress(owner), random.Random(0)

    def call():
        work = bmt_comm.progress.CollectiveWork(progress, lambda: DONE, [])
        progress.leave(progress.post(work)).wait()
        progress.run(lambda: DONE, lambda: None, 0.0)

    def is_free():
        end = time.monotonic() + 2
        while pool.submit(is_running, progress).result() and time.monotonic() < end:
            time.sleep(1e-3)  # the thread of the group may run one
        return time.monotonic() < end

    call()  # which starts the thread: Python's own code for that does not take exceptions
    before = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        end = time.monotonic() + 5
        with ThreadPoolExecutor(1) as pool:
            while time.monotonic() < end:
                with contextlib.suppress(Alarm):
                    signal.setitimer(signal.ITIMER_REAL, numbers.uniform(2e-5, 4e-4))
                    for _ in range(500):
                        call()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert is_free()
                with contextlib.suppress(RuntimeError):  # of what was interrupted
                    call()
                call()
                assert not progress._queue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        progress.stop()


def test_a_signal_handler_can_begin_collectives_and_wait_for_none():
    """In the middle of another one."""
    progress = bmt_comm.progress.Progress(Owner())
    inner = bmt_comm.progress.CollectiveWork(progress, lambda: DONE, [])
    with pytest.raises(RuntimeError, match="in the middle of another one"):
        progress.run(lambda: DONE, lambda: progress.leave(progress.post(inner)).wait(), 0.0)
    inner.wait()
    progress.stop()


@pytest.mark.ranks(2, init=False, timeout=40)
def test_a_wait_has_its_limit_though_the_thread_runs_the_collective():
    with job() as (ours, gloo):
        start = time.monotonic()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            work.is_completed()
            while not is_running(ours.progress):
                time.sleep(1e-3)
            with pytest.raises(RuntimeError, match=r"limit of 0\.3 seconds"):
                work.wait(datetime.timedelta(seconds=0.3))
        assert time.monotonic() - start < 15
        dist.barrier(gloo)


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("apart", [False, True])  # there gloo takes strided tensors as contiguous
def test_list_collectives_with_outputs_of_any_strides(apart):
    with job(apart=apart):
        rank, size = dist.get_rank(), dist.get_world_size()

        def x(sender, receiver=0):
            return torch.arange(6.0).view(2, 3) + 10 * sender + 100 * receiver

        def empty(count=size):
            return [torch.full((3, 2), -1.0).t() for _ in range(count)]

        for root in range(size):
            outs = empty() if rank == root else None
            dist.gather(x(rank), outs, root)
            if rank == root:
                assert [out.tolist() for out in outs] == [x(r).tolist() for r in range(size)]
            (out,) = empty(1)
            dist.scatter(out, [x(root, r) for r in range(size)] if rank == root else None, root)
            assert out.tolist() == x(root, rank).tolist()
            (out,) = empty(1)
            out.copy_(x(rank))
            dist.broadcast(out, root)
            assert out.tolist() == x(root).tolist()
            out.copy_(x(rank))
            dist.reduce(out, root)
            if rank == root:
                assert out.tolist() == sum(x(r) for r in range(size)).tolist()
            elif not apart:  # gloo writes partial sums there
                assert out.tolist() == x(rank).tolist()
        outs = empty()
        dist.all_gather(outs, x(rank))
        assert [out.tolist() for out in outs] == [x(r).tolist() for r in range(size)]
        outs = empty()
        dist.all_to_all(outs, [x(rank, r) for r in range(size)])
        assert [out.tolist() for out in outs] == [x(r, rank).tolist() for r in range(size)]
        (out,) = empty(1)
        dist.reduce_scatter(out, [x(rank, r) for r in range(size)])
        assert out.tolist() == sum(x(r, rank) for r in range(size)).tolist()


@pytest.mark.ranks(2, init=False, timeout=40)
def test_strided_tensors_over_gloo_have_the_waits_and_futures_of_gloo():
    with job(apart=True) as (_, meeting):
        rank = dist.get_rank()
        x = torch.zeros(6)[::2].fill_(rank + 1.0)
        future = dist.all_reduce(x, async_op=True).get_future()
        future.wait()
        assert x.tolist() == [3.0] * 3
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        assert x.tolist() == [6.0] * 3
        start = time.monotonic()
        if rank == 0:
            late = dist.all_reduce(x, async_op=True)
            with pytest.raises(RuntimeError):
                late.wait(datetime.timedelta(seconds=0.3))
            with pytest.raises(ValueError, match="share memory"):
                dist.all_reduce(torch.ones(1).expand(3))
        dist.barrier(meeting)
    assert time.monotonic() - start < 10


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("numel", [1, 6, 3000])
@pytest.mark.parametrize("kind", ["strided", "expanded", "negated", "strided and negated"])
def test_inputs_that_lie_in_memory_in_another_way(numel, kind):
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()

        def made(sender, receiver=0):
            x = torch.arange(2.0 * numel * size) + 1000 * sender + 7 * receiver
            if "strided" in kind:
                x = x[::2]
            elif kind == "expanded":
                x = x[:1].expand(numel * size)
            return torch._neg_view(x) if "negated" in kind else x

        def x(sender, receiver=0):
            return made(sender, receiver)[:numel]

        def plain(x):
            return x.resolve_neg().clone(memory_format=torch.contiguous_format)

        def empty(count=1):
            return torch.full((count * numel,), -1.0)

        everyone = [plain(x(r)) for r in range(size)]
        outs = list(empty(size).split(numel))
        dist.all_gather(outs, x(rank))
        assert torch.equal(torch.cat(outs), torch.cat(everyone))
        out = empty(size)
        all_gather_single(out, x(rank))
        assert torch.equal(out, torch.cat(everyone))
        for root in range(size):
            outs = list(empty(size).split(numel)) if rank == root else None
            dist.gather(x(rank), outs, root)
            if rank == root:
                assert torch.equal(torch.cat(outs), torch.cat(everyone))
            out = empty()
            dist.scatter(out, [x(root, r) for r in range(size)] if rank == root else None, root)
            assert torch.equal(out, plain(x(root, rank)))
            out = x(root) if rank == root else empty()
            dist.broadcast(out, root)
            assert torch.equal(plain(out), everyone[root])
            out = plain(x(rank)) if rank == root else x(rank)
            dist.reduce(out, root)
            assert torch.equal(plain(out), sum(everyone) if rank == root else everyone[rank])
        out = empty()
        dist.reduce_scatter(out, [x(rank, r) for r in range(size)])
        assert torch.equal(out, sum(plain(x(r, rank)) for r in range(size)))
        out = empty()
        reduce_scatter_single(out, made(rank)[: numel * size])
        whole = sum(plain(made(r)[: numel * size]) for r in range(size))
        assert torch.equal(out, whole[rank * numel :][:numel])
        outs = list(empty(size).split(numel))
        dist.all_to_all(outs, [x(rank, r) for r in range(size)])
        assert torch.equal(torch.cat(outs), torch.cat([plain(x(r, rank)) for r in range(size)]))
        out = empty(size)
        dist.all_to_all_single(out, made(rank)[: numel * size])
        assert torch.equal(out, torch.cat([plain(made(r)[rank * numel :][:numel]) for r in range(size)]))
        if kind != "expanded":  # and outputs of that kind
            out = x(rank)
            dist.all_reduce(out)
            assert torch.equal(plain(out), sum(everyone))
            outs = [x(9) for _ in range(size)]
            dist.all_gather(outs, x(rank))
            assert [plain(out).tolist() for out in outs] == [each.tolist() for each in everyone]
            outs = [x(9) for _ in range(size)]
            dist.all_to_all(outs, [x(rank, r) for r in range(size)])
            assert [plain(out).tolist() for out in outs] == [plain(x(r, rank)).tolist() for r in range(size)]
        if kind == "negated":
            work = dist.isend(x(rank), (rank + 1) % size)
            dist.recv(out := empty(), (rank - 1) % size)
            work.wait()
            assert torch.equal(out, everyone[rank - 1])
            with pytest.raises(ValueError, match="negated lazily"):
                dist.recv(x(rank), (rank - 1) % size)


class Named(torch.Tensor):
    """A tensor with something more."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class NamedParameter(nn.Parameter):
    pass


@pytest.mark.ranks(2, init=False, timeout=40)
@pytest.mark.parametrize("kind", [Named, NamedParameter])
def test_a_rank_may_have_a_subclass_of_tensor_where_others_have_none(kind):
    with job(10.0):
        rank, size = dist.get_rank(), dist.get_world_size()

        def x(value=None):
            x = torch.full((3,), float(rank + 1 if value is None else value))
            return x if rank else kind(x)

        out = x()
        dist.broadcast(out, 0)
        assert out.tolist() == [1.0] * 3
        dist.all_reduce(out)
        assert out.tolist() == [2.0] * 3
        dist.reduce(out, 0)
        outs = [x(0) for _ in range(size)]
        dist.all_gather(outs, x())
        assert [out.tolist() for out in outs] == [[1.0] * 3, [2.0] * 3]
        out = torch.empty(6)
        all_gather_single(out, x())
        assert out.tolist() == [1.0] * 3 + [2.0] * 3
        with dist._coalescing_manager():
            dist.all_reduce(out := x())
        assert out.tolist() == [3.0] * 3
        work = dist.all_reduce(out, async_op=True)
        work.wait()
        assert out.tolist() == work.result()[0].tolist() == [6.0] * 3
        if rank == 0:
            dist.send(x(), 1)
            dist.recv(out := x(), 1)
        else:
            dist.recv(out := x(), 0)
            dist.send(out, 0)
        assert out.tolist() == [1.0] * 3


@pytest.mark.ranks(3, init=False)
@pytest.mark.parametrize("numel", [4, 3000, 2_000_000])
@pytest.mark.parametrize("async_op", [False, True])
def test_gathers_whose_input_lies_in_the_place_of_another_rank(numel, async_op):
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        wanted = [r + 1.0 for r in range(size)]

        def outputs(place):
            outs = [torch.full((numel,), -1.0) for _ in range(size)]
            outs[place].fill_(rank + 1.0)
            return outs

        def check(work, found):
            if work is not None:
                work.wait()
            assert [[out[0].item(), out[-1].item()] for out in found] == [[value] * 2 for value in wanted]

        for place in range(size):
            outs = outputs(place)
            check(dist.all_gather(outs, outs[place], async_op=async_op), outs)
            out = torch.cat(outputs(place))
            outs = out.split(numel)
            check(all_gather_single(out, outs[place], async_op=async_op), outs)
            for root in range(size):
                outs = outputs(place)
                work = dist.gather(outs[place], outs if rank == root else None, root, async_op=async_op)
                if rank == root:
                    check(work, outs)
                elif work is not None:
                    work.wait()
        with torch.inference_mode():
            outs = outputs(0)
            work = dist.all_gather(outs, outs[0], async_op=True)
        check(work, outs)


@pytest.mark.ranks(2, init=False, timeout=30)
def test_expanded_tensors_are_refused_before_anything_is_sent():
    with job():
        expanded = torch.ones(1).expand(3)
        for call in (dist.all_reduce, lambda x: dist.broadcast(x, 1 - dist.get_rank())):
            with pytest.raises(ValueError, match="share memory"):
                call(expanded)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3


def test_a_group_has_one_thread_whoever_asks_for_it():
    both, made = threading.Barrier(2), []

    class Thread(threading.Thread):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)  # until another one has been made, too

    progress = bmt_comm.progress.Progress(None)
    callers = [threading.Thread(target=progress._need_thread) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.progress.threading, "Thread", Thread)
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    progress.stop()
    assert len(made) == 1


@pytest.mark.ranks(2, init=False)
def test_what_is_not_waited_for_goes_on_and_keeps_no_rank_waiting():
    with job():
        rank = dist.get_rank()
        x = torch.ones(1 << 19)
        if rank == 0:  # its wait comes after the other's
            work = dist.all_reduce(x, async_op=True)
            dist.recv(torch.empty(1), 1)
            work.wait()
        else:
            dist.all_reduce(x)
            dist.send(torch.empty(1), 0)
        assert x[::100_000].tolist() == [2.0] * 6
        seen = []
        future = dist.all_reduce(x, async_op=True).get_future()
        future = future.then(lambda done: seen.append(done.value()[0][0].item()))
        future.wait()
        assert seen == [4.0]
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            time.sleep(1e-3)
        assert x[0].item() == 8.0


@pytest.mark.ranks(2, init=False, timeout=40)
def test_a_callback_of_a_future_may_wait_for_other_futures_of_the_group():
    with job(10.0) as (_, gloo):
        rank = dist.get_rank()

        def reduced(x):
            return dist.all_reduce(x, async_op=True).get_future()

        # For one that it posts itself.
        future = reduced(torch.ones(3)).then(lambda done: reduced(done.value()[0]).wait()[0].tolist())
        assert future.wait() == [4.0] * 3
        # For one that was asked for before, and in turn for another one.
        futures = [reduced(torch.full((3,), float(n))) for n in range(4)]
        for n in reversed(range(3)):
            futures[n] = futures[n].then(lambda done, n=n: futures[n + 1].wait() and done.value()[0].tolist())
        assert futures[0].wait() == [0.0] * 3
        # The group goes on meanwhile, for what is asked for and for what is not.
        x = torch.ones(1 << 19)
        if rank == 0:  # the other one runs each when this one waits
            inside, end = threading.Event(), threading.Event()
            future = reduced(torch.ones(3)).then(lambda done: inside.set() or end.wait(20))
            dist.barrier(gloo)
            assert inside.wait(10)
            work = dist.all_reduce(x, async_op=True)
            dist.recv(torch.empty(1), 1)
            work.wait()
            assert x[0].item() == 2.0
            assert reduced(x).wait()[0][0].item() == 4.0
            end.set()
            assert future.wait()
        else:
            dist.barrier(gloo)
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(x)
            dist.send(torch.empty(1), 0)
            dist.all_reduce(x)
        assert sum(thread.name == "bmt_progress" for thread in threading.enumerate()) <= 2


@pytest.mark.ranks(2, init=False, timeout=40)
def test_ddp_trains_with_a_hook_that_waits_in_callbacks():
    with job(10.0):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        weights = [torch.empty(64, 64) for _ in range(2)]
        dist.all_gather(weights, model.module[0].weight.detach())
        assert torch.equal(*weights)


@pytest.mark.ranks(2, init=False)
def test_communicators_on_such_a_group_share_memory_by_themselves():
    with job() as (ours, _):
        context = bmt_comm.init_distributed(device="cpu")
        assert context.world.group is ours
        assert context.world.share_memory()
        x = torch.full((4,), 1.0 + context.rank)
        context.world.all_reduce(x)
        dist.all_reduce(x)
        assert x.tolist() == [6.0] * 4
        bmt_comm.shutdown()
    context = bmt_comm.init_distributed(backend="bmt")
    assert dist.group.WORLD.shares_memory
    assert context.world.share_memory()
    bmt_comm.shutdown()


@pytest.mark.ranks(2, init=False)
def test_ranks_that_cannot_share_memory_use_gloo():
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(bmt_comm.shared_memory, "_create", lambda *_: (None, 0))
        dist.init_process_group("cpu:bmt")
    assert not dist.group.WORLD.shares_memory
    for number, (name, call) in enumerate(itertools.islice(collectives(2, dist.get_rank()), 40)):
        work, _ = call(dist.group.WORLD, number % 2 == 1)
        assert work is None or work.wait(), name
    x = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert x.tolist() == [2.0] * 3
    dist.barrier()
    dist.destroy_process_group()


def test_a_process_may_end_while_collectives_and_messages_are_under_way(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch, bmt_comm, torch.distributed as dist\n"
        "dist.init_process_group('bmt')\n"
        "x = torch.ones(1 << 19)\n"
        "work = dist.all_reduce(x, async_op=True)\n"
        "if dist.get_rank() == 0:\n"
        "    work.get_future()\n"
        "    again = dist.all_reduce(x, async_op=True).get_future()\n"
        "work.wait()\n"
        "assert x[0].item() == 2.0\n"
        "large = torch.ones(17 << 20)\n"  # more than there is room for
        "if dist.get_rank() == 0:\n"
        "    dist.isend(large, 1, tag=5)\n"
        "dist.irecv(x, 1 - dist.get_rank(), tag=6)\n"
        "time.sleep(2 * dist.get_rank())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(2, init=False, timeout=40)
def test_a_forked_child_that_ends_leaves_its_parent_what_is_under_way():
    with job(10.0) as (_, gloo):
        rank, x = dist.get_rank(), torch.full((20_000_000,), 7.0 * (1 - dist.get_rank()))
        others = [None, None]
        dist.all_gather_object(others, os.getpid(), group=gloo)
        if rank == 0:
            work = dist.isend(x, 1)  # for which there is no room, so that it comes in pieces
            dist.barrier(gloo)
        else:
            dist.barrier(gloo)
            os.kill(others[0], signal.SIGSTOP)
            try:
                work = dist.irecv(x, 0)
                child = os.fork()
                if child == 0:
                    try:
                        bmt_comm.process_group._leave_all()  # as atexit does
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
            finally:
                os.kill(others[0], signal.SIGCONT)
        work.wait()
        assert x[::1_000_000].tolist() == [7.0] * 20
        dist.all_reduce(x)
        assert x[-1].item() == 14.0


@pytest.mark.ranks(3, init=False)
def test_what_cannot_be_copied_or_sent_is_refused_on_every_rank():
    """As gloo does; the group goes on working."""
    with job():
        for dtype in (torch.uint4, torch.uint1, torch.quint8):
            x = torch.zeros(4, dtype=torch.uint8).view(dtype)
            with pytest.raises((RuntimeError, ValueError), match="scalar type"):
                dist.broadcast(x, 1)
        if dist.get_rank() == 0:
            with pytest.raises(TypeError):
                dist.send(torch.ones(2), 1, tag=1 << 33)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        x = torch.full((5,), float(dist.get_rank())).to(torch.float8_e4m3fn)
        dist.broadcast(x, 2)
        assert x.float().tolist() == [2.0] * 5


@pytest.mark.ranks(3, init=False)
def test_single_messages_from_any_rank_through_shared_memory():
    with job():
        rank = dist.get_rank()
        x, box = torch.full((3,), float(rank)), torch.zeros(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.group.WORLD, "_rest", None)  # gloo is not used
            if rank == 0:
                works = [dist.irecv(box[i : i + 1], tag=i) for i in range(2)]
                sources = []
                for work in works:
                    work.wait()
                    sources.append(work._source_rank())
                assert sources == [1, 2]
                assert box.tolist() == [1.0, 2.0, 0.0]
                assert sorted(dist.recv(box, tag=2) for _ in range(2)) == [1, 2]
            else:
                dist.send(x[:1], 0, tag=rank - 1)
                dist.isend(x, 0, tag=2)
            to, source = (rank + 1) % 3, (rank - 1) % 3
            big, large = torch.full((9_000_000,), float(rank)), torch.empty(9_000_000)
            # With a tag of its own: rank 0 may still receive tag 0 from any rank.
            calls = [dist.P2POp(dist.isend, big, to, tag=3), dist.P2POp(dist.irecv, large, source, tag=3)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
                assert work.is_completed()
            assert large[::1_000_000].tolist() == [float(source)] * 9
            for half in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)):
                if rank == 0:
                    dist.send(half * 3, 1)
                elif rank == 1:
                    dist.recv(half, 0)
                    assert torch.equal(half, torch.ones_like(half) * 3)
            with pytest.raises((ValueError, RuntimeError)):
                dist.group.WORLD.send([x], rank, 0)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("numel", [1500, 3_000_000])
def test_a_message_without_room_that_nobody_waits_for_goes_on(numel):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.shared_memory, "_STAGE_BYTES", 4096)
        with job():
            rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
            x = torch.full((numel,), float(rank))
            for sender in (0, 1):  # one of them waits and the other does something else
                work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
                if rank == sender:
                    store.wait([f"arrived {sender}"], datetime.timedelta(seconds=10))
                    assert work.is_completed()
                else:
                    work.wait()
                    store.set(f"arrived {sender}", "")
            assert set(x[::100].tolist()) == {0.0}
