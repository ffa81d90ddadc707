"""Gathered optimizer states of BMTrain 1.0 with tensor parallelism, cut here as it cuts its flat buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bmtrain as bmt
from bmt_comm import local_tensor, select_rows

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
KEYS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "_param_fp32": "master"}
WIDTH, TP = 6, 2


class Layer(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = bmt.nn.ColumnParallelLinear(WIDTH, 150, dtype=dtype)
        self.scale = bmt.DistributedParameter(torch.randn(WIDTH, dtype=dtype))
        self.down = bmt.nn.RowParallelLinear(150, WIDTH, dtype=dtype)


class Model(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype, stages: int) -> None:
        super().__init__()
        kind, mode = (bmt.TransformerBlockList, "BLOCK") if stages == 1 else (bmt.PipelineTransformerBlockList, "PIPE")
        self.emb = bmt.nn.VPEmbedding(10, WIDTH, dtype=dtype)
        self.layers = kind([bmt.Block(Layer(dtype), mode=mode) for _ in range(3)])
        self.head = bmt.Block(bmt.nn.ColumnParallelLinear(WIDTH, 4, dtype=dtype))


def shard(name: str, whole: Tensor, tp: int) -> Tensor:
    """What a tensor-parallel rank has, flat; of a bias of RowParallelLinear a copy."""
    if name.endswith(("scale", "down.bias")):
        return whole.flatten()
    return whole.chunk(TP, 1 if name.endswith("down.weight") else 0)[tp].flatten()


def cut(block: dict[str, Tensor], name: str, parts: int, part: int, aligned: int) -> Tensor:
    """The elements of a tensor in one part of a buffer, in which all of a Block lie one after the other."""
    start = total = 0
    for other, values in block.items():
        start = total if other == name else start
        total = -(-(total + len(values)) // aligned) * aligned
    each = -(-total // parts)
    low, high = (min(max(bound - start, 0), len(block[name])) for bound in (each * part, each * (part + 1)))
    return block[name][low:high]


def of_rank(wholes: dict[str, Tensor], name: str, rank: int, world: int, stages: int, aligned: int) -> Tensor:
    tp, parallel = rank % TP, not name.endswith("scale")
    here, ranks = rank, world
    if name.startswith("layers") and stages > 1:
        ranks = world // stages
        here = rank % ranks
        if rank // ranks != (0 if name[7] in "01" else 1):
            return wholes[name].flatten()[:0]
    parts, part = (ranks // TP, here // TP) if parallel else (ranks, here)
    if name.startswith("emb"):
        return cut({name: shard(name, wholes[name], tp)}, name, parts, part, 1)
    prefix = name.rsplit(".", 2)[0] if name.startswith("layers") and parallel else name.rpartition(".")[0]
    block = {
        other: shard(other, whole, tp)
        for other, whole in wholes.items()
        if other.startswith(prefix + ".") and other.endswith("scale") != parallel
    }
    return cut(block, name, parts, part, aligned)


@pytest.mark.ranks(2, 4, tp_size=TP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_states_of_tensor_parallel_ranks(ctx: Any, dtype: torch.dtype) -> None:
    check(ctx, dtype)


@pytest.mark.ranks(4, tp_size=TP, pipe_size=2)
def test_gathered_states_of_tensor_parallel_ranks_in_a_pipeline(ctx: Any) -> None:
    check(ctx, torch.float32)


def check(ctx: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model(dtype, ctx.pipe_size)
    bmt.init_parameters(model)
    generator = torch.Generator().manual_seed(1)
    wholes = {
        name: {
            "exp_avg": torch.randn(value.shape, generator=generator),
            "exp_avg_sq": torch.rand(value.shape, generator=generator),
            "_param_fp32": value.cpu().float() * (1 + torch.finfo(dtype).eps / 5),
        }
        for name, value in model.state_dict().items()
    }
    aligned = 512 // dtype.itemsize
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(wholes):
        state[index] = {"step": 6}
        for key in KEYS:
            values = {other: entry[key] for other, entry in wholes.items()}
            ranks = [of_rank(values, name, r, ctx.world_size, ctx.pipe_size, aligned) for r in range(ctx.world_size)]
            state[index][key] = torch.cat(ranks)
    saved = {"state": state, "param_groups": [{**OPTIONS, "params": list(state)}], "is_whole": True}
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved)
    for name, param in model.named_parameters():
        found, where = optimizer.state[param], param.bmt_slice
        assert float(found["step"]) == 6
        for key, own in KEYS.items():
            if own not in found:
                assert (own, dtype) == ("master", torch.float32)
                continue
            whole = wholes[name][key]
            if where.tp_dim is not None:
                whole = whole.narrow(where.tp_dim, where.tp_offset, where.tp_extent).contiguous()
            assert torch.equal(found[own].cpu().view(-1), select_rows(whole, where).reshape(-1)), (name, key)
    with torch.no_grad():
        for param in model.layers[2].parameters():
            local_tensor(param).add_(ctx.tp_rank)
    with pytest.raises(ValueError, match=r"is split over tensor-parallel ranks.*load the model's checkpoint"):
        optimizer.load_state_dict(saved)
