"""Parameters, gradients and optimizer states in host memory: training is the same.

On a context of the CPU both are in host memory, but not in the same: the shard is copied to where the module computes,
and the reduced gradient back.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from block_helpers import assert_same_gradients, rows_of, seeded
from torch import Tensor, nn

import bmt_zero
from bmt_comm import Communicator, ParallelContext
from bmt_zero import Block, CPUOffloadPolicy, MixedPrecision, TransformerBlockList, flat_parameter, reduction
from bmt_zero.shard import group_of

WIDTH = 7


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(WIDTH, 2))


def sharded(**options: Any) -> nn.Sequential:
    model = build()
    for part in model:
        Block(part, **options)
    bmt_zero.block_list.link_blocks(model)
    return model


def batch(step: int, ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """That of all ranks, and this rank's part."""
    whole = seeded(step, 3 * ctx.world_size, WIDTH)
    return whole, whole.chunk(ctx.world_size)[ctx.rank]


def train(model: nn.Module, ctx: ParallelContext, steps: int = 5, max_norm: float | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        with bmt_zero.no_sync(model):
            model(batch(step, ctx)[1]).square().sum().backward()
        model(batch(step + 100, ctx)[1]).sum().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def train_plain(model: nn.Module, ctx: ParallelContext, steps: int = 5, max_norm: float | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        model(batch(step, ctx)[0]).square().sum().backward()
        model(batch(step + 100, ctx)[0]).sum().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def assert_same_updates(model: nn.Module, plain: nn.Module) -> None:
    start, end = dict(build().named_parameters()), dict(plain.named_parameters())
    for name, param in model.named_parameters():
        update = (end[name] - start[name]).detach()
        change = param.detach() - rows_of(start[name].detach(), param)
        assert (change - rows_of(update, param)).norm() <= 1e-5 * update.norm(), name


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_trains_as_the_plain_model_does(ctx: ParallelContext, level: int, use_checkpoint: bool) -> None:
    plain, model = build(), sharded(zero_level=level, use_checkpoint=use_checkpoint, offload=True)
    train_plain(plain, ctx, max_norm=1.0)
    train(model, ctx, max_norm=1.0)
    assert_same_updates(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "precision",
    [
        MixedPrecision(),
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecision(param_dtype=torch.bfloat16),
        MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16),
        MixedPrecision(compression="int8"),
    ],
    ids=str,
)
def test_has_the_bits_of_parameters_on_the_device(ctx: ParallelContext, level: int, precision: MixedPrecision) -> None:
    if precision.compression is not None:
        pytest.importorskip("bmt_kernels")
    if precision.compression is not None and level == 0:
        return
    models = [sharded(zero_level=level, precision=precision, offload=offload) for offload in (False, True)]
    for model in models:
        train(model, ctx)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.detach(), other.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_shard_is_apart_from_what_computes(ctx: ParallelContext, level: int) -> None:
    model = sharded(zero_level=level, offload=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0, ctx)[1]).sum().backward()
    optimizer.step()
    for part in model:
        for flat in group_of(part).flats:
            computing = flat.unsharded.untyped_storage()
            assert flat.shard.untyped_storage()._cdata != computing._cdata
            assert (computing.nbytes() == 0) == (level >= 2)
            for param in flat.params:
                assert param.grad is not None
                stored = [param.detach(), param.grad, *optimizer.state[param].values()]
                assert all(x.device.type == "cpu" for x in stored)
                assert param.detach().untyped_storage()._cdata == flat.shard.untyped_storage()._cdata
                assert param.grad.untyped_storage()._cdata != computing._cdata


@pytest.mark.ranks(4)
def test_hybrid_sharding(ctx: ParallelContext) -> None:
    pairs = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    node, replicas = pairs[ctx.rank // 2], pairs[2 + ctx.rank % 2]
    groups = {"shard_comm": Communicator(node, ctx.device), "replicate_comm": Communicator(replicas, ctx.device)}
    plain, model = build(), sharded(offload=True, **groups)
    train_plain(plain, ctx)
    train(model, ctx)
    assert_same_updates(model, plain)


class Event:
    """A CUDA event that notes in ``log`` when it is recorded and when the host waits for it."""

    def __init__(self, log: list[tuple[str, Event]]) -> None:
        self.log = log
        log.append(("recorded", self))

    def synchronize(self) -> None:
        self.log.append(("waited", self))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 3])
