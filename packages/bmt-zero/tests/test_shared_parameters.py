"""Unsharded parameters in memory that ranks share: every rank computes with the values of one step."""

from __future__ import annotations

import contextlib
import copy
import time

import pytest
import torch
from block_helpers import compare_updates, seeded
from torch import nn

import bmt_kernels
from bmt_comm import select_rows, slice_of
from bmt_zero import Block, BMTrainModelWrapper, MixedPrecision, TransformerBlockList, fully_shard, no_sync
from bmt_zero.shard import group_of

pytestmark = pytest.mark.skipif(
    not bmt_kernels.SharedMemoryExchange.available() or torch.cuda.is_available(),
    reason="ranks are on the CPU of Linux",
)
LATE = 0.1  # seconds


class Late(nn.Module):
    """A layer that computes late, in forward or backward, when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(7, 7), ""

    def forward(self, x):
        if self.when == "forward":
            time.sleep(LATE)
        y = torch.tanh(self.linear(x))
        if self.when == "backward" and y.requires_grad:
            y.register_hook(lambda _: time.sleep(LATE))
        return y


def layers(level, **options):
    torch.manual_seed(0)
    plain = nn.ModuleList(Late() for _ in range(3))
    blocks = [Block(layer, zero_level=level, **options) for layer in copy.deepcopy(plain)]
    return plain, TransformerBlockList(blocks)


class Model(nn.Module):
    """Layers and a parameter outside of them. It raises an error at a given place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.scale = nn.ModuleList(Late() for _ in range(3)), nn.Parameter(torch.ones(7))
        self.fails = ""

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.fails == f"layer {index}":
                raise ArithmeticError(self.fails)
        return x * self.scale


