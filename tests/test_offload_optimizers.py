"""Optimizers of bmt-optim with parameters in host memory: what they do for parameters on the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmt_optim
import bmt_zero
from bmt_comm import select_rows, slice_of


def batch(step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", ["AdamOptimizer", "Lamb", "CAME"])
def test_the_same_updates(ctx: Any, level: int, name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    found = []
    for offload in (False, True):
        model = bmt_zero.BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level, offload=offload)
        optimizer = getattr(bmt_optim, name)(model.parameters(), lr=0.01)
        manager = bmt_optim.OptimManager(loss_scale=8.0)
        manager.add_optimizer(optimizer)
        for step in range(5):
            manager.zero_grad()
            manager.backward(model(batch(step).chunk(2)[ctx.rank]).square().mean() / 2)
            manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5)
            manager.step()
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    for key, param in model.named_parameters():
        before = select_rows(plain.get_parameter(key).detach(), slice_of(param))
        assert torch.equal(found[1][key], found[0][key]), key
        assert not torch.equal(found[1][key], before), key
