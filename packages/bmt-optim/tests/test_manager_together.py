"""OptimManager with optimizers that communicate: stepped together, skipped together, converted where need be."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from layouts import shard_slice, shards, tensors, update_error
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bmt_comm import shard_of, slice_of
from bmt_optim import (
    AdamOffloadOptimizer,
    AdamOptimizer,
    AdamW,
    Lamb,
    Lion,
    Muon,
    OptimManager,
    TorchAdafactor,
    gradients,
    save_optimizer,
)
from bmt_optim.distributed import steps_with_others
from bmt_optim.lr_scheduler import Linear

SHAPES = [(6, 4), (5, 3), (7,), (3, 2), (4,), (8, 3)]


def make(params, loss_scale=None, **settings):
    """Two of ours that communicate, one of torch's that does when converted, and two element-wise ones."""
    manager = OptimManager(loss_scale=loss_scale, grad_scale=1, **settings)
    optimizers = [
        Lamb(params[0:1] + params[2:3], lr=0.05),
        torch.optim.SGD(params[3:4], lr=0.1, momentum=0.9),
        Muon(params[1:2], lr=0.05),
        AdamOptimizer(params[4:5], lr=0.05),
        torch.optim.Adafactor(params[5:6], lr=0.1),
    ]
    manager.add_optimizer(optimizers[0], Linear(optimizers[0], 0.05, 2, 20))
    manager.add_optimizer(optimizers[1], torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9))
    manager.add_optimizer(optimizers[2])
    manager.add_optimizer(optimizers[3])
    manager.add_optimizer(optimizers[4], torch.optim.lr_scheduler.ExponentialLR(optimizers[4], 0.8))
    return manager, optimizers


def over_rows(ctx):
    return shards(tensors(SHAPES), [shard_slice(s, ctx.world) for s in SHAPES])


def give_gradients(manager, params, step, bad=None):
    for p, g in zip(params, tensors(SHAPES, 50 + step)):
        p.grad = shard_of(g, slice_of(p)).clone() * manager.loss_scale
    if bad is not None:
        params[bad].grad.fill_(torch.inf)


def run(manager, params, steps, max_norm=None):
    for step in steps:
        give_gradients(manager, params, step)
        if max_norm is not None:
            manager.clip_grad_norm(params, max_norm)
        manager.step()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_mixed_manager_over_shards_is_the_same_over_unsharded_tensors(ctx, max_norm):
    params, unsharded = over_rows(ctx), [nn.Parameter(t) for t in tensors(SHAPES)]
    manager, optimizers = make(params, 1024.0)
    plain, theirs = make(unsharded)
    assert type(plain.optimizers[4]) is torch.optim.Adafactor
    assert type(manager.optimizers[4]) is (TorchAdafactor if ctx.world_size > 1 else torch.optim.Adafactor)
    assert manager.optimizers[4].param_groups is optimizers[4].param_groups
    run(manager, params, range(6), max_norm)
    run(plain, unsharded, range(6), max_norm)
    assert update_error(params, unsharded, tensors(SHAPES)) <= 1e-5
    assert [o.param_groups[0]["lr"] for o in optimizers] == [o.param_groups[0]["lr"] for o in theirs]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("bad", [0, 1, 3, 5, None])
def test_an_overflow_anywhere_skips_all_and_costs_no_collective(ctx, bad):
    """``bad`` is the parameter; ``None``: it is in the norm alone."""
    params = over_rows(ctx)
    manager, _ = make(params, 64.0)
    run(manager, params, range(2))
    made = manager.optimizers[0].communication
    assert manager.optimizers[2].communication is made
    assert made.rounds == (0 if ctx.world_size == 1 else 2)
    # Sums of Lamb, of Adafactor and the flag are one; then there are what Muon sends, and the second round of all.
    assert made.collectives == (4 if ctx.world_size > 1 else 0)
    before = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(manager.state_dict())
    if bad is None:
        give_gradients(manager, params, 2)
        for p in params:
            p.grad.fill_(3e38)
        manager.clip_grad_norm(params, 1.0, 1)
    else:
        give_gradients(manager, params, 2, bad if ctx.rank == ctx.world_size - 1 else None)
    manager.step()
    assert manager.loss_scale == 32
    assert all(p.grad.count_nonzero() == 0 for p in params)
    after = manager.state_dict()
    assert all(torch.equal(p, q) for p, q in zip(params, before[0]))
    after["loss_scale"], after["steps_since_last_scale"] = 64.0, 2
    torch.testing.assert_close(after, before[1], rtol=0, atol=0)
    assert manager.optimizers[0].communication is made
    run(manager, params, [2])
    unsharded = [nn.Parameter(t) for t in tensors(SHAPES)]
    run(make(unsharded)[0], unsharded, range(3))
    assert update_error(params, unsharded, tensors(SHAPES)) <= 1e-5


