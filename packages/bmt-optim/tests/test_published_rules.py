"""Lion, AdEMAMix, schedule-free AdamW, Adam-mini and APOLLO over shards are their formulas in fp64."""

import copy
import math

import pytest
import torch
from layouts import layout, shards, tensors, train, undivided_layout, update_error
from torch import nn

from bmt_comm import slice_of
from bmt_optim import APOLLO, AdamMini, AdamW, AdEMAMix, Lion, ScheduleFreeAdamW, get_adam_mini_param_groups
from bmt_optim.slices import unshard

SHAPES = [(12, 5), (7, 4), (3, 9), (5,), (1, 6), (4, 6, 3, 2), (2,), (), (1,), (1, 1), (3, 6, 5), (2, 4, 6)]
MATRICES = [(12, 5), (6, 9), (3, 9), (18, 18), (5, 12)]
HEADS = [(12, 5), (6, 9), (18, 4), (3, 7)]
BETAS = (0.8, 0.95)


class Lioness:
    def __call__(self, p, g, t, lr, betas, weight_decay):
        m = self.m = getattr(self, "m", torch.zeros_like(p))
        p.sub_(lr * weight_decay * p + lr * (betas[0] * m + (1 - betas[0]) * g).sign())
        self.m = betas[1] * m + (1 - betas[1]) * g


class Mixture:
    def __call__(self, p, g, t, lr, betas, eps, weight_decay, alpha, warm_up):
        if t == 1:
            self.m, self.s, self.v = (torch.zeros_like(p) for _ in range(3))
        one, two, three = betas
        if t < warm_up:  # with the half-lives log(1/2) / log(β) in between
            alpha = alpha * t / warm_up
            half_lives = [math.log(0.5) / math.log(beta) for beta in (one, three)]
            three = 0.5 ** (1 / (half_lives[0] * (1 - t / warm_up) + half_lives[1] * t / warm_up))
        self.m = one * self.m + (1 - one) * g
        self.s = three * self.s + (1 - three) * g
        self.v = two * self.v + (1 - two) * g * g
        denominator = (self.v / (1 - two**t)).sqrt() + eps
        p.sub_(lr * ((self.m / (1 - one**t) + alpha * self.s) / denominator + weight_decay * p))


class ScheduleFree:
    def __call__(self, p, g, t, lr, betas, eps, weight_decay, warm_up, r, weight_lr_power):
        if t == 1:
            self.z, self.x, self.v, self.total, self.largest = p.clone(), p.clone(), torch.zeros_like(p), 0.0, 0.0
        rate = lr * min(1, t / warm_up)
        self.largest = max(self.largest, rate)
        share = t**r * self.largest**weight_lr_power
        self.total += share
        c = share / self.total
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        direction = g / ((self.v / (1 - betas[1] ** t)).sqrt() + eps) + weight_decay * p
        # The paper's three sequences: z is stepped, x averages it, and the gradient is taken between them.
        self.z = self.z - rate * direction
        self.x = (1 - c) * self.x + c * self.z
        p.copy_((1 - betas[0]) * self.z + betas[0] * self.x)


class Mini:
    def __call__(self, p, g, t, lr, betas, eps, weight_decay, block):
        if block == "row" and p.dim() > 1:
            means = (g * g).mean(-1, keepdim=True).expand_as(g)
        elif block in ("row", "element"):
            means = g * g
        elif block == "tensor":
            means = (g * g).mean().expand_as(g)
        else:
            blocks = (g * g).view(-1, block * g.shape[-1])
            means = blocks.mean(-1, keepdim=True).expand_as(blocks).reshape(g.shape)
        if t == 1:
            self.m, self.v = torch.zeros_like(p), torch.zeros_like(p)
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * means
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * (self.m / (1 - betas[0] ** t)) / ((self.v / (1 - betas[1] ** t)).sqrt() + eps))


class Projected:
    def __init__(self, index):
        self.index = index

    def __call__(self, p, g, t, lr, betas, eps, weight_decay, rank, update_proj_gap, scale, scale_type):
        tall = p.shape[0] >= p.shape[1]
        r = min(rank, *p.shape)
        seed = self.index * 0x9E3779B1 + (t - 1) // update_proj_gap
        basis = torch.randn(p.shape[1 if tall else 0], r, generator=torch.Generator().manual_seed(seed))
        basis = basis.to(p.dtype) / math.sqrt(r)
        low = g @ basis if tall else basis.T @ g
        if t == 1:
            self.m, self.v, self.norm = torch.zeros_like(low), torch.zeros_like(low), None
        self.m = betas[0] * self.m + (1 - betas[0]) * low
        self.v = betas[1] * self.v + (1 - betas[1]) * low * low
        direction = self.m / (self.v.sqrt() + eps)
        kwargs = {} if scale_type == "tensor" else {"dim": 1 if tall else 0, "keepdim": True}
        update = g * direction.norm(**kwargs) / (low.norm(**kwargs) + 1e-8)
        if self.norm is not None:
            update = update / (max(update.norm() / (self.norm + 1e-8), 1.01) / 1.01)
        self.norm = update.norm()
        step = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
        p.sub_(step * math.sqrt(scale) * update)
        p.mul_(1 - lr * weight_decay)


