"""Tensors that are something else than elements in memory, and settings of PyTorch that change how tensors are made."""

import sys

import pytest
import torch
from torch import Tensor

import bmt_kernels
from bmt_kernels import reference


class Wrapped(Tensor):
    """As DTensor is: a tensor of another class, which has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor without memory")


ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1.0, "weight_decay": 0.0, "step": 1}


def adam(**given):
    tensors = [[torch.ones(4)] for _ in range(4)]
    try:
        bmt_kernels.adam_step(*tensors, **{**ADAM, **given})
    finally:
        assert torch.equal(tensors[0][0], torch.ones(4))


def factored(**given):
    param = torch.ones(2, 2)
    rows = torch.ones(2), torch.ones(2)
    sizes = given.pop("step_sizes", torch.ones(1))
    try:
        bmt_kernels.factored_update([param], [torch.ones(2, 2)], [rows[0]], [rows[1]], sizes, **given)
    finally:
        assert torch.equal(param, torch.ones(2, 2))


def dequantize(absmax):
    bmt_kernels.dequantize_blockwise(torch.zeros(8, dtype=torch.uint8), absmax, signed=True)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (adam, "found_inf", torch.ones(1)),
        (adam, "grad_factor", torch.ones(1)),
        (adam, "lr", torch.ones(1)),
        (adam, "delta_stats", torch.zeros(2, dtype=torch.float64)),
        (factored, "found_inf", torch.ones(1)),
        (factored, "step_sizes", torch.ones(1)),
        (dequantize, "absmax", torch.ones(1)),
        (lambda out: bmt_kernels.has_inf_or_nan([torch.ones(3)], out=out), "out", torch.zeros(1)),
    ],
)
@pytest.mark.skipif(not bmt_kernels.build_info().cpu_compiled, reason="plain PyTorch takes what it can")
def test_tensors_without_memory_are_refused(call, name, value):
    with pytest.raises(TypeError, match=f"{name} is a Wrapped without memory of its own"):
        call(**{name: Wrapped(value)})


def test_square_sums_under_other_defaults():
    tensors = [torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.empty(0), torch.ones(2, 3).t()]
    wanted = torch.tensor([14.0, 0.0, 6.0])
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        sums = bmt_kernels.square_sums(tensors)
        contiguous = bmt_kernels.square_sums(tensors[:2])
        rounded = bmt_kernels.round_stochastically(tensors[0], torch.bfloat16, seed=1)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert torch.equal(sums, wanted)
    assert torch.equal(contiguous, wanted[:2])
    assert rounded.device.type == "cpu"
    assert not any(tensor.requires_grad for tensor in (sums, contiguous, rounded))


def test_numbers_that_are_negated_when_they_are_read():
    plain = torch.linspace(-1, 1, 64)
    negated = torch._neg_view(plain)
    quantized, absmax = bmt_kernels.quantize_blockwise(negated, signed=True)[:2]
    wanted, largest = bmt_kernels.quantize_blockwise(-plain, signed=True)[:2]
    assert torch.equal(quantized, wanted)
    assert torch.equal(absmax, largest)
    rounded = bmt_kernels.round_stochastically(negated, torch.bfloat16, seed=3)
    assert torch.equal(rounded, bmt_kernels.round_stochastically(-plain, torch.bfloat16, seed=3))


def test_one_number_that_is_negated_when_it_is_read():
    """As a gradient may be: the imaginary part of one conjugated number is contiguous."""
    angle = torch.full((1,), 0.5, requires_grad=True)
    (torch.complex(torch.zeros(1), angle).conj() * (2 + 3j)).real.sum().backward()
    grad = angle.grad
    assert grad.is_neg()
    assert grad.is_contiguous()

    def state(dtype=torch.float32):
        return [torch.zeros(1, dtype=dtype)]

    lamb = {name: ADAM[name] for name in ("betas", "eps", "weight_decay", "step")}
    for call in (
        lambda: bmt_kernels.adam_step(state(), [grad], state(), state(), **ADAM),
        lambda: bmt_kernels.adam8bit_step(
            state(), [grad], state(torch.uint8), state(torch.uint8), state(), state(), **ADAM
        ),
        lambda: bmt_kernels.lamb_moments(state(), [grad], state(), state(), **lamb),
    ):
        with pytest.raises(TypeError, match=r"grads\[0\] is negated when it is read; pass it as \.resolve_neg"):
            call()
    for others in ([], [torch.ones(2, 2).t()], [torch.ones(2, 3).t()], [torch.ones(1, dtype=torch.float64)]):
        assert bmt_kernels.has_inf_or_nan([grad, *others]) == 0
        assert bmt_kernels.power_sum([grad, *others], 1).total == 3 + sum(other.sum() for other in others)
        assert bmt_kernels.square_sums([grad, *others])[0] == 9


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_upstream_gradient_that_is_negated_when_it_is_read(reduction):
    """As that of the imaginary part of one number is."""
    logits, target = torch.linspace(-1, 1, 4)[None], torch.tensor([1])
    gradients = []
    for function in (bmt_kernels.cross_entropy, torch.nn.functional.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, reduction=reduction)
        (torch.complex(torch.zeros_like(loss), loss).conj() * (2 + 3j)).real.sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients)


def test_seeds_of_64_bits_are_independent():
    values = torch.full((4096,), 1 + 2**-9)  # one in four goes up: 62 % are equal
    results = [
        bmt_kernels.round_stochastically(values, torch.bfloat16, seed=seed)
        for seed in (1, 1 + (1 << 31), -1, (1 << 31) - 1, 5 << 31, 9 << 40)
    ]
    for i, result in enumerate(results):
        for other in results[:i]:
            assert 0.55 < (result == other).float().mean() < 0.7


def test_one_scale_for_all_numbers_however_large_the_block_is():
    values = torch.tensor([1.0, -2.0, 127.0])
    for block in (3, 1 << 40, sys.maxsize):
        numbers, scales = torch.zeros(3, dtype=torch.uint8), torch.zeros(1)
        bmt_kernels.pack_blocks(values, numbers, scales, kind="int8", block=block)
        out = torch.zeros(3)
        bmt_kernels.unpack_blocks(numbers, scales, out, kind="int8", block=block)
        assert torch.equal(out, values)


def test_plain_statistics_do_not_heed_autocast():
    torch.manual_seed(0)
    logits, target, weight = 5 * torch.randn(8, 64), torch.randint(0, 64, (8,)), torch.rand(64)
    arguments = (logits, target, weight, 0, -100, True)
    wanted = reference.cross_entropy_statistics(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference.cross_entropy_statistics(*arguments), wanted)
