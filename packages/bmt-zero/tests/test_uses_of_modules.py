"""Modules that use their parameters, inputs or themselves in ways that few do, where storage is released and shared."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from block_helpers import assert_same_gradients, own_memory, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bmt_zero import BMTrainModelWrapper, fully_shard, no_sync, shard

WIDTH = 6


class WritesToInput(nn.Module):
    """Adds to a tensor that it was given, or writes to a part of it, and returns that."""

    def __init__(self, part: bool) -> None:
        super().__init__()
        self.part = part
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        if self.part:
            total[:, 1:3] = y[:, :2]
        else:
            total += y
        return total


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y + self(y, depth - 1) if depth else y)


class TrainedWithin(nn.Module):
    """Frozen, but for a part whose input does not come from the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        prefix = self.second(self.prefix(torch.ones(WIDTH)))
        return self.first(x) + prefix


class Projecting(nn.Embedding):
    """Embeds numbers and projects to them, as BMTrain's does."""

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        return F.linear(x, self.weight) if projection else super().forward(x)


class Tied(nn.Module):
    """Has the weight of a part that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1100, 256)  # large enough to be unsharded by itself
        self.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.embedding(ids)), self.weight)


def everywhere(test):
    """Ranks share memory, or have separate memory, at each level."""
    for mark in (pytest.mark.parametrize("own", [False, True]), pytest.mark.parametrize("level", [1, 2, 3])):
        test = mark(test)
    return pytest.mark.ranks(2)(test)


def compare(ctx, plain: nn.Module, model: nn.Module, own: bool, compute) -> None:
    """Two steps with the output that ``compute`` returns for a module and a seed."""
    with own_memory() if own else torch.enable_grad():
        for step in range(2):
            for rank in range(2):
                compute(plain, 10 * step + rank).square().sum().backward()
            compute(model, 10 * step + ctx.rank).square().sum().backward()
    assert_same_gradients(model, plain)


@everywhere
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("is_view", [False, True])
def test_an_output_is_an_input_that_was_written_to(ctx, level, own, part, is_view):
    torch.manual_seed(0)
    plain = WritesToInput(part)
    model = shard(copy.deepcopy(plain), level)

    def compute(module: nn.Module, seed: int) -> Tensor:
        total = seeded(seed + 1, 3, 2 * WIDTH)[:, :WIDTH] if is_view else seeded(seed + 1, 3, WIDTH)
        return module(seeded(seed, 3, WIDTH), total)

    compare(ctx, plain, model, own, compute)


@everywhere
def test_a_module_calls_itself(ctx, level, own):
    torch.manual_seed(0)
    plain = CallsItself()
    compare(ctx, plain, shard(copy.deepcopy(plain), level), own, lambda module, seed: module(seeded(seed, 3, WIDTH)))


@everywhere
def test_a_module_calls_another_one_that_has_its_weight(ctx, level, own):
    torch.manual_seed(0)
    plain = nn.Sequential(Tied(), nn.Linear(1100, 1100))
    model = BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level)

    def compute(module: nn.Module, seed: int) -> Tensor:
        return module(torch.arange(seed, seed + 6) % 12)

    compare(ctx, plain, model, own, compute)


@everywhere
def test_a_frozen_module_around_a_trained_one(ctx, level, own):
    torch.manual_seed(0)
    plain = TrainedWithin()
    model = copy.deepcopy(plain)
    shard(model.prefix, level)
    shard(model, level)
    compare(ctx, plain, model, own, lambda module, seed: module(seeded(seed, 3, WIDTH).requires_grad_()))


@everywhere
def test_an_embedding_that_projects(ctx, level, own):
    torch.manual_seed(0)
    plain = Projecting(12, WIDTH)

    def compute(module: nn.Module, seed: int) -> Tensor:
        return module(torch.tanh(module(torch.arange(seed, seed + 6) % 12)), projection=True)

    compare(ctx, plain, shard(copy.deepcopy(plain), level), own, compute)


@everywhere
def test_bags_with_trained_weights(ctx, level, own):
    torch.manual_seed(0)
    plain = nn.ModuleDict({"bag": nn.EmbeddingBag(12, WIDTH, mode="sum"), "weights": nn.Embedding(12, 1)})
    model = copy.deepcopy(plain)
    shard(model["bag"], level)
    shard(model["weights"], level)

    def compute(module: nn.Module, seed: int) -> Tensor:
        ids = torch.arange(seed, seed + 6).view(2, 3) % 12
        return module["bag"](ids, per_sample_weights=module["weights"](ids)[..., 0])

    compare(ctx, plain, model, own, compute)


class Changing(nn.Module):
    """Begins with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor | None = None, pair: list[Tensor] | None = None, inplace: bool = True) -> Tensor:
        x = pair[0] if x is None else x
        return self.linear(F.silu(x, inplace=inplace))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ["by position", "by keyword", "in a list"])
