"""Dion over shards is its authors' algorithm on one device."""

import copy

import pytest
import torch
from layouts import layout, shards, tensors, train, undivided_layout, update_error
from torch import nn

from bmt_comm import slice_of
from bmt_optim import Dion
from bmt_optim.slices import unshard

SHAPES = [(12, 5), (7, 9), (8, 8), (3, 4), (1, 6), (0, 3), (9,), (4, 3, 2)]
MATRICES = SHAPES[:6]
OPTIONS = {"lr": 3e-2, "mu": 0.9, "weight_decay": 0.1, "eps": 1e-6, "rank_fraction": 0.3, "rank_multiple_of": 2}


def gradients(step):
    return [g * (step > 0 or n != 2) for n, g in enumerate(tensors(SHAPES, 100 + step))]  # one is 0 at first


def groups_of(params):
    return [{"params": params[:6]}, {"params": params[6:], "use_muon": False, "lr": 0.01, "betas": (0.8, 0.9)}]


def reference(start, steps, power_iters):
    params = [t.double().clone() for t in start]
    momenta, squares, bases = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params], []
    for p in params[:6]:
        rank = {12: 2, 7: 4, 8: 4, 3: 2, 1: 1, 0: 0}[p.shape[0]]
        bases.append(torch.randn(min(p.shape), rank, generator=torch.Generator().manual_seed(0)).double())
    for step in steps:
        for n, (p, g, m) in enumerate(zip(params, gradients(step), momenta)):
            if n >= 6:
                m.lerp_(g.double(), 0.2)
                squares[n].lerp_(g.double() ** 2, 0.1)
                t = step + 1
                p -= 0.01 * (m / (1 - 0.8**t)) / ((squares[n] / (1 - 0.9**t)).sqrt() + 1e-8)
                continue
            if not p.numel():
                continue
            m += g
            wide = p.shape[0] < p.shape[1]
            b, right = m.T if wide else m, bases[n]
            if b.any():
                for _ in range(power_iters):
                    left = torch.linalg.qr(b @ right)[0]
                    right = b.T @ left
            else:
                left = b.new_zeros(len(b), right.shape[1])
            low = left @ right.T
            m -= 0.1 * (low.T if wide else low)
            bases[n] = right / (right.norm(dim=0, keepdim=True) + 1e-6)
            update = left @ bases[n].T
            p *= 1 - 3e-2 * 0.1
            p -= 3e-2 * (p.shape[0] / p.shape[1]) ** 0.5 * (update.T if wide else update)
    return params


def check(ctx, make_layout=layout, power_iters=1):
    start = tensors(SHAPES)
    params = shards(start, make_layout(ctx, SHAPES))
    optimizer = Dion(groups_of(params), **OPTIONS, power_iters=power_iters)
    train(optimizer, params, range(6), gradients)
    assert optimizer.communication.rounds == (0 if ctx.world_size == 1 or make_layout is undivided_layout else 2)
    state = ctx.world.all_gather_object(optimizer.state_dict(gather=True))[0]
    unsharded_params = [unshard(p.detach(), slice_of(p)) for p in params]
    params = shards(unsharded_params, undivided_layout(ctx, SHAPES) if make_layout is layout else layout(ctx, SHAPES))
    again = Dion(groups_of(params))
    again.load_state_dict(copy.deepcopy(state))
    train(again, params, range(6, 10), gradients)
    assert update_error(params, reference(start, range(10), power_iters), start) <= 1e-5


@pytest.mark.ranks(1, 3)
def test_over_row_shards_it_is_that_of_its_authors_and_goes_on_elsewhere(ctx):
    check(ctx)
    check(ctx, power_iters=2)


@pytest.mark.ranks(2, tp_size=2)
def test_over_tensor_parallel_shards_and_unsharded_tensors_it_is_that_of_its_authors(ctx):
    check(ctx)
    check(ctx, undivided_layout)


def test_only_matrices_and_options_in_range_are_taken():
    matrix = nn.Parameter(torch.ones(3, 3))
    for name, value in {"mu": -1, "rank_fraction": 1.5, "rank_multiple_of": 1.5, "power_iters": 0}.items():
        with pytest.raises(ValueError, match=name):
            Dion([matrix], **{name: value})
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Dion([nn.Parameter(torch.ones(3))])
    optimizer = Dion([matrix])
    matrix.grad = torch.ones(3, 3)
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ValueError, match="another exp_avg"):
        optimizer.step()
    optimizer.param_groups[0].update(use_muon=True, rank_fraction=0.5)
    with pytest.raises(ValueError, match="another Q"):
        optimizer.step()
