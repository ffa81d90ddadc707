"""Optimizers over the layers of a pipeline, of which each stage has its own, and what all stages have."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmt_zero
from bmt_comm import LAYER_ATTRIBUTE, slice_of
from bmt_optim import AdamOptimizer, OptimManager, save_optimizer
from bmt_optim.upstream_state import merge_ranks
from bmt_pipe import PipelineTransformerBlockList

OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
STEPS = 10
SCALE = 64.0


def build(layers: Any) -> nn.Sequential:
    torch.manual_seed(1)
    embed = nn.Embedding(7, 5)
    return nn.Sequential(embed, layers(nn.Linear(5, 5) for _ in range(5)), nn.LayerNorm(5))


def staged(level: int) -> nn.Sequential:
    def blocks(layers: Any) -> nn.Module:
        return PipelineTransformerBlockList([bmt_zero.Block(layer, zero_level=level) for layer in layers])

    return bmt_zero.BMTrainModelWrapper(build(blocks), zero_level=level)


def gradient(name: str, shape: torch.Size | tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


def rows_of(whole: Tensor, param: Tensor) -> Tensor:
    found = slice_of(param)
    return whole[found.row_start : found.row_stop]


def set_gradients(model: nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        param.grad = SCALE * rows_of(gradient(name, slice_of(param).shape, step), param)


def trained_plainly(steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """By torch: the parameters and the states behind ``steps`` steps, and the parameters before."""
    model = build(nn.ModuleList)
    params = dict(model.named_parameters())
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(steps):
        for name, param in params.items():
            param.grad = gradient(name, param.shape, step)
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
    return params, {name: optimizer.state[param] for name, param in params.items()}, before


def train(model: nn.Module, manager: OptimManager, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        norm = manager.clip_grad_norm(model.parameters(), 3.0)
        everything = build(nn.ModuleList).named_parameters()
        torch.testing.assert_close(
            norm, torch.cat([gradient(n, p.shape, step).flatten() for n, p in everything]).norm()
        )
        manager.step()


def check_update(model: nn.Module, steps: int) -> None:
    wanted, _, before = trained_plainly(steps)
    for name, param in model.named_parameters():
        update = rows_of(wanted[name].detach() - before[name], param)
        assert (param.to_local() - rows_of(before[name], param) - update).norm() <= 1e-5 * update.norm(), name


@pytest.mark.ranks(4, pipe_size=2)
@pytest.mark.parametrize("level", [0, 3])
def test_updates_are_those_of_one_process(ctx: Any, level: int, tmp_path: Path) -> None:
    model = staged(level)
    optimizer = AdamOptimizer(model.parameters(), **OPTIONS)
    manager = OptimManager(loss_scale=SCALE)
    manager.add_optimizer(optimizer)
    train(model, manager, range(STEPS))
    check_update(model, STEPS)
    # The first rank of a stage gets the state of what that stage has.
    states = optimizer.state_dict(gather=True)["state"]
    _, wanted, _ = trained_plainly(STEPS)
    names = [name for name, _ in model.named_parameters()]
    assert len(states) == (len(names) if ctx.zero.rank == 0 else 0)
    for index, state in states.items():
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[key], wanted[names[index]][key], rtol=1e-4, atol=1e-6)
    # And any rank of that stage goes on from it.
    path = tmp_path / f"stage{ctx.pipe_rank}.pt"
    save_optimizer(manager, path)
    again = AdamOptimizer(model.parameters(), **OPTIONS)
    second = OptimManager(loss_scale=1.0)
    second.add_optimizer(again)
    second.load_state_dict(torch.load(path, weights_only=True))
    train(model, second, range(STEPS, STEPS + 2))
    check_update(model, STEPS + 2)


@pytest.mark.ranks(4, pipe_size=2)
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_an_overflow_on_one_rank_of_one_stage_stops_all(ctx: Any, level: int, clip: bool) -> None:
    model = staged(level)
    manager = OptimManager(loss_scale=SCALE)
    manager.add_optimizer(AdamOptimizer(model.parameters(), **OPTIONS))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    set_gradients(model, 0)
    if ctx.pipe_rank == 1 and (level == 0 or ctx.data_rank == 1):
        for param in model[1].parameters():
            param.grad.fill_(torch.inf)
    if clip:
        manager.clip_grad_norm(model.parameters(), 3.0)
    manager.step()
    assert manager.loss_scale == SCALE / 2
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), before[name])
        assert not param.grad.any()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as scripts make them: vectors have no weight decay."""
    params = list(model.parameters())
    vectors = [param for param in params if len(slice_of(param).shape) == 1]
    return [
        {"params": [param for param in params if all(param is not vector for vector in vectors)], "lr": 0.5},
        {"params": vectors, "weight_decay": 0.0},
    ]


