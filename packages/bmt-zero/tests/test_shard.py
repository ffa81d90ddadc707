"""A sharded module behaves as the original module does: cases that surprised users."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from block_helpers import assert_same_gradients, own_memory, pair, seeded, space
from test_block_list import Counted
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from bmt_comm import Communicator
from bmt_zero import (
    Block,
    BMTrainModelWrapper,
    DistributedModule,
    DistributedParameter,
    MixedPrecision,
    TransformerBlockList,
    load,
    shard,
)
from bmt_zero.shard import group_of

every_level = pytest.mark.parametrize("level", [0, 1, 2, 3])


def compare(ctx, plain, model, call, steps=2):
    """Gradients of ``call(model, x)`` are those of the plain model on all ranks' inputs."""
    for _ in range(steps):
        for rank in range(ctx.world_size):
            call(plain, seeded(rank, 3, 5)).backward()
        call(model, seeded(ctx.rank, 3, 5)).backward()
    assert_same_gradients(model, plain)


class Tied(nn.Module):
    """Two layers, an embedding with more than a mebibyte, a head that shares its weight, and small parameters."""

    def __init__(self, rows: int = 60_001) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, rows, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x) * self.scale)


@pytest.mark.ranks(2)
@every_level
def test_sharding_in_place_changes_neither_class_nor_names_nor_attributes(ctx, level):
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    model = copy.deepcopy(plain)
    objects = list(model.modules()), list(model.parameters())
    assert shard(model, level) is model
    assert list(model.modules()) == objects[0]
    assert all(a is b for a, b in zip(model.parameters(), objects[1], strict=True))
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {n for n in vars(model) if not n.startswith("_")} == {n for n in vars(plain) if not n.startswith("_")}
    compare(ctx, plain, model, lambda module, x: module(x).square().sum())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", [2, 3])
def test_an_outer_module_takes_what_inner_ones_have_not(ctx, outer):
    plain = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 5)), nn.LayerNorm(5))
    model = copy.deepcopy(plain)
    shard(model[1])
    shard(model, outer)
    assert len(group_of(model).params) == 4
    compare(ctx, plain, model, lambda module, x: module(x).square().sum())


@pytest.mark.ranks(2)
def test_looking_at_a_model_does_not_communicate(ctx):
    model = BMTrainModelWrapper(Tied())
    module = DistributedModule()
    module.weight = DistributedParameter(seeded(1, 9, 5))
    module.linear = Block(nn.Linear(5, 5))
    if ctx.rank == 0:
        for each in (model, module):
            assert "Linear" in repr(each)
        assert hasattr(model.head, "weight")
        assert not hasattr(model.head, "nothing")
        assert model.head.weight.logical_shape == (60_001, 5)
        assert "60001" in repr(model.head.weight)
        assert module.weight.logical_shape == (9, 5)
        assert module.weight.to_local().shape == module.weight.shape
        assert len(list(model.named_parameters())) == 8
        copy.deepcopy(model)
    ctx.world.barrier()
    assert torch.equal(module.weight.full_tensor(), seeded(1, 9, 5))


@pytest.mark.ranks(1, 2)
@every_level
def test_the_root_is_sharded_with_tied_weights(ctx, level):
    torch.manual_seed(0)
    plain = Tied()
    model = BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level)
    assert model.head.weight is model.embed.weight
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    for _ in range(2):
        for rank in range(ctx.world_size):
            plain(torch.arange(rank, rank + 4)).square().mean().backward()
        model(torch.arange(ctx.rank, ctx.rank + 4)).square().mean().backward()
    assert_same_gradients(model, plain)


class InPlace(nn.Module):
    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.returns_view = returns_view

    def forward(self, x):
        x.mul_(1.5)
        y = self.linear(x)
        return y[:, :5] if self.returns_view else y[:, :5].clone()


