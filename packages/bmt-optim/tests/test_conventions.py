"""Torch's conventions of optimizers are taken, or refused by name."""

import copy
import math
import weakref

import numpy as np
import pytest
import torch
from layouts import layout, shards, tensors, train, update_error
from torch import nn

import bmt_optim
from bmt_comm import shard_of, slice_of

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


def grads_of(params, seed):
    for p, g in zip(params, tensors([p.shape for p in params], seed)):
        p.grad = g.to(p.dtype)


def stepped(optimizer, params, seeds):
    for seed in seeds:
        grads_of(params, seed)
        optimizer.step()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CLASSES)
def test_groups_may_be_edited_between_steps(ctx, name):
    """What torch's optimizers read anew in each step."""
    shapes = [(4, 3), (2, 5), (3, 4)]

    def run(edit):
        params = [nn.Parameter(t.clone()) for t in tensors(shapes)]
        optimizer = made(name, [{"params": [params[0], params[1]]}, {"params": [params[2]], "lr": 0.5}])
        stepped(optimizer, params, range(2))
        edit(optimizer, params)
        stepped(optimizer, params, range(2, 4))
        return params, optimizer

    def replace(optimizer, params):
        old, params[1] = params[1], nn.Parameter(torch.ones(2, 5))
        optimizer.param_groups[0]["params"][1] = params[1]
        optimizer.state.pop(old)

    def move(optimizer, params):
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        optimizer.param_groups[1]["lr"] = 0.0

    def delete(optimizer, params):
        del optimizer.param_groups[1]

    untouched, _ = run(lambda *_: None)
    params, _ = run(replace)
    assert not torch.equal(params[1], torch.ones(2, 5))  # the new one is stepped
    assert torch.equal(params[0], untouched[0])
    before = {}
    params, _ = run(lambda optimizer, params: (move(optimizer, params), before.update(p=params[1].clone())))
    if name != "ScheduleFreeAdamW":  # which moves between its two sequences
        torch.testing.assert_close(params[1], before["p"])
    assert torch.equal(params[0], untouched[0])
    params, _ = run(lambda optimizer, params: (delete(optimizer, params), before.update(p=params[2].clone())))
    assert torch.equal(params[2], before["p"])
    assert torch.equal(params[0], untouched[0])


PROJECTED = {"rank": 3, "update_proj_gap": 2, "scale": 1.0, "proj_type": "std"}
CHANGES = [  # of options that the state depends on, in the last of the groups
    ("GaLoreAdamW", PROJECTED, {"rank": 1}),
    ("GaLoreAdamW", PROJECTED, {"proj_type": "left"}),
    ("GaLoreAdamW", {}, {"percentile_clipping": 50}),
    ("APOLLO", {"rank": 3}, {"rank": 2}),
    ("AdamMini", {}, {"block": "tensor"}),
    ("AdamMini", {"block": "tensor"}, {"block": "row"}),
    ("AdamMini", {}, {"block": 2}),  # of two ranks, each has as many rows as there are blocks
    ("Muon", {"use_muon": False}, {"use_muon": True}),
    ("Muon", {}, {"use_muon": False, "betas": (0.9, 0.99)}),
    ("SOAP", {"max_precond_dim": 2}, {"max_precond_dim": 100}),
    ("Dion", {}, {"rank_fraction": 0.5}),
    ("SOAP", {}, {"max_precond_dim": 2}),  # moments are kept in the bases
    ("DistributedShampoo", {}, {"max_preconditioner_dim": 2}),
    ("DistributedShampoo", {"max_preconditioner_dim": 4}, {"max_preconditioner_dim": 2}),  # as many elements
    ("Adafactor", {}, {"beta1": 0.9}),
]


