"""LAMB over shards is LAMB by its formula, in fp64, on one device."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from layouts import layout, shard_slice, shards, tensors, train, undivided_layout, update_error
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_comm import shard_of, slice_of
from bmt_optim import AdamOptimizer, DistributedLamb, Lamb, engine
from bmt_optim.slices import unshard

SHAPES = [(12, 5), (7, 4), (3, 9), (5,), (1, 6), (4, 6, 3, 2), (2,), (), (3, 6, 5), (2, 4, 6)]
OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def gradients(step):
    return tensors(SHAPES, 100 + step)


class Formula:
    """Algorithm 2 of arXiv:1904.00962, one matrix at a time, in the dtype of the parameters."""

    def __init__(self, params, lr, betas, eps, weight_decay, bias_correction=True):
        self.params, self.t = params, 0
        self.lr, self.betas, self.eps, self.decay, self.correct = lr, betas, eps, weight_decay, bias_correction
        self.m, self.v = ([torch.zeros_like(p) for p in params] for _ in range(2))

    def step(self, grads):
        self.t += 1
        one, two = (1 - beta**self.t for beta in self.betas)
        for p, g, m, v in zip(self.params, grads, self.m, self.v):
            m.mul_(self.betas[0]).add_(g, alpha=1 - self.betas[0])
            v.mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
            a, b = (one, two) if self.correct is True else (1, 1)
            r = (m / a) / ((v / b).sqrt() + self.eps) + self.decay * p
            ratio = p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1
            p.sub_(self.lr * (math.sqrt(two) / one if self.correct == "lr" else 1) * ratio * r)


def reference(steps, start=None, gradients=gradients, **options):
    params = [t.double() for t in start or tensors(SHAPES)]
    formula = Formula(params, **{**OPTIONS, **options})
    for step in steps:
        formula.step([g.double() for g in gradients(step)])
    return params


def check(ctx, **options):
    start = tensors(SHAPES)
    params = shards(start, layout(ctx, SHAPES))
    optimizer = DistributedLamb(params, **{**OPTIONS, **options})
    train(optimizer, params, range(10), gradients)
    assert update_error(params, reference(range(10), **options), start) <= 1e-5
    made = optimizer.communication
    assert made.rounds == (ctx.world_size > 1)
    # One all-reduce for each communicator that cuts something: zero; with tensor parallelism tp_zero and tp, too.
    if ctx.world_size == 1:
        assert made.collectives == made.bytes == 0
    elif ctx.tp_size == 1:
        assert made.collectives == 1
        numels = ctx.world.all_gather_object([p.numel() for p in params])
        shard_of = sum(max(of_ranks) < sum(of_ranks) for of_ranks in zip(*numels))
        assert 0 < shard_of < len(SHAPES)
        assert made.bytes == 2 * (ctx.world_size - 1) * shard_of * 8 // ctx.world_size
    else:
        assert made.collectives == (3 if ctx.data_size > 1 else 2)


@pytest.mark.ranks(1, 2, 3, 4)
def test_over_row_shards_it_is_the_formula(ctx):
    check(ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_the_formula(ctx):
    check(ctx)


@pytest.mark.ranks(2)
def test_weights_in_half_precision_without_masters_among_others(ctx):
    """These have their second pass apart."""
    start = [t.bfloat16().float() for t in tensors(SHAPES)]
    expected = reference(range(5), start)
    slices = layout(ctx, SHAPES)
    dtypes = [torch.bfloat16 if n % 2 == 0 else torch.float32 for n in range(len(SHAPES))]
    params = [shards([t], [where], dtype)[0] for t, where, dtype in zip(start, slices, dtypes)]
    optimizer = Lamb(params, **OPTIONS, stochastic_rounding=True)
    train(optimizer, params, range(5), gradients)
    assert update_error(params[1::2], expected[1::2], start[1::2]) <= 1e-5
    assert update_error(params[::2], expected[::2], start[::2]) <= 0.1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_one_rank_holds_is_stepped_there(ctx, dtype):
    start = [t.to(dtype).float() for t in tensors(SHAPES)]

    def rounded(step):
        return [g.to(dtype).float() for g in gradients(step)]

    params = shards(start, undivided_layout(ctx, SHAPES), dtype)
    optimizer = DistributedLamb(params, **OPTIONS)
    train(optimizer, params, range(10), rounded, scale=4.0)
    assert optimizer.communication.rounds == optimizer.communication.collectives == 0
    weights = [optimizer.state[p].get("master", p) for p in params]
    for weight, p in zip(weights, params):
        weight.bmt_slice = p.bmt_slice
        assert torch.equal(weight.to(dtype), p)
    assert update_error(weights, reference(range(10), start, rounded), start) <= 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("correct", ["moments", "lr", False])
def test_each_published_bias_correction_is_the_formula(ctx, correct):
    start = tensors(SHAPES)
    params = shards(start, layout(ctx, SHAPES))
    train(Lamb(params, **OPTIONS, bias_correction=correct), params, range(5), gradients)
    results = {c: reference(range(5), bias_correction=c) for c in (True, "lr", False)}
    for other, result in results.items():
        right = other == (True if correct == "moments" else correct)
        assert (update_error(params, result, start) <= 1e-5) is right


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("fault", ["drop", "wrong group", "no tp"])
def test_a_dropped_reduction_or_a_wrong_group_is_noticed(ctx, fault):
    reduce_packed = engine.reduce_packed

    def broken(reductions, record, *overlap):
        if fault == "drop":
            return
        if fault == "no tp":
            reductions = [r for r in reductions if r.comm is not ctx.tp]
        if fault == "wrong group":
            for r in reductions:
                r.comm = ctx.tp if r.comm is ctx.tp_zero else r.comm
        reduce_packed(reductions, record, *overlap)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "reduce_packed", broken)
        with pytest.raises(AssertionError, match="update_error"):
            check(ctx)


@pytest.mark.ranks(2)
def test_matrices_larger_than_a_chunk_and_neighbours_without_gradient(ctx):
    shapes = [(300, 517), (3,), (40,)]
    start = tensors(shapes)
    params = shards(start, layout(ctx, shapes))
    optimizer = DistributedLamb([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], **OPTIONS)
    for step in range(3):
        for p, g in zip(params[:2], tensors(shapes, step)):
            p.grad = shard_of(g, slice_of(p))
        optimizer.step()
    expected = [t.double() for t in start]
    for n, lr in ((0, 0.1), (1, OPTIONS["lr"])):
        formula = Formula([expected[n]], **{**OPTIONS, "lr": lr})
        for step in range(3):
            formula.step([tensors(shapes, step)[n].double()])
    assert update_error(params, expected, start) <= 1e-5
    assert optimizer.communication.collectives == 1  # for both groups


@pytest.mark.ranks(1, 2)
def test_weights_or_directions_of_zero_are_stepped_without_the_ratio(ctx):
    shapes = [(4, 3), (4, 3)]
    start = [torch.zeros(4, 3), torch.ones(4, 3)]

    def gradients(step):
        return [torch.full((4, 3), 0.5), torch.zeros(4, 3)]

    params = shards(start, layout(ctx, shapes))
    train(DistributedLamb(params, lr=0.1), params, range(1), gradients)
    assert torch.allclose(params[0], torch.full_like(params[0], -0.1))
    assert torch.equal(params[1], torch.ones_like(params[1]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_masters_follow_the_formula_and_loss_scale_does_not_matter(ctx, dtype):
    start = [t.to(dtype).float() for t in tensors(SHAPES)]

    def rounded(step):
        return [g.to(dtype).float() for g in gradients(step)]

    params = shards(start, layout(ctx, SHAPES), dtype)
    optimizer = DistributedLamb(params, **OPTIONS)
    train(optimizer, params, range(10), rounded, scale=64.0)
    masters = [optimizer.state[p]["master"] for p in params]
    for m, p in zip(masters, params):
        assert torch.equal(m.to(dtype), p)
        m.bmt_slice = p.bmt_slice
    assert update_error(masters, reference(range(10), start, rounded), start) <= 1e-5


@pytest.mark.ranks(2)
def test_without_masters_each_weight_is_one_of_the_two_neighbours_of_the_formula(ctx):
    # Trust ratios differ between parameters.
    start = [((n + 1) * t).bfloat16().float() for n, t in enumerate(tensors(SHAPES))]
    params = shards(start, layout(ctx, SHAPES), torch.bfloat16)
    exact = shards(start[1::2], [slice_of(p) for p in params[1::2]])
    params[1::2] = exact  # in one batch with the others
    optimizer = DistributedLamb(params, **{**OPTIONS, "lr": 0.3}, stochastic_rounding=True)
    for p, g in zip(params, gradients(0)):
        p.grad = shard_of(g, slice_of(p)).to(p.dtype)
    optimizer.step()
    expected = [t.double() for t in start]
    Formula(expected, **{**OPTIONS, "lr": 0.3}).step([g.to(p.dtype).double() for p, g in zip(params, gradients(0))])
    for p, e, s in zip(params, expected, start):
        ours, wanted = p.detach().double(), shard_of(e, slice_of(p))
        step = 2.0**-7 if p.dtype is torch.bfloat16 else 1e-6
        assert ((ours - wanted).abs() <= step * wanted.abs() + 1e-6).all()
        assert ((wanted - shard_of(s, slice_of(p))).abs() > 1e-4).any() or p.numel() == 0


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_gathered_at_one_layout_is_loaded_at_another_and_goes_on_exactly(ctx, dtype):
    start = [t.to(dtype).float() for t in tensors(SHAPES)]
    params = shards(start, layout(ctx, SHAPES), dtype)
    optimizer = DistributedLamb(params, **OPTIONS)
    train(optimizer, params, range(5), gradients)
    saved = [optimizer.state_dict(gather=True)]
    assert sorted(saved[0]["state"]) == (list(range(len(SHAPES))) if ctx.rank == 0 else [])
    dist.broadcast_object_list(saved)
    for index, p in enumerate(params):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[0]["state"][index][key], unshard(optimizer.state[p][key], slice_of(p)))
    weights = [unshard(p.detach(), slice_of(p)) for p in params]
    # By rows only, and at the same layout with the local state.
    others = [shard_slice(s, ctx.world) for s in SHAPES]
    moved, same = shards(weights, others, dtype), shards(weights, layout(ctx, SHAPES), dtype)
    resharded, resumed = DistributedLamb(moved), DistributedLamb(same)
    resharded.load_state_dict(saved[0])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for o, ps in ((optimizer, params), (resumed, same), (resharded, moved)):
        train(o, ps, range(5, 10), gradients)
    assert all(torch.equal(p, q) for p, q in zip(params, same))
    if dtype is torch.float32:
        assert update_error(moved, reference(range(10)), start) <= 1e-5
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.ranks(2)
def test_a_state_dict_that_does_not_fit_changes_nothing(ctx):
    params = shards(tensors(SHAPES), layout(ctx, SHAPES))
    optimizer = DistributedLamb(params, **OPTIONS)
    train(optimizer, params, range(1), gradients)
    before = copy.deepcopy(optimizer.state_dict())
    for change, message in (
        (lambda d: d["state"][0].pop("exp_avg"), "parameter 0 has no tensor 'exp_avg'"),
        (lambda d: d["state"][2].update(exp_avg=torch.ones(2, 2)), r"parameter 2 has shape \(2, 2\)"),
        (lambda d: d["state"][0].pop("step"), "step of parameter 0 is None"),
        (lambda d: d["param_groups"][0].update(lr=-1.0), r"param_groups\[0\].*lr=-1.0"),
    ):
        wrong = copy.deepcopy(before)
        change(wrong)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i][k], t) for i, entry in before["state"].items() for k, t in entry.items())
    # Adam has the same state.
    adam = AdamOptimizer(params)
    adam.load_state_dict(before)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.ranks(2, 3, init=False)
def test_dtensors_of_fsdp2_are_trained_as_unsharded_parameters():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, start, model = Mlp(), [p.detach().clone() for p in Mlp().parameters()], Mlp()
    fully_shard(model.layers[0])
    fully_shard(model)
    params, unsharded = list(model.parameters()), [p.detach() for p in plain.parameters()]
    optimizer, formula = DistributedLamb(params, **OPTIONS), Formula(unsharded, **OPTIONS)
    for step in range(10):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        plain.zero_grad()
        (model(x[rank * 6 // size : (rank + 1) * 6 // size]).pow(2).sum() * size / 18).backward()
        (plain(x).pow(2).sum() / 18).backward()
        optimizer.step()
        formula.step([p.grad for p in plain.parameters()])
    assert update_error(params, unsharded, start) <= 1e-5
    assert optimizer.communication.collectives == 1
    state = optimizer.state_dict(gather=True)["state"]
    for i, entry in state.items():
        torch.testing.assert_close(entry["exp_avg"], formula.m[i])
    assert len(state) == (4 if rank == 0 else 0)


def test_options_out_of_range_are_refused_and_nothing_changes():
    p = nn.Parameter(torch.ones(2))
    for options in ({"lr": -1}, {"betas": (0.9, 1.0)}, {"eps": math.inf}, {"bias_correction": "momenta"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DistributedLamb([p], **options)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        DistributedLamb([p.detach().double()])
    optimizer = DistributedLamb([p])
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match="scale=0"):
        optimizer.step(scale=0)
    optimizer.param_groups[0]["lr"] = -1
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.step()
    assert torch.equal(p, torch.ones(2))
    copied = copy.deepcopy(optimizer)
    copied.param_groups[0]["lr"] = 0.1
    copied.param_groups[0]["params"][0].grad = torch.ones(2)
    assert copied.step(lambda: 3) == 3
    assert torch.equal(p, torch.ones(2))
