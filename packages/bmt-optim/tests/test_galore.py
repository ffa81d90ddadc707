"""GaLore over shards is galore-torch's on whole matrices."""

import pytest
import torch
import torch.distributed as dist
from galore_reference import on_rank_0, reference_optimizer, step_reference, trained
from layouts import layout, shards, tensors, train, update_error
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_comm import slice_of
from bmt_optim import DistGaloreAdamW, GaLoreAdamW, engine, get_galore_param_groups
from bmt_optim.galore_projection import PROJECTIONS, leading_bases, side_of
from bmt_optim.slices import assemble

# Tall, wide and square ones, each cut by rows, by tensor parallelism along either dimension, or both.
MATRICES = [(24, 8), (12, 5), (7, 4), (4, 9), (3, 10), (2, 9), (8, 8), (6, 6), (1, 6)]
SHAPES = MATRICES * len(PROJECTIONS) + [(5,), (), (4, 6, 3, 2)]
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.1}
# eps: by both bases of a gradient itself ("full") the projected one is diagonal, but for rounding errors; without
# something to compare them with, Adam would make full steps of them.
RANK, GAP = 2, 4


def weights():
    return [0.1 * t for t in tensors(SHAPES)]  # small, so that it shows how steps differ


def gradients(step):
    return tensors(SHAPES, 100 + step)


def groups(params):
    """A group for each kind of projection, and one without."""
    size, found = len(MATRICES), []
    for n, kind in enumerate(PROJECTIONS):
        found.append({"params": params[n * size : (n + 1) * size], "rank": RANK, "update_proj_gap": GAP})
        found[-1].update(scale=0.3, proj_type=kind)
    return [*found, {"params": params[size * len(PROJECTIONS) :]}]


def reference_groups(params):
    """The same, where galore-torch can: its "reverse_std" fails on flat matrices of no more rows than the rank."""
    found = groups(params)
    mirrored = found[PROJECTIONS.index("reverse_std")]
    flat = [p for p in mirrored["params"] if p.shape[0] < p.shape[1] and p.shape[0] <= RANK]
    assert len(flat) == 2
    order = mirrored["params"]
    split = [{**mirrored, "params": [p], "proj_type": "right" if any(p is f for f in flat) else "reverse_std"} for p in order]
    at = PROJECTIONS.index("reverse_std")
    return [*found[:at], *split, *found[at + 1 :]]


def reference(steps, start):
    return [p.detach() for p in trained(start, reference_groups, gradients, steps, **OPTIONS)[0]]


def check(ctx):
    start = weights()
    params = shards(start, layout(ctx, SHAPES))
    optimizer = DistGaloreAdamW(groups(params), nbits=32, **OPTIONS)
    train(optimizer, params, range(8), gradients)
    quiet = optimizer.communication
    train(optimizer, params, range(8, 9), gradients)
    renewing = optimizer.communication
    train(optimizer, params, range(9, 10), gradients)
    assert update_error(params, on_rank_0(lambda: reference(range(10), start)), start) <= 1e-5
    # Projected gradients where ranks cut what is contracted, in one all-reduce per communicator; bases every 4 steps.
    assert (quiet.rounds, renewing.rounds) == ((0, 2) if ctx.world_size == 1 else (1, 3))
    comms = 0 if ctx.world_size == 1 else 1 if ctx.tp_size == 1 else 2 if ctx.data_size == 1 else 3
    assert quiet.collectives == comms
    assert 2 * min(comms, 1) <= renewing.collectives - quiet.collectives <= 2 * comms


@pytest.mark.ranks(1, 2, 3, 4)
def test_over_row_shards_it_is_the_published_one(ctx):
    check(ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_the_published_one(ctx):
    check(ctx)