def test_the_host_waits_for_copies(ctx: ParallelContext, level: int) -> None:
    model = sharded(zero_level=level, use_checkpoint=False, offload=True)
    gradients: list[tuple[str, Event]] = []
    shards: list[tuple[str, Event]] = []
    with (
        mock.patch.object(reduction, "record_event", side_effect=lambda stream: Event(gradients)),
        mock.patch.object(flat_parameter, "record_event", side_effect=lambda stream: Event(shards)),
    ):
        model(batch(0, ctx)[1]).sum().backward()
        # Nobody reads the first gradients before the backward pass ends.
        assert [what for what, _ in gradients] == ["recorded"] * len(model) + ["waited"] * len(model)
        first = [event for _, event in gradients]
        assert set(first[: len(model)]) == set(first[len(model) :])
        gradients.clear()
        model(batch(1, ctx)[1]).sum().backward()
        # These are added to the others one by one.
        assert [what for what, _ in gradients] == ["recorded", "waited"] * len(model)
        assert [event for _, event in gradients[::2]] == [event for _, event in gradients[1::2]]
        shards.clear()
        with torch.no_grad():
            model(batch(2, ctx)[1])
    recorded = [event for what, event in shards if what == "recorded"]
    waited = [event for what, event in shards if what == "waited"]
    assert len(recorded) == len(model)
    assert waited == recorded


@pytest.mark.ranks(2)
def test_hooks_see_the_reduced_gradient(ctx: ParallelContext) -> None:
    plain, model = build(), sharded(offload=True)
    seen: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    whole, mine = batch(0, ctx)
    plain(whole).sum().backward()
    model(mine).sum().backward()
    assert_same_gradients(model, plain)
    for name, param in model.named_parameters():
        assert torch.equal(seen[name], param.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 3])
def test_state_dicts_checkpoints_and_copies(ctx: ParallelContext, level: int, tmp_path: Path) -> None:
    plain, model = build(), sharded(zero_level=level, offload=True)
    train_plain(plain, ctx, 2)
    train(model, ctx, 2)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for name, value in each.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[0].up.weight.full_tensor(), plain[0].up.weight.detach(), rtol=1e-5, atol=1e-6)
    bmt_zero.save(model, tmp_path / "model.pt")
    checkpointer = bmt_zero.Checkpointer(tmp_path / "run")
    checkpointer.save(1, model=model)
    checkpointer.wait()
    others = [sharded(zero_level=3, offload=offload) for offload in (True, False)]
    bmt_zero.load(others[0], tmp_path / "model.pt")
    checkpointer.load(1, model=others[1])
    third = sharded(zero_level=level, offload=True)
    bmt_zero.load_state_dict(third, model.state_dict())
    with torch.no_grad():
        for other in (*others, third, twin):
            torch.testing.assert_close(other(batch(0, ctx)[1]), plain(batch(0, ctx)[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 3])
def test_moving_the_model(ctx: ParallelContext, level: int) -> None:
    plain, model = build().double(), sharded(zero_level=level, offload=True)
    model.to(torch.float64)
    whole, mine = (x.double() for x in batch(0, ctx))
    plain(whole).sum().backward()
    model(mine).sum().backward()
    assert_same_gradients(model, plain)
    flat = group_of(model[0]).flats[0]
    flat.shard = flat.shard.to("meta")  # as if the parameters had been moved from there
    model.to(torch.float32)
    with pytest.raises(RuntimeError, match=r"offload=True, which keeps them on meta, and were moved to cpu.*'meta'"):
        model(mine.float())


@pytest.mark.ranks(2)
def test_a_model_on_the_meta_device(ctx: ParallelContext) -> None:
    with torch.device("meta"):
        model = TransformerBlockList(Block(nn.Linear(WIDTH, WIDTH), offload=True) for _ in range(2))
    bmt_zero.init_parameters(model)
    model(batch(0, ctx)[1]).sum().backward()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in model.parameters())


@pytest.mark.ranks(2)
def test_the_wrapper_and_fully_shard(ctx: ParallelContext) -> None:
    plain, wrapped = build(), bmt_zero.BMTrainModelWrapper(build(), offload=True)
    train_plain(plain, ctx)
    train(wrapped, ctx)
    assert_same_updates(wrapped, plain)
    assert all(p.handle.flat.offloads for p in wrapped.parameters())
    model = build()
    for layer in model:
        bmt_zero.fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    options = group_of(model[0]).options
    assert (options.offload, options.pin_memory) == (True, False)
    whole, mine = batch(0, ctx)
    plain = build()
    plain(whole).sum().div(ctx.world_size).backward()
    model(mine).sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("value", ["cpu", None, 1])
def test_other_values_are_refused(ctx: ParallelContext, value: Any) -> None:
    linear = nn.Linear(2, 2)
    for wrap in (bmt_zero.shard, Block, bmt_zero.BMTrainModelWrapper):
        with pytest.raises(ValueError, match=rf"offload={value!r} must be True .*or False"):
            wrap(linear, offload=value)
    assert type(linear.weight) is nn.Parameter