@pytest.mark.parametrize("when", ["in forward", "later", "never"])
def test_arguments_that_are_changed_in_place_before_they_are_needed_again(ctx, how, when):
    torch.manual_seed(0)
    plain = Changing()
    model = shard(copy.deepcopy(plain), use_checkpoint=True)
    grads = []
    for each in (plain, model):
        x = seeded(0, 3, WIDTH).requires_grad_().mul(1.0)
        inplace = when == "in forward"
        y = {
            "by position": lambda each=each, x=x, inplace=inplace: each(x, inplace=inplace),
            "by keyword": lambda each=each, x=x, inplace=inplace: each(x=x, inplace=inplace),
            "in a list": lambda each=each, x=x, inplace=inplace: each(pair=[x], inplace=inplace),
        }[how]()
        if when == "later" and each is model:
            x.add_(1.0)
        if when == "never" or each is plain:
            y.sum().backward()
            grads.append(each.linear.weight.grad)
            continue
        with pytest.raises(RuntimeError, match=r"changed in place in its forward or since|modified by an inplace"):
            y.sum().backward()
    if when == "never":
        torch.testing.assert_close(grads[1].add(0), grads[0])


@dataclasses.dataclass
class _State:
    factor: Tensor


class _Stateful(nn.Module):
    """Sets an attribute of an argument anew, or writes into it."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, x: Tensor, state: _State) -> Tensor:
        y = self.linear(x) * state.factor.clone()
        if self.writes:
            state.factor.mul_(3.0)
        else:
            state.factor = state.factor * 3.0
        return y


@pytest.mark.ranks(1)
@pytest.mark.parametrize("writes", [False, True])
def test_dataclasses_that_a_checkpointed_forward_changes(ctx, writes):
    """The recomputation gets the attributes that the forward got. A write into one of them is an error."""
    torch.manual_seed(0)
    plain = _Stateful(writes)
    model = shard(copy.deepcopy(plain), use_checkpoint=True)
    for each in (plain, model):
        state = _State(torch.zeros(3, WIDTH).add_(1.0))  # a tensor that was written to before
        y = each(seeded(0, 3, WIDTH), state).sum()
        assert state.factor.mean() == 3
        if writes and each is model:
            with pytest.raises(RuntimeError, match="changed in place in its forward or since"):
                y.backward()
        else:
            y.backward()
    if not writes:
        torch.testing.assert_close(model.linear.weight.grad.add(0), plain.linear.weight.grad)


class Refreshing(nn.Module):
    """Writes to a buffer in some calls, and in evaluation to another one than in training."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("usage", torch.ones(size))
        self.register_buffer("seen", torch.ones(size))
        self.usage: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor, refresh: bool) -> Tensor:
        if refresh:
            written = self.usage if self.training else self.seen
            written.add_(x.detach().abs().mean())
        return self.linear(x) / self.usage[0].clone() / self.seen[0].clone()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_small", [True, False])
