"""GaLore over shards is galore-torch's on one device."""

import functools
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from galore_reference import needs_galore_torch, on_rank_0, reference_optimizer, trained
from layouts import layout, shards, tensors, train, update_error
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_optim import DistGaloreAdamW, GaLoreAdamW, engine, get_galore_param_groups
from bmt_optim.galore_projection import PROJECTIONS, leading_bases

# Tall, wide and square ones, each sharded by rows, by tensor parallelism along either dimension, or both.
MATRICES = [(24, 8), (12, 5), (7, 4), (4, 9), (3, 10), (2, 9), (8, 8), (6, 6), (1, 6)]
SHAPES = MATRICES * len(PROJECTIONS) + [(5,), (), (4, 6, 3, 2), (3, 8, 5), (2, 6, 7)]
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.1}
# eps: by both bases of a gradient itself ("full") the projected one is diagonal, but for rounding errors; without
# something to compare them with, Adam would make full steps of them.
RANK, GAP = 2, 4


def weights():
    return [0.1 * t for t in tensors(SHAPES)]  # small, so that it shows how steps differ


def gradients(step):
    return tensors(SHAPES, 100 + step)


def groups(params):
    """A group for each kind of projection, and one without."""
    size, projected = len(MATRICES), []
    for n, kind in enumerate(PROJECTIONS):
        projected.append({"params": params[n * size : (n + 1) * size], "rank": RANK, "update_proj_gap": GAP})
        projected[-1].update(scale=0.3, proj_type=kind)
    return [*projected, {"params": params[size * len(PROJECTIONS) :]}]


def reference_groups(params):
    """The same, where galore-torch can: its "reverse_std" fails on flat matrices of no more rows than the rank."""
    all_groups = groups(params)
    mirrored = all_groups[PROJECTIONS.index("reverse_std")]
    flat = [p for p in mirrored["params"] if p.shape[0] < p.shape[1] and p.shape[0] <= RANK]
    assert len(flat) == 2
    order = mirrored["params"]
    split = [
        {**mirrored, "params": [p], "proj_type": "right" if any(p is f for f in flat) else "reverse_std"} for p in order
    ]
    at = PROJECTIONS.index("reverse_std")
    return [*all_groups[:at], *split, *all_groups[at + 1 :]]


@functools.cache
def reference():
    return [p.detach() for p in trained(weights(), reference_groups, gradients, range(10), **OPTIONS)[0]]


def check(ctx):
    start = weights()
    params = shards(start, layout(ctx, SHAPES))
    optimizer = DistGaloreAdamW(groups(params), nbits=32, **OPTIONS)
    train(optimizer, params, range(8), gradients)
    quiet = optimizer.communication
    train(optimizer, params, range(8, 9), gradients)
    renewing = optimizer.communication
    train(optimizer, params, range(9, 10), gradients)
    assert update_error(params, on_rank_0(reference), start) <= 1e-5
    # Projected gradients where ranks shard what is contracted, in one all-reduce per communicator; bases every 4 steps.
    assert (quiet.rounds, renewing.rounds) == ((0, 0) if ctx.world_size == 1 else (1, 3))
    groups_of_ranks = 0 if ctx.world_size == 1 else 1 if ctx.tp_size == 1 else 2 if ctx.data_size == 1 else 3
    assert quiet.collectives == groups_of_ranks
    assert 2 * min(groups_of_ranks, 1) <= renewing.collectives - quiet.collectives <= 2 * groups_of_ranks


@needs_galore_torch
@pytest.mark.ranks(1, 2, 3, 4)
def test_over_row_shards_it_is_the_published_one(ctx):
    check(ctx)


