"""Adam over shards of every kind gives the update of one process, and state dicts move between layouts."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_comm import Slice, local_tensor, shard_of, slice_of
from bmt_optim import AdamOptimizer
from bmt_optim.slices import unshard

SHAPES = [(7, 5), (1, 3), (2,), (), (10, 1, 2)]
OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def row_slice(shape, comm, tp_dim=None, tp_comm=None):
    """The slice of the rank-th of ``comm.size`` ragged row ranges, with ``tp_dim`` sharded almost evenly."""
    tp_offset = tp_extent = 0
    rows = shape[0] if shape else 1
    if tp_comm is not None and tp_dim is not None:
        tp_offset = shape[tp_dim] * tp_comm.rank // tp_comm.size
        tp_extent = shape[tp_dim] * (tp_comm.rank + 1) // tp_comm.size - tp_offset
        rows = tp_extent if tp_dim == 0 else rows
    else:
        tp_dim = tp_comm = None
    start, stop = rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size
    return Slice(tuple(shape), start, stop, comm, tp_dim, tp_offset, tp_extent, tp_comm)


def shards(tensors, slices, dtype=torch.float32):
    """Parameters and gradients end to end in one buffer each."""
    locals_ = [shard_of(t, where) for t, where in zip(tensors, slices)]
    data = torch.cat([t.reshape(-1) for t in locals_]).to(dtype)
    grads = torch.zeros_like(data)
    params, at = [], 0
    for t, where in zip(locals_, slices):
        assert t.shape == where.local_shape
        p = nn.Parameter(data[at : at + t.numel()].view(t.shape))
        p.grad = grads[at : at + t.numel()].view(t.shape)
        p.bmt_slice = where
        params.append(p)
        at += t.numel()
    return params


def layout(ctx, kind):
    if kind == "tensor parallel":
        return [row_slice(s, ctx.tp_zero, tp_dim, ctx.tp) for s, tp_dim in zip(SHAPES, (0, 1, None, None, 0))]
    return [row_slice(s, ctx.world) for s in SHAPES]


def train(optimizer, params, steps, grads_at=values):
    for step in steps:
        for p, g in zip(params, grads_at(step + 1)):
            mine = shard_of(g, slice_of(p)).to(p.dtype)
            if p.grad is None:
                p.grad = mine.clone()
            else:
                p.grad.copy_(mine)
        optimizer.step()


def update_error(params, reference, start):
    difference = total = 0.0
    for p, q, s in zip(params, reference, start):
        unsharded = unshard(local_tensor(p.detach()), slice_of(p))
        difference += (unsharded - q.detach()).double().pow(2).sum()
        total += (q.detach() - s).double().pow(2).sum()
    return (difference / total).sqrt().item()


def reference_run(steps, dtype=torch.float32):
    start = [t.to(dtype).float() for t in values()]
    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = torch.optim.AdamW(params, **OPTIONS)
    for step in range(steps):
        for p, g in zip(params, values(step + 1)):
            p.grad = g.to(dtype).float()
        optimizer.step()
    return start, params, optimizer


class Mlp(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)

    def forward(self, x):
        return self.layers(x)


def _fsdp_train(model, optimizer, rank, size, steps):
    for step in steps:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step + 1))
        optimizer.zero_grad()
        (model(x[rank * 6 // size : (rank + 1) * 6 // size]).pow(2).sum() * size / 18).backward()
        optimizer.step()


@pytest.mark.ranks(2, 3, init=False)
def test_dtensors_of_fsdp2_are_trained_as_unsharded_parameters_and_their_state_gathered():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, start = Mlp(), Mlp()
    adamw = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    _fsdp_train(plain, adamw, 0, 1, range(10))
    model = Mlp()
    fully_shard(model.layers[0])
    fully_shard(model)
    optimizer = AdamOptimizer(model.parameters(), **OPTIONS)
    _fsdp_train(model, optimizer, rank, size, range(10))
    params = list(model.parameters())
    assert update_error(params, plain.parameters(), start.parameters()) <= 1e-5
    local = optimizer.state_dict()["state"]
    assert all(local[i]["exp_avg"].shape == p.shape for i, p in enumerate(params))
    assert all(local[i]["exp_avg"].to_local().shape == p.to_local().shape for i, p in enumerate(params))
    unsharded = optimizer.state_dict(gather=True)["state"]
    assert len(unsharded) == (len(params) if rank == 0 else 0)
    for i, entry in unsharded.items():
        torch.testing.assert_close(entry["exp_avg_sq"], adamw.state_dict()["state"][i]["exp_avg_sq"])
    # torch's own AdamW over the same DTensors keeps DTensor states: they are understood.
    theirs = torch.optim.AdamW(params, **OPTIONS)
    _fsdp_train(model, theirs, rank, size, range(1))
    again = AdamOptimizer(params)
    again.load_state_dict(theirs.state_dict())
    assert torch.equal(again.state[params[0]]["exp_avg"], theirs.state[params[0]]["exp_avg"].to_local())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_state_is_that_of_one_process_to_the_last_bit(ctx, dtype):
    params = shards(values(), layout(ctx, "rows"), dtype)
    optimizer = AdamOptimizer(params, **OPTIONS)
    train(optimizer, params, range(4))
    single = [nn.Parameter(t.to(dtype)) for t in values()]
    alone = AdamOptimizer(single, **OPTIONS)
    train(alone, single, range(4))
    gathered = optimizer.state_dict(gather=True)
    expected = alone.state_dict()
    assert gathered["param_groups"] == expected["param_groups"]
    if ctx.rank:
        assert gathered["state"] == {}
        return
    for i, entry in expected["state"].items():
        assert set(gathered["state"][i]) == set(entry)
        for key, value in entry.items():
            assert torch.equal(gathered["state"][i][key], value)
            assert gathered["state"][i][key].shape == value.shape
            if key != "step":
                assert (
                    gathered["state"][i][key].data_ptr() != optimizer.state[params[i]][key].data_ptr()
                    or not value.numel()
                )


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_gathered_at_one_layout_is_loaded_at_another(ctx, dtype):
    start, reference, _ = reference_run(12, dtype)
    first = shards([s.to(dtype) for s in start], layout(ctx, "tensor parallel"), dtype)
    optimizer = AdamOptimizer(first, **OPTIONS)
    train(optimizer, first, range(5))
    saved = [optimizer.state_dict(gather=True)]
    dist.broadcast_object_list(saved)
    weights = [unshard(p.detach(), slice_of(p)) for p in first]
    second = shards(weights, layout(ctx, "rows"), dtype)
    resumed = AdamOptimizer(second)
    resumed.load_state_dict(saved[0])
    train(resumed, second, range(5, 12))
    if dtype is torch.float32:
        assert update_error(second, reference, start) <= 1e-6
        return
    masters = [resumed.state[p]["master"] for p in second]
    for m, p in zip(masters, second):
        m.bmt_slice = p.bmt_slice
    assert update_error(masters, reference, start) <= 1e-6


@pytest.mark.ranks(2)
def test_each_rank_saves_its_own_state_and_loads_it_again(ctx, tmp_path):
    start, reference, _ = reference_run(10)
    first = shards(values(), layout(ctx, "rows"))
    optimizer = AdamOptimizer(first, **OPTIONS)
    train(optimizer, first, range(5))
    torch.save(optimizer.state_dict(), tmp_path / f"rank{ctx.rank}.pt")
    second = shards([unshard(p.detach(), slice_of(p)) for p in first], layout(ctx, "rows"))
    resumed = AdamOptimizer(second)
    resumed.load_state_dict(torch.load(tmp_path / f"rank{ctx.rank}.pt", weights_only=True))
    train(resumed, second, range(5, 10))
    assert update_error(second, reference, start) <= 1e-6


@pytest.mark.ranks(2, 3)
def test_values_that_look_like_padding_survive_gathering(ctx):
    params = shards(values(), layout(ctx, "rows"))
    optimizer = AdamOptimizer(params, **OPTIONS)
    for p in params:
        p.grad.fill_(-1e15 / (1 - OPTIONS["betas"][0]))
    optimizer.step()
    gathered = optimizer.state_dict(gather=True)["state"]
    for entry, shape in zip(gathered.values(), SHAPES):
        assert entry["exp_avg"].shape == shape
        torch.testing.assert_close(entry["exp_avg"], torch.full(shape, -1e15))


@pytest.mark.ranks(2)
def test_every_rank_has_the_same_keys_whoever_holds_rows_or_gradients(ctx):
    params = shards(values(), layout(ctx, "rows"), torch.bfloat16)
    for p in params:
        if p.numel() == 0:
            p.grad = None
    optimizer = AdamOptimizer(params, **OPTIONS)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert {i: sorted(entry) for i, entry in state.items()} == {
        i: ["exp_avg", "exp_avg_sq", "master", "step"] for i in range(len(SHAPES))
    }
    gathered = optimizer.state_dict(gather=True)["state"]
    if ctx.rank == 0:
        assert [entry["step"].item() for entry in gathered.values()] == [1.0] * len(SHAPES)


@pytest.mark.ranks(2)
def test_an_empty_or_a_foreign_shard_is_not_loaded(ctx):
    params = shards(values(), layout(ctx, "rows"))
    optimizer = AdamOptimizer(params, **OPTIONS)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict(gather=True))
    if ctx.rank == 1:
        with pytest.raises(ValueError, match="rank 0 on every rank"):
            optimizer.load_state_dict(saved)
    other = shards(values(), [row_slice(s, ctx.pipe) for s in SHAPES])  # unsharded
    train(AdamOptimizer(other), other, range(1))
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(5, 5)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(5, 5\).*\(7, 5\)"):
        optimizer.load_state_dict(wrong)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["at first", "after planning"])
def test_frozen_parameters_have_the_same_state_at_every_layout(ctx, when):
    params = shards(values(), layout(ctx, "rows"))
    optimizer = AdamOptimizer(params, **OPTIONS)
    if when == "after planning":
        optimizer.sync_masters()
    params[1].requires_grad_(False)  # one row: only one rank has it
    params[1].grad = None
    optimizer.step()
    params[0].requires_grad_(False)
    assert sorted(optimizer.state_dict()["state"]) == [0, 2, 3, 4]
    gathered = optimizer.state_dict(gather=True)["state"]
    assert sorted(gathered) == ([0, 2, 3, 4] if ctx.rank == 0 else [])


@pytest.mark.ranks(2)
def test_gathering_leaves_parameters_alone_where_only_some_ranks_have_a_state(ctx):
    params = shards(values(), layout(ctx, "rows"))
    if ctx.rank == 1:
        for p in params:
            p.grad = None
            p.requires_grad_(False)
    optimizer = AdamOptimizer(params, **OPTIONS)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    gathered = optimizer.state_dict(gather=True)["state"]
    assert len(gathered) == (len(SHAPES) if ctx.rank == 0 else 0)
    assert all(torch.equal(p, b) for p, b in zip(params, before))