def run(modules, x):
    for module in modules:
        x = module(x)
    return x


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_all_ranks_have_one_buffer(ctx, level):
    _, blocks = layers(level)
    blocks(seeded(0, 3, 7))
    [flat] = group_of(blocks[0]).flats
    assert flat.is_shared
    assert flat.shard.untyped_storage().data_ptr() == flat.unsharded.untyped_storage().data_ptr()
    flat.shard.fill_(ctx.rank)
    ctx.zero.barrier()
    expected = torch.arange(ctx.world_size).repeat_interleave(flat.layout.shard_numel)
    assert torch.equal(flat.unsharded, expected.float())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_parameters_that_are_rounded_have_one_buffer_where_they_stay_unsharded(ctx, level):
    _, blocks = layers(level, precision=MixedPrecision(param_dtype=torch.bfloat16))
    blocks(seeded(0, 3, 7))
    [flat] = group_of(blocks[0]).flats
    assert flat.is_shared == (level < 3)
    assert flat.shard.dtype == torch.float32
    assert flat.shard.numel() == flat.layout.shard_numel


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_late_rank_computes_with_the_weights_of_its_step(ctx, level, checkpointing, when):
    plain, blocks = layers(level, use_checkpoint=checkpointing)
    optimizers = [torch.optim.SGD(modules.parameters(), lr=0.5) for modules in (plain, blocks)]
    start = [param.detach().clone() for param in plain.parameters()]
    for step in range(3):
        for layer in blocks:  # another rank is late in each step
            layer.when = when if ctx.rank == step % ctx.world_size else ""
        for rank in range(ctx.world_size):
            run(plain, seeded(10 * step + rank, 3, 7)).square().sum().backward()
        blocks(seeded(10 * step + ctx.rank, 3, 7)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare_updates(blocks, plain, start)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_late_forward_without_a_backward(ctx, level, grad):
    plain, blocks = layers(level)
    for step in range(3):
        for layer in blocks:
            layer.when = "forward" if ctx.rank == step % 2 else ""
        with torch.set_grad_enabled(grad):
            y = blocks(seeded(step, 3, 7))
        torch.testing.assert_close(y, run(plain, seeded(step, 3, 7)))
        for index, (param, expected) in enumerate(zip(blocks.parameters(), plain.parameters(), strict=True)):
            values = seeded(100 * step + index, *expected.shape)
            expected.data.copy_(values)
            param.data.copy_(select_rows(values, slice_of(param)))


@pytest.mark.ranks(2)
def test_a_late_copy_of_the_unsharded_parameters(ctx):
    torch.manual_seed(0)
    module = nn.Linear(7, 7)
    before = module.weight.detach().clone()
    fully_shard(module)
    module(seeded(0, 3, 7)).sum()
    group = group_of(module)
    views = group.views
    if ctx.rank == 1:
        group.views = lambda: time.sleep(LATE) or views()
    with torch.no_grad():
        module.unshard()
        weight = module.weight.clone()
        module.reshard()
        for param in module.parameters():
            param.data.zero_()
    assert torch.equal(weight, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_exception_on_one_rank_after_the_last_layer_was_unsharded(ctx, level):
    plain, blocks = layers(level)
    with torch.no_grad():
        for attempt in range(2):
            if ctx.rank == 1:
                handle = blocks[2].linear.register_forward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    blocks(seeded(attempt, 3, 7))
                handle.remove()
            else:
                blocks(seeded(attempt, 3, 7))
            torch.testing.assert_close(blocks(seeded(5, 3, 7)), run(plain, seeded(5, 3, 7)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("place", ["in the last layer", "after it", "in a Block alone"])
@pytest.mark.parametrize("grad", [False, True])
def test_after_an_exception_on_one_rank_the_others_end_their_forward(ctx, level, place, grad):
    plain = Model()
    model = copy.deepcopy(plain)
    if place == "in a Block alone":
        model.layers = TransformerBlockList([Block(layer, False, level) for layer in model.layers])
    BMTrainModelWrapper(model, zero_level=level, use_checkpoint=False)
    start = [param.detach().clone() for param in plain.parameters()]
    part = model.layers[2] if place == "in a Block alone" else model
    for attempt in range(2):
        part(seeded(attempt, 3, 7)).sum().backward()
        model.zero_grad()
        failed = torch.zeros(1)
        with contextlib.ExitStack() as stack, torch.set_grad_enabled(grad):
            if ctx.rank == 1:
                stack.enter_context(pytest.raises(ArithmeticError))
                fail = model.layers[2].linear.register_forward_hook(lambda *_: 1 / 0)
                stack.callback(fail.remove)
                if place == "after it":
                    fail.remove()
                    model.fails = "layer 2"
                failed += 1
            part(seeded(attempt, 3, 7))
        model.fails = ""
        ctx.world.all_reduce(failed)  # the script lets all ranks leave the batch out
        assert failed == 1
    for rank in range(ctx.world_size):
        plain(seeded(rank, 3, 7)).square().sum().backward()
    model(seeded(ctx.rank, 3, 7)).square().sum().backward()
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    compare_updates(model, plain, start)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_training_after_a_first_forward_in_inference_mode(ctx, level):
    plain, blocks = layers(level)
    start = [param.detach().clone() for param in plain.parameters()]
    with torch.inference_mode():
        torch.testing.assert_close(blocks(seeded(0, 3, 7)), run(plain, seeded(0, 3, 7)))
    for rank in range(2):
        run(plain, seeded(rank, 3, 7)).square().sum().backward()
    blocks(seeded(ctx.rank, 3, 7)).square().sum().backward()
    for modules in (plain, blocks):
        torch.optim.SGD(modules.parameters(), lr=0.1).step()
    compare_updates(blocks, plain, start)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_embedding_that_scales_its_rows_in_forward(ctx, level):
    plain = nn.Embedding(9, 7, max_norm=0.5)
    copied = copy.deepcopy(plain)
    if ctx.world_size > 1:
        with pytest.raises(ValueError, match=r"Embedding, has max_norm=0.5: its forward writes to its weight"):
            Block(copied, zero_level=level)
        return
    block = Block(copied, zero_level=level)
    numbers = torch.tensor([1, 3, 3, 8])
    torch.testing.assert_close(block(numbers), plain(numbers))
    torch.testing.assert_close(block.weight.detach(), plain.weight.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["data", "to and back", "to"])
def test_parameters_that_moved_where_one_rank_has_no_rows(ctx, way):
    plain = nn.Linear(64, 1, bias=False)
    block = Block(copy.deepcopy(plain), zero_level=3)
    block(seeded(0, 3, 64))
    if way == "data":
        for param in block.parameters():
            param.data = param.data.clone() * 2
        plain.weight.data *= 2
    elif way == "to and back":
        block.half(), block.float()
        plain.half(), plain.float()
    else:
        block.double(), plain.double()
    x = seeded(1, 3, 64).to(plain.weight.dtype)
    torch.testing.assert_close(block(x), plain(x))
    assert group_of(block).flats[0].is_shared


@pytest.mark.ranks(2)
def test_a_model_that_moves_to_another_dtype_and_a_copy(ctx):
    plain, blocks = layers(3)
    blocks(seeded(0, 3, 7))
    twin = copy.deepcopy(blocks)
    blocks.double(), plain.double()
    x = seeded(1, 3, 7)
    torch.testing.assert_close(blocks(x.double()), run(plain, x.double()))
    assert group_of(blocks[0]).flats[0].is_shared
    for param in blocks.parameters():
        param.data.zero_()
    torch.testing.assert_close(twin(x), run(plain.float(), x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16, torch.float32)])
def test_micro_batches_and_an_optimizer_whose_writes_are_not_counted(ctx, level, precision):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    model = Block(copy.deepcopy(plain), use_checkpoint=False, zero_level=level, precision=precision)
    start = [param.detach().clone() for param in plain.parameters()]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, fused=True) for module in (plain, model)]
    for step in range(3):
        for micro_batch in range(2):
            seeds = [10 * step + 5 * micro_batch + rank for rank in range(2)]
            for seed in seeds:
                plain(seeded(seed, 3, 7)).square().mean().backward()
            with no_sync(model) if micro_batch == 0 else contextlib.nullcontext():
                model(seeded(seeds[ctx.rank], 3, 7)).float().square().mean().backward()
        if ctx.rank == 1:
            time.sleep(LATE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare_updates(model, plain, start, 1e-5 if precision is None else 0.05)
