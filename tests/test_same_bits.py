"""``init_distributed(deterministic=True)``: the same losses and parameters, to the bit, on 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import bmtrain as bmt
from bmt_comm import TREE_SUM, ParallelContext, TreeSum, combine, local_tensor, tree_sum
from bmt_comm.testing import RankPool
from bmt_optim import gradients
from bmt_zero import fully_shard

MICRO_BATCHES, SEQUENCES, STEPS = 8, 3, 6
SIZES = (1, 2, 4)
WIDTH = 37


class Layer(nn.Module):
    """Ragged sizes, a 0-dim parameter, a module that is called twice, and dropout."""

    def __init__(self, width: int = WIDTH, inner: int = 53) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(nn.functional.dropout(self.norm(x), 0.1))))


class Model(bmt.DistributedModule):
    def __init__(self, level: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, WIDTH, dtype=dtype)
        layers = [Layer().to(dtype) for _ in range(3)]
        precision = bmt.MixedPrecision(torch.bfloat16) if level == 1 else None
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(layer, use_checkpoint=n == 1, precision=precision) for n, layer in enumerate(layers)]
        )
        self.shift = bmt.DistributedParameter(torch.randn(WIDTH, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens) + self.shift)
        hidden = self.layers[0](hidden)  # for the second time
        return hidden.float() @ self.embedding.weight.float().T


def train(
    level: int, kind: str, dtype: torch.dtype = torch.float32, micro_batches: int = MICRO_BATCHES, tp_size: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of all steps, and the parameters at the end."""
    context = bmt.init_distributed(seed=1, zero_level=level, tp_size=tp_size, deterministic=True)
    model = bmt.BMTrainModelWrapper(Model(level, dtype), use_checkpoint=False)
    optimizers = make_optimizers(kind, model)
    manager = bmt.optim.OptimManager(2.0**7 if dtype == torch.float16 else None, skip_non_finite=True)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    losses = []
    count = micro_batches // context.replicas
    for step in range(STEPS):
        manager.zero_grad()
        of_step = []
        for micro_batch in range(count):
            number = (step * count + micro_batch) * context.replicas + context.data_rank
            torch.manual_seed(number)
            tokens = torch.randint(41, (SEQUENCES, 12))
            with contextlib.nullcontext() if micro_batch == count - 1 else bmt.no_sync(model):
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                manager.backward(loss / count)
            of_step.append(loss.detach())
        norm = manager.clip_grad_norm([p for o in optimizers for g in o.param_groups for p in g["params"]], 0.5)
        manager.step()
        losses += [tree_sum(bmt.sum_loss(torch.stack(of_step)).unbind()) / count, norm]
    values = {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}
    bmt.shutdown()
    return losses, values


def make_optimizers(kind: str, model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    if "muon" in kind:
        matrices, others = ([p for p in params if (len(p.logical_shape) == 2) == wanted] for wanted in (True, False))
        muon = torch.optim.Muon if kind == "torch muon" else bmt.optim.Muon
        return [muon(matrices, lr=0.01), bmt.optim.AdamOptimizer(others)]
    makers: dict[str, Callable[..., Any]] = {
        "adam": bmt.optim.AdamOptimizer,
        "offload": bmt.optim.AdamOffloadOptimizer,
        "adam rule": bmt.optim.Adam,
        "torch": torch.optim.AdamW,
    }
    return [makers[kind](params, lr=0.01)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(max(SIZES)) as pool:
        yield pool


def different(
    pool: RankPool, *arguments: Any, run: Callable[..., Any] = train, sizes: Sequence[int] = SIZES
) -> list[str]:
    """What differs from the smallest number of ranks."""
    runs = [of_rank for size in sizes for of_rank in pool.run(run, size, *arguments)]
    losses, values = runs[0]
    assert losses[0] > losses[-2], "it learns"
    found = []
    for other_losses, other_values in runs[1:]:
        found += [f"loss or norm {n}" for n, each in enumerate(losses) if not torch.equal(each, other_losses[n])]
        found += [name for name, value in values.items() if not torch.equal(value, other_values[name])]
    return found


@pytest.mark.parametrize("level", [*(pytest.param(level, marks=pytest.mark.long) for level in (0, 2)), 1, 3])
def test_any_number_of_ranks_gives_the_same_bits(pool, level):
    assert different(pool, level, "adam") == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    ["offload", "muon", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("adam rule", "torch", "torch muon"))],
)
def test_with_each_optimizer(pool, kind):
    assert different(pool, 3, kind) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", [0, 3])
