"""Torch's conventions of optimizers are taken, or refused by name."""

import copy
import math

import pytest
import torch
from layouts import layout, shards, tensors, train, update_error
from torch import nn

import bmt_optim

CLASSES = {
    "Adam": {},
    "AdamW": {},
    "AdamOptimizer": {},
    "AdamW8bit": {},
    "AdamOffloadOptimizer": {},
    "Lamb": {},
    "Adafactor": {"relative_step": False},
    "TorchAdafactor": {},
    "CAME": {},
    "GaLoreAdamW": {"nbits": 32},
    "Muon": {},
    "Lion": {},
    "AdEMAMix": {},
    "ScheduleFreeAdamW": {},
    "AdamMini": {},
    "APOLLO": {},
    "SOAP": {},
    "Dion": {},
    "DistributedShampoo": {"epsilon": 0.1},
}
SHAPES = [(4, 3), (2, 5)]


def made(name, params, **options):
    return getattr(bmt_optim, name)(params, **{"lr": 0.02, **CLASSES[name], **options})


@pytest.mark.ranks(1)
def test_conventions_are_taken_or_refused_by_name(ctx):
    for name in CLASSES:
        start = tensors(SHAPES)
        runs = {}
        for maximize in (False, True):
            params = [nn.Parameter(t.clone()) for t in start]
            optimizer = made(name, params, lr=torch.tensor(0.02), maximize=maximize, foreach=True, fused=None)
            sign = -1 if maximize else 1
            train(optimizer, params, range(3), lambda step, sign=sign: [sign * g for g in tensors(SHAPES, step)])
            runs[maximize] = params
        params = [nn.Parameter(t.clone()) for t in start]
        train(made(name, params, capturable=False), params, range(3), lambda step: tensors(SHAPES, step))
        assert update_error(runs[False], params, start) <= 1e-6, name
        assert update_error(runs[True], params, start) <= 1e-6, name
        for option in ("capturable", "differentiable"):
            with pytest.raises(ValueError, match=f"{option}=True"):
                made(name, params, **{option: True})
            with pytest.raises(ValueError, match=f"{option}=True"):
                made(name, [{"params": params, option: True}])
        with pytest.raises(TypeError, match="'speed'"):
            made(name, params, speed=2)


@pytest.mark.ranks(1, 2)
def test_lamb_leaves_biases_alone_and_bounds_the_ratio(ctx):
    start = tensors([(6, 4), (4,), (5, 3)])
    params = shards(start, layout(ctx, [t.shape for t in start]))
    groups = [{"params": [params[0], params[2]], "weight_decay": 0.1}, {"params": [params[1]]}]
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "adapt_undecayed": False, "max_trust_ratio": 0.7}
    optimizer = bmt_optim.Lamb(groups, **options)
    train(optimizer, params, range(4), lambda step: tensors([t.shape for t in start], step + 1))
    expected, ratios = [t.double() for t in start], []
    for p, decay, n in zip(expected, (0.1, 0.0, 0.1), range(3)):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for t in range(1, 5):
            g = tensors([s.shape for s in start], t)[n].double()
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            r = m / (1 - 0.8**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-6) + decay * p
            ratios.append(float(p.norm() / r.norm()))
            p.sub_(0.02 * (min(ratios[-1], 0.7) if decay else 1.0) * r)
    assert max(ratios) > 0.7  # the bound bounds
    assert update_error(params, expected, start) <= 1e-5
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["max_trust_ratio"]  # of an earlier version
    bmt_optim.Lamb(groups).load_state_dict(state)
    with pytest.raises(ValueError, match="max_trust_ratio"):
        bmt_optim.Lamb(params, max_trust_ratio=-math.inf)