ADAM_MINI = {"lr": 3e-2, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.1}
PROJECTION = {"update_proj_gap": 4, "scale": 2.0}
CASES = {
    "Lion": (Lion, Lioness, SHAPES, {"lr": 1e-2, "betas": BETAS, "weight_decay": 0.1}),
    "AdEMAMix": (
        AdEMAMix,
        Mixture,
        SHAPES,
        {"lr": 3e-2, "betas": (*BETAS, 0.99), "eps": 1e-6, "weight_decay": 0.1, "alpha": 2.0, "warm_up": 6},
    ),
    "schedule-free": (
        ScheduleFreeAdamW,
        ScheduleFree,
        SHAPES,
        {**ADAM_MINI, "warm_up": 4, "r": 0.5, "weight_lr_power": 2.0},
    ),
    "Adam-mini, rows": (AdamMini, Mini, SHAPES, {**ADAM_MINI, "block": "row"}),
    "Adam-mini, heads": (AdamMini, Mini, HEADS, {**ADAM_MINI, "block": 3}),
    "Adam-mini, tensors": (AdamMini, Mini, SHAPES, {**ADAM_MINI, "block": "tensor"}),
    "Adam-mini, elements": (AdamMini, Mini, SHAPES, {**ADAM_MINI, "block": "element"}),
    "APOLLO": (APOLLO, Projected, MATRICES, {**ADAM_MINI, **PROJECTION, "rank": 4, "scale_type": "channel"}),
    "APOLLO-Mini": (APOLLO, Projected, MATRICES, {**ADAM_MINI, **PROJECTION, "rank": 1, "scale_type": "tensor"}),
}


def made(case, params):
    """The optimizer of a case."""
    cls, _, _, options = CASES[case]
    if "rank" in options:
        rest = {key: value for key, value in options.items() if key != "rank"}
        return cls([{"params": params, "rank": options["rank"]}], **rest)
    return cls(params, **options)


def gradients(case):
    shapes = CASES[case][2]
    return lambda step: tensors(shapes, 100 + step)


def reference(case, steps, start, grads_at):
    _, formula, _, options = CASES[case]
    params = [t.double() for t in start]
    formulas = [formula(n) if formula is Projected else formula() for n in range(len(params))]
    for t, step in enumerate(steps, 1):
        for p, g, each in zip(params, grads_at(step), formulas):
            each(p, g.double(), t, **options)
    return params


