"""Parameters that are divided only between granules train and are saved as others are."""

import copy

import pytest
import torch
from torch import nn

from bmt_zero import Block, fully_shard, load, save, set_granularity, shard


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4))


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:.*granules of up to")
@pytest.mark.parametrize("wrap", [Block, shard, fully_shard])
def test_a_block_with_granules_trains_as_the_plain_module(ctx, wrap, tmp_path):
    plain = model()
    mine = copy.deepcopy(plain)
    set_granularity(mine, lambda name, p: {"0.weight": 4, "2.weight": "whole", "2.bias": 3}.get(name))
    mine = wrap(mine)
    for name, rows in (("0.weight", 4), ("2.weight", 7), ("2.bias", 3)):
        where = dict(mine.named_parameters())[name].bmt_slice
        assert all(edge % rows == 0 or edge == where.shape[0] for edge in (where.row_start, where.row_stop)), name
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, mine)]
    for step in range(3):
        xs = [torch.randn(5, 7, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(ctx.world_size)]
        sum(plain(x).square().sum() for x in xs).backward()
        loss = mine(xs[ctx.rank]).square().sum()
        (loss * ctx.world_size if wrap is fully_shard else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    path = str(tmp_path / "model.pt")
    save(mine, path)
    ctx.world.barrier()
    other = Block(model())  # another layout
    load(other, path)
    for p, q, r in zip(plain.parameters(), mine.parameters(), other.parameters()):
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(r.full_tensor(), q.full_tensor())


@pytest.mark.ranks(2)
def test_ranks_that_disagree_on_granules_and_padding_beyond_a_hundredth_are_told(ctx):
    mine = model()
    set_granularity(mine, 1 + ctx.rank)
    with pytest.raises(RuntimeError, match="granularity"):
        Block(mine)
    mine = model()
    set_granularity(mine, "whole")
    with pytest.warns(UserWarning, match="padding on 2 ranks") if ctx.rank == 0 else pytest.MonkeyPatch.context():
        Block(mine)
    with pytest.raises(ValueError, match="sharded already"):
        set_granularity(mine, 2)


def test_a_granularity_that_is_no_number_of_rows_is_refused():
    for wrong in (0, True, "half", 1.5):
        with pytest.raises(ValueError, match=r"granularity .* of parameter '0.weight'"):
            set_granularity(model(), wrong)
