"""What a script does to ``.grad`` between micro-batches has the effect that it has in plain PyTorch, or is refused."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from block_helpers import assert_same_gradients, compare_updates, of_any_size, rows_of, seeded
from torch import Tensor, nn

from bmt_zero import Block, no_sync

WIDTH = 5


class Two(nn.Module):
    """Two layers. A call may leave out the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y) if both else y


def modules(level: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Two()
    return plain, Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level)


def backward(ctx, plain: nn.Module, model: nn.Module, micro_batch: int, waits: bool, both: bool = True) -> None:
    seeds = [10 * micro_batch + rank for rank in range(ctx.world_size)]
    for seed in seeds:
        plain(seeded(seed, 3, WIDTH), both).square().sum().backward()
    with no_sync(model) if waits else contextlib.nullcontext():
        model(seeded(seeds[ctx.rank], 3, WIDTH), both).square().sum().backward()


def set_to_none(param: nn.Parameter, _values: Tensor) -> None:
    param.grad = None


def replace(param: nn.Parameter, values: Tensor) -> None:
    param.grad = values.clone()


def increase(param: nn.Parameter, values: Tensor) -> None:
    param.grad += values


def zero_and_change(param: nn.Parameter, values: Tensor) -> None:
    param.grad.zero_()
    param.grad.add_(values).mul_(0.5)


CHANGES = {
    "none": set_to_none,
    "replaced": replace,
    "zeroed": lambda param, _: param.grad.zero_(),
    "zeroed together": lambda param, _: torch._foreach_zero_([param.grad]),
    "given other data": lambda param, values: setattr(param.grad, "data", values.clone()),
    "copied to": lambda param, values: param.grad.copy_(values),
    "added to": lambda param, values: param.grad.add_(values, alpha=2),
    "increased": increase,
    "zeroed and changed": zero_and_change,
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("reduced_before", "least_bytes"), [(False, 0), (True, 1 << 30)])
def test_gradients_changed_between_micro_batches(ctx, level, change, reduced_before, least_bytes):
    plain, model = modules(level)
    with of_any_size(least_bytes):
        if reduced_before:
            backward(ctx, plain, model, 0, waits=False)
        for micro_batch in (1, 2):
            backward(ctx, plain, model, micro_batch, waits=True)
            values = seeded(50 + micro_batch, WIDTH, WIDTH)
            CHANGES[change](plain.second.weight, values)
            CHANGES[change](model.second.weight, rows_of(values, model.second.weight))
        backward(ctx, plain, model, 3, waits=False)
    assert_same_gradients(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("change", ["none", "replaced", "zeroed"])
def test_dropped_gradients_of_parameters_that_are_not_used_again(ctx, level, change):
    plain, model = modules(level)
    backward(ctx, plain, model, 0, waits=True)
    for param, expected in zip(model.second.parameters(), plain.second.parameters(), strict=True):
        values = seeded(50, *expected.shape)
        CHANGES[change](expected, values)
        CHANGES[change](param, rows_of(values, param))
    backward(ctx, plain, model, 1, waits=True, both=False)
    backward(ctx, plain, model, 2, waits=False, both=False)
    assert_same_gradients(model, plain)


@pytest.mark.ranks(2, deterministic=True)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_what_is_written_to_the_gradient_of_a_parameter_that_another_rank_has_used(ctx, level):
    _, model = modules(level)
    weight = model.second.weight
    with no_sync(model):
        model(seeded(ctx.rank, 3, WIDTH), both=ctx.rank == 0).square().sum().backward()
    values = rows_of(seeded(5, WIDTH, WIDTH), weight)
    weight.grad.copy_(values)
    with no_sync(model):
        model(seeded(2 + ctx.rank, 3, WIDTH), both=False).square().sum().backward()
    model(seeded(4 + ctx.rank, 3, WIDTH), both=False).square().sum().backward()
    torch.testing.assert_close(weight.grad.to_local(), values)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("reduced_before", [False, True])
def test_a_gradient_stays_the_same_tensor(ctx, level, reduced_before):
    plain, model = modules(level)
    backward(ctx, plain, model, 0, waits=not reduced_before)
    backward(ctx, plain, model, 1, waits=True)
    taken = [param.grad for param in model.parameters()]
    backward(ctx, plain, model, 2, waits=True)
    backward(ctx, plain, model, 3, waits=False)
    backward(ctx, plain, model, 4, waits=False)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), taken, strict=True))
    assert_same_gradients(model, plain)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("how", ["mul_", "data", "view", "clip"])
