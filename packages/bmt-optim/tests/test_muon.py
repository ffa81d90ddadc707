"""Muon over shards is torch.optim.Muon on one device."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import layout, shard_slice, shards, tensors, train, update_error
from torch import nn

from bmt_comm import slice_of
from bmt_optim import POLAR_EXPRESS, Muon, engine, get_muon_param_groups
from bmt_optim.logical_params import plan_logical_params
from bmt_optim.muon import orthogonalised
from bmt_optim.slices import unshard

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
@pytest.mark.parametrize("fault", ["gather", "scatter"])
def test_an_exchange_that_is_dropped_or_goes_to_another_rank_is_noticed(ctx, fault):
    move_packed = engine.move_packed

    def broken(transfers, record, *overlap):
        for t in transfers:
            if t.into is not None:
                t.into.zero_()
        move_packed([t for t in transfers if t.op != fault or t.comm is not ctx.tp], record, *overlap)

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
    weights = [unshard(p.detach(), slice_of(p)) for p in params]
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
        p.bmt_slice = shard_slice(shape, ctx.world)
        params.append(p)
    optimizer = Muon(params)
    costs = [optimizer.cost(s, optimizer.param_groups[0]) for s in shapes]
    loads = [0.0] * ctx.world_size
    for logical, cost in zip(plan_logical_params(params, costs), costs):
        loads[logical.owner[0]] += cost
    assert max(loads) <= 1.1 * min(loads)
    # 2 R² C of XXᵀ and of the last product, 2 R³ of the square, five times
    assert costs[2] == 5 * (2 * width**2 * width * 2 + 2 * width**3)


@pytest.mark.ranks(3)
def test_matrices_that_one_rank_holds_stay_where_they_are(ctx):
    kinds = [(12, 6), (6, 8, 4), (9, 5)]
    slices = [shard_slice(shape, ctx.world) for shape in kinds]
    expected = None
    for where in (slices, [replace(s, row_start=0, row_stop=s.shape[0], row_comm=None, row_dims=1) for s in slices]):
        params = shards(tensors(kinds), where)
        optimizer = Muon([{"params": [p], "parts": n} for p, n in zip(params, (3, 1, 3))], **OPTIONS)
        train(optimizer, params, range(4), lambda step: tensors(kinds, step + 1))
        expected = expected or [unshard(p.detach(), slice_of(p)) for p in params]
        assert optimizer.communication.bytes == 0
    for p, q in zip(params, expected):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=2e-3)  # of bf16
    where = shard_slice((10, 6), ctx.world)  # 3, 3 and 4 rows: two parts of five
    param = shards(tensors([(10, 6)]), [where])[0]
    optimizer = Muon([param], parts=2, lr=0.1)
    train(optimizer, [param], range(1), lambda step: tensors([(10, 6)], 1))
    sent = [0, 0, 0]
    dist.all_gather_object(sent, optimizer.communication.bytes)
    # Of each part, what the owner (which holds most of it) lacks: two and one rows, there and back, in bf16.
    assert sum(sent) == 2 * (2 + 1) * 6 * 2


@pytest.mark.ranks(2)
def test_the_number_of_parts_may_change(ctx):
    where = shard_slice((10, 6), ctx.world)
    alone = replace(where, row_start=0, row_stop=10, row_comm=None)
    updates = []
    for part in (where, alone):
        param = shards(tensors([(10, 6)]), [part])[0]
        optimizer = Muon([param], parts=2, lr=0.1)
        train(optimizer, [param], range(2), lambda step: tensors([(10, 6)], 1 + step))
        optimizer.param_groups[0]["parts"] = 5
        train(optimizer, [param], [2], lambda step: tensors([(10, 6)], 1 + step))
        saved = optimizer.state_dict()
        optimizer = Muon([param], parts=2, lr=0.1)
        train(optimizer, [param], [3], lambda step: tensors([(10, 6)], 1 + step))
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["parts"] == 5
        train(optimizer, [param], [4], lambda step: tensors([(10, 6)], 1 + step))
        updates.append(unshard(param.detach(), part))
    torch.testing.assert_close(*updates, rtol=1e-5, atol=2e-3)  # of bf16


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
    for result in (orthogonalised(matrix), orthogonalised(matrix.T).T):
        assert result.dtype is torch.bfloat16
        inner = u.T @ result.float() @ v.T
        assert ((inner.diagonal() > 0.5) & (inner.diagonal() < 1.5)).all()
        assert (inner - inner.diagonal().diag()).abs().max() < 0.05


@pytest.mark.parametrize("shape", [(19, 30), (33, 12), (3, 17, 21), (3, 1, 4)])
def test_half_of_symmetric_products_is_enough(shape, monkeypatch):
    monkeypatch.setattr("bmt_optim.muon._product_dtype", lambda device: torch.float32)
    matrix = tensors([shape])[0]
    expected = orthogonalised(matrix, POLAR_EXPRESS).float()
    monkeypatch.setattr("bmt_optim.muon._MIN_SYMMETRIC_ROWS", 1)
    result = orthogonalised(matrix, POLAR_EXPRESS).float()
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-4)
    assert (result - expected).norm() <= 1e-3 * expected.norm()  # of bf16 results, most of which are the same


def test_only_matrices_and_options_in_range_are_taken():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])
    matrix = nn.Parameter(torch.ones(3, 3))
    wrong = ({"adjust_lr_fn": "best"}, {"ns_steps": 100}, {"momentum": -0.1}, {"parts": True}, {"parts": 2})
    for options in (*wrong, {"ns_coefficients": (1.0, 2.0)}, {"ns_coefficients": ()}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Muon([matrix], **options)
    optimizer = Muon([{"params": [matrix], "use_muon": False}])
    matrix.grad = torch.ones(3, 3)
    optimizer.step()
    state = optimizer.state_dict()
    del state["state"][0]["step"]
    with pytest.raises(ValueError, match="step"):  # AdamW's
        optimizer.load_state_dict(state)
    optimizer = Muon([matrix])
    state = optimizer.state_dict()
    state["param_groups"][0]["parts"] = 2
    with pytest.raises(ValueError, match="parts=2 must divide"):
        optimizer.load_state_dict(state)
    before = matrix.detach().clone()
    for options in ({"parts": 2}, {"parts": 1, "use_muon": False}):  # without betas
        optimizer.param_groups[0].update(options)
        with pytest.raises(ValueError, match=r"parts=2 must divide|betas"):
            optimizer.step()
    assert torch.equal(matrix, before)


KINDS = [(3, 6, 4), (12, 6), (4, 2, 3, 2), (9, 4), (5,), (10, 7)]
MUON = {"lr": 3e-2, "weight_decay": 0.1, "momentum": 0.9, "ns_coefficients": POLAR_EXPRESS, "ns_steps": 4}


def groups_of(params):
    return [
        {"params": [params[0], params[2], params[5]]},
        {"params": [params[1]], "parts": 3, "adjust_lr_fn": "match_rms_adamw"},
        {"params": [params[3], params[4]], "use_muon": False, "lr": 0.01, "weight_decay": 0.2},
    ]


def on_one_device(start, gradients_at, steps):
    """The author's MuonWithAuxAdam, one matrix after the other."""
    params = [t.clone() for t in start]
    first, second = [torch.zeros_like(t) for t in start], [torch.zeros_like(t) for t in start]
    matrices = {0: lambda t: t.unbind(), 1: lambda t: t.split(4), 2: lambda t: [t.view(4, 12)], 5: lambda t: [t]}
    for step in range(1, steps + 1):
        for i, (p, g, m, v) in enumerate(zip(params, gradients_at(step - 1), first, second)):
            if i in (3, 4):
                m.lerp_(g, 0.1)
                v.lerp_(g**2, 0.05)
                p.mul_(1 - 0.01 * 0.2)
                p.sub_(0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-10))
                continue
            m.lerp_(g, 0.1)
            update = g.lerp(m, 0.9)
            p.mul_(1 - 3e-2 * 0.1)
            for part, u in zip(matrices[i](p), matrices[i](update)):
                x = u if u.shape[0] <= u.shape[1] else u.T
                x = x / x.norm()
                for a, b, c in POLAR_EXPRESS[:4]:
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                x = x if u.shape[0] <= u.shape[1] else x.T
                rows, columns = u.shape
                part -= 3e-2 * (0.2 * max(rows, columns) ** 0.5 if i == 1 else max(1, rows / columns) ** 0.5) * x
    return params


