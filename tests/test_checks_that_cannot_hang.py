"""A rank that does not come to a comparison is named within the comparison's own time-out, long before the others'."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_comm import RankFailureError, check_agreement, current_context, init_distributed, watch


def elsewhere(until: Path) -> None:
    """Until there is this file. A rank that is elsewhere is ended soon after the time-out; here it has longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_WAKE", 2.5)
        while not until.exists():
            time.sleep(0.02)


def optimizers() -> Callable[[], object]:
    model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4)))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=0.1))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return manager.step


def saving(path: Path) -> Callable[[], object]:
    model = bmt.BMTrainModelWrapper(nn.Linear(4, 4))
    return lambda: bmt.save(model, path / "model.pt")


def pipeline_call() -> Callable[[], object]:
    layers = bmt.PipelineTransformerBlockList([nn.Linear(4, 4) for _ in range(2)])
    layers(torch.ones(2, 4)).sum().backward()
    return lambda: layers(torch.ones(2, 4))


def parallel_batch() -> Callable[[], object]:
    layer = bmt.nn.VPEmbedding(8, 4)
    return lambda: layer(torch.ones(2, 2, dtype=torch.int64))


CASES: dict[str, tuple[dict[str, int], Callable[[Path], Callable[[], object]], str]] = {
    "a Block": ({}, lambda path: lambda: bmt.Block(nn.Linear(4, 4)), "agreement on the parameters of a Linear"),
    "a model": ({}, lambda path: lambda: bmt.BMTrainModelWrapper(nn.Linear(4, 4)), "agreement on the parameters of"),
    "optimizers": ({}, lambda path: optimizers(), "agreement on the optimizers"),
    "save": ({}, saving, "agreement on save"),
    "a list of stages": (
        {"pipe_size": 2},
        lambda path: lambda: bmt.PipelineTransformerBlockList([nn.Linear(4, 4) for _ in range(2)]),
        "agreement on the layers of a Pipeline",
    ),
    "a call of a pipeline": ({"pipe_size": 2}, lambda path: pipeline_call(), "all_gather of uint8"),
    "a batch": ({"tp_size": 2}, lambda path: parallel_batch(), "agreement on the batch"),
}


@pytest.mark.ranks(2, init=False, timeout=60)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_does_not_come_to_a_comparison_is_named(case: str, tmp_path: Path) -> None:
    sizes, prepare, what = CASES[case]
    init_distributed(device="cpu", timeout=600.0, agreement_timeout=1.5, **sizes)
    call = prepare(tmp_path)
    if current_context().rank == 1:
        elsewhere(tmp_path / "over")
        return
    with pytest.raises(RuntimeError) as raised:
        call()
    (tmp_path / "over").touch()
    error: BaseException | None = raised.value
    while error is not None and not isinstance(error, RankFailureError):
        error = error.__cause__
    assert what in str(error)
    assert re.search(r"  rank 1: is at \S+test_checks_that_cannot_hang\.py:\d+ in elsewhere", str(error)), error


@pytest.mark.ranks(2, init=False, timeout=40)
def test_a_rank_that_is_at_a_collective_in_place_of_a_check_is_named() -> None:
    """Over shared memory, which lets a wait end; a rank that waits in gloo's operation ends with its process."""
    init_distributed(device="cpu", timeout=600.0)
    ctx = current_context()
    calls = [lambda: check_agreement(ctx.world, "the weather", []), lambda: ctx.world.all_reduce(torch.ones(3))]
    with pytest.raises(RuntimeError, match="different operations") as raised:
        calls[ctx.rank]()
    assert "agreement on the weather" in str(raised.value)
    assert "all_reduce sum of float32 (3,)" in str(raised.value)
