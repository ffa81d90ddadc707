"""Distributed Shampoo over shards is its authors' algorithm on one device."""

import copy
import itertools
import math

import pytest
import torch
from layouts import layout, shards, tensors, train, undivided_layout, update_error

from bmt_comm import slice_of
from bmt_optim import DistributedShampoo
from bmt_optim.slices import unshard

LIMIT = 6
SHAPES = [(6, 4), (5, 7), (13, 3), (5,), (3, 4, 5), (8, 8), (), (2, 1, 3, 2), (0, 3)]
MERGED = [(6, 4), (5, 7), (13, 3), (5,), (3, 4, 5), (8, 8), (1,), (2, 6), (0, 3)]
OPTIONS = {"lr": 3e-2, "epsilon": 0.1, "weight_decay": 0.1, "max_preconditioner_dim": LIMIT}
EVERY, START = 3, 2
RATES = {"precondition_frequency": EVERY, "start_preconditioning_step": START, "grafting_epsilon": 1e-3}
CASES = {
    "Adam": {"betas": (0.9, 0.95), "grafting": "adam", "grafting_beta2": 0.97, "momentum": 0.7, "nesterov": True},
    "Adagrad": {"betas": (0.8, 1.0), "beta3": 0.6, "grafting": "adam", "grafting_beta2": 1.0},
    "SGD": {"betas": (0.9, 0.95), "grafting": "sgd", "momentum": 0.6},
    "none": {"betas": (0.0, 0.95), "grafting": None},
}


def gradients(step):
    return tensors(SHAPES, 100 + step)


class Block:
    """A block of a parameter, in fp64, and the number of the step by which it renews its roots earlier."""

    def __init__(self, p, place, betas, beta3=None, grafting=None, grafting_beta2=0.0, momentum=0.0, nesterov=False):
        self.p, self.place, self.betas, self.beta3 = p, place, betas, betas[0] if beta3 is None else beta3
        self.grafting, self.gamma, self.momentum, self.nesterov = grafting, grafting_beta2, momentum, nesterov
        self.m, self.v, self.u = (torch.zeros_like(p) for _ in range(3))
        self.factors = [torch.zeros(n, n, dtype=p.dtype) for n in p.shape]
        self.roots = None

    def step(self, g, t):
        beta1, beta2 = self.betas
        letters = "abc"[: g.dim()]
        for d, letter in enumerate(letters):
            outer = torch.einsum(f"{letters},{letters.replace(letter, 'z')}->{letter}z", g, g)
            self.factors[d] = beta2 * self.factors[d] + (1 if beta2 == 1 else 1 - beta2) * outer
        self.v = self.gamma * self.v + (1 if self.gamma == 1 else 1 - self.gamma) * g * g
        if t == START or (t > START and (t + self.place) % EVERY == 0):
            self.roots = []
            for factor in self.factors:
                eye = torch.eye(len(factor), dtype=factor.dtype)
                values, vectors = torch.linalg.eigh(factor / (1 if beta2 == 1 else 1 - beta2**t) + 0.1 * eye)
                self.roots.append(vectors @ (values ** (-0.5 / g.dim())).diag() @ vectors.T)
        filtered = (self.beta3 * self.m + (1 - self.beta3) * g) / (1 - self.beta3 * beta1 ** (t - 1))
        self.m = beta1 * self.m + (1 - beta1) * g
        direction = filtered
        if self.grafting == "adam":
            direction = filtered / ((self.v / (1 if self.gamma == 1 else 1 - self.gamma**t)).sqrt() + 1e-3)
        if t >= START:
            turned = filtered
            for d, letter in enumerate(letters):
                turned = torch.einsum(f"{letters},{letter}z->{letters.replace(letter, 'z')}", turned, self.roots[d])
            direction = turned if self.grafting is None else turned * (direction.norm() / turned.norm())
        direction = direction + 0.1 * self.p
        self.u = self.momentum * self.u + direction
        self.p -= 3e-2 * (
            direction + self.momentum * self.u if self.nesterov else self.u if self.momentum else direction
        )


def blocks(x):
    """In the order in which they renew their roots."""
    places = [[slice(at, at + LIMIT) for at in range(0, n, LIMIT)] for n in x.shape]
    return [x[place] for place in itertools.product(*places)]


