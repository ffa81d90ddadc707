"""AdamOffloadOptimizer is AdamOptimizer to the last bit, wherever it computes and whatever it must copy."""

import contextlib
import copy
import io
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from offload_helpers import (
    OPTIONS,
    VARIANTS,
    assert_same,
    assert_same_state,
    end_to_end,
    making,
    mixed_slices,
    row_slice,
    separate,
    set_grads,
    shards,
    train,
    values,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_optim.lr_scheduler import Noam


@pytest.fixture(params=VARIANTS)
def make(request):
    with making(request.param) as make:
        yield make


# --- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [separate, end_to_end])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_every_update_is_that_of_adam_bit_for_bit(make, layout, scale):
    ours, expected = layout(values()), layout(values())
    optimizer, reference = make(ours, **OPTIONS), AdamOptimizer(expected, **OPTIONS)
    for step in range(12):
        for o, params in ((optimizer, ours), (reference, expected)):
            set_grads(params, values(step + 1), scale)
            params[3].grad = params[3].grad if step % 3 else None  # counts its own steps
            before = [None if p.grad is None else p.grad.clone() for p in params]
            o.step(scale=scale)
            assert all(b is None or torch.equal(p.grad, b) for p, b in zip(params, before)), "gradients stay"
        assert all(torch.equal(p, q) for p, q in zip(ours, expected))
    assert_same(optimizer, ours, reference, expected)


@pytest.mark.parametrize("wrong", ["lr", "eps", "scale", "sparse"])
def test_a_step_that_is_refused_changes_nothing(make, wrong):
    ours, expected = separate(values()), separate(values())
    optimizers = [make([{"params": p[:4]}, {"params": p[4:]}], **OPTIONS) for p in (ours, expected)]
    for optimizer, params in zip(optimizers, (ours, expected)):
        train(optimizer, params, [0])
        set_grads(params, values(2))
    optimizer, last = optimizers[0], optimizers[0].param_groups[1]
    kept, grad = {**last}, ours[7].grad
    if wrong == "sparse":
        ours[7].grad = grad.to_sparse()
    elif wrong != "scale":
        last[wrong] = math.inf
    with pytest.raises((RuntimeError, ValueError), match=wrong):
        optimizer.step(scale=0.0 if wrong == "scale" else 1.0)
    last.update(kept)
    ours[7].grad = grad
    assert_same(optimizer, ours, optimizers[1], expected)
    for each in optimizers:
        each.step()
    assert_same(optimizer, ours, optimizers[1], expected)


@pytest.mark.parametrize("hold", [1, 3])
def test_hold_steps_holds_the_parameters_and_moves_the_moments(make, hold):
    ours, expected = separate(values()), separate(values())
    optimizer, reference = make(ours, hold_steps=hold, **OPTIONS), AdamOptimizer(expected, hold_steps=hold, **OPTIONS)
    for step in range(hold + 3):
        train(optimizer, ours, [step])
        train(reference, expected, [step])
        moved = any(not torch.equal(p, s.to(p.dtype)) for p, s in zip(ours, values()))
        assert moved == (step >= hold)
    assert_same(optimizer, ours, reference, expected)


def test_groups_closures_strides_and_gradients_of_another_dtype(make):
    results = []
    for cls in (make, AdamOptimizer):
        params = separate(values())
        params[0].data = params[0].data.t().contiguous().t()
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 1e-3, "weight_decay": 0.5, "hold_steps": 2}]
        optimizer = cls(groups, **OPTIONS)

        def closure(params=params, optimizer=optimizer):
            optimizer.zero_grad()
            loss = sum((p.float() ** 2).sum() for p in params)
            loss.backward()
            params[3].grad = params[3].grad.t() if params[3].dim() == 2 else params[3].grad
            return loss

        losses = [optimizer.step(closure).item() for _ in range(10)]
        assert losses[-1] < losses[0]
        results.append((optimizer, params))
    assert_same(*results[0], *results[1])


