"""SOAP over shards is its authors' algorithm on one device."""

import copy
import itertools

import pytest
import torch
from layouts import layout, shards, tensors, train, undivided_layout, update_error
from torch import nn

from bmt_comm import slice_of
from bmt_optim import SOAP, Dion, DistributedShampoo
from bmt_optim.slices import unshard

SHAPES = [(6, 4), (5, 7), (13, 3), (5,), (3, 4, 5), (8, 8), ()]
OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1, "precondition_frequency": 3}
LARGEST = 10


def gradients(step):
    return tensors(SHAPES, 100 + step)


class Author:
    """Of one parameter: the first moment is kept in the eigenbases, and turned back and forth at renewals."""

    def __init__(self, param, place):
        self.param, self.place, self.t = param, place, 0
        self.m, self.v = torch.zeros_like(param), torch.zeros_like(param)
        turns = param.dim() > 1
        self.grams = [torch.zeros(n, n) if turns and n <= LARGEST else None for n in param.shape]
        self.bases = None

    def turn(self, x, back=False):
        for q in self.bases:  # the first dimension becomes the last one
            x = x.movedim(0, -1) if q is None else torch.tensordot(x, q if not back else q.T, dims=([0], [0]))
        return x

    def accumulate(self, g):
        for d, gram in enumerate(self.grams):
            if gram is not None:
                others = [e for e in range(g.dim()) if e != d]
                gram.lerp_(torch.tensordot(g, g, dims=(others, others)), 1 - OPTIONS["betas"][1])

    def renew(self):
        self.m = self.turn(self.m, back=True)
        for d, (gram, q) in enumerate(zip(self.grams, self.bases)):
            if gram is not None:
                order = (q.T @ gram @ q).diagonal().argsort(descending=True)
                self.v = self.v.index_select(d, order)
                self.bases[d] = torch.linalg.qr(gram @ q[:, order])[0]
        self.m = self.turn(self.m)

    def step(self, g):
        (beta1, beta2), lr = OPTIONS["betas"], OPTIONS["lr"]
        if self.bases is None:
            self.accumulate(g)
            self.bases = [None if m is None else torch.linalg.eigh(m)[1].flip(1) for m in self.grams]
            return
        self.t += 1
        turned = self.turn(g)
        self.m = beta1 * self.m + (1 - beta1) * turned
        self.v = beta2 * self.v + (1 - beta2) * turned**2
        rate = lr * (1 - beta2**self.t) ** 0.5 / (1 - beta1**self.t)
        self.param -= rate * self.turn(self.m / (self.v.sqrt() + OPTIONS["eps"]), back=True)
        self.param *= 1 - lr * OPTIONS["weight_decay"]
        self.accumulate(g)
        if (self.t + self.place) % OPTIONS["precondition_frequency"] == 0:
            self.renew()


def reference(start, spread):
    authors = [Author(t.clone(), int(3 * (i * 0.6180339887498949 % 1)) * spread) for i, t in enumerate(start)]
    for step in range(12):
        for author, g in zip(authors, gradients(step)):
            author.step(g)
    return [author.param for author in authors]


def check(ctx, make_layout=layout, spread=True):
    start = tensors(SHAPES)
    params = shards(start, make_layout(ctx, SHAPES))
    optimizer = SOAP(params, **OPTIONS, max_precond_dim=LARGEST, spread=spread)
    train(optimizer, params, range(7), gradients)
    state = ctx.world.all_gather_object(optimizer.state_dict(gather=True))[0]
    unsharded_params = [unshard(p.detach(), slice_of(p)) for p in params]
    params = shards(unsharded_params, undivided_layout(ctx, SHAPES) if make_layout is layout else layout(ctx, SHAPES))
    again = SOAP(params, max_precond_dim=LARGEST, spread=spread)
    again.load_state_dict(copy.deepcopy(state))
    train(again, params, range(7, 12), gradients)
    assert update_error(params, reference(start, spread), start) <= 1e-5


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("spread", [True, False])
def test_over_row_shards_it_is_that_of_its_authors_and_goes_on_elsewhere(ctx, spread):
    check(ctx, spread=spread)


@pytest.mark.ranks(2, tp_size=2)
def test_over_tensor_parallel_shards_it_is_that_of_its_authors(ctx):
    check(ctx)


@pytest.mark.ranks(2)
def test_of_tensors_that_one_rank_holds_it_is_that_of_its_authors(ctx):
    check(ctx, undivided_layout)


@pytest.mark.ranks(2)
def test_renewals_are_spread_and_a_gradient_that_is_not_finite_leaves_no_rank_waiting(ctx):
    params = shards(tensors([(6, 4)] * 4), layout(ctx, [(6, 4)] * 4))
    optimizer = SOAP(params, precondition_frequency=4)
    bases, rounds = [], []
    for step in range(8):
        train(optimizer, params, [step], lambda step: tensors([(6, 4)] * 4, step))
        bases.append([optimizer.state[p]["basis_0"].clone() for p in params])
        rounds.append(optimizer.communication.rounds)
    renewed = [[not torch.equal(a, b) for a, b in zip(*pair)] for pair in itertools.pairwise(bases)]
    assert torch.tensor(renewed[:4]).sum(dim=0).tolist() == [1] * 4
    assert torch.tensor(renewed).sum(dim=1).max() <= 2
    assert rounds == [3, *(2 + any(renewals) for renewals in renewed)]
    params[0].grad = torch.full_like(params[0], torch.nan)
    for _ in range(4):
        optimizer.step()
    assert params[0].isnan().all()
    assert not params[1].isnan().any()
    with pytest.raises(ValueError, match="precondition_frequency=0"):
        SOAP(params, precondition_frequency=0)


@pytest.mark.ranks(2)
def test_ranks_with_other_parameters_before_a_shared_one_renew_it_together(ctx):
    shapes = [(6, 4), (5, 7)]
    mine = [nn.Parameter(torch.ones(3)) for _ in range(ctx.rank)]  # as another stage of a pipeline has
    shared, unsharded = shards(tensors(shapes), layout(ctx, shapes)), [nn.Parameter(t) for t in tensors(shapes)]
    for params in ([*mine, *shared], unsharded):
        optimizer = SOAP(params, **OPTIONS)
        train(optimizer, params[-2:], range(8), lambda step: tensors(shapes, step))
    assert update_error(shared, unsharded, tensors(shapes)) <= 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [SOAP, Dion, DistributedShampoo])
def test_small_odd_shapes_have_the_bits_of_unsharded_tensors(ctx, kind):
    """Their sums lie at odd places of one message; null spaces of bases make much of one other bit."""
    shapes = [(5, 3), (7, 5), (9, 5), (11, 6), (17, 13)]
    sharded, unsharded = shards(tensors(shapes), layout(ctx, shapes)), [nn.Parameter(t) for t in tensors(shapes)]
    for params in (sharded, unsharded):
        train(kind(params), params, range(8), lambda step: tensors(shapes, step))
    for p, expected in zip(sharded, unsharded):
        assert torch.equal(unshard(p.detach(), slice_of(p)), expected.detach())
