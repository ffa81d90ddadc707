"""Raw collectives: every size and dtype, several in flight, waits in any order, clear errors."""

import copy
import time
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from bmt_comm import REDUCE_OPS, Communicator, _compat, init_distributed, shutdown, watch
from bmt_comm import direct_exchange as module
from bmt_comm.receive_memory import ReceiveMemory
from bmt_comm.transport import stop_waiting

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]
# In float32: empty, tiny, not divisible, and around the threshold of the all-reduce in segments.
THRESHOLD = module._ONE_SHOT_BYTES // 4
SIZES = [0, 1, 5, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1]


def values(rank, numel, dtype):
    """Small integers, so that every dtype holds every result exactly."""
    return ((torch.arange(numel) * 7 + rank * 3) % 4 - (0 if dtype == torch.uint8 else 1)).to(dtype)


def expected(stack, op):
    stack = stack.to(torch.float64)
    return {
        "sum": lambda: stack.sum(0),
        "avg": lambda: stack.mean(0),
        "max": lambda: stack.amax(0),
        "min": lambda: stack.amin(0),
        "prod": lambda: stack.prod(0),
    }[op]()


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_reduce_at_every_size(ctx, device_type):
    for numel in SIZES:
        stack = torch.stack([values(r, numel, torch.float32) for r in range(ctx.world_size)])
        for op in REDUCE_OPS:
            x = stack[ctx.rank].clone().to(device_type)
            ctx.world.all_reduce(x, op)
            torch.testing.assert_close(x.cpu().double(), expected(stack, op), rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(1, 2, 3)
def test_all_gather_and_reduce_scatter_at_every_size(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    for numel in SIZES:
        stack = torch.stack([values(r, numel, torch.float32) for r in range(n)])
        out = torch.full((n, numel), -7.0, device=device_type)
        ctx.world.all_gather(out, stack[rank].to(device_type))
        assert torch.equal(out.cpu(), stack)
        out = torch.full((n, numel), -7.0, device=device_type)
        out[rank] = stack[rank]
        ctx.world.all_gather(out, out[rank])  # in place
        assert torch.equal(out.cpu(), stack)
        assert torch.equal(ctx.world.stacked(stack[rank].to(device_type)).cpu(), stack)
        stack = torch.stack([values(r, n * numel, torch.float32) for r in range(n)])
        for op in REDUCE_OPS:
            mine = torch.full((numel,), -7.0, device=device_type)
            source = stack[rank].to(device_type)
            ctx.world.reduce_scatter(mine, source, op)
            part = expected(stack, op).view(n, numel)[rank]
            torch.testing.assert_close(mine.cpu().double(), part, rtol=1e-6, atol=1e-6)
            assert torch.equal(source.cpu(), stack[rank])


@pytest.mark.ranks(2, 3)
def test_every_dtype(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    for dtype in DTYPES:
        for numel in (6, 300_000):  # of 1 byte and up: both sides of the threshold
            stack = torch.stack([values(r, numel, dtype) for r in range(n)])
            for op in REDUCE_OPS:
                want = expected(stack, op)
                if op == "avg" and not dtype.is_floating_point:
                    want = want.floor()
                x = stack[rank].clone().to(device_type)
                ctx.world.all_reduce(x, op)
                torch.testing.assert_close(x.cpu(), want.to(dtype))
                part = torch.empty(numel // n, dtype=dtype, device=device_type)
                ctx.world.reduce_scatter(part, stack[rank].to(device_type), op)
                torch.testing.assert_close(part.cpu(), want.view(n, -1)[rank].to(dtype))
    for dtype in [*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn]:
        stack = torch.stack([values(r, 6, torch.uint8) for r in range(n)]).to(dtype)
        out = torch.empty(n, 6, dtype=dtype, device=device_type)
        ctx.world.all_gather(out, stack[rank].to(device_type))
        assert out.float().tolist() == stack.float().tolist() if not dtype.is_complex else torch.equal(out, stack)
        x = stack[rank].clone().to(device_type)
        ctx.world.broadcast(x, n - 1)
        assert torch.equal(x.cpu().view(torch.uint8), stack[n - 1].view(torch.uint8))
        if rank == 0:
            ctx.world.send(x, 1)
        elif rank == 1:
            box = torch.empty_like(x)
            ctx.world.recv(box, 0)
            assert torch.equal(box.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.ranks(2, 3)
def test_max_and_min_keep_a_nan_whoever_holds_it(ctx, device_type):
    for op in ("max", "min"):
        for numel in (4, 150_000):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(numel, dtype=dtype, device=device_type)
                x[ctx.rank] = float("nan")
                ctx.world.all_reduce(x, op)
                if device_type == "cpu":
                    assert x.isnan().tolist() == [i < ctx.world_size for i in range(numel)]


@pytest.mark.ranks(2, 3)
def test_large_all_reduces_in_many_segments(ctx, device_type):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ONE_SHOT_BYTES", 64)
        patch.setattr(module, "_ONE_SHOT_BYTES_OF_PAIR", 64)
        patch.setattr(module, "_SEGMENT_BYTES", 256)
        patch.setattr(Communicator, "_on_host", property(lambda comm: exchanges[comm.group]))
        exchanges = {ctx.world.group: module.DirectExchange(ctx.world.group)}
        for numel in (65, 64 * ctx.world_size, 64 * ctx.world_size * 9 + 5):
            stack = torch.stack([values(r, numel, torch.float32) for r in range(ctx.world_size)])
            several = [stack[ctx.rank].clone().to(device_type) for _ in range(3)]
            works = [ctx.world.all_reduce(x, op, async_op=True) for x, op in zip(several, ("sum", "max", "avg"))]
            for number in (2, 0, 1) if ctx.rank else (1, 2, 0):
                works[number].wait()
            for x, op in zip(several, ("sum", "max", "avg")):
                torch.testing.assert_close(x.cpu().double(), expected(stack, op), rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(2, 3)
def test_memory_to_receive_into_is_used_again(ctx):
    n, numel = ctx.world_size, 100_000
    memory, taken = ReceiveMemory(1 << 22), []
    take = memory.take

    def noted(*arguments):
        tensor = take(*arguments)
        taken.append(tensor)  # which keeps the allocator from using its memory again
        return tensor

    memory.take = noted
    exchange = module.DirectExchange(ctx.world.group, memory=memory)
    sources = [values(ctx.rank + k, n * numel, torch.float32) for k in range(3)]
    wanted = [sum(values(r + k, n * numel, torch.float32) for r in range(n)).view(n, -1)[ctx.rank] for k in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "_on_host", property(lambda comm: exchange))
        for _ in range(2):
            outs = [torch.empty(numel) for _ in sources]
            works = [ctx.world.reduce_scatter(out, source, async_op=True) for out, source in zip(outs, sources)]
            for number in (1, 0, 2):
                works[number].wait()
            assert all(map(torch.equal, outs, wanted))
        addresses = [tensor.data_ptr() for tensor in taken]
        assert len(set(addresses[:3])) == 3
        assert set(addresses[3:]) == set(addresses[:3])
        with torch.inference_mode():
            ctx.world.reduce_scatter(outs[0], sources[0])
        ctx.world.all_reduce(sources[0], "max")
        ctx.world.reduce_scatter(outs[0], sources[1])
        assert torch.equal(outs[0], wanted[1])


def test_memory_to_receive_into_is_kept_up_to_a_limit():
    memory = ReceiveMemory(most=1 << 20)
    first, second, small = (memory.take(2, numel, torch.float32) for numel in (1 << 16, 1 << 16, 10))
    for tensor in (first, second, small, memory.take(1, 1 << 20, torch.float32)):
        memory.give_back(tensor)
    assert memory.take(2, 1 << 15, torch.float32).untyped_storage().nbytes() == 1 << 18, "kept more than the limit"
    memory.give_back(first)
    again = memory.take(1, 1 << 17, torch.bfloat16)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (1, 1 << 17)
    assert memory.take(1, 1 << 17, torch.bfloat16).data_ptr() != first.data_ptr(), "in use twice"


@pytest.mark.ranks(2, 3, 4)
def test_results_are_the_same_bit_for_bit_on_every_rank(ctx, device_type):
    for numel in (100, 100_003):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(ctx.rank)).to(device_type)
        ctx.world.all_reduce(x, "avg")
        everyone = torch.empty(ctx.world_size, numel, device=device_type)
        ctx.world.all_gather(everyone, x)
        assert torch.equal(everyone, everyone[:1].expand_as(everyone))


@pytest.mark.ranks(2, 3, timeout=30)
def test_several_in_flight_and_waits_in_another_order_on_each_rank(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    sums = [torch.full((70_000 + i,), float(rank + i), device=device_type) for i in range(4)]
    smalls = [torch.full((3,), float(rank * i), device=device_type) for i in range(3)]
    averages = [torch.full((70_000,), float(rank), device=device_type)]
    gathered = [torch.empty(n, size, device=device_type) for size in (1, 4, 50_000)]
    scattered = [torch.empty(size, device=device_type) for size in (1, 4, 50_000)]
    sources = [torch.full((n, out.numel()), float(rank + 1), device=device_type) for out in scattered]
    works = [ctx.world.all_reduce(x, async_op=True) for x in (*sums, *smalls)]
    works += [ctx.world.all_reduce(x, "avg", async_op=True) for x in averages]
    works += [ctx.world.all_gather(out, torch.full_like(out[0], rank), async_op=True) for out in gathered]
    works += [ctx.world.reduce_scatter(out, src, async_op=True) for out, src in zip(scattered, sources)]
    order = list(range(len(works)))
    if rank == 1:
        order.reverse()
    elif rank == 2:
        order = order[5:] + order[:5]
    for index in order:
        works[index].wait()
        works[index].wait()  # again: nothing happens
    assert [set(x.tolist()) for x in sums] == [{float(sum(r + i for r in range(n)))} for i in range(4)]
    assert [set(x.tolist()) for x in smalls] == [{float(sum(r * i for r in range(n)))} for i in range(3)]
    assert set(averages[0].tolist()) == {(n - 1) / 2}
    for out in gathered:
        assert torch.equal(out, torch.arange(float(n), device=device_type)[:, None].expand_as(out))
    for out in scattered:
        assert set(out.tolist()) == {n * (n + 1) / 2}


@pytest.mark.ranks(3)
def test_a_receive_that_waits_does_not_get_what_a_collective_sends(ctx, device_type):
    # Posted before the collectives: their messages must not match it.
    rank, n = ctx.rank, ctx.world_size
    box = torch.empty(4, device=device_type)
    receive = ctx.world.recv(box, (rank - 1) % n, async_op=True)
    out = torch.empty(n, 4, device=device_type)
    ctx.world.all_gather(out, torch.full((4,), -1.0 - rank, device=device_type))
    send = ctx.world.send(torch.full((4,), float(rank), device=device_type), (rank + 1) % n, async_op=True)
    receive.wait()
    send.wait()
    assert box.tolist() == [float((rank - 1) % n)] * 4
    assert out[:, 0].tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.ranks(2)
def test_tags_tell_messages_apart(ctx):
    if ctx.device.type == "cuda":
        pytest.skip("NCCL has no tags")
    a, b = torch.zeros(2), torch.zeros(2)
    if ctx.rank == 0:
        works = [ctx.world.send(torch.full((2,), float(tag)), 1, tag, async_op=True) for tag in (5, 6)]
    else:
        works = [ctx.world.recv(x, 0, tag, async_op=True) for x, tag in ((b, 6), (a, 5))]
    for work in works:
        work.wait()
    if ctx.rank == 1:
        assert (a.tolist(), b.tolist()) == ([5.0, 5.0], [6.0, 6.0])


@pytest.mark.ranks(2, 3)
def test_send_recv_exchanges_with_several_peers_at_once(ctx, device_type):
    rank, n = ctx.rank, ctx.world_size
    peers = [r for r in range(n) if r != rank]
    boxes = {peer: torch.empty(100_000, device=device_type) for peer in peers}
    sends = [(torch.full((100_000,), float(10 * rank + peer), device=device_type), peer) for peer in peers]
    ctx.world.send_recv(sends, [(boxes[peer], peer) for peer in peers])
    for peer in peers:
        assert set(boxes[peer].tolist()) == {float(10 * peer + rank)}
    ctx.world.send_recv([], [])


@pytest.mark.ranks(2)
def test_parameters_can_be_communicated_in_place(ctx, device_type):
    for numel in (3, 70_000):
        p = torch.nn.Parameter(torch.full((numel,), float(ctx.rank + 1), device=device_type))
        ctx.world.all_reduce(p, "avg")
        assert set(p.tolist()) == {1.5}
        ctx.world.broadcast(p, 0)
        out = torch.nn.Parameter(torch.empty(2, numel, device=device_type))
        ctx.world.all_gather(out, p)
        ctx.world.reduce_scatter(p, out)
        assert set(p.tolist()) == {3.0}
        assert p.is_leaf


@pytest.mark.ranks(2)
def test_wrong_calls_are_refused_on_every_rank_before_anything_is_sent(ctx, device_type):
    comm, x = ctx.world, torch.ones(4, 2, device=device_type)
    out = torch.empty(2, 4, 2, device=device_type)
    for call, error, message in [
        (
            lambda: comm.all_reduce(x.t()),
            ValueError,
            r"tensor of shape \(2, 4\) and strides \(1, 2\) is not contiguous",
        ),
        (lambda: comm.all_gather(out, x.t()), ValueError, r"pass src\.contiguous\(\)"),
        (lambda: comm.all_gather(out[..., :1], x), ValueError, r"pass out\.contiguous\(\)"),
        (lambda: comm.reduce_scatter(x, out.transpose(0, 1)), ValueError, "src of shape"),
        (lambda: comm.broadcast(x.t(), 0), ValueError, "not contiguous"),
        (lambda: comm.send(x.t(), 1 - comm.rank), ValueError, "not contiguous"),
        (lambda: comm.all_gather(x, x), ValueError, "all_gather: out has 8 elements; 2 ranks × 8 are needed"),
        (lambda: comm.reduce_scatter(x, x), ValueError, "reduce_scatter: src has 8 elements; 2 ranks × 8"),
        (lambda: comm.all_gather(out, x.double()), ValueError, "out is torch.float32 and src is torch.float64"),
        (lambda: comm.reduce_scatter(x.double(), out), ValueError, "must have the same dtype"),
        (lambda: comm.all_reduce(x.int(), "band"), ValueError, "op='band' is not a reduction; choose one of sum"),
        (lambda: comm.all_reduce(x, "mean"), ValueError, "op='mean' is not a reduction; choose one of sum"),
        (lambda: comm.reduce_scatter(x, out, "SUM"), ValueError, "op='SUM'"),
        (lambda: comm.all_reduce(x.cfloat(), "max"), TypeError, "op='max' is not defined for torch.complex64"),
        (lambda: comm.all_reduce(x.bool(), "avg"), TypeError, "op='avg' is not defined for torch.bool"),
        (
            lambda: Communicator().all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
            TypeError,
            "op='sum' is not defined for torch.float8_e4m3fn",
        ),
        (lambda: comm.broadcast(x, 2), ValueError, r"root=2 is not a rank of this communicator \(0 to 1\)"),
        (lambda: comm.broadcast(x, -1), ValueError, "root=-1"),
        (lambda: comm.broadcast_object(1, 5), ValueError, "root=5"),
        (lambda: comm.send(x, 2), ValueError, "peer=2 is not a rank"),
        (lambda: comm.recv(x, comm.rank), ValueError, "this rank itself"),
        (lambda: comm.send(x, 1 - comm.rank, tag=-1), ValueError, "tag=-1 is out of range"),
        (lambda: comm.recv(x, 1 - comm.rank, tag=1 << 30), ValueError, "tag=1073741824 is out of range"),
    ]:
        with pytest.raises(error, match=message):
            call()
    comm.all_reduce(x)
    assert set(x.flatten().tolist()) == {2.0}


@pytest.mark.ranks(3)
def test_barrier_holds_every_rank_until_the_last_has_come(ctx):
    ctx.world.barrier()
    start = time.monotonic()
    if ctx.rank == 1:
        time.sleep(0.3)
    ctx.world.barrier()
    assert time.monotonic() - start >= 0.28


def be_elsewhere(*paths):
    """Until there are these files. A rank that is elsewhere is ended soon after the time-out; here it has longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_WAKE", 2.5)
        while not all(path.exists() for path in paths):
            time.sleep(0.02)
        shutdown()


@pytest.mark.ranks(2, init=False, timeout=30)
def test_a_collective_that_a_rank_skips_fails_within_the_timeout(tmp_path):
    ctx = init_distributed(timeout=1.5, device="cpu")
    ctx.world.barrier()
    start = time.monotonic()
    if ctx.rank == 0:
        work = ctx.world.all_gather(torch.empty(6), torch.ones(3), async_op=True)
        with pytest.raises(RuntimeError):
            work.wait()
        assert 1 < time.monotonic() - start < 10
        with pytest.raises(RuntimeError):  # waiting again does not pass for success
            work.wait()
        (tmp_path / "0").touch()
    else:
        be_elsewhere(tmp_path / "0")


@pytest.mark.ranks(4, init=False, timeout=60)
def test_the_timeout_holds_for_every_communicator_of_the_layout(tmp_path):
    ctx = init_distributed(timeout=4.0, tp_size=2, device="cpu")  # it holds for the start, too, and machines are busy
    ctx.world.barrier()  # both groups begin at once: a second after the first time-out, the ranks elsewhere are ended
    start = time.monotonic()
    if ctx.tp_rank == 0:
        with pytest.raises(RuntimeError):
            ctx.tp.all_reduce(torch.ones(3))
        assert 3 < time.monotonic() - start < 10
        (tmp_path / str(ctx.rank)).touch()
    else:
        be_elsewhere(tmp_path / "0", tmp_path / "2")


def test_one_rank_alone_needs_no_process_group():
    comm = Communicator()
    assert (comm.rank, comm.size, comm.ranks, comm.stream) == (0, 1, (0,), None)
    x, out = torch.arange(3.0), torch.empty(3)
    for work in (
        comm.all_gather(out, x, async_op=True),
        comm.reduce_scatter(out, x, "avg"),
        comm.all_reduce(x, "prod", async_op=True),
        comm.broadcast(x, 0),
    ):
        work.wait()
    comm.barrier()
    assert out.tolist() == x.tolist() == [0.0, 1.0, 2.0]
    assert (comm.all_gather_object("a"), comm.broadcast_object("b")) == (["a"], "b")
    with pytest.raises(ValueError, match="itself"):
        comm.send(x, 0)
    assert copy.deepcopy(comm) is comm
    assert "size=1" in repr(comm)


@pytest.mark.ranks(2)
def test_communicators_on_one_group_share_its_tags(ctx, device_type):
    twin = Communicator(ctx.world.group, ctx.device)
    outs = [torch.empty(2, 3, device=device_type) for _ in range(4)]
    works = [
        comm.all_gather(out, torch.full((3,), float(10 * i + ctx.rank), device=device_type), async_op=True)
        for i, (comm, out) in enumerate(zip([ctx.world, twin, ctx.world, twin], outs))
    ]
    for work in works if ctx.rank else works[::-1]:
        work.wait()
    assert [out[:, 0].tolist() for out in outs] == [[10.0 * i, 10.0 * i + 1] for i in range(4)]


@pytest.mark.ranks(1, 2, 3)
def test_traffic_counts_what_a_rank_must_send(ctx):
    n, device = ctx.world_size, ctx.device
    comm = Communicator(ctx.world.group, device)
    x, parts = torch.ones(6, device=device), torch.ones(6 * n, dtype=torch.float64, device=device)
    comm.all_gather(torch.empty(n, 6, device=device), x)
    comm.all_gather(torch.empty(n, 6, device=device), x)
    comm.reduce_scatter(torch.empty(6, dtype=torch.float64, device=device), parts)
    comm.all_reduce(x)
    comm.broadcast(x, 0)
    if n > 1:
        comm.send_recv([(x, (ctx.rank + 1) % n)], [(torch.empty_like(x), (ctx.rank - 1) % n)])
    counts = {op: (count.calls, count.bytes) for op, count in comm.traffic.items()}
    if n == 1:
        assert counts == {}
        return
    assert counts == {
        "all_gather": (2, 2 * (n - 1) * 24),
        "reduce_scatter": (1, (n - 1) * 48),
        "all_reduce": (1, 2 * (n - 1) * 24 // n),
        "broadcast": (1, (n - 1) * 24 if ctx.rank == 0 else 0),
        "send": (1, 24),
    }


@pytest.mark.ranks(2)
def test_tensors_that_are_something_else_than_elements_in_memory(ctx):
    ctx.world.share_memory()
    part = torch.full((4,), ctx.rank + 1.0)
    for result in (
        funcol.all_reduce(part, "sum", dist.group.WORLD),
        funcol.all_reduce(part.repeat(9000), "sum", dist.group.WORLD),
    ):
        ctx.world.all_reduce(result)
        assert set(result.tolist()) == {6.0}
    gathered = torch.empty(8)
    ctx.world.all_gather(gathered, funcol.all_reduce(part, "sum", dist.group.WORLD))
    assert set(gathered.tolist()) == {3.0}
    wrapped = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
    with pytest.raises(TypeError, match="tensor is a DTensor; pass the tensor that it wraps"):
        ctx.world.all_reduce(wrapped)
    with pytest.raises(ValueError, match="tensor is conjugated or negated lazily"):
        ctx.world.all_reduce(torch.complex(part, part).conj())
    with pytest.raises(ValueError, match="tensor is on the meta device"):
        ctx.world.all_reduce(part.to("meta"))


class Recorded(dist.ProcessGroup):
    """A process group that notes when it is aborted."""

    aborted: ClassVar[list[dist.ProcessGroup]] = []

    def getBackendName(self):
        return "recorded"

    def abort(self):
        self.aborted.append(self)


@pytest.mark.ranks(1, init=False)
def test_the_latest_process_groups_are_aborted_first():
    dist.Backend.register_backend("recorded", lambda store, rank, size, timeout: Recorded(rank, size), devices=["cpu"])
    dist.init_process_group("recorded", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.group.WORLD, *(dist.new_group([0], backend="recorded") for _ in range(2))]
    _compat.abort(groups)
    assert Recorded.aborted == groups[::-1]


@pytest.mark.ranks(2)
def test_waits_end_where_a_process_group_was_destroyed_and_is_still_held(ctx):
    kept = Communicator(dist.new_group(backend="gloo"), "cpu")
    kept.barrier()
    dist.destroy_process_group(kept.group)
    stop_waiting("the end")
