"""Parameters that other libraries shard or that nobody does, optimizers that stand for others, and steps of others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from bmt_comm import ParallelContext
from bmt_optim import (
    APOLLO,
    AdamOptimizer,
    AdamW,
    DistributedAdafactor,
    DistributedLamb,
    OptimManager,
    ScheduleFreeAdamW,
    save_optimizer,
)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cls", [AdamW, DistributedLamb, DistributedAdafactor])
def test_gradients_that_autograd_has_not_summed(ctx: ParallelContext, cls: Any) -> None:
    """Replicated DTensors and a sharded batch have gradients that are partial sums."""
    mesh = init_device_mesh("cpu", (2,))
    plain, ours = model(), distribute_module(model(), mesh)
    start = [param.detach().clone() for param in plain.parameters()]
    x = torch.randn(4, 6) * torch.arange(1.0, 5.0)[:, None]
    optimizers = [
        cls(each.parameters(), **({} if cls is DistributedAdafactor else {"lr": 0.02})) for each in (plain, ours)
    ]
    manager = OptimManager(grad_scale=1)
    manager.add_optimizer(optimizers[1])
    norms = []
    for _ in range(3):
        for each, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            given = x if each is plain else DTensor.from_local(x.chunk(2)[ctx.rank], mesh, [Shard(0)])
            each(given).square().sum().backward()
        norms.append(manager.clip_grad_norm(ours.parameters(), 1e9))
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(norms[-1].reshape(()), expected)
        optimizers[0].step()
        manager.step()
    for param, theirs, before in zip(ours.parameters(), plain.parameters(), start, strict=True):
        assert param.placements == (Replicate(),)
        assert (param.to_local() - theirs).norm() <= 1e-4 * (theirs - before).norm()


@pytest.mark.ranks(2)
def test_a_parameter_that_nobody_reduces(ctx: ParallelContext) -> None:
    block = pytest.importorskip("bmt_zero").Block(model(), zero_level=3)
    alone = nn.Linear(7, 3)
    manager = OptimManager()
    manager.add_optimizer(AdamW([*block.parameters(), *alone.parameters()]))
    with pytest.raises(ValueError, match=r"shape \(3, 7\) is neither sharded nor replicated.*grad_scale=2"):
        manager.backward(alone(block(torch.ones(2, 6))).sum())
    alone.requires_grad_(False)
    manager.backward(alone(block(torch.ones(2, 6))).sum())


@pytest.mark.ranks(2)
def test_an_optimizer_that_stands_for_another(ctx: ParallelContext, tmp_path: Path) -> None:
    """Its state is gathered, and it is converted once."""
    sharded = fully_shard(nn.Linear(6, 5, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adafactor(sharded.parameters())
    managers = [OptimManager(grad_scale=1) for _ in range(2)]
    for manager in managers:
        manager.add_optimizer(optimizer)
    sharded(torch.ones(2, 6)).sum().backward()
    managers[0].step()
    assert managers[0].optimizers[0] is managers[1].optimizers[0]
    state = managers[0].state_dict(gather_opt=True)["optimizers"][0]["state"]
    if ctx.rank == 0:
        assert {key: tuple(value.shape) for key, value in state[0].items() if key != "step"} == {
            "row_var": (5, 1),
            "col_var": (1, 6),
        }
    save_optimizer(optimizer, tmp_path / "o.pt")
    manager = OptimManager(grad_scale=1)
    manager.add_optimizer(torch.optim.AdamW(sharded.parameters()))
    with pytest.raises(TypeError, match="AdamW cannot gather its state"):
        save_optimizer(manager, tmp_path / "m.pt")


@pytest.mark.ranks(1)
def test_steps_of_other_libraries(ctx: ParallelContext) -> None:
    """Their argument ``scale`` has another meaning, and gradients of shared parameters are unscaled once."""

    class Fused(torch.optim.SGD):
        def step(self, closure: Any = None, grads: Any = None, scale: float | None = None) -> Any:  # type: ignore[override]
            if scale is not None:
                raise RuntimeError("scale")
            return super().step(closure)

    for optimizers in ([Fused], [Fused, AdamOptimizer]):
        param = nn.Parameter(torch.ones(3))
        manager = OptimManager(loss_scale=1024)
        plain = nn.Parameter(torch.ones(3))
        theirs = [cls([plain], lr=0.1) for cls in optimizers]
        for cls in optimizers:
            manager.add_optimizer(cls([param], lr=0.1))
        for _ in range(2):
            manager.zero_grad()
            plain.grad = None
            manager.backward(param.square().sum())
            plain.square().sum().backward()
            manager.step()
            for each in theirs:
                each.step()
        torch.testing.assert_close(param, plain)


@pytest.mark.ranks(1)
def test_gradients_that_are_dropped(ctx: ParallelContext) -> None:
    """A parameter without one stays as it is."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    manager = OptimManager()
    manager.add_optimizer(AdamW(params, lr=0.1, weight_decay=0.5))
    manager.backward(sum(param.sum() for param in params))
    manager.step()
    before: list[Tensor] = copy.deepcopy([param.detach() for param in params])
    manager.zero_grad(set_to_none=True)
    manager.backward(params[0].sum())
    manager.step()
    assert not params[0].equal(before[0])
    assert params[1].equal(before[1])


