"""What a checkpointed module keeps for backward: results of some operators, or a share of its activation memory."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_helpers import assert_same_gradients, pair, seeded
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bmt_zero
from bmt_comm import ParallelContext
from bmt_zero import Block, TransformerBlockList, shard
from bmt_zero.kept_results import Forward
from bmt_zero.shard import sharding_of

aten = torch.ops.aten
WIDTH = 8


class Layer(nn.Module):
    """Attention and a multi-layer perceptron, with dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH + 1), nn.Linear(4 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.second_norm(x)))), self.dropout)


def chosen(use_checkpoint: Any) -> Any:
    """Operators by name, because they cannot be pickled for the ranks."""
    if not isinstance(use_checkpoint, tuple):
        return use_checkpoint
    return {operator.attrgetter(name)(aten) for name in use_checkpoint}


class Operations(TorchDispatchMode):
    """Counts the operators that run, and the bytes that they have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name.removeprefix("aten::"))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def alive(self) -> int:
        """Without the small tensors that ranks compare with each other."""
        return sum(nbytes for storage, nbytes in self._storages.values() if nbytes > 64 and not storage.expired())


def run(module: nn.Module, x: Tensor, seed: int = 5) -> tuple[int, list[str], list[Tensor]]:
    """A forward and a backward.

    Returns the bytes kept between them, the operators that ran in backward, and the gradients.
    """
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    with Operations() as forward:
        y = module(x)
    kept = forward.alive()
    with Operations() as backward:
        y.square().sum().backward()
    assert x.grad is not None
    return kept, backward.names, [x.grad, *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


def assert_close(tensors: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    assert len(tensors) == len(expected)
    for one, other in zip(tensors, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm().clamp_min(1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", ["matmuls", ("addmm", "gelu.default"), 0.3, 0.7], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_without_checkpointing(
    ctx: ParallelContext, level: int, use_checkpoint: Any, autocast: bool
) -> None:
    _, reference = pair(Layer, use_checkpoint=False, zero_level=level)
    _, block = pair(Layer, use_checkpoint=chosen(use_checkpoint), zero_level=level)
    for step in range(3):
        x = seeded(10 * step + ctx.rank, 2 + step, 5, WIDTH)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, _, tensors = run(block, x, 7 + step)
            _, _, expected = run(reference, x, 7 + step)
        assert_close(tensors, expected)
        with torch.no_grad():
            torch.manual_seed(0)
            y = block(x)
            torch.manual_seed(0)
            assert torch.equal(y, reference(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_checkpoint", ["matmuls", 0.5])
def test_trains_as_the_plain_model_does(ctx: ParallelContext, use_checkpoint: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer(dropout=0.0) for _ in range(3)), nn.Linear(WIDTH, 3))
    model = bmt_zero.BMTrainModelWrapper(copy.deepcopy(plain), use_checkpoint=use_checkpoint)
    for step in range(3):
        batch = seeded(step, 2 * ctx.world_size, 5, WIDTH)
        plain.zero_grad()
        plain(batch).square().sum().backward()
        model.zero_grad()
        model(batch.chunk(ctx.world_size)[ctx.rank]).square().sum().backward()
        assert_same_gradients(model, plain)


@pytest.mark.ranks(1, 2)
def test_kept_memory_grows_with_the_share(ctx: ParallelContext) -> None:
    shares = (True, 0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, False)
    x = seeded(1, 4, 64, WIDTH)
    kept, counts = [], []
    for share in shares:
        _, block = pair(Layer, use_checkpoint=share, zero_level=3)
        first, *_ = run(block, x)
        nbytes, names, _ = run(block, x)
        if share not in (True, False, 0.0, 1.0):
            assert first == kept[0]  # nothing is kept before it is known what
        kept.append(nbytes)
        counts.append(sum(name != "detach" for name in names))  # torch calls it a varying number of times
    assert (kept[0], kept[-1]) == (kept[1], kept[-2])
    assert (counts[0], counts[-1]) == (counts[1], counts[-2])
    assert sorted(kept) == kept
    assert sorted(counts[1:-1], reverse=True) == counts[1:-1]
    assert len(set(kept)) > 6
    everything = kept[-1] - kept[0]
    for share, nbytes in zip(shares[2:-2], kept[2:-2], strict=True):
        assert 0.5 * share * everything < nbytes - kept[0] <= share * everything * 1.02  # some inputs are kept twice


@pytest.mark.ranks(1)
def test_products_and_attention_are_not_computed_again(ctx: ParallelContext) -> None:
    x = seeded(1, 2, 5, WIDTH)
    again = {}
    for use_checkpoint in (True, "matmuls", ("addmm.default",)):
        _, block = pair(Layer, use_checkpoint=chosen(use_checkpoint))
        _, names, _ = run(block, x)
        forward_only = [name for name in names if not name.endswith("backward")]
        again[str(use_checkpoint)] = sum("attention" in n for n in forward_only), forward_only.count("addmm")
    assert list(again.values()) == [(1, 4), (0, 0), (1, 0)]


class Writes(nn.Module):
    """Writes into the results of products, one of them as an all-reduce does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = _Summed.apply(self.up(x).tanh_(), self.down.weight)
        self.hidden = x + torch.sin(x).mul_(2)
        return torch.tanh(self.hidden)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = x @ weight.t()
        dist.all_reduce(product)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_checkpoint", ["matmuls", ("mm", "sin", "add.Tensor"), 0.4, 0.9], ids=str)