def test_buffers_that_a_later_forward_writes_to(ctx, is_small):
    torch.manual_seed(0)
    plain = Refreshing(1 if is_small else 1 << 15)
    model = shard(copy.deepcopy(plain), use_checkpoint=True)
    for each in (plain, model):
        each(seeded(0, 3, WIDTH), refresh=False).sum().backward()
        loss = each(seeded(1, 3, WIDTH), refresh=False).square().sum()
        each(seeded(2, 3, WIDTH), refresh=True)
        if is_small or each is plain:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"has written to the buffers \['usage'\]"):
                loss.backward()
    if is_small:
        assert_same_gradients(model, plain)


@pytest.mark.ranks(1)
def test_large_buffers_that_a_hook_writes_to(ctx):
    layer = nn.Linear(3, 3)
    layer.register_buffer("seen", torch.zeros(1 << 15))
    block = shard(layer, use_checkpoint=True)

    def count(module: nn.Module, *_: object) -> None:
        module.seen.add_(1)

    block.register_forward_hook(count)
    for step in range(1, 4):
        block(torch.ones(2, 3)).sum().backward()
        assert block.seen[0] == step


@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_small", [True, False])
def test_buffers_that_only_some_forwards_write_to(ctx, is_small):
    size = 1 if is_small else 1 << 15
    torch.manual_seed(0)
    plain = Refreshing(size)
    model = shard(copy.deepcopy(plain), use_checkpoint=True)
    steps = [(False, True), (True, True), (True, False), (False, False)] if is_small else [(True, False), (True, True)]
    for refresh, training in steps:
        for each in (plain, model):
            each.train(training)
            each(seeded(0, 3, WIDTH), refresh=refresh).square().sum().backward()
        assert_same_gradients(model, plain)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), buffer)


class SomeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, numbers: tuple[int, ...]) -> Tensor:
        for number in numbers:
            x = x + torch.tanh(self.layers[number](x))
        return x


def accumulate(ctx, model, plain, deferring, divisor):
    """A step of two micro-batches, of which the second one skips layers that the first one has used."""
    for number, used in enumerate([(0, 1, 2), (1,)]):
        with deferring(number == 0):
            (model(seeded(10 * number + ctx.rank, 4, WIDTH), used).square().mean() / divisor).backward()
        for rank in range(ctx.world_size):
            (plain(seeded(10 * number + rank, 4, WIDTH), used).square().mean() / ctx.world_size).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_layers_that_the_last_micro_batch_skips(ctx, level, set_to_none):
    torch.manual_seed(0)
    plain = SomeLayers()
    model = BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level)
    for _ in range(2):
        accumulate(ctx, model, plain, lambda first: no_sync(model) if first else nullcontext(), ctx.world_size)
        assert_same_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad(set_to_none=set_to_none)
    with no_sync(model):
        model(seeded(ctx.rank, 4, WIDTH), (0, 1, 2)).square().mean().backward()
    model.zero_grad()  # also what waits
    accumulate(ctx, model, plain, lambda first: no_sync(model) if first else nullcontext(), ctx.world_size)
    assert_same_gradients(model, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("option", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_layers_that_the_last_micro_batch_skips_under_hybrid_sharding(ctx, option):
    torch.manual_seed(0)
    plain = SomeLayers()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def deferring(first):
        getattr(model, option)(not first)
        return nullcontext()

    for _ in range(2):
        accumulate(ctx, model, plain, deferring, 1)
        assert_same_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()


class ReturnsIterator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        y = torch.tanh(self.first(x))
        return iter([y, self.second(y)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_checkpoint", [False, True])
@own_memory()
def test_outputs_in_an_iterator(ctx, use_checkpoint):
    torch.manual_seed(0)
    plain = ReturnsIterator()
    model = shard(copy.deepcopy(plain), zero_level=3, use_checkpoint=use_checkpoint)
    for each in (model, plain):
        x = seeded(0, 3, WIDTH).requires_grad_()
        first, second = each(x)
        ((first * second).sum() / (ctx.world_size if each is model else 1)).backward()
    assert_same_gradients(model, plain)