@pytest.mark.ranks(2)
def test_gradients_that_have_been_clipped_are_not_looked_at_again(ctx):
    seen = []
    has_inf_or_nan = gradients.bmt_kernels.has_inf_or_nan

    def counting(grads):
        seen.append(sum(g.numel() for g in grads))
        return has_inf_or_nan(grads)

    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    total = sum(p.numel() for p in params)
    manager, optimizers = make(params, 64.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients.bmt_kernels, "has_inf_or_nan", counting)
        give_gradients(manager, params, 0)
        manager.clip_grad_norm(params, 1.0)
        manager.step()
        assert seen == []
        give_gradients(manager, params, 1)
        manager.clip_grad_norm(optimizers[2].param_groups, 1.0)
        manager.step()
        assert seen == [total - 15]
        give_gradients(manager, params, 2)
        manager.step()
        give_gradients(manager, params, 3)
        manager.clip_grad_norm(params, 1.0)
        manager.backward(params[4].sum())  # adds to gradients
        params[4].grad[0] = torch.nan
        manager.step()
        assert seen[1:] == [total, total]
    assert manager.loss_scale == 32


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [Lamb, AdamOptimizer])
def test_hooks_and_steps_of_subclasses_are_not_passed_by(ctx, kind):
    calls = []

    class Noisy(kind):
        def step(self, closure=None, scale=1):
            calls.append("step")
            return super().step(closure, scale)

    def noting(step, call):
        @functools.wraps(step)
        def wrapper(*args, **kwargs):
            calls.append(call)
            return step(*args, **kwargs)

        return wrapper

    class Decorated(kind):
        step = noting(kind.step, "class")

    shapes = [(3, 2)] * 5
    params = [nn.Parameter(t) for t in tensors(shapes)]
    manager = OptimManager(loss_scale=8.0)
    kinds = [kind, Noisy, kind, kind, Decorated]
    optimizers = [each([p]) for each, p in zip(kinds, params)]
    torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)  # which wraps the steps of torch's optimizers
    assert steps_with_others(optimizers[0])
    optimizers[2].register_step_pre_hook(lambda *_: calls.append("hook"))
    optimizers[3].step = noting(optimizers[3].step, "wrapper")
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    manager.step()
    assert calls == ["step", "hook", "wrapper", "class"]
    assert [o.state[p]["step"] for o, p in zip(optimizers, params)] == [1] * 5
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        calls.clear()
        handle = register(lambda optimizer, *_: calls.append(optimizer))
        manager.step()
        handle.remove()
        assert set(optimizers) <= set(calls)

    def hook(optimizer, *_):
        calls.append(optimizer)

    hook.bmt_for_others = True
    handle = register_optimizer_step_pre_hook(hook)
    assert steps_with_others(optimizers[0])
    handle.remove()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("base", [AdamW, AdamOptimizer, functools.partial(AdamOffloadOptimizer, compute="device")])
@pytest.mark.parametrize("mixed_in", [False, True])
def test_a_subclass_with_a_rule_of_its_own_is_not_stepped_in_an_overflow(ctx, base, mixed_in):
    kind, options = getattr(base, "func", base), getattr(base, "keywords", {})

    class Rule:
        def rule(self, batch):
            yield []
            for indices, weights in batch.writable():
                for i, weight in zip(indices, weights):
                    weight.sub_(batch.fp32_grad(i), alpha=batch.options["lr"])

    class Plain(*([Rule, kind] if mixed_in else [kind])):
        if not mixed_in:
            rule = Rule.rule

    class Heeds(Plain):
        takes_found_inf = True

    class Below(Heeds):
        pass

    assert (kind.takes_found_inf, Plain.takes_found_inf, Below.takes_found_inf) == (True, False, True)
    param = nn.Parameter(torch.ones(3))
    manager = OptimManager(loss_scale=4.0, grad_scale=1)
    manager.add_optimizer(Plain([param], lr=0.5, **options))
    param.grad = torch.tensor([1.0, torch.inf, 1.0])
    assert manager.step() is False
    assert param.tolist() == [1.0] * 3
    param.grad = torch.full((3,), 2.0)
    assert manager.step() is True
    assert param.tolist() == [0.5] * 3


