"""Gradients of weights are computed where they are reduced, and are those that autograd computes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from block_helpers import assert_same_gradients, compare_updates, of_any_size, rows_of, seeded
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import bmt_kernels
from bmt_zero import Block, BMTrainModelWrapper, Compression, MixedPrecision, no_sync
from bmt_zero.gradient_target import GradientTargets

WIDTH = 6


class Products(nn.Module):
    """Operations that can write gradients: of vectors, matrices and more dimensions, with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 5)), nn.Parameter(torch.randn(5))
        self.c = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.a(x)))
        rows = torch.addmm(self.bias, y.reshape(-1, WIDTH), self.weight)
        return torch.stack([self.c(row) for row in torch.tanh(rows)]).view_as(x) + x.transpose(0, 1).mean()


class Tied(nn.Module):
    """One weight as an embedding and as a product."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=padding)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.abs() * 5).long().clamp(max=10)[..., 0]
        return self.head(torch.tanh(self.embed(numbers) + x[..., :WIDTH]))


class OtherUse(nn.Module):
    """A weight that an operation uses which cannot write its gradient, before or after one that can."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(WIDTH, WIDTH), first

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.linear.weight.square().sum() if self.first else 0
        y = self.linear(x)
        return y + (penalty or self.linear.weight.T.abs().sum())


class Twice(nn.Module):
    """One layer twice in a graph, one after the other and side by side, and through a checkpoint of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(self.linear(x)), x, use_reentrant=False)
        return self.linear(y) + self.linear(x)


class Hidden(torch.autograd.Function):
    """A use of a weight that is not seen."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class HiddenUse(nn.Module):
    """One weight in several products and in a function that is not seen, in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return self.linear(torch.tanh(Hidden.apply(torch.tanh(self.linear(y)), self.linear.weight)))


class OtherSignatures(nn.Module):
    """Calls that are left to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        y = torch.addmm(self.bias, rows, self.weight, beta=0.5)
        return torch.addmm(input=self.bias, mat1=torch.tanh(y), mat2=self.weight).view_as(x)


class Partly(nn.Module):
    """Parameters that autograd freezes, multiplies in another dtype, or does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused, self.low = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.low(y)
        return y + z.float()


class Reentrant(nn.Module):
    """A submodule has another backward pass within that of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=True)
        return self.second(torch.tanh(self.first(y)))


class Kept(nn.Module):
    """A weight that the module finds in a list, too, and gathers by itself there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(torch.tanh(self.first(x)), self.kept[0]))
        return self.second(y)


class MatrixAsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


MODULES = {
    "products": Products,
    "tied": Tied,
    "tied with padding": lambda: Tied(3),
    "another use first": lambda: OtherUse(True),
    "another use last": lambda: OtherUse(False),
    "twice": Twice,
    "partly": Partly,
    "hidden use": HiddenUse,
    "other signatures": OtherSignatures,
    "reentrant": Reentrant,
    "kept in a list": Kept,
    "matrix as bias": MatrixAsBias,
}


def train(ctx, plain: nn.Module, model: nn.Module, micro_batches: int = 1, calls: int = 1) -> None:
    """Two steps, and the comparison with the plain model on the whole batch. ``calls``: of the model in each loss."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (plain, model)]
    start = [param.detach().clone() for param in plain.parameters()]
    for step in range(2):
        for micro in range(micro_batches):
            seeds = [100 * step + 10 * micro + rank for rank in range(ctx.world_size)]
            for module, ranks in ((plain, seeds), (model, [seeds[ctx.rank]])):
                waits = module is model and micro < micro_batches - 1
                with no_sync(model) if waits else torch.enable_grad():
                    for seed in ranks:
                        inputs = [seeded(seed + 1000 * call, 2, 3, WIDTH).requires_grad_() for call in range(calls)]
                        sum(module(x).square().sum() for x in inputs).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare_updates(model, plain, start)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(("level", "checkpointing"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize(("micro_batches", "calls"), [(1, 1), (3, 2)])
@of_any_size()
def test_updates_are_those_of_plain_pytorch(ctx, kind, level, checkpointing, micro_batches, calls):
    torch.manual_seed(0)
    plain = MODULES[kind]()
    model = Block(copy.deepcopy(plain), use_checkpoint=checkpointing, zero_level=level)
    train(ctx, plain, model, micro_batches, calls)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
@of_any_size()
def test_nothing_is_copied_but_gradients_of_vectors(ctx, level, micro_batches):
    torch.manual_seed(0)
    plain = nn.Sequential(Products(), Products())
    model = Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        # At level 3 each micro-batch is reduced, and added to the earlier ones.
        for name in ["_foreach_copy_", *(["_foreach_add_"] if level < 3 else [])]:
            function = getattr(torch, name)
            patch.setattr(torch, name, lambda to, *a, f=function: (written.extend(t.dim() for t in to), f(to, *a))[1])
        train(ctx, plain, model, micro_batches)
    assert set(written) == {1}


@pytest.mark.skipif(
    not bmt_kernels.SharedMemoryExchange.available() or torch.cuda.is_available(),
    reason="ranks are on the CPU of Linux",
)
@pytest.mark.ranks(2)
@of_any_size(1 << 18)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_trace_of_a_step_has_no_copy_of_parameters_or_their_gradients(ctx, level):
    model = nn.Sequential(nn.Embedding(300, 256), *(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 300))
    model = BMTrainModelWrapper(model, zero_level=level, use_checkpoint=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        F.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        step()
    copies = ("aten::copy_", "aten::_foreach_copy_", "aten::clone", "aten::cat")
    events = [event for event in trace.events() if event.name in copies]
    assert all(param.handle.flat.is_shared for param in model.parameters())
    assert max(math.prod(event.input_shapes[0]) for event in events) <= 8 * 300  # activations, and gradients of biases


@pytest.mark.ranks(2)
@of_any_size()
def test_a_hook_on_the_weight_that_forward_sees(ctx):
    seen = []

    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
            return super().forward(x)

    torch.manual_seed(0)
    model = Block(Hooked(WIDTH, WIDTH), use_checkpoint=False)
    plain = nn.Linear(WIDTH, WIDTH)
    for rank in range(2):
        plain(seeded(rank, 3, WIDTH)).square().sum().backward()
    x = seeded(ctx.rank, 3, WIDTH)
    model.load_state_dict(plain.state_dict())
    y = model(x)
    y.square().sum().backward()
    torch.testing.assert_close(model.weight.grad.to_local(), rows_of(2 * plain.weight.grad, model.weight))
    torch.testing.assert_close(seen[0], 2 * y.detach().t().mm(x))  # and stays


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 3])
@of_any_size()
def test_a_graph_that_is_used_twice(ctx, level):
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH)
    model = Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level)
    start = [param.detach().clone() for param in plain.parameters()]
    for seed in range(2):
        loss = plain(seeded(seed, 3, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    loss = model(seeded(ctx.rank, 3, WIDTH)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for module in (plain, model):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    compare_updates(model, plain, start)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1])
@of_any_size()
def test_a_gradient_of_a_gradient(ctx, level):
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    plain = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)
    model = Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level)
    start = [param.detach().clone() for param in plain.parameters()]

    def penalty(module: nn.Module, seed: int) -> Tensor:
        x = seeded(seed, 3, WIDTH).requires_grad_()
        y = module(x)
        [grad] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return grad.square().sum() + y.square().sum()

    sum(penalty(plain, seed) for seed in range(2)).backward()
    penalty(model, ctx.rank).backward()
    for module in (plain, model):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    compare_updates(model, plain, start)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 3])
