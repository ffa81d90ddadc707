"""Muon over shards is torch.optim.Muon on whole matrices."""

import copy

import pytest
import torch
import torch.distributed as dist
from layouts import cut_slice, layout, shards, tensors, train, update_error
from torch import nn

from bmt_comm import slice_of
from bmt_optim import Muon, engine
from bmt_optim.matrix import plan_matrices
from bmt_optim.muon import orthogonalised
from bmt_optim.slices import assemble

SHAPES = [(12, 5), (7, 4), (3, 9), (1, 6), (24, 8), (8, 8), (2, 2)]
OPTIONS = {"lr": 3e-2, "weight_decay": 0.1, "momentum": 0.9}

needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before 2.9")


def gradients(step):
    return tensors(SHAPES, 100 + step)


def reference(steps, start, **options):
    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = torch.optim.Muon(params, **{**OPTIONS, **options})
    for step in steps:
        for p, g in zip(params, gradients(step)):
            p.grad = g.clone()
        optimizer.step()
    return params, optimizer


def check(ctx, **options):
    start = tensors(SHAPES)
    params = shards(start, layout(ctx, SHAPES))
    optimizer = Muon(params, **{**OPTIONS, **options})
    train(optimizer, params, range(10), gradients)
    assert update_error(params, reference(range(10), start, **options)[0], start) <= 1e-5
    made = optimizer.communication
    assert made.rounds == (0 if ctx.world_size == 1 else 2)  # one rank asks nobody
    # An exchange for each round and each communicator that cuts something (of tp only where the owners are).
    if ctx.tp_size == 1:
        assert made.collectives == (2 if ctx.world_size > 1 else 0)
    else:
        assert 2 <= made.collectives <= 6


@needs_torch_muon
@pytest.mark.ranks(1, 2, 3, 4)
def test_over_row_shards_it_is_that_of_torch(ctx):
    check(ctx)


@needs_torch_muon
@pytest.mark.ranks(2, 4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_that_of_torch(ctx):
    check(ctx, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)


@needs_torch_muon
@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("fault", ["own", "return"])
def test_an_exchange_that_is_dropped_or_goes_to_another_rank_is_noticed(ctx, fault):
    move_packed = engine.move_packed

    def broken(transfers, record, *meanwhile):
        for t in transfers:
            if t.into is not None:
                t.into.zero_()
        move_packed([t for t in transfers if t.op != fault or t.comm is not ctx.tp], record, *meanwhile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "move_packed", broken)
        with pytest.raises(AssertionError, match="update_error"):
            check(ctx)


@needs_torch_muon
@pytest.mark.ranks(2)
def test_state_goes_to_torch_and_back_and_resumes_exactly(ctx):
    start = tensors(SHAPES)
    params = shards(start, layout(ctx, SHAPES))
    optimizer = Muon(params, **OPTIONS)
    train(optimizer, params, range(5), gradients)
    saved = [optimizer.state_dict(gather=True)]
    dist.broadcast_object_list(saved)
    weights = [assemble(p.detach(), slice_of(p)) for p in params]
    theirs = [nn.Parameter(w.clone()) for w in weights]
    their_optimizer = torch.optim.Muon(theirs)
    their_optimizer.load_state_dict(copy.deepcopy(saved[0]))
    resumed = shards(weights, layout(ctx, SHAPES))
    ours = Muon(resumed)
    ours.load_state_dict(reference(range(5), start)[1].state_dict())  # which has no count of steps
    for o, ps in ((optimizer, params), (ours, resumed)):
        train(o, ps, range(5, 10), gradients)
    for step in range(5, 10):
        for p, g in zip(theirs, gradients(step)):
            p.grad = g.clone()
        their_optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, resumed))
    assert update_error(params, theirs, start) <= 1e-5


@pytest.mark.ranks(2, 3, 4)
def test_owners_of_a_gpt_have_about_equal_numbers_of_operations(ctx):
    width = 512
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [(8192, width), *(layer * 12)]
    params = []
    for shape in shapes:
        p = nn.Parameter(torch.empty(0))
        p.bmt_slice = cut_slice(shape, ctx.world)
        params.append(p)
    optimizer = Muon(params)
    costs = [optimizer.cost(s, optimizer.param_groups[0]) for s in shapes]
    loads = [0.0] * ctx.world_size
    for matrix, cost in zip(plan_matrices(params, costs), costs):
        loads[matrix.owner[0]] += cost
    assert max(loads) <= 1.1 * min(loads)
    # 2 R² C of XXᵀ and of the last product, 2 R³ of the square, five times
    assert costs[2] == 5 * (2 * width**2 * width * 2 + 2 * width**3)


@pytest.mark.ranks(2)
def test_in_half_precision_it_is_that_of_its_master(ctx):
    start = [t.bfloat16().float() for t in tensors(SHAPES)]
    half, full = (shards(start, layout(ctx, SHAPES), dtype) for dtype in (torch.bfloat16, torch.float32))
    optimizer, other = Muon(half, **OPTIONS), Muon(full, **OPTIONS)

    def rounded(step):
        return [g.bfloat16().float() for g in gradients(step)]

    train(optimizer, half, range(4), rounded, scale=8.0)
    train(other, full, range(4), rounded)
    for p, q in zip(half, full):
        assert torch.equal(optimizer.state[p]["master"], q)
        assert torch.equal(p, q.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_singular_values_come_near_one_and_vectors_stay(dtype, monkeypatch):
    monkeypatch.setattr("bmt_optim.muon._product_dtype", lambda device: dtype)
    matrix = tensors([(20, 8)])[0]
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    for found in (orthogonalised(matrix), orthogonalised(matrix.T).T):
        assert found.dtype is torch.bfloat16
        inner = u.T @ found.float() @ v.T
        assert ((inner.diagonal() > 0.5) & (inner.diagonal() < 1.5)).all()
        assert (inner - inner.diagonal().diag()).abs().max() < 0.05


def test_only_matrices_and_options_in_range_are_taken():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])
    matrix = nn.Parameter(torch.ones(3, 3))
    for options in ({"adjust_lr_fn": "best"}, {"ns_steps": 100}, {"momentum": -0.1}, {"ns_coefficients": (1.0, 2.0)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Muon([matrix], **options)
