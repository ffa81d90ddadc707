"""State dicts of torch's optimizers and ``torch.distributed.checkpoint`` on sharded parameters, as on plain ones."""

from __future__ import annotations

import copy
import functools
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from block_helpers import rows_of, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn import functional as F

from bmt_comm import Communicator, all_gather, current_context
from bmt_zero import Block, Checkpointer, DistributedModule, DistributedParameter, TransformerBlockList, fully_shard

LAYOUTS = [0, 1, 2, 3, "hybrid", "fully_shard"]
adamw = functools.partial(torch.optim.AdamW, lr=0.01)


class Layer(nn.Module):
    """Ragged sizes and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.down = nn.Linear(7, 5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Columns(DistributedModule):
    """A linear layer whose columns are divided over the tensor-parallel ranks."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        tp = current_context().tp
        rows = plain.weight.detach().chunk(tp.size)[tp.rank].clone()
        self.weight = DistributedParameter(rows, tp_mode=True, tp_split_dim=0)
        self.bias = nn.Parameter(plain.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        tp = current_context().tp
        # Every rank computes the same loss, and the gradient is that of the sum of the losses.
        weight = (self.weight + (tp.size - 1) * self.weight.detach()) / tp.size
        return F.linear(x, all_gather(weight.contiguous(), tp).reshape(-1, x.shape[1]), self.bias)


def make(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Layer(), Layer())


@functools.cache
def hybrid_groups() -> dict[str, Communicator]:
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    return {
        name: next(Communicator(groups[ranks]) for ranks in choices if rank in ranks)
        for name, choices in [("shard_comm", [(0, 1), (2, 3)]), ("replicate_comm", [(0, 2), (1, 3)])]
    }


def sharded(layout: object, seed: int = 3) -> nn.Module:
    plain = make(seed)
    if layout == "fully_shard":
        for layer in plain:
            fully_shard(layer)
        return fully_shard(plain)
    hybrid_groups.cache_clear()
    options = hybrid_groups() if layout == "hybrid" else {"zero_level": layout}
    return TransformerBlockList([Block(layer, **options) for layer in plain])


def run(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, steps: range) -> None:
    """Train on a batch of four; a model that is not sharded sees all of it, and one of fully_shard takes the mean."""
    for step in steps:
        optimizer.zero_grad()
        batch = seeded(step, 4, 5)
        if ranks:
            batch = batch.chunk(ranks)[current_context().data_rank]
        loss = model(batch).square().sum() / 4
        (loss * ranks if type(model).__name__.startswith("FSDP") else loss).backward()
        optimizer.step()


def assert_equal(actual: object, expected: object, path: str = "") -> None:
    """Equal in structure, names and values."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), path
        assert sorted(map(str, actual)) == sorted(map(str, expected)), path
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):  # torch makes lists of tuples when it broadcasts
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_equal(actual[index], value, f"{path}[{index}]")
    elif isinstance(expected, Tensor):
        assert type(actual) is Tensor, path
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4, msg=lambda text: f"{path}: {text}")
    else:
        assert actual == expected, path


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_models(ctx, layout):
    if layout == "hybrid" and ctx.world_size < 4:
        layout = 3
    model, expected = sharded(layout), make().state_dict()
    assert_equal(get_model_state_dict(model), dict(expected))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert_equal(full, dict(expected) if ctx.rank == 0 else {})
    for number, options in enumerate(
        [
            StateDictOptions(),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ]
    ):
        other = make(10 + number).state_dict()
        given = {} if options.broadcast_from_rank0 and ctx.rank else copy.deepcopy(dict(other))
        set_model_state_dict(model, given, options=options)
        assert_equal(dict(model.state_dict()), dict(other))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flat", [False, True])
def test_of_optimizers(ctx, layout, flat):
    """The state is the plain one; a new model and optimizer go on with it as the plain ones do."""
    if layout == "hybrid" and ctx.world_size < 4:
        layout = 3
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    plain, model = make(), sharded(layout)
    plain_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    run(plain, plain_optimizer, 0, range(3))
    run(model, optimizer, ctx.world_size, range(3))
    expected = get_optimizer_state_dict(plain, plain_optimizer, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert_equal(state, expected)
    other = sharded(layout, seed=9)
    other_optimizer = adamw(other.parameters())
    set_model_state_dict(other, get_model_state_dict(model))
    set_optimizer_state_dict(other, other_optimizer, state, options=options)
    run(plain, plain_optimizer, 0, range(3, 6))
    run(other, other_optimizer, ctx.world_size, range(3, 6))
    assert_equal(get_optimizer_state_dict(other, other_optimizer), get_optimizer_state_dict(plain, plain_optimizer))
    assert_equal(get_model_state_dict(other), get_model_state_dict(plain))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", [1, 3, "hybrid", "fully_shard"])
def test_of_optimizers_from_rank_0(ctx, layout):
    plain, model = make(), sharded(layout)
    plain_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    run(plain, plain_optimizer, 0, range(3))
    run(model, optimizer, 4, range(3))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(model, optimizer, options=full)
    expected = get_state_dict(plain, plain_optimizer, options=full)
    assert_equal(list(state), list(expected) if ctx.rank == 0 else [{}, {}])
    other = sharded(layout, seed=9)
    other_optimizer = adamw(other.parameters())
    rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state[0], options=rank_0)
    set_optimizer_state_dict(other, other_optimizer, state[1], options=rank_0)
    assert_equal(list(get_state_dict(other, other_optimizer, options=full)), list(state))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [1, 3])
def test_of_an_optimizer_with_the_state_of_a_checkpoint_before_its_first_step(ctx, tmp_path, layout):
    model = sharded(layout)
    optimizer = adamw(model.parameters())
    run(model, optimizer, 2, range(2))
    expected = copy.deepcopy(optimizer.state_dict())
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(2, model=model, optimizer=optimizer)
    other = sharded(layout, seed=9)
    loaded = adamw(other.parameters())
    checkpointer.load(2, model=other, optimizer=loaded)
    assert_equal(loaded.state_dict(), expected)
    # And a state dict that was loaded before the first step goes into a checkpoint, and is replaced from one.
    loaded = adamw(other.parameters())
    loaded.load_state_dict(expected)
    checkpointer.save(3, model=other, optimizer=loaded)
    checkpointer.load(3, model=other, optimizer=loaded)
    run(model, optimizer, 2, range(2, 4))
    run(other, loaded, 2, range(2, 4))
    assert_equal(loaded.state_dict(), optimizer.state_dict())
    assert_equal(other.state_dict(), model.state_dict())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_torch(ctx, tmp_path, layout):
    """What one layout saves, another and the plain model load."""
    model = sharded(layout)
    optimizer = adamw(model.parameters())
    run(model, optimizer, 4, range(3))
    dcp.save(_state(model, optimizer), checkpoint_id=tmp_path)
    plain = make()
    plain_optimizer = adamw(plain.parameters())
    run(plain, plain_optimizer, 0, range(3))
    for target in (sharded(3, seed=9), sharded("hybrid", seed=9), make(9)):
        target_optimizer = adamw(target.parameters())
        state = _state(target, target_optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(target, target_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_equal(_state(target, target_optimizer), _state(plain, plain_optimizer))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=False)
        ),
    }


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_of_tensor_parallel_parameters(ctx, level, tmp_path):
    class Pair(nn.Module):
        def __init__(self, seed: int, divide: bool) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.up = nn.Linear(5, 8)
            self.down = nn.Linear(8, 6)
            if divide:
                self.up, self.down = Columns(self.up), Columns(self.down)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    plain, model = Pair(3, False), Block(Pair(3, True), zero_level=level)
    plain_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(3):
        batch = seeded(step, 4, 5)
        for each, own, x in ((plain, plain_optimizer, batch), (model, optimizer, batch.chunk(2)[ctx.data_rank])):
            own.zero_grad()
            each(x).square().sum().backward()
            own.step()
    assert_equal(get_model_state_dict(model), get_model_state_dict(plain))
    expected = get_optimizer_state_dict(plain, plain_optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    assert_equal(state, expected)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    other = Block(Pair(9, True), zero_level=level)
    other_optimizer = adamw(other.parameters())
    state = {"optimizer": get_optimizer_state_dict(other, other_optimizer)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, other_optimizer, state["optimizer"])
    assert_equal(get_optimizer_state_dict(other, other_optimizer), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_loads_the_state_of_a_plain_one(ctx, level, stepped):
    plain, model = make(), sharded(level)
    plain_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    run(plain, plain_optimizer, 0, range(3))
    if stepped:
        run(model, optimizer, 2, range(1))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    run(plain, plain_optimizer, 0, range(3, 6))
    run(model, optimizer, 2, range(3, 6))
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))
    assert_equal(optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"])
    for name, param in model.named_parameters():
        own = optimizer.state[param]["exp_avg"]
        torch.testing.assert_close(own, rows_of(plain_optimizer.state[plain.get_parameter(name)]["exp_avg"], param))


@pytest.mark.ranks(2)
def test_a_state_of_another_shape_is_refused(ctx):
    model = sharded(3)
    optimizer = adamw(model.parameters())
    run(model, optimizer, 2, range(1))
    param = model.get_parameter("0.up.weight")
    optimizer.state[param]["statistics"] = torch.zeros(3)
    with pytest.raises(TypeError, match=r"'statistics' .* has shape \(3,\)"):
        optimizer.state_dict()


class KeepsAll(torch.optim.AdamW):
    """Its copies have its hooks."""

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__.copy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, KeepsAll])
def test_a_deep_copy_of_a_model_and_its_optimizer(ctx, level, kind):
    """Before the copy has stepped, and after."""
    model = Block(make(), use_checkpoint=False, zero_level=level)
    optimizer = kind(model.parameters(), lr=0.01)
    run(model, optimizer, ctx.world_size, range(2))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert_equal(twin_optimizer.state_dict(), optimizer.state_dict())
    assert twin_optimizer.param_groups[0]["params"][0] is next(twin.parameters())
    again = copy.deepcopy((twin, twin_optimizer))
    for each in ((model, optimizer), (twin, twin_optimizer), again):
        run(*each, ctx.world_size, range(2, 4))
    assert_equal(twin_optimizer.state_dict(), optimizer.state_dict())
    assert_equal(again[1].state_dict(), optimizer.state_dict())
    reference = weakref.ref(twin_optimizer)
    del twin_optimizer, each
    assert reference() is None  # it is no part of a cycle
