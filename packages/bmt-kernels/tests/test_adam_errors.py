"""A wrong call says what is wrong with which entry, and leaves every tensor as it was."""

from __future__ import annotations

import math

import pytest
import torch

import bmt_kernels
from bmt_kernels import _native

NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")


@pytest.fixture
def arguments(device):
    """Two good parameters with all that belongs to them."""
    lists = {name: [torch.full((4, 6), 0.5, device=device), torch.full((5,), 0.25, device=device)] for name in NAMES}
    lists["params"] = [p.bfloat16() for p in lists["params"]]
    return {**lists, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 1}


def replace(name, index, value):
    def change(arguments):
        entry = arguments[name][index]
        arguments[name][index] = value(entry) if callable(value) else value

    return change


def put(name, value):
    def change(arguments):
        arguments[name] = value(arguments[name]) if callable(value) else value

    return change


def share(name, index, other, other_index):
    def change(arguments):
        arguments[name][index] = arguments[other][other_index]

    return change


def overlap_partly(arguments):
    whole = torch.full((9,), 0.25, device=arguments["grads"][0].device)
    arguments["exp_avgs"][1], arguments["exp_avg_sqs"][1] = whole[:5], whole[4:]


WRONG = {
    "fewer gradients": (put("grads", lambda g: g[:1]), ValueError, r"grads has 1 entries and params has 2"),
    "more masters": (put("masters", lambda m: [*m, m[0]]), ValueError, r"masters has 3 entries and params has 2"),
    "a tensor for a list": (put("params", lambda p: p[0]), TypeError, r"params is a Tensor; pass a list"),
    "an iterator for a list": (put("grads", iter), TypeError, r"grads is a list_iterator; pass a list"),
    "no parameters": (put("params", None), TypeError, r"params is a NoneType; pass a list"),
    "no gradients": (put("grads", None), TypeError, r"grads is a NoneType; pass a list"),
    "no moments": (put("exp_avgs", None), TypeError, r"exp_avgs is a NoneType; pass a list"),
    "no gradient": (replace("grads", 1, None), TypeError, r"grads\[1\] is a NoneType"),
    "a number": (replace("params", 0, 3.0), TypeError, r"params\[0\] is a float"),
    "a wrong shape": (replace("grads", 0, torch.t), ValueError, r"grads\[0\] has shape \(6, 4\); it must be \(4, 6\)"),
    "a flat moment": (replace("exp_avgs", 0, torch.flatten), ValueError, r"exp_avgs\[0\] has shape \(24,\)"),
    "fp64 parameters": (replace("params", 1, torch.Tensor.double), TypeError, r"params\[1\] has dtype torch.float64"),
    "integer gradients": (replace("grads", 1, torch.Tensor.int), TypeError, r"grads\[1\] has dtype torch.int32"),
    "half moments": (
        replace("exp_avg_sqs", 1, torch.Tensor.half),
        TypeError,
        r"exp_avg_sqs\[1\] .* must be torch.float32",
    ),
    "half masters": (replace("masters", 0, torch.Tensor.bfloat16), TypeError, r"masters\[0\] .* must be torch.float32"),
    "a master of fp32": (replace("params", 0, torch.Tensor.float), TypeError, r"masters\[0\] belongs to a float32"),
    "another device": (
        replace("exp_avgs", 1, lambda t: t.to("meta")),
        ValueError,
        r"exp_avgs\[1\] is on meta; it must be on",
    ),
    "sparse gradients": (
        replace("grads", 0, torch.Tensor.to_sparse),
        TypeError,
        r"grads\[0\] has layout torch.sparse_coo",
    ),
    "every other element": (
        replace("grads", 1, lambda t: torch.zeros(10, device=t.device)[::2]),
        ValueError,
        r"grads\[1\] has strides \(2,\)",
    ),
    "an expanded gradient": (
        replace("grads", 1, lambda t: t[:1].expand(5)),
        ValueError,
        r"grads\[1\] has strides \(0,\)",
    ),
    "another order of memory": (
        replace("exp_avgs", 0, lambda t: t.t().contiguous().t()),
        ValueError,
        r"exp_avgs\[0\] has strides \(1, 4\)",
    ),
    "one moment for both": (share("exp_avgs", 0, "exp_avg_sqs", 0), ValueError, r"overlaps .* in memory"),
    "a parameter twice": (
        lambda a: [share(name, 1, name, 0)(a) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")],
        ValueError,
        r"overlaps .* in memory",
    ),
    "the gradient as moment": (share("exp_avgs", 1, "grads", 1), ValueError, r"overlaps .* in memory"),
    "moments one element into each other": (overlap_partly, ValueError, r"exp_avg_sqs\[1\] overlaps exp_avgs\[1\]"),
    "a negative lr": (put("lr", -0.1), ValueError, r"lr is -0.1; it must be finite and not negative"),
    "a NaN lr": (put("lr", math.nan), ValueError, r"lr is nan"),
    "an integer lr": (put("lr", torch.tensor(1)), TypeError, r"lr has dtype torch.int64; it must be torch.float32 or"),
    "two lrs": (put("lr", torch.ones(2)), ValueError, r"lr has shape \(2,\)"),
    "an lr elsewhere": (put("lr", torch.ones((), device="meta")), ValueError, r"lr is on meta; it must be on"),
    "an infinite eps": (put("eps", math.inf), ValueError, r"eps is inf"),
    "a negative decay": (put("weight_decay", -1), ValueError, r"weight_decay is -1.0"),
    "beta of one": (put("betas", (0.9, 1.0)), ValueError, r"betas\[1\] is 1.0; it must be less than 1"),
    "a negative beta": (put("betas", (-0.1, 0.9)), ValueError, r"betas\[0\] is -0.1"),
    "one beta": (put("betas", 0.9), TypeError, r"betas is 0.9; it must be a pair"),
    "step zero": (put("step", 0), ValueError, r"step is 0; steps count from 1"),
    "a float step": (put("step", 1.0), TypeError, r"step is a float; it must be an int"),
    "a bfloat16 step": (put("step", torch.ones(1).bfloat16()), TypeError, r"step has dtype torch.bfloat16"),
    "a step elsewhere": (put("step", torch.ones((), device="meta")), ValueError, r"step is on meta; it must be on"),
    "a negative hold": (put("hold_steps", -1), ValueError, r"hold_steps is -1; it must not be negative"),
    "a float hold": (put("hold_steps", 1.0), TypeError, r"hold_steps is a float; it must be an int"),
    "a number for a factor": (
        put("grad_factor", 0.5),
        TypeError,
        r"grad_factor is a float; it must be a torch",
    ),
    "an fp64 factor": (put("grad_factor", torch.ones(()).double()), TypeError, r"grad_factor has dtype torch.float64"),
    "a list of statistics": (put("delta_stats", [0.0, 0.0]), TypeError, r"delta_stats is a list"),
    "fp32 statistics": (put("delta_stats", torch.zeros(2)), TypeError, r"delta_stats has dtype torch.float32"),
    "three statistics": (put("delta_stats", torch.zeros(3).double()), ValueError, r"delta_stats has shape \(3,\)"),
    "statistics elsewhere": (
        put("delta_stats", torch.zeros(2, dtype=torch.float64, device="meta")),
        ValueError,
        r"delta_stats is on meta; it must be on",
    ),
    "a zero scale": (put("grad_scale", 0.0), ValueError, r"grad_scale is 0.0; it must be finite and positive"),
    "an infinite scale": (put("grad_scale", math.inf), ValueError, r"grad_scale is inf"),
    "a boolean flag": (put("found_inf", True), TypeError, r"found_inf is a bool"),
    "an integer flag": (
        lambda a: a.update(found_inf=torch.zeros(1, dtype=torch.int32)),
        TypeError,
        r"found_inf has dtype torch.int32",
    ),
    "two flags": (
        lambda a: a.update(found_inf=torch.zeros(2, device=a["grads"][0].device)),
        ValueError,
        r"found_inf has shape \(2,\)",
    ),
    "a flag elsewhere": (
        lambda a: a.update(found_inf=torch.zeros(1, device="meta")),
        ValueError,
        r"found_inf is on meta; it must be on",
    ),
}


@pytest.fixture(params=["best", "attributes"])
def reading(request):
    """How the compiled module reads tensors: as it does here, and as it does with an older PyTorch."""
    yield _native.configure_reading(allow_exchange=request.param == "best")
    _native.configure_reading()


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_is_named_and_changes_nothing(arguments, case):
    change, error, message = WRONG[case]
    arguments["grad_scale"] = 1.0
    tensors = [t for name in NAMES for t in arguments[name]]
    before = [t.clone() for t in tensors]
    change(arguments)
    with pytest.raises(error, match=message):
        bmt_kernels.adam_step(**arguments)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", torch.tensor(-0.5), r"lr is -0.5; it must be finite and not negative"),
        ("lr", torch.tensor(math.nan), r"lr is nan"),
        ("step", torch.tensor(0), r"step is 0; steps count from 1"),
        ("step", torch.tensor(1.5), r"step is 1.5; it must be a whole number"),
        ("step", torch.tensor(math.inf), r"step is inf; it must be a whole number"),
    ],
)
def test_numbers_in_cpu_tensors_are_checked_like_numbers(name, value, message):
    lists = [[torch.full((3,), 0.5)] for _ in range(4)]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 1, name: value}
    with pytest.raises(ValueError, match=message):
        bmt_kernels.adam_step(*lists, **options)
    assert all((tensors[0] == 0.5).all() for tensors in lists)


def test_the_unchanged_call_is_right(arguments):
    before = [p.clone() for p in arguments["params"]]
    bmt_kernels.adam_step(**arguments)
    assert not any(torch.equal(now, then) for now, then in zip(arguments["params"], before))


def test_wrappers_without_memory_are_told_to_unwrap(device):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32, device=device)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise AssertionError("not to be computed with")

    rest = [[torch.zeros(3, device=device)] for _ in range(3)]
    with pytest.raises(TypeError, match=r"params\[0\] is a Wrapper without memory of its own"):
        bmt_kernels.adam_step([Wrapper()], *rest, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=1)
