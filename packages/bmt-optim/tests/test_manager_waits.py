"""OptimManager: what the host reads of the device in a step, and clipping within one."""

import copy

import pytest
import torch
from layouts import tensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, AdamW, Lamb, Muon, OptimManager
from bmt_optim.lr_scheduler import Linear

SHAPES = [(6, 4), (7,), (5, 3), (3, 2)]
ADAM = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}


class Reads(TorchDispatchMode):
    """For each number that the host reads, whether ``param`` had changed by then."""

    def __init__(self, param):
        super().__init__()
        self.param, self.before, self.changed = param, param.detach().clone(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            with torch.utils._python_dispatch._disable_current_modes():
                self.changed.append(not torch.equal(self.param, self.before))
        return func(*args, **(kwargs or {}))


def make(loss_scale, late):
    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    manager = OptimManager(loss_scale=loss_scale, loss_scale_steps=3, grad_scale=1, reads_late=late)
    adams = [
        AdamOptimizer(params[:1], **ADAM),
        AdamW(params[1:2], **ADAM),
        AdamOffloadOptimizer(params[2:3], compute="device", record_delta=True, **ADAM),
        AdamW(params[3:], **ADAM),
    ]
    for adam in adams:
        manager.add_optimizer(adam, Linear(adam, 0.05, 2, 20))
    return params, manager


def give_gradients(params, step, scale):
    for p, g in zip(params, tensors(SHAPES, 50 + step)):
        p.grad = g * scale


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("scale", "late"), [(None, False), (64.0, False), (64.0, True)])
def test_the_host_reads_the_overflow_flag_after_the_step_or_later(ctx, scale, late):
    params, manager = make(scale, late)
    theirs, plain = [nn.Parameter(t) for t in tensors(SHAPES)], 0
    reference = torch.optim.AdamW(theirs, **ADAM)
    schedule = Linear(reference, 0.05, 2, 20)
    for step in range(8):
        manager.zero_grad()
        give_gradients(params, step, manager.loss_scale)
        overflows = scale is not None and step in (2, 3)
        if overflows and ctx.rank == ctx.world_size - 1:
            params[step - 2].grad.view(-1)[1] = torch.inf
        state = copy.deepcopy(manager.state_dict())
        delta = manager.optimizers[2].get_avg_delta()
        with Reads(params[0]) as reads:
            taken = manager.step()
        if scale is None:
            assert reads.changed == []
        elif late:
            assert reads.changed == []
            assert taken is None
            taken = manager.settle()
        elif not overflows and step:  # the rate of iteration 0 is 0
            assert reads.changed == [True]
        assert taken is not overflows
        if overflows:
            assert late or all(p.grad.count_nonzero() == 0 for p in params)
            assert manager.optimizers[2].get_avg_delta() == delta
            assert manager.skipped_steps == step - 1
            state["loss_scale"], state["steps_since_last_scale"] = state["loss_scale"] / 2, 0
            torch.testing.assert_close(manager.state_dict(), state, rtol=0, atol=0)
            continue
        give_gradients(theirs, step, 1)
        reference.step()
        schedule.step()
        plain += 1
        for p, q in zip(params, theirs):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        assert manager.optimizers[0].state[params[0]]["step"] == manager.optimizers[1].state[params[1]]["step"] == plain
    # 64; overflows in steps 2 and 3 leave 16, and steps 4, 5 and 6 make 32 of it
    assert manager.loss_scale == (1 if scale is None else 32)


@pytest.mark.ranks(1)
def test_a_step_is_settled_by_whoever_needs_its_outcome(ctx):
    outcomes = {
        "settle": lambda manager: manager.settle(),
        "loss_scale": lambda manager: manager.loss_scale,
        "backward": lambda manager: manager.backward(torch.ones((), requires_grad=True)),
        "clip_grad_norm": lambda manager: manager.clip_grad_norm(torch.ones(()), 1.0),
        "optimizers": lambda manager: manager.optimizers,
        "trainer_state": lambda manager: manager.trainer_state(),
        "step": lambda manager: manager.step(),
        "reject_step": lambda manager: manager.reject_step("a spike"),
        "state_dict": lambda manager: manager.state_dict(),
        "load_state_dict": lambda manager: manager.load_state_dict(saved),
        "load_trainer_state": lambda manager: manager.load_trainer_state(saved),
        "the optimizer's state_dict": lambda manager: adam.state_dict(),
        "its state_records": lambda manager: adam.state_records(),
        "its load_state_dict": lambda manager: adam.load_state_dict(saved["optimizers"][0]),
        "its step": lambda manager: adam.step(),
        "a copy of it": lambda manager: copy.deepcopy(adam),
    }
    saved = make(32.0, True)[1].state_dict()
    for name, call in outcomes.items():
        params, manager = make(64.0, True)
        adam = manager.optimizers[0]
        give_gradients(params, 0, torch.inf)
        assert manager.step() is None
        manager.zero_grad()
        assert manager.skipped_steps == 0
        call(manager)
        assert manager.skipped_steps == 1, name
        assert manager.loss_scale == 32
    params, manager = make(64.0, True)
    adam = manager.optimizers[0]
    give_gradients(params, 0, 64)
    manager.step()
    assert adam.state_dict()["state"][0]["step"] == 1
    assert manager.lr_schedulers[0].num_iter == 1
    manager.step()
    manager.reject_step("a spike")
    manager.step()
    assert manager.settle() is False
    assert adam.state_dict()["state"][0]["step"] == 2
    params, manager = make(64.0, True)
    manager.max_skipped_steps = 1
    for _ in range(2):
        give_gradients(params, 0, torch.inf)
        manager.step()
    with pytest.raises(RuntimeError, match="2 steps in a row"):
        manager.settle()
    assert manager.settle() is False


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("others", [False, True])
def test_a_step_that_clips_does_what_clipping_before_it_does_and_leaves_the_gradients(ctx, others):
    def build():
        params, manager = make(64.0, False)
        if others:
            more = [nn.Parameter(t) for t in tensors(SHAPES, 9)]
            manager.add_optimizer(Lamb(more[:1], lr=0.05))
            manager.add_optimizer(Muon(more[2:3], lr=0.05))
            manager.add_optimizer(torch.optim.SGD([more[1], more[3]], lr=0.1))
            params += more
        return params, manager

    (clipping, first), (apart, second) = build(), build()
    for step in range(5):
        for params in (clipping, apart):
            for i, p in enumerate(params):
                g = tensors([p.shape], 50 + step + i)[0] * 64
                p.grad = g * torch.inf if step == 2 else g
        kept = [p.grad.clone() for p in clipping[: len(SHAPES)]]
        norm = second.clip_grad_norm(apart, 0.5, 2)
        second.step()
        first.step(max_norm=0.5)
        assert first.grad_norm == second.grad_norm == norm or step == 2
        if step == 2:
            assert first.loss_scale == second.loss_scale == 32
            first.loss_scale = second.loss_scale = 64
        else:
            assert norm > 0.5
            assert all(torch.equal(p.grad, g) for p, g in zip(clipping, kept))
        for p, q in zip(clipping, apart):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="max_norm=-1"):
        first.step(max_norm=-1)
