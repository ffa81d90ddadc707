"""Optimizers of other classes go on over shards as they would have gone on over unsharded ones."""

import copy
import functools
import inspect
import io

import pytest
import torch
import torch.distributed as dist
from galore_reference import FOLDER, reference_optimizer
from layouts import layout, shard_slice, shards, tensors, update_error
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_comm import local_tensor, shard_of, slice_of
from bmt_optim import (
    AdamOffloadOptimizer,
    AdamOptimizer,
    AdamW,
    DistributedOptimizer,
    Lamb,
    Muon,
    TorchAdafactor,
    to_distributed,
)
from bmt_optim.adapters import ADAPTERS, ELEMENTWISE, REFUSED, explanation, known_name
from bmt_optim.convert import distributed_where_needed

SHAPES = [(12, 5), (7, 4), (3, 9), (5,), (1, 6), (4, 6, 3, 2), (2,), (), (3, 6, 5)]


def hugging_face(params, **options):
    return pytest.importorskip("transformers").Adafactor(params, **options)


def came(params, **options):
    from came_pytorch import CAME

    return CAME(params, **{"lr": 0.1, "weight_decay": 0.1, **options})


def galore(params, **options):
    if FOLDER is None:
        pytest.skip("galore-torch and transformers are not installed")
    projected = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    groups = [{"params": projected, "rank": 2, "update_proj_gap": 7, "scale": 0.5, "proj_type": "std"}]
    groups += [{"params": rest}] if rest else []
    return reference_optimizer(groups, **{"lr": 0.05, "weight_decay": 0.1, **options})


def of_torch(name, matrices=False):
    def make(params, **options):
        return getattr(torch.optim, name)([p for p in params if not matrices or p.dim() == 2], **options)

    return make


ADAM = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3}
# Makers, and options that are none of the defaults of either class.
UNUSUAL = {
    "AdamW": (of_torch("AdamW"), {**ADAM, "weight_decay": 0.3}),
    "Adam": (of_torch("Adam"), {**ADAM, "weight_decay": 0.3}),
    "Adam, the other way": (of_torch("Adam"), {**ADAM, "weight_decay": 0.3, "maximize": True}),
    "AdamOptimizer": (AdamOptimizer, {**ADAM, "weight_decay": 0.3}),
    "torch Adafactor": (
        of_torch("Adafactor"),
        {"lr": 0.05, "beta2_decay": -0.3, "eps": (0.4, 0.9), "d": 1.5, "weight_decay": 0.1},
    ),
    "Adafactor": (
        hugging_face,
        {"lr": 0.1, "eps": (1e-3, 0.1), "clip_threshold": 0.5, "decay_rate": -0.6, "beta1": 0.8, "weight_decay": 0.1}
        | {"scale_parameter": False, "relative_step": False},
    ),
    "Adafactor, warming up": (hugging_face, {"warmup_init": True}),
    "CAME": (came, {"eps": (1e-3, 1e-2), "clip_threshold": 0.5, "betas": (0.8, 0.9, 0.99), "weight_decay": 0.3}),
    "GaLore": (galore, {**ADAM, "weight_decay": 0.3, "correct_bias": False}),
    "Muon": (
        of_torch("Muon", matrices=True),
        {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8, "nesterov": False, "ns_coefficients": (3.0, -4.0, 2.0)}
        | {"eps": 1e-3, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
    ),
}
if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters:  # from 2.7 on
    decoupled = functools.partial(of_torch("Adam"), decoupled_weight_decay=True)
    UNUSUAL["Adam, decoupled"] = (decoupled, {**ADAM, "weight_decay": 0.3})
MAKERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.02), weight_decay=0.1),
    "torch Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.5, weight_decay=0.1),
    "Adafactor": hugging_face,
    "CAME": came,
    "GaLore": galore,
    "Lamb": lambda ps: Lamb(ps, lr=0.02, weight_decay=0.1),
    **{f"{name}, unusual": functools.partial(make, **options) for name, (make, options) in UNUSUAL.items()},
}
if not hasattr(torch.optim, "Muon"):  # before 2.9
    del MAKERS["Muon, unusual"], UNUSUAL["Muon"]