def reference(start, steps, spread, case):
    params = [t.double().view(shape).clone() for t, shape in zip(start, MERGED)]
    golden = (math.sqrt(5) - 1) / 2
    parts = [
        [Block(b, int(EVERY * ((i + n) * golden % 1)) * spread, **CASES[case]) for n, b in enumerate(blocks(p))]
        for i, p in enumerate(params)
    ]
    for step in steps:
        for mine, g, shape in zip(parts, gradients(step), MERGED):
            for block, part in zip(mine, blocks(g.double().view(shape))):
                block.step(part, step + 1)
    return [p.view(t.shape) for p, t in zip(params, start)]


def check(ctx, case, make_layout=layout, spread=True):
    start = tensors(SHAPES)
    params = shards(start, make_layout(ctx, SHAPES))
    optimizer = DistributedShampoo(params, **OPTIONS, **RATES, **CASES[case], spread=spread)
    train(optimizer, params, range(7), gradients)
    state = ctx.world.all_gather_object(optimizer.state_dict(gather=True))[0]
    unsharded_params = [unshard(p.detach(), slice_of(p)) for p in params]
    params = shards(unsharded_params, undivided_layout(ctx, SHAPES) if make_layout is layout else layout(ctx, SHAPES))
    again = DistributedShampoo(params, **OPTIONS, **CASES[case])
    again.load_state_dict(copy.deepcopy(state))
    train(again, params, range(7, 10), gradients)
    assert update_error(params, reference(start, range(10), spread, case), start) <= 1e-5


@pytest.mark.ranks(1, 3)
def test_over_row_shards_it_is_that_of_its_authors_and_goes_on_elsewhere(ctx):
    for n, case in enumerate(CASES):
        check(ctx, case, spread=n % 2 == 0)


@pytest.mark.ranks(2, tp_size=2)
def test_over_tensor_parallel_shards_and_unsharded_tensors_it_is_that_of_its_authors(ctx):
    check(ctx, "Adam")
    check(ctx, "SGD", undivided_layout)


@pytest.mark.ranks(2)
def test_renewals_are_spread_and_a_gradient_that_is_not_finite_leaves_no_rank_waiting(ctx):
    shapes = [(12, 12)] * 2  # of four blocks each
    params = shards(tensors(shapes), layout(ctx, shapes))
    optimizer = DistributedShampoo(params, **OPTIONS, precondition_frequency=8, start_preconditioning_step=1)
    roots, rounds = [], []
    for step in range(9):
        train(optimizer, params, [step], lambda step: tensors(shapes, step))
        roots.append(torch.stack([optimizer.state[p]["roots"].view(8, 36) for p in params]))
        rounds.append(optimizer.communication.rounds)
    renewed = [(a != b).any(dim=2).sum() // 2 for a, b in itertools.pairwise(roots)]
    assert sum(renewed) == 8
    assert max(renewed) <= 2
    assert rounds == [2, *(1 + bool(renewals) for renewals in renewed)]
    params[0].grad = torch.full_like(params[0], torch.nan)
    for _ in range(8):
        optimizer.step()
    assert params[0].isnan().all()
    assert not params[1].isnan().any()


def test_options_out_of_range_and_those_that_the_state_is_not_of_are_refused():
    param = torch.nn.Parameter(torch.ones(3, 3))
    wrong = {
        "epsilon": 0,
        "betas": (0.9, 1.1),
        "grafting": "lamb",
        "start_preconditioning_step": 2.5,
        "momentum": -1,
        "beta3": -0.5,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            DistributedShampoo([param], **{name: value})
    optimizer = DistributedShampoo([param])
    param.grad = torch.ones(3, 3)
    optimizer.step()
    optimizer.param_groups[0]["grafting"] = "adam"
    with pytest.raises(ValueError, match="exp_avg_sq"):
        optimizer.step()


def test_a_start_that_is_moved_forward_leaves_gradients_as_they_are_until_the_next_roots():
    param = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = DistributedShampoo([param], precondition_frequency=50)
    for step in range(8):
        if step == 4:
            optimizer.param_groups[0]["start_preconditioning_step"] = 2
        before, param.grad = param.detach().clone(), torch.rand(3, 3) + 1
        optimizer.step()
        assert (param < before).all()
    optimizer.param_groups[0]["max_preconditioner_dim"] = 2
    with pytest.raises(ValueError, match="another factors"):
        optimizer.step()