def test_results_that_are_written_to_are_computed_again(ctx: ParallelContext, use_checkpoint: Any) -> None:
    _, reference = pair(Writes, use_checkpoint=False)
    _, block = pair(Writes, use_checkpoint=chosen(use_checkpoint))
    for step in range(3):
        x = seeded(step + ctx.rank, 3, 5)
        assert_close(run(block, x)[2], run(reference, x)[2])
        for module in (block, reference):
            module.zero_grad()
            y = module(x)
            with torch.no_grad():
                module.hidden.add_(1)
            y.sum().backward()
        assert_close([p.grad for p in block.parameters()], [p.grad for p in reference.parameters()])
    if isinstance(use_checkpoint, float):
        assert not {aten.addmm.default, aten.mm.default} & set(sharding_of(block).checkpoint.kept.wanted)


class WritesAside(nn.Module):
    """Writes into results without a change of their version counters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.gru = nn.Linear(5, 6), nn.GRU(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gru":  # gates are computed in place, in parts that unsafe_chunk gives
            return self.gru(x)[0]
        y = self.linear(x)
        if self.kind == "data":
            y.data.mul_(2)
        elif self.kind == "sparse":  # such tensors have no storage
            y = torch.sparse.mm(torch.eye(3).to_sparse().mul_(2), y)
        else:
            for part in y.unsafe_chunk(2, -1):
                part.sigmoid_()
        return torch.tanh(y) * y


@pytest.mark.ranks(1)
@pytest.mark.parametrize("use_checkpoint", ["matmuls", 0.9], ids=str)
@pytest.mark.parametrize("kind", ["gru", "data", "chunk", "sparse"])
def test_writes_that_no_version_counter_counts(ctx: ParallelContext, kind: str, use_checkpoint: Any) -> None:
    torch.manual_seed(0)
    model = WritesAside(kind)
    reference = Block(copy.deepcopy(model), use_checkpoint=False)
    block = Block(model, use_checkpoint=use_checkpoint)
    for step in range(2):
        for module in (block, reference):
            module.zero_grad()
            module(seeded(step, 3, 5)).square().sum().backward()
        for param, expected in zip(block.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None)
            if expected.grad is not None:
                assert_close([param.grad], [expected.grad])


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(F.dropout(x, 0.3))
        x = x * torch.bernoulli(torch.sigmoid(x.detach()))
        return F.dropout(torch.tanh(self.linear(x)), 0.3) * torch.rand_like(x)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("use_checkpoint", [("bernoulli",), ("rand_like", "addmm"), 0.3, 0.6, 0.8], ids=str)
def test_random_results_may_be_kept(ctx: ParallelContext, use_checkpoint: Any) -> None:
    _, reference = pair(Random, use_checkpoint=False)
    _, block = pair(Random, use_checkpoint=chosen(use_checkpoint))
    for seed in range(4):
        x = seeded(seed, 3, 5)
        assert_close(run(block, x, seed)[2], run(reference, x, seed)[2])


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Layer() for _ in range(2))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.inner:
            x = layer(x)
        return self.last(torch.tanh(x) * x.clone())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inside", [False, True, "matmuls", 0.5])
@pytest.mark.parametrize("outside", ["matmuls", 0.3, 0.8, ("clone", "tanh", "mul")], ids=str)
def test_nested_modules(ctx: ParallelContext, inside: Any, outside: Any) -> None:
    torch.manual_seed(3)
    plain = Outer()

    def nested(inside: Any, outside: Any) -> nn.Module:
        model = copy.deepcopy(plain)
        shard(model.inner[0], 3, use_checkpoint=inside)
        shard(model.inner[1], 2, use_checkpoint=inside)
        return shard(model, 3, use_checkpoint=chosen(outside))

    reference, model = nested(False, False), nested(inside, outside)
    for step in range(3):
        x = seeded(10 * step + ctx.rank, 2, 5, WIDTH)
        assert_close(run(model, x, step)[2], run(reference, x, step)[2])


@pytest.mark.ranks(2)
def test_what_hooks_of_sharded_modules_do_is_not_counted(ctx: ParallelContext) -> None:
    model = shard(nn.Linear(5, 3), 3)
    seen: dict[Any, Any] = {}
    with Forward(dict.fromkeys([aten.t.default, aten.addmm.default, aten.slice.Tensor, aten.detach.default]), seen):
        model(seeded(0, 2, 5))
    assert {operation[0] for operation in seen} == {aten.t.default, aten.addmm.default}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_checkpoint", ["matmuls", 0.5])
def test_two_forwards_two_backwards_and_copies(ctx: ParallelContext, use_checkpoint: Any) -> None:
    _, reference = pair(lambda: Layer(0.0), use_checkpoint=False)
    _, block = pair(lambda: Layer(0.0), use_checkpoint=chosen(use_checkpoint))
    run(block, seeded(0, 2, 5, WIDTH))
    for module in (block, copy.deepcopy(block)):
        reference.zero_grad()
        module.zero_grad()
        for each in (module, reference):
            one, two = (each(seeded(10 * i + ctx.rank, 2, 3 + i, WIDTH)) for i in range(2))
            loss = (one.square().sum() + two.sum()) * one.mean()
            loss.backward(retain_graph=True)
            loss.backward()
        assert_close([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()])


@pytest.mark.ranks(1)
def test_lists_and_blocks_take_each_kind(ctx: ParallelContext) -> None:
    layers = TransformerBlockList([Block(Layer(), use) for use in (True, False, 0.0, 1.0, 0.5, "matmuls", set())])
    checkpointed = [sharding_of(layer).checkpoint is not None for layer in layers]  # type: ignore[union-attr]
    assert checkpointed == [True, False, True, False, True, True, True]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (1.5, r"use_checkpoint=1.5 .*from 0.0"),
        (-0.1, r"use_checkpoint=-0.1 .*from 0.0"),
        (float("nan"), r"use_checkpoint=nan .*from 0.0"),
        ("matmul", r"use_checkpoint='matmul' .*'matmuls'"),
        (None, r"use_checkpoint=None .*True, False"),
        (["mm"], r"use_checkpoint has 'mm' in it.*torch.ops.aten.mm.default"),
        ([torch.mm], r"use_checkpoint has .*mm.* in it.*torch.ops.aten.mm.default"),
        (("linear.default",), r"use_checkpoint has aten.linear.default in it.*addmm"),
        (("relu_.default",), r"use_checkpoint has aten.relu_.default in it.*in place"),
        (("view",), r"use_checkpoint has aten.view in it.*views"),
    ],
    ids=["above", "below", "nan", "name", "none", "text", "function", "composite", "in place", "view"],
)
def test_other_values_are_refused(ctx: ParallelContext, value: Any, match: str) -> None:
    linear = nn.Linear(3, 3)
    wraps = [bmt_zero.BMTrainModelWrapper, Block, shard]
    for wrap in wraps:
        with pytest.raises(ValueError, match=match):
            wrap(linear, use_checkpoint=chosen(value))
    assert sharding_of(linear) is None
    assert type(linear.weight) is nn.Parameter
