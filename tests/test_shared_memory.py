"""Collectives through shared memory give what messages give, whatever their sizes, their order and the ranks' pace."""

import contextlib
import datetime
import gc
import logging
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bmt_comm.communicator
import bmt_comm.shared_memory
import bmt_comm.shared_memory_channel
import bmt_comm.watch
import bmt_kernels
import bmt_kernels.process_memory as memory
from bmt_comm import REDUCE_OPS, Communicator, init_distributed, shutdown
from bmt_comm.shared_memory import SharedMemoryCollectives

pytestmark = pytest.mark.skipif(
    not bmt_kernels.SharedMemoryExchange.available() or torch.cuda.is_available(),
    reason="ranks are on the CPU of Linux",
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


STEP = 96  # bytes
ROOM = 1 << 20


@contextlib.contextmanager
def pair(ctx, pages=2, room=ROOM):
    """A communicator with tiny steps in shared memory, and one that sends messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.shared_memory, "_STEP_BYTES", STEP)
        patch.setattr(bmt_comm.shared_memory, "_LARGEST_BYTES", 20 * STEP)
        patch.setattr(bmt_comm.shared_memory, "_CAPACITIES", (room, pages * mmap.PAGESIZE))
        shared, messages = (Communicator(dist.new_group(list(range(ctx.world_size)))) for _ in range(2))
        assert shared.share_memory()
        yield shared, messages


def go_on_after_failures():
    """Let this rank's wait fail without the end of the job: the watch would end the waits of all ranks."""
    bmt_comm.watch.stop(leaves=True)


def values(rank, numel, dtype, seed=0):
    found = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return found.to(dtype) if dtype.is_floating_point else (found * 3).abs().to(dtype)


@pytest.mark.ranks(2, 3, 4)
def test_the_communicators_of_a_layout_share_memory(ctx):
    for comm in (ctx.world, ctx.zero, ctx.tp_zero, ctx.outer_zero, ctx.pipe_host):
        assert comm.share_memory() == (comm.size > 1)
    assert not Communicator().share_memory()
    twin = Communicator(ctx.world.group)
    assert isinstance(twin._on_host, SharedMemoryCollectives)
    x = torch.ones(3)
    for comm in (twin, ctx.world, twin):
        comm.all_reduce(x)
    assert x.tolist() == [float(ctx.world_size**3)] * 3


@pytest.mark.ranks(2, 3, 4, timeout=120)
def test_every_collective_at_every_size_is_that_of_messages_bit_for_bit(ctx):
    with pair(ctx) as (shared, messages):
        n, rank = ctx.world_size, ctx.rank
        for dtype in DTYPES:
            unit = STEP // dtype.itemsize
            for numel in (
                0,
                1,
                unit - 1,
                unit,
                unit + 1,
                unit // (n - 1) + 1,
                2 * unit + 3,
                7 * unit,
                20 * unit,
                20 * unit + 1,
            ):
                for op in REDUCE_OPS:
                    found = [values(rank, numel, dtype) for _ in range(2)]
                    parts = [torch.empty(numel, dtype=dtype) for _ in range(2)]
                    for x, part, comm in zip(found, parts, (shared, messages)):
                        comm.reduce_scatter(part, values(rank, n * numel, dtype), op)
                        comm.all_reduce(x, op)
                    assert torch.equal(*found), (dtype, numel, op)
                    assert torch.equal(*parts), (dtype, numel, op)
                gathered = [torch.empty(n, numel, dtype=dtype) for _ in range(2)]
                gathered[0][rank] = values(rank, numel, dtype)
                shared.all_gather(gathered[0], gathered[0][rank])  # in place
                messages.all_gather(gathered[1], values(rank, numel, dtype))
                assert torch.equal(*gathered), (dtype, numel)
                x = values(rank, numel, dtype)
                shared.broadcast(x, n - 1)
                assert torch.equal(x, values(n - 1, numel, dtype))


@pytest.mark.ranks(3)
def test_dtypes_without_arithmetic_travel_too(ctx):
    with pair(ctx) as (shared, _):
        for dtype in (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn):
            mine = torch.arange(50).add(ctx.rank).remainder(2).to(dtype)
            out = torch.empty(3, 50, dtype=dtype)
            shared.all_gather(out, mine)
            assert out.to(torch.complex64).real.sum(1).tolist() == [25.0] * 3
            shared.broadcast(mine, 1)
            assert torch.equal(mine.view(torch.uint8), out[1].view(torch.uint8))


CALLS = {
    "all_reduce": lambda comm, out, mine, whole, root: comm.all_reduce(out, async_op=True),
    "reduce_scatter": lambda comm, out, mine, whole, root: comm.reduce_scatter(out, whole, "max", async_op=True),
    "all_gather": lambda comm, out, mine, whole, root: comm.all_gather(out, mine, async_op=True),
    "broadcast": lambda comm, out, mine, whole, root: comm.broadcast(out, root, async_op=True),
}


def random_calls(seed, n):
    """The same on every rank: names, numbers of elements, roots."""
    calls = random.Random(seed)
    return [(calls.choice(list(CALLS)), calls.choice((1, 5, 24, 25, 130)), calls.randrange(n)) for _ in range(30)]


def begin(comm, name, numel, root, place):
    """The collective in flight, and where its result will be."""
    mine = values(comm.rank, numel, torch.float32, place)
    whole = values(comm.rank, comm.size * numel, torch.float32, place)
    out = {"all_gather": torch.empty_like(whole), "reduce_scatter": torch.empty_like(mine)}.get(name, mine)
    return CALLS[name](comm, out, mine, whole, root), out


@pytest.mark.ranks(2, 3, 4, timeout=30)
@pytest.mark.parametrize(
    ("pages", "room", "any_order"), [(1, ROOM, True), (3, ROOM, True), (1, 1, False), (2, 3 * mmap.PAGESIZE, False)]
)
def test_many_in_flight(ctx, pages, room, any_order):
    # Ranks may wait in any order for what all have called, if there is room for it.
    with pair(ctx, pages, room) as (shared, messages):
        for seed in range(12):
            calls = random_calls(seed, ctx.world_size)
            expected = []
            for place, call in enumerate(calls):
                work, out = begin(messages, *call, place)
                work.wait()
                expected.append(out)
            alike, own = random.Random(seed), random.Random(100 * seed + any_order * ctx.rank)
            pending, found = [], []
            for place, call in enumerate(calls):
                work, out = begin(shared, *call, place)
                pending.append(work)
                found.append(out)
                while pending and alike.random() < 0.2:
                    pending.pop(alike.randrange(len(pending))).wait()
            own.shuffle(pending)
            for work in pending:
                work.wait()
                work.wait()  # again: nothing happens
                assert work.is_completed()
            for result, wanted in zip(found, expected):
                assert torch.equal(result, wanted)


@pytest.mark.ranks(2, 3, timeout=60)
def test_all_but_long_all_reduces_are_done_when_the_others_have_called_them(ctx):
    with pair(ctx) as (shared, messages):
        n, rank, short, long = ctx.world_size, ctx.rank, 5, 2000
        outs = [torch.empty(n, numel) for numel in (short, long)]
        parts = [torch.empty(numel) for numel in (short, long)]
        sums = [torch.full((numel,), float(rank)) for numel in (short, long)]
        news = [torch.full((numel,), float(rank)) for numel in (short, long)]
        works = [shared.all_reduce(sums[1], async_op=True)]  # whose second part needs all to wait
        for i, numel in enumerate((short, long)):
            works.append(shared.all_gather(outs[i], torch.full((numel,), float(rank)), async_op=True))
            works.append(shared.reduce_scatter(parts[i], torch.full((n, numel), float(rank)), async_op=True))
            works.append(shared.broadcast(news[i], 1, async_op=True))
        works.append(shared.all_reduce(sums[0], async_op=True))
        if rank == 0:
            messages.barrier()  # the others come to it when all that they waited for is done
        for work in works[1:]:
            work.wait()
        if rank != 0:
            messages.barrier()
        works[0].wait()
        assert [set(x.tolist()) for x in (*sums, *parts)] == [{float(sum(range(n)))}] * 4
        assert [set(x.tolist()) for x in news] == [{1.0}] * 2
        for out in outs:
            assert torch.equal(out, torch.arange(float(n))[:, None].expand_as(out))


@pytest.mark.ranks(3)
def test_the_tensor_is_read_at_the_call_or_later_but_written_in_wait_only(ctx):
    with pair(ctx) as (shared, _):
        x, long = torch.full((3,), float(ctx.rank)), torch.full((500,), float(ctx.rank))
        works = [shared.all_reduce(t, async_op=True) for t in (x, long)]
        time.sleep(0.05 * ctx.rank)
        assert x.tolist() == [float(ctx.rank)] * 3
        assert not any(work.is_completed() for work in works)
        works[1].wait()
        assert set(long.tolist()) == {3.0}
        works[0].wait()
        assert set(x.tolist()) == {3.0}


@pytest.mark.ranks(3)
def test_one_rank_that_cannot_share_keeps_all_from_it(ctx):
    group = dist.new_group([0, 1, 2])
    comm = Communicator(group)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setitem(sys.modules, "bmt_kernels", None)  # as if it were not installed
        assert not comm.share_memory()
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 2:
            patch.setattr(memory, "_open", lambda *told: None)  # as on another host
        assert not comm.share_memory()
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            patch.setattr(bmt_kernels.SharedMemoryExchange, "available", staticmethod(lambda: False))
        assert not comm.share_memory()

    def refuse(name):
        raise OSError("no memory")

    def refuse_map(*told, **more):
        raise RuntimeError("unable to mmap")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(torch, "from_file", refuse_map)
        assert not comm.share_memory()
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            patch.setattr(os, "memfd_create", refuse)
        assert not comm.share_memory()
    x = torch.ones(2)
    comm.all_reduce(x)
    assert x.tolist() == [3.0, 3.0]
    assert comm.share_memory()
    comm.all_reduce(x)
    assert x.tolist() == [9.0, 9.0]


@pytest.mark.ranks(3)
def test_ranks_that_disagree_are_told_by_their_global_ranks(ctx):
    comm = Communicator(dist.new_group([0] if ctx.rank == 0 else [1, 2], use_local_synchronization=True))
    if ctx.rank > 0:
        assert comm.share_memory()
        work = comm.all_reduce(torch.ones(3 + comm.rank), async_op=True)
        message = (
            f"ranks call different operations: rank {3 - ctx.rank} is at operation 1, all_reduce sum of float32 "
            rf"\({4 - comm.rank},\), rank {ctx.rank} at operation 1, all_reduce sum of float32 \({3 + comm.rank},\)"
        )
        for _ in range(2):  # waiting again does not pass for success
            with pytest.raises(RuntimeError, match=message):
                work.wait()
    ctx.world.barrier()


def two_calls(comm, name):
    """One collective, and another that has messages of the same sizes on each rank."""
    x, out, n = torch.ones(12), torch.empty(12 * comm.size), comm.size
    first = comm.rank == 0
    return {
        "reduction": lambda: comm.all_reduce(x, "sum" if first else "max"),
        "root": lambda: comm.broadcast(x, 1 if first else 0),
        "dtype": lambda: comm.all_reduce(x if first else x.int()),
        "shape": lambda: comm.all_reduce(x if first else x.view(3, 4)),
        "kind": lambda: comm.all_gather(out, x) if first else comm.reduce_scatter(out, torch.ones(12 * n * n)),
        "label": lambda: comm.all_gather(out, x, label="one" if first else "two"),
        "halves": lambda: comm.all_reduce(torch.ones(200_000), "sum" if first else "max"),
    }[name]


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("name", ["reduction", "root", "dtype", "shape", "kind", "label", "halves"])
def test_collectives_that_differ_but_for_their_sizes_are_refused(ctx, name):
    comm = Communicator(dist.new_group([0, 1]))
    assert comm.share_memory()
    with pytest.raises(RuntimeError, match=r"ranks call different operations: rank \d is at operation 1, .* 1"):
        two_calls(comm, name)()
    ctx.world.barrier()


@pytest.mark.ranks(2, timeout=30)
def test_collectives_that_differ_without_a_wait_are_refused_at_the_next_wait(ctx):
    comm = Communicator(dist.new_group([0, 1]))
    assert comm.share_memory()

    def run():
        comm.broadcast(torch.ones(3), comm.rank)  # a root does not wait
        comm.barrier()

    with pytest.raises(RuntimeError, match="is at operation 1, broadcast from"):
        run()
    ctx.world.barrier()


@pytest.mark.ranks(2, timeout=30)
def test_collectives_in_another_order_are_refused_where_large_ones_have_a_separate_channel(ctx):
    comm = Communicator(dist.new_group([0, 1]))
    assert comm.share_memory()
    sizes = [2, 500_000] if ctx.rank else [500_000, 2]
    works = [comm.all_reduce(torch.ones(size), async_op=True) for size in sizes]
    for work in works:
        with pytest.raises(RuntimeError, match=r"rank \d is at operation [12], all_reduce"):
            work.wait()
    ctx.world.barrier()


@pytest.mark.ranks(2, init=False, timeout=60)
def test_by_messages_collectives_that_differ_do_not_take_each_others_data():
    for name in ("reduction", "root", "dtype", "shape", "kind", "label", "halves"):
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        comm = Communicator(dist.group.WORLD)
        with pytest.raises(RuntimeError):
            two_calls(comm, name)()
        dist.destroy_process_group()


@pytest.mark.ranks(2, init=False, timeout=40)
def test_the_timeout_is_that_of_the_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(bmt_comm.watch, "_WAKE", 2.5)
    dist.init_process_group("gloo")
    ctx = init_distributed(timeout=0.7, device="cpu")
    x = torch.ones(2)
    start = time.monotonic()
    if ctx.rank == 1:
        with pytest.raises(RuntimeError, match=r"rank 0 has not sent or received a message for 0\.7 seconds"):
            ctx.world.all_reduce(x)
        assert 0.5 < time.monotonic() - start < 10
        (tmp_path / "over").touch()
    else:  # a rank that waits for nothing is ended soon after the alarm
        while not (tmp_path / "over").exists():
            time.sleep(0.01)


KILLED = """
import os, signal, sys, time, torch
from bmt_comm import init_distributed
ctx = init_distributed(sys.argv[1], device="cpu")
ctx.world.barrier()
if ctx.rank == 1:
    time.sleep(0.3)  # the other sleeps by then
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
x = torch.ones(abs(int(sys.argv[2])))
try:
    if int(sys.argv[2]) > 0:
        ctx.world.all_reduce(x)
    elif len(x) > 1000:
        ctx.world.send(x, 1)
    else:
        ctx.world.recv(x, 1)
except RuntimeError as error:
    print(error, flush=True)
assert time.monotonic() - start < 15
os._exit(0)  # the other is not there to say goodbye to
"""


@pytest.mark.parametrize(  # below 0: of single messages
    "numel", [2, -20_000_000, *(pytest.param(numel, marks=pytest.mark.long) for numel in (1_000_000, -2))]
)
def test_a_rank_that_is_killed_is_missed_at_once(tmp_path, numel):
    ranks = []
    try:
        for rank in range(2):
            environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
            command = [sys.executable, "-c", KILLED, f"file://{tmp_path}/store", str(numel)]
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        said, _ = ranks[0].communicate(timeout=100)
        assert "rank 1 has ended" in said.splitlines()[0]
        assert "rank 1: has ended" in said
        assert ranks[1].wait(timeout=10) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()


FORKS = """
import os, sys, torch
from bmt_comm import init_distributed
ctx = init_distributed(sys.argv[1], device="cpu")
ctx.world.barrier()
child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
ctx.world.barrier()
"""


def test_a_fork_ends_by_itself(tmp_path):
    ranks = []
    try:
        for rank in range(2):
            environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
            command = [sys.executable, "-c", FORKS, f"file://{tmp_path}/store"]
            ranks.append(subprocess.Popen(command, env=environ, start_new_session=True))
        assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.ranks(2, init=False, timeout=60)
def test_shutdown_gives_all_back_whoever_holds_a_communicator():
    def held():
        gc.collect()
        files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        maps = Path("/proc/self/maps").read_text()
        return [text.count(name) for text in (maps, " ".join(files)) for name in ("memfd:bmt_kernels", "pidfd")]

    before = held()
    communicators = []
    for _ in range(3):
        ctx = init_distributed(device="cpu", tp_size=2)
        communicators += [ctx.world, ctx.tp]
        for _ in range(2):
            ctx.world.all_reduce(torch.ones(2))
            ctx.tp.all_reduce(torch.ones(1_000_000))
        # For the eager channel, the pipelined channel, and single messages: maps of both ranks' memory, and this rank's
        # file. And the other's process: one in all, also if something of an earlier test still refers to it.
        *now, processes = held()
        assert [*(new - old for new, old in zip(now, before)), processes] == [6, 0, 3, 1]
        shutdown()
        assert held() == before


@pytest.mark.ranks(2, init=False, timeout=60)
def test_an_adopted_process_group_shares_while_there_is_a_layout():
    dist.init_process_group("gloo")
    mine = Communicator(dist.group.WORLD)
    for timeout in (100.0, 0.5):
        ctx = init_distributed(device="cpu", timeout=timeout)
        assert isinstance(mine._on_host, SharedMemoryCollectives)
        x = torch.ones(2)
        ctx.world.all_reduce(x)
        pending = mine.all_reduce(x, async_op=True)
        if timeout == 0.5 and ctx.rank == 0:
            with pytest.raises(RuntimeError, match=r"0\.5 seconds"):
                mine.all_gather(torch.empty(2), torch.ones(1))
        shutdown()
        assert not isinstance(mine._on_host, SharedMemoryCollectives)
        mine.barrier()
        pending.wait()
        assert x.tolist() == [4.0, 4.0]


@pytest.mark.ranks(2, timeout=60)
def test_many_small_ones_in_flight_while_ranks_do_different_things(ctx):
    sums = [torch.full((2,), float(i)) for i in range(300)]
    works = [ctx.world.all_reduce(x, async_op=True) for x in sums]
    box = torch.zeros(3)
    if ctx.rank == 0:
        ctx.world.recv(box, 1)
    for work in reversed(works):
        work.wait()
    if ctx.rank == 1:
        ctx.world.send(box, 0)
    assert [x.tolist() for x in sums] == [[2.0 * i] * 2 for i in range(300)]


@pytest.mark.ranks(2)
def test_a_collective_that_was_interrupted_in_its_middle_does_not_pass_for_success(ctx):
    with pair(ctx) as (shared, messages):
        x = torch.ones(3)
        work = shared.all_reduce(x, "avg", async_op=True)

        def interrupted(*arguments):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bmt_comm.shared_memory, "combine", interrupted)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
        for again in (work.wait, shared.barrier):
            with pytest.raises(RuntimeError, match="interrupted in its middle"):
                again()
        messages.barrier()


