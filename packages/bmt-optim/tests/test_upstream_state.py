"""State dicts of BMTrain 1.0's Adam: flat tensors, of all ranks together or of each rank; written here by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmt_comm
from bmt_comm import SLICE_ATTRIBUTE, Slice
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager

SHAPES = [(5, 3), (7,), (4, 2)]
OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


def full_state() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
            "_param_fp32": torch.randn(shape, generator=generator),
        }
        for shape in SHAPES
    ]


def rows_of(rank: int, size: int, shape: tuple[int, ...]) -> slice:
    per_rank = -(-shape[0] // size)
    return slice(min(rank * per_rank, shape[0]), min((rank + 1) * per_rank, shape[0]))


def sharded_params(ctx: Any, dtype: torch.dtype) -> list[Tensor]:
    """Cut between rows, which BMTrain does not do."""
    params = []
    for entry in full_state():
        full = entry["_param_fp32"].to(dtype)
        rows = rows_of(ctx.rank, ctx.world_size, full.shape)
        param = nn.Parameter(full[rows].clone())
        setattr(param, SLICE_ATTRIBUTE, Slice(tuple(full.shape), rows.start, rows.stop, ctx.world))
        params.append(param)
    return params


def groups() -> list[dict[str, Any]]:
    return [{**OPTIONS, "params": [0, 1]}, {**OPTIONS, "lr": 0.5, "params": [2]}]


def gathered_dict() -> dict[str, Any]:
    state = {i: {"step": 6, **{k: v.flatten() for k, v in entry.items()}} for i, entry in enumerate(full_state())}
    return {"state": state, "param_groups": groups(), "is_whole": True}


def dict_of_rank(rank: int, size: int) -> dict[str, Any]:
    """Sharded anywhere; a rank without elements has no entry."""
    state: dict[int, dict[str, Any]] = {}
    for i, entry in enumerate(full_state()):
        by_rank = {
            k: v.flatten().tensor_split([n * v.numel() // (size + 1) + 1 for n in range(1, size)])
            for k, v in entry.items()
        }
        mine = {k: by_rank[k][rank].clone() for k in by_rank}
        if i != 1 or size == 1:
            state[i] = {"step": 6, **mine}
        elif rank == size - 1:  # all of the second parameter is on the last rank
            state[i] = {"step": 6, **{k: v.flatten() for k, v in entry.items()}}
    return {"state": state, "param_groups": groups(), "is_whole": False}


def build(ctx: Any, kind: type, dtype: torch.dtype) -> tuple[list[Tensor], Any]:
    params = sharded_params(ctx, dtype)
    return params, kind([{"params": params[:2]}, {"params": params[2:]}], lr=1e-3, hold_steps=2)


def check_loaded(ctx: Any, optimizer: Any, params: list[Tensor]) -> None:
    for param, entry in zip(params, full_state()):
        rows = rows_of(ctx.rank, ctx.world_size, entry["exp_avg"].shape)
        state = optimizer.state[param]
        assert float(state["step"]) == 6
        assert torch.equal(state["exp_avg"], entry["exp_avg"][rows])
        assert torch.equal(state["exp_avg_sq"], entry["exp_avg_sq"][rows])
        assert ("master" in state) == (param.dtype != torch.float32)
        if "master" in state:
            assert torch.equal(state["master"], entry["_param_fp32"][rows])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.5]
    assert [group["hold_steps"] for group in optimizer.param_groups] == [2, 2]  # which theirs does not save


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathered", [False, True])
def test_states_are_loaded(ctx: Any, kind: type, dtype: torch.dtype, gathered: bool) -> None:
    params, optimizer = build(ctx, kind, dtype)
    optimizer.load_state_dict(gathered_dict() if gathered else dict_of_rank(ctx.rank, ctx.world_size))
    check_loaded(ctx, optimizer, params)


@pytest.mark.ranks(2)
def test_training_goes_on_as_in_plain_pytorch(ctx: Any) -> None:
    params, optimizer = build(ctx, AdamOptimizer, torch.float32)
    optimizer.load_state_dict(dict_of_rank(ctx.rank, 2))
    for group in optimizer.param_groups:
        group["hold_steps"] = 0
    plain = [nn.Parameter(entry["_param_fp32"].clone()) for entry in full_state()]
    reference = torch.optim.AdamW([{"params": plain[:2]}, {"params": plain[2:], "lr": 0.5}], **OPTIONS)
    for param, entry in zip(plain, full_state()):
        moments = {key: entry[key].clone() for key in ("exp_avg", "exp_avg_sq")}
        reference.state[param] = {"step": torch.tensor(6.0), **moments}
    before = [param.detach().clone() for param in plain]
    for step in range(10):
        for i, (param, other) in enumerate(zip(params, plain)):
            other.grad = torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(10 * step + i))
            param.grad = other.grad[rows_of(ctx.rank, 2, SHAPES[i])].clone()
        optimizer.step()
        reference.step()
    for i, (param, other) in enumerate(zip(params, plain)):
        rows = rows_of(ctx.rank, 2, SHAPES[i])
        mine, wanted = param.detach() - before[i][rows], other.detach()[rows] - before[i][rows]
        assert (mine - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.ranks(2)
def test_moments_that_are_multiplied_by_the_loss_scale_need_the_manager(ctx: Any) -> None:
    def scaled() -> dict[str, Any]:
        saved = dict_of_rank(ctx.rank, 2)
        for entry in saved["state"].values():
            entry["exp_avg"] = (entry["exp_avg"] * 8).half()
            entry["exp_avg_sq"] = entry["exp_avg_sq"] * 8
        return saved

    params, optimizer = build(ctx, AdamOptimizer, torch.float16)
    with pytest.raises(ValueError, match=r"multiplied by the loss scale, .* of its OptimManager instead"):
        optimizer.load_state_dict(scaled())
    manager = OptimManager(loss_scale=2)
    scheduler = bmt_scheduler(optimizer)
    manager.add_optimizer(optimizer, scheduler)
    rates = {"start_lr": 0.02, "warmup_iter": 2, "end_iter": 50, "num_iter": 9}
    saved = {"optimizers": [scaled()], "lr_schedulers": [rates], "loss_scale": 8, "loss_scale_enabled": True}
    manager.load_state_dict(saved)
    assert (manager.loss_scale, scheduler.num_iter) == (8, 9)
    for param, entry in zip(params, full_state()):
        rows = rows_of(ctx.rank, 2, entry["exp_avg"].shape)
        assert torch.allclose(optimizer.state[param]["exp_avg"], entry["exp_avg"][rows], rtol=1e-3, atol=1e-4)
        assert torch.allclose(optimizer.state[param]["exp_avg_sq"], entry["exp_avg_sq"][rows])


def bmt_scheduler(optimizer: Any) -> Any:
    from bmt_optim.lr_scheduler import Linear

    return Linear(optimizer, start_lr=0.02, warmup_iter=2, end_iter=50)


@pytest.mark.ranks(4, tp_size=2)
def test_tensor_parallel_shards_are_of_the_ranks_with_the_same_index(ctx: Any) -> None:
    full = torch.arange(24.0).view(4, 6)
    tp_shard = full[:, 3 * ctx.tp_rank : 3 * ctx.tp_rank + 3].contiguous()
    rows = slice(2 * ctx.data_rank, 2 * ctx.data_rank + 2)
    param = nn.Parameter(tp_shard[rows].clone())
    setattr(param, SLICE_ATTRIBUTE, Slice((4, 6), rows.start, rows.stop, ctx.tp_zero, 1, 3 * ctx.tp_rank, 3, ctx.tp))
    optimizer = AdamOptimizer([param])
    mine = tp_shard.flatten()[:7] if ctx.data_rank == 0 else tp_shard.flatten()[7:]
    entry = {"step": 1, "exp_avg": mine, "exp_avg_sq": mine}
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": [{**OPTIONS, "params": [0]}]})
    assert torch.equal(optimizer.state[param]["exp_avg"], tp_shard[rows])
    gathered = {"step": 1, "exp_avg": full.flatten(), "exp_avg_sq": full.flatten()}
    with pytest.raises(ValueError, match=r"parameter 0 is split over tensor-parallel ranks.*gather=False"):
        optimizer.load_state_dict(
            {"state": {0: gathered}, "param_groups": [{**OPTIONS, "params": [0]}], "is_whole": True}
        )


@pytest.mark.ranks(2)
def test_what_does_not_fit_raises_on_every_rank_and_changes_nothing(ctx: Any) -> None:
    params, optimizer = build(ctx, AdamOptimizer, torch.float32)
    optimizer.load_state_dict(gathered_dict())
    short = dict_of_rank(ctx.rank, 2)
    short["state"][0]["exp_avg"] = short["state"][0]["exp_avg"][: 1 + ctx.rank]
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has \[1, 2\] elements on the ranks, .* of as many"):
        optimizer.load_state_dict(short)
    wrong = gathered_dict()
    wrong["state"][1]["exp_avg_sq"] = torch.ones(8)
    with pytest.raises(ValueError, match="exp_avg_sq of parameter 1 has 8 elements in the state dict, and the parame"):
        optimizer.load_state_dict(wrong)
    fewer = {**gathered_dict(), "param_groups": groups()[:1]}
    with pytest.raises(ValueError, match="the state dict has 2 parameters and the optimizer has 3"):
        optimizer.load_state_dict(fewer)
    check_loaded(ctx, optimizer, params)
    assert bmt_comm.is_initialized()
