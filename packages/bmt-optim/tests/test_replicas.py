"""Ranks that hold the same shard divide the work on matrices, and come to what one process comes to."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from layouts import shard_slice, shards, tensors, train, update_error

from bmt_comm import Slice
from bmt_optim import (
    SOAP,
    Dion,
    DistGaloreAdamW,
    DistributedShampoo,
    Muon,
    dion,
    engine,
    galore_step,
    muon,
    shampoo,
    soap,
)

SHAPES = [(12, 5), (7, 4), (8, 8), (3, 9), (24, 8), (16, 8), (6, 6)]
EXPERTS = [(12, 6), (6, 8, 4), (9, 5)]
RULES = {  # and what an owner calls for a matrix
    "Muon": (lambda p: Muon(p, lr=3e-2), muon, "orthogonalised"),
    "SOAP": (lambda p: SOAP(p, lr=1e-2, precondition_frequency=3), soap, "_new_basis"),
    "Shampoo": (lambda p: DistributedShampoo(p, lr=1e-2, precondition_frequency=3), shampoo, "inverse_root"),
    "Dion": (lambda p: Dion(p, lr=1e-2, rank_multiple_of=1, rank_fraction=0.5), dion, "_low_rank"),
    "GaLore": (lambda p: DistGaloreAdamW([{"params": p, "rank": 3}], lr=1e-2), galore_step, "leading_bases"),
}


def trained(make, slices, group=None):
    shapes = [where.shape for where in slices]
    params = shards(tensors(shapes), slices)
    optimizer = make(params)
    if group is not None:
        optimizer.share_with_replicas(group)
    train(optimizer, params, range(7), lambda step: tensors(shapes, 100 + step))
    return params, optimizer


def counted(work, function, *args, **options):
    work["calls"] += 1
    return function(*args, **options)


def check(ctx, slices, group=None, rules=tuple(RULES)):
    unsharded = [Slice(where.shape, 0, where.shape[0]) for where in slices]
    for name in rules:
        make, module, function = RULES[name]
        work = Counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, function, partial(counted, work, getattr(module, function)))
            expected, plain = trained(make, unsharded)
            alone = work.pop("calls")
            params, optimizer = trained(make, slices, group)
        # GaLore's bases depend on the order of sums more than others.
        assert update_error(params, expected, tensors(SHAPES)) <= (2e-5 if name == "GaLore" else 1e-5), name
        mine, shared = work["calls"], torch.tensor([float(work["calls"])])
        ctx.world.all_reduce(shared)
        assert mine < alone, f"{name}: this rank has done {mine} of {alone}"
        assert shared.item() == alone, f"{name}: all together {shared.item()} of {alone}"
        saved, same = (o.state_dict(gather=True)["state"] for o in (optimizer, plain))
        for index, entry in saved.items() if ctx.rank == 0 else ():
            for key in [key for key, value in entry.items() if isinstance(value, torch.Tensor)]:
                torch.testing.assert_close(entry[key], same[index][key], rtol=1e-4, atol=1e-5, msg=f"{name} {key}")


@pytest.mark.ranks(2, 3)
def test_unsharded_parameters_are_shared_as_under_ddp(ctx):
    unsharded = [Slice(shape, 0, shape[0]) for shape in SHAPES]
    check(ctx, unsharded, dist.group.WORLD)
    _, optimizer = trained(RULES["Muon"][0], unsharded)
    assert optimizer.communication.bytes == 0  # unless it is asked for


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("kind", ["rows", "undivided"])
def test_hybrid_shards_are_shared(ctx, kind):
    rows = ctx.tp_zero
    if kind == "rows":
        check(ctx, [replace(shard_slice(shape, rows), replicate_comm=ctx.tp) for shape in SHAPES])
    else:
        mine = [shape[0] if n % 2 == rows.rank else 0 for n, shape in enumerate(SHAPES)]
        check(ctx, [Slice(shape, 0, stop, rows, replicate_comm=ctx.tp) for shape, stop in zip(SHAPES, mine)])


@pytest.mark.ranks(8, tp_size=2, pipe_size=2)
def test_replicas_of_tensor_parallel_shards_share(ctx):
    slices = [shard_slice(shape, ctx.tp_zero, n % 2, ctx.tp) for n, shape in enumerate(SHAPES)]
    check(ctx, [replace(where, replicate_comm=ctx.pipe) for where in slices], rules=("Muon", "SOAP"))


@pytest.mark.ranks(2)
def test_heads_and_experts_have_owners_among_replicas(ctx):
    def make(params):
        return Muon([{"params": [p], "parts": n} for p, n in zip(params, (3, 1, 3))], lr=3e-2)

    unsharded = [Slice(shape, 0, shape[0]) for shape in EXPERTS]
    expected, _ = trained(make, unsharded)
    params, optimizer = trained(make, unsharded, ctx.world)
    assert update_error(params, expected, tensors(EXPERTS)) <= 1e-5
    halves = sum(p.numel() for p in params) * 2 // 2  # in bf16, of which each rank sends about a half
    assert 0.8 * halves <= optimizer.communication.bytes <= 1.2 * halves


@pytest.mark.ranks(2)
def test_results_that_do_not_reach_replicas_are_noticed(ctx):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine, "move_packed", lambda transfers, *rest: [t.into.zero_() for t in transfers if t.into is not None]
        )
        with pytest.raises(AssertionError, match="Muon"):
            check(ctx, [Slice(shape, 0, shape[0]) for shape in SHAPES], ctx.world, rules=("Muon",))


@pytest.mark.ranks(2)
def test_a_gradient_that_one_replica_lacks_is_an_error_on_all(ctx):
    params = shards(tensors(SHAPES), [Slice(shape, 0, shape[0]) for shape in SHAPES])
    optimizer = Muon(params)
    optimizer.share_with_replicas(ctx.world)
    for n, p in enumerate(params):
        p.grad = None if n == 2 and ctx.rank == 1 else torch.ones_like(p)
    with pytest.raises(RuntimeError, match="there on some ranks that share it and missing on others"):
        optimizer.step()