@pytest.mark.ranks(2, timeout=20)
def test_a_rank_that_fails_within_a_collective_leaves_nobody_waiting(ctx):
    go_on_after_failures()
    comm = Communicator(dist.new_group([0, 1]))
    assert comm.share_memory()
    x = torch.ones(3)

    def fails(*arguments):
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(bmt_comm.shared_memory, "combine", fails)
            with pytest.raises(MemoryError):
                comm.all_reduce(x)
        else:
            comm.all_reduce(x)
            with pytest.raises(RuntimeError, match="rank 1 has ended or closed its memory"):
                comm.all_reduce(x)
    ctx.world.barrier()


@pytest.mark.ranks(2, timeout=20)
def test_a_collective_that_was_late_is_not_waited_for_again(ctx):
    go_on_after_failures()
    comm = Communicator(dist.new_group([0, 1]))
    assert comm.share_memory(datetime.timedelta(seconds=1))
    if ctx.rank == 0:
        works = [comm.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
        start = time.monotonic()
        for work in [*works, *works]:
            with pytest.raises(RuntimeError, match="for 1 seconds"):
                work.wait()
        assert time.monotonic() - start < 1.9
    ctx.world.barrier()


@pytest.mark.ranks(2, init=False, timeout=40)
@pytest.mark.parametrize("shares", [True, False])
def test_it_is_said_once_why_memory_is_not_shared(shares):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("bmt_comm").addHandler(handler)
    bmt_comm.transport._say_why_memory_is_not_shared.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if not shares:
                patch.setattr(memory, "_open", lambda *told: None)
            for _ in range(2):
                rank = init_distributed(device="cpu", tp_size=2).rank
                shutdown()
    finally:
        logging.getLogger("bmt_comm").removeHandler(handler)
    said = [record.getMessage() for record in records]
    assert len(said) == (0 if shares or rank else 1)
    assert all("gloo" in text and "another host" in text for text in said)


@pytest.mark.ranks(2)
def test_a_rank_that_fails_while_memory_is_set_up_leaves_nobody_waiting(ctx):
    comm = Communicator(dist.new_group([0, 1]))
    if ctx.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "memfd_create", lambda name: None)
            with pytest.raises(TypeError):
                comm.share_memory()
    else:
        assert not comm.share_memory()
    comm.barrier()