def check_kinds(ctx):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bmt_optim.muon._product_dtype", lambda device: torch.float32)
        # In bf16, the order of sums, which differs from processor to processor, decides some roundings.
        patch.setattr("bmt_optim.muon._SENT_DTYPE", torch.float32)
        start = tensors(KINDS)
        params = shards(start, layout(ctx, KINDS))
        optimizer = Muon(groups_of(params), **MUON)
        train(optimizer, params, range(10), lambda step: tensors(KINDS, step + 1))
        expected = on_one_device(start, lambda step: tensors(KINDS, step + 1), 10)
        assert update_error(params, expected, start) <= 1e-5


@pytest.mark.ranks(1, 2)
def test_experts_convolutions_fused_weights_and_the_rest_are_those_of_one_device(ctx):
    check_kinds(ctx)


@pytest.mark.ranks(2, tp_size=2)
def test_tensor_parallel_experts_convolutions_and_fused_weights_are_those_of_one_device(ctx):
    check_kinds(ctx)


def test_polar_express_brings_small_singular_values_to_one(monkeypatch):
    monkeypatch.setattr("bmt_optim.muon._product_dtype", lambda device: torch.float32)
    u, v = (torch.linalg.qr(t)[0] for t in tensors([(9, 9), (12, 9)]))
    matrix = u @ torch.logspace(-2.5, 0, 9).diag() @ v.T
    assert (orthogonalised(torch.stack([matrix, 2 * matrix]), POLAR_EXPRESS, 8).float() - u @ v.T).abs().max() < 0.01
    assert (orthogonalised(matrix).float() - u @ v.T).abs().max() > 0.1