@pytest.mark.ranks(1, 2)
def test_an_option_that_the_state_depends_on_may_not_be_changed_after_the_first_step(ctx):
    shapes = [(4, 4), (4, 4)]

    def grads_at(step):
        return tensors(shapes, step)

    for name, options, change in CHANGES:
        params = shards(tensors(shapes), layout(ctx, shapes))
        optimizer = made(name, [{"params": params[:1]}, {"params": params[1:], **options}])
        train(optimizer, params, range(2), grads_at)
        before = copy.deepcopy((params, optimizer.state_dict()["state"]))
        last = optimizer.param_groups[1]
        old = {key: last.get(key) for key in change}
        last.update(change)
        key, value = next(iter(change.items()))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{key}={value!r}.*was set after the first step"):
                train(optimizer, params, [2], grads_at)
        torch.testing.assert_close((params, optimizer.state_dict()["state"]), before, rtol=0, atol=0)
        if ctx.world_size == 1:  # a copy of a plain parameter does not know its slice
            twin = copy.deepcopy(optimizer)
            with pytest.raises(ValueError, match=f"{key}={value!r}.*was set after the first step"):
                train(twin, [p for group in twin.param_groups for p in group["params"]], [2], grads_at)
        last.update(old)
        train(optimizer, params, [2], grads_at)
        optimizer.state.clear()  # what begins afresh may have other options
        last.update(change)
        train(optimizer, params, range(2), grads_at)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("Adam", "betas", r"group 0 has no options \['betas'\]; set them"),
        ("Muon", "parts", r"group 0 has no options \['parts'\]; set them"),
        ("GaLoreAdamW", "update_proj_gap", r"group 0 has no options \['update_proj_gap'\]; set them"),
        ("GaLoreAdamW", "rank", "'rank' was removed after the first step and asks for another"),
    ],
)
def test_an_option_that_was_removed_from_a_group_is_named(ctx, name, option, message):
    params = [nn.Parameter(torch.ones(4, 4))]
    optimizer = getattr(bmt_optim, name)([{"params": params, **({"rank": 2} if name == "GaLoreAdamW" else {})}], lr=0.1)
    stepped(optimizer, params, range(2))
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    value = optimizer.param_groups[0].pop(option)
    grads_of(params, 2)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    torch.testing.assert_close((params, optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    optimizer.param_groups[0][option] = value
    optimizer.step()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["Lion", "SOAP"])
def test_an_optimizer_keeps_no_states_and_parameters_that_it_has_no_more(ctx, name):
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = made(name, [{"params": params[:1]}, {"params": params[1:]}])
    train(optimizer, params, [0], lambda step: tensors([(4, 4), (4, 4)], step))
    moment, gone = (weakref.ref(each) for each in (optimizer.state[params[1]]["exp_avg"], params[1]))
    del optimizer.param_groups[1], optimizer.state[params[1]], params[1]
    train(optimizer, params, [1], lambda step: tensors([(4, 4)], step))
    assert moment() is None
    assert gone() is None


@pytest.mark.ranks(1)
def test_a_module_may_swap_its_parameters_after_a_step(ctx):
    module = nn.Linear(4, 4)
    params = list(module.parameters())
    optimizer = made("SOAP", params)
    train(optimizer, params, [0], lambda step: tensors([(4, 4), (4,)], step))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.bfloat16()  # which torch refuses for tensors with weak references
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    train(optimizer, params, [1], lambda step: tensors([(4, 4), (4,)], step))
    assert module.weight.dtype is torch.bfloat16
    assert optimizer.state[module.weight]["step"] == 2


@pytest.mark.ranks(1, 2)
def test_an_option_may_be_changed_as_long_as_the_state_fits(ctx):
    shapes = [(4, 4), (4, 4)]
    for name, changes in (
        ("Adafactor", [{"beta1": 0.9}, {"beta1": None}, {"beta1": 0.8}]),
        ("DistributedShampoo", [{"momentum": 0.9}, {"momentum": 0.5}, {"momentum": 0.0}, {"momentum": 0.9}]),
        ("GaLoreAdamW", [{"percentile_clipping": 50}, {"percentile_clipping": 60.0}]),
        ("APOLLO", [{"rank": 4}, {"rank": 9}]),
    ):
        params = shards(tensors(shapes), layout(ctx, shapes), dtype=torch.float32)
        optimizer = made(name, params, **{key: value for key, value in changes[0].items() if key != "rank"})
        for step, change in enumerate(changes):
            optimizer.param_groups[0].update(change)
            train(optimizer, params, [step], lambda step: tensors(shapes, step))
            if step == 0:
                optimizer.load_state_dict(optimizer.state_dict())
                for param in params:
                    param.data = param.data.bfloat16()  # the state gets masters
            assert all(param.isfinite().all() for param in params)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("APOLLO", {"rank": 2.5}),
        ("APOLLO", {"update_proj_gap": 2.5}),
        ("GaLoreAdamW", {**PROJECTED, "rank": True}),
        ("Muon", {"ns_steps": 2.5}),
        ("SOAP", {"precondition_frequency": 2.5}),
    ],
)
def test_what_a_step_cannot_use_is_refused_at_construction(ctx, name, options):
    key, value = list(options.items())[-1] if name != "GaLoreAdamW" else ("rank", True)
    with pytest.raises(ValueError, match=f"{key}={value} must be a whole number"):
        made(name, [{"params": [nn.Parameter(torch.ones(4, 4))], **options}])


