"""Compression: parameters and gradients that are communicated as 8-bit numbers."""

from __future__ import annotations

import pytest
import torch
from block_helpers import seeded
from torch import Tensor, nn

from bmt_comm import Communicator
from bmt_zero import Block, Compression, MixedPrecision, fully_shard, no_sync

BLOCK = 8
HALF_STEP = {"int8": 1 / 254, "float8": 1 / 27}  # of the largest number of a block


def rounded(values: Tensor, kind: str, block: int = BLOCK) -> Tensor:
    """The reference: each number to the nearest of its block, one block after the other."""
    parts = []
    for part in values.float().split(block):
        largest = part.abs().max()
        scale = largest / (127.0 if kind == "int8" else 448.0)
        scaled = part * (1.0 / scale if largest else torch.zeros(()))
        parts.append((scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale)
    return torch.cat(parts)


class Linear(nn.Module):
    """The gradient of its weight is its input. Its second output is the unsharded weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(5, 37, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.weight * x).sum(), self.weight.detach().clone()


def shards(flat: Tensor, size: int) -> list[Tensor]:
    rows = -(-37 // size)
    return list(torch.cat([flat.reshape(37, 3), torch.zeros(rows * size - 37, 3)]).flatten().chunk(size))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_weights_and_gradients_are_rounded_once_and_summed_in_fp32(ctx, kind):
    for level in (1, 2, 3):
        check_level(ctx, level, kind)


def check_level(ctx, level: int, kind: str) -> None:
    plain = seeded(5, 37, 3)
    block = Block(Linear(), False, level, precision=MixedPrecision(compression=Compression(kind, kind, BLOCK)))
    weights = torch.cat([rounded(shard, kind) for shard in shards(plain, ctx.world_size)])[: plain.numel()]
    assert (weights - plain.flatten()).abs().max() <= HALF_STEP[kind] * plain.abs().max()
    before = {name: each.bytes for name, each in ctx.zero.traffic.items()}
    grads = [seeded(10 + rank, 37, 3) * 10.0**rank for rank in range(ctx.world_size)]
    expected = None
    for step in range(2):
        loss, used = block(grads[ctx.rank] * (step + 1))
        assert torch.equal(used.flatten(), weights)
        loss.backward()
        [param] = block.parameters()
        own = [shards(grad * (step + 1), ctx.world_size)[ctx.rank] for grad in grads]
        parts = [part if rank == ctx.rank else rounded(part, kind) for rank, part in enumerate(own)]
        total = sum(parts[1:], parts[0])
        expected = total if expected is None else expected + total
    rows = param.grad.to_local()
    assert rows.dtype == torch.float32
    assert torch.equal(rows.flatten(), expected[: rows.numel()])
    numel = shards(plain, ctx.world_size)[0].numel()
    for name, times in (("send", 2), ("all_gather", 4 if level == 3 else 2)):
        sent = (ctx.zero.traffic[name].bytes - before.get(name, 0)) / (ctx.world_size - 1) / times
        assert numel <= sent <= numel + 4 * (numel / BLOCK + 1) + 64 < 4 * numel  # ranks compare their order, too
    assert torch.equal(block.state_dict()["weight"], plain)  # shards are never rounded


@pytest.mark.ranks(4)
def test_replicas_half_precision_and_accumulation(ctx):
    """Rows of a mesh are shard groups; the sum over replicas is of the sums of the shard groups."""
    rows = [Communicator(group) for group in _groups(ctx)]
    precision = MixedPrecision(torch.bfloat16, compression=Compression("float8", "int8", BLOCK))
    block = Block(Linear(), False, 2, precision=precision, shard_comm=rows[0], replicate_comm=rows[1])
    plain = seeded(5, 37, 3)
    weights = torch.cat([rounded(shard, "float8") for shard in shards(plain, 2)])[: plain.numel()]
    grads = [seeded(20 + rank, 37, 3).bfloat16() for rank in range(4)]
    with no_sync(block):
        loss, used = block(grads[ctx.rank])
        loss.backward()
    assert torch.equal(used.flatten(), weights.bfloat16())
    block(grads[ctx.rank])[0].backward()
    [param] = block.parameters()
    expected = torch.zeros(())
    for first in (0, 2):
        parts = [shards(grad.float(), 2)[ctx.rank % 2] for grad in grads[first : first + 2]]
        parts[1 - ctx.rank % 2] = rounded(parts[1 - ctx.rank % 2], "int8")
        expected = expected + parts[0] + parts[1]
    got = param.grad.to_local()
    torch.testing.assert_close(got.flatten(), 2 * expected[: got.numel()], rtol=1e-6, atol=1e-6)


def _groups(ctx) -> list[torch.distributed.ProcessGroup]:
    """This rank's of (0, 1), (2, 3), and of (0, 2), (1, 3)."""
    result = []
    for pairs in ([(0, 1), (2, 3)], [(0, 2), (1, 3)]):
        made = [torch.distributed.new_group(list(pair)) for pair in pairs]
        result.append(next(group for group, pair in zip(made, pairs, strict=True) if ctx.rank in pair))
    return result


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_overflow_of_one_rank_is_seen_by_all(ctx, kind):
    compression = Compression(kind, kind, BLOCK)
    for bad in (float("inf"), float("-inf"), float("nan")):
        block = fully_shard(Linear(), mp_policy=MixedPrecision(compression=compression))
        x = torch.ones(37, 3)
        if ctx.rank == 0:
            x[0, 0] = x[36, 2] = bad  # in the last block of another rank's shard, which is shorter
        block(x)[0].backward()
        [param] = block.parameters()
        grad = param.grad.to_local()
        assert grad.numel() - 2 * BLOCK <= grad.isfinite().sum() < grad.numel()


def test_what_is_no_compression_is_refused():
    for options in ({"parameters": "int4"}, {"gradients": "fp8"}, {"block": 0}, {"block": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Compression(**options)
    with pytest.raises(ValueError, match="compression"):
        MixedPrecision(compression="int4")


@pytest.mark.ranks(1)
def test_double_precision_is_refused():
    with pytest.raises(ValueError, match=r"compression is for fp32, bf16 and fp16, and 'weight' is torch.float64"):
        Block(Linear().double(), False, 3, precision=MixedPrecision(compression="int8"))
    with pytest.raises(ValueError, match=r"compression is for fp32, bf16 and fp16, and reduce_dtype is torch.float64"):
        Block(Linear(), False, 3, precision=MixedPrecision(reduce_dtype=torch.float64, compression="int8"))
    assert MixedPrecision(compression="float8").compression == Compression("float8", "float8")


@pytest.mark.ranks(1)
def test_level_0_is_refused_and_the_module_unchanged(ctx):
    module = Linear()
    with pytest.raises(ValueError, match="zero_level"):
        Block(module, False, 0, precision=MixedPrecision(compression="int8"))
    assert type(module.weight) is nn.Parameter