@pytest.mark.ranks(2)
@every_level
def test_a_view_that_the_next_block_writes_into(ctx, level):
    plain = nn.Sequential(*[InPlace(True) for _ in range(4)])
    blocks = nn.Sequential(*[Block(m, False, level) for m in copy.deepcopy(plain)])

    def call(module, x):
        return module(x * 1.0).square().sum()

    compare(ctx, plain, blocks, call)
    linked = TransformerBlockList([Block(m, False, level) for m in copy.deepcopy(plain)])
    plain.zero_grad()
    compare(ctx, plain, linked, call)


@pytest.mark.ranks(2)
@every_level
def test_a_frozen_parameter_and_writing_into_the_input(ctx, level):
    plain = nn.Sequential(*[InPlace(False) for _ in range(3)])
    plain[1].linear.bias.requires_grad_(False)
    plain[2].requires_grad_(False)
    blocks = nn.Sequential(*[Block(m, False, level) for m in copy.deepcopy(plain)])
    compare(ctx, plain, blocks, lambda module, x: module(x * 1.0).square().sum())
    assert [space(b) for b in blocks] == [0, 0, 0] or level < 2


@pytest.mark.ranks(2)
@every_level
def test_gradients_that_are_none_take_no_memory(ctx, level):
    block = Block(nn.Linear(5, 5), zero_level=level)
    block(seeded(ctx.rank, 3, 5)).sum().backward()
    storages = [StorageWeakRef(p.grad.untyped_storage()) for p in block.parameters()]
    assert not any(s.expired() for s in storages)
    for param in block.parameters():
        param.grad = None
    assert all(s.expired() for s in storages)


@pytest.mark.ranks(2, timeout=60)
@every_level
def test_frozen_on_one_rank_only_is_named(ctx, level):
    blocks = [Block(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), zero_level=level) for _ in range(2)]
    blocks[1].get_submodule("1").bias.requires_grad_(ctx.rank == 1)
    before = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)Sequential.*frozen: \['1.bias'\] on rank 0.*all parameters trained"):
        blocks[1](blocks[0](seeded(ctx.rank, 3, 5))).sum().backward()
    assert time.monotonic() - before < 30


@pytest.mark.ranks(2, timeout=60)
@every_level
def test_ranks_that_take_other_branches_of_equal_shape_are_named(ctx, level):
    blocks = nn.Sequential(*[Block(nn.Linear(5, 5), zero_level=level) for _ in range(2)])
    for index, block in enumerate(blocks):
        group_of(block).name = f"layer {index}"
    with pytest.raises(RuntimeError, match=r"(?s)layer 0.*layer 1|layer 1.*layer 0"):
        blocks[ctx.rank](seeded(0, 3, 5)).sum().backward()


class Cache:
    """An object that no container library knows."""

    def __init__(self, hidden):
        self.hidden = {"states": [hidden]}


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y.detach(), Cache(y * 2)


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_output_that_hides_tensors_costs_no_memory(ctx, level, checkpointing):
    plain, block = pair(WithCache, use_checkpoint=checkpointing, zero_level=level)

    def call(module, x):
        _, cache = module(x)
        if module is block and level == 3:
            assert space(block) == 0
        return cache.hidden["states"][0].square().sum()

    compare(ctx, plain, block, call)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x):
        self.n += 1
        return x * self.w * self.n + self.table


@pytest.mark.ranks(2)
def test_a_checkpointed_forward_that_changes_buffers_is_computed_again_with_those_before(ctx):
    plain, block = pair(Counting, use_checkpoint=True)
    for step in range(3):
        plain(seeded(0, 3, 5)).sum().backward()
        plain.n.sub_(1)
        plain(seeded(1, 3, 5)).sum().backward()
        block(seeded(ctx.rank, 3, 5)).sum().backward()
        assert block.n == plain.n == step + 1
        assert_same_gradients(block, plain)


@pytest.mark.ranks(2)
def test_buffers_are_made_equal(ctx):
    block = Counting()
    block.n.fill_(ctx.rank + 3)
    block.table.mul_(ctx.rank + 1)
    model = nn.Sequential(Block(block))
    assert block.n == 3
    assert torch.equal(model[0].table, torch.arange(5.0))
    wrapped = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped[1].running_mean.fill_(ctx.rank)
    assert not BMTrainModelWrapper(wrapped)[1].running_mean.any()