@needs_galore_torch
@pytest.mark.ranks(2, 4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_the_published_one(ctx):
    check(ctx)


@needs_galore_torch
@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("fault", ["drop", "wrong group", "no tp", "no bases"])
def test_a_dropped_or_misdirected_message_is_noticed(ctx, fault):
    reduce_packed, move_packed = engine.reduce_packed, engine.move_packed

    def reduce_badly(reductions, record, *overlap):
        if fault == "drop":
            return
        if fault == "no tp":
            reductions = [r for r in reductions if r.comm is not ctx.tp]
        if fault == "wrong group":
            rows = [r for r in reductions if r.comm is ctx.tp_zero]
            for r, *shapes in zip(rows, *ctx.tp.all_gather_object([r.value.shape for r in rows])):
                r.comm = ctx.tp if shapes[0] == shapes[1] else r.comm
        reduce_packed(reductions, record, *overlap)

    def move_badly(transfers, record, *overlap):
        for t in transfers:
            if t.into is not None:
                t.into.zero_()
        move_packed([t for t in transfers if t.op != "broadcast" or t.comm is not ctx.tp_zero], record, *overlap)

    with pytest.MonkeyPatch.context() as patch:
        if fault == "no bases":
            patch.setattr(engine, "move_packed", move_badly)
        else:
            patch.setattr(engine, "reduce_packed", reduce_badly)
        with pytest.raises(AssertionError, match="update_error"):
            check(ctx)


@pytest.mark.ranks(3, 4)
def test_each_projection_is_one_svd_of_the_unsharded_gradient_by_one_rank(ctx):
    shapes = MATRICES * 2
    params = shards(tensors(shapes), layout(ctx, shapes))
    optimizer = GaLoreAdamW([{"params": params, "rank": RANK, "update_proj_gap": 2, "proj_type": "full"}])
    calls, svd = [], torch.linalg.svd

    def counted(matrix, **options):
        calls.append(tuple(matrix.shape))
        return svd(matrix, **options)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setattr(torch.linalg, "svd", counted)
        train(optimizer, params, range(4), lambda step: tensors(shapes, step))
        assert os.listdir(folder) == []
    gathered = [[] for _ in range(ctx.world_size)]
    dist.all_gather_object(gathered, calls)
    assert sorted(shape for theirs in gathered for shape in theirs) == sorted(shapes * 2)
    assert all(gathered)
    state = optimizer.state_dict(gather=True)["state"]
    for n, (shape, g) in enumerate(zip(shapes, tensors(shapes, 2)) if ctx.rank == 0 else ()):
        left, right = state[n]["projector"].ortho_matrix
        r = min(RANK, *shape)
        u, _, v = svd(g, full_matrices=False)
        for mine, theirs in ((left, u[:, :r]), (right.T, v[:r].T)):
            angles = torch.linalg.svdvals(mine.T @ theirs)  # cosines of those between the subspaces
            torch.testing.assert_close(angles, torch.ones(r))
            torch.testing.assert_close(mine.T @ mine, torch.eye(r), rtol=0, atol=1e-5)
            assert torch.equal(mine, theirs)  # signs included


@pytest.mark.ranks(2)
@pytest.mark.parametrize("svd", ["exact", "gram"])
def test_a_gradient_that_is_not_finite_leaves_no_rank_waiting(ctx, svd):
    params = shards(tensors([(6, 4)]), layout(ctx, [(6, 4)]))
    optimizer = GaLoreAdamW([{"params": params, "rank": 2}], svd=svd)
    params[0].grad = torch.full_like(params[0], torch.nan)
    optimizer.step()
    assert params[0].isnan().all()


@pytest.mark.parametrize("shape", [(60, 20), (20, 60), (30, 30)])
@pytest.mark.parametrize("side", ["left", "right", "full"])
@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_eigenvectors_of_the_gram_matrix_span_the_leading_singular_vectors(shape, side, scale):
    (u, _), (v, _) = (torch.linalg.qr(t) for t in tensors([(shape[0], min(shape)), (shape[1], min(shape))]))
    gradient = scale * u @ torch.logspace(0, -3, min(shape)).diag() @ v.T
    bases = leading_bases(gradient, 6, side, "gram")
    assert bases.keys() == leading_bases(gradient, 6, side).keys()
    for key, basis in bases.items():
        mine, theirs = (basis, u[:, :6]) if key == "ortho_left" else (basis.T, v[:, :6])
        assert (mine.T @ mine - torch.eye(6)).abs().max() <= 1e-5
        assert (theirs - mine @ (mine.T @ theirs)).norm() <= 1e-5
        assert (mine.max(dim=0).values == mine.abs().max(dim=0).values).all()
        cosines = (mine * theirs).sum(dim=0).abs()  # each vector for itself
        assert (cosines - 1).abs().max() <= 1e-5


@pytest.mark.ranks(1, 2)
def test_by_gram_matrices_it_is_the_same_over_shards(ctx):
    shapes = [(12, 5), (4, 9), (6, 6)]
    params, unsharded = shards(tensors(shapes), layout(ctx, shapes)), [nn.Parameter(t) for t in tensors(shapes)]
    for each in (params, unsharded):
        group = {"params": each, "rank": 2, "update_proj_gap": 3, "proj_type": "full"}
        optimizer = GaLoreAdamW([group], nbits=32, svd="gram", **OPTIONS)
        train(optimizer, each, range(10), lambda step: tensors(shapes, 100 + step))
    assert update_error(params, [p.detach() for p in unsharded], tensors(shapes)) <= 1e-5


def by_formula(param, grads, correct_bias, lr, betas, eps, weight_decay, rank=None, scale=1.0, side=None):
    """The parameter after steps of the formula in the docstring of the optimizer."""
    m, n = param.shape
    left, right, one, two = torch.eye(m), torch.eye(n), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        if rank is not None and t % GAP == 1:
            u, _, v = torch.linalg.svd(g, full_matrices=False)
            left, right = left if side == "right" else u[:, :rank], right if side == "left" else v[:rank]
        r = left.T @ g @ right.T
        one, two = betas[0] * one + (1 - betas[0]) * r, betas[1] * two + (1 - betas[1]) * r.square()
        d = one / (two.sqrt() + eps)
        if correct_bias:
            d = d * (1 - betas[1] ** t) ** 0.5 / (1 - betas[0] ** t)
        param = (param - lr * scale * left @ d @ right) * (1 - lr * weight_decay)
    return param


@pytest.mark.parametrize("nbits", [8, 32])
@pytest.mark.parametrize("correct_bias", [True, False])
def test_steps_are_those_of_the_formula(correct_bias, nbits):
    options = {**OPTIONS, "eps": 0.1, "correct_bias": correct_bias}
    (start,), grads = tensors([(24, 20)]), [tensors([(24, 20)], 1 + t)[0] for t in range(GAP + 2)]
    for side in (None, "left", "right", "full"):
        param, group = nn.Parameter(start.clone()), {} if side is None else {"rank": 12, "scale": 0.3}
        kind = {} if side is None else {"proj_type": side, "update_proj_gap": GAP}
        optimizer = DistGaloreAdamW([{"params": [param], **group, **kind}], nbits=nbits, min_8bit_size=1, **options)
        # Weights move by the exact moments, which are rounded to 8 bits afterwards.
        for first, last, error in ((0, 1, 1e-5), (1, len(grads), 1e-5 if nbits == 32 else 0.05)):
            train(optimizer, [param], range(first, last), lambda step: [grads[step]])
            wanted = by_formula(start, grads[:last], side=side, **group, **options)
            assert update_error([param], [wanted], [start]) <= error, side


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.layers(x)


@needs_galore_torch
@pytest.mark.ranks(2, 3, init=False)
def test_dtensors_of_fsdp2_are_trained_as_unsharded_parameters():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, start, model = Mlp(), [p.detach().clone() for p in Mlp().parameters()], Mlp()
    fully_shard(model.layers[0])
    fully_shard(model)
    ours = get_galore_param_groups(model, 0.1, rank=2, update_proj_gap=4)
    assert [len(group["params"]) for group in ours] == [2, 0, 2]
    optimizer = DistGaloreAdamW(ours, lr=0.1, eps=1e-3, nbits=32)
    theirs = reference_optimizer(get_galore_param_groups(plain, 0.1, rank=2, update_proj_gap=4), lr=0.1, eps=1e-3)
    for step in range(10):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        plain.zero_grad()
        (model(x[rank * 6 // size : (rank + 1) * 6 // size]).pow(2).sum() * size / 18).backward()
        (plain(x).pow(2).sum() / 18).backward()
        optimizer.step()
        theirs.step()
    assert update_error(list(model.parameters()), list(plain.parameters()), start) <= 1e-5
    assert optimizer.communication.collectives == 1