def saved_by_bmtrain(rank: int | None, cuts: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """A state dict of BMTrain 1.0, written by hand: every rank has all parameters in its groups, and the elements of
    those in ``cuts`` (the ranks that share a parameter) that are its own; None: gathered."""
    _, states, _ = trained_plainly(STEPS)
    model = build(nn.ModuleList)
    names = {id(param): name for name, param in model.named_parameters()}
    saved: dict[str, Any] = {"state": {}, "param_groups": [], "is_whole": rank is None}
    for group in groups_of(model):
        keys = []
        for param in group["params"]:
            name, key = names[id(param)], sum(len(each["params"]) for each in saved["param_groups"]) + len(keys)
            keys.append(key)
            flat = {k: states[name][k].flatten() for k in ("exp_avg", "exp_avg_sq")}
            if rank is None:
                saved["state"][key] = {"step": STEPS, **flat}
            elif rank in cuts[name]:
                place, count = cuts[name].index(rank), len(cuts[name])
                saved["state"][key] = {"step": STEPS, **{k: v.tensor_split(count)[place] for k, v in flat.items()}}
        saved["param_groups"].append({**OPTIONS, **group, "params": keys})
    return saved


@pytest.mark.ranks(4, pipe_size=2)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("interleave", [1, 2])
def test_states_of_bmtrain_are_loaded_in_a_pipeline(ctx: Any, gathered: bool, interleave: int) -> None:
    def blocks(layers: Any) -> nn.Module:
        return PipelineTransformerBlockList([bmt_zero.Block(layer) for layer in layers], interleave=interleave)

    model = bmt_zero.BMTrainModelWrapper(build(blocks))
    # Stages count the lists of their context alike, though their processes may have had other ones before.
    assert {getattr(param, LAYER_ATTRIBUTE)[0] for param in model[1].parameters()} == {0}
    own = {name.rpartition(".")[0] for name, _ in model[1].named_parameters(prefix="1")}
    stages = ctx.world.all_gather_object(own)  # which layers each rank has
    cuts = {
        name: tuple(r for r in range(4) if not name.startswith("1.") or name.rpartition(".")[0] in stages[r])
        for name, _ in build(nn.ModuleList).named_parameters()
    }
    optimizer = AdamOptimizer(groups_of(model), **{**OPTIONS, "lr": 1.0})
    optimizer.load_state_dict(saved_by_bmtrain(None if gathered else ctx.rank, cuts))
    _, wanted, _ = trained_plainly(STEPS)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 3e-2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert float(state["step"]) == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], rows_of(wanted[name][key], param)), name
    fewer = saved_by_bmtrain(None if gathered else ctx.rank, cuts)
    del fewer["param_groups"][1]["params"][-1]
    with pytest.raises(ValueError, match="the state dict has 12 parameters and the optimizer has 13"):
        optimizer.load_state_dict(fewer)


def test_the_ranks_files_of_a_pipeline_are_merged() -> None:
    names = [name for name, _ in build(nn.ModuleList).named_parameters()]
    cuts = {name: (0, 1, 2, 3) if not name.startswith("1.") else (0, 1) if name < "1.3" else (2, 3) for name in names}
    merged = merge_ranks([saved_by_bmtrain(rank, cuts) for rank in range(4)])
    wanted = saved_by_bmtrain(None, cuts)
    assert merged["is_whole"]
    assert merged["state"].keys() == wanted["state"].keys()
    for key, entry in wanted["state"].items():
        assert merged["state"][key]["step"] == entry["step"]
        assert all(torch.equal(merged["state"][key][k], entry[k]) for k in ("exp_avg", "exp_avg_sq"))