def test_parameters_may_be_written_to_and_moved(make):
    results = []
    for cls in (make, AdamOptimizer):
        params = separate(values())
        optimizer = cls(params, **OPTIONS)
        saved = optimizer.state_dict()["state"]
        assert not any(t.requires_grad for entry in saved.values() for t in entry.values())
        with torch.no_grad():
            params[1].fill_(2.0)  # loaded before the first step
        train(optimizer, params, range(4))
        with torch.no_grad():
            for p in params:
                p.reshape(-1)[-1:].fill_(5.0)
        optimizer.sync_masters()
        train(optimizer, params, range(4, 7))
        for p, moved in zip(params, end_to_end(params)):
            p.data, p.grad = moved.data, None
        train(optimizer, params, range(7, 10))
        results.append((optimizer, params))
    assert_same(*results[0], *results[1])


def test_a_copy_of_an_optimizer_goes_on_by_itself(make):
    ours = separate(values())
    optimizer = make(ours, record_delta=True, **OPTIONS)
    train(optimizer, ours, range(3))
    twin = copy.deepcopy(optimizer)
    assert twin.get_avg_delta() == optimizer.get_avg_delta()
    others = twin.param_groups[0]["params"]
    train(optimizer, ours, range(3, 6))
    train(twin, others, range(3, 6))
    assert twin.compute == optimizer.compute
    assert_same(twin, others, optimizer, ours)


def test_autograd_notices_a_step_and_no_gradient_is_kept_alive(make):
    params = [*separate(values(shapes=[(2, 2)])), *end_to_end(values(shapes=[(2, 2), (2, 2)]), [torch.float32] * 2)]
    losses = [(torch.ones(1, 2).requires_grad_() @ p).sum() for p in params]
    params[0].grad = torch.ones(2, 2)
    grad = weakref.ref(params[0].grad)
    make(params).step()
    params[0].grad = None
    assert grad() is None
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_state_dicts_go_from_either_optimizer_to_the_other(make):
    straight = separate(values())
    reference = AdamOptimizer(straight, **OPTIONS)
    train(reference, straight, range(9))
    first = separate(values())
    start = make(first, **OPTIONS)
    train(start, first, range(3))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    middle = AdamOptimizer(second)
    middle.load_state_dict(copy.deepcopy(start.state_dict()))
    train(middle, second, range(3, 6))
    third = [nn.Parameter(p.detach().clone()) for p in second]
    end = make(third)
    train(end, third, range(20, 22))  # a state that is to go
    for p, q in zip(third, second):
        p.data.copy_(q)
    end.load_state_dict(copy.deepcopy(middle.state_dict(gather=True)))
    train(end, third, range(6, 9))
    assert_same(end, third, reference, straight)


def test_a_state_that_does_not_fit_changes_nothing(make):
    params = separate(values())
    optimizer = make(params, **OPTIONS)
    train(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["state"][5]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg of parameter 5"):
        optimizer.load_state_dict(bad)
    assert_same_state(optimizer.state_dict(), before)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="compute='gpu'"):
        AdamOffloadOptimizer(separate(values()), compute="gpu")
    with pytest.raises(ValueError, match="lr"):
        AdamOffloadOptimizer(separate(values()), lr=-1)
    with pytest.raises(TypeError, match="float64"):
        AdamOffloadOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.float64))])


@pytest.mark.ranks(1)
def test_an_overflow_under_a_manager_changes_nothing(ctx):
    for compute in ("host", "device"):
        params = separate(values())
        optimizer = AdamOffloadOptimizer(params, compute=compute, record_delta=True, **OPTIONS)
        manager = OptimManager(loss_scale=64)
        manager.add_optimizer(optimizer, Noam(optimizer, 0.1, 2, 10))
        for step in range(3):
            set_grads(params, values(step + 1), 64.0)
            manager.clip_grad_norm(params, 1.0)
            manager.step()
        before, weights = copy.deepcopy(manager.state_dict()), [p.detach().clone() for p in params]
        deltas = optimizer.get_avg_delta(), optimizer.get_var_delta()
        params[0].grad[3, 4] = math.inf
        with contextlib.redirect_stdout(io.StringIO()):
            manager.step()
        after = manager.state_dict()
        assert manager.loss_scale == 32
        assert_same_state(after["optimizers"][0], before["optimizers"][0])
        assert after["lr_schedulers"] == before["lr_schedulers"]
        assert all(torch.equal(p, w) for p, w in zip(params, weights))
        assert (optimizer.get_avg_delta(), optimizer.get_var_delta()) == deltas