@pytest.mark.ranks(2)
def test_torchs_default_device_does_not_matter(ctx):
    torch.set_default_device("meta")
    try:
        assert Communicator(dist.new_group([0, 1])).share_memory()
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def messages(ctx, stage=1 << 20, timeout=30):
    """A communicator with little room for single messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.shared_memory, "_STAGE_BYTES", stage)
        comm = Communicator(dist.new_group(list(range(ctx.world_size))))
        assert comm.share_memory(datetime.timedelta(seconds=timeout))
        for name in ("isend", "irecv", "batch_isend_irecv"):
            patch.setattr(dist, name, None)  # by which a communicator uses gloo
        yield comm


@pytest.mark.ranks(2, 3, timeout=60)
@pytest.mark.parametrize("stage", [4096, 1 << 22])
def test_single_messages_in_any_order(ctx, stage):
    with messages(ctx, stage) as comm:
        for seed in range(6):
            # The same plan on every rank: source, target, tag, numbers, dtype. Some are larger than a window.
            plan = random.Random(seed)
            sizes = [0, 1, 7, 1000, 70_000, 700_001]
            pairs = [(a, b) for a in range(comm.size) for b in range(comm.size) if a != b]
            sent = [
                (*plan.choice(pairs), plan.randrange(3), plan.choice(sizes), plan.choice(DTYPES)) for _ in range(40)
            ]
            outgoing = [(place, *each) for place, each in enumerate(sent) if each[0] == comm.rank]
            incoming = [(place, *each) for place, each in enumerate(sent) if each[1] == comm.rank]
            # Of one source and tag, receives are posted in the order of the sends, and waited for in any.
            own = random.Random(10 * seed + comm.rank)
            order = sorted(range(3), key=lambda _: own.random())
            incoming.sort(key=lambda each: order[each[3]])
            calls = [("send", *each) for each in outgoing]
            for each in [("recv", *each) for each in incoming]:
                behind = [n for n, call in enumerate(calls) if call[0] == "recv"]
                calls.insert(own.randrange(behind[-1] + 1 if behind else 0, len(calls) + 1), each)
            works, boxes = [], []
            for kind, place, source, target, tag, numel, dtype in calls:
                if kind == "send":
                    works.append(comm.send(values(source, numel, dtype, place), target, tag, async_op=True))
                else:
                    box = torch.empty(numel, dtype=dtype)
                    works.append(comm.recv(box, source, tag, async_op=True))
                    boxes.append((box, values(source, numel, dtype, place)))
            own.shuffle(works)
            for work in works:
                work.wait()
                assert work.is_completed()
            for box, wanted in boxes:
                assert torch.equal(box, wanted)


@pytest.mark.ranks(2, 3, timeout=60)
def test_large_messages_cross_each_other(ctx):
    with messages(ctx) as comm:
        to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x, box = torch.full((5_000_000,), float(comm.rank)), torch.empty(5_000_000)
        for async_op in (False, True):
            comm.send_recv([(x, to)], [(box, source)], async_op).wait()
            assert box[::100_000].tolist() == [float(source)] * 50
            box.zero_()


@pytest.mark.ranks(2, timeout=30)
def test_a_wait_for_something_else_lets_messages_through(ctx):
    # Rank 0 has posted the receive of what there is no room for, and goes on to a collective of another group.
    with messages(ctx, stage=4096) as comm:
        x = torch.full((1_000_000,), float(comm.rank))
        if comm.rank == 0:
            work = comm.recv(x, 1, async_op=True)
        else:
            comm.send(x, 0)
        ctx.world.barrier()
        if comm.rank == 0:
            work.wait()
        assert x[::100_000].tolist() == [1.0] * 10


@pytest.mark.ranks(2, timeout=30)
def test_messages_go_on_while_a_rank_waits_for_gloo(ctx):
    others = [
        lambda: ctx.world.broadcast_object("text", 1),
        lambda: ctx.world.all_gather_object(ctx.rank),
        lambda: dist.all_reduce(torch.ones(2), group=ctx.world.group),
    ]
    with messages(ctx, stage=4096) as comm:
        for number, call in enumerate(others):
            x = torch.full((1_000_000,), float(ctx.rank * number))
            if comm.rank == 1:
                work = comm.send(x, 0, async_op=True)  # there is no room for it
                call()
                work.wait()
            else:
                comm.recv(x, 1)
                call()
            assert x[::100_000].tolist() == [float(number)] * 10


@pytest.mark.ranks(2, timeout=30)
def test_a_send_ends_without_its_receive_while_there_is_room(ctx):
    go_on_after_failures()
    with messages(ctx, stage=1 << 20, timeout=1) as comm:
        x = torch.full((200_000,), 1.0)
        if comm.rank == 0:
            comm.send(x, 1)
            x.fill_(2.0)
            work = comm.send(x, 1, async_op=True)
            assert not work.is_completed()
            with pytest.raises(RuntimeError, match="rank 1 has not sent or received a message for 1 seconds"):
                work.wait()
        ctx.world.barrier()
        if comm.rank == 1:
            comm.recv(x, 0)
            assert set(x.tolist()) == {1.0}
        ctx.world.barrier()


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("numel", [5, 2_000_000])  # what is sent at once, and what waits for its receive
def test_a_message_of_another_size_is_refused(ctx, numel):
    with messages(ctx) as comm:
        if comm.rank == 0:
            work = comm.send(torch.ones(numel), 1, tag=7, async_op=True)
            if numel == 5:
                work.wait()
            else:
                with pytest.raises(
                    RuntimeError, match=r"rank 0 has sent 8000000 bytes with tag 7 where rank 1 expects"
                ):
                    work.wait()
        else:
            work = comm.recv(torch.ones(3), 0, tag=7, async_op=True)
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=f"rank 0 has sent {4 * numel} bytes with tag 7 where rank 1 exp"
                ):
                    work.wait()
        box = torch.full((2,), float(comm.rank))
        comm.send_recv([(box.clone(), 1 - comm.rank)], [(box, 1 - comm.rank)])  # later ones are not concerned
        assert box.tolist() == [1.0 - comm.rank] * 2


@pytest.mark.ranks(3, timeout=30)
def test_after_a_failed_call_its_other_receives_are_not_written(ctx):
    with messages(ctx) as comm:
        if comm.rank == 0:
            boxes = torch.zeros(2, 3).unbind()
            with pytest.raises(RuntimeError, match="rank 2 has sent 20 bytes with tag 0 where rank 0 expects 12"):
                comm.send_recv([], [(boxes[0], 1), (boxes[1], 2)])
            ctx.world.barrier()
            again = torch.zeros(3)
            comm.recv(again, 1)
            assert again.tolist() == [2.0] * 3
            assert [box.tolist() for box in boxes] == [[0.0] * 3] * 2
        else:
            if comm.rank == 2:
                comm.send(torch.ones(5), 0)
            ctx.world.barrier()
            if comm.rank == 1:
                comm.send(torch.full((3,), 2.0), 0)


@pytest.mark.ranks(2, timeout=30)
def test_receives_that_were_interrupted_before_their_wait_leave_their_messages_to_the_next_ones(ctx):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with messages(ctx) as comm:
        if comm.rank == 0:
            box = torch.zeros(3)
            calls = [lambda: comm.recv(box, 1), lambda: comm.send_recv([], [(box, 1)])]
            for call in calls:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bmt_comm.communicator, "Watched", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        call()
            ctx.world.barrier()
            again = torch.zeros(3)
            for call, number in zip([lambda: comm.recv(again, 1), lambda: comm.send_recv([], [(again, 1)])], (1, 2)):
                call()
                assert again.tolist() == [float(number)] * 3
            assert box.tolist() == [0.0] * 3
        else:
            ctx.world.barrier()
            for number in (1, 2):
                comm.send(torch.full((3,), float(number)), 0)


@pytest.mark.ranks(2, timeout=30)
def test_threads_wait_for_messages_at_the_same_time(ctx):
    with messages(ctx, stage=4096) as comm, ThreadPoolExecutor(4) as pool:
        boxes = [torch.empty(100_000) for _ in range(8)]
        sends = [pool.submit(comm.send, torch.full((100_000,), float(tag)), 1 - comm.rank, tag) for tag in range(8)]
        receives = [comm.recv(box, 1 - comm.rank, tag, async_op=True) for tag, box in enumerate(boxes)]
        for work in reversed(receives):
            work.wait()
        for send in sends:
            send.result()
        assert [set(box.tolist()) for box in boxes] == [{float(tag)} for tag in range(8)]


@pytest.mark.ranks(2, 3, timeout=60)
def test_a_root_does_not_run_ahead_without_bounds(ctx):
    with pair(ctx, room=1 << 24) as (shared, by_gloo), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_comm.shared_memory, "_LARGEST_BYTES", 1 << 20)
        patch.setattr(bmt_comm.shared_memory_channel, "_RUN_AHEAD_BYTES", 1 << 20)
        exchange = shared._on_host._eager._exchange
        most, count = 0, 40
        for number in range(count):
            x = torch.full((50_000,), float(number if ctx.rank == 0 else -1))
            if ctx.rank == 0:
                shared.broadcast(x, 0)
                most = max(most, exchange._places.bytes_in_use)
            else:
                time.sleep(1e-3 * ctx.rank)
                shared.broadcast(x, 0)
                assert set(x.tolist()) == {float(number)}
        assert most <= (1 << 20) + 2 * 204_800
        # The others must have called it, and need not have waited.
        works = [shared.broadcast(torch.ones(50_000), 0, async_op=True) for _ in range(30)]
        if ctx.rank == 0:
            for work in works:
                work.wait()
        by_gloo.barrier()
        if ctx.rank != 0:
            for work in works:
                work.wait()