def gradients(step, shapes=SHAPES):
    return tensors(shapes, 100 + step)


def train(optimizer, params, steps, shapes=SHAPES):
    for step in steps:
        for p, g in zip(params, gradients(step, shapes)):
            p.grad = shard_of(g, slice_of(p)).clone()
        optimizer.step()


def check_continuation(ctx, name, in_place):
    params = [nn.Parameter(t) for t in tensors(SHAPES)]
    start = [p.detach().clone() for p in params]  # a number may come back to where it was after five steps
    optimizer = MAKERS[name](params)
    for index, group in enumerate(optimizer.param_groups):
        group["mine"] = index
    train(optimizer, params, range(5))
    unsharded = copy.deepcopy((params, optimizer))
    unsharded[1]._warned_capturable_if_run_uncaptured = True  # a copy lacks it, and on CUDA torch's Adafactor needs it
    if in_place:
        for p, where in zip(params, layout(ctx, SHAPES)):
            p.data = shard_of(p.detach(), where).clone()
            p.bmt_slice = where
        converted = to_distributed(optimizer)
    else:
        old = params
        params = shards(old, layout(ctx, SHAPES))
        order = {p: n for n, p in enumerate(old)}
        converted = to_distributed(optimizer, [params[order[p]] for g in optimizer.param_groups for p in g["params"]])
    assert isinstance(converted, DistributedOptimizer)
    assert converted.param_groups is optimizer.param_groups
    assert [group["mine"] for group in converted.param_groups] == list(range(len(converted.param_groups)))
    assert converted.state[converted.param_groups[0]["params"][0]]["step"] in ((0,) if "Muon" in name else (5,))
    train(converted, params, range(5, 10))
    train(unsharded[1], unsharded[0], range(5, 10))
    assert update_error(params, unsharded[0], start) <= 1e-5, name


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("in_place", [True, False])
def test_state_and_options_go_on_over_row_shards(ctx, in_place):
    for name in MAKERS:
        check_continuation(ctx, name, in_place)


@pytest.mark.ranks(4, tp_size=2)
def test_state_and_options_go_on_over_tensor_parallel_shards(ctx):
    for name in MAKERS:
        check_continuation(ctx, name, True)


@pytest.mark.parametrize("name", UNUSUAL)
def test_groups_added_later_have_the_options_that_the_optimizer_was_made_with(name):
    make, options = UNUSUAL[name]
    converted = to_distributed(make([nn.Parameter(torch.ones(3, 2))], **options))
    converted.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert options.items() <= converted.param_groups[-1].items()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_on_in_fp32_from_the_rounded_state(dtype):
    shapes = [(4, 3), (5,)]
    halves = [nn.Parameter(t.to(dtype)) for t in tensors(shapes)]
    given = torch.optim.AdamW(halves, lr=0.1)
    for step in range(2):
        for p, g in zip(halves, gradients(step, shapes)):
            p.grad = g.to(dtype)
        given.step()
    unsharded = [nn.Parameter(p.detach().float()) for p in halves]
    reference = torch.optim.AdamW(unsharded, lr=0.1)
    reference.load_state_dict(given.state_dict())  # which makes it fp32, too
    converted = to_distributed(given)
    for step in (2, 3):
        for p, q, g in zip(halves, unsharded, gradients(step, shapes)):
            p.grad = g.to(dtype)
            q.grad = p.grad.float()
        converted.step()
        reference.step()
    for p, q in zip(halves, unsharded):
        assert {t.dtype for t in converted.state[p].values() if torch.is_tensor(t)} == {torch.float32}
        torch.testing.assert_close(converted.state[p]["master"], q.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            converted.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"], rtol=1e-6, atol=1e-7
        )
        assert torch.equal(p, converted.state[p]["master"].to(dtype))


