"""AdamW8bit is AdamW up to the rounding of its moments, and its state has the same bytes on every layout."""

import copy

import pytest
import torch
from layouts import layout, shards, tensors, train, undivided_layout, update_error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_optim import AdamW8bit, DistGaloreAdamW

SHAPES = [(24, 40), (7, 300), (5,), (3, 6, 50), (600,)]
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def gradients(step):
    return tensors(SHAPES, 100 + step)


def alone(least, steps):
    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    optimizer = AdamW8bit(params, min_8bit_size=least, **OPTIONS)
    train(optimizer, params, range(steps), gradients)
    return params, optimizer


def formula(steps):
    params = [t.double() for t in tensors(SHAPES)]
    ms, vs = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for t in range(1, steps + 1):
        for p, m, v, g in zip(params, ms, vs, gradients(t - 1)):
            m.lerp_(g.double(), 0.2)
            v.lerp_(g.double() ** 2, 0.05)
            p.sub_(0.02 * m / (1 - 0.8**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-3)).mul_(1 - 0.002)
    return params


@pytest.mark.ranks(1)
def test_it_is_adamw_up_to_its_moments(ctx):
    start, expected = tensors(SHAPES), formula(10)
    assert update_error(alone(10**6, 10)[0], expected, start) <= 1e-5
    params, optimizer = alone(100, 10)
    assert 1e-4 < update_error(params, expected, start) < 0.05
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.uint8
    assert optimizer.state[params[2]]["exp_avg"].dtype is torch.float32
    with pytest.raises(ValueError, match="rank=4"):
        AdamW8bit([{"params": params[:1], "rank": 4}])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("make_layout", [layout, undivided_layout])
def test_its_state_has_the_same_bytes_on_every_layout(ctx, make_layout):
    check_bytes(ctx, make_layout)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_its_state_has_the_same_bytes_over_tensor_parallel_shards(ctx):
    check_bytes(ctx, layout)


def check_bytes(ctx, make_layout):
    unsharded, reference = alone(100, 4)
    params = shards(tensors(SHAPES), make_layout(ctx, SHAPES))
    optimizer = AdamW8bit(params, min_8bit_size=100, **OPTIONS)
    train(optimizer, params, range(3), gradients)
    state = ctx.world.all_gather_object(optimizer.state_dict(gather=True))[0]
    again = AdamW8bit(params, min_8bit_size=100)
    again.load_state_dict(copy.deepcopy(state))
    train(again, params, range(3, 4), gradients)
    state = ctx.world.all_gather_object(again.state_dict(gather=True))[0]["state"]
    for index, entry in reference.state_dict()["state"].items():
        assert entry.keys() == state[index].keys()
        assert all(torch.equal(value, state[index][key]) for key, value in entry.items())
    assert update_error(params, [p.detach() for p in unsharded], tensors(SHAPES)) <= 1e-6


@pytest.mark.ranks(2)
def test_ranks_agree_on_the_blocks_at_the_ends_of_their_parts_only(ctx):
    shape = (101, 300)  # 119 blocks
    params = shards(tensors([shape]), layout(ctx, [shape]))
    optimizer = AdamW8bit(params, **OPTIONS)
    train(optimizer, params, range(1), lambda step: tensors([shape], step))
    assert (optimizer.communication.rounds, optimizer.communication.collectives) == (1, 1)
    assert optimizer.communication.bytes <= 2 * 4 * 8  # both moments' of four blocks, there and back


class Counted(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("rank", "is_paged"), [(None, True), (18, False)])
def test_the_work_at_block_edges_grows_with_the_number_of_matrices(ctx, rank, is_paged):
    calls = []
    for count in (4, 32):
        shapes = [(30, 21)] * count
        params = shards(tensors(shapes), layout(ctx, shapes))
        group = {"params": params, "is_paged": is_paged, **({"rank": rank} if rank else {})}
        optimizer = (DistGaloreAdamW if rank else AdamW8bit)([group], min_8bit_size=1)
        train(optimizer, params, range(1), lambda step, shapes=shapes: tensors(shapes, step))
        with Counted() as counted:
            optimizer.step()
        calls.append(counted.calls)
    assert calls[1] <= 8 * calls[0]


@pytest.mark.ranks(2)
def test_its_state_goes_to_bitsandbytes_and_back(ctx):
    shapes = [(64, 100), (5, 6)]
    params = shards(tensors(shapes), layout(ctx, shapes), torch.bfloat16)
    optimizer = AdamW8bit(params, **OPTIONS)
    train(optimizer, params, range(2), lambda step: tensors(shapes, step))
    theirs = ctx.world.all_gather_object(optimizer.bitsandbytes_state_dict())[0]
    assert set(theirs["param_groups"][0]) == {"params", "lr", "betas", "eps", "weight_decay"}
    large, small = theirs["state"].values()
    assert set(large) == {"step", *(f"{name}{n}" for name in ("state", "absmax", "qmap") for n in (1, 2))}
    assert set(small) == {"step", "state1", "state2"}  # in fp32, as bitsandbytes has fewer than 4096 elements
    assert large["step"] == 2
    assert large["state1"].dtype is torch.uint8
    unsharded = ctx.world.all_gather_object(optimizer.state_dict(gather=True)["state"])[0]
    for entry, ours in zip(theirs["state"].values(), unsharded.values()):
        for n, key in enumerate(("exp_avg", "exp_avg_sq"), 1):
            assert torch.equal(entry[f"state{n}"], ours[key])
    blocks = large["state1"].flatten().split(256)
    moments = [large["qmap1"][block.long()] * scale for block, scale in zip(blocks, large["absmax1"])]
    expected = torch.zeros(shapes[0])
    for step in range(2):
        expected = 0.8 * expected + 0.2 * tensors(shapes, step)[0].bfloat16().float()
    assert (torch.cat(moments).view(shapes[0]) - expected).norm() < 0.02 * expected.norm()
    again = AdamW8bit(params)
    again.load_state_dict(theirs)
    assert torch.equal(again.state[params[0]]["exp_avg"], optimizer.state[params[0]]["exp_avg"])
    optimizer.param_groups[0]["percentile_clipping"] = 5
    with pytest.raises(ValueError, match="percentile_clipping"):
        optimizer.bitsandbytes_state_dict()
