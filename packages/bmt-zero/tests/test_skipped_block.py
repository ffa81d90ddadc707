"""A rank that leaves out a Block is told at once, which one, and does not train on the others' data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bmt_zero import Block, TransformerBlockList


@pytest.mark.ranks(2, timeout=40)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_rank_that_skips_one_of_equal_blocks(ctx, level):
    blocks = TransformerBlockList([Block(nn.Linear(4, 4), zero_level=level) for _ in range(4)])
    x = torch.ones(2, 4)
    blocks(x).sum().backward()
    order = [0, 2, 3] if ctx.rank == 1 else [0, 1, 2, 3]

    def train():
        for _ in range(2):
            y = x
            for index in order:
                y = blocks[index](y)
            y.sum().backward()

    # Where the skipped Block was prefetched, collectives are the same and the Blocks that were called are not.
    skipped = r"ranks call different operations: rank . is at .* for .*, rank . at|operation 2 is layer 1 .* layer 2 "
    with pytest.raises(RuntimeError, match=skipped):
        train()