@pytest.mark.parametrize("reduced_before", [False, True])
def test_other_changes_are_refused_while_gradients_wait(ctx, level, how, reduced_before):
    plain, model = modules(level)
    if reduced_before:
        backward(ctx, plain, model, 0, waits=False)
    backward(ctx, plain, model, 1, waits=True)
    for module in (plain, model):
        weight = module.second.weight
        if how == "mul_":
            weight.grad *= 0.5
        elif how == "data":
            weight.grad.data.mul_(0.5)
        elif how == "view":
            weight.grad[:].mul_(0.5)
        else:
            torch.nn.utils.clip_grad_norm_([weight], 0.1)
    expectation = pytest.raises(RuntimeError, match=r"second\.weight of .* was changed while") if level < 2 else None
    with expectation or contextlib.nullcontext():
        backward(ctx, plain, model, 2, waits=False)
    if expectation is None:
        assert_same_gradients(model, plain)
        return
    for module in (plain, model):
        module.zero_grad()
    backward(ctx, plain, model, 3, waits=False)
    assert_same_gradients(model, plain)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@of_any_size()
def test_a_parameter_is_frozen_while_its_gradient_waits(ctx, level):
    """One that the last rank has not used."""
    plain, model = modules(level)
    for micro_batch in range(2):
        for rank in range(ctx.world_size):
            x, both = seeded(10 * micro_batch + rank, 3, WIDTH), rank == 0
            plain(x, both).square().sum().backward()
            if rank == ctx.rank:
                with no_sync(model) if micro_batch == 0 else contextlib.nullcontext():
                    model(x, both).square().sum().backward()
        for module in (plain, model):
            module.second.weight.requires_grad_(False)
    assert_same_gradients(model, plain)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@of_any_size()
def test_hooks_run_once_for_all_calls_in_a_backward_pass(ctx, level):
    plain, model = modules(level)
    start = [param.detach().clone() for param in plain.parameters()]
    runs = {}
    for module in (plain, model):
        runs[module] = []
        for number, param in enumerate(module.parameters()):
            optimizer = torch.optim.Adam([param], lr=0.01)

            def step(param, number=number, optimizer=optimizer, ran=runs[module]):
                ran.append(number)
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
    for micro_batch in range(2):
        seeds = [10 * micro_batch + rank for rank in range(ctx.world_size)]
        sum(plain(plain(seeded(seed, 3, WIDTH))).square().sum() for seed in seeds).backward()
        model(model(seeded(seeds[ctx.rank], 3, WIDTH))).square().sum().backward()
    assert sorted(runs[model]) == sorted(runs[plain]) == sorted(2 * list(range(4)))
    compare_updates(model, plain, start, 1e-4)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _grad):
        raise ArithmeticError("in backward")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("waits", [True, False])
@of_any_size()
def test_gradients_that_wait_outlast_a_backward_that_fails(ctx, level, waits):
    """As in plain PyTorch, gradients that the failed backward has added are kept, too."""
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = nn.ModuleList(Block(copy.deepcopy(each), use_checkpoint=False, zero_level=level) for each in plain)

    def compute(module: nn.Module, x: Tensor, fails: bool) -> None:
        y = module[0](x)
        loss = module[1](Fails.apply(y) if fails else y).square().sum()
        with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
            loss.backward()

    for micro_batch in range(3):
        seeds = [10 * micro_batch + rank for rank in range(ctx.world_size)]
        for seed in seeds:
            compute(plain, seeded(seed, 3, WIDTH), micro_batch == 1)
        with no_sync(model) if micro_batch == 0 or (waits and micro_batch == 1) else contextlib.nullcontext():
            compute(model, seeded(seeds[ctx.rank], 3, WIDTH), micro_batch == 1)
    assert_same_gradients(model, plain)
