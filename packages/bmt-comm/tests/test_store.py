"""Objects between ranks."""

import pytest
import torch

from bmt_comm import allgather_objects, broadcast_object, store


@pytest.mark.ranks(1, 3)
def test_objects_of_the_world(ctx):
    n, rank = ctx.world_size, ctx.rank
    assert allgather_objects({"rank": rank, "text": "x" * rank * 1000}) == [
        {"rank": r, "text": "x" * r * 1000} for r in range(n)
    ]
    assert broadcast_object(("from", rank)) == ("from", 0)
    assert store.broadcast_object([rank] if rank == n - 1 else None, ctx.world, src=n - 1) == [n - 1]


@pytest.mark.ranks(4, tp_size=2)
def test_objects_of_a_part_of_it(ctx):
    assert store.allgather_objects(ctx.rank, ctx.tp_zero) == list(ctx.tp_zero.ranks)
    assert store.broadcast_object(ctx.rank, ctx.tp, src=1) == ctx.tp.ranks[1]
    with pytest.raises(ValueError, match="root=2 is not a rank"):
        store.broadcast_object(0, ctx.tp, src=2)


@pytest.mark.ranks(1, 3)
def test_the_state_dict_of_rank_0_is_that_of_all(ctx, device_type):
    full = {"weight": torch.arange(6.0).view(2, 3).half(), "scalar": torch.tensor(7), "note": ["not", "a", "tensor"]}
    wrapper = store.DistributedStateDictWrapper(full if ctx.rank == 0 else {})
    assert list(wrapper) == list(full)
    assert len(wrapper) == 3
    assert "bias" not in wrapper
    for name in ("weight", "scalar"):
        assert wrapper[name].device.type == device_type
        assert torch.equal(wrapper[name].cpu(), full[name])
        assert wrapper[name].dtype == full[name].dtype
    assert wrapper["note"] == full["note"]
    with pytest.raises(KeyError):
        wrapper["bias"]