@pytest.mark.ranks(2, init=False)
def test_what_was_trained_as_dtensors_goes_on():
    dist.init_process_group("gloo")
    start = tensors([(5, 4), (5,)], 7)
    # The others cannot step DTensors themselves.
    for name, trained in (("AdamW", 3), ("torch Adafactor", 0), ("Adafactor", 0), ("CAME", 0)):
        unsharded, sharded = (nn.Linear(4, 5) for _ in range(2))
        for model in (unsharded, sharded):
            model.load_state_dict(dict(zip(("weight", "bias"), start)))
        fully_shard(sharded)
        theirs, converted = (MAKERS[name](model.parameters()) for model in (unsharded, sharded))
        for step in range(6):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            for model, part in ((unsharded, x), (sharded, x[2 * dist.get_rank() :][:2])):
                model.zero_grad()
                model(part).pow(2).mean().backward()
            if step == trained:
                middle = [p.detach().clone() for p in unsharded.parameters()]
                distributed = to_distributed(converted)
            theirs.step()
            (converted if step < trained else distributed).step()
        assert update_error(sharded.parameters(), unsharded.parameters(), middle) <= 1e-5, name


# --- what stands for what -----------------------------------------------------------------------------------------


def sharded_pair(ctx, make):
    """An optimizer over row shards, and one over unsharded parameters."""
    shapes = [(6, 4), (5, 3)]
    params = shards(tensors(shapes), [shard_slice(s, ctx.world) for s in shapes])
    unsharded = [nn.Parameter(t) for t in tensors(shapes)]
    return shapes, params, make(params), unsharded, make(unsharded)


@pytest.mark.ranks(2)
def test_the_given_optimizer_stands_for_the_result(ctx):
    shapes, params, given, unsharded, reference = sharded_pair(ctx, lambda ps: torch.optim.Adafactor(ps, lr=0.1))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        given,
        [torch.optim.lr_scheduler.ConstantLR(given, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(given, 0.7)],
        [2],
    )
    calls = []
    given.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    groups = given.param_groups[0]
    converted = to_distributed(given)
    assert given.param_groups[0] is converted.param_groups[0] is groups
    rates = [0.05, 0.05, 0.1 * 0.7, 0.1 * 0.49]
    for step, rate in enumerate(rates):
        reference.param_groups[0]["lr"] = rate if step < 2 else converted.param_groups[0]["lr"]
        train(reference, unsharded, [step], shapes)
        train([given, converted][step % 2], params, [step], shapes)
        scheduler.step()
    assert calls == [converted] * 4
    assert update_error(params, unsharded, tensors(shapes)) <= 1e-5
    # State goes through either, and to the reference.
    saved = io.BytesIO()
    gathered = converted.state_dict(gather=True)
    assert torch.equal(given.state_dict()["state"][0]["step"], torch.tensor(4.0))  # as ours has it
    torch.save(given.state_dict(), saved)
    saved.seek(0)
    given.load_state_dict(torch.load(saved, weights_only=True))
    assert given.state is converted.state
    for state in (given.state, converted.state):
        assert state[params[0]]["step"] == 4
        assert state[params[0]]["row_var"].shape == (len(local_tensor(params[0])), 1)
    if ctx.rank == 0:
        torch.testing.assert_close(gathered["state"], reference.state_dict()["state"], rtol=1e-5, atol=1e-6)
        reference.load_state_dict(gathered)
        train(reference, unsharded, [4], shapes)
    with pytest.raises(TypeError, match="float64"):
        given.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    given.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(converted.param_groups) == 2
    given.zero_grad()
    assert params[0].grad is None  # as torch's optimizers do


@pytest.mark.ranks(1)
def test_the_schedule_of_hugging_face_still_reads_what_adafactor_does(ctx):
    from transformers.optimization import AdafactorSchedule

    shapes = [(6, 4), (5,)]
    params, unsharded = ([nn.Parameter(t) for t in tensors(shapes)] for _ in range(2))
    given, reference = hugging_face(params), hugging_face(unsharded)
    schedules = AdafactorSchedule(given), AdafactorSchedule(reference)  # which set lr=0.0 before the first step
    to_distributed(given)
    for step in range(3):
        train(given, params, [step], shapes)
        train(reference, unsharded, [step], shapes)
        assert update_error(params, unsharded, tensors(shapes)) <= 1e-5
        for each in schedules:
            each.step()
        assert given.param_groups[0]["lr"] == pytest.approx(float(reference.param_groups[0]["lr"]))
    schedule = schedules[0]
    scale = given.state[params[0]]["RMS"]
    assert float(schedule.get_lr()[0]) == pytest.approx(1e-2 * scale.item())