def check(case, ctx, make_layout=layout, dtype=torch.float32, scale=1.0):
    shapes = CASES[case][2]
    start = [t.to(dtype).float() for t in tensors(shapes)]

    def grads_at(step):
        return [g.to(dtype).float() for g in gradients(case)(step)]

    params = shards(start, make_layout(ctx, shapes), dtype)
    optimizer = made(case, params)
    train(optimizer, params, range(10), grads_at, scale)
    weights = [optimizer.state[p].get("master", p) for p in params]
    for weight, p in zip(weights, params):
        weight.bmt_slice = slice_of(p)
        assert torch.equal(weight.to(dtype), p)
    assert update_error(weights, reference(case, range(10), start, grads_at), start) <= 1e-5


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("case", CASES)
def test_over_row_shards_it_is_the_formula(ctx, case):
    check(case, ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
@pytest.mark.parametrize("case", CASES)
def test_over_tensor_parallel_shards_it_is_the_formula(ctx, case):
    check(case, ctx)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_half_precision_of_which_one_rank_holds_a_tensor(ctx, case):
    check(case, ctx, undivided_layout, torch.bfloat16, scale=4.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_a_gathered_state_goes_on_elsewhere_to_the_last_bit(ctx, case):
    shapes = CASES[case][2]
    params = shards(tensors(shapes), layout(ctx, shapes))
    optimizer = made(case, params)
    train(optimizer, params, range(5), gradients(case))
    state = ctx.world.all_gather_object(optimizer.state_dict(gather=True))[0]
    unsharded_params = [unshard(p.detach(), slice_of(p)) for p in params]
    others = shards(unsharded_params, undivided_layout(ctx, shapes))
    again = made(case, others)
    again.load_state_dict(copy.deepcopy(state))
    gathered = ctx.world.all_gather_object(again.state_dict(gather=True))[0]
    for index, entry in state["state"].items():
        assert entry.keys() == gathered["state"][index].keys()
        assert all(torch.equal(value, gathered["state"][index][key]) for key, value in entry.items())
    train(optimizer, params, range(5, 8), gradients(case))
    train(again, others, range(5, 8), gradients(case))
    assert update_error(others, [unshard(p.detach(), slice_of(p)) for p in params], unsharded_params) <= 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_stand_in_while_a_schedule_free_model_is_evaluated(ctx, dtype):
    case = "schedule-free"
    shapes, options = CASES[case][2:]
    start = [t.to(dtype).float() for t in tensors(shapes)]
    params = shards(start, layout(ctx, shapes), dtype)
    optimizer = made(case, params)
    with optimizer.evaluating():  # before the first step
        pass
    train(optimizer, params, range(5), gradients(case))
    plain = [t.double() for t in start]
    formulas = [ScheduleFree() for _ in plain]
    for step in range(5):
        for p, g, formula in zip(plain, gradients(case)(step), formulas):
            formula(p, g.to(dtype).double(), step + 1, **options)
    before = [p.detach().clone() for p in params]
    with optimizer.evaluating():
        for p, formula in zip(params, formulas):  # rounded to nearest
            x = unshard(p.detach(), slice_of(p)).double()
            torch.testing.assert_close(x, formula.x, rtol=1e-5 if dtype is torch.float32 else 2**-8, atol=1e-6)
        with pytest.raises(RuntimeError, match="averages"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="within"), optimizer.evaluating():
            pass
        state = {"state": {}, "param_groups": []}
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(state), optimizer.state_records):
            with pytest.raises(RuntimeError, match="averages"):
                call()
    assert all(torch.equal(p, b) for p, b in zip(params, before))


@pytest.mark.ranks(1)
def test_groups_of_adam_mini_go_by_names(ctx):
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 8),
            "q_proj": nn.Linear(8, 8),
            "mlp": nn.Linear(8, 8),
            "norm": nn.LayerNorm(8),
            "attn_c_attn": nn.Linear(8, 24, bias=False),
            "output_norm": nn.LayerNorm(8, bias=False),
        }
    )
    groups = get_adam_mini_param_groups(model.named_parameters(), weight_decay=0.1, head_dim=4)
    names = {id(p): name for name, p in model.named_parameters()}
    names_by_group = {(g["block"], g["weight_decay"]): sorted(names[id(p)] for p in g["params"]) for g in groups}
    assert names_by_group == {
        ("row", 0.1): ["attn_c_attn.weight", "embed.weight", "mlp.weight"],
        (4, 0.1): ["q_proj.weight"],
        ("element", 0.0): ["mlp.bias", "norm.bias", "q_proj.bias"],
        ("tensor", 0.0): ["norm.weight", "output_norm.weight"],
    }
    AdamMini(groups)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Lion, {"lr": -1.0}),
        (AdEMAMix, {"betas": (0.9, 0.99)}),
        (ScheduleFreeAdamW, {"betas": (0.0, 0.9)}),
        (AdamMini, {"block": "heads"}),
        (AdamMini, {"block": 0}),
        (APOLLO, {"scale_type": "row"}),
        (APOLLO, {"update_proj_gap": 0}),
    ],
)
def test_options_out_of_range_are_refused(ctx, cls, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        cls([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.ranks(1)
def test_a_block_that_does_not_divide_a_matrix_is_refused_at_once(ctx):
    with pytest.raises(ValueError, match="block=4"):
        AdamMini([nn.Parameter(torch.zeros(6, 2))], block=4)


@pytest.mark.ranks(1)
def test_adamw_stays_decoupled_whatever_it_loads(ctx):
    [start] = tensors([(3, 4)])
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    theirs, ours = torch.optim.AdamW(params[:1], weight_decay=0.5), AdamW(params[1:], weight_decay=0.5)
    adam = torch.optim.Adam([nn.Parameter(start.clone())], weight_decay=0.5)
    train(adam, adam.param_groups[0]["params"], range(3), lambda step: tensors([(3, 4)], step))
    for param, optimizer in zip(params, (theirs, ours)):
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
        train(optimizer, [param], range(3, 6), lambda step: tensors([(3, 4)], step))
    assert update_error(params[1:], params[:1], [start]) <= 1e-5
    state = torch.optim.AdamW(params[:1], amsgrad=True)
    train(state, params[:1], range(1), lambda step: tensors([(3, 4)], step))
    with pytest.raises(ValueError, match="amsgrad"):
        ours.load_state_dict(state.state_dict())
