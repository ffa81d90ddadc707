"""bmt-kernels' loss of a linear layer with a head that bmt-zero has sharded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bmt_comm import select_rows, slice_of
from bmt_kernels import linear_cross_entropy
from bmt_zero import BMTrainModelWrapper

CLASSES, WIDTH = 1100, 256  # large enough to be unsharded by itself


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor, outside: bool) -> torch.Tensor:
        x = self.embedding(ids)
        return x if outside else linear_cross_entropy(x, self.head.weight, ids)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_the_weight_of_a_sharded_head(ctx, outside, trains):
    torch.manual_seed(0)
    plain = Model()
    model = BMTrainModelWrapper(copy.deepcopy(plain))
    ids = torch.arange(12) * 7

    def loss(module: nn.Module) -> torch.Tensor:
        found = module(ids, outside)
        return linear_cross_entropy(found, module.head.weight, ids) if outside else found

    with torch.set_grad_enabled(trains):
        expected, found = loss(plain), loss(model)
        torch.testing.assert_close(found, expected)
    if trains:
        expected.backward()
        (found / ctx.world_size).backward()
        for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.add(0), select_rows(whole.grad, slice_of(param)))