@pytest.mark.ranks(2)
def test_parameters_that_are_never_used_cost_one_exchange(ctx):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            return self.used(x)

    blocks = TransformerBlockList([Block(Part(), zero_level=3) for _ in range(3)])
    originals = Communicator.all_reduce
    sizes = []
    for _ in range(2):
        Communicator.all_reduce = lambda comm, *args, **kw: sizes.append(comm.size) or originals(comm, *args, **kw)
        try:
            blocks(seeded(ctx.rank, 3, 5)).sum().backward()
        finally:
            Communicator.all_reduce = originals
    assert [size for size in sizes if size > 1] == [2, 2]
    for name, param in blocks.named_parameters():
        assert (param.grad is None) == ("unused" in name)


@pytest.mark.ranks(2)
def test_a_parameter_that_one_rank_uses_has_a_gradient_on_all(ctx):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x, first):
            return self.a(x) if first else self.b(x)

    plain, block = pair(Part)
    for rank in range(2):
        plain(seeded(rank, 3, 5), True).sum().backward()
    block(seeded(ctx.rank, 3, 5), True).sum().backward()
    assert all(p.grad is None for p in block.b.parameters())
    plain(seeded(0, 3, 5), False).sum().backward()
    plain(seeded(1, 3, 5), True).sum().backward()
    block(seeded(ctx.rank, 3, 5), ctx.rank == 1).sum().backward()
    assert_same_gradients(block, plain)
    assert all(p.grad is not None for p in block.parameters())


@pytest.mark.ranks(1, 2)
def test_a_parameter_of_a_class_of_its_own_is_refused(ctx):
    class Quantized(nn.Parameter):
        scale = 2.0

    class Wrapped(torch.Tensor):
        pass

    for param in (Quantized(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3, 3).as_subclass(Wrapped))):
        module = nn.Linear(3, 3)
        module.weight = param
        for wrap in (shard, Block, BMTrainModelWrapper):
            with pytest.raises(ValueError, match=r"'weight' is a (Quantized|Wrapped)"):
                wrap(module)
        assert module.weight is param
        assert type(module.bias) is nn.Parameter


@pytest.mark.ranks(2)
def test_inputs_are_cast_or_not_and_outputs_have_the_dtype_that_is_asked_for(ctx):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x, table):
            self.dtypes = (x.dtype, table.dtype)
            return self.linear(x.to(self.linear.weight.dtype))

    half = torch.bfloat16
    for options, dtypes, output in [
        ({}, (half, half), half),
        ({"cast_forward_inputs": False}, (torch.float32, torch.float32), half),
        ({"output_dtype": torch.float32}, (half, half), torch.float32),
    ]:
        block = Block(Rotary(), precision=MixedPrecision(half, **options))
        y = block(seeded(0, 3, 5), seeded(1, 5))
        assert (block.dtypes, y.dtype) == (dtypes, output)
        y.sum().backward()
        assert block.linear.weight.grad.dtype == torch.float32


@pytest.mark.ranks(2)
@every_level
def test_distributed_parameters_go_into_a_block_without_being_unsharded(ctx, level):
    module = DistributedModule()
    value = seeded(1, 7, 5)
    module.weight = DistributedParameter(value)
    module.forward = lambda x: F.linear(x, module.weight)
    with Counted() as counted:
        block = Block(module, zero_level=level)
    assert not +counted.calls
    assert torch.equal(block.weight.full_tensor(), value)
    changed = DistributedModule()
    changed.weight = DistributedParameter(value)
    with torch.no_grad():
        changed.weight.mul_(2)  # its value is not the one that it was built from any more
    assert torch.equal(Block(changed, zero_level=level).weight.full_tensor(), 2 * value)