@of_any_size()
def test_a_backward_that_fails_and_is_repeated_on_its_graph(ctx, level):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level)
    fails = [True]

    def fail(_grad: Tensor) -> None:
        if fails.pop():
            raise ArithmeticError("once")
        fails.append(False)

    hook = model[1].register_forward_hook(lambda _module, _args, y: y.register_hook(fail) and None)
    loss = model(seeded(ctx.rank, 3, WIDTH)).square().sum()
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    fails.append(False)
    for param in model.parameters():
        param.grad = None
    loss.backward()
    hook.remove()
    for rank in range(2):
        plain(seeded(rank, 3, WIDTH)).square().sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.ranks(2)
@of_any_size()
@pytest.mark.parametrize("compression", [Compression(None, "int8"), Compression("int8", None), None])
def test_no_places_in_shared_memory_are_left(ctx, compression):
    model = Block(nn.Linear(64, 64), precision=MixedPrecision(compression=compression))
    for step in range(3):
        model(seeded(step, 3, 64)).square().sum().backward()
        model.zero_grad()
    assert not getattr(ctx.zero._on_host, "_places", None)


@pytest.mark.ranks(2)
def test_gradients_of_the_only_parameter_that_lie_in_other_ways_on_each_rank(ctx):
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor, dense: bool) -> Tensor:
            return (self.w * x).sum() if dense else self.w.sum()

    block, x = Block(Weight(), use_checkpoint=False), seeded(0, 64, 64)
    block(x, ctx.rank == 0).backward()
    torch.testing.assert_close(block.w.grad.to_local(), rows_of(x + 1, block.w))


@pytest.mark.ranks(2)
@of_any_size()
def test_gradients_of_inputs_alone_open_no_target(ctx):
    opened = []
    original = GradientTargets.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientTargets, "open", lambda *args: opened.append(1) or original(*args))
        model = Block(nn.Linear(WIDTH, WIDTH), use_checkpoint=False)
        x = seeded(ctx.rank, 3, WIDTH).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert not opened
        model(x).sum().backward()
        assert opened


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 3])
@of_any_size()
def test_a_backward_that_fails_leaves_nothing(ctx, level):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level)
    for _ in range(3):
        y = model[1].register_forward_hook(lambda _module, _args, y: y.register_hook(lambda _: 1 / 0) and None)
        with pytest.raises(ZeroDivisionError):  # when the gradient of the last weight has been written
            model(seeded(0, 3, WIDTH)).sum().backward()
        y.remove()
    train(ctx, plain, model)
    [reducer] = {param.handle.reducer for param in model.parameters()}
    assert not list(reducer.waiting())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [MixedPrecision(torch.bfloat16), MixedPrecision(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("level", [1, 3])
def test_half_precision_is_rounded_as_autograd_rounds(ctx, precision, level):
    torch.manual_seed(0)
    modules = [Block(Products(), use_checkpoint=False, zero_level=level, precision=precision) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    grads = []
    for module, least in zip(modules, (0, 1 << 60), strict=True):
        with of_any_size(least):
            with no_sync(module):
                module(seeded(ctx.rank, 2, 3, WIDTH)).sum().backward()
            module(seeded(ctx.rank + 5, 2, 3, WIDTH)).sum().backward()
        grads.append([param.grad.to_local() for param in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