@pytest.mark.ranks(1)
def test_parameters_that_are_taken_out(ctx: ParallelContext) -> None:
    """What is kept by places follows, for projections and for random rounding."""
    for make, options, dtype in (
        (lambda params: APOLLO(params, lr=0.1), {"rank": 2, "update_proj_gap": 50}, torch.float32),
        (lambda params: AdamW(params, lr=0.1, stochastic_rounding=True), {}, torch.bfloat16),
    ):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((4, 6), (6, 5), (8, 3))]
        optimizer = make([{"params": params[:1], **options}, {"params": params[1:], **options}])
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.param_groups[0]["params"].clear()
        assert [optimizer.state[param]["step"] for param in params] == [1, 2, 2]


@pytest.mark.ranks(1)
def test_a_step_with_no_rate_changes_nothing(ctx: ParallelContext) -> None:
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = DistributedAdafactor([param], lr=0.1, relative_step=False, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param.equal(torch.ones(4, 3))


@pytest.mark.ranks(2)
def test_torch_gets_no_shard_in_place_of_the_full_state(ctx: ParallelContext) -> None:
    zero = pytest.importorskip("bmt_zero")
    block = zero.Block(model(), zero_level=3)
    optimizer = AdamW(block.parameters())
    block(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"bmt_zero\.Checkpointer"):
        get_optimizer_state_dict(block, optimizer)
    assert optimizer.state_dict()["state"]


@pytest.mark.ranks(2)
def test_evaluation_of_fsdp2_at_the_averages(ctx: ParallelContext) -> None:
    """Its root keeps unsharded parameters after a forward without gradients."""
    plain, sharded = model(), fully_shard(model(), mesh=init_device_mesh("cpu", (2,)))
    optimizers = [ScheduleFreeAdamW(each.parameters(), lr=0.1) for each in (plain, sharded)]
    x = torch.ones(3, 6)
    for _ in range(4):
        losses = []
        for each, optimizer in zip((plain, sharded), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                each(x)
                with optimizer.evaluating(each):
                    losses.append([loss.detach(), each(x).square().mean()])
        torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.ranks(1)
def test_states_of_other_adams_are_not_those_of_bmtrain(ctx: ParallelContext) -> None:
    """apex has the step in its groups."""
    param = nn.Parameter(torch.ones(3))
    moments = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "step": 5, "params": [0]}
    with pytest.raises(ValueError, match="step"):
        AdamOptimizer([param]).load_state_dict({"state": {0: moments}, "param_groups": [group]})


@pytest.mark.ranks(1)
def test_a_loss_scale_that_is_loaded_has_its_bounds(ctx: ParallelContext) -> None:
    managers = [OptimManager(loss_scale=2.0**20), OptimManager(loss_scale=1024, max_loss_scale=2.0**16)]
    for manager in managers:
        manager.add_optimizer(AdamW([nn.Parameter(torch.ones(3))]))
    managers[1].load_state_dict(managers[0].state_dict())
    assert managers[1].loss_scale == 2.0**16