class Delta(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


class Parametrizing(nn.Module):
    """Registers a parametrization for the time of a call, as peft does on packed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5, bias=False)  # names stay in their order in the plain module, too
        self.delta = nn.Parameter(torch.full((5, 5), 0.1))

    def forward(self, x):
        parametrize.register_parametrization(self.base, "weight", Delta(self.delta))
        try:
            return torch.tanh(self.base(x))
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


@pytest.mark.ranks(1, 2)
@every_level
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_parametrization_that_comes_and_goes_in_forward(ctx, level, checkpointing):
    plain, block = pair(Parametrizing, use_checkpoint=checkpointing, zero_level=level)
    names = [name for name, _ in block.named_parameters()]
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())
    assert [name for name, _ in block.named_parameters()] == names


@pytest.mark.ranks(2)
@every_level
def test_a_part_of_a_block_may_be_called_outside_of_it(ctx, level):
    class Reversible(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

        def forward(self, x):
            return self.attention(self.norm(x))

        def half(self, x):
            return torch.tanh(self.attention(x)) * self.norm.weight

    plain, block = pair(Reversible, zero_level=level)
    compare(ctx, plain, block, lambda module, x: module.half(x).square().sum())
    with torch.no_grad():
        torch.testing.assert_close(block.half(seeded(0, 3, 5)), plain.half(seeded(0, 3, 5)))


@pytest.mark.ranks(2)
def test_operations_outside_of_modules_mean_the_logical_parameter(ctx):
    linear = nn.Linear(5, 7)
    plain = copy.deepcopy(linear)
    block = shard(linear)
    param, expected = block.weight, plain.weight
    for compute in (torch.norm, torch.sum, lambda p: p.std(), lambda p: p[3], lambda p: F.linear(torch.ones(5), p)):
        torch.testing.assert_close(compute(param), compute(expected))
        with torch.no_grad():
            torch.testing.assert_close(compute(param), compute(expected))
    penalty = sum(p.square().sum() for p in block.parameters())
    (penalty / ctx.world_size).backward()
    sum(p.square().sum() for p in plain.parameters()).backward()
    assert_same_gradients(block, plain)
    with pytest.raises(RuntimeError, match="no_grad"):
        param[0] = 1.0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_modules_are_as_they_were_after_an_exception_in_forward(ctx, kind):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.fails = False

        def forward(self, x):
            y = self.linear(x)
            if self.fails:
                raise kind("on purpose")
            return y

    plain, block = pair(Fails, use_checkpoint=False)
    params = list(block.parameters())
    block.fails = True
    with pytest.raises(kind):
        block(seeded(0, 3, 5))
    block.fails = False
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())
    assert all(a is b for a, b in zip(block.parameters(), params, strict=True))


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear(x)
        raise KeyboardInterrupt


@pytest.mark.ranks(2)
@every_level
def test_state_dicts_after_a_forward_was_interrupted(ctx, level):
    with own_memory():  # where ranks share memory, what was unsharded is the sharded parameters' memory
        model = Block(Interrupted(), zero_level=level)
        params = list(model.parameters())
        with pytest.raises(KeyboardInterrupt):
            model(seeded(0, 3, 5))
        saved = model.state_dict()
        assert saved["linear.weight"].untyped_storage() is not saved["linear.bias"].untyped_storage()
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        with pytest.raises(KeyboardInterrupt):
            model(seeded(0, 3, 5))
        state = {"linear.weight": seeded(1, 5, 5), "linear.bias": seeded(2, 5)}
        model.load_state_dict(state)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.full_tensor(), state[name])


@pytest.mark.ranks(1, 2)
@every_level
@pytest.mark.parametrize("offload", [False, True])
def test_values_that_are_put_aside_come_back(ctx, level, offload):
    """As code for averages of weights does it: by ``.data``."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model = TransformerBlockList([Block(copy.deepcopy(each), zero_level=level, offload=offload) for each in plain])
    x = torch.ones(2, 5)
    results = []
    for each in (plain, model):
        each(x).sum().backward()
        each.zero_grad()
        kept = {name: (p.data, p.detach()) for name, p in each.named_parameters()}
        for p in each.parameters():
            p.data = torch.zeros_like(p.data)
        results.append([each(x).detach()])
        for name, p in each.named_parameters():
            assert torch.equal(*kept[name])
            p.data = kept[name][0]
        results[-1].append(each(x).detach())
        other = copy.deepcopy(each)
        with torch.no_grad():
            for q in other.parameters():
                q.mul_(2)
        for p, q in zip(each.parameters(), other.parameters()):
            p.data, q.data = q.data, p.data
        results[-1] += [each(x).detach(), other(x).detach()]
    assert results[0][0].abs().sum() == 0
    for output, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(output, wanted)


@pytest.mark.ranks(2)
@every_level
def test_values_that_parameters_get_after_they_were_read_are_kept(ctx, level):
    torch.manual_seed(0)
    model = TransformerBlockList([Block(nn.Linear(4, 4), zero_level=level) for _ in range(3)])
    model.state_dict()
    for p in model.parameters():
        p.data = torch.zeros_like(p.data)
    with torch.no_grad():
        assert not model(torch.ones(1, 4)).any()
        model = TransformerBlockList([Block(nn.Linear(4, 4), zero_level=level) for _ in range(3)])
        model.state_dict()
        assert model.double()(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning")
@pytest.mark.parametrize("kind", ["expanded", "coo", "csr", "quantized"])
def test_buffers_of_any_layout_are_those_of_the_first_rank(ctx, kind):
    values = torch.eye(3) * (1 + ctx.rank)
    buffer = {
        "expanded": lambda: values[0].expand(4, -1),
        "coo": values.to_sparse,
        "csr": values.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(values, 0.5, 0, torch.qint8),
    }[kind]()
    model = nn.Linear(3, 3)
    model.register_buffer("adjacency", buffer, persistent=False)
    block = Block(model)
    block(torch.ones(2, 3)).sum().backward()
    dense = block.adjacency.dequantize() if kind == "quantized" else block.adjacency.to_dense()
    assert block.adjacency.layout == buffer.layout
    assert torch.equal(dense, torch.eye(3)[0].expand(4, -1) if kind == "expanded" else torch.eye(3))


@pytest.mark.ranks(1, 2)
@every_level
def test_a_move_that_changes_nothing_leaves_parameters_where_they_are(ctx, level):
    block = Block(nn.Linear(5, 5), zero_level=level)
    block(torch.ones(2, 5)).sum().backward()
    places = [p.data_ptr() for p in block.parameters()]
    kept = [p.detach() for p in block.parameters()]
    block.float().to(ctx.device)
    for p in block.parameters():
        p.data = p.data.contiguous()
    assert [p.data_ptr() for p in block.parameters()] == places
    with torch.no_grad():
        for p in block.parameters():
            p.add_(1)
    assert all(torch.equal(a, b.detach()) for a, b in zip(kept, block.parameters()))


@pytest.mark.ranks(1)
def test_the_results_of_data_and_detach_are_saved_as_any_tensor(ctx, tmp_path):
    block = Block(nn.Linear(5, 5))
    for name, read in (("data", lambda p: p.data), ("detach", lambda p: p.detach())):
        torch.save({key: read(p) for key, p in block.named_parameters()}, tmp_path / f"{name}.pt")
        other = Block(nn.Linear(5, 5))
        load(other, tmp_path / f"{name}.pt")
        assert torch.equal(other.weight.detach(), block.weight.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["shard", "Block"])
def test_equal_layers_in_another_order_on_one_rank(ctx, how):
    make = shard if how == "shard" else Block
    layers = [make(nn.Linear(4, 4)) for _ in range(3)]
    x = torch.ones(2, 4)
    for layer in layers:
        x = layer(x)
    x.sum().backward()
    x = torch.ones(2, 4)
    for layer in layers[::-1] if ctx.rank else layers:
        x = layer(x)
    with pytest.raises(RuntimeError, match=r"Linear, number 0, .* on rank 0 and .* Linear, number 2, .* on rank 1"):
        x.sum().backward()