@pytest.mark.ranks(1)
def test_apollo_refuses_a_vector_in_a_group_with_a_rank_at_construction(ctx):
    with pytest.raises(ValueError, match=r"with a rank has shape \(4,\)"):
        bmt_optim.APOLLO([{"params": [nn.Parameter(torch.ones(4))], "rank": 2}])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamOptimizer", "AdamOffloadOptimizer", "Lamb"])
def test_numbers_of_numpy_and_torch_are_numbers(ctx, name):
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain = {"eps": 0.5, "weight_decay": 0.25, "betas": (0.5, 0.75)}
    given = {"eps": np.float32(0.5), "weight_decay": torch.tensor(0.25), "betas": (torch.tensor(0.5), np.float64(0.75))}
    for param, options in zip(params, (plain, given)):
        param.grad = torch.ones(3)
        made(name, [param], **options).step()
    assert torch.equal(*params)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamOptimizer", "AdamOffloadOptimizer"])
@pytest.mark.parametrize("way", ["pop", "zeros"])
def test_the_state_of_one_parameter_may_be_reset(ctx, name, way):
    memory = torch.randn(22)
    params = [nn.Parameter(v.view(s)) for v, s in zip(memory.split([12, 10]), SHAPES)]
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = made(name, params, weight_decay=0.0)
    reference = torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.0)
    for step in range(4):
        if step == 2:
            for each, p in ((optimizer, params[1]), (reference, theirs[1])):
                if way == "pop":
                    each.state.pop(p)
                else:
                    for key in ("exp_avg", "exp_avg_sq"):
                        each.state[p][key] = torch.zeros_like(p.detach())
        grads = tensors(SHAPES, step)
        flat = torch.cat([g.flatten() for g in grads])  # end to end, as in a Block
        for p, g in zip(params, flat.split([12, 10])):
            p.grad = g.view_as(p)
        for p, g in zip(theirs, grads):
            p.grad = g
        optimizer.step()
        reference.step()
    for p, q in zip(params, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert len(optimizer.state_dict()["state"]) == 2


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(ctx, default):
    start = tensors([(9, 6), (6, 5), (6,)])
    shapes = [t.shape for t in start]
    grads = [[4 * g for g in tensors(shapes, step)] for step in range(2)]

    def run(name, options, dtype):
        params = shards(start, layout(ctx, shapes))
        of_vector = {"use_muon": False} if name in ("Muon", "Dion") else {}
        groups = [{"params": params[:2], **options}, {"params": params[2:], **of_vector}]
        torch.set_default_dtype(dtype)
        try:
            optimizer = getattr(bmt_optim, name)(groups, lr=0.02, **CLASSES[name])
            manager = bmt_optim.OptimManager(loss_scale=4, grad_scale=1)
            manager.add_optimizer(optimizer)
            for unsharded in grads:
                for p, g in zip(params, unsharded):
                    p.grad = shard_of(g, slice_of(p)).clone() if p.numel() else None
                manager.clip_grad_norm(params, 1.0)
                assert manager.step()
            return params, optimizer.state_dict()["state"]
        finally:
            torch.set_default_dtype(torch.float32)

    for name in CLASSES:
        options = {"APOLLO": {"rank": 2}, "AdamMini": {"block": 3}}.get(name, {})
        (params, state), (expected, wanted) = (run(name, options, dtype) for dtype in (default, torch.float32))
        for p, q in zip(params, expected):
            assert torch.equal(p, q), name
        torch.testing.assert_close(state, wanted, rtol=0, atol=0)


@pytest.mark.ranks(1)
def test_a_step_inside_of_autocast_is_as_outside(ctx):
    start = tensors([(8, 6), (5, 6)])
    for name in CLASSES:
        runs = []
        for enabled in (False, True):
            params = [nn.Parameter(t.clone()) for t in start]
            optimizer = made(name, params)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                stepped(optimizer, params, range(3))
            runs.append(params)
        for p, q in zip(*runs):
            assert torch.equal(p, q), name


@pytest.mark.ranks(1)
def test_hooks_of_loading_are_called(ctx):
    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    optimizer, seen = made("Lion", params), []
    stepped(optimizer, params, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda _, given: {**given, "param_groups": given["groups"]})
    optimizer.register_load_state_dict_post_hook(lambda each: seen.append(each.state[params[0]]["step"]))
    optimizer.load_state_dict({"state": state["state"], "groups": state["param_groups"]})
    assert seen == [2]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["Adam", "Lion", "GaLoreAdamW"])