@pytest.mark.ranks(2)
def test_an_unsharded_state_of_ours_is_sharded_and_one_that_does_not_fit_changes_nothing(ctx):
    shapes = [(6, 4), (5, 3)]
    params = [nn.Parameter(t) for t in tensors(shapes)]
    optimizer = Muon([{"params": [p]} for p in params])
    train(optimizer, params, range(2), shapes)
    wanted = [
        shard_of(optimizer.state[p]["momentum_buffer"], shard_slice(s, ctx.world)) for p, s in zip(params, shapes)
    ]
    with pytest.raises(ValueError, match=r"params\[1\] has shape \(5,\), and the optimizer's parameter \(5, 3\)"):
        to_distributed(optimizer, [params[0], nn.Parameter(torch.ones(5))])
    with pytest.raises(ValueError, match="params are 1 and must be 2 tensors"):
        to_distributed(optimizer, params[:1])
    with pytest.raises(ValueError, match="must be 2 tensors"):
        to_distributed(optimizer, [params[0], "weight"])
    with pytest.raises(TypeError, match="float64"):
        to_distributed(optimizer, [params[0], params[1].detach().double()])
    assert [group["params"] for group in optimizer.param_groups] == [[p] for p in params]
    assert optimizer.state[params[0]]["momentum_buffer"].shape == (6, 4)
    parts = shards(tensors(shapes), [shard_slice(s, ctx.world) for s in shapes])
    assert to_distributed(optimizer, parts) is optimizer
    for part, momentum in zip(parts, wanted):
        assert torch.equal(optimizer.state[part]["momentum_buffer"], momentum)
    train(optimizer, parts, [2], shapes)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW([p], amsgrad=True), r"param_groups\[0\] of AdamW: amsgrad=True"),
        (lambda p: torch.optim.AdamW([p], capturable=True), "capturable=True"),
        (lambda p: torch.optim.AdamW([p], differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.Adafactor([p], maximize=True), "maximize=True"),
        (lambda p: AdamOptimizer([p], hold_steps=2), "hold_steps=2"),
        (lambda p: AdamOffloadOptimizer([p]), "in host memory"),
        (lambda p: torch.optim.LBFGS([p]), "LBFGS cannot be made .* line"),
        (lambda p: torch.optim.SGD([p], lr=0.1), "SGD is not known"),
    ],
)
def test_what_means_something_else_is_refused_and_nothing_changes(make, message):
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = make(p)
    before = {key: value for key, value in vars(optimizer).items() if key != "state"}
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises((TypeError, ValueError), match=message):
        to_distributed(optimizer)
    assert optimizer.param_groups == groups
    assert {key: value for key, value in vars(optimizer).items() if key != "state"} == before


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([p])
    train(optimizer, [p], [0], [(3, 2)])
    optimizer.state[p]["exp_avg"] = torch.ones(2, 2)
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(2, 2\)"):
        to_distributed(optimizer)
    assert optimizer.param_groups == groups
    assert "step" not in vars(optimizer)


class Renamed(torch.optim.Adafactor):
    """The same under another name."""

    def __init__(self, params):
        super().__init__(params, lr=0.3)


