"""Slices: their geometry, and that what ``slice_of`` says of a tensor is what the tensor holds."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_comm import SLICE_ATTRIBUTE, Slice, local_tensor, shard_of, slice_of, tp_shard_of, unshard_tp, unsharded_slice
from bmt_comm.slice import _chunk_range


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@st.composite
def sharded_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    tp_dim = draw(st.none() | st.integers(0, len(shape) - 1))
    row_dims = draw(st.integers(1, len(shape)))
    return shape, tp_dim, draw(st.integers(1, 4)), draw(st.integers(1, 4)), row_dims


def make_slice(shape, tp_dim, tp, tp_parts, rows, row_parts, row_dims):
    extra = {}
    if tp_dim is not None:
        start, stop = _chunk_range(shape[tp_dim], tp_parts, tp)
        extra = {"tp_dim": tp_dim, "tp_offset": start, "tp_extent": stop - start}
    tp_shard_shape = [extra["tp_extent"] if dim == tp_dim else length for dim, length in enumerate(shape)]
    tp_shard_rows = math.prod(tp_shard_shape[:row_dims])
    return Slice(shape, *_chunk_range(tp_shard_rows, row_parts, rows), **extra, row_dims=row_dims)


@given(sharded_shapes())
def test_the_slices_of_all_ranks_cover_every_element_once(case):
    shape, tp_dim, tp_parts, row_parts, row_dims = case
    full = numbered(*shape)
    seen = []
    for tp in range(tp_parts if tp_dim is not None else 1):
        for rows in range(row_parts):
            where = make_slice(shape, tp_dim, tp, tp_parts, rows, row_parts, row_dims)
            part = shard_of(full, where)
            assert tuple(part.shape) == where.local_shape
            assert part.numel() == where.numel == (where.row_stop - where.row_start) * where.row_numel
            # the definition: first the tensor-parallel shard, then its rows
            held = full if tp_dim is None else full.narrow(tp_dim, where.tp_offset, where.tp_extent)
            assert tuple(held.shape) == where.tp_shard_shape
            held = held.flatten(0, row_dims - 1)
            assert len(held) == where.tp_shard_rows
            assert torch.equal(part, held[where.row_start : where.row_stop])
            assert not part.numel() or full[where.offset] == part.flatten()[0]
            seen += part.flatten().tolist()
    assert sorted(seen) == full.flatten().tolist()


@given(st.integers(0, 40), st.integers(1, 9))
def test_ranges_are_those_of_torch_chunk(length, parts):
    chunks = [c.tolist() for c in torch.arange(length).chunk(parts)] if length else []
    chunks += [[]] * (parts - len(chunks))
    assert [list(range(*_chunk_range(length, parts, i))) for i in range(parts)] == chunks


def test_tensors_of_no_dimension_are_one_row():
    scalar = torch.tensor(3.0)
    assert slice_of(scalar) == unsharded_slice(scalar) == Slice((), 0, 1)
    held, elsewhere = Slice((), 0, 1), Slice((), 0, 0)
    assert (held.local_shape, held.numel, held.row_numel) == ((), 1, 1)
    assert (elsewhere.local_shape, elsewhere.numel) == ((0,), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 2), 0, 5), r"rows \[0, 5\) are not a range of 4 rows"),
        (((4, 2), 3, 2), r"rows \[3, 2\)"),
        (((4, 2), -1, 2), r"rows \[-1, 2\)"),
        (((4, 2), 0, 3, None, 0, 2, 2), "are not a range of 2 rows"),
        (((4, 2), 0, 4, None, 2, 0, 1), r"tp_dim=2 is not a dimension of shape \(4, 2\)"),
        (((4, 2), 0, 4, None, 1, 1, 2), r"\[1, 3\) is not a range of dimension 1 of shape \(4, 2\)"),
        (((), 0, 2), "not a range of 1 rows"),
        (((4, 3, 2), 0, 13, None, None, 0, 0, None, (), 2), r"rows \[0, 13\) are not a range of 12 rows"),
        (((4, 2), 0, 4, None, None, 0, 0, None, (), 3), r"row_dims=3 is not a number of dimensions of shape \(4, 2\)"),
    ],
)
def test_impossible_slices_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Slice(*arguments)


def test_plain_tensors_are_whole_and_carried_slices_win():
    x = numbered(5, 3)
    assert slice_of(x) == Slice((5, 3), 0, 5)
    assert slice_of(x).communicators == ()
    assert local_tensor(x) is x
    part = x[1:3]
    setattr(part, SLICE_ATTRIBUTE, Slice((5, 3), 1, 3))
    assert slice_of(part).local_shape == (2, 3)
    assert torch.equal(x[1:3], part)
    with pytest.raises(dataclasses.FrozenInstanceError):
        slice_of(part).row_start = 0


def check(x, full):
    """The slice of a DTensor names just what the DTensor holds here, and over whom the rest is spread."""
    from torch import distributed as dist

    where = slice_of(x)
    local = local_tensor(x).detach()
    assert where.shape == tuple(full.shape)
    assert where.local_shape == tuple(local.shape)
    torch.testing.assert_close(local.cpu(), shard_of(full, where), rtol=0, atol=0)
    assert slice_of(x) == where  # the same communicators, not others on the same ranks
    # Summed over its communicators, the numbers of elements are that of the logical tensor.
    count = torch.tensor([float(where.numel)], device=local.device)
    for comm in where.communicators:
        comm.all_reduce(count)
    assert count.item() == full.numel()
    dist.barrier()
    return where


@pytest.mark.ranks(2, 3, 4)
def test_dtensors_on_one_mesh_dimension(ctx):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = ctx.mesh["data"]
    for shape in [(7, 3), (8, 2), (2, 5), (1, 4), (9,), (5, 4, 3)]:
        full = numbered(*shape)
        for placement in (Shard(0), Replicate(), Shard(len(shape) - 1)):
            x = distribute_tensor(full.to(ctx.device), mesh, [placement])
            where = check(x, full)
            if placement == Shard(0):
                assert where.row_comm.size == ctx.world_size
                assert where.tp_comm is None
            elif placement == Replicate():
                assert where.communicators == ()
            elif len(shape) > 1:
                assert (where.row_comm, where.tp_dim, where.tp_comm.size) == (None, len(shape) - 1, ctx.world_size)
    from torch.distributed.tensor import DTensor

    partial = DTensor.from_local(torch.ones(4, device=ctx.device), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"of a DTensor of shape \(4,\) is not a slice; redistribute it"):
        slice_of(partial)


@pytest.mark.ranks(4, tp_size=2)
def test_dtensors_on_two_mesh_dimensions(ctx):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = ctx.mesh["data", "tensor"]
    for shape in [(8, 6), (7, 5), (3, 3), (5, 4, 3)]:
        full = numbered(*shape)
        for placements in (
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(0), Shard(0)],
            [Replicate(), Shard(0)],
            [Shard(0), Replicate()],
            [Replicate(), Shard(1)],
            [Replicate(), Replicate()],
        ):
            check(distribute_tensor(full.to(ctx.device), mesh, placements), full)
    cube = distribute_tensor(numbered(4, 4, 4).to(ctx.device), mesh, [Shard(1), Shard(2)])
    with pytest.raises(ValueError, match="are not one slice"):
        slice_of(cube)


@pytest.mark.ranks(4, tp_size=2)
def test_fsdp2_over_tensor_parallel_modules(ctx):
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)).to(ctx.device)
    full = {}
    for name, p in model.named_parameters():
        p.data.copy_(numbered(*p.shape))
        full[name] = p.detach().cpu().clone()
    parallelize_module(model, ctx.mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=ctx.mesh["data"])
    slices = {name: check(p, full[name]) for name, p in model.named_parameters()}
    # Rows of the tensor-parallel rows: 5 of 10 on this tensor rank, of which 3 or 2 on this data rank.
    assert type(model[0].weight.placements[0]).__name__ == "_StridedShard"
    first = slices["0.weight"]
    assert (first.tp_dim, first.tp_offset, first.tp_extent) == (0, 5 * ctx.tp_rank, 5)
    assert (first.row_start, first.row_stop) == ((0, 3) if ctx.data_rank == 0 else (3, 5))
    assert (first.row_comm.ranks, first.tp_comm.ranks) == (ctx.tp_zero.ranks, ctx.tp.ranks)
    second = slices["1.weight"]
    assert (second.tp_dim, second.tp_offset, second.tp_shard_shape) == (1, 5 * ctx.tp_rank, (6, 5))
    assert slices["1.bias"].tp_comm is None


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("blocks", [(), (6, 6, 6), (12, 6)])
def test_shards_of_a_fused_weight_have_a_part_of_every_block(ctx, dim, blocks):
    full = numbered(18, 18).to(ctx.device)
    n, size, rank = 18 // ctx.world_size, ctx.world_size, ctx.rank
    where = Slice((18, 18), 0, n if dim == 0 else 18, None, dim, rank * n, n, ctx.world, blocks)
    expected = [
        index
        for start, length in zip(torch.tensor([0, *blocks]).cumsum(0).tolist(), blocks or (18,))
        for index in range(start + rank * length // size, start + (rank + 1) * length // size)
    ]
    shard = tp_shard_of(full, where)
    assert torch.equal(shard, full.index_select(dim, torch.tensor(expected, device=ctx.device)))
    assert shard.shape == where.tp_shard_shape
    assert torch.equal(unshard_tp(shard, where), full)
    other = 1 - dim
    assert torch.equal(unshard_tp(shard.narrow(other, 2, 3), where), full.narrow(other, 2, 3))
    if blocks and ctx.world_size > 1:
        with pytest.raises(ValueError, match=f"shard has 1 of the {n} along dimension {dim}, which is sharded in"):
            unshard_tp(shard.narrow(dim, 0, 1), where)


@pytest.mark.ranks(2)
def test_blocks_that_cannot_be_sharded_are_refused(ctx):
    for blocks in [(6, 6), (5, 3)]:
        with pytest.raises(ValueError, match=r"do not make up dimension 0 of shape .* cannot each be sharded over 2"):
            Slice((8,), 0, 4, None, 0, 0, 4, ctx.world, blocks)


@pytest.mark.ranks(2)
def test_rows_of_packed_experts_are_joined_along_columns_only(ctx):
    full = numbered(3, 4, 6).to(ctx.device)
    columns = Slice((3, 4, 6), 2, 7, None, 2, 3 * ctx.rank, 3, ctx.world, row_dims=2)
    held = shard_of(full, columns)
    assert torch.equal(unshard_tp(held, columns), full.view(12, 6)[2:7])
    rows = Slice((3, 4, 6), 1, 4, None, 1, 2 * ctx.rank, 2, ctx.world, row_dims=2)
    with pytest.raises(ValueError, match=r"rows \[1, 4\) .* cannot be unsharded along dimension 1"):
        unshard_tp(shard_of(full, rows), rows)