@pytest.mark.ranks(2)
def test_a_rank_that_holds_nothing_keeps_the_delta_in_an_overflow_as_the_others_do(ctx):
    param = shards([torch.ones(1, 4)], [row_slice((1, 4), ctx.world)])[0]
    optimizer = AdamOffloadOptimizer([param], compute="device", record_delta=True)
    manager = OptimManager(loss_scale=2.0, grad_scale=1)
    manager.add_optimizer(optimizer)
    for value in (1.0, torch.inf):
        param.grad = torch.full_like(param, value) if param.numel() else None
        assert manager.step() is (value == 1)
        deltas = ctx.world.all_gather_object(optimizer.get_avg_delta())
        assert deltas == [pytest.approx(1.0)] * 2


# --- several ranks ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_are_trained_as_by_adam_and_gathered_as_on_one_process(ctx, variant):
    slices = mixed_slices(ctx)
    ours, expected, unsharded = shards(values(), slices), shards(values(), slices), separate(values())
    with making(variant) as make:
        optimizer = make(ours, record_delta=True, **OPTIONS)
        reference, alone = AdamOptimizer(expected, **OPTIONS), AdamOptimizer(unsharded, **OPTIONS)
        for o, params in ((optimizer, ours), (reference, expected), (alone, unsharded)):
            train(o, params, range(10))
        assert_same(optimizer, ours, reference, expected)
        gathered = optimizer.state_dict(gather=True)
        if ctx.rank:
            assert gathered["state"] == {}
        else:
            assert_same_state(gathered, alone.state_dict())
        kept = copy.deepcopy(gathered)
        train(optimizer, ours, [10])
        optimizer.synchronize()
        assert_same_state(gathered, kept)  # it is a copy


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.ranks(2, init=False)
def test_dtensors_of_fsdp2_are_trained_as_by_adam():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for cls in (lambda params, **o: AdamOffloadOptimizer(params, record_delta=True, **o), AdamOptimizer):
        model = Mlp()
        fully_shard(model.layers[0])
        fully_shard(model)
        optimizer = cls(model.parameters(), **OPTIONS)
        for step in range(10):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x[rank * 6 // size : (rank + 1) * 6 // size]).pow(2).sum().backward()
            optimizer.step()
        results.append((optimizer, [p.to_local() for p in model.parameters()]))
    assert_same(*results[0], *results[1])
    assert results[0][0].get_var_delta() > 0
    assert_same_state(results[0][0].state_dict(gather=True), results[1][0].state_dict(gather=True))


# --- a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compute", ["host", "device"])
def test_on_a_gpu_the_state_is_in_host_memory_and_the_update_that_of_adam(compute):
    shapes = [(1000, 333), (5,), (7, 11), (70_001,)]
    results = []
    for cls in (AdamOptimizer, lambda ps, **o: AdamOffloadOptimizer(ps, compute=compute, record_delta=True, **o)):
        params = [nn.Parameter(p.detach().cuda()) for p in separate(values(shapes=shapes))]
        optimizer = cls(params, **OPTIONS)
        before = torch.cuda.memory_allocated()
        optimizer.state_dict()
        grown = torch.cuda.memory_allocated() - before
        for step in range(10):
            for p, g in zip(params, values(step + 1, shapes)):
                p.grad = g.to(p)
            optimizer.step()
        results.append((optimizer, params))
    assert grown == 0
    (reference, expected), (optimizer, ours) = results
    assert all(torch.equal(p, q) for p, q in zip(ours, expected))
    state = optimizer.state_dict()["state"]
    for index, entry in reference.state_dict()["state"].items():
        for key, value in entry.items():
            assert state[index][key].device.type == "cpu"
            assert torch.equal(state[index][key], value.cpu())
            assert key == "step" or state[index][key].is_pinned() == (compute == "device")
    assert optimizer.get_var_delta() > 0
    moved = [p.detach().cpu() for p in ours]
    for p, data in zip(ours, moved):  # the state stays where it is
        p.data, p.grad = data, torch.ones_like(data)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 11