@pytest.mark.ranks(1)
@pytest.mark.parametrize("base", [AdamW, AdamOptimizer])
def test_a_subclass_with_a_rule_of_its_own_maximizes(ctx, base):
    """Whether or not the rule calls the one that it overrides."""

    class Plain(base):
        def rule(self, batch):
            yield []
            for indices, weights in batch.writable():
                for i, weight in zip(indices, weights):
                    weight.sub_(batch.fp32_grad(i), alpha=batch.options["lr"])

    class Calls(base):
        def rule(self, batch):
            yield from super().rule(batch)

    for kind in (base, Plain, Calls):
        param = nn.Parameter(torch.zeros(3))
        optimizer = kind([param], lr=0.5, weight_decay=0.0, maximize=True)
        for _ in range(2):
            param.grad = torch.ones(3)
            optimizer.step()
        torch.testing.assert_close(param.detach(), torch.ones(3), rtol=1e-5, atol=0)
        assert optimizer.param_groups[0]["maximize"]


@pytest.mark.ranks(1)
def test_what_a_class_says_does_not_hold_for_what_a_subclass_overrides(ctx):
    class Rule(Lion):
        def rule(self, batch):
            yield []

    class Layout(Lion):
        def state_layout(self, shape, options):
            return {}

    class Says(Rule):
        sums_over_ranks = False

    class Below(Says):
        pass

    assert [kind.sums_over_ranks for kind in (Lion, Rule, Layout, Says, Below)] == [False, True, False, False, False]
    assert [kind.keeps_copies for kind in (Lion, Rule, Layout)] == [False, False, True]


@pytest.mark.ranks(1)
def test_an_optimizer_may_differentiate_in_its_step(ctx):
    class Ascending(torch.optim.SGD):
        def step(self, closure=None):
            param.square().sum().backward()
            return super().step(closure)

    param = nn.Parameter(torch.ones(2))
    manager = OptimManager(loss_scale=4.0, grad_scale=1)
    manager.add_optimizer(Ascending([param], lr=0.25))
    manager.backward(param.sum())
    manager.step(max_norm=10.0)
    assert param.tolist() == [0.25, 0.25]


@pytest.mark.ranks(1)
def test_an_option_out_of_range_steps_nothing(ctx):
    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    manager, optimizers = make(params, 8.0)
    give_gradients(manager, params, 0)
    optimizers[2].param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr=-1"):
        manager.step()
    assert all(torch.equal(p, t) for p, t in zip(params, tensors(SHAPES)))
    optimizers[2].param_groups[0]["lr"] = 0.05
    manager.step()
    # Lamb has a rate of 0 at first.
    assert [torch.equal(p, t) for p, t in zip(params, tensors(SHAPES))] == [True, False, True, False, False, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gather", [False, True])
def test_states_go_on_at_the_same_layout_and_in_unsharded_tensors(ctx, gather, tmp_path):
    params = over_rows(ctx)
    manager, _ = make(params, 64.0)
    run(manager, params, range(3))
    saved = copy.deepcopy(manager.state_dict(gather_opt=gather))
    if gather:
        box = [saved, str(tmp_path)]
        dist.broadcast_object_list(box)
        box[0]["optimizers"][1] = saved["optimizers"][1]  # torch's SGD does not gather its state
        saved, folder = box
        save_optimizer(manager, f"{folder}/state.pt")
        dist.barrier()
        loaded = torch.load(f"{folder}/state.pt", weights_only=True)
        torch.testing.assert_close(loaded["optimizers"][0]["state"], saved["optimizers"][0]["state"])
    run(manager, params, range(3, 5))
    resumed = over_rows(ctx)
    others, _ = make(resumed, 8.0)
    run(others, resumed, range(3))
    others.load_state_dict(saved)
    run(others, resumed, range(3, 5))
    assert all(torch.equal(p, q) for p, q in zip(params, resumed))
    if gather:  # into the optimizers that were not converted
        unsharded = [nn.Parameter(t) for t in tensors(SHAPES)]
        plain, _ = make(unsharded)
        run(plain, unsharded, range(3))
        saved["loss_scale"], saved["loss_scale_enabled"] = 1, False
        saved["optimizers"][1] = plain.state_dict()["optimizers"][1]
        plain.load_state_dict(saved)
        run(plain, unsharded, range(3, 5))
        assert update_error(params, unsharded, tensors(SHAPES)) <= 1e-5


@pytest.mark.ranks(2)
def test_an_optimizer_that_may_be_wrong_over_shards_is_not_added(ctx):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            pass

    manager = OptimManager()
    with pytest.raises(TypeError, match="Own is not known"):
        manager.add_optimizer(Own(over_rows(ctx)))
    with pytest.raises(ValueError, match="maximize=True"):
        manager.add_optimizer(torch.optim.Adafactor(over_rows(ctx), maximize=True))
    assert manager.optimizers == manager.lr_schedulers == []
    manager.add_optimizer(Own(over_rows(ctx)), elementwise=True)
    assert type(manager.optimizers[0]) is Own