class Changed(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class LeftHalf(torch.optim.SGD):
    def _init_group(self, group, *args):
        return super()._init_group(group, *args)


class SOAP(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        pass


class Lion(SOAP):
    pass


class FusedLAMB(SOAP):
    pass


@pytest.mark.ranks(2)
def test_over_shards_only_what_is_right_is_taken(ctx):
    unsharded = [nn.Parameter(torch.ones(4, 2))]
    parts = shards(unsharded, [shard_slice((4, 2), ctx.world)])
    for make in (Changed, LeftHalf, SOAP, Lion, FusedLAMB, torch.optim.LBFGS, torch.optim.Adafactor):
        optimizer = make(unsharded)
        assert distributed_where_needed(optimizer) is optimizer
    for make in (AdamOptimizer, AdamOffloadOptimizer, Lamb, torch.optim.SGD, torch.optim.Adam):
        optimizer = make(parts)
        assert distributed_where_needed(optimizer) is optimizer
    assert type(distributed_where_needed(Renamed(parts))).__name__ == "TorchAdafactor"
    for make, message in (
        (Changed, r"test_convert\.Changed is not known.*elementwise=True"),
        (LeftHalf, "LeftHalf is not known"),
        (Lion, "Lion is not known"),
        (SOAP, r"SOAP needs statistics of whole layers.*use bmt_optim\.SOAP"),
        (FusedLAMB, r"FusedLAMB needs statistics of whole layers.*use bmt_optim\.Lamb"),
        (torch.optim.LBFGS, "LBFGS cannot be made"),
    ):
        with pytest.raises(TypeError, match=message):
            distributed_where_needed(make(parts))
    optimizer = Lion(parts)
    assert distributed_where_needed(optimizer, elementwise=True) is optimizer
    optimizer.elementwise = True
    assert distributed_where_needed(optimizer) is optimizer
    with pytest.raises(TypeError, match="LBFGS"):
        distributed_where_needed(torch.optim.LBFGS(parts), elementwise=True)
    assert isinstance(distributed_where_needed(torch.optim.Adafactor(parts), elementwise=True), DistributedOptimizer)


def test_names_are_those_of_the_classes():
    mine = [AdamOptimizer, AdamOffloadOptimizer]
    torchs = [cls for cls in vars(torch.optim).values() if inspect.isclass(cls) and cls is not torch.optim.Optimizer]
    known = {known_name(cls) for cls in [*mine, *torchs]} - {None}
    theirs = ("transformers.", "came_pytorch.", "galore_torch.")
    expected = {n for n in ADAPTERS.keys() | ELEMENTWISE | REFUSED.keys() if not n.startswith(theirs)}
    if not hasattr(torch.optim, "Muon"):
        expected.remove("torch.optim.Muon")
    assert known == expected
    # Those of torch that are neither: a class for sparse gradients.
    assert {cls.__name__ for cls in torchs if known_name(cls) is None} == {"SparseAdam"}
    assert "SparseAdam is not known" in explanation(torch.optim.SparseAdam)
    for make in (hugging_face, came, *([] if FOLDER is None else [galore])):
        assert known_name(type(make([nn.Parameter(torch.ones(2))]))) in ADAPTERS


@pytest.mark.parametrize("name", sorted(name for name in ELEMENTWISE if name.startswith("torch.")))
def test_elementwise_optimizers_of_torch_do_the_same_to_shards_as_to_unsharded_parameters(name):
    make = getattr(torch.optim, name.split(".")[-1])
    options = {"lr": 0.05} if make is torch.optim.Rprop else {"lr": 0.05, "weight_decay": 0.1}
    if make in (torch.optim.SGD, torch.optim.RMSprop):
        options["momentum"] = 0.9
    unsharded = nn.Parameter(tensors([(6, 4)])[0])
    parts = [nn.Parameter(part.clone()) for part in unsharded.detach().split([1, 5])]
    optimizers = [make([unsharded], **options), *(make([part], **options) for part in parts)]
    for step in range(5):
        unsharded.grad = gradients(step, [(6, 4)])[0]
        for part, grad in zip(parts, unsharded.grad.split([1, 5])):
            part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.cat([p.detach() for p in parts]), unsharded.detach(), rtol=1e-6, atol=1e-7)


def test_an_unused_name_of_ours():
    assert type(to_distributed(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))) is AdamW


def test_adafactor_of_torch_goes_on_with_our_state():
    params = [nn.Parameter(tensor) for tensor in tensors([(4, 3), (5,)])]
    ours = TorchAdafactor(params)
    for step in range(2):
        for param, grad in zip(params, tensors([(4, 3), (5,)], step + 1)):
            param.grad = grad
        ours.step()
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    theirs = torch.optim.Adafactor(twins)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for param, twin, grad in zip(params, twins, tensors([(4, 3), (5,)], 9)):
        param.grad, twin.grad = grad.clone(), grad.clone()
    ours.step()
    theirs.step()
    for param, twin in zip(params, twins):
        torch.testing.assert_close(param, twin)
