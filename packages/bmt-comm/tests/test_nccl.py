"""The functions of ``bmtrain.nccl``."""

import pytest
import torch

from bmt_comm import nccl


@pytest.mark.ranks(1, 3)
def test_collectives_leave_the_source_alone_and_fill_the_destination(ctx, device_type):
    comm, n, rank = ctx.world, ctx.world_size, ctx.rank
    assert (nccl.commCount(comm), nccl.commRank(comm)) == (n, rank)
    src = torch.arange(3.0, device=device_type) + rank
    every = torch.stack([torch.arange(3.0) + r for r in range(n)])
    for op, want in (("sum", every.sum(0)), ("avg", every.mean(0)), ("max", every.amax(0)), ("prod", every.prod(0))):
        dst = torch.zeros(3, device=device_type)
        nccl.allReduce(src, dst, op, comm)
        assert dst.tolist() == want.tolist()
        dst = torch.full((3,), -1.0, device=device_type)
        nccl.reduce(src, dst, op, n - 1, comm)
        assert dst.tolist() == (want.tolist() if rank == n - 1 else [-1.0] * 3)
    for root in range(n):
        dst = torch.zeros(3, device=device_type)
        nccl.broadcast(src, dst, root, comm)
        assert dst.tolist() == every[root].tolist()
    dst = torch.zeros(n, 3, device=device_type)
    nccl.allGather(src, dst, comm)
    assert dst.tolist() == every.tolist()
    part = torch.zeros(3, device=device_type)
    nccl.reduceScatter(dst, part, "sum", comm)
    assert part.tolist() == (n * every[rank]).tolist()
    assert src.tolist() == every[rank].tolist()
    nccl.allReduce(src, src, "sum", comm)  # in place
    assert src.tolist() == every.sum(0).tolist()
    nccl.commDestroy(comm)


@pytest.mark.ranks(2, 3)
def test_a_group_of_sends_and_receives_that_face_each_other(ctx, device_type):
    comm, n, rank = ctx.world, ctx.world_size, ctx.rank
    boxes = [torch.empty(200_000, device=device_type) for _ in range(n)]
    nccl.groupStart()
    for peer in range(n):
        if peer != rank:
            nccl.send(torch.full((200_000,), float(10 * rank + peer), device=device_type), peer, comm)
            nccl.recv(boxes[peer], peer, comm)
    nccl.groupEnd()
    for peer in range(n):
        if peer != rank:
            assert set(boxes[peer].tolist()) == {float(10 * peer + rank)}


@pytest.mark.ranks(2)
def test_send_and_recv_outside_a_group(ctx, device_type):
    box = torch.zeros(2, device=device_type)
    if ctx.rank == 0:
        nccl.send(torch.ones(2, device=device_type), 1, ctx.world)
    else:
        nccl.recv(box, 0, ctx.world)
        assert box.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_wrong_calls(ctx, device_type):
    x = torch.ones(4, device=device_type)
    with pytest.raises(RuntimeError, match=r"groupEnd\(\) without groupStart\(\)"):
        nccl.groupEnd()
    nccl.groupStart()
    with pytest.raises(RuntimeError, match="called twice"):
        nccl.groupStart()
    nccl.groupEnd()  # an empty group
    with pytest.raises(ValueError, match=r"src \(\(4,\), torch.float32\) and dst \(\(2,\), torch.float32\) must"):
        nccl.allReduce(x, x[:2].clone(), "sum", ctx.world)
    with pytest.raises(ValueError, match="root=2 is not a rank"):
        nccl.reduce(x, x, "sum", 2, ctx.world)
    with pytest.raises(ValueError, match=r"dst of shape .* is not contiguous"):
        nccl.allReduce(torch.ones(2, 3, device=device_type), torch.ones(3, 2, device=device_type).t(), "sum", ctx.world)


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_are_buffers_as_tensors_are(ctx, device_type):
    comm, n, rank = ctx.world, ctx.world_size, ctx.rank
    src = torch.arange(3, dtype=torch.float64, device=device_type) + rank
    every = torch.stack([torch.arange(3, dtype=torch.float64) + r for r in range(n)])
    for storage in (torch.Tensor.storage, torch.Tensor.untyped_storage):
        gathered, same = torch.zeros(n, 3, dtype=src.dtype, device=device_type), torch.zeros_like(src)
        nccl.allGather(storage(src), storage(gathered), comm)
        nccl.broadcast(storage(src), storage(same), n - 1, comm)
        assert gathered.tolist() == every.tolist()
        assert same.tolist() == every[-1].tolist()
    summed, part = torch.zeros_like(src), torch.zeros_like(src)
    nccl.allReduce(src.storage(), summed.storage(), "sum", comm)
    nccl.reduceScatter(gathered.storage(), part.storage(), "sum", comm)
    assert summed.tolist() == every.sum(0).tolist()
    assert part.tolist() == (n * every[rank]).tolist()
    nccl.allReduce(src.storage(), src.storage(), "avg", comm)  # in place
    assert src.tolist() == every.mean(0).tolist()
    if n == 2:
        nccl.groupStart()
        nccl.send(torch.full((2,), float(rank), device=device_type).storage(), 1 - rank, comm)
        box = torch.zeros(2, device=device_type)
        nccl.recv(box.storage(), 1 - rank, comm)
        nccl.groupEnd()
        assert box.tolist() == [1.0 - rank] * 2
    with pytest.raises(TypeError, match="does not know the dtype of its elements; pass the tensor"):
        nccl.allReduce(src.untyped_storage(), src.untyped_storage(), "sum", comm)
    with pytest.raises(TypeError, match=r"must be a tensor or its storage\(\), not list"):
        nccl.allReduce([1.0], src, "sum", comm)


@pytest.mark.parametrize("name", ["getUniqueId", "commInitRank", "dtype2nccl", "op2nccl"])
def test_names_without_a_use_say_what_replaces_them(name):
    with pytest.raises(AttributeError, match=f"bmtrain has no nccl.{name}: .+"):
        getattr(nccl, name)
    assert nccl.NCCLCommunicator.__name__ == "Communicator"
    with pytest.raises(AttributeError, match="has no attribute 'anything'"):
        nccl.anything  # noqa: B018
