"""A Block computes with the present weights and ends with the right gradients, whatever happened in between."""

from __future__ import annotations

import contextlib
import copy
import gc
from weakref import ref

import pytest
import torch
from block_helpers import (
    assert_same_gradients,
    assert_same_parameters,
    rows_of,
    seeded,
    space,
    total,
    write_data,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bmt_comm import local_rows
from bmt_zero import Block, TransformerBlockList, no_sync
from bmt_zero.hooks import Call
from bmt_zero.shard import group_of, sharding_of

every_level = pytest.mark.parametrize("level", [0, 1, 2, 3])


class Fails(nn.Module):
    """Raises in forward or backward when told so."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.when = None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.when == "forward":
            raise ArithmeticError("forward")
        if self.when == "backward":
            y.register_hook(self.fail)
        return self.linear(y)

    @staticmethod
    def fail(grad):
        raise ArithmeticError("backward")


def three(level, checkpointing=True):
    torch.manual_seed(2)
    plain = nn.ModuleList([Fails() for _ in range(3)])
    blocks = TransformerBlockList([Block(m, checkpointing, level) for m in copy.deepcopy(plain)])
    return plain, blocks


def run(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def step_and_compare(ctx, plain, blocks, seed=0):
    for module in (plain, blocks):
        module.zero_grad()
    expected = sum(run(plain, seeded(seed + rank, 3, 5)).square().mean() for rank in range(ctx.world_size))
    expected.backward()
    loss = blocks(seeded(seed + ctx.rank, 3, 5)).square().mean()
    assert total(loss) == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert_same_gradients(blocks, plain)


def change_weights(how, plain, blocks):
    if how == "optimizer":
        for module in (plain, blocks):
            for index, param in enumerate(module.parameters()):
                param.grad = None
                if module is plain:
                    param.grad = seeded(50 + index, *param.shape)
        for param, expected in zip(blocks.parameters(), plain.parameters(), strict=True):
            param.grad = rows_of(expected.grad, param).clone()
        for module in (plain, blocks):
            torch.optim.SGD(module.parameters(), lr=0.3).step()
    elif how == "load_state_dict":
        state = {name: seeded(70 + i, *v.shape) * 0.3 for i, (name, v) in enumerate(plain.state_dict().items())}
        plain.load_state_dict(state)
        blocks.load_state_dict(state)
    elif how == "data":
        write_data(blocks, plain, 90)


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("how", ["nothing", "optimizer", "load_state_dict", "data"])
def test_after_an_exception_in_forward(ctx, level, checkpointing, how):
    plain, blocks = three(level, checkpointing)
    for which in range(3):
        blocks[which].when = "forward"
        with pytest.raises(ArithmeticError, match="forward") as kept:  # and, with it, the frames and graphs
            blocks(seeded(1, 3, 5))
        blocks[which].when = None
        change_weights(how, plain, blocks)
        step_and_compare(ctx, plain, blocks, which)
        assert kept.value is not None
        if level >= 2:
            assert [space(b) for b in blocks] == [0, 0, 0]


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("how", ["nothing", "optimizer", "load_state_dict", "data"])
def test_after_an_exception_in_backward(ctx, level, checkpointing, how):
    plain, blocks = three(level, checkpointing)
    for which in (0, 1, 2):
        blocks[which].when = "backward"
        loss = blocks(seeded(1, 3, 5)).sum()
        with pytest.raises(ArithmeticError, match="backward"):
            loss.backward()
        blocks[which].when = None
        change_weights(how, plain, blocks)
        step_and_compare(ctx, plain, blocks, seed=which)


@pytest.mark.ranks(1, 2)
@every_level
def test_gradients_of_a_pipeline_pass_that_failed_are_dropped(ctx, level):
    plain, blocks = three(level)

    def failing_pass():
        with group_of(blocks[0]).step.nested():
            blocks(seeded(7, 3, 5)).sum().backward()  # ranks have not agreed on which parameters they use
            raise ArithmeticError("another micro-batch")

    with pytest.raises(ArithmeticError):
        failing_pass()
    step_and_compare(ctx, plain, blocks)


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("grad", [False, True])
def test_weights_written_between_forwards_without_backward(ctx, level, grad):
    plain, blocks = three(level)
    for seed in (90, 190):
        for graph in ([], [blocks]):  # also with the earlier forward's graph alive
            with torch.set_grad_enabled(grad):
                graph.append(blocks(seeded(1, 3, 5)))
                write_data(blocks, plain, seed + len(graph))
                torch.testing.assert_close(blocks(seeded(1, 3, 5)), run(plain, seeded(1, 3, 5)))


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("how", ["optimizer", "data"])
def test_leaving_a_list_early(ctx, level, how):
    plain, blocks = three(level)
    for module in (plain, blocks):
        scale = 2 if module is plain else 1
        (run(list(module)[:2], seeded(1, 3, 5)).square().sum() * scale).backward()
    assert_same_gradients(blocks, plain)
    if level >= 2:
        assert [space(b) for b in blocks] == [0, 0, 0]
    change_weights(how, plain, blocks)
    step_and_compare(ctx, plain, blocks)
    with torch.no_grad():
        run(list(blocks)[:1], seeded(1, 3, 5))
        write_data(blocks, plain, 5)
        torch.testing.assert_close(blocks(seeded(1, 3, 5)), run(plain, seeded(1, 3, 5)))


@pytest.mark.ranks(2)
@every_level
def test_running_blocks_out_of_order(ctx, level):
    plain, blocks = three(level)
    for order in [(2, 0, 1), (1, 1, 0), (0, 2)]:
        for module in (plain, blocks):
            module.zero_grad()
            scale = 2 if module is plain else 1
            layers = list(module)
            (run([layers[i] for i in order], seeded(1, 3, 5)).square().sum() * scale).backward()
        assert_same_gradients(blocks, plain)
        if level >= 2:
            assert [space(b) for b in blocks] == [0, 0, 0]


@pytest.mark.ranks(1, 2)
@every_level
def test_zero_grad_either_way(ctx, level):
    plain, blocks = three(level)
    for to_none in (True, False, True, False):
        for module in (plain, blocks):
            module.zero_grad(set_to_none=to_none)
            ranks = range(ctx.world_size) if module is plain else [ctx.rank]
            for rank in ranks:
                run(module, seeded(rank, 3, 5)).square().sum().backward()
        assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_gradients_set_to_none_give_their_memory_back_at_once(ctx, level):
    modules = nn.ModuleList(Block(nn.Linear(5, 5), False, level) for _ in range(2))
    for number in range(3):  # the first is accumulated
        x = seeded(number, 4, 5)
        for module in modules:
            x = module(x)
        with no_sync(modules) if number == 0 else contextlib.nullcontext():
            x.square().sum().backward()
    params = [param for module in modules for param in module.parameters() if param.grad is not None]
    storages = [StorageWeakRef(local_rows(param.grad).untyped_storage()) for param in params]
    assert len(storages) == 4
    assert not any(storage.expired() for storage in storages)
    torch.optim.SGD(params, lr=0.1).zero_grad(set_to_none=True)
    assert all(storage.expired() for storage in storages)


@pytest.mark.ranks(1, 2)
@every_level
def test_gradients_set_or_removed_by_the_user_are_added_to(ctx, level):
    plain, blocks = three(level)
    for change in ("set", "remove one"):
        for index, (param, expected) in enumerate(zip(blocks.parameters(), plain.parameters(), strict=True)):
            if change == "set":
                expected.grad = seeded(index, *expected.shape)
                param.grad = rows_of(expected.grad, param).clone()
            elif index == 1:
                param.grad = expected.grad = None
        for module in (plain, blocks):
            ranks = range(ctx.world_size) if module is plain else [ctx.rank]
            for rank in ranks:
                run(module, seeded(rank, 3, 5)).square().sum().backward()
        assert_same_gradients(blocks, plain)


@pytest.mark.ranks(1, 2)
@every_level
@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_gradients_forgets_those_not_reduced_yet(ctx, level, to_none):
    plain, blocks = three(level)
    with no_sync(blocks):
        blocks(seeded(8, 3, 5)).sum().backward()
    blocks.zero_grad(set_to_none=to_none)
    with no_sync(blocks):
        blocks(seeded(9 + ctx.rank, 3, 5)).square().mean().backward()
    blocks(seeded(ctx.rank, 3, 5)).square().mean().backward()
    for rank in range(ctx.world_size):
        (run(plain, seeded(rank, 3, 5)).square().mean() + run(plain, seeded(9 + rank, 3, 5)).square().mean()).backward()
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
def test_no_sync_adds_to_gradients_that_were_reduced_before(ctx, level):
    plain, blocks = three(level)
    for seed, unsynced in [(0, False), (10, True), (20, True), (30, False)]:
        with no_sync(blocks) if unsynced else contextlib.nullcontext():
            blocks(seeded(seed + ctx.rank, 3, 5)).square().sum().backward()
        for rank in range(ctx.world_size):
            run(plain, seeded(seed + rank, 3, 5)).square().sum().backward()
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_nothing_of_a_forward_stays_behind(ctx, checkpointing, frozen, backward):
    block = Block(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), checkpointing, 3)
    for name, param in block.named_parameters():
        param.requires_grad_(not (frozen and name == "0.bias"))
    for _ in range(3):
        y = block(seeded(0, 3, 5).requires_grad_())
        if backward:
            y.sum().backward()
        del y
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, Call)]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [1, 3])
def test_a_model_that_is_deleted_while_gradients_wait_leaves_nothing(ctx, level):
    block = Block(nn.Linear(5, 5), zero_level=level)
    with no_sync(block):
        block(seeded(0, 3, 5)).sum().backward()
    reducers = [ref(reducer) for reducer in sharding_of(block).hooks.group.reducers]
    del block
    gc.collect()
    assert [reducer() for reducer in reducers] == [None] * len(reducers)


@pytest.mark.ranks(1, 2)
@every_level
def test_a_copy_trains_by_itself(ctx, level):
    plain, blocks = three(level)
    step_and_compare(ctx, plain, blocks)
    twin_plain, twin = copy.deepcopy(plain), copy.deepcopy(blocks)
    assert all(p.grad is None for p in twin.parameters())  # as plain copies
    ours = {id(p) for p in blocks.parameters()}
    assert not any(id(p) in ours for p in twin.parameters())
    hooks = [sharding_of(b).hooks for b in twin]
    assert [h.next for h in hooks] == [hooks[1], hooks[2], None]
    for model, reference, lr in [(blocks, plain, 0.1), (twin, twin_plain, 0.3)]:
        optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m in (model, reference)]
        for seed in range(3):
            step_and_compare(ctx, reference, model, seed)
            for optimizer in optimizers:
                optimizer.step()
    assert_same_parameters(blocks, plain)
    assert_same_parameters(twin, twin_plain)


@pytest.mark.ranks(2)
@every_level
def test_a_copy_of_one_block_leaves_its_neighbours_alone(ctx, level):
    plain, blocks = three(level)
    twin = copy.deepcopy(blocks[1])
    hooks = sharding_of(twin).hooks
    assert (hooks.next, hooks.previous) == (None, None)
    for module, ranks in [(plain[1], range(2)), (twin, [ctx.rank])]:
        for rank in ranks:
            module(seeded(rank, 3, 5)).square().sum().backward()
    assert_same_gradients(twin, plain[1])
    assert all(p.grad is None for p in blocks.parameters())
    assert len({p.handle.flat for p in twin.parameters()} & {p.handle.flat for p in blocks.parameters()}) == 0


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_converting_the_model_after_wrapping(ctx, level, dtype):
    plain, blocks = three(level)
    step_and_compare(ctx, plain, blocks)
    ids = [id(p) for p in blocks.parameters()]
    for module in (plain, blocks):
        module.to(dtype)
    assert [id(p) for p in blocks.parameters()] == ids
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, blocks)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        for rank in range(2):
            run(plain, seeded(10 * step + rank, 3, 5).to(dtype)).square().sum().backward()
        y = blocks(seeded(10 * step + ctx.rank, 3, 5).to(dtype))
        assert y.dtype == dtype
        y.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 5e-2
    for param, expected in zip(blocks.parameters(), plain.parameters(), strict=True):
        assert param.dtype == dtype
        torch.testing.assert_close(param.data, rows_of(expected.data, param), rtol=tolerance, atol=tolerance)


@pytest.mark.ranks(2)
def test_converting_some_parameters_of_a_block_is_refused(ctx):
    block = Block(nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)), zero_level=3)
    block.get_submodule("1").double()
    with pytest.raises(RuntimeError, match="different dtypes"):
        block(seeded(0, 3, 5))


@pytest.mark.ranks(2)
@every_level
def test_state_read_between_forward_and_backward(ctx, level):
    plain, blocks = three(level)
    for module, ranks in [(plain, range(2)), (blocks, [ctx.rank])]:
        for rank in ranks:
            loss = run(module, seeded(rank, 3, 5)).square().sum()
            state = module.state_dict()
            loss.backward()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
def test_padding_between_gradients_is_zero(ctx):
    block = Block(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7)), zero_level=3)
    for _ in range(2):
        block(seeded(0, 4, 5)).square().sum().backward()
    for flat in group_of(block).flats:
        grads = flat.params[0].grad.to_local().as_strided(flat.shard.shape, (1,), 0)
        covered = torch.zeros_like(grads, dtype=torch.bool)
        for view in flat.local_views(covered):
            view.fill_(True)
        assert not grads[~covered].any()
        assert not flat.shard[~covered].any()
