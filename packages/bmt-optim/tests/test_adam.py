"""AdamOptimizer on one process, against torch.optim.AdamW."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from bmt_optim import AdamOptimizer, AdamW

SHAPES = [(7, 5), (5,), (), (3, 1, 2), (0, 4), (11,)]
OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def values(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def separate(tensors):
    return [nn.Parameter(t.detach().clone()) for t in tensors]


def end_to_end(tensors, dtype=torch.float32):
    """Parameters, and gradients, that are views of one flat buffer each, as ZeRO makes them."""
    data, grads = (torch.cat([t.reshape(-1) for t in tensors]).to(dtype) for _ in range(2))
    params, at = [], 0
    for t in tensors:
        params.append(nn.Parameter(data[at : at + t.numel()].view(t.shape)))
        params[-1].grad = grads[at : at + t.numel()].view(t.shape)
        at += t.numel()
    return params


def set_grads(params, tensors):
    for p, g in zip(params, tensors):
        if p.grad is None:
            p.grad = g.to(p.dtype, copy=True)
        else:
            p.grad.copy_(g)


def relative_error(params, reference, start):
    """Of the update: ‖Δp - Δq‖ / ‖Δq‖."""
    ours = torch.cat([(p.detach() - s).reshape(-1) for p, s in zip(params, start)])
    theirs = torch.cat([(q.detach() - s).reshape(-1) for q, s in zip(reference, start)])
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("layout", [separate, end_to_end])
@pytest.mark.parametrize("scale", [1, 1024])
def test_the_update_is_that_of_adamw_with_decoupled_decay_in_fp32(layout, scale):
    start = values()
    ours, reference = layout(start), separate(start)
    optimizer, adamw = AdamOptimizer(ours, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    for step in range(12):
        grads = values(seed=step + 1)
        set_grads(ours, [g * scale for g in grads])
        set_grads(reference, grads)
        optimizer.step(scale=scale)
        adamw.step()
    assert relative_error(ours, reference, start) <= 1e-6
    # Moments are those of the unscaled gradient.
    for p, q in zip(ours, reference):
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], adamw.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("layout", ["separate", "end to end"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_fp32_and_is_the_rounded_master_weight(dtype, layout):
    start = [t.to(dtype).float() for t in values()]
    ours = end_to_end(start, dtype) if layout == "end to end" else [nn.Parameter(t.to(dtype)) for t in start]
    reference = separate(start)
    optimizer, adamw = AdamOptimizer(ours, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    for step in range(12):
        grads = [g.to(dtype) for g in values(seed=step + 1)]
        set_grads(ours, grads)
        set_grads(reference, [g.float() for g in grads])
        optimizer.step()
        adamw.step()
        for p in ours:
            assert torch.equal(p, optimizer.state[p]["master"].to(dtype)), "rounded to nearest, not truncated"
    masters = [optimizer.state[p]["master"] for p in ours]
    assert relative_error(masters, reference, start) <= 1e-6


def test_weight_decay_is_decoupled_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p = nn.Parameter(torch.full((4,), 2.0, dtype=dtype))
        p.grad = torch.zeros_like(p)
        AdamOptimizer([p], lr=0.25, weight_decay=0.5).step()
        # Coupled decay would put the decay through the moments: a step of lr, to 1.75, whatever its size.
        torch.testing.assert_close(p, torch.full_like(p, 2.0 * (1 - 0.25 * 0.5)), msg=str(dtype))
        assert p[0].item() == 1.75
    p = nn.Parameter(torch.full((4,), 2.0))
    p.grad = torch.zeros_like(p)
    AdamOptimizer([p], lr=0.25, weight_decay=0.1).step()
    torch.testing.assert_close(p, torch.full_like(p, 1.95))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hold", [0, 1, 3])
def test_hold_steps_holds_the_parameters_for_exactly_that_many_steps_in_every_dtype(dtype, hold):
    start = [t.to(dtype).float() for t in values()]
    ours, reference = end_to_end(start, dtype), separate(start)
    optimizer, adamw = AdamOptimizer(ours, hold_steps=hold, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    for step in range(hold + 3):
        grads = [g.to(dtype) for g in values(seed=step + 1)]
        set_grads(ours, grads)
        set_grads(reference, [g.float() for g in grads])
        optimizer.step()
        adamw.param_groups[0]["lr"] = 0.0 if step < hold else OPTIONS["lr"]
        adamw.step()
        moved = any(not torch.equal(p, s.to(dtype)) for p, s in zip(ours, start))
        assert moved == (step >= hold)
    results = [optimizer.state[p].get("master", p) for p in ours]
    assert relative_error(results, reference, start) <= 1e-6
    for p, q in zip(ours, reference):
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], adamw.state[q]["exp_avg"])


def test_parameters_without_gradient_are_skipped_and_count_their_own_steps():
    start = values()
    ours, reference = end_to_end(start), separate(start)
    optimizer, adamw = AdamOptimizer(ours, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    flat_grads = [p.grad for p in ours]
    for step in range(12):
        grads = values(seed=step + 1)
        set_grads(ours, grads)
        set_grads(reference, grads)
        for i in (0, 3):
            ours[i].grad = flat_grads[i] if step % (i + 2) else None
            if ours[i].grad is None:
                reference[i].grad = None
            else:
                ours[i].grad.copy_(grads[i])
        optimizer.step()
        adamw.step()
    assert relative_error(ours, reference, start) <= 1e-6
    for p, q in zip(ours, reference):
        if adamw.state.get(q):
            assert optimizer.state[p]["step"] == adamw.state[q]["step"]


@pytest.mark.parametrize("cls", [AdamOptimizer, AdamW])
def test_neighbouring_parameters_are_one_tensor_to_the_kernel(cls, monkeypatch):
    import bmt_optim.adam

    calls = []
    real = bmt_optim.adam.bmt_kernels.adam_step
    monkeypatch.setattr(
        bmt_optim.adam.bmt_kernels, "adam_step", lambda ps, *a, **k: (calls.append(len(ps)), real(ps, *a, **k))
    )
    blocks = [end_to_end(values(seed)) for seed in range(3)]
    optimizer = cls([p for block in blocks for p in block])
    optimizer.step()
    empty = sum(0 in shape for shape in SHAPES)
    assert calls == [3 + 3 * empty]
    blocks[0][1].grad = blocks[0][1].grad.clone()  # elsewhere: this run goes in parameter by parameter
    optimizer.step()
    assert calls[1:] == [2 + len(SHAPES) + 2 * empty]


def test_runs_need_no_particular_order_of_parameters():
    start = values()
    ours, reference = end_to_end(start), separate(start)
    order = [3, 0, 5, 2, 1, 4]
    optimizer = AdamOptimizer([ours[i] for i in order], **OPTIONS)
    adamw = torch.optim.AdamW(reference, **OPTIONS)
    for step in range(10):
        grads = values(seed=step + 1)
        set_grads(ours, grads)
        set_grads(reference, grads)
        optimizer.step()
        adamw.step()
    assert relative_error(ours, reference, start) <= 1e-6


def test_gradients_of_the_parts_of_a_complex_number_keep_their_signs():
    flat = torch.zeros(2)
    real, imaginary = (nn.Parameter(part) for part in flat.split(1))
    (torch.complex(real, imaginary).conj() * (2 - 3j)).real.sum().backward()
    assert imaginary.grad.is_neg()
    AdamOptimizer([real, imaginary], lr=0.1).step()
    assert torch.equal(flat.sign(), torch.tensor([-1.0, 1.0]))


def test_parameters_and_gradients_of_any_strides():
    start = values(shapes=[(4, 3, 2, 2), (6, 5)])
    ours = [nn.Parameter(start[0].to(memory_format=torch.channels_last)), nn.Parameter(start[1].t().contiguous().t())]
    reference = separate(start)
    optimizer, adamw = AdamOptimizer(ours, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    for step in range(10):
        grads = values(seed=step + 1, shapes=[t.shape for t in start])
        for p, q, g in zip(ours, reference, grads):
            p.grad, q.grad = g.t().contiguous().t() if g.dim() == 2 else g, g.clone()
        optimizer.step()
        adamw.step()
    assert relative_error(ours, reference, start) <= 1e-6


@pytest.mark.parametrize("move", ["data", "replaced flat buffer"])
def test_parameters_that_move_keep_their_state(move):
    start = values()
    ours, reference = end_to_end(start), separate(start)
    optimizer, adamw = AdamOptimizer(ours, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    for step in range(10):
        grads = values(seed=step + 1)
        if step == 4 and move == "data":
            for p in ours:
                p.data = p.data.clone()
        if step == 4 and move == "replaced flat buffer":
            for p, moved in zip(ours, end_to_end([p.detach() for p in ours])):
                p.data = moved.data
        set_grads(ours, grads)
        set_grads(reference, grads)
        optimizer.step()
        adamw.step()
    assert relative_error(ours, reference, start) <= 1e-6


def test_a_step_keeps_no_gradient_alive():
    p = nn.Parameter(torch.zeros(3))
    optimizer = AdamOptimizer([p])
    p.grad = torch.ones(3)
    grad = weakref.ref(p.grad)
    optimizer.step()
    p.grad = None
    gc.collect()
    assert grad() is None


@pytest.mark.parametrize("own_counters", [False, True])
def test_autograd_notices_that_a_step_changed_a_saved_parameter(own_counters):
    params = end_to_end(values(shapes=[(2, 2), (2, 2), (2, 2)]))
    if own_counters:  # parameters that are pointed into a buffer later keep their version counters to themselves
        flat, params = params, separate(params)
        for p, view in zip(params, flat):
            p.data, p.grad = view.data, view.grad
    losses = [(torch.ones(1, 2).requires_grad_() @ p).sum() for p in params]
    AdamOptimizer(params).step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_zero_grad_fills_zeros_and_keeps_the_tensors():
    params = [*end_to_end(values()), *separate(values())]
    params[-1].grad = torch.ones(11)
    grads = [p.grad for p in params]
    optimizer = AdamOptimizer(params)
    optimizer.zero_grad()
    assert all(p.grad is g for p, g in zip(params, grads))
    assert all(g is None or g.count_nonzero() == 0 for g in grads)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)


def test_groups_have_their_own_options_and_may_be_added_later():
    start = values()
    ours, reference = end_to_end(start), separate(start)
    optimizers = []
    for cls, params in ((AdamOptimizer, ours), (torch.optim.AdamW, reference)):
        optimizer = cls([{"params": params[:2]}, {"params": params[2:4], "weight_decay": 0.5, "lr": 1e-3}], **OPTIONS)
        optimizers.append(optimizer)
    for step in range(10):
        if step == 3:
            for optimizer, params in zip(optimizers, (ours, reference)):
                optimizer.add_param_group({"params": params[4:], "betas": (0.5, 0.6)})
        set_grads(ours, values(seed=step + 1))
        set_grads(reference, values(seed=step + 1))
        for optimizer in optimizers:
            optimizer.step()
    assert relative_error(ours, reference, start) <= 1e-6


def test_schedulers_of_torch_and_closures():
    start = values()
    ours, reference = end_to_end(start), separate(start)
    for cls, params in ((AdamOptimizer, ours), (torch.optim.AdamW, reference)):
        optimizer = cls(params, **OPTIONS)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)

        def closure(params=params, optimizer=optimizer):
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        losses = []
        for _ in range(10):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert losses[-1] < losses[0]
    assert relative_error(ours, reference, start) <= 1e-6


# --- state ------------------------------------------------------------------------------------------------------


def train(optimizer, params, steps):
    for step in steps:
        set_grads(params, values(seed=step + 1))
        optimizer.step()


def test_state_dicts_are_exchanged_with_adamw():
    start = values()
    ours, reference = end_to_end(start), separate(start)
    optimizer, adamw = AdamOptimizer(ours, **OPTIONS), torch.optim.AdamW(reference, **OPTIONS)
    train(optimizer, ours, range(5))
    train(adamw, reference, range(5))
    ours2, reference2 = separate(reference), separate(ours)
    optimizer2, adamw2 = AdamOptimizer(ours2), torch.optim.AdamW(reference2)
    optimizer2.load_state_dict(copy.deepcopy(adamw.state_dict()))
    adamw2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for o, p in ((optimizer, ours), (adamw, reference), (optimizer2, ours2), (adamw2, reference2)):
        train(o, p, range(5, 10))
    for params in (ours, ours2, reference2):
        assert relative_error(params, reference, start) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gather", [False, True])
def test_training_goes_on_from_a_state_dict_as_if_it_had_not_stopped(dtype, gather):
    start = values()
    straight, first = end_to_end(start, dtype), end_to_end(start, dtype)
    optimizer = AdamOptimizer(straight, hold_steps=4, **OPTIONS)
    train(optimizer, straight, range(8))
    stopped = AdamOptimizer(first, hold_steps=4, **OPTIONS)
    train(stopped, first, range(3))
    saved = copy.deepcopy(stopped.state_dict(gather=gather))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = AdamOptimizer(second, lr=1.0)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["hold_steps"] == 4
    train(resumed, second, range(3, 8))
    for p, q in zip(straight, second):
        assert torch.equal(p, q)


def test_the_scale_of_the_loss_may_change_over_a_state_dict():
    start = values()
    first, reference = end_to_end(start, torch.float16), end_to_end(start, torch.float16)
    train(AdamOptimizer(reference, **OPTIONS), reference, range(0))
    a, b = AdamOptimizer(first, **OPTIONS), AdamOptimizer(reference, **OPTIONS)
    for step in range(10):
        grads = values(seed=step + 1)
        scale = 64 if step < 5 else 4
        if step == 5:
            saved = copy.deepcopy(a.state_dict())
            a = AdamOptimizer(first)
            a.load_state_dict(saved)
        set_grads(first, [g.half() * scale for g in grads])
        set_grads(reference, grads)
        a.step(scale=scale)
        b.step()
    for p, q in zip(first, reference):
        assert torch.equal(p, q)


def test_state_is_there_before_the_first_step_and_for_empty_shards():
    params = [*end_to_end(values()), nn.Parameter(torch.zeros(2), requires_grad=False)]
    params += [nn.Parameter(torch.zeros(0, 3, dtype=torch.float16))]
    state = AdamOptimizer(params).state_dict()["state"]
    assert list(state) == [0, 1, 2, 3, 4, 5, 7]  # a frozen parameter has none
    for index, entry in state.items():
        assert entry["step"].item() == 0
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == params[index].shape
        assert entry["exp_avg"].dtype is torch.float32
    assert state[7]["master"].shape == (0, 3)
    assert state[7]["master"].dtype is torch.float32


def test_weights_loaded_before_the_first_step_are_what_is_trained():
    params = end_to_end(values(), torch.bfloat16)
    optimizer = AdamOptimizer(params, lr=0.0)
    optimizer.state_dict()
    loaded = [t.bfloat16() for t in values(seed=7)]
    with torch.no_grad():
        for p, t in zip(params, loaded):
            p.copy_(t)
    optimizer.step()
    for p, t in zip(params, loaded):
        assert torch.equal(p, t)


def test_sync_masters_takes_over_what_was_written_and_keeps_the_rest():
    params = end_to_end(values(), torch.bfloat16)
    optimizer = AdamOptimizer(params, **OPTIONS)
    train(optimizer, params, range(3))
    masters = [optimizer.state[p]["master"].clone() for p in params]
    with torch.no_grad():
        params[0][1].fill_(5.0)
    optimizer.sync_masters()
    masters[0][1] = 5.0
    for p, m in zip(params, masters):
        assert torch.equal(optimizer.state[p]["master"], m)


def test_a_copy_of_an_optimizer_steps_on_its_own():
    params = end_to_end(values())
    optimizer = AdamOptimizer(params, **OPTIONS)
    train(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    others = twin.param_groups[0]["params"]
    for p, q in zip(params, others):
        q.grad = p.grad.clone()
    optimizer.step()
    twin.step()
    for p, q in zip(params, others):
        assert p is not q
        assert torch.equal(p, q)


def _break(saved, how):
    if how == "groups":
        saved["param_groups"].append(saved["param_groups"][0])
    elif how == "parameters":
        saved["param_groups"][0]["params"].pop()
    elif how == "shape":
        saved["state"][5]["exp_avg_sq"] = torch.zeros(12)
    elif how == "missing":
        del saved["state"][5]["exp_avg"]
    elif how == "step":
        saved["state"][5]["step"] = torch.tensor(float("nan"))
    elif how == "options":
        saved["param_groups"][0]["betas"] = (0.9, 1.5)
    elif how == "empty":
        saved["state"] = {}
    elif how == "unknown":
        saved["state"][17] = saved["state"][0]
    elif how == "no state":
        del saved["state"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("groups", "2 parameter groups and the optimizer has 1"),
        ("parameters", "5 parameters in the state dict and 6"),
        ("shape", r"exp_avg_sq of parameter 5 has shape \(12,\)"),
        ("missing", "parameter 5 has no tensor 'exp_avg'"),
        ("step", "step of parameter 5"),
        ("options", r"param_groups\[0\] .* betas"),
        ("empty", "holds no state"),
        ("unknown", r"\[17\]"),
        ("no state", "no 'state'"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(how, message):
    params = end_to_end(values())
    optimizer = AdamOptimizer(params, **OPTIONS)
    train(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    other = AdamOptimizer(separate(values()), lr=7.0)
    saved = copy.deepcopy(other.state_dict())
    _break(saved, how)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in entry.items())


@pytest.mark.parametrize(
    "options", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": float("nan")}, {"hold_steps": -1}]
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamOptimizer(separate(values()), **options)


def test_dtypes_that_adam_cannot_train_are_refused_and_leave_no_group_behind():
    optimizer = AdamOptimizer(separate(values()))
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_given_twice_is_refused():
    params = separate(values())
    with pytest.raises(ValueError, match="a parameter is in the group twice"):
        AdamOptimizer([*params, params[0]])
    optimizer, again = AdamOptimizer(params), nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="a parameter is in the group twice"):
        optimizer.add_param_group({"params": [again, again]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamOptimizer(table.parameters()).step()