def test_in_half_precision(pool, dtype, level):
    assert different(pool, level, "adam", dtype) == []


@pytest.mark.thorough
def test_any_number_of_micro_batches(pool):
    assert different(pool, 2, "adam", torch.float32, 12) == []
    assert different(pool, 2, "adam", torch.float32, 4) == []


@pytest.mark.parametrize("level", [0, 3])
def test_with_tensor_parallel_ranks(pool, level):
    assert different(pool, level, "adam", torch.float32, MICRO_BATCHES, 2, sizes=(2, 4)) == []


def train_fully_sharded(replicate: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """As FSDP2's scripts do it, with ``replicate`` groups if there are as many ranks: gradients are means."""
    context = bmt.init_distributed(seed=1, deterministic=True)
    groups = min(replicate, context.world_size)
    mesh = init_device_mesh("cpu", (groups, context.world_size // groups), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(Layer(), Layer())
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(grad_scale=1)
    manager.add_optimizer(optimizer)
    losses, count = [], MICRO_BATCHES // context.world_size
    for step in range(STEPS):
        of_step = []
        for micro_batch in range(count):
            torch.manual_seed((step * count + micro_batch) * context.world_size + context.rank)
            model.set_requires_gradient_sync(micro_batch == count - 1)
            loss = model(torch.randn(SEQUENCES, WIDTH)).square().mean()
            manager.backward(loss / count)
            of_step.append(loss.detach())
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
        losses += [tree_sum(bmt.sum_loss(torch.stack(of_step)).unbind()) / count, norm]
        optimizer.zero_grad()
    values = {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}
    bmt.shutdown()
    return losses, values


@pytest.mark.parametrize("replicate", [1, 2])
def test_fully_shard(pool, replicate):
    assert different(pool, replicate, run=train_fully_sharded) == []


def train_with_fault(fault: str) -> Any:
    """With another order of sums at one place."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "ranks":
            patch.setattr(combine, "tree_sum", lambda parts, out: torch.sum(torch.stack(list(parts)), 0, out=out))
        elif fault == "micro-batches":
            patch.setattr(TreeSum, "add", add_in_turn)
        elif fault == "norm":
            patch.setattr(gradients, "_norm_in_fixed_order", norm_of_local_sums)
        return train(3, "adam")


def add_in_turn(tree: TreeSum, value: Tensor) -> None:
    tree._partial = [tree._partial[0] + value] if tree._partial else [value]


def norm_of_local_sums(params: Sequence[Tensor], norm_type: float, context: ParallelContext) -> Tensor:
    total = torch.stack([local_tensor(p.grad).square().sum() for p in params]).sum()
    context.world.all_reduce(total)
    return total.sqrt().double()


@pytest.mark.parametrize("fault", ["ranks", "micro-batches", "norm"])
def test_another_order_of_sums_is_noticed(pool, fault):
    assert different(pool, fault, run=train_with_fault)


@pytest.mark.ranks(1, 2, deterministic=True)
def test_what_depends_on_the_number_of_ranks_is_refused(ctx):
    model = bmt.BMTrainModelWrapper(Model(3, torch.float32), use_checkpoint=False)
    matrices = [p for p in model.parameters() if len(p.logical_shape) == 2]
    for make in (bmt.optim.DistributedLamb, bmt.optim.DistributedCAME, torch.optim.Adafactor):
        with pytest.raises(ValueError, match="deterministic=True, use Adam"):
            bmt.optim.OptimManager().add_optimizer(make(matrices, lr=0.01))
    with pytest.raises(ValueError, match="leave fused out"):
        bmt.optim.OptimManager().add_optimizer(torch.optim.AdamW(matrices, lr=0.01, fused=True))


@pytest.mark.ranks(2, deterministic=True)
def test_accumulation_without_no_sync_is_refused(ctx):
    model = bmt.Block(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="under no_sync"):
        model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="clip_grad_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.ranks(2, deterministic=True)
def test_gradients_that_are_zeroed_under_no_sync_are_dropped(ctx):
    model = bmt.Block(nn.Linear(3, 3))
    with bmt.no_sync(model):
        model(torch.ones(2, 3)).sum().backward()
    model.zero_grad(set_to_none=False)
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.bias.grad.to_local(), torch.full_like(model.bias.grad.to_local(), 4.0))


class TwoDtypes(nn.Module):
    """Parameters of two dtypes, which are reduced apart, and of which some calls use one."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, both):
        return self.always(x) + self.sometimes(x.double()).float() if both else self.always(x)


@pytest.mark.ranks(2, deterministic=True)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_that_has_used_nothing_drops_what_is_zeroed_under_no_sync(ctx, set_to_none):
    block, x = bmt.Block(TwoDtypes()), torch.ones(2, 3)
    with bmt.no_sync(block):
        block(x, ctx.rank == 1).sum().backward()
    torch.optim.SGD(block.parameters(), lr=0.1).zero_grad(set_to_none)
    block(x, True).sum().backward()
    for grad in (param.grad.to_local() for param in block.sometimes.parameters()):
        assert torch.equal(grad, torch.full_like(grad, 4.0))
    block.zero_grad()
    with bmt.no_sync(block):
        block(x, False).sum().backward()
    block(x, False).sum().backward()
    assert all(param.grad is None for param in block.sometimes.parameters())


@pytest.mark.ranks(2)
def test_a_parameter_that_the_last_micro_batch_does_not_use_has_its_gradient(ctx):
    bmt.shutdown()
    bmt.init_distributed(deterministic=True)
    model = bmt.DistributedModule()
    model.used, model.other = bmt.Block(nn.Linear(3, 3)), bmt.Block(nn.Linear(3, 3))
    with bmt.no_sync(model):
        (model.used(torch.ones(2, 3)) + model.other(torch.ones(2, 3))).sum().backward()
    model.used(torch.ones(2, 3)).sum().backward()
    for block, expected in ((model.used, 8.0), (model.other, 4.0)):
        assert torch.equal(block.bias.grad.to_local(), torch.full_like(block.bias.grad.to_local(), expected))
    assert torch.are_deterministic_algorithms_enabled()
    bmt.shutdown()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.ranks(3, init=False)
def test_layouts_without_such_an_order_are_refused():
    with pytest.raises(ValueError, match="there are 3 and 1"):
        bmt.init_distributed(deterministic=True)
    with pytest.raises(ValueError, match="pipeline"):
        bmt.init_distributed(deterministic=True, pipe_size=3)


@pytest.mark.ranks(4, deterministic=True, nccl_rules="lazy")
def test_the_tree_over_ranks(ctx):
    parts = torch.randn(4, 8, dtype=torch.bfloat16)
    expected = (parts[0].float() + parts[1].float()) + (parts[2].float() + parts[3].float())
    out = torch.empty(2)
    ctx.world.reduce_scatter(out, parts[ctx.rank].clone(), TREE_SUM)
    assert torch.equal(out, expected[2 * ctx.rank : 2 * ctx.rank + 2])
    everywhere = parts[ctx.rank].float()
    ctx.world.all_reduce(everywhere, TREE_SUM)
    assert torch.equal(everywhere, expected)


@pytest.mark.ranks(2, 4, device="cpu")
def test_the_tree_by_torchs_own_collectives(ctx):
    """As CUDA tensors take it."""
    parts = torch.randn(ctx.world_size, 4 * ctx.world_size, dtype=torch.bfloat16)
    expected = tree_sum(parts.float().unbind())
    out = torch.empty(4)
    ctx.world._tree_sum(out, parts[ctx.rank].clone()).wait()
    assert torch.equal(out, expected[4 * ctx.rank : 4 * ctx.rank + 4])
    everywhere = parts[ctx.rank].float()[:-1]  # of a size that the ranks do not divide
    ctx.world._tree_sum_everywhere(everywhere)
    assert torch.equal(everywhere, expected[:-1])


@pytest.mark.parametrize("count", range(1, 18))
def test_the_tree_over_time_is_that_over_ranks(count):
    parts = torch.randn(count, 5).unbind()
    tree = TreeSum()
    for part in parts:
        tree.add(part.clone())
    assert torch.equal(tree.total(), tree_sum(parts))
    if count % 4 == 0:
        assert torch.equal(tree_sum([tree_sum(parts[n : n + 4]) for n in range(0, count, 4)]), tree_sum(parts))
