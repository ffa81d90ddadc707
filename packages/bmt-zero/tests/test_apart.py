"""Gradients that are summed apart from ``.grad``, when the backward that computes them fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bmt_zero import Block
from bmt_zero.backward_context import step_context
from bmt_zero.shard import group_of


@pytest.mark.ranks(2)
def test_nobody_waits_for_a_reduction_that_an_exception_has_abandoned(ctx: Any) -> None:
    block = Block(nn.Linear(4, 4), zero_level=3)
    (reducer,) = group_of(block).reducers
    x = torch.ones(2, 4, requires_grad=True)

    def failing() -> None:
        with step_context(ctx).nested(), reducer.apart({}):
            block(x).sum().backward()
            assert reducer.pending is not None
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert reducer.pending is not None  # its collective may lack a rank
    block(x).sum().backward()
    assert reducer.pending is None
    grads = [param.grad for param in block.parameters()]
    block.zero_grad()
    block(x).sum().backward()
    torch.testing.assert_close(grads, [param.grad for param in block.parameters()])  # of one pass
