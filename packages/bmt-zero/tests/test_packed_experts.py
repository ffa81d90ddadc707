"""Packed experts, (experts, R, C): a rank may hold a part of an expert, and everything is as with one process."""

from __future__ import annotations

import pytest
import torch
from block_helpers import assert_same_gradients, pair, rows_of, seeded
from torch import Tensor, nn

from bmt_comm import slice_of
from bmt_zero import TransformerBlockList, load_state_dict

EXPERTS, ROWS, COLUMNS = 3, 5, 4


class Experts(nn.Module):
    """Each token goes through one expert of two packed weights, as transformers packs them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, ROWS, COLUMNS))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, ROWS))
        self.down = nn.Parameter(torch.randn(EXPERTS, COLUMNS, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        expert = torch.arange(len(x)) % EXPERTS
        hidden = torch.einsum("brc,bc->br", self.up[expert], x) + self.up_bias[expert]
        return x + torch.einsum("bcr,br->bc", self.down[expert], hidden.tanh())


def halves(batch: Tensor, ctx) -> Tensor:
    return batch[ctx.rank :: ctx.world_size]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_training_is_that_of_one_process(ctx, level):
    plain, block = pair(Experts, zero_level=level)
    model = TransformerBlockList([block])
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    # As many tokens per rank as make each rank's tokens meet the same experts as in the whole batch.
    for step in range(10):
        batch = seeded(step, EXPERTS * ctx.world_size, COLUMNS)
        whole = torch.cat([plain(part) for part in batch.chunk(ctx.world_size)])
        whole.square().mean().backward()
        (model(batch.chunk(ctx.world_size)[ctx.rank]).square().mean() / ctx.world_size).backward()
        assert_same_gradients(model[0], plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(plain.named_parameters())
    for name, param in model[0].named_parameters():
        update = rows_of(wanted[name].detach() - start[name], param)
        error = (param.to_local() - rows_of(start[name], param) - update).norm()
        assert error <= 1e-5 * update.norm(), name


@pytest.mark.ranks(2, 4)
def test_a_rank_holds_rows_of_the_experts_taken_together(ctx):
    plain, block = pair(Experts)
    held = 0
    for name, param in block.named_parameters():
        where, full = slice_of(param), plain.get_parameter(name).detach()
        assert where.row_dims == (2 if full.dim() == 3 else 1)
        assert where.shape == param.logical_shape == tuple(full.shape)
        assert tuple(param.shape) == where.local_shape
        rows = full.flatten(0, where.row_dims - 1)[where.row_start : where.row_stop]
        assert torch.equal(param.to_local(), rows)
        assert torch.equal(param.full_tensor(), full)
        held += param.to_local().numel()
    even = sum(p.numel() for p in plain.parameters()) / ctx.world_size
    assert held <= even + 2 * ROWS  # expert by expert, the largest share would be 1.3 or 2.7 times an even one


@pytest.mark.ranks(3)
def test_state_dicts_are_those_of_the_plain_module(ctx):
    plain, block = pair(Experts)
    for name, value in block.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    load_state_dict(block, other)
    for name, param in block.named_parameters():
        assert torch.equal(param.detach(), rows_of(other[name], param)), name