def test_groups_of_a_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions, self.head = nn.Embedding(50, 8), nn.Embedding(8, 8), nn.Linear(8, 50)
            self.up, self.conv, self.gate = nn.Linear(8, 8), nn.Conv2d(2, 4, 3), nn.Linear(8, 2)
            self.cls_token, self.experts_up = nn.Parameter(torch.ones(1, 1, 8)), nn.Parameter(torch.ones(2, 8, 4))

    model = Model()
    groups = get_muon_param_groups(model, adam={"lr": 1e-4}, also_adam=["gate"])
    names = {id(p): name for name, p in model.named_parameters()}
    assert [sorted(names[id(p)] for p in group["params"]) for group in groups] == [
        ["conv.weight", "experts_up", "up.weight"],
        ["cls_token", "gate.weight", "head.weight", "positions.weight", "tokens.weight"],
        ["conv.bias", "gate.bias", "head.bias", "up.bias"],
    ]
    optimizer = Muon(groups, lr=0.02)
    assert [(g["use_muon"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (True, 0.02, 0.1),
        (False, 1e-4, 0.0),
        (False, 1e-4, 0.0),
    ]
    with pytest.raises(ValueError, match=r"parts=3 must divide the rows of a parameter of shape \(8, 8\)"):
        Muon([model.up.weight], parts=3)
    with pytest.raises(ValueError, match="give it to a group with use_muon=False"):
        Muon([model.up.bias])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("shape", [(12, 4), (3, 12, 4)])
def test_parts_that_are_taller_than_wide_are_stepped_as_matrices_of_their_own(ctx, shape):
    parts = 2
    (start,) = tensors([shape])
    (param,) = shards([start], [shard_slice(shape, ctx.world)])
    train(Muon([param], parts=parts, **OPTIONS), [param], range(3), lambda step: tensors([shape], step + 1))
    halves = [t.clone().contiguous() for expert in start.view(-1, 12, 4) for t in expert.chunk(parts)]
    apart = [nn.Parameter(t) for t in halves]

    def grads_at(step):
        (grad,) = tensors([shape], step + 1)
        return [t.contiguous() for expert in grad.view(-1, 12, 4) for t in expert.chunk(parts)]

    train(Muon(apart, **OPTIONS), apart, range(3), grads_at)
    unsharded = torch.cat([p.detach() for p in apart]).view(shape)
    torch.testing.assert_close(unshard(param.detach(), slice_of(param)), unsharded, rtol=1e-5, atol=2e-3)  # of bf16
