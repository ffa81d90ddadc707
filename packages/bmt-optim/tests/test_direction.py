"""record_delta: mean and variance of the Adam direction, against fp64 over all logical elements."""

import math

import pytest
import torch
import torch.distributed as dist
from offload_helpers import (
    DTYPES,
    OPTIONS,
    SHAPES,
    VARIANTS,
    making,
    mixed_slices,
    row_slice,
    separate,
    shards,
    train,
    values,
)

from bmt_comm import shard_of, slice_of
from bmt_optim import AdamOffloadOptimizer


def directions(grads_by_step):
    """In fp64, of every parameter, from its gradient (or None) at every step."""
    (beta1, beta2), eps = OPTIONS["betas"], OPTIONS["eps"]
    directions = []
    for grads in zip(*grads_by_step):
        m = v = torch.zeros((), dtype=torch.float64)
        count = 0
        for g in grads:
            if g is not None:
                count += 1
                m = beta1 * m + (1 - beta1) * g.double()
                v = beta2 * v + (1 - beta2) * g.double() ** 2
        if grads[-1] is not None:
            directions.append((m / (1 - beta1**count) / ((v / (1 - beta2**count)).sqrt() + eps)).reshape(-1))
    return torch.cat(directions)


def assert_recorded(optimizer, expected):
    assert optimizer.get_avg_delta() == pytest.approx(expected.mean().item(), abs=1e-6)
    assert optimizer.get_var_delta() == pytest.approx(expected.var(correction=0).item(), rel=1e-5)


@pytest.mark.parametrize("hold", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_direction_of_the_last_step_is_recorded(variant, hold):
    with making(variant) as make:
        params = separate(values())
        optimizer = make(params, record_delta=True, hold_steps=hold, **OPTIONS)
        assert math.isnan(optimizer.get_avg_delta())
        assert math.isnan(optimizer.get_var_delta())
        history = []
        for step in range(4):
            grads = [g.to(d) * (1 + i) for i, (g, d) in enumerate(zip(values(step + 1), DTYPES))]
            grads[5] = None if step % 2 else grads[5]
            history.append(grads)
            for p, g in zip(params, grads):
                p.grad = g if g is None else g * 64
            optimizer.step(scale=64.0)
            assert_recorded(optimizer, directions(history))


def test_nothing_is_recorded_unasked():
    optimizer = AdamOffloadOptimizer(separate(values()))
    for statistic in (optimizer.get_avg_delta, optimizer.get_var_delta):
        with pytest.raises(RuntimeError, match="record_delta=True"):
            statistic()


# --- several ranks ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_each_logical_element_is_recorded_once(ctx):
    for compute in ("host", "device"):
        params = shards(values(), mixed_slices(ctx))
        optimizer = AdamOffloadOptimizer(params, record_delta=True, compute=compute, **OPTIONS)
        for p in params:
            if p.numel() == 0:
                p.grad = None
        history = []
        for step in range(3):
            history.append([(g * (1 + i)).to(d) for i, (g, d) in enumerate(zip(values(step + 1), DTYPES))])
            for p, g in zip(params, history[-1]):
                if p.numel():
                    p.grad.copy_(shard_of(g, slice_of(p)))
            optimizer.step()
        assert_recorded(optimizer, directions(history))
        everyone = [None] * ctx.world_size
        dist.all_gather_object(everyone, (optimizer.get_avg_delta(), optimizer.get_var_delta()))
        assert len(set(everyone)) == 1


@pytest.mark.ranks(2, tp_size=2)
def test_the_direction_under_tensor_parallelism(ctx):
    dims = (0, None, None, 1, None, 0, 1, None)
    params = shards(values(), [row_slice(s, ctx.tp_zero, dim, ctx.tp) for s, dim in zip(SHAPES, dims)])
    optimizer = AdamOffloadOptimizer(params, record_delta=True, **OPTIONS)
    train(optimizer, params, range(2))
    history = [[g.to(d) for g, d in zip(values(step + 1), DTYPES)] for step in range(2)]
    assert_recorded(optimizer, directions(history))


@pytest.mark.ranks(2, pipe_size=2)
def test_the_direction_over_stages_counts_what_all_have_once(ctx):
    own = [0, 3] if ctx.pipe_rank == 0 else [5, 7]
    slices = [row_slice(s, ctx.zero) if i in own else None for i, s in enumerate(SHAPES)]
    params = shards(values(), slices)
    common = [1, 2, 6]
    optimizer = AdamOffloadOptimizer([params[i] for i in common + own], record_delta=True, **OPTIONS)
    train(optimizer, params, [0])
    history = [[g.to(d) for g, d in zip(values(1), DTYPES)]]
    history[0][4] = None  # has no elements anyway
    assert_recorded(optimizer, directions(history))