@pytest.mark.parametrize("gather", [False, True])
def test_hooks_of_saving_see_what_is_saved_and_may_give_it_another_form(ctx, name, gather):
    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    optimizer, seen = made(name, params), []
    stepped(optimizer, params, range(2))
    plain = optimizer.state_dict(gather=gather)

    def renamed(_, state_dict):
        seen.append({key: type(value) for key, value in state_dict["state"][0].items()})
        return {"state": {f"parameter {index}": entry for index, entry in state_dict["state"].items()}}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    optimizer.register_state_dict_post_hook(renamed)
    saved = optimizer.state_dict(gather=gather)
    assert seen == ["before", {key: type(value) for key, value in plain["state"][0].items()}]
    assert list(saved["state"]) == [f"parameter {index}" for index in plain["state"]]
    assert "param_groups" not in saved


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CLASSES)
def test_a_gradient_that_is_negated_when_it_is_read(ctx, name):
    """As that of one imaginary part may be."""
    params = [[nn.Parameter(torch.full((1, 1), 0.5))] for _ in range(2)]
    optimizers = [made(name, each) for each in params]
    for step in range(3):
        grad = torch.full((1, 1), 1j * (step + 0.5)).conj().imag
        assert grad.is_neg()
        assert grad.is_contiguous()
        for (param,), each in zip(params, (grad, grad.resolve_neg())):
            param.grad = each
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(params[0][0], params[1][0])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CLASSES)
def test_the_dtype_of_parameters_may_change(ctx, name):
    for first, then in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        params = [nn.Parameter(t.to(first)) for t in tensors(SHAPES)]
        optimizer = made(name, params)
        stepped(optimizer, params, range(2))
        for p in params:
            p.data = p.data.to(then)
            p.grad = None
        stepped(optimizer, params, range(2, 4))
        for p in params:
            assert ("master" in optimizer.state[p]) == (then is torch.bfloat16), name
            if then is torch.bfloat16:
                assert torch.equal(optimizer.state[p]["master"].bfloat16().to(p.device), p), name
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict(gather=True)))


@pytest.mark.ranks(1)
def test_an_optimizer_of_frozen_parameters_is_saved_and_loaded(ctx):
    frozen, trained = (nn.Parameter(t) for t in tensors(SHAPES))
    frozen.requires_grad_(False)
    manager = bmt_optim.OptimManager()
    for p in (frozen, trained):
        manager.add_optimizer(bmt_optim.AdamW([p]))
    trained.grad = torch.ones(2, 5)
    manager.step()
    manager.load_state_dict(copy.deepcopy(manager.state_dict()))
    assert manager.optimizers[1].state[trained]["step"] == 1


@pytest.mark.ranks(1)
def test_groups_that_were_given_are_the_optimizers(ctx):
    matrix, vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    for name, first, second in (
        ("Muon", {}, {"use_muon": False}),
        ("Dion", {}, {"use_muon": False}),
        ("GaLoreAdamW", {"rank": 2}, {}),
    ):
        groups = [{"params": [matrix], **first}, {"params": [vector], **second}]
        optimizer = getattr(bmt_optim, name)(groups)
        assert all(mine is given for mine, given in zip(optimizer.param_groups, groups, strict=True))
